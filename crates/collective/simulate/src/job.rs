//! Training jobs: what a step computes, and how a job lies on a cluster. What it exchanges is at
//! the head of [`crate::exchange`], its model at that of [`crate::model`].
//!
//! From D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
//! Megatron-LM*, SC '21, for a global batch *B*, micro-batches of *b*, and tensor, pipeline and
//! data parallelism *t*, *p* and *d*: the pipeline's bubble (§2.2) is (p − 1) / m of the ideal time
//! for m = B / (b d) micro-batches. With interleaved 1F1B each device has v chunks of layers
//! (virtual stages): the bubble is 1/v of that, and m must be a multiple of p.
//!
//! Ranks are placed as Megatron-LM does (order `tp-cp-ep-dp-pp`): those of a tensor-parallel group
//! beside each other on a host; then those of a context-parallel group; then replicas; each
//! pipeline stage has a run of hosts. Expert-parallel groups are runs of ranks of the same kind (D.
//! Liu et al., *MoE Parallel Folding*, 2025): experts are divided among ranks of context and data
//! parallelism. Nothing overlaps but the flows of an operation: how much a step communicates is
//! then a question of how fast it computes, for which there is one number ([`Job::efficiency`]).
//! [`crate::step::Simulation::with_share`] sets it so that communication between hosts has a given
//! share of a step.

use serde::{Deserialize, Serialize};

pub use crate::model::{Experts, Model};
use crate::Error;

/// A training job. What does not stand in a TOML file has the values of [`Job::default`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Job {
    /// The model.
    pub model: Model,
    /// GPUs that divide each layer; on one host.
    pub tensor: usize,
    /// Ranks that divide each sequence (CP).
    pub context: usize,
    /// How those get each other's keys and values.
    pub context_exchange: ContextExchange,
    /// Ranks that divide the experts of a layer (EP).
    pub expert_parallel: usize,
    /// Stages of the pipeline.
    pub pipeline: usize,
    /// Chunks of layers of each stage (interleaved 1F1B); 1: plain 1F1B.
    pub interleave: usize,
    /// What is divided among replicas: nothing (0), the optimizer's state (1), gradients, too (2),
    /// parameters, too (3).
    pub zero: usize,
    /// Whether parameters, gradients and the state of the optimizer are divided among replicas
    /// (fully sharded data parallelism), as `zero` = 3 says.
    pub fsdp: bool,
    /// Sequences of a step.
    pub batch: usize,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Whether activations are computed again in the backward pass.
    pub recompute: bool,
    /// Bytes of a gradient as it is reduced: 4, as Megatron-LM keeps them.
    pub gradient_bytes: u64,
    /// Bytes of an activation and of a parameter as they are sent.
    pub value_bytes: u64,
    /// What a GPU computes at most, in 10¹² operations a second.
    pub peak_tflops: f64,
    /// How much of it the job attains while it computes.
    pub efficiency: f64,
    /// What the memory of a GPU holds, in 10⁹ bytes.
    pub memory_gb: f64,
}

/// How ranks that divide a sequence get each other's keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ContextExchange {
    /// From neighbour to neighbour (Ring Attention), Megatron-LM's `p2p`.
    #[default]
    Ring,
    /// All at once, as Llama 3 was trained.
    AllGather,
}

impl Default for Job {
    /// R²CCL's job of §8.2: 7B parameters, a batch of 512, two tensor-parallel groups on each
    /// server of eight A100 (312 TFLOP/s).
    fn default() -> Job {
        Job {
            model: Model::gpt("7b", 32, 4096, 32_000, 2048),
            tensor: 4,
            context: 1,
            context_exchange: ContextExchange::Ring,
            expert_parallel: 1,
            pipeline: 1,
            interleave: 1,
            zero: 0,
            fsdp: false,
            batch: 512,
            micro_batch: 1,
            recompute: false,
            gradient_bytes: 4,
            value_bytes: 2,
            peak_tflops: 312.0,
            efficiency: 0.5,
            memory_gb: 80.0,
        }
    }
}

/// How a job lies on a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Hosts of a pipeline stage.
    pub stage_hosts: usize,
    /// Tensor-parallel groups of a host: ranks of context and data parallelism there.
    pub host_replicas: usize,
    /// Replicas.
    pub replicas: usize,
}

