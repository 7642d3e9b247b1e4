//! Workers of a program's own, made of what is public: threads that poll, threads that sleep, and
//! somebody who encodes when he is told to.

mod common;

use common::*;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use unbroken_sdr::{
    Attr, ChannelWork, Choice, Code, CpuWorkers, Error, Job, Memory, Polled, Qp, QpOptions,
    Reliable, ReliableOptions, Running, Scheme, Workers,
};

/// How threads of ours wait for work.
#[derive(Clone, Copy, Debug)]
enum Waits {
    Polling,
    Sleeping,
}

/// A thread for each channel. Jobs wait until they are asked for.
struct Own {
    waits: Waits,
    spare: usize,
    jobs: Mutex<VecDeque<Job>>,
    turns: AtomicUsize,
    running: AtomicUsize,
}

impl Own {
    fn new(waits: Waits, spare: usize) -> Arc<Own> {
        Arc::new(Own {
            waits,
            spare,
            jobs: Mutex::default(),
            turns: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
        })
    }

    fn take(&self) -> Option<Job> {
        self.jobs.lock().unwrap().pop_front()
    }
}

/// By reference, so that the test has it, too.
struct Shared(Arc<Own>);

impl Workers for Shared {
    fn start(&self, _channel: u8, work: Arc<dyn ChannelWork>) -> Result<Running, Error> {
        let stop = Arc::new(AtomicBool::new(false));
        let own = self.0.clone();
        let (of_thread, stopped) = (work.clone(), stop.clone());
        own.running.fetch_add(1, Ordering::SeqCst);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                own.turns.fetch_add(1, Ordering::Relaxed);
                match own.waits {
                    Waits::Polling if !of_thread.poll().busy => std::thread::yield_now(),
                    Waits::Polling => {}
                    Waits::Sleeping => sleep(&*of_thread, &stopped),
                }
            }
            own.running.fetch_sub(1, Ordering::SeqCst);
        });
        Ok(Running::new(move || {
            stop.store(true, Ordering::SeqCst);
            work.kick().wake();
            thread.join().unwrap();
        }))
    }

    fn spare(&self) -> usize {
        self.0.spare
    }

    fn aside(&self, job: Job) -> Result<(), Job> {
        if self.0.spare == 0 {
            return Err(job);
        }
        self.0.jobs.lock().unwrap().push_back(job);
        Ok(())
    }
}

/// As the page of [`unbroken_sdr::Kick`] says.
fn sleep(work: &dyn ChannelWork, stop: &AtomicBool) {
    work.kick().will_sleep();
    work.arm();
    let Polled { busy, next } = work.poll();
    if !busy && !stop.load(Ordering::SeqCst) {
        let most = next.unwrap_or(PATIENCE).min(PATIENCE);
        let fds = [Some(work.kick().as_fd().as_raw_fd()), work.events()];
        let mut fds =
            fds.map(|fd| libc::pollfd { fd: fd.unwrap_or(-1), events: libc::POLLIN, revents: 0 });
        // SAFETY: a live array and its length.
        unsafe { libc::poll(fds.as_mut_ptr(), 2, most.as_millis() as i32 + 1) };
    }
    work.kick().is_awake();
    work.drain();
}

const BYTES: usize = 1 << 20;

struct Ends {
    a: Reliable,
    b: Reliable,
    from: Memory,
    into: Memory,
    _qps: (Qp, Qp),
}

fn code() -> Choice {
    Choice::Fixed(Scheme::Ec(Code::mds(16, 8).unwrap()))
}

fn ends(w: &World) -> Ends {
    let attr = Attr {
        chunk_log2: 16,
        in_flight_log2: 25,
        messages_log2: 5,
        mtu_bytes: 4096,
        channels: 2,
        generations: 8,
        packet_lifetime_us: 100_000,
        ..Attr::default()
    };
    let options = ReliableOptions {
        choice: Choice::Fixed(Scheme::SrNack),
        parity: 0.5,
        rate_bps: 400_000_000,
        deadline: Duration::from_secs(25),
        ..ReliableOptions::default()
    };
    let qps = w.pair(&QpOptions { attr, ..QpOptions::default() });
    let [a, b] = [&qps.0, &qps.1].map(|qp| Reliable::new(qp, &options).unwrap());
    let (from, into) = (w.a.register(2 * BYTES).unwrap(), w.b.register(2 * BYTES).unwrap());
    Ends { a, b, from, into, _qps: qps }
}

/// Writes a message from a half of the memory into the other end's, and checks it.
#[track_caller]
fn write(e: &Ends, half: usize, seed: u64, choice: Choice) {
    let (at, data) = (half * BYTES, pattern(BYTES, seed));
    e.from.write(at, &data).unwrap();
    let read = e.b.read(&e.into, at as u64, BYTES as u64).unwrap();
    let written = e.a.write_by(&e.from, at as u64, BYTES as u64, choice).unwrap();
    assert_eq!(written.wait(PATIENCE).unwrap(), BYTES as u64);
    assert_eq!(read.wait(PATIENCE).unwrap(), BYTES as u64);
    assert!(e.into.read(at, BYTES).unwrap() == data, "message {seed}");
}

