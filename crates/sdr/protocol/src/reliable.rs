//! Reliable writes over a queue pair: many concurrent ones, in both directions, each with its own
//! scheme.
//!
//! A write consumes the peer's next receive, so reads and writes match in order. If codes are
//! allowed, each write has two messages: one for its data and one for parity, which is empty if the
//! scheme has no parity. A write longer than the longest message is cut into segments, each of
//! which is a separate write. Then the peer's read must have the same length.
//!
//! The layer below is a trait ([`Sdr`]): a verbs queue pair, or a simulated one. The caller passes
//! control messages to [`Reliable::hear`] and calls [`Reliable::tick`] at its deadlines.
//!
//! Invariants: the numbers of waiting and of active operations are bounded; every write and read
//! ends with exactly one [`Event`], by its deadline and once none of its work is outstanding; the
//! verdict on a finished message is kept for as many messages as the peer may still ask about.

mod below;
mod reading;
mod writing;

use crate::adapt::{Choice, Chosen, Estimate};
use crate::attr::Layout;
use crate::control::Control;
use crate::injection::Injection;
use crate::least::Least;
use crate::write::Path;
pub use below::{Area, Encoding, Refused, Sdr};
use reading::Reading;
use std::collections::{HashMap, VecDeque};
use unbroken_sdr_model::Scheme;
use writing::Writing;

/// Settings of reliable writes.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The room for parity chunks of each message; 0: no codes.
    pub parity_chunks: u32,
    /// The time to inject a chunk, in ns; 0: as fast as the queue pair accepts chunks.
    pub injection_ns: u64,
    /// The initial estimate of the round trip.
    pub first_rtt_us: u64,
    /// The shortest retransmission timeout.
    pub least_rto_us: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config { parity_chunks: 0, injection_ns: 0, first_rtt_us: 50_000, least_rto_us: 5_000 }
    }
}

/// The most writes, and the most reads, that may be queued.
pub const MAX_WAITING: usize = 4096;
/// Messages over which questions are still answered.
const REMEMBERED: usize = 4096;

/// The completion of a write or a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The ID that [`Reliable::write`] or [`Reliable::read`] returned.
    pub id: u64,
    /// Whether it is a write; otherwise it is a read.
    pub write: bool,
    /// The number of bytes in place, or the reason for the failure.
    pub result: Result<u64, Failure>,
}

/// Why a write or a read failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The deadline has passed.
    #[error("the deadline has passed: the peer or the way to it does not answer")]
    Deadline,
    /// The peer's deadline has passed.
    #[error("the peer has given the message up by its own deadline")]
    PeerDeadline,
    /// The read is too short.
    #[error("the write is longer than the peer's read")]
    TooLong,
    /// The receiver does not support the scheme.
    #[error("the receiver has no room for the parity of the scheme, or does not know it")]
    Scheme,
    /// The program cancelled it.
    #[error("the peer has taken the message back")]
    Cancelled,
    /// The layer below has failed.
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

/// What is left of a write or a read of several segments.
struct Whole {
    left: usize,
    bytes: u64,
    failure: Option<Failure>,
}

/// A verdict that will be repeated.
struct Echo {
    verdict: Control,
    at_us: u64,
    interval_us: u64,
    left: u32,
}

/// Counters of reliable writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Chunks sent, parity included.
    pub chunks: u64,
    /// Retransmitted chunks among them.
    pub repeated: u64,
    /// Data chunks recovered from parity.
    pub recovered: u64,
    /// Segments written with a code.
    pub coded: u64,
    /// All segments written.
    pub written: u64,
}

/// Reliable writes over one queue pair.
pub struct Reliable<B> {
    layout: Layout,
    config: Config,
    rtt_us: Option<u64>,
    way: Least,
    /// The time that chunks take, including the queue below.
    delay_us: u64,
    /// The estimate of the loss.
    pub estimate: Estimate,
    chosen: Chosen,
    /// The measured injection rate.
    injection: Injection,
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
    echoes: VecDeque<Echo>,
    events: VecDeque<Event>,
    inject_at_ns: u64,
    counts: Counts,
}

impl<B: Clone> Reliable<B> {
    /// Creates the state without any writes.
    pub fn new(layout: &Layout, config: Config) -> Reliable<B> {
        Reliable {
            layout: *layout,
            config,
            rtt_us: None,
            way: Least::default(),
            delay_us: 0,
            estimate: Estimate::default(),
            chosen: Chosen::default(),
            injection: Injection::default(),
            next_id: [0; 2],
            wholes: Default::default(),
            write_queue: VecDeque::new(),
            read_queue: VecDeque::new(),
            half_written: None,
            half_read: None,
            writes: VecDeque::new(),
            reads: VecDeque::new(),
            over: VecDeque::new(),
            echoes: VecDeque::new(),
            events: VecDeque::new(),
            inject_at_ns: 0,
            counts: Counts::default(),
        }
    }

    /// Queues a write into the peer's next read; `None` if too many are queued.
    pub fn write(
        &mut self,
        buffer: &B,
        offset: u64,
        bytes: u64,
        choice: Choice,
        deadline_us: u64,
    ) -> Option<u64> {
        self.queue(true, buffer, (offset, bytes), choice, deadline_us)
    }

    /// Queues a read for the peer's next write; `None` if too many are queued.
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
            queue.push_back(Segment {
                id,
                buffer: buffer.clone(),
                offset,
                bytes,
                deadline_us,
                choice,
            });
        }
        Some(id)
    }

    /// Returns the next completion.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The round trip, if it has been measured.
    pub fn rtt_us(&self) -> Option<u64> {
        self.rtt_us
    }

    /// The time to inject a chunk, in ns: the configured one, or else the measured one, if there is
    /// one.
    pub fn injection_ns(&self) -> Option<u64> {
        match self.config.injection_ns {
            0 => self.injection.chunk_ns(self.layout.chunk_bytes),
            given => Some(given),
        }
    }

    /// The counters.
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

    /// Handles a control message from the peer.
    pub fn hear(&mut self, now_us: u64, message: &Control, sdr: &mut impl Sdr<Buffer = B>) {
        let path = self.path();
        match message {
            Control::Ack { seq, stamp_us, .. } | Control::Done { seq, stamp_us, .. } => {
                let Some(w) = self.writes.iter_mut().find(|w| w.seq == *seq) else { return };
                // Only the first answer to a question says how long it took.
                if *stamp_us > w.stamp_us && *stamp_us <= now_us {
                    w.stamp_us = *stamp_us;
                    let sample_us = now_us - stamp_us;
                    self.way.note(sample_us);
                    self.rtt_us =
                        Some(self.rtt_us.map_or(sample_us, |rtt_us| (7 * rtt_us + sample_us) / 8));
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

    /// Does all work that is due, and returns the next deadline; `None`: the next event.
    pub fn tick(&mut self, now_us: u64, sdr: &mut impl Sdr<Buffer = B>) -> Option<u64> {
        self.start_reads(now_us, sdr);
        self.start_writes(now_us, sdr);
        let write_us = self.run_writes(now_us, sdr);
        let read_us = self.run_reads(now_us, sdr);
        let echo_us = self.run_echoes(now_us, sdr);
        // What waits is tried again when something has ended, and when its lifetime is over, which
        // only time tells.
        let waits = !self.read_queue.is_empty() || !self.write_queue.is_empty();
        [write_us, read_us, echo_us, waits.then_some(now_us + 1000)].into_iter().flatten().min()
    }
}
