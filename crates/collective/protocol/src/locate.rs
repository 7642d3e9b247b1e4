//! Locates a failure: three points examine a path, and their observations decide.
//!
//! A path connects NICs of two hosts on the same rail. When it fails, each end checks its own NIC
//! and probes the other, and a third host's NIC on the rail probes both. Probes are zero-byte
//! WRITEs over separate queue pairs.
//!
//! | near NIC | far NIC | aux to near | aux to far | verdict |
//! | --- | --- | --- | --- | --- |
//! | dead or port down | | | | that NIC |
//! | | dead or port down | | | that NIC |
//! | well | well | silent | answers | the near NIC's cable |
//! | well | well | answers | silent | the far NIC's cable |
//! | well | well | silent | silent | the switch between (or, if the third host reaches nobody else either, its own cable: not told apart) |
//! | well | well | answers | answers | nothing, if the ends reach each other again: only the queue pair had failed; else between the two |
//!
//! Without a third host, a cable and the switch cannot be distinguished: the verdict is *between*.

use crate::codec::{Reader, Writer};
use crate::Rank;

/// The result of a probe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// There was no probe, or the prober was not able to send it.
    #[default]
    Unknown,
    /// It was answered.
    Answers,
    /// There was no answer in time.
    Silent,
    /// The prober's own NIC failed the probe immediately.
    OwnNic,
    /// The probed NIC reported that it is dead or that its port is down.
    ItsNic,
}

impl Outcome {
    pub(crate) fn decode(n: u8) -> Option<Outcome> {
        [Outcome::Unknown, Outcome::Answers, Outcome::Silent, Outcome::OwnNic, Outcome::ItsNic]
            .get(usize::from(n))
            .copied()
    }
}

/// A NIC: a host and a rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The host.
    pub host: u32,
    /// The rail.
    pub rail: u8,
}

impl Place {
    /// This NIC with other host numbers: `hosts[k]` is the new number of host *k*.
    #[must_use]
    pub fn renumbered(self, hosts: &[u32]) -> Place {
        Place { host: hosts.get(self.host as usize).copied().unwrap_or(self.host), ..self }
    }

    pub(crate) fn encode(&self, w: &mut Writer) {
        w.u32(self.host).u8(self.rail);
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Option<Place> {
        Some(Place { host: r.u32()?, rail: r.u8()? })
    }
}

/// The observations of the three points.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The process at the far end has ended.
    pub gone: bool,
    /// The near NIC itself: [`Outcome::OwnNic`] if it is dead or its port is down.
    pub near: Outcome,
    /// The far NIC itself.
    pub far: Outcome,
    /// The probes of the two ends, after the failure.
    pub direct: Outcome,
    /// The third host's probe of the near NIC.
    pub aux_near: Outcome,
    /// The third host's probe of the far NIC.
    pub aux_far: Outcome,
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process of the rank has ended.
    Process(Rank),
    /// A NIC, or its port.
    Nic(Place),
    /// The cable of a NIC, or the switch's port.
    Cable(Place),
    /// The switch of a rail.
    Switch(u8),
    /// A component between two NICs: no third host on the rail can determine which one.
    Between(Place, Place),
    /// No fault remains: only the queue pair had failed.
    QueuePair(Place, Place),
}

/// A fault, and the rank that found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The rank that found it.
    pub by: Rank,
    /// The fault.
    pub fault: Fault,
}

/// Determines the fault.
pub fn locate(evidence: &Evidence, near: Place, far: Place, peer: Rank) -> Fault {
    use Outcome::{Answers, ItsNic, OwnNic, Silent};
    let e = evidence;
    let bad = |outcome: Outcome| matches!(outcome, OwnNic | ItsNic);
    if e.gone {
        return Fault::Process(peer);
    }
    if bad(e.near) {
        return Fault::Nic(near);
    }
    if bad(e.far) {
        return Fault::Nic(far);
    }
    // What the third host heard from an end itself is as good as what that end says.
    match (e.aux_near, e.aux_far) {
        (ItsNic, _) => Fault::Nic(near),
        (_, ItsNic) => Fault::Nic(far),
        _ if e.direct == Answers => Fault::QueuePair(near, far),
        (Silent, Answers) => Fault::Cable(near),
        (Answers, Silent) => Fault::Cable(far),
        (Silent, Silent) => Fault::Switch(near.rail),
        _ => Fault::Between(near, far),
    }
}

impl Verdict {
    /// This verdict with other numbers: `ranks[k]` is the new number of rank *k*, `hosts[k]` that
    /// of host *k*.
    #[must_use]
    pub fn renumbered(self, ranks: &[Rank], hosts: &[u32]) -> Verdict {
        let n = |rank: Rank| ranks.get(rank).copied().unwrap_or(rank);
        let at = |place: Place| place.renumbered(hosts);
        let fault = match self.fault {
            Fault::Process(rank) => Fault::Process(n(rank)),
            Fault::Nic(place) => Fault::Nic(at(place)),
            Fault::Cable(place) => Fault::Cable(at(place)),
            Fault::Switch(rail) => Fault::Switch(rail),
            Fault::Between(a, b) => Fault::Between(at(a), at(b)),
            Fault::QueuePair(a, b) => Fault::QueuePair(at(a), at(b)),
        };
        Verdict { by: n(self.by), fault }
    }
}

