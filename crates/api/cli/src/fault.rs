//! `unbroken fault`.

use std::time::Duration;

use unbroken_fabric::{
    now_us, random_schedule, ActiveFault, Fabric, Fault, NicName, Runtime, Schedule, Selector,
    TimeUs,
};

use crate::output::{print, print_json, Result};

pub(crate) fn set(runtime: &Runtime, text: &str, when: &Schedule) -> Result {
    let fault: Fault = text.parse()?;
    Fabric::open(runtime)?.schedule(&fault, when)?;
    Ok(())
}

/// Sets random faults and shows what will happen; with `dry`, only shows it.
pub(crate) fn random(
    runtime: &Runtime,
    seed: u64,
    lasts: Duration,
    hosts: &[String],
    dry: bool,
) -> Result {
    let fabric = Fabric::open(runtime)?;
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

pub(crate) fn clear(runtime: &Runtime, text: &str) -> Result {
    let selector = if text.trim().is_empty() { None } else { Some(text.parse::<Selector>()?) };
    let fabric = Fabric::open(runtime)?;
    // Not an error: what was asked for is so.
    if let (true, Some(selector)) = (fabric.clear(selector.as_ref())?.is_empty(), selector) {
        let set: Vec<String> = fabric.list().iter().map(|f| format!("'{}'", f.fault)).collect();
        let set = if set.is_empty() { "none".into() } else { set.join(", ") };
        eprintln!("unbroken: no fault '{selector}' is set; faults that are: {set}");
    }
    Ok(())
}

pub(crate) fn list(runtime: &Runtime, json: bool) -> Result {
    let now_us = now_us();
    for ActiveFault { fault, from_us, lasts_us, every_us, holds } in Fabric::open(runtime)?.list() {
        if json {
            print_json(&serde_json::json!({
                "fault": fault.to_string(), "from_us": from_us, "active": holds, "lasts_us": lasts_us,
                "every_us": every_us,
            }))?;
            continue;
        }
        let since = match from_us <= now_us {
            true => format!("for {}", seconds(now_us - from_us)),
            false => format!("in {}", seconds(from_us - now_us)),
        };
        let lasts = lasts_us.map_or(String::new(), |us| format!(", lasts {}", TimeUs(us)));
        let every = every_us.map_or(String::new(), |us| format!(", again every {}", TimeUs(us)));
        print(&format!("{fault}  ({since}{lasts}{every})\n"))?;
    }
    Ok(())
}

fn seconds(us: u64) -> String {
    format!("{:.1} s", us as f64 / 1e6)
}
