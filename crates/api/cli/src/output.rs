//! Writing to stdout, and what can go wrong.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use unbroken_edge_daemon::error::EdgeError;
use unbroken_fabric::{FabricError, RuntimeError};
use unbroken_units::text::{escaped_json, shown_lines};

/// Why a subcommand ended early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Nobody reads our output any more.
    ClosedPipe,
    /// The output has said what is wrong.
    Told,
    /// The output is a verdict, which the exit status says, too.
    Verdict(u8),
    /// To be told to the user.
    Text(String),
    /// The program of `run` was not started.
    Program {
        /// The exit status.
        status: u8,
        /// To be told to the user.
        text: String,
    },
}

pub(crate) type Result<T = ()> = std::result::Result<T, Failure>;

impl Failure {
    /// An error of a file or socket, with what was tried.
    pub(crate) fn io(what: impl std::fmt::Display, error: io::Error) -> Failure {
        Failure::Text(format!("{what}: {error}"))
    }
}

/// That a file can be put in that place: nothing is there, or a file. Devices, pipes and what links
/// lead to such as these are not replaced.
pub(crate) fn check_replaceable(path: &std::path::Path) -> Result {
    match path.metadata() {
        Ok(meta) if !meta.is_file() => Err(Failure::Text(format!(
            "{} is no file and is not replaced; the name of a file is right",
            path.display()
        ))),
        _ => Ok(()),
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Failure::ClosedPipe => "broken pipe",
            Failure::Told | Failure::Verdict(_) => "what is wrong was told",
            Failure::Text(text) | Failure::Program { text, .. } => text,
        })
    }
}

impl From<RuntimeError> for Failure {
    fn from(e: RuntimeError) -> Failure {
        Failure::Text(e.to_string())
    }
}

impl From<FabricError> for Failure {
    fn from(e: FabricError) -> Failure {
        Failure::Text(e.to_string())
    }
}

impl From<unbroken_observe::ObserveError> for Failure {
    fn from(e: unbroken_observe::ObserveError) -> Failure {
        Failure::Text(e.to_string())
    }
}

impl From<unbroken_chart::DrawError> for Failure {
    fn from(e: unbroken_chart::DrawError) -> Failure {
        Failure::Text(format!("cannot draw the picture: {e}"))
    }
}

impl From<EdgeError> for Failure {
    fn from(e: EdgeError) -> Failure {
        Failure::Text(e.to_string())
    }
}

impl From<String> for Failure {
    fn from(text: String) -> Failure {
        Failure::Text(text)
    }
}

/// Writes text to stdout at once. Names of programs, reasons and lines of logs are others': what a
/// terminal would obey in them is replaced.
pub(crate) fn print(text: &str) -> Result {
    write_out(&shown_lines(text))
}

fn write_out(text: &str) -> Result {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| match e.kind() {
        io::ErrorKind::BrokenPipe => Failure::ClosedPipe,
        _ => Failure::io("cannot write the output", e),
    })
}

/// Writes a value as one line of JSON.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result {
    let text = serde_json::to_string(value).map_err(|e| format!("cannot write JSON: {e}"))?;
    write_out(&(escaped_json(&text) + "\n"))
}

/// Waits for so long; an error as soon as nobody reads our output any more: the terminal is gone,
/// or the other end of the pipe.
pub(crate) fn wait(time: Duration) -> Result {
    let out = io::stdout();
    let deadline = Instant::now() + time;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        // Only what is wrong with it is asked for.
        match poll(&mut [PollFd::new(&out, PollFlags::empty())], Some(&left)) {
            Ok(0) => return Ok(()),
            Ok(_) => return Err(Failure::ClosedPipe),
            Err(Errno::INTR) => {}
            Err(e) => return Err(Failure::io("cannot look at the output", e.into())),
        }
    }
}

/// Rows as text, columns aligned; the first row is the heading. Columns of numbers go to the right.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter().filter_map(|r| r.get(c)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let gap = " ".repeat(width - cell.chars().count());
            let number =
                cell.starts_with(|c: char| c.is_ascii_digit()) && !cell.contains(['/', ':']);
            line += &if number { format!("{gap}{cell}  ") } else { format!("{cell}{gap}  ") };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_aligned() {
        let rows = [["nic", "bytes"], ["a/0", "1"], ["left/12", "1234567"]];
        let rows: Vec<Vec<String>> = rows.iter().map(|r| r.map(String::from).to_vec()).collect();
        assert_eq!(table(&rows), "nic      bytes\na/0            1\nleft/12  1234567\n");
        assert_eq!(table(&[]), "");
    }
}
