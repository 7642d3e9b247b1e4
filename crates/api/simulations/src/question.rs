//! Questions as words: the name of one, and its options.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};

use crate::month::MonthArgs;
use crate::plan::PlanArgs;
use crate::run::RunArgs;
use crate::serve::ServeArgs;
use crate::sweep::SweepArgs;
use crate::{Error, Kind, Result};

/// A question.
#[derive(Subcommand)]
pub(crate) enum Question {
    Plan(PlanArgs),
    Run(RunArgs),
    Sweep(SweepArgs),
    Month(MonthArgs),
    Serve(ServeArgs),
}

#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true, disable_help_subcommand = true)]
struct Words {
    #[command(subcommand)]
    question: Question,
}

impl Question {
    /// The question that some words are.
    pub(crate) fn read(words: impl IntoIterator<Item = String>) -> Result<Question> {
        Words::try_parse_from(words).map(|words| words.question).map_err(|e| wrong(&e))
    }
}

/// An error of a command line, without what is said of the command.
fn wrong(error: &clap::Error) -> Error {
    let name = |text: &str| {
        let option = text.trim_start_matches('-').split([' ', '=', '[']).next();
        option.unwrap_or_default().to_string()
    };
    let argument = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(one)) => Some(name(one)),
        Some(ContextValue::Strings(all)) => all.first().map(|one| name(one)),
        _ => None,
    };
    let reason = std::error::Error::source(error).map(|e| e.to_string());
    let text = match (error.kind(), reason) {
        (ErrorKind::ValueValidation, Some(reason)) => reason,
        _ => sentence(&error.render().to_string()),
    };
    Error { kind: Kind::Value, argument, text }
}

/// The first paragraph, as one line.
fn sentence(rendered: &str) -> String {
    let text = rendered.strip_prefix("error: ").unwrap_or(rendered);
    let lines = text.lines().take_while(|line| !line.trim().is_empty());
    lines.map(str::trim).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(words: &[&str]) -> (Option<String>, String) {
        let error = Question::read(words.iter().map(|w| w.to_string())).err().unwrap();
        (error.argument, error.text)
    }

    #[test]
    fn what_is_wrong_is_named_by_its_option() {
        for (words, argument, part) in [
            (&["plan", "--hosts=-1"][..], "hosts", "'-1' is no count; a whole number such as 8"),
            (&["plan", "--nic-rate=5Q"], "nic-rate", "400G (400 Gbit/s)"),
            (&["plan", "--efficiency=50"], "efficiency", "'50' is more than all; 50% is right"),
            (&["plan", "--share=x"], "share", "'x' is no share; above 0 and up to 1 is right"),
            (&["plan", "--fail=leaf3"], "fail", "tor3, rail2, pod1, spine=75%"),
            (&["plan", "--preset=x"], "preset", "there are a100, h100, h200, b200"),
            (&["plan", "--peak=much"], "peak", "'much' is no number; one such as 1.5"),
            (&["plan", "--share=1", "--efficiency=1"], "share", "cannot be used with"),
            (&["run", "--for=1d"], "fail", "required"),
            (&["sweep", "--lost=5-2"], "lost", "3 and 1-10 are right"),
            (&["sweep", "--patterns=0"], "patterns", "a whole number from 1 to 10000000 is right"),
            (&["sweep", "--cores=65536"], "cores", "from 1 to 65535"),
            (&["serve", "--arrivals=x"], "arrivals", "[possible values: fixed, poisson]"),
            (&["serve", "--prompt=0"], "prompt", "'0' is no number of tokens; 1 and more"),
            (&["serve", "--strategy=ours,x"], "strategy", "restart, reroute, dejavu"),
            (&["plan", "--host=1"], "host", "unexpected argument"),
        ] {
            let (found, text) = says(words);
            assert_eq!(found.as_deref(), Some(argument), "{words:?}: {text}");
            assert!(text.contains(part) && !text.contains("Usage"), "{words:?}: {text}");
        }
        assert!(says(&["dance"]).1.contains("dance"));
        assert!(says(&["plan", "--help"]).1.contains("--help"));
    }

    /// All options of all questions, with their defaults and conflicts, make sense to clap.
    #[test]
    fn options_make_sense() {
        <Words as clap::CommandFactory>::command().debug_assert();
    }
}
