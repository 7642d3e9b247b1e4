//! Figure 9: how long verbs take, with and without failover (tests/c/verbs.c).

use unbroken_chart::{Axis, Bars, Figure, Panel, Series, Unit};
use unbroken_fabric::DeviceKind;

use super::{program, Drawing, Row, Tools};
use crate::calls::{self, Times};
use crate::report::median;
use crate::Result;

/// Runs of each, A B B A; the median counts.
const ROUNDS: usize = 5;

/// The verbs of the figure, as the program calls them.
const CONTROL: [&str; 9] = [
    "open_device",
    "alloc_pd",
    "reg_mr",
    "create_cq",
    "create_qp",
    "modify_qp_init",
    "modify_qp_rtr",
    "modify_qp_rts",
    "query_qp",
];
const DATA: [&str; 3] = ["post_send", "post_recv", "poll_cq"];

fn middle(runs: &[Times], verb: &str) -> f64 {
    median(&runs.iter().filter_map(|times| times.get(verb).copied()).collect::<Vec<_>>())
        .unwrap_or(f64::NAN)
}

/// Times of control and data verbs.
pub fn figure_9(tools: &Tools) -> Result<Drawing> {
    let program = program(tools, "verbs")?;
    let (mut standard, mut shift) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for failover in [false, true, true, false] {
            let times = calls::run(&tools.unbroken, &program, DeviceKind::Full, failover)?;
            if failover { &mut shift } else { &mut standard }.push(times);
        }
    }
    let panel = |title: &str, verbs: &[&str], low, high| {
        let of = |runs: &[Times]| verbs.iter().map(|verb| middle(runs, verb)).collect();
        Panel::Bars(Bars {
            title: title.into(),
            x: Axis::log("time", low, high, Unit::Ns),
            rows: verbs.iter().map(|verb| verb.to_string()).collect(),
            series: vec![
                Series::new("without failover", 5, of(&standard)),
                Series::new("with failover", 2, of(&shift)),
            ],
        })
    };
    let added = |verb: &str| {
        let (bare, with) = (middle(&standard, verb), middle(&shift, verb));
        format!("{:+.0} % ({:.1} to {:.1} µs)", (with / bare - 1.0) * 100.0, bare / 1e3, with / 1e3)
    };
    let row =
        |what: &str, published: &str, here: String| Row::new("Figure 9", what, published, here);
    let mut rows = vec![
        row("ibv_modify_qp to RTR, added by failover", "+93.65 %", added("modify_qp_rtr")),
        row("ibv_modify_qp to RTS", "+106.34 %", added("modify_qp_rts")),
    ];
    for verb in ["open_device", "reg_mr", "create_cq", "create_qp"] {
        rows.push(row(&format!("ibv_{verb}"), "little", added(verb)));
    }
    for verb in DATA {
        let (bare, with) = (middle(&standard, verb), middle(&shift, verb));
        rows.push(row(
            &format!("{verb}, added by failover"),
            "minimal",
            format!("{:+.0} ns ({bare:.0} to {with:.0})", with - bare),
        ));
    }
    let figure =
        Figure {
            title: "SHIFT, Figure 9: execution time of verbs. On softnic, both QPs in one process"
                .into(),
            panels: vec![
                panel("control verbs, once each", &CONTROL, 100.0, 1e8),
                panel("data verbs, mean of many calls", &DATA, 10.0, 1e4),
            ],
            columns: 2,
            notes: vec![
            format!("Medians of {} runs of each, in turns. A post on softnic does the NIC's work, \
                     too: it sends in the caller's thread.", 2 * ROUNDS),
            "open_device starts the process's threads and opens its directory, once. The paper's \
             shadow verbs (35 ms in the background) have no counterpart on softnic, whose objects \
             are the process's.".into(),
        ],
        };
    Ok(Drawing { figure, rows })
}
