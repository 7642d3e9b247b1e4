//! What is known of each queue pair, and what is to be done: no verb is called here, and time is
//! handed in.
//!
//! The states are those of one end as its owner sees it. `pick` stands for the best path but the
//! one in use, if it is healthy ([`Machine::port`] says which ports are up); *revised* is what
//! happens after a pause: if the best path is not loaded, it is.
//!
//! | state | what happens | next state | what else |
//! | --- | --- | --- | --- |
//! | UNLOADED, REARM, ARMED, FAILED | the owner asks to load | LOADING | the device is given `pick`; without one the owner is told |
//! | LOADING | the device has it | REARM | queried after pauses that grow |
//! | LOADING | the device refuses it | FAILED | event |
//! | REARM | a query says ARMED | ARMED | event |
//! | REARM | not within the time for it | REARM | event, once |
//! | ARMED | the owner asks to migrate | MIGRATING | the device is asked |
//! | REARM, ARMED, MIGRATING | the device's event, or a query, says MIGRATED | UNLOADED | event; revised |
//! | MIGRATING | not within the time for it, or the device's event of failure | ARMED | event |
//! | REARM, ARMED | the loaded path's port goes down | the same | event; revised |
//! | REARM, ARMED | a better path's port has come up and stayed so | LOADING | event if it is another path than was loaded |
//! | any | a query says that the queue pair is in error | FAILED | event |
//!
//! The path that was in use when the others were specified is the best of all, unless the owner has
//! placed it elsewhere: so one that has migrated goes back there next. Two ends that load different
//! ways cannot follow each other, and what has failed one of them may know alone. So it is the best
//! path that is loaded or none, unless the owner says that it tells its peer of others
//! ([`Settings::respecify`]); then a path that the device could not go to is the last choice for
//! [`SUSPECT_US`].
//!
//! A migration is told by an event of the device, and by a query that comes before that. The event
//! is then stale; it may arrive when the next path is loaded already, so an event that could be
//! such a one is answered by a query. Of two migrations between which the owner has loaded a path
//! without having heard of the first, one is counted.
//!
//! Bounds: [`MAX_QPS`] queue pairs with [`MAX_PATHS`] paths each, [`MAX_EVENTS`] events that nobody
//! took, [`MAX_ACTIONS`] things to do at a time, and in the long run [`QUERIES_PER_SECOND`].

mod due;
mod timers;

#[cfg(test)]
mod tests;

use crate::path::{Path, MAX_PATHS};
use std::collections::{HashMap, VecDeque};
use timers::Timers;
use unbroken_types::PathMigState;

/// Most queue pairs.
pub const MAX_QPS: usize = 65_536;
/// Most events that wait to be taken; older ones are lost.
pub const MAX_EVENTS: usize = 65_536;
/// Most actions of one call.
pub const MAX_ACTIONS: usize = 256;
/// The device is queried this often at most, once the short first pauses are over.
pub const QUERIES_PER_SECOND: u64 = 5_000;
/// For so long a path that could not be migrated to is the last choice.
pub const SUSPECT_US: u64 = 1_000_000;
/// Until a path is loaded after a migration: a port's death is often told just after it, and the
/// peer is to hear of it first.
pub const SETTLE_US: u64 = 10_000;
/// A port has been up for so long before a better path is loaded in place of one that does.
pub const STEADY_US: u64 = 1_000_000;
/// Pauses between queries: the first, and the longest of a few queue pairs.
const FIRST_QUERY_US: u64 = 50;
const LAST_QUERY_US: u64 = 20_000;

/// A queue pair's name here.
pub type Id = usize;

/// How far one is; the numbers are the header's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub enum State {
    Unloaded = 0,
    Loading = 1,
    Rearm = 2,
    Armed = 3,
    Migrating = 4,
    Failed = 5,
}

/// What the owner is told; the numbers are in `c.rs`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Kind {
    Armed,
    Migrated { asked: bool },
    MigrationFailed,
    Unhealthy,
    Healthy,
    Respecified,
    LoadLate,
    LoadFailed { errno: i32 },
    QpFailed,
}

