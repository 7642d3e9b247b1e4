//! Programs that were built with a sanitizer.
//!
//! A sanitizer's runtime that is a shared library wants to be the first in the process
//! (AddressSanitizer refuses to work otherwise), so it goes in front of ours in `LD_PRELOAD`. One
//! that is linked into the program, as clang does by default, is first by itself. ThreadSanitizer
//! is told to ignore what our library asks of the C library: see `crates/api/preload/src/races.rs`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use elf::abi::{DT_NEEDED, SHN_UNDEF};
use elf::endian::AnyEndian;
use elf::ElfStream;

use crate::program::find;

/// What shared runtimes are called, up to a dot or a hyphen: gcc's, then clang's.
const RUNTIMES: [&str; 8] = [
    "libasan",
    "liblsan",
    "libtsan",
    "libubsan",
    "libclang_rt.asan",
    "libclang_rt.tsan",
    "libclang_rt.ubsan_standalone",
    "libclang_rt.ubsan_minimal",
];
/// Defined by ThreadSanitizer's runtime, and used by all that it has instrumented.
const TSAN_SYMBOL: &str = "__tsan_init";
/// The file of suppressions that a program under ThreadSanitizer is given.
const SUPPRESSIONS: &str = include_str!("tsan.supp");

/// What a program was built with.
#[derive(Default, Debug, PartialEq, Eq)]
pub(crate) struct Sanitizers {
    /// Names of the shared runtimes, in the program's order.
    pub(crate) runtimes: Vec<String>,
    pub(crate) threads: bool,
}

impl Sanitizers {
    /// Of a program, as it is named on a command line. A script, or what cannot be read, has none:
    /// to run it will tell.
    pub(crate) fn of(program: &OsStr) -> Sanitizers {
        find(program).and_then(|path| read(&path).ok()).unwrap_or_default()
    }

    /// ThreadSanitizer's options with our file of suppressions, which is put into `folder`. Where
    /// the user has named a file, there is no room for ours: what to write into it is said.
    pub(crate) fn tsan_options(
        &self,
        folder: &Path,
        before: Option<OsString>,
    ) -> io::Result<Option<OsString>> {
        let mut options = before.unwrap_or_default();
        if !self.threads {
            return Ok(None);
        }
        if has_suppressions(options.as_bytes()) {
            eprintln!(
                "unbroken: TSAN_OPTIONS names a file of suppressions; it needs the line \
                 called_from_lib:libunbroken.so"
            );
            return Ok(None);
        }
        let file = folder.join("tsan.supp");
        if std::fs::read_to_string(&file).map_or(true, |text| text != SUPPRESSIONS) {
            std::fs::write(&file, SUPPRESSIONS)?;
        }
        if !options.is_empty() {
            options.push(":");
        }
        options.push("suppressions=");
        options.push(file);
        Ok(Some(options))
    }
}

fn has_suppressions(options: &[u8]) -> bool {
    options
        .split(|b| *b == b':' || *b == b',' || b.is_ascii_whitespace())
        .any(|o| o.starts_with(b"suppressions="))
}

fn read(path: &Path) -> Result<Sanitizers, elf::ParseError> {
    let mut file = ElfStream::<AnyEndian, _>::open_stream(File::open(path)?)?;
    let needed: Vec<usize> = file.dynamic()?.map_or(Vec::new(), |table| {
        table
            .iter()
            .filter(|entry| entry.d_tag == DT_NEEDED)
            .map(|entry| entry.d_val() as usize)
            .collect()
    });
    let Some((symbols, strings)) = file.dynamic_symbol_table()? else {
        return Ok(Sanitizers::default());
    };
    let mut found = Sanitizers::default();
    for at in needed {
        let name = strings.get(at)?;
        if is_runtime(name) {
            found.runtimes.push(name.to_string());
        }
        found.threads |= name.starts_with("libtsan") || name.starts_with("libclang_rt.tsan");
    }
    let defined = |s: elf::symbol::Symbol| {
        s.st_shndx != SHN_UNDEF
            && strings.get(s.st_name as usize).is_ok_and(|name| name == TSAN_SYMBOL)
    };
    found.threads |= symbols.iter().any(defined);
    Ok(found)
}

fn is_runtime(name: &str) -> bool {
    RUNTIMES.iter().any(|r| name.strip_prefix(r).is_some_and(|rest| rest.starts_with(['.', '-'])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_are_known_by_name() {
        for name in
            ["libasan.so.8", "libtsan.so.2", "libclang_rt.asan-x86_64.so", "libclang_rt.asan.so"]
        {
            assert!(is_runtime(name), "{name}");
        }
        for name in
            ["libc.so.6", "libasanas.so.1", "libclang_rt.profile-x86_64.so", "libgcc_s.so.1"]
        {
            assert!(!is_runtime(name), "{name}");
        }
    }

    #[test]
    fn a_program_without_any_has_none_and_a_script_neither() {
        assert_eq!(Sanitizers::of(OsStr::new("ls")), Sanitizers::default());
        assert_eq!(Sanitizers::of(OsStr::new("/no/such/program")), Sanitizers::default());
        let script = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(script.path(), "#!/bin/sh\n").unwrap();
        assert_eq!(Sanitizers::of(script.path().as_os_str()), Sanitizers::default());
    }

    #[test]
    fn suppressions_join_the_options_of_the_user() {
        let folder = tempfile::tempdir().unwrap();
        let with = Sanitizers { threads: true, ..Sanitizers::default() };
        let options =
            with.tsan_options(folder.path(), Some("history_size=3".into())).unwrap().unwrap();
        let text = options.into_string().unwrap();
        assert!(
            text.starts_with("history_size=3:suppressions=/") && text.ends_with("/tsan.supp"),
            "{text}"
        );
        assert!(with
            .tsan_options(folder.path(), Some("a=1 suppressions=x".into()))
            .unwrap()
            .is_none());
        assert!(Sanitizers::default().tsan_options(folder.path(), None).unwrap().is_none());
    }
}
