//! A QP of a device that takes faults.

use crate::faults::life::Life;
use crate::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use unbroken_types::{QpState, QpType, SendFlags, UdDest, Wc};
use unbroken_verbs::{
    Cq, DeviceQp, Error, QpInit, QpModify, QpSnapshot, RcModify, RecvWr, Result, SendBatch, SendWr,
};

/// See the module's text.
pub(crate) struct SeamQp {
    inner: Arc<dyn DeviceQp>,
    life: Arc<Life>,
    kind: QpType,
    control: bool,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    max_send_wr: usize,
    sq_sig_all: bool,
    /// It has been put into ERR by a fault.
    ended: AtomicBool,
    /// UD: completions of datagrams that were lost while the port was down.
    held: Mutex<Vec<Wc>>,
}

impl SeamQp {
    pub(crate) fn new(inner: Arc<dyn DeviceQp>, life: &Arc<Life>, init: &QpInit) -> Arc<SeamQp> {
        let qpn = inner.qpn();
        let qp = Arc::new(SeamQp {
            inner,
            life: life.clone(),
            kind: init.qp_type,
            control: init.control,
            send_cq: init.send_cq.clone(),
            recv_cq: init.recv_cq.clone(),
            max_send_wr: init.caps.max_send_wr as usize,
            sq_sig_all: init.sq_sig_all,
            ended: AtomicBool::new(false),
            held: Mutex::default(),
        });
        life.add_qp(&qp, qpn, qp.is_of_program());
        qp
    }

    pub(crate) fn number(&self) -> u32 {
        self.inner.qpn()
    }

    /// It has data of the program, and fails as a whole.
    pub(crate) fn is_of_program(&self) -> bool {
        !self.control && self.kind != QpType::Ud
    }

    /// A port that is down fails it.
    pub(crate) fn is_connected(&self) -> bool {
        let connected = matches!(self.inner.state(), QpState::Rtr | QpState::Rts | QpState::Sqd);
        connected && self.kind != QpType::Ud
    }

    /// The provider ends it, as where its retries have run out.
    pub(crate) fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
            // One that cannot go there is there already.
            let _ = self.inner.modify(&QpModify { rc, ..QpModify::default() });
        }
    }

    /// As if its CQs had lost completions.
    pub(crate) fn lose_completions(&self) {
        self.send_cq.lose();
        self.recv_cq.lose();
    }

    /// The port is up again: datagrams have been lost, which no sender is told.
    pub(crate) fn give_held(&self) {
        for wc in lock(&self.held).drain(..) {
            self.send_cq.offer(wc, false);
        }
    }

    /// Whether the provider is to be given what is posted.
    fn may_send(&self) -> Result<bool> {
        self.life.check_post()?;
        if !self.life.is_down() {
            return Ok(true);
        }
        if self.kind == QpType::Ud {
            return Ok(false);
        }
        if self.is_connected() {
            self.end();
        }
        Ok(true)
    }

    /// A datagram that is lost on a port that is down.
    fn hold(&self, wr_id: u64, flags: SendFlags) -> Result<()> {
        if !self.sq_sig_all && !flags.contains(SendFlags::SIGNALED) {
            return Ok(());
        }
        let mut held = lock(&self.held);
        if held.len() >= self.max_send_wr {
            return Err(Error::new(libc::ENOMEM, "the send queue is full"));
        }
        held.push(Wc { wr_id, qp_num: self.inner.qpn(), ..Wc::default() });
        Ok(())
    }
}

impl DeviceQp for SeamQp {
    fn qpn(&self) -> u32 {
        self.inner.qpn()
    }

    fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        match self.may_send()? {
            true => self.inner.post_send(wr),
            false => self.hold(wr.wr_id, wr.flags),
        }
    }

    fn post_send_as(&self, wr_id: u64, wr: &SendWr<'_>) -> Result<()> {
        match self.may_send()? {
            true => self.inner.post_send_as(wr_id, wr),
            false => self.hold(wr_id, wr.flags),
        }
    }

    fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        if self.may_send()? {
            return self.inner.post_sends(batch);
        }
        (0..batch.count()).try_for_each(|i| {
            let wr = batch.wr(i);
            self.hold(wr.wr_id, wr.flags)
        })
    }

    fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        self.life.check_post()?;
        self.inner.post_recv(wr)
    }

    fn prepare(&self, to: &UdDest) {
        self.inner.prepare(to);
    }

    fn modify(&self, change: &QpModify) -> Result<()> {
        self.life.check()?;
        self.inner.modify(change)?;
        if change.rc.state == Some(QpState::Reset) {
            self.ended.store(false, Ordering::Release);
        }
        Ok(())
    }

    fn query(&self) -> QpSnapshot {
        self.inner.query()
    }

    fn state(&self) -> QpState {
        self.inner.state()
    }

    fn ask_state(&self) -> QpState {
        self.inner.ask_state()
    }

    fn destroy(&self) {
        self.inner.destroy();
        self.life.remove_qp(self.inner.qpn());
    }
}

impl Drop for SeamQp {
    fn drop(&mut self) {
        self.destroy();
    }
}
