//! Axes, and how figures are written beside them.

/// One axis of a panel.
#[derive(Clone, Debug)]
pub struct Axis {
    label: String,
    low: f64,
    high: f64,
    is_log: bool,
    ticks: Vec<f64>,
    write: fn(f64) -> String,
}

/// The most ticks beside a linear or a decimal axis.
const TICKS: usize = 9;

impl Axis {
    /// From `low` to `high`, evenly; figures are written by `write`.
    pub fn linear(label: &str, low: f64, high: f64, write: fn(f64) -> String) -> Axis {
        let high = if high > low { high } else { low + 1.0 };
        let rough = (high - low) / 5.0;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .map(|m| m * power)
            .into_iter()
            .find(|step| *step >= rough)
            .unwrap_or(rough);
        let first = (low / step).ceil();
        let ticks = (0..2 * TICKS)
            .map(|n| (first + n as f64) * step)
            .take_while(|tick| *tick <= high * (1.0 + 1e-9));
        Axis { label: label.into(), low, high, is_log: false, ticks: ticks.collect(), write }
    }

    /// From `low` to `high`, both above 0, each decade as long as the next.
    pub fn log(label: &str, low: f64, high: f64, write: fn(f64) -> String) -> Axis {
        Axis::powers(label, low, high, 10.0, write)
    }

    /// The same with ticks at powers of two.
    pub fn bytes(label: &str, low: f64, high: f64) -> Axis {
        Axis::powers(label, low, high, 2.0, bytes)
    }

    fn powers(label: &str, low: f64, high: f64, base: f64, write: fn(f64) -> String) -> Axis {
        let low = low.max(f64::MIN_POSITIVE);
        let high = if high > low { high } else { low * base };
        let (first, last) =
            ((low.log(base) - 1e-9).ceil() as i32, (high.log(base) + 1e-9).floor() as i32);
        let mut ticks: Vec<f64> = (first..=last).map(|power| base.powi(power)).collect();
        if ticks.len() < 3 && base == 10.0 {
            // Less than two decades: between them, too.
            let all =
                (first - 1..=last).flat_map(|power| [1.0, 2.0, 5.0].map(|m| m * base.powi(power)));
            ticks = all
                .filter(|tick| (low * (1.0 - 1e-9)..=high * (1.0 + 1e-9)).contains(tick))
                .collect();
        }
        let every = ticks.len().div_ceil(TICKS - 1).max(1);
        let ticks = ticks.into_iter().step_by(every).collect();
        Axis { label: label.into(), low, high, is_log: true, ticks, write }
    }

    pub(crate) fn label(&self) -> &str {
        &self.label
    }

    /// Where the ticks are, as shares of the axis, and what is written there.
    pub(crate) fn ticks(&self) -> impl Iterator<Item = (f64, String)> + '_ {
        self.ticks.iter().map(|tick| (self.place(*tick), (self.write)(*tick)))
    }

    /// Where a figure is, as a share of the axis: 0 at its beginning, 1 at its end.
    pub(crate) fn place(&self, figure: f64) -> f64 {
        if self.is_log {
            (figure.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (figure - self.low) / (self.high - self.low)
        }
    }
}

/// A figure as it is, without digits that do not count.
pub fn plain(figure: f64) -> String {
    let text = format!("{figure:.6}");
    match text.trim_end_matches('0').trim_end_matches('.') {
        "" | "-" | "-0" => "0".into(),
        short => short.into(),
    }
}

/// A number of bytes, in powers of 1024.
pub fn bytes(figure: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    let mut figure = figure;
    while figure >= 1024.0 && unit + 1 < units.len() {
        figure /= 1024.0;
        unit += 1;
    }
    format!("{} {}", plain((figure * 100.0).round() / 100.0), units[unit])
}

/// A probability as a power of ten, `3·10⁻⁵`.
pub fn loss(figure: f64) -> String {
    if figure <= 0.0 {
        return "0".into();
    }
    let mut power = figure.log10().floor() as i32;
    let mut digits = (figure / 10_f64.powi(power) * 10.0).round() / 10.0;
    if digits >= 10.0 {
        (digits, power) = (digits / 10.0, power + 1);
    }
    let raised: String = power
        .to_string()
        .chars()
        .map(|c| match c {
            '-' => '⁻',
            '1' => '¹',
            '2' => '²',
            '3' => '³',
            digit => char::from_u32('⁰' as u32 + digit.to_digit(10).unwrap_or(0)).unwrap_or('⁰'),
        })
        .collect();
    match (digits, power) {
        (_, 0) => plain(digits),
        (1.0, _) => format!("10{raised}"),
        _ => format!("{}·10{raised}", plain(digits)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(axis: &Axis) -> Vec<String> {
        axis.ticks().map(|(_, text)| text).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(written(&Axis::linear("", 0.0, 30.0, plain)), ["0", "10", "20", "30"]);
        assert_eq!(
            written(&Axis::linear("", 0.0, 1.0, plain)),
            ["0", "0.2", "0.4", "0.6", "0.8", "1"]
        );
        assert_eq!(
            written(&Axis::log("", 1e-6, 1e-2, loss)),
            ["10⁻⁶", "10⁻⁵", "10⁻⁴", "10⁻³", "10⁻²"]
        );
        assert_eq!(written(&Axis::log("", 1.0, 12.0, plain)), ["1", "2", "5", "10"]);
        assert_eq!(
            written(&Axis::bytes("", 131_072.0, 1_048_576.0)),
            ["128 KiB", "256 KiB", "512 KiB", "1 MiB"]
        );
        assert!(written(&Axis::bytes("", 131_072.0, 3.5e10)).len() <= TICKS);
        assert!(written(&Axis::log("", 1e-30, 1.0, loss)).len() <= TICKS);
    }

    #[test]
    fn places_are_shares() {
        let axis = Axis::log("", 1.0, 100.0, plain);
        assert!(
            (axis.place(10.0) - 0.5).abs() < 1e-12
                && axis.place(1.0) == 0.0
                && axis.place(0.0) < 0.0
        );
        assert_eq!(Axis::linear("", 2.0, 4.0, plain).place(3.0), 0.5);
        // An axis without extent gets one.
        assert!(Axis::linear("", 2.0, 2.0, plain).place(2.5).is_finite());
        assert!(Axis::log("", 0.0, 0.0, plain).place(2.5).is_finite());
    }

    #[test]
    fn figures_are_short() {
        assert_eq!([0.0, 0.5, 12.0, -0.25].map(plain), ["0", "0.5", "12", "-0.25"]);
        assert_eq!(
            [0.0, 1e-5, 3e-5, 9.99e-4, 0.1, 1.0].map(loss),
            ["0", "10⁻⁵", "3·10⁻⁵", "10⁻³", "10⁻¹", "1"]
        );
        assert_eq!(
            [0.0, 1023.0, 65536.0, 1.5e9].map(bytes),
            ["0 B", "1023 B", "64 KiB", "1.4 GiB"]
        );
    }
}
