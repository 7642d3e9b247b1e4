//! `unbroken events`.

use std::time::Duration;

use unbroken_events::{read_events, Event, EventTail, Switch, SwitchKind, What};
use unbroken_fabric::{Runtime, TimeUs};

use crate::output::{print, print_json, Failure, Result};

/// How often a followed log is looked at.
const INTERVAL: Duration = Duration::from_millis(50);

pub(crate) fn events(runtime: &Runtime, json: bool, follow: bool) -> Result {
    let failed = |e| Failure::io(runtime.events().display(), e);
    let show = |event: &Event| {
        if json {
            print_json(event)
        } else {
            print(&line(event))
        }
    };
    if !follow {
        return read_events(runtime).map_err(failed)?.iter().try_for_each(show);
    }
    let mut tail = EventTail::open(runtime);
    loop {
        tail.poll().map_err(failed)?.iter().try_for_each(show)?;
        std::thread::sleep(INTERVAL);
    }
}

/// One event in words, with its time in seconds.
fn line(event: &Event) -> String {
    let what = match &event.what {
        What::Switch(switch) => switch_line(switch),
        What::Fault { fault, every_us, .. } => {
            let again =
                every_us.map_or(String::new(), |us| format!("  (again every {})", TimeUs(us)));
            format!("fault           {fault}{again}")
        }
        What::FaultClear { fault } => format!("fault cleared   {fault}"),
        What::PortDown { nic } => format!("port down       {nic}"),
        What::PortActive { nic } => format!("port active     {nic}"),
        What::DeviceFatal { nic } => format!("device fatal    {nic}"),
        What::GiveUp { host, qp, why } => format!("gave up         host {host} qp {qp:#x}: {why}"),
        What::Unprotected { host, qp, why } => {
            format!("unprotected     host {host} qp {qp:#x}: {why}")
        }
        What::PathMigrated { host, qp, to } => {
            format!("migrated        host {host} qp {qp:#x} to {to}")
        }
        What::PathMigrationFailed { host, qp, from, to } => {
            format!("not migrated    host {host} qp {qp:#x} from {from} to {to}")
        }
        What::DirectoryLost { host, why } => format!("directory lost  host {host}: {why}"),
        What::DirectoryBack { host } => format!("directory back  host {host}"),
    };
    format!("{:>14.6}  {what}\n", event.time_us as f64 / 1e6)
}

fn switch_line(s: &Switch) -> String {
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
        event.time_us = 12_345_678;
        assert_eq!(
            line(&event),
            "     12.345678  switched        host a qp 0x102 a/0-b/0 to a/1-b/1 (epoch 1; noticed after 0.31 ms, \
             switched in 0.42 ms, 12 sent again): device fatal\n"
        );
        let (to, reason) = (switch.from.clone(), "wedged".into());
        event.what = What::Switch(Switch { to, reason, epoch: 2, ..switch });
        assert_eq!(
            line(&event),
            "     12.345678  revived         host a qp 0x102 on a/0-b/0 (epoch 2; noticed after 0.31 ms, moves again after \
             0.42 ms, 12 sent again): wedged\n"
        );
    }
}
