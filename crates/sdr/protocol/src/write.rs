//! The sender of one reliable write.
//!
//! ```text
//!   waiting ── its receives are clear ──► sending ── Done ──► draining ── nothing outstanding ──► over
//!      │                                     │                    ▲
//!      └────────── the deadline, or the receiver gives it up ─────┘   (with an error)
//! ```
//!
//! While the write sends, *Begin* announces it to the receiver. *Begin* is repeated, as a question,
//! whenever nothing has arrived from the receiver for a retransmission timeout.
//!
//! *Selective Repeat*: each chunk has a timeout, `RTO = (1 + α)·RTT`. An ACK removes chunks. A NACK
//! causes an immediate retransmission, unless the chunk was sent within the last round trip: then
//! the NACK refers to an earlier copy.
//!
//! *Erasure coding*: data and parity are sent once, submessage by submessage. Parity is encoded
//! after its data has been sent or, by another thread, while its data is being sent. A NACK names
//! submessages that cannot be recovered. From then on, Selective Repeat transfers their chunks.
//!
//! A chunk is retransmitted over the next channel, so a channel that loses all packets does not
//! block a write.
//!
//! Invariants: no data is sent before the receives are announced; a chunk is in the retransmission
//! queue at most once; no parity is sent before it is encoded; the write ends only when none of its
//! work is outstanding; it ends by its deadline, plus the time for the work that is outstanding
//! then.

use crate::control::{Control, Missing, Reason};
use crate::copies::{self, COPIES};
use crate::packets::Piece;
use crate::submessages::Submessages;
use std::collections::VecDeque;
use unbroken_sdr_model::Scheme;

/// The ID of a scheme on the wire: 0 and 1 are Selective Repeat without and with NACKs, all others
/// are IDs of codes.
pub fn scheme_id(scheme: Scheme) -> u32 {
    match scheme {
        Scheme::SrRto => 0,
        Scheme::SrNack => 1,
        Scheme::Ec(code) => code.id(),
    }
}

/// The scheme for an ID from a peer.
pub fn scheme_of(id: u32) -> Option<Scheme> {
    match id {
        0 => Some(Scheme::SrRto),
        1 => Some(Scheme::SrNack),
        id => unbroken_erasure::Code::from_id(id).ok().map(Scheme::Ec),
    }
}

/// A message of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Its data.
    Data,
    /// Its parity.
    Parity,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Encode the parity of a submessage, then ask again.
    Encode(u32),
    /// Send a chunk, then call [`Write::sent`] if the queue pair accepted it.
    Send(Part, Piece),
}

#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    sent_us: Option<u64>,
    tries: u32,
    acked: bool,
    waits: bool,
    /// Under Selective Repeat.
    repeated: bool,
}

/// How a write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All data is in place.
    Done,
    /// It was aborted.
    Failed {
        /// Whether the peer aborted it; otherwise this end did.
        by_peer: bool,
        /// The reason.
        reason: Reason,
    },
}

/// Properties of the path, as measured by the writes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Path {
    /// The time from handing a chunk down to its acknowledgement: the round trip, and the queue
    /// before it.
    pub rtt_us: u64,
    /// The time to inject a chunk, in ns; 0: not paced.
    pub injection_ns: u64,
    /// The shortest retransmission timeout.
    pub least_rto_us: u64,
}

impl Path {
    /// `(1 + α)·RTT`, with α = 2.
    pub fn rto_us(&self) -> u64 {
        (3 * self.rtt_us).max(self.least_rto_us)
    }
}

/// A reliable write, as its sender sees it.
pub struct Write {
    seq: u64,
    bytes: u64,
    chunk_bytes: u32,
    scheme: Scheme,
    subs: Option<Submessages>,
    chunks: Vec<Chunk>,
    /// How far the fresh ones are: the submessage, and the chunk in it, parity behind data.
    next: (u32, u32),
    encoded: u32,
    /// Parity is asked for before its data is sent.
    ahead: bool,
    /// The last parity that was asked for is being made.
    encoding: bool,
    again: VecDeque<u32>,
    /// When which chunk was sent, the oldest first.
    timeouts: VecDeque<(u64, u32)>,
    rto_us: u64,
    acked: u32,
    delay_us: Option<u64>,
    ask_us: u64,
    asked: u32,
    heard_us: Option<u64>,
    deadline_us: u64,
    outcome: Option<Outcome>,
    /// Chunks sent. Those that were retransmitted are in `repeated`.
    pub sent: u64,
    /// See `sent`.
    pub repeated: u64,
    /// Chunks that had not arrived at the end, as the receiver reported.
    pub missing: Option<u32>,
}

