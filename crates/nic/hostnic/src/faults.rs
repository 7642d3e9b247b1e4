//! Faults of devices of the machine, for programs that were started to take them
//! (`UNBROKEN_DEVICE_FAULTS`): without that nothing of this is in any path.
//!
//! - `words`: faults in words.
//! - `table`: those that are set, and the processes that take them: files in the runtime folder.
//! - `watch`: a thread of the process that looks at the table.
//! - `link`, `cable`: the faults that are not of a program: a network interface goes down, or
//!   drops everything.
//! - `life`, `seam`, `seam_qp`: what faults make of an open device, and of what is asked of it.
//!
//! Those of programs are at the seam of verbs: the device itself works on, and what peers have sent
//! to it may still arrive until its QPs have ended.

mod cable;
pub(crate) mod life;
mod link;
mod seam;
mod seam_qp;
mod table;
pub(crate) mod watch;
mod words;

pub use link::interface_of_link;
pub use table::{DeviceFaults, SetFault, Taker, When};
pub use words::{DeviceFault, DeviceFaultForm, Harm, DEVICE_FAULT_FORMS};
