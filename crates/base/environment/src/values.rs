//! What a variable may be set to.

use std::net::IpAddr;

use crate::log_filter::parse_log_filter;

/// The words for on and off, in pairs.
pub const FLAG_WORDS: [(&str, &str); 4] =
    [("1", "0"), ("yes", "no"), ("on", "off"), ("true", "false")];

/// Reads a word for on or off, in capitals or not.
pub fn parse_flag(text: &str) -> Option<bool> {
    let is = |word: &str| text.trim().eq_ignore_ascii_case(word);
    FLAG_WORDS.iter().find_map(|(on, off)| match (is(on), is(off)) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    })
}

/// What a variable may be set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// On or off.
    Flag,
    /// On or off, or one of these words.
    FlagOr(&'static [&'static str]),
    /// One of these words.
    Words(&'static [&'static str]),
    /// A whole number, at most so large.
    Number(u64),
    /// An IP address.
    Address,
    /// IP addresses, with commas.
    Addresses,
    /// Where queue pairs go: `0:1,2 1:3-2`.
    Map,
    /// On or off, a level, or parts with levels.
    LogFilter,
    /// What whoever uses it checks; this says what it is.
    Text(&'static str),
}

impl Values {
    /// Whether it may be set to this.
    pub fn allow(self, text: &str) -> bool {
        let text = text.trim();
        let is_number = |word: &str| word.trim().parse::<u8>().is_ok();
        match self {
            Values::Flag => parse_flag(text).is_some(),
            Values::FlagOr(words) => parse_flag(text).is_some() || words.contains(&text),
            Values::Words(words) => words.contains(&text),
            Values::Number(most) => text.parse::<u64>().is_ok_and(|number| number <= most),
            Values::Address => text.parse::<IpAddr>().is_ok(),
            Values::Addresses => text.split(',').all(|word| word.trim().parse::<IpAddr>().is_ok()),
            Values::Map => text.split_whitespace().all(|entry| {
                entry
                    .split_once(':')
                    .is_some_and(|(nic, to)| is_number(nic) && to.split([',', '-']).all(is_number))
            }),
            Values::LogFilter => parse_log_filter(text).is_ok(),
            Values::Text(_) => true,
        }
    }

    /// Which word of it is wrong, where that is known.
    pub fn mistake(self, text: &str) -> Option<String> {
        match self {
            Values::LogFilter => parse_log_filter(text).err(),
            _ => None,
        }
    }

    /// What is right, for people.
    pub fn right(self) -> String {
        let flags = || {
            let pairs: Vec<String> =
                FLAG_WORDS.iter().map(|(on, off)| format!("{on}/{off}")).collect();
            pairs.join(", ")
        };
        match self {
            Values::Flag => flags(),
            Values::FlagOr(words) => format!("{}, {}", flags(), words.join(", ")),
            Values::Words(words) => words.join(", "),
            Values::Number(most) => format!("a number from 0 to {most}"),
            Values::Address => "an IP address".into(),
            Values::Addresses => "IP addresses, with commas".into(),
            Values::Map => "NICs as 0:1,2 1:3-2".into(),
            Values::LogFilter => format!(
                "{}, a level (info), or parts with levels (failover=info,nic=debug)",
                flags()
            ),
            Values::Text(what) => what.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_words_are_on_and_off() {
        for (on, off) in FLAG_WORDS {
            assert_eq!((parse_flag(on), parse_flag(off)), (Some(true), Some(false)));
        }
        assert_eq!((parse_flag("Yes"), parse_flag(" OFF ")), (Some(true), Some(false)));
        for neither in ["", "2", "y", "nope", "enabled"] {
            assert_eq!(parse_flag(neither), None, "{neither}");
        }
    }

    #[test]
    fn values_are_told_apart() {
        let many = [
            (Values::FlagOr(&["spread"]), "spread", "spred"),
            (Values::Words(&["full", "plain"]), "plain", "Plain"),
            (Values::Number(31), "31", "32"),
            (Values::Number(u32::MAX as u64), "7", "-1"),
            (Values::Address, "fd00::2", "host7"),
            (Values::Addresses, "10.0.0.1, fd00::2", "10.0.0.1,eth0"),
            (Values::Map, "0:1,2  1:3-2", "0=1"),
            (Values::LogFilter, "failover=info", "failover=loud"),
        ];
        for (values, right, wrong) in many {
            assert!(values.allow(right) && !values.allow(wrong), "{values:?}");
            assert!(!values.right().is_empty());
        }
    }
}
