//! Figure 8b: how long a switch takes, by what failed.

use unbroken_chart::{Axis, Bars, Figure, Panel, Series, Unit};

use super::{Drawing, Row, Tools};
use crate::report::median;
use crate::switches::{self, Outcome, Switched};
use crate::Result;

/// The paper's kinds of failures, as our network has them.
const FAULTS: [&str; 5] =
    ["nic a/0 dead", "nic a/0 down", "nic b/0 dead", "cable a/0 cut", "switch rail0 down"];
/// Runs of each; the median counts.
const RUNS: usize = 5;

fn switched(tools: &Tools, fault: &str) -> Result<Vec<Switched>> {
    let mut all = Vec::new();
    for _ in 0..RUNS {
        if let Outcome::Switched(s) = switches::run(&tools.unbroken, fault)? {
            all.push(s);
        }
    }
    if all.is_empty() {
        return Err(format!("no switch after '{fault}' in {RUNS} runs").into());
    }
    Ok(all)
}

/// The time of a switch, and of noticing before it.
pub fn figure_8b(tools: &Tools) -> Result<Drawing> {
    let (mut notice, mut switch, mut gap, mut rows) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for fault in FAULTS {
        let runs = switched(tools, fault)?;
        let middle = |of: fn(&Switched) -> Option<f64>| {
            median(&runs.iter().filter_map(of).collect::<Vec<_>>()).unwrap_or(f64::NAN)
        };
        notice.push(middle(|s| s.detect_us.map(|us| us / 1e3)));
        switch.push(middle(|s| Some(s.switch_us / 1e3)));
        gap.push(middle(|s| s.gap_ms));
        let last = |of: &[f64]| of.last().map_or("none".into(), |ms| written(*ms));
        rows.push(Row::new(
            "Figure 8b",
            format!(
                "{fault}: from the fault to noticing it; first error to first good WC; longest \
                 interval without data (medians of {} runs)",
                runs.len()
            ),
            "",
            format!("{}; {}; {}", last(&notice), last(&switch), last(&gap)),
        ));
    }
    let bars = Bars {
        title: format!("ib_write_bw, 64 KiB, median of {RUNS} runs"),
        x: Axis::log("time", 0.01, 10_000.0, Unit::Ms),
        rows: FAULTS.map(String::from).to_vec(),
        series: vec![
            Series::new("noticing the fault", 5, notice),
            Series::new("first error to first good WC (the paper's measure)", 2, switch),
            Series::new("longest interval without data at the receiver", 1, gap),
        ],
    };
    let figure = Figure {
        title: "SHIFT, Figure 8b: fall-back latency, on softnic".into(),
        panels: vec![Panel::Bars(bars)],
        columns: 1,
        notes: vec![
            "A silent path (cable, switch) must be told from a slow peer before it is left.".into(),
        ],
    };
    Ok(Drawing { figure, rows })
}

fn written(ms: f64) -> String {
    format!("{ms:.2} ms")
}
