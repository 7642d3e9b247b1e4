//! A language model that answers requests while NICs are lost.

use std::collections::BTreeSet;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use rayon::prelude::*;
use serde::Serialize;
use unbroken_simulate::cluster::{Cluster, Loss};
use unbroken_simulate::failures::Recovery;
use unbroken_simulate::inference::arrivals::{trace, Pattern, Request, Stream};
use unbroken_simulate::inference::handling::{Handling, Times};
use unbroken_simulate::inference::model::Llm;
use unbroken_simulate::inference::results::Outcome;
use unbroken_simulate::inference::serving::{Gpu, Serving};
use unbroken_simulate::inference::{Service, When};
use unbroken_simulate::outage::Outage;
use unbroken_simulate::trace::nics_of;
use unbroken_units::{read, show};

use crate::file::{self, Contents, Served};
use crate::options::{cores, count, first_nics, number, outage, share, HostArgs};
use crate::{on_cores, Error, Result, Watch};

/// The model that serves if none is named.
const USUAL_MODEL: &str = "llama-3.1-70b";
/// The most rates of a sweep.
const MOST_RATES: usize = 1000;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Arrivals {
    /// At equal distances
    Fixed,
    /// Independently of each other
    Poisson,
}

/// The question.
#[derive(Args)]
pub struct ServeArgs {
    /// Requests a second: one rate, several (0.5,1,2), or from 0.5 to 4 in steps (0.5-4:0.5)
    #[arg(long, value_name = "RATES", value_parser = rates, default_value = "1")]
    rate: Rates,
    /// How requests follow each other
    #[arg(long, value_name = "PATTERN", value_enum, default_value = "poisson")]
    arrivals: Arrivals,
    /// Tokens of a prompt
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 2000,
        value_parser = tokens
    )]
    prompt: u32,
    /// Tokens of an answer
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 256,
        value_parser = tokens
    )]
    output: u32,
    /// For how long requests come; all that have come are answered
    #[arg(long = "for", value_name = "TIME", value_parser = read::time, default_value = "100s")]
    lasts: f64,
    /// Instead: requests of this file
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["rate", "arrivals", "prompt", "output", "lasts"]
    )]
    trace: Option<PathBuf>,
    /// How many NICs of host0 are lost; 0: none
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 1,
        conflicts_with = "fail",
        value_parser = count::<usize>
    )]
    lost: usize,
    /// What is lost: a NIC, like host1/nic2, a leaf (tor3), a rail (rail2); may be given again
    #[arg(long, value_name = "WHAT", value_parser = outage)]
    fail: Vec<Outage>,
    /// When they are lost
    #[arg(long, value_name = "TIME", value_parser = read::time, default_value = "50s")]
    at: f64,
    /// Instead: with this token of the first answer
    #[arg(long, value_name = "NUMBER", conflicts_with = "at", value_parser = count::<u64>)]
    at_token: Option<u64>,
    /// What is done about it: none, restart, reroute, dejavu, hotrepair, balance, ours [default:
    /// all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = handling)]
    strategy: Vec<Handling>,
    /// From the failure until a restarted instance computes again [default: 35s]
    #[arg(long, value_name = "TIME", value_parser = read::time)]
    restart: Option<f64>,
    /// From the failure until communication goes on over other NICs [default: 400ms]
    #[arg(long, value_name = "TIME", value_parser = read::time)]
    switch: Option<f64>,
    /// Which requests, if they are at random
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = count::<u64>)]
    seed: u64,
    /// How many cores [default: all]
    #[arg(long, value_name = "COUNT", value_parser = cores)]
    cores: Option<u16>,
    #[command(flatten)]
    serving: ServingArgs,
}

#[derive(Args)]
#[command(next_help_heading = "What serves")]
struct ServingArgs {
    /// A TOML file that says what serves; options win over it
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// The model: llama-3.1-70b, llama-3.1-405b, opt-66b, bloom-176b [default: llama-3.1-70b]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// One instance computes prompts, another answers; KV caches go over NICs
    #[arg(long)]
    disaggregated: bool,
    /// GPUs that divide each layer: those of one host or of several [default: those of a host]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    tensor: Option<usize>,
    /// Stages of an instance's pipeline [default: 2, or 1 with --disaggregated]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    pipeline: Option<usize>,
    /// What a GPU computes at most, in TFLOP/s [default: the preset's]
    #[arg(long, value_name = "NUMBER", value_parser = number)]
    peak: Option<f64>,
    /// The part of it that prompts attain [default: 0.5]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    efficiency: Option<f64>,
    /// The memory of a GPU in GB, of which weights and KV cache have nine tenths [default: the
    /// preset's]
    #[arg(long, value_name = "NUMBER", value_parser = number)]
    memory: Option<f64>,
    /// What it reads at most, in GB/s [default: the preset's]
    #[arg(long, value_name = "NUMBER", value_parser = number)]
    memory_rate: Option<f64>,
    /// The part of it that answers attain [default: 0.8]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    memory_efficiency: Option<f64>,
    /// Bytes of a weight: 2 (BF16) or 1 (FP8) [default: 2]
    #[arg(long, value_name = "COUNT", value_parser = number)]
    weight_bytes: Option<f64>,
    /// The most tokens of a pass [default: 8192]
    #[arg(long, value_name = "COUNT", value_parser = count::<u32>)]
    budget: Option<u32>,
    /// The most requests that an instance works on [default: 1024]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    sequences: Option<usize>,
    #[command(flatten)]
    cluster: HostArgs,
}

