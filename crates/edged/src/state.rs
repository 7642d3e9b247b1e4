//! The folder of a host, and making and taking away what is in its configuration.
//!
//! `/run/unbroken-edge/<name>` has a copy of the configuration, the steps that were taken (`made.json`, written before each), FRR's
//! files, the daemon's status and events. A set-up that fails takes back what it has done.

use std::fs;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::{self, run};
use crate::config::Config;
use crate::frr::Frr;
use crate::plan::{plan, Present, Step};
use crate::{check, failover, last, nic};

const NONE: &str = "no edge is up here: `unbroken edge up` makes one, `unbroken edge demo` shows one (both as root)";

/// The folder of all hosts' folders, unless `UNBROKEN_EDGE` names another.
const FOLDER: &str = "/run/unbroken-edge";

/// How long a patient step is tried.
const PATIENCE: Duration = Duration::from_secs(5);

/// The folder of one host.
#[derive(Clone, Debug)]
pub struct State {
    folder: PathBuf,
}

fn root() -> PathBuf {
    std::env::var_os("UNBROKEN_EDGE").map_or_else(|| PathBuf::from(FOLDER), PathBuf::from)
}

impl State {
    /// That of the host with this name.
    pub fn of(name: &str) -> State {
        State { folder: root().join(name) }
    }

    /// The only one in this network namespace that is up, or the one with the name.
    pub fn find(name: Option<&str>) -> Result<State, String> {
        let up = |s: &State| s.config_path().exists();
        if let Some(name) = name {
            let state = State::of(name);
            return if up(&state) { Ok(state) } else { Err(format!("no edge with the name '{name}' is up here")) };
        }
        let entries = fs::read_dir(root()).map_err(|_| NONE.to_owned())?;
        let mut all: Vec<State> = entries
            .flatten()
            .map(|e| State { folder: e.path() })
            .filter(|s| up(s) && s.is_of_this_namespace())
            .collect();
        match all.len() {
            0 => Err(NONE.into()),
            1 => Ok(all.remove(0)),
            _ => Err("several edges are up here; name one with --name".into()),
        }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its FRR.
    pub fn frr(&self) -> Frr {
        Frr::new(&self.folder)
    }

    fn config_path(&self) -> PathBuf {
        self.folder.join("edge.toml")
    }

    /// The configuration that is up.
    pub fn config(&self) -> Result<Config, String> {
        Config::read(&self.config_path())
    }

    fn is_of_this_namespace(&self) -> bool {
        let kept = fs::read_to_string(self.folder.join("netns")).ok();
        kept.is_some() && kept == network_namespace()
    }

    /// The process of the daemon, if it runs.
    pub fn daemon(&self) -> Option<u32> {
        let pid: u32 = fs::read_to_string(self.folder.join("edged.pid")).ok()?.trim().parse().ok()?;
        let command = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let is_ours = command.split(|b| *b == 0).any(|a| a == b"daemon");
        is_ours.then_some(pid)
    }

    fn made(&self) -> Result<Vec<Step>, String> {
        let path = self.folder.join("made.json");
        match fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(format!("{}: {e}", path.display())),
        }
    }

    fn remember(&self, made: &[Step]) -> Result<(), String> {
        let text = serde_json::to_string_pretty(made).map_err(|e| e.to_string())?;
        replace(&self.folder.join("made.json"), &text)
    }

    /// Makes what is missing. After an error nothing is left of what this call has made.
    pub fn up(&self, text: &str) -> Result<Vec<Step>, String> {
        let config = Config::parse(text)?;
        let Missing { mut steps, more } = missing(&config)?;
        let before = self.made()?;
        let fresh = !self.config_path().exists();
        fs::create_dir_all(&self.folder).map_err(|e| format!("{}: {e}", self.folder.display()))?;
        let mut made = before.clone();
        let done = self.make(&steps, &mut made).and_then(|()| {
            if more {
                let rest = when_devices_are_there(&config)?;
                self.make(&rest, &mut made)?;
                steps.extend(rest);
            }
            self.run(&config, text)
        });
        if let Err(error) = done {
            let new: Vec<Step> = made[before.len()..].to_vec();
            if fresh {
                let _ = self.frr().stop();
            }
            undo(&new);
            if fresh {
                let _ = fs::remove_dir_all(&self.folder);
            } else {
                self.remember(&before)?;
            }
            return Err(error);
        }
        Ok(steps)
    }

