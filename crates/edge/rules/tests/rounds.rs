//! The reconciler step by step: when it looks, and what it makes of answers.

use std::net::Ipv4Addr;

use unbroken_edge_rules::{
    Command, Dump, Event, FdbEntry, Link, Mac, Mutation, Offload, Op, Own, Reconciler, Settings,
    Table, Tenant, Timing,
};

const TIMING: Timing = Timing { settle_us: 10, retry_us: 100, reply_us: 1_000, resync_us: 10_000 };

fn reconciler() -> Reconciler {
    let tenant = Tenant { vni: 5, anchor: "vni5".into(), ports: vec!["rep0".into()] };
    let settings = Settings {
        loopback: Ipv4Addr::new(10, 255, 0, 1),
        port: 4789,
        vtep: "vtep".into(),
        tenants: vec![tenant],
        offload: Offload::SkipHw,
        own: Own::default(),
        mutation: Mutation::None,
    };
    Reconciler::new(settings, TIMING, 0)
}

fn dump(table: Table, hosts: &[u8]) -> Dump {
    let link = |ifindex, name: &str| Link { ifindex, name: name.into() };
    let entry = |&host: &u8| FdbEntry {
        ifindex: 2,
        mac: Mac([2, 0, 0, 0, 0, host]),
        dst: Some(Ipv4Addr::new(10, 255, 0, host)),
        extern_learn: true,
        permanent: false,
    };
    match table {
        Table::Links => Dump::Links(vec![link(1, "vtep"), link(2, "vni5"), link(3, "rep0")]),
        Table::Fdb => Dump::Fdb(hosts.iter().map(entry).collect()),
        Table::Clsact => Dump::Clsact(vec![2, 3]),
        Table::Filters => Dump::Filters(Vec::new()),
        Table::Actions => Dump::Actions(Vec::new()),
    }
}

/// Answers all dumps of a round with a table of these hosts; gives the command that follows.
fn round(r: &mut Reconciler, now_us: u64, hosts: &[u8]) -> Option<Command> {
    loop {
        match r.poll(now_us) {
            Some(Command::Dump(number, table)) => r.dumped(now_us, number, dump(table, hosts)),
            other => return other,
        }
    }
}

#[test]
fn it_looks_at_once_then_when_told_and_at_the_latest_after_the_resync_time() {
    let mut r = reconciler();
    assert_eq!(round(&mut r, 0, &[]), None);
    assert_eq!(r.deadline_us(), 10_000);
    r.event(100, Event::Changed);
    r.event(105, Event::Overrun);
    assert_eq!((r.deadline_us(), r.poll(109)), (110, None));
    assert_eq!(round(&mut r, 110, &[]), None);
    assert_eq!(
        (r.deadline_us(), r.status().overruns, r.status().convergence_us),
        (10_110, 1, Some(10))
    );
    assert!(r.poll(10_110).is_some());
}

#[test]
fn what_happens_during_a_round_starts_another() {
    let mut r = reconciler();
    let first = r.poll(0);
    assert!(matches!(first, Some(Command::Dump(_, Table::Links))));
    r.event(1, Event::Changed);
    let Some(Command::Dump(number, _)) = first else { return };
    r.dumped(2, number, dump(Table::Links, &[]));
    assert_eq!(round(&mut r, 2, &[]), None);
    assert_eq!(r.deadline_us(), 12);
}

#[test]
fn a_torn_dump_is_asked_for_again_and_given_up_after_some_tries() {
    let mut r = reconciler();
    let mut asked = 0;
    while let Some(Command::Dump(number, table)) = r.poll(0) {
        assert_eq!(table, Table::Links);
        asked += 1;
        r.dumped(0, number, Dump::Interrupted(Box::new(dump(table, &[]))));
    }
    assert_eq!((asked, r.deadline_us(), r.status().failures), (8, 100, 1));
    assert!(r.status().last_failure.as_deref().unwrap_or_default().contains("Links"));
}

