//! Each form on the engine that ships, in virtual time: results are right, and NICs carry what the
//! plan says, while all are well, when one dies, when hosts lose unequally many, and when
//! neighbours lose different rails.

use std::sync::Arc;

use unbroken_collective_protocol::picture::Picture;
use unbroken_collective_protocol::{views, Note};
use unbroken_schedule::verify::{expected, Traffic};
use unbroken_schedule::{
    Collective, DataType, Fabric, Folding, Form, Host, Nic, Operation, ReduceOp, Topology,
};
use world::{run, Case, Fault, Outcome, Planned};

#[allow(dead_code)]
mod world;

const HOSTS: usize = 4;
const RAILS: usize = 4;
const COUNT: u64 = 20_000;
/// NICs die in the first of them; the last is planned without them.
const OPERATIONS: usize = 30;

/// Host and rail of NICs that die.
type Dead = &'static [(u32, u8)];

/// None; one; of two hosts one and two; of neighbours different ones, so that they share a rail
/// where others share two.
const LOSSES: [Dead; 4] =
    [&[], &[(0, 1)], &[(0, 0), (0, 1), (2, 3)], &[(0, 0), (0, 1), (1, 1), (1, 2)]];

fn play(form: Form, dead: Dead, ranks: usize, operation: &Operation) -> (Case, Outcome) {
    let host = Host::new(RAILS, Nic::new(100_000));
    let topology = Topology::uniform(HOSTS, ranks, host, Fabric::RailOnly).unwrap();
    let all = HOSTS * ranks;
    let collective = Collective::new(operation.clone(), DataType::I32, false, all).unwrap();
    let inputs: Vec<Vec<u64>> =
        (0..all as u64).map(|r| (0..COUNT).map(|k| (r + 1) * (k + 3)).collect()).collect();
    let fault = |(k, (host, rail)): (usize, &(u32, u8))| Planned {
        fault: Fault::NicDead { host: *host, rail: *rail },
        after_writes: 40 + 30 * k as u64,
        lasts_us: None,
    };
    let case = Case {
        topology,
        script: vec![vec![collective; OPERATIONS]; all],
        inputs: vec![inputs; OPERATIONS],
        faults: dead.iter().enumerate().map(fault).collect(),
        seed: 7,
        slots: 4,
        payload: 1024,
        mutant: None,
        held_one_in: 50,
        timeout_us: 5_000_000,
        leave: false,
        folding: Folding::Any,
        form: Some(form),
        slow_nics: Vec::new(),
        measure: false,
        rails_apart: false,
        late_us: 0,
        window: 8,
        nic_mbps: None,
    };
    let outcome = run(&case, 60_000_000);
    (case, outcome)
}

/// What was down when the last operation was planned.
fn planned_with(outcome: &Outcome) -> Arc<Picture> {
    let replanned = |note: &Note| match note {
        Note::Replanned { picture, .. } => Some(picture.clone()),
        _ => None,
    };
    outcome.notes[0].iter().rev().find_map(replanned).unwrap_or(Arc::new(Picture::new(HOSTS)))
}

fn bits(dead: Dead) -> Vec<u64> {
    let mut down = vec![0; HOSTS];
    dead.iter().for_each(|(host, rail)| down[*host as usize] |= 1 << rail);
    down
}

fn check(form: Form, dead: Dead, ranks: usize) {
    let operation = Operation::AllReduce { op: ReduceOp::Sum, count: COUNT };
    let (case, outcome) = play(form, dead, ranks, &operation);
    let what = format!("{form}, {dead:?}, {ranks} ranks a host");
    assert!(outcome.took_us.is_some(), "{what}: {:?}", outcome.failures);
    let collective = &case.script[0][0];
    let want = expected(collective, &case.topology, &case.inputs[0]);
    for (rank, outputs) in outcome.outputs.iter().enumerate() {
        assert_eq!(outputs.len(), OPERATIONS, "{what}: {:?}", outcome.failures);
        assert!(outputs.iter().all(|output| *output == want[rank]), "{what}: rank {rank}");
    }
    let picture = planned_with(&outcome);
    assert_eq!(picture.down, bits(dead), "{what}: what the last operation was planned without");
    let plan =
        views::plan(&case.topology, &picture, collective, Folding::Any, Some(form)).unwrap().plan;
    assert_eq!(Form::of(plan.choice()), form, "{what}");
    if ranks == 1 {
        let planned = Traffic::of(&plan.schedule(), &case.topology);
        assert_eq!(outcome.carried, planned.sent[0], "{what}: bytes that rank 0 sent, by rail");
    }
}

#[test]
fn every_form_runs_whatever_is_lost() {
    for form in Form::ALL {
        for dead in LOSSES {
            check(form, dead, 1);
        }
    }
}

#[test]
fn every_form_runs_with_several_ranks_on_a_host() {
    for form in Form::ALL {
        check(form, LOSSES[2], 2);
    }
}

/// A host that has lost half of its NICs sends less in the paper's form than on a ring, and its
/// neighbours send more: what is divided is divided on the wire.
#[test]
fn the_papers_form_takes_load_off_the_degraded_host() {
    let dead: Dead = &[(0, 0), (0, 1)];
    let operation = Operation::AllReduce { op: ReduceOp::Sum, count: COUNT };
    let sent = |form| {
        let (_, outcome) = play(form, dead, 1, &operation);
        outcome.carried.iter().sum::<u64>() as f64 / (4 * COUNT) as f64
    };
    let (ring, paper, leaves) = (sent(Form::Ring), sent(Form::R2ccl), sent(Form::Leaves));
    // Y* = 0.529 of the vector once, the rest one and a half times
    assert!((ring - 1.5).abs() < 0.02, "{ring}");
    assert!((paper - 1.235).abs() < 0.02, "{paper}");
    assert!(leaves < 1.02, "{leaves}");
}
