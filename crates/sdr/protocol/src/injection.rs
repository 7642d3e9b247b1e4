//! How long a chunk takes to be injected, where no rate was given: measured.
//!
//! A queue pair takes some chunks at once, into its queue, and then as many as leave it. So bytes
//! count only from one moment at which more chunks wait than are taken to the next such moment:
//! in between there was always something to send. Bytes over this *busy* time is the rate at which
//! the engine injects, with all that slows it down: the NIC, the core, other writes.
//!
//! Invariants: time in which nothing waits does not count; what is long ago weighs little; a time
//! that nobody looked counts for [`LONGEST_US`] at most; the result lies within [`BOUNDS_NS`].

/// The busy time that is remembered: then older half of it is forgotten.
const WINDOW_US: u64 = 50_000;
/// Between two looks no more than this counts: the process may have been stopped.
const LONGEST_US: u64 = 100_000;
/// Chunks after which there is a result.
const LEAST_CHUNKS: u64 = 16;
/// A chunk takes so long at least, and at most.
const BOUNDS_NS: std::ops::RangeInclusive<f64> = 1.0..=1e9;

/// The measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Injection {
    /// Since when more has waited than was taken.
    since_us: Option<u64>,
    /// Handed down since the last look.
    fresh_bytes: u64,
    /// Of the busy time that is remembered.
    bytes: f64,
    busy_us: f64,
}

impl Injection {
    /// So many bytes were taken.
    pub fn handed(&mut self, bytes: u64) {
        self.fresh_bytes += bytes;
    }

    /// A turn is over. `waits`: there is more to send than is taken now.
    pub fn looked(&mut self, now_us: u64, waits: bool) {
        if waits && self.since_us == Some(now_us) {
            // The next look tells how long these bytes took.
            return;
        }
        if let (true, Some(since_us)) = (waits, self.since_us) {
            self.bytes += self.fresh_bytes as f64;
            self.busy_us += now_us.saturating_sub(since_us).min(LONGEST_US) as f64;
            if self.busy_us > WINDOW_US as f64 {
                self.bytes /= 2.0;
                self.busy_us /= 2.0;
            }
        }
        self.since_us = waits.then_some(now_us);
        self.fresh_bytes = 0;
    }

    /// The time of a chunk of so many bytes, in ns; `None`: too little has been seen, since what
    /// was to be sent has always been taken at once.
    pub fn chunk_ns(&self, chunk_bytes: u32) -> Option<u64> {
        let chunk = f64::from(chunk_bytes);
        if self.bytes < LEAST_CHUNKS as f64 / 2.0 * chunk {
            return None;
        }
        let ns = self.busy_us * 1000.0 / self.bytes * chunk;
        Some(ns.clamp(*BOUNDS_NS.start(), *BOUNDS_NS.end()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u32 = 65536;

    /// Splitmix64.
    fn draw(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ z >> 27) ^ z >> 13
    }

    /// A queue of eight chunks that empties at a rate, looked at now and then, and filled in
    /// bursts with pauses between them. Gives the time at the end.
    fn run(m: &mut Injection, seed: u64, chunk_us: u64, mut now_us: u64) -> u64 {
        let mut lots = seed;
        for _ in 0..200 {
            let mut waits = 1 + draw(&mut lots) % 100;
            let (mut queued, mut left_us) = (0u64, now_us);
            while waits > 0 {
                while queued > 0 && left_us + chunk_us <= now_us {
                    (queued, left_us) = (queued - 1, left_us + chunk_us);
                }
                if queued == 0 {
                    left_us = now_us;
                }
                while queued < 8 && waits > 0 {
                    m.handed(CHUNK.into());
                    (queued, waits) = (queued + 1, waits - 1);
                }
                m.looked(now_us, waits > 0);
                now_us += draw(&mut lots) % (3 * chunk_us);
            }
            m.looked(now_us, false);
            now_us += draw(&mut lots) % 5_000_000;
        }
        now_us
    }

    /// Neither the burst into an empty queue nor the pauses count, and a change is followed.
    #[test]
    fn the_rate_is_that_of_the_busy_time() {
        for seed in 1..=50 {
            let (mut m, mut now_us) = (Injection::default(), 1);
            for chunk_us in [50, 500, 20] {
                now_us = run(&mut m, seed, chunk_us, now_us);
                let ns = m.chunk_ns(CHUNK).unwrap() as f64;
                let off = ns / (1000 * chunk_us) as f64;
                assert!((0.8..1.25).contains(&off), "seed {seed}, {chunk_us} us: {ns} ns");
            }
        }
    }

    #[test]
    fn what_never_waits_is_not_measured() {
        let mut m = Injection::default();
        for i in 0..1000 {
            m.handed(CHUNK.into());
            m.looked(i * 100, false);
        }
        assert_eq!(m.chunk_ns(CHUNK), None);
    }

    /// Looks at one moment are one look; a stopped process, and a queue that takes nothing any
    /// more, have bounds.
    #[test]
    fn it_is_bounded() {
        let mut m = Injection::default();
        for _ in 0..100 {
            m.handed(CHUNK.into());
            m.looked(7, true);
        }
        assert_eq!(m.chunk_ns(CHUNK), None, "no time has passed");
        m.looked(1007, true);
        let before = m.chunk_ns(CHUNK).unwrap();
        m.looked(3_600_000_000, true);
        assert!(m.chunk_ns(CHUNK).unwrap() < 200 * before, "an hour counts for little");
        for second in 3_601..1_000_000u64 {
            m.looked(second * 1_000_000, true);
        }
        assert!(m.chunk_ns(CHUNK).is_none_or(|ns| ns <= 1_000_000_000));
        m.looked(0, true); // a clock that goes back
        m.handed(u64::MAX / 4);
        m.looked(10, true);
        assert_eq!(m.chunk_ns(CHUNK), Some(1));
    }
}
