//! What was seen of late: the last snapshot, and what NICs carried between those before it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use unbroken_observe::Snapshot;

/// Rates of each NIC that are kept.
pub const KEPT: usize = 120;
/// NICs whose rates are kept.
const MAX_NICS: usize = 1_024;

/// What a NIC carries, in bits a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Sent.
    pub tx_bps: f64,
    /// Received.
    pub rx_bps: f64,
}

/// The snapshots of late, as far as a screen needs them.
#[derive(Default)]
pub struct History {
    last: Option<Arc<Snapshot>>,
    rates: HashMap<String, VecDeque<Rates>>,
    /// Bytes sent and received, and when, of each NIC as it was seen last.
    seen: HashMap<String, (u64, u64, u64)>,
}

impl History {
    /// Takes a newer snapshot in.
    pub fn push(&mut self, snapshot: Arc<Snapshot>) {
        for nic in snapshot.nics.iter().take(MAX_NICS) {
            let now = (nic.counters.tx_bytes, nic.counters.rx_bytes, snapshot.time_us);
            let before = self.seen.insert(nic.nic.clone(), now);
            let rates = before.and_then(|before| rates(before, now)).unwrap_or_default();
            let kept = self.rates.entry(nic.nic.clone()).or_default();
            if kept.len() == KEPT {
                kept.pop_front();
            }
            kept.push_back(rates);
        }
        let there = |nic: &String| snapshot.nics.iter().any(|n| n.nic == *nic);
        if self.seen.len() > snapshot.nics.len() {
            self.seen.retain(|nic, _| there(nic));
            self.rates.retain(|nic, _| there(nic));
        }
        self.last = Some(snapshot);
    }

    /// The newest snapshot.
    pub fn last(&self) -> Option<&Snapshot> {
        self.last.as_deref()
    }

    /// What a NIC carries now.
    pub fn rates(&self, nic: &str) -> Rates {
        self.rates.get(nic).and_then(|kept| kept.back()).copied().unwrap_or_default()
    }

    /// What a NIC has sent and received of late, together, the oldest first.
    pub fn of_late(&self, nic: &str) -> impl DoubleEndedIterator<Item = f64> + '_ {
        self.rates.get(nic).into_iter().flatten().map(|rates| rates.tx_bps + rates.rx_bps)
    }

    /// The most that any NIC has carried of late.
    pub fn peak_bps(&self) -> f64 {
        let all = self.rates.values().flatten().map(|rates| rates.tx_bps + rates.rx_bps);
        all.fold(0.0, f64::max)
    }
}

/// Rates between two looks; none where no time has passed. Counters that have gone back are those
/// of another page: they began anew.
fn rates(before: (u64, u64, u64), now: (u64, u64, u64)) -> Option<Rates> {
    let us = now.2.checked_sub(before.2).filter(|us| *us > 0)?;
    let bps = |before: u64, now: u64| now.saturating_sub(before) as f64 * 8e6 / us as f64;
    Some(Rates { tx_bps: bps(before.0, now.0), rx_bps: bps(before.1, now.1) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn rates_are_those_between_two_looks() {
        let mut history = History::default();
        history.push(Arc::new(samples::snapshot(1_000_000, 0)));
        assert_eq!(history.rates("a/0"), Rates::default());
        history.push(Arc::new(samples::snapshot(1_500_000, 1_000_000)));
        assert_eq!(history.rates("a/0").tx_bps, 16e6);
        // Another page: its counters are smaller.
        history.push(Arc::new(samples::snapshot(2_000_000, 10)));
        assert_eq!(history.rates("a/0").tx_bps, 0.0);
        for n in 0..2 * KEPT as u64 {
            history.push(Arc::new(samples::snapshot(3_000_000 + n, n)));
        }
        assert_eq!(history.of_late("a/0").count(), KEPT);
    }
}
