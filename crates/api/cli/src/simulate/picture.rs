//! Pictures of answers (`--svg`).

use std::path::{Path, PathBuf};

use clap::Args;
use unbroken_chart::{Axis, Bars, DrawError, Figure, Line, Lines, Panel, Series, Unit};
use unbroken_simulate::strategy::Strategy;
use unbroken_simulations::{month, plan, run, serve, sweep};

use super::shown;
use crate::output::{check_replaceable, Failure, Result};

/// Room beside the longest bar and above the highest line.
const ROOM: f64 = 1.1;
/// The least that an axis of percents shows.
const LEAST_PERCENT: f64 = 1.0;

/// A picture, if one is asked for.
#[derive(Args)]
pub(super) struct SvgArgs {
    /// A picture of the answer, too
    #[arg(long, value_name = "FILE", help_heading = super::OPTIONS)]
    svg: Option<PathBuf>,
}

impl SvgArgs {
    /// Whether the file can be written, before anything is computed.
    pub fn check(&self) -> Result {
        let Some(file) = &self.svg else { return Ok(()) };
        if file.extension().is_none_or(|extension| extension != "svg") {
            let (right, given) = (file.with_extension("svg"), file.display());
            let text = format!("pictures are SVG; '{}' is right, not '{given}'", right.display());
            return Err(Failure::Text(text));
        }
        check_replaceable(file)
    }

    /// Draws it, and says where it is.
    pub fn write(&self, draw: impl FnOnce() -> Figure) -> Result {
        let Some(file) = &self.svg else { return Ok(()) };
        let svg = draw().svg().map_err(|e: DrawError| Failure::Text(e.to_string()))?;
        write(file, &svg)?;
        // stdout may be JSON
        eprintln!("{}", file.display());
        Ok(())
    }
}

fn write(file: &Path, svg: &str) -> Result {
    let failed = |e| Failure::io(format!("cannot write {}", file.display()), e);
    std::fs::write(file, svg).map_err(failed)
}

fn percents(label: &str, most: f64) -> Axis {
    Axis::linear(label, 0.0, (most * ROOM).max(LEAST_PERCENT), Unit::Percent)
}

fn bars(title: &str, label: &str, rows: Vec<String>, series: Vec<Series>) -> Panel {
    let all = series.iter().flat_map(|one| one.values.iter().flatten().copied());
    let x = percents(label, all.fold(0.0, f64::max));
    Panel::Bars(Bars { title: title.into(), x, rows, series })
}

fn figure(title: String, panels: Vec<Panel>, notes: &[&str]) -> Figure {
    let columns = panels.len().min(2);
    Figure { title, panels, columns, notes: notes.iter().map(|note| note.to_string()).collect() }
}

/// How much longer a step and each collective take, by strategy.
pub(super) fn of_plan(report: &plan::Report) -> Figure {
    let percent = |now: Option<f64>, before: f64| {
        now.map_or(f64::NAN, |now| ((now / before - 1.0) * 100.0).max(0.0))
    };
    let rows: Vec<String> =
        report.strategies.iter().map(|s| s.strategy.name().to_string()).collect();
    let steps = report.strategies.iter().map(|s| percent(s.step_s, report.step_s)).collect();
    let of = |(colour, strategy): (usize, Strategy)| {
        let us = |row: &plan::Row| {
            let found = row.strategies.iter().find(|one| one.strategy == strategy);
            percent(found.and_then(|one| one.us), row.healthy_us)
        };
        Series::new(strategy.name(), colour, report.collectives.iter().map(us).collect())
    };
    let kinds = report.collectives.iter().map(|row| row.collective.name().to_string()).collect();
    let lost = match report.fails.is_empty() {
        true => shown::lost(&report.lost),
        false => report.fails.join(", "),
    };
    figure(
        format!("{}; lost: {lost}", shown::cluster(&report.cluster)),
        vec![
            bars("a step", "longer than before", rows, vec![Series::new("", 0, steps)]),
            bars(
                "collectives among all ranks",
                "longer than before",
                kinds,
                Strategy::IN_PLACE.into_iter().enumerate().map(of).collect(),
            ),
        ],
        &["Without a bar: it takes no longer, or cannot go on (see the table)."],
    )
}

