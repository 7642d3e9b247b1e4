//! How long a switch takes: runs of `ib_write_bw` in each of which the NIC dies.

use std::path::Path;
use std::time::Duration;

use unbroken_telemetry::{read_events, Switch, What};
use unbroken_trial::{Lab, Pair, Spec, Watch};

use crate::Result;

/// What a run showed, at the end whose NIC died.
#[derive(Clone, Copy, Debug)]
pub struct Switched {
    /// From the first error, event or suspicion to the first good WC on the backup, in µs.
    pub switch_us: f64,
    /// From the fault to the first error, event or suspicion, in µs.
    pub detect_us: Option<f64>,
    /// The longest interval between packets with data at the receiver around the fault, in ms; 0.5 where it was shorter.
    pub gap_ms: f64,
}

/// What runs.
pub fn spec() -> Spec {
    Spec::new("ib_write_bw", "-d unb0 -F -s 65536 -D 20")
}

/// One run: traffic flows, NIC a/0 dies, traffic flows again; then it is ended.
pub fn run(unbroken: &Path) -> Result<Switched> {
    let lab = Lab::new(unbroken)?;
    let mut watch = Watch::new(&lab, "b", 2)?;
    let mut pair = Pair::start(&lab, &spec())?;
    let limit = Duration::from_secs(15);
    // A second of traffic: 64 MiB is more than any set-up.
    pair.client.wait_until("it sends over NIC a/0", limit, || watch.sample().rx_payload_bytes[0] > 64 << 20)?;
    let fault = lab.fabric().set(&"nic a/0 dead".parse()?, None)?;
    let before = watch.sample().rx_payload_bytes[1];
    pair.client
        .wait_until("it sends over NIC a/1", limit, || watch.sample().rx_payload_bytes[1] > before + (16 << 20))?;
    let mut found = None;
    pair.client.wait_until("the switch is in the event log", limit, || {
        found = switch_of(&lab, "a");
        found.is_some()
    })?;
    let switch = found.ok_or("there is no switch event of host a")?;
    watch.collect_gaps(&lab, pair.server.pid());
    let gap = watch.longest_gap(fault.from_us, fault.from_us + 2_000_000);
    Ok(Switched {
        switch_us: switch.switch_us as f64,
        detect_us: switch.detect_us.map(|us| us as f64),
        gap_ms: gap.map_or(0.5, |g| g.len_us as f64 / 1e3),
    })
}

/// The first switch that a host logged.
fn switch_of(lab: &Lab, host: &str) -> Option<Switch> {
    let events = read_events(lab.runtime()).unwrap_or_default();
    events.into_iter().find_map(|e| match e.what {
        What::Switch(s) if s.host == host => Some(s),
        _ => None,
    })
}
