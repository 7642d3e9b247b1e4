//! `unbroken simulate sweep`: NICs lost at random, many patterns of each number.

use clap::Args;
use unbroken_simulations::sweep::{self as asked, Row, Sweep, COMPARED};
use unbroken_simulations::Watch;

use super::{picture, progress, ray, shown};
use crate::output::{print, print_json, table, Result};

pub(crate) const AFTER: &str = "Examples:
  unbroken simulate sweep --share 35% --lost 1-10 --patterns 50 --seed 1
  unbroken simulate sweep --hosts 128 --lost 4 --patterns 1000 --resume sweep.jsonl --json
  unbroken simulate sweep --hosts 1024 --patterns 1000 --resume sweep.jsonl --ray 10.0.0.1:6379

Patterns are the same for the same seed. A sweep that was interrupted goes on where it was if it is
given the same --resume again, with --ray or without; results are the same, bit for bit. --ray needs
Python with the wheel of Unbroken and its extra [ray] here and on all nodes of the cluster, of which
this machine is one.
In the table: how much longer a step takes than on a healthy cluster, in the mean, and of one \
pattern in twenty at least.";

#[derive(Args)]
pub(crate) struct SweepArgs {
    #[command(flatten)]
    question: asked::SweepArgs,
    /// Compute on the Ray cluster of this head, as host:port, or auto for that of this machine
    #[arg(long, value_name = "ADDRESS", conflicts_with = "cores", help_heading = super::OPTIONS)]
    ray: Option<String>,
    /// With --ray: the Python that has the wheel of Unbroken with its extra [ray]
    #[arg(
        long,
        value_name = "PROGRAM",
        default_value = "python3",
        requires = "ray",
        help_heading = super::OPTIONS
    )]
    python: String,
    /// One JSON object
    #[arg(long, help_heading = super::OPTIONS)]
    json: bool,
    #[command(flatten)]
    picture: picture::SvgArgs,
}

pub(super) fn sweep(args: &SweepArgs) -> Result {
    args.picture.check()?;
    let watch = Watch::default();
    let sweep = Sweep::open(&args.question, &watch)?;
    progress::beside(&watch, "patterns", || match &args.ray {
        None => Ok(sweep.finish(&watch)?),
        Some(address) => ray::compute(&sweep, &watch, address, &args.python),
    })?;
    args.picture.write(|| picture::of_sweep(&sweep.report()))?;
    match args.json {
        true => print_json(&sweep.report()),
        false => print(&text(&sweep)),
    }
}

fn text(sweep: &Sweep) -> String {
    let report = sweep.report();
    let mut cells = vec![vec!["lost".to_string()]];
    for strategy in COMPARED {
        cells[0].extend([strategy.name().to_string(), "p95".to_string()]);
    }
    for of_count in report.rows.chunks(COMPARED.len()) {
        let mut row = vec![of_count[0].lost.to_string()];
        for Row { mean, p95, cannot, .. } in of_count {
            let mark = if *cannot > 0 { "*" } else { "" };
            row.extend([shown::more(*mean) + mark, shown::more(*p95)]);
        }
        cells.push(row);
    }
    let starred = report.rows.iter().any(|r| r.cannot > 0);
    let note = if starred { "* without patterns with which it cannot go on\n" } else { "" };
    format!(
        "{}\n{}\n{} patterns each, seed {}\n\n{}{note}",
        shown::cluster(&report.cluster),
        shown::job(sweep.simulation()),
        report.rows.first().map_or(0, |row| row.patterns),
        report.seed,
        table(&cells)
    )
}
