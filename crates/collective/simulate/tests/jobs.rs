//! What jobs with experts, divided sequences, ZeRO and several chunks of layers wait for, beside
//! what NICs carry by hand, and what a lost NIC makes of it.

use unbroken_simulate::cluster::{Cluster, Loss};
use unbroken_simulate::job::{ContextExchange, Experts, Job, Model};
use unbroken_simulate::step::Simulation;
use unbroken_simulate::strategy::Strategy;

/// What eight NICs of 200 Gbit/s carry, in bytes a second.
const HOST: f64 = 8.0 * 200e9 / 8.0;
const LOST: [Loss; 1] = [Loss { host: 3, nic: 2, port: None, left: None }];

fn near(found: f64, by_hand: f64, tolerance: f64) {
    assert!((found / by_hand - 1.0).abs() < tolerance, "{found} for {by_hand}");
}

fn on(hosts: usize, job: &Job) -> Simulation {
    Simulation::new(&Cluster { hosts, ..Cluster::default() }, job).unwrap()
}

/// Mixtral with sixteen experts, on sixteen ranks: two hosts.
fn experts() -> Job {
    let model = Model::named("mixtral-8x7b").unwrap();
    let experts = Some(Experts { count: 16, ..Experts::default() });
    let model = Model { experts, ..model };
    Job { model, tensor: 1, expert_parallel: 16, batch: 64, ..Job::default() }
}

/// Each of eight ranks sends 64 MiB, half of it to the other host, four times in each of 32 layers.
#[test]
fn tokens_take_as_long_as_nics_carry_them() {
    let s = on(8, &experts());
    let healthy = s.healthy();
    near(healthy.expert_s, 4.0 * 32.0 * 8.0 * f64::from(64 << 20) / 2.0 / HOST, 0.03);
    let after = |strategy| s.after(&LOST, strategy).unwrap();
    near(after(Strategy::Balance).expert_s / healthy.expert_s, 8.0 / 7.0, 0.03);
    near(after(Strategy::HotRepair).expert_s / healthy.expert_s, 2.0, 0.03);
    assert!(after(Strategy::Ours).expert_s <= after(Strategy::Balance).expert_s * 1.001);
    // on one host NVLink has all of it
    let within = on(8, &Job { expert_parallel: 8, ..experts() });
    assert_eq!(within.healthy().expert_s, 0.0);
    let nvlink = 2.4e12 / 8.0;
    let tokens_s = 4.0 * 32.0 * f64::from(64 << 20) * 7.0 / 8.0 / nvlink;
    near(within.healthy().tensor_s, tokens_s, 1e-9);
}

/// Gradients of experts: each of two hosts has half of them, and reduces it with three others.
#[test]
fn gradients_of_experts_are_reduced_among_hosts_that_have_them() {
    let of = |expert_parallel| on(8, &Job { expert_parallel, ..experts() }).healthy().data_s;
    let model = experts().model;
    let experts_s = |hosts: f64, part: f64| {
        let bytes = model.expert_parameters() * part * 4.0;
        2.0 * (hosts - 1.0) / hosts * bytes / HOST
    };
    let rest = (model.parameters() - model.expert_parameters()) * 4.0;
    let rest_s = 2.0 * 7.0 / 8.0 * rest / HOST;
    near(of(8), rest_s + experts_s(8.0, 1.0), 0.03);
    near(of(16), rest_s + experts_s(4.0, 0.5), 0.03);
}

/// Who shares experts with a replica that is left out is left out, too.
#[test]
fn replicas_with_the_same_experts_leave_together() {
    let s = on(8, &experts());
    // 16 of 64
    let without = s.after(&LOST, Strategy::AdapCc).unwrap();
    near(without.compute_s / s.healthy().compute_s, 64.0 / 48.0, 1e-9);
    let one = on(2, &Job { batch: 16, ..experts() });
    let lost = Loss { host: 0, nic: 0, port: None, left: None };
    assert!(one.after(&[lost], Strategy::AdapCc).is_err());
    let halves = Job { context: 2, expert_parallel: 1, ..experts() };
    let s = on(8, &halves);
    // 1 of 32
    let without = s.after(&LOST, Strategy::AdapCc).unwrap();
    near(without.compute_s / s.healthy().compute_s, 32.0 / 31.0, 1e-9);
}

