//! What the C layer calls: devices, contexts, queues and logical QPs of this process.

use crate::core::Core;
use crate::nic_set::NicSet;
pub use crate::qp::{Qp, QpRequest};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use unbroken_process::Born;
use unbroken_types::{Access, Gid, PathAttr, PdHandle};
use unbroken_verbs::{
    Capabilities, CompChannel, Cq, Device, DeviceAttr, Error, EventFd, IndirectEntry, MemoryDomain,
    MrChange, MrKeys, PortAttr, Result, Srq, SrqAttr, WindowType,
};

/// `enum ibv_event_type`: the ones that this library raises.
pub mod event_type {
    /// A CQ overran.
    pub const CQ_ERR: u32 = 0;
    /// The device is gone.
    pub const DEVICE_FATAL: u32 = 8;
    /// The port has its link again.
    pub const PORT_ACTIVE: u32 = 9;
    /// The port lost its link.
    pub const PORT_ERR: u32 = 10;
    /// Fewer receives than its limit are left in an SRQ.
    pub const SRQ_LIMIT_REACHED: u32 = 15;
}

/// A device as `ibv_get_device_list` shows it.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// `unb0`, `unb1`, …
    pub name: String,
    /// Index among the host's NICs.
    pub index: usize,
    /// Node GUID, host order.
    pub node_guid: u64,
}

/// The NICs of this process's host, and the QPs over them.
pub struct System {
    core: Arc<Core>,
    devices: Vec<DeviceInfo>,
}

impl System {
    /// A system over these NICs. Opens none yet.
    pub fn over(nics: Box<dyn NicSet>) -> Result<System> {
        Ok(System::with(Core::over(nics)?))
    }

    pub(crate) fn with(core: Arc<Core>) -> System {
        let devices = (0..core.nic_count())
            .map(|index| DeviceInfo {
                name: format!("unb{index}"),
                index,
                node_guid: core.node_guid(index),
            })
            .collect();
        System { core, devices }
    }

    /// The process ends by itself: peers shall not find it any more, and the log has all. Takes a
    /// fraction of a second at most.
    pub fn finish(&self) {
        self.core.write_later();
        self.core.close_directory();
    }

    /// The devices in order.
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    /// Opens a device.
    pub fn open(&self, index: usize) -> Result<Arc<Context>> {
        self.core.born.check()?;
        if index >= self.devices.len() {
            return Err(Error::invalid(format!(
                "no device unb{index}: this host has {}",
                self.devices.len()
            )));
        }
        let device = match self.core.open_device(index) {
            // Its NIC is dead, but others carry what it makes.
            Err(e) if e.errno() == libc::EIO && self.core.stands_in(index).is_some() => None,
            opened => Some(opened?),
        };
        let own = device.filter(|device| !device.capabilities().shared_objects);
        let context = Arc::new(Context {
            core: self.core.clone(),
            nic: index,
            attr: self.core.attr_of(index),
            events: Arc::new(AsyncQueue::new()?),
            memory: own.as_ref().map_or_else(|| self.core.memory(index), |device| device.memory()),
            own,
            dead_at_first: self.core.device(index).is_none(),
            pds: AtomicU32::new(0),
            fault_told: AtomicBool::new(false),
        });
        self.core.add_context(&context);
        Ok(context)
    }
}

impl Drop for System {
    fn drop(&mut self) {
        if self.core.born.elsewhere() {
            return;
        }
        self.core.write_later();
        self.core.stop();
    }
}

/// What an asynchronous event is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AsyncElement {
    /// The device.
    Device,
    /// A port, counted from 1.
    Port(u8),
    /// The QP of that cookie.
    Qp(u64),
    /// The CQ of that cookie.
    Cq(u64),
    /// The SRQ of that cookie.
    Srq(u64),
}

/// An asynchronous event of a context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AsyncEvent {
    /// `enum ibv_event_type`.
    pub event_type: u32,
    /// What it is about.
    pub element: AsyncElement,
}

