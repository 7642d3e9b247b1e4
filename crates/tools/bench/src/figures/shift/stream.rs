//! Figure 7: the throughput of perftest over time, while a NIC fails and comes back.

use std::time::Duration;

use unbroken_chart::{Axis, Figure, Line, Lines, Look, Marker, Panel, Unit};
use unbroken_events::{read_events, SwitchKind, What};
use unbroken_fabric::{now_us, Schedule};
use unbroken_testkit::{Lab, Pair, Spec, Watch};

use super::{Drawing, Row, Tools};
use crate::Result;

/// The paper's: the fault, and its end.
const FAULT_S: f64 = 5.0;
const HEALED_S: f64 = 10.0;
/// So long the program sends; the way back is a second after the NIC is healed.
const SECONDS: u64 = 13;
/// A point of the lines stands for so long (the paper's for a second).
const BIN_US: u64 = 250_000;
const SAMPLE: Duration = Duration::from_millis(20);
/// Payload that shows that the test itself, not its set-up, is on.
const FLOWS_BYTES: u64 = 8 << 20;
const LIMIT: Duration = Duration::from_secs(15);
/// A pair that has not ended so long after its time hangs.
const LATE_US: u64 = 15_000_000;
/// The default NIC and those that may stand in for it.
const NICS: u8 = 4;

/// The programs, and the host whose NICs the data arrives at.
const PROGRAMS: [(&str, &str); 3] =
    [("ib_write_bw", "b"), ("ib_send_bw", "b"), ("ib_read_bw", "a")];
/// A NIC that fails, at either end, a cable, and sends that fail again and again.
const FAULTS: [&str; 4] = ["nic a/0 dead", "nic b/0 dead", "cable a/0 cut", WQE_ERROR];
const WQE_ERROR: &str = "wqe-error a/0";
/// How often they fail.
const ERROR_EVERY: Duration = Duration::from_millis(100);

/// What a run showed.
struct Run {
    /// Time in s since the first data; Gbit/s of the default NIC and of all others together.
    points: Vec<(f64, f64, f64)>,
    /// The client ended well.
    ended_well: bool,
    /// Of the switches away from the path that failed: their switch_us, the slower end's.
    away_ms: Option<f64>,
    /// It is back on the default NIC.
    is_back: bool,
    /// The longest interval without data around the fault, in ms.
    gap_ms: Option<f64>,
}

fn run(tools: &Tools, program: &str, receiver: &str, fault: &str, failover: bool) -> Result<Run> {
    let lab = Lab::new(&tools.unbroken)?;
    let args = format!("-d unb0 -F -s 65536 -D {SECONDS} --report_gbits");
    let spec = Spec { failover, ..Spec::new(program, &args) };
    let mut watch = Watch::new(&lab, receiver, NICS)?;
    let mut pair = Pair::start(&lab, &spec)?;
    pair.client
        .wait_until("data arrives", LIMIT, || watch.sample().rx_payload_bytes[0] > FLOWS_BYTES)?;
    let begin_us = now_us();
    let seconds = Duration::from_secs_f64;
    let lasts = seconds(HEALED_S - FAULT_S);
    // A fault that comes again does so until it is cleared.
    let comes_again = fault == WQE_ERROR;
    let when = Schedule {
        at: seconds(FAULT_S),
        lasts: (!comes_again).then_some(lasts),
        every: comes_again.then_some(ERROR_EVERY),
    };
    let fault = lab.fabric().schedule(&fault.parse()?, &when)?;
    let mut heals_us = comes_again.then(|| fault.from_us + lasts.as_micros() as u64);
    let pid = if receiver == "a" { pair.client.pid() } else { pair.server.pid() };
    let deadline_us = begin_us + SECONDS * 1_000_000 + LATE_US;
    while pair.client.ended().is_none() && now_us() < deadline_us {
        watch.sample();
        watch.collect_gaps(&lab, pid);
        if heals_us.take_if(|at| now_us() >= *at).is_some() {
            lab.fabric().clear(None)?;
        }
        std::thread::sleep(SAMPLE);
    }
    let status = pair.client.ended();
    if failover && !status.is_some_and(|s| s.success()) {
        return Err(pair.client.failed(format!("did not outlive '{}'", fault.fault)).into());
    }
    let switches = read_events(lab.runtime())?.into_iter().filter_map(|e| match e.what {
        What::Switch(s) if s.detected_at_us >= fault.from_us => Some(s),
        _ => None,
    });
    let (away, back): (Vec<_>, Vec<_>) = switches.partition(|s| s.kind == SwitchKind::Passive);
    let slowest = away.iter().map(|s| s.switch_us).max();
    let all = watch.bins(BIN_US);
    let points = all.iter().map(|(end_us, rates)| {
        let time_s = (*end_us as f64 - BIN_US as f64 / 2.0 - begin_us as f64) / 1e6;
        (time_s, rates[0], rates[1..].iter().sum())
    });
    Ok(Run {
        points: points.filter(|(time_s, ..)| *time_s >= 0.0).collect(),
        ended_well: status.is_some_and(|s| s.success()),
        away_ms: slowest.map(|us| us as f64 / 1e3),
        is_back: back.iter().any(|s| s.to == "a/0-b/0" || s.to == "b/0-a/0"),
        gap_ms: watch.longest_gap(fault.from_us, fault.from_us + 2_000_000).map(|g| g.len_ms()),
    })
}

