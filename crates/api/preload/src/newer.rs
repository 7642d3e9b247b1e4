//! Verbs of libibverbs that are newer than the header that this crate's layouts are checked against
//! (`IBVERBS_1.15` to `1.18`).
//!
//! A program that was built against a newer header calls them by name, with objects of ours.
//! Registration by attributes, buffers and the speed of a port are here; what there is not (handles
//! of DMA, completion counters, dma-buf) is in [`crate::unsupported`].

use crate::ffi::{code, deref, guard, minus_one, pointer};
use crate::memory::{register, register_dmabuf};
use crate::objects::{free, ContextObj, PdObj};
use crate::query::SPEED_100_MBITS;
use crate::real::pass;
use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::NonNull;
use unbroken_verbs::abi::{ibv_context, ibv_mr, ibv_pd};
use unbroken_verbs::{Error, Result};

/// Alignment of buffers.
const PAGE: usize = 4096;

/// `struct ibv_mr_init_attr`. `buf` came later than the rest: it may be read only if its bit of
/// `comp_mask` is set.
#[allow(non_camel_case_types)]
#[repr(C)]
struct ibv_mr_init_attr {
    length: usize,
    access: c_int,
    comp_mask: u64,
    iova: u64,
    addr: *mut c_void,
    fd: c_int,
    fd_offset: u64,
    dmah: *mut c_void,
    buf: *mut Buffer,
}

/// `enum ibv_mr_init_attr_mask`.
const MASK_IOVA: u64 = 1;
const MASK_ADDR: u64 = 1 << 1;
const MASK_FD: u64 = 1 << 2;
const MASK_FD_OFFSET: u64 = 1 << 3;
const MASK_DMAH: u64 = 1 << 4;
const MASK_BUF: u64 = 1 << 5;

/// `struct ibv_buf`, which programs do not look into: plain memory of the process.
pub struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
    /// The domain that it was made for.
    pd: *mut ibv_pd,
}

