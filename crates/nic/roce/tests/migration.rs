//! Automatic path migration: two ends, two paths between them, and what their owners may ask for.

use crate::common::rc::{pair, write};
use crate::common::script::Script;
use crate::common::*;
use proptest::prelude::*;
use unbroken_roce::*;
use unbroken_types::*;
use unbroken_wire::Packet;
use PathMigState::{Armed, Migrated, Rearm};

/// What the owner of an end knows of its paths.
#[derive(Clone, Copy)]
struct Paths {
    primary: usize,
    alternate: Option<usize>,
}

/// A pair whose packets take the path that each end uses. A path that is down loses all.
struct Net {
    pair: Pair,
    paths: [Paths; 2],
    up: [bool; 2],
    /// When, to whom, over which path, what.
    flight: Vec<(u64, usize, usize, Vec<u8>)>,
    /// Packets that are lost next, whatever they are.
    lose: usize,
    loss_per_mille: u64,
    sent: usize,
}

impl Net {
    fn new(pair: Pair) -> Net {
        let paths = [Paths { primary: 0, alternate: None }; 2];
        let mut net =
            Net { pair, paths, up: [true; 2], flight: vec![], lose: 0, loss_per_mille: 0, sent: 0 };
        net.pair.set_selective([true; 2]);
        net
    }

    /// Two ends at rest that are armed.
    fn armed() -> Net {
        let mut net = Net::new(pair(false));
        (0..2).for_each(|end| net.rearm(end).unwrap());
        net.run();
        assert_eq!(net.states(), [Armed; 2]);
        assert_eq!(net.events(), [vec![], vec![]]);
        net
    }

    fn modify(&mut self, end: usize, change: &RcModify) -> Result<(), ModifyError> {
        let End { qp, wcs, .. } = &mut self.pair.ends[end];
        qp.modify(change, wcs)?;
        if change.alternate.is_some() {
            self.paths[end].alternate = Some(1 - self.paths[end].primary);
        }
        self.follow(end);
        Ok(())
    }

    fn rearm(&mut self, end: usize) -> Result<(), ModifyError> {
        self.modify(
            end,
            &RcModify { alternate: Some(9), migration: Some(Rearm), ..RcModify::default() },
        )
    }

    fn migrate(&mut self, end: usize) -> Result<(), ModifyError> {
        self.modify(end, &RcModify { migration: Some(Migrated), ..RcModify::default() })
    }

    /// Does what the owner of an end has to do when its path has changed.
    fn follow(&mut self, end: usize) {
        if self.pair.ends[end].qp.take_path_change() {
            let paths = &mut self.paths[end];
            paths.primary =
                paths.alternate.take().expect("it migrates only where there is an alternate path");
        }
    }

    fn states(&self) -> [PathMigState; 2] {
        [0, 1].map(|end: usize| self.pair.ends[end].qp.attrs().migration.unwrap())
    }

    fn primaries(&self) -> [usize; 2] {
        self.paths.map(|p| p.primary)
    }

    fn events(&mut self) -> [Vec<RcEvent>; 2] {
        [0, 1]
            .map(|end: usize| std::iter::from_fn(|| self.pair.ends[end].qp.take_event()).collect())
    }

    fn transmit(&mut self) -> bool {
        let before = self.flight.len();
        let mut pushed = 0;
        for end in 0..2 {
            let End { qp, mem, wcs, .. } = &mut self.pair.ends[end];
            let mut sink = VecSink { mem, room: 20, packets: vec![] };
            qp.poll_transmit(self.pair.now_us, &mut sink, wcs);
            let packets = sink.packets;
            self.follow(end);
            for (_, bytes) in packets {
                pushed += 1;
                let mig_req = Packet::parse(&bytes).unwrap().bth.mig_req;
                assert_eq!(mig_req, self.states()[end] == Migrated, "the bit says the state");
                let rng = &mut self.pair.rng;
                let late_us = if rng.chance(self.loss_per_mille) { rng.below(300) } else { 0 };
                let lost = self.lose > 0 || rng.chance(self.loss_per_mille);
                self.lose = self.lose.saturating_sub(1);
                if self.up[self.paths[end].primary] && !lost {
                    let at_us = self.pair.now_us + 10 + late_us;
                    self.flight.push((at_us, 1 - end, self.paths[end].primary, bytes));
                }
            }
        }
        self.sent += pushed;
        self.flight.len() > before || pushed > 0
    }

