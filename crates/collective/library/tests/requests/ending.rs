//! Ranks that end a communicator while others wait for them: nobody waits for what cannot come.
//! And what two ranks do not agree about, where one of them has nothing to send or to receive.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use unbroken_coll::{Communicator, DataType, Error, Memory, Operation, Options, Request};
use unbroken_fabric::DeviceKind;

use crate::ranks::Fabric;
use crate::{begin, bytes, options, SUM};

/// Begins an operation that others do not begin.
type Begin = fn(&Communicator) -> Option<Request>;

/// Operations may stand still for so long: nothing here waits for that.
const TIMEOUT: Duration = Duration::from_secs(120);
const AT_ONCE: Duration = Duration::from_secs(TIMEOUT.as_secs() / 4);

fn patient() -> Options {
    Options { timeout: TIMEOUT, patience: TIMEOUT, ..options() }
}

/// Does something that must not wait for the timeout.
fn at_once<R>(what: &str, work: impl FnOnce() -> R) -> R {
    let began = Instant::now();
    let result = work();
    assert!(began.elapsed() < AT_ONCE, "{what}: {:?}", began.elapsed());
    result
}

fn left(what: Result<Memory, Error>, rank: usize) {
    let said = what.unwrap_err().to_string();
    assert!(said.contains(&format!("rank {rank} has left the communicator")), "{said}");
}

fn recv(comm: &Communicator, from: usize) -> Request {
    comm.begin_recv(DataType::U8, from, vec![0; 40]).unwrap()
}

fn send(comm: &Communicator, to: usize, len: usize) -> Request {
    comm.begin_send(DataType::U8, to, vec![7; len]).unwrap()
}

/// Before and after it has left, of one that has never heard of the channel; others go on.
#[test]
fn who_waits_for_one_that_has_left_hears_it_at_once_and_the_others_go_on() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.give(&["a", "b", "c"], &patient(), |comm| {
        comm.barrier().unwrap();
        match comm.rank() {
            0 => {
                at_once("begun before", || left(recv(&comm, 1).wait(), 1));
                at_once("begun after", || left(recv(&comm, 1).wait(), 1));
                at_once("a send", || left(send(&comm, 1, 1 << 20).wait(), 1));
                at_once("a small send", || left(send(&comm, 1, 4).wait(), 1));
                assert!(comm.failure().is_none());
                let any = comm.begin_recv_any(DataType::U8, 3, vec![0; 8]).unwrap();
                send(&comm, 2, 40).wait().unwrap();
                recv(&comm, 2).wait().unwrap();
                let error = at_once("from any", || any.wait().unwrap_err().to_string());
                assert!(error.contains("all other ranks have left"), "{error}");
            }
            2 => {
                recv(&comm, 0).wait().unwrap();
                send(&comm, 0, 40).wait().unwrap();
            }
            _ => {}
        }
        at_once("the end", || drop(comm));
    });
}

/// What was sent before stays good, also to one that asks for it when its sender has left.
#[test]
fn what_was_sent_before_the_end_is_received_after_it() {
    let fabric = Fabric::new(DeviceKind::Full);
    let gone = Barrier::new(2);
    fabric.give(&["a", "b"], &Options { timeout: Duration::from_secs(1), ..options() }, |comm| {
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            (0..3).for_each(|k| comm.send(DataType::U8, 0, &bytes(1, k, 50)).unwrap());
            drop(comm);
            gone.wait();
            return;
        }
        gone.wait();
        for k in 0..3 {
            let mut got = [0; 50];
            comm.recv(DataType::U8, 1, &mut got).unwrap();
            assert_eq!(got.to_vec(), bytes(1, k, 50));
        }
        at_once("one more than were sent", || left(recv(&comm, 1).wait(), 1));
    });
}

