//! What is wrong with a NIC and its way into the network, and the dice for packet loss.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::Arc;
use unbroken_fabric::{LinkState, NicView};

/// Where a NIC's engine learns of its link. Asking costs a few nanoseconds while nothing changes.
pub(crate) enum Link {
    /// A NIC of the emulated network.
    Fabric(NicView),
    /// A NIC that is the address of a real interface.
    Interface(Arc<InterfaceState>),
}

impl Link {
    /// The state now.
    #[inline]
    pub(crate) fn state(&mut self, now_us: u64) -> LinkState {
        match self {
            Link::Fabric(view) => view.state(now_us),
            Link::Interface(i) => i.get(),
        }
    }
}

/// What can be asked of a NIC without its lock; its engine sets it before it tells of a change.
pub(crate) struct Status {
    alive: AtomicBool,
    port_up: AtomicBool,
}

impl Status {
    /// Of a NIC that works.
    pub(crate) fn new() -> Status {
        Status { alive: AtomicBool::new(true), port_up: AtomicBool::new(true) }
    }

    pub(crate) fn set(&self, state: LinkState) {
        self.port_up.store(state.port_up, Ordering::Release);
        // Never back: the NIC does not come to life again.
        self.alive.fetch_and(state.alive, Ordering::AcqRel);
    }

    pub(crate) fn alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    pub(crate) fn usable(&self) -> bool {
        self.alive() && self.port_up.load(Ordering::Acquire)
    }
}

/// The state of a real interface, kept by the thread that watches the kernel's link changes.
pub(crate) struct InterfaceState {
    pub(crate) index: u32,
    state: AtomicU8,
}

const UP: u8 = 0;
const DOWN: u8 = 1;
const DELETED: u8 = 2;

impl InterfaceState {
    pub(crate) fn new(index: u32) -> InterfaceState {
        InterfaceState { index, state: AtomicU8::new(UP) }
    }

    pub(crate) fn set_up(&self, up: bool) {
        self.state.store(if up { UP } else { DOWN }, Ordering::Release);
    }

    /// The interface no longer exists: the NIC is dead until one with its index is there again.
    pub(crate) fn set_deleted(&self) {
        self.state.store(DELETED, Ordering::Release);
    }

    fn get(&self) -> LinkState {
        let state = self.state.load(Ordering::Acquire);
        LinkState { alive: state != DELETED, port_up: state == UP, ..LinkState::GOOD }
    }
}

/// Loses packets at random: xorshift64*, seeded for each NIC.
pub(crate) struct Loss {
    state: u64,
    pub(crate) ppm: u32,
}

impl Loss {
    pub(crate) fn new(seed: u64) -> Loss {
        Loss { state: seed | 1, ppm: 0 }
    }

    /// Whether the next packet is lost.
    pub(crate) fn lose(&mut self) -> bool {
        if self.ppm == 0 {
            return false;
        }
        let mut x = self.state;
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        self.state = x;
        let high = (x.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32;
        (u64::from(high) * 1_000_000) >> 32 < u64::from(self.ppm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_is_about_what_was_asked_for() {
        let mut loss = Loss::new(7);
        assert_eq!((0..10_000).filter(|_| loss.lose()).count(), 0);
        loss.ppm = 100_000;
        let lost = (0..100_000).filter(|_| loss.lose()).count();
        assert!((9_000..11_000).contains(&lost), "{lost}");
        loss.ppm = 1_000_000;
        assert!((0..1000).all(|_| loss.lose()));
    }
}
