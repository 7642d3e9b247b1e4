//! The thread that looks after a process's logical QPs: device events, control messages, stalls,
//! deadlines, the status socket.
//!
//! It sleeps in one poll over its queue, the control channel and the status socket, until the next
//! deadline. Nothing that it does is needed while all paths work; it wakes some times a second
//! then, to see that what is outstanding moves.

mod deadlines;
mod devices;
mod paths;
#[cfg(test)]
mod tests;

use crate::control_endpoint::LocalPort;
use crate::core::Core;
use crate::datagram;
use crate::due::Due;
use crate::failback::Failback;
use crate::inbound;
use crate::link;
use crate::moved_qps::{self, MovedQps};
use crate::peer::Peer;
use crate::port_pairs;
use crate::qp::{backup, Gate, Qp};
use crate::qps::LogicalId;
use crate::seekers::Seekers;
use crate::worker_queue::Job;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::collections::HashMap;
use std::sync::Arc;
use unbroken_events::{sdr_status, BackupsStatus, ProcessStatus, StatusServer};
use unbroken_failover_protocol::health::{Answer, Verdict};
use unbroken_failover_protocol::message::{Body, KeyName, Probe};
use unbroken_failover_protocol::repeats::Repeats;
use unbroken_failover_protocol::silence::ASK_AFTER_US;
use unbroken_failover_protocol::{Endpoint, Liveness, Message, PeerWord, PortPath, SlotPath};
use unbroken_runtime::now_us;

/// How often what is outstanding is looked at.
const LOOK_US: u64 = 8_000;

/// A thread that wakes this much later than it wanted was kept from its core.
const LATE_US: u64 = 2_000;

/// While a switch is young the worker looks for messages this often, in its own thread: on a
/// machine whose cores are all taken, a NIC's thread may leave the NIC to a polling thread that
/// does not run just now.
const YOUNG_TICK_US: u64 = 100;
/// For so long a switch is young.
const YOUNG_US: u64 = 20_000;
/// A control endpoint that has failed is mended so long afterwards: each datagram may fail again.
const MEND_AFTER_US: u64 = 50_000;
/// ... and if its device does not take that, again after this.
const MEND_AGAIN_US: u64 = 1_000_000;
/// After jobs the worker looks so soon for others: programs connect QPs one after the other.
const LINGER_US: u64 = 1_000;

/// How often a peer that has not said by which keys its memory is known is asked again.
const KEYS_AGAIN_US: u64 = 10_000;

struct Worker {
    core: Arc<Core<Qp>>,
    /// QPs under a switch, and when to look at them.
    watched: Due<LogicalId>,
    /// QPs whose peer has not shown all its NICs yet, when to look for them, and how often that was
    /// done.
    connecting: Due<LogicalId>,
    connect_tries: HashMap<LogicalId, u32>,
    seekers: Seekers,
    /// Ports whose control endpoints have failed, and when to mend them.
    ailing: Due<LocalPort>,
    /// What is to be done with QPs that their programs change just now.
    deferred: Vec<Job>,
    /// QPs whose messages wait until the directory has been read.
    unread: Vec<LogicalId>,
    /// A switch that began lately is young until then.
    young_until_us: u64,
    /// There were jobs in the last round: see
    /// [`WorkerQueue::linger`](crate::worker_queue::WorkerQueue::linger).
    lingers: bool,
    /// On the worker's own clock.
    look_at_us: u64,
    /// How long this thread was kept from its core so far. Silence and probes are timed by a clock
    /// that stands still meanwhile ([`Worker::clock_us`]): a starved observer must not take its own
    /// sleep for the silence of a path.
    lost_us: u64,
    status: Option<StatusServer>,
    /// Somebody asks for the status; events of the log have waited for long enough. As of the last
    /// sleep.
    asked: bool,
    rang: bool,
    moved_qps: MovedQps,
    failback: Failback,
    /// Failures of QPs by their NIC.
    repeats: HashMap<usize, Repeats>,
    /// When QPs are looked at for their port pairs, and the pairs that are not in use are asked, on
    /// the worker's own clock.
    tend_at_us: u64,
    ask_pairs_at_us: u64,
    /// When peers are asked again for keys that they have not told, on the worker's own clock.
    keys_at_us: u64,
}

