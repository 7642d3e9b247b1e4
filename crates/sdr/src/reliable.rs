//! Reliable writes over a queue pair: many at once, in both directions, each by its scheme.
//!
//! A write takes the next receive of the peer's, so reads and writes are matched in their order. Where codes are allowed, each has two messages: its data's, and one for parity, which
//! stays empty where the scheme has none. What is longer than the longest message is cut into segments, each a write of its own; the other end's read has the same
//! length then.
//!
//! What goes on below is a trait ([`Sdr`]): a queue pair of verbs, or a simulated one. [`Reliable::hear`] and [`Reliable::tick`] are called by whoever has news or finds
//! that it is time.
//!
//! Invariants: of what waits and of what runs there is a bounded number; every write and read ends with one [`Event`], by its deadline and as soon as nothing of it is
//! outstanding; an answer to a question about a message that is over is kept for as many messages as may be asked about.

use crate::adapt::{Choice, Estimate};
use crate::attr::Layout;
use crate::control::Control;
use crate::read::{Action, Bitmaps, Read};
use crate::sends::Piece;
use crate::write::{Outcome, Part, Path, Step, Write};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicU64;
use unbroken_codes::{ChunkSet, Code};
use unbroken_model::Scheme;

/// Why something below was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Not now.
    Later,
    /// Never.
    Never(String),
}

/// A part of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Area<'a, B> {
    /// The buffer.
    pub buffer: &'a B,
    /// Where it begins.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// A queue pair.
pub trait Sdr {
    /// What data lies in.
    type Buffer: Clone;
    /// Posts a receive, and gives its message.
    ///
    /// # Errors
    /// [`Refused`].
    fn recv_post(&mut self, now_us: u64, area: Area<'_, Self::Buffer>) -> Result<u64, Refused>;
    /// Ends a receive: nothing from the network touches its buffer any more, and its bitmap stands still.
    ///
    /// # Errors
    /// [`Refused`]: the buffer is not safe.
    fn recv_complete(&mut self, now_us: u64, seq: u64) -> Result<(), Refused>;
    /// The chunk bitmap of a receive.
    fn bitmap(&self, seq: u64) -> &[AtomicU64];
    /// Begins a send, and gives its message.
    ///
    /// # Errors
    /// [`Refused`].
    fn send_start(&mut self) -> Result<u64, Refused>;
    /// Whether its receive is posted.
    fn is_clear(&self, seq: u64) -> bool;
    /// Whether chunks are taken at all now: not too many wait.
    fn has_room(&self) -> bool;
    /// Sends a chunk, the piece's bytes of the area.
    fn send(&mut self, seq: u64, area: Area<'_, Self::Buffer>, piece: &Piece) -> bool;
    /// Nothing more of a send is wanted.
    fn send_stop(&mut self, seq: u64);
    /// Whether nothing of it is outstanding. It is forgotten then.
    fn send_idle(&mut self, seq: u64) -> bool;
    /// Says something to the peer.
    fn say(&mut self, message: &Control);
    /// Memory for parity, if there is any left.
    fn scratch(&mut self, bytes: u64) -> Option<Self::Buffer>;
    /// Makes the parity of a submessage.
    fn encode(&mut self, code: Code, data: Area<'_, Self::Buffer>, parity: Area<'_, Self::Buffer>);
    /// Brings lost data chunks back, in place. False: that is not possible.
    fn recover(
        &mut self,
        code: Code,
        data: Area<'_, Self::Buffer>,
        parity: Area<'_, Self::Buffer>,
        lost: &ChunkSet,
    ) -> bool;
}

/// How writes are made.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Parity chunks for which there is room beside a message; 0: no codes.
    pub parity_chunks: u32,
    /// Time to inject a chunk, in ns; 0: as fast as the queue pair takes them.
    pub injection_ns: u64,
    /// The round trip, until one has been measured.
    pub first_rtt_us: u64,
    /// The least retransmission timeout.
    pub least_rto_us: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config { parity_chunks: 0, injection_ns: 0, first_rtt_us: 50_000, least_rto_us: 5_000 }
    }
}

/// Writes, and reads, that may wait for their turn.
pub const MAX_WAITING: usize = 4096;
/// Messages over which questions are still answered.
const REMEMBERED: usize = 4096;

/// The end of a write or a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Which: what [`Reliable::write`] or [`Reliable::read`] gave.
    pub id: u64,
    /// It was a write; else a read.
    pub write: bool,
    /// Bytes that are in their place; or why not.
    pub result: Result<u64, Failure>,
}

