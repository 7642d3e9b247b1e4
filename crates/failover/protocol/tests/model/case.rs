//! What a model is of: the programs at the two ends, and what the adversary may do to them.

use unbroken_failover_protocol::{FailCause, Mutation};
use unbroken_types::{SendFlags, SendOpcode};

/// Work requests of one end, at most.
pub const MAX_OPS: usize = 4;

/// A work request of a program.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    pub opcode: SendOpcode,
    pub flags: SendFlags,
}

/// A SEND.
pub const SEND: Turn = op(SendOpcode::Send, SendFlags(0));
/// A WRITE without immediate data.
pub const WRITE: Turn = op(SendOpcode::Write, SendFlags(0));
/// A WRITE that must not be replayed.
pub const WRITE_ONCE: Turn = op(SendOpcode::Write, SendFlags::NO_REPLAY);
/// A READ.
pub const READ: Turn = op(SendOpcode::Read, SendFlags(0));
/// A WRITE that begins when the READs before it are complete.
pub const FENCED_WRITE: Turn = op(SendOpcode::Write, SendFlags::FENCE);
/// A SEND that does.
pub const FENCED_SEND: Turn = op(SendOpcode::Send, SendFlags::FENCE);
/// An atomic.
pub const FETCH_ADD: Turn = op(SendOpcode::FetchAdd, SendFlags(0));
/// A receive that is posted by the program on its way; see also [`Program::recvs`].
pub const RECV: Turn = Turn { op: None, done: 0, received: 0 };

const fn op(opcode: SendOpcode, flags: SendFlags) -> Turn {
    Turn { op: Some(Op { opcode, flags }), done: 0, received: 0 }
}

/// One thing that a program does.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Posts this, or a receive.
    pub op: Option<Op>,
    /// First so many of its own sends must be complete,
    pub done: u8,
    /// and so many messages received.
    pub received: u8,
}

impl Turn {
    /// The same, once so many sends are complete.
    pub const fn once_done(self, done: u8) -> Turn {
        Turn { done, ..self }
    }

    /// The same, once so many messages have been received.
    pub const fn once_received(self, received: u8) -> Turn {
        Turn { received, ..self }
    }
}

/// A program.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// What it does, in this order.
    pub turns: Vec<Turn>,
    /// Receives that are posted before all else.
    pub recvs: u8,
}

impl Program {
    /// A program that posts this, and so many receives before.
    pub fn new(recvs: u8, turns: &[Turn]) -> Program {
        Program { turns: turns.to_vec(), recvs }
    }

    /// Its sends.
    pub fn ops(&self) -> impl Iterator<Item = Op> + '_ {
        self.turns.iter().filter_map(|t| t.op)
    }
}

/// How an end comes to leave a path without need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Doubt {
    /// It suspects the path, and knows no better than before of any.
    Stall,
    /// A probe of the path was lost: the end takes it for dead, until it looks again.
    Probe,
    /// A post failed: it takes its NIC for dead, until it looks again.
    Post,
    /// Its transport gave up, and the path lives.
    Wedged,
}

/// A rule of the device, or of time, that is left out, to show that the model would notice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WorldMutation {
    /// None.
    #[default]
    None,
    /// A QP that was stopped goes on executing what comes.
    Ghost,
    /// What is behind a FENCE does not wait for READs.
    NoFence,
    /// A fence of a planned switch that stands still is never given up.
    Patience,
}

/// One model.
#[derive(Clone, Debug)]
pub struct Case {
    pub programs: [Program; 2],
    /// Paths: NIC n to NIC n.
    pub rails: u8,
    /// The ends count exactly what they have executed; else receives only.
    pub exact: [bool; 2],
    /// How often an end may leave a path that lives, in all, and how.
    pub doubts: u8,
    pub doubt_kinds: Vec<Doubt>,
    /// Directions of paths that may die.
    pub cuts: u8,
    /// Both directions at once, instead.
    pub whole_cuts: bool,
    /// NICs that may die.
    pub nic_deaths: u8,
    /// Planned switches that each end may begin.
    pub plans: [u8; 2],
    /// This end may crash.
    pub crashes: Option<usize>,
    /// And a successor with its address may answer then.
    pub successor: bool,
    /// The device of this end cannot stop a QP on this rail.
    pub stuck: Option<(usize, u8)>,
    /// The devices of these ends take their time to stop a QP.
    pub slow: [bool; 2],
    /// A send may wait in the queue before it leaves; else it leaves at once.
    pub lazy: bool,
    /// A control message is lost if the path that it takes is dead. Else it gets through while any
    /// path lives: it is repeated, over each in turn.
    pub route: bool,
    /// Errors that a program may get for another reason than a crash.
    pub causes: Vec<FailCause>,
    pub mutation: Mutation,
    pub world_mutation: WorldMutation,
}

impl Case {
    /// Two programs, so many paths, counts exact, and nothing fails.
    pub fn new(rails: u8, programs: [Program; 2]) -> Case {
        Case {
            programs,
            rails,
            exact: [true; 2],
            doubts: 0,
            doubt_kinds: vec![Doubt::Stall],
            cuts: 0,
            whole_cuts: true,
            nic_deaths: 0,
            plans: [0; 2],
            crashes: None,
            successor: false,
            stuck: None,
            slow: [false; 2],
            lazy: false,
            route: false,
            causes: Vec::new(),
            mutation: Mutation::None,
            world_mutation: WorldMutation::None,
        }
    }

    /// A request, by its number.
    pub fn op(&self, end: usize, number: u8) -> Op {
        self.programs[end].ops().nth(usize::from(number)).expect("it was posted")
    }

    /// Only planned switches: nothing may fail and nothing is replayed.
    pub fn only_plans(&self) -> bool {
        let faults = self.doubts + self.cuts + self.nic_deaths;
        faults == 0 && self.crashes.is_none()
    }

    /// Whether the application may get that error though both ends live.
    pub fn allows(&self, cause: FailCause) -> bool {
        self.causes.contains(&cause)
    }
}
