//! The pages of the NICs that this one has to do with, and the sender's side of back-pressure: UC
//! and UD packets leave only while their receiver has room ([`unbroken_fabric::Credit`]).
//!
//! A QP whose receiver has no room *awaits credit*: it leaves the ready queue and comes back after
//! [`ASK_AGAIN_US`], without spinning. RC has a window and retransmits, so it needs none of this.
//! Peers outside the fabric have no account: what is too fast for them is lost.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use unbroken_fabric::{packet_cost, Fabric, NicPage};

/// For how long a QP without credit waits before it asks again, in µs.
pub(super) const ASK_AGAIN_US: u64 = 25;

/// The NICs that this one sends to. No more entries than the fabric has NICs, since others are not
/// kept.
pub(crate) struct Accounts {
    fabric: Option<Arc<Fabric>>,
    pages: HashMap<IpAddr, Arc<NicPage>>,
    /// Who was found to send from a port last.
    last: Option<(IpAddr, u8, u16)>,
}

impl Accounts {
    /// Of a NIC of this fabric, or of one without.
    pub(crate) fn new(fabric: Option<Arc<Fabric>>) -> Accounts {
        Accounts { fabric, pages: HashMap::new(), last: None }
    }

    /// The way through which packets go to a slot of a peer.
    pub(super) fn toll(&mut self, peer: IpAddr, slot: u8) -> Toll {
        Toll { account: self.page(peer).map(|page| (page, slot)), reserved: 0 }
    }

    /// Whether packets of this slot of a NIC come from this UDP port. `None`: it is no NIC of the
    /// fabric, if there is one at all.
    #[inline]
    pub(super) fn sends_from(&mut self, nic: IpAddr, slot: u8, port: u16) -> Option<bool> {
        if self.last == Some((nic, slot, port)) {
            return Some(true);
        }
        let sends = self.page(nic)?.slot(slot).sends_from(port);
        if sends {
            self.last = Some((nic, slot, port));
        }
        Some(sends)
    }

    /// Whether all NICs are of a fabric.
    pub(super) fn in_fabric(&self) -> bool {
        self.fabric.is_some()
    }

    fn page(&mut self, peer: IpAddr) -> Option<Arc<NicPage>> {
        if let Some(page) = self.pages.get(&peer) {
            return Some(page.clone());
        }
        let page = Arc::new(self.fabric.as_ref()?.nic_page(peer)?);
        self.pages.insert(peer, page.clone());
        Some(page)
    }
}

/// Lets packets pass while there is credit. What it reserved and did not use goes back when it is
/// dropped.
pub(super) struct Toll {
    account: Option<(Arc<NicPage>, u8)>,
    reserved: u64,
}

impl Toll {
    /// One that lets all pass.
    pub(super) const OPEN: Toll = Toll { account: None, reserved: 0 };

    /// Pays for a packet of `bytes`, and reserves for as many more like it as are likely to follow.
    /// False: it has to wait.
    #[inline]
    pub(super) fn admit(&mut self, bytes: usize, more: u32, now_us: u64) -> bool {
        let Some((page, slot)) = &self.account else { return true };
        let cost = packet_cost(1, bytes as u64);
        if self.reserved < cost {
            let least = cost - self.reserved;
            match page.credit(*slot).reserve(least, least + cost * u64::from(more), now_us) {
                Some(granted) => self.reserved += granted,
                None => return false,
            }
        }
        self.reserved -= cost;
        true
    }

    /// A packet of `bytes` that was admitted did not leave.
    pub(super) fn refund(&mut self, bytes: usize) {
        if self.account.is_some() {
            self.reserved += packet_cost(1, bytes as u64);
        }
    }
}

impl Drop for Toll {
    fn drop(&mut self) {
        if let Some((page, slot)) = self.account.as_ref().filter(|_| self.reserved > 0) {
            page.credit(*slot).give_back(self.reserved);
        }
    }
}
