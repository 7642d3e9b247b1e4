//! Memory that is no longer there when the network touches it.
//!
//! A NIC pins what is registered. A softnic cannot, so the program may have unmapped a region,
//! taken away the right to write it, or cut the file behind it, and an access then raises SIGSEGV
//! or SIGBUS. Instructions that touch registered memory are therefore listed ([`crate::copy`] and
//! the copies here), each with the place to go on at after a fault, as a kernel does it for the
//! memory of processes. The handler of the two signals looks for the instruction in the list, and
//! passes every other fault to the program's own handler. An access that does not fault costs
//! nothing.
//!
//! The handler is installed when the first region is registered. From then on the program's actions
//! for the two signals are kept here ([`program_action`]), where they come by `sigaction` and
//! `signal` (`unbroken-preload` stands before both); one that comes past them (a system call of its
//! own) replaces ours.
#![cfg(target_arch = "x86_64")]

use libc::{c_int, c_void, siginfo_t, ucontext_t};
use std::arch::global_asm;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// The list: first and last address of instructions, and where to go on, each as its distance from
/// the entry's own word.
#[repr(C)]
struct Entry {
    start: i64,
    end: i64,
    go_on: i64,
}

extern "C" {
    #[link_name = "__start_unbroken_traps"]
    static FIRST: Entry;
    #[link_name = "__stop_unbroken_traps"]
    static LAST: Entry;
    fn unbroken_copy(to: *mut u8, from: *const u8, len: usize) -> usize;
    fn unbroken_copy_wide(to: *mut u8, from: *const u8, len: usize) -> usize;
    fn unbroken_add(at: *mut u64, add: u64, found: *mut u64) -> usize;
    fn unbroken_swap(at: *mut u64, compare: u64, swap: u64, found: *mut u64) -> usize;
    fn unbroken_touch(at: *const u8) -> usize;
    fn unbroken_touch_to_write(at: *mut u8) -> usize;
    fn unbroken_return_from_signal();
}

