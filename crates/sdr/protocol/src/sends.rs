//! The sends of a queue pair: messages from their beginning to the moment when the sender's buffer
//! is the user's again.
//!
//! A send is a message whose packets go into the receive of the same number, once that is clear
//! ([`crate::clearing`]). Its pieces are cut into *jobs* ([`crate::packets`]), one for each channel
//! that has a chunk of it; a channel's worker takes packets from its queue as its queue pair has
//! room.
//!
//! ```text
//!   started ── piece ──► pieces wait ── clear ──► jobs in the channels' queues ── all taken, and their work requests complete ──► idle
//!      └───────────────────────────────────────────── ended, and idle ──► finished: the buffer is the user's again
//! ```
//!
//! Fragments of an immediate that no packet of the receive can carry go in zero-length packets
//! behind it, with every piece; those of packets that were never sent, at the end.
//!
//! Invariants: no more messages are unfinished than there are slots; packets of a message are sent
//! in its generation only; a message is finished only when nothing that the sender posted for it is
//! outstanding.

use crate::attr::Layout;
use crate::board::immediate_base;
use crate::clearing::Cleared;
use crate::packets::{Job, Packet, Piece};
use std::collections::VecDeque;

/// Why something was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// As many messages are unfinished as there are slots.
    #[error("as many messages are unfinished as fit: try again when one is complete")]
    Full,
    /// There is no such message.
    #[error("there is no unfinished send of that number")]
    NoMessage,
    /// It has been ended.
    #[error("the send has been ended: nothing can be added")]
    Ended,
    /// It goes beyond the longest message.
    #[error("{bytes} bytes at chunk {chunk} go beyond the longest message, {most} bytes")]
    TooLong {
        /// Its bytes.
        bytes: u64,
        /// Its first chunk.
        chunk: u32,
        /// The longest.
        most: u64,
    },
    /// Too many pieces wait for the receive.
    #[error("{0} pieces of the message wait for its receive: try again when it is posted")]
    Waits(usize),
    /// No channel is left.
    #[error("every channel of the queue pair has failed")]
    Dead,
    /// An immediate where the split has no bits for any.
    #[error("the immediate's split has no bits for the user")]
    NoImmediate,
}

/// Pieces of one message that may wait for its receive.
const MAX_WAITING: usize = 1 << 12;

/// A message that is not finished.
#[derive(Debug)]
struct Message {
    imm: Option<u32>,
    waiting: Vec<Piece>,
    /// Fragments of the immediate that its packets have carried.
    carried: u32,
    ended: bool,
    failed: bool,
    /// Jobs in queues, and packets posted that are not complete.
    outstanding: u64,
}

/// How a send stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Not finished.
    Busy,
    /// Finished: its buffer is the user's again.
    Finished,
    /// Finished with an error: it did not fit the receive, or a channel failed.
    Failed,
}

/// The sends of a queue pair.
pub struct Sends {
    layout: Layout,
    /// What is known of the peer's receives.
    pub cleared: Cleared,
    first: u64,
    messages: VecDeque<Message>,
    queues: Vec<VecDeque<Job>>,
    /// Channels that carry nothing any more.
    dead: Vec<bool>,
}

impl Sends {
    /// None yet.
    pub fn new(layout: &Layout) -> Sends {
        let channels = usize::from(layout.attr().channels);
        Sends {
            layout: *layout,
            cleared: Cleared::default(),
            first: 0,
            messages: VecDeque::new(),
            queues: vec![VecDeque::new(); channels],
            dead: vec![false; channels],
        }
    }

    fn message(&mut self, seq: u64) -> Option<&mut Message> {
        self.messages.get_mut(seq.checked_sub(self.first)? as usize)
    }