/// How long a step takes over time, by strategy, and what of the work is lost.
pub(super) fn of_run(report: &run::Report) -> Figure {
    let end = |n: usize| report.changes.get(n + 1).map_or(report.horizon_s, |next| next.at_s);
    let line = |(place, strategy): (usize, Strategy)| {
        let points = report.changes.iter().enumerate().flat_map(|(n, change)| {
            let step_s = change.step_s[place].unwrap_or(f64::NAN);
            [(change.at_s, step_s), (end(n), step_s)]
        });
        Line::new(strategy.name(), place, points.collect())
    };
    let lines: Vec<Line> = Strategy::ALL.into_iter().enumerate().map(line).collect();
    let steps = lines.iter().flat_map(|line| line.points.iter().map(|point| point.1));
    let most = steps.filter(|step_s| step_s.is_finite()).fold(0.0, f64::max);
    let lost = report.strategies.iter().map(|s| (1.0 - s.goodput.share) * 100.0).collect();
    let rows = report.strategies.iter().map(|s| s.strategy.name().to_string()).collect();
    figure(
        shown::cluster(&report.cluster),
        vec![
            Panel::Lines(Lines {
                title: "a step; a gap: it cannot go on".into(),
                x: Axis::linear("time", 0.0, report.horizon_s, Unit::S),
                y: Axis::linear("a step", 0.0, most * ROOM, Unit::S),
                lines,
                markers: Vec::new(),
            }),
            bars(
                "work lost",
                "of what a healthy cluster does",
                rows,
                vec![Series::new("", 0, lost)],
            ),
        ],
        &[],
    )
}

/// How much longer a step takes over the number of lost NICs.
pub(super) fn of_sweep(report: &sweep::Report) -> Figure {
    let line = |(place, strategy): (usize, Strategy)| {
        let rows = report.rows.iter().filter(|row| row.strategy == strategy);
        let points = rows.map(|row| (row.lost as f64, row.mean * 100.0)).collect();
        Line::new(strategy.name(), place, points)
    };
    let lines: Vec<Line> = sweep::COMPARED.into_iter().enumerate().map(line).collect();
    let points = || lines.iter().flat_map(|line| line.points.iter().copied());
    let most = points().map(|point| point.1).filter(|y| y.is_finite()).fold(0.0, f64::max);
    let (first, last) =
        points().fold((f64::INFINITY, 1.0f64), |(a, b), (x, _)| (a.min(x), b.max(x)));
    let panel = Lines {
        title: "a step, in the mean".into(),
        x: Axis::linear("NICs lost", first.min(last - 1.0), last, Unit::Plain),
        y: percents("longer than before", most),
        lines,
        markers: Vec::new(),
    };
    figure(shown::cluster(&report.cluster), vec![Panel::Lines(panel)], &[])
}

/// What failures and repairs cost, by strategy.
pub(super) fn of_month(report: &month::Report) -> Figure {
    let rows = report.strategies.iter().map(|row| row.strategy.name().to_string()).collect();
    let of = |share: fn(&month::Row) -> f64| {
        report.strategies.iter().map(|row| (1.0 - share(row)) * 100.0).collect()
    };
    let series = vec![
        Series::new("mean of all runs", 0, of(|row| row.share)),
        Series::new("worst run", 1, of(|row| row.least)),
    ];
    let title =
        format!("{}; {}", shown::cluster(&report.cluster), shown::time(report.rates.horizon_s));
    let note = shown::spares(&report.recovery);
    figure(title, vec![bars("work lost", "of what a healthy cluster does", rows, series)], &[&note])
}

/// What clients see, over the rate of requests.
pub(super) fn of_serve(report: &serve::Report) -> Figure {
    let mut names: Vec<(Option<_>, &str)> = Vec::new();
    for row in &report.rows {
        if !names.iter().any(|(strategy, _)| *strategy == row.strategy) {
            names.push((row.strategy, row.strategy.map_or("no failure", |s| s.name())));
        }
    }
    let rates = || report.rows.iter().filter_map(|row| row.rate);
    let (first, last) = rates().fold((f64::INFINITY, 0.0f64), |(a, b), x| (a.min(x), b.max(x)));
    let (first, last) = if last > first { (first, last) } else { (0.0, last.max(1.0)) };
    let panel = |title: &str, of: fn(&serve::Row) -> Option<f64>| {
        let line = |(place, (strategy, name)): (usize, &(Option<_>, &str))| {
            let rows = report.rows.iter().filter(|row| row.strategy == *strategy);
            let at = |row: &serve::Row| (row.rate.unwrap_or(0.0), of(row).unwrap_or(f64::NAN));
            Line::new(name, place, rows.map(at).collect())
        };
        let lines: Vec<Line> = names.iter().enumerate().map(line).collect();
        let most = report.rows.iter().filter_map(of).fold(0.0, f64::max);
        Panel::Lines(Lines {
            title: title.into(),
            x: Axis::linear("requests a second", first, last, Unit::Plain),
            y: Axis::linear("p95", 0.0, most.max(1e-9) * ROOM, Unit::S),
            lines,
            markers: Vec::new(),
        })
    };
    let ttft = |row: &serve::Row| row.outcome.as_ref()?.ttft_s.map(|q| q.p95);
    let tpot = |row: &serve::Row| row.outcome.as_ref()?.tpot_s.map(|q| q.p95);
    let title = format!("{}; lost: {}", report.serving.model.name, shown::lost(&report.lost));
    let panels =
        vec![panel("time to the first token", ttft), panel("time from token to token", tpot)];
    figure(title, panels, &[])
}
