//! The second way in: programs that open libibverbs themselves.
//!
//! NCCL and others call `dlopen("libibverbs.so.1")` and take each function with `dlsym` or `dlvsym(handle, "ibv_…", "IBVERBS_1.1")`. A
//! preloaded definition does not help there, since the look-up starts at the handle. So `dlsym` and `dlvsym` are ours, too: names of
//! verbs are answered with our own definitions, whatever the version, and all else goes to the real function.
//!
//! Two things need care:
//! - The real `dlsym` looks at its return address to know who asks (`RTLD_NEXT`, namespaces). So ours are trampolines in assembly
//!   that *jump* to the real one: the stack is then as if we had not been there.
//! - The real `dlsym` cannot be found by asking `dlsym`. It is read from the symbol table of the first library behind ours in the
//!   loader's order that has it, as the loader itself would find it.
//!
//! `dlopen` of libibverbs gives a handle of ours where libibverbs is not installed.
//!
//! Other processors than x86-64 have the first way in only (linked programs), until there is one to test the trampolines on.
#![cfg(target_arch = "x86_64")]

use crate::ffi::guard;
use std::arch::global_asm;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::OnceLock;

/// The real functions; where the trampolines jump to.
static REAL_DLSYM: AtomicUsize = AtomicUsize::new(0);
static REAL_DLVSYM: AtomicUsize = AtomicUsize::new(0);
static REAL_DLOPEN: AtomicUsize = AtomicUsize::new(0);

/// Defines `$name`: asks `$pick` with the same arguments; returns its answer, or jumps to `$real` if that is NULL.
macro_rules! trampoline {
    ($name:literal, $pick:path, $real:path) => {
        global_asm!(
            concat!(".globl ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            ".cfi_startproc",
            "endbr64",
            "push rdi",
            "push rsi",
            "push rdx",
            ".cfi_adjust_cfa_offset 24",
            "call {pick}",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            ".cfi_adjust_cfa_offset -24",
            "test rax, rax",
            "jnz 2f",
            "jmp qword ptr [rip + {real}]",
            "2: ret",
            ".cfi_endproc",
            concat!(".size ", $name, ", . - ", $name),
            pick = sym $pick,
            real = sym $real,
        );
    };
}

trampoline!("dlsym", pick_symbol, REAL_DLSYM);
trampoline!("dlvsym", pick_symbol, REAL_DLVSYM);
trampoline!("dlopen", pick_library, REAL_DLOPEN);

/// For a real function that does not exist, which cannot happen where a program was loaded at all.
extern "C" fn nowhere() -> *mut c_void {
    null_mut()
}

/// Whether a function of this name is ours to answer for.
fn is_verb(name: &CStr) -> bool {
    let n = name.to_bytes();
    n.starts_with(b"ibv_") || n.starts_with(b"_ibv_") || n == b"mult_to_ibv_rate" || n == b"mbps_to_ibv_rate"
}

/// Our definition of a verb; NULL for anything else, with the way to the real function laid.
unsafe extern "C" fn pick_symbol(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    guard(null_mut(), || {
        let loaded = Loaded::get();
        if name.is_null() || handle == libc::RTLD_NEXT {
            return null_mut();
        }
        // SAFETY: the caller's string.
        let name = unsafe { CStr::from_ptr(name) };
        if is_verb(name) {
            loaded.own.as_ref().and_then(|o| o.find(name)).unwrap_or(null_mut())
        } else {
            null_mut()
        }
    })
}

/// A handle for libibverbs: its own where it is installed, ours where not. NULL for any other library, with the way laid.
unsafe extern "C" fn pick_library(name: *const c_char, flags: c_int) -> *mut c_void {
    guard(null_mut(), || {
        let loaded = Loaded::get();
        if name.is_null() {
            return null_mut();
        }
        // SAFETY: the caller's string.
        let bytes = unsafe { CStr::from_ptr(name) }.to_bytes();
        let base = bytes.rsplit(|b| *b == b'/').next().unwrap_or_default();
        if !base.starts_with(b"libibverbs.so") {
            return null_mut();
        }
        type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
        // SAFETY: the address is of the real dlopen, or of `nowhere`, which takes no arguments and returns NULL.
        let real: Dlopen = unsafe { std::mem::transmute(REAL_DLOPEN.load(Ordering::Relaxed)) };
        // SAFETY: as the caller asked.
        let theirs = unsafe { real(name, flags) };
        if !theirs.is_null() || loaded.own_path.is_null() {
            return theirs;
        }
        // SAFETY: the path is the loader's own record of us, which lives as long as we do.
        unsafe { real(loaded.own_path, libc::RTLD_NOW) }
    })
}

/// What the loader knows, read once.
struct Loaded {
    own: Option<Object>,
    own_path: *const c_char,
}

// SAFETY: both point to what the loader never moves or frees while we are loaded, and is never written again.
unsafe impl Sync for Loaded {}
// SAFETY: as above.
unsafe impl Send for Loaded {}

impl Loaded {
    fn get() -> &'static Loaded {
        static LOADED: OnceLock<Loaded> = OnceLock::new();
        LOADED.get_or_init(|| {
            let mut search = Search { own: None, own_path: c"".as_ptr(), real: [None; 3] };
            // SAFETY: the callback gets this very structure, during the call alone.
            unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
            let real = search.real.map(|r| r.map_or(nowhere as *const () as usize, |p| p as usize));
            for (to, real) in [&REAL_DLSYM, &REAL_DLVSYM, &REAL_DLOPEN].into_iter().zip(real) {
                to.store(real, Ordering::Relaxed);
            }
            Loaded { own: search.own, own_path: search.own_path }
        })
    }
}

