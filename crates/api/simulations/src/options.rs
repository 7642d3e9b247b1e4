//! Options that questions have in common.
//!
//! A cluster and a job come as options, or from a TOML file ([`crate::file`]); options win.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use unbroken_simulate::cluster::{Cluster, Loss};
use unbroken_simulate::failures::Recovery;
use unbroken_simulate::job::{ContextExchange, Experts, Job, Model};
use unbroken_simulate::outage::Outage;
use unbroken_simulate::preset::Preset;
use unbroken_simulate::step::Simulation;
use unbroken_units::read;

use crate::file::Contents;
use crate::{Error, Result, Watch};

/// What is simulated.
#[derive(Args)]
pub struct SubjectArgs {
    /// A TOML file with the tables [cluster], [job], [recovery], [rates]; options win over it
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    job: JobArgs,
}

#[derive(Args)]
#[command(next_help_heading = "Cluster")]
struct ClusterArgs {
    /// Hosts [default: 64]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    hosts: Option<usize>,
    #[command(flatten)]
    alike: HostArgs,
}

/// Hosts that are alike, and switches: all of a cluster but how many hosts it has.
#[derive(Args)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct HostArgs {
    /// Servers that are known: a100 (NICs of 200 Gbit/s), h100, h200, b200 (400 Gbit/s). They say
    /// what NICs and NVLink carry, what a GPU computes and its memory [default: a100; serving:
    /// h100]
    #[arg(long, value_name = "NAME", value_parser = preset)]
    preset: Option<Preset>,
    /// GPUs of a host; those that share NVLink are one host [default: 8]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    gpus: Option<usize>,
    /// NICs of a host, each on a rail of its own [default: as many as GPUs]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    nics: Option<usize>,
    /// What a NIC carries in each direction [default: the preset's]
    #[arg(long, value_name = "RATE", value_parser = mbps)]
    nic_rate: Option<u32>,
    /// What a GPU sends to others of its host [default: the preset's]
    #[arg(long, value_name = "RATE", value_parser = mbps)]
    nvlink_rate: Option<u32>,
    /// Ports of a NIC, each to switches of its own: 1 or 2 [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    planes: Option<usize>,
    /// No spine joins the rails: a NIC reaches those of its own rail alone
    #[arg(long)]
    rails_apart: bool,
    /// Tiers of switches: 2 (leaves, spines) or 3 (and cores above pods) [default: 2]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    tiers: Option<usize>,
    /// Hosts of a pod, that share leaves [default: all]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    pod_hosts: Option<usize>,
    /// By how much leaves are oversubscribed [default: 1]
    #[arg(long, value_name = "FACTOR", value_parser = number)]
    oversubscription: Option<f64>,
    /// By how much the spines of pods are, below the cores [default: 1]
    #[arg(long, value_name = "FACTOR", value_parser = number)]
    core_oversubscription: Option<f64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Around {
    /// From neighbour to neighbour
    Ring,
    /// All at once
    AllGather,
}

#[derive(Args)]
#[command(next_help_heading = "Job")]
struct JobArgs {
    /// The model: 1.3b, 2.7b, 6.7b, 7b, 13b, 66b, 175b, llama-3.1-8b, llama-3.1-70b,
    /// llama-3.1-405b, mixtral-8x7b, mixtral-8x22b [default: 7b]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Tokens of a sequence [default: the model's]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    sequence: Option<usize>,
    /// Experts of each layer (mixture of experts) [default: the model's]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    experts: Option<usize>,
    /// To how many experts a token goes [default: the model's, or 2]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    top_k: Option<usize>,
    /// GPUs that divide each layer (TP) [default: 4, or all of a host that has fewer]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    tensor: Option<usize>,
    /// Tensor-parallel groups that divide each sequence (CP) [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    context: Option<usize>,
    /// How those exchange keys and values [default: ring]
    #[arg(long, value_name = "HOW", value_enum)]
    context_exchange: Option<Around>,
    /// Tensor-parallel groups that divide the experts of a layer (EP) [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    expert_parallel: Option<usize>,
    /// Stages of the pipeline (PP, 1F1B) [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    pipeline: Option<usize>,
    /// Chunks of layers of each stage (interleaved 1F1B, virtual stages) [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    interleave: Option<usize>,
    /// ZeRO: divided among replicas are optimizer states (1), gradients, too (2), parameters, too
    /// (3) [default: 0, nothing]
    #[arg(long, value_name = "STAGE", value_parser = count::<usize>)]
    zero: Option<usize>,
    /// The same as --zero 3
    #[arg(long, conflicts_with = "zero")]
    fsdp: bool,
    /// Activations are computed again in the backward pass
    #[arg(long)]
    recompute: bool,
    /// Sequences of a step [default: 512, or 8 for each host if that is more]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    batch: Option<usize>,
    /// Sequences of a micro-batch [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    micro_batch: Option<usize>,
    /// What a GPU computes at most, in TFLOP/s [default: the preset's]
    #[arg(long, value_name = "NUMBER", value_parser = number)]
    peak: Option<f64>,
    /// The memory of a GPU in GB, of which the job may have nine tenths [default: the preset's]
    #[arg(long, value_name = "NUMBER", value_parser = number)]
    memory: Option<f64>,
    /// The part of the peak that the job attains while it computes [default: 0.5]
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "share")]
    efficiency: Option<f64>,
    /// Instead: GPUs compute so fast that communication between hosts is this share of a step
    #[arg(long, value_name = "SHARE", value_parser = share)]
    share: Option<f64>,
}

