//! `unbroken edge demo`: a lab, RDMA traffic through it, an uplink that falls silent, and where the
//! time went.
//!
//! Traffic takes one uplink, and may take the other at any time: on a busy machine BFD misses
//! packets. So the uplink is chosen before the cut, and what both have carried up to the cut is
//! compared afterwards. The outage is the interval without data that began with the cut and in
//! which the host noticed it, not the longest one: on a busy machine data pauses by itself. A run
//! whose traffic was elsewhere, or whose outage cannot be told from a pause, begins again.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{json, Value};
use unbroken_edge_daemon::command::run;
use unbroken_edge_daemon::lab::Lab;
use unbroken_edge_daemon::state::State;
use unbroken_fabric::{now_us, Gap, GapRecorder, NicPage, Runtime};

use crate::output::{self, print};

const PORT: &str = "18515";
const BIN_US: u64 = 10_000;
const BINS: usize = 60;
/// The fault comes after so many of them.
const BEFORE: usize = 15;
/// The name of the rules that make a link silent.
const TABLE: &str = "cut";

/// So many lines of a program that has failed are shown.
const LAST_LINES: usize = 5;
/// Runs, until one has cut the link that carried the traffic.
const TRIES: u32 = 4;
/// What changes a route works before it is heard of: so much after the end of an interval still
/// ended it.
const LATE_US: u64 = 2_000;
/// The share of what both uplinks have sent that is all of the traffic: what is missing are BFD and
/// BGP.
const ALL: f64 = 0.9;

/// A child that does not outlive its handle, and where its output goes.
struct Running(Child, PathBuf);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A lab that is taken down whatever happens.
struct Up<'a>(&'a Lab, &'a Path);

impl Drop for Up<'_> {
    fn drop(&mut self) {
        let _ = self.0.down(self.1);
    }
}

/// Runs it. What was measured is printed, as JSON with `json`.
pub(crate) fn demo(lab: &Lab, program: &Path, json: bool) -> output::Result {
    let tell = |text: &str| if json { Ok(()) } else { print(text) };
    tell("building two hosts, two ToR switches and their link, each with FRR of its own …\n")?;
    let up = Up(lab, program);
    lab.up(program)?;
    let result = shown(lab, program, &tell)?;
    drop(up);
    if json {
        return output::print_json(&result);
    }
    print(&draw(&result))
}

/// Cuts until it has struck.
fn shown(
    lab: &Lab,
    program: &Path,
    tell: &dyn Fn(&str) -> output::Result,
) -> output::Result<Value> {
    for _ in 0..TRIES {
        until(60, "EVPN has told each host of the other and both ways are there", || ready(lab))?;
        let (result, cut) = once(lab, program, tell)?;
        match (cut.has_struck(), result["outage_us"].is_u64()) {
            (true, true) => return Ok(result),
            (false, _) => tell(&format!(
                "the traffic was on the other uplink when this one was cut ({cut}): again\n"
            ))?,
            (true, false) => tell(
                "no interval without data began with the cut and lasted until it was noticed, so \
                 which outage is the fault's cannot be told: again\n",
            )?,
        }
        run(&["ip", "netns", "exec", &cut.tor, "nft", "delete", "table", "inet", TABLE])?;
    }
    Err(format!(
        "in {TRIES} runs the traffic was not on the uplink that was cut, or its outage could not \
         be told from other pauses; is the machine busy?"
    )
    .into())
}

