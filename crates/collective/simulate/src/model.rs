//! Transformers that are trained: their parameters, and what they compute.
//!
//! Those of a GPT are D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU
//! Clusters Using Megatron-LM*, SC '21, for *l* layers, hidden size *h*, sequence length *s*,
//! vocabulary *V* and global batch *B*:
//!
//! - parameters (equation 2): 12 l h² (1 + 13 / 12h + (V + s) / 12lh);
//! - floating-point operations of a step (equation 3): 72 B s l h² (1 + s / 6h + V / 12lh), and
//!   96 with V / 16lh where activations are computed again in the backward pass.
//!
//! Of the 12 h² the attention has 4 and the feed-forward part 8. The same sums with other parts:
//!
//! - keys and values of *g* elements a token for *h* (grouped queries: J. Ainslie et al., *GQA*,
//!   EMNLP '23): 2 h² + 2 h g for the attention's 4 h²;
//! - a feed-forward part of size *f* for 4h: 2 h f for 8 h², 3 h f where it is gated (N. Shazeer,
//!   *GLU Variants Improve Transformer*, 2020);
//! - *E* experts, of which a token goes to *k* (D. Lepikhin et al., *GShard*, ICLR '21, §2.2; W.
//!   Fedus et al., *Switch Transformers*, JMLR '22, §2): E feed-forward parts and a router of h E.
//!   Of those a token is multiplied with k parts and the router.

