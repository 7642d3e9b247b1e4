//! The logical QP: what the application holds.
//!
//! All that can change sits behind one lock, the *gate*: the physical QP that carries the traffic
//! now, what the application set, and the [`Link`] to the peer that decides about switches. Posting
//! takes the gate and the device's own lock, nothing else. A switch runs under the gate, in
//! whichever thread noticed the failure first (a poster whose post failed, or the worker), so no
//! thread can post to a QP that is being left, and none holds a completion back: completions go
//! from the devices straight into the application's CQ.
//!
//! States, as the application sees them, are those of the physical QP, except that a QP under a
//! switch says RTS.

mod life;

use crate::core::{Core, LogicalId};
use crate::datagram::{self, Datagram};
use crate::front::{AsyncElement, Context};
use crate::inbound;
use crate::link::{self, Link};
use crate::own_events;
use crate::plain;
use crate::worker::Job;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use unbroken_events::What;
use unbroken_failover_protocol::Way;
use unbroken_runtime::now_us;
use unbroken_types::{
    Gid, PathAttr, PathMigState, PdHandle, QpCaps, QpState, QpType, Wc, WcStatus, PSN_MASK,
};
use unbroken_verbs::{
    Backlog, Cq, Error, HoldingQp, PostError, QpEvent, QpInit, QpModify, QpSnapshot, RecvWr,
    Result, SendBatch, SendWr, Srq,
};

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
}

/// What carries the QP and what was set.
pub(crate) struct Gate {
    /// The physical QP of the present life.
    pub(crate) phys: Arc<dyn HoldingQp>,
    /// Index of its NIC.
    pub(crate) nic: usize,
    /// The port of that NIC, from 1. A QP that has moved begins on port 1.
    pub(crate) port: u8,
    /// Since when it uses that port, if it has migrated there.
    pub(crate) on_lane_since_us: u64,
    /// The port that it has migrated from, which nobody has looked at yet.
    pub(crate) left_port: Option<u8>,
    /// Where it was when its progress was looked at last.
    pub(crate) looked_at: Option<Way>,
    /// All attributes that the application set, the latest of each.
    pub(crate) app: QpModify,
    /// Who the peer is and how to move; `None` while not connected or not protected.
    pub(crate) link: Option<Box<Link>>,
    /// UD: how to move; `None` while not protected.
    pub(crate) datagram: Option<Box<Datagram>>,
    /// Why the QP is not protected, if it is not.
    pub(crate) why_not: &'static str,
    /// The QP has failed for good: its WRs were completed with the original error, and whatever is
    /// posted flushes.
    pub(crate) failed: bool,
    destroyed: bool,
    /// Sends are held and not posted, whatever the physical QP would say to them.
    pub(crate) holds: bool,
    /// Which connection of the QP this is: it changes with each RESET, so that messages of an
    /// earlier one are told apart.
    connection: u32,
}

impl Gate {
    /// The physical QP uses that port now.
    pub(crate) fn use_port(&mut self, port: Option<u8>) {
        if let Some(port) = port.filter(|port| *port != self.port) {
            self.left_port = Some(self.port);
            (self.port, self.on_lane_since_us) = (port, now_us());
        }
    }

    /// The QP is in ERR, and stays there until the program resets it: it has failed for good, or
    /// the program has moved it there.
    fn ended(&self) -> bool {
        self.failed || self.app.rc.state == Some(QpState::Err)
    }

    /// The program has not connected it yet.
    fn is_early(&self) -> bool {
        matches!(self.app.rc.state, None | Some(QpState::Reset | QpState::Init))
    }
}

/// A logical QP.
pub struct Qp {
    pub(crate) core: Arc<Core>,
    context: Weak<Context>,
    nic: usize,
    qpn: u32,
    pub(crate) init: QpInit,
    gate: Mutex<Gate>,
    /// It is not in the list of QPs with sends outstanding.
    idle: AtomicBool,
    cookie: AtomicU64,
}

