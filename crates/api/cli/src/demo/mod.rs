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
//! Leaves `result.json` ([`result`]) and `demo.svg` ([`picture`]).

mod picture;
mod result;
mod screen;
mod stream;
mod verify;

use std::fs;
use std::path::{Path, PathBuf};

use crate::output::{print_json, Failure, Result};
use result::Report;
use screen::Screen;
use stream::{Stream, FAULT};

/// The arguments of `unbroken demo`.
#[derive(clap::Args)]
pub(crate) struct DemoArgs {
    /// Where result.json and demo.svg go
    #[arg(long, value_name = "FOLDER", default_value = "target/demo")]
    out: PathBuf,
    /// Print the result as JSON, and the story to stderr
    #[arg(long)]
    json: bool,
    /// The source of the verifying program
    #[arg(long, value_name = "PATH", default_value = "tests/c/verifier.c")]
    verifier: PathBuf,
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
    screen.title("1. ib_write_bw from host a to host b; NIC a/0 dies in mid-stream, and is healed");
    let with = Stream::play(unbroken, true, screen)?;
    screen.title("2. the same without failover");
    let without = Stream::play(unbroken, false, screen)?;
    screen.title("3. a program that checks every message, under the same fault");
    let verified = verify::play(unbroken, &args.verifier, &args.out, screen);

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
