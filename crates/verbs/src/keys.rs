//! By which keys a peer's memory is known on each of its NICs.
//!
//! On devices whose keys are their own a region has another remote key on every NIC. Applications
//! tell each other the key of one NIC, the default one; a QP that is connected to another NIC of
//! the peer must name the key that the region has there. The peer, which owns the memory, says so
//! ahead of need ([`RemoteKeys::insert`]) and when it is asked ([`RemoteKeys::take_wanted`]).
//!
//! A NIC that died and was opened again has a new set of keys ([`NicKey`]): the peer says so
//! whenever it takes a path over that NIC ([`RemoteKeys::opened`]), and what was known of the older
//! set is forgotten.
//!
//! A key is *known*, *asked for*, or *invalid* (the peer knows no such region): only in the second
//! state does a work request wait for it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use unbroken_types::{is_newer_key_set, NicKey, FIRST_KEY_SET};

/// Keys that peers may be asked for at a time; more wait until these are answered.
const MAX_WANTED: usize = 4096;
/// The keys of one region.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KeyRow {
    /// The NIC on which it was made.
    pub default: u8,
    /// The key that applications have.
    pub rkey: u32,
    /// Its key on each NIC on which the region is known.
    pub on: Vec<NicKey>,
}

impl KeyRow {
    fn on(&self, nic: u8) -> Option<u32> {
        self.on.iter().find(|key| key.nic == nic).map(|key| key.rkey)
    }
}

/// What the owner of a region answers a peer that asks by which keys it is known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KeyAnswer {
    /// By these.
    Known(KeyRow),
    /// It is being made ready where the peer may name it: ask again.
    Later,
    /// There is no such region.
    NoRegion,
}

/// By which key to name a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Translation {
    /// By this.
    Key(u32),
    /// The peer has been asked, or will be.
    Wanted,
    /// The peer has no such region.
    Invalid,
}

/// Whoever waits for keys.
pub trait KeyWaiter: Send + Sync {
    /// Some have come. Called without a lock.
    fn keys_came(&self);
}

#[derive(Default)]
struct Table {
    rows: HashMap<(u8, u32), KeyRow>,
    /// Asked for and not answered; true: it is to be asked.
    wanted: HashMap<(u8, u32), bool>,
    /// The peer has said that there is no such region.
    invalid: HashMap<(u8, u32), ()>,
    waiters: Vec<Weak<dyn KeyWaiter>>,
    /// The set of keys that each NIC has, where it is not the first or the peer has said so.
    sets: HashMap<u8, u16>,
}

impl Table {
    fn set_of(&self, nic: u8) -> u16 {
        self.sets.get(&nic).copied().unwrap_or(0)
    }

    /// A NIC has this set of keys, unless a newer one is known. Gives whether it is new.
    fn opened(&mut self, nic: u8, key_set: u16) -> bool {
        // The first that is heard of a NIC may be any number: it may have been healed before.
        let news =
            self.sets.get(&nic).map_or(key_set != 0, |known| is_newer_key_set(key_set, *known));
        if !news {
            return false;
        }
        self.sets.insert(nic, key_set);
        self.rows
            .values_mut()
            .for_each(|row| row.on.retain(|key| key.nic != nic || key.key_set == key_set));
        true
    }
}

/// The keys of one peer process.
#[derive(Default)]
pub struct RemoteKeys {
    table: Mutex<Table>,
    /// Some region is not known by its own key on its default NIC, or may not be: that NIC was
    /// opened again.
    replaced: AtomicBool,
    /// Each key is good on every NIC of the peer.
    shared: AtomicBool,
}

impl RemoteKeys {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether keys must be translated for a NIC.
    #[inline]
    pub fn matters(&self, default: u8, nic: u8) -> bool {
        let differs = nic != default || self.replaced.load(Ordering::Acquire);
        differs && !self.shared.load(Ordering::Acquire)
    }

    /// The peer has said of a NIC in use that its keys are good on all of its NICs.
    pub fn good_everywhere(&self) {
        self.shared.store(true, Ordering::Release);
    }

