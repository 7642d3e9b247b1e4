//! Nothing that a program does to a QP waits for the directory, and nothing asks it under a gate.

use super::*;
use crate::lock::lock;
use std::sync::mpsc;
use std::sync::{OnceLock, Weak};
use unbroken_directory::{Directory, DirectoryError, Found, MovedQp, ProcessRecord, QpEntry};
use unbroken_failover_protocol::message::Planned;

type Answer<T> = std::result::Result<T, DirectoryError>;

/// What the gatekeeper has seen, and does.
#[derive(Default)]
struct Seen {
    core: OnceLock<Weak<Core<Qp>>>,
    reads: AtomicU32,
    /// Something was held.
    locked: AtomicBool,
    /// Questions about QPs are not answered, or nobody is found.
    silent: AtomicBool,
    nobody: AtomicBool,
    /// QPs were asked for, and how often.
    asked: AtomicU32,
    /// The connections of others are called wrong.
    stale: AtomicBool,
}

impl Seen {
    /// A call that reads: whoever makes it must hold nothing that another thread could want.
    fn read(&self) {
        self.reads.fetch_add(1, SeqCst);
        let Some(core) = self.core.get().and_then(Weak::upgrade) else { return };
        let (sender, free) = mpsc::channel();
        std::thread::spawn(move || {
            core.qps.all().iter().for_each(|qp| drop(qp.gate()));
            drop((lock(&core.control.receiving), core.peers.all()));
            sender.send(())
        });
        // Not to be asserted here: the worker survives a panic.
        self.locked.fetch_or(free.recv_timeout(PATIENCE).is_err(), SeqCst);
    }
}

/// A directory in front of another.
struct Gatekeeper(Arc<dyn Directory>, Arc<Seen>);

impl Directory for Gatekeeper {
    fn key(&self) -> Option<[u8; 32]> {
        self.0.key()
    }
    fn ask_qp(&self, gid: Gid, qpn: u32) -> Answer<Found> {
        self.1.read();
        self.1.asked.fetch_add(1, SeqCst);
        if self.1.silent.load(SeqCst) {
            return Ok(Found::Later);
        }
        if self.1.nobody.load(SeqCst) {
            return Ok(Found::Nobody);
        }
        let mut found = self.0.ask_qp(gid, qpn)?;
        if let (Found::Peer { qp, .. }, true) = (&mut found, self.1.stale.load(SeqCst)) {
            qp.incarnation += 2;
        }
        Ok(found)
    }
    fn publish_qp(&self, gid: Gid, qpn: u32, qp: QpEntry) -> Answer<()> {
        self.0.publish_qp(gid, qpn, qp)
    }
    fn unpublish_qp(&self, gid: Gid, qpn: u32) -> Answer<()> {
        self.0.unpublish_qp(gid, qpn)
    }
    fn lookup_qp(&self, gid: Gid, qpn: u32) -> Answer<Option<(u64, u32)>> {
        self.1.read();
        self.0.lookup_qp(gid, qpn)
    }
    fn publish_process(&self, incarnation: u64, record: &ProcessRecord) -> Answer<()> {
        self.0.publish_process(incarnation, record)
    }
    fn unpublish_process(&self, incarnation: u64) -> Answer<()> {
        self.0.unpublish_process(incarnation)
    }
    fn lookup_process(&self, incarnation: u64) -> Answer<Option<ProcessRecord>> {
        self.1.read();
        self.0.lookup_process(incarnation)
    }
    fn processes(&self) -> Answer<Vec<(u64, ProcessRecord)>> {
        self.0.processes()
    }
    fn publish_moved(&self, moved: &[MovedQp]) -> Answer<()> {
        self.0.publish_moved(moved)
    }
    fn unpublish_moved(&self, known: &[(Gid, u32)]) -> Answer<()> {
        self.0.unpublish_moved(known)
    }
    fn moved(&self) -> Answer<Vec<MovedQp>> {
        self.0.moved()
    }
    fn close(&self) {
        self.0.close();
    }
}

