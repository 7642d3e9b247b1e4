//! Thousands of runs of collectives in a simulated world: NICs die, cables are cut, switches go
//! down, queue pairs fail and processes end, each at a random write. Results are right, nobody
//! waits for ever, and a rule that is left out shows.

#[path = "survive/disagree.rs"]
mod disagree;
mod world;

use unbroken_collective_protocol::locate::{Fault as At, Place};
use unbroken_collective_protocol::{Engine, Failure, Mutant, Note};
use unbroken_schedule::{
    Collective, DataType, Fabric, Folding, Host, Nic, Operation, ReduceOp, Topology,
};
use world::{collective, inputs, run, wrong, Case, Fault, Planned, Random, GIVES_UP_US};

/// Virtual time within which everything is over.
const MOST_US: u64 = 20_000_000;
/// Schedules that are tried.
const RUNS: u64 = 2_000;

fn topology(random: &mut Random) -> Topology {
    let hosts = 2 + random.below(3) as usize;
    let rails = 1 + random.below(4) as usize;
    let per_host = 1 + random.below(3) as usize;
    Topology::uniform(hosts, per_host, Host::new(rails, Nic::new(100_000)), Fabric::RailOnly)
        .unwrap()
}

/// Any faults that leave a rail.
fn faults(random: &mut Random, topology: &Topology, most: u64) -> Vec<Planned> {
    let (hosts, rails) = (topology.hosts().len() as u64, topology.hosts()[0].nics.len() as u64);
    let ranks = topology.ranks() as u64;
    let spared = random.below(rails);
    let count = random.below(most + 1);
    (0..count)
        .filter_map(|_| {
            let (host, rail) = (random.below(hosts) as u32, random.below(rails));
            let (a, b) = (random.below(ranks) as usize, random.below(ranks) as usize);
            let kind = if rail == spared { 3 } else { random.below(4) };
            let rail = rail as u8;
            let fault = match kind {
                0 => Fault::NicDead { host, rail },
                1 => Fault::CableCut { host, rail },
                2 => Fault::SwitchDown { rail },
                _ => Fault::QpError { a, b, rail },
            };
            let lasts_us = (random.below(2) == 0).then(|| 1_000 + random.below(60_000));
            (kind != 3 || a != b).then_some(Planned {
                fault,
                after_writes: 1 + random.below(200),
                lasts_us,
            })
        })
        .collect()
}