    fn make(&self, steps: &[Step], made: &mut Vec<Step>) -> Result<(), String> {
        for step in steps {
            made.retain(|m| m.key != step.key);
            made.push(step.clone());
            self.remember(made)?;
            let deadline = Instant::now() + if step.patient { PATIENCE } else { Duration::ZERO };
            for command in &step.make {
                while let Err(error) = run(command) {
                    if Instant::now() > deadline {
                        return Err(error);
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
        Ok(())
    }

    /// Starts FRR with its configuration, and keeps ours.
    fn run(&self, config: &Config, text: &str) -> Result<(), String> {
        if config.frr {
            let frr = self.frr();
            // Daemons that run with another configuration are started anew.
            if frr.configure(config)? {
                frr.stop()?;
            }
            frr.start()?;
        }
        replace(&self.folder.join("netns"), &network_namespace().unwrap_or_default())?;
        replace(&self.config_path(), text)
    }

    /// Ends the daemon and FRR, and takes back all steps, last first.
    pub fn down(&self) -> Result<Vec<String>, String> {
        self.stop_daemon()?;
        // A daemon that died has left its routes.
        failover::close();
        last::close();
        self.frr().stop()?;
        let left = undo(&self.made()?);
        fs::remove_dir_all(&self.folder).map_err(|e| format!("{}: {e}", self.folder.display()))?;
        Ok(left)
    }

    /// Starts the daemon, if none runs, in a process of its own.
    pub fn start_daemon(&self, program: &Path) -> Result<(), String> {
        if self.daemon().is_some() {
            return Ok(());
        }
        let log = self.folder.join("edged.log");
        let file = || {
            fs::OpenOptions::new().create(true).append(true).open(&log).map_err(|e| format!("{}: {e}", log.display()))
        };
        let name = self.folder.file_name().unwrap_or_default();
        let mut child = std::process::Command::new(program)
            .args(["edge".as_ref(), "daemon".as_ref(), "--name".as_ref(), name])
            .stdin(std::process::Stdio::null())
            .stdout(file()?)
            .stderr(file()?)
            .process_group(0)
            .spawn()
            .map_err(|e| format!("{}: {e}", program.display()))?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.daemon().is_none() {
            let ended = child.try_wait().map_err(|e| e.to_string())?.is_some();
            if ended || Instant::now() > deadline {
                let why = fs::read_to_string(&log).unwrap_or_default();
                return Err(format!("the daemon did not start: {}", why.trim()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Ends the daemon, which then takes its rules away.
    pub fn stop_daemon(&self) -> Result<(), String> {
        let Some(pid) = self.daemon() else { return Ok(()) };
        run(&["kill", "-TERM", &pid.to_string()])?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.daemon().is_some() {
            if Instant::now() > deadline {
                run(&["kill", "-KILL", &pid.to_string()])?;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// What a configuration still needs here.
#[derive(Clone, Debug)]
pub struct Missing {
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// These make a NIC's devices; others follow, which can be planned only when those are there.
    pub more: bool,
}

/// The steps that a configuration still needs here.
pub fn missing(config: &Config) -> Result<Missing, String> {
    if let Some(lacked) = check::lacking(config) {
        return Err(lacked);
    }
    let nics = nic::missing(config)?;
    if nics.is_empty() {
        return Ok(Missing { steps: of_devices(config, &links()?)?, more: false });
    }
    Ok(Missing { steps: nics, more: true })
}

/// The steps that follow those of NICs, as soon as their drivers have made all devices.
fn when_devices_are_there(config: &Config) -> Result<Vec<Step>, String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let links = links()?;
        let there = |name: &str| links.as_array().is_some_and(|all| all.iter().any(|link| link["ifname"] == name));
        // Who is still missing then is named by the plan.
        if nic::awaited(config, &there).is_none() || Instant::now() > deadline {
            return of_devices(config, &links);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn links() -> Result<Value, String> {
    serde_json::from_str(&run(&["ip", "-j", "-d", "addr", "show"])?).map_err(|e| e.to_string())
}

fn of_devices(config: &Config, links: &Value) -> Result<Vec<Step>, String> {
    let setting = |key: &str| {
        let path = format!("/proc/sys/{}", key.replace('.', "\u{0}").replace('/', ".").replace('\u{0}', "/"));
        Some(fs::read_to_string(path).ok()?.trim().to_owned())
    };
    plan(config, &Present { links, setting: &setting })
}

/// Takes steps back, last first; gives what could not be.
fn undo(steps: &[Step]) -> Vec<String> {
    let commands = steps.iter().rev().flat_map(|s| &s.undo);
    commands.filter_map(|c| command::run(c).err()).collect()
}

fn network_namespace() -> Option<String> {
    Some(fs::read_link("/proc/self/ns/net").ok()?.to_str()?.to_owned())
}

/// Writes a file so that a reader sees the old or the new one.
pub fn replace(path: &Path, text: &str) -> Result<(), String> {
    let error = |e: std::io::Error| format!("{}: {e}", path.display());
    let next = path.with_extension("next");
    let mut file = fs::File::create(&next).map_err(error)?;
    file.write_all(text.as_bytes()).map_err(error)?;
    fs::rename(&next, path).map_err(error)
}
