//! `ib_write_bw` between two hosts while a NIC dies, and, with failover, is healed. Where perftest
//! is not installed, the verifying program takes its place.

use std::path::Path;
use std::time::Duration;

use unbroken_events::{EventTail, Switch, SwitchKind, What};
use unbroken_fabric::now_us;
use unbroken_testkit::{bandwidth_gbps, Lab, Pair, Running, Sample, Spec, TrialError, Watch};

use super::screen::{bar, Screen};
use super::verify;
use crate::output::{Failure, Result};

/// The fault of all parts.
pub(crate) const FAULT: &str = "nic a/0 dead";
/// The NIC that it is about.
const NIC: &str = "nic a/0";
/// The program whose NIC dies.
pub(crate) const PERFTEST: &str = "ib_write_bw";
/// Size of a message in bytes.
const MESSAGE_BYTES: u64 = 65_536;
/// Seconds that perftest sends.
const SECONDS: u64 = 12;
/// The same in the run without failover.
const SECONDS_SHORT: u64 = 8;
/// From the first traffic to the fault.
const HEALTHY_US: u64 = 3_000_000;
/// From the fault until the NIC is healed. The stream goes back a second after that, and has some
/// seconds left on a machine that is busy.
const DEAD_US: u64 = 3_000_000;
/// The same in the run without failover.
const HEALTHY_SHORT_US: u64 = 1_500_000;
/// The rate before is taken from so long after the first traffic.
const RAMP_US: u64 = 300_000;
/// The rate after is taken from so long after the fault, and after the way back; a gap that begins
/// until then is the fault's.
const SETTLE_US: u64 = 200_000;
/// The backup, and afterwards the first NIC, must carry this share of the rate from before the
/// fault. (What else the machine does can halve a rate at any time.)
pub(crate) const SHARE_KEPT: f64 = 0.2;
/// Payload that shows that the test itself, not its set-up, is on.
const TRAFFIC_BYTES: u64 = 8 << 20;
/// From one sample to the next.
const SAMPLE: Duration = Duration::from_millis(10);
/// A pair that has not ended so long after the fault hangs.
const HANG_US: u64 = 20_000_000;
/// NICs of each host: the default one and the backups.
pub(crate) const NICS: u8 = 4;

/// How an end of the pair ended.
#[derive(Clone, Debug)]
pub(crate) struct End {
    /// Its exit status; None: it did not end, or a signal ended it.
    pub(crate) status: Option<i32>,
    /// The lines of its output that speak of an error.
    pub(crate) error: String,
}

impl End {
    fn of(running: &mut Running) -> End {
        let status = running.ended().and_then(|s| s.code());
        let error = if status == Some(0) { String::new() } else { error_lines(&running.output()) };
        End { status, error }
    }
}

/// What a run showed. Times are of [`now_us`].
pub(crate) struct Stream {
    /// The client's command line.
    pub(crate) command: String,
    /// The client.
    pub(crate) client: End,
    /// The server.
    pub(crate) server: End,
    /// The counters of host b.
    pub(crate) watch: Watch,
    /// When traffic began.
    pub(crate) begin_us: u64,
    /// When the NIC died.
    pub(crate) fault_us: u64,
    /// When it was healed; None: it was not.
    pub(crate) healed_us: Option<u64>,
    /// The switches that the log tells.
    pub(crate) switches: Vec<Switch>,
    /// The average that the program itself reports, in Gbit/s.
    pub(crate) reported_gbps: Option<f64>,
}

impl Stream {
    /// Runs it, and tells it. The program is [`PERFTEST`], or the verifier.
    pub(crate) fn play(
        unbroken: &Path,
        verifier: Option<&Path>,
        failover: bool,
        screen: &Screen,
    ) -> Result<Stream> {
        let lab = Lab::new(unbroken).map_err(told)?;
        let seconds = if failover { SECONDS } else { SECONDS_SHORT };
        let spec = match verifier {
            None => {
                let args = format!("-d unb0 -F -s {MESSAGE_BYTES} -D {seconds} --report_gbits");
                Spec { failover, ..Spec::new(PERFTEST, &args) }
            }
            Some(program) => Spec { failover, ..verify::spec(program, seconds) },
        };
        let command = match verifier {
            None => spec.shown(),
            Some(_) => spec.shown().replace(" 127.0.0.1", " --connect 127.0.0.1:PORT"),
        };
        screen.say(&format!("   $ {command}"));
        let mut watch = Watch::new(&lab, &spec.server, NICS).map_err(told)?;
        let mut pair = match verifier {
            None => Pair::start(&lab, &spec).map_err(told)?,
            Some(_) => Pair::start_as(&lab, &spec, verify::ends).map_err(told)?,
        };
        let limit = Duration::from_secs(15);
        pair.client
            .wait_until("data arrives at NIC b/0", limit, || {
                watch.sample().rx_payload_bytes[0] > TRAFFIC_BYTES
            })
            .map_err(told)?;
        let mut stream = Stream {
            command,
            client: End { status: None, error: String::new() },
            server: End { status: None, error: String::new() },
            watch,
            begin_us: now_us(),
            fault_us: 0,
            healed_us: None,
            switches: Vec::new(),
            reported_gbps: None,
        };
        stream.follow(&lab, &mut pair, failover, screen)?;
        stream.end(pair, screen);
        Ok(stream)
    }

