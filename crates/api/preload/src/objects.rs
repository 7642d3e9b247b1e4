//! What C pointers point to.
//!
//! Each object begins with its C structure (a context: has it inside, after the extended verbs), so
//! that a pointer to one is a pointer to the other. The C part is in an `UnsafeCell`: the program
//! reads its fields at any time, and may write those that are its own (`cq_context`, `qp_context`).

use crate::batch::Builder;
use crate::current::Current;
use crate::device_memory::DeviceMemory;
use crate::ffi::deref;
use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use unbroken_process::{PerProcess, ProcessGuard};
use unbroken_shift::api;
use unbroken_types::{PathAttr, PdHandle, QpType};
use unbroken_verbs::abi::{
    ibv_ah, ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_device, ibv_dm, ibv_mr, ibv_mw,
    ibv_pd, ibv_qp, ibv_qp_ex, ibv_srq, ibv_td, verbs_context,
};
use unbroken_verbs::{CompChannel, Cq, Lane, Result, Srq};

/// A device; made once, lives as long as the process.
#[repr(C)]
pub struct DeviceObj {
    pub c: UnsafeCell<ibv_device>,
    /// Providers' own functions (`mlx5dv_is_supported`, `efadv_query_device`) read what follows
    /// `ibv_device` in theirs; zeros match none.
    pub behind: [u64; 32],
    pub index: usize,
    pub node_guid: u64,
}

/// An open device.
#[repr(C)]
pub struct ContextObj {
    pub c: UnsafeCell<verbs_context>,
    pub api: Arc<api::Context>,
    /// What `cmd_fd` names. There is no kernel driver behind it; programs duplicate and compare it.
    pub _command: OwnedFd,
}

/// A protection domain.
#[repr(C)]
pub struct PdObj {
    pub c: ibv_pd,
    pub api: Arc<api::Context>,
    /// The domain that this one, a parent domain, stands for.
    pub of: Option<PdHold>,
    /// The thread domain of a parent domain, if it has one.
    pub _td: Option<TdHold>,
    /// What lies in it: QPs, SRQs, regions, windows, and parent domains that stand for it.
    pub users: AtomicU32,
}

/// Something that keeps another object: that cannot be given up before it has been dropped.
macro_rules! hold {
    ($hold:ident, $of:ty, $what:literal) => {
        #[doc = $what]
        pub struct $hold(NonNull<$of>);

        impl $hold {
            /// Counts among the object's users until it is dropped.
            pub fn new(object: &$of) -> $hold {
                object.users.fetch_add(1, Ordering::AcqRel);
                $hold(NonNull::from(object))
            }
        }

        impl Drop for $hold {
            fn drop(&mut self) {
                // SAFETY: an object with users is not freed.
                unsafe { self.0.as_ref() }.users.fetch_sub(1, Ordering::AcqRel);
            }
        }

        // SAFETY: it touches an atomic alone.
        unsafe impl Send for $hold {}
        // SAFETY: as above.
        unsafe impl Sync for $hold {}
    };
}

hold!(PdHold, PdObj, "A use of a protection domain.");
hold!(TdHold, TdObj, "A use of a thread domain.");

impl PdObj {
    /// Its name below the C boundary.
    pub fn handle(&self) -> PdHandle {
        PdHandle(self.c.handle)
    }
}

/// A memory region.
#[repr(C)]
pub struct MrObj {
    pub c: ibv_mr,
    pub api: Arc<api::Context>,
    pub kind: MrKind,
    pub pd: Mutex<PdHold>,
}

/// What a region is of.
pub enum MrKind {
    /// The program's memory.
    Plain,
    /// Device memory, which it keeps alive.
    Device { _memory: Arc<DeviceMemory> },
    /// What is behind a dma-buf.
    Dmabuf,
    /// Nothing.
    Null,
}

/// A memory window.
#[repr(C)]
pub struct MwObj {
    pub c: UnsafeCell<ibv_mw>,
    pub api: Arc<api::Context>,
    pub _pd: PdHold,
}

/// A thread domain.
#[repr(C)]
pub struct TdObj {
    pub c: ibv_td,
    pub api: Arc<api::Context>,
    /// Parent domains that it is part of.
    pub users: AtomicU32,
}

/// Device memory.
#[repr(C)]
pub struct DmObj {
    pub c: ibv_dm,
    pub memory: Arc<DeviceMemory>,
}

/// A completion channel. `refcnt` of the C part counts its queues.
#[repr(C)]
pub struct ChannelObj {
    pub c: UnsafeCell<ibv_comp_channel>,
    pub channel: Arc<CompChannel>,
    pub process: ProcessGuard,
}

