//! What passes, activations and KV caches take.
//!
//! A stage of a pass is computed as fast as arithmetic and memory allow, whichever is slower
//! (S. Williams et al., *Roofline*, 2009; of transformers: R. Pope et al., *Efficiently Scaling
//! Transformer Inference*, MLSys '23, §2). With *p* stages, *t* GPUs each, of a model with *N*
//! parameters that are multiplied, and a pass of *n* tokens:
//!
//! - arithmetic: (2 N n + A) / p operations, at t times the peak times its efficiency, where A is
//!   [`Llm::attention_operations`] for each pair of a token and one before it. This is what
//!   prefilling takes;
//! - memory: (N w + K) / p bytes, at t times the bandwidth times its efficiency, for weights of *w*
//!   bytes and the KV caches *K* of all requests of the pass. This is what generating takes;
//! - tensor parallelism: two AllReduces of n h values in each layer (M. Shoeybi et al.,
//!   *Megatron-LM*, 2019, §3). Within a host each takes what a ring sends over NVLink,
//!   2 (t − 1) / t of its bytes, and twice the latency. Among hosts it takes what
//!   [`crate::strategy`] says.
//!
//! Between stages go n h values, and from prefill to decode the KV cache of a prompt: each is a
//! SendRecv between two hosts, over all NICs, as long as [`crate::strategy`] says. Hosts of a stage
//! send their parts side by side, and the slowest counts.
//!
//! DéjàVu reads the new part of the KV cache once more, and sends it to the next host beside what
//! is computed: a stage takes as long as the longer of both.
//!
//! [`Llm::attention_operations`]: super::model::Llm::attention_operations

use unbroken_schedule::cost::{Costs, Switches};

use super::serving::Serving;
use crate::cluster::Loss;
use crate::strategy::{Kind, Pair, Strategy};
use crate::Error;

/// Sizes between which times are taken to be linear, as powers of two.
const SIZES: std::ops::RangeInclusive<u32> = 8..=34;

/// How long something takes by its size.
#[derive(Clone, Debug)]
pub(super) struct Curve(Vec<(f64, f64)>);

impl Curve {
    /// From the seconds of sizes in bytes.
    fn of(mut seconds: impl FnMut(u64) -> Result<f64, Error>) -> Result<Curve, Error> {
        let point = |power: u32| Ok(((1u64 << power) as f64, seconds(1 << power)?));
        Ok(Curve(SIZES.map(point).collect::<Result<_, Error>>()?))
    }

    /// Seconds of so many bytes. Less than the first size takes as long as that, and what is more
    /// than the last goes on at its rate.
    pub fn seconds(&self, bytes: f64) -> f64 {
        let points = &self.0;
        let above = points.partition_point(|p| p.0 < bytes).clamp(1, points.len() - 1);
        let ((x0, y0), (x1, y1)) = (points[above - 1], points[above]);
        y0 + (y1 - y0) * (bytes.max(x0) - x0) / (x1 - x0)
    }

    fn slower(self, other: Curve) -> Curve {
        let both = self.0.into_iter().zip(other.0);
        Curve(both.map(|(a, b)| (a.0, a.1.max(b.1))).collect())
    }
}

/// What a pass computes and reads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Load {
    /// Tokens that are computed.
    pub tokens: f64,
    /// Pairs of one of them and one before it.
    pub pairs: f64,
    /// Tokens of the KV caches that are read.
    pub read: f64,
}

impl Load {
    /// Adds a request that has `context` tokens in its cache, and so many new ones.
    pub fn add(&mut self, context: u32, new: u32) {
        let (context, new) = (f64::from(context), f64::from(new));
        self.tokens += new;
        self.pairs += context * new + new * new / 2.0;
        self.read += context + new;
    }
}

/// Communication of an instance.
#[derive(Clone, Debug)]
pub(super) struct InstancePace {
    /// By stage: an AllReduce among hosts; none where a stage is one host.
    all_reduce: Vec<Option<Curve>>,
    /// By stage: activations of a host to the next stage.
    hops: Vec<Curve>,
    /// A host's part of something to the next host; none where there is one host.
    neighbour: Option<Curve>,
}

/// Communication of a replica, with all NICs or with those that are left.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// By instance.
    pub instances: Vec<InstancePace>,
    /// A host's part of a KV cache, from prefill to decode.
    transfer: Option<Curve>,
}

