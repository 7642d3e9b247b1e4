//! `unbroken events`.

use std::time::Duration;

use unbroken_events::{Event, EventLog, EventTail, Timeline};
use unbroken_fabric::now_us;
use unbroken_observe::{event_in_words, wall_in_words};
use unbroken_units::text::shown;

use crate::output::{print, print_json, wait, Failure, Result};
use crate::place::Place;

/// How often a followed log is looked at.
const INTERVAL: Duration = Duration::from_millis(50);

/// Empties the log.
pub(crate) fn clear(place: &Place) -> Result {
    let Some(runtime) = place.look()? else { return Ok(()) };
    EventLog::open(&runtime).clear().map_err(|e| Failure::io(runtime.events().display(), e))
}

pub(crate) fn events(place: &Place, json: bool, follow: bool) -> Result {
    let runtime = match place.look()? {
        Some(runtime) => runtime,
        // What is followed may come later.
        None if follow => place.wait()?,
        None => return Ok(()),
    };
    let runtime = &runtime;
    let failed = |e| Failure::io(runtime.events().display(), e);
    let show = |event: &Event| {
        if json {
            print_json(event)
        } else {
            print(&line(event))
        }
    };
    let (mut tail, mut timeline) = (EventTail::open(runtime), Timeline::default());
    loop {
        timeline.add(tail.poll().map_err(failed)?);
        timeline.due(now_us()).iter().try_for_each(show)?;
        if !follow {
            return Ok(());
        }
        wait(INTERVAL)?;
    }
}

/// One event in words, with its time by the wall clock: one line, whatever whoever can write the
/// log has put into it.
fn line(event: &Event) -> String {
    let words = shown(&event_in_words(event));
    format!("{}  {words}\n", wall_in_words(event.wall_us))
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_events::What;

    #[test]
    fn a_log_does_not_speak_to_the_terminal() {
        let fault = "nic \u{1b}[31m a/0\u{202e}\n dead".to_owned();
        let what = What::Fault { fault, lasts_us: None, every_us: None };
        let line = line(&Event::at(what, 1));
        assert!(line.ends_with('\n') && line.matches('\u{fffd}').count() == 3, "{line:?}");
    }
}
