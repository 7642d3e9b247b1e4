//! `unbroken plan` and `unbroken simulate`: what a lost NIC costs collectives, training jobs and
//! serving.
//!
//! Everything is computed by `unbroken-simulations`; no network is touched, and no runtime folder.
//! What is here shows it.

mod month;
mod picture;
mod plan;
mod progress;
mod ray;
mod run;
mod serve;
mod shown;
mod sweep;

use clap::{Args, Subcommand};

use crate::output::{Failure, Result};

pub(crate) use plan::{plan, PlanArgs, AFTER as PLAN_AFTER};

/// The heading of what belongs neither to a cluster nor to a job: that of all commands.
const OPTIONS: Option<&str> = None;

/// The command line of `unbroken simulate`.
#[derive(Args)]
pub(crate) struct SimulateArgs {
    #[command(subcommand)]
    command: SimulateCommand,
}

#[derive(Subcommand)]
enum SimulateCommand {
    /// A job that loses NICs at given times, or as a file says
    #[command(after_help = run::AFTER)]
    Run(run::RunArgs),
    /// NICs lost at random, many patterns of each number
    #[command(after_help = sweep::AFTER)]
    Sweep(sweep::SweepArgs),
    /// What failures and repairs at random leave of a month
    #[command(after_help = month::AFTER)]
    Month(month::MonthArgs),
    /// A language model that answers requests while NICs are lost
    #[command(after_help = serve::AFTER)]
    Serve(serve::ServeArgs),
}

pub(crate) fn simulate(args: &SimulateArgs) -> Result {
    match &args.command {
        SimulateCommand::Run(args) => run::run(args),
        SimulateCommand::Sweep(args) => sweep::sweep(args),
        SimulateCommand::Month(args) => month::month(args),
        SimulateCommand::Serve(args) => serve::serve(args),
    }
}

impl From<unbroken_simulations::Error> for Failure {
    fn from(e: unbroken_simulations::Error) -> Failure {
        Failure::Text(e.text)
    }
}
