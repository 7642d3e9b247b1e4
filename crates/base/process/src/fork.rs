//! What a forked child does with its parent's NICs: nothing, and nothing that could hurt them.
//!
//! The child has copies of the parent's sockets, which would keep the parent's slots taken after
//! its death, and locks that a thread of the parent may have held at the fork. So it closes the
//! sockets at once, touches no lock, and every verb on what its parent made answers EIO. It may
//! open NICs of its own: whatever is made remembers how many forks lie before it
//! ([`ProcessGuard`]), and what there is once in a process is made anew in each ([`PerProcess`]).

use std::cell::UnsafeCell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use thiserror::Error;

/// Sockets that a child closes: five for each port of 64 NICs, and as many again for those that are
/// closed and opened meanwhile.
const SOCKETS: usize = 1280;

/// Forks between the first process and this one, since the handlers are there.
static FORKS: AtomicU32 = AtomicU32::new(0);
static FDS: [AtomicI32; SOCKETS] = [const { AtomicI32::new(-1) }; SOCKETS];
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// The process that something belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessGuard(u32);

impl ProcessGuard {
    /// This process.
    pub fn now() -> ProcessGuard {
        install();
        ProcessGuard(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is another process, a forked child of that one.
    #[inline]
    pub fn elsewhere(self) -> bool {
        self.0 != FORKS.load(Ordering::Relaxed)
    }

    /// An error in a forked child of that process.
    #[inline]
    pub fn check(self) -> Result<(), Forked> {
        match self.elsewhere() {
            false => Ok(()),
            true => Err(Forked),
        }
    }
}

/// A forked child used what its parent made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error(
    "this process was forked from the one that made the object: open the device anew after the fork"
)]
pub struct Forked;

/// What there is once in each process. A forked child makes its own, and never touches its
/// parent's, whose locks may be held.
pub struct PerProcess<T>(AtomicPtr<(ProcessGuard, T)>);

impl<T: Default + Sync> PerProcess<T> {
    /// Not made yet.
    #[allow(clippy::new_without_default)]
    pub const fn new() -> PerProcess<T> {
        PerProcess(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// This process's, which lives as long as the process.
    pub fn get(&self) -> &T {
        let here = ProcessGuard::now();
        loop {
            let found = self.0.load(Ordering::Acquire);
            // SAFETY: NULL, or what was leaked below.
            let made = unsafe { found.as_ref() };
            if let Some((_, value)) = made.filter(|(process, _)| *process == here) {
                return value;
            }
            let fresh = Box::into_raw(Box::new((here, T::default())));
            if self.0.compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: made above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }
}

/// Held by what no fork may come amidst: the making of a process's NICs and directory, which uses
/// tables of libraries with locks.
static CALM: Mutex<()> = Mutex::new(());

/// The guard of the thread that forks.
struct Forking(UnsafeCell<Option<MutexGuard<'static, ()>>>);
// SAFETY: only the thread that holds `CALM` touches it.
unsafe impl Sync for Forking {}
static FORKING: Forking = Forking(UnsafeCell::new(None));

/// Runs something while no other thread forks; it must not fork itself.
pub fn undisturbed<T>(run: impl FnOnce() -> T) -> T {
    install();
    let _calm = CALM.lock().unwrap_or_else(PoisonError::into_inner);
    run()
}

/// Installs the handlers, once. A process that is forked while another thread does so for the first
/// time has made nothing yet.
fn install() {
    if !INSTALLED.load(Ordering::Relaxed) && !INSTALLED.swap(true, Ordering::Relaxed) {
        // SAFETY: the handler of the child uses atomics, close(2), and a lock that the same thread
        // holds; the others that lock.
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    }
}

unsafe extern "C" fn before() {
    let calm = CALM.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the lock is held.
    unsafe { *FORKING.0.get() = Some(calm) };
}

unsafe extern "C" fn in_parent() {
    // SAFETY: the lock is held since `before`, by this thread.
    drop(unsafe { (*FORKING.0.get()).take() });
}

unsafe extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for slot in &FDS {
        let fd = slot.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            // SAFETY: the descriptor is this process's copy; its owner is never used or dropped in
            // a child (see `ProcessGuard`).
            unsafe { libc::close(fd) };
        }
    }
    // SAFETY: the lock is held since `before`, by this thread, which is the only one here.
    drop(unsafe { (*FORKING.0.get()).take() });
}

/// Names a descriptor that a forked child closes at once.
pub fn close_in_child(fd: RawFd) {
    for slot in &FDS {
        if slot.compare_exchange(-1, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

/// Takes back [`close_in_child`], before the descriptor is closed here.
pub fn keep_in_child(fd: RawFd) {
    for slot in &FDS {
        if slot.compare_exchange(fd, -1, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}
