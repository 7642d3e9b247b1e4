//! What `unbroken run` runs: the file behind a name on a command line, and whether a library can be
//! put in front of it at all.
//!
//! The loader alone heeds `LD_PRELOAD`. A static program has none; the loader of a 32-bit program
//! cannot use our library; and for a program that gains rights (setuid, setgid, capabilities) the
//! loader forgets the variable. All of these would run, on no NIC of ours and without failover, and
//! nothing would say so.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use elf::abi::{DT_SONAME, PT_INTERP};
use elf::endian::AnyEndian;
use elf::ElfStream;
use rustix::fs::{getxattr, statvfs, StatVfsMountFlags};
use rustix::process::{getegid, geteuid};

/// The kernel reads so much of the first line of a script.
const LINE_BYTES: u64 = 256;
const SET_USER: u32 = 0o4000;
const SET_GROUP: u32 = 0o2010;

/// A program that can be run; what should be said of it, if anything.
pub(crate) type Checked = Result<Option<String>, String>;

/// Where a program is, as it is named on a command line: as `execvp` looks for it.
pub(crate) fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let runs = |p: &PathBuf| {
        p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(program)).find(runs)
}

/// Whether our library can be in a program. What cannot be found or read is no error here: to run
/// it will tell.
pub(crate) fn check(program: &OsStr) -> Checked {
    let Some(path) = find(program) else { return Ok(None) };
    // What counts of a script is its interpreter.
    let path = interpreter(&path).unwrap_or(path);
    let Ok(ours) = std::env::current_exe().map_err(drop).and_then(|exe| Kind::of(&exe).ok_or(()))
    else {
        return Ok(None);
    };
    let Some(kind) = Kind::of(&path) else { return Ok(None) };
    let shown = path.display();
    if (kind.bits, kind.machine) != (ours.bits, ours.machine) {
        let bits = if kind.bits == ours.bits {
            "for another machine".into()
        } else {
            format!("a {}-bit one", kind.bits)
        };
        return Err(format!(
            "{shown} is not for this library: the program is {bits}, libunbroken.so is a {}-bit \
             one; build the program anew",
            ours.bits
        ));
    }
    if let Some(gains) = gained(&path) {
        return Err(format!(
            "{shown} {gains}: the loader puts no library in front of such a program, and it would \
             run unprotected; run it as the user whose rights it takes, or a copy without them"
        ));
    }
    Ok((!kind.dynamic).then(|| {
        format!(
            "{shown} is linked statically: it runs unprotected, since no library can be put in \
             front of it; dynamic programs that it starts are protected"
        )
    }))
}

/// What matters of an ELF file.
struct Kind {
    bits: u8,
    machine: u16,
    /// The loader loads it, or it is the loader.
    dynamic: bool,
}

impl Kind {
    /// None if it is no ELF file.
    fn of(path: &Path) -> Option<Kind> {
        // A FIFO in its place is not waited for.
        let file =
            File::open(path.metadata().ok().filter(Metadata::is_file).map(|_| path)?).ok()?;
        let mut file = ElfStream::<AnyEndian, _>::open_stream(file).ok()?;
        let bits = match file.ehdr.class {
            elf::file::Class::ELF32 => 32,
            elf::file::Class::ELF64 => 64,
        };
        let interpreted = file.segments().iter().any(|segment| segment.p_type == PT_INTERP);
        let machine = file.ehdr.e_machine;
        Some(Kind { bits, machine, dynamic: interpreted || is_loader(&mut file) })
    }
}

/// Whether it is the loader itself, which is given the program as an argument.
fn is_loader(file: &mut ElfStream<AnyEndian, File>) -> bool {
    let soname = file.dynamic().ok().flatten().and_then(|table| {
        table.iter().find(|entry| entry.d_tag == DT_SONAME).map(|entry| entry.d_val() as usize)
    });
    let (Some(at), Ok(Some((_, strings)))) = (soname, file.dynamic_symbol_table()) else {
        return false;
    };
    strings.get(at).is_ok_and(|name| name.starts_with("ld-") || name.starts_with("ld."))
}

/// The interpreter of a script.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let file = File::open(path.metadata().ok().filter(Metadata::is_file).map(|_| path)?).ok()?;
    let mut head = Vec::new();
    file.take(LINE_BYTES).read_to_end(&mut head).ok()?;
    let line = head.strip_prefix(b"#!")?.split(|b| *b == b'\n').next()?;
    let words = line.split(|b| b.is_ascii_whitespace()).find(|word| !word.is_empty())?;
    Some(OsString::from_vec(words.to_vec()).into())
}

