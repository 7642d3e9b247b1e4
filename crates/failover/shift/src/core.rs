//! What all logical QPs of a process share: its settings, and the tables of its NICs, QPs,
//! contexts and peers. Each table is a file of its own, below the QP, and knows nothing of the
//! others but what it is handed; here they are put together.
//!
//! Lock order: the turn of receiving ([`Control::receiving`]) → a QP's gate → the tables → a
//! device's engine. Event sinks run under an engine's lock, so they only put a job into the
//! worker's queue.

use crate::aliases::Aliases;
use crate::backups::Backups;
use crate::contexts::ContextTable;
use crate::control::Control;
use crate::directory_monitor;
use crate::events::Events;
use crate::fitness::{self, Unfit};
use crate::nic_set::NicSet;
use crate::nics::NicTable;
use crate::own_events;
use crate::parallel::Parallel;
use crate::peer::Peers;
use crate::plain::Plain;
use crate::preference::Preference;
use crate::qps::QpTable;
use crate::random;
use crate::settings::Settings;
use crate::worker_queue::{Job, WorkerQueue};
use std::sync::{Arc, OnceLock};
use unbroken_directory::Directory;
use unbroken_process::ProcessGuard;
use unbroken_runtime::Runtime;
use unbroken_verbs::{Device, DeviceEvent, Error, EventSink, QpInit, Result, ResumableQp};

/// Numbers of QPs that have moved away which may be met in a row when one is made.
const MAX_TAKEN: usize = 1024;

/// The process-wide state, over QPs of type `Q`: it keeps them, and asks them nothing.
pub(crate) struct Core<Q> {
    /// The process that made it: in a forked child of that, every verb answers EIO.
    pub(crate) process: ProcessGuard,
    /// Tells this process from every other that had or will have its addresses.
    pub(crate) incarnation: u64,
    pub(crate) settings: Settings,
    pub(crate) runtime: Runtime,
    /// None while failover is off.
    pub(crate) directory: Option<Arc<dyn Directory>>,
    pub(crate) events: Events,
    pub(crate) nics: NicTable,
    /// Which NICs QPs go to first.
    pub(crate) preference: Preference,
    pub(crate) control: Control,
    pub(crate) peers: Peers,
    /// Where UD QPs are that have moved.
    pub(crate) aliases: Aliases,
    pub(crate) contexts: ContextTable,
    pub(crate) qps: QpTable<Q>,
    pub(crate) backups: Backups,
    /// NICs of which it was told that some QP does not fit.
    told_unfit: Unfit,
    /// For what is done for many QPs.
    pub(crate) parallel: Parallel,
    pub(crate) jobs: Arc<WorkerQueue>,
    /// Whether the worker runs; not set before the first device is opened.
    pub(crate) worker: OnceLock<bool>,
}

/// Where devices report to.
struct Sink(Arc<WorkerQueue>);

impl EventSink for Sink {
    fn event(&self, device: usize, event: DeviceEvent) {
        let kept = match event {
            DeviceEvent::Qp { qpn, event } => own_events::keep((self.0.name(), device, qpn), event),
            _ => false,
        };
        if !kept {
            self.0.put(Job::Device(device, event));
        }
    }
}

impl<Q> Core<Q> {
    /// The core over these NICs. Opens none yet.
    pub(crate) fn over(nics: Box<dyn NicSet>) -> Result<Arc<Core<Q>>> {
        Core::with(nics, |directory| directory)
    }

    /// The core over these NICs, with something before its directory.
    pub(crate) fn with(
        nics: Box<dyn NicSet>,
        wrap: impl FnOnce(Arc<dyn Directory>) -> Arc<dyn Directory>,
    ) -> Result<Arc<Core<Q>>> {
        let settings = Settings::from_env()?;
        let runtime =
            Runtime::at(&nics.runtime()).map_err(|e| Error::new(libc::EIO, e.to_string()))?;
        let (mut seed, mut own_key) = ([0u8; 8], [0u8; 32]);
        random::fill(&mut seed)?;
        random::fill(&mut own_key)?;
        let places = (0..nics.count()).map(|i| nics.place(i)).collect();
        let preference = Preference::new(&settings.map, places, settings.backups)?;
        nics.prepare((0..nics.count()).map(|i| preference.prepared(i)).collect());
        let jobs = Arc::new(WorkerQueue::new()?);
        let aliases = Aliases::new(nics.aliases());
        let nics = NicTable::new(nics, &settings, Arc::new(Sink(jobs.clone())))?;
        let directory = match settings.failover {
            true => Some(wrap(directory_monitor::open(&runtime, nics.host(), jobs.clone())?)),
            false => None,
        };
        Ok(Arc::new(Core {
            process: ProcessGuard::now(),
            incarnation: u64::from_ne_bytes(seed) | 1,
            events: Events::new(&runtime)?,
            control: Control::new(directory.clone(), &own_key),
            settings,
            runtime,
            directory,
            nics,
            preference,
            peers: Peers::default(),
            aliases,
            contexts: ContextTable::default(),
            qps: QpTable::default(),
            backups: Backups::default(),
            told_unfit: Unfit::default(),
            parallel: Parallel::default(),
            jobs,
            worker: OnceLock::new(),
        }))
    }

