//! Quantities for people: few digits, and the unit that suits them.

use std::fmt;

/// The units of one quantity, the smallest first: how many of the basic unit each is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ladder(&'static [(f64, &'static str)]);

/// Times; the basic unit is the second.
pub const TIME: Ladder = Ladder(&[(1e-9, "ns"), (1e-6, "us"), (1e-3, "ms"), (1.0, "s")]);
/// Rates; the basic unit is one bit a second.
pub const RATE: Ladder =
    Ladder(&[(1.0, "bit/s"), (1e3, "Kbit/s"), (1e6, "Mbit/s"), (1e9, "Gbit/s"), (1e12, "Tbit/s")]);
/// Sizes; the basic unit is the byte.
pub const SIZE: Ladder = Ladder(&[
    (1.0, "B"),
    (1024.0, "KiB"),
    (1048576.0, "MiB"),
    (1073741824.0, "GiB"),
    (1099511627776.0, "TiB"),
    (1125899906842624.0, "PiB"),
]);

impl Ladder {
    /// The largest unit that a figure has at least one of, and its name.
    pub fn step(self, figure: f64) -> (f64, &'static str) {
        let reached = figure.abs() * (1.0 + 1e-9);
        *self.0.iter().rev().find(|(of, _)| reached >= *of).unwrap_or(&self.0[0])
    }

    /// A figure in the unit that suits it, with two decimals at most.
    pub fn show(self, figure: f64) -> String {
        let (of, name) = self.step(figure);
        format!("{} {name}", plain((figure / of * 100.0).round() / 100.0))
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
    SIZE.show(figure)
}

/// A time of some seconds, with three digits: `28.4 ms`.
pub fn time_s(seconds: f64) -> String {
    if seconds == 0.0 {
        return "0 s".into();
    }
    let (of, name) = TIME.step(seconds);
    let figure = seconds / of;
    let decimals = match figure {
        f if f >= 100.0 => 0,
        f if f >= 10.0 => 1,
        _ => 2,
    };
    format!("{figure:.decimals$} {name}")
}

/// Bits a second: `400 Gbit/s`.
pub fn rate_bps(bits_a_second: f64) -> String {
    let (of, name) = RATE.step(bits_a_second);
    format!("{} {name}", plain((bits_a_second / of * 1e3).round() / 1e3))
}

/// A number with few digits and a prefix of 1000 (or 1024), which can be read again.
pub fn with_prefix(figure: f64, base: f64) -> String {
    let prefixes = ["", "K", "M", "G", "T"];
    let mut power = 0;
    let mut figure = figure;
    while figure >= base && power + 1 < prefixes.len() {
        figure /= base;
        power += 1;
    }
    format!("{}{}", plain((figure * 1e3).round() / 1e3), prefixes[power])
}

/// A number of things in the mean.
pub fn count(count: f64) -> String {
    match count {
        c if c >= 10.0 => format!("{c:.0}"),
        c if c >= 0.1 || c == 0.0 => plain((c * 1e2).round() / 1e2),
        c => probability(c),
    }
}

/// A probability in the letters of a command line: `1.6e-4`.
pub fn probability(loss: f64) -> String {
    match loss {
        l if l == 0.0 || (1e-3..1.0).contains(&l) => plain((l * 1e5).round() / 1e5),
        l => format!("{l:.1e}").replace(".0e", "e"),
    }
}

/// A probability as a power of ten: `3·10⁻⁵`.
pub fn power_of_ten(figure: f64) -> String {
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

/// Writes `value / 10^decimals` exactly and without needless zeroes, and a unit behind it.
pub fn exact(f: &mut fmt::Formatter<'_>, value: u64, decimals: usize, unit: &str) -> fmt::Result {
    let scale = 10u64.pow(decimals as u32);
    let text = format!("{}.{:0decimals$}", value / scale, value % scale);
    write!(f, "{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        assert_eq!([0.0, 0.5, 12.0, -0.25].map(plain), ["0", "0.5", "12", "-0.25"]);
        assert_eq!(
            [0.0, 1e-5, 3e-5, 9.99e-4, 0.1, 1.0].map(power_of_ten),
            ["0", "10⁻⁵", "3·10⁻⁵", "10⁻³", "10⁻¹", "1"]
        );
        assert_eq!(
            [0.0, 1023.0, 65536.0, 1.5e9].map(bytes),
            ["0 B", "1023 B", "64 KiB", "1.4 GiB"]
        );
    }

    #[test]
    fn figures_are_for_people() {
        assert_eq!(
            [28.3554e-3, 1.31e-6, 1.5, 0.1766, 0.0, 8.3e-8].map(time_s),
            ["28.4 ms", "1.31 us", "1.50 s", "177 ms", "0 s", "83.0 ns"]
        );
        assert_eq!(
            [0.0, 1e-5, 1.6e-4, 0.0159, 0.5, 1.0].map(probability),
            ["0", "1e-5", "1.6e-4", "0.0159", "0.5", "1e0"]
        );
        assert_eq!([0.0, 0.004, 0.328, 3.0, 32.5].map(count), ["0", "0.004", "0.33", "3", "32"]);
        assert_eq!(
            [400e9, 1.25e6, 900.0].map(rate_bps),
            ["400 Gbit/s", "1.25 Mbit/s", "900 bit/s"]
        );
        assert_eq!(
            (with_prefix(400e9, 1e3), with_prefix(1536.0, 1024.0)),
            ("400G".into(), "1.5K".into())
        );
    }

    #[test]
    fn a_ladder_has_a_step_for_each_figure() {
        assert_eq!(TIME.step(1e-3), (1e-3, "ms"));
        assert_eq!(TIME.step(1e-12).1, "ns");
        assert_eq!(RATE.step(1e15).1, "Tbit/s");
        assert_eq!([0.0, -2e-3, 0.25].map(|s| TIME.show(s)), ["0 ns", "-2 ms", "250 ms"]);
    }
}
