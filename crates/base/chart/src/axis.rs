//! Axes: where a figure lies, and which ticks fit beside it.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use serde::{Deserialize, Serialize};
use unbroken_units::show::{self, plain, Ladder};

use crate::theme;

/// What the figures of an axis are; they are written in units that suit their size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Numbers without a unit.
    #[default]
    Plain,
    /// Numbers of bytes.
    Bytes,
    /// Nanoseconds.
    Ns,
    /// Microseconds.
    Us,
    /// Milliseconds.
    Ms,
    /// Seconds.
    S,
    /// 10^9 bits a second.
    Gbps,
    /// Hundredths.
    Percent,
    /// Probabilities, written as powers of ten.
    Probability,
}

impl Unit {
    /// How many basic units one is, and the units to write it in.
    fn ladder(self) -> Option<(f64, Ladder)> {
        match self {
            Unit::Bytes => Some((1.0, show::SIZE)),
            Unit::Ns => Some((1e-9, show::TIME)),
            Unit::Us => Some((1e-6, show::TIME)),
            Unit::Ms => Some((1e-3, show::TIME)),
            Unit::S => Some((1.0, show::TIME)),
            Unit::Gbps => Some((1e9, show::RATE)),
            Unit::Plain | Unit::Percent | Unit::Probability => None,
        }
    }

    /// A figure with three digits that count, and its unit.
    pub fn write(self, figure: f64) -> String {
        let (of, name) = match (self, self.ladder()) {
            (Unit::Probability, _) => return show::power_of_ten(figure),
            // what is less than a hundredth of a percent says nothing more
            (Unit::Percent, _) if figure != 0.0 && figure.abs() < 0.01 => {
                return "< 0.01 %".into();
            }
            (Unit::Percent, _) if figure.abs() < 1.0 => {
                return format!("{} %", plain((figure * 100.0).round() / 100.0));
            }
            (Unit::Percent, _) => (1.0, " %"),
            (_, None) => (1.0, ""),
            (_, Some((one, ladder))) => {
                // Nothing has the unit of the data, and not the smallest.
                let size = if figure == 0.0 { one } else { figure * one };
                let (of, name) = ladder.step(size);
                return format!("{} {name}", three_digits(figure * one / of));
            }
        };
        three_digits(figure / of) + name
    }
}

fn three_digits(figure: f64) -> String {
    let digits = figure.abs().max(1e-6).log10().floor() as i32;
    let scale = 10_f64.powi((2 - digits).max(0));
    plain((figure * scale).round() / scale)
}

/// One axis of a panel.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Axis {
    /// What it shows, without the unit.
    pub label: String,
    /// Its first figure.
    pub low: f64,
    /// Its last figure.
    pub high: f64,
    /// Whether each decade is as long as the next; both ends are then above 0.
    pub log: bool,
    /// What its figures are.
    pub unit: Unit,
}

impl Axis {
    /// From `low` to `high`, evenly.
    pub fn linear(label: &str, low: f64, high: f64, unit: Unit) -> Axis {
        Axis { label: label.into(), low, high, log: false, unit }
    }

    /// From `low` to `high`, both above 0, each decade as long as the next.
    pub fn log(label: &str, low: f64, high: f64, unit: Unit) -> Axis {
        Axis { log: true, ..Axis::linear(label, low, high, unit) }
    }

    fn scale(&self, fits: impl Fn(&Scale) -> bool) -> Scale {
        let mut scale = self.without_ticks();
        for most in (1..=MOST_TICKS).rev() {
            scale.ticks = match self.log {
                true => self.log_ticks(&scale.ends, most),
                false => self.even_ticks(&scale.ends, most),
            };
            if fits(&scale) {
                break;
            }
        }
        scale
    }

    /// The unit of a linear axis: how many of ours it is, and its name.
    fn one_unit(&self) -> (f64, &'static str) {
        match (self.unit, self.unit.ladder()) {
            (Unit::Percent, _) => (1.0, "%"),
            (_, Some((one, ladder))) => {
                let (of, name) = ladder.step(self.high.abs().max(self.low.abs()) * one);
                (of / one, name)
            }
            _ => (1.0, ""),
        }
    }

    fn without_ticks(&self) -> Scale {
        let least = if self.log { f64::MIN_POSITIVE } else { f64::MIN };
        let low = self.low.max(least);
        let next = if self.log { 10.0 * low } else { low + 1.0 };
        let high = if self.high > low { self.high } else { next };
        let label = match self.one_unit().1 {
            unit if self.log || unit.is_empty() => self.label.clone(),
            unit if self.label.is_empty() => unit.into(),
            unit => format!("{} ({unit})", self.label),
        };
        Scale { ends: low..high, is_log: self.log, ticks: Vec::new(), label }
    }

