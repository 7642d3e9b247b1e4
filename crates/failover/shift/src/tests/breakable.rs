//! Devices of softnic that die when a test wants it.

use super::*;
use crate::preference::Place;
use std::collections::HashMap;
use std::sync::Mutex;
use std::thread::{self, ThreadId};
use unbroken_types::PdHandle;

/// What is to happen to the NICs.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) dead: [AtomicBool; 4],
    /// So many NICs die when a QP has just taken the work of another over.
    pub(super) deaths_at_adoption: AtomicU32,
    /// How long each verb of control takes, as on an RNIC, in microseconds.
    pub(super) control_us: AtomicU32,
    /// The devices say that they do; to be set before they are opened.
    pub(super) slow_control: AtomicBool,
    /// QPs that are there, but for those of control messages.
    pub(super) made: AtomicU32,
    /// The number that each QP has which is made ahead; 0: its own.
    pub(super) standby_qpn: AtomicU32,
    /// QPs that were made ahead.
    pub(super) standbys: AtomicU32,
    /// How many verbs of control each thread has called.
    calls: Mutex<HashMap<ThreadId, u32>>,
    /// Nothing leads from one GID of a port to another, as on devices of the machine.
    pub(super) gids_are_apart: AtomicBool,
    /// What GID an index stands for is told.
    pub(super) gids_are_told: AtomicBool,
    /// A NIC dies under so many changes of its QPs from now.
    pub(super) dies_at_modify: [AtomicU32; 4],
}

impl Plan {
    fn check(&self, nic: usize) -> Result<()> {
        match self.dead[nic].load(SeqCst) {
            true => Err(Error::device_gone("this NIC is dead, as the test wants it")),
            false => Ok(()),
        }
    }

    /// The verbs of control that this thread has called.
    pub(super) fn calls(&self) -> u32 {
        self.calls.lock().unwrap().get(&thread::current().id()).copied().unwrap_or_default()
    }

    /// A verb of control goes to the device.
    fn control(&self, nic: usize) -> Result<()> {
        self.check(nic)?;
        *self.calls.lock().unwrap().entry(thread::current().id()).or_default() += 1;
        match self.control_us.load(SeqCst) {
            0 => {}
            us => thread::sleep(Duration::from_micros(us.into())),
        }
        Ok(())
    }
}

pub(crate) struct Nics(pub(crate) Box<dyn NicSet>, pub(crate) Arc<Plan>);

impl NicSet for Nics {
    fn count(&self) -> usize {
        self.0.count()
    }
    fn name(&self, i: usize) -> String {
        self.0.name(i)
    }
    fn host(&self) -> String {
        self.0.host()
    }
    fn capabilities(&self, i: usize) -> Capabilities {
        Capabilities { slow_control: self.1.slow_control.load(SeqCst), ..self.0.capabilities(i) }
    }
    fn gid(&self, i: usize) -> Gid {
        self.0.gid(i)
    }
    fn first_port(&self, gid: Gid) -> Gid {
        match self.1.gids_are_apart.load(SeqCst) {
            true => gid,
            false => self.0.first_port(gid),
        }
    }
    fn gid_at(&self, i: usize, index: u8) -> Option<Gid> {
        let told = self.1.gids_are_told.load(SeqCst);
        let port = self.0.port(i, 1, true).ok().filter(|_| told)?;
        port.gids.get(usize::from(index)).map(|entry| entry.gid)
    }
    fn node_guid(&self, i: usize) -> u64 {
        self.0.node_guid(i)
    }
    fn attr(&self, i: usize) -> DeviceAttr {
        self.0.attr(i)
    }
    fn port(&self, i: usize, port: u8, usable: bool) -> Result<PortAttr> {
        self.0.port(i, port, usable)
    }
    fn gid_of_lid(&self, i: usize, lid: u16, global: Option<Gid>) -> Result<Gid> {
        self.0.gid_of_lid(i, lid, global)
    }
    fn open(&self, i: usize, sink: Arc<dyn EventSink>) -> Result<Arc<dyn Device>> {
        self.1.check(i)?;
        Ok(Arc::new(Breakable { inner: self.0.open(i, sink)?, nic: i, plan: self.1.clone() }))
    }
    fn memory(&self, i: usize) -> Arc<dyn MemoryDomain> {
        self.0.memory(i)
    }
    fn keys(&self, i: u8, rkey: u32) -> KeyAnswer {
        self.0.keys(i, rkey)
    }
    fn key_set(&self, i: usize) -> u16 {
        self.0.key_set(i)
    }
    fn moves_datagrams(&self) -> bool {
        self.0.moves_datagrams()
    }
    fn aliases(&self) -> Arc<UdAliases> {
        self.0.aliases()
    }
    fn runtime(&self) -> PathBuf {
        self.0.runtime()
    }
    fn place(&self, i: usize) -> Option<Place> {
        self.0.place(i)
    }
}

pub(super) struct Breakable {
    inner: Arc<dyn Device>,
    nic: usize,
    plan: Arc<Plan>,
}

