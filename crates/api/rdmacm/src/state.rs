//! What a process has of rdma_cm, under one lock.

mod address;
mod connect;
mod early;
mod told;

use crate::abi::{Command, Out, Result};
use crate::channel::{Channel, Queued};
use crate::ids::{Id, Ids};
use crate::ports::Ports;
use crate::qp;
use crate::transport::Transport;
use early::Early;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use unbroken_cm::{Cm, Config, Output};
use unbroken_nics::Network;
use unbroken_runtime::now_us;
use unbroken_shift::api::System;
use unbroken_verbs::Error;

/// How long an answer is waited for: 4.096 µs · 2^16 = 268 ms. With fifteen retries a peer that says
/// nothing is given up after four seconds.
const RESPONSE_TIMEOUT: u8 = 16;
const MAX_RETRIES: u8 = 15;
/// How much longer the peer waits while our program has not answered: 8.6 s, at each attempt.
const SERVICE_TIMEOUT: u8 = 21;
/// How long a connection that has ended keeps its name. Packets in the network live for less.
const TIMEWAIT_US: u64 = 500_000;
/// How often peers are looked at whose processes share the runtime folder, and what has failed is
/// made anew.
const LOOK_US: u64 = 500_000;
/// The thread sleeps so long at most.
const LONGEST_SLEEP_US: u64 = 10_000_000;

/// What a command leads to.
pub(crate) enum Done {
    /// It is done.
    Nothing,
    /// It is done, and this goes to the program.
    Answer(Out, Vec<u8>),
    /// It can be done when an event has come.
    Wait,
}

/// All of a process's channels, ids and connections.
pub(crate) struct State {
    system: &'static System,
    network: Network,
    ports: Ports,
    transport: Transport,
    cm: Cm,
    ids: Ids,
    channels: HashMap<u64, Channel>,
    next_channel: u64,
    /// The next port that is tried for ids that do not ask for one.
    next_port: u16,
    random: u64,
    looked_us: u64,
    early: Early,
    /// NICs through which the program has connected.
    used: HashSet<usize>,
}

impl State {
    pub(crate) fn new(system: &'static System) -> std::result::Result<State, Error> {
        let network = Network::from_env()?;
        let io = |e: io::Error| Error::os("the table of ports in the runtime folder", &e);
        let ports = Ports::of(network.runtime(), network.host()).map_err(io)?;
        ports.sweep();
        let transport = Transport::open(system)?;
        ports.announce(&transport.addresses()).map_err(io)?;
        let mut seed = [0; 16];
        unbroken_runtime::fill_random(&mut seed).map_err(|e| Error::os("getrandom", &e))?;
        let [seed, random] = [0, 8].map(|at| {
            let half: [u8; 8] = seed[at..at + 8].try_into().expect("eight bytes");
            u64::from_ne_bytes(half)
        });
        let config = Config {
            response_timeout: RESPONSE_TIMEOUT,
            max_retries: MAX_RETRIES,
            service_timeout: SERVICE_TIMEOUT,
            timewait_us: TIMEWAIT_US,
            seed,
        };
        Ok(State {
            system,
            network,
            ports,
            transport,
            cm: Cm::new(config),
            ids: Ids::default(),
            channels: HashMap::new(),
            next_channel: 1,
            next_port: random as u16,
            random,
            looked_us: now_us(),
            early: Early::default(),
            used: HashSet::new(),
        })
    }

