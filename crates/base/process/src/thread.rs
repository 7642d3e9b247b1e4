//! Threads that serve a program from within it.
//!
//! They ask for a short time slice, which EEVDF kernels grant to anyone: a thread that asks for
//! little is run soon after it wakes, also on a core where an application spins.

use crate::mapping;
use std::io;
use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::{mpsc, Arc, Mutex, MutexGuard, PoisonError};

/// Time slice asked for, in nanoseconds: the least that kernels grant.
const SLICE_NS: u64 = 100_000;
/// Nine tenths of a core beside one thread of a program.
const PRECEDENCE_NICE: i32 = -10;

/// The stack of a thread, as the standard library has it.
const STACK_BYTES: usize = 2 << 20;

/// A thread of [`spawn`]. One that is dropped goes on; its stack is given back when it has ended and
/// another is started.
#[derive(Debug)]
pub struct Thread {
    id: libc::pthread_t,
    /// The process that it belongs to.
    pid: u32,
    stack: Option<NonNull<u8>>,
    joined: bool,
}

// SAFETY: an identifier, and the memory of the thread itself, which nobody touches before it has
// ended.
unsafe impl Send for Thread {}
// SAFETY: as above.
unsafe impl Sync for Thread {}

/// Threads that were dropped, until they have ended.
static LEFT: Mutex<Vec<Thread>> = Mutex::new(Vec::new());

impl Thread {
    /// Waits until it has ended. After a fork the thread is the parent's, and nothing is waited for.
    pub fn join(mut self) {
        self.joined = true;
        // SAFETY: a thread of this process that was not waited for before.
        if self.is_ours() && unsafe { libc::pthread_join(self.id, std::ptr::null_mut()) } == 0 {
            self.give_stack_back();
        }
    }

    /// Whether it is the caller.
    pub fn is_current(&self) -> bool {
        // SAFETY: no pointers.
        unsafe { libc::pthread_equal(self.id, libc::pthread_self()) != 0 }
    }

    fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    fn give_stack_back(&mut self) {
        if let Some(stack) = self.stack.take() {
            // SAFETY: the thread has ended, and the stack was mapped with so many bytes.
            unsafe { mapping::unmap(stack, STACK_BYTES) };
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        if self.joined || !self.is_ours() {
            return;
        }
        let left = Thread { stack: self.stack.take(), joined: true, ..*self };
        // After a fork the lock may be held by a thread that is not there: then the stack stays.
        if let Ok(mut all) = LEFT.try_lock() {
            all.push(left);
        }
    }
}

/// Gives the stacks back of those that were dropped and have ended.
fn reap() {
    // After a fork the lock may be held by a thread that is not there.
    let Ok(mut left) = LEFT.try_lock() else { return };
    left.retain_mut(|thread| {
        if !thread.is_ours() {
            return false;
        }
        // SAFETY: a thread of this process that nobody else waits for.
        let ended = unsafe { pthread_tryjoin_np(thread.id, std::ptr::null_mut()) } == 0;
        if ended {
            thread.give_stack_back();
        }
        !ended
    });
}

extern "C" {
    fn pthread_tryjoin_np(thread: libc::pthread_t, value: *mut *mut libc::c_void) -> libc::c_int;
}

/// Starts a thread that runs at once when it is woken, and takes no signals: they are the
/// application's. Returns when it runs, and has the memory that the C library makes for a new
/// thread. Its stack lies where all memory of the library does: see [`mapping`].
///
/// Open MPI and UCX overwrite the first bytes of libc's `mmap`, `munmap`, `mremap` and `madvise`
/// while a program starts, without stopping other threads: one that is inside of such a function
/// returns into the middle of another instruction. So a verbs call that opens a device leaves no
/// thread behind that is still in one: everything that opening needs is done in the call, threads
/// are waited for, and `madvise`, which lasts, goes past the C library.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<Thread> {
    reap();
    // The kernel keeps 15 bytes of a name, and a zero.
    let mut bytes = [0u8; 16];
    let kept = name.len().min(15);
    bytes[..kept].copy_from_slice(&name.as_bytes()[..kept]);
    // A thread inherits the mask: blocking before the start leaves no moment in which it could be
    // chosen for a signal. SAFETY: signal sets are plain bits, for which zero is valid; all
    // pointers are to live locals.
    let old = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        // But for those that its own accesses to registered memory raise (softnic's traps handle
        // them): blocked, they would end the process.
        libc::sigdelset(&raw mut all, libc::SIGSEGV);
        libc::sigdelset(&raw mut all, libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    };
    let (runs, until_it_runs) = mpsc::channel();
    let thread = start(Box::new(move || {
        // SAFETY: a name that ends with a zero.
        unsafe { libc::prctl(libc::PR_SET_NAME, bytes.as_ptr()) };
        ask_for_promptness();
        // Whoever started this thread waits for this.
        let _ = runs.send(());
        body();
    }));
    if thread.is_ok() {
        // An error says that the thread ended before it could say so, which its owner sees when it
        // joins it.
        let _ = until_it_runs.recv();
    }
    // SAFETY: restores the mask that was read above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    thread
}

type Body = Box<dyn FnOnce() + Send>;

