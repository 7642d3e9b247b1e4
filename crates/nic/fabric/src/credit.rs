//! Back-pressure between the NICs of a fabric: how much a receiver's buffer still takes.
//!
//! UC and UD have no acknowledgements, so a sender that is faster than its receiver would overrun
//! the receiver's socket, and the kernel would drop what the programs never send again. A lossless
//! Ethernet pauses the sender then (PFC), and InfiniBand gives it credits. Here each slot of a NIC
//! has an account in the NIC's shared page: senders add what they are about to send, the receiver
//! adds what it has taken, and the difference is what lies in between. A sender that would go
//! beyond the receiver's `room` waits.
//!
//! Both sides count a packet alike ([`packet_cost`]), whatever runs of packets the kernel makes of
//! it.
//!
//! State of an account: *closed* (`room` is 0: nobody listens, senders go ahead and their packets
//! are lost) ⇄ *open*, in which it is *flowing* or, when a sender found it full, *stalled* since
//! some time; taking anything ends a stall.
//!
//! Invariants:
//! - a sender reserves before it sends and returns what it did not use, so `sent - taken` is never
//!   less than what is on its way, except after a write-off;
//! - `taken` is not ahead of `sent` for longer than one addition: a receiver that finds it so sets
//!   it back;
//! - no sender waits for longer than [`PATIENCE_US`] on an account from which nothing is taken.
//!
//! Failure cases:
//! - packets that were reserved and never arrive (dropped by the kernel, or the sender died in
//!   between) make the difference too large. It is *written off* when the account is full and
//!   nothing was taken for [`PATIENCE_US`];
//! - a receiver that died or was stopped takes nothing: what waits is written off in the same way,
//!   and the senders go on without waiting (their packets are lost, as on a real network) until
//!   something is taken again;
//! - one that was stopped and comes back takes what was written off, too, which puts `taken` ahead;
//!   it sets it back, so that the account is exact again when its socket is empty;
//! - a process that takes over the slot begins with an empty socket: opening forgets what was
//!   before.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A sender waits no longer than this for a receiver that takes nothing, in µs: long enough for a
/// process on a machine that is much too busy.
pub const PATIENCE_US: u64 = 1_000_000;
/// What a packet takes in the receiver's buffer beside its bytes, about.
const PACKET_OVERHEAD_BYTES: u64 = 1024;

/// What `packets` packets of together `bytes` bytes cost.
pub const fn packet_cost(packets: u64, bytes: u64) -> u64 {
    bytes + packets * PACKET_OVERHEAD_BYTES
}

/// The account of one slot. Senders and the receiver write to different cache lines.
#[repr(C, align(128))]
pub struct Credit {
    /// Reserved by all senders since ever.
    sent: AtomicU64,
    _line: [AtomicU64; 7],
    /// Taken by the receiver since ever.
    taken: AtomicU64,
    /// What may be on its way; 0 while nobody listens.
    room: AtomicU64,
    /// `taken` when a sender first found the account full, and when that was.
    stalled_taken: AtomicU64,
    stalled_us: AtomicU64,
    _unused: [AtomicU64; 4],
}

impl Credit {
    /// Opens the account of a receiver with an empty socket that has so much room.
    pub fn open(&self, room: u64) {
        self.taken.store(self.sent.load(Relaxed), Relaxed);
        self.stalled_us.store(0, Relaxed);
        self.room.store(room, Relaxed);
    }

    /// Nobody listens any more.
    pub fn close(&self) {
        self.room.store(0, Relaxed);
    }

    /// The receiver has taken so much.
    pub fn take(&self, cost: u64) {
        #[cfg(test)]
        if tests::is_left_out(tests::Rule::Take) {
            return;
        }
        let taken = self.taken.fetch_add(cost, Relaxed).wrapping_add(cost);
        let sent = self.sent.load(Relaxed);
        if ahead(taken, sent) {
            // After a write-off. If a sender writes off at the same time, the next addition sets it
            // back.
            let _ = self.taken.compare_exchange(taken, sent, Relaxed, Relaxed);
        }
    }

