//! How events are handled: packets, timers, control messages, faults, and the application's turns.

use crate::end::{End, Sink, Wcs, CAPS};
use crate::memory::Area;
use crate::mutants::Mutant;
use crate::plan::Fault;
use crate::world::{endpoint, logical_qpn, Event, Violation, World};
use unbroken_failover_protocol::health::{Answer, Verdict};
use unbroken_failover_protocol::message::{Body, Probe, RefuseReason};
use unbroken_failover_protocol::silence::ASK_AFTER_US;
use unbroken_failover_protocol::{Env, Message, Reason, SlotPath, State};
use unbroken_roce::RcEvent;
use unbroken_types::{QpState, RecvWr, WcOpcode, PSN_MASK};
use unbroken_wire::Packet;

/// A life has wrapped around when it began with one of the last so many PSNs and has come to one of
/// the first.
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
                    self.with(host, qp, |executor, io| executor.tick(io));
                }
                self.pump(host, qp)
            }
            Event::Look { host, qp } => self.look(host, qp),
            Event::Read { host, qp, message } => {
                self.informed(host, qp, |executor, io| executor.message(io, &message));
                self.pump(host, qp)
            }
            Event::Nic { host, nic, reason } => self.on_nic_event(host, nic, reason),
            Event::Health { host } => self.on_health_timer(host),
            Event::App { host, qp } => self.on_app(host, qp),
            Event::Home { host } => self.look_home(host),
        }
    }

    /// A process that took the address of a killed one answers its Hellos.
    fn answer_for_the_dead(&mut self, host: usize, event: &Event) {
        let Event::Control { nic, from, bytes, .. } = event else { return };
        let Ok((message, _)) = Message::decode(bytes) else { return };
        if !self.restarted[host] {
            return;
        }
        let reason = if message.to.qpn & 0x2_0000 != 0 {
            RefuseReason::UnknownQp
        } else {
            RefuseReason::WrongIncarnation
        };
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
            Fault::Grey { .. } => Ok(()),
            Fault::Cut { tx, rx, .. } => {
                self.stats.one_way += u64::from(tx != rx);
                Ok(())
            }
            Fault::Suspect { host, qp } => {
                let works = self.ends[host][qp].live().map(|l| (l.nic, l.remote)).is_some_and(
                    |(nic, remote)| {
                        self.net.carries(host, nic, remote)
                            && self.net.carries(1 - host, remote, nic)
                    },
                );
                self.stats.wrong_suspicions += u64::from(works);
                self.suspect(host, qp, Reason::PostFailed);
                self.pump(host, qp)
            }
            Fault::Plan { host, qp, home } => {
                let slots = self.ends[host][qp].lqp().slots().clone();
                let (first, now) = (slots.get(0), self.ends[host][qp].lqp().path());
                let wanted = |path| if home { Some(path) == first } else { Some(path) != now };
                let begun = (!home || now != first)
                    && self.with(host, qp, |executor, io| executor.plan(io, Reason::Drain, wanted));
                self.stats.plans += u64::from(begun);
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
    fn on_nic_event(
        &mut self,
        host: usize,
        nic: usize,
        reason: Option<Reason>,
    ) -> Result<(), Violation> {
        self.health[host].set_nic(self.now_us, nic as u8, reason.is_none());
        // The event may be late: what it says is true of the QPs that were on the NIC then, and
        // harmless to others.
        for qp in 0..self.ends[host].len() {
            self.watched(host, qp, |executor, io| executor.beliefs_changed(io));
            let there = self.ends[host][qp].live().is_some_and(|l| l.nic == nic);
            if let Some(reason) = reason.filter(|_| there) {
                self.suspect(host, qp, reason);
            }
        }
        self.pump_health(host)?;
        self.pump_all(host)
    }

    fn on_packet(&mut self, host: usize, nic: usize, bytes: &[u8]) -> Result<(), Violation> {
        if !self.net.nic_works(host, nic) {
            return Ok(());
        }
        let packet =
            Packet::parse(bytes).map_err(|e| format!("a packet of ours cannot be parsed: {e}"))?;
        let qpn = packet.bth.dest_qpn;
        let Some(qp) = (qpn >> 16).checked_sub(1).map(|q| q as usize) else {
            return Err(format!("a packet for QPN {qpn:#x}"));
        };
        let lives = &mut self.ends[host][qp].lives;
        let Some(life) = lives.iter_mut().rfind(|l| l.qpn == qpn && l.nic == nic) else {
            return Ok(());
        };
        let mut wcs = Wcs::default();
        let over = life.over && self.mutant != Mutant::NoQuiesce;
        life.qp.handle_packet(self.now_us, &packet, &self.memory[host].on(nic), &mut wcs);
        if over && !wcs.0.is_empty() {
            return Err(format!("host {host} qp {qp}: a WC from a QP that was stopped"));
        }
        let answer = packet.bth.opcode.op.is_response();
        if answer
            && !life.wrapped
            && packet.bth.psn < WRAP_PSNS
            && life.sq_psn > PSN_MASK - WRAP_PSNS
        {
            life.wrapped = true;
            self.stats.wraps += 1;
        }
        let number = life.number;
        self.say(|| {
            format!(
                "host {host} qp {qp} gets {:?} psn {} aeth {:?} life {number}",
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

    /// The application will look again after a pause. It sleeps while it has nothing to post, until
    /// a WC comes.
    fn wake_app(&mut self, host: usize, qp: usize) {
        if core::mem::take(&mut self.ends[host][qp].app_sleeps) {
            let at = self.now_us + self.rng.range(1, self.plan.qps[qp].pause_us);
            self.push(at, Event::App { host, qp });
        }
    }

    /// False if there is nothing to post.
    fn post_recv(&mut self, host: usize, qp: usize) -> Result<bool, Violation> {
        let Some((wr_id, sges)) =
            self.apps[host][qp].next_recv(&self.memory[host], self.plan.max_len)
        else {
            return Ok(false);
        };
        let wr = RecvWr { wr_id, sges: &sges };
        let mut wcs = Wcs::default();
        if let Some(srq) = &self.ends[host][qp].srq {
            srq.post(&wr)?;
        } else if let Some(held) = self.with(host, qp, |executor, io| {
            executor.hold_recv(&CAPS, || io.progress().outstanding_recvs, &wr)
        }) {
            held.map_err(|e| format!("post_recv between two paths: {e}"))?;
        } else if let Some(life) = self.ends[host][qp].live() {
            life.qp.post_recv(&wr, &mut wcs).map_err(|e| format!("post_recv: {e}"))?;
        }
        self.deliver(host, qp, wcs)?;
        Ok(true)
    }

    /// False if there is nothing to post.
    fn post_send(&mut self, host: usize, qp: usize) -> Result<bool, Violation> {
        if self.apps[host][qp].waits_for_receive(&self.apps[1 - host][qp]) {
            return Ok(true); // not yet
        }
        let Some(mut post) = self.apps[host][qp].next_send(&self.memory[host]) else {
            return Ok(false);
        };
        if let Some(own) =
            self.plan.own_of(qp).filter(|own| (own.host, own.message) == (host, post.index))
        {
            for (after_us, fault) in own.amid.clone() {
                self.push(self.now_us + after_us, Event::Fault(fault));
            }
        }
        post.remote_addr = self.memory[1 - host].address(qp, Area::Remote, post.index);
        let mut wcs = Wcs::default();
        if let Some(held) = self.with(host, qp, |executor, io| {
            executor.hold_sends(&CAPS, || io.progress().sends(), &post.wr())
        }) {
            held.map_err(|e| format!("post_send between two paths: {e}"))?;
        } else if let Some(life) = self.ends[host][qp].live() {
            life.qp.post_send(&post.wr(), &mut wcs).map_err(|e| format!("post_send: {e}"))?;
        }
        self.deliver(host, qp, wcs)?;
        Ok(true)
    }

    pub(crate) fn deliver(&mut self, host: usize, qp: usize, wcs: Wcs) -> Result<(), Violation> {
        if !wcs.0.is_empty() {
            self.wake_app(host, qp);
        }
        let knew = self.apps[host][qp].got_own_error();
        self.hand_over(host, qp, wcs)?;
        if !knew && self.apps[host][qp].got_own_error() {
            let calm =
                |end: &End| end.executor.as_ref().is_some_and(|e| e.lqp().state() == State::Active);
            let amid = !self.ends.iter().all(|ends| calm(&ends[qp]));
            self.stats.own_errors += 1;
            self.stats.plain_own_errors += u64::from(self.plan.plain[host]);
            self.stats.amid_own_errors += u64::from(amid);
        }
        Ok(())
    }

    fn hand_over(&mut self, host: usize, qp: usize, wcs: Wcs) -> Result<(), Violation> {
        let [first, second] = &mut self.apps;
        let (ours, theirs) = if host == 0 { (first, second) } else { (second, first) };
        for (is_send, wc) in wcs.0 {
            if wc.qp_num != logical_qpn(qp) {
                return Err(format!("a WC names QPN {:#x}", wc.qp_num));
            }
            if is_send {
                let atomic =
                    [WcOpcode::CompSwap as u32, WcOpcode::FetchAdd as u32].contains(&wc.opcode);
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

    pub(crate) fn send_control(&mut self, host: usize, path: SlotPath, message: &Message) {
        let (nic, remote) = (usize::from(path.local), usize::from(path.remote));
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        let conditions = self.control_conditions();
        let arrivals =
            self.net.arrivals(&mut self.rng, self.now_us, (host, nic, remote), conditions);
        for at in arrivals.iter() {
            self.push(
                at,
                Event::Control { host: 1 - host, nic: remote, from: nic, bytes: bytes.clone() },
            );
        }
    }

    fn on_control(
        &mut self,
        host: usize,
        nic: usize,
        from: usize,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        if !self.net.nic_works(host, nic) {
            return Ok(());
        }
        let (message, _) =
            Message::decode(bytes).map_err(|e| format!("a message of ours cannot be read: {e}"))?;
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
            Body::AskKey(_) | Body::Keys(_) => Ok(()), // keys are good everywhere here
            Body::Hello(_) | Body::Planned(..) | Body::Refuse(_) | Body::Bye | Body::Moved => {
                let qp = (message.to.qpn >> 16) as usize - 1;
                self.say(|| format!("host {host} qp {qp} hears {:?}", message.body));
                self.with(host, qp, |executor, io| executor.message(io, &message));
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
    pub(crate) fn pump_health(&mut self, host: usize) -> Result<(), Violation> {
        if self.health[host].poll_timeout().is_some_and(|at| at <= self.now_us) {
            self.health[host].handle_timeout(self.now_us);
        }
        while let Some((port_path, sequence)) = self.health[host].poll_probe(self.now_us) {
            if self.knows_peer_ended(host) {
                for qp in 0..self.ends[host].len() {
                    self.with(host, qp, |executor, io| executor.peer_gone(io));
                }
            }
            let body = Body::Probe(Probe { sequence, sent_us: self.now_us });
            let message = Message { from: endpoint(host, 0), to: endpoint(1 - host, 0), body };
            self.send_control(host, port_path.path, &message);
        }
        let at = self.health[host].poll_timeout().unwrap_or(u64::MAX);
        if at < self.health_at_us[host] {
            self.health_at_us[host] = at;
            self.push(at.max(self.now_us + 1), Event::Health { host });
        }
        let mut said = false;
        while let Some((port_path, verdict)) = self.health[host].poll_verdict() {
            self.verdict(host, port_path.path, verdict);
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
    pub(crate) fn pump(&mut self, host: usize, qp: usize) -> Result<(), Violation> {
        if self.crashed[host] {
            return Ok(());
        }
        loop {
            let lives = self.ends[host][qp].lives.len();
            self.transmit(host, qp)?;
            self.watch(host, qp)?;
            if self.ends[host][qp].lives.len() == lives {
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
            let mut sink = Sink {
                memory: self.memory[host].on(life.nic),
                packets: Vec::new(),
                sources: Vec::new(),
            };
            let more = life.qp.poll_transmit(self.now_us, &mut sink, &mut wcs);
            let (packets, sources) = (sink.packets, sink.sources);
            let (nic, remote, number) = (life.nic, life.remote, life.number);
            let due = if more { Some(self.now_us + 10) } else { life.qp.poll_timeout() };
            if let Some(at) = due.filter(|&at| at < life.armed_us) {
                let at = at.max(self.now_us + 1);
                life.armed_us = at;
                self.push(at, Event::Qp { host, qp, life: index });
            }
            self.check_once(host, qp, number, &sources)?;
            let conditions = self.data_conditions();
            for (n, bytes) in packets.into_iter().enumerate() {
                let sent_us = self.now_us + n as u64 / 4;
                let arrivals =
                    self.net.arrivals(&mut self.rng, sent_us, (host, nic, remote), conditions);
                for at in arrivals.iter() {
                    self.push(
                        at,
                        Event::Packet { host: 1 - host, nic: remote, bytes: bytes.clone() },
                    );
                }
            }
            self.deliver(host, qp, wcs)?;
        }
        Ok(())
    }

    /// Invariant 3: what must not be replayed leaves in one life only.
    fn check_once(
        &mut self,
        host: usize,
        qp: usize,
        life: u64,
        sources: &[u64],
    ) -> Result<(), Violation> {
        if !self.plan.qps[qp].no_replay {
            return Ok(());
        }
        for &address in sources {
            let Some(k) = self.memory[host].index_of(qp, Area::Local, address) else { continue };
            let first = *self.ends[host][qp].left_in[k].get_or_insert(life);
            if first != life && self.once_only(host, qp, k) {
                return Err(format!(
                    "host {host} qp {qp}: NO_REPLAY message {k} left in lives {first} and {life}"
                ));
            }
        }
        Ok(())
    }

    /// The event of the present life, if there is one.
    fn hear(&mut self, host: usize, qp: usize) -> Result<(), Violation> {
        let mut wcs = Wcs::default();
        let event = self.ends[host][qp].live().and_then(|life| life.qp.take_event(&mut wcs));
        let told = match event {
            Some(event @ (RcEvent::AccessError | RcEvent::RequestError)) => {
                let [first, second] = &mut self.apps;
                let (ours, theirs) = if host == 0 { (first, second) } else { (second, first) };
                match ours[qp].peer_asked_wrong(&theirs[qp]) {
                    true => {
                        self.stats.ended_by_peer += 1;
                        Ok(())
                    }
                    false => Err(format!("host {host} qp {qp}: transport event {event:?}")),
                }
            }
            _ => Ok(()),
        };
        told.and_then(|()| self.deliver(host, qp, wcs))
    }

    /// What the device tells of the present life.
    fn watch(&mut self, host: usize, qp: usize) -> Result<(), Violation> {
        self.hear(host, qp)?;
        let ended = self.ends[host][qp].failed || self.apps[host][qp].ended_by_own();
        let Some(life) = self.ends[host][qp].live() else { return Ok(()) };
        if life.qp.state() == QpState::Err && !ended {
            return Err(format!("host {host} qp {qp}: the physical QP failed by itself"));
        }
        life.again += u64::from(life.qp.transport_mut().take_news().lost);
        self.stats.retransmits += u64::from(life.qp.transport_mut().take_retransmits());
        let Some(status) = life.qp.failure().filter(|_| !life.failure_told) else { return Ok(()) };
        life.failure_told = true;
        if let Some(path) = self.watched(host, qp, |executor, io| executor.gave_up(io, status)) {
            if self.health[host].ask(self.now_us, path, self.now_us) == Answer::Dead {
                self.watched(host, qp, |executor, io| executor.verdict(io, path, Verdict::Dead));
            }
        }
        self.pump_health(host)
    }

    /// Looks at the progress of a QP with sends outstanding: what moves shows that its path lives,
    /// and what does not asks its path.
    fn look(&mut self, host: usize, qp: usize) -> Result<(), Violation> {
        let now_us = self.now_us;
        let end = &mut self.ends[host][qp];
        end.look_at_us = u64::MAX;
        let Some(p) = end.lives.last().map(|l| l.qp.progress()) else { return Ok(()) };
        let counts = end.lives.last_mut().map(|life| {
            let now = (p.advanced, life.again);
            let then = std::mem::replace(&mut life.sent, now);
            (now.0.saturating_sub(then.0), now.1.saturating_sub(then.1))
        });
        let looked = end.executor.as_mut().and_then(|executor| executor.look(now_us, &p));
        let Some((path, look)) = looked else { return self.pump(host, qp) };
        if look.moved {
            self.health[host].carried(now_us, path);
        } else if let Some(since_us) = look.silent_since_us.filter(|at| at + ASK_AFTER_US <= now_us)
        {
            let answer = self.health[host].ask(now_us, path, since_us);
            if answer == Answer::Dead {
                self.suspect(host, qp, Reason::Stall);
            }
            if self.plan.plain[host] && answer == Answer::Alive && !p.waiting_rnr {
                // A plain device does not count.
                self.health[host].resent(now_us, path, 0, 1);
            }
        }
        if let Some((acked, again)) = counts.filter(|_| !self.plan.plain[host]) {
            self.health[host].resent(now_us, path, acked, again);
        }
        self.pump_health(host)?;
        self.pump(host, qp)
    }

    fn arm(&mut self, host: usize, qp: usize) {
        let end = &mut self.ends[host][qp];
        let at = end.executor().deadline_us().map_or(u64::MAX, |at| at.max(self.now_us + 1));
        if at != end.path_at_us {
            end.path_at_us = at;
            if at != u64::MAX {
                self.push(at, Event::Path { host, qp });
            }
        }
        let end = &mut self.ends[host][qp];
        let busy = end.lives.last().is_some_and(|l| l.qp.progress().outstanding_sends > 0);
        if busy && end.executor().active_path().is_some() && end.look_at_us == u64::MAX {
            let at = self.now_us + LOOK_US;
            end.look_at_us = at;
            self.push(at, Event::Look { host, qp });
        }
    }
}
