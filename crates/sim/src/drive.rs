//! How events are handled: packets, timers, control messages, faults, and the application's turns.

use crate::end::{new_qp, ready_to_receive, ready_to_send, Life, Sink, Wcs};
use crate::memory::Area;
use crate::plan::{Fault, Mutant};
use crate::world::{endpoint, logical_qpn, qpn_of, Event, Violation, World};
use unbroken_path::health::Answer;
use unbroken_path::message::{Body, Probe, RefuseReason};
use unbroken_path::silence::{Silence, ASK_AFTER_US, WEDGED_AFTER_US};
use unbroken_path::{Action, Message, OpenError, Opened, Reason, SlotPath, State};
use unbroken_roce::{RcEvent, RecvEntry, RecvWr, SendEntry};
use unbroken_types::{QpState, WcOpcode, PSN_MASK};
use unbroken_wire::Packet;

/// A life has wrapped around when it began with one of the last so many PSNs and has come to one of the first.
const WRAP_PSNS: u32 = 1 << 16;

/// A silent QP is looked at so often.
const LOOK_US: u64 = 8_000;

impl World {
    pub(crate) fn handle(&mut self, event: Event) -> Result<(), Violation> {
        if let Some(host) = event.host() {
            if self.crashed[host] {
                self.answer_for_the_dead(host, &event);
                return Ok(());
            }
            if self.now_us < self.stopped_us[host] {
                self.push(self.stopped_us[host], event); // packets wait in the socket, timers fire late
                return Ok(());
            }
        }
        match event {
            Event::Fault(fault) => self.apply_fault(fault),
            Event::Packet { host, nic, bytes } => self.on_packet(host, nic, &bytes),
            Event::Control { host, nic, from, bytes } => self.on_control(host, nic, from, &bytes),
            Event::Qp { host, qp, life } => self.on_qp_timer(host, qp, life),
            Event::Path { host, qp } => {
                let end = &mut self.ends[host][qp];
                if end.path_at_us <= self.now_us {
                    end.path_at_us = u64::MAX;
                    end.path.handle_timeout(self.now_us);
                }
                self.pump(host, qp)
            }
            Event::Look { host, qp } => {
                self.ends[host][qp].look_at_us = u64::MAX;
                self.pump(host, qp)
            }
            Event::Nic { host, nic, reason } => self.on_nic_event(host, nic, reason),
            Event::Health { host } => self.on_health_timer(host),
            Event::App { host, qp } => self.on_app(host, qp),
        }
    }

    /// A process that took the address of a killed one answers its Hellos.
    fn answer_for_the_dead(&mut self, host: usize, event: &Event) {
        let Event::Control { nic, from, bytes, .. } = event else { return };
        let Ok((message, _)) = Message::decode(bytes) else { return };
        if !self.restarted[host] {
            return;
        }
        let reason =
            if message.to.qpn & 0x2_0000 != 0 { RefuseReason::UnknownQp } else { RefuseReason::WrongIncarnation };
        if let Some(refusal) = message.refusal(9_999, reason) {
            self.send_control(host, SlotPath { local: *nic as u8, remote: *from as u8 }, &refusal);
        }
    }

    /// The fault happens at once; a process hears of it when it runs.
    fn apply_fault(&mut self, fault: Fault) -> Result<(), Violation> {
        self.say(|| format!("fault {fault:?}"));
        self.net.apply(fault);
        let mut tell = |host, nic, reason| {
            self.push(self.now_us, Event::Nic { host, nic, reason });
            Ok(())
        };
        match fault {
            Fault::Dead { host, nic } => tell(host, nic, Some(Reason::DeviceFatal)),
            Fault::Down { host, nic } => tell(host, nic, Some(Reason::PortDown)),
            Fault::Heal { host, nic } => tell(host, nic, None),
            Fault::Cut { tx, rx, .. } => {
                self.stats.one_way += u64::from(tx != rx);
                Ok(())
            }
            Fault::Suspect { host, qp } => {
                let epoch = self.ends[host][qp].path.epoch();
                let works = self.ends[host][qp].live().map(|l| (l.nic, l.remote)).is_some_and(|(nic, remote)| {
                    self.net.carries(host, nic, remote) && self.net.carries(1 - host, remote, nic)
                });
                self.stats.wrong_suspicions += u64::from(works);
                self.suspect(host, qp, epoch, Reason::PostFailed);
                self.pump(host, qp)
            }
            Fault::Stop { host, for_us } => {
                self.stopped_us[host] = self.now_us + for_us;
                self.stats.stops += 1;
                Ok(())
            }
            Fault::Crash { host, restarts } => {
                self.crashed[host] = true;
                self.restarted[host] = restarts;
                self.stats.crashes += 1;
                Ok(())
            }
        }
    }

