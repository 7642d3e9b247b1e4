//! Which crate may depend on which: by the folder that it lies in, and by what its manifest says.
//!
//! A layer is a folder of `crates/`. Within a layer crates may use one another freely (cargo itself
//! forbids circles). A crate says in `[package.metadata.unbroken]` of its manifest:
//!
//! - `pure = true`: protocol logic without I/O. It may use pure crates and [`LEAVES`] alone.
//! - `unsafe = "why"`: it may use `unsafe`; every other crate forbids it.

use crate::workspace::Result;
use serde_json::Value;

/// A layer, and the layers that its crates may use beside their own; [`ANY`] for all of them.
const LAYERS: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("verbs", &["base"]),
    ("nic", &["verbs", "base"]),
    ("failover", &["verbs", "base"]),
    ("apm", &["verbs", "base"]),
    ("edge", &["base"]),
    ("collective", &["base"]),
    ("sdr", &["verbs", "base"]),
    ("api", &["base", "verbs", "nic", "failover", "apm", "edge", "collective", "sdr"]),
    ("tools", ANY),
    ("xtask", &[]),
];
const ANY: &[&str] = &["*"];
/// Single dependencies that a layer's rule does not have: the crate, what it may use, and why.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("unbroken-sim", "unbroken-roce", "the simulator runs whole connections"),
    ("unbroken-sim", "unbroken-wire", "the simulator runs whole connections"),
    ("unbroken-collective", "unbroken", "collectives are an application of the Rust API"),
    ("unbroken-sdr", "unbroken", "SDR is an application of the Rust API"),
    ("unbroken-cli", "unbroken-testkit", "the demo watches real programs as the benches do"),
    ("xtask", "unbroken-events", "`docs` compares the reference with what it declares"),
];
/// What a pure crate may use from outside: small crates without I/O.
const LEAVES: &[&str] =
    &["bitflags", "crc32fast", "half", "hmac", "serde", "sha2", "thiserror", "zerocopy"];
/// What `xtask` may use: it is built before everything else.
const FOR_XTASK: &[&str] = &["serde_json", "syn"];

/// A crate of the workspace.
pub struct Package {
    /// As in its manifest: `unbroken-shift`.
    pub name: String,
    /// The folder of its manifest, relative to the workspace's root.
    pub folder: String,
    /// The first folder under `crates/`, or `xtask`.
    pub layer: String,
    /// Whether it says that it is protocol logic without I/O.
    pub pure: bool,
    /// Whether it says that, and why, it uses `unsafe`.
    pub may_use_unsafe: bool,
    /// Names of what it depends on outside of tests and build scripts.
    pub dependencies: Vec<String>,
}

/// The crates that `cargo metadata` tells of.
pub fn packages(metadata: &Value) -> Result<Vec<Package>> {
    let root = metadata["workspace_root"].as_str().ok_or("cargo metadata has no workspace_root")?;
    let all = metadata["packages"].as_array().ok_or("cargo metadata has no packages")?;
    all.iter().map(|p| package(root, p)).collect()
}

fn package(root: &str, p: &Value) -> Result<Package> {
    let name = p["name"].as_str().ok_or("a package without a name")?.to_string();
    let manifest = p["manifest_path"].as_str().ok_or("a package without a manifest")?;
    let folder = manifest
        .strip_prefix(root)
        .and_then(|m| m.strip_suffix("/Cargo.toml"))
        .ok_or_else(|| format!("{manifest} lies outside of {root}"))?
        .trim_start_matches('/')
        .to_string();
    let inside = folder.strip_prefix("crates/").unwrap_or(&folder);
    let layer = inside.split('/').next().unwrap_or_default().to_string();
    let said = &p["metadata"]["unbroken"];
    let dependencies = p["dependencies"].as_array().into_iter().flatten();
    Ok(Package {
        pure: said["pure"] == Value::Bool(true),
        may_use_unsafe: said["unsafe"].is_string(),
        // tests and build scripts may use what they like
        dependencies: dependencies
            .filter(|d| d["kind"].is_null())
            .filter_map(|d| d["name"].as_str().map(str::to_string))
            .collect(),
        name,
        folder,
        layer,
    })
}

/// A line for each dependency that breaks a rule.
pub fn breaches(packages: &[Package]) -> Vec<String> {
    let mut wrong = Vec::new();
    for p in packages {
        if !LAYERS.iter().any(|(layer, _)| *layer == p.layer) {
            let why = "is no layer: see docs/internals/layers.md and LAYERS in xtask";
            wrong.push(format!("crate {} lies in {}/, which {why}", p.name, p.layer));
            continue;
        }
        for dependency in &p.dependencies {
            if let Some(why) = refused(p, dependency, packages) {
                wrong.push(format!("crate {} depends on {dependency}: {why}", p.name));
            }
        }
    }
    wrong
}

