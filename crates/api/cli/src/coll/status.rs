//! `unbroken coll status`: communicators, as their ranks see them.

use unbroken_coll::{snapshots, Measured, Snapshot};
use unbroken_fabric::Runtime;

use super::status_folder;
use crate::output::{print, print_json, Failure, Result};

/// Shows all communicators of the runtime folder.
pub(crate) fn status(runtime: Option<&Runtime>, json: bool) -> Result {
    let all = runtime.map_or(Ok(Vec::new()), |runtime| snapshots(&status_folder(runtime)));
    let all = all.map_err(|e| Failure::Text(e.to_string()))?;
    if json {
        return print_json(&all);
    }
    if all.is_empty() {
        return print("no communicator runs here\n");
    }
    all.iter().try_for_each(|snapshot| print(&text(snapshot)))
}

fn text(s: &Snapshot) -> String {
    let c = &s.counters;
    let mut out = format!(
        "pid {} rank {} of {}, host {}: {} operations, {} paths failed, {} streams moved, {} \
         frames sent again\n",
        s.pid,
        s.rank,
        s.ranks,
        s.hosts.get(s.rank).copied().unwrap_or_default(),
        c.operations,
        c.failures,
        c.moves,
        c.again
    );
    if !s.shapes.is_empty() {
        let of = |(shape, count): (&String, &u64)| format!("{shape} {count}");
        let shapes: Vec<String> = s.shapes.iter().map(of).collect();
        out += &format!("  operations by shape: {}\n", shapes.join(", "));
    }
    let rails = s.sent_bytes.len().saturating_sub(1);
    let all = s.sent_bytes.iter().take(rails).sum::<u64>().max(1);
    for (rail, bytes) in s.sent_bytes.iter().enumerate() {
        let (name, share) = if rail == rails {
            ("memory".to_string(), String::new())
        } else {
            (
                format!("NIC {rail}"),
                format!(", {:.1} % of what NICs carry", *bytes as f64 * 100.0 / all as f64),
            )
        };
        out += &format!("  {name}: {:.1} MB sent{share}\n", *bytes as f64 / 1e6);
    }
    if !s.down.is_empty() {
        out += &format!("  planned without host/NIC {}\n", s.down.join(", "));
    }
    if s.measured.nic_mbps > 0 {
        let Measured { nic_mbps, alpha_us, .. } = &s.measured;
        let slow = s.measured.slow_in_words();
        let slow = slow.map_or(String::new(), |slow| format!("; slow: {slow}"));
        out +=
            &format!("  measured: NICs of {nic_mbps} Mbit/s, {alpha_us:.1} us a message{slow}\n");
    }
    for d in &s.done {
        out += &format!(
            "  {} of {} bytes: {:.0} us (estimate {:.0}, least {:.0}), {} times; {}\n",
            d.operation, d.bytes, d.took_us, d.estimate_us, d.least_us, d.count, d.plan
        );
    }
    for away in &s.away {
        out += &format!("  stream {} to rank {}: {}\n", away.stream, away.to, away.over_in_words());
    }
    for happening in &s.happened {
        out += &format!("  {:10.3} s  {}\n", happening.after_s, happening.what);
    }
    if let Some(why) = &s.broken {
        out += &format!("  broken: {why}\n");
    }
    out
}
