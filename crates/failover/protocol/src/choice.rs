//! Which path a logical QP goes to. One function, [`choose`], for every switch: away from a path
//! that fails, to a fresh life on the same path, by plan, and home; and one rule, [`may_go_home`],
//! for when it is time to go home.
//!
//! What is chosen is an epoch, since an epoch names its path (slot *e mod 64*) for both ends. The
//! table of slots is the same at both ends; what an end knows besides, how far its NICs are, is its
//! own. So the ends may choose differently; then the higher epoch counts, as always, and that they
//! do is rare: mostly one end begins and the other follows.
//!
//! Among the paths that are believed alive, in this order:
//! 1. the explicit map, if there is one: its order, and no path that is not in it;
//! 2. any other path than the present one: who moves has a reason;
//! 3. the default path and those rail to rail, before those across;
//! 4. our NIC that is nearest to the one that the QP was made on (PCIe, NUMA), and with it to the
//!    program's memory;
//! 5. of several that are equal so far, the QP's *turn*: QPs that were made one after the other go
//!    to different ones, so that the load of a dead NIC is spread over those that live. Both ends
//!    count the same turn. Where a path of this switch was tried in vain there are no turns, but
//! 6. the lowest epoch: the order of the table, by which all come up.

use crate::slots::{slot_of, Liveness, SlotPath, SlotTable, SLOTS};

/// What an end wishes, besides that a path lives.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct Policy {
    /// Paths to go to, the best first; others are not chosen. Empty: all. A peer that goes
    /// elsewhere is followed.
    pub map: Vec<SlotPath>,
    /// How far each of our NICs is from what the QP serves; the lowest is best. Those beyond the
    /// list are at distance 0.
    pub distance: Vec<u16>,
    /// A QP goes home no sooner than so long after it came where it is. With the time for which the
    /// path home must have been steady ([`crate::health::HealthConfig::steady_us`]) it bounds how
    /// often a QP goes back and forth.
    pub min_away_us: u64,
}

static DEFAULT: Policy = Policy { map: Vec::new(), distance: Vec::new(), min_away_us: 1_000_000 };

impl Policy {
    /// No map, all NICs equally near, a second away at least.
    pub fn usual() -> &'static Policy {
        &DEFAULT
    }
}

impl Default for Policy {
    fn default() -> Policy {
        DEFAULT.clone()
    }
}

/// What is known of the paths of a QP.
#[derive(Clone, Copy, Debug)]
pub struct Health<'a> {
    /// The paths.
    pub slots: &'a SlotTable,
    /// What is believed of each slot's path.
    pub liveness_of_slots: &'a [Liveness; SLOTS],
    /// The path that the QP is on, or comes from.
    pub now: Option<SlotPath>,
    /// The QP's turn among paths that are equally good; 0: the first.
    pub turn: u32,
}

/// The best epoch of the 64 from `from` on whose path is alive and `wanted`; `None`: there is none.
pub fn choose(
    health: &Health<'_>,
    policy: &Policy,
    from: u64,
    wanted: impl Fn(SlotPath) -> bool,
) -> Option<u64> {
    let default = health.slots.get(0);
    let rank = |epoch: u64| {
        let slot = slot_of(epoch);
        let path = health.slots.get(slot).filter(|&path| wanted(path))?;
        let place = match policy.map.as_slice() {
            [] => 0,
            map => map.iter().position(|&other| other == path)?,
        };
        if health.liveness_of_slots[usize::from(slot)] != Liveness::Alive {
            return None;
        }
        let across = path.local != path.remote && Some(path) != default;
        let of = usize::from(path.local);
        let distance = policy.distance.get(of).copied();
        let present = Some(path) == health.now;
        Some((place, present, across, distance.unwrap_or(0)))
    };
    let ranked: Vec<_> =
        (from..from + SLOTS as u64).filter_map(|epoch| Some((rank(epoch)?, epoch))).collect();
    let &(best, first) = ranked.iter().min()?;
    if health.turn == 0 {
        return Some(first);
    }
    let path = |epoch| health.slots.get(slot_of(epoch));
    let equal = || ranked.iter().filter(|(rank, _)| *rank == best).map(|(_, epoch)| *epoch);
    let is_equal = equal().fold(0u64, |bits, epoch| bits | 1 << slot_of(epoch));
    // In the order of the table, which is the same at both ends wherever their epochs are; each
    // path is there several times.
    let mut paths: Vec<SlotPath> = Vec::with_capacity(SLOTS);
    for (_, candidate) in health.slots.iter().filter(|(slot, _)| is_equal & 1 << slot != 0) {
        if !paths.contains(&candidate) {
            paths.push(candidate);
        }
    }
    let chosen = paths[health.turn as usize % paths.len()];
    equal().find(|epoch| path(*epoch) == Some(chosen))
}

