//! A program that was started.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Result, TrialError};

/// How often a deadline loop looks.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Lines of output that an error shows.
const SHOWN_LINES: usize = 15;

/// A program with its output in a file. Dropping it kills it.
#[derive(Debug)]
pub struct Running {
    child: Child,
    program: String,
    log: PathBuf,
    status: Option<ExitStatus>,
}

impl Running {
    /// Starts `command`; both its output streams go to the file `log`. `program` is its name in
    /// errors.
    pub fn start(mut command: Command, program: &str, log: PathBuf) -> Result<Running> {
        let file = File::create(&log).map_err(TrialError::io(format!("make {}", log.display())))?;
        let again = file.try_clone().map_err(TrialError::io("duplicate a descriptor"))?;
        command.stdin(Stdio::null()).stdout(file).stderr(again);
        let child = command.spawn().map_err(TrialError::io(format!("start {program}")))?;
        Ok(Running { child, program: program.into(), log, status: None })
    }

    /// Its pid: `unbroken run` becomes the program that it starts, so this is also the program's
    /// own.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its name.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status
    }

    /// Waits for its end at most for `limit`; None: it still runs.
    pub fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            match self.ended() {
                None if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
                status => return status,
            }
        }
    }

    /// What it wrote so far.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits until `ready`, which is asked again and again, for at most `limit`. An error if it
    /// ends before or does not get ready.
    pub fn wait_until(
        &mut self,
        what: &str,
        limit: Duration,
        mut ready: impl FnMut() -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !ready() {
            if let Some(status) = self.ended() {
                return Err(self.failed(format!("ended ({status}) before {what}")));
            }
            if Instant::now() >= deadline {
                return Err(self.failed(format!("ran {} s and still not: {what}", limit.as_secs())));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Waits for a successful end.
    pub fn succeed(&mut self, limit: Duration) -> Result<()> {
        match self.wait(limit) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(self.failed(format!("failed ({status})"))),
            None => Err(self.failed(format!("did not end within {} s", limit.as_secs()))),
        }
    }

    /// An error about this program with the end of its output.
    pub fn failed(&self, what: String) -> TrialError {
        let output = self.output();
        let lines: Vec<&str> = output.lines().collect();
        let output = lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n");
        TrialError::Program { program: self.program.clone(), what, output }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.ended().is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, dir: &tempfile::TempDir) -> Running {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Running::start(command, "sh", dir.path().join("log")).unwrap()
    }

    #[test]
    fn output_and_status_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut running = shell("echo out; echo err >&2; exit 3", &dir);
        assert_eq!(running.wait(Duration::from_secs(20)).unwrap().code(), Some(3));
        assert_eq!(running.output(), "out\nerr\n");
        let error = running.succeed(Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("sh failed") && error.contains("err"), "{error}");
    }

    #[test]
    fn waits_have_deadlines_and_dropping_kills() {
        let dir = tempfile::tempdir().unwrap();
        let mut running = shell("exec sleep 600", &dir);
        assert_eq!(running.wait(Duration::ZERO), None);
        let error =
            running.wait_until("it flies", Duration::ZERO, || false).unwrap_err().to_string();
        assert!(error.contains("it flies"), "{error}");
        let pid = running.pid();
        drop(running);
        assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
    }
}
