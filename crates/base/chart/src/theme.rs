//! One look for all pictures: colours that read on light and dark ground, and dashes, marks and
//! fills beside them, so that a picture reads in black and white, too.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Units of the drawing in a pixel: plotters has whole coordinates, and curves should be smooth.
pub const FINE: f64 = 4.0;
/// The size of letters, in pixels.
pub const LETTER: f64 = 12.0;
/// A row of text.
pub const ROW: f64 = 19.0;
/// The least room between words that stand side by side.
pub const GAP: f64 = 8.0;

/// Colours that lines and bars can have.
pub const COLOURS: usize = 8;

/// Each as it is on light ground and on dark ground. Attributes of elements have the first; the
/// style of the document replaces it where the reader's ground is dark.
const LINES: [(RGBColor, &str); COLOURS] = [
    (RGBColor(0xcf, 0x22, 0x2e), "#ff7b72"),
    (RGBColor(0xbc, 0x4c, 0x00), "#ffa657"),
    (RGBColor(0x09, 0x69, 0xda), "#58a6ff"),
    (RGBColor(0x1a, 0x7f, 0x37), "#3fb950"),
    (RGBColor(0x82, 0x50, 0xdf), "#a371f7"),
    (RGBColor(0x57, 0x60, 0x6a), "#8b949e"),
    (RGBColor(0xbf, 0x39, 0x89), "#f778ba"),
    (RGBColor(0x9a, 0x67, 0x00), "#d29922"),
];
const INK: (RGBColor, &str) = (RGBColor(0x24, 0x29, 0x2f), "#e6edf3");
/// Axes and grid, on both grounds.
pub const RULE: RGBColor = RGBColor(0x8c, 0x95, 0x9f);
/// Words on the fields of a heat map, whose colours are light on both grounds.
const ON_FIELD: RGBColor = RGBColor(0x1f, 0x23, 0x28);

/// An area whose coordinates are in [`FINE`] parts of a pixel.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub type Drawn = Result<(), DrawError>;
/// Why a picture cannot be drawn.
pub type DrawError = DrawingAreaErrorKind<std::io::Error>;

/// Pixels in parts.
pub fn fine(pixels: f64) -> i32 {
    (pixels * FINE).round() as i32
}

/// The room that a row of words takes, in pixels: more than any usual font needs.
pub fn width(words: &str) -> f64 {
    0.57 * LETTER * words.chars().count() as f64
}

/// Words in rows that fit.
pub fn wrapped(words: &str, room: f64) -> Vec<String> {
    let mut rows: Vec<String> = Vec::new();
    for word in words.split_whitespace() {
        match rows.last_mut() {
            Some(row) if width(row) + width(word) + width(" ") <= room => {
                row.push(' ');
                row.push_str(word);
            }
            _ => rows.push(word.into()),
        }
    }
    rows
}

pub fn colour(number: usize) -> RGBColor {
    LINES[number % COLOURS].0
}

/// How words look, and which of their points is at their place.
pub fn words(bold: bool, across: HPos, down: VPos) -> TextStyle<'static> {
    let style = if bold { FontStyle::Bold } else { FontStyle::Normal };
    sized(INK.0, LETTER, style).pos(Pos::new(across, down))
}

/// Words in the middle of a field of a heat map that has room for a height of letters.
pub fn on_field(letter: f64) -> TextStyle<'static> {
    sized(ON_FIELD, letter.min(LETTER), FontStyle::Normal).pos(Pos::new(HPos::Center, VPos::Center))
}

fn sized(colour: RGBColor, letter: f64, style: FontStyle) -> TextStyle<'static> {
    // plotters writes sizes divided by this.
    let size = letter * FINE * 1.24;
    let font = FontDesc::new(FontFamily::Name("system-ui, sans-serif"), size, style);
    TextStyle { color: colour.to_backend_color(), ..TextStyle::from(font) }
}

/// A line of a width in pixels.
pub fn stroke(colour: RGBColor, pixels: f64) -> ShapeStyle {
    colour.stroke_width(fine(pixels) as u32)
}

/// The style of the document: what attributes cannot say.
pub fn style() -> String {
    let mut dark = String::new();
    for (light, on_dark) in LINES.iter().chain([&INK]) {
        let RGBColor(r, g, b) = light;
        let light = format!("#{r:02X}{g:02X}{b:02X}");
        dark += &format!(
            "    [stroke=\"{light}\"] {{ stroke: {on_dark}; }} [fill=\"{light}\"] {{ fill: \
             {on_dark}; }}\n"
        );
    }
    format!(
        "  polyline {{ stroke-linejoin: round; }}\n  \
         @media (prefers-color-scheme: dark) {{\n{dark}  }}\n"
    )
}

/// The mark of a colour, around a point: each colour has its own shape.
pub fn mark(area: &Area<'_>, number: usize, (x, y): (i32, i32)) -> Drawn {
    let colour = colour(number);
    let of = |corners: &[(f64, f64)]| -> Vec<(i32, i32)> {
        corners.iter().map(|(right, down)| (x + fine(*right), y + fine(*down))).collect()
    };
    let filled = |corners: &[(f64, f64)]| area.draw(&Polygon::new(of(corners), colour.filled()));
    let cross = |ends: [(f64, f64); 4]| {
        ends.chunks(2)
            .try_for_each(|pair| area.draw(&PathElement::new(of(pair), stroke(colour, 1.5))))
    };
    match number % COLOURS {
        0 => area.draw(&Circle::new((x, y), fine(3.5), colour.filled())),
        1 => filled(&[(-4.0, 3.5), (4.0, 3.5), (0.0, -4.0)]),
        2 => filled(&[(-3.2, -3.2), (3.2, -3.2), (3.2, 3.2), (-3.2, 3.2)]),
        3 => filled(&[(-4.5, 0.0), (0.0, -4.5), (4.5, 0.0), (0.0, 4.5)]),
        4 => cross([(-3.5, -3.5), (3.5, 3.5), (-3.5, 3.5), (3.5, -3.5)]),
        5 => cross([(-4.0, 0.0), (4.0, 0.0), (0.0, -4.0), (0.0, 4.0)]),
        6 => filled(&[(-4.0, -3.5), (4.0, -3.5), (0.0, 4.0)]),
        _ => area.draw(&Circle::new((x, y), fine(3.5), stroke(colour, 1.5))),
    }
}

/// A bar; bars beside one another differ in how they are filled.
pub fn bar(area: &Area<'_>, colours: usize, place: usize, corners: [(i32, i32); 2]) -> Drawn {
    let colour = colour(colours);
    let opacity = [1.0, 0.0, 0.4][place % 3];
    area.draw(&Rectangle::new(corners, colour.mix(opacity).filled()))?;
    // A path: plotters has no width for the outlines of rectangles in SVG.
    let [(left, top), (right, bottom)] = corners;
    let outline = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)];
    area.draw(&PathElement::new(outline, stroke(colour, 1.5)))
}