/// What a failure costs once.
#[derive(Args)]
#[command(next_help_heading = "Recovery")]
pub struct RecoveryArgs {
    /// From a failure until a restarted job computes again [default: 68m, a published median]
    #[arg(long, value_name = "TIME", value_parser = read::time)]
    restart: Option<f64>,
    /// From one checkpoint to the next [default: 30m, assumed]
    #[arg(long, value_name = "TIME", value_parser = read::time)]
    checkpoint: Option<f64>,
    /// From a failure until an operation goes on over other NICs [default: 400ms]
    #[arg(long, value_name = "TIME", value_parser = read::time)]
    switch: Option<f64>,
}

impl RecoveryArgs {
    pub(crate) fn over(&self, of_file: Recovery) -> Recovery {
        Recovery {
            restart_s: self.restart.unwrap_or(of_file.restart_s),
            checkpoint_s: self.checkpoint.unwrap_or(of_file.checkpoint_s),
            switch_s: self.switch.unwrap_or(of_file.switch_s),
            ..of_file
        }
    }
}

/// Hosts that stand ready.
#[derive(Args)]
#[command(next_help_heading = "Recovery")]
pub struct SparesArgs {
    /// Spare hosts; without one a restarted job has fewer [default: as many as it takes]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    spares: Option<usize>,
    /// From a failure until a spare host is in the place of another, before the restart [default:
    /// 0s]
    #[arg(long, value_name = "TIME", value_parser = read::time)]
    replace: Option<f64>,
}

impl SparesArgs {
    pub(crate) fn over(&self, of_file: Recovery) -> Recovery {
        Recovery {
            spares: self.spares.or(of_file.spares),
            replace_s: self.replace.unwrap_or(of_file.replace_s),
            ..of_file
        }
    }
}

impl SubjectArgs {
    /// What is simulated, and what else the file has.
    pub(crate) fn read(&self, watch: &Watch) -> Result<(Simulation, Contents)> {
        let contents = Contents::read(self.file.as_deref())?;
        let preset = self.cluster.alike.preset;
        let usual = Cluster::default();
        let usual = preset.map_or(usual.clone(), |preset| preset.cluster(usual));
        let cluster = self.cluster.alike.over(usual, &contents)?;
        let hosts = self.cluster.hosts.unwrap_or(cluster.hosts);
        let cluster = Cluster { hosts, ..cluster };
        // else a layout would divide by it
        cluster.check()?;
        let job = self.job.over(preset, &contents, &cluster)?;
        // the usual job stands in where collectives alone are asked about
        if self.job.model.is_some() || contents.has("job", "model") {
            job.check_memory(&cluster)?;
        }
        let simulation = Simulation::new(&cluster, &job)?;
        let simulation = match self.job.share {
            None => simulation,
            Some(share) => simulation.with_share(share)?,
        };
        Ok((simulation.with_stop(watch.stopper()), contents))
    }
}

impl HostArgs {
    /// The servers that are named, if some are.
    pub(crate) fn preset(&self) -> Option<Preset> {
        self.preset
    }

    /// Options over a file's table over what is usual.
    pub(crate) fn over(&self, usual: Cluster, contents: &Contents) -> Result<Cluster> {
        let file = contents.over("cluster", usual)?;
        let gpus = self.gpus.unwrap_or(file.gpus);
        let nics = if contents.has("cluster", "nics") { file.nics } else { gpus };
        Ok(Cluster {
            gpus,
            nics: self.nics.unwrap_or(nics),
            nic_mbps: self.nic_rate.unwrap_or(file.nic_mbps),
            nvlink_mbps: self.nvlink_rate.unwrap_or(file.nvlink_mbps),
            planes: self.planes.unwrap_or(file.planes),
            spines: file.spines && !self.rails_apart,
            tiers: self.tiers.unwrap_or(file.tiers),
            pod_hosts: self.pod_hosts.unwrap_or(file.pod_hosts),
            oversubscription: self.oversubscription.unwrap_or(file.oversubscription),
            core_oversubscription: self.core_oversubscription.unwrap_or(file.core_oversubscription),
            ..file
        })
    }
}

