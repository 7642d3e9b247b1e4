//! Control verbs of a device that nobody may wait for: a thread of the device carries them out.
//!
//! A NIC that fails may go on answering its data path and its driver, and answer no command for a
//! minute, since its firmware hangs. So what a switch asks of the NIC that it leaves (ERR for the
//! QP, and the QP's end) is left to this thread, and a switch waits for an answer only as long as
//! the device answers at all ([`Commands::is_stuck`]).
//!
//! ```text
//! put ──> waiting ──> under way ──> done
//!                         └── for STUCK_US: the device is stuck, until it answers
//! ```
//!
//! Bounds: one thread starts with the first command, another only when a command has been answered
//! and more wait, [`MAX_THREADS`] at most; so a device that hangs has one command. Threads end when
//! nothing has come for [`IDLE`]. What waits is bounded by the QPs and regions of the program.

use crate::{lock, Host};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A command that has no answer after this time is not waited for. RNICs take 0.1 to several ms.
const STUCK_US: u64 = 50_000;
/// Commands that a device that answers has at a time.
const MAX_THREADS: usize = 4;
/// A thread without a command for so long ends.
const IDLE: Duration = Duration::from_millis(200);

/// What is to be done, once.
pub(crate) type Command = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Command>,
    /// Since when each command is under way.
    under_way: Vec<u64>,
    threads: usize,
    idle: usize,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    news: Condvar,
}

impl Shared {
    /// Carries out the next command. False: there is none.
    fn next(&self, host: Host) -> bool {
        let since_us = (host.now_us)();
        let mut q = lock(&self.queue);
        let Some(command) = q.waiting.pop_front() else { return false };
        q.under_way.push(since_us);
        drop(q);
        let _under_way = UnderWay { shared: self, since_us };
        // A defect in one must not leave the others undone.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(command));
        true
    }
}

/// A command that is under way since then.
struct UnderWay<'a> {
    shared: &'a Shared,
    since_us: u64,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut q = lock(&self.shared.queue);
        let at = q.under_way.iter().position(|us| *us == self.since_us);
        at.map(|at| q.under_way.swap_remove(at));
    }
}

/// The commands of a device, as long as it is open.
pub(crate) struct Commands {
    shared: Arc<Shared>,
    host: Host,
    name: String,
}

/// An object of the device that ends when its last owner lets go of it, whoever that is: a thread
/// that polls must not wait for the device.
pub(crate) struct EndsLater<T: ?Sized + Send + Sync + 'static> {
    object: Option<Arc<T>>,
    commands: Arc<Commands>,
}

impl<T: ?Sized + Send + Sync + 'static> EndsLater<T> {
    pub(crate) fn new(object: Arc<T>, commands: &Arc<Commands>) -> EndsLater<T> {
        EndsLater { object: Some(object), commands: commands.clone() }
    }
}

impl<T: ?Sized + Send + Sync + 'static> std::ops::Deref for EndsLater<T> {
    type Target = Arc<T>;

    #[inline(always)]
    fn deref(&self) -> &Arc<T> {
        self.object.as_ref().expect("it is there until this is dropped")
    }
}

impl<T: ?Sized + Send + Sync + 'static> Drop for EndsLater<T> {
    fn drop(&mut self) {
        if let Some(object) = self.object.take() {
            self.commands.put(Box::new(move || drop(object)));
        }
    }
}

impl Commands {
    pub(crate) fn new(device: &str, host: Host) -> Commands {
        Commands { shared: Arc::default(), host, name: format!("unb-c-{device}") }
    }

    /// Has a command carried out soon. Where no thread can be started it is done now.
    pub(crate) fn put(&self, command: Command) {
        let mut q = lock(&self.shared.queue);
        q.waiting.push_back(command);
        let first = q.threads == 0;
        q.threads += usize::from(first);
        drop(q);
        if !first {
            self.shared.news.notify_one();
        } else if !self.start() {
            lock(&self.shared.queue).threads -= 1;
            while self.shared.next(self.host) {}
        }
    }

    /// Whether the device has not answered a command for so long that nobody should wait for it.
    pub(crate) fn is_stuck(&self) -> bool {
        let first_us = lock(&self.shared.queue).under_way.iter().min().copied();
        first_us.is_some_and(|us| (self.host.now_us)().saturating_sub(us) >= STUCK_US)
    }

