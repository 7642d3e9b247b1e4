//! RESP2, the protocol of Redis, as far as the directory uses it: commands written, answers read.
//!
//! The server is not trusted with this process's memory. Every read takes from one [`Budget`] for
//! all answers of a round: bytes, values and the depth of arrays are bounded, whatever lengths the
//! server announces, and nothing is reserved because of an announced length.

use std::fmt;
use std::io::{self, BufRead, Read};

/// Bytes of all answers of a round. The largest is the table of UD QPs that have moved, about 100
/// bytes for each: half a million of them fit.
pub(super) const MAX_ROUND_BYTES: usize = 64 << 20;
/// Values in all answers of a round, each member of an array counted: an empty value uses memory,
/// too.
pub(super) const MAX_ROUND_VALUES: usize = 2 << 20;
/// A line: a length, a number, a status or an error.
const MAX_LINE: usize = 4096;
/// Arrays in arrays: the log of changes has three.
const MAX_DEPTH: usize = 4;
/// Characters of a server's error that are shown.
const MAX_SHOWN: usize = 200;

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Nil,
    Integer(i64),
    Status(String),
    Bytes(Vec<u8>),
    Array(Vec<Value>),
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Error {
    /// The connection failed, or the time is over.
    Io(io::Error),
    /// The server refused the command, in these words: `CODE text`. They are safe to show.
    Refused(String),
    /// The answers are longer than any that the directory asks for.
    TooLong(String),
    /// The bytes are no answer.
    Malformed(String),
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        Error::Io(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(error) => error.fmt(f),
            Error::Refused(text) => f.write_str(text),
            Error::TooLong(what) => write!(f, "its answer is too long: {what}"),
            Error::Malformed(what) => write!(f, "its answer is not Redis's protocol: {what}"),
        }
    }
}

pub(super) type Result<T> = std::result::Result<T, Error>;

/// What the answers of a round may still use.
#[derive(Debug)]
pub(super) struct Budget {
    bytes: usize,
    values: usize,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget { bytes: MAX_ROUND_BYTES, values: MAX_ROUND_VALUES }
    }
}

impl Budget {
    fn take_bytes(&mut self, bytes: usize) -> Result<()> {
        self.bytes = self.bytes.checked_sub(bytes).ok_or_else(|| {
            Error::TooLong(format!("more than {} MiB at once", MAX_ROUND_BYTES >> 20))
        })?;
        Ok(())
    }

    fn take_value(&mut self) -> Result<()> {
        self.values = self.values.checked_sub(1).ok_or_else(|| {
            Error::TooLong(format!("more than {MAX_ROUND_VALUES} values at once"))
        })?;
        Ok(())
    }
}

/// Appends a command to what is sent.
pub(super) fn write(out: &mut Vec<u8>, words: &[&[u8]]) {
    out.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        out.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
}

/// Reads one answer.
pub(super) fn read(input: &mut impl BufRead, budget: &mut Budget) -> Result<Value> {
    value(input, budget, 0)
}

fn value(input: &mut impl BufRead, budget: &mut Budget, depth: usize) -> Result<Value> {
    budget.take_value()?;
    let line = line(input, budget)?;
    let (kind, rest) = line.split_first().ok_or_else(|| malformed("an empty line", &line))?;
    match kind {
        b'+' => Ok(Value::Status(shown(rest))),
        b'-' => Err(Error::Refused(shown(rest))),
        b':' => Ok(Value::Integer(number(rest)?)),
        b'$' => match number(rest)? {
            -1 => Ok(Value::Nil),
            length => bytes(input, budget, length).map(Value::Bytes),
        },
        b'*' => match number(rest)? {
            -1 => Ok(Value::Nil),
            length if length < 0 => Err(malformed("an array of the length", rest)),
            _ if depth == MAX_DEPTH => {
                Err(Error::TooLong(format!("arrays in arrays, more than {MAX_DEPTH} deep")))
            }
            length => {
                let mut values = Vec::new();
                for _ in 0..length {
                    values.push(value(input, budget, depth + 1)?);
                }
                Ok(Value::Array(values))
            }
        },
        _ => Err(malformed("an answer that begins with", &line)),
    }
}

/// A line without its end.
fn line(input: &mut impl BufRead, budget: &mut Budget) -> Result<Vec<u8>> {
    let mut line = Vec::new();
    let limit = MAX_LINE.min(budget.bytes) as u64;
    input.by_ref().take(limit).read_until(b'\n', &mut line)?;
    budget.take_bytes(line.len())?;
    match line.strip_suffix(b"\r\n") {
        Some(whole) => Ok(whole.to_vec()),
        None if line.len() == MAX_LINE => {
            Err(Error::TooLong(format!("a line of more than {MAX_LINE} bytes")))
        }
        None if line.len() as u64 == limit => budget.take_bytes(1).map(|()| line),
        None if line.ends_with(b"\n") => Err(malformed("a line without its end", &line)),
        None => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
    }
}

fn bytes(input: &mut impl BufRead, budget: &mut Budget, length: i64) -> Result<Vec<u8>> {
    let length = usize::try_from(length)
        .map_err(|_| malformed("bytes of the length", length.to_string().as_bytes()))?;
    budget.take_bytes(length.saturating_add(2))?;
    let mut bytes = Vec::new();
    input.by_ref().take(length as u64 + 2).read_to_end(&mut bytes)?;
    if bytes.len() < length + 2 {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    let end = bytes.split_off(length);
    match end == b"\r\n" {
        true => Ok(bytes),
        false => Err(malformed("bytes whose end is", &end)),
    }
}

fn number(text: &[u8]) -> Result<i64> {
    let number = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| malformed("a number that is none:", text))
}