/// Events that wait beyond this are dropped, the oldest first: a program that never reads them must
/// not grow without bound.
const MAX_ASYNC_EVENTS: usize = 1024;

struct AsyncQueue {
    fd: EventFd,
    waiting: Mutex<VecDeque<AsyncEvent>>,
}

impl AsyncQueue {
    fn new() -> Result<AsyncQueue> {
        Ok(AsyncQueue { fd: EventFd::new(true, false)?, waiting: Mutex::new(VecDeque::new()) })
    }

    fn push(&self, event: AsyncEvent) {
        let mut q = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if q.len() == MAX_ASYNC_EVENTS {
            q.pop_front();
            q.push_back(event);
            return;
        }
        q.push_back(event);
        // Under the lock, so that a withdrawal finds what it takes back.
        self.fd.signal();
    }

    fn next(&self) -> Result<AsyncEvent> {
        loop {
            self.fd.take().map_err(|e| Error::os("asynchronous events", &e))?;
            // An event whose object was destroyed meanwhile has been withdrawn: wait for the next.
            if let Some(e) = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
            {
                return Ok(e);
            }
        }
    }

    /// Forgets the events of an object, and takes back what made the descriptor readable for them:
    /// a program that polls it would then wait for an event that never comes.
    fn withdraw(&self, element: AsyncElement) {
        let mut q = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let before = q.len();
        q.retain(|e| e.element != element);
        for _ in q.len()..before {
            self.fd.take_back();
        }
    }
}

/// An opened device (`ibv_context`).
pub struct Context {
    core: Arc<Core>,
    nic: usize,
    attr: DeviceAttr,
    /// Shared with what raises events under a device's lock: to let go of it must not close a
    /// device.
    events: Arc<AsyncQueue>,
    /// Where its protection domains, keys and queues are.
    memory: Arc<dyn MemoryDomain>,
    /// The device that all of them belong to, where they are not the process's. It may be dead, and
    /// its NIC opened anew by others.
    own: Option<Arc<dyn Device>>,
    /// Its NIC was dead when it was opened.
    dead_at_first: bool,
    /// Its protection domains.
    pds: AtomicU32,
    /// A device-fatal or port-down event was delivered, so its end is news, too.
    fault_told: AtomicBool,
}

impl Context {
    /// The process that opened it: a forked child of that can do nothing with it.
    pub fn born(&self) -> Born {
        self.core.born
    }

    /// Index of the default NIC.
    pub fn nic(&self) -> usize {
        self.nic
    }

    /// The device that what it makes belongs to, where that is not the process's.
    pub(crate) fn own(&self) -> Option<&Arc<dyn Device>> {
        self.own.as_ref()
    }

    /// The address of its port 1, by which peers connect.
    pub fn gid(&self) -> Gid {
        self.core.gid_of(self.nic)
    }

    /// Limits and identity.
    pub fn attr(&self) -> DeviceAttr {
        self.attr.clone()
    }

    /// A port, counted from 1.
    pub fn port(&self, port: u8) -> Result<PortAttr> {
        match self.own.clone().or_else(|| self.core.device(self.nic)) {
            Some(device) => device.port(port),
            // A program that begins while its NIC is dead runs over the others, if it is told that
            // it can.
            None => self.core.port_of(
                self.nic,
                port,
                self.dead_at_first && self.core.stands_in(self.nic).is_some(),
            ),
        }
    }

    /// The GID of the InfiniBand port that has this LID, or why there is none.
    pub fn gid_of_lid(&self, lid: u16) -> Result<Gid> {
        self.core.gid_of_lid(self.nic, lid)
    }

    /// EINVAL where a peer cannot be named as one to send to over that path.
    pub fn check_path(&self, path: &PathAttr) -> Result<()> {
        let device = self.own.clone().or_else(|| self.core.device(self.nic));
        device.map_or(Ok(()), |device| device.check_path(path))
    }