#[test]
fn failures_are_tried_again_slower_and_slower_but_within_the_resync_time() {
    let mut r = reconciler();
    let (mut now, mut waits) = (0, Vec::new());
    for _ in 0..10 {
        let Some(Command::Apply(number, ops)) = round(&mut r, now, &[2]) else {
            panic!("nothing to do")
        };
        assert_eq!(ops.len(), 2);
        r.applied(now, number, &[]);
        let Some(Command::Apply(number, ops)) = r.poll(now) else { panic!("no filters") };
        assert_eq!(ops.len(), 1);
        r.applied(now, number, &[(0, "EINVAL".into())]);
        // A notification does not cut the wait short.
        r.event(now, Event::Changed);
        waits.push(r.deadline_us() - now);
        now = r.deadline_us();
    }
    assert_eq!(waits, [100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000, 10_000]);
    let why = r.status().last_failure.clone().unwrap_or_default();
    assert!(why.contains("PutFilter") && why.contains("EINVAL"), "{why}");
    assert_eq!(round(&mut r, now, &[]), None);
    assert_eq!(r.deadline_us(), now + 10_000);
}

#[test]
fn somebody_who_undoes_all_work_is_met_slower_and_slower() {
    let mut r = reconciler();
    let (mut now, mut waits) = (0, Vec::new());
    for _ in 0..16 {
        for _ in 0..2 {
            let Some(Command::Apply(number, _)) = round(&mut r, now, &[2]) else {
                panic!("nothing to do")
            };
            r.applied(now, number, &[]);
        }
        r.event(now, Event::Changed);
        waits.push(r.deadline_us() - now);
        now = r.deadline_us();
    }
    assert_eq!(waits[..5], [10, 10, 10, 20, 40]);
    assert_eq!(waits.last(), Some(&10_000));
}

#[test]
fn a_late_answer_is_ignored() {
    let mut r = reconciler();
    let Some(Command::Dump(late, _)) = r.poll(0) else { panic!("no dump") };
    assert_eq!(r.deadline_us(), 1_000);
    assert_eq!(r.poll(1_000), None);
    assert_eq!(r.deadline_us(), 1_100);
    r.dumped(1_050, late, dump(Table::Links, &[]));
    let Some(Command::Dump(number, Table::Links)) = r.poll(1_100) else { panic!("no dump") };
    r.dumped(1_101, late, Dump::Failed("late".into()));
    r.dumped(1_101, number, dump(Table::Links, &[]));
    assert_eq!(r.status().failures, 1);
    assert!(matches!(r.poll(1_101), Some(Command::Dump(_, Table::Fdb))));
}

#[test]
fn large_changes_go_in_batches() {
    let mut r = reconciler();
    let hosts: Vec<u8> = (2..=200).collect();
    let many = |table| match table {
        Table::Fdb => {
            let Dump::Fdb(few) = dump(table, &hosts) else { return dump(table, &[]) };
            let spread =
                |e: &FdbEntry, i: u8| FdbEntry { mac: Mac([2, 0, 0, 0, i, e.mac.0[5]]), ..*e };
            Dump::Fdb((0..20).flat_map(|i| few.iter().map(move |e| spread(e, i))).collect())
        }
        other => dump(other, &[]),
    };
    let (mut sizes, mut first) = (Vec::new(), None);
    loop {
        match r.poll(0) {
            Some(Command::Dump(number, table)) => r.dumped(0, number, many(table)),
            Some(Command::Apply(number, ops)) => {
                first = first.or_else(|| ops.first().cloned());
                sizes.push(ops.len());
                r.applied(0, number, &[]);
            }
            None => break,
        }
    }
    assert!(matches!(first, Some(Op::AddAction { .. })));
    // 199 hosts, a redirect, 3,980 filters
    assert_eq!(sizes, [200, 2048, 1932]);
    assert_eq!(r.status().operations, 4180);
}

#[test]
fn no_filter_is_bound_to_an_action_that_could_not_be_made() {
    let mut r = reconciler();
    let Some(Command::Apply(number, ops)) = round(&mut r, 0, &[2, 3]) else {
        panic!("nothing to do")
    };
    // Somebody has taken the number of the first host's action meanwhile.
    assert!(matches!(ops[0], Op::AddAction { .. }));
    r.applied(0, number, &[(0, "EEXIST".into())]);
    let Some(Command::Apply(number, ops)) = r.poll(0) else { panic!("no filters") };
    assert!(
        matches!(ops[..], [Op::PutFilter { matches, .. }] if matches.mac == Mac([2, 0, 0, 0, 0, 3])),
        "{ops:?}"
    );
    r.applied(0, number, &[]);
    assert_eq!(r.deadline_us(), 100);
}
