//! Connections out of band: TCP to other ranks, made when first needed.
//!
//! A rank sends over connections that it opened and reads from those that it accepted. Each begins with the job's secret and the sender's rank; then come
//! messages behind their lengths, each with the channel that it is for. One thread of the communicator accepts and reads, and calls [`Attend`] when
//! something has come, when it is woken, or when time has passed; whoever drives takes what has come from the [`Inbox`]. That holds
//! [`MAX_EVENTS`]; what does not find room waits in its connection, and so, in the end, does its sender.
//!
//! The end of a connection without a word of leaving is the death of its process, and so is one that is refused; a network that is silent is not, unless it
//! is for as long as operations may stand still ([`Line`]).

use std::collections::VecDeque;
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};
use unbroken_comm::message::Message;
use unbroken_comm::Rank;

use crate::bootstrap::SECRET_BYTES;
use crate::error::{io, Result};
use crate::line::Line;
use crate::status::Server;

/// How long who leaves waits for connections that are being made.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(1);
/// What could not be sent may be for one who has left, whose word to that effect is under way.
const GRACE: Duration = Duration::from_millis(500);
/// The longest message.
const MAX_MESSAGE: usize = 1 << 20;
/// Before a message: its length and its channel.
const HEAD_BYTES: usize = 8;
/// What an inbox holds.
const MAX_EVENTS: usize = 4096;
/// Connections that wait to say who they are.
const MAX_STRANGERS: usize = 256;

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
        // That a rank is gone is said once; so there are never more of these than ranks.
        let said = |rank: Rank| events.iter().any(|e| matches!(e, Event::Gone(other, _) if *other == rank));
        if !matches!(event, Event::Gone(rank, _) if said(rank)) {
            events.push_back(event);
        }
        self.some.store(true, Ordering::Release);
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

/// Called by the thread: something may have come, time has passed. Gives how long it may wait for more.
pub(crate) type Attend = Box<dyn Fn() -> Duration + Send>;

/// Wakes the thread.
pub(crate) struct Waker(OwnedFd);

impl Waker {
    fn new() -> Result<Waker> {
        let made = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        made.map(Waker).map_err(|e| io("an event for the thread out of band")(e.into()))
    }

