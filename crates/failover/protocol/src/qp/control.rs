//! Control messages of a logical QP: what comes, what goes, and by which path.

use super::{LogicalQp, State, MAX_SENDS_QUEUED};
use crate::action::{Action, FailCause, Reason};
use crate::message::{Body, Hello, Message, Planned, Refuse, RefuseReason};
use crate::mutants::left_out;
use crate::slots::{slot_of, Liveness, SlotPath, SLOTS};
use core::cmp::Ordering;

/// A Hello that is further ahead than this is not believed: nobody enters so many epochs while the
/// peer hears of none.
pub(super) const MAX_EPOCH_JUMP: u64 = 64 * SLOTS as u64;

impl LogicalQp {
    /// A control message for this QP has come. Probes are none of its business and are ignored.
    pub fn handle_message(&mut self, now_us: u64, message: &Message) {
        let (from, to) = (message.from, message.to);
        if (from.gid, from.qpn, to.gid, to.qpn)
            != (self.peer.gid, self.peer.qpn, self.me.gid, self.me.qpn)
        {
            self.counters.misaddressed += 1;
            return;
        }
        if let Body::Refuse(refuse) = message.body {
            // Its sender may be another incarnation than the one that we spoke to: that may be what
            // it says.
            let spoken_to = from.incarnation == self.peer.incarnation;
            let other_end = spoken_to && from.connection != self.peer.connection;
            if to.incarnation != self.me.incarnation || refuse.refused != self.peer.incarnation {
                self.counters.wrong_incarnation += 1;
            } else if to.connection != self.me.connection || other_end {
                // It refuses what an earlier connection of ours said, or an earlier one of the peer
                // did.
                self.counters.wrong_connection += 1;
            } else {
                self.handle_refuse(now_us, refuse, from.incarnation);
            }
            return;
        }
        if to.incarnation != self.me.incarnation || from.incarnation != self.peer.incarnation {
            self.counters.wrong_incarnation += 1;
            if let Some(refusal) =
                message.refusal(self.me.incarnation, RefuseReason::WrongIncarnation)
            {
                self.send(refusal, self.slot());
            }
            return;
        }
        if to.connection != self.me.connection || from.connection != self.peer.connection {
            // Of a connection that was before ours, or of one that we do not know of yet: the shell
            // looks that up.
            self.counters.wrong_connection += 1;
            if to.connection != self.me.connection
                && matches!(message.body, Body::Hello(_) | Body::Planned(..))
            {
                self.refuse_one(RefuseReason::WrongConnection);
            }
            return;
        }
        match message.body {
            Body::Hello(hello) => self.handle_hello(now_us, hello),
            Body::Planned(kind, epoch) => self.handle_planned(now_us, kind, epoch),
            Body::Bye => self.handle_bye(now_us),
            Body::Probe(_) | Body::ProbeAck(_) | Body::Refuse(_) | Body::Moved => {}
            Body::AskKey(_) | Body::Keys(_) => {} // of the process
        }
    }

    fn handle_hello(&mut self, now_us: u64, hello: Hello) {
        match self.state {
            State::Failed => return self.refuse(self.refusal),
            State::Closed => {
                let via = self.next_via();
                return self.send_body(Body::Bye, via);
            }
            _ => {}
        }
        let misfits = |psn| self.expected_psn.is_some_and(|expected| expected != psn);
        if hello.unproven_psn.is_some_and(misfits) {
            return self.refuse_one(RefuseReason::Misfit);
        }
        let path = self.slots.get(slot_of(hello.epoch)).map(SlotPath::mirrored);
        let contradicts = self.hello().is_some_and(|h| {
            let told = |h: &Hello| {
                (h.fresh_qpn, h.psn, h.mtu, h.key_set, h.executed, h.exact, h.completed)
            };
            h.epoch == hello.epoch && told(&h) != told(&hello)
        });
        let too_far = hello.epoch > self.epoch + MAX_EPOCH_JUMP;
        if hello.epoch == 0 || too_far || contradicts || path.is_some_and(|p| p != hello.path) {
            self.counters.impossible += 1;
            return;
        }
        self.peer_heard_us = now_us;
        self.silence_us = self.config.peer_silence_us;
        match hello.epoch.cmp(&self.epoch) {
            Ordering::Less => self.answer_stale(now_us),
            Ordering::Equal => self.handle_current_hello(now_us, hello),
            Ordering::Greater => self.handle_higher_hello(now_us, hello),
        }
    }

    /// The sender is behind: it learns the current epoch from our Hello. While we are between
    /// epochs, the Hello of the next will do.
    pub(super) fn answer_stale(&mut self, now_us: u64) {
        self.counters.stale_hellos += 1;
        if matches!(
            self.state,
            State::Active | State::Fencing | State::Connected | State::Waiting | State::Checking
        ) {
            let via = self.next_via();
            self.send_hello(now_us, via);
        }
    }

    fn handle_current_hello(&mut self, now_us: u64, hello: Hello) {
        let heard = hello.heard || self.hello().is_some_and(|h| h.heard);
        self.peer_hello = Some(Box::new(Hello { heard, ..hello }));
        match self.state {
            State::Waiting => self.weigh_hello(now_us),
            State::Connected | State::Active | State::Fencing => {
                // It waits for our word, which is on its way since we are connected. If that is
                // lost, it asks again.
                if hello.heard && self.state == State::Connected {
                    self.start(now_us);
                } else if hello.waiting {
                    let via = self.next_via();
                    self.send_hello(now_us, via);
                }
            }
            _ => {} // remembered; it is weighed when its turn comes
        }
    }

