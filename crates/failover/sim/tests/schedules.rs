//! A run of the simulator small enough for every test run; `sim` itself runs as many schedules as
//! one asks for.

use unbroken_sim::flush::Flush;
use unbroken_sim::{run, run_with, Mutant, Stats};

#[test]
fn a_thousand_schedules_keep_every_promise() {
    let mut stats = Stats::default();
    for seed in 1..=1_000 {
        match run(seed, Mutant::None, false) {
            Ok(s) => stats.add(&s),
            Err(violation) => panic!(
                "schedule {seed}: {violation}; see it: sim --seed {seed} --schedules 1 --trace"
            ),
        }
    }
    assert!(stats.below_floor().is_empty(), "too little happened: {:?}", stats.below_floor());
    assert!(stats.odd_flushes > 1_000 && stats.ended_flushes > 300, "{stats:?}");
}

/// No device is trusted to flush: each way to do so alone.
#[test]
fn however_plain_devices_flush_nothing_is_lost() {
    for flush in Flush::ALL {
        let mut stats = Stats::default();
        for seed in 1..=300 {
            match run_with(seed, Mutant::None, Some(flush), false) {
                Ok(s) => stats.add(&s),
                Err(violation) => panic!(
                    "schedule {seed}: {violation}; see it: sim --seed {seed} --schedules 1 --trace \
                     --flush {}",
                    flush.name()
                ),
            }
        }
        let (odd, ended) = (stats.odd_flushes, stats.ended_flushes);
        let (is_odd, ends) = match flush {
            Flush::Whole | Flush::SlowPoll => (false, false),
            Flush::SendsFirst | Flush::Parked => (true, false),
            _ => (true, true),
        };
        assert!(!is_odd || odd > 50, "{flush:?}: {odd} flushes came otherwise");
        assert!(!ends || ended > 50, "{flush:?}: {ended} flushes were ended");
    }
}

/// In these a path is dead while a QP sends for the first time, and comes back after the last try
/// of its transport: the QP was given up, for nothing had ever come through.
#[test]
fn a_path_that_comes_back_late_ends_no_qp() {
    for seed in [27_306, 53_954, 69_980] {
        for flush in Flush::ALL.map(Some).into_iter().chain([None]) {
            let played = run_with(seed, Mutant::None, flush, false);
            assert!(played.is_ok(), "schedule {seed} {flush:?}: {played:?}");
        }
    }
}

#[test]
fn a_schedule_is_its_seed() {
    for seed in [3, 77, 4_711] {
        assert_eq!(run(seed, Mutant::None, false), run(seed, Mutant::None, false));
    }
}

#[test]
#[cfg(feature = "mutants")]
fn every_rule_that_is_left_out_is_noticed() {
    std::panic::set_hook(Box::new(|_| {})); // a mutant may also panic
    for &mutant in Mutant::ALL {
        let fails = |seed| {
            std::panic::catch_unwind(|| run(seed, mutant, false)).map_or(true, |r| r.is_err())
        };
        assert!((1..=10_000).any(fails), "{} is not noticed", mutant.name());
    }
}
