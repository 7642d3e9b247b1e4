//! The folder of a host, and making and taking away what is in its configuration.
//!
//! `/run/unbroken-edge/<name>` has a copy of the configuration, the steps that were taken
//! (`made.json`, written before each), FRR's files, the daemon's status and events. A set-up that
//! fails takes back what it has done. Only root writes there ([`crate::folder`]), and only root
//! looks there; the group frr may pass through to FRR's files.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::process::Signal;
use serde_json::Value;

use crate::command::{self, run};
use crate::config::Config;
use crate::error::{EdgeError, Result};
use crate::folder::{own_user, Folder, Ids};
use crate::frr::{frr_user, Frr};
use crate::plan::{plan, Present, Step};
use crate::process::{hold, Running};
use crate::{check, failover, last, nic, policy};

const NONE: &str = "no edge is up here: `unbroken edge up` makes one, `unbroken edge demo` shows \
                    one (both as root)";

/// The folder of all hosts' folders, unless `UNBROKEN_EDGE` names another.
const FOLDER: &str = "/run/unbroken-edge";

/// All users may pass through it, and none but root may list it.
const MODE: u32 = 0o711;

/// The files of a host's folder.
const CONFIG: &str = "edge.toml";
/// What the daemon runs with.
const RUNNING: &str = "running.toml";
const MADE: &str = "made.json";
const NAMESPACE: &str = "netns";
const LOG: &str = "edged.log";
/// Locked by the daemon while it lives.
const DAEMON: &str = "edged.pid";

/// The daemon has so long to take a changed configuration.
const TAKE: Duration = Duration::from_secs(10);

/// The daemon has so long to take its rules away.
const END: Duration = Duration::from_secs(10);

/// How long a patient step is tried.
const PATIENCE: Duration = Duration::from_secs(5);

/// What `up` has done.
#[derive(Clone, Debug)]
pub struct Up {
    /// The steps that were missing.
    pub steps: Vec<Step>,
    /// FRR was started anew, since its configuration is another one.
    pub frr_anew: bool,
    /// The daemon has taken a changed configuration.
    pub told: bool,
}

/// The text of a configuration that the daemon takes.
pub(crate) struct Taken(String);

/// The folder of one host.
#[derive(Clone, Debug)]
pub struct State {
    path: PathBuf,
}

/// The folder of all hosts' folders: that which `UNBROKEN_EDGE` names, or the usual one.
pub fn root() -> PathBuf {
    std::env::var_os("UNBROKEN_EDGE").map_or_else(|| PathBuf::from(FOLDER), PathBuf::from)
}

/// As [`root`]; made if it is missing.
pub fn make_root() -> Result<PathBuf> {
    Ok(Folder::make(&root(), MODE)?.path().to_owned())
}

impl State {
    /// That of the host with this name, as it is in a good configuration.
    pub fn of(name: &str) -> State {
        State { path: root().join(name) }
    }

    /// The only one in this network namespace that is up, or the one with the name.
    pub fn find(name: Option<&str>) -> Result<State> {
        if let Some(name) = name {
            let state = State::of(name);
            let none = || EdgeError::Refused(format!("no edge with the name '{name}' is up here"));
            if name.contains('/') || name.starts_with('.') || !state.path.exists() {
                return Err(none());
            }
            return if state.is_up()? { Ok(state) } else { Err(none()) };
        }
        let entries = fs::read_dir(root()).map_err(|e| match e.kind() {
            ErrorKind::PermissionDenied => {
                EdgeError::at(root().display())("only root may look; run this as root")
            }
            _ => EdgeError::Refused(NONE.to_owned()),
        })?;
        let mut all: Vec<State> = entries
            .flatten()
            .map(|e| State { path: e.path() })
            .filter(|s| s.is_up().unwrap_or_default() && s.is_of_this_namespace())
            .collect();
        match all.len() {
            0 => Err(EdgeError::Refused(NONE.into())),
            1 => Ok(all.remove(0)),
            _ => Err(EdgeError::Refused("several edges are up here; name one with --name".into())),
        }
    }

