//! A device's own SRQ behind the application's queue.
//!
//! What has been posted to a device's SRQ cannot be taken back, and one application's SRQ serves
//! QPs on several devices. So the receives stay in the application's queue, and each device is lent
//! its share ([`Srq::lend`]): half, where it is the only one, so that the next device finds some.
//! Whatever the device has may complete at any QP: there is room for all of it at each CQ that QPs
//! take it to. What a QP had taken as it failed is given to the device again, which has other QPs;
//! what a device has when the last QP leaves it goes back to the front.
//!
//! With very few receives, and QPs on more devices than that, one device may have what another
//! waits for, until a message uses it.

use crate::commands::EndsLater;
use crate::cq::CqReservation;
use crate::device::Opened;
use crate::lock;
use crate::memory::NicPd;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use unbroken_journal::{Queue, Slot};
use unbroken_types::Sge;
use unbroken_verbs::{Cq, Feeder, RecvWr, Result, Srq, SrqAttr, NO_REGION};

/// Receives that a device has at most, where the application's queue has few or many.
const LEAST: u32 = 32;
const MOST: u32 = 4096;

/// A receive that the device has, or the place of one.
#[derive(Default)]
struct Lent {
    is_out: bool,
    wr_id: u64,
    sges: Vec<Sge>,
    /// When it was lent, among others.
    order: u64,
}

#[derive(Default)]
struct Lending {
    lent: Vec<Lent>,
    free: Vec<u32>,
    /// Those that a QP had taken as it failed.
    back: VecDeque<u32>,
    next_order: u64,
    /// Room for translated entries.
    sges: Vec<Sge>,
    /// The device takes no more.
    ended: bool,
}

/// A device's SRQ, for as long as QPs take from it.
pub(crate) struct ProviderSrq {
    own: EndsLater<Srq>,
    /// After the SRQ, which is in it.
    _pd: Arc<NicPd>,
    app: Arc<Srq>,
    opened: Arc<Opened>,
    /// The NIC whose local keys the application has.
    default: usize,
    slots: Mutex<Lending>,
    /// Receives that the device has at most.
    most: AtomicU32,
    /// Room for them at the CQs of the QPs that take from it.
    rooms: Mutex<Vec<Weak<CqReservation>>>,
    feeder: Arc<dyn Feeder>,
    /// QPs that take from it.
    users: AtomicU32,
}

/// Tells the device's SRQ of posts, without keeping it alive.
struct Refill(Weak<ProviderSrq>);

impl Feeder for Refill {
    fn feed(&self) {
        if let Some(srq) = self.0.upgrade() {
            srq.feed();
        }
    }
}

impl ProviderSrq {
    /// `default`: the NIC whose local keys the application has.
    pub(crate) fn new(
        opened: &Arc<Opened>,
        app: &Arc<Srq>,
        default: usize,
    ) -> Result<Arc<ProviderSrq>> {
        let pd = opened.memory.pd_on(app.pd(), opened.index)?;
        let handle = pd.handle();
        let SrqAttr { max_wr, max_sge, .. } = app.query();
        let most = (max_wr / 2).clamp(LEAST, MOST);
        let sizes = SrqAttr { max_wr: most, max_sge, limit: 0 };
        let own = opened
            .device
            .create_srq(handle, sizes, Box::new(|| {}))
            .map_err(|e| opened.error(e))?;
        let free = (0..most).rev().collect();
        let lent = (0..most).map(|_| Lent::default()).collect();
        let slots = Lending { lent, free, ..Lending::default() };
        let srq = Arc::new_cyclic(|this: &Weak<ProviderSrq>| ProviderSrq {
            own: EndsLater::new(own, &opened.commands),
            _pd: pd,
            app: app.clone(),
            opened: opened.clone(),
            default,
            slots: Mutex::new(slots),
            most: AtomicU32::new(most),
            rooms: Mutex::default(),
            feeder: Arc::new(Refill(this.clone())),
            users: AtomicU32::new(0),
        });
        srq.app.attach(srq.feeder.clone());
        Ok(srq)
    }

    /// One more QP takes from it.
    pub(crate) fn join(&self) {
        self.users.fetch_add(1, Ordering::AcqRel);
    }

    /// A QP takes from it no more, and has been destroyed on the device. With the last one it ends:
    /// what the device has goes back, in the order in which it was posted.
    pub(crate) fn leave(&self) {
        if self.users.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        self.app.detach(&self.feeder);
        let mut slots = lock(&self.slots);
        slots.ended = true;
        let mut lent: Vec<Lent> = slots.lent.drain(..).filter(|entry| entry.is_out).collect();
        drop(slots);
        lent.sort_unstable_by_key(|entry| entry.order);
        let wrs: Vec<RecvWr<'_>> =
            lent.iter().map(|e| RecvWr { wr_id: e.wr_id, sges: &e.sges }).collect();
        self.app.returned(&wrs);
        self.app.feed();
    }

    /// QPs take from it; one that has ended does not come back.
    pub(crate) fn in_use(&self) -> bool {
        self.users.load(Ordering::Acquire) > 0
    }

