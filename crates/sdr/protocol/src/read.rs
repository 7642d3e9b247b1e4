//! The receiver of one reliable write.
//!
//! ```text
//!   posted ── Begin ──► receiving ── all chunks, or enough of every submessage ──► ending (keys cleared, then recovered in place) ──► over: Done
//!      │                    │
//!      └──── the deadline, or the sender gives it up: keys cleared ──► over: Abort
//! ```
//!
//! The read polls the chunk bitmap. With Selective Repeat it acknowledges new chunks, cumulatively
//! and with a bitmap. With NACKs it also names chunks that many others have overtaken, and all
//! missing chunks when no more arrive. With a code it sends nothing until every submessage can be
//! recovered, or until the fallback timeout `FTO = (M + ⌈M·m/k⌉)·T_inj + β·RTT` with β = 1 has
//! passed. The timeout is counted from the first chunk or, if none has arrived, from the sender's
//! second question. After it, the read names the submessages that cannot be recovered, and
//! acknowledges their chunks that have arrived.
//!
//! Before the read sends *Done*, the network can no longer write to the buffer. So recovery in
//! place never races with a late packet.
//!
//! Invariants: *Done* is sent only when all bytes are in place; a question about a finished message
//! is answered with its outcome.

use crate::control::{Control, Missing, Reason, MAX_BITMAP, MAX_RANGES};
use crate::copies::{self, COPIES, LEAST_US, MOST_US};
use crate::submessages::Submessages;
use crate::write::{scheme_of, Outcome};
use std::sync::atomic::{AtomicU64, Ordering::Acquire};
use unbroken_erasure::{ChunkSet, Code};
use unbroken_sdr_model::Scheme;

/// The number of chunks that may overtake another one before it counts as lost.
const REORDERED: u32 = 8;

/// The bitmaps of the two messages of a write.
#[derive(Clone, Copy)]
pub struct Bitmaps<'a> {
    /// The bitmap of the data.
    pub data: &'a [AtomicU64],
    /// The bitmap of the parity; empty if no parity message was posted.
    pub parity: &'a [AtomicU64],
}

fn has(words: &[AtomicU64], chunk: u32) -> bool {
    words.get(chunk as usize / 64).is_some_and(|word| word.load(Acquire) >> (chunk % 64) & 1 == 1)
}

/// What the sender has announced.
#[derive(Clone, Copy, Debug)]
struct Begun {
    bytes: u64,
    chunks: u32,
    scheme: Scheme,
    subs: Option<Submessages>,
    injection_ns: u64,
    rtt_us: u64,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this message.
    Say(Control),
    /// All required chunks have arrived: clear the keys of both messages, recover the chunks that
    /// [`Read::losses`] then names, and call [`Read::finished`].
    Finish,
    /// The write has failed: clear the keys of both messages.
    Fail,
}

/// A reliable write, as its receiver sees it.
pub struct Read {
    seq: u64,
    most_bytes: u64,
    parity_chunks: u32,
    chunk_bytes: u32,
    deadline_us: u64,
    begun: Option<Begun>,
    /// The stamp of the sender's latest question; 0: it has been answered. A later answer would not
    /// measure the round trip.
    stamp_us: u64,
    /// The stamp of its first question.
    first_stamp_us: u64,
    /// All data chunks before this one have arrived.
    cumulative: u32,
    /// The number that had arrived at the last poll, and when it changed.
    seen: u32,
    changed_us: u64,
    first_us: Option<u64>,
    asked_again: bool,
    /// Whether to acknowledge: there was a question, or there are new chunks.
    owes: bool,
    ack_us: u64,
    nack_us: u64,
    /// How often submessages have been named.
    nacks: u32,
    /// All submessages before this one can be recovered.
    recoverable: u32,
    outcome: Option<Outcome>,
    missing: u32,
}

