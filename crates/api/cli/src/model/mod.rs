//! `unbroken model`: which reliability scheme for this link and this message, what to expect of it,
//! and pictures.
//!
//! Everything is computed here, by `unbroken-sdr-model`; no network is touched, and no runtime
//! folder. A link comes as quantities with units ([`unbroken_units`]); what makes no sense gets a
//! sentence that says what would be right. Pictures are SVG files.

mod heatmap;
mod picture;
mod predict;
mod recommend;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use unbroken_chart::DrawError;
use unbroken_erasure::{Code, Kind};
use unbroken_sdr_model::choose::Objective;
use unbroken_sdr_model::{Channel, Link, Loss, Scheme};
use unbroken_units::{read, show};

use crate::output::{Failure, Result};

/// The most chunks of a message; models of codes take time by them.
const MOST_CHUNKS: u64 = 1 << 26;

/// The command line of `unbroken model`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, after_help = AFTER)]
pub(crate) struct ModelArgs {
    #[command(subcommand)]
    command: Option<ModelCommand>,
    // (Not one struct: where it is optional, clap does not look into the structs inside of it.)
    #[command(flatten)]
    link: Option<LinkArgs>,
    #[command(flatten)]
    message: Option<MessageArgs>,
    #[command(flatten)]
    answer: recommend::AnswerArgs,
}

const AFTER: &str = "Examples:
  unbroken model --bandwidth 400G --distance 3750km --loss 1e-5 --size 128M
  unbroken model --bandwidth 100G --rtt 12ms --loss 0.1% --size 1G --objective p99.9 --json
  unbroken model predict mds:32,8 --bandwidth 400G --distance 3750km --loss 1e-5 --size 128M \
--ring 4
  unbroken model heatmap --bandwidth 400G --distance 3750km

Sizes: K, M, G, T are powers of 1024 (KB, MB … powers of 1000). Bandwidths are in bits a second. \
The model: docs/guide/sdr.md.";

#[derive(Subcommand)]
enum ModelCommand {
    /// What to expect of one scheme: the whole distribution, or a ring all-reduce
    #[command(after_help = predict::AFTER, override_usage = predict::USAGE)]
    Predict(predict::PredictArgs),
    /// How much faster one scheme is than another, over message sizes and losses
    Heatmap(heatmap::HeatmapArgs),
}

/// A link.
#[derive(Args)]
struct LinkArgs {
    /// Bandwidth in bits a second, like 400G
    #[arg(long, value_name = "RATE", value_parser = read::bandwidth)]
    bandwidth: f64,
    /// Length of the link, like 3750km, instead of --rtt; the round trip is then at the speed of
    /// light in vacuum, 300,000 km/s
    #[arg(long, value_name = "LENGTH", value_parser = read::distance, required_unless_present = "rtt", conflicts_with = "rtt")]
    distance: Option<f64>,
    /// Round trip, like 25ms, where it has been measured: instead of --distance
    #[arg(long, value_name = "TIME", value_parser = read::time)]
    rtt: Option<f64>,
    /// Bytes of a packet's payload
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = read::size)]
    mtu: u64,
    /// Bytes of a chunk, which is lost when one of its packets is
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = read::size)]
    chunk: u64,
    /// What the loss is a probability of
    #[arg(long, value_enum, default_value = "packet")]
    loss_of: LossOf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LossOf {
    /// A packet
    Packet,
    /// A chunk
    Chunk,
}

impl LinkArgs {
    fn link(&self, loss: f64) -> Link {
        Link {
            bandwidth_bps: self.bandwidth,
            rtt_s: self
                .rtt
                .unwrap_or_else(|| Link::rtt_of_distance_s(self.distance.unwrap_or_default())),
            loss: match self.loss_of {
                LossOf::Packet => Loss::Packet(loss),
                LossOf::Chunk => Loss::Chunk(loss),
            },
            mtu_bytes: self.mtu,
            chunk_bytes: self.chunk,
        }
    }
}

/// A message, and how lossy its link is.
#[derive(Args)]
struct MessageArgs {
    /// Probability that a packet is lost, like 1e-5 or 0.1%
    #[arg(long, value_name = "SHARE", value_parser = read::loss)]
    loss: f64,
    /// Bytes of the message, like 128M
    #[arg(long, value_name = "SIZE", value_parser = read::size)]
    size: u64,
}

