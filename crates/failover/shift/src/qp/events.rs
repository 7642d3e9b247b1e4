//! What the physical QP of a logical one reports: events that the program hears of, and migrations.

use super::{Gate, Qp};
use crate::probes;
use crate::worker_queue::Job;
use unbroken_events::What;
use unbroken_verbs::QpEvent;

impl Qp {
    /// An asynchronous event of the physical QP, which is one of the logical one if it is news.
    /// Gives what the log is to have of it.
    pub(crate) fn report(&self, event: QpEvent) -> Option<What> {
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
                match self.init.suspend_on_error {
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

    /// The physical QP has migrated, or could not.
    pub(super) fn has_migrated(&self, g: &mut Gate) {
        g.use_port(g.phys.query().attrs.port);
        self.core.qps.note_displaced();
        self.core.jobs.put(Job::TendPortPairs);
    }

    /// Where the physical QP has migrated, or could not, for the log.
    pub(super) fn migration(&self, g: &Gate, event: QpEvent) -> What {
        let attrs = g.phys.query().attrs;
        let (host, qp) = (self.core.nics.host(), self.qpn);
        let path = |port, dest| format!("{}-{}", self.core.nics.port_name(g.nic, port), dest);
        let primary = path(attrs.port.unwrap_or(1), attrs.path.unwrap_or_default().dest_gid);
        match (event, attrs.alternate) {
            (QpEvent::PathMigrated, _) => {
                probes::migration(qp, g.nic, attrs.port.unwrap_or(1));
                What::PathMigrated { host, qp, to: primary }
            }
            (_, to) => {
                let to = to.map_or_else(String::new, |p| path(p.port, p.dest_gid));
                What::PathMigrationFailed { host, qp, from: primary, to }
            }
        }
    }
}
