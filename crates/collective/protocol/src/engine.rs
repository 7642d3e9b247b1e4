//! The engine of one rank: the operation that runs, its steps, what is said out of band, the time.
//!
//! What leaves is in `leaving`, what comes in `arriving`. Lanes stand in line by their rail. The
//! one in front sends its whole message, then the next has its turn: where messages are unequally
//! long, lanes carry unequally much, as schedules want it. How much a rail has on its way is
//! bounded ([`Config::window`]), so that turns mean something.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use unbroken_schedule::Program;

use crate::agree::Terms;
use crate::consent::Consent;
use crate::dispute::differs;
use crate::env::{Bytes, Env};
use crate::frame::{FrameKind, Header, CROSS, MEMORY, OUT_OF_BAND};
use crate::message::{Message, News};
use crate::mutants::{left_out, Mutant};
use crate::paths::{Peer, State, DETOURS};
use crate::rates::Rates;
use crate::run::{Ready, Run, Target};
use crate::trace::Traces;
use crate::tree;
use crate::views::Views;
use crate::{Failure, Rank};

/// Operations that are remembered, for ranks that are behind and ask.
pub(crate) const HISTORY: usize = 64;
/// A rank that stands still while others are in an earlier operation leaves it to them for this
/// part of the timeout more to say why.
const GRACE: u64 = 4;

/// What an engine is to be.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its rank.
    pub me: Rank,
    /// The host of each rank.
    pub hosts: Vec<u32>,
    /// Rails that all hosts have.
    pub rails: u8,
    /// Slots of a stream.
    pub slots: u64,
    /// Bytes of payload in a slot; a multiple of 8.
    pub payload: u32,
    /// Frames that a rail has on its way; to one rank half of them, while others wait for their
    /// turn.
    pub window: u32,
    /// After standing still for so long a rank tells the others what it is in.
    pub ask_us: u64,
    /// How long an operation may stand still (a quarter longer while others stand still in an
    /// earlier one), and two ranks be without a path.
    pub timeout_us: u64,
    /// Plan anew for the NICs that are left; else what a lost one carried goes over one other.
    pub balance: bool,
    /// Plan with what NICs were seen to carry; else with what the topology says.
    pub measure: bool,
    /// A rule that is left out, in tests that must notice.
    pub mutant: Option<Mutant>,
}

/// The engine of one rank.
pub struct Engine {
    pub(crate) config: Config,
    pub(crate) peers: Vec<Peer>,
    pub(crate) now_us: u64,
    /// Frames on their way, by rail.
    pub(crate) on_way: Vec<u32>,
    pub(crate) run: Option<Run>,
    /// The tag of what has come instead of what the operation that runs is to receive.
    pub(crate) misfit: Option<u64>,
    pub(crate) ready: VecDeque<u32>,
    /// Lanes that may send, by stream.
    pub(crate) turns: Vec<VecDeque<u32>>,
    pub(crate) failure: Option<Failure>,
    /// Grows with everything that goes on.
    pub(crate) progress: u64,
    /// The progress that was seen last, and since when.
    seen: (u64, u64),
    asked: bool,
    /// What this rank took operations for.
    pub(crate) history: VecDeque<(u64, Terms)>,
    /// What ranks have said, by operation.
    pub(crate) said: BTreeMap<u64, Vec<Option<Terms>>>,
    /// Operations whose description all were told.
    pub(crate) told: BTreeMap<u64, u64>,
    pub(crate) left: Vec<Option<u64>>,
    /// Operations that ranks begin, of those that begin no more.
    ends: Vec<Option<u64>>,
    /// An operation of which something has come that does not belong to it as it is taken here: from
    /// whom, and what, for developers.
    pub(crate) puzzle: Option<(u64, Rank, u32)>,
    /// Operations of all ranks that were done.
    pub(crate) done: u64,
    pub(crate) begun: u64,
    pub(crate) views: Views,
    pub(crate) rates: Rates,
    pub(crate) traces: Traces,
}

