//! How a connected QP finds its peer in the directory. The program waits for none of it.
//!
//! ```text
//!                    ┌─ Peer (at once) ──────────────────────────────────────────┐
//! early ── RTR: ask ─┤                                                           ├─> linked
//!                    └─ Later, Nobody, an error ──> seeking ── Peer, some time ──┘
//!                                                      │
//!                          RESET, ERR, destroyed, failed for good ──> no more
//! ```
//!
//! The directory is asked before the gate is taken, and by the worker ([`crate::seekers`]) with no
//! gate held. What is found counts only if the QP still seeks that address.
//!
//! Invariants:
//! 1. A QP is linked once in each of its connections, or seeks, or neither; never both.
//! 2. A link is made from an answer that is younger than the program's connecting.
//! 3. A QP that seeks carries traffic as one without failover does. Its physical QP holds its work
//!    when it fails, and what a dead NIC refuses is kept ([`super::held`]). So a failure waits for
//!    the answer, [`HOLD_US`] at most; then the program has the original error.
//! 4. What a peer says to a QP that seeks is not refused: the peer says it again, and the QP asks
//!    at once.
//!
//! Failure cases: the peer has found us and we have not found it (4); the address was another
//! process's a moment ago, whose entry is found: it is looked up again a second later, and the link
//! is made anew where nothing has moved yet; the NIC was dead when the program connected: the
//! physical QP is on another, where the peer does not expect it, so it switches when the peer is
//! found; the peer never comes: it is told once ([`What::Unprotected`]), and asked for ever more
//! rarely.

use super::{Gate, Qp, Seeks};
use crate::control_endpoint::Class;
use crate::link;
use crate::peer::Peer;
use crate::worker_queue::{Job, QpAddr};
use std::sync::Arc;
use unbroken_directory::{DirectoryError, Found, ProcessRecord, QpEntry};
use unbroken_events::What;
use unbroken_failover_protocol::{Endpoint, Reason};
use unbroken_runtime::now_us;
use unbroken_types::{Gid, PathAttr, WcStatus};
use unbroken_verbs::{Backlog, QpModify};

/// A peer that is not found within this time counts as one that is not there, and the log says so.
const UNFOUND_US: u64 = 1_000_000;
/// For so long a failure waits for the peer to be found.
const HOLD_US: u64 = 1_000_000;

/// For so long a QP whose peer may know regions by older keys waits for the peer to be found, before
/// it takes requests: a peer that is found hears of the keys, and whom nobody finds cannot.
const KEYS_HOLD_US: u64 = 100_000;

const NOT_THERE: &str = "the peer is not in the directory";
const NO_ANSWER: &str = "the directory has not answered yet";
const UNREADABLE: &str = "the directory cannot be read";

/// What the directory says of a peer, and its process, where that is known.
pub(crate) enum Sought {
    /// `addr` is where it was asked for, `them` who that is.
    Peer {
        peer: Arc<Peer>,
        addr: QpAddr,
        them: Endpoint,
    },
    Not {
        addr: QpAddr,
        why: &'static str,
        detail: String,
    },
}

/// The GID of the NIC that a QP is found on.
fn gid_of(qp: &QpEntry, process: &ProcessRecord, addr: QpAddr) -> Option<Gid> {
    match qp.nic {
        Some(index) => process.nics.iter().find(|nic| nic.index == index).map(|nic| nic.gid),
        None => Some(addr.0),
    }
}

/// What has become of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// The QP is linked.
    Linked,
    /// Nobody is there: ask again.
    Nobody,
    /// There is no answer yet.
    Later,
    /// Nothing is sought any more.
    Over,
}

impl Qp {
    /// Asks for the peer that the program names. With no gate held.
    pub(super) fn ask_for_peer(&self, change: &QpModify) -> Option<Sought> {
        let (gid, qpn) = self.destination(&self.gate(), change);
        let addr = (gid?, qpn?);
        let found = self.core.directory.as_ref()?.ask_qp(addr.0, addr.1);
        Some(self.sought(addr, found))
    }

