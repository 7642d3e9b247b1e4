//! What the C layer calls: devices, contexts, queues and logical QPs of this process.

pub use crate::async_events::{event_type, AsyncElement, AsyncEvent};
use crate::contexts::ContextState;
use crate::core::Core;
use crate::inbound;
use crate::link;
use crate::nic_set::NicSet;
pub use crate::qp::{Qp, QpRequest};
use crate::worker;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use unbroken_process::ProcessGuard;
use unbroken_runtime::now_us;
use unbroken_types::{Access, Gid, PathAttr, PdHandle};
use unbroken_verbs::{
    Capabilities, CompChannel, Cq, Device, DeviceAttr, Error, IndirectEntry, MemoryDomain,
    MrChange, MrKeys, PortAttr, Result, Srq, SrqAttr, WindowType,
};

/// For so long the end of the process waits for locks that others have, all together.
const END_WAIT: Duration = Duration::from_millis(50);

/// What `ask` gives before that time, asked at least once.
fn within<T>(until: Instant, ask: impl Fn() -> Option<T>) -> Option<T> {
    loop {
        let given = ask();
        if given.is_some() || Instant::now() > until {
            return given;
        }
        std::thread::yield_now();
    }
}

/// A device as `ibv_get_device_list` shows it.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// `unb0`, `unb1`, …; of a device of the machine its own.
    pub name: String,
    /// Index among the host's NICs.
    pub index: usize,
    /// Node GUID, host order.
    pub node_guid: u64,
}

/// The NICs of this process's host, and the QPs over them.
pub struct System {
    core: Arc<Core<Qp>>,
    devices: Vec<DeviceInfo>,
}

impl System {
    /// A system over these NICs. Opens none yet.
    pub fn over(nics: Box<dyn NicSet>) -> Result<System> {
        Ok(System::with(Core::over(nics)?))
    }

    pub(crate) fn with(core: Arc<Core<Qp>>) -> System {
        let devices = (0..core.nics.count())
            .map(|index| DeviceInfo {
                name: core.nics.device_name(index),
                index,
                node_guid: core.nics.node_guid(index),
            })
            .collect();
        System { core, devices }
    }

    /// The process ends by itself: peers shall not find it any more, and the log has all. Takes a
    /// fraction of a second at most.
    pub fn finish(&self) {
        // The end may come by a signal to a thread that has the table or a gate. Another thread,
        // as the worker, lets go of it soon.
        let until = Instant::now() + END_WAIT;
        for qp in within(until, || self.core.qps.try_all()).unwrap_or_default() {
            if let Some(mut g) = within(until, || qp.try_gate()) {
                link::report(&qp, &mut g);
                qp.seek_no_more(&mut g);
                // The worker may not have come to it: the program ends since its NIC has died.
                if self.core.jobs.is_dead(g.nic) {
                    let lost = qp.ends_with_nic(&mut g);
                    lost.into_iter().for_each(|what| self.core.events.defer(what, now_us()));
                }
            }
        }
        self.core.events.write_deferred();
        self.core.close_directory();
    }

    /// The devices in order.
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    /// The NUMA node of a device's NIC. None: it has none, or the machine does not say.
    pub fn numa_node(&self, index: usize) -> Option<u8> {
        self.core.preference.numa_node(index)
    }

    /// Opens a device.
    pub fn open(&self, index: usize) -> Result<Arc<Context>> {
        self.core.process.check()?;
        if index >= self.devices.len() {
            return Err(Error::invalid(format!(
                "no device unb{index}: this host has {}",
                self.devices.len()
            )));
        }
        let opened = self.core.nics.open(index);
        worker::begin(&self.core);
        let device = match opened {
            // Its NIC is dead, but others carry what it makes.
            Err(e) if e.errno() == libc::EIO && self.core.nics.stands_in(index).is_some() => None,
            opened => Some(opened?),
        };
        let own = device.filter(|device| !device.capabilities().shared_objects);
        let memory =
            own.as_ref().map_or_else(|| self.core.nics.memory(index), |device| device.memory());
        let context = Arc::new(Context {
            core: self.core.clone(),
            attr: self.core.nics.attr(index),
            memory,
            state: ContextState::new(index, own)?,
            dead_at_first: self.core.nics.device(index).is_none(),
        });
        self.core.contexts.add(&context.state);
        Ok(context)
    }
}

impl Drop for System {
    fn drop(&mut self) {
        if self.core.process.elsewhere() {
            return;
        }
        self.core.events.write_deferred();
        self.core.jobs.stop();
        self.core.backups.stop();
    }
}

/// An opened device (`ibv_context`).
pub struct Context {
    core: Arc<Core<Qp>>,
    /// What its QPs and the table of contexts know of it.
    state: Arc<ContextState>,
    attr: DeviceAttr,
    /// Where its protection domains, keys and queues are.
    memory: Arc<dyn MemoryDomain>,
    /// Its NIC was dead when it was opened.
    dead_at_first: bool,
}

