//! Times on the command line.

use std::time::Duration;

/// A time with its unit.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let wrong = || {
        format!("'{text}' is not a time; a number with us, ms, s or m is right, like 3s or 500ms")
    };
    let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
    let (number, unit) = text.split_at(unit_at);
    let seconds = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        _ => return Err(wrong()),
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(parse_time("3s"), Ok(Duration::from_secs(3)));
        assert_eq!(parse_time("1.5ms"), Ok(Duration::from_micros(1500)));
        assert_eq!(parse_time("2m"), Ok(Duration::from_secs(120)));
        for wrong in ["3", "s", "", "-1s", "3 s", "1.2.3s", "3h", "99999999999999999999s"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
