//! Parts of work requests.

use crate::WcOpcode;

/// One entry of a scatter/gather list; the layout of `struct ibv_sge`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Sge {
    /// Virtual address in the region of `lkey`.
    pub addr: u64,
    /// Length in bytes.
    pub length: u32,
    /// Local key.
    pub lkey: u32,
}

/// What a send WR does; the numbers are those of `enum ibv_wr_opcode`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum SendOpcode {
    /// RDMA WRITE.
    Write = 0,
    /// RDMA WRITE that consumes a receive and delivers 32 bits.
    WriteImm = 1,
    /// SEND.
    Send = 2,
    /// SEND with 32 bits beside the data.
    SendImm = 3,
    /// RDMA READ.
    Read = 4,
    /// Atomic compare and swap.
    CmpSwap = 5,
    /// Atomic fetch and add.
    FetchAdd = 6,
    /// Invalidates a key of this end's own.
    LocalInv = 7,
    /// Binds a memory window of this end's own.
    BindMw = 8,
    /// SEND that invalidates a key of the peer's.
    SendInv = 9,
}

impl SendOpcode {
    /// The opcode of a number of the C API, if it is one that this project knows.
    pub const fn from_code(code: u32) -> Option<SendOpcode> {
        Some(match code {
            0 => SendOpcode::Write,
            1 => SendOpcode::WriteImm,
            2 => SendOpcode::Send,
            3 => SendOpcode::SendImm,
            4 => SendOpcode::Read,
            5 => SendOpcode::CmpSwap,
            6 => SendOpcode::FetchAdd,
            7 => SendOpcode::LocalInv,
            8 => SendOpcode::BindMw,
            9 => SendOpcode::SendInv,
            _ => return None,
        })
    }

    /// The opcode of its WC.
    pub const fn wc_opcode(self) -> WcOpcode {
        match self {
            SendOpcode::Write | SendOpcode::WriteImm => WcOpcode::RdmaWrite,
            SendOpcode::Send | SendOpcode::SendImm | SendOpcode::SendInv => WcOpcode::Send,
            SendOpcode::LocalInv => WcOpcode::LocalInv,
            SendOpcode::BindMw => WcOpcode::BindMw,
            SendOpcode::Read => WcOpcode::RdmaRead,
            SendOpcode::CmpSwap => WcOpcode::CompSwap,
            SendOpcode::FetchAdd => WcOpcode::FetchAdd,
        }
    }

    /// Whether it is not among the messages that a peer executes and counts: the peer answers with
    /// data (READ, atomics), so that having executed it is not enough to complete it, or has no
    /// part in it at all.
    pub const fn awaits_data(self) -> bool {
        matches!(self, SendOpcode::Read | SendOpcode::CmpSwap | SendOpcode::FetchAdd)
            || self.is_local()
    }

    /// Whether nothing of it goes on the wire.
    pub const fn is_local(self) -> bool {
        matches!(self, SendOpcode::LocalInv | SendOpcode::BindMw)
    }

    /// Whether it changes what a key means, at this end or the peer's: it must never run twice.
    pub const fn changes_keys(self) -> bool {
        matches!(self, SendOpcode::LocalInv | SendOpcode::BindMw | SendOpcode::SendInv)
    }

    /// Whether it consumes a receive of the peer.
    pub const fn consumes_receive(self) -> bool {
        matches!(
            self,
            SendOpcode::Send | SendOpcode::SendImm | SendOpcode::SendInv | SendOpcode::WriteImm
        )
    }

    /// Whether it is atomic.
    pub const fn is_atomic(self) -> bool {
        matches!(self, SendOpcode::CmpSwap | SendOpcode::FetchAdd)
    }
}

/// Flags of a send WR (`enum ibv_send_flags`, plus our own).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SendFlags(pub u32);

bitflags::bitflags! {
    impl SendFlags: u32 {
        /// Start only when all READs and atomics before it are complete.
        const FENCE = 1;
        /// Make a WC.
        const SIGNALED = 1 << 1;
        /// The peer's WC is a solicited event.
        const SOLICITED = 1 << 2;
        /// The data is copied when the WR is posted; keys are not looked at.
        const INLINE = 1 << 3;
        /// Our own (`UNBROKEN_SEND_NO_REPLAY`): never send this WR twice; a failure while it may
        /// have run gives the original error.
        const NO_REPLAY = 1 << 30;
        // What a program sets beside these is kept, and refused with its number.
        const _ = !0;
    }
}

impl SendFlags {
    /// These flags and those.
    pub const fn with(self, other: SendFlags) -> SendFlags {
        self.union(other)
    }
}
