//! The objects of C programs, by handles which are never given twice.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::request::Request;

/// Objects of one kind.
pub(super) struct Table<T> {
    name: &'static str,
    made_by: &'static str,
    items: LazyLock<Mutex<HashMap<usize, Arc<T>>>>,
}

/// Handles of all kinds; aligned as pointers are, and none is the address of anything.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

impl<T> Table<T> {
    const fn new(name: &'static str, made_by: &'static str) -> Table<T> {
        Table { name, made_by, items: LazyLock::new(Mutex::default) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Arc<T>>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an object, and gives its handle.
    pub(super) fn add(&self, item: T) -> *mut c_void {
        let handle = NEXT.fetch_add(16, Relaxed);
        self.lock().insert(handle, Arc::new(item));
        std::ptr::without_provenance_mut(handle)
    }

    fn wrong(&self, handle: *mut c_void) -> Error {
        let (name, made_by) = (self.name, self.made_by);
        Error::Refused(format!("{handle:?} is no {name}, or has been given back: {made_by} gives one"))
    }

    /// The object of a handle.
    pub(super) fn get(&self, handle: *mut c_void) -> Result<Arc<T>> {
        self.lock().get(&handle.addr()).cloned().ok_or_else(|| self.wrong(handle))
    }

    /// Takes an object out.
    pub(super) fn take(&self, handle: *mut c_void) -> Result<Arc<T>> {
        self.lock().remove(&handle.addr()).ok_or_else(|| self.wrong(handle))
    }
}

pub(super) static COMMS: Table<Communicator> = Table::new("communicator", "ubcollCommInitRank");
pub(super) static REQUESTS: Table<Mutex<Request>> = Table::new("request", "an operation whose request is not NULL");
