//! Where UD QPs are that have moved: what the network knows of them, and what the programs know.
//!
//! A program addresses a datagram to the GID and QPN that its peer had at first, and shall see a
//! datagram come from there, wherever both are by now. So a device translates when a datagram
//! leaves ([`AliasMap::now`]) and when one arrives ([`AliasMap::name`]). The owner of the devices
//! keeps the table of a process up to date; the devices share it.
//!
//! While nothing has moved, that costs a datagram one load of an atomic. The lock is held for the
//! copy of a pointer.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use unbroken_types::Gid;

/// The address of a UD QP: the GID of a port, and the QPN.
pub type UdAddr = (Gid, u32);

/// A UD QP that has moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Alias {
    /// An address that programs use for it.
    pub known: UdAddr,
    /// The address that it has.
    pub now: UdAddr,
    /// The GID that its datagrams show as their source; the QPN is that of `known`.
    pub shown: Gid,
}

/// Translations, both ways.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AliasMap {
    now: HashMap<UdAddr, UdAddr>,
    name: HashMap<UdAddr, UdAddr>,
}

impl AliasMap {
    /// Where the QP is now that is known by this address; `None` where it has not moved.
    pub fn now(&self, known: UdAddr) -> Option<UdAddr> {
        self.now.get(&known).copied()
    }

    /// By what address the QP is known that is here now and has moved; `None` where that is not
    /// known.
    pub fn name(&self, now: UdAddr) -> Option<UdAddr> {
        self.name.get(&now).copied()
    }

    /// Whether nothing has moved.
    pub fn is_empty(&self) -> bool {
        self.now.is_empty()
    }
}

impl FromIterator<Alias> for AliasMap {
    fn from_iter<T: IntoIterator<Item = Alias>>(aliases: T) -> AliasMap {
        let mut map = AliasMap::default();
        for Alias { known, now, shown } in aliases {
            map.now.insert(known, now);
            map.name.insert(now, (shown, known.1));
        }
        map
    }
}

/// The table of a process.
#[derive(Default)]
pub struct UdAliases {
    /// Changes with the table.
    generation: AtomicU64,
    map: Mutex<Arc<AliasMap>>,
    asked: AtomicBool,
}

impl UdAliases {
    /// Replaces the table.
    pub fn set(&self, map: AliasMap) {
        let mut current = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        if **current != map {
            *current = Arc::new(map);
            self.generation.fetch_add(1, Ordering::Release);
        }
        self.asked.store(false, Ordering::Release);
    }

    /// A number that changes with the table; 0 while nothing has ever moved.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The table.
    pub fn map(&self) -> Arc<AliasMap> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A datagram came from a QP that has moved and is not in the table. True for the first since
    /// the table was last set: its owner is to be told.
    pub fn ask(&self) -> bool {
        !self.asked.swap(true, Ordering::AcqRel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ports_lead_to_a_qp_and_one_is_its_name() {
        let gid = |n| Gid([n; 16]);
        let (now, shown) = ((gid(9), 0x20007), gid(1));
        let aliases = UdAliases::default();
        assert_eq!((aliases.generation(), aliases.map().is_empty()), (0, true));
        let moved = || [gid(1), gid(2)].map(|port| Alias { known: (port, 5), now, shown });
        aliases.set(moved().into_iter().collect());
        let map = aliases.map();
        assert_eq!(
            (map.now((gid(1), 5)), map.now((gid(2), 5)), map.now((gid(1), 6))),
            (Some(now), Some(now), None)
        );
        assert_eq!((map.name(now), map.name((gid(1), 5))), (Some((gid(1), 5)), None));
        // Who asks is heard once for each table, and the same table is no news.
        assert!(aliases.ask() && !aliases.ask());
        aliases.set(moved().into_iter().collect());
        assert_eq!(aliases.generation(), 1);
        assert!(aliases.ask());
        aliases.set(AliasMap::default());
        assert_eq!((aliases.generation(), aliases.map().is_empty()), (2, true));
    }
}
