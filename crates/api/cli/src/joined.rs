//! `unbroken fabric join`: the NICs of this machine in a network of several machines, and the
//! directory of that network. Both are kept in the runtime folder, where `unbroken run` finds them.
//!
//! The file names no secret: a password in the URL is refused, and of a password file its path is
//! kept. It is this user's alone; whatever lies there instead is an error that names it.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};
use unbroken_directory::{
    DirectoryError, Redis, Settings, DEFAULT_VARIABLE, PASSWORD_FILE_VARIABLE, PASSWORD_VARIABLE,
};
use unbroken_environment as environment;
use unbroken_fabric::Runtime;
use unbroken_runtime::open_own;

use crate::output::{print, Failure, Result};

const FILE: &str = "joined.json";
/// The largest file that is read.
const MOST_BYTES: u64 = 64 << 10;
/// As many NICs as the directory takes of a process.
const MOST_NICS: usize = 64;

const START: &str = "\
Start one on a machine that all reach:
  head -c 24 /dev/urandom | base64 > ~/.redis-password && chmod 600 ~/.redis-password
  printf 'requirepass %s\\nbind 0.0.0.0\\nsave \"\"\\n' \"$(cat ~/.redis-password)\" | redis-server -
and give each machine that password with --password-file";

/// What this machine has joined.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Joined {
    /// Addresses of interfaces of this machine; programs see them as unb0, unb1 and so on.
    nics: Vec<IpAddr>,
    /// The URL of the directory.
    directory: String,
    /// The file with its password.
    password_file: Option<PathBuf>,
}

impl Joined {
    /// Loads the network that this runtime folder has joined, if it has joined one.
    pub(crate) fn load(runtime: &Runtime) -> Result<Option<Joined>> {
        let path = path(runtime);
        let wrong = |what: &dyn std::fmt::Display| {
            let shown = path.display();
            Failure::Text(format!("{shown}: {what}; leave that network with: unbroken fabric down"))
        };
        let file = match open_own(&path, OpenOptions::new().read(true)) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(wrong(&e)),
        };
        let mut text = String::new();
        file.take(MOST_BYTES).read_to_string(&mut text).map_err(|e| wrong(&e))?;
        serde_json::from_str(&text).map(Some).map_err(|e| wrong(&e))
    }

    fn save(&self, runtime: &Runtime) -> Result {
        let failed = |e| Failure::io(path(runtime).display(), e);
        let mut file = tempfile::NamedTempFile::new_in(runtime.path()).map_err(failed)?;
        let text = serde_json::to_string_pretty(self).map_err(|e| Failure::Text(e.to_string()))?;
        file.write_all(format!("{text}\n").as_bytes()).map_err(failed)?;
        file.persist(path(runtime)).map_err(|e| failed(e.error))?;
        Ok(())
    }

    /// The NICs as `--nics` takes them.
    pub(crate) fn nics(&self) -> String {
        self.nics.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(",")
    }

    /// Names the directory to the program, where its environment names none.
    pub(crate) fn name_directory(&self, command: &mut Command) {
        if environment_names_directory() {
            return;
        }
        command.env(DEFAULT_VARIABLE, &self.directory);
        if let Some(file) = &self.password_file {
            command.env(PASSWORD_FILE_VARIABLE, file);
        }
    }

    /// The directory, as programs use it.
    pub(crate) fn directory(&self) -> std::result::Result<Settings, DirectoryError> {
        match environment_names_directory() {
            true => Settings::from_env(),
            false => Settings::parse_named(&self.directory, self.password_file.as_deref()),
        }
    }

    /// What `fabric show` says of it.
    pub(crate) fn line(&self) -> String {
        let nics = self.nics.iter().enumerate().map(|(i, addr)| format!("unb{i} is {addr}"));
        let nics = nics.collect::<Vec<_>>().join(", ");
        format!("joined: {nics}; directory {}\n", self.directory)
    }
}

fn environment_names_directory() -> bool {
    environment::text(DEFAULT_VARIABLE).is_some()
}

fn path(runtime: &Runtime) -> PathBuf {
    runtime.path().join(FILE)
}

/// Joins the network: looks whether the addresses are this machine's and the directory answers.
pub(crate) fn join(
    runtime: &Runtime,
    nics: &[IpAddr],
    directory: &str,
    password_file: Option<&Path>,
) -> Result {
    if runtime.fabric_toml().exists() {
        let what = "there is an emulated network in this runtime folder; take it away with \
                    `unbroken fabric down`, or name another folder with --runtime";
        return Err(format!("{}: {what}", runtime.fabric_toml().display()).into());
    }
    check_addresses(nics)?;
    let of_environment = environment::text(PASSWORD_FILE_VARIABLE).map(PathBuf::from);
    let password_file = password_file.map(Path::to_path_buf).or(of_environment);
    let password_file = password_file.map(std::path::absolute).transpose();
    let password_file = password_file.map_err(|e| Failure::io("--password-file", e))?;
    let settings = Settings::parse_named(directory, password_file.as_deref());
    match settings.map_err(|e| e.to_string())? {
        Settings::Redis(settings) => {
            Redis::probe(&settings).map_err(|e| format!("{e}. {START}"))?;
            if settings.password.is_none() {
                eprintln!(
                    "unbroken: the directory has no password: whoever reaches that server can pass \
                     for a peer"
                );
            }
        }
        Settings::Lmdb => {
            let what = "--directory: 'lmdb' is a file of one machine; the URL of a Redis server \
                        that all machines reach is right";
            return Err(format!("{what}. {START}").into());
        }
    }
    if password_file.is_none() && std::env::var_os(PASSWORD_VARIABLE).is_some() {
        eprintln!("unbroken: programs need {PASSWORD_VARIABLE} in their environment, too");
    }
    let joined = Joined { nics: nics.to_vec(), directory: directory.to_owned(), password_file };
    joined.save(runtime)?;
    let next = "programs use them with: unbroken run -- PROGRAM\n";
    print(&format!("{}{next}", joined.line()))
}

fn check_addresses(nics: &[IpAddr]) -> Result {
    if nics.len() > MOST_NICS {
        return Err(format!("--address: {} NICs; at most {MOST_NICS} are right", nics.len()).into());
    }
    let mut seen = HashSet::new();
    for addr in nics {
        if !seen.insert(addr) {
            return Err(format!("--address: {addr} is named twice").into());
        }
        if let Err(e) = UdpSocket::bind((*addr, 0)) {
            return Err(format!(
                "--address: {addr} is no address of this machine ({e}); `ip -brief address` shows \
                 those that it has"
            )
            .into());
        }
    }
    Ok(())
}

/// Leaves the network. False: none was joined.
pub(crate) fn leave(runtime: &Runtime) -> Result<bool> {
    match std::fs::remove_file(path(runtime)) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Failure::io(path(runtime).display(), e)),
    }
}
