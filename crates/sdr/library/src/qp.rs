//! Queue pairs: what a user posts, and what the workers do for it.

use crate::clock::now_us;
use crate::context::{Context, Shared};
use crate::control::Wire;
use crate::handles::{Recv, Send};
use crate::info::Info;
use crate::keys::{Buffer, Hands, Keys, Protection};
use crate::lanes::{Channel, ChannelOptions};
use crate::memory::Memory;
use crate::published::publish;
use crate::{lock, Error, Result};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use unbroken_sdr_protocol::attr::{Attr, Layout};
use unbroken_sdr_protocol::board::{Board, Mutation};
use unbroken_sdr_protocol::clearing::Clearance;
use unbroken_sdr_protocol::control::Control;
use unbroken_sdr_protocol::packets::{Packet, Piece};
use unbroken_sdr_protocol::receives::{PostError, Receives};
use unbroken_sdr_protocol::sends::{SendError, Sends, Status};

/// How to make a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpOptions {
    /// What both ends have alike.
    pub attr: Attr,
    /// It sends.
    pub send: bool,
    /// It receives.
    pub recv: bool,
    /// It sends at most so many bits a second; 0: as many as the NICs take.
    pub rate_bps: u64,
    /// A rule that is left out, for tests which must notice.
    #[doc(hidden)]
    pub mutation: Option<Mutation>,
}

impl Default for QpOptions {
    fn default() -> QpOptions {
        QpOptions { attr: Attr::default(), send: true, recv: true, rate_bps: 0, mutation: None }
    }
}

/// What has been counted since a queue pair was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets sent.
    pub sent: u64,
    /// Packets that came.
    pub packets: u64,
    /// Those that had come before.
    pub duplicates: u64,
    /// Those that came too late for their message: nothing was changed by them. Memory windows drop
    /// such as carry bytes before anybody counts them.
    pub late: u64,
    /// Those beyond their message.
    pub outside: u64,
    /// How often a queue of receives was found empty: packets may have been lost for it.
    pub under_runs: u64,
    /// Control messages of strangers, and such as were none.
    pub strangers: u64,
    /// Control messages heard.
    pub control: u64,
}

/// Receives, and what they lie in. Locked before everything else of a queue pair.
struct Posted {
    /// Windows end before the memory that they are bound to.
    keys: Keys,
    receives: Receives,
    /// Memory of receives that are not finished: it stays registered.
    memory: HashMap<u64, Memory>,
}

/// What changes by posting and by control messages.
pub(crate) struct State {
    clearance: Clearance,
    pub(crate) sends: Sends,
    /// Memory of sends that are not finished: it stays registered.
    send_memory: HashMap<u64, Vec<Memory>>,
    /// Sends whose handles are held: their status must be known.
    held: HashSet<u64>,
}

impl State {
    /// Sends that are finished, and whose handles nobody holds.
    fn forget_finished(&mut self) {
        let State { sends, held, send_memory, .. } = self;
        sends.forget(|seq| held.contains(&seq));
        send_memory.retain(|seq, _| sends.is_known(*seq));
    }
}

/// What hears control messages that are not about matching, and has timers.
pub(crate) trait Upper: Sync + std::marker::Send {
    /// A message of the peer.
    fn hear(&self, core: &Core, message: &Control, now_us: u64);
    /// Does what is due, or what news brings; says when something will be due.
    fn tick(&self, core: &Core, now_us: u64, news: bool) -> Option<u64>;
}

/// A queue pair, as its workers see it.
pub(crate) struct Core {
    pub(crate) shared: Arc<Shared>,
    pub(crate) layout: Layout,
    pub(crate) options: QpOptions,
    pub(crate) board: Arc<Board>,
    posted: Mutex<Posted>,
    pub(crate) state: Mutex<State>,
    pub(crate) channels: Vec<Channel>,
    wire: Wire,
    /// The peer's token.
    peer: OnceLock<u64>,
    turns: AtomicU64,
    /// The reliable writes on it.
    pub(crate) upper: OnceLock<Arc<dyn Upper>>,
}

/// A queue pair.
#[derive(Clone)]
pub struct Qp(pub(crate) Arc<Core>);

