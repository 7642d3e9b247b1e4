//! What storms of faults had found by chance, made on purpose: NICs that break at a chosen instant
//! of a switch.
//!
//! The NICs are the host's own, each wrapped so that it can be made to refuse work, as one does
//! that has just died: its posts fail, it says that it is not alive, and no event has told anybody
//! yet. Both QPs of a connection are in this process, on two NICs.

use crate::api::{Context, Qp, QpRequest, System};
use crate::core::Core;
use crate::link;
use crate::nic_set::NicSet;
use crate::soft;
use crate::worker_queue::Job;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::Arc;
use std::time::{Duration, Instant};
use unbroken_failover_protocol::message::{Body, Hello, Probe, Refuse, RefuseReason};
use unbroken_failover_protocol::seal::Key;
use unbroken_failover_protocol::{Endpoint, Message, SlotPath, SlotTable};
use unbroken_types::{
    Access, Gid, Messages, Mtu, PathAttr, Progress, QpCaps, QpState, QpType, SendFlags, SendOpcode,
    Sge, Wc, WcStatus,
};
use unbroken_verbs::{
    Backlog, Capabilities, CompChannel, Cq, Device, DeviceAttr, DeviceCounters, DeviceEvent,
    DeviceQp, Error, EventSink, KeyAnswer, LimitHook, MemoryDomain, MrKeys, OverrunHook, PortAttr,
    QpEvent, QpInit, QpModify, QpSnapshot, RcModify, RecvWr, Result, ResumableQp, SendBatch,
    SendWr, Srq, SrqAttr, UdAliases,
};

mod backups;
mod beginnings;
mod breakable;
mod endings;
mod gates;
mod looks;
mod many;
mod paths;
mod waits;

pub(crate) use breakable::{Nics, Plan};

/// How long anything may take before a test calls it lost.
const PATIENCE: Duration = Duration::from_secs(20);
const BYTES: usize = 3000;
/// Entries of the queues.
const SENDS: u64 = 16;

/// Host a of the emulated network of a runtime folder.
pub(crate) fn emulated(runtime: &std::path::Path) -> unbroken_softnic::Config {
    unbroken_softnic::Config::host(unbroken_runtime::Runtime::at(runtime).unwrap(), "a")
}

/// A connection between two NICs of a host, with a buffer for each end.
struct World {
    plan: Arc<Plan>,
    core: Arc<Core<Qp>>,
    from: Arc<Qp>,
    to: Arc<Qp>,
    cq: Arc<Cq>,
    out: Box<[u8]>,
    /// Written by the NICs meanwhile.
    room: Box<[std::sync::atomic::AtomicU8]>,
    keys: [MrKeys; 2],
    contexts: [Arc<Context>; 2],
    _system: System,
    _runtime: tempfile::TempDir,
}

impl World {
    fn new() -> World {
        let world = World::unconnected(&[]);
        connect(&world.from, &world.to);
        connect(&world.to, &world.from);
        world.wait("both ends are protected", || {
            world.from.status().protected && world.to.status().protected
        });
        world
    }

    /// The same before its QPs are connected, where some NICs were dead from the beginning.
    fn unconnected(dead: &[usize]) -> World {
        World::planned(Arc::new(Plan::default()), dead)
    }

    fn planned(plan: Arc<Plan>, dead: &[usize]) -> World {
        let folder = tempfile::tempdir().unwrap();
        dead.iter().for_each(|nic| plan.dead[*nic].store(true, SeqCst));
        let nics = soft::over(emulated(folder.path())).unwrap();
        let core = Core::over(Box::new(Nics(nics, plan.clone()))).unwrap();
        World::of(core, plan, folder)
    }

