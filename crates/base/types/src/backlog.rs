//! What is outstanding on a QP, in a form that another QP can take over.

use crate::{QpState, SendBatch, SendFlags, SendOpcode, SendWr, Sge, UdDest};

/// An outstanding send.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SendEntry {
    /// The application's id.
    pub wr_id: u64,
    /// What to do.
    pub opcode: SendOpcode,
    /// How.
    pub flags: SendFlags,
    /// Immediate data as it goes on the wire.
    pub imm_data: u32,
    /// The peer's address.
    pub remote_addr: u64,
    /// The peer's key.
    pub rkey: u32,
    /// Atomics: the value to compare with, or to add.
    pub compare_add: u64,
    /// Atomics: the value to swap in.
    pub swap: u64,
    /// Where the data lies or goes; empty with inline data.
    pub sges: Vec<Sge>,
    /// Inline data.
    pub inline_data: Option<Vec<u8>>,
    /// Some packet of it may have left, in this life of the QP or an earlier one.
    pub started: bool,
    /// The peer has executed it: it completes in its turn, without the wire.
    pub executed: bool,
    /// UD: to whom.
    pub ud: Option<UdDest>,
}

impl From<&SendWr<'_>> for SendEntry {
    /// A WR that has not been started.
    fn from(wr: &SendWr<'_>) -> SendEntry {
        SendEntry {
            wr_id: wr.wr_id,
            opcode: wr.opcode,
            flags: wr.flags,
            imm_data: wr.imm_data,
            remote_addr: wr.remote_addr,
            rkey: wr.rkey,
            compare_add: wr.compare_add,
            swap: wr.swap,
            sges: if wr.inline_data.is_some() { Vec::new() } else { wr.sges.to_vec() },
            inline_data: wr.inline_data.map(<[u8]>::to_vec),
            started: false,
            executed: false,
            ud: wr.ud,
        }
    }
}

impl SendEntry {
    /// The WR that it was posted as.
    pub fn wr(&self) -> SendWr<'_> {
        SendWr {
            wr_id: self.wr_id,
            opcode: self.opcode,
            flags: self.flags,
            imm_data: self.imm_data,
            remote_addr: self.remote_addr,
            rkey: self.rkey,
            compare_add: self.compare_add,
            swap: self.swap,
            sges: &self.sges,
            inline_data: self.inline_data.as_deref(),
            ud: self.ud,
        }
    }
}

/// What an outstanding send is, without its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outstanding {
    /// The application's id.
    pub wr_id: u64,
    /// What it does.
    pub opcode: SendOpcode,
    /// It makes a WC when it completes.
    pub signaled: bool,
    /// The peer has executed it in an earlier life: it completes without the wire.
    pub executed: bool,
}

/// Entries, to be posted together.
pub struct Sends<'a>(pub &'a [SendEntry]);

impl SendBatch for Sends<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn wr(&self, index: usize) -> SendWr<'_> {
        self.0[index].wr()
    }
}

/// An outstanding receive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecvEntry {
    /// The application's id.
    pub wr_id: u64,
    /// Where the data goes.
    pub sges: Vec<Sge>,
}

/// A number of messages that await no data: SEND and WRITE, with or without immediate data; not
/// READ, not atomics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct Messages {
    /// All of them.
    pub all: u64,
    /// Those that consume a receive.
    pub receives: u64,
}

impl Messages {
    /// So many that consume no receive.
    pub const fn writes(all: u64) -> Messages {
        Messages { all, receives: 0 }
    }

    /// One more, by its opcode; READs and atomics do not count.
    pub fn count(&mut self, opcode: SendOpcode) {
        self.all += u64::from(!opcode.awaits_data());
        self.receives += u64::from(opcode.consumes_receive());
    }
}

impl core::ops::AddAssign for Messages {
    fn add_assign(&mut self, more: Messages) {
        (self.all, self.receives) = (self.all + more.all, self.receives + more.receives);
    }
}

/// How much of what is outstanding the peer has executed, by what the peer can say.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum PeerDone {
    /// So many messages, from the oldest.
    Messages(u64),
    /// All up to the message that consumed so many receives, counted from the oldest; of those
    /// behind it nothing is known.
    Receives(u64),
}

