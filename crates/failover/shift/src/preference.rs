//! Which NICs the program's queue pairs go to first, as far as this end has a wish: an explicit
//! map, and how far NICs are from each other.
//!
//! **Map** (`UNBROKEN_MAP`): `0:1,2 1:3-2` says that QPs of NIC 0 go to NIC 1, else to NIC 2, each
//! rail to rail, and those of NIC 1 over our NIC 3 to the peer's NIC 2; home always last, and
//! nowhere else by choice. QPs of NICs that are not named go where they like. A peer that goes
//! elsewhere is followed, so a map is best the same at both ends.
//!
//! **Distance.** The program has put its memory near the NIC that it chose, so what is near that
//! one is near the memory. For NICs of the machine it is how far apart the PCI devices are, in
//! bridges between them, and more than any of that where they are of different NUMA nodes. Devices
//! without a place (veth; the emulated network) are all equally near.
//!
//! **Backups** (`UNBROKEN_BACKUPS`): so many of the best have a NIC's regions and QPs made ready
//! beforehand. QPs go to others only if none of those works, where all that takes its time first.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use unbroken_failover_protocol::{Policy, SlotPath};
use unbroken_verbs::{Error, Result};

/// Of different NUMA nodes: farther than any bridge.
const OTHER_NODE: u16 = 1_000;
/// Nothing is made ready there beforehand: farther than anything else.
const UNPREPARED: u16 = 10_000;

/// Where a NIC is in the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// Its folder below `/sys/devices`.
    device: PathBuf,
    /// −1 where the machine does not say.
    numa_node: i32,
}

impl Place {
    /// Of a network interface; `sys` is where sysfs is. None: it is no device.
    pub fn of(sys: &Path, interface: &str) -> Option<Place> {
        Place::of_device(&sys.join("class/net").join(interface).join("device"))
    }

    /// Of a device, by a path that leads to its folder. None: there is no such path.
    pub fn of_device(path: &Path) -> Option<Place> {
        let device = std::fs::canonicalize(path).ok()?;
        let text = std::fs::read_to_string(device.join("numa_node")).unwrap_or_default();
        Some(Place { device, numa_node: text.trim().parse().unwrap_or(-1) })
    }

    /// Its NUMA node. None: the machine does not say, or the number is past 255.
    pub fn numa_node(&self) -> Option<u8> {
        u8::try_from(self.numa_node).ok()
    }

    /// How far another one is: folders between the two below `/sys/devices`, and a thousand more
    /// where they are of different NUMA nodes.
    pub fn distance(&self, other: &Place) -> u16 {
        let (a, b) = (self.device.components(), other.device.components());
        let common = a.clone().zip(b.clone()).take_while(|(a, b)| a == b).count();
        let apart = (a.count() + b.count()).saturating_sub(2 * common);
        let bridges = u16::try_from(apart).unwrap_or(OTHER_NODE).min(OTHER_NODE);
        bridges + if self.numa_node == other.numa_node { 0 } else { OTHER_NODE }
    }
}

/// The wishes of a process.
#[derive(Debug, Default)]
pub(crate) struct Preference {
    /// NIC of the QP's home → where it may go.
    map: Vec<(u8, Vec<SlotPath>)>,
    places: Vec<Option<Place>>,
    /// How many of the others are made ready for each NIC.
    backups: usize,
}

impl Preference {
    /// What this map says, for NICs at these places, so many of which are made ready for each.
    pub(crate) fn new(map: &str, places: Vec<Option<Place>>, backups: usize) -> Result<Preference> {
        Ok(Preference { map: parse(map, places.len())?, places, backups })
    }

    /// The NUMA node of a NIC, as far as it is known.
    pub(crate) fn numa_node(&self, nic: usize) -> Option<u8> {
        self.places.get(nic)?.as_ref()?.numa_node()
    }