    fn of(core: Arc<Core<Qp>>, plan: Arc<Plan>, folder: tempfile::TempDir) -> World {
        let system = System::with(core.clone());
        let contexts = [system.open(0).unwrap(), system.open(1).unwrap()];
        let pd = contexts[0].alloc_pd().unwrap();
        let cq = contexts[0].create_cq(64, None).unwrap();
        let caps = QpCaps {
            max_send_wr: SENDS as u32,
            max_recv_wr: SENDS as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let qp = |context: &Arc<Context>| {
            let (send_cq, recv_cq) = (cq.clone(), cq.clone());
            let request = QpRequest {
                qp_type: QpType::Rc,
                caps,
                pd,
                send_cq,
                recv_cq,
                srq: None,
                sq_sig_all: true,
                cookie: 0,
                plain: false,
                management: false,
            };
            context.create_qp(&request).unwrap()
        };
        let (from, to) = (qp(&contexts[0]), qp(&contexts[1]));
        let out: Box<[u8]> = (0..BYTES).map(|i| (i * 7 % 251) as u8).collect();
        let room: Box<[_]> = (0..BYTES).map(|_| std::sync::atomic::AtomicU8::new(0)).collect();
        let keys = [out.as_ptr() as u64, room.as_ptr() as u64].map(|addr| {
            core.nics.memory(0).reg_mr(pd, addr, BYTES as u64, addr, Access::LOCAL_WRITE).unwrap()
        });
        World {
            plan,
            core,
            from,
            to,
            cq,
            out,
            room,
            keys,
            contexts,
            _system: system,
            _runtime: folder,
        }
    }

    /// A message from end to end.
    fn exchange(&self, wr_id: u64) {
        self.post_recv(wr_id).unwrap();
        self.post_send(wr_id + 1).unwrap();
        self.arrives();
    }

    fn wait(&self, what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(
                start.elapsed() < PATIENCE,
                "{what}: not so far; {:?}, {:?}",
                self.from.status(),
                self.to.status()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn post_recv(&self, wr_id: u64) -> Result<()> {
        let sge =
            Sge { addr: self.room.as_ptr() as u64, length: BYTES as u32, lkey: self.keys[1].lkey };
        self.to.post_recv(&RecvWr { wr_id, sges: &[sge] })
    }

    fn post_send(&self, wr_id: u64) -> Result<()> {
        self.post_send_with(wr_id, self.keys[0].lkey)
    }

    fn post_send_with(&self, wr_id: u64, lkey: u32) -> Result<()> {
        let sge = Sge { addr: self.out.as_ptr() as u64, length: BYTES as u32, lkey };
        self.from.post_send(&SendWr {
            wr_id,
            opcode: SendOpcode::Send,
            flags: SendFlags::default(),
            sges: &[sge],
            ..SendWr::default()
        })
    }

    /// A message of the peer's end to ours.
    fn of_peer(&self, body: Body) -> Message {
        let end = |qp: &Qp| {
            let found = self.core.directory.as_ref().unwrap().lookup_qp(qp.gid(), qp.qpn());
            let (incarnation, connection) = found.unwrap().unwrap();
            Endpoint { gid: qp.gid(), qpn: qp.qpn(), incarnation, connection }
        };
        Message { from: end(&self.to), to: end(&self.from), body }
    }

    /// The peer has entered the next epoch.
    fn hello(&self) -> Body {
        let lower = (self.from.gid(), self.from.qpn()) <= (self.to.gid(), self.to.qpn());
        let slots = SlotTable::new(SlotPath { local: 0, remote: 1 }, 4, 4, lower);
        Body::Hello(Hello {
            epoch: 1,
            path: slots.get(1).unwrap().mirrored(),
            fresh_qpn: self.to.qpn() + 1000,
            psn: 5,
            mtu: Mtu::B1024,
            key_set: 0,
            heard: false,
            waiting: true,
            executed: Messages::default(),
            exact: true,
            completed: Messages::default(),
            unproven_psn: None,
        })
    }

    /// Polls until there are so many completions.
    fn completions(&self, n: usize) -> Vec<Wc> {
        let (start, mut got, mut wcs) = (Instant::now(), Vec::new(), [Wc::default(); 4]);
        while got.len() < n {
            let new = self.cq.poll(&mut wcs).unwrap();
            got.extend_from_slice(&wcs[..new]);
            assert!(
                start.elapsed() < PATIENCE,
                "{got:?} of {n} completions; {:?}",
                self.from.status()
            );
        }
        assert_eq!(got.len(), n, "{got:?}");
        got
    }

    /// Polls until a send and a receive are complete; both must be good, and the bytes right.
    fn arrives(&self) {
        let wcs = self.completions(2);
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success as u32), "{wcs:?}");
        let right =
            self.room.iter().zip(&self.out).all(|(came, sent)| came.swap(0, SeqCst) == *sent);
        assert!(right, "the bytes are others");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The buffers go: nothing may touch them any more.
        let _ = (self.from.destroy(), self.to.destroy());
        self.keys.iter().for_each(|k| self.core.nics.memory(0).dereg_mr(k.lkey).unwrap());
    }
}

fn connect(qp: &Qp, peer: &Qp) {
    connect_over(qp, peer.qpn(), PathAttr::new(peer.gid()));
}

fn connect_over(qp: &Qp, dest_qpn: u32, path: PathAttr) {
    steps(dest_qpn, path).iter().for_each(|change| qp.modify(change).unwrap());
}

/// The steps by which a QP is connected.
fn steps(dest_qpn: u32, path: PathAttr) -> [QpModify; 3] {
    let init = RcModify {
        state: Some(QpState::Init),
        access: Some(Access::LOCAL_WRITE),
        ..RcModify::default()
    };
    let rtr = RcModify {
        state: Some(QpState::Rtr),
        mtu: Some(Mtu::B1024),
        dest_qpn: Some(dest_qpn),
        rq_psn: Some(7),
        max_dest_rd_atomic: Some(1),
        min_rnr_timer: Some(1),
        ..RcModify::default()
    };
    let rts = RcModify {
        state: Some(QpState::Rts),
        sq_psn: Some(7),
        timeout: Some(14),
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(1),
        ..RcModify::default()
    };
    [init, rtr, rts].map(|rc| QpModify {
        path: Some(path).filter(|_| rc.state == Some(QpState::Rtr)),
        rc,
        ..QpModify::default()
    })
}

/// A NIC dies, a post is the first to see it, and the NIC that the switch chooses dies before the
/// post is tried there (and the next one, too). The program sees nothing of it.
#[test]
fn a_post_outlives_the_nics_that_its_switch_chooses() {
    for deaths in 0..3 {
        let w = World::new();
        w.post_recv(1).unwrap();
        w.post_send(2).unwrap();
        w.arrives();
        w.post_recv(3).unwrap();
        w.plan.deaths_at_adoption.store(deaths, SeqCst);
        w.plan.dead[0].store(true, SeqCst);
        w.post_send(4).unwrap_or_else(|e| {
            panic!("the program sees the death of NIC {} in a row: {e}", deaths + 1)
        });
        w.arrives();
        let dead = |i: &usize| w.plan.dead[*i].load(SeqCst);
        assert_eq!((0..4).filter(dead).count() as u32, deaths + 1);
        assert!(!dead(&w.from.gate().nic), "it is on a dead NIC");
    }
}

/// The NIC of the peer died and was healed, so it has another control endpoint than the one that we
/// know. A peer that says again that it waits, although it was answered, is looked up anew: the
/// answer went nowhere.
#[test]
fn a_peer_that_goes_on_asking_is_looked_up_again() {
    let w = World::new();
    let message = w.of_peer(w.hello());
    // Held all the time, so that no deadline is looked after meanwhile.
    let mut g = w.from.gate();
    link::message(&w.from, &mut g, &message);
    let peer = g.link.as_ref().map(|l| l.peer().clone()).unwrap();
    assert_eq!(
        g.link.as_ref().map(|l| (l.executor().lqp().epoch(), l.executor().switching())),
        Some((1, true)),
        "it follows, and has answered"
    );
    let right = peer.control(1).unwrap();
    peer.mistake_endpoints(right.qpn + 500);
    assert_ne!(peer.control(1), Some(right));
    link::message(&w.from, &mut g, &message);
    assert_ne!(peer.control(1), Some(right), "the directory is not read under a gate");
    assert!(link::unread(&w.from, &g).is_some(), "the message waits until it was read");
    link::message(&w.from, &mut g, &message);
    drop(g);
    w.wait("it was read", || {
        peer.control(1) == Some(right) && link::unread(&w.from, &w.from.gate()).is_none()
    });
}

/// One datagram can say that the peer moves or goes no further, which decides over a QP. From
/// whoever does not know the key it decides nothing and is not answered. The very same bytes under
/// the right seal move the QP or end it: it is the seal that keeps strangers out.
#[test]
fn what_a_stranger_forges_changes_nothing_and_would_without_the_seal() {
    let refuse =
        |w: &World, reason| Body::Refuse(Refuse { reason, epoch: 0, refused: w.core.incarnation });
    for forgery in 0..5 {
        for sealed in [false, true] {
            let w = World::new();
            let body = match forgery {
                0 => w.hello(),
                1 => Body::Bye,
                2 => refuse(&w, RefuseReason::WrongIncarnation),
                3 => refuse(&w, RefuseReason::UnsafeReplay),
                _ => refuse(&w, RefuseReason::Failed),
            };
            let mut datagram = Vec::new();
            w.of_peer(body).encode(&mut datagram);
            // Handled behind it, and the one message that is answered in any case.
            w.of_peer(Body::Probe(Probe { sequence: 1, sent_us: 1 })).encode(&mut datagram);
            let sent = || w.core.nics.device(0).unwrap().counters().tx_bytes;
            let (before, to) = (sent(), w.core.nics.endpoint(0).unwrap().addr());
            let key = if sealed { w.core.control.key().clone() } else { Key::new(&[7; 32]) };
            w.core.nics.endpoint(3).unwrap().send(to, &datagram, &key).unwrap();
            w.wait("the datagram", || {
                w.core.control.forged() == u64::from(!sealed) && (sent() > before) == sealed
            });
            let moved = w.from.status().epoch > 0;
            assert_eq!(moved, sealed && forgery == 0, "{body:?}");
            // A peer that is taken for gone shows with the next failure.
            w.plan.dead[0].store(true, SeqCst);
            w.post_recv(1).unwrap();
            w.post_send(2).unwrap();
            match sealed {
                false => w.arrives(),
                true => assert!(moved || w.from.gate().failed, "{body:?} does no harm"),
            }
        }
    }
}

/// No NIC is left: posts are kept, up to the size of the queue, and a NIC that is healed in time
/// carries all of them.
#[test]
fn what_is_posted_without_any_nic_leaves_by_the_first_that_is_healed() {
    let w = World::new();
    w.post_recv(1).unwrap();
    w.plan.dead.iter().for_each(|d| d.store(true, SeqCst));
    (0..SENDS).for_each(|i| w.post_send(i).unwrap());
    assert_eq!(w.post_send(SENDS).unwrap_err().errno(), libc::ENOMEM);
    assert_eq!((w.from.state(), w.from.query().attrs.rc.state), (QpState::Rts, Some(QpState::Rts)));
    assert!(!w.from.status().protected);
    w.plan.dead[2].store(false, SeqCst);
    w.core.jobs.put(Job::Device(2, DeviceEvent::PortActive(1)));
    (1..SENDS).for_each(|i| w.post_recv(1 + i).unwrap());
    let wcs = w.completions(2 * SENDS as usize);
    assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success as u32), "{wcs:?}");
    let sends = wcs.iter().filter(|wc| wc.opcode == 0).map(|wc| wc.wr_id);
    assert!(sends.eq(0..SENDS), "{wcs:?}");
    assert_eq!((w.from.gate().nic, w.to.gate().nic), (2, 2));
}

