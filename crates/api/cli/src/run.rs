//! `unbroken run`: becomes a program with our verbs in front of the system's.

use std::ffi::OsString;
use std::io;
use std::net::IpAddr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use unbroken_directory::{Redis, Settings, DEFAULT_VARIABLE};
use unbroken_fabric::{device_kind_name, Fabric, Runtime};

use crate::args::RunArgs;
use crate::output::{Failure, Result};
use crate::sanitizer::Sanitizers;

const LIBRARY: &str = "libunbroken.so";

/// Runs the program in place of this one; returns only if that fails.
pub(crate) fn run(runtime: &Runtime, args: &RunArgs) -> Result {
    let library = library(args.lib.as_deref())?;
    let [program, arguments @ ..] = &args.program[..] else {
        return Err("which program?".to_string().into());
    };
    let mut command = Command::new(program);
    command.args(arguments);
    match &args.nics {
        Some(nics) => {
            check_addresses(nics)?;
            command.env("UNBROKEN_NICS", nics).env_remove("UNBROKEN_HOST");
            if let Some(device) = args.device {
                command.env("UNBROKEN_DEVICE", device_kind_name(device));
            }
        }
        None => {
            let host = args
                .host
                .clone()
                .or_else(|| std::env::var("UNBROKEN_HOST").ok().filter(|h| !h.is_empty()));
            let host = host.unwrap_or_else(|| "a".into());
            // A wrong name is better told here than by a program that finds no device.
            Fabric::open(runtime)?.host(&host)?;
            command
                .env("UNBROKEN_HOST", host)
                .env_remove("UNBROKEN_NICS")
                .env_remove("UNBROKEN_DEVICE");
        }
    }
    command.env("UNBROKEN_RUNTIME", runtime.path());
    if let Some(directory) = &args.directory {
        command.env(DEFAULT_VARIABLE, directory);
    }
    if !args.no_failover && std::env::var_os("UNBROKEN_FAILOVER").is_none_or(|v| v != "0") {
        check_directory(args.directory.as_deref())?;
    }
    if args.no_failover {
        command.env("UNBROKEN_FAILOVER", "0");
    } else if std::env::var_os("UNBROKEN_FAILOVER").is_none() {
        command.env("UNBROKEN_FAILOVER", "1");
    }
    let sanitizers = Sanitizers::of(program);
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
        text: format!("cannot run {}: {error}", program.to_string_lossy()),
    })
}

/// The library that was named, or the one that lies where an installation or a build has it.
fn library(named: Option<&Path>) -> Result<PathBuf> {
    let path = match named {
        Some(path) => path.to_path_buf(),
        None => {
            let me = std::env::current_exe()
                .map_err(|e| Failure::io("cannot find this program's folder", e))?;
            let folder = me.parent().unwrap_or(Path::new("/"));
            // A build, then what LIBDIR is in /usr/local and in distributions.
            let multiarch = format!("../lib/{}-linux-gnu", std::env::consts::ARCH);
            let places =
                ["", "../lib", "../lib64", &multiarch].map(|p| folder.join(p).join(LIBRARY));
            let found = places.iter().find(|p| p.is_file());
            found.cloned().ok_or_else(|| {
                let places = places.map(|p| p.display().to_string());
                format!(
                    "there is no {}; build it with `cargo xtask so`, or name it with --lib",
                    places.join(", no ")
                )
            })?
        }
    };
    let path =
        path.canonicalize().map_err(|e| Failure::io(format!("library {}", path.display()), e))?;
    if path.as_os_str().as_bytes().iter().any(|b| *b == b':' || b.is_ascii_whitespace()) {
        let rule =
            "its path must have no space and no colon, which separate the names in LD_PRELOAD";
        return Err(format!("library {}: {rule}", path.display()).into());
    }
    Ok(path)
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

/// A wrong setting is better told here than by a program that finds no device. A server that does
/// not answer may do so later: it is told, and the program is run.
fn check_directory(named: Option<&str>) -> Result {
    let settings = match named {
        Some(url) => Settings::parse_public(url),
        None => Settings::from_env(),
    };
    let Settings::Redis(settings) = settings.map_err(|e| e.to_string())? else { return Ok(()) };
    if let Err(e) = Redis::probe(&settings) {
        eprintln!("unbroken: {e}\nunbroken: while that is so, queue pairs that are connected are not protected");
    }
    Ok(())
}

fn check_addresses(list: &str) -> Result {
    for word in list.split(',') {
        if word.trim().parse::<IpAddr>().is_err() {
            return Err(format!(
                "--nics: '{word}' is not an IP address; addresses of interfaces, with commas, are right"
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