/// Asks a peer over a path by which keys these regions are known.
fn ask_for(core: &Core<Qp>, peer: &Peer, path: SlotPath, wanted: &[(u8, u32)]) {
    let (Some(there), Some(to)) = (peer.nic(path.remote), peer.control(path.remote)) else {
        return;
    };
    let of = |gid, incarnation| Endpoint { gid, qpn: 0, incarnation, connection: 0 };
    let (from, at) =
        (of(core.nics.gid(path.local.into()), core.incarnation), of(there.gid, peer.incarnation));
    for (nic, rkey) in wanted {
        let body = Body::AskKey(KeyName { nic: *nic, rkey: *rkey });
        core.control.send(&core.nics, path.local.into(), to, &Message { from, to: at, body });
    }
}

/// Begins to protect the QPs of a process, unless that is done: every NIC is opened, and the worker
/// started. In the caller's thread and not in the background: a program may overwrite the C
/// library's functions for memory as soon as this returns (`spawn` in softnic's `background`).
pub(crate) fn begin(core: &Arc<Core<Qp>>) {
    core.worker.get_or_init(|| {
        open_all(core);
        match spawn(core) {
            Ok(()) => {
                backup::begin(core);
                true
            }
            Err(e) => {
                core.events.complain("no thread for failover: queue pairs are not protected", &e);
                false
            }
        }
    });
}

/// Opens every NIC, so that it can be a backup, and tells the directory. The program waits for it:
/// see [`unbroken_process::spawn`]. Those whose verbs of control take long are opened at the same
/// time, so that it waits as long as for one.
fn open_all(core: &Arc<Core<Qp>>) {
    let open = |core: &Core<Qp>, nic| {
        if let Err(e) = core.nics.open_endpoint(nic) {
            // A NIC that is dead now is opened when it is healed.
            core.events.complain(&format!("{} cannot be a backup", core.nics.name(nic)), &e);
        }
    };
    let all = (0..core.nics.count()).filter(|_| core.settings.failover);
    let (slow, quick): (Vec<_>, _) = all.partition(|nic| core.nics.capabilities(*nic).slow_control);
    quick.into_iter().for_each(|nic: usize| open(core, nic));
    unbroken_process::at_once(slow.into_iter().map(|nic| {
        let core = core.clone();
        move || open(&core, nic)
    }));
    core.publish_process();
}

/// Starts the worker's thread.
fn spawn(core: &Arc<Core<Qp>>) -> std::io::Result<()> {
    let status = match StatusServer::bind(&core.runtime) {
        Ok(s) => Some(s),
        Err(e) => {
            core.events.complain("no status socket", &e);
            None
        }
    };
    let mut worker = Worker::new(core, status);
    let core = core.clone();
    unbroken_process::spawn("unb-shift", move || {
        // Queue pairs between two paths wait for this thread, while the programs' threads poll for
        // what they do not get.
        unbroken_process::ask_for_precedence();
        while !core.jobs.stopped() {
            // A defect in one round must not leave all QPs without anybody who looks after them.
            let round = std::panic::AssertUnwindSafe(|| {
                worker.wait();
                worker.work();
            });
            if std::panic::catch_unwind(round).is_err() {
                core.events.complain("failover", &"a round of work ended in a panic");
            }
        }
    })
    .map(drop)
}

impl Worker {
    fn new(core: &Arc<Core<Qp>>, status: Option<StatusServer>) -> Worker {
        Worker {
            core: core.clone(),
            watched: Due::default(),
            connecting: Due::default(),
            connect_tries: HashMap::new(),
            seekers: Seekers::default(),
            ailing: Due::default(),
            deferred: Vec::new(),
            unread: Vec::new(),
            young_until_us: 0,
            lingers: false,
            look_at_us: 0,
            lost_us: 0,
            status,
            asked: false,
            rang: false,
            moved_qps: MovedQps::default(),
            failback: Failback::new(core),
            repeats: HashMap::new(),
            tend_at_us: 0,
            ask_pairs_at_us: 0,
            keys_at_us: 0,
        }
    }

    /// The time, less what this thread was kept from its core.
    fn clock_us(&self) -> u64 {
        now_us().saturating_sub(self.lost_us)
    }