    /// By which key a region is known on a NIC. What is not known is wanted from now on.
    pub fn resolve(&self, default: u8, rkey: u32, nic: u8) -> Translation {
        let mut t = self.table();
        let key = (default, rkey);
        if let Some(there) = t.rows.get(&key).and_then(|row| row.on(nic)) {
            return Translation::Key(there);
        }
        if nic == default && !t.rows.contains_key(&key) && t.set_of(nic) <= FIRST_KEY_SET {
            return Translation::Key(rkey);
        }
        if t.invalid.contains_key(&key) {
            return Translation::Invalid;
        }
        if t.wanted.len() < MAX_WANTED {
            t.wanted.entry(key).or_insert(true);
        }
        Translation::Wanted
    }

    /// The peer has opened a NIC for the `key_set`th time: keys that it told of earlier sets are
    /// not good there any more.
    pub fn opened(&self, nic: u8, key_set: u16) {
        if self.table().opened(nic, key_set) && key_set > FIRST_KEY_SET {
            self.replaced.store(true, Ordering::Release);
        }
    }

    /// The peer has said by which keys regions are known. What it said of them before is forgotten;
    /// a word that comes late is not taken.
    pub fn insert(&self, rows: impl IntoIterator<Item = KeyRow>) {
        let mut t = self.table();
        for mut row in rows {
            let key = (row.default, row.rkey);
            row.on.retain(|key| {
                let known = t.sets.get(&key.nic);
                known.is_none_or(|known| !is_newer_key_set(*known, key.key_set))
            });
            for there in &row.on {
                if t.opened(there.nic, there.key_set) && there.key_set > FIRST_KEY_SET {
                    self.replaced.store(true, Ordering::Release);
                }
            }
            if row.on(row.default).is_some_and(|rkey| rkey != row.rkey) {
                self.replaced.store(true, Ordering::Release);
            }
            t.wanted.remove(&key);
            t.invalid.remove(&key);
            t.rows.insert(key, row);
        }
        self.tell(t);
    }

    /// The peer has deregistered a region, or has said that there is none of that key.
    pub fn remove(&self, default: u8, rkey: u32) {
        let mut t = self.table();
        let key = (default, rkey);
        t.rows.remove(&key);
        t.wanted.remove(&key);
        if t.invalid.len() >= MAX_WANTED {
            t.invalid.clear(); // those that are still used are asked for again
        }
        t.invalid.insert(key, ());
        self.tell(t);
    }

    fn tell(&self, mut t: MutexGuard<'_, Table>) {
        t.waiters.retain(|w| w.strong_count() > 0);
        let waiters: Vec<Arc<dyn KeyWaiter>> = t.waiters.iter().filter_map(Weak::upgrade).collect();
        drop(t);
        waiters.iter().for_each(|w| w.keys_came());
    }

    /// The keys that the peer is to be asked for, each once; (default NIC, key).
    pub fn take_wanted(&self) -> Vec<(u8, u32)> {
        let mut t = self.table();
        t.wanted.iter_mut().filter_map(|(key, ask)| std::mem::take(ask).then_some(*key)).collect()
    }

    /// Questions may have been lost: all that are not answered are asked again.
    pub fn ask_again(&self) {
        self.table().wanted.values_mut().for_each(|ask| *ask = true);
    }

