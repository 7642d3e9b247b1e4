//! BTH opcodes: three bits of transport and five bits of operation.

/// Bytes of the longest map behind a NAK.
pub const MAX_ACK_PAYLOAD: usize = 32;

/// The transport in the upper three bits of a BTH opcode. RD is not supported.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Transport {
    /// Reliable connection.
    Rc = 0,
    /// Unreliable connection.
    Uc = 1,
    /// Unreliable datagram.
    Ud = 3,
}

/// The operation in the lower five bits of a BTH opcode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
#[allow(missing_docs)] // the names are the specification's
pub enum Op {
    SendFirst = 0x00,
    SendMiddle = 0x01,
    SendLast = 0x02,
    SendLastImm = 0x03,
    SendOnly = 0x04,
    SendOnlyImm = 0x05,
    WriteFirst = 0x06,
    WriteMiddle = 0x07,
    WriteLast = 0x08,
    WriteLastImm = 0x09,
    WriteOnly = 0x0a,
    WriteOnlyImm = 0x0b,
    ReadRequest = 0x0c,
    ReadResponseFirst = 0x0d,
    ReadResponseMiddle = 0x0e,
    ReadResponseLast = 0x0f,
    ReadResponseOnly = 0x10,
    Acknowledge = 0x11,
    AtomicAcknowledge = 0x12,
    CompareSwap = 0x13,
    FetchAdd = 0x14,
    SendLastInvalidate = 0x16,
    SendOnlyInvalidate = 0x17,
}

impl Op {
    /// All operations, in the order of their codes.
    pub const ALL: [Op; 23] = [
        Op::SendFirst,
        Op::SendMiddle,
        Op::SendLast,
        Op::SendLastImm,
        Op::SendOnly,
        Op::SendOnlyImm,
        Op::WriteFirst,
        Op::WriteMiddle,
        Op::WriteLast,
        Op::WriteLastImm,
        Op::WriteOnly,
        Op::WriteOnlyImm,
        Op::ReadRequest,
        Op::ReadResponseFirst,
        Op::ReadResponseMiddle,
        Op::ReadResponseLast,
        Op::ReadResponseOnly,
        Op::Acknowledge,
        Op::AtomicAcknowledge,
        Op::CompareSwap,
        Op::FetchAdd,
        Op::SendLastInvalidate,
        Op::SendOnlyInvalidate,
    ];

    /// The operation of a five-bit code.
    const fn from_code(code: u8) -> Option<Op> {
        match code {
            0x00..=0x14 => Some(Op::ALL[code as usize]),
            0x16 => Some(Op::SendLastInvalidate),
            0x17 => Some(Op::SendOnlyInvalidate),
            _ => None,
        }
    }

    /// Whether a responder sends it (acknowledgements and answers with data), rather than a
    /// requester.
    pub const fn is_response(self) -> bool {
        matches!(
            self,
            Op::ReadResponseFirst
                | Op::ReadResponseMiddle
                | Op::ReadResponseLast
                | Op::ReadResponseOnly
                | Op::Acknowledge
                | Op::AtomicAcknowledge
        )
    }

    /// Whether it is the first packet of the answer to a READ.
    pub const fn begins_answer(self) -> bool {
        matches!(self, Op::ReadResponseFirst | Op::ReadResponseOnly)
    }

    /// Bytes of payload that a packet of this operation may carry. The specification gives an
    /// acknowledgement none; softnics put a map of the packets that have arrived behind a NAK, and
    /// nobody else looks at it.
    pub const fn max_payload(self) -> usize {
        match self {
            Op::ReadRequest | Op::AtomicAcknowledge | Op::CompareSwap | Op::FetchAdd => 0,
            Op::Acknowledge => MAX_ACK_PAYLOAD,
            _ => usize::MAX,
        }
    }
}

/// A BTH opcode that exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Opcode {
    /// Its transport.
    pub transport: Transport,
    /// Its operation, one that the transport has.
    pub op: Op,
}

impl Opcode {
    /// The opcode of an operation on RC, which has them all.
    pub const fn rc(op: Op) -> Opcode {
        Opcode { transport: Transport::Rc, op }
    }

    /// The opcode of a code on the wire; `None` for codes that are reserved or of another
    /// transport.
    pub const fn from_code(code: u8) -> Option<Opcode> {
        let Some(op) = Op::from_code(code & 0x1f) else { return None };
        let transport = match code >> 5 {
            0 => Transport::Rc,
            1 if op as u8 <= Op::WriteOnlyImm as u8 => Transport::Uc,
            3 if matches!(op, Op::SendOnly | Op::SendOnlyImm) => Transport::Ud,
            _ => return None,
        };
        Some(Opcode { transport, op })
    }

    /// The code on the wire.
    pub const fn code(self) -> u8 {
        (self.transport as u8) << 5 | self.op as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_itself_or_nothing() {
        let known =
            (0..=255u8).filter(|&c| Opcode::from_code(c).is_some_and(|o| o.code() == c)).count();
        assert_eq!(known, 23 + 12 + 2);
        assert!((0..=255u8).all(|c| Opcode::from_code(c).is_none_or(|o| o.code() == c)));
        for op in Op::ALL {
            assert_eq!(Opcode::from_code(op as u8), Some(Opcode::rc(op)));
        }
    }
}
