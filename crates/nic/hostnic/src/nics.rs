//! The devices that were asked for.

use crate::bonds::bond_legs;
use crate::context::{Context, PortView};
use crate::counters::{
    device_count, interface_of, other_devices, CounterFiles, OtherDevice, SYSFS,
};
use crate::device::HostDevice;
use crate::faults::watch::Watch;
use crate::gids::{self, Followed, GidChoice};
use crate::library::Library;
use crate::lock;
use crate::revival::{Identity, Revival};
use crate::windows::{capabilities, Verbs};
use std::collections::HashMap;
use std::ffi::{c_void, CStr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use unbroken_log::{tell, Level, Part};
use unbroken_runtime::Runtime;
use unbroken_types::Gid;
use unbroken_verbs::abi::{ibv_context, ibv_device_attr};
use unbroken_verbs::{
    Capabilities, Device, DeviceAttr, Error, EventSink, PortAttr, PortState, Result,
};

/// NICs of a process.
const MAX_NICS: usize = 64;

/// Which devices of the machine a process uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// All that have what failover needs.
    All,
    /// These, in this order.
    Named(Vec<String>),
}

impl Wanted {
    /// Reads `all`, or names of devices with commas.
    pub fn parse(text: &str) -> Result<Wanted> {
        if text.trim() == "all" {
            return Ok(Wanted::All);
        }
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        for (i, name) in names.iter().enumerate() {
            if name.is_empty() || name.contains(['/', ' ']) {
                return Err(Error::invalid(format!(
                    "'{text}': names of RDMA devices with commas, as `ibv_devices` lists them, or \
                     'all'"
                )));
            }
            if names[..i].contains(name) {
                return Err(Error::invalid(format!("'{text}': {name} is there twice")));
            }
        }
        if names.len() > MAX_NICS {
            return Err(Error::invalid(format!("{} devices: {MAX_NICS} at most", names.len())));
        }
        Ok(Wanted::Named(names))
    }

    /// The devices that are wanted, if none of them is of InfiniBand or RoCE: programs must have
    /// those as they are. (The connections of iWARP are made by rdma_cm with QPs of the kernel's
    /// own; EFA has no RC.) A mixture is left to [`HostNics::new`].
    pub fn only_others(&self) -> Option<Vec<OtherDevice>> {
        only_others(self, other_devices(), device_count())
    }
}

fn only_others(
    wanted: &Wanted,
    others: Vec<OtherDevice>,
    count: usize,
) -> Option<Vec<OtherDevice>> {
    let is_other = |name: &String| others.iter().any(|other| other.name == *name);
    let only = match wanted {
        Wanted::All => others.len() == count,
        Wanted::Named(names) => names.iter().all(is_other),
    };
    Some(others).filter(|others| only && !others.is_empty())
}

/// The most LIDs of a port, as a power of 2: the field has three bits.
const MAX_LMC: u8 = 7;

/// What is known of a device, open or not.
struct Nic {
    name: String,
    identity: Identity,
    attr: DeviceAttr,
    /// What it is called by, from the first to the last.
    gid: Gid,
    lmc: u8,
    /// By which GID peers reach it now.
    address: Arc<Mutex<Gid>>,
    /// The context that it was looked at by, until it is opened.
    first: Mutex<Option<Arc<Context>>>,
    open: Mutex<Weak<HostDevice>>,
    /// The context that is in use, for questions. It must not outlive the device: the kernel does
    /// not take a device away before its last context is closed.
    last: Mutex<Weak<Context>>,
}

/// Devices of the machine.
pub struct HostNics {
    nics: Vec<Nic>,
    revival: Arc<Revival>,
    /// Where they take faults.
    faults: OnceLock<Arc<Watch>>,
    /// By which network peers reach them is settled.
    settled: AtomicBool,
}