impl PeerDone {
    /// Whether the next message is among them: to be asked of all that are outstanding, oldest
    /// first, READs and atomics left out.
    fn takes(&mut self, opcode: SendOpcode) -> bool {
        match self {
            PeerDone::Messages(left) | PeerDone::Receives(left) if *left == 0 => false,
            PeerDone::Messages(left) => {
                *left -= 1;
                true
            }
            PeerDone::Receives(left) => {
                *left -= u64::from(opcode.consumes_receive());
                true
            }
        }
    }
}

/// What is taken out of a QP that is stopped, for another QP to take over.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Backlog {
    /// Outstanding sends, oldest first.
    pub sends: Vec<SendEntry>,
    /// Outstanding receives, oldest first; one that was partly filled is among them.
    pub recvs: Vec<RecvEntry>,
    /// Messages of the peer that the responder executed in this life.
    pub executed: Messages,
    /// `executed.all` is exact; else only the receives are counted.
    pub exact: bool,
    /// Own messages that completed in this life.
    pub completed: Messages,
    /// A WR that changes keys (it binds a memory window or invalidates a key) was executed: the
    /// keys of this QP are no longer those that were registered.
    pub keys_changed: bool,
}

impl Backlog {
    /// Outstanding messages.
    pub fn messages(&self) -> Messages {
        let mut outstanding = Messages::default();
        self.sends.iter().for_each(|s| outstanding.count(s.opcode));
        outstanding
    }

    /// Whether sending again what the peer has not executed would break a promise: an atomic, or a
    /// WR marked NO_REPLAY, may have left already, or keys were changed
    /// ([`Backlog::keys_changed`]).
    pub fn unsafe_to_replay(&self, peer_done: PeerDone) -> bool {
        let (answered, mut peer_done) = (self.answered(peer_done), peer_done);
        let mut done = |i: usize, opcode: SendOpcode| match opcode.awaits_data() {
            true => i < answered,
            false => peer_done.takes(opcode),
        };
        let breaks = |(i, e): (usize, &SendEntry)| {
            let once = e.opcode.is_atomic() || e.flags.contains(SendFlags::NO_REPLAY);
            !done(i, e.opcode) && !e.executed && (e.opcode.changes_keys() || e.started && once)
        };
        self.keys_changed || self.sends.iter().enumerate().any(breaks)
    }

    /// How many of the sends are before the last with FENCE that the peer has executed: that left
    /// when the answers of all before it were here.
    fn answered(&self, peer_done: PeerDone) -> usize {
        let mut peer_done = peer_done;
        let mut executed =
            |e: &SendEntry| !e.opcode.awaits_data() && peer_done.takes(e.opcode) | e.executed;
        let marks = self
            .sends
            .iter()
            .enumerate()
            .filter(|(_, e)| executed(e) && e.flags.contains(SendFlags::FENCE));
        marks.fold(0, |_, (i, _)| i)
    }

    /// Marks what the peer has executed: it completes in its order, without the wire. So does a
    /// READ or an atomic before a FENCE that was passed: its answer is in its place, also where the
    /// device had no time to say so. What was marked before stays so, though the peer may be able
    /// to say less by now.
    pub fn mark_executed(&mut self, peer_done: PeerDone) -> Replay {
        let answered = self.answered(peer_done);
        let (mut peer_done, mut replay) = (peer_done, Replay::default());
        for (i, e) in self.sends.iter_mut().enumerate() {
            e.executed |= match e.opcode.awaits_data() {
                true => i < answered,
                false => peer_done.takes(e.opcode),
            };
            replay.marked += u64::from(e.executed);
            replay.replayed += u32::from(!e.executed && e.started);
        }
        replay
    }
}

/// What [`Backlog::mark_executed`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Replay {
    /// Sends that the peer has executed and that complete without the wire. Fewer than the peer
    /// claims if fewer are outstanding.
    pub marked: u64,
    /// Sends that may have left before and will be sent again.
    pub replayed: u32,
}

