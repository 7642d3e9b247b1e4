//! The network: which packets arrive, when, and how often.

use crate::plan::{Fault, Plan, MAX_RAILS};
use crate::rng::Rng;

/// The state of a NIC and its cable.
#[derive(Clone, Copy, Default, Debug)]
struct Port {
    dead: bool,
    down: bool,
    tx_cut: bool,
    rx_cut: bool,
    /// Lost of a million packets, on their way out and in.
    loss_ppm: u32,
}

/// The network between the two hosts.
#[derive(Debug)]
pub struct Net {
    ports: [[Port; MAX_RAILS]; 2],
    cross: bool,
    latency_us: u64,
    jitter_us: u64,
}

/// How a kind of packet is treated.
#[derive(Clone, Copy, Debug)]
pub struct Conditions {
    /// Lost, of a million.
    pub loss_ppm: u32,
    /// Repeated at once.
    pub dup_ppm: u32,
    /// A copy comes late, or the packet itself.
    pub late_ppm: u32,
    /// How late at most.
    pub late_us: u64,
}

impl Net {
    /// The network of a plan, all well.
    pub fn new(plan: &Plan) -> Net {
        Net {
            ports: Default::default(),
            cross: plan.cross,
            latency_us: plan.latency_us,
            jitter_us: plan.jitter_us,
        }
    }

    /// Applies a fault to NICs and cables.
    pub fn apply(&mut self, fault: Fault) {
        match fault {
            Fault::Dead { host, nic } => self.ports[host][nic].dead = true,
            Fault::Down { host, nic } => self.ports[host][nic].down = true,
            Fault::Cut { host, nic, tx, rx } => {
                let p = &mut self.ports[host][nic];
                (p.tx_cut, p.rx_cut) = (p.tx_cut || tx, p.rx_cut || rx);
            }
            Fault::Grey { host, nic, loss_ppm } => self.ports[host][nic].loss_ppm = loss_ppm,
            Fault::Heal { host, nic } => self.ports[host][nic] = Port::default(),
            Fault::Suspect { .. }
            | Fault::Plan { .. }
            | Fault::Stop { .. }
            | Fault::Crash { .. } => {}
        }
    }

    /// Whether the host's own NIC works, as far as the host is told.
    pub fn nic_works(&self, host: usize, nic: usize) -> bool {
        let p = self.ports[host][nic];
        !p.dead && !p.down
    }

    /// Whether the host's own NIC is gone altogether.
    pub fn nic_is_gone(&self, host: usize, nic: usize) -> bool {
        self.ports[host][nic].dead
    }

    /// Whether a packet that is sent now would arrive.
    pub fn carries(&self, host: usize, nic: usize, remote: usize) -> bool {
        let (tx, rx) = (self.ports[host][nic], self.ports[1 - host][remote]);
        self.connected(nic, remote)
            && self.nic_works(host, nic)
            && self.nic_works(1 - host, remote)
            && !tx.tx_cut
            && !rx.rx_cut
    }

    /// Whether the two NICs are connected at all.
    pub fn connected(&self, a: usize, b: usize) -> bool {
        self.cross || a == b
    }

    /// The times at which a packet that is sent at `now_us` arrives: none, one or two.
    pub fn arrivals(
        &self,
        rng: &mut Rng,
        now_us: u64,
        (host, nic, remote): (usize, usize, usize),
        w: Conditions,
    ) -> Arrivals {
        let mut out = Arrivals::default();
        if !self.carries(host, nic, remote) || rng.ppm(w.loss_ppm) {
            return out;
        }
        let ends = [self.ports[host][nic].loss_ppm, self.ports[1 - host][remote].loss_ppm];
        if ends.into_iter().any(|loss_ppm| loss_ppm > 0 && rng.ppm(loss_ppm)) {
            return out;
        }
        let at = now_us + self.latency_us + rng.below(self.jitter_us + 1);
        if rng.ppm(w.late_ppm) {
            out.push(at + rng.below(w.late_us + 1));
            if rng.one_in(2) {
                out.push(at);
            }
        } else {
            out.push(at);
            if rng.ppm(w.dup_ppm) {
                out.push(at + rng.below(20));
            }
        }
        out
    }
}

/// Up to two times.
#[derive(Default, Debug)]
pub struct Arrivals([Option<u64>; 2]);

impl Arrivals {
    fn push(&mut self, at: u64) {
        let free = usize::from(self.0[0].is_some());
        self.0[free] = Some(at);
    }

    /// The times.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().flatten().copied()
    }
}