    /// How far each NIC is from that one.
    fn distances(&self, home: usize) -> Vec<u16> {
        let of = |nic: usize| self.places.get(nic).and_then(Option::as_ref);
        let far = |to| of(home).zip(of(to)).map_or(0, |(from, to)| from.distance(to));
        (0..self.places.len()).map(far).collect()
    }

    /// The NICs that are made ready for the QPs and regions of that one, the best first.
    pub(crate) fn prepared(&self, home: usize) -> Vec<usize> {
        let (count, distances) = (self.places.len(), self.distances(home));
        let mut nics = match self.nics(home) {
            mapped if mapped.is_empty() => {
                let mut ring: Vec<usize> = (1..count).map(|k| (home + k) % count).collect();
                ring.sort_by_key(|nic| distances[*nic]);
                ring
            }
            mapped => mapped.into_iter().filter(|nic| *nic != home).collect(),
        };
        nics.truncate(self.backups);
        nics
    }

    /// Where a UD QP of that NIC may go, the best first; none: anywhere.
    pub(crate) fn nics(&self, home: usize) -> Vec<usize> {
        let of = self.map.iter().find(|(nic, _)| usize::from(*nic) == home);
        let mut nics: Vec<usize> =
            of.map_or_else(Vec::new, |(_, to)| to.iter().map(|path| path.local.into()).collect());
        if !nics.is_empty() && !nics.contains(&home) {
            nics.push(home);
        }
        nics
    }

    /// For a QP with that home; None: the usual one.
    pub(crate) fn policy(&self, home: SlotPath) -> Option<Arc<Policy>> {
        let mut map = self
            .map
            .iter()
            .find(|(nic, _)| *nic == home.local)
            .map_or_else(Vec::new, |(_, to)| to.clone());
        if !map.is_empty() && !map.contains(&home) {
            map.push(home);
        }
        let own = usize::from(home.local);
        let prepared = self.prepared(own);
        let mut distance = self.distances(own);
        if self.backups > 0 {
            let others = |nic: &usize| *nic != own && !prepared.contains(nic);
            (0..distance.len()).filter(others).for_each(|nic| distance[nic] += UNPREPARED);
        }
        let usual = map.is_empty() && distance.iter().all(|d| *d == 0);
        (!usual).then(|| Arc::new(Policy { map, distance, ..Policy::default() }))
    }
}

