//! One verdict on a runtime folder, for whoever decides whether a host stays in service.

use serde::Serialize;
use unbroken_events::NicStatus;
use unbroken_units::text::{counted, shown_lines};

use crate::snapshot::{host_of, QpCounts, Snapshot};
use crate::totals::{FailedQp, Trouble};

/// Events carry the wall clock, which may have been set between two of them by so much.
const SLACK_US: u64 = 100_000;

/// A program that failed and has ended counts for so long, where no NIC is known to be the reason.
const RECENT_FAILURE_US: u64 = 300_000_000;

/// How a host, or all of them, fares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Verdict {
    /// All NICs work, and all queue pairs are on their own paths.
    #[default]
    #[serde(rename = "healthy")]
    Healthy,
    /// Something is wrong, and what runs goes on.
    #[serde(rename = "degraded, survived")]
    Degraded,
    /// A program met a failure, or has no NIC left to go on with.
    #[serde(rename = "failed")]
    Failed,
    /// Nothing is known to be wrong, and not all could be seen.
    #[serde(rename = "unknown")]
    Unknown,
}

impl Verdict {
    /// In words, as in JSON.
    pub fn words(self) -> &'static str {
        match self {
            Verdict::Healthy => "healthy",
            Verdict::Degraded => "degraded, survived",
            Verdict::Failed => "failed",
            Verdict::Unknown => "unknown",
        }
    }

    /// The exit status of `unbroken health`: 0, 1, 2; 3 where it is unknown.
    pub fn exit_status(self) -> u8 {
        self as u8
    }
}

/// A NIC with which something is wrong.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Impaired {
    /// Its name, `a/0`.
    pub nic: String,
    /// `active`, `down`, `dead`, with `, drained`.
    pub state: String,
    /// What is wrong, in words.
    pub why: String,
    /// Whether nothing can be expected of it.
    pub is_out: bool,
    /// Since when, in seconds of the Unix epoch; 0 where the log does not know.
    pub since_unix_s: f64,
    /// For how long, in seconds; 0 where the log does not know.
    pub for_s: f64,
}

/// A host.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostHealth {
    /// Its name.
    pub host: String,
    /// How it fares.
    pub verdict: Verdict,
    /// Its ports.
    pub nics: usize,
    /// Those that carry traffic.
    pub working: usize,
    /// The share of its ports that carry traffic; 1 where it has none that are known.
    pub capacity: f64,
    /// The NICs with which something is wrong.
    pub impaired: Vec<Impaired>,
    /// Its queue pairs.
    pub qps: QpCounts,
    /// Why the verdict is not better.
    pub why: Vec<String>,
}

/// The verdict on a runtime folder.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Health {
    /// The worst of all hosts.
    pub verdict: Verdict,
    /// Exit status of the command.
    pub exit_status: u8,
    /// Since when it is so, in seconds of the Unix epoch; 0 where it is healthy or not known.
    pub since_unix_s: f64,
    /// The least share of ports that carry traffic, of all hosts.
    pub capacity: f64,
    /// Processes that use the folder.
    pub processes: usize,
    /// Each host.
    pub hosts: Vec<HostHealth>,
    /// What could not be read or did not answer: the verdict is unknown where all else is well.
    pub problems: Vec<String>,
    /// What lies in the folder and is nothing of ours. It changes no verdict.
    pub left_out: Vec<String>,
}

impl Health {
    /// Where nothing could be seen at all.
    pub fn unknown(why: &str) -> Health {
        let verdict = Verdict::Unknown;
        let problems = vec![why.to_owned()];
        Health { verdict, exit_status: verdict.exit_status(), problems, ..Health::default() }
    }

    /// The verdict on one of the hosts, as if it alone had been asked about: unknown where all that
    /// was seen is well, and not all was seen.
    pub fn verdict_on(&self, host: &HostHealth) -> Verdict {
        in_doubt(host.verdict, &self.problems)
    }
}

/// What was seen, where something was not: that may be worse.
fn in_doubt(seen: Verdict, problems: &[String]) -> Verdict {
    match seen {
        Verdict::Healthy if !problems.is_empty() => Verdict::Unknown,
        seen => seen,
    }
}

