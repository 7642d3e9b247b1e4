//! Completions that an application's CQ has no room for, and those that a device's CQ has lost.

mod common;

use common::mock::Net;
use common::{connect, send_wr, End, Host, CAPS};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use unbroken_types::{QpState, SendOpcode, WcStatus};
use unbroken_verbs::{Cq, Device, DeviceEvent, QpEvent, QpInit, QpModify, RcModify, RecvWr};

struct World {
    net: Net,
    hosts: [Host; 2],
    ends: [End; 2],
    /// How often the second end's CQ said that it has overrun.
    told: Arc<AtomicU32>,
}

/// A pair whose second end completes in one CQ of that many entries.
fn world(sources: bool, entries: u32) -> World {
    let net = Net::new(sources);
    let hosts = [Host::new(&net, 0, 64, false), Host::new(&net, 1, 64, false)];
    let told = Arc::new(AtomicU32::new(0));
    let count = told.clone();
    let small = Cq::with_overrun_hook(entries, None, move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let ends = [End::new(&hosts[0], true, None), End::over(&hosts[1], small.clone(), small, None)];
    connect(&hosts, &ends);
    World { net, hosts, ends, told }
}

impl World {
    /// Messages come to the second end, which polls nothing.
    fn messages(&self, count: u64) {
        let ids = [self.hosts[0].id(0), self.hosts[1].id(0)];
        let sges = [self.hosts[0].sge(0, 8)];
        let recv_sges = [self.hosts[1].sge(0, 8)];
        for wr_id in 0..count {
            let recv = RecvWr { wr_id, sges: &recv_sges };
            self.ends[1].qp.post_recv(&recv).unwrap();
            self.ends[0].qp.post_send(&send_wr(wr_id, SendOpcode::Send, true, &sges)).unwrap();
            self.net.execute(ids[0], self.ends[0].qp.qpn());
            self.net.acknowledge(ids[0], self.ends[0].qp.qpn());
            ids.iter().for_each(|id| self.net.tell(*id, false));
        }
    }

    fn find_overruns(&self) {
        self.hosts[1].nics[0].find_overruns();
    }

    fn told(&self) -> u32 {
        self.told.load(Ordering::Relaxed)
    }

    fn fatal(&self) -> DeviceEvent {
        DeviceEvent::Qp { qpn: self.ends[1].qp.qpn(), event: QpEvent::Fatal }
    }
}

#[test]
fn a_cq_that_is_too_small_overruns_though_nobody_polls() {
    for sources in [false, true] {
        let w = world(sources, 4);
        w.messages(4);
        w.find_overruns();
        assert_eq!((w.told(), w.hosts[1].events.take()), (0, vec![]), "they fit");
        w.messages(1);
        w.find_overruns();
        w.find_overruns();
        assert_eq!((w.told(), w.hosts[1].events.take()), (1, vec![w.fatal()]), "each once");
        assert_eq!(w.ends[1].qp.state(), QpState::Err);
        assert!(w.ends[1].cq.poll(&mut [Default::default()]).is_err());
    }
}

/// Both queues of the QP fit.
#[test]
fn a_cq_that_is_large_enough_is_left_alone() {
    let w = world(true, CAPS.max_send_wr + CAPS.max_recv_wr);
    w.messages(3);
    w.find_overruns();
    assert!(w.ends[1].cq.looks_empty(), "what is there waits for who polls");
    assert_eq!(w.ends[1].poll(&w.ends[1].cq).len(), 3);
    w.ends[1].cq.resize(4).unwrap();
    w.find_overruns();
    assert_eq!(w.told(), 0, "somebody has polled since the last look");
    w.messages(5);
    w.find_overruns();
    assert_eq!((w.told(), w.hosts[1].events.take()), (1, vec![w.fatal()]), "it is smaller now");
}

#[test]
fn a_device_that_loses_completions_ends_the_queue_pair() {
    let w = world(true, 64);
    w.messages(2);
    w.net.overrun(w.hosts[1].id(0));
    assert_eq!(w.hosts[1].events.take_all(), [DeviceEvent::CqOverran], "somebody is to look");
    w.find_overruns();
    assert_eq!((w.told(), w.hosts[1].events.take()), (1, vec![w.fatal()]));
    assert_eq!(w.ends[1].qp.state(), QpState::Err);
}

/// Nothing completes there.
#[test]
fn the_cq_of_a_backup_that_is_made_ahead_loses_nothing() {
    let w = world(true, 64);
    let ahead = QpInit { standby: true, ..w.ends[1].init.clone() };
    let _backup = w.hosts[1].nics[1].create_holding_qp(&ahead).unwrap();
    w.net.overrun(w.hosts[1].id(1));
    w.hosts[1].nics[1].find_overruns();
    assert_eq!((w.told(), w.hosts[1].events.take()), (0, vec![]));
    w.messages(1);
    assert_eq!(w.ends[1].poll(&w.ends[1].cq).len(), 1);
}

/// Which is what a switch is for.
#[test]
fn completions_that_are_lost_with_their_device_end_nothing() {
    let w = world(true, 64);
    w.net.overrun(w.hosts[1].id(0));
    w.net.kill(w.hosts[1].id(0), None);
    w.hosts[1].events.take_all();
    w.find_overruns();
    let failed = DeviceEvent::QpFailed { qpn: w.ends[1].qp.qpn(), status: WcStatus::FatalErr };
    assert_eq!((w.told(), w.hosts[1].events.take()), (0, vec![failed]));
    assert_eq!(w.ends[1].qp.state(), QpState::Rts);
}

/// The device tells of it when the verb has returned, and nobody polls.
#[test]
fn an_idle_queue_pair_in_err_tells_that_it_takes_no_receive_any_more() {
    let net = Net::default();
    let hosts = [Host::new(&net, 0, 64, false), Host::new(&net, 1, 64, false)];
    let srq = hosts[1].srq(8);
    let ends = [End::new(&hosts[0], true, None), End::with_srq(&hosts[1], true, None, Some(srq))];
    connect(&hosts, &ends);
    let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
    ends[1].qp.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    net.tell(hosts[1].id(0), false);
    let qpn = ends[1].qp.qpn();
    assert_eq!(hosts[1].events.take_all(), [DeviceEvent::QpChanged { qpn }]);
    ends[1].qp.progress();
    let last = DeviceEvent::Qp { qpn, event: QpEvent::LastWqeReached };
    assert_eq!(hosts[1].events.take(), [last]);
    ends[1].qp.progress();
    assert_eq!(hosts[1].events.take(), [], "once");
}
