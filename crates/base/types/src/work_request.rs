//! Work requests as a caller gives them.

use crate::{Access, Gid, Mtu, PathAttr, QpCaps, QpState, SendFlags, SendOpcode, Sge, MAX_QPN};
use thiserror::Error;

/// A send WR. Nothing of it is kept by reference: posting copies what is needed.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// The application's id.
    pub wr_id: u64,
    /// What to do.
    pub opcode: SendOpcode,
    /// How.
    pub flags: SendFlags,
    /// Immediate data as it goes on the wire (network order, not converted).
    pub imm_data: u32,
    /// WRITE, READ, atomics: the peer's address.
    pub remote_addr: u64,
    /// WRITE, READ, atomics: the peer's key. To invalidate: the key. To bind a window: see
    /// [`MwBind`].
    pub rkey: u32,
    /// Atomics: the value to compare with, or to add.
    pub compare_add: u64,
    /// Atomics: the value to swap in.
    pub swap: u64,
    /// Where the data lies, or (READ, atomics) goes.
    pub sges: &'a [Sge],
    /// With [`SendFlags::INLINE`], the data itself; `sges` is not looked at then.
    pub inline_data: Option<&'a [u8]>,
    /// UD: to whom.
    pub ud: Option<UdDest>,
}

/// An unsignalled SEND of nothing.
impl Default for SendWr<'_> {
    fn default() -> Self {
        SendWr {
            wr_id: 0,
            opcode: SendOpcode::Send,
            flags: SendFlags::default(),
            imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            sges: &[],
            inline_data: None,
            ud: None,
        }
    }
}

impl SendWr<'_> {
    /// Bytes of the message.
    #[inline]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        match (self.inline_data, self.sges) {
            (Some(d), _) => d.len() as u64,
            (None, [one]) => one.length as u64,
            (None, sges) => sges.iter().map(|s| s.length as u64).sum(),
        }
    }
}

/// Sends that are posted together: all of them or none.
pub trait SendBatch {
    /// How many.
    fn count(&self) -> usize;
    /// One of them, counted from 0.
    fn wr(&self, index: usize) -> SendWr<'_>;
}

/// A batch of one.
impl SendBatch for SendWr<'_> {
    fn count(&self) -> usize {
        1
    }

    fn wr(&self, _index: usize) -> SendWr<'_> {
        *self
    }
}

/// How a memory window is to be bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MwBind {
    /// A key that the window has or had.
    pub window: u32,
    /// The key that it gets; only its lower eight bits may be new.
    pub new_key: u32,
    /// The local key of the region.
    pub lkey: u32,
    /// Where in the region it begins, as the region counts.
    pub addr: u64,
    /// Bytes; 0 unbinds.
    pub length: u64,
    /// What the peer may do through it; [`Access::ZERO_BASED`]: it counts from 0.
    pub access: Access,
}

impl MwBind {
    /// The WR that binds, without data. It lies in fields that such a WR has no other use for.
    pub fn wr(&self, wr_id: u64, flags: SendFlags) -> SendWr<'static> {
        SendWr {
            wr_id,
            opcode: SendOpcode::BindMw,
            flags,
            imm_data: self.window,
            remote_addr: self.addr,
            rkey: self.new_key,
            compare_add: self.length,
            swap: u64::from(self.lkey) << 32 | u64::from(self.access.0),
            ..SendWr::default()
        }
    }
}

/// What a WR without packets does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyChange {
    /// Binds a window.
    Bind(MwBind),
    /// Invalidates a key.
    Invalidate(u32),
}

/// A receive WR.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// The application's id.
    pub wr_id: u64,
    /// Where the data goes.
    pub sges: &'a [Sge],
}

/// To whom a UD send goes, and how. What is not said of a field is as in [`PathAttr`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UdDest {
    /// The peer's address.
    pub gid: Gid,
    /// The peer's QPN.
    pub qpn: u32,
    /// The key that the peer's QP has. With the highest bit set, the sender's own key is sent, as
    /// the specification says.
    pub qkey: u32,
    /// With link layer InfiniBand: the receiver gets a GRH. (With Ethernet it always does.)
    pub grh: bool,
    /// The GID that the datagram is sent from, by its index in the port's table.
    pub sgid_index: u8,
    /// Service level.
    pub sl: u8,
    /// The class of service that routers see.
    pub traffic_class: u8,
    /// How many routers it may pass.
    pub hop_limit: u8,
    /// What routers keep on one way.
    pub flow_label: u32,
    /// The peer's LID, where the link layer is InfiniBand.
    pub dlid: u16,
    /// Which of the port's LIDs it is sent from.
    pub src_path_bits: u8,
    /// The most that is sent.
    pub static_rate: u8,
}

impl UdDest {
    /// To a QP at the end of that path.
    #[inline]
    pub fn over(path: &PathAttr, qpn: u32, qkey: u32) -> UdDest {
        UdDest {
            gid: path.dest_gid,
            qpn,
            qkey,
            grh: path.grh,
            sgid_index: path.sgid_index,
            sl: path.sl,
            traffic_class: path.traffic_class,
            hop_limit: path.hop_limit,
            flow_label: path.flow_label,
            dlid: path.dlid,
            src_path_bits: path.src_path_bits,
            static_rate: path.static_rate,
        }
    }

