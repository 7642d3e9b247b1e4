//! The tailored broadcast of R²CCL §5.2: what outsiders add to a shard that a ring without them has
//! reduced and spread.
//!
//! Outsiders add up what they have along a chain; the sum goes round the members of the ring, each
//! of whom adds it to what it has; the last of them returns the result to the outsiders, from the
//! fastest to the slowest. So the slowest, with which the chain begins, sends and receives once.

use super::trees::Trees;
use super::{Purpose, Take};
use crate::{Slice, Stage, Work};

pub(super) fn emit(run: &mut Trees) {
    for row in run.rows.clone() {
        run.each(&row, |run, shard, at, rank| {
            let plan = run.emitter.plan;
            let chain = plan.chain(run.shard(shard));
            if run.leader(shard, rank) != rank || chain.is_empty() {
                return;
            }
            let outsiders = plan.outsiders[run.shard(shard).forest].len();
            let place = chain
                .iter()
                .position(|node| *node == plan.node_of[rank])
                .expect("all nodes are in the chain");
            // the last member returns the result to the last outsider
            let next = if place + 1 < chain.len() { place + 1 } else { outsiders - 1 };
            let leader = |place: usize| plan.leader(run.shard(shard).channel, chain[place]);
            let link = Link {
                shard,
                rank,
                before: (place > 0).then(|| leader(place - 1)),
                next: leader(next),
                last: place + 1 == chain.len(),
            };
            let held = run.held[at][shard].expect("its own contribution, or the ring's sum");
            let result = if place < outsiders {
                let from =
                    if place + 1 < outsiders { leader(place + 1) } else { leader(chain.len() - 1) };
                link.outside(run, held, from)
            } else {
                link.inside(run, held)
            };
            run.held[at][shard] = Some(result);
        });
    }
}

/// A rank's place in the chain of a shard.
struct Link {
    shard: usize,
    rank: usize,
    /// The leaders before and behind it; behind the last comes the last outsider.
    before: Option<usize>,
    next: usize,
    last: bool,
}

impl Link {
    /// An outsider adds its part, and later gets the result: from the last member of the ring, or
    /// from the outsider behind it.
    fn outside(&self, run: &mut Trees, held: Slice, from: usize) -> Slice {
        let Link { shard, rank, .. } = *self;
        let mut sum = held;
        if let Some(before) = self.before {
            let into =
                if run.is_input(shard, rank, held) { run.place(shard, rank, false) } else { held };
            run.emitter.recv(
                &run.flow(shard, before, rank, Stage::Join),
                Take::Reduce { with: held, into },
            );
            sum = into;
        }
        run.emitter.send(&run.flow(shard, rank, self.next, Stage::Join), sum);
        let into = run.output(shard, rank).expect("all ranks get it");
        run.emitter.recv(&run.flow(shard, from, rank, Stage::Spread), Take::Into(into));
        if let Some(before) = self.before {
            run.emitter.send(&run.flow(shard, rank, before, Stage::Spread), into);
        }
        into
    }

    /// A member of the ring passes on what the outsiders add, and adds it.
    fn inside(&self, run: &mut Trees, held: Slice) -> Slice {
        let Link { shard, rank, .. } = *self;
        let added = run.scratch(shard, rank, Purpose::Join);
        let before = self.before.expect("outsiders come first");
        run.emitter.recv(&run.flow(shard, before, rank, Stage::Join), Take::Into(added));
        if !self.last {
            run.emitter.send(&run.flow(shard, rank, self.next, Stage::Join), added);
        }
        let divide_by = run.stages.divide_by;
        let into =
            if run.is_input(shard, rank, held) { run.place(shard, rank, false) } else { held };
        let builder = run.emitter.builder(rank);
        builder.step(Work::Reduce { a: held, b: added, into });
        if let Some(by) = divide_by {
            builder.step(Work::Divide { data: into, by });
        }
        if self.last {
            run.emitter.send(&run.flow(shard, rank, self.next, Stage::Spread), into);
        }
        into
    }
}
