//! The NICs of a process: the one place where kinds of NICs are named and made.
//!
//! What is below (`shift`, `resumable`) knows the traits of `verbs` alone. What is above (the C
//! symbols, the Rust API) asks here for a [`System`]: [`system`] for the process's own, the other
//! functions for one that is named.
#![forbid(unsafe_code)]

mod host;
mod logical;
mod network;
mod reach;
mod soft;

pub use network::{Network, OwnPort, Place};
pub use reach::{reach, reach_each_other, Reach};
pub use unbroken_hostnic::{
    bond_legs, choose_gid, inside, interface_of_link, other_devices, BondLeg, DeviceFault,
    DeviceFaultForm, DeviceFaults, GidChoice, Harm, HostNics, OtherDevice, PortView, SetFault,
    Taker, Wanted, When, DEVICE_FAULT_FORMS, MAX_GIDS,
};
pub use unbroken_softnic::{interface_index, program_action, NicInfo, PortInfo};

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once, OnceLock};
use unbroken_environment as environment;
use unbroken_process::{undisturbed, PerProcess};
use unbroken_runtime::Runtime;
use unbroken_shift::api::System;
use unbroken_shift::failover_is_on;
use unbroken_softnic::{Config, NicSource};
use unbroken_verbs::{Error, Result};

static SYSTEM: PerProcess<OnceLock<Result<System>>> = PerProcess::new();
static MACHINE: PerProcess<OnceLock<Result<Option<Arc<HostNics>>>>> = PerProcess::new();

/// The process's system, made at the first call from what the environment names; a forked child has
/// one of its own. A wrong environment (unknown host, damaged fabric file) is an error each time.
pub fn system() -> Result<&'static System> {
    SYSTEM.get().get_or_init(|| undisturbed(from_env)).as_ref().map_err(Clone::clone)
}

/// The process ends by itself: peers shall not find it any more, and the log has all. Takes a
/// fraction of a second at most.
pub fn at_exit() {
    if let Some(Ok(system)) = SYSTEM.get().get() {
        system.finish();
    }
}

/// The devices of the machine, where the environment names some: then the NICs are those.
pub fn machine() -> Result<Option<&'static Arc<HostNics>>> {
    let look = || {
        let Some(text) = environment::text(environment::DEVICES) else { return Ok(None) };
        let wanted = Wanted::parse(&text)
            .map_err(|e| Error::invalid(format!("{}={e}", environment::DEVICES)))?;
        let nics = HostNics::new(&wanted, gid_choice()?.as_ref())?;
        match other_devices() {
            others if wanted == Wanted::All && !others.is_empty() => say(&format!(
                "{}: not protected, nor shown beside devices that are",
                in_words(&others)
            )),
            _ => {}
        }
        Ok(Some(Arc::new(nics)))
    };
    // Not `undisturbed`: it is first asked for while the process's system is made, which is.
    MACHINE.get().get_or_init(look).as_ref().map(Option::as_ref).map_err(Clone::clone)
}

/// Whether programs are to have libibverbs itself: devices of the machine with failover off, or of
/// a kind that is not protected.
pub fn is_bypassed() -> bool {
    static BYPASSED: OnceLock<bool> = OnceLock::new();
    *BYPASSED.get_or_init(|| names_devices() && (!failover_is_on() || names_only_others()))
}

fn names_only_others() -> bool {
    let wanted = environment::text(environment::DEVICES).and_then(|text| Wanted::parse(&text).ok());
    let Some(devices) = wanted.and_then(|wanted| wanted.only_others()) else { return false };
    say(&format!("{}: not protected; the program has the devices as they are", in_words(&devices)));
    true
}

/// Devices with what they are.
fn in_words(devices: &[OtherDevice]) -> String {
    let words: Vec<String> =
        devices.iter().map(|device| format!("{} ({})", device.name, device.kind)).collect();
    words.join(", ")
}

/// What the user has said of GIDs.
fn gid_choice() -> Result<Option<GidChoice>> {
    let parse = |text: String| {
        let choice = GidChoice::parse(&text);
        choice.map_err(|e| Error::invalid(format!("{}={e}", environment::GID)))
    };
    environment::text(environment::GID).map(parse).transpose()
}

fn say(text: &str) {
    unbroken_log::complain(format_args!("{text}"));
}

/// Whether the environment named devices of the machine when it was looked at first.
pub fn names_devices() -> bool {
    static NAMED: OnceLock<bool> = OnceLock::new();
    *NAMED.get_or_init(|| environment::text(environment::DEVICES).is_some())
}

/// The NICs that the environment names. One process may have several systems; each QP is one
/// system's.
pub fn from_env() -> Result<System> {
    tell_wrong_variables();
    if let Some(nics) = machine()? {
        let runtime = Runtime::open().map_err(|e| Error::invalid(e.to_string()))?;
        return System::over(host::over(nics.clone(), &runtime, !failover_is_on())?);
    }
    System::over(soft::over(Config::from_env()?)?)
}

/// The NICs that the environment names, with nothing supplied that they lack: as beside NICs of
/// another kind.
pub fn bare_from_env() -> Result<System> {
    tell_wrong_variables();
    if let Some(nics) = machine()? {
        let runtime = Runtime::open().map_err(|e| Error::invalid(e.to_string()))?;
        return System::over(host::over(nics.clone(), &runtime, true)?);
    }
    System::over(soft::with(Config::from_env()?, false)?)
}

/// The NICs of a host in the emulated network of a runtime folder.
pub fn of_host(runtime: &Path, host: &str) -> Result<System> {
    tell_wrong_variables();
    System::over(soft::over(Config::host(runtime_at(runtime)?, host))?)
}

/// The NICs of a host in the emulated network of a runtime folder, with nothing supplied that they
/// lack.
pub fn bare(runtime: &Path, host: &str) -> Result<System> {
    tell_wrong_variables();
    System::over(soft::with(Config::host(runtime_at(runtime)?, host), false)?)
}

/// NICs at addresses of this machine's interfaces.
pub fn at(runtime: &Path, addresses: &[IpAddr]) -> Result<System> {
    tell_wrong_variables();
    System::over(soft::over(Config::addresses(runtime_at(runtime)?, addresses))?)
}

/// NICs at addresses of this machine's interfaces, with nothing supplied that they lack.
pub fn bare_at(runtime: &Path, addresses: &[IpAddr]) -> Result<System> {
    tell_wrong_variables();
    System::over(soft::with(Config::addresses(runtime_at(runtime)?, addresses), false)?)
}

/// A variable that does nothing is told, once for each process: the program goes on without it.
fn tell_wrong_variables() {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        unbroken_log::prepare();
        for what in unbroken_environment::wrong() {
            unbroken_log::complain(format_args!("{what}"));
        }
    });
}

fn runtime_at(path: &Path) -> Result<Runtime> {
    Runtime::at(path).map_err(|e| Error::invalid(e.to_string()))
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
    tell_wrong_variables();
    if names_devices() {
        return Err(Error::unsupported("devices of the machine are in its own sysfs"));
    }
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

#[cfg(test)]
mod tests {
    use super::{Config, Runtime};
    use crate::soft::over;
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
    use std::time::{Duration, Instant};
    use unbroken_fabric::{Fabric, NicKind, Shape};
    use unbroken_resumable::ResumableDevice;
    use unbroken_softnic::DeviceKind;
    use unbroken_verbs::{DeviceEvent, EventSink};

    fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
        m.lock().unwrap_or_else(PoisonError::into_inner)
    }

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
        assert!(nics.capabilities(0) == ResumableDevice::CAPABILITIES);
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
