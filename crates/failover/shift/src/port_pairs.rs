//! Port pairs: a QP goes over other ports of its NICs by automatic path migration, where they have
//! several, before it goes to other NICs. Port 1 here and port 1 there are a pair, and so on.
//!
//! What is to be done, the failover protocol's `port_pairs` decides; here is
//! how it is done. A pair is *loaded* as the alternate path with the attributes by which a program
//! connects a QP, or a switch the next life of it; later by the worker, which looks at all QPs
//! where something has changed, and once a second, when it also asks the pairs that are not in use
//! whether they live. Where the pair in use is dead, by an event of its port or by what probes say,
//! the QP is asked to migrate; if it cannot, it leaves the path, as where there is one pair.
//!
//! Where a QP belongs, its *home*, is the pair that the program has connected; or, where QPs are to
//! be spread, one by the number of the end with the lower address, so that both ends know it, and
//! QPs that are made one after the other take turns.
//!
//! The program sees nothing of it: it has not asked for an alternate path.
//!
//! An end that the program leaves in RTR is loaded when it is connected, and later not: verbs allow
//! that in RTS only. After a migration such a QP goes back by a planned switch, to a fresh life on
//! the same path ([`is_stranded`]). Where its peer, or the peer's port, was not known yet when it
//! was connected, one such switch gives it the pair that it lacks ([`lacks_pair`]).

use crate::control_endpoint::LocalPort;
use crate::nics::NicTable;
use crate::peer::Peer;
use crate::qp::{Gate, Qp};
use crate::settings::{PortUse, Settings};
use std::sync::Arc;
use unbroken_failover_protocol::choice::may_go_home;
use unbroken_failover_protocol::port_pairs::{PortPairs, Step};
use unbroken_failover_protocol::{Policy, PortPath, SlotPath, SlotTable};
use unbroken_runtime::now_us;
use unbroken_types::{PathMigState, QpState};
use unbroken_verbs::{QpModify, RcModify};

/// Local ACK timeout of a pair that is loaded before the program has said its own, by its code: 67
/// ms.
const TIMEOUT_CODE: u8 = 14;

/// Until a pair is loaded after a migration. Who is in REARM no longer says that it has migrated:
/// the peer must have heard of it before, and that is said again and again for 0.13 s. And the
/// death of a port may be told just after it.
const SETTLE_US: u64 = 150_000;

/// The pair that a fresh life begins on.
const FIRST: u8 = 0;

/// The path that a QP is on, with its ports, and what the program wants.
pub(crate) struct PathPorts<'a> {
    pub(crate) nics: &'a NicTable,
    pub(crate) settings: &'a Settings,
    /// Its number, as the program knows it.
    pub(crate) qpn: u32,
    pub(crate) peer: &'a Peer,
    /// The path that it is on.
    pub(crate) path: SlotPath,
    /// The path that the program has connected.
    pub(crate) default: SlotPath,
    /// The port that it uses, from 1; and since when, if it has migrated there.
    pub(crate) port: u8,
    pub(crate) since_us: u64,
    /// The latest of all attributes that the program has set.
    pub(crate) app: &'a QpModify,
}

/// The port pair of a port.
pub(crate) fn pair_of(port: u8) -> u8 {
    port.saturating_sub(1)
}

