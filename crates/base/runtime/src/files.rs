//! Opening files of a runtime folder without trusting what lies there.
//!
//! Nothing that lies in the way may stop a program or lead it elsewhere: a file is opened without
//! following a link and without waiting for the other end of a FIFO, and then the *descriptor* is
//! looked at, so that nobody can put something else there between looking and using. A lock is
//! waited for with an end: its holder may be stopped.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{flock, FlockOperation, OFlags};
use rustix::io::Errno;
use rustix::rand::{getrandom, GetRandomFlags};

use crate::user_id;

/// For so long a lock is waited for. All are held for milliseconds at most.
const LOCK_WAIT: Duration = Duration::from_secs(10);
/// What lies in the way may be of use to somebody, and the folder may have been named by mistake.
const ELSEWHERE: &str = "name another folder in UNBROKEN_RUNTIME";
/// The longest pause between two tries.
const LOCK_PAUSE_MAX: Duration = Duration::from_millis(2);

/// Opens a regular file of this user, as `options` say; a file that it makes is this user's alone.
/// Errors name what lies there instead.
pub fn open_own(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = options.mode(0o600).custom_flags(flags.bits() as i32).open(path).map_err(|e| {
        match Errno::from_io_error(&e) {
            Some(Errno::LOOP) => io::Error::other(format!("it is a symbolic link; {ELSEWHERE}")),
            // What a FIFO or a socket answers.
            Some(Errno::NXIO) => not_regular(),
            _ => e,
        }
    })?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(not_regular());
    }
    if meta.uid() != user_id() {
        let (owner, user) = (meta.uid(), user_id());
        return Err(io::Error::other(format!(
            "it belongs to user {owner}, this process runs as user {user}; {ELSEWHERE}"
        )));
    }
    Ok(file)
}

fn not_regular() -> io::Error {
    io::Error::other(format!("it is not a regular file; {ELSEWHERE}"))
}

/// Opens for reading a regular file that somebody has named, whoever's it is; a link leads to it.
/// Waits for nobody: a FIFO, a socket or a device is an error.
pub fn open_named(path: &Path) -> io::Result<File> {
    open_regular(path, OFlags::empty())
}

/// As [`open_named`], for a file that was found in a folder: a link is an error, too.
pub fn open_found(path: &Path) -> io::Result<File> {
    open_regular(path, OFlags::NOFOLLOW)
}

fn open_regular(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::options().read(true).custom_flags(flags.bits() as i32).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is not a regular file")),
    }
}

/// The text of a file that somebody has named ([`open_named`]); an error if it is longer than so
/// many bytes.
pub fn read_named(path: &Path, most_bytes: u64) -> io::Result<String> {
    let mut text = String::new();
    // A byte more is too much.
    open_named(path)?.take(most_bytes + 1).read_to_string(&mut text)?;
    match text.len() as u64 <= most_bytes {
        true => Ok(text),
        false => Err(io::Error::other(format!("up to {} MiB are right", most_bytes >> 20))),
    }
}

/// A lock on a file, among processes. Given back on drop, also where a forked child holds a copy of
/// the descriptor.
pub struct FileLock(File);

impl FileLock {
    /// Takes the lock of the file at `path`, which is made if it is missing; an error if another
    /// process does not give it back.
    pub fn take(path: &Path) -> io::Result<FileLock> {
        let file = open_own(path, OpenOptions::new().write(true).create(true))?;
        let taken = try_until(LOCK_WAIT, || {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => Ok(true),
                Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
                Err(e) => Err(e.into()),
            }
        })?;
        match taken {
            true => Ok(FileLock(file)),
            false => Err(held(LOCK_WAIT)),
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

/// The error for a lock that was waited for in vain.
pub(crate) fn held(wait: Duration) -> io::Error {
    let what = format!(
        "another process has held the lock for {} s; end or continue one that is stopped",
        wait.as_secs()
    );
    io::Error::new(io::ErrorKind::TimedOut, what)
}

/// Tries until it succeeds or `wait` is over; gives whether it did.
pub(crate) fn try_until(
    wait: Duration,
    mut try_once: impl FnMut() -> io::Result<bool>,
) -> io::Result<bool> {
    let mut pause = Duration::from_micros(20);
    let mut began = None;
    while !try_once()? {
        if began.get_or_insert_with(Instant::now).elapsed() >= wait {
            return Ok(false);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOCK_PAUSE_MAX);
    }
    Ok(true)
}

/// Fills `bytes` from the kernel's generator, which may give fewer at a time.
pub fn fill_random(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match getrandom(&mut *bytes, GetRandomFlags::empty()) {
            Ok(filled) => bytes = &mut bytes[filled..],
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{mknodat, FileType, Mode, CWD};
    use std::fs;
    use std::os::unix::fs::{chown, symlink};

    /// How a file is opened that is read, written, appended to.
    fn ways() -> [OpenOptions; 4] {
        let mut ways = [(); 4].map(|()| OpenOptions::new());
        ways[0].read(true);
        ways[1].write(true).create(true);
        ways[2].append(true).create(true);
        ways[3].read(true).write(true);
        ways
    }

    fn refused(path: &Path, why: &str) {
        for mut way in ways() {
            let text = open_own(path, &mut way).unwrap_err().to_string();
            assert!(text.contains(why), "{text}");
        }
    }

    #[test]
    fn a_fifo_a_link_and_a_folder_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let (fifo, link, target) =
            (dir.path().join("fifo"), dir.path().join("link"), dir.path().join("target"));
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        refused(&fifo, "not a regular file");
        symlink(&target, &link).unwrap();
        refused(&link, "symbolic link");
        assert!(!target.exists());
        fs::write(&target, "").unwrap();
        refused(&link, "symbolic link");
        assert!(open_own(dir.path(), OpenOptions::new().read(true))
            .unwrap_err()
            .to_string()
            .contains("regular"));
        open_own(&target, OpenOptions::new().read(true)).unwrap();
    }

    #[test]
    fn a_named_file_is_read_and_nothing_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let (fifo, link, file) =
            (dir.path().join("fifo"), dir.path().join("link"), dir.path().join("file"));
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        fs::write(&file, "text").unwrap();
        symlink(&file, &link).unwrap();
        for path in [&fifo, Path::new("/dev/zero"), dir.path()] {
            let why = read_named(path, 1 << 20).unwrap_err().to_string();
            assert!(why.contains("regular"), "{}: {why}", path.display());
        }
        assert_eq!(read_named(&link, 4).unwrap(), "text");
        assert!(read_named(&link, 3).unwrap_err().to_string().contains("are right"));
        assert!(open_found(&link).is_err());
        open_found(&file).unwrap();
    }

    #[test]
    fn the_file_of_another_user_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "secret").unwrap();
        if chown(&file, Some(user_id() + 1), None).is_err() {
            eprintln!("skipped: only root can give files away");
            return;
        }
        refused(&file, "belongs to user");
    }

    #[test]
    fn a_lock_excludes_and_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let count = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _lock = FileLock::take(&path).unwrap();
                        let seen = count.load(std::sync::atomic::Ordering::Relaxed);
                        std::thread::yield_now();
                        count.store(seen + 1, std::sync::atomic::Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 200);
    }

    #[test]
    fn who_waits_in_vain_is_told() {
        assert!(!try_until(Duration::from_millis(1), || Ok(false)).unwrap());
        assert!(held(LOCK_WAIT).to_string().contains("10 s"));
    }
}
