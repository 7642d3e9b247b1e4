//! What packets take up in the buffer of the socket that receives them, and what a QP may take of
//! it.
//!
//! A kernel counts the memory that a packet lies in, not its bytes: a small packet takes up many
//! times its size. All QPs that send to one socket share its buffer; who divides it tells each QP
//! how much it may have on its way ([`Room`]), and asks what it has ([`crate::RcQp::flight`]). A
//! request is counted until it is acknowledged, a READ with its answers, which come back to us.

/// What a packet costs beside its bytes: the kernel's descriptor, headers, and what lies behind the
/// data.
const DESCRIPTOR_COST: u32 = 256;
const HEADERS_COST: u32 = 424;

/// What a packet of `len` bytes costs. One of `mtu` bytes among others of its message leaves in a
/// run with them, whose memory is one; a packet that is a message for itself has memory of its own,
/// of a power of two.
#[inline]
pub(crate) const fn cost(packets: u32, len: u32, mtu: u32) -> u32 {
    if packets > 1 {
        mtu + DESCRIPTOR_COST * 2
    } else {
        let bytes = if len < mtu { len } else { mtu };
        DESCRIPTOR_COST + (bytes + HEADERS_COST).next_power_of_two()
    }
}

/// What the largest block of a READ costs, which is never divided: no less may be given to a QP
/// when nothing else is on its way.
pub const MAX_BLOCK_COST: u32 = 96 << 10;

/// What a QP is told before it sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// What it may have on its way besides what it has.
    pub cost: u32,
    /// How long an answer may take, as others have measured that send to the same destination: no
    /// timer counts on less.
    pub wait_us: u32,
}

impl Room {
    /// All that the QP's own window allows.
    pub const UNLIMITED: Room = Room { cost: u32::MAX, wait_us: 0 };
}

/// What became of a QP's packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct News {
    /// Packets that have ever been acknowledged, or answered.
    pub acked: u64,
    /// Packets that have since been taken for lost.
    pub lost: u32,
    /// The round trip that was last measured, in µs.
    pub rtt_us: Option<u32>,
}
