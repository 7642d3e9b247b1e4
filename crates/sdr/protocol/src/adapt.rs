//! Which scheme for the next message: by the model, for the path as the messages before it have
//! found it.
//!
//! Loss is estimated from what senders see: of Selective Repeat the chunks that were sent again, of
//! erasure coding the data chunks that had not come when the message was done. What was seen is
//! kept as long as it may be of one and the same loss (after ADWIN, Bifet and Gavaldà 2007): a row
//! of blocks, which grow with their age; where what is before a seam and what is behind it differ
//! by more than chance, the older part is forgotten, so a loss that changes is followed as soon as
//! it shows.

use std::collections::{HashMap, VecDeque};
use unbroken_sdr_model::choose::{candidates, choose_among, Objective};
use unbroken_sdr_model::{Channel, Scheme};

/// Chunks of a block, at least.
const BLOCK_CHUNKS: f64 = 64.0;
/// Blocks of an age, of which two make one of the next; and ages, of which each has twice as many
/// messages as the one before.
const BLOCKS_OF_AGE: usize = 3;
const AGES: u8 = 40;
/// Twice the logarithm of how much likelier two losses are than one, from which on it is two:
/// chance reaches it once in 16,000 looks.
const DIFFERENT: f64 = 16.0;
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

/// What a message meets for which a scheme is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// The round trip.
    pub rtt_us: u64,
    /// Time to inject a chunk, given or measured; 0: nobody knows, and it counts as nothing.
    pub injection_ns: u64,
    /// Chunks of the message.
    pub chunks: u64,
    /// Chunks of all messages under way, this one among them.
    pub all_chunks: u64,
    /// Parity chunks that fit beside it.
    pub parity_chunks: u64,
}

/// Choices that were made, by situations that are nearly the same. The model costs up to
/// milliseconds, and messages come faster.
#[derive(Clone, Debug, Default)]
pub struct Chosen(HashMap<([u64; 3], [i32; 4]), Scheme>);

/// So many choices are remembered.
const MOST_CHOICES: usize = 256;
/// Steps of a quantity within a factor of two: what is on one step is nearly the same.
const STEPS: f64 = 4.0;

impl Chosen {
    /// The scheme for a message, as [`Estimate::scheme`] finds it.
    pub fn scheme(&mut self, known: &Estimate, choice: Choice, at: &Situation) -> Scheme {
        let objective = match choice {
            Choice::Fixed(scheme) => return scheme,
            Choice::Adaptive(_) if !known.is_warm() => return known.scheme(choice, at),
            Choice::Adaptive(Objective::Mean) => 0.0f64,
            Choice::Adaptive(Objective::Quantile(share)) => share,
        };
        let step = |quantity: f64| (quantity.max(1e-12).log2() * STEPS).round() as i32;
        let nearly = [
            step(known.loss()),
            step(at.rtt_us as f64),
            step(at.injection_ns as f64),
            step(at.all_chunks as f64 / at.chunks.max(1) as f64),
        ];
        let key = ([at.chunks, at.parity_chunks, objective.to_bits()], nearly);
        if let Some(scheme) = self.0.get(&key) {
            return *scheme;
        }
        if self.0.len() >= MOST_CHOICES {
            self.0.clear();
        }
        let scheme = known.scheme(choice, at);
        self.0.insert(key, scheme);
        scheme
    }
}

/// What some messages have shown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Seen {
    sent: f64,
    lost: f64,
    age: u8,
}

impl Seen {
    fn add(&mut self, other: Seen) {
        self.sent += other.sent;
        self.lost += other.lost;
    }

    /// The logarithm of how likely it is at its own rate, but for what does not depend on the rate.
    fn likelihood(self) -> f64 {
        if self.lost > 0.0 {
            self.lost * (self.lost / self.sent).ln()
        } else {
            0.0
        }
    }
}

/// What is known of the loss.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Estimate {
    /// The oldest first.
    blocks: VecDeque<Seen>,
    /// Of all blocks, and what is too little for one yet.
    all: Seen,
    open: Seen,
}

impl Estimate {
    /// A message has shown so many chunks, of which so many were lost.
    pub fn note(&mut self, chunks: u64, lost: u64) {
        let seen = Seen { sent: chunks as f64, lost: lost as f64, age: 0 };
        self.open.add(seen);
        self.all.add(seen);
        if self.open.sent < BLOCK_CHUNKS {
            return;
        }
        self.blocks.push_back(std::mem::take(&mut self.open));
        self.merge();
        self.forget();
    }

    /// Makes one block of the two oldest of an age that has too many.
    fn merge(&mut self) {
        for age in 0..AGES {
            let mut of_age = (0..self.blocks.len()).filter(|i| self.blocks[*i].age == age);
            let Some(first) = of_age.next() else { return };
            if 1 + of_age.count() < BLOCKS_OF_AGE {
                return;
            }
            // Ages fall from the oldest to the newest, so the next is of the same.
            let Some(block) = self.blocks.remove(first) else { return };
            self.blocks[first].add(block);
            self.blocks[first].age = age + 1;
        }
    }

    /// Forgets what is older than a change.
    fn forget(&mut self) {
        if self.all.lost == 0.0 {
            return;
        }
        let all = self.all.likelihood();
        let (mut newer, mut seam) = (self.open, (DIFFERENT, 0));
        for index in (1..self.blocks.len()).rev() {
            newer.add(self.blocks[index]);
            let older =
                Seen { sent: self.all.sent - newer.sent, lost: self.all.lost - newer.lost, age: 0 };
            let different = 2.0 * (newer.likelihood() + older.likelihood() - all);
            if different > seam.0 {
                seam = (different, index);
            }
        }
        if seam.1 > 0 {
            self.blocks.drain(..seam.1);
            self.all = self.open;
            self.blocks.iter().for_each(|block| self.all.add(*block));
        }
    }

