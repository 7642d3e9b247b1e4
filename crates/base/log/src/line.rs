//! A line, and how it gets to stderr.

use std::fmt::{Arguments, Write};
use std::io::stderr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::OnceLock;

use log::Level;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::{fcntl_getfl, fstat, FileType, OFlags, Stat};

/// So many bytes a pipe takes at once, or not at all.
const MAX_BYTES: usize = 4_096;
/// For so long a line waits for a reader who is slow. While lines are being lost, none waits.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
const NO_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Lines that nobody has read, since the last one that was written.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Device and inode of what is open as stderr, if anything is.
type Identity = Option<(u64, u64)>;

/// What was stderr when the process began. A program that closes descriptor 2 gets the number for
/// the next file or socket that it opens; lines must not go into that.
static BEGAN_AS: OnceLock<Identity> = OnceLock::new();

fn identity(stat: Option<&Stat>) -> Identity {
    stat.map(|stat| (stat.st_dev, stat.st_ino))
}

/// Keeps in mind what stderr is now.
pub(crate) fn note_stderr() {
    BEGAN_AS.get_or_init(|| identity(fstat(stderr()).ok().as_ref()));
}

/// Whether a descriptor is still stderr: what it was at the beginning, or what a program redirects
/// stderr to, which is a terminal, /dev/null or a log that is opened for appending.
fn is_stderr(at: BorrowedFd<'_>, began_as: Identity) -> bool {
    let Ok(now) = fstat(at) else { return false };
    if identity(Some(&now)) == began_as {
        return true;
    }
    match FileType::from_raw_mode(now.st_mode) {
        FileType::CharacterDevice => true,
        FileType::RegularFile => fcntl_getfl(at).is_ok_and(|how| how.contains(OFlags::APPEND)),
        _ => false,
    }
}

/// A line. What peers and the environment may have put into it is text and nothing else: no line
/// feed, and nothing that a terminal would obey.
pub(crate) fn format(part: &str, level: Level, what: Arguments<'_>) -> String {
    whole(format_args!("unbroken: {level} {part}: {what}"))
}

/// Text as a line, as [`format`] says.
pub(crate) fn whole(what: Arguments<'_>) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write!(text, "{what}");
    let mut line: String = text.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    if line.len() >= MAX_BYTES {
        let end = (0..=MAX_BYTES - 4).rev().find(|end| line.is_char_boundary(*end));
        line.truncate(end.unwrap_or(0));
        line.push('…');
    }
    line.push('\n');
    line
}

/// Writes a line to stderr, or counts it as lost.
pub(crate) fn write(line: &str) {
    note_stderr();
    match is_stderr(stderr().as_fd(), BEGAN_AS.get().copied().flatten()) {
        true => write_to(stderr().as_fd(), line, &LOST),
        false => drop(LOST.fetch_add(1, Relaxed)),
    }
}

fn write_to(to: BorrowedFd<'_>, line: &str, lost: &AtomicU64) {
    let before = lost.load(Relaxed);
    let written = takes(to, if before == 0 { PATIENCE } else { NO_TIME })
        && (before == 0 || {
            let said = format!("unbroken: {before} lines are left out: nobody read them in time\n");
            put(to, &said) && takes(to, NO_TIME)
        })
        && put(to, line);
    match written {
        true => drop(lost.fetch_update(Relaxed, Relaxed, |n| Some(n.saturating_sub(before)))),
        false => drop(lost.fetch_add(1, Relaxed)),
    }
}

/// Whether a whole line can be written without waiting. Into a pipe whose reader is gone nothing
/// is: the signal would end the program.
fn takes(to: BorrowedFd<'_>, patience: Timespec) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(to, PollFlags::OUT)];
    poll(&mut fds, Some(&patience)).is_ok() && fds[0].revents() == PollFlags::OUT
}

fn put(to: BorrowedFd<'_>, line: &str) -> bool {
    rustix::io::write(to, line.as_bytes()) == Ok(line.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_line_is_one_line_and_no_longer_than_a_pipe_takes() {
        let line = format("nic", Level::Warn, format_args!("a\nb\x1b[2Jc"));
        assert_eq!(line, "unbroken: WARN nic: a?b?[2Jc\n");
        let long = format("nic", Level::Info, format_args!("{}", "ä".repeat(10_000)));
        assert!(long.len() <= MAX_BYTES && long.ends_with("ä…\n"), "{}", long.len());
    }

    /// Nothing waits for a reader who does not read, and what he has missed is said afterwards.
    #[test]
    fn lines_that_nobody_reads_are_left_out_and_counted() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let lost = AtomicU64::new(0);
        let line = "x".repeat(4_000) + "\n";
        let mut sent = 0;
        while lost.load(Relaxed) < 5 {
            write_to(writer.as_fd(), &line, &lost);
            sent += 1;
            assert!(sent < 1_000, "a pipe is full at some time");
        }
        let mut read = vec![0; 8 * 4_001];
        reader.read_exact(&mut read).unwrap();
        write_to(writer.as_fd(), "the next\n", &lost);
        assert_eq!(lost.load(Relaxed), 0);
        drop(writer);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        let end: Vec<&str> = rest.lines().rev().take(2).collect();
        assert_eq!(end[0], "the next");
        assert!(end[1].contains("5 lines are left out"), "{}", end[1]);
        assert_eq!(rest.lines().count() as u64 + 8, sent - 5 + 2);
    }

    #[test]
    fn a_file_or_socket_of_the_program_is_not_stderr() {
        use std::fs::File;
        let dir = std::env::temp_dir().join(format!("unbroken-log-{}", std::process::id()));
        let open = |append| File::options().create(true).write(true).append(append).open(&dir);
        let (data, log) = (open(false).unwrap(), open(true).unwrap());
        std::fs::remove_file(&dir).unwrap();
        let began_as = |fd: BorrowedFd<'_>| identity(fstat(fd).ok().as_ref());
        assert!(is_stderr(data.as_fd(), began_as(data.as_fd())), "prog 2>file");
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let (_reader, pipe) = std::io::pipe().unwrap();
        assert!(is_stderr(pipe.as_fd(), began_as(pipe.as_fd())), "prog 2>&1 | less");
        let null = File::options().write(true).open("/dev/null").unwrap();
        for began_as in [None, began_as(pipe.as_fd())] {
            assert!(!is_stderr(data.as_fd(), began_as));
            assert!(!is_stderr(socket.as_fd(), began_as));
            assert!(is_stderr(log.as_fd(), began_as) && is_stderr(null.as_fd(), began_as));
        }
    }

    #[test]
    fn a_reader_who_is_gone_ends_nothing() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let lost = AtomicU64::new(0);
        write_to(writer.as_fd(), "unread\n", &lost);
        assert_eq!(lost.load(Relaxed), 1);
    }
}
