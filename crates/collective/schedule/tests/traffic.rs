//! What each NIC carries, counted byte by byte, is what the algorithms promise.

use unbroken_schedule::verify::{check, Traffic};
use unbroken_schedule::{
    Choice, Collective, Counts, DataType, Fabric, Grouping, Health, Host, Matrix, Nic, Operation,
    Owners, Path, Place, Plan, ReduceOp, Shape, Topology,
};

const SUM: ReduceOp = ReduceOp::Sum;
/// The vector, in bytes: divisible by everything here.
const BYTES: u64 = 64 * 1024 * 3 * 5 * 7;
const COUNT: u64 = BYTES / 4;

fn uniform(hosts: usize, ranks: usize, nics: usize, fabric: Fabric) -> Topology {
    Topology::uniform(hosts, ranks, Host::new(nics, Nic::new(100_000)), fabric).unwrap()
}

fn traffic(topology: &Topology, operation: Operation, choice: Choice) -> Traffic {
    let collective = Collective::new(operation, DataType::F32, false, topology.ranks()).unwrap();
    let schedule = Plan::new(topology, &collective, choice).unwrap().schedule();
    check(&schedule, topology).unwrap();
    Traffic::of(&schedule, topology)
}

fn choice(shape: Shape, grouping: Grouping) -> Choice {
    Choice { chunk_bytes: 64 << 10, divide_bytes: 1 << 10, ..Choice::new(shape, grouping) }
}

/// `bytes` is `share` of the vector, within a thousandth.
fn is(bytes: u64, share: f64, what: &str) {
    let got = bytes as f64 / BYTES as f64;
    assert!((got - share).abs() < 0.001, "{what}: {got} of the vector, not {share}");
}

/// 2(n − 1)/n of the vector a host, each way, and the same on each of its NICs.
#[test]
fn hierarchical_all_reduce_moves_two_n_minus_one_nth() {
    for hosts in [2, 3, 4, 7] {
        for shape in [Shape::Direct, Shape::Ring, Shape::Tree] {
            for (ranks, nics) in [(4, 4), (2, 4), (4, 2), (1, 2)] {
                let t = uniform(hosts, ranks, nics, Fabric::RailOnly);
                let all = traffic(
                    &t,
                    Operation::AllReduce { op: SUM, count: COUNT },
                    choice(shape, Grouping::Hosts),
                );
                let share = 2.0 * (hosts as f64 - 1.0) / hosts as f64;
                for host in 0..hosts {
                    let what = format!("{shape:?}, {hosts} hosts of {ranks} ranks");
                    is(all.host(host).0, share, &what);
                    is(all.host(host).1, share, &what);
                    for nic in 0..nics {
                        is(all.sent[host][nic], share / nics as f64, &what);
                    }
                    // each rank gives each other its part of a channel and gets the result
                    is(all.memory[host], 2.0 * (ranks as f64 - 1.0), &what);
                }
            }
        }
    }
}

/// NCCL's rings over all GPUs: 2(ng − 1)/ng of the vector.
#[test]
fn a_flat_ring_moves_more() {
    for (hosts, ranks) in [(2, 2), (2, 4), (3, 4)] {
        let t = uniform(hosts, ranks, 4, Fabric::RailOnly);
        let all = traffic(
            &t,
            Operation::AllReduce { op: SUM, count: COUNT },
            choice(Shape::Ring, Grouping::Ranks),
        );
        let n = (hosts * ranks) as f64;
        for host in 0..hosts {
            is(all.host(host).0, 2.0 * (n - 1.0) / n, "flat ring");
        }
    }
}

#[test]
fn half_an_all_reduce_moves_half_of_it() {
    let n = 3.0;
    for grouping in [Grouping::Hosts, Grouping::Ranks] {
        for shape in [Shape::Direct, Shape::Ring, Shape::Tree] {
            let t = uniform(3, 1, 2, Fabric::RailOnly);
            let counts = Counts::Equal(COUNT / 3);
            let scatter = Operation::ReduceScatter { op: SUM, counts: counts.clone() };
            for operation in [scatter, Operation::AllGather { counts }] {
                let half = traffic(&t, operation, choice(shape, grouping));
                for host in 0..3 {
                    is(half.host(host).0, (n - 1.0) / n, "half");
                    is(half.host(host).1, (n - 1.0) / n, "half");
                    is(half.sent[host][1], (n - 1.0) / n / 2.0, "half");
                }
            }
        }
    }
    // several ranks: the same for a host, as blocks are reduced on their hosts first
    let t = uniform(3, 4, 4, Fabric::RailOnly);
    let counts = Counts::Equal(COUNT / 12);
    let half = traffic(
        &t,
        Operation::ReduceScatter { op: SUM, counts },
        choice(Shape::Direct, Grouping::Hosts),
    );
    (0..3).for_each(|host| is(half.host(host).0, 2.0 / 3.0, "hierarchical"));
}

#[test]
fn a_root_sends_once_or_receives_once_in_a_ring() {
    let t = uniform(4, 2, 2, Fabric::RailOnly);
    let all = traffic(
        &t,
        Operation::Broadcast { root: 2, count: COUNT },
        choice(Shape::Ring, Grouping::Hosts),
    );
    let sent: Vec<u64> = (0..4).map(|h| all.host(h).0).collect();
    assert_eq!(sent, [0, BYTES, BYTES, BYTES], "round the ring from host 1, which host 0 ends");
    let all = traffic(
        &t,
        Operation::Reduce { op: SUM, root: 2, count: COUNT },
        choice(Shape::Direct, Grouping::Hosts),
    );
    assert_eq!(all.host(1), (0, 3 * BYTES));
}

