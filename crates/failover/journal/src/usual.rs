//! Short ways for the common work requests and completions. Each function refuses the others, and
//! changes nothing then; `journal` and `completion` handle those.

use crate::journal::Journal;
use crate::mutants::left_out;
use crate::phase::Blockers;
use crate::row::SendRow;
use crate::slot::{distance, Queue, Slot};
use unbroken_types::{RecvWr, SendFlags, SendWr, Wc, WcStatus};

impl<R: SendRow> Journal<R> {
    /// Records a common send (one entry, no operands, no inline data) that the provider may have at
    /// once, and returns its number there. `None`: the caller posts it by [`Self::post_send`];
    /// nothing has changed.
    #[inline(always)]
    pub fn post_usual_send(&mut self, wr: &SendWr<'_>) -> Option<u64> {
        let index = self.sends.next();
        if self.usual_room() == 0 || !self.sends.push_usual(wr) {
            return None;
        }
        self.consumers += u64::from(wr.opcode.consumes_receive());
        if self.config.sq_sig_all || wr.flags.contains(SendFlags::SIGNALED) {
            self.announced = index + 1;
        }
        self.given_sends = index + 1;
        Some(Slot::Entry(Queue::Send, index).wr_id())
    }

    /// How many sends the provider may have at once if they are posted now; 0 where a send must
    /// wait. The caller writes up to that many into [`Self::row_ahead`], marked as
    /// [`crate::Marks::USUAL`], counts them by [`Self::wrote_rows`], and gives them to the provider.
    #[inline(always)]
    pub fn usual_room(&self) -> u32 {
        let gives = self.given_sends == self.sends.next();
        match gives && !self.blockers.any(Blockers::OF_SENDS) {
            true => self.sends.room(),
            false => 0,
        }
    }

    /// The row and the number of the send behind the next `ahead` ones.
    #[inline(always)]
    pub fn row_ahead(&mut self, ahead: u32) -> (&mut R, u64) {
        let index = self.sends.next() + u64::from(ahead);
        (self.sends.row_ahead(index), Slot::Entry(Queue::Send, index).wr_id())
    }

    /// Room beside the ring for the inline data of that send. `None`: the data is too long, or no
    /// send has had inline data yet; the caller posts by [`Self::post_send`].
    pub fn inline_ahead(&mut self, ahead: u32, bytes: u32) -> Option<&mut [u8]> {
        self.sends.inline_ahead(self.sends.next() + u64::from(ahead), bytes)
    }

    /// Counts `count` rows that the caller has written. `consumers` of them consume a receive of the
    /// peer; the last signaled one is the `signaled`-th, counted from 1 (0: none is). Where the
    /// provider refuses some, the caller calls [`Self::refused_sends`].
    #[inline(always)]
    pub fn wrote_rows(&mut self, count: u32, consumers: u32, signaled: u32) {
        let first = self.given_sends;
        self.sends.wrote(count);
        self.consumers += u64::from(consumers);
        let announced = if self.config.sq_sig_all { count } else { signaled };
        if announced > 0 {
            self.announced = first + u64::from(announced);
        }
        self.given_sends = first + u64::from(count);
    }

    /// Records a receive of one entry that the provider may have at once, and returns its number
    /// there. `None`: the caller posts it by [`Self::post_recv`]; nothing has changed.
    #[inline(always)]
    pub fn post_usual_recv(&mut self, wr: &RecvWr<'_>) -> Option<u64> {
        let index = self.recvs.next();
        let gives = self.given_recvs == index && !self.blockers.any(Blockers::OF_RECVS);
        if !gives || !self.recvs.push_usual(wr) {
            return None;
        }
        self.given_recvs = index + 1;
        Some(Slot::Entry(Queue::Recv, index).wr_id())
    }

    /// Rewrites a WC of the provider as the application's, in place, if it completes exactly one
    /// work request with success: the next signaled send, or the next receive. False: the caller
    /// passes it to [`Self::handle_wc`]; nothing has changed.
    #[inline]
    pub fn complete_usual(&mut self, wc: &mut Wc) -> bool {
        let usual = !self.blockers.any(Blockers::OF_COMPLETIONS)
            && self.first_moved_us.is_some()
            && self.broken_at.is_none()
            && wc.status == WcStatus::Success as u32;
        match Slot::parse(wc.wr_id) {
            Some(Slot::Entry(Queue::Send, low)) if usual => self.complete_usual_send(low, wc),
            Some(Slot::Entry(Queue::Recv, low)) if usual => self.complete_usual_recv(low, wc),
            _ => false,
        }
    }

    #[inline(always)]
    fn complete_usual_send(&mut self, low: u64, wc: &mut Wc) -> bool {
        let first = self.sends.first();
        let Some(ahead) = distance(first, low) else { return false };
        let index = first + ahead;
        // A send that the peer executed in an earlier life may complete with this one.
        let with_others =
            index + 1 < self.adopted_until && !left_out!(self.config.mutation, UsualTooSoon);
        if index >= self.given_sends || with_others {
            return false;
        }
        let entry = self.sends.at(index);
        // Unsignaled sends before this one complete without a WC.
        if !entry.signaled || (ahead > 0 && !self.count_silent(first, index)) {
            return false;
        }
        self.completed.count(entry.opcode);
        self.sends.remove_until(index + 1);
        self.advanced += 1;
        (wc.wr_id, wc.qp_num) = (entry.wr_id, self.config.wc_qpn);
        true
    }

    /// Counts completed sends that have no WC. False: one of them is signaled; nothing has changed.
    fn count_silent(&mut self, first: u64, end: u64) -> bool {
        if (first..end).any(|index| self.sends.at(index).signaled) {
            return false;
        }
        for index in first..end {
            self.completed.count(self.sends.at(index).opcode);
        }
        true
    }

    #[inline(always)]
    fn complete_usual_recv(&mut self, low: u64, wc: &mut Wc) -> bool {
        let index = self.recvs.first();
        if distance(index, low) != Some(0) || index >= self.given_recvs || self.spoilt_recvs > index
        {
            return false;
        }
        self.consumed += 1;
        (wc.wr_id, wc.qp_num) = (self.recvs.wr(index).wr_id, self.config.wc_qpn);
        self.recvs.remove_oldest();
        true
    }
}