    pub(crate) fn folder(&self) -> Result<Folder> {
        Folder::open(&self.path)
    }

    /// The text of a file of its folder; nothing where it cannot be read.
    pub fn text(&self, file: &str) -> String {
        self.folder().and_then(|f| f.read(file)).ok().flatten().unwrap_or_default()
    }

    fn is_up(&self) -> Result<bool> {
        Ok(self.folder()?.read(CONFIG)?.is_some())
    }

    /// Its FRR.
    pub fn frr(&self) -> Frr {
        Frr::new(&self.path)
    }

    /// The configuration that is up.
    pub fn config(&self) -> Result<Config> {
        self.config_and_text().map(|(config, _)| config)
    }

    fn config_and_text(&self) -> Result<(Config, String)> {
        let path = self.path.join(CONFIG);
        let text = self
            .folder()?
            .read(CONFIG)?
            .ok_or_else(|| EdgeError::at(path.display())("it is gone"))?;
        Ok((Config::parse(&text).map_err(EdgeError::at(path.display()))?, text))
    }

    /// The configuration that is up, for the daemon, and the word that it is to run with it.
    pub(crate) fn take_config(&self) -> Result<(Config, Taken)> {
        let (config, text) = self.config_and_text()?;
        Ok((config, Taken(text)))
    }

    /// The daemon runs with this.
    pub(crate) fn has_taken(&self, taken: &Taken) -> Result<()> {
        self.folder()?.replace(RUNNING, &taken.0)
    }

    fn is_of_this_namespace(&self) -> bool {
        network_namespace().is_some_and(|own| own == self.text(NAMESPACE))
    }

    /// The process of the daemon, if it runs. The daemon itself must not ask: it would lose its
    /// lock.
    pub fn daemon(&self) -> Option<u32> {
        self.running().map(|daemon| daemon.pid())
    }

    fn running(&self) -> Option<Running> {
        Running::holder(&self.folder().ok()?.file(DAEMON, OFlags::RDONLY).ok()?)
    }

    /// Makes this process the daemon, for as long as the file that it gives is open.
    pub(crate) fn become_daemon(&self) -> Result<File> {
        let path = self.path.join(DAEMON);
        let error = EdgeError::at(path.display());
        let mut file =
            self.folder()?.file(DAEMON, OFlags::RDWR | OFlags::CREATE).map_err(&error)?;
        if !hold(&file).map_err(&error)? {
            return Err(EdgeError::Refused("a daemon runs here already".into()));
        }
        // For people: who asks for the daemon asks who holds the lock.
        file.set_len(0).map_err(&error)?;
        file.write_all(std::process::id().to_string().as_bytes()).map_err(&error)?;
        Ok(file)
    }

    fn made(&self, folder: &Folder) -> Result<Vec<Step>> {
        match folder.read(MADE)? {
            Some(text) => {
                serde_json::from_str(&text).map_err(EdgeError::at(self.path.join(MADE).display()))
            }
            None => Ok(Vec::new()),
        }
    }

    /// Makes the folder, in which only root may write. FRR's daemons may pass through.
    fn make_folder(&self, config: &Config) -> Result<Folder> {
        make_root()?;
        let folder = Folder::make(&self.path, 0o700)?;
        if config.frr {
            let ids = Ids { user: own_user(), group: frr_user()?.group };
            folder.give(Some(ids), 0o710)?;
        }
        Ok(folder)
    }

