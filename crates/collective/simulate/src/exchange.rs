//! What a step exchanges: volumes and counts, for each kind of parallelism.
//!
//! For *l* layers, hidden size *h*, keys and values of *g* elements, sequences of *s* tokens,
//! micro-batches of *b* sequences, *m* of them a step, and tensor, context, expert, pipeline and
//! data parallelism *t*, *c*, *e*, *p* and *d*. Volumes are those of all t devices of a
//! tensor-parallel group together.
//!
//! - **Tensor** (Megatron-LM, SC '21, §2.3): two AllReduces of b s/c h elements in each layer
//!   forwards, two backwards, for each micro-batch; two more where activations are computed again.
//!   Where a token goes to k experts, the second of each two has k times as much: the experts' part
//!   of each device has all tokens that were sent there (D. Liu et al., *MoE Parallel Folding*,
//!   2025).
//! - **Pipeline** (§3.2, §4.1): b s/c h elements between neighbouring stages each way, for each
//!   micro-batch and chunk of layers, of which each of the t devices sends its part.
//! - **Data** (§2.1): one AllReduce of the gradients a step. With ZeRO (S. Rajbhandari et al.,
//!   *ZeRO*, SC '20, §7) stages 1 and 2: a ReduceScatter of gradients and an AllGather of
//!   parameters, which is as much as the AllReduce (§7.2.1). In stage 2 a rank keeps its part of
//!   the gradients alone, so that they are reduced with each micro-batch. In stage 3 (§7.2.2; Y.
//!   Zhao et al., *PyTorch FSDP*, VLDB '23), for each layer and micro-batch, an AllGather of its
//!   parameters forwards, another backwards, and a ReduceScatter of gradients: half as much again.
//! - **Experts** (D. Lepikhin et al., *GShard*, ICLR '21, §3.2; S. Rajbhandari et al.,
//!   *DeepSpeed-MoE*, ICML '22): in each layer with experts an AllToAll of b s/c k h elements, what
//!   each rank sends, to the experts and another back; the same backwards. Tokens are spread
//!   evenly, and none is dropped. Gradients of experts are reduced among the c d / e ranks that
//!   have the same ones.
//! - **Context**: K and V of a sequence have 2 b s g elements. As a *ring* (H. Liu et al., *Ring
//!   Attention with Blockwise Transformers*, ICLR '24, §3; Megatron-LM's `p2p`) each rank sends its
//!   part, 2 b s/c g, to its neighbour c − 1 times forwards and again backwards, where the
//!   gradients of K and V go round with it, c times, home at last. *At once* (A. Grattafiori et
//!   al., *The Llama 3 Herd of Models*, 2024, §3.3.2): an AllGather of K and V forwards, another
//!   backwards, and a ReduceScatter of their gradients.
//!
//! What is computed again in the backward pass is exchanged again.

use serde::Serialize;

use crate::job::{ContextExchange, Job, Layout};
use crate::strategy::Kind;

/// For what something is exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// Gradients and parameters among replicas, but those of experts.
    Data,
    /// Those of experts, among ranks that have the same.
    ExpertData,
    /// Tokens, to the experts and back.
    Tokens,
    /// Keys and values of a sequence that is divided.
    Context,
    /// Activations from stage to stage.
    Pipeline,
}

/// An operation that a pipeline stage has many times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Exchange {
    /// What for.
    pub purpose: Purpose,
    /// The operation.
    pub kind: Kind,
    /// Ranks of a group, each a tensor-parallel group.
    pub ranks: usize,
    /// Bytes of the vector, of the whole output, or of what a rank sends ([`Kind`]).
    pub bytes: u64,
    /// How many of them a step has.
    pub times: f64,
}

impl Job {
    /// Bytes of a micro-batch's activations between two layers, on a rank of context parallelism.
    pub fn activation_bytes(&self) -> u64 {
        let elements = self.micro_batch * self.model.sequence * self.model.hidden / self.context;
        elements as u64 * self.value_bytes
    }