/// Why a write or a read failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Time is over.
    #[error("the deadline has passed: the peer or the way to it does not answer")]
    Deadline,
    /// The peer gave up by its own deadline.
    #[error("the peer has given the message up by its own deadline")]
    PeerDeadline,
    /// The read is too short.
    #[error("the write is longer than the peer's read")]
    TooLong,
    /// The receiver cannot do the scheme.
    #[error("the receiver has no room for the parity of the scheme, or does not know it")]
    Scheme,
    /// It was taken back.
    #[error("the peer has taken the message back")]
    Cancelled,
    /// Below, something cannot be done.
    #[error("{0}")]
    Below(String),
}

impl Failure {
    fn of(by_peer: bool, reason: crate::control::Reason) -> Failure {
        use crate::control::Reason;
        match reason {
            Reason::Deadline if by_peer => Failure::PeerDeadline,
            Reason::Deadline => Failure::Deadline,
            Reason::TooLong => Failure::TooLong,
            Reason::Scheme => Failure::Scheme,
            Reason::Cancelled => Failure::Cancelled,
        }
    }
}

/// A segment of a write or a read.
struct Segment<B> {
    id: u64,
    buffer: B,
    offset: u64,
    bytes: u64,
    deadline_us: u64,
    /// Of a write.
    choice: Choice,
}

struct Writing<B> {
    of: Segment<B>,
    seq: u64,
    parity: Option<(u64, Option<B>)>,
    write: Write,
    stopped: bool,
    stamp_us: u64,
}

struct Reading<B> {
    of: Segment<B>,
    seq: u64,
    parity: Option<(u64, B)>,
    read: Read,
}

/// What is left of a write or a read of several segments.
struct Whole {
    left: usize,
    bytes: u64,
    failure: Option<Failure>,
}

/// What has been counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Chunks sent, parity included.
    pub chunks: u64,
    /// Of these, sent again.
    pub repeated: u64,
    /// Data chunks recovered from parity.
    pub recovered: u64,
    /// Segments written with a code.
    pub coded: u64,
    /// Segments written in all.
    pub written: u64,
}

/// Reliable writes over one queue pair.
pub struct Reliable<B> {
    layout: Layout,
    config: Config,
    rtt_us: Option<u64>,
    /// How long chunks take, with what waits below before they leave.
    delay_us: u64,
    /// What is known of the loss.
    pub estimate: Estimate,
    next_id: [u64; 2],
    wholes: [HashMap<u64, Whole>; 2],
    write_queue: VecDeque<Segment<B>>,
    read_queue: VecDeque<Segment<B>>,
    /// The first of two messages, while the second is refused.
    half_written: Option<u64>,
    half_read: Option<u64>,
    writes: VecDeque<Writing<B>>,
    reads: VecDeque<Reading<B>>,
    over: VecDeque<(u64, Control)>,
    events: VecDeque<Event>,
    inject_at_ns: u64,
    counts: Counts,
}

impl<B: Clone> Reliable<B> {
    /// None yet.
    pub fn new(layout: &Layout, config: Config) -> Reliable<B> {
        Reliable {
            layout: *layout,
            config,
            rtt_us: None,
            delay_us: 0,
            estimate: Estimate::default(),
            next_id: [0; 2],
            wholes: Default::default(),
            write_queue: VecDeque::new(),
            read_queue: VecDeque::new(),
            half_written: None,
            half_read: None,
            writes: VecDeque::new(),
            reads: VecDeque::new(),
            over: VecDeque::new(),
            events: VecDeque::new(),
            inject_at_ns: 0,
            counts: Counts::default(),
        }
    }

    /// Writes bytes into the peer's next read. `None`: too many wait.
    pub fn write(&mut self, buffer: &B, offset: u64, bytes: u64, choice: Choice, deadline_us: u64) -> Option<u64> {
        self.queue(true, buffer, (offset, bytes), choice, deadline_us)
    }

    /// Takes the peer's next write. `None`: too many wait.
    pub fn read(&mut self, buffer: &B, offset: u64, bytes: u64, deadline_us: u64) -> Option<u64> {
        self.queue(false, buffer, (offset, bytes), Choice::Fixed(Scheme::SrRto), deadline_us)
    }

