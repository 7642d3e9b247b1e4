//! Keys that are due at some time: what the worker is to do, and when. With thousands of queue
//! pairs a round of the worker touches those that are due, and no other.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

/// Keys, each with a time. One entry for each key.
pub(crate) struct Due<K> {
    at: HashMap<K, u64>,
    order: BTreeSet<(u64, K)>,
    /// How many entries were looked at.
    #[cfg(test)]
    pub(crate) touched: u64,
}

impl<K> Default for Due<K> {
    fn default() -> Due<K> {
        Due {
            at: HashMap::new(),
            order: BTreeSet::new(),
            #[cfg(test)]
            touched: 0,
        }
    }
}

impl<K: Copy + Ord + Hash> Due<K> {
    /// A key is due at that time, whatever it was before. Gives that.
    pub(crate) fn set(&mut self, key: K, at_us: u64) -> Option<u64> {
        let before = self.at.insert(key, at_us);
        if let Some(before_us) = before {
            self.order.remove(&(before_us, key));
        }
        self.order.insert((at_us, key));
        before
    }

    /// A key is not due any more.
    pub(crate) fn remove(&mut self, key: K) {
        if let Some(at_us) = self.at.remove(&key) {
            self.order.remove(&(at_us, key));
        }
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.at.is_empty()
    }

    /// When the first is due; `u64::MAX` where there is none.
    pub(crate) fn next_us(&self) -> u64 {
        self.order.first().map_or(u64::MAX, |(at_us, _)| *at_us)
    }

    /// Takes those that are due by now, the earliest first; at most so many.
    pub(crate) fn take(&mut self, now_us: u64, most: usize) -> Vec<K> {
        let mut due = Vec::new();
        while due.len() < most && self.next_us() <= now_us {
            let Some((_, key)) = self.order.pop_first() else { break };
            self.at.remove(&key);
            due.push(key);
        }
        #[cfg(test)]
        {
            self.touched += due.len() as u64;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_are_due_are_taken_and_no_other_is_touched() {
        let mut due = Due::default();
        for key in 0..10_000u32 {
            assert_eq!(due.set(key, 1000 + u64::from(key)), None);
        }
        assert_eq!((due.next_us(), due.take(999, 10)), (1000, vec![]));
        assert_eq!(due.take(1002, 10), [0, 1, 2]);
        assert_eq!((due.set(5, 5000), due.set(9999, 1003)), (Some(1005), Some(10_999)));
        due.remove(3);
        assert_eq!(due.take(1006, 2), [9999, 4], "at most so many");
        assert_eq!((due.take(1006, 10), due.next_us()), (vec![6], 1007));
        assert_eq!(due.touched, 6);
        assert_eq!(due.take(u64::MAX, 20_000).len(), 10_000 - 7);
        assert!(due.is_empty() && due.next_us() == u64::MAX);
    }
}
