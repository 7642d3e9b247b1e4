//! The sends that are outstanding, as they were posted: a ring of fixed rows ([`SendRow`]), made
//! once. What a row cannot hold (more entries than one, inline data, the operands of an atomic)
//! lies beside the ring, where there is room from the first send that needs it.

use crate::row::{Marks, SendRow};
use unbroken_types::{
    check_send, Completions, Outstanding, PostError, QpCaps, SendBatch, SendEntry, SendFlags,
    SendOpcode, SendWr, Sge, Wc, WcStatus, MAX_MESSAGE_BYTES,
};

/// What few sends have, each made for the first that has it, with room for all.
#[derive(Clone, Default)]
struct Beside {
    sges: Box<[Sge]>,
    inline: Box<[u8]>,
    /// Of atomics: the value to compare with or to add, and the one to swap in.
    operands: Box<[(u64, u64)]>,
}

/// The part of a row in something that has `each` of them for every row.
fn part(slot: usize, each: u32, count: usize) -> std::ops::Range<usize> {
    let begin = slot * each as usize;
    begin..begin + count
}

/// A bounded queue of sends. Entries `head..tail` are outstanding; both only grow.
#[derive(Clone)]
pub(crate) struct Sends<R> {
    rows: Box<[R]>,
    beside: Beside,
    caps: QpCaps,
    wc_qpn: u32,
    sig_all: bool,
    head: u64,
    tail: u64,
}

/// Whether a send can be recorded in a row alone, and there is nothing about it that could be
/// wrong.
#[inline(always)]
fn is_usual(wr: &SendWr<'_>, sge: &Sge) -> bool {
    use SendOpcode::{Read, Send, SendImm, Write, WriteImm};
    matches!(wr.opcode, Write | WriteImm | Send | SendImm | Read)
        && !wr.flags.contains(SendFlags::INLINE)
        && wr.inline_data.is_none()
        && u64::from(sge.length) <= MAX_MESSAGE_BYTES
}

impl<R: SendRow> Sends<R> {
    pub(crate) fn new(caps: &QpCaps, wc_qpn: u32, sig_all: bool) -> Sends<R> {
        let rows = caps.max_send_wr.max(1).next_power_of_two() as usize;
        let rows = vec![R::EMPTY; rows].into();
        Sends { rows, beside: Beside::default(), caps: *caps, wc_qpn, sig_all, head: 0, tail: 0 }
    }

    #[inline]
    fn slot(&self, index: u64) -> usize {
        index as usize & (self.rows.len() - 1)
    }

    #[inline]
    fn row(&self, index: u64) -> &R {
        &self.rows[self.slot(index)]
    }

    #[inline]
    fn row_mut(&mut self, index: u64) -> &mut R {
        &mut self.rows[index as usize & (self.rows.len() - 1)]
    }

    fn len(&self) -> u32 {
        (self.tail - self.head) as u32
    }

    /// How many more there is room for.
    #[inline(always)]
    pub(crate) fn room(&self) -> u32 {
        self.caps.max_send_wr.saturating_sub(self.len())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// The oldest that is outstanding.
    #[inline]
    pub(crate) fn first(&self) -> u64 {
        self.head
    }

    /// The next to be posted.
    #[inline]
    pub(crate) fn next(&self) -> u64 {
        self.tail
    }

    /// What an outstanding entry is.
    #[inline]
    pub(crate) fn at(&self, index: u64) -> Outstanding {
        let row = self.row(index);
        Outstanding {
            wr_id: row.wr_id(),
            opcode: row.opcode(),
            signaled: self.sig_all || row.flags().contains(SendFlags::SIGNALED),
            executed: row.marks().executed,
        }
    }

    /// An outstanding entry as it was posted.
    pub(crate) fn wr(&self, index: u64) -> SendWr<'_> {
        let row = self.row(index);
        let (plain, marks) = (row.wr(), row.marks());
        if !marks.beside {
            return plain;
        }
        let (slot, count, there) = (self.slot(index), usize::from(marks.count), &self.beside);
        if plain.flags.contains(SendFlags::INLINE) {
            let data = &there.inline[part(slot, self.caps.max_inline_data, count)];
            return SendWr { sges: &[], inline_data: Some(data), ..plain };
        }
        let sges =
            if count == 0 { &[] } else { &there.sges[part(slot, self.caps.max_send_sge, count)] };
        let has_operands = plain.opcode.is_atomic() || plain.opcode == SendOpcode::BindMw;
        let (compare_add, swap) = if has_operands { there.operands[slot] } else { (0, 0) };
        SendWr { sges, compare_add, swap, ..plain }
    }

    /// Some packet of an outstanding entry may leave from now on; or none has.
    #[inline]
    pub(crate) fn set_started(&mut self, index: u64, started: bool) {
        self.row_mut(index).marks_mut().started = started;
    }

    /// Takes the oldest out, without a WC.
    #[inline]
    pub(crate) fn remove_oldest(&mut self) {
        self.head += u64::from(self.head < self.tail);
    }

