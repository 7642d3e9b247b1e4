//! Whether paths and port pairs live, and what follows for the QPs on them: the progress of QPs is
//! looked at, questions are asked, probes leave and are answered, verdicts are given.

use super::*;
use unbroken_failover_protocol::Reason;

/// How often QPs whose port pairs change, or that are displaced, are looked at.
const TEND_US: u64 = 50_000;
/// How often port pairs that are not in use are asked whether they live.
const ASK_PAIRS_US: u64 = 1_000_000;

/// What QPs have sent on ways since the last look: packets acknowledged, and sent again.
#[derive(Default)]
struct Sent(HashMap<(u64, PortPath), (Arc<Peer>, u64, u64)>);

impl Sent {
    fn add(&mut self, peer: &Arc<Peer>, port_path: PortPath, acked: u64, again: u64) {
        let new = || (peer.clone(), 0, 0);
        let (_, all_acked, all_again) =
            self.0.entry((peer.incarnation, port_path)).or_insert_with(new);
        *all_acked += acked;
        *all_again += again;
    }
}

impl Worker {
    pub(super) fn probe_answered(&mut self, at: LocalPort, message: &Message) {
        let Body::ProbeAck(probe) = message.body else { return };
        if message.to.incarnation != self.core.incarnation {
            return;
        }
        let Some(peer) = self.core.peers.known(message.from.incarnation) else { return };
        let Some(remote) = peer.index_of(message.from.gid) else { return };
        let port_path =
            PortPath { path: SlotPath { local: at.nic as u8, remote }, port_pair: at.pair };
        peer.health().handle_answer(self.clock_us(), port_path, probe.sequence);
        self.spread_verdicts(&peer);
    }

    /// Looks at the progress of all QPs with sends outstanding: what moves shows that its path
    /// lives, and what does not asks its path.
    pub(super) fn look(&mut self, clock_us: u64) {
        let core = self.core.clone();
        let mut silent = Vec::new();
        let mut carried: HashMap<(u64, PortPath), Arc<Peer>> = HashMap::new();
        let mut sent = Sent::default();
        let busy = core.qps.take_busy().into_iter().filter_map(|id| core.qps.get(id));
        // Those first that show that their path lives.
        let (moved, others): (Vec<_>, Vec<_>) =
            busy.partition(|qp| qp.gate_now().is_some_and(|g| link::has_moved(&g)));
        for qp in moved.into_iter().chain(others) {
            let Some(mut g) = qp.gate_now() else {
                core.qps.add_busy(qp.id());
                continue;
            };
            let path = g.link.as_ref().map(|l| l.peer().incarnation).zip(port_pairs::port_path(&g));
            let lives = path.is_some_and(|path| carried.contains_key(&path));
            let progress = link::progress(&g, clock_us, lives);
            // Between two paths it is not the physical QP that has what is outstanding.
            let switching = g.link.as_ref().is_some_and(|l| l.executor().switching());
            match progress.outstanding_sends == 0 && !switching {
                true if qp.set_idle(&g) => {}
                _ => core.qps.add_busy(qp.id()),
            }
            let Some((peer, path, look)) = link::look(&mut g, clock_us, &progress) else {
                continue;
            };
            let port_path = PortPath { path, port_pair: port_pairs::pair_of(g.port) };
            // What has moved since the last look may have moved on the port pair before.
            let elsewhere = g.looked_at.replace(port_path) != Some(port_path);
            let again = link::sent_since(&mut g, elsewhere);
            drop(g);
            if let Some((acked, again)) = again.filter(|counts| *counts != (0, 0)) {
                sent.add(&peer, port_path, acked, again);
            }
            let counts = again.is_some();
            if look.moved {
                if !elsewhere {
                    carried.entry((peer.incarnation, port_path)).or_insert(peer);
                }
            } else if let Some(since_us) =
                look.silent_since_us.filter(|at| at + ASK_AFTER_US <= clock_us)
            {
                silent.push((qp, peer, port_path, since_us, progress.waiting_rnr, counts));
            }
        }
        for ((_, port_path), peer) in &carried {
            peer.health().carried(clock_us, *port_path);
        }
        carried.into_values().for_each(|peer| self.spread_verdicts(&peer));
        for (qp, peer, port_path, since_us, waits_for_receive, counts) in silent {
            let answer = peer.health().ask(clock_us, port_path, since_us);
            if answer == Answer::Alive && !waits_for_receive && !counts {
                sent.add(&peer, port_path, 0, 1);
            }
            let dead = answer == Answer::Dead;
            let Some(mut g) = dead.then(|| qp.gate_now()).flatten() else { continue };
            if port_pairs::port_path(&g) == Some(port_path)
                && !port_pairs::leave(&qp, &mut g, clock_us, port_path.port_pair)
            {
                link::suspect(&qp, &mut g, Reason::Stall);
            }
        }
        for ((_, port_path), (peer, acked, again)) in sent.0 {
            peer.health().resent(clock_us, port_path, acked, again);
        }
    }

