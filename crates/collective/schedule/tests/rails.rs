//! Which rails a pair of hosts uses, where others have lost some.

use std::collections::BTreeMap;

use unbroken_schedule::cost::Costs;
use unbroken_schedule::planner::{plan, Planned};
use unbroken_schedule::{
    Collective, DataType, Fabric, Folding, Health, Host, Nic, Operation, Path, Topology,
};

fn sent(fabric: Fabric, lost: &[(usize, usize, Health)]) -> (Planned, BTreeMap<usize, f64>) {
    let host = Host::new(4, Nic::new(100_000));
    let t = Topology::uniform(4, 1, host, fabric).unwrap();
    let t =
        lost.iter().fold(t, |t, (host, nic, health)| t.with_health(*host, *nic, *health).unwrap());
    let operation = Operation::SendRecv { from: 0, to: 3, count: 16 << 20 };
    let collective = Collective::new(operation, DataType::F32, false, 4).unwrap();
    let planned = plan(&t, &collective, &Costs::default(), Folding::InOrder).unwrap();
    let mut by_nic = BTreeMap::new();
    planned.plan.flows(|flow| {
        if let Path::Nics { from, .. } = flow.path {
            *by_nic.entry(from).or_default() += flow.bytes / f64::from(64 << 20);
        }
    });
    (planned, by_nic)
}

/// Hosts that take no part may have lost whatever rails: those who do divide what they exchange
/// among the rails that both have.
#[test]
fn rails_of_those_who_take_no_part_do_not_matter() {
    let down = |host, nic| (host, nic, Health::Down);
    let uninvolved = [down(1, 3), down(2, 3)];
    for fabric in [Fabric::RailOnly, Fabric::AnyToAny] {
        for lost in [&[][..], &[down(3, 2)], &[(0, 1, Health::Slow(50))]] {
            let (alone, right) = sent(fabric, lost);
            let (planned, found) = sent(fabric, &[lost, &uninvolved].concat());
            assert_eq!(found, right, "{fabric:?} {lost:?}");
            assert_eq!(alone.considered[0].us, planned.considered[0].us, "{fabric:?} {lost:?}");
        }
    }
    let (planned, found) = sent(Fabric::RailOnly, &[&[down(3, 2)][..], &uninvolved].concat());
    assert_eq!(found.len(), 3);
    assert!(found.values().all(|share| (share - 1.0 / 3.0).abs() < 0.01), "{found:?}");
    // 64 MiB over three NICs
    let bound_us = f64::from(64 << 23) / 300_000.0;
    assert!(planned.considered[0].us < 1.05 * bound_us);
}