    fn step(&mut self) -> bool {
        if self.transmit() {
            return true;
        }
        let arrivals = self.flight.iter().map(|p| p.0);
        let timers = self.pair.ends.iter().filter_map(|e| e.qp.poll_timeout());
        let Some(next) = arrivals.chain(timers).min() else { return false };
        self.pair.now_us = self.pair.now_us.max(next);
        let now_us = self.pair.now_us;
        // A stable sort: packets of one time keep their order.
        self.flight.sort_by_key(|p| p.0);
        let due = self.flight.iter().take_while(|p| p.0 <= now_us).count();
        for (_, to, path, bytes) in self.flight.drain(..due).collect::<Vec<_>>() {
            if !self.up[path] {
                continue;
            }
            let paths = self.paths[to];
            let via = match path {
                p if p == paths.primary => Via::Primary,
                p if Some(p) == paths.alternate => Via::Alternate,
                _ => Via::Other,
            };
            let packet = Packet::parse(&bytes).unwrap();
            let End { qp, mem, wcs, .. } = &mut self.pair.ends[to];
            if qp.is_news(packet.bth.mig_req) {
                qp.hear(now_us, packet.bth.mig_req, via);
            }
            qp.handle_packet(now_us, &packet, mem, wcs);
            self.follow(to);
        }
        for end in 0..2 {
            let End { qp, wcs, .. } = &mut self.pair.ends[end];
            if qp.poll_timeout().is_some_and(|t| t <= now_us) {
                qp.handle_timeout(now_us, wcs);
            }
            self.follow(end);
        }
        true
    }

    /// Runs a script with migrations and failures in between; gives how many failures and
    /// migrations there were.
    fn exchange(&mut self, script: &mut Script) -> (u32, usize) {
        let (mut failures, mut migrations) = (0, 0);
        for _ in 0..300_000 {
            script.post(&mut self.pair);
            let rests = !self.step();
            migrations +=
                self.events().iter().flatten().filter(|e| **e == RcEvent::PathMigrated).count();
            if rests && script.done(&self.pair) {
                return (failures, migrations);
            }
            let healthy = self.up == [true; 2];
            for end in 0..2 {
                assert_eq!(self.pair.ends[end].qp.state(), QpState::Rts);
                if healthy && self.states()[end] == Migrated && self.pair.rng.chance(100) {
                    self.rearm(end).unwrap();
                } else if self.states()[end] == Armed && self.pair.rng.chance(5) {
                    self.migrate(end).unwrap();
                }
            }
            let (states, primaries) = (self.states(), self.primaries());
            if healthy
                && states == [Armed; 2]
                && primaries[0] == primaries[1]
                && self.pair.rng.chance(20)
            {
                failures += 1;
                self.up[primaries[0]] = false;
            } else if !healthy && primaries.iter().all(|p| self.up[*p]) && self.pair.rng.chance(100)
            {
                self.up = [true; 2];
            }
        }
        panic!("no end: {:?} {:?}", self.states(), self.pair.ends[0].qp.progress());
    }

    fn run(&mut self) {
        for _ in 0..200_000 {
            if !self.step() {
                return;
            }
        }
        panic!("the pair never comes to rest: {:?}", self.states());
    }
}

#[test]
fn idle_ends_arm_and_one_takes_the_other_along() {
    let mut net = Net::new(pair(false));
    net.rearm(0).unwrap();
    net.run();
    assert_eq!(net.states(), [Rearm, Migrated], "one alone is not armed");
    net.rearm(1).unwrap();
    net.run();
    assert_eq!(net.states(), [Armed; 2]);
    net.migrate(1).unwrap();
    net.run();
    assert_eq!((net.states(), net.primaries()), ([Migrated; 2], [1; 2]));
    assert_eq!(net.events(), [vec![RcEvent::PathMigrated], vec![RcEvent::PathMigrated]]);
    assert_eq!(net.pair.ends[0].qp.attrs().timeout, Some(9), "that of the alternate path");
    assert_eq!(net.pair.ends[0].qp.attrs().alternate, None, "it is used up");
    // And back.
    (0..2).for_each(|end| net.rearm(end).unwrap());
    net.run();
    net.migrate(0).unwrap();
    net.run();
    assert_eq!((net.states(), net.primaries()), ([Migrated; 2], [0; 2]));
}

