//! Path migration of an RC QP: what [`crate::migration`] decides, done.

use super::RcQp;
use crate::encoding::ack_timeout_us;
use crate::migration::Via;
use unbroken_types::QpState;

impl RcQp {
    /// Whether a packet with this MigReq bit says something new: its way is then to be told by
    /// [`Self::hear`], before the packet is handled.
    #[inline]
    pub fn is_news(&self, mig_req: bool) -> bool {
        self.watched >> u8::from(mig_req) & 1 != 0
    }

    /// A packet of the peer has come that way, with this MigReq bit.
    #[cold]
    pub fn hear(&mut self, now_us: u64, mig_req: bool, via: Via) {
        if !self.stopped() && self.is_connected() {
            if self.migration.hear(mig_req, via) {
                self.take_path(Some(now_us), false);
            }
            self.watch();
        }
    }

    /// The port of the path in use has lost its link, as its owner knows at once.
    pub fn path_lost(&mut self, now_us: u64) {
        if !self.stopped() && self.is_connected() && self.migration.lose_port() {
            self.take_path(Some(now_us), true);
        }
    }

    /// Says whether the port of the alternate path has a link; it has until something else is said.
    pub fn set_alternate_usable(&mut self, usable: bool) {
        self.migration.usable = usable;
    }

    /// Whether the alternate path has become the one in use since this was last asked: whoever
    /// knows its address sends there from now on.
    pub fn take_path_change(&mut self) -> bool {
        std::mem::take(&mut self.migration.moved)
    }

    pub(super) fn is_connected(&self) -> bool {
        matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd)
    }

    /// Goes on over what was the alternate path.
    pub(super) fn take_path(&mut self, now_us: Option<u64>, lost: bool) {
        self.attrs.timeout = self.migration.timeout().or(self.attrs.timeout);
        self.requester.limits.timeout_us = self.attrs.timeout.and_then(ack_timeout_us);
        self.requester.path_changed(now_us, lost);
        self.watch();
    }

    pub(super) fn watch(&mut self) {
        self.connection.mig_req = self.migration.mig_req();
        self.watched = self.migration.watched();
    }
}
