//! How a QP comes to its physical one: it is connected, begins elsewhere where its NIC is dead, is
//! reset; and what is shown of it.

use super::*;
use crate::lanes::Place;
use crate::worker::{port_name, Job};
use unbroken_events::QpStatus;
use unbroken_failover_protocol::Endpoint;
use unbroken_runtime::now_us;
use unbroken_verbs::RcModify;

impl Qp {
    /// Whether the network knows the physical QP by another number or NIC than the program's.
    /// (Numbers of different NICs are often equal.)
    pub(super) fn is_foreign(&self, g: &Gate) -> bool {
        (g.nic, g.phys.qpn()) != (self.nic, self.qpn)
    }

    /// A QP that is not connected and whose NIC has died is made anew on another, with its
    /// receives. Gives whether that was so.
    pub(super) fn leave_dead_nic(&self, g: &mut Gate) -> Result<bool> {
        if !self.init.hold_on_failure
            || !g.is_early()
            || g.failed
            || self.core.device(g.nic).is_some()
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
        if !g.is_early() || !self.init.hold_on_failure {
            return false;
        }
        if let Err(e) = self.leave_dead_nic(g) {
            self.core.complain("a QP cannot leave its dead NIC", &e);
        }
        true
    }

    pub(super) fn replace_physical(&self, g: &mut Gate, nic: usize, fresh: Arc<dyn HoldingQp>) {
        g.phys.destroy();
        self.core.rename_physical(self.id(), (g.nic, g.phys.qpn()), (nic, fresh.qpn()));
        (g.phys, g.nic, g.port) = (fresh, nic, 1);
    }

    /// Connects a QP whose peer cannot reach it by its number: the two ends tell each other where
    /// they are, as in a switch.
    pub(super) fn connect_elsewhere(&self, g: &mut Gate, change: &QpModify) -> Result<()> {
        if let Err(e) = change.rc.validate(QpType::Rc, g.phys.state()) {
            link::close(self, g);
            return Err(Error::invalid(e.to_string()));
        }
        merge(&mut g.app, change);
        link::suspect(self, g, unbroken_failover_protocol::Reason::Connect);
        Ok(())
    }

    pub(super) fn reset(&self, g: &mut Gate) -> Result<()> {
        let rc = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
        let in_place = !self.is_foreign(g) || !self.init.hold_on_failure;
        match if in_place {
            g.phys.modify(&QpModify { rc, ..QpModify::default() })
        } else {
            Err(Error::device_gone(""))
        } {
            Ok(()) => link::close(self, g),
            // It has moved, or its NIC is dead: it begins anew. If it cannot, nothing has changed.
            Err(e) if self.init.hold_on_failure && e.errno() == libc::EIO => {
                let (nic, fresh) = self.core.make_qp(self.nic, &self.init, true)?;
                link::close(self, g);
                self.replace_physical(g, nic, fresh);
            }
            Err(e) => return Err(e),
        }
        // What the old life completed and nobody polled would be taken for the new life's.
        self.purge();
        g.app = QpModify::default();
        g.failed = false;
        if self.init.hold_on_failure {
            g.why_not = "not connected";
            g.connection = g.connection.wrapping_add(1);
            self.publish(g.connection);
        }
        Ok(())
    }

    /// The peer that the application names, now or earlier: its NIC and QPN.
    pub(super) fn destination(&self, g: &Gate, change: &QpModify) -> (Option<Gid>, Option<u32>) {
        let gid = change.path.or(g.app.path).map(|path| self.core.first_port(path.dest_gid));
        (gid, change.rc.dest_qpn.or(g.app.rc.dest_qpn))
    }