    /// Begins a message, and gives its number.
    ///
    /// # Errors
    /// [`SendError::Full`], [`SendError::NoImmediate`], [`SendError::Dead`].
    pub fn start(&mut self, imm: Option<u32>) -> Result<u64, SendError> {
        if imm.is_some() && self.layout.attr().split.fragments() == 0 {
            return Err(SendError::NoImmediate);
        }
        if self.all_dead() {
            return Err(SendError::Dead);
        }
        if self.messages.len() >= self.layout.slots as usize {
            return Err(SendError::Full);
        }
        self.messages.push_back(Message {
            imm,
            waiting: Vec::new(),
            carried: 0,
            ended: false,
            failed: false,
            outstanding: 0,
        });
        Ok(self.first + self.messages.len() as u64 - 1)
    }

    /// Adds a piece.
    ///
    /// # Errors
    /// [`SendError`]; nothing has changed then.
    pub fn add(&mut self, seq: u64, piece: Piece) -> Result<(), SendError> {
        let most = self.layout.message_bytes;
        let end = u64::from(piece.chunk) * u64::from(self.layout.chunk_bytes) + piece.bytes;
        if end > most {
            return Err(SendError::TooLong { bytes: piece.bytes, chunk: piece.chunk, most });
        }
        let clear = self.cleared.of(seq);
        let index = seq.checked_sub(self.first).ok_or(SendError::NoMessage)?;
        let message = self.messages.get_mut(index as usize).ok_or(SendError::NoMessage)?;
        if message.ended {
            return Err(SendError::Ended);
        }
        if self.dead.iter().all(|dead| *dead) {
            return Err(SendError::Dead);
        }
        match clear {
            Some(bytes) => self.queue(seq, piece, bytes),
            None if message.waiting.len() >= MAX_WAITING => {
                return Err(SendError::Waits(MAX_WAITING))
            }
            None => message.waiting.push(piece),
        }
        Ok(())
    }

    /// Nothing will be added.
    ///
    /// # Errors
    /// [`SendError::NoMessage`].
    pub fn end(&mut self, seq: u64) -> Result<(), SendError> {
        let clear = self.cleared.of(seq);
        let message = self.message(seq).ok_or(SendError::NoMessage)?;
        message.ended = true;
        if let Some(bytes) = clear {
            self.add_fragments(seq, bytes);
        }
        Ok(())
    }

    /// The peer has cleared more: what waited for it goes into the queues.
    pub fn release(&mut self) {
        for seq in self.first..self.first + self.messages.len() as u64 {
            let Some(bytes) = self.cleared.of(seq) else { break };
            let Some(message) = self.message(seq) else { break };
            let (pieces, ended) = (std::mem::take(&mut message.waiting), message.ended);
            pieces.into_iter().for_each(|piece| self.queue(seq, piece, bytes));
            if ended {
                self.add_fragments(seq, bytes);
            }
        }
    }

    /// Cuts a piece into jobs.
    fn queue(&mut self, seq: u64, piece: Piece, receive_bytes: u64) {
        let layout = self.layout;
        let end = u64::from(piece.chunk) * u64::from(layout.chunk_bytes) + piece.bytes;
        let Some(message) = self.message(seq) else { return };
        if end > receive_bytes {
            message.failed = true;
            return;
        }
        let packets = layout.packets_of(receive_bytes);
        let imm = message.imm;
        let (chunks, first) = (layout.chunks_of(piece.bytes), piece.chunk * layout.chunk_packets);
        let fragments = layout.attr().split.fragments().max(1);
        for at in first..first + layout.packets_of(piece.bytes).min(fragments) {
            message.carried |= 1 << (at % fragments);
        }
        // Fragments that no packet of the receive can carry go with every piece, so that they are
        // sent again with it.
        let beyond = if imm.is_some() && packets < fragments {
            ((1u64 << fragments) - (1 << packets)) as u32
        } else {
            0
        };
        message.carried |= beyond;
        if beyond > 0 {
            self.push_fragments(seq, packets, beyond);
        }
        let channels = self.queues.len() as u32;
        for at in 0..chunks.min(channels) {
            let channel = self.channel(piece.chunk + at + piece.attempt);
            self.push(channel, Job::of_piece(seq, piece, imm, packets, at));
        }
    }

