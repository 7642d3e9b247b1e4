//! The fabric as programs use it.

mod file;

pub(crate) use file::read_text;

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::Timespec;
use rustix::thread::futex;
use unbroken_events::{Event, EventLog, What};
use unbroken_runtime::{now_us, Drains, FileLock, Runtime};
use unbroken_types::LinkLayer;

use self::file::{lock_folder, make, read_bytes, text_of};
use crate::config::{Host, NicKind, NicName, Shape};
use crate::entry::{Entry, Spot, SpotKind};
use crate::error::{FabricError, Result};
use crate::fault::{Fault, Place, Rail, Selector};
use crate::faultpage::{FaultPage, ENTRIES, PATIENT_TRIES};
use crate::map::Mapped;
use crate::nicpage::NicPage;
use crate::octet::Registry;
use crate::view::{LinkState, NicView, Outlook};

/// The shortest time between two beginnings of a fault.
const MIN_EVERY_US: u64 = 2_000;

/// No NIC of the fabric is drained any more: one of the same name in the next fabric is another.
fn undrain_all(runtime: &Runtime) -> Result<()> {
    let path = runtime.path().join("drained");
    let failed = |e| FabricError::io(&path, "take drains back")(e);
    let drains = Drains::of(runtime);
    for name in drains.all().map_err(failed)? {
        // Those of NICs by address are no fabric's.
        if name.parse::<NicName>().is_ok() {
            drains.set(&name, false).map_err(failed)?;
        }
    }
    Ok(())
}

/// A fault in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveFault {
    /// The fault.
    pub fault: Fault,
    /// From when it holds, by [`now_us`]; possibly later than now.
    pub from_us: u64,
    /// For how long it holds, each time; `None`: until it is cleared. Of a flap: how long it goes
    /// on.
    pub lasts_us: Option<u64>,
    /// How often it comes again, from beginning to beginning; `None`: it does not.
    pub every_us: Option<u64>,
    /// Whether it holds now.
    pub holds: bool,
}

