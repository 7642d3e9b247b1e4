//! Numbers with their units, as faults are written: `1%`, `2.5Gbit`, `200us`. Reading and showing
//! are exact and inverse.

use std::fmt;

use crate::error::{FabricError, Result};

/// All of a ratio, in parts per million.
pub(crate) const FULL_PPM: u32 = 1_000_000;
/// Slowest and fastest rate, in bit/s.
const RATES: std::ops::RangeInclusive<u64> = 64_000..=1_000_000_000_000;
/// Longest time: a day.
pub(crate) const MAX_TIME_US: u64 = 86_400_000_000;

/// A number with at most `decimals` digits after the point, times 10^`decimals`.
fn decimal(text: &str, decimals: usize) -> Option<u64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |s: &str| !s.is_empty() && s.len() <= 15 && s.bytes().all(|b| b.is_ascii_digit());
    let part = if decimals == 0 { part.trim_end_matches('0') } else { part };
    if !digits(whole)
        || !(digits(part) || part.is_empty() && decimals == 0)
        || part.len() > decimals
    {
        return None;
    }
    let part: u64 = format!("{part:0<decimals$}").parse().unwrap_or(0);
    whole.parse::<u64>().ok()?.checked_mul(10u64.pow(decimals as u32))?.checked_add(part)
}

/// Splits a number from its unit.
fn split(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()))
}

/// Writes `value / 10^decimals` without needless zeroes.
fn show(f: &mut fmt::Formatter<'_>, value: u64, decimals: usize, unit: &str) -> fmt::Result {
    let scale = 10u64.pow(decimals as u32);
    let text = format!("{}.{:0decimals$}", value / scale, value % scale);
    write!(f, "{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Reads a share in parts per million: `1%`.
pub(crate) fn parse_share(text: &str) -> Result<u32> {
    let ppm = text
        .strip_suffix('%')
        .and_then(|n| decimal(n, 4))
        .filter(|ppm| (1..=u64::from(FULL_PPM)).contains(ppm));
    ppm.map(|ppm| ppm as u32).ok_or_else(|| {
        FabricError::Name(format!("'{text}' is not a share; 0.0001% to 100% are right, like '1%'"))
    })
}

/// Reads a rate in bit/s: `10Gbit`.
pub(crate) fn parse_rate(text: &str) -> Result<u64> {
    let (number, unit) = split(text);
    let bits_per_s = match unit {
        "bit" => decimal(number, 0),
        "kbit" => decimal(number, 3),
        "Mbit" => decimal(number, 6),
        "Gbit" => decimal(number, 9),
        _ => None,
    };
    bits_per_s.filter(|r| RATES.contains(r)).ok_or_else(|| {
        FabricError::Name(format!(
            "'{text}' is not a rate; 64kbit to 1000Gbit are right, like '10Mbit' or '2.5Gbit'"
        ))
    })
}

/// Reads a time in µs: `200us`, `5ms`, `1.5s`, `2m`. At least 1 µs, at most a day.
pub(crate) fn parse_time_us(text: &str) -> Result<u64> {
    let (number, unit) = split(text);
    let time_us = match unit {
        "us" => decimal(number, 0),
        "ms" => decimal(number, 3),
        "s" => decimal(number, 6),
        "m" => decimal(number, 6).and_then(|us| us.checked_mul(60)),
        _ => None,
    };
    time_us.filter(|t| (1..=MAX_TIME_US).contains(t)).ok_or_else(|| {
        FabricError::Name(format!(
            "'{text}' is not a time; 1us to 1440m are right, like '200us', '5ms' or '1.5s'"
        ))
    })
}

/// Shows parts per million as percent.
pub(crate) struct Share(pub(crate) u32);

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(f, u64::from(self.0), 4, "%")
    }
}

/// Shows bit/s.
pub(crate) struct Rate(pub(crate) u64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            r if r >= 1_000_000_000 && r % 1_000_000 == 0 => show(f, r, 9, "Gbit"),
            r if r >= 1_000_000 && r % 1_000 == 0 => show(f, r, 6, "Mbit"),
            r => show(f, r, 3, "kbit"),
        }
    }
}

/// Shows a time given in µs, as [`Fault`](crate::Fault) is written: `200us`, `5ms`, `1.5s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeUs(pub u64);

impl fmt::Display for TimeUs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            t if t >= 1_000_000 && t % 1_000 == 0 => show(f, t, 6, "s"),
            t if t >= 1_000 => show(f, t, 3, "ms"),
            t => write!(f, "{t}us"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_read() {
        for ppm in [1, 9_999, 10_000, 123_456, FULL_PPM] {
            assert_eq!(parse_share(&Share(ppm).to_string()).unwrap(), ppm);
        }
        for rate in [
            64_000,
            999_999,
            1_000_001,
            10_000_000,
            2_500_000_000,
            1_000_000_001,
            1_000_000_000_000,
        ] {
            assert_eq!(parse_rate(&Rate(rate).to_string()).unwrap(), rate);
        }
        for time in [1, 999, 1_000, 1_500, 1_000_001, 1_500_000, MAX_TIME_US] {
            assert_eq!(parse_time_us(&TimeUs(time).to_string()).unwrap(), time);
        }
        assert_eq!(Rate(2_500_000_000).to_string(), "2.5Gbit");
        assert_eq!(Rate(10_000_000).to_string(), "10Mbit");
        assert_eq!(TimeUs(1_500_000).to_string(), "1.5s");
        assert_eq!(TimeUs(20_000).to_string(), "20ms");
        assert_eq!(parse_time_us("2m").unwrap(), 120_000_000);
    }

    #[test]
    fn what_is_no_number_is_refused() {
        for wrong in
            ["", "1", "%", "1.%", ".5%", "0%", "101%", "-1%", "1e0%", "0.00001%", "4294967297%"]
        {
            assert!(parse_share(wrong).is_err(), "{wrong}");
        }
        for wrong in [
            "1",
            "1Gb",
            "1gbit",
            "63kbit",
            "1001Gbit",
            "Gbit",
            "99999999999999999999Gbit",
            "0.5bit",
        ] {
            assert!(parse_rate(wrong).is_err(), "{wrong}");
        }
        for wrong in ["1", "0s", "1h", "1.5us", "-1s", "1 s", "1441m", "s", "1..5s"] {
            assert!(parse_time_us(wrong).is_err(), "{wrong}");
        }
    }
}
