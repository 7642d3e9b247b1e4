//! Programs that connect by librdmacm: told in a line of ours why it does not work, since what they
//! say themselves names no reason.

use crate::ffi::say;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::Once;

/// What librdmacm opens for each event channel.
const DEVICE: &CStr = c"/dev/infiniband/rdma_cm";
const DT_NULL: i64 = 0;
const DT_NEEDED: i64 = 1;
const DT_STRTAB: i64 = 5;

/// A path of ours is looked at: says it, once, where it is the connection manager's. Only to
/// programs that are linked with librdmacm: UCX, libfabric and Open MPI ask whether it is there,
/// too, and do without.
///
/// # Safety
/// `path` is a C string.
pub unsafe fn looked_at(path: *const c_char) {
    static SAID: Once = Once::new();
    // SAFETY: promised by the caller.
    if unsafe { CStr::from_ptr(path) } == DEVICE {
        SAID.call_once(|| {
            if program_needs_it() {
                say(format_args!(
                    "rdma_cm is not supported yet, so connections by librdmacm fail: connect by \
                     verbs and a socket instead (perftest: without -R; not rping and its like)"
                ));
            }
        });
    }
}

/// Whether the program itself, and not only a library of it, is linked with librdmacm.
fn program_needs_it() -> bool {
    let mut needs = false;
    // SAFETY: the callback gets this very variable, during the call alone.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut needs).cast()) };
    needs
}

/// Called for the program, which comes first, and no other.
unsafe extern "C" fn first(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    needs: *mut c_void,
) -> c_int {
    // SAFETY: the loader's record and our own variable, both valid during the call.
    unsafe { *needs.cast::<bool>() = is_linked_with_it(&*info) };
    1
}

/// # Safety
/// `info` is the loader's record of a loaded program.
unsafe fn is_linked_with_it(info: &libc::dl_phdr_info) -> bool {
    // SAFETY: the loader's array.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let Some(dynamic) = headers.iter().find(|h| h.p_type == libc::PT_DYNAMIC) else { return false };
    let base = info.dlpi_addr as usize;
    let start = (base + dynamic.p_vaddr as usize) as *const [i64; 2];
    // SAFETY: the dynamic section ends with DT_NULL.
    let entries = || (0..).map(|i| unsafe { *start.add(i) }).take_while(|[tag, _]| *tag != DT_NULL);
    let Some([_, strings]) = entries().find(|[tag, _]| *tag == DT_STRTAB) else { return false };
    // The loader makes the address absolute, except in read-only sections.
    let strings =
        if (strings as usize) < base { base + strings as usize } else { strings as usize };
    // SAFETY: offsets of C strings in the string table.
    let name =
        |offset: i64| unsafe { CStr::from_ptr((strings as *const c_char).add(offset as usize)) };
    entries()
        .any(|[tag, value]| tag == DT_NEEDED && name(value).to_bytes().starts_with(b"librdmacm.so"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_linked_with_librdmacm_is_told_nothing() {
        assert!(!program_needs_it());
    }
}