/// A world behind a gatekeeper. Its QPs are not connected.
fn guarded(seen: &Arc<Seen>) -> World {
    let (folder, plan) = (tempfile::tempdir().unwrap(), Arc::new(Plan::default()));
    let nics = Nics(soft::over(emulated(folder.path())).unwrap(), plan.clone());
    let core =
        Core::with(Box::new(nics), |inner| Arc::new(Gatekeeper(inner, seen.clone()))).unwrap();
    seen.core.set(Arc::downgrade(&core)).unwrap();
    World::of(core, plan, folder)
}

#[test]
fn the_directory_is_asked_with_nothing_held() {
    let seen = Arc::<Seen>::default();
    let w = guarded(&seen);
    connect(&w.from, &w.to);
    connect(&w.to, &w.from);
    w.wait("both ends are protected", || w.from.status().protected && w.to.status().protected);
    w.exchange(10);
    // A switch, with all that belongs to it: the NIC's death, a closed and a fresh endpoint,
    // messages, a reset.
    w.plan.dead[0].store(true, SeqCst);
    w.exchange(20);
    w.core.jobs.put(Job::Device(0, DeviceEvent::Fatal));
    w.wait("the death is noticed", || w.core.nics.device(0).is_none());
    w.plan.dead[0].store(false, SeqCst);
    w.core.jobs.put(Job::Device(0, DeviceEvent::PortActive(1)));
    w.wait("the NIC is back", || w.core.nics.endpoint(0).is_some());
    // What asks for the directory: an invitation to where the peer is not known to be, and a word
    // of another connection.
    let invites = w.of_peer(Body::Planned(Planned::Propose, 100));
    let mut misnamed = w.of_peer(Body::Refuse(Refuse {
        reason: RefuseReason::WrongConnection,
        epoch: 0,
        refused: 0,
    }));
    misnamed.from.connection += 1;
    for message in [invites, misnamed] {
        let before = seen.reads.load(SeqCst);
        w.from.gate().link.as_ref().unwrap().peer().mistake_endpoints(0);
        link::message(&w.from, &mut w.from.gate(), &message);
        w.wait("it is read for a message", || seen.reads.load(SeqCst) > before);
    }
    let bye = w.of_peer(Body::Bye);
    link::message(&w.from, &mut w.from.gate(), &bye);
    let rc = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
    w.from.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    w.to.destroy().unwrap();
    assert!(!seen.locked.load(SeqCst), "the directory is waited for under a lock");
}

/// What a world's QPs are.
fn connected(seen: &Arc<Seen>) -> World {
    let w = guarded(seen);
    connect(&w.from, &w.to);
    connect(&w.to, &w.from);
    w
}

fn both(w: &World, is: impl Fn(&unbroken_events::QpStatus) -> bool) -> bool {
    is(&w.from.status()) && is(&w.to.status())
}

/// The directory does not answer, or does not have the peer yet: the program goes on, and the QPs
/// are protected as soon as it does.
#[test]
fn qps_whose_peer_is_found_later_are_protected_later() {
    for silent in [true, false] {
        let seen = Arc::<Seen>::default();
        seen.silent.store(silent, SeqCst);
        seen.nobody.store(!silent, SeqCst);
        let w = connected(&seen);
        w.exchange(10);
        let (from, to) = (w.from.status(), w.to.status());
        assert!(from.pending && to.pending && !from.protected, "{from:?} {to:?}");
        let why = if silent { "has not answered yet" } else { "not in the directory" };
        assert!(from.why.contains(why), "{}", from.why);
        let asked = seen.asked.load(SeqCst);
        w.wait("it is asked again", || seen.asked.load(SeqCst) > asked + 4);
        w.exchange(20);
        seen.silent.store(false, SeqCst);
        seen.nobody.store(false, SeqCst);
        w.wait("both are protected", || {
            both(&w, |s| s.protected && !s.pending && s.why.is_empty())
        });
        w.plan.dead[0].store(true, SeqCst);
        w.exchange(30);
        assert!(!seen.locked.load(SeqCst), "the directory is asked under a lock");
    }
}

