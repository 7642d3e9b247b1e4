//! A run of the simulator small enough for every test run; `sim` itself runs as many schedules as
//! one asks for.

use unbroken_sim::{run, Mutant, Stats};

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
