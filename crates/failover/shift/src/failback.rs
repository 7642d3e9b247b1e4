//! Planned switches: back to the path that a QP was connected on, once that is steady again, and
//! away from NICs that are drained and from paths that lose much more than others. (Back to another
//! port of its NICs a QP migrates, if it can: `port_pairs`.)
//!
//! The worker looks at the QPs several times a second while one of them is displaced or a NIC
//! is drained, and else at the folder of drained NICs only. What a planned switch is, how it is
//! cancelled and when a QP may go home is the protocol's; when a path is steady, its health's.

use crate::core::Core;
use crate::datagram;
use crate::link;
use crate::port_pairs;
use crate::qp::{Gate, Qp};
use unbroken_failover_protocol::{Reason, SlotPath};
use unbroken_runtime::{now_us, Drains};

/// How often it is looked whether QPs can go home, or are to leave.
const LOOK_US: u64 = 50_000;
/// A path that QPs want to go back to is asked this often whether it lives: nothing else may use
/// it.
const ASK_US: u64 = 250_000;

/// What the worker keeps of it.
pub(crate) struct Failback {
    drains: Drains,
    look_at_us: u64,
    ask_at_us: u64,
}

impl Failback {
    pub(crate) fn new(core: &Core<Qp>) -> Failback {
        Failback { drains: Drains::of(&core.runtime), look_at_us: 0, ask_at_us: 0 }
    }

    /// When [`Failback::work`] is to be called, on the worker's clock.
    pub(crate) fn deadline_us(&self, core: &Core<Qp>) -> u64 {
        if core.settings.failover {
            self.look_at_us
        } else {
            u64::MAX
        }
    }

    pub(crate) fn work(&mut self, core: &Core<Qp>, clock_us: u64) {
        if clock_us < self.deadline_us(core) {
            return;
        }
        self.look_at_us = clock_us + LOOK_US;
        if self.drains.changed() {
            self.read(core);
        }
        if !core.qps.any_displaced() && !core.nics.any_drained() {
            return;
        }
        let asks = clock_us >= self.ask_at_us;
        if asks {
            self.ask_at_us = clock_us + ASK_US;
        }
        core.qps.forget_displaced();
        let _batch = core.control.batch();
        for qp in core.qps.all() {
            let Some(mut g) = qp.gate_now() else { continue };
            if g.datagram.is_some() {
                leave_drained(&qp, &mut g);
            } else if g.link.is_some() {
                leave_or_fail_back(&qp, &mut g, clock_us, asks);
            }
        }
    }

    fn read(&self, core: &Core<Qp>) {
        match self.drains.all() {
            Ok(names) => (0..core.nics.count())
                .for_each(|nic| core.nics.set_drained(nic, names.contains(&core.nics.name(nic)))),
            Err(e) => core.events.complain("which NICs are drained cannot be read", &e),
        }
    }
}

/// A UD QP goes to a NIC that is not drained; datagrams on their way may be lost, as UD has it.
fn leave_drained(qp: &Qp, g: &mut Gate) {
    let core = &qp.core;
    if core.nics.drained(g.nic) && core.nics.undrained_elsewhere(g.nic) {
        datagram::leave(qp, g, Reason::Drain);
    }
}

/// An RC QP leaves a drained NIC, or goes back where it came from.
fn leave_or_fail_back(qp: &Qp, g: &mut Gate, clock_us: u64, asks: bool) {
    let core = &qp.core;
    let Some(link) = &g.link else { return };
    let executor = link.executor();
    let Some(path) = executor.active_path() else { return };
    let drained = |path: SlotPath| core.nics.drained(path.local.into());
    let peer = link.peer().clone();
    let grey = |path: SlotPath| peer.health().is_grey(path);
    let reason = match drained(path) {
        true => Some(Reason::Drain),
        false => peer.health().is_shunned(path).then_some(Reason::Loss),
    };
    if let Some(reason) = reason {
        core.qps.note_displaced();
        link::plan(qp, g, reason, |to| !drained(to) && (reason == Reason::Drain || !grey(to)));
        return;
    }
    let Some(home) = executor.home().filter(|_| core.settings.fails_back) else {
        if let Some(reason) = fresh_life(qp, g, clock_us) {
            link::plan(qp, g, reason, |to| to == path);
        }
        return;
    };
    core.qps.note_displaced();
    if drained(home) || grey(home) {
        return;
    }
    let mut health = link.peer().health();
    let steady = health.is_steady(clock_us, home);
    if asks && !health.is_dead(home) {
        health.ask(clock_us, home, clock_us);
    }
    drop(health);
    if executor.may_go_home(now_us(), steady).is_some() {
        link::plan(qp, g, Reason::Failback, |to| to == home);
    }
}

/// Why a QP on the path of its program is to get a fresh life there, if it is: for the sake of its
/// port pairs.
fn fresh_life(qp: &Qp, g: &mut Gate, clock_us: u64) -> Option<Reason> {
    if port_pairs::lacks_pair(qp, g, clock_us) {
        return Some(Reason::PortPair);
    }
    if !qp.core.settings.fails_back || !port_pairs::is_displaced(qp, g, clock_us) {
        return None;
    }
    qp.core.qps.note_displaced();
    port_pairs::is_stranded(qp, g, clock_us).then_some(Reason::Failback)
}