    /// Sleeps until there is something to do.
    fn wait(&mut self) {
        let core = &self.core;
        let now = now_us();
        let next = self.next_deadline();
        let longest_us = match self.young(now) {
            true => YOUNG_TICK_US,
            false if self.lingers => LINGER_US,
            false => 60_000_000,
        };
        let wait_us = next.saturating_sub(now).min(longest_us);
        let timeout = Timespec {
            tv_sec: (wait_us / 1_000_000) as i64,
            tv_nsec: (wait_us % 1_000_000 * 1_000) as i64,
        };
        let channel = core.nics.channel();
        let mut fds = Vec::with_capacity(4);
        fds.push(PollFd::new(core.events.alarm(), PollFlags::IN));
        fds.push(PollFd::new(core.jobs.wake(), PollFlags::IN));
        fds.push(PollFd::new(&**channel, PollFlags::IN));
        if let Some(s) = self.status.as_ref().filter(|s| !s.rests()) {
            fds.push(PollFd::new(s, PollFlags::IN));
        }
        // An interrupted wait is a short wait.
        let _ = poll(&mut fds, Some(&timeout));
        let ready = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| !fd.revents().is_empty());
        (self.rang, self.asked) = (ready(fds.first()), ready(fds.get(3)));
        let late_us = now_us().saturating_sub(next.max(now));
        if late_us > LATE_US {
            self.lost_us += late_us;
        }
    }

    fn young(&self, now: u64) -> bool {
        now < self.young_until_us && !self.watched.is_empty()
    }

    fn next_deadline(&self) -> u64 {
        let lost_us = self.lost_us;
        let health = self.core.peers.all().iter().filter_map(|p| p.health().poll_timeout()).min();
        let failback = self.failback.deadline_us(&self.core);
        let tend = if self.core.nics.several_ports() { self.tend_at_us } else { u64::MAX };
        let own = health
            .into_iter()
            .chain([self.look_at_us, failback, tend])
            .map(|at| at.saturating_add(lost_us));
        let connecting = [self.connecting.next_us()];
        let watched = [self.watched.next_us(), self.ailing.next_us()];
        let moved_qps = [self.moved_qps.deadline_us(&self.core), self.seekers.deadline_us()];
        own.chain(connecting).chain(watched).chain(moved_qps).min().unwrap_or(u64::MAX)
    }

    fn work(&mut self) {
        let _ = self.core.jobs.wake().take();
        if self.young(now_us()) {
            self.fetch();
        } else {
            self.receive();
        }
        self.watch(now_us());
        self.mend_endpoints(now_us());
        self.moved_qps.work(&self.core, now_us());
        let clock_us = self.clock_us();
        if clock_us >= self.look_at_us {
            std::mem::take(&mut self.deferred).into_iter().for_each(|job| self.job(job));
            self.look(clock_us);
            self.core.nics.find_overruns();
            self.look_at_us = clock_us + LOOK_US;
        }
        self.ask_keys(clock_us);
        self.failback.work(&self.core, clock_us);
        self.tend_port_pairs(clock_us);
        self.ask_paths();
        self.retry_connecting(now_us());
        self.seekers.work(&self.core, now_us());
        if self.rang {
            self.core.events.write_deferred();
        }
        if self.asked {
            self.serve_status();
        }
    }

    fn job(&mut self, job: Job) {
        match job {
            Job::Device(nic, event) => self.device_event(nic, event),
            Job::Connect(id) => {
                self.connecting.set(id, 0);
                self.connect_tries.insert(id, 0);
                self.tend_at_us = 0;
            }
            Job::Seek(id, addr) => self.seekers.seek(&self.core, id, addr, now_us()),
            Job::Hurry(id) => self.seekers.hurry(id, now_us()),
            Job::Answered(addrs) => self.seekers.answered(&self.core, &addrs, now_us()),
            Job::AskAgain => self.seekers.ask_again(now_us()),
            Job::Refused(why) => {
                let what = "the directory does not take queue pairs, which stay unprotected";
                self.core.events.complain_of_directory(what, &why);
            }
            Job::Watch(id, at_us) => {
                if self.watched.set(id, at_us).is_none() {
                    self.young_until_us = now_us() + YOUNG_US;
                }
            }
            Job::Read(id) => self.unread.push(id),
            Job::MendEndpoint(at) => drop(self.ailing.set(at, now_us() + MEND_AFTER_US)),
            Job::MendAgain(at) => drop(self.ailing.set(at, now_us() + MEND_AGAIN_US)),
            Job::ProbeAck(at, message) => self.probe_answered(at, &message),
            Job::TendPortPairs => self.tend_at_us = 0,
            Job::Moved(id) => self.moved_qps.moved(id),
            Job::ReadAliases => self.moved_qps.want(),
            Job::TellMoved => moved_qps::tell_all(&self.core),
        }
    }

    // --- control messages

    /// Drives the NICs in this thread and receives.
    fn fetch(&mut self) {
        self.core.nics.drive_endpoints();
        self.receive();
    }

    /// Receives, and does the jobs that the messages bring.
    fn receive(&mut self) {
        inbound::receive(&self.core);
        let jobs = self.core.jobs.take();
        self.lingers = !jobs.is_empty();
        jobs.into_iter().for_each(|job| self.job(job));
        if self.lingers {
            self.core.jobs.linger();
        }
        self.read_directory();
    }

    /// Reads the directory for messages that wait for that, once for each peer, and hands them in.
    fn read_directory(&mut self) {
        if self.unread.is_empty() {
            return;
        }
        let (core, mut read, mut later) = (self.core.clone(), Vec::new(), Vec::new());
        let _batch = core.control.batch();
        for id in std::mem::take(&mut self.unread) {
            let Some(qp) = core.qps.get(id) else { continue };
            let Some(unread) = qp.gate_now().map(|g| link::unread(&qp, &g)) else {
                later.push(id);
                continue;
            };
            let Some(link::Unread { peer, named }) = unread else { continue };
            self.refresh_once(&peer, &mut read);
            let found = core
                .directory
                .as_ref()
                .zip(named)
                .and_then(|(d, (gid, qpn))| d.lookup_qp(gid, qpn).ok());
            let connection = found.flatten().map(|(_, connection)| connection);
            match qp.gate_now() {
                Some(mut g) => link::informed(&qp, &mut g, PeerWord { connection }),
                None => later.push(id),
            };
        }
        self.deferred.extend(later.into_iter().map(Job::Read));
    }

    // --- keys of peers

    /// Asks peers by which keys their memory is known on other NICs, where QPs wait for that; again
    /// while an answer is missing.
    fn ask_keys(&mut self, clock_us: u64) {
        let core = self.core.clone();
        let again = clock_us >= self.keys_at_us;
        if again {
            self.keys_at_us = clock_us + KEYS_AGAIN_US;
        }
        for peer in core.peers.all() {
            if again {
                peer.keys.ask_again();
            }
            let wanted = peer.keys.take_wanted();
            if wanted.is_empty() {
                continue;
            }
            // Over each of our NICs: of those that have not been asked it is not known whether they
            // are dead, too.
            let _batch = core.control.batch();
            for local in 0..core.nics.count().min(255) as u8 {
                let rails = (0..peer.nic_count()).map(|k| (local + k) % peer.nic_count());
                let mut candidates = rails.map(|remote| SlotPath { local, remote });
                let Some(path) =
                    candidates.find(|path| peer.liveness(&core.nics, *path) == Liveness::Alive)
                else {
                    continue;
                };
                ask_for(&core, &peer, path, &wanted);
            }
        }
    }

    fn peer_gone(&mut self, peer: &Arc<Peer>) {
        self.qps_of(peer, link::peer_gone);
    }

    fn qps_of(&self, peer: &Arc<Peer>, f: impl Fn(&Qp, &mut Gate) + Sync) {
        self.core.parallel.each(&self.core.qps.all(), |qp| {
            let Some(mut g) = qp.gate_now() else { return };
            if g.link.as_ref().is_some_and(|l| l.peer().incarnation == peer.incarnation) {
                f(qp, &mut g);
            }
        });
    }

    fn serve_status(&mut self) {
        let Some(server) = &self.status else { return };
        let core = &self.core;
        server.accept_one(|| ProcessStatus {
            pid: std::process::id(),
            program: std::env::args_os()
                .next()
                .and_then(|p| {
                    std::path::Path::new(&p).file_name().map(|n| n.to_string_lossy().into_owned())
                })
                .unwrap_or_default(),
            host: core.nics.host(),
            forged: core.control.forged(),
            qps: core.qps.all().iter().map(|q| q.status()).collect(),
            nics: core.nics.statuses(),
            backups: BackupsStatus {
                ready: core.qps.count(|qp| qp.gate_now().is_some_and(|g| g.backup.is_some())),
                ..core.backups.status(core.nics.leftovers())
            },
            sdr: sdr_status(),
        });
    }
}
