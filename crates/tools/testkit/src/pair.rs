//! A server and a client of perftest's kind.

use std::net::TcpListener;
use std::time::Duration;

use crate::error::{Result, TrialError};
use crate::lab::Lab;
use crate::running::Running;

/// Ports are tried in this range, below those that the kernel gives to outgoing connections.
const PORTS: std::ops::Range<u16> = 20_000..32_000;
/// A server that does not listen within this is broken.
const LISTEN_LIMIT: Duration = Duration::from_secs(10);

/// What to run.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The program, the same at both ends.
    pub program: String,
    /// Its arguments at both ends, without port and server.
    pub args: Vec<String>,
    /// The server's host.
    pub server: String,
    /// The client's host.
    pub client: String,
    /// Whether NIC failures are survived.
    pub failover: bool,
}

impl Spec {
    /// `program` from host a (client) to host b (server), with failover. `args` are separated by
    /// blanks.
    pub fn new(program: &str, args: &str) -> Spec {
        let args = args.split_whitespace().map(String::from).collect();
        Spec {
            program: program.into(),
            args,
            server: "b".into(),
            client: "a".into(),
            failover: true,
        }
    }

    /// The command line of the client, for people.
    pub fn shown(&self) -> String {
        let off = if self.failover { "" } else { "--no-failover " };
        format!(
            "unbroken run --host {} {off}-- {} {} 127.0.0.1",
            self.client,
            self.program,
            self.args.join(" ")
        )
    }
}

/// Both ends.
#[derive(Debug)]
pub struct Pair {
    /// The passive end.
    pub server: Running,
    /// The active end.
    pub client: Running,
}

impl Pair {
    /// Starts the server, waits until it listens, and starts the client: `… -p PORT` and `… -p PORT
    /// 127.0.0.1`, as perftest has it.
    pub fn start(lab: &Lab, spec: &Spec) -> Result<Pair> {
        Pair::start_as(lab, spec, |port| {
            let port = ["-p".to_string(), port.to_string()];
            (port.to_vec(), [&port[..], &["127.0.0.1".to_string()]].concat())
        })
    }

    /// Starts a pair, as [`Pair::start`] does, with arguments that say in another way where to
    /// listen and where to connect: `ends` gives those of the server and those of the client for a
    /// TCP port.
    pub fn start_as(
        lab: &Lab,
        spec: &Spec,
        ends: impl FnOnce(u16) -> (Vec<String>, Vec<String>),
    ) -> Result<Pair> {
        let port = free_port()?;
        let (passive, active) = ends(port);
        let start = |host: &str, more: Vec<String>| {
            lab.start(host, spec.failover, &spec.program, &[&spec.args[..], &more[..]].concat())
        };
        let mut server = start(&spec.server, passive)?;
        server.wait_until(&format!("it listens on TCP port {port}"), LISTEN_LIMIT, || {
            listens(port)
        })?;
        let client = start(&spec.client, active)?;
        Ok(Pair { server, client })
    }

    /// Waits for the successful end of both and returns the client's output.
    pub fn succeed(&mut self, limit: Duration) -> Result<String> {
        self.client.succeed(limit)?;
        self.server.succeed(Duration::from_secs(10))?;
        Ok(self.client.output())
    }
}

/// A TCP port that nobody uses now. Two processes begin at different places, so that they do not
/// get the same.
pub fn free_port() -> Result<u16> {
    let len = u32::from(PORTS.end - PORTS.start);
    let first = std::process::id().wrapping_mul(101) % len;
    let ports = (0..len).map(|n| PORTS.start + ((first + n) % len) as u16);
    let free = |port: &u16| TcpListener::bind(("0.0.0.0", *port)).is_ok();
    ports.into_iter().find(free).ok_or_else(|| {
        let nothing = std::io::Error::from(std::io::ErrorKind::AddrInUse);
        TrialError::io(format!("find a free TCP port from {} to {}", PORTS.start, PORTS.end))(
            nothing,
        )
    })
}

/// Whether some process listens on a TCP port, as the kernel's tables say (connecting would disturb
/// the server).
fn listens(port: u16) -> bool {
    let files = ["/proc/net/tcp", "/proc/net/tcp6"];
    files
        .iter()
        .filter_map(|f| std::fs::read_to_string(f).ok())
        .any(|table| table_has_listener(&table, port))
}

fn table_has_listener(table: &str, port: u16) -> bool {
    let suffix = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let local = words.next().is_some_and(|local| local.ends_with(&suffix));
        // 0A: LISTEN.
        local && words.nth(1) == Some("0A")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_seen_without_connecting() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listens(port));
        drop(listener);
        // A process that another test is just starting has it, too, until it runs its program.
        let gone = || !listens(port);
        assert!((0..1000).any(|_| gone() || {
            std::thread::sleep(Duration::from_millis(10));
            gone()
        }));
        assert!(PORTS.contains(&free_port().unwrap()));
    }

    #[test]
    fn established_connections_are_no_listeners() {
        let table =
            "  sl  local_address rem_address   st\n   0: 0100007F:4E20 0100007F:C350 01 x\n";
        assert!(!table_has_listener(table, 20_000));
        assert!(table_has_listener(&table.replace(" 01 ", " 0A "), 20_000));
        assert!(!table_has_listener(&table.replace(" 01 ", " 0A "), 50_000));
    }
}
