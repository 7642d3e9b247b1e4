//! A QP of a plain device that is not protected: UC, UD, and RC without failover. Protection domain
//! and keys are translated, and the QPN in its completions; nothing is kept.

use crate::cq::{CqReservation, Member, ProviderCq};
use crate::device::{Opened, PdUse};
use crate::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use unbroken_types::{Progress, QpState, Sge, UdDest, Wc, WcStatus};
use unbroken_verbs::{
    Backlog, DeviceEvent, DeviceQp, Error, ListResult, QpEvent, QpInit, QpModify, QpSnapshot,
    RcModify, RecvWr, Result, ResumableQp, SendBatch, SendWr,
};

/// See the module's text.
pub(crate) struct PassedQp {
    opened: Arc<Opened>,
    phys: Arc<dyn DeviceQp>,
    qpn: u32,
    wc_qpn: u32,
    /// It is one life of a logical QP, which outlives it: its completions stay.
    one_life: bool,
    /// The NIC whose local keys the application has.
    default: usize,
    /// Until it is destroyed: a poller may use the QP for a moment longer.
    pd: Mutex<Option<PdUse>>,
    sends: CqReservation,
    recvs: CqReservation,
    /// It has lost a completion.
    lost: AtomicBool,
    destroyed: AtomicBool,
}

impl PassedQp {
    pub(crate) fn new(opened: &Arc<Opened>, init: &QpInit) -> Result<Arc<PassedQp>> {
        if init.srq.is_some() {
            return Err(Error::unsupported(
                "on devices that have plain verbs only, QPs that are not protected cannot use an \
                 SRQ",
            ));
        }
        let sends = opened.reserve_cq(&init.send_cq, init.caps.max_send_wr.max(1))?;
        let recvs = opened.reserve_cq(&init.recv_cq, init.caps.max_recv_wr.max(1))?;
        let pd = PdUse::new(opened, init.pd)?;
        let provider = QpInit {
            pd: pd.handle(),
            send_cq: sends.cq().cq().clone(),
            recv_cq: recvs.cq().cq().clone(),
            suspend_on_error: false,
            wc_qpn: None,
            lane: None,
            ..init.clone()
        };
        let phys = opened.device.create_qp(&provider).map_err(|e| opened.error(e))?;
        let qpn = phys.qpn();
        let qp = Arc::new(PassedQp {
            opened: opened.clone(),
            phys,
            qpn,
            wc_qpn: init.wc_qpn.unwrap_or(qpn),
            one_life: init.wc_qpn.is_some() || init.suspend_on_error,
            default: init.local_keys_of.map_or(opened.index, usize::from),
            pd: Mutex::new(Some(pd)),
            sends,
            recvs,
            lost: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
        });
        let member: Arc<dyn Member> = qp.clone();
        qp.sends.join(qpn, &member);
        qp.recvs.join(qpn, &member);
        Ok(qp)
    }

    /// The NIC whose keys must be translated, if they must.
    #[inline]
    fn away_from(&self) -> Option<usize> {
        let default = self.default;
        (default != self.opened.index || self.opened.memory.is_foreign(default)).then_some(default)
    }

    #[cold]
    fn translated(&self, default: usize, sges: &[Sge]) -> Result<Vec<Sge>> {
        let (memory, nic) = (&self.opened.memory, self.opened.index);
        sges.iter()
            .map(|sge| Ok(Sge { lkey: memory.lkey_on(default, sge.lkey, nic)?, ..*sge }))
            .collect()
    }

    #[cold]
    fn post_translated(&self, default: usize, batch: &dyn SendBatch) -> Result<()> {
        let lists = (0..batch.count()).map(|i| {
            let wr = batch.wr(i);
            self.translated(default, if wr.inline_data.is_some() { &[] } else { wr.sges })
        });
        let lists: Vec<Vec<Sge>> = lists.collect::<Result<_>>()?;
        self.phys.post_sends(&Translated { batch, lists: &lists })
    }
}

/// A batch with other entries.
struct Translated<'a> {
    batch: &'a dyn SendBatch,
    lists: &'a [Vec<Sge>],
}

