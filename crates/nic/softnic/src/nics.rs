//! The NICs of a process.

use crate::config::{Config, NicSource};
use crate::describe;
use crate::faults::LinkSource;
use crate::gids::{gid_of, guid_of};
use crate::netlink::{self, LinkChange, LinkWatch};
use crate::nic::Nic;
use crate::shared::Shared;
use crate::spec::{fabric_specs, interface_specs, invalid, Common, Spec};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use unbroken_fabric::{now_us, Fabric, GapRecorder};
use unbroken_process::ProcessGuard;
use unbroken_types::{Gid, LinkLayer};
use unbroken_verbs::{
    Capabilities, DeviceAttr, DeviceEvent, Error, EventSink, MemoryDomain, PortAttr, Result,
    UdAliases,
};

/// The watching thread looks this often whether anybody still needs it.
const WATCH_US: u64 = 500_000;

/// What is known of a NIC that was opened.
struct Opened {
    nic: Weak<Shared>,
    sink: Weak<dyn EventSink>,
    /// It has died. Its handle may be dropped at once, long before the watcher has time to look at
    /// it.
    died: Arc<AtomicBool>,
    /// The link of a dead NIC, asked until it works again.
    grave: Option<LinkSource>,
}

/// Passes events on and notes the death of its NIC.
struct Witness {
    sink: Arc<dyn EventSink>,
    died: Arc<AtomicBool>,
}

impl EventSink for Witness {
    fn event(&self, device: usize, event: DeviceEvent) {
        if event == DeviceEvent::Fatal {
            self.died.store(true, Ordering::Release);
        }
        self.sink.event(device, event);
    }
}

/// The NICs of a process.
pub struct SoftNics {
    process: ProcessGuard,
    host: String,
    specs: Vec<Spec>,
    common: Common,
    fabric: Option<Arc<Fabric>>,
    opened: Mutex<Vec<Option<Opened>>>,
}

impl SoftNics {
    /// Finds the NICs and begins to watch their links; opens none.
    pub fn new(config: Config) -> Result<Arc<SoftNics>> {
        let runtime = &config.runtime;
        let (host, specs, fabric, watch) = match &config.nics {
            NicSource::Host(host) => {
                let fabric = Arc::new(Fabric::open(runtime).map_err(invalid)?);
                (host.clone(), fabric_specs(runtime, &fabric, host)?, Some(fabric), None)
            }
            NicSource::Addresses(addrs, device) => {
                let watch = LinkWatch::new()
                    .map_err(|e| Error::os("watching the links of interfaces", &e))?;
                (host_name(), interface_specs(runtime, addrs, *device)?, None, Some(watch))
            }
        };
        let gaps = Arc::new(GapRecorder::create(runtime).map_err(invalid)?);
        let opened = Mutex::new(specs.iter().map(|_| None).collect());
        let (seed, flush, longest_sleep_us) = (config.seed, config.flush, config.longest_sleep_us);
        let common = Common {
            domain: Arc::default(),
            gaps,
            aliases: Arc::default(),
            seed,
            flush,
            longest_sleep_us,
        };
        let nics = Arc::new(SoftNics {
            process: ProcessGuard::now(),
            host,
            specs,
            common,
            fabric: fabric.clone(),
            opened,
        });
        let weak = Arc::downgrade(&nics);
        let watcher = move || match (fabric, watch) {
            (Some(fabric), _) => watch_fabric(&weak, &fabric),
            (None, Some(watch)) => watch_interfaces(&weak, &watch),
            (None, None) => {}
        };
        unbroken_process::spawn("unb-watch", watcher)
            .map_err(|e| Error::os("starting a thread", &e))?;
        Ok(nics)
    }

    /// How many NICs there are.
    pub fn count(&self) -> usize {
        self.specs.len()
    }

    /// The name of a NIC, `a/0` or its address.
    pub fn name(&self, i: usize) -> &str {
        self.specs.get(i).map_or("", |s| &s.name)
    }

    /// The name of the host.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The address of a NIC.
    pub fn ip(&self, i: usize) -> Option<IpAddr> {
        self.specs.get(i).map(|s| s.ips[0])
    }

    /// What a NIC can do beyond plain verbs, open or not.
    pub fn capabilities(&self, i: usize) -> Capabilities {
        self.specs.get(i).map(|s| describe::capabilities(s.device)).unwrap_or_default()
    }

    /// The GID of a NIC.
    pub fn gid(&self, i: usize) -> Option<Gid> {
        self.specs.get(i).map(|s| gid_of(s.ips[0], s.link_layer))
    }

