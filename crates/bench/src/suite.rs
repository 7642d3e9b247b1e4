//! All benches.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use crate::many;
use crate::peers::Contender;
use crate::report::{median, percentile, table, write, Better, Entry};
use crate::switches::{self, Switched};
use crate::udp_bw::Touch;
use crate::udp_lat::Wait;
use crate::Result;

/// A contender with the name by which its figures are found.
type Named = (&'static str, Contender);

/// Runs everything, prints the table, writes the file. The exit status is 1 where something could not run.
pub fn run(unbroken: &Path, scale: &Path, out: &Path, rounds: u32, switches: u32) -> Result<ExitCode> {
    let unbroken = std::fs::canonicalize(unbroken)
        .map_err(|e| format!("cannot find {} ({e}); build it with: make all", unbroken.display()))?;
    let mut failures = Vec::new();
    let mut entries = bandwidth(&play(&contenders_of_bandwidth(), &unbroken, rounds, &mut failures));
    entries.extend(latency(&play(&contenders_of_latency(), &unbroken, rounds, &mut failures)));
    match many::run(&unbroken, scale) {
        Ok(more) => entries.extend(more),
        Err(e) => failures.push(format!("one QP among many: {e}")),
    }
    entries.extend(switching(&unbroken, switches, &mut failures));
    println!("\n{}", table(&entries));
    write(&entries, out)?;
    println!("written to {}", out.display());
    for failure in &failures {
        eprintln!("not measured: {failure}");
    }
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn contenders_of_bandwidth() -> Vec<Named> {
    vec![
        ("udp", Contender::UdpBw(Touch::None)),
        ("write", Contender::bandwidth("ib_write_bw", 1 << 20, 1, true)),
        ("write-bare", Contender::bandwidth("ib_write_bw", 1 << 20, 1, false)),
        ("udp-copies", Contender::UdpBw(Touch::Both)),
        ("iperf", Contender::Iperf),
        ("write-64k-8", Contender::bandwidth("ib_write_bw", 1 << 16, 8, true)),
        ("send", Contender::bandwidth("ib_send_bw", 1 << 20, 1, true)),
        ("read", Contender::bandwidth("ib_read_bw", 1 << 20, 1, true)),
    ]
}

fn contenders_of_latency() -> Vec<Named> {
    vec![
        ("udp-busy", Contender::UdpLat(Wait::Busy)),
        ("send-lat", Contender::latency("ib_send_lat", 8)),
        ("udp-blocking", Contender::UdpLat(Wait::Blocking)),
        ("write-lat", Contender::latency("ib_write_lat", 8)),
    ]
}

/// The figures of each contender, round by round, and a command that measures it.
type Figures = HashMap<&'static str, (Vec<f64>, String)>;

/// Runs all contenders in turn, `rounds` times; in every other round in the opposite order, so that drift favours none. Who is compared
/// with whom runs right after them.
fn play(contenders: &[Named], unbroken: &Path, rounds: u32, failures: &mut Vec<String>) -> Figures {
    let mut figures: HashMap<&'static str, Vec<f64>> = HashMap::new();
    let mut failed: HashMap<&'static str, String> = HashMap::new();
    for round in 0..rounds {
        let forth = round % 2 == 0;
        for n in 0..contenders.len() {
            let (name, contender) = &contenders[if forth { n } else { contenders.len() - 1 - n }];
            if failed.contains_key(name) {
                continue;
            }
            print!("round {}: {} … ", round + 1, contender.command());
            let _ = std::io::stdout().flush();
            match contender.run(unbroken) {
                Ok(figure) => {
                    println!("{figure:.2}");
                    figures.entry(name).or_default().push(figure);
                }
                Err(e) => {
                    println!("failed");
                    failed.insert(name, e.to_string());
                }
            }
        }
    }
    failures.extend(failed.into_values());
    let command = |name| contenders.iter().find(|(n, _)| *n == name).map(|(_, c)| c.command()).unwrap_or_default();
    figures.into_iter().map(|(name, all)| (name, (all, command(name)))).collect()
}

/// An entry for each (name, bench, metric, peers with bars) whose figures are there.
fn compare(
    figures: &Figures,
    name: &str,
    bench: &str,
    metric: &str,
    better: Better,
    peers: &[(&str, &str, Option<f64>)],
) -> Vec<Entry> {
    let Some((values, command)) = figures.get(name) else { return Vec::new() };
    let Some(value) = median(values) else { return Vec::new() };
    let unit = if better == Better::Higher { "Gbit/s" } else { "us" };
    let entry = Entry::new(bench, metric, value, unit, better, command);
    let beside = |(peer, title, bar): &(&str, &str, Option<f64>)| {
        let beside = entry.clone().beside_rounds(title, values, &figures.get(peer)?.0)?;
        Some(match bar {
            Some(bar) => beside.bar(*bar),
            None => beside,
        })
    };
    peers.iter().filter_map(beside).collect()
}

fn bandwidth(figures: &Figures) -> Vec<Entry> {
    let udp = ("udp", "bare GSO/GRO UDP", Some(0.6));
    let udp_only = ("udp", "bare GSO/GRO UDP", None);
    let all = [
        ("udp", "bare GSO/GRO UDP", "4 KiB segments", vec![("iperf", "iperf3, one TCP stream", Some(1.0))]),
        (
            "write",
            "ib_write_bw",
            "1 MiB",
            vec![
                udp,
                ("udp-copies", "bare UDP, each side copies once", None),
                ("iperf", "iperf3, one TCP stream", None),
                ("write-bare", "the same, --no-failover", Some(0.99)),
            ],
        ),
        ("write-64k-8", "ib_write_bw", "64 KiB, 8 QPs", vec![udp_only]),
        ("send", "ib_send_bw", "1 MiB", vec![udp_only]),
        ("read", "ib_read_bw", "1 MiB", vec![udp_only]),
    ];
    let entries =
        all.iter().map(|(name, bench, metric, peers)| compare(figures, name, bench, metric, Better::Higher, peers));
    entries.flatten().collect()
}

fn latency(figures: &Figures) -> Vec<Entry> {
    let busy = ("udp-busy", "bare UDP, busy-polled, same datagrams", Some(1.5));
    let blocking = ("udp-blocking", "bare UDP, blocking, same datagrams", Some(1.5));
    let mut entries = compare(figures, "send-lat", "ib_send_lat", "8 B, typical", Better::Lower, &[busy]);
    entries.extend(compare(figures, "write-lat", "ib_write_lat", "8 B, typical", Better::Lower, &[blocking]));
    entries
}

fn switching(unbroken: &Path, runs: u32, failures: &mut Vec<String>) -> Vec<Entry> {
    let mut seen: Vec<Switched> = Vec::new();
    for run in 0..runs {
        print!("switch {}: {}, nic a/0 dead … ", run + 1, switches::spec().shown());
        let _ = std::io::stdout().flush();
        match switches::run(unbroken) {
            Ok(switched) => {
                println!("{:.0} us, gap {:.1} ms", switched.switch_us, switched.gap_ms);
                seen.push(switched);
            }
            Err(e) => {
                println!("failed");
                failures.push(format!("switch {}: {e}", run + 1));
            }
        }
    }
    let command = "unbroken fault set 'nic a/0 dead' during: ".to_string() + &switches::spec().shown();
    let entry = |metric: &str, value: Option<f64>, unit: &str| {
        Some(Entry::new("switch of one QP, NIC dead", metric, value?, unit, Better::Lower, &command))
    };
    let switch_us: Vec<f64> = seen.iter().map(|s| s.switch_us).collect();
    let detect_us: Vec<f64> = seen.iter().filter_map(|s| s.detect_us).collect();
    let gap_ms: Vec<f64> = seen.iter().map(|s| s.gap_ms).collect();
    let entries = [
        entry("switch, median", median(&switch_us), "us").map(|e| e.bar(1000.0)),
        entry("switch, 99th percentile", percentile(&switch_us, 0.99), "us").map(|e| e.bar(5000.0)),
        entry("detection, median", median(&detect_us), "us"),
        entry("longest gap at the receiver, median", median(&gap_ms), "ms").map(|e| e.bar(20.0)),
    ];
    entries.into_iter().flatten().collect()
}
