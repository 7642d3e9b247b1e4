//! What a seed stands for: the network, the QPs, the work, and the faults with their times.

use crate::flush::Flush;
use crate::memory::{key_on, KEY};
use crate::mutants::Mutant;
use crate::own::{self, OwnError};
use crate::phys::Kind;
use crate::rng::{mix, Rng};
use unbroken_types::{Mtu, SendFlags, SendOpcode, PSN_MASK};

/// NICs of a host, at most.
pub const MAX_RAILS: usize = 3;

/// Something that happens to the world.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A NIC dies: its host gets a device event.
    Dead {
        /// Host.
        host: usize,
        /// NIC.
        nic: usize,
    },
    /// A port goes down: its host gets a port event.
    Down {
        /// Host.
        host: usize,
        /// NIC.
        nic: usize,
    },
    /// A cable is cut, perhaps one way only: nobody is told.
    Cut {
        /// Host.
        host: usize,
        /// NIC.
        nic: usize,
        /// What the NIC sends is lost.
        tx: bool,
        /// What is sent to it is lost.
        rx: bool,
    },
    /// The NIC and its cable are well again.
    Heal {
        /// Host.
        host: usize,
        /// NIC.
        nic: usize,
    },
    /// An end suspects its path without cause.
    Suspect {
        /// Host.
        host: usize,
        /// Logical QP.
        qp: usize,
    },
    /// An end is told to move by plan.
    Plan {
        /// Host.
        host: usize,
        /// Logical QP.
        qp: usize,
        /// Back to its first path; else to any other than that it is on.
        home: bool,
    },
    /// A NIC loses so many of a million packets, on their way out and in.
    Grey {
        /// Host.
        host: usize,
        /// NIC.
        nic: usize,
        /// How many.
        loss_ppm: u32,
    },
    /// A host's process is stopped for a while: it neither works nor answers.
    Stop {
        /// Host.
        host: usize,
        /// How long.
        for_us: u64,
    },
    /// A host's process is killed.
    Crash {
        /// Host.
        host: usize,
        /// Another process takes its address, and answers what is meant for the dead one.
        restarts: bool,
    },
}

/// One message of the work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Msg {
    /// What to do.
    pub opcode: SendOpcode,
    /// How.
    pub flags: SendFlags,
    /// Bytes.
    pub len: u32,
}

/// The work of one logical QP.
#[derive(Clone, Debug)]
pub struct QpPlan {
    /// NIC of the default path, at both hosts.
    pub nic: usize,
    /// Messages that each end sends.
    pub msgs: [Vec<Msg>; 2],
    /// Receives that each end keeps posted.
    pub credit: [u64; 2],
    /// Longest pause between two posts of the application.
    pub pause_us: u64,
    /// Some messages must not be replayed: those marked so, and atomics.
    pub no_replay: bool,
    /// Each end takes its receives from a shared queue.
    pub srq: [bool; 2],
}

/// A schedule in which nothing happens but that packets are lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grey {
    /// All NICs lose as much.
    pub all: bool,
}

/// A whole schedule.
#[derive(Clone, Debug)]
pub struct Plan {
    /// NICs of each host.
    pub rails: usize,
    /// Whether NICs of different rails reach each other.
    pub cross: bool,
    /// One-way latency.
    pub latency_us: u64,
    /// Random addition to it, which reorders.
    pub jitter_us: u64,
    /// Data packets lost.
    pub loss_ppm: u32,
    /// Data packets repeated.
    pub dup_ppm: u32,
    /// Data packets of which a copy comes late.
    pub late_ppm: u32,
    /// How late.
    pub late_us: u64,
    /// Control messages lost, repeated late.
    pub ctrl_loss_ppm: u32,
    /// See `ctrl_loss_ppm`.
    pub ctrl_late_ppm: u32,
    /// Which hosts know selective retransmission.
    pub selective: [bool; 2],
    /// Which hosts have devices with plain verbs only.
    pub plain: [bool; 2],
    /// Path MTU of each host.
    pub mtu: [Mtu; 2],
    /// Added to all PSNs: those of one epoch wrap around soon after its beginning.
    pub psn_shift: u32,
    /// Local ACK timeout code and retries of the physical QPs.
    pub timeout: u8,
    /// See `timeout`.
    pub retry_cnt: u8,
    /// The logical QPs.
    pub qps: Vec<QpPlan>,
    /// The longest message.
    pub max_len: u32,
    /// The faults, in order of time.
    pub faults: Vec<(u64, Fault)>,
    /// When all faults are healed.
    pub healed_us: u64,
    /// A host is killed.
    pub crash: bool,
    /// The directory says that it is no more.
    pub crash_is_told: bool,
    /// QPs go home by themselves, when their first paths are steady.
    pub goes_home: bool,
    /// What is wrong with the work of a QP.
    pub own: Option<OwnError>,
    /// Nothing happens but that packets are lost.
    pub grey: Option<Grey>,
    /// How plain devices flush; none: each life in its own way.
    pub flush: Option<Flush>,
}

