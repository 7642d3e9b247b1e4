//! The functions of `sdr.h`.

use super::ext::ExtAttr;
use super::table::{
    CContext, CQp, CRecv, CSend, CONTEXTS, QPS, RECVS, RELIABLES, SENDS, TRANSFERS,
};
use super::{code, given, guarded, put};
use crate::info::Info;
use crate::{lock, Attr, Context, ContextOptions, Error, QpOptions, Result, Split};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};
use unbroken::Host;

/// `struct sdr_dev_attr`
#[repr(C)]
struct DevAttr {
    num_channels: u32,
    log_max_qps: u32,
}

/// `struct sdr_qp_attr`; the enum is read as a number, since a program may have put anything there.
#[repr(C)]
pub(super) struct QpAttr {
    bitmap_chunk_size_log_bytes: u32,
    max_in_flight_log_bytes: usize,
    max_log_num_msgs: u32,
    mtu: u32,
    send_enable: u8,
    recv_enable: u8,
    rate_limit: u32,
}

/// `struct sdr_send_wr`
#[repr(C)]
struct SendWr {
    opcode: u32,
    imm_value: u32,
    length: u32,
    lkey: u32,
    local_addr: u64,
    remote_offset: u64,
}

/// `struct sdr_send_start_wr`
#[repr(C)]
struct SendStartWr {
    opcode: u32,
    imm_value: u32,
}

/// `struct sdr_send_continue_wr`
#[repr(C)]
struct SendContinueWr {
    length: u32,
    local_addr: u64,
    lkey: u32,
    remote_offset: u64,
}

/// `struct sdr_recv_wr`
#[repr(C)]
struct RecvWr {
    max_length: u32,
    lkey: u32,
    address: u64,
}

/// The NICs of a name such as `unb0,unb1`.
fn nics(name: &str) -> Result<Vec<usize>> {
    let nic = |word: &str| word.trim().strip_prefix("unb").and_then(|n| n.parse().ok());
    name.split(',').map(nic).collect::<Option<_>>().ok_or_else(|| {
        Error::wrong(format!(
            "'{name}' names no devices; unb0, or several with commas such as unb0,unb1, is right"
        ))
    })
}

#[no_mangle]
extern "C" fn sdr_context_create(name: *const c_char, attr: *const DevAttr) -> *mut c_void {
    let run = || {
        // SAFETY: the program gives NULL, or what sdr.h says.
        let attr = unsafe { given(attr, "dev_attr") }?;
        let name = match name.is_null() {
            true => "unb0".into(),
            // SAFETY: not NULL, so the program gives a string.
            false => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
        };
        let channels = u8::try_from(attr.num_channels).unwrap_or(u8::MAX);
        if attr.log_max_qps > 16 {
            return Err(Error::wrong(format!(
                "2^{} queue pairs; at most 2^16 is right",
                attr.log_max_qps
            )));
        }
        let host = Host::bare_from_env()?;
        let max_qps = 1 << attr.log_max_qps;
        let options =
            ContextOptions { nics: nics(&name)?, channels, max_qps, ..ContextOptions::default() };
        let context = Context::open(&host, &options)?;
        Ok(CONTEXTS.add(CContext { context, memories: Mutex::new(HashMap::new()) }))
    };
    guarded(run).unwrap_or(null_mut())
}

#[no_mangle]
extern "C" fn sdr_context_destroy(context: *mut c_void) -> c_int {
    code(|| {
        let it = CONTEXTS.get(context)?;
        if QPS.any(|qp| Arc::ptr_eq(&qp.context, &it)) {
            return Err(Error::wrong("the context has queue pairs: destroy them first"));
        }
        CONTEXTS.take(context)?;
        Ok(())
    })
}

