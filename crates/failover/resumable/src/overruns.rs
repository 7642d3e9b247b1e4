//! CQs that overrun while nobody polls them.
//!
//! A device's CQ has room for all that its QPs may have outstanding, flushes and markers included:
//! more than the application's, as a rule. Completions that the application's would have had no
//! room for lie in the device's until somebody polls, and the peer holds for done what no receive
//! will ever tell of. So where the QPs of a CQ can have more outstanding than it takes, what is in
//! the device's is brought over now and then, by the owner of the device. A CQ that is large enough
//! is never looked at.

use crate::cq::ProviderCq;
use crate::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use unbroken_verbs::{DeviceEvent, EventSink};

/// CQs that one look brings from, so that it ends soon; the next one goes on behind them.
const MOST_AT_ONCE: usize = 256;

/// The CQs of a device that may overrun.
pub(crate) struct Overruns {
    index: usize,
    sink: Arc<dyn EventSink>,
    /// The device says of one that it has overrun.
    told: AtomicBool,
    /// There are some that are too small.
    any: AtomicBool,
    small: Mutex<VecDeque<Weak<ProviderCq>>>,
}

impl Overruns {
    /// Those of the device of that index.
    pub(crate) fn new(index: usize, sink: &Arc<dyn EventSink>) -> Arc<Overruns> {
        Arc::new(Overruns {
            index,
            sink: sink.clone(),
            told: AtomicBool::new(false),
            any: AtomicBool::new(false),
            small: Mutex::default(),
        })
    }

    /// One of the device's own CQs has lost completions. Called with the device's locks held.
    pub(crate) fn tell(&self) {
        self.told.store(true, Ordering::Release);
        self.sink.event(self.index, DeviceEvent::CqOverran);
    }

    /// That one is too small for its QPs, and is not watched yet.
    pub(crate) fn watch(&self, cq: &Weak<ProviderCq>) {
        let mut small = lock(&self.small);
        small.push_back(cq.clone());
        self.any.store(true, Ordering::Release);
    }

    /// Brings over what is in those that are too small, and in `all` where one has lost some.
    pub(crate) fn look(&self, all: impl FnOnce() -> Vec<Arc<ProviderCq>>) {
        if self.told.swap(false, Ordering::AcqRel) {
            for cq in all() {
                cq.bring_all();
            }
        } else if self.any.load(Ordering::Acquire) {
            self.some().iter().for_each(|cq| cq.look());
        }
    }

    /// The next ones. Those that are large enough by now, or gone, are watched no more.
    fn some(&self) -> Vec<Arc<ProviderCq>> {
        let mut small = lock(&self.small);
        let count = small.len().min(MOST_AT_ONCE);
        let next: Vec<_> = small.drain(..count).filter_map(|cq| cq.upgrade()).collect();
        let (next, large): (Vec<_>, Vec<_>) = next.into_iter().partition(|cq| cq.stays_watched());
        small.extend(next.iter().map(Arc::downgrade));
        self.any.store(!small.is_empty(), Ordering::Release);
        drop(small);
        // Whoever lets go of one last ends it, which may take its time.
        drop(large);
        next
    }
}