fn case(seed: u64) -> Case {
    let mut random = Random(seed);
    let topology = topology(&mut random);
    let ops: Vec<Collective> =
        (0..1 + random.below(4)).map(|_| collective(&mut random, topology.ranks())).collect();
    let inputs = ops.iter().map(|c| inputs(&mut random, c)).collect();
    let faults = faults(&mut random, &topology, 4);
    Case {
        script: vec![ops; topology.ranks()],
        inputs,
        faults,
        seed: random.bits(),
        slots: 2 + random.below(7),
        payload: [64, 128, 1024][random.below(3) as usize],
        mutant: None,
        held_one_in: 50,
        timeout_us: 2_000_000,
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

/// One with few slots, and queue pairs that fail again and again: where rules are needed most.
#[cfg(feature = "mutants")]
fn restless(seed: u64, mutant: Mutant) -> Case {
    let mut random = Random(seed ^ 0x0e57);
    let topology =
        Topology::uniform(2, 1, Host::new(3, Nic::new(100_000)), Fabric::RailOnly).unwrap();
    let ops: Vec<Collective> = (0..4).map(|_| collective(&mut random, 2)).collect();
    let inputs = ops.iter().map(|c| inputs(&mut random, c)).collect();
    let error = |random: &mut Random| {
        let a = random.below(2) as usize;
        let fault = Fault::QpError { a, b: 1 - a, rail: random.below(3) as u8 };
        Planned { fault, after_writes: 1 + random.below(400), lasts_us: None }
    };
    let faults = (0..12).map(|_| error(&mut random)).collect();
    // Where the word that a path is closed takes long, what is on its way has time to come.
    let late_us = if mutant == Mutant::ImpatientSender { 2_000 } else { 0 };
    let (script, mutant) = (vec![ops; 2], Some(mutant));
    Case {
        topology,
        script,
        inputs,
        faults,
        seed: random.bits(),
        slots: 2,
        payload: 64,
        mutant,
        held_one_in: 8,
        timeout_us: 2_000_000,
        leave: true,
        folding: Folding::Any,
        form: None,
        window: 8,
        nic_mbps: None,
        slow_nics: Vec::new(),
        measure: false,
        rails_apart: false,
        late_us,
    }
}

#[test]
fn whatever_fails_results_are_right() {
    let (mut moved, mut runs) = (0, 0);
    for seed in 0..RUNS {
        let case = case(seed);
        let outcome = run(&case, MOST_US);
        if let Some(what) = wrong(&case, &outcome) {
            panic!("seed {seed}: {what}; faults {:?}", case.faults);
        }
        moved += usize::from(outcome.moved > 0);
        runs += 1;
    }
    println!("{runs} runs, streams moved in {moved}");
    assert!(moved > runs / 10, "{moved} of {runs} runs had something to survive");
}

#[test]
#[cfg(feature = "mutants")]
fn every_rule_that_is_left_out_is_noticed() {
    for mutant in [Mutant::SendersCount, Mutant::ImpatientSender, Mutant::NoDedup, Mutant::NoCredit]
    {
        let caught = (0..RUNS).find(|seed| {
            let case = restless(*seed, mutant);
            wrong(&case, &run(&case, MOST_US)).is_some()
        });
        println!("{mutant:?}: seed {caught:?}");
        assert!(caught.is_some(), "{mutant:?} goes unnoticed");
    }
}

#[test]
fn a_process_that_dies_is_named_to_all() {
    for seed in 0..500 {
        let mut case = case(seed);
        // Who has left hears nothing and hands nothing on; who is left without a way to hear waits
        // for the timeout.
        case.leave = false;
        let mut random = Random(seed ^ 0xdead);
        let rank = random.below(case.topology.ranks() as u64) as usize;
        case.faults = vec![Planned {
            fault: Fault::Death { rank },
            after_writes: 1 + random.below(30),
            lasts_us: None,
        }];
        let outcome = run(&case, MOST_US);
        let done = |r: usize| outcome.outputs[r].len() == case.script[r].len();
        for r in (0..case.topology.ranks()).filter(|r| *r != rank) {
            match &outcome.failures[r] {
                // It had done all by then.
                None => assert!(done(r), "seed {seed}: rank {r} knows nothing"),
                Some(failure) => assert_eq!(*failure, Failure::Lost { rank }, "seed {seed}"),
            }
        }
    }
}

/// A case in which a process of those that hand no news on stands still, and who it is.
fn standstill(seed: u64, mutant: Option<Mutant>) -> (Case, usize) {
    let mut case = case(seed);
    let mut random = Random(seed ^ 0x5709);
    let ranks = case.topology.ranks();
    let leaves: Vec<usize> =
        (1..ranks).filter(|r| Engine::neighbours(*r, ranks).count() == 1).collect();
    let rank = leaves[random.below(leaves.len() as u64) as usize];
    case.faults = vec![Planned {
        fault: Fault::Stop { rank },
        after_writes: 1 + random.below(60),
        lasts_us: None,
    }];
    // Polling costs time, and nothing else happens while all wait.
    (case.leave, case.mutant, case.timeout_us) = (false, mutant, 100_000);
    (case, rank)
}

/// What is wrong with what ranks say of one that stands still.
fn misnamed(seed: u64, mutant: Option<Mutant>) -> Option<String> {
    let (case, stopped) = standstill(seed, mutant);
    let outcome = run(&case, MOST_US);
    let mut living = (0..case.topology.ranks()).filter(|r| *r != stopped);
    let wrong = |r: usize| match &outcome.failures[r] {
        None => outcome.outputs[r].len() < case.script[r].len(),
        Some(Failure::Stalled { from, .. }) => *from != stopped,
        Some(_) => true,
    };
    let found = living.find(|r| wrong(*r))?;
    Some(format!(
        "seed {seed}: rank {stopped} stands still, rank {found} says {:?}",
        outcome.failures[found]
    ))
}

#[test]
fn a_process_that_stands_still_is_named_to_all() {
    (0..150).for_each(|seed| assert_eq!(misnamed(seed, None), None));
}

#[test]
#[cfg(feature = "mutants")]
fn the_wait_before_naming_left_out_is_noticed() {
    let caught = (0..150).find(|seed| misnamed(*seed, Some(Mutant::Hasty)).is_some());
    println!("{:?}: seed {caught:?}", Mutant::Hasty);
    assert!(caught.is_some());
}

/// Three hosts or four, operations of so many elements, and one fault that stays.
fn one_fault(seed: u64, (count, operations, payload): (u64, usize, u32)) -> (Case, Fault) {
    let mut random = Random(seed ^ 0x10ca7e);
    let hosts = 3 + random.below(2) as usize;
    let topology =
        Topology::uniform(hosts, 1, Host::new(4, Nic::new(100_000)), Fabric::RailOnly).unwrap();
    let (host, rail) = (random.below(hosts as u64) as u32, random.below(4) as u8);
    let a = random.below(hosts as u64) as usize;
    let b = (a + 1 + random.below(hosts as u64 - 1) as usize) % hosts;
    let fault = match seed % 4 {
        0 => Fault::NicDead { host, rail },
        1 => Fault::CableCut { host, rail },
        2 => Fault::SwitchDown { rail },
        _ => Fault::QpError { a, b, rail },
    };
    let operation = Operation::AllReduce { op: ReduceOp::Sum, count };
    let all = Collective::new(operation, DataType::I32, true, hosts).unwrap();
    let ops = vec![all; operations];
    let inputs = ops.iter().map(|c| inputs(&mut random, c)).collect();
    let faults = vec![Planned { fault, after_writes: 50 + random.below(500), lasts_us: None }];
    let (script, seed) = (vec![ops; hosts], random.bits());
    (
        Case {
            topology,
            script,
            inputs,
            faults,
            seed,
            slots: 4,
            payload,
            mutant: None,
            held_one_in: 50,
            timeout_us: 2_000_000,
            leave: false,
            folding: Folding::Any,
            form: None,
            window: 8,
            nic_mbps: None,
            slow_nics: Vec::new(),
            measure: false,
            rails_apart: false,
            late_us: 0,
        },
        fault,
    )
}

#[test]
fn the_verdict_is_right() {
    let (mut right, mut wrong, mut unknown) = (0, Vec::new(), 0);
    for seed in 0..400 {
        let (case, fault) = one_fault(seed, (4_000, 40, 1024));
        let outcome = run(&case, MOST_US);
        assert_eq!(self::wrong(&case, &outcome), None, "seed {seed}");
        let place = |host, rail| Place { host, rail };
        let expected = match fault {
            Fault::NicDead { host, rail } => At::Nic(place(host, rail)),
            Fault::CableCut { host, rail } => At::Cable(place(host, rail)),
            Fault::SwitchDown { rail } => At::Switch(rail),
            Fault::QpError { a, b, rail } => {
                At::QueuePair(place(a.min(b) as u32, rail), place(a.max(b) as u32, rail))
            }
            Fault::Death { rank } | Fault::Stop { rank } => At::Process(rank),
        };
        let located = |notes: &Vec<Note>| {
            notes.iter().find_map(|n| if let Note::Located(v) = n { Some(v.fault) } else { None })
        };
        match outcome.notes.iter().find_map(located) {
            Some(found) if found == expected => right += 1,
            Some(found) => wrong.push((seed, found, expected)),
            // The queue pair was not there yet, or not any more.
            None => unknown += 1,
        }
    }
    println!("{right} right, {} wrong, {unknown} not traced", wrong.len());
    assert!(right * 100 >= 99 * (right + wrong.len()), "{wrong:?}");
    assert!(unknown <= 20, "{unknown} faults were not traced");
}

/// How much longer the longest operation takes with one fault of a kind than without it, in virtual
/// µs, sorted.
fn stalls_us(kind: u64) -> Vec<u64> {
    let stall = |seed: u64| {
        let (mut case, fault) = one_fault(4 * seed + kind, (4_000, 40, 1024));
        let mut longest_us = || {
            let outcome = run(&case, MOST_US);
            assert_eq!(wrong(&case, &outcome), None, "seed {seed}, {fault:?}");
            case.faults.clear();
            outcome.longest_us()
        };
        let (with, without) = (longest_us(), longest_us());
        with.saturating_sub(without)
    };
    let mut stalls: Vec<u64> = (0..100).map(stall).collect();
    stalls.sort_unstable();
    println!("median {} us, most {} us", stalls[50], stalls[99]);
    stalls
}

#[test]
fn a_fault_stalls_operations_for_as_long_as_nobody_notices_it_and_a_moment_more() {
    let dead_us = stalls_us(0)[99];
    assert!(dead_us <= 5_000, "a dead NIC, which is told at once: {dead_us}");
    let cut_us = stalls_us(1)[99];
    assert!(cut_us <= GIVES_UP_US + 5_000, "a cut cable, on which transports give up: {cut_us}");
}

#[test]
fn the_share_of_what_is_lost_is_spread() {
    for seed in 0..12 {
        let (case, fault) = one_fault(4 * seed + seed % 3, (400_000, 12, 65_536));
        let outcome = run(&case, MOST_US);
        assert_eq!(wrong(&case, &outcome), None, "seed {seed}");
        let lost = match fault {
            Fault::NicDead { host: 0, rail }
            | Fault::CableCut { host: 0, rail }
            | Fault::SwitchDown { rail } => rail,
            _ => continue,
        };
        let carried = &outcome.carried;
        let others: Vec<u64> =
            (0..4).filter(|r| *r != lost).map(|r| carried[usize::from(r)]).collect();
        let (least, most) = (others.iter().min().unwrap(), others.iter().max().unwrap());
        // Chunks are unequal, and those too short to be divided take NICs in turn.
        assert!(
            carried[usize::from(lost)] == 0 && most - least <= most / 4,
            "seed {seed}: {fault:?} {carried:?}"
        );
    }
}

#[test]
fn what_is_well_again_is_used_again() {
    for seed in 0..50 {
        let (mut case, fault) = one_fault(4 * seed + seed % 3, (4_000, 40, 1024));
        case.faults[0].lasts_us = Some(5_000);
        case.script.iter_mut().for_each(|ops| *ops = vec![ops[0].clone(); 300]);
        case.inputs = vec![case.inputs[0].clone(); 300];
        let outcome = run(&case, MOST_US);
        assert_eq!(wrong(&case, &outcome), None, "seed {seed}");
        let carried = &outcome.carried;
        assert!(carried.iter().all(|bytes| *bytes > 0), "seed {seed}: {fault:?} {carried:?}");
    }
}

/// NICs come and go, and operations are short.
fn fickle(seed: u64, mutant: Option<Mutant>) -> Case {
    let (mut case, _) = one_fault(4 * seed, (4_000, 400, 16_384));
    let mut random = Random(seed ^ 0x71e3);
    let dead = |k| Fault::NicDead { host: random.below(3) as u32, rail: (k % 3) as u8 };
    let faults: Vec<Fault> = (0..40).map(dead).collect();
    let planned = |(k, fault): (usize, Fault)| Planned {
        fault,
        after_writes: 200 * k as u64,
        lasts_us: Some(2_000),
    };
    case.faults = faults.into_iter().enumerate().map(planned).collect();
    case.mutant = mutant;
    case
}

/// A rail's NIC comes back, and dies for good just then, while streams are about to go home to it.
fn relapse(seed: u64, mutant: Option<Mutant>) -> Option<Case> {
    let (mut case, _) = one_fault(4 * seed, (4_000, 100, 16_384));
    let mut random = Random(seed ^ 0x4e1a);
    let fault = Fault::NicDead { host: random.below(3) as u32, rail: random.below(4) as u8 };
    let once = Planned { fault, after_writes: 20, lasts_us: Some(1_000) };
    (case.faults, case.held_one_in, case.mutant) = (vec![once], 4, mutant);
    // Until then, all goes as in a run without the second death.
    let returned = run(&case, MOST_US).returned?;
    case.faults.push(Planned {
        fault,
        after_writes: returned + 1 + random.below(30),
        lasts_us: None,
    });
    Some(case)
}

/// A stream whose way home fails before it has gone goes on where it is.
#[test]
fn nobody_waits_for_a_home_that_is_lost_again() {
    let mut relapses = 0;
    for seed in 0..40 {
        let outcome = relapsed(seed, None);
        relapses += usize::from(outcome.is_some());
        assert_eq!(outcome.flatten(), None, "seed {seed}");
    }
    assert!(relapses > 20, "{relapses} of 40 came back in time");
}

/// What is wrong with a relapse, if there is one.
fn relapsed(seed: u64, mutant: Option<Mutant>) -> Option<Option<String>> {
    relapse(seed, mutant).map(|case| wrong(&case, &run(&case, MOST_US)))
}

#[test]
#[cfg(feature = "mutants")]
fn staying_left_out_is_noticed() {
    let homesick = Some(Mutant::Homesick);
    let caught = (0..40).filter(|seed| relapsed(*seed, homesick).flatten().is_some()).count();
    println!("Homesick: {caught}");
    assert!(caught > 0, "a stream that waits for a home that is lost goes unnoticed");
}

/// What fails can be looked at again: nothing but the seed says what happens.
#[test]
fn a_seed_says_all_that_happens() {
    for seed in 0..20 {
        let runs = [fickle(seed, None), fickle(seed, None)].map(|case| run(&case, MOST_US));
        let [one, other] = runs.map(|o| (o.took_us, o.moved, o.carried, o.notes));
        assert!(one == other, "seed {seed} gives two runs");
    }
}

/// Ranks agree on what to plan with again and again, at every moment of an operation.
#[test]
fn all_plan_with_the_same_view_however_often_it_changes() {
    let mut agreed = 0;
    for seed in 0..40 {
        let case = fickle(seed, None);
        let outcome = run(&case, MOST_US);
        assert_eq!(wrong(&case, &outcome), None, "seed {seed}");
        agreed += outcome.notes[0].iter().filter(|n| matches!(n, Note::Replanned { .. })).count();
    }
    println!("{agreed} views");
    assert!(agreed > 100, "{agreed} views");
}

#[test]
#[cfg(feature = "mutants")]
fn a_begin_that_is_left_out_is_noticed() {
    let caught = (0..400).find(|seed| {
        let case = fickle(*seed, Some(Mutant::LateBegin));
        wrong(&case, &run(&case, MOST_US)).is_some()
    });
    println!("LateBegin: seed {caught:?}");
    assert!(caught.is_some(), "an operation that is planned and has not begun goes unnoticed");
}

/// NICs come and go until the last operation and beyond; each rank leaves when it has done its own.
fn farewell(seed: u64, mutant: Option<Mutant>) -> Case {
    let mut case = fickle(seed, mutant);
    let mut random = Random(seed ^ 0xfa7e);
    let hosts = 4 + random.below(8) as usize;
    let operations = 3 + random.below(60) as usize;
    case.topology =
        Topology::uniform(hosts, 1, Host::new(4, Nic::new(100_000)), Fabric::RailOnly).unwrap();
    let operation = |_| collective(&mut random, hosts);
    let ops: Vec<Collective> = (0..operations).map(operation).collect();
    case.inputs = ops.iter().map(|c| inputs(&mut random, c)).collect();
    case.script = vec![ops; hosts];
    case.leave = true;
    case
}

/// Whoever dies or differs while others leave, each rank has its results or an error in the end.
#[test]
fn nobody_waits_for_ever_for_one_who_has_left() {
    for seed in 0..300 {
        let (mut differs, _) = disagree::disagreement(seed, None);
        let mut dies = case(seed);
        let rank = (seed % dies.topology.ranks() as u64) as usize;
        dies.faults = vec![Planned {
            fault: Fault::Death { rank },
            after_writes: 1 + seed % 30,
            lasts_us: None,
        }];
        differs.leave = true;
        for case in [differs, dies] {
            let outcome = run(&case, MOST_US);
            assert!(outcome.took_us.is_some(), "seed {seed}: {:?}", outcome.failures);
        }
    }
}

/// Who leaves does not spoil what others do yet, whatever is just being agreed on.
#[test]
fn ranks_leave_when_they_have_done_all() {
    for seed in 0..150 {
        let case = farewell(seed, None);
        let outcome = run(&case, MOST_US);
        assert_eq!(wrong(&case, &outcome), None, "seed {seed}");
    }
}
