//! The logical QP: what the application holds.
//!
//! All that can change sits behind one lock, the *gate*: the physical QP that carries the traffic
//! now, what the application set, and the [`Link`] to the peer that decides about switches. A switch
//! runs under the gate, in whichever thread noticed the failure first (a poster whose post failed,
//! or the worker), so no thread can post to a QP that is being left, and none holds a completion
//! back: completions go from the devices straight into the application's CQ.
//!
//! A post takes the gate and the device's own lock. One of a C program to a device of the machine
//! takes neither: it goes by the [`Lane`], whose lock is the only one between the program and its
//! provider. The lane is closed under the gate where posts are to come here first: while sends are
//! held, and while nothing is outstanding, so that the next send is heard of. Whatever else is
//! unusual is known to the physical QP, which leaves such a post to this path.
//!
//! States, as the application sees them, are those of the physical QP, except that a QP under a
//! switch says RTS.

pub(crate) mod backup;
mod create;
mod events;
mod held;
mod lifecycle;
mod modify;
mod post;
mod query;
pub(crate) mod seek;
mod seeks;

use crate::async_events::AsyncElement;
use crate::backups::Backup;
use crate::contexts::ContextState;
use crate::core::Core;
use crate::datagram::Datagram;
use crate::fitness::Unfit;
use crate::link::Link;
use crate::qps::LogicalId;
use crate::random;
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use unbroken_directory::QpEntry;
use unbroken_failover_protocol::PortPath;
use unbroken_runtime::now_us;
use unbroken_types::{Gid, PdHandle, QpCaps, QpState, QpType, Wc, WcStatus, PSN_MASK};
use unbroken_verbs::{Backlog, Cq, Lane, QpEvent, QpInit, QpModify, ResumableQp, Srq};

/// What the application asks for when it makes a QP.
#[derive(Clone)]
pub struct QpRequest {
    /// Transport.
    pub qp_type: QpType,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Protection domain.
    pub pd: PdHandle,
    /// Completions of sends.
    pub send_cq: Arc<Cq>,
    /// Completions of receives.
    pub recv_cq: Arc<Cq>,
    /// Where receives are taken from, in place of a queue of its own.
    pub srq: Option<Arc<Srq>>,
    /// Every send makes a WC.
    pub sq_sig_all: bool,
    /// What asynchronous events of the QP carry: the address of its `ibv_qp`.
    pub cookie: u64,
    /// It fails with its NIC, failover or not.
    pub plain: bool,
    /// UD: see [`QpInit::management`].
    pub management: bool,
}

use seeks::Seeks;

/// What carries the QP and what was set.
pub(crate) struct Gate {
    /// The physical QP of the present life.
    pub(crate) phys: Arc<dyn ResumableQp>,
    /// Index of its NIC.
    pub(crate) nic: usize,
    /// The port of that NIC, from 1. A QP that has moved begins on port 1.
    pub(crate) port: u8,
    /// Since when it uses that port, if it has migrated there.
    pub(crate) on_pair_since_us: u64,
    /// The port that it has migrated from, which nobody has looked at yet.
    pub(crate) left_port: Option<u8>,
    /// Where it was when its progress was looked at last.
    pub(crate) looked_at: Option<PortPath>,
    /// Packets of the physical QP that were acknowledged, and sent again, by then.
    pub(crate) sent: (u64, u64),
    /// All attributes that the application set, the latest of each.
    pub(crate) app: QpModify,
    /// Who the peer is and how to move; `None` while not connected or not protected.
    pub(crate) link: Option<Box<Link>>,
    /// UD: how to move; `None` while not protected.
    pub(crate) datagram: Option<Box<Datagram>>,
    /// Why the QP is not protected, if it is not.
    pub(crate) why_not: &'static str,
    /// It is connected, and its peer is not known yet.
    pub(crate) seeks: Option<Seeks>,
    /// The QP has failed for good: its WRs were completed with the original error, and whatever is
    /// posted flushes.
    pub(crate) failed: bool,
    /// The log has it that this connection has ended with its NIC.
    told_lost: bool,
    destroyed: bool,
    /// Whether sends are held and not posted, whatever the physical QP would say to them.
    pub(crate) holds: Holds,
    /// Physical QPs beside that of the present life.
    pub(crate) backup: Option<Backup>,
    /// Which connection of the QP this is: it changes with each RESET, so that messages of an
    /// earlier one are told apart.
    connection: u32,
    /// The GID that the program has connected it by, where that is not its NIC's: it is entered
    /// under that, too.
    alias: Option<Gid>,
}

/// Whether sends are held. The QP's lane knows it, too.
pub(crate) struct Holds {
    now: bool,
    lane: Option<Arc<Lane>>,
}

