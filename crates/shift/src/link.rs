//! The link of a logical QP to its peer: carries out what `path` decides.
//!
//! All functions run under the QP's gate. [`run`] fetches the actions of the state machine and does them on the devices; answers go back
//! at once, so a whole step of a switch (quiesce, open, adopt) happens in one call, in the thread that noticed the failure.
//!
//! Where the outstanding WRs are, at any time: in the physical QP of the gate, or, between `Quiesce` and `Open` (and while no path is
//! alive), in `backlog`. What the application posts meanwhile is appended there, so nothing is refused and order is kept.

use crate::core::Core;
use crate::explain;
use crate::peer::Peer;
use crate::qp::{Gate, Qp};
use crate::worker::Job;
use std::sync::Arc;
use unbroken_path::health::Verdict;
use unbroken_path::message::{Body, RefuseReason};
use unbroken_path::silence::{Look, Silence};
use unbroken_path::{
    Action, Belief, Config, Endpoint, LogicalQp, Message, OpenError, Opened, QuiesceError, Quiesced, Reason, SlotPath,
    SlotTable, State, Switched,
};
use unbroken_roce::{check_send, Progress, RecvEntry, SendEntry};
use unbroken_telemetry::{now_us, Switch, SwitchKind, What};
use unbroken_types::{QpState, WcStatus, PSN_MASK};
use unbroken_verbs::{Backlog, Error, QpModify, RcModify, RecvWr, Result, SendBatch};

/// Actions that one call may carry out; a switch over every slot needs fewer.
const MAX_ACTIONS: usize = 1024;

/// The first repetition of a Hello, over another path: one that waits there for a thread without a core is overtaken.
const HELLO_MIN_US: u64 = 300;

/// A switch is reported when something moved on the new path, or, on an idle QP, after this time.
const REPORT_WAIT_US: u64 = 1_000_000;
/// How often that is looked at: first, and at most.
const REPORT_LOOK_US: u64 = 500;
/// See `REPORT_LOOK_US`.
const REPORT_LOOK_MAX_US: u64 = 20_000;

/// A switch that is done but not yet reported.
struct Pending {
    switched: Switched,
    replayed: u32,
    /// When to look next, and how long after the last look.
    look_at_us: u64,
    look_us: u64,
}

/// One end's link.
pub(crate) struct Link {
    lqp: LogicalQp,
    peer: Arc<Peer>,
    silence: Silence,
    /// The transport of the present life has given up with this status, and the path has been asked whether it lives.
    gave_up: Option<WcStatus>,
    /// What is outstanding while no physical QP holds it.
    backlog: Option<Backlog>,
    pending: Option<Pending>,
    /// First PSN of our requests in this epoch.
    sq_psn: u32,
    replayed: u32,
    /// The peer's endpoints were there when last looked for.
    ready: bool,
    /// When the worker will look at this QP, as far as it has been told.
    told_us: Option<u64>,
}