    /// What an answer means. With no gate held.
    pub(crate) fn sought(
        &self,
        addr: QpAddr,
        found: std::result::Result<Found, DirectoryError>,
    ) -> Sought {
        let not = |why| Sought::Not { addr, why, detail: String::new() };
        match found {
            Ok(Found::Peer { qp, process }) => match gid_of(&qp, &process, addr) {
                Some(gid) => {
                    let QpEntry { incarnation, connection, .. } = qp;
                    let them = Endpoint { gid, qpn: addr.1, incarnation, connection };
                    let peer = self.core.peers.of(incarnation, process);
                    Sought::Peer { peer, addr, them }
                }
                None => not(NOT_THERE),
            },
            Ok(Found::Nobody) => not(NOT_THERE),
            Ok(Found::Later) => not(NO_ANSWER),
            Err(e) => Sought::Not { addr, why: UNREADABLE, detail: format!(": {e}") },
        }
    }

    /// Where the program connects the QP by another GID of its port than the one that it is entered
    /// under, or by LIDs, peers name it by that: it is entered under that, too.
    fn publish_alias(&self, g: &mut Gate, change: &QpModify) {
        let named = change.path.and_then(|path| self.core.nics.alias(self.nic, &path));
        if g.alias != named {
            self.unpublish_alias(g);
        }
        if let Some(gid) = named {
            g.alias = Some(gid);
            let qp = QpEntry {
                incarnation: self.core.incarnation,
                connection: g.connection,
                nic: Some(self.nic as u32),
            };
            self.publish(gid, qp);
        }
    }

    /// That connection of the QP has ended.
    pub(super) fn unpublish_alias(&self, g: &mut Gate) {
        if let (Some(gid), Some(directory)) = (g.alias.take(), &self.core.directory) {
            let _ = directory.unpublish_qp(gid, self.qpn);
        }
    }

    /// The program connects the QP: protect it, or seek its peer.
    pub(super) fn connect(&self, g: &mut Gate, change: &QpModify, sought: Sought) {
        self.publish_alias(g, change);
        let (Some(gid), Some(qpn)) = self.destination(g, change) else { return };
        let addr = match &sought {
            Sought::Peer { addr, .. } | Sought::Not { addr, .. } => *addr,
        };
        if !self.core.watched() {
            g.why_not = "the thread for failover could not be started";
            return self.tell_unprotected(g.why_not.into());
        }
        let why = match self.link(g, change.path.or(g.app.path), sought) {
            Ok(()) => "",
            // Another thread of the program has named another peer meanwhile: that is asked for.
            Err((_, why, _)) if addr != (gid, qpn) => why,
            Err((_, why, detail)) => {
                let told = why == UNREADABLE;
                if told {
                    self.tell_unprotected(format!("{why}{detail}"));
                }
                match why == link::ONE_NIC {
                    true => self.tell_unprotected(why.into()),
                    false => g.seeks = Some(Seeks::new((gid, qpn), told)),
                }
                why
            }
        };
        g.why_not = why;
        self.core.jobs.put(Job::Seek(self.id(), (gid, qpn)));
    }

    /// The directory says this of the peer that the QP is connected to at that address. With no
    /// gate held.
    pub(crate) fn found(&self, sought: Sought) -> Search {
        let Some(mut g) = self.gate_now() else { return Search::Later };
        let addr = match &sought {
            Sought::Peer { addr, .. } | Sought::Not { addr, .. } => *addr,
        };
        if g.link.is_some() {
            self.look_again(&mut g, sought);
            return Search::Over;
        }
        let Some(seeks) = g.seeks.as_ref().filter(|seeks| seeks.addr == addr) else {
            return Search::Over;
        };
        if g.ended() || g.destroyed {
            return Search::Over;
        }
        let (told, since_us, failed) = (seeks.told, seeks.since_us, seeks.failed);
        let path = g.app.path;
        match self.link(&mut g, path, sought) {
            Ok(()) => {
                let kept = g.take_seeks().and_then(|seeks| seeks.held);
                let (keeps, held) = (kept.is_some(), kept.unwrap_or_default());
                if told {
                    let (host, qp) = (self.core.nics.host(), self.qpn);
                    let after_us = now_us().saturating_sub(since_us);
                    self.core.events.emit(What::PeerFound { host, qp, after_us });
                }
                if failed.is_some() || !self.core.nics.usable(g.nic) {
                    link::suspect_with(self, &mut g, Reason::PostFailed, held);
                } else if keeps || self.connects_by_hello(&g) {
                    link::suspect_with(self, &mut g, Reason::Connect, held);
                }
                Search::Linked
            }
            Err((_, why, detail)) => self.not_found(&mut g, why, &detail),
        }
    }

