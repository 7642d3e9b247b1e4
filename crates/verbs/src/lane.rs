//! The way of a post of a C program to the provider's function, under one lock.
//!
//! A logical QP has one [`Lane`], and every physical QP that carries it in turn keeps its state in a
//! [`LaneCell`] of that lane: one lock for all of them. So a post takes that lock, finds who carries
//! the QP now, writes its record, and calls the provider. Whoever changes what carries the QP, or
//! wants posts to come to it first, says so under the same lock ([`Lane::close`],
//! [`Lane::carry_by`]): when that returns, no post is inside, and none goes the short way before
//! [`Lane::open`].
//!
//! A lane takes what almost every post is. It leaves the rest of a list to its caller, from the
//! first work request on that is anything else: wherever nothing carries the QP, the lane is
//! closed, the carrier has a reason of its own, the work request is of a rare kind, or the provider
//! refuses it.
//!
//! Lock order: whatever its caller has → a lane → the provider's own locks.

use crate::abi::{ibv_recv_wr, ibv_send_wr};
use parking_lot::{Mutex, MutexGuard};
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A physical QP that takes posts under the lock of its lane.
pub trait Carrier: Send + Sync {
    /// Posts sends from the head of a list on. The first that was not posted; null: all were.
    ///
    /// # Safety
    /// `list` is a list of work requests as `ibv_post_send` takes it, which its owner leaves alone
    /// during the call.
    unsafe fn carry_sends(&self, turn: &mut LaneTurn, list: *mut ibv_send_wr) -> *mut ibv_send_wr;

    /// Posts receives from the head of a list on. The first that was not posted; null: all were.
    ///
    /// # Safety
    /// `list` is a list of work requests as `ibv_post_recv` takes it, which its owner leaves alone
    /// during the call.
    unsafe fn carry_recvs(&self, turn: &mut LaneTurn, list: *mut ibv_recv_wr) -> *mut ibv_recv_wr;

    /// Whether no send is outstanding whose end is told.
    fn is_idle(&self, turn: &mut LaneTurn) -> bool;
}

struct State {
    /// Why posts do not go the short way; 0: they do.
    closed: u32,
    carrier: Option<Kept>,
}

/// A carrier, and where it is: found without a look at its layout.
struct Kept {
    at: *const dyn Carrier,
    _kept: Arc<dyn Carrier>,
}

// SAFETY: a carrier may be used in any thread, and so may what names it.
unsafe impl Send for Kept {}

impl Kept {
    #[inline(always)]
    fn get(&self) -> &dyn Carrier {
        // SAFETY: it is kept for as long as this is.
        unsafe { &*self.at }
    }
}

/// See the module's text.
pub struct Lane(Mutex<State>);

/// The lock of a lane, as its holder sees it: there is one at a time.
pub struct LaneTurn(*const Lane);

impl Lane {
    /// Sends are held back.
    pub const HELD: u32 = 1;
    /// Nothing is outstanding, and the owner wants to hear of the next post.
    pub const IDLE: u32 = 2;

    /// A lane without a carrier, closed as idle.
    pub fn new() -> Arc<Lane> {
        Arc::new(Lane(Mutex::new(State { closed: Lane::IDLE, carrier: None })))
    }

    #[inline(always)]
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Posts go to that one from now on.
    pub fn carry_by(&self, carrier: Option<Arc<dyn Carrier>>) {
        let before = std::mem::replace(
            &mut self.lock().carrier,
            carrier.map(|carrier| Kept { at: Arc::as_ptr(&carrier), _kept: carrier }),
        );
        drop(before); // without the lock, which its end takes
    }

    /// Posts do not go the short way while there is such a reason.
    pub fn close(&self, reason: u32) {
        self.lock().closed |= reason;
    }

    /// There is no such reason any more.
    pub fn open(&self, reason: u32) {
        self.lock().closed &= !reason;
    }

    /// Closes it as [`Lane::IDLE`], unless a send is outstanding.
    pub fn close_if_idle(&self) -> bool {
        let mut state = self.lock();
        let idle = state.carrier.as_ref().is_none_or(|c| c.get().is_idle(&mut LaneTurn(self)));
        state.closed |= if idle { Lane::IDLE } else { 0 };
        idle
    }

    /// Posts sends from the head of a list on. The first that was not posted, which is for the
    /// caller; null: all were.
    ///
    /// # Safety
    /// As for [`Carrier::carry_sends`].
    #[inline(always)]
    pub unsafe fn post_send(&self, list: *mut ibv_send_wr) -> *mut ibv_send_wr {
        let state = self.lock();
        match &*state {
            // SAFETY: promised by the caller.
            State { closed: 0, carrier: Some(carrier) } => unsafe {
                carrier.get().carry_sends(&mut LaneTurn(self), list)
            },
            _ => list,
        }
    }

    /// Posts receives from the head of a list on, also where sends are none of its business
    /// ([`Lane::IDLE`]). The first that was not posted, which is for the caller; null: all were.
    ///
    /// # Safety
    /// As for [`Carrier::carry_recvs`].
    #[inline(always)]
    pub unsafe fn post_recv(&self, list: *mut ibv_recv_wr) -> *mut ibv_recv_wr {
        let state = self.lock();
        match &*state {
            State { closed: 0 | Lane::IDLE, carrier: Some(carrier) } => {
                // SAFETY: promised by the caller.
                unsafe { carrier.get().carry_recvs(&mut LaneTurn(self), list) }
            }
            _ => list,
        }
    }
}