impl Layout {
    /// Over how many hosts a group of so many successive ranks extends.
    pub fn hosts_of(&self, ranks: usize) -> usize {
        ranks.div_ceil(self.host_replicas)
    }

    /// Ranks of context and data parallelism in all.
    pub fn ranks(&self) -> usize {
        self.stage_hosts * self.host_replicas
    }
}

/// What divides the devices of a stage.
const OF_STAGE: &str = "tensor-parallel groups of a stage";

/// How often a part, by its option and in words, is in so many of something.
fn divides(
    (argument, what): (&'static str, &'static str),
    part: usize,
    (all, of): (usize, &str),
) -> Result<usize, Error> {
    let right = format!("a divisor of {all} ({of}) is right");
    match part > 0 && all.is_multiple_of(part) {
        true => Ok(all / part),
        false => Err(Error::value(argument, what, part, right)),
    }
}

impl Job {
    /// How it lies on so many hosts.
    pub fn layout(&self, hosts: usize, gpus: usize) -> Result<Layout, Error> {
        self.model.check()?;
        let (tensor, pipeline) = (self.tensor, self.pipeline);
        let of_host = (gpus, "GPUs of a host");
        let host_replicas = divides(("tensor", "tensor parallelism"), tensor, of_host)?;
        let of_all = (hosts, "hosts");
        let stage_hosts = divides(("pipeline", "pipeline parallelism"), pipeline, of_all)?;
        let per_stage = pipeline.saturating_mul(self.interleave);
        let layers = (self.model.layers, "layers of the model");
        divides(("pipeline", "stages with their chunks"), per_stage, layers)?;
        let of_stage = (stage_hosts * host_replicas, OF_STAGE);
        let replicas = divides(("context", "context parallelism"), self.context, of_stage)?;
        let layout = Layout { stage_hosts, host_replicas, replicas };
        self.check_context(&layout)?;
        self.check_experts(&layout)?;
        self.check_zero()?;
        let whole = replicas * self.micro_batch;
        if self.micro_batch == 0 || self.batch < whole {
            let right = format!("{whole} and more are right: {replicas} replicas");
            return Err(Error::value("batch", "the batch", self.batch, right));
        }
        self.check_interleave(whole)?;
        if !(self.efficiency > 0.0 && self.efficiency <= 1.0 && self.peak_tflops > 0.0) {
            let right = "above 0, and up to 1, is right";
            return Err(Error::value("efficiency", "efficiency", self.efficiency, right));
        }
        Ok(layout)
    }

    fn check_context(&self, layout: &Layout) -> Result<(), Error> {
        let (argument, what) = ("context", "context parallelism");
        fits_hosts((argument, what), self.context, layout)?;
        // each rank has two parts of a sequence, so that causal attention is as much for all
        match self.context == 1 || self.model.sequence.is_multiple_of(2 * self.context) {
            true => Ok(()),
            false => {
                let right = format!(
                    "half of a divisor of {} (tokens of a sequence) is right",
                    self.model.sequence
                );
                Err(Error::value(argument, what, self.context, right))
            }
        }
    }

    fn check_experts(&self, layout: &Layout) -> Result<(), Error> {
        let (argument, what) = ("expert-parallel", "expert parallelism");
        match self.model.experts {
            None if self.expert_parallel == 1 => return Ok(()),
            None => {
                let right = "1 is right for a model without experts";
                return Err(Error::value(argument, what, self.expert_parallel, right));
            }
            Some(experts) => {
                let of_layer = (experts.count, "experts of a layer");
                divides((argument, what), self.expert_parallel, of_layer)?
            }
        };
        divides((argument, what), self.expert_parallel, (layout.ranks(), OF_STAGE))?;
        fits_hosts((argument, what), self.expert_parallel, layout)
    }

    fn check_zero(&self) -> Result<(), Error> {
        let wrong = |right| Err(Error::value("zero", "the ZeRO stage", self.zero, right));
        match (self.zero, self.fsdp) {
            (4.., _) => wrong("0 (none) to 3 (FSDP) are right"),
            (1 | 2, true) => wrong("3, or none, is right with FSDP"),
            // DeepSpeed refuses it: gradients would be reduced with each micro-batch of each stage
            (2, false) if self.pipeline > 1 => wrong("0, 1 or 3 is right with a pipeline"),
            _ => Ok(()),
        }
    }

