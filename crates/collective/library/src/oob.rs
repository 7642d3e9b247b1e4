//! Connections out of band: TCP to other ranks, made when first needed.
//!
//! A rank sends over connections that it opened ([`Line`]) and reads from those that others opened,
//! which the acceptor hands it when they have proved to be of the job ([`crate::acceptor`]). Over
//! them come messages behind their lengths, each with the channel that it is for, and with a MAC.
//! One thread of the communicator reads, and calls [`Attend`] when something has come, when it is
//! woken, or when time has passed; whoever drives takes what has come from the [`Inbox`]. That
//! holds [`MAX_EVENTS`]; what does not find room waits in its connection, and so, in the end, does
//! its sender.
//!
//! The end of a connection without a word of leaving is the death of its process, and so is one
//! that is refused; a network that is silent is not, unless it is for as long as operations may
//! stand still ([`Line`]).

use std::collections::VecDeque;
use std::io::Read;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use unbroken_collective_protocol::message::Message;
use unbroken_collective_protocol::Rank;

use crate::acceptor::{Arrivals, Registration};
use crate::auth::{frame, Seal};
use crate::conn::Waker;
use crate::error::{io, Result};
use crate::line::{Ends, Line, GREETING};
use crate::status::{Board, Server};

/// How long who leaves waits for what was said to leave.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(1);
/// What could not be sent may be for one who has left, whose word to that effect is under way.
const GRACE: Duration = Duration::from_millis(500);
/// A rank that ends a connection over which it has said nothing may have given it up, where this
/// one was slow to answer: until it has called again.
const CALLS_AGAIN: Duration = GREETING.saturating_mul(2);
/// The longest message.
const MAX_MESSAGE: usize = 1 << 20;
/// What an inbox holds.
const MAX_EVENTS: usize = 4096;

/// What has come.
pub(crate) enum Event {
    /// A message, for a channel.
    Told(Rank, u32, Message),
    /// A process is gone, or has sent what is no message; not before a time.
    Gone(Rank, Instant),
}

/// What has come and was not taken.
#[derive(Default)]
pub(crate) struct Inbox {
    events: Mutex<VecDeque<Event>>,
    some: AtomicBool,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, event: Event) {
        let mut events = self.lock();
        // That a rank is gone is said once, so that there are never more of these than ranks; as
        // soon as it is known, and behind what the rank has said before: that it leaves.
        let event = match event {
            Event::Gone(rank, at) => {
                let said = events
                    .iter()
                    .position(|e| matches!(e, Event::Gone(other, _) if *other == rank))
                    .and_then(|place| events.remove(place));
                match said {
                    Some(Event::Gone(_, due)) => Event::Gone(rank, at.min(due)),
                    _ => Event::Gone(rank, at),
                }
            }
            told => told,
        };
        events.push_back(event);
        self.some.store(true, Ordering::Release);
    }

    /// A rank has come that may have been taken for gone: it is not, unless that is due.
    fn is_back(&self, rank: Rank) {
        let now = Instant::now();
        self.lock().retain(|e| !matches!(e, Event::Gone(of, at) if *of == rank && *at > now));
    }

    /// Whether a message finds room. One thread alone puts messages there.
    fn has_room(&self) -> bool {
        self.lock().len() < MAX_EVENTS
    }

    /// The next, if it is due.
    pub(crate) fn take(&self) -> Option<Event> {
        if !self.some.load(Ordering::Acquire) {
            return None;
        }
        let mut events = self.lock();
        let now = Instant::now();
        let due = events.iter().position(|e| !matches!(e, Event::Gone(_, at) if *at > now))?;
        let event = events.remove(due);
        self.some.store(!events.is_empty(), Ordering::Release);
        event
    }

    fn is_empty(&self) -> bool {
        !self.some.load(Ordering::Acquire)
    }
}

/// Called by the thread: something may have come, time has passed. Gives how long it may wait for
/// more.
pub(crate) type Attend = Box<dyn Fn() -> Duration + Send>;

/// The sending side.
pub(crate) struct Oob {
    out: Vec<Line>,
    /// How long others may be silent.
    pub(crate) patience: Duration,
    pub(crate) inbox: Arc<Inbox>,
    stop: Arc<AtomicBool>,
    pub(crate) waker: Arc<Waker>,
    /// Where others call this rank, until it leaves: whoever calls later shall not take it for
    /// living.
    registration: Option<Registration>,
    thread: Option<JoinHandle<()>>,
}

