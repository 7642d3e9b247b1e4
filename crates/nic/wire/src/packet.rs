//! A RoCEv2 packet: what follows the UDP header, without the ICRC.
//!
//! [`Packet::parse`] accepts nothing whose parts do not add up; what it returns needs no further
//! check of form. The extended headers of a packet are one [`Ext`], chosen by the opcode, so that a
//! combination that the specification does not know cannot be held.

use crate::opcode::{Op, Opcode, Transport};
use thiserror::Error;

/// Bytes of the base transport header.
pub const BTH_BYTES: usize = 12;

/// Bytes of the longest header: BTH and AtomicETH.
pub const MAX_HEADER: usize = BTH_BYTES + 28;

/// The default P_Key: full member of the default partition.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// The base transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bth {
    /// What the packet is.
    pub opcode: Opcode,
    /// The receiver's WC is a solicited event.
    pub solicited: bool,
    /// Automatic path migration: the sender is in state MIGRATED.
    pub mig_req: bool,
    /// Bytes of padding behind the payload, 0 to 3.
    pub pad: u8,
    /// Partition key.
    pub pkey: u16,
    /// The receiver's QPN (24 bits).
    pub dest_qpn: u32,
    /// The sender asks for an acknowledgement.
    pub ack_req: bool,
    /// Packet sequence number (24 bits).
    pub psn: u32,
}

/// RDMA extended transport header: where a WRITE or READ goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reth {
    /// Virtual address at the responder.
    pub va: u64,
    /// The responder's key.
    pub rkey: u32,
    /// Bytes of the whole message.
    pub len: u32,
}

/// ACK extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aeth {
    /// ACK, RNR NAK or NAK, with credits, timer or code.
    pub syndrome: u8,
    /// Message sequence number (24 bits).
    pub msn: u32,
}

/// Datagram extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deth {
    /// Key that the receiver compares with its own.
    pub qkey: u32,
    /// The sender's QPN (24 bits).
    pub src_qpn: u32,
    /// The sender's address handle has a GRH. Every RoCE packet has one; whether an InfiniBand
    /// packet has it is for the sender to choose, and for the receiver to see. It is told by the
    /// lowest bit of the reserved byte, which others send as 0 and ignore.
    pub grh: bool,
    /// The sender is known to its peers by another address than the one that the packet comes from:
    /// its QP has moved. Told by the next bit.
    pub moved: bool,
}

/// Atomic extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AtomicEth {
    /// Virtual address at the responder.
    pub va: u64,
    /// The responder's key.
    pub rkey: u32,
    /// The value to swap in or to add.
    pub swap_or_add: u64,
    /// The value to compare with.
    pub compare: u64,
}

/// The extended headers of a packet. `imm` is immediate data as it lies on the wire (network order,
/// not converted).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)] // the fields are the headers of their names
pub enum Ext {
    /// None.
    None,
    /// SEND and WRITE, last with immediate.
    Imm(u32),
    /// WRITE first and only, READ request.
    Reth(Reth),
    /// WRITE only with immediate.
    RethImm(Reth, u32),
    /// Acknowledgement; READ response first, last and only.
    Aeth(Aeth),
    /// UD SEND.
    Deth(Deth),
    /// UD SEND with immediate.
    DethImm(Deth, u32),
    /// Compare and swap, fetch and add.
    Atomic(AtomicEth),
    /// Atomic acknowledgement with the value that was there.
    AtomicAck(Aeth, u64),
    /// SEND with invalidate: the key.
    Ieth(u32),
}

/// Which shape of [`Ext`] an opcode has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    None,
    Imm,
    Reth,
    RethImm,
    Aeth,
    Deth,
    DethImm,
    Atomic,
    AtomicAck,
    Ieth,
}

impl Shape {
    const fn of(opcode: Opcode) -> Shape {
        match (opcode.transport, opcode.op) {
            (Transport::Ud, Op::SendOnlyImm) => Shape::DethImm,
            (Transport::Ud, _) => Shape::Deth,
            (_, Op::SendLastImm | Op::SendOnlyImm | Op::WriteLastImm) => Shape::Imm,
            (_, Op::WriteFirst | Op::WriteOnly | Op::ReadRequest) => Shape::Reth,
            (_, Op::WriteOnlyImm) => Shape::RethImm,
            (
                _,
                Op::Acknowledge
                | Op::ReadResponseFirst
                | Op::ReadResponseLast
                | Op::ReadResponseOnly,
            ) => Shape::Aeth,
            (_, Op::AtomicAcknowledge) => Shape::AtomicAck,
            (_, Op::CompareSwap | Op::FetchAdd) => Shape::Atomic,
            (_, Op::SendLastInvalidate | Op::SendOnlyInvalidate) => Shape::Ieth,
            _ => Shape::None,
        }
    }

    const fn bytes(self) -> usize {
        match self {
            Shape::None => 0,
            Shape::Imm | Shape::Aeth | Shape::Ieth => 4,
            Shape::Reth => 16,
            Shape::RethImm => 20,
            Shape::Deth => 8,
            Shape::DethImm | Shape::AtomicAck => 12,
            Shape::Atomic => 28,
        }
    }
}