impl PathPorts<'_> {
    /// How many pairs the path has. A program that has connected ports of different numbers is on
    /// none.
    fn count(&self) -> u8 {
        let count = self
            .nics
            .port_count(self.path.local.into())
            .min(self.peer.port_count(self.path.remote));
        let dest = self.app.path.map(|path| path.dest_gid);
        let straight =
            self.peer.port(self.path.remote, self.connected()).map(|port| port.gid) == dest;
        if self.path == self.default && !straight {
            1
        } else {
            count
        }
    }

    /// The pair that the program has connected; on other paths the first.
    fn connected(&self) -> u8 {
        match self.app.port {
            Some(port) if self.path == self.default => pair_of(port),
            _ => 0,
        }
    }

    /// The pair where the QP belongs.
    fn home(&self) -> u8 {
        let (Some(there), Some(dest_qpn), true) =
            (self.app.path, self.app.rc.dest_qpn, self.settings.port_use == PortUse::Spread)
        else {
            return self.connected();
        };
        let own = (self.nics.gid(self.default.local.into()), self.qpn);
        let lower = own.min((self.nics.first_port(there.dest_gid), dest_qpn));
        // Devices count QPs by one, or by the number of their NICs.
        ((lower.1 ^ lower.1 >> 2) % u32::from(self.count().max(1))) as u8
    }

    fn timeout(&self) -> u8 {
        self.app.rc.timeout.map_or(TIMEOUT_CODE, |code| self.settings.protected_timeout(code))
    }

    /// What is known, where the device has these attributes.
    fn pairs(&self, clock_us: u64, attrs: &QpModify) -> PortPairs {
        let (home, count) = (self.home(), self.count());
        let reached =
            |pair| self.peer.port(self.path.remote, pair).is_some_and(|port| port.qpn != 0);
        let reached: u8 = (0..count).filter(|pair| reached(*pair)).map(|pair| 1 << pair).sum();
        let health = self.peer.health();
        let port_path = |pair| PortPath { path: self.path, port_pair: pair };
        let alive = (0..count)
            .filter(|pair| health.may_carry(port_path(*pair)))
            .map(|pair| 1 << pair)
            .sum::<u8>();
        // With another timeout than the program's it is to be loaded anew.
        let loaded = attrs.alternate.filter(|_| attrs.rc.alternate == Some(self.timeout()));
        PortPairs {
            now: pair_of(self.port),
            home,
            count,
            migration: attrs.rc.migration.unwrap_or(PathMigState::Migrated),
            loaded: loaded.map(|path| pair_of(path.port)),
            alive: alive & reached,
            home_is_steady: self.settings.fails_back && health.is_steady(clock_us, port_path(home)),
        }
    }

    /// What the device is to be given to be ARMED for this pair.
    fn load(&self, pair: u8, change: &mut QpModify) {
        let (Some(device), Some(to)) =
            (self.nics.device(self.path.local.into()), self.peer.port(self.path.remote, pair))
        else {
            return;
        };
        let app = self.app.path.unwrap_or_default();
        change.alternate = Some(app.elsewhere(pair + 1, device.gid_index(), to.gid, to.lid));
        (change.rc.alternate, change.rc.migration) =
            (Some(self.timeout()), Some(PathMigState::Rearm));
    }

    /// Adds to the change by which a QP with these attributes is connected what it takes to be
    /// ARMED.
    pub(crate) fn connect(&self, clock_us: u64, attrs: &QpModify, change: &mut QpModify) {
        change.rc.migration = None;
        if let Step::Load(pair) = self.pairs(clock_us, attrs).step() {
            self.load(pair, change);
        }
    }
}

/// The port pairs of these paths become ways that can be asked.
pub(crate) fn know(nics: &NicTable, peer: &Peer, paths: &SlotTable, clock_us: u64) {
    if nics.several_ports() {
        paths.iter().for_each(|(_, path)| know_path(nics, peer, path, clock_us));
    }
}

fn know_path(nics: &NicTable, peer: &Peer, path: SlotPath, clock_us: u64) {
    let pairs = 1..nics.port_count(path.local.into()).min(peer.port_count(path.remote));
    let at = |pair| LocalPort { nic: path.local.into(), pair };
    let mut health = peer.health();
    for pair in pairs {
        health.add(PortPath { path, port_pair: pair });
        health.set_port(clock_us, path.local, pair, nics.port_works(at(pair)));
    }
}

/// Whether a QP is on another pair than its own, so that it may want to go back.
pub(crate) fn is_displaced(qp: &Qp, g: &mut Gate, clock_us: u64) -> bool {
    with(qp, g, clock_us, |ports, _| ports.home() != pair_of(ports.port)) == Some(true)
}

/// Whether a QP could go back to the program's pair, but cannot be ARMED, or its peer cannot: so a
/// migration will not take it there.
pub(crate) fn is_stranded(qp: &Qp, g: &mut Gate, clock_us: u64) -> bool {
    if !is_displaced(qp, g, clock_us) {
        return false;
    }
    let may = with(qp, g, clock_us, |ports, attrs| {
        let pairs = ports.pairs(clock_us, attrs);
        let may_go = may_go_home(Policy::usual(), now_us(), ports.since_us, pairs.home_is_steady);
        pairs.migration != PathMigState::Armed && pairs.may_carry(FIRST) && may_go
    });
    may == Some(true)
}

/// Whether a QP that the program leaves in RTR has been connected without another pair, and could
/// have one now. Asked before its first switch only: what a fresh life did not bring, a second one
/// will not.
pub(crate) fn lacks_pair(qp: &Qp, g: &mut Gate, clock_us: u64) -> bool {
    let Some(lqp) = g.link.as_ref().map(|link| link.executor().lqp()) else { return false };
    let (epoch, since_us) = (lqp.epoch(), lqp.on_path_since_us());
    let lacks = epoch == 0
        && g.phys.state() == QpState::Rtr
        && with(qp, g, clock_us, |ports, attrs| {
            let pairs = ports.pairs(clock_us, attrs);
            let has_migrated = ports.since_us > 0;
            !has_migrated
                && pairs.may_carry(FIRST)
                && pairs.migration == PathMigState::Migrated
                && matches!(pairs.step(), Step::Load(_))
        }) == Some(true);
    if lacks {
        qp.core.qps.note_displaced();
    }
    // The program may be about to go on to RTS, where it is loaded without that.
    lacks && may_go_home(Policy::usual(), now_us(), since_us, true)
}