impl Qp {
    pub(crate) fn create(
        core: &Arc<Core>,
        context: &Arc<Context>,
        r: &QpRequest,
    ) -> Result<Arc<Qp>> {
        core.born.check()?;
        let nic = context.nic();
        // One NIC with several ports is enough for a QP that can go from one to another.
        let elsewhere = core.nic_count() > 1 || r.qp_type == QpType::Rc && core.port_count(nic) > 1;
        let protect =
            core.failover && elsewhere && r.qp_type != QpType::Uc && !r.plain && core.holds(nic);
        let protect =
            protect && (r.qp_type == QpType::Rc || core.watched() && core.moves_datagrams());
        // A UD QP that begins elsewhere shows the addresses of its default NIC from the first.
        let home = (protect && r.qp_type == QpType::Ud && core.device(nic).is_none())
            .then(|| core.gid_of(nic));
        let init = QpInit {
            qp_type: r.qp_type,
            caps: if r.srq.is_some() {
                QpCaps { max_recv_wr: 0, max_recv_sge: 0, ..r.caps }
            } else {
                r.caps
            },
            pd: r.pd,
            send_cq: r.send_cq.clone(),
            recv_cq: r.recv_cq.clone(),
            srq: r.srq.clone(),
            sq_sig_all: r.sq_sig_all,
            hold_on_failure: protect,
            wc_qpn: None,
            home,
            local_keys_of: Some(nic as u8),
            control: false,
        };
        let (at, phys) = match context.own() {
            Some(device) => (nic, core.make_qp_on(device, nic, nic, &init)?),
            None => core.make_qp(nic, &init, protect)?,
        };
        let datagram = match r.qp_type {
            QpType::Ud if protect => Some(Datagram::new(core, nic, at)?),
            _ => None,
        };
        let qpn = phys.qpn();
        let why_not = match r.qp_type {
            _ if !core.failover => "failover is off",
            _ if r.plain => "it was made without protection",
            QpType::Uc => "UC QPs are not protected",
            _ if !core.holds(nic) => plain::NO_JOURNAL,
            _ if !elsewhere => "the host has one NIC only",
            QpType::Rc => "not connected",
            QpType::Ud if datagram.is_some() => "",
            QpType::Ud if !core.moves_datagrams() => {
                "UD QPs of devices with plain verbs are not protected"
            }
            QpType::Ud => "the thread for failover could not be started",
        };
        let connection = core.random();
        let qp = Arc::new(Qp {
            core: core.clone(),
            context: Arc::downgrade(context),
            nic,
            qpn,
            init: QpInit { wc_qpn: Some(qpn), ..init },
            idle: AtomicBool::new(true),
            gate: Mutex::new(Gate {
                phys,
                nic: at,
                port: 1,
                on_lane_since_us: 0,
                left_port: None,
                looked_at: None,
                app: QpModify::default(),
                link: None,
                datagram,
                why_not,
                failed: false,
                destroyed: false,
                holds: false,
                connection,
            }),
            cookie: AtomicU64::new(r.cookie),
        });
        if protect {
            for cq in [&r.send_cq, &r.recv_cq] {
                cq.set_idle_hook(inbound::idle_hook(core));
            }
            if r.qp_type == QpType::Rc {
                qp.publish(connection);
                core.settle();
            }
        }
        if r.qp_type == QpType::Ud {
            core.aliases.join(core);
        }
        core.add_qp(&qp, at, qpn);
        if r.qp_type == QpType::Ud && at != nic {
            core.inbox.put(Job::Moved(qp.id()));
        }
        Ok(qp)
    }