/// The hosts of a replica, as they are.
struct Network<'n> {
    serving: &'n Serving,
    lost: &'n [Loss],
    strategy: Strategy,
    costs: Costs,
}

impl Network<'_> {
    /// Seconds of an operation among hosts, each with so many ranks.
    fn seconds(
        &self,
        hosts: &[usize],
        groups: (usize, usize),
        kind: Kind,
        bytes: u64,
    ) -> Result<f64, Error> {
        let of = |lost: &[Loss]| self.serving.cluster.topology(hosts.iter().copied(), groups, lost);
        let (healthy, now) = (of(&[])?, of(self.lost)?);
        let switches = Switches::over(self.serving.cluster.clos(), hosts.iter().copied());
        let pair = Pair {
            healthy: &healthy,
            now: &now,
            before: &switches,
            switches: &switches,
            costs: &self.costs,
            form: None,
        };
        let collective = kind.of(bytes, healthy.ranks())?;
        let after_us = pair.after(&collective, self.strategy)?.us;
        // the planner goes by estimates, and chooses a per cent better for fewer NICs now and then;
        // what they can do all of them can
        Ok(after_us.max(pair.before(&collective)?.us) / 1e6)
    }

    /// What a host sends to another, over all NICs.
    fn send(&self, from: usize, to: usize) -> Result<Curve, Error> {
        let groups = (1, self.serving.cluster.gpus);
        Curve::of(|bytes| self.seconds(&[from, to], groups, Kind::SendRecv, bytes))
    }

    /// The slowest of some.
    fn sends(&self, pairs: impl Iterator<Item = (usize, usize)>) -> Result<Option<Curve>, Error> {
        let mut slowest: Option<Curve> = None;
        for (from, to) in pairs {
            let curve = self.send(from, to)?;
            slowest = Some(match slowest {
                Some(other) => other.slower(curve),
                None => curve,
            });
        }
        Ok(slowest)
    }

    /// The instance whose hosts begin with this one.
    fn instance(&self, first: usize) -> Result<InstancePace, Error> {
        let (width, stages) = (self.serving.stage_hosts(), self.serving.pipeline);
        let mut pace = InstancePace { all_reduce: Vec::new(), hops: Vec::new(), neighbour: None };
        for stage in 0..stages {
            let hosts: Vec<usize> = (0..width).map(|h| first + stage * width + h).collect();
            let groups = (self.serving.cluster.gpus, 1);
            let all_reduce = match width {
                1 => None,
                _ => Some(Curve::of(|bytes| self.seconds(&hosts, groups, Kind::AllReduce, bytes))?),
            };
            pace.all_reduce.push(all_reduce);
            if stage + 1 < stages {
                pace.hops.extend(self.sends(hosts.into_iter().map(|h| (h, h + width)))?);
            }
        }
        let of_all = self.serving.hosts();
        if of_all > 1 {
            let pairs = (first..first + width * stages).map(|h| (h, (h + 1) % of_all));
            pace.neighbour = self.sends(pairs)?;
        }
        Ok(pace)
    }
}

impl Pace {
    /// With these NICs lost, if that is how communicators go on.
    pub fn new(serving: &Serving, lost: &[Loss], strategy: Strategy) -> Result<Pace, Error> {
        let network = Network { serving, lost, strategy, costs: Costs::default() };
        let hosts = serving.instance_hosts();
        let instances = (0..serving.instances())
            .map(|number| network.instance(number * hosts))
            .collect::<Result<_, Error>>()?;
        let transfer = match serving.disaggregated {
            true => network.sends((0..hosts).map(|h| (h, hosts + h)))?,
            false => None,
        };
        Ok(Pace { instances, transfer })
    }

    /// How long the KV cache of so many tokens takes from prefill to decode.
    pub fn transfer_s(&self, serving: &Serving, tokens: u32) -> f64 {
        let part = f64::from(tokens) * serving.kv_token_bytes() / serving.instance_hosts() as f64;
        self.transfer.as_ref().map_or(0.0, |curve| curve.seconds(part))
    }
}

