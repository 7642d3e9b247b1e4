//! What the RC QPs of a NIC have on their way, for each destination: a congestion manager (in the
//! spirit of RFC 3124).
//!
//! A window for each QP does not keep many QPs together from overrunning the one socket that they
//! send to. So all that send to one socket share what it holds ([`CongestionManager::new`]; the
//! peer's buffer is taken to be like ours). A QP's share is what it has on its way, in the units of
//! [`unbroken_roce::Room`]: requests until they are acknowledged, READs with their answers, which
//! come back to our own socket.
//!
//! A QP is told before its turn how much more it may send. One that could send more *waits* in its
//! destination's line, at most once, and has another turn when room comes: first come, first
//! served, and who comes while others wait goes behind them. To spare system calls room is given
//! out in pieces: nobody is called before an eighth of the window is free, and what the first in
//! line wants.
//!
//! The room shrinks by the share of packets that had to be sent again in a round trip, where it was
//! more than one of [`CHANCE`] (others send to that socket, too, or it is smaller than ours), at
//! most by half, and grows by a part of the whole in each round trip without. A destination that is
//! silent altogether shrinks nothing: there is nothing to learn from it, and its QPs must all find
//! out.
//!
//! Invariants:
//! - `flight` of a destination is the sum of the shares of its QPs, as last told
//!   ([`CongestionManager::settle`]);
//! - a destination is in `open` at most once, and is there whenever its first in line may be
//!   called, so nobody waits while there is room.
//!
//! Failure cases: a QP whose peer is silent gives its share back at its timeout, when what it sent
//! counts as lost; one that ends, or is destroyed, at once ([`CongestionManager::leave`],
//! [`CongestionManager::settle`] with nothing).

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use unbroken_roce::{News, Room, RoundTrip, MAX_BLOCK_COST};

/// One of so many packets may be lost by chance.
const CHANCE: u32 = 8;
/// The room grows by one of so many parts in a round trip.
const GROWTH: u32 = 32;
/// The least room: some packets.
const MIN_ROOM: u32 = 16 << 10;
/// Packets that say something about loss.
const SAMPLE_PACKETS: u32 = 32;
/// Rounds are no shorter, in µs.
const MIN_ROUND_US: u64 = 100;

/// How often a round trip is taken over from the QPs.
const RTT_ROUND_US: u64 = 10_000;

/// A destination's number.
pub(crate) type DestId = u16;

/// What the engine remembers of a QP.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Share {
    dest: Option<DestId>,
    /// What it has on its way, as the destination counts it.
    held: u32,
    /// What it gave up in silence, and which has not come to light.
    given_up: u32,
    /// It is in its destination's line.
    pub(crate) waits: bool,
    /// Packets that had been acknowledged when it was last asked.
    acked: u64,
}

#[derive(Debug)]
struct Destination {
    addr: SocketAddr,
    /// QPs that send to it.
    users: u32,
    room: u32,
    flight: u64,
    /// What QPs gave up in silence, and may still lie in the destination's buffer.
    given_up: u64,
    /// QPs, and what each wants at least.
    line: VecDeque<(u16, u32)>,
    /// It is in `open`.
    listed: bool,
    /// Of the longest in each [`RTT_ROUND_US`]: those of many QPs are much alike, and say little of
    /// what comes next.
    rtt: RoundTrip,
    longest_us: u32,
    rtt_end_us: u64,
    /// Packets of this round.
    acked: u32,
    lost: u32,
    round_end_us: u64,
    /// When it has last acknowledged anything.
    heard_us: u64,
}

impl Destination {
    fn free(&self) -> u32 {
        // A block of a READ cannot be divided.
        let room = if self.flight == 0 { self.room.max(MAX_BLOCK_COST) } else { self.room };
        let full = u64::from(room).saturating_sub(self.flight + self.given_up);
        // Where nothing is heard, some must go to find out.
        full.max(u64::from(self.room / 8).saturating_sub(self.flight)) as u32
    }

