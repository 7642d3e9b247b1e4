//! Broken lines.
//!
//! plotters has such an element. It takes lengths by `f32::hypot`, whose newest version in glibc is
//! of 2.35, and with that one function every program of ours would ask for that glibc.

/// A point in a picture, in its finest units.
type Point = (i32, i32);

/// The pieces of a line that are drawn: `dash` units, then none for `gap` units, and so on. A dash
/// goes around corners.
pub(crate) fn dashes(path: &[Point], dash: i32, gap: i32) -> Vec<Vec<Point>> {
    let (dash, gap) = (f64::from(dash.max(1)), f64::from(gap.max(1)));
    let (mut pieces, mut piece) = (Vec::new(), path.first().copied().into_iter().collect());
    // What is left of the dash or the gap that is being drawn.
    let (mut drawn, mut left) = (true, dash);
    for pair in path.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        let (right, down) =
            (f64::from(to.0) - f64::from(from.0), f64::from(to.1) - f64::from(from.1));
        let length = (right * right + down * down).sqrt();
        let mut done = 0.0;
        while length - done > left {
            done += left;
            let share = done / length;
            let at = |start: i32, way: f64| (f64::from(start) + share * way).round() as i32;
            let end = (at(from.0, right), at(from.1, down));
            let before: Vec<Point> = std::mem::replace(&mut piece, vec![end]);
            if drawn {
                pieces.push([&before[..], &[end]].concat());
            }
            drawn = !drawn;
            left = if drawn { dash } else { gap };
        }
        left -= length - done;
        piece.push(to);
    }
    if drawn && piece.len() > 1 {
        pieces.push(piece);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dashes_and_gaps_take_turns() {
        let pieces = dashes(&[(0, 0), (25, 0)], 6, 4);
        assert_eq!(pieces, [[(0, 0), (6, 0)], [(10, 0), (16, 0)], [(20, 0), (25, 0)]]);
        assert_eq!(dashes(&[(0, 0), (8, 0)], 6, 4), [[(0, 0), (6, 0)]]);
        assert!(dashes(&[(1, 1)], 6, 4).is_empty());
        assert!(dashes(&[], 6, 4).is_empty());
    }

    #[test]
    fn a_dash_goes_around_a_corner() {
        let pieces = dashes(&[(0, 0), (3, 0), (3, 3)], 5, 4);
        assert_eq!(pieces, [vec![(0, 0), (3, 0), (3, 2)]]);
    }
}