impl Oob {
    /// Knows where all ranks are; connects to none. Its thread begins with [`Oob::begin`].
    pub(crate) fn new(registration: Registration, all: Vec<Ends>, patience: Duration) -> Oob {
        let (waker, registration) = (registration.arrivals.waker.clone(), Some(registration));
        let out = all.into_iter().map(Line::new).collect();
        Oob {
            out,
            patience,
            inbox: Arc::default(),
            stop: Arc::default(),
            waker,
            registration,
            thread: None,
        }
    }

    /// Starts the thread.
    pub(crate) fn begin(
        &mut self,
        status: Option<Server>,
        board: Board,
        attend: Attend,
    ) -> Result<()> {
        let Some(registration) = &self.registration else { return Ok(()) };
        let reader = Reader {
            arrivals: registration.arrivals.clone(),
            status,
            board,
            ranks: self.out.len(),
            inbox: self.inbox.clone(),
            stop: self.stop.clone(),
            callers: Vec::new(),
        };
        let thread =
            std::thread::Builder::new().name("coll-oob".into()).spawn(move || reader.run(&attend));
        self.thread = Some(thread.map_err(io("start the thread out of band"))?);
        Ok(())
    }

    /// Sends a message for a channel, now or when its receiver can be reached. What cannot be sent
    /// makes its receiver lost.
    pub(crate) fn tell(&mut self, rank: Rank, channel: u32, message: &Message) {
        let said = self.out[rank].say(frame(channel, &message.encode()), self.patience);
        self.lose_if_failed(rank, &said);
    }

    fn lose_if_failed(&mut self, rank: Rank, said: &std::io::Result<()>) {
        if said.is_err() {
            self.out[rank].close();
            self.inbox.put(Event::Gone(rank, Instant::now() + GRACE));
        }
    }

    /// Goes on with connections that are being made.
    pub(crate) fn tend(&mut self) {
        for rank in 0..self.out.len() {
            let said = self.out[rank].tend(self.patience);
            self.lose_if_failed(rank, &said);
        }
    }

    /// Whether connections are being made.
    pub(crate) fn is_connecting(&self) -> bool {
        self.out.iter().any(Line::is_connecting)
    }

    /// Ranks that this one speaks to.
    pub(crate) fn connected(&self) -> Vec<Rank> {
        (0..self.out.len()).filter(|rank| self.out[*rank].is_used()).collect()
    }

    /// What was said leaves before this rank does, if it can.
    pub(crate) fn flush(&mut self) {
        let began = Instant::now();
        self.tend();
        while self.is_connecting() && began.elapsed() < LAST_WORDS {
            std::thread::sleep(LOOK);
            self.tend();
        }
    }

    /// Tells the thread to end.
    pub(crate) fn stop(&mut self) -> Ending {
        self.stop.store(true, Ordering::Release);
        Ending {
            waker: self.waker.clone(),
            thread: self.thread.take(),
            _chair: self.registration.take(),
        }
    }
}

/// A thread that is to end.
pub(crate) struct Ending {
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
    _chair: Option<Registration>,
}

impl Ending {
    /// Waits for it. The communicator must not be locked.
    pub(crate) fn end(self) {
        self.waker.wake();
        if let Some(thread) = self.thread {
            // It has nothing to say.
            let _ = thread.join();
        }
    }
}

/// A connection that others send over.
struct Caller {
    stream: TcpStream,
    rank: Rank,
    seal: Seal,
    bytes: Vec<u8>,
    /// A message has come over it.
    has_spoken: bool,
    /// Whole messages may be among the bytes, for which there was no room.
    waits: bool,
}

struct Reader {
    arrivals: Arc<Arrivals>,
    status: Option<Server>,
    board: Board,
    ranks: usize,
    inbox: Arc<Inbox>,
    stop: Arc<AtomicBool>,
    callers: Vec<Caller>,
}

impl Reader {
    fn run(mut self, attend: &Attend) {
        let mut wait = Duration::ZERO;
        while !self.stop.load(Ordering::Acquire) {
            let readable = self.wait(wait);
            self.arrivals.waker.clear();
            if let Some(status) = &mut self.status {
                status.answer();
            }
            for k in (0..self.callers.len()).rev() {
                let due = readable.get(k) == Some(&true) || self.callers[k].waits;
                if due && !self.read(k) {
                    let Caller { rank, has_spoken, .. } = self.callers.swap_remove(k);
                    // Who has waited too long for its welcome calls again, and has said nothing.
                    let grace = if has_spoken { Duration::ZERO } else { CALLS_AGAIN };
                    if has_spoken || self.callers.iter().all(|other| other.rank != rank) {
                        self.inbox.put(Event::Gone(rank, Instant::now() + grace));
                    }
                }
            }
            // Behind the callers, whose positions were those of what could be read.
            self.welcome();
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            wait = attend();
            if !self.inbox.is_empty() {
                // Somebody else drives, and takes it; or has just ended, and does not.
                wait = wait.min(Duration::from_millis(1));
            }
        }
    }

