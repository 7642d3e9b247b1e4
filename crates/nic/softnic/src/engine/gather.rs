//! Payloads on their way out, piece by piece.

use crate::memory::QpMemory;
use unbroken_roce::{MemError, Payload, SinkError};
use unbroken_types::{Access, PdHandle, Sge};
use unbroken_wire::Icrc;

/// Copies a payload to `to`, which is as long, and adds it to `icrc`.
#[inline]
pub(super) fn gather(
    mem: QpMemory<'_>,
    pd: PdHandle,
    payload: &Payload<'_>,
    to: &mut [u8],
    icrc: &mut Icrc,
) -> Result<(), SinkError> {
    let mut read = |key, va, to: &mut [u8], access| {
        mem.copy_out(pd, key, va, to, access, icrc).map_err(SinkError::Memory)
    };
    match *payload {
        Payload::None => Ok(()),
        Payload::Bytes(b) => {
            to.copy_from_slice(b);
            icrc.update(to);
            Ok(())
        }
        Payload::Region { key, va, .. } => read(key, va, to, Access::REMOTE_READ),
        Payload::Sges { sges, offset, len } => {
            let mut done = 0;
            each_piece(sges, offset, len, |key, va, n| {
                let here = &mut to[done..done + n as usize];
                done += n as usize;
                read(key, va, here, Access::NONE)
            })
        }
    }
}

/// Calls `each` with key, address and length of the pieces of `offset..offset + len` of a
/// scatter/gather list.
fn each_piece(
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
