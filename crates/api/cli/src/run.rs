//! `unbroken run`: becomes a program with our verbs in front of the system's.

use std::ffi::OsString;
use std::io;
use std::net::IpAddr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use unbroken_directory::{Redis, Settings, DEFAULT_VARIABLE};
use unbroken_environment as environment;
use unbroken_fabric::{device_kind_name, Fabric, Runtime};
use unbroken_nics::HostNics;

use crate::args::RunArgs;
use crate::installed;
use crate::joined::Joined;
use crate::output::{Failure, Result};
use crate::program;
use crate::sanitizer::Sanitizers;

/// Where the kernel shows its RDMA devices.
const HOST_DEVICES: &str = "/sys/class/infiniband";

/// Runs the program in place of this one; returns only if that fails.
pub(crate) fn run(runtime: &Runtime, args: &RunArgs) -> Result {
    let library = installed::library(args.lib.as_deref())?;
    let [name, arguments @ ..] = &args.program[..] else {
        return Err("which program?".to_string().into());
    };
    let mut command = Command::new(name);
    command.args(arguments);
    let joined = choose_nics(runtime, args, &mut command)?;
    command.env(environment::RUNTIME, runtime.path());
    let failover = !args.no_failover && environment::flag(environment::FAILOVER);
    take_faults(args.faults, failover, &mut command)?;
    match (&args.directory, &joined) {
        (Some(directory), _) => _ = command.env(DEFAULT_VARIABLE, directory),
        (None, Some(joined)) => joined.name_directory(&mut command),
        (None, None) => {}
    }
    if failover {
        check_directory(args.directory.as_deref())?;
    }
    command.env(environment::FAILOVER, if failover { "1" } else { "0" });
    if let Some(what) = program::check(name)? {
        eprintln!("unbroken: {what}");
    }
    let sanitizers = Sanitizers::of(name);
    command
        .env("LD_PRELOAD", preload(&sanitizers.runtimes, &library, std::env::var_os("LD_PRELOAD")));
    let options = sanitizers.tsan_options(runtime.path(), std::env::var_os("TSAN_OPTIONS"));
    if let Some(options) =
        options.map_err(|e| Failure::io("writing tsan.supp into the runtime folder", e))?
    {
        command.env("TSAN_OPTIONS", options);
    }
    let error = command.exec();
    let status = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    Err(Failure::Program {
        status,
        text: format!("cannot run {}: {error}", name.to_string_lossy()),
    })
}

/// Faults are of devices of the machine, where Unbroken is in front of them.
fn take_faults(wanted: bool, failover: bool, command: &mut Command) -> Result {
    if !wanted && !environment::flag(environment::DEVICE_FAULTS) {
        return Ok(());
    }
    let has_devices =
        command.get_envs().any(|(name, value)| name == environment::DEVICES && value.is_some());
    let what = match (has_devices, failover) {
        (true, true) => {
            command.env(environment::DEVICE_FAULTS, "1");
            return Ok(());
        }
        (false, _) => "--faults is of RDMA devices of this machine: name them with --devices",
        (true, false) => {
            "--faults needs failover: without it programs have libibverbs itself, and nothing can \
             be set between"
        }
    };
    match wanted {
        true => Err(what.to_string().into()),
        // The environment is of other programs, too.
        false => Ok(()),
    }
}

