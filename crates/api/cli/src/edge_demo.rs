//! `unbroken edge demo`: a lab, RDMA traffic through it, an uplink that falls silent, and where the
//! time went.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{json, Value};
use unbroken_edge_daemon::command::run;
use unbroken_edge_daemon::lab::Lab;
use unbroken_edge_daemon::state::State;
use unbroken_fabric::{now_us, GapRecorder, NicPage, Runtime};

use crate::output::{self, print};

const PORT: &str = "18515";
const BIN_US: u64 = 10_000;
const BINS: usize = 60;
/// The fault comes after so many of them.
const BEFORE: usize = 15;

/// A child that does not outlive its handle.
struct Running(Child);

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
    until(60, "EVPN has told each host of the other and both ways are there", || ready(lab))?;
    let folder = lab.folder.join("runtime");
    let runtime = Runtime::at(&folder)?;
    let server = start(lab, program, &folder, 2, &[])?;
    until(20, "ib_write_bw listens", || {
        run(&["ip", "netns", "exec", &lab.host(2), "ss", "-Hltn"])
            .is_ok_and(|t| t.contains(&format!(":{PORT} ")))
    })?;
    let client = start(lab, program, &folder, 1, &["192.168.9.2"])?;
    let page = || {
        NicPage::open(&runtime, [192, 168, 9, 2].into()).ok().map(|p| p.counters().rx_payload_bytes)
    };
    until(20, "RDMA traffic flows", || page().is_some_and(|bytes| bytes > 10_000_000))?;
    let uplink = busiest(&lab.host(1))?;
    tell(&format!(
        "ib_write_bw from host 1 to host 2 over the overlay; its packets leave by {uplink}\n"
    ))?;
    let result = cut(lab, &runtime, &uplink, server.0.id(), &|| page().unwrap_or_default())?;
    let ok = finish(client)? && finish(server)?;
    drop(up);
    if !ok {
        return Err("ib_write_bw ended with an error".to_owned().into());
    }
    if json {
        return output::print_json(&result);
    }
    print(&draw(&result))
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
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map(Running)
        .map_err(|e| format!("ip netns exec: {e}"))
}

fn finish(mut program: Running) -> Result<bool, String> {
    let deadline = Instant::now() + Duration::from_secs(40);
    loop {
        match program.0.try_wait().map_err(|e| e.to_string())? {
            Some(status) => return Ok(status.success()),
            None if Instant::now() > deadline => return Err("ib_write_bw does not end".into()),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// The uplink that a host sends most over.
fn busiest(host: &str) -> output::Result<String> {
    let sent = |device: &str| -> output::Result<u64> {
        let shown = run(&["ip", "-n", host, "-s", "-j", "link", "show", "dev", device])?;
        let shown: Value = serde_json::from_str(&shown).map_err(|e| e.to_string())?;
        Ok(shown[0]["stats64"]["tx"]["bytes"].as_u64().unwrap_or_default())
    };
    let before = (sent("p1")?, sent("p2")?);
    std::thread::sleep(Duration::from_millis(200));
    let after = (sent("p1")?, sent("p2")?);
    Ok(if after.0 - before.0 >= after.1 - before.1 { "p1" } else { "p2" }.into())
}

/// Makes the uplink silent at its switch in mid-stream and measures.
fn cut(
    lab: &Lab,
    runtime: &Runtime,
    uplink: &str,
    receiver: u32,
    bytes: &dyn Fn() -> u64,
) -> output::Result<Value> {
    let tor = lab.tor(if uplink == "p1" { 1 } else { 2 });
    let rules: PathBuf = lab.folder.join("cut.nft");
    let chain = |hook: &str, what: &str| {
        format!("chain {hook} {{ type filter hook {hook} priority 0\n {what}\n }}\n")
    };
    let text = chain("input", "iifname h1 drop")
        + &chain("output", "oifname h1 drop")
        + &chain("forward", "iifname h1 drop\n oifname h1 drop");
    std::fs::write(&rules, format!("table inet cut {{\n{text}}}\n"))
        .map_err(|e| format!("{}: {e}", rules.display()))?;
    let (mut rates, mut fault_us) = (Vec::new(), 0);
    let (mut last, mut last_us) = (bytes(), now_us());
    for bin in 0..BINS {
        if bin == BEFORE {
            run(&["ip", "netns", "exec", &tor, "nft", "-f", &rules.display().to_string()])?;
            fault_us = now_us();
        }
        std::thread::sleep(Duration::from_micros((last_us + BIN_US).saturating_sub(now_us())));
        let (now, now_at) = (bytes(), now_us());
        rates.push((now - last) as f64 * 8e-3 / (now_at - last_us).max(1) as f64);
        (last, last_us) = (now, now_at);
    }
    let gap = GapRecorder::read(runtime, receiver)
        .ok()
        .and_then(|g| g.longest(fault_us.saturating_sub(20_000), fault_us + 400_000));
    let first = |node: &str, event: &str| -> Option<u64> {
        let text = State::of(node).text("events.jsonl");
        let all = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
        all.filter(|e| e["event"] == event && (event != "bfd" || e["state"] == "down"))
            .filter_map(|e| e["time_us"].as_u64())
            .find(|t| *t + 1_000 > fault_us)
            .map(|t| t.saturating_sub(fault_us))
    };
    // Data goes from host 1 to host 2, and acknowledgements back: both ends of the dead link must
    // have turned away from it.
    let (host, tor_down) = (lab.host(1), first(&tor, "bfd"));
    let later = |a: Option<u64>, b: Option<u64>| Some(a?.max(b?));
    let detection_us = later(first(&host, "bfd"), tor_down);
    let routed_us = later(first(&host, "routes"), first(&tor, "routes"));
    Ok(json!({
        "uplink": uplink, "outage_us": gap.map(|g| g.len_us), "detection_us": detection_us,
        "routing_us": routed_us.zip(detection_us).map(|(r, d)| r.saturating_sub(d)),
        "rates_gbps": rates, "bin_us": BIN_US, "fault_bin": BEFORE,
    }))
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
        "\n{bar}  at most {most:.1} Gbit/s, {} ms a column\n{mark}\n\nlongest interval without data at the receiver: {}\n  \
         detection (BFD, the later of both ends):      {}\n  routing (from there to changed routes):       {}\n  \
         reconciliation: none, since no rule depends on an uplink\n  the rest is until the transport sends again\n\
         ib_write_bw ended without an error at both ends.\n",
        BIN_US / 1000,
        ms("outage_us"),
        ms("detection_us"),
        ms("routing_us"),
    )
}
