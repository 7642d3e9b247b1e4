//! When requests come, and how long they are.
//!
//! Gaps of a Poisson process are those of rate 1, divided by the rate: so the same seed gives the
//! same pattern at any rate, only closer together.

use serde::Serialize;

use crate::random::Random;
use crate::Error;

/// The most requests of a run.
pub const MOST_REQUESTS: usize = 1_000_000;
/// The most tokens of all answers of a run.
pub const MOST_TOKENS: u64 = 200_000_000;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Request {
    /// When it comes, in seconds from the beginning.
    pub arrival_s: f64,
    /// Tokens of its prompt; at least 1.
    pub prompt: u32,
    /// Tokens of its answer; at least 1.
    pub output: u32,
}

/// How requests follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// At equal distances.
    Fixed,
    /// Independently of each other (Poisson).
    Poisson,
}

/// Requests that are all alike.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stream {
    /// How they follow each other.
    pub pattern: Pattern,
    /// Requests a second.
    pub rate: f64,
    /// For how long they come, in seconds.
    pub lasts_s: f64,
    /// Tokens of a prompt.
    pub prompt: u32,
    /// Tokens of an answer.
    pub output: u32,
}

impl Stream {
    /// Its requests: those of a seed, for one of several replicas. At equal distances those of a
    /// second replica come between those of the first.
    pub fn requests(&self, seed: u64, replica: u64) -> Result<Vec<Request>, Error> {
        let expected = self.rate * self.lasts_s;
        let most = MOST_REQUESTS as f64 / 2.0;
        if !(self.rate > 0.0 && expected.is_finite() && expected < most) {
            let right = format!("more than 0, and up to {most:.0} requests in all, are right");
            return Err(Error::value("rate", "the rate of requests", self.rate, right));
        }
        let mut random = Random::part(seed, replica);
        let (mut units, mut all) = (0.0, Vec::new());
        for number in 0..MOST_REQUESTS {
            units = match self.pattern {
                Pattern::Fixed => number as f64 + if replica == 0 { 0.0 } else { 0.5 },
                // the logarithm of what is never 0
                Pattern::Poisson => units - (1.0 - random.unit()).ln(),
            };
            let arrival_s = units / self.rate;
            // a request at the very end does not come, also where the division is a little off
            if arrival_s >= self.lasts_s * (1.0 - 1e-12) {
                break;
            }
            all.push(Request { arrival_s, prompt: self.prompt, output: self.output });
        }
        match all.is_empty() {
            false => Ok(all),
            true => {
                let right = "a longer time or a higher rate is right: no request would come";
                Err(Error::value("rate", "the rate of requests", self.rate, right))
            }
        }
    }
}