impl Context {
    /// Makes a queue pair.
    ///
    /// # Errors
    /// Attributes that are wrong, by name; more channels than the context has; no room for it.
    pub fn create_qp(&self, options: &QpOptions) -> Result<Qp> {
        let (shared, attr) = (&self.shared, &options.attr);
        let layout = Layout::new(attr).map_err(Error::wrong)?;
        if attr.channels > self.channels() {
            let have = self.channels();
            return Err(Error::wrong(format!(
                "{} channels, the context has {have}",
                attr.channels
            )));
        }
        if !(options.send || options.recv) {
            return Err(Error::wrong("a queue pair that neither sends nor receives: enable one"));
        }
        let largest = shared.rails.iter().map(|rail| rail.nic.mtu().bytes()).min().unwrap_or(0);
        if attr.mtu_bytes as usize > largest {
            return Err(Error::wrong(format!(
                "an MTU of {} bytes, the NICs carry {largest}",
                attr.mtu_bytes
            )));
        }
        let keys = Keys::new(shared, &layout)?;
        let channels = (0..attr.channels).map(|number| channel(shared, options, &layout, number));
        let pairs: Vec<_> =
            shared.rails.iter().map(|rail| (rail.nic.clone(), rail.pd.clone())).collect();
        let wire =
            Wire::new(&pairs, &shared.works[0].events, draw()?, |bytes| shared.register(bytes))?;
        let core = Arc::new(Core {
            board: Arc::new(match options.mutation {
                Some(mutation) => Board::new(&layout).mutated(mutation),
                None => Board::new(&layout),
            }),
            posted: Mutex::new(Posted {
                keys,
                receives: Receives::new(&layout),
                memory: HashMap::new(),
            }),
            state: Mutex::new(State {
                clearance: Clearance::default(),
                sends: Sends::new(&layout),
                send_memory: HashMap::new(),
                held: HashSet::new(),
            }),
            channels: channels.collect::<Result<_>>()?,
            wire,
            layout,
            options: *options,
            shared: shared.clone(),
            peer: OnceLock::new(),
            turns: AtomicU64::new(0),
            upper: OnceLock::new(),
        });
        shared.adopt(&core, attr.channels)?;
        publish(core.channels.iter().map(|channel| channel.counts.clone()).collect());
        Ok(Qp(core))
    }
}

/// A number that strangers cannot guess.
fn draw() -> Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| unbroken::Error::os("getrandom", &e.into()))?;
    Ok(u64::from_ne_bytes(bytes))
}

fn channel(shared: &Shared, options: &QpOptions, layout: &Layout, number: u8) -> Result<Channel> {
    let attr = layout.attr();
    let rail = &shared.rails[usize::from(number) % shared.rails.len()];
    // As many as may be in flight, within reason.
    let in_flight =
        (1u64 << attr.in_flight_log2) / u64::from(attr.mtu_bytes) / u64::from(attr.channels);
    Channel::new(&ChannelOptions {
        number,
        generations: attr.generations,
        recv_depth: in_flight.clamp(256, 4096) as u32,
        rate_bytes_per_us: options.rate_bps as f64 / 8e6 / f64::from(attr.channels),
        nic: &rail.nic,
        pd: &rail.pd,
        events: &shared.works[usize::from(number)].events,
    })
}

impl Core {
    /// A poll of a channel.
    pub(crate) fn turn(&self, channel: u8, now_us: u64) -> (bool, Option<u64>) {
        let Some(token) = self.peer.get() else { return (false, None) };
        let c = &self.channels[usize::from(channel)];
        let mut done = c.receive(&self.board, true);
        let number = usize::from(channel);
        let (sent, mut next_us) = c.send(
            now_us,
            self.layout.attr().mtu_bytes,
            |most, packets| self.take(number, most, packets),
            |seq, packets| lock(&self.state).sends.completed(seq, packets, true),
        );
        done += sent;
        if c.is_dead() {
            lock(&self.state).sends.channel_failed(number);
        }
        if channel == 0 {
            let (heard, at_us) = self.control(*token, now_us);
            done += heard;
            next_us = [next_us, at_us].into_iter().flatten().min();
        }
        (done > 0, next_us)
    }

