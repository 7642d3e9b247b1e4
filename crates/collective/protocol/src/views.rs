//! Agreement on the picture with which all ranks plan: which NICs are down, and how fast the others
//! are.
//!
//! Plans depend on the picture, so all ranks must switch to a new picture at the same operation.
//! Rank 0 proposes a *view*. Each rank replies with the number of operations that it has started,
//! and starts no others meanwhile. When all have replied, rank 0 announces that the view applies
//! from the first operation that no rank has started. Ranks wait only for this, one round along the
//! tree. Running operations continue while a view is being agreed on.
//!
//! | event | rank 0 | others |
//! | --- | --- | --- |
//! | what is down has changed, or a measured rate (at most once a second) | `Propose` | |
//! | `Propose` | hold | hold; `Holds` |
//! | `Holds` of all | `Agreed` from the largest count on | |
//! | `Agreed` | go on | go on |
//! | a rank has left | go on, propose no more | go on, hold no more |
//!
//! A view applies only to operations that no rank had started. After a rank has left, these
//! operations are no longer possible, because that rank has completed all that it had started. So
//! an agreement in progress is void, and ranks continue with the previous view. Ranks that know
//! that another has left and ranks that do not know it yet may use different views, but only for
//! operations that fail with [`Failure::Left`].
//!
//! Invariant: all ranks use the same view for every operation, because none had started it when the
//! view was decided. An operation starts when its view is looked up, not when it is planned.

use std::sync::Arc;

use unbroken_schedule::planner::{self, Planned};
use unbroken_schedule::{Collective, Fabric, Folding, Form, Topology};

use crate::engine::Engine;
use crate::env::{Env, Note};
use crate::locate::{Place, Verdict};
use crate::message::News;
use crate::mutants::left_out;
use crate::picture::Picture;
use crate::{Failure, Rank};

/// The shortest life of a view. Otherwise flapping NICs would cause constant agreement.
const LASTS_US: u64 = 20_000;
/// The shortest life of a view if only measurements have changed. It doubles each time they change
/// again within a few times this interval, up to the longest one.
const MEASURED_LASTS_US: u64 = 1_000_000;
const LASTS_MOST_US: u64 = 64 * MEASURED_LASTS_US;
const AGAIN: u64 = 4;

/// A view on which ranks are agreeing.
#[derive(Clone, Debug)]
struct Proposal {
    view: u32,
    picture: Arc<Picture>,
    /// At rank 0: the number of operations that each rank has started.
    begun: Vec<Option<u64>>,
    since_us: u64,
}

/// The views of a rank.
#[derive(Debug)]
pub(crate) struct Views {
    /// The NICs that are known to be down: for each host, a bit for each NIC.
    known: Vec<u64>,
    /// At rank 0: the shortest life of a view if only measurements change.
    lasts_us: u64,
    /// The views for operations that have not started, in order: number, first operation, picture.
    agreed: Vec<(u32, u64, Arc<Picture>)>,
    proposal: Option<Proposal>,
    changed_us: u64,
}

impl Views {
    pub(crate) fn new(hosts: usize) -> Views {
        Views {
            known: vec![0; hosts],
            lasts_us: MEASURED_LASTS_US,
            agreed: vec![(0, 0, Arc::new(Picture::new(hosts)))],
            proposal: None,
            changed_us: 0,
        }
    }

    /// Records that a rank has left: there is no further agreement.
    pub(crate) fn void(&mut self) {
        self.proposal = None;
    }

    fn knows(&self, place: Place) -> bool {
        self.known.get(place.host as usize).is_some_and(|rails| rails >> place.rail & 1 == 1)
    }
}

/// Plans an operation for the NICs that are up, with their rates. If hosts that exchange data have
/// no rail in common, the plan assumes that rails are connected, and streams take detours. If a
/// host has no NIC that is up, the plan uses all NICs. A requested form is used if it has a plan
/// ([`planner::plan_as`]).
pub fn plan(
    topology: &Topology,
    picture: &Picture,
    collective: &Collective,
    folding: Folding,
    form: Option<Form>,
) -> Result<Planned, unbroken_schedule::Error> {
    let now = picture.of_topology(topology)?;
    let costs = picture.costs();
    let plan = |topology: &Topology| planner::plan_as(topology, collective, &costs, folding, form);
    match plan(&now) {
        Err(_) if now != *topology => {
            plan(&now.with_fabric(Fabric::AnyToAny)).or_else(|_| plan(topology))
        }
        planned => planned,
    }
}

impl Engine {
    /// Starts an operation: returns the number of its view, and the picture. From now on the
    /// operation counts as started, however long planning takes. `None`: wait, because ranks are
    /// agreeing on a view.
    pub fn take_up(&mut self, number: u64) -> Option<(u32, Arc<Picture>)> {
        if self.views.proposal.is_some() {
            return None;
        }
        if !left_out!(self.config.mutant, LateBegin) {
            self.begun = self.begun.max(number + 1);
        }
        let of = self.views.agreed.iter().rev().find(|(_, from, _)| *from <= number);
        of.map(|(view, _, picture)| (*view, picture.clone()))
    }

    /// Whether a NIC is known to be down.
    pub(crate) fn is_known(&self, host: u32, rail: u8) -> bool {
        self.views.knows(Place { host, rail })
    }