    fn even_ticks(&self, ends: &Range<f64>, most: usize) -> Vec<(f64, String)> {
        let (of, _) = self.one_unit();
        let (low, high) = (ends.start / of, ends.end / of);
        let rough = (high - low) / most as f64;
        let power = 10_f64.powf(rough.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|m| m * power);
        let step = steps.into_iter().find(|step| *step >= rough).unwrap_or(rough);
        let first = (low / step - 1e-9).ceil();
        (0..=most)
            .map(|n| (first + n as f64) * step)
            .take_while(|tick| *tick <= high * (1.0 + 1e-9))
            .map(|tick| {
                let words = match self.unit {
                    Unit::Probability => show::power_of_ten(tick),
                    _ => plain(tick),
                };
                (tick * of, words)
            })
            .collect()
    }

    fn log_ticks(&self, ends: &Range<f64>, most: usize) -> Vec<(f64, String)> {
        let base: f64 = if self.unit == Unit::Bytes { 2.0 } else { 10.0 };
        let (first, last) = (ends.start.log(base).floor() as i32, ends.end.log(base).ceil() as i32);
        let within = |tick: &f64| (ends.start * 0.999..=ends.end * 1.001).contains(tick);
        let powers = |of: &[f64]| -> Vec<f64> {
            let all = (first..=last).flat_map(|power| of.iter().map(move |m| m * base.powi(power)));
            all.filter(within).collect()
        };
        // Less than two decades: between them, too.
        let few = [&[1.0, 2.0, 3.0, 5.0, 7.0][..], &[1.0, 2.0, 5.0], &[1.0, 3.0]];
        let finer = few.into_iter().filter(|_| base == 10.0).map(powers);
        let mut ticks = powers(&[1.0]);
        if ticks.len() < 3 {
            let mut finer = finer.filter(|ticks| (2..=most).contains(&ticks.len()));
            ticks = finer.next().unwrap_or(ticks);
        }
        let every = ticks.len().div_ceil(most).max(1);
        ticks.into_iter().step_by(every).map(|tick| (tick, self.unit.write(tick))).collect()
    }
}

/// An axis with as many ticks as `fits` allows. Those of a linear axis have one unit, which the
/// label names; those of a logarithmic one have each their own.
pub fn scale(axis: &Axis, fits: impl Fn(&Scale) -> bool) -> Scale {
    axis.scale(fits)
}

/// The most ticks beside an axis.
const MOST_TICKS: usize = 8;

/// An axis that plotters can draw: its ends, and what is written where.
#[derive(Clone, Debug)]
pub struct Scale {
    ends: Range<f64>,
    is_log: bool,
    pub ticks: Vec<(f64, String)>,
    pub label: String,
}

impl Scale {
    /// Of things that have names and no figures: the first is from 0 to 1. Empty names have no
    /// tick, nor have those that `fits` refuses behind what is there already.
    pub fn of_names(label: &str, names: &[String]) -> Scale {
        let ticks = names.iter().enumerate().filter(|(_, name)| !name.is_empty());
        Scale {
            ends: 0.0..names.len().max(1) as f64,
            is_log: false,
            ticks: ticks.map(|(n, name)| (n as f64 + 0.5, name.clone())).collect(),
            label: label.into(),
        }
    }

    /// Leaves out every tick that touches the one before it on an axis below of that length.
    pub fn thinned(mut self, length: f64) -> Scale {
        let ticks = std::mem::take(&mut self.ticks);
        for tick in ticks {
            self.ticks.push(tick);
            if !self.fits_below(length) {
                self.ticks.pop();
            }
        }
        self
    }

    /// Where a figure is, as a share of the axis: 0 at its beginning, 1 at its end.
    pub fn share(&self, figure: f64) -> f64 {
        let Range { start, end } = self.ends;
        if self.is_log {
            (figure.max(f64::MIN_POSITIVE) / start).ln() / (end / start).ln()
        } else {
            (figure - start) / (end - start)
        }
    }

    /// Whether no tick's words touch the next ones, side by side in a row of that length.
    pub fn fits_below(&self, length: f64) -> bool {
        self.ticks.windows(2).all(|pair| {
            let apart = (self.share(pair[1].0) - self.share(pair[0].0)) * length;
            apart > (theme::width(&pair[0].1) + theme::width(&pair[1].1)) / 2.0 + theme::GAP
        })
    }

    /// Whether no tick's words touch the next ones, one above the other.
    pub fn fits_beside(&self, length: f64) -> bool {
        let shares = self.ticks.iter().map(|(at, _)| self.share(*at)).collect::<Vec<_>>();
        shares.windows(2).all(|pair| (pair[1] - pair[0]) * length > 1.8 * theme::LETTER)
    }

