//! `unbroken nic`: leaving a NIC by choice, and coming back.

use std::time::{Duration, Instant};

use unbroken_fabric::{Fabric, Runtime};
use unbroken_telemetry::{Drains, QpStatus};

use crate::output::{print, Failure, Result};
use crate::status;

/// When it is looked first whether all have left; then after twice the time each time, since a look costs the threads that move them.
const LOOK: Duration = Duration::from_millis(40);
/// See `LOOK`: at most.
const MOST_LOOK: Duration = Duration::from_millis(320);
/// QPs that are named where some have not left.
const MAX_NAMED: usize = 5;

/// Has a NIC left by all QPs that can go elsewhere, and waits until they have.
pub(crate) fn drain(runtime: &Runtime, nic: &str, patience: Duration) -> Result {
    check_name(runtime, nic)?;
    let began = Instant::now();
    let before = on_nic(runtime, nic)?.len();
    set(runtime, nic, true)?;
    let mut look = if before == 0 { Duration::ZERO } else { LOOK };
    loop {
        std::thread::sleep(look.min(patience.saturating_sub(began.elapsed())));
        look = (2 * look).clamp(LOOK, MOST_LOOK);
        let left = on_nic(runtime, nic)?;
        let seconds = began.elapsed().as_secs_f64();
        if left.is_empty() {
            let moved = if before == 0 {
                "no queue pair was on it".into()
            } else {
                format!("{before} queue pairs left it in {seconds:.2} s")
            };
            return print(&format!("{nic} is drained: {moved}; take it back with `unbroken nic undrain {nic}`\n"));
        }
        if began.elapsed() >= patience {
            return Err(Failure::Text(still_there(nic, &left, seconds)));
        }
    }
}

/// Takes a NIC back: QPs that were connected on it come back by themselves once their path there is steady.
pub(crate) fn undrain(runtime: &Runtime, nic: &str) -> Result {
    match set(runtime, nic, false)? {
        true => print(&format!("{nic} is used again\n")),
        false => Err(Failure::Text(format!("{nic} is not drained"))),
    }
}

fn set(runtime: &Runtime, nic: &str, drained: bool) -> Result<bool> {
    Drains::of(runtime).set(nic, drained).map_err(|e| Failure::io(format!("{}/drained", runtime.path().display()), e))
}

/// A name that means no NIC would be waited for in vain.
fn check_name(runtime: &Runtime, nic: &str) -> Result {
    let fabric = if runtime.fabric_toml().exists() { Some(Fabric::open(runtime)?) } else { None };
    let nics = status::nic_statuses(runtime, fabric.as_ref())?;
    if nics.iter().any(|n| n.nic == nic) {
        return Ok(());
    }
    let names: Vec<_> = nics.into_iter().map(|n| n.nic).collect();
    let there =
        if names.is_empty() { "no NIC has been opened yet".into() } else { format!("there are {}", names.join(", ")) };
    Err(Failure::Text(format!("there is no NIC {nic}: {there}")))
}

/// The QPs that are on a NIC now, but for those that hang on to it by their nature.
fn on_nic(runtime: &Runtime, nic: &str) -> Result<Vec<(u32, QpStatus)>> {
    let on = |q: &QpStatus| {
        q.state != "failed" && (q.path == nic || q.path.strip_prefix(nic).is_some_and(|rest| rest.starts_with('-')))
    };
    Ok(status::all_qps(runtime)?.into_iter().filter(|(_, q)| on(q)).collect())
}

fn still_there(nic: &str, left: &[(u32, QpStatus)], seconds: f64) -> String {
    let named = left.iter().take(MAX_NAMED).map(|(pid, q)| {
        let why = if q.why.is_empty() { "its work does not come to a rest" } else { q.why.as_str() };
        format!("\n  QP {:#x} of pid {pid}: {why}", q.qp)
    });
    let named: String = named.collect();
    let more = left.len().saturating_sub(MAX_NAMED);
    let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
    format!(
        "{nic} is drained, but {} queue pairs are still on it after {seconds:.1} s:{named}{more}\nThey go on trying; `unbroken nic undrain {nic}` takes it back",
        left.len()
    )
}
