//! Requests that the responder answers with data, READs and atomics, and that are not fully
//! answered yet, in PSN order.
//!
//! A repeated request takes the place of what it overlaps, or its place in the order; one whose
//! answer is still to come is ignored. So the queue never holds a PSN twice and stays as short as
//! the requests that the peer may have outstanding.
//!
//! A requester that asks again too early (it was not run for a while, say) may receive the first
//! answers after all, and go on to new requests while its repeats still wait here. One that has
//! most of an answer asks again for the rest only, in several requests if need be. So repeats have
//! a room of their own beside the requests that were never answered.
//!
//! The values that atomics found are kept for as many atomics as the peer may have outstanding: the
//! repeat of one that it may still wait for is answered from there, and never run again.

use crate::encoding::{psn_add, psn_ahead, psn_diff};
use std::collections::VecDeque;

/// Repeated requests beside those that the peer may have outstanding.
const MAX_REPEATS: usize = 64;

/// What is left to answer of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReadJob {
    /// PSN of the next response packet.
    pub(crate) psn: u32,
    /// Response packets left, at least 1.
    pub(crate) packets: u32,
    pub(crate) va: u64,
    pub(crate) rkey: u32,
    /// Bytes left.
    pub(crate) len: u32,
    /// No packet of it has been sent.
    pub(crate) first: bool,
    /// The answer of an atomic: the value that it found.
    pub(crate) atomic: Option<u64>,
}

impl ReadJob {
    fn atomic(psn: u32, value: u64) -> ReadJob {
        ReadJob { psn, packets: 1, va: 0, rkey: 0, len: 0, first: true, atomic: Some(value) }
    }

    /// One past the PSN of the last response packet.
    fn end(&self) -> u32 {
        psn_add(self.psn, self.packets)
    }
}

#[derive(Clone, Default)]
pub(crate) struct ReadQueue {
    jobs: VecDeque<ReadJob>,
    max: usize,
    /// One past the PSN of the furthest response packet that has been sent.
    answered: Option<u32>,
    /// PSN and value of the last atomics, at most `max`.
    atomics: VecDeque<(u32, u64)>,
    /// Responses that were sent again.
    pub(crate) retransmits: u32,
}

impl ReadQueue {
    /// Empties the queue and makes room for `max` requests.
    pub(crate) fn reset(&mut self, max: usize) {
        self.jobs.clear();
        self.jobs.reserve(max);
        self.max = max;
        self.answered = None;
        self.atomics.clear();
    }

    /// Whether one more request may be outstanding; makes room for it.
    pub(crate) fn make_room(&mut self) -> bool {
        if self.jobs.len() < self.max {
            return true;
        }
        let answered_before = |job: &ReadJob| {
            self.answered.is_some_and(|answered| psn_diff(job.end(), answered) <= 0)
        };
        let repeats = self.jobs.iter().take_while(|&job| answered_before(job)).count();
        if self.jobs.len() == self.max + MAX_REPEATS && repeats > 0 {
            self.jobs.pop_front();
        }
        self.jobs.len() - repeats < self.max
    }

    /// Takes the answer of an atomic that was just run, after [`ReadQueue::make_room`].
    pub(crate) fn push_atomic(&mut self, psn: u32, value: u64) {
        if self.atomics.len() == self.max {
            self.atomics.pop_front();
        }
        self.atomics.push_back((psn, value));
        self.jobs.push_back(ReadJob::atomic(psn, value));
    }

