//! How a QP comes to its physical one, and loses it: it is connected, begins elsewhere where its
//! NIC is dead, is reset, is destroyed.

use super::{merge, Gate, Qp};
use crate::async_events::AsyncElement;
use crate::datagram;
use crate::link;
use crate::port_pairs::PathPorts;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use unbroken_events::What;
use unbroken_failover_protocol::Reason;
use unbroken_runtime::now_us;
use unbroken_types::{Gid, PathAttr, QpState, QpType};
use unbroken_verbs::{Error, QpModify, RcModify, Result, ResumableQp};

impl Qp {
    /// Whether the network knows the physical QP by another number or NIC than the program's.
    /// (Numbers of different NICs are often equal.)
    pub(super) fn is_foreign(&self, g: &Gate) -> bool {
        (g.nic, g.phys.qpn()) != (self.nic, self.qpn)
    }

    /// Whether the peer must be told something before it sends: where the QP is, or that regions
    /// have other keys on its NIC than the program gave to peers, as that NIC has died and was
    /// opened again. So the QP is connected by a switch, whose Hello says both.
    pub(super) fn connects_by_hello(&self, g: &Gate) -> bool {
        self.is_foreign(g) || self.core.nics.has_foreign_keys(g.nic)
    }

    /// A QP that is not connected and whose NIC has died is made anew on another, with its
    /// receives. Gives whether that was so.
    pub(super) fn leave_dead_nic(&self, g: &mut Gate) -> Result<bool> {
        if !self.init.suspend_on_error
            || !g.is_early()
            || g.failed
            || g.destroyed
            || self.core.nics.device(g.nic).is_some()
        {
            return Ok(false);
        }
        let (nic, fresh) = self.core.make_qp(self.nic, &self.init, true)?;
        if g.app.rc.state.is_some_and(|s| s != QpState::Reset) {
            let rc = RcModify {
                state: Some(QpState::Init),
                access: g.app.rc.access,
                ..RcModify::default()
            };
            fresh.modify(&QpModify { rc, ..QpModify::default() })?;
        }
        fresh.adopt(g.phys.quiesce()?)?;
        self.replace_physical(g, nic, fresh);
        Ok(true)
    }

    /// The NIC of a QP has died. One that is not connected yet begins anew on another; if there is
    /// none, it stays as it is, and finds one with the program's next verb, or does not. False: it
    /// is further than that.
    pub(crate) fn begins_elsewhere(&self, g: &mut Gate) -> bool {
        if !g.is_early() || !self.init.suspend_on_error {
            return false;
        }
        if let Err(e) = self.leave_dead_nic(g) {
            self.core.events.complain("a QP cannot leave its dead NIC", &e);
        }
        true
    }

    /// The NIC of a QP has died. Where nothing protects it the program gets the error, and the log
    /// has that, once for each connection. (Of one that an error of its own had ended before, the
    /// log says the same: its device does not tell the two apart.)
    pub(crate) fn ends_with_nic(&self, g: &mut Gate) -> Option<What> {
        let goes_on = g.link.is_some() || g.datagram.is_some() || g.seeks.is_some();
        if goes_on || self.is_plain || g.is_early() || g.is_over() || g.told_lost {
            return None;
        }
        g.told_lost = true;
        let why = format!("{} has died; not protected: {}", self.core.nics.name(g.nic), g.why_not);
        Some(self.has_failed(why))
    }

    /// What the log has where the program gets the error that the QP has failed with.
    pub(super) fn has_failed(&self, why: String) -> What {
        What::GiveUp { host: self.core.nics.host(), qp: self.qpn, why, of_programs: false }
    }

    /// Whether the program need not hear that the NIC of this QP fails: the QP goes on over
    /// another, or, while it is being connected, begins there. One whose peer is looked for counts
    /// with those, as long as that takes no longer than usual.
    pub(crate) fn absorbs(&self, g: &Gate) -> bool {
        let connects = g.is_early() || g.seeks.as_ref().is_some_and(|seeks| !seeks.told);
        let moves = g.link.is_some() || g.datagram.is_some();
        !g.failed && (moves || self.init.suspend_on_error && connects)
    }

    pub(super) fn replace_physical(&self, g: &mut Gate, nic: usize, fresh: Arc<dyn ResumableQp>) {
        g.phys.retire();
        self.core.qps.rename_physical(self.id(), (g.nic, g.phys.qpn()), (nic, fresh.qpn()));
        (g.phys, g.nic, g.port) = (fresh, nic, 1);
    }

    /// Connects a QP whose peer cannot reach it by its number, or must hear of its NIC's keys first:
    /// the two ends tell each other where they are, as in a switch.
    pub(super) fn connect_elsewhere(&self, g: &mut Gate, change: &QpModify) -> Result<()> {
        if let Err(e) = change.rc.validate(QpType::Rc, g.phys.state()) {
            link::close(self, g);
            return Err(Error::invalid(e.to_string()));
        }
        merge(&mut g.app, change);
        link::suspect(self, g, Reason::Connect);
        Ok(())
    }

