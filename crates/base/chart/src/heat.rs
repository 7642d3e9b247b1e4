//! Tables in colours: red above 1, blue below, the stronger the further away.

use std::fmt::Write;

use crate::{text, Frame, LETTER_WIDTH};

const LEFT: f64 = 78.0;
const RIGHT: f64 = 8.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 48.0;
/// The ratio whose colour is the strongest.
const STRONGEST: f64 = 8.0;

/// A table of ratios.
#[derive(Clone, Debug)]
pub struct Heat {
    /// What it shows.
    pub title: String,
    /// What the columns are.
    pub x_label: String,
    /// What the rows are.
    pub y_label: String,
    /// The columns' names, from the left.
    pub columns: Vec<String>,
    /// The rows' names, from the bottom.
    pub rows: Vec<String>,
    /// The ratios, row by row; where there is no number the cell stays empty.
    pub values: Vec<Vec<f64>>,
}

impl Heat {
    pub(crate) fn draw(&self, svg: &mut String, room: Frame) {
        let frame = Frame {
            left: room.left + LEFT,
            top: room.top + TOP,
            width: room.width - LEFT - RIGHT,
            height: room.height - TOP - BOTTOM,
        };
        let (width, height) = (
            frame.width / self.columns.len().max(1) as f64,
            frame.height / self.rows.len().max(1) as f64,
        );
        text(svg, "head", frame.left, room.top + 12.0, "start", &self.title);
        for (r, (name, values)) in self.rows.iter().zip(&self.values).enumerate() {
            let y = frame.bottom() - (r + 1) as f64 * height;
            text(svg, "", frame.left - 6.0, y + height / 2.0 + 4.0, "end", name);
            for (c, value) in values.iter().enumerate().take(self.columns.len()) {
                if !value.is_finite() {
                    continue;
                }
                let x = frame.left + c as f64 * width;
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{}\"/>",
                    colour(*value)
                );
                text(
                    svg,
                    "cell",
                    x + width / 2.0,
                    y + height / 2.0 + 4.0,
                    "middle",
                    &short(*value),
                );
            }
        }
        // A name that would touch the one before is left out.
        let mut taken = f64::NEG_INFINITY;
        for (c, name) in self.columns.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            let (x, half) = (
                frame.left + (c as f64 + 0.5) * width,
                name.chars().count() as f64 * LETTER_WIDTH / 2.0,
            );
            if x - half > taken + 4.0 {
                text(svg, "", x, frame.bottom() + 16.0, "middle", name);
                taken = x + half;
            }
        }
        text(
            svg,
            "",
            frame.left + frame.width / 2.0,
            frame.bottom() + 34.0,
            "middle",
            &self.x_label,
        );
        let _ = writeln!(
            svg,
            "<text transform=\"translate({:.1} {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            room.left + 11.0,
            frame.top + frame.height / 2.0,
            crate::escaped(&self.y_label)
        );
        let Frame { left, top, width, .. } = frame;
        let (bottom, right) = (frame.bottom(), frame.right());
        let _ = writeln!(
            svg,
            "<path class=\"axis\" d=\"M{left:.1} {top:.1}h{width:.1}V{bottom:.1}H{left:.1}V{top:.1}H{right:.1}\"/>"
        );
    }
}

/// Two digits that count.
fn short(value: f64) -> String {
    if value >= 9.95 {
        format!("{value:.0}")
    } else {
        format!("{value:.1}")
    }
}

/// From blue over white to red.
fn colour(ratio: f64) -> String {
    let share = (ratio.max(1e-9).ln() / STRONGEST.ln()).clamp(-1.0, 1.0);
    let (strong, mix) =
        if share >= 0.0 { ([0xd7, 0x30, 0x27], share) } else { ([0x45, 0x75, 0xb4], -share) };
    let of = |strong: u8| (255.0 + (f64::from(strong) - 255.0) * mix).round() as u8;
    format!("#{:02x}{:02x}{:02x}", of(strong[0]), of(strong[1]), of(strong[2]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_tell_better_from_worse() {
        assert_eq!(
            [1.0, 8.0, 100.0, 0.125, 0.0].map(colour),
            ["#ffffff", "#d73027", "#d73027", "#4575b4", "#4575b4"]
        );
        assert_eq!([1.04, 9.96, 0.83].map(short), ["1.0", "10", "0.8"]);
    }

    #[test]
    fn names_do_not_touch_each_other() {
        let heat = Heat {
            title: String::new(),
            x_label: String::new(),
            y_label: String::new(),
            columns: ["first", "second", "", "third"].map(String::from).into(),
            rows: Vec::new(),
            values: Vec::new(),
        };
        let mut svg = String::new();
        heat.draw(&mut svg, Frame { left: 0.0, top: 0.0, width: 206.0, height: 272.0 });
        assert!(
            svg.contains(">first<") && !svg.contains(">second<") && svg.contains(">third<"),
            "{svg}"
        );
    }

    #[test]
    fn the_first_row_is_at_the_bottom() {
        let heat = Heat {
            title: "t".into(),
            x_label: "x".into(),
            y_label: "y".into(),
            columns: vec!["1".into(), "2".into()],
            rows: vec!["low".into(), "high".into()],
            values: vec![vec![1.0, f64::INFINITY], vec![2.0, 4.0]],
        };
        let mut svg = String::new();
        heat.draw(&mut svg, Frame { left: 0.0, top: 0.0, width: 286.0, height: 272.0 });
        assert_eq!(svg.matches("<rect").count(), 3, "{svg}");
        assert!(
            svg.contains(
                "x=\"78.0\" y=\"124.0\" width=\"100.0\" height=\"100.0\" fill=\"#ffffff\""
            ),
            "{svg}"
        );
        assert!(svg.contains(">2.0</text>") && svg.contains(">4.0</text>"));
    }
}
