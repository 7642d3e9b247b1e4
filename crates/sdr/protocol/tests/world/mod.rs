//! Two ends in virtual time, over a network that loses, delays, repeats and reorders: everything
//! but queue pairs and threads is what ships.
//!
//! Memory is an array at each end. A packet is written where the root key of its generation says at
//! that moment; so what protects a buffer is what is tested.
#![allow(dead_code)] // each test file uses a part of it

mod keys;

use keys::{Root, RootKeys, Windows};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use unbroken_erasure::{ChunkSet, Code, Kernel};
use unbroken_sdr_protocol::attr::{Attr, Layout};
use unbroken_sdr_protocol::board::{Arrival, Board, Mutation};
use unbroken_sdr_protocol::clearing::Clearance;
use unbroken_sdr_protocol::control::{Control, Heard};
use unbroken_sdr_protocol::packets::{Local, Packet, Piece};
use unbroken_sdr_protocol::receives::{PostError, Receives};
use unbroken_sdr_protocol::reliable::{Area, Config, Encoding, Refused, Reliable, Sdr};
use unbroken_sdr_protocol::sends::{SendError, Sends, Status};

/// A seeded generator (splitmix64).
pub struct Lots(pub u64);

impl Lots {
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n.max(1)
    }

    pub fn chance(&mut self, p: f64) -> bool {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64 <= p && p > 0.0
    }
}

/// What the network does.
#[derive(Clone, Copy, Debug)]
pub struct Conditions {
    pub loss: f64,
    /// Mean length of a burst of losses, in packets.
    pub burst: f64,
    pub duplicate: f64,
    /// Packets that are late by up to `late_us`.
    pub late: f64,
    pub late_us: u64,
    pub rtt_us: u64,
    /// Time to send a byte, in ns.
    pub byte_ns: u64,
}

pub const FAIR: Conditions = Conditions {
    loss: 0.0,
    burst: 1.0,
    duplicate: 0.0,
    late: 0.0,
    late_us: 0,
    rtt_us: 1000,
    byte_ns: 1,
};

/// One direction.
struct Link {
    lots: Lots,
    conditions: Conditions,
    bad: bool,
    free_ns: u64,
}

impl Link {
    /// Gilbert's model: all are lost while it is bad.
    fn loses(&mut self) -> bool {
        let w = self.conditions;
        if w.burst <= 1.0 {
            return self.lots.chance(w.loss);
        }
        let ends = 1.0 / w.burst;
        let begins = if w.loss < 1.0 { (ends * w.loss / (1.0 - w.loss)).min(1.0) } else { 1.0 };
        self.bad = if self.bad { !self.lots.chance(ends) } else { self.lots.chance(begins) };
        self.bad
    }

    /// When copies of a packet arrive that is sent now.
    fn arrivals_us(&mut self, now_us: u64, bytes: u64) -> Vec<u64> {
        self.free_ns = self.free_ns.max(1000 * now_us) + (bytes + 64) * self.conditions.byte_ns;
        let at_us = self.free_ns / 1000 + self.conditions.rtt_us / 2;
        let mut all = Vec::new();
        if !self.loses() {
            all.push(at_us);
        }
        if self.lots.chance(self.conditions.duplicate) {
            all.push(at_us + self.lots.below(self.conditions.late_us + 2));
        }
        if self.lots.chance(self.conditions.late) {
            all.iter_mut().for_each(|at_us| *at_us += self.lots.below(self.conditions.late_us + 1));
        }
        all
    }
}

enum What {
    Packet { packet: Packet, payload: Vec<u8> },
    Control(Vec<u8>),
    Tick,
}

/// Memory for parity, which goes back to the pool with its last user.
pub struct Buf {
    pub addr: u64,
    pool: Option<Rc<RefCell<Vec<u64>>>>,
}

impl Drop for Buf {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            pool.borrow_mut().push(self.addr);
        }
    }
}

