//! The verifying program under the fault: tests/c/verifier.c, compiled here.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;
use unbroken_events::{read_events, What};
use unbroken_testkit::{Lab, Pair, Running, Spec, Watch};

use super::screen::Screen;
use super::stream::{told, NICS};
use super::FAULT;
use crate::output::{Failure, Result};

/// Seconds that it sends.
const SECONDS: u64 = 5;
/// Payload at host b before the NIC dies.
const TRAFFIC_BYTES: u64 = 4 << 20;

/// What it found; the sum of both ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct Verified {
    /// Messages that came once, in order, intact.
    pub(crate) messages: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// Why it does not count; None: both ends are content, and the NIC did die under them.
    pub(crate) wrong: Option<String>,
}

/// The last line of its output.
#[derive(Deserialize)]
struct Line {
    verified_messages: u64,
    verified_bytes: u64,
    errors: u64,
}

/// Compiles and runs it. What goes wrong is in the answer, so that the other parts are still
/// reported.
pub(crate) fn play(unbroken: &Path, source: &Path, out: &Path, screen: &Screen) -> Verified {
    let verified = match run(unbroken, source, out) {
        Ok(verified) => verified,
        Err(e) => {
            let text = match e {
                Failure::Text(text) | Failure::Program { text, .. } => text,
                Failure::ClosedPipe => "broken pipe".into(),
            };
            Verified { wrong: Some(text), ..Verified::default() }
        }
    };
    match &verified.wrong {
        None => screen.say(&format!(
            "   {} messages, {} bytes, every one once, in order, intact; completions likewise",
            verified.messages, verified.bytes
        )),
        Some(wrong) => screen.say(&format!("   not verified: {wrong}")),
    }
    verified
}

fn run(unbroken: &Path, source: &Path, out: &Path) -> Result<Verified> {
    let program = compile(source, out)?;
    let lab = Lab::new(unbroken).map_err(told)?;
    let spec =
        Spec::new(&program.display().to_string(), &format!("--device unb0 --seconds {SECONDS}"));
    let mut pair = Pair::start_as(&lab, &spec, |port| {
        let args = |name: &str, value: String| vec![name.to_string(), value];
        (args("--listen", port.to_string()), args("--connect", format!("127.0.0.1:{port}")))
    })
    .map_err(told)?;
    let mut watch = Watch::new(&lab, "b", NICS).map_err(told)?;
    let arrives = || watch.sample().rx_payload_bytes[0] > TRAFFIC_BYTES;
    pair.client
        .wait_until("data arrives at NIC b/0", Duration::from_secs(15), arrives)
        .map_err(told)?;
    lab.fabric().set(&FAULT.parse()?, None)?;
    let mut verified = Verified::default();
    for end in [&mut pair.client, &mut pair.server] {
        end.succeed(Duration::from_secs(SECONDS + 15)).map_err(told)?;
        let line = last_line(end)?;
        verified.messages += line.verified_messages;
        verified.bytes += line.verified_bytes;
        if line.errors > 0 {
            verified.wrong = Some(format!("{} found {} errors", end.program(), line.errors));
        }
    }
    let events =
        read_events(lab.runtime()).map_err(|e| Failure::io("cannot read the event log", e))?;
    if !events.iter().any(|e| matches!(e.what, What::Switch(_))) {
        verified.wrong = Some("it ended before any switch".into());
    }
    Ok(verified)
}

fn last_line(end: &Running) -> Result<Line> {
    let output = end.output();
    let line = output.lines().rev().find(|l| l.trim_start().starts_with('{')).unwrap_or_default();
    serde_json::from_str(line)
        .map_err(|e| format!("{} gave no result ({e}): '{line}'", end.program()).into())
}

/// Compiles it against the system's libibverbs.
fn compile(source: &Path, out: &Path) -> Result<PathBuf> {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        return Err("infiniband/verbs.h is missing: install Debian's libibverbs-dev"
            .to_string()
            .into());
    }
    let program = out.join("verifier");
    let program = std::path::absolute(&program)
        .map_err(|e| Failure::io("cannot find the working folder", e))?;
    let mut command = Command::new("cc");
    command.args(["-O2", "-o"]).arg(&program).arg(source).arg("-libverbs");
    let done = command
        .arg("-lpthread")
        .output()
        .map_err(|e| Failure::io("cannot run cc (a C compiler)", e))?;
    if done.status.success() {
        return Ok(program);
    }
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    Err(format!(
        "cannot compile {}: {}",
        source.display(),
        text.lines().next().unwrap_or("cc failed")
    )
    .into())
}
