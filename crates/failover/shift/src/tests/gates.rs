//! The worker gets the gate of a queue pair that a program posts to without a pause.

use super::*;
use rustix::thread::{sched_getcpu, sched_setaffinity, CpuSet};

/// How often the busy thread takes the gate at most, for half a millisecond each, before another
/// thread has it. The lock passes to a waiting thread after about one millisecond.
const MOST_TURNS: u32 = 200;

/// Keeps the calling thread on one core.
fn stay_on(core: usize) {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(None, &cores).unwrap();
}

#[test]
fn a_gate_is_handed_to_a_thread_that_waits() {
    let w = World::unconnected(&[]);
    let core = sched_getcpu();
    let (turns, ends) = (AtomicU32::new(0), AtomicBool::new(false));
    std::thread::scope(|s| {
        s.spawn(|| {
            stay_on(core);
            while !ends.load(SeqCst) && turns.load(SeqCst) < 10 * MOST_TURNS {
                let _gate = w.from.gate();
                turns.fetch_add(1, SeqCst);
                let until = Instant::now() + Duration::from_micros(500);
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            }
        });
        s.spawn(|| {
            stay_on(core);
            while turns.load(SeqCst) == 0 {
                std::thread::yield_now();
            }
            let before = turns.load(SeqCst);
            let gate = w.from.gate_now();
            let waited = turns.load(SeqCst) - before;
            ends.store(true, SeqCst);
            assert!(gate.is_some());
            assert!(waited <= MOST_TURNS, "the other thread has had the gate {waited} times");
        });
    });
}
