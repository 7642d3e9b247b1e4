//! The verdict and its figures.

use serde::Serialize;

use super::screen::Screen;
use super::stream::{moved_us, Stream, SHARE_KEPT};
use super::verify::Verified;
use super::FAULT;

/// `result.json`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// `survived` or `failed`.
    pub(crate) verdict: &'static str,
    /// Why it failed; empty where it survived.
    pub(crate) reasons: Vec<String>,
    /// The program.
    pub(crate) command: String,
    /// The fault.
    pub(crate) fault: &'static str,
    /// The path before, `a/0-b/0`.
    pub(crate) from: Option<String>,
    /// The path after.
    pub(crate) to: Option<String>,
    /// The path on which the run ended: another one where there was a further switch.
    pub(crate) last_path: Option<String>,
    /// From the fault to the first error or event, at the end whose NIC died.
    pub(crate) detect_us: Option<u64>,
    /// From there to the first good completion on the new path.
    pub(crate) switch_us: Option<u64>,
    /// WRs that were sent again.
    pub(crate) replayed: Option<u64>,
    /// The longest interval between packets with data at the receiver around the fault; null: none
    /// was recorded.
    pub(crate) gap_ms: Option<f64>,
    /// The longest such interval while all was well; null: none was recorded.
    pub(crate) gap_before_ms: Option<f64>,
    /// The rate on the first NIC before the fault.
    pub(crate) before_gbps: f64,
    /// The rate on the backup NICs after it, up to the way back.
    pub(crate) after_gbps: f64,
    /// The way back; null: there was none.
    pub(crate) back: Option<Back>,
    /// What the program itself reports for the whole run.
    pub(crate) reported_gbps: Option<f64>,
    /// Messages that the verifying program checked, under the same fault.
    pub(crate) verified_messages: u64,
    /// Their bytes.
    pub(crate) verified_bytes: u64,
    /// The run without failover.
    pub(crate) without: Without,
}

/// The planned switch back to the first path.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Back {
    /// The path that it leads to.
    pub(crate) path: String,
    /// When the NIC was healed, in seconds since the first data.
    pub(crate) healed_s: f64,
    /// When the stream moved on that path again.
    pub(crate) at_s: f64,
    /// How long that took, from the first post that was held.
    pub(crate) switch_us: u64,
    /// WRs that were sent again: none.
    pub(crate) replayed: u64,
    /// The longest interval between packets with data at the receiver meanwhile; null: none was
    /// recorded.
    pub(crate) gap_ms: Option<f64>,
    /// The rate on the first NIC afterwards.
    pub(crate) gbps: f64,
}

impl Back {
    fn of(stream: &Stream) -> Option<Back> {
        let (switch, healed_us) = (stream.way_back()?, stream.healed_us?);
        Some(Back {
            path: switch.to.clone(),
            healed_s: rounded(stream.seconds(healed_us)),
            at_s: rounded(stream.seconds(moved_us(switch))),
            switch_us: switch.switch_us,
            replayed: switch.replayed,
            gap_ms: stream.back_gap_ms(),
            gbps: rounded(stream.back_gbps()),
        })
    }

    /// What is wrong with it, if the first NIC carried `before_gbps` before the fault.
    fn wrong(back: Option<&Back>, before_gbps: f64) -> Vec<String> {
        let Some(back) = back else {
            return vec!["the stream did not go back to the NIC that was healed".into()];
        };
        let mut wrong = Vec::new();
        if back.replayed > 0 {
            wrong.push(format!("{} WRs were sent again on the way back", back.replayed));
        }
        if back.gbps < SHARE_KEPT * before_gbps {
            wrong.push(format!(
                "the NIC that was healed carried {} Gbit/s after {before_gbps} before",
                back.gbps
            ));
        }
        wrong
    }

    fn tell(&self, screen: &Screen) {
        let Back { at_s, healed_s, switch_us, .. } = self;
        screen.say(&format!(
            "   back on {}     {:.2} s after the NIC was healed, by a planned switch of \
             {switch_us} us",
            self.path,
            at_s - healed_s
        ));
        screen.say(&format!("   gap on the way back {}", ms(self.gap_ms)));
    }
}

/// How the program ends without failover.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Without {
    /// The client's exit status; null: it hung.
    pub(crate) exit_status: Option<i32>,
    /// What it said.
    pub(crate) error: String,
    /// Its command.
    pub(crate) command: String,
}

