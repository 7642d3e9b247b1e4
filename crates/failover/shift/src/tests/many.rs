//! Hundreds of QPs leave one NIC, on devices whose control verbs take as long as an RNIC's.

use super::*;
use std::thread;

/// What each control verb takes.
const CONTROL_US: u32 = 500;
const QPS: usize = 512;

/// One end of many connections.
struct Host {
    plan: Arc<Plan>,
    core: Arc<Core<Qp>>,
    qps: Vec<Arc<Qp>>,
    _system: System,
    _context: Arc<Context>,
}

impl Host {
    fn new(runtime: &std::path::Path, name: &str, qps: usize) -> Host {
        let config =
            unbroken_softnic::Config::host(unbroken_runtime::Runtime::at(runtime).unwrap(), name);
        let plan = Arc::new(Plan::default());
        plan.slow_control.store(true, SeqCst);
        let core = Core::over(Box::new(Nics(soft::over(config).unwrap(), plan.clone()))).unwrap();
        let system = System::with(core.clone());
        let context = system.open(0).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(4096, None).unwrap());
        let caps = QpCaps {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let request = || QpRequest {
            qp_type: QpType::Rc,
            caps,
            pd,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            sq_sig_all: true,
            cookie: 0,
            plain: false,
            management: false,
        };
        let qps = (0..qps).map(|_| context.create_qp(&request()).unwrap()).collect();
        Host { plan, core, qps, _system: system, _context: context }
    }

    fn connect(&self, peer: &Host) {
        self.qps.iter().zip(&peer.qps).for_each(|(qp, peer)| connect(qp, peer));
    }

    fn all(&self, is: impl Fn(&unbroken_events::QpStatus) -> bool) -> bool {
        self.qps.iter().all(|qp| is(&qp.status()))
    }
}

fn wait(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{what}: not so far");
        thread::sleep(Duration::from_micros(500));
    }
}

#[test]
fn hundreds_of_qps_leave_a_nic_together() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| Host::new(folder.path(), name, QPS));
    a.connect(&b);
    b.connect(&a);
    wait("all are protected", || a.all(|s| s.protected) && b.all(|s| s.protected));
    let ready = |host: &Host| host.qps.iter().all(|qp| qp.gate().backup.is_some());
    wait("all have their backup", || ready(&a) && ready(&b));
    for host in [&a, &b] {
        host.plan.control_us.store(CONTROL_US, SeqCst);
    }
    a.plan.dead[0].store(true, SeqCst);
    let start = Instant::now();
    a.core.jobs.put(Job::Device(0, DeviceEvent::Fatal));
    wait("all have left", || {
        [&a, &b].iter().all(|host| host.core.qps.switching() == 0 && host.all(|s| s.epoch > 0))
    });
    let took = start.elapsed();
    eprintln!("{QPS} QPs at both ends: {took:?}");
    // One after the other would take 1.7 s; 0.09 s were seen.
    assert!(took < Duration::from_millis(600), "{took:?}");
    for host in [&a, &b] {
        host.plan.control_us.store(0, SeqCst);
        let made = || host.plan.made.load(SeqCst);
        wait("each has another backup, and nothing else", || {
            ready(host) && host.core.backups.status(Default::default()).awaited == 0
        });
        let before = made();
        host.qps.iter().for_each(|qp| qp.destroy().unwrap());
        assert_eq!(before - made(), 2 * QPS as u32);
    }
}

/// What the program's own thread calls is what it would call without failover: a QP is one verb,
/// and so is each change of it. Backups are made, and peers found, by other threads.
#[test]
fn a_program_pays_for_its_own_control_verbs_alone() {
    const QPS: usize = 64;
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| Host::new(folder.path(), name, QPS));
    assert_eq!(a.plan.calls(), QPS as u32, "to make them");
    b.connect(&a);
    a.plan.control_us.store(CONTROL_US, SeqCst);
    let path = PathAttr::new(b.qps[0].gid());
    let start = Instant::now();
    (0..QPS).for_each(|_| thread::sleep(Duration::from_micros(CONTROL_US.into())));
    let bare = start.elapsed();
    for step in 0..3 {
        let (before, start) = (a.plan.calls(), Instant::now());
        for (qp, peer) in a.qps.iter().zip(&b.qps) {
            qp.modify(&steps(peer.qpn(), path)[step]).unwrap();
        }
        let (took, state) = (start.elapsed(), ["INIT", "RTR", "RTS"][step]);
        assert_eq!(a.plan.calls() - before, QPS as u32, "{state}");
        let each_us = |time: Duration| time.as_secs_f64() * 1e6 / QPS as f64;
        eprintln!("to {state}: {:.1} us; the verb alone {:.1} us", each_us(took), each_us(bare));
    }
    a.plan.control_us.store(0, SeqCst);
    let all = |host: &Host| host.all(|s| s.protected);
    wait("all are protected, and have their backup", || {
        all(&a) && all(&b) && a.qps.iter().all(|qp| qp.gate().backup.is_some())
    });
    assert_eq!(a.plan.calls(), 4 * QPS as u32, "by other threads");
}
