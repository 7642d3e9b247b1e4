//! How long a switch takes: runs of `ib_write_bw` in each of which the NIC dies, or something else
//! fails.
//!
//! The NIC dies only when the QP is protected at both ends, since one that is not ends with its
//! NIC, and only under traffic. Traffic may then go on over any other NIC: which one is for the
//! program to choose, and a second switch may have followed.

use std::path::Path;
use std::time::Duration;

use unbroken_events::{answering_processes, query_status, read_events, ProcessStatus, What};
use unbroken_testkit::{Lab, Pair, Spec, Watch};

use crate::Result;

/// NICs of a host.
const NICS: u8 = 4;
/// Payload that shows that the test itself, not its set-up, is on.
const FLOWS_BYTES: u64 = 64 << 20;
/// Payload that shows that it goes on.
const GOES_ON_BYTES: u64 = 16 << 20;
/// For each step of a run.
const LIMIT: Duration = Duration::from_secs(15);
/// For a process to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// How a run went.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The QP left the NIC that died.
    Switched(Switched),
    /// It had left the NIC before, when that still worked; in words.
    LeftBefore(String),
}

/// What a run showed, at the end whose NIC died.
#[derive(Clone, Copy, Debug)]
pub struct Switched {
    /// From the first error, event or suspicion to the first good WC on the backup, in µs.
    pub switch_us: f64,
    /// From the fault to the first error, event or suspicion, in µs.
    pub detect_us: Option<f64>,
    /// The longest interval between packets with data at the receiver around the fault, in ms;
    /// None: none was recorded.
    pub gap_ms: Option<f64>,
    /// Switches of the QP, at this end; one is right.
    pub switches: usize,
}

/// What runs.
pub fn spec() -> Spec {
    Spec::new("ib_write_bw", "-d unb0 -F -s 65536 -D 20")
}

/// What fails.
pub const NIC_DEAD: &str = "nic a/0 dead";

/// One run: traffic flows, NIC a/0 dies (or whatever `fault` says of its path), traffic flows
/// again; then it is ended.
pub fn run(unbroken: &Path, fault: &str) -> Result<Outcome> {
    let lab = Lab::new(unbroken)?;
    let mut pair = Pair::start(&lab, &spec())?;
    play(&lab, &mut pair, fault).map_err(|e| format!("{e}; {}", state(&lab, &pair)).into())
}

fn play(lab: &Lab, pair: &mut Pair, fault: &str) -> Result<Outcome> {
    let mut watch = Watch::new(lab, "b", NICS)?;
    let pids = [pair.client.pid(), pair.server.pid()];
    let carried = |watch: &mut Watch| watch.sample().rx_payload_bytes.iter().sum::<u64>();
    pair.client.wait_until("it sends", LIMIT, || carried(&mut watch) > FLOWS_BYTES)?;
    pair.client.wait_until("its QP is protected at both ends", LIMIT, || {
        pids.iter().all(|pid| protected(lab, *pid))
    })?;
    if let Some(switch) = switches_of(lab, "a").first() {
        return Ok(Outcome::LeftBefore(format!("{switch:?}")));
    }
    let fault = lab.fabric().set(&fault.parse()?, None)?;
    let elsewhere = |watch: &mut Watch| watch.sample().rx_payload_bytes[1..].iter().sum::<u64>();
    let before = elsewhere(&mut watch);
    pair.client.wait_until("it sends over another NIC", LIMIT, || {
        elsewhere(&mut watch) > before + GOES_ON_BYTES
    })?;
    let mut found = Vec::new();
    pair.client.wait_until("the switch is in the event log", LIMIT, || {
        found = switches_of(lab, "a");
        !found.is_empty()
    })?;
    let switch = found.first().ok_or("there is no switch event of host a")?;
    if switch.detected_at_us < fault.from_us {
        return Ok(Outcome::LeftBefore(format!("{switch:?}")));
    }
    watch.collect_gaps(lab, pair.server.pid());
    let gap = watch.longest_gap(fault.from_us, fault.from_us + 2_000_000);
    Ok(Outcome::Switched(Switched {
        switch_us: switch.switch_us as f64,
        detect_us: switch.detect_us.map(|us| us as f64),
        gap_ms: gap.map(|g| g.len_ms()),
        switches: found.len(),
    }))
}

/// Whether all connected QPs of a process are protected, and there are some.
fn protected(lab: &Lab, pid: u32) -> bool {
    status_of(lab, pid).is_ok_and(|s| !s.qps.is_empty() && s.qps.iter().all(|qp| qp.protected))
}

/// What a program of this machine answers.
fn status_of(lab: &Lab, pid: u32) -> std::io::Result<ProcessStatus> {
    let answering = answering_processes(lab.runtime())?;
    let name =
        answering.into_iter().find(|name| name.pid == pid).ok_or(std::io::ErrorKind::NotFound)?;
    query_status(lab.runtime(), name, ANSWER_LIMIT)
}

/// The switches that a host logged.
fn switches_of(lab: &Lab, host: &str) -> Vec<unbroken_events::Switch> {
    let events = read_events(lab.runtime()).unwrap_or_default();
    let switches = events.into_iter().filter_map(|e| match e.what {
        What::Switch(s) if s.host == host => Some(s),
        _ => None,
    });
    switches.collect()
}

/// What is known of a run that went wrong: the event log, and what the QPs do.
fn state(lab: &Lab, pair: &Pair) -> String {
    let events: Vec<String> = read_events(lab.runtime())
        .unwrap_or_default()
        .iter()
        .map(|e| format!("{} {:?}", e.time_us, e.what))
        .collect();
    let qps: Vec<String> = [&pair.client, &pair.server]
        .iter()
        .map(|end| match status_of(lab, end.pid()) {
            Ok(status) => format!("{}: {:?}", end.program(), status.qps),
            Err(e) => format!("{} does not answer: {e}", end.program()),
        })
        .collect();
    format!("events: [{}]; QPs: {}", events.join(", "), qps.join("; "))
}