/// Makes a queue pair.
pub(super) fn create_qp(ctx: *mut c_void, attr: &QpAttr, ext: &ExtAttr) -> Result<*mut c_void> {
    let context = CONTEXTS.get(ctx)?;
    let small = |value: u64, name: &str| {
        u8::try_from(value).map_err(|_| {
            Error::wrong(format!("{name} of {value}: the logarithm of a size is meant"))
        })
    };
    if attr.mtu > 6 {
        return Err(Error::wrong(format!(
            "an MTU of {}; SDR_MTU_64 (0) to SDR_MTU_4096 (6) is right",
            attr.mtu
        )));
    }
    let options = QpOptions {
        attr: Attr {
            chunk_log2: small(
                attr.bitmap_chunk_size_log_bytes.into(),
                "bitmap_chunk_size_log_bytes",
            )?,
            in_flight_log2: small(attr.max_in_flight_log_bytes as u64, "max_in_flight_log_bytes")?,
            messages_log2: small(attr.max_log_num_msgs.into(), "max_log_num_msgs")?,
            mtu_bytes: 64 << attr.mtu,
            channels: context.context.channels(),
            generations: small(ext.generations.into(), "generations")?,
            split: Split::new(ext.id_bits, ext.offset_bits, ext.user_bits).map_err(Error::wrong)?,
            packet_lifetime_us: u64::from(ext.packet_lifetime_ms) * 1000,
        },
        send: attr.send_enable != 0,
        recv: attr.recv_enable != 0,
        rate_bps: u64::from(attr.rate_limit) * 1_000_000,
        ..QpOptions::default()
    };
    let qp = context.context.create_qp(&options)?;
    Ok(QPS.add(CQp { qp, context }))
}

#[no_mangle]
extern "C" fn sdr_qp_create(ctx: *mut c_void, attr: *const QpAttr) -> *mut c_void {
    // SAFETY: the program gives NULL, or what sdr.h says.
    let run = || create_qp(ctx, unsafe { given(attr, "qp_attr") }?, &ExtAttr::default());
    guarded(run).unwrap_or(null_mut())
}

#[no_mangle]
extern "C" fn sdr_qp_destroy(qp: *mut c_void) -> c_int {
    code(|| {
        let it = QPS.take(qp)?;
        let core = &it.qp.0;
        TRANSFERS.take_all(|t| Arc::ptr_eq(&t.qp, &it));
        RELIABLES.take_all(|r| Arc::ptr_eq(&r.qp, &it));
        SENDS.take_all(|s| Arc::ptr_eq(&s.send.core, core));
        RECVS
            .take_all(|r| lock(&r.recv).as_ref().is_some_and(|recv| Arc::ptr_eq(&recv.core, core)));
        Ok(())
    })
}

#[no_mangle]
extern "C" fn sdr_qp_info_size_get(qp: *mut c_void, size: *mut usize) -> c_int {
    // SAFETY: the program gives NULL, or what sdr.h says.
    code(|| unsafe { put(size, "info_size", QPS.get(qp)?.qp.info_bytes()) })
}

#[no_mangle]
extern "C" fn sdr_qp_info_get(qp: *mut c_void, info: *mut c_void) -> c_int {
    code(|| {
        let bytes = QPS.get(qp)?.qp.info();
        if info.is_null() {
            return Err(Error::wrong(
                "info is NULL; a buffer of sdr_qp_info_size_get's size is right",
            ));
        }
        // SAFETY: the program gives a buffer of the size that it was told.
        unsafe { info.cast::<u8>().copy_from(bytes.as_ptr(), bytes.len()) };
        Ok(())
    })
}

#[no_mangle]
extern "C" fn sdr_qp_connect(qp: *mut c_void, info: *const c_void) -> c_int {
    code(|| {
        let it = QPS.get(qp)?;
        if info.is_null() {
            return Err(Error::wrong(
                "remote_qp_info is NULL; what sdr_qp_info_get wrote at the peer is right",
            ));
        }
        // SAFETY: the program gives what a peer's sdr_qp_info_get wrote, which is never shorter
        // than its beginning, and says itself how long it is.
        let bytes = unsafe {
            let prefix = std::slice::from_raw_parts(info.cast::<u8>(), Info::PREFIX_BYTES);
            std::slice::from_raw_parts(info.cast::<u8>(), Info::length(prefix)?)
        };
        it.qp.connect(bytes)
    })
}

