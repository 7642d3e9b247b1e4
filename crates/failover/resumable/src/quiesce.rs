//! Stopping a QP of a plain device, as the journal says how.

use crate::qp::JournaledQp;
use unbroken_journal::{Queue, Slot, Step};
use unbroken_types::{QpState, SendFlags, SendOpcode};
use unbroken_verbs::{Backlog, Error, QpModify, RcModify, RecvWr, Result, SendWr};

/// Steps of one call: ERR, two markers, a look, its end, and once more where the device is gone.
const MAX_STEPS: usize = 8;

impl JournaledQp {
    /// Stops the QP: EAGAIN until its markers have come.
    pub(crate) fn stop(&self) -> Result<Backlog> {
        let mut looked = false;
        for _ in 0..MAX_STEPS {
            match self.next_step() {
                Step::Done(backlog) => return Ok(backlog),
                Step::Ended => {
                    return Err(Error::invalid("an error of the program had ended the QP"))
                }
                Step::Strange => {
                    return Err(Error::new(libc::EPROTO, "the device's completions make no sense"))
                }
                Step::Destroy => self.destroy_stopped(),
                Step::Wait if looked && !self.is_gone() => break,
                Step::Wait => {
                    self.look();
                    looked = true;
                }
                step => {
                    if let Err(e) = self.take_step(&step) {
                        if looked && !self.is_gone() {
                            return Err(Error::new(
                                libc::EAGAIN,
                                format!("the QP cannot be stopped yet: {e}"),
                            ));
                        }
                        // What has come makes room for a marker.
                        self.look();
                        looked = true;
                    }
                }
            }
        }
        Err(Error::new(libc::EAGAIN, "the QP is being stopped"))
    }

    fn next_step(&self) -> Step {
        let mut st = self.lock();
        if st.now == QpState::Reset {
            st.journal.provider_gone(); // it was given nothing
        }
        st.journal.stop((self.opened.host.now_us)(), &mut self.out())
    }

    /// The kernel says that the device is gone: it changes nothing any more.
    fn is_gone(&self) -> bool {
        !self.opened.device.alive()
    }

    /// Takes in what has come. A device that was gone before that has nothing more to say.
    fn look(&self) {
        let gone = self.is_gone();
        let wanted = self.lock().journal.wants_recvs_polled();
        self.bring_all();
        let mut st = self.lock();
        if wanted {
            st.journal.recvs_polled();
        }
        if gone {
            st.journal.provider_gone();
        }
    }

    /// Ends the device's QP, which is in ERR: nothing is posted to it any more.
    fn destroy_stopped(&self) {
        self.bring_all();
        self.phys.destroy();
        self.bring_all();
        self.lock().journal.provider_gone();
    }

    fn take_step(&self, step: &Step) -> Result<()> {
        match step {
            Step::ToErr => {
                let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
                self.phys.modify(&QpModify { rc, ..QpModify::default() })?;
                self.lock().journal.in_error();
            }
            Step::Mark(queue) => {
                // Its completion may come before this call returns.
                self.lock().journal.marked(*queue);
                if !self.has_marker_room(*queue) {
                    return Ok(()); // the flush comes to a standstill, and the QP is destroyed
                }
                let wr_id = Slot::Marker(*queue).wr_id();
                let posted = match queue {
                    Queue::Send => self.phys.post_send(&marker(wr_id)),
                    Queue::Recv => self.phys.post_recv(&RecvWr { wr_id, sges: &[] }),
                };
                if posted.is_err() {
                    self.lock().journal.unmarked(*queue);
                }
                posted?;
            }
            _ => {}
        }
        Ok(())
    }
}

/// A send that a QP in ERR flushes.
fn marker(wr_id: u64) -> SendWr<'static> {
    SendWr { wr_id, opcode: SendOpcode::Send, flags: SendFlags::SIGNALED, ..SendWr::default() }
}
