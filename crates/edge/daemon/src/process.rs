//! Processes that are known by the lock that they hold on a file, as the kernel tells it.
//!
//! What stands in a pid file may be old or a lie, and a number may go to another process between
//! looking and killing. A lock goes with its process, and a signal by a pidfd reaches that process
//! or none.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::process::{
    fcntl_getlk, pidfd_open, pidfd_send_signal, Flock, FlockType, Pid, PidfdFlags, Signal,
};

use crate::error::{EdgeError, Result};

/// A process that held the lock.
#[derive(Debug)]
pub(crate) struct Running {
    pid: Pid,
    handle: OwnedFd,
}

impl Running {
    /// The process that holds a lock on a file (by `fcntl`), if one does.
    ///
    /// Who holds such a lock loses it when it closes any descriptor of the file: it must not ask.
    pub(crate) fn holder(file: &File) -> Option<Running> {
        let pid = locked_by(file)?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        let running = Running { pid, handle };
        // It still holds it, and still lives: so the descriptor is of the one that held it.
        (locked_by(file) == Some(pid) && !running.ended_within(Duration::ZERO)).then_some(running)
    }

    /// Its number, for showing; it may have gone to another process when it is used.
    pub(crate) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get() as u32
    }

    /// What it executes.
    pub(crate) fn program(&self) -> Option<PathBuf> {
        let link = std::fs::read_link(format!("/proc/{}/exe", self.pid())).ok()?;
        let text = link.to_str()?;
        // After an update the file that it was started from is gone.
        let path = PathBuf::from(text.strip_suffix(" (deleted)").unwrap_or(text));
        (!self.ended_within(Duration::ZERO)).then_some(path)
    }

    /// Readable when it has ended.
    pub(crate) fn handle(&self) -> &OwnedFd {
        &self.handle
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended_within(Duration::ZERO)
    }

    /// Tells it something.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        match pidfd_send_signal(&self.handle, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(EdgeError::at(format!("process {}", self.pid()))(e)),
        }
    }

    /// Ends it, after `patience` by force.
    pub(crate) fn end(&self, patience: Duration) -> Result<()> {
        for signal in [Signal::TERM, Signal::KILL] {
            self.signal(signal)?;
            if self.ended_within(patience) {
                return Ok(());
            }
        }
        Err(EdgeError::Refused(format!("process {} has been killed and does not end", self.pid())))
    }

    /// Whether it ends within some time.
    fn ended_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            match poll(&mut [PollFd::new(&self.handle, PollFlags::IN)], Some(&left)) {
                Ok(ready) => return ready > 0,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}

fn locked_by(file: &File) -> Option<Pid> {
    fcntl_getlk(file, &Flock::from(FlockType::WriteLock)).ok()??.pid
}

/// Locks a file until it is closed or the process ends; whether nobody else holds it.
pub(crate) fn hold(file: &File) -> io::Result<bool> {
    use rustix::fs::{fcntl_lock, FlockOperation};
    match fcntl_lock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::ACCESS | rustix::io::Errno::AGAIN) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, Write as _};
    use std::process::{Command, Stdio};

    const LOCK: &str = "import fcntl, os, sys, time\nf = open(sys.argv[1], 'r+')\n\
        fcntl.lockf(f, fcntl.LOCK_EX)\nprint('held', flush=True)\ntime.sleep(60)\n";

    /// A pid that stands in the file and runs is not the process; who holds the lock is.
    #[test]
    fn who_holds_the_lock_is_found_and_ended() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let mut bystander = Command::new("sleep").arg("60").spawn().unwrap();
        let mut file = File::options().read(true).write(true).open(&path).unwrap();
        write!(file, "{}", bystander.id()).unwrap();
        assert!(Running::holder(&file).is_none());
        let mut other = Command::new("python3")
            .args(["-c", LOCK])
            .arg(&path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "held\n");
        assert!(!hold(&file).unwrap());
        let running = Running::holder(&file).unwrap();
        assert_eq!(running.pid(), other.id());
        assert!(running.program().unwrap().to_str().unwrap().contains("python3"));
        running.end(Duration::from_secs(10)).unwrap();
        other.wait().unwrap();
        running.end(Duration::from_secs(1)).unwrap();
        assert!(Running::holder(&file).is_none() && hold(&file).unwrap());
        assert!(bystander.try_wait().unwrap().is_none());
        bystander.kill().unwrap();
        bystander.wait().unwrap();
    }
}