/// The way that carries a connected QP now, while it is not between two paths.
pub(crate) fn port_path(g: &Gate) -> Option<PortPath> {
    let path = g.link.as_ref()?.executor().active_path()?;
    Some(PortPath { path, port_pair: pair_of(g.port) })
}

/// Where a connected QP is, if it is on a path, with its physical QP's attributes; what the device
/// has done by itself is seen by that. That it has left its home is a failure of that pair,
/// whichever end has found it: it must be steady before either goes back.
fn with<R>(
    qp: &Qp,
    g: &mut Gate,
    clock_us: u64,
    f: impl FnOnce(&PathPorts<'_>, &QpModify) -> R,
) -> Option<R> {
    if qp.core.nics.port_count(g.nic) < 2 {
        return None;
    }
    let link = g.link.as_ref()?;
    let path = link.executor().active_path()?;
    let default = link.executor().lqp().slots().get(0)?;
    let attrs = g.phys.query().attrs;
    g.use_port(attrs.port);
    let left = g.left_port.take().map(pair_of);
    let ports = PathPorts {
        nics: &qp.core.nics,
        settings: &qp.core.settings,
        qpn: qp.qpn(),
        peer: g.link.as_ref()?.peer(),
        path,
        default,
        port: g.port,
        since_us: g.on_pair_since_us,
        app: &g.app,
    };
    if let Some(pair) = left.filter(|pair| *pair == ports.home() && *pair != pair_of(ports.port)) {
        ports.peer.health().fails(clock_us, PortPath { path, port_pair: pair });
    }
    Some(f(&ports, &attrs))
}

/// Does what is to be done of a QP whose pair works. Gives whether something was.
pub(crate) fn tend(qp: &Qp, g: &mut Gate, clock_us: u64) -> bool {
    let rts = g.phys.state() == QpState::Rts;
    let change = with(qp, g, clock_us, |ports, attrs| {
        let mut change = QpModify::default();
        if !rts {
            return None;
        }
        match ports.pairs(clock_us, attrs).step() {
            Step::Stay => return None,
            Step::Load(_) if now_us() < ports.since_us + SETTLE_US => return None,
            Step::Load(pair) => ports.load(pair, &mut change),
            Step::Migrate => change.rc.migration = Some(PathMigState::Migrated),
        }
        Some(change)
    });
    change.flatten().is_some_and(|change| ask(qp, g, &change))
}

/// The pair in use is dead. True: the QP is on another one, and need not leave its path.
pub(crate) fn leave(qp: &Qp, g: &mut Gate, clock_us: u64, dead: u8) -> bool {
    let may = with(qp, g, clock_us, |ports, attrs| {
        let pairs = ports.pairs(clock_us, attrs);
        (pairs.now != dead && pairs.may_carry(pairs.now), pairs.may_leave())
    });
    match may {
        Some((true, _)) => true,
        Some((false, true)) => {
            let rc = RcModify { migration: Some(PathMigState::Migrated), ..RcModify::default() };
            ask(qp, g, &QpModify { rc, ..QpModify::default() })
        }
        _ => false,
    }
}

/// Has the device do it. What it refuses, since the peer or the port have just changed, is tried
/// again later, or the path is left.
fn ask(qp: &Qp, g: &mut Gate, change: &QpModify) -> bool {
    let done = g.phys.modify(change);
    if let Err(e) = &done {
        qp.core.events.complain("a QP cannot be given another port pair", e);
    }
    g.use_port(g.phys.query().attrs.port);
    done.is_ok()
}

/// Asks the pairs of a QP's path that it does not use whether they live.
pub(crate) fn ask_others(qp: &Qp, g: &mut Gate, clock_us: u64) {
    let asked = with(qp, g, clock_us, |ports, _| {
        (0..ports.count())
            .filter(|pair| *pair != pair_of(ports.port))
            .map(|pair| PortPath { path: ports.path, port_pair: pair })
            .collect::<Vec<_>>()
    });
    let Some(peer) = g.link.as_ref().map(|link| Arc::clone(link.peer())) else { return };
    let mut health = peer.health();
    for port_path in asked.unwrap_or_default() {
        if health.may_carry(port_path) {
            health.ask(clock_us, port_path, clock_us);
        }
    }
}
