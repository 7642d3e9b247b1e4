//! `unbroken simulate serve`: a language model that answers requests while NICs are lost.

use clap::Args;
use unbroken_simulate::inference::handling::Handling;
use unbroken_simulate::inference::results::Quantiles;
use unbroken_simulate::inference::When;
use unbroken_simulations::serve::{self as asked, Report, Row};
use unbroken_simulations::Watch;
use unbroken_units::show;

use super::{picture, progress, shown};
use crate::output::{print, print_json, table, Result};

pub(crate) const AFTER: &str = "Examples:
  unbroken simulate serve --model llama-3.1-405b --rate 1
  unbroken simulate serve --disaggregated --rate 0.5-6:0.5 --strategy restart,balance --json
  unbroken simulate serve --model opt-66b --trace requests.csv --at-token 800
  unbroken simulate serve --file cluster.toml --rate 2

A TOML file has the tables [cluster], [serving] (model, disaggregated, tensor, pipeline,
weight_bytes, budget, sequences, restart_s) and [gpu] (peak_tflops, efficiency, memory_gb,
memory_share, memory_gb_s, memory_efficiency), and switch_s in [recovery]. How many hosts there are
follows from tensor and pipeline.
A line of a trace is SECOND,PROMPT,ANSWER, with both lengths in tokens, in order of time; what
follows a # is a comment.
host0 has the first stage of the pipeline, or computes prompts. With --strategy reroute a second
replica has as many requests of its own, and takes those of the first.
In the table: TTFT is the time from a request to its first token, TPOT the mean time from one token
to the next; what half, 95 and 99 of 100 requests do not exceed. Of a trace, 'end' is the time to
the last token, p50. Requests that are lost have none. 'no failure' is the same load with all \
NICs.";

#[derive(Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    question: asked::ServeArgs,
    /// One JSON object
    #[arg(long, help_heading = super::OPTIONS)]
    json: bool,
    #[command(flatten)]
    picture: picture::SvgArgs,
}

pub(super) fn serve(args: &ServeArgs) -> Result {
    args.picture.check()?;
    let watch = Watch::default();
    let report = progress::beside(&watch, "runs", || asked::serve(&args.question, &watch))?;
    args.picture.write(|| picture::of_serve(&report))?;
    match args.json {
        true => print_json(&report),
        false => print(&text(&report)),
    }
}

fn text(report: &Report) -> String {
    let s = &report.serving;
    let apart = if s.disaggregated { "prefill and decode apart, each " } else { "" };
    let nics = show::rate_bps(f64::from(s.cluster.nic_mbps) * 1e6);
    let when = match report.when {
        _ if report.lost.is_empty() => String::new(),
        When::Second(second) => format!(" after {}", shown::time(second)),
        When::Token(token) => format!(" with token {token} of the first answer"),
    };
    format!(
        "{}, {apart}TP {}, PP {}: {} hosts of {} GPUs and {} NICs of {nics}\nlost: {}{when}\n\n{}",
        s.model.name,
        s.tensor,
        s.pipeline,
        s.hosts(),
        s.cluster.gpus,
        s.cluster.nics,
        shown::lost(&report.lost),
        table(&cells(&report.rows))
    )
}

/// Of requests of a file, which have no rate, when answers end instead.
fn cells(rows: &[Row]) -> Vec<Vec<String>> {
    let has_rate = rows.iter().any(|row| row.rate.is_some());
    let mut heading = vec!["strategy", "lost", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "p99"];
    match has_rate {
        true => heading.insert(0, "rate"),
        false => heading.push("end"),
    }
    let mut cells = vec![heading.into_iter().map(String::from).collect::<Vec<_>>()];
    for row in rows {
        let name = row.strategy.map_or("no failure", Handling::name).to_string();
        let mut of_row: Vec<String> = row.rate.map(show::plain).into_iter().chain([name]).collect();
        match &row.outcome {
            None => of_row.push("cannot".into()),
            Some(outcome) => {
                of_row.push(outcome.lost.to_string());
                of_row.extend(quantiles(&outcome.ttft_s));
                of_row.extend(quantiles(&outcome.tpot_s));
                if !has_rate {
                    of_row.extend(quantiles(&outcome.latency_s).into_iter().take(1));
                }
            }
        }
        cells.push(of_row);
    }
    cells
}

fn quantiles(of: &Option<Quantiles>) -> [String; 3] {
    match of {
        Some(q) => [q.p50, q.p95, q.p99].map(shown::time),
        None => ["-", "-", "-"].map(String::from),
    }
}
