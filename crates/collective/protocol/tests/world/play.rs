//! A case is played in the world: what ranks do, in which order things happen, when all is over,
//! and what came of it.

use super::*;

/// How long ranks go on when all is over.
const LINGER_US: u64 = 20_000;
/// So many polls find nothing before a rank polls seldom.
const IDLE_POLLS: u32 = 50;

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
    /// Each rank leaves as soon as it has done all, as a program does that ends; else all stay
    /// until all have.
    pub leave: bool,
    pub folding: Folding,
    pub form: Option<Form>,
    /// Frames that a NIC has on its way at most, and what it carries, in Mbit/s, where that is
    /// bounded.
    pub window: u32,
    pub nic_mbps: Option<u64>,
    /// NICs that carry less: host, rail, Mbit/s.
    pub slow_nics: Vec<(u32, u8, u64)>,
    /// Plan with what NICs were seen to carry.
    pub measure: bool,
    /// No switch joins rails.
    pub rails_apart: bool,
    /// What messages out of band take longer than usual.
    pub late_us: u64,
}

pub struct Outcome {
    /// By rank and operation, the elements of the output.
    pub outputs: Vec<Vec<Vec<u64>>>,
    pub failures: Vec<Option<unbroken_collective_protocol::Failure>>,
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
        let of_rank = |at: &Vec<u64>| {
            at.iter().scan(0, |before, at| Some(at - std::mem::replace(before, *at))).max()
        };
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
        measure: case.measure,
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
        slow_nics: case.slow_nics.clone(),
        busy_ns: BTreeMap::new(),
        rails_apart: case.rails_apart,
        late_us: case.late_us,
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
                let nic = world.nic(slot.peer, from, rail);
                let in_us = world.carried_us(slot.peer, nic, 1, bytes.len());
                if !matches!(what, What::Test) {
                    world.at(
                        in_us,
                        Event::Write { from, slot, rail, qp: qp.peer_id, bytes, notice },
                    );
                }
                world.at(
                    in_us + ANSWER_US,
                    Event::Sent { to: from, peer: slot.peer, rail, qp: qp.id, what },
                );
            }
            Event::Write { from, slot, rail, qp, bytes, notice } => {
                let to = slot.peer;
                let mine = world.ranks[to].qps.get(&(from, rail)).copied();
                if mine.is_some_and(|q| q.open && q.id == qp) && world.gets_through(from, to, rail)
                {
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
                    engines[to].on_message(
                        from,
                        &message,
                        &mut WorldEnv { world: &mut world, me: to },
                    );
                }
            }
            Event::Gone { to, .. } if world.ranks[to].gone => {}
            Event::Gone { rank, to } => {
                engines[to].on_lost(rank, &mut WorldEnv { world: &mut world, me: to })
            }
            Event::Probed { to, probe, answered } => {
                if world.ranks[to].probes.contains_key(&probe) {
                    engines[to].on_probed(
                        probe,
                        answered,
                        &mut WorldEnv { world: &mut world, me: to },
                    );
                }
            }
            Event::Heal { fault } => world.active.retain(|f| *f != fault),
            Event::Poll { rank } => {
                if world.ranks[rank].is_silent() {
                    continue;
                }
                engines[rank].keep_time(world.now_us);
                let polled = world.random.below(6);
                for _ in 0..polled {
                    let Some((id, news)) = world.ranks[rank].cq.pop_front() else { break };
                    let mut env = WorldEnv { world: &mut world, me: rank };
                    let current = |env: &WorldEnv, peer, rail| {
                        env.world.ranks[rank]
                            .qps
                            .get(&(peer, rail))
                            .is_some_and(|q| q.open && q.id == id)
                    };
                    match news {
                        News::Notice(peer, notice) => {
                            engines[rank].on_notice(peer, notice, &mut env)
                        }
                        News::Sent(peer, rail, What::Test) => {
                            engines[rank].on_tested(peer, rail, &mut env)
                        }
                        News::Sent(peer, rail, What::Frame(stream)) => {
                            engines[rank].on_sent(peer, rail, Some(stream))
                        }
                        News::Sent(peer, rail, What::Notice) => {
                            engines[rank].on_sent(peer, rail, None)
                        }
                        News::Failed(peer, rail) if current(&env, peer, rail) => {
                            engines[rank].fail_path(peer, rail, &mut env)
                        }
                        News::Failed(..) => {}
                    }
                }
                let now_us = world.now_us;
                let mut env = WorldEnv { world: &mut world, me: rank };
                engines[rank].on_time(now_us, &mut env);
                engines[rank].pump(&mut env);
                if engines[rank].failure().is_none() && !engines[rank].is_busy() {
                    let before = outputs[rank].len();
                    step(
                        case,
                        rank,
                        &mut engines[rank],
                        &mut begun[rank],
                        &mut outputs[rank],
                        &mut world,
                    );
                    if outputs[rank].len() > before {
                        results_us[rank].push(now_us);
                    }
                }
                let done = outputs[rank].len() == case.script[rank].len()
                    && engines[rank].failure().is_none();
                // What it has sent is used first, but for that nobody waits for ever.
                let done_us =
                    if done { *world.ranks[rank].done_us.get_or_insert(now_us) } else { now_us };
                if case.leave
                    && done
                    && (engines[rank].is_drained() || now_us > done_us + case.timeout_us)
                {
                    leave(rank, case.script[rank].len() as u64, &mut engines[rank], &mut world);
                }
                let lost = |r: usize| engines[r].failure().is_some() || world.ranks[r].is_silent();
                let has_all = |r: usize| lost(r) || outputs[r].len() == case.script[r].len();
                let is_over = |r: usize| lost(r) || engines[r].is_drained();
                if (0..ranks).all(has_all) && (0..ranks).all(is_over) {
                    // What is being said is heard yet.
                    let since_us = *ended_us.get_or_insert(world.now_us);
                    if world.now_us > since_us + LINGER_US {
                        break;
                    }
                }
                let local = &mut world.ranks[rank];
                let idle = local.cq.is_empty() && local.progress == engines[rank].progress();
                local.idle = if idle { local.idle + 1 } else { 0 };
                local.progress = engines[rank].progress();
                // Who has found nothing for long polls seldom.
                let most_us = if local.idle < IDLE_POLLS { 30 } else { 300 };
                let in_us = 1 + world.random.below(most_us);
                world.at(in_us, Event::Poll { rank });
            }
        }
    }
    let moved = world
        .ranks
        .iter()
        .flat_map(|r| &r.notes)
        .filter(|n| matches!(n, Note::Moved { .. }))
        .count();
    let notes = world.ranks.iter().map(|r| r.notes.clone()).collect();
    let failures = engines.iter().map(|e| e.failure().cloned()).collect();
    let World { returned, carried, .. } = world;
    Outcome { outputs, failures, took_us: ended_us, moved, returned, notes, carried, results_us }
}

