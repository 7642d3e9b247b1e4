//! What is shown of a logical QP.

use super::{merge, Gate, Qp};
use crate::datagram;
use unbroken_events::QpStatus;
use unbroken_types::{PathMigState, QpState};
use unbroken_verbs::{QpModify, QpSnapshot};

impl Qp {
    /// Present attributes, as the application set them; the state is true, and RTS during a switch.
    pub fn query(&self) -> QpSnapshot {
        let g = self.gate();
        let mut s = g.phys.query();
        s.caps = self.init.caps;
        let port_path = (s.attrs.path, s.attrs.port, s.attrs.rc.timeout);
        merge(&mut s.attrs, &g.app);
        if self.init.suspend_on_error {
            // What failover does with it is not the program's.
            (s.attrs.alternate, s.attrs.rc.alternate, s.attrs.rc.migration) =
                (None, None, Some(PathMigState::Migrated));
        } else if port_path.0.is_some() {
            // It may have migrated to its alternate path.
            (s.attrs.path, s.attrs.port, s.attrs.rc.timeout) = port_path;
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
        } else if g.keeps_all() || g.link.as_ref().is_some_and(|l| l.executor().switching()) {
            g.app.rc.state.unwrap_or(QpState::Rts)
        } else if g.datagram.as_ref().is_some_and(|d| d.parked()) {
            datagram::parked_state(g)
        } else {
            g.phys.state()
        }
    }

    /// The names of the NICs at both ends of the path in use, and the epoch. None while it is not
    /// connected, and where failover does not look after it.
    pub fn path(&self) -> Option<(String, String, u32)> {
        let g = self.gate();
        let link = g.link.as_ref()?;
        let lqp = link.executor().lqp();
        let path = lqp.path()?;
        let remote = link.peer().nic(path.remote).map_or_else(String::new, |nic| nic.name);
        Some((self.core.nics.name(path.local.into()), remote, lqp.epoch() as u32))
    }

    /// What `unbroken status` shows.
    pub fn status(&self) -> QpStatus {
        let Some(g) = self.gate_now() else {
            return QpStatus {
                qp: self.qpn,
                host: self.core.nics.host(),
                own: format!("{}:{}", self.gid(), self.qpn),
                why: "its program changes it, and its NIC does not answer".into(),
                ..QpStatus::default()
            };
        };
        if let Some(status) = datagram::status(self, &g) {
            return status;
        }
        let (path, epoch) = self.path_and_epoch(&g);
        let known = g.link.as_ref().map(|link| link.executor().lqp().peer());
        let peer = match (g.app.path, g.app.rc.dest_qpn, known) {
            // The name of its NIC, which is the peer's own name for itself, too.
            (Some(_), Some(qpn), Some(peer)) => format!("{}:{qpn}", peer.gid),
            (Some(path), Some(qpn), None) if path.dlid != 0 && !path.grh => {
                format!("LID {}:{qpn}", path.dlid)
            }
            (Some(path), Some(qpn), None) => format!("{}:{qpn}", path.dest_gid),
            _ => String::new(),
        };
        let progress = g.phys.progress();
        let changed_keys = g.link.is_some() && progress.keys_changed;
        let bound = changed_keys.then_some("it uses memory windows, which a switch would lose");
        let several = g.link.is_none() || self.core.nics.port_count(g.nic) > 1;
        let attrs = if several { g.phys.query().attrs } else { QpModify::default() };
        let armed = attrs.rc.migration == Some(PathMigState::Armed);
        let protected = g.link.as_ref().is_some_and(|l| l.executor().ready() || armed)
            && !g.failed
            && bound.is_none();
        let pending = !protected && g.seeks.as_ref().is_some_and(|seeks| seeks.is_pending());
        let why = match bound {
            _ if protected => "",
            Some(why) => why,
            None if g.link.is_some() && self.unfit.any() => {
                "no other NIC can carry it; those of this host lack something that it was made with"
            }
            None if g.link.is_some() => "no other NIC or port of the peer is known yet",
            None => g.why_not,
        };
        let alternate = attrs
            .alternate
            .map(|p| format!("{}-{}", self.core.nics.port_name(g.nic, p.port), p.dest_gid));
        let primary = match attrs.path {
            Some(p) => {
                format!(
                    "{}-{}",
                    self.core.nics.port_name(g.nic, attrs.port.unwrap_or(1)),
                    p.dest_gid
                )
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
            host: self.core.nics.host(),
            own: format!("{}:{}", self.gid(), self.qpn),
            peer,
            path,
            epoch: epoch as u32,
            protected,
            pending,
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

    /// The path that a connected QP is on, as people call it, and the epoch.
    fn path_and_epoch(&self, g: &Gate) -> (String, u64) {
        let Some(link) = &g.link else { return (String::new(), 0) };
        let lqp = link.executor().lqp();
        let name = |path| link.peer().path_name(&self.core.nics, path);
        (lqp.path().map_or_else(String::new, name), lqp.epoch())
    }
}