/// One run: traffic, and a cut in the middle of it.
fn once(
    lab: &Lab,
    program: &Path,
    tell: &dyn Fn(&str) -> output::Result,
) -> output::Result<(Value, Cut)> {
    let folder = lab.folder.join("runtime");
    let runtime = Runtime::at(&folder)?;
    // What an earlier run has counted is none of this one's.
    let carried = || {
        NicPage::open(&runtime, [192, 168, 9, 2].into()).ok().map(|p| p.counters().rx_payload_bytes)
    };
    let before = carried().unwrap_or_default();
    let server = start(lab, program, &folder, 2, &[])?;
    until(20, "ib_write_bw listens", || {
        run(&["ip", "netns", "exec", &lab.host(2), "ss", "-Hltn"])
            .is_ok_and(|t| t.contains(&format!(":{PORT} ")))
    })?;
    let client = start(lab, program, &folder, 1, &["192.168.9.2"])?;
    until(20, "RDMA traffic flows", || carried().is_some_and(|bytes| bytes > before + 10_000_000))?;
    let uplink = busiest(&lab.host(1))?;
    tell(&format!(
        "ib_write_bw from host 1 to host 2 over the overlay; its packets leave by {uplink}\n"
    ))?;
    let bytes = || carried().unwrap_or_default();
    let result = cut(lab, &runtime, &uplink, server.0.id(), &bytes)?;
    finish(client)?;
    finish(server)?;
    Ok(result)
}

/// What both uplinks of the sender have sent, around a cut.
struct Cut {
    /// The switch behind the uplink that was cut.
    tor: String,
    /// By the one that was cut, and by the other, from the choice to the cut.
    before: [u64; 2],
    /// By the other, from the cut on.
    after: u64,
}

impl Cut {
    /// The share of what was sent that the uplink carried which was cut.
    fn share(&self) -> f64 {
        self.before[0] as f64 / (self.before[0] + self.before[1]).max(1) as f64
    }

    /// Whether the traffic was there, and was elsewhere afterwards.
    fn has_struck(&self) -> bool {
        self.share() >= ALL && self.after > self.before[0] / 4
    }
}

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "it carried {:.0} % before", self.share() * 100.0)
    }
}

