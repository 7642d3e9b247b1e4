//! Some NICs of a host, what is registered on them, and the workers that serve the queue pairs.

use crate::clock::now_us;
use crate::keys::Protection;
use crate::memory::{Memory, Registered};
use crate::qp::Core;
use crate::worker::{ChannelWork, Kick, Polled, Running, Workers};
use crate::{lock, CpuWorkers, Error, Result};
use std::cell::UnsafeCell;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use unbroken::{Capabilities, Events, Host, Key, Nic, Pd};

/// How to make a context.
pub struct ContextOptions {
    /// The host's NICs, counted from 0. Channel *c* is on the *c* mod *n*-th of them.
    pub nics: Vec<usize>,
    /// Channels, each with a worker. Queue pairs use as many of them as their attributes say.
    pub channels: u8,
    /// The most queue pairs.
    pub max_qps: usize,
    /// Where the work is done.
    pub workers: Arc<dyn Workers>,
    /// What the NICs are taken to have, of what they have: for tests of what is done without.
    #[doc(hidden)]
    pub mask: Capabilities,
}

impl Default for ContextOptions {
    /// The first NIC, one channel, 64 queue pairs, a thread for each channel and for spare cores.
    fn default() -> ContextOptions {
        let mask = Capabilities {
            holds: true,
            shared_objects: true,
            indirect_keys: true,
            windows: true,
            frees_windows: false,
            slow_control: false,
        };
        ContextOptions {
            nics: vec![0],
            channels: 1,
            max_qps: 64,
            workers: Arc::new(CpuWorkers::default()),
            mask,
        }
    }
}

/// A NIC of a context.
pub(crate) struct Rail {
    pub(crate) nic: Nic,
    pub(crate) pd: Pd,
    /// What root keys have in place of a buffer, where there are root keys.
    pub(crate) null: Option<Key>,
}

/// What queue pairs, memory and workers of a context share.
pub(crate) struct Shared {
    pub(crate) rails: Vec<Rail>,
    pub(crate) works: Vec<Arc<ChannelState>>,
    pub(crate) protection: Protection,
    /// Windows are freed, since not all of the queue pairs can invalidate their keys.
    pub(crate) frees_windows: bool,
    pub(crate) workers: Arc<dyn Workers>,
    max_qps: usize,
}

/// Some NICs of a host, with workers. Queue pairs and memory keep what they need of it; the workers
/// end with it.
pub struct Context {
    pub(crate) shared: Arc<Shared>,
    /// After the queue pairs in no particular order: a worker holds those that it serves at the
    /// moment.
    _running: Vec<Running>,
}

/// The work of a channel: of all queue pairs of the context.
pub(crate) struct ChannelState {
    number: u8,
    pub(crate) events: Events,
    pub(crate) kick: Kick,
    pub(crate) qps: Mutex<Vec<Weak<Core>>>,
}

impl Context {
    /// Opens NICs of a host and starts the workers.
    ///
    /// # Errors
    /// A NIC that there is not; NICs that have not what takes buffers from under late packets
    /// ([`Protection`]).
    pub fn open(host: &Host, options: &ContextOptions) -> Result<Context> {
        let o = options;
        if o.nics.is_empty()
            || !(1..=unbroken_sdr_protocol::attr::MAX_CHANNELS).contains(&o.channels)
            || o.max_qps == 0
        {
            let most = unbroken_sdr_protocol::attr::MAX_CHANNELS;
            return Err(Error::wrong(format!(
                "a context needs a NIC, 1 to {most} channels, and a queue pair at least"
            )));
        }
        let nics = o
            .nics
            .iter()
            .map(|nic| Ok((*nic, host.open(*nic)?)))
            .collect::<Result<Vec<(usize, Nic)>>>()?;
        let can = |(number, nic): &(usize, Nic)| {
            let has = nic.capabilities();
            let [indirect_keys, windows] =
                [has.indirect_keys && o.mask.indirect_keys, has.windows && o.mask.windows];
            (*number, Capabilities { indirect_keys, windows, ..has })
        };
        let frees_windows = nics.iter().any(|(_, nic)| nic.capabilities().frees_windows);
        let protection = Protection::of(&nics.iter().map(can).collect::<Vec<_>>())?;
        let rails = nics
            .into_iter()
            .map(|(_, nic)| rail(nic, protection))
            .collect::<Result<Vec<Rail>>>()?;
        let work = |number: u8| {
            let events = rails[usize::from(number) % rails.len()].nic.create_events()?;
            Ok(Arc::new(ChannelState { number, events, kick: Kick::new()?, qps: Mutex::default() }))
        };
        let works = (0..o.channels).map(work).collect::<Result<Vec<_>>>()?;
        let running = works
            .iter()
            .map(|work| o.workers.start(work.number, work.clone()))
            .collect::<Result<Vec<_>>>()?;
        let (workers, max_qps) = (o.workers.clone(), o.max_qps);
        let shared = Shared { rails, works, protection, frees_windows, workers, max_qps };
        Ok(Context { shared: Arc::new(shared), _running: running })
    }

