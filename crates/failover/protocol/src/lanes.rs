//! When a QP stays on its path and goes over other ports of the same NICs: automatic path
//! migration, inside the NICs, with nothing lost and nothing to be replayed. It comes before a
//! switch to other NICs.
//!
//! A lane is a number ([`Way`]); the device knows it as a path of a port to a port. A QP is on one
//! lane, and may have another one *loaded*. When both ends have, they are ARMED, and either may go
//! there: the devices by themselves, when a port loses its link or the retries are used up, or an
//! end by request, here, when it has found out that the lane in use is dead.
//!
//! | state of migration | what is known | step |
//! |--------------------|---------------|------|
//! | MIGRATED | another lane may carry | [`Step::Load`] the best |
//! | REARM | a better lane than the loaded one may carry | [`Step::Load`] that |
//! | ARMED | the loaded lane is dead, and another may carry | [`Step::Load`] that |
//! | ARMED | the loaded lane is home, and steady | [`Step::Migrate`] |
//! | ARMED | the lane in use is dead, and the loaded one may carry | migrates ([`Lanes::may_leave`]) |
//!
//! The best lane is home, the one that the program connected, else the lowest number. Both ends
//! choose by that alone; where they know different things they may load different lanes, and are
//! not ARMED until they know the same. Then a switch to other NICs does what a migration cannot.
//!
//! [`Way`]: crate::Way

use unbroken_types::PathMigState;

/// What is known of the lanes of a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lanes {
    /// The lane in use.
    pub now: u8,
    /// The one that the program connected.
    pub home: u8,
    /// How many the path has.
    pub count: u8,
    /// The device's state of migration.
    pub migration: PathMigState,
    /// The lane that is loaded.
    pub loaded: Option<u8>,
    /// A bit for each lane that is not known to be dead: its port here is up, and the peer answers
    /// over it.
    pub alive: u8,
    /// The lane home works, and has for long enough.
    pub home_is_steady: bool,
}

/// What is to be done while the lane in use works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Nothing.
    Stay,
    /// This lane is to be given to the device, and the QP to be ARMED.
    Load(u8),
    /// The QP is to go to the loaded lane.
    Migrate,
}

impl Lanes {
    /// What is to be done.
    pub fn step(&self) -> Step {
        let loaded = self.loaded.filter(|lane| self.may_carry(*lane));
        match (self.migration, self.best()) {
            (_, None) => Step::Stay,
            (PathMigState::Armed, Some(best)) => match loaded {
                Some(lane) if lane == self.home && self.home_is_steady => Step::Migrate,
                Some(_) => Step::Stay,
                None => Step::Load(best),
            },
            (PathMigState::Rearm, Some(best)) if loaded == Some(best) => Step::Stay,
            (_, Some(best)) => Step::Load(best),
        }
    }

    /// Whether the QP can leave the lane in use, which is dead, by migration.
    pub fn may_leave(&self) -> bool {
        self.migration == PathMigState::Armed
            && self.loaded.is_some_and(|lane| self.may_carry(lane))
    }

    /// The lane to load.
    fn best(&self) -> Option<u8> {
        let others = std::iter::once(self.home).chain(0..self.count);
        others
            .filter(|lane| *lane != self.now && *lane < self.count)
            .find(|lane| self.may_carry(*lane))
    }

    /// Whether a lane is not known to be dead.
    pub fn may_carry(&self, lane: u8) -> bool {
        self.alive.checked_shr(lane.into()).is_some_and(|bits| bits & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PathMigState::{Armed, Migrated, Rearm};

    fn lanes(now: u8, migration: PathMigState, loaded: Option<u8>, alive: u8) -> Lanes {
        Lanes { now, home: 0, count: 2, migration, loaded, alive, home_is_steady: false }
    }

    const ALL: u8 = !0;

    #[test]
    fn another_lane_is_loaded_once_and_only_if_it_may_carry() {
        assert_eq!(lanes(0, Migrated, None, ALL).step(), Step::Load(1));
        assert_eq!(lanes(0, Rearm, Some(1), ALL).step(), Step::Stay);
        assert_eq!(lanes(0, Armed, Some(1), ALL).step(), Step::Stay);
        assert_eq!(lanes(0, Migrated, None, 0b001).step(), Step::Stay);
        assert_eq!(
            Lanes { count: 1, ..lanes(0, Migrated, None, ALL) }.step(),
            Step::Stay,
            "one lane only"
        );
    }

    #[test]
    fn a_dead_lane_is_left_for_a_loaded_one_that_may_carry() {
        assert!(lanes(0, Armed, Some(1), 0b010).may_leave());
        assert!(!lanes(0, Rearm, Some(1), ALL).may_leave(), "the peer is not ready");
        assert!(!lanes(0, Armed, Some(1), 0b001).may_leave(), "the loaded one is dead, too");
        assert!(!lanes(0, Migrated, None, ALL).may_leave());
    }

    #[test]
    fn it_goes_home_when_home_is_loaded_and_steady() {
        let away = lanes(1, Armed, Some(0), ALL);
        assert_eq!(away.step(), Step::Stay);
        assert_eq!(Lanes { home_is_steady: true, ..away }.step(), Step::Migrate);
        assert_eq!(lanes(1, Migrated, None, ALL).step(), Step::Load(0));
        assert_eq!(lanes(1, Migrated, None, 0b010).step(), Step::Stay, "home is dead");
        let at_home = Lanes { home_is_steady: true, ..lanes(0, Armed, Some(1), ALL) };
        assert_eq!(at_home.step(), Step::Stay);
    }

    #[test]
    fn a_loaded_lane_that_died_is_replaced_by_another() {
        let three = |alive| Lanes { count: 3, ..lanes(0, Armed, Some(1), alive) };
        assert_eq!(three(0b101).step(), Step::Load(2));
        assert_eq!(three(0b001).step(), Step::Stay, "there is none");
        assert_eq!(Lanes { migration: Rearm, ..three(0b101) }.step(), Step::Load(2));
    }
}