    pub(super) fn reset(&self, g: &mut Gate) -> Result<()> {
        let rc = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
        let in_place = !self.is_foreign(g) || !self.init.suspend_on_error;
        match if in_place {
            g.phys.modify(&QpModify { rc, ..QpModify::default() })
        } else {
            Err(Error::device_gone(""))
        } {
            Ok(()) => link::close(self, g),
            // It has moved, or its NIC is dead: it begins anew. If it cannot, nothing has changed.
            Err(e) if self.init.suspend_on_error && e.errno() == libc::EIO => {
                let (nic, fresh) = self.core.make_qp(self.nic, &self.init, true)?;
                link::close(self, g);
                self.replace_physical(g, nic, fresh);
            }
            Err(e) => return Err(e),
        }
        // What the old life completed and nobody polled would be taken for the new life's.
        self.purge();
        g.app = QpModify::default();
        (g.failed, g.told_lost) = (false, false);
        drop(self.seek_no_more(g));
        if self.init.suspend_on_error {
            g.why_not = "not connected";
            g.connection = g.connection.wrapping_add(1);
            self.unpublish_alias(g);
            if !g.destroyed {
                self.publish_connection(g.connection);
            }
        }
        Ok(())
    }

    /// The peer that the application names, now or earlier: its NIC and QPN.
    pub(super) fn destination(&self, g: &Gate, change: &QpModify) -> (Option<Gid>, Option<u32>) {
        let gid = change.path.or(g.app.path).map(|path| self.core.nics.first_port(path.dest_gid));
        (gid, change.rc.dest_qpn.or(g.app.rc.dest_qpn))
    }

    /// The path of the physical QP where the program has set this one: from the NIC that it is on
    /// to the one that its peer is on.
    pub(super) fn path_from_here(&self, g: &Gate, path: PathAttr) -> PathAttr {
        let moved = g.link.as_ref().is_some_and(|l| l.executor().lqp().epoch() > 0);
        match moved.then(|| g.phys.query().attrs.path).flatten() {
            Some(now) => path.elsewhere(now.port, now.sgid_index, now.dest_gid, now.dlid),
            None if g.nic == self.nic => path,
            None => {
                let sgid_index =
                    self.core.nics.device(g.nic).map_or(0, |device| device.gid_index());
                path.elsewhere(1, sgid_index, path.dest_gid, path.dlid)
            }
        }
    }

    /// Changes the physical QP. Where that connects it, it is given an alternate path with it, if
    /// there is one that it takes.
    pub(super) fn modify_physical(
        &self,
        g: &Gate,
        change: &QpModify,
        physical: QpModify,
    ) -> Result<()> {
        if self.init.suspend_on_error && self.init.qp_type == QpType::Rc {
            let mut with_pair = physical.clone();
            // The program's word is of a path that it has loaded itself.
            with_pair.rc.migration = None;
            self.load_pair(g, change, &mut with_pair);
            if with_pair.alternate.is_some() && g.phys.modify(&with_pair).is_ok() {
                return Ok(());
            }
            return g
                .phys
                .modify(&QpModify { rc: RcModify { migration: None, ..physical.rc }, ..physical });
        }
        g.phys.modify(&physical)
    }

    /// Adds another port pair to a change that connects the physical QP, if there is one.
    pub(super) fn load_pair(&self, g: &Gate, change: &QpModify, physical: &mut QpModify) {
        let Some(link) = g.link.as_ref().filter(|_| self.core.nics.port_count(g.nic) > 1) else {
            return;
        };
        let connects = match change.rc.state {
            Some(QpState::Rtr) => true,
            Some(QpState::Rts) => g.phys.state() == QpState::Rtr,
            _ => false,
        };
        let (Some(path), Some(default), true) =
            (link.executor().active_path(), link.executor().lqp().slots().get(0), connects)
        else {
            return;
        };
        let mut app = g.app.clone();
        merge(&mut app, change);
        let port = physical.port.unwrap_or(g.port);
        let ports = PathPorts {
            nics: &self.core.nics,
            settings: &self.core.settings,
            qpn: self.qpn,
            peer: link.peer(),
            path,
            default,
            port,
            since_us: 0,
            app: &app,
        };
        ports.connect(now_us(), &g.phys.query().attrs, physical);
    }

    /// Ends the QP: tells the peer, stops the physical QP, forgets what nobody polled.
    pub fn destroy(&self) -> Result<()> {
        self.core.process.check()?;
        let mut g = self.gate();
        if std::mem::replace(&mut g.destroyed, true) {
            return Ok(());
        }
        link::close(self, &mut g);
        drop(self.seek_no_more(&mut g));
        let known = datagram::known(self, &g);
        let alias = g.alias.take();
        let (phys, backup) = (g.phys.clone(), g.backup.take());
        self.leave_lane();
        // The device may take its time, and the worker looks at all QPs.
        drop(g);
        phys.destroy();
        self.purge();
        if let Some(backup) = backup {
            // Of another NIC, for which the program does not wait.
            backup.phys.retire();
        }
        self.core.backups.wait_for(self.id());
        self.core.qps.remove(self.id());
        if let Some(context) = self.context.upgrade() {
            context.events.withdraw(AsyncElement::Qp(self.cookie.load(Ordering::Acquire)));
        }
        if self.init.qp_type == QpType::Ud {
            self.core.aliases.leave();
        }
        if let (Some(d), false) = (&self.core.directory, known.is_empty()) {
            // The entry would expire with the process, too.
            let _ = d.unpublish_moved(&known);
        }
        let connects = self.init.qp_type == QpType::Rc && self.init.suspend_on_error;
        if let (Some(d), true) = (&self.core.directory, connects) {
            // Soon: until then a peer that finds it there is answered with a refusal.
            let _ = d.unpublish_qp(self.gid(), self.qpn);
            alias.map(|gid| d.unpublish_qp(gid, self.qpn));
        }
        Ok(())
    }
}
