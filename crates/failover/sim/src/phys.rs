//! A physical QP of the simulator: of a device that holds its work, or of one that has plain verbs
//! only, with the product's journal above it.
//!
//! The plain one is a transport that flushes, as its provider pleases ([`crate::flush`]). Its
//! completions lie in two queues, as in the CQs of a device, and are taken from them in either
//! order; a QP that is being stopped takes its time to tell the last ones.

use crate::end::{Wcs, CAPS};
use crate::flush::{Cqs, Flush, Look};
use crate::memory::{KEY, PD};
use crate::srq::SharedQueue;
use crate::taken::Taken;
use std::sync::Arc;
use unbroken_failover_protocol::QuiesceError;
use unbroken_journal::{Config, Journal, Mutation, Posted, Queue, Slot, Step};
use unbroken_roce::{Memory, PacketSink, RcConfig, RcEvent, RcQp};
use unbroken_types::{
    Access, Backlog, Completions, ModifyError, PostError, Progress, QpCaps, QpState, RcModify,
    RecvWr, SendEntry, SendFlags, SendOpcode, SendWr, Sge, Wc, WcStatus,
};
use unbroken_wire::Packet;

/// How a physical QP is made.
#[derive(Clone, Copy)]
pub struct Kind {
    /// Its device has plain verbs only.
    pub plain: bool,
    /// What it receives is looked at before what it has sent.
    pub recvs_first: bool,
    /// How often it is asked in vain whether it has stopped.
    pub slow: u32,
    /// What becomes of its flushes.
    pub flush: Flush,
    /// ... by chance.
    pub seed: u64,
    /// Its events are heard before its completions, and not after.
    pub events_first: bool,
    /// By which keys the QP's memory is known on its NIC, and the peer's on the peer's NIC.
    pub local_key: u32,
    /// See `local_key`.
    pub remote_key: u32,
    /// A rule that the journal leaves out.
    pub mutation: Mutation,
}

/// The entries with the key of another NIC. What is no key of memory stays none.
pub(crate) fn translated(sges: &[Sge], key: u32) -> Vec<Sge> {
    let lkey = |lkey| if lkey == KEY { key } else { lkey };
    sges.iter().map(|sge| Sge { lkey: lkey(sge.lkey), ..*sge }).collect()
}

impl Kind {
    fn local(&self, sges: &[Sge]) -> Vec<Sge> {
        translated(sges, self.local_key)
    }

    fn remote(&self, rkey: u32) -> u32 {
        if rkey == KEY {
            self.remote_key
        } else {
            rkey
        }
    }
}

/// A physical QP.
#[derive(Clone)]
pub enum Phys {
    /// Of a device that holds its work.
    Holding(Box<RcQp>),
    /// Of a plain one.
    Plain(Box<Plain>),
}

/// A plain device's QP, and the journal.
#[derive(Clone)]
pub struct Plain {
    provider: RcQp,
    journal: Journal,
    kind: Kind,
    state: QpState,
    now_us: u64,
    cqs: Cqs,
    /// It was asked for ERR, and its last completions are not told yet.
    silent: u32,
    /// A look has just been taken.
    looked: bool,
    destroyed: bool,
    shared: Option<Arc<Taken>>,
    /// That the peer's request has ended it is known.
    event: Option<RcEvent>,
}