    fn not_found(&self, g: &mut Gate, why: &'static str, detail: &str) -> Search {
        let now_us = now_us();
        g.why_not = why;
        let Some(seeks) = g.seeks.as_mut() else { return Search::Over };
        let late = now_us >= seeks.since_us + UNFOUND_US;
        seeks.given_up = late && why == NOT_THERE;
        let over = why == link::ONE_NIC;
        if (late || over || why == UNREADABLE) && !std::mem::replace(&mut seeks.told, true) {
            self.tell_unprotected(format!("{why}{detail}"));
        }
        let waited = |at_us| over || now_us >= at_us + HOLD_US;
        if let Some((status, _)) = seeks.failed.filter(|(_, at_us)| waited(*at_us)) {
            let kept = g.take_seeks().and_then(|seeks| seeks.held).unwrap_or_default();
            // The log first: a program that sees its error may be gone before the next line.
            let failed = self.has_failed(format!("not protected: {why}{detail}"));
            self.core.events.emit(failed);
            self.flush_with_kept(g, kept, status);
            return Search::Over;
        }
        if now_us >= seeks.since_us + KEYS_HOLD_US && seeks.failed.is_none() {
            self.release_kept(g);
        }
        match why {
            NOT_THERE => Search::Nobody,
            link::ONE_NIC => {
                self.release_kept(g);
                g.take_seeks();
                Search::Over
            }
            _ => Search::Later,
        }
    }

    /// Links the QP, whose packets go by that path, to its peer, or says why that cannot be, and
    /// whom it was to be linked to.
    fn link(
        &self,
        g: &mut Gate,
        path: Option<PathAttr>,
        sought: Sought,
    ) -> std::result::Result<(), (QpAddr, &'static str, String)> {
        match sought {
            Sought::Peer { peer, addr, them } => {
                let PathAttr { sl, traffic_class, .. } = path.unwrap_or_default();
                peer.set_class(Class { sl, traffic_class });
                let by_hello = g.keeps_all() || self.connects_by_hello(g);
                let link = link::connect(self, g.connection, them, peer, by_hello);
                g.link = Some(Box::new(link.map_err(|why| (addr, why, String::new()))?));
                g.why_not = "";
                Ok(())
            }
            Sought::Not { addr, why, detail } => Err((addr, why, detail)),
        }
    }

    /// What was found when the QP was connected may have been the entry of a process that had the
    /// number before. Where nothing has moved yet, the QP is linked to the right one.
    fn look_again(&self, g: &mut Gate, sought: Sought) {
        let Sought::Peer { addr, them, .. } = &sought else { return };
        let Some(executor) = g.link.as_ref().map(|link| link.executor()) else { return };
        let lqp = executor.lqp();
        let named = self.destination(g, &QpModify::default());
        let other = named != (Some(addr.0), Some(addr.1));
        if lqp.peer() == *them || other || lqp.epoch() > 0 || executor.on_its_way() {
            return;
        }
        g.link = None;
        if let Err((_, why, _)) = self.link(g, g.app.path, sought) {
            g.why_not = why;
        }
    }

    /// A QP that seeks has failed: it waits for the answer. False: it does not seek.
    pub(crate) fn holds_failure(&self, g: &mut Gate, status: WcStatus) -> bool {
        let Some(seeks) = &mut g.seeks else { return false };
        seeks.failed.get_or_insert((status, now_us()));
        true
    }

    /// The QP is not connected any more, or its process ends. If its peer was not found the log
    /// says so. Gives the work that the QP has kept.
    pub(crate) fn seek_no_more(&self, g: &mut Gate) -> Option<Backlog> {
        let seeks = g.take_seeks()?;
        if !seeks.told {
            self.tell_unprotected(g.why_not.into());
        }
        seeks.held
    }

    fn tell_unprotected(&self, why: String) {
        let (host, qp) = (self.core.nics.host(), self.qpn);
        self.core.events.emit(What::Unprotected { host, qp, why });
    }
}
