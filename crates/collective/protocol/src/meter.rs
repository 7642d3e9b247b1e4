//! Measures the rates of NICs and paths, and the time of a message, from normal traffic.
//!
//! A measurement of a line lasts from the moment when the line gets work until all of that work is
//! done, or a fixed time. The bytes carried in that time give a lower bound of the line's rate: the
//! last frame must still be acknowledged, and polls may be late. So all measurements are too low. The rate follows higher measurements immediately and lower ones slowly; the less
//! data a measurement covers, the more slowly.
//!
//! The time of a message is the shortest time of a short frame that had its path to itself. It
//! grows slowly, so that it can also increase.

use std::collections::VecDeque;

/// A measurement covers at least this many bytes, and takes at least this many times as long as a
/// message.
const LEAST_BYTES: u64 = 128 << 10;
const LEAST_MESSAGES: u64 = 4;
/// A rate is known after this many measurements, because one may have been late.
const LEAST_MEASURES: u32 = 3;
/// A line that is always busy starts a new measurement after this many bytes and this time.
const MOST_BYTES: u64 = 1 << 20;
const MOST_US: u64 = 100_000;
/// The weight of a higher measurement, and the largest weight of a lower one: in proportion to the
/// bytes that it covers, relative to this number.
const UP: f64 = 0.25;
const DOWN: f64 = 0.25;
const DOWN_BYTES: f64 = (2 << 20) as f64;
/// The longest frame that is used to measure the time of a message.
const SHORT_BYTES: u32 = 4 << 10;
/// The growth of the shortest time with each frame that took longer.
const ALPHA_GROWS: f64 = 1.0 / 64.0;

/// The rate of a line: a NIC or a path.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meter {
    /// Frames in flight.
    frames: u32,
    /// The start of the current measurement, if there is one, and the bytes carried since then.
    since_us: Option<u64>,
    bytes: u64,
    mbps: Option<f64>,
    /// The number of measurements.
    measures: u32,
}

impl Meter {
    /// Records that a frame was posted.
    pub(crate) fn posted(&mut self, now_us: u64) {
        if self.frames == 0 {
            (self.since_us, self.bytes) = (Some(now_us), 0);
        }
        self.frames += 1;
    }

    /// Records the completion of a frame. A message takes `alpha_us`.
    pub(crate) fn sent(&mut self, now_us: u64, bytes: u32, alpha_us: f64) {
        self.frames = self.frames.saturating_sub(1);
        self.bytes += u64::from(bytes);
        let Some(since_us) = self.since_us else { return };
        let took_us = now_us.saturating_sub(since_us);
        let long = self.bytes >= MOST_BYTES && took_us >= MOST_US;
        if self.frames > 0 && !long {
            return;
        }
        // It goes on with what is on its way.
        self.since_us = (self.frames > 0).then_some(now_us);
        let carried = std::mem::take(&mut self.bytes);
        if carried >= LEAST_BYTES && took_us as f64 >= alpha_us * LEAST_MESSAGES as f64 {
            self.follow(carried, (took_us as f64 - alpha_us).max(1.0));
        }
    }

    fn follow(&mut self, bytes: u64, us: f64) {
        let measure = bytes as f64 * 8.0 / us;
        let before = self.mbps.unwrap_or(measure);
        let part = match measure < before {
            true => (bytes as f64 / DOWN_BYTES).min(DOWN),
            false => UP,
        };
        self.mbps = Some(before + (measure - before) * part);
        self.measures = self.measures.saturating_add(1);
    }

    /// Records frames that are lost with their path. Measuring stops until all others are complete.
    pub(crate) fn lost(&mut self, frames: u32) {
        self.frames = self.frames.saturating_sub(frames);
        self.since_us = None;
    }

    /// Frames in flight, without notices.
    pub(crate) fn frames(&self) -> u32 {
        self.frames
    }

    /// The rate in Mbit/s; 0 while unknown.
    pub(crate) fn mbps(&self) -> u32 {
        let known = self.mbps.filter(|_| self.measures >= LEAST_MEASURES);
        known.map_or(0, |mbps| (mbps as u32).max(1))
    }
}

/// The frames in flight on a path, in order: their bytes, and the time of the post for a short
/// frame that has the path to itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct OnWay(VecDeque<(u32, Option<u64>)>);

impl OnWay {
    /// Records a post. A notice has no bytes.
    pub(crate) fn posted(&mut self, now_us: u64, bytes: u32) {
        let alone = self.0.is_empty() && (1..=SHORT_BYTES).contains(&bytes);
        self.0.push_back((bytes, alone.then_some(now_us)));
    }

    /// Records the completion of the oldest one, and returns its bytes, and its time if that
    /// counts.
    pub(crate) fn complete(&mut self, now_us: u64) -> Option<(u32, Option<u64>)> {
        let (bytes, since_us) = self.0.pop_front()?;
        // With others behind it, it has not had the path to itself.
        let took = since_us.filter(|_| self.0.is_empty());
        Some((bytes, took.map(|since_us| now_us.saturating_sub(since_us))))
    }

