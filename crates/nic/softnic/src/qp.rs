//! A physical QP, as a handle: every verb takes the engine's lock, calls the transport, and sends
//! what is to be sent.

use crate::engine::{wipe, Alternate, Engine, QpEntry, QpKind};
use crate::inner::Inner;
use crate::shared::Shared;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use unbroken_fabric::now_us;
use unbroken_roce::PeerKeys;
use unbroken_types::{Progress, QpState, WcStatus};
use unbroken_verbs::{
    Backlog, Cq, DeviceQp, Driver, Error, KeyWaiter, MemoryDomain, QpInit, QpModify, QpSnapshot,
    RecvWr, RemoteNic, Result, ResumableQp, SendBatch, SendWr,
};

pub(crate) struct SoftQp {
    nic: Arc<Inner>,
    /// The NIC as a driver of CQs.
    driver: Arc<dyn Driver>,
    qpn: u32,
    /// The QP is one life of a logical QP, which outlives it: its WCs stay, and the owner of the
    /// logical QP drops them at the end.
    one_life: bool,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    destroyed: AtomicBool,
    /// Hears of keys of the peer, where those are wanted.
    key_news: Mutex<Option<Arc<KeyNews>>>,
}

impl SoftQp {
    /// The handle of a QP that is in the engine's table.
    pub(crate) fn new(nic: Arc<Inner>, qpn: u32, init: &QpInit) -> SoftQp {
        let driver: Arc<dyn Driver> = nic.shared.clone();
        init.send_cq.attach(&driver);
        init.recv_cq.attach(&driver);
        SoftQp {
            nic,
            driver,
            qpn,
            one_life: init.wc_qpn.is_some() || init.suspend_on_error,
            send_cq: init.send_cq.clone(),
            recv_cq: init.recv_cq.clone(),
            destroyed: AtomicBool::new(false),
            key_news: Mutex::default(),
        }
    }

    fn index(&self) -> u16 {
        self.qpn as u16
    }

    fn lock(&self) -> Result<MutexGuard<'_, Engine>> {
        self.nic.shared.process.check()?;
        Ok(self.nic.shared.lock())
    }

    /// The engine, if the NIC works; EIO otherwise.
    #[inline]
    fn lock_alive(&self, now_us: u64) -> Result<MutexGuard<'_, Engine>> {
        let mut e = self.lock()?;
        if e.look(now_us) {
            return Ok(e);
        }
        Err(self.dead(&e))
    }

    /// The error of a verb on a dead NIC: EIO, or what a plain one gives for this QP.
    #[cold]
    fn dead(&self, e: &Engine) -> Error {
        let death = e.qps.get(self.index()).and_then(|q| q.death);
        death.map_or_else(
            || self.nic.shared.dead(),
            |d| Error::new(d.errno, self.nic.shared.dead().to_string()),
        )
    }

    /// Posts sends, and sees to it that they leave.
    #[inline(always)]
    fn send(&self, post: impl FnOnce(&mut QpEntry) -> Result<()>) -> Result<()> {
        let now_us = now_us();
        let mut e = self.lock()?;
        if !e.look(now_us) {
            return self.post_to_dead(e, now_us, post);
        }
        post(self.entry(&mut e)?)?;
        if e.wqe_error_due() {
            e.spoil(self.index(), now_us);
        }
        self.posted(e, now_us);
        Ok(())
    }

    /// A post to a dead NIC, which a plain one may take still.
    #[cold]
    fn post_to_dead(
        &self,
        mut e: MutexGuard<'_, Engine>,
        now_us: u64,
        post: impl FnOnce(&mut QpEntry) -> Result<()>,
    ) -> Result<()> {
        match e.taking(self.index(), now_us) {
            Some(q) => post(q),
            None => Err(self.dead(&e)),
        }
    }

    #[inline]
    fn entry<'a>(&self, e: &'a mut Engine) -> Result<&'a mut QpEntry> {
        e.qps
            .get_mut(self.index())
            .ok_or_else(|| Error::invalid(format!("QP {:#x} has been destroyed", self.qpn)))
    }

    /// Changes the QP, and has nothing sent yet.
    fn step(&self, e: &mut Engine, change: &QpModify, now_us: u64) -> Result<()> {
        let mtu = self.nic.shared.mtu;
        if let Some(asked) = change.rc.mtu.filter(|asked| *asked > mtu) {
            let (asked, mtu) = (asked.bytes(), mtu.bytes());
            return Err(Error::invalid(format!(
                "a path MTU of {asked}, but the port's active MTU is {mtu}"
            )));
        }
        if let Some(port) = change.port {
            self.nic.shared.port_ip(port)?;
        }
        let alternate = self.alternate(e, change)?;
        let q = self.entry(e)?;
        let routed = change.path.map(|path| self.nic.shared.leads(&path)).transpose()?;
        q.modify(change)?;
        q.routed = routed.unwrap_or(q.routed);
        if let Some((alternate, usable)) = alternate {
            q.set_alternate(alternate, usable);
        }
        q.take_path();
        e.route(self.index());
        if change.rc.state == Some(QpState::Reset) {
            e.drain(now_us, &self.nic.shared.domain);
            self.nic.shared.progress_counters.begin(self.index());
        }
        Ok(())
    }

    /// The alternate path that a change gives, and whether its port has a link.
    fn alternate(&self, e: &Engine, change: &QpModify) -> Result<Option<(Alternate, bool)>> {
        if change.alternate.is_some() != change.rc.alternate.is_some() {
            return Err(Error::invalid("an alternate path needs its address and its timeout"));
        }
        let Some(path) = change.alternate else { return Ok(None) };
        let routed = self.nic.shared.leads(&path)?;
        Ok(Some((Alternate { path, ip: path.dest_gid.to_ip(), routed }, e.port_up(path.port))))
    }

    /// A change of a QP on a dead NIC. A plain one goes to ERR and flushes, as it will do in any
    /// case.
    #[cold]
    fn modify_dead(&self, mut e: MutexGuard<'_, Engine>, change: &QpModify) -> Result<()> {
        let error = self.dead(&e);
        let to_err = change.rc.state == Some(QpState::Err);
        let q = self.entry(&mut e)?;
        if q.death.is_none() || !to_err {
            return Err(error);
        }
        q.modify(change)?;
        q.flush_at_us = None;
        e.tell(self.index());
        Ok(())
    }

    /// Sends what the QP has to send, and lets go of the engine.
    fn kick(&self, e: MutexGuard<'_, Engine>, now_us: u64) {
        kick(&self.nic.shared, e, self.index(), now_us);
    }

    /// The same after a post. Where the thread polls all the time it may as well be the next poll
    /// that sends.
    #[inline(always)]
    fn posted(&self, mut e: MutexGuard<'_, Engine>, now_us: u64) {
        let shared = &self.nic.shared;
        if shared.poller.relied_on() && e.may_wait(self.index()) {
            shared.poller.enter(now_us);
            e.queue(self.index());
            return shared.settle(e, now_us);
        }
        self.kick(e, now_us);
    }
}