impl InstancePace {
    /// How long a stage has a pass; with new parts of the KV cache sent away, if `copied`.
    pub fn stage_s(&self, serving: &Serving, stage: usize, load: &Load, copied: bool) -> f64 {
        let (model, gpu) = (&serving.model, &serving.gpu);
        let (stages, gpus) = (serving.pipeline as f64, serving.tensor as f64);
        let new_bytes = load.tokens * serving.kv_token_bytes() / stages;
        let operations =
            2.0 * model.multiplied() * load.tokens + model.attention_operations() * load.pairs;
        let weights = model.multiplied() * serving.weight_bytes;
        let caches = load.read * serving.kv_token_bytes();
        let read = (weights + caches) / stages + if copied { new_bytes } else { 0.0 };
        let compute_s = operations / stages / (gpus * gpu.peak_tflops * 1e12 * gpu.efficiency);
        let memory_s = read / (gpus * gpu.memory_gb_s * 1e9 * gpu.memory_efficiency);
        let layers = model.layers as f64 / stages;
        let stage_s =
            compute_s.max(memory_s) + 2.0 * layers * self.all_reduce_s(serving, stage, load.tokens);
        match &self.neighbour {
            Some(curve) if copied => {
                stage_s.max(curve.seconds(new_bytes / serving.stage_hosts() as f64))
            }
            _ => stage_s,
        }
    }

    fn all_reduce_s(&self, serving: &Serving, stage: usize, tokens: f64) -> f64 {
        let bytes = tokens * serving.model.hidden as f64 * serving.value_bytes;
        match &self.all_reduce[stage] {
            Some(curve) => curve.seconds(bytes),
            None => {
                let t = serving.tensor as f64;
                let rate = f64::from(serving.cluster.nvlink_mbps) * 1e6 / 8.0;
                let latency_s = 2.0 * Costs::default().memory_alpha_us / 1e6;
                2.0 * (t - 1.0) / t * bytes / rate + latency_s
            }
        }
    }

    /// How long activations of so many tokens take from this stage to the next.
    pub fn hop_s(&self, serving: &Serving, stage: usize, tokens: f64) -> f64 {
        let bytes = tokens * serving.model.hidden as f64 * serving.value_bytes;
        self.hops.get(stage).map_or(0.0, |c| c.seconds(bytes / serving.stage_hosts() as f64))
    }

