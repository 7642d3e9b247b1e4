//! `unbroken simulate month`: what failures and repairs at random leave of a time.

use clap::Args;
use unbroken_simulations::month as asked;
use unbroken_simulations::Watch;

use super::{picture, progress, shown};
use crate::output::{print, print_json, table, Result};

pub(crate) const AFTER: &str = "Examples:
  unbroken simulate month --hosts 128 --share 20%
  unbroken simulate month --mtbf 100000h --repair 8h --for 90d --runs 100 --seed 7 --json
  unbroken simulate month --planes 2 --pod-hosts 32 --switch-mtbf 500000h
  unbroken simulate month --hosts 256 --spares 2 --replace 20m --repair 3d

Each part fails after a random time, exponentially distributed, and is repaired after a fixed one. A
cable takes a port of a NIC along, a switch (a leaf) that port of all hosts of its pod.
Published: of 16,384 NICs of a training run 7 failed in 54 days, and 35 cables or switches (The \
Llama
3 Herd of Models, table 5). That all 35 were cables, and that a repair takes a day, is assumed; so
switches do not fail unless --switch-mtbf says so. 'never' is a time here.
A restart has spare hosts for those that have lost something; these are spare ones when they are
repaired. Without a spare one (--spares) the job starts again on fewer hosts, with the same batch,
and once more when one is repaired. 'spares' is the most that were in use at once in any run,
'fewer' the mean time on fewer hosts.";

#[derive(Args)]
pub(crate) struct MonthArgs {
    #[command(flatten)]
    question: asked::MonthArgs,
    /// One JSON object
    #[arg(long, help_heading = super::OPTIONS)]
    json: bool,
    #[command(flatten)]
    picture: picture::SvgArgs,
}

pub(super) fn month(args: &MonthArgs) -> Result {
    args.picture.check()?;
    let watch = Watch::default();
    let asked = || asked::month(&args.question, &watch);
    let (simulation, report) = progress::beside(&watch, "runs", asked)?;
    args.picture.write(|| picture::of_month(&report))?;
    if args.json {
        return print_json(&report);
    }
    let mut cells = vec![["strategy", "work done", "worst run", "stopped", "spares", "fewer"]
        .map(String::from)
        .to_vec()];
    for r in &report.strategies {
        cells.push(vec![
            r.strategy.name().into(),
            format!("{:.3}%", r.share * 100.0),
            format!("{:.3}%", r.least * 100.0),
            shown::time(r.stopped_s),
            r.spares.to_string(),
            shown::time(r.fewer_s),
        ]);
    }
    print(&format!(
        "{}\n{}\n{}\n{} runs of {}, {:.1} failures each, seed {}\n\n{}",
        shown::cluster(&report.cluster),
        shown::job(&simulation),
        shown::spares(&report.recovery),
        report.runs,
        shown::time(report.rates.horizon_s),
        report.strategies[0].failures,
        report.seed,
        table(&cells)
    ))
}