    /// Reserves between `least` and `most` for packets that are sent now; `None`: there is no room,
    /// try again soon.
    pub fn reserve(&self, least: u64, most: u64, now_us: u64) -> Option<u64> {
        let mut sent = self.sent.load(Relaxed);
        loop {
            let (taken, room) = (self.taken.load(Relaxed), self.room.load(Relaxed));
            let on_way = between(taken, sent);
            let free = if room == 0 { most } else { room.saturating_sub(on_way) };
            // A packet that is larger than the room goes alone.
            let fits = free >= least || on_way == 0 || self.is_overdue(sent, taken, now_us);
            if !fits {
                return None;
            }
            let grant = free.min(most).max(least);
            match self.sent.compare_exchange_weak(sent, sent.wrapping_add(grant), Relaxed, Relaxed)
            {
                Ok(_) => return Some(grant),
                Err(now) => sent = now,
            }
        }
    }

    /// What senders have reserved and the receiver has not taken.
    pub fn on_way(&self) -> u64 {
        between(self.taken.load(Relaxed), self.sent.load(Relaxed))
    }

    /// Gives back what was reserved and not used.
    pub fn give_back(&self, cost: u64) {
        #[cfg(test)]
        if tests::is_left_out(tests::Rule::GiveBack) {
            return;
        }
        self.sent.fetch_sub(cost, Relaxed);
    }

    /// The account is full. Whether nothing has been taken for too long; then all that is on its
    /// way is written off.
    #[cold]
    fn is_overdue(&self, sent: u64, taken: u64, now_us: u64) -> bool {
        let since_us = self.stalled_us.load(Relaxed);
        // A time later than now is of an earlier boot.
        let stalled =
            since_us != 0 && since_us <= now_us && self.stalled_taken.load(Relaxed) == taken;
        if !stalled {
            self.stalled_taken.store(taken, Relaxed);
            self.stalled_us.store(now_us, Relaxed);
            return false;
        }
        if now_us - since_us < PATIENCE_US {
            return false;
        }
        if self.taken.compare_exchange(taken, sent, Relaxed, Relaxed).is_ok() {
            // Still the same stall: nothing was taken, and whoever finds the account full again
            // need not wait.
            self.stalled_taken.store(sent, Relaxed);
        }
        true
    }
}

/// What was sent and not taken.
fn between(taken: u64, sent: u64) -> u64 {
    if ahead(taken, sent) {
        0
    } else {
        sent.wrapping_sub(taken)
    }
}

