//! Choices that do not fit are refused, and the message says what would.

use unbroken_schedule::{
    Choice, Collective, Counts, DataType, Fabric, Folding, Grouping, Host, Nic, Operation, Owners,
    Plan, ReduceOp, Shape, Topology,
};

fn refused(operation: Operation, choice: Choice) -> String {
    let t = Topology::uniform(3, 2, Host::new(2, Nic::new(100_000)), Fabric::RailOnly).unwrap();
    let collective = Collective::new(operation, DataType::F32, false, 6).unwrap();
    Plan::new(&t, &collective, choice).unwrap_err().to_string()
}

#[test]
fn choices_that_do_not_fit_are_refused() {
    let op = ReduceOp::Sum;
    let all = || Operation::AllReduce { op, count: 10 };
    let gather = || Operation::AllGather { counts: Counts::Equal(4) };
    let of = |shape| Choice::new(shape, Grouping::Hosts);
    let weights = |w: &[u64]| Owners::Weights(w.to_vec());
    let in_order =
        |shape, grouping| Choice { folding: Folding::InOrder, ..Choice::new(shape, grouping) };
    for (operation, choice, says) in [
        (gather(), of(Shape::OneShot), "OneShot is for AllReduce and Barrier alone; take Direct"),
        (
            gather(),
            of(Shape::SubRings),
            "SubRings is for AllReduce among hosts; take Ring or Direct",
        ),
        (
            all(),
            Choice::new(Shape::SubRings, Grouping::Ranks),
            "SubRings is for AllReduce among hosts; take Ring or Direct",
        ),
        (
            all(),
            in_order(Shape::Ring, Grouping::Hosts),
            "rings and trees reduce in an order of their own; take Direct",
        ),
        (
            all(),
            in_order(Shape::Direct, Grouping::Ranks),
            "reducing in order needs the hosts as nodes; take Grouping::Hosts",
        ),
        (
            gather(),
            Choice { owners: weights(&[1, 1, 1]), ..of(Shape::Direct) },
            "this operation's owners are given; take Owners::Equal",
        ),
        (
            all(),
            Choice { owners: weights(&[1, 1]), ..of(Shape::Direct) },
            "2 weights of owners; there can be 3 to 3",
        ),
        (
            all(),
            Choice { owners: weights(&[0, 0, 0]), ..of(Shape::Direct) },
            "0 owners with a weight; there can be 1 to 3",
        ),
        (
            all(),
            Choice { owners: Owners::ByCapacity, ..of(Shape::Tree) },
            "owners by capacity are hosts, of rings or direct; take Grouping::Hosts and \
             Shape::Direct, Shape::Ring or Shape::SubRings",
        ),
        (
            all(),
            Choice { owners: weights(&[1, 1, 1]), ..of(Shape::SubRings) },
            "SubRings have owners of their own; take Owners::Equal or Owners::ByCapacity",
        ),
        (
            all(),
            Choice { channels: Some(0), ..of(Shape::Ring) },
            "0 channels; there can be 1 to 256",
        ),
        (
            all(),
            Choice { ring: Some(vec![0, 1]), ..of(Shape::Ring) },
            "2 hosts of the ring; there can be 3 to 3",
        ),
        (
            all(),
            Choice { ring: Some(vec![0, 1, 3]), ..of(Shape::Ring) },
            "host 3 does not exist; the numbers are 0 to 2",
        ),
        (
            all(),
            Choice { ring: Some(vec![0, 1, 1]), ..of(Shape::Ring) },
            "a host is twice in the ring; name each once",
        ),
    ] {
        assert_eq!(refused(operation, choice), says);
    }
}

#[test]
fn a_collective_of_other_ranks_is_refused() {
    let t = Topology::uniform(3, 2, Host::new(2, Nic::new(100_000)), Fabric::RailOnly).unwrap();
    let collective = Collective::new(Operation::Barrier, DataType::F32, false, 4).unwrap();
    let error = Plan::new(&t, &collective, Choice::new(Shape::Tree, Grouping::Ranks)).unwrap_err();
    assert_eq!(error.to_string(), "4 ranks of the collective; there can be 6 to 6");
}