    /// Makes a protection domain.
    pub fn alloc_pd(&self) -> Result<PdHandle> {
        self.core.born.check()?;
        let pd = self.memory.alloc_pd()?;
        self.pds.fetch_add(1, Ordering::Relaxed);
        Ok(pd)
    }

    /// Nothing is made of it, not even a protection domain.
    pub(crate) fn only_watches(&self) -> bool {
        self.pds.load(Ordering::Relaxed) == 0
    }

    /// Ends a protection domain.
    pub fn dealloc_pd(&self, pd: PdHandle) -> Result<()> {
        self.core.born.check()?;
        self.memory.dealloc_pd(pd)?;
        self.pds.fetch_sub(1, Ordering::Relaxed);
        Ok(())
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
        self.core.born.check()?;
        self.memory.reg_mr(pd, addr, len, iova, access)
    }

    /// Changes a registration on every NIC; its keys stay.
    pub fn rereg_mr(&self, lkey: u32, change: &MrChange) -> Result<()> {
        self.core.born.check()?;
        self.memory.rereg_mr(lkey, change)
    }

    /// Makes a null region and gives its local key.
    pub fn alloc_null_mr(&self, pd: PdHandle) -> Result<u32> {
        self.core.born.check()?;
        self.memory.alloc_null_mr(pd)
    }

    /// What the device of the NIC can do beyond plain verbs.
    pub fn capabilities(&self) -> Capabilities {
        self.core.capabilities(self.nic)
    }

    /// Makes a key whose bytes, from 0 on, are those of the entries.
    pub fn create_indirect(
        &self,
        pd: PdHandle,
        entries: &[IndirectEntry],
        access: Access,
    ) -> Result<MrKeys> {
        self.core.born.check()?;
        self.memory.create_indirect(pd, 0, entries, access)
    }

    /// Replaces an entry of such a key.
    pub fn update_entry(&self, key: u32, index: u32, entry: &IndirectEntry) -> Result<()> {
        self.core.born.check()?;
        self.memory.update_entry(key, index, entry)
    }

    /// Makes a memory window and gives its key.
    pub fn alloc_window(&self, pd: PdHandle, kind: WindowType) -> Result<u32> {
        self.core.born.check()?;
        self.memory.alloc_window(pd, kind)
    }

    /// Ends the memory window of a key.
    pub fn dealloc_window(&self, rkey: u32) -> Result<()> {
        self.core.born.check()?;
        self.memory.dealloc_window(rkey)
    }

    /// Ends a registration on every NIC.
    pub fn dereg_mr(&self, lkey: u32) -> Result<()> {
        self.core.born.check()?;
        self.memory.dereg_mr(lkey)
    }

    /// Makes a completion channel.
    pub fn create_channel(&self) -> Result<Arc<CompChannel>> {
        self.core.born.check()?;
        self.own.as_ref().map_or_else(CompChannel::new, |device| device.create_channel())
    }

    /// Makes a completion queue.
    pub fn create_cq(&self, entries: u32, channel: Option<Arc<CompChannel>>) -> Result<Arc<Cq>> {
        self.core.born.check()?;
        self.check_cq_size(entries)?;
        let events = self.events.clone();
        let on_overrun = move |cookie| {
            events.push(AsyncEvent {
                event_type: event_type::CQ_ERR,
                element: AsyncElement::Cq(cookie),
            });
        };
        match &self.own {
            Some(device) => device.create_cq(entries, channel, Box::new(on_overrun)),
            None => Ok(Cq::with_overrun_hook(entries, channel, on_overrun)),
        }
    }

    /// Changes how many completions fit into a queue.
    pub fn resize_cq(&self, cq: &Cq, entries: u32) -> Result<()> {
        self.core.born.check()?;
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
        self.core.born.check()?;
        if self.core.cq_in_use(cq) {
            return Err(Error::new(
                libc::EBUSY,
                "the completion queue is in use by a QP: destroy that first",
            ));
        }
        self.events.withdraw(AsyncElement::Cq(cq.cookie()));
        Ok(())
    }