    /// Packets for a channel, with the local keys of its NIC.
    fn take(&self, channel: usize, most: usize, packets: &mut Vec<Packet>) {
        let rail = channel % self.shared.rails.len();
        let mut state = lock(&self.state);
        let State { sends, send_memory, .. } = &mut *state;
        sends.take(channel, most, packets);
        if rail > 0 {
            for packet in packets.iter_mut().filter(|packet| packet.bytes > 0) {
                let memories = send_memory.get(&packet.seq).into_iter().flatten();
                let local = &mut packet.local;
                // Of memories with the same name any that has the bytes will do.
                let named =
                    |m: &&Memory| m.lkey() == local.lkey && m.has(local.addr, packet.bytes.into());
                if let Some(lkey) = memories.into_iter().find(named).and_then(|m| m.lkey_on(rail)) {
                    local.lkey = lkey;
                }
            }
        }
    }

    /// Hears and says what is to be said. Now and then the other NICs are driven, too.
    fn control(&self, token: u64, now_us: u64) -> (usize, Option<u64>) {
        let drive = self.turns.fetch_add(1, Relaxed).is_multiple_of(16);
        let messages = self.wire.hear(drive);
        for message in &messages {
            self.hear(message, token, now_us);
        }
        let (says, mut next_us) = {
            let mut state = lock(&self.state);
            let says = state.clearance.poll(now_us);
            (says, state.clearance.deadline_us())
        };
        says.iter().for_each(|message| self.wire.say(message, token));
        if let Some(upper) = self.upper.get() {
            next_us = [next_us, upper.tick(self, now_us, !messages.is_empty())]
                .into_iter()
                .flatten()
                .min();
        }
        next_us = [next_us, self.wire.look_us(now_us)].into_iter().flatten().min();
        (messages.len() + says.len(), next_us)
    }

    fn hear(&self, message: &Control, token: u64, now_us: u64) {
        match message {
            Control::Clear { first, stamp_us, bytes, rkeys } => {
                let mut state = lock(&self.state);
                let answer = state.sends.cleared.on_clear(
                    *first,
                    *stamp_us,
                    bytes,
                    rkeys,
                    self.layout.slots,
                );
                state.sends.release();
                drop(state);
                self.wire.say(&answer, token);
                self.kick_all();
            }
            Control::Cleared { next, stamp_us } => {
                lock(&self.state).clearance.on_cleared(*next, *stamp_us, now_us);
            }
            // Of reliable writes.
            message => {
                if let Some(upper) = self.upper.get() {
                    upper.hear(self, message, now_us);
                }
            }
        }
    }

    /// Says something to the peer.
    pub(crate) fn say(&self, message: &Control) {
        if let Some(token) = self.peer.get() {
            self.wire.say(message, *token);
        }
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.peer.get().is_some()
    }

    pub(crate) fn kick_all(&self) {
        (0..self.channels.len()).for_each(|channel| self.shared.kick(channel));
    }

    pub(crate) fn arm(&self, channel: u8) {
        self.channels[usize::from(channel)].arm();
        if channel == 0 {
            self.wire.arm();
        }
    }

    /// Posts a receive, and gives its message.
    pub(crate) fn recv_post(&self, memory: &Memory, addr: u64, bytes: u64) -> Result<u64> {
        if !self.options.recv {
            return Err(Error::wrong("the queue pair was made without receives"));
        }
        if !memory.has(addr, bytes) {
            return Err(not_inside(memory, addr, bytes));
        }
        let mut posted = lock(&self.posted);
        let Posted { keys, receives, memory: held } = &mut *posted;
        let buffer = Buffer { memory, addr, bytes };
        let mut hands = Hands { keys, core: self, granted: Vec::new() };
        let seq = receives.post(now_us(), bytes, &buffer, &self.board, &mut hands).map_err(
            |e| match e {
                PostError::Full => {
                    Error::retry("as many receives are posted as there are message slots")
                }
                PostError::Young { retry_us } => Error::retry(format!(
                "the slot was used less than a packet lifetime ago; in {} ms it can be used again",
                retry_us.saturating_sub(now_us()).div_ceil(1000)
            )),
                PostError::TooLong { most } => {
                    Error::wrong(format!("a receive of {bytes} bytes; {most} is the most"))
                }
                PostError::Key(e) => e,
            },
        )?;
        held.insert(seq, memory.clone());
        lock(&self.state).clearance.posted(bytes, &hands.granted);
        drop(posted);
        self.shared.kick(0);
        Ok(seq)
    }