// Leaves, which use no stack: a fault in one goes on at its end, with 1.
global_asm!(
    ".pushsection .text.unbroken_traps,\"ax\",@progbits",
    ".balign 64",
    "77:",
    // (to, from, len), by 256 bytes as long as there are as many, in registers whose use needs no
    // `vzeroupper`.
    ".globl unbroken_copy_wide",
    ".hidden unbroken_copy_wide",
    "unbroken_copy_wide:",
    "2: cmp rdx, 256",
    "jb unbroken_copy",
    "vmovdqu64 zmm16, [rsi]",
    "vmovdqu64 zmm17, [rsi + 64]",
    "vmovdqu64 zmm18, [rsi + 128]",
    "vmovdqu64 zmm19, [rsi + 192]",
    "vmovdqu64 [rdi], zmm16",
    "vmovdqu64 [rdi + 64], zmm17",
    "vmovdqu64 [rdi + 128], zmm18",
    "vmovdqu64 [rdi + 192], zmm19",
    "add rsi, 256",
    "add rdi, 256",
    "sub rdx, 256",
    "jmp 2b",
    ".balign 32",
    // (to, from, len): the ends overlap where a length is no round one.
    ".globl unbroken_copy",
    ".hidden unbroken_copy",
    "unbroken_copy:",
    "cmp rdx, 16",
    "jae 4f",
    "cmp edx, 8",
    "jae 3f",
    "cmp edx, 4",
    "jae 5f",
    "test edx, edx",
    "jz 9f",
    "movzx eax, byte ptr [rsi]",
    "movzx ecx, byte ptr [rsi + rdx - 1]",
    "cmp edx, 3",
    "jb 6f",
    "movzx r8d, byte ptr [rsi + 1]",
    "mov [rdi + 1], r8b",
    "6: mov [rdi], al",
    "mov [rdi + rdx - 1], cl",
    "9: xor eax, eax",
    "ret",
    "5: mov eax, [rsi]",
    "mov ecx, [rsi + rdx - 4]",
    "mov [rdi], eax",
    "mov [rdi + rdx - 4], ecx",
    "xor eax, eax",
    "ret",
    "3: mov rax, [rsi]",
    "mov rcx, [rsi + rdx - 8]",
    "mov [rdi], rax",
    "mov [rdi + rdx - 8], rcx",
    "xor eax, eax",
    "ret",
    "4: movups xmm4, [rsi + rdx - 16]",
    "lea r8, [rdi + rdx - 16]",
    "sub rdx, 64",
    "jb 7f",
    ".balign 16",
    "8: movups xmm0, [rsi]",
    "movups xmm1, [rsi + 16]",
    "movups xmm2, [rsi + 32]",
    "movups xmm3, [rsi + 48]",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "movups [rdi + 32], xmm2",
    "movups [rdi + 48], xmm3",
    "add rsi, 64",
    "add rdi, 64",
    "sub rdx, 64",
    "jae 8b",
    "7: add rdx, 64",
    "2: cmp rdx, 16",
    "jb 3f",
    "movups xmm0, [rsi]",
    "movups [rdi], xmm0",
    "add rsi, 16",
    "add rdi, 16",
    "sub rdx, 16",
    "jmp 2b",
    "3: movups [r8], xmm4",
    "xor eax, eax",
    "ret",
    // (at, add, found)
    ".globl unbroken_add",
    ".hidden unbroken_add",
    "unbroken_add:",
    "lock xadd [rdi], rsi",
    "mov [rdx], rsi",
    "xor eax, eax",
    "ret",
    // (at, compare, swap, found)
    ".globl unbroken_swap",
    ".hidden unbroken_swap",
    "unbroken_swap:",
    "mov rax, rsi",
    "lock cmpxchg [rdi], rdx",
    "mov [rcx], rax",
    "xor eax, eax",
    "ret",
    ".globl unbroken_touch",
    ".hidden unbroken_touch",
    "unbroken_touch:",
    "movzx eax, byte ptr [rdi]",
    "xor eax, eax",
    "ret",
    ".globl unbroken_touch_to_write",
    ".hidden unbroken_touch_to_write",
    "unbroken_touch_to_write:",
    "lock or byte ptr [rdi], 0",
    "xor eax, eax",
    "ret",
    "78: mov eax, 1",
    "ret",
    ".globl unbroken_return_from_signal",
    ".hidden unbroken_return_from_signal",
    "unbroken_return_from_signal:",
    "mov eax, 15",
    "syscall",
    ".popsection",
    ".pushsection unbroken_traps,\"aR\",@progbits",
    ".balign 8",
    ".quad 77b - .",
    ".quad 78b - .",
    ".quad 78b - .",
    ".popsection",
);

/// The memory is not there, or not to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fault;

#[inline]
fn done(code: usize) -> Result<(), Fault> {
    match code {
        0 => Ok(()),
        _ => Err(Fault),
    }
}

/// Copies bytes of which those at one side may not be there. After a fault some may have been
/// copied.
///
/// # Safety
/// As `copy_nonoverlapping`, but that what is registered memory may be unmapped or protected.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> Result<(), Fault> {
    // SAFETY: promised by the caller; the wide registers are there.
    done(unsafe {
        match len >= 256 && is_x86_feature_detected!("avx512f") {
            true => unbroken_copy_wide(to, from, len),
            false => unbroken_copy(to, from, len),
        }
    })
}

/// Adds to a word, and gives what was there.
///
/// # Safety
/// `at` is aligned; what else is done to the word is atomic. It may be unmapped or protected.
pub(crate) unsafe fn fetch_add(at: *mut u64, add: u64) -> Result<u64, Fault> {
    let mut found = 0;
    // SAFETY: promised by the caller; `found` is ours.
    done(unsafe { unbroken_add(at, add, &raw mut found) }).map(|()| found)
}

/// Replaces a word that is `compare`, and gives what was there.
///
/// # Safety
/// As [`fetch_add`].
pub(crate) unsafe fn compare_swap(at: *mut u64, compare: u64, swap: u64) -> Result<u64, Fault> {
    let mut found = 0;
    // SAFETY: as above.
    done(unsafe { unbroken_swap(at, compare, swap, &raw mut found) }).map(|()| found)
}