impl HostNics {
    /// Looks at the devices that are wanted. ENODEV where there is none, or a name is none, or none
    /// has a GID that is allowed.
    pub fn new(wanted: &Wanted, choice: Option<&GidChoice>) -> Result<HostNics> {
        let named = |name: &str| match wanted {
            Wanted::All => true,
            Wanted::Named(names) => names.iter().any(|other| other == name),
        };
        let chosen = choose(wanted, Context::open_each(named)?, |c| c.is_channel_adapter)?;
        if let Some(c) = chosen.iter().find(|c| !c.is_channel_adapter) {
            return Err(Error::unsupported(format!(
                "{}: neither InfiniBand nor RoCE, which is not protected, and not beside devices \
                 that are: name only one kind",
                c.name
            )));
        }
        let looked_at = chosen.into_iter().take(MAX_NICS).map(|c| Nic::of(Arc::new(c), choice));
        let nics: Vec<Nic> = match wanted {
            Wanted::All => usable(looked_at)?,
            Wanted::Named(_) => looked_at.collect::<Result<_>>()?,
        };
        let revival = Revival::new(nics.iter().map(|nic| nic.identity.clone()).collect());
        let settled = AtomicBool::new(choice.is_some());
        Ok(HostNics { nics, revival, faults: OnceLock::new(), settled })
    }

    /// The devices that libibverbs lists, by name, and whether each can be opened. An error where
    /// there is no libibverbs that can be used.
    pub fn openable() -> Result<Vec<(String, Result<()>)>> {
        let each = Context::open_each(|_| true)?;
        Ok(each.into_iter().map(|(name, opened)| (name, opened.map(drop))).collect())
    }

    /// Whether there is a libibverbs that can be used; the error says what is missing.
    pub fn library() -> Result<()> {
        Library::get().map(drop)
    }

    /// The function of that name in the installed libibverbs; none where it has none.
    pub fn library_function(name: &CStr) -> Option<*mut c_void> {
        Library::get().ok()?.address(name)
    }

    /// Has `ask` put a question to the device itself, through a context that is open meanwhile.
    /// What it calls of libibverbs it must call by [`crate::inside::enter`]. An error where the
    /// device is gone.
    pub fn with_context<T>(&self, i: usize, ask: impl FnOnce(*mut ibv_context) -> T) -> Result<T> {
        let context = self.context(i)?;
        Ok(ask(context.raw()))
    }

    /// A context of NIC `i` for questions: that in use, or another.
    fn context(&self, i: usize) -> Result<Arc<Context>> {
        let in_use = lock(&self.nics[i].last).upgrade();
        in_use.map_or_else(|| self.revival.open(i).map(Arc::new), Ok)
    }

    /// From now on, and before the first is opened, they take the faults that are set in that
    /// runtime folder.
    pub fn take_faults(&self, runtime: &Runtime) -> Result<()> {
        if self.faults.get().is_none() {
            let names = self.nics.iter().map(|nic| nic.name.clone()).collect();
            // One of another thread does as well.
            let _ = self.faults.set(Watch::begin(runtime, names)?);
        }
        Ok(())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.nics.len()
    }

    /// The name that the kernel has for NIC `i`.
    pub fn name(&self, i: usize) -> &str {
        &self.nics[i].name
    }

    /// The GID that NIC `i` is called by. It stays.
    pub fn gid(&self, i: usize) -> Gid {
        self.nics[i].gid
    }

    /// InfiniBand: port 1 of NIC `i` had 2 to this power of LIDs when the NICs were looked at.
    pub fn lmc(&self, i: usize) -> u8 {
        self.nics[i].lmc.min(MAX_LMC)
    }

    /// The GID by which peers reach port 1 of NIC `i` now.
    pub fn address(&self, i: usize) -> Gid {
        *lock(&self.nics[i].address)
    }

    /// The program connects a queue pair by that GID of NIC `i`. The first that it does so by says
    /// in which network peers are: all NICs are reached there from now on. Gives whether an address
    /// is another now.
    pub fn follow(&self, i: usize, index: u8) -> bool {
        if self.settled.load(Ordering::Acquire) {
            return false;
        }
        let gids = |i| self.port(i, 1, false).map(|port| port.gids).unwrap_or_default();
        let Some(followed) = Followed::of(self.name(i), &gids(i), index) else { return false };
        if self.settled.swap(true, Ordering::AcqRel) || followed.gid == self.address(i) {
            return false;
        }
        let mut changed = false;
        for (j, nic) in self.nics.iter().enumerate() {
            let closest = match j == i {
                true => Some(followed.gid),
                false => followed.closest(&nic.name, &gids(j)),
            };
            let Some(gid) = closest.filter(|gid| *gid != self.address(j)) else { continue };
            *lock(&nic.address) = gid;
            changed = true;
            let open = lock(&nic.open).upgrade();
            open.iter().for_each(|device| device.address_changed());
        }
        changed
    }

