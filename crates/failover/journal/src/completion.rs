//! What a completion of the provider does.
//!
//! A provider executes the sends of a QP in order, and says nothing of one that was not signalled
//! and succeeded: so a success says that all before it are done. Nothing else does. Once a QP is in
//! error everything should make a WC, in order, and then the first error would say the same of what
//! is before it; but providers lose flushes, or make them up ([`crate::stop`]), and where one is
//! missing a send would count as done that never ran. So what is before an error, or a marker,
//! without a success of its own or behind it stays outstanding, and the peer's counts decide.
//!
//! What that costs: a QP that fails with sends at its end that were not signalled has more to send
//! again. Of SENDs the peer knows; WRITEs and READs are carried out again; an atomic that may have
//! run makes the switch refuse. Planned switches cost nothing, since they signal every send.
//!
//! Where the error is the application's own nothing is sent again. There a send without a sign that
//! is before the first error gets no WC, as on the device itself; one that was to be told of, and
//! that the provider has lost, is flushed, and all behind it.
//!
//! A QP in error flushes both its queues, and its two CQs are polled one after the other: a flush
//! may be seen before the error that is its reason. So every flush is only noted; it is made up
//! again from the rings if it turns out to be the application's.

use crate::journal::Journal;
use crate::mutants::left_out;
use crate::phase::Phase;
use crate::row::SendRow;
use crate::slot::{distance, Queue, Slot};
use unbroken_types::{Completions, Wc, WcOpcode, WcStatus};

/// Whether an error is the network's or the device's. A flush has its reason elsewhere.
fn is_foreign(wc: &Wc) -> Option<WcStatus> {
    use WcStatus::{FatalErr, LocQpOpErr, RemAbortErr, RespTimeoutErr, RetryExcErr, WrFlushErr};
    [RetryExcErr, RemAbortErr, FatalErr, RespTimeoutErr, LocQpOpErr, WrFlushErr]
        .into_iter()
        .find(|s| *s as u32 == wc.status)
}

impl<R: SendRow> Journal<R> {
    /// Takes a WC of the provider; `now_us` is when. Those of each CQ are given in order.
    #[inline]
    pub fn handle_wc(&mut self, now_us: u64, wc: &Wc, out: &mut (impl Completions + ?Sized)) {
        if self.stop.over() || self.phase() == Phase::Failed {
            return;
        }
        match Slot::parse(wc.wr_id) {
            Some(Slot::Entry(Queue::Send, low)) => self.handle_send(now_us, low, wc, out),
            Some(Slot::Entry(Queue::Recv, low)) => self.handle_recv(now_us, low, wc, out),
            Some(Slot::Marker(queue)) => self.handle_marker(queue, out),
            None => {}
        }
    }

    #[inline]
    fn handle_send(
        &mut self,
        now_us: u64,
        low: u64,
        wc: &Wc,
        out: &mut (impl Completions + ?Sized),
    ) {
        let Some(ahead) = distance(self.sends.first(), low) else { return };
        let index = self.sends.first() + ahead;
        if index >= self.given_sends {
            return self.is_strange();
        }
        let late = self.stopping() && left_out!(self.config.mutation, LateSuccessLost);
        if wc.status != WcStatus::Success as u32 || late {
            return self.handle_send_error(index, wc, out);
        }
        if self.broken_at.is_some() {
            return self.is_strange();
        }
        self.complete_before(index, out);
        self.advanced += 1;
        self.first_moved_us.get_or_insert(now_us);
        self.complete_oldest(wc, out);
        self.complete_executed(out);
    }

    #[cold]
    fn handle_send_error(&mut self, index: u64, wc: &Wc, out: &mut (impl Completions + ?Sized)) {
        self.flush_goes_on();
        self.sends_break_at(index, out);
        if !self.goes_through(wc, out) {
            self.spoilt_sends = index + 1;
            return;
        }
        self.drop_before_error(out);
        while self.sends.first() < index {
            self.flush_oldest_send(out);
        }
        if self.sends.first() == index {
            out.send(Wc { wr_id: self.sends.at(index).wr_id, qp_num: self.config.wc_qpn, ..*wc });
            self.sends.remove_oldest();
        }
        self.flush_absent(out);
    }