#[no_mangle]
extern "C" fn sdr_recv_post(qp: *mut c_void, wr: *const RecvWr, handle: *mut *mut c_void) -> c_int {
    code(|| {
        let it = QPS.get(qp)?;
        // SAFETY: the program gives NULL, or what sdr.h says.
        let wr = unsafe { given(wr, "wr") }?;
        // SAFETY: as above. Checked before anything is posted.
        unsafe { put(handle, "handle", null_mut()) }?;
        let memory = it.context.memory(wr.lkey, wr.address, wr.max_length.into())?;
        let recv = it.qp.recv_post(&memory, wr.address - memory.addr(), wr.max_length.into())?;
        // SAFETY: as above.
        unsafe { put(handle, "handle", RECVS.add(CRecv { recv: Mutex::new(Some(recv)) })) }
    })
}

/// Does something with a receive that has not been completed.
fn with_recv<T>(handle: *mut c_void, run: impl FnOnce(&crate::Recv) -> Result<T>) -> Result<T> {
    let it = RECVS.get(handle)?;
    let recv = lock(&it.recv);
    run(recv.as_ref().ok_or_else(|| Error::wrong("the receive has been completed"))?)
}

#[no_mangle]
extern "C" fn sdr_recv_imm_get(handle: *mut c_void, immediate: *mut u32) -> c_int {
    code(|| {
        with_recv(handle, |recv| {
            let imm = recv
                .immediate()
                .ok_or_else(|| Error::retry("the immediate has not come in all its fragments"))?;
            // SAFETY: the program gives NULL, or what sdr.h says.
            unsafe { put(immediate, "immediate", imm) }
        })
    })
}

#[no_mangle]
extern "C" fn sdr_recv_bitmap_get(
    handle: *mut c_void,
    bytes: *mut *mut u8,
    count: *mut usize,
) -> c_int {
    // A word's bytes are in the order of the bits on little-endian machines alone; the SDK is for
    // no others.
    const { assert!(cfg!(target_endian = "little")) };
    code(|| {
        with_recv(handle, |recv| {
            let words = recv.core.board.chunks(recv.seq);
            // SAFETY: the program gives NULL, or what sdr.h says. It reads what others fill, as
            // sdr.h says.
            unsafe {
                put(bytes, "bitmap_bytes", words.as_ptr().cast::<u8>().cast_mut())?;
                put(count, "bitmap_num_bytes", recv.progress().0.div_ceil(8) as usize)
            }
        })
    })
}

#[no_mangle]
extern "C" fn sdr_recv_bitmap_chunk_expand(
    handle: *mut c_void,
    chunk: u32,
    bitmap: *mut u64,
) -> c_int {
    code(|| {
        with_recv(handle, |recv| {
            let words = recv.expand(chunk)?;
            if bitmap.is_null() {
                return Err(Error::wrong(
                    "bitmap is NULL; room for a bit for each packet of a chunk is right",
                ));
            }
            // SAFETY: the program gives room for the packets of a chunk, as sdr.h says.
            unsafe { bitmap.copy_from(words.as_ptr(), words.len()) };
            Ok(())
        })
    })
}

#[no_mangle]
extern "C" fn sdr_recv_complete(handle: *mut c_void) -> c_int {
    code(|| {
        let it = RECVS.get(handle)?;
        let recv =
            lock(&it.recv).take().ok_or_else(|| Error::wrong("the receive has been completed"))?;
        RECVS.take(handle)?;
        recv.complete()
    })
}

/// The immediate of an opcode.
fn immediate(opcode: u32, imm: u32) -> Result<Option<u32>> {
    match opcode {
        0 => Ok(None),
        1 => Ok(Some(imm)),
        _ => Err(Error::wrong(format!(
            "opcode {opcode}; SDR_WR_WRITE (0) or SDR_WR_WRITE_WITH_IMM (1) is right"
        ))),
    }
}

