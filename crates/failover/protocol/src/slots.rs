//! Epochs and slots: which path an epoch uses.
//!
//! Epoch *e* uses slot *e mod 64*, always, so the number alone says which path is meant, whatever
//! each end has of it. A slot is a pair of NICs, one of each end, by their index. Both ends compute
//! the table with [`SlotTable::new`] from the same four numbers, seen from the end with the lower
//! (GID, QPN), so nobody has to send it. A slot whose NIC an end has not (yet) counts as a dead
//! path there.

/// Slots of a table.
pub const SLOTS: usize = 64;

/// Slots that are given to the preferred paths (default and rail to rail) before the others get
/// theirs.
const PREFERRED_SLOTS: usize = 48;

/// The slot of an epoch.
pub const fn slot_of(epoch: u64) -> u8 {
    (epoch % SLOTS as u64) as u8
}

/// A path as one end sees it: indices of its own and the peer's NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct SlotPath {
    /// Index of our NIC.
    pub local: u8,
    /// Index of the peer's NIC.
    pub remote: u8,
}

impl SlotPath {
    /// This path as the other end sees it.
    pub const fn mirrored(self) -> SlotPath {
        SlotPath { local: self.remote, remote: self.local }
    }
}

/// A path and the ports that it goes through. Port pair 0 is from the first port of one to the
/// first port of the other, port pair 1 from the second to the second, and so on: what one switch
/// joins. A QP goes to another port pair of its path by automatic path migration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct PortPath {
    /// The NICs.
    pub path: SlotPath,
    /// The ports, from 0.
    pub port_pair: u8,
}

impl From<SlotPath> for PortPath {
    fn from(path: SlotPath) -> PortPath {
        PortPath { path, port_pair: 0 }
    }
}

/// What an end believes of a slot's path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub enum Liveness {
    /// Our NIC is dead, its port is down, or we do not have it (yet). We neither choose the slot
    /// nor follow the peer there.
    #[default]
    NoNic,
    /// Our NIC works, but nothing answers over the path. We do not choose the slot, but follow the
    /// peer there.
    Silent,
    /// The path works, as far as we know.
    Alive,
}

/// The paths of the 64 slots. A filled slot never changes.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct SlotTable {
    paths: [Option<SlotPath>; SLOTS],
}

impl SlotTable {
    /// A table with slot 0 only.
    pub fn with_default(path: SlotPath) -> SlotTable {
        let mut paths = [None; SLOTS];
        paths[0] = Some(path);
        SlotTable { paths }
    }

    /// The table of a logical QP whose default path is `default`, between an end with `local_nics`
    /// NICs and one with `remote_nics`. `lower` says whether the calling end has the lower (GID,
    /// QPN); both ends get the same table, each from its own side.
    ///
    /// Order: the default path; rail to rail (equal indices) on other NICs; both again and again up
    /// to slot 48; then pairs across rails, those first that share no NIC with the default path.
    /// Indices beyond the NIC counts are never used.
    pub fn new(default: SlotPath, local_nics: u8, remote_nics: u8, lower: bool) -> SlotTable {
        let table = if lower {
            Self::from_lower(default, local_nics, remote_nics)
        } else {
            let mut t = Self::from_lower(default.mirrored(), remote_nics, local_nics);
            t.paths.iter_mut().flatten().for_each(|p| *p = p.mirrored());
            t
        };
        debug_assert_eq!(table.paths[0], Some(default));
        table
    }

    /// The table of a QP that is connected to itself, on a host with so many NICs: both its ends
    /// are one, and always on the same NIC.
    pub fn to_itself(default: u8, nics: u8) -> SlotTable {
        let mut paths = [None; SLOTS];
        for (slot, path) in paths.iter_mut().enumerate() {
            let nic = ((usize::from(default) + slot) % usize::from(nics.max(default + 1))) as u8;
            *path = Some(SlotPath { local: nic, remote: nic });
        }
        SlotTable { paths }
    }

    fn from_lower(default: SlotPath, locals: u8, remotes: u8) -> SlotTable {
        let mut preferred = vec![default];
        let mut crossing = Vec::new();
        // Start behind the default NIC, so that NICs take over for each other in a ring and not all
        // for NIC 0.
        let ring = |first: u8, count: u8| {
            (1..=u16::from(count)).map(move |k| ((u16::from(first) + k) % u16::from(count)) as u8)
        };
        for local in ring(default.local, locals) {
            for remote in ring(default.remote, remotes) {
                let path = SlotPath { local, remote };
                let disjoint = local != default.local && remote != default.remote;
                if path == default {
                } else if local == remote && disjoint {
                    preferred.push(path);
                } else {
                    crossing.push((!disjoint, path));
                }
            }
        }
        crossing.sort_by_key(|&(shares_a_nic, _)| shares_a_nic); // stable: the ring order stays
        let crossing: Vec<SlotPath> = crossing.into_iter().map(|(_, p)| p).collect();
        let mut paths = [None; SLOTS];
        let rounds = if crossing.is_empty() {
            SLOTS
        } else if preferred.len() > 1 {
            PREFERRED_SLOTS / preferred.len().min(PREFERRED_SLOTS)
                * preferred.len().min(PREFERRED_SLOTS)
        } else {
            0
        };
        let all: Vec<SlotPath> = if rounds == 0 {
            preferred.iter().chain(&crossing).copied().collect()
        } else {
            crossing
        };
        for (i, slot) in paths.iter_mut().enumerate() {
            *slot = Some(if i < rounds {
                preferred[i % preferred.len()]
            } else {
                all[(i - rounds) % all.len()]
            });
        }
        SlotTable { paths }
    }