/// Whether each page of a range can be read, or written; what is there stays.
pub(crate) fn touch(start: u64, bytes: u64, page_bytes: u64, to_write: bool) -> Result<(), Fault> {
    install();
    for at in (start..start + bytes).step_by(page_bytes as usize) {
        // SAFETY: the first byte of a page is read, or written as it is by an atomic instruction; a
        // fault is answered.
        done(unsafe {
            match to_write {
                true => unbroken_touch_to_write(at as *mut u8),
                false => unbroken_touch(at as *const u8),
            }
        })?;
    }
    Ok(())
}

/// Where to go on after a fault at this instruction.
fn go_on(instruction: u64) -> Option<u64> {
    let (mut entry, last) = (&raw const FIRST, &raw const LAST);
    while entry < last {
        // SAFETY: the linker's bounds of the list.
        let (e, word) =
            unsafe { (&*entry, |field: *const i64| (field as u64).wrapping_add(*field as u64)) };
        if (word(&raw const e.start)..word(&raw const e.end)).contains(&instruction) {
            return Some(word(&raw const e.go_on));
        }
        // SAFETY: not past the end.
        entry = unsafe { entry.add(1) };
    }
    None
}

/// What the kernel knows of a signal (`struct sigaction` of the system call).
#[repr(C)]
#[derive(Clone, Copy)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
const SA_RESTORER: u64 = 0x0400_0000;
const MASK_BYTES: usize = 8;
const DEFAULT: Action = Action { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };

static INSTALLED: AtomicBool = AtomicBool::new(false);
static THEIRS: [Theirs; 2] = [const { Theirs::new() }; 2];

/// Actions that a handler which reads one may be behind of.
const KEPT: usize = 64;

/// The program's own action for a signal.
///
/// It is set and read in signal handlers, so neither takes a lock or memory: a new action is
/// written beside the one that counts, in one of [`KEPT`] places that are used in turn, and counts
/// from then on.
struct Theirs {
    kept: [Kept; KEPT],
    /// Actions that were set.
    set: AtomicU32,
    /// One more than the place of the one that counts. 0: the default one.
    current: AtomicUsize,
}

struct Kept {
    handler: AtomicUsize,
    flags: AtomicU64,
    mask: AtomicU64,
}

impl Kept {
    const fn none() -> Kept {
        Kept {
            handler: AtomicUsize::new(libc::SIG_DFL),
            flags: AtomicU64::new(0),
            mask: AtomicU64::new(0),
        }
    }
}

impl Theirs {
    const fn new() -> Theirs {
        Theirs {
            kept: [const { Kept::none() }; KEPT],
            set: AtomicU32::new(0),
            current: AtomicUsize::new(0),
        }
    }

    fn get(&self) -> Action {
        let Some(kept) =
            self.current.load(Ordering::Acquire).checked_sub(1).and_then(|at| self.kept.get(at))
        else {
            return DEFAULT;
        };
        Action {
            handler: kept.handler.load(Ordering::Relaxed),
            flags: kept.flags.load(Ordering::Relaxed),
            restorer: 0,
            mask: kept.mask.load(Ordering::Relaxed),
        }
    }

    /// Writes an action beside the one that counts; what `current` is when it does.
    fn write(&self, action: &Action) -> usize {
        let at = self.set.fetch_add(1, Ordering::Relaxed) as usize % KEPT;
        let kept = &self.kept[at];
        kept.handler.store(action.handler, Ordering::Relaxed);
        kept.flags.store(action.flags, Ordering::Relaxed);
        kept.mask.store(action.mask, Ordering::Relaxed);
        at + 1
    }

    fn set(&self, action: &Action) {
        self.current.store(self.write(action), Ordering::Release);
    }

