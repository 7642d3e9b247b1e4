//! Which way is the fastest.
//!
//! For each way of doing an operation, its time is estimated by formulas, from what its busiest NIC
//! and its busiest rank's memory carry, how many messages come behind each other, and how many
//! chunks it is cut into. The formulas take no longer for many ranks than the tables of hosts take
//! to be read, but they are off by some tens of percent where a NIC is lost and messages are short.
//! So the ways that they find close are timed by their volumes ([`volumes`]), and the fastest of
//! these is taken. Among them is what would be done with all NICs, over those that are left
//! (R²CCL-Balance), and every [`Form`] that comes close, so that none of them is faster than what
//! is chosen. `tests/planner.rs` compares with [`crate::cost::time`], which follows every message,
//! `crates/collective/simulate/tests/grid.rs` with what could have been asked for.

mod estimator;

use crate::cost::{volumes, Costs, Switches};
use crate::rerank::bridged_ring;
use crate::{
    Choice, Collective, Error, Folding, Form, Grouping, Operation, Owners, Plan, Shape, Topology,
};
use estimator::Estimator;

/// See [`Choice::divide_bytes`]; of hosts that own less than others: a packet.
pub(crate) const LEAST_PIECE_BYTES: u64 = 4 << 10;

/// Ways that formulas find to take longer than the fastest by more than a factor are not timed. The
/// more work it is to time them, the smaller is that factor, so that planning for a thousand ranks
/// takes some milliseconds (`examples/planning.rs`). Work is counted in flows.
const CLOSE: [(usize, f64); 2] = [(10_000, 4.0), (60_000, 1.1)];
const CLOSE_OF_MUCH_WORK: f64 = 1.02;
/// Formulas know nothing of switches: where these are narrow, ways count as close that are by this
/// factor further off.
const NARROW: f64 = 16.0;
/// Volumes tell ways apart that differ by more than this; of others the formulas do, unless
/// switches are narrow.
const APART: f64 = 1.02;
/// Up to so much work the chunks that ways have with all NICs are tried, too.
const WORK_OF_BOTH: usize = 5_000;
/// Flows of stars are alike, and timed together: each class of hosts counts as so many flows.
const CLASSES: usize = 8;

/// A way of doing an operation, and how long it should take.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// The way.
    pub choice: Choice,
    /// The time, in µs.
    pub us: f64,
}

/// A plan, and what it was chosen from.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// All ways that were considered: first those that were timed by their volumes, the fastest
    /// first, then the others, by formulas. Ways without a path between hosts that would exchange
    /// data are among the others.
    pub considered: Vec<Estimate>,
}

/// What is to be planned, and over what.
#[derive(Clone, Copy, Debug)]
pub struct Planner<'t> {
    /// Hosts and their NICs.
    pub topology: &'t Topology,
    /// The switches above them.
    pub switches: &'t Switches,
    /// The operation.
    pub collective: &'t Collective,
    /// What messages cost.
    pub costs: &'t Costs,
    /// With [`Folding::InOrder`] results do not depend on what is chosen.
    pub folding: Folding,
}

/// Chooses how to do an operation, over switches that carry all that NICs do.
pub fn plan(
    topology: &Topology,
    collective: &Collective,
    costs: &Costs,
    folding: Folding,
) -> Result<Planned, Error> {
    let switches = &Switches::default();
    Planner { topology, switches, collective, costs, folding }.plan()
}

/// Chooses how to do an operation in a form that is asked for ([`Planner::plan_form`]), over
/// switches that carry all that NICs do.
pub fn plan_form(
    topology: &Topology,
    collective: &Collective,
    costs: &Costs,
    folding: Folding,
    form: Form,
) -> Result<Planned, Error> {
    let switches = &Switches::default();
    Planner { topology, switches, collective, costs, folding }.plan_form(form)
}

