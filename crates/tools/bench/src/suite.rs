//! All benches.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use unbroken_fabric::DeviceKind;

use crate::codes;
use crate::collectives;
use crate::many;
use crate::peers::Contender;
use crate::report::{markdown, median, percentile, table, write, Better, Entry};
use crate::sdr;
use crate::switches::{self, Outcome, Switched};
use crate::udp_bw::{best_window, Touch};
use crate::udp_lat::Wait;
use crate::Result;

/// A contender with the name by which its figures are found.
type Named = (&'static str, Contender);
/// The figures of a group's contenders, round by round, and a command that measures it. A round
/// without a figure is NaN.
type Figures = HashMap<&'static str, (Vec<f64>, String)>;
/// What is compared: name, bench, metric, and its peers, each with a title and perhaps a bar.
type Comparison = (
    &'static str,
    &'static str,
    &'static str,
    &'static [(&'static str, &'static str, Option<f64>)],
);

/// Contenders that are compared with each other, and so run right after each other.
struct Group {
    contenders: Vec<Named>,
    better: Better,
    comparisons: &'static [Comparison],
}

/// Runs everything, prints the table, writes the file. The exit status is 1 where something could
/// not run; a bar that is missed is only shown.
pub fn run(
    unbroken: &Path,
    programs: &Path,
    out: &Path,
    (rounds, switches): (u32, u32),
    python: Option<&Path>,
) -> Result<ExitCode> {
    let unbroken = found(unbroken)?;
    let mut failures = Vec::new();
    let mut groups = groups(best_window(Touch::None)?, best_window(Touch::Both)?);
    groups.extend(failover_groups(&programs.join("verbs").display().to_string()));
    let mut entries = play(&groups, &unbroken, rounds, &mut failures);
    match many::run(&unbroken, &programs.join("scale")) {
        Ok(more) => entries.extend(more),
        Err(e) => failures.push(format!("one QP among many: {e}")),
    }
    match codes::run(rounds) {
        Ok(more) => entries.extend(more),
        Err(e) => failures.push(format!("erasure codes: {e}")),
    }
    match sdr::run(rounds) {
        Ok(more) => entries.extend(more),
        Err(e) => failures.push(format!("SDR: {e}")),
    }
    match collectives::run(&unbroken, python, rounds) {
        Ok(more) => entries.extend(more),
        Err(e) => failures.push(format!("collectives: {e}")),
    }
    entries.extend(switching(&unbroken, switches));
    println!("\n{}\n{}", table(&entries), markdown(&entries));
    write(&entries, out)?;
    println!("written to {}", out.display());
    Ok(told(&failures))
}

/// Only the switches: runs them, and prints their table.
pub fn only_switches(unbroken: &Path, runs: u32) -> Result<ExitCode> {
    println!("\n{}", table(&switching(&found(unbroken)?, runs)));
    Ok(ExitCode::SUCCESS)
}

/// Only what failover costs while nothing fails: runs it, and prints its table.
pub fn only_failover(unbroken: &Path, programs: &Path, rounds: u32) -> Result<ExitCode> {
    let verbs = programs.join("verbs");
    if !verbs.is_file() {
        return Err(
            format!("cannot find {}; build it with: benches/programs.sh", verbs.display()).into()
        );
    }
    let groups = failover_groups(&verbs.display().to_string());
    let mut failures = Vec::new();
    println!("\n{}", table(&play(&groups, &found(unbroken)?, rounds, &mut failures)));
    Ok(told(&failures))
}

/// The command, as a path that holds wherever it is called.
pub fn found(unbroken: &Path) -> Result<PathBuf> {
    std::fs::canonicalize(unbroken).map_err(|e| {
        format!("cannot find {} ({e}); build it with: make all", unbroken.display()).into()
    })
}

fn told(failures: &[String]) -> ExitCode {
    for failure in failures {
        eprintln!("not measured: {failure}");
    }
    if failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

const UDP: &str = "bare GSO/GRO UDP";

fn groups(window: u32, window_of_copies: u32) -> Vec<Group> {
    let udp = || ("udp", Contender::UdpBw { touch: Touch::None, window });
    let bandwidth =
        |name, program, size, qps| (name, Contender::bandwidth(program, size, qps, true));
    let write = || bandwidth("write", "ib_write_bw", 1 << 20, 1);
    let lat = |wait, plain| Contender::UdpLat { wait, plain };
    let faster =
        |contenders, comparisons| Group { contenders, better: Better::Higher, comparisons };
    let shorter =
        |contenders, comparisons| Group { contenders, better: Better::Lower, comparisons };
    vec![
        faster(
            vec![udp(), write()],
            &[("write", "ib_write_bw", "1 MiB", &[("udp", UDP, Some(0.6))])],
        ),
        faster(
            vec![
                ("udp-copies", Contender::UdpBw { touch: Touch::Both, window: window_of_copies }),
                write(),
                ("iperf", Contender::Iperf),
                udp(),
            ],
            &[
                (
                    "write",
                    "ib_write_bw",
                    "1 MiB",
                    &[
                        ("udp-copies", "bare UDP, each side copies once", None),
                        ("iperf", "iperf3, one TCP stream", None),
                    ],
                ),
                ("udp", UDP, "4 KiB segments", &[("iperf", "iperf3, one TCP stream", Some(1.0))]),
            ],
        ),
        faster(
            vec![udp(), bandwidth("send", "ib_send_bw", 1 << 20, 1)],
            &[("send", "ib_send_bw", "1 MiB", &[("udp", UDP, None)])],
        ),
        faster(
            vec![udp(), bandwidth("read", "ib_read_bw", 1 << 20, 1)],
            &[("read", "ib_read_bw", "1 MiB", &[("udp", UDP, None)])],
        ),
        faster(
            vec![udp(), bandwidth("write-64k-8", "ib_write_bw", 1 << 16, 8)],
            &[("write-64k-8", "ib_write_bw", "64 KiB, 8 QPs", &[("udp", UDP, None)])],
        ),
        shorter(
            vec![
                ("udp-busy", lat(Wait::Busy, false)),
                ("send-lat", Contender::latency("ib_send_lat", 8)),
                ("udp-plain", lat(Wait::Busy, true)),
            ],
            &[(
                "send-lat",
                "ib_send_lat",
                "8 B, typical",
                &[
                    ("udp-busy", "bare UDP, busy-polled, same datagrams", Some(1.5)),
                    ("udp-plain", "bare UDP, busy-polled, messages only", None),
                ],
            )],
        ),
        shorter(
            vec![
                ("udp-blocking", lat(Wait::Blocking, false)),
                ("write-lat", Contender::latency("ib_write_lat", 8)),
            ],
            &[(
                "write-lat",
                "ib_write_lat",
                "8 B, typical",
                &[("udp-blocking", "bare UDP, blocking, same datagrams", Some(1.5))],
            )],
        ),
    ]
}

/// What failover costs while nothing fails, on both kinds of devices. Posts on softnic do the NIC's
/// work, too.
fn failover_groups(verbs: &str) -> Vec<Group> {
    const PEER: &str = "the same, --no-failover";
    const CALLS: [(&str, DeviceKind, &[Comparison]); 6] = [
        (
            "post_send",
            DeviceKind::Full,
            &[("on", "ibv_post_send, full devices", "WRITE, 8 B", &[("off", PEER, None)])],
        ),
        (
            "post_send",
            DeviceKind::Plain,
            &[("on", "ibv_post_send, plain devices", "WRITE, 8 B", &[("off", PEER, None)])],
        ),
        (
            "post_recv",
            DeviceKind::Full,
            &[("on", "ibv_post_recv, full devices", "8 B", &[("off", PEER, None)])],
        ),
        (
            "post_recv",
            DeviceKind::Plain,
            &[("on", "ibv_post_recv, plain devices", "8 B", &[("off", PEER, None)])],
        ),
        (
            "poll_cq",
            DeviceKind::Full,
            &[("on", "ibv_poll_cq, full devices", "empty", &[("off", PEER, None)])],
        ),
        (
            "poll_cq",
            DeviceKind::Plain,
            &[("on", "ibv_poll_cq, plain devices", "empty", &[("off", PEER, None)])],
        ),
    ];
    let contender =
        |call, device, failover| Contender::Call { program: verbs.into(), device, failover, call };
    let calls = CALLS.into_iter().map(|(call, device, comparisons)| Group {
        contenders: vec![
            ("on", contender(call, device, true)),
            ("off", contender(call, device, false)),
        ],
        better: Better::Lower,
        comparisons,
    });
    let full = |failover| Contender::bandwidth("ib_write_bw", 1 << 20, 1, failover);
    let plain = |failover| Contender::plain_bandwidth("ib_write_bw", 1 << 20, failover);
    let bandwidths = [
        Group {
            contenders: vec![("on", full(true)), ("off", full(false))],
            better: Better::Higher,
            comparisons: &[("on", "ib_write_bw", "1 MiB", &[("off", PEER, Some(0.99))])],
        },
        Group {
            contenders: vec![("on", plain(true)), ("off", plain(false))],
            better: Better::Higher,
            comparisons: &[(
                "on",
                "ib_write_bw, plain devices",
                "1 MiB",
                &[("off", PEER, Some(0.99))],
            )],
        },
    ];
    calls.chain(bandwidths).collect()
}

/// Runs all groups in turn, `rounds` times, and compares.
fn play(groups: &[Group], unbroken: &Path, rounds: u32, failures: &mut Vec<String>) -> Vec<Entry> {
    let mut figures: Vec<Figures> = groups.iter().map(|_| Figures::new()).collect();
    let mut failed: HashMap<&'static str, String> = HashMap::new();
    for round in 0..rounds {
        for (group, figures) in groups.iter().zip(&mut figures) {
            play_round(group, round, unbroken, figures, &mut failed);
        }
    }
    failures.extend(failed.into_values());
    let entries = groups.iter().zip(&figures).flat_map(|(group, figures)| {
        group
            .comparisons
            .iter()
            .flat_map(move |comparison| compare(figures, group.better, comparison))
    });
    entries.collect()
}

/// A round of a group: its contenders forth and back (A B B A; in every other round B A A B), so
/// that what drifts favours none of them. The figure of each is the mean of its two runs. One that
/// failed is not run again.
fn play_round(
    group: &Group,
    round: u32,
    unbroken: &Path,
    figures: &mut Figures,
    failed: &mut HashMap<&'static str, String>,
) {
    let forth = 0..group.contenders.len();
    let mut order: Vec<usize> = forth.clone().chain(forth.rev()).collect();
    if round % 2 == 1 {
        let half = order.len() / 2;
        order.rotate_left(half);
    }
    let mut runs: HashMap<&'static str, Vec<f64>> = HashMap::new();
    for n in order {
        let (name, contender) = &group.contenders[n];
        if failed.contains_key(name) {
            continue;
        }
        print!("round {}: {} … ", round + 1, contender.command());
        let _ = std::io::stdout().flush();
        match contender.run(unbroken) {
            Ok(figure) => {
                println!("{figure:.2}");
                runs.entry(name).or_default().push(figure);
            }
            Err(e) => {
                println!("failed");
                failed.insert(name, e.to_string());
            }
        }
    }
    for (name, contender) in &group.contenders {
        let figure =
            runs.get(name).filter(|r| r.len() == 2).map_or(f64::NAN, |r| (r[0] + r[1]) / 2.0);
        figures.entry(name).or_insert_with(|| (Vec::new(), contender.command())).0.push(figure);
    }
}

/// The entries of a comparison whose figures are there.
fn compare(
    figures: &Figures,
    better: Better,
    (name, bench, metric, peers): &Comparison,
) -> Vec<Entry> {
    let unit = if better == Better::Higher { "Gbit/s" } else { "us" };
    let beside = |(peer, title, bar): &(&str, &str, Option<f64>)| {
        let ((values, command), (peer_values, _)) = (figures.get(name)?, figures.get(peer)?);
        let both = values.iter().zip(peer_values).filter(|(v, p)| !v.is_nan() && !p.is_nan());
        let (values, peer_values): (Vec<f64>, Vec<f64>) = both.unzip();
        let entry = Entry::new(bench, metric, median(&values)?, unit, better, command);
        let entry = entry.beside_rounds(title, &values, &peer_values)?;
        Some(match bar {
            Some(bar) => entry.bar(*bar),
            None => entry,
        })
    };
    peers.iter().filter_map(beside).collect()
}

/// A run that breaks off, or leaves a path that works, is a result, too: a bar that is missed.
fn switching(unbroken: &Path, runs: u32) -> Vec<Entry> {
    let mut seen: Vec<Switched> = Vec::new();
    let (mut suspected, mut broken) = (0_u32, 0_u32);
    for run in 0..runs {
        print!("switch {}: {}, nic a/0 dead … ", run + 1, switches::spec().shown());
        let _ = std::io::stdout().flush();
        match switches::run(unbroken, switches::NIC_DEAD) {
            Ok(Outcome::Switched(switched)) => {
                let gap =
                    switched.gap_ms.map_or("none recorded".into(), |ms| format!("{ms:.1} ms"));
                println!("{:.0} us, gap {gap}, {} switches", switched.switch_us, switched.switches);
                suspected += u32::from(switched.switches > 1);
                seen.push(switched);
            }
            Ok(Outcome::LeftBefore(what)) => {
                println!("it left a path that worked: {what}");
                suspected += 1;
            }
            Err(e) => {
                println!("broke off: {e}");
                broken += 1;
            }
        }
    }
    let command =
        "unbroken fault set 'nic a/0 dead' during: ".to_string() + &switches::spec().shown();
    let new = |metric: &str, value: f64, unit: &str| {
        Entry::new("switch of one QP, NIC dead", metric, value, unit, Better::Lower, &command)
    };
    let of = |metric: &str, values: Vec<f64>, unit: &str| {
        Some(new(metric, median(&values)?, unit).of_rounds(&values))
    };
    let switch_us: Vec<f64> = seen.iter().map(|s| s.switch_us).collect();
    let p99_us =
        percentile(&switch_us, 0.99).map(|us| new("switch, 99th percentile", us, "us").bar(5000.0));
    let detect_us = seen.iter().filter_map(|s| s.detect_us).collect();
    let gap_ms: Vec<f64> = seen.iter().filter_map(|s| s.gap_ms).collect();
    let unrecorded = seen.len() - gap_ms.len();
    let unit = format!("of {runs}");
    let entries = [
        of("switch, median", switch_us, "us").map(|e| e.bar(1000.0)),
        p99_us,
        of("detection, median", detect_us, "us"),
        of("longest gap at the receiver, median", gap_ms, "ms").map(|e| e.bar(20.0)),
        Some(new("runs without a recorded gap", unrecorded as f64, &unit).bar(0.0)),
        Some(new("runs in which it left a path that worked", suspected.into(), &unit).bar(0.0)),
        Some(new("runs that broke off", broken.into(), &unit).bar(0.0)),
    ];
    entries.into_iter().flatten().collect()
}
