//! Hosts that lose different rails: as long as each has a NIC that is up, operations go on, those
//! in flight and later ones, over NICs of different rails where switches join them, else out of
//! band.
#[allow(dead_code)]
mod world;

use unbroken_collective_protocol::frame::{CROSS, OUT_OF_BAND};
#[cfg(feature = "mutants")]
use unbroken_collective_protocol::Mutant;
use unbroken_collective_protocol::{Failure, Note};
use unbroken_schedule::{Collective, Fabric, Folding, Host, Nic, Topology};
use world::{collective, inputs, run, wrong, Case, Fault, Outcome, Planned, Random};

/// Virtual time within which everything is over.
const MOST_US: u64 = 60_000_000;
/// Cases that are tried.
const RUNS: u64 = 600;

/// Two to four hosts that lose NICs until no two of some pair are on one rail, each at a random
/// write and some for a time only; each host keeps one.
fn case(seed: u64) -> Case {
    let mut random = Random(seed ^ 0xde70);
    let (hosts, rails) = (2 + random.below(3) as usize, 2 + random.below(3) as usize);
    let per_host = 1 + random.below(2) as usize;
    let topology =
        Topology::uniform(hosts, per_host, Host::new(rails, Nic::new(100_000)), Fabric::RailOnly)
            .unwrap();
    let ops: Vec<Collective> =
        (0..3 + random.below(4)).map(|_| collective(&mut random, topology.ranks())).collect();
    let inputs = ops.iter().map(|c| inputs(&mut random, c)).collect();
    let first = random.below(rails as u64);
    let kept = |host: usize| (first + host as u64) % rails as u64;
    let mut faults = Vec::new();
    // The first two have nothing in common; others have lost nothing, or most.
    for host in 0..hosts {
        let stays = host > 1 && random.below(2) == 0;
        for rail in (0..rails as u64).filter(|rail| !stays && *rail != kept(host)) {
            let place = (host as u32, rail as u8);
            let (host, rail) = place;
            let fault = match random.below(2) {
                0 => Fault::NicDead { host, rail },
                _ => Fault::CableCut { host, rail },
            };
            let lasts_us = (random.below(4) == 0).then(|| 1_000 + random.below(2_000_000));
            let after_writes = 1 + random.below(150);
            faults.push(Planned { fault, after_writes, lasts_us });
        }
    }
    Case {
        script: vec![ops; topology.ranks()],
        inputs,
        faults,
        seed: random.bits(),
        slots: 2 + random.below(7),
        payload: [64, 128, 1024, 96 << 10][random.below(4) as usize],
        mutant: None,
        held_one_in: 50,
        timeout_us: 5_000_000,
        leave: true,
        folding: Folding::Any,
        form: None,
        window: 8,
        nic_mbps: None,
        slow_nics: Vec::new(),
        measure: false,
        rails_apart: random.below(2) == 0,
        late_us: 0,
        topology,
    }
}

/// How often streams went over a path.
fn moves(outcome: &Outcome, path: u8) -> usize {
    let to = |note: &&Note| matches!(note, Note::Moved { rail, .. } if *rail == path);
    outcome.notes.iter().flatten().filter(to).count()
}

#[test]
fn hosts_that_lose_different_rails_go_on() {
    let (mut crossed, mut aside) = (0, 0);
    for seed in 0..RUNS {
        let case = case(seed);
        let outcome = run(&case, MOST_US);
        if let Some(what) = wrong(&case, &outcome) {
            panic!("seed {seed}: {what}; rails apart {}; {:?}", case.rails_apart, case.faults);
        }
        crossed += u64::from(moves(&outcome, CROSS) > 0);
        aside += u64::from(moves(&outcome, OUT_OF_BAND) > 0);
        assert!(
            case.rails_apart || case.faults.len() > 2 || moves(&outcome, OUT_OF_BAND) == 0,
            "seed {seed}: out of band, where NICs reach each other"
        );
    }
    println!("of {RUNS}, {crossed} went over NICs of different rails, {aside} out of band");
    assert!(crossed > RUNS / 10 && aside > RUNS / 10, "{crossed} and {aside}");
}

/// A host without a NIC is out of the job, whatever connections there are.
#[test]
fn a_host_that_has_lost_all_nics_breaks_the_communicator() {
    for seed in 0..20 {
        let mut case = case(seed);
        let rails = case.topology.hosts()[0].nics.len() as u8;
        let dead = |rail| Fault::NicDead { host: 0, rail };
        case.faults = (0..rails)
            .map(|rail| Planned { fault: dead(rail), after_writes: 1, lasts_us: None })
            .collect();
        let outcome = run(&case, MOST_US);
        let failures: Vec<&Failure> = outcome.failures.iter().flatten().collect();
        assert!(!failures.is_empty(), "seed {seed}: it goes on");
        let named = |f: &&Failure| matches!(f, Failure::Parted { .. } | Failure::Stalled { .. });
        assert!(failures.iter().all(named), "seed {seed}: {failures:?}");
    }
}

#[test]
#[cfg(feature = "mutants")]
fn ranks_without_detours_are_noticed() {
    let caught = (0..RUNS).find(|seed| {
        let case = Case { mutant: Some(Mutant::NoDetour), ..case(*seed) };
        wrong(&case, &run(&case, MOST_US)).is_some()
    });
    assert!(caught.is_some());
}
