//! Switches as spans of OpenTelemetry, in the JSON of its protocol (OTLP over HTTP).
//!
//! Each switch is a trace of its own: a span from the failure to the first good completion on the
//! new path, and within it one for the time to notice and one for the way over. A queue pair that
//! failed for good is a span with an error.

use serde_json::{json, Value};
use unbroken_events::{Event, Switch, What};

use crate::totals::kind_name;

/// OTLP's kind of a span that is neither a request nor its answer.
const INTERNAL: u8 = 1;
/// OTLP's status of a span that failed.
const ERROR: u8 = 2;

/// The spans of an event; none for events that are no switch and no failure.
pub fn spans(event: &Event) -> Vec<Value> {
    match &event.what {
        What::Switch(switch) => switch_spans(event, switch),
        What::GiveUp { host, qp, why, .. } => {
            let trace = id(&[host, &event.pid.to_string(), &qp.to_string(), "give-up"]);
            let attributes = [("host", host.as_str()), ("reason", why)];
            let mut span = span(&trace, "", "give up", [event.wall_us; 2], &attributes);
            span["status"] = json!({ "code": ERROR, "message": why });
            vec![span]
        }
        _ => Vec::new(),
    }
}

/// What is posted to a collector for these spans.
pub fn request(spans: &[Value], host_name: &str) -> Value {
    let resource = [
        ("service.name", "unbroken"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("host.name", host_name),
    ];
    json!({ "resourceSpans": [{
        "resource": { "attributes": attributes(&resource) },
        "scopeSpans": [{ "scope": { "name": "unbroken" }, "spans": spans }],
    }]})
}

fn switch_spans(event: &Event, s: &Switch) -> Vec<Value> {
    let wall_us = |at_us: u64| event.wall_us.saturating_sub(event.time_us.saturating_sub(at_us));
    let detected_us = wall_us(s.detected_at_us);
    let began_us = detected_us.saturating_sub(s.detect_us.unwrap_or(0));
    let done_us = detected_us.saturating_add(s.switch_us);
    let (pid, qp, epoch) = (event.pid.to_string(), format!("{:#x}", s.qp), s.epoch.to_string());
    let trace = id(&[&s.host, &pid, &qp, &epoch, &s.detected_at_us.to_string()]);
    let replayed = s.replayed.to_string();
    let said = [
        ("host", s.host.as_str()),
        ("process.pid", &pid),
        ("qp", &qp),
        ("from", &s.from),
        ("to", &s.to),
        ("kind", kind_name(s.kind)),
        ("reason", &s.reason),
        ("epoch", &epoch),
        ("replayed", &replayed),
    ];
    let whole = span(&trace, "", "switch", [began_us, done_us], &said);
    let parent = whole["spanId"].as_str().unwrap_or_default().to_owned();
    let mut all = vec![whole];
    if s.detect_us.is_some() {
        all.push(span(&trace, &parent, "detect", [began_us, detected_us], &[]));
    }
    all.push(span(&trace, &parent, "move", [detected_us, done_us], &[]));
    all
}

fn span(
    trace: &str,
    parent: &str,
    name: &str,
    [from_us, to_us]: [u64; 2],
    said: &[(&str, &str)],
) -> Value {
    let nanos = |us: u64| us.saturating_mul(1_000).to_string();
    json!({
        "traceId": trace,
        "spanId": &id(&[trace, name])[..16],
        "parentSpanId": parent,
        "name": name,
        "kind": INTERNAL,
        "startTimeUnixNano": nanos(from_us),
        "endTimeUnixNano": nanos(to_us),
        "attributes": attributes(said),
    })
}

fn attributes(said: &[(&str, &str)]) -> Vec<Value> {
    said.iter()
        .map(|(key, value)| json!({ "key": key, "value": { "stringValue": value } }))
        .collect()
}

/// 16 bytes in hexadecimal digits that are the same for the same words, so that an event that is
/// sent twice is one trace: FNV-1a of 64 bits, twice.
fn id(words: &[&str]) -> String {
    let hash = |seed: u64| {
        let bytes = words.iter().flat_map(|word| word.bytes().chain([0]));
        bytes.fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    };
    // All zeros are no id.
    format!("{:016x}{:016x}", hash(0xcbf2_9ce4_8422_2325) | 1, hash(0x9e37_79b9_7f4a_7c15) | 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_events::SwitchKind;

    fn switch(detect_us: Option<u64>) -> Event {
        let switch = Switch {
            kind: SwitchKind::Passive,
            host: "a".into(),
            qp: 0x102,
            from: "a/0-b/0".into(),
            to: "a/1-b/1".into(),
            epoch: 1,
            reason: "device-fatal".into(),
            on_path_since_us: 0,
            detected_at_us: 600,
            detect_us,
            switch_us: 400,
            replayed: 3,
        };
        Event { what: What::Switch(switch), time_us: 1_000, wall_us: 5_000_000, pid: 7 }
    }

    #[test]
    fn a_switch_is_a_span_with_its_parts() {
        let all = spans(&switch(Some(100)));
        let times: Vec<_> = all
            .iter()
            .map(|s| [&s["name"], &s["startTimeUnixNano"], &s["endTimeUnixNano"]])
            .collect();
        assert_eq!(times[0], ["switch", "4999500000", "5000000000"]);
        assert_eq!(times[1], ["detect", "4999500000", "4999600000"]);
        assert_eq!(times[2], ["move", "4999600000", "5000000000"]);
        assert!(all.iter().all(|s| s["traceId"] == all[0]["traceId"]));
        assert!(all[1..].iter().all(|s| s["parentSpanId"] == all[0]["spanId"]));
        assert_eq!(all[0]["traceId"].as_str().unwrap().len(), 32);
        assert_eq!(all[0]["spanId"].as_str().unwrap().len(), 16);
        assert_eq!(spans(&switch(Some(100))), all, "the same again is the same trace");
        assert_eq!(spans(&switch(None)).len(), 2, "what is not known is not told");
    }

    #[test]
    fn a_failure_is_an_error_and_others_are_none() {
        let why = "no path".to_owned();
        let event = Event::now(What::GiveUp { host: "a".into(), qp: 2, why, of_programs: false });
        assert_eq!(spans(&event)[0]["status"]["code"], ERROR);
        assert!(spans(&Event::now(What::PortDown { nic: "a/0".into() })).is_empty());
        let request = request(&spans(&event), "node1");
        let scope = &request["resourceSpans"][0]["scopeSpans"][0];
        assert_eq!(scope["spans"].as_array().unwrap().len(), 1);
    }
}
