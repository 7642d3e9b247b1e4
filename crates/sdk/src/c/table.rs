//! The objects of C programs, by handles which are never given twice.

use crate::handles::{Recv, Send};
use crate::memory::Memory;
use crate::qp::Qp;
use crate::{lock, Context, Error, Reliable, Result, Transfer};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex};

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

    /// Keeps an object, and gives its handle.
    pub(super) fn add(&self, item: T) -> *mut c_void {
        let handle = NEXT.fetch_add(16, Relaxed);
        lock(&self.items).insert(handle, Arc::new(item));
        std::ptr::without_provenance_mut(handle)
    }

    fn wrong(&self, handle: *mut c_void) -> Error {
        let (name, made_by) = (self.name, self.made_by);
        Error::wrong(format!("{handle:?} is no {name}, or has been given back: {made_by} gives one"))
    }

    /// The object of a handle.
    pub(super) fn get(&self, handle: *mut c_void) -> Result<Arc<T>> {
        lock(&self.items).get(&handle.addr()).cloned().ok_or_else(|| self.wrong(handle))
    }

    /// Takes an object out, which a condition may forbid.
    pub(super) fn take(&self, handle: *mut c_void, may: impl FnOnce(&T) -> Result<()>) -> Result<Arc<T>> {
        let mut items = lock(&self.items);
        let item = items.get(&handle.addr()).ok_or_else(|| self.wrong(handle))?;
        may(item)?;
        items.remove(&handle.addr()).ok_or_else(|| self.wrong(handle))
    }

    /// Takes out all of which that is true.
    pub(super) fn take_all(&self, mut which: impl FnMut(&T) -> bool) {
        let taken: Vec<Arc<T>> = {
            let mut items = lock(&self.items);
            let handles: Vec<usize> = items.iter().filter(|(_, item)| which(item)).map(|(handle, _)| *handle).collect();
            handles.iter().filter_map(|handle| items.remove(handle)).collect()
        };
        // Not under the lock: ending them takes others.
        drop(taken);
    }

    pub(super) fn any(&self, mut which: impl FnMut(&T) -> bool) -> bool {
        lock(&self.items).values().any(|item| which(item))
    }
}

/// A context, and what is registered in it by its key.
pub(super) struct CContext {
    pub(super) context: Context,
    pub(super) memories: Mutex<HashMap<u32, Memory>>,
}

impl CContext {
    /// The memory of a key, if these bytes are inside of it.
    pub(super) fn memory(&self, lkey: u32, addr: u64, bytes: u64) -> Result<Memory> {
        let memories = lock(&self.memories);
        let memory = memories.get(&lkey).ok_or_else(|| {
            Error::wrong(format!("no memory is registered under lkey {lkey:#x}: sdr_mr_reg of sdr_ext.h gives one"))
        })?;
        if !memory.has(addr, bytes) {
            let (at, len) = (memory.addr(), memory.len());
            return Err(Error::wrong(format!(
                "{bytes} bytes at {addr:#x} are not inside of the memory of lkey {lkey:#x}, {len} bytes at {at:#x}"
            )));
        }
        Ok(memory.clone())
    }
}

/// A queue pair, and whose it is.
pub(super) struct CQp {
    pub(super) qp: Qp,
    pub(super) context: Arc<CContext>,
}

/// A send: whether all of it has been given, and its queue pair.
pub(super) struct CSend {
    pub(super) send: Send,
    pub(super) context: Arc<CContext>,
}

/// A receive; taken out when it is completed.
pub(super) struct CRecv {
    pub(super) recv: Mutex<Option<Recv>>,
}

/// Reliable writes, and the queue pair that carries them.
pub(super) struct CReliable {
    pub(super) reliable: Reliable,
    pub(super) qp: Arc<CQp>,
}

/// A write or a read.
pub(super) struct CTransfer {
    pub(super) transfer: Transfer,
    pub(super) qp: Arc<CQp>,
}

pub(super) static CONTEXTS: Table<CContext> = Table::new("context", "sdr_context_create");
pub(super) static QPS: Table<CQp> = Table::new("queue pair", "sdr_qp_create");
pub(super) static SENDS: Table<CSend> = Table::new("send", "sdr_send_post or sdr_streaming_send_start");
pub(super) static RECVS: Table<CRecv> = Table::new("receive", "sdr_recv_post");
pub(super) static RELIABLES: Table<CReliable> = Table::new("end of reliable writes", "sdr_reliable_create");
pub(super) static TRANSFERS: Table<CTransfer> =
    Table::new("transfer", "sdr_reliable_write_post or sdr_reliable_read_post");
