//! How a SEND or WRITE is cut into packets, the same on RC and UC.

use crate::io::Payload;
use crate::sq::{Data, SendRing, Wqe};
use unbroken_types::SendOpcode;
use unbroken_wire::{Ext, Op, Reth};

/// A packet of a message.
pub(crate) struct Segment {
    pub(crate) op: Op,
    pub(crate) ext: Ext,
    /// Bytes of the message before it, and in it.
    pub(crate) offset: u32,
    pub(crate) len: u32,
    pub(crate) last: bool,
}

impl Segment {
    /// Packet `index` of a WR.
    #[inline(always)]
    pub(crate) fn of(wqe: &Wqe, index: u32, mtu: u32) -> Segment {
        let (first, last) = (index == 0, index + 1 == wqe.packets);
        let offset = index * mtu;
        let (op, with_imm) = opcode(wqe.opcode, first, last);
        let reth = Reth { va: wqe.remote_addr, rkey: wqe.rkey, len: wqe.len };
        let ext = match (op, with_imm) {
            (Op::WriteOnlyImm, _) => Ext::RethImm(reth, wqe.imm_data),
            (Op::WriteFirst | Op::WriteOnly, _) => Ext::Reth(reth),
            (Op::SendLastInvalidate | Op::SendOnlyInvalidate, _) => Ext::Ieth(wqe.rkey),
            (_, true) => Ext::Imm(wqe.imm_data),
            _ => Ext::None,
        };
        Segment { op, ext, offset, len: mtu.min(wqe.len - offset), last }
    }

    /// Its data, of entry `index` of the queue.
    #[inline(always)]
    pub(crate) fn payload<'a>(&self, ring: &'a SendRing, index: u64) -> Payload<'a> {
        let (offset, len) = (self.offset, self.len);
        match ring.data(index) {
            Data::Inline(bytes) => Payload::Bytes(&bytes[offset as usize..(offset + len) as usize]),
            Data::Sges(_) if len == 0 => Payload::None,
            Data::Sges(sges) => Payload::Sges { sges, offset, len },
        }
    }
}

/// The operation of a packet, and whether it carries the immediate.
#[inline]
fn opcode(opcode: SendOpcode, first: bool, last: bool) -> (Op, bool) {
    use SendOpcode::{SendImm, SendInv, Write, WriteImm};
    let write = matches!(opcode, Write | WriteImm);
    let imm = matches!(opcode, SendImm | WriteImm) && last;
    let inv = opcode == SendInv;
    let op = match (write, first, last) {
        (false, true, false) => Op::SendFirst,
        (false, false, false) => Op::SendMiddle,
        (false, false, true) if imm => Op::SendLastImm,
        (false, false, true) if inv => Op::SendLastInvalidate,
        (false, false, true) => Op::SendLast,
        (false, true, true) if imm => Op::SendOnlyImm,
        (false, true, true) if inv => Op::SendOnlyInvalidate,
        (false, true, true) => Op::SendOnly,
        (true, true, false) => Op::WriteFirst,
        (true, false, false) => Op::WriteMiddle,
        (true, false, true) if imm => Op::WriteLastImm,
        (true, false, true) => Op::WriteLast,
        (true, true, true) if imm => Op::WriteOnlyImm,
        (true, true, true) => Op::WriteOnly,
    };
    (op, imm)
}