impl Run {
    fn line(&self, name: &str, colour: usize, of: fn(&(f64, f64, f64)) -> f64) -> Line {
        Line::new(name, colour, self.points.iter().map(|p| (p.0, of(p))).collect())
    }

    fn highest(&self) -> f64 {
        self.points.iter().map(|p| p.1.max(p.2)).fold(1.0, f64::max)
    }
}

fn panel(program: &str, fault: &str, with: &Run, without: Option<&Run>) -> Panel {
    let mut lines = vec![
        with.line("the QP's own NIC", 2, |p| p.1),
        with.line("another NIC", 3, |p| p.2).looking(Look::Dashed),
    ];
    if let Some(run) = without {
        lines.push(run.line("without failover", 0, |p| p.1 + p.2).looking(Look::Dotted));
    }
    let highest = without.map_or(0.0, Run::highest).max(with.highest());
    Panel::Lines(Lines {
        title: format!("{program}, {fault}"),
        x: Axis::linear("time", 0.0, SECONDS as f64, Unit::S),
        y: Axis::linear("throughput", 0.0, 1.1 * highest, Unit::Gbps),
        lines,
        markers: vec![
            Marker { x: FAULT_S, words: "fault".into() },
            Marker { x: HEALED_S, words: "healed".into() },
        ],
    })
}

/// Throughput of write, send and read through a fault and back.
pub fn figure_7(tools: &Tools) -> Result<Drawing> {
    let (mut panels, mut rows) = (Vec::new(), Vec::new());
    for (n, fault) in FAULTS.iter().enumerate() {
        for (program, receiver) in PROGRAMS {
            let with = run(tools, program, receiver, fault, true)?;
            // Without failover they all end at the fault; one run of each program shows it.
            let without =
                (n == 0).then(|| run(tools, program, receiver, fault, false)).transpose()?;
            let ms = |figure: Option<f64>| {
                figure.map_or("none recorded".into(), |ms| format!("{ms:.1} ms"))
            };
            rows.push(Row::new(
                "Figure 7",
                format!(
                    "{program}, {fault}: first error to first good WC elsewhere; longest interval \
                     without data"
                ),
                "goes on, and goes back",
                format!(
                    "{}; {}; {}",
                    ms(with.away_ms),
                    ms(with.gap_ms),
                    if with.is_back { "went back" } else { "did not go back" }
                ),
            ));
            if let Some(run) = &without {
                let here = if run.ended_well { "ends well" } else { "ends with an error" };
                rows.push(Row::new(
                    "Figure 7",
                    format!("{program}, {fault}, without failover"),
                    "terminates",
                    here,
                ));
            }
            panels.push(panel(program, fault, &with, without.as_ref()));
        }
    }
    let figure = Figure {
        title: "SHIFT, Figure 7: throughput of perftest through a fault at 5 s that ends at 10 s. \
                On softnic, both ends on this machine"
            .into(),
        panels,
        columns: 3,
        notes: vec![format!(
            "Messages of 64 KiB; a point for each {} ms (the paper's: one a second). A healed path \
             is used again when it has been steady for a second. The paper's columns are NIC, \
             switch and link failures with and without GPUDirect, which is not to be had here.",
            BIN_US / 1000
        )],
    };
    Ok(Drawing { figure, rows })
}
