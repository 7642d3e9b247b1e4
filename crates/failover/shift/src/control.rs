//! Control messages: sent over the NIC table, sealed, counted where the seal is wrong.

use crate::control_batch::{Batch, ControlBatcher};
use crate::control_endpoint::{ControlAddr, LocalPort};
use crate::nics::NicTable;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use unbroken_directory::Directory;
use unbroken_failover_protocol::seal::Key;
use unbroken_failover_protocol::Message;

/// What a process needs to exchange control messages, beside its NICs.
pub(crate) struct Control {
    directory: Option<Arc<dyn Directory>>,
    /// What keeps strangers' control messages out: the directory's, once that has said it.
    key: OnceLock<Key>,
    /// In its place until then: one that nobody else has.
    own_key: Key,
    /// Control datagrams that came without the seal of the directory's key.
    forged: AtomicU64,
    batcher: ControlBatcher,
    /// Held while control messages are received and handled. Before any gate.
    pub(crate) receiving: Mutex<()>,
}

impl Control {
    /// Takes the key from this directory; until that has said it, a key of the process's own.
    pub(crate) fn new(directory: Option<Arc<dyn Directory>>, own_key: &[u8; 32]) -> Control {
        Control {
            directory,
            key: OnceLock::new(),
            own_key: Key::new(own_key),
            forged: AtomicU64::new(0),
            batcher: ControlBatcher::default(),
            receiving: Mutex::default(),
        }
    }

    /// The key of the control messages.
    pub(crate) fn key(&self) -> &Key {
        let known = || {
            let key = self.directory.as_ref()?.key()?;
            Some(self.key.get_or_init(|| Key::new(&key)))
        };
        self.key.get().or_else(known).unwrap_or(&self.own_key)
    }

    /// Sends a control message from port 1 of NIC `nic` to the peer's endpoint, at once or, during
    /// a [`Batch`], with others; whether it could leave.
    pub(crate) fn send(
        &self,
        nics: &NicTable,
        nic: usize,
        to: ControlAddr,
        message: &Message,
    ) -> bool {
        self.send_from(nics, LocalPort { nic, pair: 0 }, to, message)
    }

    /// Sends a control message from that port of ours, as [`Control::send`] does.
    pub(crate) fn send_from(
        &self,
        nics: &NicTable,
        from: LocalPort,
        to: ControlAddr,
        message: &Message,
    ) -> bool {
        nics.endpoint_of(from)
            .is_some_and(|endpoint| self.batcher.send(endpoint, to, message, self.key()))
    }

    /// What is sent until this is dropped may leave together.
    pub(crate) fn batch(&self) -> Batch<'_> {
        self.batcher.batch(self.key())
    }

    /// Control datagrams that strangers sent.
    pub(crate) fn forged(&self) -> u64 {
        self.forged.load(Ordering::Relaxed)
    }

    /// So many more came from strangers.
    pub(crate) fn count_forged(&self, datagrams: u64) {
        if datagrams > 0 {
            self.forged.fetch_add(datagrams, Ordering::Relaxed);
        }
    }
}
