//! `unbroken demo`: an unmodified RDMA program outlives the death of its NIC, and goes back to it
//! when it is healed, with figures.
//!
//! Three parts, each over a fabric of its own and each with the fault `nic a/0 dead` in mid-stream:
//! `ib_write_bw` with failover, whose NIC is healed some seconds later ([`stream`]), the same
//! without, and the program that verifies every message ([`verify`]). Figures are taken from
//! outside: what the NICs count, what the receiving process time-stamps, what the event log says.
//! The run has survived if both ends of `ib_write_bw` ended well, a switch is in the log and the
//! planned one back, on which nothing was sent again, the backup and afterwards the first NIC
//! carried a fair share of the rate from before the fault, and the verifying program found no
//! error.
//!
//! Where perftest is not installed, the program that verifies every message is the stream, too.
//!
//! Leaves `result.json` ([`result`]) and `demo.svg` ([`picture`]).

mod picture;
mod result;
mod screen;
mod stream;
mod verifier;
mod verify;

use std::fs;
use std::path::{Path, PathBuf};

use crate::installed::VERIFIER;
use crate::output::{print_json, Failure, Result};
use crate::program;
use result::Report;
use screen::Screen;
use stream::{Stream, FAULT, PERFTEST};

/// The arguments of `unbroken demo`.
#[derive(clap::Args)]
pub(crate) struct DemoArgs {
    /// Where result.json and demo.svg go
    #[arg(long, value_name = "FOLDER", default_value = "unbroken-demo")]
    out: PathBuf,
    /// Print the result as JSON, and the story to stderr
    #[arg(long)]
    json: bool,
    /// The verifying program, or its source [default: the one that is installed with this command,
    /// else its source in it, for which cc and libibverbs-dev are needed]
    #[arg(long, value_name = "PATH")]
    verifier: Option<PathBuf>,
}

/// Runs the demo. A run that did not survive is a failure.
pub(crate) fn demo(args: &DemoArgs) -> Result {
    fs::create_dir_all(&args.out)
        .map_err(|e| Failure::io(format!("cannot make {}", args.out.display()), e))?;
    let unbroken =
        std::env::current_exe().map_err(|e| Failure::io("cannot find this program", e))?;
    let screen = Screen::new(args.json);
    let report = play(args, &unbroken, &screen)?;
    report.tell(&screen);
    screen.say(&format!(
        "result: {}   picture: {}",
        args.out.join("result.json").display(),
        args.out.join("demo.svg").display()
    ));
    if args.json {
        print_json(&report)?;
    }
    if report.survived() {
        Ok(())
    } else {
        Err(format!("the run did not survive: {}", report.reasons.join("; ")).into())
    }
}

fn play(args: &DemoArgs, unbroken: &Path, screen: &Screen) -> Result<Report> {
    let verifier = verifier::get(args.verifier.as_deref(), &args.out).map_err(|e| e.to_string());
    let stand_in = match (program::find(PERFTEST.as_ref()), &verifier) {
        (Some(_), _) => None,
        (None, Ok(verifier)) => {
            screen.say(&format!(
                "{PERFTEST} is not here (Debian package perftest): the verifying program takes \
                 its place"
            ));
            Some(verifier.as_path())
        }
        (None, Err(why)) => {
            return Err(format!("{PERFTEST} is missing (Debian package perftest), and {why}").into())
        }
    };
    let name = if stand_in.is_some() { VERIFIER } else { PERFTEST };
    screen.title(&format!(
        "1. {name} from host a to host b; NIC a/0 dies in mid-stream, and is healed"
    ));
    let with = Stream::play(unbroken, stand_in, true, screen)?;
    screen.title("2. the same without failover");
    let without = Stream::play(unbroken, stand_in, false, screen)?;
    screen.title("3. a program that checks every message, under the same fault");
    let verifier = verifier.as_deref().map_err(String::as_str);
    let verified = verify::play(unbroken, verifier, screen);

    let report = Report::new(&with, &without, &verified);
    let text = serde_json::to_string_pretty(&report)
        .map_err(|e| format!("cannot write JSON: {e}"))?
        + "\n";
    write(&args.out.join("result.json"), &text)?;
    write(&args.out.join("demo.svg"), &picture::draw(&with, &without)?)?;
    Ok(report)
}

fn write(path: &Path, text: &str) -> Result {
    fs::write(path, text).map_err(|e| Failure::io(format!("cannot write {}", path.display()), e))
}
