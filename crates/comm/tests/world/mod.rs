//! A world for engines: hosts with NICs on rails, queue pairs that flush when they fail, TCP between ranks, faults, and virtual time.
//!
//! What it does on purpose, since networks do: a write that is on its way arrives although its sender has closed, unless the receiver has; a
//! notice that lies in a completion queue when its queue pair is closed is lost, or is polled later; a path that is cut says nothing to the
//! receiver, and fails its sender after a while.

mod arms;

use std::collections::{BTreeMap, VecDeque};

use arms::Arms;
use unbroken_comm::agree::Description;
use unbroken_comm::frame::Header;
use unbroken_comm::frame::{HEADER_BYTES, MEMORY};
use unbroken_comm::message::{Message, News as Word};
use unbroken_comm::run::Target;
use unbroken_comm::{reduce, views, Bytes, Config, Engine, Hands, Mutant, Note, ProbeId, Rank, Slot};
use unbroken_schedule::{Buffer, Collective, DataType, Folding, Program, ReduceOp, Slice, Topology, Work};

/// A silent path fails a queue pair after this.
pub const GIVES_UP_US: u64 = 3_000;
/// How long an acknowledgement takes, where NICs have a rate.
const ANSWER_US: u64 = 10;
/// Headers of a write, where NICs have a rate.
const WIRE_BYTES: usize = 64;
/// How long ranks go on when all is over.
const LINGER_US: u64 = 20_000;

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
    /// What a NIC carries in each direction, where that is bounded, and until when (ns) its lines are busy: out, in.
    nic_mbps: Option<u64>,
    busy_ns: BTreeMap<(u32, u8), [u64; 2]>,
}

impl World {
    /// When the line of a NIC, out or in, has carried so many bytes more.
    fn carried_us(&mut self, rank: Rank, rail: u8, way: usize, bytes: usize, mbps: u64) -> u64 {
        let line_ns = &mut self.busy_ns.entry((self.hosts[rank], rail)).or_default()[way];
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
            Fault::NicDead { host: h, rail: r } | Fault::CableCut { host: h, rail: r } => (h, r) == (host, rail),
            Fault::SwitchDown { rail: r } => r == rail,
            _ => false,
        })
    }

    fn nic_dead(&self, rank: Rank, rail: u8) -> bool {
        let host = self.hosts[rank];
        self.active.contains(&Fault::NicDead { host, rail })
    }

    /// Whether a packet gets from one to the other.
    fn gets_through(&self, a: Rank, b: Rank, rail: u8) -> bool {
        rail == MEMORY || !(self.struck(a, rail) || self.struck(b, rail) || self.ranks[b].dead)
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
                            .filter(|((_, r), q)| *r == rail && q.open)
                            .map(|((p, _), q)| (*p, q.id))
                            .collect();
                        for (peer, id) in of_nic {
                            self.ranks[rank].cq.push_back((id, News::Failed(peer, rail)));
                        }
                    }
                }
            }
            _ => {}
        }
        self.active.push(fault);
    }

    fn send(&mut self, from: Rank, slot: Slot, rail: u8, bytes: Vec<u8>, notice: u32, what: What) -> bool {
        let Some(qp) = self.ranks[from].qps.get(&(slot.peer, rail)).copied().filter(|qp| qp.open) else { return false };
        if self.nic_dead(from, rail) {
            return false;
        }
        self.writes += 1;
        if let (0, Some(carried)) = (from, self.carried.get_mut(usize::from(rail))) {
            *carried += bytes.len().saturating_sub(HEADER_BYTES) as u64;
        }
        let due: Vec<Planned> = self.planned.iter().filter(|p| p.after_writes <= self.writes).copied().collect();
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
        // Now and then something is held up for long, and arrives when nobody waits for it any more.
        let held_us = if self.random.below(self.held_one_in) == 0 { self.random.below(2_000) } else { 0 };
        let latency = if rail == MEMORY { 1 } else { 5 + self.random.below(30) + held_us };
        let mbps = self.nic_mbps.filter(|_| rail != MEMORY);
        let leaves_us = mbps.map_or(0, |mbps| self.carried_us(from, rail, 0, bytes.len(), mbps));
        let arrival = (self.now_us + leaves_us + latency).max(self.last.get(&qp.id).copied().unwrap_or(0));
        self.last.insert(qp.id, arrival);
        let in_us = arrival - self.now_us;
        if mbps.is_some() {
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

/// An operation of one rank, as it takes it.
pub type Script = Vec<Vec<Collective>>;

pub struct Case {
    pub topology: Topology,
    pub script: Script,
    pub inputs: Vec<Vec<Vec<u64>>>,
    pub faults: Vec<Planned>,
    pub seed: u64,
    pub slots: u64,
    pub payload: u32,
    pub mutant: Option<Mutant>,
    /// One write in so many is held up for long.
    pub held_one_in: u64,
    pub timeout_us: u64,
    /// Each rank leaves as soon as it has done all, as a program does that ends; else all stay until all have.
    pub leave: bool,
    pub folding: Folding,
    /// Frames that a NIC has on its way at most, and what it carries, in Mbit/s, where that is bounded.
    pub window: u32,
    pub nic_mbps: Option<u64>,
}

pub struct Outcome {
    /// By rank and operation, the elements of the output.
    pub outputs: Vec<Vec<Vec<u64>>>,
    pub failures: Vec<Option<unbroken_comm::Failure>>,
    /// When all was done or had failed.
    pub took_us: Option<u64>,
    pub moved: usize,
    /// How much had been written when the first path that had failed was Up again.
    pub returned: Option<u64>,
    /// What ranks have noted.
    pub notes: Vec<Vec<Note>>,
    /// Payload that rank 0 sent over each rail in the last operation.
    pub carried: Vec<u64>,
    /// When each rank had each result.
    pub results_us: Vec<Vec<u64>>,
}

impl Outcome {
    /// The longest time from one result of a rank to its next, or from the beginning to its first.
    pub fn longest_us(&self) -> u64 {
        let of_rank = |at: &Vec<u64>| at.iter().scan(0, |before, at| Some(at - std::mem::replace(before, *at))).max();
        self.results_us.iter().filter_map(of_rank).max().unwrap_or(0)
    }
}

fn bytes_of(elements: &[u64], size: usize) -> Vec<u8> {
    elements.iter().flat_map(|e| e.to_le_bytes().into_iter().take(size)).collect()
}

fn elements_of(bytes: &[u8], size: usize) -> Vec<u64> {
    let element = |b: &[u8]| b.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte));
    bytes.chunks_exact(size).map(element).collect()
}

