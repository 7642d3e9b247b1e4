//! Kinds, states and limits of queue pairs. Numbers are those of `enum ibv_*`.

/// The transport of a QP (`enum ibv_qp_type`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u32)]
pub enum QpType {
    /// Reliable connection.
    Rc = 2,
    /// Unreliable connection.
    Uc = 3,
    /// Unreliable datagram.
    Ud = 4,
}

/// The state of a QP (`enum ibv_qp_state`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
#[repr(u32)]
pub enum QpState {
    /// Just made.
    #[default]
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue drained.
    Sqd = 4,
    /// Send queue error.
    Sqe = 5,
    /// Error: all work requests flush.
    Err = 6,
}

impl QpState {
    /// The state of a code of the C API.
    pub const fn from_code(code: i32) -> Option<QpState> {
        Some(match code {
            0 => QpState::Reset,
            1 => QpState::Init,
            2 => QpState::Rtr,
            3 => QpState::Rts,
            4 => QpState::Sqd,
            5 => QpState::Sqe,
            6 => QpState::Err,
            _ => return None,
        })
    }
}

/// How far automatic path migration of a connected QP is (`enum ibv_mig_state`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[repr(u32)]
pub enum PathMigState {
    /// It stays on the path that it has.
    #[default]
    Migrated = 0,
    /// It is ready for its alternate path, and waits until its peer is, too.
    Rearm = 1,
    /// Both ends are ready: the path may change at any time.
    Armed = 2,
}

impl PathMigState {
    /// The state of a number of the C API.
    pub const fn from_code(code: u32) -> Option<PathMigState> {
        Some(match code {
            0 => PathMigState::Migrated,
            1 => PathMigState::Rearm,
            2 => PathMigState::Armed,
            _ => return None,
        })
    }
}

/// Access rights of a memory region or a QP (`enum ibv_access_flags`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct Access(pub u32);

bitflags::bitflags! {
    impl Access: u32 {
        /// Incoming packets and receives may write.
        const LOCAL_WRITE = 1;
        /// The peer may write (RDMA WRITE).
        const REMOTE_WRITE = 1 << 1;
        /// The peer may read (RDMA READ).
        const REMOTE_READ = 1 << 2;
        /// The peer may run atomics.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to the region.
        const MW_BIND = 1 << 4;
        /// Addresses count from 0 at the region's beginning.
        const ZERO_BASED = 1 << 5;
        /// All that the peer may do.
        const REMOTE = 0b1110;
        /// Advice, which devices may follow: huge pages (`IBV_ACCESS_HUGETLB`), and the optional
        /// flags, of which relaxed ordering on PCIe is one (`IBV_ACCESS_OPTIONAL_RANGE`).
        const ADVICE = 1 << 7 | 0x3ff0_0000;
        // What a program sets beside these is kept, and refused with its number.
        const _ = !0;
    }
}

impl Access {
    /// No right beyond local reading, which every region has.
    pub const NONE: Access = Access(0);

    /// The rights of both.
    pub const fn with(self, other: Access) -> Access {
        self.union(other)
    }
}

/// A path MTU (`enum ibv_mtu`); the discriminant is the code in the C API.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(u32)]
pub enum Mtu {
    /// 256 bytes.
    B256 = 1,
    /// 512 bytes.
    B512 = 2,
    /// 1,024 bytes.
    B1024 = 3,
    /// 2,048 bytes.
    B2048 = 4,
    /// 4,096 bytes.
    B4096 = 5,
}

impl Mtu {
    /// Payload bytes of a full packet.
    pub const fn bytes(self) -> usize {
        128 << self as u32
    }

    /// The MTU of a code of the C API (1 to 5).
    pub const fn from_code(code: u32) -> Option<Mtu> {
        Some(match code {
            1 => Mtu::B256,
            2 => Mtu::B512,
            3 => Mtu::B1024,
            4 => Mtu::B2048,
            5 => Mtu::B4096,
            _ => return None,
        })
    }

    /// The largest MTU whose packet (payload plus `overhead_bytes` of all headers) fits a link of
    /// `link_bytes`.
    pub fn fitting(link_bytes: usize, overhead_bytes: usize) -> Mtu {
        let mut best = Mtu::B256;
        for m in [Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096] {
            if m.bytes() + overhead_bytes <= link_bytes {
                best = m;
            }
        }
        best
    }
}

/// What a port is attached to (`enum` of `IBV_LINK_LAYER_*`); the discriminant is the code in the C
/// API.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[repr(u8)]
pub enum LinkLayer {
    /// InfiniBand: ports have LIDs, and a GRH is optional.
    Infiniband = 1,
    /// Ethernet: ports have no LIDs, and every address has a GID.
    #[default]
    Ethernet = 2,
}

/// Sizes of the queues of a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QpCaps {
    /// Entries of the send queue.
    pub max_send_wr: u32,
    /// Entries of the receive queue.
    pub max_recv_wr: u32,
    /// Scatter/gather entries of a send WR.
    pub max_send_sge: u32,
    /// Scatter/gather entries of a receive WR.
    pub max_recv_sge: u32,
    /// Bytes that a WR may carry inline.
    pub max_inline_data: u32,
}
