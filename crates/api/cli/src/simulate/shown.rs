//! How clusters, jobs and figures are shown.

use unbroken_simulate::cluster::{Cluster, Loss};
use unbroken_simulate::failures::Recovery;
use unbroken_simulate::step::Simulation;
use unbroken_units::show;

/// Columns of a screen.
const COLUMNS: usize = 80;
/// Lost NICs that are named one by one.
const NAMED: usize = 4;

/// A part of something, in percent, with its sign.
pub(super) fn more(share: f64) -> String {
    let percent = share * 100.0;
    match percent.abs() {
        p if p < 0.005 => "0%".into(),
        p if p < 1.0 => format!("{percent:+.2}%"),
        p if p < 100.0 => format!("{percent:+.1}%"),
        _ => format!("{percent:+.0}%"),
    }
}

/// A time, in minutes, hours or days where it is long.
pub(super) fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 2.0 * 86_400.0 => format!("{} d", show::plain((s / 8_640.0).round() / 10.0)),
        s if s >= 7_200.0 => format!("{} h", show::plain((s / 360.0).round() / 10.0)),
        s if s >= 120.0 => format!("{} min", show::plain((s / 6.0).round() / 10.0)),
        s => show::time_s(s),
    }
}

/// A cluster in a line.
pub(super) fn cluster(c: &Cluster) -> String {
    let rails = match (c.spines, c.tiers) {
        (false, _) => "rails apart".to_string(),
        (true, tiers) => format!("{tiers} tiers of switches"),
    };
    let narrow = match (c.oversubscription > 1.0, c.tiers == 3 && c.core_oversubscription > 1.0) {
        (false, false) => String::new(),
        (_, false) => format!(", {}:1 oversubscribed", show::plain(c.oversubscription)),
        (_, true) => format!(
            ", {}:1 and {}:1 oversubscribed",
            show::plain(c.oversubscription),
            show::plain(c.core_oversubscription)
        ),
    };
    format!(
        "{} hosts of {} GPUs and {} NICs of {}, {rails}{narrow}",
        c.hosts,
        c.gpus,
        c.nics,
        show::rate_bps(f64::from(c.nic_mbps) * 1e6)
    )
}

/// A job in a line, or in two where it needs them.
pub(super) fn job(s: &Simulation) -> String {
    let (job, step) = (s.job(), s.healthy());
    let more = |name: &str, count: usize| match count {
        1 => String::new(),
        count => format!(", {name} {count}"),
    };
    let zero = match job.zero_stage() {
        0 => String::new(),
        3 => ", FSDP".into(),
        stage => format!(", ZeRO {stage}"),
    };
    let what = format!(
        "{}, batch {}, TP {}{}{}, PP {}{}, DP {}{zero}:",
        job.model.name,
        job.batch,
        job.tensor,
        more("CP", job.context),
        more("EP", job.expert_parallel),
        job.pipeline,
        if job.interleave > 1 { format!("×{}", job.interleave) } else { String::new() },
        s.layout().replicas,
    );
    let share = step.network_share() * 100.0;
    let takes = format!("{} a step, {share:.1}% of it between hosts", time(step.total_s()));
    let fits = what.chars().count() + 1 + takes.chars().count() <= COLUMNS;
    format!("{what}{}{takes}", if fits { " " } else { "\n" })
}

/// From where a restart takes hosts, in a line.
pub(super) fn spares(recovery: &Recovery) -> String {
    let replaced = match recovery.replace_s > 0.0 {
        true => format!(", each in its place after {}", time(recovery.replace_s)),
        false => String::new(),
    };
    match recovery.spares {
        None => format!("spare hosts for restarts: as many as it takes (--spares){replaced}"),
        Some(0) => "no spare hosts: a restart has fewer".into(),
        Some(count) => format!("spare hosts for restarts: {count}{replaced}; without one: fewer"),
    }
}

/// Lost NICs in a line.
pub(super) fn lost(lost: &[Loss]) -> String {
    let names: Vec<String> = lost.iter().take(NAMED).map(Loss::to_string).collect();
    let rest = lost.len().saturating_sub(NAMED);
    match (names.is_empty(), rest) {
        (true, _) => "nothing".into(),
        (false, 0) => names.join(", "),
        (false, rest) => format!("{} and {rest} more", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_the_digits_that_count() {
        let all = [0.0, 0.000_04, 0.0017, 0.0517, 0.35, 1.004].map(more);
        assert_eq!(all, ["0%", "0%", "+0.17%", "+5.2%", "+35.0%", "+100%"]);
        let all = [0.0004, 0.746, 83.0, 4980.0, 7200.0, 2_592_000.0].map(time);
        assert_eq!(all, ["400 us", "746 ms", "83.0 s", "83 min", "2 h", "30 d"]);
    }
}
