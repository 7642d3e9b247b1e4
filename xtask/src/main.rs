//! Build helper of the workspace: what cargo cannot do by itself.
//!
//! - `so`: in the profile that xtask itself was built with, or `--release`: builds the C library
//!   and links `libunbroken.so` with its version script (a plain cdylib would export Rust's own
//!   symbols and cannot carry libibverbs' names as libraries expect them).
//! - `abi`: compares the layouts in `unbroken_verbs::abi` with the installed `infiniband/verbs.h`,
//!   and the list of functions in `crates/api/preload/exports.txt` with the installed libibverbs.
//! - `docs`: whether pages of the reference say what the code declares; `docs --write` renews them.
//! - `deps`: the rules that shape the code (which crate may depend on which, where `unsafe` lives,
//!   circles of files, how long files are); `deps --uses crates/verbs`: which file of a crate uses
//!   which, with a `*` where that leads back.
#![forbid(unsafe_code)]

mod abi;
mod deps;
mod docs;
mod exports;
mod so;
mod workspace;

use std::process::ExitCode;
use workspace::built_for_release;

const USAGE: &str =
    "usage: cargo xtask so [--release] | abi | docs [--write] | deps [--uses CRATE_FOLDER]";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args[..] {
        ["so"] => so::link(built_for_release()).map(|so| println!("{}", so.display())),
        ["so", "--release"] => so::link(true).map(|so| println!("{}", so.display())),
        ["abi"] => abi::check().and_then(|layouts| {
            let functions = exports::check_theirs()?;
            let newer = exports::check_newer()?;
            println!(
                "abi: {layouts} sizes and offsets, {functions} functions as in the installed \
                 libibverbs, {newer} of a newer one"
            );
            Ok(())
        }),
        ["docs"] => docs::check(false)
            .map(|(parts, _)| println!("docs: {parts} parts of the reference are as declared")),
        ["docs", "--write"] => {
            docs::check(true).map(|(_, pages)| pages.iter().for_each(|page| println!("{page}")))
        }
        ["deps"] => deps::check(),
        ["deps", "--uses", folder] => deps::uses(folder),
        _ => Err(USAGE.to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("xtask: {what}");
            ExitCode::FAILURE
        }
    }
}
