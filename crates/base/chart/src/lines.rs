//! Panels of lines over two axes.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};
use serde::{Deserialize, Serialize};

use crate::axis::{self, Axis, Scale};
use crate::dashes::dashes;
use crate::frame;
use crate::theme::{self, fine, Area, Drawn, COLOURS, GAP, ROW};

/// How a line looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Look {
    /// Drawn through.
    #[default]
    Solid,
    /// In dashes.
    Dashed,
    /// In dots.
    Dotted,
    /// Only its points.
    Marks,
}

/// A line, or a number of points.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Line {
    /// What the legend says; without a name it is not there.
    pub name: String,
    /// One of [`COLOURS`].
    pub colour: usize,
    /// How it looks.
    #[serde(default)]
    pub look: Look,
    /// Where it leads; what is no number is a gap.
    pub points: Vec<(f64, f64)>,
}

/// Room for a row of markers' words.
const MARKER_ROW: f64 = 0.8 * ROW;
/// Points that are nearer, in parts of the frame, lie on each other.
const HIDDEN: f64 = 0.005;
/// Marks on a line that has more points than that.
const MARKS: usize = 8;

impl Line {
    /// A solid line in one of [`COLOURS`] colours.
    pub fn new(name: &str, colour: usize, points: Vec<(f64, f64)>) -> Line {
        Line { name: name.into(), colour: colour % COLOURS, look: Look::Solid, points }
    }

    /// This line with another look.
    pub fn looking(mut self, look: Look) -> Line {
        self.look = look;
        self
    }

    /// A piece of it, for the legend.
    pub(crate) fn sample(&self, area: &Area<'_>, (x, y): (f64, f64), length: f64) -> Drawn {
        let ends = vec![(fine(x), fine(y)), (fine(x + length), fine(y))];
        self.path(area, ends)?;
        theme::mark(area, self.colour, (fine(x + length / 2.0), fine(y)))
    }

    fn path(&self, area: &Area<'_>, path: Vec<(i32, i32)>) -> Drawn {
        let style = theme::stroke(theme::colour(self.colour), 2.0);
        let broken = |dash: f64, gap: f64| {
            let mut pieces = dashes(&path, fine(dash), fine(gap)).into_iter();
            pieces.try_for_each(|piece| area.draw(&PathElement::new(piece, style)))
        };
        match self.look {
            Look::Solid => area.draw(&PathElement::new(path, style)),
            Look::Dashed => broken(6.0, 4.0),
            Look::Dotted => broken(2.0, 3.0),
            Look::Marks => Ok(()),
        }
    }

    /// Draws it; what lies outside of the frame is cut off, but marks on its edge are whole.
    fn draw(&self, area: &Area<'_>, inside: &Area<'_>, x: &Scale, y: &Scale) -> Drawn {
        let (width, height) = inside.dim_in_pixel();
        let at = |(right, up): (f64, f64)| {
            let of = |share: f64, length: u32| (share * f64::from(length)).round() as i32;
            (of(right, width), of(1.0 - up, height))
        };
        let shares: Vec<(f64, f64)> =
            self.points.iter().map(|(a, b)| (x.share(*a), y.share(*b))).collect();
        for path in within(&shares) {
            self.path(inside, path.into_iter().map(at).collect())?;
        }
        let all = self.look == Look::Marks || shares.len() <= 2 * MARKS;
        let every = if all { 1 } else { shares.len() / MARKS };
        // Lines that lie on each other have their marks beside each other.
        let first = self.colour * every / COLOURS;
        let seen = shares.into_iter().skip(first).step_by(every);
        let is_seen = |share: f64| (-0.001..=1.001).contains(&share);
        seen.filter(|(a, b)| is_seen(*a) && is_seen(*b))
            .map(|point| frame::outward(area, inside, at(point)))
            .try_for_each(|point| theme::mark(area, self.colour, point))
    }
}

