//! The hands of an engine: over queue pairs, shared memory, TCP, and the caller's buffers.

use unbroken_comm::frame::{Header, HEADER_BYTES, MEMORY};
use unbroken_comm::message::Message;
use unbroken_comm::{Bytes, Hands, Note, ProbeId, Rank, Slot};
use unbroken_schedule::{Slice, Work};

use crate::net::Net;
use crate::oob::Oob;
use crate::operands::Operands;

/// Borrowed for as long as the engine works.
pub(crate) struct Arms<'a, 'b> {
    pub(crate) me: Rank,
    pub(crate) net: &'a mut Net,
    pub(crate) oob: &'a mut Oob,
    pub(crate) operands: &'a mut Operands<'b>,
    pub(crate) notes: &'a mut Vec<Note>,
}

impl Hands for Arms<'_, '_> {
    fn stage(&mut self, slot: Slot, header: &Header, data: Option<(Slice, u64, u32)>) {
        self.net.put(slot, 0, &header.encode());
        if let Some((slice, offset, len)) = data {
            self.net.put(slot, HEADER_BYTES, self.operands.read(&slice, offset, len.into()));
        }
    }

    fn header(&mut self, slot: Slot) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        self.net.get(slot, 0, &mut bytes);
        bytes
    }

    fn take(&mut self, slot: Slot, to: &Bytes) {
        let net = &self.net;
        self.operands.take(to, &mut |at, out| net.get(slot, HEADER_BYTES + at, out));
    }

    fn fetch(&mut self, to: &Bytes) {
        self.operands.fetch(to);
    }

    fn compute(&mut self, work: &Work) {
        self.operands.compute(work);
    }

    fn post(&mut self, slot: Slot, rail: u8, bytes: u32) -> bool {
        self.net.post(slot, rail, bytes)
    }

    fn notify(&mut self, peer: Rank, rail: u8, notice: u32) -> bool {
        self.net.notify(peer, rail, notice)
    }

    fn open(&mut self, peer: Rank, rail: u8) -> Option<Vec<u8>> {
        if rail == MEMORY && self.me > peer {
            // The lower rank has made it; what it says is mapped by `connect`.
            return Some(Vec::new());
        }
        self.net.open(peer, rail).ok()
    }

    fn connect(&mut self, peer: Rank, rail: u8, address: &[u8]) -> bool {
        match (rail == MEMORY, self.me > peer) {
            (true, true) => self.net.map(peer, address).is_ok(),
            (true, false) => true,
            _ => self.net.connect(peer, rail, address).is_ok(),
        }
    }

    fn test(&mut self, peer: Rank, rail: u8) -> bool {
        self.net.test(peer, rail)
    }

    fn close(&mut self, peer: Rank, rail: u8) {
        if rail != MEMORY {
            self.net.close(peer, rail);
        }
    }

    fn has_link(&mut self, rail: u8) -> bool {
        self.net.has_link(rail)
    }

    fn open_probe(&mut self, probe: ProbeId, rail: u8) -> Option<Vec<u8>> {
        self.net.open_probe(probe, rail).ok()
    }

    fn connect_probe(&mut self, probe: ProbeId, address: &[u8]) -> bool {
        self.net.connect_probe(probe, address).is_ok()
    }

    fn send_probe(&mut self, probe: ProbeId) -> bool {
        self.net.send_probe(probe)
    }

    fn close_probe(&mut self, probe: ProbeId) {
        self.net.close_probe(probe);
    }

    fn tell(&mut self, peer: Rank, message: &Message) {
        self.oob.tell(peer, message);
    }

    fn note(&mut self, note: &Note) {
        self.notes.push(note.clone());
    }
}
