//! The randomness that samples are drawn with: a seed is the sequence.

/// xoshiro256++, seeded by splitmix64 (Blackman and Vigna).
#[derive(Clone, Debug)]
pub struct Lots([u64; 4]);

impl Lots {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Lots {
        let mut state = seed;
        Lots(std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    fn bits(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Above 0, up to 1, all alike.
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// How often something fails before it succeeds, if it fails with probability `e^log_failure`.
    pub fn failures(&mut self, log_failure: f64) -> f64 {
        (self.uniform().ln() / log_failure).floor()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lots_are_even_and_repeat() {
        let (mut lots, mut again) = (Lots::new(7), Lots::new(7));
        let n = 100_000;
        let (mut sum, mut failures) = (0.0, 0.0);
        for _ in 0..n {
            let u = lots.uniform();
            assert!(u > 0.0 && u <= 1.0 && u == again.uniform());
            sum += u;
            failures += Lots::failures(&mut lots, 0.25_f64.ln());
            again.uniform();
        }
        assert!((sum / f64::from(n) - 0.5).abs() < 0.005);
        assert!((failures / f64::from(n) - 1.0 / 3.0).abs() < 0.01);
        assert_ne!(Lots::new(7).bits(), Lots::new(8).bits());
    }
}