impl Link {
    /// The link of a QP with that connection number to the QP `them`, or why there can be none.
    /// A QP that is not where its number says (`foreign`) needs the peer's word before anything can be sent: it waits longer for it.
    pub(crate) fn new(
        qp: &Qp,
        connection: u32,
        them: Endpoint,
        foreign: bool,
    ) -> std::result::Result<Link, &'static str> {
        let core = &qp.core;
        let peer = core.peers.get(core, them.incarnation).ok_or("the peer's process is not in the directory")?;
        let remote =
            peer.index_of(them.gid).ok_or("the peer's process does not have the NIC that the QP is connected to")?;
        let me = Endpoint { gid: qp.gid(), qpn: qp.qpn(), incarnation: core.incarnation, connection };
        let default = SlotPath { local: qp.id().0 as u8, remote };
        let lower = (me.gid, me.qpn) <= (them.gid, them.qpn);
        let nics = core.nic_count().min(255) as u8;
        let table = match me == them {
            true => SlotTable::to_itself(default.local, nics),
            false => SlotTable::new(default, nics, peer.nic_count(), lower),
        };
        {
            let mut health = peer.health();
            table.iter().for_each(|(_, path)| health.add(path));
            let unusable = (0..nics).filter(|nic| !core.usable(usize::from(*nic)));
            unusable.for_each(|nic| health.set_nic(now_us(), nic, false));
        }
        let mut config = Config { hello_min_us: HELLO_MIN_US, ..Config::default() };
        if foreign {
            config.unknown_grace_us = config.peer_silence_us;
        }
        let lqp = LogicalQp::new(me, them, table, config, now_us());
        core.inbox.put(Job::Connect(qp.id()));
        Ok(Link {
            lqp,
            peer,
            silence: Silence::default(),
            gave_up: None,
            backlog: None,
            pending: None,
            sq_psn: 0,
            replayed: 0,
            ready: false,
            told_us: None,
        })
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.lqp.epoch()
    }

    pub(crate) fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// A second path is believed alive.
    pub(crate) fn ready(&self) -> bool {
        self.ready && self.lqp.has_backup()
    }

    pub(crate) fn switching(&self) -> bool {
        !matches!(self.lqp.state(), State::Active | State::Failed | State::Closed)
    }

    /// The path that carries the QP now, while nothing is being switched.
    pub(crate) fn active_path(&self) -> Option<SlotPath> {
        self.lqp.path().filter(|_| self.lqp.state() == State::Active)
    }

    fn path_text(&self, core: &Core, path: Option<SlotPath>) -> String {
        path.map_or_else(String::new, |path| self.peer.path_name(core, path))
    }

    pub(crate) fn path_name(&self, core: &Core) -> String {
        self.path_text(core, self.lqp.path())
    }

    /// First PSN of our requests, once the QP has left its first epoch.
    pub(crate) fn moved_sq_psn(&self) -> Option<u32> {
        (self.lqp.epoch() > 0).then_some(self.sq_psn)
    }

    /// Sets what is believed of every path from what is known of NICs and pairs.
    pub(crate) fn update_beliefs(&mut self, core: &Core, now: u64) {
        let mut paths: Vec<SlotPath> = self.lqp.slots().iter().map(|(_, p)| p).collect();
        paths.sort_unstable();
        paths.dedup();
        self.ready = true;
        for path in paths {
            let belief = self.peer.belief(core, path);
            self.lqp.set_path_belief(now, path, belief);
        }
    }

    /// When [`tick`] is to be called at the latest; `None` while nothing is under way.
    fn deadline(&self) -> Option<u64> {
        let report = self.pending.as_ref().map(|p| p.look_at_us);
        [self.lqp.poll_timeout(), report].into_iter().flatten().min()
    }
}

/// The physical QP of the present path fails, or its path is dead.
pub(crate) fn suspect(qp: &Qp, g: &mut Gate, reason: Reason) {
    let now = now_us();
    let Some(link) = &mut g.link else { return };
    link.update_beliefs(&qp.core, now);
    if let (Some(path), Reason::PostFailed) = (link.lqp.path(), reason) {
        link.lqp.set_path_belief(now, path, Belief::NoNic);
    }
    let epoch = link.lqp.epoch();
    link.lqp.suspect(now, epoch, reason);
    settle(qp, g);
}

/// The transport has given up. That is a question to its path, which the caller asks; the answer decides ([`verdict`]).
pub(crate) fn gave_up(qp: &Qp, g: &mut Gate, status: WcStatus) -> Option<(Arc<Peer>, SlotPath)> {
    let link = g.link.as_mut()?;
    let Some(path) = link.active_path() else {
        suspect(qp, g, Reason::QpFailed(status));
        return None;
    };
    link.gave_up = Some(status);
    Some((link.peer.clone(), path))
}

/// It has been found out whether a path to the peer lives.
pub(crate) fn verdict(qp: &Qp, g: &mut Gate, path: SlotPath, verdict: Verdict) {
    let Some(link) = &mut g.link else { return };
    let on_it = link.lqp.path() == Some(path);
    match (verdict, link.gave_up) {
        (Verdict::Alive, Some(status)) if on_it => suspect(qp, g, Reason::Wedged(status)),
        (Verdict::Dead, Some(status)) if on_it => suspect(qp, g, Reason::QpFailed(status)),
        (Verdict::Dead, None) if on_it => suspect(qp, g, Reason::Stall),
        _ => beliefs_changed(qp, g),
    }
}

