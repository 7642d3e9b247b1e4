//! A connection to a Redis server, over TCP or TLS. Each wait for it ends, and so does each answer.

use std::io::{self, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::resp::{self, Budget, Error, Result, Value};
use crate::servers::Address;
use crate::settings::RedisSettings;

/// How long to wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waits {
    /// For a connection, and for each piece of an answer. Nobody waits for it but the directory's
    /// thread; so it is longer than any network's round trip.
    pub(super) piece: Duration,
    /// For all answers of a round, however small the pieces are in which they come.
    pub(super) round: Duration,
}

impl Default for Waits {
    fn default() -> Waits {
        Waits { piece: Duration::from_secs(5), round: Duration::from_secs(30) }
    }
}

/// What TLS is begun with.
pub(super) type Tls = Arc<ClientConfig>;

/// Reads the PEM files of the settings.
///
/// Errors: in words, which file is wrong.
pub(super) fn tls(settings: &RedisSettings) -> std::result::Result<Tls, String> {
    let mut roots = RootCertStore::empty();
    match &settings.ca {
        Some(path) => {
            let bad = |e: String| format!("{} has no certificates in PEM: {e}", path.display());
            for certificate in chain(path)? {
                roots.add(certificate).map_err(|e| bad(e.to_string()))?;
            }
        }
        // Some of the system's may be unreadable; a server that needs them is refused then.
        None => {
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?
        .with_root_certificates(roots);
    let config = match &settings.cert {
        None => config.with_no_client_auth(),
        Some((cert, key)) => {
            let private = PrivateKeyDer::from_pem_slice(&file(key)?)
                .map_err(|e| format!("{} has no private key in PEM: {e}", key.display()))?;
            config
                .with_client_auth_cert(chain(cert)?, private)
                .map_err(|e| format!("{} and {}: {e}", cert.display(), key.display()))?
        }
    };
    Ok(Arc::new(config))
}

fn file(path: &Path) -> std::result::Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

fn chain(path: &Path) -> std::result::Result<Vec<CertificateDer<'static>>, String> {
    let bad = |e: String| format!("{} has no certificates in PEM: {e}", path.display());
    let certificates: std::result::Result<Vec<_>, _> =
        CertificateDer::pem_slice_iter(&file(path)?).collect();
    let certificates = certificates.map_err(|e| bad(e.to_string()))?;
    match certificates.is_empty() {
        true => Err(bad("none is in it".into())),
        false => Ok(certificates),
    }
}

/// A socket all of whose operations end by a deadline. It lies below TLS, so that a record that
/// comes byte by byte ends, too.
struct Socket {
    stream: TcpStream,
    piece: Duration,
    deadline: Instant,
}

impl Socket {
    fn connect(address: &Address, waits: Waits) -> io::Result<Socket> {
        let deadline = Instant::now() + waits.piece;
        let mut why = io::Error::other(format!("{} has no address", address.host));
        for at in (address.host.as_str(), address.port).to_socket_addrs()? {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match TcpStream::connect_timeout(&at, left) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(Socket { stream, piece: waits.piece, deadline });
                }
                Err(e) => why = e,
            }
        }
        Err(why)
    }

    /// The time that the next operation may take.
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.deadline.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(Some(left.min(self.piece))),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(out)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

enum Stream {
    Plain(Socket),
    Tls(Box<StreamOwned<ClientConnection, Socket>>),
}

impl Stream {
    fn socket(&mut self) -> &mut Socket {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Tls(tls) => &mut tls.sock,
        }
    }
}

impl Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.read(out),
            Stream::Tls(tls) => tls.read(out),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.write(bytes),
            Stream::Tls(tls) => tls.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(socket) => socket.flush(),
            Stream::Tls(tls) => tls.flush(),
        }
    }
}

/// Commands that are sent together.
#[derive(Default)]
pub(super) struct Commands {
    bytes: Vec<u8>,
    count: usize,
}

impl Commands {
    pub(super) fn add(&mut self, words: &[&[u8]]) {
        resp::write(&mut self.bytes, words);
        self.count += 1;
    }
}

/// See the module's text. After an error it is of no more use.
pub(super) struct Connection {
    stream: BufReader<Stream>,
    round: Duration,
}

impl Connection {
    /// Connects. Nobody is logged in yet.
    pub(super) fn open(address: &Address, tls: Option<&Tls>, waits: Waits) -> Result<Connection> {
        let socket = Socket::connect(address, waits)?;
        let stream = match tls {
            None => Stream::Plain(socket),
            Some(config) => {
                let name = ServerName::try_from(address.host.clone())
                    .map_err(|e| Error::Io(io::Error::other(e)))?;
                let client = ClientConnection::new(config.clone(), name)
                    .map_err(|e| Error::Io(io::Error::other(e)))?;
                Stream::Tls(Box::new(StreamOwned::new(client, socket)))
            }
        };
        Ok(Connection { stream: BufReader::new(stream), round: waits.round })
    }

    /// Sends commands and takes an answer to each. The first that is an error ends it.
    pub(super) fn ask(&mut self, commands: &Commands) -> Result<Vec<Value>> {
        let stream = self.stream.get_mut();
        stream.socket().deadline = Instant::now() + self.round;
        stream.write_all(&commands.bytes)?;
        stream.flush()?;
        let (mut values, mut budget) = (Vec::with_capacity(commands.count), Budget::default());
        while values.len() < commands.count {
            values.push(resp::read(&mut self.stream, &mut budget)?);
        }
        Ok(values)
    }

    /// Sends one command and takes its answer.
    pub(super) fn ask_one(&mut self, words: &[&[u8]]) -> Result<Value> {
        let mut commands = Commands::default();
        commands.add(words);
        Ok(self.ask(&commands)?.pop().unwrap_or(Value::Nil))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    const WAITS: Waits = Waits { piece: Duration::from_secs(5), round: Duration::from_millis(400) };

    fn listen() -> (TcpListener, Address) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, Address { host: "127.0.0.1".into(), port })
    }

    /// Each byte comes in time, the answer never: the time of the round counts.
    #[test]
    fn an_answer_byte_by_byte_has_an_end() {
        let (listener, address) = listen();
        let server = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            stream.write_all(b"$1000000\r\n").unwrap();
            while stream.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let mut connection = Connection::open(&address, None, WAITS).unwrap();
        let began = Instant::now();
        let why = connection.ask_one(&[b"GET", b"x"]).unwrap_err();
        let Error::Io(why) = why else { panic!("{why}") };
        assert!(matches!(why.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock));
        assert!(began.elapsed() >= WAITS.round);
        drop(connection);
        server.join().unwrap();
    }

    /// The same below TLS, where a record is not yet an answer's byte.
    #[test]
    fn a_handshake_byte_by_byte_has_an_end() {
        let (listener, address) = listen();
        let server = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            // The head of a handshake record of 16 kB.
            stream.write_all(&[22, 3, 3, 0x3f, 0xff]).unwrap();
            while stream.write_all(&[2]).is_ok() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let tls = Arc::new(config);
        let mut connection = Connection::open(&address, Some(&tls), WAITS).unwrap();
        assert!(matches!(connection.ask_one(&[b"PING"]), Err(Error::Io(_))));
        drop(connection);
        server.join().unwrap();
    }
}
