//! Compares the hand-written layouts of C structures with those of the installed header.
//!
//! An example of `unbroken-verbs` prints each size and offset as Rust has it. From that list a C
//! program is made that prints the same list as the C compiler has it, and the two are compared
//! line by line.

use crate::workspace::{built_for_release, cargo, output, target_dir, Result};
use std::fmt::Write as _;
use std::process::Command;

/// Checks all layouts; gives the number of sizes and offsets that were compared.
pub fn check() -> Result<usize> {
    let mut run = cargo();
    run.args(["run", "-q", "--example", "abi_layouts"]);
    // As xtask itself, so that nothing is compiled for it alone.
    if built_for_release() {
        run.arg("--release");
    }
    let ours = output(&mut run)?;
    let dir = target_dir().join("xtask-abi");
    let io = |e: std::io::Error| format!("{}: {e}", dir.display());
    std::fs::create_dir_all(&dir).map_err(io)?;
    let (source, program) = (dir.join("layouts.c"), dir.join("layouts"));
    std::fs::write(&source, c_program(&ours)?).map_err(io)?;
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    output(cc.args(["-w", "-o"]).arg(&program).arg(&source)).map_err(|e| {
        if e.contains("infiniband/verbs.h") {
            "infiniband/verbs.h is not installed: install the package libibverbs-dev (apt-get \
             install libibverbs-dev)"
                .into()
        } else {
            e
        }
    })?;
    compare(&ours, &output(&mut Command::new(&program))?)
}

/// A C program that prints what `ours` lists, as the header has it.
fn c_program(ours: &str) -> Result<String> {
    let mut c =
        String::from("#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void) {\n");
    for line in ours.lines() {
        let name = line.split(' ').next().unwrap_or_default();
        let value = match name.split_once('.') {
            None => format!("sizeof(struct {name})"),
            Some((structure, field)) => format!("offsetof(struct {structure}, {field})"),
        };
        // writing to a String cannot fail
        let _ = writeln!(c, "  printf(\"{name} %zu\\n\", {value});");
    }
    c.push_str("  return 0;\n}\n");
    Ok(c)
}

/// Compares two lists of `NAME VALUE`; the error has a line for each that differs.
fn compare(ours: &str, theirs: &str) -> Result<usize> {
    let (ours, theirs): (Vec<&str>, Vec<&str>) = (ours.lines().collect(), theirs.lines().collect());
    if ours.is_empty() || ours.len() != theirs.len() {
        return Err(format!(
            "abi: {} layouts in Rust and {} in C: nothing was compared",
            ours.len(),
            theirs.len()
        ));
    }
    let mut wrong = String::new();
    for (a, b) in ours.iter().zip(&theirs).filter(|(a, b)| a != b) {
        let (name, rust) = a.split_once(' ').unwrap_or((a, "?"));
        let c = b.split_once(' ').map_or("?", |(_, v)| v);
        let what = if name.contains('.') { "offset" } else { "size" };
        let _ = write!(
            wrong,
            "\n  {name}: {what} {rust} in crates/verbs/src/abi, {c} in infiniband/verbs.h"
        );
    }
    if wrong.is_empty() {
        Ok(ours.len())
    } else {
        Err(format!("abi: layouts differ from the installed header:{wrong}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_what_differs() {
        let err =
            compare("ibv_pd 16\nibv_pd.handle 8\n", "ibv_pd 16\nibv_pd.handle 12\n").unwrap_err();
        assert!(err.contains("ibv_pd.handle: offset 8"), "{err}");
        assert!(!err.contains("ibv_pd: size"), "{err}");
        assert_eq!(compare("ibv_pd 16\n", "ibv_pd 16\n"), Ok(1));
    }

    #[test]
    fn comparing_nothing_is_an_error() {
        assert!(compare("", "").is_err());
    }

    #[test]
    fn asks_c_for_each_layout() {
        let c = c_program("ibv_pd 16\nibv_pd.handle 8\n").unwrap();
        assert!(
            c.contains("sizeof(struct ibv_pd)") && c.contains("offsetof(struct ibv_pd, handle)"),
            "{c}"
        );
    }
}
