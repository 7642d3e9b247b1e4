//! The link of a logical QP to its peer: what the protocol's executor needs of devices, directory
//! and network.
//!
//! All functions run under the QP's gate. What is decided, and in which order it is done, is
//! the protocol's; here is how it is done.

mod env;
mod state;

pub(crate) use state::Link;

use crate::peer::Peer;
use crate::port_pairs;
use crate::qp::{Gate, Qp};
use crate::worker_queue::Job;
use env::Io;
use std::sync::Arc;
use unbroken_failover_protocol::health::Verdict;
use unbroken_failover_protocol::message::Body;
use unbroken_failover_protocol::silence::{Look, ASK_AFTER_US};
use unbroken_failover_protocol::{
    Asks, Config, Endpoint, Executor, LogicalQp, Message, PeerWord, PortPath, Reason, SlotPath,
    SlotTable,
};
use unbroken_runtime::now_us;
use unbroken_types::{Gid, Progress, WcStatus};
use unbroken_verbs::{Backlog, Error, RecvWr, Result, SendBatch};

/// A QP that is silent on a path that lives is asked how far it is after this time: long before it
/// counts as wedged.
const LIVING_PATH_US: u64 = 250_000;

/// Why a QP is not linked that has nowhere else to go.
pub(crate) const ONE_NIC: &str = "this host and the peer's have one NIC each";

/// The link of a QP with that connection number to the QP `them` of the process `peer`, or why
/// there can be none. A QP that is connected by a switch (`by_hello`) needs the peer's word before
/// anything can be sent: it waits longer for it.
pub(crate) fn connect(
    qp: &Qp,
    connection: u32,
    them: Endpoint,
    peer: Arc<Peer>,
    by_hello: bool,
) -> std::result::Result<Link, &'static str> {
    let core = &qp.core;
    let remote = peer
        .index_of(them.gid)
        .ok_or("the peer's process does not have the NIC that the QP is connected to")?;
    let me = Endpoint { gid: qp.gid(), qpn: qp.qpn(), incarnation: core.incarnation, connection };
    let default = SlotPath { local: qp.id().0 as u8, remote };
    let lower = (me.gid, me.qpn) <= (them.gid, them.qpn);
    let nics = core.nics.count().min(255) as u8;
    if nics == 1 && peer.nic_count() == 1 && core.nics.port_count(0) == 1 && me != them {
        return Err(ONE_NIC);
    }
    let table = match me == them {
        true => SlotTable::to_itself(default.local, nics),
        false => SlotTable::new(default, nics, peer.nic_count(), lower),
    };
    {
        let mut health = peer.health();
        health.trust(default);
        // Devices of a machine may be of networks that are apart: NICs for storage, rails.
        let proven = |path: SlotPath| !core.nics.capabilities(path.local.into()).slow_control;
        for (_, path) in table.iter() {
            match proven(path) {
                true => health.add(path),
                false => health.add_unproven(now_us(), path),
            }
        }
        let unusable = (0..nics).filter(|nic| !core.nics.usable(usize::from(*nic)));
        unusable.for_each(|nic| health.set_nic(now_us(), nic, false));
    }
    port_pairs::know(&core.nics, &peer, &table, now_us());
    let mut config = Config::default();
    if by_hello {
        config.unknown_grace_us = config.peer_silence_us;
    }
    let mut lqp = LogicalQp::new(me, them, table, config, now_us());
    if let Some(policy) = core.preference.policy(default) {
        lqp.set_policy(policy);
    }
    core.jobs.put(Job::Connect(qp.id()));
    core.backups.look_at(qp.id());
    Ok(Link { executor: Executor::new(lqp), peer, told_us: None, unread: None })
}