    /// Tells the directory which connection of the QP this is.
    fn publish(&self, connection: u32) {
        let Some(directory) = &self.core.directory else { return };
        if let Err(e) =
            directory.publish_qp(self.gid(), self.qpn, self.core.incarnation, connection)
        {
            self.core.complain("the directory does not take a QP, which stays unprotected", &e);
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
        self.core.random() & PSN_MASK
    }

    /// The GID of its default NIC.
    pub fn gid(&self) -> Gid {
        self.core.gid_of(self.nic)
    }

    pub(crate) fn uses_cq(&self, cq: &Arc<Cq>) -> bool {
        Arc::ptr_eq(&self.init.send_cq, cq) || Arc::ptr_eq(&self.init.recv_cq, cq)
    }

    pub(crate) fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends are outstanding from now on, so that the QP can stall. Under the gate: a post must not
    /// be overtaken by what was seen before it.
    #[inline]
    fn set_busy(&self, _gate: &Gate) {
        if self.idle.load(Ordering::Relaxed) {
            self.idle.store(false, Ordering::Relaxed);
            self.core.add_busy(self.id());
        }
    }

    /// Nothing is outstanding. Thousands of idle QPs cost nothing.
    pub(crate) fn set_idle(&self, _gate: &Gate) {
        self.idle.store(true, Ordering::Relaxed);
    }

    /// Posts a send.
    pub fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        self.core.born.check()?;
        let mut g = self.gate();
        self.set_busy(&g);
        if g.holds {
            return self.hold_sends(&mut g, wr);
        }
        match g.phys.post_send(wr) {
            Ok(()) => Ok(()),
            Err(e) => self.sends_failed(&mut g, e, wr),
        }
    }

