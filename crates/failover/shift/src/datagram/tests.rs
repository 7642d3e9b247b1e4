//! UD QPs over NICs that break at a chosen instant.

use super::*;
use crate::api::{Context, System};
use crate::core::Core;
use crate::qp::QpRequest;
use crate::soft;
use crate::tests::{Nics, Plan};
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::sync::Arc;
use std::time::{Duration, Instant};
use unbroken_types::{Access, QpCaps, QpType, SendFlags, SendOpcode, Sge, Wc, GRH_BYTES};
use unbroken_verbs::{Cq, DeviceEvent, MrKeys, SendWr, UdDest};

const PATIENCE: Duration = Duration::from_secs(20);
const QKEY: u32 = 0x1234;
const ENTRIES: u64 = 16;
const BYTES: usize = 100;
/// A receive's number has this bit.
const RECV: u64 = 1 << 32;

/// Two UD QPs of a process: one on NIC 0, the other on NIC 1.
struct World {
    plan: Arc<Plan>,
    core: Arc<Core<Qp>>,
    from: Arc<Qp>,
    to: Arc<Qp>,
    cq: Arc<Cq>,
    buffer: Box<[AtomicU8]>,
    keys: MrKeys,
    _contexts: [Arc<Context>; 2],
    _system: System,
    _runtime: tempfile::TempDir,
}

fn step(state: QpState) -> QpModify {
    let sq_psn = (state == QpState::Rts).then_some(7);
    let rc = RcModify { state: Some(state), sq_psn, ..RcModify::default() };
    QpModify { rc, qkey: (state == QpState::Init).then_some(QKEY), ..QpModify::default() }
}

fn bring_up(qp: &Qp) {
    [QpState::Init, QpState::Rtr, QpState::Rts]
        .into_iter()
        .for_each(|state| qp.modify(&step(state)).unwrap());
}