    /// Sends the probes that are due, and gives the verdicts that are.
    pub(super) fn ask_paths(&mut self) {
        let core = self.core.clone();
        for peer in core.peers.all() {
            let due = peer.health().poll_timeout().is_some_and(|at| at <= self.clock_us());
            if due {
                // An answer may be there that nobody has had the time to fetch, or that waits
                // behind others; or something has moved.
                core.nics.drain();
                self.receive();
                let clock_us = self.clock_us();
                self.look(clock_us);
                peer.health().handle_timeout(clock_us);
            }
            self.send_probes(&peer);
            self.spread_verdicts(&peer);
        }
    }

    pub(super) fn send_probes(&mut self, peer: &Arc<Peer>) {
        let (core, mut refreshed) = (self.core.clone(), false);
        loop {
            let clock_us = self.clock_us();
            let Some((PortPath { path, port_pair: pair }, sequence)) =
                peer.health().poll_probe(clock_us)
            else {
                return;
            };
            // A NIC that died and was healed has a new endpoint; a process that was killed has none
            // any more.
            if !std::mem::replace(&mut refreshed, true) {
                peer.refresh(core.directory.as_ref());
                if peer.has_ended() {
                    return self.peer_gone(peer);
                }
            }
            let to = peer.port(path.remote, pair).filter(|to| to.qpn != 0);
            let (Some(nic), Some(to)) = (peer.nic(path.remote), to) else { continue };
            let local = usize::from(path.local);
            let of = |gid, incarnation| Endpoint { gid, qpn: 0, incarnation, connection: 0 };
            let message = Message {
                from: of(core.nics.gid(local), core.incarnation),
                to: of(nic.gid, peer.incarnation),
                body: Body::Probe(Probe { sequence, sent_us: clock_us }),
            };
            core.control.send_from(&core.nics, LocalPort { nic: local, pair }, to, &message);
        }
    }

    /// Tells the QPs what has been found out of their paths.
    pub(super) fn spread_verdicts(&mut self, peer: &Arc<Peer>) {
        let (core, clock_us) = (self.core.clone(), self.clock_us());
        let _batch = core.control.batch();
        loop {
            let Some((port_path, verdict)) = peer.health().poll_verdict() else { return };
            if verdict == Verdict::Grey {
                core.qps.note_displaced();
            }
            self.qps_of(peer, |qp, g| link::verdict(qp, g, clock_us, port_path, verdict));
            self.tend_at_us = 0;
        }
    }

    /// Gives QPs other port pairs where something has changed; now and then those that are not in
    /// use are asked whether they live.
    pub(super) fn tend_port_pairs(&mut self, clock_us: u64) {
        if clock_us < self.tend_at_us || !self.core.nics.several_ports() {
            return;
        }
        let asks = clock_us >= self.ask_pairs_at_us;
        if asks {
            self.ask_pairs_at_us = clock_us + ASK_PAIRS_US;
        }
        let (mut changed, mut displaced) = (false, false);
        for qp in self.core.qps.all() {
            let Some(mut g) = qp.gate_now() else { continue };
            if g.link.is_none() {
                continue;
            }
            changed |= port_pairs::tend(&qp, &mut g, clock_us);
            displaced |= port_pairs::is_displaced(&qp, &mut g, clock_us);
            // Failback looks after that.
            port_pairs::lacks_pair(&qp, &mut g, clock_us);
            if asks {
                port_pairs::ask_others(&qp, &mut g, clock_us);
            }
        }
        let pause_us = if changed || displaced { TEND_US } else { ASK_PAIRS_US };
        self.tend_at_us = (clock_us + pause_us).min(self.ask_pairs_at_us);
    }
}