    /// The first GID of port 1 of the NIC that has a port with this GID, as far as is known here.
    pub fn first_port(&self, gid: Gid) -> Gid {
        let IpAddr::V4(ip) = gid.to_ip() else { return gid };
        let Some(fabric) = &self.fabric else { return Gid::from_ip(ip.into()) };
        let Some(port) = fabric.locate(ip) else { return gid };
        let first = fabric.nic_addr(&port.host, port.index);
        first
            .map_or(gid, |ip| gid_of(ip.into(), fabric.nic_kind(&port.host, port.index).link_layer))
    }

    /// Limits and identity of a NIC, open or not.
    pub fn attr(&self, i: usize) -> DeviceAttr {
        self.specs.get(i).map(|s| describe::device(&s.ips, s.device)).unwrap_or_default()
    }

    /// A port of a NIC, counted from 1, open or not, in the state that the caller knows.
    pub fn port(&self, i: usize, port: u8, usable: bool) -> Result<PortAttr> {
        let spec = self
            .specs
            .get(i)
            .ok_or_else(|| Error::invalid(format!("no NIC {i} on host {}", self.host)))?;
        let ip = usize::from(port).checked_sub(1).and_then(|p| spec.ips.get(p)).copied();
        let ip = ip.ok_or_else(|| {
            Error::invalid(format!("port {port}: this device has {}", spec.ips.len()))
        })?;
        Ok(describe::port(ip, spec.mtu, spec.link_layer, spec.device, usable))
    }

    /// The GID of the InfiniBand port that has this LID, or why there is none.
    pub fn gid_of_lid(&self, i: usize, lid: u16) -> Result<Gid> {
        match (&self.fabric, self.specs.get(i).map(|s| s.link_layer)) {
            (Some(fabric), Some(LinkLayer::Infiniband)) => {
                Ok(Gid::link_local(fabric.addr_of_lid(lid).map_err(invalid)?))
            }
            _ => Err(Error::invalid(format!(
                "NIC {}: its link layer is Ethernet, which has no LIDs",
                self.name(i)
            ))),
        }
    }

    /// The node GUID of a NIC, made from its address; 0 for a NIC that there is not.
    pub fn node_guid(&self, i: usize) -> u64 {
        self.specs.get(i).map_or(0, |s| guid_of(s.ips[0]))
    }

    /// The protection domains and memory regions, which all NICs share but the plain ones.
    pub fn memory(&self) -> Arc<dyn MemoryDomain> {
        self.common.domain.clone()
    }

    /// Where UD QPs are that have moved: the table that all NICs translate by, but the plain ones.
    pub fn aliases(&self) -> Arc<UdAliases> {
        self.common.aliases.clone()
    }

    /// Opens a NIC. It has one handle at a time: a second call while the first handle lives is
    /// EBUSY, one after its death is right.
    pub fn open(self: &Arc<Self>, i: usize, sink: Arc<dyn EventSink>) -> Result<Arc<Nic>> {
        self.process.check()?;
        let Some(spec) = self.specs.get(i) else {
            return Err(Error::invalid(format!(
                "there is no NIC {i} on host {}: it has {}",
                self.host,
                self.specs.len()
            )));
        };
        let mut opened = self.opened();
        if let Some(old) = &opened[i] {
            if old.nic.upgrade().is_some_and(|n| n.alive()) {
                return Err(Error::new(
                    libc::EBUSY,
                    format!("NIC {} is open in this process", spec.name),
                ));
            }
        }
        let mut link = self.link(i)?;
        if !link.state(now_us()).alive {
            // It is told when it is well.
            let died = Arc::new(AtomicBool::new(true));
            opened[i] = Some(Opened {
                nic: Weak::new(),
                sink: Arc::downgrade(&sink),
                died,
                grave: Some(link),
            });
            return Err(Error::device_gone(format!("NIC {} is dead", spec.name)));
        }
        let weak = Arc::downgrade(&sink);
        let died = Arc::new(AtomicBool::new(false));
        let witness = Arc::new(Witness { sink, died: died.clone() });
        let common = self.common.of(spec.device)?;
        let nic = Nic::open(i, spec, link, self.fabric.clone(), common, witness)?;
        // One that had died, and that the watcher has not seen alive since: it finds a living one.
        let is_back = opened[i]
            .as_ref()
            .is_some_and(|old| old.grave.is_some() || old.died.load(Ordering::Acquire));
        opened[i] = Some(Opened { nic: nic.downgrade(), sink: weak.clone(), died, grave: None });
        drop(opened);
        if let Some(sink) = weak.upgrade().filter(|_| is_back) {
            sink.event(i, DeviceEvent::PortActive(1));
        }
        Ok(Arc::new(nic))
    }