    /// The room that the longest words of a tick take.
    pub fn widest(&self) -> f64 {
        self.ticks.iter().map(|(_, words)| theme::width(words)).fold(0.0, f64::max)
    }
}

impl Ranged for Scale {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let length = f64::from(limit.1 - limit.0);
        limit.0 + (self.share(*value) * length).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().map(|(at, _)| *at).collect()
    }

    fn range(&self) -> Range<f64> {
        self.ends.clone()
    }
}

impl ValueFormatter<f64> for Scale {
    fn format_ext(&self, value: &f64) -> String {
        let tick = self.ticks.iter().find(|(at, _)| at == value);
        tick.map_or(String::new(), |(_, words)| words.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn below(axis: &Axis, length: f64) -> Vec<String> {
        let scale = axis.scale(|scale| scale.fits_below(length));
        scale.ticks.into_iter().map(|(_, words)| words).collect()
    }

    #[test]
    fn ticks_are_round() {
        let linear = |low, high| Axis::linear("", low, high, Unit::Plain);
        assert_eq!(below(&linear(0.0, 30.0), 150.0), ["0", "5", "10", "15", "20", "25", "30"]);
        assert_eq!(below(&linear(0.0, 1.0), 160.0), ["0", "0.2", "0.4", "0.6", "0.8", "1"]);
        assert_eq!(
            below(&Axis::log("", 1e-6, 1e-2, Unit::Probability), 350.0),
            ["10⁻⁶", "10⁻⁵", "10⁻⁴", "10⁻³", "10⁻²"]
        );
        assert_eq!(below(&Axis::log("", 1.0, 12.0, Unit::Plain), 120.0), ["1", "2", "5", "10"]);
    }

    #[test]
    fn figures_are_in_units_that_suit_them() {
        assert_eq!(
            below(&Axis::log("", 1048576.0, 134217728.0, Unit::Bytes), 350.0),
            ["1 MiB", "4 MiB", "16 MiB", "64 MiB"]
        );
        assert_eq!(
            below(&Axis::log("", 10.0, 19624.0, Unit::Us), 350.0),
            ["10 us", "100 us", "1 ms", "10 ms"]
        );
        let linear = Axis::linear("time", 0.0, 1351.0, Unit::Ms);
        assert_eq!(below(&linear, 120.0), ["0", "0.5", "1"]);
        assert_eq!(linear.scale(|_| true).label, "time (s)");
        assert_eq!(Axis::linear("", 0.0, 0.35, Unit::Gbps).scale(|_| true).label, "Mbit/s");
        assert_eq!(
            [
                (Unit::Ms, 2.588),
                (Unit::Ms, 0.0),
                (Unit::Gbps, 0.25),
                (Unit::Percent, 87.46),
                (Unit::Percent, 0.178),
                (Unit::Percent, 0.00729),
                (Unit::Ns, 83.0)
            ]
            .map(|(unit, figure)| unit.write(figure)),
            ["2.59 ms", "0 ms", "250 Mbit/s", "87.5 %", "0.18 %", "< 0.01 %", "83 ns"]
        );
    }

    /// At any length, no words touch the next.
    #[test]
    fn ticks_do_not_touch() {
        for length in [60.0, 150.0, 350.0, 800.0] {
            for axis in [
                Axis::log("", 131_072.0, 3.5e10, Unit::Bytes),
                Axis::log("", 1e-30, 1.0, Unit::Probability),
                Axis::log("", 0.9, 12.0, Unit::Plain),
                Axis::linear("", 0.0, 123_456.0, Unit::Plain),
                Axis::linear("", 0.99, 1.0002, Unit::Plain),
            ] {
                let scale = axis.scale(|scale| scale.fits_below(length));
                assert!(scale.fits_below(length) && scale.ticks.len() <= MOST_TICKS, "{scale:?}");
            }
        }
        let names = ["first", "second", "", "third"].map(String::from);
        let scale = Scale::of_names("", &names).thinned(120.0);
        let left: Vec<&str> = scale.ticks.iter().map(|(_, words)| words.as_str()).collect();
        assert_eq!(left, ["first", "third"]);
    }

    #[test]
    fn places_are_shares() {
        let scale = |axis: Axis| axis.scale(|_| true);
        let log = scale(Axis::log("", 1.0, 100.0, Unit::Plain));
        assert!((log.share(10.0) - 0.5).abs() < 1e-12 && log.share(0.0) < 0.0);
        assert_eq!(scale(Axis::linear("", 2.0, 4.0, Unit::Plain)).share(3.0), 0.5);
        // An axis without extent gets one.
        assert!(scale(Axis::linear("", 2.0, 2.0, Unit::Plain)).share(2.5).is_finite());
        assert!(scale(Axis::log("", 0.0, 0.0, Unit::Plain)).share(2.5).is_finite());
    }
}
