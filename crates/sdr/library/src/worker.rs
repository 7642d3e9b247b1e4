//! Where the work of a context's channels is done.
//!
//! A worker has turns: it brings completions into bitmaps and packets to queue pairs, and says when
//! it wants its next turn at the latest. [`CpuWorkers`] has a thread for each channel, which polls
//! while there is work and a little longer, and then sleeps until a completion, a kick or that
//! time. A processor on the NIC would run the same turns beside its queues; [`Workers::start`] is
//! where it is put to work.

use crate::clock::now_us;
use crate::{Error, Result};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use unbroken_verbs::EventFd;

/// The work of one channel.
pub trait Turn: Send + Sync {
    /// Does what there is to do; whether there was anything, and when there will be at the latest
    /// (µs of the SDK's clock).
    fn turn(&self) -> (bool, Option<u64>);
    /// Completions from now on raise the descriptor of [`Turn::events`].
    fn arm(&self);
    /// Readable when there are completions. None: the NIC has none, and is polled.
    fn events(&self) -> Option<RawFd>;
    /// Takes the events that wait.
    fn drain(&self);
    /// What others wake the worker by.
    fn kick(&self) -> &Kick;
}

/// Puts channels to work.
pub trait Workers: Send + Sync {
    /// Begins to give a channel its turns, until what is given back is dropped.
    ///
    /// # Errors
    /// Where it cannot be started.
    fn start(&self, channel: u8, work: Arc<dyn Turn>) -> Result<Running>;
}

/// A worker that runs. Dropping it stops the worker and waits for its end.
pub struct Running {
    stop: Arc<AtomicBool>,
    work: Arc<dyn Turn>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.work.kick().always();
        if let Some(thread) = self.thread.take() {
            // It panics only where this library is wrong, and has said so by then.
            let _ = thread.join();
        }
    }
}

/// Wakes a worker that sleeps.
pub struct Kick {
    sleeping: AtomicBool,
    fd: EventFd,
}

impl Kick {
    pub(crate) fn new() -> Result<Kick> {
        Ok(Kick { sleeping: AtomicBool::new(false), fd: EventFd::new(false, true)? })
    }

    /// There is work. Costs a system call only where the worker sleeps.
    pub fn kick(&self) {
        if self.sleeping.load(Ordering::SeqCst) {
            self.always();
        }
    }

    fn always(&self) {
        self.fd.signal();
    }
}

/// A thread for each channel.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuWorkers;

/// A thread polls so long after its last work before it sleeps.
const POLL_ON: Duration = Duration::from_micros(50);
/// It sleeps no longer than this.
const LONGEST_SLEEP_US: u64 = 1_000_000;

impl Workers for CpuWorkers {
    fn start(&self, channel: u8, work: Arc<dyn Turn>) -> Result<Running> {
        let stop = Arc::new(AtomicBool::new(false));
        let (of_thread, stopped) = (work.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name(format!("sdr{channel}"))
            .spawn(move || run(&*of_thread, &stopped))
            .map_err(|e| Error::wrong(format!("no thread for channel {channel}: {e}")))?;
        Ok(Running { stop, work, thread: Some(thread) })
    }
}

fn run(work: &dyn Turn, stop: &AtomicBool) {
    let mut last = Instant::now();
    while !stop.load(Ordering::Acquire) {
        let (busy, _) = work.turn();
        if busy {
            last = Instant::now();
        } else if last.elapsed() < POLL_ON {
            std::thread::yield_now();
        } else {
            sleep(work, stop);
        }
    }
}

/// Sleeps until there is work. What comes between the last look and the sleep raises an event, or a
/// kick.
fn sleep(work: &dyn Turn, stop: &AtomicBool) {
    let kick = work.kick();
    kick.sleeping.store(true, Ordering::SeqCst);
    work.arm();
    let (busy, next_us) = work.turn();
    if !busy && !stop.load(Ordering::Acquire) {
        let wait_us = next_us.map_or(u64::MAX, |at_us| at_us.saturating_sub(now_us()));
        wait([Some(kick.fd.as_raw_fd()), work.events()], wait_us.min(LONGEST_SLEEP_US));
    }
    kick.sleeping.store(false, Ordering::SeqCst);
    let _ = kick.fd.take();
    work.drain();
}

fn wait(fds: [Option<RawFd>; 2], wait_us: u64) {
    // poll ignores negative descriptors.
    let mut fds =
        fds.map(|fd| libc::pollfd { fd: fd.unwrap_or(-1), events: libc::POLLIN, revents: 0 });
    let time = libc::timespec {
        tv_sec: (wait_us / 1_000_000) as i64,
        tv_nsec: (wait_us % 1_000_000 * 1000) as i64,
    };
    // SAFETY: a live array and its length, a live time, no signal mask. An error (a signal) is an
    // early wake-up.
    unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &raw const time, std::ptr::null()) };
}
