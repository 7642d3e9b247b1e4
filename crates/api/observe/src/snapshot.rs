//! All that is seen at one moment, and who looks again and again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rustix::time::{clock_gettime, ClockId};
use serde::Serialize;
use unbroken_edge_daemon::state::State;
use unbroken_events::{Event, EventTail, NicStatus, What};
use unbroken_fabric::{now_us, Runtime};
use unbroken_runtime::wall_us;

use crate::error::Result;
use crate::status::{ask_processes, fabric, nics, Answers, Nics, Process, ProcessQp};
use crate::totals::Totals;

/// QPs that a snapshot lists; all of them are counted.
pub const MAX_QPS: usize = 10_000;
/// All processes together are waited for no longer than this.
const PATIENCE: Duration = Duration::from_secs(3);
/// Processes are asked so often at most where something has happened, and where nothing has.
const ASK_AFTER_EVENT_US: u64 = 100_000;
const ASK_US: u64 = 1_000_000;
/// The longest pause before processes are asked again.
const MAX_ASK_US: u64 = 20_000_000;
/// To ask takes this part of a core at most: a process pays about as much for its answer as who
/// asks, so that the whole is below a hundredth.
const ASK_SHARE: u64 = 250;
/// The same, where something has happened.
const ASK_SHARE_AFTER_EVENT: u64 = 10;
/// So often collectives and the host edge are looked at.
const SLOW_US: u64 = 2_000_000;
const EDGE_US: u64 = 15_000_000;

/// How many QPs there are, by what they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct QpCounts {
    /// All.
    pub all: u64,
    /// The next failure moves them.
    pub protected: u64,
    /// They will be protected once their peer is found.
    pub pending: u64,
    /// The next failure reaches the program.
    pub unprotected: u64,
    /// They are on another path than their first one.
    pub displaced: u64,
    /// They failed for good.
    pub failed: u64,
    /// They are between two paths.
    pub switching: u64,
}

/// A QP of a snapshot.
#[derive(Clone, Debug, Serialize)]
pub struct SeenQp {
    /// The QP and its process.
    #[serde(flatten)]
    pub qp: ProcessQp,
    /// The path that it was on before its switches; empty where it is there.
    pub first_path: String,
    /// When it left that, by [`now_us`]; 0 where it is there.
    pub left_us: u64,
}

/// All that is seen of a runtime folder at one moment.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Snapshot {
    /// When, by [`now_us`].
    pub time_us: u64,
    /// When, by the wall clock.
    pub wall_us: u64,
    /// The runtime folder.
    pub runtime: String,
    /// Whether there is an emulated network, in which faults can be set.
    pub emulated: bool,
    /// NICs with state, counters, faults.
    pub nics: Vec<NicStatus>,
    /// Processes.
    pub processes: Arc<Vec<Process>>,
    /// QPs: those that failed, moved or are not protected first, [`MAX_QPS`] at most.
    pub qps: Arc<Vec<SeenQp>>,
    /// QPs by host.
    pub counts: Arc<BTreeMap<String, QpCounts>>,
    /// QPs that are not protected, by host and reason.
    pub unprotected: Arc<BTreeMap<(String, String), u64>>,
    /// How old what processes said is, in µs.
    pub qps_age_us: u64,
    /// What the event log comes to.
    #[serde(skip)]
    pub totals: Arc<Totals>,
    /// Communicators, as their ranks see them.
    pub communicators: Arc<Vec<unbroken_coll::Snapshot>>,
    /// The host edge of this machine, where there is one and this user may look at it.
    pub edge: Arc<Option<unbroken_edge_daemon::status::Status>>,
    /// What could not be read.
    pub problems: Vec<String>,
    /// What lies in the folder and is nothing of ours.
    pub left_out: Vec<String>,
}

impl Snapshot {
    /// What has happened of late, the oldest first. The log knows the end of a fault that is set
    /// for a time before it comes.
    pub fn recent(&self) -> impl Iterator<Item = &Event> {
        self.totals.recent.iter().filter(|event| event.time_us <= self.time_us)
    }

