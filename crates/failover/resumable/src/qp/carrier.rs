//! Posts that come by the lane of the logical QP, under its lock, which is that of the QP's state.
//!
//! What is usual is recorded in a row of the journal, and the provider is given the row. The
//! provider's function is called directly: the QP is destroyed only once its journal gives nothing
//! to the device any more (it is being stopped, or was forgotten), which is said under the lock.

use super::JournaledQp;
use crate::row::{consumes_receive, is_inline, is_signaled, is_usual, ProviderRow};
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use unbroken_journal::Journal;
use unbroken_types::{RecvWr, Sge};
use unbroken_verbs::abi::{ibv_recv_wr, ibv_send_wr};
use unbroken_verbs::{Carrier, LaneTurn, RawQp, RemoteNic};

impl JournaledQp {
    /// The device's QP for posts of that kind, where nothing is to be done to keys, and the device
    /// has told nothing of it.
    #[inline(always)]
    fn direct(&self, remote: Option<&RemoteNic>) -> Option<&RawQp> {
        let translates =
            self.foreign.load(Ordering::Acquire) || remote.is_some_and(RemoteNic::matters);
        self.raw.as_ref().filter(|_| !translates && !self.notes.any())
    }
}

/// What is recorded of a list.
struct Recorded {
    first: *mut ibv_send_wr,
    /// The first request of the program's that is not; null: all are.
    next: *mut ibv_send_wr,
}

/// Writes the row of a request, which is posted when so many others have been. None: it is not a
/// usual one.
///
/// # Safety
/// As for [`Carrier::carry_sends`], of that request.
#[inline(always)]
unsafe fn copy(
    journal: &mut Journal<ProviderRow>,
    ahead: u32,
    wr: &ibv_send_wr,
) -> Option<*mut ibv_send_wr> {
    if !is_usual(wr) {
        return None;
    }
    if is_inline(wr) {
        // SAFETY: promised by the caller.
        return unsafe { copy_inline(journal, ahead, wr) };
    }
    let (row, number) = journal.row_ahead(ahead);
    // SAFETY: the list has one entry, as `num_sge` says.
    unsafe { row.copy(number, wr) }.then(|| row.raw())
}

/// Records usual requests from the head of a list on, as many as there is room for, and links their
/// rows. None: not even the first.
///
/// # Safety
/// As for [`Carrier::carry_sends`].
#[inline(never)]
unsafe fn record(
    journal: &mut Journal<ProviderRow>,
    room: u32,
    list: *mut ibv_send_wr,
) -> Option<Recorded> {
    let (mut next, mut last) = (list, null_mut::<ibv_send_wr>());
    let (mut first, mut count, mut consumers, mut signaled) = (null_mut(), 0, 0, 0);
    while count < room {
        // SAFETY: promised by the caller.
        let Some(wr) = (unsafe { next.as_ref() }) else { break };
        // SAFETY: as above.
        let Some(row) = (unsafe { copy(journal, count, wr) }) else { break };
        count += 1;
        consumers += consumes_receive(wr);
        signaled = if is_signaled(wr) { count } else { signaled };
        match last.is_null() {
            true => first = row,
            // SAFETY: the row before, which is the journal's own.
            false => unsafe { (*last).next = row },
        }
        (last, next) = (row, wr.next);
    }
    if count == 0 {
        return None;
    }
    journal.wrote_rows(count, consumers, signaled);
    Some(Recorded { first, next })
}

/// Writes the row of a request whose data is copied. None: there is no room for that.
///
/// # Safety
/// As for [`Carrier::carry_sends`], of that request, which has one entry.
#[inline(never)]
unsafe fn copy_inline(
    journal: &mut Journal<ProviderRow>,
    ahead: u32,
    wr: &ibv_send_wr,
) -> Option<*mut ibv_send_wr> {
    // SAFETY: promised by the caller.
    let sge: Sge = unsafe { *wr.sg_list };
    let room = journal.inline_ahead(ahead, sge.length)?;
    // SAFETY: the program's memory, as IBV_SEND_INLINE asks, and room of that many bytes.
    unsafe { room.as_mut_ptr().copy_from_nonoverlapping(sge.addr as *const u8, room.len()) };
    let data = Sge { addr: room.as_ptr() as u64, length: sge.length, lkey: 0 };
    let (row, number) = journal.row_ahead(ahead);
    row.copy_inline(number, wr, data);
    Some(row.raw())
}

/// The provider has taken a list of rows up to `bad`, and refuses that one: those from there on are
/// not recorded. The first of them in the program's list.
///
/// # Safety
/// `first` is a list of the journal's newest rows, recorded from the head of `list` on.
#[cold]
unsafe fn take_back(
    journal: &mut Journal<ProviderRow>,
    first: *mut ibv_send_wr,
    bad: *mut ibv_send_wr,
    list: *mut ibv_send_wr,
) -> *mut ibv_send_wr {
    let (mut row, mut from, mut refused) = (first, list, 0);
    while !row.is_null() {
        // One that names none of them has taken none.
        if refused > 0 || row == bad || bad.is_null() {
            refused += 1;
        } else {
            // SAFETY: promised by the caller: the list is as long as that of the rows.
            from = unsafe { (*from).next };
        }
        // SAFETY: promised by the caller.
        row = unsafe { (*row).next };
    }
    journal.refused_sends(refused);
    from
}

impl Carrier for JournaledQp {
    #[inline]
    unsafe fn carry_sends(&self, turn: &mut LaneTurn, list: *mut ibv_send_wr) -> *mut ibv_send_wr {
        let st = self.state.get(turn);
        let Some(raw) = self.direct(st.remote.as_ref()) else { return list };
        let room = st.journal.usual_room();
        // SAFETY: promised by the caller.
        let Some(wr) = (unsafe { list.as_ref() }).filter(|_| room > 0) else { return list };
        let (first, next) = if wr.next.is_null() {
            // SAFETY: as above.
            let Some(row) = (unsafe { copy(&mut st.journal, 0, wr) }) else { return list };
            st.journal.wrote_rows(1, consumes_receive(wr), is_signaled(wr).into());
            (row, null_mut())
        } else {
            // SAFETY: as above.
            let recorded = unsafe { record(&mut st.journal, room, list) };
            let Some(Recorded { first, next }) = recorded else { return list };
            (first, next)
        };
        let mut bad = null_mut();
        // SAFETY: a QP that the device has, see the module's text, and a list of rows of its ring,
        // which live as long as this has it.
        match unsafe { (raw.post_send)(raw.qp, first, &mut bad) } {
            0 => next,
            // SAFETY: the program's list, as far as it was recorded.
            _ => unsafe { take_back(&mut st.journal, first, bad, list) },
        }
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
