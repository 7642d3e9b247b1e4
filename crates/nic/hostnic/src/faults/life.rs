//! What faults make of an open device: a life, from `open` on. A device that died stays dead in
//! that life; opened anew it has another.
//!
//! Completions are left out or changed where a provider gives them: the slot of its context by
//! which CQs are polled is ours in each context that takes faults, and in no other. So CQs need not
//! know of faults.

use crate::context::Context;
use crate::device::{HostDevice, CQ_ERR, DEVICE_FATAL, PORT_ACTIVE, PORT_ERR};
use crate::faults::seam_qp::SeamQp;
use crate::faults::words::Harm;
use crate::lock;
use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use unbroken_types::{Wc, WcStatus};
use unbroken_verbs::abi::{ibv_cq, PollCq};
use unbroken_verbs::{DeviceEvent, Error, EventSink, Result};

/// `enum ibv_wc_opcode`: those of receives have this bit.
const OF_RECEIVES: u32 = 1 << 7;

/// The faults of a device that hold now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Holding {
    pub(crate) dead: bool,
    pub(crate) down: bool,
    pub(crate) swallow: bool,
    /// 0: posts are taken.
    pub(crate) refuse_errno: i32,
}

impl Holding {
    /// Takes note of a fault that holds.
    pub(crate) fn add(&mut self, harm: Harm) {
        match harm {
            Harm::Dead => self.dead = true,
            Harm::Down => self.down = true,
            Harm::Swallow => self.swallow = true,
            Harm::Refuse(errno) => self.refuse_errno = errno,
            Harm::WqeError(_) | Harm::Event(_) | Harm::LinkDown | Harm::CableCut => {}
        }
    }
}

/// See the module's text.
pub(crate) struct Life {
    name: String,
    nic: usize,
    sink: Arc<dyn EventSink>,
    context: Weak<Context>,
    poll: PollCq,
    device: OnceLock<Weak<HostDevice>>,
    dead: AtomicBool,
    down: AtomicBool,
    swallow: AtomicBool,
    refuse_errno: AtomicI32,
    /// The status of the next send that completes; 0: its own.
    strike: AtomicU32,
    /// QPs that were struck: all else that they send is flushed.
    struck: Mutex<HashSet<u32>>,
    any_struck: AtomicBool,
    /// With whether it is the program's. Polls must not have a QP that they could be the last to
    /// let go of: one that is destroyed is polled for.
    qps: Mutex<HashMap<u32, (Weak<SeamQp>, bool)>>,
}

/// The lives by the addresses of their contexts.
static LIVES: RwLock<Option<HashMap<usize, Arc<Life>>>> = RwLock::new(None);

/// In the place of a provider's `poll_cq`.
unsafe extern "C" fn poll(cq: *mut ibv_cq, count: c_int, wcs: *mut Wc) -> c_int {
    // SAFETY: whoever polls has a live CQ; the field never changes.
    let context = unsafe { (*cq).context } as usize;
    let lives = LIVES.read().unwrap_or_else(PoisonError::into_inner);
    let Some(life) = lives.as_ref().and_then(|all| all.get(&context)).cloned() else { return -1 };
    drop(lives);
    // SAFETY: the provider's own function, with the arguments that were meant for it.
    let got = unsafe { (life.poll)(cq, count, wcs) };
    if got <= 0 {
        return got;
    }
    // SAFETY: the provider has filled in so many.
    life.change(unsafe { std::slice::from_raw_parts_mut(wcs, got as usize) }) as c_int
}

/// A send that was done: of one that was not, it cannot be told that it is a send.
fn is_done_send(wc: &Wc) -> bool {
    wc.status == WcStatus::Success as u32 && wc.opcode & OF_RECEIVES == 0
}

impl Life {
    /// Begins a life over a context on which nothing has been made yet.
    pub(crate) fn begin(
        nic: usize,
        context: &Arc<Context>,
        sink: Arc<dyn EventSink>,
    ) -> Result<Arc<Life>> {
        // SAFETY: an open context. Nobody else uses it before it is the device's.
        let slot = unsafe { &mut (*context.raw()).ops.poll_cq };
        let Some(provided) = *slot else {
            return Err(Error::unsupported(format!("{}: CQs cannot be polled", context.name)));
        };
        let life = Arc::new(Life {
            name: context.name.clone(),
            nic,
            sink,
            context: Arc::downgrade(context),
            poll: provided,
            device: OnceLock::new(),
            dead: AtomicBool::new(false),
            down: AtomicBool::new(false),
            swallow: AtomicBool::new(false),
            refuse_errno: AtomicI32::new(0),
            strike: AtomicU32::new(0),
            struck: Mutex::default(),
            any_struck: AtomicBool::new(false),
            qps: Mutex::default(),
        });
        let mut lives = LIVES.write().unwrap_or_else(PoisonError::into_inner);
        let all = lives.get_or_insert_default();
        all.retain(|_, life| life.context.strong_count() > 0);
        all.insert(context.raw() as usize, life.clone());
        *slot = Some(poll);
        Ok(life)
    }

    /// It is the life of that device.
    pub(crate) fn is_of(&self, device: &Arc<HostDevice>) {
        let _ = self.device.set(Arc::downgrade(device));
    }