    /// The host is told that its NIC is gone, or well again.
    fn on_nic_event(&mut self, host: usize, nic: usize, reason: Option<Reason>) -> Result<(), Violation> {
        self.health[host].set_nic(self.now_us, nic as u8, reason.is_none());
        for remote in 0..self.plan.rails {
            self.update_belief(host, nic, remote);
        }
        self.pump_health(host)?;
        // The event may be late: what it says is true of the QPs that were on the NIC then, and harmless to others.
        for qp in 0..self.ends[host].len() {
            let epoch = self.ends[host][qp].live().filter(|l| l.nic == nic).map(|l| l.epoch);
            if let (Some(epoch), Some(reason)) = (epoch, reason) {
                self.suspect(host, qp, epoch, reason);
            }
        }
        self.pump_all(host)
    }

    fn on_packet(&mut self, host: usize, nic: usize, bytes: &[u8]) -> Result<(), Violation> {
        if !self.net.nic_works(host, nic) {
            return Ok(());
        }
        let packet = Packet::parse(bytes).map_err(|e| format!("a packet of ours cannot be parsed: {e}"))?;
        let qpn = packet.bth.dest_qpn;
        let Some(qp) = (qpn >> 16).checked_sub(1).map(|q| q as usize) else {
            return Err(format!("a packet for QPN {qpn:#x}"));
        };
        let lives = &mut self.ends[host][qp].lives;
        let Some(life) = lives.iter_mut().rfind(|l| l.qpn == qpn && l.nic == nic) else { return Ok(()) };
        let mut wcs = Wcs::default();
        let over = life.over && self.mutant != Mutant::NoQuiesce;
        life.qp.handle_packet(self.now_us, &packet, &self.memory[host], &mut wcs);
        if over && !wcs.0.is_empty() {
            return Err(format!("host {host} qp {qp}: a WC from a QP that was stopped"));
        }
        let answer = packet.bth.opcode.op.is_response();
        if answer && !life.wrapped && packet.bth.psn < WRAP_PSNS && life.sq_psn > PSN_MASK - WRAP_PSNS {
            life.wrapped = true;
            self.stats.wraps += 1;
        }
        let epoch = life.epoch;
        self.say(|| {
            format!(
                "host {host} qp {qp} gets {:?} psn {} aeth {:?} epoch {epoch}",
                packet.bth.opcode.op,
                packet.bth.psn,
                packet.ext.aeth()
            )
        });
        self.deliver(host, qp, wcs)?;
        if !answer && !packet.payload.is_empty() {
            self.apps[host][qp].check_order(&self.memory[host])?;
        }
        self.pump(host, qp)
    }

    fn on_qp_timer(&mut self, host: usize, qp: usize, life: usize) -> Result<(), Violation> {
        let l = &mut self.ends[host][qp].lives[life];
        if l.armed_us > self.now_us {
            return Ok(());
        }
        l.armed_us = u64::MAX;
        let mut wcs = Wcs::default();
        if l.qp.poll_timeout().is_some_and(|at| at <= self.now_us) {
            l.qp.handle_timeout(self.now_us, &mut wcs);
        }
        self.deliver(host, qp, wcs)?;
        self.pump(host, qp)
    }

    /// The application posts, now and then.
    fn on_app(&mut self, host: usize, qp: usize) -> Result<(), Violation> {
        if self.ends[host][qp].failed {
            return Ok(());
        }
        self.ends[host][qp].app_sleeps = true;
        let mut posted = false;
        for _ in 0..self.rng.range(1, 4) {
            posted |= self.post_recv(host, qp)?;
        }
        for _ in 0..self.rng.range(1, 4) {
            posted |= self.post_send(host, qp)?;
        }
        if posted {
            self.wake_app(host, qp);
        }
        self.pump(host, qp)
    }

