//! Selective Repeat: a chunk that is lost is sent again when its timeout is over, until it arrives.
//!
//! Chunk *i* of M, lost *r* times before it arrives, is done at `X_i = i·T + r·O`, with the time to
//! inject a chunk T and the cost of a loss `O = RTO + T`; *r* is at least *n* with probability
//! `p^n`. The message is done a round trip after the last of its chunks.
//!
//! With `N_n(x) = min(M, ⌊(x − n·O)/T⌋)`, the chunks that have had time for *n* retransmissions by
//! *x* (0 where that is negative),
//!
//! ```text
//! ln P(max X_i ≤ x) = M·ln(1 − p) + Σ_{n ≥ 1} N_n(x)·[ln(1 − p^(n+1)) − ln(1 − p^n)],   x ≥ M·T
//! ```
//!
//! which is the paper's product over all chunks, with equal factors taken together. The expectation
//! is `M·T + ∫ (1 − P) dx + RTT`, and the integral has a closed form: between the points where some
//! N_n begins to grow or is full, P is a geometric sequence over steps of T, one for each phase
//! between two of the N_n. So the cost does not depend on M.

use crate::completion::{Case, Completion};
use crate::{Channel, Lots};

/// Retransmissions that are less likely than this are not counted.
const NEVER: f64 = 1e-30;

/// The model of Selective Repeat over a channel.
#[derive(Clone, Debug)]
pub struct SelectiveRepeat {
    injection_s: f64,
    rtt_s: f64,
    loss: f64,
    /// What a loss costs: `O`.
    overhead_s: f64,
    /// `ln(1 − p^n)` at *n*; at 0 there is nothing of use.
    log_done: Vec<f64>,
}

impl SelectiveRepeat {
    /// Over a channel, a chunk being sent again after `rto_s` seconds without an acknowledgement.
    pub fn new(channel: &Channel, rto_s: f64) -> SelectiveRepeat {
        let &Channel { injection_s, rtt_s, loss } = channel;
        let mut log_done = vec![0.0];
        let mut power = 1.0;
        while power > NEVER {
            power *= loss;
            log_done.push(f64::ln_1p(-power));
        }
        SelectiveRepeat { injection_s, rtt_s, loss, overhead_s: rto_s + injection_s, log_done }
    }

    /// The most retransmissions of a chunk that are counted.
    fn most(&self) -> usize {
        self.log_done.len() - 2
    }

    /// By how much `ln P` grows where a chunk gets time for its `n`th retransmission.
    fn gain(&self, n: usize) -> f64 {
        self.log_done[n + 1] - self.log_done[n]
    }

    /// `N_n(x)`.
    fn reached(&self, n: usize, chunks: f64, x: f64) -> f64 {
        ((x - n as f64 * self.overhead_s) / self.injection_s).floor().clamp(0.0, chunks)
    }

    /// `ln P(max X_i ≤ x)`.
    fn log_probability(&self, chunks: f64, x: f64) -> f64 {
        if x < chunks * self.injection_s {
            return f64::NEG_INFINITY;
        }
        let mut sum = chunks * self.log_done[1];
        for n in 1..=self.most() {
            let reached = self.reached(n, chunks, x);
            if reached == 0.0 {
                break;
            }
            sum += reached * self.gain(n);
        }
        sum.min(0.0)
    }

    /// `∫ (1 − P) dx` from `M·T` on.
    fn excess_s(&self, chunks: f64) -> f64 {
        let own = chunks * self.injection_s;
        let begins = |n: usize| n as f64 * self.overhead_s;
        // From `growing` to `last` the N_n grow; those before are full.
        let (mut growing, mut last) = (1, 0);
        while last < self.most() && begins(last + 1) <= own {
            last += 1;
        }
        let (mut from, mut sum) = (own, 0.0);
        while growing <= self.most() {
            let next_begins = if last < self.most() { begins(last + 1) } else { f64::INFINITY };
            let next_full = if growing <= last { begins(growing) + own } else { f64::INFINITY };
            let to = next_begins.min(next_full);
            sum += self.stretch(chunks, from, to, growing..=last);
            if next_begins <= next_full {
                last += 1;
            } else {
                growing += 1;
            }
            from = to;
        }
        sum
    }

