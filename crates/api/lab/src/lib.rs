//! A lab for tests of RDMA programs: a [`Fabric`] is an emulated network of the test's own, with
//! programs on its hosts, faults by call, and what each NIC has carried.
//!
//! It runs the command `unbroken`, which has to be in `PATH` ([`Options::command`] names another).
//! The program under test is not changed; it must be linked dynamically. All that a fabric has
//! started or made goes when it is dropped, in a test that panics, too.
//!
//! ```no_run
//! use std::time::Duration;
//! use unbroken_lab::Fabric;
//!
//! # fn main() -> unbroken_lab::Result<()> {
//! const SOON: Duration = Duration::from_secs(20);
//! let fabric = Fabric::new(&["a", "b"], 2)?;
//! let port = fabric.free_port()?;
//! let program = ["ib_write_bw", "-d", "unb0", "-D", "5", "-p", &port.to_string()];
//! let mut server = fabric.start("b", &program)?;
//! server.wait_for_listener(port, SOON)?;
//! let mut client = fabric.start("a", &[&program[..], &["127.0.0.1"]].concat())?;
//!
//! let nic = fabric.nic("a/0");
//! nic.wait_for_traffic(10_000_000, SOON)?;
//! nic.kill()?;
//! let switch = fabric.wait_for_switch("a", SOON)?;
//! assert_eq!((&*switch.from, &*switch.to), ("a/0-b/0", "a/1-b/1"));
//!
//! client.succeed(SOON)?;
//! server.succeed(SOON)?;
//! fabric.assert_carried("a/1", 10_000_000..)?;
//! # Ok(())
//! # }
//! ```
#![warn(missing_debug_implementations)]

mod error;
mod fabric;
mod program;

pub use error::{Error, Result};
pub use fabric::{Fabric, Nic, Options, Switch, Traffic};
pub use program::Program;
