//! The worker's part in the table of moved UD QPs: it enters those of this process, and reads what
//! others have entered.
//!
//! The worker does both, since both take a turn at the directory's file, for which no thread that
//! polls or posts shall wait. A move is entered there, and every process is told that there is news
//! ([`Body::Moved`]). That message may be lost; so a datagram from a QP that nobody has heard of
//! makes its receiver read the table (it is dropped, as UD allows), and a process that has UD QPs
//! reads it once a second in any case.

use crate::control_endpoint::{Class, ControlAddr};
use crate::core::Core;
use crate::datagram;
use crate::qp::Qp;
use crate::qps::LogicalId;
use unbroken_directory::{DirectoryError, MovedQp};
use unbroken_failover_protocol::message::Body;
use unbroken_failover_protocol::{Endpoint, Message};

/// How often a process with UD QPs reads the table without being told to.
const SAFETY_US: u64 = 1_000_000;
/// It is not read more often than this, whatever strangers send.
const PAUSE_US: u64 = 2_000;

/// What the worker has to do about addresses.
#[derive(Default)]
pub(crate) struct MovedQps {
    /// QPs that have moved and are not entered yet.
    moved: Vec<LogicalId>,
    /// Somebody says that there is news.
    wanted: bool,
    read_at_us: u64,
}

impl MovedQps {
    /// A QP of ours has moved.
    pub(crate) fn moved(&mut self, id: LogicalId) {
        self.moved.push(id);
    }

    /// There is news in the table.
    pub(crate) fn want(&mut self) {
        self.wanted = true;
    }

    /// When [`MovedQps::work`] is due.
    pub(crate) fn deadline_us(&self, core: &Core<Qp>) -> u64 {
        if !self.moved.is_empty() {
            0
        } else if self.wanted {
            self.read_at_us + PAUSE_US
        } else if core.aliases.used() {
            self.read_at_us + SAFETY_US
        } else {
            u64::MAX
        }
    }

    /// Enters what has moved, and reads what others have entered.
    pub(crate) fn work(&mut self, core: &Core<Qp>, now_us: u64) {
        let due = self.deadline_us(core) <= now_us;
        let moved = std::mem::take(&mut self.moved);
        if !moved.is_empty() {
            if let Err(e) = publish(core, &moved) {
                let what = "the directory does not take where UD queue pairs have moved: their \
                            peers lose them";
                core.events.complain_of_directory(what, &e);
            }
        }
        if due {
            (self.wanted, self.read_at_us) = (false, now_us);
            core.aliases.load(core.directory.as_ref(), &core.events);
        }
        if !moved.is_empty() {
            tell_all(core);
        }
    }
}

fn publish(core: &Core<Qp>, moved: &[LogicalId]) -> Result<(), DirectoryError> {
    let Some(directory) = &core.directory else { return Ok(()) };
    let addresses = |id: &LogicalId| {
        core.qps.get(*id).map(|qp| datagram::addresses(&qp, &qp.gate())).unwrap_or_default()
    };
    let entries: Vec<_> = moved.iter().map(|id| (*id, addresses(id))).collect();
    let all: Vec<MovedQp> = entries.iter().flat_map(|(_, addresses)| addresses).copied().collect();
    directory.publish_moved(&all)?;
    // One that was destroyed meanwhile has taken its entry out, perhaps before it was there.
    let gone = entries.iter().filter(|(id, _)| core.qps.get(*id).is_none());
    let gone: Vec<_> = gone.flat_map(|(_, addresses)| addresses).map(|entry| entry.known).collect();
    match gone.is_empty() {
        true => Ok(()),
        false => directory.unpublish_moved(&gone),
    }
}

/// Tells every process that there is news. One NIC of theirs hears it, if a path to it works; or
/// they read it by themselves.
pub(crate) fn tell_all(core: &Core<Qp>) {
    let Some(Ok(processes)) = core.directory.as_ref().map(|d| d.processes()) else { return };
    let _batch = core.control.batch();
    let of = |gid, incarnation| Endpoint { gid, qpn: 0, incarnation, connection: 0 };
    for (incarnation, record) in
        processes.iter().filter(|(incarnation, _)| *incarnation != core.incarnation)
    {
        for local in (0..core.nics.count()).filter(|nic| core.nics.endpoint(*nic).is_some()) {
            let rail = record.nics.iter().find(|nic| nic.index as usize == local);
            let Some(nic) = rail.or(record.nics.first()).filter(|nic| nic.control_qpn != 0) else {
                continue;
            };
            let (from, to) =
                (of(core.nics.gid(local), core.incarnation), of(nic.gid, *incarnation));
            let class = Class::default();
            let addr = ControlAddr { gid: nic.gid, qpn: nic.control_qpn, lid: nic.lid, class };
            core.control.send(&core.nics, local, addr, &Message { from, to, body: Body::Moved });
        }
    }
}
