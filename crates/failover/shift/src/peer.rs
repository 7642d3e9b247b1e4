//! The processes at the other end, and what is believed of the paths to them.
//!
//! A peer process is known by its incarnation. Its NICs and control endpoints come from the
//! directory. They come with the answer about a QP that one is connected to, and are read by the
//! worker again when a path is probed, or a QP has waited for the peer or hears what only the
//! directory can explain: a NIC that was healed has a new endpoint.

use crate::control_endpoint::{Class, ControlAddr};
use crate::lock::lock;
use crate::nics::NicTable;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use unbroken_directory::{Directory, NicRecord, ProcessRecord};
use unbroken_failover_protocol::health::{HealthConfig, PeerHealth};
use unbroken_failover_protocol::{Liveness, SlotPath};
use unbroken_types::Gid;
use unbroken_verbs::RemoteKeys;

/// A NIC of a peer process.
#[derive(Clone, Debug)]
pub(crate) struct PeerNic {
    /// Its name, for people.
    pub(crate) name: String,
    /// What it is called by in messages.
    pub(crate) gid: Gid,
    /// Its ports, and where they take control messages: QPN 0 while they do not. Port 1 is always
    /// there.
    pub(crate) ports: Vec<ControlAddr>,
}

impl PeerNic {
    /// Where it is reached: at port 1.
    pub(crate) fn address(&self) -> ControlAddr {
        self.ports[0]
    }
}

/// A peer process.
pub(crate) struct Peer {
    pub(crate) incarnation: u64,
    nics: Mutex<Vec<PeerNic>>,
    /// It was no longer in the directory when that was read last.
    ended: AtomicBool,
    /// Whether the paths to it live. Innermost lock.
    health: Mutex<PeerHealth>,
    /// How data to it is treated, by the QP that was connected last.
    class: Mutex<Class>,
    /// By which keys its memory is known on its NICs, where that matters.
    pub(crate) keys: Arc<RemoteKeys>,
}

impl Peer {
    /// NIC `i` of the peer.
    pub(crate) fn nic(&self, i: u8) -> Option<PeerNic> {
        lock(&self.nics).get(usize::from(i)).cloned()
    }

    /// How many NICs it has; at most 255 count.
    pub(crate) fn nic_count(&self) -> u8 {
        lock(&self.nics).len().min(255) as u8
    }

    /// The index of the NIC that is called so.
    pub(crate) fn index_of(&self, gid: Gid) -> Option<u8> {
        lock(&self.nics).iter().take(255).position(|n| n.gid == gid).map(|i| i as u8)
    }

    /// Where NIC `i` takes control messages, if it does.
    pub(crate) fn control(&self, i: u8) -> Option<ControlAddr> {
        self.port(i, 0).filter(|port| port.qpn != 0)
    }

    /// The port of NIC `i` in that port pair.
    pub(crate) fn port(&self, i: u8, pair: u8) -> Option<ControlAddr> {
        let port = lock(&self.nics).get(usize::from(i))?.ports.get(usize::from(pair)).copied()?;
        Some(ControlAddr { class: self.class(), ..port })
    }

    /// How data to it is treated.
    pub(crate) fn class(&self) -> Class {
        *lock(&self.class)
    }

    /// A QP was connected to it whose packets are treated so.
    pub(crate) fn set_class(&self, class: Class) {
        *lock(&self.class) = class;
    }

    /// How many ports NIC `i` has.
    pub(crate) fn port_count(&self, i: u8) -> u8 {
        lock(&self.nics).get(usize::from(i)).map_or(0, |nic| nic.ports.len() as u8)
    }

    /// What people call a path to it, `a/0-b/0`.
    pub(crate) fn path_name(&self, nics: &NicTable, path: SlotPath) -> String {
        let remote = self.nic(path.remote).map_or_else(String::new, |n| n.name);
        format!("{}-{remote}", nics.name(path.local.into()))
    }

