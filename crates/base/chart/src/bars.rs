//! Panels of bars: a row of them for each thing, from the left; dots on a logarithmic axis.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};
use serde::{Deserialize, Serialize};

use crate::axis::{self, Axis, Scale};
use crate::frame;
use crate::theme::{self, fine, Area, Drawn};

/// Share of a row's height that stays free.
const FREE: f64 = 0.25;
/// Room behind the longest bar for its figure.
const FIGURE: f64 = 72.0;

/// Bars of one kind, which the legend names.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Series {
    /// What the legend says.
    pub name: String,
    /// One of [`COLOURS`](crate::COLOURS).
    pub colour: usize,
    /// A figure for each row; what is none has no bar.
    pub values: Vec<Option<f64>>,
}

impl Series {
    /// Bars of one kind; what is no number has none.
    pub fn new(name: &str, colour: usize, values: Vec<f64>) -> Series {
        let values = values.into_iter().map(|value| value.is_finite().then_some(value)).collect();
        Series { name: name.into(), colour, values }
    }
}

/// A panel of bars.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Bars {
    /// What it shows.
    pub title: String,
    /// The axis below; figures behind bars have its unit.
    pub x: Axis,
    /// The rows' names, from the top.
    pub rows: Vec<String>,
    /// The bars of each row, one below the other.
    pub series: Vec<Series>,
}

impl Bars {
    /// The height that all bars need to have a row of words each.
    pub(crate) fn height(&self, head: f64) -> f64 {
        let bars = (self.rows.len() * self.series.len()) as f64;
        head + bars * (theme::LETTER + 3.0) / (1.0 - FREE) + frame::BELOW
    }

    pub(crate) fn draw(&self, area: &Area<'_>, head: f64) -> Drawn {
        let names: Vec<String> = self.rows.iter().rev().cloned().collect();
        let y = Scale::of_names("", &names);
        let width = frame::inner(area, head).0 - frame::left(&y) - FIGURE;
        let x = axis::scale(&self.x, |scale| scale.fits_below(width));
        let inside = frame::draw(area, &x, &y, head, frame::Grid::Upright { right: FIGURE })?;
        let (width, height) = inside.dim_in_pixel();
        let row = f64::from(height) / self.rows.len().max(1) as f64;
        let thick = row * (1.0 - FREE) / self.series.len().max(1) as f64;
        for (place, series) in self.series.iter().enumerate() {
            for (n, value) in series.values.iter().enumerate().take(self.rows.len()) {
                let Some(value) = value else { continue };
                let top = n as f64 * row + row * FREE / 2.0 + place as f64 * thick;
                let end = x.share(*value).clamp(0.0, 1.0) * f64::from(width);
                let bottom = top + thick * 0.86;
                let corners =
                    [(0, top.round() as i32), (end.round() as i32, bottom.round() as i32)];
                let middle = ((top + bottom) / 2.0).round() as i32;
                let free = match self.x.log {
                    false => {
                        theme::bar(&inside, series.colour, place, corners)?;
                        5.0
                    }
                    // where there is no 0, the length of a bar says nothing
                    true => {
                        theme::mark(&inside, series.colour, (end.round() as i32, middle))?;
                        9.0
                    }
                };
                let words = theme::words(false, HPos::Left, VPos::Center);
                let at = (end.round() as i32 + fine(free), middle);
                inside.draw(&Text::new(self.x.unit.write(*value), at, words))?;
            }
        }
        Ok(())
    }
}
