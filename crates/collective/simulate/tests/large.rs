//! What the planner chooses on large clusters, by volumes.

use unbroken_schedule::cost::{Costs, Switches};
use unbroken_schedule::{Fabric, Health, Host, Nic, Topology};
use unbroken_simulate::strategy::{Kind, Pair, Strategy};

/// Hosts of eight GPUs and NICs, as `unbroken plan` has them.
fn hosts(count: usize) -> Topology {
    let host = Host { memory_mbps: 2_400_000, ..Host::new(8, Nic::new(200_000)) };
    Topology::uniform(count, 8, host, Fabric::RailOnly).unwrap()
}

/// What is chosen after a failure takes no longer than what was chosen before over the NICs that
/// are left, among few hosts or many. (Below some MiB volumes say little.)
#[test]
fn what_is_chosen_after_a_failure_is_no_worse_than_what_was_there() {
    let mut worse = Vec::new();
    for count in [4, 16, 64, 256, 1024] {
        let healthy = hosts(count);
        let now = healthy.clone().with_health(1, 3, Health::Down).unwrap();
        let costs = Costs::default();
        let switches = Switches::default();
        let pair = Pair {
            healthy: &healthy,
            now: &now,
            before: &switches,
            switches: &switches,
            costs: &costs,
            form: None,
        };
        for mib in [16, 128, 1024] {
            let collective = Kind::AllReduce.of(mib << 20, healthy.ranks()).unwrap();
            let before = pair.before(&collective).unwrap();
            let ours = pair.after(&collective, Strategy::Ours).unwrap();
            let balance = pair.after(&collective, Strategy::Balance).unwrap();
            let what = format!(
                "{count} hosts, {mib} MiB: {} {:.0} us, ours {} {:.1} %, Balance {:.1} %",
                before.form(),
                before.us,
                ours.form(),
                (ours.us / before.us - 1.0) * 100.0,
                (balance.us / before.us - 1.0) * 100.0
            );
            println!("{what}");
            if ours.us > 1.03 * balance.us {
                worse.push(what);
            }
        }
    }
    assert!(worse.is_empty(), "{worse:#?}");
}
