//! What is done about a lost NIC, and how long collectives then take.

use serde::{Deserialize, Serialize};
use unbroken_schedule::binding::Repair;
use unbroken_schedule::cost::{Costs, Switches};
use unbroken_schedule::planner::{estimates, Planner};
use unbroken_schedule::{
    reshape, Choice, Collective, DataType, Fabric, Folding, Form, Grouping, Operation, Owners,
    Plan, ReduceOp, Shape, Topology,
};

use crate::Error;

/// What is done about a lost NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// The job ends, and starts again from its last checkpoint on healthy hosts.
    Restart,
    /// The model replica that has the NIC's GPU is left out (AdapCC).
    AdapCc,
    /// One other NIC carries what the lost one carried (R²CCL §4.3).
    HotRepair,
    /// All others carry a part (R²CCL §5.1).
    Balance,
    /// The better of Balance and the paper's AllReduce (R²CCL §5.2, §6) as the paper uses it:
    /// divided into rings and a broadcast where a host has lost a third of its rate (appendix A),
    /// else the plain ring.
    Paper,
    /// What the planner of this project chooses.
    Ours,
}

impl Strategy {
    /// All.
    pub const ALL: [Strategy; 6] = [
        Strategy::Restart,
        Strategy::AdapCc,
        Strategy::HotRepair,
        Strategy::Balance,
        Strategy::Paper,
        Strategy::Ours,
    ];
    /// Those that keep all ranks, and so change how long collectives take.
    pub const IN_PLACE: [Strategy; 4] =
        [Strategy::HotRepair, Strategy::Balance, Strategy::Paper, Strategy::Ours];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Restart => "restart",
            Strategy::AdapCc => "AdapCC",
            Strategy::HotRepair => "HotRepair",
            Strategy::Balance => "Balance",
            Strategy::Paper => "R2CCL-AllReduce",
            Strategy::Ours => "ours",
        }
    }
}

/// A collective operation by its size alone: bytes of the vector, of the whole output, or of what
/// one rank sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// All ranks get the sum of all vectors.
    AllReduce,
    /// Each rank gets its part of the sum.
    ReduceScatter,
    /// All ranks get the parts of all.
    AllGather,
    /// All ranks get the first one's vector.
    Broadcast,
    /// Each rank sends a part to each.
    AllToAll,
    /// The first rank sends to the last.
    SendRecv,
}

impl Kind {
    /// All.
    pub const ALL: [Kind; 6] = [
        Kind::AllReduce,
        Kind::ReduceScatter,
        Kind::AllGather,
        Kind::Broadcast,
        Kind::AllToAll,
        Kind::SendRecv,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all-reduce",
            Kind::ReduceScatter => "reduce-scatter",
            Kind::AllGather => "all-gather",
            Kind::Broadcast => "broadcast",
            Kind::AllToAll => "all-to-all",
            Kind::SendRecv => "send-recv",
        }
    }

    /// The operation, on so many bytes.
    pub fn of(self, bytes: u64, ranks: usize) -> Result<Collective, Error> {
        use unbroken_schedule::{Counts, Matrix};
        let (op, count) = (ReduceOp::Sum, bytes.div_ceil(4));
        let each = count.div_ceil(ranks as u64);
        let operation = match self {
            Kind::AllReduce => Operation::AllReduce { op, count },
            Kind::ReduceScatter => Operation::ReduceScatter { op, counts: Counts::Equal(each) },
            Kind::AllGather => Operation::AllGather { counts: Counts::Equal(each) },
            Kind::Broadcast => Operation::Broadcast { root: 0, count },
            Kind::AllToAll => Operation::AllToAll { counts: Matrix::Equal(each) },
            Kind::SendRecv => Operation::SendRecv { from: 0, to: ranks - 1, count },
        };
        Ok(Collective::new(operation, DataType::F32, false, ranks)?)
    }

    /// A time that no way of doing it can beat, in µs, by what hosts carry together.
    pub fn bound_us(self, bytes: u64, topology: &Topology) -> f64 {
        let rates = topology.useful_mbps();
        let n = rates.len() as f64;
        if n < 2.0 {
            return 0.0;
        }
        let least = rates.iter().copied().min().unwrap_or(0) as f64;
        let ends = topology.pair_mbps(0, rates.len() - 1) as f64;
        let bits = bytes as f64 * 8.0;
        match self {
            Kind::AllReduce => reshape::all_reduce_bound_us(bytes, &rates),
            Kind::ReduceScatter | Kind::AllGather => bits * (n - 1.0) / n / least,
            // a rank sends to all of other hosts, and so do those beside it
            Kind::AllToAll => bits * topology.ranks() as f64 / n * (n - 1.0) / n / least,
            Kind::Broadcast => bits / least,
            Kind::SendRecv => bits / ends,
        }
    }
}

impl std::str::FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Kind, String> {
        Kind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            let right = Kind::ALL.map(Kind::name).join(", ");
            format!("'{text}' is no collective; right is {right}")
        })
    }
}

