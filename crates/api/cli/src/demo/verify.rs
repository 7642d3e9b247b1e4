//! The verifying program under the fault.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use unbroken_events::{read_events, What};
use unbroken_testkit::{Lab, Pair, Running, Spec, Watch};

use super::screen::Screen;
use super::stream::{told, NICS};
use super::FAULT;
use crate::output::{self, Failure};

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

/// Runs it. What goes wrong is in the answer, so that the other parts are still
/// reported.
pub(crate) fn play(unbroken: &Path, program: Result<&Path, &str>, screen: &Screen) -> Verified {
    let run = program.map_err(|e| Failure::Text(e.to_string())).and_then(|p| run(unbroken, p));
    let verified = match run {
        Ok(verified) => verified,
        Err(e) => Verified { wrong: Some(e.to_string()), ..Verified::default() },
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

/// How it is started at both ends.
pub(crate) fn spec(program: &Path, seconds: u64) -> Spec {
    // Not split at blanks, which its path may have.
    Spec {
        program: program.display().to_string(),
        ..Spec::new("", &format!("--device unb0 --seconds {seconds}"))
    }
}

/// Where the server listens and the client connects.
pub(crate) fn ends(port: u16) -> (Vec<String>, Vec<String>) {
    let args = |name: &str, value: String| vec![name.to_string(), value];
    (args("--listen", port.to_string()), args("--connect", format!("127.0.0.1:{port}")))
}

fn run(unbroken: &Path, program: &Path) -> output::Result<Verified> {
    let lab = Lab::new(unbroken).map_err(told)?;
    let spec = spec(program, SECONDS);
    let mut pair = Pair::start_as(&lab, &spec, ends).map_err(told)?;
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

fn last_line(end: &Running) -> output::Result<Line> {
    let output = end.output();
    let line = output.lines().rev().find(|l| l.trim_start().starts_with('{')).unwrap_or_default();
    serde_json::from_str(line)
        .map_err(|e| format!("{} gave no result ({e}): '{line}'", end.program()).into())
}