impl Engine {
    /// An engine that has nothing to do.
    pub fn new(config: Config) -> Engine {
        let (rails, ranks) = (usize::from(config.rails), config.hosts.len());
        Engine {
            peers: (0..ranks).map(|_| Peer::new(rails, config.slots)).collect(),
            now_us: 0,
            on_way: vec![0; rails + 1 + DETOURS],
            run: None,
            misfit: None,
            ready: VecDeque::new(),
            turns: vec![VecDeque::new(); rails + 1],
            failure: None,
            progress: 0,
            seen: (0, 0),
            asked: false,
            history: VecDeque::new(),
            said: BTreeMap::new(),
            told: BTreeMap::new(),
            left: vec![None; ranks],
            ends: vec![None; ranks],
            puzzle: None,
            done: 0,
            begun: 0,
            views: Views::new(1 + config.hosts.iter().max().map_or(0, |h| *h as usize)),
            rates: Rates::new(config.me, ranks, rails),
            traces: Traces::new(rails),
            config,
        }
    }

    /// The position of a stream or path in tables: rails, then memory, then paths that are no
    /// streams.
    pub(crate) fn index(&self, path: u8) -> usize {
        let rails = self.config.rails;
        match path {
            CROSS => usize::from(rails) + 1,
            OUT_OF_BAND => usize::from(rails) + 2,
            _ => usize::from(path.min(rails)),
        }
    }

    /// The stream or path of a position.
    pub(crate) fn rail(&self, at: usize) -> u8 {
        match at.checked_sub(usize::from(self.config.rails)) {
            None => at as u8,
            Some(0) => MEMORY,
            Some(1) => CROSS,
            Some(_) => OUT_OF_BAND,
        }
    }

    /// Why the communicator is broken, if it is.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Sets how long an operation may stand still from now on, and two ranks be without a path.
    pub fn set_timeout(&mut self, timeout_us: u64) {
        self.config.timeout_us = timeout_us;
    }

    /// Whether an operation runs and is not done.
    pub fn is_busy(&self) -> bool {
        self.run.as_ref().is_some_and(|run| !run.is_done())
    }

    /// Whether all that was sent has been used by its receivers. One that has left uses nothing any
    /// more: it has done its operations, or they are errors, and its last words may be lost with a
    /// path that nobody makes again.
    pub fn is_drained(&self) -> bool {
        let drained =
            |p: &Peer| p.outgoing.iter().all(|out| out.tx.is_drained() && out.control.is_empty());
        self.peers.iter().zip(&self.left).all(|(peer, left)| left.is_some() || drained(peer))
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.config.me
    }

    /// Whether no path waits to be made again.
    pub fn is_whole(&self) -> bool {
        self.peers
            .iter()
            .flat_map(|p| &p.paths[..=usize::from(self.config.rails)])
            .all(|path| matches!(path.state, State::Idle | State::Up))
    }

    /// A counter that grows with everything that goes on.
    pub fn progress(&self) -> u64 {
        self.progress
    }

    /// The state of the path to a peer, and its life.
    pub fn path(&self, peer: Rank, rail: u8) -> (State, u32) {
        let path = &self.peers[peer].paths[self.index(rail)];
        (path.state, path.life)
    }

    /// The rail that carries a stream to a peer.
    pub fn carrier(&self, peer: Rank, stream: u8) -> Option<u8> {
        self.peers[peer].outgoing[self.index(stream)].tx.carrier()
    }