/// Whether counter `a` is ahead of `b`.
fn ahead(a: u64, b: u64) -> bool {
    (a.wrapping_sub(b) as i64) > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// What can be left out, to show that tests notice.
    #[derive(Clone, Copy, PartialEq, Debug)]
    pub(super) enum Rule {
        /// The receiver returns what it has taken.
        Take,
        /// The sender returns what it did not use.
        GiveBack,
    }

    thread_local! {
        static LEFT_OUT: Cell<Option<Rule>> = const { Cell::new(None) };
    }

    pub(super) fn is_left_out(rule: Rule) -> bool {
        LEFT_OUT.get() == Some(rule)
    }

    #[test]
    fn credit_that_is_never_returned_is_noticed() {
        for rule in [Rule::Take, Rule::GiveBack] {
            LEFT_OUT.set(Some(rule));
            let failed = std::panic::catch_unwind(a_sender_waits_for_the_receiver).is_err();
            LEFT_OUT.set(None);
            assert!(failed, "{rule:?}");
        }
    }

    const ROOM: u64 = 100_000;

    fn account() -> Credit {
        // Counters that are about to wrap.
        let near = || AtomicU64::new(u64::MAX - 5_000);
        let zero = || AtomicU64::new(0);
        let credit = Credit {
            sent: near(),
            _line: Default::default(),
            taken: zero(),
            room: zero(),
            stalled_taken: zero(),
            stalled_us: zero(),
            _unused: Default::default(),
        };
        credit.open(ROOM);
        credit
    }

    #[test]
    fn a_sender_waits_for_the_receiver() {
        let c = account();
        assert_eq!(c.reserve(5_000, 60_000, 1), Some(60_000));
        assert_eq!(c.reserve(5_000, 60_000, 1), Some(40_000), "what is left");
        assert_eq!(c.reserve(5_000, 60_000, 1), None);
        c.give_back(4_999);
        assert_eq!(c.reserve(5_000, 60_000, 2), None, "not enough for a packet");
        c.take(1);
        assert_eq!(c.reserve(5_000, 60_000, 3), Some(5_000));
        c.take(ROOM);
        assert_eq!(
            c.reserve(200_000, 200_000, 4),
            Some(200_000),
            "a packet larger than the room goes alone"
        );
        assert_eq!(c.reserve(1, 1, 4), None);
    }

    #[test]
    fn nobody_listens() {
        let c = account();
        c.close();
        for _ in 0..10 {
            assert_eq!(c.reserve(5_000, ROOM, 1), Some(ROOM));
        }
        c.open(ROOM);
        assert_eq!(
            c.reserve(5_000, ROOM, 1),
            Some(ROOM),
            "a new receiver begins with an empty socket"
        );
        assert_eq!(c.reserve(5_000, ROOM, 1), None);
    }

    #[test]
    fn a_receiver_that_stops_holds_senders_once() {
        let c = account();
        c.reserve(5_000, ROOM, 10).unwrap();
        assert_eq!(c.reserve(5_000, ROOM, 20), None);
        assert_eq!(c.reserve(5_000, ROOM, 19 + PATIENCE_US), None);
        for n in 0..5 {
            assert!(
                c.reserve(5_000, ROOM, 20 + PATIENCE_US + n).is_some(),
                "written off, and nobody waits again"
            );
        }
        // It comes back and finds what still fitted into its socket; the rest was lost.
        c.take(ROOM);
        let now_us = 30 + 2 * PATIENCE_US;
        while c.reserve(5_000, 5_000, now_us).is_some() {
            // Fills the room.
        }
        c.take(ROOM);
        assert_eq!(
            c.reserve(ROOM, ROOM, now_us + 1),
            Some(ROOM),
            "the socket is empty, and the account exact"
        );
        assert_eq!(c.reserve(5_000, ROOM, now_us + 1), None);
    }

    #[test]
    fn what_is_lost_on_the_way_is_written_off() {
        let c = account();
        for n in 0..1_000u64 {
            // Half of it never arrives; time passes while a sender waits.
            let mut now_us = 1 + n * 4_000_000;
            while c.reserve(10_000, 10_000, now_us).is_none() {
                now_us += 1_000;
                assert!(now_us <= 1 + n * 4_000_000 + PATIENCE_US + 2_000);
            }
            c.take(5_000);
        }
    }

    #[test]
    fn senders_share_the_room() {
        let c = account();
        let taken = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let got = loop {
                            match c.reserve(1_000, 30_000, 1) {
                                Some(n) => break n,
                                None => std::thread::yield_now(),
                            }
                        };
                        c.give_back(got - 1_000);
                        taken.fetch_add(1_000, Relaxed);
                    }
                });
            }
            scope.spawn(|| {
                let mut done = 0;
                while done < 3 * 2_000_000 {
                    let n = taken.swap(0, Relaxed);
                    assert!(n <= ROOM, "more than the room was on its direction");
                    c.take(n);
                    done += n;
                    std::thread::yield_now();
                }
            });
        });
        assert_eq!(c.sent.load(Relaxed), c.taken.load(Relaxed));
    }
}
