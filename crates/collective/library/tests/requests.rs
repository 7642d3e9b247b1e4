//! Operations that are begun and waited for later, in groups and between two ranks, while NICs
//! fail.

#[path = "requests/ending.rs"]
mod ending;
mod ranks;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use ranks::{options, Fabric};
use unbroken_coll::{
    Communicator, Completions, DataType, Error, Group, Memory, Operation, Options, ReduceOp,
    Request,
};
use unbroken_fabric::DeviceKind;

const SUM: ReduceOp = ReduceOp::Sum;

/// Says so when it is dropped, also by a panic: those who break NICs meanwhile end.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What a rank gives in a round.
fn bytes(rank: usize, round: usize, count: usize) -> Vec<u8> {
    (0..count).map(|k| (k * 3 + rank * 5 + round) as u8).collect()
}

fn begin(comm: &Communicator, round: usize, count: usize) -> Request {
    let operation = Operation::AllReduce { op: SUM, count: count as u64 };
    comm.begin(operation, DataType::U8, Memory::InPlace(bytes(comm.rank(), round, count))).unwrap()
}

fn check(comm: &Communicator, round: usize, got: &[u8]) {
    let all = |k: usize| {
        (0..comm.ranks()).fold(0u8, |sum, rank| sum.wrapping_add((k * 3 + rank * 5 + round) as u8))
    };
    let wrong = got.iter().enumerate().position(|(k, byte)| *byte != all(k));
    assert_eq!(wrong, None, "rank {} round {round}", comm.rank());
}

#[test]
fn many_are_under_way_while_nics_fail() {
    for device in [DeviceKind::Full, DeviceKind::Plain] {
        let fabric = Fabric::new(device);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for k in 0.. {
                    if over.load(Ordering::Relaxed) {
                        return;
                    }
                    fabric.breaker.set(
                        ["nic a/1 dead", "cable b/0 cut", "nic c/2 down", "wqe-error a/3"][k % 4],
                    );
                    std::thread::sleep(Duration::from_millis(30));
                    fabric.breaker.clear();
                    std::thread::sleep(Duration::from_millis(30));
                }
            });
            fabric.run(&["a", "b", "c", "c"], &options(), |comm| {
                let _over = Over(&over);
                let (next, last) = ((comm.rank() + 1) % 4, (comm.rank() + 3) % 4);
                let mut waiting = VecDeque::new();
                for round in 0..150 {
                    let count = 20_000 + round;
                    let sent = comm
                        .begin_send(DataType::U8, next, bytes(comm.rank(), round, count))
                        .unwrap();
                    let came = comm.begin_recv(DataType::U8, last, vec![0; count]).unwrap();
                    waiting.push_back((round, begin(comm, round, count), sent, came));
                    if waiting.len() > 5 || round == 149 {
                        let (round, sum, sent, came) = waiting.pop_front().unwrap();
                        check(comm, round, &sum.wait().unwrap().into_output());
                        let came = Request::wait_all(vec![sent, came])
                            .unwrap()
                            .pop()
                            .unwrap()
                            .into_output();
                        assert!(
                            came == bytes(last, round, 20_000 + round),
                            "rank {} round {round}",
                            comm.rank()
                        );
                    }
                }
                for (round, sum, sent, came) in waiting {
                    check(comm, round, &sum.wait().unwrap().into_output());
                    assert!(Request::wait_all(vec![sent, came]).is_ok());
                }
            });
        });
    }
}

/// Who computes does not drive; the communicator's thread does, and sleeps between looks.
#[test]
fn nobody_need_wait_for_what_was_begun() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b"], &options(), |comm| {
        let began = Instant::now();
        let request = begin(comm, 1, 500_000);
        while comm.counters().operations < 1 {
            assert!(began.elapsed() < Duration::from_secs(20), "nothing goes on");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(request.sleep(Duration::ZERO).unwrap(), "it is over");
        check(comm, 1, &request.wait().unwrap().into_output());
        // What is asked for while that thread sleeps wakes it: many in a row take less than its
        // naps.
        for round in 0..20 {
            let request = begin(comm, round, 100);
            assert!(request.sleep(Duration::from_secs(20)).unwrap());
            check(comm, round, &request.wait().unwrap().into_output());
        }
    });
}

