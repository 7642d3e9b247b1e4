//! How much faster one scheme is than another, over message sizes and losses: the paper's Figure 9
//! for somebody's own link.

use clap::Args;
use serde::Serialize;
use unbroken_chart::{DrawError, Figure, Heat, Panel};
use unbroken_sdr_model::choose::Objective;
use unbroken_sdr_model::Scheme;
use unbroken_units::show;

use super::{LinkArgs, PictureArgs};
use crate::output::{print, print_json, table, Result};

/// Message sizes, from 2^17 bytes (128 KiB) to 2^35 (32 GiB).
const SIZES: std::ops::RangeInclusive<u32> = 17..=35;
/// Losses, from 10^-8 to 10^-1.
const LOSSES: std::ops::RangeInclusive<i32> = -8..=-1;

#[derive(Args)]
pub(super) struct HeatmapArgs {
    #[command(flatten)]
    link: LinkArgs,
    /// The scheme that is to be faster
    #[arg(long, default_value = "mds:32,8", value_parser = super::scheme)]
    scheme: Scheme,
    /// The scheme that it is compared with
    #[arg(long, default_value = "sr-rto", value_parser = super::scheme)]
    against: Scheme,
    /// What is to be short: mean, or a percentile such as p99.9
    #[arg(long, default_value = "mean", value_parser = super::objective)]
    objective: Objective,
    /// One JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    picture: PictureArgs,
}

#[derive(Serialize)]
struct Answer {
    scheme: String,
    against: String,
    objective: String,
    losses: Vec<f64>,
    sizes_bytes: Vec<u64>,
    /// Times of `against` over those of `scheme`, a row for each size; null where too much is lost
    /// for a model.
    speedup: Vec<Vec<Option<f64>>>,
    picture: Option<String>,
}

pub(super) fn heatmap(args: &HeatmapArgs) -> Result {
    // What is wrong with the link is wrong without losses, too.
    args.link.link(0.0).channel().map_err(|e| e.to_string())?;
    let losses: Vec<f64> = LOSSES.map(|power| 10_f64.powi(power)).collect();
    let sizes_bytes: Vec<u64> = SIZES.step_by(2).map(|power| 1 << power).collect();
    let speedup = |bytes: u64, loss: f64| {
        let link = args.link.link(loss);
        let (channel, chunks) = (link.channel().ok()?, link.chunks(bytes));
        let of = |scheme: Scheme| args.objective.of(&scheme.message(&channel, chunks));
        (chunks <= super::MOST_CHUNKS).then(|| of(args.against) / of(args.scheme))
    };
    let speedup: Vec<Vec<Option<f64>>> = sizes_bytes
        .iter()
        .map(|bytes| losses.iter().map(|loss| speedup(*bytes, *loss)).collect())
        .collect();
    let mut answer = Answer {
        scheme: args.scheme.to_string(),
        against: args.against.to_string(),
        objective: super::shown_objective(args.objective),
        losses,
        sizes_bytes,
        speedup,
        picture: None,
    };
    let of = format!("{:?}", args.link.loss_of).to_lowercase();
    let file = args.picture.write(|| draw(&answer, &of))?;
    answer.picture = file.map(|file| file.display().to_string());
    if args.json {
        return print_json(&answer);
    }
    let Answer { scheme, against, objective, .. } = &answer;
    let link = args.link.link(0.0);
    let mut text = format!(
        "link     {}, round trip {}\ntimes    {against} over {scheme}, {objective}: above 1, \
         {scheme} is faster\n\n",
        show::rate_bps(link.bandwidth_bps),
        show::time_s(link.rtt_s),
    );
    text += &table(&rows(&answer, &of));
    if let Some(file) = &answer.picture {
        text += &format!("\npicture  {file}\n");
    }
    print(&text)
}

/// The table: the largest messages first, as in the picture.
fn rows(answer: &Answer, of: &str) -> Vec<Vec<String>> {
    let head = std::iter::once(format!("{of} loss"))
        .chain(answer.losses.iter().map(|loss| format!("{loss:e}")));
    let body = answer.sizes_bytes.iter().zip(&answer.speedup).rev().map(|(bytes, row)| {
        let cells = row.iter().map(|ratio| ratio.map_or("-".into(), |ratio| format!("{ratio:.2}")));
        // Not a number for the table: it goes to the left.
        std::iter::once(format!("of {}", show::bytes(*bytes as f64))).chain(cells).collect()
    });
    std::iter::once(head.collect()).chain(body).collect()
}

fn draw(answer: &Answer, of: &str) -> std::result::Result<String, DrawError> {
    let Answer { scheme, against, objective, .. } = answer;
    let heat = Heat {
        title: format!("{objective} time of {against} over that of {scheme}"),
        x_label: format!("loss of a {of}"),
        y_label: "message".into(),
        columns: answer.losses.iter().map(|loss| show::power_of_ten(*loss)).collect(),
        rows: answer.sizes_bytes.iter().map(|bytes| show::bytes(*bytes as f64)).collect(),
        values: answer.speedup.clone(),
    };
    let figure = Figure {
        title: format!("{scheme} against {against}"),
        panels: vec![Panel::Heat(heat)],
        columns: 1,
        notes: vec![format!("Red: {scheme} is faster. Blue: {against} is.")],
    };
    figure.svg()
}
