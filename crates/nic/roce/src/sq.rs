//! The send queue: a ring of fixed entries, made once. Scatter/gather lists and inline data lie
//! beside it, indexed by slot.

use crate::connection::send_wc;
use unbroken_types::{
    send_len, Access, Completions, KeyChange, MwBind, Outstanding, PostError, QpCaps, QpState,
    SendBatch, SendEntry, SendFlags, SendOpcode, SendWr, Sge, WcStatus, ATOMIC_BYTES,
};

/// A WR in the queue.
#[derive(Clone, Copy)]
pub(crate) struct Wqe {
    pub(crate) wr_id: u64,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    /// Bytes of the message; of an atomic, those of the answer.
    pub(crate) len: u32,
    pub(crate) imm_data: u32,
    /// PSN of its first packet, and how many PSNs it takes; set when it is sent for the first time.
    pub(crate) first_psn: u32,
    pub(crate) packets: u32,
    pub(crate) flags: SendFlags,
    pub(crate) opcode: SendOpcode,
    sges: u16,
    /// Where it is in the ring.
    slot: u16,
    /// Some packet of it may have left, in this life or an earlier one.
    pub(crate) started: bool,
    /// The peer has executed it in an earlier life: it completes without the wire.
    pub(crate) executed: bool,
}

impl Wqe {
    const EMPTY: Wqe = Wqe {
        wr_id: 0,
        remote_addr: 0,
        rkey: 0,
        len: 0,
        imm_data: 0,
        first_psn: 0,
        packets: 0,
        flags: SendFlags(0),
        opcode: SendOpcode::Send,
        sges: 0,
        slot: 0,
        started: false,
        executed: false,
    };
}

impl Wqe {
    /// It has to come to its end even where nothing new is started (state SQD): an earlier life may
    /// have sent some of it.
    pub(crate) fn begun(&self) -> bool {
        self.started || self.executed
    }
}

/// An idle QP shall be small.
const _: () = assert!(size_of::<Wqe>() <= 48);

/// What only atomics and bindings of windows have.
#[derive(Clone, Copy, Default)]
pub(crate) struct Operands {
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
}