impl Context {
    /// The process that opened it: a forked child of that can do nothing with it.
    pub fn process(&self) -> ProcessGuard {
        self.core.process
    }

    /// Index of the default NIC.
    pub fn nic(&self) -> usize {
        self.state.nic
    }

    /// The device that what it makes belongs to, where that is not the process's.
    #[cfg(test)]
    pub(crate) fn own(&self) -> Option<&Arc<dyn Device>> {
        self.state.own.as_ref()
    }

    /// That device, or the one of its NIC, if it lives.
    fn device(&self) -> Option<Arc<dyn Device>> {
        self.state.own.clone().or_else(|| self.core.nics.device(self.state.nic))
    }

    /// The address of its port 1, by which peers connect.
    pub fn gid(&self) -> Gid {
        self.core.nics.gid(self.state.nic)
    }

    /// Limits and identity.
    pub fn attr(&self) -> DeviceAttr {
        self.attr.clone()
    }

    /// A port, counted from 1.
    pub fn port(&self, port: u8) -> Result<PortAttr> {
        match self.device() {
            Some(device) => device.port(port),
            // A program that begins while its NIC is dead runs over the others, if it is told that
            // it can.
            None => self.core.nics.port(
                self.state.nic,
                port,
                self.dead_at_first && self.core.nics.stands_in(self.state.nic).is_some(),
            ),
        }
    }

    /// The GID of the InfiniBand port that has this LID, or why there is none.
    /// `global`: the GID that the program names beside it.
    pub fn gid_of_lid(&self, lid: u16, global: Option<Gid>) -> Result<Gid> {
        self.core.nics.gid_of_lid(self.state.nic, lid, global)
    }

    /// EINVAL where a peer cannot be named as one to send to over that path.
    pub fn check_path(&self, path: &PathAttr) -> Result<()> {
        let device = self.device();
        device.map_or(Ok(()), |device| device.check_path(path))
    }

    /// Makes a protection domain.
    pub fn alloc_pd(&self) -> Result<PdHandle> {
        self.core.process.check()?;
        let pd = self.memory.alloc_pd()?;
        self.state.pd_made();
        Ok(pd)
    }

    /// Ends a protection domain.
    pub fn dealloc_pd(&self, pd: PdHandle) -> Result<()> {
        self.core.process.check()?;
        self.memory.dealloc_pd(pd)
    }