/// A control message for the QP has come.
pub(crate) fn message(qp: &Qp, g: &mut Gate, message: &Message) {
    let Some(link) = &mut g.link else { return };
    let refused = matches!(&message.body, Body::Refuse(r) if r.reason == RefuseReason::WrongConnection);
    let (peer, from) = (link.lqp.peer(), message.from);
    if (refused || from.connection != peer.connection) && from.incarnation == peer.incarnation {
        // It was reset after we had looked it up, and before it connected to us; or it belongs to an earlier connection.
        if let Some(Ok(Some((_, connection)))) = qp.core.directory.as_ref().map(|d| d.lookup_qp(peer.gid, peer.qpn)) {
            link.lqp.set_peer_connection(connection);
        }
    }
    let unheard = matches!(&message.body, Body::Hello(h) if h.waiting) && link.lqp.state() == State::Connected;
    if unheard {
        // We have answered already. A NIC of the peer that died and was healed has a new endpoint; perhaps it is the only one
        // that the peer has, and what we know is the old one.
        link.peer.refresh(&qp.core);
    }
    link.lqp.handle_message(now_us(), message);
    settle(qp, g);
}

/// The peer's process has ended: one that was killed says no Bye.
pub(crate) fn peer_gone(qp: &Qp, g: &mut Gate) {
    let Some(link) = &mut g.link else { return };
    let bye = Message { from: link.lqp.peer(), to: link.lqp.me(), body: Body::Bye };
    link.lqp.handle_message(now_us(), &bye);
    let outstanding = g.phys.progress().outstanding_sends > 0;
    let status = g.link.as_ref().and_then(|l| l.gave_up);
    match outstanding {
        true => suspect(qp, g, status.map_or(Reason::Stall, Reason::QpFailed)),
        false => settle(qp, g),
    }
}

/// What is known of NICs or pairs has changed.
pub(crate) fn beliefs_changed(qp: &Qp, g: &mut Gate) {
    if let Some(link) = &mut g.link {
        link.update_beliefs(&qp.core, now_us());
        settle(qp, g);
    }
}

/// The application ends the connection: tell the peer. Gives what was outstanding, if no physical QP holds it.
pub(crate) fn close(qp: &Qp, g: &mut Gate) -> Option<Backlog> {
    g.link.as_mut()?.lqp.close(now_us());
    run(qp, g);
    g.why_not = "closed";
    g.link.take()?.backlog
}

/// Looks after a QP that is being switched: deadlines, the report. Gives the time of the next call, or `None` when all is calm.
pub(crate) fn tick(qp: &Qp, g: &mut Gate) -> Option<u64> {
    let now = now_us();
    let progress = g.phys.progress();
    let link = g.link.as_mut()?;
    let epoch = link.lqp.epoch();
    if progress.advanced > 0 || progress.executed > 0 {
        link.lqp.handle_progress(now, epoch);
    }
    if let Some(p) = &mut link.pending {
        let moved = progress.first_moved_us.filter(|_| p.switched.epoch == epoch);
        if moved.is_some() || now > p.switched.started_us + REPORT_WAIT_US || p.switched.epoch != epoch {
            let moved_us = moved.unwrap_or(p.switched.started_us);
            if let Some(p) = link.pending.take() {
                report(qp, link, &p, moved_us);
            }
        } else if p.look_at_us <= now {
            p.look_us = (2 * p.look_us).min(REPORT_LOOK_MAX_US);
            p.look_at_us = now + p.look_us;
        }
    }
    if link.lqp.poll_timeout().is_some_and(|t| t <= now) {
        if !link.peer.refresh(&qp.core) {
            // A process that was killed says no Bye; the directory noticed that it is gone.
            let bye = Message { from: link.lqp.peer(), to: link.lqp.me(), body: Body::Bye };
            link.lqp.handle_message(now, &bye);
        }
        link.lqp.handle_timeout(now);
    }
    run(qp, g);
    let link = g.link.as_mut()?;
    link.told_us = link.deadline();
    link.told_us
}