impl JobArgs {
    fn over(&self, preset: Option<Preset>, contents: &Contents, cluster: &Cluster) -> Result<Job> {
        let usual = Job::default();
        let usual = Job {
            peak_tflops: preset.map_or(usual.peak_tflops, |preset| preset.peak_tflops),
            memory_gb: preset.map_or(usual.memory_gb, |preset| preset.memory_gb),
            tensor: usual.tensor.min(cluster.gpus),
            batch: usual.batch.max(8 * cluster.hosts),
            ..usual
        };
        let file = contents.over("job", usual)?;
        let around = self.context_exchange.map(|around| match around {
            Around::Ring => ContextExchange::Ring,
            Around::AllGather => ContextExchange::AllGather,
        });
        Ok(Job {
            model: self.model(&file.model)?,
            tensor: self.tensor.unwrap_or(file.tensor),
            context: self.context.unwrap_or(file.context),
            context_exchange: around.unwrap_or(file.context_exchange),
            expert_parallel: self.expert_parallel.unwrap_or(file.expert_parallel),
            pipeline: self.pipeline.unwrap_or(file.pipeline),
            interleave: self.interleave.unwrap_or(file.interleave),
            zero: self.zero.unwrap_or(file.zero),
            // an option wins over a file, also where it has the same in other words
            fsdp: self.fsdp || (file.fsdp && self.zero.is_none()),
            recompute: self.recompute || file.recompute,
            batch: self.batch.unwrap_or(file.batch),
            micro_batch: self.micro_batch.unwrap_or(file.micro_batch),
            peak_tflops: self.peak.unwrap_or(file.peak_tflops),
            efficiency: self.efficiency.unwrap_or(file.efficiency),
            memory_gb: self.memory.unwrap_or(file.memory_gb),
            ..file
        })
    }

    fn model(&self, of_file: &Model) -> Result<Model> {
        let model = match &self.model {
            None => of_file.clone(),
            Some(name) => Model::named(name)?,
        };
        let experts = match (self.experts, self.top_k, model.experts) {
            (None, None, experts) => experts,
            (None, Some(_), None) => {
                let right = "--experts with --top-k, or a model with experts, is right";
                let text = format!("{} has no experts; {right}", model.name);
                return Err(Error::value("top-k", text));
            }
            (count, top_k, experts) => {
                let usual = experts.unwrap_or_default();
                let count = count.unwrap_or(usual.count);
                Some(Experts { count, top_k: top_k.unwrap_or(usual.top_k), ..usual })
            }
        };
        Ok(Model { sequence: self.sequence.unwrap_or(model.sequence), experts, ..model })
    }
}

/// A rate in Mbit/s.
pub(crate) fn mbps(text: &str) -> std::result::Result<u32, String> {
    let all = read::bandwidth(text)? / 1e6;
    match (1.0..=f64::from(u32::MAX)).contains(&all) {
        true => Ok(all.round() as u32),
        false => Err(format!("'{text}' is out of bounds; 1M to 4000T are right")),
    }
}

/// What fails.
pub(crate) fn outage(text: &str) -> std::result::Result<Outage, String> {
    text.parse::<Outage>().map_err(|e| e.to_string())
}

/// Servers that are known.
fn preset(name: &str) -> std::result::Result<Preset, String> {
    name.parse::<Preset>().map_err(|e| e.to_string())
}

/// The first so many NICs of the first host. An error before anything of that size is made.
pub(crate) fn first_nics(count: usize, cluster: &Cluster) -> Result<Vec<Loss>> {
    if count > cluster.nics {
        let text = format!(
            "host0 cannot lose {count} NICs; up to {} are right, and --fail names those of others",
            cluster.nics
        );
        return Err(Error::value("lost", text));
    }
    Ok((0..count).map(|nic| Loss { host: 0, nic, port: None, left: None }).collect())
}

/// A part of something, above 0 and up to 1.
pub(crate) fn share(text: &str) -> std::result::Result<f64, String> {
    let (number, unit) = match text.strip_suffix('%') {
        Some(percent) => (percent.trim_end(), 100.0),
        None => (text, 1.0),
    };
    match number.parse::<f64>().map(|number| number / unit) {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        Ok(share) if unit == 1.0 && (1.0..=100.0).contains(&share) => {
            Err(format!("'{text}' is more than all; {text}% is right for {text} of 100"))
        }
        _ => Err(format!("'{text}' is no share; above 0 and up to 1 is right, as 0.5 or 50%")),
    }
}

/// A whole number.
pub(crate) fn count<T: std::str::FromStr>(text: &str) -> std::result::Result<T, String> {
    text.parse().map_err(|_| format!("'{text}' is no count; a whole number such as 8 is right"))
}

/// A whole number within bounds.
pub(crate) fn within<const LEAST: u64, const MOST: u64>(
    text: &str,
) -> std::result::Result<u64, String> {
    match text.parse() {
        Ok(number) if (LEAST..=MOST).contains(&number) => Ok(number),
        _ => Err(format!("'{text}' is wrong; a whole number from {LEAST} to {MOST} is right")),
    }
}

/// Cores.
pub(crate) fn cores(text: &str) -> std::result::Result<u16, String> {
    within::<1, { u16::MAX as u64 }>(text).map(|count| count as u16)
}

/// A number.
pub(crate) fn number(text: &str) -> std::result::Result<f64, String> {
    text.parse().map_err(|_| format!("'{text}' is no number; one such as 1.5 is right"))
}
