//! The functions behind ours: a look-up that asks nobody.
//!
//! Some functions of ours stand before others of the same name (`dlsym`, `open`) and jump to them.
//! `dlsym` cannot be asked for them, as it is one of them. So they are read from the symbol tables
//! of the libraries behind ours in the loader's order, as the loader itself would find them.
//! Nothing here allocates: the first call may come from a memory allocator that opens a file.
//!
//! The libraries are read from the loader's own list (`_r_debug`), and not asked for by
//! `dl_iterate_phdr`: ThreadSanitizer's runtime stands before that one, and calls `dlsym`, thus us,
//! before it can answer. The list changes only while a library is loaded or unloaded; it is read
//! when this library is initialised, at the latest, and no other thread is there yet.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::OnceLock;

/// Declares the functions that have one behind them: an index for each, and their names.
macro_rules! behind {
    ($($index:ident = $name:literal;)*) => {
        /// Index of a function in [`REAL`].
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy)]
        pub enum Behind { $($index),* }
        const NAMES: &[&CStr] = &[$($name),*];
    };
}

behind! {
    Dlsym = c"dlsym";
    Dlvsym = c"dlvsym";
    Dlopen = c"dlopen";
    Open = c"open";
    Open64 = c"open64";
    Open2 = c"__open_2";
    Open642 = c"__open64_2";
    Openat = c"openat";
    Openat64 = c"openat64";
    Openat2 = c"__openat_2";
    Openat642 = c"__openat64_2";
    Fopen = c"fopen";
    Fopen64 = c"fopen64";
    Stat = c"stat";
    Stat64 = c"stat64";
    Lstat = c"lstat";
    Lstat64 = c"lstat64";
    Xstat = c"__xstat";
    Xstat64 = c"__xstat64";
    Lxstat = c"__lxstat";
    Lxstat64 = c"__lxstat64";
    Fstatat = c"fstatat";
    Fstatat64 = c"fstatat64";
    Statx = c"statx";
    Access = c"access";
    Faccessat = c"faccessat";
    Opendir = c"opendir";
    Scandir = c"scandir";
    Scandir64 = c"scandir64";
    Readlink = c"readlink";
    ReadlinkChk = c"__readlink_chk";
    Readlinkat = c"readlinkat";
    Getxattr = c"getxattr";
    Lgetxattr = c"lgetxattr";
    Listxattr = c"listxattr";
    Llistxattr = c"llistxattr";
    Sigaction = c"sigaction";
    Signal = c"signal";
    BsdSignal = c"bsd_signal";
    Ssignal = c"ssignal";
    SysvSignal = c"sysv_signal";
    SysvSignal2 = c"__sysv_signal";
    Realpath = c"realpath";
    RealpathChk = c"__realpath_chk";
    Write = c"write";
    Fstat = c"fstat";
    Fstat64 = c"fstat64";
    Fxstat = c"__fxstat";
    Fxstat64 = c"__fxstat64";
    Getifaddrs = c"getifaddrs";
    Freeifaddrs = c"freeifaddrs";
}

const COUNT: usize = NAMES.len();

/// Addresses of the real functions, for the trampolines to jump to.
pub static REAL: [AtomicUsize; COUNT] = [const { AtomicUsize::new(0) }; COUNT];

/// The address of the function behind ours.
pub fn real(function: Behind) -> usize {
    Loaded::get();
    REAL[function as usize].load(Ordering::Relaxed)
}

/// For a real function that does not exist, which cannot happen where a program was loaded at all.
extern "C" fn nowhere() -> *mut c_void {
    null_mut()
}

/// What the loader knows, read once.
pub struct Loaded {
    own: Option<Object>,
    /// The path of this library; the loader's own record, which lives as long as we do.
    pub own_path: *const c_char,
}

// SAFETY: both point to what the loader never moves or frees while we are loaded, and is never
// written again.
unsafe impl Sync for Loaded {}
// SAFETY: as above.
unsafe impl Send for Loaded {}

impl Loaded {
    /// What is known; at the first call it is found out, and the real functions with it.
    #[inline]
    pub fn get() -> &'static Loaded {
        static LOADED: OnceLock<Loaded> = OnceLock::new();
        LOADED.get_or_init(|| {
            let search = Search::run();
            for (to, real) in REAL.iter().zip(search.real) {
                to.store(
                    real.map_or(nowhere as *const () as usize, |p| p as usize),
                    Ordering::Relaxed,
                );
            }
            Loaded { own: search.own, own_path: search.own_path }
        })
    }

    /// The address of a function of this library.
    pub fn own(&self, name: &CStr) -> Option<*mut c_void> {
        self.own.as_ref().and_then(|o| o.find(name))
    }
}

