//! `unbroken fault` of devices of the machine.

use std::time::Duration;

use unbroken_events::{Event, EventLog, What};
use unbroken_fabric::{now_us, Fault, Runtime, Schedule, Selector};
use unbroken_nics::{interface_of_link, DeviceFault, DeviceFaults, Harm, SetFault, Taker, When};

use crate::fault::{show, Row};
use crate::output::{print, Failure, Result};

/// Whether a fault is one of a device of the machine: none of the emulated network, whose names
/// have a slash, and with the words and the name of a device.
pub(crate) fn is_one(text: &str) -> bool {
    text.parse::<Fault>().is_err() && DeviceFault::device_in(text).is_some()
}

fn failed(e: unbroken_verbs::Error) -> Failure {
    Failure::Text(e.to_string())
}

/// Sets a fault, and says which processes meet it.
pub(crate) fn set(runtime: &Runtime, text: &str, when: &Schedule) -> Result {
    let fault: DeviceFault = text.parse().map_err(failed)?;
    let faults = DeviceFaults::of(runtime);
    if fault.harm.is_of_interface() {
        return break_interface(runtime, &faults, &fault, when);
    }
    let takers = faults.takers().map_err(failed)?;
    let pids: Vec<String> = takers
        .iter()
        .filter(|taker| taker.devices.contains(&fault.device))
        .map(|taker| taker.pid.to_string())
        .collect();
    if pids.is_empty() {
        return Err(nobody(runtime, &fault, &takers).into());
    }
    let set = faults.set(&fault, times(when)).map_err(failed)?;
    let lasts_us = set.lasts_us.filter(|_| set.every_us.is_some());
    let what = What::Fault { fault: fault.to_string(), lasts_us, every_us: set.every_us };
    log(runtime, what, set.from_us)?;
    if set.until_us() != u64::MAX {
        log(runtime, What::FaultClear { fault: fault.to_string() }, set.until_us())?;
    }
    print(&format!("{fault}: met by {} with pid {}\n", count(&pids), pids.join(", ")))
}

fn times(when: &Schedule) -> When {
    let us = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX).max(1);
    When {
        at_us: if when.at.is_zero() { 0 } else { us(when.at) },
        lasts_us: when.lasts.map(us),
        every_us: when.every.map(us),
    }
}

/// A fault that is no program's: it is there once this returns.
fn break_interface(
    runtime: &Runtime,
    faults: &DeviceFaults,
    fault: &DeviceFault,
    when: &Schedule,
) -> Result {
    let interface = interface_of_link(&fault.device).map_err(failed)?;
    let set = faults.set(fault, times(when)).map_err(failed)?;
    let what = What::Fault { fault: fault.to_string(), lasts_us: None, every_us: None };
    log(runtime, what, set.from_us)?;
    let what = match fault.harm {
        Harm::CableCut => "loses all that it would send and receive",
        _ => "is down",
    };
    print(&format!(
        "{fault}: the interface {interface} {what}, for all that use it, until `unbroken fault \
         clear`\n"
    ))
}

/// Mends the network interfaces that faults broke: before a folder goes that knows of them.
pub(crate) fn mend_interfaces(runtime: &Runtime) -> Result {
    let faults = DeviceFaults::of(runtime);
    // A table that cannot be read names none.
    for set in faults.list().unwrap_or_default() {
        if set.fault.harm.is_of_interface() {
            faults.clear(Some(&set.fault.to_string())).map_err(failed)?;
        }
    }
    Ok(())
}

fn count(pids: &[String]) -> &'static str {
    match pids.len() {
        1 => "the process",
        _ => "the processes",
    }
}

/// Why nobody would meet it, and what is right.
fn nobody(runtime: &Runtime, fault: &DeviceFault, takers: &[Taker]) -> String {
    let device = &fault.device;
    let mut devices: Vec<&str> =
        takers.iter().flat_map(|taker| taker.devices.iter().map(String::as_str)).collect();
    devices.sort_unstable();
    devices.dedup();
    let there = match devices.is_empty() {
        true => "no program there was started with --faults".to_owned(),
        false => format!("programs with --faults have {}", devices.join(", ")),
    };
    format!(
        "fault '{fault}': no program with --faults has the device '{device}' in {}; {there}; start \
         one with `unbroken run --devices {device} --faults -- PROGRAM` (a NIC of the emulated \
         network is named like 'a/0')",
        runtime.path().display()
    )
}

/// Clears the faults of devices that the words name, or all. Whether the words can name nothing
/// else.
pub(crate) fn clear(runtime: &Runtime, text: &str) -> Result<bool> {
    let is_named = !text.trim().is_empty();
    let faults = DeviceFaults::of(runtime);
    let cleared = faults.clear(Some(text).filter(|_| is_named)).map_err(failed)?;
    let now_us = now_us();
    for SetFault { fault, .. } in &cleared {
        log(runtime, What::FaultClear { fault: fault.to_string() }, now_us)?;
    }
    let is_of_devices =
        is_named && DeviceFault::device_in(text).is_some() && text.parse::<Selector>().is_err();
    // Not an error: what was asked for is so.
    if is_of_devices && cleared.is_empty() {
        let set = faults.list().map_err(failed)?;
        let set: Vec<String> = set.iter().map(|set| format!("'{}'", set.fault)).collect();
        let set = if set.is_empty() { "none".into() } else { set.join(", ") };
        eprintln!("unbroken: no fault '{}' is set; faults of devices that are: {set}", text.trim());
    }
    Ok(is_of_devices)
}

/// Lists the faults of devices.
pub(crate) fn list(runtime: &Runtime, json: bool) -> Result {
    let now_us = now_us();
    for set in DeviceFaults::of(runtime).list().map_err(failed)? {
        let row = Row {
            fault: set.fault.to_string(),
            from_us: set.from_us,
            lasts_us: set.lasts_us,
            every_us: set.every_us,
            holds: set.at(now_us).is_some_and(|(_, holds)| holds),
        };
        show(&row, json, now_us)?;
    }
    Ok(())
}

fn log(runtime: &Runtime, what: What, time_us: u64) -> Result {
    EventLog::open(runtime).emit(&Event::at(what, time_us)).map_err(|e| {
        let action = "cannot write to it (the faults are set all the same)";
        Failure::io(format!("{}: {action}", runtime.events().display()), e)
    })
}
