//! The writes of a queue pair: their start, their chunks in turns, their end.

use super::{Area, Encoding, Failure, Refused, Reliable, Sdr, Segment};
use crate::adapt::Situation;
use crate::write::{Outcome, Part, Step, Write};
use unbroken_sdr_model::Scheme;

/// A write that runs.
pub(super) struct Writing<B> {
    pub(super) of: Segment<B>,
    pub(super) seq: u64,
    pub(super) parity: Option<(u64, Option<B>)>,
    pub(super) write: Write,
    pub(super) stopped: bool,
    pub(super) stamp_us: u64,
}

impl<B: Clone> Reliable<B> {
    pub(super) fn start_writes(&mut self, now_us: u64, sdr: &mut impl Sdr<Buffer = B>) {
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
            let (Some(of), first) = (self.write_queue.pop_front(), self.half_written.take()) else {
                return;
            };
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

    /// Data chunks of the writes that have begun, or wait for their turn.
    fn chunks_under_way(&self) -> u64 {
        let begun = self.writes.iter().map(|w| w.of.bytes);
        let all = begun.chain(self.write_queue.iter().map(|of| of.bytes));
        all.map(|bytes| u64::from(self.layout.chunks_of(bytes))).sum()
    }

    fn begin_write(
        &mut self,
        of: Segment<B>,
        seq: u64,
        parity: Option<u64>,
        sdr: &mut impl Sdr<Buffer = B>,
    ) {
        let chunks = u64::from(self.layout.chunks_of(of.bytes));
        let situation = Situation {
            rtt_us: self.way.least_us().unwrap_or(self.path().rtt_us),
            injection_ns: self.injection_ns().unwrap_or(0),
            chunks,
            all_chunks: chunks + self.chunks_under_way(),
            parity_chunks: self.config.parity_chunks.into(),
        };
        let mut scheme = self.chosen.scheme(&self.estimate, of.choice, &situation);
        let mut scratch = None;
        if let Scheme::Ec(code) = scheme {
            let parity_chunks =
                crate::submessages::Submessages::new(code, chunks as u32).parity_chunks();
            scratch = sdr.scratch(u64::from(parity_chunks) * u64::from(self.layout.chunk_bytes));
            if scratch.is_none() || of.bytes == 0 || parity.is_none() {
                // Nothing to hold the parity, or nothing to make it of: as reliable, only slower.
                scheme = Scheme::SrNack;
                scratch = None;
            }
        }
        self.counts.written += 1;
        self.counts.coded += u64::from(scratch.is_some());
        let mut write = Write::new(seq, of.bytes, self.layout.chunk_bytes, scheme, of.deadline_us);
        if sdr.encodes_aside() {
            write = write.encoding_ahead();
        }
        let parity = parity.map(|seq| (seq, scratch));
        self.writes.push_back(Writing { of, seq, parity, write, stopped: false, stamp_us: 0 });
    }

    pub(super) fn run_writes(
        &mut self,
        now_us: u64,
        sdr: &mut impl Sdr<Buffer = B>,
    ) -> Option<u64> {
        while let Some(seq) = sdr.encoded() {
            if let Some(w) = self.writes.iter_mut().find(|w| w.seq == seq) {
                w.write.parity_is_made();
            }
        }
        let path = self.path();
        let mut next_us = None::<u64>;
        let mut before =
            |at_us: u64| next_us = Some(next_us.map_or(at_us, |next_us| next_us.min(at_us)));
        let (mut index, mut waits) = (0, false);
        while index < self.writes.len() {
            let w = &mut self.writes[index];
            let clear =
                sdr.is_clear(w.seq) && w.parity.as_ref().is_none_or(|(seq, _)| sdr.is_clear(*seq));
            if let Some(message) = w.write.poll(now_us, clear, &path) {
                sdr.say(&message);
            }
            if clear && w.write.outcome().is_none() {
                let paced = path.injection_ns > 0;
                // What could not leave in time leaves now, but time that is long gone does not make
                // a burst.
                let slack_ns = (8 * path.injection_ns).max(1_000_000);
                while sdr.has_room() && (!paced || self.inject_at_ns <= 1000 * now_us) {
                    let Some(bytes) = w.step(now_us, self.layout.chunk_bytes, sdr) else { break };
                    self.injection.handed(bytes);
                    self.inject_at_ns =
                        self.inject_at_ns.max((1000 * now_us).saturating_sub(slack_ns))
                            + path.injection_ns;
                }
                waits |= w.write.next_is_ready() && !sdr.has_room();
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
        self.injection.looked(now_us, waits);
        next_us
    }

    /// The write has its outcome: whether nothing of it is outstanding, and it is gone.
    pub(super) fn end_write(
        &mut self,
        index: usize,
        outcome: Outcome,
        sdr: &mut impl Sdr<Buffer = B>,
    ) -> bool {
        let w = &mut self.writes[index];
        let parity = w.parity.as_ref().map(|(seq, _)| *seq);
        if !std::mem::replace(&mut w.stopped, true) {
            sdr.send_stop(w.seq);
            parity.into_iter().for_each(|seq| sdr.send_stop(seq));
        }
        if w.write.is_encoding() {
            // Its buffer is being read.
            return false;
        }
        // Both are asked, so that either is forgotten as soon as it can be.
        let idle =
            [Some(w.seq), parity].into_iter().flatten().filter(|seq| !sdr.send_idle(*seq)).count()
                == 0;
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
}

impl<B: Clone> Writing<B> {
    /// Does the next step, and gives the bytes that were taken; `None`: there is none, or it was
    /// not taken.
    fn step(
        &mut self,
        now_us: u64,
        chunk_bytes: u32,
        sdr: &mut impl Sdr<Buffer = B>,
    ) -> Option<u64> {
        let chunk = u64::from(chunk_bytes);
        loop {
            match self.write.next_step() {
                None => return None,
                Some(Step::Encode(sub)) => {
                    let subs = *self.write.submessages()?;
                    let Some((_, Some(scratch))) = &self.parity else { return None };
                    let (data, parity) = (subs.data(sub), subs.parity(sub));
                    let begin = u64::from(data.start) * chunk;
                    let end = (u64::from(data.end) * chunk).min(self.of.bytes);
                    let of_parity = (u64::from(parity.start) * chunk, parity.len() as u64 * chunk);
                    let made = sdr.encode(
                        self.seq,
                        subs.code(sub),
                        Area {
                            buffer: &self.of.buffer,
                            offset: self.of.offset + begin,
                            bytes: end - begin,
                        },
                        Area { buffer: scratch, offset: of_parity.0, bytes: of_parity.1 },
                    );
                    if made == Encoding::Aside {
                        self.write.parity_is_being_made();
                    }
                }
                Some(Step::Send(part, piece)) => {
                    let at = u64::from(piece.chunk) * chunk;
                    let (seq, area) = match (part, &self.parity) {
                        (Part::Parity, Some((seq, Some(scratch)))) => {
                            (*seq, Area { buffer: scratch, offset: at, bytes: piece.bytes })
                        }
                        (Part::Parity, _) => return None,
                        (Part::Data, _) => (
                            self.seq,
                            Area {
                                buffer: &self.of.buffer,
                                offset: self.of.offset + at,
                                bytes: piece.bytes,
                            },
                        ),
                    };
                    if !sdr.send(seq, area, &piece) {
                        return None;
                    }
                    self.write.sent(now_us, part, piece.chunk);
                    return Some(piece.bytes);
                }
            }
        }
    }
}
