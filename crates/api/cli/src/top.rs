//! `unbroken top`.

use std::io::IsTerminal;
use std::time::Duration;

use unbroken_top::Options;

use crate::args::duration;
use crate::output::{Failure, Result};
use crate::place::Place;

#[derive(clap::Args)]
pub(crate) struct TopArgs {
    /// How often to look: 100ms to 60s
    #[arg(long, default_value = "500ms", value_name = "TIME", value_parser = interval)]
    interval: Duration,
}

pub(crate) const AFTER: &str = "Examples:
  unbroken top
  unbroken top --interval 2s

Keys: arrows choose a NIC; x, p and c have it die, its port go down, its cable
cut (emulated network); u mends it; d drains it or uses it again; each is asked
back. 1 to 4 and Tab choose what is shown below, ? lists all keys, q ends.
Without colours where NO_COLOR is set.";

fn interval(text: &str) -> std::result::Result<Duration, String> {
    let bounds = Duration::from_millis(100)..=Duration::from_secs(60);
    let time = duration(text)?;
    match bounds.contains(&time) {
        true => Ok(time),
        false => Err("right is 100ms to 60s".into()),
    }
}

pub(crate) fn run(place: &Place, args: &TopArgs) -> Result {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let why = "top needs a terminal; `unbroken status --json` and `unbroken metrics` do not";
        return Err(why.to_owned().into());
    }
    if std::env::var_os("TERM").is_some_and(|kind| kind == "dumb") {
        let why =
            "top needs a terminal that it can draw on, and TERM is dumb; right is TERM=xterm, \
                   say, where that is so, else `unbroken status` and `unbroken metrics`";
        return Err(why.to_owned().into());
    }
    let runtime = place.look_where_something_is()?;
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let options = Options { interval: args.interval, is_plain };
    unbroken_top::run(&runtime, options).map_err(|e| Failure::io("top", e))
}
