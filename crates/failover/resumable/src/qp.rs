//! An RC QP of a plain device that holds its work: the device's QP and a journal.
//!
//! The lock of the logical QP's lane guards all state. A post takes it, and so does a run of
//! completions. A post records the work request and gives it to the device, under the journal's
//! number, without releasing the lock, so no switch comes between.
//!
//! Keys are translated where they are not the device's: local ones on a NIC that is not the one
//! whose keys the application has, remote ones on the way to such a NIC of the peer. Such work is
//! given from the journal's rings, one by one, and waits where the peer's answer about a key is not
//! there yet. On the default path that is one branch.

#[allow(unsafe_code)]
mod carrier;
mod completions;
mod end;
mod posting;

use crate::cq::{CqReservation, Member};
use crate::device::{Opened, PdUse};
use crate::interceptor::Notes;
use crate::lock;
use crate::numbered::Numbered;
use crate::quiesce::Asked;
use crate::row::ProviderRow;
use crate::srq::SrqUse;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use unbroken_journal::{Config, Journal, Mutation, Queue};
use unbroken_types::{Completions, Progress, QpCaps, QpState, Sge, Wc, WcStatus};
use unbroken_verbs::{
    Backlog, Carrier, Cq, DeviceEvent, DeviceQp, Error, KeyWaiter, Lane, LaneCell, LaneGuard,
    ListResult, QpEvent, QpInit, QpModify, QpSnapshot, RawQp, RecvWr, RemoteNic, Result,
    ResumableQp, SendBatch, SendWr,
};

/// What can change.
pub(crate) struct State {
    pub(crate) journal: Journal<ProviderRow>,
    /// The state that was last set.
    pub(crate) now: QpState,
    remote: Option<RemoteNic>,
    /// Room for translated entries.
    sges: Vec<Sge>,
    /// The device has refused work that looked good, and lived.
    refused: bool,
    /// That no receive of the SRQ is taken any more, as the device has told.
    last_wqe: bool,
}

/// The application's CQs.
pub(crate) struct Out<'a> {
    send: &'a Cq,
    recv: &'a Cq,
    /// A completion found no room.
    lost: bool,
}

impl Completions for Out<'_> {
    #[inline]
    fn send(&mut self, wc: Wc) {
        self.lost |= !self.send.offer(wc, false);
    }

    #[inline]
    fn recv(&mut self, wc: Wc, solicited: bool) {
        self.lost |= !self.recv.offer(wc, solicited);
    }
}

/// See the module's text.
pub(crate) struct JournaledQp {
    pub(crate) opened: Arc<Opened>,
    pub(crate) phys: Arc<dyn DeviceQp>,
    qpn: u32,
    caps: QpCaps,
    /// The NIC whose local keys the application has.
    default: usize,
    /// That is another one than the device.
    away: bool,
    /// That NIC has not all of those keys itself any more.
    foreign: Arc<AtomicBool>,
    /// Until it is destroyed: a poller may use the QP for a moment longer.
    pd: Mutex<Option<PdUse>>,
    srq: Option<SrqUse>,
    sends: CqReservation,
    recvs: CqReservation,
    notes: Arc<Notes>,
    state: LaneCell<State>,
    /// The device's, which posts that come by the lane go to. None where it has none, or the QP is
    /// away from the NIC whose keys the program has.
    raw: Option<RawQp>,
    pub(crate) asked: Mutex<Asked>,
    /// It was made ahead of its use.
    standby: bool,
    /// Its completions come here; not yet where it is made ahead of its use.
    joined: AtomicBool,
    destroyed: AtomicBool,
    pub(crate) own: Weak<JournaledQp>,
}

/// The queue sizes that an application gets that asks for these.
fn at_least_one(mut caps: QpCaps) -> QpCaps {
    for size in [
        &mut caps.max_send_wr,
        &mut caps.max_send_sge,
        &mut caps.max_recv_wr,
        &mut caps.max_recv_sge,
    ] {
        *size = (*size).max(1);
    }
    caps
}