#[test]
fn an_armed_end_answers_one_that_arms_anew() {
    let mut net = Net::armed();
    net.rearm(0).unwrap();
    assert_eq!(net.states(), [Rearm, Armed]);
    net.run();
    assert_eq!(net.states(), [Armed; 2]);
}

#[test]
fn announcements_may_be_lost() {
    for lost in 0..6 {
        let mut net = Net::new(pair(false));
        (0..2).for_each(|end| net.rearm(end).unwrap());
        net.lose = lost;
        net.run();
        assert_eq!(net.states(), [Armed; 2], "{lost} lost");
        net.migrate(0).unwrap();
        net.lose = lost;
        net.run();
        assert_eq!((net.states(), net.primaries()), ([Migrated; 2], [1; 2]), "{lost} lost");
    }
}

/// Else a thousand queue pairs that migrate at once would be kept busy with what both ends know.
#[test]
fn a_migration_that_was_followed_is_announced_no_more() {
    for (lost, packets) in [(0, 2), (1, 3), (2, 4)] {
        let mut net = Net::armed();
        net.run();
        (net.sent, net.lose) = (0, lost);
        net.migrate(0).unwrap();
        net.run();
        assert_eq!((net.states(), net.sent), ([Migrated; 2], packets), "{lost} lost");
    }
    // The follower's one packet may be lost: the end that began gives up in the end.
    let mut net = Net::armed();
    net.run();
    net.migrate(0).unwrap();
    assert!(net.transmit());
    while net.states() != [Migrated; 2] {
        assert!(net.step());
    }
    (net.sent, net.lose) = (0, 1);
    net.run();
    assert_eq!(net.sent, 1 + 6, "the packet that is lost, and all repetitions");
}

/// An end that has no core for seconds, whose socket overflows meanwhile, is asked again.
#[test]
fn an_end_that_arms_is_heard_after_seconds_of_silence() {
    let mut net = Net::new(pair(false));
    (0..2).for_each(|end| net.rearm(end).unwrap());
    net.up = [false; 2];
    while net.pair.now_us < 5_000_000 {
        assert!(net.step(), "both have given up after {} us", net.pair.now_us);
    }
    net.up = [true; 2];
    net.run();
    assert_eq!((net.states(), net.pair.now_us < 20_000_000), ([Armed; 2], true));
}

#[test]
fn without_an_alternate_path_every_packet_says_so_and_nothing_is_announced() {
    let mut net = Net::new(pair(false));
    net.pair.post(0, &write(1, 3000));
    net.run();
    assert_eq!(net.pair.statuses(0), [(1, 0)]);
    assert_eq!(net.pair.ends[0].qp.poll_timeout(), None);
    net.modify(0, &RcModify { alternate: Some(9), ..RcModify::default() }).unwrap();
    assert!(!net.transmit(), "to give a path says nothing");
}

#[test]
fn a_path_that_fails_is_left_and_what_was_on_it_is_sent_again() {
    for (far, len) in [(0, 8000), (1, 8000), (0, 1), (1, 1)] {
        let mut net = Net::armed();
        net.pair.post(far, &write(1, len));
        net.transmit();
        net.up[0] = false;
        net.run();
        assert_eq!(net.pair.statuses(far), [(1, 0)]);
        assert_eq!((net.states(), net.primaries()), ([Migrated; 2], [1; 2]));
        assert_eq!(net.events(), [vec![RcEvent::PathMigrated], vec![RcEvent::PathMigrated]]);
        let (from, to) = (&net.pair.ends[far].mem, &net.pair.ends[1 - far].mem);
        assert_eq!(from.bytes(SRC)[..len], to.bytes(WRITABLE)[..len]);
    }
}

#[test]
fn a_port_without_a_link_is_left_at_once() {
    let mut net = Net::armed();
    net.pair.post(0, &write(1, 8000));
    net.transmit();
    net.up[0] = false;
    let now_us = net.pair.now_us;
    net.pair.ends[0].qp.path_lost(now_us);
    net.follow(0);
    net.run();
    assert_eq!(net.pair.statuses(0), [(1, 0)]);
    assert_eq!(net.primaries(), [1; 2]);
}

