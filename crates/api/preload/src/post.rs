//! Posting work requests: the fast path. At the first error of a list the rest stays with the
//! program. Sends of a list go to the NIC together, so that it rings its doorbell once.

use crate::ffi::{failed, guard};
use crate::limits::{KNOWN_FLAGS, MAX_INLINE};
use crate::objects::{AhObj, QpObj};
use crate::window;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use unbroken_types::{SendFlags, SendOpcode, Sge};
use unbroken_verbs::abi::{ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_sge};
use unbroken_verbs::{Error, RecvWr, Result, SendWr, UdDest};

/// Sends of a list that are posted together.
const TOGETHER: usize = 16;

/// `ibv_post_send` on devices whose posts go by lanes.
pub unsafe extern "C" fn post_send_by_lane(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a QP of ours.
    let object = unsafe { &*qp.cast::<QpObj>() };
    let mut next = wr;
    if let Some(lane) = object.lane.as_ref().filter(|_| !object.process.elsewhere()) {
        // SAFETY: the caller's list, which it leaves alone during the call.
        next = unsafe { lane.post_send(wr) };
        if next.is_null() {
            return 0;
        }
    }
    // SAFETY: the rest of the caller's list, from the first work request that the lane left.
    unsafe { post_send(qp, next, bad_wr) }
}

/// `ibv_post_recv` on devices whose posts go by lanes.
pub unsafe extern "C" fn post_recv_by_lane(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a QP of ours.
    let object = unsafe { &*qp.cast::<QpObj>() };
    let mut next = wr;
    if let Some(lane) = object.lane.as_ref().filter(|_| !object.process.elsewhere()) {
        // SAFETY: the caller's list, which it leaves alone during the call.
        next = unsafe { lane.post_recv(wr) };
        if next.is_null() {
            return 0;
        }
    }
    // SAFETY: the rest of the caller's list, from the first work request that the lane left.
    unsafe { post_recv(qp, next, bad_wr) }
}

pub unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a QP of ours.
    let object = unsafe { &*qp.cast::<QpObj>() };
    guard(libc::EIO, || {
        let mut next = wr;
        // A list that runs in a circle ends when the queue is full.
        // SAFETY: the caller's list, which it leaves alone during the call.
        while let Some(wr) = unsafe { next.as_ref() } {
            // SAFETY: as above.
            let posted = match unsafe { wr.next.is_null() || !post_together(object, &mut next) } {
                // SAFETY: as above.
                true => unsafe { post_one(object, wr) }.map(|()| next = wr.next),
                false => Ok(()),
            };
            if let Err(e) = posted {
                // SAFETY: the caller's variable.
                unsafe { bad_wr.write(next) };
                return failed("ibv_post_send", &e);
            }
        }
        0
    })
}

