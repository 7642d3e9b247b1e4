//! Erasure coding: parity goes with the data, and only submessages that cannot be recovered are
//! sent again, by Selective Repeat.
//!
//! A message of M chunks is cut into submessages of *k*, each with *m* parity chunks; what is left
//! is a shorter last submessage of *k'* chunks with `⌈k'·m/k⌉` ([`Code::for_last`]), so there are
//! `⌈M·m/k⌉` parity chunks in all. If all are recovered the message takes `B + RTT` with `B = (M +
//! ⌈M·m/k⌉)·T`. Else the receiver waits for its timeout `B + β·RTT`, says which failed, and their
//! data chunks are sent again: `B + (1 + β)·RTT + T_SR(their chunks)`.

use unbroken_erasure::Code;

use crate::completion::{Case, Completion};
use crate::{failure, Channel, SelectiveRepeat};

/// Numbers of failures that are less likely than the likeliest by this are left out.
const NEVER: f64 = 1e-20;

/// The model of erasure coding over a channel.
#[derive(Clone, Debug)]
pub struct ErasureCoding {
    channel: Channel,
    code: Code,
    beta: f64,
    sr: SelectiveRepeat,
}

/// Whole submessages, and the chunks of a shorter one behind them.
struct Cut {
    whole: u64,
    last: Option<Code>,
}

impl ErasureCoding {
    /// Over a channel; what fails is sent again with a timeout of `rto_s`, and the receiver waits
    /// `beta` round trips before it says so.
    pub fn new(channel: &Channel, code: Code, rto_s: f64, beta: f64) -> ErasureCoding {
        ErasureCoding { channel: *channel, code, beta, sr: SelectiveRepeat::new(channel, rto_s) }
    }

    fn cut(&self, chunks: u64) -> Cut {
        let k = self.code.data() as u64;
        Cut { whole: chunks / k, last: self.code.for_last((chunks % k) as usize).ok() }
    }

    /// The parity chunks of a message: `⌈M·m/k⌉`.
    pub fn parity(&self, chunks: u64) -> u64 {
        let Cut { whole, last } = self.cut(chunks);
        whole * self.code.parity() as u64 + last.map_or(0, |code| code.parity() as u64)
    }

    /// The time until all is sent once: `B`.
    fn sent_s(&self, chunks: u64) -> f64 {
        (chunks + self.parity(chunks)) as f64 * self.channel.injection_s
    }

    /// The probabilities that whole submessages fail, and that the last one does.
    fn failures(&self, cut: &Cut) -> (f64, f64) {
        let of = |code| failure(code, self.channel.loss);
        (of(self.code), cut.last.map_or(0.0, of))
    }

    /// Chunks that are sent in the mean. Of a submessage that fails only what is lost is sent
    /// again, and more of that is lost than in the mean: at least one more than *m* of *k + m*.
    pub(crate) fn sent_chunks(&self, chunks: u64) -> f64 {
        let (cut, loss) = (self.cut(chunks), self.channel.loss);
        let (whole, last) = self.failures(&cut);
        let again = |code: Code, fails: f64| {
            let least = (code.parity() + 1) as f64 / code.chunks() as f64;
            fails * code.data() as f64 * loss.max(least.min(1.0)) / (1.0 - loss)
        };
        (chunks + self.parity(chunks)) as f64
            + cut.whole as f64 * again(self.code, whole)
            + cut.last.map_or(0.0, |code| again(code, last))
    }

    /// The probability that something must be sent again: `1 − P_EC^L`.
    pub fn fallback(&self, chunks: u64) -> f64 {
        let cut = self.cut(chunks);
        let (whole, last) = self.failures(&cut);
        -f64::exp_m1(cut.whole as f64 * f64::ln_1p(-whole) + f64::ln_1p(-last))
    }

    /// The time to complete a message of so many chunks.
    pub fn message(&self, chunks: u64) -> Completion {
        let cut = self.cut(chunks);
        let (whole, last) = self.failures(&cut);
        let sent_s = self.sent_s(chunks);
        let told_s = sent_s + (1.0 + self.beta) * self.channel.rtt_s;
        let mut cases = vec![Case { weight: 0.0, wait_s: sent_s, chunks: 0 }];
        for (failed, weight) in binomial(cut.whole, whole) {
            for (weight, code) in [(weight * (1.0 - last), None), (weight * last, cut.last)] {
                let again =
                    failed * self.code.data() as u64 + code.map_or(0, |code| code.data() as u64);
                if again == 0 {
                    cases[0].weight += weight;
                } else if weight > 0.0 {
                    cases.push(Case { weight, wait_s: told_s, chunks: again });
                }
            }
        }
        Completion::new(self.sr.clone(), cases)
    }