#[derive(Clone, Debug, PartialEq)]
struct Rates(Vec<f64>);

fn rates(text: &str) -> std::result::Result<Rates, String> {
    let wrong = || format!("'{text}' is no rate of requests; 2, 0.5,1,2 and 0.5-4:0.5 are right");
    let number = |text: &str| match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err(wrong()),
    };
    let mut all = Vec::new();
    for part in text.split(',') {
        match part.split_once(':').and_then(|(ends, step)| Some((ends.split_once('-')?, step))) {
            None => all.push(number(part)?),
            Some(((first, last), step)) => {
                let (first, last, step) = (number(first)?, number(last)?, number(step)?);
                let steps = (last - first) / step;
                if !(0.0..MOST_RATES as f64).contains(&steps) {
                    return Err(wrong());
                }
                // without the last digits, which are of binary fractions
                let rate = |n: usize| ((first + n as f64 * step) * 1e9).round() / 1e9;
                all.extend((0..=(steps + 1e-9) as usize).map(rate));
            }
        }
    }
    match all.len() <= MOST_RATES {
        true => Ok(Rates(all)),
        false => Err(format!("a sweep has up to {MOST_RATES} rates; fewer are right")),
    }
}

fn tokens(text: &str) -> std::result::Result<u32, String> {
    let wrong = || format!("'{text}' is no number of tokens; 1 and more are right");
    text.parse().ok().filter(|count| *count > 0).ok_or_else(wrong)
}

fn handling(text: &str) -> std::result::Result<Handling, String> {
    text.parse::<Handling>().map_err(|e| e.to_string())
}

impl ServingArgs {
    fn read(&self, contents: &Contents) -> Result<Serving> {
        let of_file = contents.over("serving", Served::default())?;
        let name = self.model.as_deref().or(of_file.model.as_deref()).unwrap_or(USUAL_MODEL);
        let disaggregated = self.disaggregated || of_file.disaggregated;
        let usual = Serving::new(Llm::named(name)?, disaggregated);
        let preset = self.cluster.preset();
        let of_preset = usual.cluster.clone();
        let of_preset = preset.map_or(of_preset.clone(), |preset| preset.cluster(of_preset));
        let cluster = self.cluster.over(of_preset, contents)?;
        let gpu = preset.map_or(usual.gpu, |preset| preset.gpu(usual.gpu));
        let gpu = contents.over("gpu", gpu)?;
        let gpu = Gpu {
            peak_tflops: self.peak.unwrap_or(gpu.peak_tflops),
            efficiency: self.efficiency.unwrap_or(gpu.efficiency),
            memory_gb: self.memory.unwrap_or(gpu.memory_gb),
            memory_gb_s: self.memory_rate.unwrap_or(gpu.memory_gb_s),
            memory_efficiency: self.memory_efficiency.unwrap_or(gpu.memory_efficiency),
            ..gpu
        };
        let weight_bytes = of_file.weight_bytes.unwrap_or(usual.weight_bytes);
        Ok(Serving {
            tensor: self.tensor.or(of_file.tensor).unwrap_or(cluster.gpus),
            pipeline: self.pipeline.or(of_file.pipeline).unwrap_or(usual.pipeline),
            weight_bytes: self.weight_bytes.unwrap_or(weight_bytes),
            budget: self.budget.or(of_file.budget).unwrap_or(usual.budget),
            sequences: self.sequences.or(of_file.sequences).unwrap_or(usual.sequences),
            cluster,
            gpu,
            ..usual
        })
    }
}

/// Requests of a replica, and of another, at one rate; no rate where they are from a file.
struct Load {
    rate: Option<f64>,
    requests: Vec<Request>,
    others: Vec<Request>,
}

impl ServeArgs {
    fn loads(&self) -> Result<Vec<Load>> {
        if let Some(path) = &self.trace {
            let shown = path.display();
            let text = file::text("trace", path)?;
            let wrong = |e: unbroken_simulate::Error| format!("{shown}: {e}");
            let requests = trace(&text).map_err(|e| Error::value("trace", wrong(e)))?;
            // another replica has the same
            return Ok(vec![Load { rate: None, others: requests.clone(), requests }]);
        }
        let load = |rate: &f64| {
            let pattern = match self.arrivals {
                Arrivals::Fixed => Pattern::Fixed,
                Arrivals::Poisson => Pattern::Poisson,
            };
            let (prompt, output) = (self.prompt, self.output);
            let stream = Stream { pattern, rate: *rate, lasts_s: self.lasts, prompt, output };
            let of = |replica| stream.requests(self.seed, replica);
            // no request of the other replica need come
            let others = of(1).unwrap_or_default();
            Ok(Load { rate: Some(*rate), requests: of(0)?, others })
        };
        self.rate.0.iter().map(load).collect()
    }

