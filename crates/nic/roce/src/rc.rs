//! An RC QP: requester and responder, and the life of both.
//!
//! Besides the states of the specification ([`crate::RcModify`]) there are two that end a QP:
//! - *held*: made with `suspend_on_error` and failed by the network. It sends, takes and completes
//!   nothing, and keeps its WRs, until [`RcQp::quiesce`] or [`RcQp::fail`];
//! - *quiesced*: its WRs are taken out; nothing happens on it any more, unless it is reset.

mod insist;
mod named;
mod paths;
mod turns;

use crate::config::RcConfig;
use crate::connection::Connection;
use crate::encoding::ack_timeout_us;
use crate::io::Memory;
use crate::migration::{Migration, NOTHING};
use crate::mutants::Mutation;
use crate::requester::Requester;
use crate::responder::{RcEvent, Responder};
use crate::room::{News, Room};
use crate::rq::RecvQueue;
use crate::sq::SendRing;
use std::sync::Arc;
use unbroken_types::{
    Backlog, Completions, ModifyError, PostError, Progress, QpState, QpType, RcModify, RecvWr,
    SendBatch, SendWr, SharedReceives, WcStatus,
};
use unbroken_wire::{Packet, Transport};

/// The transport of one RC QP.
///
/// - getters: [`state`](Self::state), [`attrs`](Self::attrs), [`progress`](Self::progress),
///   [`failure`](Self::failure), [`ack_owed`](Self::ack_owed);
/// - application: [`modify`](Self::modify), [`post_send`](Self::post_send),
///   [`post_recv`](Self::post_recv);
/// - world: [`handle_packet`](Self::handle_packet), [`handle_timeout`](Self::handle_timeout);
/// - polls: [`poll_transmit`](Self::poll_transmit) and its parts,
///   [`poll_timeout`](Self::poll_timeout), [`take_event`](Self::take_event),
///   [`take_last_wqe`](Self::take_last_wqe);
/// - switching: [`network_failure`](Self::network_failure), [`fail`](Self::fail),
///   [`quiesce`](Self::quiesce), [`adopt`](Self::adopt), [`release`](Self::release).
#[derive(Clone)]
pub struct RcQp {
    config: RcConfig,
    connection: Connection,
    attrs: RcModify,
    state: QpState,
    requester: Requester,
    responder: Responder,
    failure: Option<WcStatus>,
    quiesced: bool,
    event: Option<RcEvent>,
    first_moved_us: Option<u64>,
    /// A WR that changes keys was posted, here or in an earlier life.
    keys_changed: bool,
    /// The peer's first request has come.
    established: bool,
    /// That the send queue is drained has been told since it began to.
    drain_told: bool,
    migration: Migration,
    /// Which MigReq bits would be news; [`NOTHING`] while none would.
    watched: u8,
    /// What the responder has to send found no room behind requests.
    answers_first: bool,
}

impl RcQp {
    /// Makes a QP in state RESET, with the rings of its queues.
    pub fn new(config: RcConfig) -> RcQp {
        let RcConfig { wc_qpn, caps, pd, sq_sig_all, .. } = config;
        RcQp {
            config,
            connection: Connection::new(Transport::Rc, pd),
            attrs: RcModify::default(),
            state: QpState::Reset,
            requester: Requester::new(
                SendRing::new(&caps, wc_qpn, sq_sig_all),
                config.cwnd_max_packets,
            ),
            responder: Responder::new(RecvQueue::new(&caps, pd, wc_qpn)),
            failure: None,
            quiesced: false,
            event: None,
            first_moved_us: None,
            keys_changed: false,
            established: false,
            drain_told: false,
            migration: Migration::default(),
            watched: NOTHING,
            answers_first: false,
        }
    }

    /// This QP with an SRQ: its receives come from there.
    pub fn with_srq(mut self, srq: Arc<dyn SharedReceives>) -> RcQp {
        self.responder.receiver.queue.share(srq);
        self
    }

    // Getters

    /// How it was made.
    pub fn config(&self) -> &RcConfig {
        &self.config
    }