    /// Takes out all before that one, which is outstanding or the next, without a WC.
    #[inline]
    pub(crate) fn remove_until(&mut self, index: u64) {
        self.head = index;
    }

    /// Takes the newest out, without a WC: everything from `next` on.
    pub(crate) fn truncate(&mut self, next: u64) {
        self.tail = self.tail.min(next).max(self.head);
    }

    /// Puts a send at the tail that is started at once, if it is a usual one and there is room.
    #[inline(always)]
    pub(crate) fn push_usual(&mut self, wr: &SendWr<'_>) -> bool {
        let [sge] = wr.sges else { return false };
        let fits = is_usual(wr, sge) && self.room() > 0;
        if fits {
            self.row_mut(self.tail).write(wr, *sge, Marks::USUAL);
            self.tail += 1;
        }
        fits
    }

    /// Checks a send against the QP's sizes and puts it at the tail.
    pub(crate) fn push(&mut self, wr: &SendWr<'_>, started: bool) -> Result<(), PostError> {
        if self.len() >= self.caps.max_send_wr {
            return Err(PostError::QueueFull(self.len()));
        }
        let (sge, marks) = match wr.sges {
            [one] if is_usual(wr, one) => (*one, Marks { started, ..Marks::default() }),
            _ => {
                let count = self.put_beside(wr)?;
                (Sge::default(), Marks { beside: true, count, started, ..Marks::default() })
            }
        };
        self.row_mut(self.tail).write(wr, sge, marks);
        self.tail += 1;
        Ok(())
    }

    /// The row of a send that is written in place before it is counted ([`Self::wrote`]).
    #[inline(always)]
    pub(crate) fn row_ahead(&mut self, index: u64) -> &mut R {
        self.row_mut(index)
    }

    /// Where so many bytes of its inline data go. `None`: that is more than the QP takes, or none
    /// has had any yet, for which there is no room so far.
    pub(crate) fn inline_ahead(&mut self, index: u64, bytes: u32) -> Option<&mut [u8]> {
        if bytes > self.caps.max_inline_data || self.beside.inline.is_empty() {
            return None;
        }
        let slot = self.slot(index);
        Some(&mut self.beside.inline[part(slot, self.caps.max_inline_data, bytes as usize)])
    }

    #[inline(always)]
    pub(crate) fn wrote(&mut self, count: u32) {
        self.tail += u64::from(count);
    }

    /// Checks the next send, which is not a usual one, and records what its row cannot hold.
    fn put_beside(&mut self, wr: &SendWr<'_>) -> Result<u16, PostError> {
        check_send(&self.caps, wr)?;
        let (slot, rows) = (self.slot(self.tail), self.rows.len());
        let (caps, there) = (&self.caps, &mut self.beside);
        if wr.opcode.is_atomic() || wr.opcode == SendOpcode::BindMw {
            room_for(&mut there.operands, rows, 1)[slot] = (wr.compare_add, wr.swap);
        }
        let count = match wr.inline_data {
            Some(data) => {
                let room = room_for(&mut there.inline, rows, caps.max_inline_data);
                room[part(slot, caps.max_inline_data, data.len())].copy_from_slice(data);
                data.len()
            }
            None => {
                let room = room_for(&mut there.sges, rows, caps.max_send_sge);
                room[part(slot, caps.max_send_sge, wr.sges.len())].copy_from_slice(wr.sges);
                wr.sges.len()
            }
        };
        Ok(count as u16)
    }