/// What the model is asked about.
struct Question {
    link: Link,
    channel: Channel,
    bytes: u64,
    chunks: u64,
}

impl Question {
    fn new(link: &LinkArgs, message: &MessageArgs) -> Result<Question> {
        let link = link.link(message.loss);
        let channel = link.channel().map_err(|e| e.to_string())?;
        let chunks = link.chunks(message.size);
        if chunks > MOST_CHUNKS {
            let most = show::with_prefix((MOST_CHUNKS * link.chunk_bytes) as f64, 1024.0);
            return Err(Failure::Text(format!(
                "a message of {chunks} chunks is longer than the model takes; up to {most} with \
                 these chunks, or larger chunks (--chunk), are right"
            )));
        }
        Ok(Question { link, channel, bytes: message.size, chunks })
    }

    /// The time of a lossless write.
    fn ideal_s(&self) -> f64 {
        self.chunks as f64 * self.channel.injection_s + self.channel.rtt_s
    }

    /// The link and the message in two lines.
    fn shown(&self) -> String {
        let Link { bandwidth_bps, loss, mtu_bytes, chunk_bytes, .. } = self.link;
        let (channel, chunks) = (&self.channel, self.chunks);
        let chunk_loss = show::probability(channel.loss);
        let size = |bytes: u64| show::bytes(bytes as f64);
        let losses = match loss {
            Loss::Packet(p) => format!(
                "loss {} of packets of {}, {chunk_loss} of chunks of {}",
                show::probability(p),
                size(mtu_bytes),
                size(chunk_bytes)
            ),
            Loss::Chunk(_) => format!("loss {chunk_loss} of chunks of {}", size(chunk_bytes)),
        };
        format!(
            "link     {}, round trip {}, {losses}\nmessage  {}, {chunks} {}: {} without losses ({} \
             of it injection); {} lost in the mean\n",
            show::rate_bps(bandwidth_bps),
            show::time_s(channel.rtt_s),
            size(self.bytes),
            if chunks == 1 { "chunk" } else { "chunks" },
            show::time_s(self.ideal_s()),
            show::time_s(chunks as f64 * channel.injection_s),
            show::count(chunks as f64 * channel.loss),
        )
    }
}

/// From this share of the whole on, what is left out of a model is told.
const TELLING: f64 = 0.02;

impl Question {
    /// Where the model is a lower bound, and by how much it matters: retransmissions take no
    /// bandwidth in it.
    fn caveat(&self) -> Option<String> {
        let Channel { injection_s, loss, .. } = self.channel;
        let again_s = self.chunks as f64 * injection_s * loss / (1.0 - loss);
        let telling = again_s > TELLING * self.ideal_s();
        telling.then(|| {
            let again_s = show::time_s(again_s);
            format!(
                "note     times with retransmissions are lower bounds: sending all again that \
                 Selective Repeat loses takes {again_s} of the link\n"
            )
        })
    }
}

/// A scheme as it is given: `sr-rto`, `sr-nack`, `mds:32,8`, `xor:32,8`.
pub(crate) fn scheme(text: &str) -> std::result::Result<Scheme, String> {
    const RIGHT: &str = "sr-rto, sr-nack, mds:32,8 and xor:32,8 (data and parity chunks) are right";
    let code = |kind, sizes: &str| {
        let (data, parity) =
            sizes.split_once(',').ok_or_else(|| format!("'{text}' has no two sizes; {RIGHT}"))?;
        let size = |n: &str| {
            n.trim()
                .parse::<usize>()
                .map_err(|_| format!("'{n}' in '{text}' is no number; {RIGHT}"))
        };
        Code::new(kind, size(data)?, size(parity)?).map(Scheme::Ec).map_err(|e| e.to_string())
    };
    match text.to_ascii_lowercase().split_once(':') {
        None if text.eq_ignore_ascii_case("sr-rto") => Ok(Scheme::SrRto),
        None if text.eq_ignore_ascii_case("sr-nack") => Ok(Scheme::SrNack),
        Some(("mds", sizes)) => code(Kind::Mds, sizes),
        Some(("xor", sizes)) => code(Kind::Xor, sizes),
        _ => Err(format!("'{text}' is no scheme; {RIGHT}")),
    }
}

