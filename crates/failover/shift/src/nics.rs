//! The NIC table: the NICs of a process, as they are opened, die and are opened again, and their
//! control endpoints.
//!
//! A NIC is opened when a context or a path needs it, and stays open. When it dies its device
//! object is of no more use: it is dropped here (QPs that still hold it keep it until they have
//! moved) and opened anew once the NIC is healed.

use crate::control_endpoint::{ControlEndpoint, LocalPort};
use crate::lock::lock;
use crate::nic_set::NicSet;
use crate::settings::Settings;
use std::sync::{Arc, Mutex};
use unbroken_directory::{NicRecord, PortRecord, ProcessRecord, MAX_PORTS};
use unbroken_events::{NicCounters, NicStatus};
use unbroken_types::{Gid, PathAttr, PdHandle};
use unbroken_verbs::{
    Capabilities, CompChannel, Device, DeviceAttr, EventSink, KeyAnswer, Leftovers, MemoryDomain,
    PortAttr, PortState, Result,
};

/// One NIC of the host.
#[derive(Default)]
struct NicSlot {
    /// The open device; `None` before the first use and while the NIC is dead.
    device: Option<Arc<dyn Device>>,
    /// One for each port, or none.
    endpoints: Vec<Arc<ControlEndpoint>>,
    /// It is to be left (`unbroken nic drain`).
    drained: bool,
}

/// The NICs of a process.
pub(crate) struct NicTable {
    nics: Box<dyn NicSet>,
    slots: Vec<Mutex<NicSlot>>,
    failover: bool,
    /// How many ports of each NIC QPs may use: all, where they go from one to another by themselves
    /// ([`crate::port_pairs`]; `UNBROKEN_APM=0`: they do not).
    ports: Vec<u8>,
    /// Where devices report to; they hold it weakly.
    sink: Arc<dyn EventSink>,
    /// Control messages that arrive raise an event here.
    channel: Arc<CompChannel>,
    control_pd: PdHandle,
}

impl NicTable {
    /// The table of these NICs, whose devices report to `sink`. Opens none yet.
    pub(crate) fn new(
        nics: Box<dyn NicSet>,
        settings: &Settings,
        sink: Arc<dyn EventSink>,
    ) -> Result<NicTable> {
        let all_ports = settings.uses_all_ports();
        let ports = |i| if all_ports { port_count(&nics.attr(i)) } else { 1 };
        Ok(NicTable {
            slots: (0..nics.count()).map(|_| Mutex::default()).collect(),
            failover: settings.failover,
            ports: (0..nics.count()).map(ports).collect(),
            sink,
            channel: CompChannel::new()?,
            control_pd: nics.memory(0).alloc_pd()?,
            nics,
        })
    }

    // --- what is known of a NIC, open or not

