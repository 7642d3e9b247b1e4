//! NICs of the mocked network and their QPs, as verbs have them.

use super::*;
use std::os::fd::RawFd;
use std::sync::Weak;
use unbroken_types::PdHandle;
use unbroken_verbs::{Owner, Source};

pub(super) struct MockNic {
    pub(super) net: Net,
    pub(super) id: NicId,
    pub(super) name: String,
    pub(super) _handle: Arc<()>,
}

impl MockNic {
    fn with<R>(&self, f: impl FnOnce(&mut Nic) -> R) -> R {
        f(self.net.state().nics.get_mut(&self.id).unwrap())
    }
}

/// A queue whose size is what it is; what completes there is offered to its ring.
struct FixedCq(u32);

impl Source for FixedCq {
    fn poll(&self, _out: &mut [Wc]) -> i32 {
        0
    }

    fn arm(&self, _solicited_only: bool) {}

    fn resize(&self, entries: u32) -> Result<()> {
        match entries <= self.0 {
            true => Ok(()),
            false => Err(Error::unsupported("a CQ cannot be made larger")),
        }
    }
}

impl Driver for MockNic {
    fn drive(&self) {
        self.net.drive(self.id);
    }
}

impl Device for MockNic {
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }
    fn name(&self) -> &str {
        &self.name
    }
    fn gid(&self) -> Gid {
        gid(self.id)
    }
    fn port(&self, _port: u8) -> Result<PortAttr> {
        Ok(PortAttr {
            state: if self.usable() { PortState::Active } else { PortState::Down },
            max_mtu: Mtu::B4096,
            active_mtu: Mtu::B1024,
            gids: vec![GidEntry { gid: self.gid(), kind: GidType::RoceV2 }],
            max_msg_sz: 1 << 20,
            link_layer: LinkLayer::Ethernet,
            lid: 0,
            lmc: 0,
            sm_lid: 0,
        })
    }
    fn alive(&self) -> bool {
        self.with(|nic| nic.alive)
    }
    fn removed(&self) -> bool {
        !self.alive()
    }
    fn usable(&self) -> bool {
        self.with(|nic| nic.alive && !nic.cut)
    }
    fn drain(&self) {}
    fn memory(&self) -> Arc<dyn MemoryDomain> {
        Arc::new(MockNic {
            net: self.net.clone(),
            id: self.id,
            name: String::new(),
            _handle: self._handle.clone(),
        })
    }
    fn gid_index(&self) -> u8 {
        3
    }
    fn check_path(&self, _: &PathAttr) -> Result<()> {
        Ok(())
    }
    fn create_channel(&self) -> Result<Arc<CompChannel>> {
        CompChannel::new()
    }
    fn create_cq(
        &self,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        if self.net.state().sources {
            let queue = Queue::new(&self.net, self.id);
            let cq = Cq::of_source(Owner::PROCESS, entries, channel, on_overrun, queue.clone())?;
            queue.set_ring(&cq);
            self.net.state().queues.push(Arc::downgrade(&queue));
            return Ok(cq);
        }
        let cq = match self.net.state().fixed_cqs {
            false => Cq::new(entries, channel),
            true => {
                let source = Arc::new(FixedCq(entries));
                Cq::of_source(Owner::PROCESS, entries, channel, Box::new(|_| {}), source)?
            }
        };
        let port: Arc<dyn Driver> = Arc::new(MockNic {
            net: self.net.clone(),
            id: self.id,
            name: String::new(),
            _handle: self._handle.clone(),
        });
        cq.attach(&port);
        Ok(cq)
    }
    fn create_srq(&self, pd: PdHandle, sizes: SrqAttr, _: LimitHook) -> Result<Arc<Srq>> {
        self.with(|nic| assert!(nic.pds.contains(&pd), "a domain of another NIC"));
        Srq::new(&srq_limits(), pd, sizes, || {})
    }
    fn create_qp(&self, init: &QpInit) -> Result<Arc<dyn DeviceQp>> {
        assert!(!init.suspend_on_error && init.qp_type == QpType::Rc);
        let all = self.net.state().queues.clone();
        let behind = |cq| all.iter().filter_map(Weak::upgrade).find(|queue| queue.is_behind(cq));
        let queues = behind(&init.send_cq).zip(behind(&init.recv_cq)).map(<[_; 2]>::from);
        self.with(|nic| {
            if !nic.alive {
                return Err(Error::device_gone("the NIC is dead"));
            }
            assert!(nic.pds.contains(&init.pd), "a domain of another NIC");
            let qpn = nic.next_qpn;
            nic.next_qpn += 1;
            let (sends, recvs) = (VecDeque::new(), VecDeque::new());
            let qp = Qp {
                init: init.clone(),
                state: QpState::Reset,
                peer: None,
                sends,
                recvs,
                late: Vec::new(),
                queues: queues.clone(),
                last_wqe: false,
            };
            nic.qps.insert(qpn, qp);
            let qp = MockQp {
                net: self.net.clone(),
                id: self.id,
                qpn,
                sends: init.send_cq.clone(),
                recvs: init.recv_cq.clone(),
                queues,
            };
            Ok(Arc::new(qp) as Arc<dyn DeviceQp>)
        })
    }
    fn create_holding_qp(&self, _init: &QpInit) -> Result<Arc<dyn ResumableQp>> {
        Err(Error::unsupported("a plain device"))
    }
    fn counters(&self) -> DeviceCounters {
        DeviceCounters::default()
    }
}