/// What a program gains when this user runs it, in words; none if nothing, or if nothing counts.
fn gained(path: &Path) -> Option<String> {
    let meta = path.metadata().ok()?;
    let ignored = statvfs(path).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NOSUID))
        || fs::read_to_string("/proc/self/status")
            .is_ok_and(|text| text.lines().any(|line| line == "NoNewPrivs:\t1"));
    if ignored {
        return None;
    }
    let mode = meta.mode();
    if mode & SET_USER != 0 && meta.uid() != geteuid().as_raw() {
        return Some(format!("is setuid, of user {}", meta.uid()));
    }
    if mode & SET_GROUP == SET_GROUP && meta.gid() != getegid().as_raw() {
        return Some(format!("is setgid, of group {}", meta.gid()));
    }
    let capable = getxattr(path, "security.capability", &mut [0_u8; 64][..]).is_ok();
    (capable && !geteuid().is_root()).then(|| "has capabilities of its own".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use elf::abi::{EM_386, EM_X86_64, PT_LOAD};

    /// The head of a program with one segment.
    fn program(bits: u8, machine: u16, segment: u32) -> Vec<u8> {
        let (class, head, entry): (u8, u16, u16) =
            if bits == 64 { (2, 64, 56) } else { (1, 52, 32) };
        let mut file = vec![0x7f, b'E', b'L', b'F', class, 1, 1];
        file.resize(16, 0);
        file.extend(2_u16.to_le_bytes());
        file.extend(machine.to_le_bytes());
        file.extend(1_u32.to_le_bytes());
        let words = |file: &mut Vec<u8>, n: u64| match bits {
            64 => file.extend(n.to_le_bytes()),
            _ => file.extend((n as u32).to_le_bytes()),
        };
        // Entry, program headers, section headers, flags, sizes and counts.
        words(&mut file, 0);
        words(&mut file, head.into());
        words(&mut file, 0);
        file.extend(0_u32.to_le_bytes());
        for n in [head, entry, 1, 0, 0, 0] {
            file.extend(n.to_le_bytes());
        }
        file.extend(segment.to_le_bytes());
        file.resize(usize::from(head + entry), 0);
        file
    }

    fn put(folder: &Path, name: &str, bytes: &[u8]) -> OsString {
        let path = folder.join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.into_os_string()
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn what_no_library_can_be_put_in_front_of_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, bytes: &[u8]| put(dir.path(), name, bytes);
        let dynamic = put("dynamic", &program(64, EM_X86_64, PT_INTERP));
        assert_eq!(check(&dynamic), Ok(None));
        let fixed = put("static", &program(64, EM_X86_64, PT_LOAD));
        assert!(check(&fixed).unwrap().unwrap().contains("static is linked statically"));
        let small = put("small", &program(32, EM_386, PT_INTERP));
        assert!(check(&small).unwrap_err().contains("the program is a 32-bit one"));
        // Of a script it is the interpreter that counts, once.
        let line = format!("#! {} -x\nexit\n", small.to_string_lossy());
        let script = put("script", line.as_bytes());
        assert!(check(&script).unwrap_err().contains("small is not for this library"));
        assert_eq!(check(&put("plain", b"echo")), Ok(None));
        assert_eq!(check(OsStr::new("no-such-program-here")), Ok(None));
        assert_eq!(check(OsStr::new("sh")), Ok(None));
        assert_eq!(check(OsStr::new("/lib64/ld-linux-x86-64.so.2")), Ok(None));
    }

    #[test]
    fn a_program_that_gains_rights_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let exe = fs::read(std::env::current_exe().unwrap()).unwrap();
        let path = put(dir.path(), "gains", &exe);
        let set = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        // Of this very user it gains nothing.
        set(0o4755);
        assert_eq!(check(&path), Ok(None));
        if std::os::unix::fs::chown(&path, Some(geteuid().as_raw() + 1), None).is_err() {
            eprintln!("skipped: only root can give files away");
            return;
        }
        set(0o4755);
        assert!(check(&path).unwrap_err().contains("is setuid, of user"));
        set(0o755);
        assert_eq!(check(&path), Ok(None));
        std::os::unix::fs::chown(&path, None, Some(getegid().as_raw() + 1)).unwrap();
        set(0o2755);
        assert!(check(&path).unwrap_err().contains("is setgid, of group"));
    }
}
