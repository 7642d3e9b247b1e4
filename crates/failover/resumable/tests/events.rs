//! Who sleeps on a completion channel is woken, whatever thread takes the completions from the
//! device.

mod common;

use common::mock::Net;
use common::{connect, send_wr, End, Host, WHILE_DELIVERING};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::Arc;
use std::time::{Duration, Instant};
use unbroken_types::{SendFlags, SendOpcode, Wc};
use unbroken_verbs::{CompChannel, Cq, Device, QpInit, RecvWr};

const PATIENCE: Duration = Duration::from_secs(20);

/// A thread that passes the channel's events on.
fn watch(channel: &Arc<CompChannel>) -> Receiver<u64> {
    let (tell, told) = mpsc::channel();
    let channel = channel.clone();
    std::thread::spawn(
        move || while channel.get_event().is_ok_and(|cookie| tell.send(cookie).is_ok()) {},
    );
    told
}

/// Two ends, of which the second has a channel that is watched.
fn watched(sources: bool) -> (Net, [Host; 2], [End; 2], Receiver<u64>) {
    let net = Net::new(sources);
    let hosts = [Host::new(&net, 0, 64, true), Host::new(&net, 1, 64, true)];
    let channel = CompChannel::new().unwrap();
    let ends = [End::new(&hosts[0], true, None), End::new(&hosts[1], true, Some(channel.clone()))];
    connect(&hosts, &ends);
    let told = watch(&channel);
    (net, hosts, ends, told)
}

fn deliver(net: &Net, hosts: &[Host; 2], ends: &[End; 2]) {
    net.execute(hosts[0].id(0), ends[0].qp.qpn());
    net.acknowledge(hosts[0].id(0), ends[0].qp.qpn());
    hosts.iter().for_each(|h| net.tell(h.id(0), false));
}

#[test]
fn every_event_that_was_asked_for_comes() {
    [false, true].into_iter().for_each(every_event_comes);
}

fn every_event_comes(sources: bool) {
    let (net, hosts, ends, told) = watched(sources);
    ends[1].cq.set_cookie(77);
    let sges = [hosts[1].sge(0, 8)];
    for round in 0..300u64 {
        ends[1].qp.post_recv(&RecvWr { wr_id: round, sges: &sges }).unwrap();
        let (before, solicited) = (round % 3 == 0, round % 2 == 0);
        let data = [hosts[0].sge(0, 8)];
        let mut wr = send_wr(round, SendOpcode::Send, true, &data);
        wr.flags =
            wr.flags.with(if solicited { SendFlags::SOLICITED } else { SendFlags::default() });
        ends[0].qp.post_send(&wr).unwrap();
        if before {
            deliver(&net, &hosts, &ends); // it is there before the queue is armed: the look after arming finds it, and where it is what was asked for, it raises the event
        }
        ends[1].cq.req_notify(solicited);
        // Looked at as who drives nothing looks: what was there has been brought over.
        let mut wcs = [Wc::default(); 4];
        let n = ends[1].cq.take(&mut wcs).unwrap();
        let mut got = wcs[..n].to_vec();
        assert_eq!(got.len(), usize::from(before), "round {round}");
        if !before {
            deliver(&net, &hosts, &ends);
            if round % 5 == 0 {
                // Another thread takes it first: the sleeper is told all the same.
                got = ends[1].poll(&ends[1].cq);
            }
            assert_eq!(told.recv_timeout(PATIENCE), Ok(77), "round {round}");
            got.extend(ends[1].poll(&ends[1].cq));
        }
        assert_eq!(got.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [round]);
        assert_eq!(ends[0].poll(&ends[0].cq).len(), 1);
        if before {
            // Either it has raised the event, or the request is still open, and the next completion
            // answers it.
            ends[1].cq.fire();
            assert_eq!(told.recv_timeout(PATIENCE), Ok(77), "round {round}");
            assert!(told.try_recv().is_err(), "one request, one event");
        }
    }
}

/// The device's CQ and the application's are armed one after the other. What comes in between is
/// what was asked for: were its event used up before the application's CQ is armed, nobody would be
/// woken any more.
#[test]
fn a_completion_that_comes_while_the_queues_are_armed_raises_the_event() {
    [false, true].into_iter().for_each(one_that_comes_meanwhile_raises_it);
}

