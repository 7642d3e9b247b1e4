//! Running the system's tools (iproute2, FRR): with a deadline, and errors that name the command.

use std::io::Read;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{EdgeError, Result};
use crate::folder::Ids;

const LONGEST: Duration = Duration::from_secs(30);
/// A program that writes more finds nobody who reads it.
const LONGEST_OUTPUT_BYTES: u64 = 256 << 20;

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
    // Read beside the wait, so that a full pipe does not stop the program.
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    let reader = std::thread::spawn(move || read(&mut out));
    let errors = std::thread::spawn(move || read(&mut err));
    let deadline = Instant::now() + LONGEST;
    let status = loop {
        match child.try_wait().map_err(|e| failed(e.to_string()))? {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(format!("no end after {} s", LONGEST.as_secs())));
            }
            None => std::thread::sleep(Duration::from_micros(500)),
        }
    };
    let (out, err) = (reader.join().unwrap_or_default(), errors.join().unwrap_or_default());
    match status.success() {
        true => Ok((out, err)),
        false => {
            Err(failed(if err.trim().is_empty() { out.trim() } else { err.trim() }.to_owned()))
        }
    }
}

fn read(from: &mut Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        // What could be read is worth showing, whatever came then.
        let _ = from.take(LONGEST_OUTPUT_BYTES).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
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
}
