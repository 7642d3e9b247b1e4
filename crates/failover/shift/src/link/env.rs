//! What the executor of a connected QP asks of this process: physical QPs, messages, events.

use crate::backups::Backup;
use crate::control_endpoint::ControlAddr;
use crate::explain;
use crate::fitness;
use crate::peer::Peer;
use crate::port_pairs::PathPorts;
use crate::probes;
use crate::qp::Qp;
use crate::random;
use crate::worker_queue::Job;
use std::sync::Arc;
use unbroken_events::{Switch, SwitchKind, What};
use unbroken_failover_protocol::{
    Asks, Ended, Env, FailCause, Liveness, LogicalQp, Message, OpenError, Opened, PeerWord,
    QuiesceError, Reason, SlotPath, StepError,
};
use unbroken_runtime::now_us;
use unbroken_types::{Progress, QpState, Sends, WcStatus, PSN_MASK};
use unbroken_verbs::{Backlog, Error, QpModify, RcModify, RemoteNic, Result, ResumableQp};

/// The executor's environment: the QP, its physical QP, and the peer.
pub(super) struct Io<'a> {
    pub(super) qp: &'a Qp,
    pub(super) peer: &'a Peer,
    /// The peer's NIC that the program has connected.
    pub(super) default_remote: Option<u8>,
    pub(super) phys: &'a mut Arc<dyn ResumableQp>,
    pub(super) backup: &'a mut Option<Backup>,
    pub(super) nic: &'a mut usize,
    pub(super) port: &'a mut u8,
    pub(super) app: &'a QpModify,
    pub(super) failed: &'a mut bool,
    pub(super) why_not: &'a mut &'static str,
    pub(super) unread: &'a mut Option<(Message, Asks)>,
    /// What the directory says, where it has just been read.
    pub(super) word: Option<PeerWord>,
}