    fn queue(
        &mut self,
        write: bool,
        buffer: &B,
        (offset, bytes): (u64, u64),
        choice: Choice,
        deadline_us: u64,
    ) -> Option<u64> {
        let most = self.layout.message_bytes;
        let segments = bytes.div_ceil(most).max(1);
        let queue = if write { &mut self.write_queue } else { &mut self.read_queue };
        if segments > (MAX_WAITING - queue.len().min(MAX_WAITING)) as u64 {
            return None;
        }
        let kind = usize::from(write);
        let id = self.next_id[kind];
        self.next_id[kind] += 1;
        self.wholes[kind].insert(id, Whole { left: segments as usize, bytes: 0, failure: None });
        for i in 0..segments {
            let bytes = (bytes - i * most).min(most);
            let offset = offset + i * most;
            queue.push_back(Segment { id, buffer: buffer.clone(), offset, bytes, deadline_us, choice });
        }
        Some(id)
    }

    /// What has ended.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The round trip, if one was measured.
    pub fn rtt_us(&self) -> Option<u64> {
        self.rtt_us
    }

    /// What has been counted.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    fn path(&self) -> Path {
        Path {
            rtt_us: self.rtt_us.unwrap_or(self.config.first_rtt_us).max(self.delay_us),
            injection_ns: self.config.injection_ns,
            least_rto_us: self.config.least_rto_us,
        }
    }

    fn ended(&mut self, write: bool, id: u64, result: Result<u64, Failure>) {
        let wholes = &mut self.wholes[usize::from(write)];
        let Some(whole) = wholes.get_mut(&id) else { return };
        whole.left -= 1;
        match result {
            Ok(bytes) => whole.bytes += bytes,
            Err(failure) => drop(whole.failure.get_or_insert(failure)),
        }
        if whole.left == 0 {
            let Some(Whole { bytes, failure, .. }) = wholes.remove(&id) else { return };
            let result = failure.map_or(Ok(bytes), Err);
            self.events.push_back(Event { id, write, result });
        }
    }

    /// The peer has said something.
    pub fn hear(&mut self, now_us: u64, message: &Control, sdr: &mut impl Sdr<Buffer = B>) {
        let path = self.path();
        match message {
            Control::Ack { seq, stamp_us, .. } | Control::Done { seq, stamp_us, .. } => {
                let Some(w) = self.writes.iter_mut().find(|w| w.seq == *seq) else { return };
                // Only the first answer to a question says how long it took.
                if *stamp_us > w.stamp_us && *stamp_us <= now_us {
                    w.stamp_us = *stamp_us;
                    let sample_us = now_us - stamp_us;
                    self.rtt_us = Some(self.rtt_us.map_or(sample_us, |rtt_us| (7 * rtt_us + sample_us) / 8));
                }
                w.write.hear(now_us, message, &path);
                if let Some(sample_us) = w.write.take_delay_us() {
                    self.delay_us = (7 * self.delay_us + sample_us) / 8;
                }
            }
            Control::Nack { seq, .. } | Control::Abort { seq, by_sender: false, .. } => {
                if let Some(w) = self.writes.iter_mut().find(|w| w.seq == *seq) {
                    w.write.hear(now_us, message, &path);
                }
            }
            Control::Begin { seq, .. } | Control::Abort { seq, by_sender: true, .. } => {
                match self.reads.iter().position(|r| r.seq == *seq) {
                    Some(index) => {
                        if let Some(action) = self.reads[index].read.hear(message) {
                            self.act(now_us, index, action, sdr);
                        }
                    }
                    None => {
                        let verdict = self.over.iter().find(|(over, _)| over == seq);
                        if let (Some((_, verdict)), Control::Begin { .. }) = (verdict, message) {
                            sdr.say(verdict);
                        }
                    }
                }
            }
            Control::Clear { .. } | Control::Cleared { .. } => {}
        }
    }

    /// Does what is due, and says when something will be; `None`: when there is news.
    pub fn tick(&mut self, now_us: u64, sdr: &mut impl Sdr<Buffer = B>) -> Option<u64> {
        self.start_reads(now_us, sdr);
        self.start_writes(now_us, sdr);
        let write_us = self.run_writes(now_us, sdr);
        let read_us = self.run_reads(now_us, sdr);
        // What waits is tried again when something has ended, and when its lifetime is over, which only time tells.
        let waits = !self.read_queue.is_empty() || !self.write_queue.is_empty();
        [write_us, read_us, waits.then_some(now_us + 1000)].into_iter().flatten().min()
    }

    fn start_reads(&mut self, now_us: u64, sdr: &mut impl Sdr<Buffer = B>) {
        let parity_bytes = u64::from(self.config.parity_chunks) * u64::from(self.layout.chunk_bytes);
        while let Some(of) = self.read_queue.front() {
            let started = (|| {
                let seq = match self.half_read {
                    Some(seq) => seq,
                    None => sdr.recv_post(now_us, Area { buffer: &of.buffer, offset: of.offset, bytes: of.bytes })?,
                };
                self.half_read = Some(seq);
                if parity_bytes == 0 {
                    return Ok((seq, None));
                }
                let parity = sdr.scratch(parity_bytes).ok_or(Refused::Later)?;
                let area = Area { buffer: &parity, offset: 0, bytes: parity_bytes };
                Ok((seq, Some((sdr.recv_post(now_us, area)?, parity))))
            })();
            let result = match started {
                Err(Refused::Later) if now_us < of.deadline_us => return,
                Err(Refused::Later) => Err(Failure::Deadline),
                Err(Refused::Never(why)) => Err(Failure::Below(why)),
                Ok(started) => Ok(started),
            };
            // One that never begins after its first message was posted leaves a hole which only the peer's deadline ends.
            let (Some(of), first) = (self.read_queue.pop_front(), self.half_read.take()) else { return };
            match result {
                Ok((seq, parity)) => {
                    let parity_chunks = if parity.is_some() { self.config.parity_chunks } else { 0 };
                    let read = Read::new(seq, of.bytes, parity_chunks, self.layout.chunk_bytes, of.deadline_us);
                    self.reads.push_back(Reading { of, seq, parity, read });
                }
                Err(failure) => {
                    if let Some(seq) = first {
                        let _ = sdr.recv_complete(now_us, seq);
                    }
                    self.ended(false, of.id, Err(failure));
                }
            }
        }
    }

    fn start_writes(&mut self, now_us: u64, sdr: &mut impl Sdr<Buffer = B>) {
        while let Some(of) = self.write_queue.front() {
            let codes = self.config.parity_chunks > 0;
            let started = (|| {
                let seq = match self.half_written {
                    Some(seq) => seq,
                    None => sdr.send_start()?,
                };
                self.half_written = Some(seq);
                Ok((seq, if codes { Some(sdr.send_start()?) } else { None }))
            })();
            let result = match started {
                Err(Refused::Later) if now_us < of.deadline_us => return,
                Err(Refused::Later) => Err(Failure::Deadline),
                Err(Refused::Never(why)) => Err(Failure::Below(why)),
                Ok(started) => Ok(started),
            };
            let (Some(of), first) = (self.write_queue.pop_front(), self.half_written.take()) else { return };
            match result {
                Ok((seq, parity)) => self.begin_write(of, seq, parity, sdr),
                Err(failure) => {
                    if let Some(seq) = first {
                        sdr.send_stop(seq);
                        sdr.send_idle(seq);
                    }
                    self.ended(true, of.id, Err(failure));
                }
            }
        }
    }

    fn begin_write(&mut self, of: Segment<B>, seq: u64, parity: Option<u64>, sdr: &mut impl Sdr<Buffer = B>) {
        let (path, chunks) = (self.path(), u64::from(self.layout.chunks_of(of.bytes)));
        let room = self.config.parity_chunks.into();
        let rtt_us = self.rtt_us.unwrap_or(path.rtt_us);
        let mut scheme = self.estimate.scheme(of.choice, rtt_us, path.injection_ns, chunks, room);
        let mut scratch = None;
        if let Scheme::Ec(code) = scheme {
            let parity_chunks = crate::submessages::Submessages::new(code, chunks as u32).parity_chunks();
            scratch = sdr.scratch(u64::from(parity_chunks) * u64::from(self.layout.chunk_bytes));
            if scratch.is_none() || of.bytes == 0 || parity.is_none() {
                // Nothing to hold the parity, or nothing to make it of: as reliable, only slower.
                scheme = Scheme::SrNack;
                scratch = None;
            }
        }
        self.counts.written += 1;
        self.counts.coded += u64::from(scratch.is_some());
        let write = Write::new(seq, of.bytes, self.layout.chunk_bytes, scheme, of.deadline_us);
        let parity = parity.map(|seq| (seq, scratch));
        self.writes.push_back(Writing { of, seq, parity, write, stopped: false, stamp_us: 0 });
    }

    fn run_writes(&mut self, now_us: u64, sdr: &mut impl Sdr<Buffer = B>) -> Option<u64> {
        let path = self.path();
        let mut next_us = None::<u64>;
        let mut before = |at_us: u64| next_us = Some(next_us.map_or(at_us, |next_us| next_us.min(at_us)));
        let mut index = 0;
        while index < self.writes.len() {
            let w = &mut self.writes[index];
            let clear = sdr.is_clear(w.seq) && w.parity.as_ref().is_none_or(|(seq, _)| sdr.is_clear(*seq));
            if let Some(message) = w.write.poll(now_us, clear, &path) {
                sdr.say(&message);
            }
            if clear && w.write.outcome().is_none() {
                let paced = path.injection_ns > 0;
                // What could not leave in time leaves now, but time that is long gone does not make a burst.
                let slack_ns = (8 * path.injection_ns).max(1_000_000);
                while sdr.has_room() && (!paced || self.inject_at_ns <= 1000 * now_us) {
                    if !w.step(now_us, self.layout.chunk_bytes, sdr) {
                        break;
                    }
                    self.inject_at_ns =
                        self.inject_at_ns.max((1000 * now_us).saturating_sub(slack_ns)) + path.injection_ns;
                }
                if paced && w.write.next_is_ready() {
                    before(self.inject_at_ns.div_ceil(1000));
                }
            }
            if let Some(message) = w.write.poll(now_us, clear, &path) {
                sdr.say(&message);
            }
            match w.write.outcome() {
                None if clear => before(w.write.deadline_us()),
                None => before(w.of.deadline_us),
                Some(outcome) => {
                    if self.end_write(index, outcome, sdr) {
                        continue;
                    }
                    before(now_us + 1000);
                }
            }
            index += 1;
        }
        next_us
    }

    /// The write has its outcome: whether nothing of it is outstanding, and it is gone.
    fn end_write(&mut self, index: usize, outcome: Outcome, sdr: &mut impl Sdr<Buffer = B>) -> bool {
        let w = &mut self.writes[index];
        let parity = w.parity.as_ref().map(|(seq, _)| *seq);
        if !std::mem::replace(&mut w.stopped, true) {
            sdr.send_stop(w.seq);
            parity.into_iter().for_each(|seq| sdr.send_stop(seq));
        }
        // Both are asked, so that either is forgotten as soon as it can be.
        let idle = [Some(w.seq), parity].into_iter().flatten().filter(|seq| !sdr.send_idle(*seq)).count() == 0;
        if !idle {
            return false;
        }
        let Some(w) = self.writes.remove(index) else { return false };
        let (chunks, data) = (w.write.sent, u64::from(self.layout.chunks_of(w.of.bytes)));
        self.counts.chunks += chunks;
        self.counts.repeated += w.write.repeated;
        if outcome == Outcome::Done {
            match w.write.scheme() {
                Scheme::Ec(_) => self.estimate.note(data, w.write.missing.unwrap_or(0).into()),
                _ => self.estimate.note(chunks, w.write.repeated),
            }
        }
        let result = match outcome {
            Outcome::Done => Ok(w.of.bytes),
            Outcome::Failed { by_peer, reason } => Err(Failure::of(by_peer, reason)),
        };
        self.ended(true, w.of.id, result);
        true
    }

    fn run_reads(&mut self, now_us: u64, sdr: &mut impl Sdr<Buffer = B>) -> Option<u64> {
        let mut next_us = None::<u64>;
        let mut actions = Vec::new();
        for index in (0..self.reads.len()).rev() {
            let r = &mut self.reads[index];
            let parity = r.parity.as_ref().map_or(&[][..], |(seq, _)| sdr.bitmap(*seq));
            let bitmaps = Bitmaps { data: sdr.bitmap(r.seq), parity };
            r.read.poll(now_us, bitmaps, &mut actions);
            let at_us = r.read.deadline_us(now_us);
            next_us = Some(next_us.map_or(at_us, |next_us| next_us.min(at_us)));
            for action in actions.drain(..) {
                self.act(now_us, index, action, sdr);
            }
        }
        next_us
    }

    fn act(&mut self, now_us: u64, index: usize, action: Action, sdr: &mut impl Sdr<Buffer = B>) {
        match action {
            Action::Say(message) => sdr.say(&message),
            Action::Finish | Action::Fail => {
                let Some(mut r) = self.reads.remove(index) else { return };
                let failure = self.end_read(now_us, &mut r, action == Action::Finish, sdr);
                let verdict = match &failure {
                    None => r.read.finished(),
                    Some(_) => r.read.verdict(),
                };
                sdr.say(&verdict);
                self.over.push_back((r.seq, verdict));
                if self.over.len() > REMEMBERED {
                    self.over.pop_front();
                }
                let bytes = r.read.bytes().unwrap_or(0);
                self.ended(false, r.of.id, failure.map_or(Ok(bytes), Err));
            }
        }
    }

    /// Clears the keys, and recovers what is missing; gives the failure, if there is one.
    fn end_read(
        &mut self,
        now_us: u64,
        r: &mut Reading<B>,
        finish: bool,
        sdr: &mut impl Sdr<Buffer = B>,
    ) -> Option<Failure> {
        let parity = r.parity.as_ref().map(|(seq, _)| *seq);
        for seq in [Some(r.seq), parity].into_iter().flatten() {
            if let Err(why) = sdr.recv_complete(now_us, seq) {
                return Some(Failure::Below(format!("the buffer cannot be taken from the network: {why:?}")));
            }
        }
        if !finish {
            return match r.read.outcome() {
                Some(Outcome::Failed { by_peer, reason }) => Some(Failure::of(by_peer, reason)),
                _ => Some(Failure::Cancelled),
            };
        }
        let bitmaps = Bitmaps { data: sdr.bitmap(r.seq), parity: parity.map_or(&[][..], |seq| sdr.bitmap(seq)) };
        let losses = r.read.losses(bitmaps);
        let chunk = u64::from(self.layout.chunk_bytes);
        let bytes = r.read.bytes().unwrap_or(0);
        for loss in losses {
            let Some((_, scratch)) = &r.parity else { return Some(Failure::Scheme) };
            let begin = u64::from(loss.data.start) * chunk;
            let end = (u64::from(loss.data.end) * chunk).min(bytes);
            let data = Area { buffer: &r.of.buffer, offset: r.of.offset + begin, bytes: end - begin };
            let parity = Area {
                buffer: scratch,
                offset: u64::from(loss.parity.start) * chunk,
                bytes: loss.parity.len() as u64 * chunk,
            };
            if !sdr.recover(loss.code, data, parity, &loss.lost) {
                return Some(Failure::Below("what was received cannot be decoded".into()));
            }
            self.counts.recovered += loss.lost.iter().filter(|lost| *lost < loss.data.len()).count() as u64;
        }
        None
    }
}

