//! Events as lines for people who watch a program's stderr (`UNBROKEN_LOG`): one for each.

use unbroken_events::{Switch, SwitchKind, What};
use unbroken_failover_protocol::Reason;
use unbroken_log::{is_told, tell, Level, Part};

/// Tells an event, if somebody wants it.
pub(crate) fn tell_event(what: &What) {
    let Some((part, level)) = kind(what) else { return };
    if is_told(part, level) {
        tell(part, level, format_args!("{}", words(what)));
    }
}

/// Who tells it, and how bad it is; `None` for what no process of ours writes.
fn kind(what: &What) -> Option<(Part, Level)> {
    Some(match what {
        What::Switch(_)
        | What::Unprotected { .. }
        | What::PeerFound { .. }
        | What::PathMigrated { .. } => (Part::Failover, Level::Info),
        What::PathMigrationFailed { .. } => (Part::Failover, Level::Warn),
        What::GiveUp { .. } => (Part::Failover, Level::Error),
        What::DeviceFatal { .. } | What::PortDown { .. } => (Part::Nic, Level::Warn),
        What::PortActive { .. } => (Part::Nic, Level::Info),
        What::DirectoryLost { .. } => (Part::Directory, Level::Warn),
        What::DirectoryBack { .. } => (Part::Directory, Level::Info),
        What::Fault { .. } | What::FaultClear { .. } => return None,
    })
}

fn words(what: &What) -> String {
    match what {
        What::Switch(switch) => switch_in_words(switch),
        What::Unprotected { host, qp, why } => {
            format!("QP {qp:#x} of host {host} is not protected: {why}")
        }
        What::PeerFound { host, qp, after_us } => {
            let ms = after_us / 1_000;
            format!("QP {qp:#x} of host {host} is protected: its peer was found after {ms} ms")
        }
        What::PathMigrated { host, qp, to } => {
            format!("QP {qp:#x} of host {host} has migrated to {to}")
        }
        What::PathMigrationFailed { host, qp, from, to } => {
            format!("QP {qp:#x} of host {host} cannot migrate from {from} to {to}")
        }
        What::GiveUp { host, qp, why, .. } => {
            format!("QP {qp:#x} of host {host} has failed: {why}")
        }
        What::DeviceFatal { nic } => format!("{nic} has died"),
        What::PortDown { nic } => format!("{nic} has lost its link"),
        What::PortActive { nic } => format!("{nic} works"),
        What::DirectoryLost { why, .. } => format!("the directory cannot be asked: {why}"),
        What::DirectoryBack { .. } => "the directory can be asked again".into(),
        What::Fault { fault, .. } | What::FaultClear { fault } => fault.clone(),
    }
}

fn switch_in_words(s: &Switch) -> String {
    let moved = match s.kind {
        _ if s.from == s.to => "has begun anew on",
        SwitchKind::Planned if s.reason == Reason::Failback.name() => "is back on",
        _ => "has moved to",
    };
    let from = if s.from == s.to { String::new() } else { format!(" from {}", s.from) };
    format!(
        "QP {:#x} of host {} {moved} {}{from} in {:.2} ms ({}, epoch {}, {} sent again)",
        s.qp,
        s.host,
        s.to,
        s.switch_us as f64 / 1e3,
        s.reason,
        s.epoch,
        s.replayed
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_and_a_failback_are_told_apart() {
        let switch = Switch {
            kind: SwitchKind::Passive,
            host: "a".into(),
            qp: 0x102,
            from: "a/0-b/0".into(),
            to: "a/1-b/1".into(),
            epoch: 1,
            reason: Reason::DeviceFatal.name().into(),
            on_path_since_us: 0,
            detected_at_us: 0,
            detect_us: None,
            switch_us: 420,
            replayed: 12,
        };
        let back = Switch {
            kind: SwitchKind::Planned,
            reason: Reason::Failback.name().into(),
            from: switch.to.clone(),
            to: switch.from.clone(),
            epoch: 2,
            replayed: 0,
            ..switch.clone()
        };
        assert_eq!(
            [switch, back].map(|s| words(&What::Switch(s))),
            [
                "QP 0x102 of host a has moved to a/1-b/1 from a/0-b/0 in 0.42 ms (device-fatal, \
                 epoch 1, 12 sent again)",
                "QP 0x102 of host a is back on a/0-b/0 from a/1-b/1 in 0.42 ms (failback, epoch \
                 2, 0 sent again)"
            ]
        );
    }
}