/// Something that the owner is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// Of which queue pair.
    pub id: Id,
    /// What.
    pub kind: Kind,
    /// In use now after a migration, else the one that it is about.
    pub path: Path,
    /// When it was noticed.
    pub at_us: u64,
}

/// Something that the shell is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Give the device this path; then [`Machine::loaded`] or [`Machine::refused`].
    Load(Id, Path),
    /// Ask the device; then [`Machine::observed`].
    Query(Id),
}

/// What the device tells of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Observed {
    /// It is not in a state in which it could migrate.
    pub broken: bool,
    /// Its state of migration.
    pub state: PathMigState,
    /// The path in use.
    pub primary: Path,
    /// The alternate path, if the device has one.
    pub alternate: Option<Path>,
}

/// Why something was not done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// It was not added.
    Unknown,
    /// It has been added already.
    Twice,
    /// There are [`MAX_QPS`].
    Full,
    /// Not in this state.
    State(State),
    /// It has no path but the one in use.
    NoPath,
    /// So many paths, and the ports of those that are not in use are down.
    Unhealthy(Vec<u8>),
    /// It has too many paths, or none.
    Paths(usize),
}

/// What is known of one queue pair, for its owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub struct Info {
    pub state: State,
    pub primary: Path,
    pub loaded: Option<Path>,
    pub healthy: bool,
    pub paths: usize,
    pub migrations: u64,
}

/// How it is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Nothing is loaded but what the owner asks for.
    pub manual: bool,
    /// In place of a path that is not healthy the next best is loaded. The owner sees to it that
    /// the peer does the same.
    pub respecify: bool,
    /// Until [`Kind::LoadLate`].
    pub load_timeout_us: u64,
    /// Until [`Kind::MigrationFailed`].
    pub migrate_timeout_us: u64,
}

#[derive(Debug)]
struct Link {
    state: State,
    primary: Path,
    loaded: Option<Path>,
    /// The best first; the one in use is among them.
    paths: Vec<Path>,
    /// The owner has asked to load, and the library keeps one loaded.
    keep: bool,
    /// The owner has asked to migrate.
    asked: bool,
    /// The loaded path's port is down, which the owner has been told.
    unhealthy: bool,
    /// The path that could not be migrated to, and until when that counts.
    suspect: Option<(Path, u64)>,
    /// Queries have shown migrations whose events have not come.
    unclaimed: u32,
    migrations: u64,
    late: bool,
    /// When the state is late.
    deadline_us: Option<u64>,
    query_us: Option<u64>,
    pause_us: u64,
    revise_us: Option<u64>,
}

/// All queue pairs of a device context.
#[derive(Debug)]
pub struct Machine {
    settings: Settings,
    links: HashMap<Id, Link>,
    timers: Timers,
    ports: [bool; 256],
    events: VecDeque<Event>,
    lost: bool,
    /// In state REARM.
    waiting: usize,
}

impl Machine {
    /// Without queue pairs; all ports are up until [`Machine::port`] says otherwise.
    pub fn new(settings: Settings) -> Machine {
        Machine {
            settings,
            links: HashMap::new(),
            timers: Timers::default(),
            ports: [true; 256],
            events: VecDeque::new(),
            lost: false,
            waiting: 0,
        }
    }

    // What the owner asks for

    /// Another queue pair, as the device tells of it.
    pub fn add(&mut self, id: Id, now: Observed, now_us: u64) -> Result<(), Refusal> {
        if self.links.contains_key(&id) {
            return Err(Refusal::Twice);
        }
        if self.links.len() == MAX_QPS {
            return Err(Refusal::Full);
        }
        let link = Link {
            state: State::Unloaded,
            primary: now.primary,
            loaded: None,
            paths: vec![now.primary],
            keep: false,
            asked: false,
            unhealthy: false,
            suspect: None,
            unclaimed: 0,
            migrations: 0,
            late: false,
            deadline_us: None,
            query_us: None,
            pause_us: FIRST_QUERY_US,
            revise_us: None,
        };
        self.links.insert(id, link);
        self.observed(id, now, now_us);
        Ok(())
    }