/// How far a QP is. All counts are of this life of the QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    /// Its state.
    pub state: QpState,
    /// Sends posted and not complete.
    pub outstanding_sends: u32,
    /// Sends behind those, of which nobody will hear that they are complete: they were posted
    /// without a sign, and the device tells of nothing else.
    pub unannounced_sends: u32,
    /// Receives posted and not complete.
    pub outstanding_recvs: u32,
    /// Grows with every packet acknowledged and every READ response taken.
    pub advanced: u64,
    /// Messages not awaiting data that the responder has executed.
    pub executed: u64,
    /// Sends not awaiting data that have completed.
    pub completed: u64,
    /// The peer has answered a request, if only by saying that it has no receive: the ends fit.
    pub answered: bool,
    /// Waiting because the peer had no receive: silence, but not a failure.
    pub waiting_rnr: bool,
    /// In SQD, with all complete that was started: what is outstanding waits for the application.
    pub resting: bool,
    /// A WR that changes keys (it binds a memory window or invalidates a key) was executed: the
    /// keys of this QP are no longer those that were registered.
    pub keys_changed: bool,
    /// When the peer answered first (that it has no receive is an answer, too) or its first message
    /// was executed.
    pub first_moved_us: Option<u64>,
}

impl Progress {
    /// Entries of the send queue that are in use.
    pub fn sends(&self) -> u32 {
        self.outstanding_sends + self.unannounced_sends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(opcode: SendOpcode) -> SendEntry {
        let wr = SendWr { wr_id: 0, opcode, flags: SendFlags::NO_REPLAY, ..SendWr::default() };
        SendEntry { started: true, ..SendEntry::from(&wr) }
    }

    #[test]
    fn what_is_before_a_fence_that_was_passed_has_its_answer() {
        use SendOpcode::{FetchAdd, Read, Send};
        let mut sends = [Read, FetchAdd, Send, Read, Send, FetchAdd].map(entry).to_vec();
        sends[2].flags = sends[2].flags.with(SendFlags::FENCE);
        let backlog = Backlog { sends, ..Backlog::default() };
        for (done, before) in [
            (PeerDone::Receives(0), false),
            (PeerDone::Receives(1), true),
            (PeerDone::Messages(2), true),
        ] {
            let mut backlog = backlog.clone();
            backlog.mark_executed(done);
            let marks: Vec<bool> = backlog.sends.iter().map(|e| e.executed).collect();
            let second = done == PeerDone::Messages(2);
            assert_eq!(marks, [before, before, before, false, second, false], "{done:?}");
        }
        let head = Backlog { sends: backlog.sends[..3].to_vec(), ..Backlog::default() };
        for (receives, unsafe_) in [(0, true), (1, false)] {
            assert_eq!(head.unsafe_to_replay(PeerDone::Receives(receives)), unsafe_);
        }
    }

    #[test]
    fn receives_that_were_consumed_speak_for_all_before_them_and_for_nothing_behind() {
        use SendOpcode::{Read, Send, Write, WriteImm};
        let sends = [Write, Read, Send, Write, WriteImm, Write].map(entry).to_vec();
        let mut backlog = Backlog { sends, ..Backlog::default() };
        assert_eq!(backlog.messages(), Messages { all: 5, receives: 2 });
        let marked = |backlog: &mut Backlog, done| {
            let mut backlog = backlog.clone();
            backlog.mark_executed(done);
            backlog.sends.iter().map(|e| e.executed).collect::<Vec<_>>()
        };
        let (t, f) = (true, false);
        assert_eq!(marked(&mut backlog, PeerDone::Receives(0)), [f; 6]);
        assert_eq!(marked(&mut backlog, PeerDone::Receives(1)), [t, f, t, f, f, f]);
        assert_eq!(marked(&mut backlog, PeerDone::Receives(2)), [t, f, t, t, t, f]);
        assert_eq!(marked(&mut backlog, PeerDone::Messages(2)), [t, f, t, f, f, f]);
        assert_eq!(marked(&mut backlog, PeerDone::Messages(5)), [t, f, t, t, t, t]);
        let mut known = backlog.clone();
        known.mark_executed(PeerDone::Messages(5));
        assert_eq!(
            marked(&mut known, PeerDone::Receives(1)),
            [t, f, t, t, t, t],
            "what was known is known"
        );
        assert!(backlog.unsafe_to_replay(PeerDone::Receives(2)), "the last WRITE may have run");
        backlog.sends.pop();
        backlog.sends.remove(1); // the READ is marked, too
        assert!(!backlog.unsafe_to_replay(PeerDone::Receives(2)));
    }
}