    /// `∫ (1 − P) dx` over a stretch on which the same N_n grow.
    fn stretch(
        &self,
        chunks: f64,
        from: f64,
        to: f64,
        growing: std::ops::RangeInclusive<usize>,
    ) -> f64 {
        let step = self.injection_s;
        let mut log_p = chunks * self.log_done[*growing.start()];
        // When within a step each grows, and what ln P gains by it.
        let mut phases = Vec::with_capacity(growing.clone().count() + 1);
        let mut gain = 0.0;
        for n in growing {
            let reached = self.reached(n, chunks, from);
            log_p += reached * self.gain(n);
            gain += self.gain(n);
            let phase = n as f64 * self.overhead_s + (reached + 1.0) * step - from;
            phases.push((phase.clamp(0.0, step), self.gain(n)));
        }
        phases.sort_by(|a, b| a.0.total_cmp(&b.0));
        phases.push((step, 0.0));
        let steps = ((to - from) / step).floor();
        let rest = (to - from) - steps * step;
        let (mut sum, mut begin) = (0.0, 0.0);
        for (end, gained) in phases {
            // 1 − P over all whole steps, then over the last one, as far as it goes.
            sum += (steps - geometric(log_p, gain, steps)) * (end - begin);
            sum += -f64::exp_m1((log_p + steps * gain).min(0.0))
                * (rest - begin).clamp(0.0, end - begin);
            log_p += gained;
            begin = end;
        }
        sum
    }
}

/// `Σ e^(log_first + t·gain)`, t from 0 to `terms` − 1; no term is above 1.
fn geometric(log_first: f64, gain: f64, terms: f64) -> f64 {
    if terms == 0.0 {
        return 0.0;
    }
    // From the last term down, so that nothing is too large.
    let log_last = (log_first + (terms - 1.0) * gain).min(0.0);
    if gain == 0.0 {
        return terms * log_last.exp();
    }
    log_last.exp() * f64::exp_m1(-terms * gain) / f64::exp_m1(-gain)
}

impl SelectiveRepeat {
    /// The time to complete a message of so many chunks.
    pub fn message(&self, chunks: u64) -> Completion {
        Completion::new(self.clone(), vec![Case { weight: 1.0, wait_s: 0.0, chunks }])
    }

    /// The mean, in seconds.
    pub(crate) fn mean_s(&self, chunks: u64) -> f64 {
        let chunks = chunks as f64;
        chunks * self.injection_s + self.excess_s(chunks) + self.rtt_s
    }

    /// The probability to be done by then.
    pub(crate) fn probability(&self, chunks: u64, time_s: f64) -> f64 {
        self.log_probability(chunks as f64, time_s - self.rtt_s).exp()
    }

    /// The time without losses.
    pub(crate) fn least_s(&self, chunks: u64) -> f64 {
        chunks as f64 * self.injection_s + self.rtt_s
    }

    /// The probability that no chunk is lost.
    pub(crate) fn no_loss(&self, chunks: u64) -> f64 {
        f64::exp(chunks as f64 * f64::ln_1p(-self.loss))
    }

    /// A sample of the time, in seconds. If `lossy`, of those in which a chunk is lost at least.
    ///
    /// Only chunks that are lost more often than all behind them can be the last one to be done.
    /// From one such to the next, from the end of the message to its beginning, the distance is
    /// geometric.
    pub(crate) fn draw_s(&self, chunks: u64, lots: &mut Lots, lossy: bool) -> f64 {
        let mut latest = chunks as f64 * self.injection_s;
        let mut index = chunks as f64 + 1.0;
        let mut retries: f64 = 0.0;
        for round in 0..if self.loss > 0.0 { self.most() } else { 0 } {
            // Not lost more than `retries` times.
            let log_less = f64::ln_1p(-self.loss.powf(retries + 1.0));
            let passed_over = if lossy && round == 0 {
                let some = -f64::exp_m1(chunks as f64 * log_less);
                (f64::ln_1p(-lots.uniform() * some) / log_less).floor().min(chunks as f64 - 1.0)
            } else {
                lots.failures(log_less)
            };
            index -= passed_over + 1.0;
            // (Not a number where a power of the loss is too small: that never happens, either.)
            if index < 1.0 || index.is_nan() {
                break;
            }
            retries += 1.0 + lots.failures(self.loss.ln());
            latest = latest.max(index * self.injection_s + retries * self.overhead_s);
        }
        latest + self.rtt_s
    }
}
