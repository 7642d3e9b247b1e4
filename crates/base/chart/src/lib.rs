//! Pictures of figures as SVG, drawn by `plotters`: panels of lines, bars and heat maps in one
//! theme, which reads on light and dark ground and in black and white.
//!
//! A [`Figure`] has panels side by side, a legend of all that its lines and bars are called, and
//! notes below. It can be kept as JSON, and drawn again. What lies outside of a panel's axes is cut
//! off. Titles are wrapped, and ticks chosen, so that no words are cut and none touch others.
#![forbid(unsafe_code)]

mod axis;
mod bars;
mod dashes;
mod frame;
mod heat;
mod lines;
mod theme;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};
use serde::{Deserialize, Serialize};

pub use axis::{Axis, Unit};
pub use bars::{Bars, Series};
pub use heat::Heat;
pub use lines::{Line, Lines, Look, Marker};
pub use theme::{DrawError, COLOURS};

use theme::{fine, Area, Drawn, ROW};

/// Room for one panel, its title and its axes included, in pixels.
const PANEL_WIDTH: f64 = 430.0;
const PANEL_HEIGHT: f64 = 330.0;
/// The room of one that stands alone.
const ALONE: f64 = 640.0;
const MARGIN: f64 = 14.0;
/// The piece of a line in the legend, and the room behind it.
const SAMPLE: f64 = 34.0;
const BEHIND: f64 = 26.0;
/// Bold letters are wider.
const BOLD: f64 = 1.1;

/// A part of a figure.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Panel {
    /// Lines over two axes.
    Lines(Lines),
    /// Bars.
    Bars(Bars),
    /// A table in colours.
    Heat(Heat),
}

impl Panel {
    fn title(&self) -> &str {
        match self {
            Panel::Lines(lines) => &lines.title,
            Panel::Bars(bars) => &bars.title,
            Panel::Heat(heat) => &heat.title,
        }
    }
}

/// A picture.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
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

/// A figure whose words are laid out in rows; lengths are in pixels.
struct Layout<'a> {
    columns: usize,
    /// Width and height of a panel.
    panel: (f64, f64),
    title: Vec<String>,
    legend: Vec<Vec<Key<'a>>>,
    /// Rows of the panels' titles, and the room that all have for them.
    heads: Vec<Vec<String>>,
    head: f64,
    notes: Vec<String>,
}

impl Layout<'_> {
    fn panels_top(&self) -> f64 {
        2.0 * MARGIN + (self.title.len() + self.legend.len()) as f64 * ROW
    }

    fn notes_top(&self) -> f64 {
        self.panels_top() + self.heads.len().div_ceil(self.columns) as f64 * self.panel.1
    }

    fn size(&self) -> (f64, f64) {
        let width = self.columns as f64 * self.panel.0 + 2.0 * MARGIN;
        (width, self.notes_top() + self.notes.len() as f64 * ROW + MARGIN)
    }
}

impl Figure {
    /// The picture as a document.
    pub fn svg(&self) -> Result<String, DrawError> {
        let layout = self.layout();
        let (width, height) = layout.size();
        let mut svg = String::new();
        let fine_size = (fine(width) as u32, fine(height) as u32);
        let area = SVGBackend::with_string(&mut svg, fine_size).into_drawing_area();
        let row = |n: usize| MARGIN + (n as f64 + 0.5) * ROW;
        for (n, words) in layout.title.iter().enumerate() {
            text(&area, words, (MARGIN, row(n)), true)?;
        }
        for (n, keys) in layout.legend.iter().enumerate() {
            draw_keys(&area, keys, row(layout.title.len() + n))?;
        }
        for (n, panel) in self.panels.iter().enumerate() {
            let (across, down) = ((n % layout.columns) as f64, (n / layout.columns) as f64);
            let corner =
                (MARGIN + across * layout.panel.0, layout.panels_top() + down * layout.panel.1);
            // The last one takes what is left of its row.
            let last = n + 1 == self.panels.len();
            let columns = if last { layout.columns - n % layout.columns } else { 1 };
            let part = area.clone().shrink(
                (fine(corner.0), fine(corner.1)),
                (fine(columns as f64 * layout.panel.0 - MARGIN), fine(layout.panel.1 - MARGIN)),
            );
            draw_panel(&part, panel, &layout.heads[n], layout.head)?;
        }
        for (n, note) in layout.notes.iter().enumerate() {
            text(&area, note, (MARGIN, layout.notes_top() + (n as f64 + 0.5) * ROW), false)?;
        }
        area.present()?;
        drop(area);
        Ok(document(&svg, (width, height), &self.title))
    }