    /// The present state; a held QP says what it was before.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// All attributes that have been set.
    pub fn attrs(&self) -> RcModify {
        let (alternate, migration) = (self.migration.alternate(), Some(self.migration.state()));
        RcModify { state: Some(self.state), alternate, migration, ..self.attrs }
    }

    /// The peer's QPN.
    pub fn dest_qpn(&self) -> u32 {
        self.connection.dest_qpn
    }

    /// How far both halves are.
    pub fn progress(&self) -> Progress {
        Progress {
            state: self.state(),
            outstanding_sends: self.requester.ring.len(),
            unannounced_sends: 0,
            outstanding_recvs: self.responder.receiver.queue.len(),
            advanced: self.requester.advanced(),
            executed: self.responder.executed().all,
            completed: self.requester.completed().all,
            answered: self.requester.advanced() > 0 || self.requester.waiting_rnr(),
            waiting_rnr: self.requester.waiting_rnr(),
            resting: self.state == QpState::Sqd && self.requester.drained(),
            keys_changed: self.changed_keys(),
            first_moved_us: self.first_moved_us,
        }
    }

    /// Whether a send that was just posted may wait for company: many are on their way already, so
    /// nobody waits for this one, and few others wait.
    pub fn may_wait(&self) -> bool {
        self.requester.may_wait()
    }

    /// What it has on its way, in the units of [`Room`].
    pub fn flight(&self) -> u32 {
        if self.sends() {
            self.requester.flight()
        } else {
            0
        }
    }

    fn sends(&self) -> bool {
        matches!(self.state, QpState::Rts | QpState::Sqd) && !self.stopped()
    }

    /// What it was refused since it was last told its room, and would take.
    pub fn wanted_room(&self) -> Option<u32> {
        self.requester.wanted().filter(|_| self.sends())
    }

    /// Tells what it may have on its way from now on. A QP that was never told has all the room
    /// there is.
    pub fn give_room(&mut self, room: Room) {
        self.requester.give_room(room);
    }

    /// It waits for room to a destination that has answered other QPs at `heard_us`.
    pub fn waits_for_room(&mut self, heard_us: u64) {
        self.requester.waits_for_room(heard_us);
    }

    /// What became of its packets since this was last asked.
    pub fn take_news(&mut self) -> News {
        let (lost, rtt_us) = (self.requester.take_lost(), self.requester.take_rtt_us());
        // What is lost while it insists says nothing of the room there.
        let lost = if self.requester.insists() { 0 } else { lost };
        News { acked: self.requester.advanced(), lost, rtt_us }
    }

    /// Whether it sends nothing now because the peer had no receive (RNR).
    pub fn waits_for_receiver(&self) -> bool {
        self.requester.rests_for_rnr()
    }

    /// With `suspend_on_error`, why the network stopped the QP.
    pub fn failure(&self) -> Option<WcStatus> {
        self.failure
    }

    /// Bytes of memory that the QP takes, queues included.
    pub fn memory_bytes(&self) -> usize {
        size_of::<RcQp>() + self.requester.heap_bytes() + self.responder.heap_bytes()
    }

    /// Whether lost packets are repeated one by one, because the peer is known to do its part: it
    /// keeps what comes early and says what it has. Any other peer is sent everything from the lost
    /// packet on. If the two ends differ nothing breaks: a map that is not understood is not looked
    /// at, and what is kept and comes again is a repeat. To be said before state RTR.
    pub fn set_selective(&mut self, selective: bool) {
        self.connection.selective = selective;
    }

    /// Leaves a rule out.
    pub fn set_mutation(&mut self, mutation: Mutation) {
        self.responder.mutation = mutation;
    }

    /// Packets that were sent again since this was last asked: requests, and responses that had
    /// been sent before.
    pub fn take_retransmits(&mut self) -> u32 {
        self.requester.take_retransmits() + self.responder.take_retransmits()
    }

    /// Whether either end has bound a memory window by this QP or invalidated a key, in this life
    /// or an earlier one. Such a QP stays where it is: a window is bound to the QP, and a replay
    /// could invalidate a key that was bound anew.
    pub fn changed_keys(&self) -> bool {
        self.keys_changed || self.responder.receiver.invalidated
    }