    /// Sets the first one; one that was set meanwhile is later, and stays.
    fn set_first(&self, action: &Action) {
        let _ = self.current.compare_exchange(
            0,
            self.write(action),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
    }
}

fn theirs(signal: c_int) -> Option<&'static Theirs> {
    SIGNALS.iter().position(|s| *s == signal).map(|i| &THEIRS[i])
}

/// The system call: what libc puts before it may be the program's, a sanitizer's or our own.
fn set_action(signal: c_int, action: &Action) -> Action {
    let mut old = DEFAULT;
    // SAFETY: live structures as the kernel knows them.
    unsafe {
        libc::syscall(libc::SYS_rt_sigaction, signal, &raw const *action, &raw mut old, MASK_BYTES)
    };
    old
}

/// Installs the handler, once.
pub(crate) fn install() {
    if INSTALLED.load(Ordering::Acquire) || INSTALLED.swap(true, Ordering::AcqRel) {
        return;
    }
    for (signal, theirs) in SIGNALS.iter().zip(&THEIRS) {
        let ours = Action {
            handler: on_signal as *const () as usize,
            flags: (libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART) as u64 | SA_RESTORER,
            restorer: unbroken_return_from_signal as *const () as usize,
            mask: 0,
        };
        let old = set_action(*signal, &ours);
        theirs.set_first(&old);
    }
}

/// `sigaction` of the program, for signals that have our handler: `None` where it has none, and
/// libc's function is right.
///
/// # Safety
/// As `sigaction`: NULL or the caller's structures.
pub unsafe fn program_action(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> Option<c_int> {
    if !INSTALLED.load(Ordering::Acquire) {
        return None;
    }
    let theirs = theirs(signal)?;
    let before = theirs.get();
    // SAFETY: promised by the caller.
    if let Some(new) = unsafe { new.as_ref() } {
        // SAFETY: the first signals of a set are its first word.
        let mask = unsafe { *(&raw const new.sa_mask).cast::<u64>() };
        let action = Action {
            handler: new.sa_sigaction,
            flags: new.sa_flags as u32 as u64,
            restorer: 0,
            mask,
        };
        theirs.set(&action);
    }
    if !old.is_null() {
        // SAFETY: the caller's structure, which is plain data.
        unsafe {
            old.write(std::mem::zeroed());
            (*old).sa_sigaction = before.handler;
            (*old).sa_flags = (before.flags & !SA_RESTORER) as c_int;
            *(&raw mut (*old).sa_mask).cast::<u64>() = before.mask;
        }
    }
    Some(0)
}

unsafe extern "C" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's structures, during the handler.
    let (code, registers) =
        unsafe { ((*info).si_code, &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs) };
    let instruction = &mut registers[libc::REG_RIP as usize];
    if code > 0 {
        if let Some(at) = go_on(*instruction as u64) {
            *instruction = at as i64;
            return;
        }
    }
    // SAFETY: the kernel's arguments, passed on.
    unsafe { pass_on(signal, info, context, code) };
}