    /// Begins an operation. The one before it must be done.
    pub fn start(
        &mut self,
        number: u64,
        terms: Terms,
        element_bytes: u64,
        program: Arc<Program>,
        env: &mut impl Env,
    ) {
        debug_assert!(!self.is_busy());
        self.begun = self.begun.max(number + 1);
        let paths = (self.config.hosts.len() * usize::from(self.config.rails)) as u64;
        let me = self.config.me;
        let digest = terms.description.digest();
        let mut run = Run::new(number, digest, me, element_bytes, paths, program);
        run.tag = terms.description.tag;
        run.has_pairs = terms.has_pairs();
        if !left_out!(self.config.mutant, NoConsent) {
            run.consent = Consent::of(&terms.agreed(me), me, self.peers.len());
        }
        self.misfit = None;
        self.history.push_back((number, terms));
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
        self.turns.iter_mut().for_each(VecDeque::clear);
        let to = run.lanes.iter().filter(|lane| lane.outgoing).map(|lane| lane.peer);
        let peers: Vec<Rank> = to.chain(run.consent.iter().flat_map(Consent::listeners)).collect();
        peers.into_iter().for_each(|peer| self.want_paths(peer, env));
        self.ready.extend(run.first());
        if let Some(consent) = &mut run.consent {
            let told = consent.begin();
            self.say(&run, told);
        }
        self.run = Some(run);
        self.seen = (self.progress, self.now_us);
        self.asked = false;
        if self.said.contains_key(&number) {
            // Somebody has asked already: who does not answer is taken for one who has not begun.
            self.tell_takes(number, env);
            self.judge(number, env);
        }
        self.settle(env);
        for peer in 0..self.peers.len() {
            (0..=self.config.rails).for_each(|at| self.consume(peer, usize::from(at), env));
        }
        self.pump(env);
    }

    /// The tag of what has come for the operation that runs, where that is to receive something
    /// with another tag. Nothing of it was received then.
    pub fn misfit(&self) -> Option<u64> {
        self.misfit
    }

    /// Takes an operation back of which nothing was received ([`Engine::misfit`],
    /// [`Engine::is_untouched`]): another one may begin under its number.
    pub fn retract(&mut self) {
        let Some(run) = self.run.take() else { return };
        self.misfit = None;
        self.ready.clear();
        self.turns.iter_mut().for_each(VecDeque::clear);
        self.history.retain(|(number, _)| *number != run.number);
        self.told.remove(&run.number);
        self.said.remove(&run.number);
    }

    /// The operation is done: forgets it. `collective`: it was one of all ranks.
    pub fn finish(&mut self, collective: bool) {
        self.run = None;
        self.done += u64::from(collective);
    }

    /// Does the steps that are ready, and what becomes ready by that.
    pub(crate) fn settle(&mut self, env: &mut impl Env) {
        let Some(mut run) = self.run.take() else { return };
        while let Some(step) = self.ready.pop_front() {
            self.progress += 1;
            match run.on_ready(step) {
                Ready::Local(step) => {
                    env.compute(&run.work(step));
                    run.finish(step, &mut self.ready);
                }
                Ready::Send(lane) => {
                    let at = self.index(run.lanes[lane as usize].stream);
                    self.turns[at].push_back(lane);
                }
                Ready::Fetch { lane, message, target, bytes, done } => {
                    let total = run.work(step).len() * run.element();
                    env.fetch(&Bytes { target, lane, message, offset: 0, len: bytes, total });
                    if let Some(step) = done {
                        self.received(&mut run, step);
                    }
                }
                Ready::Wait => {}
            }
        }
        self.run = Some(run);
    }

    /// A receive is done.
    pub(crate) fn received(&mut self, run: &mut Run, step: u32) {
        if let Some((peer, stream, lane, used)) = run.tells_used(step) {
            let at = self.index(stream);
            self.peers[peer].outgoing[at].control.push_back(Header {
                kind: FrameKind::Used,
                seq: 0,
                operation: run.number,
                digest: run.digest,
                lane,
                message: used,
                offset: 0,
                total: 0,
                len: 0,
                tag: 0,
            });
        }
        run.finish(step, &mut self.ready);
    }

