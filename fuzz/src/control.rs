//! One end of a logical QP, and a peer that says anything at all, under the right seal: of this
//! crate's version, of another, gone mad.
//!
//! The input is a list of steps, each an opcode with its operands; where the bytes end, the rest
//! are zeros. After each step the shell answers what the QP asks. Whatever was said, there is no
//! panic and:
//! - the epoch only grows, and by no more than what is believed at once;
//! - a life is connected and started once, in that order, and in the epoch of the QP;
//! - what is fenced is released or moved, once;
//! - of what is outstanding, no more is taken for executed than there is;
//! - nothing is done after the end but answering, and the end comes once;
//! - a QP that waits has a deadline;
//! - a datagram with one bit changed does not open.

use unbroken_failover_protocol::message::{
    Body, Hello, Message, Planned, Probe, Refuse, RefuseReason,
};
use unbroken_failover_protocol::seal::Key;
use unbroken_failover_protocol::{
    slot_of, Action, Config, Endpoint, Liveness, LogicalQp, OpenError, Opened, QuiesceError,
    Quiesced, Reason, SlotPath, SlotTable, State,
};
use unbroken_types::{Gid, Messages, Mtu, PeerDone, WcStatus};

const RAILS: u8 = 3;
/// Steps of one input.
const MAX_STEPS: usize = 200;
/// What the shell carries out in one go; see `MAX_ACTIONS` in shift.
const MAX_ACTIONS: usize = 1024;
/// See `MAX_EPOCH_JUMP` in path, and the slots that may be passed over besides.
const MAX_GROWTH: u64 = 64 * 64 + 2 * 64;
/// Every wait of a switch ends within this.
const MAX_WAIT_US: u64 = 31_000_000;

/// Opcodes of the steps.
pub mod step {
    pub const DATAGRAM: u8 = 0;
    pub const HELLO: u8 = 1;
    pub const REFUSE: u8 = 2;
    pub const BYE: u8 = 3;
    pub const PROBE: u8 = 4;
    pub const SUSPECT: u8 = 5;
    pub const BELIEVE: u8 = 6;
    pub const WAIT: u8 = 7;
    pub const PROGRESS: u8 = 8;
    pub const SHELL: u8 = 9;
    pub const CLOSE: u8 = 10;
    pub const RECONNECT: u8 = 11;
    pub const PLANNED: u8 = 12;
    pub const PLAN: u8 = 13;
    pub const FENCE: u8 = 14;
    pub const COUNT: u8 = 15;
}

