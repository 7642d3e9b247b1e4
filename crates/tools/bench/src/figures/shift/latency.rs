//! Table 2: `ib_write_lat` with and without failover, and among 500 QPs.

use std::time::Duration;

use unbroken_chart::{Axis, Bars, Figure, Panel, Series, Unit};
use unbroken_testkit::{latency_us, Lab, Latency, Pair, Spec};
use unbroken_units::show::bytes;

use super::{program, Drawing, Row, Tools};
use crate::many;
use crate::report::median;
use crate::Result;

/// The paper's sizes in bytes, its figures without failover and with it, in µs: mean and standard
/// deviation.
const PUBLISHED: [(u64, &str, &str); 5] = [
    (1, "2.68 ± 0.39", "2.69 ± 0.38"),
    (2, "2.70 ± 0.44", "2.70 ± 0.38"),
    (4, "2.70 ± 0.35", "2.69 ± 0.37"),
    (8, "2.69 ± 0.40", "2.71 ± 0.35"),
    (16, "2.69 ± 0.39", "2.68 ± 0.38"),
];
const MESSAGES: u32 = 5_000;
/// Rounds of each, A B B A.
const ROUNDS: usize = 2;
/// QPs of the process that measures among idle ones.
const QPS: u32 = 500;
const LIMIT: Duration = Duration::from_secs(60);

fn run(tools: &Tools, size: u64, failover: bool) -> Result<Latency> {
    let args = format!("-d unb0 -F -s {size} -n {MESSAGES}");
    let spec = Spec { failover, ..Spec::new("ib_write_lat", &args) };
    let output = Pair::start(&Lab::new(&tools.unbroken)?, &spec)?.succeed(LIMIT)?;
    latency_us(&output, size)
        .ok_or_else(|| format!("no figure in the output of {}:\n{output}", spec.shown()).into())
}

fn middle(runs: &[Latency], of: fn(&Latency) -> f64) -> f64 {
    median(&runs.iter().map(of).collect::<Vec<_>>()).unwrap_or(f64::NAN)
}

fn written(runs: &[Latency]) -> String {
    format!("{:.2} ± {:.2}", middle(runs, |l| l.mean_us), middle(runs, |l| l.deviation_us))
}

/// Latency over message size.
pub fn table_2(tools: &Tools) -> Result<Drawing> {
    let (mut bare_us, mut with_us, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    for (size, published_bare, published_with) in PUBLISHED {
        let (mut bare, mut with) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            for failover in [false, true, true, false] {
                if failover { &mut with } else { &mut bare }.push(run(tools, size, failover)?);
            }
        }
        bare_us.push(middle(&bare, |l| l.typical_us));
        with_us.push(middle(&with, |l| l.typical_us));
        rows.push(Row::new(
            "Table 2",
            format!("ib_write_lat, {size} B, mean ± deviation in µs, without and with failover"),
            &format!("{published_bare}; {published_with}"),
            format!("{}; {}", written(&bare), written(&with)),
        ));
    }
    let among = many::latencies_us(&tools.unbroken, &program(tools, "scale")?, QPS)?;
    rows.push(Row::new(
        "Table 2",
        format!(
            "one QP alone, and among {QPS} in its process (ours: SEND of 8 B with failover), µs"
        ),
        "2.69; 2.70",
        format!("{:.2}; {:.2}", among.alone_us, among.among_us),
    ));
    let highest = bare_us.iter().chain(&with_us).fold(0.0_f64, |high, us| high.max(*us));
    let bars = Bars {
        title: format!("ib_write_lat, {MESSAGES} messages, median"),
        x: Axis::linear("half a round trip", 0.0, 1.15 * highest, Unit::Us),
        rows: PUBLISHED.map(|(size, ..)| bytes(size as f64)).to_vec(),
        series: vec![
            Series::new("without failover", 5, bare_us),
            Series::new("with failover", 2, with_us),
        ],
    };
    let figure = Figure {
        title: "SHIFT, Table 2: latency of small writes, on softnic".into(),
        panels: vec![Panel::Bars(bars)],
        columns: 1,
        notes: vec!["Both ends on this machine. Means and deviations are in the table: what else \
                     this machine does makes them wide."
            .into()],
    };
    Ok(Drawing { figure, rows })
}