/// What lies below the reliable writes of an end.
pub struct Below {
    pub memory: Vec<u8>,
    pub board: Board,
    receives: Receives,
    clearance: Clearance,
    sends: Sends,
    root: Root,
    /// In place of root keys.
    windows: Option<Windows>,
    layout: Layout,
    says: Vec<Control>,
    scratch: Rc<RefCell<Vec<u64>>>,
    held: BTreeSet<u64>,
    link_free_us: u64,
    now_us: u64,
    /// Parity is made aside, and takes up to so long.
    aside_us: Option<u64>,
    /// Parity that is being made: when it will be there, the message, and how.
    encoding: Vec<(u64, u64, Encode)>,
    lots: Lots,
    pub late: u64,
    pub outside: u64,
}

impl Sdr for Below {
    type Buffer = Rc<Buf>;

    fn recv_post(&mut self, now_us: u64, area: Area<'_, Rc<Buf>>) -> Result<u64, Refused> {
        let buffer = (area.buffer.addr + area.offset, area.bytes);
        let posted = match &mut self.windows {
            Some(windows) => {
                self.receives.post(now_us, area.bytes, &buffer, &self.board, &mut &mut *windows)
            }
            None => self.receives.post(
                now_us,
                area.bytes,
                &buffer,
                &self.board,
                &mut RootKeys(&mut self.root),
            ),
        };
        match posted {
            Ok(seq) => {
                let granted = self.windows.as_ref().map_or(&[][..], |windows| &windows.granted);
                self.clearance.posted(area.bytes, granted);
                Ok(seq)
            }
            Err(PostError::Full | PostError::Young { .. }) => Err(Refused::Later),
            Err(e) => Err(Refused::Never(format!("{e:?}"))),
        }
    }

    fn recv_complete(&mut self, now_us: u64, seq: u64) -> Result<(), Refused> {
        let done = match &mut self.windows {
            Some(windows) => self.receives.complete(now_us, seq, &self.board, &mut &mut *windows),
            None => self.receives.complete(now_us, seq, &self.board, &mut RootKeys(&mut self.root)),
        };
        assert_eq!(done, Ok(true));
        Ok(())
    }

    fn bitmap(&self, seq: u64) -> &[AtomicU64] {
        self.board.chunks(seq)
    }

    fn send_start(&mut self) -> Result<u64, Refused> {
        let held = &self.held;
        self.sends.forget(|seq| held.contains(&seq));
        match self.sends.start(None) {
            Ok(seq) => {
                self.held.insert(seq);
                Ok(seq)
            }
            Err(SendError::Full) => Err(Refused::Later),
            Err(e) => Err(Refused::Never(e.to_string())),
        }
    }

    fn is_clear(&self, seq: u64) -> bool {
        self.sends.cleared.of(seq).is_some()
    }

    fn has_room(&self) -> bool {
        self.sends.backlog() < 8 && self.link_free_us <= self.now_us + 100
    }

    fn send(&mut self, seq: u64, area: Area<'_, Rc<Buf>>, piece: &Piece) -> bool {
        let local = Local { addr: area.buffer.addr + area.offset, lkey: 0 };
        self.sends.add(seq, Piece { local, ..*piece }).is_ok()
    }

    fn send_stop(&mut self, seq: u64) {
        self.sends.drop_rest(seq);
        self.sends.end(seq).unwrap();
    }

    fn send_idle(&mut self, seq: u64) -> bool {
        let idle = self.sends.status(seq) != Status::Busy;
        if idle {
            self.held.remove(&seq);
        }
        idle
    }

    fn say(&mut self, message: &Control) {
        self.says.push(message.clone());
    }

    fn scratch(&mut self, _bytes: u64) -> Option<Rc<Buf>> {
        let addr = self.scratch.borrow_mut().pop()?;
        Some(Rc::new(Buf { addr, pool: Some(self.scratch.clone()) }))
    }

    fn encodes_aside(&self) -> bool {
        self.aside_us.is_some()
    }

