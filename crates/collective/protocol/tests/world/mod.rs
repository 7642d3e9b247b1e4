//! A world for engines: hosts with NICs on rails, queue pairs that flush when they fail, TCP
//! between ranks, faults, and virtual time.
//!
//! What it does on purpose, since networks do: a write that is on its way arrives although its
//! sender has closed, unless the receiver has; a notice that lies in a completion queue when its
//! queue pair is closed is lost, or is polled later; a path that is cut says nothing to the
//! receiver, and fails its sender after a while.

mod cases;
mod env;
mod play;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[allow(unused_imports)]
pub use cases::*;
use env::WorldEnv;
pub use play::*;
use unbroken_collective_protocol::agree::{Description, Terms};
use unbroken_collective_protocol::frame::Header;
use unbroken_collective_protocol::frame::{CROSS, HEADER_BYTES, MEMORY, OUT_OF_BAND};
use unbroken_collective_protocol::message::{Message, News as Word};
use unbroken_collective_protocol::run::Target;
use unbroken_collective_protocol::{
    reduce, views, Bytes, Config, Engine, Env, Mutant, Note, ProbeId, Rank, Slot,
};
use unbroken_schedule::{
    Buffer, Collective, DataType, Folding, Form, Program, ReduceOp, Slice, Topology, Work,
};

/// A silent path fails a queue pair after this.
pub const GIVES_UP_US: u64 = 3_000;
/// How long an acknowledgement takes, where NICs have a rate.
const ANSWER_US: u64 = 10;
/// Headers of a write, where NICs have a rate.
const WIRE_BYTES: usize = 64;

/// A small generator (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Errors at once, and a silent peer.
    NicDead {
        host: u32,
        rail: u8,
    },
    CableCut {
        host: u32,
        rail: u8,
    },
    SwitchDown {
        rail: u8,
    },
    /// One queue pair fails.
    QpError {
        a: Rank,
        b: Rank,
        rail: u8,
    },
    /// A process ends.
    Death {
        rank: Rank,
    },
    /// A process stands still; its NICs do not.
    Stop {
        rank: Rank,
    },
}

/// A fault that begins after so many writes, and ends after a time.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    pub fault: Fault,
    pub after_writes: u64,
    pub lasts_us: Option<u64>,
}

/// What was sent.
#[derive(Clone, Copy)]
enum What {
    Frame(u8),
    Notice,
    Test,
}

/// A write that comes to the NIC of its receiver, whose line may be busy.
struct Flight {
    from: Rank,
    slot: Slot,
    rail: u8,
    qp: Qp,
    bytes: Vec<u8>,
    notice: u32,
    what: What,
}

enum Event {
    Reaches(Flight),
    Write { from: Rank, slot: Slot, rail: u8, qp: u64, bytes: Vec<u8>, notice: u32 },
    Sent { to: Rank, peer: Rank, rail: u8, qp: u64, what: What },
    Failed { to: Rank, peer: Rank, rail: u8, qp: u64 },
    Told { from: Rank, to: Rank, message: Vec<u8> },
    Gone { rank: Rank, to: Rank },
    Probed { to: Rank, probe: ProbeId, answered: bool },
    Poll { rank: Rank },
    Heal { fault: Fault },
}

#[derive(Clone, Copy, Default)]
struct Qp {
    id: u64,
    peer_id: u64,
    nic: u8,
    open: bool,
    /// Nothing gets through any more.
    stuck: bool,
}

enum News {
    Notice(Rank, u32),
    Sent(Rank, u8, What),
    Failed(Rank, u8),
}