    fn push(&mut self, channel: usize, job: Job) {
        if let Some(message) = self.message(job.seq) {
            message.outstanding += 1;
        }
        self.queues[channel].push_back(job);
    }

    /// The channel of that number, or the next that lives.
    fn channel(&self, number: u32) -> usize {
        let n = self.queues.len();
        let wanted = number as usize % n;
        (0..n).map(|i| (wanted + i) % n).find(|channel| !self.dead[*channel]).unwrap_or(wanted)
    }

    /// What is left of the user's immediate goes behind the receive.
    fn add_fragments(&mut self, seq: u64, receive_bytes: u64) {
        let layout = self.layout;
        let fragments = layout.attr().split.fragments();
        let packets = layout.packets_of(receive_bytes);
        let Some(message) = self.message(seq) else { return };
        let (Some(_), false) = (message.imm, message.failed) else { return };
        let carried = std::mem::replace(&mut message.carried, u32::MAX);
        let missing = !carried & if fragments == 32 { u32::MAX } else { (1 << fragments) - 1 };
        if missing != 0 {
            self.push_fragments(seq, packets, missing);
        }
    }

    /// Fragments of the user's immediate, in zero-length packets behind a receive of so many
    /// packets.
    fn push_fragments(&mut self, seq: u64, packets: u32, which: u32) {
        let split = self.layout.attr().split;
        let base = immediate_base(&self.layout, packets);
        let imm = self.message(seq).and_then(|message| message.imm);
        // A message as long as the immediate can number has no room behind it; it has packets of
        // every fragment.
        if base + split.fragments() <= split.packets() {
            self.push(self.channel(seq as u32), Job::of_fragments(seq, imm, base, which));
        }
    }

    /// Takes up to `most` packets for a channel.
    pub fn take(&mut self, channel: usize, most: usize, out: &mut Vec<Packet>) {
        let layout = self.layout;
        let stride = self.queues.len() as u32;
        let mut left = most;
        while left > 0 {
            let Some(job) = self.queues[channel].front_mut() else { return };
            let seq = job.seq;
            let taken = job.packet(&layout, stride, self.cleared.rkey(seq, channel));
            let index = seq.wrapping_sub(self.first) as usize;
            let Some(message) = self.messages.get_mut(index) else {
                self.queues[channel].pop_front();
                continue;
            };
            match taken {
                Some(packet) => {
                    message.outstanding += 1;
                    left -= 1;
                    out.push(packet);
                }
                None => {
                    message.outstanding -= 1;
                    self.queues[channel].pop_front();
                }
            }
        }
    }

    /// Whether a channel has packets to send.
    pub fn has_work(&self, channel: usize) -> bool {
        !self.queues[channel].is_empty()
    }

    /// Jobs that wait in all queues together.
    pub fn backlog(&self) -> usize {
        self.queues.iter().map(VecDeque::len).sum()
    }

    /// Packets of a message are complete; or they failed with their channel.
    pub fn completed(&mut self, seq: u64, packets: u64, ok: bool) {
        if let Some(message) = self.message(seq) {
            message.outstanding = message.outstanding.saturating_sub(packets);
            message.failed |= !ok;
        }
    }

    /// A channel carries nothing any more: what waits there goes over the others, if there is one.
    pub fn channel_failed(&mut self, channel: usize) {
        if std::mem::replace(&mut self.dead[channel], true) {
            return;
        }
        let jobs = std::mem::take(&mut self.queues[channel]);
        let next = self.channel(channel as u32);
        for job in jobs {
            if self.dead[next] {
                let Some(message) = self.message(job.seq) else { continue };
                message.outstanding -= 1;
                message.failed = true;
            } else {
                self.queues[next].push_back(job);
            }
        }
        if self.all_dead() {
            for message in &mut self.messages {
                message.failed = true;
                message.waiting.clear();
            }
        }
    }