/// A program begins, and connects, while the NIC that it asked for is dead: it runs over another.
#[test]
fn a_program_begins_while_its_nic_is_dead() {
    for dead in [&[0][..], &[1], &[0, 1], &[0, 1, 3]] {
        let w = World::unconnected(dead);
        connect(&w.from, &w.to);
        connect(&w.to, &w.from);
        w.exchange(10);
        let at = |qp: &Qp| qp.gate().nic;
        assert!(
            !dead.contains(&at(&w.from)) && !dead.contains(&at(&w.to)),
            "{dead:?}: {} {}",
            at(&w.from),
            at(&w.to)
        );
        assert_eq!((w.from.state(), w.to.state()), (QpState::Rts, QpState::Rts));
    }
    let plan = World::unconnected(&[]);
    assert_eq!(plan.from.gate().nic, 0);
}

/// A NIC dies between two verbs of a QP that is not connected yet: it begins anew on another, with
/// the receives that were posted.
#[test]
fn a_nic_dies_before_its_qps_are_connected() {
    let w = World::unconnected(&[]);
    let rc = RcModify {
        state: Some(QpState::Init),
        access: Some(Access::LOCAL_WRITE),
        ..RcModify::default()
    };
    w.to.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    w.post_recv(1).unwrap();
    w.plan.dead[1].store(true, SeqCst);
    w.post_recv(2).unwrap();
    connect(&w.to, &w.from);
    connect(&w.from, &w.to);
    for wr_id in [3, 4] {
        w.post_send(wr_id).unwrap();
        w.arrives();
    }
    assert_ne!(w.to.gate().nic, 1);
}

