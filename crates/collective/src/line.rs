//! A connection to another rank, over which this one speaks. It is made when there is something to say, and nobody waits for it: what is said
//! meanwhile is kept, and goes when it is there.
//!
//! A network that is silent is not the death of a process: an attempt without an answer is followed by the next, as long as operations may stand
//! still. One that is refused is an error at once.

use std::io::{Error, ErrorKind, Result, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::{connect, socket_with, sockopt, AddressFamily, SocketFlags, SocketType};

/// How long an attempt to connect waits for an answer. The kernel's own second attempt comes after a second, the next ones later and later.
const ATTEMPT: Duration = Duration::from_millis(500);
/// How long sending may take, where the connection is there and full.
const SENDING: Duration = Duration::from_secs(2);
/// How long to wait after an attempt that failed at once.
const PAUSE: Duration = Duration::from_millis(50);
/// What is kept until the connection is there.
const MAX_UNSAID: usize = 1 << 20;

pub(crate) struct Line {
    to: SocketAddr,
    state: State,
}

enum State {
    Idle,
    Connecting { attempt: Option<TcpStream>, tried: Instant, since: Instant, unsaid: Vec<u8> },
    Open(TcpStream),
}

impl Line {
    /// To this address; not connected.
    pub(crate) fn new(to: SocketAddr) -> Line {
        Line { to, state: State::Idle }
    }

    /// Whether anything was said, and no error came of it.
    pub(crate) fn is_used(&self) -> bool {
        !matches!(self.state, State::Idle)
    }

    /// Whether something is kept that was not sent.
    pub(crate) fn is_connecting(&self) -> bool {
        matches!(self.state, State::Connecting { .. })
    }

    /// Says something; `hello` before it if it is the first.
    pub(crate) fn say(&mut self, hello: impl FnOnce() -> Vec<u8>, bytes: &[u8], patience: Duration) -> Result<()> {
        match &mut self.state {
            State::Open(stream) => return stream.write_all(bytes),
            State::Connecting { unsaid, .. } if unsaid.len() + bytes.len() > MAX_UNSAID => {
                return Err(ErrorKind::OutOfMemory.into());
            }
            State::Connecting { unsaid, .. } => unsaid.extend(bytes),
            State::Idle => {
                let (attempt, now) = (begin(self.to)?, Instant::now());
                let unsaid = [&hello(), bytes].concat();
                self.state = State::Connecting { attempt, tried: now, since: now, unsaid };
            }
        }
        self.tend(patience)
    }

    /// Goes on with connecting: sends what was kept once the connection is there, tries again after a time without an answer, gives up after `patience`.
    pub(crate) fn tend(&mut self, patience: Duration) -> Result<()> {
        let State::Connecting { attempt, tried, since, unsaid } = &mut self.state else { return Ok(()) };
        if let Some(stream) = attempt.take_if(|stream| has_answer(stream)) {
            match sockopt::socket_error(&stream)?.map_err(Error::from) {
                Ok(()) => {
                    stream.set_nonblocking(false)?;
                    stream.set_nodelay(true)?;
                    stream.set_write_timeout(Some(SENDING))?;
                    (&stream).write_all(unsaid)?;
                    self.state = State::Open(stream);
                    return Ok(());
                }
                Err(error) if is_silence(&error) => {}
                Err(error) => return Err(error),
            }
        }
        if since.elapsed() > patience {
            return Err(ErrorKind::TimedOut.into());
        }
        if tried.elapsed() > ATTEMPT {
            (*attempt, *tried) = (begin(self.to)?, Instant::now());
        }
        Ok(())
    }

    /// Forgets the connection.
    pub(crate) fn close(&mut self) {
        self.state = State::Idle;
    }
}

/// Connects, and waits for that; a network that is silent is tried again until `patience` is over.
pub(crate) fn reach(to: SocketAddr, patience: Duration) -> Result<TcpStream> {
    let began = Instant::now();
    loop {
        let left = patience.saturating_sub(began.elapsed());
        match TcpStream::connect_timeout(&to, left.clamp(PAUSE, ATTEMPT)) {
            Err(error) if is_silence(&error) && left > PAUSE => std::thread::sleep(PAUSE),
            answer => return answer,
        }
    }
}

/// Begins to connect. `None`: there is no way there now.
fn begin(to: SocketAddr) -> Result<Option<TcpStream>> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)?;
    match connect(&socket, &to).map_err(Error::from) {
        Err(error) if is_silence(&error) => Ok(None),
        Err(error) if error.raw_os_error() != Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => Err(error),
        _ => Ok(Some(socket.into())),
    }
}

/// Whether connecting has come to an end.
fn has_answer(stream: &TcpStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::OUT)];
    matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}

/// Whether an error says no more than that nothing comes back.
fn is_silence(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{Ipv4Addr, TcpListener};

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A socket whose queue is full: it answers nobody until what is in it was taken.
    fn silent() -> (TcpListener, SocketAddr, TcpStream) {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let listener = TcpListener::from(socket);
        let at = listener.local_addr().unwrap();
        (listener, at, TcpStream::connect(at).unwrap())
    }

    #[test]
    fn what_is_said_while_nobody_answers_comes_when_somebody_does() {
        let (listener, at, full) = silent();
        let mut line = Line::new(at);
        line.say(|| b"hello ".to_vec(), b"a", PATIENCE).unwrap();
        // Long enough that attempts are given up, and that a silence is no death.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(2500) {
            line.tend(PATIENCE).unwrap();
            assert!(line.is_connecting(), "nobody has answered");
            std::thread::sleep(Duration::from_millis(5));
        }
        line.say(|| unreachable!("it was said"), b"b", PATIENCE).unwrap();
        drop(full);
        listener.accept().unwrap();
        while line.is_connecting() && began.elapsed() < PATIENCE {
            line.tend(PATIENCE).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut heard = [0; 8];
        listener.accept().unwrap().0.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"hello ab");
    }

    #[test]
    fn who_waits_for_a_connection_outlives_attempts_without_an_answer() {
        let (listener, at, full) = silent();
        let began = Instant::now();
        let answers = std::thread::spawn(move || {
            std::thread::sleep(3 * ATTEMPT / 2);
            drop(full);
            [listener.accept().unwrap(), listener.accept().unwrap()]
        });
        let stream = reach(at, PATIENCE).unwrap();
        assert!(began.elapsed() > ATTEMPT && stream.peer_addr().unwrap() == at);
        let [_, (heard, _)] = answers.join().unwrap();
        assert_eq!(heard.peer_addr().unwrap(), stream.local_addr().unwrap());
        let (_listener, at, _full) = silent();
        assert_eq!(reach(at, Duration::from_millis(100)).unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(reach(gone(), PATIENCE).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }

    /// An address at which nobody listens.
    fn gone() -> SocketAddr {
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
    }

    #[test]
    fn who_is_not_there_is_an_error_at_once_and_who_is_silent_after_a_time() {
        let mut line = Line::new(gone());
        assert_eq!(line.say(Vec::new, b"a", PATIENCE).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let (_listener, at, _full) = silent();
        let (mut line, began, patience) = (Line::new(at), Instant::now(), Duration::from_millis(700));
        let mut said = line.say(Vec::new, b"a", patience);
        while said.is_ok() && began.elapsed() < PATIENCE {
            said = line.tend(patience);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(said.unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(began.elapsed() > patience);
    }
}
