//! The functions that `libunbroken.so` must have, against those that libibverbs has.
//!
//! `crates/api/preload/exports.txt` lists libibverbs' public functions. Every one is either defined
//! by us or listed as left to libibverbs. A function that is missed would get our objects and crash
//! on them, so this is checked at every link. The functions of a newer libibverbs than the
//! installed one are in `crates/api/preload/libibverbs.txt`.

use crate::workspace::{output, root, Result};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// The list: functions that are ours, functions left to libibverbs, and others: for libraries of
/// ours, and those of libc that ours stand before.
#[derive(Debug, Default, PartialEq, Eq)]
struct Exports {
    ours: BTreeSet<String>,
    left: BTreeSet<String>,
    others: BTreeSet<String>,
}

fn parse(text: &str) -> Exports {
    let mut e = Exports::default();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        match line.split_once(": ") {
            Some(("left", name)) => e.left.insert(name.to_string()),
            Some(("libc" | "own", names)) => {
                e.others.extend(names.split(' ').map(str::to_string));
                true
            }
            _ => e.ours.insert(line.to_string()),
        };
    }
    e
}

fn list() -> Result<Exports> {
    let path = root().join("crates/api/preload/exports.txt");
    Ok(parse(&std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?))
}

/// Names of the defined functions of a shared library; those of private versions are left out.
fn defined(nm: &str) -> BTreeSet<String> {
    nm.lines()
        .filter_map(|l| l.split(' ').nth(2).filter(|_| l.split(' ').nth(1) == Some("T")))
        .filter(|name| !name.contains("PRIVATE"))
        .map(|name| name.split('@').next().unwrap_or(name).to_string())
        .collect()
}

fn nm(library: &Path) -> Result<BTreeSet<String>> {
    Ok(defined(&output(Command::new("nm").args(["-D", "--defined-only"]).arg(library))?))
}

fn names<'a>(names: impl Iterator<Item = &'a String>) -> String {
    names.map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Every function of the list is in our library, and nothing of Rust's.
pub fn check_ours(so: &Path) -> Result<()> {
    let have = nm(so)?;
    let list = list()?;
    let missing = names(list.ours.union(&list.others).filter(|n| !have.contains(*n)));
    let foreign = names(have.iter().filter(|n| !n.contains("ibv_") && !list.others.contains(*n)));
    match (missing.is_empty(), foreign.is_empty()) {
        (true, true) => Ok(()),
        (false, _) => Err(format!("{} lacks {missing}", so.display())),
        (true, false) => Err(format!(
            "{} exports {foreign}, which other libraries could trip over",
            so.display()
        )),
    }
}

/// Every public function of the installed libibverbs is in the list; gives their number.
pub fn check_theirs() -> Result<usize> {
    let path = output(
        Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .arg("-print-file-name=libibverbs.so"),
    )?;
    let have = nm(Path::new(path.trim()))?;
    let list = list()?;
    let unknown = names(have.iter().filter(|n| !list.ours.contains(*n) && !list.left.contains(*n)));
    if unknown.is_empty() {
        Ok(have.len())
    } else {
        Err(format!(
            "libibverbs has functions that crates/api/preload/exports.txt does not list: {unknown}"
        ))
    }
}

/// Names of the functions in `crates/api/preload/libibverbs.txt`; each line has a name and a
/// version node.
fn newer() -> Result<BTreeSet<String>> {
    let path = root().join("crates/api/preload/libibverbs.txt");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let lines = text.lines().filter(|l| !l.starts_with('#'));
    lines
        .map(|l| match l.split_once(' ') {
            Some((name, node)) if node.starts_with("IBVERBS_1.") => Ok(name.to_string()),
            _ => Err(format!("{}: '{l}' is not a name and a version node", path.display())),
        })
        .collect()
}

/// Every public function of the newer libibverbs is in the list; gives their number.
pub fn check_newer() -> Result<usize> {
    let (newer, list) = (newer()?, list()?);
    let unknown =
        names(newer.iter().filter(|n| !list.ours.contains(*n) && !list.left.contains(*n)));
    if unknown.is_empty() {
        Ok(newer.len())
    } else {
        Err(format!(
            "crates/api/preload/libibverbs.txt has functions that exports.txt does not list: \
             {unknown}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_of_the_newer_libibverbs_is_listed() {
        assert!(check_newer().unwrap() > 90);
        let (newer, list) = (newer().unwrap(), list().unwrap());
        let gone = names(list.ours.union(&list.left).filter(|n| !newer.contains(*n)));
        assert_eq!(gone, "", "libibverbs keeps its functions");
    }

    #[test]
    fn the_list_tells_ours_from_theirs() {
        let e = parse("# comment\nibv_a\n\nleft: ibv_b\nown: ours\nlibc: open stat\n");
        assert_eq!(e.ours.iter().collect::<Vec<_>>(), ["ibv_a"]);
        assert_eq!(e.left.iter().collect::<Vec<_>>(), ["ibv_b"]);
        assert_eq!(e.others.iter().collect::<Vec<_>>(), ["open", "ours", "stat"]);
    }

    #[test]
    fn only_public_functions_count() {
        let nm = "0000000000010dd0 T ibv_a@IBVERBS_1.0\n0000000000011e20 T \
                  ibv_a@@IBVERBS_1.1\n0000000000000000 A IBVERBS_1.1\n00000000000191d0 T \
                  ibv_c@@IBVERBS_PRIVATE_34\n0000000000020281 B ibv_d\n";
        assert_eq!(defined(nm).into_iter().collect::<Vec<_>>(), ["ibv_a"]);
    }
}