impl Write {
    /// Creates a write of `bytes` bytes in message `seq`.
    pub fn new(seq: u64, bytes: u64, chunk_bytes: u32, scheme: Scheme, deadline_us: u64) -> Write {
        let count = bytes.div_ceil(chunk_bytes.into()).max(1) as u32;
        let code = match scheme {
            Scheme::Ec(code) => Some(code),
            _ => None,
        };
        let repeated = code.is_none();
        Write {
            seq,
            bytes,
            chunk_bytes,
            scheme,
            subs: code.map(|code| Submessages::new(code, count)),
            chunks: vec![Chunk { repeated, ..Chunk::default() }; count as usize],
            next: (0, 0),
            encoded: 0,
            ahead: false,
            encoding: false,
            again: VecDeque::new(),
            timeouts: VecDeque::new(),
            rto_us: 0,
            acked: 0,
            delay_us: None,
            ask_us: 0,
            asked: 0,
            heard_us: None,
            deadline_us,
            outcome: None,
            sent: 0,
            repeated: 0,
            missing: None,
        }
    }

    /// Makes this write request each parity before it sends the data.
    pub fn encoding_ahead(self) -> Write {
        Write { ahead: true, ..self }
    }

    /// Records that another thread is encoding the parity of [`Step::Encode`].
    pub fn parity_is_being_made(&mut self) {
        self.encoding = true;
    }

    /// Records that this parity is ready.
    pub fn parity_is_made(&mut self) {
        self.encoding = false;
    }

    /// Whether parity is being encoded.
    pub fn is_encoding(&self) -> bool {
        self.encoding
    }

