//! The time to complete a message, as a mixture: with some probability so long a wait, and then
//! Selective Repeat of so many chunks.

use crate::{Lots, SelectiveRepeat};

/// With which probability what is sent after which wait. Without chunks it takes a round trip.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) weight: f64,
    pub(crate) wait_s: f64,
    pub(crate) chunks: u64,
}

/// The distribution of the time to complete a message, in seconds.
#[derive(Clone, Debug)]
pub struct Completion {
    sr: SelectiveRepeat,
    /// One; or the first is the one in which nothing is sent again.
    cases: Vec<Case>,
    /// The sums of the weights up to each case.
    up_to: Vec<f64>,
}

impl Completion {
    /// Of cases whose weights sum up to 1.
    pub(crate) fn new(sr: SelectiveRepeat, cases: Vec<Case>) -> Completion {
        let add = |sum: &mut f64, case: &Case| {
            *sum += case.weight;
            Some(*sum)
        };
        let up_to = cases.iter().scan(0.0, add).collect();
        Completion { sr, cases, up_to }
    }

    /// The mean.
    pub fn mean_s(&self) -> f64 {
        self.cases
            .iter()
            .map(|case| case.weight * (case.wait_s + self.sr.mean_s(case.chunks)))
            .sum()
    }

    /// The probability to be done by then.
    pub fn probability(&self, time_s: f64) -> f64 {
        let of = |case: &Case| case.weight * self.sr.probability(case.chunks, time_s - case.wait_s);
        self.cases.iter().map(of).sum::<f64>().min(1.0)
    }

    /// The shortest time that it can take.
    pub fn least_s(&self) -> f64 {
        self.cases
            .iter()
            .map(|case| case.wait_s + self.sr.least_s(case.chunks))
            .fold(f64::INFINITY, f64::min)
    }

    /// The least time by which a share (below 1) of all such messages is done: 0.5 gives the
    /// median.
    pub fn quantile_s(&self, share: f64) -> f64 {
        let least_s = self.least_s();
        // At the very place of a step, rounding may put the time on its wrong side.
        if self.probability(least_s * (1.0 + 1e-12)) >= share {
            return least_s;
        }
        let (mut early, mut late) = (least_s, 2.0 * least_s);
        while self.probability(late) < share && late.is_finite() {
            (early, late) = (late, 2.0 * late);
        }
        // Until no number lies between.
        while late - early > 4.0 * f64::EPSILON * late {
            let middle = early + (late - early) / 2.0;
            if self.probability(middle) < share {
                early = middle;
            } else {
                late = middle;
            }
        }
        late
    }

    /// The probability that nothing is sent again.
    pub fn undisturbed(&self) -> f64 {
        match self.cases[..] {
            [only] => only.weight * self.sr.no_loss(only.chunks),
            _ => self.cases[0].weight,
        }
    }

    /// A sample.
    pub fn draw_s(&self, lots: &mut Lots) -> f64 {
        let case = self.pick(0, lots);
        case.wait_s + self.sr.draw_s(case.chunks, lots, false)
    }

    /// A sample of those in which something is sent again: the others all take
    /// [`Completion::least_s`], so that estimates become better without them.
    pub fn draw_disturbed_s(&self, lots: &mut Lots) -> f64 {
        match self.cases[..] {
            [only] => only.wait_s + self.sr.draw_s(only.chunks, lots, true),
            _ => {
                let case = self.pick(1, lots);
                case.wait_s + self.sr.draw_s(case.chunks, lots, false)
            }
        }
    }

    /// One of the cases from the `first` on, by their weights.
    fn pick(&self, first: usize, lots: &mut Lots) -> Case {
        let before = if first == 0 { 0.0 } else { self.up_to[first - 1] };
        let last = self.cases.len() - 1;
        let drawn = before + lots.uniform() * (self.up_to[last] - before);
        self.cases[self.up_to.partition_point(|weight| *weight < drawn).clamp(first, last)]
    }
}