fn one_that_comes_meanwhile_raises_it(sources: bool) {
    let (net, hosts, ends, told) = watched(sources);
    let (data, sges) = ([hosts[0].sge(0, 8)], [hosts[1].sge(0, 8)]);
    for wr_id in 0..3 {
        ends[1].qp.post_recv(&RecvWr { wr_id, sges: &sges }).unwrap();
        ends[0].qp.post_send(&send_wr(wr_id, SendOpcode::Send, true, &data)).unwrap();
        net.execute(hosts[0].id(0), ends[0].qp.qpn());
        net.acknowledge(hosts[0].id(0), ends[0].qp.qpn());
        net.tell_when_polled(hosts[1].id(0));
        ends[1].cq.req_notify(false);
        assert_eq!(told.recv_timeout(PATIENCE), Ok(0), "message {wr_id}");
        assert_eq!(
            ends[1].poll(&ends[1].cq).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(),
            [wr_id]
        );
    }
}

/// Programs ask for an event as soon as a CQ is there, and make QPs then.
#[test]
fn an_event_that_was_asked_for_before_there_were_qps_comes() {
    let net = Net::new(true);
    let hosts = [Host::new(&net, 0, 64, true), Host::new(&net, 1, 64, true)];
    let channel = CompChannel::new().unwrap();
    let cq = Cq::new(256, Some(channel.clone()));
    cq.req_notify(false);
    let ends = [End::new(&hosts[0], true, None), End::over(&hosts[1], cq.clone(), cq, None)];
    connect(&hosts, &ends);
    let told = watch(&channel);
    let (data, sges) = ([hosts[0].sge(0, 8)], [hosts[1].sge(0, 8)]);
    ends[1].qp.post_recv(&RecvWr { wr_id: 1, sges: &sges }).unwrap();
    ends[0].qp.post_send(&send_wr(1, SendOpcode::Send, true, &data)).unwrap();
    deliver(&net, &hosts, &ends);
    assert_eq!(told.recv_timeout(PATIENCE), Ok(0));
}

/// A flush that is held uses up the event of the device's CQ, and not the application's.
#[test]
fn what_is_kept_from_the_program_does_not_use_up_its_event() {
    let net = Net::new(true);
    let hosts = [Host::new(&net, 0, 64, true), Host::new(&net, 1, 64, true)];
    let channel = CompChannel::new().unwrap();
    let cq = Cq::new(256, Some(channel.clone()));
    cq.set_cookie(9);
    let pair = || {
        let here = End::over(&hosts[1], cq.clone(), cq.clone(), None);
        let ends = [End::new(&hosts[0], true, None), here];
        connect(&hosts, &ends);
        ends
    };
    let (ends, failing) = (pair(), pair());
    let told = watch(&channel);
    let (there, here) = ([hosts[0].sge(0, 8)], [hosts[1].sge(0, 8)]);
    failing[1].qp.post_send(&send_wr(1, SendOpcode::Send, true, &here)).unwrap();
    cq.req_notify(false);
    net.time_out(hosts[1].id(0), failing[1].qp.qpn());
    net.tell(hosts[1].id(0), false);
    let began = Instant::now();
    while hosts[1].events.take().is_empty() {
        assert!(began.elapsed() < PATIENCE, "nobody was told of the failure");
        std::thread::yield_now();
    }
    assert!(told.try_recv().is_err(), "nothing has come for the program");
    ends[1].qp.post_recv(&RecvWr { wr_id: 2, sges: &here }).unwrap();
    ends[0].qp.post_send(&send_wr(2, SendOpcode::Send, true, &there)).unwrap();
    deliver(&net, &hosts, &ends);
    assert_eq!(told.recv_timeout(PATIENCE), Ok(9));
}

/// Two threads poll one CQ while a third lets the network work: nothing is lost or repeated.
#[test]
fn threads_that_poll_one_cq_see_each_completion_once() {
    let net = Net::new(true);
    let hosts = [Host::new(&net, 0, 64, false), Host::new(&net, 1, 64, false)];
    let ends = [End::new(&hosts[0], true, None), End::new(&hosts[1], true, None)];
    connect(&hosts, &ends);
    let (stop, (tell, told)) = (Arc::new(AtomicBool::new(false)), mpsc::channel());
    const COUNT: u64 = 400;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                net.execute(hosts[0].id(0), ends[0].qp.qpn());
                net.acknowledge(hosts[0].id(0), ends[0].qp.qpn());
                net.tell(hosts[0].id(0), false);
                std::thread::yield_now();
            }
        });
        for _ in 0..2 {
            let (cq, stop, tell): (Arc<Cq>, _, _) =
                (ends[0].cq.clone(), stop.clone(), tell.clone());
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let mut wc = [Default::default()];
                    if cq.poll(&mut wc).unwrap() == 1 {
                        tell.send(wc[0].wr_id).unwrap();
                    }
                    std::thread::yield_now();
                }
            });
        }
        let mut seen = vec![0u32; COUNT as usize];
        let (mut posted, mut done) = (0, 0);
        let sges = [hosts[0].sge(0, 8)];
        while done < COUNT {
            if posted < COUNT {
                let mut wr = send_wr(posted, SendOpcode::Write, true, &sges);
                (wr.remote_addr, wr.rkey) = (hosts[1].addr(0), hosts[1].keys.rkey);
                posted += u64::from(ends[0].qp.post_send(&wr).is_ok());
            }
            while let Ok(wr_id) = told.try_recv() {
                seen[wr_id as usize] += 1;
                done += 1;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(seen.iter().all(|n| *n == 1));
    });
}

