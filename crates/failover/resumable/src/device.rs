//! A plain device as one that holds its work.

use crate::commands::Commands;
use crate::cq::{CqReservation, ProviderCq};
use crate::interceptor::EventInterceptor;
use crate::memory::{LogicalMemory, NicPd};
use crate::overruns::Overruns;
use crate::pass::PassedQp;
use crate::qp::JournaledQp;
use crate::srq::ProviderSrq;
use crate::waker::Waker;
use crate::{lock, Host};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use unbroken_types::{Gid, PathAttr, PdHandle, QpType};
use unbroken_verbs::{
    Capabilities, CompChannel, Cq, Device, DeviceAttr, DeviceCounters, DeviceQp, Error, Leftovers,
    LimitHook, MemoryDomain, OverrunHook, PortAttr, QpInit, Result, ResumableQp, Srq, SrqAttr,
};

/// What the QPs of a wrapped device share.
pub(crate) struct Opened {
    pub(crate) index: usize,
    /// The number of the opening.
    key_set: u16,
    pub(crate) device: Arc<dyn Device>,
    /// That of the plain device.
    domain: Arc<dyn MemoryDomain>,
    pub(crate) interceptor: Arc<EventInterceptor>,
    pub(crate) memory: Arc<LogicalMemory>,
    pub(crate) host: Host,
    pub(crate) commands: Arc<Commands>,
    waker: Arc<Waker>,
    overruns: Arc<Overruns>,
    cqs: Mutex<Vec<Weak<ProviderCq>>>,
    srqs: Mutex<Vec<Weak<ProviderSrq>>>,
}

impl Opened {
    /// A place at the device's CQ behind an application's, with room for so many entries.
    pub(crate) fn reserve_cq(&self, app: &Arc<Cq>, entries: u32) -> Result<CqReservation> {
        let find = || {
            let mut cqs = lock(&self.cqs);
            cqs.retain(|cq| cq.strong_count() > 0);
            cqs.iter().filter_map(Weak::upgrade).find(|cq| cq.is_for(app))
        };
        let cq = match find() {
            Some(cq) => cq,
            None => {
                // The device may take its time, while others look at the CQs that it has.
                let Opened { device, waker, commands, overruns, .. } = self;
                let made = ProviderCq::new(device, app, entries, waker, commands, overruns)?;
                let mut cqs = lock(&self.cqs);
                let other = cqs.iter().filter_map(Weak::upgrade).find(|cq| cq.is_for(app));
                if other.is_none() {
                    cqs.push(Arc::downgrade(&made));
                }
                other.unwrap_or(made)
            }
        };
        CqReservation::new(cq, app, entries)
    }

    /// The device's SRQ behind an application's. The caller's QP has joined it.
    pub(crate) fn srq(
        self: &Arc<Self>,
        app: &Arc<Srq>,
        default: usize,
    ) -> Result<Arc<ProviderSrq>> {
        let mut srqs = lock(&self.srqs);
        srqs.retain(|srq| srq.strong_count() > 0);
        let found =
            srqs.iter().filter_map(Weak::upgrade).find(|srq| srq.is_for(app) && srq.in_use());
        let srq = match found {
            Some(srq) => srq,
            None => {
                let made = ProviderSrq::new(self, app, default)?;
                srqs.push(Arc::downgrade(&made));
                made
            }
        };
        srq.join();
        Ok(srq)
    }

    /// A QP of the device that took from an SRQ is destroyed.
    pub(crate) fn leave_srq(&self, srq: &ProviderSrq) {
        let _srqs = lock(&self.srqs); // nobody joins one that ends
        srq.leave();
    }

    /// Makes a QP. EIO where the device answers no command: another NIC is to be taken.
    pub(crate) fn create_qp(&self, init: &QpInit) -> Result<Arc<dyn DeviceQp>> {
        if self.commands.is_stuck() {
            let name = self.device.name();
            return Err(Error::device_gone(format!("NIC {name} answers no command")));
        }
        let _watch = self.commands.watch();
        self.device.create_qp(init).map_err(|e| self.error(e))
    }

    /// The error of a step that the device refused: one that is gone may say anything.
    pub(crate) fn error(&self, e: Error) -> Error {
        match self.device.alive() {
            true => e,
            false => Error::device_gone(format!("NIC {} is dead: {e}", self.device.name())),
        }
    }
}

/// A QP's use of a protection domain.
pub(crate) struct PdUse {
    opened: Arc<Opened>,
    pd: PdHandle,
    /// The application may not end the domain.
    counts: AtomicBool,
    own: Arc<NicPd>,
}

impl PdUse {
    pub(crate) fn new(opened: &Arc<Opened>, pd: PdHandle) -> Result<PdUse> {
        let pd = PdUse::uncounted(opened, pd)?;
        pd.count()?;
        Ok(pd)
    }

    /// That of a QP that is made ahead: nothing of it is seen by the application.
    pub(crate) fn uncounted(opened: &Arc<Opened>, pd: PdHandle) -> Result<PdUse> {
        let own = opened.memory.pd_on(pd, opened.index)?;
        Ok(PdUse { opened: opened.clone(), pd, counts: AtomicBool::new(false), own })
    }

    /// The application may not end the domain from now on.
    pub(crate) fn count(&self) -> Result<()> {
        self.opened.memory.use_pd(self.pd)?;
        self.counts.store(true, Ordering::Release);
        Ok(())
    }