    /// The path of a slot, if it is filled.
    pub fn get(&self, slot: u8) -> Option<SlotPath> {
        self.paths[usize::from(slot) % SLOTS]
    }

    /// Fills an empty slot. False, and nothing changes, where the slot holds another path already.
    pub fn fill(&mut self, slot: u8, path: SlotPath) -> bool {
        let s = &mut self.paths[usize::from(slot) % SLOTS];
        match *s {
            None => {
                *s = Some(path);
                true
            }
            Some(p) => p == path,
        }
    }

    /// The filled slots, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u8, SlotPath)> + '_ {
        self.paths.iter().enumerate().filter_map(|(i, p)| p.map(|p| (i as u8, p)))
    }

    /// A bit for each filled slot whose path no lower slot has: one slot for each distinct path.
    pub(crate) fn distinct(&self) -> u64 {
        let mut seen: Vec<SlotPath> = Vec::with_capacity(SLOTS);
        let mut bits = 0;
        for (slot, path) in self.iter() {
            if !seen.contains(&path) {
                seen.push(path);
                bits |= 1 << slot;
            }
        }
        bits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(local: u8, remote: u8) -> SlotPath {
        SlotPath { local, remote }
    }

    #[test]
    fn two_rails_alternate_and_cross_last() {
        let t = SlotTable::new(path(0, 0), 2, 2, true);
        for s in 0..48 {
            assert_eq!(t.get(s), Some(path(s % 2, s % 2)));
        }
        assert_eq!((t.get(48), t.get(49)), (Some(path(1, 0)), Some(path(0, 1))));
        assert_eq!(t.iter().count(), SLOTS);
        assert_eq!(t.distinct().count_ones(), 4);
    }

    #[test]
    fn both_ends_agree() {
        for (l, r) in [
            (1u8, 1u8),
            (1, 2),
            (2, 1),
            (2, 2),
            (4, 4),
            (3, 5),
            (8, 8),
            (64, 64),
            (255, 1),
            (1, 255),
        ] {
            for (dl, dr) in [(0, 0), (l - 1, r - 1), (l / 2, 0), (0, r / 2)] {
                for lower in [true, false] {
                    let ours = SlotTable::new(path(dl, dr), l, r, lower);
                    let theirs = SlotTable::new(path(dr, dl), r, l, !lower);
                    for s in 0..SLOTS as u8 {
                        assert_eq!(ours.get(s), theirs.get(s).map(SlotPath::mirrored));
                        let p = ours.get(s).unwrap();
                        assert!(p.local < l && p.remote < r);
                    }
                    assert_eq!(ours.get(0), Some(path(dl, dr)));
                    let pairs = usize::from(l) * usize::from(r);
                    assert!(
                        ours.distinct().count_ones() as usize >= pairs.min(16).min(SLOTS),
                        "{l} {r} {dl} {dr}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_lone_nic_crosses_rails() {
        let t = SlotTable::new(path(0, 1), 1, 3, true);
        let first: Vec<_> = (0..4).map(|s| t.get(s).unwrap()).collect();
        assert_eq!(first, [path(0, 1), path(0, 2), path(0, 0), path(0, 1)]);
    }

    #[test]
    fn a_filled_slot_never_changes() {
        let mut t = SlotTable::with_default(path(0, 0));
        assert!(t.fill(1, path(1, 1)) && t.fill(1, path(1, 1)) && !t.fill(1, path(1, 0)));
        assert_eq!(t.get(1), Some(path(1, 1)));
    }

    #[test]
    fn a_qp_connected_to_itself_stays_on_pairs_of_one_nic() {
        let t = SlotTable::to_itself(2, 4);
        let first: Vec<_> = (0..5).map(|s| t.get(s).unwrap()).collect();
        assert_eq!(first, [path(2, 2), path(3, 3), path(0, 0), path(1, 1), path(2, 2)]);
        assert_eq!((t.distinct().count_ones(), t.iter().count()), (4, SLOTS));
    }
}