use serde::de::{value::MapAccessDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::Error;

/// A transformer. In a TOML file its name alone may stand for one that is known.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// What it is called.
    pub name: String,
    /// Layers.
    pub layers: usize,
    /// The hidden size.
    pub hidden: usize,
    /// Tokens that there are.
    pub vocabulary: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Elements of the keys of a token, and of its values; 0: as many as the hidden size.
    pub kv_hidden: usize,
    /// The size between the two halves of the feed-forward part; 0: four times the hidden size.
    pub feed_forward: usize,
    /// Whether that part is gated, and so has three matrices for two.
    pub gated: bool,
    /// The experts that stand for the feed-forward part; none: the model is dense.
    pub experts: Option<Experts>,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Experts {
    /// Experts of a layer.
    pub count: usize,
    /// To how many of them a token goes.
    pub top_k: usize,
    /// Further ones, to which each token goes; they are not divided among GPUs.
    pub shared: usize,
    /// Each so manieth layer has experts, the others are dense.
    pub every: usize,
}

impl Default for Experts {
    /// Eight in each layer, of which a token goes to two.
    fn default() -> Experts {
        Experts { count: 8, top_k: 2, shared: 0, every: 1 }
    }
}

/// Models by their names: GPT-3 (Brown et al., 2020, table 2.1, 13B with 40 heads of 128; 51,200
/// tokens as Megatron-LM pads them), OPT's 66B (S. Zhang et al., 2022), LLaMA's 7B (Touvron et al.,
/// 2023), Llama 3.1 (A. Grattafiori et al., *The Llama 3 Herd of Models*, 2024, table 3), Mixtral
/// 8x7B (A. Q. Jiang et al., *Mixtral of Experts*, 2024, table 1) and 8x22B (its published
/// configuration). Sequences of Mixtral are 4,096 here: those of its training are not published.
fn all() -> Vec<Model> {
    let mut all: Vec<Model> = [
        ("1.3b", 24, 2048, 51_200),
        ("2.7b", 32, 2560, 51_200),
        ("6.7b", 32, 4096, 51_200),
        ("7b", 32, 4096, 32_000),
        ("13b", 40, 5120, 51_200),
        ("66b", 64, 9216, 51_200),
        ("175b", 96, 12_288, 51_200),
    ]
    .into_iter()
    .map(|(name, layers, hidden, vocabulary)| Model::gpt(name, layers, hidden, vocabulary, 2048))
    .collect();
    let grouped = |name, (layers, hidden), feed_forward, vocabulary, sequence| Model {
        // eight heads of 128
        kv_hidden: 1024,
        feed_forward,
        gated: true,
        ..Model::gpt(name, layers, hidden, vocabulary, sequence)
    };
    let mixtral = |name, shape, feed_forward, vocabulary| Model {
        experts: Some(Experts::default()),
        ..grouped(name, shape, feed_forward, vocabulary, 4096)
    };
    all.extend([
        grouped("llama-3.1-8b", (32, 4096), 14_336, 128_256, 8192),
        grouped("llama-3.1-70b", (80, 8192), 28_672, 128_256, 8192),
        grouped("llama-3.1-405b", (126, 16_384), 53_248, 128_256, 8192),
        mixtral("mixtral-8x7b", (32, 4096), 14_336, 32_000),
        mixtral("mixtral-8x22b", (56, 6144), 16_384, 32_768),
    ]);
    all
}

impl Model {
    /// A dense one, as GPTs are.
    pub fn gpt(
        name: &str,
        layers: usize,
        hidden: usize,
        vocabulary: usize,
        sequence: usize,
    ) -> Model {
        Model {
            name: name.into(),
            layers,
            hidden,
            vocabulary,
            sequence,
            kv_hidden: 0,
            feed_forward: 0,
            gated: false,
            experts: None,
        }
    }

    /// A model by its name.
    pub fn named(name: &str) -> Result<Model, Error> {
        let found = all().into_iter().find(|m| m.name == name.to_lowercase());
        found.ok_or_else(|| {
            let names: Vec<String> = all().into_iter().map(|m| m.name).collect();
            let right = format!("there are {}", names.join(", "));
            Error::Unknown { argument: "model", name: name.into(), right }
        })
    }

    /// Whether its numbers make sense.
    pub fn check(&self) -> Result<(), Error> {
        let named = [
            ("layers of the model", self.layers),
            ("the hidden size", self.hidden),
            ("the vocabulary", self.vocabulary),
            ("tokens of a sequence", self.sequence),
        ];
        if let Some((what, _)) = named.into_iter().find(|(_, given)| *given == 0) {
            let argument = if self.sequence == 0 { "sequence" } else { "model" };
            return Err(Error::value(argument, what, 0, "1 and more are right"));
        }
        let Some(Experts { count, top_k, every, .. }) = self.experts else { return Ok(()) };
        if count < 2 {
            return Err(Error::value("experts", "experts", count, "2 and more are right"));
        }
        if !(1..=count).contains(&top_k) {
            let right = format!("1 to {count} (experts) are right");
            return Err(Error::value("top-k", "experts of a token (top-k)", top_k, right));
        }
        match every > 0 && self.layers.is_multiple_of(every) {
            true => Ok(()),
            false => {
                let right = format!("a divisor of {} (layers of the model) is right", self.layers);
                Err(Error::value("experts", "the distance of layers with experts", every, right))
            }
        }
    }

    /// Elements of the keys of a token, and of its values.
    pub fn kv(&self) -> usize {
        if self.kv_hidden == 0 {
            self.hidden
        } else {
            self.kv_hidden
        }
    }

    /// Layers that have experts.
    pub fn expert_layers(&self) -> usize {
        self.experts.map_or(0, |experts| self.layers / experts.every)
    }

    /// Its parameters.
    pub fn parameters(&self) -> f64 {
        let h = self.hidden as f64;
        let of_layers = self.layers as f64 * (self.attention() + 13.0 * h);
        let with_experts = self.expert_layers() as f64;
        let dense = (self.layers as f64 - with_experts) * self.feed_forward();
        let beside = self
            .experts
            .map_or(0.0, |e| e.shared as f64 * self.feed_forward() + h * e.count as f64);
        of_layers
            + dense
            + with_experts * beside
            + self.expert_parameters()
            + (self.vocabulary + self.sequence) as f64 * h
    }

    /// Those of its experts, without the shared ones.
    pub fn expert_parameters(&self) -> f64 {
        let count = self.experts.map_or(0, |e| e.count) as f64;
        self.expert_layers() as f64 * count * self.feed_forward()
    }

    /// Floating-point operations of a step.
    pub fn operations(&self, batch: usize, recompute: bool) -> f64 {
        let (l, h) = (self.layers as f64, self.hidden as f64);
        let (v, s) = (self.vocabulary as f64, self.sequence as f64);
        // forwards, twice as much backwards
        let passes = if recompute { 4.0 } else { 3.0 };
        let with_experts = self.expert_layers() as f64;
        let chosen = self.experts.map_or(0.0, |e| {
            (e.top_k + e.shared) as f64 * self.feed_forward() + h * e.count as f64
        });
        let multiplied =
            l * self.attention() + (l - with_experts) * self.feed_forward() + with_experts * chosen;
        let scores = 4.0 * l * s * h;
        batch as f64 * s * (passes * (2.0 * multiplied + scores) + 6.0 * h * v)
    }

    /// Parameters of a layer's attention.
    fn attention(&self) -> f64 {
        2.0 * self.hidden as f64 * (self.hidden + self.kv()) as f64
    }

    /// Parameters of a feed-forward part, or of an expert.
    fn feed_forward(&self) -> f64 {
        let size = if self.feed_forward == 0 { 4 * self.hidden } else { self.feed_forward };
        let matrices = if self.gated { 3.0 } else { 2.0 };
        matrices * (self.hidden * size) as f64
    }
}

/// As it stands in a file, if not by its name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    name: String,
    layers: usize,
    hidden: usize,
    vocabulary: usize,
    sequence: usize,
    #[serde(default)]
    kv_hidden: usize,
    #[serde(default)]
    feed_forward: usize,
    #[serde(default)]
    gated: bool,
    #[serde(default)]
    experts: Option<Experts>,
}