/// Posts plain sends of a list, as many as follow one another, and moves `next` behind those that
/// were taken. False where the one there is to be posted alone: it is not plain, or fails.
///
/// # Safety
/// As for [`post_one`], of each WR of the list.
#[inline(never)]
unsafe fn post_together(object: &QpObj, next: &mut *mut ibv_send_wr) -> bool {
    let mut list = [const { MaybeUninit::<SendWr<'_>>::uninit() }; TOGETHER];
    let (mut count, mut at) = (0, *next);
    while count < TOGETHER {
        // SAFETY: the caller's list.
        let Some(wr) = (unsafe { at.as_ref() }) else { break };
        if wr.send_flags & SendFlags::INLINE.0 != 0 || object.is_ud {
            break;
        }
        // SAFETY: promised by the caller.
        let Ok(wr_of_it) = (unsafe { convert(object, wr) }) else { break };
        list[count].write(wr_of_it);
        (count, at) = (count + 1, wr.next);
    }
    if count == 0 {
        return false;
    }
    // SAFETY: that many are written.
    let list = unsafe { std::slice::from_raw_parts(list.as_ptr().cast::<SendWr<'_>>(), count) };
    let taken = match object.qp.post_list(list) {
        Ok(()) => count,
        Err((taken, _)) => taken,
    };
    for _ in 0..taken {
        // SAFETY: as many of the list are there.
        *next = unsafe { (**next).next };
    }
    taken > 0
}

/// The scatter/gather list of a WR.
///
/// # Safety
/// `list` has `n` entries if `n` is positive.
pub unsafe fn sges<'a>(list: *mut ibv_sge, n: c_int) -> Result<&'a [Sge]> {
    if n > 0 && !list.is_null() {
        // SAFETY: promised by the caller; ibv_sge is Sge.
        Ok(unsafe { std::slice::from_raw_parts(list, n as usize) })
    } else if n == 0 {
        Ok(&[])
    } else {
        Err(bad_list(n))
    }
}

#[cold]
fn bad_list(n: c_int) -> Error {
    Error::invalid(format!("num_sge is {n}{}", if n > 0 { " and sg_list is NULL" } else { "" }))
}

/// # Safety
/// `wr` is a valid WR whose lists and inline data the caller leaves alone during the call.
#[inline(always)]
unsafe fn post_one(object: &QpObj, wr: &ibv_send_wr) -> Result<()> {
    // SAFETY: promised by the caller.
    let mut out = unsafe { convert(object, wr) }?;
    if !out.flags.contains(SendFlags::INLINE) {
        return object.qp.post_send(&out);
    }
    let mut room = [MaybeUninit::<u8>::uninit(); MAX_INLINE];
    // SAFETY: the caller's scatter/gather list gives addresses of its own memory, as
    // IBV_SEND_INLINE asks.
    out.inline_data = Some(unsafe { gather(out.sges, &mut room) }?);
    object.qp.post_send(&out)
}

/// A WR as it is here, but for inline data.
///
/// # Safety
/// As for [`post_one`].
#[inline(always)]
unsafe fn convert<'a>(object: &'a QpObj, wr: &'a ibv_send_wr) -> Result<SendWr<'a>> {
    let Some(opcode) = SendOpcode::from_code(wr.opcode as u32) else {
        return Err(unknown_opcode(wr.opcode));
    };
    if wr.send_flags & !KNOWN_FLAGS != 0 {
        return Err(unknown_flags(wr.send_flags & !KNOWN_FLAGS));
    }
    let mut out = SendWr {
        wr_id: wr.wr_id,
        opcode,
        flags: SendFlags(wr.send_flags),
        imm_data: wr.imm_data,
        remote_addr: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        // SAFETY: promised by the caller.
        sges: unsafe { sges(wr.sg_list, wr.num_sge) }?,
        inline_data: None,
        ud: None,
    };
    // SAFETY: opcode and type of the QP say which member of the union the caller filled; all are
    // plain integers and a pointer.
    unsafe {
        match opcode {
            SendOpcode::Write | SendOpcode::WriteImm | SendOpcode::Read => {
                out.remote_addr = wr.wr.rdma.remote_addr;
                out.rkey = wr.wr.rdma.rkey;
            }
            SendOpcode::CmpSwap | SendOpcode::FetchAdd => {
                out.remote_addr = wr.wr.atomic.remote_addr;
                out.compare_add = wr.wr.atomic.compare_add;
                out.swap = wr.wr.atomic.swap;
                out.rkey = wr.wr.atomic.rkey;
            }
            SendOpcode::Send | SendOpcode::SendImm if object.is_ud => {
                let ud = wr.wr.ud;
                let ah = AhObj::of(ud.ah)?;
                out.ud = Some(UdDest::over(&ah.path, ud.remote_qpn, ud.remote_qkey));
            }
            SendOpcode::Send | SendOpcode::SendImm => {}
            // The key lies where an immediate does.
            SendOpcode::SendInv | SendOpcode::LocalInv => out.rkey = wr.imm_data,
            SendOpcode::BindMw => {
                let b = &wr.bind_mw;
                out = window::binding_of_wr(b.mw, b.rkey, &b.bind_info)?.wr(wr.wr_id, out.flags);
            }
        }
    }
    Ok(out)
}

/// Copies inline data together.
///
/// # Safety
/// Every entry of `sges` describes readable memory of this process.
unsafe fn gather<'a>(
    sges: &[Sge],
    room: &'a mut [MaybeUninit<u8>; MAX_INLINE],
) -> Result<&'a [u8]> {
    let mut n = 0;
    for sge in sges {
        let len = sge.length as usize;
        if len > MAX_INLINE - n {
            return Err(Error::invalid(format!(
                "inline data of more than {MAX_INLINE} bytes: see max_inline_data of the QP"
            )));
        }
        // SAFETY: `len` bytes fit behind `n`; the source is readable by the caller's promise.
        unsafe {
            room.as_mut_ptr()
                .add(n)
                .cast::<u8>()
                .copy_from_nonoverlapping(sge.addr as *const u8, len)
        };
        n += len;
    }
    // SAFETY: the first `n` bytes were just written.
    Ok(unsafe { std::slice::from_raw_parts(room.as_ptr().cast(), n) })
}

#[cold]
fn unknown_opcode(opcode: c_int) -> Error {
    Error::unsupported(format!(
        "opcode {opcode}: WRITE and SEND (each with and without immediate), SEND with invalidate, \
         READ, atomics, LOCAL_INV and BIND_MW are known"
    ))
}

#[cold]
fn unknown_flags(flags: u32) -> Error {
    Error::invalid(format!(
        "send flags {flags:#x}: fence, signaled, solicited, inline and UNBROKEN_SEND_NO_REPLAY are \
         known"
    ))
}

pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a QP of ours.
    let object = unsafe { &*qp.cast::<QpObj>() };
    guard(libc::EIO, || {
        let mut next = wr;
        // SAFETY: the caller's list, which it leaves alone during the call.
        while let Some(wr) = unsafe { next.as_ref() } {
            // SAFETY: as above.
            let posted = unsafe { sges(wr.sg_list, wr.num_sge) }
                .and_then(|sges| object.qp.post_recv(&RecvWr { wr_id: wr.wr_id, sges }));
            if let Err(e) = posted {
                // SAFETY: the caller's variable.
                unsafe { bad_wr.write(next) };
                return failed("ibv_post_recv", &e);
            }
            next = wr.next;
        }
        0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inline_data_is_gathered_in_order_and_bounded() {
        let (a, b) = (*b"hello ", *b"world");
        let sge = |s: &[u8]| Sge { addr: s.as_ptr() as u64, length: s.len() as u32, lkey: 0 };
        let mut room = [MaybeUninit::uninit(); MAX_INLINE];
        // SAFETY: both entries describe live arrays.
        assert_eq!(unsafe { gather(&[sge(&a), sge(&b)], &mut room) }.unwrap(), b"hello world");
        let long = [0u8; MAX_INLINE];
        // SAFETY: as above.
        assert!(unsafe { gather(&[sge(&long), sge(&a)], &mut room) }.is_err());
        // SAFETY: as above.
        assert_eq!(unsafe { gather(&[sge(&long)], &mut room) }.unwrap().len(), MAX_INLINE);
    }

    #[test]
    fn a_wrong_list_is_refused() {
        // SAFETY: no entry is read.
        unsafe {
            assert!(sges(std::ptr::null_mut(), 1).is_err());
            assert!(sges(std::ptr::null_mut(), -1).is_err());
            assert_eq!(sges(std::ptr::null_mut(), 0).unwrap(), &[]);
        }
    }
}