    /// Ends a receive. Its buffer is the user's from now on.
    pub(crate) fn recv_complete(&self, seq: u64) -> Result<()> {
        let mut posted = lock(&self.posted);
        let Posted { keys, receives, memory } = &mut *posted;
        let mut hands = Hands { keys, core: self, granted: Vec::new() };
        receives.complete(now_us(), seq, &self.board, &mut hands)?;
        memory.remove(&seq);
        Ok(())
    }

    pub(crate) fn send_start(&self, imm: Option<u32>) -> Result<u64> {
        if !self.options.send {
            return Err(Error::wrong("the queue pair was made without sends"));
        }
        if self.peer.get().is_none() {
            return Err(Error::wrong("the queue pair is not connected"));
        }
        let mut state = lock(&self.state);
        state.forget_finished();
        let seq = state.sends.start(imm).map_err(refused)?;
        state.held.insert(seq);
        Ok(seq)
    }

    pub(crate) fn send_add(&self, seq: u64, memory: &Memory, piece: &Piece) -> Result<()> {
        if piece.bytes > 0 && !memory.has(piece.local.addr, piece.bytes) {
            return Err(not_inside(memory, piece.local.addr, piece.bytes));
        }
        let mut state = lock(&self.state);
        state.sends.add(seq, *piece).map_err(refused)?;
        let memories = state.send_memory.entry(seq).or_default();
        if !memories.iter().any(|m| Arc::ptr_eq(&m.0, &memory.0)) {
            memories.push(memory.clone());
        }
        drop(state);
        self.kick_all();
        Ok(())
    }

    pub(crate) fn send_end(&self, seq: u64) -> Result<()> {
        lock(&self.state).sends.end(seq).map_err(refused)?;
        self.kick_all();
        Ok(())
    }

    pub(crate) fn send_status(&self, seq: u64) -> Status {
        lock(&self.state).sends.status(seq)
    }

    /// The handle of a send is given back.
    pub(crate) fn send_forget(&self, seq: u64) {
        let mut state = lock(&self.state);
        state.held.remove(&seq);
        state.forget_finished();
    }

    /// Whether every way to the peer is gone.
    pub(crate) fn all_dead(&self) -> bool {
        lock(&self.state).sends.all_dead()
    }
}

fn not_inside(memory: &Memory, addr: u64, bytes: u64) -> Error {
    Error::wrong(format!(
        "{bytes} bytes at {addr:#x} are not inside of the registered memory, {} bytes at {:#x}",
        memory.len(),
        memory.addr()
    ))
}

fn refused(e: SendError) -> Error {
    match e {
        SendError::Full | SendError::Waits(_) => Error::retry(e),
        e => Error::wrong(e),
    }
}

impl Qp {
    /// What the peer needs to connect, as bytes to be brought to it by any way.
    pub fn info(&self) -> Vec<u8> {
        let core = &self.0;
        let rails = core.shared.rails.len();
        let posted = lock(&core.posted);
        let lanes = core.channels.iter().enumerate();
        let lanes = lanes
            .map(|(c, channel)| channel.info(|generation| posted.keys.rkey(c % rails, generation)));
        let info = Info {
            agreed: core.layout.agreed().map(|(_, value)| value),
            enabled: [core.options.send, core.options.recv],
            token: core.wire.token,
            control: core.wire.addresses(),
            keyed: core.shared.protection == Protection::Windows,
            lanes: lanes.collect(),
        };
        info.encode()
    }

    /// How long [`Qp::info`] is.
    pub fn info_bytes(&self) -> usize {
        let attr = self.0.layout.attr();
        Info::bytes(self.0.shared.rails.len(), attr.channels.into(), attr.generations.into())
    }

