//! An opened NIC: a device of verbs.

use crate::describe;
use crate::engine::{Engine, QpEntry, QpKind, MAX_QPS};
use crate::faults::LinkSource;
use crate::gids::{self, gid_of};
use crate::inner::Inner;
use crate::limits::{MAX_INLINE, MAX_QP_WR, MAX_SGE};
use crate::plain::{self, Plain};
use crate::qp::SoftQp;
use crate::shared::Shared;
use crate::spec::{Common, Spec};
use std::sync::{Arc, Weak};
use unbroken_fabric::{now_us, DeviceKind, Fabric};
use unbroken_roce::{RcConfig, RcQp, UcConfig, UcQp, UdConfig, UdQp};
use unbroken_types::{Gid, PathAttr, PdHandle, QpCaps, QpType};
use unbroken_verbs::{
    Capabilities, CompChannel, Cq, Device, DeviceCounters, DeviceQp, Error, EventSink, LimitHook,
    MemoryDomain, OverrunHook, PortAttr, QpInit, Result, ResumableQp, Srq, SrqAttr,
};

/// An opened software NIC.
///
/// Its last handle, QPs included, closes it.
pub struct Nic {
    inner: Arc<Inner>,
}

impl Nic {
    pub(crate) fn open(
        index: usize,
        spec: &Spec,
        link: LinkSource,
        fabric: Option<Arc<Fabric>>,
        common: Common,
        sink: Arc<dyn EventSink>,
    ) -> Result<Nic> {
        let shared = Arc::new(Shared::open(index, spec, link, fabric, common, sink)?);
        shared.look(now_us());
        Ok(Nic { inner: Arc::new(Inner::start(shared)?) })
    }

    pub(crate) fn downgrade(&self) -> Weak<Shared> {
        Arc::downgrade(&self.inner.shared)
    }

    fn shared(&self) -> &Shared {
        &self.inner.shared
    }

    /// The slot of the NIC that this process has: the upper eight bits of its QPNs.
    pub fn slot(&self) -> u16 {
        self.shared().slot
    }
}

/// The queue sizes that a QP gets.
fn check_caps(mut caps: QpCaps, shared_receives: bool) -> Result<QpCaps> {
    if shared_receives {
        (caps.max_recv_wr, caps.max_recv_sge) = (0, 0);
    }
    let limits = [
        ("max_send_wr", caps.max_send_wr, MAX_QP_WR),
        ("max_recv_wr", caps.max_recv_wr, MAX_QP_WR),
        ("max_send_sge", caps.max_send_sge, MAX_SGE),
        ("max_recv_sge", caps.max_recv_sge, MAX_SGE),
        ("max_inline_data", caps.max_inline_data, MAX_INLINE),
    ];
    for (name, value, max) in limits {
        if value > max {
            return Err(Error::invalid(format!("{name} is {value}, at most {max} is possible")));
        }
    }
    caps.max_send_wr = caps.max_send_wr.max(1);
    caps.max_send_sge = caps.max_send_sge.max(1);
    if !shared_receives {
        caps.max_recv_wr = caps.max_recv_wr.max(1);
        caps.max_recv_sge = caps.max_recv_sge.max(1);
    }
    Ok(caps)
}

impl Device for Nic {
    fn capabilities(&self) -> Capabilities {
        describe::capabilities(self.shared().device)
    }

    fn name(&self) -> &str {
        &self.shared().name
    }

    fn gid(&self) -> Gid {
        gid_of(self.shared().ips[0], self.shared().link_layer)
    }

    fn gid_index(&self) -> u8 {
        gids::index_of(self.shared().link_layer, self.shared().device)
    }

    fn check_path(&self, path: &PathAttr) -> Result<()> {
        self.shared().leads(path).map(drop)
    }

    fn port(&self, port: u8) -> Result<PortAttr> {
        let shared = self.shared();
        let ip = shared.port_ip(port)?;
        let usable = !shared.process.elsewhere() && shared.status.usable(port);
        Ok(describe::port(ip, shared.mtu, shared.link_layer, shared.device, usable))
    }

    fn alive(&self) -> bool {
        !self.shared().process.elsewhere() && self.shared().alive()
    }

    fn usable(&self) -> bool {
        !self.shared().process.elsewhere() && self.shared().status.usable(1)
    }

    fn drain(&self) {
        if !self.shared().process.elsewhere() {
            self.shared().drain();
        }
    }

    fn memory(&self) -> Arc<dyn MemoryDomain> {
        self.shared().domain.clone()
    }

    fn create_channel(&self) -> Result<Arc<CompChannel>> {
        CompChannel::of_device(self.shared().owner)
    }