impl SendBatch for Translated<'_> {
    fn count(&self) -> usize {
        self.batch.count()
    }

    fn wr(&self, index: usize) -> SendWr<'_> {
        SendWr { sges: &self.lists[index], ..self.batch.wr(index) }
    }
}

impl Member for PassedQp {
    fn take(&self, from: &ProviderCq, wcs: &[Wc]) -> bool {
        let app = if self.sends.is_at(from) { self.sends.app() } else { self.recvs.app() };
        let mut fits = true;
        for wc in wcs {
            fits &= app.offer(Wc { qp_num: self.wc_qpn, ..*wc }, false);
        }
        if !fits {
            self.lose(false);
        }
        false
    }

    fn settle(&self, _found_empty: &ProviderCq) -> bool {
        true
    }

    /// As on any device; one that has ended before loses flushes only.
    fn lose(&self, with_device: bool) {
        if self.lost.swap(true, Ordering::AcqRel) || self.phys.state() == QpState::Err {
            return;
        }
        self.fail(WcStatus::FatalErr);
        if !with_device {
            let event = DeviceEvent::Qp { qpn: self.qpn, event: QpEvent::Fatal };
            self.opened.interceptor.sink().event(self.opened.index, event);
        }
    }
}

impl DeviceQp for PassedQp {
    fn qpn(&self) -> u32 {
        self.qpn
    }

    fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        match self.away_from() {
            None => self.phys.post_send(wr),
            Some(default) => self.post_translated(default, wr),
        }
        .map_err(|e| self.opened.error(e))
    }

    fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        match self.away_from() {
            None => self.phys.post_sends(batch),
            Some(default) => self.post_translated(default, batch),
        }
        .map_err(|e| self.opened.error(e))
    }

    fn post_list(&self, list: &[SendWr<'_>]) -> ListResult {
        let posted = match self.away_from() {
            None => self.phys.post_list(list),
            Some(default) => list.iter().enumerate().try_for_each(|(before, wr)| {
                self.post_translated(default, wr).map_err(|e| (before, e))
            }),
        };
        posted.map_err(|(before, e)| (before, self.opened.error(e)))
    }

    fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        let posted = match self.away_from() {
            None => self.phys.post_recv(wr),
            Some(default) => {
                self.phys.post_recv(&RecvWr { sges: &self.translated(default, wr.sges)?, ..*wr })
            }
        };
        posted.map_err(|e| self.opened.error(e))
    }

    fn prepare(&self, to: &UdDest) {
        self.phys.prepare(to);
    }

    fn modify(&self, change: &QpModify) -> Result<()> {
        self.phys.modify(change).map_err(|e| self.opened.error(e))
    }

    fn query(&self) -> QpSnapshot {
        self.phys.query()
    }

    /// Only the device knows what errors have made of it.
    fn state(&self) -> QpState {
        self.phys.ask_state()
    }

    fn destroy(&self) {
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.phys.destroy();
        self.sends.leave(self.qpn, self);
        self.recvs.leave(self.qpn, self);
        drop(lock(&self.pd).take());
        if !self.one_life {
            self.sends.app().purge(self.qpn);
            self.recvs.app().purge(self.qpn);
        }
    }
}

impl ResumableQp for PassedQp {
    fn progress(&self) -> Progress {
        Progress { state: self.phys.state(), ..Progress::default() }
    }

    fn quiesce(&self) -> Result<Backlog> {
        Err(Error::unsupported("a QP that is not protected cannot be moved"))
    }

    fn adopt(&self, _backlog: Backlog) -> Result<()> {
        Err(Error::unsupported("a QP that is not protected takes over no work"))
    }

    /// It ends as it is: its work is flushed.
    fn fail(&self, _status: WcStatus) {
        let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
        // On a device that does not take it, there is nothing more to end.
        let _ = self.phys.modify(&QpModify { rc, ..QpModify::default() });
    }
}

impl Drop for PassedQp {
    fn drop(&mut self) {
        self.destroy();
    }
}
