//! Devices that have died and come back: after a reset by their driver, or an unplugging.
//!
//! A device that has told its death, or was taken away, tells nothing more by the context that was
//! open: the kernel makes another. So a thread tries to open it, twice a second at first, every
//! five seconds later. One that opens, has a port that is active and makes a protection domain and
//! a CQ is back: its owner hears that its port is active, and opens it with the context that was
//! tried.
//!
//! A name says little: another device may have it now ([`Identity`]). That one is not taken.
//!
//! The thread runs while a device is dead.

use crate::context::Context;
use crate::counters::SYSFS;
use crate::lock;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use unbroken_log::{tell, Level, Part};
use unbroken_verbs::{DeviceEvent, Error, EventSink, PortState, Result};

const PAUSE: Duration = Duration::from_millis(500);
const LONG_PAUSE: Duration = Duration::from_secs(5);
/// Tries before the pauses get long: a device that is reset is back by then.
const SHORT_PAUSES: u32 = 120;
const PORT: u8 = 1;

#[derive(Default)]
struct Waiting {
    /// Dead NICs, and who is to hear that they are back.
    dead: Vec<(usize, Arc<dyn EventSink>)>,
    runs: bool,
    tries: u32,
}

/// By what a device is known again.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    name: String,
    node_guid: u64,
    /// Where it is in the machine; none where the kernel does not say (rxe).
    place: Option<PathBuf>,
}

impl Identity {
    /// That of the device behind a context.
    pub(crate) fn of(context: &Context) -> Identity {
        let place = Path::new(SYSFS).join(&context.name).join("device");
        Identity {
            name: context.name.clone(),
            node_guid: context.node_guid,
            place: std::fs::canonicalize(place).ok(),
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node GUID {:016x}", self.node_guid)?;
        let place = self.place.as_deref().and_then(Path::file_name);
        place.map_or(Ok(()), |place| write!(f, " at {}", place.to_string_lossy()))
    }
}

/// The NICs of a process that are dead.
pub(crate) struct Revival {
    known: Vec<Identity>,
    /// NICs whose name another device has, of which it was told.
    told: Mutex<HashSet<usize>>,
    /// Contexts of NICs that are back, until they are opened.
    back: Mutex<HashMap<usize, Arc<Context>>>,
    waiting: Mutex<Waiting>,
}

impl Revival {
    /// For these NICs.
    pub(crate) fn new(known: Vec<Identity>) -> Arc<Revival> {
        let (told, back, waiting) = Default::default();
        Arc::new(Revival { known, told, back, waiting })
    }

    /// A new context of NIC `i`. ENODEV: another device has its name.
    pub(crate) fn open(&self, i: usize) -> Result<Context> {
        let known = self.known.get(i).ok_or_else(|| Error::invalid(format!("no NIC {i}")))?;
        let context = Context::open(&known.name)?;
        let found = Identity::of(&context);
        if found == *known {
            return Ok(context);
        }
        let e = Error::new(
            libc::ENODEV,
            format!("{} is another device now: it has {found}, and had {known}", known.name),
        );
        if lock(&self.told).insert(i) {
            tell(Part::Nic, Level::Warn, format_args!("{e}; it is not used"));
        }
        Err(e)
    }

    /// The context of a NIC that is back.
    pub(crate) fn take(&self, i: usize) -> Option<Arc<Context>> {
        lock(&self.back).remove(&i)
    }

    /// NIC `i` has died.
    pub(crate) fn wait_for(self: &Arc<Self>, i: usize, sink: Arc<dyn EventSink>) {
        lock(&self.back).remove(&i); // which was of an earlier life
        let mut waiting = lock(&self.waiting);
        waiting.dead.retain(|(other, _)| *other != i);
        waiting.dead.push((i, sink));
        waiting.tries = 0;
        if !waiting.runs {
            let own = self.clone();
            // Without it the NIC stays away, and the others carry everything.
            waiting.runs = unbroken_process::spawn("unb-revival", move || own.run()).is_ok();
        }
    }

    fn run(&self) {
        loop {
            let pause = {
                let mut waiting = lock(&self.waiting);
                if waiting.dead.is_empty() {
                    waiting.runs = false;
                    return;
                }
                waiting.tries += 1;
                if waiting.tries > SHORT_PAUSES {
                    LONG_PAUSE
                } else {
                    PAUSE
                }
            };
            std::thread::sleep(pause);
            let dead: Vec<usize> = lock(&self.waiting).dead.iter().map(|(i, _)| *i).collect();
            for i in dead.into_iter().filter(|i| self.try_open(*i)) {
                let mut waiting = lock(&self.waiting);
                let at = waiting.dead.iter().position(|(other, _)| *other == i);
                let back = at.map(|at| waiting.dead.swap_remove(at));
                drop(waiting);
                back.into_iter().for_each(|(i, sink)| sink.event(i, DeviceEvent::PortActive(PORT)));
            }
        }
    }

    /// Keeps the context of a NIC that is back.
    fn try_open(&self, i: usize) -> bool {
        let Ok(context) = self.open(i) else { return false };
        let active = context.port(PORT).is_ok_and(|port| port.state == PortState::Active);
        if active && context.makes_queues() {
            lock(&self.back).insert(i, Arc::new(context));
            return true;
        }
        false
    }
}
