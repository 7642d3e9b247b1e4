//! Posts that come by the lane of the logical QP, under its lock, which is that of the QP's state.
//!
//! What is usual is recorded in a row of the journal, and the provider is given the row. The
//! provider's function is called directly: the QP is destroyed only once its journal gives nothing
//! to the device any more (it is being stopped, or was forgotten), which is said under the lock.

use super::{JournaledQp, State};
use crate::row::{is_inline, is_usual, ProviderRow, Taken};
use std::ptr::null_mut;
use unbroken_journal::Journal;
use unbroken_types::{RecvWr, Sge};
use unbroken_verbs::abi::{ibv_recv_wr, ibv_send_wr};
use unbroken_verbs::{Carrier, LaneTurn, RawQp, RemoteNic};

impl JournaledQp {
    /// The device's QP for posts of that kind, where nothing is to be done to keys, and the device
    /// has told nothing of it.
    #[inline(always)]
    fn direct(&self, remote: Option<&RemoteNic>) -> Option<&RawQp> {
        let translates = self.translates_local() || remote.is_some_and(RemoteNic::matters);
        self.raw.as_ref().filter(|_| !translates && !self.notes.any())
    }

    /// The device has refused a list of rows. The first of them that it has not taken, by their
    /// count.
    #[cold]
    fn refused_rows(
        st: &mut State,
        first: *mut ibv_send_wr,
        bad: *mut ibv_send_wr,
        count: usize,
    ) -> usize {
        let mut at = first;
        let mut taken = 0;
        while at != bad && taken < count {
            taken += 1;
            // SAFETY: a row of the list, of which there are `count`, linked.
            at = unsafe { (*at).next };
        }
        st.journal.refused_sends(count - taken);
        taken
    }
}

/// Records a request. None: it is not a usual one.
///
/// # Safety
/// As for [`Carrier::carry_sends`], of that request.
#[inline(always)]
unsafe fn record(journal: &mut Journal<ProviderRow>, wr: &ibv_send_wr) -> Option<*mut ibv_send_wr> {
    if !journal.takes_usual() || !is_usual(wr, true) {
        return None;
    }
    let number = journal.next_number();
    // SAFETY: the list has one entry, as `num_sge` says.
    let sge: Sge = unsafe { *wr.sg_list };
    let (row, Taken { consumes_receive, signaled }) = if is_inline(wr) {
        let (row, room) = journal.next_inline_row(sge.length)?;
        let taken = row.write(number, wr, sge)?;
        // SAFETY: the program's memory, as IBV_SEND_INLINE asks, and room of that many bytes.
        unsafe { room.as_mut_ptr().copy_from_nonoverlapping(sge.addr as *const u8, room.len()) };
        row.set_inline(room.as_ptr(), room.len() as u16);
        (row, taken)
    } else {
        let row = journal.next_row();
        let taken = row.write(number, wr, sge)?;
        (row, taken)
    };
    let raw = row.raw();
    journal.wrote_row(consumes_receive, signaled);
    Some(raw)
}

impl Carrier for JournaledQp {
    #[inline]
    unsafe fn carry_sends(&self, turn: &mut LaneTurn, list: *mut ibv_send_wr) -> *mut ibv_send_wr {
        let st = self.state.get(turn);
        let Some(raw) = self.direct(st.remote.as_ref()) else { return list };
        // SAFETY: promised by the caller, of all that follow.
        let Some(wr) = (unsafe { list.as_ref() }) else { return list };
        // SAFETY: as above.
        let Some(first) = (unsafe { record(&mut st.journal, wr) }) else { return list };
        let (mut last, mut count, mut next) = (first, 1, wr.next);
        // SAFETY: as above.
        while let Some(wr) = unsafe { next.as_ref() } {
            // SAFETY: as above.
            let Some(row) = (unsafe { record(&mut st.journal, wr) }) else { break };
            // SAFETY: the row before, which is this QP's own.
            unsafe { (*last).next = row };
            (last, count, next) = (row, count + 1, wr.next);
        }
        let mut bad = null_mut();
        // SAFETY: a QP that the device has, see the module's text, and a list of rows of its ring,
        // which live as long as this has it.
        let code = unsafe { (raw.post_send)(raw.qp, first, &mut bad) };
        if code == 0 {
            return next;
        }
        let taken = JournaledQp::refused_rows(st, first, bad, count);
        let mut next = list;
        for _ in 0..taken {
            // SAFETY: as many of the program's list are there.
            next = unsafe { (*next).next };
        }
        next
    }

    #[inline]
    unsafe fn carry_recvs(&self, turn: &mut LaneTurn, list: *mut ibv_recv_wr) -> *mut ibv_recv_wr {
        let st = self.state.get(turn);
        let Some(raw) = self.direct(None) else { return list };
        let mut next = list;
        // SAFETY: promised by the caller, of all that follow.
        while let Some(wr) = unsafe { next.as_ref() } {
            if wr.num_sge != 1 {
                return next;
            }
            // SAFETY: as above; `ibv_sge` is `Sge`.
            let sges = unsafe { std::slice::from_raw_parts(wr.sg_list, 1) };
            let recorded = st.journal.post_usual_recv(&RecvWr { wr_id: wr.wr_id, sges });
            let Some(number) = recorded else { return next };
            let (mut one, mut bad) =
                (ibv_recv_wr { wr_id: number, next: null_mut(), ..*wr }, null_mut());
            // SAFETY: a QP that the device has, see the module's text, and a list of one.
            if unsafe { (raw.post_recv)(raw.qp, &mut one, &mut bad) } != 0 {
                st.journal.refused_recv();
                return next;
            }
            next = wr.next;
        }
        next
    }

    fn is_idle(&self, turn: &mut LaneTurn) -> bool {
        let st = self.state.get(turn);
        st.journal.progress(st.now).outstanding_sends == 0
    }
}