impl Read {
    /// Creates a read for a receive in message `seq`, with its length and its room for parity
    /// chunks.
    pub fn new(
        seq: u64,
        most_bytes: u64,
        parity_chunks: u32,
        chunk_bytes: u32,
        deadline_us: u64,
    ) -> Read {
        Read {
            seq,
            most_bytes,
            parity_chunks,
            chunk_bytes,
            deadline_us,
            begun: None,
            stamp_us: 0,
            first_stamp_us: 0,
            cumulative: 0,
            seen: 0,
            changed_us: 0,
            first_us: None,
            asked_again: false,
            owes: false,
            ack_us: 0,
            nack_us: 0,
            nacks: 0,
            recoverable: 0,
            outcome: None,
            missing: 0,
        }
    }

    /// The outcome, if the read has ended.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome
    }

    /// The length of the write in bytes, once it is known.
    pub fn bytes(&self) -> Option<u64> {
        self.begun.map(|b| b.bytes)
    }

    /// Handles a control message from the sender.
    pub fn hear(&mut self, message: &Control) -> Option<Action> {
        match message {
            Control::Begin { stamp_us, .. } if self.outcome.is_some() => {
                self.stamp_us = *stamp_us;
                Some(Action::Say(self.verdict()))
            }
            Control::Begin { bytes, scheme, injection_ns, rtt_us, stamp_us, .. } => {
                self.stamp_us = *stamp_us;
                self.owes = true;
                self.ack_us = 0;
                if let Some(begun) = &mut self.begun {
                    // All that was sent before the first answer may have been lost: then it counts
                    // from the second question, which is no copy of the first.
                    self.asked_again |=
                        *stamp_us >= self.first_stamp_us.saturating_add((*rtt_us).into());
                    (begun.rtt_us, begun.injection_ns) = ((*rtt_us).into(), (*injection_ns).into());
                    return None;
                }
                self.first_stamp_us = *stamp_us;
                self.begin(*bytes, *scheme, (*injection_ns).into(), (*rtt_us).into())
            }
            Control::Abort { by_sender: true, reason, .. } if self.outcome.is_none() => {
                self.outcome = Some(Outcome::Failed { by_peer: true, reason: *reason });
                Some(Action::Fail)
            }
            _ => None,
        }
    }

    fn begin(&mut self, bytes: u64, scheme: u32, injection_ns: u64, rtt_us: u64) -> Option<Action> {
        let chunks = bytes.div_ceil(self.chunk_bytes.into()).max(1);
        if bytes > self.most_bytes {
            return self.refuse(Reason::TooLong);
        }
        let Some(scheme) = scheme_of(scheme) else { return self.refuse(Reason::Scheme) };
        let subs = match scheme {
            Scheme::Ec(code) => Some(Submessages::new(code, chunks as u32)),
            _ => None,
        };
        if subs.is_some_and(|subs| subs.parity_chunks() > self.parity_chunks || bytes == 0) {
            return self.refuse(Reason::Scheme);
        }
        self.begun =
            Some(Begun { bytes, chunks: chunks as u32, scheme, subs, injection_ns, rtt_us });
        None
    }

    fn refuse(&mut self, reason: Reason) -> Option<Action> {
        self.outcome = Some(Outcome::Failed { by_peer: false, reason });
        Some(Action::Fail)
    }

    /// The outcome, as a message for the sender.
    pub fn verdict(&mut self) -> Control {
        match self.outcome {
            Some(Outcome::Failed { reason, .. }) => {
                Control::Abort { seq: self.seq, by_sender: false, reason }
            }
            _ => Control::Done {
                seq: self.seq,
                stamp_us: std::mem::take(&mut self.stamp_us),
                missing: self.missing,
            },
        }
    }

    /// The interval at which to repeat the verdict; `None`: send it once.
    pub fn copies_us(&self) -> Option<u64> {
        copies::interval_us(self.begun?.rtt_us)
    }

    /// Polls the bitmaps. After [`Action::Finish`] and [`Action::Fail`] there are no further
    /// actions.
    pub fn poll(&mut self, now_us: u64, bitmaps: Bitmaps<'_>, out: &mut Vec<Action>) {
        if self.outcome.is_some() {
            return;
        }
        if now_us >= self.deadline_us {
            self.outcome = Some(Outcome::Failed { by_peer: false, reason: Reason::Deadline });
            out.extend([Action::Fail, Action::Say(self.verdict())]);
            return;
        }
        self.look(now_us, bitmaps);
        let Some(begun) = self.begun else { return };
        let all = match &begun.subs {
            Some(subs) => self.all_recoverable(subs, bitmaps),
            None => self.cumulative >= begun.chunks,
        };
        if all {
            out.push(Action::Finish);
            return;
        }
        match begun.scheme {
            Scheme::SrRto => self.acknowledge(now_us, &begun, bitmaps, out),
            Scheme::SrNack => {
                self.acknowledge(now_us, &begun, bitmaps, out);
                self.complain(now_us, &begun, bitmaps, out);
            }
            Scheme::Ec(_) => self.fall_back(now_us, &begun, bitmaps, out),
        }
    }

    /// Notes what is new.
    fn look(&mut self, now_us: u64, bitmaps: Bitmaps<'_>) {
        let chunks = self.begun.map_or(bitmaps.data.len() as u32 * 64, |b| b.chunks);
        while self.cumulative < chunks && has(bitmaps.data, self.cumulative) {
            self.cumulative += 1;
        }
        let count = |words: &[AtomicU64]| {
            words.iter().map(|word| word.load(Acquire).count_ones()).sum::<u32>()
        };
        let seen = count(bitmaps.data) + count(bitmaps.parity);
        if seen != self.seen {
            (self.seen, self.changed_us, self.owes) = (seen, now_us, true);
            self.first_us.get_or_insert(now_us);
        }
        if self.asked_again {
            self.first_us.get_or_insert(now_us);
        }
    }

    fn all_recoverable(&mut self, subs: &Submessages, bitmaps: Bitmaps<'_>) -> bool {
        while self.recoverable < subs.count() && recovers(subs, self.recoverable, bitmaps) {
            self.recoverable += 1;
        }
        self.recoverable == subs.count()
    }

    fn acknowledge(
        &mut self,
        now_us: u64,
        begun: &Begun,
        bitmaps: Bitmaps<'_>,
        out: &mut Vec<Action>,
    ) {
        if !self.owes || now_us < self.ack_us {
            return;
        }
        self.owes = false;
        self.ack_us = now_us + copies::part_us(begun.rtt_us);
        let left = begun.chunks.saturating_sub(self.cumulative).div_ceil(8) as usize;
        let mut bitmap: Vec<u8> = (0..left.min(MAX_BITMAP) as u32)
            .map(|byte| {
                (0..8).fold(0, |b, i| {
                    b | u8::from(has(bitmaps.data, self.cumulative + 8 * byte + i)) << i
                })
            })
            .collect();
        bitmap.truncate(bitmap.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
        let (seq, stamp_us, cumulative) =
            (self.seq, std::mem::take(&mut self.stamp_us), self.cumulative);
        out.push(Action::Say(Control::Ack { seq, stamp_us, cumulative, bitmap }));
    }

    /// Names chunks that are probably lost.
    fn complain(
        &mut self,
        now_us: u64,
        begun: &Begun,
        bitmaps: Bitmaps<'_>,
        out: &mut Vec<Action>,
    ) {
        let interval_us = copies::part_us(begun.rtt_us);
        if self.first_us.is_none() || now_us < self.nack_us {
            return;
        }
        let quiet_us = (2 * interval_us).max(4 * begun.injection_ns / 1000);
        let quiet = now_us >= self.changed_us + quiet_us;
        let highest = (0..begun.chunks).rev().find(|chunk| has(bitmaps.data, *chunk)).unwrap_or(0);
        let end = if quiet { begun.chunks } else { highest.saturating_sub(REORDERED) };
        let ranges = ranges((self.cumulative..end).filter(|chunk| !has(bitmaps.data, *chunk)));
        if !ranges.is_empty() {
            self.nack_us = now_us + interval_us;
            out.push(Action::Say(Control::Nack { seq: self.seq, of: Missing::Chunks, ranges }));
        }
    }

    /// With a code: once the fallback timeout has passed, acknowledges, and names submessages that
    /// cannot be recovered.
    fn fall_back(
        &mut self,
        now_us: u64,
        begun: &Begun,
        bitmaps: Bitmaps<'_>,
        out: &mut Vec<Action>,
    ) {
        let (Some(subs), Some(first_us)) = (&begun.subs, self.first_us) else {
            // Nothing has come, but the sender asks: it hears that somebody lives.
            self.acknowledge(now_us, begun, bitmaps, out);
            return;
        };
        let injected = u64::from(begun.chunks + subs.parity_chunks()) * begun.injection_ns / 1000;
        let due_us = first_us + injected + begun.rtt_us.max(LEAST_US);
        // Without a rate nobody knows how long it takes: as long as chunks come, it is waited.
        let due_us = if begun.injection_ns == 0 {
            due_us.max(self.changed_us + begun.rtt_us.max(LEAST_US))
        } else {
            due_us
        };
        if now_us < due_us {
            // A question is answered, so that the sender knows how far it is.
            if self.stamp_us > 0 && self.owes && self.ack_us == 0 {
                self.acknowledge(now_us, begun, bitmaps, out);
            }
            return;
        }
        self.acknowledge(now_us, begun, bitmaps, out);
        if now_us >= self.nack_us {
            let ranges = ranges(
                (self.recoverable..subs.count()).filter(|sub| !recovers(subs, *sub, bitmaps)),
            );
            self.nacks += 1;
            let copy_us = copies::interval_us(begun.rtt_us).filter(|_| self.nacks < COPIES);
            self.nack_us = now_us + copy_us.unwrap_or((3 * begun.rtt_us).max(MOST_US));
            out.push(Action::Say(Control::Nack {
                seq: self.seq,
                of: Missing::Submessages,
                ranges,
            }));
        }
    }

    /// The next deadline; chunks may cause actions before it.
    pub fn deadline_us(&self, now_us: u64) -> u64 {
        match &self.begun {
            Some(begun) => self.deadline_us.min(now_us + copies::part_us(begun.rtt_us)),
            None => self.deadline_us,
        }
    }

    /// The losses of each submessage, once the keys are cleared: its code, its data and parity
    /// chunks, and which of these (data first) have not arrived.
    pub fn losses(&mut self, bitmaps: Bitmaps<'_>) -> Vec<Loss> {
        let Some(begun) = self.begun else { return Vec::new() };
        let Some(subs) = begun.subs else { return Vec::new() };
        let mut all = Vec::new();
        for sub in 0..subs.count() {
            let lost = lost(&subs, sub, bitmaps);
            let data = subs.data(sub);
            self.missing += lost.iter().filter(|chunk| *chunk < data.len()).count() as u32;
            if lost.iter().any(|chunk| chunk < data.len()) {
                all.push(Loss { code: subs.code(sub), data, parity: subs.parity(sub), lost });
            }
        }
        all
    }

    /// Records that all bytes are in place, and returns the message to send.
    pub fn finished(&mut self) -> Control {
        self.outcome = Some(Outcome::Done);
        self.verdict()
    }
}

