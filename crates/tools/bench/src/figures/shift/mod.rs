//! The figures of SHIFT (cross-NIC failover): 7, 8b, 9 and 10, and Table 2. All are measured live,
//! on softnic, with unmodified perftest, both ends on this machine; so it is their shape that can
//! be compared with the paper's, which has two servers with RNICs of 100 Gbit/s.
//!
//! What the paper's text gives is beside ours in a table and in `shift.json`. Times are bounded:
//! each run has a limit.

mod latency;
mod stream;
mod switching;
mod training;
mod verbs;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use unbroken_chart::Figure;

use crate::Result;

/// A value that the paper's text gives, and ours.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Row {
    /// What it belongs to: `Figure 7`.
    of: String,
    /// What it is.
    what: String,
    /// As the paper has it; empty where its text has no figure.
    published: String,
    /// Ours.
    here: String,
}

impl Row {
    fn new(of: &str, what: impl Into<String>, published: &str, here: impl Into<String>) -> Row {
        Row { of: of.into(), what: what.into(), published: published.into(), here: here.into() }
    }
}

/// What is needed to run programs.
#[derive(Clone, Debug)]
pub struct Tools {
    /// The `unbroken` command.
    pub unbroken: PathBuf,
    /// The folder of the compiled programs of tests/c.
    pub programs: PathBuf,
    /// The training program and a Python that has torch; none: Figure 10 is not drawn.
    pub training: Option<(PathBuf, PathBuf)>,
}

/// A figure, and what is published of it.
pub struct Drawing {
    pub figure: Figure,
    pub rows: Vec<Row>,
}

type Draw = fn(&Tools) -> Result<Drawing>;

/// The number of the figure that needs PyTorch.
pub const TRAINING: &str = "10";
/// Why it cannot be drawn.
pub const NO_TORCH: &str =
    "there is no Python with torch; `make test-torch` makes one, `--python` names one";

/// By their numbers; Figure 8's part b has its number.
pub const FIGURES: [(&str, Draw); 5] = [
    ("7", stream::figure_7),
    ("8", switching::figure_8b),
    ("9", verbs::figure_9),
    (TRAINING, training::figure_10),
    ("table2", latency::table_2),
];

/// The number of a figure as file names have it.
pub fn padded(number: &str) -> String {
    format!("{number:0>2}")
}

/// The table of all that is published.
pub fn table(rows: &[Row]) -> String {
    let head = "| of | what | published | here |\n| --- | --- | --- | --- |\n";
    let line = |r: &Row| format!("| {} | {} | {} | {} |\n", r.of, r.what, r.published, r.here);
    head.to_string() + &rows.iter().map(line).collect::<String>()
}

/// A program of tests/c.
fn program(tools: &Tools, name: &str) -> Result<String> {
    let path: PathBuf = tools.programs.join(name);
    match path.exists() {
        true => Ok(path.display().to_string()),
        false => Err(missing(&path)),
    }
}

fn missing(path: &Path) -> Box<dyn std::error::Error> {
    format!("{} is missing; `make figures` builds it", path.display()).into()
}
