//! `unbroken nic`: leaving a NIC by choice, and coming back.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use unbroken_events::QpStatus;
use unbroken_fabric::{NicName, Runtime};
use unbroken_observe::whole_nic;
use unbroken_runtime::Drains;

use crate::output::{print, Failure, Result};
use crate::status::{self, Answers};

/// When it is looked first whether all have left; then after twice the time each time, since a look
/// costs the threads that move them.
const LOOK: Duration = Duration::from_millis(40);
/// See `LOOK`: at most.
const MOST_LOOK: Duration = Duration::from_millis(320);
/// QPs that are named where some have not left.
const MAX_NAMED: usize = 5;

/// Has a NIC left by all QPs that can go elsewhere, and waits until they have.
pub(crate) fn drain(runtime: &Runtime, nic: &str, patience: Duration) -> Result {
    let nic = &*known_nic(runtime, nic)?;
    let began = Instant::now();
    let before: Vec<String> = Users::of(runtime, nic)?.on.into_iter().map(|(_, q)| q.own).collect();
    set(runtime, nic, true)?;
    let mut look = if before.is_empty() { Duration::ZERO } else { LOOK };
    loop {
        std::thread::sleep(look.min(patience.saturating_sub(began.elapsed())));
        look = (2 * look).clamp(LOOK, MOST_LOOK);
        let now = Users::of(runtime, nic)?;
        let seconds = began.elapsed().as_secs_f64();
        if now.on.is_empty() && now.silent.is_empty() {
            let ended = before.iter().filter(|own| !now.all.contains(*own)).count();
            let what = what_became(before.len(), ended, seconds);
            return print(&format!(
                "{nic} is drained: {what}; take it back with `unbroken nic undrain {nic}`\n"
            ));
        }
        if began.elapsed() >= patience {
            return Err(Failure::Text(still_there(nic, &now, seconds)));
        }
    }
}

/// Of those that were on it.
fn what_became(before: usize, ended: usize, seconds: f64) -> String {
    match (before - ended, ended) {
        (0, 0) => "no queue pair was on it".into(),
        (left, 0) => format!("{left} queue pairs left it in {seconds:.2} s"),
        (0, ended) => format!("{ended} queue pairs were on it, and have ended"),
        (left, ended) => format!("{left} queue pairs left it in {seconds:.2} s, and {ended} ended"),
    }
}

/// Takes a NIC back: QPs that were connected on it come back by themselves once their path there is
/// steady.
pub(crate) fn undrain(runtime: &Runtime, nic: &str) -> Result {
    let name = whole_nic(nic);
    match set(runtime, &name, false)? || name != nic && set(runtime, nic, false)? {
        true => print(&format!("{name} is used again\n")),
        false => Err(Failure::Text(format!("{name} is not drained"))),
    }
}

fn set(runtime: &Runtime, nic: &str, drained: bool) -> Result<bool> {
    Drains::of(runtime)
        .set(nic, drained)
        .map_err(|e| Failure::io(format!("{}/drained", runtime.path().display()), e))
}

/// The NIC that a name means, if there is that NIC, with that port: a drain of another would be
/// waited for in vain.
fn known_nic(runtime: &Runtime, nic: &str) -> Result<String> {
    let nics = status::all_nics(runtime)?;
    // Port 1 has the name of its NIC.
    let shown = match nic.parse::<NicName>() {
        Ok(name) if name.port == 1 => name.at_port(0).to_string(),
        _ => nic.into(),
    };
    if nics.iter().any(|n| n.nic == shown) {
        return Ok(whole_nic(nic));
    }
    let names: Vec<_> = nics.into_iter().map(|n| n.nic).collect();
    let there = if names.is_empty() {
        "no NIC has been opened yet".into()
    } else {
        format!("there are {}", names.join(", "))
    };
    Err(Failure::Text(format!("there is no NIC {nic}: {there}")))
}

/// Who uses a NIC.
struct Users {
    /// The QPs that are on it now, with their pids, but for those that hang on to it by their
    /// nature.
    on: Vec<(u32, QpStatus)>,
    /// All QPs, by their own addresses.
    all: HashSet<String>,
    /// Processes that do not say what they have on it, and why.
    silent: Vec<(u32, String)>,
}

impl Users {
    fn of(runtime: &Runtime, nic: &str) -> Result<Users> {
        let on = |q: &QpStatus| {
            q.state != "failed"
                && (q.path == nic
                    || q.path.strip_prefix(nic).is_some_and(|rest| rest.starts_with('-')))
        };
        let Answers { qps, silent } = status::ask_all(runtime)?;
        let all = qps.iter().map(|(_, q)| q.own.clone()).collect();
        Ok(Users { on: qps.into_iter().filter(|(_, q)| on(q)).collect(), all, silent })
    }
}

fn still_there(nic: &str, users: &Users, seconds: f64) -> String {
    let left = &users.on;
    let named = left.iter().take(MAX_NAMED).map(|(pid, q)| {
        let why =
            if q.why.is_empty() { "its work does not come to a rest" } else { q.why.as_str() };
        format!("\n  QP {:#x} of pid {pid}: {why}", q.qp)
    });
    let named: String = named.collect();
    let more = left.len().saturating_sub(MAX_NAMED);
    let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
    let silent = users.silent.iter().take(MAX_NAMED);
    let silent: String = silent
        .map(|(pid, why)| format!("\n  pid {pid} {why}: what it has there is not known"))
        .collect();
    let what = match left.len() {
        0 => "not all say that they have left it".into(),
        many => format!("{many} queue pairs are still on it"),
    };
    format!(
        "{nic} is drained, but {what} after {seconds:.1} s:{named}{more}{silent}\nThey go on \
         trying; `unbroken nic undrain {nic}` takes it back"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_became_of_queue_pairs_is_said() {
        let said =
            [(0, 0), (3, 0), (2, 2), (3, 1)].map(|(before, ended)| what_became(before, ended, 0.5));
        assert_eq!(
            said,
            [
                "no queue pair was on it",
                "3 queue pairs left it in 0.50 s",
                "2 queue pairs were on it, and have ended",
                "2 queue pairs left it in 0.50 s, and 1 ended"
            ]
        );
    }
}