/// Looks at the progress of a QP that nothing is being switched of. Gives its peer and path, too.
pub(crate) fn look(g: &mut Gate, now: u64, progress: &Progress) -> Option<(Arc<Peer>, SlotPath, Look)> {
    let link = g.link.as_mut()?;
    let path = link.active_path()?;
    let look = link.silence.look(now, progress.outstanding_sends, progress.advanced);
    Some((link.peer.clone(), path, look))
}

fn report(qp: &Qp, link: &Link, p: &Pending, moved_us: u64) {
    let core = &qp.core;
    let slots = link.lqp.slots();
    let switch = Switch {
        kind: SwitchKind::Passive,
        host: core.host(),
        qp: qp.qpn(),
        from: link.path_text(core, slots.get(p.switched.from_slot)),
        to: link.path_text(core, slots.get(p.switched.to_slot)),
        epoch: p.switched.epoch as u32,
        reason: p.switched.reason.name().into(),
        on_path_since_us: p.switched.on_path_since_us,
        detected_at_us: p.switched.detected_us,
        detect_us: None,
        switch_us: moved_us.saturating_sub(p.switched.detected_us),
        replayed: p.replayed.into(),
    };
    // Of an idle QP it is known a second later that nothing has moved.
    core.emit_at(What::Switch(switch), moved_us);
}

/// Does what the state machine asks, and tells the worker when to look at the QP.
fn settle(qp: &Qp, g: &mut Gate) {
    run(qp, g);
    let Some(link) = &mut g.link else { return };
    if let Some(at_us) = link.deadline() {
        if link.told_us.is_none_or(|told_us| at_us < told_us) {
            link.told_us = Some(at_us);
            qp.core.inbox.put(Job::Watch(qp.id(), at_us));
        }
    }
}

/// Does what the state machine asks until it asks nothing.
fn run(qp: &Qp, g: &mut Gate) {
    for _ in 0..MAX_ACTIONS {
        let Some(action) = g.link.as_mut().and_then(|l| l.lqp.poll_action()) else { break };
        let now = now_us();
        match action {
            Action::Quiesce { .. } => quiesce(g, now),
            Action::Open { epoch, slot } => {
                let result = open(qp, g, slot).map_err(|e| {
                    qp.core.complain("a backup QP cannot be made", &e);
                    OpenError
                });
                if let Some(l) = &mut g.link {
                    l.lqp.handle_opened(now_us(), epoch, result);
                }
            }
            Action::Send { message, via } => send(qp, g, &message, via),
            Action::CheckReplay { epoch, peer_done } => {
                let safe = !g.phys.unsafe_to_replay(peer_done);
                if let Some(l) = &mut g.link {
                    l.lqp.handle_check(now, epoch, safe);
                }
            }
            Action::Connect { epoch: _, peer_qpn, sq_psn, rq_psn, mtu, peer_done } => {
                let replayed = g.phys.mark_executed(peer_done);
                let Some(l) = &mut g.link else { break };
                (l.replayed, l.sq_psn) = (replayed, sq_psn);
                let remote = l.lqp.path().and_then(|p| l.peer.nic(p.remote));
                let rc = RcModify {
                    state: Some(QpState::Rtr),
                    dest_qpn: Some(peer_qpn),
                    rq_psn: Some(rq_psn),
                    mtu: Some(mtu),
                    min_rnr_timer: g.app.rc.min_rnr_timer,
                    max_dest_rd_atomic: g.app.rc.max_dest_rd_atomic,
                    ..RcModify::default()
                };
                modify(qp, g, QpModify { rc, dest_gid: remote.map(|n| n.gid), ..QpModify::default() });
            }
            Action::Start { .. } => start(qp, g),
            Action::Fail { status, cause } => {
                // The log first: a program that sees its error may be gone before the next line.
                let why = g
                    .link
                    .as_ref()
                    .map_or_else(String::new, |l| explain::give_up(&qp.core, &l.lqp, &l.peer, cause, status));
                qp.core.emit(What::GiveUp { host: qp.core.host(), qp: qp.qpn(), why });
                fail(qp, g, status);
            }
            Action::Report(switched) => {
                if let Some(l) = &mut g.link {
                    let (look_at_us, look_us) = (now + REPORT_LOOK_US, REPORT_LOOK_US);
                    l.pending = Some(Pending { switched, replayed: l.replayed, look_at_us, look_us });
                }
            }
        }
    }
}