impl Plan {
    /// The schedule of a seed.
    pub fn new(seed: u64) -> Plan {
        let rng = &mut Rng::new(seed);
        let rails = rng.pick(&[2, 2, 3]);
        let latency_us = rng.pick(&[2, 5, 5, 10, 30, 300, 2_000]);
        let dirty = rng.below(3);
        let lossy = |rng: &mut Rng, high: u64| if dirty == 0 { 0 } else { rng.below(high) as u32 };
        let mtu = rng.pick(&[Mtu::B256, Mtu::B256, Mtu::B512]);
        let other_mtu = if rng.one_in(8) { Mtu::B1024 } else { mtu };
        let max_len = mtu.bytes() as u32 * rng.range(1, 5) as u32;
        // A round trip, queues and jitter fit into the ACK timeout (4.096 µs · 2^n).
        let timeout = match latency_us {
            0..=30 => rng.range(6, 9),
            31..=300 => rng.range(9, 11),
            _ => rng.range(12, 13),
        } as u8;
        // Now and then a transport so patient that only the stall detector notices a dead path in
        // time.
        let patient = rng.one_in(6);
        let (timeout, retry_cnt) =
            if patient { (14, 7) } else { (timeout, rng.pick(&[1, 2, 3, 7])) };
        let crash = rng.one_in(16);
        let mut plan = Plan {
            rails,
            cross: rng.one_in(2),
            latency_us,
            jitter_us: if rng.one_in(2) { 0 } else { rng.below(latency_us * 2) },
            loss_ppm: lossy(rng, 30_000),
            dup_ppm: lossy(rng, 30_000),
            late_ppm: lossy(rng, 60_000),
            late_us: rng.pick(&[200, 2_000, 20_000, 60_000]),
            ctrl_loss_ppm: lossy(rng, 300_000),
            ctrl_late_ppm: lossy(rng, 300_000),
            selective: rng.pick(&[
                [true; 2],
                [true; 2],
                [true; 2],
                [false; 2],
                [true, false],
                [false, true],
            ]),
            plain: [false; 2],
            mtu: [mtu, other_mtu],
            psn_shift: 0,
            timeout,
            retry_cnt,
            qps: Vec::new(),
            max_len,
            faults: Vec::new(),
            healed_us: 0,
            crash,
            crash_is_told: rng.one_in(2),
            goes_home: false,
            own: None,
            grey: None,
            flush: None,
        };
        let no_replay = rng.one_in(8);
        for _ in 0..rng.range(1, 3) {
            let qp = plan.draw_qp(rng, no_replay);
            plan.qps.push(qp);
        }
        plan.draw_faults(rng);
        for qp in &mut plan.qps {
            qp.srq = [rng.one_in(2), rng.one_in(2)];
        }
        let wrapping = psn_of(rng.pick(&[0, 0, 1, 2]), rng.below(2) as usize);
        plan.psn_shift = PSN_MASK.wrapping_sub(wrapping + rng.below(30) as u32) & PSN_MASK;
        plan.plain =
            rng.pick(&[[false; 2], [false; 2], [true; 2], [true; 2], [true, false], [false, true]]);
        own::draw(&mut plan, rng);
        if rng.one_in(8) {
            plan.draw_flapping(rng);
        } else if plan.own.is_none() && rng.one_in(12) {
            plan.draw_grey(rng);
        }
        plan
    }

