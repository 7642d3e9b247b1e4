//! The status socket of a process, `proc/<pid>-<id>.sock`.
//!
//! The protocol is the smallest there is: who connects gets one JSON object ([`ProcessStatus`]) and
//! the end of the stream. The server has no thread: the owner polls [`StatusServer::accept_one`]
//! from one of its own.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use unbroken_runtime::{bind_in, connect_in, now_us, Presence, ProcessName, Runtime};

use crate::status::ProcessStatus;

/// A client that does not read within this is dropped.
const WRITE_TIMEOUT: Duration = Duration::from_millis(100);
/// How long nobody is answered where there is no descriptor for it: whoever polls would else be
/// told again and again that somebody waits.
const REST: Duration = Duration::from_millis(500);
/// Longest answer that is read.
const ANSWER_LIMIT_BYTES: u64 = 16 << 20;

/// The answering end, one for each process.
pub struct StatusServer {
    listener: UnixListener,
    /// When it may be looked at again, µs ([`now_us`]).
    rests_until_us: AtomicU64,
    path: PathBuf,
    /// The socket is that of a living process while this is held.
    presence: Presence,
}

impl StatusServer {
    /// Makes the socket of this process.
    pub fn bind(runtime: &Runtime) -> io::Result<StatusServer> {
        let presence = Presence::join(runtime)?;
        let name = presence.name();
        let path = runtime.sockets().join(format!("{name}.sock"));
        let listener = bind_in(&runtime.sockets(), &format!("{name}.sock"))?;
        Ok(StatusServer { listener, rests_until_us: AtomicU64::new(0), path, presence })
    }

    /// Whether nobody can be answered for a while: its descriptor is then not worth polling.
    pub fn rests(&self) -> bool {
        now_us() < self.rests_until_us.load(Ordering::Relaxed)
    }

    /// Answers one client if one waits, with what `status` gives; never blocks for long. True if a
    /// client was answered.
    pub fn accept_one(&self, status: impl FnOnce() -> ProcessStatus) -> bool {
        let mut client = match self.listener.accept() {
            Ok((client, _)) => client,
            Err(e) => {
                if e.kind() != io::ErrorKind::WouldBlock {
                    self.rests_until_us
                        .store(now_us() + REST.as_micros() as u64, Ordering::Relaxed);
                }
                return false;
            }
        };
        let answer = || -> io::Result<()> {
            client.set_nonblocking(false)?;
            client.set_write_timeout(Some(WRITE_TIMEOUT))?;
            client.write_all(&serde_json::to_vec(&status())?)
        };
        // A client that went away is its own affair.
        let _ = answer();
        true
    }
}

impl AsFd for StatusServer {
    /// Readable when a client waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for StatusServer {
    fn drop(&mut self) {
        // A forked child must not take its parent's socket away.
        if std::process::id() == self.presence.name().pid {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The processes that have a status socket; sockets of dead processes are removed.
pub fn answering_processes(runtime: &Runtime) -> io::Result<Vec<ProcessName>> {
    let presence = Presence::join(runtime)?;
    let mut names = Vec::new();
    for entry in fs::read_dir(runtime.sockets())? {
        let path = entry?.path();
        let text = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_suffix(".sock"));
        let Some(name) = text.and_then(|text| text.parse::<ProcessName>().ok()) else { continue };
        if presence.lives(name.id) {
            names.push(name);
        } else {
            let _ = fs::remove_file(&path);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Asks a process. Errors: it does not listen, it does not answer within `timeout`, or the answer
/// is not a status.
pub fn query_status(
    runtime: &Runtime,
    process: ProcessName,
    timeout: Duration,
) -> io::Result<ProcessStatus> {
    let stream = connect_in(&runtime.sockets(), &format!("{process}.sock"), timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    let mut answer = Vec::new();
    stream.take(ANSWER_LIMIT_BYTES).read_to_end(&mut answer)?;
    Ok(serde_json::from_slice(&answer)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BackupsStatus, QpStatus};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_process_answers() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("a-long-name-of-a-folder/".repeat(6));
        let runtime = Runtime::at(&long).unwrap();
        let server = StatusServer::bind(&runtime).unwrap();
        let status = ProcessStatus {
            pid: std::process::id(),
            program: "test".into(),
            host: "a".into(),
            forged: 3,
            qps: vec![QpStatus {
                qp: 2,
                host: "a".into(),
                own: "127.77.1.0:2".into(),
                peer: String::new(),
                path: String::new(),
                epoch: 0,
                protected: false,
                why: "not connected".into(),
                state: "init".into(),
                ..QpStatus::default()
            }],
            nics: Vec::new(),
            backups: BackupsStatus::default(),
            sdr: None,
        };
        assert!(!server.accept_one(|| unreachable!()));
        assert_eq!(fs::metadata(&server.path).unwrap().permissions().mode() & 0o777, 0o600);
        let name = server.presence.name();
        assert_eq!(answering_processes(&runtime).unwrap(), [name]);
        let answer = std::thread::scope(|scope| {
            let client =
                scope.spawn(|| query_status(&runtime, name, Duration::from_secs(20)).unwrap());
            while !server.accept_one(|| status.clone()) {
                std::thread::yield_now();
            }
            client.join().unwrap()
        });
        assert_eq!(answer, status);
        drop(server);
        assert!(answering_processes(&runtime).unwrap().is_empty());
    }

    #[test]
    fn who_does_not_answer_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let server = StatusServer::bind(&runtime).unwrap();
        assert!(query_status(&runtime, server.presence.name(), Duration::from_millis(1)).is_err());
    }

    #[test]
    fn sockets_of_the_dead_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        // Of a process that had this one's pid, here or in another PID namespace.
        let dead = ProcessName { pid: std::process::id(), id: 5 };
        let stale = runtime.sockets().join(format!("{dead}.sock"));
        fs::write(&stale, "").unwrap();
        let living = StatusServer::bind(&runtime).unwrap();
        assert_eq!(answering_processes(&runtime).unwrap(), [living.presence.name()]);
        assert!(!stale.exists());
    }
}