    /// Samples until both ends are gone; breaks the NIC on the way, and heals it.
    fn follow(&mut self, lab: &Lab, pair: &mut Pair, failover: bool, screen: &Screen) -> Result {
        let mut tail = EventTail::open(lab.runtime());
        let (mut shown_us, mut looked_us) = (self.begin_us, 0);
        let mut full_gbps = 0.0_f64;
        loop {
            let now = self.watch.sample().time_us;
            self.act(lab, now, failover, screen)?;
            if now >= looked_us + 50_000 {
                looked_us = now;
                self.watch.collect_gaps(lab, pair.server.pid());
                self.tell_events(&mut tail, screen);
            }
            if now >= shown_us + screen.refresh_us() {
                let rate = |nic| self.watch.rate_gbps(nic, shown_us, now);
                let rates: Vec<(usize, f64)> =
                    self.nics_used().map(|nic| (nic, rate(nic))).collect();
                full_gbps = rates.iter().fold(full_gbps, |full, (_, rate)| full.max(*rate));
                let bars: Vec<String> = rates
                    .iter()
                    .map(|(nic, rate)| bar(&format!("a/{nic}"), *rate, full_gbps))
                    .collect();
                screen.live(&format!("   {:5.2} s  {}", self.seconds(now), bars.join("   ")));
                shown_us = now;
            }
            let hangs = self.fault_us != 0 && now > self.fault_us + HANG_US;
            // Without the client the server of a broken run waits for ever; it gets a moment to say
            // so.
            let client = pair.client.ended();
            let server = pair.server.ended();
            if hangs || (client.is_some() && (server.is_some() || !failover)) {
                self.watch.collect_gaps(lab, pair.server.pid());
                self.tell_events(&mut tail, screen);
                return Ok(());
            }
            std::thread::sleep(SAMPLE);
        }
    }

    /// Breaks the NIC when that is due, and heals it where the stream has survived.
    fn act(&mut self, lab: &Lab, now: u64, failover: bool, screen: &Screen) -> Result {
        let healthy_us = if failover { HEALTHY_US } else { HEALTHY_SHORT_US };
        if self.fault_us == 0 && now >= self.begin_us + healthy_us {
            self.fault_us = lab.fabric().set(&FAULT.parse()?, None)?.from_us;
            screen.say(&format!("   {:5.2} s  fault: {FAULT}", self.seconds(self.fault_us)));
        }
        let over = self.fault_us != 0 && now >= self.fault_us + DEAD_US;
        if failover && over && self.healed_us.is_none() {
            lab.fabric().clear(Some(&NIC.parse()?))?;
            let healed_us = now_us();
            self.healed_us = Some(healed_us);
            screen.say(&format!("   {:5.2} s  healed: {NIC}", self.seconds(healed_us)));
        }
        Ok(())
    }

    fn tell_events(&mut self, tail: &mut EventTail, screen: &Screen) {
        // A log that cannot be read now is read at the next look.
        for event in tail.poll().unwrap_or_default() {
            if let What::Switch(s) = event.what {
                screen.say(&format!(
                    "   {:5.2} s  {}",
                    self.seconds(event.time_us),
                    switch_line(&s)
                ));
                self.switches.push(s);
            }
        }
    }

    fn end(&mut self, mut pair: Pair, screen: &Screen) {
        let _ = pair.server.wait(Duration::from_secs(2));
        (self.client, self.server) = (End::of(&mut pair.client), End::of(&mut pair.server));
        self.reported_gbps = bandwidth_gbps(&pair.client.output(), MESSAGE_BYTES);
        for (end, name) in [(&self.client, "client"), (&self.server, "server")] {
            let status =
                end.status.map_or("none: it hung, or a signal ended it".into(), |s| s.to_string());
            screen.say(&format!("   {name}: exit status {status}"));
            for line in end.error.lines() {
                screen.say(&format!("      {line}"));
            }
        }
    }

