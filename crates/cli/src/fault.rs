//! `unbroken fault`.

use std::time::Duration;

use unbroken_fabric::{now_us, ActiveFault, Fabric, Fault, Runtime, Selector};

use crate::output::{print, print_json, Result};

pub(crate) fn set(runtime: &Runtime, text: &str, at: Option<Duration>) -> Result {
    let fault: Fault = text.parse()?;
    Fabric::open(runtime)?.set(&fault, at)?;
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
    for ActiveFault { fault, from_us } in Fabric::open(runtime)?.list() {
        if json {
            print_json(&serde_json::json!({
                "fault": fault.to_string(), "from_us": from_us, "active": from_us <= now_us,
            }))?;
        } else if from_us <= now_us {
            print(&format!("{fault}  (for {})\n", seconds(now_us - from_us)))?;
        } else {
            print(&format!("{fault}  (in {})\n", seconds(from_us - now_us)))?;
        }
    }
    Ok(())
}

fn seconds(us: u64) -> String {
    format!("{:.1} s", us as f64 / 1e6)
}
