//! A QP of the provider.

use crate::ah::AddressHandles;
use crate::convert::{check_opcode, fill_any, fill_send, modify, recv_wr};
use crate::cq::HostCq;
use crate::device::Shared;
use crate::library::{check, null_error};
use crate::memory::HostMemory;
use crate::srq::HostSrq;
use crate::{lock, Object};
use std::ffi::c_int;
use std::mem::{zeroed, MaybeUninit};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use unbroken_types::{PdHandle, QpCaps, QpState, QpType, SendOpcode, Sge, UdDest};
use unbroken_verbs::abi::*;
use unbroken_verbs::{
    DeviceQp, Error, ListResult, MemoryDomain, QpInit, QpModify, QpSnapshot, RawQp, RcModify,
    RecvWr, Result, SendBatch, SendWr,
};

/// Sends of a list that are given to the provider at a time.
const CHAIN: usize = 32;

/// What the QP uses, and lets go of when it is destroyed.
struct Uses {
    _srq: Option<Arc<HostSrq>>,
    pd: PdHandle,
}

/// See the module's text. All calls of it may come from any thread; libibverbs has the locks.
pub(crate) struct HostQp {
    shared: Arc<Shared>,
    memory: Arc<HostMemory>,
    raw: Object<ibv_qp>,
    qpn: u32,
    kind: QpType,
    caps: QpCaps,
    handles: AddressHandles,
    post_send: PostSend,
    post_recv: PostRecv,
    /// All that was set.
    attrs: Mutex<QpModify>,
    /// The port that it uses, from 1.
    port: AtomicU8,
    _cqs: [Arc<HostCq>; 2],
    uses: Mutex<Option<Uses>>,
    /// Whether the provider still has it: read over each use, written when it is destroyed.
    exists: RwLock<bool>,
}

/// The error of a post. Providers return an errno, a negative one (rxe), or -1 with errno set.
#[cold]
fn posting_error(what: &str, code: c_int) -> Error {
    let e = match code {
        -1 => std::io::Error::last_os_error(),
        code => std::io::Error::from_raw_os_error(code.saturating_abs().max(1)),
    };
    Error::os(what, &e)
}

