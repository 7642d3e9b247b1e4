//! A bounded queue of receives: a ring of fixed entries, made once.

use crate::{PostError, RecvEntry, RecvWr, Sge};

/// A receive in a [`RecvRing`], without its scatter/gather entries.
#[derive(Clone, Copy, Default, Debug)]
pub struct QueuedRecv {
    /// The application's id.
    pub wr_id: u64,
    /// Bytes of all entries; more than a message can have count as `u32::MAX`.
    pub len: u32,
    sges: u32,
}

/// A bounded queue of receives. Entries `head..tail` are outstanding.
#[derive(Clone, Debug)]
pub struct RecvRing {
    slots: Box<[QueuedRecv]>,
    sges: Box<[Sge]>,
    max_sge: u32,
    max_wr: u32,
    head: u64,
    tail: u64,
}

impl RecvRing {
    /// A ring of `max_wr` receives (at least 1) with `max_sge` entries each.
    pub fn new(max_wr: u32, max_sge: u32) -> RecvRing {
        let slots = max_wr.max(1).next_power_of_two() as usize;
        RecvRing {
            slots: vec![QueuedRecv::default(); slots].into(),
            sges: vec![Sge::default(); slots * max_sge as usize].into(),
            max_sge,
            max_wr,
            // Far from 0, so that there is always something before the first.
            head: 1 << 62,
            tail: 1 << 62,
        }
    }

    /// Bytes of memory beside the structure itself.
    pub fn heap_bytes(&self) -> usize {
        size_of_val(&*self.slots) + size_of_val(&*self.sges)
    }

    #[inline]
    fn slot(&self, index: u64) -> usize {
        index as usize & (self.slots.len() - 1)
    }

    /// Outstanding receives.
    #[inline]
    pub fn len(&self) -> u32 {
        (self.tail - self.head) as u32
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// How many fit.
    pub fn max_wr(&self) -> u32 {
        self.max_wr
    }

    /// How many scatter/gather entries each may have.
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Changes how many fit. What is outstanding stays, and must fit.
    pub fn resize(&mut self, max_wr: u32) {
        self.grow(max_wr.max(self.len()));
        self.max_wr = max_wr;
    }

    /// Forgets all.
    #[inline]
    pub fn clear(&mut self) {
        self.head = self.tail;
    }

    /// Puts a receive of one entry, as almost all have, at the end; false if it is another one, or
    /// there is no room.
    #[inline(always)]
    pub fn push_usual(&mut self, wr: &RecvWr<'_>) -> bool {
        let [sge] = wr.sges else { return false };
        let slot = self.slot(self.tail);
        let fits = self.len() < self.max_wr;
        let Some(to) = self.sges.get_mut(slot * self.max_sge as usize).filter(|_| fits) else {
            return false;
        };
        *to = *sge;
        self.slots[slot] = QueuedRecv { wr_id: wr.wr_id, len: sge.length, sges: 1 };
        self.tail += 1;
        true
    }

    /// Puts a receive at the end.
    #[inline]
    pub fn push(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        if self.push_usual(wr) {
            return Ok(());
        }
        self.push_any(wr)
    }

    fn push_any(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        if wr.sges.len() > self.max_sge as usize {
            return Err(PostError::TooManySges { have: wr.sges.len(), max: self.max_sge });
        }
        if self.len() >= self.max_wr {
            return Err(PostError::QueueFull(self.len()));
        }
        self.put(self.tail, wr);
        self.tail += 1;
        Ok(())
    }

    /// Puts one that was taken out back in front; there is room even where others were posted
    /// meanwhile.
    pub fn push_front(&mut self, wr: &RecvWr<'_>) {
        self.grow(self.len() + 1);
        self.head -= 1;
        self.put(self.head, wr);
    }

    /// Makes room for `entries`. Only a ring that had something put back, or is resized, ever
    /// grows.
    fn grow(&mut self, entries: u32) {
        if self.slots.len() >= entries as usize {
            return;
        }
        let mut larger = RecvRing::new(entries, self.max_sge);
        (larger.max_wr, larger.head, larger.tail) = (self.max_wr, self.head, self.tail);
        for index in self.head..self.tail {
            let (rqe, sges) = self.at(index);
            larger.put(index, &RecvWr { wr_id: rqe.wr_id, sges });
        }
        *self = larger;
    }

    fn put(&mut self, index: u64, wr: &RecvWr<'_>) {
        let slot = self.slot(index);
        let at = slot * self.max_sge as usize;
        self.sges[at..at + wr.sges.len()].copy_from_slice(wr.sges);
        self.slots[slot] = QueuedRecv {
            wr_id: wr.wr_id,
            len: wr.sges.iter().fold(0, |all, s| all.saturating_add(s.length)),
            sges: wr.sges.len() as u32,
        };
    }

    #[inline]
    fn at(&self, index: u64) -> (QueuedRecv, &[Sge]) {
        let slot = self.slot(index);
        let at = slot * self.max_sge as usize;
        (self.slots[slot], &self.sges[at..at + self.slots[slot].sges as usize])
    }

    /// The oldest receive, with its scatter/gather entries.
    #[inline]
    pub fn front(&self) -> Option<(QueuedRecv, &[Sge])> {
        (self.head < self.tail).then(|| self.at(self.head))
    }

    /// The oldest receive.
    #[inline]
    pub fn oldest(&self) -> Option<RecvWr<'_>> {
        self.front().map(|(rqe, sges)| RecvWr { wr_id: rqe.wr_id, sges })
    }