/// Where a rank's input or output lies.
fn place(collective: &Collective, rank: Rank, output: bool) -> Option<Slice> {
    let range = if output { collective.output_range(rank) } else { collective.input_range(rank) };
    if range.is_empty() {
        return None;
    }
    if collective.operation().is_pairwise() {
        let buffer = if output { Buffer::Output } else { Buffer::Input };
        return Some(Slice { buffer, start: 0, len: range.end - range.start });
    }
    if output {
        collective.output(rank, &range)
    } else {
        collective.input(rank, &range)
    }
}

/// Runs a case to its end, or until the time is over.
pub fn run(case: &Case, most_us: u64) -> Outcome {
    let ranks = case.topology.ranks();
    let hosts: Vec<u32> = (0..ranks).map(|r| case.topology.host_of(r) as u32).collect();
    let rails = case.topology.hosts()[0].nics.len() as u8;
    let config = |me| Config {
        me,
        hosts: hosts.clone(),
        rails,
        slots: case.slots,
        payload: case.payload,
        window: case.window,
        ask_us: 20_000,
        timeout_us: case.timeout_us,
        balance: true,
        mutant: case.mutant,
    };
    let mut engines: Vec<Engine> = (0..ranks).map(|me| Engine::new(config(me))).collect();
    let mut world = World {
        now_us: 0,
        random: Random(case.seed),
        hosts: hosts.clone(),
        slots: case.slots,
        events: BTreeMap::new(),
        order: 0,
        ranks: (0..ranks).map(|_| Local::default()).collect(),
        active: Vec::new(),
        planned: case.faults.clone(),
        writes: 0,
        returned: None,
        carried: vec![0; usize::from(rails)],
        held_one_in: case.held_one_in,
        oob: BTreeMap::new(),
        next_qp: 0,
        last: BTreeMap::new(),
        nic_mbps: case.nic_mbps,
        busy_ns: BTreeMap::new(),
    };
    for rank in 0..ranks {
        let in_us = world.random.below(100);
        world.at(in_us, Event::Poll { rank });
    }
    let mut outputs: Vec<Vec<Vec<u64>>> = vec![Vec::new(); ranks];
    let mut begun = vec![0usize; ranks];
    let mut ended_us = None;
    let mut results_us = vec![Vec::new(); ranks];
    while let Some(((at, _), event)) = world.events.pop_first() {
        world.now_us = at;
        if at > most_us {
            break;
        }
        match event {
            Event::Reaches(Flight { from, slot, rail, qp, bytes, notice, what }) => {
                let mbps = case.nic_mbps.expect("a rate");
                let in_us = world.carried_us(slot.peer, rail, 1, bytes.len(), mbps);
                if !matches!(what, What::Test) {
                    world.at(in_us, Event::Write { from, slot, rail, qp: qp.peer_id, bytes, notice });
                }
                world.at(in_us + ANSWER_US, Event::Sent { to: from, peer: slot.peer, rail, qp: qp.id, what });
            }
            Event::Write { from, slot, rail, qp, bytes, notice } => {
                let to = slot.peer;
                let mine = world.ranks[to].qps.get(&(from, rail)).copied();
                if mine.is_some_and(|q| q.open && q.id == qp) && world.gets_through(from, to, rail) {
                    if !bytes.is_empty() {
                        let key = (from, slot.stream, slot.seq % case.slots);
                        world.ranks[to].into.insert(key, bytes);
                    }
                    world.ranks[to].cq.push_back((qp, News::Notice(from, notice)));
                }
            }
            Event::Sent { to, peer, rail, qp, what } => {
                if world.ranks[to].qps.get(&(peer, rail)).is_some_and(|q| q.open && q.id == qp) {
                    if world.gets_through(to, peer, rail)
                        && world.ranks[peer].qps.get(&(to, rail)).is_some_and(|q| q.open)
                    {
                        world.ranks[to].cq.push_back((qp, News::Sent(peer, rail, what)));
                    } else {
                        world.at(GIVES_UP_US, Event::Failed { to, peer, rail, qp });
                    }
                }
            }
            Event::Failed { to, peer, rail, qp } => {
                if world.ranks[to].qps.get(&(peer, rail)).is_some_and(|q| q.open && q.id == qp) {
                    world.ranks[to].cq.push_back((qp, News::Failed(peer, rail)));
                }
            }
            Event::Told { from, to, message } => {
                if !world.ranks[to].is_silent() && !world.ranks[from].dead {
                    let message = Message::decode(&message).expect("a message");
                    engines[to].on_message(from, &message, &mut Arms { world: &mut world, me: to });
                }
            }
            Event::Gone { to, .. } if world.ranks[to].gone => {}
            Event::Gone { rank, to } => engines[to].on_lost(rank, &mut Arms { world: &mut world, me: to }),
            Event::Probed { to, probe, answered } => {
                if world.ranks[to].probes.contains_key(&probe) {
                    engines[to].on_probed(probe, answered, &mut Arms { world: &mut world, me: to });
                }
            }
            Event::Heal { fault } => world.active.retain(|f| *f != fault),
            Event::Poll { rank } => {
                if world.ranks[rank].is_silent() {
                    continue;
                }
                let polled = world.random.below(6);
                for _ in 0..polled {
                    let Some((id, news)) = world.ranks[rank].cq.pop_front() else { break };
                    let mut arms = Arms { world: &mut world, me: rank };
                    let current = |arms: &Arms, peer, rail| {
                        arms.world.ranks[rank].qps.get(&(peer, rail)).is_some_and(|q| q.open && q.id == id)
                    };
                    match news {
                        News::Notice(peer, notice) => engines[rank].on_notice(peer, notice, &mut arms),
                        News::Sent(peer, rail, What::Test) => engines[rank].on_tested(peer, rail, &mut arms),
                        News::Sent(peer, rail, What::Frame(stream)) => engines[rank].on_sent(peer, rail, Some(stream)),
                        News::Sent(peer, rail, What::Notice) => engines[rank].on_sent(peer, rail, None),
                        News::Failed(peer, rail) if current(&arms, peer, rail) => {
                            engines[rank].fail_path(peer, rail, &mut arms)
                        }
                        News::Failed(..) => {}
                    }
                }
                let now_us = world.now_us;
                let mut arms = Arms { world: &mut world, me: rank };
                engines[rank].on_time(now_us, &mut arms);
                engines[rank].pump(&mut arms);
                if engines[rank].failure().is_none() && !engines[rank].is_busy() {
                    let before = outputs[rank].len();
                    step(case, rank, &mut engines[rank], &mut begun[rank], &mut outputs[rank], &mut world);
                    if outputs[rank].len() > before {
                        results_us[rank].push(now_us);
                    }
                }
                let done = outputs[rank].len() == case.script[rank].len() && engines[rank].failure().is_none();
                // What it has sent is used first, but for that nobody waits for ever.
                let done_us = if done { *world.ranks[rank].done_us.get_or_insert(now_us) } else { now_us };
                if case.leave && done && (engines[rank].is_drained() || now_us > done_us + case.timeout_us) {
                    leave(rank, case.script[rank].len() as u64, &mut engines[rank], &mut world);
                }
                let lost = |r: usize| engines[r].failure().is_some() || world.ranks[r].is_silent();
                let over = |r: usize| lost(r) || outputs[r].len() == case.script[r].len() && engines[r].is_drained();
                if (0..ranks).all(over) {
                    // What is being said is heard yet.
                    let since_us = *ended_us.get_or_insert(world.now_us);
                    if world.now_us > since_us + LINGER_US {
                        break;
                    }
                }
                let in_us = 1 + world.random.below(30);
                world.at(in_us, Event::Poll { rank });
            }
        }
    }
    let moved = world.ranks.iter().flat_map(|r| &r.notes).filter(|n| matches!(n, Note::Moved { .. })).count();
    let notes = world.ranks.iter().map(|r| r.notes.clone()).collect();
    let failures = engines.iter().map(|e| e.failure().cloned()).collect();
    let World { returned, carried, .. } = world;
    Outcome { outputs, failures, took_us: ended_us, moved, returned, notes, carried, results_us }
}