struct Search {
    own: Option<Object>,
    own_path: *const c_char,
    real: [Option<*mut c_void>; 3],
}

/// Called for each loaded library in the loader's order.
unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> c_int {
    // SAFETY: the loader's record and our own structure, both valid during the call.
    let (info, search) = unsafe { (&*info, &mut *search.cast::<Search>()) };
    // SAFETY: a loaded library, held by the loader during the call.
    let Some(object) = (unsafe { Object::of(info) }) else { return 0 };
    if search.own.is_none() {
        // SAFETY: as above.
        if unsafe { contains(info, visit as *const () as usize) } {
            search.own = Some(object);
            search.own_path = info.dlpi_name;
        }
        return 0;
    }
    for (found, name) in search.real.iter_mut().zip([c"dlsym", c"dlvsym", c"dlopen"]) {
        if found.is_none() {
            *found = object.find(name);
        }
    }
    c_int::from(search.real.iter().all(Option::is_some))
}

/// # Safety
/// `info` is the loader's record of a loaded library.
unsafe fn headers(info: &libc::dl_phdr_info) -> &[libc::Elf64_Phdr] {
    // SAFETY: the loader's array.
    unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) }
}

/// Whether an address lies in the library.
///
/// # Safety
/// As [`headers`].
unsafe fn contains(info: &libc::dl_phdr_info, address: usize) -> bool {
    // SAFETY: promised by the caller.
    unsafe { headers(info) }.iter().filter(|h| h.p_type == libc::PT_LOAD).any(|h| {
        let start = (info.dlpi_addr + h.p_vaddr) as usize;
        (start..start + h.p_memsz as usize).contains(&address)
    })
}

/// The dynamic symbol table of a loaded library.
#[derive(Clone, Copy)]
struct Object {
    base: usize,
    symbols: *const libc::Elf64_Sym,
    strings: *const c_char,
    gnu_hash: *const u32,
}

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
/// `st_shndx` of a symbol that is defined elsewhere.
const SHN_UNDEF: u16 = 0;

impl Object {
    /// # Safety
    /// As [`headers`].
    unsafe fn of(info: &libc::dl_phdr_info) -> Option<Object> {
        let base = info.dlpi_addr as usize;
        // SAFETY: promised by the caller.
        let dynamic = unsafe { headers(info) }.iter().find(|h| h.p_type == libc::PT_DYNAMIC)?;
        let mut entry = (base + dynamic.p_vaddr as usize) as *const [i64; 2];
        let (mut symbols, mut strings, mut gnu_hash) = (0, 0, 0);
        loop {
            // SAFETY: the dynamic section ends with DT_NULL.
            let [tag, value] = unsafe { *entry };
            // The loader makes the addresses absolute, except in read-only sections (the kernel's vdso).
            let address = if (value as usize) < base { base + value as usize } else { value as usize };
            match tag {
                DT_NULL => break,
                DT_SYMTAB => symbols = address,
                DT_STRTAB => strings = address,
                DT_GNU_HASH => gnu_hash = address,
                _ => {}
            }
            // SAFETY: not past DT_NULL.
            entry = unsafe { entry.add(1) };
        }
        (symbols != 0 && strings != 0 && gnu_hash != 0).then_some(Object {
            base,
            symbols: symbols as *const _,
            strings: strings as *const _,
            gnu_hash: gnu_hash as *const _,
        })
    }

    /// The address of a defined function, by the hash table that the linker made.
    fn find(&self, name: &CStr) -> Option<*mut c_void> {
        let hash = name.to_bytes().iter().fold(5381u32, |h, c| h.wrapping_mul(33).wrapping_add((*c).into()));
        // SAFETY: the layout of DT_GNU_HASH: four words, `bloom_words` of 8 bytes, the buckets, then one hash for each symbol from
        // `first` on, the last of a bucket with its lowest bit set.
        unsafe {
            let [buckets, first, bloom_words, _] = *self.gnu_hash.cast::<[u32; 4]>();
            let bucket_table = self.gnu_hash.add(4 + 2 * bloom_words as usize);
            let hashes = bucket_table.add(buckets as usize);
            if buckets == 0 {
                return None;
            }
            let mut index = *bucket_table.add((hash % buckets) as usize);
            if index < first {
                return None;
            }
            loop {
                let have = *hashes.add((index - first) as usize);
                let symbol = &*self.symbols.add(index as usize);
                if have | 1 == hash | 1
                    && symbol.st_shndx != SHN_UNDEF
                    && CStr::from_ptr(self.strings.add(symbol.st_name as usize)) == name
                {
                    return Some((self.base + symbol.st_value as usize) as *mut c_void);
                }
                if have & 1 != 0 {
                    return None;
                }
                index += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_verbs_are_known() {
        for verb in [c"ibv_post_recv", c"_ibv_query_gid_ex", c"mbps_to_ibv_rate"] {
            assert!(is_verb(verb));
        }
        for other in [c"dlsym", c"mlx5dv_query_device", c"xibv_", c"rdma_create_id", c""] {
            assert!(!is_verb(other));
        }
    }

    #[test]
    fn the_real_functions_are_found_behind_us() {
        Loaded::get();
        let real = REAL_DLSYM.load(Ordering::Relaxed);
        assert_ne!(real, nowhere as *const () as usize);
        // SAFETY: the trampoline's own contract; everything that is not a verb reaches the real dlsym.
        let strlen = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"strlen".as_ptr()) };
        assert!(!strlen.is_null());
        // SAFETY: as above.
        assert!(unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"no_such_function_here".as_ptr()) }.is_null());
    }
}
