//! What all tasks need: where the workspace lies, cargo, and how a command is run.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Result of a task; the error is a sentence for the terminal.
pub type Result<T> = std::result::Result<T, String>;

/// The root of the workspace.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// The cargo that started us, without what it says of xtask: build scripts (ring's) watch these
/// variables and would run again, and everything above them be built again, each time that cargo is
/// run by xtask and by a user in turns.
pub fn cargo() -> Command {
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
pub fn built_for_release() -> bool {
    std::env::current_exe()
        .is_ok_and(|exe| exe.parent().is_some_and(|dir| dir.ends_with("release")))
}

/// Where cargo builds to.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Runs a command to its end and gives its standard output; the error names the command and has its
/// standard error.
pub fn output(cmd: &mut Command) -> Result<String> {
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
