//! Where the directory may be waited for: while QPs are set up, with no gate held, and nowhere
//! else. And where it is read, which may take a turn at a file: once QPs are connected, with no
//! gate held either.

use super::*;
use crate::lock::lock;
use std::sync::mpsc;
use std::sync::{OnceLock, Weak};
use unbroken_directory::{Directory, DirectoryError, MovedQp, ProcessRecord};
use unbroken_failover_protocol::message::Planned;

type Answer<T> = std::result::Result<T, DirectoryError>;

/// What the gatekeeper has seen.
#[derive(Default)]
struct Seen {
    core: OnceLock<Weak<Core<Qp>>>,
    waits: AtomicU32,
    /// QPs are connected.
    connected: AtomicBool,
    reads: AtomicU32,
    /// Something was held.
    locked: AtomicBool,
}

impl Seen {
    /// A call that may wait: whoever makes it must hold nothing that another thread could want.
    fn wait(&self) {
        self.waits.fetch_add(1, SeqCst);
        self.holds_nothing();
    }

    /// A call that reads.
    fn read(&self) {
        if self.connected.load(SeqCst) {
            self.reads.fetch_add(1, SeqCst);
            self.holds_nothing();
        }
    }

    fn holds_nothing(&self) {
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
    fn fetch_qp(&self, gid: Gid, qpn: u32) {
        self.1.wait();
        self.0.fetch_qp(gid, qpn);
    }
    fn settle(&self) {
        self.1.wait();
        self.0.settle();
    }
    fn publish_qp(&self, gid: Gid, qpn: u32, incarnation: u64, connection: u32) -> Answer<()> {
        self.0.publish_qp(gid, qpn, incarnation, connection)
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
        self.1.wait();
        self.0.close();
    }
}

#[test]
fn the_directory_is_waited_for_while_qps_are_set_up_and_never_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let (plan, seen) = (Arc::new(Plan::default()), Arc::new(Seen::default()));
    let nics = Nics(soft::over(emulated(folder.path())).unwrap(), plan.clone());
    let core =
        Core::with(Box::new(nics), |inner| Arc::new(Gatekeeper(inner, seen.clone()))).unwrap();
    seen.core.set(Arc::downgrade(&core)).unwrap();
    let waits = || seen.waits.swap(0, SeqCst);
    let w = World::of(core, plan, folder);
    assert_eq!(waits(), 3, "the process is entered, and two QPs are");
    connect(&w.from, &w.to);
    connect(&w.to, &w.from);
    assert_eq!(waits(), 2, "each is looked up by the other");
    w.wait("both ends are protected", || w.from.status().protected && w.to.status().protected);
    w.exchange(10);
    seen.connected.store(true, SeqCst);
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
    assert_eq!(waits(), 0);
    assert!(!seen.locked.load(SeqCst), "the directory is waited for under a lock");
}
