//! What NICs and processes count, over time.

use std::collections::BTreeMap;
use std::net::IpAddr;

use unbroken_fabric::{now_us, Gap, GapRecorder, NicPage};

use crate::error::Result;
use crate::lab::Lab;

/// The counters at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When, by [`now_us`].
    pub time_us: u64,
    /// Payload bytes received so far, for each NIC watched.
    pub rx_payload_bytes: Vec<u64>,
}

/// Watches the NICs of a host as a receiver, and the intervals without data at one process.
pub struct Watch {
    pages: Vec<NicPage>,
    samples: Vec<Sample>,
    gaps: BTreeMap<u64, u64>,
    first_us: u64,
    last_us: u64,
}

impl Watch {
    /// Watches the first `nics` NICs of `host`.
    pub fn new(lab: &Lab, host: &str, nics: u8) -> Result<Watch> {
        let pages: Result<Vec<NicPage>> = (0..nics)
            .map(|n| Ok(NicPage::open(lab.runtime(), IpAddr::V4(lab.fabric().nic_addr(host, n)?))?))
            .collect();
        Ok(Watch {
            pages: pages?,
            samples: Vec::new(),
            gaps: BTreeMap::new(),
            first_us: 0,
            last_us: 0,
        })
    }

    /// Takes a sample now.
    pub fn sample(&mut self) -> &Sample {
        let rx_payload_bytes = self.pages.iter().map(|p| p.counters().rx_payload_bytes).collect();
        self.samples.push(Sample { time_us: now_us(), rx_payload_bytes });
        &self.samples[self.samples.len() - 1]
    }

    /// Collects the intervals that the process `pid` recorded. Called often enough, none is lost; a
    /// process that has received nothing yet, or has no page, adds nothing.
    pub fn collect_gaps(&mut self, lab: &Lab, pid: u32) {
        if let Ok(report) = GapRecorder::read(lab.runtime(), pid) {
            self.gaps.extend(report.gaps.iter().map(|g| (g.start_us, g.len_us)));
            (self.first_us, self.last_us) = (report.first_us, report.last_us);
        }
    }

    /// All samples.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// When the first and the last packet with data came; 0: none did.
    pub fn data_span_us(&self) -> (u64, u64) {
        (self.first_us, self.last_us)
    }

    /// The longest interval that overlaps the given time. None: none was longer than
    /// [`unbroken_fabric::GAP_MIN_US`].
    pub fn longest_gap(&self, from_us: u64, to_us: u64) -> Option<Gap> {
        let gaps =
            self.gaps.iter().map(|(start_us, len_us)| Gap { start_us: *start_us, len_us: *len_us });
        gaps.filter(|g| g.start_us <= to_us && g.start_us + g.len_us >= from_us)
            .max_by_key(|g| g.len_us)
    }

    /// The average rate of NIC `nic` over the given time, in Gbit/s of payload; 0 where there are
    /// no two samples in it.
    pub fn rate_gbps(&self, nic: usize, from_us: u64, to_us: u64) -> f64 {
        let mut inside = self.samples.iter().filter(|s| (from_us..=to_us).contains(&s.time_us));
        let (Some(first), Some(last)) = (inside.next(), inside.next_back()) else { return 0.0 };
        gbps(first, last, nic)
    }

    /// The rates between samples at least `bin_us` apart: the end of each bin, and one rate for
    /// each NIC in Gbit/s.
    pub fn bins(&self, bin_us: u64) -> Vec<(u64, Vec<f64>)> {
        let mut bins = Vec::new();
        let Some(mut begin) = self.samples.first() else { return bins };
        for sample in &self.samples {
            if sample.time_us >= begin.time_us + bin_us {
                let rates = (0..self.pages.len()).map(|nic| gbps(begin, sample, nic)).collect();
                bins.push((sample.time_us, rates));
                begin = sample;
            }
        }
        bins
    }
}

/// The rate of a NIC between two samples.
fn gbps(first: &Sample, last: &Sample, nic: usize) -> f64 {
    let bytes = last.rx_payload_bytes[nic].wrapping_sub(first.rx_payload_bytes[nic]);
    let time_us = last.time_us.saturating_sub(first.time_us).max(1);
    bytes as f64 * 8.0 / (time_us as f64 * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_fabric::NicCounter;

    #[test]
    fn rates_and_gaps() {
        let lab = Lab::new(std::path::Path::new("unbroken")).unwrap();
        let mut watch = Watch::new(&lab, "b", 2).unwrap();
        watch.sample();
        watch.pages[1].slot(0).add(NicCounter::RxPayloadBytes, 1_000_000);
        let begin_us = watch.samples[0].time_us;
        while now_us() < begin_us + 2_000 {
            std::thread::yield_now();
        }
        let end_us = watch.sample().time_us;
        let rate = watch.rate_gbps(1, begin_us, end_us);
        assert!((rate - 8e6 / ((end_us - begin_us) as f64 * 1e3)).abs() < 1e-9, "{rate}");
        assert_eq!(watch.rate_gbps(0, begin_us, end_us), 0.0);
        assert_eq!(watch.rate_gbps(1, end_us, end_us), 0.0);
        assert_eq!(watch.bins(1_000), [(end_us, vec![0.0, rate])]);

        let recorder = GapRecorder::create(lab.runtime()).unwrap();
        [10_000, 10_100, 13_000, 13_600].iter().for_each(|t| recorder.record(*t));
        watch.collect_gaps(&lab, std::process::id());
        assert_eq!(watch.data_span_us(), (10_000, 13_600));
        assert_eq!(
            watch.longest_gap(11_000, 20_000),
            Some(Gap { start_us: 10_100, len_us: 2_900 })
        );
        assert_eq!(watch.longest_gap(20_000, 30_000), None);
    }
}