    /// A NIC loses much of what it carries, or all do, while work goes on for some seconds. The
    /// transports wait as long as programs let them, so that one has the time to notice.
    fn draw_grey(&mut self, rng: &mut Rng) {
        self.grey = Some(Grey { all: rng.one_in(4) });
        (self.goes_home, self.crash) = (true, false);
        (self.timeout, self.retry_cnt) = (rng.pick(&[12, 13, 14]), 7);
        (self.loss_ppm, self.late_ppm, self.dup_ppm, self.jitter_us) = (0, 0, 0, 0);
        (self.ctrl_loss_ppm, self.ctrl_late_ppm) = (0, 0);
        let (host, nic) = (rng.below(2) as usize, self.qps[0].nic);
        let loss_ppm = rng.pick(&[50_000, 300_000, 600_000]);
        // Something has come through before: else the ends may not fit.
        let at_us = 250_000 + rng.below(50_000);
        let all = self.grey.is_some_and(|grey| grey.all);
        let nics = (0..self.rails).filter(|other| all || *other == nic);
        self.faults = nics.map(|nic| (at_us, Fault::Grey { host, nic, loss_ppm })).collect();
        self.healed_us = at_us + rng.range(3_000_000, 6_000_000);
        for nic in 0..self.rails {
            self.faults.push((self.healed_us, Fault::Heal { host, nic }));
        }
        for qp in &mut self.qps {
            qp.pause_us = rng.pick(&[100_000, 200_000]);
        }
    }

    /// Whether nothing happens but that a NIC of full devices loses much, where no QP fails.
    pub fn only_grey(&self) -> bool {
        self.grey.is_some_and(|grey| !grey.all) && self.plain == [false; 2]
    }

    /// A port goes down and comes back, once or again and again; then there is time to go home.
    fn draw_flapping(&mut self, rng: &mut Rng) {
        self.goes_home = true;
        let (host, nic) = (rng.below(2) as usize, self.qps[0].nic);
        let period_us = rng.range(60_000, 300_000);
        let mut at = rng.below(5_000);
        for _ in 0..rng.pick(&[1, 1, 2, 6, 12]) {
            self.faults.push((at, Fault::Down { host, nic }));
            self.faults.push((at + period_us / 2, Fault::Heal { host, nic }));
            at += period_us;
        }
        self.healed_us = self.healed_us.max(at) + rng.range(1_000_000, 3_000_000);
    }

    /// Whether the memory of both hosts has other keys on each NIC.
    pub(crate) fn own_keys(&self) -> bool {
        self.plain == [true; 2]
    }