impl<B: Clone> Writing<B> {
    /// Does the next step; false: there is none, or it was not taken.
    fn step(&mut self, now_us: u64, chunk_bytes: u32, sdr: &mut impl Sdr<Buffer = B>) -> bool {
        let chunk = u64::from(chunk_bytes);
        loop {
            match self.write.next_step() {
                None => return false,
                Some(Step::Encode(sub)) => {
                    let Some(subs) = self.write.submessages().copied() else { return false };
                    let Some((_, Some(scratch))) = &self.parity else { return false };
                    let (data, parity) = (subs.data(sub), subs.parity(sub));
                    let begin = u64::from(data.start) * chunk;
                    let end = (u64::from(data.end) * chunk).min(self.of.bytes);
                    let of_parity = (u64::from(parity.start) * chunk, parity.len() as u64 * chunk);
                    sdr.encode(
                        subs.code(sub),
                        Area { buffer: &self.of.buffer, offset: self.of.offset + begin, bytes: end - begin },
                        Area { buffer: scratch, offset: of_parity.0, bytes: of_parity.1 },
                    );
                }
                Some(Step::Send(part, piece)) => {
                    let at = u64::from(piece.chunk) * chunk;
                    let (seq, area) = match (part, &self.parity) {
                        (Part::Parity, Some((seq, Some(scratch)))) => {
                            (*seq, Area { buffer: scratch, offset: at, bytes: piece.bytes })
                        }
                        (Part::Parity, _) => return false,
                        (Part::Data, _) => (
                            self.seq,
                            Area { buffer: &self.of.buffer, offset: self.of.offset + at, bytes: piece.bytes },
                        ),
                    };
                    if !sdr.send(seq, area, &piece) {
                        return false;
                    }
                    self.write.sent(now_us, part, piece.chunk);
                    return true;
                }
            }
        }
    }
}
