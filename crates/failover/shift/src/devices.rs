//! The NICs that `shift` runs over. The only file of this crate that names a kind of device: all
//! others know [`Device`] alone, and learn of failures through it.

use crate::core::lock;
use crate::preference::Place;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use unbroken_resumable::{Holding, Host, LogicalMemory, Tap};
use unbroken_runtime::{now_us, Runtime};
pub(crate) use unbroken_softnic::ask_for_precedence;
#[cfg(test)]
use unbroken_softnic::DeviceKind;
pub use unbroken_softnic::{interface_index, NicInfo, PortInfo};
use unbroken_softnic::{Config, NicSource, SoftNics};
use unbroken_types::Gid;
use unbroken_verbs::{
    Capabilities, Device, DeviceAttr, Error, EventSink, KeyRow, MemoryDomain, PortAttr, Result,
    UdAliases,
};

/// The NICs of this process's host.
pub trait NicSet: Send + Sync {
    /// How many there are.
    fn count(&self) -> usize;
    /// The name of NIC `i` in events and status.
    fn name(&self, i: usize) -> String;
    /// The host's name.
    fn host(&self) -> String;
    /// What NIC `i` can do beyond plain verbs, open or not.
    fn capabilities(&self, i: usize) -> Capabilities;
    /// The GID of NIC `i`, known before it is opened.
    fn gid(&self, i: usize) -> Gid;
    /// The GID of port 1 of the NIC, of whatever host, that has a port with this GID: QPNs are a
    /// NIC's, whichever port carries its QPs.
    fn first_port(&self, gid: Gid) -> Gid;
    /// The node GUID of NIC `i`.
    fn node_guid(&self, i: usize) -> u64;
    /// Limits and identity of NIC `i`, open or not.
    fn attr(&self, i: usize) -> DeviceAttr;
    /// A port of NIC `i`, counted from 1, open or not, in the state that the caller knows.
    fn port(&self, i: usize, port: u8, usable: bool) -> Result<PortAttr>;
    /// The GID of the InfiniBand port that has this LID, as NIC `i` knows it, or why there is none.
    fn gid_of_lid(&self, i: usize, lid: u16) -> Result<Gid>;
    /// Opens NIC `i`. A dead one can be opened again when it is healed.
    fn open(&self, i: usize, sink: Arc<dyn EventSink>) -> Result<Arc<dyn Device>>;
    /// Protection domains and regions, as the contexts of NIC `i` see them. A domain is good on
    /// every NIC that shares its objects.
    fn memory(&self, i: usize) -> Arc<dyn MemoryDomain>;
    /// By which keys a region is known on each NIC whose contexts of NIC `i` know it by this one,
    /// where keys are a NIC's own.
    fn keys(&self, i: u8, rkey: u32) -> Option<KeyRow>;
    /// Which set of keys NIC `i` has ([`unbroken_types::NicKey`]); 0 where keys are good on all
    /// NICs.
    fn key_set(&self, i: usize) -> u16;
    /// Whether UD QPs can be moved.
    fn moves_datagrams(&self) -> bool;
    /// Where UD QPs are that have moved: the table that all these NICs translate by.
    fn aliases(&self) -> Arc<UdAliases>;
    /// The runtime folder.
    fn runtime(&self) -> PathBuf;
    /// Where NIC `i` is in the machine, if it is a device of the machine.
    fn place(&self, i: usize) -> Option<Place>;
}

struct Soft {
    nics: Arc<SoftNics>,
    runtime: PathBuf,
    /// The names of the machine's interfaces that they are; none in the emulated network.
    interfaces: Vec<String>,
    /// Where the NICs have plain verbs only and their QPs are to be protected: what they lack is
    /// supplied by `holding`.
    logical: Option<Logical>,
}

struct Logical {
    memory: Arc<LogicalMemory>,
    /// Where the events of each NIC go first, since it was opened last. They outlive its device: a
    /// NIC that died is said to be back.
    taps: Mutex<Vec<Option<Arc<Tap>>>>,
}

/// What `holding` is given by this process.
const HOST: Host = Host { spawn: spawn_boxed, now_us };

fn spawn_boxed(name: &str, body: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
    spawn(name, body)
}

