//! Devices of softnic that die when a test wants it.

use super::*;
use crate::preference::Place;
use unbroken_types::PdHandle;

/// What is to happen to the NICs.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) dead: [AtomicBool; 4],
    /// So many NICs die when a QP has just taken the work of another over.
    pub(super) deaths_at_adoption: AtomicU32,
}

impl Plan {
    fn check(&self, nic: usize) -> Result<()> {
        match self.dead[nic].load(SeqCst) {
            true => Err(Error::device_gone("this NIC is dead, as the test wants it")),
            false => Ok(()),
        }
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
        self.0.capabilities(i)
    }
    fn gid(&self, i: usize) -> Gid {
        self.0.gid(i)
    }
    fn first_port(&self, gid: Gid) -> Gid {
        self.0.first_port(gid)
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
    fn gid_of_lid(&self, i: usize, lid: u16) -> Result<Gid> {
        self.0.gid_of_lid(i, lid)
    }
    fn open(&self, i: usize, sink: Arc<dyn EventSink>) -> Result<Arc<dyn Device>> {
        self.1.check(i)?;
        Ok(Arc::new(Breakable { inner: self.0.open(i, sink)?, nic: i, plan: self.1.clone() }))
    }
    fn memory(&self, i: usize) -> Arc<dyn MemoryDomain> {
        self.0.memory(i)
    }
    fn keys(&self, i: u8, rkey: u32) -> Option<KeyRow> {
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
        self.inner.capabilities()
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
    fn create_holding_qp(&self, init: &QpInit) -> Result<Arc<dyn HoldingQp>> {
        self.plan.check(self.nic)?;
        Ok(Arc::new(BreakableQp {
            inner: self.inner.create_holding_qp(init)?,
            nic: self.nic,
            plan: self.plan.clone(),
        }))
    }
    fn counters(&self) -> DeviceCounters {
        self.inner.counters()
    }
}

pub(super) struct BreakableQp {
    inner: Arc<dyn HoldingQp>,
    nic: usize,
    plan: Arc<Plan>,
}

impl DeviceQp for BreakableQp {
    fn qpn(&self) -> u32 {
        self.inner.qpn()
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
        self.plan.check(self.nic)?;
        self.inner.modify(change)
    }
    fn query(&self) -> QpSnapshot {
        self.inner.query()
    }
    fn state(&self) -> QpState {
        self.inner.state()
    }
    fn destroy(&self) {
        self.inner.destroy()
    }
}

impl HoldingQp for BreakableQp {
    fn progress(&self) -> Progress {
        self.inner.progress()
    }
    fn pulse(&self) -> Option<u64> {
        self.inner.pulse()
    }
    fn quiesce(&self) -> Result<Backlog> {
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
        self.plan.check(self.nic)?;
        self.inner.modify_all(changes)
    }
    fn fail(&self, status: WcStatus) {
        self.inner.fail(status)
    }
}