    /// A descriptor that is readable when datagrams have come.
    pub(crate) fn arrivals(&self) -> BorrowedFd<'_> {
        self.transport.fd()
    }

    pub(crate) fn open_channel(&mut self) -> io::Result<(u64, OwnedFd)> {
        let number = self.next_channel;
        let (channel, theirs) = Channel::new(number)?;
        self.next_channel += 1;
        self.channels.insert(number, channel);
        Ok((number, theirs))
    }

    /// Our end of a channel.
    pub(crate) fn channel_fd(&self, number: u64) -> Option<BorrowedFd<'_>> {
        self.channels.get(&number).map(Channel::fd)
    }

    /// The program has closed a channel: its ids go with it.
    pub(crate) fn close_channel(&mut self, number: u64) {
        self.channels.remove(&number);
        for id in self.ids.those(|id| id.channel == number) {
            self.destroy(id);
        }
    }

    /// The process ends.
    pub(crate) fn finish(&mut self) {
        for id in self.ids.those(|_| true) {
            self.destroy(id);
        }
        self.settle();
        self.ports.leave();
    }

    /// Carries out a command that was written to this channel. `option` is what an option is set to,
    /// `from` the channel that an id comes from.
    pub(crate) fn carry_out(
        &mut self,
        channel: u64,
        fd: BorrowedFd<'_>,
        command: &Command,
        option: Option<&[u8]>,
        from: Option<u64>,
    ) -> Result<Done> {
        let nothing = |result: Result<()>| result.map(|()| Done::Nothing);
        let own = |state: &State, id: u32| state.check(channel, id);
        match command {
            Command::CreateId { out, uid, space } => {
                let id = self.ids.add(Id::new(*uid, channel, *space))?;
                Ok(Done::Answer(*out, id.to_ne_bytes().to_vec()))
            }
            Command::GetEvent { out } => self.next_event(channel, fd, *out),
            Command::MigrateId { out, id, from_fd: _ } => {
                own(self, *id).or_else(|_| self.check(from.ok_or(libc::EINVAL)?, *id))?;
                let reported = self.migrate(*id, channel);
                Ok(Done::Answer(*out, reported.to_ne_bytes().to_vec()))
            }
            Command::DestroyId { out, id } => {
                own(self, *id)?;
                let reported = self.destroy(*id);
                self.settle_channel(channel, fd);
                Ok(Done::Answer(*out, reported.to_ne_bytes().to_vec()))
            }
            Command::Bind { id, address } => {
                own(self, *id)?;
                nothing(self.bind(*id, *address))
            }
            Command::Resolve { id, source, destination } => {
                own(self, *id)?;
                nothing(self.resolve(*id, *source, *destination))
            }
            Command::ResolveRoute { id } => {
                own(self, *id)?;
                nothing(self.resolve_route(*id))
            }
            Command::QueryRoute { out, id } => {
                own(self, *id)?;
                Ok(Done::Answer(*out, self.query_route(*id)?))
            }
            Command::Query { out, id, what } => {
                own(self, *id)?;
                Ok(Done::Answer(*out, self.query(*id, *what)?))
            }
            Command::InitQpAttr { out, id, state } => {
                own(self, *id)?;
                let id = self.ids.get(*id).ok_or(libc::ENOENT)?;
                Ok(Done::Answer(*out, qp::attributes(id, *state)?))
            }
            Command::SetOption { id, level, name, value: _ } => {
                own(self, *id)?;
                nothing(self.set_option(*id, *level, *name, option.ok_or(libc::EINVAL)?))
            }
            _ => nothing(self.carry_out_connection(channel, command)),
        }
    }

    /// Commands about connections.
    fn carry_out_connection(&mut self, channel: u64, command: &Command) -> Result<()> {
        let id = match command {
            Command::Connect { id, .. }
            | Command::Listen { id, .. }
            | Command::Accept { id, .. }
            | Command::Reject { id, .. }
            | Command::Disconnect { id }
            | Command::Notify { id, .. }
            | Command::JoinMulticast { id, .. }
            | Command::LeaveMulticast { id, .. } => *id,
            _ => return Err(libc::EINVAL),
        };
        self.check(channel, id)?;
        match command {
            Command::Connect { param, .. } => self.connect(id, param),
            Command::Listen { backlog, .. } => self.listen(id, *backlog),
            Command::Accept { uid, param, .. } => self.accept(id, *uid, param),
            Command::Reject { reason, private, .. } => self.reject(id, *reason, private),
            Command::Disconnect { .. } => self.disconnect(id),
            Command::Notify { event, .. } => self.notify(id, *event),
            _ => Err(libc::EOPNOTSUPP),
        }
    }

    /// ENOENT: there is no such id. EINVAL: it is another channel's.
    fn check(&self, channel: u64, id: u32) -> Result<()> {
        match self.ids.get(id) {
            None => Err(libc::ENOENT),
            Some(id) if id.channel != channel => Err(libc::EINVAL),
            Some(_) => Ok(()),
        }
    }

    fn next_event(&mut self, channel: u64, fd: BorrowedFd<'_>, out: Out) -> Result<Done> {
        let queue = self.channels.get_mut(&channel).ok_or(libc::EBADF)?;
        let Some(event) = queue.pop(fd) else { return Ok(Done::Wait) };
        if let Some(id) = self.ids.get_mut(event.listener.unwrap_or(event.id)) {
            id.reported += 1;
            if event.listener.is_some() {
                id.waiting = id.waiting.saturating_sub(1);
            }
        }
        if event.listener.is_some() {
            if let Some(id) = self.ids.get_mut(event.id) {
                id.listener = None;
            }
        }
        Ok(Done::Answer(out, event.bytes))
    }

    /// An event goes to the channel of its id.
    fn queue(&mut self, channel: u64, event: Queued) -> bool {
        self.channels.get_mut(&channel).is_some_and(|channel| channel.push(event))
    }

    fn settle_channel(&mut self, channel: u64, fd: BorrowedFd<'_>) {
        if let Some(channel) = self.channels.get(&channel) {
            channel.settle(Some(fd));
        }
    }

    fn migrate(&mut self, number: u32, to: u64) -> u32 {
        let Some(id) = self.ids.get_mut(number) else { return 0 };
        let (from, reported) = (std::mem::replace(&mut id.channel, to), id.reported);
        let of_id = |event: &Queued| event.listener.unwrap_or(event.id) == number;
        let moved: Vec<Queued> = self.take_events(from, of_id);
        for event in moved {
            self.queue(to, event);
        }
        reported
    }

    fn take_events(&mut self, channel: u64, of: impl Fn(&Queued) -> bool) -> Vec<Queued> {
        let Some(channel) = self.channels.get_mut(&channel) else { return Vec::new() };
        let (taken, kept) = std::mem::take(&mut channel.events).into_iter().partition(of);
        channel.events = kept;
        Vec::from_iter::<std::collections::VecDeque<Queued>>(taken)
    }

    /// Ends an id, and what it has; gives how many events the program was given of it.
    fn destroy(&mut self, number: u32) -> u32 {
        let Some(id) = self.ids.remove(number) else { return 0 };
        self.seek_no_more(number);
        let events = self
            .take_events(id.channel, |event| event.id == number || event.listener == Some(number));
        // Requests that nobody has been told of end with their listener.
        for event in events.iter().filter(|event| event.listener == Some(number)) {
            self.destroy(event.id);
        }
        if let Some(connection) = id.connection {
            self.cm.destroy(now_us(), connection);
        }
        id.reported
    }

    /// Receives what has come.
    pub(crate) fn receive(&mut self) {
        let cm = &mut self.cm;
        let now = now_us();
        self.transport.receive(|arrived| cm.handle(now, arrived.from, arrived.via, &arrived.bytes));
    }

    /// Does what is due.
    pub(crate) fn tick(&mut self) {
        let now = now_us();
        self.cm.tick(now);
        self.look_for_listeners(now);
        if now >= self.looked_us + LOOK_US {
            self.looked_us = now;
            self.look_at_peers(now);
            if self.transport.is_broken() && self.transport.mend(self.system) {
                let _ = self.ports.announce(&self.transport.addresses());
            }
        }
    }

    /// Connections whose peer's process is gone end: nobody would say so.
    fn look_at_peers(&mut self, now: u64) {
        for number in self.ids.those(|id| id.peer.is_some()) {
            let Some(id) = self.ids.get_mut(number) else { continue };
            let Some(peer) = id.peer.filter(|peer| !self.ports.lives(*peer)) else { continue };
            let _ = peer;
            id.peer = None;
            if let Some(connection) = id.connection {
                self.cm.peer_died(now, connection);
            }
        }
    }

    /// Carries out what the CM asks for, until it asks for nothing.
    pub(crate) fn settle(&mut self) {
        while let Some(output) = self.cm.next_output() {
            match output {
                Output::Send { via, to, bytes } => self.transport.send(via, to, &bytes),
                Output::Event(connection, event) => self.on_event(connection, event),
            }
        }
    }

    /// When [`State::tick`] is to be called.
    pub(crate) fn due_us(&self) -> u64 {
        let looks = self.transport.is_broken() || self.ids.any(|id| id.peer.is_some());
        let look = looks.then_some(self.looked_us + LOOK_US);
        let longest = now_us() + LONGEST_SLEEP_US;
        let next = self.cm.next_deadline_us().unwrap_or(longest);
        let early = self.early.due_us().unwrap_or(longest);
        next.min(look.unwrap_or(longest)).min(early).min(longest)
    }

    /// SplitMix64: for PSNs and ports.
    fn next_random(&mut self) -> u32 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ z >> 27) as u32
    }
}