#[test]
fn a_program_gives_threads_of_its_own() {
    for waits in [Waits::Polling, Waits::Sleeping] {
        let own = Own::new(waits, 0);
        let w = World::with_workers(Arc::new(Shared(own.clone())), 2, &[0, 1]);
        let e = ends(&w);
        w.fault("loss a/0 2% tx");
        for seed in 0..4 {
            write(&e, 0, seed, Choice::Fixed(Scheme::SrNack));
            write(&e, 1, 10 + seed, code());
        }
        assert!(own.turns.load(Ordering::SeqCst) > 0, "{waits:?}");
        assert_eq!(own.running.load(Ordering::SeqCst), 4, "two channels at each end");
        drop(e);
        drop(w);
        assert_eq!(own.running.load(Ordering::SeqCst), 0, "they end with their contexts");
    }
}

/// While parity is made, and for as long as that takes, the engine goes on: the data of its message
/// arrives, other messages are written, acknowledged and done. Then it is sent and used.
#[test]
fn the_engine_goes_on_while_somebody_encodes() {
    let own = Own::new(Waits::Sleeping, 1);
    let w = World::with_workers(Arc::new(Shared(own.clone())), 2, &[0, 1]);
    let e = ends(&w);
    // So that only parity can bring back what is lost of the first.
    w.fault("loss a/0 5% tx");
    let data = pattern(BYTES, 77);
    e.from.write(0, &data).unwrap();
    let read = e.b.read(&e.into, 0, BYTES as u64).unwrap();
    let coded = e.a.write_by(&e.from, 0, BYTES as u64, code()).unwrap();
    until("its parity is wanted", || !own.jobs.lock().unwrap().is_empty());
    for seed in 0..4 {
        write(&e, 1, seed, Choice::Fixed(Scheme::SrNack));
    }
    assert!(coded.poll().unwrap().is_none(), "it has ended while its data is being read");
    let job = own.take().unwrap();
    let encoder = std::thread::spawn(job);
    // There may be a job more, of another message: there is none.
    assert!(own.take().is_none());
    encoder.join().unwrap();
    assert_eq!(coded.wait(PATIENCE).unwrap(), BYTES as u64);
    assert_eq!(read.wait(PATIENCE).unwrap(), BYTES as u64);
    assert!(e.into.read(0, BYTES).unwrap() == data);
    assert_eq!(e.a.counts().coded, 1);
}

/// A job that is dropped is done all the same: a write never waits for ever.
#[test]
fn a_job_that_is_dropped_is_done() {
    let own = Own::new(Waits::Sleeping, 1);
    let w = World::with_workers(Arc::new(Shared(own.clone())), 2, &[0, 1]);
    let e = ends(&w);
    let read = e.b.read(&e.into, 0, BYTES as u64).unwrap();
    let coded = e.a.write_by(&e.from, 0, BYTES as u64, code()).unwrap();
    until("its parity is wanted", || !own.jobs.lock().unwrap().is_empty());
    drop(own.take());
    assert_eq!(coded.wait(PATIENCE).unwrap(), BYTES as u64);
    read.wait(PATIENCE).unwrap();
}

/// Memory of a program's own is its own again when the queue pair is gone, whoever has a job.
#[test]
fn a_job_does_not_outlive_its_queue_pair() {
    let own = Own::new(Waits::Sleeping, 1);
    let w = World::with_workers(Arc::new(Shared(own.clone())), 2, &[0, 1]);
    let e = ends(&w);
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANON);
    // SAFETY: a mapping of its own, anywhere.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, prot, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    // SAFETY: it stays mapped until the memory, the write and the queue pair have been dropped.
    let memory = unsafe { w.a.register_at(at as u64, BYTES as u64) }.unwrap();
    let _read = e.b.read(&e.into, 0, BYTES as u64).unwrap();
    let coded = e.a.write_by(&memory, 0, BYTES as u64, code()).unwrap();
    until("its parity is wanted", || !own.jobs.lock().unwrap().is_empty());
    drop((coded, memory, e, w));
    // SAFETY: nobody uses it any more: a job that does ends the test.
    assert_eq!(unsafe { libc::munmap(at, BYTES) }, 0);
    own.take().unwrap()();
}

/// The threads that come with the library, from none for what is done aside to more than one.
#[test]
fn those_of_the_library_encode_beside_the_engine_or_in_it() {
    for aside in [0, 1, 3] {
        let w = World::with_workers(Arc::new(CpuWorkers::new(aside)), 2, &[0, 1]);
        let e = ends(&w);
        w.fault("loss a/0 2% tx");
        (0..6).for_each(|seed| write(&e, seed % 2, seed as u64, code()));
        assert_eq!(e.a.counts().coded, 6);
    }
}
