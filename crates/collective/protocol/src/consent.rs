//! How ranks agree to an operation whose data alone does not show that all take it for the same.
//!
//! An operation in which each rank's result depends on what every other rank sends (AllReduce, say)
//! is done at a rank only if all agree: a frame with another digest is not taken, and all that
//! depends on it waits. Others (two ranks may each take themselves for the root of a Broadcast; who
//! has nothing to send sends nothing) are over only when this has gone through the tree of news:
//! each rank tells its father once its sons have told it, and rank 0 then tells all. It runs beside
//! the data.
//!
//! What is told has the operation's digest, as data has, and a checksum. To that each rank adds what
//! it sends to each other rank, and takes off what it awaits from each, so that it comes to 0 if
//! every pair agrees.
//!
//! A transfer of nothing between two ranks is agreed to by its sender, and is done at the receiver
//! when that has come: so a receiver that awaits something finds out.

use crate::agree::Agreed;
use crate::tree;
use crate::Rank;

/// Towards rank 0, and from there, in a frame.
const UP: u32 = 0;
const DOWN: u32 = 1;

/// What a rank tells another: whom, in which direction, the checksum.
pub(crate) type Told = (Rank, u32, u64);

/// How far the agreement to an operation has come at a rank.
#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// These sons have not spoken.
    Gathers(Vec<Rank>),
    /// The father was told, who has not answered.
    Waits,
    Agreed,
    /// The checksum says that a pair does not agree.
    Differs,
}

/// The agreement to an operation, as one rank sees it.
#[derive(Debug)]
pub(crate) struct Consent {
    sons: Vec<Rank>,
    father: Option<Rank>,
    /// The father answers when all have agreed.
    answers: bool,
    sum: u64,
    stage: Stage,
}

impl Consent {
    /// What has to be agreed to of an operation; `None`: its data shows it.
    pub(crate) fn of(agreed: &Agreed, me: Rank, ranks: usize) -> Option<Consent> {
        let (father, sons, answers, sum) = match *agreed {
            Agreed::Data => return None,
            Agreed::All(sum) => {
                let father = tree::father(me);
                let sons = tree::neighbours(me, ranks).filter(|rank| Some(*rank) != father);
                (father, sons.collect(), true, sum)
            }
            Agreed::Sender { from, to } if me == from => (Some(to), Vec::new(), false, 0),
            Agreed::Sender { from, to } if me == to => (None, vec![from], false, 0),
            Agreed::Sender { .. } => return None,
        };
        let stage = Stage::Gathers(Vec::clone(&sons));
        Some(Consent { sons, father, answers, sum, stage })
    }

    /// Whether the operation may be over.
    pub(crate) fn is_agreed(&self) -> bool {
        self.stage == Stage::Agreed
    }

    /// Whether two ranks do not agree about what they exchange.
    pub(crate) fn differs(&self) -> bool {
        self.stage == Stage::Differs
    }

    /// Whether nothing was heard yet that this rank waits for.
    pub(crate) fn is_untouched(&self) -> bool {
        matches!(&self.stage, Stage::Gathers(left) if left.len() == self.sons.len())
    }

    /// A rank that is waited for.
    pub(crate) fn waits_for(&self) -> Option<Rank> {
        match &self.stage {
            Stage::Gathers(left) => left.first().copied(),
            Stage::Waits => self.father,
            Stage::Agreed | Stage::Differs => None,
        }
    }

