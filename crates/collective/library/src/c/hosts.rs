//! The hosts of this process: communicators on the same NICs share them, and the threads that drive
//! them.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use unbroken::{Host, WeakHost};

use crate::error::Result;

/// What decides which NICs are meant.
#[derive(PartialEq, Eq)]
struct Key {
    /// What was opened before a fork is of no use after it.
    pid: u32,
    /// Of the emulated network; `None`: as the environment says.
    name: Option<String>,
    /// `UNBROKEN_…`, of which some name NICs.
    environment: Vec<(String, String)>,
}

static HOSTS: Mutex<Vec<(Key, WeakHost)>> = Mutex::new(Vec::new());

/// The host of that name, or the environment's: the one that is open, if it is.
pub(super) fn open(runtime: &Path, name: Option<String>) -> Result<Host> {
    let ours = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(b"UNBROKEN_");
    let text = |value: std::ffi::OsString| value.to_string_lossy().into_owned();
    let mut environment: Vec<_> = std::env::vars_os().filter(|(name, _)| ours(name)).collect();
    environment.sort();
    let environment =
        environment.into_iter().map(|(name, value)| (text(name), text(value))).collect();
    let key = Key { pid: std::process::id(), name, environment };
    let mut hosts = HOSTS.lock().unwrap_or_else(PoisonError::into_inner);
    hosts.retain(|(_, host)| host.upgrade().is_some());
    if let Some(host) =
        hosts.iter().find(|(other, _)| *other == key).and_then(|(_, host)| host.upgrade())
    {
        return Ok(host);
    }
    let host = match &key.name {
        Some(name) => Host::emulated(runtime, name)?,
        None => Host::from_env()?,
    };
    hosts.push((key, host.downgrade()));
    Ok(host)
}
