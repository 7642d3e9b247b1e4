//! The reads of a queue pair: their start, what they say, their end.

use super::{Area, Echo, Failure, Refused, Reliable, Sdr, Segment, REMEMBERED};
use crate::copies::COPIES;
use crate::read::{Action, Bitmaps, Read};
use crate::write::Outcome;

/// A read that runs.
pub(super) struct Reading<B> {
    pub(super) of: Segment<B>,
    pub(super) seq: u64,
    pub(super) parity: Option<(u64, B)>,
    pub(super) read: Read,
}

impl<B: Clone> Reliable<B> {
    pub(super) fn start_reads(&mut self, now_us: u64, sdr: &mut impl Sdr<Buffer = B>) {
        let parity_bytes =
            u64::from(self.config.parity_chunks) * u64::from(self.layout.chunk_bytes);
        while let Some(of) = self.read_queue.front() {
            let started = (|| {
                let seq = match self.half_read {
                    Some(seq) => seq,
                    None => sdr.recv_post(
                        now_us,
                        Area { buffer: &of.buffer, offset: of.offset, bytes: of.bytes },
                    )?,
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
            // One that never begins after its first message was posted leaves a hole which only the
            // peer's deadline ends.
            let (Some(of), first) = (self.read_queue.pop_front(), self.half_read.take()) else {
                return;
            };
            match result {
                Ok((seq, parity)) => {
                    let parity_chunks =
                        if parity.is_some() { self.config.parity_chunks } else { 0 };
                    let read = Read::new(
                        seq,
                        of.bytes,
                        parity_chunks,
                        self.layout.chunk_bytes,
                        of.deadline_us,
                    );
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

    pub(super) fn run_reads(&mut self, now_us: u64, sdr: &mut impl Sdr<Buffer = B>) -> Option<u64> {
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

    pub(super) fn act(
        &mut self,
        now_us: u64,
        index: usize,
        action: Action,
        sdr: &mut impl Sdr<Buffer = B>,
    ) {
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
                // It was asked then; who asks again learns no round trip.
                let verdict = r.read.verdict();
                if let Some(interval_us) = r.read.copies_us() {
                    let at_us = now_us + interval_us;
                    self.echoes.push_back(Echo {
                        verdict: verdict.clone(),
                        at_us,
                        interval_us,
                        left: COPIES - 1,
                    });
                }
                self.over.push_back((r.seq, verdict));
                if self.over.len() > REMEMBERED {
                    self.over.pop_front();
                }
                let bytes = r.read.bytes().unwrap_or(0);
                self.ended(false, r.of.id, failure.map_or(Ok(bytes), Err));
            }
        }
    }

    /// Says verdicts again that are due, and when the next is.
    pub(super) fn run_echoes(
        &mut self,
        now_us: u64,
        sdr: &mut impl Sdr<Buffer = B>,
    ) -> Option<u64> {
        for echo in self.echoes.iter_mut().filter(|echo| echo.at_us <= now_us) {
            sdr.say(&echo.verdict);
            echo.at_us = now_us + echo.interval_us;
            echo.left -= 1;
        }
        self.echoes.retain(|echo| echo.left > 0);
        self.echoes.truncate(REMEMBERED);
        self.echoes.iter().map(|echo| echo.at_us).min()
    }

    /// Clears the keys, and recovers what is missing; gives the failure, if there is one.
    pub(super) fn end_read(
        &mut self,
        now_us: u64,
        r: &mut Reading<B>,
        finish: bool,
        sdr: &mut impl Sdr<Buffer = B>,
    ) -> Option<Failure> {
        let parity = r.parity.as_ref().map(|(seq, _)| *seq);
        for seq in [Some(r.seq), parity].into_iter().flatten() {
            if let Err(why) = sdr.recv_complete(now_us, seq) {
                return Some(Failure::Below(format!(
                    "the buffer cannot be taken from the network: {why:?}"
                )));
            }
        }
        if !finish {
            return match r.read.outcome() {
                Some(Outcome::Failed { by_peer, reason }) => Some(Failure::of(by_peer, reason)),
                _ => Some(Failure::Cancelled),
            };
        }
        let bitmaps = Bitmaps {
            data: sdr.bitmap(r.seq),
            parity: parity.map_or(&[][..], |seq| sdr.bitmap(seq)),
        };
        let losses = r.read.losses(bitmaps);
        let chunk = u64::from(self.layout.chunk_bytes);
        let bytes = r.read.bytes().unwrap_or(0);
        for loss in losses {
            let Some((_, scratch)) = &r.parity else { return Some(Failure::Scheme) };
            let begin = u64::from(loss.data.start) * chunk;
            let end = (u64::from(loss.data.end) * chunk).min(bytes);
            let data =
                Area { buffer: &r.of.buffer, offset: r.of.offset + begin, bytes: end - begin };
            let parity = Area {
                buffer: scratch,
                offset: u64::from(loss.parity.start) * chunk,
                bytes: loss.parity.len() as u64 * chunk,
            };
            if !sdr.recover(loss.code, data, parity, &loss.lost) {
                return Some(Failure::Below("what was received cannot be decoded".into()));
            }
            self.counts.recovered +=
                loss.lost.iter().filter(|lost| *lost < loss.data.len()).count() as u64;
        }
        None
    }
}
