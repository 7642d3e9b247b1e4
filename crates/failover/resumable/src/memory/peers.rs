//! What peers are told of regions, and where regions are to be so that there is an answer.

use super::{bit, read, LogicalMemory, Mr};
use crate::lock;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use unbroken_types::NicKey;
use unbroken_verbs::{KeyAnswer, KeyRow};

impl LogicalMemory {
    /// Changes whenever [`Self::export`] gives something else.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// By which remote keys each region is known on each NIC.
    pub fn export(&self) -> Vec<KeyRow> {
        self.all().iter().map(|mr| self.row(mr)).collect()
    }

    /// Which set of keys a NIC has ([`NicKey`]); 0 while it was never open.
    pub fn key_set(&self, nic: usize) -> u16 {
        self.nics.get(nic).map_or(0, |nic| nic.key_set.load(Ordering::Acquire))
    }

    /// By which remote keys one region is known on each NIC, for a peer that asks. The region is
    /// named by its default NIC and the key that applications have.
    ///
    /// Whoever asks waits for nothing: what is missing where a peer may have to name the region is
    /// registered by a thread, before other regions.
    pub fn answer(&self, default: usize, rkey: u32) -> KeyAnswer {
        let space = self.nics.get(default).map(|nic| read(&nic.space));
        let found = space.as_ref().and_then(|space| space.by_rkey(rkey).cloned());
        drop(space);
        let Some(mr) = found else { return KeyAnswer::NoRegion };
        let wanted = self.wanted_on(mr.default);
        let mut s = lock(&mr.state);
        let misses = |nic: &usize| {
            let refused = s.refused & bit(*nic) != 0;
            !refused && self.there(&s, *nic).is_none() && self.open(*nic).is_ok()
        };
        if !s.gone && wanted.iter().any(misses) {
            if s.hurried {
                return KeyAnswer::Later;
            }
            if self.prefetcher.put_first(&self.own, &mr) {
                s.hurried = true;
                return KeyAnswer::Later;
            }
            drop(s);
            self.fill_prepared(&mr);
        } else {
            drop(s);
        }
        KeyAnswer::Known(self.row(&mr))
    }

    /// A QP whose program has the keys of NIC `default` is on NIC `nic` now, or no longer.
    pub(crate) fn goes_to(&self, default: usize, nic: usize, is_there: bool) {
        let Some(count) = self.away.get(default * self.nics.len() + nic) else { return };
        match is_there {
            true => count.fetch_add(1, Ordering::AcqRel),
            false => count.fetch_sub(1, Ordering::AcqRel),
        };
    }

    /// The NICs on which regions of that one are to be there: itself, those that are made ready
    /// for it, and those that its QPs have gone to all the same.
    pub(super) fn wanted_on(&self, default: usize) -> Vec<usize> {
        let count = self.nics.len();
        let prepared = self.prepared.get().and_then(|on| on.get(default));
        let mut wanted = vec![default];
        match prepared {
            Some(on) => wanted.extend(on.iter().copied().filter(|nic| *nic < count)),
            None => wanted.extend(0..count),
        }
        let of = &self.away[default * count..][..count];
        wanted.extend((0..count).filter(|nic| of[*nic].load(Ordering::Acquire) > 0));
        let mut seen = 0u64;
        wanted.retain(|nic| {
            let known = seen & bit(*nic) != 0;
            seen |= bit(*nic);
            !known
        });
        wanted
    }

    /// Bytes of the regions that are registered on a NIC.
    pub fn registered_bytes(&self, nic: usize) -> u64 {
        let there = |mr: &Arc<Mr>| {
            let s = lock(&mr.state);
            self.there(&s, nic).map_or(0, |_| s.source.len())
        };
        self.all().iter().map(there).sum()
    }

    /// Registers everything on every open NIC that it is missing on, now. Gives how many
    /// registrations failed.
    pub fn fill_all(&self) -> usize {
        let missing = |mr: &Arc<Mr>| {
            let failed = |nic: &usize| self.domain(*nic).is_ok() && self.fill(mr, *nic).is_err();
            (0..self.nics.len()).filter(failed).count()
        };
        self.all().iter().map(missing).sum()
    }

    fn row(&self, mr: &Mr) -> KeyRow {
        let s = lock(&mr.state);
        let key = |nic: u8| {
            let there = self.there(&s, nic.into())?;
            Some(NicKey { nic, key_set: there.key_set, rkey: there.keys.rkey })
        };
        KeyRow {
            default: mr.default as u8,
            rkey: mr.keys.rkey,
            on: (0..s.on.len() as u8).filter_map(key).collect(),
        }
    }
}
