//! The end of a NIC.
//!
//! ```text
//!   working ── the link says dead ──► dead: no sockets, no work, for ever
//!                                       QPs that hold       stop and keep what they have
//!                                       plain QPs           flush at once, or (a plain NIC's, some of them) take posts until their
//!                                                           time has come, and flush then, by the background thread
//! ```

use super::{Engine, QpEntry};
use unbroken_types::WcStatus;
use unbroken_verbs::DeviceEvent;

impl Engine {
    /// The NIC is gone: sockets are closed, QPs that hold on failure stop and keep what they have,
    /// others flush; some of a plain NIC's do so late ([`Engine::flush_late`]).
    pub(super) fn die(&mut self, now_us: u64) {
        self.sockets = None;
        self.close_credits();
        self.awaiting_credit.clear();
        self.ready.clear();
        self.owing.clear();
        self.timers.clear();
        self.late.clear();
        self.sink.event(self.id.index, DeviceEvent::Fatal);
        if let Some(plain) = &self.id.plain {
            plain.domain.die();
        }
        for q in self.qps.iter_mut() {
            q.queued = false;
            self.congestion.leave(q.qpn as u16, &mut q.share);
            if let Some(death) = q.death.filter(|death| death.late_us > 0) {
                q.flush_at_us = Some(now_us + death.late_us);
                continue;
            }
            q.stop(WcStatus::FatalErr);
            q.tell(self.id.index, &*self.sink);
        }
    }

    /// Of a dead NIC: flushes the QPs whose time has come, and says when that of the next comes.
    pub(crate) fn flush_late(&mut self, now_us: u64) -> Option<u64> {
        let mut next_us = None;
        for q in self.qps.iter_mut() {
            match q.flush_at_us {
                Some(at_us) if at_us <= now_us => {
                    q.flush_at_us = None;
                    q.stop(WcStatus::FatalErr);
                    q.tell(self.id.index, &*self.sink);
                }
                Some(at_us) => {
                    next_us = Some(next_us.map_or(at_us, |next_us: u64| next_us.min(at_us)))
                }
                None => {}
            }
        }
        next_us
    }

    /// Tells what a QP has to tell.
    pub(crate) fn tell(&mut self, index: u16) {
        if let Some(q) = self.qps.get_mut(index) {
            q.tell(self.id.index, &*self.sink);
        }
    }

    /// A QP of a dead NIC that takes posts still.
    pub(crate) fn taking(&mut self, index: u16, now_us: u64) -> Option<&mut QpEntry> {
        self.qps.get_mut(index).filter(|q| q.flush_at_us.is_some_and(|at_us| now_us < at_us))
    }
}