impl Phys {
    /// One in state INIT.
    pub fn new(qpn: u32, wc_qpn: u32, srq: Option<&Arc<SharedQueue>>, kind: Kind) -> Phys {
        let caps = match kind.plain {
            false => CAPS,
            true => QpCaps {
                max_send_wr: CAPS.max_send_wr + 1,
                max_recv_wr: CAPS.max_recv_wr + 1,
                ..CAPS
            },
        };
        let mut qp = RcQp::new(RcConfig {
            qpn,
            wc_qpn: if kind.plain { qpn } else { wc_qpn },
            caps,
            pd: PD,
            suspend_on_error: !kind.plain,
            sq_sig_all: false,
            cwnd_max_packets: 64,
        });
        let taken = |queue: &Arc<SharedQueue>| Arc::new(Taken::new(queue, kind.local_key));
        let shared = srq.filter(|_| kind.plain).map(taken);
        match (&shared, srq) {
            (Some(shared), _) => qp = qp.with_srq(shared.clone()),
            (None, Some(srq)) => qp = qp.with_srq(srq.clone()),
            (None, None) => {}
        }
        let access = Access::LOCAL_WRITE.with(Access::REMOTE);
        let init =
            RcModify { state: Some(QpState::Init), access: Some(access), ..RcModify::default() };
        qp.modify(&init, &mut Wcs::default()).expect("RESET to INIT");
        if !kind.plain {
            return Phys::Holding(Box::new(qp));
        }
        let mut journal = Journal::new(Config {
            caps: CAPS,
            wc_qpn,
            sq_sig_all: false,
            shared_receives: shared.is_some(),
            mutation: kind.mutation,
        });
        journal.open();
        let cqs = Cqs::new(kind.flush, shared.is_some(), kind.seed);
        let state = QpState::Init;
        Phys::Plain(Box::new(Plain {
            provider: qp,
            journal,
            kind,
            state,
            now_us: 0,
            cqs,
            silent: 0,
            looked: false,
            destroyed: false,
            shared,
            event: None,
        }))
    }

    fn transport(&self) -> &RcQp {
        match self {
            Phys::Holding(qp) => qp,
            Phys::Plain(p) => &p.provider,
        }
    }

    /// See [`RcQp::go_on`]; a plain device cannot.
    pub fn go_on(&mut self, now_us: u64, insists: bool) -> bool {
        match self {
            Phys::Holding(qp) => qp.go_on(now_us, insists),
            Phys::Plain(_) => false,
        }
    }

    /// The transport.
    pub fn transport_mut(&mut self) -> &mut RcQp {
        match self {
            Phys::Holding(qp) => qp,
            Phys::Plain(p) => &mut p.provider,
        }
    }

    /// See [`RcQp::state`].
    pub fn state(&self) -> QpState {
        match self {
            Phys::Holding(qp) => qp.state(),
            Phys::Plain(p) if p.journal.ended() => QpState::Err,
            Phys::Plain(p) => p.state,
        }
    }

    /// See [`RcQp::progress`].
    pub fn progress(&self) -> Progress {
        match self {
            Phys::Holding(qp) => qp.progress(),
            Phys::Plain(p) => p.journal.progress(p.state),
        }
    }

    /// See [`Journal::announce`].
    pub fn announce(&mut self) {
        if let Phys::Plain(p) = self {
            p.journal.announce();
        }
    }

    /// Receives of a shared queue that it has begun to fill, or that nobody has heard of since.
    pub fn begun(&self) -> usize {
        match self {
            Phys::Holding(qp) => qp.progress().outstanding_recvs as usize,
            Phys::Plain(p) => p.shared.as_ref().map_or(0, |shared| shared.entries().len()),
        }
    }

    /// Flushes that did not come, or came out of their turn; and whether it had to be destroyed to
    /// be stopped.
    pub fn odd_flushes(&self) -> (u64, bool) {
        match self {
            Phys::Holding(_) => (0, false),
            Phys::Plain(p) => (p.cqs.odd, p.destroyed),
        }
    }

    /// Why the network has stopped it.
    pub fn failure(&self) -> Option<WcStatus> {
        match self {
            Phys::Holding(qp) => qp.failure(),
            Phys::Plain(p) => p.journal.held(),
        }
    }

    /// See [`RcQp::take_event`]; what a plain device tells its journal is told here.
    pub fn take_event(&mut self, out: &mut Wcs) -> Option<RcEvent> {
        match self {
            Phys::Holding(qp) => qp.take_event(),
            Phys::Plain(p) => {
                p.hear(out);
                p.settle(out);
                p.event.take()
            }
        }
    }

