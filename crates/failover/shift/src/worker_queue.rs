//! The worker's queue: what devices, posters and programs leave for it to do.
//!
//! It stands below the QP, so that whoever is there can leave a job; the worker itself is above.

use crate::control_endpoint::LocalPort;
use crate::lock::lock;
use crate::qps::LogicalId;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Mutex;
use unbroken_failover_protocol::Message;
use unbroken_types::Gid;
use unbroken_verbs::{DeviceEvent, EventFd, Result};

/// The address of a QP, as its peers are told it: GID and QPN.
pub(crate) type QpAddr = (Gid, u32);

/// Something for the worker to do.
#[derive(Debug)]
pub(crate) enum Job {
    /// A device reports something.
    Device(usize, DeviceEvent),
    /// A QP was connected to a peer that is known: learn the peer's endpoints.
    Connect(LogicalId),
    /// A QP was connected to this address: find out whose it is, or whether that is still so.
    Seek(LogicalId, QpAddr),
    /// A QP that seeks its peer has heard of it, or has failed meanwhile.
    Hurry(LogicalId),
    /// There is an answer about these QPs.
    Answered(Vec<QpAddr>),
    /// The directory can be asked again.
    AskAgain,
    /// The directory has not taken entries; why.
    Refused(String),
    /// A QP is to be looked at by that time.
    Watch(LogicalId, u64),
    /// A message for a QP waits until the directory has been read.
    Read(LogicalId),
    /// The control endpoint of a port has failed.
    MendEndpoint(LocalPort),
    /// ... and its device has not taken it to a new life.
    MendAgain(LocalPort),
    /// A probe was answered; the answer came in by that port.
    ProbeAck(LocalPort, Message),
    /// A QP has migrated, or may be given another alternate path.
    TendPortPairs,
    /// A UD QP has moved: tell the others.
    Moved(LogicalId),
    /// UD QPs of others have moved.
    ReadAliases,
    /// The directory has those of ours that have moved: tell the others.
    TellMoved,
}

impl Job {
    /// Whether a millisecond is nothing to it: what programs do when they connect QPs.
    fn can_wait(&self) -> bool {
        matches!(self, Job::Connect(_) | Job::Seek(..) | Job::TendPortPairs)
    }
}

/// Jobs for the worker, and what wakes it.
pub(crate) struct WorkerQueue {
    jobs: Mutex<VecDeque<Job>>,
    wake: EventFd,
    /// The worker is about to look, so it need not be woken.
    awake: AtomicBool,
    /// The worker is to end.
    stopped: AtomicBool,
    /// The NICs that have died and are not back, by their bits; of those beyond 64 nothing is kept.
    dead: AtomicU64,
}

impl WorkerQueue {
    pub(crate) fn new() -> Result<WorkerQueue> {
        Ok(WorkerQueue {
            jobs: Mutex::default(),
            wake: EventFd::new(false, true)?,
            awake: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            dead: AtomicU64::new(0),
        })
    }

    /// Leaves a job. The list is bounded by what causes jobs: each QP has one life to fail, and is
    /// watched earlier and earlier only.
    ///
    /// A worker that [lingers](Self::linger) is woken by what cannot wait: a wake is a system call,
    /// and programs that connect hundreds of QPs would make one for each.
    pub(crate) fn put(&self, job: Job) {
        let waits = job.can_wait();
        let bit = |nic: usize| 1u64.checked_shl(nic as u32).unwrap_or(0);
        match job {
            Job::Device(nic, DeviceEvent::Fatal) => self.dead.fetch_or(bit(nic), Ordering::AcqRel),
            Job::Device(nic, DeviceEvent::PortActive(_)) => {
                self.dead.fetch_and(!bit(nic), Ordering::AcqRel)
            }
            _ => 0,
        };
        lock(&self.jobs).push_back(job);
        if !self.awake.swap(true, Ordering::AcqRel) || !waits {
            self.wake.signal();
        }
    }

    /// Whether that NIC has died and is not back, as far as its device has said so: also where the
    /// worker has not come to that job yet.
    pub(crate) fn is_dead(&self, nic: usize) -> bool {
        self.dead.load(Ordering::Acquire).checked_shr(nic as u32).unwrap_or(0) & 1 == 1
    }

    /// The worker will look at the queue within a millisecond by itself.
    pub(crate) fn linger(&self) {
        self.awake.store(true, Ordering::Release);
    }

    /// Tells it from those of other hosts in the process.
    pub(crate) fn name(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Has the worker end.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.wake.signal();
    }

    /// Whether the worker is to end.
    pub(crate) fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Readable while there are jobs that the worker has not been woken for yet.
    pub(crate) fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// Takes all jobs, in the order in which they came.
    pub(crate) fn take(&self) -> VecDeque<Job> {
        self.awake.store(false, Ordering::Release);
        std::mem::take(&mut *lock(&self.jobs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_is_dead_from_its_word_until_it_is_back() {
        let queue = WorkerQueue::new().unwrap();
        let dead = || [0, 1, 63, 64, 200].map(|nic| queue.is_dead(nic));
        assert_eq!(dead(), [false; 5]);
        for nic in [1, 63, 64] {
            queue.put(Job::Device(nic, DeviceEvent::Fatal));
        }
        assert_eq!(dead(), [false, true, true, false, false]);
        queue.put(Job::Device(0, DeviceEvent::PortActive(1)));
        queue.put(Job::Device(63, DeviceEvent::PortActive(2)));
        assert_eq!(dead(), [false, true, false, false, false]);
    }
}
