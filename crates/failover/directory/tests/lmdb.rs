//! The embedded directory as several processes use it. A test that needs another process starts
//! this program again with a role.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use std::io::{BufRead, BufReader, Write};

use unbroken_directory::{
    Directory, DirectoryError, Lmdb, MovedQp, NicRecord, PortRecord, ProcessRecord, QpEntry,
};
use unbroken_runtime::{Mark, Presence, Runtime};
use unbroken_types::Gid;

const ROLE: &str = "DIRECTORY_TEST_ROLE";

fn gid(n: u8) -> Gid {
    Gid::from_ip([127, 77, 1, n].into())
}

fn process(pid: u32) -> ProcessRecord {
    let nic = |index: u32| NicRecord {
        index,
        gid: gid(index as u8),
        address: gid(50 + index as u8),
        control_qpn: 0x10000 + index,
        key_set: 1,
        lid: 0,
        name: format!("a/{index}"),
        further_ports: vec![PortRecord { gid: gid(100 + index as u8), control_qpn: 7, lid: 9 }],
    };
    ProcessRecord { pid, nics: (0..4).map(nic).collect() }
}

/// A UD QP that went from NIC 0 to NIC 1.
fn moved(n: u8, qpn: u32) -> MovedQp {
    MovedQp { known: (gid(n), qpn), now: (gid(n + 1), qpn + 1), shown: gid(n) }
}

/// Starts this program as another process with a role (see `other_process`).
fn start(role: &str, folder: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "other_process", "--nocapture"])
        .env(ROLE, role)
        .env("UNBROKEN_RUNTIME", folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for a line of the other process.
fn expect(child: &mut Child, wanted: &str) {
    let out = BufReader::new(child.stdout.as_mut().unwrap());
    // The harness writes lines of its own.
    assert!(out.lines().map_while(Result::ok).any(|line| line.contains(wanted)), "no '{wanted}'");
}

/// Not a test by itself: what the other process does.
#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let runtime = Runtime::open().unwrap();
    match role.as_str() {
        "publish" | "fork" => {
            let directory = Lmdb::open(&runtime).unwrap();
            directory.publish_qp(gid(7), 0x207, QpEntry::new(77, 0)).unwrap();
            directory.publish_process(77, &process(std::process::id())).unwrap();
            directory.publish_moved(&[moved(7, 0x207)]).unwrap();
            println!("\nkey {:?}", directory.key().unwrap());
            if role == "fork" {
                fork_a_child_that_stays();
            }
            println!("published");
            std::io::stdout().flush().unwrap();
            // Until the parent closes the pipe.
            let _ = std::io::stdin().read_line(&mut String::new());
        }
        "use" => match Lmdb::open(&runtime) {
            Ok(directory) => exercise(&directory),
            Err(e) => assert!(matches!(e, DirectoryError::Damaged { .. }), "{e}"),
        },
        "read" => {
            let directory = Lmdb::open(&runtime).unwrap();
            // Entries of the process that runs the test, which does not have the directory open
            // itself.
            assert_eq!(directory.lookup_qp(gid(1), 1).unwrap(), Some((3, 0)));
            assert_eq!(directory.lookup_qp(gid(2), 2).unwrap(), None);
        }
        "starve" => {
            let directory = Lmdb::open(&runtime).unwrap();
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: the argument is a valid limit. From here on every new descriptor is EMFILE.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &none) }, 0);
            assert_eq!(
                fs::File::open("/proc/self/stat").unwrap_err().raw_os_error(),
                Some(libc::EMFILE)
            );
            assert_eq!(directory.lookup_qp(gid(7), 0x207).unwrap(), Some((77, 0)));
            assert!(directory.lookup_process(77).unwrap().is_some());
        }
        "endless" => {
            let directory = Lmdb::open(&runtime).unwrap();
            println!("\nbusy");
            std::io::stdout().flush().unwrap();
            loop {
                exercise(&directory);
            }
        }
        "share" => exercise(&Lmdb::open(&runtime).unwrap()),
        _ => panic!("role {role}"),
    }
}

/// A forked child that ends when the pipe to standard input is closed.
fn fork_a_child_that_stays() {
    // SAFETY: the child calls read(2) and _exit(2) only.
    unsafe {
        if libc::fork() == 0 {
            let mut byte = 0u8;
            libc::read(0, (&raw mut byte).cast(), 1);
            libc::_exit(0);
        }
    }
}