    /// Whether this configuration can be up here: not beside another edge, whose daemon would work
    /// on the same tables, and not where it needs devices that are there to be made anew.
    pub fn fits(&self, config: &Config) -> Result<()> {
        let others = fs::read_dir(root()).into_iter().flatten().flatten();
        let others = others.map(|entry| State { path: entry.path() });
        let taken = |state: &State| {
            state.path != self.path
                && state.is_up().unwrap_or_default()
                && state.is_of_this_namespace()
        };
        if let Some(other) = others.into_iter().find(taken) {
            let name = other.path.file_name().unwrap_or_default().display().to_string();
            return Err(EdgeError::Refused(format!(
                "the edge '{name}' is up in this network namespace, which can have one only; \
                 `unbroken edge down --name {name}` first, or name this one '{name}' to change it"
            )));
        }
        match self.is_up() {
            Ok(true) => config.can_follow(&self.config()?),
            _ => Ok(()),
        }
    }

    /// Makes what is missing, or changes what is up. After an error nothing is left of what this
    /// call has made.
    pub fn up(&self, text: &str) -> Result<Up> {
        let config = Config::parse(text)?;
        self.fits(&config)?;
        let Missing { mut steps, more } = missing(&config)?;
        let folder = self.make_folder(&config)?;
        let before = self.made(&folder)?;
        let old = folder.read(CONFIG)?;
        let fresh = old.is_none();
        let mut made = before.clone();
        let done = make(&folder, &steps, &mut made).and_then(|()| {
            if more {
                let rest = when_devices_are_there(&config)?;
                make(&folder, &rest, &mut made)?;
                steps.extend(rest);
            }
            self.run(&folder, &config, text)
        });
        let anew = match done {
            Ok(anew) => anew,
            Err(error) => return Err(self.up_failed(error, folder, &before, &made, old)),
        };
        Ok(Up { steps, frr_anew: anew && !fresh, told: self.tell(text)? })
    }

    /// Takes back what a failed `up` has made; gives its error.
    fn up_failed(
        &self,
        error: EdgeError,
        folder: Folder,
        before: &[Step],
        made: &[Step],
        old: Option<String>,
    ) -> EdgeError {
        let new = made.get(before.len()..).unwrap_or_default();
        let Some(old) = old else {
            let _ = self.frr().stop();
            undo(new);
            let _ = folder.remove();
            return error;
        };
        undo(new);
        let _ = remember(&folder, before);
        // What was up stays so; its daemon has heard of nothing.
        let _ = Config::parse(&old).and_then(|config| self.run(&folder, &config, &old));
        error
    }

    /// Starts FRR with its configuration, and keeps ours. Gives whether FRR has another one than
    /// before.
    fn run(&self, folder: &Folder, config: &Config, text: &str) -> Result<bool> {
        let mut anew = false;
        if config.frr {
            let frr = self.frr();
            anew = frr.configure(config)?;
            // Daemons that run with another configuration are started anew.
            if anew {
                frr.stop()?;
            }
            frr.start()?;
        }
        folder.replace(NAMESPACE, &network_namespace().unwrap_or_default())?;
        folder.replace(CONFIG, text)?;
        Ok(anew)
    }