/// Chooses how to do an operation: in a form that is asked for if there is such a plan, else as
/// [`plan`] does; over switches that carry all that NICs do.
pub fn plan_as(
    topology: &Topology,
    collective: &Collective,
    costs: &Costs,
    folding: Folding,
    form: Option<Form>,
) -> Result<Planned, Error> {
    let switches = &Switches::default();
    Planner { topology, switches, collective, costs, folding }.plan_as(form)
}

/// The ways of doing an operation by formulas alone, the fastest first.
pub fn estimates(
    topology: &Topology,
    collective: &Collective,
    costs: &Costs,
    folding: Folding,
) -> Vec<Estimate> {
    let switches = &Switches::default();
    let planner = Planner { topology, switches, collective, costs, folding };
    planner.estimates(planner.ways())
}

impl Planner<'_> {
    /// Chooses how to do the operation.
    pub fn plan(&self) -> Result<Planned, Error> {
        self.fastest(self.ways())
    }

    /// Chooses how to do the operation in a form that is asked for. An error says why there is no
    /// such plan: the operation does not have that form, it may not be reduced so, or the NICs that
    /// are up do not join hosts that would exchange something.
    pub fn plan_form(&self, form: Form) -> Result<Planned, Error> {
        if !form.takes(self.collective.operation()) {
            return Err(Error::Form {
                what: "the operation cannot have this shape",
                instead:
                    "all but direct are for operations of all ranks, and some for AllReduce alone",
            });
        }
        if self.collective.operation().is_pairwise() {
            // they are direct in any case
            return self.plan();
        }
        if self.is_ordered() && !form.reduces_in_order() {
            return Err(Error::Form {
                what: "this shape reduces in an order of its own",
                instead: "take one-shot, direct or stars, or Folding::Any",
            });
        }
        self.fastest(form.choices(self.topology, &bridged_ring(self.topology), self.folding))
    }

    /// Chooses how to do the operation: in a form that is asked for if there is such a plan, else
    /// as [`Self::plan`] does.
    pub fn plan_as(&self, form: Option<Form>) -> Result<Planned, Error> {
        form.and_then(|form| self.plan_form(form).ok()).map_or_else(|| self.plan(), Ok)
    }

    /// How long a plan for these hosts takes, by its volumes, in µs.
    pub fn time_us(&self, plan: &Plan) -> f64 {
        volumes::time(plan, self.topology, self.switches, self.costs).us
    }

    fn is_ordered(&self) -> bool {
        self.folding == Folding::InOrder && self.collective.operation().reduce_op().is_some()
    }

    /// What comes into question, the simplest first.
    fn ways(&self) -> Vec<Choice> {
        let operation = self.collective.operation();
        if operation.is_pairwise() {
            let direct = Choice::new(Shape::Direct, Grouping::Ranks);
            return vec![Choice { folding: self.folding, ..direct }];
        }
        let alone = self.topology.ranks() == self.topology.hosts().len();
        let ring = bridged_ring(self.topology);
        let comes_into_question = |form: &Form| match form {
            _ if !form.takes(operation) || (self.is_ordered() && !form.reduces_in_order()) => false,
            // else it is the ring of hosts
            Form::BridgedRing => !ring.is_sorted(),
            Form::FlatRing => !alone,
            _ => true,
        };
        let mut ways: Vec<Choice> = Form::ALL
            .into_iter()
            .filter(comes_into_question)
            .flat_map(|form| form.choices(self.topology, &ring, self.folding))
            .collect();
        // the paper's rings as the paper divides them: below its threshold not at all
        let undivided = |way: &Choice| Choice { owners: Owners::Equal, ..way.clone() };
        let paper = ways.iter().find(|way| way.shape == Shape::SubRings).map(undivided);
        ways.extend(paper);
        ways
    }

    /// Ways by formulas, the fastest first.
    fn estimates(&self, ways: Vec<Choice>) -> Vec<Estimate> {
        let estimator = Estimator::new(self.topology, self.collective, self.costs);
        let mut all: Vec<Estimate> =
            ways.into_iter().map(|choice| estimator.best_chunks(choice)).collect();
        // equal ones stay in order
        all.sort_by(|a, b| a.us.total_cmp(&b.us));
        all
    }

    /// The same ways in the chunks that they would have with all NICs.
    fn as_if_healthy(&self, estimates: &[Estimate]) -> Vec<Estimate> {
        let healthy = self.topology.clone().healthy();
        if healthy == *self.topology {
            return Vec::new();
        }
        let estimator = Estimator::new(&healthy, self.collective, self.costs);
        let other = |now: &Estimate| {
            let choice = estimator.best_chunks(now.choice.clone()).choice;
            (choice != now.choice).then_some(Estimate { choice, us: now.us })
        };
        let few = |now: &&Estimate| self.work(&now.choice) <= WORK_OF_BOTH;
        estimates.iter().filter(few).filter_map(other).collect()
    }

    /// How many flows there are to be followed if a way is timed.
    fn work(&self, choice: &Choice) -> usize {
        let (hosts, ranks) = (self.topology.hosts().len(), self.topology.ranks());
        let nodes = if choice.grouping == Grouping::Hosts { hosts } else { ranks };
        let nics = self.topology.hosts().iter().map(|host| host.nics.len()).max().unwrap_or(1);
        let channels = choice.channels.unwrap_or(nics.max(ranks / hosts));
        let rooted = matches!(
            self.collective.operation(),
            Operation::Broadcast { .. } | Operation::Reduce { .. }
        );
        let owners = match choice.shape {
            Shape::Direct => nodes.min(CLASSES),
            _ if rooted => 1,
            _ => nodes,
        };
        nodes * channels * owners
    }

    /// By which factor a way may take longer by formulas, and is timed nevertheless.
    fn closeness(&self, choice: &Choice) -> f64 {
        let work = self.work(choice);
        let found = CLOSE.iter().find(|(most, _)| work <= *most);
        let factor = found.map_or(CLOSE_OF_MUCH_WORK, |(_, factor)| *factor);
        factor * if self.switches.is_wide() { 1.0 } else { NARROW }
    }

    /// The plan that takes the least time of those that formulas find close.
    fn fastest(&self, ways: Vec<Choice>) -> Result<Planned, Error> {
        let mut estimates = self.estimates(ways);
        if estimates.len() > 1 {
            estimates.extend(self.as_if_healthy(&estimates));
            estimates.sort_by(|a, b| a.us.total_cmp(&b.us));
        }
        let (mut plans, mut timed, mut others) = (Vec::new(), Vec::new(), Vec::new());
        let (mut least_us, mut refused) = (f64::INFINITY, None);
        let alone = estimates.len() == 1;
        for estimate in estimates {
            // the first that has paths says what is close
            if estimate.us > self.closeness(&estimate.choice) * least_us {
                others.push(estimate);
                continue;
            }
            let plan = match Plan::new(self.topology, self.collective, estimate.choice.clone()) {
                Ok(plan) => plan,
                Err(error) => {
                    refused = refused.or(Some(error));
                    others.push(estimate);
                    continue;
                }
            };
            least_us = least_us.min(estimate.us);
            let us = if alone { estimate.us } else { self.time_us(&plan) };
            plans.push((plan, us));
            timed.push(Estimate { choice: estimate.choice, us });
        }
        let best_us = plans.iter().map(|(_, us)| *us).fold(f64::INFINITY, f64::min);
        let apart = if self.switches.is_wide() { APART } else { 1.0 };
        let best = plans.into_iter().find(|(_, us)| *us <= apart * best_us);
        timed.sort_by(|a, b| a.us.total_cmp(&b.us));
        timed.extend(others);
        match best {
            Some((plan, _)) => Ok(Planned { plan, considered: timed }),
            None => Err(refused.unwrap_or(Error::Form {
                what: "no way is known",
                instead: "this is a defect of the planner",
            })),
        }
    }
}
