//! What the reconciler takes with many destinations: 100,000 from nothing, and 1,000 of them that
//! move. Memory is that of the whole process, with the rules that a kernel would hold.
//!
//! usage: `cargo run --release --example scale [DESTINATIONS [HOSTS]]`

use std::net::Ipv4Addr;
use std::time::Instant;

use unbroken_edge_rules::{
    diff, wanted, Action, FdbEntry, Filter, Link, Mac, Mutation, Offload, Op, Own, Rules, Settings,
    Tables, Tenant,
};

const MOVES: u32 = 1_000;

fn entry(number: u32, host: u32) -> FdbEntry {
    let [a, b, c, d] = number.to_be_bytes();
    let dst = Some(Ipv4Addr::from(0x0A00_0002 + host));
    FdbEntry { ifindex: 2, mac: Mac([2, 0, a, b, c, d]), dst, extern_learn: true, permanent: false }
}

/// The rules that there are when all operations have been carried out on none.
fn carried_out(ops: &[Op], settings: &Settings) -> Rules {
    let mut rules = Rules { clsact: [2, 3].into(), ..Rules::default() };
    for op in ops {
        match *op {
            Op::AddAction { id, spec } => {
                rules.actions.push(Action {
                    id,
                    spec: Some(spec),
                    cookie: true,
                    offload: settings.offload,
                    bound: 1,
                });
            }
            Op::PutFilter { ifindex, handle, matches, actions, .. } => rules.filters.push(Filter {
                ifindex,
                priority: settings.own.priority,
                handle,
                matches: Some(matches),
                actions: actions.iter().map(|a| (*a, true)).collect(),
                offload: settings.offload,
                in_hw: false,
            }),
            _ => {}
        }
    }
    rules
}

/// Builds rules for so many destinations, looks at them again, and moves [`MOVES`] of them to other
/// hosts; prints what each takes.
fn measure(destinations: u32, hosts: u32) {
    let settings = Settings {
        loopback: Ipv4Addr::new(10, 255, 255, 254),
        port: 4789,
        vtep: "vtep".into(),
        tenants: vec![Tenant { vni: 1, anchor: "vni1".into(), ports: vec!["rep0".into()] }],
        offload: Offload::SkipSw,
        own: Own::default(),
        mutation: Mutation::None,
    };
    let link = |ifindex, name: &str| Link { ifindex, name: name.into() };
    let mut tables = Tables {
        links: vec![link(1, "vtep"), link(2, "vni1"), link(3, "rep0")],
        fdb: (0..destinations).map(|n| entry(n, n % hosts)).collect(),
    };
    let round = |what: &str, tables: &Tables, rules: &Rules| {
        let began = Instant::now();
        let plan = diff(&settings, &wanted(&settings, tables), rules);
        println!(
            "{destinations} destinations on {hosts} hosts, {what}: {} operations, {:?}",
            plan.ops.len(),
            began.elapsed()
        );
        plan.ops
    };
    let ops = round("from nothing", &tables, &Rules { clsact: [2, 3].into(), ..Rules::default() });
    let rules = carried_out(&ops, &settings);
    assert!(
        round("all of them right", &tables, &rules).is_empty(),
        "rules that are right are changed"
    );
    let moves = MOVES.min(destinations);
    for n in 0..moves {
        tables.fdb[n as usize] = entry(n, (n + 1) % hosts);
    }
    round(&format!("{moves} of them moved"), &tables, &rules);
}

fn main() {
    let mut args = std::env::args().skip(1).map(|a| a.parse().expect("a number"));
    let destinations: u32 = args.next().unwrap_or(100_000);
    let hosts: u32 = args.next().unwrap_or(destinations).max(1);
    measure(MOVES, MOVES);
    measure(destinations, hosts);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find(|l| l.starts_with("VmHWM")).unwrap_or("VmHWM: unknown");
    println!("{peak}");
}
