//! Long ways through a case that is too large to be visited whole: steps by chance, then no more
//! faults until all is settled.

use crate::case::Case;
use crate::world::{Step, World};
use std::collections::HashMap;

/// Without faults it is settled after so many steps, or never.
const PATIENCE: usize = 50_000;

/// What has happened on all ways together.
#[derive(Debug, Default)]
pub struct Walked {
    /// Ways on which all work was done.
    pub done: usize,
    pub epochs: u64,
    pub steps: usize,
}

/// xorshift64*, so that a way is a number.
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }

    /// Most steps are old messages: the others are taken as often. Faults are rare.
    fn pick(&mut self, steps: &[Step]) -> Option<Step> {
        let kind = self.below(16);
        let of_kind = |s: &&Step| match kind {
            0 => s.is_fault(),
            1..8 => matches!(s, Step::Hear(_)),
            _ => !matches!(s, Step::Hear(_)) && !s.is_fault(),
        };
        let fit: Vec<&Step> = steps.iter().filter(of_kind).collect();
        (!fit.is_empty()).then(|| *fit[self.below(fit.len())])
    }
}

/// So many ways with so many steps under faults.
pub fn walk(case: &Case, port_paths: u64, length: usize) -> Walked {
    let mut walked = Walked::default();
    for port_path in 0..port_paths {
        let mut chance = Chance(0x9e37_79b9_7f4a_7c15 ^ port_path << 32);
        let (mut world, mut taken) = (World::new(case), Vec::new());
        for n in 0..length + PATIENCE {
            if n >= length && world.settled(case) {
                break;
            }
            let mut steps = Vec::new();
            world.steps(case, &mut steps);
            steps.retain(|s| n < length || !s.is_fault());
            let Some(step) = chance.pick(&steps) else { continue };
            if let Some(next) = world.after(case, step) {
                world = next;
                taken.push(step);
            }
            assert_eq!(world.common.wrong, None, "port_path {port_path}: {taken:?}");
        }
        assert!(world.settled(case), "port_path {port_path} does not end: {world:?}");
        walked.done += usize::from(world.complete(case));
        walked.epochs += world.executor(0).lqp().epoch();
        walked.steps += taken.len();
    }
    walked
}

/// States with one name are visited once, so they must behave alike: compares what follows from
/// each way that leads to a name. Gives how often two were compared.
pub fn check_names(case: &Case) -> usize {
    let after = |world: &World| {
        let mut steps = Vec::new();
        world.steps(case, &mut steps);
        steps.into_iter().filter_map(|s| world.after(case, s).map(|w| (s, w))).collect::<Vec<_>>()
    };
    let first = World::new(case);
    let mut follows: HashMap<u64, Vec<(Step, u64)>> = HashMap::new();
    let (mut todo, mut compared) = (vec![(Vec::new(), first)], 0);
    while let Some((port_path, world)) = todo.pop() {
        let next = after(&world);
        let names = next.iter().map(|(s, w)| (*s, w.name)).collect();
        if let Some(before) = follows.get(&world.name) {
            assert_eq!(*before, names, "by {port_path:?}");
            compared += 1;
            continue;
        }
        follows.insert(world.name, names);
        todo.extend(
            next.into_iter().map(|(step, world)| ([&port_path[..], &[step]].concat(), world)),
        );
    }
    compared
}
