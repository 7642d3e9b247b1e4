//! The least of the latest samples of the round trip: what the way takes, without what a busy core
//! adds now and then. A timeout needs that, too, and uses the mean; a choice of the scheme does
//! not: by one late answer, erasure coding would seem to be worth its parity.

/// So many samples are remembered.
const SAMPLES: usize = 16;

/// The latest samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Least {
    samples_us: [u64; SAMPLES],
    seen: usize,
}

impl Least {
    /// A sample.
    pub(crate) fn note(&mut self, sample_us: u64) {
        self.samples_us[self.seen % SAMPLES] = sample_us;
        self.seen += 1;
    }

    /// The least of them, if there are any.
    pub(crate) fn least_us(&self) -> Option<u64> {
        self.samples_us[..self.seen.min(SAMPLES)].iter().min().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_answers_do_not_count_and_a_longer_way_does() {
        let mut l = Least::default();
        assert_eq!(l.least_us(), None);
        for i in 0..100 {
            l.note(if i % 3 == 0 { 500 } else { 80_000 });
            assert_eq!(l.least_us(), Some(500));
        }
        (0..SAMPLES).for_each(|_| l.note(20_000));
        assert_eq!(l.least_us(), Some(20_000));
    }
}