    fn encode(
        &mut self,
        seq: u64,
        code: Code,
        data: Area<'_, Rc<Buf>>,
        parity: Area<'_, Rc<Buf>>,
    ) -> Encoding {
        let at = |area: &Area<'_, Rc<Buf>>| (area.buffer.addr + area.offset) as usize;
        let encode = Encode {
            code,
            data: at(&data)..at(&data) + data.bytes as usize,
            parity: at(&parity)..at(&parity) + parity.bytes as usize,
        };
        match self.aside_us {
            // Now and then nobody takes it.
            Some(aside_us) if !self.lots.chance(0.1) => {
                self.memory[encode.parity.clone()].fill(0xbd);
                let due_us = self.now_us + self.lots.below(aside_us + 1);
                self.encoding.push((due_us, seq, encode));
                Encoding::Aside
            }
            _ => {
                self.make(&encode);
                Encoding::Made
            }
        }
    }

    fn encoded(&mut self) -> Option<u64> {
        let due = self.encoding.iter().position(|(due_us, ..)| *due_us <= self.now_us)?;
        let (_, seq, encode) = self.encoding.swap_remove(due);
        self.make(&encode);
        Some(seq)
    }

    fn recover(
        &mut self,
        code: Code,
        data: Area<'_, Rc<Buf>>,
        parity: Area<'_, Rc<Buf>>,
        lost: &ChunkSet,
    ) -> bool {
        let at = (data.buffer.addr + data.offset) as usize;
        let (mut bytes, parity) = (self.copy(data), self.copy(parity));
        // What has not come is not to be relied on.
        for chunk in lost.iter().filter(|chunk| *chunk < code.data()) {
            let begin = chunk * self.layout.chunk_bytes as usize;
            let end = (begin + self.layout.chunk_bytes as usize).min(bytes.len());
            bytes[begin..end].fill(0xbd);
        }
        let chunk_bytes = self.layout.chunk_bytes as usize;
        let ok =
            code.recover_region(&Kernel::best(), &mut bytes, &parity, chunk_bytes, lost).is_ok();
        self.memory[at..at + bytes.len()].copy_from_slice(&bytes);
        ok
    }
}

/// Parity that is to be made: of what, and where.
struct Encode {
    code: Code,
    data: std::ops::Range<usize>,
    parity: std::ops::Range<usize>,
}

impl Below {
    fn make(&mut self, encode: &Encode) {
        let data = self.memory[encode.data.clone()].to_vec();
        let parity = &mut self.memory[encode.parity.clone()];
        let chunk_bytes = self.layout.chunk_bytes as usize;
        encode.code.encode_region(&Kernel::best(), &data, parity, chunk_bytes).unwrap();
    }

    fn copy(&self, area: Area<'_, Rc<Buf>>) -> Vec<u8> {
        let at = (area.buffer.addr + area.offset) as usize;
        self.memory[at..at + area.bytes as usize].to_vec()
    }

    /// A packet has come: its payload goes where the key says, and its completion to the bitmap.
    fn take(&mut self, packet: &Packet, payload: &[u8]) {
        let slot = packet.remote / self.layout.message_bytes;
        let at = packet.remote % self.layout.message_bytes;
        let place = match (packet.rkey, &self.windows) {
            (Some(key), Some(windows)) => windows.find(key, packet.generation),
            (None, None) => self.root[usize::from(packet.generation)][slot as usize],
            _ => panic!("keys of both kinds"),
        };
        if place.is_none() && packet.rkey.is_some() && !payload.is_empty() {
            // The device drops it, and completes nothing.
            self.late += 1;
            return;
        }
        if let (Some((addr, bytes)), false) = (place, payload.is_empty()) {
            if at + payload.len() as u64 > bytes {
                self.outside += 1;
                return;
            }
            let to = (addr + at) as usize;
            self.memory[to..to + payload.len()].copy_from_slice(payload);
        }
        let _gate = self.board.enter(0);
        match self.board.arrive(packet.generation, packet.imm) {
            Arrival::Late => self.late += 1,
            Arrival::Outside => self.outside += 1,
            _ => {}
        }
    }
}

