//! The emulated network of a test.

use std::ops::RangeBounds;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::error::{system, wait_until, Error, Result};
use crate::program::Program;

/// TCP ports for programs: below those that the kernel gives away.
const PORTS: std::ops::Range<u32> = 20_000..32_000;
/// Counters change with every packet: on a disk they would be written back all the time.
const MEMORY: &str = "/dev/shm";

/// How a network is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// The command; `unbroken` by default, which `PATH` has.
    pub command: PathBuf,
    /// Further options of `unbroken fabric up`: `--ports 2`, `--device plain`.
    pub fabric: Vec<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options { command: "unbroken".into(), fabric: Vec::new() }
    }
}

/// What a NIC has carried since its network was made, in bytes of payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Sent.
    pub tx_bytes: u64,
    /// Received.
    pub rx_bytes: u64,
}

impl Traffic {
    /// Sent and received together.
    pub fn bytes(&self) -> u64 {
        self.tx_bytes + self.rx_bytes
    }
}

/// A queue pair went from one path to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Switch {
    /// The host.
    pub host: String,
    /// The path before, `a/0-b/0`.
    pub from: String,
    /// The path after.
    pub to: String,
    /// Whether a failure forced it; else it was planned, as the way back is.
    pub is_forced: bool,
    /// What triggered it.
    pub reason: String,
}

/// An emulated network, taken away with its programs and its folder when it is dropped.
///
/// Its programs are dropped by those who have them; one that outlives its network meets an error.
#[derive(Debug)]
pub struct Fabric {
    folder: tempfile::TempDir,
    command: PathBuf,
    programs: AtomicUsize,
    ports: AtomicUsize,
}

impl Fabric {
    /// Hosts with so many NICs each; NIC *n* of all hosts is on rail *n*.
    pub fn new(hosts: &[&str], nics: u8) -> Result<Fabric> {
        Fabric::with(hosts, nics, &Options::default())
    }

    /// Hosts with so many NICs each, as [`Fabric::new`] makes them, with options.
    pub fn with(hosts: &[&str], nics: u8, options: &Options) -> Result<Fabric> {
        let mut builder = tempfile::Builder::new();
        builder.prefix("unbroken-lab-");
        let folder = builder.tempdir_in(MEMORY).or_else(|_| builder.tempdir());
        let fabric = Fabric {
            folder: folder.map_err(system("cannot make a folder"))?,
            command: options.command.clone(),
            programs: AtomicUsize::new(0),
            ports: AtomicUsize::new(0),
        };
        let (hosts, nics) = (hosts.join(","), nics.to_string());
        let mut words = vec!["fabric", "up", "--hosts", &hosts, "--nics", &nics];
        words.extend(options.fabric.iter().map(String::as_str));
        fabric.command(&words)?;
        Ok(fabric)
    }

    /// The runtime folder: `UNBROKEN_RUNTIME` of its programs.
    pub fn runtime(&self) -> PathBuf {
        self.folder.path().join("runtime")
    }

    /// Starts a program on a host, whose NICs are its devices unb0, unb1, ….
    pub fn start(&self, host: &str, program: &[&str]) -> Result<Program> {
        self.spawn(host, &[], program)
    }

    /// Starts a program on a host, as [`Fabric::start`] does, without failover: it meets each
    /// failure itself.
    pub fn start_without_failover(&self, host: &str, program: &[&str]) -> Result<Program> {
        self.spawn(host, &["--no-failover"], program)
    }

    fn spawn(&self, host: &str, options: &[&str], program: &[&str]) -> Result<Program> {
        let mut command = self.unbroken();
        command.args(["run", "--host", host]).args(options).arg("--").args(program);
        let number = self.programs.fetch_add(1, Ordering::Relaxed);
        let of = program.first().and_then(|path| Path::new(path).file_name());
        let name = format!("{number}-{host}-{}", of.unwrap_or_default().to_string_lossy());
        let log = self.folder.path().join(format!("{name}.log"));
        Program::start(&name, command, log)
    }

    /// A TCP port on which nobody listens now. Hosts share this machine's network.
    pub fn free_port(&self) -> Result<u16> {
        let first = std::process::id().wrapping_mul(101) as usize;
        for _ in PORTS {
            let next = first.wrapping_add(self.ports.fetch_add(1, Ordering::Relaxed));
            let port = PORTS.start + (next % PORTS.len()) as u32;
            let port = u16::try_from(port).unwrap_or_default();
            if std::net::TcpListener::bind(("0.0.0.0", port)).is_ok() {
                return Ok(port);
            }
        }
        Err(Error::NotSo("no TCP port is free".into()))
    }

