//! QPs that the worker is to look at by a time: those under a switch, and those whose peer has not
//! shown all its NICs yet.

use super::*;
use crate::lock::lock;
use std::sync::{Mutex, PoisonError};

/// How often a peer that has not shown all its NICs yet is looked up again.
const CONNECT_RETRY_US: u64 = 5_000;
/// How many times, before the paths that are known must do.
const CONNECT_RETRIES: u32 = 400;

/// When a QP that its program changes just now is looked at again.
const BUSY_US: u64 = 1_000;

/// QPs that are looked for in one round, so that messages do not wait for thousands.
const MAX_CONNECTING: usize = 256;

impl Worker {
    pub(super) fn watch(&mut self, now: u64) {
        let core = self.core.clone();
        let due = self.watched.take(now, usize::MAX);
        self.refresh_late(&due, now);
        let _batch = core.control.batch();
        let next = Mutex::new(Vec::with_capacity(due.len()));
        core.parallel.each(&due, |id| {
            let at_us = core.qps.get(*id).and_then(|qp| {
                let Some(mut g) = qp.gate_now() else { return Some(now + BUSY_US) };
                if g.datagram.is_some() {
                    return datagram::tick(&qp, &mut g);
                }
                link::tick(&qp, &mut g)
            });
            lock(&next).extend(at_us.map(|at_us| (*id, at_us)));
        });
        for (id, at_us) in next.into_inner().unwrap_or_else(PoisonError::into_inner) {
            self.watched.set(id, at_us);
        }
    }

    /// Reads anew what is known of peers that QPs have waited for long enough.
    fn refresh_late(&self, due: &[LogicalId], now: u64) {
        let mut read = Vec::new();
        for qp in due.iter().filter_map(|id| self.core.qps.get(*id)) {
            let late = qp.gate_now().and_then(|g| link::waits_too_long(&g, now));
            late.iter().for_each(|peer| self.refresh_once(peer, &mut read));
        }
    }

    /// Reads what is known of a peer anew, unless that was done in this round. No gate may be held.
    pub(super) fn refresh_once(&self, peer: &Peer, read: &mut Vec<u64>) {
        if !read.contains(&peer.incarnation) {
            read.push(peer.incarnation);
            peer.refresh(self.core.directory.as_ref());
            self.prepare(peer);
        }
    }

    /// Messages may have to go to any port of a peer, over any NIC of ours, while the network is
    /// broken: what they need is made now.
    fn prepare(&self, peer: &Peer) {
        let (nics, theirs) = (&self.core.nics, usize::from(peer.nic_count()));
        for (local, endpoint) in (0..nics.count()).filter_map(|i| Some((i, nics.endpoint(i)?))) {
            // First its own rail: where each is a network of its own, nobody else answers.
            let all = (0..theirs).map(|k| ((local + k) % theirs) as u8);
            all.filter_map(|i| peer.control(i)).for_each(|to| endpoint.prepare(to));
        }
    }

    /// Gives control endpoints that have failed a new life.
    pub(super) fn mend_endpoints(&mut self, now: u64) {
        let core = self.core.clone();
        for at in self.ailing.take(now, usize::MAX) {
            // A NIC that has died is opened anew when it is healed, with other endpoints.
            let Some(endpoint) = core.nics.endpoint_of(at) else { continue };
            let own = core.clone();
            // The device may not answer.
            let mend = move || {
                if !endpoint.begin_to_mend() {
                    return;
                }
                drop(lock(&own.control.receiving)); // whoever was receiving has done so
                let mended = endpoint.mend();
                endpoint.is_mended();
                inbound::receive(&own);
                if mended.is_err() {
                    own.jobs.put(Job::MendAgain(at));
                }
            };
            if unbroken_process::spawn("unb-mend", mend).is_err() {
                self.ailing.set(at, now + MEND_AGAIN_US);
            }
        }
    }

    pub(super) fn retry_connecting(&mut self, now: u64) {
        let (core, mut read) = (self.core.clone(), Vec::new());
        for id in self.connecting.take(now, MAX_CONNECTING) {
            let tries = self.connect_tries.get(&id).copied().unwrap_or(0) + 1;
            let qp = core.qps.get(id);
            let gate = qp.as_ref().map(|qp| qp.gate_now());
            if let Some(None) = gate {
                self.connecting.set(id, now + CONNECT_RETRY_US);
                continue;
            }
            let peer = gate.flatten().and_then(|g| Some(g.link.as_ref()?.peer().clone()));
            let goes_on = peer.is_some_and(|peer| {
                self.refresh_once(&peer, &mut read);
                self.peer_shown(id, &peer, now);
                let all = (0..peer.nic_count()).all(|i| peer.control(i).is_some());
                !all && tries < CONNECT_RETRIES
            });
            match goes_on {
                true => {
                    self.connecting.set(id, now + CONNECT_RETRY_US * u64::from(tries.min(20)));
                    self.connect_tries.insert(id, tries);
                }
                false => drop(self.connect_tries.remove(&id)),
            }
        }
    }

    /// What is known of a QP's peer has been read.
    fn peer_shown(&self, id: LogicalId, peer: &Arc<Peer>, now: u64) {
        let Some(qp) = self.core.qps.get(id) else { return };
        let Some(mut g) = qp.gate_now() else { return };
        if let Some(link) = &g.link {
            port_pairs::know(&self.core.nics, peer, link.executor().lqp().slots(), now);
        }
        link::beliefs_changed(&qp, &mut g);
    }
}