    /// The application names the peer: look it up, and protect the QP if it is one of ours.
    pub(super) fn connect(&self, g: &mut Gate, change: &QpModify) {
        let (Some(gid), Some(qpn)) = self.destination(g, change) else { return };
        let mut detail = String::new();
        g.why_not = match self.core.directory.as_ref().map(|d| d.lookup_qp(gid, qpn)) {
            _ if !self.core.watched() => "the thread for failover could not be started",
            Some(Ok(Some((incarnation, connection)))) => {
                match Link::new(
                    self,
                    g.connection,
                    Endpoint { gid, qpn, incarnation, connection },
                    self.is_foreign(g),
                ) {
                    Ok(link) => {
                        g.link = Some(Box::new(link));
                        return;
                    }
                    Err(why) => why,
                }
            }
            Some(Ok(None)) => "the peer is not in the directory",
            Some(Err(e)) => {
                self.core.complain("the directory cannot be read; the QP stays unprotected", &e);
                detail = format!(": {e}");
                "the directory cannot be read"
            }
            None => "failover is off",
        };
        let why = g.why_not.to_owned() + &detail;
        self.core.emit(What::Unprotected { host: self.core.host(), qp: self.qpn, why });
    }

    /// The path of the physical QP where the program has set this one: from the NIC that it is on
    /// to the one that its peer is on.
    pub(super) fn path_from_here(&self, g: &Gate, path: PathAttr) -> PathAttr {
        let moved = g.link.as_ref().is_some_and(|l| l.executor().lqp().epoch() > 0);
        match moved.then(|| g.phys.query().attrs.path).flatten() {
            Some(now) => path.elsewhere(now.port, now.sgid_index, now.dest_gid),
            None if g.nic == self.nic => path,
            None => {
                let sgid_index = self.core.device(g.nic).map_or(0, |device| device.gid_index());
                path.elsewhere(1, sgid_index, path.dest_gid)
            }
        }
    }

    /// Changes the physical QP. Where that connects it, it is given another lane with it, if there
    /// is one that it takes.
    pub(super) fn modify_physical(
        &self,
        g: &Gate,
        change: &QpModify,
        physical: QpModify,
    ) -> Result<()> {
        if self.init.hold_on_failure && self.init.qp_type == QpType::Rc {
            let mut with_lane = physical.clone();
            // The program's word is of a path that it has loaded itself.
            with_lane.rc.migration = None;
            self.load_lane(g, change, &mut with_lane);
            if with_lane.alternate.is_some() && g.phys.modify(&with_lane).is_ok() {
                return Ok(());
            }
            return g
                .phys
                .modify(&QpModify { rc: RcModify { migration: None, ..physical.rc }, ..physical });
        }
        g.phys.modify(&physical)
    }

