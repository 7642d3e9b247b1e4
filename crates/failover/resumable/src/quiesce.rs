//! Stopping a QP of a plain device, as the journal says how.
//!
//! ERR and the end of the device's QP are commands, which the device's thread carries out
//! ([`crate::commands`]): a NIC that fails may not answer them. One that does not answer is not
//! waited for. The QP counts as stopped then, as if the kernel had taken the device away, and what
//! has not succeeded is outstanding. The device's QP may still be alive. The peer's is stopped
//! before it answers the switch, so that nothing new reaches either of the two; a packet that was on
//! its way to the NIC may still be placed. No key of that NIC is given to anybody any more.

use crate::lock;
use crate::qp::JournaledQp;
use unbroken_journal::{Queue, Slot, Step};
use unbroken_types::{QpState, SendFlags, SendOpcode};
use unbroken_verbs::{Backlog, Error, QpModify, RcModify, RecvWr, Result, SendWr};

/// Steps of one call: ERR, two markers, a look, its end, each with its answer, and once more where
/// the device is gone.
const MAX_STEPS: usize = 16;

/// A command of the QP that the device's thread carries out.
#[derive(Default)]
enum Command {
    #[default]
    None,
    UnderWay,
    /// ERR was asked for.
    Err(Result<()>),
    /// The device's QP has ended.
    Ended,
}

/// What the device's thread has been asked for the QP.
#[derive(Default)]
pub(crate) struct Asked {
    command: Command,
    /// It was not waited for.
    abandoned: bool,
}

impl JournaledQp {
    /// Stops the QP: EAGAIN until its markers have come.
    pub(crate) fn stop(&self) -> Result<Backlog> {
        let mut looked = false;
        for _ in 0..MAX_STEPS {
            if self.awaits_answer()? {
                break;
            }
            match self.next_step() {
                Step::Done(backlog) => return Ok(backlog),
                Step::Ended => {
                    return Err(Error::invalid("an error of the program had ended the QP"))
                }
                Step::Strange => {
                    return Err(Error::new(libc::EPROTO, "the device's completions make no sense"))
                }
                Step::ToErr => self.ask(|qp| Command::Err(qp.to_err())),
                Step::Destroy => {
                    self.bring_all();
                    self.ask(|qp| {
                        qp.phys.destroy();
                        Command::Ended
                    });
                }
                Step::Wait if looked && !self.is_gone() => break,
                Step::Wait => {
                    self.look();
                    looked = true;
                }
                Step::Mark(queue) => {
                    if let Err(e) = self.mark(queue) {
                        if looked && !self.is_gone() {
                            return Err(not_yet(&e));
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

    /// Takes in the device's answer to the last command. True: there is none yet.
    fn awaits_answer(&self) -> Result<bool> {
        let mut asked = lock(&self.asked);
        match std::mem::take(&mut asked.command) {
            Command::None => Ok(false),
            Command::UnderWay if self.is_gone() || self.opened.commands.is_stuck() => {
                // A device that is gone answers everything at once.
                asked.abandoned = !self.is_gone();
                drop(asked);
                self.bring_all();
                self.lock().journal.provider_gone();
                Ok(false)
            }
            Command::UnderWay => {
                asked.command = Command::UnderWay;
                Ok(true)
            }
            Command::Err(Ok(())) => {
                self.lock().journal.in_error();
                Ok(false)
            }
            Command::Err(Err(e)) => {
                drop(asked);
                self.refused_step(&e).map(|()| false)
            }
            Command::Ended => {
                drop(asked);
                self.bring_all();
                self.lock().journal.provider_gone();
                Ok(false)
            }
        }
    }

    /// Has the device's thread carry out a command, unless the QP is abandoned by then.
    fn ask(&self, command: impl FnOnce(&JournaledQp) -> Command + Send + 'static) {
        let Some(own) = self.own.upgrade() else { return };
        lock(&self.asked).command = Command::UnderWay;
        self.opened.commands.put(Box::new(move || {
            if own.is_abandoned() {
                return;
            }
            let answer = command(&own);
            lock(&own.asked).command = answer;
        }));
    }

    pub(crate) fn to_err(&self) -> Result<()> {
        let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
        self.phys.modify(&QpModify { rc, ..QpModify::default() })
    }

    /// A command of the stop has no answer, or one that was not taken in.
    pub(crate) fn is_being_stopped(&self) -> bool {
        let asked = lock(&self.asked);
        asked.abandoned || !matches!(asked.command, Command::None)
    }

    /// The device did not answer, and the switch went on without.
    pub(crate) fn is_abandoned(&self) -> bool {
        lock(&self.asked).abandoned
    }

    /// The device refuses a step. One that is gone may.
    fn refused_step(&self, e: &Error) -> Result<()> {
        if !self.is_gone() {
            return Err(not_yet(e));
        }
        self.look();
        Ok(())
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
        let looked = self.bring_all();
        let mut st = self.lock();
        if wanted && looked {
            st.journal.recvs_polled();
        }
        if gone {
            st.journal.provider_gone();
        }
    }

    fn mark(&self, queue: Queue) -> Result<()> {
        // Its completion may come before this call returns.
        self.lock().journal.marked(queue);
        if !self.has_marker_room(queue) {
            return Ok(()); // the flush comes to a standstill, and the QP is destroyed
        }
        let wr_id = Slot::Marker(queue).wr_id();
        let posted = match queue {
            Queue::Send => self.phys.post_send(&marker(wr_id)),
            Queue::Recv => self.phys.post_recv(&RecvWr { wr_id, sges: &[] }),
        };
        if posted.is_err() {
            self.lock().journal.unmarked(queue);
        }
        posted
    }
}

fn not_yet(e: &Error) -> Error {
    Error::new(libc::EAGAIN, format!("the QP cannot be stopped yet: {e}"))
}

/// A send that a QP in ERR flushes.
fn marker(wr_id: u64) -> SendWr<'static> {
    SendWr { wr_id, opcode: SendOpcode::Send, flags: SendFlags::SIGNALED, ..SendWr::default() }
}
