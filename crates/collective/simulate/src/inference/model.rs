//! Language models by their published sizes, and what they compute and read.
//!
//! With *l* layers, hidden size *h*, *a* query heads and *k* heads of keys and values of *d* each,
//! a feed-forward size *f* and a vocabulary *V*:
//!
//! - parameters of a layer: 2 h a d (queries, output) + 2 h k d (keys, values) + 2 h f, or 3 h f
//!   where the feed-forward part is gated; then V h for the output, V h again for the input where
//!   the two are apart, and h for each learned position. Biases and norms, less than a thousandth,
//!   are left out;
//! - floating-point operations of a token: 2 for each parameter that is multiplied, and 4 l a d for
//!   each token before it that it looks at (J. Kaplan et al., *Scaling Laws for Neural Language
//!   Models*, 2020, table 1);
//! - the KV cache: 2 l k d values for each token (R. Pope et al., *Efficiently Scaling Transformer
//!   Inference*, MLSys '23, §3.3; J. Ainslie et al., *GQA*, EMNLP '23).

use serde::Serialize;

use crate::Error;

/// A transformer that generates text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Llm {
    /// What it is called.
    pub name: String,
    /// Layers.
    pub layers: usize,
    /// The hidden size.
    pub hidden: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// The size of a head.
    pub head: usize,
    /// The size between the two halves of the feed-forward part.
    pub feed_forward: usize,
    /// Whether that part is gated, and so has three matrices for two.
    pub gated: bool,
    /// Tokens that there are.
    pub vocabulary: usize,
    /// Whether input and output have matrices of their own.
    pub untied: bool,
    /// Positions that have learned vectors; 0: positions are computed.
    pub positions: usize,
    /// The most tokens of a prompt with its answer.
    pub context: usize,
}

/// Llama 3.1 (A. Grattafiori et al., *The Llama 3 Herd of Models*, 2024, table 3), OPT (S. Zhang et
/// al., 2022, table 1) and BLOOM (BigScience, 2022, table 3).
fn all() -> [Llm; 4] {
    let llama = |name: &str, layers, hidden, heads, feed_forward| Llm {
        name: name.into(),
        layers,
        hidden,
        heads,
        kv_heads: 8,
        head: 128,
        feed_forward,
        gated: true,
        vocabulary: 128_256,
        untied: true,
        positions: 0,
        context: 131_072,
    };
    let plain = |name: &str, layers, hidden, heads, vocabulary, positions| Llm {
        name: name.into(),
        layers,
        hidden,
        heads,
        kv_heads: heads,
        head: 128,
        feed_forward: 4 * hidden,
        gated: false,
        vocabulary,
        untied: false,
        positions,
        context: 2048,
    };
    [
        llama("llama-3.1-70b", 80, 8192, 64, 28_672),
        llama("llama-3.1-405b", 126, 16_384, 128, 53_248),
        plain("opt-66b", 64, 9216, 72, 50_272, 2048),
        plain("bloom-176b", 70, 14_336, 112, 250_880, 0),
    ]
}

impl Llm {
    /// A model by its name.
    pub fn named(name: &str) -> Result<Llm, Error> {
        let found = all().into_iter().find(|m| m.name == name.to_lowercase());
        found.ok_or_else(|| {
            let names: Vec<String> = all().into_iter().map(|m| m.name).collect();
            let right = format!("there are {}", names.join(", "));
            Error::Unknown { argument: "model", name: name.into(), right }
        })
    }

    /// Its parameters.
    pub fn parameters(&self) -> f64 {
        let inputs = if self.untied { self.vocabulary } else { 0 } + self.positions;
        self.multiplied() + (inputs * self.hidden) as f64
    }

    /// Those that every token is multiplied with, and every pass reads.
    pub fn multiplied(&self) -> f64 {
        let matrices = if self.gated { 3 } else { 2 };
        let attention = 2 * (self.heads + self.kv_heads) * self.head;
        let of_layer = self.hidden * (attention + matrices * self.feed_forward);
        (self.layers * of_layer + self.vocabulary * self.hidden) as f64
    }

    /// Operations of a token for each that it looks at.
    pub fn attention_operations(&self) -> f64 {
        4.0 * (self.layers * self.heads * self.head) as f64
    }

    /// Values of the KV cache for each token.
    pub fn kv_values(&self) -> f64 {
        2.0 * (self.layers * self.kv_heads * self.head) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_that_are_published() {
        for (name, billions) in [
            ("llama-3.1-70b", 70.6),
            ("Llama-3.1-405B", 405.9),
            ("opt-66b", 65.7),
            ("bloom-176b", 176.2),
        ] {
            let found = Llm::named(name).unwrap().parameters() / 1e9;
            assert!((found / billions - 1.0).abs() < 0.002, "{name}: {found} for {billions}");
        }
        // two bytes a value: 320 KiB and 504 KiB a token, as grouped queries leave it
        let kv_kib = |name| Llm::named(name).unwrap().kv_values() * 2.0 / 1024.0;
        assert_eq!((kv_kib("llama-3.1-70b"), kv_kib("llama-3.1-405b")), (320.0, 504.0));
        assert_eq!(kv_kib("opt-66b"), 2304.0);
        let unknown = Llm::named("gpt-5").unwrap_err().to_string();
        assert!(unknown.contains("llama-3.1-70b, llama-3.1-405b, opt-66b"), "{unknown}");
    }
}
