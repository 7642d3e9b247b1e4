//! `unbroken fault`.

use std::time::Duration;

use unbroken_fabric::{
    now_us, random_schedule, ActiveFault, Fabric, Fault, NicName, Runtime, Schedule, Selector,
    TimeUs,
};

use crate::output::{print, print_json, Result};
use crate::place::programs;

pub(crate) fn set(runtime: &Runtime, text: &str, when: &Schedule) -> Result {
    let fault: Fault = text.parse()?;
    Fabric::open(runtime)?.schedule(&fault, when)?;
    let ends = when.lasts.filter(|_| when.every.is_none()).map(|lasts| when.at + lasts);
    tell_who_meets_it(runtime, ends)
}

/// A fault that strikes nobody is told: the programs may run elsewhere, or come too late for one
/// that `ends` by itself so long from now.
pub(crate) fn tell_who_meets_it(runtime: &Runtime, ends: Option<Duration>) -> Result {
    if programs(runtime)?.is_empty() {
        let waits = match ends {
            Some(ends) => format!("is over in {}", TimeUs(ends.as_micros() as u64)),
            None => "waits for one".into(),
        };
        let folder = runtime.path().display();
        eprintln!("unbroken: no program runs in {folder}; the fault is set, and {waits}");
    }
    Ok(())
}

/// Sets random faults and shows what will happen; with `dry`, only shows it.
pub(crate) fn random(
    fabric: &Fabric,
    seed: u64,
    lasts: Duration,
    hosts: &[String],
    dry: bool,
) -> Result {
    for host in hosts {
        fabric.host(host)?;
    }
    let nics: Vec<NicName> =
        fabric.nics().filter(|n| hosts.is_empty() || hosts.contains(&n.host)).collect();
    let faults = random_schedule(seed, lasts, &nics);
    if !dry {
        fabric.schedule_all(&faults)?;
    }
    for (fault, when) in faults {
        let lasts =
            when.lasts.map_or(String::new(), |d| format!("for {}", TimeUs(d.as_micros() as u64)));
        print(&format!("{:>10.3} s  {lasts:<16}  {fault}\n", when.at.as_secs_f64()))?;
    }
    Ok(())
}

pub(crate) fn clear(fabric: Option<&Fabric>, text: &str) -> Result {
    let selector = if text.trim().is_empty() { None } else { Some(text.parse::<Selector>()?) };
    let cleared = fabric.map_or(Ok(Vec::new()), |fabric| fabric.clear(selector.as_ref()))?;
    // Not an error: what was asked for is so.
    if let (true, Some(selector)) = (cleared.is_empty(), selector) {
        let set = fabric.map_or_else(Vec::new, Fabric::list);
        let set: Vec<String> = set.iter().map(|f| format!("'{}'", f.fault)).collect();
        let set = if set.is_empty() { "none".into() } else { set.join(", ") };
        eprintln!("unbroken: no fault '{selector}' is set; faults that are: {set}");
    }
    Ok(())
}

pub(crate) fn list(fabric: Option<&Fabric>, json: bool) -> Result {
    let now_us = now_us();
    let faults = fabric.map_or_else(Vec::new, Fabric::list);
    for ActiveFault { fault, from_us, lasts_us, every_us, holds } in faults {
        let row = Row { fault: fault.to_string(), from_us, lasts_us, every_us, holds };
        show(&row, json, now_us)?;
    }
    Ok(())
}

/// A fault that is set.
pub(crate) struct Row {
    pub(crate) fault: String,
    pub(crate) from_us: u64,
    pub(crate) lasts_us: Option<u64>,
    pub(crate) every_us: Option<u64>,
    pub(crate) holds: bool,
}

/// Shows a fault of a list.
pub(crate) fn show(row: &Row, json: bool, now_us: u64) -> Result {
    let Row { fault, from_us, lasts_us, every_us, holds } = row;
    let (from_us, lasts_us, every_us) = (*from_us, *lasts_us, *every_us);
    if json {
        return print_json(&serde_json::json!({
            "fault": fault, "from_us": from_us, "active": holds, "lasts_us": lasts_us,
            "every_us": every_us,
        }));
    }
    let since = match from_us <= now_us {
        true => format!("for {}", seconds(now_us - from_us)),
        false => format!("in {}", seconds(from_us - now_us)),
    };
    let lasts = lasts_us.map_or(String::new(), |us| format!(", lasts {}", TimeUs(us)));
    let every = every_us.map_or(String::new(), |us| format!(", again every {}", TimeUs(us)));
    print(&format!("{fault}  ({since}{lasts}{every})\n"))
}

fn seconds(us: u64) -> String {
    format!("{:.1} s", us as f64 / 1e6)
}
