//! The story as people read it.

use std::cell::Cell;
use std::io::{self, IsTerminal, Write};

/// Columns of a bar.
const BAR: usize = 20;

/// Writes the story: on a terminal the last line is drawn again and again, elsewhere lines follow
/// each other.
pub(crate) struct Screen {
    to_stderr: bool,
    terminal: bool,
    live: Cell<bool>,
}

impl Screen {
    /// Writes to stdout, or to stderr where stdout is for something else.
    pub(crate) fn new(to_stderr: bool) -> Screen {
        let terminal =
            if to_stderr { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
        Screen { to_stderr, terminal, live: Cell::new(false) }
    }

    /// How many live lines a second are right.
    pub(crate) fn refresh_us(&self) -> u64 {
        if self.terminal {
            200_000
        } else {
            500_000
        }
    }

    /// A line that stays.
    pub(crate) fn say(&self, line: &str) {
        let end = if self.live.replace(false) { "\n" } else { "" };
        self.write(&format!("{end}{line}\n"));
    }

    /// The head of a part.
    pub(crate) fn title(&self, title: &str) {
        let (on, off) = if self.terminal { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
        self.say(&format!("\n{on}{title}{off}"));
    }

    /// A line about now, which on a terminal takes the place of the one before.
    pub(crate) fn live(&self, line: &str) {
        if self.terminal {
            self.live.set(true);
            self.write(&format!("\r\x1b[K{line}"));
        } else {
            self.say(line);
        }
    }

    // Nobody reads any more: the demo goes on, since its files are wanted too.
    fn write(&self, text: &str) {
        let _ = if self.to_stderr {
            io::stderr().write_all(text.as_bytes())
        } else {
            io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush())
        };
    }
}

/// A bar of `value` of `full`, with the figure.
pub(crate) fn bar(name: &str, value: f64, full: f64) -> String {
    let eighths = (value / full.max(f64::MIN_POSITIVE) * (BAR * 8) as f64)
        .round()
        .clamp(0.0, (BAR * 8) as f64) as usize;
    let mut text = "█".repeat(eighths / 8);
    if !eighths.is_multiple_of(8) {
        text.extend(char::from_u32(0x2590 - (eighths % 8) as u32));
    }
    let blank = " ".repeat(BAR - text.chars().count());
    format!("{name} {text}{blank} {value:5.1} Gbit/s")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_one_width() {
        assert_eq!(bar("a/0", 0.0, 10.0), format!("a/0 {}   0.0 Gbit/s", " ".repeat(BAR)));
        assert_eq!(bar("a/0", 10.0, 10.0), format!("a/0 {}  10.0 Gbit/s", "█".repeat(BAR)));
        let widths = (0..=200).map(|n| bar("a/0", f64::from(n) / 10.0, 10.0).chars().count());
        assert!(widths.min() == Some(bar("a/0", 0.0, 10.0).chars().count()));
        assert!(bar("a/0", 5.0 / 20.0, 10.0).contains('▌'));
        bar("a/0", 1.0, 0.0);
    }
}
