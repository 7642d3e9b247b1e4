//! `unbroken simulate run`: a job that loses NICs at given times, or as a file says.

use clap::Args;
use unbroken_simulate::step::Simulation;
use unbroken_simulate::strategy::Strategy;
use unbroken_simulations::run::{self as asked, Report};
use unbroken_simulations::Watch;

use super::{picture, progress, shown};
use crate::output::{print, print_json, table, Result};

pub(crate) const AFTER: &str = "Examples:
  unbroken simulate run --fail host3/nic2@120s --for 10m
  unbroken simulate run --hosts 16 --fail host3/nic2@1h+30m --fail host9/nic0@2h --for 1d --json
  unbroken simulate run --hosts 16 --trace failures.csv --for 30d

A failure is WHAT@TIME, or WHAT@TIME+REPAIR, where WHAT is a NIC, tor3, rail2 or pod1, with the time that its repair takes. A line of a trace is
SECOND,NIC or SECOND,NIC,REPAIR (3600,host3/nic2,1800), with the seconds that its repair takes, in
any order; what follows a # is a comment. A trace has up to 100,000 failures; those after the end do
not come.
Of each strategy the tables have the time of a step after each change, and the work done in parts of
what a healthy cluster does.";

/// Changes that are shown; --json has all.
const SHOWN: usize = 40;

#[derive(Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    question: asked::RunArgs,
    /// One JSON object
    #[arg(long, help_heading = super::OPTIONS)]
    json: bool,
    #[command(flatten)]
    picture: picture::SvgArgs,
}

pub(super) fn run(args: &RunArgs) -> Result {
    args.picture.check()?;
    let watch = Watch::default();
    let asked = || asked::run(&args.question, &watch);
    let (simulation, report) = progress::beside(&watch, "estimates", asked)?;
    args.picture.write(|| picture::of_run(&report))?;
    match args.json {
        true => print_json(&report),
        false => print(&text(&simulation, &report)),
    }
}

fn text(s: &Simulation, report: &Report) -> String {
    let mut steps = vec![vec!["from".to_string(), "lost".to_string()]];
    steps[0].extend(Strategy::ALL.map(|s| s.name().to_string()));
    for change in report.changes.iter().take(SHOWN) {
        let mut row = vec![shown::time(change.at_s), shown::lost(&change.lost)];
        row.extend(change.step_s.iter().map(|s| s.map_or("cannot".into(), shown::time)));
        steps.push(row);
    }
    let mut done = vec![["strategy", "work done", "stopped"].map(String::from).to_vec()];
    for o in &report.strategies {
        let share = format!("{:.3}%", o.goodput.share * 100.0);
        done.push(vec![o.strategy.name().into(), share, shown::time(o.goodput.stopped_s)]);
    }
    let rest = match report.changes.len().saturating_sub(SHOWN) {
        0 => String::new(),
        rest => format!("and {rest} further changes (--json has all)\n"),
    };
    format!(
        "{}\n{}\n{}\n\nA step\n{}{rest}\nIn {}\n{}",
        shown::cluster(&report.cluster),
        shown::job(s),
        shown::spares(&report.recovery),
        table(&steps),
        shown::time(report.horizon_s),
        table(&done)
    )
}
