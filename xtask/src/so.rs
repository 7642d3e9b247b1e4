//! Links `libunbroken.so` and checks what it exports.

use crate::exports;
use crate::workspace::{cargo, output, root, target_dir, Result};
use std::path::PathBuf;
use std::process::Command;

/// Builds the static library of `unbroken-preload` and links it; gives the path of the shared
/// library.
pub fn link(release: bool) -> Result<PathBuf> {
    let mut build = cargo();
    // Cargo chooses features for the packages that are named: for this one alone others than for
    // the command, and would compile what both stand on twice.
    build.args(["build", "-q", "-p", "unbroken-preload", "-p", "unbroken-cli", "--lib"]);
    if release {
        build.arg("--release");
    }
    let status = build.status().map_err(|e| format!("cannot run cargo: {e}"))?;
    if !status.success() {
        return Err("unbroken-preload does not build".to_string());
    }
    let dir = target_dir().join(if release { "release" } else { "debug" });
    let archive = dir.join("libunbroken_preload.a");
    let so = dir.join("libunbroken.so");
    // Linked beside and renamed, so that a program which has the old library mapped keeps it whole.
    let fresh = dir.join(format!("libunbroken.so.{}", std::process::id()));
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(["-shared", "-o"]).arg(&fresh);
    cc.arg("-Wl,--whole-archive").arg(&archive).arg("-Wl,--no-whole-archive");
    cc.arg(format!(
        "-Wl,--version-script={}",
        root().join("crates/api/preload/libunbroken.map").display()
    ));
    // The library stays for the life of the process (its threads and the handles that it gave out
    // do), calls its own functions directly, and carries nothing that nobody calls.
    cc.args([
        "-Wl,-soname,libunbroken.so",
        "-Wl,-z,nodelete",
        "-Wl,-z,now",
        "-Wl,-z,defs",
        "-Wl,-Bsymbolic",
    ]);
    cc.args(["-Wl,--gc-sections", "-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"]);
    output(&mut cc)?;
    exports::check_ours(&fresh)?;
    std::fs::rename(&fresh, &so)
        .map_err(|e| format!("cannot rename {} to {}: {e}", fresh.display(), so.display()))?;
    Ok(so)
}