impl Env for Io<'_> {
    fn now_us(&self) -> u64 {
        now_us()
    }

    fn progress(&self) -> Progress {
        self.phys.progress()
    }

    fn announce(&mut self) {
        self.phys.announce();
    }

    fn nic_works(&self) -> bool {
        self.qp.core.nics.device(*self.nic).is_some()
    }

    fn quiesce(&mut self) -> std::result::Result<Option<Backlog>, QuiesceError> {
        match self.phys.quiesce() {
            Ok(work) => Ok(Some(work)),
            Err(e) if e.errno() == libc::EAGAIN => Ok(None),
            Err(_) => Err(QuiesceError),
        }
    }

    fn open(&mut self, path: SlotPath, recvs: &Backlog) -> std::result::Result<Opened, OpenError> {
        let (nic, fresh, opened) = make(self, path, recvs).map_err(|e| {
            self.qp.core.events.complain("a backup QP cannot be made", &e);
            OpenError
        })?;
        let core = &self.qp.core;
        core.qps.rename_physical(self.qp.id(), (*self.nic, self.phys.qpn()), (nic, fresh.qpn()));
        if let Some(lane) = self.qp.lane() {
            lane.carry_by(fresh.carrier());
        }
        std::mem::replace(self.phys, fresh).retire();
        (*self.nic, *self.port) = (nic, 1);
        core.backups.look_at(self.qp.id());
        Ok(opened)
    }

    fn adopt(&mut self, sends: &Backlog) -> std::result::Result<(), StepError> {
        self.phys.adopt(sends.clone()).map_err(|e| {
            self.qp.core.events.complain("the backup QP does not take the work", &e);
            StepError
        })
    }

    fn post(&mut self, sends: &Backlog) -> std::result::Result<(), StepError> {
        if sends.sends.is_empty() {
            return Ok(());
        }
        self.phys.post_sends(&Sends(&sends.sends)).map_err(|e| {
            self.qp.core.events.complain("the QP does not take what was held", &e);
            StepError
        })
    }

    fn modify(
        &mut self,
        changes: &[RcModify],
        remote: Option<u8>,
    ) -> std::result::Result<(), StepError> {
        let path = remote.and_then(|i| self.peer.nic(i)).map(|to| {
            let sgid_index =
                self.qp.core.nics.device(*self.nic).map_or(0, |device| device.gid_index());
            let ControlAddr { gid, lid, .. } = to.address();
            self.app.path.unwrap_or_default().elsewhere(1, sgid_index, gid, lid)
        });
        if let Some(nic) = remote {
            let default = self.default_remote.unwrap_or(nic);
            self.phys.set_remote(&RemoteNic { keys: self.peer.keys.clone(), default, nic });
        }
        let step = |rc: &RcModify| {
            let sqd_notify = self.app.sqd_notify.filter(|_| rc.state == Some(QpState::Sqd));
            QpModify { rc: *rc, path, sqd_notify, ..QpModify::default() }
        };
        let mut changes: Vec<QpModify> = changes.iter().map(step).collect();
        if let (Some(remote), [connect]) = (remote, &mut changes[..]) {
            if self.load_pair(remote, connect) && self.phys.modify(connect).is_ok() {
                return Ok(());
            }
            // The life is worth more than an alternate path.
            (connect.alternate, connect.rc.alternate, connect.rc.migration) = (None, None, None);
        }
        self.phys.modify_all(&changes).map_err(|e| {
            self.qp.core.events.complain("the backup QP cannot be connected", &e);
            StepError
        })
    }

    fn go_on(&mut self, insists: bool) -> bool {
        self.phys.go_on(insists)
    }

    fn fail(&mut self, status: WcStatus) {
        self.phys.fail(status);
    }

    fn app(&self) -> RcModify {
        let core = &self.qp.core;
        let timeout = core.settings.protected_timeout(self.app.rc.timeout.unwrap_or(0));
        let app = RcModify { timeout: Some(timeout), ..self.app.rc };
        match *self.nic == self.qp.id().0 {
            true => app, // the program's own word, which its device has taken
            false => fitness::clamp(&core.nics.attr(*self.nic), app),
        }
    }

    fn complete(&mut self, work: &Backlog, first: WcStatus) {
        self.qp.flush_backlog(work, first);
    }

    fn ended(&mut self, why: Ended) {
        *self.failed = true;
        *self.why_not = match why {
            Ended::GivenUp => "failed",
            Ended::ByProgram => "ended by an error of the program",
        };
        if why == Ended::GivenUp {
            self.qp.take_no_more();
        }
    }

    fn switching_qps(&self) -> u32 {
        self.qp.core.qps.switching()
    }

    fn liveness(&self, path: SlotPath) -> Liveness {
        match self.qp.unfit.allows(path.local.into()) {
            true => self.peer.liveness(&self.qp.core.nics, path),
            false => Liveness::NoNic,
        }
    }

    fn loses(&self, path: SlotPath) -> bool {
        self.peer.health().loses(path)
    }

    fn send(&mut self, message: &Message, path: SlotPath) {
        if let Some(to) = self.peer.control(path.remote) {
            self.qp.core.control.send(&self.qp.core.nics, path.local.into(), to, message);
        }
    }

    fn peer_word(&mut self, message: &Message, asks: Asks) -> Option<PeerWord> {
        let word = self.word.take();
        if word.is_none() && self.unread.replace((*message, asks)).is_none() {
            self.qp.core.jobs.put(Job::Read(self.qp.id()));
        }
        word
    }

    fn peer_has_ended(&self) -> bool {
        self.peer.has_ended()
    }

    fn gives_up(&mut self, lqp: &LogicalQp, cause: FailCause, status: WcStatus) {
        let core = &self.qp.core;
        let why = explain::give_up(&core.nics, lqp, self.peer, cause, status);
        let (host, qp) = (core.nics.host(), self.qp.qpn());
        let of_programs = cause.is_of_programs();
        core.events.emit(What::GiveUp { host, qp, why, of_programs });
    }

    fn revives_in_vain(&mut self, lives: u32, wait_us: u64) {
        let what = format!("queue pair {:#x} has moved nothing in {lives} lives", self.qp.qpn());
        let next = format!("its path answers; the next life begins in {} ms", wait_us / 1_000);
        self.qp.core.events.complain(&what, &next);
    }

    fn switched(&mut self, lqp: &LogicalQp, done: &unbroken_failover_protocol::Switch) {
        let (core, s) = (&self.qp.core, &done.switched);
        core.qps.note_displaced();
        if is_connecting(lqp, done) {
            return;
        }
        let name = |slot| {
            lqp.slots()
                .get(slot)
                .map_or_else(String::new, |path| self.peer.path_name(&core.nics, path))
        };
        let switch = Switch {
            kind: if s.planned { SwitchKind::Planned } else { SwitchKind::Passive },
            host: core.nics.host(),
            qp: self.qp.qpn(),
            from: name(s.from_slot),
            to: name(s.to_slot),
            epoch: s.epoch as u32,
            reason: s.reason.name().into(),
            on_path_since_us: s.on_path_since_us,
            detected_at_us: s.detected_us,
            detect_us: None,
            switch_us: done.moved_us.saturating_sub(s.detected_us),
            replayed: done.replay.replayed.into(),
        };
        let nic = |slot| lqp.slots().get(slot).map_or(u8::MAX, |path| path.local);
        probes::switch(nic(s.from_slot), nic(s.to_slot), &switch);
        core.events.defer(What::Switch(switch), done.moved_us);
    }
}

