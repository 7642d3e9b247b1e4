//! `unbroken health`: one verdict, by exit status.

use unbroken_observe::{health, in_words, Health, Observer};

use crate::output::{print, print_json, Failure, Result};
use crate::place::Place;

/// The exit status where no verdict is possible: 1 and 2 are verdicts.
pub(crate) const NO_VERDICT: u8 = 3;

#[derive(clap::Args)]
pub(crate) struct HealthArgs {
    /// Only this host of the emulated network [default: all]
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// One JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) const AFTER: &str = "Examples:
  unbroken health
  unbroken health --json | jq -r .verdict
  unbroken health --host a || echo \"host a is not healthy\"

Exit status: 0 healthy; 1 degraded, survived (jobs go on with the capacity
that is left); 2 failed (a program met a failure, or no NIC is left); 3 unknown
(nothing is known to be wrong, but a process does not answer or a log cannot be
read; a wrong option). `problems` in the JSON says what was not seen.";

/// Where no verdict is possible, what reads JSON has that in JSON.
pub(crate) fn print_no_verdict(why: &str) {
    // Standard error and the exit status say it, too.
    let _ = print_json(&Health::unknown(why));
}

/// Shows the verdict; the exit status says it, too.
pub(crate) fn run(place: &Place, args: &HealthArgs) -> Result {
    let snapshot = match place.look()? {
        Some(runtime) => Observer::new(&runtime).look()?,
        None => Default::default(),
    };
    let of = health(&snapshot, args.host.as_deref());
    if let (Some(host), true) = (&args.host, of.hosts.is_empty()) {
        let known = snapshot.hosts().join(", ");
        let known = if known.is_empty() { "none yet".into() } else { known };
        return Err(format!("there is no host '{host}'; there are: {known}").into());
    }
    if args.json {
        print_json(&of)?;
    } else {
        print(&in_words(&of))?;
    }
    match of.exit_status {
        0 => Ok(()),
        status => Err(Failure::Verdict(status)),
    }
}
