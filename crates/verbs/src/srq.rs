//! Shared receive queues.
//!
//! An [`Srq`] is a bounded ring of receives in this process's memory, under a short lock, that QPs
//! of all its NICs take from. So a logical QP that moves to another NIC takes from the same queue
//! as before, and nothing of the queue has to move with it.
//!
//! A QP takes a receive when a message needs one. What it has taken is its own until the message is
//! complete; if the QP is stopped before that without having failed, the receive goes back in
//! front. Invariants: a receive is taken by one QP at a time; receives are taken in the order in
//! which they were posted, those that came back first.
//!
//! A device whose SRQs are its own is *lent* a share of the receives, by a feeder that is told of
//! each post ([`Srq::attach`]). What is lent counts as posted until it is used, or comes back.
//!
//! The limit: *disarmed* → *armed* (by [`Srq::modify`]) → fewer receives than the limit → the owner
//! is told once, *disarmed*. If there are fewer already when it is armed, the owner is told at
//! once: it would wait in vain otherwise.
//!
//! Lock order: a device's engine → the queue. The owner is told with the engine's lock held: it may
//! queue and wake, nothing else.

use crate::{DeviceAttr, Error, Owner, Result};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use unbroken_types::{PdHandle, PostError, RecvRing, RecvWr, SharedReceives};

/// Sizes of a shared receive queue, and its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SrqAttr {
    /// Receives that fit.
    pub max_wr: u32,
    /// Scatter/gather entries of each.
    pub max_sge: u32,
    /// When fewer receives than this are left, the owner is told, once; 0: not armed.
    pub limit: u32,
}

struct State {
    ring: RecvRing,
    /// Receives that devices have, and have not used.
    lent: u32,
    limit: u32,
}

/// Brings receives to a device whose SRQs are its own.
pub trait Feeder: Send + Sync {
    /// There is something to be had. Called without a lock; must not block.
    fn feed(&self);
}

impl State {
    /// Disarms a limit that is reached; whether it was.
    fn reached(&mut self) -> bool {
        let reached = self.ring.len() + self.lent < self.limit;
        if reached {
            self.limit = 0;
        }
        reached
    }
}

/// Told that the limit of a queue is reached. Called with a device's lock held: it may queue and
/// wake, nothing else.
pub type LimitHook = Box<dyn Fn() + Send + Sync>;

/// A shared receive queue.
pub struct Srq {
    state: Mutex<State>,
    pd: PdHandle,
    max_sge: u32,
    /// The device's `max_srq_wr`.
    most_wr: u32,
    on_limit: LimitHook,
    owner: Owner,
    feeders: RwLock<Vec<Arc<dyn Feeder>>>,
    /// How many there are, as a hint for posters.
    feeder_count: AtomicU32,
}

impl Srq {
    /// A queue of `sizes.max_wr` receives, whose keys are of `pd`; `on_limit` tells the owner that
    /// the limit is reached. The limit in `sizes` does not count: it is armed by [`Srq::modify`].
    /// EINVAL where `device` cannot have such a queue.
    pub fn new(
        device: &DeviceAttr,
        pd: PdHandle,
        sizes: SrqAttr,
        on_limit: impl Fn() + Send + Sync + 'static,
    ) -> Result<Arc<Srq>> {
        Srq::of_device(Owner::PROCESS, device, pd, sizes, Box::new(on_limit))
    }

