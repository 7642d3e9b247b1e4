//! Every form on a thousand random topologies with dead and slow NICs: it can be planned unless
//! hosts are parted, does what it should, ends in every order, and carries what is stated.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use unbroken_schedule::cost::Costs;
use unbroken_schedule::paper::{self, Division};
use unbroken_schedule::planner::{plan_as, plan_form};
use unbroken_schedule::rerank::{bridged_ring, rerank_hosts, shared_mbps};
use unbroken_schedule::reshape;
use unbroken_schedule::verify::{check, expected, Machine, Traffic};
use unbroken_schedule::{
    Choice, Collective, Counts, DataType, Error, Fabric, Folding, Form, Health, Host, Lane, Matrix,
    Nic, Operation, Place, Plan, ReduceOp, Stage, Topology,
};

#[allow(dead_code)]
mod cases;

const TOPOLOGIES: u32 = 1_000;
const SUM: ReduceOp = ReduceOp::Sum;
/// The vector whose traffic is counted.
const BYTES: u64 = 1 << 20;
/// Parts are rounded to cache lines, and short messages take turns among NICs.
const TOLERANCE: f64 = 0.02;

/// 2 to 6 hosts of 1 or 2 ranks, with 1 to 8 NICs of which a quarter is dead and some are slow.
fn topology() -> impl Strategy<Value = Topology> {
    let health = prop_oneof![
        14 => Just(Health::Up),
        5 => Just(Health::Down),
        1 => (10u8..100).prop_map(Health::Slow)
    ];
    let fabric = prop_oneof![3 => Just(Fabric::RailOnly), 1 => Just(Fabric::AnyToAny)];
    (2usize..=6, 1usize..=2, 1usize..=8, fabric).prop_flat_map(
        move |(hosts, ranks, nics, fabric)| {
            prop::collection::vec(health.clone(), hosts * nics).prop_map(move |health| {
                let host = |h: usize| {
                    let mut host = Host::new(nics, Nic::new(100_000));
                    for (nic, health) in host.nics.iter_mut().zip(&health[h * nics..]) {
                        nic.health = *health;
                    }
                    if host.free_mbps() == 0 {
                        host.nics[h % nics].health = Health::Up;
                    }
                    host
                };
                let places = (0..hosts * ranks).map(|r| Place { host: r / ranks, numa: 0 });
                Topology::new((0..hosts).map(host).collect(), places.collect(), fabric).unwrap()
            })
        },
    )
}

/// The same thousand on every run.
fn thousand(mut each: impl FnMut(&Topology, u64) -> Result<(), TestCaseError>) {
    let config = Config { cases: TOPOLOGIES, failure_persistence: None, ..Config::default() };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let cell = std::cell::RefCell::new(&mut each);
    runner
        .run(&(topology(), any::<u64>()), |(t, seed)| (*cell.borrow_mut())(&t, seed))
        .unwrap_or_else(|e| panic!("{e}"));
}

fn collective(operation: Operation, ranks: usize) -> Collective {
    Collective::new(operation, DataType::I32, false, ranks).unwrap()
}

/// Another operation each time; most are AllReduces, which all forms have.
fn operation(seed: u64, ranks: usize) -> Operation {
    let (count, root) = (seed >> 32 & 0x1ff, (seed >> 8) as usize % ranks);
    let counts = Counts::Equal(count / 8);
    match seed % 10 {
        0 => Operation::ReduceScatter { op: SUM, counts },
        1 => Operation::AllGather { counts },
        2 => Operation::Broadcast { root, count },
        3 => Operation::Reduce { op: SUM, root, count },
        4 => Operation::Barrier,
        5 => Operation::AllToAll { counts: Matrix::Equal(count / 16) },
        6 => Operation::SendRecv { from: 0, to: root, count },
        _ => Operation::AllReduce { op: SUM, count },
    }
}

fn failed(flaw: impl ToString) -> TestCaseError {
    TestCaseError::fail(flaw.to_string())
}