    /// Makes a shared receive queue. `cookie` is what its events carry.
    pub fn create_srq(&self, pd: PdHandle, sizes: SrqAttr, cookie: u64) -> Result<Arc<Srq>> {
        self.core.born.check()?;
        let events = self.events.clone();
        let reached = AsyncEvent {
            event_type: event_type::SRQ_LIMIT_REACHED,
            element: AsyncElement::Srq(cookie),
        };
        let on_limit = move || events.push(reached);
        let srq = match &self.own {
            Some(device) => device.create_srq(pd, sizes, Box::new(on_limit))?,
            None => Srq::new(&self.attr, pd, sizes, on_limit)?,
        };
        self.memory.use_pd(pd)?;
        Ok(srq)
    }

    /// Ends a shared receive queue; EBUSY while a QP takes from it.
    pub fn destroy_srq(&self, srq: &Arc<Srq>, cookie: u64) -> Result<()> {
        self.core.born.check()?;
        if self.core.srq_in_use(srq) {
            return Err(Error::new(
                libc::EBUSY,
                "the shared receive queue is in use by a QP: destroy that first",
            ));
        }
        self.memory.unuse_pd(srq.pd());
        self.events.withdraw(AsyncElement::Srq(cookie));
        Ok(())
    }

    /// Makes a logical QP.
    pub fn create_qp(self: &Arc<Self>, request: &QpRequest) -> Result<Arc<Qp>> {
        Qp::create(&self.core, self, request)
    }

    /// The descriptor that is readable while asynchronous events wait.
    pub fn async_fd(&self) -> RawFd {
        self.events.fd.as_raw_fd()
    }

    /// Waits for the next asynchronous event; EAGAIN where the descriptor is non-blocking, EINTR
    /// where a signal handler ran.
    pub fn next_async_event(&self) -> Result<AsyncEvent> {
        self.core.born.check()?;
        self.events.next()
    }

    /// How many events of that type wait.
    #[cfg(test)]
    pub(crate) fn waiting_events(&self, event_type: u32) -> usize {
        let waiting = self.events.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.iter().filter(|e| e.event_type == event_type).count()
    }

    /// Raises an event.
    pub(crate) fn raise(&self, event_type: u32, element: AsyncElement) {
        match event_type {
            event_type::DEVICE_FATAL | event_type::PORT_ERR => {
                self.fault_told.store(true, Ordering::Relaxed)
            }
            // Good news about a fault that was hidden would only confuse.
            event_type::PORT_ACTIVE if self.own.as_ref().is_some_and(|device| !device.alive()) => {
                return
            }
            event_type::PORT_ACTIVE if !self.fault_told.swap(false, Ordering::Relaxed) => return,
            _ => {}
        }
        self.events.push(AsyncEvent { event_type, element });
    }

    /// Forgets the events of an object that is destroyed.
    pub(crate) fn withdraw(&self, element: AsyncElement) {
        self.events.withdraw(element);
    }

    /// Closes the context. The NIC stays open for the process, as a backup of the others.
    pub fn close(&self) -> Result<()> {
        self.core.born.check()?;
        self.core.remove_context(self);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_withdrawn_event_leaves_the_descriptor_quiet() {
        let queue = AsyncQueue::new().unwrap();
        let event = |cookie| AsyncEvent {
            event_type: event_type::DEVICE_FATAL,
            element: AsyncElement::Qp(cookie),
        };
        for cookie in [1, 2, 1] {
            queue.push(event(cookie));
        }
        queue.withdraw(AsyncElement::Qp(1));
        assert_eq!(queue.next().unwrap(), event(2));
        assert!(!queue.fd.take_back(), "nothing waits, and nothing is readable");
    }
}