/// Waiting holds nothing that others need: an operation is begun, looked at and ended while other
/// threads wait for one that cannot end yet.
#[test]
fn several_threads_wait_for_one_request_and_hold_up_nobody() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b"], &options(), |comm| {
        let early = comm.begin_recv(DataType::U8, 1 - comm.rank(), vec![0; 1000]).unwrap();
        std::thread::scope(|scope| {
            let waits: Vec<_> = (0..3)
                .map(|k| match k {
                    0 => scope.spawn(|| early.drive(Duration::from_secs(20))),
                    1 => scope.spawn(|| early.sleep(Duration::from_secs(20)).unwrap()),
                    _ => scope.spawn(|| early.drive(Duration::MAX)),
                })
                .collect();
            for round in 0..10 {
                assert!(!early.test().unwrap() && !early.drive(Duration::from_millis(1)));
                check(comm, round, &begin(comm, round, 5_000).wait().unwrap().into_output());
            }
            // Only now may they end.
            comm.barrier().unwrap();
            comm.send(DataType::U8, 1 - comm.rank(), &bytes(comm.rank(), 7, 1000)).unwrap();
            assert!(waits.into_iter().all(|wait| wait.join().unwrap()));
        });
        assert!(early.wait().unwrap().into_output() == bytes(1 - comm.rank(), 7, 1000));
    });
}

#[test]
fn a_queue_tells_once_of_each_that_is_over_whatever_came_of_it() {
    let (fabric, asked) = (Fabric::new(DeviceKind::Full), Barrier::new(2));
    fabric.run(&["a", "b"], &options(), |comm| {
        let queue = Completions::new();
        let sums: Vec<Request> = (0..20).map(|round| begin(comm, round, 3_000)).collect();
        sums.iter().zip(0..).for_each(|(request, tag)| request.notify(&queue, tag));
        // Nobody drives: the communicator's thread does. One channel's operations end in their
        // order.
        assert_eq!(
            (0..20).map(|_| queue.take(Duration::from_secs(20)).unwrap()).collect::<Vec<_>>(),
            Vec::from_iter(0..20)
        );
        sums[3].notify(&queue, 99);
        assert_eq!(queue.take(Duration::ZERO), Some(99), "it is over already");
        for (round, sum) in sums.into_iter().enumerate() {
            check(comm, round, &sum.wait().unwrap().into_output());
        }
        comm.barrier().unwrap();
        // Of those that the end of the communicator ends, too.
        let never = comm.begin_recv(DataType::U8, 1 - comm.rank(), vec![0; 8]).unwrap();
        never.notify(&queue, 7);
        assert_eq!(queue.take(Duration::ZERO), None);
        asked.wait();
        if comm.rank() == 0 {
            comm.abort();
        }
        assert_eq!(queue.take(Duration::from_secs(20)), Some(7));
        assert!(matches!(never.wait(), Err(Error::Broken(_))));
        assert_eq!(queue.take(Duration::ZERO), None);
    });
}

#[test]
fn a_timeout_that_was_changed_is_the_one_that_counts() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b"], &Options { timeout: Duration::from_secs(600), ..options() }, |comm| {
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            let never = comm.begin_recv(DataType::U8, 1, vec![0; 8]).unwrap();
            comm.set_timeout(Duration::from_secs(1));
            let error = never.wait().unwrap_err();
            assert!(error.to_string().contains("1 s"), "{error}");
        } else {
            let began = Instant::now();
            while comm.failure().is_none() {
                assert!(began.elapsed() < Duration::from_secs(60));
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
}

/// Receives are asked for in another order than sends, before and after what is meant has come,
/// with other tags and sizes; some while NICs fail.
#[test]
fn what_is_sent_with_a_tag_is_received_by_it() {
    let fabric = Fabric::new(DeviceKind::Full);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for k in 0.. {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                fabric.breaker.set(["nic a/1 dead", "cable b/0 cut", "nic b/2 down"][k % 3]);
                std::thread::sleep(Duration::from_millis(30));
                fabric.breaker.clear();
                std::thread::sleep(Duration::from_millis(30));
            }
        });
        fabric.run(&["a", "b"], &options(), |comm| {
            let _over = Over(&over);
            let size = |tag: u64| 1 + 9_000 * tag as usize;
            for round in 0..40 {
                if comm.rank() == 0 {
                    let send = |tag| {
                        comm.begin_send_tagged(
                            DataType::U8,
                            1,
                            tag,
                            bytes(0, tag as usize, size(tag)),
                        )
                    };
                    let sends: Vec<Request> = [3, 1, 2, 1, 0].map(|tag| send(tag).unwrap()).into();
                    Request::wait_all(sends).unwrap();
                    comm.barrier().unwrap();
                } else {
                    if round % 2 == 0 {
                        // It has come, or is on its way, before anybody asks.
                        std::thread::yield_now();
                    }
                    let recv = |tag| {
                        (
                            tag,
                            comm.begin_recv_tagged(DataType::U8, 0, tag, vec![0; size(tag)])
                                .unwrap(),
                        )
                    };
                    for (tag, request) in [0, 1, 2, 3, 1].map(recv) {
                        let got = request.wait().unwrap().into_output();
                        assert!(
                            got == bytes(0, tag as usize, size(tag)),
                            "round {round}, tag {tag}"
                        );
                    }
                    comm.barrier().unwrap();
                }
            }
        });
    });
}