/// A completion queue, plain or extended.
#[repr(C)]
pub struct CqObj {
    pub c: UnsafeCell<ibv_cq_ex>,
    pub cq: Arc<Cq>,
    /// The front's, at hand for a poll.
    pub process: ProcessGuard,
    pub api: Arc<api::Context>,
    /// Completion events that the program got and acknowledged.
    pub comp_events: Acks,
    /// Asynchronous events that the program got and acknowledged.
    pub async_events: Acks,
    /// The completion that an extended poll looks at. Touched between `start_poll` and `end_poll`
    /// only, under the lock that they take and release.
    pub current: UnsafeCell<Current>,
}

/// A shared receive queue.
#[repr(C)]
pub struct SrqObj {
    pub c: UnsafeCell<ibv_srq>,
    pub srq: Arc<Srq>,
    pub api: Arc<api::Context>,
    pub _pd: PdHold,
    pub cookie: u64,
    pub async_events: Acks,
}

/// A QP, plain or extended.
#[repr(C)]
pub struct QpObj {
    pub c: UnsafeCell<ibv_qp_ex>,
    /// The short way of posts, where there is one.
    pub lane: Option<Arc<Lane>>,
    pub process: ProcessGuard,
    pub qp: Arc<api::Qp>,
    pub api: Arc<api::Context>,
    pub _pd: PdHold,
    pub cookie: u64,
    pub is_ud: bool,
    /// Made with `send_ops_flags`: the builders may be used.
    pub extended: bool,
    pub async_events: Acks,
    /// Made when it is first used.
    pub builder: UnsafeCell<Option<Box<Builder>>>,
    pub init: InitAttr,
    /// Held while it is changed or asked, so that the state in the C part follows.
    pub changing: Mutex<()>,
}

/// What `ibv_query_qp` repeats of the creation.
#[derive(Clone, Copy)]
pub struct InitAttr {
    pub kind: QpType,
    pub sq_sig_all: bool,
}

/// An address handle.
#[repr(C)]
pub struct AhObj {
    pub c: ibv_ah,
    /// Where it leads.
    pub path: PathAttr,
}

// SAFETY: the C part is shared with the program by contract; ours is made of thread-safe parts.
// `current` and `builder` are used under the locks or by the rules that their comments name.
unsafe impl Sync for CqObj {}
// SAFETY: as for CqObj.
unsafe impl Sync for QpObj {}
// SAFETY: as for CqObj.
unsafe impl Sync for SrqObj {}

impl ContextObj {
    /// The object of a context; an error in a forked child of the process that opened it.
    ///
    /// # Safety
    /// See [`deref`].
    pub unsafe fn of<'a>(p: *mut ibv_context) -> Result<&'a ContextObj> {
        // SAFETY: promised by the caller.
        let object = unsafe { ContextObj::of_any(p) }?;
        object.api.process().check()?;
        Ok(object)
    }

    /// The object of a context, also in a forked child: for what needs neither a NIC nor a lock.
    ///
    /// # Safety
    /// See [`deref`].
    pub unsafe fn of_any<'a>(p: *mut ibv_context) -> Result<&'a ContextObj> {
        let whole: *mut ContextObj = match p.is_null() {
            true => std::ptr::null_mut(),
            false => p.cast::<u8>().wrapping_sub(offset_of!(verbs_context, context)).cast(),
        };
        // SAFETY: the context lies in the `verbs_context` that a ContextObj begins with.
        unsafe { deref(whole, "the context") }
    }
}

/// Objects whose pointer in C is the object's own address. With the process that an object belongs
/// to: in a forked child of that, it is none. What lies behind, locks above all, is as the fork
/// found it, and is never touched there.
macro_rules! object {
    ($($obj:ty, $c:ty, $what:literal $(, $process:expr)?;)*) => { $(
        impl $obj {
            /// The object behind the C pointer.
            ///
            /// # Safety
            /// See [`deref`].
            pub unsafe fn of<'a>(p: *mut $c) -> Result<&'a Self> {
                // SAFETY: the object begins with its C structure.
                let object = unsafe { deref(p.cast::<Self>(), $what) }?;
                $({
                    let process: fn(&Self) -> ProcessGuard = $process;
                    process(object).check()?;
                })?
                Ok(object)
            }
        }
    )* };
}

