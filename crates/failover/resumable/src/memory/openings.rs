//! Protection domains and regions when a NIC opens, dies and closes.

use super::{bit, write, LogicalMemory, Mr, NicPd, Open, Pd, Space};
use crate::commands::Commands;
use crate::lock;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use unbroken_types::next_key_set;
use unbroken_verbs::MemoryDomain;

impl LogicalMemory {
    /// A NIC was opened, or opened again after its death: its handles of an earlier life are void.
    /// Regions come there in the background. Gives the number of the opening.
    pub(crate) fn attach(
        &self,
        nic: usize,
        domain: Arc<dyn MemoryDomain>,
        commands: Arc<Commands>,
    ) -> u16 {
        *write(&self.nics[nic].open) = None;
        let next = |last| Some(next_key_set(last));
        let last = self.nics[nic].key_set.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        let key_set = next_key_set(last.unwrap_or_else(|last| last));
        self.forget(nic, |_| true);
        self.all().iter().for_each(|mr| lock(&mr.state).refused &= !bit(nic));
        // Before a QP is made there, whose peer may know regions by their older keys.
        self.look_for_foreign_keys(nic, &write(&self.nics[nic].space));
        *write(&self.nics[nic].open) = Some(Open { domain, commands, key_set });
        self.changed();
        self.all().iter().for_each(|mr| self.fill_later(mr));
        key_set
    }

    /// Finds out whether a region of a NIC's space has a key that the NIC did not give since it was
    /// opened last.
    pub(super) fn look_for_foreign_keys(&self, nic: usize, space: &Space) {
        let key_set = self.key_set(nic);
        let foreign = space.by_lkey.values().any(|mr| mr.key_set != key_set);
        self.nics[nic].foreign.store(foreign, Ordering::Release);
    }

    /// Closes a NIC: nothing is registered there any more. Does nothing if it was opened again
    /// meanwhile.
    pub fn detach(&self, nic: usize, domain: &Arc<dyn MemoryDomain>) {
        let mut there = write(&self.nics[nic].open);
        if there.as_ref().is_some_and(|there| Arc::ptr_eq(&there.domain, domain)) {
            *there = None;
        }
    }

    /// Ends an opening of a NIC whose last QP is gone: drops its domains and regions. They keep the
    /// device open, and its driver may wait for them before it removes the device.
    pub(crate) fn release(&self, nic: usize, key_set: u16, domain: &Arc<dyn MemoryDomain>) {
        // First: from here on no thread stores a region or domain that it is creating.
        self.nics[nic].released.store(key_set, Ordering::Release);
        self.detach(nic, domain);
        self.forget(nic, |pd| pd.is_of(domain));
    }

    /// Whether a region or domain created for that opening of a NIC may be stored. The caller holds
    /// the lock under which it stores it.
    pub(super) fn is_kept(&self, nic: usize, key_set: u16) -> bool {
        let released = self.nics[nic].released.load(Ordering::Acquire);
        self.key_set(nic) == key_set && released != key_set
    }

    /// Drops a NIC's handles of the domains that `of` accepts, and of their regions.
    fn forget(&self, nic: usize, of: impl Fn(&NicPd) -> bool) {
        let taken = |pd: &mut Pd| pd.on[nic].take_if(|pd| of(pd));
        let pds: Vec<_> = lock(&self.pds).values_mut().filter_map(taken).collect();
        let taken = |mr: &Arc<Mr>| lock(&mr.state).on[nic].take_if(|there| of(&there.pd));
        let regions: Vec<_> = self.all().iter().filter_map(taken).collect();
        // The last use of a domain ends it, with no lock held.
        drop((regions, pds));
    }
}