fn until(seconds: u64, what: &str, condition: impl Fn() -> bool) -> Result<(), String> {
    let deadline = Instant::now() + Duration::from_secs(seconds);
    while !condition() {
        if Instant::now() > deadline {
            return Err(format!("{what}: not within {seconds} s"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn ready(lab: &Lab) -> bool {
    let learned = |host: u8, other: u8| {
        let table = run(&["bridge", "-n", &lab.host(host), "fdb", "show", "dev", "vni100"])
            .unwrap_or_default();
        let routes =
            run(&["ip", "-n", &lab.host(host), "route", "show", &format!("10.255.0.{other}")])
                .unwrap_or_default();
        table.contains(&format!("dst 10.255.0.{other} self extern_learn"))
            && table.contains(&format!("00:00:00:00:00:00 dst 10.255.0.{other} "))
            && routes.contains("dev p1")
            && routes.contains("dev p2")
    };
    learned(1, 2) && learned(2, 1)
}

fn start(
    lab: &Lab,
    program: &Path,
    runtime: &Path,
    host: u8,
    more: &[&str],
) -> Result<Running, String> {
    let address = format!("192.168.9.{host}");
    let log = lab.folder.join(format!("ib_write_bw-{host}.log"));
    let failed = |e: std::io::Error| format!("{}: {e}", log.display());
    let output = std::fs::File::create(&log).map_err(failed)?;
    let errors = output.try_clone().map_err(failed)?;
    Command::new("ip")
        .args(["netns", "exec", &lab.host(host)])
        .arg(program)
        .args([
            "run",
            "--nics",
            &address,
            "--",
            "ib_write_bw",
            "-d",
            "unb0",
            "-F",
            "-p",
            PORT,
            "-D",
            "5",
        ])
        .args(more)
        .env("UNBROKEN_RUNTIME", runtime)
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors)
        .spawn()
        .map(|child| Running(child, log))
        .map_err(|e| format!("ip netns exec: {e}"))
}

/// Waits for its end, which must be a good one.
fn finish(mut program: Running) -> Result<(), String> {
    let deadline = Instant::now() + Duration::from_secs(40);
    loop {
        match program.0.try_wait().map_err(|e| e.to_string())? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => {
                let said = std::fs::read_to_string(&program.1).unwrap_or_default();
                let lines: Vec<&str> = said.lines().filter(|l| !l.trim().is_empty()).collect();
                let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n  ");
                return Err(format!("ib_write_bw ended with an error ({status}):\n  {last}"));
            }
            None if Instant::now() > deadline => return Err("ib_write_bw does not end".into()),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// The uplink that a host sends most over.
fn busiest(host: &str) -> output::Result<String> {
    let before = sent(host, ["p1", "p2"])?;
    std::thread::sleep(Duration::from_millis(200));
    let after = sent(host, ["p1", "p2"])?;
    Ok(if after[0] - before[0] >= after[1] - before[1] { "p1" } else { "p2" }.into())
}

/// The bytes that a host has sent over its uplinks.
fn sent(host: &str, devices: [&str; 2]) -> output::Result<[u64; 2]> {
    let of = |device: &str| -> output::Result<u64> {
        let shown = run(&["ip", "-n", host, "-s", "-j", "link", "show", "dev", device])?;
        let shown: Value = serde_json::from_str(&shown).map_err(|e| e.to_string())?;
        Ok(shown[0]["stats64"]["tx"]["bytes"].as_u64().unwrap_or_default())
    };
    Ok([of(devices[0])?, of(devices[1])?])
}

/// Makes the uplink silent at its switch in mid-stream and measures.
fn cut(
    lab: &Lab,
    runtime: &Runtime,
    uplink: &str,
    receiver: u32,
    bytes: &dyn Fn() -> u64,
) -> output::Result<(Value, Cut)> {
    let (number, other) = if uplink == "p1" { (1, "p2") } else { (2, "p1") };
    let (tor, host) = (lab.tor(number), lab.host(1));
    let rules: PathBuf = lab.folder.join("cut.nft");
    let chain = |hook: &str, what: &str| {
        format!("chain {hook} {{ type filter hook {hook} priority 0\n {what}\n }}\n")
    };
    let text = chain("input", "iifname h1 drop")
        + &chain("output", "oifname h1 drop")
        + &chain("forward", "iifname h1 drop\n oifname h1 drop");
    std::fs::write(&rules, format!("table inet {TABLE} {{\n{text}}}\n"))
        .map_err(|e| format!("{}: {e}", rules.display()))?;
    let (mut rates, mut fault_us, mut cut_us) = (Vec::new(), 0, 0);
    let both = || sent(&host, [uplink, other]);
    let (begin, mut at_cut) = (both()?, [0; 2]);
    let (mut last, mut last_us) = (bytes(), now_us());
    for bin in 0..BINS {
        if bin == BEFORE {
            at_cut = both()?;
            // Nothing that is told from before is of this fault.
            fault_us = now_us();
            run(&["ip", "netns", "exec", &tor, "nft", "-f", &rules.display().to_string()])?;
            cut_us = now_us();
        }
        std::thread::sleep(Duration::from_micros((last_us + BIN_US).saturating_sub(now_us())));
        let (now, now_at) = (bytes(), now_us());
        rates.push((now - last) as f64 * 8e-3 / (now_at - last_us).max(1) as f64);
        (last, last_us) = (now, now_at);
    }
    let after = both()?[1] - at_cut[1];
    let before = [at_cut[0] - begin[0], at_cut[1] - begin[1]];
    let cut = Cut { tor: tor.clone(), before, after };
    // Data goes from host 1 to host 2, and acknowledgements back: both ends of the dead link must
    // have turned away from it. Other links may miss packets of BFD meanwhile.
    let first = |node: &str, event: &str, peer: Option<&str>| {
        first_event(&State::of(node).text("events.jsonl"), event, peer, fault_us)
    };
    let down = |node: &str, last: u8| first(node, "bfd", Some(&format!("10.{number}.1.{last}")));
    let later = |a: Option<u64>, b: Option<u64>| Some(a?.max(b?));
    // By BGP, or by fast failover before it.
    let routed = |node: &str| {
        first(node, "routes", None).into_iter().chain(first(node, "failover", None)).min()
    };
    let (detected_us, routed_us) = (down(&host, 0), routed(&host));
    let gaps = GapRecorder::read(runtime, receiver).map(|report| report.gaps).unwrap_or_default();
    let gap = detected_us.and_then(|us| outage(&gaps, [fault_us, cut_us], fault_us + us));
    // Data may come again before the switch has noticed: then what the host did ended it.
    let ends = |us: &u64| gap.is_some_and(|gap| fault_us + us <= gap.start_us + gap.len_us);
    let detected_us = later(detected_us, down(&tor, 1)).filter(ends).or(detected_us);
    let routed_us = later(routed_us, routed(&tor)).filter(ends).or(routed_us);
    let parts = gap.map(|gap| parts(&gap, fault_us, detected_us, routed_us));
    let [detection_us, routing_us, rest_us] = [0, 1, 2].map(|n| parts.map(|parts| parts[n]));
    let result = json!({
        "uplink": uplink, "carried": cut.share(), "outage_us": gap.map(|g| g.len_us), "detection_us": detection_us,
        "routing_us": routing_us, "rest_us": rest_us, "rates_gbps": rates, "bin_us": BIN_US, "fault_bin": BEFORE,
    });
    Ok((result, cut))
}

/// The interval without data that is the fault's: it began while the link was made silent, and the
/// host noticed that before data came again.
fn outage(gaps: &[Gap], [fault_us, cut_us]: [u64; 2], detected_at_us: u64) -> Option<Gap> {
    let began = fault_us - LATE_US..=cut_us + LATE_US;
    let of_fault = |gap: &&Gap| {
        began.contains(&gap.start_us) && detected_at_us <= gap.start_us + gap.len_us + LATE_US
    };
    gaps.iter().filter(of_fault).max_by_key(|gap| gap.len_us).copied()
}

/// Detection, routing and the rest of an interval without data, which they sum to; the times are
/// from the fault on. What came before the interval or after its end did not end it.
fn parts(gap: &Gap, fault_us: u64, detected_us: Option<u64>, routed_us: Option<u64>) -> [u64; 3] {
    let until = |since_fault: Option<u64>| {
        let since_begin = (fault_us + since_fault?).saturating_sub(gap.start_us);
        (since_begin <= gap.len_us + LATE_US).then_some(since_begin.min(gap.len_us))
    };
    let detection = until(detected_us).unwrap_or_default();
    let routed = until(routed_us).unwrap_or_default().max(detection);
    [detection, routed - detection, gap.len_us - routed]
}

/// How long after the fault an event was told first: not one from before it, that a session went
/// down only of this peer, and of routes only of BGP's.
fn first_event(text: &str, event: &str, peer: Option<&str>, fault_us: u64) -> Option<u64> {
    let all = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    all.filter(|e| e["event"] == event && (event != "routes" || e["by"] == "bgp"))
        .filter(|e| peer.is_none_or(|peer| e["peer"] == peer && e["state"] == "down"))
        .filter_map(|e| e["time_us"].as_u64()?.checked_sub(fault_us))
        .next()
}

fn draw(result: &Value) -> String {
    let ms = |name: &str| {
        result[name].as_f64().map_or("not seen".to_owned(), |us| format!("{:.1} ms", us / 1e3))
    };
    let rates: Vec<f64> =
        result["rates_gbps"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    let most = rates.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let blocks = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let bar: String =
        rates.iter().map(|r| blocks[((r / most * 8.0).round() as usize).min(8)]).collect();
    let mark = " ".repeat(BEFORE) + "^ the uplink falls silent";
    format!(
        "\n{bar}  at most {most:.1} Gbit/s, {} ms a column\n{mark}\n\nlongest interval without \
         data at the receiver: {}\n  detection (BFD, the later of both ends):      {}\n  routing \
         (from there to changed routes):       {}\n  reconciliation: none, since no rule depends \
         on an uplink\n  the rest, until the transport has sent again:  {}\nib_write_bw ended \
         without an error at both ends.\n",
        BIN_US / 1000,
        ms("outage_us"),
        ms("detection_us"),
        ms("routing_us"),
        ms("rest_us"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_told_before_the_fault_is_not_of_it() {
        let line = |peer: &str, state: &str, time_us: u64| {
            json!({"event": "bfd", "peer": peer, "state": state, "time_us": time_us}).to_string()
                + "\n"
        };
        // BFD has missed packets just before, on a busy machine.
        let text = line("10.1.1.0", "down", 9_500)
            + &line("10.1.1.0", "up", 10_400)
            + "{\"event\":\"routes\",\"by\":\"edge\",\"time_us\":10500}\n"
            + "{\"event\":\"routes\",\"by\":\"bgp\",\"time_us\":10800}\n"
            + &line("10.2.1.0", "down", 11_000)
            + &line("10.1.1.0", "down", 42_000);
        assert_eq!(first_event(&text, "bfd", Some("10.1.1.0"), 10_000), Some(32_000));
        assert_eq!(first_event(&text, "routes", None, 10_000), Some(800));
        assert_eq!(first_event(&text, "routes", None, 11_000), None);
        assert_eq!(first_event(&text, "bfd", Some("10.1.1.0"), 9_500), Some(0));
    }

    /// The longest interval may be a pause of a busy machine, long after the fault or before it.
    #[test]
    fn the_outage_is_that_of_the_fault() {
        let gap = |start_us, len_us| Gap { start_us, len_us };
        let of = |gaps: &[Gap]| outage(gaps, [100_000, 108_000], 130_000);
        let (right, short) = (gap(107_500, 45_000), gap(103_000, 900));
        let (before, later) = (gap(90_000, 60_000), gap(300_000, 200_000));
        assert_eq!(of(&[before, short, right, later]), Some(right));
        assert_eq!(of(&[before, short, later]), None, "none of them is the fault's");
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn parts_sum_to_the_whole() {
        let gap = Gap { start_us: 10_500, len_us: 50_000 };
        // From the fault at 10,000 on; data stopped a little later.
        assert_eq!(parts(&gap, 10_000, Some(28_500), Some(29_000)), [28_000, 500, 21_500]);
        assert_eq!(parts(&gap, 10_000, Some(28_500), Some(20_000)), [28_000, 0, 22_000]);
        assert_eq!(parts(&gap, 10_000, Some(28_500), Some(51_000)), [28_000, 22_000, 0]);
        for detected in [None, Some(100), Some(30_000), Some(90_000)] {
            for routed in [None, Some(100), Some(20_000), Some(40_000), Some(95_000)] {
                let all: u64 = parts(&gap, 10_000, detected, routed).iter().sum();
                assert_eq!(all, gap.len_us, "{detected:?} {routed:?}");
            }
        }
    }

    #[test]
    fn a_cut_has_struck_where_it_was_the_link_that_carried_the_traffic() {
        let cut = |before, after| Cut { tor: "t1".into(), before, after };
        assert!(cut([50_000_000, 40_000], 90_000_000).has_struck());
        assert!(!cut([40_000, 50_000_000], 90_000_000).has_struck(), "it was on the other one");
        assert!(!cut([30_000_000, 20_000_000], 90_000_000).has_struck(), "it moved meanwhile");
        assert!(!cut([50_000_000, 40_000], 30_000).has_struck(), "nothing went elsewhere");
        assert!(!cut([0, 0], 0).has_struck(), "there was no traffic");
    }
}
