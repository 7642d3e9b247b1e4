//! The faults of a process's devices, as the table in the runtime folder has them.

use super::life::{Holding, Life};
use super::seam::SeamDevice;
use super::table::{DeviceFaults, SetFault, Stamp};
use super::words::Harm;
use crate::context::Context;
use crate::device::HostDevice;
use crate::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use unbroken_runtime::{now_us, Presence, Runtime};
use unbroken_verbs::{Device, DeviceEvent, Error, EventSink, Result};

/// How often the table and the times of its faults are looked at: four times within the delay that
/// is promised.
const PAUSE: Duration = Duration::from_millis(5);

/// A device of the process.
struct Nic {
    name: String,
    /// Its present life, or its last.
    life: Option<Arc<Life>>,
    /// Who is told that it can be opened, where that was refused.
    waits: Option<Arc<dyn EventSink>>,
    holding: Holding,
}

struct State {
    stamp: Stamp,
    /// The table has been looked at.
    looked: bool,
    table: Vec<SetFault>,
    nics: Vec<Nic>,
    /// The rounds in which faults that strike have struck last, by their ids.
    struck: HashMap<u64, u64>,
}

/// See the module's text.
pub(crate) struct Watch {
    faults: DeviceFaults,
    state: Mutex<State>,
    /// As long as this is there, others know that the process lives.
    _presence: Presence,
}

impl Watch {
    /// Begins to look for faults of those devices. What strikes was before the process strikes it
    /// not.
    pub(crate) fn begin(runtime: &Runtime, names: Vec<String>) -> Result<Arc<Watch>> {
        let faults = DeviceFaults::of(runtime);
        let presence = Presence::join(runtime)
            .map_err(|e| Error::os("cannot take part in the runtime folder", &e))?;
        faults.take_part(presence.name(), &names)?;
        // What processes left that have ended is put away: a folder does not grow.
        faults.takers()?;
        let nic = |name| Nic { name, life: None, waits: None, holding: Holding::default() };
        let state = State {
            stamp: None,
            looked: false,
            table: Vec::new(),
            nics: names.into_iter().map(nic).collect(),
            struck: HashMap::new(),
        };
        let watch = Arc::new(Watch { faults, state: Mutex::new(state), _presence: presence });
        watch.look(now_us());
        let weak = Arc::downgrade(&watch);
        unbroken_process::spawn("unb-faults", move || run(&weak))
            .map_err(|e| Error::os("a thread for faults cannot be started", &e))?;
        Ok(watch)
    }

    /// EIO where NIC `i` is dead by a fault: it cannot be opened.
    pub(crate) fn check_open(&self, i: usize, sink: &Arc<dyn EventSink>) -> Result<()> {
        self.look(now_us());
        let mut state = lock(&self.state);
        match state.nics.get_mut(i).filter(|nic| nic.holding.dead) {
            None => Ok(()),
            Some(nic) => {
                nic.waits = Some(sink.clone());
                Err(Error::device_gone(format!(
                    "{}: dead, by a fault that was set; `unbroken fault clear` ends it",
                    nic.name
                )))
            }
        }
    }

    /// NIC `i` is to be opened over that context.
    pub(crate) fn begin_life(
        i: usize,
        context: &Arc<Context>,
        sink: Arc<dyn EventSink>,
    ) -> Result<Arc<Life>> {
        Life::begin(i, context, sink)
    }

    /// NIC `i` is open: from now on faults befall it.
    pub(crate) fn around(
        &self,
        i: usize,
        life: Arc<Life>,
        device: Arc<HostDevice>,
    ) -> Arc<dyn Device> {
        life.is_of(&device);
        if let Some(nic) = lock(&self.state).nics.get_mut(i) {
            nic.life = Some(life.clone());
        }
        Arc::new(SeamDevice::new(device, life))
    }

    /// Has devices meet what the table says for this time.
    fn look(&self, now_us: u64) {
        let mut state = lock(&self.state);
        self.read(&mut state);
        let State { table, nics, struck, looked, .. } = &mut *state;
        let first = !std::mem::replace(looked, true);
        let (mut todo, mut back) = (Vec::new(), Vec::new());
        for (i, nic) in nics.iter_mut().enumerate() {
            let mut holding = Holding::default();
            let mut strikes: Vec<Harm> = Vec::new();
            for set in table.iter().filter(|set| set.fault.device == nic.name) {
                let Some((round, holds)) = set.at(now_us) else { continue };
                if holds {
                    holding.add(set.fault.harm);
                }
                let again = struck.insert(set.id, round) != Some(round);
                if set.fault.harm.strikes() && again && !first {
                    strikes.push(set.fault.harm);
                }
            }
            let was = std::mem::replace(&mut nic.holding, holding);
            if was.dead && !holding.dead {
                let last = nic.life.as_ref().map(|life| life.sink().clone());
                back.extend(nic.waits.take().or(last).map(|sink| (i, sink)));
            }
            todo.extend(nic.life.clone().map(|life| (life, holding, strikes)));
        }
        struck.retain(|id, _| table.iter().any(|set| set.id == *id));
        // Not under the lock: what hears of it may open a device.
        drop(state);
        for (life, holding, strikes) in todo {
            life.apply(&holding);
            strikes.into_iter().for_each(|harm| life.meet(harm));
            life.end_struck();
        }
        for (i, sink) in back {
            // A device that died can be opened again.
            sink.event(i, DeviceEvent::PortActive(1));
        }
    }

    /// Reads the table if it has changed. One that cannot be trusted is told, and changes nothing.
    fn read(&self, state: &mut State) {
        let stamp = self.faults.stamp();
        if state.looked && stamp == state.stamp {
            return;
        }
        state.stamp = stamp;
        match self.faults.all() {
            Ok(table) => state.table = table,
            Err(e) => unbroken_log::complain(format_args!("faults of devices: {e}")),
        }
    }
}

fn run(watch: &Weak<Watch>) {
    while let Some(watch) = watch.upgrade() {
        watch.look(now_us());
        drop(watch);
        std::thread::sleep(PAUSE);
    }
}
