//! What all panels have: axes with ticks and labels around an area, and a grid in it.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use crate::axis::Scale;
use crate::theme::{self, fine, Area, DrawError, FINE, RULE};

/// Room at the right of each panel, so that the last tick's words are not cut.
const RIGHT: f64 = 24.0;
/// Room for ticks and label of the axis below.
pub const BELOW: f64 = 44.0;
/// Room for the label of the axis on the left, and between ticks and frame.
const LABEL: f64 = 18.0;
const TICK: f64 = 8.0;

/// Which lines run through the area.
#[derive(Clone, Copy, PartialEq)]
pub enum Grid {
    Both,
    /// Only upright ones, and some room at their right.
    Upright {
        right: f64,
    },
    None,
}

/// The room on the left of the area: ticks and label.
pub fn left(y: &Scale) -> f64 {
    let label = if y.label.is_empty() { 0.0 } else { LABEL };
    y.widest() + TICK + label + 4.0
}

/// What is left of a panel's width and height, the room on the left not yet taken.
pub fn inner(area: &Area<'_>, head: f64) -> (f64, f64) {
    let (width, height) = area.dim_in_pixel();
    (f64::from(width) / FINE - RIGHT, f64::from(height) / FINE - head - BELOW)
}

/// Where a point of an inner area is in the outer one. (plotters moves what lies outside of an area
/// to its edge, so what may reach over it is drawn in the outer one.)
pub fn outward(outer: &Area<'_>, inner: &Area<'_>, (x, y): (i32, i32)) -> (i32, i32) {
    let (from, to) = (inner.get_base_pixel(), outer.get_base_pixel());
    (x + from.0 - to.0, y + from.1 - to.1)
}

/// Draws axes and grid; the area within.
pub fn draw<'a>(
    area: &Area<'a>,
    x: &Scale,
    y: &Scale,
    head: f64,
    grid: Grid,
) -> Result<Area<'a>, DrawError> {
    let more = if let Grid::Upright { right } = grid { right } else { 0.0 };
    let mut chart = ChartBuilder::on(area)
        .margin_top(fine(head))
        .margin_right(fine(RIGHT + more))
        .x_label_area_size(fine(BELOW))
        .y_label_area_size(fine(left(y)))
        .build_cartesian_2d(x.clone(), y.clone())?;
    let label = theme::words(false, HPos::Center, VPos::Center);
    let mut mesh = chart.configure_mesh();
    mesh.axis_style(theme::stroke(RULE, 1.0))
        .bold_line_style(RULE.mix(0.25).stroke_width(FINE as u32))
        .light_line_style(TRANSPARENT)
        .label_style(label.clone())
        .axis_desc_style(label)
        .set_all_tick_mark_size(fine(TICK / 2.0))
        .x_desc(x.label.clone())
        .y_desc(y.label.clone());
    if grid != Grid::Both {
        mesh.disable_y_mesh();
    }
    if grid == Grid::None {
        mesh.disable_x_mesh();
    }
    mesh.draw()?;
    Ok(chart.plotting_area().strip_coord_spec())
}
