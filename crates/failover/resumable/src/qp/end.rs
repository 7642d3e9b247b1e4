//! The end of a QP, and of a life of it (RESET).

use super::JournaledQp;
use crate::lock;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use unbroken_types::QpState;
use unbroken_verbs::{Error, QpModify, Result};

impl JournaledQp {
    /// Has the device's thread end it. The application need not wait for that: its protection
    /// domain and its queues are free.
    pub(super) fn end_later(self: Arc<Self>) {
        if let Some(pd) = lock(&self.pd).as_ref() {
            pd.release();
        }
        let opened = self.opened.clone();
        opened.commands.put(Box::new(move || self.end()));
    }

    pub(super) fn end(&self) {
        if self.srq.is_some() {
            // Receives that messages have used, and that are thrown away with the device's QP, would
            // be missing at the device for as long as others take from its SRQ.
            self.bring_all();
        }
        self.phys.destroy();
        self.opened.interceptor.remove(self.qpn, &self.notes);
        if let Some(srq) = &self.srq {
            srq.end();
        }
        if self.joined.swap(true, Ordering::AcqRel) {
            self.opened.memory.goes_to(self.default, self.opened.index, false);
            self.sends.leave(self.qpn, self);
            self.recvs.leave(self.qpn, self);
        }
        drop(lock(&self.pd).take());
    }

    /// Has the device change it. With no lock held that a thread takes which polls: the device may
    /// not answer.
    pub(super) fn change(&self, change: &QpModify) -> Result<()> {
        let _watch = self.opened.commands.watch();
        self.phys.modify(change).map_err(|e| self.opened.error(e))
    }

    /// The program has done with this QP, or has another in its place: nothing that the device
    /// still says of it is for anybody.
    pub(super) fn forget(&self) {
        self.state.lock().journal.forget();
    }

    /// To RESET. What the device, or a thread that brings it over, still has of the life that ends is
    /// for nobody: a receive of an SRQ would be taken for one of the next life.
    /// EIO: it is being stopped, and a command of that is under way, which would meet the next life.
    pub(super) fn reset(&self, change: &QpModify) -> Result<()> {
        if self.is_being_stopped() {
            return Err(Error::device_gone("the QP is being stopped"));
        }
        self.bring_all();
        self.change(change)?;
        let mut st = self.lock();
        st.journal.forget();
        (st.now, st.remote) = (QpState::Reset, None);
        drop(st);
        self.bring_all();
        let mut st = self.lock();
        let _of_the_life_before = self.notes.take();
        st.journal.reset();
        st.last_wqe = false;
        Ok(())
    }
}
