//! The objects of C programs, by handles which are never given twice: for C interfaces of what is
//! built on this library.
//!
//! A handle looks like a pointer and is the address of nothing. One that was given back, or is of
//! another kind, is told from those that are good, as long as the process lives.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// A handle that is none of a table's.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("{handle:#x} is no {name}, or has been given back: {made_by} gives one")]
pub struct Wrong {
    handle: usize,
    name: &'static str,
    made_by: &'static str,
}

/// Objects of one kind.
pub struct Table<T> {
    name: &'static str,
    made_by: &'static str,
    items: LazyLock<Mutex<HashMap<usize, Arc<T>>>>,
}

/// Handles of all kinds; aligned as pointers are.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

impl<T> Table<T> {
    /// One that is empty: what its objects are called, and which function of the C interface makes
    /// them, both for errors.
    pub const fn new(name: &'static str, made_by: &'static str) -> Table<T> {
        Table { name, made_by, items: LazyLock::new(Mutex::default) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Arc<T>>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wrong(&self, handle: *mut c_void) -> Wrong {
        Wrong { handle: handle.addr(), name: self.name, made_by: self.made_by }
    }

    /// Keeps an object, and gives its handle.
    pub fn add(&self, item: T) -> *mut c_void {
        self.insert(Arc::new(item))
    }

    /// Keeps an object that others hold, too, and gives its handle.
    pub fn insert(&self, item: Arc<T>) -> *mut c_void {
        let handle = NEXT.fetch_add(16, Relaxed);
        self.lock().insert(handle, item);
        std::ptr::without_provenance_mut(handle)
    }

    /// The object of a handle.
    pub fn get(&self, handle: *mut c_void) -> Result<Arc<T>, Wrong> {
        self.lock().get(&handle.addr()).cloned().ok_or_else(|| self.wrong(handle))
    }

    /// Takes an object out.
    pub fn take(&self, handle: *mut c_void) -> Result<Arc<T>, Wrong> {
        self.lock().remove(&handle.addr()).ok_or_else(|| self.wrong(handle))
    }

    /// Takes out all of which that is true.
    pub fn take_all(&self, mut which: impl FnMut(&T) -> bool) {
        let taken: Vec<Arc<T>> = {
            let mut items = self.lock();
            let handles: Vec<usize> =
                items.iter().filter(|(_, item)| which(item)).map(|(handle, _)| *handle).collect();
            handles.iter().filter_map(|handle| items.remove(handle)).collect()
        };
        // Not under the lock: ending them takes others.
        drop(taken);
    }

    /// Whether that is true of any.
    pub fn any(&self, mut which: impl FnMut(&T) -> bool) -> bool {
        self.lock().values().any(|item| which(item))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static NUMBERS: Table<u32> = Table::new("number", "number_create");
    static WORDS: Table<&str> = Table::new("word", "word_create");

    #[test]
    fn a_handle_is_good_until_it_is_given_back_and_of_one_kind_alone() {
        let (one, two, word) = (NUMBERS.add(1), NUMBERS.add(2), WORDS.add("w"));
        assert_eq!((*NUMBERS.get(one).unwrap(), *NUMBERS.get(two).unwrap()), (1, 2));
        let error = NUMBERS.get(word).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("{word:?} is no number, or has been given back: number_create gives one")
        );
        assert_eq!(*NUMBERS.take(one).unwrap(), 1);
        assert!(NUMBERS.get(one).is_err() && NUMBERS.take(one).is_err());
        assert_ne!(NUMBERS.add(1), one, "never given twice");
        NUMBERS.take_all(|n| *n == 2);
        assert!(NUMBERS.get(two).is_err() && NUMBERS.any(|n| *n == 1));
    }
}