#[test]
fn a_tag_that_nobody_asks_for_is_an_error_that_names_both() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b"], &Options { timeout: Duration::from_secs(2), ..options() }, |comm| {
        let error = if comm.rank() == 0 {
            comm.begin_send_tagged(DataType::U8, 1, 5, vec![0; 10]).unwrap().wait().unwrap();
            comm.barrier().unwrap_err().to_string()
        } else {
            comm.begin_recv_tagged(DataType::U8, 0, 6, vec![0; 10])
                .unwrap()
                .wait()
                .unwrap_err()
                .to_string()
        };
        assert!(error.contains("from 0 to 1, tag 6") || error.contains("stands still"), "{error}");
    });
}

#[test]
fn who_sends_first_is_received_from() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(
        &["a", "b", "c"],
        &Options { timeout: Duration::from_secs(5), ..options() },
        |comm| {
            const ROUNDS: usize = 20;
            if comm.rank() > 0 {
                for round in 0..ROUNDS {
                    let tagged = |tag, count| {
                        comm.begin_send_tagged(
                            DataType::U8,
                            0,
                            tag,
                            bytes(comm.rank(), round, count),
                        )
                    };
                    // What is received by its rank is not taken by those who ask for any.
                    let sends = vec![tagged(9, 3_000).unwrap(), tagged(1, 70_000).unwrap()];
                    Request::wait_all(sends).unwrap();
                }
                comm.barrier().unwrap();
                // Of those who have left nothing comes either, which is another error.
                comm.barrier().unwrap();
                return;
            }
            let mut next = [0; 3];
            for round in 0..ROUNDS {
                let named: Vec<Request> = (1..3)
                    .map(|from| {
                        comm.begin_recv_tagged(DataType::U8, from, 9, vec![0; 3_000]).unwrap()
                    })
                    .collect();
                let any: Vec<Request> = (0..2)
                    .map(|_| comm.begin_recv_any(DataType::U8, 1, vec![0; 70_000]).unwrap())
                    .collect();
                let queue = Completions::new();
                any.iter().zip(0..).for_each(|(request, tag)| request.notify(&queue, tag));
                assert!((0..2).all(|_| queue.take(Duration::from_secs(20)).is_some()));
                for request in any {
                    assert!(request.test().unwrap());
                    let from = request.source().unwrap();
                    assert!(
                        request.wait().unwrap().into_output() == bytes(from, next[from], 70_000)
                    );
                    next[from] += 1;
                }
                for (k, request) in named.into_iter().enumerate() {
                    assert_eq!(request.source(), None);
                    assert!(request.wait().unwrap().into_output() == bytes(k + 1, round, 3_000));
                }
            }
            comm.barrier().unwrap();
            // Nothing more comes: an error of this operation alone.
            let began = Instant::now();
            let never = comm.begin_recv_any(DataType::U8, 1, vec![0; 8]).unwrap();
            comm.set_timeout(Duration::from_millis(300));
            let error = never.wait().unwrap_err().to_string();
            assert!(error.contains("no rank has sent anything with tag 1"), "{error}");
            assert!(began.elapsed() < Duration::from_secs(20) && comm.failure().is_none());
            // One that is given up takes nothing, and holds up nobody's end.
            drop(comm.begin_recv_any(DataType::U8, 1, vec![0; 8]).unwrap());
            comm.set_timeout(Duration::from_secs(60));
            comm.barrier().unwrap();
        },
    );
}

#[test]
fn a_request_that_is_given_up_is_done_all_the_same() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b", "c"], &options(), |comm| {
        (0..10).for_each(|round| drop(begin(comm, round, 50_000)));
        check(comm, 10, &begin(comm, 10, 50_000).wait().unwrap().into_output());
        assert_eq!(comm.counters().operations, 11);
    });
}