/// What a communicator does when the program has no more use for it.
fn leave(rank: Rank, done: u64, engine: &mut Engine, world: &mut World) {
    let ranks = world.ranks.len();
    engine.leave(&mut Arms { world, me: rank });
    // Those to whom it has a connection out of band hear it, too.
    let neighbours: Vec<Rank> = Engine::neighbours(rank, ranks).collect();
    let connected = |to: &Rank| world.oob.contains_key(&(rank, *to));
    let told: Vec<Rank> = (0..ranks).filter(|to| !neighbours.contains(to) && connected(to)).collect();
    let left = Message::News(Word::Left { rank, done });
    told.iter().for_each(|to| Arms { world, me: rank }.tell(*to, &left));
    for to in neighbours.into_iter().chain(told) {
        let in_us = world.oob[&(rank, to)] - world.now_us;
        world.at(in_us, Event::Gone { rank, to });
    }
    let local = &mut world.ranks[rank];
    local.gone = true;
    local.qps.values_mut().for_each(|qp| qp.open = false);
    local.probes.clear();
}

/// Takes the result of an operation that is done, and begins the next.
fn step(
    case: &Case,
    rank: Rank,
    engine: &mut Engine,
    begun: &mut usize,
    outputs: &mut Vec<Vec<u64>>,
    world: &mut World,
) {
    if *begun > outputs.len() {
        let collective = &case.script[rank][outputs.len()];
        let size = collective.data().bytes() as usize;
        let got = place(collective, rank, true).map_or(Vec::new(), |s| {
            let bytes = &world.ranks[rank].buffers[s.buffer as usize];
            elements_of(&bytes[s.start as usize * size..][..s.len as usize * size], size)
        });
        outputs.push(got);
        world.ranks[rank].aside.clear();
        engine.finish(true);
    }
    let Some(collective) = case.script[rank].get(*begun) else { return };
    let size = collective.data().bytes() as usize;
    let number = *begun as u64;
    // Planning takes time, in which much may happen.
    let Some(program) = world.ranks[rank].planned.take() else {
        let Some((_, down)) = engine.take_up(number) else { return };
        let plan = views::plan(&case.topology, &down, collective, case.folding).expect("a plan");
        world.ranks[rank].planned = Some(plan.program(rank));
        return;
    };
    let lens =
        [collective.buffer_len(rank, Buffer::Input), collective.buffer_len(rank, Buffer::Output), program.scratch];
    if rank == 0 {
        world.carried.fill(0);
    }
    let local = &mut world.ranks[rank];
    local.buffers = lens.map(|len| vec![0xa5; len as usize * size]);
    local.work = Some((collective.data(), collective.operation().reduce_op().unwrap_or(ReduceOp::Sum)));
    if let Some(s) = place(collective, rank, false) {
        let input = bytes_of(&case.inputs[*begun][rank], size);
        local.buffers[s.buffer as usize][s.start as usize * size..][..input.len()].copy_from_slice(&input);
    }
    *begun += 1;
    let description = Description::of(collective);
    engine.start(number, description, size as u64, program.into(), &mut Arms { world, me: rank });
}