    /// Records that a path works again: its NICs are healthy.
    pub(crate) fn say_healed(&mut self, peer: Rank, rail: u8, env: &mut impl Env) {
        for host in [self.config.hosts[self.config.me], self.config.hosts[peer]] {
            let place = Place { host, rail };
            if self.views.knows(place) {
                self.spread(None, &News::Healed { place }, env);
                self.on_healed(place, env);
            }
        }
    }

    pub(crate) fn on_verdict(&mut self, verdict: &Verdict, env: &mut impl Env) {
        env.note(&Note::Located(*verdict));
        for place in verdict.fault.places(self.views.known.len() as u32) {
            if let (Some(rails), true) =
                (self.views.known.get_mut(place.host as usize), place.rail < 64)
            {
                *rails |= 1 << place.rail;
            }
        }
        self.propose(env);
    }

    pub(crate) fn on_healed(&mut self, place: Place, env: &mut impl Env) {
        if self.views.knows(place) {
            self.views.known[place.host as usize] &= !(1 << place.rail);
            env.note(&Note::Healed(place));
        }
        self.propose(env);
    }

    pub(crate) fn has_anyone_left(&self) -> bool {
        self.left.iter().any(Option::is_some)
    }

    /// At rank 0: proposes the current state, if it differs from the current view.
    fn propose(&mut self, env: &mut impl Env) {
        if self.config.me != 0
            || !(self.config.balance || self.config.measure)
            || self.views.proposal.is_some()
            || self.has_anyone_left()
        {
            return;
        }
        let (known, all_measured) = (self.views.known.clone(), self.has_measured_all());
        let Some((view, _, holds)) = self.views.agreed.last() else { return };
        let (view, holds) = (view + 1, holds.clone());
        let down = if self.config.balance { known } else { holds.down.clone() };
        let other = down != holds.down;
        // What is down comes soon, and with what was measured by then.
        let lasts_us = if other { LASTS_US } else { self.views.lasts_us };
        // The first that all have a part in comes at once.
        let first = !other && holds.mbps == 0 && all_measured;
        let picture = self.measured_picture(&down);
        // So does it that a NIC is not slow after all.
        let better = picture.slow.len() < holds.slow.len();
        let early = self.now_us < self.views.changed_us + lasts_us && !first && !better;
        if early || !(other || picture.is_news(&holds)) {
            return;
        }
        if !other && !first && !better {
            let again = self.now_us < self.views.changed_us + AGAIN * lasts_us;
            let longer_us = (2 * lasts_us).min(LASTS_MOST_US);
            self.views.lasts_us = if again { longer_us } else { MEASURED_LASTS_US };
        }
        self.spread(None, &News::Propose { view, picture: picture.clone() }, env);
        self.on_propose(view, &picture, env);
    }

    pub(crate) fn on_propose(&mut self, view: u32, picture: &Picture, env: &mut impl Env) {
        if self.has_anyone_left() {
            return;
        }
        let (rank, begun) = (self.config.me, self.begun);
        let ranks = self.peers.len();
        self.views.proposal = Some(Proposal {
            view,
            picture: Arc::new(picture.clone()),
            begun: vec![None; ranks],
            since_us: self.now_us,
        });
        if rank == 0 {
            self.on_holds(0, view, begun, env);
        } else {
            self.spread(None, &News::Holds { rank, view, begun }, env);
        }
    }

    pub(crate) fn on_holds(&mut self, rank: Rank, view: u32, begun: u64, env: &mut impl Env) {
        let Some(proposal) =
            self.views.proposal.as_mut().filter(|p| self.config.me == 0 && p.view == view)
        else {
            return;
        };
        if let Some(of) = proposal.begun.get_mut(rank) {
            *of = Some(begun);
        }
        if proposal.begun.iter().any(Option::is_none) {
            return;
        }
        let from = proposal.begun.iter().flatten().max().copied().unwrap_or(0);
        self.spread(None, &News::Agreed { view, from }, env);
        self.on_agreed(view, from, env);
    }

    pub(crate) fn on_agreed(&mut self, view: u32, from: u64, env: &mut impl Env) {
        let Some(proposal) = self.views.proposal.take_if(|p| p.view == view) else { return };
        env.note(&Note::Replanned { from, picture: proposal.picture.clone() });
        let agreed = &mut self.views.agreed;
        // One that would have held from there on holds for nothing.
        agreed.retain(|(_, other, _)| *other < from);
        agreed.push((view, from, proposal.picture));
        // The last one that was begun may be taken back and begun anew ([`Engine::retract`]); those
        // before its view hold for nothing any more.
        let last = self.begun.saturating_sub(1);
        let next = agreed.iter().rposition(|(_, from, _)| *from <= last).unwrap_or(0);
        agreed.drain(..next);
        self.views.changed_us = self.now_us;
    }

    /// Proposes changes that were too early before, and ends agreements that take too long.
    pub(crate) fn tend_views(&mut self, env: &mut impl Env) {
        self.propose(env);
        let Some(proposal) = &self.views.proposal else { return };
        let since_us = proposal.since_us;
        if self.now_us > since_us + self.config.timeout_us {
            let missing = proposal.begun.iter().position(Option::is_none).unwrap_or(0);
            let seconds = (self.config.timeout_us / 1_000_000) as u32;
            let (by, number) = (self.config.me, self.begun);
            let from = if by == 0 { missing } else { 0 };
            self.fail(Failure::Stalled { by, number, from, missing: Vec::new(), seconds }, env);
        }
    }
}
