//! One plan at a time, carried out by a kernel that nobody else uses meanwhile.

#[path = "sim/kernel.rs"]
#[allow(dead_code)]
mod kernel;

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use kernel::{Kernel, KernelAction, KernelFilter};
use proptest::prelude::*;
use unbroken_edge_rules::{
    diff, wanted, ActionId, ActionKind, ActionSpec, FdbEntry, Mac, Match, Mutation, Offload, Op,
    Own, Plan, Rules, Settings, Tables, Tenant,
};

const LOOPBACK: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 1);

fn settings(mutation: Mutation, offload: Offload) -> Settings {
    let tenant = |vni: u32, ports: &[&str]| Tenant {
        vni,
        anchor: format!("vni{vni}"),
        ports: ports.iter().map(|p| (*p).to_owned()).collect(),
    };
    Settings {
        loopback: LOOPBACK,
        port: 4789,
        vtep: "vtep".into(),
        tenants: vec![tenant(1, &["rep0", "rep1"]), tenant(2, &["rep2"])],
        offload,
        own: Own { priority: 7, handles: 100..160, indexes: 100..160 },
        mutation,
    }
}

/// A kernel with devices 1 to 6 and a table of these destinations: anchor, address, host.
fn kernel(fdb: &[(bool, u8, u8)]) -> Kernel {
    let mut kernel = Kernel::default();
    for name in ["vtep", "vni1", "vni2", "rep0", "rep1", "rep2"] {
        kernel.add_link(name);
    }
    set_fdb(&mut kernel, fdb);
    kernel
}

fn set_fdb(kernel: &mut Kernel, fdb: &[(bool, u8, u8)]) {
    kernel.fdb.clear();
    for &(second, mac, host) in fdb {
        let dst = Some(Ipv4Addr::new(10, 255, 0, host));
        let ifindex = 2 + u32::from(second);
        let mac = Mac([2, 0, 0, 0, 0, mac]);
        kernel.fdb.insert(FdbEntry { ifindex, mac, dst, extern_learn: true, permanent: false });
    }
}

fn plan(kernel: &Kernel, settings: &Settings) -> Plan {
    let tables = Tables { links: kernel.link_table(), fdb: kernel.fdb.iter().copied().collect() };
    let rules = Rules {
        clsact: kernel.clsact.clone(),
        filters: kernel.filter_table(),
        actions: kernel.action_table(),
    };
    diff(settings, &wanted(settings, &tables), &rules)
}

fn carry_out(kernel: &mut Kernel, settings: &Settings) -> Result<Plan, String> {
    let plan = plan(kernel, settings);
    let (before, should) = (kernel.effect(), kernel.should(settings));
    for op in &plan.ops {
        kernel.apply(settings, op).map_err(|e| format!("{op:?}: {e}"))?;
        let now = kernel.effect();
        if let Some(key) = before.keys().find(|k| should.contains_key(*k) && !now.contains_key(*k))
        {
            return Err(format!("{op:?} leaves {key:?} without a rule for a moment"));
        }
    }
    match kernel.violations.first() {
        Some(violation) => Err(violation.clone()),
        None => Ok(plan),
    }
}

/// Somebody else's filter on each port, at our priority and handle, and an action with one of our
/// numbers.
fn add_foreign(kernel: &mut Kernel) {
    let id = ActionId { kind: ActionKind::TunnelKey, index: 100 };
    let action = KernelAction {
        spec: Some(ActionSpec::Decap),
        cookie: false,
        offload: Offload::Both,
        foreign: true,
    };
    kernel.actions.insert(id, action);
    for port in 4..=6 {
        kernel.clsact.insert(port);
        let filter = KernelFilter {
            matches: None,
            actions: vec![id],
            offload: Offload::Both,
            foreign: true,
        };
        kernel.filters.insert((port, 7, 101), filter);
    }
}

/// The fewest messages for filters from one table to another: what changes is replaced, what goes
/// makes room for what comes.
fn fewest(before: &Kernel, settings: &Settings, after: &Kernel) -> usize {
    let (old, new) = (before.effect(), after.should(settings));
    let devices: BTreeSet<u32> = old.keys().chain(new.keys()).map(|k| k.0).collect();
    let on = |all: &BTreeMap<(u32, Match), _>, d: u32| {
        all.keys().filter(|k| k.0 == d).copied().collect::<BTreeSet<_>>()
    };
    devices
        .into_iter()
        .map(|d| {
            let (is, should) = (on(&old, d), on(&new, d));
            let changed = is.intersection(&should).filter(|k| old[*k] != new[*k]).count();
            changed + is.difference(&should).count().max(should.difference(&is).count())
        })
        .sum()
}

fn tables() -> impl Strategy<Value = Vec<(bool, u8, u8)>> {
    prop::collection::vec((any::<bool>(), 1u8..12, 1u8..6), 0..14)
}

