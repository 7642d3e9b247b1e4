//! A snapshot as a page of Prometheus metrics.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use prometheus::proto::MetricType::{self, COUNTER, GAUGE, HISTOGRAM};
use unbroken_coll::Snapshot as Communicator;
use unbroken_edge_daemon::status::Status as Edge;
use unbroken_events::{NicStatus, NIC_COUNTERS};

use crate::families::{Families, Kind};
use crate::health::health;
use crate::snapshot::Snapshot;
use crate::status::Process;
use crate::totals::Totals;

const fn kind(name: &'static str, of: MetricType, help: &'static str) -> Kind {
    Kind { name, of, help }
}

/// All metrics that a page may have. Names and helps of those that begin with `node_infiniband` are
/// node_exporter's, for NICs that it does not see.
pub static KINDS: LazyLock<Vec<Kind>> = LazyLock::new(|| {
    let mut kinds: Vec<Kind> = Vec::new();
    for metric in NIC_COUNTERS.iter().filter_map(|counter| counter.metric) {
        // Two counters share a metric that has directions.
        if kinds.iter().all(|kind| kind.name != metric.name) {
            kinds.push(kind(metric.name, COUNTER, metric.help));
        }
    }
    kinds.extend_from_slice(OTHERS);
    kinds
});

/// Those that are not counters of a NIC.
const OTHERS: &[Kind] = &[
    kind(
        "node_infiniband_state_id",
        GAUGE,
        "State of the InfiniBand port (0: no change, 1: down, 2: init, 3: armed, 4: active, \
         5: act defer)",
    ),
    kind("unbroken_build_info", GAUGE, "The version of the command; always 1."),
    kind(
        "unbroken_nic_state",
        GAUGE,
        "1 for the state that the NIC has: active, down, dead or unknown.",
    ),
    kind("unbroken_nic_drained", GAUGE, "1 if an operator has drained the NIC."),
    kind("unbroken_nic_faults", GAUGE, "Faults that are set on the NIC and hold now."),
    kind("unbroken_nic_processes", GAUGE, "Processes that have the NIC open."),
    kind("unbroken_nic_deaths_total", COUNTER, "How often the log says that the NIC died."),
    kind(
        "unbroken_nic_port_downs_total",
        COUNTER,
        "How often the log says that the port went down.",
    ),
    kind(
        "unbroken_switches_total",
        COUNTER,
        "Switches of queue pairs to another path, by host, kind and reason.",
    ),
    kind(
        "unbroken_outage_seconds",
        HISTOGRAM,
        "Passive switches: from the fault, where the log has it, else from its first sign, to the \
         first good completion on the new path.",
    ),
    kind(
        "unbroken_switching_seconds",
        HISTOGRAM,
        "From the first sign of a failure to the first good completion on the new path, by kind.",
    ),
    kind(
        "unbroken_replayed_work_requests_total",
        COUNTER,
        "Work requests that were sent again after a switch.",
    ),
    kind(
        "unbroken_gave_up_queue_pairs_total",
        COUNTER,
        "Queue pairs that failed for good: their programs got the error.",
    ),
    kind(
        "unbroken_path_migrations_total",
        COUNTER,
        "Automatic path migrations, by result: done or failed.",
    ),
    kind("unbroken_events_total", COUNTER, "Events that were read from the log."),
    kind("unbroken_queue_pairs", GAUGE, "Logical queue pairs, by host."),
    kind(
        "unbroken_protected_queue_pairs",
        GAUGE,
        "Queue pairs that the next failure of a NIC moves.",
    ),
    kind(
        "unbroken_pending_queue_pairs",
        GAUGE,
        "Queue pairs that will be protected once their peer is found.",
    ),
    kind(
        "unbroken_unprotected_queue_pairs",
        GAUGE,
        "Queue pairs that the next failure of a NIC fails, by reason.",
    ),
    kind(
        "unbroken_displaced_queue_pairs",
        GAUGE,
        "Degraded paths: queue pairs that are not on their first path.",
    ),
    kind("unbroken_failed_queue_pairs", GAUGE, "Queue pairs that failed, of living processes."),
    kind(
        "unbroken_backup_queue_pairs",
        GAUGE,
        "Queue pairs that have their backup ready, or that are still to be looked at.",
    ),
    kind("unbroken_processes", GAUGE, "Processes that use the runtime folder, by host."),
    kind("unbroken_silent_processes", GAUGE, "Processes that do not answer."),
    kind(
        "unbroken_forged_datagrams_total",
        COUNTER,
        "Control datagrams without the folder's seal that processes dropped.",
    ),
    kind("unbroken_directory_lost", GAUGE, "1 if the host cannot ask the directory now."),
    kind("unbroken_directory_losses_total", COUNTER, "How often the directory was lost."),
    kind(
        "unbroken_health",
        GAUGE,
        "The verdict on the host: 0 healthy, 1 degraded and survived, 2 failed, 3 unknown.",
    ),
    kind("unbroken_capacity_ratio", GAUGE, "The share of the host's ports that carry traffic."),
    kind("unbroken_collective_operations_total", COUNTER, "Collective operations of a rank."),
    kind("unbroken_collective_failed_paths_total", COUNTER, "Paths of a rank that failed."),
    kind(
        "unbroken_collective_moved_streams_total",
        COUNTER,
        "Streams of a rank that went on elsewhere.",
    ),
    kind(
        "unbroken_collective_resent_frames_total",
        COUNTER,
        "Frames of a rank that were sent again.",
    ),
    kind("unbroken_collective_sent_bytes_total", COUNTER, "Bytes of a rank, by rail."),
    kind("unbroken_collective_nics_down", GAUGE, "NICs that operations are planned without."),
    kind("unbroken_collective_broken", GAUGE, "1 if the rank's communicator is broken."),
    kind("unbroken_sdr_queue_pairs", GAUGE, "SDR queue pairs of a process."),
    kind("unbroken_sdr_sent_packets_total", COUNTER, "Packets that SDR sent."),
    kind("unbroken_sdr_received_packets_total", COUNTER, "Packets of SDR that came."),
    kind("unbroken_sdr_duplicate_packets_total", COUNTER, "Packets that had come before."),
    kind("unbroken_sdr_late_packets_total", COUNTER, "Packets too late for their message."),
    kind("unbroken_sdr_outside_packets_total", COUNTER, "Packets beyond their message."),
    kind("unbroken_sdr_under_runs_total", COUNTER, "How often SDR found no receive posted."),
    kind(
        "unbroken_edge_uplink_up",
        GAUGE,
        "1 if that layer of the uplink is up: carrier, bfd or bgp.",
    ),
    kind("unbroken_edge_daemon_running", GAUGE, "1 if the daemon of the host edge runs."),
    kind("unbroken_edge_destinations", GAUGE, "Addresses on other hosts that EVPN has told."),
    kind(
        "unbroken_edge_last_paths",
        GAUGE,
        "Destinations that BGP has no path to, and that keep their last one.",
    ),
    kind("unbroken_edge_rules", GAUGE, "Rules that should exist, exist, are in hardware."),
    kind("unbroken_observation_age_seconds", GAUGE, "How old is what processes said."),
    kind("unbroken_observation_problems", GAUGE, "Things that could not be read."),
];