/// How a collective is done, and how long it takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// How.
    pub choice: Choice,
    /// How long, in µs.
    pub us: f64,
}

impl Done {
    /// How, by name.
    pub fn form(&self) -> &'static str {
        Form::of(&self.choice).name()
    }
}

/// Hosts as they were, and as they are.
pub struct Pair<'t> {
    /// With all NICs.
    pub healthy: &'t Topology,
    /// With those that are left.
    pub now: &'t Topology,
    /// The switches above them, as they were.
    pub before: &'t Switches,
    /// As they are.
    pub switches: &'t Switches,
    /// What messages cost.
    pub costs: &'t Costs,
    /// The form of those collectives that can have it, after a failure; `None`: as the planner
    /// chooses.
    pub form: Option<Form>,
}

impl Pair<'_> {
    /// As it is done while nothing is lost.
    pub fn before(&self, collective: &Collective) -> Result<Done, Error> {
        let asked = self.planner(self.healthy, self.before, collective);
        Ok(done(planned(&asked, None)?))
    }

    /// As it is done now. Of strategies that leave ranks out or start again this is as before.
    pub fn after(&self, collective: &Collective, strategy: Strategy) -> Result<Done, Error> {
        match strategy {
            Strategy::Restart | Strategy::AdapCc => self.before(collective),
            Strategy::Ours => Ok(done(self.plan(collective)?)),
            Strategy::HotRepair => self.kept(collective, Repair::Backup),
            Strategy::Balance => self.kept(collective, Repair::Balance),
            Strategy::Paper => self.paper(collective),
        }
    }

    /// The plan of [`Strategy::Ours`], and how long it takes, in µs.
    pub fn plan(&self, collective: &Collective) -> Result<(Plan, f64), Error> {
        planned(&self.planner(self.now, self.switches, collective), self.form)
    }

    fn planner<'p>(
        &'p self,
        topology: &'p Topology,
        switches: &'p Switches,
        collective: &'p Collective,
    ) -> Planner<'p> {
        Planner { topology, switches, collective, costs: self.costs, folding: Folding::Any }
    }

    fn given(&self, collective: &Collective, choice: Choice) -> Result<Done, Error> {
        let plan = Plan::new(self.now, collective, choice)?;
        let us = self.planner(self.now, self.switches, collective).time_us(&plan);
        Ok(done((plan, us)))
    }

    /// The healthy form, over the NICs that are left. All hosts own as much as before, also where
    /// the planner has a form that would divide the vector by what they carry.
    fn kept(&self, collective: &Collective, repair: Repair) -> Result<Done, Error> {
        let asked = self.planner(self.healthy, self.before, collective);
        let healthy = asked.plan()?.plan;
        let owners = match &healthy.choice().owners {
            Owners::ByCapacity => Owners::Equal,
            owners => owners.clone(),
        };
        // a channel that has all NICs while they are well would have one backup for all of them
        let channels = match repair {
            Repair::Backup => None,
            Repair::Balance => healthy.choice().channels,
        };
        self.given(collective, Choice { repair, owners, channels, ..healthy.choice().clone() })
    }

    /// The paper's own division: below a third lost of one host it is the plain ring (appendix A).
    fn paper(&self, collective: &Collective) -> Result<Done, Error> {
        let balance = self.kept(collective, Repair::Balance)?;
        if !matches!(collective.operation(), Operation::AllReduce { .. }) {
            return Ok(balance);
        }
        let all = estimates(self.now, collective, self.costs, Folding::Any);
        let is_papers =
            |choice: &Choice| choice.shape == Shape::SubRings && choice.owners == Owners::Equal;
        let rings = all.into_iter().find(|e| is_papers(&e.choice));
        let choice = rings.map_or(Choice::new(Shape::SubRings, Grouping::Hosts), |e| e.choice);
        let rings = self.given(collective, choice)?;
        Ok(if rings.us < balance.us { rings } else { balance })
    }
}

fn done((plan, us): (Plan, f64)) -> Done {
    Done { choice: plan.choice().clone(), us }
}

/// What is planned, and how long it takes, in µs. Where switches are narrow, NICs may be better off
/// with those of their own rail alone, though all reach all.
fn planned(asked: &Planner, form: Option<Form>) -> Result<(Plan, f64), Error> {
    let plan = asked.plan_as(form)?.plan;
    let us = asked.time_us(&plan);
    if asked.switches.is_wide() {
        return Ok((plan, us));
    }
    let apart = asked.topology.clone().with_fabric(Fabric::RailOnly);
    let other = Planner { topology: &apart, ..*asked }.plan_as(form);
    let other = other.map(|planned| (asked.time_us(&planned.plan), planned.plan)).ok();
    let (plan, us) = match other {
        Some((other_us, other)) if other_us < us => (other, other_us),
        _ => (plan, us),
    };
    // the planner chooses a per cent better with one kind of switches than with another now and
    // then; what narrow ones carry, wide ones do
    let wide = Planner { switches: &Switches::default(), ..*asked };
    let least_us = wide.time_us(&wide.plan_as(form)?.plan);
    Ok((plan, us.max(least_us)))
}
