//! Model checking of what ships: two [`unbroken_failover_protocol::Executor`]s, each over a small
//! device, against the strongest adversary. stateright visits every state of many small cases. In
//! each no promise is broken ([`common`] has them), and from each the work can come to its end
//! without another fault: it is done, or both ends have their error, or the one that has survived a
//! crash has.
//!
//! What is modelled: control messages that are lost, late, repeated and out of order; paths that
//! die, in one direction or both; NICs that die; a process that dies; devices that take their time
//! to stop a QP or cannot; suspicions of all kinds without cause; programs that SEND, WRITE, READ,
//! FENCE, mark a WRITE NO_REPLAY, use atomics, and post receives late; exact counts and counts of
//! receives only; planned switches by one end or both, to one path or several, among all that.

mod case;
mod common;
mod device;
mod graph;
mod walk;
mod world;

use case::*;
use graph::explore;
use unbroken_failover_protocol::message::RefuseReason;
use unbroken_failover_protocol::FailCause;
#[cfg(feature = "mutants")]
use unbroken_failover_protocol::Mutation;

type Named = (&'static str, Case);

/// Both ends SEND.
fn both() -> [Program; 2] {
    [Program::new(1, &[SEND]), Program::new(1, &[SEND])]
}

/// One end works, the other takes.
fn one(recvs: u8, turns: &[Turn]) -> [Program; 2] {
    [Program::new(0, turns), Program::new(recvs, &[])]
}

fn refused(reason: RefuseReason) -> FailCause {
    FailCause::Refused(reason)
}

/// Errors where something must not be replayed.
fn unsafe_replay() -> Vec<FailCause> {
    vec![FailCause::UnsafeReplay, refused(RefuseReason::UnsafeReplay)]
}

/// Errors where a QP cannot be stopped.
fn cannot_stop() -> Vec<FailCause> {
    vec![FailCause::CannotQuiesce, refused(RefuseReason::Failed)]
}

fn passive() -> Vec<Named> {
    let counted = [WRITE, SEND, WRITE];
    let fenced = [WRITE, READ, FENCED_SEND];
    vec![
        ("simultaneous starts", Case { doubts: 1, cuts: 1, ..Case::new(2, both()) }),
        ("three paths", Case { cuts: 1, doubts: 1, ..Case::new(3, one(1, &[SEND])) }),
        ("three paths, two die", Case { cuts: 2, ..Case::new(3, both()) }),
        ("exact counts", Case { cuts: 1, doubts: 1, ..Case::new(2, one(1, &[WRITE, SEND])) }),
        (
            "receives counted",
            Case { cuts: 1, doubts: 1, exact: [false; 2], ..Case::new(2, one(1, &counted)) },
        ),
        ("one counts receives", Case { doubts: 1, exact: [true, false], ..Case::new(2, both()) }),
        ("READ and FENCE", Case { cuts: 1, doubts: 1, ..Case::new(2, one(1, &fenced)) }),
        (
            "FENCED WRITE waits",
            Case { doubts: 1, lazy: true, ..Case::new(2, one(0, &[READ, FENCED_WRITE])) },
        ),
        (
            "atomics and NO_REPLAY",
            Case {
                cuts: 1,
                doubts: 1,
                causes: unsafe_replay(),
                ..Case::new(2, one(0, &[FETCH_ADD, WRITE_ONCE]))
            },
        ),
    ]
}

fn failing() -> Vec<Named> {
    let work = one(1, &[SEND, WRITE]);
    let doubts = |kind| Case {
        nic_deaths: 1,
        doubts: 1,
        doubt_kinds: vec![kind],
        ..Case::new(2, one(1, &[SEND]))
    };
    vec![
        (
            "one-port_path death",
            Case { cuts: 1, whole_cuts: false, route: true, ..Case::new(2, work.clone()) },
        ),
        (
            "one-port_path deaths",
            Case { cuts: 2, whole_cuts: false, route: true, ..Case::new(3, one(1, &[SEND])) },
        ),
        ("NICs die", Case { nic_deaths: 2, ..Case::new(3, one(1, &[SEND])) }),
        ("a probe is lost", doubts(Doubt::Probe)),
        ("a post fails", doubts(Doubt::Post)),
        ("a QP is wedged", doubts(Doubt::Wedged)),
        ("slow to stop", Case { slow: [true, false], doubts: 1, ..Case::new(2, work.clone()) }),
        (
            "cannot be stopped",
            Case {
                stuck: Some((0, 1)),
                cuts: 2,
                causes: cannot_stop(),
                ..Case::new(3, one(1, &[SEND]))
            },
        ),
        ("crash", Case { crashes: Some(1), doubts: 1, ..Case::new(2, work.clone()) }),
        ("crash of the one that works", Case { crashes: Some(0), doubts: 1, ..Case::new(2, work) }),
        (
            "crash with a successor",
            Case { crashes: Some(1), successor: true, cuts: 1, ..Case::new(2, one(1, &[SEND])) },
        ),
    ]
}

fn planned() -> Vec<Named> {
    // The first SEND waits for a receive that is posted when the peer's SEND is complete: a fence
    // never sees the end of it.
    let rnr = [Program::new(1, &[SEND]), Program::new(0, &[SEND, RECV.once_done(1)])];
    let once = [Program::new(0, &[FETCH_ADD]), Program::new(0, &[WRITE_ONCE])];
    vec![
        ("planned, RNR", Case { plans: [1, 1], ..Case::new(2, rnr) }),
        ("planned, nothing replayed", Case { plans: [1, 1], ..Case::new(2, once) }),
        ("planned twice", Case { plans: [2, 0], ..Case::new(2, both()) }),
        ("planned to two paths", Case { plans: [1, 1], ..Case::new(3, one(1, &[SEND])) }),
        ("planned, a path dies", Case { plans: [1, 0], cuts: 1, ..Case::new(3, one(1, &[SEND])) }),
        (
            "planned, a suspicion",
            Case { plans: [1, 0], doubts: 1, ..Case::new(2, one(1, &[SEND])) },
        ),
        ("planned, an atomic, a suspicion", planned_atomic([1, 0])),
        ("planned, receives counted", planned_counted()),
        ("planned, cannot be stopped", planned_stuck()),
        (
            "planned, crash",
            Case { plans: [1, 0], crashes: Some(1), ..Case::new(2, one(1, &[SEND])) },
        ),
    ]
}

fn planned_atomic(plans: [u8; 2]) -> Case {
    Case { plans, doubts: 1, causes: unsafe_replay(), ..Case::new(2, one(0, &[FETCH_ADD])) }
}

fn planned_counted() -> Case {
    Case { plans: [1, 0], doubts: 1, exact: [false; 2], ..Case::new(2, one(1, &[WRITE, SEND])) }
}

fn planned_stuck() -> Case {
    Case {
        plans: [1, 1],
        stuck: Some((1, 1)),
        causes: cannot_stop(),
        ..Case::new(2, one(1, &[SEND]))
    }
}

/// Those that take long.
fn large() -> Vec<Named> {
    let work = one(1, &[SEND, WRITE]);
    let fenced = [WRITE, READ, FENCED_SEND];
    let mixed = [Program::new(0, &[FETCH_ADD, SEND]), Program::new(1, &[WRITE_ONCE])];
    let stall_or_wedged = vec![Doubt::Stall, Doubt::Wedged];
    let late = [Program::new(1, &[SEND, SEND.once_received(1)]), Program::new(2, &[SEND])];
    vec![
        (
            "three paths, two die, a suspicion",
            Case { cuts: 2, doubts: 1, ..Case::new(3, one(1, &[SEND])) },
        ),
        (
            "two suspicions",
            Case { doubts: 2, doubt_kinds: stall_or_wedged, cuts: 1, ..Case::new(2, work.clone()) },
        ),
        ("an answer waited for", Case { cuts: 1, doubts: 1, ..Case::new(2, late) }),
        (
            "READ and FENCE, sends wait",
            Case { cuts: 1, doubts: 1, lazy: true, ..Case::new(2, one(1, &fenced)) },
        ),
        ("NICs die under both", Case { nic_deaths: 2, ..Case::new(3, both()) }),
        (
            "one-port_path death, a suspicion",
            Case {
                cuts: 1,
                whole_cuts: false,
                route: true,
                doubts: 1,
                ..Case::new(2, work.clone())
            },
        ),
        (
            "crash with a successor, a suspicion",
            Case { crashes: Some(1), successor: true, doubts: 1, ..Case::new(2, work.clone()) },
        ),
        ("planned, three paths, nothing replayed", Case { plans: [1, 1], ..Case::new(3, mixed) }),
        ("planned, each twice", Case { plans: [2, 2], ..Case::new(2, one(1, &[SEND])) }),
        (
            "planned by both, a path dies",
            Case { plans: [1, 1], cuts: 1, ..Case::new(3, one(1, &[SEND])) },
        ),
        (
            "planned, a NIC dies, a post fails",
            Case {
                plans: [1, 0],
                nic_deaths: 1,
                doubts: 1,
                doubt_kinds: vec![Doubt::Post],
                ..Case::new(2, one(1, &[SEND]))
            },
        ),
        (
            "planned, one-port_path death",
            Case {
                plans: [1, 0],
                cuts: 1,
                whole_cuts: false,
                route: true,
                ..Case::new(2, one(1, &[SEND]))
            },
        ),
        (
            "planned, slow to stop",
            Case { plans: [1, 1], doubts: 1, slow: [true; 2], ..Case::new(2, one(1, &[SEND])) },
        ),
        ("planned by both, an atomic, a suspicion", planned_atomic([1, 1])),
        ("planned by both, crash", Case { plans: [1, 1], crashes: Some(1), ..Case::new(2, work) }),
    ]
}

fn check(cases: Vec<Named>) {
    for (name, case) in cases {
        let found = explore(name, case);
        assert_eq!(found.wrong, None, "{name}");
        assert!(found.missing.is_empty(), "{name}: never {:?}", found.missing);
    }
}

#[test]
fn passive_switches_keep_every_promise_and_come_to_an_end() {
    check(passive());
}

#[test]
fn devices_and_processes_that_fail_break_no_promise() {
    check(failing());
}

#[test]
fn planned_switches_keep_every_promise_and_come_to_an_end() {
    check(planned());
}

#[test]
#[ignore = "takes minutes"]
fn larger_cases_keep_every_promise_and_come_to_an_end() {
    check(large());
}

/// The case of that name with one rule left out is wrong.
fn notices(name: &str, leave_out: impl Fn(Case) -> Case) {
    let all = [passive(), failing(), planned()].concat();
    let (_, case) = all.into_iter().find(|(n, _)| *n == name).expect("there is such a case");
    let found = explore(name, leave_out(case));
    println!("  {}", found.wrong.as_deref().unwrap_or("nothing is wrong"));
    assert!(found.wrong.is_some(), "{name} does not notice");
}

/// What the name of a state leaves out makes no difference: each is reached on many ways.
#[test]
fn states_of_one_name_behave_alike() {
    let few = [
        "exact counts",
        "a post fails",
        "crash",
        "planned, a suspicion",
        "planned, cannot be stopped",
        "planned, crash",
    ];
    let all = [passive(), failing(), planned()].concat();
    for (name, case) in all.into_iter().filter(|(name, _)| few.contains(name)) {
        let compared = walk::check_names(&case);
        println!("{name}: compared {compared} times");
        assert!(compared > 1_000, "{name}");
    }
}

#[test]
#[ignore = "takes minutes"]
fn states_of_one_name_behave_alike_in_all_cases() {
    for (name, case) in [passive(), failing(), planned()].concat() {
        println!("{name}: compared {} times", walk::check_names(&case));
    }
}

#[test]
#[cfg(feature = "mutants")]
fn every_rule_that_is_left_out_is_noticed() {
    for (mutation, case) in [
        (Mutation::NoCounts, "exact counts"),
        (Mutation::Early, "three paths"),
        (Mutation::NoFollow, "three paths"),
        (Mutation::NoCheck, "atomics and NO_REPLAY"),
        (Mutation::NoFence, "planned, nothing replayed"),
        (Mutation::FenceNotAwaited, "planned, nothing replayed"),
        (Mutation::NoCountKind, "receives counted"),
    ] {
        println!("{mutation:?}:");
        notices(case, |c| Case { mutation, ..c });
    }
}

#[test]
fn what_the_world_may_not_do_is_noticed() {
    for (world_mutation, case) in [
        (WorldMutation::Ghost, "simultaneous starts"),
        (WorldMutation::NoFence, "READ and FENCE"),
        (WorldMutation::Patience, "planned, RNR"),
    ] {
        println!("{world_mutation:?}:");
        notices(case, |c| Case { world_mutation, ..c });
    }
}

#[test]
fn long_ways_keep_every_promise_and_come_to_an_end() {
    let busy = [
        Program::new(2, &[SEND, WRITE, READ, FENCED_SEND]),
        Program::new(2, &[SEND, FETCH_ADD, READ, SEND]),
    ];
    let work = [
        Program::new(2, &[SEND, WRITE, READ, FENCED_SEND]),
        Program::new(2, &[SEND, WRITE, SEND.once_received(1), READ]),
    ];
    let kinds = vec![Doubt::Stall, Doubt::Probe, Doubt::Post, Doubt::Wedged];
    let faults = |programs| Case {
        doubts: 8,
        doubt_kinds: kinds.clone(),
        cuts: 1,
        whole_cuts: false,
        nic_deaths: 1,
        plans: [2, 2],
        slow: [true, false],
        lazy: true,
        route: true,
        ..Case::new(3, programs)
    };
    let failures = [unsafe_replay(), cannot_stop()].concat();
    for (name, case) in [
        ("exact", faults(work.clone())),
        ("receives counted", Case { exact: [false; 2], ..faults(work) }),
        ("an atomic", Case { causes: failures, ..faults(busy) }),
    ] {
        let walked = walk::walk(&case, 150, 200);
        println!("{name}: {walked:?}");
        assert!(walked.done > 20 && walked.epochs > 150, "{name}: too little happens");
    }
}