/// What is read and changed under the lock of a lane only.
pub struct LaneCell<T> {
    lane: Arc<Lane>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one thread at a time, the one that has the lane's lock.
unsafe impl<T: Send> Sync for LaneCell<T> {}

impl<T> LaneCell<T> {
    /// A cell of that lane.
    pub fn new(lane: &Arc<Lane>, value: T) -> LaneCell<T> {
        LaneCell { lane: lane.clone(), value: UnsafeCell::new(value) }
    }

    /// Takes the lane's lock.
    #[inline]
    pub fn lock(&self) -> LaneGuard<'_, T> {
        LaneGuard { _state: self.lane.lock(), value: &self.value }
    }

    /// The value, for who has the lock.
    #[inline(always)]
    pub fn get<'a>(&'a self, turn: &'a mut LaneTurn) -> &'a mut T {
        assert!(std::ptr::eq(turn.0, &*self.lane), "the lock of another lane");
        // SAFETY: the turn is of this lane, so its holder has the lock, and it is borrowed for as
        // long as what is given.
        unsafe { &mut *self.value.get() }
    }
}

/// The value of a cell, and the lane's lock.
pub struct LaneGuard<'a, T> {
    _state: MutexGuard<'a, State>,
    value: &'a UnsafeCell<T>,
}

impl<T> Deref for LaneGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the lock of the cell's lane is held.
        unsafe { &*self.value.get() }
    }
}

impl<T> DerefMut for LaneGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and nobody else has this guard.
        unsafe { &mut *self.value.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::null_mut;
    use std::sync::Weak;

    /// Counts what comes.
    struct Counter {
        posts: LaneCell<u32>,
        idle: bool,
    }

    impl Carrier for Counter {
        unsafe fn carry_sends(&self, turn: &mut LaneTurn, _: *mut ibv_send_wr) -> *mut ibv_send_wr {
            *self.posts.get(turn) += 1;
            null_mut()
        }

        unsafe fn carry_recvs(&self, turn: &mut LaneTurn, _: *mut ibv_recv_wr) -> *mut ibv_recv_wr {
            *self.posts.get(turn) += 100;
            null_mut()
        }

        fn is_idle(&self, _: &mut LaneTurn) -> bool {
            self.idle
        }
    }

    fn posts(lane: &Lane) -> bool {
        let list = std::ptr::dangling_mut();
        // SAFETY: the list is not read.
        unsafe { lane.post_send(list).is_null() }
    }

    fn receives(lane: &Lane) -> bool {
        // SAFETY: the list is not read.
        unsafe { lane.post_recv(std::ptr::dangling_mut()).is_null() }
    }

    #[test]
    fn posts_reach_the_carrier_unless_there_is_a_reason_against_it() {
        let lane = Lane::new();
        let of = |idle| Arc::new(Counter { posts: LaneCell::new(&lane, 0), idle });
        let (busy, idle) = (of(false), of(true));
        assert!(!posts(&lane) && !receives(&lane), "nothing carries it");
        lane.carry_by(Some(busy.clone()));
        assert!(!posts(&lane) && receives(&lane), "it is idle");
        lane.open(Lane::IDLE);
        assert!(posts(&lane) && !lane.close_if_idle() && posts(&lane));
        lane.close(Lane::HELD);
        assert!(!posts(&lane) && !receives(&lane));
        lane.open(Lane::HELD);
        lane.carry_by(Some(idle.clone()));
        assert!(posts(&lane) && lane.close_if_idle() && !posts(&lane));
        let counted = |counter: &Counter| *counter.posts.lock();
        assert_eq!([&busy, &idle].map(|c| counted(c)), [102, 1]);
        let left: Weak<Counter> = Arc::downgrade(&idle);
        drop(idle);
        lane.carry_by(None);
        assert!(left.upgrade().is_none(), "nothing keeps what carried it");
    }

    #[test]
    #[should_panic(expected = "another lane")]
    fn the_lock_of_another_lane_is_none() {
        let (lane, other) = (Lane::new(), Lane::new());
        let counter = Counter { posts: LaneCell::new(&other, 0), idle: true };
        lane.carry_by(Some(Arc::new(counter)));
        lane.open(Lane::IDLE);
        posts(&lane);
    }

    /// However posters, closers and carriers come, a post is counted once, by who carries it.
    #[test]
    fn what_closes_a_lane_leaves_nobody_inside() {
        const POSTS: u32 = 20_000;
        let lane = Lane::new();
        let carriers =
            [0, 1].map(|_| Arc::new(Counter { posts: LaneCell::new(&lane, 0), idle: true }));
        lane.carry_by(Some(carriers[0].clone()));
        lane.open(Lane::IDLE);
        let taken: u32 = std::thread::scope(|scope| {
            let posters: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| (0..POSTS).filter(|_| posts(&lane)).count() as u32))
                .collect();
            for n in 0..200 {
                lane.close(Lane::HELD);
                let left = &carriers[n % 2];
                let before = *left.posts.lock();
                std::thread::yield_now();
                assert_eq!(*left.posts.lock(), before, "it is held");
                lane.carry_by(Some(carriers[(n + 1) % 2].clone()));
                lane.open(Lane::HELD);
            }
            posters.into_iter().map(|p| p.join().unwrap()).sum()
        });
        let counted = |counter: &Arc<Counter>| *counter.posts.lock();
        assert_eq!(carriers.iter().map(counted).sum::<u32>(), taken);
    }
}
