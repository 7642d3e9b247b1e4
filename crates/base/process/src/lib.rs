//! What a library needs that lives in other people's processes.
//!
//! - [`spawn`]: threads that take none of the program's signals and run at once when they are
//!   woken; [`ask_for_precedence`] for those that everybody waits for.
//! - [`mapping`]: memory at addresses where the program's never was.
//! - [`ProcessGuard`], [`PerProcess`], [`undisturbed`]: what becomes of our objects when the
//!   program forks. A child never touches what its parent made, and makes its own.

mod fork;
pub mod mapping;
mod thread;

pub use fork::{close_in_child, keep_in_child, undisturbed, Forked, PerProcess, ProcessGuard};
pub use thread::{ask_for_precedence, at_once, spawn, Thread};
