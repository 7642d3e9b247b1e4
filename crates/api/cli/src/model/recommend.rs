//! The answer to "this link, this message: what now?", in one screen and one picture.

use clap::Args;
use serde::Serialize;
use unbroken_sdr_model::choose::{candidates, choose, Objective, WORTH};
use unbroken_sdr_model::Scheme;
use unbroken_units::show;

use super::{picture, PictureArgs, Question};
use crate::output::{print, print_json, table, Failure, Result};

/// How to answer.
#[derive(Args)]
pub(super) struct AnswerArgs {
    /// What is to be short: mean, or a percentile such as p99.9
    #[arg(long, default_value = "mean", value_parser = super::objective)]
    objective: Objective,
    /// One JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    picture: PictureArgs,
}

/// What to expect of a scheme.
#[derive(Serialize)]
pub(super) struct Prediction {
    /// Its name.
    pub(super) scheme: String,
    /// The code's id on the wire.
    code_id: Option<u32>,
    pub(super) mean_s: f64,
    pub(super) p50_s: f64,
    pub(super) p99_s: f64,
    pub(super) p999_s: f64,
    /// The message over the mean time, in bits a second.
    pub(super) goodput_bps: f64,
    /// Parity chunks over data chunks.
    parity: f64,
    /// The probability that the code does not recover everything.
    fallback: Option<f64>,
}

impl Prediction {
    pub(super) fn new(question: &Question, scheme: Scheme) -> Prediction {
        let completion = scheme.message(&question.channel, question.chunks);
        let mean_s = completion.mean_s();
        let code = match scheme {
            Scheme::Ec(code) => Some(code),
            _ => None,
        };
        Prediction {
            scheme: scheme.to_string(),
            code_id: code.map(|code| code.id()),
            mean_s,
            p50_s: completion.quantile_s(0.5),
            p99_s: completion.quantile_s(0.99),
            p999_s: completion.quantile_s(0.999),
            goodput_bps: 8.0 * question.bytes as f64 / mean_s,
            parity: scheme.parity(&question.channel, question.chunks) as f64
                / question.chunks as f64,
            fallback: code
                .map(|code| Scheme::coding(&question.channel, code).fallback(question.chunks)),
        }
    }

    fn row(&self) -> Vec<String> {
        let fallback = self
            .fallback
            .map_or("".into(), |p| format!("{}%", show::plain((p * 1e4).round() / 1e2)));
        let parity = if self.fallback.is_some() {
            format!("{:.0}%", 100.0 * self.parity)
        } else {
            String::new()
        };
        let times = [self.mean_s, self.p50_s, self.p99_s, self.p999_s].map(show::time_s);
        let gbps = format!("{:.2}", self.goodput_bps / 1e9);
        [vec![self.scheme.clone()], times.to_vec(), vec![gbps, parity, fallback]].concat()
    }
}

/// The JSON answer.
#[derive(Serialize)]
struct Answer<'a> {
    bandwidth_bps: f64,
    rtt_s: f64,
    chunk_loss: f64,
    chunk_bytes: u64,
    message_bytes: u64,
    chunks: u64,
    ideal_s: f64,
    objective: String,
    recommended: &'a str,
    schemes: &'a [Prediction],
    picture: Option<String>,
}

pub(super) fn recommend(question: &Question, args: &AnswerArgs) -> Result {
    let schemes = candidates();
    let (best, _) = choose(&question.channel, question.chunks, args.objective, &schemes)
        .ok_or_else(|| Failure::Text("there is no scheme to choose from".into()))?;
    let mut predictions: Vec<(f64, Prediction)> = schemes
        .iter()
        .map(|scheme| {
            let time_s = args.objective.of(&scheme.message(&question.channel, question.chunks));
            (time_s, Prediction::new(question, *scheme))
        })
        .collect();
    predictions.sort_by(|a, b| a.0.total_cmp(&b.0));
    let predictions: Vec<Prediction> =
        predictions.into_iter().map(|(_, prediction)| prediction).collect();
    let file = args.picture.write(|| picture::of_link(question, args.objective, best))?;
    let file = file.map(|file| file.display().to_string());
    if args.json {
        return print_json(&Answer {
            bandwidth_bps: question.link.bandwidth_bps,
            rtt_s: question.link.rtt_s,
            chunk_loss: question.channel.loss,
            chunk_bytes: question.link.chunk_bytes,
            message_bytes: question.bytes,
            chunks: question.chunks,
            ideal_s: question.ideal_s(),
            objective: super::shown_objective(args.objective),
            recommended: &best.to_string(),
            schemes: &predictions,
            picture: file,
        });
    }
    let head = ["scheme", "mean", "p50", "p99", "p99.9", "Gbit/s", "parity", "falls back"];
    let rows: Vec<Vec<String>> = std::iter::once(head.map(String::from).to_vec())
        .chain(predictions.iter().map(Prediction::row))
        .collect();
    let mut text = question.shown();
    text += &question.caveat().unwrap_or_default();
    text += &format!("use      {best}, for {}\n", advice(question, args.objective, best));
    text += &format!("\n{}", table(&rows));
    if let Some(file) = file {
        text += &format!("\npicture  {file}\n");
    }
    print(&text)
}

/// Why a scheme is the right one, in a sentence.
fn advice(question: &Question, objective: Objective, best: Scheme) -> String {
    let of = |scheme: Scheme| objective.of(&scheme.message(&question.channel, question.chunks));
    let name = match objective {
        Objective::Mean => "in the mean".into(),
        Objective::Quantile(_) => format!("at {}", super::shown_objective(objective)),
    };
    let best_s = of(best);
    let code = candidates().into_iter().filter(|s| matches!(s, Scheme::Ec(_))).map(|s| (of(s), s));
    match best {
        Scheme::Ec(_) => format!(
            "{} {name}; Selective Repeat would take {} (SR-NACK) to {} (SR-RTO)",
            show::time_s(best_s),
            show::time_s(of(Scheme::SrNack)),
            show::time_s(of(Scheme::SrRto))
        ),
        _ => match code.min_by(|a, b| a.0.total_cmp(&b.0)) {
            Some((code_s, code)) if code_s < best_s => format!(
                "{} {name}; {code} would save less than {:.0} % and cost a core",
                show::time_s(best_s),
                100.0 * WORTH
            ),
            Some((code_s, code)) => {
                format!(
                    "{} {name}; parity does not pay: {code} would take {}",
                    show::time_s(best_s),
                    show::time_s(code_s)
                )
            }
            None => format!("{} {name}", show::time_s(best_s)),
        },
    }
}