/// Who is not there for long is not expected any more, which is said once, and is asked for ever
/// more rarely.
#[test]
fn who_never_comes_is_asked_for_more_and_more_rarely() {
    let seen = Arc::<Seen>::default();
    seen.nobody.store(true, SeqCst);
    let w = connected(&seen);
    w.wait("nobody is expected", || both(&w, |s| !s.pending && s.why.contains("not in the")));
    assert!(seen.asked.load(SeqCst) <= 2 * 12, "{}", seen.asked.load(SeqCst));
    let events = || unbroken_events::read_events(&w.core.runtime).unwrap();
    let told = |events: &[unbroken_events::Event], what: fn(&unbroken_events::What) -> bool| {
        events.iter().filter(|event| what(&event.what)).count()
    };
    let unprotected =
        |what: &unbroken_events::What| matches!(what, unbroken_events::What::Unprotected { .. });
    assert_eq!(told(&events(), unprotected), 2);
    seen.nobody.store(false, SeqCst);
    w.core.jobs.put(Job::AskAgain);
    w.wait("both are protected", || both(&w, |s| s.protected));
    let found =
        |what: &unbroken_events::What| matches!(what, unbroken_events::What::PeerFound { .. });
    assert_eq!((told(&events(), unprotected), told(&events(), found)), (2, 2));
}

/// The NIC dies while the peer is not known yet: the failure waits for the answer.
#[test]
fn a_nic_that_dies_before_the_peer_is_found_is_survived() {
    let seen = Arc::<Seen>::default();
    seen.silent.store(true, SeqCst);
    let w = connected(&seen);
    w.exchange(10);
    w.post_recv(20).unwrap();
    w.plan.dead[0].store(true, SeqCst);
    let qpn = w.from.gate().phys.qpn();
    let status = WcStatus::FatalErr;
    w.core.jobs.put(Job::Device(0, DeviceEvent::QpFailed { qpn, status }));
    w.core.jobs.put(Job::Device(0, DeviceEvent::Fatal));
    w.wait("the death is noticed", || w.core.nics.device(0).is_none());
    seen.silent.store(false, SeqCst);
    w.wait("it is on another NIC", || w.from.status().epoch > 0);
    w.post_send(21).unwrap();
    w.arrives();
}

/// The same, and the peer is never found: the program has the original error.
#[test]
fn a_failure_waits_for_the_peer_for_a_bounded_time() {
    let seen = Arc::<Seen>::default();
    seen.silent.store(true, SeqCst);
    let w = connected(&seen);
    w.exchange(10);
    let qpn = w.from.gate().phys.qpn();
    let status = WcStatus::RetryExcErr;
    w.core.jobs.put(Job::Device(0, DeviceEvent::QpFailed { qpn, status }));
    w.post_send(20).unwrap();
    w.wait("it has failed", || w.from.state() == QpState::Err);
    assert!(w.from.gate().seeks.is_none());
    w.plan.dead[0].store(true, SeqCst);
    w.post_send(21).unwrap();
    let wcs = w.completions(2);
    let flush = WcStatus::WrFlushErr as u32;
    assert!(wcs.iter().map(|wc| (wc.wr_id, wc.status)).eq([(20, status as u32), (21, flush)]));
}

/// The same where a post is the first to see it: the program sees nothing of it, and all leaves in
/// order, also what is posted when the NIC could take it again.
#[test]
fn what_is_posted_to_a_dead_nic_waits_until_the_peer_is_found() {
    let seen = Arc::<Seen>::default();
    seen.silent.store(true, SeqCst);
    let w = connected(&seen);
    w.exchange(10);
    w.post_recv(20).unwrap();
    w.plan.dead[..2].iter().for_each(|dead| dead.store(true, SeqCst));
    (0..2).for_each(|i| w.post_send(30 + i).unwrap());
    (1..3).for_each(|i| w.post_recv(20 + i).unwrap());
    w.plan.dead[..2].iter().for_each(|dead| dead.store(false, SeqCst));
    w.post_send(32).unwrap();
    assert_eq!((w.from.state(), w.to.state()), (QpState::Rts, QpState::Rts));
    seen.silent.store(false, SeqCst);
    let wcs = w.completions(6);
    assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success as u32), "{wcs:?}");
    let of = |qpn| wcs.iter().filter(move |wc| wc.qp_num == qpn).map(|wc| wc.wr_id);
    assert!(of(w.from.qpn()).eq(30..33) && of(w.to.qpn()).eq(20..23), "{wcs:?}");
    assert!(w.from.status().epoch > 0 && w.to.status().epoch > 0);
    w.exchange(40);
}

