//! A device that takes its time to make its CQ larger keeps nobody waiting who polls.

mod common;

use common::mock::Net;
use common::{connect, send_wr, End, Host, CAPS};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use unbroken_types::SendOpcode;
use unbroken_verbs::{CompChannel, Cq, Device, QpInit};

/// A CQ of the application, behind which the device's has room for one QP's work.
const ENTRIES: u32 = CAPS.max_send_wr + CAPS.max_recv_wr + 2;

fn wait(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

struct World {
    net: Net,
    hosts: [Host; 2],
    ends: [End; 2],
    channel: Arc<CompChannel>,
}

/// A pair whose first end completes in a CQ of that size.
fn world() -> World {
    let net = Net::new(true);
    let hosts = [Host::new(&net, 0, 64, false), Host::new(&net, 1, 64, false)];
    let channel = CompChannel::new().unwrap();
    let cq = Cq::new(ENTRIES, Some(channel.clone()));
    let ends = [End::over(&hosts[0], cq.clone(), cq, None), End::new(&hosts[1], true, None)];
    connect(&hosts, &ends);
    World { net, hosts, ends, channel }
}

impl World {
    /// A WRITE of the first end completes.
    fn write(&self, wr_id: u64) {
        let (sges, there) = ([self.hosts[0].sge(0, 8)], self.hosts[0].id(0));
        let mut wr = send_wr(wr_id, SendOpcode::Write, true, &sges);
        wr.remote_addr = self.hosts[1].addr(0);
        wr.rkey = self.hosts[1].keys.rkey;
        let qp = &self.ends[0].qp;
        qp.post_send(&wr).unwrap();
        self.net.execute(there, qp.qpn());
        self.net.acknowledge(there, qp.qpn());
        self.net.tell(there, false);
    }

    /// Another QP of the first host that completes in the same CQ.
    fn another(&self, nic: usize) {
        let init = QpInit { wc_qpn: None, standby: false, ..self.ends[0].init.clone() };
        let made = self.hosts[0].nics[nic].create_holding_qp(&init);
        made.unwrap().destroy();
    }
}

#[test]
fn polls_go_on_while_a_device_does_not_answer_and_miss_nothing_behind_it() {
    let w = world();
    let cq = &w.ends[0].cq;
    w.write(1);
    assert_eq!(w.ends[0].poll(cq).len(), 1);
    let answer = w.net.hang_at_resize(w.hosts[0].id(0));
    let polled = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let more = threads.spawn(|| w.another(0));
        wait("the device is asked", || w.net.is_resizing());
        w.write(2);
        threads.spawn(|| {
            assert_eq!(w.ends[0].poll(cq).len(), 0, "what is there is behind the device");
            // A program that sleeps hears of what has come meanwhile.
            cq.req_notify(false);
            polled.store(true, Ordering::Release);
        });
        let waited = Instant::now();
        while !polled.load(Ordering::Acquire) && waited.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        // Before anything is asserted: else the threads would never end.
        let polled = polled.load(Ordering::Acquire);
        drop(answer);
        more.join().unwrap();
        assert!(polled, "polls wait for the device");
    });
    wait("the event comes", || w.channel.has_events());
    let wcs = w.ends[0].poll(cq);
    assert_eq!(wcs.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [2]);
    w.write(3);
    assert_eq!(w.ends[0].poll(cq).len(), 1, "polls come to the device again");
}

#[test]
fn completions_of_other_devices_come_meanwhile() {
    let w = world();
    // The second device's CQ has room for one.
    let keeps_room = QpInit { wc_qpn: None, standby: false, ..w.ends[0].init.clone() };
    let _first = w.hosts[0].nics[1].create_holding_qp(&keeps_room).unwrap();
    let answer = w.net.hang_at_resize(w.hosts[0].id(1));
    let found = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let more = threads.spawn(|| w.another(1));
        wait("the device is asked", || w.net.is_resizing());
        w.write(1);
        threads.spawn(|| {
            let there = w.ends[0].poll(&w.ends[0].cq).len() == 1;
            found.store(there, Ordering::Release);
        });
        let waited = Instant::now();
        while !found.load(Ordering::Acquire) && waited.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        let found = found.load(Ordering::Acquire);
        drop(answer);
        more.join().unwrap();
        assert!(found, "a completion of a device that works");
    });
}