    /// Whether the first in line may be called.
    fn calls(&self) -> bool {
        let Some(&(_, wanted)) = self.line.front() else { return false };
        self.flight + self.given_up == 0 || self.free() >= wanted.max(self.room / 8)
    }

    /// Ends a round, if it is over.
    fn learn(&mut self, max: u32, now_us: u64) {
        let packets = self.acked + self.lost;
        if now_us < self.round_end_us || packets < SAMPLE_PACKETS || self.acked == 0 {
            return;
        }
        self.room = if self.lost > packets / CHANCE {
            let kept = u64::from(self.room) * u64::from(self.acked) / u64::from(packets);
            (kept as u32).max(self.room / 2).max(MIN_ROOM)
        } else {
            (self.room + max / GROWTH).min(max)
        };
        (self.acked, self.lost) = (0, 0);
        self.round_end_us = now_us + u64::from(self.rtt.srtt_us()).max(MIN_ROUND_US);
    }
}

/// All destinations of a NIC.
#[derive(Debug)]
pub(crate) struct CongestionManager {
    by_addr: HashMap<SocketAddr, DestId>,
    /// By number; those without users are free to be taken anew.
    all: Vec<Destination>,
    unused: Vec<DestId>,
    /// Destinations whose first in line may be called, or could be a moment ago; each in its turn.
    open: VecDeque<DestId>,
    max: u32,
}

impl CongestionManager {
    /// For sockets that hold `rcvbuf` bytes, twice as much with what the kernel counts beside them.
    /// A quarter of all that is left to datagrams that are not of RC, and because the kernel gives
    /// back late what was read. What our QPs have on their way may come to the peer while it sends
    /// as much to us, and our answers come back: each gets half of the rest.
    pub(crate) fn new(rcvbuf: usize) -> CongestionManager {
        let max = (rcvbuf / 4 * 3).clamp(MIN_ROOM as usize, 1 << 30) as u32;
        CongestionManager {
            by_addr: HashMap::new(),
            all: Vec::new(),
            unused: Vec::new(),
            open: VecDeque::new(),
            max,
        }
    }

    /// A QP sends to this address from now on.
    pub(crate) fn join(&mut self, addr: SocketAddr, index: u16, share: &mut Share) {
        if share.dest.is_some_and(|dest| self.all[usize::from(dest)].addr == addr) {
            return;
        }
        self.leave(index, share);
        let dest = *self.by_addr.entry(addr).or_insert_with(|| {
            let new = Destination {
                addr,
                users: 0,
                room: self.max,
                flight: 0,
                given_up: 0,
                line: VecDeque::new(),
                listed: false,
                rtt: RoundTrip::default(),
                longest_us: 0,
                rtt_end_us: 0,
                acked: 0,
                lost: 0,
                round_end_us: 0,
                heard_us: 0,
            };
            match self.unused.pop() {
                Some(dest) => {
                    let listed = self.all[usize::from(dest)].listed;
                    self.all[usize::from(dest)] = Destination { listed, ..new };
                    dest
                }
                None => {
                    self.all.push(new);
                    (self.all.len() - 1) as DestId
                }
            }
        });
        self.all[usize::from(dest)].users += 1;
        share.dest = Some(dest);
    }

    /// A QP sends nothing any more: all that it has is given back.
    pub(crate) fn leave(&mut self, index: u16, share: &mut Share) {
        let Some(dest) = share.dest else { return };
        self.settle(share, 0);
        let d = &mut self.all[usize::from(dest)];
        d.given_up -= u64::from(share.given_up);
        if share.waits {
            d.line.retain(|(i, _)| *i != index);
        }
        d.users -= 1;
        if d.users == 0 {
            self.by_addr.remove(&d.addr);
            self.unused.push(dest);
        } else {
            self.look(dest);
        }
        *share = Share::default();
    }

