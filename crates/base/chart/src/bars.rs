//! Panels of bars: a row of them for each thing, from the left.

use std::fmt::Write;

use crate::{text, Axis, Frame, COLOURS, LETTER_WIDTH};

const RIGHT: f64 = 14.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 48.0;
/// Share of a row's height that stays free.
const FREE: f64 = 0.25;
/// The largest share of the panel that names take.
const NAMES: f64 = 0.5;

/// Bars of one kind, which the legend names.
#[derive(Clone, Debug)]
pub struct Series {
    /// What the legend says.
    pub name: String,
    /// One of [`COLOURS`].
    pub colour: usize,
    /// A figure for each row; what is no number has no bar.
    pub values: Vec<f64>,
}

impl Series {
    /// A piece of it, for the legend.
    pub(crate) fn sample(&self, x: f64, y: f64) -> String {
        format!(
            "<rect class=\"f{}\" x=\"{x:.1}\" y=\"{:.1}\" width=\"26.0\" height=\"8.0\"/>\n",
            self.colour % COLOURS,
            y - 4.0
        )
    }
}

/// A panel of bars.
#[derive(Clone, Debug)]
pub struct Bars {
    /// What it shows.
    pub title: String,
    /// The axis below.
    pub x: Axis,
    /// The rows' names, from the top.
    pub rows: Vec<String>,
    /// The bars of each row, one below the other.
    pub series: Vec<Series>,
    /// How a figure is written behind its bar.
    pub write: fn(f64) -> String,
}

impl Bars {
    pub(crate) fn draw(&self, svg: &mut String, room: Frame) {
        let longest = self.rows.iter().map(|row| row.chars().count()).max().unwrap_or(0) as f64
            * LETTER_WIDTH
            + 14.0;
        let left = longest.min(room.width * NAMES);
        let frame = Frame {
            left: room.left + left,
            top: room.top + TOP,
            width: room.width - left - RIGHT,
            height: room.height - TOP - BOTTOM,
        };
        text(svg, "head", room.left + 8.0, room.top + 12.0, "start", &self.title);
        for (share, words) in self.x.ticks() {
            let x = frame.left + share * frame.width;
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{x:.1} {:.1}v{:.1}\"/>",
                frame.top, frame.height
            );
            text(svg, "", x, frame.bottom() + 16.0, "middle", &words);
        }
        text(
            svg,
            "",
            frame.left + frame.width / 2.0,
            frame.bottom() + 34.0,
            "middle",
            self.x.label(),
        );
        let height = frame.height / self.rows.len().max(1) as f64;
        let bar = height * (1.0 - FREE) / self.series.len().max(1) as f64;
        for (n, row) in self.rows.iter().enumerate() {
            let top = frame.top + n as f64 * height;
            text(svg, "", frame.left - 6.0, top + height / 2.0 + 4.0, "end", row);
            for (k, series) in self.series.iter().enumerate() {
                let y = top + height * FREE / 2.0 + k as f64 * bar;
                if let Some(value) = series.values.get(n).filter(|v| v.is_finite()) {
                    self.draw_bar(svg, frame, (y, bar), series.colour, *value);
                }
            }
        }
        let Frame { left, top, width, height } = frame;
        let _ = writeln!(
            svg,
            "<path class=\"axis\" d=\"M{left:.1} {top:.1}v{height:.1}h{width:.1}\"/>"
        );
    }

    fn draw_bar(
        &self,
        svg: &mut String,
        frame: Frame,
        (y, height): (f64, f64),
        colour: usize,
        value: f64,
    ) {
        let width = self.x.place(value).clamp(0.0, 1.0) * frame.width;
        let _ = writeln!(
            svg,
            "<rect class=\"f{}\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\"/>",
            colour % COLOURS,
            frame.left,
            height * 0.9
        );
        let words = (self.write)(value);
        // Behind the bar, or where there is no room for that, on its end.
        let room = frame.width - width > LETTER_WIDTH * words.chars().count() as f64 + 8.0;
        let (x, anchor, class) =
            if room { (width + 4.0, "start", "") } else { (width - 4.0, "end", "head") };
        text(svg, class, frame.left + x, y + height / 2.0 + 4.0, anchor, &words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plain;

    #[test]
    fn bars_are_as_long_as_the_axis_says() {
        let bars = Bars {
            title: "t".into(),
            x: Axis::linear("ns", 0.0, 100.0, plain),
            rows: vec!["a".into(), "b & c".into()],
            series: vec![
                Series { name: "one".into(), colour: 1, values: vec![50.0, f64::NAN] },
                Series { name: "two".into(), colour: 9, values: vec![1e9] },
            ],
            write: plain,
        };
        let mut svg = String::new();
        // Names of five letters take 49 of the width.
        bars.draw(&mut svg, Frame { left: 0.0, top: 0.0, width: 263.0, height: 272.0 });
        assert_eq!(
            svg.matches("<rect").count(),
            2,
            "what is no number, and what is not there, has no bar: {svg}"
        );
        assert!(svg.contains("class=\"f1\" x=\"49.0\" y=\"36.5\" width=\"100.0\""), "{svg}");
        assert!(
            svg.contains("class=\"f1\"") && svg.contains("width=\"200.0\""),
            "cut off at the axis' end: {svg}"
        );
        assert!(svg.contains("b &amp; c") && svg.contains(">50<"), "{svg}");
    }
}
