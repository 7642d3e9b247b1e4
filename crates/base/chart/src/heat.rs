//! Tables in colours: red above 1, blue below, the stronger the further away.

use plotters::prelude::*;
use serde::{Deserialize, Serialize};

use crate::axis::Scale;
use crate::frame;
use crate::theme::{self, Area, Drawn};

/// The ratio whose colour is the strongest.
const STRONGEST: f64 = 8.0;

/// A table of ratios.
#[derive(Clone, Debug, Deserialize, Serialize)]
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
    /// The ratios, row by row; where there is none the field stays empty.
    pub values: Vec<Vec<Option<f64>>>,
}

impl Heat {
    pub(crate) fn draw(&self, area: &Area<'_>, head: f64) -> Drawn {
        let y = Scale::of_names(&self.y_label, &self.rows);
        let width = frame::inner(area, head).0 - frame::left(&y);
        let x = Scale::of_names(&self.x_label, &self.columns).thinned(width);
        let inside = frame::draw(area, &x, &y, head, frame::Grid::None)?;
        let (width, height) = inside.dim_in_pixel();
        let along = |n: usize, of: usize, length: u32| {
            (n as f64 / of.max(1) as f64 * f64::from(length)).round() as i32
        };
        let across = |c| along(c, self.columns.len(), width);
        let up = |r| height as i32 - along(r, self.rows.len(), height);
        // Three signs and some room.
        let words = theme::on_field(f64::from(across(1)) / theme::FINE / 2.1);
        for (r, values) in self.values.iter().enumerate().take(self.rows.len()) {
            for (c, value) in values.iter().enumerate().take(self.columns.len()) {
                let Some(value) = value else { continue };
                // One over the next, so that no ground is seen between them.
                let corners = [(across(c), up(r + 1)), (across(c + 1) + 1, up(r) + 1)];
                inside.draw(&Rectangle::new(corners, colour(*value).filled()))?;
                let middle = ((corners[0].0 + corners[1].0) / 2, (corners[0].1 + corners[1].1) / 2);
                inside.draw(&Text::new(short(*value), middle, words.clone()))?;
            }
        }
        Ok(())
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
fn colour(ratio: f64) -> RGBColor {
    let share = (ratio.max(1e-9).ln() / STRONGEST.ln()).clamp(-1.0, 1.0);
    let (strong, mix) =
        if share >= 0.0 { ([0xd7, 0x30, 0x27], share) } else { ([0x45, 0x75, 0xb4], -share) };
    let of = |strong: u8| (255.0 + (f64::from(strong) - 255.0) * mix).round() as u8;
    RGBColor(of(strong[0]), of(strong[1]), of(strong[2]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_tell_better_from_worse() {
        let (white, red, blue) =
            (RGBColor(255, 255, 255), RGBColor(0xd7, 0x30, 0x27), RGBColor(0x45, 0x75, 0xb4));
        assert_eq!([1.0, 8.0, 100.0, 0.125, 0.0].map(colour), [white, red, red, blue, blue]);
        assert_eq!([1.04, 9.96, 0.83].map(short), ["1.0", "10", "0.8"]);
    }
}
