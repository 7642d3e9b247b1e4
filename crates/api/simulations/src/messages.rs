//! `unbroken plan --messages`: what a plan sends, message by message.

use serde::Serialize;
use unbroken_schedule::cost::Costs;
use unbroken_schedule::planner::plan_as;
use unbroken_schedule::{Folding, Form};
use unbroken_simulate::cluster::{Cluster, Loss};
use unbroken_simulate::flow;
use unbroken_simulate::messages::Traffic;
use unbroken_simulate::strategy::Kind;

use crate::plan::several_hosts;
use crate::{Error, Result};

/// All messages among more ranks are too many.
const MOST_RANKS: usize = 256;

/// The answer.
#[derive(Serialize)]
pub struct Report {
    /// The cluster.
    pub cluster: Cluster,
    /// What is lost.
    pub lost: Vec<Loss>,
    /// Which.
    pub collective: Kind,
    /// Its bytes.
    pub bytes: u64,
    /// How it is done.
    pub shape: &'static str,
    /// Chunks of each shard.
    pub chunks: u64,
    /// How long it takes by its volumes, and what that consists of.
    pub us: f64,
    /// See there.
    pub busiest_us: f64,
    /// See there.
    pub first_us: f64,
    /// See there.
    pub chunk_us: f64,
    /// Links, lanes, messages and steps.
    #[serde(flatten)]
    pub traffic: Traffic,
}

/// Every message of a collective, after the losses.
pub(crate) fn of(
    cluster: &Cluster,
    lost: Vec<Loss>,
    (kind, bytes): (Kind, u64),
    form: Option<Form>,
) -> Result<Report> {
    several_hosts(cluster)?;
    let topology = cluster.topology(0..cluster.hosts, (cluster.gpus, 1), &lost)?;
    let ranks = topology.ranks();
    if ranks > MOST_RANKS {
        let text = format!("{ranks} GPUs send too many; at most {MOST_RANKS} are right");
        return Err(Error::value("messages", text));
    }
    let (clos, costs) = (cluster.clos(), Costs::default());
    let collective = kind.of(bytes, ranks)?;
    let wrong = |e: &dyn std::fmt::Display| Error::value("messages", e.to_string());
    let planned = plan_as(&topology, &collective, &costs, Folding::Any, form);
    let planned = planned.map_err(|e| wrong(&e))?;
    let time = flow::time(&planned.plan, &topology, &clos, &costs);
    let traffic = Traffic::of(&planned.plan, &topology, &clos, &costs).map_err(|e| wrong(&e))?;
    Ok(Report {
        cluster: cluster.clone(),
        lost,
        collective: kind,
        bytes,
        shape: Form::of(planned.plan.choice()).name(),
        chunks: planned.plan.chunks(),
        us: time.us,
        busiest_us: time.busiest_us,
        first_us: time.first_us,
        chunk_us: time.chunk_us,
        traffic,
    })
}