    fn opened(&self) -> MutexGuard<'_, Vec<Option<Opened>>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn link(&self, i: usize) -> Result<LinkSource> {
        match (&self.fabric, &self.specs[i].interface) {
            (Some(fabric), _) => {
                fabric.nic_view(&self.host, i as u8).map(LinkSource::Fabric).map_err(invalid)
            }
            (None, Some(interface)) => Ok(LinkSource::Interface(interface.clone())),
            (None, None) => Err(Error::invalid("a NIC without a link")),
        }
    }

    /// Makes every NIC look at its link, and tells of dead ones that work again.
    fn look(&self, now_us: u64) {
        let mut opened = self.opened();
        for (i, slot) in opened.iter_mut().enumerate() {
            let Some(o) = slot else { continue };
            let nic = o.nic.upgrade();
            if nic.as_ref().is_some_and(|n| n.look(now_us)) {
                continue;
            }
            // A NIC that was closed while it worked is of no interest; one that died is, handle or
            // not.
            if o.grave.is_none() {
                if nic.is_none() && !o.died.load(Ordering::Acquire) {
                    *slot = None;
                    continue;
                }
                o.grave = self.link(i).ok();
            }
            if o.grave.as_mut().is_some_and(|link| link.state(now_us).alive) {
                if let Some(sink) = o.sink.upgrade() {
                    sink.event(i, DeviceEvent::PortActive(1));
                }
                *slot = None;
            }
        }
    }
}

/// The host part of a real machine's name, for events and status.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().split('.').next().filter(|n| !n.is_empty()).unwrap_or("localhost").to_owned()
}

fn watch_fabric(nics: &Weak<SoftNics>, fabric: &Fabric) {
    let mut seen = fabric.generation();
    loop {
        let since_us = now_us();
        match nics.upgrade() {
            Some(nics) => nics.look(since_us),
            None => return,
        }
        seen = fabric.wait_change(seen, since_us, WATCH_US);
    }
}

fn watch_interfaces(nics: &Weak<SoftNics>, watch: &LinkWatch) {
    loop {
        let changes = watch.wait((WATCH_US / 1000) as i32);
        let Some(nics) = nics.upgrade() else { return };
        for change in changes {
            let states = match change {
                LinkChange::Up(index, up) => vec![(index, Some(up))],
                LinkChange::Deleted(index) => vec![(index, None)],
                LinkChange::Overrun => netlink::link_states()
                    .unwrap_or_default()
                    .into_iter()
                    .map(|(i, up)| (i, Some(up)))
                    .collect(),
            };
            for interface in nics.specs.iter().filter_map(|s| s.interface.as_ref()) {
                match states.iter().find(|(index, _)| *index == interface.index) {
                    Some((_, Some(up))) => interface.set_up(*up),
                    Some((_, None)) => interface.set_deleted(),
                    None => {}
                }
            }
        }
        nics.look(now_us());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};
    use unbroken_fabric::Runtime;

    #[derive(Default)]
    struct Events(Mutex<Vec<DeviceEvent>>);

    impl EventSink for Events {
        fn event(&self, _: usize, event: DeviceEvent) {
            self.0.lock().unwrap().push(event);
        }
    }

    fn wait(what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < Duration::from_secs(20), "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_nic_that_is_dropped_as_it_dies_is_said_to_be_back() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = || Runtime::at(folder.path()).unwrap();
        let (fabric, events) = (Fabric::open(&runtime()).unwrap(), Arc::new(Events::default()));
        let nics = SoftNics::new(Config::host(runtime(), "a")).unwrap();
        let nic = nics.open(0, events.clone()).unwrap();
        // The watcher cannot look before all is over.
        let opened = nics.opened();
        fabric.set(&"nic a/0 dead".parse().unwrap(), None).unwrap();
        let shared = || opened[0].as_ref().unwrap().nic.upgrade();
        wait("its death", || shared().is_none_or(|n| !n.look(now_us())));
        drop(nic);
        wait("the end of its last handle", || shared().is_none());
        assert_eq!(*events.0.lock().unwrap(), [DeviceEvent::Fatal]);
        drop(opened);
        fabric.clear(None).unwrap();
        wait("the news that it is back", || {
            events.0.lock().unwrap().contains(&DeviceEvent::PortActive(1))
        });
        assert!(nics.open(0, events).is_ok());
    }
}