    /// Seconds since the first data.
    pub(crate) fn seconds(&self, time_us: u64) -> f64 {
        (time_us as f64 - self.begin_us as f64) / 1e6
    }

    /// When the last data came.
    pub(crate) fn last_us(&self) -> u64 {
        self.watch.data_span_us().1
    }

    /// The rate on the first NIC before the fault, in Gbit/s.
    pub(crate) fn before_gbps(&self) -> f64 {
        self.watch.rate_gbps(0, self.begin_us + RAMP_US, self.fault_us)
    }

    /// The rate on the backup NICs from [`SETTLE_US`] after the fault to the way back, or the last
    /// data, in Gbit/s.
    pub(crate) fn after_gbps(&self) -> f64 {
        let from_us = self.fault_us + SETTLE_US;
        let to_us = self.way_back().map_or(self.last_us(), |back| back.detected_at_us);
        (1..usize::from(NICS)).map(|nic| self.watch.rate_gbps(nic, from_us, to_us)).sum()
    }

    /// The rate on the first NIC from [`SETTLE_US`] after the way back to the last data, in Gbit/s.
    pub(crate) fn back_gbps(&self) -> f64 {
        let back = self
            .way_back()
            .map(|back| self.watch.rate_gbps(0, moved_us(back) + SETTLE_US, self.last_us()));
        back.unwrap_or(0.0)
    }

    /// Whether the backup carried much less than the first NIC did, so that it does not count as
    /// carrying the traffic.
    pub(crate) fn is_slow(&self) -> bool {
        self.before_gbps() <= 0.0 || self.after_gbps() < SHARE_KEPT * self.before_gbps()
    }

    /// The NICs that a picture shows: the default one, its backup, and whatever else carried data.
    pub(crate) fn nics_used(&self) -> impl Iterator<Item = usize> + '_ {
        let (first, last) = (self.watch.samples().first(), self.watch.samples().last());
        let bytes =
            |sample: Option<&Sample>, nic: usize| sample.map_or(0, |s| s.rx_payload_bytes[nic]);
        (0..usize::from(NICS))
            .filter(move |nic| *nic < 2 || bytes(last, *nic) - bytes(first, *nic) > TRAFFIC_BYTES)
    }

    /// Whether data came again after the fault.
    pub(crate) fn came_back(&self) -> bool {
        self.last_us() > self.fault_us + SETTLE_US
    }

    /// The longest interval without data around the fault, in ms; None where none was recorded, or
    /// data did not come back.
    pub(crate) fn gap_ms(&self) -> Option<f64> {
        let gap = self.watch.longest_gap(self.fault_us, self.fault_us + SETTLE_US);
        gap.filter(|_| self.came_back()).map(|g| g.len_ms())
    }

    /// The longest interval without data on the way back, in ms; None: none was recorded.
    pub(crate) fn back_gap_ms(&self) -> Option<f64> {
        self.way_back()
            .and_then(|back| self.watch.longest_gap(back.detected_at_us, moved_us(back)))
            .map(|g| g.len_ms())
    }

    /// The longest interval in the healthy time before, in ms: what the machine itself does. None:
    /// none was recorded.
    pub(crate) fn gap_before_ms(&self) -> Option<f64> {
        let gap = self.watch.longest_gap(self.begin_us + RAMP_US, self.fault_us.saturating_sub(1));
        gap.filter(|g| g.start_us + g.len_us < self.fault_us).map(|g| g.len_ms())
    }

    /// The switch that answered the fault, at the end whose NIC died.
    pub(crate) fn switch(&self) -> Option<&Switch> {
        answer(&self.switches)
    }

    /// The planned switch of that end back to where it was before the fault.
    pub(crate) fn way_back(&self) -> Option<&Switch> {
        way_back(&self.switches)
    }

    /// The path on which it ended.
    pub(crate) fn last_path(&self) -> Option<&str> {
        self.switches.iter().rev().find(|s| s.host == "a").map(|s| s.to.as_str())
    }
}

/// When the stream moved on the new path.
pub(crate) fn moved_us(switch: &Switch) -> u64 {
    switch.detected_at_us + switch.switch_us
}

/// The switch that answered the fault, at the end whose NIC died.
fn answer(switches: &[Switch]) -> Option<&Switch> {
    switches
        .iter()
        .find(|s| s.host == "a" && s.kind == SwitchKind::Passive && s.detect_us.is_some())
}