/// Llama 3.1 8B with 32,768 tokens on four hosts: K and V have 128 MiB, of which a host has 32.
#[test]
fn keys_and_values_take_as_long_as_nics_carry_them() {
    let model = Model { sequence: 32_768, ..Model::named("llama-3.1-8b").unwrap() };
    let job = |context_exchange| Job {
        model: model.clone(),
        tensor: 8,
        context: 4,
        context_exchange,
        batch: 8,
        ..Job::default()
    };
    // two replicas, four micro-batches, 32 layers
    let times = 4.0 * 32.0;
    let part_s = f64::from(32 << 20) / HOST;
    let s = on(8, &job(ContextExchange::Ring));
    near(s.healthy().context_s, times * part_s * (3.0 + 3.0 + 4.0), 0.05);
    let at_once = on(8, &job(ContextExchange::AllGather));
    near(at_once.healthy().context_s, times * part_s * 3.0 * 3.0, 0.05);
    for s in [s, at_once] {
        let after = s.after(&LOST, Strategy::Balance).unwrap();
        near(after.context_s / s.healthy().context_s, 8.0 / 7.0, 0.05);
        assert_eq!(s.after(&LOST, Strategy::Restart).unwrap(), s.healthy());
    }
}

/// The AllReduce of stage 0 sends as much as the two operations of stage 1, if gradients are as
/// long as parameters; stage 2 reduces with each micro-batch.
#[test]
fn stages_of_zero_take_as_long_as_their_volumes() {
    let job = |zero| Job { zero, gradient_bytes: 2, tensor: 8, batch: 32, ..Job::default() };
    let of = |zero| on(8, &job(zero)).healthy().data_s;
    let one = of(0) / 2.0;
    near(of(1), 2.0 * one, 0.05);
    // four micro-batches
    near(of(2), (4.0 + 1.0) * one, 0.05);
    near(of(3), 4.0 * 3.0 * one, 0.1);
}

/// Between chunks of layers activations also go from the last stage to the first.
#[test]
fn chunks_of_layers_close_the_circle_of_stages() {
    let job = |interleave| Job { pipeline: 4, interleave, tensor: 8, batch: 64, ..Job::default() };
    let (plain, chunks) = (on(4, &job(1)), on(4, &job(2)));
    let waits = |s: &Simulation| s.healthy().pipeline_s;
    near(waits(&chunks) / waits(&plain), (2.0 * 64.0 + 3.0) / (64.0 + 3.0), 1e-9);
    let compute = |s: &Simulation| s.healthy().compute_s;
    near(compute(&chunks) / compute(&plain), (1.0 + 3.0 / 128.0) / (1.0 + 3.0 / 64.0), 1e-9);
    for s in [plain, chunks] {
        for host in 0..4 {
            let lost = [Loss { host, nic: 0, port: None, left: None }];
            let after = s.after(&lost, Strategy::Balance).unwrap();
            assert!(after.pipeline_s > 1.05 * s.healthy().pipeline_s, "{host}");
        }
    }
}

/// Where rails are apart, the first stage and the last have six rails in common, and all neighbours
/// seven: what goes round waits for the six.
#[test]
fn the_last_stage_and_the_first_are_neighbours_between_chunks() {
    let longer = |interleave| {
        let cluster = Cluster { hosts: 4, spines: false, ..Cluster::default() };
        let job = Job { pipeline: 4, interleave, tensor: 8, batch: 64, ..Job::default() };
        let s = Simulation::new(&cluster, &job).unwrap();
        let lost = [(0, 0), (3, 1)].map(|(host, nic)| Loss { host, nic, port: None, left: None });
        s.after(&lost, Strategy::Balance).unwrap().pipeline_s / s.healthy().pipeline_s
    };
    assert!(longer(2) > longer(1) * 1.1, "{} {}", longer(2), longer(1));
}
