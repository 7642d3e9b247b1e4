//! The bitmaps: where workers note which packets came, and users read which chunks are whole.
//!
//! ```text
//!   completion (generation of its queue pair, immediate)
//!        │  slot, offset
//!        ▼
//!   slot ── inactive, or of another generation ──► late: counted, nothing else     (late packets, stage two)
//!        │
//!        ▼
//!   packet bitmap  ── the last bit of a chunk ──►  chunk bitmap, which the user reads
//!   (channel by channel: a worker has words of its own)
//! ```
//!
//! Workers hold no lock for a packet. A worker is inside of its channel's *gate* while it goes
//! through a batch of completions; whoever ends a message makes its slot inactive and then passes
//! through each gate once. From then on no worker has the message in its hands, so the slot can be
//! cleared for the next one.
//!
//! Invariants: a bit of the chunk bitmap is set only after the payload of all its packets lies in
//! the buffer, and stays until the slot is begun anew; a slot is begun only while it is inactive
//! and after the gates were passed.

use crate::attr::Layout;
use crate::mutants::left_out;
#[doc(hidden)]
pub use crate::mutants::Mutation;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What became of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It is noted; perhaps it was the last packet of this chunk.
    Noted(Option<u32>),
    /// The packet had come before.
    Duplicate,
    /// A zero-length packet beyond the message, for the user's immediate.
    Immediate,
    /// No message in that slot, or of another generation.
    Late,
    /// Beyond the message, and nothing for the immediate; or a slot that there is not.
    Outside,
}

struct Slot {
    /// The message, counted from 1; 0: none.
    active: AtomicU64,
    packets: Box<[AtomicU64]>,
    chunks: Box<[AtomicU64]>,
    /// Packets and chunks of the receive.
    expected_packets: AtomicU32,
    expected_chunks: AtomicU32,
    whole: AtomicU32,
    imm: AtomicU32,
    fragments: AtomicU32,
}

/// The bitmaps of all message slots of a queue pair.
pub struct Board {
    layout: Layout,
    slots: Box<[Slot]>,
    gates: Box<[Mutex<()>]>,
    /// Words of the packet bitmap for each channel.
    channel_words: usize,
    mutation: Option<Mutation>,
}

/// Where a packet's bit is.
struct Place {
    word: usize,
    bit: u64,
    /// The chunk's first word, how many it has, and its bits in each.
    first: usize,
    words: usize,
    mask: u64,
}

fn zeros(words: usize) -> Box<[AtomicU64]> {
    (0..words).map(|_| AtomicU64::new(0)).collect()
}

impl Board {
    /// Bitmaps for all slots.
    pub fn new(layout: &Layout) -> Board {
        let channels = u32::from(layout.attr().channels);
        let rows = layout.chunks.div_ceil(channels) as usize;
        let channel_words = (rows * layout.chunk_packets as usize).div_ceil(64);
        let slot = || Slot {
            active: AtomicU64::new(0),
            packets: zeros(channel_words * channels as usize),
            chunks: zeros(layout.chunks.div_ceil(64) as usize),
            expected_packets: AtomicU32::new(0),
            expected_chunks: AtomicU32::new(0),
            whole: AtomicU32::new(0),
            imm: AtomicU32::new(0),
            fragments: AtomicU32::new(0),
        };
        Board {
            layout: *layout,
            slots: (0..layout.slots).map(|_| slot()).collect(),
            gates: (0..channels).map(|_| Mutex::new(())).collect(),
            channel_words,
            mutation: None,
        }
    }

    /// Leaves a rule out.
    #[doc(hidden)]
    pub fn mutated(mut self, mutation: Mutation) -> Board {
        self.mutation = Some(mutation);
        self
    }

    pub(crate) fn mutation(&self) -> Option<Mutation> {
        self.mutation
    }

    /// The sizes.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The worker of a channel goes through a batch: to be held while it calls [`Board::arrive`].
    pub fn enter(&self, channel: u8) -> MutexGuard<'_, ()> {
        self.gates[usize::from(channel)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, offset: u32) -> Place {
        let (packets, channels) = (self.layout.chunk_packets as usize, self.gates.len());
        let (chunk, within) = (offset as usize / packets, offset as usize % packets);
        let (base, row) = (chunk % channels * self.channel_words, chunk / channels);
        if packets >= 64 {
            let words = packets / 64;
            let first = base + row * words;
            Place {
                word: first + within / 64,
                bit: 1 << (within % 64),
                first,
                words,
                mask: u64::MAX,
            }
        } else {
            let word = base + row * packets / 64;
            let shift = row * packets % 64;
            Place {
                word,
                bit: 1 << (shift + within),
                first: word,
                words: 1,
                mask: ((1 << packets) - 1) << shift,
            }
        }
    }