fn malformed(what: &str, bytes: &[u8]) -> Error {
    Error::Malformed(format!("{what} '{}'", shown(&bytes[..bytes.len().min(32)])))
}

/// Words of the server as they can be shown on a terminal: clipped, control characters escaped.
fn shown(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let safe = |c: char| match c.is_control() || is_bidirectional(c) {
        true => c.escape_unicode().to_string(),
        false => c.to_string(),
    };
    let mut shown: String = text.chars().take(MAX_SHOWN).map(safe).collect();
    if text.chars().nth(MAX_SHOWN).is_some() {
        shown.push('…');
    }
    shown
}

/// Characters that reorder the text around them.
fn is_bidirectional(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(mut input: &[u8]) -> Result<Value> {
        read(&mut input, &mut Budget::default())
    }

    fn encode(value: &Value, out: &mut Vec<u8>) {
        match value {
            Value::Nil => out.extend_from_slice(b"$-1\r\n"),
            Value::Integer(n) => out.extend_from_slice(format!(":{n}\r\n").as_bytes()),
            Value::Status(text) => out.extend_from_slice(format!("+{text}\r\n").as_bytes()),
            Value::Bytes(bytes) => {
                out.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
                out.extend_from_slice(bytes);
                out.extend_from_slice(b"\r\n");
            }
            Value::Array(values) => {
                out.extend_from_slice(format!("*{}\r\n", values.len()).as_bytes());
                values.iter().for_each(|value| encode(value, out));
            }
        }
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Nil),
            any::<i64>().prop_map(Value::Integer),
            "[A-Za-z ]{0,20}".prop_map(Value::Status),
            proptest::collection::vec(any::<u8>(), 0..100).prop_map(Value::Bytes),
        ];
        leaf.prop_recursive(3, 64, 8, |inner| {
            proptest::collection::vec(inner, 0..8).prop_map(Value::Array)
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(value in values()) {
            let mut bytes = Vec::new();
            encode(&value, &mut bytes);
            prop_assert_eq!(parse(&bytes).unwrap(), value);
            for end in 0..bytes.len() {
                prop_assert!(matches!(parse(&bytes[..end]), Err(Error::Io(_))));
            }
        }

        #[test]
        fn garbage_is_an_error(bytes in proptest::collection::vec(
            prop_oneof![any::<u8>(), Just(b'*'), Just(b'$'), Just(b'\r'), Just(b'\n'), b'0'..=b'9'],
            0..300,
        )) {
            let mut input = &bytes[..];
            let mut budget = Budget::default();
            while read(&mut input, &mut budget).is_ok() {}
        }
    }

    /// An input without an end, which counts what is read of it.
    struct Endless<'a> {
        head: &'a [u8],
        again: &'a [u8],
        read: usize,
    }

    impl Read for Endless<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            for (at, byte) in (self.read..).zip(out.iter_mut()) {
                *byte = match self.head.get(at) {
                    Some(byte) => *byte,
                    None => self.again[(at - self.head.len()) % self.again.len()],
                };
            }
            self.read += out.len();
            Ok(out.len())
        }
    }

    #[test]
    fn an_answer_without_end_is_given_up() {
        for (head, again, most_bytes, word) in [
            ("*9000000000000000000\r\n", ":1\r\n", 9 << 20, "values"),
            ("*2000000000\r\n", "$6\r\nabcdef\r\n", 65 << 20, "values"),
            (
                "*2000000000\r\n",
                "$60\r\n0123456789012345678901234567890123456789012345678901234567\
              89\r\n",
                65 << 20,
                "64 MiB",
            ),
            ("$1073741824\r\n", "x", 1 << 20, "64 MiB"),
            ("$9223372036854775807\r\n", "x", 1 << 20, "64 MiB"),
            ("", "*1\r\n", 1 << 20, "deep"),
            ("-ERR ", "A", 1 << 20, "a line"),
            ("", "\r", 1 << 20, "a line"),
        ] {
            let endless = Endless { head: head.as_bytes(), again: again.as_bytes(), read: 0 };
            let mut input = io::BufReader::new(endless);
            let why = read(&mut input, &mut Budget::default()).unwrap_err();
            assert!(matches!(why, Error::TooLong(_)), "{head}{again}: {why}");
            assert!(why.to_string().contains(word), "{head}{again}: {why}");
            let read = input.get_ref().read;
            assert!(read <= most_bytes, "{head}{again}: {read} bytes were read");
        }
    }

    /// The budget is one for all answers of a round.
    #[test]
    fn many_answers_share_a_budget() {
        let endless = Endless { head: b"", again: b"*2\r\n:1\r\n:1\r\n", read: 0 };
        let (mut input, mut budget) = (io::BufReader::new(endless), Budget::default());
        let why = std::iter::repeat_with(|| read(&mut input, &mut budget)).find_map(Result::err);
        assert!(matches!(why, Some(Error::TooLong(_))), "{why:?}");
        assert!(input.get_ref().read <= 16 << 20);
    }

    #[test]
    fn what_a_server_says_is_safe_to_show() {
        let text = format!("-ERR \x1b]0;pwned\x07\u{202e}{}\r\n", "A".repeat(1000));
        let Err(Error::Refused(shown)) = parse(text.as_bytes()) else { panic!() };
        assert!(shown.chars().all(|c| !c.is_control() && c != '\u{202e}'), "{shown:?}");
        assert!(shown.starts_with("ERR \\u{1b}]0;pwned") && shown.len() < 400, "{shown}");
    }
}
