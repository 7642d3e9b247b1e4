//! Rules that are left out of what is simulated, to show that the checks notice.

use unbroken_failover_protocol::health::HealthConfig;
use unbroken_failover_protocol::Mutation;

/// A rule that the simulated product leaves out, to show that the checks notice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutant {
    /// Nothing is left out.
    None,
    /// The old physical QP goes on after its life.
    NoQuiesce,
    /// What the peer has executed is ignored.
    NoCounts,
    /// Sending starts without the peer's Hello.
    Early,
    /// A higher epoch is not followed.
    NoFollow,
    /// Every life has the same QPN and begins at the same PSN.
    SameQpn,
    /// A receive that a life took from a shared queue and did not use is not given back.
    LostReceive,
    /// What came before its turn is executed twice.
    EarlyTwice,
    /// The data of a WRITE that came before its turn is placed at once.
    PlaceEarly,
    /// What must not run twice is sent again like everything else.
    NoCheck,
    /// A path that does not answer is given up although no other answers either.
    NoWitness,
    /// A planned switch does not wait for its own sends.
    NoFence,
    /// A planned switch does not wait for the peer's sends.
    FenceNotAwaited,
    /// A flush of a plain device that comes by itself reaches the application.
    FlushLetThrough,
    /// A peer that counts the receives that it has used is taken for one that counts all.
    CountKindIgnored,
    /// A plain device's error of the application's own is held like one of the network.
    OwnErrorHeld,
    /// What is before the first flush of a plain device counts as done.
    FlushTrusted,
    /// A plain device's flush that stands still is waited for.
    FlushAwaited,
    /// A QP that an error of the program has ended is moved like any other.
    EndedRevived,
    /// A QP goes home as soon as its first path answers.
    NoHysteresis,
    /// On plain devices, keys are not translated for other NICs than those they are of.
    KeysNotTranslated,
    /// A path that loses much is left although all others lose as much.
    GreyAlone,
}

impl Mutant {
    /// All that leave something out.
    pub const ALL: &[Mutant] = &[
        Mutant::NoQuiesce,
        Mutant::NoCounts,
        Mutant::Early,
        Mutant::NoFollow,
        Mutant::SameQpn,
        Mutant::LostReceive,
        Mutant::EarlyTwice,
        Mutant::PlaceEarly,
        Mutant::NoCheck,
        Mutant::NoWitness,
        Mutant::NoFence,
        Mutant::FenceNotAwaited,
        Mutant::FlushLetThrough,
        Mutant::CountKindIgnored,
        Mutant::OwnErrorHeld,
        Mutant::FlushTrusted,
        Mutant::FlushAwaited,
        Mutant::EndedRevived,
        Mutant::NoHysteresis,
        Mutant::KeysNotTranslated,
        Mutant::GreyAlone,
    ];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Mutant::None => "none",
            Mutant::NoQuiesce => "no-quiesce",
            Mutant::NoCounts => "no-counts",
            Mutant::Early => "early",
            Mutant::NoFollow => "no-follow",
            Mutant::SameQpn => "same-qpn",
            Mutant::LostReceive => "lost-receive",
            Mutant::EarlyTwice => "early-twice",
            Mutant::PlaceEarly => "place-early",
            Mutant::NoCheck => "no-check",
            Mutant::NoWitness => "no-witness",
            Mutant::NoFence => "no-fence",
            Mutant::FenceNotAwaited => "fence-not-awaited",
            Mutant::FlushLetThrough => "flush-let-through",
            Mutant::CountKindIgnored => "count-kind-ignored",
            Mutant::OwnErrorHeld => "own-error-held",
            Mutant::FlushTrusted => "flush-trusted",
            Mutant::FlushAwaited => "flush-awaited",
            Mutant::EndedRevived => "ended-revived",
            Mutant::NoHysteresis => "no-hysteresis",
            Mutant::KeysNotTranslated => "keys-not-translated",
            Mutant::GreyAlone => "grey-alone",
        }
    }

    /// The settings of a host's look at its paths.
    pub(crate) fn health(self) -> HealthConfig {
        let config = HealthConfig { mutation: self.in_path(), ..HealthConfig::default() };
        match self {
            Mutant::NoHysteresis => HealthConfig { steady_us: 0, ..config },
            _ => config,
        }
    }

    /// The mutant of a name.
    pub fn from_name(name: &str) -> Option<Mutant> {
        Self::ALL.iter().copied().chain([Mutant::None]).find(|m| m.name() == name)
    }
}

/// What each part of the product leaves out.
#[cfg(feature = "mutants")]
impl Mutant {
    pub(crate) const fn in_roce(self) -> unbroken_roce::Mutation {
        match self {
            Mutant::EarlyTwice => unbroken_roce::Mutation::ExecuteTwice,
            Mutant::PlaceEarly => unbroken_roce::Mutation::PlaceEarly,
            _ => unbroken_roce::Mutation::None,
        }
    }

    pub(crate) const fn in_path(self) -> Mutation {
        match self {
            Mutant::NoCounts => Mutation::NoCounts,
            Mutant::Early => Mutation::Early,
            Mutant::NoFollow => Mutation::NoFollow,
            Mutant::NoCheck => Mutation::NoCheck,
            Mutant::NoFence => Mutation::NoFence,
            Mutant::FenceNotAwaited => Mutation::FenceNotAwaited,
            Mutant::CountKindIgnored => Mutation::NoCountKind,
            Mutant::EndedRevived => Mutation::EndedRevived,
            Mutant::NoWitness => Mutation::NoWitness,
            Mutant::GreyAlone => Mutation::GreyAlone,
            _ => Mutation::None,
        }
    }

    pub(crate) const fn in_journal(self) -> unbroken_journal::Mutation {
        match self {
            Mutant::FlushLetThrough => unbroken_journal::Mutation::FlushLetThrough,
            Mutant::OwnErrorHeld => unbroken_journal::Mutation::OwnErrorHeld,
            Mutant::FlushTrusted => unbroken_journal::Mutation::FlushTrusted,
            Mutant::FlushAwaited => unbroken_journal::Mutation::FlushAwaited,
            _ => unbroken_journal::Mutation::None,
        }
    }
}

/// The product without the feature `mutants` leaves nothing out.
#[cfg(not(feature = "mutants"))]
impl Mutant {
    pub(crate) const fn in_roce(self) -> unbroken_roce::Mutation {
        unbroken_roce::Mutation::None
    }

    pub(crate) const fn in_path(self) -> Mutation {
        Mutation::None
    }

    pub(crate) const fn in_journal(self) -> unbroken_journal::Mutation {
        unbroken_journal::Mutation::None
    }
}
