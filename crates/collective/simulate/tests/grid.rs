//! What the planner chooses beside all that could be asked for, by the simulator's own times.

use unbroken_schedule::cost::{Costs, Switches};
use unbroken_schedule::Form;
use unbroken_simulate::cluster::{Cluster, Loss};
use unbroken_simulate::random::Random;
use unbroken_simulate::strategy::{Kind, Pair, Strategy};

const SEED: u64 = 44;
const CASES: u64 = 2000;
/// By how much what is chosen may be slower than the best.
const MOST: f64 = 1.05;

struct Case {
    cluster: Cluster,
    lost: Vec<Loss>,
    kind: Kind,
    bytes: u64,
}

/// Clusters of few hosts with few or many NICs, slow or fast beside NVLink, some of which are lost;
/// half of the operations are of 1 to 16 MiB.
fn case(number: u64) -> Case {
    let mut random = Random::part(SEED, number);
    let mut any = |of: &[u32]| of[random.below(of.len())];
    let hosts = any(&[2, 2, 3, 4, 5, 8, 12, 16]) as usize;
    let narrow = any(&[1, 1, 1, 2, 8]);
    let cluster = Cluster {
        hosts,
        gpus: any(&[1, 1, 2, 4, 8]) as usize,
        nics: any(&[1, 2, 4, 8]) as usize,
        nic_mbps: any(&[100_000, 200_000, 400_000]),
        nvlink_mbps: any(&[100_000, 400_000, 2_400_000, 3_600_000]),
        spines: any(&[0, 1, 1]) == 1,
        pod_hosts: any(&[0, 2, 4]) as usize,
        oversubscription: f64::from(narrow),
        ..Cluster::default()
    };
    let mut lost = Vec::new();
    for _ in 0..any(&[0, 1, 1, 1, 2, 3]) {
        let (host, nic) = (any(&[0, 1, 2, 3, 12]) as usize % hosts, any(&[0, 1, 2, 3, 7]) as usize);
        let left = [None, None, Some(25), Some(50), Some(90)][any(&[0, 1, 2, 3, 4]) as usize];
        if nic < cluster.nics {
            lost.push(Loss { host, nic, port: None, left });
        }
    }
    let kind = Kind::ALL[any(&[0, 0, 0, 0, 1, 2, 3, 4, 5]) as usize];
    let power = any(&[16, 18, 20, 20, 21, 22, 22, 23, 24, 26, 28, 30]);
    let bytes = (1u64 << power) + u64::from(any(&[0, 0, 12_345]));
    Case { cluster, lost, kind, bytes }
}

/// How much longer the choice takes than the best, and what that is; none where hosts are parted.
fn longer(case: &Case) -> Option<(f64, String)> {
    let Case { cluster, lost, kind, bytes } = case;
    let hosts = || 0..cluster.hosts;
    let topology = |lost: &[Loss]| cluster.topology(hosts(), (cluster.gpus, 1), lost).unwrap();
    let (healthy, now) = (topology(&[]), topology(lost));
    let switches = Switches::over(cluster.clos(), hosts());
    let costs = Costs::default();
    let collective = kind.of(*bytes, healthy.ranks()).unwrap();
    let asked = |form| Pair {
        healthy: &healthy,
        now: &now,
        before: &switches,
        switches: &switches,
        costs: &costs,
        form,
    };
    let (chosen, us) = asked(None).plan(&collective).ok()?;
    let form = |form: Form| {
        let found = form.takes(collective.operation()).then(|| asked(Some(form)).plan(&collective));
        Some((found?.ok()?.1, form.name()))
    };
    let balance = asked(None).after(&collective, Strategy::Balance).ok();
    let all =
        Form::ALL.into_iter().filter_map(form).chain(balance.map(|done| (done.us, "Balance")));
    let (best_us, best) = all.min_by(|a, b| a.0.total_cmp(&b.0))?;
    let lost: Vec<String> = lost.iter().map(Loss::to_string).collect();
    let what = format!(
        "{} of {bytes} bytes: {} takes {us:.1} us, {best} {best_us:.1}; lost {lost:?} of {cluster:?}",
        kind.name(),
        Form::of(chosen.choice()).name(),
    );
    Some((us / best_us, what))
}

#[test]
fn nothing_that_could_be_asked_for_is_faster_than_what_is_chosen() {
    let parts = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let of_part = |part: u64| {
        let numbers = (0..CASES).filter(move |number| number % parts == part);
        numbers.filter_map(|n| longer(&case(n)).map(|(l, what)| (l, format!("{n}: {what}"))))
    };
    let mut all: Vec<(f64, String)> = std::thread::scope(|scope| {
        let parts = (0..parts).map(|part| scope.spawn(move || of_part(part).collect::<Vec<_>>()));
        let parts: Vec<_> = parts.collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
    });
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    let slower = all.iter().filter(|(longer, _)| *longer > 1.000_001).count();
    println!("{} cases, {slower} slower than the best", all.len());
    all.iter().take(12).for_each(|(longer, what)| println!("{longer:.3} {what}"));
    assert!(all.len() as u64 > CASES * 9 / 10, "{}", all.len());
    assert!(all[0].0 <= MOST, "{} {}", all[0].0, all[0].1);
}
