//! Communicators that are split, while NICs fail, and by ranks of which not all do what they
//! should.

mod ranks;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use ranks::{check, options, Fabric};
use unbroken_coll::{Communicator, Counts, DataType, Operation, Options, ReduceOp};
use unbroken_fabric::DeviceKind;

const SUM: ReduceOp = ReduceOp::Sum;

/// A few operations, with results that only these ranks give.
fn exercise(comm: &Communicator, seed: u64) {
    for operation in [
        Operation::AllReduce { op: SUM, count: 5_000 },
        Operation::AllGather { counts: Counts::Equal(777) },
        Operation::ReduceScatter { op: SUM, counts: Counts::Equal(100) },
        Operation::Barrier,
    ] {
        check(comm, &operation, DataType::I32, false, seed);
    }
}

/// What each rank of a communicator calls itself, in the order of its ranks.
fn names(comm: &Communicator, mine: u8) -> Vec<u8> {
    let mut all = vec![0; comm.ranks()];
    comm.all_gather(DataType::U8, &[mine], &mut all).unwrap();
    all
}

#[test]
fn colours_part_ranks_and_keys_order_them() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b", "c", "d", "a"], &options(), |comm| {
        let me = comm.rank();
        // Evens from the last to the first, odds as they are.
        let (colour, key) = (me as u32 % 2, if me % 2 == 0 { -(me as i32) } else { 9 });
        let new = comm.split(Some(colour), key).unwrap().unwrap();
        assert_eq!(names(&new, me as u8), if me % 2 == 0 { vec![4, 2, 0] } else { vec![1, 3] });
        exercise(&new, 1);
        // The old one goes on, and can be split again; so can the new one.
        exercise(comm, 2);
        let pair = comm.split((me >= 3).then_some(7), 0).unwrap();
        assert_eq!(pair.is_some(), me >= 3);
        if let Some(pair) = &pair {
            assert_eq!(names(pair, me as u8), [3, 4]);
            exercise(pair, 3);
        }
        let alone = new.split(Some(new.rank() as u32), 0).unwrap().unwrap();
        assert_eq!(names(&alone, me as u8), [me as u8]);
        exercise(&alone, 4);
        assert!(comm.split(None, 0).unwrap().is_none(), "nobody takes part");
    });
}

/// A new communicator needs nothing of the old one.
#[test]
fn what_was_split_off_outlives_its_origin() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b", "c"], &options(), |comm| {
        let outer = comm.split(Some(0), 0).unwrap().unwrap();
        let inner = outer.split(Some(u32::from(outer.rank() == 0)), 0).unwrap().unwrap();
        drop(outer);
        exercise(&inner, 5);
        comm.abort();
        exercise(&inner, 6);
    });
}

#[test]
fn nics_die_while_communicators_are_split() {
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
                    std::thread::sleep(Duration::from_millis(20));
                    fabric.breaker.clear();
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            fabric.run(&["a", "b", "c", "d"], &options(), |comm| {
                for round in 0..12 {
                    let colour = (comm.rank() + round) % 4 / 2;
                    let new =
                        comm.split(Some(colour as u32), -(comm.rank() as i32)).unwrap().unwrap();
                    assert_eq!(new.ranks(), 2);
                    exercise(&new, round as u64);
                }
                over.store(true, Ordering::Relaxed);
            });
        });
    }
}

/// Options that give up soon.
fn hasty() -> Options {
    Options { timeout: Duration::from_secs(3), ask: Duration::from_millis(100), ..options() }
}

#[test]
fn ranks_that_do_not_come_are_named_by_the_deadline() {
    let fabric = Fabric::new(DeviceKind::Full);
    let over = Barrier::new(5);
    fabric.run(&["a", "b", "c", "d", "a"], &hasty(), |comm| {
        exercise(comm, 1);
        if ![1, 3].contains(&comm.rank()) {
            let began = Instant::now();
            let error = comm.split(Some(0), 0).err().unwrap().to_string();
            let want = "rank 1 and rank 3 have not asked for it";
            assert!(error.contains(want), "rank {}: {error}", comm.rank());
            // What a loaded machine may take on top is of no interest; that there is an end is.
            assert!(began.elapsed() < Duration::from_secs(20));
        }
        over.wait();
    });
}

/// One that comes late, but comes, is waited for; and one that came late is not among those who did
/// not.
#[test]
fn a_rank_that_comes_late_is_no_missing_one() {
    let fabric = Fabric::new(DeviceKind::Full);
    let over = Barrier::new(4);
    fabric.run(&["a", "b", "c", "d"], &hasty(), |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(600));
        }
        exercise(&comm.split(Some(0), 0).unwrap().unwrap(), 1);
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(600));
        }
        if comm.rank() != 2 {
            let error = comm.split(Some(0), 0).err().unwrap().to_string();
            assert!(
                error.ends_with("; rank 2 has not asked for it, or does not answer"),
                "{error}"
            );
        }
        over.wait();
    });
}

#[test]
fn a_gather_of_as_many_bytes_is_no_split() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b", "c"], &options(), |comm| {
        let error = if comm.rank() == 1 {
            comm.all_gather(DataType::U8, &[b' '; 512], &mut [0; 3 * 512]).unwrap_err().to_string()
        } else {
            comm.split(Some(0), 0).err().unwrap().to_string()
        };
        assert!(error.contains("rank 1 has AllGather of 512 U8, rank 0 has CommSplit"), "{error}");
    });
}

#[test]
fn a_rank_that_leaves_instead_is_named() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b", "c"], &options(), |comm| {
        comm.barrier().unwrap();
        if comm.rank() != 1 {
            let error = comm.split(Some(0), 0).err().unwrap().to_string();
            assert!(
                error.contains("rank 1 has left the communicator after 1 operations"),
                "{error}"
            );
        }
    });
}

#[test]
fn who_cannot_take_part_is_named_and_the_old_communicator_is_well() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b", "c", "d"], &options(), |comm| {
        // Of ranks 0 and 2 one has other options; the others are none the worse for it.
        let colour = comm.rank() as u32 % 2;
        let slots = if comm.rank() == 2 { 8 } else { 4 };
        let new = comm.split_with(Some(colour), 0, Options { slots, ..options() });
        match new {
            Ok(new) => {
                assert_eq!(colour, 1);
                exercise(&new.unwrap(), 1);
            }
            Err(error) => {
                let words = [
                    "rank 2 cannot take part in the split: its settings",
                    "8 slots",
                    "are not those of rank 0",
                ];
                assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
            }
        }
        // An address that is not of this machine.
        let at = if comm.rank() == 3 { [192, 0, 2, 1] } else { [127, 0, 0, 1] };
        let refused = comm.split_at(Some(0), 0, at.into(), options()).err().unwrap().to_string();
        assert!(
            refused.contains("rank 3 cannot take part in the split: listen at 192.0.2.1"),
            "{refused}"
        );
        let none = comm
            .split_with(Some(0), 0, Options { slots: 1, ..options() })
            .err()
            .unwrap()
            .to_string();
        assert!(none.contains("1 slots; 2 to 1024 are possible"), "{none}");
        exercise(comm, 2);
    });
}
