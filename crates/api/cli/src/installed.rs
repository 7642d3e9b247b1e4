//! What is installed beside the command: the library of `unbroken run`, the program of the demo.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::output::{Failure, Result};

/// The library that goes in front of libibverbs.
pub(crate) const LIBRARY: &str = "libunbroken.so";
/// The program of the demo that checks every message: tests/c/verifier.c.
pub(crate) const VERIFIER: &str = "unbroken-verifier";

/// A file of ours, or all places where it was looked for.
pub(crate) fn find(name: &str) -> Result<std::result::Result<PathBuf, Vec<PathBuf>>> {
    let me =
        std::env::current_exe().map_err(|e| Failure::io("cannot find this program's folder", e))?;
    let places = places(me.parent().unwrap_or(Path::new("/")), name);
    let found = places.iter().find(|place| place.is_file()).cloned();
    Ok(found.ok_or(places))
}

/// Where a file may lie: beside the command, as a build and the Python package have it, then what
/// LIBDIR is in /usr/local and in distributions. Debian's package has a folder of its own there.
fn places(folder: &Path, name: &str) -> Vec<PathBuf> {
    let multiarch = format!("../lib/{}-linux-gnu", std::env::consts::ARCH);
    let own = format!("{multiarch}/unbroken");
    ["", "../lib", "../lib64", &multiarch, &own].map(|p| folder.join(p).join(name)).to_vec()
}

/// The library that was named, or the one that lies where an installation or a build has it.
pub(crate) fn library(named: Option<&Path>) -> Result<PathBuf> {
    let path = match named {
        Some(path) => path.to_path_buf(),
        None => find(LIBRARY)?.map_err(|places| no_library(&places))?,
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

/// Why the library cannot be found, and what helps.
pub(crate) fn no_library(places: &[PathBuf]) -> String {
    let places: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
    format!(
        "there is no {}; the packages and `make install` bring it, `cargo install` does not: \
         in the sources, `cargo xtask so` builds it into target/release, from where it can be \
         copied beside this program, or named with --lib",
        places.join(", no ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_told_with_every_place_and_what_helps() {
        let places = places(Path::new("/opt/bin"), LIBRARY);
        let text = no_library(&places);
        for part in ["/opt/bin/libunbroken.so, no /opt/bin/../lib/", "cargo xtask so", "--lib"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(places.len(), 5);
    }

    #[test]
    fn a_file_that_is_nowhere_names_the_places() {
        let places = find("no-such-file-of-ours").unwrap().unwrap_err();
        assert!(places.iter().all(|place| place.ends_with("no-such-file-of-ours")));
    }
}