    fn handle_higher_hello(&mut self, now_us: u64, hello: Hello) {
        if left_out!(self.config.mutation, NoFollow) {
            return;
        }
        if self.hello().is_some_and(|h| h.epoch > hello.epoch) {
            return; // an old one; the newer is remembered already
        }
        self.peer_hello = Some(Box::new(hello));
        match self.state {
            State::Fencing if self.peer_has_gone(hello.epoch) => {
                self.hear_plan(now_us, Planned::Drained)
            }
            State::Active
            | State::Fencing
            | State::Waiting
            | State::Checking
            | State::Connected => self.leave(now_us, Reason::Peer),
            State::Parked { until_us: None } => self.advance(now_us),
            State::Parked { .. }
            | State::Quiescing
            | State::Opening
            | State::Failed
            | State::Closed => {}
        }
    }

    fn handle_refuse(&mut self, now_us: u64, refuse: Refuse, from_incarnation: u64) {
        if matches!(self.state, State::Failed | State::Closed) {
            return;
        }
        let ours = from_incarnation == self.peer.incarnation;
        match refuse.reason {
            RefuseReason::UnknownQp if ours => self.grant_grace(now_us),
            RefuseReason::UnknownQp | RefuseReason::WrongIncarnation => self.handle_bye(now_us),
            RefuseReason::Impossible => self.counters.impossible += 1,
            RefuseReason::WrongConnection => self.counters.wrong_connection += 1,
            RefuseReason::UnsafeReplay | RefuseReason::Inconsistent | RefuseReason::Failed
                if ours =>
            {
                self.fail(now_us, FailCause::Refused(refuse.reason));
            }
            RefuseReason::Misfit if ours && self.unproven_psn.is_some() => {
                self.fail(now_us, FailCause::NeverWorked);
            }
            _ => {}
        }
    }

    /// The peer does not know the QP, perhaps not yet: it gets some time, from the first refusal
    /// on.
    fn grant_grace(&mut self, now_us: u64) {
        if self.silence_us != self.config.unknown_grace_us {
            self.silence_us = self.config.unknown_grace_us;
            self.peer_heard_us = now_us;
        }
    }

    /// The peer is gone. While the path works, what it acknowledged still completes; a switch would
    /// be in vain.
    fn handle_bye(&mut self, now_us: u64) {
        self.peer_closed = true;
        if self.state == State::Fencing {
            // What is held goes where the rest is.
            let epoch = self.planned_epoch().unwrap_or(0);
            return self.cancel(now_us, epoch);
        }
        if !matches!(self.state, State::Active | State::Failed | State::Closed) {
            self.fail(now_us, FailCause::PeerClosed);
        }
    }

    pub(super) fn on_close(&mut self, _now_us: u64) {
        self.state = State::Closed;
        self.last_via = self.slot();
        self.send_body(Body::Bye, self.last_via);
        let via = self.next_via();
        if via != self.slot() {
            self.send_body(Body::Bye, via);
        }
    }

    // ---- sending ----

    pub(super) fn send_hello(&mut self, now_us: u64, via: u8) {
        let Some(path) = self.path() else { return };
        if self.epoch == 0 {
            return; // its QPs were connected by the application
        }
        self.counters.hellos_sent += 1;
        self.resend_at_us = now_us + self.resend_interval_us;
        let hello = Hello {
            epoch: self.epoch,
            path,
            fresh_qpn: self.fresh.qpn,
            psn: self.fresh.psn,
            mtu: self.fresh.mtu,
            key_set: self.fresh.key_set,
            heard: matches!(self.state, State::Connected | State::Active | State::Fencing),
            waiting: !matches!(self.state, State::Active | State::Fencing),
            executed: self.executed,
            exact: self.exact,
            completed: self.completed,
            unproven_psn: self.unproven_psn,
        };
        self.send_body(Body::Hello(hello), via);
    }

    /// Says why we do not go on, over two paths, since it is not repeated. Whoever asks again is
    /// told again, over the next two.
    pub(super) fn refuse(&mut self, reason: RefuseReason) {
        let body = Body::Refuse(Refuse { reason, epoch: self.epoch, refused: self.me.incarnation });
        let (first, second) = (self.next_via(), self.next_via());
        self.send_body(body, first);
        if second != first {
            self.send_body(body, second);
        }
    }

    /// The same over one path, for what the peer repeats anyway.
    fn refuse_one(&mut self, reason: RefuseReason) {
        let via = self.next_via();
        let body = Body::Refuse(Refuse { reason, epoch: self.epoch, refused: self.me.incarnation });
        self.send_body(body, via);
    }

    pub(super) fn send_body(&mut self, body: Body, via: u8) {
        self.send(Message { from: self.me, to: self.peer, body }, via);
    }

    fn send(&mut self, message: Message, via: u8) {
        if self.sends_queued >= MAX_SENDS_QUEUED {
            self.counters.sends_dropped += 1;
            return;
        }
        self.sends_queued += 1;
        self.actions.push_back(Action::Send { message, via });
    }

    /// The slot of the next living path after the one used last, each path once in a round; if none
    /// lives, those with a NIC.
    pub(super) fn next_via(&mut self) -> u8 {
        let with = |b: fn(Liveness) -> bool| {
            (0..SLOTS as u8).fold(0u64, |bits, s| bits | u64::from(b(self.liveness(s))) << s)
                & self.distinct
        };
        let alive = with(|b| b == Liveness::Alive);
        let usable = if alive != 0 { alive } else { with(|b| b != Liveness::NoNic) };
        if usable == 0 {
            return self.slot();
        }
        let last = u32::from(self.last_via) % SLOTS as u32;
        let after = usable.rotate_right(last).rotate_right(1);
        self.last_via = ((after.trailing_zeros() + last + 1) % SLOTS as u32) as u8;
        self.last_via
    }
}