    /// How long a host's part of the KV cache of so many tokens takes from its neighbour.
    pub fn restore_s(&self, serving: &Serving, tokens: u64) -> f64 {
        let part = tokens as f64 * serving.kv_token_bytes() / serving.instance_hosts() as f64;
        self.neighbour.as_ref().map_or(0.0, |curve| curve.seconds(part))
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::Llm;
    use super::*;

    fn serving(name: &str, disaggregated: bool) -> Serving {
        let new = Serving::new(Llm::named(name).unwrap(), disaggregated);
        Serving { weight_bytes: if disaggregated { 1.0 } else { 2.0 }, ..new }.checked().unwrap()
    }

    const LOST: [Loss; 1] = [Loss { host: 0, nic: 3, port: None, left: None }];

    /// The sizes of a prompt and of a token, by hand.
    #[test]
    fn passes_take_what_arithmetic_and_memory_allow() {
        let s = serving("llama-3.1-405b", false);
        let pace = Pace::new(&s, &[], Strategy::Ours).unwrap();
        let mut prompt = Load::default();
        prompt.add(0, 2000);
        // 2 · 404e9 · 2000 / 2 operations and an attention of 2 · 126 · 16,384 · 2000² / 2, at
        // 3.96e15
        let seconds = pace.instances[0].stage_s(&s, 0, &prompt, false);
        let compute = (2.0 * 403.75e9 * 2000.0 + 4.0 * 126.0 * 16_384.0 * 2e6) / 2.0 / 3.956e15;
        // 126 AllReduces of 65.5 MB, each 1.75 times that at 450 GB/s
        let network = 126.0 * (1.75 * 65.536e6 / 450e9 + 2e-6);
        assert!((seconds / (compute + network) - 1.0).abs() < 0.002, "{seconds}");
        let mut token = Load::default();
        token.add(2000, 1);
        let seconds = pace.instances[0].stage_s(&s, 0, &token, false);
        let memory = (2.0 * 403.75e9 + 2001.0 * 516_096.0) / 2.0 / (8.0 * 3.35e12 * 0.8);
        let network = 126.0 * 2e-6;
        assert!((seconds / (memory + network) - 1.0).abs() < 0.002, "{seconds}");
    }

    /// 2,000 tokens of 512 KB over eight NICs of 400 Gbit/s.
    #[test]
    fn a_lost_nic_slows_what_crosses_hosts() {
        let s = serving("llama-3.1-405b", true);
        let of = |lost: &[Loss], strategy| Pace::new(&s, lost, strategy).unwrap();
        let healthy_s = of(&[], Strategy::Ours).transfer_s(&s, 2000);
        let wire_s = 2000.0 * 516_096.0 * 8.0 / 3.2e12;
        assert!((1.0..1.05).contains(&(healthy_s / wire_s)), "{healthy_s} {wire_s}");
        let longer = |strategy| of(&LOST, strategy).transfer_s(&s, 2000) / healthy_s;
        assert!((longer(Strategy::Balance) - 8.0 / 7.0).abs() < 0.02);
        assert!((longer(Strategy::HotRepair) - 2.0).abs() < 0.05);
        assert!(longer(Strategy::Ours) <= longer(Strategy::Balance) + 1e-9);
        let s = serving("llama-3.1-405b", false);
        let hop = |lost: &[Loss], strategy| {
            Pace::new(&s, lost, strategy).unwrap().instances[0].hop_s(&s, 0, 8192.0)
        };
        assert!(hop(&LOST, Strategy::Balance) > hop(&[], Strategy::Ours));
    }

    /// What copies of the KV cache cost, by hand.
    #[test]
    fn copies_take_memory_and_nics() {
        let s = serving("opt-66b", false);
        let pace = &Pace::new(&s, &[], Strategy::Ours).unwrap().instances[0];
        // half of 1,000 tokens of 2.25 MiB over 3.2 Tbit/s
        let wire_s = 500.0 * 2_359_296.0 * 8.0 / 3.2e12;
        let restore_s = pace.restore_s(&s, 1000);
        assert!((1.0..1.05).contains(&(restore_s / wire_s)), "{restore_s} {wire_s}");
        let mut load = Load::default();
        load.add(1000, 1);
        let [alone_s, copied_s] = [false, true].map(|copied| pace.stage_s(&s, 0, &load, copied));
        let read_s = 2_359_296.0 / 2.0 / (8.0 * 3.35e12 * 0.8);
        assert!(((copied_s - alone_s) / read_s - 1.0).abs() < 1e-6, "{alone_s} {copied_s}");
        // over NICs of 100 Mbit/s they take longer than computing
        let mut s = s;
        s.cluster.nic_mbps = 100;
        let slow = &Pace::new(&s, &[], Strategy::Ours).unwrap().instances[0];
        let slow_s = slow.stage_s(&s, 0, &load, true);
        let wire_s = 2_359_296.0 / 2.0 * 8.0 / 800e6;
        assert!(slow_s > 2.0 * alone_s && (slow_s / wire_s - 1.0).abs() < 0.1, "{slow_s} {wire_s}");
    }

    /// Where a layer is divided among hosts, NICs are in each AllReduce.
    #[test]
    fn layers_across_hosts_feel_a_lost_nic() {
        let s = Serving { tensor: 16, pipeline: 1, ..serving("llama-3.1-405b", false) };
        let s = s.checked().unwrap();
        let mut prompt = Load::default();
        prompt.add(0, 2000);
        let of = |lost: &[Loss], strategy| {
            Pace::new(&s, lost, strategy).unwrap().instances[0].stage_s(&s, 0, &prompt, false)
        };
        let healthy = of(&[], Strategy::Ours);
        let [ours, hot_repair] = [Strategy::Ours, Strategy::HotRepair].map(|x| of(&LOST, x));
        assert!(healthy <= ours && ours < hot_repair, "{healthy} {ours} {hot_repair}");
    }

    #[test]
    fn curves_are_linear_between_their_sizes() {
        let curve = Curve::of(|bytes| Ok(1.0 + bytes as f64)).unwrap();
        for bytes in [256.0, 300.0, 1e6, 1e9, 1e12] {
            assert!((curve.seconds(bytes) / (1.0 + bytes) - 1.0).abs() < 1e-9, "{bytes}");
        }
        assert_eq!(curve.seconds(3.0), 257.0);
    }
}
