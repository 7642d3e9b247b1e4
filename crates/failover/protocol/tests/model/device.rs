//! An end's device, as plain as can be: messages are delivered whole and in order within a life,
//! and a life that was stopped delivers nothing. And what an executor asks of the world: its
//! [`Env`].

use crate::case::{Case, Op, WorldMutation};
use crate::common::Common;
use unbroken_failover_protocol::{
    Asks, Ended, Env, FailCause, Liveness, LogicalQp, Message, OpenError, Opened, PeerWord,
    QuiesceError, SlotPath, StepError, Switch,
};
use unbroken_types::{
    Backlog, Messages, Mtu, Progress, QpState, RcModify, RecvEntry, SendEntry, SendFlags, SendWr,
    Sge, WcStatus,
};

/// A send in the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Entry {
    pub id: u8,
    pub started: bool,
    pub executed: bool,
}

/// One life of the physical QP.
#[derive(Clone, Debug, Hash)]
pub struct Life {
    pub number: u32,
    pub qpn: u32,
    pub rail: u8,
    pub state: QpState,
    pub dest: u32,
    pub rq_psn: u32,
    pub sends: Vec<Entry>,
    /// So many of them have left, or need not.
    pub sent: usize,
    pub recvs: Vec<u8>,
    pub executed: Messages,
    pub completed: Messages,
    pub answers: u8,
    pub over: bool,
    /// It is to be stopped, but has not stopped yet.
    pub stopping: bool,
    /// It could stop now.
    pub stops: bool,
}

/// The device of one end.
#[derive(Clone, Debug, Hash)]
pub struct Device {
    pub life: Life,
    /// Rails that the end takes for dead though they are not, as bits.
    pub doubted: u8,
}

/// The number that a life is known by.
pub fn qpn_of(end: usize, life: u32) -> u32 {
    16 + 2 * life + end as u32
}

/// The first PSN of a life.
pub fn psn_of(qpn: u32) -> u32 {
    qpn * 256
}

impl Device {
    /// The life that the application connects.
    pub fn new(end: usize, recvs: u8) -> Device {
        let (qpn, dest) = (qpn_of(end, 0), qpn_of(1 - end, 0));
        let life = Life {
            dest,
            rq_psn: psn_of(dest),
            state: QpState::Rts,
            recvs: (0..recvs).collect(),
            ..Life::fresh(0, qpn, 0)
        };
        Device { life, doubted: 0 }
    }
}

impl Life {
    fn fresh(number: u32, qpn: u32, rail: u8) -> Life {
        Life {
            number,
            qpn,
            rail,
            state: QpState::Init,
            dest: 0,
            rq_psn: 0,
            sends: Vec::new(),
            sent: 0,
            recvs: Vec::new(),
            executed: Messages::default(),
            completed: Messages::default(),
            answers: 0,
            over: false,
            stopping: false,
            stops: false,
        }
    }

    /// It takes what that life of the peer sends.
    pub fn hears(&self, from: u32) -> bool {
        !self.over && self.dest == from && self.rq_psn == psn_of(from)
    }
}

/// A device and all around it, as an executor sees them.
pub struct ModelEnv<'a> {
    pub case: &'a Case,
    pub me: usize,
    pub now_us: u64,
    pub device: &'a mut Device,
    pub common: &'a mut Common,
}

fn awaits_fence(op: Op) -> bool {
    op.flags.contains(SendFlags::FENCE)
}

