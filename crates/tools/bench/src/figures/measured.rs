//! Figures that scripts measure: those of the host edge (THORN-ML: 9 to 12, Table 1, and where the
//! time of an outage goes), of collectives (R²CCL: 15 and 16) and of automatic path migration
//! (Vishnu et al.: 5 to 12, and the computation test).
//!
//! `benches/edge/figures.py` measures between network namespaces with FRR, which is what the tests
//! of the edge use, too; `benches/coll/figures.py` and `benches/apm/figures.py` on the emulated
//! network. They say in JSON what is to be drawn (`benches/picture.py`). That file is kept beside
//! the pictures. Where they cannot measure (no root, no FRR, no PyTorch) they say why, and the
//! figure is left out.
//!
//! Failure cases: a program that fails or a fault that is not survived fails the figure. All waits
//! of the scripts have limits.

use std::path::Path;
use std::process::Command;

use serde::Deserialize;
use unbroken_chart::{plain, Axis, Bars, Figure, Line, Lines, Look, Marker, Panel, Series};

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
pub const PAPERS: [Paper; 3] = [
    Paper {
        prefix: "edge",
        script: "benches/edge/figures.py",
        names: &["outage", "latency", "collectives", "training"],
    },
    Paper { prefix: "coll", script: "benches/coll/figures.py", names: &["15", "16"] },
    Paper {
        prefix: "apm",
        script: "benches/apm/figures.py",
        names: &["5-6", "7", "8", "computation", "9", "10", "11", "12"],
    },
];

/// What one measurement gives.
#[derive(Deserialize)]
pub struct Drawings {
    /// By the names of their files.
    pub figures: Vec<(String, Picture)>,
    /// What is published, and ours.
    pub rows: Vec<Row>,
}

/// A figure as the script describes it.
#[derive(Deserialize)]
pub struct Picture {
    title: String,
    columns: usize,
    panels: Vec<Part>,
    notes: Vec<String>,
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Part {
    Lines {
        title: String,
        x: Scale,
        y: Scale,
        lines: Vec<Curve>,
        markers: Vec<(f64, String)>,
    },
    Bars {
        title: String,
        x: Scale,
        rows: Vec<String>,
        series: Vec<(String, usize, Vec<Option<f64>>)>,
        unit: Unit,
    },
}

#[derive(Deserialize)]
struct Scale {
    label: String,
    low: f64,
    high: f64,
    #[serde(default)]
    log: bool,
}

#[derive(Deserialize)]
struct Curve {
    name: String,
    colour: usize,
    #[serde(default)]
    look: Manner,
    points: Vec<(f64, f64)>,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Manner {
    #[default]
    Solid,
    Dashed,
    Dotted,
}

/// What figures behind bars are written in.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Unit {
    Ms,
    Gbps,
    Percent,
}

impl Scale {
    fn axis(&self) -> Axis {
        let make = if self.log { Axis::log } else { Axis::linear };
        make(&self.label, self.low, self.high, plain)
    }
}

impl Curve {
    fn line(self) -> Line {
        Line::new(&self.name, self.colour, self.points).looking(match self.look {
            Manner::Solid => Look::Solid,
            Manner::Dashed => Look::Dashed,
            Manner::Dotted => Look::Dotted,
        })
    }
}

impl Part {
    fn panel(self) -> Panel {
        match self {
            Part::Lines { title, x, y, lines, markers } => Panel::Lines(Lines {
                title,
                x: x.axis(),
                y: y.axis(),
                lines: lines.into_iter().map(Curve::line).collect(),
                markers: markers.into_iter().map(|(x, words)| Marker { x, words }).collect(),
            }),
            Part::Bars { title, x, rows, series, unit } => {
                let series = series.into_iter().map(|(name, colour, values)| Series {
                    name,
                    colour,
                    values: values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect(),
                });
                let write = match unit {
                    Unit::Ms => |ms: f64| format!("{ms:.1} ms"),
                    Unit::Gbps => |rate: f64| format!("{rate:.2} Gbit/s"),
                    Unit::Percent => |share: f64| format!("{share:.1} %"),
                };
                Panel::Bars(Bars { title, x: x.axis(), rows, series: series.collect(), write })
            }
        }
    }
}

impl Picture {
    /// The figure of it.
    pub fn figure(self) -> Figure {
        Figure {
            title: self.title,
            panels: self.panels.into_iter().map(Part::panel).collect(),
            columns: self.columns,
            notes: self.notes,
        }
    }
}

fn read(text: &str) -> Result<Drawings> {
    Ok(serde_json::from_str(text)?)
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
    let text =
        std::fs::read_to_string(out).map_err(|e| format!("cannot read {}: {e}", out.display()))?;
    read(&text).map(Some).map_err(|e| format!("{}: {e}", out.display()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_script_says_is_drawn() {
        let text = r#"{"setting": "a machine", "rows": [{"of": "Figure 12", "what": "w", "published": "p", "here": "h"}], "figures": [["12", {
            "title": "T", "columns": 2, "notes": ["a note"], "panels": [
                {"kind": "lines", "title": "L", "x": {"label": "ms", "low": 1, "high": 100, "log": true}, "y": {"label": "share", "low": 0, "high": 1},
                 "lines": [{"name": "one", "colour": 2, "look": "dashed", "points": [[1, 0.5], [2.5, 1]]}, {"name": "two", "colour": 0, "points": []}],
                 "markers": [[10, "here"]]},
                {"kind": "bars", "title": "B", "x": {"label": "ms", "low": 0, "high": 9}, "rows": ["r"], "unit": "ms", "series": [["s", 1, [2.25]], ["none", 3, [null]]]}
            ]}]]}"#;
        let Drawings { figures, rows } = read(text).unwrap();
        assert_eq!(rows.len(), 1);
        let [(name, picture)] = figures.try_into().ok().unwrap();
        let svg = picture.figure().svg();
        assert_eq!(name, "12");
        for part in [">L<", ">B<", "a note", "line s2 dashed", ">here<", ">2.2 ms<"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert!(!svg.contains("NaN"));
        assert!(read("{}").err().unwrap().to_string().contains("figures"));
    }
}