    /// Tells `waiter` from now on, as long as it lives.
    pub fn watch(&self, waiter: Weak<dyn KeyWaiter>) {
        let mut t = self.table();
        t.waiters.retain(|w| w.strong_count() > 0 && !w.ptr_eq(&waiter));
        t.waiters.push(waiter);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    struct Count(AtomicU32);

    impl KeyWaiter for Count {
        fn keys_came(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn key(nic: u8, key_set: u16, rkey: u32) -> NicKey {
        NicKey { nic, key_set, rkey }
    }

    #[test]
    fn what_a_nic_gave_before_it_was_opened_again_is_forgotten() {
        let keys = RemoteKeys::default();
        let row = |on| [KeyRow { default: 0, rkey: 7, on }];
        (0..2).for_each(|nic| keys.opened(nic, 1));
        keys.insert(row(vec![key(0, 1, 7), key(1, 1, 90)]));
        keys.opened(1, 2);
        keys.opened(1, 1);
        assert_eq!(
            (keys.resolve(0, 7, 1), keys.take_wanted()),
            (Translation::Wanted, vec![(0, 7)])
        );
        // An answer of before is of no use.
        keys.insert(row(vec![key(0, 1, 7), key(1, 1, 90)]));
        assert_eq!(
            (keys.resolve(0, 7, 1), keys.take_wanted()),
            (Translation::Wanted, vec![(0, 7)])
        );
        keys.insert(row(vec![key(0, 1, 7), key(1, 2, 91)]));
        assert_eq!(
            (keys.resolve(0, 7, 0), keys.resolve(0, 7, 1)),
            (Translation::Key(7), Translation::Key(91))
        );
        // The default NIC: also of what was never asked for.
        assert_eq!(keys.resolve(0, 5, 0), Translation::Key(5));
        keys.opened(0, 2);
        assert!(keys.matters(0, 0));
        assert_eq!(
            (keys.resolve(0, 7, 0), keys.resolve(0, 5, 0)),
            (Translation::Wanted, Translation::Wanted)
        );
        keys.insert(row(vec![key(0, 3, 8), key(1, 2, 91)]));
        assert_eq!(
            (keys.resolve(0, 7, 0), keys.resolve(0, 7, 1)),
            (Translation::Key(8), Translation::Key(91))
        );
    }

    /// A NIC that was healed tens of thousands of times before anybody asked, and goes on.
    #[test]
    fn the_number_of_a_set_may_be_any() {
        for first in [2, 32_767, 32_768, 40_000, u16::MAX] {
            let keys = RemoteKeys::default();
            keys.opened(0, first);
            assert_eq!(keys.resolve(0, 7, 0), Translation::Wanted, "{first}: its key is another");
            let row = |set, rkey| KeyRow { default: 0, rkey: 7, on: vec![key(0, set, rkey)] };
            keys.insert([row(first, 70)]);
            assert_eq!(keys.resolve(0, 7, 0), Translation::Key(70), "{first}");
            let next = unbroken_types::next_key_set(first);
            keys.opened(0, next);
            assert_eq!(keys.resolve(0, 7, 0), Translation::Wanted, "{next} after {first}");
            keys.insert([row(first, 70)]);
            assert_eq!(keys.resolve(0, 7, 0), Translation::Wanted, "a word that comes late");
            keys.insert([row(next, 71)]);
            assert_eq!(keys.resolve(0, 7, 0), Translation::Key(71), "{next} after {first}");
            let others = RemoteKeys::default();
            others.insert([row(first, 70)]);
            assert_eq!(others.resolve(0, 7, 0), Translation::Key(70), "{first}, told at first");
        }
    }

    #[test]
    fn a_key_is_known_asked_for_or_invalid() {
        let keys = RemoteKeys::default();
        let told = Arc::new(Count(AtomicU32::new(0)));
        let waiter: Arc<dyn KeyWaiter> = told.clone();
        keys.watch(Arc::downgrade(&waiter));
        keys.watch(Arc::downgrade(&waiter));
        assert!(!keys.matters(0, 0) && keys.matters(0, 1));
        assert_eq!(keys.resolve(0, 7, 0), Translation::Key(7), "where the key was made it is good");
        assert_eq!(keys.resolve(0, 7, 1), Translation::Wanted);
        assert_eq!((keys.take_wanted(), keys.take_wanted()), (vec![(0, 7)], vec![]));
        keys.ask_again();
        assert_eq!(keys.take_wanted(), [(0, 7)]);
        keys.insert([KeyRow { default: 0, rkey: 7, on: vec![key(0, 1, 7), key(1, 1, 90)] }]);
        assert_eq!(keys.resolve(0, 7, 1), Translation::Key(90));
        assert_eq!(
            keys.resolve(1, 7, 1),
            Translation::Key(7),
            "the same number of another NIC is another region"
        );
        keys.remove(0, 8);
        assert_eq!(keys.resolve(0, 8, 1), Translation::Invalid);
        keys.remove(0, 7);
        assert_eq!(keys.resolve(0, 7, 1), Translation::Invalid);
        // The default NIC was replaced, and the region has another key there.
        keys.insert([KeyRow { default: 0, rkey: 8, on: vec![key(0, 1, 11)] }]);
        assert!(keys.matters(0, 0));
        assert_eq!(
            (keys.resolve(0, 8, 0), keys.resolve(0, 8, 1)),
            (Translation::Key(11), Translation::Wanted)
        );
        assert_eq!(told.0.load(Ordering::Relaxed), 4, "once each time, though it asked twice");
    }
}