/// When a fault holds, from the time of setting it on. The default: at once, until it is cleared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// How much later.
    pub at: Duration,
    /// For how long; `None`: until it is cleared.
    pub lasts: Option<Duration>,
    /// How often it comes again, from beginning to beginning; `None`: it does not.
    pub every: Option<Duration>,
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
        let shape = match read_bytes(&path) {
            Ok(bytes) => Shape::parse(&text_of(bytes, &path)?, &path)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                make(runtime, &Shape::standard(0), false)?
            }
            Err(e) => return Err(FabricError::io(&path, "read it")(e)),
        };
        if !Registry::knows(shape.octet, runtime) {
            Registry::lock()?.claim(shape.octet, runtime)?;
        }
        let page = Arc::new(Mapped::<FaultPage>::open_or_create(&runtime.fabric_page())?);
        let fabric = Fabric { runtime: runtime.clone(), shape, page, log: EventLog::open(runtime) };
        fabric.forget_earlier_boot()?;
        Ok(fabric)
    }

    /// Makes a fabric of this shape (its octet is chosen anew) in a runtime folder that has none,
    /// else an error.
    pub fn create(runtime: &Runtime, shape: &Shape) -> Result<Fabric> {
        make(runtime, shape, true)?;
        Fabric::open(runtime)
    }

    /// Removes the fabric of a runtime folder: its file, its faults and counters. Processes that
    /// have it open keep the old pages.
    pub fn remove(runtime: &Runtime) -> Result<()> {
        let registry = Registry::lock()?;
        let path = runtime.fabric_toml();
        if let Ok(shape) =
            read_text(&path).map_err(|_| ()).and_then(|t| Shape::parse(&t, &path).map_err(|_| ()))
        {
            registry.release(shape.octet, runtime);
        }
        for path in [path, runtime.fabric_page()] {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(FabricError::io(&path, "remove it")(e))
                }
                _ => {}
            }
        }
        crate::nicpage::remove_all(runtime)?;
        undrain_all(runtime)
    }

    /// Has the addresses of a runtime folder free for others once it is gone; `path` is absolute,
    /// without links.
    pub fn forget(path: &Path) -> Result<()> {
        Registry::lock()?.forget(path);
        Ok(())
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

    /// The switches: one for the first ports of the NICs of a number, and one for the second ports
    /// where there are any.
    pub fn switches(&self) -> Vec<Rail> {
        let has_second =
            |nic| self.nics().any(|n| n.index == nic && self.nic_kind(&n.host, n.index).ports > 1);
        let of = |nic| (1..=1 + u8::from(has_second(nic))).map(move |port| Rail { nic, port });
        (0..self.rails()).flat_map(of).collect()
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

    /// The shared page of the port with this address; `None` for one that is not of the fabric.
    pub fn nic_page(&self, addr: IpAddr) -> Option<NicPage> {
        let IpAddr::V4(v4) = addr else { return None };
        self.locate(v4).and_then(|_| NicPage::open(&self.runtime, addr).ok())
    }

    /// All NICs, host by host.
    pub fn nics(&self) -> impl Iterator<Item = NicName> + '_ {
        self.hosts().iter().flat_map(|h| (0..h.nics).map(|n| NicName::new(&h.name, n)))
    }

    /// The address of NIC `index` of `host`.
    pub fn nic_addr(&self, host: &str, index: u8) -> Result<Ipv4Addr> {
        self.port_addr(host, index, 1)
    }

    /// The address of port `port`, from 1, of NIC `index` of `host`.
    pub fn port_addr(&self, host: &str, index: u8, port: u8) -> Result<Ipv4Addr> {
        let number = self.number(host, index)?;
        self.check_port(&NicName::new(host, index).at_port(port))?;
        Ok(self.shape.addr(number, index, port))
    }

    /// What was asked for when the fabric was made, or written into `fabric.toml` since.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How NIC `index` of `host` is made.
    pub fn nic_kind(&self, host: &str, index: u8) -> NicKind {
        self.shape.kind(host, index)
    }

    /// The address of the InfiniBand port with this LID (see [`lid_of`](crate::lid_of)), or why
    /// there is none.
    pub fn addr_of_lid(&self, lid: u16) -> Result<Ipv4Addr> {
        let addr =
            Ipv4Addr::new(127, self.shape.octet, (lid >> 7).min(255) as u8, (lid & 0x7f) as u8);
        let nic = self.locate(addr).ok_or_else(|| {
            FabricError::Name(format!(
                "no port of the fabric has LID {lid}; the LID of a port is 128 * host number + \
                 last octet of its address"
            ))
        })?;
        match self.nic_kind(&nic.host, nic.index).link_layer {
            LinkLayer::Infiniband => Ok(addr),
            LinkLayer::Ethernet => Err(FabricError::Name(format!(
                "LID {lid} would be that of NIC {nic}, whose link layer is Ethernet"
            ))),
        }
    }

    /// The port that has this address, if it is one of the fabric.
    pub fn locate(&self, addr: Ipv4Addr) -> Option<NicName> {
        self.shape.locate(addr)
    }

    /// Whether the NIC has the port that is named, if one is named.
    fn check_port(&self, nic: &NicName) -> Result<()> {
        let ports = self.nic_kind(&nic.host, nic.index).ports;
        if nic.port <= ports {
            return Ok(());
        }
        let whole = nic.at_port(0);
        Err(FabricError::Name(format!(
            "there is no port '{nic}'; NIC '{whole}' has {ports}: see 'ports' in fabric.toml"
        )))
    }

    /// What NIC `index` of `host` sees of the faults; for its engine.
    pub fn nic_view(&self, host: &str, index: u8) -> Result<NicView> {
        let number = self.number(host, index)?;
        Ok(NicView::new(Arc::clone(&self.page), number, index))
    }

    /// The state of a NIC now, and the faults that concern it, or those that concern the port which
    /// is named; for people.
    pub fn nic_state(&self, nic: &NicName) -> Result<(LinkState, Vec<Fault>)> {
        let number = self.number(&nic.host, nic.index)?;
        let now_us = now_us();
        let (mut outlook, mut faults) = (Outlook::GOOD, Vec::new());
        for entry in self.entries() {
            let there =
                crate::view::concerns(&entry, number, nic.index) && entry.spot.strikes(nic.port);
            if there && outlook.add(&entry, now_us) {
                faults.extend(self.fault_of(&entry));
            }
        }
        outlook.state.impaired = u32::from(outlook.impaired());
        Ok((outlook.state, faults))
    }

    /// Sets a fault, at once or after a time. One that is the same but for its values and times is
    /// replaced. Written to the event log with the time from which it holds.
    pub fn set(&self, fault: &Fault, after: Option<Duration>) -> Result<ActiveFault> {
        self.schedule(fault, &Schedule { at: after.unwrap_or_default(), ..Schedule::default() })
    }

    /// Sets a fault that holds at some times; as [`Fabric::set`].
    pub fn schedule(&self, fault: &Fault, when: &Schedule) -> Result<ActiveFault> {
        let now_us = now_us();
        let entry = self.timed(fault, when, now_us)?;
        let _lock = self.lock()?;
        let put = self.page.write(|table| {
            table.remove(|e| e.is_some_and(|e| e.until_us() <= now_us));
            table.put(&entry)
        });
        put.map_err(|_| FabricError::Full(ENTRIES))?;
        self.wake();
        self.log_set(&entry, fault)?;
        Ok(active(&entry, fault.clone(), now_us))
    }

    /// Sets faults beside what is set, all or none: also the same fault at several times.
    pub fn schedule_all(&self, faults: &[(Fault, Schedule)]) -> Result<Vec<ActiveFault>> {
        let now_us = now_us();
        let entries: Vec<Entry> = faults
            .iter()
            .map(|(fault, when)| self.timed(fault, when, now_us))
            .collect::<Result<_>>()?;
        let _lock = self.lock()?;
        let added = self.page.write(|table| {
            table.remove(|e| e.is_some_and(|e| e.until_us() <= now_us));
            table.add(&entries)
        });
        added.map_err(|_| FabricError::Full(ENTRIES))?;
        self.wake();
        let both = || entries.iter().zip(faults.iter().map(|(fault, _)| fault));
        both().try_for_each(|(entry, fault)| self.log_set(entry, fault))?;
        Ok(both().map(|(entry, fault)| active(entry, fault.clone(), now_us)).collect())
    }

    /// The entry of a fault that is set now.
    fn timed(&self, fault: &Fault, when: &Schedule, now_us: u64) -> Result<Entry> {
        let us = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX).max(1);
        let (at_us, lasts_us, every_us) =
            (us(when.at), when.lasts.map_or(0, us), when.every.map_or(0, us));
        let wrong = |what: &str| Err(FabricError::Name(format!("fault '{fault}': {what}")));
        match fault {
            Fault::Flap { .. } if every_us != 0 => return wrong("a flap comes again by itself"),
            Fault::Flap { .. } => {}
            _ if every_us != 0 && every_us < MIN_EVERY_US => {
                return wrong("it can come again every 2ms at most")
            }
            Fault::WqeError(_) => {}
            _ if every_us != 0 && lasts_us == 0 => {
                return wrong("one that comes again must be over before: say for how long")
            }
            _ if every_us != 0 && lasts_us >= every_us => {
                return wrong("it would come again before it is over")
            }
            _ => {}
        }
        let at_us = if when.at.is_zero() { 0 } else { at_us };
        Ok(Entry {
            from_us: now_us.saturating_add(at_us),
            lasts_us,
            every_us,
            ..self.entry_of(fault)?
        })
    }

    /// Writes the beginning of a fault to the log, and its end where that is known.
    fn log_set(&self, entry: &Entry, fault: &Fault) -> Result<()> {
        let fault_text = fault.to_string();
        let (lasts_us, every_us) = match fault {
            Fault::Flap { down_us, up_us, .. } => (Some(*down_us), Some(down_us + up_us)),
            _ => (
                Some(entry.lasts_us).filter(|us| *us != 0),
                Some(entry.every_us).filter(|us| *us != 0),
            ),
        };
        let lasts_us = lasts_us.filter(|_| every_us.is_some());
        self.write_log(
            What::Fault { fault: fault_text.clone(), lasts_us, every_us },
            entry.from_us,
        )?;
        match entry.until_us() {
            u64::MAX => Ok(()),
            until_us => self.write_log(What::FaultClear { fault: fault_text }, until_us),
        }
    }

    /// Clears the faults that `selector` names, or all. Returns those that were set and not over.
    pub fn clear(&self, selector: Option<&Selector>) -> Result<Vec<ActiveFault>> {
        if let Some(selector) = selector {
            self.entry_of(selector.example())?;
        }
        let _lock = self.lock()?;
        let now_us = now_us();
        let mut cleared = Vec::new();
        self.page.write(|table| {
            table.remove(|entry| match entry.and_then(|e| Some((e, self.fault_of(&e)?))) {
                Some((entry, fault)) => {
                    let gone = selector.is_none_or(|s| s.matches(&fault));
                    if gone && entry.until_us() > now_us {
                        cleared.push(active(&entry, fault, now_us));
                    }
                    gone
                }
                // Of a newer program, or of a host that fabric.toml no longer has.
                None => selector.is_none(),
            });
        });
        self.wake();
        for active in &cleared {
            self.write_log(What::FaultClear { fault: active.fault.to_string() }, now_us)?;
        }
        Ok(cleared)
    }

    /// The faults that are not over, in the order of their times.
    pub fn list(&self) -> Vec<ActiveFault> {
        let now_us = now_us();
        let entries = self.entries();
        let current = entries.iter().filter(|e| e.until_us() > now_us);
        let mut faults: Vec<ActiveFault> =
            current.filter_map(|e| Some(active(e, self.fault_of(e)?, now_us))).collect();
        faults.sort_by_key(|f| f.from_us);
        faults
    }

    /// Counts the changes of the table.
    pub fn generation(&self) -> u32 {
        self.page.generation.load(Ordering::Acquire)
    }

    /// Waits until the table changes, a fault falls due or is over, or `timeout_us` is over;
    /// returns the generation then.
    ///
    /// `seen` is the generation and `since_us` the time at which the caller last looked at the
    /// states; so nothing that happens between looking and waiting is missed:
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
        let due_us = self.entries().iter().map(|e| e.at(since_us).1).min();
        let now = now_us();
        let wait_us =
            due_us.map_or(timeout_us, |due_us| timeout_us.min(due_us.saturating_sub(now)));
        if wait_us > 0 {
            let timeout = Timespec {
                tv_sec: (wait_us / 1_000_000) as i64,
                tv_nsec: (wait_us % 1_000_000 * 1_000) as _,
            };
            // A shared futex (no PRIVATE flag). Whatever ends it (woken, changed already, time
            // over, a signal), the caller looks.
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

    fn lock(&self) -> Result<FileLock> {
        lock_folder(&self.runtime)
    }

    fn write_log(&self, what: What, time_us: u64) -> Result<()> {
        let action = "write to it (the faults are set all the same)";
        self.log
            .emit(&Event::at(what, time_us))
            .map_err(FabricError::io(&self.runtime.events(), action))
    }

    fn entries(&self) -> Vec<Entry> {
        let entries = std::cell::RefCell::new(Vec::new());
        // Writers are quick; a table that is never at rest is shown as it was last seen.
        let _ = self.page.read(
            PATIENT_TRIES,
            || entries.borrow_mut().clear(),
            |entry| entries.borrow_mut().push(entry),
        );
        entries.into_inner()
    }

    fn entry_of(&self, fault: &Fault) -> Result<Entry> {
        let at = |kind, nic: &NicName| {
            let host = self.number(&nic.host, nic.index)?;
            self.check_port(nic)?;
            Ok(Spot { kind, host, index: nic.index, port: nic.port })
        };
        let switch = |rail: Rail| match self.switches().contains(&rail) {
            true => Ok(Spot { kind: SpotKind::Switch, host: 0, index: rail.nic, port: rail.port }),
            false => {
                let names: Vec<String> = self.switches().iter().map(Rail::to_string).collect();
                Err(FabricError::Name(format!(
                    "there is no switch '{rail}'; switches are {}",
                    names.join(", ")
                )))
            }
        };
        let spot = match fault {
            Fault::NicDead(nic) | Fault::NicDown(nic) | Fault::WqeError(nic) => {
                at(SpotKind::Nic, nic)
            }
            Fault::CableCut(nic) => at(SpotKind::Cable, nic),
            Fault::SwitchDown { rail } => switch(*rail),
            Fault::SpineDown => Ok(Spot { kind: SpotKind::Spine, host: 0, index: 0, port: 0 }),
            Fault::Impaired { place, .. } | Fault::Flap { place, .. } => match place {
                Place::Nic(nic) => at(SpotKind::Nic, nic),
                Place::Cable(nic) => at(SpotKind::Cable, nic),
                Place::Switch { rail } => switch(*rail),
            },
        };
        Ok(Entry::of(fault, spot?))
    }

    fn fault_of(&self, entry: &Entry) -> Option<Fault> {
        if matches!(entry.spot.kind, SpotKind::Switch | SpotKind::Spine) {
            return Some(entry.fault(""));
        }
        let host = self.hosts().iter().find(|h| h.number == entry.spot.host)?;
        Some(entry.fault(&host.name))
    }

    /// Empties the table if it is of an earlier boot of the machine, since the clock began anew.
    fn forget_earlier_boot(&self) -> Result<()> {
        let id = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot = id.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3)
        });
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

/// An entry of the table as others see it.
fn active(entry: &Entry, fault: Fault, now_us: u64) -> ActiveFault {
    let some = |us: u64| Some(us).filter(|us| *us != 0);
    let (lasts_us, every_us) = (some(entry.lasts_us), some(entry.every_us));
    ActiveFault { fault, from_us: entry.from_us, lasts_us, every_us, holds: entry.at(now_us).0 }
}