impl Buffer {
    fn new(pd: *mut ibv_pd, size: usize) -> Result<Buffer> {
        let layout = Layout::from_size_align(size, PAGE).ok().filter(|_| size > 0);
        let layout = layout.ok_or_else(|| Error::invalid(format!("a buffer of {size} bytes")))?;
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) });
        let start = start.ok_or_else(|| Error::no_room("the process has no memory left"))?;
        Ok(Buffer { start, layout, pd })
    }

    /// EINVAL unless the buffer is of this domain and has these bytes.
    fn check(&self, pd: *mut ibv_pd, addr: *mut c_void, length: usize) -> Result<()> {
        if self.pd != pd {
            return Err(Error::invalid("the buffer is of another protection domain"));
        }
        let offset = (addr as usize).checked_sub(self.start.as_ptr() as usize);
        let end = offset.and_then(|offset| offset.checked_add(length));
        if end.is_none_or(|end| end > self.layout.size()) {
            return Err(Error::invalid(format!(
                "{length} bytes at {addr:p}: the buffer has {} at {:p}",
                self.layout.size(),
                self.start
            )));
        }
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; the program has deregistered what lies in it, as with
        // any memory that it frees.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
    pass!(ibv_reg_mr_ex(pd, attr));
    pointer("ibv_reg_mr_ex", || {
        // SAFETY: the caller's structure, which has at least the fields that its mask names.
        let (mask, length, access) = unsafe {
            deref(attr.cast::<usize>(), "mr_init_attr")?;
            ((*attr).comp_mask, (*attr).length, (*attr).access as c_uint)
        };
        if mask & MASK_FD != 0 {
            let known = MASK_FD | MASK_FD_OFFSET | MASK_IOVA;
            if mask & !known != 0 || mask & known != known {
                return Err(Error::invalid(format!(
                    "comp_mask {mask:#x}: a dma-buf has fd ({MASK_FD:#x}), fd_offset \
                     ({MASK_FD_OFFSET:#x}) and iova ({MASK_IOVA:#x})"
                )));
            }
            // SAFETY: the mask names what is read; objects of ours.
            return unsafe {
                let range = ((*attr).fd_offset, length, (*attr).iova);
                register_dmabuf(pd, (*attr).fd, range, access)
            };
        }
        if mask & !(MASK_IOVA | MASK_ADDR | MASK_BUF) != 0 {
            return Err(Error::unsupported(format!(
                "comp_mask {mask:#x}: iova ({MASK_IOVA:#x}), addr ({MASK_ADDR:#x}) and buf \
                 ({MASK_BUF:#x}) are known, a dmah ({MASK_DMAH:#x}) there is not"
            )));
        }
        if mask & MASK_ADDR == 0 {
            return Err(Error::invalid(format!(
                "comp_mask {mask:#x}: addr ({MASK_ADDR:#x}) is needed"
            )));
        }
        // SAFETY: the mask names what is read; objects of ours.
        unsafe {
            let addr = (*attr).addr;
            if mask & MASK_BUF != 0 {
                deref((*attr).buf, "buf")?.check(pd, addr, length)?;
            }
            let iova = if mask & MASK_IOVA != 0 { (*attr).iova } else { addr as u64 };
            register(pd, addr, length, iova, access)
        }
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_alloc_buf(
    pd: *mut ibv_pd,
    size: usize,
    buf: *mut *mut Buffer,
) -> *mut c_void {
    pass!(ibv_alloc_buf(pd, size, buf));
    pointer("ibv_alloc_buf", || {
        // SAFETY: a protection domain of ours.
        unsafe { PdObj::of(pd) }?;
        // SAFETY: NULL or the caller's variable.
        unsafe { deref(buf, "buf") }?;
        let buffer = Buffer::new(pd, size)?;
        let start = buffer.start;
        // SAFETY: the caller's variable.
        unsafe { buf.write(Box::into_raw(Box::new(buffer))) };
        Ok(start.as_ptr().cast())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_free_buf(buf: *mut Buffer) {
    pass!(ibv_free_buf(buf));
    guard((), || {
        if !buf.is_null() {
            // SAFETY: made by Box in ibv_alloc_buf; the program gives it up.
            unsafe { free(buf) };
        }
    });
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_buf_mr(
    pd: *mut ibv_pd,
    buf: *mut Buffer,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    pass!(ibv_reg_buf_mr(pd, buf, addr, length, access));
    pointer("ibv_reg_buf_mr", || {
        // SAFETY: objects of ours.
        unsafe {
            deref(buf, "buf")?.check(pd, addr, length)?;
            register(pd, addr, length, addr as u64, access as c_uint)
        }
    })
}

#[no_mangle]
extern "C" fn ibv_export_buf_dmabuf_fd(buf: *mut Buffer) -> c_int {
    pass!(ibv_export_buf_dmabuf_fd(buf));
    minus_one("ibv_export_buf_dmabuf_fd", || {
        Err(Error::new(
            libc::ENODATA,
            "buffers are plain memory of the process, no dma-buf is behind them",
        ))
    })
}

/// In units of 100 Mbit/s: what `active_width` and `active_speed` of `ibv_query_port` come to.
#[no_mangle]
unsafe extern "C" fn ibv_query_port_speed(
    context: *mut ibv_context,
    port: u32,
    speed: *mut u64,
) -> c_int {
    pass!(ibv_query_port_speed(context, port, speed));
    code("ibv_query_port_speed", || {
        // SAFETY: a context of ours and the caller's integer.
        unsafe {
            let port = u8::try_from(port).map_err(|_| Error::invalid(format!("port {port}")))?;
            ContextObj::of(context)?.api.port(port)?;
            deref(speed, "port_speed")?;
            speed.write(SPEED_100_MBITS);
        }
        Ok(())
    })
}
