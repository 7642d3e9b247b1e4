//! The thread of a device that turns events of the device's CQs into events of the application's.
//! It is started when a CQ is armed for the first time, and sleeps on the channel's descriptor.

use crate::cq::{no_thread, ProviderCq};
use crate::{lock, Spawn};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use unbroken_types::Wc;
use unbroken_verbs::{CompChannel, Cq, Device, Error, Result};

/// The cookie of the event that ends the thread.
const END: u64 = u64::MAX;

#[derive(Default)]
struct Queues {
    by_cookie: Mutex<HashMap<u64, Weak<ProviderCq>>>,
}

/// Wakes whoever waits for completions of one device.
pub(crate) struct Waker {
    spawn: Spawn,
    name: String,
    channel: OnceLock<Arc<CompChannel>>,
    queues: Arc<Queues>,
    next_cookie: AtomicU64,
    /// The thread runs; what ends it.
    end: Mutex<Option<Arc<Cq>>>,
}

impl Waker {
    pub(crate) fn new(name: &str, spawn: Spawn) -> Arc<Waker> {
        Arc::new(Waker {
            spawn,
            name: format!("unb-e-{name}"),
            channel: OnceLock::new(),
            queues: Arc::default(),
            next_cookie: AtomicU64::new(1),
            end: Mutex::default(),
        })
    }

    /// The channel of the device's CQs.
    pub(crate) fn channel(&self, device: &dyn Device) -> Result<Arc<CompChannel>> {
        if let Some(channel) = self.channel.get() {
            return Ok(channel.clone());
        }
        let made = device.create_channel()?;
        Ok(self.channel.get_or_init(|| made).clone())
    }

    pub(crate) fn add(&self, cq: &Arc<ProviderCq>) {
        let cookie = self.next_cookie.fetch_add(1, Ordering::Relaxed);
        cq.cq().set_cookie(cookie);
        lock(&self.queues.by_cookie).insert(cookie, Arc::downgrade(cq));
    }

    pub(crate) fn remove(&self, cq: &Cq) {
        lock(&self.queues.by_cookie).remove(&cq.cookie());
        if let Some(channel) = self.channel.get() {
            channel.withdraw(cq.cookie());
        }
    }

    /// Starts the thread unless it runs.
    pub(crate) fn start(&self) -> Result<()> {
        let mut end = lock(&self.end);
        if end.is_some() {
            return Ok(());
        }
        let Some(channel) = self.channel.get().cloned() else {
            return Err(Error::invalid("no completion queue of the device has a channel"));
        };
        let queues = self.queues.clone();
        let bell = Cq::new(1, Some(channel.clone()));
        bell.set_cookie(END);
        bell.arm(false);
        (self.spawn)(&self.name, Box::new(move || run(&channel, &queues)))
            .map_err(|e| no_thread(&e))?;
        *end = Some(bell);
        Ok(())
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        if let Some(bell) = lock(&self.end).take() {
            bell.push(Wc::default(), false);
        }
    }
}

fn run(channel: &CompChannel, queues: &Queues) {
    loop {
        match channel.get_event() {
            Ok(END) => return,
            Ok(cookie) => {
                let cq = lock(&queues.by_cookie).get(&cookie).and_then(Weak::upgrade);
                if let Some(cq) = cq {
                    cq.wake();
                }
            }
            // A signal handler ran; there is no other error of a descriptor of our own.
            Err(e) if e.errno() == libc::EINTR => {}
            Err(_) => return,
        }
    }
}
