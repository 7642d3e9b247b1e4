//! Completions of the device: what they say to the journal, and what the application gets of them.

use super::{JournaledQp, Out, State};
use crate::cq::{Member, ProviderCq};
use crate::srq::ProviderSrq;
use unbroken_journal::{Queue, Slot};
use unbroken_types::{Completions, Wc, WcStatus};

impl JournaledQp {
    /// Completions of the device: `looked` where both its CQs were found empty behind them.
    fn handle(&self, wcs: &[Wc], looked: bool) -> bool {
        let mut st = self.lock();
        let mut out = self.out();
        if !wcs.is_empty() {
            let now_us = (self.opened.host.now_us)();
            match &self.srq {
                None => wcs.iter().for_each(|wc| st.journal.handle_wc(now_us, wc, &mut out)),
                Some(srq) => self.handle_shared(&mut st, &srq.srq, now_us, wcs, &mut out),
            }
        }
        if st.last_wqe {
            self.report_last_wqe(&mut st);
        }
        if out.lost {
            self.overran(&mut st);
        }
        if let Some(status) = st.journal.poll_failure(looked) {
            self.tell(status);
        }
        st.journal.is_puzzled()
    }

    /// Completions of a QP with an SRQ: those of receives name what the device was lent.
    fn handle_shared(
        &self,
        st: &mut State,
        srq: &ProviderSrq,
        now_us: u64,
        wcs: &[Wc],
        out: &mut Out<'_>,
    ) {
        let mut used = false;
        for wc in wcs {
            let Some(Slot::Entry(Queue::Recv, slot)) = Slot::parse(wc.wr_id) else {
                st.journal.handle_wc(now_us, wc, out);
                continue;
            };
            let goes_through = if st.journal.is_over() {
                false
            } else if wc.status == WcStatus::Success as u32 {
                st.journal.handle_shared_recv(now_us);
                true
            } else {
                st.journal.handle_shared_recv_error(wc, out)
            };
            used = true;
            match goes_through {
                false => srq.unused(slot),
                true => {
                    let Some(wr_id) = srq.used(slot) else { continue };
                    out.recv(Wc { wr_id, qp_num: st.journal.wc_qpn(), ..*wc }, false);
                }
            }
        }
        if used {
            srq.feed();
        }
    }

    /// Brings over what both CQs have. False: it could not look everywhere.
    pub(crate) fn bring_all(&self) -> bool {
        let mut looked = self.sends.cq().bring_all();
        if !self.sends.is_at(self.recvs.cq()) {
            looked &= self.recvs.cq().bring_all();
            // The reason of a flush in the second may have come to the first meanwhile.
            looked &= self.sends.cq().bring_all();
        }
        self.handle(&[], looked);
        looked
    }
}

impl Member for JournaledQp {
    fn take(&self, _from: &ProviderCq, wcs: &[Wc]) -> bool {
        self.handle(wcs, false)
    }

    fn translate(&self, wcs: &mut [Wc]) -> usize {
        if self.srq.is_some() || self.notes.any() {
            return 0;
        }
        let journal = &mut self.state.lock().journal;
        let mut done = 0;
        for wc in wcs {
            if wc.qp_num != self.qpn || !journal.complete_usual(wc) {
                break;
            }
            done += 1;
        }
        done
    }

    fn settle(&self, found_empty: &ProviderCq) -> bool {
        let other = if self.sends.is_at(found_empty) { &self.recvs } else { &self.sends };
        if !other.is_at(found_empty) && !other.cq().try_bring() {
            return false;
        }
        self.handle(&[], true);
        true
    }

    fn lose(&self, with_device: bool) {
        let mut st = self.lock();
        if !with_device {
            self.overran(&mut st);
        } else if st.journal.held().is_none() && !st.journal.ended() {
            st.journal.handle_fatal();
            self.tell(WcStatus::FatalErr);
        }
    }
}