/// What a communicator does when the program has no more use for it.
fn leave(rank: Rank, done: u64, engine: &mut Engine, world: &mut World) {
    let ranks = world.ranks.len();
    engine.leave(&mut WorldEnv { world, me: rank });
    // Those to whom it has a connection out of band hear it, too.
    let neighbours: Vec<Rank> = Engine::neighbours(rank, ranks).collect();
    let connected = |to: &Rank| world.oob.contains_key(&(rank, *to));
    let told: Vec<Rank> =
        (0..ranks).filter(|to| !neighbours.contains(to) && connected(to)).collect();
    let left = Message::News(Word::Left { rank, done });
    told.iter().for_each(|to| WorldEnv { world, me: rank }.tell(*to, &left));
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
        let Some((_, picture)) = engine.take_up(number) else { return };
        let planned = views::plan(&case.topology, &picture, collective, case.folding, case.form);
        world.ranks[rank].planned = Some(planned.expect("a plan").plan.program(rank));
        return;
    };
    let lens = [
        collective.buffer_len(rank, Buffer::Input),
        collective.buffer_len(rank, Buffer::Output),
        program.scratch,
    ];
    if rank == 0 {
        world.carried.fill(0);
    }
    let local = &mut world.ranks[rank];
    local.buffers = lens.map(|len| vec![0xa5; len as usize * size]);
    local.work =
        Some((collective.data(), collective.operation().reduce_op().unwrap_or(ReduceOp::Sum)));
    if let Some(s) = place(collective, rank, false) {
        let input = bytes_of(&case.inputs[*begun][rank], size);
        local.buffers[s.buffer as usize][s.start as usize * size..][..input.len()]
            .copy_from_slice(&input);
    }
    *begun += 1;
    let terms = Terms::of(Description::of(collective), collective, rank);
    engine.start(number, terms, size as u64, program.into(), &mut WorldEnv { world, me: rank });
}
