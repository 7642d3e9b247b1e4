//! The fabric as programs use it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{flock, FlockOperation, Timespec};
use rustix::thread::futex;
use unbroken_telemetry::{now_us, Event, EventLog, Runtime, What};

use crate::config::{Host, NicName, Shape};
use crate::error::{FabricError, Result};
use crate::fault::{Fault, Selector, Way};
use crate::faultpage::{Entry, FaultPage, Kind, ENTRIES, PATIENT_TRIES};
use crate::map::Mapped;
use crate::octet::{Registry, DEFAULT_OCTET};
use crate::view::{LinkState, NicView};

/// A fault in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveFault {
    /// The fault.
    pub fault: Fault,
    /// From when it holds, by [`now_us`]; possibly later than now.
    pub from_us: u64,
}

/// An emulated network.
pub struct Fabric {
    runtime: Runtime,
    shape: Shape,
    page: Arc<Mapped<FaultPage>>,
    log: EventLog,
}

impl Fabric {
    /// Opens the fabric of a runtime folder; makes the default one if there is none.
    pub fn open(runtime: &Runtime) -> Result<Fabric> {
        let path = runtime.fabric_toml();
        let shape = match fs::read_to_string(&path) {
            Ok(text) => Shape::parse(&text, &path)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => make(runtime, &Shape::standard(0), false)?,
            Err(e) => return Err(FabricError::io(&path, "read it")(e)),
        };
        if shape.octet != DEFAULT_OCTET && !Registry::knows(shape.octet, runtime) {
            Registry::lock()?.claim(shape.octet, runtime)?;
        }
        let page = Arc::new(Mapped::<FaultPage>::open_or_create(&runtime.fabric_page())?);
        let fabric = Fabric { runtime: runtime.clone(), shape, page, log: EventLog::open(runtime) };
        fabric.forget_earlier_boot()?;
        Ok(fabric)
    }

    /// Makes a fabric of this shape (its octet is chosen anew) in a runtime folder that has none, else an error.
    pub fn create(runtime: &Runtime, shape: &Shape) -> Result<Fabric> {
        make(runtime, shape, true)?;
        Fabric::open(runtime)
    }