    fn check_interleave(&self, whole: usize) -> Result<(), Error> {
        if self.interleave == 1 {
            return Ok(());
        }
        if self.pipeline == 1 {
            let right = "1 is right without a pipeline";
            let what = "chunks of layers of a stage";
            return Err(Error::value("interleave", what, self.interleave, right));
        }
        // Megatron-LM, §2.2.2
        let round = whole * self.pipeline;
        match self.batch.is_multiple_of(round) {
            true => Ok(()),
            false => {
                let right = format!(
                    "a multiple of {round} is right with several chunks of layers of a stage: \
                     replicas × sequences of a micro-batch × stages"
                );
                Err(Error::value("batch", "the batch", self.batch, right))
            }
        }
    }

    /// What of the ZeRO stages it has.
    pub fn zero_stage(&self) -> usize {
        if self.fsdp {
            3
        } else {
            self.zero
        }
    }

    /// Micro-batches of each of so many replicas, in a step.
    pub fn micro_batches(&self, replicas: usize) -> f64 {
        self.batch as f64 / (self.micro_batch * replicas) as f64
    }

    /// Time that a step computes, with the bubble, on so many replicas, in seconds.
    pub fn compute_s(&self, replicas: usize) -> f64 {
        let gpus = (replicas * self.context * self.tensor * self.pipeline) as f64;
        let rate = gpus * self.peak_tflops * 1e12 * self.efficiency;
        let ideal = self.model.operations(self.batch, self.recompute) / rate;
        ideal * (1.0 + self.bubble(replicas))
    }

    /// The time that stages wait at the ends of a step, in parts of what they take else.
    pub fn bubble(&self, replicas: usize) -> f64 {
        let stages = self.pipeline as f64 - 1.0;
        stages / (self.interleave as f64 * self.micro_batches(replicas))
    }

    /// How many micro-batches a stage is busy with or waits for, in a step.
    pub fn rounds(&self, replicas: usize) -> f64 {
        self.micro_batches(replicas) * (1.0 + self.bubble(replicas))
    }

    /// How many times a step waits for activations or their gradients from another stage.
    pub fn pipeline_waits(&self, replicas: usize) -> f64 {
        match self.pipeline {
            0 | 1 => 0.0,
            stages => {
                let first = stages as f64 - 1.0;
                2.0 * (self.micro_batches(replicas) * self.interleave as f64 + first)
            }
        }
    }
}