    pub(crate) fn wake(&self) {
        // It is full: the thread is being woken.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn clear(&self) {
        // Empty: nobody has woken it.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// The sending side.
pub(crate) struct Oob {
    me: Rank,
    secret: [u8; SECRET_BYTES],
    out: Vec<Line>,
    /// How long others may be silent.
    patience: Duration,
    pub(crate) inbox: Arc<Inbox>,
    stop: Arc<AtomicBool>,
    pub(crate) waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

/// A socket on which others will connect.
pub(crate) fn listen(at: IpAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind((at, 0)).map_err(io(format!("listen at {at}")))?;
    listener.set_nonblocking(true).map_err(io("a socket out of band"))?;
    Ok(listener)
}

impl Oob {
    /// Knows where all ranks are; connects to none. Its thread begins with [`Oob::begin`].
    pub(crate) fn new(
        me: Rank,
        secret: [u8; SECRET_BYTES],
        addresses: &[SocketAddr],
        patience: Duration,
    ) -> Result<Oob> {
        Ok(Oob {
            me,
            secret,
            out: addresses.iter().map(|to| Line::new(*to)).collect(),
            patience,
            inbox: Arc::default(),
            stop: Arc::default(),
            waker: Arc::new(Waker::new()?),
            thread: None,
        })
    }

    /// Starts the thread.
    pub(crate) fn begin(&mut self, listener: TcpListener, status: Option<Server>, attend: Attend) -> Result<()> {
        let reader = Reader {
            listener,
            status,
            secret: self.secret,
            ranks: self.out.len(),
            inbox: self.inbox.clone(),
            stop: self.stop.clone(),
            waker: self.waker.clone(),
            callers: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("coll-oob".into()).spawn(move || reader.run(&attend));
        self.thread = Some(thread.map_err(io("start the thread out of band"))?);
        Ok(())
    }

    /// Sends a message for a channel, now or when its receiver can be reached. What cannot be sent makes its receiver lost.
    pub(crate) fn tell(&mut self, rank: Rank, channel: u32, message: &Message) {
        let bytes = message.encode();
        let mut framed = (bytes.len() as u32).to_le_bytes().to_vec();
        framed.extend(channel.to_le_bytes());
        framed.extend(bytes);
        let hello = || [&self.secret[..], &(self.me as u32).to_le_bytes()].concat();
        let said = self.out[rank].say(hello, &framed, self.patience);
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
        Ending { waker: self.waker.clone(), thread: self.thread.take() }
    }
}

/// A thread that is to end.
pub(crate) struct Ending {
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
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
    rank: Option<Rank>,
    bytes: Vec<u8>,
    /// Whole messages may be among the bytes, for which there was no room.
    waits: bool,
}

struct Reader {
    listener: TcpListener,
    status: Option<Server>,
    secret: [u8; SECRET_BYTES],
    ranks: usize,
    inbox: Arc<Inbox>,
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    callers: Vec<Caller>,
}

impl Reader {
    fn run(mut self, attend: &Attend) {
        let mut wait = Duration::ZERO;
        while !self.stop.load(Ordering::Acquire) {
            let (knocks, readable) = self.wait(wait);
            self.waker.clear();
            if let Some(status) = &self.status {
                status.answer();
            }
            for k in (0..self.callers.len()).rev() {
                let due = readable.get(k) == Some(&true) || self.callers[k].waits;
                if due && !self.read(k) {
                    if let Some(rank) = self.callers.swap_remove(k).rank {
                        self.inbox.put(Event::Gone(rank, Instant::now()));
                    }
                }
            }
            // Behind the callers, whose positions were those of what could be read.
            if knocks {
                self.accept();
            }
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

    /// Waits until something can be read or it is woken. Whether somebody wants to connect, and which callers can be read; none while there is no room.
    fn wait(&self, most: Duration) -> (bool, Vec<bool>) {
        let callers = if self.inbox.has_room() { &self.callers[..] } else { &[] };
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(callers.iter().map(|c| PollFd::new(&c.stream, PollFlags::IN)));
        fds.push(PollFd::new(&self.waker.0, PollFlags::IN));
        fds.extend(self.status.iter().map(|status| PollFd::new(&status.listener, PollFlags::IN)));
        let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
        if poll(&mut fds, Some(&timeout)).is_err() {
            // interrupted
            return (false, Vec::new());
        }
        let some = |fd: &PollFd<'_>| !fd.revents().is_empty();
        (some(&fds[0]), fds[1..=callers.len()].iter().map(some).collect())
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            let strangers = self.callers.iter().filter(|c| c.rank.is_none()).count();
            if strangers < MAX_STRANGERS && stream.set_nonblocking(true).is_ok() {
                self.callers.push(Caller { stream, rank: None, bytes: Vec::new(), waits: false });
            }
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

    /// Takes whole messages from what a caller has sent. `false`: it is no rank, or what it sends is no message.
    fn digest(&mut self, k: usize) -> bool {
        let caller = &mut self.callers[k];
        let mut at = 0;
        if caller.rank.is_none() {
            let Some((hello, _)) = caller.bytes.split_at_checked(SECRET_BYTES + 4) else { return true };
            let (secret, rank) = hello.split_at(SECRET_BYTES);
            let rank = number(rank) as usize;
            if secret != self.secret || rank >= self.ranks {
                return false;
            }
            caller.rank = Some(rank);
            at = SECRET_BYTES + 4;
        }
        let rank = caller.rank.unwrap_or_default();
        caller.waits = false;
        while let Some(head) = caller.bytes.get(at..at + HEAD_BYTES) {
            let (len, channel) = (number(&head[..4]) as usize, number(&head[4..]));
            if len > MAX_MESSAGE {
                return false;
            }
            let Some(message) = caller.bytes.get(at + HEAD_BYTES..at + HEAD_BYTES + len) else { break };
            caller.waits = !self.inbox.has_room();
            if caller.waits {
                break;
            }
            let Some(message) = Message::decode(message) else { return false };
            self.inbox.put(Event::Told(rank, channel, message));
            at += HEAD_BYTES + len;
        }
        caller.bytes.drain(..at);
        true
    }
}

/// A number of four bytes.
fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that hears, and one that tells.
    fn pair() -> (Oob, Oob, TcpListener) {
        let listener = listen(IpAddr::from([127, 0, 0, 1])).unwrap();
        let addresses = vec![listener.local_addr().unwrap(); 2];
        let oob = |me| Oob::new(me, [7; SECRET_BYTES], &addresses, Duration::from_secs(20)).unwrap();
        (oob(0), oob(1), listener)
    }

    fn news(done: u64) -> Message {
        Message::News(unbroken_comm::message::News::Left { rank: 1, done })
    }

    #[test]
    fn an_inbox_that_nobody_empties_has_a_bound_and_nothing_is_lost() {
        let (mut hears, mut tells, listener) = pair();
        hears.begin(listener, None, Box::new(|| Duration::from_millis(1))).unwrap();
        let all = 3 * MAX_EVENTS as u64;
        for k in 0..all {
            tells.tell(0, k as u32, &news(k));
        }
        tells.flush();
        let began = Instant::now();
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
}