/// The ends, for seeds too.
pub fn end(n: u8) -> Endpoint {
    Endpoint {
        gid: Gid([n; 16]),
        qpn: 16 + u32::from(n),
        incarnation: 1 + u64::from(n),
        connection: 5,
    }
}

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn u8(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn take(&mut self, n: usize) -> Vec<u8> {
        let (head, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        head.to_vec()
    }
}

struct World {
    qp: LogicalQp,
    key: Key,
    now_us: u64,
    /// What the shell answers next.
    life: Quiesced,
    can: u8,
    outstanding: Messages,
    next_qpn: u32,
    connected: Option<u64>,
    started: Option<u64>,
    over: bool,
    /// What is posted is held on the old path.
    fenced: bool,
}

/// Runs an input.
pub fn run(input: &[u8]) {
    let table = SlotTable::new(SlotPath { local: 0, remote: 0 }, RAILS, RAILS, true);
    let mut world = World {
        qp: LogicalQp::new(end(0), end(1), table, Config::default(), 0),
        key: Key::new(&[7; 32]),
        now_us: 0,
        life: Quiesced::default(),
        can: 0xff,
        outstanding: Messages::default(),
        next_qpn: 2,
        connected: None,
        started: None,
        over: false,
        fenced: false,
    };
    for path in (0..RAILS).flat_map(|l| (0..RAILS).map(move |r| SlotPath { local: l, remote: r })) {
        world.qp.set_path_liveness(0, path, Liveness::Alive);
    }
    let mut bytes = Bytes(input);
    for _ in 0..MAX_STEPS {
        if bytes.0.is_empty() {
            return;
        }
        let before = world.qp.epoch();
        world.step(&mut bytes);
        world.drive();
        let after = world.qp.epoch();
        assert!((before..=before + MAX_GROWTH).contains(&after), "from epoch {before} to {after}");
        let idle = matches!(world.qp.state(), State::Active | State::Failed | State::Closed);
        match world.qp.poll_timeout() {
            None => assert!(idle, "{:?} without a deadline", world.qp.state()),
            Some(at) => assert!(
                !idle && at <= world.now_us + MAX_WAIT_US,
                "{:?} until {at}",
                world.qp.state()
            ),
        }
    }
}

impl World {
    fn step(&mut self, bytes: &mut Bytes<'_>) {
        let (op, arg) = (bytes.u8(), bytes.u8());
        match op % step::COUNT {
            step::DATAGRAM => self.datagram(bytes, arg),
            step::HELLO => {
                let hello = self.hello(bytes, arg);
                self.hear(arg >> 4, Body::Hello(hello));
            }
            step::REFUSE => {
                let reasons = [
                    RefuseReason::UnknownQp,
                    RefuseReason::WrongIncarnation,
                    RefuseReason::UnsafeReplay,
                    RefuseReason::Inconsistent,
                    RefuseReason::Impossible,
                    RefuseReason::Failed,
                    RefuseReason::WrongConnection,
                ];
                let reason = reasons[usize::from(arg & 15) % reasons.len()];
                let refused = if bytes.u8() == 9 { 99 } else { end(1).incarnation };
                self.hear(
                    arg >> 4,
                    Body::Refuse(Refuse { reason, epoch: self.qp.epoch(), refused }),
                );
            }
            step::BYE => self.hear(arg >> 4, Body::Bye),
            step::PROBE => {
                let probe = Probe { sequence: arg.into(), sent_us: self.now_us };
                self.hear(
                    arg >> 4,
                    if arg & 1 == 0 { Body::Probe(probe) } else { Body::ProbeAck(probe) },
                );
            }
            step::SUSPECT => {
                let reason = match arg >> 4 & 7 {
                    0 => Reason::Stall,
                    1 => Reason::DeviceFatal,
                    2 => Reason::PortDown,
                    3 => Reason::PostFailed,
                    4 => Reason::Wedged(WcStatus::RetryExcErr),
                    _ => Reason::QpFailed(WcStatus::RetryExcErr),
                };
                let epoch = self.qp.epoch().wrapping_sub(u64::from(arg & 15 == 15));
                self.qp.suspect(self.now_us, epoch, reason);
            }
            step::BELIEVE => {
                let path = SlotPath { local: arg % RAILS, remote: arg / RAILS % RAILS };
                let liveness =
                    [Liveness::NoNic, Liveness::Silent, Liveness::Alive][usize::from(arg >> 6) % 3];
                self.qp.set_path_liveness(self.now_us, path, liveness);
            }
            step::WAIT => {
                // To the deadline, or as long as is said.
                let at_us = self.qp.poll_timeout().filter(|_| arg == 0);
                self.now_us =
                    at_us.unwrap_or(self.now_us + u64::from(arg) * 1_000).max(self.now_us);
                self.qp.handle_timeout(self.now_us);
            }
            step::PROGRESS => self
                .qp
                .handle_progress(self.now_us, self.qp.epoch().wrapping_sub(u64::from(arg & 1))),
            step::SHELL => {
                self.can = arg;
                let [executed, completed, outstanding] =
                    [bytes.u8(), bytes.u8(), bytes.u8()].map(u64::from);
                let [executed, completed, outstanding] = [executed, completed, outstanding]
                    .map(|all: u64| Messages { all, receives: all / 2 });
                let exact = arg & 16 == 0;
                self.life = Quiesced {
                    executed,
                    exact,
                    completed,
                    outstanding,
                    progressed: arg & 8 != 0,
                    idle: false,
                };
            }
            step::PLANNED => {
                let kind = [Planned::Propose, Planned::Drained, Planned::Cancel]
                    [usize::from(arg & 15) % 3];
                let epoch = self.qp.epoch().saturating_add_signed(i64::from(bytes.u8() as i8));
                self.hear(arg >> 4, Body::Planned(kind, epoch));
            }
            step::PLAN => {
                self.qp.plan(self.now_us, Reason::Failback, |path| path.local == arg % RAILS);
            }
            step::FENCE => self.qp.handle_fence(self.now_us, arg & 1 != 0, arg & 2 != 0),
            step::CLOSE => self.qp.close(self.now_us),
            _ => self.qp.set_peer_connection(u32::from(arg)),
        }
    }

    /// Bytes of any kind, as they come by the wire.
    fn datagram(&mut self, bytes: &mut Bytes<'_>, flip: u8) {
        let length = usize::from(bytes.u8()) | usize::from(bytes.u8() & 3) << 8;
        let mut datagram = bytes.take(length);
        self.key.seal(&mut datagram);
        if flip > 0 {
            let bit = (usize::from(flip) * 37) % (8 * datagram.len());
            datagram[bit / 8] ^= 1 << (bit % 8);
            assert!(self.key.open(&datagram).is_none(), "a forged datagram opens");
            return;
        }
        let mut rest = self.key.open(&datagram).expect("its own seal");
        while let Ok((message, tail)) = Message::decode(rest) {
            assert!(tail.len() < rest.len(), "a message has no length");
            let mut again = Vec::new();
            message.encode(&mut again);
            assert_eq!(Message::decode(&again), Ok((message, &[][..])));
            self.qp.handle_message(self.now_us, &message);
            rest = tail;
        }
    }

    /// A Hello about the epochs around, mostly with numbers that could be.
    fn hello(&mut self, bytes: &mut Bytes<'_>, arg: u8) -> Hello {
        let offset = i64::from(bytes.u8() as i8);
        let epoch =
            self.qp.epoch().saturating_add_signed(if arg & 4 != 0 { offset << 8 } else { offset });
        let numbers = bytes.u8();
        let path = self
            .qp
            .slots()
            .get(slot_of(epoch))
            .map_or(SlotPath { local: 0, remote: 0 }, SlotPath::mirrored);
        let path = if numbers & 15 == 15 { SlotPath { local: numbers >> 4, ..path } } else { path };
        let count = |bytes: &mut Bytes<'_>| match bytes.u8() {
            255 => u64::MAX,
            n => u64::from(n),
        };
        let messages =
            |all: u64, part: u8| Messages { all, receives: all / u64::from(part.max(1)) };
        let executed = messages(self.qp.completed().all.saturating_add(count(bytes)), numbers & 7);
        let completed = messages(self.qp.executed().all.saturating_sub(count(bytes)), numbers >> 5);
        let exact = arg & 8 == 0;
        let (heard, waiting) = (arg & 1 != 0, arg & 2 != 0);
        let fresh_qpn = 0x100 + epoch as u32 % 0x1000;
        Hello {
            epoch,
            path,
            fresh_qpn,
            psn: numbers.into(),
            mtu: Mtu::B1024,
            key_set: 0,
            heard,
            waiting,
            executed,
            exact,
            completed,
            unproven_psn: (arg & 16 != 0).then(|| numbers.into()),
        }
    }

    /// A message of the peer, or, by `wrong`, of or to somebody who is nearly one of the ends. It
    /// goes through its bytes and the seal.
    fn hear(&mut self, wrong: u8, body: Body) {
        let (mut from, mut to) = (self.qp.peer(), self.qp.me());
        match wrong {
            9 => from.incarnation += 1,
            10 => to.incarnation += 1,
            11 => from.connection ^= 1,
            12 => to.connection ^= 1,
            13 => from.qpn += 1,
            14 => to.gid = Gid([9; 16]),
            _ => {}
        }
        let mut datagram = Vec::new();
        Message { from, to, body }.encode(&mut datagram);
        self.key.seal(&mut datagram);
        let opened = self.key.open(&datagram).expect("its own seal");
        // What cannot be said is not heard: a slot or a number beyond what the format takes.
        if let Ok((message, _)) = Message::decode(opened) {
            assert_eq!(message, Message { from, to, body });
            self.qp.handle_message(self.now_us, &message);
        }
    }

    fn can_be(&self, peer_done: PeerDone) -> bool {
        match peer_done {
            PeerDone::Messages(n) => n <= self.outstanding.all,
            PeerDone::Receives(n) => n <= self.outstanding.receives,
        }
    }

    fn drive(&mut self) {
        for _ in 0..MAX_ACTIONS {
            let Some(action) = self.qp.poll_action() else { return };
            assert!(
                !self.over || matches!(action, Action::Send { .. }),
                "{action:?} after the end"
            );
            match action {
                Action::Quiesce { epoch } => {
                    assert_eq!(epoch, self.qp.epoch());
                    self.outstanding = self.life.outstanding;
                    self.fenced = false;
                    let life = if self.can & 1 != 0 { Ok(self.life) } else { Err(QuiesceError) };
                    self.qp.handle_quiesced(self.now_us, life);
                }
                Action::Fence { epoch } => {
                    assert!(epoch == self.qp.epoch() && !std::mem::replace(&mut self.fenced, true));
                }
                Action::Release { epoch } => {
                    assert!(
                        epoch == self.qp.epoch() && std::mem::take(&mut self.fenced),
                        "released unfenced"
                    );
                }
                Action::Open { epoch, .. } => {
                    self.next_qpn += 1;
                    let opened = Opened {
                        qpn: self.next_qpn,
                        psn: self.next_qpn,
                        mtu: Mtu::B1024,
                        key_set: 0,
                    };
                    // One NIC may refuse; if all did, the QP would go on to look for one.
                    let result = if self.can & 2 != 0 { Ok(opened) } else { Err(OpenError) };
                    self.can |= 2;
                    self.qp.handle_opened(self.now_us, epoch, result);
                }
                Action::CheckReplay { epoch, peer_done } => {
                    assert!(
                        self.can_be(peer_done),
                        "{peer_done:?} of {:?} are executed",
                        self.outstanding
                    );
                    self.qp.handle_check(self.now_us, epoch, self.can & 4 != 0);
                }
                Action::Connect { epoch, peer_done, .. } => {
                    assert!(self.can_be(peer_done) && epoch == self.qp.epoch());
                    assert!(
                        self.connected.replace(epoch).is_none_or(|before| before < epoch),
                        "connected twice"
                    );
                }
                Action::Start { epoch } => {
                    assert_eq!(
                        (Some(epoch), epoch),
                        (self.connected, self.qp.epoch()),
                        "started before it is connected"
                    );
                    assert!(
                        self.started.replace(epoch).is_none_or(|before| before < epoch),
                        "started twice"
                    );
                }
                Action::Fail { .. } => self.over = true,
                Action::Report(switched) => assert!(switched.detected_us <= switched.started_us),
                Action::Send { .. } => {}
            }
        }
        panic!("the QP asks for ever");
    }
}