    /// The application will look again after a pause. It sleeps while it has nothing to post, until a WC comes.
    fn wake_app(&mut self, host: usize, qp: usize) {
        if core::mem::take(&mut self.ends[host][qp].app_sleeps) {
            let at = self.now_us + self.rng.range(1, self.plan.qps[qp].pause_us);
            self.push(at, Event::App { host, qp });
        }
    }

    /// False if there is nothing to post.
    fn post_recv(&mut self, host: usize, qp: usize) -> Result<bool, Violation> {
        let Some((wr_id, sges)) = self.apps[host][qp].next_recv(&self.memory[host], self.plan.max_len) else {
            return Ok(false);
        };
        let end = &mut self.ends[host][qp];
        let mut wcs = Wcs::default();
        if let Some(srq) = &end.srq {
            srq.post(&RecvWr { wr_id, sges: &sges })?;
        } else if let Some(backlog) = end.backlog.as_mut() {
            backlog.recvs.push(RecvEntry { wr_id, sges });
        } else if let Some(life) = end.live() {
            life.qp.post_recv(&RecvWr { wr_id, sges: &sges }, &mut wcs).map_err(|e| format!("post_recv: {e}"))?;
        }
        self.deliver(host, qp, wcs)?;
        Ok(true)
    }

    /// False if there is nothing to post.
    fn post_send(&mut self, host: usize, qp: usize) -> Result<bool, Violation> {
        let Some(mut post) = self.apps[host][qp].next_send(&self.memory[host]) else { return Ok(false) };
        post.remote_addr = self.memory[1 - host].address(qp, Area::Remote, post.index);
        let end = &mut self.ends[host][qp];
        let mut wcs = Wcs::default();
        if let Some(backlog) = end.backlog.as_mut() {
            backlog.sends.push(SendEntry::from(&post.wr()));
        } else if let Some(life) = end.live() {
            life.qp.post_send(&post.wr(), &mut wcs).map_err(|e| format!("post_send: {e}"))?;
        }
        self.deliver(host, qp, wcs)?;
        Ok(true)
    }

    fn deliver(&mut self, host: usize, qp: usize, wcs: Wcs) -> Result<(), Violation> {
        if !wcs.0.is_empty() {
            self.wake_app(host, qp);
        }
        let [first, second] = &mut self.apps;
        let (ours, theirs) = if host == 0 { (first, second) } else { (second, first) };
        for (is_send, wc) in wcs.0 {
            if wc.qp_num != logical_qpn(qp) {
                return Err(format!("a WC names QPN {:#x}", wc.qp_num));
            }
            if is_send {
                let atomic = [WcOpcode::CompSwap as u32, WcOpcode::FetchAdd as u32].contains(&wc.opcode);
                self.stats.atomics += u64::from(atomic && wc.status == 0);
                let before = ours[qp].outstanding();
                ours[qp].on_send_wc(&wc, &self.memory, &mut theirs[qp])?;
                self.stats.messages += (before - ours[qp].outstanding()) as u64;
            } else {
                ours[qp].on_recv_wc(&wc, &self.memory, &theirs[qp])?;
            }
        }
        Ok(())
    }

    // ---- control messages and probes ----

    fn send_control(&mut self, host: usize, path: SlotPath, message: &Message) {
        let (nic, remote) = (usize::from(path.local), usize::from(path.remote));
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        let weather = self.control_weather();
        let arrivals = self.net.arrivals(&mut self.rng, self.now_us, (host, nic, remote), weather);
        for at in arrivals.iter() {
            self.push(at, Event::Control { host: 1 - host, nic: remote, from: nic, bytes: bytes.clone() });
        }
    }

    fn on_control(&mut self, host: usize, nic: usize, from: usize, bytes: &[u8]) -> Result<(), Violation> {
        if !self.net.nic_works(host, nic) {
            return Ok(());
        }
        let (message, _) = Message::decode(bytes).map_err(|e| format!("a message of ours cannot be read: {e}"))?;
        let path = SlotPath { local: nic as u8, remote: from as u8 };
        match message.body {
            Body::Probe(_) => {
                if let Some(answer) = message.answer_probe() {
                    self.send_control(host, path, &answer);
                }
                Ok(())
            }
            Body::ProbeAck(probe) => {
                self.health[host].handle_answer(self.now_us, path, probe.sequence);
                self.pump_health(host)
            }
            Body::Hello(_) | Body::Refuse(_) | Body::Bye | Body::Moved => {
                let qp = (message.to.qpn >> 16) as usize - 1;
                self.say(|| format!("host {host} qp {qp} hears {:?}", message.body));
                self.ends[host][qp].path.handle_message(self.now_us, &message);
                self.pump(host, qp)
            }
        }
    }

