//! What a figure is drawn from, and what is published of it.

use serde::{Deserialize, Serialize};
use unbroken_chart::Figure;

/// A value that the paper's text gives, and ours.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Row {
    /// What it belongs to: `Figure 7`.
    pub of: String,
    /// What it is.
    pub what: String,
    /// As the paper has it; empty where its text has no figure.
    pub published: String,
    /// Ours.
    pub here: String,
}

impl Row {
    pub fn new(of: &str, what: impl Into<String>, published: &str, here: impl Into<String>) -> Row {
        Row { of: of.into(), what: what.into(), published: published.into(), here: here.into() }
    }
}

/// A figure, and what is published of it.
pub struct Drawing {
    pub figure: Figure,
    pub rows: Vec<Row>,
}

/// The table of all that is published.
pub fn table(rows: &[Row]) -> String {
    let head = "| of | what | published | here |\n| --- | --- | --- | --- |\n";
    let line = |r: &Row| format!("| {} | {} | {} | {} |\n", r.of, r.what, r.published, r.here);
    head.to_string() + &rows.iter().map(line).collect::<String>()
}
