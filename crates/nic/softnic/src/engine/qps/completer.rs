//! Where completions of a QP go.

use crate::flush::Flushes;
use unbroken_types::{Completions, Wc, WcStatus};
use unbroken_verbs::Cq;

/// Where completions of a QP go.
pub(crate) struct Completer<'a> {
    pub(super) send_cq: &'a Cq,
    pub(super) recv_cq: &'a Cq,
    /// Set where one found its CQ full.
    pub(super) spilled: &'a mut bool,
    /// Of a plain NIC: what becomes of flushes.
    pub(super) flushes: Option<&'a mut Flushes>,
}

impl Completer<'_> {
    #[inline]
    fn holds(&mut self, is_send: bool, wc: &Wc) -> bool {
        wc.status != WcStatus::Success as u32
            && self.flushes.as_mut().is_some_and(|flushes| flushes.hold(is_send, wc))
    }
}

impl Completions for Completer<'_> {
    fn send(&mut self, wc: Wc) {
        if self.holds(true, &wc) {
            return;
        }
        *self.spilled |= !self.send_cq.offer(wc, false);
    }

    fn recv(&mut self, wc: Wc, solicited: bool) {
        if self.holds(false, &wc) {
            return;
        }
        *self.spilled |= !self.recv_cq.offer(wc, solicited);
    }
}
