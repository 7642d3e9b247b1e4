//! What a QP needs of its device: memory, and a place for packets.

use thiserror::Error;
use unbroken_types::{Access, KeyChange, PdHandle, Sge, UdDest};

/// Why memory was not touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MemError {
    /// No region has the key.
    #[error("no region has the key")]
    NoSuchKey,
    /// The region belongs to another protection domain.
    #[error("the region belongs to another protection domain")]
    WrongPd,
    /// Not all of the range lies in the region.
    #[error("the range leaves the region")]
    OutOfBounds,
    /// The region does not give the right.
    #[error("the region does not allow this access")]
    AccessDenied,
    /// The memory window is bound to another QP.
    #[error("the memory window is bound to another QP")]
    WrongQp,
    /// The key is good, but what it names does not lie in one piece: it must be copied.
    #[error("the range does not lie in one piece")]
    NotInOnePiece,
    /// The window cannot be bound so: the region, the range, the rights or the new key do not fit.
    #[error("the memory window cannot be bound so")]
    Bind,
    /// An atomic whose memory does not begin at a multiple of eight.
    #[error("the memory of an atomic is not aligned to 8 bytes")]
    Misaligned,
    /// The program has unmapped or protected the memory of the region.
    #[error("the memory of the region is not mapped, or not so that this access is possible")]
    NotMapped,
}

/// What an atomic does to eight bytes in the host's order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicOp {
    /// Replaces the value if it is `compare`.
    CompareSwap {
        /// What must be there.
        compare: u64,
        /// What comes there.
        swap: u64,
    },
    /// Adds, modulo 2^64.
    FetchAdd(u64),
}

impl AtomicOp {
    /// What a value becomes.
    pub const fn apply(self, value: u64) -> u64 {
        match self {
            AtomicOp::CompareSwap { compare, swap } if value == compare => swap,
            AtomicOp::CompareSwap { .. } => value,
            AtomicOp::FetchAdd(add) => value.wrapping_add(add),
        }
    }
}

/// Registered memory. Every call checks key, domain, range and right anew: a region may be
/// deregistered in mid-message.
///
/// An access that fails must change nothing. `need` is [`Access::NONE`] for reading what a local
/// scatter/gather entry names.
pub trait Memory {
    /// Checks without touching.
    fn check(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<(), MemError>;
    /// Writes `data` at `va`.
    fn write(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        data: &[u8],
        need: Access,
    ) -> Result<(), MemError>;
    /// Reads from `va` into `out`.
    fn read(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        out: &mut [u8],
        need: Access,
    ) -> Result<(), MemError>;
    /// Runs an atomic of the peer ([`Access::REMOTE_ATOMIC`]) at `va` and gives the value that was
    /// there before. Nothing else sees the memory between the reading and the writing: no other QP,
    /// and no instruction of this host that is atomic itself.
    fn atomic(&self, pd: PdHandle, key: u32, va: u64, op: AtomicOp) -> Result<u64, MemError>;
    /// The peer invalidates the memory window that has `key` (SEND with invalidate). Nothing is
    /// reached through the key afterwards.
    fn invalidate(&self, _pd: PdHandle, _key: u32) -> Result<(), MemError> {
        Err(MemError::NoSuchKey)
    }
}

/// The payload of a packet to be sent, still where it lies. The protection domain is the QP's.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// None.
    None,
    /// Inline data.
    Bytes(&'a [u8]),
    /// `len` bytes at `offset` of what the entries name one after the other; read with
    /// [`Access::NONE`].
    Sges {
        /// The entries of the whole message.
        sges: &'a [Sge],
        /// Bytes of the message before this packet.
        offset: u32,
        /// Bytes of this packet.
        len: u32,
    },
    /// A READ response; read with [`Access::REMOTE_READ`].
    Region {
        /// The key that the request named.
        key: u32,
        /// Where.
        va: u64,
        /// Bytes.
        len: u32,
    },
}

impl Payload<'_> {
    /// Bytes of the payload, without padding.
    pub fn len(&self) -> usize {
        match *self {
            Payload::None => 0,
            Payload::Bytes(b) => b.len(),
            Payload::Sges { len, .. } | Payload::Region { len, .. } => len as usize,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Why a packet was not taken. Nothing of it has left.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum SinkError {
    /// No room now; ask again later.
    #[error("no room for packets now")]
    Full,
    /// The payload could not be read.
    #[error("the payload could not be read: {0}")]
    Memory(#[from] MemError),
}

/// Where packets of an RC or UC QP go, in order. The sink appends padding (the BTH says how much)
/// and the ICRC.
///
/// The packets of a message come one after the other, and all but the last have payloads of one
/// size.
pub trait PacketSink {
    /// Takes a packet or nothing.
    fn push(&mut self, header: &[u8], payload: Payload<'_>) -> Result<(), SinkError>;

    /// Does what a WR asks for that changes keys and sends nothing. It takes effect before the call
    /// returns.
    fn change_key(&mut self, _change: &KeyChange) -> Result<(), MemError> {
        Err(MemError::NoSuchKey)
    }
}

/// By which keys the peer knows its memory on the NIC that a QP is connected to, where those are
/// others than the application has.
pub trait PeerKeys: Send + Sync {
    /// The key there; `None` while it is not known. Once it is, the QP must be asked for packets
    /// again. A key that names nothing has the peer refuse the request.
    fn key(&self, rkey: u32) -> Option<u32>;
}

/// Where packets of a UD QP go; each names its destination.
pub trait UdSink {
    /// Where datagrams to `dest` go now: elsewhere if the QP that is known by that address has
    /// moved.
    fn resolve(&mut self, dest: &UdDest) -> UdDest {
        *dest
    }

    /// Takes a packet or nothing.
    fn push_to(
        &mut self,
        dest: &UdDest,
        header: &[u8],
        payload: Payload<'_>,
    ) -> Result<(), SinkError>;
}

/// Scatters `data` over the entries, from `offset` of the message on.
pub(crate) fn scatter(
    mem: &(impl Memory + ?Sized),
    pd: PdHandle,
    sges: &[Sge],
    mut offset: u64,
    mut data: &[u8],
) -> Result<(), MemError> {
    for sge in sges {
        if data.is_empty() {
            break;
        }
        let room = sge.length as u64;
        if offset >= room {
            offset -= room;
            continue;
        }
        let (here, rest) = data.split_at(data.len().min((room - offset) as usize));
        mem.write(pd, sge.lkey, sge.addr.wrapping_add(offset), here, Access::LOCAL_WRITE)?;
        data = rest;
        offset = 0;
    }
    if data.is_empty() {
        Ok(())
    } else {
        Err(MemError::OutOfBounds)
    }
}