    /// Whether every channel has failed.
    pub fn all_dead(&self) -> bool {
        self.dead.iter().all(|dead| *dead)
    }

    /// Drops what waits of a message: nobody needs it any more. What has been posted is still
    /// outstanding.
    pub fn drop_rest(&mut self, seq: u64) {
        let mut dropped = 0;
        for queue in &mut self.queues {
            let before = queue.len();
            queue.retain(|job| job.seq != seq);
            dropped += (before - queue.len()) as u64;
        }
        if let Some(message) = self.message(seq) {
            message.waiting.clear();
            message.outstanding -= dropped;
        }
    }

    /// How a message stands. One that has been finished and forgotten is finished.
    pub fn status(&self, seq: u64) -> Status {
        let Some(index) = seq.checked_sub(self.first) else { return Status::Finished };
        match self.messages.get(index as usize) {
            Some(m) if m.outstanding > 0 || !(m.ended && m.waiting.is_empty() || m.failed) => {
                Status::Busy
            }
            Some(m) if m.failed => Status::Failed,
            _ => Status::Finished,
        }
    }

    /// Whether a message has begun and is not forgotten.
    pub fn is_known(&self, seq: u64) -> bool {
        seq.checked_sub(self.first).is_some_and(|index| index < self.messages.len() as u64)
    }

