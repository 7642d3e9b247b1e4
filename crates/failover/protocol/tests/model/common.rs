//! What the two ends share: the network, and what has become of their work.
//!
//! Promises, checked wherever something is executed or completes: each SEND, atomic and NO_REPLAY
//! request is executed at most once, and every other too where the peer counts exactly; without
//! exact counts a WRITE runs again only while no receive behind it was consumed. Nothing is
//! executed before what was posted earlier (READs may be read again), nothing fenced before its
//! READ is complete. Sends and receives complete once, in order; a send only when it was executed.
//! A program gets no error but for a cause that the case allows, or after a crash; and then for all
//! that it has posted. A planned switch alone replays nothing and fails nothing.

use crate::case::{Case, MAX_OPS};
use crate::device::Life;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use unbroken_failover_protocol::Message;
use unbroken_types::SendFlags;

/// What has become of an end's own requests, and what its peer's have done to it.
#[derive(Clone, Copy, Debug, Default, Hash)]
pub struct App {
    pub turn: usize,
    pub posted: u8,
    /// Sends that have completed, and receives: in order, so a number is enough.
    pub done: u8,
    pub recvs: u8,
    pub received: u8,
    /// A completion was an error.
    pub failed: bool,
    pub ended: bool,
    /// How often each request of the peer was executed here.
    pub ran: [u8; MAX_OPS],
}

/// Packets of one life on their way: its requests, or its answers. (A request that finds no receive
/// holds up no answers.)
#[derive(Clone, Debug, Hash)]
pub struct Channel {
    pub from: usize,
    pub life: u32,
    pub answers: bool,
    pub to: u32,
    pub rail: u8,
    /// The numbers of the requests.
    pub packets: Vec<u8>,
}

impl Channel {
    fn key(&self) -> (usize, u32, bool) {
        (self.from, self.life, self.answers)
    }
}

/// What the two ends share.
#[derive(Clone, Debug, Default)]
pub struct Common {
    pub apps: [App; 2],
    pub channels: Vec<Channel>,
    /// All that was ever said: a hash, to whom, what. Sorted.
    pub said: Vec<(u64, usize, Arc<Message>)>,
    /// By end: rails on which what it sends is lost, NICs that are dead, as bits.
    pub mute: [u8; 2],
    pub dead: [u8; 2],
    pub crashed: Option<usize>,
    pub doubts_left: u8,
    pub cuts_left: u8,
    pub deaths_left: u8,
    pub plans_left: [u8; 2],
    /// A promise was broken.
    pub wrong: Option<String>,
}

impl Common {
    pub fn wrong(&mut self, what: String) {
        self.wrong.get_or_insert(what);
    }

    pub fn crashed(&self, end: usize) -> bool {
        self.crashed == Some(end)
    }

    pub fn nic_dead(&self, end: usize, rail: u8) -> bool {
        self.dead[end] & 1 << rail != 0
    }

    /// What this end sends over the rail comes through.
    pub fn carries(&self, from: usize, rail: u8) -> bool {
        (self.mute[from] | self.dead[0] | self.dead[1]) & 1 << rail == 0
    }

    pub fn carries_both(&self, rail: u8) -> bool {
        self.carries(0, rail) && self.carries(1, rail)
    }

    pub fn say(&mut self, to: usize, message: &Message) {
        let mut hasher = DefaultHasher::new();
        (to, message).hash(&mut hasher);
        let name = hasher.finish();
        if let Err(at) = self.said.binary_search_by_key(&name, |s| s.0) {
            self.said.insert(at, (name, to, Arc::new(*message)));
        }
    }

    // ---- data ----

    /// A life sends a request, or an answer to one.
    pub fn transmit(&mut self, from: usize, life: &Life, answers: bool, id: u8) {
        if !self.carries(from, life.rail) {
            return;
        }
        let channel = Channel {
            from,
            life: life.qpn,
            answers,
            to: life.dest,
            rail: life.rail,
            packets: vec![id],
        };
        match self.channels.binary_search_by_key(&channel.key(), Channel::key) {
            Ok(at) => self.channels[at].packets.push(id),
            Err(at) => self.channels.insert(at, channel),
        }
    }

    /// Takes the first packet out; says which life it is for.
    pub fn take(&mut self, key: (usize, u32, bool)) -> Option<(u32, u8)> {
        let at = self.channels.iter().position(|c| c.key() == key)?;
        let channel = &mut self.channels[at];
        let taken = (channel.to, channel.packets.remove(0));
        if channel.packets.is_empty() {
            self.channels.remove(at);
        }
        Some(taken)
    }

    // ---- promises ----

    /// The peer's request with that number changes memory at `me`, or takes a receive, or reads.
    pub fn execute(&mut self, case: &Case, me: usize, id: u8) {
        let op = case.op(1 - me, id);
        let (ran, theirs) = (self.apps[me].ran, self.apps[1 - me]);
        let runs = |k: u8| ran[usize::from(k)];
        let awaits = |k: u8| case.op(1 - me, k).opcode.awaits_data();
        let consumes = |k: u8| case.op(1 - me, k).opcode.consumes_receive();
        let once = consumes(id) || op.opcode.is_atomic() || op.flags.contains(SendFlags::NO_REPLAY);
        let later = id + 1..theirs.posted;
        let read = op.opcode.awaits_data() && !op.opcode.is_atomic();
        if !read && runs(id) > 0 {
            // Without exact counts a WRITE may run again, unless a receive behind it says that it
            // has.
            let may =
                !once && !case.exact[me] && !later.clone().any(|k| consumes(k) && runs(k) > 0);
            if !may {
                return self.wrong(format!("end {me} executes request {id} again"));
            }
        }
        let reads = |k: u8| awaits(k) && !case.op(1 - me, k).opcode.is_atomic();
        if (0..id).any(|k| !reads(k) && runs(k) == 0) {
            return self.wrong(format!("end {me} executes request {id} before an older one"));
        }
        let fenced = |k: u8| case.op(1 - me, k).flags.contains(SendFlags::FENCE);
        if fenced(id) && (theirs.done..id).any(awaits) {
            return self.wrong(format!(
                "end {me} executes request {id} before a READ that it must wait for is complete"
            ));
        }
        if read && later.clone().any(|k| fenced(k) && runs(k) > 0) {
            return self.wrong(format!(
                "end {me} reads for request {id} what a fenced request has changed"
            ));
        }
        let ran = &mut self.apps[me].ran[usize::from(id)];
        *ran = if read { 1 } else { (*ran + 1).min(2) };
    }

    pub fn send_done(&mut self, case: &Case, me: usize, id: u8, ok: bool) {
        let ran = self.apps[1 - me].ran[usize::from(id)];
        let app = &mut self.apps[me];
        if app.done != id || ok && (app.failed || ran == 0) {
            let (done, failed) = (app.done, app.failed);
            let op = case.op(me, id).opcode;
            return self.wrong(format!(
                "end {me}: {op:?} {id} completes (success: {ok}), executed {ran} times, after \
                 {done} (failed: {failed})"
            ));
        }
        app.done += 1;
        app.failed |= !ok;
    }

    pub fn recv_done(&mut self, me: usize, id: u8) {
        let app = &mut self.apps[me];
        if app.received != id {
            let received = app.received;
            return self.wrong(format!("end {me}: receive {id} completes after {received}"));
        }
        app.received += 1;
    }

    pub fn ended(&mut self, me: usize) {
        let app = &mut self.apps[me];
        app.ended = true;
        if app.done != app.posted || app.received != app.recvs {
            let app = *app;
            self.wrong(format!("end {me} has ended, and work of it is lost: {app:?}"));
        }
    }
}