/// What is kept is bounded by the QP's sizes, as on a NIC that works, and a batch is kept whole or
/// not at all.
#[test]
fn no_more_is_kept_than_the_qp_has_room_for() {
    let seen = Arc::<Seen>::default();
    seen.silent.store(true, SeqCst);
    let w = connected(&seen);
    // What its transport has goes on counting.
    w.post_send(0).unwrap();
    w.plan.dead[0].store(true, SeqCst);
    (1..SENDS - 1).for_each(|i| w.post_send(i).unwrap());
    let batch = [14, 15].map(|wr_id| SendWr { wr_id, ..SendWr::default() });
    let full = w.from.post_sends(&Batch(&batch)).unwrap_err();
    assert_eq!(full.errno(), libc::ENOMEM, "{full}");
    let sges = [Sge::default(); 2];
    let wide = SendWr { wr_id: 15, sges: &sges, ..SendWr::default() };
    assert_eq!(w.from.post_send(&wide).unwrap_err().errno(), libc::EINVAL);
    w.post_send(SENDS - 1).unwrap();
    let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
    w.from.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    assert!(w.completions(SENDS as usize).iter().map(|wc| wc.wr_id).eq(0..SENDS));
}

struct Batch<'a>(&'a [SendWr<'a>]);

impl SendBatch for Batch<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }
    fn wr(&self, index: usize) -> SendWr<'_> {
        self.0[index]
    }
}

/// The peer is not found in time, the program moves the QP to ERR, or it resets it: what is kept is
/// flushed in order, or forgotten, and the QP can be used again.
#[test]
fn what_is_kept_is_flushed_in_order_or_forgotten() {
    let (fatal, flush) = (WcStatus::FatalErr as u32, WcStatus::WrFlushErr as u32);
    for (to, first) in [(None, fatal), (Some(QpState::Err), flush), (Some(QpState::Reset), 0)] {
        let seen = Arc::<Seen>::default();
        seen.silent.store(true, SeqCst);
        let w = connected(&seen);
        w.exchange(10);
        w.plan.dead[0].store(true, SeqCst);
        (0..3).for_each(|i| w.post_send(i).unwrap());
        let rc = RcModify { state: to, ..RcModify::default() };
        match to {
            Some(_) => w.from.modify(&QpModify { rc, ..QpModify::default() }).unwrap(),
            None => w.wait("it has failed", || w.from.state() == QpState::Err),
        }
        assert!(w.from.gate().seeks.is_none() && !w.from.gate().holds.get());
        if to != Some(QpState::Reset) {
            w.post_send(3).unwrap();
            let wcs = w.completions(4);
            assert!(wcs.iter().map(|wc| (wc.wr_id, wc.status)).eq([
                (0, first),
                (1, flush),
                (2, flush),
                (3, flush)
            ]));
            let rc = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
            w.from.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
        }
        assert_eq!(w.cq.poll(&mut [Wc::default()]).unwrap(), 0);
        let rc = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
        w.to.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
        seen.silent.store(false, SeqCst);
        connect(&w.from, &w.to);
        connect(&w.to, &w.from);
        w.exchange(20);
    }
}

/// Destroyed, it leaves nothing.
#[test]
fn what_is_kept_goes_with_its_qp() {
    let seen = Arc::<Seen>::default();
    seen.silent.store(true, SeqCst);
    let w = connected(&seen);
    w.plan.dead[0].store(true, SeqCst);
    w.post_send(1).unwrap();
    w.from.destroy().unwrap();
    assert!(w.from.gate().seeks.is_none());
    assert_eq!(w.cq.poll(&mut [Wc::default()]).unwrap(), 0);
}

