//! Waiting for completions without polling.

use crate::{Cq, Nic, Result};
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use unbroken_verbs::CompChannel;

/// A descriptor that is readable when a queue has completions: one that was made on it, and asked
/// ([`Cq::notify`]).
#[derive(Clone)]
pub struct Events(Arc<CompChannel>);

impl Nic {
    /// Makes a channel of events for completion queues of this NIC.
    pub fn create_events(&self) -> Result<Events> {
        Ok(Events(self.context().create_channel()?))
    }

    /// Makes a completion queue that raises its events there.
    pub fn create_cq_on(&self, entries: u32, events: &Events) -> Result<Cq> {
        Ok(Cq(self.context().create_cq(entries, Some(events.0.clone()))?))
    }
}

impl Events {
    /// Takes all events that wait. Whoever does that looks at all queues of the channel afterwards.
    pub fn drain(&self) {
        self.0.drain();
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").field("fd", &self.as_raw_fd()).finish()
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Cq {
    /// Takes completions that are there into a slice, without driving the NICs as [`Cq::poll_into`]
    /// does where there are none. A device that works by itself is asked for them.
    pub fn take_into(&self, wcs: &mut [crate::Wc]) -> Result<usize> {
        match self.0.has_source() {
            true => self.0.poll(wcs),
            false => self.0.take(wcs),
        }
    }

    /// Asks for an event at the next completion. What came before is polled for after this call.
    pub fn notify(&self) {
        self.0.req_notify(false);
    }
}
