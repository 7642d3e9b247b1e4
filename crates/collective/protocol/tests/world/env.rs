//! The hands of a simulated rank: memory and queue pairs of the world.

use super::*;

/// The hands of one rank.
pub(super) struct WorldEnv<'w> {
    pub(super) world: &'w mut World,
    pub(super) me: Rank,
}

impl WorldEnv<'_> {
    fn slice(&mut self, slice: &Slice, offset: u64, len: u64) -> &mut [u8] {
        let local = &mut self.world.ranks[self.me];
        let size = local.work.expect("an operation").0.bytes();
        let at = (slice.start * size + offset) as usize;
        &mut local.buffers[slice.buffer as usize][at..at + len as usize]
    }

    fn put(&mut self, to: &Bytes, bytes: &[u8]) {
        let (data, op) = self.world.ranks[self.me].work.expect("an operation");
        match to.target {
            Target::Store(into) => self.slice(&into, to.offset, to.len).copy_from_slice(bytes),
            Target::Reduce { with, into } => {
                let mut result = self.slice(&with, to.offset, to.len).to_vec();
                reduce::reduce(data, op, &mut result, bytes);
                self.slice(&into, to.offset, to.len).copy_from_slice(&result);
            }
            Target::Aside => {
                let local = &mut self.world.ranks[self.me];
                let aside = local
                    .aside
                    .entry((to.lane, to.message))
                    .or_insert_with(|| vec![0; to.total as usize]);
                aside[to.offset as usize..][..bytes.len()].copy_from_slice(bytes);
            }
        }
    }
}

