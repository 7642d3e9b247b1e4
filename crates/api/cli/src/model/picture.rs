//! Pictures for somebody's own link and message, after the paper's Figures 3 and 10.

use unbroken_chart::{Axis, Figure, Line, Lines, Marker, Panel, Unit};
use unbroken_erasure::Code;
use unbroken_sdr_model::choose::Objective;
use unbroken_sdr_model::{Link, Loss, Scheme};
use unbroken_units::show;

use super::{shown_objective, DrawResult, Question};

/// Points of a line.
const POINTS: i32 = 48;

/// The schemes that are drawn: the recommended one, and the paper's four.
fn drawn(best: Scheme) -> Vec<Scheme> {
    let codes = [Code::mds(32, 8), Code::xor(32, 8)].into_iter().flatten().map(Scheme::Ec);
    let mut schemes: Vec<Scheme> =
        [Scheme::SrRto, Scheme::SrNack].into_iter().chain(codes).collect();
    if !schemes.contains(&best) {
        schemes.push(best);
    }
    schemes
}

/// From `low` to `high`, evenly on a logarithmic axis.
fn spread(low: f64, high: f64) -> impl Iterator<Item = f64> {
    (0..=POINTS).map(move |n| low * (high / low).powf(f64::from(n) / f64::from(POINTS)))
}

/// How much longer than without losses a message takes, over something that varies.
fn slowdown(
    title: &str,
    x: Axis,
    (low, high): (f64, f64),
    schemes: &[Scheme],
    objective: Objective,
    link: impl Fn(f64) -> (Link, u64),
) -> Lines {
    let of = |scheme: Scheme, at: f64| {
        let (link, message_bytes) = link(at);
        let chunks = link.chunks(message_bytes);
        let Ok(channel) = link.channel() else { return f64::NAN };
        let ideal_s = chunks as f64 * channel.injection_s + channel.rtt_s;
        objective.of(&scheme.message(&channel, chunks)) / ideal_s
    };
    let lines = schemes.iter().enumerate().map(|(n, scheme)| {
        Line::new(
            &scheme.to_string(),
            n,
            spread(low, high).map(|at| (at, of(*scheme, at))).collect(),
        )
    });
    let lines: Vec<Line> = lines.collect();
    let most = schemes
        .iter()
        .flat_map(|scheme| spread(low, high).map(|at| of(*scheme, at)).collect::<Vec<_>>());
    let most = most.filter(|ratio| ratio.is_finite()).fold(2.0, f64::max);
    let label = format!("{} time over lossless time", shown_objective(objective));
    let y = if most < 5.0 {
        Axis::linear(&label, 0.9, most * 1.05, Unit::Plain)
    } else {
        Axis::log(&label, 0.9, most * 1.1, Unit::Plain)
    };
    Lines { title: title.into(), x, y, lines, markers: Vec::new() }
}

fn with_marker(mut lines: Lines, x: f64, words: String) -> Panel {
    lines.markers.push(Marker { x, words });
    Panel::Lines(lines)
}

/// Four panels: over the message, the loss and the distance, each with the place of the question;
/// and the tail of its distribution.
pub(super) fn of_link(question: &Question, objective: Objective, best: Scheme) -> DrawResult {
    let schemes = drawn(best);
    let Question { link, bytes: message, .. } = *question;
    let (Loss::Packet(asked) | Loss::Chunk(asked)) = link.loss;
    let of = |p: f64| match link.loss {
        Loss::Packet(_) => Loss::Packet(p),
        Loss::Chunk(_) => Loss::Chunk(p),
    };
    let lost =
        if matches!(link.loss, Loss::Packet(_)) { "loss of a packet" } else { "loss of a chunk" };
    let size = message as f64;
    let sizes = (
        link.chunk_bytes.min(message) as f64,
        (size * 64.0).max(64e9).min((link.chunk_bytes * super::MOST_CHUNKS) as f64),
    );
    let losses = (asked.clamp(1e-12, 1e-7), 0.1);
    let rtts = ((link.rtt_s / 20.0).max(1e-6), (link.rtt_s * 20.0).max(1e-3));
    let over_sizes = slowdown(
        "over the message",
        Axis::log("message", sizes.0, sizes.1, Unit::Bytes),
        sizes,
        &schemes,
        objective,
        |at| (link, at as u64),
    );
    let over_losses = slowdown(
        "over the loss",
        Axis::log(lost, losses.0, losses.1, Unit::Probability),
        losses,
        &schemes,
        objective,
        |at| (Link { loss: of(at), ..link }, message),
    );
    let over_rtts = slowdown(
        "over the distance",
        Axis::log("round trip", rtts.0, rtts.1, Unit::S),
        rtts,
        &schemes,
        objective,
        |at| (Link { rtt_s: at, ..link }, message),
    );
    let figure = Figure {
        title: format!(
            "{} over {}, {} round trip, {lost} {}: {best}",
            show::bytes(size),
            show::rate_bps(link.bandwidth_bps),
            show::time_s(link.rtt_s),
            show::probability(asked)
        ),
        panels: vec![
            with_marker(over_sizes, size, show::bytes(size)),
            with_marker(over_losses, asked, show::probability(asked)),
            with_marker(over_rtts, link.rtt_s, show::time_s(link.rtt_s)),
            Panel::Lines(tail(question, &schemes)),
        ],
        columns: 2,
        notes: vec!["The dashed line is what was asked for. Models: docs/internals/sdr.md.".into()],
    };
    figure.svg()
}

/// How many messages are not done yet, over time.
fn tail(question: &Question, schemes: &[Scheme]) -> Lines {
    const RAREST: f64 = 1e-6;
    let completions: Vec<_> =
        schemes.iter().map(|s| s.message(&question.channel, question.chunks)).collect();
    let latest_s = completions.iter().map(|c| c.quantile_s(1.0 - RAREST)).fold(0.0, f64::max);
    let first_s = question.ideal_s() * 0.9;
    let last_s = latest_s.max(question.ideal_s() * 1.5) * 1.05;
    let lines = schemes.iter().zip(&completions).enumerate().map(|(n, (scheme, completion))| {
        let times = spread(first_s, last_s)
            .chain([completion.least_s() * (1.0 - 1e-9), completion.least_s() * (1.0 + 1e-9)]);
        let mut points: Vec<(f64, f64)> =
            times.map(|s| (s, 1.0 - completion.probability(s))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Line::new(&scheme.to_string(), n, points)
    });
    let axis = if last_s < 20.0 * first_s { Axis::linear } else { Axis::log };
    Lines {
        title: "messages that are not done yet".into(),
        x: axis("time", first_s, last_s, Unit::S),
        y: Axis::log("share of all", RAREST, 1.0, Unit::Probability),
        lines: lines.collect(),
        markers: Vec::new(),
    }
}

/// One scheme: the tail of its distribution beside those of Selective Repeat.
pub(super) fn of_scheme(question: &Question, scheme: Scheme) -> DrawResult {
    let mut schemes = vec![scheme];
    schemes.extend([Scheme::SrRto, Scheme::SrNack].into_iter().filter(|other| *other != scheme));
    let figure = Figure {
        title: format!("{} with {scheme}", show::bytes(question.bytes as f64)),
        panels: vec![Panel::Lines(tail(question, &schemes))],
        columns: 1,
        notes: Vec::new(),
    };
    figure.svg()
}
