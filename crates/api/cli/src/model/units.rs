//! Quantities with units, as people write them. What is wrong gets a sentence that says what would
//! be right.

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
    /// Seconds.
    Seconds(f64),
    /// A prefix alone, of 1000 or of 1024.
    Prefix(f64, f64),
}

/// What a unit is, where it is known. Case matters between bits (b) and bytes (B), and for m
/// (metres; milli is part of ms).
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
        "m" => return Some(Unit::Metres(1.0)),
        "mi" | "miles" => return Some(Unit::Metres(1609.344)),
        "us" | "µs" => return Some(Unit::Seconds(1e-6)),
        "ms" => return Some(Unit::Seconds(1e-3)),
        "s" => return Some(Unit::Seconds(1.0)),
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
        Unit::Metres(_) => "a distance (--distance)",
        Unit::Seconds(_) => "a time (--rtt)",
    }
}

/// A number with few digits and a prefix of 1000 (or 1024).
pub(crate) fn with_prefix(figure: f64, base: f64) -> String {
    let prefixes = ["", "K", "M", "G", "T"];
    let mut power = 0;
    let mut figure = figure;
    while figure >= base && power + 1 < prefixes.len() {
        figure /= base;
        power += 1;
    }
    format!("{}{}", unbroken_chart::plain((figure * 1e3).round() / 1e3), prefixes[power])
}

/// Bits a second.
pub(crate) fn bandwidth(text: &str) -> Result<f64, String> {
    match measured(text, "bandwidth", "400G (400 Gbit/s)")? {
        (value, Unit::Bits(of) | Unit::Prefix(of, _) | Unit::OnlyBits(of)) if value > 0.0 => {
            Ok(value * of)
        }
        (value, Unit::BytesASecond(of) | Unit::Bytes(of)) => {
            let right = with_prefix(8.0 * value * of, 1e3);
            Err(format!("'{text}' counts bytes; a bandwidth is in bits a second here: {right}"))
        }
        (_, unit @ (Unit::Metres(_) | Unit::Seconds(_))) => Err(format!(
            "'{text}' is {}; a bandwidth is written such as 400G (400 Gbit/s)",
            kind(unit)
        )),
        _ => Err(format!(
            "'{text}' is no bandwidth; more than 0 is right, such as 400G (400 Gbit/s)"
        )),
    }
}

/// Metres.
pub(crate) fn distance(text: &str) -> Result<f64, String> {
    match measured(text, "distance", "3750km")? {
        (value, Unit::Metres(of)) => Ok(value * of),
        (_, Unit::Seconds(_)) => {
            Err(format!("'{text}' is a time; a round trip is given so: --rtt {}", text.trim()))
        }
        (_, unit) => {
            Err(format!("'{text}' is {}; a distance is written such as 3750km", kind(unit)))
        }
    }
}

/// Seconds.
pub(crate) fn time(text: &str) -> Result<f64, String> {
    match measured(text, "time", "25ms")? {
        (value, Unit::Seconds(of)) => Ok(value * of),
        (_, Unit::Metres(_)) => {
            Err(format!("'{text}' is a distance; it is given so: --distance {}", text.trim()))
        }
        (_, unit) => Err(format!("'{text}' is {}; a time is written such as 25ms", kind(unit))),
    }
}

/// Bytes: K, M, G, T are powers of 1024, as are KiB …; KB … are powers of 1000.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    const RIGHT: &str = "128M (128 MiB; 128MB is 128 million bytes, 128B are bytes)";
    let bytes = match measured(text, "size", RIGHT)? {
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
pub(crate) fn loss(text: &str) -> Result<f64, String> {
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

/// A time for people.
pub(crate) fn shown_time(seconds: f64) -> String {
    let (figure, unit) = match seconds {
        0.0 => return "0 s".into(),
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "us"),
    };
    let decimals = match figure {
        f if f >= 100.0 => 0,
        f if f >= 10.0 => 1,
        _ => 2,
    };
    format!("{figure:.decimals$} {unit}")
}

/// A bandwidth for people.
pub(crate) fn shown_rate(bits_a_second: f64) -> String {
    let text = with_prefix(bits_a_second, 1e3);
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    format!("{digits} {}bit/s", &text[digits.len()..])
}

/// A number of things in the mean, for people.
pub(crate) fn shown_count(count: f64) -> String {
    match count {
        c if c >= 10.0 => format!("{c:.0}"),
        c if c >= 0.1 || c == 0.0 => unbroken_chart::plain((c * 1e2).round() / 1e2),
        c => shown_loss(c),
    }
}

/// A probability for people.
pub(crate) fn shown_loss(loss: f64) -> String {
    match loss {
        l if l == 0.0 || (1e-3..1.0).contains(&l) => unbroken_chart::plain((l * 1e5).round() / 1e5),
        l => {
            let text = format!("{l:.1e}");
            text.replace(".0e", "e")
        }
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
            (size("128").unwrap_err(), "has no unit; a size is written such as 128M"),
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
    fn figures_are_for_people() {
        assert_eq!(
            [28.3554e-3, 1.31e-6, 1.5, 0.1766, 0.0].map(shown_time),
            ["28.4 ms", "1.31 us", "1.50 s", "177 ms", "0 s"]
        );
        assert_eq!(
            [0.0, 1e-5, 1.6e-4, 0.0159, 0.5, 1.0].map(shown_loss),
            ["0", "1e-5", "1.6e-4", "0.0159", "0.5", "1e0"]
        );
        assert_eq!(
            [0.0, 0.004, 0.328, 3.0, 32.5].map(shown_count),
            ["0", "0.004", "0.33", "3", "32"]
        );
        assert_eq!(
            [400e9, 1.25e6, 900.0].map(shown_rate),
            ["400 Gbit/s", "1.25 Mbit/s", "900 bit/s"]
        );
        assert_eq!(
            (with_prefix(400e9, 1e3), with_prefix(1536.0, 1024.0)),
            ("400G".into(), "1.5K".into())
        );
    }
}
