//! Nothing depends on how long a NIC's background thread sleeps at most: whatever is to be done
//! without anybody who posts or polls is done in time with a sleep that is far longer than any of
//! these tests waits, and with hardly any.

mod common;

use common::*;
use std::sync::Arc;
use std::time::Instant;
use unbroken_fabric::{DeviceKind, Fabric, Fault, NicKind, Runtime, Shape};
use unbroken_softnic::{Config, SoftNics};
use unbroken_types::{QpState, QpType, SendOpcode, Wc, WcStatus};
use unbroken_verbs::{Device, DeviceEvent, DeviceQp, QpModify, RcModify, SendWr, UdDest};

/// Far beyond [`PATIENCE`].
const LONG_US: u64 = 600_000_000;
const SHORT_US: u64 = 50;

/// Two hosts whose background threads sleep so long at most, and a connected pair of QPs.
struct Sleepers {
    world: World,
    a: Host,
    b: Host,
    qa: Arc<dyn DeviceQp>,
    qb: Arc<dyn DeviceQp>,
}

impl Sleepers {
    fn new(longest_sleep_us: u64, device: DeviceKind) -> Sleepers {
        let dir = tempfile::tempdir().unwrap();
        let runtime = || Runtime::at(dir.path()).unwrap();
        let kind = NicKind { device, ..NicKind::default() };
        let fabric =
            Fabric::create(&runtime(), &Shape { kind, ..Shape::of(0, &["a", "b"], 1) }).unwrap();
        let [a, b] = ["a", "b"].map(|name| {
            let config = Config { longest_sleep_us, ..Config::host(runtime(), name) };
            let nics = SoftNics::new(config).unwrap();
            let events = Arc::new(Events::default());
            let nic = nics.open(0, events.clone()).unwrap();
            let channel = nic.create_channel().unwrap();
            Host::build(nics, events, nic, 1 << 20, Some(channel))
        });
        let (qa, qb) = plain_pair(&a, &b);
        Sleepers { world: World { dir, fabric }, a, b, qa, qb }
    }

    fn both(test: impl Fn(Sleepers)) {
        [LONG_US, SHORT_US].into_iter().for_each(|us| test(Sleepers::new(us, DeviceKind::Full)));
    }

    fn fault(&self, text: &str) {
        self.world.fabric.set(&text.parse::<Fault>().unwrap(), None).unwrap();
    }
}

/// Takes `n` completions of a host by its channel, without driving its NIC.
fn take(host: &Host, n: usize) -> Vec<Wc> {
    let (mut out, mut wcs) = (Vec::new(), [Wc::default(); 16]);
    loop {
        host.cq.arm(false);
        let got = host.cq.take(&mut wcs).unwrap();
        out.extend_from_slice(&wcs[..got]);
        if out.len() >= n {
            return out;
        }
        if got == 0 {
            next_event(host.channel.as_ref().unwrap());
        }
    }
}

#[test]
fn messages_are_taken_and_acknowledged() {
    Sleepers::both(|s| {
        for id in 0..50 {
            s.qb.post_recv(&recv(id, &[s.b.sge(0, 100)])).unwrap();
            s.qa.post_send(&send(id, &[s.a.sge(0, 100)])).unwrap();
            assert_ok(&take(&s.b, 1)[0], id);
            assert_ok(&take(&s.a, 1)[0], id);
        }
        // More than a window, and than a drive sends.
        let sges = [s.a.sge(0, 1 << 20)];
        (0..20).for_each(|id| {
            s.qa.post_send(&rdma(id, SendOpcode::Write, &sges, s.b.addr(0), s.b.mr.rkey)).unwrap()
        });
        assert!(take(&s.a, 20).iter().all(|wc| wc.status == 0));
    });
}

#[test]
fn a_receiver_that_is_not_ready_is_asked_again() {
    Sleepers::both(|s| {
        s.qa.post_send(&send(1, &[s.a.sge(0, 100)])).unwrap();
        // Until the first RNR NAK has left.
        let start = Instant::now();
        while s.b.nic.counters().tx_bytes == 0 {
            assert!(start.elapsed() < PATIENCE, "the receiver says nothing");
            std::thread::yield_now();
        }
        s.qb.post_recv(&recv(2, &[s.b.sge(0, 100)])).unwrap();
        assert_ok(&take(&s.b, 1)[0], 2);
        assert_ok(&take(&s.a, 1)[0], 1);
    });
}

#[test]
fn lost_packets_are_sent_again_and_silence_ends() {
    Sleepers::both(|s| {
        s.fault("loss a/0 10%");
        let sges = [s.a.sge(0, 100_000)];
        (0..20).for_each(|id| {
            s.qa.post_send(&rdma(id, SendOpcode::Write, &sges, s.b.addr(0), s.b.mr.rkey)).unwrap()
        });
        assert!(take(&s.a, 20).iter().all(|wc| wc.status == 0));
        s.world.clear();
        s.fault("cable a/0 cut");
        s.qa.post_send(&send(9, &[])).unwrap();
        assert_eq!(take(&s.a, 1)[0].status, WcStatus::RetryExcErr as u32);
    });
}