fn parse(text: &str, nics: usize) -> Result<Vec<(u8, Vec<SlotPath>)>> {
    let wrong = |word: &str, why: &str| {
        Error::invalid(format!(
            "UNBROKEN_MAP: '{word}' {why}; right is '0:1,2 1:3-2': queue pairs of NIC 0 \
             go to NIC 1, else 2; those of NIC 1 over NIC 3 to the peer's NIC 2"
        ))
    };
    let number = |word: &str| {
        word.trim().parse::<u8>().map_err(|_| wrong(word, "is not the number of a NIC"))
    };
    let own = |word: &str| {
        let nic = number(word)?;
        (usize::from(nic) < nics).then_some(nic).ok_or_else(|| {
            wrong(word, &format!("is none of the {nics} NICs here, which begin at 0"))
        })
    };
    let mut map: Vec<(u8, Vec<SlotPath>)> = Vec::new();
    for entry in text.split_whitespace() {
        let (nic, to) = entry.split_once(':').ok_or_else(|| wrong(entry, "has no ':'"))?;
        let nic = own(nic)?;
        if map.iter().any(|(other, _)| *other == nic) {
            return Err(wrong(entry, "names a NIC for the second time"));
        }
        let path = |word: &str| {
            let (local, remote) = word.split_once('-').unwrap_or((word, word));
            Ok(SlotPath { local: own(local)?, remote: number(remote)? })
        };
        map.push((nic, to.split(',').map(path).collect::<Result<_>>()?));
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rail(nic: u8) -> SlotPath {
        SlotPath { local: nic, remote: nic }
    }

    #[test]
    fn a_map_is_read_and_ends_at_home() {
        let map = parse("0:1,2  1:3-2", 4).unwrap();
        let preference = Preference { map, places: Vec::new(), backups: 9 };
        let of = |home| preference.policy(home).map(|policy| policy.map.clone());
        assert_eq!(of(rail(0)), Some(vec![rail(1), rail(2), rail(0)]));
        assert_eq!(of(rail(1)), Some(vec![SlotPath { local: 3, remote: 2 }, rail(1)]));
        assert_eq!(of(rail(2)), None, "where it likes");
        assert_eq!([0, 1, 2].map(|nic| preference.nics(nic)), [vec![1, 2, 0], vec![3, 1], vec![]]);
        assert!(parse("", 4).unwrap().is_empty());
    }

    #[test]
    fn what_is_wrong_in_a_map_is_named() {
        let said = |text| parse(text, 2).unwrap_err().to_string();
        for (text, words) in [
            ("01", "'01' has no ':'"),
            ("0:x", "'x' is not the number of a NIC"),
            ("0:", "'' is not the number of a NIC"),
            ("2:0", "'2' is none of the 2 NICs here"),
            ("0:1,7-0", "'7' is none of the 2 NICs here"),
            ("0:1 0:1", "'0:1' names a NIC for the second time"),
        ] {
            assert!(said(text).contains(words), "{text}: {}", said(text));
        }
    }

    /// Two NICs behind one bridge, one behind another of the same node, one of the other node, one
    /// that is no device.
    #[test]
    fn near_is_what_has_few_bridges_between_on_the_same_node() {
        let sys = tempfile::tempdir().unwrap();
        let add = |interface: &str, device: &str, node: i32| {
            let folder = sys.path().join("devices").join(device);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("numa_node"), format!("{node}\n")).unwrap();
            let net = sys.path().join("class/net").join(interface);
            std::fs::create_dir_all(&net).unwrap();
            std::os::unix::fs::symlink(folder, net.join("device")).unwrap();
        };
        add("eth0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
        add("eth1", "pci0000:00/0000:00:01.0/0000:01:00.1", 0);
        add("eth2", "pci0000:00/0000:00:02.0/0000:02:00.0", 0);
        add("eth3", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
        let places: Vec<_> = (0..5).map(|i| Place::of(sys.path(), &format!("eth{i}"))).collect();
        assert_eq!(
            places.iter().map(Option::is_some).collect::<Vec<_>>(),
            [true, true, true, true, false]
        );
        let preference = Preference { map: Vec::new(), places, backups: 9 };
        let distance = |nic| preference.policy(rail(nic)).map(|policy| policy.distance.clone());
        assert_eq!(distance(0), Some(vec![0, 2, 4, 1_006, 0]));
        assert_eq!(distance(3), Some(vec![1_006, 1_006, 1_006, 0, 0]));
        assert_eq!(distance(4), None);
        assert_eq!(
            [0, 3].map(|nic| preference.prepared(nic)),
            [vec![4, 1, 2, 3], vec![4, 0, 1, 2]]
        );
    }

    #[test]
    fn queue_pairs_go_to_what_is_made_ready() {
        let of = |map, backups| Preference::new(map, vec![None; 4], backups).unwrap();
        let ready = |p: &Preference| [0, 3].map(|nic| p.prepared(nic));
        let distance = |p: &Preference| p.policy(rail(3)).map(|policy| policy.distance.clone());
        let all = of("", usize::MAX);
        assert_eq!((ready(&all), distance(&all)), ([vec![1, 2, 3], vec![0, 1, 2]], None));
        let one = of("", 1);
        let far = UNPREPARED;
        assert_eq!((ready(&one), distance(&one)), ([vec![1], vec![0]], Some(vec![0, far, far, 0])));
        let none = of("", 0);
        assert_eq!((ready(&none), distance(&none)), ([vec![], vec![]], None));
        assert_eq!(ready(&of("3:2,0", 1)), [vec![1], vec![2]]);
    }
}
