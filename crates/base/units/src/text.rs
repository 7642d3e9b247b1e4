//! Text of others, made safe to show: names of programs, reasons, lines of logs.

/// What stands for a character that is not shown.
const REPLACEMENT: char = '\u{fffd}';

/// Whether a terminal, or a page, would do something else with a character than show it: move its
/// cursor, set its title, turn the text around it round.
pub fn is_active(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// So many of something: `1 switch`, `2 switches`.
pub fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// A name or a reason as one line that a terminal shows and does not obey.
pub fn shown(text: &str) -> String {
    text.replace(is_active, REPLACEMENT.encode_utf8(&mut [0; 4]))
}

/// Whole lines, as [`shown`], with their ends and tabs.
pub fn shown_lines(text: &str) -> String {
    let active = |c: char| is_active(c) && c != '\n' && c != '\t';
    text.replace(active, REPLACEMENT.encode_utf8(&mut [0; 4]))
}

/// JSON in which such characters are written as escapes, so that a terminal shows it and a reader
/// gets the same values.
pub fn escaped_json(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        match is_active(c) && c != '\n' {
            // They are in strings alone, and none needs two units of UTF-16.
            true => escaped += &format!("\\u{:04x}", u32::from(c)),
            false => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_not_many() {
        let of = |count| counted(count, "switch", "switches");
        assert_eq!([of(0), of(1), of(2)], ["0 switches", "1 switch", "2 switches"]);
    }

    #[test]
    fn what_a_terminal_would_obey_is_replaced() {
        let name = "x\u{1b}]0;pwn\u{7}\u{9b}2J\u{202e}<b>\n\"y";
        assert_eq!(shown(name), "x\u{fffd}]0;pwn\u{fffd}\u{fffd}2J\u{fffd}<b>\u{fffd}\"y");
        assert_eq!(shown_lines("a\tb\r\nc"), "a\tb\u{fffd}\nc");
        let escaped = escaped_json("{\"a\":\"\u{9b}\u{202e}é\"}\n");
        assert_eq!(escaped, "{\"a\":\"\\u009b\\u202eé\"}\n");
    }
}