    fn on_health_timer(&mut self, host: usize) -> Result<(), Violation> {
        if self.health_at_us[host] <= self.now_us {
            self.health_at_us[host] = u64::MAX;
            self.pump_health(host)?;
        }
        Ok(())
    }

    /// Sends the probes that are due, gives the verdicts that are, and sets the timer.
    fn pump_health(&mut self, host: usize) -> Result<(), Violation> {
        if self.health[host].poll_timeout().is_some_and(|at| at <= self.now_us) {
            self.health[host].handle_timeout(self.now_us);
        }
        while let Some((path, sequence)) = self.health[host].poll_probe(self.now_us) {
            let body = Body::Probe(Probe { sequence, sent_us: self.now_us });
            let message = Message { from: endpoint(host, 0), to: endpoint(1 - host, 0), body };
            self.send_control(host, path, &message);
        }
        let at = self.health[host].poll_timeout().unwrap_or(u64::MAX);
        if at < self.health_at_us[host] {
            self.health_at_us[host] = at;
            self.push(at.max(self.now_us + 1), Event::Health { host });
        }
        let mut said = false;
        while let Some((path, verdict)) = self.health[host].poll_verdict() {
            self.verdict(host, path, verdict);
            said = true;
        }
        if said {
            self.pump_all(host)?;
        }
        Ok(())
    }

    // ---- one end ----

    fn pump_all(&mut self, host: usize) -> Result<(), Violation> {
        (0..self.ends[host].len()).try_for_each(|qp| self.pump(host, qp))
    }

    /// Does all that an end has to do now.
    fn pump(&mut self, host: usize, qp: usize) -> Result<(), Violation> {
        if self.crashed[host] {
            return Ok(());
        }
        loop {
            while let Some(action) = self.ends[host][qp].path.poll_action() {
                self.act(host, qp, action)?;
            }
            self.transmit(host, qp)?;
            self.watch(host, qp)?;
            if !self.ends[host][qp].path.has_actions() {
                break;
            }
        }
        self.arm(host, qp);
        Ok(())
    }

    fn transmit(&mut self, host: usize, qp: usize) -> Result<(), Violation> {
        let ghosts = self.mutant == Mutant::NoQuiesce;
        for index in 0..self.ends[host][qp].lives.len() {
            let life = &mut self.ends[host][qp].lives[index];
            if life.over && !ghosts {
                continue;
            }
            let mut wcs = Wcs::default();
            let mut sink = Sink { memory: &self.memory[host], packets: Vec::new(), sources: Vec::new() };
            let more = life.qp.poll_transmit(self.now_us, &mut sink, &mut wcs);
            let (packets, sources) = (sink.packets, sink.sources);
            let (nic, remote, epoch) = (life.nic, life.remote, life.epoch);
            let due = if more { Some(self.now_us + 10) } else { life.qp.poll_timeout() };
            if let Some(at) = due.filter(|&at| at < life.armed_us) {
                let at = at.max(self.now_us + 1);
                life.armed_us = at;
                self.push(at, Event::Qp { host, qp, life: index });
            }
            self.check_once(host, qp, epoch, &sources)?;
            let weather = self.data_weather();
            for (n, bytes) in packets.into_iter().enumerate() {
                let sent_us = self.now_us + n as u64 / 4;
                let arrivals = self.net.arrivals(&mut self.rng, sent_us, (host, nic, remote), weather);
                for at in arrivals.iter() {
                    self.push(at, Event::Packet { host: 1 - host, nic: remote, bytes: bytes.clone() });
                }
            }
            self.deliver(host, qp, wcs)?;
        }
        Ok(())
    }

    /// Invariant 3: what must not be replayed leaves in one life only.
    fn check_once(&mut self, host: usize, qp: usize, epoch: u64, sources: &[u64]) -> Result<(), Violation> {
        if !self.plan.qps[qp].no_replay {
            return Ok(());
        }
        for &address in sources {
            let Some(k) = self.memory[host].index_of(qp, Area::Local, address) else { continue };
            let first = *self.ends[host][qp].left_in[k].get_or_insert(epoch);
            if first != epoch && self.once_only(host, qp, k) {
                return Err(format!("host {host} qp {qp}: NO_REPLAY message {k} left in epochs {first} and {epoch}"));
            }
        }
        Ok(())
    }

