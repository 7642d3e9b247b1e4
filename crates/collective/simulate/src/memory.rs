//! What a training job has in the memory of a GPU, and whether it fits.
//!
//! Of each parameter that a GPU has (S. Rajbhandari et al., *ZeRO*, SC '20, §3.1): its value, its
//! gradient, and twelve bytes of the optimizer (Adam: a copy in single precision and two moments).
//! Stage 1 of ZeRO divides the last among replicas, stage 2 gradients, too, stage 3 all.
//!
//! Of activations (V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer
//! Models*, 2022, §4): 34 s b h bytes for each layer, divided by tensor and context parallelism
//! (with sequence parallelism, and attention that keeps no scores); 2 s b h where layers are
//! computed again, and one layer at a time in full. The first stage of a pipeline has as many
//! micro-batches under way as there are stages. Tokens that go to k experts are k times in what of
//! a layer is their part, 19 of the 34.

use serde::Serialize;

use crate::cluster::Cluster;
use crate::job::{Job, Layout};
use crate::Error;

/// Bytes of the unit in which memory is given.
const GB: f64 = 1e9;
/// What of a GPU's memory a job may have: the rest is the framework's, buffers and fragments.
const SHARE: f64 = 0.9;
/// Bytes of the optimizer for each parameter.
const OPTIMIZER_BYTES: f64 = 12.0;
/// Bytes of a token's activations in a layer, for each element of the hidden size: of all, of the
/// feed-forward part alone, and where they are computed again.
const LAYER_BYTES: f64 = 34.0;
const FEED_FORWARD_BYTES: f64 = 19.0;
const KEPT_BYTES: f64 = 2.0;

/// What a GPU has in its memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// Parameters.
    pub weights: f64,
    /// Their gradients.
    pub gradients: f64,
    /// The state of the optimizer.
    pub optimizer: f64,
    /// Activations of the micro-batches that are under way.
    pub activations: f64,
}

impl Memory {
    /// All.
    pub fn bytes(&self) -> f64 {
        self.weights + self.gradients + self.optimizer + self.activations
    }
}

impl Job {
    /// What a GPU of the first stage has in its memory.
    pub fn memory(&self, layout: &Layout) -> Memory {
        let ranks = layout.ranks() as f64;
        let divided = self.tensor as f64 * self.pipeline as f64;
        let of_experts = self.model.expert_parameters() / divided / self.expert_parallel as f64;
        let others = (self.model.parameters() - self.model.expert_parameters()) / divided;
        // those that have the same ones divide them from a stage on
        let from = |stage: usize| match self.zero_stage() >= stage {
            true => others / ranks + of_experts * self.expert_parallel as f64 / ranks,
            false => others + of_experts,
        };
        Memory {
            weights: from(3) * self.value_bytes as f64,
            gradients: from(2) * self.gradient_bytes as f64,
            optimizer: from(1) * OPTIMIZER_BYTES,
            activations: self.activations(),
        }
    }

    fn activations(&self) -> f64 {
        let (model, stages) = (&self.model, self.pipeline as f64);
        let tokens = (self.micro_batch * model.sequence) as f64 / self.context as f64;
        let of_hidden = tokens * model.hidden as f64 / self.tensor as f64;
        let layers = model.layers as f64;
        let more = model.experts.map_or(0.0, |e| (e.top_k + e.shared) as f64 - 1.0);
        let with_experts = model.expert_layers() as f64 / layers;
        let full = LAYER_BYTES + FEED_FORWARD_BYTES * more * with_experts;
        // of interleaved stages somewhat more (Korthikanti et al., §4.2.3)
        let chunks = self.interleave as f64;
        let under_way = if chunks > 1.0 { 1.0 + (stages - 1.0) / (stages * chunks) } else { 1.0 };
        match self.recompute {
            false => of_hidden * full * layers * under_way,
            true => of_hidden * (KEPT_BYTES * layers * under_way + full),
        }
    }

    /// Whether it fits into the GPUs. An error says what would.
    pub fn check_memory(&self, cluster: &Cluster) -> Result<(), Error> {
        if !(self.memory_gb > 0.0 && self.memory_gb <= 1e6) {
            let right = "above 0, and up to 1000000, is right";
            return Err(Error::value("memory", "the memory of a GPU in GB", self.memory_gb, right));
        }
        let Some(memory) = self.memory_on(cluster) else { return Ok(()) };
        let room = self.memory_gb * GB * SHARE;
        if memory.bytes() <= room {
            return Ok(());
        }
        let right = format!(
            "a GPU would have {} GB ({} of weights, {} of gradients, {} of the optimizer, {} of \
             activations), and {} of its {} may be used: {}",
            gb(memory.bytes()),
            gb(memory.weights),
            gb(memory.gradients),
            gb(memory.optimizer),
            gb(memory.activations),
            gb(room),
            gb(self.memory_gb * GB),
            self.what_fits(cluster, room)
        );
        Err(Error::value("model", "the model", &self.model.name, right))
    }

    fn memory_on(&self, cluster: &Cluster) -> Option<Memory> {
        let layout = self.layout(cluster.hosts, cluster.gpus).ok()?;
        Some(self.memory(&layout))
    }