impl NicSet for Soft {
    fn count(&self) -> usize {
        self.nics.count()
    }

    fn name(&self, i: usize) -> String {
        self.nics.name(i).to_string()
    }

    fn host(&self) -> String {
        self.nics.host().to_string()
    }

    fn capabilities(&self, i: usize) -> Capabilities {
        match self.logical {
            Some(_) => Holding::CAPABILITIES,
            None => self.nics.capabilities(i),
        }
    }

    fn gid(&self, i: usize) -> Gid {
        self.nics.gid(i).unwrap_or_default()
    }

    fn first_port(&self, gid: Gid) -> Gid {
        self.nics.first_port(gid)
    }

    fn node_guid(&self, i: usize) -> u64 {
        self.nics.node_guid(i)
    }

    fn attr(&self, i: usize) -> DeviceAttr {
        let attr = self.nics.attr(i);
        match self.logical {
            Some(_) => Holding::attr(&attr),
            None => attr,
        }
    }

    fn port(&self, i: usize, port: u8, usable: bool) -> Result<PortAttr> {
        self.nics.port(i, port, usable)
    }

    fn gid_of_lid(&self, i: usize, lid: u16) -> Result<Gid> {
        self.nics.gid_of_lid(i, lid)
    }

    fn open(&self, i: usize, sink: Arc<dyn EventSink>) -> Result<Arc<dyn Device>> {
        let Some(logical) = &self.logical else { return Ok(self.nics.open(i, sink)?) };
        let tap = Tap::new(sink);
        let device = self.nics.open(i, tap.clone());
        // One that is open already keeps its own.
        let other = matches!(&device, Err(e) if e.errno() == libc::EBUSY);
        if let Some(slot) = lock(&logical.taps).get_mut(i).filter(|_| !other) {
            *slot = Some(tap.clone());
        }
        Ok(Arc::new(Holding::new(i, device?, &tap, &logical.memory, HOST)?))
    }

    fn memory(&self, i: usize) -> Arc<dyn MemoryDomain> {
        match &self.logical {
            Some(logical) => logical.memory.of(i),
            None => self.nics.memory(),
        }
    }

    fn keys(&self, i: u8, rkey: u32) -> Option<KeyRow> {
        self.logical.as_ref()?.memory.answer(i.into(), rkey)
    }

    fn key_set(&self, i: usize) -> u16 {
        self.logical.as_ref().map_or(0, |logical| logical.memory.key_set(i))
    }

    fn moves_datagrams(&self) -> bool {
        self.logical.is_none()
    }

    fn aliases(&self) -> Arc<UdAliases> {
        self.nics.aliases()
    }

    fn runtime(&self) -> PathBuf {
        self.runtime.clone()
    }

    fn place(&self, i: usize) -> Option<Place> {
        Place::of(Path::new("/sys"), self.interfaces.get(i)?)
    }
}

/// Whether failover is on (`UNBROKEN_FAILOVER`, on unless it is 0).
pub fn failover_is_on() -> bool {
    std::env::var("UNBROKEN_FAILOVER").map_or(true, |v| v != "0")
}

/// The NICs that the environment names (see `unbroken run`).
pub fn from_env() -> Result<Box<dyn NicSet>> {
    over(Config::from_env()?)
}

/// The same, to which nothing supplies what they lack: as beside NICs of another kind.
pub fn bare_from_env() -> Result<Box<dyn NicSet>> {
    with(Config::from_env()?, false)
}

fn over(config: Config) -> Result<Box<dyn NicSet>> {
    with(config, failover_is_on())
}

fn with(config: Config, supplied: bool) -> Result<Box<dyn NicSet>> {
    let runtime = config.runtime.path().to_path_buf();
    let interfaces = match &config.nics {
        NicSource::Addresses(..) => {
            unbroken_softnic::inventory(&config)?.into_iter().map(|nic| nic.interface).collect()
        }
        NicSource::Host(_) => Vec::new(),
    };
    let nics = SoftNics::new(config)?;
    // Keys and domains of NICs of different kinds have nothing in common: there, nothing is
    // protected that is on a plain one.
    let plain = nics.count() > 0 && (0..nics.count()).all(|i| !nics.capabilities(i).holds);
    let logical = (plain && supplied).then(|| Logical {
        memory: LogicalMemory::new(nics.count(), spawn_boxed),
        taps: Mutex::new(vec![None; nics.count()]),
    });
    Ok(Box::new(Soft { nics, runtime, interfaces, logical }))
}

