//! What an application is owed where something of its own is wrong ([`OwnError`]): the error, where
//! it belongs, and nothing behind it.

use super::{App, Area, HostMemory, Wc, WcStatus};
use crate::own::{Mistake, OwnError};
use unbroken_types::SendOpcode;

/// What an application knows of the mistake on its QP, and what has come of it.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) error: OwnError,
    /// It is this end's message; else it is sent to this end.
    pub(super) ours: bool,
    /// Nothing in the schedule may hide what was wrong.
    pub(super) strict: bool,
    /// The device has told that the QP ended by it.
    told: bool,
    /// The error itself was delivered, and not one of the network.
    exact: bool,
}

impl Own {
    pub(super) fn new(error: OwnError, host: usize, strict: bool) -> Own {
        Own { ours: error.host == host, error, strict, told: false, exact: false }
    }

    /// The message is the peer's, and so is its data.
    fn is_to_us(&self) -> bool {
        !self.ours
    }
}

impl App {
    /// Whether the QP has ended by what was wrong, as far as this end has been told.
    pub fn ended_by_own(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.exact || own.told)
    }

    /// Whether this end has got the error itself.
    pub fn got_own_error(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.ours && own.exact)
    }

    /// The device says that the peer's request has ended the QP. False: none was wrong.
    pub fn peer_asked_wrong(&mut self, peer: &App) -> bool {
        let Some(own) = self.own.as_mut().filter(|own| own.is_to_us() && own.error.ends_peer())
        else {
            return false;
        };
        own.told = true;
        peer.sends.posted > own.error.message
    }

    /// Which of our receives is for the message that is wrong.
    fn wrong_receive(&self) -> Option<usize> {
        let own = self.own.as_ref().filter(|own| own.is_to_us())?;
        self.consuming.binary_search(&own.error.message).ok()
    }

    /// Whether a receive is not to be posted at all.
    pub(super) fn withholds(&self, receive: usize) -> bool {
        self.wrong_receive().is_some_and(|j| receive >= j)
            && self.mistake() == Some(Mistake::NoReceive)
    }

    /// What is wrong with a receive.
    pub(super) fn wrong_with_receive(&self, receive: usize) -> Option<Mistake> {
        self.mistake().filter(|_| self.wrong_receive() == Some(receive))
    }

    /// What is wrong with a message of ours.
    pub(super) fn wrong_with_send(&self, message: usize) -> Option<Mistake> {
        self.own
            .as_ref()
            .filter(|own| own.ours && own.error.message == message)
            .map(|own| own.error.mistake)
    }

    fn mistake(&self) -> Option<Mistake> {
        self.own.as_ref().map(|own| own.error.mistake)
    }

    /// Whether the next send waits until the peer has a receive for it: whoever does not try for
    /// ever must.
    pub fn waits_for_receive(&self, peer: &App) -> bool {
        let k = self.sends.posted;
        let own =
            self.own.as_ref().filter(|own| own.ours && own.error.mistake == Mistake::NoReceive);
        own.is_some_and(|own| k < own.error.message)
            && peer.consuming.binary_search(&k).is_ok_and(|j| peer.recvs.posted <= j)
    }

    /// The first error of the sends: message `k` has it.
    pub(super) fn first_send_error(
        &mut self,
        k: usize,
        status: u32,
        memory: &[HostMemory; 2],
        peer: &mut App,
    ) -> Result<(), String> {
        let flush = status == WcStatus::WrFlushErr as u32;
        let network =
            [WcStatus::RetryExcErr, WcStatus::FatalErr].iter().any(|s| *s as u32 == status);
        let Some(own) = &mut self.own else {
            return if flush { Err("the first error is a flush".into()) } else { Ok(()) };
        };
        let error = &own.error;
        if own.is_to_us() {
            let ended = error.ends_peer() && peer.sends.posted > error.message;
            let cut_off = peer.sends.failed || !own.strict;
            return match (flush, network) {
                (true, _) if ended => Ok(()),
                (_, true) if cut_off => Ok(()),
                _ => Err(format!(
                    "the peer's message {} is wrong, {:?}",
                    error.message, error.mistake
                )),
            };
        }
        if (k, status) == (error.message, error.status() as u32) {
            own.exact = true;
            // All before it is done.
            for i in self.sends.done..k {
                self.complete(i, memory, peer).map_err(|e| format!("message {i}: {e}"))?;
            }
            self.sends.good = k;
            return Ok(());
        }
        let hidden = !own.strict && k <= error.message;
        let by_peer = peer.own.as_ref().is_some_and(|theirs| theirs.told);
        // An atomic that may have run is not sent again, whatever it would come to.
        let unsafe_to_replay = error.mistake == Mistake::Misaligned;
        match network && hidden && (by_peer || unsafe_to_replay || self.crash) {
            true => Ok(()),
            false => Err(format!("the error of message {} is {:?}", error.message, error.status())),
        }
    }

    /// The first error of the receives: receive `j` has it.
    pub(super) fn first_recv_error(&mut self, j: usize, wc: &Wc) -> Result<(), String> {
        let due =
            self.wrong_receive().zip(self.own.as_ref().and_then(|own| own.error.receive_status()));
        if wc.status == WcStatus::WrFlushErr as u32 {
            return match due {
                Some((at, status)) if j >= at && !self.crash => {
                    Err(format!("receive {at} is due with {status:?}"))
                }
                _ => Ok(()),
            };
        }
        match due {
            Some((at, status)) if (at, status as u32) == (j, wc.status) => Ok(()),
            _ => Err("not a flush".into()),
        }
    }

    /// Whether message `k` of the peer cannot have come through.
    pub(super) fn is_behind_an_error(&self, k: usize, peer: &App) -> bool {
        let wrong = self.own.as_ref().filter(|own| own.is_to_us()).map(|own| &own.error);
        wrong.is_some_and(|e| k >= e.message && !e.fails_late(peer.msgs[e.message].opcode))
    }

    /// The last look: the error was delivered, what is wrong left no trace, and nothing behind it
    /// has run.
    pub(super) fn check_own_error(
        &self,
        memory: &[HostMemory; 2],
        peer: &App,
    ) -> Result<(), String> {
        let Some(own) = &self.own else { return Ok(()) };
        let at = format!("qp {} host {}", self.qp, self.host);
        if own.ours {
            let owed = self.sends.failed || self.crash;
            return if owed {
                Ok(())
            } else {
                Err(format!("{at}: the error of {} is missing", own.error.message))
            };
        }
        if self.recvs.failed && !self.ended_by_own() && !self.sends.failed && !self.stopped {
            return Err(format!("{at}: receives were flushed of a QP that has not ended"));
        }
        let placed = own.error.mistake != Mistake::RemoteKey;
        let from = own.error.message + usize::from(placed);
        for (k, m) in peer.msgs.iter().enumerate().skip(from) {
            let write = matches!(m.opcode, SendOpcode::Write | SendOpcode::WriteImm);
            let target = memory[self.host].address(self.qp, Area::Remote, k);
            if write
                && self.is_behind_an_error(k, peer)
                && !memory[self.host].is_untouched(target, m.len)
            {
                return Err(format!("{at}: WRITE {k} has run behind an error"));
            }
        }
        Ok(())
    }
}