#[test]
fn what_a_fault_holds_is_let_go() {
    Sleepers::both(|s| {
        for fault in ["delay a/0 3ms", "rate a/0 200Mbit", "jitter b/0 2ms"] {
            s.fault(fault);
            let sges = [s.a.sge(0, 200_000)];
            s.qa.post_send(&rdma(1, SendOpcode::Write, &sges, s.b.addr(0), s.b.mr.rkey)).unwrap();
            assert_ok(&take(&s.a, 1)[0], 1);
            s.world.clear();
        }
    });
}

/// UD has no timers that would wake anybody.
struct Datagrams<'a> {
    s: &'a Sleepers,
    from: Arc<dyn DeviceQp>,
    to: Arc<dyn DeviceQp>,
}

/// Most datagrams under way.
const COUNT: usize = 1000;
const LEN: usize = 4000;

impl Datagrams<'_> {
    fn new(s: &Sleepers) -> Datagrams<'_> {
        let make = |host: &Host| {
            let mut init = host.init(QpType::Ud);
            (init.caps.max_send_wr, init.caps.max_recv_wr) = (COUNT as u32, COUNT as u32);
            let qp = host.nic.create_qp(&init).unwrap();
            for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
                let sq_psn = (state == QpState::Rts).then_some(0);
                let rc = RcModify { state: Some(state), sq_psn, ..RcModify::default() };
                qp.modify(&QpModify {
                    rc,
                    qkey: (state == QpState::Init).then_some(9),
                    ..QpModify::default()
                })
                .unwrap();
            }
            qp
        };
        Datagrams { s, from: make(&s.a), to: make(&s.b) }
    }

    fn send(&self, count: usize) {
        self.send_to(&self.to, count);
    }

    fn send_to(&self, to: &Arc<dyn DeviceQp>, count: usize) {
        let Host { nic, .. } = &self.s.a;
        let ud = UdDest {
            gid: self.s.b.nic.gid(),
            qpn: to.qpn(),
            qkey: 9,
            grh: true,
            sgid_index: nic.gid_index(),
            ..UdDest::default()
        };
        let sges = [self.s.a.sge(0, LEN)];
        (0..count)
            .for_each(|_| self.from.post_send(&SendWr { ud: Some(ud), ..send(1, &sges) }).unwrap());
    }

    fn expect(&self, count: usize) {
        let sges = [self.s.b.sge(0, LEN + 40)];
        (0..count).for_each(|_| self.to.post_recv(&recv(2, &sges)).unwrap());
    }

    fn all_come(&self, count: usize) {
        let (sent, came) = (take(&self.s.a, count), take(&self.s.b, count));
        assert!(sent.iter().chain(&came).all(|wc| wc.status == 0));
    }
}

#[test]
fn datagrams_wait_for_credit() {
    Sleepers::both(|s| {
        let d = Datagrams::new(&s);
        d.send(COUNT);
        d.expect(COUNT);
        d.all_come(COUNT);
    });
}

#[test]
fn a_datagram_waits_for_a_receive() {
    Sleepers::both(|s| {
        let (d, other) = (Datagrams::new(&s), Datagrams::new(&s));
        d.send_to(&d.to, 1);
        // One behind it, for another QP, has come: so has this one.
        other.expect(1);
        d.send_to(&other.to, 1);
        assert_ok(&take(&s.b, 1)[0], 2);
        take(&s.a, 2);
        d.expect(1);
        assert_ok(&take(&s.b, 1)[0], 2);
    });
}

#[test]
fn datagrams_wait_in_a_fault() {
    Sleepers::both(|s| {
        for (fault, count) in
            [("delay a/0 3ms", 1), ("delay b/0 3ms", 1), ("rate a/0 200Mbit", 200)]
        {
            let d = Datagrams::new(&s);
            s.fault(fault);
            d.expect(count);
            d.send(count);
            d.all_come(count);
            s.world.clear();
        }
    });
}

#[test]
fn a_death_is_told_and_all_is_flushed() {
    for device in [DeviceKind::Full, DeviceKind::Plain] {
        for longest_sleep_us in [LONG_US, SHORT_US] {
            let s = Sleepers::new(longest_sleep_us, device);
            // With each way to die.
            let more: Vec<_> = (0..8).map(|_| plain_pair(&s.a, &s.b)).collect();
            let qps = || more.iter().map(|(qa, _)| qa).chain([&s.qa]);
            qps().for_each(|qp| qp.post_recv(&recv(3, &[])).unwrap());
            // It is noticed by a thread that watches, and by nobody else.
            s.fault("nic a/0 dead");
            s.a.events.wait(|e| *e == DeviceEvent::Fatal);
            assert!(take(&s.a, 9).iter().all(|wc| wc.status == WcStatus::WrFlushErr as u32));
            drop(s.qb);
        }
    }
}
