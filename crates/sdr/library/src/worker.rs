//! Where the work of a context is done.
//!
//! A worker polls its channel: that brings completions into bitmaps and packets to queue pairs, and
//! says when it must be polled again at the latest. [`CpuWorkers`] has a thread for each channel,
//! which polls while there is work and a little longer, and then sleeps until a completion, a kick
//! or that time. A processor on the NIC would poll in the same way beside its queues;
//! [`Workers::start`] is where it is put to work. What is long, and nobody waits for at once, is
//! handed to [`Workers::aside`].
//!
//! Who gives threads of his own needs nothing but what is public here: [`CpuWorkers`] uses no more.
//! A thread that only polls calls [`ChannelWork::poll`] again and again. One that sleeps does what
//! is at [`Kick`].

use crate::aside::Pool;
use crate::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use unbroken_verbs::EventFd;

/// What a poll of a channel found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polled {
    /// There was something to do: there is probably more.
    pub busy: bool,
    /// The channel has to be polled again after this time, though nothing comes; `None`: only what
    /// comes brings work.
    pub next: Option<Duration>,
}

/// The work of one channel of a context: its completions, and the packets that it has to send.
/// [`Workers::start`] is given it, and polls it.
pub trait ChannelWork: Send + Sync {
    /// Does what there is to do now. One thread at a time.
    fn poll(&self) -> Polled;
    /// Completions from now on raise the descriptor of [`ChannelWork::events`].
    fn arm(&self);
    /// Readable when there are completions. None: the NIC has none, and is polled.
    fn events(&self) -> Option<RawFd>;
    /// Takes the events that wait.
    fn drain(&self);
    /// What others wake the worker by.
    fn kick(&self) -> &Kick;
}

/// Work that nobody waits for at once. One that is dropped without being called is done by its
/// drop.
pub type Job = Box<dyn FnOnce() + Send>;

/// Puts channels to work. Implement it to run them on threads or devices of your own, and give it
/// to [`crate::ContextOptions`].
pub trait Workers: Send + Sync {
    /// Begins to poll a channel, until what is given back is dropped.
    ///
    /// # Errors
    /// Where it cannot be started.
    fn start(&self, channel: u8, work: Arc<dyn ChannelWork>) -> Result<Running>;

    /// How many jobs may be done aside at once. 0, unless you say otherwise: whoever has a job does
    /// it.
    fn spare(&self) -> usize {
        0
    }

    /// Has a job done aside, on another thread than those that poll channels: a poll must not wait
    /// for it. It is called within polls, so it does not block, either.
    ///
    /// # Errors
    /// The job, where nobody takes it now: the caller does it.
    fn aside(&self, job: Job) -> std::result::Result<(), Job> {
        Err(job)
    }
}

/// A worker that runs. Dropping it ends the worker: its channel is not polled any more then.
pub struct Running(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Running {
    /// `end` is called once, when this is dropped. It stops the worker and waits for its end.
    pub fn new(end: impl FnOnce() + Send + 'static) -> Running {
        Running(Mutex::new(Some(Box::new(end))))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let end = crate::lock(&self.0).take();
        if let Some(end) = end {
            end();
        }
    }
}

/// Wakes a worker that sleeps. A worker goes to sleep like this, so that it sleeps through nothing:
///
/// 1. [`Kick::will_sleep`], and [`ChannelWork::arm`]: from now on a kick and a completion raise a
///    descriptor;
/// 2. one more [`ChannelWork::poll`], for what came before;
/// 3. if it was not busy, it waits until this or [`ChannelWork::events`] is readable, for
///    [`Polled::next`] at most;
/// 4. [`Kick::is_awake`], and [`ChannelWork::drain`].
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
            self.wake();
        }
    }

    /// Makes it readable, whether or not the worker sleeps: to end it, say.
    pub fn wake(&self) {
        self.fd.signal();
    }

    /// The worker is about to sleep: kicks make it readable from now on.
    pub fn will_sleep(&self) {
        self.sleeping.store(true, Ordering::SeqCst);
    }

    /// The worker has slept: kicks cost nothing again, and it is not readable any more.
    pub fn is_awake(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
        let _ = self.fd.take();
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A thread for each channel, and some for what is done aside.
pub struct CpuWorkers(Pool);

/// Threads for what is done aside, at most.
const MOST_ASIDE: usize = 4;

impl CpuWorkers {
    /// With so many threads at most for what is done aside; 0: whoever has such a job does it.
    pub fn new(aside: usize) -> CpuWorkers {
        CpuWorkers(Pool::new(aside))
    }
}

impl Default for CpuWorkers {
    /// All cores but one may do what is done aside, up to four.
    fn default() -> CpuWorkers {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        CpuWorkers::new((cores - 1).min(MOST_ASIDE))
    }
}

/// A thread polls so long after its last work before it sleeps.
const POLL_ON: Duration = Duration::from_micros(50);
/// It sleeps no longer than this.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

impl Workers for CpuWorkers {
    fn start(&self, channel: u8, work: Arc<dyn ChannelWork>) -> Result<Running> {
        let stop = Arc::new(AtomicBool::new(false));
        let (of_thread, stopped) = (work.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name(format!("sdr{channel}"))
            .spawn(move || run(&*of_thread, &stopped))
            .map_err(|e| Error::wrong(format!("no thread for channel {channel}: {e}")))?;
        Ok(Running::new(move || {
            stop.store(true, Ordering::Release);
            work.kick().wake();
            // It panics only where this library is wrong, and has said so by then.
            let _ = thread.join();
        }))
    }

    fn spare(&self) -> usize {
        self.0.most()
    }

    fn aside(&self, job: Job) -> std::result::Result<(), Job> {
        self.0.run(job)
    }
}

fn run(work: &dyn ChannelWork, stop: &AtomicBool) {
    let mut last = Instant::now();
    while !stop.load(Ordering::Acquire) {
        if work.poll().busy {
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
fn sleep(work: &dyn ChannelWork, stop: &AtomicBool) {
    let kick = work.kick();
    kick.will_sleep();
    work.arm();
    let Polled { busy, next } = work.poll();
    if !busy && !stop.load(Ordering::Acquire) {
        let most = next.map_or(LONGEST_SLEEP, |next| next.min(LONGEST_SLEEP));
        wait([Some(kick.as_fd().as_raw_fd()), work.events()], most);
    }
    kick.is_awake();
    work.drain();
}

fn wait(fds: [Option<RawFd>; 2], most: Duration) {
    // poll ignores negative descriptors.
    let mut fds =
        fds.map(|fd| libc::pollfd { fd: fd.unwrap_or(-1), events: libc::POLLIN, revents: 0 });
    let time =
        libc::timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    // SAFETY: a live array and its length, a live time, no signal mask. An error (a signal) is an
    // early wake-up.
    unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &raw const time, std::ptr::null()) };
}