    /// Puts a batch at the tail, or nothing of it.
    pub(crate) fn push_all(
        &mut self,
        batch: &dyn SendBatch,
        started: bool,
        mut each: impl FnMut(&SendWr<'_>),
    ) -> Result<(), PostError> {
        let tail = self.tail;
        if self.len() as usize + batch.count() > self.caps.max_send_wr as usize {
            return Err(PostError::QueueFull(self.len()));
        }
        let pushed = (0..batch.count()).try_for_each(|i| {
            let wr = batch.wr(i);
            self.push(&wr, started).map(|()| each(&wr))
        });
        if pushed.is_err() {
            self.tail = tail;
        }
        pushed
    }

    /// The oldest has been done: takes it out, and says so if that was asked for.
    pub(crate) fn complete(&mut self, out: &mut (impl Completions + ?Sized)) {
        let row = self.row(self.head);
        if self.sig_all || row.flags().contains(SendFlags::SIGNALED) {
            out.send(self.wc(self.head, WcStatus::Success));
        }
        self.head += 1;
    }

    /// The oldest fails with `first`, all others are flushed.
    pub(crate) fn flush(&mut self, first: WcStatus, out: &mut (impl Completions + ?Sized)) {
        let mut status = first;
        for index in self.head..self.tail {
            out.send(self.wc(index, status));
            status = WcStatus::WrFlushErr;
        }
        self.head = self.tail;
    }

    /// The WC that the journal makes of an entry by itself.
    fn wc(&self, index: u64, status: WcStatus) -> Wc {
        let wr = self.wr(index);
        let byte_len = match status {
            WcStatus::Success => length_of(&wr),
            _ => 0,
        };
        let opcode = wr.opcode.wc_opcode() as u32;
        Wc {
            wr_id: wr.wr_id,
            status: status as u32,
            opcode,
            byte_len,
            qp_num: self.wc_qpn,
            ..Wc::default()
        }
    }

    /// All that are outstanding, oldest first.
    pub(crate) fn entries(&self) -> Vec<SendEntry> {
        let entry = |index| {
            let Marks { started, executed, .. } = *self.row(index).marks();
            SendEntry { started, executed, ..SendEntry::from(&self.wr(index)) }
        };
        (self.head..self.tail).map(entry).collect()
    }

    /// Puts an entry of another QP at the tail.
    pub(crate) fn adopt(&mut self, e: &SendEntry) -> Result<(), PostError> {
        self.push(&e.wr(), e.started)?;
        self.row_mut(self.tail - 1).marks_mut().executed = e.executed;
        Ok(())
    }
}

/// `each` of something for every row, made if they are not there yet.
fn room_for<T: Clone + Default>(all: &mut Box<[T]>, rows: usize, each: u32) -> &mut [T] {
    if all.is_empty() {
        *all = vec![T::default(); rows * each as usize].into();
    }
    all
}

/// Bytes of a message; of an atomic, those of the answer.
fn length_of(wr: &SendWr<'_>) -> u32 {
    match (wr.opcode.is_atomic(), wr.inline_data) {
        (true, _) => 8,
        (false, Some(data)) => data.len() as u32,
        (false, None) => wr.sges.iter().map(|sge| sge.length).sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::PlainRow;

    fn ring() -> Sends<PlainRow> {
        let caps = QpCaps {
            max_send_wr: 4,
            max_recv_wr: 1,
            max_send_sge: 3,
            max_recv_sge: 1,
            max_inline_data: 16,
        };
        Sends::new(&caps, 7, false)
    }

    fn sge(length: u32) -> Sge {
        Sge { addr: 0x1000 + u64::from(length), length, lkey: 5 }
    }

    fn wr<'a>(opcode: SendOpcode, sges: &'a [Sge], inline_data: Option<&'a [u8]>) -> SendWr<'a> {
        let flags = if inline_data.is_some() { SendFlags::INLINE } else { SendFlags::SIGNALED };
        let (compare_add, swap) = if opcode.is_atomic() { (3, 4) } else { (0, 0) };
        SendWr {
            wr_id: 11,
            opcode,
            flags,
            imm_data: 9,
            remote_addr: 0x2000,
            rkey: 6,
            compare_add,
            swap,
            sges,
            inline_data,
            ud: None,
        }
    }

    /// Every kind of send, in each place of the ring, in turns.
    #[test]
    fn what_was_posted_is_what_comes_out() {
        use SendOpcode::{CmpSwap, Read, Send, Write};
        let (one, three, none): (&[Sge], &[Sge], &[Sge]) =
            (&[sge(8)], &[sge(1), sge(2), sge(3)], &[]);
        let kinds = [
            wr(Write, one, None),
            wr(Send, three, None),
            wr(Send, none, Some(b"inline")),
            wr(CmpSwap, one, None),
            wr(Read, none, None),
        ];
        let mut ring = ring();
        for (index, wr) in (0..40).map(|n| (n, &kinds[n as usize % kinds.len()])) {
            let usual = ring.push_usual(wr);
            assert_eq!(usual, wr.opcode == Write, "of the usual kind: {wr:?}");
            if !usual {
                ring.push(wr, true).unwrap();
            }
            let right = SendEntry { started: true, ..SendEntry::from(wr) };
            assert_eq!(ring.entries().last(), Some(&right), "at {index}");
            if index >= 2 {
                ring.remove_oldest();
            }
        }
    }

    #[test]
    fn a_send_that_does_not_fit_changes_nothing() {
        let four = [sge(1), sge(2), sge(3), sge(4)];
        let mut ring = ring();
        let long = [0; 17];
        let refused = |ring: &mut Sends<PlainRow>, wr: &SendWr<'_>| {
            (ring.push_usual(wr), ring.push(wr, false).unwrap_err())
        };
        assert_eq!(
            refused(&mut ring, &wr(SendOpcode::Send, &four, None)),
            (false, PostError::TooManySges { have: 4, max: 3 })
        );
        let (_, inline) = refused(&mut ring, &wr(SendOpcode::Send, &[], Some(&long)));
        assert_eq!(inline, PostError::InlineTooLong { have: 17, max: 16 });
        let (usual, error) = refused(&mut ring, &wr(SendOpcode::Write, &[sge(u32::MAX)], None));
        assert!(!usual && matches!(error, PostError::TooLong { .. }), "{error}");
        (0..4).for_each(|_| assert!(ring.push_usual(&wr(SendOpcode::Write, &four[..1], None))));
        assert_eq!(
            refused(&mut ring, &wr(SendOpcode::Write, &four[..1], None)),
            (false, PostError::QueueFull(4))
        );
        assert_eq!((ring.first(), ring.next()), (0, 4));
    }
}