/// Reads and writes here and there; errors are allowed.
fn exercise(directory: &Lmdb) {
    for n in 0..400 {
        let _ = directory.lookup_qp(gid(n as u8), n);
        let _ = directory.publish_qp(gid(n as u8), n + 1, QpEntry::new(5, 0));
        let _ = directory.unpublish_qp(gid(n as u8), n);
        let _ = directory.lookup_process(u64::from(n));
    }
    let _ = directory.publish_process(9, &process(1));
}

#[test]
fn entries_are_found_until_taken_out() {
    let dir = tempfile::tempdir().unwrap();
    let directory = Lmdb::open(&Runtime::at(dir.path()).unwrap()).unwrap();
    assert_eq!(directory.lookup_qp(gid(0), 2).unwrap(), None);
    directory.publish_qp(gid(0), 2, QpEntry::new(11, 0)).unwrap();
    directory.publish_qp(gid(0), 3, QpEntry::new(12, 0)).unwrap();
    assert_eq!(directory.lookup_qp(gid(0), 2).unwrap(), Some((11, 0)));
    assert_eq!(directory.lookup_qp(gid(1), 2).unwrap(), None);
    directory.unpublish_qp(gid(0), 2).unwrap();
    directory.unpublish_qp(gid(0), 2).unwrap();
    assert_eq!(directory.lookup_qp(gid(0), 2).unwrap(), None);
    assert_eq!(directory.lookup_qp(gid(0), 3).unwrap(), Some((12, 0)));
    let second = MovedQp { now: (gid(5), 6), ..moved(1, 2) };
    directory.publish_moved(&[moved(1, 2), moved(2, 2)]).unwrap();
    directory.publish_moved(&[second]).unwrap();
    assert_eq!(directory.moved().unwrap(), [second, moved(2, 2)]);
    directory.unpublish_moved(&[second.known, second.known, (gid(9), 9)]).unwrap();
    assert_eq!(directory.moved().unwrap(), [moved(2, 2)]);
    let me = process(std::process::id());
    directory.publish_process(11, &me).unwrap();
    let fewer = ProcessRecord { nics: me.nics[..2].to_vec(), ..me.clone() };
    directory.publish_process(11, &fewer).unwrap();
    assert_eq!(directory.lookup_process(11).unwrap(), Some(fewer));
    directory.unpublish_process(11).unwrap();
    assert_eq!(directory.lookup_process(11).unwrap(), None);
    let long = ProcessRecord {
        nics: vec![NicRecord { name: "x".repeat(100), ..me.nics[0].clone() }],
        ..me
    };
    assert!(matches!(directory.publish_process(1, &long), Err(DirectoryError::Record(_))));
}

#[test]
fn processes_find_each_other_and_the_dead_expire() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    let directory = Lmdb::open(&runtime).unwrap();
    let mut other = start("publish", dir.path());
    expect(&mut other, "published");
    assert_eq!(directory.lookup_qp(gid(7), 0x207).unwrap(), Some((77, 0)));
    assert_eq!(directory.lookup_process(77).unwrap(), Some(process(other.id())));
    directory.publish_moved(&[moved(8, 9)]).unwrap();
    assert_eq!(directory.moved().unwrap(), [moved(7, 0x207), moved(8, 9)]);
    assert_eq!(directory.processes().unwrap(), [(77, process(other.id()))]);
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(directory.lookup_qp(gid(7), 0x207).unwrap(), None);
    assert_eq!(directory.lookup_process(77).unwrap(), None);
    assert_eq!(directory.moved().unwrap(), [moved(8, 9)]);
    assert_eq!(directory.processes().unwrap(), []);
}

#[test]
fn a_stopped_process_is_not_a_dead_one() {
    let dir = tempfile::tempdir().unwrap();
    let directory = Lmdb::open(&Runtime::at(dir.path()).unwrap()).unwrap();
    let mut other = start("publish", dir.path());
    expect(&mut other, "published");
    // SAFETY: a signal to our own child.
    let signal = |signal| assert_eq!(unsafe { libc::kill(other.id() as i32, signal) }, 0);
    signal(libc::SIGSTOP);
    assert_eq!(directory.lookup_qp(gid(7), 0x207).unwrap(), Some((77, 0)));
    signal(libc::SIGKILL);
    // Not waited for: a zombie.
    let deadline = Instant::now() + Duration::from_secs(20);
    while directory.lookup_qp(gid(7), 0x207).unwrap().is_some() {
        assert!(Instant::now() < deadline, "it lives on");
        std::thread::yield_now();
    }
    other.wait().unwrap();
}