    fn stopped(&self) -> bool {
        self.failure.is_some() || self.quiesced
    }

    // Application

    /// Changes state and attributes, as `ibv_modify_qp` does. To ERR flushes, to RESET forgets. An
    /// error changes nothing.
    pub fn modify(
        &mut self,
        change: &RcModify,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), ModifyError> {
        let from = self.state;
        let to = change.validate(QpType::Rc, from)?;
        if self.quiesced && to != QpState::Reset {
            return Err(ModifyError::Transition { from, to });
        }
        self.migration.check(change)?;
        self.attrs.merge(change);
        self.state = to;
        if self.migration.change(change) {
            self.take_path(None, false);
        }
        self.apply_attrs();
        match (from, to) {
            (_, QpState::Reset) => {
                self.requester.reset();
                self.responder.reset();
                self.failure = None;
                self.quiesced = false;
                self.event = None;
                self.first_moved_us = None;
                self.keys_changed = false;
                self.established = false;
                self.migration = Migration::default();
                self.watch();
            }
            (_, QpState::Err) => self.enter_error(WcStatus::WrFlushErr, None, out),
            (QpState::Init, QpState::Rtr) => {
                self.responder.start(
                    self.attrs.rq_psn.unwrap_or(0),
                    self.attrs.max_dest_rd_atomic.unwrap_or(0),
                );
            }
            (QpState::Rtr, QpState::Rts) => self.requester.start(self.attrs.sq_psn.unwrap_or(0)),
            (QpState::Rts, QpState::Sqd) => {
                self.drain_told = false;
                self.note_drained();
            }
            _ => {}
        }
        Ok(())
    }

    fn apply_attrs(&mut self) {
        let a = &self.attrs;
        self.connection.set(a);
        self.connection.mig_req = self.migration.mig_req();
        self.watched = self.migration.watched();
        self.connection.may_start = self.state == QpState::Rts;
        self.responder.min_rnr_timer = a.min_rnr_timer.unwrap_or(0);
        let limits = &mut self.requester.limits;
        limits.timeout_us = a.timeout.and_then(ack_timeout_us);
        limits.retry_cnt = a.retry_cnt.unwrap_or(0);
        limits.rnr_retry = a.rnr_retry.unwrap_or(0);
        limits.max_rd_atomic = a.max_rd_atomic.unwrap_or(0) as u32;
        limits.mtu = self.connection.mtu;
    }

    /// Posts a send. In state ERR it completes at once as flushed; while the QP is held it waits.
    #[inline]
    pub fn post_send(
        &mut self,
        wr: &SendWr<'_>,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), PostError> {
        self.post_send_as(wr.wr_id, wr, out)
    }

    /// Posts a send under the number `wr_id`, not its own. In state ERR it completes at once as
    /// flushed; while the QP is held it waits.
    pub fn post_send_as(
        &mut self,
        wr_id: u64,
        wr: &SendWr<'_>,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), PostError> {
        self.may_post_send()?;
        self.requester.ring.push_as(wr_id, wr)?;
        self.posted(wr.opcode.changes_keys(), out);
        Ok(())
    }

    /// Posts several sends: all or none.
    pub fn post_sends(
        &mut self,
        batch: &dyn SendBatch,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), PostError> {
        self.may_post_send()?;
        let mut changes_keys = false;
        self.requester.ring.push_all(batch, |wr, _| {
            changes_keys |= wr.opcode.changes_keys();
            Ok(())
        })?;
        self.posted(changes_keys, out);
        Ok(())
    }

    fn posted(&mut self, changes_keys: bool, out: &mut (impl Completions + ?Sized)) {
        self.keys_changed |= changes_keys;
        if self.state == QpState::Err {
            self.requester.flush(WcStatus::WrFlushErr, out);
        }
    }

    fn may_post_send(&self) -> Result<(), PostError> {
        let allowed = matches!(self.state, QpState::Rts | QpState::Sqd | QpState::Err);
        if !allowed || self.quiesced {
            return Err(PostError::WrongState(self.state));
        }
        Ok(())
    }

