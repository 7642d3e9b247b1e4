//! What clients of a replica saw.

use serde::Serialize;

/// Times that half, 95 and 99 of 100 do not exceed, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quantiles {
    /// Half.
    pub p50: f64,
    /// 95 of 100.
    pub p95: f64,
    /// 99 of 100.
    pub p99: f64,
    /// The mean.
    pub mean: f64,
    /// The longest.
    pub most: f64,
}

impl Quantiles {
    /// Those of some times; none of none.
    pub fn of(mut all: Vec<f64>) -> Option<Quantiles> {
        all.sort_by(f64::total_cmp);
        let last = all.len().checked_sub(1)?;
        // the smallest that this share of all does not exceed
        let at = |of_100: usize| all[(all.len() * of_100).div_ceil(100) - 1];
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        Some(Quantiles { p50: at(50), p95: at(95), p99: at(99), mean, most: all[last] })
    }
}

/// What became of the requests that one replica was meant for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// How many there were.
    pub requests: usize,
    /// How many got the last token of their answer.
    pub finished: usize,
    /// How many did not.
    pub lost: usize,
    /// When the NIC was lost; none if nothing was.
    pub failed_at_s: Option<f64>,
    /// From a request to its first token, of those that got one.
    pub ttft_s: Option<Quantiles>,
    /// From one token to the next in the mean, of finished answers of two tokens and more.
    pub tpot_s: Option<Quantiles>,
    /// From a request to its last token, of those that got it.
    pub latency_s: Option<Quantiles>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_what_there_is() {
        assert_eq!(Quantiles::of(Vec::new()), None);
        let one = Quantiles::of(vec![3.0]).unwrap();
        assert_eq!((one.p50, one.p99, one.mean), (3.0, 3.0, 3.0));
        let all = Quantiles::of((1..=200).rev().map(f64::from).collect()).unwrap();
        assert_eq!((all.p50, all.p95, all.p99, all.most), (100.0, 190.0, 198.0, 200.0));
    }
}
