//! What `UNBROKEN_LOG` asks for.

use std::str::FromStr;

use env_filter::Builder;
pub use env_filter::Filter as LogFilter;
use log::LevelFilter;

use crate::check::cut;
use crate::table::LOG;
use crate::values::parse_flag;

/// The parts of the project that tell something, as the variable names them.
pub const LOG_PARTS: [&str; 7] =
    ["failover", "nic", "directory", "collective", "sdr", "edge", "verbs"];

/// What a flag that is on asks for: the reasons of errors, and what else is wrong.
const ON: &str = "warn";

/// Reads a flag, a level, or parts with levels: `failover=info,nic=debug`. `None`: nothing is to be
/// told. The error names the word that is wrong, and what would be right.
pub fn parse_log_filter(text: &str) -> Result<Option<LogFilter>, String> {
    let text = match parse_flag(text) {
        Some(false) => return Ok(None),
        Some(true) => ON,
        None => text.trim(),
    };
    for word in text.split(',').map(str::trim) {
        let (part, level) = match word.split_once('=') {
            Some((part, level)) => (Some(part.trim()), Some(level.trim())),
            None if LevelFilter::from_str(word).is_ok() => (None, None),
            None => (Some(word), None),
        };
        // The library would take any name, and find nothing of it.
        if let Some(part) = part.filter(|part| !LOG_PARTS.contains(part)) {
            return Err(format!("'{}' is no part and no level; parts are {}", cut(part), list()));
        }
        if let Some(level) = level.filter(|level| LevelFilter::from_str(level).is_err()) {
            let right = "error, warn, info, debug, trace or off";
            return Err(format!("'{}' is no level; right is {right}", cut(level)));
        }
    }
    Builder::new().try_parse(text).map(|builder| Some(builder.build())).map_err(|e| e.to_string())
}

fn list() -> String {
    LOG_PARTS.join(", ")
}

/// What the variable asks for. One that is wrong asks for nothing, and [`crate::wrong`] names it.
pub fn log_filter() -> Option<LogFilter> {
    crate::text(LOG).and_then(|text| parse_log_filter(&text).ok().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;
    use log::{Level, Metadata};

    fn tells(text: &str, part: &str, level: Level) -> bool {
        let filter = parse_log_filter(text).unwrap();
        let line = Metadata::builder().target(part).level(level).build();
        filter.is_some_and(|filter| filter.enabled(&line))
    }

    #[test]
    fn flags_levels_and_parts_are_told_apart() {
        for on in ["1", "yes", "On", "true", "warn", " WARN "] {
            assert!(tells(on, "verbs", Level::Warn) && !tells(on, "failover", Level::Info), "{on}");
        }
        for off in ["0", "no", "off", "false", "verbs=off"] {
            assert!(!tells(off, "verbs", Level::Error), "{off}");
        }
        let two = "failover=info, nic=debug";
        assert!(tells(two, "failover", Level::Info) && !tells(two, "failover", Level::Debug));
        assert!(tells(two, "nic", Level::Debug) && !tells(two, "verbs", Level::Error));
        assert!(tells("warn,sdr=trace", "sdr", Level::Trace));
        assert!(
            tells("warn,sdr=trace", "edge", Level::Warn) && tells("edge", "edge", Level::Trace)
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, named) in [
            ("failver=info", "'failver' is no part"),
            ("failover=infos", "'infos' is no level"),
            ("2", "'2' is no part"),
            ("failover=info,,", "'' is no part"),
            ("failover=info/x", "'info/x' is no level"),
            ("failover=info=warn", "'info=warn' is no level"),
            ("=info", "'' is no part"),
        ] {
            let said = parse_log_filter(text).map(|_| ()).unwrap_err();
            assert!(said.starts_with(named), "{text}: {said}");
        }
    }
}