#[inline]
fn kick(shared: &Shared, mut e: MutexGuard<'_, Engine>, index: u16, now_us: u64) {
    // A thread that sends is there, too: what arrives meanwhile can wait for it.
    shared.poller.enter(now_us);
    shared.poller.set_inside(true);
    e.kick(index, now_us, &shared.domain);
    shared.poller.set_inside(false);
    shared.settle(e, now_us);
}

impl DeviceQp for SoftQp {
    fn qpn(&self) -> u32 {
        self.qpn
    }

    fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        self.send(|q| q.post_send(wr))
    }

    fn post_send_as(&self, wr_id: u64, wr: &SendWr<'_>) -> Result<()> {
        self.send(|q| q.post_send_as(wr_id, wr))
    }

    fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        self.send(|q| q.post_sends(batch))
    }

    fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        let now_us = now_us();
        let mut e = self.lock()?;
        if !e.look(now_us) {
            return self.post_to_dead(e, now_us, |q| q.post_recv(wr));
        }
        self.entry(&mut e)?.post_recv(wr)
    }

    fn modify(&self, change: &QpModify) -> Result<()> {
        let now_us = now_us();
        let mut e = self.lock()?;
        if !e.look(now_us) {
            return self.modify_dead(e, change);
        }
        self.step(&mut e, change, now_us)?;
        self.kick(e, now_us);
        Ok(())
    }

    fn query(&self) -> QpSnapshot {
        let Ok(mut e) = self.lock() else { return QpSnapshot::default() };
        self.entry(&mut e).map_or_else(|_| QpSnapshot::default(), |q| q.query())
    }

    fn state(&self) -> QpState {
        let Ok(mut e) = self.lock() else { return QpState::Err };
        self.entry(&mut e).map_or(QpState::Err, |q| q.state())
    }

    fn destroy(&self) {
        if self.nic.shared.process.elsewhere() || self.destroyed.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut e = self.nic.shared.lock();
        e.acknowledge(self.index(), now_us(), &self.nic.shared.domain);
        let removed = e.remove(self.index());
        drop(e);
        let Some(mut q) = removed else { return };
        q.release();
        self.nic.shared.domain.unuse_pd(q.pd);
        let flushes = q.flushes.take();
        wipe(q);
        self.send_cq.detach(&self.driver);
        self.recv_cq.detach(&self.driver);
        if !self.one_life {
            self.send_cq.purge(self.qpn);
            self.recv_cq.purge(self.qpn);
        }
        if let Some(mut flushes) = flushes {
            flushes.release(&self.send_cq, &self.recv_cq);
        }
    }
}