/// Why `p` must not depend on `dependency`, if it must not.
fn refused(p: &Package, dependency: &str, packages: &[Package]) -> Option<String> {
    let inner = packages.iter().find(|other| other.name == dependency);
    let Some(inner) = inner else {
        let why = if p.pure && !LEAVES.contains(&dependency) {
            "a pure crate uses the leaf crates of LEAVES alone"
        } else if p.layer == "xtask" && !FOR_XTASK.contains(&dependency) {
            "xtask builds before everything else: serde_json and syn alone"
        } else if p.name == "unbroken-sim" && ["tokio", "libc", "rustix"].contains(&dependency) {
            "the simulator does no I/O"
        } else {
            return None;
        };
        return Some(why.to_string());
    };
    if p.pure && !inner.pure {
        return Some("a pure crate depends on pure crates alone".to_string());
    }
    if p.name == "unbroken-sim" && !inner.pure {
        return Some("the simulator drives pure crates alone".to_string());
    }
    if EXCEPTIONS.iter().any(|(from, to, _)| *from == p.name && *to == dependency) {
        return None;
    }
    let (_, may_use) = LAYERS.iter().find(|(layer, _)| *layer == p.layer)?;
    if inner.layer == p.layer || *may_use == ANY || may_use.contains(&inner.layer.as_str()) {
        return None;
    }
    Some(format!("{}/ must not use {}/ (LAYERS in xtask/src/deps/layers.rs)", p.layer, inner.layer))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crate_in(layer: &str, name: &str, pure: bool, dependencies: &[&str]) -> Package {
        Package {
            name: name.to_string(),
            folder: format!("crates/{layer}/{name}"),
            layer: layer.to_string(),
            pure,
            may_use_unsafe: false,
            dependencies: dependencies.iter().map(|d| d.to_string()).collect(),
        }
    }

    /// The breaches of one crate among some that are there.
    fn judge(layer: &str, name: &str, pure: bool, dependency: &str) -> Vec<String> {
        let there = [
            ("base", "unbroken-types", true),
            ("base", "unbroken-runtime", false),
            ("verbs", "unbroken-verbs", false),
            ("nic", "unbroken-softnic", false),
            ("nic", "unbroken-roce", true),
            ("nic", "unbroken-wire", true),
            ("failover", "unbroken-shift", false),
            ("failover", "unbroken-journal", true),
            ("api", "unbroken-preload", false),
            ("api", "unbroken", false),
            ("tools", "unbroken-testkit", false),
        ];
        let mut all: Vec<Package> =
            there.iter().map(|(layer, name, pure)| crate_in(layer, name, *pure, &[])).collect();
        all.push(crate_in(layer, name, pure, &[dependency]));
        breaches(&all)
    }

    /// Each of these dependencies, planted, is found.
    #[test]
    fn forbidden_dependencies_are_found() {
        for (layer, name, pure, dependency) in [
            ("base", "unbroken-new", true, "unbroken-runtime"),
            ("base", "unbroken-new", false, "unbroken-verbs"),
            ("verbs", "unbroken-new", false, "unbroken-softnic"),
            ("verbs", "unbroken-new", false, "unbroken-roce"),
            ("failover", "unbroken-new", false, "unbroken-softnic"),
            ("failover", "unbroken-new", false, "unbroken-roce"),
            ("failover", "unbroken-new", true, "unbroken-verbs"),
            ("failover", "unbroken-new", true, "libc"),
            ("failover", "unbroken-sim", false, "unbroken-shift"),
            ("failover", "unbroken-sim", false, "unbroken-softnic"),
            ("failover", "unbroken-sim", false, "tokio"),
            ("nic", "unbroken-new", false, "unbroken-shift"),
            ("nic", "unbroken-new", true, "tokio"),
            ("apm", "unbroken-new", false, "unbroken-softnic"),
            ("edge", "unbroken-new", false, "unbroken-verbs"),
            ("sdr", "unbroken-new", true, "libloading"),
            ("collective", "unbroken-new", false, "unbroken-softnic"),
            ("failover", "unbroken-new", false, "unbroken-preload"),
            ("api", "unbroken-new", false, "unbroken-testkit"),
            ("xtask", "xtask", false, "unbroken-verbs"),
            ("xtask", "xtask", false, "clap"),
        ] {
            let found = judge(layer, name, pure, dependency);
            assert_eq!(found.len(), 1, "{layer}/{name} -> {dependency}");
            assert!(found[0].contains(dependency), "{}", found[0]);
        }
    }

    #[test]
    fn allowed_dependencies_pass() {
        for (layer, name, pure, dependency) in [
            ("nic", "unbroken-new", true, "unbroken-wire"),
            ("nic", "unbroken-new", true, "crc32fast"),
            ("nic", "unbroken-new", false, "unbroken-verbs"),
            ("failover", "unbroken-new", false, "unbroken-runtime"),
            ("failover", "unbroken-sim", false, "unbroken-roce"),
            ("collective", "unbroken-collective", false, "unbroken"),
            ("api", "unbroken-new", false, "unbroken-softnic"),
            ("tools", "unbroken-new", false, "unbroken-preload"),
        ] {
            assert_eq!(judge(layer, name, pure, dependency), Vec::<String>::new());
        }
    }

    #[test]
    fn a_folder_that_is_no_layer_is_named() {
        assert!(judge("novel", "unbroken-new", false, "libc")[0].contains("novel/"));
    }
}