    /// Notes a completion with this immediate, from a queue pair of that generation. The caller has
    /// entered the gate of its channel.
    #[inline]
    pub fn arrive(&self, generation: u8, imm: u32) -> Arrival {
        let split = self.layout.attr().split;
        let f = split.unpack(imm);
        let Some(slot) = self.slots.get(f.slot as usize) else { return Arrival::Outside };
        let active = slot.active.load(Acquire);
        if active == 0 {
            return Arrival::Late;
        }
        if self.layout.generation(active - 1) != generation
            && !left_out!(self.mutation, AnyGeneration)
        {
            return Arrival::Late;
        }
        let fragments = split.fragments();
        if fragments > 0 {
            let part = 1 << (f.offset % fragments);
            if slot.fragments.load(Relaxed) & part == 0 {
                slot.imm.fetch_or(split.place(f.user, f.offset), Relaxed);
                slot.fragments.fetch_or(part, Release);
            }
        }
        if f.offset >= slot.expected_packets.load(Relaxed) {
            let for_immediate = fragments > 0 && f.offset < self.immediate_base(slot) + fragments;
            return if for_immediate { Arrival::Immediate } else { Arrival::Outside };
        }
        let place = self.place(f.offset);
        // Workers of two channels share a chunk only where it was sent again over another; then one
        // of them sees all.
        let before = slot.packets[place.word].fetch_or(place.bit, SeqCst);
        if before & place.bit != 0 {
            return Arrival::Duplicate;
        }
        let now = before | place.bit;
        let others = || (place.first..place.first + place.words).filter(|word| *word != place.word);
        if now & place.mask != place.mask
            || !others().all(|word| slot.packets[word].load(SeqCst) == u64::MAX)
        {
            return Arrival::Noted(None);
        }
        let chunk = f.offset / self.layout.chunk_packets;
        let bit = 1 << (chunk % 64);
        if slot.chunks[chunk as usize / 64].fetch_or(bit, AcqRel) & bit == 0 {
            slot.whole.fetch_add(1, Release);
        }
        Arrival::Noted(Some(chunk))
    }

    /// The offset of the packets that only carry the user's immediate, of a receive of so many
    /// packets.
    fn immediate_base(&self, slot: &Slot) -> u32 {
        immediate_base(&self.layout, slot.expected_packets.load(Relaxed))
    }

    /// Begins message `seq`, a receive of so many bytes, in its slot, which is inactive.
    pub(crate) fn begin(&self, seq: u64, bytes: u64) {
        let slot = &self.slots[self.layout.slot(seq) as usize];
        let (packets, chunks) = (self.layout.packets_of(bytes), self.layout.chunks_of(bytes));
        let channels = self.gates.len();
        let rows = (chunks as usize).div_ceil(channels);
        let used = (rows * self.layout.chunk_packets as usize).div_ceil(64);
        for channel in 0..channels {
            let base = channel * self.channel_words;
            slot.packets[base..base + used].iter().for_each(|word| word.store(0, Relaxed));
        }
        slot.chunks[..chunks.div_ceil(64) as usize].iter().for_each(|word| word.store(0, Relaxed));
        // What a last chunk that is shorter does not have counts as having come.
        for offset in packets..chunks * self.layout.chunk_packets {
            let place = self.place(offset);
            slot.packets[place.word].fetch_or(place.bit, Relaxed);
        }
        slot.expected_packets.store(packets, Relaxed);
        slot.expected_chunks.store(chunks, Relaxed);
        for word in [&slot.whole, &slot.imm, &slot.fragments] {
            word.store(0, Relaxed);
        }
        slot.active.store(seq + 1, Release);
    }