/// The same, and the worker hears of it before the program does anything: the program sees nothing
/// of that.
#[test]
fn a_qp_that_is_not_connected_outlives_the_news_that_its_nic_has_died() {
    let w = World::unconnected(&[]);
    let rc = RcModify {
        state: Some(QpState::Init),
        access: Some(Access::LOCAL_WRITE),
        ..RcModify::default()
    };
    w.to.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    w.post_recv(1).unwrap();
    let all: Vec<usize> = (0..w.core.nics.count()).collect();
    for dead in [&all[..], &all[1..2]] {
        all.iter().for_each(|nic| w.plan.dead[*nic].store(dead.contains(nic), SeqCst));
        let g = w.to.gate();
        let (nic, qpn) = (g.nic, g.phys.qpn());
        drop(g);
        w.core
            .jobs
            .put(Job::Device(nic, DeviceEvent::QpFailed { qpn, status: WcStatus::FatalErr }));
        // The worker takes its jobs in turn.
        w.core.jobs.put(Job::Device(3, DeviceEvent::Fatal));
        w.wait("the worker has looked", || w.core.nics.endpoint(3).is_none());
        assert_eq!(w.to.state(), QpState::Init);
    }
    connect(&w.to, &w.from);
    connect(&w.from, &w.to);
    w.post_send(3).unwrap();
    w.arrives();
    assert_ne!(w.to.gate().nic, 1);
}