    /// How many channels it has.
    pub fn channels(&self) -> u8 {
        self.shared.works.len() as u8
    }

    /// How late packets are kept from buffers on its NICs.
    pub fn protection(&self) -> Protection {
        self.shared.protection
    }

    /// Registers fresh memory.
    ///
    /// # Errors
    /// Where the NICs do not take it.
    pub fn register(&self, bytes: usize) -> Result<Memory> {
        self.shared.register(bytes)
    }

    /// Registers memory of the caller's.
    ///
    /// # Safety
    /// The memory stays the caller's and stays mapped until the key is gone: until this and every
    /// message that uses it has been dropped or is complete. The network reads and writes it
    /// meanwhile.
    ///
    /// # Errors
    /// Where the NICs do not take it.
    pub unsafe fn register_at(&self, addr: u64, bytes: u64) -> Result<Memory> {
        self.shared.register_at(addr, bytes)
    }
}

fn rail(nic: Nic, protection: Protection) -> Result<Rail> {
    let pd = nic.alloc_pd()?;
    let null = match protection {
        Protection::IndirectKeys => Some(pd.null_key()?),
        Protection::Windows => None,
    };
    Ok(Rail { nic, pd, null })
}

impl Shared {
    pub(crate) fn register(&self, bytes: usize) -> Result<Memory> {
        let cells: Box<[UnsafeCell<u8>]> = (0..bytes).map(|_| UnsafeCell::new(0)).collect();
        let registered = self.keys(cells.as_ptr() as u64, bytes as u64)?;
        Ok(Memory(Arc::new(registered.holding(cells))))
    }

    pub(crate) fn register_at(&self, addr: u64, bytes: u64) -> Result<Memory> {
        Ok(Memory(Arc::new(self.keys(addr, bytes)?)))
    }

    fn keys(&self, addr: u64, bytes: u64) -> Result<Registered> {
        let access = self.protection.access();
        let key = |rail: &Rail| match rail.pd.register_at(addr, bytes, access) {
            // Its channels are dead, too; the others carry on.
            Err(e) if e.errno() == libc::EIO && self.rails.len() > 1 => Ok(None),
            key => key.map(Some),
        };
        let keys: Vec<Option<Key>> = self.rails.iter().map(key).collect::<unbroken::Result<_>>()?;
        match keys.iter().any(Option::is_some) {
            true => Ok(Registered::new(keys, addr, bytes)),
            false => Err(Error::wrong("every NIC of the context is dead")),
        }
    }

    /// Has the workers of its channels serve a queue pair.
    pub(crate) fn adopt(&self, qp: &Arc<Core>, channels: u8) -> Result<()> {
        for work in &self.works[..usize::from(channels)] {
            let mut qps = lock(&work.qps);
            qps.retain(|qp| qp.strong_count() > 0);
            if qps.len() >= self.max_qps {
                return Err(Error::retry(format!(
                    "the context was made for {} queue pairs",
                    self.max_qps
                )));
            }
            qps.push(Arc::downgrade(qp));
        }
        Ok(())
    }

    /// The worker of a channel has something to do.
    pub(crate) fn kick(&self, channel: usize) {
        self.works[channel].kick.kick();
    }
}

impl ChannelState {
    fn each(&self, mut f: impl FnMut(&Core)) {
        // Not under the lock: a queue pair may end with the last of these.
        let qps: Vec<Arc<Core>> = lock(&self.qps).iter().filter_map(Weak::upgrade).collect();
        qps.iter().for_each(|qp| f(qp));
    }
}

impl ChannelWork for ChannelState {
    fn poll(&self) -> Polled {
        let (mut busy, mut next_us, now_us) = (false, None::<u64>, now_us());
        self.each(|qp| {
            let (did, at_us) = qp.turn(self.number, now_us);
            busy |= did;
            next_us = [next_us, at_us].into_iter().flatten().min();
        });
        let next = next_us.map(|at_us| Duration::from_micros(at_us.saturating_sub(now_us)));
        Polled { busy, next }
    }

    fn arm(&self) {
        self.each(|qp| qp.arm(self.number));
    }

    fn events(&self) -> Option<RawFd> {
        Some(self.events.as_raw_fd())
    }

    fn drain(&self) {
        self.events.drain();
    }

    fn kick(&self) -> &Kick {
        &self.kick
    }
}
