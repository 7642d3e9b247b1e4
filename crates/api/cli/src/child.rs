//! Processes of this command that another one has started, and that end with it, however it ends.

use rustix::process::{getppid, set_parent_process_death_signal, Pid, Signal};

use crate::output::{Failure, Result};

/// The option that names the parent.
pub(crate) const PARENT: &str = "--parent";

/// The words that tell a child who its parent is: this process.
pub(crate) fn parent_words() -> [String; 2] {
    [PARENT.into(), std::process::id().to_string()]
}

/// Has this process end when its parent does: the kernel kills it then. To be called before
/// anything else; an error if the parent has ended already.
pub(crate) fn end_with(parent: Option<u32>) -> Result {
    let Some(parent) = parent else { return Ok(()) };
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|e| {
        Failure::io("cannot ask to end with the process that started this", e.into())
    })?;
    // It may have ended before the kernel was asked.
    let now = getppid().map(Pid::as_raw_pid);
    if now.is_some_and(|now| now as u32 == parent) {
        return Ok(());
    }
    Err(Failure::Text(format!(
        "{PARENT} {parent}: that process did not start this one, or has ended"
    )))
}
