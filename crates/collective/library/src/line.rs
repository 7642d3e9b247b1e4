//! A connection to another rank, over which this one speaks. It is made when there is something to
//! say, and nobody waits for it: what is said meanwhile is kept, and goes when both ends have
//! proved that they know the job's secret ([`crate::auth`]).
//!
//! A network that is silent is not the death of a process: an attempt without an answer is followed
//! by the next, as long as operations may stand still. One that is refused is an error at once; one
//! that the other end closes before its verdict found no room there, and is made again.

use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{connect, socket_with, sockopt, AddressFamily, SocketFlags, SocketType};

use crate::auth::{Caller, Denied, Seal, Secret, ServiceName, GREETING_BYTES, VERDICT_BYTES};
use crate::conn::Conn;

/// How long an attempt to connect waits for an answer. The kernel's own second attempt comes after
/// a second, the next ones later and later.
const ATTEMPT: Duration = Duration::from_millis(500);
/// How long one that is connected waits for the other end's greeting and verdict.
pub(crate) const GREETING: Duration = Duration::from_secs(5);
/// How long to wait after an attempt that failed at once.
const PAUSE: Duration = Duration::from_millis(50);
/// What is kept until it can be sent.
const MAX_UNSAID: usize = 1 << 20;

/// Whom a line leads to, and who speaks over it.
#[derive(Clone, Copy)]
pub(crate) struct Ends {
    pub(crate) to: SocketAddr,
    pub(crate) service: ServiceName,
    pub(crate) me: usize,
    pub(crate) secret: Secret,
}

pub(crate) struct Line {
    ends: Ends,
    state: State,
    /// Messages that wait for the connection.
    unsaid: Vec<Vec<u8>>,
    unsaid_bytes: usize,
}

enum State {
    Idle,
    Making {
        way: Way,
        tried: Instant,
        since: Instant,
    },
    /// Since when the network has taken nothing of what is to leave.
    Open {
        conn: Conn,
        seal: Seal,
        stuck: Option<Instant>,
    },
}

/// How far an attempt has come.
enum Way {
    /// There is none, for a moment.
    Pause,
    Connecting(TcpStream),
    Greeting {
        conn: Conn,
        caller: Caller,
        introduced: bool,
    },
}

/// What came of looking at an attempt.
enum Look {
    Goes(Way),
    Made(Conn, Seal),
    /// Another may do better.
    Failed,
}

impl Line {
    /// Not connected.
    pub(crate) fn new(ends: Ends) -> Line {
        Line { ends, state: State::Idle, unsaid: Vec::new(), unsaid_bytes: 0 }
    }

    /// Whether anything was said, and no error came of it.
    pub(crate) fn is_used(&self) -> bool {
        !matches!(self.state, State::Idle)
    }

    /// Whether something is kept that was not sent.
    pub(crate) fn is_connecting(&self) -> bool {
        match &self.state {
            State::Idle => false,
            State::Making { .. } => true,
            State::Open { conn, .. } => conn.unsent() > 0,
        }
    }

    /// Says a framed message.
    pub(crate) fn say(&mut self, framed: Vec<u8>, patience: Duration) -> Result<()> {
        let kept = match &self.state {
            State::Open { conn, .. } => conn.unsent(),
            _ => self.unsaid_bytes,
        };
        if kept + framed.len() > MAX_UNSAID {
            return Err(ErrorKind::OutOfMemory.into());
        }
        self.unsaid_bytes += framed.len();
        self.unsaid.push(framed);
        if matches!(self.state, State::Idle) {
            let now = Instant::now();
            self.state = State::Making { way: begin(self.ends.to)?, tried: now, since: now };
        }
        self.tend(patience)
    }