    fn device(&self) -> Option<Arc<HostDevice>> {
        self.device.get()?.upgrade()
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::Acquire)
    }

    /// EIO where it is dead: what a control verb is told.
    pub(crate) fn check(&self) -> Result<()> {
        match self.is_dead() {
            false => Ok(()),
            true => {
                Err(Error::device_gone(format!("{}: dead, by a fault that was set", self.name)))
            }
        }
    }

    /// Whether posts are taken.
    pub(crate) fn check_post(&self) -> Result<()> {
        self.check()?;
        match self.refuse_errno.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => {
                let what = format!("{}: posts are refused, by a fault that was set", self.name);
                Err(Error::new(errno, what))
            }
        }
    }

    pub(crate) fn add_qp(&self, qp: &Arc<SeamQp>, qpn: u32, of_program: bool) {
        lock(&self.qps).insert(qpn, (Arc::downgrade(qp), of_program));
    }

    pub(crate) fn remove_qp(&self, qpn: u32) {
        lock(&self.qps).remove(&qpn);
        let mut struck = lock(&self.struck);
        struck.remove(&qpn);
        self.any_struck.store(!struck.is_empty(), Ordering::Release);
    }

    fn all_qps(&self) -> Vec<Arc<SeamQp>> {
        lock(&self.qps).values().filter_map(|(qp, _)| qp.upgrade()).collect()
    }

    /// What polls are given of these completions; how many that are.
    ///
    /// Of a device that has died: what it had done before, which lies in the host's memory. The
    /// peer holds that for done, and a receive that never completed would be lost data.
    fn change(&self, wcs: &mut [Wc]) -> usize {
        let (is_dead, swallows) = (self.is_dead(), self.swallow.load(Ordering::Acquire));
        let mut kept = wcs.len();
        if is_dead || swallows {
            kept = 0;
            for i in 0..wcs.len() {
                let done = wcs[i].status == 0;
                let lost = swallows && is_done_send(&wcs[i]);
                if !lost && (done || !is_dead) {
                    wcs[kept] = wcs[i];
                    kept += 1;
                }
            }
        }
        let wcs = &mut wcs[..kept];
        if self.strike.load(Ordering::Relaxed) != 0 {
            self.strike(wcs);
        }
        if self.any_struck.load(Ordering::Acquire) {
            let struck = lock(&self.struck);
            // Receives were acknowledged: until the provider has ended the QP they are its own.
            let flushed = |wc: &&mut Wc| is_done_send(wc) && struck.contains(&wc.qp_num);
            for wc in wcs.iter_mut().filter(flushed) {
                wc.status = WcStatus::WrFlushErr as u32;
            }
        }
        wcs.len()
    }

    /// Has the first of them that is a send of the program fail its QP.
    fn strike(&self, wcs: &mut [Wc]) {
        let qps = lock(&self.qps);
        let of_program = |wc: &Wc| qps.get(&wc.qp_num).is_some_and(|(_, is)| *is);
        let Some(wc) = wcs.iter_mut().find(|wc| is_done_send(wc) && of_program(wc)) else { return };
        match self.strike.swap(0, Ordering::AcqRel) {
            0 => {} // another poll was faster
            status => {
                wc.status = status;
                lock(&self.struck).insert(wc.qp_num);
                self.any_struck.store(true, Ordering::Release);
            }
        }
    }

    /// The provider ends QPs that were struck: not while they are polled, since a QP that is being
    /// destroyed waits for that.
    pub(crate) fn end_struck(&self) {
        if !self.any_struck.load(Ordering::Acquire) {
            return;
        }
        let struck: Vec<u32> = lock(&self.struck).iter().copied().collect();
        let qps = lock(&self.qps).clone();
        struck.iter().filter_map(|qpn| qps.get(qpn)?.0.upgrade()).for_each(|qp| qp.end());
    }

    /// These faults hold now.
    pub(crate) fn apply(&self, now: &Holding) {
        if self.is_dead() {
            return;
        }
        self.refuse_errno.store(now.refuse_errno, Ordering::Release);
        self.swallow.store(now.swallow, Ordering::Release);
        if now.dead {
            self.dead.store(true, Ordering::Release);
            self.all_qps().iter().for_each(|qp| qp.end());
            self.raise(DEVICE_FATAL);
            return;
        }
        match (self.down.swap(now.down, Ordering::AcqRel), now.down) {
            (false, true) => {
                self.all_qps().iter().filter(|qp| qp.is_connected()).for_each(|qp| qp.end());
                self.raise(PORT_ERR);
            }
            (true, false) => {
                self.all_qps().iter().for_each(|qp| qp.give_held());
                self.raise(PORT_ACTIVE);
            }
            _ => {}
        }
    }

    /// Something that happens once.
    pub(crate) fn meet(&self, harm: Harm) {
        match harm {
            Harm::WqeError(status) => self.strike.store(status, Ordering::Release),
            Harm::Event(kind) => self.raise(kind),
            _ => {}
        }
    }

    fn raise(&self, kind: c_int) {
        let Some(device) = self.device() else { return };
        let all = self.all_qps();
        let of_program = all.iter().filter(|qp| qp.is_of_program());
        match (kind, crate::device::qp_event(kind)) {
            (_, Some(event)) => {
                let tell = |qpn| self.sink.event(self.nic, DeviceEvent::Qp { qpn, event });
                of_program.for_each(|qp| tell(qp.number()));
            }
            (CQ_ERR, None) => of_program.for_each(|qp| qp.lose_completions()),
            (_, None) => device.raise(kind),
        }
    }

    /// Where its events go.
    pub(crate) fn sink(&self) -> &Arc<dyn EventSink> {
        &self.sink
    }
}
