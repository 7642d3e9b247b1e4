//! The model, as stateright sees it, and the question that it does not answer: whether from every
//! state the work can come to its end.

use crate::case::Case;
use crate::world::{Step, World};
use stateright::{Checker, HasDiscoveries, Model, Property};
use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::Instant;
use unbroken_failover_protocol::State;

/// What stateright has walked through: states by their names.
#[derive(Default)]
struct Graph {
    /// From where to where, by steps that are no faults; and by faults.
    edges: Vec<(u64, u64)>,
    faults: Vec<(u64, u64)>,
    settled: Vec<u64>,
}

/// A case and what was found of it.
pub struct Explored {
    case: Case,
    graph: Mutex<Graph>,
}

/// What an exploration found.
#[derive(Debug)]
pub struct Found {
    /// A promise that is broken, or a state from which the work cannot end; and how it comes to
    /// that.
    pub wrong: Option<String>,
    /// What should happen somewhere, and does not: the case shows less than it is meant to.
    pub missing: Vec<&'static str>,
}

impl Model for Explored {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.case)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        world.steps(&self.case, steps);
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        let next = world.after(&self.case, step)?;
        let mut graph = self.graph.lock().expect("nobody panics");
        let edges = if step.is_fault() { &mut graph.faults } else { &mut graph.edges };
        edges.push((world.name, next.name));
        if next.settled(&self.case) {
            graph.settled.push(next.name);
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Explored>> {
        let mut all = vec![
            Property::always("every promise is kept", |_, world: &World| {
                world.common.wrong.is_none()
            }),
            Property::sometimes(
                "the work is done after a switch",
                |m: &Explored, world: &World| {
                    world.complete(&m.case) && world.executor(0).lqp().epoch() > 0
                },
            ),
        ];
        if self.case.plans != [0; 2] {
            all.push(Property::sometimes("a plan is cancelled", |_, world: &World| {
                (0..2).any(|i| world.executor(i).lqp().counters().plans_cancelled > 0)
            }));
        }
        if !self.case.causes.is_empty() {
            all.push(Property::sometimes("both ends fail", |_, world: &World| {
                (0..2).all(|i| world.executor(i).lqp().state() == State::Failed)
            }));
        }
        all
    }
}

/// Visits every state of the case, and prints how many there are.
pub fn explore(name: &str, case: Case) -> Found {
    let began = Instant::now();
    let model = Explored { case, graph: Mutex::default() };
    let checker = model.checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let model = checker.model();
    let (mut wrong, mut missing) = (None, Vec::new());
    for property in model.properties() {
        match (checker.discovery(property.name), property.expectation.discovery_is_failure()) {
            (Some(path), true) => {
                let what = path.last_state().common.wrong.clone();
                wrong = Some(format!("{}, by {:?}", what.unwrap_or_default(), path.into_actions()));
            }
            (None, false) => missing.push(property.name),
            _ => {}
        }
    }
    let graph = std::mem::take(&mut *model.graph.lock().expect("nobody panics"));
    let (states, steps) = (checker.unique_state_count(), graph.edges.len() + graph.faults.len());
    let first = World::new(&model.case);
    let wrong = wrong.or_else(|| {
        let stuck = graph.stuck(first.name)?;
        Some(format!("the work cannot end, by {}", model.way_to(&graph, &first, stuck)))
    });
    println!("{name}: {states} states, {steps} steps, {:.1} s", began.elapsed().as_secs_f64());
    Found { wrong, missing }
}

impl Graph {
    /// A state from which no steps but faults lead to a settled one.
    fn stuck(&self, first: u64) -> Option<u64> {
        let ends = |edges: &[(u64, u64)]| edges.iter().map(|e| e.1).collect::<Vec<_>>();
        let mut names = ends(&self.edges);
        names.extend(ends(&self.faults));
        names.push(first);
        names.sort_unstable();
        names.dedup();
        let index =
            |name: u64| names.binary_search(&name).expect("every state has an edge to it") as u32;
        // The sources of the edges to each state lie together.
        let mut starts = vec![0u32; names.len() + 1];
        let edges: Vec<(u32, u32)> = self.edges.iter().map(|e| (index(e.0), index(e.1))).collect();
        edges.iter().for_each(|e| starts[e.1 as usize + 1] += 1);
        (0..names.len()).for_each(|n| starts[n + 1] += starts[n]);
        let (mut sources, mut filled) = (vec![0u32; edges.len()], starts.clone());
        for (from, to) in edges {
            sources[filled[to as usize] as usize] = from;
            filled[to as usize] += 1;
        }
        let mut ends_well = vec![false; names.len()];
        let mut todo: Vec<u32> = self.settled.iter().map(|&name| index(name)).collect();
        todo.iter().for_each(|&n| ends_well[n as usize] = true);
        while let Some(n) = todo.pop() {
            for &from in &sources[starts[n as usize] as usize..starts[n as usize + 1] as usize] {
                if !std::mem::replace(&mut ends_well[from as usize], true) {
                    todo.push(from);
                }
            }
        }
        // The edges are in the order of a search in breadth: the first is the nearest.
        let in_order = self.edges.iter().chain(&self.faults).map(|e| e.0);
        let stuck = |name: &u64| !ends_well[index(*name) as usize];
        in_order.chain(names.iter().copied()).find(stuck)
    }
}

impl Explored {
    /// The shortest way to a state.
    fn way_to(&self, graph: &Graph, first: &World, to: u64) -> String {
        let mut next: HashMap<u64, Vec<u64>> = HashMap::new();
        for (a, b) in graph.edges.iter().chain(&graph.faults) {
            next.entry(*a).or_default().push(*b);
        }
        let mut came: HashMap<u64, u64> = HashMap::from([(first.name, first.name)]);
        let mut todo = VecDeque::from([first.name]);
        while let Some(at) = todo.pop_front().filter(|at| *at != to) {
            for &n in next.get(&at).into_iter().flatten() {
                came.entry(n).or_insert_with(|| {
                    todo.push_back(n);
                    at
                });
            }
        }
        let mut names = vec![to];
        while let Some(&before) =
            came.get(&names[names.len() - 1]).filter(|b| **b != names[names.len() - 1])
        {
            names.push(before);
        }
        let (mut world, mut said) = (first.clone(), Vec::new());
        for name in names.into_iter().rev().skip(1) {
            let mut steps = Vec::new();
            world.steps(&self.case, &mut steps);
            let after = steps.into_iter().find_map(|s| {
                world.after(&self.case, s).filter(|w| w.name == name).map(|w| (s, w))
            });
            let Some((step, after)) = after else { break };
            said.push(format!("{step:?}"));
            world = after;
        }
        let states =
            [0, 1].map(|i| (world.executor(i).lqp().state(), world.executor(i).lqp().epoch()));
        format!("[{}]: {states:?} {:?}", said.join(", "), world.common.apps)
    }
}
