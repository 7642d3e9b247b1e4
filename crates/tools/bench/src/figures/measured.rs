//! Figures that scripts measure: those of the host edge (THORN-ML: 9 to 12, Table 1, and where the
//! time of an outage goes), of collectives (R²CCL: 15 and 16) and of automatic path migration
//! (Vishnu et al.: 5 to 12, and the computation test).
//!
//! `benches/edge/figures.py` measures between network namespaces with FRR, which is what the tests
//! of the edge use, too; `benches/coll/figures.py` and `benches/apm/figures.py` on the emulated
//! network. `benches/coll/simulated.py` computes those of R²CCL's training jobs (7 to 10),
//! `benches/coll/serving.py` those of its serving (11 to 14). They say in JSON what is to be drawn
//! (`benches/picture.py`). That file is kept beside the pictures. Where they cannot measure (no
//! root, no FRR, no PyTorch) they say why, and the figure is left out.
//!
//! Failure cases: a program that fails or a fault that is not survived fails the figure. All waits
//! of the scripts have limits.

use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};
use unbroken_chart::Figure;

use super::shift::{Row, Tools};
use crate::Result;

/// The script's exit status where it cannot measure.
const CANNOT: i32 = 77;

/// A paper whose figures a script measures.
pub struct Paper {
    /// What names of its figures begin with.
    pub prefix: &'static str,
    script: &'static str,
    /// What is measured together.
    pub names: &'static [&'static str],
}

impl Paper {
    /// The names of its figures, as they are asked for.
    pub fn figures(&self) -> impl Iterator<Item = String> + use<'_> {
        self.names.iter().map(|name| format!("{}-{name}", self.prefix))
    }
}

/// All of them.
pub const PAPERS: [Paper; 5] = [
    Paper {
        prefix: "edge",
        script: "benches/edge/figures.py",
        names: &["outage", "latency", "collectives", "training"],
    },
    Paper { prefix: "coll", script: "benches/coll/figures.py", names: &["15", "16"] },
    Paper { prefix: "coll", script: "benches/coll/simulated.py", names: &["7", "8", "9", "10"] },
    Paper { prefix: "coll", script: "benches/coll/serving.py", names: &["11", "12", "13", "14"] },
    Paper {
        prefix: "apm",
        script: "benches/apm/figures.py",
        names: &["5-6", "7", "8", "computation", "9", "10", "11", "12"],
    },
];

/// What one measurement gives, and is drawn from again.
#[derive(Deserialize, Serialize)]
pub struct Drawings {
    /// By the names of their files.
    pub figures: Vec<(String, Figure)>,
    /// What is published, and ours.
    pub rows: Vec<Row>,
}

/// What a file has; none if it is of another kind.
pub fn read(path: &Path) -> Result<Option<Drawings>> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let all: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    if all.get("figures").is_none() {
        return Ok(None);
    }
    let read = serde_json::from_value(all).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(Some(read))
}

/// Measures; none where it cannot be done here, which the script has explained. What was measured
/// is left in `out`.
pub fn measure(paper: &Paper, name: &str, out: &Path, tools: &Tools) -> Result<Option<Drawings>> {
    let script = paper.script;
    let mut command = Command::new("python3");
    command.args([script, name, "--out"]).arg(out);
    if let Some((python, _)) = &tools.training {
        command.arg("--python").arg(python);
    }
    let status = command.status().map_err(|e| format!("python3: {e}"))?;
    if status.code() == Some(CANNOT) {
        return Ok(None);
    }
    if !status.success() {
        return Err(format!("{script} {name} failed, {status}; what it said is above").into());
    }
    match read(out)? {
        Some(drawings) => Ok(Some(drawings)),
        None => Err(format!("{} has no figures", out.display()).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_script_says_is_drawn() {
        let text = r#"{"setting": "a machine", "rows": [{"of": "Figure 12", "what": "w", "published": "p", "here": "h"}], "figures": [["12", {
            "title": "T", "columns": 2, "notes": ["a note"], "panels": [
                {"kind": "lines", "title": "L", "x": {"label": "t", "low": 1, "high": 100, "log": true, "unit": "ms"}, "y": {"label": "share", "low": 0, "high": 1},
                 "lines": [{"name": "one", "colour": 2, "look": "dashed", "points": [[1, 0.5], [2.5, 1]]}, {"name": "two", "colour": 0, "points": []}],
                 "markers": [{"x": 10, "words": "here"}]},
                {"kind": "bars", "title": "B", "x": {"label": "t", "low": 0, "high": 9, "unit": "ms"}, "rows": ["r"],
                 "series": [{"name": "s", "colour": 1, "values": [2.25]}, {"name": "none", "colour": 3, "values": [null]}]}
            ]}]]}"#;
        let dir = tempfile::tempdir().unwrap();
        let file = |text: &str| {
            let path = dir.path().join("of.json");
            std::fs::write(&path, text).unwrap();
            read(&path)
        };
        let Drawings { figures, rows } = file(text).unwrap().unwrap();
        assert_eq!(rows.len(), 1);
        let [(name, figure)] = figures.try_into().ok().unwrap();
        let svg = figure.svg().unwrap();
        assert_eq!(name, "12");
        for part in ["L", "B", "a note", "here", "2.25 ms"] {
            assert!(svg.contains(&format!(">\n{part}\n<")), "{part}: {svg}");
        }
        assert!(file("[]").unwrap().is_none(), "a file of another kind");
        let error = file(r#"{"figures": 1}"#).err().unwrap().to_string();
        assert!(error.contains("of.json"), "{error}");
    }
}
