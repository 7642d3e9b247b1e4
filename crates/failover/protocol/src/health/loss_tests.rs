//! Paths that lose some of what they carry, in steps of a millisecond.

use super::*;
use crate::slots::SlotPath;
use crate::Mutation;

const fn path(nic: u8) -> SlotPath {
    SlotPath { local: nic, remote: nic }
}

/// A peer with four rails, its clock, and what each rail loses of a hundred probes and answers.
struct World {
    health: PeerHealth,
    ms: u64,
    dice: u64,
    loss_percent: [u64; 4],
    /// How long an answer takes.
    rtt_ms: u64,
    flying: Vec<(u64, PortPath, u32)>,
    said: Vec<(u64, u8, Verdict)>,
}

impl World {
    fn new(loss_percent: [u64; 4], mutation: Mutation) -> World {
        let config = HealthConfig { mutation, ..HealthConfig::default() };
        let mut health = PeerHealth::new(config);
        (0..4).for_each(|nic| health.add(path(nic)));
        let (flying, said) = (Vec::new(), Vec::new());
        World { health, ms: 0, dice: 7, loss_percent, rtt_ms: 1, flying, said }
    }

    fn lost(&mut self, nic: u8) -> bool {
        self.dice = self
            .dice
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 33) % 100 < self.loss_percent[usize::from(nic)]
    }

    /// QPs on rail 0 have so many of a hundred packets sent again, each 8 ms.
    fn run(&mut self, for_ms: u64, again: u64) {
        for _ in 0..for_ms {
            self.ms += 1;
            let (ms, now_us) = (self.ms, self.ms * 1_000);
            let due: Vec<_> = self.flying.iter().filter(|f| f.0 <= ms).copied().collect();
            self.flying.retain(|f| f.0 > ms);
            for (_, port_path, sequence) in due {
                self.health.handle_answer(now_us, port_path, sequence);
            }
            if ms % 8 == 0 {
                self.health.resent(now_us, path(0), 100 - again, again);
            }
            if self.health.poll_timeout().is_some_and(|at| at <= now_us) {
                self.health.handle_timeout(now_us);
            }
            while let Some((port_path, sequence)) = self.health.poll_probe(now_us) {
                if !self.lost(port_path.path.local) && !self.lost(port_path.path.local) {
                    self.flying.push((ms + self.rtt_ms, port_path, sequence));
                }
            }
            while let Some((port_path, verdict)) = self.health.poll_verdict() {
                self.said.push((ms, port_path.path.local, verdict));
            }
        }
    }

    fn grey(loss_percent: [u64; 4], again: u64) -> Vec<(u64, u8, Verdict)> {
        let mut w = World::new(loss_percent, Mutation::None);
        w.run(4_000, again);
        w.said
    }
}

#[test]
fn a_path_that_loses_more_than_the_others_is_grey_within_two_seconds() {
    for percent in [5, 30, 60] {
        let said = World::grey([percent, 0, 0, 0], percent);
        assert!(
            matches!(said[..], [(at, 0, Verdict::Grey)] if at < 2_000),
            "{percent} %: {said:?}"
        );
    }
    // The others lose some, too.
    assert!(matches!(World::grey([30, 1, 2, 3], 30)[..], [(_, 0, Verdict::Grey)]));
    // One other that is well is enough.
    assert!(matches!(World::grey([30, 30, 30, 0], 30)[..], [(_, 0, Verdict::Grey)]));
}

#[test]
fn where_all_lose_as_much_none_is_grey() {
    for percent in [1, 5, 30, 60] {
        assert_eq!(World::grey([percent; 4], percent), [], "{percent} %");
    }
    let mut w = World::new([30; 4], Mutation::GreyAlone);
    w.run(4_000, 30);
    assert!(!w.said.is_empty(), "the rule that is left out is noticed");
}

/// The QPs of a path send again because the peer does not read, and probes are lost there and
/// nowhere else; but the peer is slow on all paths.
#[test]
fn what_a_peer_without_a_core_loses_does_not_count() {
    let mut w = World::new([30, 0, 0, 0], Mutation::None);
    w.rtt_ms = 60;
    w.run(10_000, 30);
    assert_eq!(w.said, []);
}

#[test]
fn nothing_is_asked_while_little_is_sent_again() {
    let mut w = World::new([60, 0, 0, 0], Mutation::None);
    w.run(4_000, 1);
    assert_eq!((w.said.len(), w.health.poll_timeout()), (0, None));
}

#[test]
fn a_grey_path_is_well_again_when_it_loses_nothing_and_steady_later() {
    let mut w = World::new([30, 0, 0, 0], Mutation::None);
    w.run(2_000, 30);
    assert!(w.health.is_shunned(path(0)) && !w.health.is_steady(w.ms * 1_000, path(0)));
    // It is left; still it is looked at, ever less often.
    w.run(60_000, 0);
    assert!(w.health.is_grey(path(0)) && w.said.len() == 1, "{:?}", w.said);
    w.loss_percent[0] = 0;
    w.run(13_000, 0);
    let (at_ms, 0, Verdict::Alive) = w.said[1] else { panic!("{:?}", w.said) };
    let steady_ms = (at_ms..at_ms + 5_000).find(|ms| w.health.is_steady(ms * 1_000, path(0)));
    assert_eq!(steady_ms, Some(at_ms + 1_000));
}

#[test]
fn a_grey_path_is_not_shunned_when_no_other_lives() {
    let mut w = World::new([30, 0, 0, 0], Mutation::None);
    w.run(2_000, 30);
    (1..4).for_each(|nic| w.health.set_nic(w.ms * 1_000, nic, false));
    assert!(w.health.is_grey(path(0)) && !w.health.is_shunned(path(0)));
    w.run(3_000, 30);
    assert!(w.health.is_grey(path(0)), "there is nothing to compare it with");
}

/// A path that loses nearly all is not taken for dead, also before anything is known of it.
#[test]
fn a_path_that_answers_now_and_then_is_not_dead() {
    for dice in 0..200 {
        let mut w = World::new([60, 0, 0, 0], Mutation::None);
        w.dice = dice;
        w.health.ask(0, path(0), 0);
        w.run(200, 0);
        assert!(!w.health.is_dead(path(0)), "{dice}");
    }
}

#[test]
fn a_path_that_answers_nothing_is_dead_and_not_grey() {
    let mut w = World::new([100, 0, 0, 0], Mutation::None);
    w.run(100, 30);
    w.health.ask(w.ms * 1_000, path(0), w.ms * 1_000);
    w.run(4_000, 30);
    assert!(matches!(w.said[0], (at, 0, Verdict::Dead) if at < 160), "{:?}", w.said);
    assert!(w.said.iter().all(|(_, _, verdict)| *verdict == Verdict::Dead), "{:?}", w.said);
}
