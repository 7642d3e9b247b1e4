//! What a program changes of a logical QP.

use super::{merge, Gate, Qp};
use crate::datagram;
use crate::fitness;
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
        self.core.process.check()?;
        let physical = {
            let g = self.gate();
            (self.core.jobs.name(), g.nic, g.phys.qpn())
        };
        let (done, reported) = own_events::collect(physical, || self.change_or_leave(change));
        for what in reported.into_iter().filter_map(|event| self.report(event)) {
            self.core.events.defer(what, now_us());
        }
        done
    }

    /// The NIC of a QP that is not connected yet may die under the change: the QP begins anew on
    /// another, and is changed there.
    fn change_or_leave(&self, change: &QpModify) -> Result<()> {
        let mut tries = self.core.nics.count();
        loop {
            match self.change(change) {
                Err(e) if e.errno() == libc::EIO && tries > 0 => {
                    // The first error says what went wrong, not that no other NIC works either.
                    if !self.leave_dead_nic(&mut self.gate()).unwrap_or(false) {
                        return Err(e);
                    }
                    tries -= 1;
                }
                done => return done,
            }
        }
    }

    fn change(&self, change: &QpModify) -> Result<()> {
        let state = change.rc.state;
        let migrates = change.alternate.is_some()
            || change.rc.migration.is_some_and(|m| m != PathMigState::Migrated);
        if migrates && self.init.suspend_on_error {
            return Err(Error::unsupported(
                "an alternate path: failover moves this QP (without: run --no-failover)",
            ));
        }
        let sought = match (state, self.init.suspend_on_error) {
            (Some(QpState::Rtr), true) => {
                self.follow_network(change);
                self.ask_for_peer(change)
            }
            _ => None,
        };
        let mut g = self.gate();
        let _in_verb = self.enter_verb();
        if g.failed && state.is_some_and(|s| s != QpState::Err && s != QpState::Reset) {
            return Err(Error::invalid("the QP has failed: reset it or make a new one"));
        }
        if g.datagram.is_some() {
            return datagram::modify(self, &mut g, change);
        }
        match state {
            Some(QpState::Reset) => return self.reset(&mut g),
            Some(QpState::Err) if g.ended() || g.link.is_some() || g.seeks.is_some() => {
                return self.end(&mut g, change)
            }
            _ => {}
        }
        if g.keeps_all() || g.link.as_ref().is_some_and(|l| l.executor().switching()) {
            return self.modify_later(&mut g, change);
        }
        let had_link = g.link.is_some();
        if !had_link {
            self.leave_dead_nic(&mut g)?;
        }
        self.look_for_depth(change);
        if let Some(sought) = sought {
            self.connect(&mut g, change, sought);
        }
        let by_hello = self.connects_by_hello(&g);
        if !had_link && g.link.is_some() && (by_hello || !self.core.nics.usable(g.nic)) {
            return self.connect_elsewhere(&mut g, change);
        }
        if by_hello && state == Some(QpState::Rtr) && self.keep_until_found(&mut g) {
            return self.modify_later(&mut g, change);
        }
        self.change_physical(&mut g, change, had_link)
    }

    /// Peers are in the network that the program connects by. Its other NICs are reached there, too,
    /// which peers are told before they can find this QP.
    fn follow_network(&self, change: &QpModify) {
        let by = change.path.map(|path| path.sgid_index);
        if by.is_some_and(|index| self.core.nics.follow(self.nic, index)) {
            self.core.publish_process();
        }
    }

    /// NICs that cannot have as many READs and atomics of a peer under way as the program wants are
    /// no backups.
    fn look_for_depth(&self, change: &QpModify) {
        let nics = &self.core.nics;
        for nic in (0..nics.count()).filter(|nic| self.init.suspend_on_error && *nic != self.nic) {
            if let Some(why) = fitness::lacks_depth(&nics.attr(nic), &change.rc) {
                self.unfit.add(nic);
                self.core.tell_unfit(nic, &why);
            }
        }
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
        let begins = matches!(change.rc.state, Some(QpState::Rtr | QpState::Reset));
        let dead = error.errno() == libc::EIO && g.link.is_none();
        if dead && !begins && self.keep_from_now_on(g) {
            return self.modify_later(g, change);
        }
        if !had_link {
            link::close(self, g);
            g.seeks = g.seeks.take().filter(|_| change.rc.state != Some(QpState::Rtr));
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

    /// Changes a connected QP during a switch, or while its peer is sought on a dead NIC: the QP
    /// that carries it next is given what was set when it starts.
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
        let kept = self.seek_no_more(g);
        merge(&mut g.app, change);
        if let Some(kept) = kept {
            self.flush_with_kept(g, kept, WcStatus::WrFlushErr);
            return Ok(());
        }
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
