//! Events in words, for people.

use jiff::tz::TimeZone;
use jiff::Timestamp;
use unbroken_events::{Event, Switch, SwitchKind, What};
use unbroken_fabric::TimeUs;

/// What happened, in one line.
pub fn event_in_words(event: &Event) -> String {
    match &event.what {
        What::Switch(switch) => switch_in_words(switch),
        What::Fault { fault, every_us, .. } => {
            let again =
                every_us.map_or(String::new(), |us| format!("  (again every {})", TimeUs(us)));
            format!("fault           {fault}{again}")
        }
        What::FaultClear { fault } => format!("fault cleared   {fault}"),
        What::PortDown { nic } => format!("port down       {nic}"),
        What::PortActive { nic } => format!("port active     {nic}"),
        What::DeviceFatal { nic } => format!("device fatal    {nic}"),
        What::GiveUp { host, qp, why, .. } => {
            format!("gave up         host {host} qp {qp:#x}: {why}")
        }
        What::Unprotected { host, qp, why } => {
            format!("unprotected     host {host} qp {qp:#x}: {why}")
        }
        What::PeerFound { host, qp, after_us } => {
            format!("peer found      host {host} qp {qp:#x}: after {} ms", after_us / 1000)
        }
        What::PathMigrated { host, qp, to } => {
            format!("migrated        host {host} qp {qp:#x} to {to}")
        }
        What::PathMigrationFailed { host, qp, from, to } => {
            format!("not migrated    host {host} qp {qp:#x} from {from} to {to}")
        }
        What::DirectoryLost { host, why } => format!("directory lost  host {host}: {why}"),
        What::DirectoryBack { host } => format!("directory back  host {host}"),
    }
}

fn switch_in_words(s: &Switch) -> String {
    let kind = match s.kind {
        // A QP that stood still by itself, on a path that lives, began anew there.
        _ if s.from == s.to => "revived",
        SwitchKind::Passive => "switched",
        SwitchKind::Planned => "planned switch",
    };
    let path =
        if s.from == s.to { format!("on {}", s.to) } else { format!("{} to {}", s.from, s.to) };
    let done = if s.from == s.to { "moves again after" } else { "switched in" };
    let ms = |us: u64| format!("{:.2} ms", us as f64 / 1e3);
    let detected = s.detect_us.map_or(String::new(), |us| format!("noticed after {}, ", ms(us)));
    format!(
        "{kind:<14}  host {} qp {:#x} {path} (epoch {}; {detected}{done} {}, {} sent again): {}",
        s.host,
        s.qp,
        s.epoch,
        ms(s.switch_us),
        s.replayed,
        s.reason
    )
}

/// A time of the wall clock, in µs since the epoch of Unix, as people in this time zone write it:
/// `2026-11-28 14:09:25.123456`.
pub fn wall_in_words(wall_us: u64) -> String {
    in_zone(wall_us, TimeZone::system(), "%Y-%m-%d %H:%M:%S%.6f")
}

/// A time of the wall clock, in µs since the epoch of Unix, without the day: `14:09:25`.
pub fn clock_in_words(wall_us: u64) -> String {
    in_zone(wall_us, TimeZone::system(), "%H:%M:%S")
}

fn in_zone(wall_us: u64, zone: TimeZone, format: &str) -> String {
    let at = i64::try_from(wall_us).ok().and_then(|us| Timestamp::from_microsecond(us).ok());
    // A log that was damaged may have any number.
    at.map_or_else(|| "?".into(), |at| at.to_zoned(zone).strftime(format).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_is_one_line() {
        let switch = Switch {
            kind: SwitchKind::Passive,
            host: "a".into(),
            qp: 0x102,
            from: "a/0-b/0".into(),
            to: "a/1-b/1".into(),
            epoch: 1,
            reason: "device fatal".into(),
            on_path_since_us: 0,
            detected_at_us: 0,
            detect_us: Some(310),
            switch_us: 420,
            replayed: 12,
        };
        let mut event = Event::now(What::Switch(switch.clone()));
        assert_eq!(
            event_in_words(&event),
            "switched        host a qp 0x102 a/0-b/0 to a/1-b/1 (epoch 1; noticed after 0.31 ms, \
             switched in 0.42 ms, 12 sent again): device fatal"
        );
        let (to, reason) = (switch.from.clone(), "wedged".into());
        event.what = What::Switch(Switch { to, reason, epoch: 2, ..switch });
        assert_eq!(
            event_in_words(&event),
            "revived         host a qp 0x102 on a/0-b/0 (epoch 2; noticed after 0.31 ms, moves \
             again after 0.42 ms, 12 sent again): wedged"
        );
    }

    #[test]
    fn times_are_those_of_the_wall_clock() {
        let text = in_zone(1_700_000_000_123_456, TimeZone::UTC, "%Y-%m-%d %H:%M:%S%.6f");
        assert_eq!(text, "2023-11-14 22:13:20.123456");
        assert_eq!(wall_in_words(u64::MAX), "?");
    }
}
