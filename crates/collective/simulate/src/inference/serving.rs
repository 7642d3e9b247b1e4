//! What serves requests: a model on hosts, and its GPUs.

use serde::{Deserialize, Serialize};

use super::arrivals::{Request, MOST_TOKENS};
use super::model::Llm;
use crate::cluster::Cluster;
use crate::Error;

/// Bytes of the unit in which memory is given.
const GB: f64 = 1e9;

/// A GPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gpu {
    /// What it computes at most, in 10¹² operations a second.
    pub peak_tflops: f64,
    /// How much of it is attained while prompts are computed.
    pub efficiency: f64,
    /// What its memory holds, in 10⁹ bytes.
    pub memory_gb: f64,
    /// What of it weights and KV cache may have.
    pub memory_share: f64,
    /// What its memory reads at most, in 10⁹ bytes a second.
    pub memory_gb_s: f64,
    /// How much of that is attained while tokens are generated.
    pub memory_efficiency: f64,
}

impl Default for Gpu {
    /// An H100 SXM5 with 80 GB (NVIDIA's data sheet: 989 TFLOP/s dense in BF16, 3.35 TB/s). Half of
    /// the first and four fifths of the second are assumed, not calibrated. Nine tenths of the
    /// memory is what vLLM takes.
    fn default() -> Gpu {
        Gpu {
            peak_tflops: 989.0,
            efficiency: 0.5,
            memory_gb: 80.0,
            memory_share: 0.9,
            memory_gb_s: 3350.0,
            memory_efficiency: 0.8,
        }
    }
}

/// A replica of a model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Serving {
    /// The model.
    pub model: Llm,
    /// Whether one instance computes prompts, and another generates.
    pub disaggregated: bool,
    /// GPUs that divide each layer: those of one host, or of several whole ones.
    pub tensor: usize,
    /// Stages of the pipeline of an instance.
    pub pipeline: usize,
    /// The hosts; how many follows from the rest ([`Serving::hosts`]).
    pub cluster: Cluster,
    /// Their GPUs.
    pub gpu: Gpu,
    /// Bytes of a weight: 2 (BF16) or 1 (FP8).
    pub weight_bytes: f64,
    /// Bytes of a value of the KV cache.
    pub kv_bytes: f64,
    /// Bytes of an activation as it is sent.
    pub value_bytes: f64,
    /// The most tokens of a pass.
    pub budget: u32,
    /// The most requests that an instance has admitted.
    pub sequences: usize,
}

impl Serving {
    /// A model on hosts of R²CCL §8.1: eight H100 with 900 GB/s of NVLink, both directions
    /// together, and eight NICs of 400 Gbit/s. TP 8 and PP 2; or TP 8 for each instance where
    /// prompts are computed apart. 8,192 tokens a pass and 1,024 requests are what vLLM v1 takes on
    /// an H100.
    pub fn new(model: Llm, disaggregated: bool) -> Serving {
        let nics = Cluster { nic_mbps: 400_000, nvlink_mbps: 3_600_000, ..Cluster::default() };
        let serving = Serving {
            model,
            disaggregated,
            tensor: 8,
            pipeline: if disaggregated { 1 } else { 2 },
            cluster: nics,
            gpu: Gpu::default(),
            weight_bytes: 2.0,
            kv_bytes: 2.0,
            value_bytes: 2.0,
            budget: 8192,
            sequences: 1024,
        };
        Serving {
            cluster: Cluster { hosts: serving.hosts(), ..serving.cluster.clone() },
            ..serving
        }
    }

    /// Gives the cluster as many hosts as the instances need. An error if a number makes no sense.
    pub fn checked(mut self) -> Result<Serving, Error> {
        self.cluster.hosts = 1;
        self.cluster.check()?;
        let gpus = self.cluster.gpus;
        if self.tensor == 0 || !self.tensor.is_multiple_of(gpus) {
            let right = format!("a multiple of {gpus} (GPUs of a host) is right");
            return Err(Error::value("tensor", "tensor parallelism", self.tensor, right));
        }
        if !(1..=self.model.layers).contains(&self.pipeline) {
            let right = format!("1 to {} (layers of the model) are right", self.model.layers);
            return Err(Error::value("pipeline", "pipeline parallelism", self.pipeline, right));
        }
        let above = |argument, what, given: f64, most: f64| match given > 0.0 && given <= most {
            true => Ok(()),
            false => {
                let right = format!("above 0, and up to {most}, is right");
                Err(Error::value(argument, what, given, right))
            }
        };
        let gpu = &self.gpu;
        above("peak", "the peak of a GPU in TFLOP/s", gpu.peak_tflops, 1e9)?;
        above("efficiency", "efficiency", gpu.efficiency, 1.0)?;
        above("memory", "the memory of a GPU in GB", gpu.memory_gb, 1e6)?;
        above("memory", "the share of memory", gpu.memory_share, 1.0)?;
        above("memory-rate", "the bandwidth of memory in GB/s", gpu.memory_gb_s, 1e9)?;
        above("memory-efficiency", "the efficiency of memory", gpu.memory_efficiency, 1.0)?;
        above("weight-bytes", "bytes of a weight", self.weight_bytes, 16.0)?;
        above("weight-bytes", "bytes of a value of the KV cache", self.kv_bytes, 16.0)?;
        above("budget", "tokens of a pass", f64::from(self.budget), 1e9)?;
        above("sequences", "admitted requests", self.sequences as f64, 1e6)?;
        self.cluster.hosts = self.hosts();
        self.cluster.check()?;
        if self.kv_room() == 0 {
            let needs = self.model.parameters() * self.weight_bytes / GB;
            let has = self.memory_bytes() / GB;
            let right = format!(
                "weights have {needs:.0} GB and an instance may use {has:.0}: more GPUs \
                 (tensor, pipeline parallelism) or smaller weights are right"
            );
            return Err(Error::value("model", "the model", &self.model.name, right));
        }
        Ok(self)
    }

