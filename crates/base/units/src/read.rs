//! Quantities with units, as people write them. What is wrong gets a sentence that says what would
//! be right.

use crate::show::with_prefix;

/// How far from a whole number a quantity may be that shall be one: what is lost in reading it.
const ROUNDING: f64 = 1e-4;

/// A number with one of some units, as a whole number of what the units are multiples of; none if
/// it is no such thing, or not whole. No sign, no exponent, no space: `1%`.
pub fn whole(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.')?);
    let scale = units.iter().find_map(|(name, scale)| (*name == unit).then_some(*scale))?;
    let (before, after) = number.split_once('.').unwrap_or((number, ""));
    // So many digits fit whatever the unit is.
    if before.len() + after.len() > 18 {
        return None;
    }
    let digits: u128 = format!("{before}{after}").parse().ok()?;
    let (scaled, parts) = (digits * u128::from(scale), 10_u128.pow(after.len() as u32));
    (scaled % parts == 0).then(|| (scaled / parts).try_into().ok()).flatten()
}

/// A number and what stands behind it.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let number = text.char_indices().take_while(|&(i, c)| {
        c.is_ascii_digit()
            || c == '.'
            || ("+-".contains(c) && (i == 0 || text[..i].ends_with(['e', 'E'])))
            || exponent(text, i)
    });
    let end = number.last().map_or(0, |(i, c)| i + c.len_utf8());
    let value: f64 = text[..end].parse().ok()?;
    Some((value, text[end..].trim()))
}

/// Whether the letter at `i` begins an exponent: an e behind a digit and before one, or before a
/// sign.
fn exponent(text: &str, i: usize) -> bool {
    text[i..].starts_with(['e', 'E'])
        && text[..i].ends_with(|c: char| c.is_ascii_digit() || c == '.')
        && text[i + 1..].starts_with(|c: char| c.is_ascii_digit() || "+-".contains(c))
}

/// What a unit measures, and how many of the basic unit it is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Unit {
    /// Bits a second.
    Bits(f64),
    /// Bytes a second.
    BytesASecond(f64),
    /// Bytes.
    Bytes(f64),
    /// Bits.
    OnlyBits(f64),
    /// Metres.
    Metres(f64),
    /// The letter m: metres or minutes.
    LetterM,
    /// Seconds.
    Seconds(f64),
    /// A prefix alone, of 1000 or of 1024.
    Prefix(f64, f64),
}

/// What a unit is, where it is known. Case matters between bits (b) and bytes (B), and for m
/// (metres, or minutes of a time; milli is part of ms).
fn unit(text: &str) -> Option<Unit> {
    const PREFIXES: [(&str, f64, f64); 6] = [
        ("K", 1e3, 1024.0),
        ("k", 1e3, 1024.0),
        ("M", 1e6, 1048576.0),
        ("G", 1e9, 1073741824.0),
        ("T", 1e12, 1099511627776.0),
        ("", 1.0, 1.0),
    ];
    match text {
        "km" => return Some(Unit::Metres(1e3)),
        "m" => return Some(Unit::LetterM),
        "mi" | "miles" => return Some(Unit::Metres(1609.344)),
        "us" | "µs" => return Some(Unit::Seconds(1e-6)),
        "ms" => return Some(Unit::Seconds(1e-3)),
        "s" => return Some(Unit::Seconds(1.0)),
        "h" => return Some(Unit::Seconds(3600.0)),
        "d" => return Some(Unit::Seconds(86_400.0)),
        _ => {}
    }
    let (rest, decimal, binary) =
        PREFIXES.iter().find_map(|(p, d, b)| Some((text.strip_prefix(p)?, *d, *b)))?;
    match rest {
        "" if decimal > 1.0 => Some(Unit::Prefix(decimal, binary)),
        "bit/s" | "bits/s" | "bps" | "b/s" => Some(Unit::Bits(decimal)),
        "B/s" | "Bps" => Some(Unit::BytesASecond(decimal)),
        "iB/s" => Some(Unit::BytesASecond(binary)),
        "B" => Some(Unit::Bytes(decimal)),
        "iB" | "i" => Some(Unit::Bytes(binary)),
        "bit" | "bits" | "b" => Some(Unit::OnlyBits(decimal)),
        _ => None,
    }
}

