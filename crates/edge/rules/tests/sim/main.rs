//! The reconciler against a simulated kernel that loses, delays and reorders notifications, tears
//! dumps, and loses answers; against foreign rules, restarts and batches that end half-way. Every
//! run must converge within the resync time, touch nothing that is not its own, never take away a
//! rule that is wanted all the time, and then be silent.

mod kernel;
mod rng;
mod world;

use unbroken_edge_rules::Mutation;
use world::World;

fn failing(seeds: std::ops::Range<u64>, mutation: Mutation) -> Option<(u64, Vec<String>)> {
    seeds
        .map(|seed| (seed, World::new(seed, mutation).run()))
        .find(|(_, problems)| !problems.is_empty())
}

/// 10,000 runs; `UNBROKEN_SEED=n` runs one.
#[test]
fn every_run_converges_and_touches_nothing_else() {
    let seeds = match std::env::var("UNBROKEN_SEED").ok().and_then(|s| s.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..10_000,
    };
    if let Some((seed, problems)) = failing(seeds, Mutation::None) {
        panic!(
            "UNBROKEN_SEED={seed} cargo test --release -p unbroken-edge-rules --test sim: \
             {problems:#?}"
        );
    }
}

#[test]
#[cfg(feature = "mutants")]
fn every_rule_that_is_left_out_is_noticed() {
    let mutants = [
        Mutation::IgnoreCookie,
        Mutation::IgnoreHandles,
        Mutation::EditActions,
        Mutation::AnyFdbEntry,
        Mutation::ZeroMacs,
        Mutation::NoResync,
        Mutation::IgnoreInterrupted,
        Mutation::NoTimeout,
        Mutation::NoRetry,
        Mutation::OneTenant,
        Mutation::BindBlindly,
    ];
    for mutant in mutants {
        match failing(0..10_000, mutant) {
            Some((seed, problems)) => println!("{mutant:?}: seed {seed}: {}", problems[0]),
            None => panic!("{mutant:?} is not noticed in 10,000 runs"),
        }
    }
}
