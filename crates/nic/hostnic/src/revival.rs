//! Devices that have died and come back: after a reset by their driver, or an unplugging.
//!
//! A device that has told its death, or was taken away, tells nothing more by the context that was
//! open: the kernel makes another. So a thread tries to open it, twice a second at first, every
//! five seconds later. One that opens, has a port that is active and makes a protection domain and
//! a CQ is back: its owner hears that its port is active, and opens it with the context that was
//! tried.
//!
//! The thread runs while a device is dead.

use crate::context::Context;
use crate::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use unbroken_verbs::{DeviceEvent, EventSink, PortState};

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

/// The NICs of a process that are dead.
pub(crate) struct Revival {
    names: Vec<String>,
    /// Contexts of NICs that are back, until they are opened.
    back: Mutex<HashMap<usize, Arc<Context>>>,
    waiting: Mutex<Waiting>,
}

impl Revival {
    /// For NICs of these names.
    pub(crate) fn new(names: Vec<String>) -> Arc<Revival> {
        Arc::new(Revival { names, back: Mutex::default(), waiting: Mutex::default() })
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
        let Some(name) = self.names.get(i) else { return false };
        let Ok(context) = Context::open(name) else { return false };
        let active = context.port(PORT).is_ok_and(|port| port.state == PortState::Active);
        if active && context.makes_queues() {
            lock(&self.back).insert(i, Arc::new(context));
            return true;
        }
        false
    }
}
