//! Cutting a run of elements into parts, exactly the same on every rank: integers alone.

use std::ops::Range;

/// Parts begin at multiples of so many bytes, from the start of what is cut, where it costs little.
const LINE_BYTES: u64 = 64;

/// Elements that boundaries are multiples of, if a run of `len` elements is cut into `parts`: a
/// cache line, or 1 where that would make parts uneven by more than about 1/64.
pub(crate) fn grain(len: u64, parts: u64, element_bytes: u64) -> u64 {
    let line = LINE_BYTES / element_bytes;
    if len / parts.max(1) >= 64 * line {
        line
    } else {
        1
    }
}

/// Boundaries that cut `len` elements in proportion to `weights`: one more than there are weights,
/// from 0 to `len`, in order. Part `k` is empty where its weight is 0; all weights 0: the last part
/// is everything.
pub fn split(len: u64, weights: &[u64], grain: u64) -> Vec<u64> {
    let sum: u128 = weights.iter().map(|w| u128::from(*w)).sum();
    let last = weights.iter().rposition(|w| *w > 0).unwrap_or(weights.len().saturating_sub(1));
    let mut bounds = Vec::with_capacity(weights.len() + 1);
    bounds.push(0);
    let mut before = 0u128;
    for (part, weight) in weights.iter().enumerate() {
        before += u128::from(*weight);
        bounds.push(match part {
            _ if part >= last => len,
            _ => (u128::from(len) * before / sum.max(1)) as u64 / grain * grain,
        });
    }
    bounds
}

/// How long the parts of a run are, beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parts {
    /// All the same.
    Equal(u64),
    /// The first and the last are short; from there each is twice as long as the one before, up to
    /// [`STEEPEST`].
    Ramp(u64),
}

/// The longest parts of a ramp are so many times as long as the shortest, as a power of two.
const STEEPEST: u32 = 3;

impl Parts {
    /// What the parts before one have, of [`Parts::all`].
    pub(crate) fn before(self, part: u64) -> u64 {
        // of a ramp that only rises
        let rise = |k: u64| {
            let steep = u64::from(STEEPEST);
            (1 << k.min(steep)) - 1 + (k.saturating_sub(steep) << STEEPEST)
        };
        match self {
            Parts::Equal(_) => part,
            Parts::Ramp(parts) => match part <= parts.div_ceil(2) {
                true => rise(part),
                false => rise(parts.div_ceil(2)) + rise(parts / 2) - rise(parts - part),
            },
        }
    }

    /// What all have together. The shortest has 1.
    pub(crate) fn all(self) -> u64 {
        match self {
            Parts::Equal(parts) | Parts::Ramp(parts) => self.before(parts),
        }
    }

    /// A part of a run.
    pub(crate) fn cut(self, range: &Range<u64>, part: u64, grain: u64) -> Range<u64> {
        let (len, all) = (range.end - range.start, self.all());
        let at = |part: u64| match self.before(part) {
            before if before == all => len,
            before => {
                (u128::from(len) * u128::from(before) / u128::from(all)) as u64 / grain * grain
            }
        };
        range.start + at(part)..range.start + at(part + 1)
    }
}

/// Part `part` of `parts` equal ones.
pub(crate) fn equal(range: &Range<u64>, parts: u64, part: u64, grain: u64) -> Range<u64> {
    Parts::Equal(parts).cut(range, part, grain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_ramp_rises_and_falls() {
        let of = |parts| -> Vec<u64> {
            let at = |k| Parts::Ramp(parts).before(k);
            (0..parts).map(|k| at(k + 1) - at(k)).collect()
        };
        assert_eq!((of(1), of(2), of(3)), (vec![1], vec![1; 2], vec![1, 2, 1]));
        assert_eq!((of(5), of(6)), (vec![1, 2, 4, 2, 1], vec![1, 2, 4, 4, 2, 1]));
        assert_eq!(of(10), [1, 2, 4, 8, 8, 8, 8, 4, 2, 1]);
        assert_eq!(of(9), [1, 2, 4, 8, 8, 8, 4, 2, 1]);
        let cut = |k| Parts::Ramp(6).cut(&(100..240), k, 1);
        assert_eq!((cut(0), cut(2), cut(5)), (100..110, 130..170, 230..240));
    }

    #[test]
    fn small_runs_leave_parts_empty() {
        assert_eq!(split(3, &[1; 4], 1), [0, 0, 1, 2, 3]);
        assert_eq!(split(0, &[1, 2], 1), [0, 0, 0]);
        assert_eq!(split(5, &[0, 0], 1), [0, 0, 5]);
        assert_eq!(split(10, &[0, 1, 0], 1), [0, 0, 10, 10], "a weight of 0 gets nothing");
        assert_eq!(split(1000, &[7, 8], 16), [0, 464, 1000]);
        assert_eq!((grain(1 << 20, 8, 4), grain(100, 8, 4)), (16, 1));
    }

    proptest! {
        #[test]
        fn parts_cover_everything_and_keep_their_proportion(
            len in 0u64..1 << 40,
            weights in prop::collection::vec(0u64..1 << 30, 1..20),
            grain in prop::sample::select(vec![1u64, 16, 64]),
        ) {
            let bounds = split(len, &weights, grain);
            prop_assert_eq!((bounds[0], bounds[weights.len()]), (0, len));
            let sum: u64 = weights.iter().sum();
            for (k, w) in weights.iter().enumerate() {
                let part = bounds[k + 1].checked_sub(bounds[k]).expect("in order");
                if sum > 0 {
                    let ideal = len as f64 * *w as f64 / sum as f64;
                    prop_assert!((part as f64 - ideal).abs() <= 2.0 * grain as f64 + ideal * 1e-9, "{part} for {ideal}");
                    prop_assert!(*w > 0 || part == 0);
                }
            }
        }

        #[test]
        fn equal_parts_are_those_of_equal_weights(start in 0u64..100, len in 0u64..10_000, parts in 1u64..20) {
            let bounds = split(len, &vec![1; parts as usize], 1);
            for part in 0..parts {
                let range = equal(&(start..start + len), parts, part, 1);
                prop_assert_eq!(range.start - start..range.end - start, bounds[part as usize]..bounds[part as usize + 1]);
            }
        }
    }
}