    /// See [`RcQp::poll_timeout`].
    pub fn poll_timeout(&self) -> Option<u64> {
        self.transport().poll_timeout()
    }

    /// See [`RcQp::modify`].
    pub fn modify(&mut self, change: &RcModify, out: &mut Wcs) -> Result<(), ModifyError> {
        match self {
            Phys::Holding(qp) => qp.modify(change, out),
            Phys::Plain(p) => p.modify(change, out),
        }
    }

    /// See [`RcQp::post_send`].
    pub fn post_send(&mut self, wr: &SendWr<'_>, out: &mut Wcs) -> Result<(), PostError> {
        let p = match self {
            Phys::Holding(qp) => return qp.post_send(wr, out),
            Phys::Plain(p) => p,
        };
        if let Posted::Give(wr_id) = p.journal.post_send(wr, out)? {
            let flags = p.journal.provider_flags(wr.flags);
            let (sges, rkey) = (p.kind.local(wr.sges), p.kind.remote(wr.rkey));
            p.provider.post_send(&SendWr { wr_id, flags, sges: &sges, rkey, ..*wr }, &mut p.cqs)?;
        }
        p.settle(out);
        Ok(())
    }

    /// Posts what was held, for which there is room.
    pub fn post_held(&mut self, sends: &[SendEntry], out: &mut Wcs) -> Result<(), PostError> {
        sends.iter().try_for_each(|entry| self.post_send(&entry.wr(), out))
    }

    /// See [`RcQp::post_recv`].
    pub fn post_recv(&mut self, wr: &RecvWr<'_>, out: &mut Wcs) -> Result<(), PostError> {
        let p = match self {
            Phys::Holding(qp) => return qp.post_recv(wr, out),
            Phys::Plain(p) => p,
        };
        if let Posted::Give(wr_id) = p.journal.post_recv(wr, out)? {
            p.provide_recv(&RecvWr { wr_id, sges: &p.kind.local(wr.sges) })?;
        }
        p.settle(out);
        Ok(())
    }

    /// See [`RcQp::handle_packet`].
    pub fn handle_packet(
        &mut self,
        now_us: u64,
        packet: &Packet<'_>,
        mem: &(impl Memory + ?Sized),
        out: &mut Wcs,
    ) {
        match self {
            Phys::Holding(qp) => qp.handle_packet(now_us, packet, mem, out),
            Phys::Plain(p) => {
                p.now_us = now_us;
                p.provider.handle_packet(now_us, packet, mem, &mut p.cqs);
                p.settle(out);
            }
        }
    }

    /// See [`RcQp::handle_timeout`].
    pub fn handle_timeout(&mut self, now_us: u64, out: &mut Wcs) {
        match self {
            Phys::Holding(qp) => qp.handle_timeout(now_us, out),
            Phys::Plain(p) => {
                p.now_us = now_us;
                p.provider.handle_timeout(now_us, &mut p.cqs);
                p.settle(out);
            }
        }
    }

    /// See [`RcQp::poll_transmit`].
    pub fn poll_transmit(
        &mut self,
        now_us: u64,
        sink: &mut impl PacketSink,
        out: &mut Wcs,
    ) -> bool {
        match self {
            Phys::Holding(qp) => qp.poll_transmit(now_us, sink, out),
            Phys::Plain(p) => {
                p.now_us = now_us;
                let more = p.provider.poll_transmit(now_us, sink, &mut p.cqs);
                p.settle(out);
                more
            }
        }
    }

    /// Stops it for ever; `None`: not yet. `gone`: its NIC is dead, and not only its port down.
    pub fn quiesce(
        &mut self,
        now_us: u64,
        gone: bool,
        out: &mut Wcs,
    ) -> Result<Option<Backlog>, QuiesceError> {
        match self {
            Phys::Holding(qp) => Ok(Some(qp.quiesce())),
            Phys::Plain(p) => {
                p.now_us = now_us;
                p.quiesce(gone, out)
            }
        }
    }