    /// The GID at an index of its port 1's table now, if there is one.
    pub fn gid_at(&self, i: usize, index: u8) -> Option<Gid> {
        self.context(i).ok()?.gid(1, index)
    }

    /// Node GUID, host order.
    pub fn node_guid(&self, i: usize) -> u64 {
        self.nics[i].attr.node_guid
    }

    /// Limits and identity.
    pub fn attr(&self, i: usize) -> DeviceAttr {
        self.nics[i].attr.clone()
    }

    /// A port of NIC `i`, counted from 1. `usable`: it is told as active, whatever it is.
    pub fn port(&self, i: usize, port: u8, usable: bool) -> Result<PortAttr> {
        let mut attr = self.context(i)?.port(port)?;
        if usable {
            attr.state = PortState::Active;
        }
        Ok(attr)
    }

    /// A port word for word, as the device tells it now.
    pub fn port_view(&self, i: usize, port: u8) -> Result<PortView> {
        self.context(i)?.port_view(port)
    }

    /// The device's attributes word for word.
    pub fn device_attr(&self, i: usize) -> Result<ibv_device_attr> {
        self.context(i)?.device_attr()
    }

    /// What NIC `i` can do for who opens it bare.
    pub fn bare_capabilities(&self, i: usize) -> Capabilities {
        capabilities(self.context(i).is_ok_and(|context| Verbs::of(&context).is_some()))
    }

    /// Opens NIC `i`; EBUSY while it is open and alive. `bare`: with what failover hides.
    pub fn open(&self, i: usize, sink: Arc<dyn EventSink>, bare: bool) -> Result<Arc<dyn Device>> {
        let nic = &self.nics[i];
        let faults = self.faults.get();
        faults.map_or(Ok(()), |faults| faults.check_open(i, &sink))?;
        let mut open = lock(&nic.open);
        if open.upgrade().is_some_and(|device| device.alive()) {
            return Err(Error::new(libc::EBUSY, format!("{} is open", nic.name)));
        }
        let first = self.revival.take(i).or_else(|| lock(&nic.first).take());
        let context = match first {
            Some(context) => context,
            None => Arc::new(self.revival.open(i)?),
        };
        *lock(&nic.last) = Arc::downgrade(&context);
        let counters = CounterFiles::of(&nic.name);
        let life = faults.map(|_| Watch::begin_life(i, &context, sink.clone())).transpose()?;
        let more = (counters, self.revival.clone());
        let device = Arc::new(HostDevice::open(i, context, nic.address.clone(), more, sink, bare)?);
        *open = Arc::downgrade(&device);
        Ok(match (faults, life) {
            (Some(faults), Some(life)) => faults.around(i, life, device),
            _ => device,
        })
    }

    /// The legs that are down of the bond behind NIC `i`, if its interface is a bond.
    pub fn legs_down(&self, i: usize) -> Vec<String> {
        let legs = self.interface(i).and_then(|name| bond_legs(Path::new("/sys"), &name));
        let down = legs.unwrap_or_default().into_iter().filter(|leg| !leg.is_up);
        down.map(|leg| leg.name).collect()
    }

    /// The network interface behind NIC `i`, where the kernel names one.
    pub fn interface(&self, i: usize) -> Option<String> {
        interface_of(&self.nics[i].name)
    }

    /// Where the kernel shows NIC `i`.
    pub fn sysfs(&self, i: usize) -> PathBuf {
        Path::new(SYSFS).join(self.name(i))
    }
}

impl Nic {
    fn of(context: Arc<Context>, choice: Option<&GidChoice>) -> Result<Nic> {
        let port = context.port(1)?;
        let gid = gids::first(&context.name, &port.gids, choice)?;
        Ok(Nic {
            lmc: port.lmc,
            name: context.name.clone(),
            identity: Identity::of(&context),
            attr: context.attr()?,
            gid,
            address: Arc::new(Mutex::new(gid)),
            first: Mutex::new(Some(context.clone())),
            open: Mutex::default(),
            last: Mutex::new(Arc::downgrade(&context)),
        })
    }
}

