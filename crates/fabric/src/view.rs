//! What a NIC sees of the faults.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use crate::faultpage::{Entry, FaultPage, Kind, QUICK_TRIES};
use crate::map::Mapped;

/// The state of a NIC and of its way into the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkState {
    /// False: the NIC is dead; nothing works any more.
    pub alive: bool,
    /// False: the port is down.
    pub port_up: bool,
    /// False: the cable is cut or the switch is off, so that nothing goes out or comes in; the NIC does not know.
    pub carries: bool,
    /// Packets sent that get lost, in parts per million.
    pub tx_loss_ppm: u32,
    /// Packets that get lost before they are received, in parts per million.
    pub rx_loss_ppm: u32,
}

impl LinkState {
    /// Nothing is wrong.
    pub const GOOD: LinkState = LinkState { alive: true, port_up: true, carries: true, tx_loss_ppm: 0, rx_loss_ppm: 0 };

    /// Whether a packet can pass at all.
    #[inline]
    pub fn passes(&self) -> bool {
        self.alive && self.port_up && self.carries
    }

    pub(crate) fn add(&mut self, entry: &Entry) {
        let ppm = entry.value.min(u64::from(crate::fault::FULL_PPM)) as u32;
        match entry.kind {
            Kind::NicDead => self.alive = false,
            Kind::NicDown => self.port_up = false,
            Kind::CableCut | Kind::SwitchDown => self.carries = false,
            Kind::Loss => {
                if entry.way != 2 {
                    self.tx_loss_ppm = self.tx_loss_ppm.max(ppm);
                }
                if entry.way != 1 {
                    self.rx_loss_ppm = self.rx_loss_ppm.max(ppm);
                }
            }
        }
    }
}

/// Whether a fault concerns this NIC.
pub(crate) fn concerns(entry: &Entry, host: u8, index: u8) -> bool {
    entry.index == index && (entry.host == host || entry.kind == Kind::SwitchDown)
}

/// The faults that concern one NIC, cached: asking costs a load and two compares while nothing changes.
pub struct NicView {
    page: Arc<Mapped<FaultPage>>,
    host: u8,
    index: u8,
    seen: u32,
    /// When the next fault falls due.
    next_us: u64,
    state: LinkState,
}

impl NicView {
    pub(crate) fn new(page: Arc<Mapped<FaultPage>>, host: u8, index: u8) -> NicView {
        // An odd generation is never taken for seen, so the first question looks.
        NicView { page, host, index, seen: 1, next_us: 0, state: LinkState::GOOD }
    }

    /// The state at `now_us`. Times must not go back by more than it takes a fault to fall due.
    #[inline]
    pub fn state(&mut self, now_us: u64) -> LinkState {
        if self.page.generation.load(Ordering::Relaxed) != self.seen || now_us >= self.next_us {
            self.look(now_us);
        }
        self.state
    }

    #[cold]
    fn look(&mut self, now_us: u64) {
        let (host, index) = (self.host, self.index);
        let found = std::cell::Cell::new((LinkState::GOOD, u64::MAX));
        let seen = self.page.read(
            QUICK_TRIES,
            || found.set((LinkState::GOOD, u64::MAX)),
            |entry| {
                if concerns(&entry, host, index) {
                    let (mut state, mut next_us) = found.get();
                    if entry.from_us <= now_us {
                        state.add(&entry);
                    } else {
                        next_us = next_us.min(entry.from_us);
                    }
                    found.set((state, next_us));
                }
            },
        );
        // Writers all the time: stay with what was known, and look again when asked again.
        if let Some(seen) = seen {
            self.seen = seen;
            (self.state, self.next_us) = found.get();
        }
    }
}
