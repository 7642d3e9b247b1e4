//! What many idle QPs cost the one that works, and how much memory each takes: `tests/c/scale.c`,
//! which measures one QP by turns alone and among 999 others that are connected.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use unbroken_testkit::{Lab, Pair, Spec};

use crate::report::{median, Better, Entry};
use crate::Result;

/// Rounds, in every other of which it is alone first.
const ROUNDS: u32 = 9;
/// Regions, each with a key of its own, that exist at one time (after the QPs are measured).
const REGIONS: u32 = 10_000;
/// No run takes longer.
const LIMIT: Duration = Duration::from_secs(120);
/// Share of its speed that the working QP may lose.
const COST: f64 = 0.05;
/// Bytes of an idle QP.
const MEMORY_BYTES: f64 = 16_384.0;

/// What the program prints.
#[derive(Deserialize)]
struct Figures {
    qps: u32,
    lat_one_us: Vec<f64>,
    lat_many_us: Vec<f64>,
    bw_one_gbps: Vec<f64>,
    bw_many_gbps: Vec<f64>,
    bytes_per_qp: f64,
}

/// The latency of one QP, in µs.
#[derive(Clone, Copy, Debug)]
pub struct Latencies {
    /// Alone.
    pub alone_us: f64,
    /// Among idle ones of its process.
    pub among_us: f64,
}

/// The latency of one QP alone and among others, `qps` in all.
pub fn latencies_us(unbroken: &Path, scale: &str, qps: u32) -> Result<Latencies> {
    let f =
        figures(unbroken, &Spec::new(scale, &format!("--rounds 4 --mrs 1 --ms 50 --qps {qps}")))?;
    let middle = |figures: &[f64]| median(figures).ok_or("no figures");
    Ok(Latencies { alone_us: middle(&f.lat_one_us)?, among_us: middle(&f.lat_many_us)? })
}

/// Runs the program once.
fn figures(unbroken: &Path, spec: &Spec) -> Result<Figures> {
    let lab = Lab::new(unbroken)?;
    let connect = |port: u16| {
        (
            vec!["--listen".into(), port.to_string()],
            vec!["--connect".into(), format!("127.0.0.1:{port}")],
        )
    };
    let output = Pair::start_as(&lab, spec, connect)?.succeed(LIMIT)?;
    let line = output
        .lines()
        .rev()
        .find(|l| l.starts_with('{'))
        .ok_or_else(|| format!("no figures in: {output}"))?;
    Ok(serde_json::from_str(line)?)
}

/// Runs the program once and gives its entries.
pub fn run(unbroken: &Path, scale: &Path) -> Result<Vec<Entry>> {
    let spec =
        Spec::new(&scale.display().to_string(), &format!("--rounds {ROUNDS} --mrs {REGIONS}"));
    let f = figures(unbroken, &spec)?;
    let bench = format!("one QP among {}", f.qps);
    let args = spec.args.join(" ");
    let command = format!(
        "unbroken run --host b -- tests-c/scale --listen 5000 {args} & unbroken run --host a -- \
         tests-c/scale --connect 127.0.0.1:5000 {args}"
    );
    let entry =
        |metric, value, unit, better| Entry::new(&bench, metric, value, unit, better, &command);
    let compared = |metric, many: &[f64], one: &[f64], unit, better, bar| {
        let entry = entry(metric, median(many)?, unit, better).beside_rounds(
            "the same QP alone",
            many,
            one,
        )?;
        Some(entry.bar(bar))
    };
    let lat = ("8 B SEND, half a round trip", &f.lat_many_us, &f.lat_one_us);
    let bw = ("64 KiB WRITE", &f.bw_many_gbps, &f.bw_one_gbps);
    let entries = [
        compared(lat.0, lat.1, lat.2, "us", Better::Lower, 1.0 + COST),
        compared(bw.0, bw.1, bw.2, "Gbit/s", Better::Higher, 1.0 - COST),
        Some(
            entry("memory of an idle QP, 128+128 entries", f.bytes_per_qp, "bytes", Better::Lower)
                .bar(MEMORY_BYTES),
        ),
    ];
    Ok(entries.into_iter().flatten().collect())
}