/// What is to be short: `mean`, or a percentile such as `p99.9`.
fn objective(text: &str) -> std::result::Result<Objective, String> {
    let wrong = || {
        format!("'{text}' is no objective; mean, or a percentile such as p50 or p99.9, is right")
    };
    if text == "mean" {
        return Ok(Objective::Mean);
    }
    let percent: f64 = text.strip_prefix('p').and_then(|p| p.parse().ok()).ok_or_else(wrong)?;
    if (0.0..100.0).contains(&percent) && percent > 0.0 {
        Ok(Objective::Quantile(percent / 100.0))
    } else {
        Err(wrong())
    }
}

/// An objective as it is given.
fn shown_objective(objective: Objective) -> String {
    match objective {
        Objective::Mean => "mean".into(),
        Objective::Quantile(share) => {
            format!("p{}", show::plain((share * 1e8).round() / 1e6))
        }
    }
}

/// A picture as a document.
type DrawResult = std::result::Result<String, DrawError>;

/// Where a picture goes.
#[derive(Args)]
struct PictureArgs {
    /// Where the picture goes (SVG)
    #[arg(long, value_name = "FILE", default_value = "model.svg")]
    picture: PathBuf,
    /// Without a picture
    #[arg(long, conflicts_with = "picture")]
    no_picture: bool,
}

impl PictureArgs {
    /// Writes the picture; says where it is.
    fn write(&self, draw: impl FnOnce() -> DrawResult) -> Result<Option<&Path>> {
        if self.no_picture {
            return Ok(None);
        }
        let file = &self.picture;
        if file.extension().is_none_or(|extension| extension != "svg") {
            return Err(Failure::Text(format!(
                "pictures are SVG; '{}' is right, not '{}'",
                file.with_extension("svg").display(),
                file.display()
            )));
        }
        std::fs::write(file, draw()?)
            .map_err(|e| Failure::io(format!("cannot write {}", file.display()), e))?;
        Ok(Some(file))
    }
}

/// Runs the command.
pub(crate) fn model(args: &ModelArgs) -> Result {
    match (&args.command, &args.link, &args.message) {
        (Some(ModelCommand::Predict(args)), ..) => predict::predict(args),
        (Some(ModelCommand::Heatmap(args)), ..) => heatmap::heatmap(args),
        (None, Some(link), Some(message)) => {
            recommend::recommend(&Question::new(link, message)?, &args.answer)
        }
        _ => Err(Failure::Text(
            "a link and a message are needed, such as: unbroken model --bandwidth 400G --distance \
             3750km --loss 1e-5 --size 128M"
                .into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemes_are_read() {
        assert_eq!((scheme("sr-rto"), scheme("SR-NACK")), (Ok(Scheme::SrRto), Ok(Scheme::SrNack)));
        assert_eq!(scheme("mds:32,8"), Ok(Scheme::Ec(Code::mds(32, 8).unwrap())));
        assert_eq!(scheme("xor:16, 4"), Ok(Scheme::Ec(Code::xor(16, 4).unwrap())));
        for (wrong, part) in [
            ("tcp", "is no scheme; sr-rto"),
            ("mds", "is no scheme"),
            ("mds:32", "no two sizes"),
            ("mds:32,x", "is no number"),
            ("mds:32,99", "1 to 32 are right"),
            ("xor:2,4", "groups"),
        ] {
            assert!(scheme(wrong).unwrap_err().contains(part), "{wrong}: {:?}", scheme(wrong));
        }
    }

    #[test]
    fn objectives_are_read_and_shown() {
        for text in ["mean", "p50", "p99.9", "p99.99"] {
            assert_eq!(shown_objective(objective(text).unwrap()), text);
        }
        for wrong in ["p0", "p100", "p", "median", "99", "p-1", "pnan"] {
            assert!(objective(wrong).unwrap_err().contains("p99.9, is right"), "{wrong}");
        }
    }
}