/// The verdict on what a snapshot shows: on one host, or on all.
pub fn health(snapshot: &Snapshot, only: Option<&str>) -> Health {
    let names = snapshot.hosts();
    let mut hosts: Vec<HostHealth> = names
        .iter()
        .filter(|host| only.is_none_or(|only| only == *host))
        .map(|host| host_health(snapshot, host))
        .collect();
    // Devices and addresses that belong to no host of the emulated network.
    let others: Vec<&NicStatus> =
        snapshot.nics.iter().filter(|nic| host_of(&nic.nic).is_none()).collect();
    if !others.is_empty() {
        add_machine(snapshot, &mut hosts, &others, only);
    }
    let silent = snapshot.processes.iter().filter(|p| !p.error.is_empty());
    let silent = silent.map(|p| format!("pid {} {}", p.pid, p.error));
    let problems: Vec<String> = snapshot.problems.iter().cloned().chain(silent).collect();
    let worst = hosts.iter().map(|host| host.verdict).max().unwrap_or_default();
    let verdict = in_doubt(worst, &problems);
    let since = hosts.iter().flat_map(|host| &host.impaired).map(|i| i.since_unix_s);
    Health {
        verdict,
        exit_status: verdict.exit_status(),
        since_unix_s: since.filter(|s| *s > 0.0).reduce(f64::min).unwrap_or(0.0),
        capacity: hosts.iter().map(|host| host.capacity).reduce(f64::min).unwrap_or(1.0),
        processes: snapshot.processes.len(),
        hosts,
        problems,
        left_out: snapshot.left_out.clone(),
    }
}

/// NICs without a host's name are those of the one host whose programs have them open.
fn add_machine(
    snapshot: &Snapshot,
    hosts: &mut Vec<HostHealth>,
    nics: &[&NicStatus],
    only: Option<&str>,
) {
    let name = snapshot.processes.iter().find(|p| !p.host.is_empty() && p.error.is_empty());
    let name = name.map_or("machine", |p| p.host.as_str());
    if only.is_some_and(|only| only != name) {
        return;
    }
    hosts.retain(|host| host.host != name || host.nics > 0);
    hosts.push(judge(snapshot, name, nics));
}

fn host_health(snapshot: &Snapshot, host: &str) -> HostHealth {
    let of_it = |nic: &&NicStatus| host_of(&nic.nic) == Some(host);
    judge(snapshot, host, &snapshot.nics.iter().filter(of_it).collect::<Vec<_>>())
}

fn judge(snapshot: &Snapshot, host: &str, nics: &[&NicStatus]) -> HostHealth {
    let impaired: Vec<Impaired> = nics.iter().filter_map(|nic| impaired(snapshot, nic)).collect();
    let working = nics.len() - impaired.iter().filter(|i| i.is_out).count();
    let qps = snapshot.counts.get(host).copied().unwrap_or_default();
    let mut why: Vec<String> =
        impaired.iter().map(|i| format!("{} is {}: {}", i.nic, i.state, i.why)).collect();
    let mut verdict = Verdict::Healthy;
    let mut worse = |to: Verdict| verdict = verdict.max(to);
    if !impaired.is_empty() {
        worse(Verdict::Degraded);
    }
    if qps.displaced > 0 {
        why.push(format!("{} queue pairs are not on their first path", qps.displaced));
        worse(Verdict::Degraded);
    }
    if let Some(lost) = snapshot.totals.directory_lost.get(host) {
        why.push(format!("the directory cannot be asked: {}", lost.what));
        worse(Verdict::Degraded);
    }
    let failed = qps.failed.max(given_up(snapshot, host, &impaired));
    if failed > 0 {
        why.push(format!("{failed} queue pairs failed, and their programs know"));
        worse(Verdict::Failed);
    }
    if !nics.is_empty() && working == 0 {
        why.push("no NIC is left".into());
        worse(Verdict::Failed);
    }
    let pids: Vec<u32> = nics.iter().flat_map(|nic| &nic.pids).copied().collect();
    for broken in snapshot.communicators.iter().filter(|c| pids.contains(&c.pid)) {
        if let Some(reason) = &broken.broken {
            why.push(format!("rank {} of pid {} is broken: {reason}", broken.rank, broken.pid));
            worse(Verdict::Failed);
        }
    }
    let capacity = if nics.is_empty() { 1.0 } else { working as f64 / nics.len() as f64 };
    let nics = nics.len();
    HostHealth { host: host.into(), verdict, nics, working, capacity, impaired, qps, why }
}