#[derive(Default)]
struct Local {
    qps: BTreeMap<(Rank, u8), Qp>,
    /// To and from whom it has slots.
    has_slots: BTreeSet<Rank>,
    cq: VecDeque<(u64, News)>,
    out: BTreeMap<(Rank, u8, u64), Vec<u8>>,
    into: BTreeMap<(Rank, u8, u64), Vec<u8>>,
    buffers: [Vec<u8>; 3],
    aside: BTreeMap<(u32, u32), Vec<u8>>,
    work: Option<(DataType, ReduceOp)>,
    dead: bool,
    stopped: bool,
    /// It has done all it had to do, and has left.
    gone: bool,
    done_us: Option<u64>,
    notes: Vec<Note>,
    /// The rail of each probe, and the other end.
    probes: BTreeMap<ProbeId, (u8, Option<Rank>)>,
    planned: Option<Program>,
    /// Polls that have found nothing, one after the other; what had gone on by the last.
    idle: u32,
    progress: u64,
}

impl Local {
    /// Neither hears nor does anything.
    fn is_silent(&self) -> bool {
        self.dead || self.stopped || self.gone
    }
}

struct World {
    now_us: u64,
    random: Random,
    hosts: Vec<u32>,
    slots: u64,
    events: BTreeMap<(u64, u64), Event>,
    order: u64,
    ranks: Vec<Local>,
    active: Vec<Fault>,
    planned: Vec<Planned>,
    writes: u64,
    returned: Option<u64>,
    carried: Vec<u64>,
    held_one_in: u64,
    /// When the last message between two ranks arrives: TCP keeps the order.
    oob: BTreeMap<(Rank, Rank), u64>,
    next_qp: u64,
    /// The last arrival of a queue pair: writes keep their order.
    last: BTreeMap<u64, u64>,
    /// What a NIC carries in each direction, where that is bounded, and until when (ns) its lines
    /// are busy: out, in.
    nic_mbps: Option<u64>,
    /// NICs that carry less.
    slow_nics: Vec<(u32, u8, u64)>,
    busy_ns: BTreeMap<(u32, u8), [u64; 2]>,
    /// No switch joins rails.
    rails_apart: bool,
    late_us: u64,
}

impl World {
    /// When the line of a NIC, out or in, has carried so many bytes more.
    fn carried_us(&mut self, rank: Rank, rail: u8, way: usize, bytes: usize) -> u64 {
        let nic = (self.hosts[rank], rail);
        let slow = self.slow_nics.iter().find(|(host, rail, _)| (*host, *rail) == nic);
        let mbps = slow.map_or(self.nic_mbps.expect("a rate"), |(.., mbps)| *mbps);
        let line_ns = &mut self.busy_ns.entry(nic).or_default()[way];
        *line_ns = (*line_ns).max(1_000 * self.now_us) + (bytes + WIRE_BYTES) as u64 * 8_000 / mbps;
        *line_ns / 1_000 - self.now_us
    }

    fn at(&mut self, in_us: u64, event: Event) {
        self.order += 1;
        self.events.insert((self.now_us + in_us, self.order), event);
    }

    fn struck(&self, rank: Rank, rail: u8) -> bool {
        let host = self.hosts[rank];
        self.active.iter().any(|f| match *f {
            Fault::NicDead { host: h, rail: r } | Fault::CableCut { host: h, rail: r } => {
                (h, r) == (host, rail)
            }
            Fault::SwitchDown { rail: r } => r == rail,
            _ => false,
        })
    }

    fn nic_dead(&self, rank: Rank, rail: u8) -> bool {
        let host = self.hosts[rank];
        self.active.contains(&Fault::NicDead { host, rail })
    }

    /// Whether a packet gets from one to the other.
    fn gets_through(&self, a: Rank, b: Rank, path: u8) -> bool {
        if path == MEMORY {
            return true;
        }
        let (near, far) = (self.nic(a, b, path), self.nic(b, a, path));
        let joined = near == far || !self.rails_apart;
        joined && !(self.struck(a, near) || self.struck(b, far) || self.ranks[b].dead)
    }

    /// The NIC of a rank that its path to another goes over.
    fn nic(&self, rank: Rank, peer: Rank, path: u8) -> u8 {
        match path {
            CROSS => self.ranks[rank].qps.get(&(peer, path)).map_or(0, |qp| qp.nic),
            _ => path,
        }
    }

