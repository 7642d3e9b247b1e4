//! Serving of large language models on hosts that lose NICs: a queueing simulation.
//!
//! # The model
//!
//! Requests arrive ([`arrivals`]), each with a prompt and the number of tokens that it will be
//! answered with. A *replica* of the model is one instance of tensor and pipeline parallelism, or
//! two: one that computes prompts (prefill) and one that generates (decode), with the KV cache sent
//! from the first to the second over NICs. An instance works in *passes*, with continuous batching
//! (G.-I. Yu et al., *Orca*, OSDI '22): each pass takes one token of every request that generates,
//! then prompts up to a budget of tokens, in parts if they are long (A. Agrawal et al.,
//! *Sarathi-Serve*, OSDI '24). With pipeline parallelism as many passes are under way as there are
//! stages, each with its part of the requests.
//!
//! What a pass takes is at the head of [`pace`], what becomes of requests after a failure at that
//! of [`handling`].
//!
//! # Assumptions
//!
//! - A request is admitted when the KV cache has room for its prompt and all of its answer; so none
//!   is ever put back. Requests are admitted in the order in which they came.
//! - A token is shown when its pass ends. The scheduler, sampling, tokenising and the network to
//!   the client take no time, nor does the way of a sampled token back to the first stage.
//! - With prefill and decode apart, the decode instance makes the first token, too, as vLLM's does.
//!   One KV cache at a time is sent, over all NICs, after the whole prompt is computed.
//! - While communication moves to other NICs, all that an instance across hosts has under way
//!   stands still, computing too; a pass under way ends at the pace at which it began.
//! - Prompts have nothing in common, so no part of a KV cache is used twice.
//!
//! # Limits
//!
//! With pipeline parallelism and a large budget, passes with a prompt and passes without alternate
//! where requests come one by one, and stages idle; many prompts at once fill them. So near
//! saturation what a failure leaves waiting can be answered at a higher rate than what comes
//! evenly, and a median can be better after a restart than without a failure. With a budget of 512
//! tokens it is not. Nothing was compared with a running system: what is far from the truth is,
//! first of all, how fast GPUs compute.
//!
//! # Units
//!
//! As in the rest of the crate; in addition, FLOP/s in 10¹² and memory in 10⁹ bytes where names say
//! so.

pub mod arrivals;
mod engine;
pub mod handling;
mod instance;
pub mod model;
pub mod pace;
pub mod results;
pub mod serving;

use serde::{Deserialize, Serialize};

use crate::cluster::Loss;
use crate::strategy::Strategy;
use crate::{Error, Stop};
use arrivals::Request;
use engine::{Engine, Setting};
use handling::{Handling, Times};
use pace::Pace;
use results::Outcome;
use serving::Serving;

/// When NICs are lost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum When {
    /// So many seconds after the beginning.
    Second(f64),
    /// When the first request has been shown so many tokens of its answer.
    Token(u64),
}

/// A replica, with what is the same for all requests.
pub struct Service {
    serving: Serving,
    lost: Vec<Loss>,
    /// Instances that have lost a NIC.
    failed: Vec<usize>,
    healthy: Pace,
    after: Vec<(Handling, Result<Pace, Error>)>,
    stop: Stop,
}

impl Service {
    /// A replica, and the NICs that it will lose.
    pub fn new(serving: Serving, lost: &[Loss]) -> Result<Service, Error> {
        let serving = serving.checked()?;
        lost.iter().try_for_each(|loss| serving.cluster.check_loss(loss))?;
        if serving.hosts() == 1 && !lost.is_empty() {
            let right = "two and more are right: within a host a lost NIC costs nothing";
            return Err(Error::value("pipeline", "hosts", 1, right));
        }
        let mut failed: Vec<usize> =
            lost.iter().map(|loss| loss.host / serving.instance_hosts()).collect();
        failed.sort_unstable();
        failed.dedup();
        let healthy = Pace::new(&serving, &[], Strategy::Ours)?;
        let with = |handling: Handling| {
            let strategy = handling.in_place()?;
            Some((handling, Pace::new(&serving, lost, strategy)))
        };
        let after = Handling::ALL.into_iter().filter_map(with).collect();
        let (lost, stop) = (lost.to_vec(), Stop::default());
        Ok(Service { lost, failed, healthy, after, serving, stop })
    }

    /// Lets `stop` call off runs of this service, which then end with [`Error::Stopped`].
    pub fn with_stop(self, stop: Stop) -> Service {
        Service { stop, ..self }
    }

    /// What serves.
    pub fn serving(&self) -> &Serving {
        &self.serving
    }

    /// The NICs that are lost.
    pub fn lost(&self) -> &[Loss] {
        &self.lost
    }

    /// Whether requests fit, and NICs are lost with a token that there is.
    pub fn check(&self, requests: &[Request], when: Option<When>) -> Result<(), Error> {
        self.serving.check_requests(requests)?;
        let (Some(When::Token(token)), Some(first)) = (when, requests.first()) else {
            return Ok(());
        };
        match (1..=u64::from(first.output)).contains(&token) {
            true => Ok(()),
            false => {
                let right = format!("1 to {} (the first answer) are right", first.output);
                Err(Error::value("at-token", "the token with which NICs are lost", token, right))
            }
        }
    }

    /// What becomes of requests if NICs are lost at some time, or never. `others` are those of a
    /// second replica, which count where they are rerouted. An error: communicators cannot go on.
    pub fn run(
        &self,
        (requests, others): (&[Request], &[Request]),
        handling: Handling,
        times: Times,
        when: Option<When>,
    ) -> Result<Outcome, Error> {
        self.check(requests, when)?;
        self.serving.check_requests(others)?;
        let fault = match when {
            Some(when) if !self.lost.is_empty() => Some((when, &self.failed[..])),
            _ => None,
        };
        let after = match self.after.iter().find(|(h, _)| *h == handling) {
            Some((_, Ok(pace))) => Some(pace),
            Some((_, Err(error))) if fault.is_some() => return Err(error.clone()),
            _ => None,
        };
        let setting = Setting {
            serving: &self.serving,
            times,
            handling,
            healthy: &self.healthy,
            after,
            fault,
            stop: &self.stop,
        };
        Engine::new(setting, requests, others).run()
    }
}
