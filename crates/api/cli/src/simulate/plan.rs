//! `unbroken plan`: what is chosen for each collective after a failure, and what the failure costs.

use clap::Args;
use unbroken_simulate::step::Simulation;
use unbroken_simulate::strategy::{Kind, Strategy};
use unbroken_simulations::plan::{self as asked, Report};
use unbroken_simulations::Watch;
use unbroken_units::show;

use super::{picture, progress, shown};
use crate::output::{print, print_json, table, Result};

pub(crate) const AFTER: &str = "Examples:
  unbroken plan --hosts 64 --gpus 8 --lost 1
  unbroken plan --hosts 128 --oversubscription 2 --pod-hosts 32 --fail host3/nic2 --fail host4/nic0
  unbroken plan --hosts 16 --model mixtral-8x7b --tensor 2 --expert-parallel 8 --zero 1
  unbroken plan --preset h100 --hosts 128 --pod-hosts 32 --fail tor3
  unbroken plan --oversubscription 2 --pod-hosts 16 --fail spine=75%
  unbroken plan --model llama-3.1-70b --sequence 131072 --tensor 8 --context 16 --batch 64 --fsdp
  unbroken plan --file cluster.toml --size 64M --json
  unbroken plan --hosts 4 --size 64M --fail host0/nic1=25% --shape stars --messages all-reduce

What is lost is lost of host0 (--lost), or as named (--fail): with a leaf (a ToR) all NICs of its
pod on one rail, with a pod those of all its leaves; spines and cores carry less then. A job whose
weights, gradients, optimizer and activations do not fit into its GPUs is refused with what would.
A step takes what it computes and what it communicates, one after the other: jobs that overlap both
feel less. A restart takes hosts that have lost nothing from somewhere. Of each collective the size is that \
of the vector, of the whole
output, or of what a rank sends to all. Columns: ours is what the planner chooses (stars: hosts \
own parts by what they carry; leaves: slow hosts hang on a ring), with its time before and after; \
bound, the
part of the best possible rate that it attains; then how much longer each strategy takes than \
without a failure.
'once' is what a failure costs until the job goes on: detection, repair, and what is computed again.
--json also has what a stage of the job exchanges in a step: operations, bytes, how many of them.
With --messages it says in JSON what the plan sends after the losses: links with their rates, lanes
with the links that they use, messages ([lane, bytes, the step that sends it, the step that receives
it]), and for each step those that it waits for. 'us' is the time that 'ours' has in the table.
benches/coll/simgrid.py has SimGrid follow it. How it is read is said at the head of
crates/collective/simulate/src/messages.rs.

Exit status: 0, 1 where something cannot be simulated, 2 for a wrong command line.";

#[derive(Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    question: asked::PlanArgs,
    /// Instead, in JSON: every message of this collective (all-reduce, …), for other simulators
    #[arg(long, value_name = "COLLECTIVE")]
    messages: Option<Kind>,
    /// One JSON object
    #[arg(long, help_heading = super::OPTIONS)]
    json: bool,
    #[command(flatten)]
    picture: picture::SvgArgs,
}

pub(crate) fn plan(args: &PlanArgs) -> Result {
    args.picture.check()?;
    let watch = Watch::default();
    if let Some(kind) = args.messages {
        return print_json(&args.question.messages(kind, &watch)?);
    }
    let asked = || asked::plan(&args.question, &watch);
    let (simulation, report) = progress::beside(&watch, "estimates", asked)?;
    args.picture.write(|| picture::of_plan(&report))?;
    match args.json {
        true => print_json(&report),
        false => print(&text(&simulation, &report)),
    }
}

fn text(s: &Simulation, report: &Report) -> String {
    let mut rows =
        vec![["collective", "ours", "before", "after", "bound"].map(String::from).to_vec()];
    let names = ["HotRep.", "Balance", "R2CCL", "ours"];
    rows[0].extend(names.map(String::from));
    for row in &report.collectives {
        let us = |strategy: Strategy| {
            row.strategies.iter().find(|o| o.strategy == strategy).and_then(|o| o.us)
        };
        let ours = us(Strategy::Ours);
        let mut cells = vec![
            row.collective.name().to_string(),
            row.form.unwrap_or("none").to_string(),
            show::time_s(row.healthy_us / 1e6),
            ours.map_or("-".into(), |us| show::time_s(us / 1e6)),
            ours.map_or("-".into(), |us| format!("{:.0}%", row.bound_us / us * 100.0)),
        ];
        cells.extend(Strategy::IN_PLACE.map(|strategy| {
            us(strategy).map_or("-".into(), |us| longer(us / row.healthy_us - 1.0))
        }));
        rows.push(cells);
    }
    let mut jobs = vec![["strategy", "a step", "longer", "once"].map(String::from).to_vec()];
    for o in &report.strategies {
        jobs.push(vec![
            o.strategy.name().to_string(),
            o.step_s.map_or("-".into(), shown::time),
            o.step_s.map_or("cannot".into(), |step| shown::more(step / report.step_s - 1.0)),
            shown::time(o.once_s),
        ]);
    }
    format!(
        "{}\nlost: {}\n\n{}, {} each\n{}\n{}\n{}",
        shown::cluster(&report.cluster),
        lost(report),
        "Collectives among all ranks",
        show::bytes(report.bytes as f64),
        table(&rows),
        shown::job(s),
        table(&jobs),
    )
}

/// What is lost in a line: as it was asked for, where that is shorter.
fn lost(report: &Report) -> String {
    let named = report.fails.iter().any(|fails| !fails.starts_with("host"));
    match (named, report.lost.len()) {
        (false, _) => shown::lost(&report.lost),
        (true, 0) => report.fails.join(", "),
        (true, nics) => format!("{} ({nics} NICs or ports)", report.fails.join(", ")),
    }
}

/// A part, as [`shown::more`], but short.
fn longer(share: f64) -> String {
    match share.abs() >= 0.1 {
        true => format!("{:+.0}%", share * 100.0),
        false => shown::more(share),
    }
}