impl MemoryDomain for MockNic {
    fn alloc_pd(&self) -> Result<PdHandle> {
        self.with(|nic| {
            let pd = PdHandle(nic.next_pd);
            nic.next_pd += 1;
            nic.pds.push(pd);
            Ok(pd)
        })
    }
    fn dealloc_pd(&self, pd: PdHandle) -> Result<()> {
        self.with(|nic| nic.pds.retain(|p| *p != pd));
        Ok(())
    }
    fn use_pd(&self, _pd: PdHandle) -> Result<()> {
        Ok(())
    }
    fn unuse_pd(&self, _pd: PdHandle) {}
    fn reg_mr(
        &self,
        pd: PdHandle,
        addr: u64,
        len: u64,
        _iova: u64,
        access: Access,
    ) -> Result<MrKeys> {
        let made = self.with(|nic| {
            if !nic.alive {
                return Err(Error::device_gone("the NIC is dead"));
            }
            assert!(nic.pds.contains(&pd), "a domain of another NIC");
            let key = nic.next_key;
            nic.next_key += 1;
            nic.regions.insert(key, (pd, addr, len));
            // As rxe has it.
            let rkey = if access.intersects(Access::REMOTE) { key } else { 0 };
            Ok(MrKeys { lkey: key, rkey })
        });
        self.net.wait_for_another(self.id);
        made
    }
    fn reg_dmabuf_mr(
        &self,
        pd: PdHandle,
        fd: RawFd,
        _offset: u64,
        len: u64,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys> {
        // SAFETY: fcntl with integers.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(Error::new(libc::EBADF, "no descriptor"));
        }
        self.reg_mr(pd, iova, len, iova, access)
    }
    fn rereg_mr(&self, lkey: u32, change: &MrChange) -> Result<()> {
        self.with(|nic| {
            let region =
                nic.regions.get_mut(&lkey).ok_or_else(|| Error::invalid("no such region"))?;
            if let Some((addr, len)) = change.range {
                (region.1, region.2) = (addr, len);
            }
            region.0 = change.pd.unwrap_or(region.0);
            Ok(())
        })
    }
    fn dereg_mr(&self, lkey: u32) -> Result<()> {
        let gone = self.with(|nic| nic.regions.remove(&lkey));
        gone.map(|_| ()).ok_or_else(|| Error::invalid("no such region"))
    }
    fn alloc_null_mr(&self, _pd: PdHandle) -> Result<u32> {
        Err(Error::unsupported("a plain device"))
    }
    fn create_indirect(
        &self,
        _: PdHandle,
        _: u64,
        _: &[IndirectEntry],
        _: Access,
    ) -> Result<MrKeys> {
        Err(Error::unsupported("a plain device"))
    }
    fn update_entry(&self, _key: u32, _index: u32, _entry: &IndirectEntry) -> Result<()> {
        Err(Error::unsupported("a plain device"))
    }
    fn alloc_window(&self, _pd: PdHandle, _kind: WindowType) -> Result<u32> {
        Err(Error::unsupported("a plain device"))
    }
    fn dealloc_window(&self, _rkey: u32) -> Result<()> {
        Err(Error::unsupported("a plain device"))
    }
}