/// How often each host sends the vector of an AllReduce at most, as documents and formulas say, and
/// receives it.
fn stated(form: Form, t: &Topology) -> Vec<f64> {
    let (n, ranks) = (t.hosts().len(), t.ranks() as f64);
    let hosts = n as f64;
    let mbps = t.useful_mbps();
    let order: Vec<usize> = (0..n).collect();
    match form {
        Form::OneShot => vec![hosts - 1.0; n],
        Form::Direct | Form::Ring | Form::BridgedRing | Form::Tree => {
            vec![2.0 * (hosts - 1.0) / hosts; n]
        }
        Form::FlatRing => vec![2.0 * (ranks - 1.0) / ranks; n],
        Form::RootedTree => vec![3.0; n],
        Form::Stars => {
            let owned = reshape::stars(&mbps);
            let all: u64 = owned.iter().sum();
            owned.iter().map(|w| 1.0 + (hosts - 2.0) * *w as f64 / all as f64).collect()
        }
        Form::Leaves => reshape::loads(&reshape::rings(&mbps, &order), n),
        Form::R2ccl => paper::loads(&paper::sub_rings(&mbps, &order, Division::Always), n),
    }
}

/// Runs a small operation in a form, with chunks and pieces of few elements.
fn executes(
    plan: &Plan,
    t: &Topology,
    collective: &Collective,
    seed: u64,
) -> Result<(), TestCaseError> {
    let choice = Choice { chunk_bytes: 200, divide_bytes: 32, ..plan.choice().clone() };
    let schedule = Plan::new(t, collective, choice).map_err(failed)?.schedule();
    check(&schedule, t).map_err(failed)?;
    let inputs = cases::inputs(collective, seed, true);
    let mut machine = Machine::new(&schedule, t, &inputs, 1 + seed as usize % 3, seed);
    machine.run().map_err(failed)?;
    machine.compare(&expected(collective, t, &inputs)).map_err(failed)
}

/// What each host sends and receives is what is stated, and no more.
fn carries_what_is_stated(form: Form, plan: &Plan, t: &Topology) -> Result<(), TestCaseError> {
    let traffic = Traffic::of(&plan.schedule(), t);
    for (host, times) in stated(form, t).into_iter().enumerate() {
        let (sent, received) = traffic.host(host);
        let most = times * BYTES as f64 * (1.0 + TOLERANCE) + 4096.0;
        let (sent, received) = (sent as f64, received as f64);
        prop_assert!(
            sent <= most && received <= most,
            "{form}, host {host}: {sent} and {received} of {most}, {t:?}"
        );
        if form != Form::RootedTree {
            let least = times * BYTES as f64 * (1.0 - TOLERANCE) - 4096.0;
            prop_assert!(sent.max(received) >= least, "{form}, host {host}: {sent} of {least}");
        }
    }
    Ok(())
}

