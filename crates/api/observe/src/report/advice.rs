//! What to do about what happened.

use std::collections::BTreeMap;
use unbroken_units::text::counted;

use super::Report;

/// So often a NIC may fail before it is said to flap.
const FLAPS: usize = 3;
/// A time to detect that is worth a word, in µs.
const SLOW_US: u64 = 1_000_000;
/// Reasons that are told.
const MAX_REASONS: usize = 5;

pub(super) fn advice(report: &Report) -> Vec<String> {
    let mut advice = Vec::new();
    let mut by_nic: BTreeMap<&str, (usize, bool)> = BTreeMap::new();
    for incident in report.incidents.iter().filter(|i| i.nics.len() == 1) {
        let (count, is_open) = by_nic.entry(&incident.nics[0]).or_default();
        *count += 1;
        *is_open = incident.over_us == 0;
    }
    for (nic, (count, is_open)) in by_nic {
        if count >= FLAPS {
            advice.push(format!(
                "{nic} failed {count} times. Drain it (unbroken nic drain {nic}) and look at \
                 cable, transceiver and switch port before it is used again."
            ));
        } else if is_open {
            advice.push(format!(
                "The logs do not say that {nic} came back. Repair it; queue pairs return to it by \
                 themselves, and until then one failure less can be survived."
            ));
        }
    }
    let failed: u64 = report.jobs.iter().map(|job| job.failed).sum();
    if failed > 0 {
        advice.push(format!(
            "{} failed for good, and the programs got the error. The reasons are with the failures \
             above; docs/guide/failover.md says what can be survived.",
            counted(failed, "queue pair", "queue pairs")
        ));
    }
    let mut reasons: Vec<_> = report.unprotected.iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (why, count) in reasons.into_iter().take(MAX_REASONS) {
        advice.push(format!(
            "{}: {why}. `unbroken doctor` says how to mend that, or docs/reference/cli.md, \
             Troubleshooting.",
            match count {
                1 => "1 queue pair was connected without a backup".into(),
                _ => format!("{count} queue pairs were connected without a backup"),
            }
        ));
    }
    let slow = report.incidents.iter().map(|i| i.detect.max_us).max().unwrap_or(0);
    if slow >= SLOW_US {
        advice.push(format!(
            "It took up to {:.1} s to notice a failure. On devices that do not tell of it that is \
             the retry time of the queue pair: a smaller timeout or retry count shortens it.",
            slow as f64 / 1e6
        ));
    }
    if advice.is_empty() {
        advice.push(match report.incidents.is_empty() {
            true => "Nothing failed.".into(),
            false if report.jobs.iter().all(|job| job.passive == 0) => {
                "No queue pair switched: look whether the programs ran, and whether `unbroken \
                 status` calls their queue pairs protected."
                    .into()
            }
            false => "Nothing needs to be done: all that failed was survived and is back.".into(),
        });
    }
    advice
}