/// The data of a WR.
pub(crate) enum Data<'a> {
    Inline(&'a [u8]),
    Sges(&'a [Sge]),
}

/// A bounded queue of sends, made once. Entries `head..tail` are outstanding; both only grow.
#[derive(Clone)]
pub struct SendRing {
    slots: Box<[Wqe]>,
    sges: Box<[Sge]>,
    /// Made for the first WR with inline data.
    inline: Box<[u8]>,
    /// Made for the first atomic or binding.
    operands: Box<[Operands]>,
    caps: QpCaps,
    /// The QPN that WCs carry.
    wc_qpn: u32,
    /// Every send makes a WC.
    sig_all: bool,
    pub(crate) head: u64,
    pub(crate) tail: u64,
}

impl SendRing {
    /// A ring of these sizes; its WCs carry `wc_qpn`. With `sig_all` every send makes one.
    pub fn new(caps: &QpCaps, wc_qpn: u32, sig_all: bool) -> SendRing {
        let slots = caps.max_send_wr.max(1).next_power_of_two() as usize;
        SendRing {
            slots: vec![Wqe::EMPTY; slots].into(),
            sges: vec![Sge::default(); slots * caps.max_send_sge as usize].into(),
            inline: Box::default(),
            operands: Box::default(),
            caps: *caps,
            wc_qpn,
            sig_all,
            head: 0,
            tail: 0,
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.slots)
            + size_of_val(&*self.sges)
            + self.inline.len()
            + size_of_val(&*self.operands)
    }

    /// How many entries it has room for.
    pub(crate) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// The slot of an entry.
    pub(crate) fn slot(&self, index: u64) -> usize {
        index as usize & (self.slots.len() - 1)
    }

    /// Outstanding sends.
    pub fn len(&self) -> u32 {
        (self.tail - self.head) as u32
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// The oldest that is outstanding.
    #[inline]
    pub fn first(&self) -> u64 {
        self.head
    }

    /// The next to be posted.
    #[inline]
    pub fn next(&self) -> u64 {
        self.tail
    }

    /// What an outstanding entry is.
    #[inline]
    pub fn at(&self, index: u64) -> Outstanding {
        let wqe = self.get(index);
        Outstanding {
            wr_id: wqe.wr_id,
            opcode: wqe.opcode,
            signaled: self.sig_all || wqe.flags.contains(SendFlags::SIGNALED),
            executed: wqe.executed,
        }
    }

    /// An outstanding entry as it was posted.
    pub fn wr(&self, index: u64) -> SendWr<'_> {
        let w = self.get(index);
        let (sges, inline_data): (&[Sge], _) = match self.data(index) {
            Data::Inline(bytes) => (&[], Some(bytes)),
            Data::Sges(sges) => (sges, None),
        };
        let Operands { compare_add, swap } = self.operands(w);
        SendWr {
            wr_id: w.wr_id,
            opcode: w.opcode,
            flags: w.flags,
            imm_data: w.imm_data,
            remote_addr: w.remote_addr,
            rkey: w.rkey,
            compare_add,
            swap,
            sges,
            inline_data,
            ud: None,
        }
    }

    /// Some packet of an outstanding entry may leave from now on; or none has.
    #[inline]
    pub fn set_started(&mut self, index: u64, started: bool) {
        self.get_mut(index).started = started;
    }

    /// Takes the oldest out, without a WC.
    #[inline]
    pub fn remove_oldest(&mut self) {
        self.head += u64::from(self.head < self.tail);
    }

    /// Takes the newest out, without a WC: everything from `next` on.
    pub fn truncate(&mut self, next: u64) {
        self.tail = self.tail.min(next).max(self.head);
    }

    /// Forgets all that are outstanding.
    pub(crate) fn clear(&mut self) {
        self.head = self.tail;
    }

    pub(crate) fn get(&self, index: u64) -> &Wqe {
        &self.slots[self.slot(index)]
    }

    pub(crate) fn get_mut(&mut self, index: u64) -> &mut Wqe {
        let slot = self.slot(index);
        &mut self.slots[slot]
    }

    /// Checks a WR against the QP's sizes and puts it at the tail.
    #[inline]
    pub fn push(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.push_as(wr.wr_id, wr)
    }

    /// Checks a WR against the QP's sizes and puts it at the tail under the number `wr_id`, not its
    /// own.
    #[inline]
    pub fn push_as(&mut self, wr_id: u64, wr: &SendWr<'_>) -> Result<(), PostError> {
        let len = send_len(&self.caps, wr)?;
        if self.len() >= self.caps.max_send_wr {
            return Err(PostError::QueueFull(self.len()));
        }
        let slot = self.slot(self.tail);
        match wr.inline_data {
            Some(data) => {
                if self.inline.is_empty() {
                    self.inline =
                        vec![0; self.slots.len() * self.caps.max_inline_data as usize].into();
                }
                let at = slot * self.caps.max_inline_data as usize;
                self.inline[at..at + data.len()].copy_from_slice(data);
            }
            None => {
                let at = slot * self.caps.max_send_sge as usize;
                let room = &mut self.sges[at..at + wr.sges.len()];
                // Most have one, for which a call would cost more than the copy.
                room.iter_mut().zip(wr.sges).for_each(|(to, sge)| *to = *sge);
            }
        }
        if wr.opcode.is_atomic() || wr.opcode == SendOpcode::BindMw {
            if self.operands.is_empty() {
                self.operands = vec![Operands::default(); self.slots.len()].into();
            }
            self.operands[slot] = Operands { compare_add: wr.compare_add, swap: wr.swap };
        }
        self.slots[slot] = Wqe {
            wr_id,
            remote_addr: wr.remote_addr,
            rkey: wr.rkey,
            len: if wr.opcode.is_atomic() { ATOMIC_BYTES } else { len as u32 },
            imm_data: wr.imm_data,
            flags: wr.flags,
            opcode: wr.opcode,
            sges: if wr.inline_data.is_some() { 0 } else { wr.sges.len() as u16 },
            slot: slot as u16,
            ..Wqe::EMPTY
        };
        self.tail += 1;
        Ok(())
    }

    /// Puts a batch at the tail, or nothing of it. `each` may refuse, too, and is told the slot.
    pub fn push_all(
        &mut self,
        batch: &dyn SendBatch,
        mut each: impl FnMut(&SendWr<'_>, usize) -> Result<(), PostError>,
    ) -> Result<(), PostError> {
        if self.len() as usize + batch.count() > self.caps.max_send_wr as usize {
            return Err(PostError::QueueFull(self.len()));
        }
        let tail = self.tail;
        let pushed = (0..batch.count()).try_for_each(|i| {
            let wr = batch.wr(i);
            each(&wr, self.slot(self.tail))?;
            self.push(&wr)
        });
        if pushed.is_err() {
            self.tail = tail;
        }
        pushed
    }

    /// Posts a batch, or nothing of it, to a QP in `state` that has state SQE. In SQE and ERR it
    /// completes at once as flushed.
    pub(crate) fn post(
        &mut self,
        state: QpState,
        batch: &dyn SendBatch,
        out: &mut (impl Completions + ?Sized),
        each: impl FnMut(&SendWr<'_>, usize) -> Result<(), PostError>,
    ) -> Result<(), PostError> {
        if !matches!(state, QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err) {
            return Err(PostError::WrongState(state));
        }
        self.push_all(batch, each)?;
        if matches!(state, QpState::Sqe | QpState::Err) {
            self.flush(WcStatus::WrFlushErr, out);
        }
        Ok(())
    }

    /// The oldest has been done: takes it out, and says so if that was asked for.
    pub fn complete(&mut self, out: &mut (impl Completions + ?Sized)) {
        let wqe = self.get(self.head);
        if self.sig_all || wqe.flags.contains(SendFlags::SIGNALED) {
            out.send(send_wc(
                self.wc_qpn,
                wqe.wr_id,
                WcStatus::Success,
                wqe.opcode.wc_opcode(),
                wqe.len,
            ));
        }
        self.head += 1;
    }

    /// The oldest fails with `first`, all others are flushed.
    pub fn flush(&mut self, first: WcStatus, out: &mut (impl Completions + ?Sized)) {
        let mut status = first;
        for index in self.head..self.tail {
            let wqe = self.get(index);
            out.send(send_wc(self.wc_qpn, wqe.wr_id, status, wqe.opcode.wc_opcode(), 0));
            status = WcStatus::WrFlushErr;
        }
        self.clear();
    }

    /// The data of an outstanding entry.
    #[inline(always)]
    pub(crate) fn data(&self, index: u64) -> Data<'_> {
        let slot = self.slot(index);
        let wqe = &self.slots[slot];
        if wqe.flags.contains(SendFlags::INLINE) {
            let at = slot * self.caps.max_inline_data as usize;
            Data::Inline(&self.inline[at..at + wqe.len as usize])
        } else {
            let at = slot * self.caps.max_send_sge as usize;
            Data::Sges(&self.sges[at..at + wqe.sges as usize])
        }
    }

    /// The operands of an atomic or a binding; of others, zeros.
    pub(crate) fn operands(&self, wqe: &Wqe) -> Operands {
        match wqe.opcode {
            o if o.is_atomic() || o == SendOpcode::BindMw => self.operands[usize::from(wqe.slot)],
            _ => Operands::default(),
        }
    }

    /// What an entry without packets does.
    pub(crate) fn key_change(&self, wqe: &Wqe) -> KeyChange {
        let Operands { compare_add, swap } = self.operands(wqe);
        match wqe.opcode {
            SendOpcode::BindMw => KeyChange::Bind(MwBind {
                window: wqe.imm_data,
                new_key: wqe.rkey,
                lkey: (swap >> 32) as u32,
                addr: wqe.remote_addr,
                length: compare_add,
                access: Access(swap as u32),
            }),
            _ => KeyChange::Invalidate(wqe.rkey),
        }
    }

    /// All that are outstanding, oldest first.
    pub fn entries(&self) -> Vec<SendEntry> {
        let entry = |i| {
            let Wqe { started, executed, .. } = *self.get(i);
            SendEntry { started, executed, ..SendEntry::from(&self.wr(i)) }
        };
        (self.head..self.tail).map(entry).collect()
    }

    /// Puts an entry of another QP at the tail.
    pub fn adopt(&mut self, e: &SendEntry) -> Result<(), PostError> {
        self.push(&e.wr())?;
        let wqe = self.get_mut(self.tail - 1);
        (wqe.started, wqe.executed) = (e.started, e.executed);
        Ok(())
    }
}