/// QPs of a host that failed for good: those of processes that live, also where they are destroyed;
/// those that failed since a NIC is as it is now; and those that failed a short time ago, unless
/// the programs were the reason, or something has recovered since. What became of a program that
/// has ended is the scheduler's to judge once its NICs are well.
fn given_up(snapshot: &Snapshot, host: &str, impaired: &[Impaired]) -> u64 {
    let lives = |pid: u32| snapshot.processes.iter().any(|process| process.pid == pid);
    let wall_us = |i: &Impaired| (i.since_unix_s * 1e6) as u64;
    let begun = impaired.iter().filter(|i| i.since_unix_s > 0.0).map(wall_us).min();
    let since = |failed: &FailedQp| {
        begun.is_some_and(|begun| failed.trouble.wall_us.saturating_add(SLACK_US) >= begun)
    };
    let now_us = snapshot.time_us;
    let of_late = |failed: &FailedQp| {
        let at_us = failed.trouble.since_us;
        !failed.of_programs
            && at_us.saturating_add(RECENT_FAILURE_US) > now_us
            && !snapshot.totals.recovered_since(at_us, now_us)
    };
    let counts = |pid, failed| lives(pid) || since(failed) || of_late(failed);
    let failed = snapshot.totals.failed.iter().filter(|((_, of, _), _)| of == host);
    failed.filter(|((pid, ..), failed)| counts(*pid, failed)).count() as u64
}

/// What is wrong with a NIC, if something is.
fn impaired(snapshot: &Snapshot, nic: &NicStatus) -> Option<Impaired> {
    let (totals, now_us) = (&snapshot.totals, snapshot.time_us);
    let (state, drained) = match nic.state.strip_suffix(", drained") {
        Some(state) => (state, true),
        None => (nic.state.as_str(), false),
    };
    // Of NICs at addresses nobody says their state but the log.
    let told = totals.troubles.get(&nic.nic).filter(|_| state != "active");
    let is_out = matches!(state, "down" | "dead") || drained || told.is_some();
    if !is_out && nic.faults.is_empty() {
        return None;
    }
    let of_faults = nic.faults.iter().filter_map(|fault| totals.fault_since(fault, now_us));
    let since: Option<Trouble> =
        of_faults.chain(told.cloned()).min_by_key(|trouble| trouble.since_us);
    let mut why = nic.faults.clone();
    why.extend(drained.then(|| "drained by an operator".to_owned()));
    why.extend(told.filter(|_| nic.faults.is_empty()).map(|trouble| trouble.what.clone()));
    if why.is_empty() {
        why.push(format!("its state is {state}"));
    }
    Some(Impaired {
        nic: nic.nic.clone(),
        state: nic.state.clone(),
        why: why.join(", "),
        is_out: is_out || nic.faults.iter().any(|fault| cuts_off(fault)),
        since_unix_s: since.as_ref().map_or(0.0, |t| t.wall_us as f64 / 1e6),
        for_s: since.map_or(0.0, |t| now_us.saturating_sub(t.since_us) as f64 / 1e6),
    })
}

/// Whether a fault lets nothing pass that NIC, which does not know.
fn cuts_off(fault: &str) -> bool {
    fault.ends_with(" cut") || fault.starts_with("switch ") && fault.ends_with(" down")
}