/// A number with its unit; `right` is an example of what would be right.
fn measured(text: &str, what: &str, right: &str) -> Result<(f64, Unit), String> {
    let (value, name) = split(text).ok_or_else(|| {
        format!("'{text}' is no {what}; a number with a unit is right, such as {right}")
    })?;
    if name.is_empty() {
        return Err(format!("'{text}' has no unit; a {what} is written such as {right}"));
    }
    let unit = unit(name).ok_or_else(|| {
        format!("the unit '{name}' of '{text}' is not known; a {what} is written such as {right}")
    })?;
    if value < 0.0 || !value.is_finite() {
        return Err(format!("'{text}' is below 0; a {what} is written such as {right}"));
    }
    Ok((value, unit))
}

/// What a quantity of another kind is, for the sentence about it.
fn kind(unit: Unit) -> &'static str {
    match unit {
        Unit::Bits(_) | Unit::BytesASecond(_) => "a bandwidth (--bandwidth)",
        Unit::Bytes(_) | Unit::OnlyBits(_) | Unit::Prefix(..) => "a size (--size)",
        Unit::Metres(_) | Unit::LetterM => "a distance (--distance)",
        Unit::Seconds(_) => "a time (--rtt)",
    }
}

/// Bits a second.
pub fn bandwidth(text: &str) -> Result<f64, String> {
    match measured(text, "bandwidth", "400G (400 Gbit/s)")? {
        (value, Unit::Bits(of) | Unit::Prefix(of, _) | Unit::OnlyBits(of)) if value > 0.0 => {
            Ok(value * of)
        }
        (value, Unit::BytesASecond(of) | Unit::Bytes(of)) => {
            let right = with_prefix(8.0 * value * of, 1e3);
            Err(format!("'{text}' counts bytes; a bandwidth is in bits a second here: {right}"))
        }
        (_, unit @ (Unit::Metres(_) | Unit::LetterM | Unit::Seconds(_))) => Err(format!(
            "'{text}' is {}; a bandwidth is written such as 400G (400 Gbit/s)",
            kind(unit)
        )),
        _ => Err(format!(
            "'{text}' is no bandwidth; more than 0 is right, such as 400G (400 Gbit/s)"
        )),
    }
}

/// Whole bits a second.
pub fn rate(text: &str) -> Result<u64, String> {
    whole_number(bandwidth(text)?, 1.0, text, "bit/s")
}

/// Metres.
pub fn distance(text: &str) -> Result<f64, String> {
    match measured(text, "distance", "3750km")? {
        (value, Unit::Metres(of)) => Ok(value * of),
        (value, Unit::LetterM) => Ok(value),
        (_, Unit::Seconds(_)) => {
            Err(format!("'{text}' is a time; a round trip is given so: --rtt {}", text.trim()))
        }
        (_, unit) => {
            Err(format!("'{text}' is {}; a distance is written such as 3750km", kind(unit)))
        }
    }
}

/// Seconds.
pub fn time(text: &str) -> Result<f64, String> {
    match measured(text, "time", "25ms")? {
        (value, Unit::Seconds(of)) => Ok(value * of),
        (value, Unit::LetterM) => Ok(value * 60.0),
        (_, Unit::Metres(_)) => {
            Err(format!("'{text}' is a distance; it is given so: --distance {}", text.trim()))
        }
        (_, unit) => Err(format!("'{text}' is {}; a time is written such as 25ms", kind(unit))),
    }
}

/// Whole ns.
pub fn time_ns(text: &str) -> Result<u64, String> {
    whole_number(time(text)?, 1e9, text, "ns")
}