    /// The index of the oldest; each receive has the next.
    #[inline]
    pub fn first(&self) -> u64 {
        self.head
    }

    /// The index that the next one gets.
    #[inline]
    pub fn next(&self) -> u64 {
        self.tail
    }

    /// An outstanding receive as it was posted.
    #[inline]
    pub fn wr(&self, index: u64) -> RecvWr<'_> {
        let (rqe, sges) = self.at(index);
        RecvWr { wr_id: rqe.wr_id, sges }
    }

    /// All that are outstanding, oldest first.
    pub fn entries(&self) -> Vec<RecvEntry> {
        let entry = |wr: RecvWr<'_>| RecvEntry { wr_id: wr.wr_id, sges: wr.sges.to_vec() };
        (self.head..self.tail).map(|i| entry(self.wr(i))).collect()
    }

    /// Takes the newest out: everything from `next` on.
    #[inline]
    pub fn truncate(&mut self, next: u64) {
        self.tail = self.tail.min(next).max(self.head);
    }

    /// Takes the oldest out.
    #[inline]
    pub fn remove_oldest(&mut self) {
        if self.head < self.tail {
            self.head += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ring: &mut RecvRing) -> Vec<u64> {
        let mut ids = vec![];
        while let Some(wr) = ring.oldest() {
            assert_eq!(wr.sges, [Sge { addr: wr.wr_id, length: 1, lkey: 2 }]);
            ids.push(wr.wr_id);
            ring.remove_oldest();
        }
        ids
    }

    #[test]
    fn usual_receives_and_others_come_out_as_they_were_posted() {
        let sge = |length| Sge { addr: 0x1000, length, lkey: 5 };
        let lists: [&[Sge]; 4] = [&[sge(8)], &[], &[sge(1), sge(2), sge(3)], &[sge(u32::MAX)]];
        let mut ring = RecvRing::new(4, 3);
        for wr_id in 0..40 {
            let wr = RecvWr { wr_id, sges: lists[wr_id as usize % 4] };
            assert_eq!(ring.push_usual(&wr), wr.sges.len() == 1);
            if wr.sges.len() != 1 {
                ring.push(&wr).unwrap();
            }
            let last = ring.wr(ring.next() - 1);
            assert_eq!(
                (last.wr_id, last.sges, ring.front().unwrap().0.len > 0),
                (wr_id, wr.sges, wr_id % 4 != 1)
            );
            ring.remove_oldest();
        }
        (0..4).for_each(|wr_id| assert!(ring.push_usual(&RecvWr { wr_id, sges: lists[0] })));
        let more = RecvWr { wr_id: 4, sges: lists[0] };
        assert_eq!(
            (ring.push_usual(&more), ring.push(&more)),
            (false, Err(PostError::QueueFull(4)))
        );
        let mut none = RecvRing::new(4, 0);
        let refused = Err(PostError::TooManySges { have: 1, max: 0 });
        assert_eq!((none.push_usual(&more), none.push(&more), none.len()), (false, refused, 0));
    }

    #[test]
    fn what_is_put_back_comes_first_and_always_fits() {
        let mut ring = RecvRing::new(4, 1);
        let sges = |wr_id: u64| [Sge { addr: wr_id, length: 1, lkey: 2 }];
        for wr_id in 10..14 {
            ring.push(&RecvWr { wr_id, sges: &sges(wr_id) }).unwrap();
        }
        assert_eq!(ring.push(&RecvWr { wr_id: 0, sges: &[] }), Err(PostError::QueueFull(4)));
        for wr_id in (5..10).rev() {
            ring.push_front(&RecvWr { wr_id, sges: &sges(wr_id) });
        }
        assert_eq!(ring.push(&RecvWr { wr_id: 0, sges: &[] }), Err(PostError::QueueFull(9)));
        ring.resize(10);
        ring.push(&RecvWr { wr_id: 14, sges: &sges(14) }).unwrap();
        assert_eq!(ids(&mut ring), (5..15).collect::<Vec<_>>());
        assert!(ring.is_empty());
    }
}
