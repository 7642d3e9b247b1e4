//! Who looks at the runtime folder for all clients.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use unbroken_fabric::Runtime;
use unbroken_observe::{Observer, Result, Snapshot};

/// However many ask, the folder is looked at no more often than this.
const FRESH: Duration = Duration::from_millis(200);

/// Snapshots on demand: while nobody asks nothing is looked at.
#[derive(Clone)]
pub(crate) struct Source(Arc<Mutex<Inner>>);

struct Inner {
    observer: Observer,
    last: Option<(Instant, Arc<Snapshot>)>,
}

impl Source {
    pub(crate) fn new(runtime: &Runtime) -> Source {
        Source(Arc::new(Mutex::new(Inner { observer: Observer::new(runtime), last: None })))
    }

    /// What is seen now. Takes seconds where processes do not answer, so it is called where that
    /// may be waited for.
    pub(crate) fn look(&self) -> Result<Arc<Snapshot>> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, last)) = &inner.last {
            if at.elapsed() < FRESH {
                return Ok(last.clone());
            }
        }
        let snapshot = Arc::new(inner.observer.look()?);
        inner.last = Some((Instant::now(), snapshot.clone()));
        Ok(snapshot)
    }
}