#[test]
fn every_form_is_right_ends_and_carries_what_is_stated() {
    let mut planned = [0; Form::ALL.len()];
    let mut parted = 0;
    thousand(|t, seed| {
        let small = collective(operation(seed, t.ranks()), t.ranks());
        let large = collective(Operation::AllReduce { op: SUM, count: BYTES / 4 }, t.ranks());
        for (k, form) in Form::ALL.into_iter().enumerate() {
            let plan = |collective: &Collective| {
                plan_form(t, collective, &Costs::default(), Folding::Any, form).map(|p| p.plan)
            };
            if form.takes(small.operation()) {
                match plan(&small) {
                    Ok(plan) => executes(&plan, t, &small, seed)?,
                    Err(Error::Parted { .. }) => {}
                    Err(error) => return Err(failed(error)),
                }
            }
            match plan(&large) {
                Ok(plan) => {
                    prop_assert_eq!(Form::of(plan.choice()), form);
                    carries_what_is_stated(form, &plan, t)?;
                    planned[k] += 1;
                }
                Err(Error::Parted { .. }) => parted += 1,
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    });
    println!("{planned:?}, {parted} parted");
    assert!(planned.iter().all(|count| *count > 800), "{planned:?}");
}

/// What the worst pair of neighbours can exchange.
fn worst_mbps(t: &Topology, ring: &[usize]) -> u64 {
    let pairs = (0..ring.len()).map(|i| shared_mbps(t, ring[i], ring[(i + 1) % ring.len()]));
    pairs.min().unwrap_or(0)
}

/// Neither on the ring of all nor on those without the slowest hosts.
#[test]
fn bridges_never_make_the_worst_pair_worse() {
    let mut better = 0;
    thousand(|t, _| {
        let all: Vec<usize> = (0..t.hosts().len()).collect();
        let bridged = bridged_ring(t);
        prop_assert!(worst_mbps(t, &bridged) >= worst_mbps(t, &all), "{bridged:?} {t:?}");
        better += u32::from(worst_mbps(t, &bridged) > worst_mbps(t, &all));
        for ring in paper::sub_rings(&t.useful_mbps(), &bridged, Division::Always) {
            let again = rerank_hosts(t, &ring.members);
            let mut sorted = [again.clone(), ring.members.clone()];
            sorted.iter_mut().for_each(|hosts| hosts.sort_unstable());
            prop_assert_eq!(&sorted[0], &sorted[1]);
            prop_assert!(worst_mbps(t, &again) >= worst_mbps(t, &ring.members));
        }
        Ok(())
    });
    println!("better on {better}");
    assert!(better > 20, "{better}");
}

/// Hosts of four NICs on rails that are apart, some dead.
fn rails(hosts: usize, dead: &[(usize, usize)]) -> Topology {
    let t = Topology::uniform(hosts, 1, Host::new(4, Nic::new(1000)), Fabric::RailOnly).unwrap();
    dead.iter().fold(t, |t, (host, nic)| t.with_health(*host, *nic, Health::Down).unwrap())
}

/// R²CCL §6: whoever is left out of a ring may have been the bridge of two others.
#[test]
fn every_ring_of_several_is_bridged() {
    // hosts 0 and 2 share two rails of three; the slowest, 1, is between them, 3 and 4 are well
    let t = rails(5, &[(0, 0), (1, 0), (1, 1), (1, 3), (2, 1)]);
    let rings = paper::sub_rings(&t.useful_mbps(), &[0, 1, 2, 3, 4], Division::Always);
    let without = rings.iter().find(|r| r.outsiders == [1]).unwrap();
    assert_eq!(without.members, [0, 2, 3, 4]);
    let bridged = rerank_hosts(&t, &without.members);
    assert_eq!((worst_mbps(&t, &without.members), worst_mbps(&t, &bridged)), (2000, 3000));
    let large = collective(Operation::AllReduce { op: SUM, count: BYTES / 4 }, 5);
    let planned = plan_form(&t, &large, &Costs::default(), Folding::Any, Form::R2ccl).unwrap();
    let schedule = planned.plan.schedule();
    check(&schedule, &t).unwrap();
    let on_ring = |lane: &&Lane| lane.from == 0 && (lane.set, lane.stage) == (1, Stage::Reduce);
    let to: Vec<usize> = schedule.programs[0].lanes.iter().filter(on_ring).map(|l| l.to).collect();
    assert!(!to.is_empty() && to.iter().all(|to| *to == 3), "0 is followed by 3: {to:?}");
}

#[test]
fn what_cannot_have_a_form_is_planned_otherwise_and_the_reason_is_known() {
    let t = rails(4, &[]);
    let of = |operation, folding, form| {
        let collective = collective(operation, 4);
        let why = plan_form(&t, &collective, &Costs::default(), folding, form).map(|_| ());
        let plan = plan_as(&t, &collective, &Costs::default(), folding, Some(form)).unwrap().plan;
        (why.map_err(|e| e.to_string()), Form::of(plan.choice()))
    };
    let all = || Operation::AllReduce { op: SUM, count: 1 << 20 };
    assert_eq!(of(all(), Folding::Any, Form::R2ccl), (Ok(()), Form::R2ccl));
    let (why, form) = of(all(), Folding::InOrder, Form::R2ccl);
    assert!(why.unwrap_err().contains("order of its own; take one-shot, direct or stars"));
    assert!(form.reduces_in_order());
    let (why, form) = of(Operation::Broadcast { root: 1, count: 9 }, Folding::Any, Form::R2ccl);
    assert!(
        why.unwrap_err().contains("the operation cannot have this shape") && form != Form::R2ccl
    );
    let pairs = Operation::AllToAll { counts: Matrix::Equal(5) };
    assert!(of(pairs, Folding::Any, Form::Ring).0.is_err());
    // hosts 0 and 1 have no rail in common
    let t = rails(4, &[(0, 0), (0, 1), (1, 2), (1, 3)]);
    let large = collective(all(), 4);
    let plan = |form| plan_form(&t, &large, &Costs::default(), Folding::Any, form);
    assert!(matches!(plan(Form::Ring), Err(Error::Parted { a: _, b: _, .. })));
    assert_eq!(plan(Form::BridgedRing).unwrap().plan.choice().ring, Some(vec![0, 2, 1, 3]));
}