impl Fault {
    /// The NICs that operations should avoid, among this many hosts.
    pub fn places(&self, hosts: u32) -> Vec<Place> {
        match *self {
            Fault::Nic(place) | Fault::Cable(place) => vec![place],
            Fault::Switch(rail) => (0..hosts).map(|host| Place { host, rail }).collect(),
            // The one whose host comes later goes: either would do.
            Fault::Between(a, b) => vec![a.max(b)],
            Fault::Process(_) | Fault::QueuePair(..) => Vec::new(),
        }
    }

    fn encode(&self, w: &mut Writer) {
        match self {
            Fault::Process(rank) => {
                w.u8(0).rank(*rank);
            }
            Fault::Nic(place) => place.encode(w.u8(1)),
            Fault::Cable(place) => place.encode(w.u8(2)),
            Fault::Switch(rail) => {
                w.u8(3).u8(*rail);
            }
            Fault::Between(a, b) => {
                a.encode(w.u8(4));
                b.encode(w);
            }
            Fault::QueuePair(a, b) => {
                a.encode(w.u8(5));
                b.encode(w);
            }
        }
    }

    fn decode(r: &mut Reader<'_>) -> Option<Fault> {
        Some(match r.u8()? {
            0 => Fault::Process(r.rank()?),
            1 => Fault::Nic(Place::decode(r)?),
            2 => Fault::Cable(Place::decode(r)?),
            3 => Fault::Switch(r.u8()?),
            4 => Fault::Between(Place::decode(r)?, Place::decode(r)?),
            5 => Fault::QueuePair(Place::decode(r)?, Place::decode(r)?),
            _ => return None,
        })
    }
}

impl Verdict {
    pub(crate) fn encode(&self, w: &mut Writer) {
        self.fault.encode(w.rank(self.by));
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Option<Verdict> {
        Some(Verdict { by: r.rank()?, fault: Fault::decode(r)? })
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "host {} NIC {}", self.host, self.rail)
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Process(rank) => write!(f, "the process of rank {rank} is gone"),
            Fault::Nic(place) => write!(f, "{place} is dead or its port is down"),
            Fault::Cable(place) => write!(f, "the cable of {place} is cut"),
            Fault::Switch(rail) => write!(f, "the switch of rail {rail} is down"),
            Fault::Between(a, b) => write!(f, "something between {a} and {b}"),
            Fault::QueuePair(a, b) => {
                write!(f, "a queue pair between {a} and {b} failed, and nothing else")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Outcome::{Answers, ItsNic, OwnNic, Silent, Unknown};

    const NEAR: Place = Place { host: 0, rail: 1 };
    const FAR: Place = Place { host: 1, rail: 1 };

    fn verdict(
        near: Outcome,
        far: Outcome,
        direct: Outcome,
        aux_near: Outcome,
        aux_far: Outcome,
    ) -> Fault {
        locate(&Evidence { gone: false, near, far, direct, aux_near, aux_far }, NEAR, FAR, 1)
    }

    #[test]
    fn the_table_is_what_it_says() {
        for (seen, fault) in [
            ((OwnNic, Answers, Silent, ItsNic, Answers), Fault::Nic(NEAR)),
            ((Unknown, OwnNic, Silent, Answers, Silent), Fault::Nic(FAR)),
            ((Unknown, Unknown, Silent, Answers, ItsNic), Fault::Nic(FAR)),
            ((Answers, Answers, Silent, Silent, Answers), Fault::Cable(NEAR)),
            ((Answers, Answers, Silent, Answers, Silent), Fault::Cable(FAR)),
            ((Answers, Answers, Silent, Silent, Silent), Fault::Switch(1)),
            ((Answers, Answers, Answers, Answers, Answers), Fault::QueuePair(NEAR, FAR)),
            ((Answers, Answers, Silent, Answers, Answers), Fault::Between(NEAR, FAR)),
            ((Answers, Answers, Silent, Unknown, Unknown), Fault::Between(NEAR, FAR)),
        ] {
            let (near, far, direct, aux_near, aux_far) = seen;
            assert_eq!(verdict(near, far, direct, aux_near, aux_far), fault, "{seen:?}");
        }
        let gone = Evidence { gone: true, ..Evidence::default() };
        assert_eq!(locate(&gone, NEAR, FAR, 3), Fault::Process(3));
    }

    #[test]
    fn a_switch_takes_its_rail_from_all_hosts() {
        assert_eq!(Fault::Switch(2).places(3).len(), 3);
        assert_eq!(Fault::Between(NEAR, FAR).places(3), [FAR]);
        assert!(Fault::QueuePair(NEAR, FAR).places(3).is_empty());
    }
}
