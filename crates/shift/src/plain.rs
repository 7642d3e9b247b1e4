//! Physical QPs of devices that have plain verbs only: nothing above can stop one and take its work along, so nothing protects it.

use std::sync::Arc;
use unbroken_roce::Progress;
use unbroken_types::{QpState, WcStatus};
use unbroken_verbs::{
    Backlog, DeviceQp, Error, HoldingQp, QpModify, QpSnapshot, RcModify, RecvWr, Result, SendBatch, SendWr,
};

/// Why a QP on such a device is not protected.
pub(crate) const NO_JOURNAL: &str = "the device cannot hold its work, and there is no journal";

/// Such a QP in the place of one that holds. It was not made to hold, so nobody asks it to.
pub(crate) struct Plain(pub(crate) Arc<dyn DeviceQp>);

impl DeviceQp for Plain {
    fn qpn(&self) -> u32 {
        self.0.qpn()
    }

    fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        self.0.post_send(wr)
    }

    fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        self.0.post_sends(batch)
    }

    fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        self.0.post_recv(wr)
    }

    fn modify(&self, change: &QpModify) -> Result<()> {
        self.0.modify(change)
    }

    fn query(&self) -> QpSnapshot {
        self.0.query()
    }

    fn state(&self) -> QpState {
        self.0.state()
    }

    fn destroy(&self) {
        self.0.destroy()
    }
}

impl HoldingQp for Plain {
    /// Nothing is known of it.
    fn progress(&self) -> Progress {
        Progress::default()
    }

    fn quiesce(&self) -> Result<Backlog> {
        Err(Error::unsupported(NO_JOURNAL))
    }

    fn adopt(&self, _: Backlog) -> Result<()> {
        Err(Error::unsupported(NO_JOURNAL))
    }

    fn fail(&self, _: WcStatus) {
        let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
        // One that cannot go there is there already.
        let _ = self.0.modify(&QpModify { rc, ..QpModify::default() });
    }
}