/// An end.
pub struct End {
    pub below: Below,
    pub reliable: Reliable<Rc<Buf>>,
    token: u64,
    tick_us: u64,
}

/// Two ends.
pub struct World {
    pub ends: [End; 2],
    pub now_us: u64,
    links: [Link; 2],
    events: BinaryHeap<Reverse<(u64, u64, usize)>>,
    pending: Vec<Option<(usize, What)>>,
    free: Vec<usize>,
    count: u64,
}

/// Where memory for parity begins; everything before is the test's.
pub const SCRATCH_AT: u64 = 1 << 20;
const SCRATCHES: u64 = 64;

impl World {
    pub fn new(
        seed: u64,
        attr: Attr,
        config: Config,
        conditions: Conditions,
        mutation: Option<Mutation>,
    ) -> World {
        let layout = Layout::new(&attr).unwrap();
        let scratch_bytes = layout.message_bytes;
        let end = |token| {
            let board = Board::new(&layout);
            let root = vec![vec![None; layout.slots as usize]; usize::from(attr.generations)];
            let scratch = (0..SCRATCHES).map(|i| SCRATCH_AT + i * scratch_bytes).collect();
            End {
                below: Below {
                    memory: vec![0; (SCRATCH_AT + SCRATCHES * scratch_bytes) as usize],
                    board: match mutation {
                        Some(mutation) => board.mutated(mutation),
                        None => board,
                    },
                    receives: Receives::new(&layout),
                    clearance: Clearance::default(),
                    sends: Sends::new(&layout),
                    root,
                    windows: None,
                    layout,
                    says: Vec::new(),
                    scratch: Rc::new(RefCell::new(scratch)),
                    held: BTreeSet::new(),
                    link_free_us: 0,
                    now_us: 0,
                    aside_us: None,
                    encoding: Vec::new(),
                    lots: Lots(seed ^ 0xcccc),
                    late: 0,
                    outside: 0,
                },
                reliable: Reliable::new(&layout, config),
                token,
                tick_us: u64::MAX,
            }
        };
        let link = |n| Link { lots: Lots(seed ^ n), conditions, bad: false, free_ns: 0 };
        World {
            ends: [end(11), end(22)],
            now_us: 0,
            links: [link(0xaaaa), link(0xbbbb)],
            events: BinaryHeap::new(),
            pending: Vec::new(),
            free: Vec::new(),
            count: 0,
        }
    }

    /// The same, of devices without indirect keys.
    pub fn with_windows(mut self) -> World {
        for end in &mut self.ends {
            let layout = end.below.layout;
            end.below.windows = Some(Windows::new(&layout));
            end.below.sends.cleared.with_keys(layout.attr().channels.into());
        }
        self
    }

    /// The same, with parity made aside, which takes up to so long.
    pub fn encoding_aside(mut self, most_us: u64) -> World {
        self.ends.iter_mut().for_each(|end| end.below.aside_us = Some(most_us));
        self
    }

    /// All parity that is being made will be there at the next look.
    pub fn make_all(&mut self) {
        let encoding = self.ends.iter_mut().flat_map(|end| &mut end.below.encoding);
        encoding.for_each(|(due_us, ..)| *due_us = 0);
    }

    pub fn set_conditions(&mut self, conditions: Conditions) {
        self.links.iter_mut().for_each(|link| link.conditions = conditions);
    }

    pub fn buffer(&self, addr: u64) -> Rc<Buf> {
        Rc::new(Buf { addr, pool: None })
    }

