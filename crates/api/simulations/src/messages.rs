//! `unbroken plan --messages`: what a plan sends, message by message.

use serde::Serialize;
use unbroken_schedule::cost::{volumes, Costs, Switches};
use unbroken_schedule::Form;
use unbroken_simulate::cluster::{Cluster, Loss};
use unbroken_simulate::messages::Traffic;
use unbroken_simulate::outage::SwitchesLeft;
use unbroken_simulate::strategy::{Kind, Pair};

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
    (lost, left): (Vec<Loss>, SwitchesLeft),
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
    let healthy = cluster.topology(0..cluster.hosts, (cluster.gpus, 1), &[])?;
    let over = |clos| Switches::over(clos, 0..cluster.hosts);
    let (before, switches) = (over(cluster.clos()), over(left.of(cluster.clos())));
    let (costs, now) = (&Costs::default(), &topology);
    let pair = Pair { healthy: &healthy, now, before: &before, switches: &switches, costs, form };
    let collective = kind.of(bytes, ranks)?;
    let wrong = |e: &dyn std::fmt::Display| Error::value("messages", e.to_string());
    let (plan, _) = pair.plan(&collective).map_err(|e| wrong(&e))?;
    let time = volumes::time(&plan, &topology, &switches, costs);
    let traffic = Traffic::of(&plan, &topology, &switches, costs).map_err(|e| wrong(&e))?;
    Ok(Report {
        cluster: cluster.clone(),
        lost,
        collective: kind,
        bytes,
        shape: Form::of(plan.choice()).name(),
        chunks: plan.chunks(),
        us: time.us,
        busiest_us: time.busiest_us,
        first_us: time.first_us,
        chunk_us: time.chunk_us,
        traffic,
    })
}
