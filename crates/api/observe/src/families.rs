//! Metric families in Prometheus' text format, put together from what a snapshot shows.
//!
//! The library's own counters live as long as a process and only grow by it. Ours are read anew for
//! each scrape, so the families are made by hand, and the library writes them.

use std::collections::BTreeMap;

use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType,
};
use prometheus::{Encoder, TextEncoder};

use crate::totals::{Times, BOUNDS_US};

/// Samples of one family; what is beyond is left out, so that no page grows without end.
const MAX_SAMPLES: usize = 4_096;

/// A metric that there may be: its name, what it is, and what its help says.
#[derive(Clone, Copy)]
pub struct Kind {
    /// Its name.
    pub name: &'static str,
    /// What it is.
    pub of: MetricType,
    /// What it means.
    pub help: &'static str,
}

impl Kind {
    /// Its type as Prometheus names it.
    pub fn type_name(&self) -> &'static str {
        match self.of {
            MetricType::COUNTER => "counter",
            MetricType::HISTOGRAM => "histogram",
            _ => "gauge",
        }
    }
}

/// A label's value as text that does nothing to whoever shows it: names and reasons come from
/// whoever may write to the folder. (The library writes a line feed as two characters.)
fn harmless(value: &str) -> String {
    unbroken_units::text::shown_lines(value).replace('\t', "\u{fffd}")
}

/// All families of one page.
pub(crate) struct Families {
    kinds: &'static [Kind],
    found: BTreeMap<&'static str, MetricFamily>,
}

impl Families {
    pub(crate) fn new(kinds: &'static [Kind]) -> Families {
        Families { kinds, found: BTreeMap::new() }
    }

    /// Adds a sample. A name that is not in the list is a mistake of ours, which a test finds.
    pub(crate) fn add(&mut self, name: &'static str, labels: &[(&str, &str)], value: f64) {
        self.put(name, labels, |kind, metric| match kind {
            MetricType::COUNTER => {
                let mut counter = Counter::default();
                counter.set_value(value);
                metric.set_counter(counter);
            }
            _ => {
                let mut gauge = Gauge::default();
                gauge.set_value(value);
                metric.set_gauge(gauge);
            }
        });
    }

    /// Adds a distribution of times, in seconds.
    pub(crate) fn times(&mut self, name: &'static str, labels: &[(&str, &str)], times: &Times) {
        self.put(name, labels, |_, metric| {
            let mut sum = 0;
            let bounds = BOUNDS_US.iter().map(|us| *us as f64 / 1e6);
            let buckets = bounds.zip(times.buckets).map(|(bound, count)| {
                sum += count;
                let mut bucket = Bucket::default();
                bucket.set_upper_bound(bound);
                bucket.set_cumulative_count(sum);
                bucket
            });
            let mut histogram = Histogram::default();
            histogram.set_bucket(buckets.collect());
            histogram.set_sample_count(times.count());
            histogram.set_sample_sum(times.sum_us as f64 / 1e6);
            metric.set_histogram(histogram);
        });
    }

    fn put(
        &mut self,
        name: &'static str,
        labels: &[(&str, &str)],
        fill: impl FnOnce(MetricType, &mut Metric),
    ) {
        let Some(kind) = self.kinds.iter().find(|kind| kind.name == name) else {
            debug_assert!(false, "{name} is in no list of metrics");
            return;
        };
        let family = self.found.entry(name).or_insert_with(|| {
            let mut family = MetricFamily::default();
            family.set_name(name.into());
            family.set_help(kind.help.into());
            family.set_field_type(kind.of);
            family
        });
        if family.get_metric().len() >= MAX_SAMPLES {
            return;
        }
        let mut metric = Metric::default();
        let pair = |(name, value): &(&str, &str)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).into());
            pair.set_value(harmless(value));
            pair
        };
        metric.set_label(labels.iter().map(pair).collect());
        fill(kind.of, &mut metric);
        family.mut_metric().push(metric);
    }

    /// The page.
    pub(crate) fn text(self) -> String {
        let families: Vec<MetricFamily> = self.found.into_values().collect();
        let mut text = Vec::new();
        // Writing to memory fails for a family without samples alone, and each has one.
        let _ = TextEncoder::new().encode(&families, &mut text);
        String::from_utf8(text).unwrap_or_default()
    }
}