    /// Has a daemon that runs take a configuration; gives whether it had another one.
    fn tell(&self, text: &str) -> Result<bool> {
        let Some(daemon) = self.running().filter(|_| self.text(RUNNING) != text) else {
            return Ok(false);
        };
        daemon.signal(Signal::HUP)?;
        let deadline = Instant::now() + TAKE;
        while self.text(RUNNING) != text {
            if daemon.has_ended() || Instant::now() > deadline {
                return Err(EdgeError::Refused(format!(
                    "the daemon has not taken the changed configuration: see {} and {LOG} in {}, \
                     or `unbroken edge down`, then `unbroken edge up`",
                    crate::events::NAME,
                    self.path.display()
                )));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(true)
    }

    /// Ends the daemon and FRR, and takes back all steps, last first.
    pub fn down(&self) -> Result<Vec<String>> {
        self.stop_daemon()?;
        // A daemon that died has left its routes.
        let closed = [policy::close(), failover::close(), last::close()];
        self.frr().stop()?;
        let folder = self.folder()?;
        let mut left = undo(&self.made(&folder)?);
        left.extend(closed.into_iter().filter_map(|done| done.err().map(|e| e.to_string())));
        folder.remove()?;
        Ok(left)
    }

    /// Starts the daemon, if none runs, in a process of its own.
    pub fn start_daemon(&self, program: &Path) -> Result<()> {
        if self.daemon().is_some() {
            return Ok(());
        }
        let folder = self.folder()?;
        let file = || {
            let file = folder.file(LOG, OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE);
            file.map_err(EdgeError::at(self.path.join(LOG).display()))
        };
        let name = self.path.file_name().unwrap_or_default();
        let mut child = std::process::Command::new(program)
            .args(["edge".as_ref(), "daemon".as_ref(), "--name".as_ref(), name])
            // Its lines are those of the event log, which is bounded; this file is not.
            .env_remove(unbroken_log::VARIABLE)
            .stdin(std::process::Stdio::null())
            .stdout(file()?)
            .stderr(file()?)
            .process_group(0)
            .spawn()
            .map_err(EdgeError::at(program.display()))?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.daemon().is_none() {
            let ended = child.try_wait().map_err(EdgeError::at(program.display()))?.is_some();
            if ended || Instant::now() > deadline {
                let why = self.text(LOG);
                return Err(EdgeError::Refused(format!(
                    "the daemon did not start: {}",
                    why.trim()
                )));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Ends the daemon, which then takes its rules away.
    pub fn stop_daemon(&self) -> Result<()> {
        self.running().map_or(Ok(()), |daemon| daemon.end(END))
    }
}

/// Takes steps. Each is remembered before it is taken.
fn make(folder: &Folder, steps: &[Step], made: &mut Vec<Step>) -> Result<()> {
    for step in steps {
        made.retain(|m| m.key != step.key);
        made.push(step.clone());
        remember(folder, made)?;
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

fn remember(folder: &Folder, made: &[Step]) -> Result<()> {
    folder.replace(MADE, &serde_json::to_string_pretty(made).map_err(EdgeError::at(MADE))?)
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
pub fn missing(config: &Config) -> Result<Missing> {
    if let Some(lacked) = check::lacking(config) {
        return Err(EdgeError::Refused(lacked));
    }
    let nics = nic::missing(config)?;
    if nics.is_empty() {
        return Ok(Missing { steps: of_devices(config, &links()?)?, more: false });
    }
    Ok(Missing { steps: nics, more: true })
}

/// The steps that follow those of NICs, as soon as their drivers have made all devices.
fn when_devices_are_there(config: &Config) -> Result<Vec<Step>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let links = links()?;
        let there = |name: &str| {
            links.as_array().is_some_and(|all| all.iter().any(|link| link["ifname"] == name))
        };
        // Who is still missing then is named by the plan.
        if nic::awaited(config, &there).is_none() || Instant::now() > deadline {
            return of_devices(config, &links);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn links() -> Result<Value> {
    serde_json::from_str(&run(&["ip", "-j", "-d", "addr", "show"])?).map_err(EdgeError::at("ip"))
}

fn of_devices(config: &Config, links: &Value) -> Result<Vec<Step>> {
    let setting = |key: &str| {
        let path = format!(
            "/proc/sys/{}",
            key.replace('.', "\u{0}").replace('/', ".").replace('\u{0}', "/")
        );
        Some(fs::read_to_string(path).ok()?.trim().to_owned())
    };
    plan(config, &Present { links, setting: &setting })
}

/// Takes steps back, last first; gives what could not be.
fn undo(steps: &[Step]) -> Vec<String> {
    let commands = steps.iter().rev().flat_map(|s| &s.undo);
    commands.filter_map(|c| command::run(c).err().map(|e| e.to_string())).collect()
}

fn network_namespace() -> Option<String> {
    Some(fs::read_link("/proc/self/ns/net").ok()?.to_str()?.to_owned())
}