/// Whatever is pending at whichever end, all end at once.
#[test]
fn the_end_with_an_operation_pending_waits_for_nobody_who_ends_too() {
    let fabric = Fabric::new(DeviceKind::Full);
    let pending: [(&str, Begin); 6] = [
        ("one receives", |comm| (comm.rank() == 0).then(|| recv(comm, 1))),
        ("all receive", |comm| Some(recv(comm, (comm.rank() + 1) % 3))),
        ("all receive from any", |comm| {
            Some(comm.begin_recv_any(DataType::U8, 0, vec![0; 8]).unwrap())
        }),
        ("one sends", |comm| (comm.rank() == 0).then(|| send(comm, 1, 1 << 20))),
        ("another tag is sent", |comm| match comm.rank() {
            0 => Some(comm.begin_recv_tagged(DataType::U8, 1, 5, vec![0; 8]).unwrap()),
            1 => Some(comm.begin_send_tagged(DataType::U8, 0, 6, vec![0; 8]).unwrap()),
            _ => None,
        }),
        ("one reduces", |comm| (comm.rank() == 0).then(|| begin(comm, 0, 1000))),
    ];
    for (what, begin) in pending {
        fabric.give(&["a", "b", "c"], &patient(), |comm| {
            comm.barrier().unwrap();
            let request = begin(&comm);
            at_once(what, || drop(comm));
            if let Some(request) = request.filter(|_| what != "another tag is sent") {
                at_once(what, || request.wait().unwrap_err());
            }
        });
    }
}

#[test]
fn one_that_has_ended_begins_nothing_more() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b"], &patient(), |comm| {
        let sum = begin(comm, 0, 1000);
        comm.finalize();
        assert!(sum.wait().is_ok(), "what was begun before is done");
        let error = comm.barrier().unwrap_err().to_string();
        assert!(error.contains("make another"), "{error}");
        assert!(comm.begin_recv_any(DataType::U8, 0, vec![0; 8]).is_err());
    });
}

/// Nothing against something, both ways, and with tags: never bytes that nobody sent.
#[test]
fn nothing_and_something_are_not_the_same() {
    let fabric = Fabric::new(DeviceKind::Full);
    let all = |text: &str, sent: usize, awaited: usize| {
        let (sends, awaits) = (format!("SendRecv of {sent} U8"), format!("of {awaited} U8"));
        assert!(text.contains(&sends) && text.contains(&awaits), "{text}");
    };
    for (sent, awaited, tag) in [(0, 1, 0), (1, 0, 0), (0, 70_000, 4), (70_000, 0, 4)] {
        fabric.run(&["a", "b", "c"], &options(), |comm| {
            match comm.rank() {
                // What is sent may have left before the other end asks for it.
                0 => drop(comm.begin_send_tagged(DataType::U8, 1, tag, vec![1; sent]).unwrap()),
                1 => {
                    let memory = vec![5; awaited];
                    let request = comm.begin_recv_tagged(DataType::U8, 0, tag, memory).unwrap();
                    all(&request.wait().unwrap_err().to_string(), sent, awaited);
                }
                _ => {}
            }
            all(&comm.barrier().unwrap_err().to_string(), sent, awaited);
        });
    }
    // Nothing and nothing are, in their order among others.
    fabric.run(&["a", "b"], &options(), |comm| {
        for len in [0, 5, 0, 0, 70_000, 0] {
            match comm.rank() {
                0 => comm.send(DataType::U8, 1, &bytes(0, len, len)).unwrap(),
                _ => {
                    let mut got = vec![0; len];
                    comm.recv(DataType::U8, 0, &mut got).unwrap();
                    assert_eq!(got, bytes(0, len, len));
                }
            }
        }
        let empty = Operation::AllReduce { op: SUM, count: 0 };
        crate::ranks::check(comm, &empty, DataType::F32, true, 1);
    });
}

/// As many as memory holds may be begun before the other end asks for the first.
#[test]
fn thousands_are_sent_before_the_first_is_asked_for() {
    let fabric = Fabric::new(DeviceKind::Full);
    let many = 9_000;
    fabric.run(&["a", "b"], &Options { queue: many, ..options() }, |comm| {
        let other = 1 - comm.rank();
        let tag = |k: usize| (k % 3) as u64;
        let sends: Vec<Request> = (0..many)
            .map(|k| {
                let bytes = bytes(comm.rank(), k, 8);
                comm.begin_send_tagged(DataType::U8, other, tag(k), bytes).unwrap()
            })
            .collect();
        let receives: Vec<Request> = (0..many)
            .map(|k| comm.begin_recv_tagged(DataType::U8, other, tag(k), vec![0; 8]).unwrap())
            .collect();
        for (k, memory) in Request::wait_all(receives).unwrap().into_iter().enumerate() {
            assert_eq!(memory.into_output(), bytes(other, k, 8));
        }
        Request::wait_all(sends).unwrap();
    });
}
