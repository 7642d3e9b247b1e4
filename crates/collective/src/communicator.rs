//! Communicators: ranks that do operations together.
//!
//! An operation is driven by the thread that asks for it: it polls the NICs, which for softnics is what moves packets, and yields its core when
//! nothing has come. Between operations the thread out of band answers others (a path that has failed, one that is made again).

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use unbroken::Host;
use unbroken_comm::agree::Description;
use unbroken_comm::message::{Message, News as Word};
use unbroken_comm::{views, Config, Engine, Note, Rank};
use unbroken_schedule::{Collective, DataType, Fabric, Folding, Operation, Place, Program, ReduceOp, Topology};
use unbroken_schedule::{Counts, Host as HostShape, Nic as NicShape};

use crate::arms::Arms;
use crate::bootstrap::{meet, Hello, Id};
use crate::error::{Error, Result};
use crate::net::{Net, News, Shape};
use crate::oob::{self, Event, Oob};
use crate::operands::{check, Buffers, Operands};
use crate::status::{Board, Counters, Server, Snapshot};

/// How often the engine is told the time.
const TICK: Duration = Duration::from_micros(500);
/// How long a thread that finds nothing to do yields only; afterwards it sleeps between looks.
const YIELDS: Duration = Duration::from_millis(5);
const NAP: Duration = Duration::from_micros(50);
/// How often the thread out of band looks after an idle communicator that has something to look after, and one that has not.
const TENDS: Duration = Duration::from_millis(5);
const RESTS: Duration = Duration::from_millis(100);
/// Programs that are kept.
const KEPT: usize = 32;

/// How a communicator is to be. All ranks must have the same.
#[derive(Clone, Debug)]
pub struct Options {
    /// Queue pairs that fail over by themselves (SHIFT) carry the paths. Without, this library alone does what is needed.
    pub logical: bool,
    /// The order of reductions; in order, results are bitwise equal whatever fails.
    pub folding: Folding,
    /// Slots of a stream, and bytes of payload in each (a multiple of 64).
    pub slots: u32,
    /// See `slots`.
    pub payload_bytes: u32,
    /// Frames that a NIC has on its way.
    pub window: u32,
    /// Local ACK timeout (4.096 µs · 2^n) and retries of plain queue pairs: after how long a silent path fails.
    pub ack_timeout: u8,
    /// See `ack_timeout`.
    pub retries: u8,
    /// What each NIC carries, in Mbit/s.
    pub nic_mbps: u32,
    /// After standing still for so long, a rank asks the others what they are doing.
    pub ask: Duration,
    /// How long an operation may stand still, and two ranks be without a path.
    pub timeout: Duration,
    /// Where the status socket is to lie ([`crate::snapshots`]). None without.
    pub status_folder: Option<PathBuf>,
    /// How long to wait for all ranks at the beginning, and for what was sent to arrive at the end.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            logical: false,
            folding: Folding::InOrder,
            slots: 16,
            payload_bytes: 64 << 10,
            window: 16,
            ack_timeout: 13,
            retries: 3,
            nic_mbps: 100_000,
            ask: Duration::from_millis(500),
            timeout: Duration::from_secs(20),
            status_folder: None,
            patience: Duration::from_secs(60),
        }
    }
}

impl Options {
    /// What all ranks must have alike, as a text.
    fn settings(&self) -> String {
        format!(
            "logical {}, {:?}, {} slots of {} bytes, {} Mbit/s, timeout {} ms",
            self.logical,
            self.folding,
            self.slots,
            self.payload_bytes,
            self.nic_mbps,
            self.timeout.as_millis()
        )
    }

    fn check(&self) -> Result<()> {
        let refuse = |what: String| Err(Error::Refused(what));
        if !(2..=1024).contains(&self.slots) {
            return refuse(format!("{} slots; 2 to 1024 are possible", self.slots));
        }
        if self.payload_bytes == 0 || self.payload_bytes > 1 << 24 || !self.payload_bytes.is_multiple_of(64) {
            return refuse(format!("slots of {} bytes; a multiple of 64 up to 16 MiB is right", self.payload_bytes));
        }
        if !(1..=64).contains(&self.window) {
            return refuse(format!("a window of {} frames; 1 to 64 are possible", self.window));
        }
        Ok(())
    }
}

/// A program, and the view that it was planned with.
struct Kept {
    view: u32,
    collective: Collective,
    program: Arc<Program>,
}

