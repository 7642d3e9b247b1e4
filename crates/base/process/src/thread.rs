//! Threads that serve a program from within it.
//!
//! They ask for a short time slice, which EEVDF kernels grant to anyone: a thread that asks for
//! little is run soon after it wakes, also on a core where an application spins.

use std::io;
use std::sync::{mpsc, Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Time slice asked for, in nanoseconds: the least that kernels grant.
const SLICE_NS: u64 = 100_000;
/// Nine tenths of a core beside one thread of a program.
const PRECEDENCE_NICE: i32 = -10;

/// Starts a thread that runs at once when it is woken, and takes no signals: they are the
/// application's. Returns when it runs, and has the memory that the C library makes for a new
/// thread.
///
/// Open MPI and UCX overwrite the first bytes of libc's `mmap`, `munmap`, `mremap` and `madvise`
/// while a program starts, without stopping other threads: one that is inside of such a function
/// returns into the middle of another instruction. So a verbs call that opens a device leaves no
/// thread behind that is still in one: everything that opening needs is done in the call, threads
/// are waited for, and `madvise`, which lasts, goes past the C library.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // The kernel keeps 15 bytes of a name.
    let name: String = name.chars().take(15).collect();
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
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        ask_for_promptness();
        // Whoever started this thread waits for this.
        let _ = runs.send(());
        body();
    });
    if thread.is_ok() {
        // An error says that the thread ended before it could say so, which its owner sees when it
        // joins it.
        let _ = until_it_runs.recv();
    }
    // SAFETY: restores the mask that was read above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    thread
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
    let wait = |(place, thread): (Arc<Place<T, F>>, io::Result<JoinHandle<()>>)| {
        match thread {
            // One that has panicked has left nothing.
            Ok(thread) => drop(thread.join()),
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
