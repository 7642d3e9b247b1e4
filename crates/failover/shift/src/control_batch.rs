//! Control messages that leave together.
//!
//! When a NIC dies, hundreds of QPs have something to say to the same peer at once. A datagram for
//! each would cost two system calls and a seal for each, and overrun the peer's receives. So while
//! somebody holds a [`Batch`], messages wait until a datagram is full, or the last batch ends.
//! Messages of other threads wait with them: a batch is short.

use crate::control_endpoint::{ControlAddr, ControlEndpoint};
use crate::lock::lock;
use std::sync::{Arc, Mutex};
use unbroken_failover_protocol::seal::Key;
use unbroken_failover_protocol::Message;

/// Datagrams that may be in the making; more are sent at once.
const MAX_OPEN: usize = 64;

#[derive(Default)]
struct Waiting {
    batches: u32,
    open: Vec<(Arc<ControlEndpoint>, ControlAddr, Vec<u8>)>,
}

/// The messages of a process that wait to leave.
#[derive(Default)]
pub(crate) struct ControlBatcher(Mutex<Waiting>);

/// While it lives, messages of the process may leave together; the last that is dropped sends what
/// waits.
pub(crate) struct Batch<'a> {
    batcher: &'a ControlBatcher,
    key: &'a Key,
}

impl ControlBatcher {
    pub(crate) fn batch<'a>(&'a self, key: &'a Key) -> Batch<'a> {
        lock(&self.0).batches += 1;
        Batch { batcher: self, key }
    }

    /// Sends a message, or keeps it for a datagram. False: its NIC does not take it.
    pub(crate) fn send(
        &self,
        from: Arc<ControlEndpoint>,
        to: ControlAddr,
        message: &Message,
        key: &Key,
    ) -> bool {
        let mut waiting = lock(&self.0);
        if waiting.batches == 0 {
            drop(waiting);
            let mut bytes = Vec::with_capacity(256);
            message.encode(&mut bytes);
            return from.send(to, &bytes, key).is_ok();
        }
        let at = waiting
            .open
            .iter()
            .position(|(endpoint, addr, _)| *addr == to && Arc::ptr_eq(endpoint, &from));
        let at = at.unwrap_or_else(|| {
            waiting.open.push((from.clone(), to, Vec::with_capacity(from.room())));
            waiting.open.len() - 1
        });
        let bytes = &mut waiting.open[at].2;
        let before = bytes.len();
        message.encode(bytes);
        let mut full = Vec::new();
        if bytes.len() > from.room() {
            let last = bytes.split_off(before);
            full.push((from, to, std::mem::replace(bytes, last)));
        } else if waiting.open.len() > MAX_OPEN {
            full.push(waiting.open.remove(0));
        }
        drop(waiting);
        full.iter()
            .filter(|(.., bytes)| !bytes.is_empty())
            .all(|(endpoint, to, bytes)| endpoint.send(*to, bytes, key).is_ok())
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        let mut waiting = lock(&self.batcher.0);
        waiting.batches -= 1;
        if waiting.batches > 0 {
            return;
        }
        let open = std::mem::take(&mut waiting.open);
        drop(waiting);
        for (endpoint, to, bytes) in open.iter().filter(|(.., bytes)| !bytes.is_empty()) {
            // One that cannot leave is a lost message: what matters is repeated.
            let _ = endpoint.send(*to, bytes, self.key);
        }
    }
}