#[test]
fn a_forked_child_does_not_make_its_dead_parent_live() {
    let dir = tempfile::tempdir().unwrap();
    let directory = Lmdb::open(&Runtime::at(dir.path()).unwrap()).unwrap();
    let mut other = start("fork", dir.path());
    expect(&mut other, "published");
    // Taken, so that `wait` does not close it, which would end the child's child.
    let pipe = other.stdin.take();
    assert_eq!(directory.lookup_qp(gid(7), 0x207).unwrap(), Some((77, 0)));
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(directory.lookup_qp(gid(7), 0x207).unwrap(), None);
    drop(pipe);
}

#[test]
fn who_has_no_descriptors_left_takes_nobody_for_dead() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = start("publish", dir.path());
    expect(&mut other, "published");
    assert!(start("starve", dir.path()).wait().unwrap().success());
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn who_opens_it_alone_makes_it_anew() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    let directory = Lmdb::open(&runtime).unwrap();
    directory.publish_qp(gid(0), 2, QpEntry::new(11, 0)).unwrap();
    assert!(Lmdb::open(&runtime).is_err(), "twice in one process");
    assert_eq!(directory.lookup_qp(gid(0), 2).unwrap(), Some((11, 0)));
    drop(directory);
    // However damaged.
    fs::write(runtime.directory().join("data.mdb"), "garbage").unwrap();
    let directory = Lmdb::open(&runtime).unwrap();
    assert_eq!(directory.lookup_qp(gid(0), 2).unwrap(), None);
}

#[test]
fn all_who_open_it_have_one_key_and_a_new_directory_a_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    let directory = Lmdb::open(&runtime).unwrap();
    let key = directory.key().unwrap();
    assert_ne!(key, [0; 32]);
    let mut other = start("publish", dir.path());
    expect(&mut other, &format!("key {key:?}"));
    drop(directory);
    // While the other has it open, it is the same directory.
    let directory = Lmdb::open(&runtime).unwrap();
    assert_eq!(directory.key().unwrap(), key);
    drop(directory);
    other.kill().unwrap();
    other.wait().unwrap();
    let fresh = Lmdb::open(&runtime).unwrap();
    assert_ne!(fresh.key().unwrap(), key);
    // The file is no one else's to read.
    let mode = fs::metadata(runtime.directory().join("data.mdb")).unwrap().mode();
    assert_eq!(mode & 0o077, 0, "mode {mode:o}");
}

#[test]
fn a_damaged_key_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    let mut other = start("publish", dir.path());
    expect(&mut other, "published");
    let key = Lmdb::open(&runtime).unwrap().key().unwrap();
    let file = runtime.directory().join("data.mdb");
    let mut bytes = fs::read(&file).unwrap();
    // Every copy of it, also those of older commits.
    for at in
        (0..bytes.len() - key.len()).filter(|at| bytes[*at..].starts_with(&key)).collect::<Vec<_>>()
    {
        bytes[at] ^= 1;
    }
    fs::write(&file, &bytes).unwrap();
    let text = Lmdb::open(&runtime).err().unwrap().to_string();
    let folder = runtime.directory().display().to_string();
    assert!(
        text.contains("its key is missing or damaged")
            && text.contains(&folder)
            && !text.contains("rm -r"),
        "{text}"
    );
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn damage_under_the_eyes_of_a_process_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    let mut other = start("publish", dir.path());
    expect(&mut other, "published");
    let file = runtime.directory().join("data.mdb");
    let good = fs::read(&file).unwrap();
    for (bad, hint) in
        [(&b"garbage"[..], "shorter"), (&[0; 8192][..], "no LMDB mark"), (&good[..8192], "missing")]
    {
        fs::write(&file, bad).unwrap();
        let text = Lmdb::open(&runtime).err().unwrap().to_string();
        let folder = runtime.directory().display().to_string();
        assert!(text.contains(hint) && text.contains(&folder) && !text.contains("rm -r"), "{text}");
    }
    fs::write(&file, &good).unwrap();
    let directory = Lmdb::open(&runtime).unwrap();
    assert_eq!(directory.lookup_qp(gid(7), 0x207).unwrap(), Some((77, 0)));
    // Cut short while this process has it open.
    fs::write(&file, &good[..8192]).unwrap();
    let text = directory.lookup_qp(gid(7), 0x207).unwrap_err().to_string();
    assert!(text.contains("cut short"), "{text}");
    fs::write(&file, &good).unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
}