impl Ext {
    /// The RETH, where there is one.
    pub const fn reth(&self) -> Option<Reth> {
        match *self {
            Ext::Reth(r) | Ext::RethImm(r, _) => Some(r),
            _ => None,
        }
    }

    /// Immediate data as it lies on the wire, where there is some.
    pub const fn imm(&self) -> Option<u32> {
        match *self {
            Ext::Imm(i) | Ext::RethImm(_, i) | Ext::DethImm(_, i) => Some(i),
            _ => None,
        }
    }

    /// The AETH, where there is one.
    pub const fn aeth(&self) -> Option<Aeth> {
        match *self {
            Ext::Aeth(a) | Ext::AtomicAck(a, _) => Some(a),
            _ => None,
        }
    }

    /// The DETH, where there is one.
    pub const fn deth(&self) -> Option<Deth> {
        match *self {
            Ext::Deth(d) | Ext::DethImm(d, _) => Some(d),
            _ => None,
        }
    }

    const fn shape(&self) -> Shape {
        match self {
            Ext::None => Shape::None,
            Ext::Imm(_) => Shape::Imm,
            Ext::Reth(_) => Shape::Reth,
            Ext::RethImm(..) => Shape::RethImm,
            Ext::Aeth(_) => Shape::Aeth,
            Ext::Deth(_) => Shape::Deth,
            Ext::DethImm(..) => Shape::DethImm,
            Ext::Atomic(_) => Shape::Atomic,
            Ext::AtomicAck(..) => Shape::AtomicAck,
            Ext::Ieth(_) => Shape::Ieth,
        }
    }
}

/// Why bytes are not a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ParseError {
    /// Shorter than its headers.
    #[error("{have} bytes where the headers need {need}")]
    Short {
        /// Bytes that there are.
        have: usize,
        /// Bytes of the headers of this opcode.
        need: usize,
    },
    /// A transport version other than 0.
    #[error("transport version {0}, not 0")]
    Version(u8),
    /// An opcode that does not exist here.
    #[error("opcode {0:#04x} is not one of RC, UC or UD")]
    Opcode(u8),
    /// Padding that is more than the payload, or does not bring it to a multiple of four.
    #[error("{pad} bytes of padding do not fit {payload} bytes of payload and padding")]
    Pad {
        /// The pad count.
        pad: u8,
        /// Bytes behind the headers.
        payload: usize,
    },
    /// More payload than the opcode has.
    #[error("{0} bytes of payload are more than the opcode has")]
    Payload(usize),
}

/// A parsed packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// The base header.
    pub bth: Bth,
    /// The extended headers.
    pub ext: Ext,
    /// The payload, without padding.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Parses a UDP payload from which the ICRC has been taken.
    pub fn parse(bytes: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let Some((head, rest)) = bytes.split_first_chunk::<BTH_BYTES>() else {
            return Err(ParseError::Short { have: bytes.len(), need: BTH_BYTES });
        };
        if head[1] & 0x0f != 0 {
            return Err(ParseError::Version(head[1] & 0x0f));
        }
        let opcode = Opcode::from_code(head[0]).ok_or(ParseError::Opcode(head[0]))?;
        let bth = Bth {
            opcode,
            solicited: head[1] & 0x80 != 0,
            mig_req: head[1] & 0x40 != 0,
            pad: head[1] >> 4 & 3,
            pkey: u16::from_be_bytes([head[2], head[3]]),
            dest_qpn: be24(head, 5),
            ack_req: head[8] & 0x80 != 0,
            psn: be24(head, 9),
        };
        let shape = Shape::of(opcode);
        let Some((ext, rest)) = rest.split_at_checked(shape.bytes()) else {
            return Err(ParseError::Short { have: bytes.len(), need: BTH_BYTES + shape.bytes() });
        };
        let ext = parse_ext(shape, ext);
        if rest.len() % 4 != 0 || bth.pad as usize > rest.len() {
            return Err(ParseError::Pad { pad: bth.pad, payload: rest.len() });
        }
        let payload = &rest[..rest.len() - bth.pad as usize];
        if payload.len() > opcode.op.max_payload() {
            return Err(ParseError::Payload(payload.len()));
        }
        Ok(Packet { bth, ext, payload })
    }
}

/// The headers of a packet as bytes, in a buffer of their own.
#[derive(Clone, Copy)]
pub struct HeaderBuf {
    bytes: [u8; MAX_HEADER],
    len: u8,
}

