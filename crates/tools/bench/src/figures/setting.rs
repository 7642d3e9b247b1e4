//! What the figures share: the paper's link, its two readings, its schemes, sweeps.

use unbroken_chart::Line;
use unbroken_erasure::Code;
use unbroken_sdr_model::{Completion, Link, Loss, Scheme};

/// What the paper's loss is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    Packet,
    Chunk,
}

pub(super) const READINGS: [Reading; 2] = [Reading::Packet, Reading::Chunk];

impl Reading {
    pub(super) fn loss(self, p: f64) -> Loss {
        match self {
            Reading::Packet => Loss::Packet(p),
            Reading::Chunk => Loss::Chunk(p),
        }
    }

    /// For titles.
    pub(super) fn name(self) -> &'static str {
        match self {
            Reading::Packet => "loss of packets",
            Reading::Chunk => "loss of chunks",
        }
    }

    /// The paper's link with a loss.
    pub(super) fn link(self, p: f64) -> Link {
        Link { loss: self.loss(p), ..Link::default() }
    }
}

pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;

/// The code that the paper settles on.
pub(super) fn mds() -> Scheme {
    coded(Code::mds(32, 8))
}

pub(super) fn xor() -> Scheme {
    coded(Code::xor(32, 8))
}

/// A scheme with a code whose sizes are constants here.
pub(super) fn coded<E>(code: Result<Code, E>) -> Scheme {
    code.map_or(Scheme::SrRto, Scheme::Ec)
}

pub(super) fn mean(completion: &Completion) -> f64 {
    completion.mean_s()
}

pub(super) fn tail(completion: &Completion) -> f64 {
    completion.quantile_s(0.999)
}

/// What is looked at of a distribution.
pub(super) type Of = fn(&Completion) -> f64;

/// Of a message with a scheme; NaN where too much is lost for the model.
pub(super) fn time_s(scheme: Scheme, link: &Link, bytes: u64, of: Of) -> f64 {
    link.channel().map_or(f64::NAN, |channel| of(&scheme.message(&channel, link.chunks(bytes))))
}

/// The same over the time without losses.
pub(super) fn slowdown(scheme: Scheme, link: &Link, bytes: u64, of: Of) -> f64 {
    let ideal_s =
        link.chunks(bytes) as f64 * 8.0 * link.chunk_bytes as f64 / link.bandwidth_bps + link.rtt_s;
    time_s(scheme, link, bytes, of) / ideal_s
}

/// From `low` to `high`, evenly on a logarithmic axis.
pub(super) fn spread(low: f64, high: f64, points: u32) -> Vec<f64> {
    (0..=points).map(|n| low * (high / low).powf(f64::from(n) / f64::from(points))).collect()
}

/// A line of a scheme's name over some places.
pub(super) fn line(name: &str, colour: usize, places: &[f64], at: impl Fn(f64) -> f64) -> Line {
    Line::new(name, colour, places.iter().map(|x| (*x, at(*x))).collect())
}
