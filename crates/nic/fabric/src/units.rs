//! Numbers with their units, as faults are written: `1%`, `2.5Gbit`, `200us`. Reading and showing
//! are exact and inverse.

use std::fmt;

use unbroken_units::read::{rate, time_ns, whole};
use unbroken_units::show::exact;

use crate::error::{FabricError, Result};

/// All of a ratio, in parts per million.
pub(crate) const FULL_PPM: u32 = 1_000_000;
/// Slowest and fastest rate, in bit/s.
const RATES: std::ops::RangeInclusive<u64> = 64_000..=1_000_000_000_000;
/// Longest time: a day.
pub(crate) const MAX_TIME_US: u64 = 86_400_000_000;

/// Shares in parts per million.
const SHARES: [(&str, u64); 1] = [("%", 10_000)];

/// Reads a share in parts per million: `1%`.
pub(crate) fn parse_share(text: &str) -> Result<u32> {
    let ppm = whole(text, &SHARES).filter(|ppm| (1..=u64::from(FULL_PPM)).contains(ppm));
    ppm.map(|ppm| ppm as u32).ok_or_else(|| {
        FabricError::Name(format!("'{text}' is not a share; 0.0001% to 100% are right, like '1%'"))
    })
}

/// Reads a rate in bit/s: `10Gbit`, `10G`.
pub(crate) fn parse_rate(text: &str) -> Result<u64> {
    rate(text).ok().filter(|r| RATES.contains(r)).ok_or_else(|| {
        FabricError::Name(format!(
            "'{text}' is not a rate; 64kbit to 1000Gbit are right, like '10Mbit' or '2.5Gbit'"
        ))
    })
}

/// Reads a time in µs: `200us`, `5ms`, `1.5s`, `2m`. At least 1 µs, at most a day.
pub(crate) fn parse_time_us(text: &str) -> Result<u64> {
    let time_us = time_ns(text).ok().filter(|ns| ns % 1_000 == 0).map(|ns| ns / 1_000);
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
        exact(f, u64::from(self.0), 4, "%")
    }
}

/// Shows bit/s.
pub(crate) struct Rate(pub(crate) u64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            r if r >= 1_000_000_000 && r % 1_000_000 == 0 => exact(f, r, 9, "Gbit"),
            r if r >= 1_000_000 && r % 1_000 == 0 => exact(f, r, 6, "Mbit"),
            r => exact(f, r, 3, "kbit"),
        }
    }
}

/// Shows a time given in µs, as [`Fault`](crate::Fault) is written: `200us`, `5ms`, `1.5s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeUs(pub u64);

impl fmt::Display for TimeUs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            t if t >= 1_000_000 && t % 1_000 == 0 => exact(f, t, 6, "s"),
            t if t >= 1_000 => exact(f, t, 3, "ms"),
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
        assert_eq!(parse_time_us("1h").unwrap(), 3_600_000_000);
        // As every command has them.
        for rate in ["10G", "10Gbit", "10Gbit/s", "10Gbps", "10000M"] {
            assert_eq!(parse_rate(rate).unwrap(), 10_000_000_000, "{rate}");
        }
    }

    #[test]
    fn what_is_no_number_is_refused() {
        for wrong in ["", "1", "%", ".%", "0%", "101%", "-1%", "1e0%", "0.00001%", "4294967297%"] {
            assert!(parse_share(wrong).is_err(), "{wrong}");
        }
        for wrong in
            ["1", "1gbit", "63kbit", "1001Gbit", "Gbit", "99999999999999999999Gbit", "0.5bit"]
        {
            assert!(parse_rate(wrong).is_err(), "{wrong}");
        }
        for wrong in ["1", "0s", "25h", "1.5us", "-1s", "1441m", "s", "1..5s", "1y"] {
            assert!(parse_time_us(wrong).is_err(), "{wrong}");
        }
    }
}
