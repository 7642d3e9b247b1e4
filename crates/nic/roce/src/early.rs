//! Packets that came before their turn, kept until what is missing before them has come.
//!
//! A slot for each PSN of a window: at most [`EARLY_PACKETS`], each with a copy of its payload. The
//! memory is taken packet by packet and is all given back when the last one leaves: a QP without a
//! gap holds none. Packets leave in the order of their PSNs, because the owner takes only the one
//! whose turn it is, so memory and completions come about as they would without a loss.

use crate::encoding::{psn_add, psn_ahead};
use unbroken_wire::{Bth, Ext, Packet, MAX_ACK_PAYLOAD};

/// How far ahead of its turn a packet may be.
pub(crate) const EARLY_PACKETS: u32 = 256;

/// Bytes of the longest map of what is held.
pub(crate) const MAP_BYTES: usize = MAX_ACK_PAYLOAD;
const _: () = assert!(MAP_BYTES * 8 == EARLY_PACKETS as usize);

/// A packet with a payload of its own.
#[derive(Clone)]
pub(crate) struct Held {
    bth: Bth,
    ext: Ext,
    payload: Box<[u8]>,
}

impl Held {
    pub(crate) fn packet(&self) -> Packet<'_> {
        Packet { bth: self.bth, ext: self.ext, payload: &self.payload }
    }
}

#[derive(Clone)]
struct Table {
    slots: Box<[Option<Box<Held>>]>,
    held: u32,
    bytes: usize,
}

/// The packets. Empty, it is a null pointer.
#[derive(Clone, Default)]
pub(crate) struct Early(Option<Box<Table>>);

const fn slot(psn: u32) -> usize {
    (psn % EARLY_PACKETS) as usize
}

impl Early {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let table = |t: &Table| {
            size_of::<Table>()
                + size_of_val(&*t.slots)
                + t.held as usize * size_of::<Held>()
                + t.bytes
        };
        self.0.as_deref().map_or(0, table)
    }

    pub(crate) fn holds(&self, psn: u32) -> bool {
        self.0
            .as_ref()
            .is_some_and(|t| t.slots[slot(psn)].as_ref().is_some_and(|h| h.bth.psn == psn))
    }

    /// Keeps a copy of a packet; false if it is there already. The owner has checked that it is
    /// less than [`EARLY_PACKETS`] ahead.
    pub(crate) fn put(&mut self, packet: &Packet<'_>) -> bool {
        if self.holds(packet.bth.psn) {
            return false;
        }
        let empty = || {
            Box::new(Table { slots: vec![None; EARLY_PACKETS as usize].into(), held: 0, bytes: 0 })
        };
        let table = self.0.get_or_insert_with(empty);
        table.held += 1;
        table.bytes += packet.payload.len();
        let held = Held { bth: packet.bth, ext: packet.ext, payload: packet.payload.into() };
        if let Some(old) = table.slots[slot(packet.bth.psn)].replace(Box::new(held)) {
            // Its turn has passed without it.
            table.held -= 1;
            table.bytes -= old.payload.len();
        }
        true
    }

    /// Takes a packet out.
    pub(crate) fn take(&mut self, psn: u32) -> Option<Box<Held>> {
        let table = self.0.as_mut()?;
        let held = table.slots[slot(psn)].take_if(|h| h.bth.psn == psn)?;
        table.held -= 1;
        table.bytes -= held.payload.len();
        if table.held == 0 {
            self.0 = None;
        }
        Some(held)
    }

    /// Forgets what has a PSN of the `n` behind `psn`: no packet of its own belongs there.
    pub(crate) fn skip(&mut self, psn: u32, n: u32) {
        for i in 1..=n.min(EARLY_PACKETS) {
            self.take(psn_add(psn, i));
        }
    }

    /// A bit for each PSN from `first` on, the lowest of a byte first, and in how many bytes (a
    /// multiple of four) they lie.
    pub(crate) fn map(&self, first: u32) -> ([u8; MAP_BYTES], usize) {
        let (mut map, mut len) = ([0; MAP_BYTES], 0);
        for i in (0..EARLY_PACKETS).filter(|&i| self.holds(psn_add(first, i))) {
            map[i as usize / 8] |= 1 << (i % 8);
            len = (i as usize / 32 + 1) * 4;
        }
        (map, len)
    }
}

/// The PSNs of a map that begins with `first`.
pub(crate) fn psns_of(map: &[u8], first: u32) -> impl Iterator<Item = u32> + '_ {
    let bits = (map.len().min(MAP_BYTES) * 8) as u32;
    (0..bits).filter(|&i| map[i as usize / 8] >> (i % 8) & 1 != 0).map(move |i| psn_add(first, i))
}

/// Whether `psn` is within what can be kept, counted from `first`.
pub(crate) fn in_reach(psn: u32, first: u32) -> bool {
    psn_ahead(psn, first) < EARLY_PACKETS
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_wire::{Op, Opcode};

    fn packet(psn: u32, payload: &[u8]) -> Packet<'_> {
        let opcode = Opcode::rc(Op::SendMiddle);
        let bth = Bth {
            opcode,
            solicited: false,
            mig_req: false,
            pad: 0,
            pkey: 0xffff,
            dest_qpn: 1,
            ack_req: false,
            psn,
        };
        Packet { bth, ext: Ext::None, payload }
    }

    #[test]
    fn packets_leave_once_and_the_last_takes_the_memory_along() {
        let mut early = Early::default();
        assert_eq!(early.heap_bytes(), 0);
        assert!(early.put(&packet(0xff_ffff, &[1, 2])) && early.put(&packet(3, &[3])));
        assert!(!early.put(&packet(3, &[4])), "the first one stays");
        let bytes = early.heap_bytes();
        assert!(bytes > EARLY_PACKETS as usize * 8 && bytes < 4096, "{bytes}");
        assert!(early.holds(3) && !early.holds(3 + EARLY_PACKETS));
        assert_eq!(early.take(3).unwrap().packet().payload, [3]);
        assert!(early.take(3).is_none());
        assert_eq!(early.take(0xff_ffff).unwrap().packet().payload, [1, 2]);
        assert!(early.is_empty() && early.heap_bytes() == 0);
    }

    #[test]
    fn one_whose_turn_has_passed_makes_room() {
        let mut early = Early::default();
        early.put(&packet(7, &[0; 100]));
        early.put(&packet(7 + EARLY_PACKETS, &[1]));
        assert!(!early.holds(7));
        early.put(&packet(300, &[]));
        early.skip(262, 5);
        early.skip(290, 2_000_000);
        assert!(early.is_empty());
    }

    #[test]
    fn a_map_says_what_is_held() {
        let mut early = Early::default();
        let first = 0xff_fff0;
        for i in [0, 9, 31, 32, 255] {
            early.put(&packet(psn_add(first, i), &[]));
        }
        let (map, len) = early.map(first);
        assert_eq!((map[0], map[1], map[3], map[4], map[31], len), (1, 2, 0x80, 1, 0x80, 32));
        let want: Vec<u32> = [0, 9, 31, 32, 255].map(|i| psn_add(first, i)).into();
        assert_eq!(psns_of(&map[..len], first).collect::<Vec<_>>(), want);
        early.take(psn_add(first, 255));
        assert_eq!(early.map(first).1, 8);
        assert!(in_reach(255, 0) && !in_reach(256, 0) && !in_reach(0xff_ffff, 0));
    }
}
