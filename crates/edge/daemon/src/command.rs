//! Running the system's tools (iproute2, FRR): with a deadline, and errors that name the command.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::{ioctl_fionbio, Errno};
use rustix::process::{pidfd_open, Pid, PidfdFlags};

use crate::error::{EdgeError, Result};
use crate::folder::Ids;

const LONGEST: Duration = Duration::from_secs(30);
/// A program that writes more finds nobody who reads it.
const LONGEST_OUTPUT_BYTES: usize = 64 << 20;

/// Runs a command to its end and gives what it wrote; the error has the command and what it wrote
/// to stderr.
pub fn run<S: AsRef<str>>(args: &[S]) -> Result<String> {
    run_as(None, args)
}

/// As [`run`], as somebody else where one is given, with no groups but that one and nothing
/// of root's environment but the path.
pub(crate) fn run_as<S: AsRef<str>>(user: Option<Ids>, args: &[S]) -> Result<String> {
    run_both(user, args).map(|(out, _)| out)
}

/// As [`run_as`]; gives also what it wrote to stderr, which is no error of a program that ends
/// well.
pub(crate) fn run_both<S: AsRef<str>>(user: Option<Ids>, args: &[S]) -> Result<(String, String)> {
    let shown = || args.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(" ");
    let failed = |why: String| EdgeError::Command { command: shown(), why };
    let (program, rest) =
        args.split_first().ok_or_else(|| EdgeError::Refused("an empty command".into()))?;
    let mut command = Command::new(program.as_ref());
    if let Some(Ids { user, group }) = user {
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.uid(user).gid(group).env_clear().env("PATH", path).current_dir("/");
    }
    let mut child = command
        .args(rest.iter().map(AsRef::as_ref))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| failed(e.to_string()))?;
    let outputs = child.stdout.take().zip(child.stderr.take());
    let mut outputs = match outputs {
        Some((out, err)) => [Output::new(out.into()), Output::new(err.into())],
        None => return Err(failed("it has no output".into())),
    };
    if let Err(why) = follow(&child, &mut outputs, Instant::now() + LONGEST) {
        let _ = child.kill();
        let _ = child.wait();
        return Err(failed(why.to_string()));
    }
    let status = child.wait().map_err(|e| failed(e.to_string()))?;
    let [out, err] = outputs.map(Output::text);
    match status.success() {
        true => Ok((out, err)),
        false => {
            Err(failed(if err.trim().is_empty() { out.trim() } else { err.trim() }.to_owned()))
        }
    }
}

/// Reads what a program writes until it has ended. What it wrote itself is in the pipes then;
/// another process that holds a copy of them, of a user who is not root perhaps, is not waited for.
fn follow(child: &Child, outputs: &mut [Output; 2], deadline: Instant) -> io::Result<()> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let why = format!("no end after {} s", LONGEST.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut looked_at = vec![PollFd::new(&process, PollFlags::IN)];
        let open = outputs.iter().filter_map(|output| output.pipe.as_ref());
        looked_at.extend(open.map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        match poll(&mut looked_at, Some(&wait)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        // Looked at before the pipes are read: what it wrote last is read, too.
        let ended = !looked_at[0].revents().is_empty();
        outputs.iter_mut().for_each(Output::read);
        if ended {
            return Ok(());
        }
    }
}

/// What a program writes.
struct Output {
    /// Until it is at its end, or too much has come.
    pipe: Option<OwnedFd>,
    bytes: Vec<u8>,
}

impl Output {
    fn new(pipe: OwnedFd) -> Output {
        // A pipe that would block has no way to be read here.
        let pipe = ioctl_fionbio(&pipe, true).is_ok().then_some(pipe);
        Output { pipe, bytes: Vec::new() }
    }

    /// Takes what is there. What could be read is worth showing, whatever comes then.
    fn read(&mut self) {
        let mut buffer = [0; 16 << 10];
        while let Some(pipe) = &self.pipe {
            match rustix::io::read(pipe, &mut buffer) {
                Ok(bytes) if bytes > 0 && self.bytes.len() < LONGEST_OUTPUT_BYTES => {
                    self.bytes.extend_from_slice(&buffer[..bytes]);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                _ => self.pipe = None,
            }
        }
    }

    fn text(self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// A command from words; those with blanks in them are given one by one.
pub fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Whether a program is in the path.
pub fn exists(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut folders = path.split(':').chain(["/usr/sbin", "/sbin"]);
    folders.any(|folder| std::path::Path::new(folder).join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_errors_come_back() {
        assert_eq!(run(&["echo", "a", "b"]).unwrap(), "a b\n");
        let error = run(&["ls", "/no/such"]).unwrap_err().to_string();
        assert!(error.starts_with("ls /no/such: ") && error.contains("No such"), "{error}");
        assert!(run(&["/no/such/program"]).unwrap_err().to_string().contains("/no/such/program"));
    }

    #[test]
    fn who_holds_a_copy_of_the_output_is_not_waited_for() {
        let began = Instant::now();
        let out = run(&["sh", "-c", "sleep 300 & echo $!; head -c 300000 /dev/zero >&2"]).unwrap();
        assert!(began.elapsed() < LONGEST, "the copy was waited for");
        let holder: i32 = out.trim().parse().unwrap();
        let holder = Pid::from_raw(holder).unwrap();
        rustix::process::kill_process(holder, rustix::process::Signal::KILL).unwrap();
    }

    #[test]
    fn all_that_was_written_is_read() {
        let out = run(&["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"]).unwrap();
        assert_eq!(out.len(), 3_000_000);
    }
}
