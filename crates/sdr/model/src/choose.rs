//! Which scheme for this message over this channel.

use unbroken_erasure::Code;

use crate::{Channel, Completion, Scheme};

/// What is to be short.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Objective {
    /// The mean time.
    Mean,
    /// The time by which this share of all messages is done, such as 0.999.
    Quantile(f64),
}

impl Objective {
    /// Its value, in seconds.
    pub fn of(self, completion: &Completion) -> f64 {
        match self {
            Objective::Mean => completion.mean_s(),
            Objective::Quantile(share) => completion.quantile_s(share),
        }
    }
}

/// Erasure coding must be faster by this share: encoding costs a core, and Selective Repeat does
/// not.
pub const WORTH: f64 = 0.02;

/// The schemes to choose from: Selective Repeat, and codes from little to much parity.
pub fn candidates() -> Vec<Scheme> {
    let mds = [(32, 2), (32, 4), (32, 8), (32, 16), (16, 16)].map(|(k, m)| Code::mds(k, m));
    let xor = [(32, 4), (32, 8), (32, 16)].map(|(k, m)| Code::xor(k, m));
    let codes = mds.into_iter().chain(xor).flatten().map(Scheme::Ec);
    [Scheme::SrNack, Scheme::SrRto].into_iter().chain(codes).collect()
}

/// The best of some schemes for a message, and its objective in seconds; None of none. A scheme
/// without a code wins unless one with a code is better by [`WORTH`]; of two that are equal, the
/// first one wins.
pub fn choose(
    channel: &Channel,
    chunks: u64,
    objective: Objective,
    schemes: &[Scheme],
) -> Option<(Scheme, f64)> {
    choose_among(channel, chunks, chunks, objective, schemes)
}

/// The best of some schemes, as [`choose`] finds it, for a message that is one of several under
/// way, which have `all` chunks together. They share the injection. So where that is what they wait
/// for, a message takes no less than all of them take to be injected, with parity and what is sent
/// again.
pub fn choose_among(
    channel: &Channel,
    chunks: u64,
    all: u64,
    objective: Objective,
    schemes: &[Scheme],
) -> Option<(Scheme, f64)> {
    let mut best: Option<(Scheme, f64, f64)> = None;
    for &scheme in schemes {
        let handicap = if matches!(scheme, Scheme::Ec(_)) { 1.0 + WORTH } else { 1.0 };
        let shared_s = if all > chunks {
            let share = scheme.sent(channel, chunks) / chunks.max(1) as f64;
            all as f64 * share * channel.injection_s
        } else {
            0.0
        };
        let once = (chunks + scheme.parity(channel, chunks)) as f64;
        let least_s = shared_s.max(once * channel.injection_s + channel.rtt_s);
        // What cannot win is not worked out: a model costs up to milliseconds.
        if best.is_some_and(|(_, _, least)| least_s * handicap >= least) {
            continue;
        }
        let time_s = objective.of(&scheme.message(channel, chunks)).max(shared_s);
        if best.is_none_or(|(_, _, least)| time_s * handicap < least) {
            best = Some((scheme, time_s, time_s * handicap));
        }
    }
    best.map(|(scheme, time_s, _)| (scheme, time_s))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Link, Loss};

    fn best(bytes: u64, loss: f64) -> Scheme {
        let link = Link { loss: Loss::Chunk(loss), ..Link::default() };
        let channel = link.channel().unwrap();
        choose(&channel, link.chunks(bytes), Objective::Mean, &candidates()).unwrap().0
    }

    /// The paper's section 5.2: EC in the middle, SR for long messages with few losses, SR for
    /// short ones with none.
    #[test]
    fn the_choice_is_the_papers() {
        assert!(matches!(best(128 << 20, 1e-3), Scheme::Ec(_)));
        assert_eq!(best(8 << 30, 1e-8), Scheme::SrNack);
        assert_eq!(best(128 << 10, 1e-8), Scheme::SrNack);
        assert_eq!(best(1 << 20, 0.0), Scheme::SrNack);
    }

    /// Sixteen messages of 1 MiB at 10 Gbit/s and half a millisecond: they wait for the injection,
    /// so parity that is not needed costs as much as it takes. Over 100 ms they do not.
    #[test]
    fn messages_that_share_the_injection_pay_for_parity() {
        let best = |rtt_s: f64, loss: f64, messages: u64| {
            let channel = Channel { injection_s: 52e-6, rtt_s, loss };
            let all = 16 * messages;
            choose_among(&channel, 16, all, Objective::Mean, &candidates()).unwrap().0
        };
        for loss in [0.0, 1e-3, 0.016, 0.15, 0.56] {
            assert_eq!(best(500e-6, loss, 16), Scheme::SrNack, "{loss}");
        }
        assert!(matches!(best(100e-3, 0.15, 16), Scheme::Ec(_)));
        assert!(matches!(best(100e-3, 0.016, 16), Scheme::Ec(_)));
        assert!(matches!(best(5e-3, 0.15, 1), Scheme::Ec(_)));
    }

    /// What is sent in the mean, beside drawing it.
    #[test]
    fn what_is_sent_is_parity_and_what_is_sent_again() {
        let channel = Channel { injection_s: 1e-6, rtt_s: 1e-3, loss: 0.1 };
        let sent = |scheme: Scheme, loss: f64| scheme.sent(&Channel { loss, ..channel }, 64);
        let code = Scheme::Ec(Code::mds(32, 8).unwrap());
        assert_eq!([sent(Scheme::SrNack, 0.0), sent(code, 0.0)], [64.0, 80.0]);
        assert!((sent(Scheme::SrRto, 0.2) - 80.0).abs() < 1e-9);
        let mut lots = crate::Lots::new(5);
        let draws = 20_000;
        for loss in [0.05, 0.2, 0.4] {
            let mut all = 0.0;
            for _ in 0..2 * draws {
                let lost: Vec<bool> = (0..40).map(|_| lots.uniform() < loss).collect();
                let fails = lost.iter().filter(|lost| **lost).count() > 8;
                let data = lost[..32].iter().filter(|lost| **lost).count();
                all += 40.0 + if fails { data as f64 / (1.0 - loss) } else { 0.0 };
            }
            let (mean, ours) = (all / f64::from(draws), sent(code, loss));
            assert!((ours / mean - 1.0).abs() < 0.04, "{loss}: {ours} {mean}");
        }
    }

    #[test]
    fn nothing_is_chosen_of_nothing() {
        let channel = Link::default().channel().unwrap();
        assert_eq!(choose(&channel, 1, Objective::Mean, &[]), None);
        let equal = [Scheme::SrRto, Scheme::SrNack];
        let lossless = Channel { loss: 0.0, ..channel };
        assert_eq!(choose(&lossless, 1, Objective::Mean, &equal).unwrap().0, Scheme::SrRto);
    }
}
