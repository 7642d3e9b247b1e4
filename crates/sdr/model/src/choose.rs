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
    let mut best: Option<(Scheme, f64, f64)> = None;
    for &scheme in schemes {
        let time_s = objective.of(&scheme.message(channel, chunks));
        let handicap = if matches!(scheme, Scheme::Ec(_)) { 1.0 + WORTH } else { 1.0 };
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

    #[test]
    fn nothing_is_chosen_of_nothing() {
        let channel = Link::default().channel().unwrap();
        assert_eq!(choose(&channel, 1, Objective::Mean, &[]), None);
        let equal = [Scheme::SrRto, Scheme::SrNack];
        let lossless = Channel { loss: 0.0, ..channel };
        assert_eq!(choose(&lossless, 1, Objective::Mean, &equal).unwrap().0, Scheme::SrRto);
    }
}
