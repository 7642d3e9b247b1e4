//! The other end of a bench, as this end talks to it: line by line, over the pipes of a process of
//! this command, or over a TCP connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use unbroken_fabric::Runtime;

use super::bench::BenchArgs;
use super::wanted;
use crate::child;
use crate::output::{Failure, Result};

/// The longest line.
const MAX_LINE: u64 = 1 << 20;
/// Between two lines of the other end lies the bench, and no more than this besides.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often it is looked whether somebody has come.
const LOOK: Duration = Duration::from_millis(10);

/// The other end.
pub(super) struct Peer {
    said: Box<dyn BufRead>,
    say: Box<dyn Write>,
    who: &'static str,
    /// Its process, where that is ours.
    child: Option<Child>,
}

impl Peer {
    /// The process that has started this one.
    pub(super) fn parent() -> Peer {
        let said = Box::new(BufReader::new(std::io::stdin()));
        Peer { said, say: Box::new(std::io::stdout()), who: "the client", child: None }
    }

    /// A process of the same words, but for the command.
    pub(super) fn start(runtime: &Runtime) -> Result<Peer> {
        let program =
            std::env::current_exe().map_err(|e| Failure::io("cannot find this command", e))?;
        let mut words: Vec<_> = std::env::args_os().skip(1).collect();
        if let Some(word) = words.iter_mut().find(|word| *word == "bench") {
            *word = "bench-end".into();
        }
        let mut child = Command::new(program)
            .args(words)
            .args(child::parent_words())
            .env("UNBROKEN_RUNTIME", runtime.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Failure::io("cannot start the server", e))?;
        let (Some(said), Some(say)) = (child.stdout.take(), child.stdin.take()) else {
            return Err(Failure::Text("the server has no pipes".into()));
        };
        let said = Box::new(BufReader::new(said));
        Ok(Peer { said, say: Box::new(say), who: "the server", child: Some(child) })
    }

    /// Waits at an address for somebody who connects; gives the address at which that was, too.
    pub(super) fn wait_at(
        at: SocketAddr,
        most: Duration,
        deadline: Duration,
    ) -> Result<(Peer, IpAddr)> {
        let what = format!("--listen {at}");
        let io = |e| Failure::io(&what, e);
        let listener = TcpListener::bind(at).map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        let until = Instant::now() + most;
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(e) if e.kind() != std::io::ErrorKind::WouldBlock => return Err(io(e)),
                Err(_) if Instant::now() >= until => {
                    return Err(Failure::Text(format!(
                        "{what}: nobody has come in {most:?}; start the other end with: unbroken \
                         sdr bench --connect {at}"
                    )))
                }
                Err(_) => std::thread::sleep(LOOK),
            }
        };
        stream.set_nonblocking(false).map_err(io)?;
        Peer::over(stream, "the client", deadline).map_err(io)
    }

    /// Connects to who waits at an address; gives the address from which that was, too.
    pub(super) fn connect(to: SocketAddr, deadline: Duration) -> Result<(Peer, IpAddr)> {
        let what = format!(
            "--connect {to}: start the other end there first, with: unbroken sdr bench --listen \
             {to}"
        );
        let io = |e| Failure::io(&what, e);
        let stream = TcpStream::connect_timeout(&to, PATIENCE).map_err(io)?;
        Peer::over(stream, "the server", deadline).map_err(io)
    }

    fn over(
        stream: TcpStream,
        who: &'static str,
        deadline: Duration,
    ) -> std::io::Result<(Peer, IpAddr)> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_read_timeout(Some(PATIENCE.saturating_add(deadline)))?;
        let here = stream.local_addr()?.ip();
        let said = Box::new(BufReader::new(stream.try_clone()?));
        Ok((Peer { said, say: Box::new(stream), who, child: None }, here))
    }

    /// Its next line.
    pub(super) fn hear(&mut self) -> Result<String> {
        let mut text = String::new();
        match (&mut self.said).take(MAX_LINE).read_line(&mut text) {
            Ok(0) | Err(_) => {
                Err(Failure::Text(format!("{} has ended before the bench was over", self.who)))
            }
            Ok(_) => Ok(text),
        }
    }

    /// Says a line.
    pub(super) fn say(&mut self, text: &str) -> Result {
        let said = writeln!(self.say, "{text}").and_then(|()| self.say.flush());
        said.map_err(|e| Failure::io(format!("cannot write to {}", self.who), e))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What the end that connects says to the end that waits: both are made alike.
#[derive(Serialize, Deserialize)]
pub(super) struct Agreed {
    /// Of this object.
    version: u32,
    scheme: String,
    size: u64,
    chunk: u8,
    mtu: u8,
    channels: u8,
    in_flight: u32,
    messages: u32,
    deadline_us: u64,
    lifetime_us: u64,
    verify: bool,
}

const VERSION: u32 = 1;

impl Agreed {
    /// As one line.
    pub(super) fn line(a: &BenchArgs) -> Result<String> {
        let agreed = Agreed {
            version: VERSION,
            scheme: a.scheme.word(),
            size: a.size,
            chunk: a.chunk,
            mtu: a.mtu,
            channels: a.channels,
            in_flight: a.in_flight,
            messages: a.messages,
            deadline_us: a.deadline.as_micros() as u64,
            lifetime_us: a.lifetime.as_micros() as u64,
            verify: a.verify,
        };
        serde_json::to_string(&agreed).map_err(|e| Failure::Text(e.to_string()))
    }

    /// Of a line, in the place of what this end was told.
    pub(super) fn adopt(line: &str, args: &BenchArgs) -> Result<BenchArgs> {
        let wrong = |what: String| {
            Failure::Text(format!(
                "who has connected is no `unbroken sdr bench` of this version: {what}"
            ))
        };
        let a: Agreed = serde_json::from_str(line).map_err(|e| wrong(e.to_string()))?;
        let fits = a.version == VERSION
            && (1..=64).contains(&a.channels)
            && (1..=256).contains(&a.in_flight)
            && a.messages > 0
            && a.chunk <= 30
            && a.mtu <= 12;
        if !fits {
            return Err(wrong(line.trim().into()));
        }
        let mut args = args.clone();
        args.scheme = wanted(&a.scheme).map_err(wrong)?;
        (args.size, args.chunk, args.mtu) = (a.size, a.chunk, a.mtu);
        (args.channels, args.in_flight, args.messages) = (a.channels, a.in_flight, a.messages);
        args.deadline = Duration::from_micros(a.deadline_us);
        args.lifetime = Duration::from_micros(a.lifetime_us);
        args.verify = a.verify;
        Ok(args)
    }
}