    /// Probability that a chunk is lost. What has not been seen is taken for half an event.
    pub fn loss(&self) -> f64 {
        ((self.all.lost + 0.5) / (self.all.sent + 1.0)).min(0.9)
    }

    /// Whether enough has been seen for a choice.
    fn is_warm(&self) -> bool {
        self.all.sent >= WARM_UP_CHUNKS
    }

    /// The scheme for a message.
    pub fn scheme(&self, choice: Choice, at: &Situation) -> Scheme {
        let objective = match choice {
            Choice::Fixed(scheme) => return scheme,
            Choice::Adaptive(_) if !self.is_warm() => return Scheme::SrNack,
            Choice::Adaptive(objective) => objective,
        };
        let channel = Channel {
            injection_s: (at.injection_ns.max(1)) as f64 / 1e9,
            rtt_s: at.rtt_us as f64 / 1e6,
            loss: self.loss(),
        };
        let fits = |scheme: &Scheme| scheme.parity(&channel, at.chunks) <= at.parity_chunks;
        let schemes: Vec<Scheme> = candidates().into_iter().filter(fits).collect();
        choose_among(&channel, at.chunks, at.all_chunks, objective, &schemes)
            .map_or(Scheme::SrNack, |(scheme, _)| scheme)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks are few however many messages there were, and hold all of them; a change leaves only
    /// what is behind it.
    #[test]
    fn what_is_older_than_a_change_is_forgotten() {
        let mut e = Estimate::default();
        (0..100_000).for_each(|i| e.note(1 + i % 200, u64::from(i % 100 == 0)));
        let sent: f64 = e.blocks.iter().map(|block| block.sent).sum();
        assert_eq!(sent + e.open.sent, e.all.sent);
        assert!(
            e.blocks.len() < 2 * usize::from(AGES) && (e.loss() / 1e-4 - 1.0).abs() < 0.2,
            "{} {}",
            e.blocks.len(),
            e.loss()
        );
        (0..3).for_each(|_| e.note(2048, 20));
        assert!((e.loss() / 1e-2 - 1.0).abs() < 0.2, "{}", e.loss());
        (0..100).for_each(|_| e.note(2048, 0));
        assert!(e.loss() < 3e-6, "{}", e.loss());
    }

    /// What is remembered is bounded, says what was worked out, and never another message's choice.
    #[test]
    fn what_was_chosen_is_remembered() {
        let (mut e, mut chosen) = (Estimate::default(), Chosen::default());
        let adaptive = Choice::Adaptive(Objective::Mean);
        let at = |rtt_us, chunks| Situation {
            rtt_us,
            injection_ns: 1311,
            chunks,
            all_chunks: chunks,
            parity_chunks: chunks,
        };
        assert_eq!(chosen.scheme(&e, adaptive, &at(25_000, 2048)), Scheme::SrNack, "not warm");
        (0..64).for_each(|_| e.note(2048, 4));
        for rtt_us in (0..2000).map(|i| 10 + i * 100) {
            for chunks in [1, 16, 2048] {
                let at = at(rtt_us, chunks);
                let ours = chosen.scheme(&e, adaptive, &at);
                let channel =
                    Channel { injection_s: 1.311e-6, rtt_s: rtt_us as f64 / 1e6, loss: e.loss() };
                let of = |scheme: Scheme| scheme.message(&channel, chunks).mean_s();
                let best = e.scheme(adaptive, &at);
                assert!(of(ours) <= 1.1 * of(best), "{rtt_us} us, {chunks}: {ours}, not {best}");
                assert!(chosen.0.len() <= MOST_CHOICES);
            }
        }
        let none = Situation { parity_chunks: 0, ..at(25_000, 2048) };
        assert!(matches!(chosen.scheme(&e, adaptive, &at(25_000, 2048)), Scheme::Ec(_)));
        assert_eq!(chosen.scheme(&e, adaptive, &none), Scheme::SrNack);
        let fixed = Choice::Fixed(Scheme::SrRto);
        assert_eq!(chosen.scheme(&e, fixed, &none), Scheme::SrRto);
    }

    /// The paper's link, 128 MiB: few losses want Selective Repeat, many a code; and what changes
    /// is followed.
    #[test]
    fn the_choice_follows_the_loss() {
        let mut e = Estimate::default();
        let adaptive = Choice::Adaptive(Objective::Mean);
        let at = Situation {
            rtt_us: 25_000,
            injection_ns: 1311,
            chunks: 2048,
            all_chunks: 2048,
            parity_chunks: 0,
        };
        let scheme =
            |e: &Estimate, parity_chunks| e.scheme(adaptive, &Situation { parity_chunks, ..at });
        assert_eq!(scheme(&e, 2048), Scheme::SrNack, "nothing is known");
        (0..64).for_each(|_| e.note(2048, 0));
        assert_eq!(scheme(&e, 2048), Scheme::SrNack);
        (0..64).for_each(|_| e.note(2048, 4));
        assert!(matches!(scheme(&e, 2048), Scheme::Ec(_)));
        assert_eq!(scheme(&e, 0), Scheme::SrNack, "without room for parity");
        (0..1000).for_each(|_| e.note(2048, 0));
        assert_eq!(scheme(&e, 2048), Scheme::SrNack);
        assert_eq!(e.scheme(Choice::Fixed(Scheme::SrRto), &at), Scheme::SrRto);
    }
}