    /// Forgets finished messages, the oldest first, so that others can begin; `keep`: one whose
    /// status somebody wants to know.
    pub fn forget(&mut self, keep: impl Fn(u64) -> bool) {
        while !self.messages.is_empty()
            && self.status(self.first) != Status::Busy
            && !keep(self.first)
        {
            self.messages.pop_front();
            self.first += 1;
        }
        self.cleared.forget(self.first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::Attr;
    use crate::board::Board;
    use crate::control::Control;
    use crate::imm::Split;
    use crate::packets::Local;

    fn sends(channels: u8) -> Sends {
        sends_with(channels, Split::default())
    }

    fn sends_with(channels: u8, split: Split) -> Sends {
        let attr = Attr {
            split,
            chunk_log2: 8,
            in_flight_log2: 14,
            messages_log2: 2,
            mtu_bytes: 64,
            channels,
            ..Attr::default()
        };
        Sends::new(&Layout::new(&attr).unwrap())
    }

    fn piece(chunk: u32, bytes: u64) -> Piece {
        Piece { chunk, bytes, local: Local { addr: 1000, lkey: 1 }, attempt: 0 }
    }

    fn clear(s: &mut Sends, bytes: &[u64]) {
        let next = match s.cleared.on_clear(0, 0, &[], &[], 4) {
            Control::Cleared { next, .. } => next,
            other => panic!("{other:?}"),
        };
        s.cleared.on_clear(next, 0, bytes, &[], 4);
        s.release();
    }

    fn all(s: &mut Sends) -> Vec<(usize, Packet)> {
        let mut got = Vec::new();
        for channel in 0..s.queues.len() {
            let mut out = Vec::new();
            s.take(channel, 1000, &mut out);
            got.extend(out.into_iter().map(|p| (channel, p)));
        }
        got
    }

    /// Whatever the lengths of message and receive and the channels: what is sent makes every chunk
    /// of the message whole, and the immediate.
    #[test]
    fn what_is_sent_makes_every_chunk_whole() {
        let splits =
            [Split::default(), Split::new(13, 18, 1).unwrap(), Split::new(8, 16, 8).unwrap()];
        for (channels, split) in [1, 3].into_iter().flat_map(|c| splits.map(|s| (c, s))) {
            for bytes in [0, 1, 64, 65, 256, 257, 700, 1024, 4096] {
                for receive in [bytes, 4096] {
                    let mut s = sends_with(channels, split);
                    let board = Board::new(&s.layout);
                    let seq = s.start(Some(0x1234_5678)).unwrap();
                    s.add(seq, piece(0, bytes)).unwrap();
                    s.end(seq).unwrap();
                    assert!(all(&mut s).is_empty(), "it is not clear yet");
                    clear(&mut s, &[receive]);
                    board.begin(0, receive);
                    let packets = all(&mut s);
                    for (channel, p) in &packets {
                        assert!(
                            p.bytes == 0
                                || (p.local.addr - 1000) % 64 == 0
                                    && p.local.addr - 1000 == p.remote
                        );
                        board.arrive(0, p.imm);
                        let chunk = s.layout.attr().split.unpack(p.imm).offset / 4;
                        assert!(chunk % u32::from(channels) == *channel as u32 || p.bytes == 0);
                    }
                    let sum: u64 = packets.iter().map(|(_, p)| u64::from(p.bytes)).sum();
                    assert_eq!(sum, bytes);
                    let chunks = s.layout.chunks_of(bytes);
                    assert!(
                        (0..chunks).all(|c| board.has(0, c)),
                        "{bytes} of {receive} over {channels}"
                    );
                    assert!(chunks == 16 || !board.has(0, chunks));
                    assert_eq!(board.immediate(0), Some(0x1234_5678), "{bytes} of {receive}");
                    assert_eq!(s.status(0), Status::Busy);
                    s.completed(0, packets.len() as u64, true);
                    assert_eq!(s.status(0), Status::Finished);
                    s.forget(|_| false);
                }
            }
        }
    }

    #[test]
    fn pieces_that_are_sent_again_go_over_the_next_channel_and_dead_ones_are_passed_over() {
        let mut s = sends(3);
        clear(&mut s, &[4096, 4096]);
        let seq = s.start(None).unwrap();
        s.add(seq, Piece { attempt: 1, ..piece(1, 256) }).unwrap();
        assert!(all(&mut s).iter().all(|(channel, _)| *channel == 2));
        s.add(seq, piece(2, 256)).unwrap();
        s.channel_failed(2);
        assert_eq!(all(&mut s).iter().map(|(channel, _)| *channel).collect::<Vec<_>>(), [0; 4]);
        s.add(seq, Piece { attempt: 3, ..piece(2, 256) }).unwrap();
        assert_eq!(all(&mut s).len(), 4);
        s.completed(seq, 12, true);
        assert_eq!(s.status(seq), Status::Busy, "it has not been ended");
        s.end(seq).unwrap();
        assert_eq!(s.status(seq), Status::Finished);
        let seq = s.start(None).unwrap();
        s.add(seq, piece(0, 4096)).unwrap();
        s.channel_failed(0);
        s.channel_failed(1);
        assert!(s.all_dead() && s.status(seq) == Status::Failed);
        assert_eq!(s.add(seq, piece(0, 1)), Err(SendError::Dead));
    }

    #[test]
    fn limits_are_kept() {
        let mut s = sends(1);
        assert_eq!(s.add(0, piece(0, 1)), Err(SendError::NoMessage));
        let seqs: Vec<u64> = (0..4).map(|_| s.start(None).unwrap()).collect();
        assert_eq!((seqs, s.start(None)), (vec![0, 1, 2, 3], Err(SendError::Full)));
        assert!(matches!(s.add(0, piece(1, 4000)), Err(SendError::TooLong { most: 4096, .. })));
        s.add(0, piece(0, 300)).unwrap();
        clear(&mut s, &[299, 4096]);
        assert_eq!(s.status(0), Status::Failed, "it does not fit the receive");
        s.end(1).unwrap();
        assert_eq!(s.add(1, piece(0, 1)), Err(SendError::Ended));
        s.forget(|_| false);
        assert_eq!(
            (s.start(None), s.start(None), s.start(None)),
            (Ok(4), Ok(5), Err(SendError::Full))
        );
    }
}