/// Whether groups of so many ranks are whole hosts, or a host is whole groups.
fn fits_hosts(
    (argument, what): (&'static str, &'static str),
    ranks: usize,
    layout: &Layout,
) -> Result<(), Error> {
    let of_host = layout.host_replicas;
    match ranks.is_multiple_of(of_host) || of_host.is_multiple_of(ranks) {
        true => Ok(()),
        false => {
            let right = format!(
                "a divisor or a multiple of {of_host} (tensor-parallel groups of a host) is right"
            );
            Err(Error::value(argument, what, ranks, right))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_that_do_not_fit_are_named() {
        let says = |job: Job, hosts| job.layout(hosts, 8).unwrap_err().to_string();
        let job = Job::default;
        assert_eq!(
            says(Job { tensor: 3, ..job() }, 4),
            "tensor parallelism is 3; a divisor of 8 (GPUs of a host) is right"
        );
        assert!(says(Job { pipeline: 3, ..job() }, 4).contains("4 (hosts)"));
        assert!(says(Job { pipeline: 5, ..job() }, 5).contains("32 (layers of the model)"));
        assert!(says(Job { batch: 7, ..job() }, 4).contains("8 and more are right"));
        let layout = Job { pipeline: 2, ..job() }.layout(64, 8).unwrap();
        assert_eq!(layout, Layout { stage_hosts: 32, host_replicas: 2, replicas: 64 });
    }

    #[test]
    fn sequences_are_divided_among_whole_hosts_or_within_one() {
        let says = |job: Job| job.layout(6, 8).unwrap_err().to_string();
        let job = |context, sequence| Job {
            context,
            model: Model::gpt("", 32, 4096, 32_000, sequence),
            tensor: 2,
            ..Job::default()
        };
        assert_eq!(
            says(job(5, 4096)),
            "context parallelism is 5; a divisor of 24 (tensor-parallel groups of a stage) is right"
        );
        assert_eq!(
            says(job(6, 12_288)),
            "context parallelism is 6; a divisor or a multiple of 4 (tensor-parallel groups of a \
             host) is right"
        );
        assert_eq!(
            says(job(12, 4096)),
            "context parallelism is 12; half of a divisor of 4096 (tokens of a sequence) is right"
        );
        let layout = job(12, 12_288).layout(6, 8).unwrap();
        assert_eq!((layout.replicas, layout.hosts_of(12), layout.hosts_of(2)), (2, 3, 1));
        assert!(says(job(0, 4096)).contains("parallelism is 0"));
    }

    #[test]
    fn experts_are_divided_among_whole_hosts_or_within_one() {
        let job = |expert_parallel, count| Job {
            expert_parallel,
            model: Model {
                experts: Some(Experts { count, ..Experts::default() }),
                ..Job::default().model
            },
            ..Job::default()
        };
        let says = |job: Job| job.layout(6, 8).unwrap_err().to_string();
        assert_eq!(
            says(Job { model: Job::default().model, ..job(2, 8) }),
            "expert parallelism is 2; 1 is right for a model without experts"
        );
        assert_eq!(
            says(job(3, 8)),
            "expert parallelism is 3; a divisor of 8 (experts of a layer) is right"
        );
        assert!(says(job(8, 8)).contains("is 8; a divisor of 12 (tensor-parallel groups"));
        assert!(says(job(3, 6)).contains("is 3; a divisor or a multiple of 2 (tensor-parallel"));
        assert_eq!(job(4, 8).layout(6, 8).unwrap().hosts_of(4), 2);
    }

    #[test]
    fn stages_of_zero_are_those_that_fit() {
        let says = |job: Job| job.layout(4, 8).unwrap_err().to_string();
        let of = |zero| Job { zero, ..Job::default() };
        assert_eq!(says(of(4)), "the ZeRO stage is 4; 0 (none) to 3 (FSDP) are right");
        assert!(says(Job { fsdp: true, ..of(1) }).contains("3, or none, is right with FSDP"));
        let piped = Job { pipeline: 2, ..of(2) };
        assert!(says(piped).contains("0, 1 or 3 is right with a pipeline"));
        assert_eq!(Job { fsdp: true, ..of(0) }.zero_stage(), 3);
        assert!(Job { fsdp: true, ..of(3) }.layout(4, 8).is_ok());
    }

    #[test]
    fn a_bubble_shrinks_with_chunks_of_layers() {
        let job = Job { pipeline: 4, batch: 64, tensor: 8, ..Job::default() };
        let busy = |job: &Job| job.compute_s(1) / (1.0 + job.bubble(1));
        assert!((job.compute_s(1) / busy(&job) - (1.0 + 3.0 / 64.0)).abs() < 1e-12);
        let chunks = Job { interleave: 2, ..job.clone() };
        assert!((chunks.compute_s(1) / busy(&job) - (1.0 + 3.0 / 128.0)).abs() < 1e-12);
        assert_eq!(job.pipeline_waits(1), 2.0 * (64.0 + 3.0));
        // each micro-batch comes to each device twice
        assert_eq!(chunks.pipeline_waits(1), 2.0 * (2.0 * 64.0 + 3.0));
        assert_eq!((job.rounds(1), chunks.rounds(1)), (67.0, 65.5));
        let says = |job: Job| job.layout(4, 8).unwrap_err().to_string();
        assert!(says(Job { batch: 66, ..chunks.clone() }).contains("a multiple of 4 is right"));
        assert!(says(Job { interleave: 3, ..chunks.clone() }).contains("chunks is 12"));
        let plain = Job { pipeline: 1, ..chunks };
        assert!(says(plain).contains("chunks of layers of a stage is 2; 1 is right without"));
    }

    /// Twice as many GPUs for each sequence take half of the time.
    #[test]
    fn parts_of_a_sequence_are_computed_at_once() {
        let job = Job { tensor: 8, ..Job::default() };
        let parts = Job { context: 2, ..job.clone() };
        assert!((parts.compute_s(2) * 2.0 / job.compute_s(2) - 1.0).abs() < 1e-12);
    }
}
