//! What the benches are compared to, and what is compared: one run of each.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use unbroken_fabric::DeviceKind;
use unbroken_testkit::{bandwidth_gbps, free_port, latency_us, Lab, Pair, Running, Spec};

use crate::{calls, udp_bw, udp_lat, Result};

/// Seconds of a bandwidth run.
const SECONDS: u64 = 1;
/// Messages of a latency run.
const MESSAGES: u32 = 10_000;
/// No run takes longer.
const LIMIT: Duration = Duration::from_secs(60);

/// Something that gives one figure when it runs once.
#[derive(Clone, Debug)]
pub enum Contender {
    /// Bare UDP bandwidth in Gbit/s.
    UdpBw {
        /// Who copies.
        touch: udp_bw::Touch,
        /// Runs in flight.
        window: u32,
    },
    /// Bare UDP half round trip in µs.
    UdpLat {
        /// How the sides wait.
        wait: udp_lat::Wait,
        /// Without datagrams besides the messages.
        plain: bool,
    },
    /// One TCP stream of iperf3 over loopback, in Gbit/s.
    Iperf,
    /// A bandwidth program of perftest, in Gbit/s.
    Bandwidth {
        /// The run.
        spec: Spec,
        /// Message size in bytes.
        size: u64,
        /// On such NICs.
        device: DeviceKind,
    },
    /// A call of verbs, in µs (tests/c/verbs.c).
    Call {
        /// That program, compiled.
        program: String,
        /// On such NICs.
        device: DeviceKind,
        /// Whether NIC failures are survived.
        failover: bool,
        /// Which call.
        call: &'static str,
    },
    /// A latency program of perftest, in µs.
    Latency {
        /// The run.
        spec: Spec,
        /// Message size in bytes.
        size: u64,
    },
}

impl Contender {
    /// perftest's `program` with messages of `size` bytes over `qps` QPs.
    pub fn bandwidth(program: &str, size: u64, qps: u32, failover: bool) -> Contender {
        let args = format!("-d unb0 -F -s {size} -q {qps} -D {SECONDS} --report_gbits");
        Contender::Bandwidth {
            spec: Spec { failover, ..Spec::new(program, &args) },
            size,
            device: DeviceKind::Full,
        }
    }

    /// perftest's `program` with messages of `size` bytes over one QP, on NICs that have plain
    /// verbs only.
    pub fn plain_bandwidth(program: &str, size: u64, failover: bool) -> Contender {
        let device = DeviceKind::Plain;
        let gid_index = calls::gid_index(device);
        let args = format!("-d unb0 -x {gid_index} -F -s {size} -D {SECONDS} --report_gbits");
        Contender::Bandwidth { spec: Spec { failover, ..Spec::new(program, &args) }, size, device }
    }

    /// perftest's `program` with messages of `size` bytes.
    pub fn latency(program: &str, size: u64) -> Contender {
        Contender::Latency {
            spec: Spec::new(program, &format!("-d unb0 -F -s {size} -n {MESSAGES}")),
            size,
        }
    }

    /// A command that measures the same.
    pub fn command(&self) -> String {
        match self {
            Contender::UdpBw { touch, window } => {
                format!(
                    "unbroken-bench udp-bw --touch {} --window {window}",
                    format!("{touch:?}").to_lowercase()
                )
            }
            Contender::UdpLat { wait, plain } => {
                let plain = if *plain { " --plain" } else { "" };
                format!(
                    "unbroken-bench udp-lat --wait {}{plain}",
                    format!("{wait:?}").to_lowercase()
                )
            }
            Contender::Iperf => format!("iperf3 -c 127.0.0.1 -t {SECONDS}"),
            Contender::Bandwidth { spec, .. } | Contender::Latency { spec, .. } => spec.shown(),
            Contender::Call { program, failover, .. } => {
                format!(
                    "unbroken run {}-- {program}",
                    if *failover { "" } else { "--no-failover " }
                )
            }
        }
    }

    /// Runs it once.
    pub fn run(&self, unbroken: &Path) -> Result<f64> {
        let no_figure =
            |output: &str| format!("no figure in the output of {}:\n{output}", self.command());
        match self {
            Contender::UdpBw { touch, window } => {
                Ok(udp_bw::measure(Duration::from_secs(SECONDS), Some(*window), *touch)?.gbps)
            }
            Contender::UdpLat { wait, plain } => {
                Ok(udp_lat::measure(MESSAGES, *wait, *plain)?.typical_us)
            }
            Contender::Iperf => iperf(),
            Contender::Call { program, device, failover, call } => {
                let times = calls::run(unbroken, program, *device, *failover)?;
                Ok(times.get(*call).ok_or_else(|| format!("{program} says nothing of {call}"))?
                    / 1e3)
            }
            Contender::Bandwidth { spec, size, device } => {
                let output = pair(unbroken, *device, spec)?;
                Ok(bandwidth_gbps(&output, *size).ok_or_else(|| no_figure(&output))?)
            }
            Contender::Latency { spec, size } => {
                let output = pair(unbroken, DeviceKind::Full, spec)?;
                Ok(latency_us(&output, *size).ok_or_else(|| no_figure(&output))?.typical_us)
            }
        }
    }
}

fn pair(unbroken: &Path, device: DeviceKind, spec: &Spec) -> Result<String> {
    let lab = Lab::with_device(unbroken, device)?;
    Ok(Pair::start(&lab, spec)?.succeed(LIMIT)?)
}

fn iperf() -> Result<f64> {
    let port = free_port()?.to_string();
    let lab = Lab::new(Path::new(""))?;
    let mut server = Command::new("iperf3");
    server.args(["-s", "-1", "-B", "127.0.0.1", "--forceflush", "-p", &port]);
    let mut server = Running::start(server, "iperf3", lab.folder().join("server.log"))?;
    let text = lab.folder().join("server.log");
    let listening = || std::fs::read_to_string(&text).is_ok_and(|t| t.contains("listening"));
    server.wait_until("it listens", Duration::from_secs(10), listening)?;
    let mut client = Command::new("iperf3");
    client.args(["-c", "127.0.0.1", "-J", "-t", &SECONDS.to_string(), "-p", &port]);
    let mut client = Running::start(client, "iperf3", lab.folder().join("client.log"))?;
    client.succeed(LIMIT)?;
    let answer: serde_json::Value = serde_json::from_str(&client.output())?;
    let rate = answer["end"]["sum_received"]["bits_per_second"].as_f64();
    Ok(rate.ok_or("iperf3 gave no end.sum_received.bits_per_second")? / 1e9)
}