fn quiesce(g: &mut Gate, now: u64) {
    let progress = g.phys.progress();
    if g.phys.state() == QpState::Err {
        // An error of the program has ended it; its NIC dies later, or its peer moves. It must not come back to life.
        g.failed = true;
        g.why_not = "ended by an error of the program";
        if let Some(l) = &mut g.link {
            l.lqp.handle_ended();
        }
        return;
    }
    let result = g.phys.quiesce();
    let Some(link) = &mut g.link else { return };
    let answer = match result {
        Ok(backlog) => {
            let outstanding = backlog.sends.iter().filter(|s| !s.opcode.awaits_data()).count() as u64;
            let q = Quiesced {
                executed: backlog.executed,
                completed: backlog.completed,
                outstanding,
                // An idle QP has nothing that could move: it must not count as one that tries in vain.
                progressed: progress.outstanding_sends == 0
                    || progress.advanced > 0
                    || backlog.executed > 0
                    || backlog.completed > 0,
            };
            link.backlog = Some(backlog);
            Ok(q)
        }
        Err(_) => Err(QuiesceError),
    };
    link.lqp.handle_quiesced(now, answer);
}

/// Makes the physical QP of a slot and moves the backlog into it.
fn open(qp: &Qp, g: &mut Gate, slot: u8) -> Result<Opened> {
    let core = &qp.core;
    let Some(link) = &mut g.link else { return Err(Error::invalid("the QP is not connected")) };
    let path = link.lqp.slots().get(slot).ok_or_else(|| Error::invalid("the slot has no path"))?;
    let nic = usize::from(path.local);
    let device = core.device(nic).ok_or_else(|| Error::device_gone(format!("{} is dead", core.nic_name(nic))))?;
    let mtu = device.port(1)?.active_mtu;
    let fresh = core.make_qp_on(&device, nic, qp.id().0, &qp.init)?;
    let result = (|| {
        let rc = RcModify { state: Some(QpState::Init), access: g.app.rc.access, ..RcModify::default() };
        fresh.modify(&QpModify { rc, ..QpModify::default() })?;
        match &link.backlog {
            Some(b) => fresh.adopt(b.clone()),
            None => Ok(()),
        }
    })();
    if let Err(e) = result {
        fresh.destroy();
        return Err(e);
    }
    link.backlog = None;
    (link.silence, link.gave_up) = (Silence::default(), None);
    let old = (g.nic, g.phys.qpn());
    g.phys.destroy();
    core.rename_physical(qp.id(), old, (nic, fresh.qpn()));
    let psn = core.random() & PSN_MASK;
    let opened = Opened { qpn: fresh.qpn(), psn, mtu: g.app.rc.mtu.map_or(mtu, |m| m.min(mtu)) };
    g.phys = fresh;
    (g.nic, g.port) = (nic, 1);
    Ok(opened)
}

/// Changes the physical QP of the new path. A failure here means that its NIC just died, too: the next path is tried.
fn modify(qp: &Qp, g: &mut Gate, change: QpModify) {
    if let Err(e) = g.phys.modify(&change) {
        qp.core.complain("the backup QP cannot be connected", &e);
        let now = now_us();
        if let Some(l) = &mut g.link {
            let epoch = l.lqp.epoch();
            if let Some(path) = l.lqp.path() {
                l.lqp.set_path_belief(now, path, Belief::NoNic);
            }
            l.lqp.suspect(now, epoch, Reason::PostFailed);
        }
    }
}