impl Holds {
    pub(crate) fn new(lane: Option<Arc<Lane>>) -> Holds {
        Holds { now: false, lane }
    }

    pub(crate) fn get(&self) -> bool {
        self.now
    }

    pub(crate) fn set(&mut self, holds: bool) {
        if self.now == holds {
            return;
        }
        self.now = holds;
        match &self.lane {
            Some(lane) if holds => lane.close(Lane::HELD),
            Some(lane) => lane.open(Lane::HELD),
            None => {}
        }
    }
}

impl Gate {
    /// The physical QP uses that port now.
    pub(crate) fn use_port(&mut self, port: Option<u8>) {
        if let Some(port) = port.filter(|port| *port != self.port) {
            self.left_port = Some(self.port);
            (self.port, self.on_pair_since_us) = (port, now_us());
        }
    }

    /// The QP is in ERR, and stays there until the program resets it: it has failed for good, or
    /// the program has moved it there.
    fn ended(&self) -> bool {
        self.failed || self.app.rc.state == Some(QpState::Err)
    }

    /// The program has destroyed it, or is in the middle of that.
    pub(crate) fn is_destroyed(&self) -> bool {
        self.destroyed
    }

    /// It will have no later life in this connection.
    pub(crate) fn is_over(&self) -> bool {
        self.ended() || self.destroyed
    }

    /// The program has not connected it yet.
    fn is_early(&self) -> bool {
        matches!(self.app.rc.state, None | Some(QpState::Reset | QpState::Init))
    }
}

/// A verb of control that takes longer is not waited for by who looks after other QPs, too.
const VERB_TIME_US: u64 = 5_000;
/// How long a thread waits for a gate before it looks again whether the gate's owner is in a verb of
/// control. A thread that is handed the gate on a busy core needs several time slices for that.
const GATE_WAIT_US: u64 = 50_000;

/// A logical QP.
pub struct Qp {
    pub(crate) core: Arc<Core<Qp>>,
    context: Weak<ContextState>,
    nic: usize,
    qpn: u32,
    pub(crate) init: QpInit,
    /// NICs that it cannot go to.
    pub(crate) unfit: Unfit,
    gate: Mutex<Gate>,
    /// Who made it looks after its failures, and wanted no protection.
    is_plain: bool,
    /// It is not in the list of QPs with sends outstanding, and goes there with the next send. Never
    /// set of a plain one: nobody asks how far that is.
    idle: AtomicBool,
    /// How posts of C programs reach the physical QP, where they can do so with nothing in between.
    lane: Option<Arc<Lane>>,
    /// Since when a thread of the program has the gate in a verb of control; 0: none does.
    in_verb_since_us: AtomicU64,
    cookie: AtomicU64,
}

impl Qp {
    /// Tells the directory which connection of the QP this is. It waits for nobody, so it may be
    /// done under the gate, which keeps what is told in its order.
    fn publish_connection(&self, connection: u32) {
        self.publish(self.gid(), QpEntry::new(self.core.incarnation, connection));
    }

    fn publish(&self, gid: Gid, entry: QpEntry) {
        let Some(directory) = &self.core.directory else { return };
        if let Err(e) = directory.publish_qp(gid, self.qpn, entry) {
            self.core.events.complain_of_directory(
                "the directory does not take a QP, which stays unprotected",
                &e,
            );
        }
    }

    /// The logical QPN.
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Queue sizes.
    pub fn caps(&self) -> QpCaps {
        self.init.caps
    }

    /// Sets what asynchronous events of the QP carry.
    pub fn set_cookie(&self, cookie: u64) {
        self.cookie.store(cookie, Ordering::Release);
    }

    pub(crate) fn id(&self) -> LogicalId {
        (self.nic, self.qpn)
    }

    /// A first PSN that a stranger cannot guess.
    pub fn draw_psn(&self) -> u32 {
        random::number() & PSN_MASK
    }

    /// The GID of its default NIC.
    pub fn gid(&self) -> Gid {
        self.core.nics.gid(self.nic)
    }

    pub(crate) fn uses_cq(&self, cq: &Arc<Cq>) -> bool {
        Arc::ptr_eq(&self.init.send_cq, cq) || Arc::ptr_eq(&self.init.recv_cq, cq)
    }

    pub(crate) fn uses_srq(&self, srq: &Arc<Srq>) -> bool {
        self.init.srq.as_ref().is_some_and(|s| Arc::ptr_eq(s, srq))
    }