    /// The domain's handle on the device.
    pub(crate) fn handle(&self) -> PdHandle {
        self.own.handle()
    }

    /// The application may end the domain from now on; the device's stays until this is dropped.
    pub(crate) fn release(&self) {
        if self.counts.swap(false, Ordering::AcqRel) {
            self.opened.memory.unuse_pd(self.pd);
        }
    }
}

impl Drop for PdUse {
    fn drop(&mut self) {
        self.release();
    }
}

/// A plain device, wrapped so that its RC QPs hold their work on a failure of the network, and can
/// be resumed on another NIC.
pub struct ResumableDevice {
    opened: Arc<Opened>,
    view: Arc<dyn MemoryDomain>,
}

impl Drop for ResumableDevice {
    fn drop(&mut self) {
        if !self.opened.device.alive() {
            self.opened.memory.detach(self.opened.index, &self.opened.domain);
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if self.device.removed() {
            self.memory.release(self.index, self.key_set, &self.domain);
        }
    }
}

impl ResumableDevice {
    /// What a wrapped device can do.
    pub const CAPABILITIES: Capabilities = Capabilities {
        holds: true,
        shared_objects: true,
        indirect_keys: false,
        windows: false,
        frees_windows: false,
        slow_control: true,
    };

    /// Wraps NIC `index`, which was opened with `interceptor` as its sink. EINVAL where it needs no
    /// wrapping.
    pub fn new(
        index: usize,
        device: Arc<dyn Device>,
        interceptor: &Arc<EventInterceptor>,
        memory: &Arc<LogicalMemory>,
        host: Host,
    ) -> Result<ResumableDevice> {
        if device.capabilities().holds {
            return Err(Error::invalid(format!("NIC {} holds its work by itself", device.name())));
        }
        let domain = device.memory();
        let commands = Arc::new(Commands::new(device.name(), host));
        let key_set = memory.attach(index, domain.clone(), commands.clone());
        let waker = Waker::new(device.name(), host.spawn);
        let overruns = Overruns::new(index, interceptor.sink());
        let (interceptor, memory) = (interceptor.clone(), memory.clone());
        let view = memory.of(index);
        let opened = Opened {
            index,
            key_set,
            device,
            domain,
            interceptor,
            memory,
            host,
            commands,
            waker,
            overruns,
            cqs: Mutex::default(),
            srqs: Mutex::default(),
        };
        Ok(ResumableDevice { opened: Arc::new(opened), view })
    }

    /// What an application may be told of a wrapped device.
    pub fn attr(plain: &DeviceAttr) -> DeviceAttr {
        DeviceAttr { max_mw: 0, ..plain.clone() }
    }

    fn make(&self, init: &QpInit) -> Result<Arc<dyn ResumableQp>> {
        if init.qp_type == QpType::Rc && init.suspend_on_error {
            return Ok(JournaledQp::new(&self.opened, init)?);
        }
        Ok(PassedQp::new(&self.opened, init)?)
    }
}

impl Device for ResumableDevice {
    fn capabilities(&self) -> Capabilities {
        ResumableDevice::CAPABILITIES
    }

    fn name(&self) -> &str {
        self.opened.device.name()
    }

    fn gid(&self) -> Gid {
        self.opened.device.gid()
    }

    fn port(&self, port: u8) -> Result<PortAttr> {
        self.opened.device.port(port)
    }

    fn alive(&self) -> bool {
        self.opened.device.alive()
    }

    fn usable(&self) -> bool {
        self.opened.device.usable()
    }

    fn drain(&self) {
        self.opened.device.drain();
        let cqs: Vec<_> = lock(&self.opened.cqs).iter().filter_map(Weak::upgrade).collect();
        for cq in cqs {
            cq.bring_all();
        }
    }

    fn find_overruns(&self) {
        let all = || lock(&self.opened.cqs).iter().filter_map(Weak::upgrade).collect();
        self.opened.overruns.look(all);
        let srqs: Vec<_> = lock(&self.opened.srqs).iter().filter_map(Weak::upgrade).collect();
        srqs.iter().for_each(|srq| srq.look());
    }

    fn memory(&self) -> Arc<dyn MemoryDomain> {
        self.view.clone()
    }

    fn gid_index(&self) -> u8 {
        self.opened.device.gid_index()
    }

    fn check_path(&self, path: &PathAttr) -> Result<()> {
        self.opened.device.check_path(path)
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
        Ok(Cq::with_overrun_hook(entries, channel, on_overrun))
    }

    fn create_srq(&self, _pd: PdHandle, _sizes: SrqAttr, _on_limit: LimitHook) -> Result<Arc<Srq>> {
        Err(Error::unsupported("an SRQ of the process is made without a device"))
    }

    fn create_qp(&self, init: &QpInit) -> Result<Arc<dyn DeviceQp>> {
        Ok(self.make(init)?)
    }

    fn create_holding_qp(&self, init: &QpInit) -> Result<Arc<dyn ResumableQp>> {
        self.make(init)
    }

    fn counters(&self) -> DeviceCounters {
        self.opened.device.counters()
    }

    fn leftovers(&self) -> Leftovers {
        Leftovers {
            unanswered: self.opened.commands.unanswered() as u32,
            is_stuck: self.opened.commands.is_stuck(),
            ..self.opened.device.leftovers()
        }
    }
}