    /// The outcome, if the write has ended.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome
    }

    /// Its scheme.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Its submessages, if it has a code.
    pub fn submessages(&self) -> Option<&Submessages> {
        self.subs.as_ref()
    }

    /// The number of its chunks, data and parity.
    pub fn all_chunks(&self) -> u64 {
        self.chunks.len() as u64 + self.subs.as_ref().map_or(0, |s| u64::from(s.parity_chunks()))
    }

    /// Handles the passing of time and returns the message to send. `clear`: whether the receives
    /// have been announced.
    pub fn poll(&mut self, now_us: u64, clear: bool, path: &Path) -> Option<Control> {
        if self.outcome.is_some() {
            return None;
        }
        if now_us >= self.deadline_us {
            self.outcome = Some(Outcome::Failed { by_peer: false, reason: Reason::Deadline });
            return Some(Control::Abort {
                seq: self.seq,
                by_sender: true,
                reason: Reason::Deadline,
            });
        }
        if !clear {
            return None;
        }
        self.rto_us = path.rto_us();
        while let Some((sent_us, chunk)) = self.timeouts.front().copied() {
            if sent_us + self.rto_us > now_us {
                break;
            }
            self.timeouts.pop_front();
            // One that was sent again meanwhile has a later entry of its own.
            if self.chunks[chunk as usize].sent_us == Some(sent_us) {
                self.repeat(chunk);
            }
        }
        // Its first chunk is on its way before it is announced: the receiver counts from then.
        if now_us < self.ask_us || self.sent == 0 {
            return None;
        }
        self.asked += 1;
        let copy_us = copies::interval_us(path.rtt_us)
            .filter(|_| self.heard_us.is_none() && self.asked < COPIES);
        self.ask_us = now_us + copy_us.unwrap_or(path.rto_us());
        Some(Control::Begin {
            seq: self.seq,
            bytes: self.bytes,
            scheme: scheme_id(self.scheme),
            injection_ns: path.injection_ns.min(u64::from(u32::MAX)) as u32,
            rtt_us: path.rtt_us.min(u64::from(u32::MAX)) as u32,
            stamp_us: now_us,
        })
    }

    /// When to call [`Write::poll`]; there may be steps before.
    pub fn deadline_us(&self) -> u64 {
        let timeout_us =
            self.timeouts.front().map_or(u64::MAX, |(sent_us, _)| sent_us + self.rto_us);
        let ask_us = if self.sent == 0 { u64::MAX } else { self.ask_us };
        self.deadline_us.min(ask_us).min(timeout_us)
    }

    fn repeat(&mut self, chunk: u32) {
        let c = &mut self.chunks[chunk as usize];
        if c.repeated && !c.acked && !c.waits {
            c.waits = true;
            self.again.push_back(chunk);
        }
    }

    /// Whether there is anything to be sent.
    pub fn next_is_ready(&self) -> bool {
        let fresh = match &self.subs {
            Some(subs) => {
                let (sub, at) = self.next;
                sub < subs.count() && !(self.encoding && at as usize >= subs.data(sub).len())
            }
            None => self.next.1 < self.chunks.len() as u32,
        };
        self.outcome.is_none() && (fresh || !self.again.is_empty())
    }

    /// What is to be sent next.
    pub fn next_step(&mut self) -> Option<Step> {
        if self.outcome.is_some() {
            return None;
        }
        while let Some(chunk) = self.again.front().copied() {
            let c = &mut self.chunks[chunk as usize];
            if !c.acked {
                return Some(Step::Send(Part::Data, self.piece(chunk)));
            }
            c.waits = false;
            self.again.pop_front();
        }
        let Some(subs) = &self.subs else {
            return (self.next.1 < self.chunks.len() as u32)
                .then(|| Step::Send(Part::Data, self.piece(self.next.1)));
        };
        let (sub, at) = self.next;
        if sub >= subs.count() {
            return None;
        }
        let data = subs.data(sub);
        if self.encoded == sub && (self.ahead || at >= data.len() as u32) {
            self.encoded = sub + 1;
            return Some(Step::Encode(sub));
        }
        if at < data.len() as u32 {
            return Some(Step::Send(Part::Data, self.piece(data.start + at)));
        }
        if self.encoding {
            return None;
        }
        let chunk = subs.parity(sub).start + at - data.len() as u32;
        let bytes = u64::from(self.chunk_bytes);
        Some(Step::Send(Part::Parity, Piece { chunk, bytes, attempt: 0, ..Piece::default() }))
    }

    fn piece(&self, chunk: u32) -> Piece {
        let at = u64::from(chunk) * u64::from(self.chunk_bytes);
        let bytes = self.bytes.saturating_sub(at).min(self.chunk_bytes.into());
        Piece { chunk, bytes, attempt: self.chunks[chunk as usize].tries, ..Piece::default() }
    }

    /// The chunk that [`Write::next_step`] gave is on its way.
    pub fn sent(&mut self, now_us: u64, part: Part, chunk: u32) {
        self.sent += 1;
        if part == Part::Data {
            let c = &mut self.chunks[chunk as usize];
            if std::mem::take(&mut c.waits) {
                self.again.pop_front();
                self.repeated += 1;
            } else {
                self.advance();
            }
            let c = &mut self.chunks[chunk as usize];
            c.sent_us = Some(now_us);
            c.tries += 1;
            if c.repeated {
                self.timeouts.push_back((now_us, chunk));
            }
        } else {
            self.advance();
        }
    }

    fn advance(&mut self) {
        let (sub, at) = self.next;
        self.next = match &self.subs {
            Some(subs) if at + 1 == (subs.data(sub).len() + subs.parity(sub).len()) as u32 => {
                (sub + 1, 0)
            }
            _ => (sub, at + 1),
        };
    }

    /// Handles a control message from the receiver.
    pub fn hear(&mut self, now_us: u64, message: &Control, path: &Path) {
        if self.outcome.is_some() {
            return;
        }
        self.heard_us = Some(now_us);
        self.ask_us = self.ask_us.max(now_us + path.rto_us());
        match message {
            Control::Ack { cumulative, bitmap, .. } => {
                self.acknowledged(now_us, *cumulative, bitmap)
            }
            Control::Nack { of: Missing::Chunks, ranges, .. } => {
                for chunk in self.named(ranges, self.chunks.len() as u32) {
                    // Younger than a round trip: the receiver could not know of it.
                    let old = |sent_us: u64| sent_us + path.rtt_us <= now_us;
                    if self.chunks[chunk as usize].sent_us.is_some_and(old) {
                        self.repeat(chunk);
                    }
                }
            }
            Control::Nack { of: Missing::Submessages, ranges, .. } => {
                let Some(subs) = &self.subs else { return };
                let (count, named) = (subs.count(), ranges);
                for sub in self.named(named, count) {
                    let data = self.subs.as_ref().map_or(0..0, |subs| subs.data(sub));
                    for chunk in data {
                        let c = &mut self.chunks[chunk as usize];
                        if !std::mem::replace(&mut c.repeated, true) && c.sent_us.is_some() {
                            self.repeat(chunk);
                        }
                    }
                }
            }
            Control::Done { missing, .. } => {
                self.missing = Some(*missing);
                self.outcome = Some(Outcome::Done);
            }
            Control::Abort { by_sender: false, reason, .. } => {
                self.outcome = Some(Outcome::Failed { by_peer: true, reason: *reason });
            }
            _ => {}
        }
    }

    /// What ranges name, as far as there is such a thing.
    fn named(&self, ranges: &[(u32, u32)], most: u32) -> Vec<u32> {
        let mut named: Vec<u32> = ranges
            .iter()
            .flat_map(|(first, n)| *first.min(&most)..first.saturating_add(*n).min(most))
            .collect();
        named.dedup();
        named.truncate(most as usize);
        named
    }

    /// How long the latest chunk took that was acknowledged and had been sent once: from the time
    /// when it was handed down. Given once.
    pub fn take_delay_us(&mut self) -> Option<u64> {
        self.delay_us.take()
    }

    fn acknowledged(&mut self, now_us: u64, cumulative: u32, bitmap: &[u8]) {
        let all = self.chunks.len() as u32;
        let selective =
            (0..bitmap.len() as u32 * 8).filter(|i| bitmap[*i as usize / 8] >> (i % 8) & 1 == 1);
        let here = (0..cumulative.min(all)).chain(selective.map(|i| cumulative.saturating_add(i)));
        for chunk in here.take_while(|chunk| *chunk < all) {
            let c = &mut self.chunks[chunk as usize];
            if std::mem::replace(&mut c.acked, true) {
                continue;
            }
            self.acked += 1;
            if let (1, Some(sent_us)) = (c.tries, c.sent_us) {
                let delay_us = now_us.saturating_sub(sent_us);
                self.delay_us =
                    Some(self.delay_us.map_or(delay_us, |least_us| least_us.min(delay_us)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_erasure::Code;

    const PATH: Path = Path { rtt_us: 1000, injection_ns: 0, least_rto_us: 10 };

    fn all(w: &mut Write, now_us: u64) -> Vec<(Part, u32)> {
        let mut out = Vec::new();
        while let Some(step) = w.next_step() {
            if let Step::Send(part, piece) = step {
                w.sent(now_us, part, piece.chunk);
                out.push((part, piece.chunk));
            }
        }
        out
    }

    fn data(chunks: impl IntoIterator<Item = u32>) -> Vec<(Part, u32)> {
        chunks.into_iter().map(|c| (Part::Data, c)).collect()
    }

    #[test]
    fn what_is_not_acknowledged_goes_again_after_the_timeout() {
        let mut w = Write::new(7, 500, 100, Scheme::SrRto, 1_000_000);
        assert!(w.poll(0, false, &PATH).is_none());
        assert!(w.poll(0, true, &PATH).is_none());
        assert_eq!(all(&mut w, 0), data(0..5));
        assert!(matches!(
            w.poll(0, true, &PATH),
            Some(Control::Begin { seq: 7, bytes: 500, scheme: 0, .. })
        ));
        w.hear(
            1000,
            &Control::Ack { seq: 7, stamp_us: 0, cumulative: 1, bitmap: vec![0b10] },
            &PATH,
        );
        w.poll(2999, true, &PATH);
        assert_eq!(all(&mut w, 2999), []);
        w.poll(3000, true, &PATH);
        assert_eq!(all(&mut w, 3000), data([1, 3, 4]));
        assert!(w.poll(4000, true, &PATH).is_some(), "it asks, too");
        w.hear(4000, &Control::Done { seq: 7, stamp_us: 0, missing: 0 }, &PATH);
        assert_eq!((w.outcome(), w.repeated), (Some(Outcome::Done), 3));
        assert_eq!(all(&mut w, 9000), []);
    }

    /// A round trip that turns out to be longer, or shorter: a timeout is never forgotten for it.
    #[test]
    fn a_timeout_outlives_a_change_of_the_round_trip() {
        let mut w = Write::new(0, 100, 100, Scheme::SrRto, 1_000_000);
        all(&mut w, 0);
        w.poll(0, true, &PATH);
        let longer = Path { rtt_us: 2000, ..PATH };
        w.poll(3000, true, &longer);
        assert_eq!(all(&mut w, 3000), []);
        w.poll(6000, true, &longer);
        assert_eq!(all(&mut w, 6000), data([0]));
        w.poll(6030, true, &Path { rtt_us: 10, ..PATH });
        assert_eq!(all(&mut w, 6030), data([0]));
    }

    #[test]
    fn a_nack_brings_back_what_is_older_than_a_round_trip() {
        let mut w = Write::new(0, 500, 100, Scheme::SrNack, 1_000_000);
        all(&mut w, 0);
        w.poll(0, true, &PATH);
        let nack = |ranges| Control::Nack { seq: 0, of: Missing::Chunks, ranges };
        w.hear(999, &nack(vec![(1, 2)]), &PATH);
        assert_eq!(all(&mut w, 999), []);
        w.hear(1000, &nack(vec![(1, 2), (2, 1), (4, 1_000_000), (u32::MAX, u32::MAX)]), &PATH);
        assert_eq!(all(&mut w, 1000), data([1, 2, 4]));
        w.hear(1500, &nack(vec![(0, 5)]), &PATH);
        assert_eq!(all(&mut w, 1500), data([0, 3]));
    }

    #[test]
    fn parity_follows_its_data_and_what_cannot_be_recovered_goes_again() {
        let code = Code::mds(4, 2).unwrap();
        let mut w = Write::new(0, 550, 100, Scheme::Ec(code), 1_000_000);
        w.poll(0, true, &PATH);
        let mut steps = Vec::new();
        while let Some(step) = w.next_step() {
            if let Step::Send(part, piece) = step {
                w.sent(0, part, piece.chunk);
            }
            steps.push(step);
        }
        let encodes: Vec<usize> =
            (0..steps.len()).filter(|i| matches!(steps[*i], Step::Encode(_))).collect();
        assert_eq!((encodes, steps.len()), (vec![4, 9], 4 + 1 + 2 + 2 + 1 + 1));
        w.poll(100_000, true, &PATH);
        assert_eq!(all(&mut w, 100_000), [], "nothing by itself");
        w.hear(
            100_000,
            &Control::Ack { seq: 0, stamp_us: 0, cumulative: 0, bitmap: vec![0b10_0000] },
            &PATH,
        );
        w.hear(
            100_000,
            &Control::Nack { seq: 0, of: Missing::Submessages, ranges: vec![(1, 9)] },
            &PATH,
        );
        assert_eq!(all(&mut w, 100_000), data([4]));
        w.poll(103_000, true, &PATH);
        assert_eq!(all(&mut w, 103_000), data([4]), "under Selective Repeat");
    }

    /// Asked for before its data goes; while it is made data goes, and no parity.
    #[test]
    fn parity_that_is_made_aside_is_sent_when_it_is_made() {
        let code = Code::mds(4, 2).unwrap();
        let write = Write::new(0, 800, 100, Scheme::Ec(code), 1_000_000);
        let mut w = write.encoding_ahead();
        for sub in 0..2 {
            assert_eq!(w.next_step(), Some(Step::Encode(sub)));
            w.parity_is_being_made();
            assert!(w.next_is_ready());
            assert_eq!(all(&mut w, 0), data(4 * sub..4 * sub + 4));
            assert!(w.is_encoding() && !w.next_is_ready());
            w.parity_is_made();
            assert!(w.next_is_ready());
            for chunk in 2 * sub..2 * sub + 2 {
                let Some(Step::Send(Part::Parity, piece)) = w.next_step() else { panic!("parity") };
                assert_eq!(piece.chunk, chunk);
                w.sent(0, Part::Parity, chunk);
            }
        }
        assert_eq!((w.next_step(), w.sent), (None, 12));
    }

    #[test]
    fn it_ends_by_its_deadline_and_when_the_receiver_gives_up() {
        let mut w = Write::new(3, 1, 100, Scheme::SrRto, 500);
        assert_eq!(
            w.poll(500, false, &PATH),
            Some(Control::Abort { seq: 3, by_sender: true, reason: Reason::Deadline })
        );
        assert_eq!(w.outcome(), Some(Outcome::Failed { by_peer: false, reason: Reason::Deadline }));
        let mut w = Write::new(3, 1, 100, Scheme::SrRto, 500);
        w.hear(1, &Control::Abort { seq: 3, by_sender: false, reason: Reason::TooLong }, &PATH);
        assert_eq!(w.outcome(), Some(Outcome::Failed { by_peer: true, reason: Reason::TooLong }));
    }
}
