//! Times on the command line.

use std::time::Duration;

use unbroken_units::read;

/// A time with its unit.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let time_ns = read::whole(text, &read::TIMES_NS).ok_or_else(|| {
        format!("'{text}' is not a time; a number with us, ms, s or m is right, like 3s or 500ms")
    })?;
    Ok(Duration::from_nanos(time_ns))
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
