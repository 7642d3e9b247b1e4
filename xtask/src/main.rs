//! Build helper of the workspace: what cargo cannot do by itself.
//!
//! - `so`: in the profile that xtask itself was built with, or `--release`: builds the C library
//!   and links `libunbroken.so` with its version script (a plain cdylib would export Rust's own
//!   symbols and cannot carry libibverbs' names as libraries expect them).
//! - `abi`: compares the layouts in `unbroken_verbs::abi` with the installed `infiniband/verbs.h`,
//!   and the list of functions in `crates/api/preload/exports.txt` with the installed libibverbs.
//! - `deps`: the rules that shape the code (which crate may depend on which, where `unsafe` lives,
//!   circles of files, how long files are); `deps --uses crates/verbs`: which file of a crate uses
//!   which, with a `*` where that leads back.
#![forbid(unsafe_code)]

mod abi;
mod deps;
mod exports;
mod so;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Result of a task; the error is a sentence for the terminal.
type Result<T> = std::result::Result<T, String>;

const USAGE: &str = "usage: cargo xtask so [--release] | abi | deps [--uses CRATE_FOLDER]";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args[..] {
        ["so"] => so::link(built_for_release()).map(|so| println!("{}", so.display())),
        ["so", "--release"] => so::link(true).map(|so| println!("{}", so.display())),
        ["abi"] => abi::check().and_then(|layouts| {
            let functions = exports::check_theirs()?;
            let newer = exports::check_newer()?;
            println!("abi: {layouts} sizes and offsets, {functions} functions as in the installed libibverbs, {newer} of a newer one");
            Ok(())
        }),
        ["deps"] => deps::check(),
        ["deps", "--uses", folder] => deps::uses(folder),
        _ => Err(USAGE.to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("xtask: {what}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the workspace.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// The cargo that started us, without what it says of xtask: build scripts (ring's) watch these
/// variables and would run again, and everything above them be built again, each time that cargo is
/// run by xtask and by a user in turns.
fn cargo() -> Command {
    let mut c = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        if name
            .to_str()
            .is_some_and(|n| n.starts_with("CARGO_PKG_") || n.starts_with("CARGO_MANIFEST_"))
        {
            c.env_remove(name);
        }
    }
    c.current_dir(root());
    c
}

/// Whether xtask itself was built with the release profile: `so` follows it unless told otherwise.
fn built_for_release() -> bool {
    std::env::current_exe()
        .is_ok_and(|exe| exe.parent().is_some_and(|dir| dir.ends_with("release")))
}

/// Where cargo builds to.
fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Runs a command to its end and gives its standard output; the error names the command and has its
/// standard error.
fn output(cmd: &mut Command) -> Result<String> {
    let name = cmd.get_program().to_string_lossy().into_owned();
    let out = cmd.output().map_err(|e| format!("cannot run {name}: {e}"))?;
    if !out.status.success() {
        return Err(format!(
            "{name} failed ({}):\n{}",
            out.status,
            String::from_utf8_lossy(&out.stderr).trim_end()
        ));
    }
    String::from_utf8(out.stdout)
        .map_err(|e| format!("{name} printed something that is not text: {e}"))
}