    /// Bytes of the keys and values of a micro-batch's sequences, all parts together.
    pub fn kv_bytes(&self) -> u64 {
        (2 * self.micro_batch * self.model.sequence * self.model.kv()) as u64 * self.value_bytes
    }

    /// Passes through layers in which they exchange something: forwards, backwards, and forwards
    /// again where activations are computed again.
    fn passes(&self) -> f64 {
        if self.recompute {
            3.0
        } else {
            2.0
        }
    }

    /// Time that a step exchanges between the GPUs of tensor-parallel groups, in seconds.
    pub fn tensor_s(&self, replicas: usize, nvlink_mbps: u32) -> f64 {
        let t = self.tensor as f64;
        let bytes = 2.0 * (t - 1.0) / t * self.activation_bytes() as f64;
        let (layers, with) = (self.model.layers as f64, self.model.expert_layers() as f64);
        let of_experts = self.model.experts.map_or(1.0, |e| (e.top_k + e.shared.min(1)) as f64);
        let vectors = layers + (layers - with) + with * of_experts;
        let count = self.passes() * vectors / self.pipeline as f64 * self.rounds(replicas);
        count * bytes * 8.0 / (f64::from(nvlink_mbps) * 1e6)
    }

    /// What a pipeline stage exchanges in a step; but what is between the GPUs of a tensor-parallel
    /// group.
    pub fn exchanges(&self, layout: &Layout) -> Vec<Exchange> {
        let mut all = self.data_exchanges(layout);
        all.extend(self.expert_data_exchanges(layout));
        let times =
            |one: Exchange| Exchange { times: one.times * self.rounds(layout.replicas), ..one };
        all.extend(self.token_exchange().map(times));
        all.extend(self.context_exchanges().into_iter().map(times));
        if self.pipeline > 1 {
            all.push(Exchange {
                purpose: Purpose::Pipeline,
                kind: Kind::SendRecv,
                ranks: 2,
                bytes: self.activation_bytes(),
                times: self.pipeline_waits(layout.replicas),
            });
        }
        all
    }

    /// Gradients and parameters that all replicas have.
    pub(crate) fn data_exchanges(&self, layout: &Layout) -> Vec<Exchange> {
        let parameters = self.model.parameters() - self.model.expert_parameters();
        self.replicated((Purpose::Data, layout.ranks()), parameters, self.model.layers, layout)
    }

    /// Those of experts: of the part that a rank has, or, where a host has several parts, of all
    /// parts of a host together.
    pub(crate) fn expert_data_exchanges(&self, layout: &Layout) -> Vec<Exchange> {
        let layers = self.model.expert_layers();
        if layers == 0 {
            return Vec::new();
        }
        let ranks = layout.ranks() / self.expert_parallel;
        let of_host = layout.host_replicas.min(self.expert_parallel) as f64;
        let parameters = self.model.expert_parameters() * of_host / self.expert_parallel as f64;
        self.replicated((Purpose::ExpertData, ranks), parameters, layers, layout)
    }

    /// What ranks exchange that have the same parameters, those of so many layers of the model.
    fn replicated(
        &self,
        (purpose, ranks): (Purpose, usize),
        parameters: f64,
        layers: usize,
        layout: &Layout,
    ) -> Vec<Exchange> {
        if ranks < 2 {
            return Vec::new();
        }
        let parameters = parameters / self.pipeline as f64;
        let layers = layers as f64 / self.pipeline as f64;
        let one = |kind, parameters: f64, each: u64, times| Exchange {
            purpose,
            kind,
            ranks,
            bytes: (parameters * each as f64) as u64,
            times,
        };
        let (gradient, value) = (self.gradient_bytes, self.value_bytes);
        let micro_batches = self.micro_batches(layout.replicas);
        let of_layer = parameters / layers;
        match self.zero_stage() {
            0 => vec![one(Kind::AllReduce, parameters, gradient, 1.0)],
            stage @ 1..=2 => vec![
                one(
                    Kind::ReduceScatter,
                    parameters,
                    gradient,
                    if stage == 1 { 1.0 } else { micro_batches },
                ),
                one(Kind::AllGather, parameters, value, 1.0),
            ],
            _ => vec![
                one(Kind::AllGather, of_layer, value, 2.0 * layers * micro_batches),
                one(Kind::ReduceScatter, of_layer, gradient, layers * micro_batches),
            ],
        }
    }