    /// Removes the fabric of a runtime folder: its file, its faults and counters. Processes that have it open keep the old pages.
    pub fn remove(runtime: &Runtime) -> Result<()> {
        let registry = Registry::lock()?;
        let path = runtime.fabric_toml();
        if let Ok(shape) =
            fs::read_to_string(&path).map_err(|_| ()).and_then(|t| Shape::parse(&t, &path).map_err(|_| ()))
        {
            registry.release(shape.octet, runtime);
        }
        for path in [path, runtime.fabric_page()] {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(FabricError::io(&path, "remove it")(e)),
                _ => {}
            }
        }
        crate::nicpage::remove_all(runtime)
    }

    /// The runtime folder.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// The hosts.
    pub fn hosts(&self) -> &[Host] {
        &self.shape.hosts
    }

    /// Rails: NIC n of every host is on rail n.
    pub fn rails(&self) -> u8 {
        self.shape.rails()
    }

    /// The second octet of all addresses.
    pub fn octet(&self) -> u8 {
        self.shape.octet
    }

    /// A host by name; the error lists the hosts.
    pub fn host(&self, name: &str) -> Result<&Host> {
        self.shape.hosts.iter().find(|h| h.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.hosts().iter().map(|h| h.name.as_str()).collect();
            FabricError::Name(format!("there is no host '{name}'; hosts are {}", names.join(", ")))
        })
    }

    /// NICs of a host.
    pub fn nic_count(&self, host: &str) -> Result<u8> {
        Ok(self.host(host)?.nics)
    }

    /// All NICs, host by host.
    pub fn nics(&self) -> impl Iterator<Item = NicName> + '_ {
        self.hosts().iter().flat_map(|h| (0..h.nics).map(|n| NicName::new(&h.name, n)))
    }

    /// The address of NIC `index` of `host`.
    pub fn nic_addr(&self, host: &str, index: u8) -> Result<Ipv4Addr> {
        let number = self.number(host, index)?;
        Ok(self.shape.addr(number, index))
    }

    /// The NIC that has this address, if it is one of the fabric.
    pub fn locate(&self, addr: Ipv4Addr) -> Option<NicName> {
        let [first, octet, number, index] = addr.octets();
        let host = self.hosts().iter().find(|h| h.number == number)?;
        (first == 127 && octet == self.shape.octet && index < host.nics).then(|| NicName::new(&host.name, index))
    }

    /// What NIC `index` of `host` sees of the faults; for its engine.
    pub fn nic_view(&self, host: &str, index: u8) -> Result<NicView> {
        let number = self.number(host, index)?;
        Ok(NicView::new(Arc::clone(&self.page), number, index))
    }

    /// The state of a NIC now, and the faults that concern it; for people.
    pub fn nic_state(&self, nic: &NicName) -> Result<(LinkState, Vec<Fault>)> {
        let number = self.number(&nic.host, nic.index)?;
        let now_us = now_us();
        let (mut state, mut faults) = (LinkState::GOOD, Vec::new());
        for entry in self.entries() {
            if entry.from_us <= now_us && crate::view::concerns(&entry, number, nic.index) {
                state.add(&entry);
                faults.extend(self.fault_of(&entry));
            }
        }
        Ok((state, faults))
    }

    /// Sets a fault, at once or after a time. One that is the same but for its value is replaced. Written to the event log with
    /// the time from which it holds.
    pub fn set(&self, fault: &Fault, after: Option<Duration>) -> Result<ActiveFault> {
        let mut entry = self.entry_of(fault)?;
        let _lock = self.lock()?;
        let after_us = after.map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX));
        entry.from_us = now_us().saturating_add(after_us);
        if !self.page.write(|table| table.put(&entry)) {
            return Err(FabricError::Full(ENTRIES));
        }
        self.wake();
        self.write_log(What::Fault { fault: fault.to_string() }, entry.from_us)?;
        Ok(ActiveFault { fault: fault.clone(), from_us: entry.from_us })
    }

    /// Clears the faults that `selector` names, or all. Returns those that were set.
    pub fn clear(&self, selector: Option<&Selector>) -> Result<Vec<ActiveFault>> {
        if let Some(selector) = selector {
            self.entry_of(&selector.example()?)?;
        }
        let _lock = self.lock()?;
        let mut cleared = Vec::new();
        self.page.write(|table| {
            table.remove(|entry| match entry.and_then(|e| Some((e.from_us, self.fault_of(&e)?))) {
                Some((from_us, fault)) => {
                    let gone = selector.is_none_or(|s| s.matches(&fault));
                    if gone {
                        cleared.push(ActiveFault { fault, from_us });
                    }
                    gone
                }
                // Of a newer program, or of a host that fabric.toml no longer has.
                None => selector.is_none(),
            });
        });
        self.wake();
        let now_us = now_us();
        for active in &cleared {
            self.write_log(What::FaultClear { fault: active.fault.to_string() }, now_us)?;
        }
        Ok(cleared)
    }

    /// The faults, in the order of their times.
    pub fn list(&self) -> Vec<ActiveFault> {
        let entries = self.entries();
        let known = entries.iter().filter_map(|e| Some(ActiveFault { fault: self.fault_of(e)?, from_us: e.from_us }));
        let mut faults: Vec<ActiveFault> = known.collect();
        faults.sort_by_key(|f| f.from_us);
        faults
    }

    /// Counts the changes of the table.
    pub fn generation(&self) -> u32 {
        self.page.generation.load(Ordering::Acquire)
    }

    /// Waits until the table changes, a fault falls due, or `timeout_us` is over; returns the generation then.
    ///
    /// `seen` is the generation and `since_us` the time at which the caller last looked at the states; so nothing that happens
    /// between looking and waiting is missed:
    /// ```ignore
    /// let mut seen = fabric.generation();
    /// loop {
    ///     let since_us = now_us();
    ///     look_at(view.state(since_us));
    ///     seen = fabric.wait_change(seen, since_us, 1_000_000);
    /// }
    /// ```
    pub fn wait_change(&self, seen: u32, since_us: u64, timeout_us: u64) -> u32 {
        let generation = self.generation();
        if generation != seen {
            return generation;
        }
        let due_us = self.entries().iter().map(|e| e.from_us).filter(|from_us| *from_us > since_us).min();
        let now = now_us();
        let wait_us = due_us.map_or(timeout_us, |due_us| timeout_us.min(due_us.saturating_sub(now)));
        if wait_us > 0 {
            let timeout =
                Timespec { tv_sec: (wait_us / 1_000_000) as i64, tv_nsec: (wait_us % 1_000_000 * 1_000) as _ };
            // A shared futex (no PRIVATE flag). Whatever ends it (woken, changed already, time over, a signal), the caller looks.
            let _ = futex::wait(&self.page.generation, futex::Flags::empty(), seen, Some(&timeout));
        }
        self.generation()
    }

    fn wake(&self) {
        let _ = futex::wake(&self.page.generation, futex::Flags::empty(), i32::MAX as u32);
    }

    fn number(&self, host: &str, index: u8) -> Result<u8> {
        let host = self.host(host)?;
        if index < host.nics {
            return Ok(host.number);
        }
        let names: Vec<String> = (0..host.nics).map(|n| format!("{}/{n}", host.name)).collect();
        Err(FabricError::Name(format!(
            "there is no NIC '{}/{index}'; NICs of this host are {}",
            host.name,
            names.join(", ")
        )))
    }

    fn lock(&self) -> Result<File> {
        let path = self.runtime.path().join("fabric.lock");
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(FabricError::io(&path, "open it"))?;
        flock(&file, FlockOperation::LockExclusive).map_err(|e| FabricError::io(&path, "lock it")(e.into()))?;
        Ok(file)
    }

    fn write_log(&self, what: What, time_us: u64) -> Result<()> {
        self.log.emit(&Event::at(what, time_us)).map_err(FabricError::io(&self.runtime.events(), "write to it"))
    }

    fn entries(&self) -> Vec<Entry> {
        let entries = std::cell::RefCell::new(Vec::new());
        // Writers are quick; a table that is never at rest is shown as it was last seen.
        let _ =
            self.page.read(PATIENT_TRIES, || entries.borrow_mut().clear(), |entry| entries.borrow_mut().push(entry));
        entries.into_inner()
    }

    fn entry_of(&self, fault: &Fault) -> Result<Entry> {
        let of_nic = |kind, nic: &NicName, way, value| {
            let host = self.number(&nic.host, nic.index)?;
            Ok(Entry { kind, host, index: nic.index, way, value, from_us: 0 })
        };
        match fault {
            Fault::NicDead(nic) => of_nic(Kind::NicDead, nic, 0, 0),
            Fault::NicDown(nic) => of_nic(Kind::NicDown, nic, 0, 0),
            Fault::CableCut(nic) => of_nic(Kind::CableCut, nic, 0, 0),
            Fault::Loss { nic, ppm, way } => of_nic(Kind::Loss, nic, *way as u8, u64::from(*ppm)),
            Fault::SwitchDown { rail } if *rail < self.rails() => {
                Ok(Entry { kind: Kind::SwitchDown, host: 0, index: *rail, way: 0, value: 0, from_us: 0 })
            }
            Fault::SwitchDown { rail } => {
                let names: Vec<String> = (0..self.rails()).map(|n| format!("rail{n}")).collect();
                Err(FabricError::Name(format!("there is no switch 'rail{rail}'; switches are {}", names.join(", "))))
            }
        }
    }

    fn fault_of(&self, entry: &Entry) -> Option<Fault> {
        if entry.kind == Kind::SwitchDown {
            return Some(Fault::SwitchDown { rail: entry.index });
        }
        let host = self.hosts().iter().find(|h| h.number == entry.host)?;
        let nic = NicName::new(&host.name, entry.index);
        Some(match entry.kind {
            Kind::NicDead => Fault::NicDead(nic),
            Kind::NicDown => Fault::NicDown(nic),
            Kind::CableCut | Kind::SwitchDown => Fault::CableCut(nic),
            Kind::Loss => {
                let way = [Way::Both, Way::Tx, Way::Rx][usize::from(entry.way.min(2))];
                Fault::Loss { nic, ppm: entry.value as u32, way }
            }
        })
    }

    /// Empties the table if it is of an earlier boot of the machine, since the clock began anew.
    fn forget_earlier_boot(&self) -> Result<()> {
        let id = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot = id.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
        if self.page.boot.load(Ordering::Acquire) == boot {
            return Ok(());
        }
        let _lock = self.lock()?;
        if self.page.boot.load(Ordering::Acquire) != boot {
            self.page.write(|table| table.remove(|_| true));
            self.page.boot.store(boot, Ordering::Release);
        }
        Ok(())
    }
}

/// Writes `fabric.toml` with an octet of the runtime's own, unless someone was faster (an error where it `must_be_new`).
fn make(runtime: &Runtime, shape: &Shape, must_be_new: bool) -> Result<Shape> {
    let registry = Registry::lock()?;
    let path = runtime.fabric_toml();
    match fs::read_to_string(&path) {
        Ok(text) if !must_be_new => return Shape::parse(&text, &path),
        Ok(_) => {
            let what = "there is a fabric already; take it away with: unbroken fabric down".to_string();
            return Err(FabricError::Name(format!("{}: {what}", path.display())));
        }
        Err(_) => {}
    }
    let shape = Shape { octet: registry.choose(runtime)?, hosts: shape.hosts.clone() };
    let text = shape.to_toml();
    // What cannot be read back must not be written.
    Shape::parse(&text, &path)?;
    let new = path.with_extension("toml.new");
    fs::write(&new, text).map_err(FabricError::io(&new, "write it"))?;
    fs::rename(&new, &path).map_err(FabricError::io(&path, "make it"))?;
    Ok(shape)
}