    pub(crate) fn count(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn node_guid(&self, i: usize) -> u64 {
        self.nics.node_guid(i)
    }

    pub(crate) fn name(&self, i: usize) -> String {
        self.nics.name(i)
    }

    /// What programs see NIC `i` as.
    pub(crate) fn device_name(&self, i: usize) -> String {
        self.nics.device_name(i)
    }

    /// The name of a port, which is its NIC's for port 1.
    pub(crate) fn port_name(&self, i: usize, port: u8) -> String {
        match port {
            0 | 1 => self.name(i),
            port => format!("{}/{port}", self.name(i)),
        }
    }

    /// The host's name.
    pub(crate) fn host(&self) -> String {
        self.nics.host()
    }

    /// What NIC `i` can do beyond plain verbs.
    pub(crate) fn capabilities(&self, i: usize) -> Capabilities {
        self.nics.capabilities(i)
    }

    /// Whether the QPs of NIC `i` hold their work when it fails, so that they can move and others
    /// can move there.
    pub(crate) fn holds(&self, i: usize) -> bool {
        self.nics.capabilities(i).holds
    }

    pub(crate) fn gid(&self, i: usize) -> Gid {
        self.nics.gid(i)
    }

    /// The program connects a QP of NIC `i` by that GID of its table. Gives whether the addresses of
    /// NICs are others now, which peers have to be told.
    pub(crate) fn follow(&self, i: usize, sgid_index: u8) -> bool {
        self.nics.follow(i, sgid_index)
    }

    /// The NIC with that GID.
    pub(crate) fn index_of(&self, gid: Gid) -> Option<usize> {
        (0..self.count()).find(|i| self.gid(*i) == gid)
    }

    /// The GID of port 1 of the NIC, of whatever host, that has a port with this GID.
    pub(crate) fn first_port(&self, gid: Gid) -> Gid {
        self.nics.first_port(gid)
    }

    /// The GID that peers know NIC `i` by, where a program connects a QP over that path and no
    /// `first_port` leads from there to the NIC's. Peers may name an InfiniBand port by its LID
    /// alone: then it is the GID that stands for the LID.
    pub(crate) fn alias(&self, i: usize, path: &PathAttr) -> Option<Gid> {
        let sgid_index = path.sgid_index;
        let is_own = |device: &Arc<dyn Device>| {
            (device.gid(), device.gid_index()) == (self.gid(i), sgid_index)
        };
        let own = self.device(i).as_ref().is_some_and(is_own);
        let lid = self.endpoint(i).map_or(0, |endpoint| endpoint.addr().lid);
        let gid = match lid {
            0 if own => None,
            lid if lid != 0 && (own || !path.grh) => self.nics.gid_of_lid(i, lid, None).ok(),
            _ => self.nics.gid_at(i, sgid_index),
        };
        gid.filter(|gid| self.first_port(*gid) != self.gid(i))
    }

    pub(crate) fn attr(&self, i: usize) -> DeviceAttr {
        self.nics.attr(i)
    }

    /// How many ports of NIC `i` QPs may use.
    pub(crate) fn port_count(&self, i: usize) -> u8 {
        self.ports.get(i).copied().unwrap_or(1)
    }

    /// Whether there is a NIC of which QPs may use several.
    pub(crate) fn several_ports(&self) -> bool {
        self.ports.iter().any(|count| *count > 1)
    }

    /// A port of NIC `i`, counted from 1, in the state that the caller knows.
    pub(crate) fn port(&self, i: usize, port: u8, usable: bool) -> Result<PortAttr> {
        self.nics.port(i, port, usable)
    }

    pub(crate) fn gid_of_lid(&self, i: usize, lid: u16, global: Option<Gid>) -> Result<Gid> {
        self.nics.gid_of_lid(i, lid, global)
    }

    /// Protection domains and regions as contexts of NIC `i` see them.
    pub(crate) fn memory(&self, i: usize) -> Arc<dyn MemoryDomain> {
        self.nics.memory(i)
    }

    /// By which keys a region of ours is known on our NICs.
    pub(crate) fn keys(&self, nic: u8, rkey: u32) -> KeyAnswer {
        self.nics.keys(nic, rkey)
    }

    /// Which set of keys NIC `i` has; 0 where keys are good on all NICs.
    pub(crate) fn key_set(&self, i: usize) -> u16 {
        self.nics.key_set(i)
    }

    /// Whether peers may name regions of NIC `i` by keys that are not good there.
    pub(crate) fn has_foreign_keys(&self, i: usize) -> bool {
        self.nics.has_foreign_keys(i)
    }

    /// Whether UD QPs can be moved.
    pub(crate) fn moves_datagrams(&self) -> bool {
        self.nics.moves_datagrams()
    }

    // --- which NICs work

    /// The open device of NIC `i`; opens it if need be.
    pub(crate) fn open(&self, i: usize) -> Result<Arc<dyn Device>> {
        let mut slot = lock(&self.slots[i]);
        if let Some(d) = &slot.device {
            return Ok(d.clone());
        }
        let d = self.nics.open(i, self.sink.clone())?;
        slot.device = Some(d.clone());
        Ok(d)
    }

    /// The device of NIC `i` if it is open and alive.
    pub(crate) fn device(&self, i: usize) -> Option<Arc<dyn Device>> {
        lock(self.slots.get(i)?).device.clone().filter(|d| d.alive())
    }

    /// Whether NIC `i` can carry protected QPs now: packets can leave by it.
    pub(crate) fn usable(&self, i: usize) -> bool {
        self.holds(i) && self.device(i).is_some_and(|d| d.usable())
    }

    /// Whether a port of ours has its link.
    pub(crate) fn port_works(&self, at: LocalPort) -> bool {
        let state = |port| self.device(at.nic)?.port(port).ok().map(|attr| attr.state);
        state(at.pair + 1) == Some(PortState::Active)
    }

    /// The NICs in the order in which they stand in for NIC `i`, itself first.
    pub(crate) fn ring(&self, i: usize) -> impl Iterator<Item = usize> {
        let count = self.count();
        (0..count).map(move |k| (i + k) % count)
    }

    /// The NIC that works in the place of NIC `i`, if failover is on and there is one.
    pub(crate) fn stands_in(&self, i: usize) -> Option<usize> {
        self.ring(i).skip(1).filter(|_| self.failover && self.holds(i)).find(|j| self.usable(*j))
    }

    /// Whether NIC `i` is to be left.
    pub(crate) fn drained(&self, i: usize) -> bool {
        lock(&self.slots[i]).drained
    }

    pub(crate) fn set_drained(&self, i: usize, drained: bool) {
        lock(&self.slots[i]).drained = drained;
    }

    /// Whether any NIC is to be left.
    pub(crate) fn any_drained(&self) -> bool {
        (0..self.count()).any(|i| self.drained(i))
    }

    /// Whether a NIC other than `i` works and is not to be left.
    pub(crate) fn undrained_elsewhere(&self, i: usize) -> bool {
        self.ring(i).skip(1).any(|j| !self.drained(j) && self.usable(j))
    }

    /// Forgets a dead device.
    pub(crate) fn drop_device(&self, i: usize) {
        let endpoints = {
            let mut slot = lock(&self.slots[i]);
            if slot.device.as_ref().is_some_and(|d| d.alive()) {
                return; // healed and opened again already
            }
            slot.device = None;
            std::mem::take(&mut slot.endpoints)
        };
        endpoints.iter().for_each(|endpoint| endpoint.close());
    }

    /// What is told of the NICs that have no page in the runtime folder.
    pub(crate) fn statuses(&self) -> Vec<NicStatus> {
        let count = if self.nics.has_pages() { 0 } else { self.count() };
        (0..count).map(|i| self.status(i)).collect()
    }

    fn status(&self, i: usize) -> NicStatus {
        let device = self.device(i);
        let state = match &device {
            Some(device) if device.usable() => "active",
            Some(_) => "down",
            None if lock(&self.slots[i]).device.is_some() => "dead",
            None => "unknown",
        };
        let counters = device.map(|device| device.counters()).unwrap_or_default();
        NicStatus {
            nic: self.name(i),
            addr: self.nics.address(i).to_string(),
            device: "verbs".into(),
            state: state.into(),
            faults: Vec::new(),
            legs_down: self.nics.legs_down(i),
            pids: vec![std::process::id()],
            registered_bytes: self.nics.registered_bytes(i),
            counters: NicCounters {
                tx_bytes: counters.tx_bytes,
                rx_bytes: counters.rx_bytes,
                ..NicCounters::default()
            },
        }
    }

    /// What all devices have of QPs that have been left.
    pub(crate) fn leftovers(&self) -> Leftovers {
        let all = (0..self.count()).filter_map(|nic| lock(&self.slots[nic]).device.clone());
        all.map(|device| device.leftovers()).fold(Leftovers::default(), |sum, of| Leftovers {
            unanswered: sum.unanswered + of.unanswered,
            undestroyed: sum.undestroyed + of.undestroyed,
            is_stuck: sum.is_stuck || of.is_stuck,
        })
    }

    /// Whether NIC `i` answers no command just now.
    pub(crate) fn is_stuck(&self, i: usize) -> bool {
        self.device(i).is_some_and(|device| device.leftovers().is_stuck)
    }

    // --- control endpoints

    /// Control messages that arrive raise an event here.
    pub(crate) fn channel(&self) -> &Arc<CompChannel> {
        &self.channel
    }

    /// The control endpoint of port 1 of NIC `i`, if it is open.
    pub(crate) fn endpoint(&self, i: usize) -> Option<Arc<ControlEndpoint>> {
        self.endpoint_of(LocalPort { nic: i, pair: 0 })
    }

    /// The control endpoint of a port, if it is open.
    pub(crate) fn endpoint_of(&self, at: LocalPort) -> Option<Arc<ControlEndpoint>> {
        lock(self.slots.get(at.nic)?).endpoints.get(usize::from(at.pair)).cloned()
    }

    /// Opens NIC `i` with its control endpoints, unless that is done. One whose QPs cannot be moved
    /// has no use for it.
    pub(crate) fn open_endpoint(&self, i: usize) -> Result<()> {
        let device = self.open(i)?;
        let mut slot = lock(&self.slots[i]);
        if !slot.endpoints.is_empty() || !self.holds(i) {
            return Ok(());
        }
        let mut endpoints = Vec::new();
        for port in 1..=self.port_count(i) {
            match ControlEndpoint::open(&device, port, self.control_pd, &self.channel) {
                Ok(endpoint) => endpoints.push(Arc::new(endpoint)),
                Err(e) => {
                    endpoints.iter().for_each(|endpoint| endpoint.close());
                    return Err(e);
                }
            }
        }
        slot.endpoints = endpoints;
        Ok(())
    }

    /// Reads the LIDs of NIC `i` again, which the subnet manager may change. Returns whether one has
    /// changed, so that the process must publish its record again.
    pub(crate) fn look_at_lids(&self, i: usize) -> bool {
        let endpoints = self.slots.get(i).map(|slot| lock(slot).endpoints.clone());
        let changed = |changed, endpoint: Arc<ControlEndpoint>| endpoint.look_at_lid() | changed;
        endpoints.unwrap_or_default().into_iter().fold(false, changed)
    }

    /// Lets every NIC that takes control messages work in the caller's thread.
    pub(crate) fn drive_endpoints(&self) {
        for nic in 0..self.count() {
            if let Some(endpoint) = self.endpoint(nic) {
                endpoint.drive();
            }
        }
    }

    /// Takes in what has arrived at every NIC, waiting for threads that have lost their core in the
    /// middle of their work on one.
    pub(crate) fn drain(&self) {
        (0..self.count()).filter_map(|nic| self.device(nic)).for_each(|device| device.drain());
    }

    /// Finds CQs that have overrun where nobody polls.
    pub(crate) fn find_overruns(&self) {
        (0..self.count()).filter_map(|nic| self.device(nic)).for_each(|nic| nic.find_overruns());
    }

    /// Where this process can be reached, for the directory.
    pub(crate) fn record(&self) -> ProcessRecord {
        let nics = (0..self.count())
            .map(|i| NicRecord {
                index: i as u32,
                gid: self.gid(i),
                address: self.nics.address(i),
                control_qpn: self.endpoint(i).map_or(0, |e| e.addr().qpn),
                lid: self.endpoint(i).map_or(0, |e| e.addr().lid),
                key_set: self.key_set(i),
                name: self.name(i),
                further_ports: (1..self.port_count(i))
                    .map(|pair| self.port_record(LocalPort { nic: i, pair }))
                    .collect(),
            })
            .collect();
        ProcessRecord { pid: std::process::id(), nics }
    }

    fn port_record(&self, at: LocalPort) -> PortRecord {
        let endpoint = self.endpoint_of(at);
        let gid = endpoint.as_ref().map_or_else(|| self.gid_of(at), |e| e.addr().gid);
        let (control_qpn, lid) = endpoint.map_or((0, 0), |e| (e.addr().qpn, e.addr().lid));
        PortRecord { gid, control_qpn, lid }
    }

    /// The GID by which peers reach a port of ours.
    fn gid_of(&self, at: LocalPort) -> Gid {
        let gids = self.port(at.nic, at.pair + 1, false).map(|port| port.gids).unwrap_or_default();
        let index = self.device(at.nic).map_or(0, |device| device.gid_index());
        gids.get(usize::from(index)).map(|entry| entry.gid).unwrap_or_default()
    }
}

fn port_count(attr: &DeviceAttr) -> u8 {
    attr.phys_port_cnt.clamp(1, MAX_PORTS as u8)
}
