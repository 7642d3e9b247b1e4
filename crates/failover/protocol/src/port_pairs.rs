//! When a QP stays on its path and goes over other ports of the same NICs: automatic path
//! migration, inside the NICs, with nothing lost and nothing to be replayed. It comes before a
//! switch to other NICs.
//!
//! A port pair is a number ([`PortPath`]); the device knows it as a path of a port to a port. A QP
//! is on one port pair, and may have another one *loaded*. When both ends have, they are ARMED, and
//! either may go there: the devices by themselves, when a port loses its link or the retries are
//! used up, or an end by request, here, when it has found out that the port pair in use is dead.
//!
//! | state of migration | what is known | step |
//! |--------------------|---------------|------|
//! | MIGRATED | another port pair may carry | [`Step::Load`] the best |
//! | REARM | a better port pair than the loaded one may carry | [`Step::Load`] that |
//! | ARMED | the loaded port pair is dead, and another may carry | [`Step::Load`] that |
//! | ARMED | the loaded port pair is home, and steady | [`Step::Migrate`] |
//! | ARMED | the port pair in use is dead, and the loaded one may carry | migrates ([`PortPairs::may_leave`]) |
//!
//! The best port pair is home, the one that the program connected, else the lowest number. Both
//! ends choose by that alone; where they know different things they may load different port pairs,
//! and are not ARMED until they know the same. Then a switch to other NICs does what a migration
//! cannot.
//!
//! [`PortPath`]: crate::PortPath

use unbroken_types::PathMigState;

/// What is known of the port pairs of a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortPairs {
    /// The port pair in use.
    pub now: u8,
    /// The one that the program connected.
    pub home: u8,
    /// How many the path has.
    pub count: u8,
    /// The device's state of migration.
    pub migration: PathMigState,
    /// The port pair that is loaded.
    pub loaded: Option<u8>,
    /// A bit for each port pair that is not known to be dead: its port here is up, and the peer
    /// answers over it.
    pub alive: u8,
    /// The port pair home works, and has for long enough.
    pub home_is_steady: bool,
}

/// What is to be done while the port pair in use works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Nothing.
    Stay,
    /// This port pair is to be given to the device, and the QP to be ARMED.
    Load(u8),
    /// The QP is to go to the loaded port pair.
    Migrate,
}

impl PortPairs {
    /// What is to be done.
    pub fn step(&self) -> Step {
        let loaded = self.loaded.filter(|port_pair| self.may_carry(*port_pair));
        match (self.migration, self.best()) {
            (_, None) => Step::Stay,
            (PathMigState::Armed, Some(best)) => match loaded {
                Some(port_pair) if port_pair == self.home && self.home_is_steady => Step::Migrate,
                Some(_) => Step::Stay,
                None => Step::Load(best),
            },
            (PathMigState::Rearm, Some(best)) if loaded == Some(best) => Step::Stay,
            (_, Some(best)) => Step::Load(best),
        }
    }

    /// Whether the QP can leave the port pair in use, which is dead, by migration.
    pub fn may_leave(&self) -> bool {
        self.migration == PathMigState::Armed
            && self.loaded.is_some_and(|port_pair| self.may_carry(port_pair))
    }

    /// The port pair to load.
    fn best(&self) -> Option<u8> {
        let others = std::iter::once(self.home).chain(0..self.count);
        others
            .filter(|port_pair| *port_pair != self.now && *port_pair < self.count)
            .find(|port_pair| self.may_carry(*port_pair))
    }

    /// Whether a port pair is not known to be dead.
    pub fn may_carry(&self, port_pair: u8) -> bool {
        self.alive.checked_shr(port_pair.into()).is_some_and(|bits| bits & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PathMigState::{Armed, Migrated, Rearm};

    fn port_pairs(now: u8, migration: PathMigState, loaded: Option<u8>, alive: u8) -> PortPairs {
        PortPairs { now, home: 0, count: 2, migration, loaded, alive, home_is_steady: false }
    }

    const ALL: u8 = !0;

    #[test]
    fn another_port_pair_is_loaded_once_and_only_if_it_may_carry() {
        assert_eq!(port_pairs(0, Migrated, None, ALL).step(), Step::Load(1));
        assert_eq!(port_pairs(0, Rearm, Some(1), ALL).step(), Step::Stay);
        assert_eq!(port_pairs(0, Armed, Some(1), ALL).step(), Step::Stay);
        assert_eq!(port_pairs(0, Migrated, None, 0b001).step(), Step::Stay);
        assert_eq!(
            PortPairs { count: 1, ..port_pairs(0, Migrated, None, ALL) }.step(),
            Step::Stay,
            "one port_pair only"
        );
    }

    #[test]
    fn a_dead_port_pair_is_left_for_a_loaded_one_that_may_carry() {
        assert!(port_pairs(0, Armed, Some(1), 0b010).may_leave());
        assert!(!port_pairs(0, Rearm, Some(1), ALL).may_leave(), "the peer is not ready");
        assert!(!port_pairs(0, Armed, Some(1), 0b001).may_leave(), "the loaded one is dead, too");
        assert!(!port_pairs(0, Migrated, None, ALL).may_leave());
    }

    #[test]
    fn it_goes_home_when_home_is_loaded_and_steady() {
        let away = port_pairs(1, Armed, Some(0), ALL);
        assert_eq!(away.step(), Step::Stay);
        assert_eq!(PortPairs { home_is_steady: true, ..away }.step(), Step::Migrate);
        assert_eq!(port_pairs(1, Migrated, None, ALL).step(), Step::Load(0));
        assert_eq!(port_pairs(1, Migrated, None, 0b010).step(), Step::Stay, "home is dead");
        let at_home = PortPairs { home_is_steady: true, ..port_pairs(0, Armed, Some(1), ALL) };
        assert_eq!(at_home.step(), Step::Stay);
    }

    #[test]
    fn a_loaded_port_pair_that_died_is_replaced_by_another() {
        let three = |alive| PortPairs { count: 3, ..port_pairs(0, Armed, Some(1), alive) };
        assert_eq!(three(0b101).step(), Step::Load(2));
        assert_eq!(three(0b001).step(), Step::Stay, "there is none");
        assert_eq!(PortPairs { migration: Rearm, ..three(0b101) }.step(), Step::Load(2));
    }
}