impl From<Written> for Model {
    fn from(w: Written) -> Model {
        let Written { name, layers, hidden, vocabulary, sequence, .. } = w;
        let Written { kv_hidden, feed_forward, gated, experts, .. } = w;
        Model {
            name,
            layers,
            hidden,
            vocabulary,
            sequence,
            kv_hidden,
            feed_forward,
            gated,
            experts,
        }
    }
}

impl<'de> Deserialize<'de> for Model {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Model, D::Error> {
        struct NameOrNumbers;
        impl<'de> Visitor<'de> for NameOrNumbers {
            type Value = Model;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("the name of a model, or a table with its numbers")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Model, E> {
                Model::named(name).map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Model, A::Error> {
                Written::deserialize(MapAccessDeserializer::new(map)).map(Model::from)
            }
        }
        from.deserialize_any(NameOrNumbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Table 1 of the Megatron-LM paper: 1.7, 18.4 and 145.6 thousand million parameters; and the
    /// operations that its throughput follows from (135, 135 and 148 TFLOP/s for each GPU).
    #[test]
    fn formulas_have_the_published_values() {
        for (layers, hidden, billions) in [(24, 2304, 1.7), (40, 6144, 18.4), (80, 12_288, 145.6)] {
            let model = Model::gpt("", layers, hidden, 51_200, 2048);
            let found = model.parameters() / 1e9;
            assert!((found - billions).abs() < 0.06, "{found} for {billions}");
            // the equations as they stand
            let (l, h) = (layers as f64, hidden as f64);
            let of = 12.0 * l * h * h * (1.0 + 13.0 / (12.0 * h) + 53_248.0 / (12.0 * l * h));
            assert!((model.parameters() / of - 1.0).abs() < 1e-12);
            for (passes, of_vocabulary, recompute) in [(72.0, 12.0, false), (96.0, 16.0, true)] {
                let parts = 1.0 + 2048.0 / (6.0 * h) + 51_200.0 / (of_vocabulary * l * h);
                let of = passes * 64.0 * 2048.0 * l * h * h * parts;
                assert!((model.operations(64, recompute) / of - 1.0).abs() < 1e-12);
            }
        }
        // §5.1 on 175B: 300 thousand million tokens on 1,024 GPUs at 140 TFLOP/s take 34 days
        let model = Model::named("175b").unwrap();
        let tokens = 1536.0 * 2048.0;
        let days = model.operations(1536, true) * 300e9 / tokens / (1024.0 * 140e12) / 86_400.0;
        assert!((days / 34.0 - 1.0).abs() < 0.03, "{days}");
    }

    /// What is published in all, and of Mixtral what a token meets. Here input and output share
    /// their vectors, which those models' do not: V h are less.
    #[test]
    fn grouped_queries_and_experts_have_the_published_sizes() {
        for (name, billions) in [
            ("llama-3.1-8b", 8.03),
            ("llama-3.1-70b", 70.6),
            ("llama-3.1-405b", 405.9),
            ("mixtral-8x7b", 46.7),
            ("mixtral-8x22b", 140.6),
        ] {
            let model = Model::named(name).unwrap();
            let inputs = (model.vocabulary - model.sequence) as f64 * model.hidden as f64;
            let found = (model.parameters() + inputs) / 1e9;
            assert!((found / billions - 1.0).abs() < 0.003, "{name}: {found} for {billions}");
        }
        let mixtral = Model::named("mixtral-8x7b").unwrap();
        // 32 layers of eight experts of three matrices of 4096 by 14336
        assert_eq!(mixtral.expert_parameters(), 32.0 * 8.0 * 3.0 * 4096.0 * 14_336.0);
        // 12.9 thousand million of 46.7 are active: forwards two operations each, but those of the
        // input, and the scores of attention
        let scores = 4.0 * 32.0 * 4096.0 * 4096.0;
        let active = (mixtral.operations(1, false) / 3.0 / 4096.0 - scores) / 2.0 / 1e9;
        assert!((active / 12.75 - 1.0).abs() < 0.003, "{active}");
    }

    #[test]
    fn experts_may_be_in_every_other_layer() {
        let every = |every| Model {
            experts: Some(Experts { count: 64, top_k: 2, shared: 1, every }),
            ..Model::gpt("", 24, 1024, 32_000, 1024)
        };
        // a layer with experts has 64 of them, a shared one, and a router; a dense one has one
        let one = 8.0 * 1024.0 * 1024.0;
        let less = every(1).parameters() - every(2).parameters();
        assert_eq!(less, 12.0 * (64.0 * one + 1024.0 * 64.0));
        assert_eq!((every(2).expert_layers(), every(1).expert_layers()), (12, 24));
        let less = every(1).operations(1, false) - every(2).operations(1, false);
        assert_eq!(less, 6.0 * 1024.0 * 12.0 * (2.0 * one + 1024.0 * 64.0));
    }

    #[test]
    fn models_without_sense_are_named() {
        assert!(Model::named("8b").unwrap_err().to_string().contains("2.7b, 6.7b"));
        let with = |count, top_k, every| {
            let experts = Some(Experts { count, top_k, shared: 0, every });
            let model = Model { experts, ..Model::gpt("", 24, 1024, 32_000, 1024) };
            model.check().unwrap_err().to_string()
        };
        assert_eq!(with(1, 1, 1), "experts is 1; 2 and more are right");
        assert_eq!(with(8, 9, 1), "experts of a token (top-k) is 9; 1 to 8 (experts) are right");
        assert!(with(8, 0, 1).contains("top-k) is 0"));
        assert!(with(8, 2, 5).contains("a divisor of 24 (layers of the model) is right"));
        assert!(with(8, 2, 0).contains("experts is 0"));
        let none = Model::gpt("", 0, 1, 1, 1).check().unwrap_err().to_string();
        assert_eq!(none, "layers of the model is 0; 1 and more are right");
    }
}