    /// A message came out of band.
    pub fn on_message(&mut self, from: Rank, message: &Message, env: &mut impl Env) {
        let paths = usize::from(self.config.rails);
        let named =
            |path: u8| matches!(path, MEMORY | CROSS | OUT_OF_BAND) || usize::from(path) < paths;
        match message {
            Message::Want => self.want_paths(from, env),
            Message::Offer { rail, life, nics, address } if named(*rail) => {
                self.on_offer(from, (*rail, *life), *nics, address, env)
            }
            Message::Accept { rail, life, address } if named(*rail) => {
                self.on_accept(from, *rail, *life, address, env);
            }
            Message::Carries { rail, life } if named(*rail) => {
                self.on_carries(from, *rail, *life, env)
            }
            Message::Closed { rail, life, counts } if named(*rail) => {
                self.on_closed(from, *rail, *life, counts, env)
            }
            Message::News(news) => self.on_news(from, news, env),
            Message::Probe(probe) => self.on_probe(from, probe, env),
            Message::Measured(report) => self.on_measured(report, env),
            Message::Piece { .. } => self.on_piece(from, message, env),
            Message::Taken { life, bytes } => self.on_taken(from, *life, *bytes, env),
            Message::Notice { life, notice } => self.on_said_notice(from, *life, *notice, env),
            _ => self.broke(from, 11, env),
        }
    }

    /// The ranks that this one hands news to.
    pub fn neighbours(me: Rank, ranks: usize) -> impl Iterator<Item = Rank> {
        tree::neighbours(me, ranks)
    }

    pub(crate) fn spread(&mut self, from: Option<Rank>, news: &News, env: &mut impl Env) {
        for rank in tree::neighbours(self.config.me, self.peers.len()) {
            if Some(rank) != from {
                env.tell(rank, &Message::News(news.clone()));
            }
        }
    }

    fn on_news(&mut self, from: Rank, news: &News, env: &mut impl Env) {
        self.spread(Some(from), news, env);
        match news {
            News::Broken(failure) => self.failure = self.failure.take().or(Some(failure.clone())),
            News::Left { rank, done } => {
                if let Some(left) = self.left.get_mut(*rank) {
                    *left = Some(*done);
                    self.views.void();
                }
            }
            News::Ends { rank, begun, .. } => self.set_end(*rank, *begun),
            News::Takes { rank, number, terms } => {
                self.hear(*rank, *number, terms.clone());
                if self.history.iter().any(|(n, _)| n == number) {
                    self.tell_takes(*number, env);
                    self.judge(*number, env);
                }
            }
            News::Verdict(verdict) => self.on_verdict(verdict, env),
            News::Healed { place } => self.on_healed(*place, env),
            News::Propose { view, picture } => self.on_propose(*view, picture, env),
            News::Holds { rank, view, begun } => self.on_holds(*rank, *view, *begun, env),
            News::Agreed { view, from } => self.on_agreed(*view, *from, env),
        }
    }

    /// The process of a rank is gone.
    pub fn on_lost(&mut self, rank: Rank, env: &mut impl Env) {
        if self.left[rank].is_none() {
            self.fail(Failure::Lost { rank }, env);
        }
    }

    /// A rank that does not take part in the operation that is next to be done here, since it has
    /// left before, or is about to; how many it does.
    pub fn who_left(&self) -> Option<(Rank, u64)> {
        let does = |rank: Rank| self.left[rank].into_iter().chain(self.ends[rank]).min();
        let mut known = (0..self.left.len()).filter_map(|rank| Some((rank, does(rank)?)));
        known.find(|(_, does)| *does < self.done + 1)
    }

    /// A rank begins no more operations than these.
    pub fn set_end(&mut self, rank: Rank, begun: u64) {
        if let Some(end) = self.ends.get_mut(rank) {
            *end = Some(begun);
        }
    }

    /// This rank begins no more operations than these of all ranks, and these between two
    /// ([`News::Ends`]).
    pub fn end(&mut self, begun: u64, pairs: Vec<(Rank, u64, u64)>, env: &mut impl Env) {
        if self.failure.is_none() {
            self.spread(None, &News::Ends { rank: self.config.me, begun, pairs }, env);
        }
    }

