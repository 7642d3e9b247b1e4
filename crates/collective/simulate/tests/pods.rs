//! Pods and oversubscription: groups keep their hosts' places, so that a healthy step pays for its
//! hops, and a lost NIC for no more than its part.

use unbroken_simulate::cluster::{Cluster, Loss};
use unbroken_simulate::job::{Job, Model};
use unbroken_simulate::random::Random;
use unbroken_simulate::step::Simulation;
use unbroken_simulate::strategy::Strategy;

const CASES: u64 = 60;
const FACTORS: [f64; 4] = [1.0, 2.0, 8.0, 100.0];

fn nic(host: usize, nic: usize) -> Loss {
    Loss { host, nic, port: None, left: None }
}

/// Four stages in as many pods: activations cross spines that carry an eighth, or a hundredth.
#[test]
fn stages_in_different_pods_pay_for_their_spines() {
    let job = Job {
        model: Model::named("175b").unwrap(),
        tensor: 8,
        pipeline: 4,
        batch: 512,
        ..Job::default()
    };
    let of = |pod_hosts, oversubscription| {
        let cluster = Cluster { hosts: 16, pod_hosts, oversubscription, ..Cluster::default() };
        Simulation::new(&cluster, &job).unwrap()
    };
    let near =
        |found: f64, right: f64| assert!((found / right - 1.0).abs() < 0.1, "{found} {right}");
    let wide = of(4, 1.0).healthy();
    for factor in [8.0, 100.0] {
        let narrow = of(4, factor);
        near(narrow.healthy().pipeline_s, factor * wide.pipeline_s);
        assert_eq!(narrow.healthy().data_s, wide.data_s, "a stage is in one pod");
        let longer = |strategy| {
            let after = narrow.after(&[nic(0, 0)], strategy).unwrap();
            after.pipeline_s / narrow.healthy().pipeline_s
        };
        near(longer(Strategy::Ours), 8.0 / 7.0);
        near(longer(Strategy::Balance), 8.0 / 7.0);
    }
    // stages of four in pods of six: the second is in two of them
    let uneven = of(6, 8.0);
    assert!(uneven.healthy().data_s > 1.5 * wide.data_s);
}

/// A cluster, a job for it, and a host that loses a NIC.
fn case(number: u64) -> Option<(Cluster, Job, Loss)> {
    let mut random = Random::part(5, number);
    let hosts = [4, 8, 12, 16][random.below(4)];
    let cluster = Cluster {
        hosts,
        pod_hosts: [2, 3, 4, 6][random.below(4)],
        tiers: 2 + random.below(2),
        spines: random.below(4) > 0,
        ..Cluster::default()
    };
    let (tensor, pipeline) = ([2, 4, 8][random.below(3)], [1, 2, 4][random.below(3)]);
    let (zero, batch) = ([0, 1, 3][random.below(3)], 64 * hosts);
    let context = [1, 1, 2, 8][random.below(4)];
    let moe = random.below(3) == 0;
    let model = Model::named(if moe { "mixtral-8x7b" } else { "13b" }).unwrap();
    let expert_parallel = if moe { [2, 8][random.below(2)] } else { 1 };
    let job =
        Job { model, tensor, pipeline, zero, batch, context, expert_parallel, ..Job::default() };
    job.layout(hosts, 8).ok()?;
    Some((cluster, job, nic(random.below(hosts), random.below(8))))
}

/// More oversubscription never makes a step cheaper, healthy or not; and with whatever
/// oversubscription a lost NIC of eight makes no part of a step longer than what the others of its
/// host have to carry.
#[test]
fn narrow_switches_cost_and_a_lost_nic_costs_its_part() {
    let mut tried = 0;
    for number in 0..CASES {
        let Some((cluster, job, lost)) = case(number) else { continue };
        tried += 1;
        let mut before: Option<[f64; 3]> = None;
        for factor in FACTORS {
            let cluster = Cluster {
                oversubscription: factor,
                core_oversubscription: factor.sqrt(),
                ..cluster.clone()
            };
            let s = Simulation::new(&cluster, &job).unwrap();
            let healthy = s.healthy();
            let after = |strategy| s.after(&[lost], strategy).unwrap();
            let (ours, balance) = (after(Strategy::Ours), after(Strategy::Balance));
            let what = format!("case {number}: {cluster:?} {job:?} {lost}");
            let now = [healthy, ours, balance].map(|step| step.total_s());
            if let Some(before) = before {
                for (now, before) in now.into_iter().zip(before) {
                    assert!(now >= before * 0.9999, "{now} after {before}: {what}");
                }
            }
            before = Some(now);
            let most = healthy.network_s() * (8.0 / 7.0) * 1.03;
            assert!(ours.network_s() <= most, "{ours:?} {healthy:?}: {what}");
            assert!(now[1] >= now[0] * 0.9999, "{what}");
        }
    }
    assert!(tried > 20, "{tried}");
}