object! {
    DeviceObj, ibv_device, "the device";
    PdObj, ibv_pd, "the protection domain", |o| o.api.process();
    MrObj, ibv_mr, "the memory region", |o| o.api.process();
    MwObj, ibv_mw, "the memory window", |o| o.api.process();
    TdObj, ibv_td, "the thread domain", |o| o.api.process();
    DmObj, ibv_dm, "the device memory";
    ChannelObj, ibv_comp_channel, "the completion channel", |o| o.process;
    CqObj, ibv_cq, "the completion queue", |o| o.process;
    SrqObj, ibv_srq, "the shared receive queue", |o| o.api.process();
    QpObj, ibv_qp, "the QP", |o| o.process;
    AhObj, ibv_ah, "the address handle";
}

/// Frees an object that [`Box::into_raw`] made.
///
/// # Safety
/// `p` came from `Box::<T>::into_raw` and nobody uses it any more.
pub unsafe fn free<T>(p: *const T) {
    // SAFETY: promised by the caller.
    drop(unsafe { Box::from_raw(p.cast_mut()) });
}

/// Locks a mutex; a panic elsewhere does not make what it guards useless.
pub fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts events that the program got and has to acknowledge.
#[derive(Default)]
pub struct Acks {
    unacknowledged: Mutex<Unacknowledged>,
    changed: Condvar,
}

#[derive(Default)]
struct Unacknowledged {
    events: u32,
    /// Somebody waits: else nobody need be told, which is a system call for each event.
    awaited: bool,
}

impl Acks {
    fn deliver(&self) {
        lock(&self.unacknowledged).events += 1;
    }

    /// The program acknowledges `n` events. More than it got counts as all.
    pub fn acknowledge(&self, n: u32) {
        let mut left = lock(&self.unacknowledged);
        left.events = left.events.saturating_sub(n);
        if left.awaited {
            // Under the lock: whoever waits frees this object next.
            self.changed.notify_all();
        }
    }

    /// Waits until all are acknowledged.
    pub fn wait(&self) {
        let mut left = lock(&self.unacknowledged);
        while left.events > 0 {
            left.awaited = true;
            left = self.changed.wait(left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Living objects by the number that their events carry. Looked up and counted under one lock, so
/// that an event is either counted before the object's destroyer looks, or finds nothing.
pub struct Registry<T> {
    objects: Mutex<BTreeMap<u64, usize>>,
    kind: std::marker::PhantomData<fn(T)>,
}

/// Objects by cookie.
pub static CQS: PerProcess<Registry<CqObj>> = PerProcess::new();
/// Objects by cookie.
pub static QPS: PerProcess<Registry<QpObj>> = PerProcess::new();
/// Objects by cookie.
pub static SRQS: PerProcess<Registry<SrqObj>> = PerProcess::new();

/// A number that no object has had.
pub fn fresh_cookie() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl<T> Default for Registry<T> {
    fn default() -> Registry<T> {
        Registry { objects: Mutex::default(), kind: std::marker::PhantomData }
    }
}

impl<T> Registry<T> {
    /// Events of `cookie` are of `object` from now on.
    pub fn insert(&self, cookie: u64, object: *const T) {
        lock(&self.objects).insert(cookie, object as usize);
    }

    /// Events of `cookie` find nothing from now on.
    pub fn remove(&self, cookie: u64) {
        lock(&self.objects).remove(&cookie);
    }

    /// Counts an event that is about to be given to the program, and gives its object; none if that
    /// is gone.
    pub fn deliver(&self, cookie: u64, acks: impl FnOnce(&T) -> &Acks) -> Option<*const T> {
        let objects = lock(&self.objects);
        let object = *objects.get(&cookie)? as *const T;
        // SAFETY: registered objects are alive: a destroyer removes the entry, under the lock that
        // we hold, before it frees.
        acks(unsafe { &*object }).deliver();
        Some(object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_of_a_destroyed_object_finds_nothing() {
        let registry: Registry<Acks> = Registry::default();
        let acks = Acks::default();
        registry.insert(7, &acks);
        assert_eq!(registry.deliver(7, |a| a), Some(&raw const acks));
        registry.remove(7);
        assert_eq!(registry.deliver(7, |a| a), None);
        acks.acknowledge(1);
        acks.wait();
    }

    #[test]
    fn a_destroyer_waits_for_every_acknowledgement() {
        let acks = Acks::default();
        acks.deliver();
        acks.deliver();
        std::thread::scope(|s| {
            let waiter = s.spawn(|| acks.wait());
            acks.acknowledge(1);
            assert!(!waiter.is_finished());
            acks.acknowledge(1);
        });
        assert_eq!(lock(&acks.unacknowledged).events, 0);
    }
}