    /// Whether nothing of the operation that runs has come. It can be taken back then.
    pub fn is_untouched(&self) -> bool {
        self.run.as_ref().is_none_or(Run::is_untouched)
    }

    /// This rank has no more to do.
    pub fn leave(&mut self, env: &mut impl Env) {
        if self.failure.is_none() {
            let news = News::Left { rank: self.config.me, done: self.done };
            self.spread(None, &news, env);
        }
    }

    pub(crate) fn broke(&mut self, rank: Rank, what: u32, env: &mut impl Env) {
        self.fail(Failure::Broke { rank, by: self.config.me, what }, env);
    }

    pub(crate) fn fail(&mut self, failure: Failure, env: &mut impl Env) {
        if self.failure.is_none() {
            self.failure = Some(failure.clone());
            self.spread(None, &News::Broken(failure), env);
        }
    }

    /// Breaks the communicator, for a reason from outside; all ranks are told.
    pub fn break_off(&mut self, failure: Failure, env: &mut impl Env) {
        self.fail(failure, env);
    }

    /// Does nothing more, and tells nobody: what has failed is said elsewhere.
    pub fn halt(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
    }

    /// What comes and goes from now on does so at this time. To be called before completions are
    /// given: what is measured is as exact as this.
    pub fn keep_time(&mut self, now_us: u64) {
        self.now_us = self.now_us.max(now_us);
    }

    /// Time goes on. To be called every few milliseconds, at least while an operation runs.
    pub fn on_time(&mut self, now_us: u64, env: &mut impl Env) {
        self.now_us = self.now_us.max(now_us);
        if self.failure.is_some() {
            return;
        }
        self.tend_paths(env);
        self.tend_traces(env);
        self.tend_rates(env);
        self.tend_views(env);
        let Some(run) = self.run.as_ref().filter(|run| !run.is_done()) else { return };
        let number = run.number;
        if let Some((rank, done)) = self.who_left() {
            return self.fail(Failure::Left { rank, done }, env);
        }
        if self.seen.0 != self.progress {
            self.seen = (self.progress, self.now_us);
            self.asked = false;
        }
        let still_us = self.now_us - self.seen.1;
        if still_us > self.config.ask_us && !self.asked {
            self.asked = true;
            self.tell_takes(number, env);
        }
        self.judge(number, env);
        let grace_us =
            if self.others_are_behind(number) { self.config.timeout_us / GRACE } else { 0 };
        if still_us > self.config.timeout_us + grace_us {
            self.fail(self.stalled(number), env);
        }
    }

    /// Whether some other has asked about an earlier operation since this rank stands still: that
    /// is where it hangs, and who is in it knows whom it waits for.
    fn others_are_behind(&self, number: u64) -> bool {
        !self.is_hasty() && self.told.range(..number).any(|(_, at_us)| *at_us >= self.seen.1)
    }

    /// What there is to say of an operation that stands still. Who has answered lives, and waits as
    /// this rank does: one that has not is named first.
    fn stalled(&self, number: u64) -> Failure {
        if let Some(differs) = self.said.get(&number).and_then(|said| differs(number, said)) {
            return differs;
        }
        let (by, missing) = (self.config.me, self.silent(number));
        let waits_for = self.run.as_ref().and_then(Run::waits_for).unwrap_or(by);
        let from = match missing.first() {
            Some(silent) if !missing.contains(&waits_for) && !self.is_hasty() => *silent,
            _ => waits_for,
        };
        let seconds = (self.config.timeout_us / 1_000_000) as u32;
        Failure::Stalled { by, number, from, missing, seconds }
    }

    fn is_hasty(&self) -> bool {
        left_out!(self.config.mutant, Hasty)
    }
}

/// Where bytes of a message that lie aside belong to.
impl Bytes {
    /// Whether they are to be laid aside.
    pub fn is_aside(&self) -> bool {
        self.target == Target::Aside
    }
}