/// Does with a signal what the program has asked for.
///
/// # Safety
/// Called by the handler, with its arguments.
unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void, code: c_int) {
    let Some(theirs) = theirs(signal) else { return };
    let action = theirs.get();
    match action.handler {
        // Faults cannot be ignored.
        libc::SIG_IGN if code <= 0 => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            set_action(signal, &DEFAULT);
            if code <= 0 {
                // It was sent; it comes again when this returns. A fault comes again by itself.
                // SAFETY: no pointers.
                unsafe {
                    libc::syscall(
                        libc::SYS_tgkill,
                        libc::getpid(),
                        libc::syscall(libc::SYS_gettid),
                        signal,
                    )
                };
            }
        }
        handler => {
            if action.flags & libc::SA_RESETHAND as u32 as u64 != 0 {
                theirs.set(&DEFAULT);
            }
            let own = 1u64 << (signal - 1);
            let change = |how: c_int, mask: u64| {
                // SAFETY: a live word, as long as the kernel is told. The mask of before comes back
                // with the handler's end.
                unsafe {
                    libc::syscall(
                        libc::SYS_rt_sigprocmask,
                        how,
                        &raw const mask,
                        std::ptr::null::<u64>(),
                        MASK_BYTES,
                    )
                };
            };
            change(libc::SIG_BLOCK, action.mask);
            if action.flags & libc::SA_NODEFER as u64 != 0 && action.mask & own == 0 {
                change(libc::SIG_UNBLOCK, own);
            }
            type Full = unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
            // SAFETY: a function that the program gave for this; one without SA_SIGINFO looks at
            // its first argument alone.
            unsafe { std::mem::transmute::<usize, Full>(handler)(signal, info, context) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_copied_and_nothing_beside_it() {
        let source: Vec<u8> =
            (0..6000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 23) as u8).collect();
        for len in (0..700).chain([1023, 1024, 1025, 4096, 5000]) {
            let from = len % 97;
            for wide in [false, true] {
                let mut to = vec![0xee; len + 32];
                let function = if wide && is_x86_feature_detected!("avx512f") {
                    unbroken_copy_wide
                } else {
                    unbroken_copy
                };
                let (target, source_at) = (to[16..].as_mut_ptr(), source[from..].as_ptr());
                // SAFETY: both vectors have as many bytes.
                let left = unsafe { function(target, source_at, len) };
                assert_eq!(left, 0);
                assert_eq!(to[16..16 + len], source[from..from + len], "{len} bytes");
                assert!(to[..16].iter().chain(&to[16 + len..]).all(|b| *b == 0xee), "{len} bytes");
            }
        }
    }

    #[test]
    fn an_action_is_what_was_set_last_however_often() {
        let theirs = Theirs::new();
        assert_eq!(theirs.get().handler, libc::SIG_DFL);
        let action =
            |k: usize| Action { handler: 2 * k, flags: k as u64, restorer: 0, mask: !(k as u64) };
        theirs.set_first(&action(7));
        theirs.set_first(&action(8));
        assert_eq!(theirs.get().handler, 14);
        for k in 1..1000 {
            theirs.set(&action(k));
            let got = theirs.get();
            assert_eq!((got.handler, got.flags, got.mask), (2 * k, k as u64, !(k as u64)));
        }
    }

    #[test]
    fn a_fault_is_an_error_at_either_side() {
        install();
        let page = 4096;
        // SAFETY: a mapping of our own, of which the second page is taken away.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(
                std::ptr::null_mut(),
                2 * page,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            );
            libc::mprotect(at.byte_add(page), page, libc::PROT_NONE);
            at.cast::<u8>()
        };
        let mut other = vec![0u8; 2 * page];
        for len in [1, 2, 3, 4, 7, 8, 15, 16, 17, 63, 64, 100, 255, 256, 257, 1024, 4096] {
            for into in 1..=len.min(9) {
                // SAFETY: the range ends inside of the protected page.
                unsafe {
                    let start = at.add(page + into - len);
                    assert_eq!(copy(start, other.as_mut_ptr(), len), Err(Fault), "{len} bytes");
                    assert_eq!(copy(other.as_ptr(), start, len), Err(Fault), "{len} bytes");
                    assert_eq!(
                        copy(start.sub(into), other.as_mut_ptr(), len),
                        Ok(()),
                        "{len} bytes"
                    );
                }
            }
        }
        // SAFETY: as above; the word lies in the protected page.
        unsafe {
            assert_eq!(fetch_add(at.add(page).cast(), 1), Err(Fault));
            assert_eq!(compare_swap(at.add(page).cast(), 0, 1), Err(Fault));
            assert_eq!((fetch_add(at.cast(), 3), fetch_add(at.cast(), 1)), (Ok(0), Ok(3)));
            assert_eq!(
                (compare_swap(at.cast(), 4, 9), compare_swap(at.cast(), 4, 1)),
                (Ok(4), Ok(9))
            );
            assert_eq!(touch(at as u64, page as u64, 4096, true), Ok(()));
            assert_eq!(touch(at as u64, 2 * page as u64, 4096, false), Err(Fault));
            libc::munmap(at.cast(), 2 * page);
        }
    }
}
