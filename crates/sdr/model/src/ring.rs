//! Ring all-reduce between datacentres: `2N − 2` rounds, in each of which everyone sends a part of
//! the buffer on as soon as it has both finished its own last round and received its neighbour's.

use crate::{Channel, Completion, Lots, Scheme};

/// Ring all-reduce over N datacentres.
#[derive(Clone, Debug)]
pub struct Ring {
    datacentres: usize,
    step: Completion,
}

impl Ring {
    /// Of a buffer of so many chunks, an N-th of which is sent a round, over links that are all
    /// alike.
    ///
    /// There are at least two datacentres, else nothing is sent: fewer count as two.
    pub fn new(channel: &Channel, scheme: Scheme, chunks: u64, datacentres: usize) -> Ring {
        let datacentres = datacentres.max(2);
        let part = chunks.div_ceil(datacentres as u64).max(1);
        Ring { datacentres, step: scheme.message(channel, part) }
    }

    /// Rounds: `2N − 2`.
    pub fn rounds(&self) -> usize {
        2 * self.datacentres - 2
    }

    /// A lower bound of the mean time, in seconds: `(2N − 2)(C + μ)`, rounds times the mean time of
    /// one write.
    pub fn least_mean_s(&self) -> f64 {
        self.rounds() as f64 * self.step.mean_s()
    }

    /// A sample of the time until the last datacentre is done, in seconds: `T(i, r) = max(T(i−1,
    /// r−1), T(i, r−1)) + t(i, r)`.
    pub fn draw_s(&self, lots: &mut Lots) -> f64 {
        let mut done_s = vec![0.0; self.datacentres];
        for _ in 0..self.rounds() {
            let mut neighbour_s = done_s[self.datacentres - 1];
            for done_s in &mut done_s {
                let ready_s = f64::max(neighbour_s, *done_s);
                neighbour_s = *done_s;
                *done_s = ready_s + self.step.draw_s(lots);
            }
        }
        done_s.into_iter().fold(0.0, f64::max)
    }

    /// So many samples, in order of length.
    pub fn draw_many_s(&self, samples: usize, lots: &mut Lots) -> Vec<f64> {
        let mut all: Vec<f64> = (0..samples).map(|_| self.draw_s(lots)).collect();
        all.sort_by(f64::total_cmp);
        all
    }
}