impl Io<'_> {
    /// Adds another port pair to the change that connects a fresh physical QP with that NIC of the
    /// peer.
    /// Gives whether there is one.
    fn load_pair(&self, remote: u8, connect: &mut QpModify) -> bool {
        let ports = PathPorts {
            nics: &self.qp.core.nics,
            settings: &self.qp.core.settings,
            qpn: self.qp.qpn(),
            peer: self.peer,
            path: SlotPath { local: *self.nic as u8, remote },
            default: SlotPath {
                local: self.qp.id().0 as u8,
                remote: self.default_remote.unwrap_or(remote),
            },
            port: *self.port,
            since_us: 0,
            app: self.app,
        };
        ports.connect(now_us(), &QpModify::default(), connect);
        connect.alternate.is_some()
    }
}

/// Whether the QP was connected by this switch, at either end, and where its program says: nothing
/// has failed.
fn is_connecting(lqp: &LogicalQp, done: &unbroken_failover_protocol::Switch) -> bool {
    let s = &done.switched;
    let path = |slot| lqp.slots().get(slot);
    let connects = matches!(s.reason, Reason::Connect | Reason::Peer);
    connects && s.from_slot == 0 && path(0) == path(s.to_slot) && done.replay.replayed == 0
}

/// Makes a fresh physical QP with these receives on the local NIC of a path.
fn make(
    io: &mut Io<'_>,
    path: SlotPath,
    recvs: &Backlog,
) -> Result<(usize, Arc<dyn ResumableQp>, Opened)> {
    let (qp, core) = (io.qp, &io.qp.core);
    let nic = usize::from(path.local);
    let device = core
        .nics
        .device(nic)
        .ok_or_else(|| Error::device_gone(format!("{} is dead", core.nics.name(nic))))?;
    let mtu = device.port(1)?.active_mtu;
    let access = io.app.rc.access;
    let made_ahead = io.backup.take_if(|backup| backup.is_of(nic, &device));
    let in_init = made_ahead.as_ref().is_some_and(|backup| backup.access == access);
    let fresh = match made_ahead {
        Some(backup) => backup.phys,
        None => core.make_life(&device, nic, &qp.init)?,
    };
    let rc = RcModify { state: Some(QpState::Init), access, ..RcModify::default() };
    let ready = match in_init {
        true => Ok(()),
        false => fresh.modify(&QpModify { rc, ..QpModify::default() }),
    };
    if let Err(e) = ready.and_then(|()| fresh.adopt(recvs.clone())) {
        fresh.retire();
        return Err(e);
    }
    let psn = random::number() & PSN_MASK;
    let mtu = io.app.rc.mtu.map_or(mtu, |m| m.min(mtu));
    let opened = Opened { qpn: fresh.qpn(), psn, mtu, key_set: core.nics.key_set(nic) };
    Ok((nic, fresh, opened))
}

// --- what happens to a QP; see the executor's functions of the same names