    fn begin(&mut self, fault: Fault) {
        match fault {
            Fault::QpError { a, b, rail } => {
                if let Some(qp) = self.ranks[a].qps.get(&(b, rail)).copied().filter(|qp| qp.open) {
                    self.ranks[a].cq.push_back((qp.id, News::Failed(b, rail)));
                }
                return;
            }
            Fault::Death { rank } => {
                self.ranks[rank].dead = true;
                let ranks = self.ranks.len();
                for to in Engine::neighbours(rank, ranks).collect::<Vec<_>>() {
                    self.at(50, Event::Gone { rank, to });
                }
                return;
            }
            Fault::Stop { rank } => {
                self.ranks[rank].stopped = true;
                return;
            }
            Fault::NicDead { host, rail } => {
                for rank in 0..self.ranks.len() {
                    if self.hosts[rank] == host {
                        // device fatal: every queue pair of it flushes
                        let of_nic: Vec<_> = self.ranks[rank]
                            .qps
                            .iter()
                            .filter(|((_, path), q)| *path != MEMORY && q.nic == rail && q.open)
                            .map(|((peer, path), q)| (*peer, *path, q.id))
                            .collect();
                        for (peer, path, id) in of_nic {
                            self.ranks[rank].cq.push_back((id, News::Failed(peer, path)));
                        }
                    }
                }
            }
            _ => {}
        }
        self.active.push(fault);
    }

    fn send(
        &mut self,
        from: Rank,
        slot: Slot,
        rail: u8,
        bytes: Vec<u8>,
        notice: u32,
        what: What,
    ) -> bool {
        let Some(qp) = self.ranks[from].qps.get(&(slot.peer, rail)).copied().filter(|qp| qp.open)
        else {
            return false;
        };
        let nic = self.nic(from, slot.peer, rail);
        if self.nic_dead(from, nic) {
            return false;
        }
        self.writes += 1;
        if let (0, Some(carried)) = (from, self.carried.get_mut(usize::from(nic))) {
            *carried += bytes.len().saturating_sub(HEADER_BYTES) as u64;
        }
        let due: Vec<Planned> =
            self.planned.iter().filter(|p| p.after_writes <= self.writes).copied().collect();
        self.planned.retain(|p| p.after_writes > self.writes);
        for p in due {
            self.begin(p.fault);
            if let Some(lasts) = p.lasts_us {
                self.at(lasts, Event::Heal { fault: p.fault });
            }
        }
        let stuck = qp.stuck || !self.gets_through(from, slot.peer, rail);
        if stuck {
            self.ranks[from].qps.entry((slot.peer, rail)).and_modify(|q| q.stuck = true);
            self.at(GIVES_UP_US, Event::Failed { to: from, peer: slot.peer, rail, qp: qp.id });
            return true;
        }
        // Now and then something is held up for long, and arrives when nobody waits for it any
        // more.
        let held_us =
            if self.random.below(self.held_one_in) == 0 { self.random.below(2_000) } else { 0 };
        let latency = if rail == MEMORY { 1 } else { 5 + self.random.below(30) + held_us };
        let bounded = self.nic_mbps.is_some() && rail != MEMORY;
        let leaves_us = if bounded { self.carried_us(from, nic, 0, bytes.len()) } else { 0 };
        let arrival =
            (self.now_us + leaves_us + latency).max(self.last.get(&qp.id).copied().unwrap_or(0));
        self.last.insert(qp.id, arrival);
        let in_us = arrival - self.now_us;
        if bounded {
            self.at(in_us, Event::Reaches(Flight { from, slot, rail, qp, bytes, notice, what }));
            return true;
        }
        if !matches!(what, What::Test) {
            self.at(in_us, Event::Write { from, slot, rail, qp: qp.peer_id, bytes, notice });
        }
        self.at(in_us + latency, Event::Sent { to: from, peer: slot.peer, rail, qp: qp.id, what });
        true
    }
}