impl Report {
    /// Judges what was seen.
    pub(crate) fn new(with: &Stream, without: &Stream, verified: &Verified) -> Report {
        let switch = with.switch();
        let mut report = Report {
            verdict: "survived",
            reasons: Vec::new(),
            command: with.command.clone(),
            fault: FAULT,
            from: switch.map(|s| s.from.clone()),
            to: switch.map(|s| s.to.clone()),
            last_path: with.last_path().map(String::from),
            detect_us: switch.and_then(|s| s.detect_us),
            switch_us: switch.map(|s| s.switch_us),
            replayed: switch.map(|s| s.replayed),
            gap_ms: with.gap_ms(),
            gap_before_ms: with.gap_before_ms(),
            before_gbps: rounded(with.before_gbps()),
            after_gbps: rounded(with.after_gbps()),
            back: Back::of(with),
            reported_gbps: with.reported_gbps,
            verified_messages: verified.messages,
            verified_bytes: verified.bytes,
            without: Without {
                exit_status: without.client.status,
                error: without.client.error.clone(),
                command: without.command.clone(),
            },
        };
        for (end, name) in [(&with.client, "client"), (&with.server, "server")] {
            match end.status {
                Some(0) => {}
                Some(status) => {
                    report.reasons.push(format!("the {name} ended with status {status}"))
                }
                None => report.reasons.push(format!("the {name} did not end by itself")),
            }
        }
        if switch.is_none() {
            report.reasons.push("there is no switch in the event log".into());
        }
        if !with.came_back() {
            report.reasons.push("data did not come back after the fault".into());
        } else if with.gap_ms().is_none() {
            report.reasons.push(
                "the receiver recorded no gap around the fault, though traffic crossed it".into(),
            );
        }
        if with.is_slow() {
            let (after, before) = (report.after_gbps, report.before_gbps);
            report.reasons.push(format!("the backup carried {after} Gbit/s after {before} before"));
        }
        report.reasons.extend(Back::wrong(report.back.as_ref(), report.before_gbps));
        report.reasons.extend(verified.wrong.clone().map(|wrong| format!("not verified: {wrong}")));
        if !report.reasons.is_empty() {
            report.verdict = "failed";
        }
        report
    }

    /// Whether the run survived.
    pub(crate) fn survived(&self) -> bool {
        self.reasons.is_empty()
    }

    /// Tells the verdict.
    pub(crate) fn tell(&self, screen: &Screen) {
        let us = |us: Option<u64>| us.map_or("-".to_string(), |us| format!("{us} us"));
        screen.title(&format!("verdict: {}", self.verdict));
        let path = |path: &Option<String>| path.clone().unwrap_or("-".into());
        let further = match &self.last_path {
            last if *last == self.to => String::new(),
            last if *last == self.from => ", and back".into(),
            last => format!(", then {}", path(last)),
        };
        screen.say(&format!(
            "   path                {} -> {}{further}",
            path(&self.from),
            path(&self.to)
        ));
        screen.say(&format!("   noticed after       {}", us(self.detect_us)));
        screen.say(&format!("   switch took         {}", us(self.switch_us)));
        screen.say(&format!(
            "   gap at the receiver {} (longest while all was well: {})",
            ms(self.gap_ms),
            ms(self.gap_before_ms)
        ));
        if let Some(back) = &self.back {
            back.tell(screen);
        }
        let back = self
            .back
            .as_ref()
            .map_or(String::new(), |b| format!(", {:.1} Gbit/s back on the first NIC", b.gbps));
        screen.say(&format!(
            "   throughput          {:.1} Gbit/s before, {:.1} Gbit/s on the backup{back}",
            self.before_gbps, self.after_gbps
        ));
        screen.say(&format!(
            "   verified            {} messages, {} bytes",
            self.verified_messages, self.verified_bytes
        ));
        let status = self.without.exit_status.map_or("none (it hung)".into(), |s| s.to_string());
        let error = self.without.error.lines().next().unwrap_or("no error text");
        screen.say(&format!("   without failover    exit status {status}: {error}"));
        for reason in &self.reasons {
            screen.say(&format!("   FAILED: {reason}"));
        }
    }
}

fn ms(ms: Option<f64>) -> String {
    ms.map_or("none recorded".to_string(), |ms| format!("{ms:.1} ms"))
}

/// Two digits behind the point.
fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_back_is_required_and_has_to_carry() {
        let back = Back {
            path: "a/0-b/0".into(),
            healed_s: 6.0,
            at_s: 7.1,
            switch_us: 600,
            replayed: 0,
            gap_ms: None,
            gbps: 20.0,
        };
        let wrong = |back: Option<&Back>| Back::wrong(back, 20.0).len();
        assert_eq!((wrong(Some(&back)), wrong(None)), (0, 1));
        assert_eq!(wrong(Some(&Back { replayed: 1, ..back.clone() })), 1);
        assert_eq!(wrong(Some(&Back { gbps: 3.9, ..back.clone() })), 1);
        assert_eq!(wrong(Some(&Back { gbps: 4.1, ..back })), 0);
    }
}