    /// A NIC by its name, `a/0`. Whether there is one shows when it is asked for something.
    pub fn nic(&self, name: &str) -> Nic<'_> {
        Nic { fabric: self, name: name.into() }
    }

    /// Sets a fault (docs/reference/faults.md), like `loss a/0 1%`, until it is cleared.
    pub fn fault(&self, fault: &str) -> Result<()> {
        self.command(&["fault", "set", fault]).map(drop)
    }

    /// Clears a fault, or those that begin so (`nic a/0`).
    pub fn clear(&self, fault: &str) -> Result<()> {
        self.command(&["fault", "clear", fault]).map(drop)
    }

    /// Clears all faults.
    pub fn clear_all(&self) -> Result<()> {
        self.command(&["fault", "clear"]).map(drop)
    }

    /// `unbroken status --json`: NICs, queue pairs, processes.
    pub fn status(&self) -> Result<Value> {
        json(&self.command(&["status", "--json"])?)
    }

    /// `unbroken events --json`: what happened, in order.
    pub fn events(&self) -> Result<Vec<Value>> {
        self.command(&["events", "--json"])?.lines().map(json).collect()
    }

    /// The switches of queue pairs of a host, in order.
    pub fn switches(&self, host: &str) -> Result<Vec<Switch>> {
        let events = self.events()?;
        let of_host = events.iter().filter(|e| e["event"] == "switch" && e["host"] == host);
        let text = |event: &Value, field: &str| event[field].as_str().unwrap_or_default().into();
        Ok(of_host
            .map(|event| Switch {
                host: text(event, "host"),
                from: text(event, "from"),
                to: text(event, "to"),
                is_forced: event["kind"] == "passive",
                reason: text(event, "reason"),
            })
            .collect())
    }

    /// Waits for the first switch of a host.
    pub fn wait_for_switch(&self, host: &str, timeout: Duration) -> Result<Switch> {
        let first = || Ok(self.switches(host)?.into_iter().next());
        wait_until(timeout, || format!("a switch at host {host}"), first)
    }

    /// An error unless a NIC has carried so many bytes of payload, sent and received together:
    /// `10_000_000..`, or `..=0` of one that is to be unused.
    pub fn assert_carried(&self, nic: &str, bytes: impl RangeBounds<u64>) -> Result<Traffic> {
        let traffic = self.nic(nic).traffic()?;
        if bytes.contains(&traffic.bytes()) {
            return Ok(traffic);
        }
        let (from, to) = (bytes.start_bound(), bytes.end_bound());
        Err(Error::NotSo(format!(
            "NIC {nic} carried {} bytes, not {from:?} to {to:?}",
            traffic.bytes()
        )))
    }

    fn unbroken(&self) -> Command {
        let mut command = Command::new(&self.command);
        for (name, _) in std::env::vars_os() {
            // They would lead programs elsewhere.
            if name.as_encoded_bytes().starts_with(b"UNBROKEN_") {
                command.env_remove(name);
            }
        }
        command.env("UNBROKEN_RUNTIME", self.runtime());
        command
    }

    /// Runs `unbroken WORDS` about this network; gives what it prints.
    pub fn command(&self, words: &[&str]) -> Result<String> {
        let what = format!("cannot run {}", self.command.display());
        let done = self.unbroken().args(words).output().map_err(system(what))?;
        match done.status.success() {
            true => Ok(String::from_utf8_lossy(&done.stdout).into_owned()),
            false => Err(Error::Command {
                words: words.join(" "),
                said: String::from_utf8_lossy(&done.stderr).trim().into(),
            }),
        }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // What is wrong with it the folder's removal, which follows, solves as well.
        let _ = self.command(&["reset", "--force"]);
    }
}

fn json(text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| Error::Command {
        words: "--json".into(),
        said: format!("what it printed is no JSON: {error}"),
    })
}

/// A NIC of a network.
#[derive(Debug)]
pub struct Nic<'a> {
    fabric: &'a Fabric,
    name: String,
}

impl Nic<'_> {
    fn status(&self) -> Result<Value> {
        let status = self.fabric.status()?;
        let nics = status["nics"].as_array().into_iter().flatten();
        let names = |n: &Value| n["nic"].as_str().unwrap_or_default().to_owned();
        let there: Vec<String> = nics.clone().map(names).collect();
        nics.into_iter().find(|n| n["nic"] == *self.name).cloned().ok_or_else(|| {
            let there = there.join(", ");
            Error::NotSo(format!("there is no NIC {}; there are {there}", self.name))
        })
    }

    /// `active`, `down` or `dead`; `, drained` behind it while no queue pair may use it.
    pub fn state(&self) -> Result<String> {
        Ok(self.status()?["state"].as_str().unwrap_or_default().into())
    }

    /// What it has carried so far.
    pub fn traffic(&self) -> Result<Traffic> {
        let status = self.status()?;
        let counter = |name: &str| status[name].as_u64().unwrap_or_default();
        Ok(Traffic { tx_bytes: counter("tx_payload_bytes"), rx_bytes: counter("rx_payload_bytes") })
    }

    /// Waits until it has sent and received so many bytes of payload more, in all; gives them.
    pub fn wait_for_traffic(&self, more_bytes: u64, timeout: Duration) -> Result<u64> {
        let before = self.traffic()?.bytes();
        let what = || format!("{more_bytes} bytes through NIC {}", self.name);
        wait_until(timeout, what, || {
            let more = self.traffic()?.bytes() - before;
            Ok((more >= more_bytes).then_some(more))
        })
    }

    /// The device dies: programs see a device-fatal event.
    pub fn kill(&self) -> Result<()> {
        self.fabric.fault(&format!("nic {} dead", self.name))
    }

    /// Its port goes down: programs see a port-down event.
    pub fn port_down(&self) -> Result<()> {
        self.fabric.fault(&format!("nic {} down", self.name))
    }

    /// Its cable is cut: silence, and no event.
    pub fn cut(&self) -> Result<()> {
        self.fabric.fault(&format!("cable {} cut", self.name))
    }

    /// Takes back what [`Nic::kill`], [`Nic::port_down`] and [`Nic::cut`] have done.
    pub fn heal(&self) -> Result<()> {
        self.fabric.clear(&format!("nic {}", self.name))?;
        self.fabric.clear(&format!("cable {}", self.name))
    }
}
