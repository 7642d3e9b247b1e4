//! What the page is told, as JSON.

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;
use unbroken_events::{Event, NicStatus};
use unbroken_observe::{event_in_words, health, Health, Impaired, QpCounts, SeenQp, Snapshot};

/// Queue pairs that are listed at a time.
const MAX_LISTED: usize = 200;

/// Events that are told.
const MAX_EVENTS: usize = 200;

/// What the page is told.
#[derive(Serialize)]
pub(crate) struct State<'a> {
    time_us: u64,
    wall_us: u64,
    runtime: &'a str,
    emulated: bool,
    /// Whether this client may change something.
    may_change: bool,
    health: Health,
    counts: QpCounts,
    unprotected: Vec<(&'a str, &'a str, u64)>,
    nics: Vec<Nic<'a>>,
    qps: Vec<Qp<'a>>,
    /// How many can be listed.
    qps_listed: usize,
    qps_age_us: u64,
    processes: Vec<Process<'a>>,
    events: Vec<Told<'a>>,
    collectives: Vec<Rank<'a>>,
    uplinks: Vec<&'a unbroken_observe::Uplink>,
}

#[derive(Serialize)]
struct Nic<'a> {
    #[serde(flatten)]
    nic: &'a NicStatus,
    is_impaired: bool,
    is_out: bool,
}

#[derive(Serialize)]
struct Qp<'a> {
    #[serde(flatten)]
    seen: &'a SeenQp,
    program: &'a str,
}

#[derive(Serialize)]
struct Process<'a> {
    pid: u32,
    program: &'a str,
    host: &'a str,
    error: &'a str,
}

#[derive(Serialize)]
struct Told<'a> {
    #[serde(flatten)]
    event: &'a Event,
    words: String,
}

#[derive(Serialize)]
struct Rank<'a> {
    rank: usize,
    ranks: usize,
    operations: u64,
    down: &'a [String],
    broken: &'a Option<String>,
}

impl State<'_> {
    /// What a snapshot shows, with `count` queue pairs from the number `from` on.
    pub(crate) fn of(
        snapshot: &Snapshot,
        from: usize,
        count: usize,
        may_change: bool,
    ) -> State<'_> {
        let health = health(snapshot, None);
        let impaired: Vec<&Impaired> = health.hosts.iter().flat_map(|h| &h.impaired).collect();
        let named = |is: fn(&Impaired) -> bool| -> HashSet<&str> {
            impaired.iter().filter(|i| is(i)).map(|i| i.nic.as_str()).collect()
        };
        let (out, all) = (named(|i| i.is_out), named(|_| true));
        let nics = snapshot.nics.iter().map(|nic| Nic {
            nic,
            is_impaired: all.contains(nic.nic.as_str()),
            is_out: out.contains(nic.nic.as_str()),
        });
        let nics: Vec<Nic> = nics.collect();
        let programs: BTreeMap<u64, &str> =
            snapshot.processes.iter().map(|p| (p.id, p.program.as_str())).collect();
        let qp = |seen| -> Qp<'_> {
            let seen: &SeenQp = seen;
            Qp { seen, program: programs.get(&seen.qp.process).copied().unwrap_or("?") }
        };
        let recent: Vec<_> = snapshot.recent().collect();
        let skipped = recent.len().saturating_sub(MAX_EVENTS);
        let told = |event| Told { words: event_in_words(event), event };
        let mut events: Vec<Told<'_>> = recent.into_iter().skip(skipped).map(told).collect();
        // Who sets a fault writes of it when it holds; a switch that it caused may be written before.
        events.sort_by_key(|told| told.event.wall_us);
        let unprotected = snapshot.unprotected.iter();
        State {
            time_us: snapshot.time_us,
            wall_us: snapshot.wall_us,
            runtime: &snapshot.runtime,
            emulated: snapshot.emulated,
            may_change,
            counts: snapshot.all_counts(),
            unprotected: unprotected.map(|((host, why), n)| (&**host, &**why, *n)).collect(),
            nics,
            qps: snapshot.qps.iter().skip(from).take(count.min(MAX_LISTED)).map(qp).collect(),
            qps_listed: snapshot.qps.len(),
            qps_age_us: snapshot.qps_age_us,
            processes: snapshot.processes.iter().map(process).collect(),
            events,
            collectives: snapshot.communicators.iter().map(rank).collect(),
            uplinks: snapshot.edge.iter().flat_map(|edge| &edge.uplinks).collect(),
            health,
        }
    }
}

fn process(p: &unbroken_observe::Process) -> Process<'_> {
    Process { pid: p.pid, program: &p.program, host: &p.host, error: &p.error }
}

fn rank(c: &unbroken_observe::Communicator) -> Rank<'_> {
    Rank {
        rank: c.rank,
        ranks: c.ranks,
        operations: c.counters.operations,
        down: &c.down,
        broken: &c.broken,
    }
}