    /// Adds another lane to a change that connects the physical QP, if there is one.
    pub(super) fn load_lane(&self, g: &Gate, change: &QpModify, physical: &mut QpModify) {
        let Some(link) = g.link.as_ref().filter(|_| self.core.port_count(g.nic) > 1) else {
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
        let place = Place {
            core: &self.core,
            qpn: self.qpn,
            peer: link.peer(),
            path,
            default,
            port,
            since_us: 0,
            app: &app,
        };
        place.connect(now_us(), &g.phys.query().attrs, physical);
    }

    /// The physical QP has migrated, or could not.
    pub(super) fn has_migrated(&self, g: &mut Gate) {
        g.use_port(g.phys.query().attrs.port);
        self.core.note_away();
        self.core.inbox.put(Job::Lanes);
    }

    /// Where the physical QP has migrated, or could not, for the log.
    pub(super) fn migration(&self, g: &Gate, event: QpEvent) -> What {
        let attrs = g.phys.query().attrs;
        let (host, qp) = (self.core.host(), self.qpn);
        let path = |port, dest| format!("{}-{}", port_name(&self.core, g.nic, port), dest);
        let primary = path(attrs.port.unwrap_or(1), attrs.path.unwrap_or_default().dest_gid);
        match (event, attrs.alternate) {
            (QpEvent::PathMigrated, _) => What::PathMigrated { host, qp, to: primary },
            (_, to) => {
                let to = to.map_or_else(String::new, |p| path(p.port, p.dest_gid));
                What::PathMigrationFailed { host, qp, from: primary, to }
            }
        }
    }

    /// Present attributes, as the application set them; the state is true, and RTS during a switch.
    pub fn query(&self) -> QpSnapshot {
        let g = self.gate();
        let mut s = g.phys.query();
        s.caps = self.init.caps;
        let way = (s.attrs.path, s.attrs.port, s.attrs.rc.timeout);
        merge(&mut s.attrs, &g.app);
        if self.init.hold_on_failure {
            // What failover does with it is not the program's.
            (s.attrs.alternate, s.attrs.rc.alternate, s.attrs.rc.migration) =
                (None, None, Some(PathMigState::Migrated));
        } else if way.0.is_some() {
            // It may have migrated to its alternate path.
            (s.attrs.path, s.attrs.port, s.attrs.rc.timeout) = way;
        }
        s.attrs.rc.state = Some(self.state_of(&g));
        s
    }

    /// The present state.
    pub fn state(&self) -> QpState {
        self.state_of(&self.gate())
    }

    pub(super) fn state_of(&self, g: &Gate) -> QpState {
        if g.failed {
            QpState::Err
        } else if g.link.as_ref().is_some_and(|l| l.executor().switching()) {
            g.app.rc.state.unwrap_or(QpState::Rts)
        } else if g.datagram.as_ref().is_some_and(|d| d.parked()) {
            datagram::state(g)
        } else {
            g.phys.state()
        }
    }

    /// What `unbroken status` shows.
    pub fn status(&self) -> QpStatus {
        let g = self.gate();
        if let Some(status) = datagram::status(self, &g) {
            return status;
        }
        let (path, epoch) = match &g.link {
            Some(l) => {
                let lqp = l.executor().lqp();
                let path = lqp
                    .path()
                    .map_or_else(String::new, |path| l.peer().path_name(&self.core, path));
                (path, lqp.epoch())
            }
            None => (String::new(), 0),
        };
        let peer = match (g.app.path, g.app.rc.dest_qpn) {
            (Some(path), Some(qpn)) => format!("{}:{qpn}", path.dest_gid),
            _ => String::new(),
        };
        let progress = g.phys.progress();
        let changed_keys = g.link.is_some() && progress.keys_changed;
        let bound = changed_keys.then_some("it uses memory windows, which a switch would lose");
        let lanes = g.link.is_none() || self.core.port_count(g.nic) > 1;
        let attrs = if lanes { g.phys.query().attrs } else { QpModify::default() };
        let armed = attrs.rc.migration == Some(PathMigState::Armed);
        let protected = g.link.as_ref().is_some_and(|l| l.executor().ready() || armed)
            && !g.failed
            && bound.is_none();
        let why = if protected {
            ""
        } else if let Some(why) = bound {
            why
        } else if g.link.is_some() {
            "no other NIC or port of the peer is known yet"
        } else {
            g.why_not
        };
        let alternate = attrs
            .alternate
            .map(|p| format!("{}-{}", port_name(&self.core, g.nic, p.port), p.dest_gid));
        let primary = match attrs.path {
            Some(p) => {
                format!("{}-{}", port_name(&self.core, g.nic, attrs.port.unwrap_or(1)), p.dest_gid)
            }
            None => String::new(),
        };
        QpStatus {
            primary,
            alternate: alternate.unwrap_or_default(),
            migration: attrs
                .rc
                .migration
                .map_or_else(String::new, |m| format!("{m:?}").to_lowercase()),
            qp: self.qpn,
            host: self.core.host(),
            own: format!("{}:{}", self.gid(), self.qpn),
            peer,
            path,
            epoch: epoch as u32,
            protected,
            why: why.into(),
            state: if g.failed {
                "failed".into()
            } else if g.link.as_ref().is_some_and(|l| l.executor().switching()) {
                "switching".into()
            } else {
                format!("{:?}", progress.state).to_lowercase()
            },
        }
    }
}
