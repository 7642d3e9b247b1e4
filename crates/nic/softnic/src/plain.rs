//! Plain devices: a NIC as an RNIC is, without what only softnic can do.
//!
//! It is for what is built above: nothing there may rely on a power of softnic without asking for
//! it. The wire is the same, and so is the speed. What differs:
//! - QPs do not hold their work: what fails goes to ERR and flushes. Nobody is told how far it had
//!   come.
//! - Protection domains, keys, CQs, SRQs and channels belong to the NIC that made them, and end
//!   with it. A region's two keys differ, and none is good on another NIC ([`crate::memory`]).
//! - Of the table of GIDs one entry leads to peers, not the first ([`crate::gids`]).
//! - QPNs of different NICs differ in their lower 16 bits, too.
//! - Not all flushes need come, or in time: see [`crate::flush`].
//! - A NIC that dies tells so at once, but not all of its QPs do: see [`Death`].

use crate::flush::{FlushKind, Flushes};
use crate::gids;
use crate::memory::Domain;
use std::sync::Arc;
use unbroken_fabric::NicPage;
use unbroken_types::QpCaps;
use unbroken_verbs::{Error, GidEntry, QpInit, Result, UdDest};

/// QPs of one process on one plain NIC.
pub(crate) const MAX_QPS: usize = 8192;
/// NICs draw their QPNs from as many parts of all, by turns. A part has twice the indices that a
/// process may use.
const QPN_PARTS: u32 = 4;
/// What posts to a dead NIC fail with, by turns.
const ERRNOS: [i32; 4] = [libc::EIO, libc::ENODEV, libc::EINVAL, libc::ENOMEM];
/// The shortest time for which a dead NIC takes posts.
const LATE_US: u64 = 2_000;

/// How a QP behaves once its NIC is dead. Half of them take posts for a while, as a device does
/// whose driver has not noticed, and flush all at the end of it; the others flush at once. From
/// then on posts fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Death {
    /// For so long after the death posts are taken; 0: not at all.
    pub(crate) late_us: u64,
    /// What they fail with afterwards.
    pub(crate) errno: i32,
}

/// What a plain NIC has that others have not.
pub(crate) struct Plain {
    /// The NIC's number on its host.
    nic: u32,
    seed: u64,
    flush: FlushKind,
    /// QPs made so far.
    made: u64,
    /// The GIDs of its first port; those of the second are of the same types.
    gids: Vec<GidEntry>,
    /// It ends with the NIC.
    pub(crate) domain: Arc<Domain>,
}

impl Plain {
    /// `habits`: the seed of its deaths, and how its QPs flush.
    pub(crate) fn new(
        nic: usize,
        habits: (u64, FlushKind),
        gids: Vec<GidEntry>,
        domain: Arc<Domain>,
    ) -> Plain {
        let (seed, flush) = habits;
        Plain { nic: nic as u32, seed, flush, made: 0, gids, domain }
    }

    /// What a QP does with its flushes; `None`: nothing of its own.
    pub(crate) fn flushes(&self, qpn: u32, caps: &QpCaps, srq: bool) -> Option<Box<Flushes>> {
        Flushes::new(self.flush, u64::from(qpn) << 32 | self.seed, caps, srq)
    }

    /// Whether a datagram for `dest` gets there.
    pub(crate) fn reaches(&self, dest: &UdDest) -> bool {
        gids::leads(&self.gids, dest.sgid_index, dest.gid).unwrap_or(false)
    }

    /// The end of the next QP: eight made one after another have eight different ones.
    pub(crate) fn next_death(&mut self) -> Death {
        let turn = self.seed.wrapping_add(3 * u64::from(self.nic)).wrapping_add(self.made);
        self.made += 1;
        let late_us = if turn.is_multiple_of(2) { LATE_US + turn / 2 % 4 * LATE_US } else { 0 };
        Death { late_us, errno: ERRNOS[(turn / 2 % 4) as usize] }
    }

    /// The index of the next QP of the NIC with this page: NICs of a host that stand side by side
    /// have no index in common.
    pub(crate) fn next_index(&self, page: &NicPage) -> u32 {
        loop {
            // Every fourth is right.
            let index = page.next_index();
            if index % QPN_PARTS == self.nic % QPN_PARTS {
                return index;
            }
        }
    }
}

/// Refuses what only a QP with powers can be.
pub(crate) fn check(init: &QpInit) -> Result<()> {
    let wants = [
        (init.suspend_on_error, "to hold its work on a failure"),
        (init.wc_qpn.is_some(), "completions with another QPN than its own"),
        (init.home.is_some(), "another address than its own"),
    ];
    match wants.iter().find(|(wanted, _)| *wanted) {
        Some((_, what)) => {
            Err(Error::unsupported(format!("{what}: this device has plain verbs only")))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use unbroken_fabric::Runtime;

    #[test]
    fn ends_differ_and_follow_from_the_seed() {
        let ends = |nic, seed| {
            let mut plain = Plain::new(nic, (seed, FlushKind::Whole), Vec::new(), Arc::default());
            std::array::from_fn::<Death, 8, _>(|_| plain.next_death())
        };
        let of =
            |late| ends(1, 7).into_iter().filter(move |d| (d.late_us > 0) == late).map(|d| d.errno);
        assert_eq!(of(true).collect::<HashSet<_>>(), HashSet::from(ERRNOS));
        assert_eq!(of(false).collect::<HashSet<_>>(), HashSet::from(ERRNOS));
        assert_eq!(ends(1, 7), ends(1, 7));
        assert_ne!(ends(1, 7)[0], ends(1, 8)[0]);
        assert_ne!(ends(1, 7)[0], ends(2, 7)[0]);
        assert_eq!(ends(0, u64::MAX)[1], ends(0, 0)[0]);
    }

    #[test]
    fn nics_side_by_side_have_no_qpn_in_common() {
        // A quarter of all indices, so that nothing but the rule keeps four NICs apart.
        const PART: usize = 16_383;
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(folder.path()).unwrap();
        let indices = |nic: usize| {
            let page = NicPage::open(&runtime, [127, 77, 1, nic as u8].into()).unwrap();
            let plain = Plain::new(nic, (0, FlushKind::Whole), Vec::new(), Arc::default());
            (0..PART).map(|_| plain.next_index(&page)).collect::<HashSet<_>>()
        };
        let all: Vec<HashSet<u32>> = (0..4).map(indices).collect();
        assert!(all.iter().all(|indices| indices.len() == PART));
        assert_eq!(all.iter().flatten().collect::<HashSet<_>>().len(), 4 * PART);
    }
}
