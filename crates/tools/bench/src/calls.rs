//! How long calls take: `tests/c/verbs.c`, one run of it.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use unbroken_fabric::DeviceKind;
use unbroken_testkit::Lab;

use crate::Result;

/// No run takes longer.
const LIMIT: Duration = Duration::from_secs(60);

/// Times in ns by the names of the calls.
pub type Times = HashMap<String, f64>;

/// The GID index that leads to peers.
pub fn gid_index(kind: DeviceKind) -> u8 {
    if kind == DeviceKind::Plain {
        3
    } else {
        0
    }
}

/// Runs the program once on NICs of a kind.
pub fn run(unbroken: &Path, program: &str, kind: DeviceKind, failover: bool) -> Result<Times> {
    let lab = Lab::with_device(unbroken, kind)?;
    let args = [format!("TEST_GID_INDEX={}", gid_index(kind)), program.to_string()];
    let mut running = lab.start("a", failover, "env", &args)?;
    running.succeed(LIMIT)?;
    let output = running.output();
    let line = output
        .lines()
        .rev()
        .find(|l| l.starts_with('{'))
        .ok_or_else(|| format!("no figures in: {output}"))?;
    Ok(serde_json::from_str(line)?)
}
