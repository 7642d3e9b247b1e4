//! Links `libunbroken.so` and checks what it exports; names the C libraries as programs look for
//! them.

use crate::exports;
use crate::workspace::{cargo, output, root, target_dir, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The C libraries that cargo links, each with a SONAME (their build scripts say it).
const C_LIBRARIES: [&str; 3] = ["libunbroken_apm.so", "libunbroken_coll.so", "libunbroken_sdr.so"];

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
    for library in C_LIBRARIES {
        link_soname(&dir, library)?;
    }
    Ok(so)
}

/// Makes `libunbroken_sdr.so.0` a symbolic link to `libunbroken_sdr.so`: a program that is linked
/// with the one asks for the other when it starts.
fn link_soname(dir: &Path, library: &str) -> Result<()> {
    let link = dir.join(format!("{library}.{}", env!("CARGO_PKG_VERSION_MAJOR")));
    if std::fs::read_link(&link).is_ok_and(|to| to == Path::new(library)) {
        return Ok(());
    }
    // Removed and made anew: it may be a stale file.
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(library, &link)
        .map_err(|e| format!("cannot link {} to {library}: {e}", link.display()))
}