fn offloads() -> impl Strategy<Value = Offload> {
    prop::sample::select(vec![Offload::SkipHw, Offload::Both, Offload::SkipSw])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_plan_leads_from_any_table_to_any_other_in_the_fewest_messages(
        first in tables(), second in tables(), offload in offloads(), foreign in any::<bool>(),
    ) {
        let settings = settings(Mutation::None, offload);
        let mut kernel = kernel(&first);
        if foreign {
            add_foreign(&mut kernel);
        }
        carry_out(&mut kernel, &settings).map_err(TestCaseError::fail)?;
        prop_assert_eq!(kernel.effect(), kernel.should(&settings));
        prop_assert!(plan(&kernel, &settings).ops.is_empty());

        let before = kernel.clone();
        set_fdb(&mut kernel, &second);
        let plan_of_second = carry_out(&mut kernel, &settings).map_err(TestCaseError::fail)?;
        prop_assert_eq!(kernel.effect(), kernel.should(&settings));
        prop_assert!(kernel.orphans().is_empty());
        prop_assert!(plan(&kernel, &settings).ops.is_empty());
        let filters = |op: &&Op| matches!(op, Op::PutFilter { .. } | Op::DelFilter { .. });
        prop_assert_eq!(plan_of_second.ops.iter().filter(filters).count(), fewest(&before, &settings, &kernel));
    }
}

#[test]
#[cfg(feature = "mutants")]
fn a_wrong_order_is_noticed() {
    for (mutation, why) in
        [(Mutation::ActionsFirst, "EPERM"), (Mutation::DeleteFirst, "without a rule")]
    {
        let settings = settings(mutation, Offload::SkipHw);
        let mut kernel = kernel(&[(false, 1, 2)]);
        carry_out(&mut kernel, &settings).unwrap();
        set_fdb(&mut kernel, &[(false, 1, 3)]);
        let error = carry_out(&mut kernel, &settings).unwrap_err();
        assert!(error.contains(why), "{mutation:?}: {error}");
    }
}

#[test]
fn destinations_of_a_host_share_its_action() {
    let settings = settings(Mutation::None, Offload::SkipHw);
    let mut kernel = kernel(&[(false, 1, 2), (false, 2, 2), (false, 3, 2), (true, 1, 2)]);
    let plan = carry_out(&mut kernel, &settings).unwrap();
    let count = |f: fn(&Op) -> bool| plan.ops.iter().filter(|op| f(op)).count();
    // One for each tenant that the host is in, and the redirect.
    assert_eq!(count(|op| matches!(op, Op::AddAction { .. })), 3);
    assert_eq!(count(|op| matches!(op, Op::PutFilter { .. })), 3 * 2 + 1);
    // A move is one message for each port; the new host's action comes first, the old one stays in
    // use.
    set_fdb(&mut kernel, &[(false, 1, 3), (false, 2, 2), (false, 3, 2), (true, 1, 2)]);
    let ops = carry_out(&mut kernel, &settings).unwrap().ops;
    assert!(
        matches!(
            ops[..],
            [Op::AddAction { .. }, Op::PutFilter { replace: true, .. }, Op::PutFilter { .. }]
        ),
        "{ops:?}"
    );
}

#[test]
fn rules_that_are_to_work_elsewhere_get_new_actions() {
    let mut kernel = kernel(&[(false, 1, 2), (true, 1, 2)]);
    for offload in [Offload::SkipHw, Offload::Both, Offload::SkipSw] {
        let settings = settings(Mutation::None, offload);
        carry_out(&mut kernel, &settings).unwrap();
        assert!(kernel.filters.values().all(|f| f.offload == offload));
        assert!(kernel.actions.values().all(|a| a.offload == offload));
    }
}

#[test]
fn a_foreign_filter_keeps_the_action_that_it_borrows() {
    let settings = settings(Mutation::None, Offload::SkipHw);
    let mut kernel = kernel(&[(false, 1, 2)]);
    carry_out(&mut kernel, &settings).unwrap();
    let ours = *kernel.actions.keys().find(|a| a.kind == ActionKind::TunnelKey).unwrap();
    let filter =
        KernelFilter { matches: None, actions: vec![ours], offload: Offload::Both, foreign: true };
    kernel.filters.insert((4, 9, 1), filter);
    set_fdb(&mut kernel, &[]);
    carry_out(&mut kernel, &settings).unwrap();
    assert!(kernel.actions.contains_key(&ours));
    assert!(kernel.effect().is_empty());
}

#[test]
fn more_rules_than_numbers_are_counted_and_the_rest_works() {
    let mut settings = settings(Mutation::None, Offload::SkipHw);
    settings.own.handles = 100..102;
    let mut kernel = kernel(&[(true, 1, 2), (true, 2, 2), (true, 3, 2)]);
    let plan = carry_out(&mut kernel, &settings).unwrap();
    assert_eq!((plan.no_place, kernel.effect().len()), (1, 2));
    settings.own.indexes = 100..100;
    let mut other = Kernel { filters: BTreeMap::new(), actions: BTreeMap::new(), ..kernel.clone() };
    assert_eq!(carry_out(&mut other, &settings).unwrap().no_place, 3);
}

#[test]
fn a_tor_that_dies_changes_no_rule() {
    // Routes are not among the tables at all; the table of destinations stays as it was.
    let settings = settings(Mutation::None, Offload::SkipHw);
    let mut kernel = kernel(&[(false, 1, 2), (false, 2, 3)]);
    carry_out(&mut kernel, &settings).unwrap();
    kernel.generation += 1;
    assert!(carry_out(&mut kernel, &settings).unwrap().ops.is_empty());
}

#[test]
fn mac_addresses_are_read_as_they_are_written() {
    let mac = Mac([2, 0, 0xab, 0, 0, 0x10]);
    assert_eq!(mac.to_string().parse(), Ok(mac));
    for wrong in ["", "02:00", "02:00:00:00:00:zz", "2:0:0:0:0:1", "02:00:00:00:00:01:02"] {
        assert!(wrong.parse::<Mac>().unwrap_err().contains(wrong), "{wrong}");
    }
}
