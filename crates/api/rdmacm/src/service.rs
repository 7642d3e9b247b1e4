//! The lock around a process's [`State`], and the thread that receives and waits.
//!
//! The thread sleeps until a datagram comes, a channel is closed, or something is due. A command
//! that makes something due earlier wakes it.

use crate::abi::{Command, Result};
use crate::channel::{errno, identify, Identity};
use crate::state::{Done, State};
use rustix::event::epoll;
use rustix::event::Timespec;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use unbroken_log::{tell, Level, Part};
use unbroken_process::{undisturbed, PerProcess};
use unbroken_runtime::now_us;
use unbroken_verbs::{duplicate, Error, EventFd};

/// Data of the two descriptors that are no channels.
const WAKE: u64 = u64::MAX;
const ARRIVALS: u64 = u64::MAX - 1;
/// At the end of the process, so long is the lock waited for.
const END_WAIT: Duration = Duration::from_millis(50);
const EVENTS: usize = 64;

/// The program's memory, which commands point to.
pub trait Memory {
    /// Reads bytes; `None` where there are none.
    fn read(&self, at: u64, len: usize) -> Option<Vec<u8>>;
    /// Writes bytes; false where they cannot be written.
    fn write(&self, at: u64, bytes: &[u8]) -> bool;
}

struct Service {
    state: Mutex<State>,
    epoll: OwnedFd,
    wake: EventFd,
    /// The thread wakes by itself at this time.
    sleeps_until_us: AtomicU64,
}

type Slot = OnceLock<std::result::Result<Service, Error>>;
static SERVICE: PerProcess<Slot> = PerProcess::new();

fn service() -> std::result::Result<&'static Service, Error> {
    SERVICE.get().get_or_init(start).as_ref().map_err(Clone::clone)
}

fn start() -> std::result::Result<Service, Error> {
    // Made before the lock against forks is taken: it takes that itself.
    let system = unbroken_nics::system()?;
    let service = undisturbed(|| Service::new(system))?;
    unbroken_process::spawn("unb-cm", || {
        // Whoever started this thread is about to put the service there.
        let until = Instant::now() + Duration::from_secs(10);
        while Instant::now() < until {
            match SERVICE.get().get() {
                Some(Ok(service)) => return service.run(),
                Some(Err(_)) => return,
                None => std::thread::yield_now(),
            }
        }
    })
    .map_err(|e| Error::os("starting a thread", &e))?;
    Ok(service)
}

/// Opens a channel, and gives a descriptor for the program: close-on-exec, blocking.
pub fn open() -> Result<OwnedFd> {
    let service = service().map_err(|e| {
        tell(Part::Verbs, Level::Warn, format_args!("rdma_cm: {e}"));
        libc::ENODEV
    })?;
    let (number, theirs) = service.lock().open_channel().map_err(|e| errno(&e))?;
    let state = service.lock();
    if let Some(ours) = state.channel_fd(number) {
        // Reported whatever is asked for: that the other end is closed.
        let flags = epoll::EventFlags::RDHUP;
        let data = epoll::EventData::new_u64(number);
        epoll::add(&service.epoll, ours, data, flags).map_err(|e| e.raw_os_error())?;
    }
    Ok(theirs)
}

/// Whether a descriptor is a channel, of this process or one that it was forked from.
pub fn is_channel(fd: BorrowedFd<'_>) -> bool {
    identify(fd).is_some()
}

/// What became of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It is done.
    Done,
    /// It asks for an event and there is none: it is to be tried again when the descriptor is
    /// readable. The caller waits, so that a thread that is cancelled meanwhile has nothing of
    /// ours on its stack.
    Wait,
}

/// Carries out a command that the program writes to `fd`; `None`: that is no channel.
pub fn command(fd: BorrowedFd<'_>, bytes: &[u8], memory: &dyn Memory) -> Option<Result<Outcome>> {
    match identify(fd)? {
        Identity::Own(number) => Some(carry_out(fd, number, bytes, memory)),
        Identity::Inherited => {
            tell(
                Part::Verbs,
                Level::Warn,
                format_args!("rdma_cm: the channel was opened before the process was forked"),
            );
            Some(Err(libc::EIO))
        }
    }
}