    /// The path from that port, with the first P_Key of its table.
    pub fn path(&self, port: u8) -> PathAttr {
        PathAttr {
            dest_gid: self.gid,
            sgid_index: self.sgid_index,
            port,
            pkey_index: 0,
            sl: self.sl,
            grh: self.grh,
            flow_label: self.flow_label,
            hop_limit: self.hop_limit,
            traffic_class: self.traffic_class,
            dlid: self.dlid,
            src_path_bits: self.src_path_bits,
            static_rate: self.static_rate,
        }
    }
}

impl Default for UdDest {
    /// To nobody, by [`PathAttr::default`].
    fn default() -> UdDest {
        UdDest::over(&PathAttr::default(), 0, 0)
    }
}

/// The largest message in bytes.
pub const MAX_MESSAGE_BYTES: u64 = 1 << 31;

/// Why a WR was not taken. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum PostError {
    /// All entries of the queue are outstanding.
    #[error("the queue is full: {0} entries are outstanding")]
    QueueFull(u32),
    /// More scatter/gather entries than the QP was made for.
    #[error("{have} scatter/gather entries, the QP was made for {max}")]
    TooManySges {
        /// Entries of the WR.
        have: usize,
        /// Entries that the QP takes.
        max: u32,
    },
    /// More inline data than the QP was made for.
    #[error("{have} bytes inline, the QP was made for {max}")]
    InlineTooLong {
        /// Bytes of the WR.
        have: usize,
        /// Bytes that the QP takes.
        max: u32,
    },
    /// A message longer than the transport carries.
    #[error("a message of {have} bytes, at most {max} can be sent")]
    TooLong {
        /// Bytes of the message.
        have: u64,
        /// Bytes that can be sent.
        max: u64,
    },
    /// The state of the QP does not allow posting.
    #[error("the QP is in state {0:?}, which does not allow posting")]
    WrongState(QpState),
    /// An opcode that this QP does not have.
    #[error("{0:?} is not supported by this QP")]
    Unsupported(SendOpcode),
    /// INLINE with an opcode that brings data, or without data.
    #[error("INLINE does not go with {0:?}")]
    Inline(SendOpcode),
    /// An atomic without room for the eight bytes that it brings back.
    #[error("an atomic brings 8 bytes back, its scatter/gather entries have room for {0}")]
    AtomicRoom(u64),
    /// A receive posted to a QP that has an SRQ.
    #[error("the QP takes its receives from a shared receive queue: post there")]
    HasSrq,
    /// A UD send without an address.
    #[error("a UD send needs an address handle, a QPN and a Q_Key")]
    NoDestination,
}

/// Bytes that an atomic works on, and brings back.
pub const ATOMIC_BYTES: u32 = 8;

/// Bytes in front of each datagram in the receive buffer.
pub const GRH_BYTES: usize = 40;

/// Whether a send fits a QP with queues of `caps`. Whether the queue has room is another question.
pub fn check_send(caps: &QpCaps, wr: &SendWr<'_>) -> Result<(), PostError> {
    send_len(caps, wr).map(|_| ())
}

/// The bytes of the message of a send that fits a QP with queues of `caps`.
#[inline]
pub fn send_len(caps: &QpCaps, wr: &SendWr<'_>) -> Result<u64, PostError> {
    let inline = wr.flags.contains(SendFlags::INLINE);
    if inline != wr.inline_data.is_some() || inline && wr.opcode.awaits_data() {
        return Err(PostError::Inline(wr.opcode));
    }
    let len = wr.len();
    if wr.opcode.is_atomic() && len < ATOMIC_BYTES as u64 {
        return Err(PostError::AtomicRoom(len));
    }
    match wr.inline_data {
        Some(data) if data.len() > caps.max_inline_data as usize => {
            return Err(PostError::InlineTooLong { have: data.len(), max: caps.max_inline_data })
        }
        None if wr.sges.len() > caps.max_send_sge as usize => {
            return Err(PostError::TooManySges { have: wr.sges.len(), max: caps.max_send_sge })
        }
        _ => {}
    }
    if len > MAX_MESSAGE_BYTES {
        return Err(PostError::TooLong { have: len, max: MAX_MESSAGE_BYTES });
    }
    Ok(len)
}

/// Whether a send is a datagram, and fits a port of that MTU. Gives to whom it goes.
pub fn check_datagram(mtu: Mtu, wr: &SendWr<'_>) -> Result<UdDest, PostError> {
    if !matches!(wr.opcode, SendOpcode::Send | SendOpcode::SendImm) {
        return Err(PostError::Unsupported(wr.opcode));
    }
    let dest = wr.ud.filter(|dest| dest.qpn <= MAX_QPN).ok_or(PostError::NoDestination)?;
    let max = mtu.bytes() as u64;
    if wr.len() > max {
        return Err(PostError::TooLong { have: wr.len(), max });
    }
    Ok(dest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datagram_has_all_that_its_path_says() {
        let path = PathAttr {
            dest_gid: Gid([7; 16]),
            sgid_index: 1,
            port: 2,
            pkey_index: 0,
            sl: 3,
            grh: true,
            flow_label: 4,
            hop_limit: 5,
            traffic_class: 6,
            dlid: 8,
            src_path_bits: 9,
            static_rate: 10,
        };
        let to = UdDest::over(&path, 11, 12);
        assert_eq!((to.path(2), to.qpn, to.qkey), (path, 11, 12));
        assert_eq!(UdDest::default().path(1), PathAttr::default());
    }
}