/// The chunks of a submessage to recover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Its code.
    pub code: Code,
    /// Its chunks in the data message.
    pub data: std::ops::Range<u32>,
    /// Its chunks in the parity message.
    pub parity: std::ops::Range<u32>,
    /// The chunks that have not arrived: first data, then parity.
    pub lost: ChunkSet,
}

fn lost(subs: &Submessages, sub: u32, bitmaps: Bitmaps<'_>) -> ChunkSet {
    let data = subs.data(sub).map(|chunk| has(bitmaps.data, chunk));
    let parity = subs.parity(sub).map(|chunk| has(bitmaps.parity, chunk));
    data.chain(parity).enumerate().filter(|(_, here)| !here).map(|(chunk, _)| chunk).collect()
}

fn recovers(subs: &Submessages, sub: u32, bitmaps: Bitmaps<'_>) -> bool {
    subs.code(sub).recovers(&lost(subs, sub, bitmaps))
}

/// Converts chunks to ranges, as many as fit into a message.
fn ranges(items: impl Iterator<Item = u32>) -> Vec<(u32, u32)> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for item in items {
        let full = ranges.len() == MAX_RANGES;
        match ranges.last_mut() {
            Some((first, n)) if *first + *n == item => *n += 1,
            _ if full => break,
            _ => ranges.push((item, 1)),
        }
    }
    ranges
}