struct Search {
    own: Option<Object>,
    own_path: *const c_char,
    real: [Option<*mut c_void>; COUNT],
}

/// The loader's record of a loaded library (`struct link_map`).
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const [i64; 2],
    next: *const LinkMap,
    previous: *const LinkMap,
}

/// Where a debugger finds the loader's records (`struct r_debug`).
#[repr(C)]
struct LoaderDebug {
    version: c_int,
    map: *const LinkMap,
}

extern "C" {
    static _r_debug: LoaderDebug;
    /// The dynamic section of this very library.
    static _DYNAMIC: [i64; 2];
}

/// Run by the loader when this library is initialised, before the program has threads.
#[used]
#[link_section = ".init_array"]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    Loaded::get();
    crate::cm::functions_are_known();
}

impl Search {
    /// Looks through the loaded libraries in the loader's order. Where this one was opened by a
    /// program that runs already, the C library is before it: what none behind has is taken from
    /// those.
    fn run() -> Search {
        let mut search = Search { own: None, own_path: c"".as_ptr(), real: [None; COUNT] };
        let mut before = [None; COUNT];
        // SAFETY: the loader's records, which do not change now: see the head of this file.
        let mut next = unsafe { _r_debug.map };
        // SAFETY: as above.
        while let Some(library) = unsafe { next.as_ref() } {
            next = library.next;
            // SAFETY: a loaded library.
            let Some(object) = (unsafe { Object::of(library) }) else { continue };
            if search.own.is_none() {
                if library.dynamic == &raw const _DYNAMIC {
                    (search.own, search.own_path) = (Some(object), library.name);
                    continue;
                }
                object.find_missing(&mut before);
            } else {
                object.find_missing(&mut search.real);
            }
        }
        for (found, other) in search.real.iter_mut().zip(before) {
            *found = found.or(other);
        }
        search
    }
}

/// The dynamic symbol table of a loaded library.
#[derive(Clone, Copy)]
struct Object {
    base: usize,
    symbols: *const libc::Elf64_Sym,
    strings: *const c_char,
    gnu_hash: *const u32,
    /// The version of each symbol; NULL where the library has none.
    versions: *const u16,
}

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;
/// `st_shndx` of a symbol that is defined elsewhere.
const SHN_UNDEF: u16 = 0;
/// In a version: kept for old programs, not what a new one is linked to.
const HIDDEN: u16 = 0x8000;

impl Object {
    /// # Safety
    /// `library` is the loader's record of a loaded library.
    unsafe fn of(library: &LinkMap) -> Option<Object> {
        let (base, mut entry) = (library.base, library.dynamic);
        if entry.is_null() {
            return None;
        }
        let (mut symbols, mut strings, mut gnu_hash, mut versions) = (0, 0, 0, 0);
        loop {
            // SAFETY: the dynamic section ends with DT_NULL.
            let [tag, value] = unsafe { *entry };
            // The loader makes the addresses absolute, except in read-only sections (the kernel's
            // vdso).
            let address =
                if (value as usize) < base { base + value as usize } else { value as usize };
            match tag {
                DT_NULL => break,
                DT_SYMTAB => symbols = address,
                DT_STRTAB => strings = address,
                DT_GNU_HASH => gnu_hash = address,
                DT_VERSYM => versions = address,
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
            versions: versions as *const _,
        })
    }

    /// Enters those of the real functions that are still missing and defined here.
    fn find_missing(&self, real: &mut [Option<*mut c_void>; COUNT]) {
        for (found, name) in real.iter_mut().zip(NAMES) {
            if found.is_none() {
                *found = self.find(name);
            }
        }
    }

    /// The address of a defined function, by the hash table that the linker made; its default
    /// version if there are several.
    fn find(&self, name: &CStr) -> Option<*mut c_void> {
        let hash = name
            .to_bytes()
            .iter()
            .fold(5381u32, |h, c| h.wrapping_mul(33).wrapping_add((*c).into()));
        let mut old = None;
        // SAFETY: the layout of DT_GNU_HASH: four words, `bloom_words` of 8 bytes, the buckets,
        // then one hash for each symbol from `first` on, the last of a bucket with its lowest bit
        // set.
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
                    let address = (self.base + symbol.st_value as usize) as *mut c_void;
                    if self.versions.is_null() || *self.versions.add(index as usize) & HIDDEN == 0 {
                        return Some(address);
                    }
                    old = Some(address);
                }
                if have & 1 != 0 {
                    return old;
                }
                index += 1;
            }
        }
    }
}
