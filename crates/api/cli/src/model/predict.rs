//! What to expect of one scheme: the distribution of the time, or of a ring all-reduce made of such
//! writes.

use clap::Args;
use serde::Serialize;
use unbroken_sdr_model::{Lots, Ring, Scheme};
use unbroken_units::show;

use super::recommend::Prediction;
use super::{picture, LinkArgs, MessageArgs, PictureArgs, Question};
use crate::output::{print, print_json, table, Result};

/// Folded, as clap does not.
pub(super) const USAGE: &str =
    "unbroken model predict [OPTIONS] --bandwidth <RATE> --loss <SHARE>\n           \
     --size <SIZE> <SCHEME>";
pub(super) const AFTER: &str = "Schemes:
  sr-rto      Selective Repeat; what is lost is sent again after three round trips
  sr-nack     the same, told by the receiver: after one round trip at best
  mds:32,8    8 parity chunks to 32 data chunks; any 8 may be lost
  xor:32,8    the same parity, one loss in each of 8 groups, less to compute";

/// Shares of all messages that are told.
const SHARES: [f64; 7] = [0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999];
/// Rings are drawn so often: the p99.9 is then one of a hundred samples beyond it.
const SAMPLES: usize = 100_000;
/// The most datacentres of a ring.
const MOST: u8 = 64;

#[derive(Args)]
pub(super) struct PredictArgs {
    /// The scheme: sr-rto, sr-nack, mds:32,8 or xor:32,8
    #[arg(value_parser = super::scheme)]
    scheme: Scheme,
    #[command(flatten)]
    link: LinkArgs,
    #[command(flatten)]
    message: MessageArgs,
    /// Of a ring all-reduce of the message over so many datacentres, drawn 100,000 times
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(2..=i64::from(MOST)))]
    ring: Option<u8>,
    /// Which samples of the ring
    #[arg(long, value_name = "NUMBER", default_value_t = 1, requires = "ring")]
    seed: u64,
    /// One JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    picture: PictureArgs,
}

/// A share of all messages and the time by which it is done.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Quantile {
    pub(super) share: f64,
    pub(super) time_s: f64,
}

#[derive(Serialize)]
struct RingAnswer {
    datacentres: u8,
    rounds: usize,
    samples: usize,
    mean_s: f64,
    /// `(2N − 2)` times the mean of one write.
    least_mean_s: f64,
    quantiles: Vec<Quantile>,
}

#[derive(Serialize)]
struct Answer {
    write: Prediction,
    quantiles: Vec<Quantile>,
    ring: Option<RingAnswer>,
    picture: Option<String>,
}

pub(super) fn predict(args: &PredictArgs) -> Result {
    let question = Question::new(&args.link, &args.message)?;
    let completion = args.scheme.message(&question.channel, question.chunks);
    let quantiles =
        SHARES.map(|share| Quantile { share, time_s: completion.quantile_s(share) }).to_vec();
    let ring = args.ring.map(|count| ring(&question, args.scheme, count, args.seed));
    let file = args.picture.write(|| picture::of_scheme(&question, args.scheme))?;
    let answer = Answer {
        write: Prediction::new(&question, args.scheme),
        quantiles,
        ring,
        picture: file.map(|file| file.display().to_string()),
    };
    if args.json {
        return print_json(&answer);
    }
    let mut text = question.shown();
    text += &question.caveat().unwrap_or_default();
    text += &format!(
        "scheme   {}: {} in the mean, {}\n\n{}",
        args.scheme,
        show::time_s(answer.write.mean_s),
        show::rate_bps(answer.write.goodput_bps),
        shown(&answer.quantiles)
    );
    if let Some(ring) = &answer.ring {
        text += &format!(
            "\nring     all-reduce of {} over {} datacentres, {} rounds: {} in the mean of {} \
             samples (at least {})\n\n{}",
            show::bytes(question.bytes as f64),
            ring.datacentres,
            ring.rounds,
            show::time_s(ring.mean_s),
            ring.samples,
            show::time_s(ring.least_mean_s),
            shown(&ring.quantiles)
        );
    }
    if let Some(file) = &answer.picture {
        text += &format!("\npicture  {file}\n");
    }
    print(&text)
}

fn ring(question: &Question, scheme: Scheme, datacentres: u8, seed: u64) -> RingAnswer {
    let ring = Ring::new(&question.channel, scheme, question.chunks, datacentres.into());
    let all = ring.draw_many_s(SAMPLES, &mut Lots::new(seed));
    // The last two shares would be of one sample, and of none.
    let quantile = |share: &f64| Quantile {
        share: *share,
        time_s: all[(share * SAMPLES as f64).ceil() as usize - 1],
    };
    RingAnswer {
        datacentres,
        rounds: ring.rounds(),
        samples: SAMPLES,
        mean_s: all.iter().sum::<f64>() / SAMPLES as f64,
        least_mean_s: ring.least_mean_s(),
        quantiles: SHARES[..5].iter().map(quantile).collect(),
    }
}

fn shown(quantiles: &[Quantile]) -> String {
    let percent = |share: f64| format!("{}%", show::plain((share * 1e6).round() / 1e4));
    let rows = quantiles.iter().map(|q| vec![percent(q.share), show::time_s(q.time_s)]);
    table(&std::iter::once(vec!["of all".into(), "done by".into()]).chain(rows).collect::<Vec<_>>())
}