#[test]
fn what_finds_no_room_is_refused_and_nothing_of_its_group_is_begun() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b"], &Options { queue: 3, ..options() }, |comm| {
        if comm.rank() == 0 {
            let waits: Vec<Request> =
                (0..3).map(|_| comm.begin_recv(DataType::U8, 1, vec![0; 9]).unwrap()).collect();
            let full = comm.begin_recv(DataType::U8, 1, vec![0; 9]).err().unwrap();
            assert!(matches!(full, Error::Full(3)), "{full}");
            let mut group = Group::new();
            group.add(comm, Operation::Barrier, DataType::U8, Memory::InPlace(Vec::new())).unwrap();
            group.recv(comm, DataType::U8, 1, vec![0; 9]).unwrap();
            assert!(group.begin().is_err());
            comm.barrier().unwrap();
            for (k, memory) in Request::wait_all(waits).unwrap().into_iter().enumerate() {
                assert_eq!(memory.into_output(), bytes(1, k, 9));
            }
        } else {
            comm.barrier().unwrap();
            (0..3).for_each(|k| comm.send(DataType::U8, 0, &bytes(1, k, 9)).unwrap());
        }
        assert_eq!(comm.counters().operations, 4);
    });
}

/// What two ranks exchange needs no third, and no operation of all waits for it.
#[test]
fn two_ranks_wait_for_nobody_else() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b", "c"], &options(), |comm| {
        let early =
            (comm.rank() == 1).then(|| comm.begin_recv(DataType::U8, 0, vec![0; 70_000]).unwrap());
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            comm.send(DataType::U8, 1, &bytes(0, 0, 70_000)).unwrap();
        }
        if let Some(early) = early {
            assert!(early.wait().unwrap().into_output() == bytes(0, 0, 70_000));
        }
        ranks::check(comm, &Operation::AllReduce { op: SUM, count: 1000 }, DataType::F32, true, 1);
    });
}

/// It has used all that was sent to it, but that it has was lost with its paths: nobody is there to
/// say it again.
#[test]
fn nobody_waits_for_a_word_of_one_who_has_left() {
    let fabric = Fabric::new(DeviceKind::Full);
    let patience = Duration::from_secs(30);
    let began = Instant::now();
    fabric.run(&["a", "b"], &Options { patience, ..options() }, |comm| {
        let exchange = |round| match comm.rank() {
            0 => comm.send(DataType::U8, 1, &bytes(0, round, 100)).unwrap(),
            _ => {
                let mut got = [0; 100];
                comm.recv(DataType::U8, 0, &mut got).unwrap();
                assert_eq!(got.to_vec(), bytes(0, round, 100));
            }
        };
        exchange(0);
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            (0..4).for_each(|rail| fabric.breaker.set(&format!("loss b/{rail} tx 100%")));
        }
        exchange(1);
    });
    assert!(began.elapsed() < patience / 2, "rank 0 has waited for {:?}", began.elapsed());
}

/// One that was stopped, say, is waited for as long as an operation may stand still, and not for as
/// long as one would wait for all to come. What has reached it is there.
#[test]
fn nobody_waits_long_for_one_who_takes_nothing() {
    let fabric = Fabric::new(DeviceKind::Full);
    let (timeout, patience) = (Duration::from_secs(1), Duration::from_secs(60));
    let gone = Barrier::new(2);
    fabric.give(&["a", "b"], &Options { timeout, patience, ..options() }, |comm| {
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            comm.send(DataType::U8, 1, &bytes(0, 1, 100)).unwrap();
            let began = Instant::now();
            drop(comm);
            let waited = began.elapsed();
            gone.wait();
            assert!((timeout..patience / 2).contains(&waited), "it has waited for {waited:?}");
        } else {
            gone.wait();
            let mut got = [0; 100];
            comm.recv(DataType::U8, 0, &mut got).unwrap();
            assert_eq!(got.to_vec(), bytes(0, 1, 100));
        }
    });
}

#[test]
fn who_aborts_is_named_to_all_and_what_is_under_way_ends() {
    let fabric = Fabric::new(DeviceKind::Full);
    let begun = Barrier::new(3);
    fabric.run(&["a", "b", "c"], &options(), |comm| {
        let request = comm.begin_recv(DataType::U8, (comm.rank() + 1) % 3, vec![0; 100]).unwrap();
        // Nobody aborts before all have begun: who comes later is refused.
        begun.wait();
        if comm.rank() == 2 {
            comm.abort();
        }
        let error = request.wait().unwrap_err().to_string();
        assert!(error.contains("rank 2 has aborted the communicator"), "{error}");
        assert!(comm.failure().is_some() && comm.barrier().is_err(), "it stays broken");
    });
}