    /// What would be right, in options: the least change that fits on this cluster, or how many
    /// hosts there would have to be.
    fn what_fits(&self, cluster: &Cluster, room: f64) -> String {
        let fits = |job: &Job, cluster: &Cluster| {
            job.memory_on(cluster).filter(|memory| memory.bytes() <= room)
        };
        let found = self.changes(cluster).into_iter().find_map(|job| {
            let memory = fits(&job, cluster)?;
            Some(format!("{} is right ({} GB)", self.changed(&job), gb(memory.bytes())))
        });
        if let Some(found) = found {
            return found;
        }
        let widest = Job {
            tensor: cluster.gpus,
            zero: 3,
            recompute: true,
            pipeline: 1,
            interleave: 1,
            ..self.clone()
        };
        let mut hosts = cluster.hosts;
        while hosts < (1 << 16) / cluster.gpus {
            hosts *= 2;
            let more = Cluster { hosts, ..cluster.clone() };
            let job = Job { batch: self.batch.max(8 * hosts), ..widest.clone() };
            if fits(&job, &more).is_some() {
                return format!("--hosts {hosts} {} is right", self.changed(&job));
            }
        }
        "a smaller model, shorter sequences or GPUs with more memory are right".into()
    }

    /// Jobs with the same model, from those that are changed least.
    fn changes(&self, cluster: &Cluster) -> Vec<Job> {
        let mut all = Vec::new();
        let mut pipelines = vec![self.pipeline];
        while let Some(next) = pipelines.last().map(|p| 2 * p.max(&1)) {
            if next > cluster.hosts {
                break;
            }
            pipelines.push(next);
        }
        for pipeline in pipelines {
            for tensor in [self.tensor, cluster.gpus] {
                for recompute in [self.recompute, true] {
                    for zero in self.zero_stage()..=3 {
                        let fsdp = self.fsdp;
                        all.push(Job { zero, fsdp, recompute, tensor, pipeline, ..self.clone() });
                    }
                }
            }
        }
        all
    }

    /// What another job has that this one has not, in options.
    fn changed(&self, other: &Job) -> String {
        let mut words = Vec::new();
        let mut number = |option: &str, now: usize, then: usize| {
            if now != then {
                words.push(format!("{option} {then}"));
            }
        };
        number("--tensor", self.tensor, other.tensor);
        number("--pipeline", self.pipeline, other.pipeline);
        number("--zero", self.zero_stage(), other.zero_stage());
        if other.recompute && !self.recompute {
            words.push("--recompute".into());
        }
        words.join(" ")
    }
}

/// In whole units.
fn gb(bytes: f64) -> String {
    format!("{:.0}", bytes / GB)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;

    fn job(model: &str, tensor: usize) -> Job {
        Job { model: Model::named(model).unwrap(), tensor, ..Job::default() }
    }

    fn on(hosts: usize) -> Cluster {
        Cluster { hosts, ..Cluster::default() }
    }

    /// 7B of 6.7 thousand million parameters over four GPUs: 18 bytes of each; 32 layers of 34 ·
    /// 2,048 · 4,096 / 4 bytes.
    #[test]
    fn what_a_gpu_has_is_counted() {
        let job = job("7b", 4);
        let of = |job: &Job, hosts| job.memory(&job.layout(hosts, 8).unwrap());
        let parameters = job.model.parameters() / 4.0;
        let memory = of(&job, 4);
        assert_eq!(memory.weights, 2.0 * parameters);
        assert_eq!(memory.gradients, 4.0 * parameters);
        assert_eq!(memory.optimizer, 12.0 * parameters);
        assert_eq!(memory.activations, 32.0 * 34.0 * 2048.0 * 4096.0 / 4.0);
        // eight replicas
        let zero = |zero| of(&Job { zero, ..job.clone() }, 4);
        assert!((zero(1).optimizer * 8.0 / memory.optimizer - 1.0).abs() < 1e-12);
        assert_eq!(zero(1).gradients, memory.gradients);
        assert!((zero(3).weights * 8.0 / memory.weights - 1.0).abs() < 1e-12);
        let again = of(&Job { recompute: true, ..job.clone() }, 4).activations;
        assert!((again / memory.activations - (2.0 * 32.0 + 34.0) / (34.0 * 32.0)).abs() < 1e-12);
        // all stages together have as many layers under way
        let piped = of(&Job { pipeline: 4, ..job.clone() }, 4);
        assert_eq!(piped.activations, memory.activations);
        assert_eq!(piped.weights * 4.0, memory.weights);
    }

    #[test]
    fn models_that_do_not_fit_are_refused_with_what_would() {
        let says = |job: Job, hosts| job.check_memory(&on(hosts)).map_err(|e| e.to_string());
        assert_eq!(says(job("7b", 4), 2), Ok(()));
        let large = says(job("llama-3.1-405b", 8), 2).unwrap_err();
        assert!(large.contains("and 72 of its 80 may be used: --hosts"), "{large}");
        let words = large.split("--hosts ").nth(1).unwrap();
        let hosts: usize = words.split(' ').next().unwrap().parse().unwrap();
        assert!(hosts > 2 && words.contains("--zero 3"), "{large}");
        let fits = Job { zero: 3, recompute: true, ..job("llama-3.1-405b", 8) };
        assert_eq!(says(Job { batch: 8 * hosts, ..fits }, hosts), Ok(()));
        let plain = says(job("llama-3.1-70b", 4), 64).unwrap_err();
        assert!(plain.contains("is right ("), "{plain}");
        let right = Job { zero: 3, ..job("llama-3.1-70b", 8) };
        assert_eq!(says(right, 64), Ok(()));
        let more = Job { memory_gb: 1000.0, ..job("llama-3.1-70b", 4) };
        assert_eq!(says(more, 64), Ok(()));
        assert!(says(Job { memory_gb: 0.0, ..job("7b", 4) }, 2).unwrap_err().contains("above 0"));
    }
}
