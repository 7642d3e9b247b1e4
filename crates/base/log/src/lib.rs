//! What is told on stderr where `UNBROKEN_LOG` asks for it: a line each, with its level and the
//! part that tells it.
//!
//! The library runs inside of other people's programs. So there is nothing that a program could
//! have once only: no global subscriber, and no logger. A line that nobody asked for costs an
//! atomic load. Programs in Rust have the same lines, with targets as `unbroken::failover`, if they
//! have installed a logger of the crate `log`.
//!
//! A line is written by one call, so that lines of several processes do not mix, and never waits
//! for long: where nobody reads the other end of a pipe it is left out, and the next one that gets
//! through says how many were. A program that has closed descriptor 2 and opened something else in
//! its place gets none into that.
#![forbid(unsafe_code)]

mod line;

use std::fmt::Arguments;
use std::sync::OnceLock;

use log::Record;
use unbroken_environment::{log_filter, LogFilter};

pub use log::Level;
pub use unbroken_environment::LOG as VARIABLE;

/// Who tells a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Switches, failback, what is not protected.
    Failover,
    /// NICs: their deaths, their ports.
    Nic,
    /// The directory in which peers find each other.
    Directory,
    /// Collectives.
    Collective,
    /// Software-defined reliability.
    Sdr,
    /// The daemon of the host edge.
    Edge,
    /// Verbs: the reasons of the error numbers that programs get.
    Verbs,
}

impl Part {
    /// All of them, in the order of [`unbroken_environment::LOG_PARTS`].
    pub const ALL: [Part; 7] = [
        Part::Failover,
        Part::Nic,
        Part::Directory,
        Part::Collective,
        Part::Sdr,
        Part::Edge,
        Part::Verbs,
    ];

    /// Its name in `UNBROKEN_LOG`.
    pub const fn name(self) -> &'static str {
        unbroken_environment::LOG_PARTS[self as usize]
    }

    /// Its target for loggers of the crate `log`.
    const fn target(self) -> &'static str {
        match self {
            Part::Failover => "unbroken::failover",
            Part::Nic => "unbroken::nic",
            Part::Directory => "unbroken::directory",
            Part::Collective => "unbroken::collective",
            Part::Sdr => "unbroken::sdr",
            Part::Edge => "unbroken::edge",
            Part::Verbs => "unbroken::verbs",
        }
    }
}

/// What is asked for on stderr, as the environment said it at first.
fn filter() -> Option<&'static LogFilter> {
    static FILTER: OnceLock<Option<LogFilter>> = OnceLock::new();
    FILTER.get_or_init(log_filter).as_ref()
}

/// Reads the environment now, so that no fork comes amidst that.
pub fn prepare() {
    note_stderr();
    let _ = filter();
}

/// Keeps in mind what stderr is. A library that is loaded into programs calls it when it is loaded:
/// later descriptor 2 may be a file or a socket of the program's, into which no line may go.
pub fn note_stderr() {
    line::note_stderr();
}

/// Tells the user what is wrong, whatever `UNBROKEN_LOG` says. A standard error that is full or
/// closed is no reason to fail.
#[cold]
pub fn complain(what: Arguments<'_>) {
    line::write(&line::whole(format_args!("unbroken: {what}")));
}

fn is_asked_for(part: Part, level: Level) -> bool {
    let line = || log::Metadata::builder().target(part.name()).level(level).build();
    filter().is_some_and(|filter| filter.enabled(&line()))
}

/// Whether a line of that part and level goes anywhere. Who needs memory or time to make one asks
/// this first.
pub fn is_told(part: Part, level: Level) -> bool {
    is_asked_for(part, level) || log::log_enabled!(target: part.target(), level)
}

/// Tells a line, if somebody wants it. An error of writing is no reason to fail at anything.
#[cold]
pub fn tell(part: Part, level: Level, what: Arguments<'_>) {
    if is_asked_for(part, level) {
        line::write(&line::format(part.name(), level, what));
    }
    if level <= log::max_level() {
        log::logger().log(&Record::builder().target(part.target()).level(level).args(what).build());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_the_names_of_the_table() {
        for (part, name) in Part::ALL.into_iter().zip(unbroken_environment::LOG_PARTS) {
            assert_eq!((part.name(), part.target()), (name, &*format!("unbroken::{name}")));
        }
    }

    /// As a program in Rust has it that has installed a logger, and has not set the variable.
    #[test]
    fn a_logger_of_the_program_has_the_lines() {
        use std::sync::Mutex;
        static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());
        struct Logger;
        impl log::Log for Logger {
            fn enabled(&self, _: &log::Metadata<'_>) -> bool {
                true
            }
            fn log(&self, record: &Record<'_>) {
                let words = format!("{} {} {}", record.level(), record.target(), record.args());
                SEEN.lock().unwrap().push(words);
            }
            fn flush(&self) {}
        }
        log::set_logger(&Logger).unwrap();
        tell(Part::Failover, Level::Error, format_args!("before"));
        assert!(!is_told(Part::Failover, Level::Error));
        log::set_max_level(log::LevelFilter::Info);
        tell(Part::Failover, Level::Info, format_args!("QP {} moved", 7));
        tell(Part::Nic, Level::Debug, format_args!("too much"));
        assert!(is_told(Part::Sdr, Level::Info) && !is_told(Part::Sdr, Level::Debug));
        assert_eq!(*SEEN.lock().unwrap(), ["INFO unbroken::failover QP 7 moved"]);
    }
}