/// The pieces of a line that lie in the unit square.
fn within(points: &[(f64, f64)]) -> Vec<Vec<(f64, f64)>> {
    let mut pieces: Vec<Vec<(f64, f64)>> = Vec::new();
    for pair in points.windows(2) {
        let Some((from, to)) = cut(pair[0], pair[1]) else { continue };
        match pieces.last_mut() {
            Some(piece) if piece.last() == Some(&from) => piece.push(to),
            _ => pieces.push(vec![from, to]),
        }
    }
    pieces
}

/// What is left of a stretch in the unit square (after Liang and Barsky).
fn cut(from: (f64, f64), to: (f64, f64)) -> Option<((f64, f64), (f64, f64))> {
    let far = |share: f64| share.clamp(-1e6, 1e6);
    if [from.0, from.1, to.0, to.1].iter().any(|share| share.is_nan()) {
        return None;
    }
    let (from, to) = ((far(from.0), far(from.1)), (far(to.0), far(to.1)));
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let (mut enters, mut leaves) = (0.0_f64, 1.0_f64);
    for (runs, room) in [(-dx, from.0), (dx, 1.0 - from.0), (-dy, from.1), (dy, 1.0 - from.1)] {
        match runs {
            0.0 if room < 0.0 => return None,
            0.0 => {}
            r if r < 0.0 => enters = enters.max(room / r),
            r => leaves = leaves.min(room / r),
        }
    }
    let at = |t: f64| match t {
        0.0 => from,
        1.0 => to,
        _ => (from.0 + t * dx, from.1 + t * dy),
    };
    (enters <= leaves).then(|| (at(enters), at(leaves)))
}

/// A place on the x axis that is to be seen.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Marker {
    /// Where.
    pub x: f64,
    /// What it is.
    pub words: String,
}

/// A panel of lines.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Lines {
    /// What it shows.
    pub title: String,
    /// The axis below.
    pub x: Axis,
    /// The axis on the left.
    pub y: Axis,
    /// What is drawn; the last lie on top.
    pub lines: Vec<Line>,
    /// Vertical lines.
    #[serde(default)]
    pub markers: Vec<Marker>,
}

impl Lines {
    pub(crate) fn draw(&self, area: &Area<'_>, head: f64) -> Drawn {
        let size = frame::inner(area, head);
        let y = axis::scale(&self.y, |scale| scale.fits_beside(size.1 - ROW));
        let width = size.0 - frame::left(&y);
        let x = axis::scale(&self.x, |scale| scale.fits_below(width));
        let words: Vec<(f64, usize)> = self.marker_rows(&x, width).collect();
        let rows = words.iter().map(|(_, row)| row + 1).max().unwrap_or(0);
        let head = head + MARKER_ROW * rows as f64;
        let inside = frame::draw(area, &x, &y, head, frame::Grid::Both)?;
        self.draw_markers(area, &inside, &x, &words)?;
        self.lines.iter().enumerate().try_for_each(|(place, line)| {
            let hides = line.look == Look::Solid && self.hides_another(place, &x, &y);
            let look = if hides { Look::Dashed } else { line.look };
            line.clone().looking(look).draw(area, &inside, &x, &y)
        })
    }

    /// Whether a line lies on one that is drawn before it, so that nobody would see that one.
    fn hides_another(&self, place: usize, x: &Scale, y: &Scale) -> bool {
        let near = |a: f64, b: f64| (a.is_nan() && b.is_nan()) || (a - b).abs() < HIDDEN;
        let line = &self.lines[place];
        let lies_on = |other: &&Line| {
            let mut pairs = line.points.iter().zip(&other.points);
            line.points.len() == other.points.len()
                && pairs.all(|(a, b)| {
                    near(x.share(a.0), x.share(b.0)) && near(y.share(a.1), y.share(b.1))
                })
        };
        self.lines[..place].iter().any(|other| lies_on(&other))
    }