/// The planned switch that brought that end back.
fn way_back(switches: &[Switch]) -> Option<&Switch> {
    let left = answer(switches)?;
    let back = |s: &&Switch| s.host == "a" && s.kind == SwitchKind::Planned && s.to == left.from;
    switches.iter().find(|s| back(s) && s.detected_at_us > moved_us(left))
}

/// A switch in the story.
fn switch_line(s: &Switch) -> String {
    let again = match s.replayed {
        0 => "nothing sent again".into(),
        n => format!("{n} WRs sent again"),
    };
    let path = format!("at host {}: {} -> {}", s.host, s.from, s.to);
    match s.kind {
        SwitchKind::Planned => {
            format!("back {path}, a planned switch ({}) of {} us, {again}", s.reason, s.switch_us)
        }
        SwitchKind::Passive => {
            let detect = s.detect_us.map_or("?".to_string(), |us| us.to_string());
            let reason = &s.reason;
            format!(
                "switch {path}, noticed after {detect} us ({reason}), first good completion {} us \
                 later, {again}",
                s.switch_us
            )
        }
    }
}

/// The lines of perftest's output that speak of an error.
fn error_lines(output: &str) -> String {
    let words = ["fail", "error", "couldn't", "problem", "syndrom", "unable"];
    let speaks = |line: &&str| words.iter().any(|w| line.to_lowercase().contains(w));
    let lines: Vec<&str> = output.lines().map(str::trim).filter(speaks).take(6).collect();
    lines.join("\n")
}

/// An error of a trial as one of this command.
pub(super) fn told(e: TrialError) -> Failure {
    Failure::Text(e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_found_in_the_output() {
        let output = "----\n Completion with error at client\n Failed status 12: wr_id 0 syndrom \
                      0x81\nscnt=1, ccnt=0\n";
        assert_eq!(
            error_lines(output),
            "Completion with error at client\nFailed status 12: wr_id 0 syndrom 0x81"
        );
        assert_eq!(error_lines("all is well\n"), "");
    }

    fn switch(
        kind: SwitchKind,
        host: &str,
        (from, to): (&str, &str),
        detected_at_us: u64,
    ) -> Switch {
        Switch {
            kind,
            host: host.into(),
            qp: 4,
            from: from.into(),
            to: to.into(),
            epoch: 1,
            reason: if kind == SwitchKind::Planned { "failback" } else { "device-fatal" }.into(),
            on_path_since_us: 0,
            detected_at_us,
            detect_us: (kind == SwitchKind::Passive).then_some(120),
            switch_us: 500,
            replayed: 0,
        }
    }

    #[test]
    fn the_way_back_is_the_planned_switch_to_the_first_path() {
        use SwitchKind::{Passive, Planned};
        let (there, on, home) =
            (("a/0-b/0", "a/1-b/1"), ("a/1-b/1", "a/2-b/2"), ("a/1-b/1", "a/0-b/0"));
        let mut switches = vec![
            switch(Passive, "b", ("b/0-a/0", "b/1-a/1"), 1_000),
            switch(Passive, "a", there, 1_010),
        ];
        assert_eq!((answer(&switches), way_back(&switches)), (Some(&switches[1]), None));
        // One by force is none, nor is one to elsewhere, nor that of the other end.
        switches.push(switch(Passive, "a", home, 2_000));
        switches.push(switch(Planned, "a", on, 3_000));
        switches.push(switch(Planned, "b", ("b/1-a/1", "b/0-a/0"), 4_000));
        assert_eq!(way_back(&switches), None);
        switches.push(switch(Planned, "a", home, 4_010));
        assert_eq!(way_back(&switches), Some(&switches[5]));
        assert_eq!(moved_us(&switches[5]), 4_510);
        assert_eq!(way_back(&switches[2..]), None, "it goes back from where a fault had it go");
    }

    #[test]
    fn the_story_tells_both_kinds_of_switch() {
        let line = switch_line(&switch(SwitchKind::Passive, "a", ("a/0-b/0", "a/1-b/1"), 0));
        assert_eq!(
            line,
            "switch at host a: a/0-b/0 -> a/1-b/1, noticed after 120 us (device-fatal), first good \
             completion 500 us later, nothing sent again"
        );
        let line = switch_line(&Switch {
            replayed: 2,
            ..switch(SwitchKind::Planned, "a", ("a/1-b/1", "a/0-b/0"), 0)
        });
        assert_eq!(
            line,
            "back at host a: a/1-b/1 -> a/0-b/0, a planned switch (failback) of 500 us, 2 WRs sent \
             again"
        );
    }
}
