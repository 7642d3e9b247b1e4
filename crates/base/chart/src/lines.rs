//! Panels of lines over two axes.

use std::fmt::Write;

use crate::{text, Axis, Frame, COLOURS};

/// Room beside and below the axes.
const LEFT: f64 = 62.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 48.0;

/// How a line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Drawn through.
    Solid,
    /// In dashes.
    Dashed,
    /// In dots.
    Dotted,
    /// Only its points.
    Marks,
}

/// A line, or a number of points.
#[derive(Clone, Debug)]
pub struct Line {
    pub(crate) name: String,
    colour: usize,
    look: Look,
    points: Vec<(f64, f64)>,
}

impl Line {
    /// A solid line with a name for the legend (empty: none there), in one of [`COLOURS`] colours.
    pub fn new(name: &str, colour: usize, points: Vec<(f64, f64)>) -> Line {
        Line { name: name.into(), colour: colour % COLOURS, look: Look::Solid, points }
    }

    /// The same with another look.
    pub fn looking(mut self, look: Look) -> Line {
        self.look = look;
        self
    }

    fn class(&self) -> String {
        let look = match self.look {
            Look::Solid | Look::Marks => "",
            Look::Dashed => " dashed",
            Look::Dotted => " dotted",
        };
        format!("line s{}{look}", self.colour)
    }

    /// A piece of it, for the legend.
    pub(crate) fn sample(&self, x: f64, y: f64) -> String {
        match self.look {
            Look::Marks => mark(self.colour, x + 13.0, y),
            _ => format!("<path class=\"{}\" d=\"M{x:.1} {y:.1}h26\"/>\n", self.class()),
        }
    }
}

impl Line {
    /// Draws it; `place` says where a point lies.
    fn draw(&self, svg: &mut String, place: impl Fn((f64, f64)) -> (f64, f64)) {
        // Far outside is as good as outside, and short to write.
        let near = |place: f64| place.clamp(-1e4, 1e4);
        let places = self.points.iter().map(|point| {
            let (x, y) = place(*point);
            (!x.is_nan() && !y.is_nan()).then(|| (near(x), near(y)))
        });
        if self.look == Look::Marks {
            return places.flatten().for_each(|(x, y)| *svg += &mark(self.colour, x, y));
        }
        let mut path = String::new();
        let mut step = 'M';
        for place in places {
            match place {
                Some((x, y)) => {
                    let _ = write!(path, "{step}{x:.1} {y:.1}");
                    step = 'L';
                }
                None => step = 'M',
            }
        }
        let _ = writeln!(svg, "<path class=\"{}\" d=\"{path}\"/>", self.class());
    }
}

fn mark(colour: usize, x: f64, y: f64) -> String {
    format!("<circle class=\"f{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>\n")
}

/// A place on the x axis that is to be seen.
#[derive(Clone, Debug)]
pub struct Marker {
    /// Where.
    pub x: f64,
    /// What it is.
    pub words: String,
}

/// A panel of lines.
#[derive(Clone, Debug)]
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
    pub markers: Vec<Marker>,
}

impl Lines {
    /// Draws it; `number` tells it from the figure's other panels.
    pub(crate) fn draw(&self, svg: &mut String, room: Frame, number: usize) {
        let frame = Frame {
            left: room.left + LEFT,
            top: room.top + TOP,
            width: room.width - LEFT - RIGHT,
            height: room.height - TOP - BOTTOM,
        };
        let x = |share: f64| frame.left + share * frame.width;
        let y = |share: f64| frame.bottom() - share * frame.height;
        text(svg, "head", frame.left, room.top + 12.0, "start", &self.title);
        for (share, words) in self.y.ticks() {
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{:.1} {:.1}h{:.1}\"/>",
                frame.left,
                y(share),
                frame.width
            );
            text(svg, "", frame.left - 6.0, y(share) + 4.0, "end", &words);
        }
        for (share, words) in self.x.ticks() {
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{:.1} {:.1}v{:.1}\"/>",
                x(share),
                frame.top,
                frame.height
            );
            text(svg, "", x(share), frame.bottom() + 16.0, "middle", &words);
        }
        text(
            svg,
            "",
            frame.left + frame.width / 2.0,
            frame.bottom() + 34.0,
            "middle",
            self.x.label(),
        );
        let _ = writeln!(
            svg,
            "<text transform=\"translate({:.1} {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            room.left + 11.0,
            frame.top + frame.height / 2.0,
            crate::escaped(self.y.label())
        );
        let Frame { left, top, width, height } = frame;
        let _ = writeln!(
            svg,
            "<clipPath id=\"panel{number}\"><rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{:.1}\"/></clipPath>",
            top - 4.0,
            height + 8.0
        );
        let _ = writeln!(svg, "<g clip-path=\"url(#panel{number})\">");
        for (n, marker) in self.markers.iter().enumerate() {
            let at = x(self.x.place(marker.x));
            let _ = writeln!(svg, "<path class=\"marker\" d=\"M{at:.1} {top:.1}v{height:.1}\"/>");
            let (aside, anchor) =
                if at > left + width / 2.0 { (-5.0, "end") } else { (5.0, "start") };
            // One below the other, so that they do not touch.
            text(svg, "", at + aside, top + 12.0 + 14.0 * n as f64, anchor, &marker.words);
        }
        for line in &self.lines {
            line.draw(svg, |(a, b)| (x(self.x.place(a)), y(self.y.place(b))));
        }
        let _ = writeln!(
            svg,
            "</g>\n<path class=\"axis\" d=\"M{left:.1} {top:.1}v{height:.1}h{width:.1}\"/>"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plain;

    #[test]
    fn points_lie_where_the_axes_say() {
        let lines = Lines {
            title: "t".into(),
            x: Axis::linear("x", 0.0, 10.0, plain),
            y: Axis::linear("y", 0.0, 2.0, plain),
            lines: vec![
                Line::new("a", 0, vec![(0.0, 0.0), (10.0, 2.0)]),
                Line::new("b", 1, vec![(1.0, 1.0), (f64::NAN, 1.0), (2.0, 1e300)])
                    .looking(Look::Dashed),
            ],
            markers: vec![Marker { x: 5.0, words: "here".into() }],
        };
        let mut svg = String::new();
        lines.draw(&mut svg, Frame { left: 0.0, top: 0.0, width: 276.0, height: 272.0 }, 3);
        assert!(svg.contains("d=\"M62.0 224.0L262.0 24.0\""), "{svg}");
        assert!(
            svg.contains("class=\"line s1 dashed\" d=\"M82.0 124.0M102.0 -10000.0\""),
            "a gap, and cut off: {svg}"
        );
        assert!(svg.contains("M162.0 24.0v200.0") && svg.contains("url(#panel3)"), "{svg}");
    }
}
