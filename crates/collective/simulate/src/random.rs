//! Random numbers that are the same for the same seed, on every machine and in every version.
//!
//! SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014):
//! results of simulations are told with their seed, so the numbers may not change with a library.

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The stream of part `number` of what has this seed: so parts can be computed in any order.
    pub fn part(seed: u64, number: u64) -> Random {
        let mut random = Random(seed ^ number.wrapping_mul(0xd134_2543_de82_ef95));
        Random(random.next())
    }

    /// 64 random bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is at least 1.
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }

    /// A number from 0 to 1, without 1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// So many different numbers below `end`, all choices alike; in order.
    pub fn choose(&mut self, count: usize, end: usize) -> Vec<usize> {
        // Floyd's algorithm
        let mut chosen = std::collections::BTreeSet::new();
        for last in end.saturating_sub(count)..end {
            let number = self.below(last + 1);
            if !chosen.insert(number) {
                chosen.insert(last);
            }
        }
        chosen.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_published_generator() {
        let mut random = Random::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| random.next()).collect();
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn choices_are_different_and_even() {
        let mut random = Random::new(7);
        let mut counts = [0; 10];
        for _ in 0..10_000 {
            let chosen = random.choose(3, 10);
            assert!(chosen.windows(2).all(|w| w[0] < w[1]) && chosen.len() == 3);
            chosen.into_iter().for_each(|c| counts[c] += 1);
        }
        assert!(counts.iter().all(|c| (2700..3300).contains(c)), "{counts:?}");
        assert_eq!(random.choose(5, 3), [0, 1, 2]);
    }
}
