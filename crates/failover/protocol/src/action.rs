//! What a logical QP asks of its shell, and what the shell answers.

use crate::message::Message;
use unbroken_types::{Messages, Mtu, PeerDone, WcStatus};

/// Something for the shell to do. Fetched with [`crate::LogicalQp::poll_action`], in order, after
/// each call of a handler.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub enum Action {
    /// Stop the physical QP for ever, keep what is outstanding, and answer with `handle_quiesced`.
    Quiesce {
        /// The epoch whose life ends.
        epoch: u64,
    },
    /// Hold what is posted from now on, and say with `handle_fence` how the rest completes.
    Fence {
        /// The epoch of the life.
        epoch: u64,
    },
    /// The planned switch is cancelled: post what was held.
    Release {
        /// The epoch of the life.
        epoch: u64,
    },
    /// Make a fresh physical QP (fresh QPN) on the local NIC of the slot, let it adopt what is
    /// outstanding, repost the receives, and answer with `handle_opened`. It neither sends nor
    /// receives yet.
    Open {
        /// The epoch of the new life.
        epoch: u64,
        /// Its slot.
        slot: u8,
    },
    /// Send a control message over the path of a slot. It may be lost: whatever matters is
    /// repeated.
    Send {
        /// The message.
        message: Message,
        /// The slot whose path should carry it.
        via: u8,
    },
    /// Say with `handle_check` whether all that would be replayed may be replayed.
    CheckReplay {
        /// The epoch of the life.
        epoch: u64,
        /// What the peer has executed of the outstanding sends.
        peer_done: PeerDone,
    },
    /// Mark what the peer has executed and make the fresh physical QP ready to receive (RTR).
    Connect {
        /// The epoch of the life.
        epoch: u64,
        /// QPN of the peer's fresh physical QP.
        peer_qpn: u32,
        /// First PSN of what we send.
        sq_psn: u32,
        /// First PSN of what the peer sends.
        rq_psn: u32,
        /// The smaller path MTU of the two ends.
        mtu: Mtu,
        /// As in `CheckReplay`.
        peer_done: PeerDone,
    },
    /// Let the fresh physical QP send (RTS): the peer is ready to receive.
    Start {
        /// The epoch of the life.
        epoch: u64,
    },
    /// Give the application the original error: the first outstanding send gets `status`, all else
    /// flushes.
    Fail {
        /// Status of the first outstanding send.
        status: WcStatus,
        /// Why no path could be found.
        cause: FailCause,
    },
    /// A switch is complete: for the event log.
    Report(Switched),
}

/// Why a switch began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Reason {
    /// The physical QP failed with this status.
    QpFailed(WcStatus),
    /// A post failed.
    PostFailed,
    /// The local NIC is dead.
    DeviceFatal,
    /// The local port is down.
    PortDown,
    /// Its path is dead: nothing moved on it and probes were not answered, while another path
    /// answered.
    Stall,
    /// The QP is silent, or has given up with this status, while its path lives: it gets a fresh
    /// life on the same path.
    Wedged(WcStatus),
    /// The peer switched.
    Peer,
    /// Its preferred path works again.
    Failback,
    /// It is to leave its NIC by choice.
    Drain,
    /// Its path lives, and loses much more than others.
    Loss,
    /// It has no other port pair to migrate to, and a fresh life on the same path can have one.
    PortPair,
    /// The QP is connected where its number is not known to the network: its NIC is dead, or it was
    /// reset after it had moved.
    Connect,
}

impl Reason {
    /// A short name for logs.
    pub const fn name(self) -> &'static str {
        match self {
            Reason::QpFailed(_) => "qp-failed",
            Reason::PostFailed => "post-failed",
            Reason::DeviceFatal => "device-fatal",
            Reason::PortDown => "port-down",
            Reason::Stall => "stall",
            Reason::Wedged(_) => "wedged",
            Reason::Peer => "peer",
            Reason::Failback => "failback",
            Reason::Drain => "drain",
            Reason::Loss => "loss",
            Reason::PortPair => "port-pair",
            Reason::Connect => "connect",
        }
    }

    /// The error that the application would have seen without a switch.
    pub const fn status(self) -> WcStatus {
        match self {
            Reason::QpFailed(status) | Reason::Wedged(status) => status,
            Reason::DeviceFatal | Reason::PostFailed => WcStatus::FatalErr,
            Reason::PortDown | Reason::Stall | Reason::Peer | Reason::Connect => {
                WcStatus::RetryExcErr
            }
            Reason::Failback | Reason::Drain | Reason::Loss | Reason::PortPair => {
                WcStatus::RetryExcErr
            }
        }
    }
}