impl World {
    fn new() -> World {
        let folder = tempfile::tempdir().unwrap();
        let plan = Arc::new(Plan::default());
        let nics = soft::over(crate::tests::emulated(folder.path())).unwrap();
        let core = Core::over(Box::new(Nics(nics, plan.clone()))).unwrap();
        let system = System::with(core.clone());
        let contexts = [system.open(0).unwrap(), system.open(1).unwrap()];
        let pd = contexts[0].alloc_pd().unwrap();
        let cq = contexts[0].create_cq(256, None).unwrap();
        let entries = ENTRIES as u32;
        let caps = QpCaps {
            max_send_wr: entries,
            max_recv_wr: entries,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let qp = |context: &Arc<Context>| {
            let (send_cq, recv_cq) = (cq.clone(), cq.clone());
            let request = QpRequest {
                qp_type: QpType::Ud,
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
        let buffer: Box<[_]> = (0..GRH_BYTES + BYTES).map(|_| AtomicU8::new(0)).collect();
        let addr = buffer.as_ptr() as u64;
        let keys = core
            .nics
            .memory(0)
            .reg_mr(pd, addr, buffer.len() as u64, addr, Access::LOCAL_WRITE)
            .unwrap();
        World {
            plan,
            core,
            from,
            to,
            cq,
            buffer,
            keys,
            _contexts: contexts,
            _system: system,
            _runtime: folder,
        }
    }

    fn up() -> World {
        let world = World::new();
        bring_up(&world.from);
        bring_up(&world.to);
        world
    }

    fn kill(&self, nic: usize) {
        self.plan.dead[nic].store(true, SeqCst);
    }

    fn heal(&self, nic: usize) {
        self.plan.dead[nic].store(false, SeqCst);
        self.core.jobs.put(Job::Device(nic, DeviceEvent::PortActive(1)));
    }

    fn sge(&self) -> [Sge; 1] {
        [Sge {
            addr: self.buffer.as_ptr() as u64,
            length: self.buffer.len() as u32,
            lkey: self.keys.lkey,
        }]
    }

    fn post_recv(&self, wr_id: u64) -> Result<()> {
        self.to.post_recv(&RecvWr { wr_id: RECV | wr_id, sges: &self.sge() })
    }

    fn post_send(&self, wr_id: u64) -> Result<()> {
        let sges = [Sge { length: BYTES as u32, ..self.sge()[0] }];
        self.from.post_send(&SendWr {
            wr_id,
            opcode: SendOpcode::Send,
            flags: SendFlags::default(),
            sges: &sges,
            ud: Some(UdDest {
                gid: self.to.gid(),
                qpn: self.to.qpn(),
                qkey: QKEY,
                grh: true,
                sgid_index: 0,
                ..UdDest::default()
            }),
            ..SendWr::default()
        })
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
        got
    }

    /// Sends until a datagram has arrived: it must show the addresses that both had at first, and
    /// nothing may fail.
    fn arrives(&self) {
        self.post_recv(0).unwrap();
        let start = Instant::now();
        loop {
            self.post_send(5).unwrap();
            for wc in self.completions(1) {
                assert_eq!(
                    (wc.status, wc.qp_num),
                    (0, if wc.wr_id & RECV == 0 { self.from.qpn() } else { self.to.qpn() })
                );
                if wc.wr_id & RECV != 0 {
                    return self.check(&wc);
                }
            }
            assert!(
                start.elapsed() < PATIENCE,
                "nothing arrives: {:?}, {:?}",
                self.from.status(),
                self.to.status()
            );
        }
    }

    fn check(&self, wc: &Wc) {
        assert_eq!((wc.src_qp, wc.byte_len), (self.from.qpn(), (GRH_BYTES + BYTES) as u32));
        let grh: Vec<u8> = self.buffer[..GRH_BYTES].iter().map(|byte| byte.load(SeqCst)).collect();
        let ends = [self.from.gid(), self.to.gid()].map(|gid| gid.to_ipv4().unwrap().octets());
        assert_eq!(grh[32..40], ends.concat(), "source and destination");
        // Sends that are complete after it.
        let mut rest = [Wc::default(); 4];
        while self.cq.poll(&mut rest).unwrap() > 0 {}
    }

    fn nics(&self) -> (usize, usize) {
        (self.from.gate().nic, self.to.gate().nic)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The buffer goes: nothing may touch it any more.
        let _ = (self.from.destroy(), self.to.destroy());
        self.core.nics.memory(0).dereg_mr(self.keys.lkey).unwrap();
    }
}

/// The sender's NIC dies, then that of both, then the next: the program sees nothing but the
/// addresses that it knows.
#[test]
fn both_ends_move_and_keep_their_names() {
    let w = World::up();
    assert!(w.from.status().protected && w.to.status().protected);
    w.arrives();
    w.kill(0);
    w.arrives();
    assert_eq!(w.nics(), (1, 1));
    w.kill(1);
    w.arrives();
    assert_eq!(w.nics(), (2, 2));
    assert_eq!((w.from.status().epoch, w.from.status().path), (2, "a/2".into()));
    let table = || w.core.directory.as_ref().unwrap().moved().unwrap();
    w.wait("both are in the directory", || table().len() == 2);
    w.from.destroy().unwrap();
    assert_eq!(
        table().iter().map(|moved| moved.known).collect::<Vec<_>>(),
        [(w.to.gid(), w.to.qpn())]
    );
}

/// Nobody posts: the device's event moves it.
#[test]
fn an_idle_qp_moves_by_the_event_of_its_nic() {
    let w = World::up();
    (0..ENTRIES).for_each(|i| w.post_recv(i).unwrap());
    w.kill(1);
    w.core.jobs.put(Job::Device(1, DeviceEvent::Fatal));
    w.wait("it has moved", || w.nics() == (0, 2));
    assert_eq!(
        w.post_recv(ENTRIES).unwrap_err().errno(),
        libc::ENOMEM,
        "its receives have moved with it"
    );
    // A port that is down is left as well; a NIC is not, where no other works.
    w.core.jobs.put(Job::Device(2, DeviceEvent::PortDown(1)));
    w.wait("it has left the port", || w.nics() == (0, 3));
    [0, 2].into_iter().for_each(|nic| w.kill(nic));
    leave(&w.to, &mut w.to.gate(), Reason::PortDown);
    assert_eq!((w.nics().1, w.to.status().protected), (3, true));
}

/// No NIC is left: posts are kept, up to the size of the queue, and the first that is healed
/// carries on.
#[test]
fn what_is_posted_without_any_nic_leaves_by_the_first_that_is_healed() {
    let w = World::up();
    (0..4).for_each(|nic| w.kill(nic));
    (0..ENTRIES).for_each(|i| w.post_send(i).unwrap());
    assert_eq!(w.post_send(ENTRIES).unwrap_err().errno(), libc::ENOMEM);
    let long = [Sge { length: 1 << 20, ..w.sge()[0] }];
    assert!(w.to.post_recv(&RecvWr { wr_id: RECV, sges: &[long[0], long[0]] }).is_err());
    (0..ENTRIES).for_each(|i| w.post_recv(i).unwrap());
    assert_eq!(w.post_recv(0).unwrap_err().errno(), libc::ENOMEM);
    assert_eq!((w.from.state(), w.from.status().protected), (QpState::Rts, false));
    w.heal(2);
    let (mut sends, mut recvs) = (Vec::new(), 0);
    while (sends.len() as u64) < ENTRIES {
        for wc in w.completions(1) {
            assert_eq!(wc.status, WcStatus::Success as u32, "{wc:?}");
            match wc.wr_id & RECV {
                0 => sends.push(wc.wr_id),
                _ => recvs += 1,
            }
        }
    }
    assert!(sends.iter().copied().eq(0..ENTRIES), "{sends:?}, {recvs} arrived");
    w.wait("both are on the healed NIC", || w.nics() == (2, 2));
}

/// What SQD holds back does not leave because the QP moves.
#[test]
fn what_sqd_holds_back_waits_on_the_next_nic() {
    let w = World::up();
    w.from.modify(&step(QpState::Sqd)).unwrap();
    (0..4).for_each(|nic| w.kill(nic));
    w.post_send(1).unwrap();
    w.post_recv(0).unwrap();
    w.heal(2);
    w.wait("both are on the healed NIC", || w.nics() == (2, 2));
    assert_eq!((w.from.state(), w.cq.poll(&mut [Wc::default()]).unwrap()), (QpState::Sqd, 0));
    let rc = RcModify { state: Some(QpState::Rts), ..RcModify::default() };
    w.from.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    assert_eq!(w.completions(1)[0].status, WcStatus::Success as u32);
}

/// No NIC comes back in time: all is flushed once, in order. A reset makes a new QP of it, on the
/// NIC that works then.
#[test]
fn without_any_nic_the_error_comes_after_a_while() {
    let w = World::up();
    (0..4).for_each(|nic| w.kill(nic));
    (0..3).for_each(|i| w.post_send(i).unwrap());
    if let Some(parked) = w.from.gate().datagram.as_mut().and_then(|d| d.parked.as_mut()) {
        parked.since_us -= PATIENCE_US;
    }
    let flushed = |n: u64| {
        let wcs = w.completions(n as usize);
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::WrFlushErr as u32), "{wcs:?}");
        assert!(wcs.iter().map(|wc| wc.wr_id).eq(0..n), "{wcs:?}");
    };
    flushed(3);
    assert_eq!(w.from.state(), QpState::Err);
    w.post_send(0).unwrap();
    flushed(1);
    // The same by the program's own word.
    (0..2).for_each(|i| w.post_recv(i).unwrap());
    w.to.modify(&step(QpState::Err)).unwrap();
    assert_eq!(w.completions(2).iter().map(|wc| wc.wr_id & !RECV).collect::<Vec<_>>(), [0, 1]);
    for qp in [&w.from, &w.to] {
        qp.modify(&step(QpState::Reset)).unwrap();
        assert_eq!(qp.state(), QpState::Reset);
    }
    w.heal(3);
    w.wait("they have a NIC", || w.nics() == (3, 3));
    bring_up(&w.from);
    bring_up(&w.to);
    w.arrives();
}

/// The NIC dies between two steps of the set-up.
#[test]
fn a_qp_is_brought_up_over_a_nic_that_dies_meanwhile() {
    for steps in 0..3 {
        let (w, states) = (World::new(), [QpState::Init, QpState::Rtr, QpState::Rts]);
        bring_up(&w.to);
        for (i, state) in states.into_iter().enumerate() {
            if i == steps {
                w.kill(0);
            }
            w.from.modify(&step(state)).unwrap_or_else(|e| panic!("{state:?} after {steps}: {e}"));
            assert_eq!(w.from.state(), state);
        }
        w.arrives();
        assert_eq!(w.nics(), (1, 1));
        // In a state where it must not: it is told the same as on any NIC.
        (0..4).for_each(|nic| w.kill(nic));
        w.from.modify(&step(QpState::Reset)).unwrap();
        assert_eq!(w.post_send(1).unwrap_err().errno(), libc::EINVAL);
        assert!(w.from.modify(&step(QpState::Rtr)).is_err());
        w.from.modify(&step(QpState::Init)).unwrap();
        assert_eq!(w.from.state(), QpState::Init);
    }
}