struct MockQp {
    net: Net,
    id: NicId,
    qpn: u32,
    sends: Arc<Cq>,
    recvs: Arc<Cq>,
    queues: Option<[Arc<Queue>; 2]>,
}

impl MockQp {
    /// The QP, where the NIC does not refuse.
    fn with<R>(&self, f: impl FnOnce(&mut Qp) -> Result<R>) -> Result<R> {
        let mut st = self.net.state();
        let nic = st.nics.get_mut(&self.id).unwrap();
        if let Some(errno) = nic.refuses {
            return Err(Error::new(errno, "the NIC is dying"));
        }
        let qp =
            nic.qps.get_mut(&self.qpn).ok_or_else(|| Error::invalid("the QP was destroyed"))?;
        f(qp)
    }
}

impl DeviceQp for MockQp {
    fn qpn(&self) -> u32 {
        self.qpn
    }
    fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        self.post_sends(wr)
    }
    fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        let qpn = self.qpn;
        let mut st = self.net.state();
        let takes = &mut st.nics.get_mut(&self.id).unwrap().takes;
        *takes = match *takes {
            Some(0) => {
                *takes = None;
                return Err(Error::invalid("a send that the NIC does not like"));
            }
            some => some.map(|more| more - 1),
        };
        drop(st);
        self.with(|qp| {
            assert!(
                matches!(qp.state, QpState::Rts | QpState::Err),
                "a send was posted in {:?}",
                qp.state
            );
            assert!(
                qp.sends.len() + batch.count() <= qp.init.caps.max_send_wr as usize,
                "the queue is too small"
            );
            for wr in (0..batch.count()).map(|i| batch.wr(i)) {
                if qp.state == QpState::Err {
                    qp.complete(true, Qp::wc(qpn, wr.wr_id, WcStatus::WrFlushErr));
                    continue;
                }
                qp.sends.push_back(Send {
                    wr_id: wr.wr_id,
                    opcode: wr.opcode,
                    signaled: wr.flags.contains(SendFlags::SIGNALED),
                    solicited: wr.flags.contains(SendFlags::SOLICITED),
                    imm_data: wr.imm_data,
                    remote_addr: wr.remote_addr,
                    rkey: wr.rkey,
                    sges: if wr.inline_data.is_some() { Vec::new() } else { wr.sges.to_vec() },
                    inline: wr.inline_data.map(<[u8]>::to_vec),
                    executed: false,
                    answer: Vec::new(),
                });
            }
            Ok(())
        })
    }
    fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        let qpn = self.qpn;
        self.with(|qp| {
            assert!(qp.state != QpState::Reset, "a receive was posted in RESET");
            assert!(qp.recvs.len() < qp.init.caps.max_recv_wr as usize, "the queue is too small");
            match qp.state {
                QpState::Err => qp.complete(false, Qp::wc(qpn, wr.wr_id, WcStatus::WrFlushErr)),
                _ => qp.recvs.push_back(Recv { wr_id: wr.wr_id, sges: wr.sges.to_vec() }),
            }
            Ok(())
        })
    }
    fn modify(&self, change: &QpModify) -> Result<()> {
        let qpn = self.qpn;
        self.with(|qp| {
            let to = change
                .rc
                .validate(QpType::Rc, qp.state)
                .map_err(|e| Error::invalid(e.to_string()))?;
            if let (Some(path), Some(dest)) = (change.path, change.rc.dest_qpn) {
                qp.peer = Some((path.dest_gid, dest));
            }
            match to {
                QpState::Err => qp.fail(qpn, WcStatus::WrFlushErr, WcStatus::WrFlushErr),
                QpState::Reset => {
                    qp.sends.clear();
                    qp.recvs.clear();
                }
                _ => {}
            }
            qp.state = to;
            Ok(())
        })
    }
    fn query(&self) -> QpSnapshot {
        QpSnapshot::default()
    }
    fn state(&self) -> QpState {
        self.net.state().nics[&self.id].qps.get(&self.qpn).map_or(QpState::Err, |q| q.state)
    }
    fn destroy(&self) {
        self.net.state().nics.get_mut(&self.id).unwrap().qps.remove(&self.qpn);
        self.sends.purge(self.qpn);
        self.recvs.purge(self.qpn);
        self.queues.iter().flatten().for_each(|queue| queue.purge(self.qpn));
    }
}

impl Drop for MockQp {
    fn drop(&mut self) {
        self.destroy();
    }
}