    /// A QP has so much on its way now.
    #[inline]
    pub(crate) fn settle(&mut self, share: &mut Share, flight: u32) {
        let Some(dest) = share.dest.filter(|_| flight != share.held) else { return };
        let d = &mut self.all[usize::from(dest)];
        d.flight = d.flight + u64::from(flight) - u64::from(share.held);
        share.held = flight;
        if !d.line.is_empty() {
            self.look(dest);
        }
    }

    /// A QP has found its destination silent, and counts as lost what it had on its way. It may
    /// still lie in the destination's buffer: nobody gets that room until the QP hears of some of
    /// it.
    pub(crate) fn give_up(&mut self, share: &mut Share, flight: u32) {
        if let Some(dest) = share.dest {
            let lost = share.held.saturating_sub(flight);
            share.given_up += lost;
            self.all[usize::from(dest)].given_up += u64::from(lost);
            self.settle(share, flight);
        }
    }

    /// What a QP may send in its turn; one that was `called` need not stand behind those in line.
    #[inline]
    pub(crate) fn room(&self, share: &Share, called: bool) -> Room {
        let Some(dest) = share.dest else { return Room::UNLIMITED };
        let d = &self.all[usize::from(dest)];
        let cost = if called || d.line.is_empty() { d.free() } else { 0 };
        Room { cost, wait_us: d.rtt.wait_us() }
    }

    /// A QP could send `wanted` if there were room.
    #[cold]
    pub(crate) fn wait(&mut self, index: u16, share: &mut Share, wanted: u32) {
        let Some(dest) = share.dest.filter(|_| !share.waits) else { return };
        share.waits = true;
        self.all[usize::from(dest)].line.push_back((index, wanted));
        self.look(dest);
    }

    /// Takes note of what became of a QP's packets.
    #[inline]
    pub(crate) fn learn(&mut self, share: &mut Share, news: &News, now_us: u64) {
        let acked =
            news.acked.saturating_sub(std::mem::replace(&mut share.acked, news.acked)) as u32;
        let Some(dest) = share.dest.filter(|_| acked + news.lost > 0) else { return };
        let d = &mut self.all[usize::from(dest)];
        d.acked += acked;
        d.lost += news.lost;
        if acked > 0 {
            d.heard_us = now_us;
            d.given_up -= u64::from(std::mem::take(&mut share.given_up));
        }
        if let Some(rtt_us) = news.rtt_us {
            d.longest_us = d.longest_us.max(rtt_us);
            if now_us >= d.rtt_end_us {
                d.rtt.measured(std::mem::take(&mut d.longest_us));
                d.rtt_end_us = now_us + RTT_ROUND_US;
            }
        }
        d.learn(self.max, now_us);
        if !d.line.is_empty() {
            self.look(dest);
        }
    }

    /// When the destination of a QP has last acknowledged anything.
    pub(crate) fn heard_us(&self, share: &Share) -> u64 {
        share.dest.map_or(0, |dest| self.all[usize::from(dest)].heard_us)
    }

    /// Whether somebody in line may be called.
    pub(crate) fn calls(&self) -> bool {
        !self.open.is_empty()
    }

    /// Calls one that waits for room that is there now. The caller tells it so ([`Share::waits`]).
    pub(crate) fn call(&mut self) -> Option<u16> {
        while let Some(dest) = self.open.pop_front() {
            let d = &mut self.all[usize::from(dest)];
            d.listed = false;
            let called = if d.calls() { d.line.pop_front() } else { None };
            self.look(dest);
            if let Some((index, _)) = called {
                return Some(index);
            }
        }
        None
    }