impl Env for WorldEnv<'_> {
    fn stage(&mut self, slot: Slot, header: &Header, data: Option<(Slice, u64, u32)>) {
        let has_slots = self.world.ranks[self.me].has_slots.contains(&slot.peer);
        assert!(has_slots, "slots are there once a path was opened");
        let mut bytes = header.encode().to_vec();
        if let Some((slice, offset, len)) = data {
            bytes.extend_from_slice(self.slice(&slice, offset, len.into()));
        }
        let key = (slot.peer, slot.stream, slot.seq % self.world.slots);
        self.world.ranks[self.me].out.insert(key, bytes);
    }

    fn header(&mut self, slot: Slot) -> [u8; HEADER_BYTES] {
        let key = (slot.peer, slot.stream, slot.seq % self.world.slots);
        self.world.ranks[self.me]
            .into
            .get(&key)
            .map_or([0; HEADER_BYTES], |b| b[..HEADER_BYTES].try_into().unwrap())
    }

    fn take(&mut self, slot: Slot, to: &Bytes) {
        let key = (slot.peer, slot.stream, slot.seq % self.world.slots);
        let bytes = self.world.ranks[self.me].into[&key].clone();
        self.put(to, &bytes[HEADER_BYTES..][..to.len as usize]);
    }

    fn fetch(&mut self, to: &Bytes) {
        let aside =
            self.world.ranks[self.me].aside.remove(&(to.lane, to.message)).expect("it lies aside");
        self.put(to, &aside[..to.len as usize]);
    }

    fn compute(&mut self, work: &Work) {
        let (data, op) = self.world.ranks[self.me].work.expect("an operation");
        let len = work.len() * data.bytes();
        match *work {
            Work::Copy { data, into } => {
                let bytes = self.slice(&data, 0, len).to_vec();
                self.slice(&into, 0, len).copy_from_slice(&bytes);
            }
            Work::Reduce { a, b, into } => {
                let mut result = self.slice(&a, 0, len).to_vec();
                let with = self.slice(&b, 0, len).to_vec();
                reduce::reduce(data, op, &mut result, &with);
                self.slice(&into, 0, len).copy_from_slice(&result);
            }
            Work::Divide { data: slice, by } => {
                reduce::divide(data, self.slice(&slice, 0, len), by)
            }
            _ => panic!("not for a rank alone: {work:?}"),
        }
    }

    fn post(&mut self, slot: Slot, rail: u8, bytes: u32) -> bool {
        let key = (slot.peer, slot.stream, slot.seq % self.world.slots);
        let data = self.world.ranks[self.me].out[&key].clone();
        let bytes = data[..data.len().min(bytes as usize)].to_vec();
        let notice =
            unbroken_collective_protocol::frame::Notice::frame(slot.stream, slot.seq).encode();
        self.world.send(self.me, slot, rail, bytes, notice, What::Frame(slot.stream))
    }

    fn notify(&mut self, peer: Rank, rail: u8, notice: u32) -> bool {
        self.world.send(
            self.me,
            Slot { peer, stream: 0, seq: 0 },
            rail,
            Vec::new(),
            notice,
            What::Notice,
        )
    }

    fn copy_out(&mut self, slot: Slot, at: u32, len: u32) -> Vec<u8> {
        let key = (slot.peer, slot.stream, slot.seq % self.world.slots);
        self.world.ranks[self.me].out[&key][at as usize..][..len as usize].to_vec()
    }

    fn copy_in(&mut self, slot: Slot, at: u32, bytes: &[u8]) {
        let key = (slot.peer, slot.stream, slot.seq % self.world.slots);
        let into = self.world.ranks[self.me].into.entry(key).or_default();
        into.truncate(at as usize);
        into.extend(bytes);
    }

    fn open(&mut self, peer: Rank, path: u8, nic: u8) -> Option<Vec<u8>> {
        self.world.ranks[self.me].has_slots.insert(peer);
        if path == OUT_OF_BAND {
            let works = (0..self.world.carried.len() as u8).any(|rail| self.has_link(rail));
            return works.then(Vec::new);
        }
        if path != MEMORY && self.world.nic_dead(self.me, nic) {
            return None;
        }
        self.world.next_qp += 1;
        let qp = Qp { id: self.world.next_qp, peer_id: 0, nic, open: true, stuck: false };
        self.world.ranks[self.me].qps.insert((peer, path), qp);
        Some(qp.id.to_le_bytes().to_vec())
    }

    fn connect(&mut self, peer: Rank, rail: u8, address: &[u8]) -> bool {
        let qp = self.world.ranks[self.me].qps.get_mut(&(peer, rail)).expect("it was made");
        qp.peer_id = u64::from_le_bytes(address.try_into().unwrap());
        qp.open
    }

    fn test(&mut self, peer: Rank, rail: u8) -> bool {
        self.world.send(self.me, Slot { peer, stream: 0, seq: 0 }, rail, Vec::new(), 0, What::Test)
    }

    fn close(&mut self, peer: Rank, rail: u8) {
        let purge = self.world.random.below(2) == 0;
        let local = &mut self.world.ranks[self.me];
        if let Some(qp) = local.qps.get_mut(&(peer, rail)) {
            qp.open = false;
            let id = qp.id;
            local.cq.retain(|(of, news)| *of != id || !purge && matches!(news, News::Notice(..)));
        }
    }

    fn has_link(&mut self, rail: u8) -> bool {
        !self.world.nic_dead(self.me, rail)
    }

    fn open_probe(&mut self, probe: ProbeId, rail: u8) -> Option<Vec<u8>> {
        let works = self.has_link(rail);
        self.world.ranks[self.me].probes.insert(probe, (rail, None));
        works.then(|| vec![self.me as u8])
    }

    fn connect_probe(&mut self, probe: ProbeId, address: &[u8]) -> bool {
        let end = self.world.ranks[self.me].probes.get_mut(&probe).expect("it was made");
        end.1 = Some(address[0].into());
        true
    }

    fn send_probe(&mut self, probe: ProbeId) -> bool {
        let (rail, peer) = self.world.ranks[self.me].probes[&probe];
        let peer = peer.expect("it is connected");
        let there = self.world.ranks[peer].probes.contains_key(&probe);
        let answered = there && self.world.gets_through(self.me, peer, rail);
        let in_us = if answered { 10 + self.world.random.below(40) } else { GIVES_UP_US };
        self.world.at(in_us, Event::Probed { to: self.me, probe, answered });
        self.has_link(rail)
    }

    fn close_probe(&mut self, probe: ProbeId) {
        self.world.ranks[self.me].probes.remove(&probe);
    }

    fn tell(&mut self, peer: Rank, message: &Message) {
        let held_us =
            if self.world.random.below(8) == 0 { self.world.random.below(3_000) } else { 0 };
        let latency = 20 + self.world.random.below(200) + held_us + self.world.late_us;
        let arrival = (self.world.now_us + latency)
            .max(self.world.oob.get(&(self.me, peer)).copied().unwrap_or(0));
        self.world.oob.insert((self.me, peer), arrival);
        let in_us = arrival - self.world.now_us;
        self.world.at(in_us, Event::Told { from: self.me, to: peer, message: message.encode() });
    }

    fn note(&mut self, note: &Note) {
        if matches!(note, Note::Up { life, .. } if *life > 1) {
            self.world.returned.get_or_insert(self.world.writes);
        }
        self.world.ranks[self.me].notes.push(note.clone());
    }
}
