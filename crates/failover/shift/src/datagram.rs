//! Logical UD QPs: they go on when their NIC dies or its port goes down.
//!
//! A UD QP has no peer to agree with, and nobody says what has arrived. So a move is a matter of
//! this end alone: stop the physical QP, take out what waits, make a fresh one on the next NIC that
//! works, bring it to where the program had come, and go on. Datagrams that are on their way are
//! lost, as UD allows; no completion is, and none is flushed. While no NIC works the QP is
//! *parked*: what is posted is kept, and the first NIC that is healed carries on; after
//! [`PATIENCE_US`] the program gets what it would have got at first.
//!
//! Peers go on using the address that the QP had at first. Where it is now is told by the directory
//! ([`crate::aliases`]), and the devices translate. Nobody notices that datagrams do not arrive: a
//! cut cable or a dead switch is silence, which UD leaves to the program.
//!
//! All functions run under the QP's gate.

mod state;
#[cfg(test)]
mod tests;

pub(crate) use state::Datagram;

use crate::nics::NicTable;
use crate::probes;
use crate::qp::{merge, Gate, Qp};
use crate::worker_queue::Job;
use state::Parked;
use unbroken_directory::MovedQp;
use unbroken_events::{QpStatus, Switch, SwitchKind, What};
use unbroken_failover_protocol::Reason;
use unbroken_runtime::now_us;
use unbroken_types::{check_datagram, check_send, Gid, Mtu, QpState, SendWr, UdModify, WcStatus};
use unbroken_verbs::{
    Backlog, Error, PortState, PostError, QpInit, QpModify, RcModify, RecvWr, Result, SendBatch,
};

/// How long a QP waits for a NIC when none works: as RC waits for a silent peer.
const PATIENCE_US: u64 = 20_000_000;
/// How often it looks for one meanwhile. A NIC that is healed says so; one that could not be used
/// at that instant says nothing.
const LOOK_US: u64 = 100_000;

/// The addresses by which peers know the QP, where it has moved.
pub(crate) fn known(qp: &Qp, g: &Gate) -> Vec<(Gid, u32)> {
    let moved = g.datagram.iter().filter(|d| d.moves > 0);
    moved.flat_map(|d| d.gids.iter().map(|gid| (*gid, qp.qpn()))).collect()
}

/// What the directory is to know of it.
pub(crate) fn addresses(qp: &Qp, g: &Gate) -> Vec<MovedQp> {
    let shown = g.datagram.as_ref().and_then(|d| d.home(&g.app)).unwrap_or_else(|| qp.gid());
    let now = (qp.core.nics.gid(g.nic), g.phys.qpn());
    known(qp, g).into_iter().map(|known| MovedQp { known, now, shown }).collect()
}

/// The NIC of the QP, or the port of it that it uses, has failed: moves it, or parks it.
pub(crate) fn leave(qp: &Qp, g: &mut Gate, reason: Reason) {
    let Some(d) = &g.datagram else { return };
    // One that has ended by itself has nothing that could be moved. While the NIC lives and there
    // is no other, the port may come back.
    let stays = matches!(reason, Reason::PortDown) && next_nics(qp, g).is_empty();
    if d.parked() || g.failed || stays || g.phys.state() == QpState::Err {
        return;
    }
    match g.phys.quiesce() {
        Ok(backlog) => park(g, backlog, reason),
        Err(e) => return qp.core.events.complain("a UD QP cannot be stopped", &e),
    }
    carry_on(qp, g);
}

fn park(g: &mut Gate, backlog: Backlog, reason: Reason) {
    if let Some(d) = &mut g.datagram {
        d.parked = Some(Parked { backlog, reason, since_us: now_us() });
    }
}

/// A NIC works again: a QP that waits for one, or sits where nothing leaves, moves there.
pub(crate) fn nic_back(qp: &Qp, g: &mut Gate) {
    let Some(d) = &g.datagram else { return };
    match d.parked() {
        true => carry_on(qp, g),
        false if !works(&qp.core.nics, g) => leave(qp, g, Reason::PortDown),
        false => {}
    }
}

/// Whether packets leave the port that the QP uses.
fn works(nics: &NicTable, g: &Gate) -> bool {
    let port = nics.device(g.nic).and_then(|device| device.port(g.port).ok());
    port.is_some_and(|port| port.state == PortState::Active)
}

/// The NICs that could carry it, in the order in which they take over for each other: as the slots
/// of RC begin behind the present one.
fn next_nics(qp: &Qp, g: &Gate) -> Vec<usize> {
    let (core, mtu) = (&qp.core, g.datagram.as_ref().map_or(Mtu::B256, |d| d.mtu));
    let carries = |nic: &usize| {
        core.nics.device(*nic).is_some_and(|d| {
            core.nics.usable(*nic) && d.port(1).is_ok_and(|port| port.active_mtu >= mtu)
        })
    };
    let mapped = core.preference.nics(qp.id().0);
    match mapped.is_empty() {
        true => (1..=core.nics.count())
            .map(|step| (g.nic + step) % core.nics.count())
            .filter(carries)
            .collect(),
        false => mapped.into_iter().filter(carries).collect(),
    }
}

