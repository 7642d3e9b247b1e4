//! Connections out of band: TCP to other ranks, made when first needed.
//!
//! A rank sends over connections that it opened and reads from those that it accepted. Each begins with the job's secret and the sender's rank; then come
//! messages behind their lengths. One thread of the communicator accepts and reads, and calls [`Attend`] when something has come or
//! time has passed; whoever drives the engine takes what has come from the [`Inbox`].
//!
//! The end of a connection without a word of leaving is the death of its process.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use unbroken_comm::message::Message;
use unbroken_comm::Rank;

use crate::bootstrap::SECRET_BYTES;
use crate::error::{io, Result};
use crate::status::Server;

/// How long connecting and sending may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// What could not be sent may be for one who has left, whose word to that effect is under way.
const GRACE: Duration = Duration::from_millis(500);
/// The longest message.
const MAX_MESSAGE: usize = 1 << 20;
/// Connections that wait to say who they are.
const MAX_STRANGERS: usize = 256;

/// What has come.
pub(crate) enum Event {
    /// A message.
    Told(Rank, Message),
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
    fn put(&self, event: Event) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push_back(event);
        self.some.store(true, Ordering::Release);
    }

    /// The next, if it is due.
    pub(crate) fn take(&self) -> Option<Event> {
        if !self.some.load(Ordering::Acquire) {
            return None;
        }
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
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

/// The sending side.
pub(crate) struct Oob {
    me: Rank,
    secret: [u8; SECRET_BYTES],
    addresses: Vec<SocketAddr>,
    out: Vec<Option<TcpStream>>,
    pub(crate) inbox: Arc<Inbox>,
    stop: Arc<AtomicBool>,
    address: SocketAddr,
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
    pub(crate) fn new(me: Rank, secret: [u8; SECRET_BYTES], addresses: Vec<SocketAddr>) -> Oob {
        Oob {
            me,
            secret,
            out: addresses.iter().map(|_| None).collect(),
            address: addresses[me],
            addresses,
            inbox: Arc::default(),
            stop: Arc::default(),
            thread: None,
        }
    }

    /// Starts the thread.
    pub(crate) fn begin(&mut self, listener: TcpListener, status: Option<Server>, attend: Attend) -> Result<()> {
        let reader = Reader {
            listener,
            status,
            secret: self.secret,
            ranks: self.addresses.len(),
            inbox: self.inbox.clone(),
            stop: self.stop.clone(),
            callers: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("coll-oob".into()).spawn(move || reader.run(&attend));
        self.thread = Some(thread.map_err(io("start the thread out of band"))?);
        Ok(())
    }

    /// Sends a message. What cannot be sent makes its receiver lost.
    pub(crate) fn tell(&mut self, rank: Rank, message: &Message) {
        if self.try_tell(rank, message).is_err() {
            self.out[rank] = None;
            self.inbox.put(Event::Gone(rank, Instant::now() + GRACE));
        }
    }

    fn try_tell(&mut self, rank: Rank, message: &Message) -> std::io::Result<()> {
        let bytes = message.encode();
        let mut framed = (bytes.len() as u32).to_le_bytes().to_vec();
        framed.extend(bytes);
        if self.out[rank].is_none() {
            let stream = TcpStream::connect_timeout(&self.addresses[rank], PATIENCE)?;
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(PATIENCE))?;
            let mut hello = self.secret.to_vec();
            hello.extend((self.me as u32).to_le_bytes());
            hello.extend(framed);
            framed = hello;
            self.out[rank] = Some(stream);
        }
        match &mut self.out[rank] {
            Some(stream) => stream.write_all(&framed),
            None => Ok(()),
        }
    }

    /// Ranks that this one has a connection to.
    pub(crate) fn connected(&self) -> Vec<Rank> {
        (0..self.out.len()).filter(|rank| self.out[*rank].is_some()).collect()
    }

    /// Tells the thread to end.
    pub(crate) fn stop(&mut self) -> Ending {
        self.stop.store(true, Ordering::Release);
        Ending { address: self.address, thread: self.thread.take() }
    }
}

/// A thread that is to end.
pub(crate) struct Ending {
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Ending {
    /// Waits for it. The communicator must not be locked.
    pub(crate) fn end(self) {
        // It wakes by a connection; where none can be made, when it looks next.
        let _ = TcpStream::connect_timeout(&self.address, PATIENCE);
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
}

struct Reader {
    listener: TcpListener,
    status: Option<Server>,
    secret: [u8; SECRET_BYTES],
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
            if let Some(status) = &self.status {
                status.answer();
            }
            let mut ended = Vec::new();
            let callers = readable.iter().skip(1).take(self.callers.len()).copied().collect::<Vec<bool>>();
            for (k, _) in callers.iter().enumerate().filter(|(_, readable)| **readable) {
                if !self.read(k) {
                    ended.push(k);
                }
            }
            for k in ended.into_iter().rev() {
                if let Some(rank) = self.callers.swap_remove(k).rank {
                    self.inbox.put(Event::Gone(rank, Instant::now()));
                }
            }
            // Behind the callers, whose positions were those of what could be read.
            if readable.first() == Some(&true) {
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

    /// Waits until something can be read; the listener, then the callers.
    fn wait(&self, most: Duration) -> Vec<bool> {
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(self.callers.iter().map(|c| PollFd::new(&c.stream, PollFlags::IN)));
        fds.extend(self.status.iter().map(|status| PollFd::new(&status.listener, PollFlags::IN)));
        let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) => fds.iter().map(|fd| !fd.revents().is_empty()).collect(),
            // interrupted
            Err(_) => Vec::new(),
        }
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            let strangers = self.callers.iter().filter(|c| c.rank.is_none()).count();
            if strangers < MAX_STRANGERS && stream.set_nonblocking(true).is_ok() {
                self.callers.push(Caller { stream, rank: None, bytes: Vec::new() });
            }
        }
    }

    /// Reads what is there. `false`: it has ended, or is no rank's.
    fn read(&mut self, k: usize) -> bool {
        let mut buffer = [0; 16384];
        loop {
            let caller = &mut self.callers[k];
            match caller.stream.read(&mut buffer) {
                Ok(0) => return false,
                Ok(n) => caller.bytes.extend(&buffer[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return true,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => return false,
            }
            if !self.digest(k) {
                return false;
            }
        }
    }

    /// Takes whole messages from what a caller has sent.
    fn digest(&mut self, k: usize) -> bool {
        let caller = &mut self.callers[k];
        let mut at = 0;
        if caller.rank.is_none() {
            let Some((hello, _)) = caller.bytes.split_at_checked(SECRET_BYTES + 4) else { return true };
            let (secret, rank) = hello.split_at(SECRET_BYTES);
            let rank = u32::from_le_bytes(rank.try_into().unwrap_or_default()) as usize;
            if secret != self.secret || rank >= self.ranks {
                return false;
            }
            caller.rank = Some(rank);
            at = SECRET_BYTES + 4;
        }
        let rank = caller.rank.unwrap_or_default();
        while let Some(len) = caller.bytes.get(at..at + 4) {
            let len = u32::from_le_bytes(len.try_into().unwrap_or_default()) as usize;
            if len > MAX_MESSAGE {
                return false;
            }
            let Some(message) = caller.bytes.get(at + 4..at + 4 + len) else { break };
            let Some(message) = Message::decode(message) else { return false };
            self.inbox.put(Event::Told(rank, message));
            at += 4 + len;
        }
        caller.bytes.drain(..at);
        true
    }
}