    /// An error WC of the sends, or their marker: those before `index` have none.
    #[cold]
    pub(crate) fn sends_break_at(&mut self, index: u64, out: &mut (impl Completions + ?Sized)) {
        if self.broken_at.is_some() {
            return;
        }
        self.broken_at = Some(index);
        if left_out!(self.config.mutation, FlushTrusted) {
            self.complete_before(index, out);
        }
        if matches!(self.phase(), Phase::Ending { .. }) {
            self.drop_before_error(out);
        }
    }

    /// In ERR: what is before the first error was to be told of, or is passed over. Behind one that
    /// was, all flushes are owed.
    fn drop_before_error(&mut self, out: &mut (impl Completions + ?Sized)) {
        let Some(end) = self.broken_at else { return };
        while self.sends.first() < end && !self.sends.at(self.sends.first()).signaled {
            self.sends.remove_oldest();
        }
        while self.sends.first() < end {
            self.flush_oldest_send(out);
        }
    }

    #[inline]
    fn handle_recv(
        &mut self,
        now_us: u64,
        low: u64,
        wc: &Wc,
        out: &mut (impl Completions + ?Sized),
    ) {
        let Some(ahead) = distance(self.recvs.first(), low) else { return };
        let index = self.recvs.first() + ahead;
        if index >= self.given_recvs {
            return self.is_strange();
        }
        if wc.status != WcStatus::Success as u32 {
            return self.handle_recv_error(index, wc, out);
        }
        if ahead != 0 || self.spoilt_recvs > index {
            return self.is_strange();
        }
        self.consume(now_us);
        self.recv_wc(index, wc, out);
    }

    #[cold]
    fn handle_recv_error(&mut self, index: u64, wc: &Wc, out: &mut (impl Completions + ?Sized)) {
        self.flush_goes_on();
        if !self.goes_through(wc, out) {
            self.spoilt_recvs = index + 1;
            return;
        }
        while self.recvs.first() < index {
            self.flush_oldest_recv(out);
        }
        if self.recvs.first() == index {
            self.recv_wc(index, wc, out);
        }
        self.flush_absent(out);
    }

    fn recv_wc(&mut self, index: u64, wc: &Wc, out: &mut (impl Completions + ?Sized)) {
        out.recv(
            Wc { wr_id: self.recvs.wr(index).wr_id, qp_num: self.config.wc_qpn, ..*wc },
            false,
        );
        self.recvs.remove_oldest();
    }

    /// A receive of the SRQ has completed, with success.
    #[inline]
    pub fn handle_shared_recv(&mut self, now_us: u64) {
        if !self.stop.over() && self.phase() != Phase::Failed {
            self.consume(now_us);
        }
    }

    /// A receive of the SRQ that the QP had taken has failed with this WC. True: that is for the
    /// application to see. False: the receive goes back.
    pub fn handle_shared_recv_error(
        &mut self,
        wc: &Wc,
        out: &mut (impl Completions + ?Sized),
    ) -> bool {
        self.flush_goes_on();
        !self.stop.over() && self.phase() != Phase::Failed && self.goes_through(wc, out)
    }

    fn consume(&mut self, now_us: u64) {
        if !(self.stopping() && left_out!(self.config.mutation, LateReceiveUncounted)) {
            self.consumed += 1;
        }
        self.first_moved_us.get_or_insert(now_us);
    }

    /// Whether an error is for the application to see. The first one decides what becomes of the
    /// QP.
    fn goes_through(&mut self, wc: &Wc, out: &mut (impl Completions + ?Sized)) -> bool {
        match (self.phase(), is_foreign(wc)) {
            (Phase::Ending { .. }, _) => true,
            (Phase::Live, Some(_)) if self.stopping() => false,
            (Phase::Live, Some(WcStatus::WrFlushErr))
                if left_out!(self.config.mutation, FlushLetThrough) =>
            {
                true
            }
            (Phase::Live, Some(status)) => {
                self.set_phase(Phase::Held { status, told: false });
                false
            }
            (Phase::Held { status: WcStatus::WrFlushErr, told: false }, Some(status)) => {
                self.set_phase(Phase::Held { status, told: false });
                false
            }
            (_, Some(_)) => false,
            (_, None) if left_out!(self.config.mutation, OwnErrorHeld) => false,
            (_, None) => {
                self.enter_ending(true, out);
                true
            }
        }
    }

