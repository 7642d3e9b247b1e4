//! The table of opened devices: who hears of a fault, and of its end.

use crate::async_events::{event_type, AsyncElement, AsyncEvent, AsyncQueue};
use crate::lock::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use unbroken_verbs::{Device, Result};

/// What an opened device is below its QPs.
pub(crate) struct ContextState {
    /// Index of the default NIC.
    pub(crate) nic: usize,
    /// The device that all of its objects belong to, where they are not the process's. It may be
    /// dead, and its NIC opened anew by others.
    pub(crate) own: Option<Arc<dyn Device>>,
    /// Shared with what raises events under a device's lock: to let go of it must not close a
    /// device.
    pub(crate) events: Arc<AsyncQueue>,
    /// A protection domain was made of it once.
    used: AtomicBool,
    /// A device-fatal or port-down event was delivered, so its end is news, too.
    fault_told: AtomicBool,
}

impl ContextState {
    /// That of a context of NIC `nic`.
    pub(crate) fn new(nic: usize, own: Option<Arc<dyn Device>>) -> Result<Arc<ContextState>> {
        Ok(Arc::new(ContextState {
            nic,
            own,
            events: Arc::new(AsyncQueue::new()?),
            used: AtomicBool::new(false),
            fault_told: AtomicBool::new(false),
        }))
    }

    /// A protection domain was made.
    pub(crate) fn pd_made(&self) {
        self.used.store(true, Ordering::Relaxed);
    }

    /// Nothing was ever made of it, not even a protection domain. A program that has tried the
    /// device and let go of it again (NCCL asks so whether it has dma-buf) comes back to use it,
    /// and would not if it heard that the device is dead.
    pub(crate) fn only_watches(&self) -> bool {
        !self.used.load(Ordering::Relaxed)
    }

    /// Raises an event.
    pub(crate) fn raise(&self, event_type: u32, element: AsyncElement) {
        match event_type {
            event_type::DEVICE_FATAL | event_type::PORT_ERR => {
                self.fault_told.store(true, Ordering::Relaxed)
            }
            // Good news about a fault that was hidden would only confuse.
            event_type::PORT_ACTIVE if self.own.as_ref().is_some_and(|device| !device.alive()) => {
                return
            }
            event_type::PORT_ACTIVE if !self.fault_told.swap(false, Ordering::Relaxed) => return,
            _ => {}
        }
        self.events.push(AsyncEvent { event_type, element });
    }
}

/// The opened devices of a process.
#[derive(Default)]
pub(crate) struct ContextTable(Mutex<Vec<Weak<ContextState>>>);

impl ContextTable {
    /// Enters one.
    pub(crate) fn add(&self, context: &Arc<ContextState>) {
        let mut all = lock(&self.0);
        all.retain(|c| c.strong_count() > 0);
        all.push(Arc::downgrade(context));
    }

    /// Takes one out.
    pub(crate) fn remove(&self, context: &ContextState) {
        lock(&self.0).retain(|c| !std::ptr::eq(c.as_ptr(), context));
    }

    /// Raises a device or port event on the wanted contexts of NIC `nic`.
    pub(crate) fn raise(
        &self,
        nic: usize,
        event_type: u32,
        element: AsyncElement,
        wanted: impl Fn(&ContextState) -> bool,
    ) {
        let all: Vec<_> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        for context in all.iter().filter(|c| c.nic == nic && wanted(c)) {
            context.raise(event_type, element);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_tried_a_device_no_longer_only_watches() {
        let context = ContextState::new(0, None).unwrap();
        assert!(context.only_watches());
        context.pd_made();
        assert!(!context.only_watches());
    }
}