impl HostQp {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        memory: &Arc<HostMemory>,
        init: &QpInit,
    ) -> Result<HostQp> {
        let context = &shared.context;
        let cqs = [shared.cq_behind(&init.send_cq)?, shared.cq_behind(&init.recv_cq)?];
        let srq = init.srq.as_ref().map(|srq| shared.srq_behind(srq)).transpose()?;
        // SAFETY: an open context; the slots never change.
        let ops = unsafe { (*context.raw()).ops };
        let (Some(post_send), Some(post_recv)) = (ops.post_send, ops.post_recv) else {
            return Err(Error::unsupported(format!("{}: nothing can be posted", context.name)));
        };
        let pd = memory.raw_pd(init.pd)?;
        memory.use_pd(init.pd)?;
        let caps = init.caps;
        let mut attr = ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: cqs[0].raw.0,
            recv_cq: cqs[1].raw.0,
            srq: srq.as_ref().map_or(null_mut(), |srq| srq.raw.0),
            cap: ibv_qp_cap {
                max_send_wr: caps.max_send_wr,
                max_recv_wr: if srq.is_some() { 0 } else { caps.max_recv_wr },
                max_send_sge: caps.max_send_sge,
                max_recv_sge: if srq.is_some() { 0 } else { caps.max_recv_sge },
                max_inline_data: caps.max_inline_data,
            },
            qp_type: init.qp_type as c_int,
            sq_sig_all: init.sq_sig_all.into(),
        };
        // SAFETY: a domain that is counted as used, queues that the QP keeps, a live local.
        let raw = unsafe { context.library.create_qp(pd, &mut attr) };
        if raw.is_null() {
            let e = null_error(&format!("{}: ibv_create_qp", context.name));
            memory.unuse_pd(init.pd);
            return Err(e);
        }
        // SAFETY: just made.
        let qpn = unsafe { (*raw).qp_num };
        let resolver = init.control.then(|| shared.resolver.clone());
        Ok(HostQp {
            shared: shared.clone(),
            memory: memory.clone(),
            raw: Object(raw),
            qpn,
            kind: init.qp_type,
            caps,
            handles: AddressHandles::new((context, shared.gid()), pd, memory, resolver),
            post_send,
            post_recv,
            attrs: Mutex::default(),
            port: AtomicU8::new(1),
            _cqs: cqs,
            uses: Mutex::new(Some(Uses { _srq: srq, pd: init.pd })),
            exists: RwLock::new(true),
        })
    }

    /// Keeps the provider's QP while it is used; EINVAL where it was destroyed.
    #[inline]
    fn in_use(&self) -> Result<RwLockReadGuard<'_, bool>> {
        let exists = self.exists.read().unwrap_or_else(PoisonError::into_inner);
        match *exists {
            true => Ok(exists),
            false => Err(Error::invalid("the QP has been destroyed")),
        }
    }

    /// Gives the provider a list of `count` that begins there. Err: how many it took, and its
    /// answer.
    #[inline(always)]
    fn give(
        &self,
        first: *mut ibv_send_wr,
        count: usize,
    ) -> std::result::Result<(), (usize, c_int)> {
        let mut bad = null_mut();
        // SAFETY: a QP of ours and a list that lives over the call.
        let code = unsafe { (self.post_send)(self.raw.0, first, &mut bad) };
        if code == 0 {
            return Ok(());
        }
        let taken = (bad as usize).saturating_sub(first as usize) / size_of::<ibv_send_wr>();
        Err((taken.min(count), code))
    }

    #[inline(always)]
    fn post_as(&self, wr_id: u64, wr: &SendWr<'_>) -> Result<()> {
        let _in_use = self.in_use()?;
        let (mut inline, mut c) = (Sge::default(), MaybeUninit::uninit());
        if let Err(e) = fill_send(&mut c, wr_id, wr, &mut inline) {
            return self.change_key(wr_id, wr, e);
        }
        let posted = match &wr.ud {
            Some(to) => self.give_to(to, &mut c)?,
            None => self.give(c.as_mut_ptr(), 1),
        };
        posted.map_err(|(_, code)| self.refused(code))
    }

    /// Gives the provider a send that changes a key, if programs may use the device's windows; else
    /// the error is that of [`fill_send`].
    #[cold]
    fn change_key(&self, wr_id: u64, wr: &SendWr<'_>, e: Error) -> Result<()> {
        if !self.memory.has_windows() {
            return Err(e);
        }
        let (mut inline, mut c) = (Sge::default(), MaybeUninit::uninit());
        fill_any(&mut c, wr_id, wr, &mut inline);
        // SAFETY: just written.
        let c = unsafe { c.assume_init_mut() };
        let refused = |(_, code)| self.refused(code);
        if wr.opcode != SendOpcode::BindMw {
            // C has the key to invalidate where an immediate would be.
            c.imm_data = wr.rkey;
            return self.give(c, 1).map_err(refused);
        }
        self.memory.bind(wr, |bind| {
            (c.imm_data, c.bind_mw) = (0, bind);
            self.give(c, 1).map_err(refused)
        })
    }

    /// Gives the provider a datagram.
    fn give_to(
        &self,
        to: &UdDest,
        c: &mut MaybeUninit<ibv_send_wr>,
    ) -> Result<std::result::Result<(), (usize, c_int)>> {
        let port = self.port.load(Ordering::Relaxed);
        self.handles.with(port, to, |ah| {
            let ud = ibv_wr_ud { ah, remote_qpn: to.qpn, remote_qkey: to.qkey };
            // SAFETY: written by the caller, but for this.
            unsafe { (*c.as_mut_ptr()).wr.ud = ud };
            self.give(c.as_mut_ptr(), 1)
        })
    }

    /// Gives the provider `count` sends in lists of at most [`CHAIN`], so that it rings its
    /// doorbell once for each; `fill` writes one. Err: how many it took, and why not the next.
    fn give_all(
        &self,
        count: usize,
        mut fill: impl FnMut(usize, &mut MaybeUninit<ibv_send_wr>, &mut Sge) -> Result<()>,
    ) -> ListResult {
        let _in_use = self.in_use().map_err(|e| (0, e))?;
        let mut inline = [Sge::default(); CHAIN];
        let mut list = [const { MaybeUninit::<ibv_send_wr>::uninit() }; CHAIN];
        let mut done = 0;
        while done < count {
            let (mut n, mut wrong) = (0, None);
            while n < CHAIN.min(count - done) && wrong.is_none() {
                match fill(done + n, &mut list[n], &mut inline[n]) {
                    Ok(()) => n += 1,
                    Err(e) => wrong = Some(e),
                }
            }
            let first = list.as_mut_ptr().cast::<ibv_send_wr>();
            for i in 1..n {
                // SAFETY: the first `n` are written.
                unsafe { (*first.add(i - 1)).next = first.add(i) };
            }
            if n > 0 {
                self.give(first, n).map_err(|(taken, code)| (done + taken, self.refused(code)))?;
            }
            done += n;
            if let Some(e) = wrong {
                return Err((done, e));
            }
        }
        Ok(())
    }

    #[cold]
    fn refused(&self, code: c_int) -> Error {
        let what = format!("{}: ibv_post_send", self.shared.context.name);
        posting_error(&what, code)
    }

    /// The provider has taken a part of what must be taken as a whole: no error that the caller
    /// could be told would be true of all, so the QP ends, and all of it is flushed.
    #[cold]
    fn took_a_part(&self) {
        let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
        // One that cannot go there is there already.
        let _ = self.modify(&QpModify { rc, ..QpModify::default() });
    }
}

impl DeviceQp for HostQp {
    fn qpn(&self) -> u32 {
        self.qpn
    }

    fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        self.post_as(wr.wr_id, wr)
    }

    fn post_send_as(&self, wr_id: u64, wr: &SendWr<'_>) -> Result<()> {
        self.post_as(wr_id, wr)
    }

    fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        let known = (0..batch.count()).try_for_each(|i| check_opcode(batch.wr(i).opcode));
        let changes_keys = known.is_err();
        if !self.memory.has_windows() {
            known?;
        }
        let posted = match self.kind == QpType::Ud || changes_keys {
            true => (0..batch.count())
                .try_for_each(|i| self.post_send(&batch.wr(i)).map_err(|e| (i, e))),
            false => self.give_all(batch.count(), |i, c, inline| {
                let wr = batch.wr(i);
                fill_send(c, wr.wr_id, &wr, inline)
            }),
        };
        match posted {
            Err((0, e)) => Err(e),
            Err(_) => {
                self.took_a_part();
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn post_list(&self, list: &[SendWr<'_>]) -> ListResult {
        let changes_keys =
            self.memory.has_windows() && list.iter().any(|wr| wr.opcode.changes_keys());
        if self.kind == QpType::Ud || changes_keys {
            return list
                .iter()
                .enumerate()
                .try_for_each(|(before, wr)| self.post_send(wr).map_err(|e| (before, e)));
        }
        self.give_all(list.len(), |i, c, inline| fill_send(c, list[i].wr_id, &list[i], inline))
    }

    fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        let _in_use = self.in_use()?;
        let mut c = recv_wr(wr);
        let mut bad = null_mut();
        // SAFETY: a QP of ours and a list of one that lives over the call.
        let code = unsafe { (self.post_recv)(self.raw.0, &mut c, &mut bad) };
        match code {
            0 => Ok(()),
            code => {
                let what = format!("{}: ibv_post_recv", self.shared.context.name);
                Err(posting_error(&what, code))
            }
        }
    }

    fn prepare(&self, to: &UdDest) {
        if let Ok(_in_use) = self.in_use() {
            self.handles.prepare(self.port.load(Ordering::Relaxed), to);
        }
    }

    fn modify(&self, change: &QpModify) -> Result<()> {
        let _in_use = self.in_use()?;
        let (mut attr, mask) = modify(self.kind, change);
        // SAFETY: a QP of ours and a live local.
        let code = unsafe { self.shared.context.library.modify_qp(self.raw.0, &mut attr, mask) };
        check(&format!("{}: ibv_modify_qp(mask {mask:#x})", self.shared.context.name), code)?;
        // Not before: others ask for the state while a device takes its time.
        let mut attrs = lock(&self.attrs);
        if change.rc.state == Some(QpState::Reset) {
            *attrs = QpModify::default();
        }
        attrs.rc.merge(&change.rc);
        attrs.rc.state = change.rc.state.or(attrs.rc.state);
        attrs.qkey = change.qkey.or(attrs.qkey);
        attrs.port = change.port.or(attrs.port);
        attrs.path = change.path.or(attrs.path);
        attrs.alternate = change.alternate.or(attrs.alternate);
        if let Some(port) = change.port {
            self.port.store(port, Ordering::Relaxed);
        }
        Ok(())
    }

    fn query(&self) -> QpSnapshot {
        let mut attrs = lock(&self.attrs).clone();
        attrs.rc.state.get_or_insert(QpState::Reset);
        attrs.port.get_or_insert(1);
        QpSnapshot { attrs, caps: self.caps, sq_draining: false }
    }

    fn state(&self) -> QpState {
        lock(&self.attrs).rc.state.unwrap_or_default()
    }

    fn ask_state(&self) -> QpState {
        // SAFETY: plain integers and null pointers.
        let (mut attr, mut init): (ibv_qp_attr, ibv_qp_init_attr) = unsafe { zeroed() };
        let Ok(_in_use) = self.in_use() else { return self.state() };
        let library = self.shared.context.library;
        // SAFETY: a QP of ours and live locals.
        let code = unsafe { library.query_qp(self.raw.0, &mut attr, IBV_QP_STATE, &mut init) };
        let asked = QpState::from_code(attr.qp_state).filter(|_| code == 0);
        asked.unwrap_or_else(|| self.state())
    }

    fn raw(&self) -> Option<RawQp> {
        let (post_send, post_recv) = (self.post_send, self.post_recv);
        (self.kind == QpType::Rc).then_some(RawQp { qp: self.raw.0, post_send, post_recv })
    }

    fn destroy(&self) {
        let mut exists = self.exists.write().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *exists, false) {
            return;
        }
        // SAFETY: a QP of ours, once: nobody is using it, and nobody will.
        let code = unsafe { self.shared.context.library.destroy_qp(self.raw.0) };
        drop(exists);
        self.handles.clear();
        if code != 0 && self.shared.alive() {
            // The device has it still, so what it uses stays, too.
            self.shared.undestroyed.fetch_add(1, Ordering::Relaxed);
            std::mem::forget((self._cqs.clone(), lock(&self.uses).take()));
            return;
        }
        if let Some(uses) = lock(&self.uses).take() {
            self.memory.unuse_pd(uses.pd);
        }
    }
}

impl Drop for HostQp {
    fn drop(&mut self) {
        self.destroy();
    }
}