    /// The QP is in ERR for the application: what has been flushed already, and what never will be,
    /// reaches it now.
    pub(crate) fn enter_ending(&mut self, by_error: bool, out: &mut (impl Completions + ?Sized)) {
        if self.ended() || self.stop.over() {
            return;
        }
        self.set_phase(Phase::Ending { by_error });
        self.drop_before_error(out);
        while self.sends.first() < self.spoilt_sends {
            self.flush_oldest_send(out);
        }
        while self.recvs.first() < self.spoilt_recvs {
            self.flush_oldest_recv(out);
        }
        self.flush_absent(out);
    }

    /// Everything before `index` is done.
    #[inline]
    pub(crate) fn complete_before(&mut self, index: u64, out: &mut (impl Completions + ?Sized)) {
        while self.sends.first() < index {
            self.completed.count(self.sends.at(self.sends.first()).opcode);
            self.sends.complete(out);
        }
    }

    /// The oldest has been done, and this is what the provider says of it.
    #[inline]
    fn complete_oldest(&mut self, wc: &Wc, out: &mut (impl Completions + ?Sized)) {
        let entry = self.sends.at(self.sends.first());
        self.completed.count(entry.opcode);
        if entry.signaled {
            out.send(Wc { wr_id: entry.wr_id, qp_num: self.config.wc_qpn, ..*wc });
        }
        self.sends.remove_oldest();
    }

    /// What the peer has executed completes once all before it has.
    #[inline]
    pub(crate) fn complete_executed(&mut self, out: &mut (impl Completions + ?Sized)) {
        while self.sends.first() < self.given_sends && self.sends.at(self.sends.first()).executed {
            self.completed.count(self.sends.at(self.sends.first()).opcode);
            if left_out!(self.config.mutation, ExecutedAgain) {
                return;
            }
            if left_out!(self.config.mutation, ExecutedEarly) {
                self.sends.remove_oldest();
            } else {
                self.sends.complete(out);
            }
        }
    }

    fn flush_oldest_send(&mut self, out: &mut (impl Completions + ?Sized)) {
        let wr_id = self.sends.at(self.sends.first()).wr_id;
        out.send(self.flushed(wr_id, WcOpcode::Send, WcStatus::WrFlushErr));
        self.sends.remove_oldest();
    }

    fn flush_oldest_recv(&mut self, out: &mut (impl Completions + ?Sized)) {
        let wr_id = self.recvs.wr(self.recvs.first()).wr_id;
        out.recv(self.flushed(wr_id, WcOpcode::Recv, WcStatus::WrFlushErr), false);
        self.recvs.remove_oldest();
    }

    fn flushed(&self, wr_id: u64, opcode: WcOpcode, status: WcStatus) -> Wc {
        Wc {
            wr_id,
            status: status as u32,
            opcode: opcode as u32,
            qp_num: self.config.wc_qpn,
            ..Wc::default()
        }
    }

    /// In ERR, what the provider does not have is flushed when its turn has come.
    #[inline]
    pub(crate) fn flush_absent(&mut self, out: &mut (impl Completions + ?Sized)) {
        match self.phase() {
            Phase::Live | Phase::Held { .. } => {}
            Phase::Ending { .. } => self.flush_what_waits(out),
            Phase::Failed => self.flush_all(WcStatus::WrFlushErr, out),
        }
    }

    #[cold]
    fn flush_what_waits(&mut self, out: &mut (impl Completions + ?Sized)) {
        while !self.sends.is_empty() {
            let index = self.sends.first();
            let absent = index >= self.given_sends || self.sends.at(index).executed;
            if !absent {
                break;
            }
            self.flush_oldest_send(out);
        }
        self.given_sends = self.given_sends.max(self.sends.first());
        while !self.recvs.is_empty() && self.recvs.first() >= self.given_recvs {
            self.flush_oldest_recv(out);
        }
        self.given_recvs = self.given_recvs.max(self.recvs.first());
    }

    /// The first send fails with `status`, all else is flushed.
    pub(crate) fn flush_all(&mut self, status: WcStatus, out: &mut (impl Completions + ?Sized)) {
        self.sends.flush(status, out);
        while !self.recvs.is_empty() {
            self.flush_oldest_recv(out);
        }
    }

    /// The provider says what cannot be: from now on nothing that it says is believed.
    #[cold]
    fn is_strange(&mut self) {
        self.strange = true;
        if self.phase() == Phase::Live {
            self.set_phase(Phase::Held { status: WcStatus::FatalErr, told: false });
        }
    }
}