    /// Posts several sends: all or none.
    pub fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        self.core.born.check()?;
        let mut g = self.gate();
        self.set_busy(&g);
        if g.holds {
            return self.hold_sends(&mut g, batch);
        }
        match g.phys.post_sends(batch) {
            Ok(()) => Ok(()),
            Err(e) => self.sends_failed(&mut g, e, batch),
        }
    }

    #[cold]
    fn hold_sends(&self, g: &mut Gate, batch: &dyn SendBatch) -> Result<()> {
        link::hold_sends(self, g, batch).unwrap_or_else(|| g.phys.post_sends(batch))
    }

    #[cold]
    fn sends_failed(&self, g: &mut Gate, error: Error, batch: &dyn SendBatch) -> Result<()> {
        let ids = (0..batch.count()).map(|i| batch.wr(i).wr_id);
        let hold = |g: &mut Gate| {
            link::hold_sends(self, g, batch).or_else(|| datagram::hold_sends(self, g, batch))
        };
        self.post_failed(g, error, ids, &self.init.send_cq, |phys| phys.post_sends(batch), hold)
    }

    /// Posts a receive.
    pub fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        self.core.born.check()?;
        if self.init.srq.is_some() {
            return Err(PostError::HasSrq.into());
        }
        let mut g = self.gate();
        match g.phys.post_recv(wr) {
            Ok(()) => Ok(()),
            Err(e) => {
                let hold = |g: &mut Gate| {
                    link::hold_recv(self, g, wr).or_else(|| datagram::hold_recv(self, g, wr))
                };
                let id = std::iter::once(wr.wr_id);
                self.post_failed(&mut g, e, id, &self.init.recv_cq, |phys| phys.post_recv(wr), hold)
            }
        }
    }

    /// A post failed. On a dead NIC that is how a failure shows first: switch, and post to the QP
    /// that the switch made, or keep the WR while there is none.
    #[cold]
    fn post_failed(
        &self,
        g: &mut Gate,
        error: Error,
        wr_ids: impl Iterator<Item = u64>,
        cq: &Cq,
        again: impl Fn(&dyn HoldingQp) -> Result<()>,
        hold: impl Fn(&mut Gate) -> Option<Result<()>>,
    ) -> Result<()> {
        let mut error = error;
        // The NIC that the switch chose may be dead by now, too; each try leaves one of them.
        let mut tries = self.core.nic_count() + 1;
        while !g.ended() {
            if let Some(result) = hold(g) {
                return result;
            }
            if error.errno() != libc::EIO || tries == 0 {
                return Err(error);
            }
            tries -= 1;
            match (g.link.is_some(), g.datagram.is_some()) {
                (true, _) => link::suspect(self, g, unbroken_failover_protocol::Reason::PostFailed),
                (_, true) => {
                    datagram::leave(self, g, unbroken_failover_protocol::Reason::PostFailed)
                }
                _ if self.leave_dead_nic(g)? => {}
                _ => return Err(error),
            }
            if !g.failed {
                match hold(g).unwrap_or_else(|| again(&*g.phys)) {
                    Ok(()) => return Ok(()),
                    Err(e) => error = e,
                }
            }
        }
        wr_ids.for_each(|wr_id| cq.push(self.flushed(wr_id, WcStatus::WrFlushErr), false));
        Ok(())
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

    /// Changes state and attributes. What the change raises is there when it returns, where the
    /// device tells of it by then.
    pub fn modify(&self, change: &QpModify) -> Result<()> {
        self.core.born.check()?;
        let physical = {
            let g = self.gate();
            (self.core.inbox.name(), g.nic, g.phys.qpn())
        };
        let (done, told) = own_events::collect(physical, || self.change(change));
        for what in told.into_iter().filter_map(|event| self.tell(event)) {
            self.core.emit_later(what, now_us());
        }
        done
    }

    fn change(&self, change: &QpModify) -> Result<()> {
        let state = change.rc.state;
        let migrates = change.alternate.is_some()
            || change.rc.migration.is_some_and(|m| m != PathMigState::Migrated);
        if migrates && self.init.hold_on_failure {
            return Err(Error::unsupported(
                "an alternate path: failover moves this QP (without: run --no-failover)",
            ));
        }
        if let (Some(QpState::Rtr), true) = (state, self.init.hold_on_failure) {
            let destination = self.destination(&self.gate(), change);
            if let (Some(gid), Some(qpn)) = destination {
                self.core.fetch_qp(gid, qpn);
            }
        }
        let mut g = self.gate();
        if g.failed && state.is_some_and(|s| s != QpState::Err && s != QpState::Reset) {
            return Err(Error::invalid("the QP has failed: reset it or make a new one"));
        }
        if g.datagram.is_some() {
            return datagram::modify(self, &mut g, change);
        }
        match state {
            Some(QpState::Reset) => return self.reset(&mut g),
            Some(QpState::Err) if g.ended() || g.link.is_some() => return self.end(&mut g, change),
            _ => {}
        }
        if g.link.as_ref().is_some_and(|l| l.executor().switching()) {
            return self.modify_later(&mut g, change);
        }
        let had_link = g.link.is_some();
        if !had_link {
            self.leave_dead_nic(&mut g)?;
        }
        if let (Some(QpState::Rtr), true) = (state, self.init.hold_on_failure) {
            self.connect(&mut g, change);
        }
        if !had_link && g.link.is_some() && (self.is_foreign(&g) || !self.core.usable(g.nic)) {
            return self.connect_elsewhere(&mut g, change);
        }
        let mut physical = change.clone();
        if let (Some(code), Some(_)) = (change.rc.timeout, &g.link) {
            physical.rc.timeout = Some(self.core.protected_timeout(code));
        }
        // From RTR to RTS; back from SQD there is none.
        if let (Some(own), Some(link)) = (&mut physical.rc.sq_psn, &g.link) {
            *own = link.executor().moved_sq_psn().unwrap_or(*own);
        }
        physical.path = change.path.map(|path| self.path_from_here(&g, path));
        physical.port = change.port.filter(|_| g.nic == self.nic);
        match self.modify_physical(&g, change, physical.clone()) {
            Ok(()) => {
                g.port = physical.port.unwrap_or(g.port);
                merge(&mut g.app, change);
                if (state, g.why_not) == (Some(QpState::Rtr), plain::NO_JOURNAL) {
                    self.core.emit(What::Unprotected {
                        host: self.core.host(),
                        qp: self.qpn,
                        why: g.why_not.into(),
                    });
                }
                Ok(())
            }
            Err(e) if had_link && e.errno() == libc::EIO => {
                // The NIC is dead, and nobody has noticed so far.
                link::suspect(self, &mut g, unbroken_failover_protocol::Reason::PostFailed);
                match g.link.as_ref().is_some_and(|l| l.executor().switching()) {
                    true => self.modify_later(&mut g, change),
                    false => Err(e),
                }
            }
            Err(e) => {
                if !had_link {
                    link::close(self, &mut g);
                }
                Err(e)
            }
        }
    }

    /// Changes a connected QP during a switch: the QP that carries it next is given what was set
    /// when it starts.
    fn modify_later(&self, g: &mut Gate, change: &QpModify) -> Result<()> {
        let now = self.state_of(g);
        if let Err(e) = change.rc.validate(QpType::Rc, now) {
            return Err(Error::invalid(e.to_string()));
        }
        merge(&mut g.app, change);
        Ok(())
    }

    /// The application moves a connected QP to ERR. Between two paths no physical QP has the work,
    /// and that of a dead NIC changes no more: it is flushed here. One that has failed for good is
    /// where it shall be.
    fn end(&self, g: &mut Gate, change: &QpModify) -> Result<()> {
        if g.ended() {
            return Ok(());
        }
        merge(&mut g.app, change);
        let backlog = match link::close_with_work(self, g) {
            Some(backlog) => backlog,
            None => match g.phys.modify(change) {
                // Its NIC is dead, and it holds what a switch would have taken along.
                Err(e) if e.errno() == libc::EIO => g.phys.quiesce().map_err(|_| e)?,
                result => return result,
            },
        };
        g.failed = true;
        self.flush_backlog(&backlog, WcStatus::WrFlushErr);
        self.take_no_more();
        Ok(())
    }

    /// An asynchronous event of the physical QP, which is one of the logical one if it is news.
    /// Gives what the log is to have of it.
    pub(crate) fn tell(&self, event: QpEvent) -> Option<What> {
        let mut g = self.gate();
        match event {
            // That a later life is connected is none.
            QpEvent::CommEstablished
                if g.link.as_ref().is_some_and(|l| l.executor().lqp().epoch() > 0) =>
            {
                return None
            }
            // Later lives come to SQD, too.
            QpEvent::SqDrained => g.app.sqd_notify = None,
            QpEvent::PathMigrated | QpEvent::PathMigrationFailed => {
                let what = self.migration(&g, event);
                match self.init.hold_on_failure {
                    true => self.has_migrated(&mut g), // the program has not asked for it
                    false => self.raise(event),        // it may wait for it: the log can
                }
                return Some(what);
            }
            _ => {}
        }
        drop(g);
        self.raise(event);
        None
    }

    /// Raises an asynchronous event.
    fn raise(&self, event: QpEvent) {
        if let Some(c) = self.context.upgrade() {
            c.raise(event as u32, AsyncElement::Qp(self.cookie.load(Ordering::Acquire)));
        }
    }

    /// Ends the QP: tells the peer, stops the physical QP, forgets what nobody polled.
    pub fn destroy(&self) -> Result<()> {
        self.core.born.check()?;
        let mut g = self.gate();
        if std::mem::replace(&mut g.destroyed, true) {
            return Ok(());
        }
        link::close(self, &mut g);
        g.phys.destroy();
        self.purge();
        let known = datagram::known(self, &g);
        drop(g);
        self.core.remove_qp(self.id());
        if let Some(c) = self.context.upgrade() {
            c.withdraw(AsyncElement::Qp(self.cookie.load(Ordering::Acquire)));
        }
        if self.init.qp_type == QpType::Ud {
            self.core.aliases.leave();
        }
        if let (Some(d), false) = (&self.core.directory, known.is_empty()) {
            // The entry would expire with the process, too.
            let _ = d.unpublish_moved(&known);
        }
        let connects = self.init.qp_type == QpType::Rc && self.init.hold_on_failure;
        if let (Some(d), true) = (&self.core.directory, connects) {
            // The entry would expire with the process; a QP that a peer still finds there is
            // answered with a refusal.
            let _ = d.unpublish_qp(self.gid(), self.qpn);
        }
        Ok(())
    }

    pub(crate) fn purge(&self) {
        self.init.send_cq.purge(self.qpn);
        self.init.recv_cq.purge(self.qpn);
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