    /// Takes a repeated atomic. One whose value is no longer kept is not outstanding at its
    /// requester: it is dropped.
    pub(crate) fn repeat_atomic(&mut self, psn: u32) {
        if let Some(&(_, value)) = self.atomics.iter().rev().find(|(p, _)| *p == psn) {
            self.repeat(ReadJob::atomic(psn, value));
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.jobs.capacity() * size_of::<ReadJob>()
            + self.atomics.capacity() * size_of::<(u32, u64)>()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.jobs.clear();
    }

    /// Takes a request that follows all others; false if the peer has more outstanding than agreed.
    pub(crate) fn push(&mut self, job: ReadJob) -> bool {
        let room = self.make_room();
        if room {
            if self.answered.is_some_and(|answered| psn_diff(job.psn, answered) < 0) {
                self.answered = None; // so long ago that PSNs have come round
            }
            self.jobs.push_back(job);
        }
        room
    }

    /// Takes a repeated request. One that finds no room is dropped; its requester asks again.
    pub(crate) fn repeat(&mut self, job: ReadJob) {
        let end = job.end();
        for i in 0..self.jobs.len() {
            let there = self.jobs[i];
            if psn_diff(job.psn, there.end()) >= 0 {
                continue;
            }
            if psn_diff(job.psn, there.psn) >= 0 {
                return; // still to be answered
            }
            if psn_diff(end, there.psn) <= 0 {
                if self.jobs.len() < self.max + MAX_REPEATS {
                    self.jobs.insert(i, job);
                }
                return;
            }
            let rest = psn_diff(there.end(), end);
            if rest > 0 {
                // A part of the same answer: the rest of it is still to come.
                let new = psn_ahead(there.psn, job.psn);
                let bytes = there.va.wrapping_sub(job.va) as u32;
                self.jobs[i] = ReadJob {
                    packets: new + there.packets,
                    len: bytes.saturating_add(there.len),
                    ..job
                };
                return;
            }
            self.jobs[i] = job;
            while self.jobs.get(i + 1).is_some_and(|next| psn_diff(next.psn, end) < 0) {
                self.jobs.remove(i + 1);
            }
            return;
        }
        if self.jobs.len() < self.max + MAX_REPEATS {
            self.jobs.push_back(job);
        }
    }

    /// The request to answer next.
    pub(crate) fn front(&self) -> Option<ReadJob> {
        self.jobs.front().copied()
    }

    /// A response packet of `len` bytes of the first request has been sent.
    pub(crate) fn sent(&mut self, len: u32) {
        let Some(job) = self.jobs.front_mut() else { return };
        let next = psn_add(job.psn, 1);
        if self.answered.is_none_or(|answered| psn_diff(next, answered) > 0) {
            self.answered = Some(next);
        } else {
            self.retransmits += 1;
        }
        if job.packets == 1 {
            self.jobs.pop_front();
            return;
        }
        job.psn = psn_add(job.psn, 1);
        job.packets -= 1;
        job.va = job.va.wrapping_add(len as u64);
        job.len -= len;
        job.first = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(psn: u32, packets: u32) -> ReadJob {
        ReadJob {
            psn,
            packets,
            va: psn as u64 * 256,
            rkey: 1,
            len: packets * 256,
            first: true,
            atomic: None,
        }
    }

    fn queue(jobs: &[ReadJob]) -> ReadQueue {
        let mut q = ReadQueue::default();
        q.reset(4);
        assert!(jobs.iter().all(|&j| q.push(j)));
        q
    }

    #[test]
    fn repeats_keep_the_order_and_the_bound() {
        // Before everything: to the front.
        let mut q = queue(&[job(40, 8), job(48, 8)]);
        q.repeat(job(32, 8));
        assert_eq!(q.jobs, [job(32, 8), job(40, 8), job(48, 8)]);
        // Still to be answered: ignored.
        q.repeat(job(42, 6));
        q.repeat(job(48, 8));
        assert_eq!(q.jobs.len(), 3);
        // Answered in part: begins anew where it is asked to.
        for _ in 0..4 {
            q.sent(256);
        }
        q.repeat(job(34, 6));
        assert_eq!(q.jobs, [job(34, 6), job(40, 8), job(48, 8)]);
        // Split otherwise than before: what it covers goes.
        q.repeat(job(30, 26));
        assert_eq!(q.jobs, [job(30, 26)]);
        // Answered long ago, behind everything that is left.
        q.repeat(job(60, 1));
        assert!(q.push(job(61, 1)) && q.push(job(62, 1)) && !q.push(job(63, 1)));
        q.repeat(job(20, 1));
        assert_eq!(q.jobs[0], job(20, 1), "repeats have a room of their own");
        (0..200).for_each(|i| q.repeat(job(10_000 + 2 * i, 1)));
        assert_eq!(q.jobs.len(), 4 + MAX_REPEATS);
    }

    /// A requester that has most of an answer asks for what it lacks, in pieces.
    #[test]
    fn pieces_of_an_answer_come_once() {
        let mut q = queue(&[job(40, 16)]);
        (0..12).for_each(|_| q.sent(256));
        q.repeat(job(41, 1));
        q.repeat(job(44, 2));
        assert_eq!(
            q.jobs.iter().map(|j| (j.psn, j.packets)).collect::<Vec<_>>(),
            [(41, 1), (44, 2), (52, 4)]
        );
        // One that reaches into what is still to come takes it along.
        q.repeat(job(50, 3));
        assert_eq!(q.jobs[2], job(50, 6));
        (0..9).for_each(|_| q.sent(256));
        assert!(q.is_empty());
        assert_eq!(q.retransmits, 5);
    }

    #[test]
    fn psns_that_come_round_are_not_repeats() {
        let mut q = queue(&[job(40, 1)]);
        q.sent(256);
        q.push(job(40 + (1 << 23) + 5, 1));
        q.sent(256);
        assert_eq!(q.retransmits, 0);
    }

    /// The requester repeats what is on its way to it, then gets it and goes on.
    #[test]
    fn repeats_make_room_for_new_requests() {
        let mut q = queue(&[job(0, 2), job(2, 2), job(4, 2), job(6, 2)]);
        assert!(!q.push(job(8, 2)));
        for _ in 0..7 {
            q.sent(256);
        }
        for psn in [0, 2, 4] {
            q.repeat(job(psn, 2));
        }
        assert!(q.push(job(8, 2)) && q.push(job(10, 2)) && q.push(job(12, 2)));
        assert_eq!(q.jobs.iter().map(|j| j.psn).collect::<Vec<_>>(), [0, 2, 4, 7, 8, 10, 12]);
        // The rest of a first answer is not given up.
        assert!(!q.push(job(14, 2)));
    }

    #[test]
    fn atomics_are_answered_again_while_they_may_be_outstanding() {
        let mut q = queue(&[]);
        for psn in 10..15 {
            assert!(q.make_room());
            q.push_atomic(psn, u64::from(psn));
            q.sent(0);
        }
        for psn in [12, 10, 14, 12] {
            q.repeat_atomic(psn);
        }
        assert_eq!(
            q.jobs.iter().map(|j| (j.psn, j.atomic)).collect::<Vec<_>>(),
            [(12, Some(12)), (14, Some(14))]
        );
    }

    #[test]
    fn a_job_is_answered_packet_by_packet() {
        let mut q = queue(&[ReadJob {
            psn: 0xff_ffff,
            packets: 2,
            va: 0,
            rkey: 1,
            len: 300,
            first: true,
            atomic: None,
        }]);
        q.sent(256);
        assert_eq!(
            q.front(),
            Some(ReadJob {
                psn: 0,
                packets: 1,
                va: 256,
                rkey: 1,
                len: 44,
                first: false,
                atomic: None
            })
        );
        q.sent(44);
        assert!(q.is_empty());
    }
}