    fn schedule(&mut self, at_us: u64, end: usize, what: What) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.pending.push(None);
            self.pending.len() - 1
        });
        self.pending[index] = Some((end, what));
        self.count += 1;
        self.events.push(Reverse((at_us, self.count, index)));
    }

    /// An end does what there is to do; what it sends goes on its way.
    pub fn run(&mut self, end: usize) {
        let now_us = self.now_us;
        let mut next_us = u64::MAX;
        // What is taken from the queues makes room for more.
        for _ in 0..1000 {
            let e = &mut self.ends[end];
            (e.below.now_us, e.below.link_free_us) = (now_us, self.links[end].free_ns / 1000);
            next_us = e.reliable.tick(now_us, &mut e.below).unwrap_or(u64::MAX);
            if !self.send(end) {
                break;
            }
        }
        let e = &mut self.ends[end];
        let clear = e.below.clearance.poll(now_us);
        e.below.says.extend(clear);
        let said: Vec<Control> = e.below.says.drain(..).collect();
        let clear_us = e.below.clearance.deadline_us().unwrap_or(u64::MAX);
        let token = self.ends[1 - end].token;
        for message in said {
            let bytes = message.encode(token);
            for at_us in self.links[end].arrivals_us(now_us, bytes.len() as u64) {
                self.schedule(at_us, 1 - end, What::Control(bytes.clone()));
            }
        }
        let made_us = self.ends[end].below.encoding.iter().map(|(due_us, ..)| *due_us).min();
        let next_us = next_us.min(made_us.unwrap_or(u64::MAX));
        let busy_us = if self.ends[end].below.sends.backlog() > 0 { now_us + 50 } else { u64::MAX };
        let at_us = next_us.min(clear_us).min(busy_us).max(now_us + 1);
        let room_us = self.links[end].free_ns / 1000;
        let at_us = if next_us <= now_us { at_us.max(room_us.saturating_sub(100)) } else { at_us };
        if at_us < u64::MAX && (at_us < self.ends[end].tick_us || self.ends[end].tick_us <= now_us)
        {
            self.ends[end].tick_us = at_us;
            self.schedule(at_us, end, What::Tick);
        }
    }

    fn send(&mut self, end: usize) -> bool {
        let mut packets = Vec::new();
        let channels = self.ends[end].below.layout.attr().channels;
        for channel in 0..channels.into() {
            self.ends[end].below.sends.take(channel, 64, &mut packets);
        }
        for packet in &packets {
            let below = &mut self.ends[end].below;
            below.sends.completed(packet.seq, 1, true);
            let at = packet.local.addr as usize;
            let payload = below.memory[at..at + packet.bytes as usize].to_vec();
            for at_us in self.links[end].arrivals_us(self.now_us, packet.bytes.into()) {
                self.schedule(
                    at_us,
                    1 - end,
                    What::Packet { packet: *packet, payload: payload.clone() },
                );
            }
        }
        !packets.is_empty()
    }

    /// The next event; false: there is none.
    pub fn step(&mut self) -> bool {
        let Some(Reverse((at_us, _, index))) = self.events.pop() else { return false };
        let Some((end, what)) = self.pending[index].take() else { return true };
        self.free.push(index);
        self.now_us = self.now_us.max(at_us);
        let e = &mut self.ends[end];
        match what {
            What::Packet { packet, payload } => {
                e.below.take(&packet, &payload);
                // As often as a worker looks: not after every packet.
                if e.tick_us > self.now_us + 20 {
                    self.ends[end].tick_us = self.now_us + 20;
                    self.schedule(self.now_us + 20, end, What::Tick);
                }
                return true;
            }
            What::Control(bytes) => match Control::decode(&bytes, e.token) {
                Heard::Message(Control::Clear { first, stamp_us, bytes, rkeys }) => {
                    let slots = e.below.layout.slots;
                    let answer =
                        e.below.sends.cleared.on_clear(first, stamp_us, &bytes, &rkeys, slots);
                    e.below.sends.release();
                    e.below.says.push(answer);
                }
                Heard::Message(Control::Cleared { next, stamp_us }) => {
                    e.below.clearance.on_cleared(next, stamp_us, self.now_us);
                }
                Heard::Message(message) => {
                    e.below.now_us = self.now_us;
                    e.reliable.hear(self.now_us, &message, &mut e.below);
                }
                heard => panic!("{heard:?}"),
            },
            What::Tick if e.tick_us > self.now_us => return true,
            What::Tick => e.tick_us = u64::MAX,
        }
        self.run(end);
        true
    }
}
