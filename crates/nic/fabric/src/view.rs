//! What a NIC sees of the faults.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use crate::conditions::Conditions;
use crate::config::MAX_PORTS;
use crate::entry::{Entry, SpotKind};
use crate::fault::Direction;
use crate::faultpage::{FaultPage, QUICK_TRIES};
use crate::kind::Kind;
use crate::map::Mapped;

/// The bits of all ports that a NIC may have.
pub const ALL_PORTS: u8 = (1 << MAX_PORTS) - 1;

/// The bit of a port, from 1; 0 stands for all.
fn ports_of(port: u8) -> u8 {
    match port {
        0 => ALL_PORTS,
        port => 1 << (port - 1) & ALL_PORTS,
    }
}

/// The state of a NIC and of its way into the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkState {
    /// False: the NIC is dead; nothing works any more.
    pub alive: bool,
    /// Ports that are down, bit 0 for port 1.
    pub down: u8,
    /// Ports whose cable is cut or whose switch is off, so that nothing goes out or comes in; the
    /// NIC does not know.
    pub silent: u8,
    /// Nothing comes from NICs of other rails.
    pub apart: bool,
    /// 0: packets pass unharmed. Else another number each time that the [`Conditions`] of a port
    /// change.
    pub impaired: u32,
    /// When a `wqe-error` fell due for the last time; 0 for never.
    pub wqe_error_us: u64,
}

impl LinkState {
    /// Nothing is wrong.
    pub const GOOD: LinkState =
        LinkState { alive: true, down: 0, silent: 0, apart: false, impaired: 0, wqe_error_us: 0 };

    /// Whether a port, from 1, has a link.
    #[inline]
    pub fn port_up(&self, port: u8) -> bool {
        self.down & ports_of(port) == 0
    }

    /// The ports that no packet passes, bit 0 for port 1.
    #[inline]
    pub fn shut(&self) -> u8 {
        if self.alive {
            self.down | self.silent
        } else {
            ALL_PORTS
        }
    }

    /// Whether a packet can pass through a port, from 1.
    #[inline]
    pub fn passes(&self, port: u8) -> bool {
        self.shut() & ports_of(port) == 0
    }
}

/// What packets suffer at each port of a NIC, port 1 first: those that leave, those that arrive.
pub type PortConditions = [[Conditions; 2]; MAX_PORTS as usize];

/// Packets pass unharmed at all ports.
const UNHARMED: PortConditions = [[Conditions::GOOD; 2]; MAX_PORTS as usize];

/// What all faults that concern a NIC come to at one time.
#[derive(Clone, Copy)]
pub(crate) struct Outlook {
    pub(crate) state: LinkState,
    pub(crate) ports: PortConditions,
    /// When that changes next.
    pub(crate) next_us: u64,
}

impl Outlook {
    pub(crate) const GOOD: Outlook =
        Outlook { state: LinkState::GOOD, ports: UNHARMED, next_us: u64::MAX };

    /// Whether packets suffer at some port.
    pub(crate) fn impaired(&self) -> bool {
        self.ports != UNHARMED
    }

    /// Takes a fault in that concerns the NIC; gives whether it holds.
    pub(crate) fn add(&mut self, entry: &Entry, now_us: u64) -> bool {
        let (holds, next_us) = entry.at(now_us);
        self.next_us = self.next_us.min(next_us);
        if !holds {
            return false;
        }
        match (entry.kind, entry.spot.kind) {
            (Kind::NicDead, _) => self.state.alive = false,
            (Kind::Down, SpotKind::Spine) => self.state.apart = true,
            (Kind::Down | Kind::Flap, SpotKind::Nic) => {
                self.state.down |= ports_of(entry.spot.port)
            }
            (Kind::Down | Kind::Flap, _) => self.state.silent |= ports_of(entry.spot.port),
            (Kind::WqeError, _) => {
                self.state.wqe_error_us =
                    self.state.wqe_error_us.max(entry.began_us(now_us).unwrap_or(0));
            }
            (Kind::Loss | Kind::BurstLoss | Kind::Corrupt | Kind::Duplicate, _)
            | (Kind::Reorder | Kind::Rate | Kind::Delay | Kind::Jitter, _) => {
                // A packet that crosses a switch is struck once, as it enters; both ends of a cable
                // have their own direction.
                let switch = entry.spot.kind == SpotKind::Switch && entry.kind != Kind::Rate;
                for (_, [tx, rx]) in
                    (1..).zip(&mut self.ports).filter(|(port, _)| entry.spot.strikes(*port))
                {
                    if entry.direction != Direction::Rx {
                        tx.add(entry);
                    }
                    if entry.direction == Direction::Rx
                        || entry.direction == Direction::Both && !switch
                    {
                        rx.add(entry);
                    }
                }
            }
        }
        true
    }
}

/// Whether a fault concerns this NIC.
pub(crate) fn concerns(entry: &Entry, host: u8, index: u8) -> bool {
    match entry.spot.kind {
        SpotKind::Spine => true,
        SpotKind::Switch => entry.spot.index == index,
        SpotKind::Nic | SpotKind::Cable => entry.spot.index == index && entry.spot.host == host,
    }
}

/// The faults that concern one NIC, cached: asking costs a load and two compares while nothing
/// changes.
pub struct NicView {
    page: Arc<Mapped<FaultPage>>,
    host: u8,
    index: u8,
    seen: u32,
    state: LinkState,
    next_us: u64,
    /// Apart from what is asked for all the time.
    ports: Box<PortConditions>,
    /// Counts changes of the conditions.
    changes: u32,
}

impl NicView {
    pub(crate) fn new(page: Arc<Mapped<FaultPage>>, host: u8, index: u8) -> NicView {
        // An odd generation is never taken for seen, so the first question looks.
        let Outlook { state, ports, next_us } = Outlook::GOOD;
        NicView { page, host, index, seen: 1, state, next_us, ports: Box::new(ports), changes: 0 }
    }

    /// The state at `now_us`. Times must not go back by more than it takes a fault to fall due.
    #[inline]
    pub fn state(&mut self, now_us: u64) -> LinkState {
        if self.page.generation.load(Ordering::Relaxed) != self.seen || now_us >= self.next_us {
            self.look(now_us);
        }
        self.state
    }

    /// What packets suffer, as of the last [`NicView::state`].
    pub fn conditions(&self) -> &PortConditions {
        &self.ports
    }

    #[cold]
    fn look(&mut self, now_us: u64) {
        let (host, index) = (self.host, self.index);
        let found = std::cell::Cell::new(Outlook::GOOD);
        let seen = self.page.read(
            QUICK_TRIES,
            || found.set(Outlook::GOOD),
            |entry| {
                if concerns(&entry, host, index) {
                    let mut outlook = found.get();
                    outlook.add(&entry, now_us);
                    found.set(outlook);
                }
            },
        );
        // Writers all the time: stay with what was known, and look again when asked again.
        let Some(seen) = seen else { return };
        let mut new = found.get();
        if new.impaired() {
            if new.ports != *self.ports {
                self.changes = self.changes.wrapping_add(1).max(1);
            }
            new.state.impaired = self.changes;
        }
        (self.seen, self.state, self.next_us, *self.ports) =
            (seen, new.state, new.next_us, new.ports);
    }
}