    /// Posts a receive. In state ERR it completes at once as flushed.
    pub fn post_recv(
        &mut self,
        wr: &RecvWr<'_>,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), PostError> {
        if self.quiesced {
            return Err(PostError::WrongState(self.state));
        }
        self.responder.receiver.queue.post(self.state, wr, out)
    }

    // World

    /// Takes a packet that was sent to this QPN by the peer's address. What does not belong here is
    /// dropped.
    #[inline]
    pub fn handle_packet(
        &mut self,
        now_us: u64,
        packet: &Packet<'_>,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) {
        if self.stopped() || packet.bth.opcode.transport != Transport::Rc {
            return;
        }
        let response = packet.bth.opcode.op.is_response();
        match self.state {
            QpState::Rtr | QpState::Rts | QpState::Sqd if !response => {
                if !self.established {
                    self.established = true;
                    if self.state == QpState::Rtr {
                        self.event.get_or_insert(RcEvent::CommEstablished);
                    }
                }
                if let Err((event, status)) =
                    self.responder.on_request(packet, &self.connection, mem, out)
                {
                    self.event = Some(event);
                    self.enter_error(WcStatus::WrFlushErr, status, out);
                }
            }
            QpState::Rts | QpState::Sqd => self.handle_response(now_us, packet, mem, out),
            QpState::Err if !response => self.responder.after_end(),
            _ => {}
        }
        if self.first_moved_us.is_none()
            && (self.requester.advanced() > 0
                || self.requester.waiting_rnr()
                || self.responder.moved())
        {
            self.first_moved_us = Some(now_us);
        }
    }

    fn handle_response(
        &mut self,
        now_us: u64,
        packet: &Packet<'_>,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) {
        use unbroken_wire::{Ext, Op::Acknowledge};
        let psn = packet.bth.psn;
        let done = match (packet.bth.opcode.op, packet.ext) {
            (Acknowledge, Ext::Aeth(aeth)) => {
                if packet.bth.ack_req {
                    // The specification has no use for the bit here: it asks in what state our
                    // migration is.
                    self.responder.announce(false);
                }
                self.requester.on_ack(
                    now_us,
                    psn,
                    aeth.syndrome,
                    packet.payload,
                    &self.connection,
                    out,
                )
            }
            (Acknowledge, _) => Ok(()),
            _ => self.requester.on_answer(now_us, packet, &self.connection, mem, out),
        };
        if let Err(status) = done {
            self.requester_failed(status, out);
        } else if self.state == QpState::Sqd {
            self.note_drained();
        }
    }

    fn note_drained(&mut self) {
        if self.requester.drained() && !self.drain_told {
            self.drain_told = true;
            self.event.get_or_insert(RcEvent::SqDrained);
        }
    }

    /// Whether the send queue has not come to its rest yet, in state SQD.
    pub fn draining(&self) -> bool {
        self.state == QpState::Sqd && !self.requester.drained()
    }

    /// Tells the time, at [`Self::poll_timeout`] or later.
    pub fn handle_timeout(&mut self, now_us: u64, out: &mut (impl Completions + ?Sized)) {
        if self.stopped() {
            return;
        }
        if let Some(asks) = self.migration.announcement_due(now_us) {
            self.responder.announce(asks);
        }
        match self.requester.on_timeout(now_us) {
            Ok(()) => {}
            Err(WcStatus::RetryExcErr) if self.migration.fail() => {
                self.take_path(Some(now_us), true)
            }
            Err(status) => self.requester_failed(status, out),
        }
    }

    fn requester_failed(&mut self, status: WcStatus, out: &mut (impl Completions + ?Sized)) {
        if status.is_network() {
            self.network_failure(status, out);
        } else {
            self.enter_error(status, None, out);
        }
    }

    // Polls