    /// See [`RcQp::adopt`].
    pub fn adopt(&mut self, backlog: &Backlog, out: &mut Wcs) -> Result<(), PostError> {
        match self {
            Phys::Holding(qp) => qp.adopt(backlog),
            Phys::Plain(p) => {
                p.journal.adopt(backlog, out)?;
                p.give(out)
            }
        }
    }

    /// See [`RcQp::fail`].
    pub fn fail(&mut self, status: WcStatus, out: &mut Wcs) {
        match self {
            Phys::Holding(qp) => qp.fail(status, out),
            Phys::Plain(p) => {
                p.journal.fail(status, out);
                let err = RcModify { state: Some(QpState::Err), ..RcModify::default() };
                p.provider.modify(&err, &mut p.cqs).expect("any state to ERR");
                p.silent = 0;
                p.settle(out);
            }
        }
    }
}

impl Plain {
    fn modify(&mut self, change: &RcModify, out: &mut Wcs) -> Result<(), ModifyError> {
        // There are devices whose QPs do not come back from ERR.
        assert!(self.provider.state() != QpState::Err, "a QP in ERR is used again");
        self.provider.modify(change, &mut self.cqs)?;
        self.state = change.state.unwrap_or(self.state);
        if change.state == Some(QpState::Rts) {
            self.journal.start();
            self.give(out).expect("what the journal took fits");
        }
        self.settle(out);
        Ok(())
    }

    /// The provider gets what waits.
    fn give(&mut self, out: &mut Wcs) -> Result<(), PostError> {
        while let Some(wr) = self.journal.next_recv() {
            let (wr_id, sges) = (wr.wr_id, self.kind.local(wr.sges));
            self.provide_recv(&RecvWr { wr_id, sges: &sges })?;
            self.journal.gave_recv();
        }
        self.give_sends(out)?;
        self.settle(out);
        Ok(())
    }