    /// Goes on with connecting, and sends what was kept once the connection is there; tries again
    /// after a time without an answer, gives up after `patience`.
    pub(crate) fn tend(&mut self, patience: Duration) -> Result<()> {
        if let State::Making { way, tried, since } = &mut self.state {
            match look(std::mem::replace(way, Way::Pause), &self.ends)? {
                Look::Made(conn, seal) => self.state = State::Open { conn, seal, stuck: None },
                Look::Goes(next) => {
                    let longest = match next {
                        Way::Greeting { .. } => GREETING,
                        Way::Connecting(_) => ATTEMPT,
                        Way::Pause => PAUSE,
                    };
                    *way = next;
                    if since.elapsed() > patience {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    if tried.elapsed() > longest {
                        (*way, *tried) = (begin(self.ends.to)?, Instant::now());
                    }
                    return Ok(());
                }
                Look::Failed => {
                    *tried = Instant::now();
                    return Ok(());
                }
            }
        }
        self.send(patience)
    }

    /// Sends what the network takes. What it takes nothing of for `patience` is an error.
    fn send(&mut self, patience: Duration) -> Result<()> {
        let State::Open { conn, seal, stuck } = &mut self.state else { return Ok(()) };
        for framed in self.unsaid.drain(..) {
            let from = conn.output().len();
            conn.output().extend(framed);
            seal.close(conn.output(), from);
        }
        self.unsaid_bytes = 0;
        if conn.unsent() == 0 {
            return Ok(());
        }
        if conn.flush()? || conn.unsent() == 0 {
            *stuck = None;
        }
        match conn.unsent() > 0 && stuck.get_or_insert_with(Instant::now).elapsed() > patience {
            true => Err(ErrorKind::TimedOut.into()),
            false => Ok(()),
        }
    }

    /// Forgets the connection.
    pub(crate) fn close(&mut self) {
        self.state = State::Idle;
        self.unsaid.clear();
        self.unsaid_bytes = 0;
    }
}

/// Goes on with an attempt, as far as that can be done now.
fn look(way: Way, ends: &Ends) -> Result<Look> {
    match way {
        Way::Pause => Ok(Look::Goes(Way::Pause)),
        Way::Connecting(stream) if !has_answer(&stream) => Ok(Look::Goes(Way::Connecting(stream))),
        Way::Connecting(stream) => match sockopt::socket_error(&stream)?.map_err(Error::from) {
            Ok(()) => {
                let caller = Caller::new(ends.secret, ends.service, ends.me)
                    .map_err(|_| ErrorKind::Other)?;
                let conn = Conn::new(stream)?;
                look(Way::Greeting { conn, caller, introduced: false }, ends)
            }
            Err(error) if is_silence(&error) => Ok(Look::Failed),
            Err(error) => Err(error),
        },
        Way::Greeting { mut conn, mut caller, mut introduced } => {
            let most = if introduced { VERDICT_BYTES } else { GREETING_BYTES };
            let lives = conn.read(most).unwrap_or(false);
            if let Some(heard) = conn.take(most) {
                if introduced {
                    let seals = caller.hear(&heard).map_err(denied)?;
                    return Ok(Look::Made(conn, seals.own));
                }
                let introduction = caller.introduction(&heard).map_err(denied)?;
                conn.output().extend(introduction);
                introduced = true;
            } else if !lives {
                return Ok(Look::Failed);
            }
            match conn.flush() {
                Ok(_) => Ok(Look::Goes(Way::Greeting { conn, caller, introduced })),
                Err(_) => Ok(Look::Failed),
            }
        }
    }
}

/// Somebody else is there, or the rank has left.
fn denied(_: Denied) -> Error {
    ErrorKind::ConnectionRefused.into()
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

/// Begins to connect, unless there is no way there now.
fn begin(to: SocketAddr) -> Result<Way> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = match socket_with(family, SocketType::STREAM, flags, None) {
        // No descriptor is left here, which says nothing of the other end.
        Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => return Ok(Way::Pause),
        socket => socket?,
    };
    match connect(&socket, &to).map_err(Error::from) {
        Err(error) if is_silence(&error) => Ok(Way::Pause),
        Err(error) if error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(error),
        _ => Ok(Way::Connecting(socket.into())),
    }
}

/// Whether connecting has come to an end.
fn has_answer(stream: &TcpStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::OUT)];
    matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}