    /// Tokens that go to experts and back, for each micro-batch.
    pub(crate) fn token_exchange(&self) -> Option<Exchange> {
        let experts = self.model.experts.filter(|_| self.expert_parallel > 1)?;
        Some(Exchange {
            purpose: Purpose::Tokens,
            kind: Kind::AllToAll,
            ranks: self.expert_parallel,
            bytes: self.activation_bytes() * experts.top_k as u64,
            times: 2.0 * self.passes() * self.model.expert_layers() as f64 / self.pipeline as f64,
        })
    }

    /// Keys and values of divided sequences, for each micro-batch.
    pub(crate) fn context_exchanges(&self) -> Vec<Exchange> {
        if self.context < 2 {
            return Vec::new();
        }
        let layers = self.model.layers as f64 / self.pipeline as f64;
        let one = |kind, bytes, times: f64| Exchange {
            purpose: Purpose::Context,
            kind,
            ranks: self.context,
            bytes,
            times: layers * times,
        };
        let (all, c) = (self.kv_bytes(), self.context as f64);
        match self.context_exchange {
            ContextExchange::Ring => {
                let times = self.passes() * (c - 1.0) + c;
                vec![one(Kind::SendRecv, all / self.context as u64, times)]
            }
            ContextExchange::AllGather => {
                vec![one(Kind::AllGather, all, self.passes()), one(Kind::ReduceScatter, all, 1.0)]
            }
        }
    }
}

impl Exchange {
    /// Bytes that each rank sends to others in a step, in the least possible case.
    pub fn sent_bytes(&self) -> f64 {
        let others = (self.ranks as f64 - 1.0) / self.ranks as f64;
        let of_one = match self.kind {
            Kind::AllReduce => 2.0 * others,
            Kind::ReduceScatter | Kind::AllGather | Kind::AllToAll => others,
            Kind::Broadcast | Kind::SendRecv => 1.0,
        };
        of_one * self.bytes as f64 * self.times
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Experts, Model};

    fn exchanges(job: &Job, hosts: usize) -> Vec<Exchange> {
        job.exchanges(&job.layout(hosts, 8).unwrap())
    }

    fn of(job: &Job, hosts: usize, purpose: Purpose) -> Vec<(Kind, usize, u64, f64)> {
        let all = exchanges(job, hosts).into_iter().filter(|e| e.purpose == purpose);
        all.map(|e| (e.kind, e.ranks, e.bytes, e.times)).collect()
    }

    /// A GPT of one million of parameters in each of 24 layers, and a few: all by hand.
    /// 12 · 24 · 1024² + 13 · 24 · 1024 + (32,000 + 1,024) · 1,024
    const PARAMETERS: u64 = 301_989_888 + 319_488 + 33_816_576;

    fn gpt() -> Job {
        Job {
            model: Model::gpt("", 24, 1024, 32_000, 1024),
            tensor: 8,
            batch: 64,
            ..Job::default()
        }
    }

    /// ZeRO, §7: stages 1 and 2 send as much as the AllReduce, stage 3 half as much again. With
    /// gradients of four bytes and parameters of two, 4 + 2, and 4 + 2 + 2, for 4 + 4.
    #[test]
    fn stages_of_zero_have_the_published_volumes() {
        let job = |zero| Job { zero, gradient_bytes: 2, batch: 4, ..gpt() };
        let sent = |zero: usize| {
            let all = exchanges(&job(zero), 4);
            all.iter().map(Exchange::sent_bytes).sum::<f64>()
        };
        // 2 Ψ parameters, 3/4 of them to others, two bytes each; one micro-batch
        let psi = PARAMETERS as f64 * 2.0 * 0.75;
        assert!((sent(0) / (2.0 * psi) - 1.0).abs() < 1e-6);
        assert!((sent(1) / (2.0 * psi) - 1.0).abs() < 1e-6);
        assert!((sent(2) / (2.0 * psi) - 1.0).abs() < 1e-6);
        assert!((sent(3) / (3.0 * psi) - 1.0).abs() < 1e-6);
    }

