//! What happened in many schedules, and how much of it must have happened for the run to mean
//! something.

/// Counts over schedules.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Schedules run.
    pub schedules: u64,
    /// Logical QP ends that moved to another path.
    pub switches: u64,
    /// Of these, by plan.
    pub planned: u64,
    /// Planned switches that an end began.
    pub plans: u64,
    /// Planned switches that were cancelled.
    pub plans_cancelled: u64,
    /// Those of hosts whose devices have plain verbs only.
    pub plain_switches: u64,
    /// How often a QP was not stopped yet when it was asked.
    pub late_stops: u64,
    /// Flushes that a device kept back, or told out of their turn, as a QP was stopped.
    pub odd_flushes: u64,
    /// QPs whose flush stood still, so that they were destroyed.
    pub ended_flushes: u64,
    /// Work requests that were sent again after a switch.
    pub replays: u64,
    /// Work requests that were not sent again, since the peer had executed them.
    pub spared_replays: u64,
    /// Epochs that both ends suspected by themselves.
    pub simultaneous: u64,
    /// Suspicions of a path that worked.
    pub wrong_suspicions: u64,
    /// Switches that took more than one epoch.
    pub chained: u64,
    /// Stalls that were noticed by probing.
    pub stalls: u64,
    /// QPs that gave up, or were silent for long, on a path that lived.
    pub wedged: u64,
    /// Paths that were dead one way only.
    pub one_way: u64,
    /// Processes that were stopped for a while.
    pub stops: u64,
    /// Schedules in which a process was killed.
    pub crashes: u64,
    /// Switches that were refused since a request must not be replayed.
    pub refusals: u64,
    /// Errors of applications' own that were delivered as such.
    pub own_errors: u64,
    /// Those of hosts whose devices have plain verbs only.
    pub plain_own_errors: u64,
    /// Those that were delivered while an end was between two paths, or about to leave one.
    pub amid_own_errors: u64,
    /// Ends whose QP was ended by a request of the peer.
    pub ended_by_peer: u64,
    /// Own errors that a network hid, which failed just then.
    pub hidden_own_errors: u64,
    /// QPs that went home by themselves.
    pub homecomings: u64,
    /// Logical QPs that nothing touched, and that noticed nothing.
    pub spared_qps: u64,
    /// Receives of shared queues that were begun when their QP moved.
    pub given_back: u64,
    /// Atomics that completed.
    pub atomics: u64,
    /// Lives whose PSNs wrapped around.
    pub wraps: u64,
    /// QPs whose path nothing touched.
    pub spared_paths: u64,
    /// Paths that were left by plan since they lose much.
    pub left_grey: u64,
    /// Transports that had given up on such a path and went on.
    pub went_on: u64,
    /// Packets that transports sent again.
    pub retransmits: u64,
    /// Messages that completed.
    pub messages: u64,
    /// Events handled.
    pub events: u64,
}

/// (name, how to read it, the least of it in a thousand schedules).
type Row = (&'static str, fn(&Stats) -> u64, u64);

impl Stats {
    const ROWS: [Row; 35] = [
        ("switches", |s| s.switches, 2_000),
        ("planned", |s| s.planned, 300),
        ("plans", |s| s.plans, 500),
        ("plans-cancelled", |s| s.plans_cancelled, 50),
        ("plain-switches", |s| s.plain_switches, 800),
        ("late-stops", |s| s.late_stops, 800),
        ("odd-flushes", |s| s.odd_flushes, 0),
        ("ended-flushes", |s| s.ended_flushes, 0),
        ("replays", |s| s.replays, 1_500),
        ("spared-replays", |s| s.spared_replays, 100),
        ("simultaneous", |s| s.simultaneous, 300),
        ("wrong-suspicions", |s| s.wrong_suspicions, 500),
        ("chained", |s| s.chained, 100),
        ("stalls", |s| s.stalls, 15),
        ("wedged", |s| s.wedged, 15),
        ("one-port_path", |s| s.one_way, 200),
        ("stops", |s| s.stops, 60),
        ("crashes", |s| s.crashes, 30),
        ("refusals", |s| s.refusals, 20),
        ("own-errors", |s| s.own_errors, 80),
        ("own-plain", |s| s.plain_own_errors, 30),
        ("own-amid", |s| s.amid_own_errors, 10),
        ("ended-by-peer", |s| s.ended_by_peer, 40),
        ("own-hidden", |s| s.hidden_own_errors, 4),
        ("homecomings", |s| s.homecomings, 5),
        ("spared-qps", |s| s.spared_qps, 35),
        ("spared-paths", |s| s.spared_paths, 40),
        ("given-back", |s| s.given_back, 3),
        ("atomics", |s| s.atomics, 200),
        ("wraps", |s| s.wraps, 150),
        ("left-grey", |s| s.left_grey, 10),
        ("went-on", |s| s.went_on, 0),
        ("retransmits", |s| s.retransmits, 10_000),
        ("messages", |s| s.messages, 20_000),
        ("events", |s| s.events, 0),
    ];

    /// Adds the counts of another run.
    pub fn add(&mut self, o: &Stats) {
        self.schedules += o.schedules;
        self.switches += o.switches;
        self.planned += o.planned;
        self.plans += o.plans;
        self.plans_cancelled += o.plans_cancelled;
        self.plain_switches += o.plain_switches;
        self.late_stops += o.late_stops;
        self.odd_flushes += o.odd_flushes;
        self.ended_flushes += o.ended_flushes;
        self.replays += o.replays;
        self.spared_replays += o.spared_replays;
        self.simultaneous += o.simultaneous;
        self.wrong_suspicions += o.wrong_suspicions;
        self.chained += o.chained;
        self.stalls += o.stalls;
        self.wedged += o.wedged;
        self.one_way += o.one_way;
        self.stops += o.stops;
        self.crashes += o.crashes;
        self.refusals += o.refusals;
        self.own_errors += o.own_errors;
        self.plain_own_errors += o.plain_own_errors;
        self.amid_own_errors += o.amid_own_errors;
        self.ended_by_peer += o.ended_by_peer;
        self.hidden_own_errors += o.hidden_own_errors;
        self.homecomings += o.homecomings;
        self.spared_qps += o.spared_qps;
        self.spared_paths += o.spared_paths;
        self.given_back += o.given_back;
        self.atomics += o.atomics;
        self.wraps += o.wraps;
        self.left_grey += o.left_grey;
        self.went_on += o.went_on;
        self.retransmits += o.retransmits;
        self.messages += o.messages;
        self.events += o.events;
    }

    /// Each count: name, value, and the floor for that many schedules.
    pub fn rows(&self) -> impl Iterator<Item = (&'static str, u64, u64)> + '_ {
        Self::ROWS
            .iter()
            .map(|(name, get, floor)| (*name, get(self), floor * self.schedules / 1_000))
    }

    /// The counts that are below their floor. Only asked where there are enough schedules for
    /// chance not to matter.
    pub fn below_floor(&self) -> Vec<&'static str> {
        self.rows().filter(|(_, value, floor)| value < floor).map(|(name, ..)| name).collect()
    }
}