/// Chooses the program's NICs: those of the options, else those of the environment, else those of
/// the network that this machine has joined. Returns that network if its NICs are used.
fn choose_nics(runtime: &Runtime, args: &RunArgs, command: &mut Command) -> Result<Option<Joined>> {
    let named_here = args.devices.is_some() || args.nics.is_some() || args.host.is_some();
    let or_from = |argument: &Option<String>, variable| {
        argument.clone().or_else(|| environment::text(variable).filter(|_| !named_here))
    };
    let (mut devices, mut nics, mut host) = (
        or_from(&args.devices, environment::DEVICES),
        or_from(&args.nics, environment::NICS),
        or_from(&args.host, environment::HOST),
    );
    let named = devices.is_some() || nics.is_some() || host.is_some();
    let joined = if named { None } else { Joined::load(runtime)? };
    if let Some(joined) = &joined {
        nics = Some(joined.nics());
    } else if !named {
        match host_devices() {
            names if names.is_empty() => host = Some("a".into()),
            names => {
                eprintln!("unbroken: on this machine's devices: {}", names.join(", "));
                devices = Some("all".into());
            }
        }
    }
    for variable in [environment::DEVICES, environment::NICS, environment::HOST] {
        command.env_remove(variable);
    }
    if args.device.is_some() && (devices.is_some() || nics.is_none()) {
        let what = "--device is of NICs at addresses (--nics); in the emulated network \
                    `unbroken fabric up --device` says it";
        return Err(what.to_string().into());
    }
    if let Some(devices) = devices {
        check_devices(&devices)?;
        command.env(environment::DEVICES, devices);
    } else if let Some(nics) = nics {
        check_addresses(&nics)?;
        command.env(environment::NICS, nics);
        if let Some(device) = args.device {
            command.env(environment::DEVICE, device_kind_name(device));
        }
    } else if let Some(host) = host {
        // A wrong name is better told here than by a program that finds no device.
        Fabric::open(runtime)?.host(&host)?;
        command.env(environment::HOST, host).env_remove(environment::DEVICE);
    }
    Ok(joined)
}

/// The RDMA devices that the kernel shows, or that the library opens which the environment names.
fn host_devices() -> Vec<String> {
    if environment::text(environment::LIBIBVERBS).is_some() {
        let each = HostNics::openable().unwrap_or_default();
        return each.into_iter().map(|(name, _)| name).collect();
    }
    // Without RDMA a kernel has no such folder.
    let Ok(entries) = std::fs::read_dir(HOST_DEVICES) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

/// A name that is wrong is better told here than by a program that finds no device.
fn check_devices(list: &str) -> Result {
    let there = host_devices();
    let names = || list.split(',').map(str::trim).filter(|name| *name != "all");
    match names().find(|name| !there.iter().any(|other| other == name)) {
        None if !there.is_empty() => Ok(()),
        missing => {
            let what = match missing {
                Some(name) => format!("--devices: this machine has no RDMA device '{name}'"),
                None => "--devices: this machine has no RDMA device".to_string(),
            };
            let those = match there.is_empty() {
                true => "the kernel shows none in /sys/class/infiniband".to_string(),
                false => format!("it has {}", there.join(", ")),
            };
            Err(format!("{what}; {those}").into())
        }
    }
}

/// The runtimes of the program's sanitizers, the library, then what was preloaded before; nothing
/// twice.
fn preload(runtimes: &[String], library: &Path, before: Option<OsString>) -> OsString {
    let before = before.unwrap_or_default();
    let others = before
        .as_bytes()
        .split(|b| *b == b':' || b.is_ascii_whitespace())
        .filter(|o| !o.is_empty());
    let mut all: Vec<&[u8]> = runtimes.iter().map(String::as_bytes).collect();
    for one in std::iter::once(library.as_os_str().as_bytes()).chain(others) {
        if !all.contains(&one) {
            all.push(one);
        }
    }
    OsString::from_vec(all.join(&b':'))
}

/// A wrong setting is better told here than by a program that finds no device. The server is not
/// asked: the program would wait for it. It says itself if the server does not answer.
fn check_directory(named: Option<&str>) -> Result {
    let settings = match named {
        Some(url) => Settings::parse_public(url),
        None => Settings::from_env(),
    };
    match settings.map_err(|e| e.to_string())? {
        Settings::Redis(settings) => Redis::check(&settings).map_err(|e| e.to_string().into()),
        Settings::Lmdb => Ok(()),
    }
}

fn check_addresses(list: &str) -> Result {
    for word in list.split(',') {
        if word.trim().parse::<IpAddr>().is_err() {
            return Err(format!(
                "NICs: '{word}' is not an IP address; addresses of interfaces, with commas, are \
                 right"
            )
            .into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_library_comes_first_and_once() {
        let ours = Path::new("/x/libunbroken.so");
        assert_eq!(preload(&[], ours, None), "/x/libunbroken.so");
        assert_eq!(
            preload(&[], ours, Some("a.so b.so:/x/libunbroken.so".into())),
            "/x/libunbroken.so:a.so:b.so"
        );
        let with = preload(&["libasan.so.8".into()], ours, Some("a.so:libasan.so.8".into()));
        assert_eq!(with, "libasan.so.8:/x/libunbroken.so:a.so");
    }
}