    /// When [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<u64> {
        let requester = self.requester.poll_timeout();
        match self.migration.announce_at_us() {
            _ if self.stopped() => requester,
            None => requester,
            Some(at_us) => Some(requester.map_or(at_us, |t| t.min(at_us))),
        }
    }

    /// Takes the asynchronous event that has come up, if any.
    pub fn take_event(&mut self) -> Option<RcEvent> {
        self.event.take().or_else(|| self.migration.take_event())
    }

    /// Whether the QP, which has an SRQ, has ended and will take no receive any more; said once.
    /// Not said where it was reset or quiesced.
    pub fn take_last_wqe(&mut self) -> bool {
        self.responder.receiver.queue.take_last_wqe()
    }

    // Ending and moving

    /// The network or the NIC has failed the QP: holds it if it was made so, else fails it.
    pub fn network_failure(&mut self, status: WcStatus, out: &mut (impl Completions + ?Sized)) {
        if self.config.suspend_on_error && self.state != QpState::Err {
            self.failure.get_or_insert(status);
            self.requester.hold();
        } else {
            self.fail(status, out);
        }
    }

    /// Fails the QP: the oldest send completes with `status`, everything else is flushed, the state
    /// is ERR.
    pub fn fail(&mut self, status: WcStatus, out: &mut (impl Completions + ?Sized)) {
        if !self.quiesced {
            self.enter_error(status, None, out);
        }
    }

    /// Fails the QP as [`Self::fail`] does, for a reason that lies at this end alone, as where its
    /// completions find no room: the peer is told by a NAK, and does not take the silence for a
    /// path that is broken.
    pub fn fail_here(&mut self, status: WcStatus, out: &mut (impl Completions + ?Sized)) {
        if !self.quiesced {
            if matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd) {
                self.responder.refuse_more();
            }
            self.enter_error(status, None, out);
        }
    }

    /// Goes to ERR. Where the responder ended the QP, the NAK that says why still leaves, and READ
    /// responses before it.
    fn enter_error(
        &mut self,
        send_status: WcStatus,
        recv_status: Option<WcStatus>,
        out: &mut (impl Completions + ?Sized),
    ) {
        self.state = QpState::Err;
        self.connection.may_start = false;
        self.migration.silence();
        self.failure = None;
        self.responder.end();
        self.requester.flush(send_status, out);
        self.responder.receiver.queue.flush(recv_status.unwrap_or(WcStatus::WrFlushErr), out);
    }

    /// Stops the QP until it is reset, and takes out what is outstanding. No later packet changes
    /// memory or completes a WR.
    pub fn quiesce(&mut self) -> Backlog {
        let (executed, keys_changed) = (self.responder.executed(), self.changed_keys());
        let mut backlog = Backlog { executed, exact: true, keys_changed, ..Backlog::default() };
        self.requester.quiesce(&mut backlog);
        backlog.recvs = self.responder.receiver.queue.entries();
        self.responder.receiver.queue.clear();
        self.responder.stop();
        self.quiesced = true;
        self.state = QpState::Err;
        backlog
    }

    /// The QP is about to be destroyed: a receive of an SRQ goes back there.
    pub fn release(&mut self) {
        self.responder.receiver.queue.give_back();
    }

    /// Puts the WRs of another QP into this fresh one, in front of everything posted later. The
    /// state must be RESET, INIT or RTR, and the queues that get something empty. On an error
    /// nothing is taken.
    pub fn adopt(&mut self, backlog: &Backlog) -> Result<(), PostError> {
        let fresh =
            matches!(self.state, QpState::Reset | QpState::Init | QpState::Rtr) && !self.quiesced;
        let queue = &mut self.responder.receiver.queue;
        let taken = |there: u32, come: usize| there > 0 && come > 0;
        if !fresh
            || taken(self.requester.ring.len(), backlog.sends.len())
            || taken(queue.len(), backlog.recvs.len())
        {
            return Err(PostError::WrongState(self.state));
        }
        let sends = backlog.sends.iter().try_for_each(|e| self.requester.ring.adopt(e));
        let all = sends.and_then(|()| {
            let mut recvs = backlog.recvs.iter();
            recvs.try_for_each(|e| queue.push(&RecvWr { wr_id: e.wr_id, sges: &e.sges }))
        });
        self.keys_changed |= backlog.keys_changed;
        if all.is_err() {
            if !backlog.sends.is_empty() {
                self.requester.reset();
            }
            if !backlog.recvs.is_empty() {
                queue.clear();
            }
        }
        all
    }
}