    fn provide_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.cqs.in_error = self.provider.state() == QpState::Err;
        self.provider.post_recv(wr, &mut self.cqs)
    }

    fn give_sends(&mut self, out: &mut Wcs) -> Result<(), PostError> {
        while let Some(wr) = self.journal.next_send(out) {
            let (sges, rkey) = (self.kind.local(wr.sges), self.kind.remote(wr.rkey));
            self.provider.post_send(&SendWr { sges: &sges, rkey, ..wr }, &mut self.cqs)?;
            self.journal.gave_send();
        }
        Ok(())
    }

    /// Takes the provider's event.
    fn hear(&mut self, out: &mut Wcs) {
        let Some(event) = self.provider.take_event() else { return };
        if matches!(event, RcEvent::AccessError | RcEvent::RequestError) {
            self.journal.handle_own_error(out);
        }
        self.event = Some(event);
    }

    /// Takes what the provider has told; one in ERR is given what waits, for the flushes.
    fn settle(&mut self, out: &mut Wcs) {
        if self.kind.events_first {
            self.hear(out);
        }
        self.take(out);
        if self.journal.ended() {
            self.give_sends(out).expect("what the journal took fits");
            self.take(out);
        }
    }

    fn take(&mut self, out: &mut Wcs) {
        if self.silent > 0 && !self.journal.ended() {
            return; // nobody asks any more of one that has ended
        }
        if self.journal.ended() {
            self.cqs.reveal();
        }
        self.cqs.in_error = self.provider.state() == QpState::Err;
        let mut look = self.cqs.look();
        if self.kind.recvs_first {
            self.take_recvs(&mut look, out);
        }
        while let Some(wc) = self.cqs.send_of(&mut look) {
            self.take_wc(&wc, out);
        }
        self.take_recvs(&mut look, out);
        if self.provider.take_last_wqe() {
            self.journal.handle_last_wqe();
        }
        self.journal.poll_failure(true);
    }

    fn take_recvs(&mut self, look: &mut Look, out: &mut Wcs) {
        while let Some(wc) = self.cqs.recv_of(look) {
            self.take_recv(&wc, out);
        }
    }

    /// As polls do: in place, where it is a usual one.
    fn take_wc(&mut self, wc: &Wc, out: &mut Wcs) {
        let mut usual = *wc;
        match Slot::parse(wc.wr_id) {
            _ if !self.journal.complete_usual(&mut usual) => {
                self.journal.handle_wc(self.now_us, wc, out);
            }
            Some(Slot::Entry(Queue::Recv, _)) => out.recv(usual, false),
            _ => out.send(usual),
        }
    }

    fn take_recv(&mut self, wc: &Wc, out: &mut Wcs) {
        let Some(shared) = &self.shared else {
            return self.take_wc(wc, out);
        };
        let shown = Wc { qp_num: self.journal.wc_qpn(), ..*wc };
        if self.journal.is_over() {
            shared.unused(wc.wr_id);
        } else if wc.status == WcStatus::Success as u32 {
            self.journal.handle_shared_recv(self.now_us);
            shared.forget(wc.wr_id);
            out.recv(shown, false);
        } else if self.journal.handle_shared_recv_error(wc, out) {
            shared.forget(wc.wr_id);
            out.recv(shown, false);
        } else {
            shared.unused(wc.wr_id);
        }
    }

    fn quiesce(&mut self, gone: bool, out: &mut Wcs) -> Result<Option<Backlog>, QuiesceError> {
        self.silent = self.silent.saturating_sub(1);
        self.settle(out);
        loop {
            if gone {
                // The kernel has taken the device away: what had come is taken in, and what it was
                // lent comes back.
                self.silent = 0;
                self.settle(out);
                self.provider.quiesce();
                self.journal.provider_gone();
            }
            match self.journal.stop(self.now_us, out) {
                Step::ToErr => {
                    let err = RcModify { state: Some(QpState::Err), ..RcModify::default() };
                    self.silent = 1 + self.kind.slow;
                    self.provider.modify(&err, &mut self.cqs).expect("any state to ERR");
                    self.journal.in_error();
                }
                Step::Mark(queue) => {
                    self.mark(queue);
                    self.journal.marked(queue);
                }
                Step::Wait if self.silent <= 1 && !self.looked => {
                    (self.silent, self.looked) = (0, true);
                    self.settle(out);
                    if self.cqs.no_recvs() {
                        self.journal.recvs_polled();
                    }
                }
                Step::Destroy => {
                    self.silent = 0;
                    self.take_all(out);
                    self.provider.quiesce();
                    self.cqs.destroyed();
                    self.take_all(out);
                    self.destroyed = true;
                    self.journal.provider_gone();
                }
                Step::Wait => {
                    self.looked = false;
                    return Ok(None);
                }
                Step::Done(backlog) => {
                    // What comes now belongs to nothing.
                    self.cqs.reveal();
                    self.take_all(out);
                    if let Some(shared) = &self.shared {
                        shared.end();
                    }
                    return Ok(Some(backlog));
                }
                Step::Ended => return Err(QuiesceError),
                Step::Strange => panic!("a provider that works"),
            }
        }
    }

    /// Looks until both CQs are empty.
    fn take_all(&mut self, out: &mut Wcs) {
        self.settle(out);
        while !self.cqs.is_empty() {
            self.settle(out);
        }
    }

    fn mark(&mut self, queue: Queue) {
        let wr_id = Slot::Marker(queue).wr_id();
        let posted = match queue {
            Queue::Recv => self.provide_recv(&RecvWr { wr_id, sges: &[] }),
            Queue::Send => {
                let wr = SendWr {
                    wr_id,
                    opcode: SendOpcode::Send,
                    flags: SendFlags::SIGNALED,
                    ..SendWr::default()
                };
                self.provider.post_send(&wr, &mut self.cqs)
            }
        };
        posted.expect("there is room for a marker");
    }
}
