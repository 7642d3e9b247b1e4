//! Frames: what goes from one rank's slot into another's.
//!
//! A message of a lane is cut into frames. A frame is a header of [`HEADER_BYTES`] and up to a
//! slot's room of payload, written into the receiver's slot by one WRITE with immediate. The
//! immediate says which slot; all else is in the header.

/// Bytes of a header.
pub const HEADER_BYTES: usize = 64;
/// What tells a slot that holds a frame from one that holds anything else.
const MAGIC: u32 = 0x554e_4246;
/// The stream, and the path, that go through the memory of a host; others are those of rails, by
/// number.
pub const MEMORY: u8 = 63;
/// The path that joins NICs of different rails (`detours`).
pub const CROSS: u8 = 62;
/// The path through the connections out of band (`detours`).
pub const OUT_OF_BAND: u8 = 61;
/// How many rails there can be.
pub const MAX_RAILS: u8 = 61;

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// A part of a message.
    Data,
    /// So many messages (`message`) of the lane, on the way to the frame's sender, have been used
    /// by now.
    Used,
    /// The sender agrees to the operation ([`crate::consent`]), with a checksum (`offset`). It goes
    /// towards rank 0 (`message` 0), or comes from there (1).
    Agrees,
}

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is for.
    pub kind: FrameKind,
    /// Its number in its stream.
    pub seq: u64,
    /// The operation that it belongs to.
    pub operation: u64,
    /// What the sender takes that operation for.
    pub digest: u64,
    /// The lane, by its position among those from the one rank to the other.
    pub lane: u16,
    /// The message of the lane.
    pub message: u32,
    /// Where the payload begins in the message, in bytes.
    pub offset: u64,
    /// Bytes of the whole message.
    pub total: u64,
    /// Bytes of the payload.
    pub len: u32,
    /// The tag that the operation was sent with; 0 of operations that have none.
    pub tag: u64,
}

impl Header {
    /// As it lies in a slot.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = self.kind as u8;
        out[6..8].copy_from_slice(&self.lane.to_le_bytes());
        out[8..16].copy_from_slice(&self.seq.to_le_bytes());
        out[16..24].copy_from_slice(&self.operation.to_le_bytes());
        out[24..32].copy_from_slice(&self.digest.to_le_bytes());
        out[32..40].copy_from_slice(&self.offset.to_le_bytes());
        out[40..48].copy_from_slice(&self.total.to_le_bytes());
        out[48..52].copy_from_slice(&self.len.to_le_bytes());
        out[52..56].copy_from_slice(&self.message.to_le_bytes());
        out[56..64].copy_from_slice(&self.tag.to_le_bytes());
        out
    }

    /// From a slot; `None` if what lies there is no header.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let four = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let eight = |at: usize| u64::from(four(at)) | u64::from(four(at + 4)) << 32;
        let kind = match bytes[4] {
            0 => FrameKind::Data,
            1 => FrameKind::Used,
            2 => FrameKind::Agrees,
            _ => return None,
        };
        (four(0) == MAGIC).then(|| Header {
            kind,
            seq: eight(8),
            operation: eight(16),
            digest: eight(24),
            lane: u16::from_le_bytes([bytes[6], bytes[7]]),
            message: four(52),
            offset: eight(32),
            total: eight(40),
            len: four(48),
            tag: eight(56),
        })
    }
}

/// What an immediate says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A frame of the stream lies in the slot of its number.
    Frame {
        /// The stream.
        stream: u8,
        /// The lowest bits of its number.
        seq: u32,
    },
    /// The receiver has done with so many frames of the stream that goes to it.
    Credit {
        /// The stream.
        stream: u8,
        /// The lowest bits of the count.
        count: u32,
    },
}

/// Bits of a count that an immediate has.
const COUNT_BITS: u32 = 24;
const COUNT_MASK: u32 = (1 << COUNT_BITS) - 1;
const CREDIT: u32 = 1 << 31;

impl Notice {
    /// Of a frame.
    pub fn frame(stream: u8, seq: u64) -> Notice {
        Notice::Frame { stream, seq: seq as u32 & COUNT_MASK }
    }

    /// Of a credit.
    pub fn credit(stream: u8, count: u64) -> Notice {
        Notice::Credit { stream, count: count as u32 & COUNT_MASK }
    }

    /// As an immediate.
    pub fn encode(self) -> u32 {
        match self {
            Notice::Frame { stream, seq } => u32::from(stream) << COUNT_BITS | seq,
            Notice::Credit { stream, count } => CREDIT | u32::from(stream) << COUNT_BITS | count,
        }
    }

    /// From an immediate.
    pub fn decode(imm: u32) -> Notice {
        let (stream, low) = ((imm >> COUNT_BITS) as u8 & MEMORY, imm & COUNT_MASK);
        if imm & CREDIT == 0 {
            Notice::Frame { stream, seq: low }
        } else {
            Notice::Credit { stream, count: low }
        }
    }
}

/// The number with these lowest bits that is nearest to another.
pub fn widen(low: u32, near: u64) -> u64 {
    let half = 1u64 << (COUNT_BITS - 1);
    let base = near.saturating_sub(half);
    base + u64::from(low.wrapping_sub(base as u32) & COUNT_MASK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_its_bytes() {
        let header = Header {
            kind: FrameKind::Used,
            seq: 1 << 40,
            operation: 3,
            digest: u64::MAX,
            lane: 700,
            message: 1 << 20,
            offset: 1 << 33,
            total: 1 << 34,
            len: 65536,
            tag: u64::MAX - 1,
        };
        assert_eq!(Header::decode(&header.encode()), Some(header));
        assert_eq!(Header::decode(&[0; HEADER_BYTES]), None);
    }

    #[test]
    fn an_immediate_names_a_count_near_what_is_known() {
        for stream in [0, 7, MEMORY] {
            for count in [0u64, 5, (1 << 24) - 1, 1 << 24, 1 << 40] {
                for notice in [Notice::frame(stream, count), Notice::credit(stream, count)] {
                    assert_eq!(Notice::decode(notice.encode()), notice);
                }
                for near in [count, count.saturating_sub(64), count + 64] {
                    assert_eq!(widen(count as u32 & COUNT_MASK, near), count, "near {near}");
                }
            }
        }
    }
}