/// Whether an error says no more than that nothing comes back.
fn is_silence(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::{frame, refusal, Called, Seals, HEAD_BYTES, INTRODUCTION_BYTES, TAG_BYTES};
    use std::io::{Read, Write};
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

    fn line(to: SocketAddr) -> Line {
        Line::new(Ends { to, service: [1; 16], me: 3, secret: [7; 16] })
    }

    fn until(line: &mut Line, patience: Duration, over: impl Fn(&Line) -> bool) -> Result<()> {
        let began = Instant::now();
        while !over(line) && began.elapsed() < PATIENCE {
            line.tend(patience)?;
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Greets who calls, checks the introduction, and gives what it says.
    fn answers(mut stream: TcpStream, secret: [u8; 16]) -> (TcpStream, Option<Seals>) {
        let (called, mut introduction) = (Called::new().unwrap(), [0; INTRODUCTION_BYTES]);
        stream.write_all(called.greeting()).unwrap();
        stream.read_exact(&mut introduction).unwrap();
        let introduction = called.introduction(&introduction).unwrap();
        assert_eq!((introduction.service, introduction.rank), ([1; 16], 3));
        let Some((verdict, seals)) = introduction.admit(&secret) else {
            stream.write_all(&refusal()).unwrap();
            return (stream, None);
        };
        stream.write_all(&verdict).unwrap();
        (stream, Some(seals))
    }

    fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        (listener, at)
    }

    #[test]
    fn what_is_said_while_nobody_answers_comes_when_somebody_does() {
        let (listener, at, full) = silent();
        let mut line = line(at);
        line.say(frame(0, b"a"), PATIENCE).unwrap();
        // Long enough that attempts are given up, and that a silence is no death.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(2500) {
            line.tend(PATIENCE).unwrap();
            assert!(line.is_connecting(), "nobody has answered");
            std::thread::sleep(Duration::from_millis(5));
        }
        line.say(frame(1, b"b"), PATIENCE).unwrap();
        drop(full);
        let heard = std::thread::spawn(move || {
            listener.accept().unwrap();
            let (mut stream, seals) = answers(listener.accept().unwrap().0, [7; 16]);
            let (mut seal, mut bytes) =
                (seals.unwrap().other, vec![0; 2 * (HEAD_BYTES + 1 + TAG_BYTES)]);
            stream.read_exact(&mut bytes).unwrap();
            let (_, first, at) = seal.open(&bytes, 9).unwrap().unwrap();
            let (_, second, _) = seal.open(&bytes[at..], 9).unwrap().unwrap();
            [first, second].concat()
        });
        until(&mut line, PATIENCE, |line| !line.is_connecting()).unwrap();
        assert_eq!(heard.join().unwrap(), b"ab");
    }

    /// Who is closed upon before the verdict was one too many there; who is refused is not wanted.
    #[test]
    fn a_connection_that_finds_no_room_is_made_again_and_one_that_is_refused_is_not() {
        let (listener, at) = listener();
        let heard = std::thread::spawn(move || {
            drop(listener.accept().unwrap());
            let admitted = answers(listener.accept().unwrap().0, [7; 16]).1.is_some();
            let refused = answers(listener.accept().unwrap().0, [8; 16]).1.is_none();
            admitted && refused
        });
        let mut well = line(at);
        well.say(frame(0, b"a"), PATIENCE).unwrap();
        until(&mut well, PATIENCE, |line| !line.is_connecting()).unwrap();
        let mut stranger = line(at);
        let said = stranger.say(frame(0, b"a"), PATIENCE);
        let error = said.and_then(|()| until(&mut stranger, PATIENCE, |_| false)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        assert!(heard.join().unwrap());
    }

    /// A receiver that takes nothing holds up nobody, and what is kept for it has a bound.
    #[test]
    fn who_takes_nothing_is_given_up_and_never_waited_for() {
        let (listener, at) = listener();
        let heard = std::thread::spawn(move || answers(listener.accept().unwrap().0, [7; 16]));
        let mut line = line(at);
        line.say(frame(0, b""), PATIENCE).unwrap();
        until(&mut line, PATIENCE, |line| !line.is_connecting()).unwrap();
        let _open = heard.join().unwrap();
        let (content, mut said) = (vec![0; 100_000], 0);
        let error = loop {
            let began = Instant::now();
            match line.say(frame(0, &content), PATIENCE) {
                Ok(()) => said += content.len(),
                Err(error) => break error,
            }
            assert!(
                said < 100 << 20 && began.elapsed() < Duration::from_secs(1),
                "{said} bytes, {:?}",
                began.elapsed()
            );
        };
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        let error = until(&mut line, Duration::from_millis(100), |_| false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
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
        let mut refused = line(gone());
        assert_eq!(
            refused.say(frame(0, b"a"), PATIENCE).unwrap_err().kind(),
            ErrorKind::ConnectionRefused
        );
        let (_listener, at, _full) = silent();
        let (mut line, began, patience) = (line(at), Instant::now(), Duration::from_millis(700));
        let mut said = line.say(frame(0, b"a"), patience);
        while said.is_ok() && began.elapsed() < PATIENCE {
            said = line.tend(patience);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(said.unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(began.elapsed() > patience);
    }
}
