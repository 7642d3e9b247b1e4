//! What a program changes of a logical QP.

use super::{merge, Gate, Qp};
use crate::datagram;
use crate::link;
use crate::own_events;
use crate::plain;
use unbroken_events::What;
use unbroken_failover_protocol::Reason;
use unbroken_runtime::now_us;
use unbroken_types::{PathMigState, QpState, QpType, WcStatus};
use unbroken_verbs::{Error, QpModify, Result};

impl Qp {
    /// Changes state and attributes. What the change raises is there when it returns, where the
    /// device tells of it by then.
    pub fn modify(&self, change: &QpModify) -> Result<()> {
        self.core.born.check()?;
        let physical = {
            let g = self.gate();
            (self.core.jobs.name(), g.nic, g.phys.qpn())
        };
        let (done, reported) = own_events::collect(physical, || self.change(change));
        for what in reported.into_iter().filter_map(|event| self.report(event)) {
            self.core.events.defer(what, now_us());
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
        if !had_link && g.link.is_some() && (self.is_foreign(&g) || !self.core.nics.usable(g.nic)) {
            return self.connect_elsewhere(&mut g, change);
        }
        self.change_physical(&mut g, change, had_link)
    }

    /// Changes the physical QP of a QP that is not between two paths. `had_link`: it was connected
    /// before.
    fn change_physical(&self, g: &mut Gate, change: &QpModify, had_link: bool) -> Result<()> {
        let physical = self.as_from_here(g, change);
        let port = physical.port;
        let error = match self.modify_physical(g, change, physical) {
            Ok(()) => {
                g.port = port.unwrap_or(g.port);
                merge(&mut g.app, change);
                if (change.rc.state, g.why_not) == (Some(QpState::Rtr), plain::NO_JOURNAL) {
                    self.core.events.emit(What::Unprotected {
                        host: self.core.nics.host(),
                        qp: self.qpn,
                        why: g.why_not.into(),
                    });
                }
                return Ok(());
            }
            Err(e) => e,
        };
        if !had_link {
            link::close(self, g);
        } else if error.errno() == libc::EIO {
            // The NIC is dead, and nobody has noticed so far.
            link::suspect(self, g, Reason::PostFailed);
            if g.link.as_ref().is_some_and(|l| l.executor().switching()) {
                return self.modify_later(g, change);
            }
        }
        Err(error)
    }

    /// What the program changes, as the physical QP is to have it: on the NIC that it is on, to the
    /// one that its peer is on.
    fn as_from_here(&self, g: &Gate, change: &QpModify) -> QpModify {
        let mut physical = change.clone();
        if let (Some(code), Some(_)) = (change.rc.timeout, &g.link) {
            physical.rc.timeout = Some(self.core.settings.protected_timeout(code));
        }
        // From RTR to RTS; back from SQD there is none.
        if let (Some(own), Some(link)) = (&mut physical.rc.sq_psn, &g.link) {
            *own = link.executor().moved_sq_psn().unwrap_or(*own);
        }
        physical.path = change.path.map(|path| self.path_from_here(g, path));
        physical.port = change.port.filter(|_| g.nic == self.nic);
        physical
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
}