/// Gives a parked QP to the next NIC that takes it. Where none does, the worker goes on looking.
fn carry_on(qp: &Qp, g: &mut Gate) {
    for nic in next_nics(qp, g) {
        match open(qp, g, nic) {
            Ok(()) => return,
            Err(e) => qp.core.events.complain("a backup QP cannot be made", &e),
        }
    }
    qp.core.jobs.put(Job::Watch(qp.id(), now_us() + LOOK_US));
}

/// Makes the physical QP on a NIC, and moves what waits there.
fn open(qp: &Qp, g: &mut Gate, nic: usize) -> Result<()> {
    let core = &qp.core;
    let Some(d) = &mut g.datagram else { return Ok(()) };
    let Some(Parked { backlog, reason, since_us }) = &d.parked else { return Ok(()) };
    let device = core
        .nics
        .device(nic)
        .ok_or_else(|| Error::device_gone(format!("{} is dead", core.nics.name(nic))))?;
    let init = QpInit { home: d.home(&g.app), ..qp.init.clone() };
    let fresh = core.make_qp_on(&device, nic, qp.id().0, &init)?;
    let begin = fresh.adopt(backlog.clone()).and_then(|()| fresh.modify_all(&history(&g.app)));
    if let Err(e) = begin {
        fresh.destroy();
        return Err(e);
    }
    let (old, now) = ((g.nic, g.phys.qpn()), now_us());
    d.moves += 1;
    let switch = Switch {
        kind: SwitchKind::Passive,
        host: core.nics.host(),
        qp: qp.qpn(),
        from: core.nics.name(old.0),
        to: core.nics.name(nic),
        epoch: d.moves,
        reason: reason.name().into(),
        detected_at_us: *since_us,
        on_path_since_us: std::mem::replace(&mut d.since_us, now),
        detect_us: None,
        switch_us: now.saturating_sub(*since_us),
        replayed: 0,
    };
    probes::switch(old.0 as u8, nic as u8, &switch);
    core.events.emit(What::Switch(switch));
    d.parked = None;
    g.phys.destroy();
    core.qps.rename_physical(qp.id(), old, (nic, fresh.qpn()));
    g.phys = fresh;
    (g.nic, g.port) = (nic, 1);
    core.jobs.put(Job::Moved(qp.id()));
    Ok(())
}

/// The steps by which a fresh QP comes to where the program had brought its own. (One that was in
/// SQE starts anew: what it had is flushed already.)
fn history(app: &QpModify) -> Vec<QpModify> {
    let state = app.rc.state.unwrap_or(QpState::Reset);
    let steps = match state {
        QpState::Reset | QpState::Err => 0,
        QpState::Init => 1,
        QpState::Rtr => 2,
        QpState::Rts | QpState::Sqe => 3,
        QpState::Sqd => 4,
    };
    let all = [QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd];
    let step = |state| QpModify {
        rc: RcModify {
            state: Some(state),
            sq_psn: app.rc.sq_psn.filter(|_| state == QpState::Rts),
            ..RcModify::default()
        },
        qkey: app.qkey.filter(|_| state == QpState::Init),
        sqd_notify: app.sqd_notify.filter(|_| state == QpState::Sqd),
        ..QpModify::default()
    };
    all.into_iter().take(steps).map(step).collect()
}

/// Looks after a parked QP. Gives the time of the next call.
pub(crate) fn tick(qp: &Qp, g: &mut Gate) -> Option<u64> {
    let parked = g.datagram.as_mut()?.parked.as_mut()?;
    let now = now_us();
    if now >= parked.since_us + PATIENCE_US {
        let backlog = std::mem::take(&mut parked.backlog);
        // The log first: a program that sees its error may be gone before the next line.
        qp.core.events.emit(What::GiveUp {
            host: qp.core.nics.host(),
            qp: qp.qpn(),
            why: "no NIC works".into(),
            of_programs: false,
        });
        give_up(qp, g, &backlog);
        g.why_not = "failed";
        return None;
    }
    let next = next_nics(qp, g).into_iter().find(|nic| open(qp, g, *nic).is_ok());
    next.is_none().then_some(now + LOOK_US)
}

/// Flushes what was outstanding: the QP has ended.
fn give_up(qp: &Qp, g: &mut Gate, backlog: &Backlog) {
    g.failed = true;
    if let Some(d) = &mut g.datagram {
        d.parked = None;
    }
    qp.flush_backlog(backlog, WcStatus::WrFlushErr);
    qp.take_no_more();
}

