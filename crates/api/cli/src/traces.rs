//! `unbroken traces`: sends switches to a collector of OpenTelemetry.

use std::collections::VecDeque;
use std::time::Duration;

use serde_json::Value;
use unbroken_events::EventTail;
use unbroken_observe::traces::{request, spans};

use crate::output::{Failure, Result};
use crate::place::Place;

/// Spans that are sent at once, and those that wait for a collector that does not answer.
const BATCH: usize = 512;
const MAX_WAITING: usize = 16_384;
/// A collector has so long to answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How often the log is looked at, and how long is waited after a failure, at most.
const INTERVAL: Duration = Duration::from_millis(500);
const MAX_PAUSE: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub(crate) struct TracesArgs {
    /// The collector's address for OTLP over HTTP, as http://127.0.0.1:4318
    #[arg(long, value_name = "URL", value_parser = endpoint)]
    otlp: String,
    /// Send what is in the log and end; an error if it is not taken
    #[arg(long)]
    once: bool,
}

pub(crate) const AFTER: &str = "Examples:
  unbroken traces --otlp http://127.0.0.1:4318
  unbroken traces --otlp http://127.0.0.1:4318 --once

Each switch is a trace: a span from the failure to the first good completion on
the new path, with parts for the time to notice and the way over. An event has
the same trace id however often it is sent.";

/// The address for traces of a collector.
fn endpoint(text: &str) -> std::result::Result<String, String> {
    let Some(rest) = text.strip_prefix("http://").filter(|rest| !rest.is_empty()) else {
        let why = "right is http://HOST:PORT; for TLS, send to a collector on this host";
        return Err(why.into());
    };
    let base = rest.trim_end_matches('/');
    Ok(match base.ends_with("/v1/traces") {
        true => format!("http://{base}"),
        false => format!("http://{base}/v1/traces"),
    })
}

pub(crate) fn run(place: &Place, args: &TracesArgs) -> Result {
    let runtime = if args.once { place.look()? } else { Some(place.wait()?) };
    let Some(runtime) = runtime else { return Ok(()) };
    let agent: ureq::Agent =
        ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).max_redirects(0).build().into();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut tail = EventTail::open(&runtime);
    let (mut waiting, mut pause) = (VecDeque::new(), INTERVAL);
    loop {
        let events = tail.poll().map_err(|e| Failure::io(runtime.events().display(), e))?;
        waiting.extend(events.iter().flat_map(spans));
        if waiting.len() > MAX_WAITING {
            let beyond = waiting.len() - MAX_WAITING;
            waiting.drain(..beyond);
            eprintln!("unbroken: {beyond} spans were given up: the collector does not take them");
        }
        match send(&agent, &args.otlp, &host, &mut waiting) {
            Ok(()) => pause = INTERVAL,
            Err(why) if args.once => return Err(Failure::Text(why)),
            Err(why) => {
                eprintln!("unbroken: {why}");
                pause = (pause * 2).min(MAX_PAUSE);
            }
        }
        if args.once {
            return Ok(());
        }
        std::thread::sleep(pause);
    }
}

/// Sends all that waits; what was taken waits no longer.
fn send(
    agent: &ureq::Agent,
    url: &str,
    host: &str,
    waiting: &mut VecDeque<Value>,
) -> std::result::Result<(), String> {
    while !waiting.is_empty() {
        let some = waiting.len().min(BATCH);
        let body = request(&waiting.make_contiguous()[..some], host).to_string();
        agent
            .post(url)
            .header("content-type", "application/json")
            .send(body)
            .map_err(|e| format!("{url}: {e}"))?;
        waiting.drain(..some);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_a_collector_is_completed() {
        for text in ["http://h:4318", "http://h:4318/", "http://h:4318/v1/traces"] {
            assert_eq!(endpoint(text).unwrap(), "http://h:4318/v1/traces");
        }
        for wrong in ["h:4318", "https://h:4318", "http://", "grpc://h"] {
            assert!(endpoint(wrong).unwrap_err().contains("http://HOST:PORT"), "{wrong}");
        }
    }
}