    /// Looks at the present life: progress, failure, stall.
    fn watch(&mut self, host: usize, qp: usize) -> Result<(), Violation> {
        let now_us = self.now_us;
        let end = &mut self.ends[host][qp];
        let failed = end.failed;
        let Some(life) = end.lives.last_mut().filter(|l| !l.over) else { return Ok(()) };
        if let Some(event) =
            life.qp.take_event().filter(|e| !matches!(e, RcEvent::SqDrained | RcEvent::CommEstablished))
        {
            return Err(format!("host {host} qp {qp}: transport event {event:?}"));
        }
        if life.qp.state() == QpState::Err && !failed {
            return Err(format!("host {host} qp {qp}: the physical QP failed by itself"));
        }
        self.stats.retransmits += u64::from(life.qp.take_retransmits());
        let (epoch, p) = (life.epoch, life.qp.progress());
        if (p.executed, p.advanced) != life.told {
            life.told = (p.executed, p.advanced);
            end.path.handle_progress(now_us, epoch);
        }
        let failure = life.qp.failure();
        let path = SlotPath { local: life.nic as u8, remote: life.remote as u8 };
        if end.path.state() != State::Active {
            if let Some(status) = failure {
                self.suspect(host, qp, epoch, Reason::QpFailed(status));
            }
            return Ok(());
        }
        let look = end.silence.look(now_us, p.outstanding_sends, p.advanced);
        let answer = if let Some(status) = failure {
            if end.gave_up.replace(status).is_some() {
                return Ok(()); // asked already
            }
            self.health[host].ask(now_us, path, now_us)
        } else if look.moved {
            self.health[host].carried(now_us, path);
            Answer::Asked
        } else {
            let Some(since_us) = look.silent_since_us.filter(|at| at + ASK_AFTER_US <= now_us) else { return Ok(()) };
            let answer = self.health[host].ask(now_us, path, since_us);
            if answer == Answer::Alive && since_us + WEDGED_AFTER_US <= now_us && !p.waiting_rnr {
                self.suspect(host, qp, epoch, Reason::Wedged(unbroken_types::WcStatus::RetryExcErr));
            }
            answer
        };
        if answer == Answer::Dead {
            self.verdict(host, path, unbroken_path::health::Verdict::Dead);
        }
        self.pump_health(host)
    }

    fn arm(&mut self, host: usize, qp: usize) {
        let end = &mut self.ends[host][qp];
        let at = end.path.poll_timeout().map_or(u64::MAX, |at| at.max(self.now_us + 1));
        if at != end.path_at_us {
            end.path_at_us = at;
            if at != u64::MAX {
                self.push(at, Event::Path { host, qp });
            }
        }
        let end = &mut self.ends[host][qp];
        let watched = end.path.state() == State::Active && end.gave_up.is_none(); // nobody looks at progress during a switch
        let silent = end.silence.since_us().filter(|_| watched);
        if let Some(at) =
            silent.map(|since| (since + ASK_AFTER_US).max(self.now_us + LOOK_US)).filter(|&at| at < end.look_at_us)
        {
            end.look_at_us = at;
            self.push(at, Event::Look { host, qp });
        }
    }

