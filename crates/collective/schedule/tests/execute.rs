//! Every operation, type, size, shape and health, on 2 to 16 ranks of 1 to 4 hosts: schedules keep
//! their promises, and what comes out in random orders of steps is what should.

mod cases;

use proptest::prelude::*;
use unbroken_schedule::cost::{time, Costs};
use unbroken_schedule::planner::plan;
use unbroken_schedule::verify::{check, expected, Machine, Traffic};
use unbroken_schedule::{Choice, Collective, Error, Folding, Operation, Plan, Topology};

fn case() -> impl Strategy<Value = (Topology, Collective, Choice)> {
    cases::topology().prop_flat_map(|topology| {
        cases::collective(topology.ranks()).prop_flat_map(move |collective| {
            let choice = cases::choice(topology.clone(), &collective);
            (Just(topology.clone()), Just(collective), choice)
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_schedule_does_what_it_should((topology, collective, choice) in case(), seed in any::<u64>()) {
        let plan = match Plan::new(&topology, &collective, choice.clone()) {
            Ok(plan) => plan,
            // dead NICs may leave no path between some hosts
            Err(Error::Parted { .. }) => return Ok(()),
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        };
        let schedule = plan.schedule();
        check(&schedule, &topology).map_err(|flaw| TestCaseError::fail(flaw.to_string()))?;
        for rank in 0..topology.ranks() {
            prop_assert_eq!(&plan.program(rank), &schedule.programs[rank], "alone as with the \
                                                                            others");
        }
        let inputs = cases::inputs(&collective, seed, choice.folding == Folding::Any);
        let want = expected(&collective, &topology, &inputs);
        for run in 0..3 {
            let room = 1 + run as usize * 2;
            let mut machine = Machine::new(&schedule, &topology, &inputs, room, seed.wrapping_add(run));
            machine.run().map_err(|flaw| TestCaseError::fail(flaw.to_string()))?;
            machine.compare(&want).map_err(|flaw| TestCaseError::fail(flaw.to_string()))?;
            prop_assert_eq!(machine.traffic(), &Traffic::of(&schedule, &topology));
        }
    }

    /// Whatever the planner chooses, and with reductions in order also for numbers whose sums
    /// depend on it.
    #[test]
    fn what_the_planner_chooses_does_what_it_should(
        (topology, collective) in cases::topology().prop_flat_map(|topology| {
            let collective = cases::collective(topology.ranks());
            (Just(topology), collective)
        }),
        in_order in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let folding = if in_order { Folding::InOrder } else { Folding::Any };
        let planned = match plan(&topology, &collective, &Costs::default(), folding) {
            Ok(planned) => planned,
            Err(Error::Parted { .. }) => return Ok(()),
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        };
        let schedule = planned.plan.schedule();
        check(&schedule, &topology).map_err(|flaw| TestCaseError::fail(flaw.to_string()))?;
        let inputs = cases::inputs(&collective, seed, !in_order);
        let mut machine = Machine::new(&schedule, &topology, &inputs, 1, seed);
        machine.run().map_err(|flaw| TestCaseError::fail(flaw.to_string()))?;
        let want = expected(&collective, &topology, &inputs);
        machine.compare(&want).map_err(|flaw| TestCaseError::fail(flaw.to_string()))?;
        prop_assert!(time(&schedule, &topology, &Costs::default()).is_ok());
    }

    #[test]
    fn no_rank_leaves_a_barrier_before_all_have_come(
        (topology, choice) in cases::topology().prop_flat_map(|topology| {
            let barrier = Collective::new(Operation::Barrier, unbroken_schedule::DataType::U8, false, topology.ranks());
            let choice = cases::choice(topology.clone(), &barrier.unwrap());
            (Just(topology), choice)
        }),
        late in any::<prop::sample::Index>(),
        seed in any::<u64>(),
    ) {
        let ranks = topology.ranks();
        let barrier = Collective::new(Operation::Barrier, unbroken_schedule::DataType::U8, false, ranks).unwrap();
        let Ok(plan) = Plan::new(&topology, &barrier, choice) else { return Ok(()) };
        let schedule = plan.schedule();
        let mut machine = Machine::new(&schedule, &topology, &vec![Vec::new(); ranks], 2, seed);
        machine.withhold(late.index(ranks));
        prop_assert!(machine.run().is_err());
        for rank in 0..ranks {
            prop_assert!(!machine.is_done(rank), "rank {rank} left");
        }
    }
}
