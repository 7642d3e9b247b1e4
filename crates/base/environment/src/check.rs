//! What is wrong with an environment.

use std::ffi::OsString;

use crate::table::{variable, VARIABLES};

/// What the names of all variables begin with.
pub const PREFIX: &str = "UNBROKEN_";
/// So many letters may differ between a name and the one that was meant.
const MOST_MISTAKES: usize = 3;
/// Longer names and values are cut.
const MOST_SHOWN: usize = 80;

/// A sentence for each variable of this process that does nothing, since it is unknown, or has a
/// value that it cannot have.
pub fn wrong() -> Vec<String> {
    wrong_in(std::env::vars_os())
}

/// As [`wrong`], of another environment.
pub fn wrong_in(environment: impl Iterator<Item = (OsString, OsString)>) -> Vec<String> {
    let mut wrong: Vec<String> = environment
        .filter(|(name, _)| name.as_encoded_bytes().starts_with(PREFIX.as_bytes()))
        .filter_map(|(name, value)| sentence(&name.to_string_lossy(), &value))
        .collect();
    wrong.sort();
    wrong
}

fn sentence(name: &str, value: &OsString) -> Option<String> {
    let Some(variable) = variable(name) else {
        let meant = nearest(name).map_or_else(
            || "the variables are in docs/reference/environment.md".into(),
            |meant| format!("{meant} is right"),
        );
        return Some(format!("{} is no variable of Unbroken; {meant}", cut(name)));
    };
    let Some(text) = value.to_str() else {
        // A file may have any name.
        let any = variable.values.allow("\u{fffd}");
        return (!any).then(|| format!("{name} is not UTF-8; {}", variable.values.right()));
    };
    let fits = text.trim().is_empty() || variable.values.allow(text);
    let what = || variable.values.mistake(text).map_or(String::new(), |what| what + "; ");
    (!fits).then(|| format!("{name}={}: {}right is {}", cut(text), what(), variable.values.right()))
}

/// Text that anybody may have set, for one line of a terminal.
pub(crate) fn cut(text: &str) -> String {
    let shown: String =
        text.chars().take(MOST_SHOWN).map(|c| if c.is_control() { '?' } else { c }).collect();
    if text.chars().count() > MOST_SHOWN {
        shown + "…"
    } else {
        shown
    }
}

/// The name that was meant, if one is near.
fn nearest(name: &str) -> Option<&'static str> {
    // A name of any length comes from the environment.
    let short = name.len() <= MOST_SHOWN;
    let near = VARIABLES.iter().filter(|_| short).map(|v| (distance(name, v.name), v.name));
    near.filter(|(far, _)| *far <= MOST_MISTAKES).min().map(|(_, name)| name)
}

/// How many letters must be added, left out or changed to make one of the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(pairs: &[(&str, &str)]) -> Vec<String> {
        wrong_in(pairs.iter().map(|(name, value)| (name.into(), value.into())))
    }

    #[test]
    fn what_does_nothing_is_named_with_what_is_right() {
        assert_eq!(
            said(&[
                ("UNBROKEN_NIC", "10.0.0.1"),
                ("UNBROKEN_FAILOVER", "nope"),
                ("UNBROKEN_COLOUR_OF_THE_LOG", "1"),
                ("UNBROKEN_TIMEOUT", "32"),
                ("UNBROKEN_LOG", "nic=debug,failver=info"),
            ]),
            [
                "UNBROKEN_COLOUR_OF_THE_LOG is no variable of Unbroken; the variables are in \
                 docs/reference/environment.md",
                "UNBROKEN_FAILOVER=nope: right is 1/0, yes/no, on/off, true/false",
                "UNBROKEN_LOG=nic=debug,failver=info: 'failver' is no part and no level; parts are \
                 failover, nic, directory, collective, sdr, edge, verbs; right is 1/0, yes/no, \
                 on/off, true/false, a level (info), or parts with levels \
                 (failover=info,nic=debug)",
                "UNBROKEN_NIC is no variable of Unbroken; UNBROKEN_NICS is right",
                "UNBROKEN_TIMEOUT=32: right is a number from 0 to 31",
            ]
        );
    }

    #[test]
    fn what_is_right_or_no_ones_business_is_not_named() {
        let fine = [
            ("UNBROKEN_FAILOVER", "off"),
            ("UNBROKEN_FAILBACK", "No"),
            ("UNBROKEN_APM", "spread"),
            ("UNBROKEN_LOG", ""),
            ("UNBROKEN_LOG", "failover=info"),
            ("UNBROKEN_NICS", "10.0.0.1,10.0.1.1"),
            ("UNBROKEN_MAP", "0:1,2 1:3"),
            ("HOME", "/root"),
        ];
        assert!(said(&fine).is_empty(), "{:?}", said(&fine));
    }

    #[test]
    fn long_names_are_cut() {
        let said = said(&[(&format!("UNBROKEN_{}", "X".repeat(100_000)), "")]);
        assert!(said[0].len() < 200);
    }

    #[test]
    fn letters_are_counted() {
        assert_eq!(
            [("", "ab"), ("abc", "abc"), ("kitten", "sitting")].map(|(a, b)| distance(a, b)),
            [2, 0, 3]
        );
    }
}