    /// What changes of the QP, under its lock.
    pub(crate) fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock()
    }

    /// The same for who looks after many QPs, and waits for no device: none while a program's thread
    /// is in a verb of control of this QP that its NIC does not answer.
    ///
    /// The lock is fair: a thread that has waited for about a millisecond gets it next. So a program
    /// that posts without a pause cannot keep the worker from its gate, even on one core.
    pub(crate) fn gate_now(&self) -> Option<MutexGuard<'_, Gate>> {
        let mut gate = self.try_gate();
        while gate.is_none() {
            let wait_us = match self.in_verb_since_us.load(Ordering::Acquire) {
                0 => GATE_WAIT_US,
                since_us => (since_us + VERB_TIME_US).saturating_sub(now_us()),
            };
            if wait_us == 0 {
                return None;
            }
            gate = self.gate.try_lock_for(Duration::from_micros(wait_us));
        }
        gate
    }

    /// The caller, who has the gate, is in a verb of control until that is dropped.
    fn enter_verb(&self) -> impl Drop + '_ {
        struct InVerb<'a>(&'a AtomicU64);
        impl Drop for InVerb<'_> {
            fn drop(&mut self) {
                self.0.store(0, Ordering::Release);
            }
        }
        self.in_verb_since_us.store(now_us(), Ordering::Release);
        InVerb(&self.in_verb_since_us)
    }

    /// The same, if no other thread has it.
    pub(crate) fn try_gate(&self) -> Option<MutexGuard<'_, Gate>> {
        self.gate.try_lock()
    }

    /// Sends are outstanding from now on, so that the QP can stall. Under the gate: a post must not
    /// be overtaken by what was seen before it.
    #[inline]
    fn set_busy(&self, _gate: &Gate) {
        if self.idle.load(Ordering::Relaxed) {
            self.idle.store(false, Ordering::Relaxed);
            self.core.qps.add_busy(self.id());
            if let Some(lane) = &self.lane {
                lane.open(Lane::IDLE);
            }
        }
    }

    /// Nothing was outstanding. Thousands of idle QPs cost nothing. False: something is by now,
    /// which has come by the lane.
    pub(crate) fn set_idle(&self, _gate: &Gate) -> bool {
        let idle = self.lane.as_ref().is_none_or(|lane| lane.close_if_idle());
        self.idle.store(idle, Ordering::Relaxed);
        idle
    }

    /// Nothing carries the QP any more.
    fn leave_lane(&self) {
        if let Some(lane) = &self.lane {
            lane.carry_by(None);
        }
    }

    /// How posts of a C program reach the physical QP, where they can do so with nothing in
    /// between.
    pub fn lane(&self) -> Option<&Arc<Lane>> {
        self.lane.as_ref()
    }

    fn flushed(&self, wr_id: u64, status: WcStatus) -> Wc {
        Wc { wr_id, status: status as u32, qp_num: self.qpn, ..Wc::default() }
    }

    /// Completes a backlog as a failed QP does: the first send with the original error, all else
    /// flushed.
    pub(crate) fn flush_backlog(&self, backlog: &Backlog, status: WcStatus) {
        let mut status = status;
        for s in &backlog.sends {
            self.init.send_cq.push(self.flushed(s.wr_id, status), false);
            status = WcStatus::WrFlushErr;
        }
        for r in &backlog.recvs {
            self.init.recv_cq.push(self.flushed(r.wr_id, WcStatus::WrFlushErr), false);
        }
    }

    /// A QP with an SRQ takes nothing from it any more.
    pub(crate) fn take_no_more(&self) {
        if self.init.srq.is_some() {
            self.raise(QpEvent::LastWqeReached);
        }
    }

    /// Raises an asynchronous event.
    fn raise(&self, event: QpEvent) {
        if let Some(context) = self.context.upgrade() {
            context.raise(event as u32, AsyncElement::Qp(self.cookie.load(Ordering::Acquire)));
        }
    }

    pub(crate) fn purge(&self) {
        self.init.send_cq.purge(self.qpn);
        self.init.recv_cq.purge(self.qpn);
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.leave_lane(); // which has what carries the QP, which has the lane
    }
}

/// Overwrites in `all` what `change` sets.
pub(crate) fn merge(all: &mut QpModify, change: &QpModify) {
    macro_rules! take {
        ($($field:ident).+) => {
            if change.$($field).+.is_some() { all.$($field).+ = change.$($field).+; }
        };
    }
    take!(rc.state);
    take!(rc.dest_qpn);
    take!(rc.rq_psn);
    take!(rc.sq_psn);
    take!(rc.mtu);
    take!(rc.timeout);
    take!(rc.retry_cnt);
    take!(rc.rnr_retry);
    take!(rc.min_rnr_timer);
    take!(rc.max_rd_atomic);
    take!(rc.max_dest_rd_atomic);
    take!(rc.access);
    take!(path);
    take!(qkey);
    if change.rc.state == Some(QpState::Sqd) {
        all.sqd_notify = change.sqd_notify;
    }
    take!(port);
}
