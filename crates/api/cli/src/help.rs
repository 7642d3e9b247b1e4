//! Help that fits a terminal of 80 columns and can still be pasted.
//!
//! clap wraps options; what stands behind them it would cut at any blank, also in the middle of an
//! example. Here prose is filled anew, a table's second column keeps its place, and a command goes
//! on in the next line behind a backslash.

mod groups;

use clap::Command;

/// Columns of a terminal that is as narrow as they come.
pub(crate) const COLUMNS: usize = 80;
/// A command goes on so far behind its beginning.
const CONTINUED: &str = "    ";

/// The same command line with help that fits, and its commands in groups.
pub(crate) fn prepared(command: Command) -> Command {
    groups::grouped(fitted(command))
}

/// The same with help that fits, in all subcommands.
fn fitted(command: Command) -> Command {
    let after = command.get_after_help().map(|text| fit(&text.to_string()));
    let command = command.mut_subcommands(fitted);
    match after {
        Some(text) => command.after_help(text),
        None => command,
    }
}

/// A text with no line that is too long, unless a word is.
fn fit(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut prose: Vec<&str> = Vec::new();
    // The empty line at the end has the last paragraph filled.
    for line in text.lines().chain([""]) {
        if !line.is_empty() && !line.starts_with(' ') {
            prose.push(line);
            continue;
        }
        if prose.iter().any(|l| is_long(l)) {
            lines.extend(pack(prose.join(" ").split(' '), "", "", ""));
        } else {
            lines.extend(prose.iter().map(ToString::to_string));
        }
        prose.clear();
        match is_long(line) {
            true => lines.extend(indented(line)),
            false => lines.push(line.into()),
        }
    }
    lines.join("\n").trim_end().into()
}

fn is_long(line: &str) -> bool {
    line.chars().count() > COLUMNS
}

/// An indented line: a row of a table, or a command, which may have a comment behind it.
fn indented(line: &str) -> Vec<String> {
    let indent = &line[..line.len() - line.trim_start().len()];
    if let Some((command, comment)) = line.split_once("  #") {
        let mut lines = vec![format!("{indent}#{comment}")];
        lines.extend(indented(command.trim_end()));
        return lines;
    }
    let body = &line[indent.len()..];
    if let Some(gap) = body.find("  ") {
        let column = body.len() - body[gap..].trim_start().len();
        let head = &line[..indent.len() + column];
        let rest = " ".repeat(head.chars().count());
        return pack(body[column..].split(' '), head, &rest, "");
    }
    let rest = format!("{indent}{CONTINUED}");
    pack(words(body).into_iter(), indent, &rest, " \\")
}

/// The words of a command; what is quoted is not taken apart.
fn words(command: &str) -> Vec<&str> {
    let (mut words, mut from, mut quote) = (Vec::new(), 0, None);
    for (at, c) in command.char_indices() {
        match (c, quote) {
            (' ', None) => {
                words.push(&command[from..at]);
                from = at + 1;
            }
            ('\'' | '"', None) => quote = Some(c),
            (c, Some(open)) if c == open => quote = None,
            _ => {}
        }
    }
    words.push(&command[from..]);
    words
}

/// Lines that begin with `first`, then `rest`; all but the last end with `tail`.
fn pack<'a>(
    words: impl Iterator<Item = &'a str>,
    first: &str,
    rest: &str,
    tail: &str,
) -> Vec<String> {
    let (mut lines, mut line, mut empty) = (Vec::new(), first.to_string(), true);
    for word in words.filter(|word| !word.is_empty()) {
        let long = line.chars().count() + 1 + word.chars().count() + tail.len() > COLUMNS;
        if !empty && long {
            lines.push(line + tail);
            (line, empty) = (rest.to_string(), true);
        }
        if !empty {
            line.push(' ');
        }
        line += word;
        empty = false;
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line;

    /// The lines of a command's help that are too long, and those of its subcommands'.
    fn wide(command: &mut Command, path: &str) -> Vec<String> {
        let text = command.render_long_help().to_string();
        let lines = text.lines().filter(|line| is_long(line));
        let mut found: Vec<String> = lines.map(|line| format!("{path}: {line}")).collect();
        for inner in command.get_subcommands_mut() {
            let path = format!("{path} {}", inner.get_name());
            found.extend(wide(inner, &path));
        }
        found
    }

    #[test]
    fn all_help_fits_a_narrow_terminal() {
        let mut command = command_line();
        command.build();
        let wide = wide(&mut command, "unbroken");
        assert!(wide.is_empty(), "longer than {COLUMNS} columns:\n{}", wide.join("\n"));
    }

    #[test]
    fn what_fits_stays_as_it_is() {
        let text = "Examples:\n  unbroken status\n\nShort\nlines.";
        assert_eq!(fit(text), text);
    }

    #[test]
    fn prose_is_filled_and_commands_can_be_pasted() {
        let long = "word ".repeat(30);
        let text = fit(&format!("{long}\nand more"));
        assert_eq!(text.replace('\n', " "), format!("{long}and more"));
        assert!(text.lines().all(|line| !is_long(line)), "{text}");
        let option = "--option value ".repeat(6);
        assert_eq!(
            fit(&format!("  unbroken {option}'one word'   # what it does")),
            "  # what it does\n  unbroken --option value --option value --option value --option \
             value \\\n      --option value --option value 'one word'"
        );
    }

    #[test]
    fn a_table_keeps_its_columns() {
        let row = format!("  nic a/0 dead   {}", "does ".repeat(16));
        let text = fit(&row);
        let (first, second) = text.split_once('\n').unwrap();
        assert!(first.starts_with("  nic a/0 dead   does does"), "{text}");
        assert!(second.starts_with("                 does"), "{text}");
    }
}
