//! What comes to a rank: the part of an [`Engine`] that uses frames in the order of their numbers,
//! as far as they belong to the operation that runs.

use crate::consent::Consent;
use crate::engine::Engine;
use crate::env::{Bytes, Env, Slot};
use crate::frame::{FrameKind, Header, Notice, MEMORY};
use crate::mutants::left_out;
use crate::Rank;

impl Engine {
    /// A notice has come from a peer.
    pub fn on_notice(&mut self, peer: Rank, notice: u32, env: &mut impl Env) {
        self.progress += 1;
        let (stream, credit) = match Notice::decode(notice) {
            Notice::Frame { stream, .. } => (stream, false),
            Notice::Credit { stream, .. } => (stream, true),
        };
        if stream != MEMORY && stream >= self.config.rails {
            return self.broke(peer, 4, env);
        }
        let at = self.index(stream);
        match Notice::decode(notice) {
            Notice::Credit { count, .. } => {
                debug_assert!(credit);
                if self.peers[peer].outgoing[at].tx.on_credit(count).is_err() {
                    self.broke(peer, 5, env);
                }
            }
            Notice::Frame { seq, .. } => match self.peers[peer].incoming[at].on_frame(seq) {
                Ok(fresh) if fresh => self.consume(peer, at, env),
                Ok(_) if left_out!(self.config.mutant, NoDedup) => {
                    self.use_twice(peer, at, seq, env)
                }
                Ok(_) => {}
                Err(_) => self.broke(peer, 6, env),
            },
        }
    }

    /// The tag of an operation that has not begun here and of which something has come; of
    /// operations between two ranks.
    pub fn arrived_tag(&self, number: u64, env: &mut impl Env) -> Option<u64> {
        let streams = (0..self.peers.len())
            .flat_map(|peer| (0..self.peers[peer].incoming.len()).map(move |at| (peer, at)));
        streams.into_iter().find_map(|(peer, at)| {
            let seq = self.peers[peer].incoming[at].next()?;
            let header = Header::decode(&env.header(Slot { peer, stream: self.rail(at), seq }))?;
            let meant =
                header.seq == seq && header.operation == number && header.kind != FrameKind::Used;
            meant.then_some(header.tag)
        })
    }

    /// Left out in all but tests: that a frame is used once.
    fn use_twice(&mut self, peer: Rank, at: usize, seq: u32, env: &mut impl Env) {
        let stream = self.rail(at);
        let seq = crate::frame::widen(seq, self.peers[peer].incoming[at].counts().0);
        let header = Header::decode(&env.header(Slot { peer, stream, seq }));
        if header.is_none_or(|h| !self.take(peer, stream, &h, env)) {
            self.broke(peer, 7, env);
        }
    }

    /// Uses the frames of a stream that have come, as far as they belong to the operation that
    /// runs.
    pub(crate) fn consume(&mut self, peer: Rank, at: usize, env: &mut impl Env) {
        let stream = self.rail(at);
        while let (Some(seq), None) = (self.peers[peer].incoming[at].next(), &self.failure) {
            let Some(header) = Header::decode(&env.header(Slot { peer, stream, seq })) else {
                return self.broke(peer, 8, env);
            };
            if header.seq != seq {
                return self.broke(peer, 9, env);
            }
            match &self.run {
                // Its news is old: the operation is done here.
                Some(run) if header.kind == FrameKind::Used && header.operation != run.number => {}
                None if header.kind == FrameKind::Used => {}
                None => return,
                // Of an operation that is done here: its sender took that for something else, and
                // has done its part (two roots, say).
                Some(run) if header.operation < run.number => {
                    return self.tell_takes(header.operation, env)
                }
                Some(run) if header.operation != run.number => return,
                // Another receive is meant, which may be asked for yet: its caller chooses again,
                // or it is an error when time is over.
                Some(run) if header.kind != FrameKind::Used && header.tag != run.tag => {
                    self.misfit = Some(header.tag);
                    return;
                }
                Some(run)
                    if header.digest != run.digest && !left_out!(self.config.mutant, NoDigest) =>
                {
                    return self.tell_takes(header.operation, env);
                }
                Some(run) => {
                    let has_pairs = run.has_pairs;
                    if !self.take(peer, stream, &header, env) {
                        if !has_pairs {
                            return self.broke(peer, 10, env);
                        }
                        // The two may not agree about what the one sends the other. It stays where
                        // it is.
                        self.puzzle = Some((header.operation, peer, 10));
                        return self.tell_takes(header.operation, env);
                    }
                }
            }
            self.peers[peer].incoming[at].was_used();
            self.progress += 1;
            // Before the next frame: a receive that has become ready by this one wants what lies
            // aside for it, before more of it comes.
            if !self.ready.is_empty() && !left_out!(self.config.mutant, LateReady) {
                self.settle(env);
            }
        }
        if !self.ready.is_empty() {
            self.settle(env);
        }
    }

    /// A frame of the operation that runs. `false`: it does not belong there.
    fn take(&mut self, peer: Rank, stream: u8, header: &Header, env: &mut impl Env) -> bool {
        let Some(mut run) = self.run.take() else { return false };
        let fits = match header.kind {
            FrameKind::Used => match run.on_used(peer, header.lane, header.message) {
                Some(lane) => {
                    if let Some(lane) = lane {
                        let at = self.index(run.lanes[lane as usize].stream);
                        self.turns[at].push_back(lane);
                    }
                    true
                }
                None => false,
            },
            FrameKind::Agrees => {
                let consent = run.consent.as_mut();
                let told = consent.and_then(|c| c.hear(peer, header.message, header.offset));
                match told {
                    Some(told) => {
                        self.say(&run, told);
                        true
                    }
                    None => false,
                }
            }
            FrameKind::Data => match run.take(peer, header) {
                Some(taken) => {
                    let to = Bytes {
                        target: taken.target,
                        lane: taken.lane,
                        message: taken.message,
                        offset: header.offset,
                        len: u64::from(header.len),
                        total: header.total,
                    };
                    env.take(Slot { peer, stream, seq: header.seq }, &to);
                    if let Some(step) = taken.done {
                        self.received(&mut run, step);
                    }
                    header.len <= self.config.payload
                }
                None => false,
            },
        };
        let differs = run.consent.as_ref().is_some_and(Consent::differs);
        self.run = Some(run);
        if differs {
            self.tell_takes(header.operation, env);
        }
        fits
    }
}