    /// Waits until something can be read or it is woken. Which callers can be read; none while
    /// there is no room.
    fn wait(&self, most: Duration) -> Vec<bool> {
        let callers = if self.inbox.has_room() { &self.callers[..] } else { &[] };
        let mut fds: Vec<_> =
            callers.iter().map(|c| PollFd::new(&c.stream, PollFlags::IN)).collect();
        fds.push(PollFd::new(&self.arrivals.waker.0, PollFlags::IN));
        let asks = self.status.as_ref().and_then(Server::listens);
        fds.extend(asks.iter().map(|listener| PollFd::new(*listener, PollFlags::IN)));
        let timeout =
            Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
        if poll(&mut fds, Some(&timeout)).is_err() {
            // interrupted
            return Vec::new();
        }
        fds[..callers.len()].iter().map(|fd| !fd.revents().is_empty()).collect()
    }

    /// Takes those who have come.
    fn welcome(&mut self) {
        for arrival in self.arrivals.take().into_iter().filter(|arrival| arrival.rank < self.ranks)
        {
            let (stream, rank, seal) = (arrival.stream, arrival.rank, arrival.seals.other);
            // It may have said something already.
            self.inbox.is_back(rank);
            self.callers.push(Caller {
                stream,
                rank,
                seal,
                bytes: Vec::new(),
                has_spoken: false,
                waits: false,
            });
        }
        if let Some(what) = self.arrivals.trouble() {
            self.board.happened(what);
        }
    }

