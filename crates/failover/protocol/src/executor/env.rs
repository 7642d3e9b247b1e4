//! What an executor asks of whoever has the devices, the network and the directory.

use crate::action::{FailCause, OpenError, Opened, QuiesceError, Switched};
use crate::message::Message;
use crate::qp::LogicalQp;
use crate::slots::{Liveness, SlotPath};
use unbroken_types::{Backlog, Progress, RcModify, Replay, WcStatus};

/// A step on a physical QP was refused: its NIC has just died, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the device refused")]
pub struct StepError;

/// Why a QP takes no more work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// It was given up: the application has the original error.
    GivenUp,
    /// An error of the program had ended it.
    ByProgram,
}

/// What a message asks of the directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asks {
    /// Where the peer's process can be reached now.
    Endpoints,
    /// That, and which connection the peer's QP has now.
    Connection,
}

/// What the directory says of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PeerWord {
    /// The connection that its QP has now; `None` where it does not say, or was not asked.
    pub connection: Option<u32>,
}

/// What is done for an executor. All of it is about one logical QP; nothing of it may call the
/// executor.
pub trait Env {
    /// Microseconds of a monotonic clock.
    fn now_us(&self) -> u64;

    // ---- the physical QP ----

    /// Its state, and how far it is.
    fn progress(&self) -> Progress;
    /// Of the sends that are posted from now on it is known when they are complete.
    fn announce(&mut self);
    /// Whether its NIC works.
    fn nic_works(&self) -> bool;
    /// Stops it for ever, and takes its work out. `None`: that is under way; it is asked again.
    fn quiesce(&mut self) -> Result<Option<Backlog>, QuiesceError>;
    /// Puts a fresh one in its place, on the local NIC of the path, in state INIT and with these
    /// receives. The old one is destroyed. On an error nothing has changed.
    fn open(&mut self, path: SlotPath, recvs: &Backlog) -> Result<Opened, OpenError>;
    /// Gives a fresh one (RTR) its sends.
    fn adopt(&mut self, sends: &Backlog) -> Result<(), StepError>;
    /// Posts sends that were held, in their order.
    fn post(&mut self, sends: &Backlog) -> Result<(), StepError>;
    /// Changes it, step by step; nothing is sent before the last. `remote` is the peer's NIC, where
    /// it is to be connected.
    fn modify(&mut self, changes: &[RcModify], remote: Option<u8>) -> Result<(), StepError>;
    /// Its transport goes on where it is, with all its retries, also where it has given up; with
    /// `insists` soon and without end. False: it cannot.
    fn go_on(&mut self, insists: bool) -> bool;
    /// Completes its first send with `status` and flushes the rest; only where it could not be
    /// quiesced, or not at once.
    fn fail(&mut self, status: WcStatus);

    // ---- the application ----

    /// What it has set, as a physical QP is to have it.
    fn app(&self) -> RcModify;
    /// Completes work that no physical QP holds: the first send with `first`, all else flushed.
    fn complete(&mut self, work: &Backlog, first: WcStatus);
    /// The QP has ended; whatever is posted from now on flushes.
    fn ended(&mut self, why: Ended);

    /// How many QPs of the process are on their way from one path to another.
    fn switching_qps(&self) -> u32;

    // ---- the network and the peer ----

    /// What is known of a path.
    fn liveness(&self, path: SlotPath) -> Liveness;
    /// Whether the path, which lives, is known to lose some packets.
    fn loses(&self, path: SlotPath) -> bool;
    /// Sends a control message over a path. It may be lost.
    fn send(&mut self, message: &Message, path: SlotPath);
    /// What the directory says of the peer, where it has just been read for this message: where its
    /// process can be reached is known anew, too. `None`: it will be read, in a thread that may
    /// wait for it, and then the message is handed in again.
    fn peer_word(&mut self, message: &Message, asks: Asks) -> Option<PeerWord>;
    /// Whether the peer's process was no longer there when it was read last. (Not to know is to say
    /// no.)
    fn peer_has_ended(&self) -> bool;

    // ---- reports ----

    /// The QP is about to be given up.
    fn gives_up(&mut self, lqp: &LogicalQp, cause: FailCause, status: WcStatus);
    /// The QP's transport has given up in that many lives, one after the other, on paths that live,
    /// and nothing has moved in them. The next life begins in so many microseconds.
    fn revives_in_vain(&mut self, _lives: u32, _wait_us: u64) {}
    /// A switch is done, and something has moved (or nothing was there to be moved).
    fn switched(&mut self, lqp: &LogicalQp, done: &Switch);
}

/// A switch that is done, for whoever reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Switch {
    /// From where to where, and why.
    pub switched: Switched,
    /// What was sent again, and what was not.
    pub replay: Replay,
    /// When something moved on the new path, or, where nothing waited, when it took sends again.
    pub moved_us: u64,
}
