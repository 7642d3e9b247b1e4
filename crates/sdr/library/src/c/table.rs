//! The objects of C programs.

use crate::handles::{Recv, Send};
use crate::memory::Memory;
use crate::qp::Qp;
use crate::{lock, Context, Error, Reliable, Result, Transfer};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use unbroken_verbs::handles::{Table, Wrong};

impl From<Wrong> for Error {
    fn from(wrong: Wrong) -> Error {
        Error::wrong(wrong)
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
            Error::wrong(format!(
                "no memory is registered under lkey {lkey:#x}: sdr_mr_reg of sdr_ext.h gives one"
            ))
        })?;
        if !memory.has(addr, bytes) {
            let (at, len) = (memory.addr(), memory.len());
            return Err(Error::wrong(format!(
                "{bytes} bytes at {addr:#x} are not inside of the memory of lkey {lkey:#x}, {len} \
                 bytes at {at:#x}"
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
pub(super) static SENDS: Table<CSend> =
    Table::new("send", "sdr_send_post or sdr_streaming_send_start");
pub(super) static RECVS: Table<CRecv> = Table::new("receive", "sdr_recv_post");
pub(super) static RELIABLES: Table<CReliable> =
    Table::new("end of reliable writes", "sdr_reliable_create");
pub(super) static TRANSFERS: Table<CTransfer> =
    Table::new("transfer", "sdr_reliable_write_post or sdr_reliable_read_post");