/// Starts a thread on a stack of ours; where none is to be had, on one of the C library's.
fn start(body: Body) -> io::Result<Thread> {
    // A thin pointer, which goes to the thread.
    let body = Box::into_raw(Box::new(body));
    let stack = make_stack();
    let (mut id, mut errno) = (0, libc::EINVAL);
    for stack in stack.map(Some).into_iter().chain([None]) {
        // SAFETY: attributes that live as long as they are used; zero is what `init` overwrites;
        // `run` takes what `body` is, once, in the thread if there is one.
        unsafe {
            let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
            libc::pthread_attr_init(&raw mut attributes);
            match stack {
                Some(stack) => libc::pthread_attr_setstack(
                    &raw mut attributes,
                    stack.as_ptr().cast(),
                    STACK_BYTES,
                ),
                None => libc::pthread_attr_setstacksize(&raw mut attributes, STACK_BYTES),
            };
            errno = libc::pthread_create(&raw mut id, &raw const attributes, run, body.cast());
            libc::pthread_attr_destroy(&raw mut attributes);
        }
        if errno == 0 {
            return Ok(Thread { id, pid: std::process::id(), stack, joined: false });
        }
        if let Some(stack) = stack {
            // SAFETY: no thread has it.
            unsafe { mapping::unmap(stack, STACK_BYTES) };
        }
    }
    // SAFETY: no thread has taken it.
    drop(unsafe { Box::from_raw(body) });
    Err(io::Error::from_raw_os_error(errno))
}

/// A stack, whose lowest page is a guard.
fn make_stack() -> Option<NonNull<u8>> {
    let stack = mapping::map(STACK_BYTES, None).ok()?;
    // SAFETY: memory that nobody uses yet. Huge pages would make each stack two megabytes.
    unsafe {
        let (at, guard) = (stack.as_ptr(), mapping::page_bytes());
        let [advice, rights] = [libc::MADV_NOHUGEPAGE, libc::PROT_NONE].map(libc::c_long::from);
        libc::syscall(libc::SYS_madvise, at, STACK_BYTES, advice);
        libc::syscall(libc::SYS_mprotect, at, guard, rights);
    }
    Some(stack)
}

extern "C" fn run(body: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: `start` gives each thread a box of its own.
    let body = unsafe { Box::from_raw(body.cast::<Body>()) };
    // A panic ends the thread alone; the message was printed when it began.
    let _ = std::panic::catch_unwind(AssertUnwindSafe(body));
    std::ptr::null_mut()
}

/// Does each in a thread of its own, made by [`spawn`], and waits for all: nothing is left behind.
/// What has no thread, or is alone, is done by the caller. `None` for one that has panicked.
pub fn at_once<T, F>(all: impl IntoIterator<Item = F>) -> Vec<Option<T>>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    /// What is to be done, and then what came of it.
    struct Place<T, F>(Mutex<(Option<F>, Option<T>)>);
    impl<T, F: FnOnce() -> T> Place<T, F> {
        fn lock(&self) -> MutexGuard<'_, (Option<F>, Option<T>)> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        fn work(&self) {
            let body = self.lock().0.take();
            let done = body.map(|body| body());
            self.lock().1 = done;
        }
    }
    let mut all: Vec<F> = all.into_iter().collect();
    let alone = if all.len() == 1 { all.pop() } else { None };
    if let Some(body) = alone {
        return vec![Some(body())];
    }
    let threads = all.into_iter().map(|body| {
        let place = Arc::new(Place(Mutex::new((Some(body), None))));
        let of_thread = place.clone();
        (place, spawn("unb-at-once", move || of_thread.work()))
    });
    let threads: Vec<_> = threads.collect();
    let wait = |(place, thread): (Arc<Place<T, F>>, io::Result<Thread>)| {
        match thread {
            // One that has panicked has left nothing.
            Ok(thread) => thread.join(),
            Err(_) => place.work(),
        }
        let done = place.lock().1.take();
        done
    };
    threads.into_iter().map(wait).collect()
}

/// Asks for a short time slice and exact sleeps; kernels that know nothing of it refuse, and
/// nothing is lost.
fn ask_for_promptness() {
    // Sleeps end within a microsecond of the time asked for, not fifty.
    // SAFETY: no pointers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000) };
    #[repr(C)]
    struct SchedAttr {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    let size = std::mem::size_of::<SchedAttr>() as u32;
    // SAFETY: plain integers, for which zero is valid.
    let mut attr: SchedAttr = unsafe { std::mem::zeroed() };
    // SAFETY: a live struct of the size given; 0 is the calling thread.
    if unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) } != 0 {
        return;
    }
    (attr.size, attr.runtime) = (size, SLICE_NS);
    // SAFETY: a live struct that says its own size.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}

/// Asks that the calling thread be given a core before threads that never sleep; refused where the
/// process may not ask (it needs `CAP_SYS_NICE`, or a limit of niceness that allows it), and
/// nothing is lost then. For a thread that seldom runs, and for whose work everybody waits.
pub fn ask_for_precedence() {
    // SAFETY: no pointers; process 0 is the calling thread, as Linux has it.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, PRECEDENCE_NICE) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn all_is_done_at_the_same_time_and_in_its_place() {
        let meet = Arc::new(Barrier::new(4));
        let each = (0..4).map(|n| {
            let meet = meet.clone();
            move || {
                meet.wait();
                n
            }
        });
        assert_eq!(at_once(each), [Some(0), Some(1), Some(2), Some(3)]);
        let own = std::thread::current().id();
        let alone = at_once([move || std::thread::current().id() == own]);
        assert_eq!(alone, [Some(true)]);
    }

    #[test]
    fn one_that_panics_leaves_the_others() {
        let each = (0..3).map(|n| {
            move || {
                assert_ne!(n, 1, "as the test wants it");
                n
            }
        });
        assert_eq!(at_once(each), [Some(0), None, Some(2)]);
    }
}