    fn look(&mut self, dest: DestId) {
        let d = &mut self.all[usize::from(dest)];
        if !d.listed && d.calls() {
            d.listed = true;
            self.open.push_back(dest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RCVBUF: usize = 200 << 10;

    fn addr(n: u64) -> SocketAddr {
        SocketAddr::new([127, 0, 0, n as u8].into(), 4791)
    }

    fn news(acked: u64, lost: u32) -> News {
        News { acked, lost, rtt_us: Some(1000) }
    }

    /// Numbers that only look random.
    struct Rng(u64);

    impl Rng {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) % n
        }
    }

    /// QPs as the engine has them: share, and what each has on its way.
    struct Qps(Vec<(Share, u32)>);

    impl Qps {
        /// A turn in which a QP sends `want`, piece by piece, as far as there is room.
        fn turn(
            &mut self,
            f: &mut CongestionManager,
            index: usize,
            called: bool,
            want: u32,
        ) -> bool {
            let (share, flight) = &mut self.0[index];
            if called {
                share.waits = false;
            }
            let room = f.room(share, called).cost;
            let takes = (room / 1000).min(want / 1000) * 1000;
            *flight += takes;
            f.settle(share, *flight);
            if takes < want / 1000 * 1000 {
                f.wait(index as u16, share, 1000);
            }
            takes > 0
        }

        fn check(&self, f: &CongestionManager) {
            for (dest, d) in f.all.iter().enumerate().filter(|(_, d)| d.users > 0) {
                let of = || self.0.iter().filter(|(s, _)| s.dest == Some(dest as DestId));
                assert_eq!(d.users as usize, of().count());
                assert_eq!(d.flight, of().map(|(_, flight)| u64::from(*flight)).sum::<u64>());
                assert_eq!(d.given_up, of().map(|(s, _)| u64::from(s.given_up)).sum::<u64>());
                assert_eq!(d.line.len(), of().filter(|(s, _)| s.waits).count());
                assert!(d.flight <= u64::from(f.max.max(MAX_BLOCK_COST)));
                assert!(
                    !d.calls() || f.open.contains(&(dest as DestId)),
                    "somebody waits while there is room"
                );
            }
            assert_eq!(f.open.len(), f.all.iter().filter(|d| d.listed).count());
        }
    }

    /// QPs come, send, are answered, time out, and go: sums are right, and nobody waits while there
    /// is room.
    #[test]
    fn sums_are_right_and_nobody_waits_in_vain() {
        for seed in 0..50 {
            let (mut rng, mut f) = (Rng(seed), CongestionManager::new(RCVBUF));
            let mut qps = Qps((0..40).map(|_| (Share::default(), 0)).collect());
            let mut now_us = 0;
            for _ in 0..4000 {
                now_us += rng.below(50);
                let i = rng.below(40) as usize;
                let what = rng.below(10);
                let (share, flight) = &mut qps.0[i];
                match what {
                    0 => {
                        if share.dest.is_some() && rng.below(2) == 0 {
                            *flight = 0;
                            f.leave(i as u16, share);
                        } else if share.dest.is_none() {
                            f.join(addr(rng.below(3)), i as u16, share);
                        }
                    }
                    1 => {
                        *flight = 0;
                        f.give_up(share, 0);
                    }
                    2..=4 => {
                        *flight -= rng.below(u64::from(*flight) / 1000 + 1) as u32 * 1000;
                        f.settle(share, *flight);
                        f.learn(
                            share,
                            &news(share.acked + rng.below(3), rng.below(2) as u32),
                            now_us,
                        );
                    }
                    5..=7 if share.dest.is_some() => {
                        let want = rng.below(30_000) as u32;
                        qps.turn(&mut f, i, false, want);
                    }
                    _ => {
                        if let Some(i) = f.call() {
                            let want = 1000 + rng.below(30_000) as u32;
                            assert!(
                                qps.turn(&mut f, usize::from(i), true, want),
                                "called without room"
                            );
                        }
                    }
                }
                qps.check(&f);
            }
            // Everything is answered, and everybody who waited is called.
            for _ in 0..1000 {
                for (share, flight) in &mut qps.0 {
                    *flight = 0;
                    f.settle(share, 0);
                    f.learn(share, &news(share.acked + 1, 0), now_us);
                }
                while let Some(i) = f.call() {
                    qps.turn(&mut f, usize::from(i), true, 1000);
                }
            }
            qps.check(&f);
            assert!(qps.0.iter().all(|(s, _)| !s.waits), "seed {seed}");
        }
    }

    #[test]
    fn first_come_first_served() {
        let mut f = CongestionManager::new(RCVBUF);
        let mut qps = Qps((0..4).map(|_| (Share::default(), 0)).collect());
        (0..4).for_each(|i| f.join(addr(1), i, &mut qps.0[usize::from(i)].0));
        let all = f.max / 1000 * 1000;
        assert!(qps.turn(&mut f, 0, false, all));
        assert!(
            !qps.turn(&mut f, 2, false, 5000)
                && !qps.turn(&mut f, 1, false, 5000)
                && f.call().is_none()
        );
        // An eighth must be free.
        f.settle(&mut qps.0[0].0, all - 5000);
        assert!(f.call().is_none());
        f.settle(&mut qps.0[0].0, 0);
        assert!(!qps.turn(&mut f, 3, false, 5000), "behind those who wait");
        assert_eq!([f.call(), f.call(), f.call(), f.call()], [Some(2), Some(1), Some(3), None]);
    }

    #[test]
    fn loss_shrinks_the_room_and_time_mends_it() {
        let (mut f, mut share) = (CongestionManager::new(RCVBUF), Share::default());
        f.join(addr(1), 0, &mut share);
        let max = f.max;
        let (mut acked, mut now_us) = (0, 0);
        let mut round = |f: &mut CongestionManager, n: u64, lost: u32| {
            (acked, now_us) = (acked + n, now_us + 2000);
            f.learn(&mut share, &news(acked, lost), now_us);
            f.all[0].room
        };
        assert_eq!(round(&mut f, 950, 50), max, "by chance");
        assert_eq!(round(&mut f, 750, 250), max / 4 * 3, "what arrived is what fits");
        assert_eq!(round(&mut f, 10, 990), max / 8 * 3, "by half at most");
        assert_eq!(round(&mut f, 0, 5000), max / 8 * 3, "silence tells nothing");
        let least = (0..40).map(|_| round(&mut f, 10, 990)).last();
        assert_eq!(least, Some(MIN_ROOM));
        let most = (0..40).map(|_| round(&mut f, 1000, 0)).last();
        assert_eq!(most, Some(max));
        assert!(
            f.room(&share, false).cost >= MAX_BLOCK_COST,
            "nothing is on its dest: a block may go"
        );
    }

    /// The QPs of a burst have all waited as long: that is one round trip, and not a steady one.
    #[test]
    fn round_trips_of_a_burst_count_once() {
        let (mut f, mut share) = (CongestionManager::new(RCVBUF), Share::default());
        f.join(addr(1), 0, &mut share);
        let mut rtt = |f: &mut CongestionManager, acked, rtt_us, now_us| {
            f.learn(&mut share, &News { acked, lost: 0, rtt_us: Some(rtt_us) }, now_us);
            f.room(&share, false).wait_us
        };
        assert_eq!(rtt(&mut f, 1, 100, 1), 300, "the first counts at once");
        (2..500).for_each(|n| assert_eq!(rtt(&mut f, n, 50_000, 2), 300));
        assert!(rtt(&mut f, 500, 100, 20_000) > 50_000);
    }

    /// What a QP gave up in silence may still lie in the buffer of a peer that was stopped.
    #[test]
    fn what_was_given_up_is_not_given_to_others() {
        let mut f = CongestionManager::new(RCVBUF);
        let mut shares = [Share::default(); 2];
        shares.iter_mut().enumerate().for_each(|(i, s)| f.join(addr(1), i as u16, s));
        let [a, b] = &mut shares;
        f.settle(a, f.max);
        f.give_up(a, 0);
        assert_eq!(f.room(b, false).cost, f.max / 8, "some must find out");
        f.learn(b, &news(1, 0), 5);
        assert_eq!(f.room(b, false).cost, f.max / 8, "of what b sent");
        f.learn(a, &news(1, 0), 5);
        assert_eq!(f.room(b, false).cost, f.max);
    }
}
