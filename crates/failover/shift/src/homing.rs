//! Planned switches: back to the path that a QP was connected on, once that is steady again, and
//! away from NICs that are drained. (Back to another port of its NICs a QP migrates, if it can:
//! `lanes`.)
//!
//! The worker looks at the QPs several times a second while one of them is away from home or a NIC
//! is drained, and else at the folder of drained NICs only. What a planned switch is, how it is
//! cancelled and when a QP may go home is `path`'s; when a path is steady, `path::health`'s.

use crate::core::Core;
use crate::datagram;
use crate::lanes;
use crate::link;
use crate::qp::{Gate, Qp};
use std::sync::Arc;
use unbroken_failover_protocol::{Reason, SlotPath};
use unbroken_runtime::{now_us, Drains};

/// How often it is looked whether QPs can go home, or are to leave.
const LOOK_US: u64 = 50_000;
/// A path that QPs want to go back to is asked this often whether it lives: nothing else may use
/// it.
const ASK_US: u64 = 250_000;

/// What the worker keeps of it.
pub(crate) struct Homing {
    drains: Drains,
    look_at_us: u64,
    ask_at_us: u64,
}

impl Homing {
    pub(crate) fn new(core: &Core) -> Homing {
        Homing { drains: Drains::of(&core.runtime), look_at_us: 0, ask_at_us: 0 }
    }

    /// When [`Homing::work`] is to be called, on the worker's clock.
    pub(crate) fn deadline_us(&self, core: &Core) -> u64 {
        if core.failover {
            self.look_at_us
        } else {
            u64::MAX
        }
    }

    pub(crate) fn work(&mut self, core: &Arc<Core>, clock_us: u64) {
        if clock_us < self.deadline_us(core) {
            return;
        }
        self.look_at_us = clock_us + LOOK_US;
        if self.drains.changed() {
            self.read(core);
        }
        if !core.anybody_away() && !core.drains_any() {
            return;
        }
        let asks = clock_us >= self.ask_at_us;
        if asks {
            self.ask_at_us = clock_us + ASK_US;
        }
        core.forget_away();
        let _batch = core.batch();
        for qp in core.all_qps() {
            let mut g = qp.gate();
            if g.datagram.is_some() {
                leave_drained(&qp, &mut g);
            } else if g.link.is_some() {
                home_or_away(&qp, &mut g, clock_us, asks);
            }
        }
    }

    fn read(&self, core: &Core) {
        match self.drains.all() {
            Ok(names) => (0..core.nic_count())
                .for_each(|nic| core.set_drained(nic, names.contains(&core.nic_name(nic)))),
            Err(e) => core.complain("which NICs are drained cannot be read", &e),
        }
    }
}

/// A UD QP goes to a NIC that is not drained; datagrams on their way may be lost, as UD has it.
fn leave_drained(qp: &Qp, g: &mut Gate) {
    let core = &qp.core;
    if core.drained(g.nic) && core.undrained_elsewhere(g.nic) {
        datagram::leave(qp, g, Reason::Drain);
    }
}

/// An RC QP leaves a drained NIC, or goes back where it came from.
fn home_or_away(qp: &Qp, g: &mut Gate, clock_us: u64, asks: bool) {
    let core = &qp.core;
    let Some(link) = &g.link else { return };
    let executor = link.executor();
    let Some(path) = executor.active_path() else { return };
    let drained = |path: SlotPath| core.drained(path.local.into());
    if drained(path) {
        core.note_away();
        link::plan(qp, g, Reason::Drain, |to| !drained(to));
        return;
    }
    let Some(home) = executor.home().filter(|_| core.goes_home) else {
        if core.goes_home && lanes::is_away(qp, g, clock_us) {
            core.note_away();
            if lanes::is_stranded(qp, g, clock_us) {
                link::plan(qp, g, Reason::Failback, |to| to == path);
            }
        }
        return;
    };
    core.note_away();
    if drained(home) {
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