impl HeaderBuf {
    /// Emits headers. `ext` must be what the opcode has.
    ///
    /// Always inline: a `Bth` that went through memory, in small stores, would be read back in
    /// large ones, which the processor stalls on.
    #[inline(always)]
    pub fn new(bth: &Bth, ext: &Ext) -> HeaderBuf {
        debug_assert!(
            Shape::of(bth.opcode) == ext.shape(),
            "{:?} does not go with {ext:?}",
            bth.opcode
        );
        let mut b = [0u8; MAX_HEADER];
        let flags = (bth.solicited as u8) << 7 | (bth.mig_req as u8) << 6 | (bth.pad & 3) << 4;
        // In one store of 16 bytes: what is put together from small ones cannot be read back at
        // once.
        let words = (bth.opcode.code() as u128) << 120
            | (flags as u128) << 112
            | (bth.pkey as u128) << 96
            | ((bth.dest_qpn & 0x00ff_ffff) as u128) << 64
            | ((bth.ack_req as u128) << 31 | (bth.psn & 0x00ff_ffff) as u128) << 32;
        b[..16].copy_from_slice(&words.to_be_bytes());
        let shape = ext.shape();
        if shape == Shape::None {
            return HeaderBuf { bytes: b, len: BTH_BYTES as u8 };
        }
        let e: &mut [u8; 28] =
            (&mut b[BTH_BYTES..]).try_into().expect("MAX_HEADER is BTH and 28 bytes");
        match *ext {
            Ext::None => {}
            Ext::Imm(imm) => e[..4].copy_from_slice(&imm.to_ne_bytes()),
            Ext::Reth(reth) => put_reth(e, &reth),
            Ext::RethImm(reth, imm) => {
                put_reth(e, &reth);
                e[16..20].copy_from_slice(&imm.to_ne_bytes());
            }
            Ext::Aeth(aeth) => put_aeth(e, &aeth),
            Ext::Deth(deth) => put_deth(e, &deth),
            Ext::DethImm(deth, imm) => {
                put_deth(e, &deth);
                e[8..12].copy_from_slice(&imm.to_ne_bytes());
            }
            Ext::Atomic(a) => {
                e[..8].copy_from_slice(&a.va.to_be_bytes());
                e[8..12].copy_from_slice(&a.rkey.to_be_bytes());
                e[12..20].copy_from_slice(&a.swap_or_add.to_be_bytes());
                e[20..28].copy_from_slice(&a.compare.to_be_bytes());
            }
            Ext::AtomicAck(aeth, value) => {
                put_aeth(e, &aeth);
                e[4..12].copy_from_slice(&value.to_be_bytes());
            }
            Ext::Ieth(key) => e[..4].copy_from_slice(&key.to_be_bytes()),
        }
        HeaderBuf { bytes: b, len: (BTH_BYTES + shape.bytes()) as u8 }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len as usize]
    }
}

/// The pad count that brings a payload of `len` bytes to a multiple of four.
pub const fn pad_of(len: usize) -> u8 {
    (len.wrapping_neg() & 3) as u8
}

fn put_reth(e: &mut [u8; 28], reth: &Reth) {
    e[..8].copy_from_slice(&reth.va.to_be_bytes());
    e[8..12].copy_from_slice(&reth.rkey.to_be_bytes());
    e[12..16].copy_from_slice(&reth.len.to_be_bytes());
}

fn put_aeth(e: &mut [u8; 28], aeth: &Aeth) {
    e[..4].copy_from_slice(&((aeth.syndrome as u32) << 24 | aeth.msn & 0x00ff_ffff).to_be_bytes());
}

fn put_deth(e: &mut [u8; 28], deth: &Deth) {
    let flags = u32::from(deth.grh) | u32::from(deth.moved) << 1;
    e[..4].copy_from_slice(&deth.qkey.to_be_bytes());
    e[4..8].copy_from_slice(&(flags << 24 | deth.src_qpn & 0x00ff_ffff).to_be_bytes());
}

/// Reads the extended headers; `e` has exactly the bytes of `shape`.
fn parse_ext(shape: Shape, e: &[u8]) -> Ext {
    let reth = |e: &[u8]| Reth { va: be64(e, 0), rkey: be32(e, 8), len: be32(e, 12) };
    let aeth = |e: &[u8]| Aeth { syndrome: e[0], msn: be24(e, 1) };
    let deth = |e: &[u8]| Deth {
        qkey: be32(e, 0),
        src_qpn: be24(e, 5),
        grh: e[4] & 1 != 0,
        moved: e[4] & 2 != 0,
    };
    match shape {
        Shape::None => Ext::None,
        Shape::Imm => Ext::Imm(be32(e, 0).to_be()),
        Shape::Reth => Ext::Reth(reth(e)),
        Shape::RethImm => Ext::RethImm(reth(e), be32(e, 16).to_be()),
        Shape::Aeth => Ext::Aeth(aeth(e)),
        Shape::Deth => Ext::Deth(deth(e)),
        Shape::DethImm => Ext::DethImm(deth(e), be32(e, 8).to_be()),
        Shape::Atomic => Ext::Atomic(AtomicEth {
            va: be64(e, 0),
            rkey: be32(e, 8),
            swap_or_add: be64(e, 12),
            compare: be64(e, 20),
        }),
        Shape::AtomicAck => Ext::AtomicAck(aeth(e), be64(e, 4)),
        Shape::Ieth => Ext::Ieth(be32(e, 0)),
    }
}

fn be24(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([0, b[at], b[at + 1], b[at + 2]])
}

fn be32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn be64(b: &[u8], at: usize) -> u64 {
    (be32(b, at) as u64) << 32 | be32(b, at + 4) as u64
}