    /// The caller is in a command itself, which takes no longer than others, until that is dropped.
    pub(crate) fn watch(&self) -> impl Drop + '_ {
        let since_us = (self.host.now_us)();
        lock(&self.shared.queue).under_way.push(since_us);
        UnderWay { shared: &self.shared, since_us }
    }

    /// How many commands have no answer yet, those included that the device has not been given.
    pub(crate) fn unanswered(&self) -> usize {
        let q = lock(&self.shared.queue);
        q.waiting.len() + q.under_way.len()
    }

    /// Carries out a command here, unless the device is stuck: then it is done when that ends.
    pub(crate) fn now_or_later(&self, command: impl FnOnce() + Send + 'static) {
        match self.is_stuck() {
            true => self.put(Box::new(command)),
            false => command(),
        }
    }

    /// Starts the first thread, which is counted already.
    fn start(&self) -> bool {
        let (shared, host, name) = (self.shared.clone(), self.host, self.name.clone());
        start(shared, host, name)
    }
}

fn start(shared: Arc<Shared>, host: Host, name: String) -> bool {
    let own_name = name.clone();
    let body = move || {
        run(&shared.clone(), host, || start(shared.clone(), host, own_name.clone()));
    };
    (host.spawn)(&name, Box::new(body)).is_ok()
}

/// Carries out what waits, and starts another thread by `more` where commands are answered and more
/// wait than threads. Ends when nothing comes.
fn run(shared: &Shared, host: Host, more: impl Fn() -> bool) {
    loop {
        if !shared.next(host) {
            let mut q = lock(&shared.queue);
            q.idle += 1;
            let idle = |q: &mut Queue| q.waiting.is_empty();
            let waited = shared.news.wait_timeout_while(q, IDLE, idle);
            q = waited.unwrap_or_else(PoisonError::into_inner).0;
            q.idle -= 1;
            if q.waiting.is_empty() {
                q.threads -= 1;
                return;
            }
            continue;
        }
        let mut q = lock(&shared.queue);
        if q.waiting.len() > q.idle && q.threads < MAX_THREADS {
            q.threads += 1;
            drop(q);
            if !more() {
                lock(&shared.queue).threads -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
    use std::sync::mpsc;
    use std::time::Instant;

    /// The clock of these tests.
    static NOW_US: AtomicU64 = AtomicU64::new(0);
    const PATIENCE: Duration = Duration::from_secs(20);

    fn spawn(name: &str, body: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
        std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
    }

    fn count(done: &AtomicUsize) {
        done.fetch_add(1, SeqCst);
    }

    fn wait(what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < PATIENCE, "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_device_that_does_not_answer_has_one_command_and_is_stuck() {
        let host = Host { spawn, now_us: || NOW_US.load(SeqCst) };
        let commands = Commands::new("test", host);
        let done = Arc::new(AtomicUsize::new(0));
        let (answer, hangs) = mpsc::channel::<()>();
        commands.put(Box::new(move || hangs.recv().unwrap_or_default()));
        let threads = || lock(&commands.shared.queue).threads;
        wait("the device has it", || lock(&commands.shared.queue).under_way.len() == 1);
        for _ in 0..10 {
            let done = done.clone();
            commands.put(Box::new(move || count(&done)));
        }
        assert!(!commands.is_stuck(), "it may yet answer");
        NOW_US.fetch_add(STUCK_US, SeqCst);
        assert!(commands.is_stuck());
        assert_eq!((threads(), commands.unanswered(), done.load(SeqCst)), (1, 11, 0));
        // What is not urgent is not waited for either.
        let later = done.clone();
        commands.now_or_later(move || count(&later));
        assert_eq!(done.load(SeqCst), 0);
        answer.send(()).unwrap();
        wait("all are done", || done.load(SeqCst) == 11 && commands.unanswered() == 0);
        assert!(!commands.is_stuck());
        wait("no thread is left", || threads() == 0);
    }

    #[test]
    fn without_a_thread_a_command_is_carried_out_at_once() {
        let spawn = |_: &str, _: Box<dyn FnOnce() + Send>| Err(std::io::Error::other("none"));
        let commands = Commands::new("test", Host { spawn, now_us: || 1 });
        let done = Arc::new(AtomicUsize::new(0));
        for n in 1..4 {
            let own = done.clone();
            commands.put(Box::new(move || count(&own)));
            assert_eq!((done.load(SeqCst), commands.unanswered()), (n, 0));
        }
    }
}
