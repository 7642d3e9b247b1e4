//! The program that checks every message: the one that was installed with the command, else its
//! sources, which this command carries, compiled here.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::installed::{self, VERIFIER};
use crate::output::{Failure, Result};

/// Its sources, by where they lie: they include one another by these names.
const SOURCES: [(&str, &str); 6] = [
    ("tests/c/verifier.c", include_str!("../../../../../tests/c/verifier.c")),
    ("tests/c/verifier_send.h", include_str!("../../../../../tests/c/verifier_send.h")),
    ("tests/c/verifier_qp.h", include_str!("../../../../../tests/c/verifier_qp.h")),
    ("tests/c/verifier_stream.h", include_str!("../../../../../tests/c/verifier_stream.h")),
    ("tests/c/common.h", include_str!("../../../../../tests/c/common.h")),
    ("include/unbroken/unbroken.h", include_str!("../../../../../include/unbroken/unbroken.h")),
];
/// Headers that `unbroken.h` includes and the program does not need.
const UNUSED: [&str; 4] = ["apm.h", "coll.h", "sdr.h", "sdr_ext.h"];
const VERBS_HEADER: &str = "/usr/include/infiniband/verbs.h";

/// The program that was named, or that was installed, or that is compiled into `out`.
pub(crate) fn get(named: Option<&Path>, out: &Path) -> Result<PathBuf> {
    if let Some(path) = named {
        return match path.extension().is_some_and(|e| e == "c") {
            true => compile(path, out),
            false => absolute(path),
        };
    }
    if let Ok(program) = installed::find(VERIFIER)? {
        return absolute(&program);
    }
    let folder = tempfile::tempdir().map_err(|e| Failure::io("cannot make a folder", e))?;
    compile(&write_sources(folder.path())?, out)
}

fn absolute(path: &Path) -> Result<PathBuf> {
    path.canonicalize().map_err(|e| Failure::io(format!("verifier {}", path.display()), e))
}

/// Writes what this command carries; gives the file to be compiled.
fn write_sources(folder: &Path) -> Result<PathBuf> {
    let unused = UNUSED.map(|name| (format!("include/unbroken/{name}"), ""));
    let all = SOURCES.iter().map(|(name, text)| (name.to_string(), *text)).chain(unused);
    for (name, text) in all {
        let path = folder.join(name);
        let written = fs::create_dir_all(path.parent().unwrap_or(folder))
            .and_then(|()| fs::write(&path, text));
        written.map_err(|e| Failure::io(format!("cannot write {}", path.display()), e))?;
    }
    Ok(folder.join(SOURCES[0].0))
}

/// Compiles it against the system's libibverbs.
fn compile(source: &Path, out: &Path) -> Result<PathBuf> {
    if !Path::new(VERBS_HEADER).exists() {
        return Err(format!(
            "{VERIFIER} is not installed, and to compile it infiniband/verbs.h is missing: \
             install Debian's libibverbs-dev"
        )
        .into());
    }
    let program = std::path::absolute(out.join("verifier"))
        .map_err(|e| Failure::io("cannot find the working folder", e))?;
    let mut command = Command::new("cc");
    command.args(["-O2", "-o"]).arg(&program).arg(source).args(["-libverbs", "-lpthread"]);
    let done = command.output().map_err(|e| Failure::io("cannot run cc (a C compiler)", e))?;
    if done.status.success() {
        return Ok(program);
    }
    let text = String::from_utf8_lossy(&done.stderr);
    let line = text.lines().next().unwrap_or("cc failed");
    Err(format!("cannot compile {}: {line}", source.display()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sources_are_complete() {
        let folder = tempfile::tempdir().unwrap();
        let source = write_sources(folder.path()).unwrap();
        if !Path::new(VERBS_HEADER).exists() {
            eprintln!("skipped: {VERBS_HEADER} is missing (libibverbs-dev)");
            return;
        }
        assert!(compile(&source, folder.path()).unwrap().is_file());
    }

    #[test]
    fn a_verifier_that_is_not_there_is_named() {
        let error = get(Some(Path::new("/no/such")), Path::new("/tmp")).unwrap_err();
        assert!(error.to_string().starts_with("verifier /no/such: "), "{error}");
    }
}