    /// All faults, and when each happens is not said.
    fn all_faults(&self) -> impl Iterator<Item = Fault> + '_ {
        self.faults.iter().chain(self.own.iter().flat_map(|own| &own.amid)).map(|&(_, fault)| fault)
    }

    /// What is wrong with the work of this QP.
    pub fn own_of(&self, qp: usize) -> Option<&OwnError> {
        self.own.as_ref().filter(|own| own.qp == qp)
    }

    /// How often an end tries again where the peer has no receive.
    pub fn rnr_retry(&self, host: usize, qp: usize) -> u8 {
        let limited = |own: &&OwnError| own.host == host && own.mistake == own::Mistake::NoReceive;
        self.own_of(qp).filter(limited).map_or(7, |own| own.rnr_retry)
    }

    fn draw_qp(&self, rng: &mut Rng, no_replay: bool) -> QpPlan {
        let count = rng.range(4, 24);
        let mut msgs = [Vec::new(), Vec::new()];
        for list in &mut msgs {
            let count = if rng.one_in(4) { 0 } else { count };
            let signal_every = rng.range(1, 4);
            for k in 0..count {
                use SendOpcode::{CmpSwap, FetchAdd, Read, Send, SendImm, Write, WriteImm};
                // Atomics are never replayed: they belong where a QP may have to fail instead of
                // moving.
                let opcode = match no_replay && rng.one_in(6) {
                    true => rng.pick(&[CmpSwap, FetchAdd]),
                    false => rng.pick(&[Send, Send, SendImm, Write, Write, WriteImm, Read]),
                };
                let mut flags = SendFlags::default();
                let mut add =
                    |f: SendFlags, yes: bool| flags = if yes { flags.with(f) } else { flags };
                add(SendFlags::SIGNALED, k + 1 == count || k % 6 == 5 || rng.one_in(signal_every));
                add(SendFlags::FENCE, rng.one_in(10));
                add(SendFlags::SOLICITED, rng.one_in(10));
                add(SendFlags::NO_REPLAY, no_replay && rng.one_in(3));
                let len = match rng.below(8) {
                    0 => 0,
                    1 => rng.below(u64::from(self.max_len)) as u32,
                    2 => self.max_len,
                    _ => rng.below(u64::from(self.max_len.min(400))) as u32,
                };
                let len = if opcode.is_atomic() { 8 } else { len };
                let inline = opcode != Read && len <= 32 && !no_replay && rng.one_in(2);
                let flags = if inline { flags.with(SendFlags::INLINE) } else { flags };
                list.push(Msg { opcode, flags, len });
            }
        }
        QpPlan {
            nic: rng.below(self.rails as u64) as usize,
            msgs,
            credit: [rng.range(1, 6), rng.range(1, 6)],
            pause_us: rng.pick(&[5, 50, 500, 3_000]) * if self.latency_us > 1_000 { 5 } else { 1 },
            no_replay,
            srq: [false; 2],
        }
    }

    fn draw_faults(&mut self, rng: &mut Rng) {
        let span_us =
            rng.pick(&[200, 2_000, 20_000, 150_000]) * if self.latency_us > 100 { 10 } else { 1 };
        for _ in 0..rng.below(7) {
            let at = rng.below(span_us);
            let (host, nic) = (rng.below(2) as usize, rng.below(self.rails as u64) as usize);
            let qp = rng.below(self.qps.len() as u64) as usize;
            match rng.below(10) {
                0..=1 => self.faults.push((at, Fault::Dead { host, nic })),
                2 => self.faults.push((at, Fault::Down { host, nic })),
                3..=4 => {
                    let (tx, rx) = rng.pick(&[(true, true), (true, false), (false, true)]);
                    self.faults.push((at, Fault::Cut { host, nic, tx, rx }));
                }
                5..=7 => self.faults.push((at, Fault::Suspect { host, qp })),
                _ => {
                    // Both ends at once, or nearly: before the one can hear of the other.
                    self.faults.push((at, Fault::Suspect { host, qp }));
                    let apart = rng.below(self.latency_us + 1);
                    self.faults.push((at + apart, Fault::Suspect { host: 1 - host, qp }));
                    continue;
                }
            }
            if rng.one_in(2) {
                self.faults.push((at + rng.below(span_us), Fault::Heal { host, nic }));
            }
        }
        let plans = if rng.one_in(2) { rng.range(1, 5) } else { 0 };
        for _ in 0..plans {
            let (at, host) = (rng.below(2 * span_us), rng.below(2) as usize);
            let qp = rng.below(self.qps.len() as u64) as usize;
            self.faults.push((at, Fault::Plan { host, qp, home: rng.one_in(3) }));
            if rng.one_in(3) {
                // Both at once, perhaps with other wishes.
                let apart = rng.below(self.latency_us + 1);
                self.faults
                    .push((at + apart, Fault::Plan { host: 1 - host, qp, home: rng.one_in(2) }));
            }
        }
        if rng.one_in(8) {
            let (host, for_us) =
                (rng.below(2) as usize, rng.pick(&[2_000, 40_000, 300_000, 1_500_000]));
            self.faults.push((rng.below(span_us), Fault::Stop { host, for_us }));
        }
        if self.crash {
            let (host, restarts) = (rng.below(2) as usize, rng.one_in(2));
            self.faults.push((rng.below(span_us), Fault::Crash { host, restarts }));
        }
        self.faults.sort_by_key(|&(at, _)| at);
        let last = self.faults.last().map_or(0, |f| f.0);
        self.healed_us = last + rng.below(400_000);
        for host in 0..2 {
            for nic in 0..self.rails {
                self.faults.push((self.healed_us, Fault::Heal { host, nic }));
            }
        }
    }

    /// How a life of a host's QPs is made, from its NIC to one of the peer's.
    pub(crate) fn kind(
        &self,
        (host, qp): (usize, usize),
        life: u64,
        (nic, remote): (usize, usize),
        mutant: Mutant,
    ) -> Kind {
        let translates = self.own_keys() && mutant != Mutant::KeysNotTranslated;
        let key = |nic| if translates { key_on(self.qps[qp].nic, nic) } else { KEY };
        // As it comes: both orders, and QPs that stop at once and late.
        let chance = psn_of(life + 1, host) ^ self.psn_shift;
        let seed = mix(u64::from(chance) << 8 | qp as u64);
        let drawn = Flush::ALL[(seed % Flush::ALL.len() as u64) as usize];
        Kind {
            flush: self.flush.unwrap_or(drawn),
            seed,
            plain: self.plain[host],
            recvs_first: chance & 1 == 0,
            slow: chance >> 1 & 3,
            events_first: chance & 8 == 0,
            local_key: key(nic),
            remote_key: key(remote),
            mutation: mutant.in_journal(),
        }
    }

    /// The first PSN that a host sends in an epoch.
    pub fn psn_of(&self, epoch: u64, host: usize) -> u32 {
        psn_of(epoch, host).wrapping_add(self.psn_shift) & PSN_MASK
    }

    /// Whether nothing in the plan touches the logical QP: it must not notice that others fail.
    pub fn spares(&self, qp: usize) -> bool {
        // An end that hears no more of its peer gets a fresh life, in vain.
        let cut_off = self.own_of(qp).is_some_and(|own| !own.ends_peer());
        self.spares_path(qp)
            && !cut_off
            && !self.all_faults().any(|f| matches!(f, Fault::Stop { .. }))
    }

    /// Whether the QP is moved by plan alone, and nothing else in the plan touches any path.
    pub fn only_planned(&self, qp: usize) -> bool {
        let clean = self.loss_ppm == 0 && self.jitter_us == 0 && self.late_ppm == 0 && !self.crash;
        clean
            && self.all_faults().all(|f| match f {
                Fault::Suspect { qp: other, .. } => other != qp,
                Fault::Heal { .. } | Fault::Plan { .. } => true,
                _ => false,
            })
    }

    /// Whether nothing in the plan touches its path: it must not leave it, though an end of it may
    /// be stopped for a while.
    pub fn spares_path(&self, qp: usize) -> bool {
        // Reordering may use up the retries of a transport that has few.
        let clean = self.loss_ppm == 0
            && self.jitter_us == 0
            && self.ctrl_loss_ppm == 0
            && self.late_ppm == 0
            && !self.crash;
        let default = self.qps[qp].nic;
        clean
            && self.all_faults().all(|f| match f {
                Fault::Dead { nic, .. } | Fault::Down { nic, .. } | Fault::Cut { nic, .. } => {
                    nic != default
                }
                Fault::Suspect { qp: other, .. } | Fault::Plan { qp: other, .. } => other != qp,
                Fault::Heal { .. } | Fault::Stop { .. } => true,
                Fault::Crash { .. } | Fault::Grey { .. } => false,
            })
    }
}

/// First PSNs that are far apart for neighbouring epochs (multiples of the golden ratio) and for
/// the two hosts. The product draws them by chance; here some of them must be about to wrap.
fn psn_of(epoch: u64, host: usize) -> u32 {
    (epoch.wrapping_mul(0x9e_3779) as u32).wrapping_add(host as u32 * 0x80_0000) & PSN_MASK
}
