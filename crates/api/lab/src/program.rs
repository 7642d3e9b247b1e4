//! A program on a host of the lab.

use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{getppid, set_parent_process_death_signal, Pid, Signal};

use crate::error::{system, wait_until, Error, Result};

/// Bytes of output that an error shows.
const SHOWN_BYTES: usize = 2000;
/// TCP_LISTEN in the kernel's tables.
const LISTEN: &str = "0A";

/// A program that runs, or ran, with its output in a file. It is killed when this is dropped, and
/// when the thread that started it ends.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Program {
    pub(crate) fn start(name: &str, mut command: Command, log: PathBuf) -> Result<Program> {
        let failed = || system(format!("cannot start {name}"));
        let out = File::create(&log).map_err(system(log.display().to_string()))?;
        let err = out.try_clone().map_err(failed())?;
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        let parent = std::process::id();
        // SAFETY: between fork and exec the child makes two system calls, and touches neither
        // memory that others write nor a lock.
        unsafe {
            command.pre_exec(move || {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                match getppid().map(Pid::as_raw_pid) {
                    Some(now) if now.unsigned_abs() == parent => Ok(()),
                    // The test has ended before the kernel was asked.
                    _ => Err(rustix::io::Errno::SRCH.into()),
                }
            });
        }
        let child = command.spawn().map_err(failed())?;
        Ok(Program { name: name.into(), child, log })
    }

    /// Its process: the program's own, not that of a wrapper.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has written so far, to both streams.
    pub fn output(&self) -> String {
        fs::read(&self.log).map_or_else(
            |why| format!("{}: {why}", self.log.display()),
            |bytes| String::from_utf8_lossy(&bytes).into_owned(),
        )
    }

    /// How it ended; `None` while it runs.
    pub fn status(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().map_err(system(format!("cannot look at {}", self.name)))
    }

    /// Waits for its end. An error if it still runs after `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let name = self.name.clone();
        let ended = wait_until(timeout, || format!("{name} ends"), || self.status());
        ended.map_err(|error| match error {
            Error::NotSo(what) => self.shown(&what),
            other => other,
        })
    }

    /// Waits for its end with status 0; gives its output.
    pub fn succeed(&mut self, timeout: Duration) -> Result<String> {
        match self.wait(timeout)? {
            status if status.success() => Ok(self.output()),
            status => Err(self.shown(&format!("{} ended with {status}", self.name))),
        }
    }

    /// Waits for its end with an error of its own; gives its output. An error if it succeeds or
    /// dies by a signal.
    pub fn fail(&mut self, timeout: Duration) -> Result<String> {
        let status = self.wait(timeout)?;
        match status.success() || status.signal().is_some() {
            false => Ok(self.output()),
            true => {
                Err(self
                    .shown(&format!("{} ended with {status}, where an error was due", self.name)))
            }
        }
    }

    /// Waits until a TCP port has a listener in its network. An error if it ends first.
    pub fn wait_for_listener(&mut self, port: u16, timeout: Duration) -> Result<()> {
        let what = format!("{} listens on TCP port {port}", self.name);
        wait_until(
            timeout,
            || what.clone(),
            || match self.status()? {
                Some(status) => Err(self.shown(&format!("{what}: it ended with {status}"))),
                None => Ok(listens(self.pid(), port).then_some(())),
            },
        )
    }

    /// Ends it, if it still runs.
    pub fn kill(&mut self) {
        // An error means that it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn shown(&self, what: &str) -> Error {
        let output = self.output();
        let mut from = output.len().saturating_sub(SHOWN_BYTES);
        while !output.is_char_boundary(from) {
            from += 1;
        }
        Error::NotSo(format!("{what}; the end of its output:\n{}", &output[from..]))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

fn listens(pid: u32, port: u16) -> bool {
    let has = |table: &str| {
        let table = fs::read_to_string(Path::new("/proc").join(format!("{pid}/net/{table}")));
        let port = format!(":{port:04X}");
        table.is_ok_and(|table| {
            table.lines().skip(1).any(|line| {
                let mut fields = line.split_whitespace().skip(1);
                let local = fields.next().unwrap_or_default();
                local.ends_with(&port) && fields.nth(1) == Some(LISTEN)
            })
        })
    };
    has("tcp") || has("tcp6")
}