    /// The hosts, by name.
    pub fn hosts(&self) -> Vec<String> {
        let of_nics = self.nics.iter().filter_map(|nic| host_of(&nic.nic)).map(str::to_owned);
        let mut hosts: Vec<String> = of_nics.chain(self.counts.keys().cloned()).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    /// All QPs together.
    pub fn all_counts(&self) -> QpCounts {
        self.counts.values().fold(QpCounts::default(), |sum, of| QpCounts {
            all: sum.all + of.all,
            protected: sum.protected + of.protected,
            pending: sum.pending + of.pending,
            unprotected: sum.unprotected + of.unprotected,
            displaced: sum.displaced + of.displaced,
            failed: sum.failed + of.failed,
            switching: sum.switching + of.switching,
        })
    }
}

/// The host of a NIC of the emulated network, `a` of `a/0`.
pub fn host_of(nic: &str) -> Option<&str> {
    nic.split_once('/').map(|(host, _)| host)
}

/// What processes said, when, and what that cost.
#[derive(Default)]
struct Asked {
    nics: Vec<NicStatus>,
    processes: Arc<Vec<Process>>,
    qps: Arc<Vec<SeenQp>>,
    counts: Arc<BTreeMap<String, QpCounts>>,
    unprotected: Arc<BTreeMap<(String, String), u64>>,
    at_us: u64,
    cost_us: u64,
    is_stale: bool,
}

/// Looks at a runtime folder again and again, at a hundredth of a core at most however many QPs
/// there are: counters, states and events are new each time, and processes are asked anew when an
/// event says that something has changed, else at times.
pub struct Observer {
    runtime: Runtime,
    tail: EventTail,
    totals: Arc<Totals>,
    asked: Asked,
    communicators: (u64, Arc<Vec<unbroken_coll::Snapshot>>),
    edge: (u64, Arc<Option<unbroken_edge_daemon::status::Status>>),
}

impl Observer {
    /// Who looks at that folder; has not yet.
    pub fn new(runtime: &Runtime) -> Observer {
        Observer {
            runtime: runtime.clone(),
            tail: EventTail::open(runtime),
            totals: Arc::default(),
            asked: Asked { is_stale: true, ..Asked::default() },
            communicators: (0, Arc::default()),
            edge: (0, Arc::default()),
        }
    }

    /// The folder.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Looks, and asks the processes whatever that costs.
    pub fn look_at_all(&mut self) -> Result<Snapshot> {
        self.asked.at_us = 0;
        self.look()
    }

    /// Looks.
    pub fn look(&mut self) -> Result<Snapshot> {
        // A log that cannot be read hides nothing else.
        let (events, unread) = match self.tail.poll() {
            Ok(events) => (events, None),
            Err(e) => (Vec::new(), Some(format!("{}: {e}", self.runtime.events().display()))),
        };
        self.asked.is_stale |= events.iter().any(changes_qps);
        if !events.is_empty() {
            let totals = Arc::make_mut(&mut self.totals);
            events.iter().for_each(|event| totals.add(event));
        }
        let now_us = now_us();
        if now_us >= self.asked.next_us() {
            self.ask(now_us)?;
        }
        let fabric = fabric(&self.runtime)?;
        let Nics { nics, mut problems, left_out } =
            nics(&self.runtime, fabric.as_ref(), &self.asked.nics)?;
        problems.extend(unread);
        problems.extend(self.tail.lost());
        problems.extend(self.look_slowly(now_us));
        Ok(Snapshot {
            time_us: now_us,
            wall_us: wall_us(),
            runtime: self.runtime.path().display().to_string(),
            emulated: fabric.is_some(),
            nics,
            processes: self.asked.processes.clone(),
            qps: self.asked.qps.clone(),
            counts: self.asked.counts.clone(),
            unprotected: self.asked.unprotected.clone(),
            qps_age_us: now_us - self.asked.at_us,
            totals: self.totals.clone(),
            communicators: self.communicators.1.clone(),
            edge: self.edge.1.clone(),
            problems,
            left_out,
        })
    }

    fn ask(&mut self, now_us: u64) -> Result<()> {
        let began_us = thread_us();
        let Answers { qps, processes, nics } = ask_processes(&self.runtime, PATIENCE)?;
        if self.totals.any_left() && processes.iter().all(|p| p.error.is_empty()) {
            let pids: Vec<u32> = processes.iter().map(|p| p.pid).collect();
            Arc::make_mut(&mut self.totals).forget_all_but(&pids);
        }
        let (counts, unprotected) = count(&qps, &self.totals);
        self.asked = Asked {
            nics,
            processes: Arc::new(processes),
            qps: Arc::new(listed(qps, &self.totals)),
            counts: Arc::new(counts),
            unprotected: Arc::new(unprotected),
            at_us: now_us,
            cost_us: thread_us() - began_us,
            is_stale: false,
        };
        Ok(())
    }

    /// Collectives and the host edge, which are asked by other ways.
    fn look_slowly(&mut self, now_us: u64) -> Option<String> {
        if now_us >= self.edge.0 {
            // Who is not root sees no edge, and an edge that does not answer hides nothing else.
            let edge = State::find(None).ok();
            let edge = edge.and_then(|s| unbroken_edge_daemon::status::Status::read(&s).ok());
            self.edge = (now_us + EDGE_US, Arc::new(edge));
        }
        if now_us < self.communicators.0 {
            return None;
        }
        let read = unbroken_coll::snapshots(&self.runtime.path().join("coll"));
        let problem = read.as_ref().err().map(ToString::to_string);
        self.communicators = (now_us + SLOW_US, Arc::new(read.unwrap_or_default()));
        problem
    }
}

impl Asked {
    /// When processes are to be asked again.
    fn next_us(&self) -> u64 {
        if self.at_us == 0 {
            return 0;
        }
        let (least, share) = match self.is_stale {
            true => (ASK_AFTER_EVENT_US, ASK_SHARE_AFTER_EVENT),
            false => (ASK_US, ASK_SHARE),
        };
        self.at_us + (self.cost_us * share).clamp(least, MAX_ASK_US)
    }
}

/// What this thread has had of a core, in µs.
fn thread_us() -> u64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000 + t.tv_nsec as u64 / 1_000
}