    /// Room at an application's CQ for all that the device has, kept while somebody has it. Where
    /// the provider cannot make a CQ larger, the device has fewer from the first QP on.
    fn room(&self, cq: &Arc<Cq>) -> Result<Arc<CqReservation>> {
        let mut rooms = lock(&self.rooms);
        rooms.retain(|room| room.strong_count() > 0);
        let mut there = rooms.iter().filter_map(Weak::upgrade);
        if let Some(room) = there.find(|room| room.is_of(cq)) {
            return Ok(room);
        }
        drop(there);
        let reserved = loop {
            let most = self.most.load(Ordering::Acquire);
            match self.opened.reserve_cq(cq, most) {
                Err(_) if most > LEAST && rooms.is_empty() => {
                    self.most.store((most / 2).max(LEAST), Ordering::Release);
                }
                reserved => break reserved?,
            }
        };
        let room = Arc::new(reserved);
        rooms.push(Arc::downgrade(&room));
        Ok(room)
    }

    /// While the application waits to be told that few receives are left, messages that nobody polls
    /// are counted, too.
    pub(crate) fn look(&self) {
        if self.app.query().limit > 0 {
            let rooms: Vec<_> = lock(&self.rooms).iter().filter_map(Weak::upgrade).collect();
            rooms.iter().for_each(|room| room.cq().look());
        }
    }

    /// What the device is told to take from.
    pub(crate) fn own(&self) -> &Arc<Srq> {
        &self.own
    }

    pub(crate) fn is_for(&self, app: &Arc<Srq>) -> bool {
        Arc::ptr_eq(&self.app, app)
    }

    /// Gives the device what it may have: first what came back from it.
    pub(crate) fn feed(&self) {
        let mut slots = lock(&self.slots);
        while !slots.ended {
            let Some(slot) = slots.back.pop_front().or_else(|| self.lend(&mut slots)) else {
                return;
            };
            if self.give(&mut slots, slot).is_err() {
                // It is dying: its QPs will leave it.
                slots.ended = true;
            }
        }
    }

    fn lend(&self, slots: &mut Lending) -> Option<u32> {
        let slot = slots.free.pop()?;
        // With the place just taken; the device has fewer than there are places where its CQs are
        // too small.
        let have = (slots.lent.len() - slots.free.len()) as u32 - 1;
        if have >= self.most.load(Ordering::Acquire) {
            slots.free.push(slot);
            return None;
        }
        let (entry, order) = (&mut slots.lent[slot as usize], slots.next_order);
        let mut take = |wr: &RecvWr<'_>| {
            (entry.is_out, entry.wr_id, entry.order) = (true, wr.wr_id, order);
            entry.sges.clear();
            entry.sges.extend_from_slice(wr.sges);
        };
        if !self.app.lend(have, &mut take) {
            slots.free.push(slot);
            return None;
        }
        slots.next_order += 1;
        Some(slot)
    }

    fn give(&self, slots: &mut Lending, slot: u32) -> Result<()> {
        let Lending { lent, sges, .. } = slots;
        let Some(entry) = lent.get(slot as usize).filter(|entry| entry.is_out) else {
            return Ok(());
        };
        let (memory, nic) = (&self.opened.memory, self.opened.index);
        let default = self.default;
        sges.clear();
        if default == nic && !memory.is_foreign(default) {
            sges.extend_from_slice(&entry.sges);
        } else {
            let key = |lkey| memory.lkey_on(default, lkey, nic).unwrap_or(NO_REGION);
            sges.extend(entry.sges.iter().map(|sge| Sge { lkey: key(sge.lkey), ..*sge }));
        }
        self.own.post(&RecvWr { wr_id: Slot::Entry(Queue::Recv, u64::from(slot)).wr_id(), sges })
    }

    /// The receive of a completion, which is used up: gives the application's id.
    pub(crate) fn used(&self, slot: u64) -> Option<u64> {
        let mut slots = lock(&self.slots);
        let entry = slots.lent.get_mut(slot as usize).filter(|entry| entry.is_out)?;
        entry.is_out = false;
        let wr_id = entry.wr_id;
        slots.free.push(slot as u32);
        drop(slots);
        self.app.used();
        Some(wr_id)
    }

    /// The receive of a completion was not used: the device gets it again, or it goes back with the
    /// rest.
    pub(crate) fn unused(&self, slot: u64) {
        let mut slots = lock(&self.slots);
        if slots.lent.get(slot as usize).is_some_and(|entry| entry.is_out) {
            slots.back.push_back(slot as u32);
        }
    }
}

/// A QP's use of a device's SRQ, which ends with the QP.
pub(crate) struct SrqUse {
    pub(crate) srq: Arc<ProviderSrq>,
    opened: Arc<Opened>,
    /// At the CQ of its receives, until it ends.
    room: Mutex<Option<Arc<CqReservation>>>,
    ended: AtomicBool,
}

impl SrqUse {
    /// That of a QP whose receives complete in `cq`.
    pub(crate) fn new(
        opened: &Arc<Opened>,
        app: &Arc<Srq>,
        default: usize,
        cq: &Arc<Cq>,
    ) -> Result<SrqUse> {
        let srq_use = SrqUse {
            srq: opened.srq(app, default)?,
            opened: opened.clone(),
            room: Mutex::default(),
            ended: AtomicBool::new(false),
        };
        // If there is no room it ends as it is dropped.
        *lock(&srq_use.room) = Some(srq_use.srq.room(cq)?);
        Ok(srq_use)
    }

    /// The device's QP was destroyed.
    pub(crate) fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.opened.leave_srq(&self.srq);
            drop(lock(&self.room).take());
        }
    }
}

impl Drop for SrqUse {
    fn drop(&mut self) {
        self.end();
    }
}
