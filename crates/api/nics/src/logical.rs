//! What NICs with plain verbs lack and protection needs: supplied by `resumable`, in the same way
//! for every kind of NIC.

use std::sync::{Arc, Mutex, PoisonError};
use unbroken_resumable::{EventInterceptor, Host, LogicalMemory, ResumableDevice};
use unbroken_runtime::now_us;
use unbroken_verbs::{Device, EventSink, Result};

/// What `resumable` is given by this process.
const HOST: Host = Host { spawn: spawn_boxed, now_us };

fn spawn_boxed(name: &str, body: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
    unbroken_process::spawn(name, body).map(drop)
}

/// The process's protection domains and regions over such NICs, and where their events go.
pub struct Logical {
    memory: Arc<LogicalMemory>,
    /// Where the events of each NIC go first, since it was opened last. They outlive its device: a
    /// NIC that died is said to be back.
    taps: Mutex<Vec<Option<Arc<EventInterceptor>>>>,
}

impl Logical {
    /// Over so many NICs, none of which is open yet.
    pub fn new(nics: usize) -> Logical {
        Logical {
            memory: LogicalMemory::new(nics, spawn_boxed),
            taps: Mutex::new(vec![None; nics]),
        }
    }

    /// Protection domains and regions.
    pub fn memory(&self) -> &Arc<LogicalMemory> {
        &self.memory
    }

    /// Opens NIC `i` by `open`, which is given where the device's events are to go.
    pub fn open(
        &self,
        i: usize,
        sink: Arc<dyn EventSink>,
        open: impl FnOnce(Arc<dyn EventSink>) -> Result<Arc<dyn Device>>,
    ) -> Result<Arc<dyn Device>> {
        let interceptor = EventInterceptor::new(sink);
        let device = open(interceptor.clone());
        // One that is open already keeps its own.
        let other = matches!(&device, Err(e) if e.errno() == libc::EBUSY);
        let mut taps = self.taps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = taps.get_mut(i).filter(|_| !other) {
            *slot = Some(interceptor.clone());
        }
        drop(taps);
        Ok(Arc::new(ResumableDevice::new(i, device?, &interceptor, &self.memory, HOST)?))
    }
}