impl ModelEnv<'_> {
    fn op(&self, id: u8) -> Op {
        self.case.op(self.me, id)
    }

    fn nic_dead(&self) -> bool {
        self.common.nic_dead(self.me, self.device.life.rail)
    }

    fn wrong<T>(&mut self, what: &str) -> Result<T, StepError> {
        self.common.wrong(format!("end {}: {what}", self.me));
        Err(StepError)
    }

    /// A send that a physical QP is to hold, as the program has posted it.
    pub fn entry(case: &Case, me: usize, e: Entry) -> SendEntry {
        let op = case.op(me, e.id);
        let sges = [Sge { addr: 0, length: 8, lkey: 0 }];
        let wr = SendWr {
            wr_id: e.id.into(),
            opcode: op.opcode,
            flags: op.flags,
            sges: &sges,
            ..SendWr::default()
        };
        SendEntry { started: e.started, executed: e.executed, ..SendEntry::from(&wr) }
    }

    fn entries(sends: &[SendEntry]) -> Vec<Entry> {
        sends
            .iter()
            .map(|s| Entry { id: s.wr_id as u8, started: s.started, executed: s.executed })
            .collect()
    }

    /// What may leave, leaves; what the peer has executed completes in its turn. At most `most`
    /// messages leave.
    pub fn pump(&mut self, most: usize) {
        let mut left = most;
        loop {
            let life = &self.device.life;
            if life.over || life.stopping || life.state != QpState::Rts || self.nic_dead() {
                return;
            }
            if let Some(head) = life.sends.first().filter(|e| e.executed) {
                let id = head.id;
                self.complete_head(id);
                continue;
            }
            let Some(&next) = life.sends.get(life.sent) else { return };
            if next.executed {
                self.device.life.sent += 1;
                continue;
            }
            let awaited = |e: &Entry| self.op(e.id).opcode.awaits_data();
            let fenced = awaits_fence(self.op(next.id))
                && self.case.world_mutation != WorldMutation::NoFence;
            if left == 0 || fenced && life.sends[..life.sent].iter().any(awaited) {
                return;
            }
            left -= 1;
            let life = &mut self.device.life;
            life.sends[life.sent].started = true;
            life.sent += 1;
            self.common.transmit(self.me, life, false, next.id);
        }
    }

    fn complete_head(&mut self, id: u8) {
        let opcode = self.op(id).opcode;
        let life = &mut self.device.life;
        life.sends.remove(0);
        life.sent = life.sent.saturating_sub(1);
        life.completed.count(opcode);
        self.common.send_done(self.case, self.me, id, true);
    }

    /// The answer to a request has come.
    pub fn answered(&mut self, id: u8) {
        self.pump(0);
        let life = &mut self.device.life;
        life.answers += 1;
        match life.sends.first() {
            Some(head) if head.id == id && life.sent > 0 => self.complete_head(id),
            head => {
                let head = format!("{head:?}");
                let _ = self
                    .wrong::<()>(&format!("an answer to request {id}, but the first is {head}"));
            }
        }
    }

    /// A request of the peer has come.
    pub fn requested(&mut self, id: u8) {
        let op = self.case.op(1 - self.me, id);
        if !matches!(self.device.life.state, QpState::Rtr | QpState::Rts) {
            let _ = self.wrong::<()>("a request comes to a QP that is not up");
            return;
        }
        self.common.execute(self.case, self.me, id);
        let life = &mut self.device.life;
        if op.opcode.consumes_receive() {
            let recv = life.recvs.remove(0);
            self.common.recv_done(self.me, recv);
        }
        life.executed.count(op.opcode);
        self.common.transmit(self.me, life, true, id);
    }
}