/// Lets the new path send, unless the application itself has not come that far.
fn start(qp: &Qp, g: &mut Gate) {
    if g.app.rc.state == Some(QpState::Rtr) {
        return;
    }
    let Some(link) = &g.link else { return };
    if g.phys.state() == QpState::Err && qp.core.device(g.nic).is_some() {
        // The peer has begun already, with a request that ended the connection as it would have on any path.
        return;
    }
    let rc = RcModify {
        state: Some(QpState::Rts),
        sq_psn: Some(link.sq_psn),
        timeout: Some(qp.core.protected_timeout(g.app.rc.timeout.unwrap_or(0))),
        retry_cnt: g.app.rc.retry_cnt,
        rnr_retry: g.app.rc.rnr_retry,
        max_rd_atomic: g.app.rc.max_rd_atomic,
        // The application may have changed these since the path was opened.
        min_rnr_timer: g.app.rc.min_rnr_timer,
        access: g.app.rc.access,
        ..RcModify::default()
    };
    modify(qp, g, QpModify { rc, ..QpModify::default() });
    if g.app.rc.state == Some(QpState::Sqd) {
        let rc = RcModify { state: Some(QpState::Sqd), ..RcModify::default() };
        modify(qp, g, QpModify { rc, sqd_notify: g.app.sqd_notify, ..QpModify::default() });
    }
}

/// Gives the application the original error.
fn fail(qp: &Qp, g: &mut Gate, status: WcStatus) {
    g.failed = true;
    g.why_not = "failed";
    let held = g.link.as_mut().and_then(|l| l.backlog.take());
    match held.map_or_else(|| g.phys.quiesce(), Ok) {
        Ok(backlog) => qp.flush_backlog(&backlog, status),
        Err(_) => g.phys.fail(status),
    }
}

fn send(qp: &Qp, g: &mut Gate, message: &Message, via: u8) {
    let Some(link) = &g.link else { return };
    let Some(path) = link.lqp.slots().get(via) else { return };
    let Some(to) = link.peer.control(path.remote) else { return };
    // One that cannot leave is a lost message: what matters is repeated, over the next path.
    qp.core.send_control(path.local.into(), to, message);
}

// --- posting while no physical QP holds the work ----------------------------------------------------------------------------

/// Keeps sends that are posted while the QP is between two paths, all or none. `None` if it is not.
pub(crate) fn hold_sends(qp: &Qp, g: &mut Gate, batch: &dyn SendBatch) -> Option<Result<()>> {
    let backlog = g.link.as_mut()?.backlog.as_mut()?;
    if backlog.sends.len() + batch.count() > qp.init.caps.max_send_wr as usize {
        return Some(Err(Error::no_room("the send queue is full")));
    }
    // The QP that adopts the backlog takes all of it or nothing: one that does not fit would end the rest.
    if let Err(e) = (0..batch.count()).try_for_each(|i| check_send(&qp.init.caps, &batch.wr(i))) {
        return Some(Err(e.into()));
    }
    backlog.keys_changed |= (0..batch.count()).any(|i| batch.wr(i).opcode.changes_keys());
    backlog.sends.extend((0..batch.count()).map(|i| SendEntry::from(&batch.wr(i))));
    Some(Ok(()))
}

/// Keeps a receive that is posted while the QP is between two paths. `None` if it is not.
pub(crate) fn hold_recv(qp: &Qp, g: &mut Gate, wr: &RecvWr<'_>) -> Option<Result<()>> {
    let backlog = g.link.as_mut()?.backlog.as_mut()?;
    if backlog.recvs.len() >= qp.init.caps.max_recv_wr as usize {
        return Some(Err(Error::no_room("the receive queue is full")));
    }
    if wr.sges.len() > qp.init.caps.max_recv_sge as usize {
        return Some(Err(Error::invalid("the receive has more scatter/gather entries than the QP was made for")));
    }
    backlog.recvs.push(RecvEntry { wr_id: wr.wr_id, sges: wr.sges.to_vec() });
    Some(Ok(()))
}