    /// Whom this rank speaks to.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = Rank> + '_ {
        let sons = self.sons.iter().copied().filter(|_| self.answers);
        self.father.into_iter().chain(sons)
    }

    /// The operation begins: what is to be told now.
    pub(crate) fn begin(&mut self) -> Vec<Told> {
        self.go_on()
    }

    /// A rank has spoken: what is to be told now. `None`: it had nothing to say.
    pub(crate) fn hear(&mut self, from: Rank, direction: u32, sum: u64) -> Option<Vec<Told>> {
        match &mut self.stage {
            Stage::Gathers(left) if direction == UP => {
                let at = left.iter().position(|rank| *rank == from)?;
                left.swap_remove(at);
                self.sum = self.sum.wrapping_add(sum);
                Some(self.go_on())
            }
            Stage::Waits if direction == DOWN && self.father == Some(from) => {
                Some(self.conclude(sum))
            }
            _ => None,
        }
    }

    fn go_on(&mut self) -> Vec<Told> {
        match (&self.stage, self.father) {
            (Stage::Gathers(left), _) if !left.is_empty() => Vec::new(),
            (_, Some(father)) => {
                self.stage = if self.answers { Stage::Waits } else { Stage::Agreed };
                vec![(father, UP, self.sum)]
            }
            (_, None) => self.conclude(self.sum),
        }
    }

    fn conclude(&mut self, sum: u64) -> Vec<Told> {
        self.stage = if sum == 0 { Stage::Agreed } else { Stage::Differs };
        let sons = self.sons.iter().filter(|_| self.answers);
        sons.map(|son| (*son, DOWN, sum)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// All ranks speak until nobody has anything to say; who has agreed.
    fn play(sums: &[u64]) -> Vec<Consent> {
        let ranks = sums.len();
        let of = |me: Rank| Consent::of(&Agreed::All(sums[me]), me, ranks).unwrap();
        let mut all: Vec<Consent> = (0..ranks).map(of).collect();
        let mut said: VecDeque<(Rank, Told)> = VecDeque::new();
        for rank in (0..ranks).rev() {
            said.extend(all[rank].begin().into_iter().map(|told| (rank, told)));
        }
        while let Some((from, (to, direction, sum))) = said.pop_front() {
            assert!(all[from].listeners().any(|rank| rank == to));
            let more = all[to].hear(from, direction, sum).unwrap();
            said.extend(more.into_iter().map(|told| (to, told)));
        }
        all
    }

    #[test]
    fn all_agree_or_all_differ() {
        for ranks in 1..20 {
            let mut sums = vec![0u64; ranks];
            (sums[0], sums[ranks - 1]) = (sums[0].wrapping_sub(7), sums[ranks - 1].wrapping_add(7));
            let sums = if ranks == 1 { vec![0] } else { sums };
            assert!(play(&sums).iter().all(Consent::is_agreed), "{ranks}");
            let mut wrong = sums;
            wrong[ranks / 2] += 1;
            assert!(play(&wrong).iter().all(Consent::differs), "{ranks}");
        }
    }

    #[test]
    fn one_that_has_not_begun_keeps_all_waiting() {
        let mut first = Consent::of(&Agreed::All(0), 0, 3).unwrap();
        assert_eq!((first.begin(), first.waits_for()), (Vec::new(), Some(1)));
        assert_eq!(first.hear(2, UP, 0), Some(Vec::new()));
        assert!(!first.is_agreed());
        assert_eq!(first.hear(2, UP, 0), None, "it has spoken");
        assert_eq!(first.hear(1, DOWN, 0), None, "it is no father");
        assert_eq!(first.hear(1, UP, 0), Some(vec![(1, DOWN, 0), (2, DOWN, 0)]));
        assert!(first.is_agreed());
    }

    #[test]
    fn nothing_is_sent_by_who_waits_for_nobody() {
        let of = |me| Consent::of(&Agreed::Sender { from: 1, to: 0 }, me, 3);
        let (mut to, mut from) = (of(0).unwrap(), of(1).unwrap());
        assert!(of(2).is_none());
        assert_eq!(from.begin(), vec![(0, UP, 0)]);
        assert!(from.is_agreed() && to.begin().is_empty() && to.is_untouched());
        assert_eq!(to.hear(1, UP, 0), Some(Vec::new()));
        assert!(to.is_agreed());
    }
}