/// What `unbroken status` shows of it, if it is protected.
pub(crate) fn status(qp: &Qp, g: &Gate) -> Option<QpStatus> {
    let d = g.datagram.as_ref()?;
    let (why, state) = match (g.failed, d.parked()) {
        (true, _) => ("failed", "failed".into()),
        (_, true) => ("no NIC works", "switching".into()),
        _ => ("", format!("{:?}", g.phys.state()).to_lowercase()),
    };
    Some(QpStatus {
        qp: qp.qpn(),
        host: qp.core.nics.host(),
        own: format!("{}:{}", qp.gid(), qp.qpn()),
        peer: String::new(),
        path: qp.core.nics.name(g.nic),
        epoch: d.moves,
        protected: why.is_empty(),
        why: why.into(),
        state,
        ..QpStatus::default()
    })
}

// --- what the program does

/// Changes a protected UD QP, on whatever NIC it is.
pub(crate) fn modify(qp: &Qp, g: &mut Gate, change: &QpModify) -> Result<()> {
    match change.rc.state {
        Some(QpState::Reset) => return reset(qp, g),
        Some(QpState::Err) if g.failed => {
            merge(&mut g.app, change);
            return Ok(());
        }
        _ => {}
    }
    // Each try leaves a NIC.
    for _ in 0..=qp.core.nics.count() {
        if g.datagram.as_ref().is_some_and(|d| d.parked()) {
            break;
        }
        let physical =
            QpModify { port: change.port.filter(|_| g.nic == qp.id().0), ..change.clone() };
        match g.phys.modify(&physical) {
            Ok(()) => {
                g.port = physical.port.unwrap_or(g.port);
                merge(&mut g.app, change);
                return Ok(());
            }
            // The NIC is dead, and nobody has noticed so far.
            Err(e) if e.errno() == libc::EIO => leave(qp, g, Reason::PostFailed),
            Err(e) => return Err(e),
        }
    }
    modify_parked(qp, g, change)
}

/// The fresh QP will be brought to where this leads.
fn modify_parked(qp: &Qp, g: &mut Gate, change: &QpModify) -> Result<()> {
    let ud = UdModify { state: change.rc.state, qkey: change.qkey, sq_psn: change.rc.sq_psn };
    let to = ud.validate(parked_state(g)).map_err(|e| Error::invalid(e.to_string()))?;
    merge(&mut g.app, change);
    let parked = g.datagram.as_mut().and_then(|d| d.parked.as_mut());
    if let (QpState::Err, Some(parked)) = (to, parked) {
        let backlog = std::mem::take(&mut parked.backlog);
        give_up(qp, g, &backlog);
    }
    Ok(())
}

/// To RESET: what is outstanding is forgotten. Where the physical QP is gone, or on a dead NIC, a
/// fresh one is made.
fn reset(qp: &Qp, g: &mut Gate) -> Result<()> {
    let rc = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
    let parked = g.datagram.as_ref().is_some_and(|d| d.parked());
    let lives = !parked && g.phys.modify(&QpModify { rc, ..QpModify::default() }).is_ok();
    if !lives {
        // It holds nothing any more; that it is on a dead NIC is why.
        let _ = g.phys.quiesce();
        park(g, Backlog::default(), Reason::DeviceFatal);
    }
    qp.purge();
    g.app = QpModify::default();
    g.failed = false;
    g.why_not = "";
    if !lives {
        carry_on(qp, g);
    }
    Ok(())
}

/// The state of a parked QP, as the program had brought it there.
pub(crate) fn parked_state(g: &Gate) -> QpState {
    g.app.rc.state.unwrap_or(QpState::Reset)
}

/// Keeps sends that are posted while the QP is parked, all or none. `None` if it is not.
pub(crate) fn hold_sends(qp: &Qp, g: &mut Gate, batch: &dyn SendBatch) -> Option<Result<()>> {
    let state = parked_state(g);
    let d = g.datagram.as_mut()?;
    let (caps, mtu, backlog) = (&qp.init.caps, d.mtu, &mut d.parked.as_mut()?.backlog);
    if !matches!(state, QpState::Rts | QpState::Sqd) {
        return Some(Err(PostError::WrongState(state).into()));
    }
    let fits =
        |wr: &SendWr<'_>| check_send(caps, wr).and_then(|()| check_datagram(mtu, wr)).map(drop);
    Some(backlog.hold_sends(caps, 0, batch, fits).map_err(Error::from))
}

/// Keeps a receive that is posted while the QP is parked. `None` if it is not.
pub(crate) fn hold_recv(qp: &Qp, g: &mut Gate, wr: &RecvWr<'_>) -> Option<Result<()>> {
    let state = parked_state(g);
    let (caps, backlog) = (&qp.init.caps, &mut g.datagram.as_mut()?.parked.as_mut()?.backlog);
    let held = match state {
        QpState::Reset => Err(PostError::WrongState(state)),
        _ => backlog.hold_recv(caps, 0, wr),
    };
    Some(held.map_err(Error::from))
}
