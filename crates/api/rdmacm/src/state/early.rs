//! Requests that come before somebody listens.
//!
//! Programs agree over one connection that they are about to make another, and then one listens and
//! the other connects, without another word (perftest). Or a program binds to a port, tells its
//! number, and then listens (qperf). A kernel needs a while to find addresses and routes and to make
//! queue pairs, here all of that takes microseconds. So a request waits for a moment where the port
//! is bound, or where a program here is connected with that host. Any other is refused at once.

use super::State;
use std::net::{IpAddr, SocketAddr};
use unbroken_cm::{ConnId, Event, IpHeader, PortSpace, Reason};
use unbroken_nics::Place;
use unbroken_runtime::now_us;

/// How long a listener is waited for.
const WAIT_US: u64 = 1_000_000;
/// How often processes of the same runtime folder are looked at meanwhile.
const LOOK_US: u64 = 5_000;
/// Requests that wait: peers' on this side, and ids' on the other. More are refused at once.
const MAX_WAITING: usize = 256;

/// An id that waits.
struct Seeker {
    id: u32,
    /// It does not know yet which host the loopback address is to stand for, to be asked for this;
    /// `None`: its request waits.
    host_of: Option<SocketAddr>,
    until_us: u64,
}

/// A peer's request that waits.
struct Held {
    connection: ConnId,
    event: Event,
    until_us: u64,
}

/// What waits for a listener.
#[derive(Default)]
pub(super) struct Early {
    seekers: Vec<Seeker>,
    held: Vec<Held>,
    looked_us: u64,
}

impl Early {
    /// When there is something to do.
    pub(super) fn due_us(&self) -> Option<u64> {
        let held = self.held.iter().map(|held| held.until_us).min();
        let look = (!self.seekers.is_empty()).then_some(self.looked_us + LOOK_US);
        [held, look].into_iter().flatten().min()
    }
}

impl State {
    /// Nobody listens where this id wants to connect to.
    pub(super) fn wait_for_listener(&mut self, id: u32) {
        if !self.has_listener_soon(id) || !self.seek(id, None) {
            self.tell_refused(id, Reason::INVALID_SERVICE_ID);
        }
    }

    /// Nobody listens behind the loopback address, so it may still be any host's.
    pub(super) fn wait_for_host(&mut self, id: u32, destination: SocketAddr) {
        let space = self.ids.get(id).map(|id| id.space);
        let is_bound = |host: &String| {
            space.is_some_and(|space| self.ports.is_taken(host, space, destination.port()))
        };
        let soon = self.is_connected_with(|_| true) || self.network.hosts().iter().any(is_bound);
        if !soon || !self.seek(id, Some(destination)) {
            self.resolved(id, destination);
        }
    }

    /// Whether somebody may be about to listen where this id wants to connect to.
    fn has_listener_soon(&self, id: u32) -> bool {
        let Some(id) = self.ids.get(id) else { return false };
        let (Some(target), Some(destination)) = (id.target, id.destination) else { return false };
        let Some(Place::Host(host, _)) = self.network.locate(target) else { return false };
        self.ports.is_taken(&host, id.space, destination.port())
            || self.is_connected_with(|ip| self.is_same_host(ip, target))
    }

    /// Whether a program here is connected with one at such an address.
    fn is_connected_with(&self, peer: impl Fn(IpAddr) -> bool) -> bool {
        self.ids.any(|id| {
            let state = id.connection.and_then(|connection| self.cm.state(connection));
            let ip = id.target.or(id.destination.map(|address| address.ip()));
            state == Some(unbroken_cm::State::Established) && ip.is_some_and(&peer)
        })
    }

    fn is_same_host(&self, one: IpAddr, other: IpAddr) -> bool {
        match (self.network.locate(one), self.network.locate(other)) {
            (Some(Place::Host(one, _)), Some(Place::Host(other, _))) => one == other,
            _ => one == other,
        }
    }

    /// Whether a program here may be about to listen at a port that a peer asks for.
    pub(super) fn listens_soon(&self, service_id: u64, private: &[u8]) -> bool {
        let (Some((space, port)), Some(header)) =
            (PortSpace::of_service(service_id), IpHeader::parse(private))
        else {
            return false;
        };
        self.ports.is_taken(self.network.host(), space, port)
            || self.is_connected_with(|ip| self.is_same_host(ip, header.source))
    }

    fn seek(&mut self, id: u32, host_of: Option<SocketAddr>) -> bool {
        if self.early.seekers.len() >= MAX_WAITING {
            return false;
        }
        let now = now_us();
        if self.early.seekers.is_empty() {
            self.early.looked_us = now;
        }
        self.early.seekers.push(Seeker { id, host_of, until_us: now + WAIT_US });
        true
    }

    /// An id ends.
    pub(super) fn seek_no_more(&mut self, id: u32) {
        self.early.seekers.retain(|seeker| seeker.id != id);
    }

    /// Nobody listens for a request that has come. False: nothing more can wait.
    pub(super) fn hold(&mut self, connection: ConnId, event: Event) -> bool {
        if self.early.held.len() >= MAX_WAITING {
            return false;
        }
        let until_us = now_us() + WAIT_US;
        self.early.held.push(Held { connection, event, until_us });
        true
    }

    /// Somebody listens now: perhaps for what has come before.
    pub(super) fn hear_the_early(&mut self) {
        use unbroken_cm::State as Connection;
        for held in std::mem::take(&mut self.early.held) {
            // Who asked may have given up since.
            let asks = [Connection::ReqReceived, Connection::SidrReqReceived];
            if !self.cm.state(held.connection).is_some_and(|state| asks.contains(&state)) {
                continue;
            }
            let until_us = held.until_us;
            self.on_asked(held.connection, held.event, Some(until_us));
        }
    }

    /// A request is still nobody's.
    pub(super) fn hold_on(&mut self, connection: ConnId, event: Event, until_us: u64) {
        self.early.held.push(Held { connection, event, until_us });
    }

    /// Looks for listeners again, and refuses what has waited long enough.
    pub(super) fn look_for_listeners(&mut self, now: u64) {
        let (late, held) =
            std::mem::take(&mut self.early.held).into_iter().partition(|h| h.until_us <= now);
        self.early.held = held;
        for late in Vec::<Held>::into_iter(late) {
            let _ = self.cm.refuse(now, late.connection);
        }
        if self.early.seekers.is_empty() || now < self.early.looked_us + LOOK_US {
            return;
        }
        self.early.looked_us = now;
        for seeker in std::mem::take(&mut self.early.seekers) {
            let late = now >= seeker.until_us;
            if !self.seek_again(&seeker, late) {
                self.early.seekers.push(seeker);
            }
        }
    }

    /// Whether an id need not wait any more; when it is late, it need not.
    fn seek_again(&mut self, seeker: &Seeker, late: bool) -> bool {
        let Some(id) = self.ids.get(seeker.id) else { return true };
        if let Some(destination) = seeker.host_of {
            let found = self.listener_behind_loopback(id.space, destination.port()).is_some();
            if found || late {
                self.resolved(seeker.id, destination);
            }
            return found || late;
        }
        match self.request(seeker.id) {
            Ok(true) => true,
            Ok(false) if !late => false,
            _ => {
                self.tell_refused(seeker.id, Reason::INVALID_SERVICE_ID);
                true
            }
        }
    }
}