fn carry_out(
    fd: BorrowedFd<'_>,
    number: u64,
    bytes: &[u8],
    memory: &dyn Memory,
) -> Result<Outcome> {
    let service = service().map_err(|_| libc::ENODEV)?;
    let command = Command::parse(bytes)?;
    let option = match &command {
        Command::SetOption { value: (at, len), .. } if *len <= 4096 => {
            Some(memory.read(*at, *len).ok_or(libc::EFAULT)?)
        }
        _ => None,
    };
    let other = match &command {
        Command::MigrateId { from_fd, .. } => own_channel(*from_fd),
        _ => None,
    };
    let done =
        service.with(|state| state.carry_out(number, fd, &command, option.as_deref(), other))?;
    match done {
        Done::Nothing => Ok(Outcome::Done),
        Done::Wait => Ok(Outcome::Wait),
        Done::Answer(out, answer) => {
            let len = answer.len().min(out.room);
            match out.at != 0 && memory.write(out.at, &answer[..len]) {
                true => Ok(Outcome::Done),
                false => Err(libc::EFAULT),
            }
        }
    }
}

/// The number of the channel that is open there.
fn own_channel(fd: RawFd) -> Option<u64> {
    // A copy, as the program may close its own meanwhile.
    let copy = duplicate(fd).ok()?;
    match identify(copy.as_fd())? {
        Identity::Own(number) => Some(number),
        Identity::Inherited => None,
    }
}

/// The process ends: peers hear that its connections do.
pub fn finish() {
    let Some(Ok(service)) = SERVICE.get().get() else { return };
    let until = Instant::now() + END_WAIT;
    while Instant::now() < until {
        if let Ok(mut state) = service.state.try_lock() {
            return state.finish();
        }
        std::thread::yield_now();
    }
}

impl Service {
    fn new(system: &'static unbroken_shift::api::System) -> std::result::Result<Service, Error> {
        let os = |e: rustix::io::Errno| Error::os("epoll", &e.into());
        let state = State::new(system)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(os)?;
        let wake = EventFd::new(false, true)?;
        let flags = epoll::EventFlags::IN;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), flags).map_err(os)?;
        let arrivals = epoll::EventData::new_u64(ARRIVALS);
        epoll::add(&epoll, state.arrivals(), arrivals, flags).map_err(os)?;
        let sleeps_until_us = AtomicU64::new(0);
        Ok(Service { state: Mutex::new(state), epoll, wake, sleeps_until_us })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something to the state, and what follows from that.
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let result = act(&mut state);
        state.settle();
        let due_us = state.due_us();
        drop(state);
        if due_us < self.sleeps_until_us.load(Ordering::Acquire) {
            self.wake.signal();
        }
        result
    }

    fn run(&self) {
        loop {
            let now = now_us();
            let due_us = self.lock().due_us();
            self.sleeps_until_us.store(due_us, Ordering::Release);
            // Looked at once more: a command may have come between.
            let due_us = due_us.min(self.lock().due_us());
            let events = self.sleep(due_us.saturating_sub(now));
            self.sleeps_until_us.store(0, Ordering::Release);
            if events.contains(&WAKE) {
                let _ = self.wake.take();
            }
            let mut state = self.lock();
            for number in events.iter().filter(|data| **data < ARRIVALS) {
                if let Some(ours) = state.channel_fd(*number) {
                    let _ = epoll::delete(&self.epoll, ours);
                }
                state.close_channel(*number);
            }
            if events.contains(&ARRIVALS) {
                state.receive();
            }
            state.tick();
            state.settle();
        }
    }

    /// Waits at most so long; gives what has happened.
    fn sleep(&self, us: u64) -> Vec<u64> {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; EVENTS];
        let timeout =
            Timespec { tv_sec: (us / 1_000_000) as i64, tv_nsec: (us % 1_000_000 * 1000) as i64 };
        let n = epoll::wait(&self.epoll, &mut events[..], Some(&timeout)).unwrap_or(0);
        events[..n].iter().map(|event| event.data.u64()).collect()
    }
}