    /// It is forgotten, with its events.
    pub fn remove(&mut self, id: Id) -> Result<(), Refusal> {
        self.enter(id, State::Unloaded);
        self.links.remove(&id).ok_or(Refusal::Unknown)?;
        self.timers.remove(id);
        self.events.retain(|e| e.id != id);
        Ok(())
    }

    /// All that were added, in the order of their names.
    pub fn ids(&self) -> Vec<Id> {
        let mut ids: Vec<Id> = self.links.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// Whether it was added.
    pub fn has(&self, id: Id) -> bool {
        self.links.contains_key(&id)
    }

    /// What is known of it.
    pub fn info(&self, id: Id) -> Result<Info, Refusal> {
        let l = self.links.get(&id).ok_or(Refusal::Unknown)?;
        Ok(Info {
            state: l.state,
            primary: l.primary,
            loaded: l.loaded,
            healthy: l.loaded.is_some_and(|p| self.ports[usize::from(p.attr.port)]),
            paths: l.paths.len(),
            migrations: l.migrations,
        })
    }

    /// Its paths, the best first; the one in use is the best, where it is not among them. What is
    /// loaded stays until the next load.
    pub fn specify(&mut self, id: Id, paths: &[Path]) -> Result<(), Refusal> {
        let link = self.links.get_mut(&id).ok_or(Refusal::Unknown)?;
        let mut all = paths.to_vec();
        if !all.iter().any(|p| p.is_way_of(&link.primary)) {
            all.insert(0, link.primary);
        }
        if paths.is_empty() || all.len() > MAX_PATHS {
            return Err(Refusal::Paths(paths.len()));
        }
        if link.state == State::Migrating {
            return Err(Refusal::State(link.state));
        }
        link.paths = all;
        Ok(())
    }

    /// Gives the path that the device is to be given, which is then said to [`Machine::loaded`] or
    /// [`Machine::refused`].
    pub fn begin_load(&mut self, id: Id, now_us: u64) -> Result<Path, Refusal> {
        let manual = self.settings.manual;
        let link = self.links.get_mut(&id).ok_or(Refusal::Unknown)?;
        if matches!(link.state, State::Loading | State::Migrating) {
            return Err(Refusal::State(link.state));
        }
        if link.paths.len() < 2 {
            return Err(Refusal::NoPath);
        }
        link.keep = !manual;
        let Some(path) = self.pick(id, now_us) else {
            let link = &self.links[&id];
            let others = link.paths.iter().filter(|p| !p.is_way_of(&link.primary));
            return Err(Refusal::Unhealthy(others.map(|p| p.attr.port).collect()));
        };
        self.start_load(id, path);
        Ok(path)
    }

    /// The device is to be asked to migrate; if it refuses, [`Machine::migration_refused`].
    pub fn begin_migrate(&mut self, id: Id, now_us: u64) -> Result<(), Refusal> {
        let deadline_us = now_us + self.settings.migrate_timeout_us;
        let link = self.links.get_mut(&id).ok_or(Refusal::Unknown)?;
        if link.state != State::Armed {
            return Err(Refusal::State(link.state));
        }
        link.asked = true;
        link.deadline_us = Some(deadline_us);
        self.enter(id, State::Migrating);
        Ok(())
    }

    /// The device has refused to migrate.
    pub fn migration_refused(&mut self, id: Id) {
        if self.state(id) == Some(State::Migrating) {
            self.enter(id, State::Armed);
        }
    }

    // What the device tells

    /// The device has taken the path, and is to become ARMED.
    pub fn loaded(&mut self, id: Id, now_us: u64) {
        let deadline_us = now_us + self.settings.load_timeout_us;
        if self.state(id) == Some(State::Loading) {
            self.enter(id, State::Rearm);
            if let Some(link) = self.links.get_mut(&id) {
                (link.late, link.deadline_us) = (false, Some(deadline_us));
                (link.query_us, link.pause_us) = (Some(now_us + FIRST_QUERY_US), FIRST_QUERY_US);
            }
            self.set_timer(id);
        }
    }

    /// The device has refused the path.
    pub fn refused(&mut self, id: Id, errno: i32, now_us: u64) {
        if let Some(path) = self
            .links
            .get_mut(&id)
            .filter(|l| l.state == State::Loading)
            .and_then(|l| l.loaded.take())
        {
            self.enter(id, State::Failed);
            self.tell(id, Kind::LoadFailed { errno }, path, now_us);
        }
    }

    /// The device's event that it has migrated. A query may be due.
    pub fn migrated(&mut self, id: Id, now_us: u64) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let could = matches!(link.state, State::Rearm | State::Armed | State::Migrating);
        if could && link.unclaimed == 0 {
            self.has_migrated(id, None, now_us);
        } else {
            link.unclaimed = link.unclaimed.saturating_sub(1);
            self.query_at(id, now_us);
        }
    }