    fn create_cq(
        &self,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        self.shared().check_new()?;
        Cq::of_device(self.shared().owner, entries, channel, on_overrun)
    }

    fn create_srq(&self, pd: PdHandle, sizes: SrqAttr, on_limit: LimitHook) -> Result<Arc<Srq>> {
        let shared = self.shared();
        shared.check_new()?;
        Srq::of_device(
            shared.owner,
            &describe::device(&shared.ips, shared.device),
            pd,
            sizes,
            on_limit,
        )
    }

    fn create_qp(&self, init: &QpInit) -> Result<Arc<dyn DeviceQp>> {
        if self.shared().device == DeviceKind::Plain {
            plain::check(init)?;
        }
        Ok(self.make_qp(init)?)
    }

    fn create_holding_qp(&self, init: &QpInit) -> Result<Arc<dyn ResumableQp>> {
        if self.shared().device == DeviceKind::Plain {
            return Err(Error::unsupported(
                "a QP that holds its work: this device has plain verbs only",
            ));
        }
        Ok(self.make_qp(init)?)
    }

    fn counters(&self) -> DeviceCounters {
        if self.shared().process.elsewhere() {
            return DeviceCounters::default();
        }
        self.shared().lock().totals()
    }
}

impl Nic {
    fn make_qp(&self, init: &QpInit) -> Result<Arc<SoftQp>> {
        let shared = &self.inner.shared;
        shared.process.check()?;
        let caps = check_caps(init.caps, init.srq.is_some())?;
        shared.check_owners(init)?;
        let mut e = shared.lock();
        if !e.look(now_us()) {
            return Err(shared.dead());
        }
        let max_qps = e.id.plain.as_ref().map_or(MAX_QPS, |_| plain::MAX_QPS);
        if e.qps.len() >= max_qps {
            return Err(Error::no_room(format!(
                "{max_qps} QPs exist on NIC {}, which is the limit",
                shared.name
            )));
        }
        let qpn = free_qpn(&e, shared, init.management);
        let wc_qpn = init.wc_qpn.unwrap_or(qpn);
        let kind = match init.qp_type {
            QpType::Rc => QpKind::Rc(RcQp::new(RcConfig {
                qpn,
                wc_qpn,
                caps,
                pd: init.pd,
                suspend_on_error: init.suspend_on_error,
                sq_sig_all: init.sq_sig_all,
                cwnd_max_packets: shared.cwnd_max_packets,
            })),
            QpType::Ud => QpKind::Ud(UdQp::new(UdConfig {
                qpn,
                wc_qpn,
                caps,
                pd: init.pd,
                sq_sig_all: init.sq_sig_all,
                mtu: shared.mtu,
                suspend_on_error: init.suspend_on_error,
                moved: init.home.is_some(),
            })),
            QpType::Uc => QpKind::Uc(UcQp::new(UcConfig {
                wc_qpn,
                caps,
                pd: init.pd,
                sq_sig_all: init.sq_sig_all,
            })),
        };
        let kind = match &init.srq {
            Some(srq) => kind.with_srq(srq.clone()),
            None => kind,
        };
        shared.domain.use_pd(init.pd)?;
        let cqs = (init.send_cq.clone(), init.recv_cq.clone());
        let mut entry = QpEntry::new(kind, (qpn, init.pd, init.control), caps, cqs);
        entry.home = init.home;
        entry.death = e.id.plain.as_mut().map(Plain::next_death);
        if let (QpType::Rc, false, Some(plain)) = (init.qp_type, init.control, &e.id.plain) {
            entry.flushes = plain.flushes(qpn, &caps, init.srq.is_some());
        }
        if init.qp_type == QpType::Ud && !init.control {
            e.tell_marks();
        }
        e.progress_counters.begin(qpn as u16);
        e.qps.insert(qpn as u16, entry);
        drop(e);
        Ok(Arc::new(SoftQp::new(self.inner.clone(), qpn, init)))
    }
}

/// The index of the QP that takes management datagrams: the number that every peer knows. No other
/// QP is given it.
const MANAGEMENT_INDEX: u32 = 1;

/// A number that no QP has.
fn free_qpn(e: &Engine, shared: &Shared, management: bool) -> u32 {
    let of = |index: u32| u32::from(shared.slot) << 16 | index;
    if management && e.qps.get(MANAGEMENT_INDEX as u16).is_none() {
        return of(MANAGEMENT_INDEX);
    }
    loop {
        let next = || shared.page.next_index();
        let index = e.id.plain.as_ref().map_or_else(next, |p| p.next_index(&shared.page));
        // The table is far from full, so a free index comes soon.
        if e.qps.get(index as u16).is_none() {
            return of(index);
        }
    }
}
