//! The hands of an engine: over queue pairs, shared memory, TCP, and the caller's buffers.

use unbroken_collective_protocol::frame::{Header, HEADER_BYTES, MEMORY};
use unbroken_collective_protocol::message::Message;
use unbroken_collective_protocol::{Bytes, Env, Note, ProbeId, Rank, Slot};
use unbroken_schedule::{Slice, Work};

use crate::net::Net;
use crate::oob::Oob;
use crate::operands::Operands;

/// Borrowed for as long as the engine works.
pub(crate) struct LibraryEnv<'a> {
    pub(crate) me: Rank,
    /// How both ends call the channel that the engine is of.
    pub(crate) channel: u32,
    /// The channel's ranks, as all know them.
    pub(crate) ranks: &'a [Rank],
    /// The channel's first tie: what there is with its rank *k* is tie `base + k`.
    pub(crate) base: usize,
    pub(crate) net: &'a mut Net,
    pub(crate) oob: &'a mut Oob,
    pub(crate) operands: &'a mut Operands,
    pub(crate) notes: &'a mut Vec<Note>,
}

impl LibraryEnv<'_> {
    /// A slot, as the NICs know it.
    fn tied(&self, slot: Slot) -> Slot {
        Slot { peer: self.base + slot.peer, ..slot }
    }

    fn tied_probe(&self, probe: ProbeId) -> ProbeId {
        ProbeId { prober: self.base + probe.prober, ..probe }
    }
}

impl Env for LibraryEnv<'_> {
    fn stage(&mut self, slot: Slot, header: &Header, data: Option<(Slice, u64, u32)>) {
        let slot = self.tied(slot);
        self.net.put(slot, 0, &header.encode());
        if let Some((slice, offset, len)) = data {
            self.net.put(slot, HEADER_BYTES, self.operands.read(&slice, offset, len.into()));
        }
    }

    fn header(&mut self, slot: Slot) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        self.net.get(self.tied(slot), 0, &mut bytes);
        bytes
    }

    fn take(&mut self, slot: Slot, to: &Bytes) {
        let (net, slot) = (&self.net, self.tied(slot));
        self.operands.take(to, &mut |at, out| net.get(slot, HEADER_BYTES + at, out));
    }

    fn fetch(&mut self, to: &Bytes) {
        self.operands.fetch(to);
    }

    fn compute(&mut self, work: &Work) {
        self.operands.compute(work);
    }

    fn post(&mut self, slot: Slot, rail: u8, bytes: u32) -> bool {
        self.net.post(self.tied(slot), rail, bytes)
    }

    fn notify(&mut self, peer: Rank, rail: u8, notice: u32) -> bool {
        self.net.notify(self.base + peer, rail, notice)
    }

    fn copy_out(&mut self, slot: Slot, at: u32, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.net.copy_out(self.tied(slot), at as usize, &mut bytes);
        bytes
    }

    fn copy_in(&mut self, slot: Slot, at: u32, bytes: &[u8]) {
        self.net.copy_in(self.tied(slot), at as usize, bytes);
    }

    fn open(&mut self, peer: Rank, path: u8, nic: u8) -> Option<Vec<u8>> {
        if path == MEMORY && self.me > peer {
            // The lower rank has made it; what it says is mapped by `connect`.
            return Some(Vec::new());
        }
        self.net.open(self.base + peer, path, nic).ok()
    }

    fn connect(&mut self, peer: Rank, rail: u8, address: &[u8]) -> bool {
        match (rail == MEMORY, self.me > peer) {
            (true, true) => self.net.map(self.base + peer, address).is_ok(),
            (true, false) => true,
            _ => self.net.connect(self.base + peer, rail, address).is_ok(),
        }
    }

    fn test(&mut self, peer: Rank, rail: u8) -> bool {
        self.net.test(self.base + peer, rail)
    }

    fn close(&mut self, peer: Rank, rail: u8) {
        if rail != MEMORY {
            self.net.close(self.base + peer, rail);
        }
    }

    fn has_link(&mut self, rail: u8) -> bool {
        self.net.has_link(rail)
    }

    fn open_probe(&mut self, probe: ProbeId, rail: u8) -> Option<Vec<u8>> {
        self.net.open_probe(self.tied_probe(probe), rail).ok()
    }

    fn connect_probe(&mut self, probe: ProbeId, address: &[u8]) -> bool {
        self.net.connect_probe(self.tied_probe(probe), address).is_ok()
    }

    fn send_probe(&mut self, probe: ProbeId) -> bool {
        self.net.send_probe(self.tied_probe(probe))
    }

    fn close_probe(&mut self, probe: ProbeId) {
        self.net.close_probe(self.tied_probe(probe));
    }

    fn tell(&mut self, peer: Rank, message: &Message) {
        self.oob.tell(self.ranks[peer], self.channel, message);
    }

    fn note(&mut self, note: &Note) {
        self.notes.push(note.clone());
    }
}