/// Why a logical QP failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum FailCause {
    /// There is no second path.
    NoBackup,
    /// The old physical QP could not be stopped.
    CannotQuiesce,
    /// What would have been replayed must not be (NO_REPLAY, atomics).
    UnsafeReplay,
    /// The peer has executed less than it acknowledged.
    Inconsistent,
    /// The peer refused; what it said.
    Refused(crate::message::RefuseReason),
    /// The peer closed its end.
    PeerClosed,
    /// The peer said nothing for too long.
    PeerSilent,
    /// The switch took too long in all.
    Deadline,
    /// Too many epochs were tried while nothing moved.
    TooManyEpochs,
    /// The shell did not answer.
    ShellSilent,
    /// The transport gave up on a path that lives, and nothing had ever come through: the two ends
    /// were never connected to each other.
    NeverWorked,
    /// The program asks for a READ or an atomic where it allows none.
    NoReads,
    /// The transport gave up in one life after the other on paths that live.
    NothingMoves,
}

impl FailCause {
    /// Whether the programs are the reason, and no NIC or path: the peer has ended or refused, or
    /// the two ends never fitted.
    pub const fn is_of_programs(self) -> bool {
        use FailCause::{NeverWorked, NoReads, PeerClosed, Refused};
        matches!(self, Refused(_) | PeerClosed | NeverWorked | NoReads)
    }

    /// A sentence for logs.
    pub const fn describe(self) -> &'static str {
        match self {
            FailCause::NoBackup => "no backup path",
            FailCause::CannotQuiesce => "the failed QP could not be stopped",
            FailCause::UnsafeReplay => "an outstanding request must not be replayed",
            FailCause::Inconsistent => "the peer lost data that it had acknowledged",
            FailCause::Refused(reason) => reason.describe(),
            FailCause::PeerClosed => "the peer closed its QP",
            FailCause::PeerSilent => "the peer did not answer over any path",
            FailCause::Deadline => "no path carried the QP within the deadline",
            FailCause::TooManyEpochs => "too many paths were tried in vain",
            FailCause::ShellSilent => "the device did not answer",
            FailCause::NeverWorked => {
                "nothing ever came through although the path lives: the ends do not fit (QPNs, \
                 PSNs)"
            }
            FailCause::NoReads => "a READ or an atomic, of which max_rd_atomic allows none",
            FailCause::NothingMoves => {
                "the transport gave up in one life after the other, on paths that live"
            }
        }
    }
}

/// A completed switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Switched {
    /// Slot of the path that was left.
    pub from_slot: u8,
    /// Slot of the path that carries the QP now.
    pub to_slot: u8,
    /// The epoch now.
    pub epoch: u64,
    /// Why.
    pub reason: Reason,
    /// When the QP came onto the path that was left: it was connected, or a switch began to send
    /// there.
    pub on_path_since_us: u64,
    /// When the failure was noticed.
    pub detected_us: u64,
    /// When sending began on the new path.
    pub started_us: u64,
    /// Epochs entered on the way: 1 unless paths failed in turn.
    pub epochs: u32,
    /// It was planned: nothing had failed.
    pub planned: bool,
}

/// A switch that has not come to its end, for whoever explains why it failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Attempt {
    /// Slot of the path that was left.
    pub from_slot: u8,
    /// Why.
    pub reason: Reason,
    /// When the failure was noticed.
    pub detected_us: u64,
    /// Epochs entered since.
    pub epochs: u32,
    /// When the peer was last heard, or the switch began.
    pub peer_heard_us: u64,
}

/// Exact progress of a physical QP that was stopped, over its own life. Counted are messages that
/// await no data (SEND and WRITE with or without immediate data; not READ, not atomics).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct Quiesced {
    /// Messages of the peer that our responder executed.
    pub executed: Messages,
    /// Not only the receives among them were counted.
    pub exact: bool,
    /// Our own that completed.
    pub completed: Messages,
    /// Our own that are still outstanding, as the device holds them now.
    pub outstanding: Messages,
    /// Whether anything moved in this life (READs count too).
    pub progressed: bool,
    /// Nothing was there to be moved.
    pub idle: bool,
}

/// The physical QP cannot be stopped with exact progress, so nothing may be replayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, thiserror::Error)]
#[error("the QP cannot be stopped with exact progress")]
pub struct QuiesceError;

/// A fresh physical QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Opened {
    /// Its QPN.
    pub qpn: u32,
    /// The first PSN that it will send: drawn by chance.
    pub psn: u32,
    /// The path MTU of its NIC.
    pub mtu: Mtu,
    /// Which set of keys that NIC has ([`unbroken_types::NicKey`]); 0 where keys are good on all
    /// NICs.
    pub key_set: u16,
}

/// A fresh physical QP could not be made; what was outstanding stays with the shell.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, thiserror::Error)]
#[error("a fresh QP could not be made on the backup NIC")]
pub struct OpenError;