/// An offset in chunks that a message may have.
fn chunk(offset: u64) -> Result<u32> {
    u32::try_from(offset).ok().filter(|chunk| *chunk < 1 << 30).ok_or_else(|| {
        Error::wrong(format!("a remote_offset of {offset}: it is counted in chunks of the receive"))
    })
}

#[no_mangle]
extern "C" fn sdr_send_post(qp: *mut c_void, wr: *const SendWr, handle: *mut *mut c_void) -> c_int {
    code(|| {
        let it = QPS.get(qp)?;
        // SAFETY: the program gives NULL, or what sdr.h says.
        let wr = unsafe { given(wr, "wr") }?;
        // SAFETY: as above. Checked before anything is posted.
        unsafe { put(handle, "handle", null_mut()) }?;
        let (imm, chunk) = (immediate(wr.opcode, wr.imm_value)?, chunk(wr.remote_offset)?);
        let memory = it.context.memory(wr.lkey, wr.local_addr, wr.length.into())?;
        let layout = it.qp.0.layout;
        let end = u64::from(chunk) * u64::from(layout.chunk_bytes) + u64::from(wr.length);
        if end > layout.message_bytes {
            let most = layout.message_bytes;
            return Err(Error::wrong(format!(
                "{} bytes at chunk {chunk} go beyond the longest message, {most} bytes",
                wr.length
            )));
        }
        let send = it.qp.send_start(imm)?;
        send.add(&memory, wr.local_addr - memory.addr(), wr.length.into(), chunk, 0)?;
        send.end()?;
        // SAFETY: as above.
        unsafe { put(handle, "handle", SENDS.add(CSend { send, context: it.context.clone() })) }
    })
}

#[no_mangle]
extern "C" fn sdr_streaming_send_start(
    qp: *mut c_void,
    wr: *const SendStartWr,
    handle: *mut *mut c_void,
) -> c_int {
    code(|| {
        let it = QPS.get(qp)?;
        // SAFETY: the program gives NULL, or what sdr.h says.
        let wr = unsafe { given(wr, "wr") }?;
        // SAFETY: as above. Checked before anything is begun.
        unsafe { put(handle, "handle", null_mut()) }?;
        let send = it.qp.send_start(immediate(wr.opcode, wr.imm_value)?)?;
        // SAFETY: as above.
        unsafe { put(handle, "handle", SENDS.add(CSend { send, context: it.context.clone() })) }
    })
}

#[no_mangle]
extern "C" fn sdr_streaming_send_continue(handle: *mut c_void, wr: *const SendContinueWr) -> c_int {
    code(|| {
        let it = SENDS.get(handle)?;
        // SAFETY: the program gives NULL, or what sdr.h says.
        let wr = unsafe { given(wr, "wr") }?;
        let memory = it.context.memory(wr.lkey, wr.local_addr, wr.length.into())?;
        let offset = wr.local_addr - memory.addr();
        it.send.add(&memory, offset, wr.length.into(), chunk(wr.remote_offset)?, 0)
    })
}

#[no_mangle]
extern "C" fn sdr_streaming_send_end(handle: *mut c_void) -> c_int {
    code(|| SENDS.get(handle)?.send.end())
}

#[no_mangle]
extern "C" fn sdr_send_poll(handle: *mut c_void, completed: *mut c_int, status: *mut u32) -> c_int {
    code(|| {
        let it = SENDS.get(handle)?;
        let done = it.send.poll();
        // SAFETY: the program gives NULL, or what sdr.h says.
        unsafe { put(completed, "completed", c_int::from(matches!(done, Ok(true)))) }?;
        if !status.is_null() {
            // SAFETY: as above; the structure has one field.
            unsafe { status.write(0) };
        }
        match done {
            Ok(false) => Err(Error::retry("the send is not complete yet")),
            ended => {
                SENDS.take(handle)?;
                ended.map(drop)
            }
        }
    })
}
