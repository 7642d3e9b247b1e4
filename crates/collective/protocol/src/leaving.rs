//! What leaves a rank: the part of an [`Engine`] that lets lanes take turns, fills slots, posts
//! them and gives credit.

use crate::engine::Engine;
use crate::env::{Env, Slot};
use crate::frame::{FrameKind, Header, Notice, HEADER_BYTES, MEMORY, OUT_OF_BAND};
use crate::message::Message;
use crate::mutants::left_out;
use crate::paths::{State, DETOURS};
use crate::Rank;

/// Notices on their way over a path, beyond a rail's window: credit waits where there are more.
const MAX_POSTED: u32 = 128;

impl Engine {
    /// Sends what can be sent.
    pub fn pump(&mut self, env: &mut impl Env) {
        if self.failure.is_some() {
            return;
        }
        for peer in 0..self.peers.len() {
            for at in 0..self.peers[peer].outgoing.len() {
                self.pump_control(peer, at, env);
                self.pump_credit(peer, at, env);
                self.post(peer, at, env);
            }
            self.pump_pieces(peer, env);
        }
        for at in 0..self.turns.len() {
            self.take_turns(at, env);
        }
        self.settle(env);
    }

    /// Lanes of a rail send, one message after the other. One that cannot go on lets the next have
    /// its turn.
    fn take_turns(&mut self, at: usize, env: &mut impl Env) {
        let mut blocked = 0;
        while blocked < self.turns[at].len() {
            let Some(mut run) = self.run.take() else { return };
            let lane = self.turns[at][0];
            let (peer, stream) = (run.lanes[lane as usize].peer, run.lanes[lane as usize].stream);
            let out = &self.peers[peer].outgoing[at];
            let room = out.tx.has_room() || left_out!(self.config.mutant, NoCredit);
            let by = out.tx.carrier().map(|rail| self.index(rail));
            let may = by.is_some_and(|by| !self.is_full(by)) && out.tx.to_post().is_none();
            // A peer that takes frames slowly, since others send to it, too, does not hold up what
            // goes elsewhere.
            let others = self.turns[at].iter().any(|lane| run.lanes[*lane as usize].peer != peer);
            let may = may && !(others && by.is_some_and(|by| self.has_half(peer, by)));
            if !room || !may {
                self.turns[at].rotate_left(1);
                blocked += 1;
                self.run = Some(run);
                continue;
            }
            blocked = 0;
            let out = &mut self.peers[peer].outgoing[at];
            let part = run.part(lane, self.config.payload);
            let header = Header {
                kind: FrameKind::Data,
                seq: out.tx.next(),
                operation: run.number,
                digest: run.digest,
                lane: part.lane,
                message: part.message,
                offset: part.offset,
                total: part.total,
                len: part.len,
                tag: run.tag,
            };
            let slot = Slot { peer, stream, seq: header.seq };
            env.stage(slot, &header, Some((part.data, part.offset, part.len)));
            out.tx.stage(part.len + HEADER_BYTES as u32);
            self.progress += 1;
            if let Some(step) = run.was_sent(lane, &part) {
                self.turns[at].pop_front();
                if run.enqueue(lane) {
                    self.turns[at].push_back(lane);
                }
                run.finish(step, &mut self.ready);
            }
            self.run = Some(run);
            self.post(peer, at, env);
            if !self.ready.is_empty() {
                self.settle(env);
            }
        }
    }

    /// Puts into slots what the peer wants to hear of messages that were used, and of agreement.
    fn pump_control(&mut self, peer: Rank, at: usize, env: &mut impl Env) {
        let stream = self.rail(at);
        let out = &mut self.peers[peer].outgoing[at];
        while let Some(header) = out.control.front().copied() {
            // Slots are there once a path is.
            if !out.tx.has_room() || out.tx.carrier().is_none() {
                return;
            }
            out.control.pop_front();
            let header = Header { seq: out.tx.next(), ..header };
            env.stage(Slot { peer, stream, seq: header.seq }, &header, None);
            out.tx.stage(HEADER_BYTES as u32);
        }
    }

    /// Posts what is in slots.
    fn post(&mut self, peer: Rank, at: usize, env: &mut impl Env) {
        let stream = self.rail(at);
        loop {
            let out = &mut self.peers[peer].outgoing[at];
            let (Some(rail), Some((seq, bytes))) = (out.tx.carrier(), out.tx.to_post()) else {
                return;
            };
            let by = self.index(rail);
            let posted = self.peers[peer].paths[by].posted;
            if rail != MEMORY && (self.is_full(by) || posted >= MAX_POSTED) {
                return;
            }
            if rail == OUT_OF_BAND {
                self.post_aside(peer, stream, seq, bytes);
            } else if !env.post(Slot { peer, stream, seq }, rail, bytes) {
                return self.fail_path(peer, rail, env);
            }
            self.peers[peer].outgoing[at].tx.was_posted();
            if rail != MEMORY {
                self.was_posted(peer, by, bytes);
            }
        }
    }

    /// Something was posted over a path.
    fn was_posted(&mut self, peer: Rank, at: usize, bytes: u32) {
        let path = &mut self.peers[peer].paths[at];
        path.posted += 1;
        self.on_way[at] += 1;
        self.measure_post(peer, at, bytes);
    }

    /// Tells the peer what was used of a stream, if it should know, over the path that carries the
    /// stream or any other.
    fn pump_credit(&mut self, peer: Rank, at: usize, env: &mut impl Env) {
        let Some(count) = self.peers[peer].incoming[at].credit_due() else { return };
        let rails = usize::from(self.config.rails);
        let detours = rails + 1..rails + 1 + DETOURS;
        let up = |k: &usize| self.peers[peer].paths[*k].state == State::Up;
        let ways = (0..=rails).map(|k| (at + k) % (rails + 1)).chain(detours);
        let Some(by) = ways.into_iter().find(up) else { return };
        if self.peers[peer].paths[by].posted >= MAX_POSTED {
            return;
        }
        let (stream, rail) = (self.rail(at), self.rail(by));
        let notice = Notice::credit(stream, count).encode();
        if rail == OUT_OF_BAND {
            let life = self.peers[peer].paths[by].life;
            env.tell(peer, &Message::Notice { life, notice });
            return self.peers[peer].incoming[at].was_credited(count);
        }
        if !env.notify(peer, rail, notice) {
            return self.fail_path(peer, rail, env);
        }
        if rail != MEMORY {
            self.was_posted(peer, by, 0);
        }
        self.peers[peer].incoming[at].was_credited(count);
    }

    /// Something that was posted over a path is complete: a frame of a stream, or a notice alone.
    pub fn on_sent(&mut self, peer: Rank, rail: u8, stream: Option<u8>) {
        let at = self.index(rail);
        if let Some(stream) = stream {
            let of = self.index(stream);
            let tx = &mut self.peers[peer].outgoing[of].tx;
            if tx.carrier() == Some(rail) {
                tx.was_sent();
            }
        }
        let path = &mut self.peers[peer].paths[at];
        if path.posted > 0 {
            path.posted -= 1;
            self.on_way[at] -= 1;
            self.measure(peer, rail);
        }
    }
}
