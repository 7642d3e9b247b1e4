//! Payloads on their way out, piece by piece.

use crate::memory::QpMemory;
use unbroken_roce::{MemError, Memory, Payload, SinkError};
use unbroken_types::{Access, Sge};

/// Appends a payload to a buffer.
pub(super) fn gather(mem: QpMemory<'_>, pd: u32, payload: &Payload<'_>, to: &mut Vec<u8>) -> Result<(), SinkError> {
    let mut read = |key, va, len: u32, access| {
        let at = to.len();
        to.resize(at + len as usize, 0);
        mem.read(pd, key, va, &mut to[at..], access).map_err(SinkError::Memory)
    };
    match *payload {
        Payload::None => Ok(()),
        Payload::Bytes(b) => {
            to.extend_from_slice(b);
            Ok(())
        }
        Payload::Region { key, va, len } => read(key, va, len, Access::REMOTE_READ),
        Payload::Sges { sges, offset, len } => {
            each_piece(sges, offset, len, |key, va, n| read(key, va, n, Access::NONE))
        }
    }
}

/// Calls `each` with key, address and length of the pieces of `offset..offset + len` of a scatter/gather list.
pub(super) fn each_piece(
    sges: &[Sge],
    mut offset: u32,
    mut len: u32,
    mut each: impl FnMut(u32, u64, u32) -> Result<(), SinkError>,
) -> Result<(), SinkError> {
    for sge in sges {
        if offset >= sge.length {
            offset -= sge.length;
            continue;
        }
        let take = len.min(sge.length - offset);
        if take == 0 {
            break;
        }
        each(sge.lkey, sge.addr.wrapping_add(u64::from(offset)), take)?;
        len -= take;
        offset = 0;
    }
    if len == 0 {
        Ok(())
    } else {
        Err(SinkError::Memory(MemError::OutOfBounds))
    }
}