    /// The device's event that it could not migrate.
    pub fn migration_failed(&mut self, id: Id, now_us: u64) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let Some(path) = link.loaded else { return };
        link.suspect = Some((path, now_us + SUSPECT_US));
        link.revise_us = Some(now_us + SETTLE_US);
        if link.state == State::Migrating {
            self.enter(id, State::Armed);
        }
        self.tell(id, Kind::MigrationFailed, path, now_us);
        self.query_at(id, now_us);
    }

    /// The device's event that something has changed, which a query tells: that it is ARMED, where
    /// there is such an event, or in error.
    pub fn look(&mut self, id: Id, now_us: u64) {
        self.query_at(id, now_us);
    }

    /// A query has failed: the device has lost it.
    pub fn unanswered(&mut self, id: Id, now_us: u64) {
        if let Some(primary) = self.links.get(&id).map(|l| l.primary) {
            let it =
                Observed { broken: true, state: PathMigState::Migrated, primary, alternate: None };
            self.observed(id, it, now_us);
        }
    }

    /// The answer of a query.
    pub fn observed(&mut self, id: Id, it: Observed, now_us: u64) {
        use PathMigState::*;
        let Some(link) = self.links.get_mut(&id) else { return };
        link.query_us = None;
        let state = link.state;
        if matches!((state, it.state), (State::Unloaded, _) | (_, Rearm | Armed)) && !it.broken {
            // What was known is the less certain: a path may have been loaded while the device was
            // migrating.
            link.primary = it.primary;
        }
        match (state, it.state) {
            (State::Failed, _) if it.broken => self.set_timer(id),
            _ if it.broken => {
                link.keep = false;
                self.enter(id, State::Failed);
                self.tell(id, Kind::QpFailed, it.primary, now_us);
            }
            (State::Rearm | State::Armed | State::Migrating, Migrated) => {
                link.unclaimed += 1;
                self.has_migrated(id, Some(it.primary), now_us);
            }
            (State::Rearm, Armed) => {
                let path = link.loaded.unwrap_or_default();
                self.enter(id, State::Armed);
                self.tell(id, Kind::Armed, path, now_us);
            }
            // Asked for beside the library, by the program itself.
            (State::Unloaded | State::Failed, Rearm | Armed) if it.alternate.is_some() => {
                link.loaded = it.alternate;
                self.enter(id, State::Loading);
                self.loaded(id, now_us);
                if it.state == Armed {
                    self.enter(id, State::Armed);
                }
            }
            (State::Armed, Rearm) => {
                self.enter(id, State::Loading);
                self.loaded(id, now_us);
            }
            (State::Rearm, Rearm) | (State::Migrating, Armed) => self.query_later(id, now_us),
            _ => self.set_timer(id),
        }
    }

    /// A port is up, or is not.
    pub fn port(&mut self, port: u8, up: bool, now_us: u64) {
        if std::mem::replace(&mut self.ports[usize::from(port)], up) == up {
            return;
        }
        for id in self.ids() {
            let Some(link) = self.links.get_mut(&id) else { continue };
            if !link.paths.iter().chain(&link.loaded).any(|p| p.attr.port == port) {
                continue;
            }
            let loaded = link.loaded.filter(|p| {
                p.attr.port == port && matches!(link.state, State::Rearm | State::Armed)
            });
            let pause_us = match (loaded, up) {
                (Some(_), false) => 0,
                (None, true) if link.loaded.is_some() => STEADY_US,
                _ => SETTLE_US,
            };
            link.revise_us = Some(now_us + pause_us);
            if let Some(path) = loaded.filter(|_| std::mem::replace(&mut link.unhealthy, !up) == up)
            {
                self.tell(id, if up { Kind::Healthy } else { Kind::Unhealthy }, path, now_us);
            }
            self.set_timer(id);
        }
    }

    // Changes

    fn state(&self, id: Id) -> Option<State> {
        self.links.get(&id).map(|l| l.state)
    }

    fn enter(&mut self, id: Id, state: State) {
        let Some(link) = self.links.get_mut(&id) else { return };
        self.waiting = self.waiting + usize::from(state == State::Rearm)
            - usize::from(link.state == State::Rearm);
        link.state = state;
        if !matches!(state, State::Rearm | State::Migrating) {
            (link.deadline_us, link.query_us) = (None, None);
        }
        if state != State::Migrating {
            link.asked = false;
        }
        self.set_timer(id);
    }

    fn start_load(&mut self, id: Id, path: Path) {
        if let Some(link) = self.links.get_mut(&id) {
            (link.loaded, link.unhealthy, link.late) = (Some(path), false, false);
        }
        self.enter(id, State::Loading);
    }

    fn has_migrated(&mut self, id: Id, primary: Option<Path>, now_us: u64) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let left = link.primary;
        let taken = link.loaded.take();
        link.primary = primary.or(taken).unwrap_or(left);
        if !link.paths.iter().any(|p| p.is_way_of(&link.primary)) && link.paths.len() < MAX_PATHS {
            link.paths.push(link.primary);
        }
        let (asked, path) = (link.asked, link.primary);
        link.revise_us = Some(now_us + SETTLE_US);
        link.unhealthy = false;
        link.migrations += 1;
        self.enter(id, State::Unloaded);
        self.tell(id, Kind::Migrated { asked }, path, now_us);
        if primary.is_none() {
            // Where it went is what was loaded, unless it was being loaded just then: that is asked
            // before the next path is.
            self.query_at(id, now_us + SETTLE_US);
        }
    }

    fn query_at(&mut self, id: Id, at_us: u64) {
        if let Some(link) = self.links.get_mut(&id) {
            link.query_us = Some(at_us);
        }
        self.set_timer(id);
    }

    /// The next pause of a queue pair is twice as long, up to where all that wait make
    /// [`QUERIES_PER_SECOND`].
    fn query_later(&mut self, id: Id, now_us: u64) {
        let longest_us = LAST_QUERY_US.max(self.waiting as u64 * 1_000_000 / QUERIES_PER_SECOND);
        if let Some(link) = self.links.get_mut(&id) {
            link.pause_us = (link.pause_us * 2).min(longest_us);
            link.query_us = Some(now_us + link.pause_us);
        }
        self.set_timer(id);
    }

    fn set_timer(&mut self, id: Id) {
        let times = self.links.get(&id).map(|l| [l.deadline_us, l.query_us, l.revise_us]);
        self.timers.set(id, times.into_iter().flatten().flatten().min());
    }

    fn tell(&mut self, id: Id, kind: Kind, path: Path, at_us: u64) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
            self.lost = true;
        }
        self.events.push_back(Event { id, kind, path, at_us });
    }

    /// The oldest event that was not taken.
    pub fn take_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether there are events to take.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether events were lost since this was asked last.
    pub fn take_lost(&mut self) -> bool {
        std::mem::take(&mut self.lost)
    }
}