/// So many parts of a figure, which must be a whole number.
fn whole_number(figure: f64, parts: f64, text: &str, unit: &str) -> Result<u64, String> {
    let (exact, most) = (figure * parts, (1_u64 << 53) as f64);
    if exact > most || (exact - exact.round()).abs() > ROUNDING.max(exact * f64::EPSILON) {
        return Err(format!("'{text}' is no whole number of {unit}, of 2^53 at most"));
    }
    Ok(exact.round() as u64)
}

/// Bytes: K, M, G, T are powers of 1024, as are KiB …; KB … are powers of 1000. A number alone is
/// one of bytes.
pub fn size(text: &str) -> Result<u64, String> {
    const RIGHT: &str = "128M (128 MiB; 128MB is 128 million bytes, 128 are bytes)";
    let alone = text.trim().parse::<u64>().ok().map(|bytes| (bytes as f64, Unit::Bytes(1.0)));
    let bytes = match alone.map_or_else(|| measured(text, "size", RIGHT), Ok)? {
        (value, Unit::Bytes(of) | Unit::Prefix(_, of)) => value * of,
        (value, Unit::OnlyBits(of)) => {
            let right = with_prefix(value * of / 8.0, 1e3);
            return Err(format!("'{text}' counts bits; a size is in bytes: {right}B"));
        }
        (_, unit) => {
            return Err(format!("'{text}' is {}; a size is written such as {RIGHT}", kind(unit)))
        }
    };
    if bytes < 1.0 || bytes > (1_u64 << 50) as f64 {
        return Err(format!("'{text}' is out of bounds; 1B to 1024T are right"));
    }
    Ok(bytes as u64)
}