/// The page of metrics of a snapshot.
pub fn metrics(snapshot: &Snapshot) -> String {
    let mut to = Families::new(&KINDS);
    to.add("unbroken_build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1.0);
    to.add("unbroken_observation_age_seconds", &[], snapshot.qps_age_us as f64 / 1e6);
    to.add("unbroken_observation_problems", &[], snapshot.problems.len() as f64);
    snapshot.nics.iter().for_each(|nic| add_nic(&mut to, nic));
    add_totals(&mut to, &snapshot.totals);
    add_qps(&mut to, snapshot);
    add_processes(&mut to, snapshot);
    let of_all = health(snapshot, None);
    for host in &of_all.hosts {
        let of = [("host", host.host.as_str())];
        to.add("unbroken_health", &of, f64::from(of_all.verdict_on(host).exit_status()));
        to.add("unbroken_capacity_ratio", &of, host.capacity);
    }
    snapshot.processes.iter().for_each(|process| add_sdr(&mut to, process));
    snapshot.communicators.iter().for_each(|c| add_communicator(&mut to, c));
    if let Some(edge) = &*snapshot.edge {
        add_edge(&mut to, edge);
    }
    to.text()
}

/// Device and port as node_exporter's labels have them: `a/0/2` is port 2 of `a/0`.
fn device_and_port(nic: &str) -> (&str, &str) {
    match nic.match_indices('/').nth(1) {
        Some((at, _)) => (&nic[..at], &nic[at + 1..]),
        None => (nic, "1"),
    }
}

fn add_nic(to: &mut Families, nic: &NicStatus) {
    let c = &nic.counters;
    let of = [("nic", nic.nic.as_str())];
    let state = nic.state.split(',').next().unwrap_or_default();
    for known in ["active", "down", "dead", "unknown"] {
        let is_it = f64::from(u8::from(known == state));
        to.add("unbroken_nic_state", &[of[0], ("state", known)], is_it);
    }
    to.add("unbroken_nic_drained", &of, f64::from(u8::from(nic.state.ends_with("drained"))));
    to.add("unbroken_nic_faults", &of, nic.faults.len() as f64);
    to.add("unbroken_nic_processes", &of, nic.pids.len() as f64);
    // node_exporter itself has those of the machine's devices.
    if nic.device == "verbs" {
        return;
    }
    let (device, port) = device_and_port(&nic.nic);
    let of_port = [("device", device), ("port", port)];
    let id = if state == "active" { 4.0 } else { 1.0 };
    to.add("node_infiniband_state_id", &of_port, id);
    for counter in NIC_COUNTERS {
        let Some(metric) = counter.metric else { continue };
        let value = c.get(counter.of) as f64;
        match metric.direction {
            Some(direction) => to.add(metric.name, &[of[0], ("direction", direction)], value),
            None if metric.name.starts_with("node_infiniband") => {
                to.add(metric.name, &of_port, value);
            }
            None => to.add(metric.name, &of, value),
        }
    }
}

fn add_totals(to: &mut Families, totals: &Totals) {
    to.add("unbroken_events_total", &[], totals.events as f64);
    to.add("unbroken_directory_losses_total", &[], totals.directory_losses as f64);
    for (result, count) in ["done", "failed"].into_iter().zip(totals.migrations) {
        to.add("unbroken_path_migrations_total", &[("result", result)], count as f64);
    }
    for (key, count) in &totals.switches {
        let labels =
            [("host", key.host.as_str()), ("kind", key.kind), ("reason", key.reason.as_str())];
        to.add("unbroken_switches_total", &labels, *count as f64);
    }
    for (host, times) in &totals.outages {
        to.times("unbroken_outage_seconds", &[("host", host)], times);
    }
    for (kind, times) in &totals.switching {
        to.times("unbroken_switching_seconds", &[("kind", kind)], times);
    }
    let mut counts = |name, label, counts: &BTreeMap<String, u64>| {
        for (of, count) in counts {
            to.add(name, &[(label, of.as_str())], *count as f64);
        }
    };
    counts("unbroken_replayed_work_requests_total", "host", &totals.replayed);
    counts("unbroken_gave_up_queue_pairs_total", "host", &totals.give_ups);
    counts("unbroken_nic_deaths_total", "nic", &totals.deaths);
    counts("unbroken_nic_port_downs_total", "nic", &totals.port_downs);
}

fn add_qps(to: &mut Families, snapshot: &Snapshot) {
    for (host, counts) in &*snapshot.counts {
        let of = [("host", host.as_str())];
        for (name, count) in [
            ("unbroken_queue_pairs", counts.all),
            ("unbroken_protected_queue_pairs", counts.protected),
            ("unbroken_pending_queue_pairs", counts.pending),
            ("unbroken_displaced_queue_pairs", counts.displaced),
            ("unbroken_failed_queue_pairs", counts.failed),
        ] {
            to.add(name, &of, count as f64);
        }
    }
    for ((host, reason), count) in &*snapshot.unprotected {
        let labels = [("host", host.as_str()), ("reason", reason.as_str())];
        to.add("unbroken_unprotected_queue_pairs", &labels, *count as f64);
    }
}

fn add_processes(to: &mut Families, snapshot: &Snapshot) {
    let silent = snapshot.processes.iter().filter(|p| !p.error.is_empty()).count();
    to.add("unbroken_silent_processes", &[], silent as f64);
    let mut by_host: BTreeMap<&str, [u64; 4]> = BTreeMap::new();
    for process in snapshot.processes.iter().filter(|p| p.error.is_empty()) {
        let [all, forged, ready, awaited] = by_host.entry(&process.host).or_default();
        *all += 1;
        *forged += process.forged;
        *ready += u64::from(process.backups.ready);
        *awaited += u64::from(process.backups.awaited);
    }
    for (host, [all, forged, ready, awaited]) in by_host {
        let of = [("host", host)];
        to.add("unbroken_processes", &of, all as f64);
        to.add("unbroken_forged_datagrams_total", &of, forged as f64);
        for (state, count) in [("ready", ready), ("awaited", awaited)] {
            to.add("unbroken_backup_queue_pairs", &[of[0], ("state", state)], count as f64);
        }
    }
    for host in snapshot.hosts() {
        let lost = snapshot.totals.directory_lost.contains_key(&host);
        to.add("unbroken_directory_lost", &[("host", &host)], f64::from(u8::from(lost)));
    }
}

fn add_sdr(to: &mut Families, process: &Process) {
    let Some(sdr) = &process.sdr else { return };
    let pid = process.pid.to_string();
    let of = [("host", process.host.as_str()), ("pid", pid.as_str())];
    for (name, value) in [
        ("unbroken_sdr_queue_pairs", sdr.qps),
        ("unbroken_sdr_sent_packets_total", sdr.sent),
        ("unbroken_sdr_received_packets_total", sdr.received),
        ("unbroken_sdr_duplicate_packets_total", sdr.duplicates),
        ("unbroken_sdr_late_packets_total", sdr.late),
        ("unbroken_sdr_outside_packets_total", sdr.outside),
        ("unbroken_sdr_under_runs_total", sdr.under_runs),
    ] {
        to.add(name, &of, value as f64);
    }
}

fn add_communicator(to: &mut Families, c: &Communicator) {
    let (pid, rank) = (c.pid.to_string(), c.rank.to_string());
    let of = [("pid", pid.as_str()), ("rank", rank.as_str())];
    for (name, value) in [
        ("unbroken_collective_operations_total", c.counters.operations),
        ("unbroken_collective_failed_paths_total", c.counters.failures),
        ("unbroken_collective_moved_streams_total", c.counters.moves),
        ("unbroken_collective_resent_frames_total", c.counters.again),
        ("unbroken_collective_nics_down", c.down.len() as u64),
        ("unbroken_collective_broken", u64::from(c.broken.is_some())),
    ] {
        to.add(name, &of, value as f64);
    }
    let rails = c.sent_bytes.len().saturating_sub(1);
    for (rail, bytes) in c.sent_bytes.iter().enumerate() {
        let name = if rail == rails { "memory".to_owned() } else { rail.to_string() };
        let labels = [of[0], of[1], ("rail", name.as_str())];
        to.add("unbroken_collective_sent_bytes_total", &labels, *bytes as f64);
    }
}

fn add_edge(to: &mut Families, edge: &Edge) {
    let of = [("edge", edge.name.as_str())];
    to.add("unbroken_edge_daemon_running", &of, f64::from(u8::from(edge.daemon.is_some())));
    to.add("unbroken_edge_destinations", &of, edge.destinations as f64);
    to.add("unbroken_edge_last_paths", &of, edge.last_ways.len() as f64);
    for uplink in &edge.uplinks {
        for (layer, is_up) in [
            ("carrier", uplink.carrier == "up"),
            ("bfd", uplink.bfd == "up"),
            ("bgp", uplink.bgp == "Established"),
        ] {
            let labels = [of[0], ("device", uplink.device.as_str()), ("layer", layer)];
            to.add("unbroken_edge_uplink_up", &labels, f64::from(u8::from(is_up)));
        }
    }
    for state in ["wanted", "present", "in_hw"] {
        if let Some(count) = edge.rules.as_ref().and_then(|rules| rules[state].as_f64()) {
            to.add("unbroken_edge_rules", &[of[0], ("state", state)], count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_have_node_exporters_labels() {
        assert_eq!(device_and_port("a/0"), ("a/0", "1"));
        assert_eq!(device_and_port("a/0/2"), ("a/0", "2"));
        assert_eq!(device_and_port("10.0.0.1"), ("10.0.0.1", "1"));
    }

    #[test]
    fn names_are_sorted_out() {
        let mut names: Vec<&str> = KINDS.iter().map(|kind| kind.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), KINDS.len(), "each once");
        for kind in KINDS.iter() {
            assert_eq!(kind.name.ends_with("_total"), kind.of == COUNTER, "{}", kind.name);
        }
    }

    #[test]
    fn labels_are_escaped_and_a_page_is_whole() {
        let mut snapshot = Snapshot::default();
        let key = ("a".to_owned(), "its \"peer\"\nis\\gone".to_owned());
        snapshot.unprotected = std::sync::Arc::new([(key, 3)].into());
        let page = metrics(&snapshot);
        let line = r#"{host="a",reason="its \"peer\"\nis\\gone"} 3"#;
        assert!(page.contains(line), "{page}");
        let key = ("a\x1b[2J".to_owned(), "bell\x07, \u{9b}and\r\ttab".to_owned());
        snapshot.unprotected = std::sync::Arc::new([(key, 1)].into());
        let page = metrics(&snapshot);
        let line =
            "{host=\"a\u{fffd}[2J\",reason=\"bell\u{fffd}, \u{fffd}and\u{fffd}\u{fffd}tab\"} 1";
        assert!(page.contains(line), "{page}");
        assert!(page.chars().all(|c| c == '\n' || !c.is_control()));
        assert!(page.contains("# TYPE unbroken_events_total counter\nunbroken_events_total 0\n"));
    }
}