    /// Records that the path has failed, and returns the number of lost frames.
    pub(crate) fn clear(&mut self) -> u32 {
        self.0.drain(..).filter(|(bytes, _)| *bytes > 0).count() as u32
    }
}

/// The time of a message.
#[derive(Clone, Debug, Default)]
pub(crate) struct Alpha(Option<f64>);

impl Alpha {
    /// Records the time of one.
    pub(crate) fn took(&mut self, us: u64) {
        let us = (us as f64).max(0.5);
        self.0 = Some(match self.0 {
            Some(least) if us > least => least + (us - least).min(least) * ALPHA_GROWS,
            _ => us,
        });
    }

    /// The time in µs; 0 while unknown.
    pub(crate) fn us(&self) -> f64 {
        self.0.unwrap_or(0.0)
    }

    /// The time in ns; 0 while unknown.
    pub(crate) fn ns(&self) -> u32 {
        self.0.map_or(0, |us| (us * 1e3) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: u32 = 64 << 10;

    /// Bursts of so many frames, each of which is complete so many µs later than it could be.
    fn bursts(meter: &mut Meter, count: u64, frames: u64, each_us: u64, late_us: u64) {
        for burst in 0..count {
            let begins_us = burst * 10_000_000;
            (0..frames).for_each(|_| meter.posted(begins_us));
            let ends_us = |k| begins_us + k * each_us + late_us;
            (1..=frames).for_each(|k| meter.sent(ends_us(k), FRAME, 0.0));
        }
    }

    #[test]
    fn what_a_line_carries_is_measured_and_its_rest_is_not() {
        let mut meter = Meter::default();
        bursts(&mut meter, 9, 1, 5_000, 0);
        assert_eq!(meter.mbps(), 0, "too short");
        bursts(&mut meter, 9, 4, 5_000, 0);
        assert_eq!(meter.mbps(), 104, "64 KiB in 5 ms");
    }

    /// One acknowledgement for several frames, and whoever looks is late: never is a line faster
    /// for it.
    #[test]
    fn lateness_is_never_speed() {
        let mut meter = Meter::default();
        for burst in 0..200u64 {
            let (begins_us, frames) = (burst * 1_000_000, 2 + burst % 7);
            (0..frames).for_each(|_| meter.posted(begins_us));
            // The first half late, the rest just after it.
            let ends_us = begins_us + frames * 5_000 + burst * 977 % 20_000;
            (0..frames).for_each(|_| meter.sent(ends_us, FRAME, 0.0));
        }
        assert!((70..=104).contains(&meter.mbps()), "{}", meter.mbps());
    }

    #[test]
    fn a_line_without_rest_is_measured_too() {
        let mut meter = Meter::default();
        (0..8).for_each(|_| meter.posted(0));
        for k in 1..200 {
            meter.posted(k * 5_000);
            meter.sent(k * 5_000, FRAME, 0.0);
        }
        assert_eq!(meter.mbps(), 104);
    }

    #[test]
    fn a_rate_goes_up_fast_and_down_slowly() {
        let mut meter = Meter::default();
        bursts(&mut meter, 10, 8, 5_000, 0);
        bursts(&mut meter, 1, 8, 20_000, 0);
        assert!((80..104).contains(&meter.mbps()), "{}", meter.mbps());
        bursts(&mut meter, 30, 8, 20_000, 0);
        assert!((26..30).contains(&meter.mbps()), "{}", meter.mbps());
        bursts(&mut meter, 9, 8, 5_000, 0);
        assert!(meter.mbps() > 90, "{}", meter.mbps());
    }

    /// What goes on over other paths of a NIC is measured when it is idle the next time.
    #[test]
    fn lost_frames_are_not_waited_for() {
        let mut meter = Meter::default();
        (0..8).for_each(|_| meter.posted(0));
        (0..4).for_each(|_| meter.sent(1, FRAME, 0.0));
        meter.lost(4);
        assert_eq!(meter.mbps(), 0);
        bursts(&mut meter, 3, 4, 5_000, 0);
        assert_eq!(meter.mbps(), 104);
    }

    #[test]
    fn only_frames_with_a_path_to_themselves_say_how_long_one_takes() {
        let mut on_way = OnWay::default();
        on_way.posted(10, 64);
        assert_eq!(on_way.complete(17), Some((64, Some(7))));
        on_way.posted(20, 64);
        on_way.posted(21, 64);
        assert_eq!(on_way.complete(40), Some((64, None)));
        assert_eq!(on_way.complete(41), Some((64, None)));
        on_way.posted(50, FRAME);
        assert_eq!(on_way.complete(99), Some((FRAME, None)), "it is long");
        on_way.posted(100, 0);
        assert_eq!(on_way.complete(103), Some((0, None)), "a notice");
        assert_eq!(on_way.complete(104), None);
    }

    #[test]
    fn the_least_time_counts_and_can_grow() {
        let mut alpha = Alpha::default();
        [9, 5, 500, 7].iter().for_each(|us| alpha.took(*us));
        assert!((5_000..5_300).contains(&alpha.ns()), "{}", alpha.ns());
        (0..500).for_each(|_| alpha.took(20));
        assert!(alpha.ns() > 19_000, "{}", alpha.ns());
    }
}