#[test]
fn an_alternate_path_that_is_dead_too_ends_as_without_one() {
    // Known to be down: it is not even tried.
    let mut net = Net::armed();
    net.pair.ends[0].qp.set_alternate_usable(false);
    net.pair.post(0, &write(1, 100));
    net.up = [false; 2];
    net.run();
    assert_eq!(net.pair.statuses(0), [(1, WcStatus::RetryExcErr as u32)]);
    assert_eq!(net.events()[0], [RcEvent::MigrationFailed]);
    // Silent: it is tried.
    let mut net = Net::armed();
    net.pair.post(0, &write(1, 100));
    net.up = [false; 2];
    net.run();
    assert_eq!(net.pair.statuses(0), [(1, WcStatus::RetryExcErr as u32)]);
    assert_eq!(net.events()[0], [RcEvent::PathMigrated]);
}

#[test]
fn a_peer_that_goes_elsewhere_is_not_followed() {
    let mut net = Net::armed();
    for _ in 0..2 {
        net.pair.ends[1].qp.hear(0, true, Via::Other);
        net.pair.ends[1].qp.hear(0, true, Via::Primary); // late, from before it was armed
    }
    assert_eq!(net.states(), [Armed; 2]);
    assert_eq!(net.events()[1], [RcEvent::MigrationFailed], "once");
}

/// What the specification says an owner may ask for.
fn allowed(state: PathMigState, loaded: bool, gives: bool, asks: Option<PathMigState>) -> bool {
    match asks {
        Some(Armed) => false,
        Some(Rearm) => loaded || gives,
        Some(Migrated) => state == Migrated || state == Armed && !gives,
        None => state == Migrated || !gives,
    }
}

fn asked() -> impl Strategy<Value = (usize, bool, Option<PathMigState>)> {
    (
        0..2usize,
        any::<bool>(),
        prop_oneof![Just(None), Just(Some(Migrated)), Just(Some(Rearm)), Just(Some(Armed))],
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever is asked for in whatever order: what may not be changes nothing, and nobody is
    /// stuck.
    #[test]
    fn what_may_be_asked_for_is_the_specifications(asked in proptest::collection::vec((asked(), any::<bool>()), 1..60)) {
        let mut net = Net::new(pair(false));
        for ((end, gives, migration), rests) in asked {
            let (before, attrs) = (net.states()[end], net.pair.ends[end].qp.attrs());
            let change = RcModify { alternate: gives.then_some(9), migration, ..RcModify::default() };
            let done = net.modify(end, &change);
            prop_assert_eq!(done.is_ok(), allowed(before, attrs.alternate.is_some(), gives, migration));
            if done.is_err() {
                prop_assert_eq!(net.pair.ends[end].qp.attrs(), attrs);
            }
            if rests {
                net.run();
                prop_assert!(net.states() != [Rearm; 2] || net.primaries()[0] != net.primaries()[1]);
            }
        }
    }
}

/// Traffic of all kinds, migrations whenever they may be asked for, paths that fail while both ends
/// are armed, packets that are lost and late: every message runs once, and no end fails.
#[test]
fn nothing_is_lost_or_repeated() {
    let (mut failures, mut migrations) = (0, 0);
    for seed in 0..400 {
        let mut rng = Rng(seed);
        let loss_per_mille = if rng.chance(300) { 0 } else { rng.below(60) };
        let mut kinds = || -> Vec<(u8, usize, u32)> {
            (0..40)
                .map(|_| (rng.next() as u8, rng.below(9000) as usize, rng.next() as u32))
                .collect()
        };
        let kinds = [kinds(), kinds()];
        let mut net = Net::new(Pair::new(seed, Faults::default(), Mtu::B1024, false));
        net.loss_per_mille = loss_per_mille;
        let mut script = Script::new(&mut net.pair, [&kinds[0], &kinds[1]], 7);
        let (failed, migrated) = net.exchange(&mut script);
        (failures, migrations) = (failures + failed, migrations + migrated);
        script.check(&net.pair);
    }
    assert!(
        failures > 400 && migrations > 1000,
        "{failures} failures, {migrations} migrations: too few to prove anything"
    );
}
