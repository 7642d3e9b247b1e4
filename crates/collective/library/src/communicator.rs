//! Communicators: ranks that do operations together.
//!
//! Operations are queued, and done one after the other. They are driven by the thread that waits
//! for one of them: it polls the NICs, which for softnics is what moves packets, and yields its
//! core when nothing has come. While nobody waits, the thread out of band drives, which sleeps
//! between looks; between operations it answers others (a path that has failed, one that is made
//! again).

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use unbroken::Host;
use unbroken_collective_protocol::agree::Description;
use unbroken_collective_protocol::{Config, Failure, Rank};
use unbroken_schedule::{Collective, DataType, Fabric, Operation, Place, ReduceOp, Topology};
use unbroken_schedule::{Counts, Host as HostShape, Nic as NicShape};

use crate::acceptor::{self, Registration};
use crate::auth::Secret;
use crate::bootstrap::{meet, Hello, Id};
use crate::channel::{self, Wish, ALL};
use crate::error::{Error, Result};
use crate::limits::want_descriptors;
use crate::line::Ends;
use crate::memory::Anchor;
use crate::net::{Net, Shape};
use crate::numa::{self, Nodes};
use crate::oob::Oob;
use crate::operands::{check, Buffers, Spans};
use crate::options::Options;
use crate::request::{Memory, Request};
use crate::span::Span;
use crate::state::{attend, Idle, Shared, State};
use crate::status::{Board, Counters, Server, Snapshot};

/// A rank's end of a communicator. Ended when it is dropped, which waits for what is under way but
/// receives of which nothing has come ([`Communicator::finalize`]).
pub struct Communicator {
    shared: Arc<Shared>,
    board: Board,
    me: Rank,
    ranks: usize,
    pub(crate) options: Options,
    /// What this rank and the others have said of themselves, for those who split it.
    pub(crate) site: Site,
    /// What ranks know each other by, here and in communicators that are split off.
    pub(crate) secret: Secret,
}

/// Where a rank is, and where all are.
pub(crate) struct Site {
    pub(crate) host: Host,
    /// The address of this machine at which others reach this process.
    pub(crate) at: IpAddr,
    /// What ranks have said, in their order.
    pub(crate) all: Vec<Hello>,
}

impl Communicator {
    /// Takes part in the communicator of an id as one of its ranks, on a host's NICs. Returns when
    /// all have come.
    pub fn join(
        id: &Id,
        rank: Rank,
        ranks: usize,
        host: &Host,
        options: Options,
    ) -> Result<Communicator> {
        Communicator::join_at(id, rank, ranks, host, IpAddr::V4(Ipv4Addr::LOCALHOST), options)
    }

