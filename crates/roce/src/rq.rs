//! The receive queue: a ring of fixed entries, made once.

use crate::backlog::RecvEntry;
use crate::wr::{PostError, RecvWr};
use unbroken_types::{QpCaps, Sge};

#[derive(Clone, Copy, Default)]
pub(crate) struct Rqe {
    pub(crate) wr_id: u64,
    /// Bytes of all entries.
    pub(crate) len: u64,
    sges: u32,
}

/// Entries `head..tail` are outstanding; both only grow.
#[derive(Clone)]
pub(crate) struct RecvRing {
    slots: Box<[Rqe]>,
    sges: Box<[Sge]>,
    sges_per_slot: usize,
    caps: QpCaps,
    head: u64,
    tail: u64,
}

impl RecvRing {
    pub(crate) fn new(caps: &QpCaps) -> RecvRing {
        let slots = caps.max_recv_wr.max(1).next_power_of_two() as usize;
        let sges_per_slot = caps.max_recv_sge as usize;
        RecvRing {
            slots: vec![Rqe::default(); slots].into(),
            sges: vec![Sge::default(); slots * sges_per_slot].into(),
            sges_per_slot,
            caps: *caps,
            head: 0,
            tail: 0,
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.slots) + size_of_val(&*self.sges)
    }

    fn slot(&self, index: u64) -> usize {
        index as usize & (self.slots.len() - 1)
    }

    pub(crate) fn len(&self) -> u32 {
        (self.tail - self.head) as u32
    }

    pub(crate) fn clear(&mut self) {
        self.head = self.tail;
    }

    pub(crate) fn push(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        if wr.sges.len() > self.sges_per_slot {
            return Err(PostError::TooManySges { have: wr.sges.len(), max: self.caps.max_recv_sge });
        }
        if self.len() >= self.caps.max_recv_wr {
            return Err(PostError::QueueFull(self.len()));
        }
        let slot = self.slot(self.tail);
        let at = slot * self.sges_per_slot;
        self.sges[at..at + wr.sges.len()].copy_from_slice(wr.sges);
        self.slots[slot] =
            Rqe { wr_id: wr.wr_id, len: wr.sges.iter().map(|s| s.length as u64).sum(), sges: wr.sges.len() as u32 };
        self.tail += 1;
        Ok(())
    }

    fn at(&self, index: u64) -> (Rqe, &[Sge]) {
        let slot = self.slot(index);
        let at = slot * self.sges_per_slot;
        (self.slots[slot], &self.sges[at..at + self.slots[slot].sges as usize])
    }

    /// The oldest outstanding receive.
    pub(crate) fn front(&self) -> Option<(Rqe, &[Sge])> {
        (self.head < self.tail).then(|| self.at(self.head))
    }

    /// Takes the oldest out.
    pub(crate) fn pop(&mut self) -> Option<Rqe> {
        let (rqe, _) = self.front()?;
        self.head += 1;
        Some(rqe)
    }

    /// All that are outstanding, oldest first.
    pub(crate) fn entries(&self) -> Vec<RecvEntry> {
        (self.head..self.tail)
            .map(|i| {
                let (rqe, sges) = self.at(i);
                RecvEntry { wr_id: rqe.wr_id, sges: sges.to_vec() }
            })
            .collect()
    }
}
