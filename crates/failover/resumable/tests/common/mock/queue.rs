//! The queue of a provider, which is polled in place of a ring.

use super::{Net, NicId};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use unbroken_types::Wc;
use unbroken_verbs::{Cq, Result, Source};

/// See the module's text.
pub struct Queue {
    net: Net,
    nic: NicId,
    wcs: Mutex<VecDeque<Wc>>,
    /// An event is asked for, of solicited completions only or of any.
    armed: Mutex<Option<bool>>,
    ring: OnceLock<Weak<Cq>>,
    lost: AtomicBool,
    /// The lock of a provider, which it keeps while the device changes the queue's size.
    of_provider: Mutex<()>,
}

impl Queue {
    pub fn new(net: &Net, nic: NicId) -> Arc<Queue> {
        Arc::new(Queue {
            net: net.clone(),
            nic,
            wcs: Mutex::default(),
            armed: Mutex::default(),
            ring: OnceLock::new(),
            lost: AtomicBool::new(false),
            of_provider: Mutex::default(),
        })
    }

    pub fn set_ring(&self, ring: &Arc<Cq>) {
        assert!(self.ring.set(Arc::downgrade(ring)).is_ok());
    }

    pub fn is_behind(&self, ring: &Arc<Cq>) -> bool {
        self.ring.get().is_some_and(|own| std::ptr::eq(own.as_ptr(), Arc::as_ptr(ring)))
    }

    /// A completion comes, and the event that was asked for.
    pub fn push(&self, wc: Wc, solicited: bool) {
        self.wcs.lock().unwrap().push_back(wc);
        let asked =
            self.armed.lock().unwrap().take_if(|only| solicited || !*only || wc.status != 0);
        if let (Some(_), Some(ring)) = (asked, self.ring.get().and_then(Weak::upgrade)) {
            ring.fire();
        }
    }

    /// It overruns, if it is of that NIC, which says so.
    pub fn overrun(&self, nic: NicId) {
        if self.nic == nic {
            self.lost.store(true, Ordering::Relaxed);
            self.ring.get().and_then(Weak::upgrade).iter().for_each(|ring| ring.lose());
        }
    }

    /// A QP is destroyed.
    pub fn purge(&self, qpn: u32) {
        self.wcs.lock().unwrap().retain(|wc| wc.qp_num != qpn);
    }
}

impl Source for Queue {
    fn poll(&self, out: &mut [Wc]) -> i32 {
        let _lock = self.of_provider.lock().unwrap();
        self.net.drive(self.nic);
        if self.lost.load(Ordering::Relaxed) {
            return -1;
        }
        let mut wcs = self.wcs.lock().unwrap();
        let n = out.len().min(wcs.len());
        out.iter_mut().zip(wcs.drain(..n)).for_each(|(to, wc)| *to = wc);
        n as i32
    }

    fn arm(&self, solicited_only: bool) {
        let mut armed = self.armed.lock().unwrap();
        *armed = Some(solicited_only && *armed != Some(false));
    }

    fn resize(&self, _entries: u32) -> Result<()> {
        let _lock = self.of_provider.lock().unwrap();
        self.net.wait_at_resize(self.nic);
        Ok(())
    }
}
