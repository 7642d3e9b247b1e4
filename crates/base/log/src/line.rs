//! A line, and how it gets to stderr.

use std::fmt::{Arguments, Write};
use std::io::stderr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use log::Level;
use rustix::event::{poll, PollFd, PollFlags, Timespec};

/// So many bytes a pipe takes at once, or not at all.
const MAX_BYTES: usize = 4_096;
/// For so long a line waits for a reader who is slow. While lines are being lost, none waits.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
const NO_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Lines that nobody has read, since the last one that was written.
static LOST: AtomicU64 = AtomicU64::new(0);

/// A line. What peers and the environment may have put into it is text and nothing else: no line
/// feed, and nothing that a terminal would obey.
pub(crate) fn format(part: &str, level: Level, what: Arguments<'_>) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write!(text, "unbroken: {level} {part}: {what}");
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
    write_to(stderr().as_fd(), line, &LOST);
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
    fn a_reader_who_is_gone_ends_nothing() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let lost = AtomicU64::new(0);
        write_to(writer.as_fd(), "unread\n", &lost);
        assert_eq!(lost.load(Relaxed), 1);
    }
}