    /// Whether the worker looks after the QPs.
    pub(crate) fn watched(&self) -> bool {
        self.worker.get().is_some_and(|runs| *runs)
    }

    // --- the directory

    /// Tells the directory where this process can be reached.
    pub(crate) fn publish_process(&self) {
        let Some(directory) = &self.directory else { return };
        if let Err(e) = directory.publish_process(self.incarnation, &self.nics.record()) {
            self.events
                .complain_of_directory("the directory does not take this process's addresses", &e);
        }
    }

    /// The process ends by itself: nothing of it shall be found any more.
    pub(crate) fn close_directory(&self) {
        if let Some(directory) = &self.directory {
            directory.close();
        }
    }

    // --- physical QPs

    /// Makes a physical QP on NIC `i`, or, if that is dead and the QP may be anywhere, on one that
    /// stands in for it. Its number is no other logical QP's of NIC `i`, nor of its own NIC: one
    /// that has moved keeps its number.
    pub(crate) fn make_qp(
        &self,
        i: usize,
        init: &QpInit,
        anywhere: bool,
    ) -> Result<(usize, Arc<dyn ResumableQp>)> {
        let nics = &self.nics;
        let error = match nics.open(i).and_then(|device| self.make_qp_on(&device, i, i, init)) {
            Err(e) if anywhere && e.errno() == libc::EIO => e,
            made => return made.map(|qp| (i, qp)),
        };
        for j in nics.ring(i).skip(1) {
            let fits = fitness::lacks(&nics.attr(j), init).is_none();
            let Some(device) = nics.device(j).filter(|_| fits && nics.usable(j)) else { continue };
            match self.make_qp_on(&device, j, i, init) {
                Err(e) if e.errno() == libc::EIO => {}
                made => return made.map(|qp| (j, qp)),
            }
        }
        Err(error)
    }

    /// A QP does not fit NIC `nic`, which is told once of each.
    pub(crate) fn tell_unfit(&self, nic: usize, why: &str) {
        if self.told_unfit.add(nic) {
            let name = self.nics.name(nic);
            self.events.complain(&format!("{name} is no backup of some queue pairs"), &why);
        }
    }

    /// Makes a physical QP on NIC `at`, for a logical QP whose default NIC is `default`, and which
    /// has its number from it: no other has that.
    pub(crate) fn make_qp_on(
        &self,
        device: &Arc<dyn Device>,
        at: usize,
        default: usize,
        init: &QpInit,
    ) -> Result<Arc<dyn ResumableQp>> {
        let is_free = |qpn| [at, default].into_iter().all(|nic| self.qps.get((nic, qpn)).is_none());
        let mut taken = Vec::new();
        loop {
            let qp = self.make_life(device, at, init)?;
            if is_free(qp.qpn()) {
                return Ok(qp);
            }
            // It is kept until another is found, so that the number is not given out again.
            taken.push(qp);
            if taken.len() > MAX_TAKEN {
                let name = device.name();
                return Err(Error::no_room(format!(
                    "{name}: the numbers of {MAX_TAKEN} queue pairs in a row are those of others \
                     that have moved"
                )));
            }
        }
    }

    /// Makes a physical QP on NIC `at` for another life of a logical QP. Its number may be any: the
    /// peer is told it, and the device has no other of that number. (Two devices that number alike
    /// give a backup the number of a logical QP nearly always.)
    pub(crate) fn make_life(
        &self,
        device: &Arc<dyn Device>,
        at: usize,
        init: &QpInit,
    ) -> Result<Arc<dyn ResumableQp>> {
        Ok(match self.nics.holds(at) {
            true => device.create_holding_qp(init)?,
            false => Arc::new(Plain(device.create_qp(init)?)),
        })
    }
}
