//! Asynchronous events (`ibv_async_event`): what they are about, and those that wait to be taken.

use crate::lock::lock;
use std::collections::VecDeque;
use std::sync::Mutex;
use unbroken_verbs::{Error, EventFd, Result};

/// `enum ibv_event_type`: the ones that this library raises.
pub mod event_type {
    /// A CQ overran.
    pub const CQ_ERR: u32 = 0;
    /// The device is gone.
    pub const DEVICE_FATAL: u32 = 8;
    /// The port has its link again.
    pub const PORT_ACTIVE: u32 = 9;
    /// The port lost its link.
    pub const PORT_ERR: u32 = 10;
    /// Fewer receives than its limit are left in an SRQ.
    pub const SRQ_LIMIT_REACHED: u32 = 15;
}

/// What an asynchronous event is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AsyncElement {
    /// The device.
    Device,
    /// A port, counted from 1.
    Port(u8),
    /// The QP of that cookie.
    Qp(u64),
    /// The CQ of that cookie.
    Cq(u64),
    /// The SRQ of that cookie.
    Srq(u64),
}

/// An asynchronous event of a context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AsyncEvent {
    /// `enum ibv_event_type`.
    pub event_type: u32,
    /// What it is about.
    pub element: AsyncElement,
}

/// Events that wait beyond this are dropped, the oldest first: a program that never reads them must
/// not grow without bound.
const MAX_ASYNC_EVENTS: usize = 1024;

/// The asynchronous events of a context that nobody has taken yet.
pub(crate) struct AsyncQueue {
    fd: EventFd,
    waiting: Mutex<VecDeque<AsyncEvent>>,
}

impl AsyncQueue {
    pub(crate) fn new() -> Result<AsyncQueue> {
        Ok(AsyncQueue { fd: EventFd::new(true, false)?, waiting: Mutex::new(VecDeque::new()) })
    }

    /// Adds an event; of too many the oldest is dropped.
    pub(crate) fn push(&self, event: AsyncEvent) {
        let mut q = lock(&self.waiting);
        if q.len() == MAX_ASYNC_EVENTS {
            q.pop_front();
            q.push_back(event);
            return;
        }
        q.push_back(event);
        // Under the lock, so that a withdrawal finds what it takes back.
        self.fd.signal();
    }

    /// Waits for the next event; EAGAIN where the descriptor is non-blocking, EINTR where a signal
    /// handler ran.
    pub(crate) fn next(&self) -> Result<AsyncEvent> {
        loop {
            self.fd.take().map_err(|e| Error::os("asynchronous events", &e))?;
            // An event whose object was destroyed meanwhile has been withdrawn: wait for the next.
            if let Some(e) = lock(&self.waiting).pop_front() {
                return Ok(e);
            }
        }
    }

    /// Forgets the events of an object, and takes back what made the descriptor readable for them:
    /// a program that polls it would then wait for an event that never comes.
    pub(crate) fn withdraw(&self, element: AsyncElement) {
        let mut q = lock(&self.waiting);
        let before = q.len();
        q.retain(|e| e.element != element);
        for _ in q.len()..before {
            self.fd.take_back();
        }
    }

    /// The descriptor that is readable while events wait.
    pub(crate) fn fd(&self) -> &EventFd {
        &self.fd
    }

    /// How many events of that type wait.
    #[cfg(test)]
    pub(crate) fn waiting(&self, event_type: u32) -> usize {
        lock(&self.waiting).iter().filter(|e| e.event_type == event_type).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_withdrawn_event_leaves_the_descriptor_quiet() {
        let queue = AsyncQueue::new().unwrap();
        let event = |cookie| AsyncEvent {
            event_type: event_type::DEVICE_FATAL,
            element: AsyncElement::Qp(cookie),
        };
        for cookie in [1, 2, 1] {
            queue.push(event(cookie));
        }
        queue.withdraw(AsyncElement::Qp(1));
        assert_eq!(queue.next().unwrap(), event(2));
        assert!(!queue.fd.take_back(), "nothing waits, and nothing is readable");
    }
}
