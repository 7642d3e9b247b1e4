//! A sweep on a Ray cluster: Python's `unbroken.simulate` has parts of it computed there.
//!
//! It gets one JSON object on stdin: where the cluster is, and what of the sweep is left to do. It
//! writes a line for each part: `{"lines": […]}`, or `{"error": "…"}`, and `{"done": null}` behind
//! the last.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::process::{Child, Command, Stdio};

use serde::Deserialize;
use unbroken_simulations::sweep::{Line, Missing, Sweep};
use unbroken_simulations::Watch;

use crate::output::{Failure, Result};

const MODULE: &str = "unbroken.simulate";

/// A line of the other program.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Told {
    Lines(Vec<Line>),
    Error(String),
    Done(()),
}

/// Has all that is missing of a sweep computed.
pub(super) fn compute(sweep: &Sweep, watch: &Watch, address: &str, python: &str) -> Result {
    let missing = sweep.missing();
    if missing.parts.is_empty() {
        return Ok(());
    }
    let mut helper = Helper::start(python)?;
    helper.ask(&missing, address)?;
    let answers = helper.0.stdout.take().map(BufReader::new);
    for line in answers.into_iter().flat_map(BufRead::lines) {
        let line = line.map_err(|e| Failure::io(format!("cannot read from {python}"), e))?;
        let told: Told = serde_json::from_str(&line)
            .map_err(|e| format!("{python} -m {MODULE} says '{}': {e}", cut(&line)))?;
        match told {
            Told::Lines(lines) => sweep.add(&lines, watch)?,
            Told::Error(text) => return Err(Failure::Text(text)),
            Told::Done(()) => return Ok(()),
        }
    }
    Err(Failure::Text(format!("{python} -m {MODULE} ended early; {}", install())))
}

fn install() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "--ray needs Python with the wheel of Unbroken {version} and its extra: `make wheel`, then \
         `pip install \"$(ls target/wheels/unbroken-*.whl)[ray]\"`; --python names another Python"
    )
}

fn cut(line: &str) -> String {
    line.chars().take(200).collect()
}

/// The other program. It ends with us.
struct Helper(Child);

impl Helper {
    fn start(python: &str) -> Result<Helper> {
        let mut command = Command::new(python);
        command.args(["-m", MODULE]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command
            .spawn()
            .map(Helper)
            .map_err(|e| Failure::Text(format!("cannot start {python}: {e}; {}", install())))
    }

    fn ask(&mut self, missing: &Missing, address: &str) -> Result {
        let question = serde_json::json!({
            "address": address, "of": missing.of, "parts": missing.parts,
        });
        let Some(mut stdin) = self.0.stdin.take() else { return Ok(()) };
        match stdin.write_all(question.to_string().as_bytes()) {
            // it has ended, and will be asked why
            Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
            written => written.map_err(|e| Failure::io("cannot write to Python", e)),
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // After the last line it ends by itself, and leaves the cluster before.
        let _ = self.0.wait();
    }
}