    /// Takes part in the communicator of an id, as [`Communicator::join`] does, where ranks may be on
    /// several machines: `at`, an address of this machine, is where others reach this rank out of
    /// band.
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
            return Err(Error::Refused(
                "the host has no NIC; a communicator needs one at least".into(),
            ));
        }
        want_descriptors(ranks, host.nic_count())?;
        let registration = acceptor::register(at, id.secret)?;
        // Until all have met: then each has seen whether it is there.
        let anchor = Anchor::find(&id.secret)?;
        let gid: String = host.open(0)?.gid().0.iter().map(|byte| format!("{byte:02x}")).collect();
        let hello = Hello {
            rank,
            ranks,
            host: format!("{gid}-{}", anchor.nonce()),
            nics_mbps: vec![options.nic_mbps; host.nic_count()],
            nodes: Nodes::of(host, &options.numa)?,
            address: registration.address(),
            service: registration.name,
            settings: options.settings(),
            patience_ms: 0,
        };
        let all = meet(id, hello, options.patience)?;
        Communicator::among(
            Site { host: host.clone(), at, all },
            id.secret,
            rank,
            registration,
            options,
        )
    }

    /// One of ranks that know each other, who reach it at a socket.
    pub(crate) fn among(
        site: Site,
        secret: Secret,
        rank: Rank,
        registration: Registration,
        options: Options,
    ) -> Result<Communicator> {
        let ranks = site.all.len();
        let (topology, hosts, rails) = picture(&site.all)?;
        let mates = |rank: &u32| hosts.iter().filter(|other| *other == rank).count();
        let others = ranks - hosts.iter().map(mates).min().unwrap_or(ranks);
        let (slots, payload) = options.slots_for(others, rails);
        let shape = Shape {
            logical: options.logical,
            slots: slots.into(),
            payload,
            ack_timeout: options.ack_timeout,
            retries: options.retries,
        };
        let config = Config {
            me: rank,
            hosts,
            rails,
            slots: slots.into(),
            payload,
            window: options.window,
            ask_us: options.ask.as_micros() as u64,
            timeout_us: options.timeout.as_micros() as u64,
            balance: options.balance,
            measure: options.measure,
            mutant: None,
        };
        let board = Board::new(rank, &config.hosts, rails);
        let server = options
            .status_folder
            .as_ref()
            .map(|folder| Server::bind(folder, &board))
            .transpose()?;
        let ends =
            |hello: &Hello| Ends { to: hello.address, service: hello.service, me: rank, secret };
        let oob = Oob::new(registration, site.all.iter().map(ends).collect(), options.timeout);
        let net = Net::new(site.host.clone(), rails, ranks, shape)?;
        let hosts = topology.hosts().to_vec();
        let wish = Wish { folding: options.folding, form: options.shape };
        let state = State::new(config, hosts, topology, net, oob, board.clone(), wish);
        let shared = Shared::new(state);
        let weak = Arc::downgrade(&shared);
        let mut state = shared.lock();
        state.oob.begin(server, board.clone(), Box::new(move || attend(&weak)))?;
        state.greet();
        drop(state);
        Ok(Communicator { shared, board, me: rank, ranks, options, site, secret })
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

    /// The shape of the last operation of all ranks; empty before the first.
    pub fn shape(&self) -> String {
        self.board.lock().shape.clone()
    }

    /// All that there is to be known.
    pub fn snapshot(&self) -> Snapshot {
        self.board.lock().clone()
    }

    /// Does an operation together with all other ranks. Returns when this rank's part is done: its
    /// output is there, its input may be changed.
    pub fn run(&self, operation: Operation, data: DataType, buffers: Buffers<'_>) -> Result<()> {
        self.enqueue(ALL, 0, operation, data, Spans::of(buffers), None)?.finish_lent()
    }

    /// Begins an operation of all ranks: it is done behind those that were begun before it. Its
    /// memory comes back from [`Request::wait`].
    pub fn begin(&self, operation: Operation, data: DataType, memory: Memory) -> Result<Request> {
        self.roused(self.enqueue_owned(ALL, 0, operation, data, memory))
    }

    /// Sends elements to a rank, which receives as many; other ranks have no part in it. What one
    /// rank sends another arrives in its order. Returns when the bytes may be changed, which may be
    /// before the other has asked for them.
    pub fn send(&self, data: DataType, to: Rank, bytes: &[u8]) -> Result<()> {
        let (name, operation) = self.transfer(self.me, to, data, bytes.len())?;
        let buffers = Buffers::Apart { input: bytes, output: &mut [] };
        self.enqueue(name, 0, operation, data, Spans::of(buffers), None)?.finish_lent()
    }

    /// Receives what a rank sends.
    pub fn recv(&self, data: DataType, from: Rank, bytes: &mut [u8]) -> Result<()> {
        let (name, operation) = self.transfer(from, self.me, data, bytes.len())?;
        let buffers = Buffers::Apart { input: &[], output: bytes };
        self.enqueue(name, 0, operation, data, Spans::of(buffers), None)?.finish_lent()
    }

    /// Begins [`Communicator::send`].
    pub fn begin_send(&self, data: DataType, to: Rank, bytes: Vec<u8>) -> Result<Request> {
        self.begin_send_tagged(data, to, 0, bytes)
    }

    /// Begins to send with a tag. The receiver takes it by a receive with that tag
    /// ([`Communicator::begin_recv_tagged`]), in whatever order it asks; tag 0 is that of
    /// [`Communicator::begin_send`].
    pub fn begin_send_tagged(
        &self,
        data: DataType,
        to: Rank,
        tag: u64,
        bytes: Vec<u8>,
    ) -> Result<Request> {
        let (name, operation) = self.transfer(self.me, to, data, bytes.len())?;
        let memory = Memory::Apart { input: bytes, output: Vec::new() };
        self.roused(self.enqueue_owned(name, tag, operation, data, memory))
    }

    /// Begins [`Communicator::recv`], of as many bytes as are given.
    pub fn begin_recv(&self, data: DataType, from: Rank, bytes: Vec<u8>) -> Result<Request> {
        self.begin_recv_tagged(data, from, 0, bytes)
    }

    /// Begins to receive what a rank sends with this tag ([`Communicator::begin_send_tagged`]), of
    /// as many bytes as are given. Of several receives that wait, the first begins whose tag has
    /// come; what comes before its receive is asked for holds up what the same rank sends behind
    /// it.
    pub fn begin_recv_tagged(
        &self,
        data: DataType,
        from: Rank,
        tag: u64,
        bytes: Vec<u8>,
    ) -> Result<Request> {
        let (name, operation) = self.transfer(from, self.me, data, bytes.len())?;
        let memory = Memory::Apart { input: Vec::new(), output: bytes };
        self.roused(self.enqueue_owned(name, tag, operation, data, memory))
    }

    /// Begins to receive what any rank sends with a tag, unless a receive from that rank takes it.
    /// [`Request::source`] says whose it was. What has another type, or more elements or fewer than
    /// are given, is an error at all ranks.
    pub fn begin_recv_any(&self, data: DataType, tag: u64, mut bytes: Vec<u8>) -> Result<Request> {
        elements(data, bytes.len())?;
        let into = Span::of_mut(&mut bytes);
        let memory = Memory::Apart { input: Vec::new(), output: bytes };
        self.roused(self.enqueue_any(data, tag, into, Some(memory)))
    }

    pub(crate) fn enqueue_any(
        &self,
        data: DataType,
        tag: u64,
        into: Span,
        memory: Option<Memory>,
    ) -> Result<Request> {
        let mut state = self.shared.lock();
        may_begin(&state)?;
        if state.any.waiting() >= self.options.queue {
            return Err(Error::Full(state.any.waiting()));
        }
        let number = state.any.push(tag, data, into);
        state.match_any();
        self.shared.publish(&state);
        Ok(Request::of_any(self.shared.clone(), number, memory))
    }

    /// Breaks the communicator: all that is under way here and at all other ranks ends with an
    /// error that names this rank.
    pub fn abort(&self) {
        let mut state = self.shared.lock();
        state.break_off(Failure::Aborted { rank: self.me });
        self.shared.publish(&state);
    }

    /// Begins nothing more, and says so to the other ranks: an operation with this rank that it has
    /// not begun ends with an error that names it. Receives of which nothing has come are given up.
    /// What else is under way goes on. Dropping the communicator does this first.
    pub fn finalize(&self) {
        let mut state = self.shared.lock();
        state.end();
        self.shared.publish(&state);
    }

    /// Sets how long an operation may stand still from now on, instead of [`Options::timeout`]; at
    /// this rank alone.
    pub fn set_timeout(&self, timeout: Duration) {
        self.shared.lock().set_timeout(timeout);
    }

    /// Why the communicator is broken, if it is.
    pub fn failure(&self) -> Option<Failure> {
        self.shared.lock().failure().cloned()
    }

    /// The channel and the operation by which one rank sends to another.
    pub(crate) fn transfer(
        &self,
        from: Rank,
        to: Rank,
        data: DataType,
        bytes: usize,
    ) -> Result<(u32, Operation)> {
        let count = elements(data, bytes)?;
        let (other, last) = (if from == self.me { to } else { from }, self.ranks - 1);
        if other > last {
            return Err(Error::Refused(format!(
                "rank {other} does not exist; the numbers are 0 to {last}"
            )));
        }
        if from == to {
            return Err(Error::Refused(format!(
                "rank {to} sends to itself; another rank is right, or a copy"
            )));
        }
        Ok((channel::name(from, to, self.ranks), channel::transfer(usize::from(from > to), count)))
    }

    fn enqueue_owned(
        &self,
        name: u32,
        tag: u64,
        operation: Operation,
        data: DataType,
        mut memory: Memory,
    ) -> Result<Request> {
        let spans = Spans::of(match &mut memory {
            Memory::Apart { input, output } => Buffers::Apart { input, output },
            Memory::InPlace(all) => Buffers::InPlace(all),
        });
        self.enqueue(name, tag, operation, data, spans, Some(memory))
    }

    /// Queues an operation, and begins it if it is the first. The spans stay good until it is over.
    pub(crate) fn enqueue(
        &self,
        name: u32,
        tag: u64,
        operation: Operation,
        data: DataType,
        spans: Spans,
        memory: Option<Memory>,
    ) -> Result<Request> {
        let collective = self.admit(name, &operation, data, &spans)?;
        let description = Description { tag, ..Description::of(&collective) };
        self.enqueue_as(description, name, collective, spans, memory)
    }

    /// The same of an operation that makes sense, which ranks may take for something else than it
    /// looks.
    pub(crate) fn enqueue_as(
        &self,
        description: Description,
        name: u32,
        collective: Collective,
        spans: Spans,
        memory: Option<Memory>,
    ) -> Result<Request> {
        let mut state = self.shared.lock();
        may_begin(&state)?;
        let at = state
            .channel(name)
            .ok_or_else(|| Error::Refused(format!("there is no channel {name}")))?;
        let channel = &mut state.channels[at];
        if channel.waiting() >= self.options.queue {
            return Err(Error::Full(channel.waiting()));
        }
        let ticket = channel.push(collective, description, spans);
        state.advance(at);
        self.shared.publish(&state);
        Ok(Request::new(self.shared.clone(), at, ticket, memory))
    }

    /// Whether an operation makes sense here, and its memory fits.
    pub(crate) fn admit(
        &self,
        name: u32,
        operation: &Operation,
        data: DataType,
        spans: &Spans,
    ) -> Result<Collective> {
        let (me, ranks) = match channel::ends(name, self.ranks) {
            Some((from, to)) => (usize::from(self.me == from.max(to)), 2),
            None => (self.me, self.ranks),
        };
        let collective = Collective::new(operation.clone(), data, spans.in_place, ranks)?;
        check(&collective, me, spans).map_err(Error::Refused)?;
        Ok(collective)
    }

    /// Whether so many operations more find room.
    pub(crate) fn room(&self, name: u32, more: usize) -> Result<()> {
        let mut state = self.shared.lock();
        if let Some(failure) = state.failure() {
            return Err(failure.clone().into());
        }
        let waiting = state.channel(name).map_or(0, |at| state.channels[at].waiting());
        if waiting + more > self.options.queue {
            return Err(Error::Full(waiting + more - 1));
        }
        Ok(())
    }

    /// Nobody need wait for what was begun: the thread goes on with it.
    pub(crate) fn roused(&self, begun: Result<Request>) -> Result<Request> {
        self.shared.rouse();
        begun
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
    pub fn reduce_scatter(
        &self,
        data: DataType,
        op: ReduceOp,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<()> {
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
        self.finalize();
        let mut idle = Idle::default();
        let mut began = None;
        let (mut state, _) = self.shared.drive();
        // What is under way is finished; then what others need yet of what this rank has sent.
        while state.failure().is_none() && !state.is_drained() {
            let waited = began.get_or_insert_with(Instant::now).elapsed();
            if state.is_under_way() {
                // An operation that stands still ends by itself.
                began = None;
            } else if waited > self.options.patience || waited.min(state.still()) > state.timeout()
            {
                // Some other has stood still for as long as an operation may: its process is
                // stopped, or it has not come to what it was sent.
                break;
            }
            drop(state);
            let busy;
            (state, busy) = self.shared.drive();
            idle.next(busy);
        }
        state.leave();
        state.oob.flush();
        let thread = state.oob.stop();
        drop(state);
        thread.end();
    }
}

/// Whether an operation may be begun.
fn may_begin(state: &State) -> Result<()> {
    if let Some(failure) = state.failure() {
        return Err(failure.clone().into());
    }
    match state.has_ended() {
        true => Err(Error::Refused(
            "the communicator was finalized, and begins nothing more: make another".into(),
        )),
        false => Ok(()),
    }
}

/// Elements in so many bytes.
fn elements(data: DataType, bytes: usize) -> Result<u64> {
    let size = data.bytes() as usize;
    match bytes.is_multiple_of(size) {
        true => Ok((bytes / size) as u64),
        false => Err(Error::Refused(format!(
            "{bytes} bytes are no whole number of {data:?}, which has {size}"
        ))),
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
    let rails = all
        .iter()
        .map(|h| h.nics_mbps.len())
        .min()
        .unwrap_or(0)
        .min(usize::from(unbroken_collective_protocol::frame::MAX_RAILS));
    let shape = |host: usize| {
        let hello = all.iter().find(|h| h.host == names[host]);
        let nics = hello.map_or(&[][..], |h| &h.nics_mbps[..rails]);
        let mut shape = HostShape::new(0, NicShape::new(0));
        shape.nics = nics.iter().map(|mbps| NicShape::new(*mbps)).collect();
        shape
    };
    let mut shapes: Vec<HostShape> = (0..names.len()).map(shape).collect();
    let mut places: Vec<Place> =
        hosts.iter().map(|host| Place { host: *host as usize, numa: 0 }).collect();
    for (host, shape) in shapes.iter_mut().enumerate() {
        let members: Vec<usize> =
            (0..all.len()).filter(|rank| places[*rank].host == host).collect();
        let nodes: Vec<&Nodes> = members.iter().map(|rank| &all[*rank].nodes).collect();
        let of_ranks = numa::place(shape, &nodes);
        members.iter().zip(of_ranks).for_each(|(rank, node)| places[*rank].numa = node);
    }
    let topology = Topology::new(shapes, places, Fabric::RailOnly)?;
    Ok((topology, hosts, rails as u8))
}