    /// Connects it to the peer whose information that is. The peer does the same.
    ///
    /// # Errors
    /// Bytes that are no such information; a peer whose attributes differ, by name; a queue pair
    /// that is connected.
    pub fn connect(&self, peer: &[u8]) -> Result<()> {
        let core = &self.0;
        let attr = core.layout.attr();
        let info = Info::decode(peer, |theirs| {
            core.layout.agrees(theirs).map_err(Error::wrong)?;
            Ok((attr.channels.into(), attr.generations.into()))
        })?;
        let [they_send, they_receive] = info.enabled;
        if core.options.send && !they_receive || core.options.recv && !they_send {
            let (what, theirs) = if core.options.send && !they_receive {
                ("sends", "receives")
            } else {
                ("receives", "sends")
            };
            return Err(Error::wrong(format!(
                "the queue pair {what}, but the peer's was made without {theirs}"
            )));
        }
        if core.peer.get().is_some() {
            return Err(Error::wrong("the queue pair is connected already"));
        }
        for (channel, lanes) in core.channels.iter().zip(&info.lanes) {
            channel.connect(lanes)?;
        }
        core.wire.connect(&info.control)?;
        lock(&core.state).sends.cleared.with_keys(if info.keyed { core.channels.len() } else { 0 });
        // Workers serve it from now on.
        core.peer
            .set(info.token)
            .map_err(|_| Error::wrong("the queue pair is connected already"))?;
        core.kick_all();
        Ok(())
    }

    /// Posts a receive into bytes of registered memory. The peer's send of the same number goes
    /// there.
    ///
    /// # Errors
    /// [`Error::Retry`] where slots are in use, or were too short ago; bytes that are not inside,
    /// or too many.
    pub fn recv_post(&self, memory: &Memory, offset: u64, bytes: u64) -> Result<Recv> {
        let addr = memory
            .addr()
            .checked_add(offset)
            .ok_or_else(|| Error::wrong("an offset beyond all memory"))?;
        Ok(Recv { core: self.0.clone(), seq: self.0.recv_post(memory, addr, bytes)?, done: false })
    }

    /// Sends bytes of registered memory as one message, with an immediate or without.
    ///
    /// # Errors
    /// As [`Qp::send_start`] and [`Send::add`].
    pub fn send_post(
        &self,
        memory: &Memory,
        offset: u64,
        bytes: u64,
        imm: Option<u32>,
    ) -> Result<Send> {
        if bytes > self.0.layout.message_bytes {
            return Err(Error::wrong(format!(
                "a message of {bytes} bytes; {} is the most",
                self.0.layout.message_bytes
            )));
        }
        if !memory.has(memory.addr().saturating_add(offset), bytes) {
            return Err(not_inside(memory, memory.addr().saturating_add(offset), bytes));
        }
        let send = self.send_start(imm)?;
        send.add(memory, offset, bytes, 0, 0)?;
        send.end()?;
        Ok(send)
    }

    /// Begins a message whose chunks are given one after another.
    ///
    /// # Errors
    /// [`Error::Retry`] where as many are unfinished as there are slots.
    pub fn send_start(&self, imm: Option<u32>) -> Result<Send> {
        Ok(Send { core: self.0.clone(), seq: self.0.send_start(imm)? })
    }

    /// What has been counted.
    pub fn counters(&self) -> Counters {
        let sum = |of: fn(&crate::lanes::Counts) -> &AtomicU64| {
            self.0.channels.iter().map(|c| of(&c.counts).load(Relaxed)).sum::<u64>()
        };
        let wire = &self.0.wire;
        Counters {
            sent: sum(|c| &c.sent),
            packets: sum(|c| &c.packets),
            duplicates: sum(|c| &c.duplicates),
            late: sum(|c| &c.late),
            outside: sum(|c| &c.outside),
            under_runs: sum(|c| &c.under_runs),
            strangers: wire.strangers.load(Relaxed) + wire.garbage.load(Relaxed),
            control: wire.heard.load(Relaxed),
        }
    }
}
