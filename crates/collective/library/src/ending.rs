//! The end of a communicator at a rank: what is given up, what is waited for, what others hear.
//!
//! A rank that ends first says how many operations it has begun (*ends*): of all ranks, and with
//! each other one. Who is in another operation with it, or begins one, need not wait for it. Of its
//! own operations it gives up receives of which nothing has come: nobody will ask for them. The
//! others are done, or fail as ever; then it has *left*.
//!
//! | operation with a rank that ends | then |
//! | --- | --- |
//! | of all ranks, which it has not begun | the communicator is broken, at all ranks |
//! | between two, which it has not begun | it is over and undone; the communicator goes on |
//! | that it has begun | done |
//! | a receive from any rank, when all others end and have sent all | over, undone |

use unbroken_collective_protocol::message::{Message, News as Word};
use unbroken_collective_protocol::{Engine, Failure, Rank};

use crate::channel::{ends, Undone, ALL};
use crate::state::State;

/// What a rank has begun that begins nothing more.
#[derive(Clone, Debug)]
pub(crate) struct End {
    /// Operations of all ranks.
    begun: u64,
    /// With whom, how many it sends, how many it receives.
    pairs: Vec<(Rank, u64, u64)>,
}

impl State {
    /// Whether this rank begins nothing more.
    pub(crate) fn has_ended(&self) -> bool {
        self.ends[self.me].is_some()
    }

    /// This rank begins nothing more.
    pub(crate) fn end(&mut self) {
        if self.has_ended() {
            return;
        }
        self.forgo();
        let begun = self.channels[0].asked_for();
        let mut pairs: Vec<(Rank, u64, u64)> = Vec::new();
        for channel in &self.channels[1..] {
            let Some((from, to)) = ends(channel.name, self.ranks()) else { continue };
            let (peer, sends) = if from == self.me { (to, true) } else { (from, false) };
            let at = pairs.iter().position(|pair| pair.0 == peer).unwrap_or_else(|| {
                pairs.push((peer, 0, 0));
                pairs.len() - 1
            });
            let count = if sends { &mut pairs[at].1 } else { &mut pairs[at].2 };
            *count = channel.asked_for();
        }
        self.ends[self.me] = Some(End { begun, pairs: pairs.clone() });
        if self.failure().is_some() {
            return; // whoever has broken it says why, and that must not be overtaken
        }
        self.with(0, |engine, env| engine.end(begun, pairs.clone(), env));
        self.tell_far(&Word::Ends { rank: self.me, begun, pairs });
    }

    /// Gives up receives of which nothing has come.
    fn forgo(&mut self) {
        let why = "the communicator was ended before anything was received";
        for at in 1..self.channels.len() {
            let receives =
                ends(self.channels[at].name, self.ranks()).is_some_and(|(_, to)| to == self.me);
            if receives && self.channels[at].take_back() {
                self.channels[at].give_up(&Undone::Refused(why.into()));
            }
        }
        self.any.end(why);
    }

    /// A rank begins nothing more.
    pub(crate) fn ends(&mut self, rank: Rank, begun: u64, pairs: Vec<(Rank, u64, u64)>) {
        let Some(end) = self.ends.get_mut(rank) else { return };
        *end = Some(End { begun, pairs });
        for at in 1..self.channels.len() {
            self.tell_end(at);
            self.close(at);
        }
    }

    /// Tells the engine of a channel of two that the other rank begins nothing more, if it does not.
    pub(crate) fn tell_end(&mut self, at: usize) {
        let Some((from, to)) = ends(self.channels[at].name, self.ranks()) else { return };
        let (me, other) = (self.me, if from == self.me { to } else { from });
        let Some(end) = &self.ends[other] else { return };
        let with_me = end.pairs.iter().find(|(peer, ..)| *peer == me);
        let begun = with_me.map_or(0, |(_, sends, receives)| match other == from {
            true => *sends,
            false => *receives,
        });
        let peer = usize::from(other > me);
        self.channels[at].engine.set_end(peer, begun);
    }

    /// Ends the operations of a channel of two in which the other rank does not take part.
    pub(crate) fn close(&mut self, at: usize) {
        let channel = &mut self.channels[at];
        if at == 0 || channel.waiting() == 0 {
            return;
        }
        let Some((peer, _)) = channel.engine.who_left() else { return };
        let rank = channel.ranks[peer];
        let done = self.ends[rank].as_ref().map_or(0, |end| end.begun);
        channel.give_up(&Undone::Left(Failure::Left { rank, done }));
    }

    /// Ends receives from any rank, if all others have ended and sent what they had to send.
    pub(crate) fn forsake_any(&mut self) {
        if self.any.waiting() == 0 {
            return;
        }
        let (me, ranks) = (self.me, self.ranks());
        let sends = |rank: Rank, end: &End| {
            let with_me = end.pairs.iter().find(|(peer, ..)| *peer == me);
            let sent = with_me.map_or(0, |(_, sends, _)| *sends);
            let received = self.channels[1..]
                .iter()
                .find(|channel| ends(channel.name, ranks) == Some((rank, me)))
                .map_or(0, |channel| channel.asked_for());
            sent > received
        };
        let mut others = (0..ranks).filter(|rank| *rank != me);
        if others.all(|rank| self.ends[rank].as_ref().is_some_and(|end| !sends(rank, end))) {
            self.any.end("all other ranks have left the communicator");
        }
    }

    /// What others are to know of this rank that has no more to do: why, where operations of all
    /// ranks cannot go on. That it has left would be taken for the cause where it comes first.
    fn last_word(&self) -> Word {
        match self.channels[0].engine.failure() {
            Some(failure) => Word::Broken(failure.clone()),
            None => Word::Left { rank: self.me, done: self.channels[0].begun() },
        }
    }

    /// This rank has no more to do.
    pub(crate) fn leave(&mut self) {
        let last = self.last_word();
        for at in 0..self.channels.len() {
            self.with(at, |engine, env| engine.leave(env));
        }
        self.tell_far(&last);
    }

    /// Tells all to whom there is a connection, but those who hear news by the tree.
    fn tell_far(&mut self, word: &Word) {
        let neighbours: Vec<Rank> = Engine::neighbours(self.me, self.ranks()).collect();
        for rank in self.oob.connected() {
            if !neighbours.contains(&rank) {
                self.oob.tell(rank, ALL, &Message::News(word.clone()));
            }
        }
    }
}