/// Another thread delivers completions of a QP, out of the device's CQ, while the QP is
/// destroyed: they are not in the program's CQ once that is over.
#[test]
fn what_a_destroyed_qp_had_completed_does_not_come_afterwards() {
    let net = Net::new(true);
    let hosts = [Host::new(&net, 0, 64, false), Host::new(&net, 1, 64, false)];
    let ends = [End::new(&hosts[0], true, None), End::new(&hosts[1], true, None)];
    connect(&hosts, &ends);
    let cq = ends[0].cq.clone();
    let _another = End::over(&hosts[0], cq.clone(), cq.clone(), None);
    let sges = [hosts[0].sge(0, 8)];
    for wr_id in 0..2 {
        let mut wr = send_wr(wr_id, SendOpcode::Write, true, &sges);
        (wr.remote_addr, wr.rkey) = (hosts[1].addr(0), hosts[1].keys.rkey);
        ends[0].qp.post_send(&wr).unwrap();
        deliver(&net, &hosts, &ends);
    }
    let (has_them, taken) = mpsc::channel();
    let (is_gone, gone) = mpsc::channel::<()>();
    let polled = cq.clone();
    let poller = std::thread::spawn(move || {
        WHILE_DELIVERING.set(Some(Box::new(move || {
            has_them.send(()).unwrap();
            // Whoever destroys the QP waits for us. If not, that is seen within this time.
            let _ = gone.recv_timeout(Duration::from_millis(300));
        })));
        polled.poll(&mut [Wc::default()]).unwrap()
    });
    taken.recv_timeout(PATIENCE).unwrap();
    ends[0].qp.destroy();
    cq.purge(ends[0].qpn);
    let _ = is_gone.send(());
    poller.join().unwrap();
    assert_eq!(cq.take(&mut [Wc::default(); 4]).unwrap(), 0);
}

/// QPs come and go on the CQ of another, on the same NIC (whose CQ grows) and on a second one,
/// while one thread polls in vain and one sleeps: each completion comes once and in order, and
/// nobody sleeps for ever.
#[test]
fn qps_that_come_and_go_do_not_disturb_those_that_stay() {
    const COUNT: u64 = 3000;
    let net = Net::new(true);
    let hosts = [Host::new(&net, 0, 64, true), Host::new(&net, 1, 64, true)];
    let channel = CompChannel::new().unwrap();
    let ends = [End::new(&hosts[0], true, Some(channel.clone())), End::new(&hosts[1], true, None)];
    connect(&hosts, &ends);
    let told = watch(&channel);
    let (cq, stop) = (&ends[0].cq, AtomicBool::new(false));
    let until_stopped = |step: &dyn Fn()| {
        while !stop.load(Ordering::Relaxed) {
            step();
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| until_stopped(&|| deliver(&net, &hosts, &ends)));
        scope.spawn(|| until_stopped(&|| cq.drive()));
        scope.spawn(|| {
            let init = QpInit { wc_qpn: None, standby: false, ..ends[0].init.clone() };
            until_stopped(&|| {
                let make = |nic: usize| hosts[0].nics[nic].create_holding_qp(&init).unwrap();
                [0, 1, 0, 0, 1].map(make).iter().for_each(|qp| qp.destroy());
            });
        });
        let ended = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let (mut posted, mut done) = (0, 0);
            let sges = [hosts[0].sge(0, 8)];
            while done < COUNT {
                let mut wr = send_wr(posted, SendOpcode::Write, true, &sges);
                (wr.remote_addr, wr.rkey) = (hosts[1].addr(0), hosts[1].keys.rkey);
                while posted < COUNT && ends[0].qp.post_send(&wr).is_ok() {
                    posted += 1;
                    wr.wr_id = posted;
                }
                cq.req_notify(false);
                let got = ends[0].poll(cq);
                if got.is_empty() {
                    told.recv_timeout(PATIENCE).expect("an event");
                }
                for wc in got {
                    assert_eq!((wc.wr_id, wc.status), (done, 0));
                    done += 1;
                }
            }
        }));
        stop.store(true, Ordering::Relaxed);
        ended.unwrap();
    });
}