    fn act(&mut self, host: usize, qp: usize, action: Action) -> Result<(), Violation> {
        let now_us = self.now_us;
        if !matches!(action, Action::Send { .. }) {
            self.say(|| format!("host {host} qp {qp} {action:?}"));
        }
        let mutant = self.mutant;
        let end = &mut self.ends[host][qp];
        match action {
            Action::Quiesce { .. } => {
                let life = end.quiesce(mutant == Mutant::NoQuiesce);
                end.path.handle_quiesced(now_us, Ok(life));
            }
            Action::Open { epoch, slot } => return self.open(host, qp, epoch, slot),
            Action::CheckReplay { epoch, peer_done } => {
                let Some(life) = end.live() else { return Err("CheckReplay without a QP".into()) };
                let safe = mutant == Mutant::NoCheck || !life.qp.unsafe_to_replay(peer_done);
                end.path.handle_check(now_us, epoch, safe);
                self.stats.refusals += u64::from(!safe);
            }
            Action::Connect { epoch, peer_qpn, sq_psn, rq_psn, mtu, peer_done } => {
                let plan = &self.plan;
                let Some(life) = end.live() else { return Err("Connect without a QP".into()) };
                let replay = life.qp.mark_executed(peer_done);
                // A mutant starts without having heard of the peer's QP.
                let heard = peer_qpn != 0;
                let peer_qpn = if heard { peer_qpn } else { qpn_of(qp, epoch, mutant) };
                let psns = match mutant {
                    Mutant::SameQpn => (plan.psn_of(0, host), plan.psn_of(0, 1 - host)),
                    _ if !heard => (sq_psn, plan.psn_of(epoch, 1 - host)),
                    _ => (sq_psn, rq_psn),
                };
                life.sq_psn = psns.0;
                let rtr = ready_to_receive(peer_qpn, psns.1, mtu);
                life.qp.modify(&rtr, &mut Wcs::default()).map_err(|e| format!("to RTR: {e}"))?;
                if replay.marked != peer_done {
                    return Err(format!("the peer has done {peer_done}, but only {} could be marked", replay.marked));
                }
                self.stats.replays += u64::from(replay.replayed);
                self.stats.spared_replays += replay.marked;
            }
            Action::Start { .. } => {
                let (timeout, retry_cnt) = (self.plan.timeout, self.plan.retry_cnt);
                let Some(life) = end.live() else { return Err("Start without a QP".into()) };
                let rts = ready_to_send(life.sq_psn, timeout, retry_cnt);
                life.qp.modify(&rts, &mut Wcs::default()).map_err(|e| format!("to RTS: {e}"))?;
            }
            Action::Send { message, via } => {
                if let Some(path) = end.path.slots().get(via) {
                    self.send_control(host, path, &message);
                }
            }
            Action::Fail { status, .. } => return self.fail(host, qp, status),
            Action::Report(r) => {
                self.stats.switches += 1;
                self.stats.chained += u64::from(r.epochs > 1);
            }
        }
        Ok(())
    }

    fn open(&mut self, host: usize, qp: usize, epoch: u64, slot: u8) -> Result<(), Violation> {
        let now_us = self.now_us;
        let refused = self.rng.one_in(200);
        let mtu = self.plan.mtu[host];
        let mutant = self.mutant;
        let end = &mut self.ends[host][qp];
        let path = end.path.slots().get(slot).ok_or("Open of an empty slot")?;
        let (nic, remote) = (usize::from(path.local), usize::from(path.remote));
        if refused || !self.net.nic_works(host, nic) {
            end.path.handle_opened(now_us, epoch, Err(OpenError));
            return Ok(());
        }
        let backlog = end.backlog.take().ok_or("Open without Quiesce")?;
        let qpn = qpn_of(qp, epoch, mutant);
        let mut fresh = new_qp(qpn, logical_qpn(qp), end.srq.as_ref());
        fresh.set_selective(self.plan.selective[host]);
        fresh.set_mutation(mutant.in_roce());
        fresh.adopt(&backlog).map_err(|e| format!("adopt: {e}"))?;
        let (sq_psn, armed_us) = (0, u64::MAX);
        end.lives.push(Life {
            qpn,
            epoch,
            nic,
            remote,
            sq_psn,
            qp: fresh,
            armed_us,
            over: false,
            wrapped: false,
            told: (0, 0),
        });
        (end.silence, end.gave_up, end.look_at_us) = (Silence::default(), None, u64::MAX);
        let psn = self.plan.psn_of(epoch, host);
        end.path.handle_opened(now_us, epoch, Ok(Opened { qpn, psn, mtu }));
        Ok(())
    }

    fn fail(&mut self, host: usize, qp: usize, status: unbroken_types::WcStatus) -> Result<(), Violation> {
        let end = &mut self.ends[host][qp];
        end.failed = true;
        let mut wcs = Wcs::default();
        if let Some(backlog) = end.backlog.take() {
            let mut qp_for_flush = new_qp(2, logical_qpn(qp), None);
            qp_for_flush.adopt(&backlog).map_err(|e| format!("adopt: {e}"))?;
            qp_for_flush.fail(status, &mut wcs);
        } else if let Some(life) = end.live() {
            life.qp.fail(status, &mut wcs);
        }
        self.apps[host][qp].stop();
        self.deliver(host, qp, wcs)
    }
}