struct State {
    engine: Engine,
    net: Net,
    oob: Oob,
    topology: Topology,
    began: Instant,
    ticked: Instant,
    number: u64,
    programs: Vec<Kept>,
    board: Board,
    notes: Vec<Note>,
    came: Vec<(Rank, u8, News)>,
}

/// A rank's end of a communicator. Ended when it is dropped.
pub struct Communicator {
    state: Arc<Mutex<State>>,
    board: Board,
    me: Rank,
    ranks: usize,
    options: Options,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Communicator {
    /// Takes part in the communicator of an id as one of its ranks, on a host's NICs. Returns when all have come.
    pub fn join(id: &Id, rank: Rank, ranks: usize, host: &Host, options: Options) -> Result<Communicator> {
        Communicator::join_at(id, rank, ranks, host, IpAddr::V4(Ipv4Addr::LOCALHOST), options)
    }

    /// The same; others reach this rank out of band at an address of this machine.
    pub fn join_at(
        id: &Id,
        rank: Rank,
        ranks: usize,
        host: &Host,
        at: IpAddr,
        options: Options,
    ) -> Result<Communicator> {
        options.check()?;
        if host.nic_count() == 0 {
            return Err(Error::Refused("the host has no NIC; a communicator needs one at least".into()));
        }
        let listener = oob::listen(at)?;
        let address = listener.local_addr().map_err(crate::error::io("a socket out of band"))?;
        let name = host.open(0)?.gid().0.iter().map(|byte| format!("{byte:02x}")).collect();
        let nics = vec![options.nic_mbps; host.nic_count()];
        let hello = Hello::new(rank, ranks, name, nics, address, options.settings());
        let all = meet(id, hello, options.patience)?;
        let (topology, hosts, rails) = picture(&all)?;
        let shape = Shape {
            logical: options.logical,
            slots: options.slots.into(),
            payload: options.payload_bytes,
            ack_timeout: options.ack_timeout,
            retries: options.retries,
        };
        let config = Config {
            me: rank,
            hosts,
            rails,
            slots: options.slots.into(),
            payload: options.payload_bytes,
            window: options.window,
            ask_us: options.ask.as_micros() as u64,
            timeout_us: options.timeout.as_micros() as u64,
            mutant: None,
        };
        let board = Board::new(rank, &config.hosts, rails);
        let server = options.status_folder.as_ref().map(|folder| Server::bind(folder, &board)).transpose()?;
        let oob = Oob::new(rank, id.secret, all.iter().map(|h| h.address).collect());
        let state = Arc::new(Mutex::new(State {
            engine: Engine::new(config),
            net: Net::new(host.clone(), rails, ranks, shape),
            oob,
            topology,
            began: Instant::now(),
            ticked: Instant::now(),
            number: 0,
            programs: Vec::new(),
            board: board.clone(),
            notes: Vec::new(),
            came: Vec::new(),
        }));
        let weak = Arc::downgrade(&state);
        lock(&state).oob.begin(listener, server, Box::new(move || attend(&weak)))?;
        lock(&state).with(&mut Operands::none(), |_, arms| {
            // So that the end of a process is noticed by its neighbours, whatever it does.
            Engine::neighbours(rank, ranks).for_each(|r| arms.oob.tell(r, &Message::Want));
        });
        Ok(Communicator { state, board, me: rank, ranks, options })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.me
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// What has happened so far.
    pub fn counters(&self) -> Counters {
        self.board.lock().counters
    }

    /// All that there is to be known.
    pub fn snapshot(&self) -> Snapshot {
        self.board.lock().clone()
    }

    /// Does an operation together with all other ranks. Returns when this rank's part is done: its output is there, its input may be changed.
    pub fn run(&self, operation: Operation, data: DataType, buffers: Buffers<'_>) -> Result<()> {
        let collective = Collective::new(operation, data, buffers.in_place(), self.ranks)?;
        check(&collective, self.me, &buffers).map_err(Error::Refused)?;
        let mut state = lock(&self.state);
        let state = &mut *state;
        if let Some(failure) = state.engine.failure() {
            return Err(failure.clone().into());
        }
        let program = state.program(&collective, self.options.folding)?;
        let mut operands = Operands::new(&collective, self.me, program.scratch, buffers);
        let (description, size) = (Description::of(&collective), collective.data().bytes());
        let number = state.number;
        state.number += 1;
        state.tick(&mut operands, true);
        state.with(&mut operands, |engine, arms| engine.start(number, description, size, program, arms));
        let mut idle = Idle::default();
        while state.engine.is_busy() {
            if let Some(failure) = state.engine.failure() {
                state.board.broken(failure);
                return Err(failure.clone().into());
            }
            idle.next(state.drive(&mut operands));
        }
        // Credit and what others wait to hear leave now, and not when somebody looks next.
        state.with(&mut operands, |engine, arms| engine.pump(arms));
        state.engine.finish(true);
        state.board.done(state.net.sent_bytes());
        Ok(())
    }

    /// AllReduce in place, of bytes of elements.
    pub fn all_reduce(&self, data: DataType, op: ReduceOp, buffer: &mut [u8]) -> Result<()> {
        let count = elements(data, buffer.len())?;
        self.run(Operation::AllReduce { op, count }, data, Buffers::InPlace(buffer))
    }

    /// Broadcast from a root, in place.
    pub fn broadcast(&self, data: DataType, root: Rank, buffer: &mut [u8]) -> Result<()> {
        let count = elements(data, buffer.len())?;
        self.run(Operation::Broadcast { root, count }, data, Buffers::InPlace(buffer))
    }

    /// AllGather of blocks of equal length.
    pub fn all_gather(&self, data: DataType, input: &[u8], output: &mut [u8]) -> Result<()> {
        let counts = Counts::Equal(elements(data, input.len())?);
        self.run(Operation::AllGather { counts }, data, Buffers::Apart { input, output })
    }

    /// ReduceScatter to blocks of equal length.
    pub fn reduce_scatter(&self, data: DataType, op: ReduceOp, input: &[u8], output: &mut [u8]) -> Result<()> {
        let counts = Counts::Equal(elements(data, output.len())?);
        self.run(Operation::ReduceScatter { op, counts }, data, Buffers::Apart { input, output })
    }

    /// Returns when all ranks have come.
    pub fn barrier(&self) -> Result<()> {
        self.run(Operation::Barrier, DataType::U8, Buffers::Apart { input: &[], output: &mut [] })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let (mut operands, began, mut idle) = (Operands::none(), Instant::now(), Idle::default());
        // What others need yet of what this rank has sent.
        while !state.engine.is_drained() && state.engine.failure().is_none() && began.elapsed() < self.options.patience
        {
            idle.next(state.drive(&mut operands));
        }
        let left = Word::Left { rank: self.me, done: state.number };
        let neighbours: Vec<Rank> = Engine::neighbours(self.me, self.ranks).collect();
        state.with(&mut operands, |engine, arms| {
            engine.leave(arms);
            for rank in arms.oob.connected() {
                if !neighbours.contains(&rank) {
                    arms.oob.tell(rank, &Message::News(left.clone()));
                }
            }
        });
        let thread = state.oob.stop();
        drop(guard);
        thread.end();
    }
}

/// Elements in so many bytes.
fn elements(data: DataType, bytes: usize) -> Result<u64> {
    let size = data.bytes() as usize;
    match bytes.is_multiple_of(size) {
        true => Ok((bytes / size) as u64),
        false => Err(Error::Refused(format!("{bytes} bytes are no whole number of {data:?}, which has {size}"))),
    }
}

/// What all ranks know of hosts and NICs.
fn picture(all: &[Hello]) -> Result<(Topology, Vec<u32>, u8)> {
    let mut names: Vec<&str> = Vec::new();
    let mut hosts = Vec::new();
    for hello in all {
        let at = names.iter().position(|name| *name == hello.host).unwrap_or_else(|| {
            names.push(&hello.host);
            names.len() - 1
        });
        hosts.push(at as u32);
    }
    let rails = all.iter().map(|h| h.nics_mbps.len()).min().unwrap_or(0).min(usize::from(unbroken_comm::frame::MEMORY));
    let shape = |host: usize| {
        let hello = all.iter().find(|h| h.host == names[host]);
        let nics = hello.map_or(&[][..], |h| &h.nics_mbps[..rails]);
        let mut shape = HostShape::new(0, NicShape::new(0));
        shape.nics = nics.iter().map(|mbps| NicShape::new(*mbps)).collect();
        shape
    };
    let places = hosts.iter().map(|host| Place { host: *host as usize, numa: 0 }).collect();
    let topology = Topology::new((0..names.len()).map(shape).collect(), places, Fabric::RailOnly)?;
    Ok((topology, hosts, rails as u8))
}

/// What the thread out of band does when it may: takes what has come, if nobody else drives.
fn attend(state: &Weak<Mutex<State>>) -> Duration {
    let Some(state) = state.upgrade() else { return RESTS };
    let Ok(mut state) = state.try_lock() else { return RESTS };
    let state = &mut *state;
    let mut operands = Operands::none();
    state.drive(&mut operands);
    match state.engine.is_drained() && state.engine.is_whole() {
        true => RESTS,
        false => TENDS,
    }
}

/// A thread that finds nothing to do.
#[derive(Default)]
struct Idle {
    since: Option<Instant>,
}

impl Idle {
    /// Something was done, or not.
    fn next(&mut self, busy: bool) {
        if busy {
            self.since = None;
            return;
        }
        match self.since.get_or_insert_with(Instant::now).elapsed() < YIELDS {
            true => std::thread::yield_now(),
            false => std::thread::sleep(NAP),
        }
    }
}

impl State {
    fn with<R>(&mut self, operands: &mut Operands<'_>, f: impl FnOnce(&mut Engine, &mut Arms<'_, '_>) -> R) -> R {
        let State { engine, net, oob, notes, .. } = self;
        let me = engine.rank();
        let result = f(engine, &mut Arms { me, net, oob, operands, notes });
        self.notes.drain(..).for_each(|note| self.board.note(note));
        result
    }

    fn tick(&mut self, operands: &mut Operands<'_>, now: bool) {
        if now || self.ticked.elapsed() >= TICK {
            self.ticked = Instant::now();
            let us = self.began.elapsed().as_micros() as u64;
            let linkless = self.net.linkless();
            self.with(operands, |engine, arms| {
                linkless.iter().for_each(|rail| engine.fail_rail(*rail, arms));
                engine.on_time(us, arms);
            });
        }
    }

    /// Takes what has come and sends what can be sent. Whether there was anything.
    fn drive(&mut self, operands: &mut Operands<'_>) -> bool {
        let before = self.engine.progress();
        let mut came = std::mem::take(&mut self.came);
        self.net.poll(&mut came);
        let mut busy = !came.is_empty();
        self.with(operands, |engine, arms| {
            for (peer, rail, news) in came.drain(..) {
                match news {
                    News::Notice(notice) => engine.on_notice(peer, notice, arms),
                    News::Sent(stream) => engine.on_sent(peer, rail, stream),
                    News::Tested => engine.on_tested(peer, rail, arms),
                    News::Failed => engine.fail_path(peer, rail, arms),
                    News::Probed(probe, answered) => engine.on_probed(probe, answered, arms),
                }
            }
        });
        self.came = came;
        while let Some(event) = self.oob.inbox.take() {
            busy = true;
            self.with(operands, |engine, arms| match event {
                Event::Told(rank, message) => engine.on_message(rank, &message, arms),
                Event::Gone(rank, _) => engine.on_lost(rank, arms),
            });
        }
        self.tick(operands, false);
        self.with(operands, |engine, arms| engine.pump(arms));
        busy || self.engine.progress() != before
    }

    /// This rank's program of an operation, and what is held on to until all have agreed on what it is planned with.
    fn program(&mut self, collective: &Collective, folding: Folding) -> Result<Arc<Program>> {
        let (mut operands, mut idle) = (Operands::none(), Idle::default());
        let (view, down) = loop {
            if let Some(taken_up) = self.engine.take_up(self.number) {
                break taken_up;
            }
            if let Some(failure) = self.engine.failure() {
                return Err(failure.clone().into());
            }
            idle.next(self.drive(&mut operands));
        };
        if let Some(kept) = self.programs.iter().find(|kept| kept.view == view && kept.collective == *collective) {
            return Ok(kept.program.clone());
        }
        let plan = views::plan(&self.topology, &down, collective, folding)?;
        let program = Arc::new(plan.program(self.engine.rank()));
        self.programs.retain(|kept| kept.view == view);
        if self.programs.len() == KEPT {
            self.programs.remove(0);
        }
        self.programs.push(Kept { view, collective: collective.clone(), program: program.clone() });
        Ok(program)
    }
}
