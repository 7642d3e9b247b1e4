//! What the simulated world does for an executor: its [`Env`].

use crate::end::{Life, Wcs};
use crate::mutants::Mutant;
use crate::phys::Phys;
use crate::world::{logical_qpn, qpn_of, Event, World};
use unbroken_failover_protocol::{
    Asks, Ended, Env, Executor, FailCause, Liveness, LogicalQp, Message, OpenError, Opened,
    PeerWord, QuiesceError, Reason, SlotPath, StepError, Switch,
};
use unbroken_types::{Backlog, Progress, QpState, RcModify, Wc, WcStatus};

/// The world, as one end of one logical QP sees it.
pub(crate) struct SimEnv<'a> {
    world: &'a mut World,
    host: usize,
    qp: usize,
    /// The directory has just been read.
    informed: bool,
}

/// How long reading the directory takes at most.
const READ_US: u64 = 2_000;

impl World {
    /// Lets the executor of an end work.
    pub(crate) fn with<R>(
        &mut self,
        host: usize,
        qp: usize,
        f: impl FnOnce(&mut Executor, &mut SimEnv<'_>) -> R,
    ) -> R {
        self.with_env(host, qp, false, f)
    }

    /// The same, with the directory just read.
    pub(crate) fn informed(
        &mut self,
        host: usize,
        qp: usize,
        f: impl FnOnce(&mut Executor, &mut SimEnv<'_>),
    ) {
        self.with_env(host, qp, true, f);
    }

    fn with_env<R>(
        &mut self,
        host: usize,
        qp: usize,
        informed: bool,
        f: impl FnOnce(&mut Executor, &mut SimEnv<'_>) -> R,
    ) -> R {
        let mut executor = self.ends[host][qp].executor.take().expect("it does not call itself");
        let result = f(&mut executor, &mut SimEnv { world: self, host, qp, informed });
        self.ends[host][qp].executor = Some(executor);
        result
    }
}

impl SimEnv<'_> {
    fn end(&mut self) -> &mut crate::end::End {
        &mut self.world.ends[self.host][self.qp]
    }

    fn life(&mut self) -> Option<&mut Life> {
        self.end().lives.last_mut()
    }

    fn deliver(&mut self, wcs: Wcs) {
        let delivered = self.world.deliver(self.host, self.qp, wcs);
        self.world.note(delivered);
    }

    fn wrong(&mut self, what: String) -> StepError {
        self.world.note(Err(what));
        StepError
    }

    fn step(&mut self, change: &RcModify) -> Result<(), StepError> {
        let (host, qp, mutant) = (self.host, self.qp, self.world.mutant);
        let number = self.life().map_or(0, |l| l.number);
        let plan = &self.world.plan;
        let mut change = *change;
        if change.state == Some(QpState::Rtr) && change.dest_qpn == Some(0) {
            // A mutant starts without having heard of the peer's QP.
            change.dest_qpn = Some(qpn_of(qp, number, mutant));
            change.rq_psn = Some(plan.psn_of(number, 1 - host));
        }
        if mutant == Mutant::SameQpn {
            change.rq_psn = change.rq_psn.map(|_| plan.psn_of(0, 1 - host));
            change.sq_psn = change.sq_psn.map(|_| plan.psn_of(0, host));
        }
        let Some(life) = self.life() else { return Err(self.wrong("no QP is changed".into())) };
        let mut wcs = Wcs::default();
        let changed =
            life.qp.modify(&change, &mut wcs).map_err(|e| format!("to {:?}: {e}", change.state));
        self.deliver(wcs);
        changed.map_err(|e| self.wrong(e))
    }
}

impl Env for SimEnv<'_> {
    fn now_us(&self) -> u64 {
        self.world.now_us
    }

    fn progress(&self) -> Progress {
        self.world.ends[self.host][self.qp]
            .lives
            .last()
            .map_or_else(Progress::default, |l| l.qp.progress())
    }

    fn announce(&mut self) {
        if let Some(life) = self.life() {
            life.qp.announce();
        }
    }

    fn nic_works(&self) -> bool {
        let life = self.world.ends[self.host][self.qp].lives.last();
        life.is_some_and(|l| self.world.net.nic_works(self.host, l.nic))
    }

    fn quiesce(&mut self) -> Result<Option<Backlog>, QuiesceError> {
        let ghost = self.world.mutant == Mutant::NoQuiesce;
        let (host, now_us) = (self.host, self.world.now_us);
        let gone =
            self.life().map(|l| l.nic).is_some_and(|nic| self.world.net.nic_is_gone(host, nic));
        let Some(life) = self.life().filter(|l| !l.over) else { return Err(QuiesceError) };
        let mut wcs = Wcs::default();
        // The mutant leaves it running, as a product would that forgets to stop it.
        let stopped = match ghost {
            true => life.qp.clone().quiesce(now_us, true, &mut wcs),
            false => life.qp.quiesce(now_us, gone, &mut wcs),
        };
        life.over = matches!(stopped, Ok(Some(_)));
        let (odd, destroyed) = if life.over { life.qp.odd_flushes() } else { (0, false) };
        self.world.stats.late_stops += u64::from(stopped == Ok(None));
        self.world.stats.odd_flushes += odd;
        self.world.stats.ended_flushes += u64::from(destroyed);
        self.deliver(wcs);
        stopped
    }

    fn open(&mut self, path: SlotPath, recvs: &Backlog) -> Result<Opened, OpenError> {
        let (host, qp) = (self.host, self.qp);
        if self.world.apps[host][qp].failed() {
            self.wrong(format!("host {host} qp {qp}: a fresh life after an error was delivered"));
            return Err(OpenError);
        }
        let world = &mut *self.world;
        let (nic, remote) = (usize::from(path.local), usize::from(path.remote));
        // Now and then a device has no room for a fresh QP; that drives a QP away from its path, so
        // not where nothing shall touch that.
        let full = world.rng.one_in(200) && !world.plan.spares_path(qp);
        if full || !world.net.nic_works(host, nic) {
            return Err(OpenError);
        }
        let end = &mut world.ends[host][qp];
        let number = end.lives.len() as u64;
        let qpn = qpn_of(qp, number, world.mutant);
        let kind = world.plan.kind((host, qp), number, (nic, remote), world.mutant);
        let mut fresh = Phys::new(qpn, logical_qpn(qp), end.srq.as_ref(), kind);
        fresh.transport_mut().set_selective(world.plan.selective[host]);
        fresh.transport_mut().set_mutation(world.mutant.in_roce());
        if let Err(e) = fresh.adopt(recvs, &mut Wcs::default()) {
            self.wrong(format!("adopt: {e}"));
            return Err(OpenError);
        }
        let psn = world.plan.psn_of(number, host);
        let life = Life {
            qpn,
            number,
            nic,
            remote,
            sq_psn: psn,
            qp: fresh,
            armed_us: u64::MAX,
            over: false,
            wrapped: false,
            failure_told: false,
            again: 0,
            sent: (0, 0),
        };
        end.lives.push(life);
        Ok(Opened { qpn, psn, mtu: world.plan.mtu[host], key_set: 0 })
    }

    fn adopt(&mut self, sends: &Backlog) -> Result<(), StepError> {
        if !self.nic_works() {
            return Err(StepError);
        }
        let mut wcs = Wcs::default();
        let adopted =
            self.life().map(|l| l.qp.adopt(sends, &mut wcs).map_err(|e| format!("adopt: {e}")));
        self.deliver(wcs);
        match adopted.unwrap_or_else(|| Err("no QP adopts".into())) {
            Ok(()) => Ok(()),
            Err(e) => Err(self.wrong(e)),
        }
    }

    fn post(&mut self, sends: &Backlog) -> Result<(), StepError> {
        if !self.nic_works() {
            return Err(StepError);
        }
        let mut wcs = Wcs::default();
        let posted = self.life().map(|l| l.qp.post_held(&sends.sends, &mut wcs));
        self.deliver(wcs);
        match posted {
            Some(Ok(())) => Ok(()),
            Some(Err(e)) => Err(self.wrong(format!("post of what was held: {e}"))),
            None => Err(self.wrong("no QP posts".into())),
        }
    }

    fn modify(&mut self, changes: &[RcModify], _remote: Option<u8>) -> Result<(), StepError> {
        if !self.nic_works() {
            return Err(StepError);
        }
        changes.iter().try_for_each(|change| self.step(change))
    }

    fn go_on(&mut self, insists: bool) -> bool {
        let now_us = self.world.now_us;
        let Some(life) = self.life() else { return false };
        let goes_on = life.qp.go_on(now_us, insists);
        life.failure_told &= !goes_on;
        self.world.stats.went_on += u64::from(goes_on && !insists);
        goes_on
    }

    fn loses(&self, path: SlotPath) -> bool {
        self.world.health[self.host].loses(path)
    }

    fn fail(&mut self, status: WcStatus) {
        let mut wcs = Wcs::default();
        if let Some(life) = self.life() {
            life.qp.fail(status, &mut wcs);
        }
        self.deliver(wcs);
    }

    fn app(&self) -> RcModify {
        let (plan, host) = (&self.world.plan, self.host);
        RcModify {
            sq_psn: Some(plan.psn_of(0, host)),
            rq_psn: Some(plan.psn_of(0, 1 - host)),
            ..crate::end::app(plan.timeout, plan.retry_cnt, plan.rnr_retry(host, self.qp))
        }
    }

    fn complete(&mut self, work: &Backlog, first: WcStatus) {
        let wc = |wr_id, status| Wc {
            wr_id,
            status: status as u32,
            qp_num: logical_qpn(self.qp),
            ..Wc::default()
        };
        let mut wcs = Wcs::default();
        let mut status = first;
        for s in &work.sends {
            wcs.0.push((true, wc(s.wr_id, std::mem::replace(&mut status, WcStatus::WrFlushErr))));
        }
        wcs.0.extend(work.recvs.iter().map(|r| (false, wc(r.wr_id, WcStatus::WrFlushErr))));
        self.deliver(wcs);
    }

    fn ended(&mut self, why: Ended) {
        let (host, qp) = (self.host, self.qp);
        if why == Ended::ByProgram {
            // It takes what is posted, and flushes it.
            if !self.world.apps[host][qp].ended_by_own() {
                self.wrong("a QP of a program without errors ended by one".into());
            }
            return;
        }
        self.end().failed = true;
        self.world.apps[host][qp].stop();
    }

    fn switching_qps(&self) -> u32 {
        let ends = self.world.ends[self.host].iter();
        ends.filter(|end| end.executor.as_ref().is_some_and(|e| e.on_its_way())).count() as u32
    }

    fn liveness(&self, path: SlotPath) -> Liveness {
        self.world.liveness(self.host, path)
    }

    fn send(&mut self, message: &Message, path: SlotPath) {
        self.world.send_control(self.host, path, message);
    }

    fn peer_word(&mut self, message: &Message, _asks: Asks) -> Option<PeerWord> {
        // Reading takes time, in which anything may happen; now and then it is as good as none.
        if !self.informed && self.world.rng.range(0, 4) > 0 {
            let at_us = self.world.now_us + self.world.rng.range(1, READ_US);
            self.world.push(at_us, Event::Read { host: self.host, qp: self.qp, message: *message });
            return None;
        }
        Some(PeerWord::default())
    }

    fn peer_has_ended(&self) -> bool {
        self.world.knows_peer_ended(self.host)
    }

    fn gives_up(&mut self, _lqp: &LogicalQp, cause: FailCause, status: WcStatus) {
        let (host, qp) = (self.host, self.qp);
        if self.world.apps[host][qp].ended_by_own() {
            self.wrong(format!(
                "host {host} qp {qp}: {} where an error of the program was",
                cause.describe()
            ));
        }
        self.world.stats.refusals += u64::from(cause == FailCause::UnsafeReplay);
        self.world.say(|| format!("host {host} qp {qp} gives up: {} {status:?}", cause.describe()));
    }

    fn switched(&mut self, lqp: &LogicalQp, done: &Switch) {
        // One that fails on the way is still a switch that began as that.
        let home = lqp.slots().get(done.switched.to_slot) == lqp.slots().get(0);
        if done.switched.reason == Reason::Failback && home {
            let gone = self.world.went_home(self.host, self.qp, &done.switched);
            self.world.note(gone);
        }
        let plain = self.world.plan.plain[self.host];
        let stats = &mut self.world.stats;
        stats.switches += 1;
        stats.planned += u64::from(done.switched.planned);
        let grey = done.switched.reason == Reason::Loss;
        stats.left_grey += u64::from(grey && done.switched.planned);
        let alike = grey && self.world.plan.grey.is_some_and(|grey| grey.all);
        stats.plain_switches += u64::from(plain);
        stats.chained += u64::from(done.switched.epochs > 1);
        stats.replays += u64::from(done.replay.replayed);
        stats.spared_replays += done.replay.marked;
        if alike {
            self.wrong("a path was left for its losses where all lose as much".into());
        }
    }
}
