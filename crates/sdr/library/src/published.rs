//! What the SDR queue pairs of this process have counted, for its status.
//!
//! Only counters are held here, and no queue pair: whoever asks must not be the one that ends it.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use unbroken_events::{set_sdr_source, SdrStatus};

use crate::lanes::Counts;

struct Published {
    /// The counters of each queue pair, by channel.
    living: Vec<Vec<Arc<Counts>>>,
    /// Of those that have ended.
    ended: SdrStatus,
}

static PUBLISHED: Mutex<Published> = Mutex::new(Published {
    living: Vec::new(),
    ended: SdrStatus {
        qps: 0,
        sent: 0,
        received: 0,
        duplicates: 0,
        late: 0,
        outside: 0,
        under_runs: 0,
    },
});

/// Has the counters of a new queue pair told with those of the others.
pub(crate) fn publish(counts: Vec<Arc<Counts>>) {
    let mut published = PUBLISHED.lock().unwrap_or_else(PoisonError::into_inner);
    // The table stays as long as there are queue pairs.
    published.bury();
    published.living.push(counts);
    drop(published);
    set_sdr_source(status);
}

fn status() -> SdrStatus {
    let mut published = PUBLISHED.lock().unwrap_or_else(PoisonError::into_inner);
    published.bury();
    let mut all = published.ended;
    published.living.iter().for_each(|counts| add(&mut all, counts));
    SdrStatus { qps: published.living.len() as u64, ..all }
}

impl Published {
    /// Keeps what ended queue pairs have counted, and forgets these.
    fn bury(&mut self) {
        let Published { living, ended } = self;
        living.retain(|counts| {
            let lives = counts.iter().any(|counts| Arc::strong_count(counts) > 1);
            if !lives {
                add(ended, counts);
            }
            lives
        });
    }
}

fn add(sum: &mut SdrStatus, channels: &[Arc<Counts>]) {
    for counts in channels {
        sum.sent += counts.sent.load(Relaxed);
        sum.received += counts.packets.load(Relaxed);
        sum.duplicates += counts.duplicates.load(Relaxed);
        sum.late += counts.late.load(Relaxed);
        sum.outside += counts.outside.load(Relaxed);
        sum.under_runs += counts.under_runs.load(Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ended_queue_pairs_have_counted_stays() {
        let counts: Vec<Arc<Counts>> = (0..2).map(|_| Arc::default()).collect();
        // Other tests of this process have queue pairs, too.
        let before = status();
        publish(counts.clone());
        counts.iter().for_each(|counts| counts.sent.store(1 << 40, Relaxed));
        assert!(status().sent >= before.sent + (2 << 40));
        drop(counts);
        let after = status();
        assert!(after.sent >= before.sent + (2 << 40));
    }
}