impl JournaledQp {
    pub(crate) fn new(opened: &Arc<Opened>, init: &QpInit) -> Result<Arc<JournaledQp>> {
        if init.standby && init.srq.is_some() {
            return Err(Error::unsupported("a QP that takes from an SRQ is not made ahead"));
        }
        let caps = at_least_one(init.caps);
        let default = init.local_keys_of.map_or(opened.index, usize::from);
        // Those of an SRQ have room of their own.
        let recvs = if init.srq.is_some() { 0 } else { caps.max_recv_wr };
        let sends = opened.reserve_cq(&init.send_cq, caps.max_send_wr)?;
        let recvs = opened.reserve_cq(&init.recv_cq, recvs)?;
        let pd = match init.standby {
            true => PdUse::uncounted(opened, init.pd)?,
            false => PdUse::new(opened, init.pd)?,
        };
        let srq = init.srq.as_ref();
        let srq = srq.map(|app| SrqUse::new(opened, app, default, &init.recv_cq)).transpose()?;
        let provider = QpInit {
            srq: srq.as_ref().map(|srq| srq.srq.own().clone()),
            // And not one more: a provider may double a queue for that, or be at its limit. A
            // marker waits for room.
            caps,
            pd: pd.handle(),
            send_cq: sends.cq().cq().clone(),
            recv_cq: recvs.cq().cq().clone(),
            suspend_on_error: false,
            wc_qpn: None,
            lane: None,
            ..init.clone()
        };
        let phys = opened.create_qp(&provider)?;
        let qpn = phys.qpn();
        let journal = Journal::new(Config {
            caps,
            wc_qpn: init.wc_qpn.unwrap_or(qpn),
            sq_sig_all: init.sq_sig_all,
            shared_receives: srq.is_some(),
            mutation: Mutation::None,
        });
        let state = State {
            journal,
            now: QpState::Reset,
            remote: None,
            sges: Vec::new(),
            refused: false,
            last_wqe: false,
        };
        let qp = Arc::new_cyclic(|own| JournaledQp {
            opened: opened.clone(),
            qpn,
            caps,
            default,
            away: default != opened.index,
            foreign: opened.memory.foreign(default),
            pd: Mutex::new(Some(pd)),
            srq,
            sends,
            recvs,
            notes: Arc::default(),
            state: LaneCell::new(&init.lane.clone().unwrap_or_else(Lane::new), state),
            raw: phys.raw().filter(|_| default == opened.index),
            asked: Mutex::default(),
            standby: init.standby,
            joined: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
            own: own.clone(),
            phys,
        });
        if !init.standby {
            qp.join()?;
        }
        opened.interceptor.add(qpn, &qp.notes);
        Ok(qp)
    }

    /// From now on polls of the application's CQs bring its completions.
    fn join(&self) -> Result<()> {
        let Some(own) = self.own.upgrade().filter(|_| !self.joined.load(Ordering::Acquire)) else {
            return Ok(());
        };
        if let (Some(pd), true) = (lock(&self.pd).as_ref(), self.standby) {
            pd.count()?;
        }
        if self.joined.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.opened.memory.goes_to(self.default, self.opened.index, true);
        let member: Arc<dyn Member> = own;
        self.sends.join(self.qpn, &member);
        self.recvs.join(self.qpn, &member);
        Ok(())
    }

    /// Whether the CQ of a queue has room for its marker.
    pub(crate) fn has_marker_room(&self, queue: Queue) -> bool {
        match queue {
            Queue::Send => self.sends.has_marker_room(),
            Queue::Recv => self.recvs.has_marker_room(),
        }
    }

    pub(crate) fn out(&self) -> Out<'_> {
        Out { send: self.sends.app(), recv: self.recvs.app(), lost: false }
    }

    /// The state, with what the device has told of the QP.
    #[inline]
    pub(crate) fn lock(&self) -> LaneGuard<'_, State> {
        let mut st = self.state.lock();
        let notes = self.notes.take();
        if notes != 0 {
            self.handle_notes(&mut st, notes);
        }
        st
    }

    #[cold]
    fn handle_notes(&self, st: &mut State, notes: u8) {
        if notes & Notes::OWN_ERROR != 0 {
            st.journal.handle_own_error(&mut self.out());
            // What waits is flushed by the device, behind what it has. One that takes nothing any
            // more flushes nothing.
            let _ = self.pump_sends(st);
        }
        if notes & Notes::FATAL != 0 {
            st.journal.handle_fatal();
        }
        if notes & Notes::LAST_WQE != 0 {
            st.journal.handle_last_wqe();
            st.last_wqe = true;
        }
        self.report_last_wqe(st);
    }

    /// A QP that has ended by itself takes no receive of its SRQ any more: the application waits
    /// for that before it destroys it.
    #[cold]
    fn report_last_wqe(&self, st: &mut State) {
        if st.last_wqe && st.journal.ended() && !st.journal.is_over() {
            st.last_wqe = false;
            let event = DeviceEvent::Qp { qpn: self.qpn, event: QpEvent::LastWqeReached };
            self.opened.interceptor.sink().event(self.opened.index, event);
        }
    }

    /// The journal needs the owner's answer: the network has failed the QP.
    fn tell(&self, status: WcStatus) {
        let event = DeviceEvent::QpFailed { qpn: self.qpn, status };
        self.opened.interceptor.sink().event(self.opened.index, event);
    }

    /// A completion found no room in the application's CQ, or is lost otherwise: the QP ends, as on
    /// any device. One that has ended before loses flushes only.
    #[cold]
    fn overran(&self, st: &mut State) {
        if st.journal.ended() {
            return;
        }
        st.journal.handle_own_error(&mut self.out());
        let event = DeviceEvent::Qp { qpn: self.qpn, event: QpEvent::Fatal };
        self.opened.interceptor.sink().event(self.opened.index, event);
        if let Some(own) = self.own.upgrade() {
            // On a device that does not take it, there is nothing more to end.
            self.opened.commands.put(Box::new(move || drop(own.to_err())));
        }
    }
}