impl ResumableQp for SoftQp {
    fn progress(&self) -> Progress {
        let of_state = |state| Progress { state, ..Progress::default() };
        let Ok(mut e) = self.lock() else { return of_state(QpState::Err) };
        match self.entry(&mut e) {
            Ok(QpEntry { kind: QpKind::Rc(qp), .. }) => qp.progress(),
            Ok(q) => of_state(q.state()),
            Err(_) => of_state(QpState::Err),
        }
    }

    fn pulse(&self) -> Option<u64> {
        Some(self.nic.shared.progress_counters.get(self.index()))
    }

    fn lost(&self) -> Option<u64> {
        Some(self.nic.shared.progress_counters.lost(self.index()))
    }

    fn go_on(&self, insists: bool) -> bool {
        let now_us = now_us();
        let Ok(mut e) = self.lock_alive(now_us) else { return false };
        let goes_on = self.entry(&mut e).is_ok_and(|q| q.go_on(now_us, insists));
        self.kick(e, now_us);
        goes_on
    }

    fn quiesce(&self) -> Result<Backlog> {
        // Also on a dead NIC: its memory is this process's.
        let mut e = self.lock()?;
        match &mut self.entry(&mut e)?.kind {
            QpKind::Rc(qp) => {
                let backlog = qp.quiesce();
                e.stopped(self.index());
                Ok(backlog)
            }
            QpKind::Ud(qp) => Ok(qp.quiesce()),
            QpKind::Uc(_) => Err(Error::unsupported("a UC QP cannot be quiesced")),
        }
    }

    fn adopt(&self, backlog: Backlog) -> Result<()> {
        let mut e = self.lock_alive(now_us())?;
        match &mut self.entry(&mut e)?.kind {
            QpKind::Rc(qp) => Ok(qp.adopt(&backlog)?),
            QpKind::Ud(qp) => Ok(qp.adopt(&backlog)?),
            QpKind::Uc(_) => Err(Error::unsupported("a UC QP cannot adopt work requests")),
        }
    }

    fn modify_all(&self, changes: &[QpModify]) -> Result<()> {
        let now_us = now_us();
        let mut e = self.lock_alive(now_us)?;
        let done = changes.iter().try_for_each(|change| self.step(&mut e, change, now_us));
        self.kick(e, now_us);
        done
    }

    fn fail(&self, status: WcStatus) {
        let Ok(mut e) = self.lock() else { return };
        if let Ok(q) = self.entry(&mut e) {
            q.fail(status);
        }
        self.kick(e, now_us());
    }

    fn set_remote(&self, remote: &RemoteNic) {
        let keys = remote.matters().then(|| {
            let news = Arc::new(KeyNews { nic: Arc::downgrade(&self.nic), qpn: self.qpn });
            let waiter: Arc<dyn KeyWaiter> = news.clone();
            remote.keys.watch(Arc::downgrade(&waiter));
            *self.key_news.lock().unwrap_or_else(PoisonError::into_inner) = Some(news);
            Arc::new(KeysThere(remote.clone())) as Arc<dyn PeerKeys>
        });
        let Ok(mut e) = self.lock() else { return };
        if let Ok(q) = self.entry(&mut e) {
            q.set_peer_keys(keys);
        }
    }
}

/// A plain peer's memory, as its NICs know it.
struct KeysThere(RemoteNic);

impl PeerKeys for KeysThere {
    fn key(&self, rkey: u32) -> Option<u32> {
        self.0.key(rkey)
    }
}

/// Has a QP go on whose requests wait for keys of its peer.
struct KeyNews {
    nic: Weak<Inner>,
    qpn: u32,
}

impl KeyWaiter for KeyNews {
    fn keys_came(&self) {
        let Some(nic) = self.nic.upgrade().filter(|nic| !nic.shared.process.elsewhere()) else {
            return;
        };
        let now_us = now_us();
        let mut e = nic.shared.lock();
        let index = self.qpn as u16;
        if e.look(now_us) && e.qps.get(index).is_some_and(|q| q.qpn == self.qpn) {
            kick(&nic.shared, e, index, now_us);
        }
    }
}

impl Drop for SoftQp {
    fn drop(&mut self) {
        self.destroy();
    }
}