/// Whether processes say something else after an event.
fn changes_qps(event: &Event) -> bool {
    !matches!(event.what, What::Fault { .. } | What::FaultClear { .. })
}

type Counted = (BTreeMap<String, QpCounts>, BTreeMap<(String, String), u64>);

/// Counts all QPs.
fn count(qps: &[ProcessQp], totals: &Totals) -> Counted {
    /// Different reasons that are counted apart.
    const MAX_REASONS: usize = 64;
    let (mut counts, mut unprotected) = Counted::default();
    for ProcessQp { pid, qp, .. } in qps {
        if !counts.contains_key(&qp.host) {
            counts.insert(qp.host.clone(), QpCounts::default());
        }
        let of = counts.get_mut(&qp.host).expect("inserted above");
        of.all += 1;
        of.failed += u64::from(qp.state == "failed");
        of.switching += u64::from(qp.state == "switching");
        of.displaced += u64::from(totals.left(*pid, &qp.host, qp.qp, &qp.path).is_some());
        match (qp.protected, qp.pending) {
            (true, _) => of.protected += 1,
            (false, true) => of.pending += 1,
            (false, false) => {
                of.unprotected += 1;
                let is_room = unprotected.len() < MAX_REASONS;
                let mut key = (qp.host.clone(), qp.why.chars().take(120).collect());
                if !is_room && !unprotected.contains_key(&key) {
                    key = (crate::totals::OTHER.into(), crate::totals::OTHER.into());
                }
                *unprotected.entry(key).or_default() += 1;
            }
        }
    }
    (counts, unprotected)
}

/// The QPs that a snapshot lists: those that need attention first.
fn listed(qps: Vec<ProcessQp>, totals: &Totals) -> Vec<SeenQp> {
    let seen = |qp: ProcessQp| {
        let left = totals.left(qp.pid, &qp.qp.host, qp.qp.qp, &qp.qp.path);
        let (first_path, left_us) =
            left.map_or((String::new(), 0), |(path, why)| (path.to_owned(), why.since_us));
        SeenQp { qp, first_path, left_us }
    };
    let mut listed: Vec<SeenQp> = qps.into_iter().map(seen).collect();
    let rank = |seen: &SeenQp| {
        let qp = &seen.qp.qp;
        match () {
            () if qp.state == "failed" => 0,
            () if !qp.protected && !qp.pending => 1,
            () if qp.state == "switching" => 2,
            () if !seen.first_path.is_empty() => 3,
            () if qp.pending => 4,
            () => 5,
        }
    };
    listed.sort_by_key(rank);
    listed.truncate(MAX_QPS);
    listed
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_events::QpStatus;

    fn qp(n: u32, protected: bool, why: &str) -> ProcessQp {
        let qp = QpStatus {
            qp: n,
            host: "a".into(),
            protected,
            why: why.into(),
            state: "rts".into(),
            ..QpStatus::default()
        };
        ProcessQp { process: 1, pid: 7, qp }
    }

    #[test]
    fn all_qps_are_counted_and_the_interesting_ones_listed() {
        let mut qps: Vec<ProcessQp> = (0..12_000).map(|n| qp(n, true, "")).collect();
        qps.push(qp(20_000, false, "UC"));
        let mut failed = qp(20_001, false, "no path");
        failed.qp.state = "failed".into();
        qps.push(failed);
        let totals = Totals::default();
        let (counts, unprotected) = count(&qps, &totals);
        let of = counts["a"];
        assert_eq!((of.all, of.protected, of.unprotected, of.failed), (12_002, 12_000, 2, 1));
        assert_eq!(unprotected[&("a".into(), "UC".into())], 1);
        let listed = listed(qps, &totals);
        assert_eq!(listed.len(), MAX_QPS);
        assert_eq!([listed[0].qp.qp.qp, listed[1].qp.qp.qp], [20_001, 20_000]);
    }

    #[test]
    fn what_is_dear_is_asked_seldom() {
        let asked = |cost_us, is_stale| {
            let asked = Asked { at_us: 1, cost_us, is_stale, ..Asked::default() };
            asked.next_us() - 1
        };
        assert_eq!(asked(100, false), ASK_US);
        assert_eq!(asked(40_000, false), 10_000_000, "0.4 % of a core");
        assert_eq!(asked(40_000, true), 400_000);
        assert_eq!(asked(u64::from(u32::MAX), false), MAX_ASK_US);
        assert_eq!(Asked::default().next_us(), 0, "at once, at first");
    }

    #[test]
    fn an_empty_folder_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let snapshot = Observer::new(&runtime).look().unwrap();
        assert!(snapshot.nics.is_empty() && snapshot.qps.is_empty() && !snapshot.emulated);
    }
}