    fn losses(&self, cluster: &Cluster) -> Result<Vec<Loss>> {
        if self.fail.is_empty() {
            return first_nics(self.lost, cluster);
        }
        let mut lost = Vec::new();
        for outage in &self.fail {
            lost.extend(nics_of(cluster, *outage)?);
        }
        lost.sort_unstable();
        lost.dedup();
        Ok(lost)
    }

    fn when(&self) -> When {
        self.at_token.map_or(When::Second(self.at), When::Token)
    }

    fn times(&self, contents: &Contents) -> Result<Times> {
        let usual = Times::default();
        let restart_s = contents.over("serving", Served::default())?.restart_s;
        // the rest of that table is of training jobs
        let switch_s = match contents.has("recovery", "switch_s") {
            true => contents.over("recovery", Recovery::default())?.switch_s,
            false => usual.switch_s,
        };
        Ok(Times {
            restart_s: self.restart.or(restart_s).unwrap_or(usual.restart_s),
            switch_s: self.switch.unwrap_or(switch_s),
        })
    }

    fn strategies(&self) -> Vec<Handling> {
        match self.strategy.is_empty() {
            true => Handling::ALL.to_vec(),
            // each once, in the usual order
            false => self.strategy.iter().copied().collect::<BTreeSet<_>>().into_iter().collect(),
        }
    }
}

/// The answer.
#[derive(Serialize)]
pub struct Report {
    /// What serves.
    pub serving: Serving,
    /// What is lost.
    pub lost: Vec<Loss>,
    /// When.
    pub when: When,
    /// What a failure costs once.
    pub times: Times,
    /// Which requests.
    pub seed: u64,
    /// For each rate what clients see, first without a failure, then with each strategy.
    pub rows: Vec<Row>,
}

/// What clients see.
#[derive(Serialize)]
pub struct Row {
    /// Requests a second; missing where requests are from a file.
    pub rate: Option<f64>,
    /// None: no failure.
    pub strategy: Option<Handling>,
    /// Missing where it cannot go on.
    pub outcome: Option<Outcome>,
    /// Why it cannot.
    pub why_not: Option<String>,
}

/// Answers it.
pub fn serve(args: &ServeArgs, watch: &Watch) -> Result<Report> {
    let contents = Contents::read(args.serving.file.as_deref())?;
    let serving = args.serving.read(&contents)?;
    let serving = serving.checked()?;
    let lost = args.losses(&serving.cluster)?;
    let service = Service::new(serving, &lost)?.with_stop(watch.stopper());
    let loads = args.loads()?;
    if args.trace.is_none() && args.at_token.is_none() && args.at >= args.lasts {
        let text = format!(
            "NICs are lost after {}, and requests come for {}; a longer --for or an earlier --at \
             is right",
            show::time_s(args.at),
            show::time_s(args.lasts)
        );
        return Err(Error::value("at", text));
    }
    let (times, when) = (args.times(&contents)?, args.when());
    // what is wrong with requests is so for all strategies
    for load in &loads {
        service.check(&load.requests, Some(when))?;
    }
    let strategies = if service.lost().is_empty() { Vec::new() } else { args.strategies() };
    let of_load = |load| {
        let all = [None].into_iter().chain(strategies.iter().copied().map(Some));
        all.map(move |strategy| (load, strategy))
    };
    let asked: Vec<(&Load, Option<Handling>)> = loads.iter().flat_map(of_load).collect();
    watch.expect(asked.len());
    let compute = |(load, strategy): &(&Load, Option<Handling>)| {
        let both = (&load.requests[..], &load.others[..]);
        let when = strategy.map(|_| when);
        let outcome = service.run(both, strategy.unwrap_or(Handling::Ours), times, when);
        watch.add(1);
        let why_not = outcome.as_ref().err().map(|e| e.to_string());
        Row { rate: load.rate, strategy: *strategy, outcome: outcome.ok(), why_not }
    };
    let rows = on_cores(args.cores, || asked.par_iter().map(compute).collect())?;
    watch.check()?;
    let (serving, lost) = (service.serving().clone(), service.lost().to_vec());
    Ok(Report { serving, lost, when, times, seed: args.seed, rows })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_some_or_in_steps() {
        assert_eq!(rates("2"), Ok(Rates(vec![2.0])));
        assert_eq!(rates("0.5,1"), Ok(Rates(vec![0.5, 1.0])));
        assert_eq!(rates("0.1-0.4:0.1,2"), Ok(Rates(vec![0.1, 0.2, 0.3, 0.4, 2.0])));
        for wrong in ["", "0", "-1", "x", "1-", "2-1:1", "1-2", "1-2:0", "inf", "1-1e9:1", "nan"] {
            assert!(rates(wrong).unwrap_err().contains("0.5-4:0.5 are right"), "{wrong}");
        }
    }
}