    /// Reads what is there, as far as there is room for it. `false`: it has ended, or is no rank's.
    fn read(&mut self, k: usize) -> bool {
        let mut buffer = [0; 16384];
        loop {
            if !self.digest(k) {
                return false;
            }
            let caller = &mut self.callers[k];
            if caller.waits {
                return true;
            }
            match caller.stream.read(&mut buffer) {
                Ok(0) => return false,
                Ok(n) => caller.bytes.extend(&buffer[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return true,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }

    /// Takes whole messages from what a caller has sent. `false`: what it sends is no message, or
    /// another's.
    fn digest(&mut self, k: usize) -> bool {
        let Caller { rank, seal, bytes, waits, has_spoken, .. } = &mut self.callers[k];
        let mut at = 0;
        *waits = false;
        loop {
            *waits = !self.inbox.has_room();
            if *waits {
                break;
            }
            let (channel, content, len) = match seal.open(&bytes[at..], MAX_MESSAGE) {
                Ok(Some(heard)) => heard,
                Ok(None) => break,
                Err(_) => return false,
            };
            let Some(message) = Message::decode(content) else { return false };
            *has_spoken = true;
            self.inbox.put(Event::Told(*rank, channel, message));
            at += len;
        }
        bytes.drain(..at);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acceptor::register;

    /// A rank that hears, and one that tells.
    fn pair() -> (Oob, Oob) {
        let secret = [7; 16];
        let registrations = [0, 1].map(|_| register([127, 0, 0, 1].into(), secret).unwrap());
        let known = [0, 1].map(|k: usize| (registrations[k].address(), registrations[k].name));
        let ends = |me| known.map(|(to, service)| Ends { to, service, me, secret }).to_vec();
        let [zero, one] = registrations;
        let patience = Duration::from_secs(20);
        (Oob::new(zero, ends(0), patience), Oob::new(one, ends(1), patience))
    }

    fn news(done: u64) -> Message {
        Message::News(unbroken_collective_protocol::message::News::Left { rank: 1, done })
    }

    #[test]
    fn an_inbox_that_nobody_empties_has_a_bound_and_nothing_is_lost() {
        let (mut hears, mut tells) = pair();
        hears
            .begin(None, Board::new(0, &[0, 1], 1), Box::new(|| Duration::from_millis(1)))
            .unwrap();
        let all = 3 * MAX_EVENTS as u64;
        for k in 0..all {
            tells.tell(0, k as u32, &news(k));
        }
        let began = Instant::now();
        while tells.is_connecting() && began.elapsed() < Duration::from_secs(20) {
            tells.tend();
        }
        while hears.inbox.has_room() && began.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        // Time for more to come, if more would.
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(hears.inbox.lock().len(), MAX_EVENTS);
        let mut next = 0;
        while next < all && began.elapsed() < Duration::from_secs(40) {
            match hears.inbox.take() {
                Some(Event::Told(1, channel, message)) => {
                    assert_eq!((u64::from(channel), message), (next, news(next)));
                    next += 1;
                }
                Some(_) => panic!("no other rank tells anything, and none is gone"),
                None => std::thread::yield_now(),
            }
        }
        assert_eq!(next, all);
        hears.stop().end();
    }

    #[test]
    fn that_a_rank_is_gone_waits_once() {
        let inbox = Inbox::default();
        (0..9).for_each(|k| inbox.put(Event::Gone(k % 3, Instant::now())));
        assert_eq!(inbox.lock().len(), 3);
    }

    /// It cannot be told anything any more, and has said why: that is heard first.
    #[test]
    fn the_last_word_of_a_rank_comes_before_its_end() {
        let inbox = Inbox::default();
        inbox.put(Event::Gone(1, Instant::now() + Duration::from_secs(60)));
        inbox.put(Event::Told(1, 0, news(1)));
        inbox.put(Event::Gone(1, Instant::now()));
        assert!(matches!(inbox.take(), Some(Event::Told(1, ..))));
        assert!(matches!(inbox.take(), Some(Event::Gone(1, _))));
        assert!(inbox.take().is_none());
    }

    /// A connection of rank 1 to an `Arrivals`, over which nothing is said.
    fn call(hears: &Oob) -> TcpStream {
        use crate::auth::{Called, Caller};
        let registration = hears.registration.as_ref().unwrap();
        let secret = [7; 16];
        let called = Called::new().unwrap();
        let mut caller = Caller::new(secret, registration.name, 1).unwrap();
        let said = caller.introduction(called.greeting()).unwrap();
        let introduction = called.introduction(&said).unwrap();
        let (_, seals) = introduction.admit(&secret).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        theirs.set_nonblocking(true).unwrap();
        registration.arrivals.put(crate::acceptor::Arrival {
            stream: theirs,
            rank: 1,
            seals: Box::new(seals),
        });
        stream
    }

    /// A rank that has waited too long for its welcome gives the connection up and calls again. It
    /// is not gone; but if it does not call again it is.
    #[test]
    fn a_connection_that_is_given_up_is_no_death() {
        let (mut hears, mut tells) = pair();
        hears
            .begin(None, Board::new(0, &[0, 1], 1), Box::new(|| Duration::from_millis(1)))
            .unwrap();
        let until = |over: &dyn Fn() -> bool| {
            let began = Instant::now();
            while !over() {
                assert!(began.elapsed() < Duration::from_secs(20), "nothing has come");
                std::thread::yield_now();
            }
        };
        let is_gone = || hears.inbox.lock().iter().any(|event| matches!(event, Event::Gone(1, _)));
        drop(call(&hears));
        until(&is_gone);
        assert!(hears.inbox.take().is_none(), "not yet");
        tells.tell(0, 0, &news(1));
        let began = Instant::now();
        while tells.is_connecting() && began.elapsed() < Duration::from_secs(20) {
            tells.tend();
        }
        until(&|| !is_gone());
        until(&|| matches!(hears.inbox.take(), Some(Event::Told(1, ..))));
        // Nor is the rank gone where it has called again before.
        drop(call(&hears));
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(50) {
            assert!(!is_gone());
            std::thread::yield_now();
        }
        // One that has spoken is gone at once.
        tells.out[0].close();
        until(&|| matches!(hears.inbox.take(), Some(Event::Gone(1, _))));
        hears.stop().end();
    }

    /// Operations may be kept that outlive their communicator, and with them what it consists of.
    #[test]
    fn who_has_ended_is_not_reached() {
        let (mut hears, mut tells) = pair();
        hears
            .begin(None, Board::new(0, &[0, 1], 1), Box::new(|| Duration::from_millis(1)))
            .unwrap();
        hears.stop().end();
        tells.tell(0, 0, &news(1));
        let began = Instant::now();
        let gone = |tells: &Oob| matches!(tells.inbox.take(), Some(Event::Gone(0, _)));
        while !gone(&tells) && began.elapsed() < Duration::from_secs(10) {
            tells.tend();
        }
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    }
}
