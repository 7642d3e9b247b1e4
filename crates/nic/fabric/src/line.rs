//! A line with a rate, shared by all processes that use a NIC: a token bucket in one atomic.
//!
//! The atomic is the time at which the line will be free. Whoever sends a packet moves it on by the
//! time that the packet takes, and knows so when its packet has left. A line that was idle for a
//! while has gathered a little credit, so that a sender which wakes up late does not lose its time.

use std::sync::atomic::{AtomicU64, Ordering};

/// The credit that an idle line gathers, in ns.
const CREDIT_NS: u64 = 2_000_000;
/// A line that is taken for longer than this is of another time: of an earlier boot, or of a lower
/// rate.
const LONGEST_NS: u64 = 10_000_000_000;

/// The state of a line.
#[repr(transparent)]
pub struct Line(AtomicU64);

impl Line {
    /// The line's state in the page, and `now_us`, as far as they make sense together.
    fn free_ns(free_ns: u64, now_ns: u64) -> u64 {
        if free_ns > now_ns.saturating_add(LONGEST_NS) {
            now_ns
        } else {
            free_ns.max(now_ns.saturating_sub(CREDIT_NS))
        }
    }

    /// When the line will be free, in µs; possibly earlier than now.
    pub fn free_us(&self, now_us: u64) -> u64 {
        Line::free_ns(self.0.load(Ordering::Relaxed), now_us.saturating_mul(1000)) / 1000
    }

    /// Takes the line for a packet of so many bytes; gives when its last bit has left, in µs.
    pub fn take(&self, now_us: u64, bytes: usize, bits_per_s: u64) -> u64 {
        let now_ns = now_us.saturating_mul(1000);
        let takes_ns =
            (bytes as u128 * 8 * 1_000_000_000 / u128::from(bits_per_s.max(1))).min(1 << 62) as u64;
        let mut left_ns = 0;
        // The closure always gives a value.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free_ns| {
            left_ns = Line::free_ns(free_ns, now_ns).saturating_add(takes_ns);
            Some(left_ns)
        });
        left_ns.div_ceil(1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line {
        Line(AtomicU64::new(0))
    }

    #[test]
    fn it_keeps_its_rate() {
        let line = line();
        let start_us = 1_000_000;
        // 1,000 bytes at 8 Mbit/s take 1 ms; two of them are the credit.
        let left: Vec<u64> = (0..5).map(|_| line.take(start_us, 1000, 8_000_000)).collect();
        assert_eq!(left, [-1, 0, 1, 2, 3].map(|ms: i64| (start_us as i64 + ms * 1000) as u64));
        assert_eq!(line.free_us(start_us), start_us + 3000);
        // Whenever somebody looks, no more than the rate and the credit has left.
        let mut sent = 5;
        for now_us in (start_us..start_us + 1_000_000).step_by(300) {
            while line.free_us(now_us) <= now_us {
                line.take(now_us, 1000, 8_000_000);
                sent += 1;
            }
        }
        assert!((1000..=1006).contains(&sent), "{sent}");
    }

    #[test]
    fn senders_share_it() {
        let line = line();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).map(|_| line.take(1_000_000, 1000, 8_000_000_000)).max());
            }
        });
        assert_eq!(line.free_us(1_000_000), 1_000_000 - 2_000 + 4_000);
    }

    #[test]
    fn nonsense_in_the_page_is_forgotten() {
        let line = Line(AtomicU64::new(u64::MAX));
        assert_eq!(line.free_us(5), 5);
        assert_eq!(line.take(5, 1000, 8_000_000), 1005);
        assert!(line.take(5, usize::MAX, 0) > 5);
    }
}