    /// A queue for the QPs of one device, as [`Srq::new`] makes one for those of the process.
    pub fn of_device(
        owner: Owner,
        device: &DeviceAttr,
        pd: PdHandle,
        sizes: SrqAttr,
        on_limit: LimitHook,
    ) -> Result<Arc<Srq>> {
        check_size("max_wr", sizes.max_wr, device.max_srq_wr)?;
        if sizes.max_sge > device.max_srq_sge {
            return Err(Error::invalid(format!(
                "max_sge is {}, at most {} is possible",
                sizes.max_sge, device.max_srq_sge
            )));
        }
        let max_sge = sizes.max_sge.max(1);
        Ok(Arc::new(Srq {
            state: Mutex::new(State {
                ring: RecvRing::new(sizes.max_wr, max_sge),
                lent: 0,
                limit: 0,
            }),
            pd,
            max_sge,
            most_wr: device.max_srq_wr,
            on_limit,
            owner,
            feeders: RwLock::default(),
            feeder_count: AtomicU32::new(0),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whose QPs take from it.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// The protection domain.
    pub fn pd(&self) -> PdHandle {
        self.pd
    }

    /// Posts a receive; ENOMEM where the queue is full.
    pub fn post(&self, wr: &RecvWr<'_>) -> Result<()> {
        let mut s = self.state();
        let posted = s.ring.len() + s.lent;
        if posted >= s.ring.max_wr() && wr.sges.len() <= self.max_sge as usize {
            return Err(PostError::QueueFull(posted).into());
        }
        s.ring.push(wr)?;
        drop(s);
        self.feed();
        Ok(())
    }

    /// Tells the feeders that there may be something.
    #[inline]
    pub fn feed(&self) {
        if self.feeder_count.load(Ordering::Acquire) > 0 {
            self.feeders
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .iter()
                .for_each(|f| f.feed());
        }
    }

    /// Has `feeder` told whenever there may be something to be had.
    pub fn attach(&self, feeder: Arc<dyn Feeder>) {
        let mut feeders = self.feeders.write().unwrap_or_else(PoisonError::into_inner);
        feeders.push(feeder);
        self.feeder_count.store(feeders.len() as u32, Ordering::Release);
    }

    /// ... and no more.
    pub fn detach(&self, feeder: &Arc<dyn Feeder>) {
        let mut feeders = self.feeders.write().unwrap_or_else(PoisonError::into_inner);
        feeders.retain(|f| !Arc::ptr_eq(f, feeder));
        self.feeder_count.store(feeders.len() as u32, Ordering::Release);
    }

    /// Lends the oldest receive to a device that has `lent` of this queue's already, unless that
    /// were more than its share: so that another device finds some, too. False: nothing was lent.
    pub fn lend(&self, lent: u32, to: &mut dyn FnMut(&RecvWr<'_>)) -> bool {
        let feeders = self.feeder_count.load(Ordering::Acquire);
        let mut s = self.state();
        let share = ((s.ring.len() + s.lent) / (feeders + 1)).max(1);
        let Some(wr) = s.ring.oldest().filter(|_| lent < share) else { return false };
        to(&wr);
        s.ring.remove_oldest();
        s.lent += 1;
        true
    }

    /// A message has used a receive that was lent.
    pub fn used(&self) {
        let mut s = self.state();
        s.lent = s.lent.saturating_sub(1);
        let reached = s.reached();
        drop(s);
        if reached {
            (self.on_limit)();
        }
    }

    /// Receives that were lent and are not used come back in front, the oldest first. To be
    /// followed by [`Self::feed`], unless by a feeder.
    pub fn returned(&self, wrs: &[RecvWr<'_>]) {
        let mut s = self.state();
        for wr in wrs.iter().rev() {
            s.ring.push_front(wr);
            s.lent = s.lent.saturating_sub(1);
        }
    }

    /// Receives that no message has used.
    pub fn len(&self) -> u32 {
        let s = self.state();
        s.ring.len() + s.lent
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Changes the number of receives that fit, and arms the limit (0 disarms it). EINVAL, and
    /// nothing is changed, where what is posted would not fit or the limit could never be reached.
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<()> {
        let mut s = self.state();
        if let Some(max_wr) = max_wr {
            check_size("max_wr", max_wr, self.most_wr)?;
            let posted = s.ring.len() + s.lent;
            if max_wr < posted {
                return Err(Error::invalid(format!(
                    "max_wr is {max_wr}, but {posted} receives are posted"
                )));
            }
        }
        let (limit, size) = (limit.unwrap_or(s.limit), max_wr.unwrap_or(s.ring.max_wr()));
        if limit > size {
            return Err(Error::invalid(format!(
                "srq_limit is {limit}, but only {size} receives fit"
            )));
        }
        if let Some(max_wr) = max_wr {
            s.ring.resize(max_wr);
        }
        s.limit = limit;
        let reached = s.reached();
        drop(s);
        if reached {
            (self.on_limit)();
        }
        Ok(())
    }

    /// Present sizes and limit.
    pub fn query(&self) -> SrqAttr {
        let s = self.state();
        SrqAttr { max_wr: s.ring.max_wr(), max_sge: self.max_sge, limit: s.limit }
    }
}

fn check_size(name: &str, value: u32, most: u32) -> Result<()> {
    if value == 0 || value > most {
        return Err(Error::invalid(format!("{name} is {value}, 1 to {most} is possible")));
    }
    Ok(())
}

impl SharedReceives for Srq {
    fn take(&self, to: &mut dyn FnMut(&RecvWr<'_>)) -> bool {
        let mut s = self.state();
        let Some(wr) = s.ring.oldest() else { return false };
        to(&wr);
        s.ring.remove_oldest();
        let reached = s.reached();
        drop(s);
        if reached {
            (self.on_limit)();
        }
        true
    }

    fn give_back(&self, wr: &RecvWr<'_>) {
        self.state().ring.push_front(wr);
    }

    fn max_sge(&self) -> u32 {
        self.max_sge
    }

    fn pd(&self) -> PdHandle {
        self.pd
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use unbroken_types::Sge;

    fn queue(max_wr: u32) -> (Arc<Srq>, Arc<AtomicU32>) {
        let told = Arc::new(AtomicU32::new(0));
        let count = told.clone();
        let sizes = SrqAttr { max_wr, max_sge: 2, limit: 9 };
        let device = DeviceAttr { max_srq_wr: 64, max_srq_sge: 4, ..DeviceAttr::default() };
        let srq = Srq::new(&device, PdHandle(7), sizes, move || {
            count.fetch_add(1, Relaxed);
        });
        (srq.unwrap(), told)
    }

    fn post(srq: &Srq, wr_id: u64) -> Result<()> {
        srq.post(&RecvWr { wr_id, sges: &[Sge { addr: wr_id, length: 8, lkey: 1 }] })
    }

    fn take(srq: &Srq) -> Option<u64> {
        let mut id = None;
        srq.take(&mut |wr| {
            assert_eq!(wr.sges, [Sge { addr: wr.wr_id, length: 8, lkey: 1 }]);
            id = Some(wr.wr_id);
        });
        id
    }

    #[test]
    fn the_limit_is_told_once_each_time_it_is_armed() {
        let (srq, told) = queue(8);
        for wr_id in 0..6 {
            post(&srq, wr_id).unwrap();
        }
        assert_eq!(srq.query(), SrqAttr { max_wr: 8, max_sge: 2, limit: 0 });
        srq.modify(None, Some(5)).unwrap();
        assert_eq!((take(&srq), told.load(Relaxed)), (Some(0), 0));
        assert_eq!((take(&srq), told.load(Relaxed)), (Some(1), 1));
        assert_eq!((take(&srq), told.load(Relaxed), srq.query().limit), (Some(2), 1, 0));
        // Armed when it is reached already.
        srq.modify(None, Some(5)).unwrap();
        assert_eq!((told.load(Relaxed), srq.query().limit), (2, 0));
        // Armed and disarmed.
        srq.modify(None, Some(3)).unwrap();
        srq.modify(None, Some(0)).unwrap();
        assert_eq!((take(&srq), told.load(Relaxed)), (Some(3), 2));
    }

    #[test]
    fn sizes_are_checked_and_a_refused_change_changes_nothing() {
        let (srq, _) = queue(4);
        for wr_id in 0..4 {
            post(&srq, wr_id).unwrap();
        }
        assert_eq!(post(&srq, 9).unwrap_err().errno(), libc::ENOMEM);
        let sges = [Sge::default(); 3];
        assert_eq!(srq.post(&RecvWr { wr_id: 9, sges: &sges }).unwrap_err().errno(), libc::EINVAL);
        for (max_wr, limit) in [
            (Some(3), None),
            (Some(65), None),
            (Some(0), None),
            (None, Some(5)),
            (Some(8), Some(9)),
        ] {
            assert_eq!(
                srq.modify(max_wr, limit).unwrap_err().errno(),
                libc::EINVAL,
                "{max_wr:?} {limit:?}"
            );
        }
        assert_eq!(srq.query(), SrqAttr { max_wr: 4, max_sge: 2, limit: 0 });
        srq.modify(Some(8), Some(4)).unwrap();
        for wr_id in 4..8 {
            post(&srq, wr_id).unwrap();
        }
        assert_eq!(
            (0..9).map_while(|_| take(&srq)).collect::<Vec<_>>(),
            (0..8).collect::<Vec<_>>()
        );
        let device = DeviceAttr { max_srq_wr: 64, max_srq_sge: 4, ..DeviceAttr::default() };
        for (max_wr, max_sge) in [(0, 1), (65, 1), (1, 5)] {
            assert!(Srq::new(&device, PdHandle(7), SrqAttr { max_wr, max_sge, limit: 0 }, || {})
                .is_err());
        }
    }

    struct Count(AtomicU32);

    impl Feeder for Count {
        fn feed(&self) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn what_is_lent_counts_as_posted_until_it_is_used() {
        let (srq, told) = queue(8);
        let count = Arc::new(Count(AtomicU32::new(0)));
        let feeder: Arc<dyn Feeder> = count.clone();
        srq.attach(feeder.clone());
        (0..8).for_each(|wr_id| post(&srq, wr_id).unwrap());
        assert_eq!(count.0.load(Relaxed), 8);
        srq.modify(None, Some(7)).unwrap();
        let lend = |have| {
            let mut id = None;
            srq.lend(have, &mut |wr| id = Some(wr.wr_id));
            id
        };
        assert_eq!(
            (0..5).map(lend).collect::<Vec<_>>(),
            [Some(0), Some(1), Some(2), Some(3), None],
            "half is kept"
        );
        assert_eq!((srq.len(), told.load(Relaxed)), (8, 0));
        assert_eq!(post(&srq, 9).unwrap_err().errno(), libc::ENOMEM);
        srq.used();
        srq.used();
        assert_eq!((srq.len(), told.load(Relaxed)), (6, 1));
        let back = [2, 3].map(|wr_id| RecvWr { wr_id, sges: &[] });
        srq.returned(&back);
        assert_eq!((srq.len(), count.0.load(Relaxed)), (6, 8));
        assert_eq!(
            (0..2).map(lend).collect::<Vec<_>>(),
            [Some(2), Some(3)],
            "first what came back"
        );
        srq.detach(&feeder);
        post(&srq, 10).unwrap();
        assert_eq!(count.0.load(Relaxed), 8);
    }

    #[test]
    fn what_comes_back_is_taken_first_even_where_the_queue_is_full() {
        let (srq, _) = queue(2);
        post(&srq, 0).unwrap();
        post(&srq, 1).unwrap();
        assert_eq!(take(&srq), Some(0));
        post(&srq, 2).unwrap();
        SharedReceives::give_back(
            &*srq,
            &RecvWr { wr_id: 0, sges: &[Sge { addr: 0, length: 8, lkey: 1 }] },
        );
        assert_eq!(srq.len(), 3);
        assert_eq!(post(&srq, 3).unwrap_err().errno(), libc::ENOMEM);
        assert_eq!((0..4).map_while(|_| take(&srq)).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(srq.is_empty());
    }
}