/// A host that owns the share w sends and receives (1 + (n − 2)w) of the vector (`reshape`).
#[test]
fn unequal_shards_move_what_their_owners_own() {
    let t = uniform(4, 2, 2, Fabric::RailOnly);
    let owners = vec![1, 2, 3, 4];
    let choice = Choice {
        owners: Owners::Weights(owners.clone()),
        ..choice(Shape::Direct, Grouping::Hosts)
    };
    let all = traffic(&t, Operation::AllReduce { op: SUM, count: COUNT }, choice);
    for (host, weight) in owners.into_iter().enumerate() {
        let share = 1.0 + 2.0 * weight as f64 / 10.0;
        is(all.host(host).0, share, "sent");
        is(all.host(host).1, share, "received");
    }
}

/// R²CCL §5.1: after a NIC's death each of the others carries its part, and nobody else notices
/// where rails are joined.
#[test]
fn a_dead_nics_part_is_spread_over_the_others() {
    for fabric in [Fabric::AnyToAny, Fabric::RailOnly] {
        let t = uniform(2, 4, 8, fabric).with_health(0, 3, Health::Down).unwrap();
        let all = traffic(
            &t,
            Operation::AllReduce { op: SUM, count: COUNT },
            choice(Shape::Direct, Grouping::Hosts),
        );
        for nic in 0..8 {
            is(all.sent[0][nic], if nic == 3 { 0.0 } else { 1.0 / 7.0 }, "the host that lost it");
            let other = match fabric {
                Fabric::AnyToAny => 1.0 / 8.0,
                Fabric::RailOnly if nic == 3 => 0.0,
                Fabric::RailOnly => 1.0 / 7.0,
            };
            is(all.received[1][nic], other, "the other");
        }
    }
}

#[test]
fn short_messages_take_turns() {
    let t = uniform(2, 1, 8, Fabric::AnyToAny).with_health(0, 3, Health::Down).unwrap();
    let whole = Choice {
        divide_bytes: u64::MAX,
        channels: Some(8),
        chunk_bytes: 4 << 10,
        ..Choice::new(Shape::Direct, Grouping::Hosts)
    };
    let all = traffic(&t, Operation::AllReduce { op: SUM, count: COUNT }, whole);
    for nic in 0..8 {
        let share = all.sent[0][nic] as f64 / BYTES as f64;
        let ideal = if nic == 3 { 0.0 } else { 1.0 / 7.0 };
        assert!((share - ideal).abs() < 0.005, "NIC {nic}: {share}");
    }
}

#[test]
fn all_to_all_is_even_over_nics() {
    for (ranks, nics) in [(4, 4), (2, 4), (1, 4), (4, 2)] {
        let t = uniform(3, ranks, nics, Fabric::RailOnly);
        let n = 3 * ranks as u64;
        let counts = Matrix::Equal(COUNT / n);
        let all =
            traffic(&t, Operation::AllToAll { counts }, choice(Shape::Direct, Grouping::Ranks));
        for host in 0..3 {
            for nic in 0..nics {
                let share = ranks as f64 * 2.0 / 3.0 / nics as f64;
                is(all.sent[host][nic], share, "all to all");
                is(all.received[host][nic], share, "all to all");
            }
        }
    }
}

#[test]
fn one_pair_uses_all_nics() {
    let t = uniform(2, 4, 4, Fabric::RailOnly).with_health(1, 2, Health::Slow(50)).unwrap();
    let all = traffic(
        &t,
        Operation::SendRecv { from: 1, to: 6, count: COUNT },
        choice(Shape::Direct, Grouping::Ranks),
    );
    for (nic, share) in [2.0, 2.0, 1.0, 2.0].into_iter().enumerate() {
        is(all.sent[0][nic], share / 7.0, "pair");
        is(all.received[1][nic], share / 7.0, "pair");
    }
}

/// R²CCL §5.1: where the link between NUMA nodes is narrow, ranks beside the NICs forward, and
/// every NIC still carries its part.
#[test]
fn ranks_beside_the_nics_forward_what_the_link_cannot_carry() {
    let mut host = Host { cross_numa_mbps: 1_000, ..Host::new(8, Nic::new(100_000)) };
    (4..8).for_each(|nic| host.nics[nic].numa = 1);
    let places = (0..16).map(|rank| Place { host: rank / 8, numa: (rank % 8 / 4) as u8 }).collect();
    let t = Topology::new(vec![host.clone(), host], places, Fabric::AnyToAny).unwrap();
    let t = t.with_health(0, 3, Health::Down).unwrap();
    let operation = Operation::AllReduce { op: SUM, count: COUNT };
    let collective = Collective::new(operation, DataType::F32, false, 16).unwrap();
    let plan = Plan::new(&t, &collective, choice(Shape::Direct, Grouping::Hosts)).unwrap();
    let schedule = plan.schedule();
    check(&schedule, &t).unwrap();
    let all = Traffic::of(&schedule, &t);
    (0..8).for_each(|nic| is(all.sent[0][nic], if nic == 3 { 0.0 } else { 1.0 / 7.0 }, "NIC"));
    // rank 3's eighth goes out over seven NICs, four of which are over there; and it comes in the
    // same way
    is(all.memory[0], 2.0 * 7.0 + 2.0 * 4.0 / 7.0 / 8.0, "memory");
    is(all.memory[1], 2.0 * 7.0, "memory of the other");
    let lanes = schedule.programs[3].lanes.iter().filter(|l| matches!(l.path, Path::Nics { .. }));
    for lane in lanes {
        let Path::Nics { from, to } = lane.path else { unreachable!() };
        assert!(
            (if lane.from == 3 { from } else { to }) < 4,
            "rank 3 itself uses its own node's NICs"
        );
    }
    let staged = schedule.programs[4].scratch * 4;
    assert!(staged < 1 << 20, "what a rank holds for others is bounded: {staged} bytes");
}