    /// Whether requests fit.
    pub fn check_requests(&self, requests: &[Request]) -> Result<(), Error> {
        let length = |r: &Request| u64::from(r.prompt) + u64::from(r.output);
        let longest = requests.iter().map(length).max().unwrap_or(0);
        let context = self.model.context as u64;
        let most = context.min(self.kv_room());
        if longest > most {
            let why = if most == context { "the model's context" } else { "room in the KV cache" };
            let right = format!("up to {most} ({why}) is right");
            return Err(Error::value(
                "prompt",
                "the longest prompt with its answer",
                longest,
                right,
            ));
        }
        let budget = u64::from(self.budget);
        let passes = |r: &Request| u64::from(r.output) + u64::from(r.prompt) / budget;
        let all: u64 = requests.iter().map(passes).sum();
        if all > MOST_TOKENS {
            let right = format!("up to {MOST_TOKENS} are right: a lower rate, or a shorter time");
            return Err(Error::value("rate", "tokens of all answers", all, right));
        }
        Ok(())
    }

    /// Hosts of a stage.
    pub fn stage_hosts(&self) -> usize {
        (self.tensor / self.cluster.gpus).max(1)
    }

    /// Hosts of an instance.
    pub fn instance_hosts(&self) -> usize {
        self.stage_hosts() * self.pipeline
    }

    /// Instances of a replica.
    pub fn instances(&self) -> usize {
        if self.disaggregated {
            2
        } else {
            1
        }
    }

    /// Hosts of a replica: those of the instance that takes prompts first.
    pub fn hosts(&self) -> usize {
        self.instance_hosts() * self.instances()
    }

    /// Tokens that the KV cache of an instance holds.
    pub fn kv_room(&self) -> u64 {
        let left = self.memory_bytes() - self.model.parameters() * self.weight_bytes;
        (left / self.kv_token_bytes()).max(0.0) as u64
    }

    /// Bytes of the KV cache for each token, in all stages together.
    pub fn kv_token_bytes(&self) -> f64 {
        self.model.kv_values() * self.kv_bytes
    }

    fn memory_bytes(&self) -> f64 {
        let gpus = (self.tensor * self.pipeline) as f64;
        gpus * self.gpu.memory_gb * GB * self.gpu.memory_share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serving(name: &str, disaggregated: bool) -> Serving {
        Serving::new(Llm::named(name).unwrap(), disaggregated)
    }

    #[test]
    fn hosts_follow_from_parallelism() {
        assert_eq!(serving("llama-3.1-405b", false).checked().unwrap().hosts(), 2);
        assert_eq!(serving("llama-3.1-70b", true).checked().unwrap().hosts(), 2);
        let wide = Serving { tensor: 16, ..serving("llama-3.1-405b", true) }.checked().unwrap();
        assert_eq!((wide.hosts(), wide.stage_hosts(), wide.cluster.hosts), (4, 2, 4));
    }

    #[test]
    fn numbers_without_sense_are_named() {
        let of = || serving("llama-3.1-70b", false);
        let says = |s: Serving| s.checked().unwrap_err().to_string();
        assert_eq!(
            says(Serving { tensor: 4, ..of() }),
            "tensor parallelism is 4; a multiple of 8 (GPUs of a host) is right"
        );
        assert!(says(Serving { pipeline: 81, ..of() }).contains("1 to 80"));
        assert!(says(Serving { budget: 0, ..of() }).contains("tokens of a pass is 0"));
        let gpu = Gpu { efficiency: 1.5, ..Gpu::default() };
        assert!(says(Serving { gpu, ..of() }).contains("efficiency is 1.5"));
        let too_large = says(serving("llama-3.1-405b", true));
        assert!(
            too_large.contains("weights have 812 GB and an instance may use 576"),
            "{too_large}"
        );
        let halved = Serving { weight_bytes: 1.0, ..serving("llama-3.1-405b", true) };
        assert!(halved.checked().is_ok());
        let long = Request { arrival_s: 0.0, prompt: 131_000, output: 100 };
        let says = of().checked().unwrap().check_requests(&[long]).unwrap_err().to_string();
        assert!(says.contains("131100") && says.contains("131072 (the model's context)"), "{says}");
        let many = vec![Request { prompt: 100, output: 100_000, ..long }; 2001];
        let says = of().checked().unwrap().check_requests(&many).unwrap_err().to_string();
        assert!(says.contains("tokens of all answers is 200100000; up to 200000000"), "{says}");
    }
}
