//! The counters of a NIC, declared once.
//!
//! Each row below gives the counter's word in the NIC's page, its sum over the page's slots, its
//! field in `status --json` and in the schema, its column in `unbroken status`, its metric, and its
//! row of the reference. `cargo xtask docs` compares the reference with the rows.

use serde::{Deserialize, Serialize};

/// How `unbroken status` shows a counter: the heading of its column, and the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// A number.
    Count(&'static str),
    /// Bytes, shown in units of 10^6.
    Megabytes(&'static str),
}

impl Column {
    /// The heading.
    pub fn heading(self) -> &'static str {
        match self {
            Column::Count(heading) | Column::Megabytes(heading) => heading,
        }
    }

    /// The text of a cell.
    pub fn show(self, value: u64) -> String {
        match self {
            Column::Count(_) => value.to_string(),
            Column::Megabytes(_) => format!("{:.1}", value as f64 / 1e6),
        }
    }
}

/// The Prometheus metric of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterMetric {
    /// Its name. Those that begin with `node_infiniband` are node_exporter's.
    pub name: &'static str,
    /// The value of its label `direction`, where two counters share a metric.
    pub direction: Option<&'static str>,
    /// The help text: node_exporter's own where node_exporter defines the metric.
    pub help: &'static str,
}

const fn metric(name: &'static str, help: &'static str) -> Option<CounterMetric> {
    Some(CounterMetric { name, direction: None, help })
}

/// The payload that a NIC carried in a direction.
const fn payload(direction: &'static str) -> Option<CounterMetric> {
    Some(CounterMetric {
        name: "unbroken_nic_payload_bytes_total",
        direction: Some(direction),
        help: "Payload of applications that the NIC carried, by direction.",
    })
}

/// A counter of a NIC, and where it is shown.
#[derive(Clone, Copy, Debug)]
pub struct Counter {
    /// Which one.
    pub of: NicCounter,
    /// Its field in `status --json`.
    pub field: &'static str,
    /// A description of the counted events, for the reference.
    pub meaning: &'static str,
    /// Its column in `unbroken status`, if it has one.
    pub column: Option<Column>,
    /// Its metric, if it has one.
    pub metric: Option<CounterMetric>,
}

macro_rules! counters {
    ($($variant:ident $field:ident: $meaning:literal, $column:expr, $metric:expr;)+) => {
        /// Names a counter of a NIC: its place in a slot of the NIC's page.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum NicCounter {
            $(#[doc = $meaning] $variant,)+
        }

        /// The counters of a NIC, over all processes since its page was made.
        #[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct NicCounters {
            $(#[doc = $meaning] pub $field: u64,)+
            /// When the last packet with payload of an application came; 0: none yet.
            pub last_data_rx_us: u64,
        }

        /// All counters of a NIC, in the order in which they are shown.
        pub const NIC_COUNTERS: &[Counter] = &[$(Counter {
            of: NicCounter::$variant,
            field: stringify!($field),
            meaning: $meaning,
            column: $column,
            metric: $metric,
        },)+];

        impl NicCounters {
            /// The counters, each as `read` gives it.
            pub fn from_fn(last_data_rx_us: u64, read: impl Fn(NicCounter) -> u64) -> NicCounters {
                NicCounters { $($field: read(NicCounter::$variant),)+ last_data_rx_us }
            }

            /// The value of a counter.
            pub fn get(&self, of: NicCounter) -> u64 {
                match of { $(NicCounter::$variant => self.$field,)+ }
            }
        }
    };
}

use Column::{Count, Megabytes};

counters! {
    TxBytes tx_bytes: "Bytes sent, with headers.",
        Some(Megabytes("tx MB")),
        metric(
            "node_infiniband_port_data_transmitted_bytes_total",
            "Number of data octets transmitted on all links",
        );
    RxBytes rx_bytes: "Bytes received, with headers.",
        Some(Megabytes("rx MB")),
        metric(
            "node_infiniband_port_data_received_bytes_total",
            "Number of data octets received on all links",
        );
    TxPackets tx_packets: "Packets sent.",
        None,
        metric(
            "node_infiniband_port_packets_transmitted_total",
            "Number of packets transmitted on all VLs from this port (including errors)",
        );
    RxPackets rx_packets: "Packets received.",
        None,
        metric(
            "node_infiniband_port_packets_received_total",
            "Number of packets received on all VLs by this port (including errors)",
        );
    TxPayloadBytes tx_payload_bytes: "Payload bytes of applications sent.", None, payload("tx");
    RxPayloadBytes rx_payload_bytes: "Payload bytes of applications received.", None, payload("rx");
    Retransmits retransmits: "Packets that were retransmitted.",
        Some(Count("sent again")),
        metric("unbroken_nic_retransmitted_packets_total", "Packets that were retransmitted.");
    Drops drops: "Packets that no QP accepted, or for which there was no room.",
        Some(Count("dropped")),
        metric(
            "node_infiniband_port_discards_received_total",
            "Number of inbound packets discarded by the port because the port is down or congested",
        );
    IcrcErrors icrc_errors: "Damaged packets: their ICRC was wrong.",
        Some(Count("bad ICRC")),
        metric(
            "node_infiniband_port_errors_received_total",
            "Number of packets containing an error that were received on this port",
        );
    Strangers strangers: "Packets for a QP that did not come from its peer.",
        Some(Count("unknown source")),
        metric(
            "unbroken_nic_unknown_source_packets_total",
            "Packets for a QP that did not come from its peer, and were dropped.",
        );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_what_is_written_under_its_field() {
        let counters = NicCounters::from_fn(99, |of| 1 + of as u64);
        let json = serde_json::to_value(counters).unwrap();
        for (place, counter) in NIC_COUNTERS.iter().enumerate() {
            assert_eq!(counter.of as usize, place);
            assert_eq!(json[counter.field], 1 + place);
            assert_eq!(counters.get(counter.of), 1 + place as u64);
        }
        assert_eq!(json["last_data_rx_us"], 99);
        assert_eq!(json.as_object().unwrap().len(), NIC_COUNTERS.len() + 1);
    }

    #[test]
    fn a_metric_of_two_counters_has_two_directions() {
        let all = || NIC_COUNTERS.iter().filter_map(|counter| counter.metric);
        for one in all() {
            let same: Vec<_> = all().filter(|other| other.name == one.name).collect();
            assert!(same.len() == 1 || same[0].direction != same[1].direction, "{same:?}");
            assert!(same.iter().all(|other| other.help == one.help), "{same:?}");
        }
    }
}
