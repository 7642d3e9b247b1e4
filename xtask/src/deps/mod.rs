//! The rules that shape the code, checked; docs/internals/layers.md has them with their reasons.
//!
//! - A crate depends on crates of its own layer and of the layers below it ([`layers`]).
//! - A *pure* crate (protocol logic) opens no socket or file, reads no clock, starts no thread, and
//!   depends on pure crates and a few leaf crates alone ([`layers`], [`sources`]).
//! - `unsafe` lives in the crates that say why; every other one forbids it ([`sources`]).
//! - Within a crate no more than a few files use one another in a circle ([`modules`]).
//! - Nothing that ships has rules that tests leave out ([`features`]).
//! - No file is longer than [`sources::MAX_LINES`].

mod features;
mod layers;
mod modules;
mod sources;

use crate::workspace::{cargo, output, root, Result};
use layers::Package;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Runs all checks; prints long files; the error has a line for each breach.
pub fn check() -> Result<()> {
    let metadata = output(cargo().args(["metadata", "--format-version", "1", "--no-deps"]))?;
    let metadata: Value =
        serde_json::from_str(&metadata).map_err(|e| format!("cargo metadata: {e}"))?;
    let packages = layers::packages(&metadata)?;
    let mut wrong = layers::breaches(&packages);
    wrong.extend(features::breaches(&metadata));
    let files = files()?;
    for (path, text) in &files {
        wrong.extend(sources::breaches(path, text, owner(&packages, path)));
        let lines = text.lines().count();
        if lines > sources::LONG_LINES && lines <= sources::MAX_LINES {
            let path = path.display();
            println!("deps: {path} has {lines} lines; past {} split it", sources::LONG_LINES);
        }
    }
    for p in &packages {
        for root_file in ["src/lib.rs", "src/main.rs"] {
            let root_file = root().join(&p.folder).join(root_file);
            if root_file.exists() {
                wrong.extend(modules::circles(&root_file, root())?);
            }
        }
    }
    if wrong.is_empty() {
        println!("deps: {} crates, {} files keep the rules", packages.len(), files.len());
        Ok(())
    } else {
        wrong.sort();
        Err(format!("deps:\n  {}", wrong.join("\n  ")))
    }
}

/// Prints what each file of a crate uses; `folder` is that of its manifest.
pub fn uses(folder: &str) -> Result<()> {
    let src = root().join(folder).join("src");
    let roots = ["lib.rs", "main.rs"].map(|file| src.join(file));
    let found = roots.iter().find(|file| file.exists());
    let found = found.ok_or_else(|| format!("{folder} is no crate: it has no src/lib.rs"))?;
    for line in modules::describe(found)? {
        println!("{line}");
    }
    Ok(())
}

/// The crate that a file (relative to the workspace) is of.
fn owner<'a>(packages: &'a [Package], file: &Path) -> Option<&'a Package> {
    packages.iter().find(|p| file.starts_with(&p.folder))
}

/// All Rust files of the workspace: relative path and text.
fn files() -> Result<Vec<(PathBuf, String)>> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = ["crates", "xtask"].iter().map(|f| root().join(f)).collect();
    while let Some(folder) = folders.pop() {
        let entries =
            std::fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        for entry in entries {
            let path = entry.map_err(|e| format!("{}: {e}", folder.display()))?.path();
            if path.is_dir() {
                if path.file_name().is_some_and(|n| n != "target") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path)
                    .map_err(|e| format!("{}: {e}", path.display()))?;
                found.push((path.strip_prefix(root()).unwrap_or(&path).to_path_buf(), text));
            }
        }
    }
    found.sort();
    Ok(found)
}
