//! Ranks that disagree about an operation: the part of an [`Engine`] that asks all ranks and
//! decides ([`crate::agree`]).

use crate::agree::{first_that_differs, first_unequal_pair, Terms, Unequal};
use crate::engine::{Engine, HISTORY};
use crate::env::Env;
use crate::message::News;
use crate::{Failure, Rank};

/// How long to wait for the descriptions of a disputed operation.
const DISPUTE_US: u64 = 1_000_000;

impl Engine {
    pub(crate) fn hear(&mut self, rank: Rank, number: u64, terms: Terms) {
        let ranks = self.peers.len();
        if rank < ranks {
            self.said.entry(number).or_insert_with(|| vec![None; ranks])[rank] = Some(terms);
            if self.said.len() > HISTORY {
                self.said.pop_first();
            }
        }
    }

    /// Sends this rank's terms of an operation to all ranks, once.
    pub(crate) fn tell_takes(&mut self, number: u64, env: &mut impl Env) {
        let Some((_, terms)) = self.history.iter().find(|(n, _)| *n == number).cloned() else {
            return;
        };
        if self.told.insert(number, self.now_us).is_some() {
            return;
        }
        if self.told.len() > HISTORY {
            self.told.pop_first();
        }
        let rank = self.config.me;
        self.hear(rank, number, terms.clone());
        self.spread(None, &News::Takes { rank, number, terms }, env);
        self.judge(number, env);
    }

    /// The ranks that have not sent their terms of an operation; empty if they were not asked.
    pub(crate) fn silent(&self, number: u64) -> Vec<Rank> {
        let Some(said) = self.said.get(&number).filter(|_| self.told.contains_key(&number)) else {
            return Vec::new();
        };
        (0..said.len()).filter(|rank| said[*rank].is_none()).collect()
    }

    /// Finds the ranks that differ, once all have answered or the time is over.
    pub(crate) fn judge(&mut self, number: u64, env: &mut impl Env) {
        let Some(said) = self.said.get(&number) else { return };
        let waited = self.told.get(&number).is_some_and(|since| self.now_us > since + DISPUTE_US);
        let complete = said.iter().all(Option::is_some);
        if !waited && !complete {
            return;
        }
        match differs(number, said) {
            // The receive that is meant may be asked for yet, until time is over.
            Some(Failure::Differs { its, others, .. }) if its.tag != others.tag => {}
            Some(failure) => self.fail(failure, env),
            None => {
                // All take it for the same, and yet something came that does not belong to it.
                let puzzle = self.puzzle.filter(|(of, ..)| complete && *of == number);
                if let Some((_, rank, what)) = puzzle {
                    self.broke(rank, what, env);
                }
            }
        }
    }
}

/// The ranks that differ, among the terms of an operation.
pub(crate) fn differs(number: u64, said: &[Option<Terms>]) -> Option<Failure> {
    let of = |rank: Rank| said[rank].as_ref().map(|terms| terms.description);
    if let Some((first, other)) = first_that_differs(said) {
        return Some(Failure::Differs {
            number,
            first,
            its: of(first)?,
            other,
            others: of(other)?,
        });
    }
    let Unequal { from, to, sent, awaited } = first_unequal_pair(said)?;
    Some(Failure::Counts { number, data: of(from)?.data, from, to, sent, awaited })
}