    /// Four replicas with 16 micro-batches each.
    #[test]
    fn stages_of_zero_differ_in_how_often_gradients_are_reduced() {
        let of = |zero| of(&Job { zero, ..gpt() }, 4, Purpose::Data);
        let (four, two) = (4 * PARAMETERS, 2 * PARAMETERS);
        assert_eq!(of(0), [(Kind::AllReduce, 4, four, 1.0)]);
        let gathered = (Kind::AllGather, 4, two, 1.0);
        assert_eq!(of(1), [(Kind::ReduceScatter, 4, four, 1.0), gathered]);
        assert_eq!(of(2), [(Kind::ReduceScatter, 4, four, 16.0), gathered]);
        let layer = PARAMETERS / 24;
        assert_eq!(
            of(3),
            [
                (Kind::AllGather, 4, 2 * layer, 2.0 * 24.0 * 16.0),
                (Kind::ReduceScatter, 4, 4 * layer, 24.0 * 16.0)
            ]
        );
        let fsdp = Job { fsdp: true, ..gpt() };
        assert_eq!(super::tests::of(&fsdp, 4, Purpose::Data), of(3));
    }

    /// Mixtral 8x7B, TP 2: a micro-batch of one sequence of 4,096 tokens, two of eight experts,
    /// 4,096 elements of two bytes: 64 MiB, four times in each of 32 layers.
    #[test]
    fn tokens_go_to_experts_and_back() {
        let job = Job {
            model: Model::named("mixtral-8x7b").unwrap(),
            tensor: 2,
            expert_parallel: 8,
            batch: 256,
            ..Job::default()
        };
        let tokens = |job: &Job| of(job, 8, Purpose::Tokens);
        // 32 replicas, eight micro-batches
        assert_eq!(tokens(&job), [(Kind::AllToAll, 8, 64 << 20, 4.0 * 32.0 * 8.0)]);
        let again = Job { recompute: true, ..job.clone() };
        assert_eq!(tokens(&again)[0].3, 6.0 * 32.0 * 8.0);
        // half of the layers a stage, 16 replicas with 16 micro-batches and one of the bubble
        let piped = Job { pipeline: 2, ..job.clone() };
        assert_eq!(tokens(&piped)[0].3, 4.0 * 16.0 * 17.0);
        // half of the tokens, twice as many micro-batches
        let parts = Job { context: 2, ..job.clone() };
        assert_eq!(tokens(&parts), [(Kind::AllToAll, 8, 32 << 20, 4.0 * 32.0 * 16.0)]);
        let alone = Job { expert_parallel: 1, ..job };
        assert_eq!(tokens(&alone), []);
    }

    /// 32 ranks (TP 2 on 8 hosts). Experts: 32 · 8 · 3 · 4,096 · 14,336 parameters.
    #[test]
    fn gradients_of_experts_stay_among_those_that_have_them() {
        let model = Model::named("mixtral-8x7b").unwrap();
        let experts = 32 * 8 * 3 * 4096 * 14_336u64;
        let rest = model.parameters() as u64 - experts;
        let job = |expert_parallel| Job {
            model: model.clone(),
            tensor: 2,
            expert_parallel,
            batch: 256,
            ..Job::default()
        };
        for e in [1, 2, 4, 8] {
            let job = job(e);
            assert_eq!(of(&job, 8, Purpose::Data), [(Kind::AllReduce, 32, 4 * rest, 1.0)]);
            // four ranks of a host have all experts with EP 1 to 4, and half with EP 8
            let bytes = 4 * experts / if e == 8 { 2 } else { 1 };
            let found = of(&job, 8, Purpose::ExpertData);
            assert_eq!(found, [(Kind::AllReduce, 32 / e, bytes, 1.0)]);
        }
        let sharded = of(&Job { zero: 3, ..job(4) }, 8, Purpose::ExpertData);
        assert_eq!(sharded[0], (Kind::AllGather, 8, 2 * experts / 32, 2.0 * 32.0 * 8.0));
        // each expert once: nothing is the same
        let once = Job {
            model: Model {
                experts: Some(Experts { count: 32, ..Experts::default() }),
                ..model.clone()
            },
            ..job(32)
        };
        assert_eq!(of(&once, 8, Purpose::ExpertData), []);
    }

