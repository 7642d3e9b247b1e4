//! The thread that works when no application thread does.
//!
//! Each opened NIC has one. It sleeps in `ppoll` on the NIC's socket, a bell and the next deadline.
//! While an application thread polls ([`crate::poller`]) it leaves everything to that thread: a
//! packet would wake it for work that is about to be done anyway. It looks again after a short
//! while, or when the application says that it is about to wait for an event. A polling thread that
//! is kept from its core is waited for: it will poll as soon as it runs, and there is no core to
//! spare for doing its work in its stead. Not for ever: after some milliseconds what has come in is
//! handled here, since a peer may wait for the answer that a NIC would give at once.
//!
//! It is a thread of [`unbroken_process::spawn`], which runs at once when it is woken.

use crate::poller::{Opinion, Takeover};
use crate::shared::Shared;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use unbroken_fabric::now_us;
use unbroken_process::{spawn, Thread};
use unbroken_verbs::{Error, HeldEvents, Result};

/// After bulk data more is likely to come at once: for so long the thread looks for it before it
/// sleeps. Not after small messages, since an application that waits for one may want this core.
const LINGER_US: u64 = 40;

/// The background thread of a NIC; dropping it ends the thread.
pub(crate) struct Background {
    shared: Arc<Shared>,
    thread: Option<Thread>,
}

impl Background {
    pub(crate) fn start(shared: Arc<Shared>) -> Result<Background> {
        let name = format!("unb-{}", shared.name);
        let s = shared.clone();
        let thread =
            spawn(&name, move || run(&s)).map_err(|e| Error::os("starting a NIC's thread", &e))?;
        Ok(Background { shared, thread: Some(thread) })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if self.shared.process.elsewhere() {
            // The thread is the parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.signal();
        if let Some(thread) = self.thread.take() {
            thread.join();
        }
    }
}

/// Sleeps until the bell rings, a queue is to be reminded, something arrives at one of `sockets`,
/// or `timeout_us` is over.
fn sleep(shared: &Shared, sockets: &[RawFd], timeout_us: u64) {
    let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut fds =
        [entry(shared.bell.as_raw_fd()), entry(shared.reminders.as_raw_fd()), entry(-1), entry(-1)];
    for (to, fd) in fds[2..].iter_mut().zip(sockets) {
        to.fd = *fd;
    }
    let timeout = libc::timespec {
        tv_sec: (timeout_us / 1_000_000) as _,
        tv_nsec: (timeout_us % 1_000_000 * 1000) as _,
    };
    // SAFETY: live locals; entries with a negative descriptor are ignored.
    unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as _, &raw const timeout, std::ptr::null()) };
    if fds[0].revents != 0 {
        // Takes all rings.
        let _ = shared.bell.take();
    }
}

fn run(shared: &Shared) {
    let mut opinion = Opinion::new(now_us());
    let mut linger_until_us = 0;
    while !shared.stop.load(Ordering::Acquire) {
        if !shared.alive() {
            return bury(shared);
        }
        shared.wake_at_us.store(0, Ordering::Relaxed);
        let mut time_us = now_us();
        shared.reminders.run(time_us);
        let relied = opinion.polling;
        let polling = opinion.polling(&shared.poller, time_us);
        let (mut gone, mut starved) = (relied && !polling, false);
        if polling {
            let leave_us = opinion.leave_us(time_us);
            shared.wake_at_us.store(time_us + leave_us, Ordering::Relaxed);
            sleep(shared, &[], leave_us);
            time_us = now_us();
            if shared.poller.relied_on() {
                let turn = opinion.turn(&shared.poller, time_us);
                if turn == Takeover::Leave {
                    continue;
                }
                (gone, starved) = (turn == Takeover::Over, turn == Takeover::Once);
            } else {
                opinion.waits(time_us);
            }
        }
        let mut e = shared.lock();
        let acks = starved || !e.answer_is_likely();
        let held = HeldEvents::new();
        let work = e.drive(time_us, &shared.domain, acks);
        drop(held);
        if gone {
            opinion.left_alone(time_us, work.received);
        }
        let Some(sockets) = e.rx_fds() else { continue };
        if work.bulk {
            linger_until_us = time_us + LINGER_US;
        }
        if work.more || time_us < linger_until_us {
            drop(e);
            shared.give_way();
            continue;
        }
        let wake_at_us = e.patient_deadline_us(time_us).min(time_us + shared.longest_sleep_us);
        shared.wake_at_us.store(wake_at_us, Ordering::Relaxed);
        drop(e);
        shared.give_way();
        sleep(shared, &sockets, wake_at_us.saturating_sub(now_us()));
    }
    shared.reminders.close();
}

/// The NIC is dead: flushes the QPs that a plain one flushes late. No other work comes any more.
fn bury(shared: &Shared) {
    shared.reminders.close();
    while !shared.stop.load(Ordering::Acquire) {
        let now_us = now_us();
        let Some(next_us) = shared.lock().flush_late(now_us) else { return };
        sleep(shared, &[], next_us - now_us);
    }
}