    /// The paper's own estimate of the mean (section 4.2.3), in seconds: Selective Repeat of the
    /// *expected* number of failed chunks (whole ones, rounded up) is added whether or not anything
    /// fails. It is called a lower bound there and is none: the time for an expected number of
    /// chunks is above the expected time.
    pub fn paper_mean_s(&self, chunks: u64) -> f64 {
        let cut = self.cut(chunks);
        let (whole, last) = self.failures(&cut);
        let data = |code: Code| code.data() as f64;
        let again = cut.whole as f64 * whole * data(self.code)
            + cut.last.map_or(0.0, |code| last * data(code));
        let told_s = self.fallback(chunks) * (1.0 + self.beta) * self.channel.rtt_s;
        self.sent_s(chunks) + told_s + self.sr.mean_s(again.ceil() as u64)
    }
}

/// The binomial distribution: how many of `n` fail, and how likely that is, where it is likely at
/// all.
fn binomial(n: u64, failure: f64) -> Vec<(u64, f64)> {
    if n == 0 || failure <= 0.0 || failure >= 1.0 {
        return vec![(if failure >= 1.0 { n } else { 0 }, 1.0)];
    }
    let odds = failure / (1.0 - failure);
    let likeliest = (((n + 1) as f64 * failure).floor() as u64).min(n);
    // Relative to the likeliest, downwards and upwards, each from its neighbour.
    let mut down = Vec::new();
    let (mut f, mut weight) = (likeliest, 1.0);
    while f > 0 && weight > NEVER {
        weight *= f as f64 / ((n - f + 1) as f64 * odds);
        f -= 1;
        down.push((f, weight));
    }
    let mut all: Vec<(u64, f64)> = down.into_iter().rev().collect();
    let (mut f, mut weight) = (likeliest, 1.0);
    all.push((f, weight));
    while f < n && weight > NEVER {
        weight *= (n - f) as f64 * odds / (f + 1) as f64;
        f += 1;
        all.push((f, weight));
    }
    let sum: f64 = all.iter().map(|(_, weight)| weight).sum();
    all.iter_mut().for_each(|(_, weight)| *weight /= sum);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binomial_distribution() {
        assert_eq!(binomial(0, 0.5), [(0, 1.0)]);
        assert_eq!((binomial(9, 0.0), binomial(9, 1.0)), (vec![(0, 1.0)], vec![(9, 1.0)]));
        let two = binomial(2, 0.25);
        let right = [(0, 0.5625), (1, 0.375), (2, 0.0625)];
        assert!(
            two.iter().zip(right).all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() < 1e-15),
            "{two:?}"
        );
        for (n, failure) in [(64, 1e-12), (4096, 0.14), (1 << 20, 0.999), (10, 0.5)] {
            let all = binomial(n, failure);
            let mean: f64 = all.iter().map(|(f, weight)| *f as f64 * weight).sum();
            assert!((mean / (n as f64 * failure) - 1.0).abs() < 1e-12, "{n} {failure}: {mean}");
        }
    }

    fn ec(loss: f64) -> ErasureCoding {
        let channel = Channel { injection_s: 1.0, rtt_s: 100.0, loss };
        ErasureCoding::new(&channel, Code::mds(4, 2).unwrap(), 300.0, 1.0)
    }

    /// A last submessage of one chunk has one parity chunk; it fails if both are lost, and then the
    /// one is sent again.
    #[test]
    fn a_shorter_last_submessage() {
        assert_eq!(
            [1, 2, 3, 4, 5, 8, 9].map(|chunks| ec(0.0).parity(chunks)),
            [1, 1, 2, 2, 3, 4, 5]
        );
        let p: f64 = 0.1;
        let alone = ec(p).message(1);
        assert!((alone.undisturbed() - (1.0 - p * p)).abs() < 1e-15);
        let again = 100.0 + 1.0 + 301.0 * p / (1.0 - p);
        let mean = 2.0 + (1.0 - p * p) * 100.0 + p * p * (200.0 + again);
        assert!((alone.mean_s() - mean).abs() < 1e-9, "{} {mean}", alone.mean_s());
        // Five chunks: the first four fail if three of six are lost.
        let first = failure(Code::mds(4, 2).unwrap(), p);
        let five = ec(p).message(5);
        assert!((five.undisturbed() - (1.0 - first) * (1.0 - p * p)).abs() < 1e-15);
        assert!((ec(p).fallback(5) - (1.0 - five.undisturbed())).abs() < 1e-15);
        let sr = SelectiveRepeat::new(&ec(p).channel, 300.0);
        let mean = 8.0
            + five.undisturbed() * 100.0
            + first * (1.0 - p * p) * (200.0 + sr.mean_s(4))
            + (1.0 - first) * p * p * (200.0 + sr.mean_s(1))
            + first * p * p * (200.0 + sr.mean_s(5));
        assert!((five.mean_s() - mean).abs() < 1e-9, "{} {mean}", five.mean_s());
    }

    #[test]
    fn without_losses_it_takes_its_parity_and_a_round_trip() {
        let message = ec(0.0).message(10);
        assert_eq!(
            (message.mean_s(), message.quantile_s(0.999), message.least_s()),
            (115.0, 115.0, 115.0)
        );
        assert_eq!((ec(0.0).paper_mean_s(10), ec(0.0).fallback(10)), (115.0, 0.0));
    }
}