impl KeyWaiter for JournaledQp {
    fn keys_came(&self) {
        self.pump(&mut self.lock());
    }
}

impl DeviceQp for JournaledQp {
    fn qpn(&self) -> u32 {
        self.qpn
    }

    fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        self.post_one(&mut self.lock(), wr)
    }

    fn post_list(&self, list: &[SendWr<'_>]) -> ListResult {
        let mut st = self.lock();
        let mut all = list.iter().enumerate();
        all.try_for_each(|(before, wr)| self.post_one(&mut st, wr).map_err(|e| (before, e)))
    }

    fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        let mut st = self.lock();
        Self::may_send(&st)?;
        let posted = st.journal.post_sends(batch, &mut self.out())?;
        self.give(&mut st, posted, batch.count(), |phys, first| {
            phys.post_sends(&Numbered { batch, first })
        })
    }

    fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        let mut st = self.lock();
        if !self.translates_local() {
            if let Some(number) = st.journal.post_usual_recv(wr) {
                return match self.phys.post_recv(&RecvWr { wr_id: number, ..*wr }) {
                    Ok(()) => Ok(()),
                    Err(e) => Err(self.refused_recv(&mut st, e)),
                };
            }
        }
        self.post_other_recv(&mut st, wr)
    }

    fn modify(&self, change: &QpModify) -> Result<()> {
        let state = change.rc.state;
        if state == Some(QpState::Reset) {
            return self.reset(change);
        }
        if state == Some(QpState::Err) {
            // What flushes from now on is what the application asked for.
            self.lock().journal.end(&mut self.out());
        }
        self.change(change)?;
        let mut st = self.lock();
        st.now = state.unwrap_or(st.now);
        match state {
            // What the device has told of it by now is there when the verb returns.
            Some(QpState::Err) => {
                let notes = self.notes.take();
                self.handle_notes(&mut st, notes);
                return Ok(());
            }
            Some(QpState::Init) => {
                st.journal.open();
                if let Some(srq) = &self.srq {
                    srq.srq.feed();
                }
            }
            Some(QpState::Rts) => st.journal.start(),
            _ => return Ok(()),
        }
        self.pump_recvs(&mut st).and_then(|()| self.pump_sends(&mut st))
    }

    fn query(&self) -> QpSnapshot {
        let mut s = self.phys.query();
        (s.caps, s.attrs.rc.state) = (self.caps, Some(self.state()));
        s
    }

    fn state(&self) -> QpState {
        let st = self.lock();
        if st.journal.ended() {
            QpState::Err
        } else {
            st.now
        }
    }

    fn destroy(&self) {
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.forget();
        match self.own.upgrade().filter(|_| self.is_abandoned() || self.opened.commands.is_stuck())
        {
            Some(own) => own.end_later(),
            None => {
                let _watch = self.opened.commands.watch();
                self.end();
            }
        }
    }
}

impl ResumableQp for JournaledQp {
    fn progress(&self) -> Progress {
        self.bring_all();
        let st = self.lock();
        st.journal.progress(st.now)
    }

    fn announce(&self) {
        self.lock().journal.announce();
    }

    fn quiesce(&self) -> Result<Backlog> {
        self.stop()
    }

    fn adopt(&self, backlog: Backlog) -> Result<()> {
        self.join()?;
        let mut st = self.lock();
        st.journal.adopt(&backlog, &mut self.out())?;
        self.pump_recvs(&mut st).and_then(|()| self.pump_sends(&mut st))
    }

    fn fail(&self, status: WcStatus) {
        self.lock().journal.fail(status, &mut self.out());
    }

    fn retire(&self) {
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.forget();
        match self.own.upgrade() {
            Some(own) => own.end_later(),
            None => self.end(),
        }
    }

    fn carrier(&self) -> Option<Arc<dyn Carrier>> {
        self.raw?;
        Some(self.own.upgrade()?)
    }

    fn set_remote(&self, remote: &RemoteNic) {
        let waiter: Weak<dyn KeyWaiter> = self.own.clone();
        remote.keys.watch(waiter);
        let mut st = self.lock();
        st.remote = Some(remote.clone());
        self.pump(&mut st);
    }
}

impl Drop for JournaledQp {
    fn drop(&mut self) {
        self.destroy();
    }
}
