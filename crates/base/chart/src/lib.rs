//! Pictures of figures as SVG: panels of lines, bars and heat maps, which read on light and dark
//! ground.
//!
//! A [`Figure`] has panels side by side, a legend of all that its lines are called, and notes
//! below. What lies outside of a panel's axes is cut off; what is no number is left out. The crate
//! makes a text and does no I/O.
#![forbid(unsafe_code)]

mod axis;
mod bars;
mod heat;
mod lines;

use std::fmt::Write;

pub use axis::{bytes, loss, plain, Axis};
pub use bars::{Bars, Series};
pub use heat::Heat;
pub use lines::{Line, Lines, Look, Marker};

/// Room for one panel, its title and its axes included.
const PANEL_WIDTH: f64 = 430.0;
const PANEL_HEIGHT: f64 = 330.0;
const MARGIN: f64 = 14.0;
const TITLE_HEIGHT: f64 = 34.0;
const ROW_HEIGHT: f64 = 19.0;
/// As much text as one row holds, in letters (they differ in width; this many of the widest that
/// are usual fit).
const LETTER_WIDTH: f64 = 7.0;

const STYLE: &str = "
  text { font: 12px system-ui, sans-serif; fill: #24292f; }
  .title { font-weight: 600; font-size: 14px; }
  .head { font-weight: 600; }
  .axis, .grid { stroke: #8c959f; stroke-width: 1; fill: none; }
  .grid { stroke-opacity: .25; }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
  .dashed { stroke-dasharray: 6 4; }
  .dotted { stroke-dasharray: 2 3; }
  .marker { stroke: #57606a; fill: none; stroke-dasharray: 4 3; }
  .cell { fill: #24292f; font-size: 11px; text-anchor: middle; }
  .s0 { stroke: #cf222e; } .s1 { stroke: #bc4c00; } .s2 { stroke: #0969da; } .s3 { stroke: #1a7f37; }
  .s4 { stroke: #8250df; } .s5 { stroke: #57606a; } .s6 { stroke: #bf3989; } .s7 { stroke: #9a6700; }
  .f0 { fill: #cf222e; } .f1 { fill: #bc4c00; } .f2 { fill: #0969da; } .f3 { fill: #1a7f37; }
  .f4 { fill: #8250df; } .f5 { fill: #57606a; } .f6 { fill: #bf3989; } .f7 { fill: #9a6700; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .cell { fill: #24292f; }
    .marker { stroke: #8b949e; }
    .s0 { stroke: #ff7b72; } .s1 { stroke: #ffa657; } .s2 { stroke: #58a6ff; } .s3 { stroke: #3fb950; }
    .s4 { stroke: #a371f7; } .s5 { stroke: #8b949e; } .s6 { stroke: #f778ba; } .s7 { stroke: #d29922; }
    .f0 { fill: #ff7b72; } .f1 { fill: #ffa657; } .f2 { fill: #58a6ff; } .f3 { fill: #3fb950; }
    .f4 { fill: #a371f7; } .f5 { fill: #8b949e; } .f6 { fill: #f778ba; } .f7 { fill: #d29922; }
  }
";
/// Colours that lines can have.
pub const COLOURS: usize = 8;

/// A part of a figure.
#[derive(Clone, Debug)]
pub enum Panel {
    /// Lines over two axes.
    Lines(Lines),
    /// Bars.
    Bars(Bars),
    /// A table in colours.
    Heat(Heat),
}

/// A picture.
#[derive(Clone, Debug, Default)]
pub struct Figure {
    /// What it shows.
    pub title: String,
    /// Its parts, row by row.
    pub panels: Vec<Panel>,
    /// Panels in a row.
    pub columns: usize,
    /// Sentences below.
    pub notes: Vec<String>,
}

/// Where something is drawn: left, top, width, height.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Frame {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

impl Frame {
    fn right(&self) -> f64 {
        self.left + self.width
    }

    fn bottom(&self) -> f64 {
        self.top + self.height
    }
}

impl Figure {
    /// The picture as a document.
    pub fn svg(&self) -> String {
        let columns = self.columns.clamp(1, self.panels.len().max(1));
        let rows = self.panels.len().div_ceil(columns);
        let width = columns as f64 * PANEL_WIDTH + 2.0 * MARGIN;
        let legend = self.legend(width);
        let notes: Vec<String> = self.notes.iter().flat_map(|note| wrapped(note, width)).collect();
        let panels_top = TITLE_HEIGHT + legend.len() as f64 * ROW_HEIGHT + MARGIN;
        let notes_top = panels_top + rows as f64 * PANEL_HEIGHT;
        let height = notes_top + notes.len() as f64 * ROW_HEIGHT + MARGIN;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\">\n\
             <title>{title}</title>\n<style>{STYLE}</style>\n<text class=\"title\" x=\"{MARGIN}\" y=\"22\">{title}</text>\n",
            title = escaped(&self.title)
        );
        for (row, keys) in legend.iter().enumerate() {
            let mut x = MARGIN;
            for key in keys {
                let y = TITLE_HEIGHT + (row as f64 + 0.5) * ROW_HEIGHT;
                svg += &key.sample(x, y);
                text(&mut svg, "", x + 32.0, y + 4.0, "start", key.name());
                x += key_width(key.name());
            }
        }
        for (n, panel) in self.panels.iter().enumerate() {
            let frame = Frame {
                left: MARGIN + (n % columns) as f64 * PANEL_WIDTH,
                top: panels_top + (n / columns) as f64 * PANEL_HEIGHT,
                width: PANEL_WIDTH,
                height: PANEL_HEIGHT,
            };
            match panel {
                Panel::Lines(lines) => lines.draw(&mut svg, frame, n),
                Panel::Bars(bars) => bars.draw(&mut svg, frame),
                Panel::Heat(heat) => heat.draw(&mut svg, frame),
            }
        }
        for (n, note) in notes.iter().enumerate() {
            text(&mut svg, "", MARGIN, notes_top + (n as f64 + 0.7) * ROW_HEIGHT, "start", note);
        }
        svg + "</svg>\n"
    }

    /// What the lines and bars of all panels are called, each once, in rows that fit.
    fn legend(&self, width: f64) -> Vec<Vec<Key<'_>>> {
        let mut rows: Vec<Vec<Key<'_>>> = Vec::new();
        let mut room = 0.0;
        let keys = self.panels.iter().flat_map(|panel| -> Vec<Key<'_>> {
            match panel {
                Panel::Lines(lines) => lines.lines.iter().map(Key::Line).collect(),
                Panel::Bars(bars) => bars.series.iter().map(Key::Bar).collect(),
                Panel::Heat(_) => Vec::new(),
            }
        });
        for key in keys.filter(|key| !key.name().is_empty()) {
            if rows.iter().flatten().any(|other| other.name() == key.name()) {
                continue;
            }
            let width_of_key = key_width(key.name());
            if rows.is_empty() || room < width_of_key {
                rows.push(Vec::new());
                room = width - 2.0 * MARGIN;
            }
            room -= width_of_key;
            if let Some(row) = rows.last_mut() {
                row.push(key);
            }
        }
        rows
    }
}

/// An entry of the legend.
enum Key<'a> {
    Line(&'a Line),
    Bar(&'a Series),
}

impl Key<'_> {
    fn name(&self) -> &str {
        match self {
            Key::Line(line) => &line.name,
            Key::Bar(series) => &series.name,
        }
    }

    fn sample(&self, x: f64, y: f64) -> String {
        match self {
            Key::Line(line) => line.sample(x, y),
            Key::Bar(series) => series.sample(x, y),
        }
    }
}

/// Room for a name in the legend.
fn key_width(name: &str) -> f64 {
    48.0 + LETTER_WIDTH * name.chars().count() as f64
}

/// A text in rows that fit.
fn wrapped(note: &str, width: f64) -> Vec<String> {
    let room = ((width - 2.0 * MARGIN) / LETTER_WIDTH * 1.1) as usize;
    let mut rows: Vec<String> = Vec::new();
    for word in note.split_whitespace() {
        match rows.last_mut() {
            Some(row) if row.chars().count() + word.chars().count() < room => {
                row.push(' ');
                row.push_str(word);
            }
            _ => rows.push(word.into()),
        }
    }
    rows
}

/// A line of text.
fn text(svg: &mut String, class: &str, x: f64, y: f64, anchor: &str, words: &str) {
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    let _ = writeln!(
        svg,
        "<text{class} x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escaped(words)
    );
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element is closed, in order.
    pub(crate) fn assert_well_formed(svg: &str) {
        let mut open: Vec<&str> = Vec::new();
        for tag in svg.split('<').skip(1) {
            let (tag, _) = tag.split_once('>').expect("a tag ends");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "{svg}");
            } else if !tag.ends_with('/') {
                open.push(tag.split_whitespace().next().unwrap());
            }
        }
        assert!(open.is_empty() && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    fn figure() -> Figure {
        let line = |name: &str, colour| {
            Line::new(name, colour, vec![(1.0, 1.0), (10.0, f64::NAN), (100.0, 5.0)])
        };
        let lines = Lines {
            title: "a < b".into(),
            x: Axis::log("size", 1.0, 100.0, plain),
            y: Axis::linear("time", 0.0, 4.0, plain),
            lines: vec![line("one & two", 0), line("three", 9).looking(Look::Marks)],
            markers: vec![Marker { x: 10.0, words: "yours".into() }],
        };
        let heat = Heat {
            title: "heat".into(),
            x_label: "loss".into(),
            y_label: "size".into(),
            columns: vec!["1".into(), "2".into()],
            rows: vec!["a".into()],
            values: vec![vec![0.5, f64::NAN]],
        };
        let bars = Bars {
            title: "bars".into(),
            x: Axis::linear("time", 0.0, 4.0, plain),
            rows: vec!["a < b".into()],
            series: vec![
                Series { name: "three".into(), colour: 2, values: vec![1.0] },
                Series { name: "four".into(), colour: 3, values: vec![f64::NAN] },
            ],
            write: plain,
        };
        Figure {
            title: "all \"of\" it".into(),
            panels: vec![
                Panel::Lines(lines.clone()),
                Panel::Heat(heat),
                Panel::Lines(lines),
                Panel::Bars(bars),
            ],
            columns: 2,
            notes: vec!["word ".repeat(200)],
        }
    }

    #[test]
    fn figures_are_documents() {
        let svg = figure().svg();
        assert_well_formed(&svg);
        assert!(
            svg.contains("a &lt; b")
                && svg.contains("one &amp; two")
                && svg.contains("all &quot;of&quot; it")
        );
        assert_eq!(svg.matches(">three</text>").count(), 1, "each name is in the legend once");
        assert_eq!(svg.matches(">four</text>").count(), 1, "bars are in the legend, too");
        assert!(svg.matches(">word word").count() > 1, "long notes are wrapped");
        assert_well_formed(&Figure::default().svg());
    }

    #[test]
    fn words_stay_in_their_row() {
        let long = "word ".repeat(100);
        let rows = wrapped(&long, 430.0);
        assert!(rows.len() > 5 && rows.iter().all(|row| row.len() < 80));
        assert_eq!(rows.join(" "), long.trim());
        assert_eq!(wrapped("", 430.0), Vec::<String>::new());
    }
}