fn runtime_at(path: &Path) -> Result<Runtime> {
    Runtime::at(path).map_err(|e| Error::invalid(e.to_string()))
}

/// The NICs of a host in the emulated network of a runtime folder.
pub fn of_host(runtime: &Path, host: &str) -> Result<Box<dyn NicSet>> {
    over(Config::host(runtime_at(runtime)?, host))
}

/// The same, to which nothing supplies what they lack.
pub fn bare(runtime: &Path, host: &str) -> Result<Box<dyn NicSet>> {
    with(Config::host(runtime_at(runtime)?, host), false)
}

/// NICs at addresses of interfaces.
pub fn at(runtime: &Path, addresses: &[IpAddr]) -> Result<Box<dyn NicSet>> {
    over(Config::addresses(runtime_at(runtime)?, addresses))
}

/// Plain NICs at addresses of the loopback interface, to which nothing supplies what they lack: as
/// beside NICs of another kind.
#[cfg(test)]
pub fn bare_at(runtime: Runtime, addrs: &[&str]) -> Result<Box<dyn NicSet>> {
    let addrs = addrs.iter().map(|addr| addr.parse().expect("an address")).collect();
    with(Config::of(runtime, NicSource::Addresses(addrs, DeviceKind::Plain)), false)
}

/// NICs that may be looked at without being used.
pub struct Inventory {
    /// The runtime folder.
    pub runtime: PathBuf,
    /// A name for this set of NICs, fit for a folder.
    pub key: String,
    /// The NICs, in the order of the devices `unb0`, `unb1`, …
    pub nics: Vec<NicInfo>,
}

/// The NICs that the environment names and their states. Starts nothing.
pub fn inventory() -> Result<Inventory> {
    let config = Config::from_env()?;
    let key = match &config.nics {
        NicSource::Host(host) => host.clone(),
        NicSource::Addresses(addrs, _) => {
            addrs.iter().map(ToString::to_string).collect::<Vec<_>>().join("_")
        }
    };
    let nics = unbroken_softnic::inventory(&config)?;
    Ok(Inventory { runtime: config.runtime.path().to_path_buf(), key, nics })
}

pub use unbroken_softnic::{program_action, undisturbed, Born, PerProcess};

/// Starts a thread as the devices start theirs.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    unbroken_softnic::spawn_service(name, body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};
    use unbroken_fabric::{Fabric, NicKind, Shape};
    use unbroken_verbs::DeviceEvent;

    #[derive(Default)]
    struct Events(Mutex<Vec<DeviceEvent>>);

    impl EventSink for Events {
        fn event(&self, _: usize, event: DeviceEvent) {
            lock(&self.0).push(event);
        }
    }

    impl Events {
        fn wait(&self, event: DeviceEvent) {
            let start = Instant::now();
            while !lock(&self.0).contains(&event) {
                assert!(start.elapsed() < Duration::from_secs(20), "{event:?}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn a_plain_nic_that_died_and_whose_device_was_given_up_is_said_to_be_back() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = || Runtime::at(folder.path()).unwrap();
        let kind = NicKind { device: DeviceKind::Plain, ..NicKind::default() };
        let fabric =
            Fabric::create(&runtime(), &Shape { kind, ..Shape::of(0, &["a"], 1) }).unwrap();
        let nics = over(Config::host(runtime(), "a")).unwrap();
        assert!(nics.capabilities(0) == Holding::CAPABILITIES);
        let events = Arc::new(Events::default());
        let device = nics.open(0, events.clone()).unwrap();
        assert_eq!(nics.open(0, events.clone()).map(drop).unwrap_err().errno(), libc::EBUSY);
        fabric.set(&"nic a/0 dead".parse().unwrap(), None).unwrap();
        events.wait(DeviceEvent::Fatal);
        drop(device);
        fabric.clear(None).unwrap();
        events.wait(DeviceEvent::PortActive(1));
        assert!(nics.open(0, events).is_ok());
    }
}