/// Whatever bytes are wrong in a file that is in use, opening and using it gives an error or works:
/// no crash.
#[test]
fn no_damage_crashes() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    // Someone takes part all the time, so that the entries are those of a living process.
    let presence = Presence::join(&runtime).unwrap();
    let directory = Lmdb::open(&runtime).unwrap();
    for n in 0..1500u32 {
        directory.publish_qp(gid(n as u8), n, QpEntry::new(3, 0)).unwrap();
    }
    for n in (0..1500u32).step_by(2) {
        directory.unpublish_qp(gid(n as u8), n).unwrap();
    }
    directory.publish_process(3, &process(std::process::id())).unwrap();
    drop(directory);
    let file = runtime.directory().join("data.mdb");
    let good = fs::read(&file).unwrap();
    // It has the file open, as far as others can tell.
    let marked = presence.mark(Mark::Directory).unwrap();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % below as u64) as usize
    };
    for round in 0..150 {
        let mut bad = good.clone();
        for _ in 0..=next(4) {
            // Headers of pages and of nodes are where it hurts.
            let page = next(good.len() / 4096) * 4096;
            let at = page + if next(2) == 0 { next(160) } else { next(4096) };
            match next(3) {
                0 => bad[at] ^= 1 << next(8),
                1 => bad[at] = next(256) as u8,
                _ => {
                    let length = next(64).min(bad.len() - at);
                    bad[at..at + length].fill(next(256) as u8);
                }
            }
        }
        fs::write(&file, &bad).unwrap();
        let status = start("use", dir.path()).wait().unwrap();
        assert_eq!(status.signal(), None, "round {round}");
        assert!(status.success(), "round {round}: {status}");
    }
    fs::write(&file, &good).unwrap();
    assert!(start("read", dir.path()).wait().unwrap().success());
    drop(marked);
}

#[test]
fn a_forked_child_leaves_it_alone() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    let directory = Lmdb::open(&runtime).unwrap();
    directory.publish_qp(gid(1), 1, QpEntry::new(1, 0)).unwrap();
    // SAFETY: the child runs only what is below (no lock that another thread may have held is
    // taken: the call returns before it touches LMDB) and ends with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(directory.lookup_qp(gid(1), 1), Err(DirectoryError::Forked));
        drop(directory);
        // SAFETY: ends the child, with no handlers of the harness.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let mut status = -1;
    // SAFETY: waits for our own child; `status` is a valid place.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(directory.lookup_qp(gid(1), 1).unwrap(), Some((1, 0)));
    directory.publish_qp(gid(1), 2, QpEntry::new(1, 0)).unwrap();
}

#[test]
fn many_processes_and_threads_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    let mut others: Vec<Child> = (0..4).map(|_| start("share", dir.path())).collect();
    let directory = Lmdb::open(&runtime).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| exercise(&directory));
        }
    });
    for other in &mut others {
        assert!(other.wait().unwrap().success());
    }
    directory.publish_qp(gid(1), 1, QpEntry::new(1, 0)).unwrap();
    assert_eq!(directory.lookup_qp(gid(1), 1).unwrap(), Some((1, 0)));
}

/// Wherever a process is killed, its turn ends with it and its transaction leaves no trace.
#[test]
fn who_is_killed_in_a_transaction_harms_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    let directory = Lmdb::open(&runtime).unwrap();
    for round in 0..30u32 {
        let mut others: Vec<Child> = (0..2).map(|_| start("endless", dir.path())).collect();
        for other in &mut others {
            expect(other, "busy");
        }
        for other in &mut others {
            directory.publish_qp(gid(200), round, QpEntry::new(7, 0)).unwrap();
            other.kill().unwrap();
            directory.publish_qp(gid(201), round, QpEntry::new(7, 0)).unwrap();
            other.wait().unwrap();
        }
        // Looks at the whole file, and sweeps.
        assert!(start("share", dir.path()).wait().unwrap().success(), "round {round}");
        assert_eq!(directory.lookup_qp(gid(201), round).unwrap(), Some((7, 0)));
    }
}