    /// Registers memory; the keys hold on every NIC of the process that shares its objects.
    pub fn reg_mr(
        &self,
        pd: PdHandle,
        addr: u64,
        len: u64,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys> {
        self.core.process.check()?;
        self.memory.reg_mr(pd, addr, len, iova, access)
    }

    /// Registers memory behind a dma-buf, as [`MemoryDomain::reg_dmabuf_mr`].
    ///
    /// [`MemoryDomain::reg_dmabuf_mr`]: unbroken_verbs::MemoryDomain::reg_dmabuf_mr
    pub fn reg_dmabuf_mr(
        &self,
        pd: PdHandle,
        fd: RawFd,
        (offset, len, iova): (u64, u64, u64),
        access: Access,
    ) -> Result<MrKeys> {
        self.core.process.check()?;
        self.memory.reg_dmabuf_mr(pd, fd, offset, len, iova, access)
    }

    /// Changes a registration on every NIC; its keys stay.
    pub fn rereg_mr(&self, lkey: u32, change: &MrChange) -> Result<()> {
        self.core.process.check()?;
        self.memory.rereg_mr(lkey, change)
    }

    /// Makes a null region and gives its local key.
    pub fn alloc_null_mr(&self, pd: PdHandle) -> Result<u32> {
        self.core.process.check()?;
        self.memory.alloc_null_mr(pd)
    }

    /// What the device of the NIC can do beyond plain verbs.
    pub fn capabilities(&self) -> Capabilities {
        self.core.nics.capabilities(self.state.nic)
    }

    /// Makes a key whose bytes, from 0 on, are those of the entries.
    pub fn create_indirect(
        &self,
        pd: PdHandle,
        entries: &[IndirectEntry],
        access: Access,
    ) -> Result<MrKeys> {
        self.core.process.check()?;
        self.memory.create_indirect(pd, 0, entries, access)
    }

    /// Replaces an entry of such a key.
    pub fn update_entry(&self, key: u32, index: u32, entry: &IndirectEntry) -> Result<()> {
        self.core.process.check()?;
        self.memory.update_entry(key, index, entry)
    }

    /// Makes a memory window and gives its key.
    pub fn alloc_window(&self, pd: PdHandle, kind: WindowType) -> Result<u32> {
        self.core.process.check()?;
        self.memory.alloc_window(pd, kind)
    }

    /// Ends the memory window of a key.
    pub fn dealloc_window(&self, rkey: u32) -> Result<()> {
        self.core.process.check()?;
        self.memory.dealloc_window(rkey)
    }

    /// Ends a registration on every NIC.
    pub fn dereg_mr(&self, lkey: u32) -> Result<()> {
        self.core.process.check()?;
        self.memory.dereg_mr(lkey)
    }

    /// Makes a completion channel.
    pub fn create_channel(&self) -> Result<Arc<CompChannel>> {
        self.core.process.check()?;
        self.state.own.as_ref().map_or_else(CompChannel::new, |device| device.create_channel())
    }

    /// Makes a completion queue.
    pub fn create_cq(&self, entries: u32, channel: Option<Arc<CompChannel>>) -> Result<Arc<Cq>> {
        self.core.process.check()?;
        self.check_cq_size(entries)?;
        let events = self.state.events.clone();
        let on_overrun = move |cookie| {
            events.push(AsyncEvent {
                event_type: event_type::CQ_ERR,
                element: AsyncElement::Cq(cookie),
            });
        };
        match &self.state.own {
            Some(device) => device.create_cq(entries, channel, Box::new(on_overrun)),
            None => Ok(Cq::with_overrun_hook(entries, channel, on_overrun)),
        }
    }

    /// Changes how many completions fit into a queue.
    pub fn resize_cq(&self, cq: &Cq, entries: u32) -> Result<()> {
        self.core.process.check()?;
        self.check_cq_size(entries)?;
        cq.resize(entries)
    }

    fn check_cq_size(&self, entries: u32) -> Result<()> {
        if entries == 0 || entries > self.attr.max_cqe {
            return Err(Error::invalid(format!(
                "a CQ of {entries} entries: 1 to {} are possible",
                self.attr.max_cqe
            )));
        }
        Ok(())
    }

    /// Ends a completion queue; EBUSY while a QP completes there.
    pub fn destroy_cq(&self, cq: &Arc<Cq>) -> Result<()> {
        self.core.process.check()?;
        if self.core.qps.any(|qp| qp.uses_cq(cq)) {
            return Err(Error::new(
                libc::EBUSY,
                "the completion queue is in use by a QP: destroy that first",
            ));
        }
        self.state.events.withdraw(AsyncElement::Cq(cq.cookie()));
        Ok(())
    }

    /// Makes a shared receive queue. `cookie` is what its events carry.
    pub fn create_srq(&self, pd: PdHandle, sizes: SrqAttr, cookie: u64) -> Result<Arc<Srq>> {
        self.core.process.check()?;
        let events = self.state.events.clone();
        let reached = AsyncEvent {
            event_type: event_type::SRQ_LIMIT_REACHED,
            element: AsyncElement::Srq(cookie),
        };
        let on_limit = move || events.push(reached);
        let srq = match &self.state.own {
            Some(device) => device.create_srq(pd, sizes, Box::new(on_limit))?,
            None => Srq::new(&self.attr, pd, sizes, on_limit)?,
        };
        self.memory.use_pd(pd)?;
        Ok(srq)
    }

    /// Ends a shared receive queue; EBUSY while a QP takes from it.
    pub fn destroy_srq(&self, srq: &Arc<Srq>, cookie: u64) -> Result<()> {
        self.core.process.check()?;
        if self.core.qps.any(|qp| qp.uses_srq(srq)) {
            return Err(Error::new(
                libc::EBUSY,
                "the shared receive queue is in use by a QP: destroy that first",
            ));
        }
        self.memory.unuse_pd(srq.pd());
        self.state.events.withdraw(AsyncElement::Srq(cookie));
        Ok(())
    }

    /// Makes a logical QP.
    pub fn create_qp(&self, request: &QpRequest) -> Result<Arc<Qp>> {
        Qp::create(&self.core, &self.state, request, || inbound::idle_hook(&self.core))
    }

    /// The descriptor that is readable while asynchronous events wait.
    pub fn async_fd(&self) -> RawFd {
        self.state.events.fd().as_raw_fd()
    }

    /// Waits for the next asynchronous event; EAGAIN where the descriptor is non-blocking, EINTR
    /// where a signal handler ran.
    pub fn next_async_event(&self) -> Result<AsyncEvent> {
        self.core.process.check()?;
        self.state.events.next()
    }

    /// How many events of that type wait.
    #[cfg(test)]
    pub(crate) fn waiting_events(&self, event_type: u32) -> usize {
        self.state.events.waiting(event_type)
    }

    /// Closes the context. The NIC stays open for the process, as a backup of the others.
    pub fn close(&self) -> Result<()> {
        self.core.process.check()?;
        self.core.contexts.remove(&self.state);
        Ok(())
    }
}