    fn layout(&self) -> Layout<'_> {
        let columns = self.columns.clamp(1, self.panels.len().max(1));
        let panel_width = if columns == 1 { ALONE } else { PANEL_WIDTH };
        let room = columns as f64 * panel_width;
        let heads: Vec<Vec<String>> = self
            .panels
            .iter()
            .map(|panel| theme::wrapped(panel.title(), (panel_width - 2.0 * MARGIN) / BOLD))
            .collect();
        let head = heads.iter().map(Vec::len).max().unwrap_or(0) as f64 * ROW + 8.0;
        let bars = self.panels.iter().map(|panel| match panel {
            Panel::Bars(bars) => bars.height(head) + MARGIN,
            Panel::Lines(_) | Panel::Heat(_) => 0.0,
        });
        Layout {
            columns,
            panel: (panel_width, bars.fold(PANEL_HEIGHT + head - ROW, f64::max)),
            title: theme::wrapped(&self.title, room / BOLD),
            legend: self.legend(room),
            heads,
            head,
            notes: self.notes.iter().flat_map(|note| theme::wrapped(note, room)).collect(),
        }
    }

    /// What the lines and bars of all panels are called, each once, in rows that fit.
    fn legend(&self, width: f64) -> Vec<Vec<Key<'_>>> {
        let mut rows: Vec<Vec<Key<'_>>> = Vec::new();
        let mut room = 0.0;
        let keys = self.panels.iter().flat_map(|panel| -> Vec<Key<'_>> {
            match panel {
                Panel::Lines(lines) => lines.lines.iter().map(Key::Line).collect(),
                Panel::Bars(bars) => bars.series.iter().enumerate().map(Key::bar).collect(),
                Panel::Heat(_) => Vec::new(),
            }
        });
        for key in keys.filter(|key| !key.name().is_empty()) {
            if rows.iter().flatten().any(|other| other.name() == key.name()) {
                continue;
            }
            if rows.is_empty() || room < key.width() {
                rows.push(Vec::new());
                room = width;
            }
            room -= key.width();
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
    /// Bars, and their place among those of a row.
    Bar(usize, &'a Series),
}

impl<'a> Key<'a> {
    fn bar((place, series): (usize, &'a Series)) -> Key<'a> {
        Key::Bar(place, series)
    }

    fn name(&self) -> &str {
        match self {
            Key::Line(line) => &line.name,
            Key::Bar(_, series) => &series.name,
        }
    }

    fn width(&self) -> f64 {
        SAMPLE + 6.0 + theme::width(self.name()) + BEHIND
    }

    fn sample(&self, area: &Area<'_>, (x, y): (f64, f64)) -> Drawn {
        match self {
            Key::Line(line) => line.sample(area, (x, y), SAMPLE),
            Key::Bar(place, series) => {
                let corners = [(fine(x), fine(y - 4.5)), (fine(x + SAMPLE), fine(y + 4.5))];
                theme::bar(area, series.colour, *place, corners)
            }
        }
    }
}

fn draw_keys(area: &Area<'_>, keys: &[Key<'_>], y: f64) -> Drawn {
    let mut x = MARGIN;
    for key in keys {
        key.sample(area, (x, y))?;
        text(area, key.name(), (x + SAMPLE + 6.0, y), false)?;
        x += key.width();
    }
    Ok(())
}

fn draw_panel(area: &Area<'_>, panel: &Panel, rows: &[String], head: f64) -> Drawn {
    for (n, words) in rows.iter().enumerate() {
        text(area, words, (8.0, (n as f64 + 0.5) * ROW), true)?;
    }
    match panel {
        Panel::Lines(lines) => lines.draw(area, head),
        Panel::Bars(bars) => bars.draw(area, head),
        Panel::Heat(heat) => heat.draw(area, head),
    }
}

/// A row of words that begins at a point and has it at half its height.
fn text(area: &Area<'_>, words: &str, (x, y): (f64, f64), bold: bool) -> Drawn {
    let style = theme::words(bold, HPos::Left, VPos::Center);
    area.draw(&Text::new(words.to_string(), (fine(x), fine(y)), style))
}

/// The document with its size in pixels, a name for screen readers, and the theme's style.
fn document(svg: &str, (width, height): (f64, f64), title: &str) -> String {
    let body = svg.split_once('\n').map_or("", |(_, body)| body);
    let escaped = title.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {} {}\" \
         role=\"img\">\n<title>{escaped}</title>\n<style>\n{}</style>\n{body}",
        fine(width),
        fine(height),
        theme::style()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element is closed, in order.
    fn assert_well_formed(svg: &str) {
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
        serde_json::from_str(
            r#"{"title": "all \"of\" it", "columns": 2, "notes": ["word word word"], "panels": [
                {"kind": "lines", "title": "a < b",
                 "x": {"label": "size", "low": 1, "high": 100, "log": true},
                 "y": {"label": "time", "low": 0, "high": 4000, "unit": "us"},
                 "lines": [
                    {"name": "one & two", "colour": 0, "points": [[1, 1], [10, 9e99], [100, 5]]},
                    {"name": "three", "colour": 9, "look": "dashed", "points": [[2, 100]]}],
                 "markers": [{"x": 10, "words": "yours"}]},
                {"kind": "heat", "title": "heat", "x_label": "loss", "y_label": "size",
                 "columns": ["1", "2"], "rows": ["low", "high"],
                 "values": [[0.5, null], [9, 1]]},
                {"kind": "bars", "title": "bars", "x": {"low": 0, "high": 4, "unit": "ms"},
                 "rows": ["first", "second"], "series": [
                    {"name": "three", "colour": 2, "values": [1, 99]},
                    {"name": "four", "colour": 3, "values": [null]}]}
            ]}"#,
        )
        .unwrap()
    }

    /// What stands in the document's texts.
    fn words(svg: &str) -> Vec<&str> {
        let texts = svg.split("<text").skip(1).filter_map(|text| text.split_once('>'));
        texts.filter_map(|(_, text)| Some(text.split_once('<')?.0.trim())).collect()
    }

    #[test]
    fn figures_are_documents() {
        let svg = figure().svg().unwrap();
        assert_well_formed(&svg);
        let words = words(&svg);
        for part in ["a &lt; b", "one &amp; two", "yours", "heat", "0.5", "time (ms)", "99 ms"] {
            assert!(words.contains(&part), "{part}: {words:?}");
        }
        let times = |name| words.iter().filter(|word| **word == name).count();
        assert_eq!((times("three"), times("four")), (1, 1), "each name is in the legend once");
        assert_eq!(svg.matches("<rect").count(), 3 + 2, "fields and bars");
        assert_well_formed(&Figure::default().svg().unwrap());
    }

    /// The first of two rows is at the bottom of a heat map, and at the top of bars.
    #[test]
    fn rows_are_in_order() {
        let svg = figure().svg().unwrap();
        let y_of = |name: &str| -> i32 {
            let end = svg.find(&format!(">\n{name}\n<")).expect(name);
            let tag = &svg[svg[..end].rfind("<text").unwrap()..end];
            tag.split(" y=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        };
        assert!(y_of("low") > y_of("high") && y_of("first") < y_of("second"));
    }

    /// A logarithmic axis has no 0 from which a bar could be long: its values are points.
    #[test]
    fn a_logarithmic_axis_has_no_bars() {
        let mut figure = figure();
        figure.panels.drain(..2);
        let drawn = |figure: &Figure| figure.svg().unwrap().matches("<rect").count();
        let with_bars = drawn(&figure);
        let Panel::Bars(bars) = &mut figure.panels[0] else { unreachable!() };
        bars.x = Axis::log("", 1.0, 100.0, Unit::Ms);
        assert!(drawn(&figure) < with_bars, "points in the place of bars");
        assert!(words(&figure.svg().unwrap()).contains(&"99 ms"));
    }

    #[test]
    fn a_figure_can_be_kept() {
        let kept = serde_json::to_string(&figure()).unwrap();
        let again: Figure = serde_json::from_str(&kept).unwrap();
        assert_eq!(again.svg().unwrap(), figure().svg().unwrap());
    }

    /// A title that is wider than the picture gets a second row, and its panel another head.
    #[test]
    fn titles_are_never_cut() {
        let long = "word ".repeat(40);
        let mut figure = figure();
        figure.columns = 1;
        figure.title = long.clone();
        let Panel::Lines(lines) = &mut figure.panels[0] else { unreachable!() };
        lines.title = long.clone();
        let svg = figure.svg().unwrap();
        let room = ALONE / theme::width("w");
        let rows: Vec<&str> = words(&svg).into_iter().filter(|w| w.starts_with("word")).collect();
        assert!(rows.len() > 6 && rows.iter().all(|row| (row.len() as f64) < room), "{rows:?}");
    }
}