/// A program has brought its QP to SQD. On the next NIC as on the old one, what has begun is
/// finished, what has not waits, and that the send queue is drained is told once, whatever happens
/// afterwards.
#[test]
fn what_sqd_holds_back_waits_on_the_next_nic() {
    let w = World::new();
    let told = || w.contexts[0].waiting_events(QpEvent::SqDrained as u32);
    let step = |state, sqd_notify| {
        let rc = RcModify { state: Some(state), ..RcModify::default() };
        w.from.modify(&QpModify { rc, sqd_notify, ..QpModify::default() }).unwrap();
    };
    let leaves =
        |nic| w.wait("it moves", || w.from.gate().nic != nic && w.from.status().state == "sqd");
    w.post_send(1).unwrap(); // there is no receive
    step(QpState::Sqd, Some(true));
    w.plan.dead[0].store(true, SeqCst);
    w.post_send(2).unwrap();
    leaves(0);
    assert_eq!(told(), 0, "the first has begun");
    [3, 4].into_iter().for_each(|wr_id| w.post_recv(wr_id).unwrap());
    w.arrives();
    w.wait("the send queue is drained", || told() == 1);
    let second = w.from.gate().nic;
    w.plan.dead[second].store(true, SeqCst);
    w.post_send(5).unwrap();
    leaves(second);
    assert_eq!(w.cq.poll(&mut [Wc::default()]).unwrap(), 0, "nothing has left");
    step(QpState::Rts, None);
    w.arrives();
    w.exchange(6); // behind what was posted in SQD, which takes its receive
    assert_eq!(told(), 1);
}

/// A message of an earlier connection (a Bye that was long under way) does not disarm the present
/// one.
#[test]
fn a_bye_of_an_earlier_connection_disarms_nobody() {
    let w = World::new();
    let end = |qp: &Qp| {
        let (incarnation, connection) =
            w.core.directory.as_ref().unwrap().lookup_qp(qp.gid(), qp.qpn()).unwrap().unwrap();
        Endpoint { gid: qp.gid(), qpn: qp.qpn(), incarnation, connection }
    };
    let bye = Message { from: end(&w.to), to: end(&w.from), body: Body::Bye };
    let rc = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
    for qp in [&w.from, &w.to] {
        qp.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    }
    connect(&w.from, &w.to);
    connect(&w.to, &w.from);
    w.wait("both ends are protected again", || {
        w.from.status().protected && w.to.status().protected
    });
    link::message(&w.from, &mut w.from.gate(), &bye);
    w.exchange(10);
    w.plan.dead[0].store(true, SeqCst);
    w.exchange(20);
}

/// A QP that is connected to itself, as NCCL's flush QP is, moves as others do.
#[test]
fn a_qp_connected_to_itself_moves() {
    let w = World::unconnected(&[]);
    connect(&w.from, &w.from);
    w.wait("it is protected", || w.from.status().protected);
    let exchange = |wr_id| {
        let sge = Sge { addr: w.room.as_ptr() as u64, length: BYTES as u32, lkey: w.keys[1].lkey };
        w.from.post_recv(&RecvWr { wr_id, sges: &[sge] }).unwrap();
        w.post_send(wr_id + 1).unwrap();
        w.arrives();
    };
    exchange(10);
    for nic in [0, 1] {
        w.plan.dead[nic].store(true, SeqCst);
        exchange(20);
        assert_ne!(w.from.gate().nic, nic);
    }
}