    /// What is known of the paths to it.
    pub(crate) fn health(&self) -> MutexGuard<'_, PeerHealth> {
        lock(&self.health)
    }

    /// What to believe of a path to it.
    pub(crate) fn liveness(&self, nics: &NicTable, path: SlotPath) -> Liveness {
        let (own, control) = (nics.endpoint(path.local.into()), self.control(path.remote));
        let reaches = own.zip(control).map(|(own, control)| own.reaches(&control));
        if !nics.usable(path.local.into()) {
            Liveness::NoNic
        } else if control.is_none() || reaches == Some(false) || self.health().is_dead(path) {
            Liveness::Silent
        } else if self.health().is_shunned(path) {
            // As below.
            Liveness::Silent
        } else if nics.is_stuck(path.local.into()) {
            // No QP can be made there.
            Liveness::Silent
        } else if nics.drained(path.local.into()) && nics.undrained_elsewhere(path.local.into()) {
            // It is not chosen; the peer, who does not know of it, is followed there.
            Liveness::Silent
        } else {
            Liveness::Alive
        }
    }

    /// What is known of all endpoints is wrong from now on, until it is read again.
    #[cfg(test)]
    pub(crate) fn mistake_endpoints(&self, qpn: u32) {
        lock(&self.nics).iter_mut().for_each(|n| n.ports[0].qpn = qpn);
    }

    /// Whether it was no longer in the directory when that was read last.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Reads the directory again. (An unreadable directory says nothing.) It may wait for other
    /// processes: never under a gate, or a lock that a thread takes that polls or posts.
    pub(crate) fn refresh(&self, directory: Option<&Arc<dyn Directory>>) {
        let Some(Ok(found)) = directory.map(|d| d.lookup_process(self.incarnation)) else {
            return;
        };
        match found {
            Some(record) => self.update(record),
            None => self.ended.store(true, Ordering::Release),
        }
    }

    /// The directory says this of it.
    fn update(&self, record: ProcessRecord) {
        self.ended.store(false, Ordering::Release);
        let mut nics: Vec<_> = record.nics.into_iter().take(255).collect();
        nics.sort_by_key(|n| n.index);
        nics.iter().for_each(|n| self.keys.opened(n.index as u8, n.key_set));
        let ports = |n: &NicRecord| {
            let at = |gid, qpn, lid| ControlAddr { gid, qpn, lid, class: Class::default() };
            let first = at(n.address, n.control_qpn, n.lid);
            let further = n.further_ports.iter().map(|p| at(p.gid, p.control_qpn, p.lid));
            std::iter::once(first).chain(further).collect()
        };
        let nic = |n: &NicRecord| PeerNic { name: n.name.clone(), gid: n.gid, ports: ports(n) };
        *lock(&self.nics) = nics.iter().map(nic).collect();
    }
}

/// The peer processes that QPs of this one are connected to.
#[derive(Default)]
pub(crate) struct Peers(Mutex<HashMap<u64, Arc<Peer>>>);

impl Peers {
    /// The peer of that incarnation, of which the directory says this.
    pub(crate) fn of(&self, incarnation: u64, record: ProcessRecord) -> Arc<Peer> {
        if let Some(known) = self.known(incarnation) {
            known.update(record);
            return known;
        }
        let health = Mutex::new(PeerHealth::new(HealthConfig::default()));
        let (nics, ended) = (Mutex::default(), AtomicBool::new(false));
        let (class, keys) = Default::default();
        let peer = Arc::new(Peer { incarnation, nics, ended, health, class, keys });
        peer.update(record);
        let mut map = lock(&self.0);
        // Peers that no QP uses any more are forgotten, so the table is bounded by the QPs.
        map.retain(|_, p| Arc::strong_count(p) > 1);
        // Another thread may have entered it meanwhile.
        map.entry(incarnation).or_insert(peer).clone()
    }

    /// The peer of that incarnation, if QPs are connected to it.
    pub(crate) fn known(&self, incarnation: u64) -> Option<Arc<Peer>> {
        lock(&self.0).get(&incarnation).cloned()
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<Arc<Peer>> {
        lock(&self.0).values().cloned().collect()
    }
}