    /// Upright lines in the frame, and their words above it.
    fn draw_markers(
        &self,
        area: &Area<'_>,
        inside: &Area<'_>,
        x: &Scale,
        words: &[(f64, usize)],
    ) -> Drawn {
        let (width, height) = inside.dim_in_pixel();
        for (marker, (at, row)) in self.markers.iter().zip(words) {
            let right = (x.share(marker.x) * f64::from(width)).round() as i32;
            let line = vec![(right, 0), (right, height as i32)];
            let style = theme::stroke(theme::colour(5), 1.0);
            for piece in dashes(&line, fine(4.0), fine(3.0)) {
                inside.draw(&PathElement::new(piece, style))?;
            }
            let up = fine(6.0 + MARKER_ROW * *row as f64);
            let place = frame::outward(area, inside, (fine(*at), -up));
            let style = theme::words(false, HPos::Center, VPos::Bottom);
            area.draw(&Text::new(marker.words.clone(), place, style))?;
        }
        Ok(())
    }

    /// Where the words of each marker are, and in which row above the frame.
    fn marker_rows<'a>(
        &'a self,
        x: &'a Scale,
        length: f64,
    ) -> impl Iterator<Item = (f64, usize)> + 'a {
        let mut taken: Vec<(f64, f64, usize)> = Vec::new();
        self.markers.iter().map(move |marker| {
            let half = theme::width(&marker.words) / 2.0;
            let right = (x.share(marker.x) * length).clamp(half, (length - half).max(half));
            let (from, to) = (right - half - GAP, right + half + GAP);
            let touches =
                |row: usize| taken.iter().any(|(a, b, of)| *of == row && *a < to && *b > from);
            let row = (0..).find(|row| !touches(*row)).unwrap_or(0);
            taken.push((from, to, row));
            (right, row)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_at_the_frame() {
        let square = [(0.0, 0.0), (0.5, 1.0), (0.5, f64::NAN), (1.0, 1.0)];
        assert_eq!(within(&square), [[(0.0, 0.0), (0.5, 1.0)]]);
        assert_eq!(within(&[(-1.0, 0.5), (2.0, 0.5)]), [[(0.0, 0.5), (1.0, 0.5)]]);
        assert_eq!(within(&[(0.5, 0.5), (0.5, 1e300)])[0][1], (0.5, 1.0));
        assert!(within(&[(0.0, 1.5), (1.0, 1.5)]).is_empty(), "above");
        // It leaves and comes back: two pieces.
        assert_eq!(within(&[(0.0, 0.5), (0.25, 2.0), (0.5, 0.5)]).len(), 2);
    }

    #[test]
    fn words_of_markers_do_not_touch() {
        let marker = |x, words: &str| Marker { x, words: words.into() };
        let lines = Lines {
            title: String::new(),
            x: Axis::linear("", 0.0, 10.0, crate::axis::Unit::Plain),
            y: Axis::default(),
            lines: Vec::new(),
            markers: vec![marker(5.0, "healed"), marker(5.5, "back"), marker(9.9, "the very end")],
        };
        let x = axis::scale(&lines.x, |_| true);
        let places: Vec<(f64, usize)> = lines.marker_rows(&x, 300.0).collect();
        assert_eq!([places[0].1, places[1].1, places[2].1], [0, 1, 0]);
        assert!(places[2].0 + theme::width("the very end") / 2.0 <= 300.0, "not clipped");
    }

    #[test]
    fn a_line_that_lies_on_another_is_dashed() {
        let line = |colour, high: f64| Line::new("x", colour, vec![(0.0, high), (1.0, f64::NAN)]);
        let axis = || Axis::linear("", 0.0, 1.0, crate::axis::Unit::Plain);
        let lines = Lines {
            title: String::new(),
            x: axis(),
            y: axis(),
            lines: vec![line(0, 0.5), line(1, 0.9), line(2, 0.501)],
            markers: Vec::new(),
        };
        let (x, y) = (axis::scale(&lines.x, |_| true), axis::scale(&lines.y, |_| true));
        assert_eq!([0, 1, 2].map(|place| lines.hides_another(place, &x, &y)), [false, false, true]);
    }
}