/// A probability, as such or in percent.
pub fn loss(text: &str) -> Result<f64, String> {
    const RIGHT: &str = "a probability from 0 to 1 is right, such as 1e-5, or a share such as 0.1%";
    let (value, unit) = split(text).ok_or_else(|| format!("'{text}' is no loss; {RIGHT}"))?;
    let loss = match unit {
        "" => value,
        "%" => value / 100.0,
        "ppm" => value / 1e6,
        _ => return Err(format!("a loss has no unit '{unit}'; {RIGHT}")),
    };
    match loss {
        l if (0.0..=1.0).contains(&l) => Ok(l),
        l if unit.is_empty() && l > 1.0 && l <= 100.0 => {
            Err(format!("a loss of {text} is above 1; {text} percent are {text}%"))
        }
        _ => Err(format!("a loss of {text} is no probability; {RIGHT}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_with_their_units() {
        assert_eq!(
            ["400G", "400Gbit/s", "400 Gbps", "0.4T", "400000Mb/s", "4e11bit/s"].map(bandwidth),
            [(); 6].map(|()| Ok(400e9))
        );
        assert_eq!(["3750km", "3.75e6 m", "3750 km"].map(distance), [(); 3].map(|()| Ok(3.75e6)));
        assert_eq!(
            ["25ms", "25000us", "0.025s", "25000µs"].map(|t| time(t).map(|s| (s * 1e9).round())),
            [(); 4].map(|()| Ok(25e6))
        );
        assert_eq!(
            ["128M", "128MiB", "0.125G", "131072K", "134217728B"].map(size),
            [(); 5].map(|()| Ok(128 << 20))
        );
        assert_eq!(size("128MB"), Ok(128_000_000));
        assert_eq!((size("128"), size("128B")), (Ok(128), Ok(128)));
        assert_eq!(
            ["1e-5", "0.001%", "10ppm", "0.00001", "1E-5"]
                .map(|t| loss(t).map(|l| (l * 1e9).round())),
            [(); 5].map(|()| Ok(1e4))
        );
        assert_eq!((loss("0"), loss("1"), loss("100%")), (Ok(0.0), Ok(1.0), Ok(1.0)));
    }

    /// Each sentence says what would be right.
    #[test]
    fn what_is_wrong_gets_a_sentence() {
        let sentences = [
            (bandwidth("400").unwrap_err(), "has no unit; a bandwidth is written such as 400G"),
            (
                bandwidth("50GB/s").unwrap_err(),
                "counts bytes; a bandwidth is in bits a second here: 400G",
            ),
            (bandwidth("50GB").unwrap_err(), "in bits a second here: 400G"),
            (bandwidth("25ms").unwrap_err(), "is a time (--rtt); a bandwidth"),
            (bandwidth("fast").unwrap_err(), "is no bandwidth"),
            (bandwidth("0G").unwrap_err(), "more than 0 is right"),
            (bandwidth("-4G").unwrap_err(), "below 0"),
            (distance("3750").unwrap_err(), "has no unit; a distance is written such as 3750km"),
            (distance("25ms").unwrap_err(), "is a time; a round trip is given so: --rtt 25ms"),
            (
                distance("400G").unwrap_err(),
                "is a size (--size); a distance is written such as 3750km",
            ),
            (distance("5leagues").unwrap_err(), "the unit 'leagues' of '5leagues' is not known"),
            (time("25").unwrap_err(), "has no unit; a time is written such as 25ms"),
            (time("3750km").unwrap_err(), "is a distance; it is given so: --distance 3750km"),
            (time("400Gbit/s").unwrap_err(), "is a bandwidth (--bandwidth)"),
            (size("1Gbit").unwrap_err(), "counts bits; a size is in bytes: 125MB"),
            (
                size("400Gbit/s").unwrap_err(),
                "is a bandwidth (--bandwidth); a size is written such as 128M",
            ),
            (size("0B").unwrap_err(), "1B to 1024T are right"),
            (size("9999999T").unwrap_err(), "1B to 1024T are right"),
            (loss("5").unwrap_err(), "5 percent are 5%"),
            (
                loss("1e5").unwrap_err(),
                "no probability; a probability from 0 to 1 is right, such as 1e-5",
            ),
            (loss("-1").unwrap_err(), "no probability"),
            (loss("1e-5km").unwrap_err(), "no unit 'km'"),
            (loss("often").unwrap_err(), "is no loss"),
            (loss("nan").unwrap_err(), "is no loss"),
        ];
        for (sentence, part) in sentences {
            assert!(sentence.contains(part), "'{sentence}' does not say '{part}'");
        }
    }

    #[test]
    fn whole_numbers_are_exact() {
        const DAY_US: u64 = 86_400_000_000;
        assert_eq!(
            ["10Gbit", "2.5G", "1.000000001Gbit/s", "64kbps", "1bit"].map(rate),
            [10_000_000_000, 2_500_000_000, 1_000_000_001, 64_000, 1].map(Ok)
        );
        assert_eq!(
            ["3s", "1.5ms", "2m", "200us", "1µs", "0s", "1440m", "24h", "1d"].map(time_ns),
            [3_000_000, 1_500, 120_000_000, 200, 1, 0, DAY_US, DAY_US, DAY_US]
                .map(|us| Ok(us * 1_000))
        );
        for wrong in ["3", "s", "", "-1s", "1.2.3s", "3w", "1e99s", "0.1234567890123s", "3km"] {
            assert!(time_ns(wrong).is_err(), "{wrong}");
        }
        for wrong in ["1", "0.5bit", "1GB", "0G", "99999999999T"] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
        let units = [("us", 1), ("ms", 1_000), ("m", 60_000_000)];
        assert_eq!(
            ["200us", "1.5ms", "0.001ms", "2m", ".5m", "1.us", "0us"].map(|t| whole(t, &units)),
            [200, 1_500, 1, 120_000_000, 30_000_000, 1, 0].map(Some)
        );
        for wrong in [
            "", "1", "us", ".us", "1.5us", "-1us", "1e3us", "1 us", "1..5ms", "1h", "+1us",
            "1.2.3ms",
        ] {
            assert_eq!(whole(wrong, &units), None, "{wrong}");
        }
        assert_eq!(whole("99999999999999999999m", &units), None);
        assert_eq!(whole("999999999999999999m", &units), None);
    }
}
