//! Posts that come by the traits, and what waits for the device: keys are translated here.

use super::{JournaledQp, State};
use crate::alive::lives;
use std::sync::atomic::Ordering;
use unbroken_journal::Posted;
use unbroken_types::{QpState, SendOpcode, Sge, WcStatus};
use unbroken_verbs::{DeviceQp, Error, PostError, RecvWr, RemoteNic, Result, SendWr, NO_REGION};

impl JournaledQp {
    #[inline]
    pub(super) fn translates_local(&self) -> bool {
        self.away || self.foreign.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn translates(&self, st: &State) -> bool {
        self.translates_local() || st.remote.as_ref().is_some_and(RemoteNic::matters)
    }

    pub(super) fn may_send(st: &State) -> Result<()> {
        match st.now {
            // It is in ERR, however far it had come.
            _ if st.journal.ended() => Ok(()),
            QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err => Ok(()),
            state => Err(PostError::WrongState(state).into()),
        }
    }

    /// What the journal has just been given goes to the device.
    #[inline]
    pub(super) fn give(
        &self,
        st: &mut State,
        posted: Posted,
        count: usize,
        post: impl FnOnce(&dyn DeviceQp, u64) -> Result<()>,
    ) -> Result<()> {
        let Posted::Give(number) = posted else { return Ok(()) };
        if self.translates(st) || st.journal.announces() {
            st.journal.hold_back_sends(count);
            if self.pump_sends(st).is_err() {
                self.tell(WcStatus::FatalErr); // it is recorded: a switch takes it along
            }
            return Ok(());
        }
        match post(&*self.phys, number) {
            Ok(()) => Ok(()),
            Err(e) => {
                st.journal.refused_sends(count);
                Err(self.refused(st, e))
            }
        }
    }

    /// A send that is mostly a usual one.
    #[inline]
    pub(super) fn post_one(&self, st: &mut State, wr: &SendWr<'_>) -> Result<()> {
        if !self.translates(st) {
            if let Some(number) = st.journal.post_usual_send(wr) {
                return match self.phys.post_send_as(number, wr) {
                    Ok(()) => Ok(()),
                    Err(e) => Err(self.refused_send(st, e)),
                };
            }
        }
        self.post_other_send(st, wr)
    }

    /// A send of any kind, in any state.
    #[cold]
    #[inline(never)]
    pub(super) fn post_other_send(&self, st: &mut State, wr: &SendWr<'_>) -> Result<()> {
        Self::may_send(st)?;
        let posted = st.journal.post_send(wr, &mut self.out())?;
        self.give(st, posted, 1, |phys, number| phys.post_send_as(number, wr))
    }

    #[cold]
    pub(super) fn refused_send(&self, st: &mut State, e: Error) -> Error {
        st.journal.refused_sends(1);
        self.refused(st, e)
    }

    /// A receive of any kind, in any state.
    #[cold]
    #[inline(never)]
    pub(super) fn post_other_recv(&self, st: &mut State, wr: &RecvWr<'_>) -> Result<()> {
        if st.now == QpState::Reset {
            return Err(PostError::WrongState(st.now).into());
        }
        let Posted::Give(number) = st.journal.post_recv(wr, &mut self.out())? else {
            return Ok(());
        };
        if self.translates_local() {
            st.journal.hold_back_recv();
            if self.pump_recvs(st).is_err() {
                self.tell(WcStatus::FatalErr);
            }
            return Ok(());
        }
        self.phys.post_recv(&RecvWr { wr_id: number, ..*wr }).map_err(|e| self.refused_recv(st, e))
    }

    #[cold]
    pub(super) fn refused_recv(&self, st: &mut State, e: Error) -> Error {
        st.journal.refused_recv();
        self.refused(st, e)
    }

    /// The device has refused a work request that the journal found good. One that is dying may say
    /// anything; one that works has opcodes that it does not know.
    #[cold]
    pub(super) fn refused(&self, st: &mut State, e: Error) -> Error {
        let works = !matches!(self.phys.state(), QpState::Err | QpState::Reset);
        if works && matches!(e.errno(), libc::EINVAL | libc::EOPNOTSUPP) && self.stays_alive(st) {
            return e;
        }
        st.journal.handle_fatal();
        Error::device_gone(format!("NIC {} refuses work: {e}", self.opened.device.name()))
    }

    /// Whether the device lives, once it has had the time to say that it does not. It is waited for
    /// once: what a QP is refused later is taken for what it says.
    #[cold]
    pub(super) fn stays_alive(&self, st: &mut State) -> bool {
        match std::mem::replace(&mut st.refused, true) {
            false => lives(&*self.opened.device),
            true => self.opened.device.alive(),
        }
    }

    /// Gives the device the sends that wait. EIO: it has failed.
    pub(super) fn pump_sends(&self, st: &mut State) -> Result<()> {
        let mut out = self.out();
        let error = loop {
            let State { journal, sges, remote, .. } = &mut *st;
            let Some(mut wr) = journal.next_send(&mut out) else { return Ok(()) };
            if wr.inline_data.is_none() {
                self.translate_local(wr.sges, sges);
                wr.sges = sges;
            }
            match translate_remote(remote.as_ref(), &wr) {
                Some(rkey) => wr.rkey = rkey,
                None => return Ok(()), // the peer's answer will come
            }
            match self.phys.post_send(&wr) {
                Ok(()) => journal.gave_send(),
                Err(e) => break e,
            }
        };
        st.journal.handle_fatal();
        Err(Error::device_gone(format!("NIC {} refuses work: {error}", self.opened.device.name())))
    }

    /// Gives the device the receives that wait. EIO: it has failed.
    pub(super) fn pump_recvs(&self, st: &mut State) -> Result<()> {
        let error = loop {
            let State { journal, sges, .. } = &mut *st;
            let Some(mut wr) = journal.next_recv() else { return Ok(()) };
            self.translate_local(wr.sges, sges);
            wr.sges = sges;
            match self.phys.post_recv(&wr) {
                Ok(()) => journal.gave_recv(),
                Err(e) => break e,
            }
        };
        st.journal.handle_fatal();
        Err(Error::device_gone(format!("NIC {} refuses work: {error}", self.opened.device.name())))
    }

    /// The entries with the keys of this NIC.
    fn translate_local(&self, from: &[Sge], to: &mut Vec<Sge>) {
        to.clear();
        let (memory, nic, default) = (&self.opened.memory, self.opened.index, self.default);
        let key = |lkey| memory.lkey_on(default, lkey, nic).unwrap_or(NO_REGION);
        to.extend(from.iter().map(|sge| Sge { lkey: key(sge.lkey), ..*sge }));
    }

    /// Gives the device whatever waits and can go.
    pub(super) fn pump(&self, st: &mut State) {
        if self.pump_recvs(st).and_then(|()| self.pump_sends(st)).is_err() {
            self.tell(WcStatus::FatalErr);
        }
    }
}

/// The peer's key of a send, where it names one. `None`: it is not known yet.
fn translate_remote(remote: Option<&RemoteNic>, wr: &SendWr<'_>) -> Option<u32> {
    use SendOpcode::{CmpSwap, FetchAdd, Read, Write, WriteImm};
    let Some(r) = remote.filter(|r| r.matters()) else { return Some(wr.rkey) };
    if !matches!(wr.opcode, Write | WriteImm | Read | CmpSwap | FetchAdd) {
        return Some(wr.rkey);
    }
    r.key(wr.rkey)
}
