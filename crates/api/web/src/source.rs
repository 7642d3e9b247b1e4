//! Who looks at the runtime folder for all clients.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use unbroken_fabric::{Runtime, RuntimeError};
use unbroken_observe::{Observer, Result, Snapshot};

/// However many ask, the folder is looked at no more often than this.
const FRESH: Duration = Duration::from_millis(200);

/// Snapshots on demand: while nobody asks nothing is looked at.
#[derive(Clone)]
pub(crate) struct Source(Arc<Mutex<Inner>>);

/// Looks for the runtime folder; none where nothing has made it yet.
pub type Find = Box<dyn Fn() -> std::result::Result<Option<Runtime>, RuntimeError> + Send>;

struct Inner {
    find: Find,
    observer: Option<Observer>,
    last: Option<(Instant, Arc<Snapshot>)>,
}

impl Source {
    /// Of a folder that is there.
    pub(crate) fn new(runtime: &Runtime) -> Source {
        let there = runtime.clone();
        Source::found_by(Box::new(move || Ok(Some(there.clone()))))
    }

    /// Of a folder that may come later: until then there is nothing in it.
    pub(crate) fn found_by(find: Find) -> Source {
        Source(Arc::new(Mutex::new(Inner { find, observer: None, last: None })))
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
        if inner.observer.is_none() {
            inner.observer = (inner.find)()?.as_ref().map(Observer::new);
        }
        let snapshot = match &mut inner.observer {
            Some(observer) => Arc::new(observer.look()?),
            None => Arc::default(),
        };
        inner.last = Some((Instant::now(), snapshot.clone()));
        Ok(snapshot)
    }
}