/// What the program changes meanwhile is as it would be on a NIC that works, and is so on the next.
#[test]
fn what_is_changed_on_a_dead_nic_is_so_on_the_next() {
    let seen = Arc::<Seen>::default();
    seen.silent.store(true, SeqCst);
    let w = guarded(&seen);
    connect(&w.to, &w.from);
    for rc in &steps(w.to.qpn(), PathAttr::new(w.to.gid()))[..2] {
        w.from.modify(rc).unwrap();
    }
    w.plan.dead[0].store(true, SeqCst);
    let [_, _, rts] = steps(w.to.qpn(), PathAttr::new(w.to.gid()));
    w.from.modify(&rts).unwrap();
    assert_eq!((w.from.state(), w.from.gate().phys.state()), (QpState::Rts, QpState::Rtr));
    let invalid = RcModify { state: Some(QpState::Rtr), ..RcModify::default() };
    let refused = w.from.modify(&QpModify { rc: invalid, ..QpModify::default() }).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL, "{refused}");
    w.post_recv(1).unwrap();
    w.post_send(2).unwrap();
    let to = |state| {
        let rc = RcModify { state: Some(state), ..RcModify::default() };
        w.from.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    };
    to(QpState::Sqd);
    w.post_send(3).unwrap();
    w.post_recv(4).unwrap();
    seen.silent.store(false, SeqCst);
    w.wait("it is on another NIC", || w.from.status().epoch > 0 && w.from.status().state == "sqd");
    // Nothing that was posted before SQD has been started.
    assert_eq!(w.from.gate().phys.progress().sends(), 2);
    to(QpState::Rts);
    let wcs = w.completions(4);
    assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success as u32), "{wcs:?}");
}

/// The peer is never found: the QP ends, although nothing was posted.
#[test]
fn a_change_on_a_dead_nic_waits_for_a_bounded_time() {
    let seen = Arc::<Seen>::default();
    seen.silent.store(true, SeqCst);
    let w = connected(&seen);
    w.plan.dead[0].store(true, SeqCst);
    let rc = RcModify { state: Some(QpState::Sqd), ..RcModify::default() };
    w.from.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    assert_eq!(w.from.state(), QpState::Sqd);
    assert_eq!(w.post_send(1).ok(), Some(()));
    w.wait("it has failed", || w.from.state() == QpState::Err);
    assert_eq!(w.completions(1)[0].status, WcStatus::FatalErr as u32);
}

/// All NICs die while the peer is not known yet, and the program moves the QP to ERR: it is there,
/// and has flushed what it had.
#[test]
fn a_qp_that_seeks_is_ended_without_any_nic() {
    let seen = Arc::<Seen>::default();
    seen.silent.store(true, SeqCst);
    let w = connected(&seen);
    w.exchange(10);
    w.post_recv(20).unwrap();
    w.plan.dead.iter().for_each(|dead| dead.store(true, SeqCst));
    let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
    w.to.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    let wc = w.completions(1)[0];
    assert_eq!((wc.wr_id, wc.status), (20, WcStatus::WrFlushErr as u32));
    assert_eq!(w.to.state(), QpState::Err);
    assert!(w.to.gate().seeks.is_none());
}

/// The directory has the entry of a process that had the number before. It is looked up again.
#[test]
fn an_entry_of_before_is_found_out() {
    let seen = Arc::<Seen>::default();
    seen.stale.store(true, SeqCst);
    let w = connected(&seen);
    let peer = |qp: &Qp| qp.gate().link.as_ref().map(|l| l.peer().incarnation);
    w.wait("both are linked", || peer(&w.from).is_some() && peer(&w.to).is_some());
    assert_ne!(peer(&w.from), Some(w.core.incarnation));
    seen.stale.store(false, SeqCst);
    let right = Some(w.core.incarnation);
    w.wait("both have the right peer", || (peer(&w.from), peer(&w.to)) == (right, right));
    w.plan.dead[0].store(true, SeqCst);
    w.exchange(20);
}

/// A peer that has found us says something before we have found it: it is not refused, and we ask
/// at once.
#[test]
fn a_word_of_the_peer_has_the_directory_asked() {
    let seen = Arc::<Seen>::default();
    seen.nobody.store(true, SeqCst);
    let w = connected(&seen);
    // By itself it asks again 4 s later only.
    w.wait("nobody is expected", || seen.asked.load(SeqCst) >= 2 * 12);
    let hello = w.of_peer(w.hello());
    seen.nobody.store(false, SeqCst);
    let endpoint = w.core.nics.endpoint(1).unwrap();
    let to = w.core.nics.endpoint(0).unwrap().addr();
    let mut bytes = Vec::new();
    hello.encode(&mut bytes);
    endpoint.send(to, &bytes, w.core.control.key()).unwrap();
    let start = Instant::now();
    w.wait("it is found", || w.from.gate().link.is_some());
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}
