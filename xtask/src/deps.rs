//! The rule that shapes the code, checked.
//!
//! - *Pure* crates (protocol logic) depend on pure crates and a few leaf crates only, and their sources open no socket or file, read
//!   no clock and start no thread. `sim` drives pure crates alone.
//! - `shift` learns of failures through `Device` alone: only its construction module names a concrete device or the fabric.
//! - `unsafe` lives in a few crates; every other one forbids it.
//! - No file is longer than [`MAX_LINES`].

use crate::{cargo, output, root, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Protocol logic.
const PURE: &[&str] =
    &["types", "wire", "roce", "journal", "path", "overlay", "schedule", "comm", "codes", "model", "chart", "sdr"];
/// What a pure crate may use from outside: small crates without I/O.
const LEAVES: &[&str] = &["crc32fast", "half", "hmac", "sha2", "thiserror", "zerocopy"];
/// Crates that do I/O, from the lowest floor to the highest: each may use those before it. Whatever is neither here nor pure nor [`TOOLS`]
/// is an unknown crate, and an error.
const SHELLS: &[&str] = &[
    "telemetry",
    "isal",
    "verbs",
    "apm",
    "fabric",
    "directory",
    "softnic",
    "holding",
    "shift",
    "unbroken",
    "collective",
    "sdk",
    "preload",
    "edged",
    "cli",
];
/// Harnesses.
const TOOLS: &[&str] = &["sim", "trial", "bench", "xtask"];
/// Crates that may use `unsafe` (`directory`: only the call that opens LMDB, since a file is mapped there; `codes`, though pure: only the
/// vector instructions of its kernels; `isal`: the functions of a library that is loaded at run time; `collective`: memory of operations under
/// way, and its C API; `apm`: the process's libibverbs, and its C API).
const UNSAFE: &[&str] =
    &["verbs", "softnic", "fabric", "directory", "preload", "codes", "isal", "sdk", "collective", "apm"];
/// What a pure crate's source must not name.
const IMPURE: &[&str] = &[
    "std::net::Udp",
    "std::net::Tcp",
    "std::time",
    "std::thread",
    "std::fs",
    "std::process",
    "std::env",
    "Instant::now",
    "SystemTime",
];
/// The only file of `shift` that may name these.
const CONSTRUCTION: &str = "crates/shift/src/devices.rs";
const CONCRETE: &[&str] = &["unbroken_softnic", "unbroken_fabric"];
/// A file longer than this is an error; longer than [`LONG_LINES`] it is listed.
const MAX_LINES: usize = 700;
const LONG_LINES: usize = 600;

/// Runs all checks; prints long files; the error has a line for each breach.
pub fn check() -> Result<()> {
    let metadata = output(cargo().args(["metadata", "--format-version", "1", "--no-deps"]))?;
    let metadata: Value = serde_json::from_str(&metadata).map_err(|e| format!("cargo metadata: {e}"))?;
    let mut wrong = edges(&metadata)?;
    let sources = sources()?;
    for (path, text) in &sources {
        wrong.extend(source(path, text));
        let lines = text.lines().count();
        if lines > LONG_LINES && lines <= MAX_LINES {
            println!("deps: {} has {lines} lines; past {LONG_LINES} it wants to be two", path.display());
        }
    }
    if wrong.is_empty() {
        println!("deps: {} files keep the rule", sources.len());
        Ok(())
    } else {
        wrong.sort();
        Err(format!("deps:\n  {}", wrong.join("\n  ")))
    }
}

/// Breaches among the dependencies of the workspace's crates.
fn edges(metadata: &Value) -> Result<Vec<String>> {
    let packages = metadata["packages"].as_array().ok_or("cargo metadata has no packages")?;
    let mut wrong = Vec::new();
    for p in packages {
        let name = p["name"].as_str().ok_or("a package without a name")?;
        let name = name.strip_prefix("unbroken-").unwrap_or(name);
        if ![PURE, SHELLS, TOOLS].iter().any(|set| set.contains(&name)) {
            wrong.push(format!("crate {name} is neither pure, a shell nor a tool: name it in xtask/src/deps.rs"));
        }
        for d in p["dependencies"].as_array().into_iter().flatten() {
            // tests and build scripts may use what they like
            if d["kind"].is_null() {
                let dep = d["name"].as_str().ok_or("a dependency without a name")?;
                wrong.extend(edge(name, dep));
            }
        }
    }
    Ok(wrong)
}

/// On which floor a shell is.
fn floor(name: &str) -> Option<usize> {
    SHELLS.iter().position(|shell| *shell == name)
}

/// Why crate `name` must not depend on `dep`, if it must not.
fn edge(name: &str, dep: &str) -> Option<String> {
    let inner = dep.strip_prefix("unbroken-");
    let why = if PURE.contains(&name) {
        match inner {
            Some(d) if PURE.contains(&d) => return None,
            Some(_) => "a pure crate depends on pure crates alone",
            None if LEAVES.contains(&dep) => return None,
            None => "a pure crate uses leaf crates of the allow list alone (xtask/src/deps.rs)",
        }
    } else if name == "sim" && (dep == "tokio" || dep == "libc" || inner.is_some_and(|d| SHELLS.contains(&d))) {
        "the simulator drives pure crates, without I/O"
    } else if let (Some(me), Some(it)) = (floor(name), inner.and_then(floor)) {
        if it < me {
            return None;
        }
        "a shell uses those on lower floors alone (SHELLS in xtask/src/deps.rs)"
    } else if name == "xtask" && dep != "serde_json" {
        "xtask must build before everything else: serde_json alone"
    } else {
        return None;
    };
    Some(format!("crate {name} depends on {dep}: {why}"))
}

/// Breaches in one source file, `path` relative to the workspace.
fn source(path: &Path, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut parts = path.iter().filter_map(|p| p.to_str());
    let name = match parts.next() {
        Some("crates") => parts.next().unwrap_or_default(),
        first => first.unwrap_or_default(),
    };
    let is_src = parts.next() == Some("src");
    let at = |line: usize, what: &str| format!("{}:{}: {what}", path.display(), line + 1);
    let shown = path.to_string_lossy();
    let is_root = is_src && (shown.ends_with("src/lib.rs") || shown.ends_with("src/main.rs"));
    if is_root && !UNSAFE.contains(&name) && !text.contains("#![forbid(unsafe_code)]") {
        wrong.push(at(0, &format!("add #![forbid(unsafe_code)]: unsafe lives in {} only", UNSAFE.join(", "))));
    }
    for (i, line) in text.lines().enumerate().take_while(|(_, l)| !l.starts_with("#[cfg(test)]")) {
        let code = line.split("//").next().unwrap_or_default();
        if is_src && PURE.contains(&name) {
            for word in IMPURE.iter().filter(|w| code.contains(**w)) {
                wrong.push(at(
                    i,
                    &format!("{word} in a pure crate: take time and packets as arguments, leave I/O to a shell"),
                ));
            }
        }
        if is_src && name == "shift" && shown != CONSTRUCTION {
            for word in CONCRETE.iter().filter(|w| code.contains(**w)) {
                wrong.push(at(
                    i,
                    &format!("{word} outside {CONSTRUCTION}: shift knows devices as the trait Device alone"),
                ));
            }
        }
    }
    let lines = text.lines().count();
    if lines > MAX_LINES {
        wrong.push(at(0, &format!("{lines} lines: split it, {MAX_LINES} is the limit")));
    }
    wrong
}

/// All Rust files of the workspace: relative path and text.
fn sources() -> Result<Vec<(PathBuf, String)>> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = ["crates", "xtask"].iter().map(|f| root().join(f)).collect();
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        for entry in entries {
            let path = entry.map_err(|e| format!("{}: {e}", folder.display()))?.path();
            if path.is_dir() {
                if path.file_name().is_some_and(|n| n != "target") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
                found.push((path.strip_prefix(root()).unwrap_or(&path).to_path_buf(), text));
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn breaches(krate: &str, dep: &str, kind: Value) -> Vec<String> {
        edges(&json!({"packages": [{"name": krate, "dependencies": [{"name": dep, "kind": kind}]}]})).unwrap()
    }

    /// Mutants: each of these edges, planted in the metadata, must be caught.
    #[test]
    fn forbidden_edges_are_caught() {
        for (krate, dep) in [
            ("unbroken-path", "unbroken-fabric"),
            ("unbroken-path", "unbroken-softnic"),
            ("unbroken-path", "unbroken-verbs"),
            ("unbroken-roce", "libc"),
            ("unbroken-wire", "tokio"),
            ("unbroken-types", "rand"),
            ("unbroken-codes", "libloading"),
            ("unbroken-codes", "unbroken-isal"),
            ("unbroken-sim", "unbroken-shift"),
            ("unbroken-verbs", "unbroken-softnic"),
            ("unbroken-shift", "unbroken-preload"),
            ("unbroken-sim", "tokio"),
            ("xtask", "unbroken-verbs"),
        ] {
            let found = breaches(krate, dep, Value::Null);
            assert_eq!(found.len(), 1, "{krate} -> {dep}");
            assert!(found[0].contains(dep), "{}", found[0]);
        }
    }

    #[test]
    fn allowed_edges_pass() {
        for (krate, dep) in [
            ("unbroken-roce", "unbroken-wire"),
            ("unbroken-wire", "crc32fast"),
            ("unbroken-shift", "unbroken-softnic"),
            ("unbroken-sim", "unbroken-path"),
        ] {
            assert_eq!(breaches(krate, dep, Value::Null), Vec::<String>::new());
        }
        assert_eq!(breaches("unbroken-roce", "proptest", json!("dev")), Vec::<String>::new());
    }

    #[test]
    fn unknown_crates_are_named() {
        assert!(breaches("unbroken-novel", "libc", Value::Null)[0].contains("novel"));
    }

    #[test]
    fn sources_are_judged_by_their_crate() {
        let judge = |path: &str, text: &str| source(Path::new(path), text).len();
        assert_eq!(judge("crates/path/src/lib.rs", ""), 1, "no forbid(unsafe_code)");
        assert_eq!(judge("crates/path/src/a.rs", "use std::time::Instant;"), 1);
        assert_eq!(judge("crates/path/src/a.rs", "// std::time is not for us\n#[cfg(test)]\nuse std::thread;"), 0);
        assert_eq!(judge("crates/path/tests/a.rs", "use std::time::Instant;"), 0);
        assert_eq!(judge("crates/shift/src/switch.rs", "use unbroken_fabric::Fabric;"), 1);
        assert_eq!(judge(CONSTRUCTION, "use unbroken_fabric::Fabric;"), 0);
        assert_eq!(judge("crates/softnic/src/lib.rs", ""), 0);
        assert_eq!(judge("crates/softnic/src/a.rs", &"\n".repeat(MAX_LINES + 1)), 1);
    }
}
