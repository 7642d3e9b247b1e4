//! Where a plain device's events go first. They come under the device's locks, so what concerns a
//! journal is only noted: whoever works on the QP next looks at the notes.

use crate::lock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, Weak};
use unbroken_types::WcStatus;
use unbroken_verbs::{DeviceEvent, EventSink, QpEvent};

/// What has been told of a QP.
#[derive(Default)]
pub(crate) struct Notes(AtomicU8);

impl Notes {
    /// It takes no receive of its SRQ any more.
    pub(crate) const LAST_WQE: u8 = 1;
    /// The peer asked for what it must not.
    pub(crate) const OWN_ERROR: u8 = 2;
    /// The device has given it up.
    pub(crate) const FATAL: u8 = 4;

    fn add(&self, bit: u8) {
        self.0.fetch_or(bit, Ordering::Release);
    }

    /// Whether there are any.
    #[inline(always)]
    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Takes all.
    #[inline]
    pub(crate) fn take(&self) -> u8 {
        match self.0.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.0.swap(0, Ordering::AcqRel),
        }
    }
}

/// The event sink of a plain device: open it with this.
pub struct EventInterceptor {
    sink: Arc<dyn EventSink>,
    qps: Mutex<HashMap<u32, Weak<Notes>>>,
}

impl EventInterceptor {
    /// Passes on to `sink` what is not absorbed.
    pub fn new(sink: Arc<dyn EventSink>) -> Arc<EventInterceptor> {
        Arc::new(EventInterceptor { sink, qps: Mutex::default() })
    }

    /// Where what concerns a protected QP goes.
    pub(crate) fn sink(&self) -> &Arc<dyn EventSink> {
        &self.sink
    }

    pub(crate) fn add(&self, qpn: u32, notes: &Arc<Notes>) {
        lock(&self.qps).insert(qpn, Arc::downgrade(notes));
    }

    pub(crate) fn remove(&self, qpn: u32, notes: &Arc<Notes>) {
        let mut qps = lock(&self.qps);
        if qps.get(&qpn).is_some_and(|there| std::ptr::eq(there.as_ptr(), Arc::as_ptr(notes))) {
            qps.remove(&qpn);
        }
    }
}

impl EventSink for EventInterceptor {
    fn event(&self, device: usize, event: DeviceEvent) {
        let DeviceEvent::Qp { qpn, event: of_qp } = event else {
            return self.sink.event(device, event);
        };
        let notes = lock(&self.qps).get(&qpn).and_then(Weak::upgrade);
        match (notes, of_qp) {
            (Some(notes), QpEvent::LastWqeReached) => {
                // Told by the QP, once it has ended for good: see `JournaledQp::report_last_wqe`.
                notes.add(Notes::LAST_WQE);
                self.sink.event(device, DeviceEvent::QpChanged { qpn });
            }
            (Some(notes), QpEvent::Fatal) => {
                notes.add(Notes::FATAL);
                self.sink.event(device, DeviceEvent::QpFailed { qpn, status: WcStatus::FatalErr });
            }
            (Some(notes), QpEvent::AccessError | QpEvent::RequestError) => {
                notes.add(Notes::OWN_ERROR);
                self.sink.event(device, event);
                self.sink.event(device, DeviceEvent::QpChanged { qpn });
            }
            _ => self.sink.event(device, event),
        }
    }
}
