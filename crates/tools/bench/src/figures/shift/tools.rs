//! The programs that figures are measured with.

use std::path::{Path, PathBuf};

use crate::Result;

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

/// Why the figure that needs PyTorch cannot be drawn.
pub const NO_TORCH: &str =
    "there is no Python with torch; `make test-torch` makes one, `--python` names one";

/// A program of tests/c.
pub fn program(tools: &Tools, name: &str) -> Result<String> {
    let path: PathBuf = tools.programs.join(name);
    match path.exists() {
        true => Ok(path.display().to_string()),
        false => Err(missing(&path)),
    }
}

fn missing(path: &Path) -> Box<dyn std::error::Error> {
    format!("{} is missing; `make figures` builds it", path.display()).into()
}