/// Those that can be used: one that has no address, say, is no reason to do without the others.
fn usable(each: impl Iterator<Item = Result<Nic>>) -> Result<Vec<Nic>> {
    let (mut nics, mut refused) = (Vec::new(), None);
    for one in each {
        match one {
            Ok(nic) => nics.push(nic),
            Err(e) => {
                tell(Part::Nic, Level::Warn, format_args!("{e}: it is not used"));
                refused = Some(e);
            }
        }
    }
    match (nics.is_empty(), refused) {
        (false, _) => Ok(nics),
        (true, Some(e)) => Err(e),
        (true, None) => Err(Error::new(
            libc::ENODEV,
            "this machine has no RDMA device that can be protected (`ibv_devices` lists those \
             that there are)",
        )),
    }
}

/// Of what was opened, what is wanted, in its order. A device that was named and cannot be opened
/// is an error with the reason; of all devices those that cannot be are left out, unless that is
/// all.
fn choose<C>(
    wanted: &Wanted,
    each: Vec<(String, Result<C>)>,
    usable: impl Fn(&C) -> bool,
) -> Result<Vec<C>> {
    match wanted {
        Wanted::All => {
            let mut refused = None;
            let mut opened = Vec::new();
            for (_, one) in each {
                match one {
                    Ok(context) if usable(&context) => opened.push(context),
                    Ok(_) => {}
                    Err(e) => refused = Some(e),
                }
            }
            match refused {
                Some(e) if opened.is_empty() => Err(e),
                _ => Ok(opened),
            }
        }
        Wanted::Named(names) => {
            let mut each: HashMap<String, Result<C>> = each.into_iter().collect();
            names.iter().map(|n| each.remove(n).unwrap_or_else(|| Err(no_device(n)))).collect()
        }
    }
}

fn no_device(name: &str) -> Error {
    Error::new(
        libc::ENODEV,
        format!(
            "this machine has no RDMA device {name} (`ibv_devices` lists those that there are)"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        assert_eq!(Wanted::parse(" all").unwrap(), Wanted::All);
        let named = Wanted::parse("mlx5_1, mlx5_0").unwrap();
        assert_eq!(named, Wanted::Named(vec!["mlx5_1".into(), "mlx5_0".into()]));
        for (text, words) in
            [("", "or 'all'"), ("a,", "or 'all'"), ("/dev/x", "or 'all'"), ("a,a", "twice")]
        {
            assert!(Wanted::parse(text).unwrap_err().to_string().contains(words), "{text}");
        }
    }

    #[test]
    fn devices_of_other_kinds_alone_are_passed_through() {
        let only = |text, others: &[&str], count| {
            let other = |name: &&str| OtherDevice { name: (*name).to_owned(), kind: "iWARP" };
            let others = others.iter().map(other).collect();
            only_others(&Wanted::parse(text).unwrap(), others, count).is_some()
        };
        assert!(only("all", &["siw0", "siw1"], 2) && only("siw0", &["siw0", "siw1"], 3));
        assert!(!only("all", &["siw0"], 2) && !only("siw0,rxe0", &["siw0"], 2));
        assert!(!only("all", &[], 0) && !only("rxe0", &[], 1));
    }

    #[test]
    fn a_named_device_that_does_not_open_says_why() {
        let refused = || Error::new(libc::EACCES, "b: ibv_open_device: Permission denied");
        let each = || vec![("a".to_owned(), Ok('a')), ("b".to_owned(), Err(refused()))];
        let named = |text| choose(&Wanted::parse(text).unwrap(), each(), |_| true);
        assert!(named("a,b").unwrap_err().to_string().contains("Permission denied"));
        assert!(named("a,c").unwrap_err().to_string().contains("no RDMA device c"));
        assert_eq!(named("all").unwrap(), ['a'], "those that open");
        assert!(choose(&Wanted::All, each(), |_| false).is_err());
    }
}