/// Requests from a text: a line for each with the second that it comes, tokens of its prompt and of
/// its answer, with commas between; in order of time. What follows a `#` is a comment.
pub fn trace(text: &str) -> Result<Vec<Request>, Error> {
    const RIGHT: &str = "a line such as 12.5,2000,256 (second, prompt, answer) is right";
    let (mut all, mut tokens, mut before_s) = (Vec::new(), 0, 0.0);
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let wrong = |what: String| Error::Line { line: number + 1, what };
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let [second, prompt, output] = fields[..] else {
            return Err(wrong(format!("'{line}' has {} fields; {RIGHT}", fields.len())));
        };
        let arrival_s = match second.parse::<f64>() {
            Ok(s) if s.is_finite() && s >= 0.0 => s,
            _ => return Err(wrong(format!("'{second}' is no second; {RIGHT}"))),
        };
        if arrival_s < before_s {
            let text = format!("{arrival_s} s is before {before_s} s; lines in order are right");
            return Err(wrong(text));
        }
        let count = |text: &str, what: &str| match text.parse::<u32>() {
            Ok(tokens) if tokens > 0 => Ok(tokens),
            _ => {
                Err(wrong(format!("'{text}' is no number of tokens of {what}; 1 or more is right")))
            }
        };
        let request = Request {
            arrival_s,
            prompt: count(prompt, "a prompt")?,
            output: count(output, "an answer")?,
        };
        tokens += u64::from(request.output);
        if all.len() == MOST_REQUESTS || tokens > MOST_TOKENS {
            let most = format!("{MOST_REQUESTS} requests with {MOST_TOKENS} tokens of answers");
            return Err(wrong(format!("a trace has up to {most}; a shorter one is right")));
        }
        before_s = arrival_s;
        all.push(request);
    }
    match all.is_empty() {
        true => Err(Error::Line { line: 1, what: format!("there is no request; {RIGHT}") }),
        false => Ok(all),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(pattern: Pattern, rate: f64) -> Stream {
        Stream { pattern, rate, lasts_s: 1000.0, prompt: 100, output: 10 }
    }

    #[test]
    fn requests_come_at_their_rate() {
        let fixed = stream(Pattern::Fixed, 2.0).requests(1, 0).unwrap();
        assert_eq!(fixed.len(), 2000);
        assert_eq!((fixed[0].arrival_s, fixed[3].arrival_s), (0.0, 1.5));
        for rate in [0.3, 0.7, 1.1, 2.2, 3.3] {
            let count = stream(Pattern::Fixed, rate).requests(1, 0).unwrap().len();
            assert_eq!(count, (rate * 1000.0_f64).round() as usize, "{rate}");
        }
        assert_eq!(stream(Pattern::Fixed, 2.0).requests(1, 1).unwrap()[0].arrival_s, 0.25);
        let of =
            |rate, seed, replica| stream(Pattern::Poisson, rate).requests(seed, replica).unwrap();
        let poisson = of(2.0, 7, 0);
        assert!((1850..2150).contains(&poisson.len()), "{}", poisson.len());
        assert!(poisson.windows(2).all(|w| w[0].arrival_s < w[1].arrival_s));
        // gaps of a Poisson process vary as much as they are long
        let gaps: Vec<f64> = poisson.windows(2).map(|w| w[1].arrival_s - w[0].arrival_s).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let squares = gaps.iter().map(|g| (g - mean) * (g - mean)).sum::<f64>();
        let deviation = (squares / gaps.len() as f64).sqrt();
        assert!((deviation / mean - 1.0).abs() < 0.1, "{deviation} {mean}");
        assert_eq!(poisson, of(2.0, 7, 0));
        assert_ne!(poisson, of(2.0, 8, 0));
        assert_ne!(poisson, of(2.0, 7, 1));
        assert!((of(4.0, 7, 0)[9].arrival_s * 2.0 - poisson[9].arrival_s).abs() < 1e-9);
    }

    #[test]
    fn rates_without_sense_are_named() {
        for rate in [0.0, -1.0, f64::NAN, 1e9] {
            let says = stream(Pattern::Poisson, rate).requests(1, 0).unwrap_err().to_string();
            assert!(says.starts_with("the rate of requests is"), "{says}");
        }
        let says = stream(Pattern::Poisson, 1e-9).requests(1, 0).unwrap_err().to_string();
        assert!(says.contains("no request would come"), "{says}");
    }

    #[test]
    fn traces_name_the_line_that_is_wrong() {
        let text = "# second, prompt, answer\n0, 500, 1500\n\n1.5,20,3 # short\n";
        let read = trace(text).unwrap();
        assert_eq!(read[1], Request { arrival_s: 1.5, prompt: 20, output: 3 });
        assert_eq!(read.len(), 2);
        for (text, part) in [
            ("", "line 1: there is no request"),
            ("# nothing\n", "line 1: there is no request"),
            ("0,1,1\n1,2", "line 2: '1,2' has 2 fields"),
            ("0,1,1\n\n1,2,3,4", "line 3: '1,2,3,4' has 4 fields"),
            ("x,1,1", "line 1: 'x' is no second"),
            ("-1,1,1", "line 1: '-1' is no second"),
            ("inf,1,1", "line 1: 'inf' is no second"),
            ("2,1,1\n1,1,1", "line 2: 1 s is before 2 s"),
            ("0,0,1", "line 1: '0' is no number of tokens of a prompt"),
            ("0,1,0", "line 1: '0' is no number of tokens of an answer"),
            ("0,1,-4", "line 1: '-4' is no number of tokens of an answer"),
            ("0,1,1.5", "line 1: '1.5' is no number"),
            ("0,1,300000000", "line 1: a trace has up to"),
        ] {
            let says = trace(text).unwrap_err().to_string();
            assert!(says.starts_with(part) && says.contains("right"), "{text:?}: {says}");
        }
    }
}