    /// Llama 3.1 405B with sequences of 131,072 tokens, CP 16, TP 8: K and V have 2 · 131,072 ·
    /// 1,024 elements of two bytes, 512 MiB, of which a rank has 32 MiB.
    #[test]
    fn keys_and_values_go_round_or_are_gathered() {
        let model = Model { sequence: 131_072, ..Model::named("llama-3.1-405b").unwrap() };
        let job = |context_exchange, recompute| Job {
            model: model.clone(),
            tensor: 8,
            context: 16,
            context_exchange,
            recompute,
            batch: 8,
            ..Job::default()
        };
        let context = |job: &Job| of(job, 32, Purpose::Context);
        // two replicas with four micro-batches; 126 layers
        let layers = 126.0 * 4.0;
        let ring = job(ContextExchange::Ring, false);
        assert_eq!(context(&ring), [(Kind::SendRecv, 16, 32 << 20, layers * (15.0 + 15.0 + 16.0))]);
        let at_once = job(ContextExchange::AllGather, false);
        assert_eq!(
            context(&at_once),
            [
                (Kind::AllGather, 16, 512 << 20, layers * 2.0),
                (Kind::ReduceScatter, 16, 512 << 20, layers)
            ]
        );
        // the same volume, but for the last hop home
        let sent = |job: &Job| {
            let all = exchanges(job, 32);
            let of_context = all.iter().filter(|e| e.purpose == Purpose::Context);
            of_context.map(Exchange::sent_bytes).sum::<f64>()
        };
        let hop = f64::from(32 << 20) * layers;
        assert!((sent(&ring) - hop - sent(&at_once)).abs() < 1.0);
        let again = job(ContextExchange::Ring, true);
        assert_eq!(context(&again)[0].3, layers * (3.0 * 15.0 + 16.0));
        assert_eq!(context(&job(ContextExchange::AllGather, true))[0].3, layers * 3.0);
    }

    /// Megatron-LM, §2.2.2: v times as much between stages.
    #[test]
    fn chunks_of_layers_are_sent_as_often_as_there_are() {
        let job = |interleave| Job { pipeline: 4, interleave, ..gpt() };
        let pipeline = |interleave| of(&job(interleave), 4, Purpose::Pipeline);
        // 64 micro-batches of 1,024 tokens with 1,024 elements of two bytes
        assert_eq!(pipeline(1), [(Kind::SendRecv, 2, 2 << 20, 2.0 * (64.0 + 3.0))]);
        assert_eq!(pipeline(3), [(Kind::SendRecv, 2, 2 << 20, 2.0 * (3.0 * 64.0 + 3.0))]);
    }

    /// Two AllReduces of 2 MiB in each layer and direction; 7/4 of that sent by each of eight.
    #[test]
    fn tensor_parallel_groups_reduce_what_experts_compute() {
        let job = gpt();
        // 16 micro-batches in 24 layers at 8,000 Mbit/s
        let by_hand = 4.0 * 24.0 * 16.0 * 1.75 * f64::from(2 << 20) / 1e9;
        assert!((job.tensor_s(4, 8_000) / by_hand - 1.0).abs() < 1e-12);
        let experts = Some(Experts { count: 8, top_k: 3, shared: 0, every: 2 });
        let moe = Job { model: Model { experts, ..job.model.clone() }, ..job };
        // a layer in two reduces 1 + 3 vectors, the other 1 + 1
        assert!((moe.tensor_s(4, 8_000) / (by_hand * 1.5) - 1.0).abs() < 1e-12);
    }
}