impl Env for ModelEnv<'_> {
    fn now_us(&self) -> u64 {
        self.now_us
    }

    fn progress(&self) -> Progress {
        let life = &self.device.life;
        Progress {
            state: if life.over { QpState::Err } else { life.state },
            outstanding_sends: life.sends.len() as u32,
            outstanding_recvs: life.recvs.len() as u32,
            advanced: life.answers.into(),
            executed: life.executed.all,
            completed: life.completed.all,
            ..Progress::default()
        }
    }

    fn announce(&mut self) {}

    // No path of the model loses much.
    fn go_on(&mut self, _insists: bool) -> bool {
        false
    }

    fn loses(&self, _path: SlotPath) -> bool {
        false
    }

    fn nic_works(&self) -> bool {
        !self.nic_dead()
    }

    fn quiesce(&mut self) -> Result<Option<Backlog>, QuiesceError> {
        let (me, exact) = (self.me, self.case.exact[self.me]);
        let life = &mut self.device.life;
        if life.over || self.case.stuck == Some((me, life.rail)) {
            return Err(QuiesceError);
        }
        if self.case.slow[me] && !life.stops {
            life.stopping = true;
            return Ok(None);
        }
        (life.over, life.stopping, life.sent) = (true, false, 0);
        let sends = std::mem::take(&mut life.sends);
        let recvs = std::mem::take(&mut life.recvs);
        let receives = life.executed.receives;
        let executed = if exact { life.executed } else { Messages { all: receives, receives } };
        Ok(Some(Backlog {
            sends: sends.iter().map(|&e| ModelEnv::entry(self.case, me, e)).collect(),
            recvs: recvs
                .iter()
                .map(|&id| RecvEntry { wr_id: id.into(), sges: Vec::new() })
                .collect(),
            executed,
            exact,
            completed: life.completed,
            keys_changed: false,
        }))
    }

    fn open(&mut self, path: SlotPath, recvs: &Backlog) -> Result<Opened, OpenError> {
        if path.local != path.remote || self.common.nic_dead(self.me, path.local) {
            return Err(OpenError);
        }
        if !self.device.life.over {
            let _ = self.wrong::<()>("a fresh QP while the last one lives");
        }
        // Mostly the epoch, so that states which differ in nothing else are one.
        let rails = u32::from(self.case.rails);
        let last = self.device.life.number;
        let number = last + 1 + (u32::from(path.local) + rails - (last + 1) % rails) % rails;
        let qpn = qpn_of(self.me, number);
        let ids = recvs.recvs.iter().map(|r| r.wr_id as u8).collect();
        self.device.life = Life { recvs: ids, ..Life::fresh(number, qpn, path.local) };
        Ok(Opened { qpn, psn: psn_of(qpn), mtu: Mtu::B1024, key_set: 0 })
    }

    fn adopt(&mut self, sends: &Backlog) -> Result<(), StepError> {
        if self.nic_dead() {
            return Err(StepError);
        }
        if self.device.life.state != QpState::Rtr || !self.device.life.sends.is_empty() {
            return self.wrong("sends are adopted out of turn");
        }
        let entries = ModelEnv::entries(&sends.sends);
        if self.case.only_plans() && entries.iter().any(|e| e.started) {
            return self.wrong("a planned switch replays");
        }
        self.device.life.sends = entries;
        Ok(())
    }

    fn post(&mut self, sends: &Backlog) -> Result<(), StepError> {
        if self.nic_dead() {
            return Err(StepError);
        }
        if self.device.life.state != QpState::Rts || self.device.life.over {
            return self.wrong("what was held is posted to a QP that takes nothing");
        }
        self.device.life.sends.extend(ModelEnv::entries(&sends.sends));
        Ok(())
    }

    fn modify(&mut self, changes: &[RcModify], remote: Option<u8>) -> Result<(), StepError> {
        if self.nic_dead() {
            return Err(StepError);
        }
        for change in changes {
            let life = &mut self.device.life;
            match (life.state, change.state) {
                (QpState::Init, Some(QpState::Rtr)) if remote == Some(life.rail) => {
                    (life.dest, life.rq_psn) =
                        (change.dest_qpn.unwrap_or(0), change.rq_psn.unwrap_or(0));
                    life.state = QpState::Rtr;
                }
                (QpState::Rtr, Some(QpState::Rts)) if change.sq_psn == Some(psn_of(life.qpn)) => {
                    life.state = QpState::Rts
                }
                (from, to) => return self.wrong(&format!("{from:?} to {to:?}")),
            }
        }
        Ok(())
    }

    fn fail(&mut self, status: WcStatus) {
        let life = &mut self.device.life;
        (life.over, life.stopping) = (true, false);
        let work = Backlog {
            sends: std::mem::take(&mut life.sends)
                .iter()
                .map(|&e| ModelEnv::entry(self.case, self.me, e))
                .collect(),
            recvs: std::mem::take(&mut life.recvs)
                .iter()
                .map(|&id| RecvEntry { wr_id: id.into(), sges: Vec::new() })
                .collect(),
            ..Backlog::default()
        };
        self.complete(&work, status);
    }

    fn app(&self) -> RcModify {
        RcModify { state: Some(QpState::Rts), ..RcModify::default() }
    }

    fn complete(&mut self, work: &Backlog, _first: WcStatus) {
        for s in &work.sends {
            self.common.send_done(self.case, self.me, s.wr_id as u8, false);
        }
        for r in &work.recvs {
            self.common.recv_done(self.me, r.wr_id as u8);
        }
    }

    fn ended(&mut self, why: Ended) {
        if why == Ended::ByProgram {
            let _ = self.wrong::<()>("a program without errors has ended its QP");
        }
        self.common.ended(self.me);
    }

    fn switching_qps(&self) -> u32 {
        0
    }

    fn liveness(&self, path: SlotPath) -> Liveness {
        let (me, rail) = (self.me, path.local);
        if path.local != path.remote || self.common.nic_dead(me, rail) {
            Liveness::NoNic
        } else if !self.common.carries_both(rail) || self.device.doubted & 1 << rail != 0 {
            Liveness::Silent
        } else {
            Liveness::Alive
        }
    }

    fn send(&mut self, message: &Message, path: SlotPath) {
        let through = match self.case.route {
            true => path.local == path.remote && self.common.carries(self.me, path.local),
            false => (0..self.case.rails).any(|rail| self.common.carries(self.me, rail)),
        };
        if through {
            self.common.say(1 - self.me, message);
        }
    }

    fn peer_word(&mut self, _message: &Message, _asks: Asks) -> Option<PeerWord> {
        Some(PeerWord::default()) // a message that waits for it is one that comes later
    }

    fn peer_has_ended(&self) -> bool {
        false // it does not know whether the peer has crashed
    }

    fn gives_up(&mut self, _lqp: &LogicalQp, cause: FailCause, _status: WcStatus) {
        let (me, case) = (self.me, self.case);
        if !case.allows(cause) && !self.common.crashed(1 - me) {
            let _ = self.wrong::<()>(&format!("gives up: {}", cause.describe()));
        }
    }

    fn switched(&mut self, _lqp: &LogicalQp, _done: &Switch) {}
}
