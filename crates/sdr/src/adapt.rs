//! Which scheme for the next message: by the model, for the path as the messages before it have found it.
//!
//! Loss is estimated from what senders see: of Selective Repeat the chunks that were sent again, of erasure coding the data chunks that had not come when the
//! message was done. Older messages count less and less, chunk by chunk, so that a loss that changes is followed.

use unbroken_model::choose::{candidates, choose, Objective};
use unbroken_model::{Channel, Scheme};

/// Chunks after which what was seen before counts half.
const HALF_LIFE_CHUNKS: f64 = 65_536.0;
/// Messages for which nothing is chosen yet.
const WARM_UP_CHUNKS: f64 = 32.0;

/// How the scheme of a write is found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// This one.
    Fixed(Scheme),
    /// The one that the model expects to be the best.
    Adaptive(Objective),
}

/// What is known of the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    sent: f64,
    lost: f64,
}

impl Estimate {
    /// A message has shown so many chunks, of which so many were lost.
    pub fn note(&mut self, chunks: u64, lost: u64) {
        let kept = (-(chunks as f64) / HALF_LIFE_CHUNKS * std::f64::consts::LN_2).exp();
        self.sent = self.sent * kept + chunks as f64;
        self.lost = self.lost * kept + lost as f64;
    }

    /// Probability that a chunk is lost. What has not been seen is taken for half an event.
    pub fn loss(&self) -> f64 {
        ((self.lost + 0.5) / (self.sent + 1.0)).min(0.9)
    }

    /// The scheme for a message of so many chunks; `parity_chunks` fit beside it.
    pub fn scheme(&self, choice: Choice, rtt_us: u64, injection_ns: u64, chunks: u64, parity_chunks: u64) -> Scheme {
        let objective = match choice {
            Choice::Fixed(scheme) => return scheme,
            Choice::Adaptive(_) if self.sent < WARM_UP_CHUNKS => return Scheme::SrNack,
            Choice::Adaptive(objective) => objective,
        };
        let channel =
            Channel { injection_s: (injection_ns.max(1)) as f64 / 1e9, rtt_s: rtt_us as f64 / 1e6, loss: self.loss() };
        let fits = |scheme: &Scheme| scheme.parity(&channel, chunks) <= parity_chunks;
        let schemes: Vec<Scheme> = candidates().into_iter().filter(fits).collect();
        choose(&channel, chunks, objective, &schemes).map_or(Scheme::SrNack, |(scheme, _)| scheme)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paper's link, 128 MiB: few losses want Selective Repeat, many a code; and what changes is followed.
    #[test]
    fn the_choice_follows_the_loss() {
        let mut e = Estimate::default();
        let adaptive = Choice::Adaptive(Objective::Mean);
        let scheme = |e: &Estimate, parity| e.scheme(adaptive, 25_000, 1311, 2048, parity);
        assert_eq!(scheme(&e, 2048), Scheme::SrNack, "nothing is known");
        (0..64).for_each(|_| e.note(2048, 0));
        assert_eq!(scheme(&e, 2048), Scheme::SrNack);
        (0..64).for_each(|_| e.note(2048, 4));
        assert!(matches!(scheme(&e, 2048), Scheme::Ec(_)));
        assert_eq!(scheme(&e, 0), Scheme::SrNack, "without room for parity");
        (0..1000).for_each(|_| e.note(2048, 0));
        assert_eq!(scheme(&e, 2048), Scheme::SrNack);
        assert_eq!(e.scheme(Choice::Fixed(Scheme::SrRto), 1, 1, 1, 0), Scheme::SrRto);
    }
}