    /// Ends the message of a slot. When it returns no worker notes anything there; the bitmap stays
    /// until the slot is begun anew.
    pub(crate) fn end(&self, seq: u64) {
        self.slots[self.layout.slot(seq) as usize].active.store(0, SeqCst);
        for gate in &self.gates {
            drop(gate.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// The chunk bitmap of a message's slot: bit *c* modulo 64 of word *c* / 64. A word is eight
    /// bytes in the machine's order.
    pub fn chunks(&self, seq: u64) -> &[AtomicU64] {
        let slot = &self.slots[self.layout.slot(seq) as usize];
        &slot.chunks[..slot.expected_chunks.load(Relaxed).div_ceil(64) as usize]
    }

    /// Chunks of the message's receive, and how many are whole.
    pub fn progress(&self, seq: u64) -> (u32, u32) {
        let slot = &self.slots[self.layout.slot(seq) as usize];
        (slot.expected_chunks.load(Relaxed), slot.whole.load(Acquire))
    }

    /// Whether a chunk is whole.
    pub fn has(&self, seq: u64, chunk: u32) -> bool {
        let words = self.chunks(seq);
        words
            .get(chunk as usize / 64)
            .is_some_and(|word| word.load(Acquire) >> (chunk % 64) & 1 == 1)
    }

    /// The packets of a chunk, as many bits as it has, 64 in each word of `out`. False: there is no
    /// such chunk, or too few words.
    pub fn expand(&self, seq: u64, chunk: u32, out: &mut [u64]) -> bool {
        let packets = self.layout.chunk_packets;
        let slot = &self.slots[self.layout.slot(seq) as usize];
        if chunk >= slot.expected_chunks.load(Relaxed) || out.len() < packets.div_ceil(64) as usize
        {
            return false;
        }
        let place = self.place(chunk * packets);
        let shift = place.bit.trailing_zeros();
        for (i, word) in out.iter_mut().enumerate().take(place.words) {
            *word = (slot.packets[place.first + i].load(Acquire) & place.mask) >> shift;
        }
        true
    }

    /// The user's immediate, once all its fragments are here.
    pub fn immediate(&self, seq: u64) -> Option<u32> {
        let slot = &self.slots[self.layout.slot(seq) as usize];
        let n = self.layout.attr().split.fragments();
        let all = if n == 32 { u32::MAX } else { (1 << n) - 1 };
        (n > 0 && slot.fragments.load(Acquire) == all).then(|| slot.imm.load(Relaxed))
    }
}

/// The first offset of packets that only carry the user's immediate: behind the receive, at a
/// multiple of the number of fragments.
pub fn immediate_base(layout: &Layout, packets: u32) -> u32 {
    packets.next_multiple_of(layout.attr().split.fragments().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::Attr;
    use crate::imm::{Fields, Split};

    fn board(chunk_log2: u8, channels: u8) -> Board {
        let attr = Attr {
            chunk_log2,
            in_flight_log2: 22,
            messages_log2: 2,
            mtu_bytes: 64,
            channels,
            ..Attr::default()
        };
        Board::new(&Layout::new(&attr).unwrap())
    }

    fn imm(slot: u32, offset: u32) -> u32 {
        Split::default().pack(Fields { slot, offset, user: 0 })
    }

    /// In every order, over any number of channels, a chunk is whole with its last packet, and not
    /// before.
    #[test]
    fn a_chunk_is_whole_with_its_last_packet() {
        for (chunk_log2, channels) in [(6, 1), (7, 3), (9, 1), (12, 2), (13, 3), (14, 5), (20, 4)] {
            let b = board(chunk_log2, channels);
            let l = *b.layout();
            let bytes = l.message_bytes - 70;
            b.begin(1, bytes);
            let packets = l.packets_of(bytes);
            let chunks = l.chunks_of(bytes);
            let mut left: Vec<u32> = (0..chunks).map(|_| l.chunk_packets).collect();
            *left.last_mut().unwrap() -= chunks * l.chunk_packets - packets;
            let step = 7919; // a prime that divides no power of two: every packet once
            let mut at = 0;
            for _ in 0..packets.next_power_of_two() {
                at = (at + step) % packets.next_power_of_two();
                if at >= packets {
                    continue;
                }
                let chunk = at / l.chunk_packets;
                left[chunk as usize] -= 1;
                let whole = (left[chunk as usize] == 0).then_some(chunk);
                assert_eq!(
                    b.arrive(0, imm(1, at)),
                    Arrival::Noted(whole),
                    "{chunk_log2} {channels} {at}"
                );
                assert_eq!(b.has(1, chunk), whole.is_some());
                assert_eq!(b.arrive(0, imm(1, at)), Arrival::Duplicate);
            }
            assert_eq!(b.progress(1), (chunks, chunks));
        }
    }

    #[test]
    fn what_is_late_or_outside_changes_nothing() {
        let b = board(9, 2);
        b.begin(5, 100);
        assert_eq!(b.arrive(1, imm(1, 40)), Arrival::Outside);
        assert_eq!(b.arrive(0, imm(1, 0)), Arrival::Late, "of an earlier generation");
        assert_eq!(b.arrive(1, imm(2, 0)), Arrival::Late, "no message there");
        assert_eq!(b.arrive(1, imm(100, 0)), Arrival::Outside, "no such slot");
        assert_eq!(b.progress(5), (1, 0));
        assert_eq!(
            (b.arrive(1, imm(1, 1)), b.arrive(1, imm(1, 0))),
            (Arrival::Noted(None), Arrival::Noted(Some(0)))
        );
        let mut packets = [0];
        assert!(
            b.expand(5, 0, &mut packets)
                && !b.expand(5, 1, &mut packets)
                && !b.expand(5, 0, &mut [])
        );
        assert_eq!(packets, [0xff], "what the last chunk lacks counts as there");
        b.end(5);
        assert_eq!(b.arrive(1, imm(1, 0)), Arrival::Late);
        assert!(b.has(5, 0), "until the slot is begun anew");
        b.begin(9, 100);
        assert!(!b.has(9, 0));
    }

    #[test]
    fn the_users_immediate_comes_in_fragments() {
        let (b, split) = (board(9, 1), Split::default());
        b.begin(0, 130);
        let (sent, base) = (0xdead_beef, immediate_base(b.layout(), 3));
        assert_eq!(base, 8);
        for offset in [0, 1, 2, base + 3, base + 4, base + 5, base + 6] {
            assert_eq!(b.immediate(0), None);
            b.arrive(0, split.pack(Fields { slot: 0, offset, user: split.fragment(sent, offset) }));
        }
        assert_eq!(
            b.arrive(
                0,
                split.pack(Fields { slot: 0, offset: base + 7, user: split.fragment(sent, 7) })
            ),
            Arrival::Immediate
        );
        assert_eq!(b.immediate(0), Some(sent));
        assert_eq!(b.progress(0), (1, 1));
    }
}