/// Whether a QP that came where it is at `since_us` may go home, where the path home has been
/// `steady`.
pub fn may_go_home(policy: &Policy, now_us: u64, since_us: u64, steady: bool) -> bool {
    steady && now_us >= since_us.saturating_add(policy.min_away_us)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn path(local: u8, remote: u8) -> SlotPath {
        SlotPath { local, remote }
    }

    struct Case {
        slots: SlotTable,
        liveness_of_slots: [Liveness; SLOTS],
        now: SlotPath,
        turn: u32,
        policy: Policy,
    }

    impl Case {
        fn new(nics: u8) -> Case {
            let slots = SlotTable::new(path(0, 0), nics, nics, true);
            let policy = Policy::default();
            Case {
                slots,
                liveness_of_slots: [Liveness::Alive; SLOTS],
                now: path(0, 0),
                turn: 0,
                policy,
            }
        }

        fn kill(&mut self, dead: impl Fn(SlotPath) -> bool) {
            for (slot, path) in self.slots.iter() {
                if dead(path) {
                    self.liveness_of_slots[usize::from(slot)] = Liveness::Silent;
                }
            }
        }

        fn epoch(&self, from: u64) -> Option<u64> {
            let Case { slots, liveness_of_slots, now, turn, policy } = self;
            choose(
                &Health { slots, liveness_of_slots, now: Some(*now), turn: *turn },
                policy,
                from,
                |_| true,
            )
        }

        fn path(&self) -> Option<SlotPath> {
            self.epoch(1).and_then(|epoch| self.slots.get(slot_of(epoch)))
        }
    }

    #[test]
    fn without_more_knowledge_the_lowest_living_epoch_is_chosen() {
        let mut c = Case::new(4);
        assert_eq!((c.epoch(1), c.path()), (Some(1), Some(path(1, 1))));
        c.kill(|p| p.local == 1);
        assert_eq!((c.epoch(1), c.path()), (Some(2), Some(path(2, 2))));
        c.kill(|p| p.local == p.remote);
        assert!(
            c.path().is_some_and(|p| p.local != p.remote && p.local != 1),
            "across where no rail lives"
        );
        c.kill(|_| true);
        assert_eq!(c.epoch(1), None);
    }

    #[test]
    fn the_present_path_is_the_last_choice_and_still_one() {
        let mut c = Case::new(2);
        c.now = path(1, 1);
        assert_eq!(c.path(), Some(path(0, 0)));
        c.kill(|p| p != path(1, 1));
        assert_eq!(c.path(), Some(path(1, 1)));
    }

    #[test]
    fn near_nics_come_before_far_ones_and_rails_before_both() {
        let mut c = Case::new(4);
        c.policy.distance = vec![10, 20, 20, 10];
        assert_eq!(c.path(), Some(path(3, 3)));
        c.kill(|p| p.local == p.remote && p.local != 1);
        assert_eq!(c.path(), Some(path(1, 1)), "far, and rail to rail");
        c.kill(|p| p == path(1, 1));
        assert!(c.path().is_some_and(|p| p.local == 0 || p.local == 3), "{:?}", c.path());
    }

    #[test]
    fn an_explicit_map_overrides_everything_but_death() {
        let mut c = Case::new(4);
        c.policy = Policy {
            map: vec![path(2, 1), path(3, 3)],
            distance: vec![0, 0, 9, 9],
            ..Policy::default()
        };
        assert_eq!(c.path(), Some(path(2, 1)));
        c.kill(|p| p == path(2, 1));
        assert_eq!(c.path(), Some(path(3, 3)));
        c.kill(|p| p == path(3, 3));
        assert_eq!(c.path(), None, "no other is chosen");
    }

    #[test]
    fn qps_of_a_dead_nic_take_turns_over_those_that_are_equally_good() {
        let chosen = |c: &mut Case| {
            [0, 1, 2, 3].map(|turn| {
                c.turn = turn;
                c.path().unwrap()
            })
        };
        let mut c = Case::new(4);
        c.kill(|p| p.local == 0);
        assert_eq!(chosen(&mut c), [1, 2, 3, 1].map(|nic| path(nic, nic)));
        c.kill(|p| p == path(2, 2));
        assert_eq!(chosen(&mut c), [1, 3, 1, 3].map(|nic| path(nic, nic)));
        c.policy.distance = vec![0, 9, 0, 1];
        assert_eq!(chosen(&mut c), [path(3, 3); 4], "the nearest comes first");
        c.policy.map = vec![path(1, 1), path(3, 3)];
        assert_eq!(chosen(&mut c), [path(1, 1); 4], "and the map before");
    }

    #[test]
    fn home_is_gone_to_when_it_is_steady_and_the_qp_has_been_away() {
        let policy = Policy { min_away_us: 1_000, ..Policy::default() };
        assert!(
            !may_go_home(&policy, 10_999, 10_000, true)
                && !may_go_home(&policy, 20_000, 10_000, false)
        );
        assert!(
            may_go_home(&policy, 11_000, 10_000, true)
                && !may_go_home(&policy, u64::MAX - 1, u64::MAX, true)
        );
        // The second that docs/guide/failover.md promises.
        let usual = Policy::default();
        assert!(!may_go_home(&usual, 1_999_999, 1_000_000, true));
        assert!(may_go_home(&usual, 2_000_000, 1_000_000, true));
    }

    /// Whatever is known: an epoch that is chosen lies ahead, within one turn of the table, and its
    /// path is alive and wanted; none is chosen only where there is none; no other epoch of the
    /// turn is better; and an end that knows nothing more chooses as its peer does.
    #[test]
    fn what_is_chosen_is_alive_wanted_and_the_best() {
        let mut state = 1u64;
        let mut draw = |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..2_000 {
            let nics = 1 + draw(5) as u8;
            let any = |draw: &mut dyn FnMut(u64) -> u64| {
                path(draw(nics.into()) as u8, draw(nics.into()) as u8)
            };
            let (default, now, dead) =
                (any(&mut draw), any(&mut draw), [any(&mut draw), any(&mut draw)]);
            let mut c = Case::new(nics);
            (c.slots, c.now) = (SlotTable::new(default, nics, nics, true), now);
            c.kill(|p| dead.contains(&p));
            let shunned = draw(u64::from(nics) + 1) as u8;
            if draw(2) == 0 {
                c.policy.distance = (0..nics).map(|_| draw(3) as u16).collect();
                c.policy.map = (0..draw(3)).map(|_| any(&mut draw)).collect();
            }
            let (from, Case { slots, liveness_of_slots, policy, .. }) = (draw(1_000), &c);
            let turn = draw(7) as u32;
            let health = Health { slots, liveness_of_slots, now: Some(now), turn };
            let wanted = |p: SlotPath| p.local != shunned;
            let may = |p: SlotPath| {
                !dead.contains(&p)
                    && wanted(p)
                    && (policy.map.is_empty() || policy.map.contains(&p))
            };
            let Some(epoch) = choose(&health, policy, from, wanted) else {
                assert!(slots.iter().all(|(_, p)| !may(p)));
                continue;
            };
            let chosen = slots.get(slot_of(epoch)).expect("a filled slot");
            assert!((from..from + SLOTS as u64).contains(&epoch) && may(chosen));
            if chosen == now {
                assert!(
                    policy.map.len() > 1 || slots.iter().all(|(_, p)| p == now || !may(p)),
                    "others live"
                );
            }
            let mirrored = SlotTable::new(default.mirrored(), nics, nics, false);
            let blind = |slots: &SlotTable, now| {
                choose(
                    &Health { slots, liveness_of_slots, now: Some(now), turn },
                    &Policy::default(),
                    from,
                    |_| true,
                )
            };
            assert_eq!(
                blind(slots, now),
                blind(&mirrored, now.mirrored()),
                "both ends choose the same"
            );
        }
    }
}
