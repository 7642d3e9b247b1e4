//! What the faults of its link do to an engine: it follows changes of what packets suffer, and
//! fails a QP where the fault is a WR that the NIC cannot execute.

use super::impair::{ImpairedPort, Impairments, WELL};
use super::tx::Out;
use super::{Engine, QpKind};
use crate::memory::Domain;
use unbroken_types::{QpState, WcStatus};

impl Engine {
    /// Follows a change of the link's state.
    pub(super) fn impair(&mut self) {
        if self.state.impaired == 0 && self.impairments.is_none() {
            return;
        }
        let (seed, conditions) = (self.seed, self.link.conditions());
        let impairments = self.impairments.get_or_insert_default();
        let ports = impairments.0.iter_mut().zip(conditions).enumerate().take(self.id.ips.len());
        for (port, (impaired, [tx, rx])) in ports {
            if impaired.is_none() && [tx, rx] == WELL {
                continue;
            }
            let i = impaired.get_or_insert_with(|| ImpairedPort::new(seed, port));
            if !self.state.passes(port as u8 + 1) {
                self.tx.counts[port].drops += i.tx.lose_all();
                self.rx_counts[port].drops += i.rx.lose_all();
            }
            i.tx.set(tx);
            i.rx.set(rx);
        }
        self.end_impairments();
    }

    /// Forgets the impairments of links that are well again, once nothing is held.
    pub(super) fn end_impairments(&mut self) {
        if self.impairments.as_deref_mut().is_some_and(Impairments::end) {
            self.impairments = None;
        }
    }

    /// When a packet that is held is due; `u64::MAX` for none.
    #[inline]
    pub(super) fn held_due_us(&self) -> u64 {
        self.impairments.as_ref().map_or(u64::MAX, |i| i.due_us())
    }

    /// The NIC is being closed: what is on its way out leaves now, as it would without its sender.
    /// One that is dead has nothing to close: its slot may be another's by now.
    pub(crate) fn close(&mut self, domain: &Domain) {
        if !self.alive() {
            return;
        }
        self.close_credits();
        let Engine { sockets: Some(sockets), tx, impairments: Some(i), accounts, .. } = self else {
            return;
        };
        let view = domain.view();
        let mut out = Out::open(tx, &sockets.tx, &view, accounts, u64::MAX);
        out.release(i, u64::MAX);
        out.flush();
        self.count();
    }

    /// Whether a `wqe-error` may be waiting for the next WR.
    #[inline]
    pub(crate) fn wqe_error_due(&self) -> bool {
        self.state.wqe_error_us > self.wqe_error_us
    }

    /// A WR was posted while a `wqe-error` was due: unless another QP has had it, the QP fails as
    /// it would by a WR that the NIC cannot execute. What it held is intact, so that it can go on
    /// elsewhere.
    #[cold]
    pub(crate) fn spoil(&mut self, index: u16, now_us: u64) {
        let Some(q) = self.qps.get_mut(index) else { return };
        if matches!(q.kind, QpKind::Ud(_)) || q.state() != QpState::Rts {
            return;
        }
        self.wqe_error_us = self.state.wqe_error_us;
        if self.pages[0].take_wqe_error(self.wqe_error_us, now_us) {
            q.stop(WcStatus::LocQpOpErr);
            q.tell(self.id.index, &*self.sink);
        }
    }
}
