//! From pieces of messages to packets: one write with immediate for each packet, so that reordering
//! on the way drops nothing.
//!
//! ```text
//!   piece   chunk 5 ────── chunk 6 ────── chunk 7 ────── chunk 8        (two channels)
//!             │              │              │              │
//!   jobs    channel 1 ─────────────────► channel 1
//!                          channel 0 ─────────────────► channel 0
//! ```
//!
//! A chunk that the message does not fill, where the receive goes on behind it, is filled up with
//! zero-length packets: so its bit is set.

use crate::attr::Layout;
use crate::imm::Fields;

/// Where the bytes of a piece lie, as the shell counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Local {
    /// Address.
    pub addr: u64,
    /// The region's key.
    pub lkey: u32,
}

/// A part of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// The chunk of the receive that it begins with.
    pub chunk: u32,
    /// Its bytes.
    pub bytes: u64,
    /// Where they lie.
    pub local: Local,
    /// How often it was sent before: it goes over another channel then.
    pub attempt: u32,
}

/// A packet to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Its message.
    pub seq: u64,
    /// The generation's queue pair carries it, and its root key names the place unless `rkey` does.
    pub generation: u8,
    /// Where in the root key; where the message has keys of its own, where in the message.
    pub remote: u64,
    /// The message's key for the channel, where it has some.
    pub rkey: Option<u32>,
    /// Where its bytes lie.
    pub local: Local,
    /// How many.
    pub bytes: u32,
    /// The immediate.
    pub imm: u32,
}

/// The packets of a piece that one channel carries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) seq: u64,
    piece: Piece,
    imm: Option<u32>,
    /// Packets of the receive.
    packets: u32,
    /// The chunk of the piece that is next, and the packet in it.
    at: u32,
    within: u32,
    /// Fragments of the immediate behind the receive, and nothing else: where they begin, and a bit
    /// for each.
    fragments_only: Option<(u32, u32)>,
}

impl Job {
    /// What a channel carries of a piece: its chunk `at`, and every one that is the channel's
    /// behind it. The receive has so many packets.
    pub(crate) fn of_piece(seq: u64, piece: Piece, imm: Option<u32>, packets: u32, at: u32) -> Job {
        Job { seq, piece, imm, packets, at, within: 0, fragments_only: None }
    }

    /// Fragments of the user's immediate alone, in zero-length packets from `base` on: a bit for
    /// each.
    pub(crate) fn of_fragments(seq: u64, imm: Option<u32>, base: u32, which: u32) -> Job {
        Job {
            seq,
            piece: Piece::default(),
            imm,
            packets: 0,
            at: 0,
            within: 0,
            fragments_only: Some((base, which)),
        }
    }

    /// Its next packet; `stride` is the number of channels, `rkey` the message's own for the one
    /// that carries it.
    pub(crate) fn packet(
        &mut self,
        layout: &Layout,
        stride: u32,
        rkey: Option<u32>,
    ) -> Option<Packet> {
        let split = layout.attr().split;
        let (slot, mtu) = (layout.slot(self.seq), u64::from(layout.attr().mtu_bytes));
        let (offset, begin) = match self.fragments_only {
            Some((base, missing)) => {
                let fragment = missing.trailing_zeros();
                if missing == 0 {
                    return None;
                }
                self.fragments_only = Some((base, missing & (missing - 1)));
                (base + fragment, u64::MAX)
            }
            None => self.next_of_chunks(layout, stride)?,
        };
        let bytes = self.piece.bytes.saturating_sub(begin).min(mtu);
        let user = self.imm.map_or(0, |imm| split.fragment(imm, offset));
        let base = if rkey.is_some() { 0 } else { u64::from(slot) * layout.message_bytes };
        Some(Packet {
            seq: self.seq,
            generation: layout.generation(self.seq),
            remote: base + u64::from(offset) * mtu,
            rkey,
            local: Local {
                addr: self.piece.local.addr.wrapping_add(begin.min(self.piece.bytes)),
                ..self.piece.local
            },
            bytes: bytes as u32,
            imm: split.pack(Fields { slot, offset, user }),
        })
    }

    /// The next packet's offset in the message, and in the piece.
    fn next_of_chunks(&mut self, layout: &Layout, stride: u32) -> Option<(u32, u64)> {
        let mtu = u64::from(layout.attr().mtu_bytes);
        loop {
            if self.at >= layout.chunks_of(self.piece.bytes) {
                return None;
            }
            let offset = (self.piece.chunk + self.at) * layout.chunk_packets + self.within;
            let begin =
                u64::from(self.at) * u64::from(layout.chunk_bytes) + u64::from(self.within) * mtu;
            if self.within < layout.chunk_packets && offset < self.packets {
                self.within += 1;
                return Some((offset, begin));
            }
            self.at += stride;
            self.within = 0;
        }
    }
}