/// Lets the executor of a connected QP work, and tells the worker when to look at it.
fn with<R>(qp: &Qp, g: &mut Gate, f: impl FnOnce(&mut Executor, &mut Io<'_>) -> R) -> Option<R> {
    let Gate { phys, backup, nic, port, app, failed, why_not, link, holds, .. } = g;
    let Link { executor, peer, told_us, unread } = &mut **link.as_mut()?;
    let was = executor.on_its_way();
    let default_remote = executor.lqp().slots().get(0).map(|path| path.remote);
    let (peer, word) = (&**peer, None);
    let mut io = Io {
        qp,
        peer,
        default_remote,
        phys,
        backup,
        nic,
        port,
        app,
        failed,
        why_not,
        unread,
        word,
    };
    let result = f(executor, &mut io);
    holds.set(executor.holds_sends());
    qp.core.qps.count_switching(was, executor.on_its_way());
    if let Some(at_us) = executor.deadline_us() {
        if told_us.is_none_or(|told_us| at_us < told_us) {
            *told_us = Some(at_us);
            qp.core.jobs.put(Job::Watch(qp.id(), at_us));
        }
    }
    Some(result)
}

/// The physical QP of the present path fails, or its path is dead.
pub(crate) fn suspect(qp: &Qp, g: &mut Gate, reason: Reason) {
    with(qp, g, |executor, io| executor.suspect(io, reason));
}

/// The same, with work that was posted before the QP was linked, and that its physical QP did not
/// take.
pub(crate) fn suspect_with(qp: &Qp, g: &mut Gate, reason: Reason, later: Backlog) {
    with(qp, g, |executor, io| executor.suspect_with(io, reason, later));
}

/// Prepares a planned switch to the first path that is wanted, unless something else goes on.
pub(crate) fn plan(qp: &Qp, g: &mut Gate, reason: Reason, wanted: impl Fn(SlotPath) -> bool) {
    with(qp, g, |executor, io| executor.plan(io, reason, wanted));
}

/// The transport has given up: gives the path that is to be asked, and whose it is.
pub(crate) fn gave_up(qp: &Qp, g: &mut Gate, status: WcStatus) -> Option<(Arc<Peer>, SlotPath)> {
    let path = with(qp, g, |executor, io| executor.gave_up(io, status))??;
    Some((g.link.as_ref()?.peer.clone(), path))
}

/// It has been found out whether a way to the peer lives. A port pair that is not in use is nothing
/// to the QP; and it leaves a dead one for another of its path, if it can.
pub(crate) fn verdict(qp: &Qp, g: &mut Gate, clock_us: u64, port_path: PortPath, verdict: Verdict) {
    let now = port_pairs::port_path(g);
    let elsewhere = now
        .is_some_and(|now| now.path == port_path.path && now.port_pair != port_path.port_pair)
        || now.is_none() && port_path.port_pair > 0;
    let fails = g.link.as_ref().is_some_and(|link| link.executor.gave_up_with().is_some());
    let leaves = verdict == Verdict::Dead
        && now == Some(port_path)
        && !fails
        && port_pairs::leave(qp, g, clock_us, port_path.port_pair);
    match elsewhere
        || leaves
        || now.is_some_and(|now| now.path != port_path.path && port_path.port_pair > 0)
    {
        true => beliefs_changed(qp, g),
        false => {
            if with(qp, g, |executor, io| executor.verdict(io, port_path.path, verdict)).is_some() {
                qp.core.backups.look_at(qp.id());
            }
        }
    }
}

/// Whether a peer asks whether its QP fits ours, which is connected to another.
pub(crate) fn is_of_another(g: &Gate, message: &Message) -> bool {
    let asks = matches!(&message.body, Body::Hello(hello) if hello.unproven_psn.is_some());
    let name = |end: Endpoint| (end.gid, end.qpn);
    let lqp = g.link.as_ref().filter(|_| asks).map(|link| link.executor.lqp());
    lqp.is_some_and(|lqp| message.to == lqp.me() && name(message.from) != name(lqp.peer()))
}

/// A control message for the QP has come.
pub(crate) fn message(qp: &Qp, g: &mut Gate, message: &Message) {
    if let (Some(link), Body::Hello(hello)) = (&g.link, &message.body) {
        if link.peer.incarnation == message.from.incarnation {
            match hello.key_set {
                0 => link.peer.keys.good_everywhere(),
                set => link.peer.keys.opened(hello.path.local, set),
            }
        }
    }
    with(qp, g, |executor, io| executor.message(io, message));
}

/// What the worker is to read for a message that waits.
pub(crate) struct Unread {
    /// Whose process.
    pub(crate) peer: Arc<Peer>,
    /// Its QP, where the connection is asked for.
    pub(crate) named: Option<(Gid, u32)>,
}

/// What is to be read for the message that waits, if one does.
pub(crate) fn unread(qp: &Qp, g: &Gate) -> Option<Unread> {
    let link = g.link.as_ref()?;
    let (_, asks) = link.unread.as_ref()?;
    let named = || Some((qp.core.nics.first_port(g.app.path?.dest_gid), g.app.rc.dest_qpn?));
    Some(Unread {
        peer: link.peer.clone(),
        named: if *asks == Asks::Connection { named() } else { None },
    })
}

/// The directory has been read for the message that waits.
pub(crate) fn informed(qp: &Qp, g: &mut Gate, word: PeerWord) {
    let Some((message, _)) = g.link.as_mut().and_then(|link| link.unread.take()) else { return };
    with(qp, g, |executor, io| {
        io.word = Some(word);
        executor.message(io, &message);
    });
}

/// The peer's process has ended.
pub(crate) fn peer_gone(qp: &Qp, g: &mut Gate) {
    with(qp, g, |executor, io| executor.peer_gone(io));
}

/// What is known of NICs or pairs has changed.
pub(crate) fn beliefs_changed(qp: &Qp, g: &mut Gate) {
    if with(qp, g, |executor, io| executor.beliefs_changed(io)).is_some() {
        qp.core.backups.look_at(qp.id());
    }
}

/// The application ends the connection.
pub(crate) fn close(qp: &Qp, g: &mut Gate) {
    if with(qp, g, |executor, io| executor.close(io)).is_some() {
        g.why_not = "closed";
        g.link = None;
        g.holds.set(false);
    }
}

/// The same. Gives what was outstanding, unless the physical QP holds it all.
pub(crate) fn close_with_work(qp: &Qp, g: &mut Gate) -> Option<Backlog> {
    let work = with(qp, g, |executor, io| {
        executor.close(io);
        executor.take_work(io)
    });
    close(qp, g);
    work?
}

/// The process ends: what the log has not heard of the QP, it hears now.
pub(crate) fn report(qp: &Qp, g: &mut Gate) {
    with(qp, g, |executor, io| executor.report_now(io));
}

/// Looks after a QP that is being switched. Gives the time of the next call, or `None` when all is
/// calm.
pub(crate) fn tick(qp: &Qp, g: &mut Gate) -> Option<u64> {
    with(qp, g, |executor, io| executor.tick(io));
    let link = g.link.as_mut()?;
    link.told_us = link.executor.deadline_us();
    link.told_us
}

/// The peer of a QP that has waited for it long enough: what is known of it is to be read anew
/// before [`tick`].
pub(crate) fn waits_too_long(g: &Gate, now_us: u64) -> Option<Arc<Peer>> {
    g.link.as_ref().filter(|link| link.executor.times_out(now_us)).map(|link| link.peer.clone())
}

/// Whether something has come of it since the last look, as far as that is known without asking its
/// device.
pub(crate) fn has_moved(g: &Gate) -> bool {
    g.link
        .as_ref()
        .zip(g.phys.pulse())
        .is_some_and(|(link, pulse)| pulse > link.executor.advanced())
}

/// How far a QP is, for [`look`], where it is known whether its path lives. To ask the device takes
/// it from whoever works there, and thousands of times a second where hundreds of QPs are busy. So
/// one that has moved, or may well move before it matters, counts as one with sends outstanding,
/// whatever it has.
pub(crate) fn progress(g: &Gate, clock_us: u64, path_lives: bool) -> Progress {
    let patience_us = if path_lives { LIVING_PATH_US } else { ASK_AFTER_US };
    let busy = |link: &Link| {
        let (pulse, seen) = (g.phys.pulse()?, link.executor.advanced());
        let early = link
            .executor
            .silent_since_us()
            .is_some_and(|since_us| clock_us < since_us + patience_us);
        let advanced = pulse.max(seen);
        (pulse > seen || early).then(|| Progress {
            outstanding_sends: 1,
            advanced,
            ..Progress::default()
        })
    };
    g.link.as_deref().and_then(busy).unwrap_or_else(|| g.phys.progress())
}

/// Looks at the progress of a QP that nothing is being switched of. Gives its peer and path, too.
pub(crate) fn look(
    g: &mut Gate,
    clock_us: u64,
    progress: &Progress,
) -> Option<(Arc<Peer>, SlotPath, Look)> {
    let link = g.link.as_mut()?;
    let (path, look) = link.executor.look(clock_us, progress)?;
    Some((link.peer.clone(), path, look))
}

/// Packets that were acknowledged and that were sent again since the last look; nothing where it
/// was `elsewhere` then. `None`: its device does not count them.
pub(crate) fn sent_since(g: &mut Gate, elsewhere: bool) -> Option<(u64, u64)> {
    let now = (g.phys.pulse()?, g.phys.lost()?);
    let then = std::mem::replace(&mut g.sent, now);
    match elsewhere {
        true => Some((0, 0)),
        // A new life counts from 0.
        false => Some((now.0.saturating_sub(then.0), now.1.saturating_sub(then.1))),
    }
}

/// Keeps sends that are posted while the QP is between two paths, all or none. `None` if it is not.
pub(crate) fn hold_sends(qp: &Qp, g: &mut Gate, batch: &dyn SendBatch) -> Option<Result<()>> {
    let Gate { phys, link, .. } = g;
    let held =
        link.as_mut()?.executor.hold_sends(&qp.init.caps, || phys.progress().sends(), batch)?;
    Some(held.map_err(Error::from))
}

/// Keeps a receive that is posted while no physical QP takes it. `None` if one does.
pub(crate) fn hold_recv(qp: &Qp, g: &mut Gate, wr: &RecvWr<'_>) -> Option<Result<()>> {
    let Gate { phys, link, .. } = g;
    let in_device = || phys.progress().outstanding_recvs;
    let held = link.as_mut()?.executor.hold_recv(&qp.init.caps, in_device, wr)?;
    Some(held.map_err(Error::from))
}
