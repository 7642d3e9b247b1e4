//! What is wrong with a NIC and its way into the network, and the dice for what happens to packets.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::Arc;
use unbroken_fabric::{Conditions, LinkState, NicView, PortConditions, ALL_PORTS, MAX_PORTS};

/// Where a NIC's engine learns of its link. Asking costs a few nanoseconds while nothing changes.
pub(crate) enum LinkSource {
    /// A NIC of the emulated network.
    Fabric(NicView),
    /// A NIC that is the address of a real interface.
    Interface(Arc<InterfaceState>),
}

impl LinkSource {
    /// The state now.
    #[inline]
    pub(crate) fn state(&mut self, now_us: u64) -> LinkState {
        match self {
            LinkSource::Fabric(view) => view.state(now_us),
            LinkSource::Interface(i) => i.get(),
        }
    }

    /// What packets suffer, as of the last [`LinkSource::state`].
    pub(crate) fn conditions(&self) -> PortConditions {
        match self {
            LinkSource::Fabric(view) => *view.conditions(),
            LinkSource::Interface(_) => [[Conditions::GOOD; 2]; MAX_PORTS as usize],
        }
    }
}

/// What can be asked of a NIC without its lock; its engine sets it before it tells of a change.
pub(crate) struct Status {
    alive: AtomicBool,
    /// Ports without a link, bit 0 for port 1.
    down: AtomicU8,
}

impl Status {
    /// Of a NIC that works.
    pub(crate) fn new() -> Status {
        Status { alive: AtomicBool::new(true), down: AtomicU8::new(0) }
    }

    pub(crate) fn set(&self, state: LinkState) {
        self.down.store(state.down, Ordering::Release);
        // Never back: the NIC does not come to life again.
        self.alive.fetch_and(state.alive, Ordering::AcqRel);
    }

    pub(crate) fn alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Whether a port, from 1, can be used.
    pub(crate) fn usable(&self, port: u8) -> bool {
        self.alive() && self.down.load(Ordering::Acquire) & 1 << (port - 1) == 0
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
        let down = if state == UP { 0 } else { ALL_PORTS };
        LinkState { alive: state != DELETED, down, ..LinkState::GOOD }
    }
}

/// Chance: xorshift64*, seeded for each NIC.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(seed | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        let mut x = self.0;
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        self.0 = x;
        x.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// Whether something happens that has a chance in parts per million.
    pub(crate) fn chance(&mut self, ppm: u32) -> bool {
        ppm != 0 && self.below(1_000_000) < u64::from(ppm)
    }

    /// Whether something happens that has a chance between 0 and 1.
    pub(crate) fn happens(&mut self, chance: f64) -> bool {
        // 53 bits are what a double holds.
        ((self.next() >> 11) as f64) < chance * (1u64 << 53) as f64
    }
}
