//! `unbroken cdi`: specifications of the Container Device Interface, by which podman, docker,
//! containerd and Kubernetes give containers the NICs of a host of the emulated network.
//!
//! A device is what a container needs: the command and `libunbroken.so` as read-only mounts, the
//! runtime folder as a writable one, and the environment that puts the library in front of every
//! program. No daemon and no driver take part.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use rustix::process::geteuid;
use serde::Serialize;
use unbroken_environment as environment;
use unbroken_fabric::{Fabric, Runtime};

use crate::installed::library;
use crate::output::{check_replaceable, print, Failure, Result};

/// The oldest version of the format that has the type of a mount.
const CDI_VERSION: &str = "0.5.0";
const KIND: &str = "unbroken.dev/nic";
/// Where things lie in a container: where the command finds the library by itself.
const COMMAND_INSIDE: &str = "/usr/local/bin/unbroken";
const LIBRARY_INSIDE: &str = "/usr/local/lib/libunbroken.so";
const RUNTIME_INSIDE: &str = "/run/unbroken";
/// The device of a container that says itself, by `UNBROKEN_HOST`, which host it is.
const ALL: &str = "all";

#[derive(Subcommand)]
pub(crate) enum CdiCommand {
    /// Write the devices of the emulated network as a CDI specification
    #[command(after_help = "Examples:
  sudo unbroken cdi generate --output /etc/cdi/unbroken.json
  podman run --network host --device unbroken.dev/nic=a IMAGE ibv_devinfo
  podman run --network host --device unbroken.dev/nic=b IMAGE ib_write_bw -d unb0

A device is a host of the emulated network, with its NICs. The device all is any host:
the container says which by UNBROKEN_HOST, else it is a. Containers reach each other \
if they share a network namespace (--network host, or one pod), and run as the user \
of the runtime folder.")]
    Generate {
        /// The file, made or replaced [default: stdout]
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
        /// The library for containers [default: as in `unbroken run`]
        #[arg(long, value_name = "PATH")]
        lib: Option<PathBuf>,
    },
}

/// A specification, as the format has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    cdi_version: &'static str,
    kind: &'static str,
    devices: Vec<Device>,
    container_edits: Edits,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    container_edits: Edits,
}

#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Edits {
    env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mounts: Vec<Mount>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    host_path: String,
    container_path: &'static str,
    r#type: &'static str,
    options: Vec<&'static str>,
}

impl Mount {
    /// A file or folder of ours at its place in a container.
    fn bind(from: &Path, container_path: &'static str, access: &'static str) -> Result<Mount> {
        let host_path = from.to_str().ok_or_else(|| {
            format!("{}: CDI has paths in UTF-8 only; move it to another folder", from.display())
        })?;
        let options = vec!["bind", access, "nosuid", "nodev"];
        Ok(Mount { host_path: host_path.into(), container_path, r#type: "bind", options })
    }
}

/// Runs `unbroken cdi`.
pub(crate) fn cdi(runtime: &Runtime, command: CdiCommand) -> Result {
    let CdiCommand::Generate { output, lib } = command;
    let program = std::env::current_exe().and_then(|me| me.canonicalize());
    let program = program.map_err(|e| Failure::io("cannot find this program", e))?;
    let folder = runtime.path();
    let folder = folder.canonicalize().map_err(|e| Failure::io(folder.display(), e))?;
    let fabric = Fabric::open(runtime)?;
    let hosts: Vec<&str> = fabric.hosts().iter().map(|h| h.name.as_str()).collect();
    let spec = spec(&hosts, [&program, &library(lib.as_deref())?, &folder])?;
    let text =
        serde_json::to_string_pretty(&spec).map_err(|e| format!("cannot write JSON: {e}"))? + "\n";
    match output {
        None => print(&text),
        Some(path) => replace(&path, &text),
    }
}

/// The devices of these hosts, with the command, the library and the runtime folder.
fn spec(hosts: &[&str], [command, library, runtime]: [&Path; 3]) -> Result<Spec> {
    let host = |name: &str| Device {
        name: name.into(),
        container_edits: Edits {
            env: vec![format!("{}={name}", environment::HOST)],
            ..Edits::default()
        },
    };
    // A device needs an edit of its own; that of the file as a whole would do.
    let all = Device {
        name: ALL.into(),
        container_edits: Edits {
            env: vec![format!("{}={RUNTIME_INSIDE}", environment::RUNTIME)],
            ..Edits::default()
        },
    };
    let named = hosts.iter().copied().filter(|name| *name != ALL).map(host);
    Ok(Spec {
        cdi_version: CDI_VERSION,
        kind: KIND,
        devices: std::iter::once(all).chain(named).collect(),
        container_edits: Edits {
            env: vec![
                format!("LD_PRELOAD={LIBRARY_INSIDE}"),
                format!("{}={RUNTIME_INSIDE}", environment::RUNTIME),
            ],
            mounts: vec![
                Mount::bind(command, COMMAND_INSIDE, "ro")?,
                Mount::bind(library, LIBRARY_INSIDE, "ro")?,
                Mount::bind(runtime, RUNTIME_INSIDE, "rw")?,
            ],
        },
    })
}

/// Puts a file into place whole: engines may read it at any time. A link there is replaced.
fn replace(path: &Path, text: &str) -> Result {
    check_replaceable(path)?;
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let made_by = |e| Failure::io(folder.display(), e);
    fs::create_dir_all(folder).map_err(made_by)?;
    let mut file = tempfile::Builder::new()
        .prefix(".unbroken-")
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(folder)
        .map_err(made_by)?;
    file.write_all(text.as_bytes()).map_err(made_by)?;
    file.persist(path).map_err(|e| Failure::io(path.display(), e.error))?;
    if !geteuid().is_root() {
        eprintln!("unbroken: for containers of this user alone, which the runtime folder is of");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_device_and_all_leaves_the_choice() {
        let places = ["/usr/bin/unbroken", "/lib/libunbroken.so", "/run/u"].map(Path::new);
        let json = serde_json::to_value(spec(&["a", "b", "all"], places).unwrap()).unwrap();
        let names: Vec<_> =
            json["devices"].as_array().unwrap().iter().map(|d| &d["name"]).collect();
        assert_eq!(names, ["all", "a", "b"]);
        assert_eq!(json["devices"][1]["containerEdits"]["env"][0], "UNBROKEN_HOST=a");
        assert_eq!(json["containerEdits"]["mounts"][2]["hostPath"], "/run/u");
        assert_eq!(json["containerEdits"]["mounts"][2]["options"][1], "rw");
        assert_eq!(json["kind"], KIND);
    }

    #[test]
    fn a_file_is_replaced_whole_and_no_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("cdi/u.json"), folder.path().join("other"));
        replace(&path, "one").unwrap();
        fs::write(&other, "mine").unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        replace(&path, "two").unwrap();
        assert_eq!(fs::read_to_string(&other).unwrap(), "mine");
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