impl Device for Breakable {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn gid(&self) -> Gid {
        self.inner.gid()
    }
    fn port(&self, port: u8) -> Result<PortAttr> {
        self.inner.port(port)
    }
    fn alive(&self) -> bool {
        self.plan.check(self.nic).is_ok() && self.inner.alive()
    }
    fn usable(&self) -> bool {
        self.alive() && self.inner.usable()
    }
    fn drain(&self) {
        self.inner.drain()
    }
    fn memory(&self) -> Arc<dyn MemoryDomain> {
        self.inner.memory()
    }
    fn capabilities(&self) -> Capabilities {
        let slow_control = self.plan.slow_control.load(SeqCst);
        Capabilities { slow_control, ..self.inner.capabilities() }
    }
    fn gid_index(&self) -> u8 {
        self.inner.gid_index()
    }
    fn check_path(&self, path: &PathAttr) -> Result<()> {
        self.inner.check_path(path)
    }
    fn create_channel(&self) -> Result<Arc<CompChannel>> {
        self.inner.create_channel()
    }
    fn create_cq(
        &self,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        self.inner.create_cq(entries, channel, on_overrun)
    }
    fn create_srq(&self, pd: PdHandle, sizes: SrqAttr, on_limit: LimitHook) -> Result<Arc<Srq>> {
        self.inner.create_srq(pd, sizes, on_limit)
    }
    fn create_qp(&self, init: &QpInit) -> Result<Arc<dyn DeviceQp>> {
        Ok(self.create_holding_qp(init)?)
    }
    fn create_holding_qp(&self, init: &QpInit) -> Result<Arc<dyn ResumableQp>> {
        self.plan.control(self.nic)?;
        let inner = self.inner.create_holding_qp(init)?;
        self.plan.made.fetch_add(u32::from(!init.control), SeqCst);
        self.plan.standbys.fetch_add(u32::from(init.standby), SeqCst);
        let shown = if init.standby { self.plan.standby_qpn.load(SeqCst) } else { 0 };
        Ok(Arc::new(BreakableQp {
            shown,
            inner,
            nic: self.nic,
            plan: self.plan.clone(),
            control: init.control,
            stopped: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
        }))
    }
    fn counters(&self) -> DeviceCounters {
        self.inner.counters()
    }
}

pub(super) struct BreakableQp {
    /// The number that it has for us, if it is another.
    shown: u32,
    inner: Arc<dyn ResumableQp>,
    nic: usize,
    plan: Arc<Plan>,
    control: bool,
    stopped: AtomicBool,
    destroyed: AtomicBool,
}

impl DeviceQp for BreakableQp {
    fn qpn(&self) -> u32 {
        match self.shown {
            0 => self.inner.qpn(),
            shown => shown,
        }
    }
    fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        self.plan.check(self.nic)?;
        self.inner.post_send(wr)
    }
    fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        self.plan.check(self.nic)?;
        self.inner.post_sends(batch)
    }
    fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        self.plan.check(self.nic)?;
        self.inner.post_recv(wr)
    }
    fn modify(&self, change: &QpModify) -> Result<()> {
        let until = &self.plan.dies_at_modify[self.nic];
        if until.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)) == Ok(1) {
            self.plan.dead[self.nic].store(true, SeqCst);
        }
        self.plan.control(self.nic)?;
        self.inner.modify(change)
    }
    fn query(&self) -> QpSnapshot {
        self.inner.query()
    }
    fn state(&self) -> QpState {
        self.inner.state()
    }
    fn destroy(&self) {
        if !self.destroyed.swap(true, SeqCst) {
            let _ = self.plan.control(self.nic);
            self.inner.destroy();
            self.plan.made.fetch_sub(u32::from(!self.control), SeqCst);
        }
    }
}

impl ResumableQp for BreakableQp {
    fn progress(&self) -> Progress {
        self.inner.progress()
    }
    fn pulse(&self) -> Option<u64> {
        self.inner.pulse()
    }
    fn lost(&self) -> Option<u64> {
        self.inner.lost()
    }
    fn go_on(&self, insists: bool) -> bool {
        self.inner.go_on(insists)
    }
    fn quiesce(&self) -> Result<Backlog> {
        if !self.stopped.swap(true, SeqCst) {
            let _ = self.plan.control(self.nic);
        }
        self.inner.quiesce()
    }
    fn adopt(&self, backlog: Backlog) -> Result<()> {
        self.plan.check(self.nic)?;
        self.inner.adopt(backlog)?;
        if self.plan.deaths_at_adoption.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)).is_ok() {
            self.plan.dead[self.nic].store(true, SeqCst);
        }
        Ok(())
    }
    fn modify_all(&self, changes: &[QpModify]) -> Result<()> {
        changes.iter().try_for_each(|_| self.plan.control(self.nic))?;
        self.inner.modify_all(changes)
    }
    fn fail(&self, status: WcStatus) {
        self.inner.fail(status)
    }
}