/// The verdict in words: a line for all, one for each host that is not healthy, and reasons.
pub fn in_words(health: &Health) -> String {
    let mut text = format!("{}\n", health.verdict.words());
    for host in health.hosts.iter().filter(|host| host.verdict != Verdict::Healthy) {
        text += &format!(
            "host {}: {}; {} of {} NICs work, {:.0} % of capacity left\n",
            host.host,
            host.verdict.words(),
            host.working,
            host.nics,
            host.capacity * 100.0
        );
        for impaired in host.impaired.iter().filter(|i| i.for_s > 0.0) {
            text += &format!("  {} for {:.1} s\n", impaired.nic, impaired.for_s);
        }
        host.why.iter().for_each(|why| text += &format!("  {why}\n"));
    }
    let qps: QpCounts = health.hosts.iter().fold(QpCounts::default(), |sum, host| QpCounts {
        all: sum.all + host.qps.all,
        unprotected: sum.unprotected + host.qps.unprotected,
        ..sum
    });
    text += &match (health.processes, qps.all) {
        (0, _) => "nothing runs here\n".to_owned(),
        (processes, all) => format!(
            "{}, {}, {} of them not protected\n",
            counted(processes as u64, "process", "processes"),
            counted(all, "queue pair", "queue pairs"),
            qps.unprotected
        ),
    };
    health.problems.iter().for_each(|problem| text += &format!("not known: {problem}\n"));
    health.left_out.iter().for_each(|what| text += &format!("left out: {what}\n"));
    // Names and reasons come from whoever may write to the folder.
    shown_lines(&text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Process;
    use crate::totals::Totals;
    use std::sync::Arc;
    use unbroken_events::{Event, NicCounters, What};

    fn nic(name: &str, state: &str, faults: &[&str]) -> NicStatus {
        NicStatus {
            nic: name.into(),
            addr: String::new(),
            device: "full".into(),
            state: state.into(),
            faults: faults.iter().map(ToString::to_string).collect(),
            legs_down: Vec::new(),
            pids: vec![7],
            registered_bytes: 0,
            counters: NicCounters::default(),
        }
    }

    fn seen(nics: Vec<NicStatus>, counts: QpCounts) -> Snapshot {
        let process = Process { pid: 7, host: "a".into(), ..Process::default() };
        Snapshot {
            time_us: 5_000_000,
            nics,
            processes: Arc::new(vec![process]),
            counts: Arc::new([("a".to_owned(), counts)].into()),
            ..Snapshot::default()
        }
    }

    #[test]
    fn all_well_is_healthy() {
        let of = health(&seen(vec![nic("a/0", "active", &[])], QpCounts::default()), None);
        assert_eq!((of.verdict, of.exit_status, of.capacity), (Verdict::Healthy, 0, 1.0));
        assert!(in_words(&of).starts_with("healthy\n1 process,"), "{}", in_words(&of));
    }

    #[test]
    fn a_dead_nic_is_survived_and_said_since_when() {
        let nics = vec![nic("a/0", "dead", &["nic a/0 dead"]), nic("a/1", "active", &[])];
        let mut snapshot = seen(nics, QpCounts { all: 4, displaced: 4, ..QpCounts::default() });
        let mut totals = Totals::default();
        let fault = What::Fault { fault: "nic a/0 dead".into(), lasts_us: None, every_us: None };
        totals.add(&Event { time_us: 2_000_000, wall_us: 9_000_000, pid: 1, what: fault });
        snapshot.totals = Arc::new(totals);
        let of = health(&snapshot, None);
        assert_eq!((of.verdict, of.exit_status, of.capacity), (Verdict::Degraded, 1, 0.5));
        assert_eq!(of.since_unix_s, 9.0);
        assert_eq!(of.hosts[0].impaired[0].for_s, 3.0);
        let json = serde_json::to_value(&of).unwrap();
        assert_eq!(json["verdict"], "degraded, survived");
        assert!(in_words(&of).contains("1 of 2 NICs work, 50 %"), "{}", in_words(&of));
        assert!(health(&snapshot, Some("b")).hosts.is_empty());
    }

    #[test]
    fn a_failed_qp_or_no_nic_left_is_a_failure() {
        let failed = QpCounts { all: 4, failed: 1, ..QpCounts::default() };
        assert_eq!(
            health(&seen(vec![nic("a/0", "active", &[])], failed), None).verdict,
            Verdict::Failed
        );
        let gone = vec![nic("a/0", "dead", &[]), nic("a/1", "active", &["cable a/1 cut"])];
        let of = health(&seen(gone, QpCounts::default()), None);
        assert_eq!((of.verdict, of.capacity), (Verdict::Failed, 0.0));
    }

    #[test]
    fn what_slows_a_nic_leaves_its_capacity() {
        let nics = vec![nic("a/0", "active", &["loss a/0 1%"]), nic("a/1", "active, drained", &[])];
        let of = health(&seen(nics, QpCounts::default()), None);
        assert_eq!((of.verdict, of.hosts[0].working), (Verdict::Degraded, 1));
        assert!(of.hosts[0].why[1].contains("drained by an operator"), "{:?}", of.hosts[0].why);
    }

    #[test]
    fn what_was_not_seen_is_not_healthy() {
        let silent =
            Process { pid: 8, error: "does not answer: late".into(), ..Process::default() };
        let with = |state: &str| {
            let mut seen =
                seen(vec![nic("a/0", state, &[]), nic("a/1", "active", &[])], QpCounts::default());
            Arc::make_mut(&mut seen.processes).push(silent.clone());
            health(&seen, None)
        };
        let of = with("active");
        assert_eq!((of.verdict, of.exit_status), (Verdict::Unknown, 3));
        assert_eq!(of.verdict_on(&of.hosts[0]), Verdict::Unknown, "as if it alone had been asked");
        let sick = with("dead");
        assert_eq!(sick.verdict_on(&sick.hosts[0]), Verdict::Degraded);
        assert!(in_words(&of).starts_with("unknown\n2 processes"), "{}", in_words(&of));
        assert!(in_words(&of).contains("not known: pid 8 does not answer: late\n"));
        assert_eq!(with("dead").verdict, Verdict::Degraded, "what is known to be wrong stays so");
        let mut stray = seen(vec![nic("a/0", "active", &[])], QpCounts::default());
        stray.left_out.push("x\x1b[2J is no NIC's page".into());
        let of = health(&stray, None);
        assert_eq!(of.verdict, Verdict::Healthy);
        assert!(
            in_words(&of).ends_with("left out: x\u{fffd}[2J is no NIC's page\n"),
            "{}",
            in_words(&of)
        );
    }

    /// A program that its NIC has ended counts until that NIC is well again.
    #[test]
    fn a_program_that_died_of_a_nic_is_a_failure_while_that_is_out() {
        let fault = What::Fault { fault: "nic a/0 dead".into(), lasts_us: None, every_us: None };
        let gave_up = |qp| What::GiveUp {
            host: "a".into(),
            qp,
            why: "a/0 has died".into(),
            of_programs: false,
        };
        let mut totals = Totals::default();
        for (at, what) in [(1_000_000, gave_up(1)), (2_000_000, fault), (2_000_100, gave_up(2))] {
            totals.add(&Event { time_us: at, wall_us: at + 7_000_000, pid: 99, what });
        }
        let verdict = |nics| {
            let mut snapshot = seen(nics, QpCounts::default());
            snapshot.totals = Arc::new(totals.clone());
            health(&snapshot, None)
        };
        let other = || nic("a/1", "active", &[]);
        let out = verdict(vec![nic("a/0", "dead", &["nic a/0 dead"]), other()]);
        assert_eq!(out.verdict, Verdict::Failed);
        assert!(out.hosts[0].why.iter().any(|why| why.starts_with("2 queue pairs failed")));
        let clear = What::FaultClear { fault: "nic a/0 dead".into() };
        totals.add(&Event { time_us: 3_000_000, wall_us: 10_000_000, pid: 1, what: clear });
        let healed = seen(vec![nic("a/0", "active", &[]), other()], QpCounts::default());
        let healed = health(&Snapshot { totals: Arc::new(totals), ..healed }, None);
        assert_eq!(healed.verdict, Verdict::Healthy);
    }

    /// Where nothing is wrong with a NIC, a program that failed and has ended counts for a while.
    #[test]
    fn a_program_that_has_just_failed_is_a_failure() {
        let after = |of_programs| {
            let why = "retries exceeded".into();
            let what = What::GiveUp { host: "a".into(), qp: 1, why, of_programs };
            let mut totals = Totals::default();
            totals.add(&Event { time_us: 4_000_000, wall_us: 9_000_000, pid: 99, what });
            let snapshot = seen(vec![nic("a/0", "active", &[])], QpCounts::default());
            Snapshot { totals: Arc::new(totals), ..snapshot }
        };
        let mut snapshot = after(false);
        let of = health(&snapshot, None);
        assert_eq!((of.verdict, of.exit_status), (Verdict::Failed, 2));
        snapshot.time_us += RECENT_FAILURE_US;
        assert_eq!(health(&snapshot, None).verdict, Verdict::Healthy, "long ago");
        assert_eq!(health(&after(true), None).verdict, Verdict::Healthy, "its peer had ended");
    }

    #[test]
    fn a_device_of_the_machine_belongs_to_the_host_of_its_programs() {
        let nics = vec![nic("mlx5_0", "down", &[]), nic("mlx5_1", "active", &[])];
        let of = health(&seen(nics, QpCounts { all: 2, ..QpCounts::default() }), None);
        let all: Vec<(&str, usize)> = of.hosts.iter().map(|h| (h.host.as_str(), h.nics)).collect();
        assert_eq!((all, of.verdict), (vec![("a", 2)], Verdict::Degraded));
    }
}
