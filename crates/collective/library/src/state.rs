//! What a communicator consists of, and what is done with it: whoever holds the lock drives, which
//! is whoever waits, or else the thread out of band.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use unbroken_collective_protocol::agree::Description;
use unbroken_collective_protocol::message::{Message, News as Word};
use unbroken_collective_protocol::{Config, Engine, Failure, Note, ProbeId, Rank};
use unbroken_schedule::{Collective, Fabric, Host as HostShape, Place, Topology};

use crate::anysource::AnySource;
use crate::channel::{ends, transfer, Channel, Wish, ALL};
use crate::conn::Waker;
use crate::ending::End;
use crate::env::LibraryEnv;
use crate::net::{Net, News};
use crate::oob::{Event, Oob};
use crate::operands::Spans;
use crate::span::Span;
use crate::status::Board;

/// How often engines are told the time.
const TICK: Duration = Duration::from_micros(500);
/// How long a thread that waits and finds nothing to do yields only; afterwards it sleeps between
/// looks.
const YIELDS: Duration = Duration::from_millis(5);
const NAP: Duration = Duration::from_micros(50);
/// How long the thread out of band sleeps between looks while operations are under way and nobody
/// waits: longer the longer nothing has come.
const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(1);
/// How long it drives before it looks at its connections again.
const STRETCH: Duration = Duration::from_millis(2);
/// How often it looks after an idle communicator that has something to look after, and one that has
/// not.
const TENDS: Duration = Duration::from_millis(5);
const RESTS: Duration = Duration::from_millis(100);

/// What threads share.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Threads that want the lock for a moment: who drives lets them.
    wanting: AtomicUsize,
    /// Operations under way.
    under_way: AtomicU32,
    /// Said when an operation is over, or all are.
    ended: Condvar,
    waker: Arc<Waker>,
}

impl Shared {
    pub(crate) fn new(state: State) -> Arc<Shared> {
        let waker = state.oob.waker.clone();
        let (wanting, under_way, ended) = (AtomicUsize::new(0), AtomicU32::new(0), Condvar::new());
        Arc::new(Shared { state: Mutex::new(state), wanting, under_way, ended, waker })
    }

    /// The state, before those who drive.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.wanting.fetch_add(1, Ordering::Relaxed);
        let guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.wanting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Drives once, after those who want the lock for a moment. Gives the state, and whether there
    /// was anything to do.
    pub(crate) fn drive(&self) -> (MutexGuard<'_, State>, bool) {
        while self.wanting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let busy = state.drive();
        self.publish(&state);
        (state, busy)
    }

    /// Lets those who sleep look.
    pub(crate) fn publish(&self, state: &State) {
        let under_way = state.under_way();
        if self.under_way.swap(under_way, Ordering::Release) != under_way {
            self.ended.notify_all();
        }
    }

    /// Lets the thread out of band look, if there is anything under way that it should go on with.
    pub(crate) fn rouse(&self) {
        if self.under_way.load(Ordering::Acquire) > 0 {
            self.waker.wake();
        }
    }

    /// Sleeps until something is over, or for a time.
    pub(crate) fn sleep<'a>(&'a self, guard: MutexGuard<'a, State>, most: Duration) {
        // Whoever wakes looks again.
        drop(self.ended.wait_timeout(guard, most));
    }

    /// What the thread out of band does when it may: drives, if nobody else does. How long it may
    /// then wait.
    fn attend(&self) -> Duration {
        let began = Instant::now();
        loop {
            if self.wanting.load(Ordering::Relaxed) > 0 {
                return SHORTEST;
            }
            let Ok(mut state) = self.state.try_lock() else {
                // Who drives may stop any time, with operations left.
                return if self.under_way.load(Ordering::Acquire) > 0 { LONGEST } else { RESTS };
            };
            let busy = state.drive();
            self.publish(&state);
            if busy && began.elapsed() < STRETCH {
                continue;
            }
            return state.rest(busy);
        }
    }
}

/// What the thread out of band is given to do.
pub(crate) fn attend(shared: &Weak<Shared>) -> Duration {
    shared.upgrade().map_or(RESTS, |shared| shared.attend())
}

/// A thread that waits and finds nothing to do.
#[derive(Default)]
pub(crate) struct Idle {
    since: Option<Instant>,
}

impl Idle {
    /// Something was done, or not.
    pub(crate) fn next(&mut self, busy: bool) {
        if busy {
            self.since = None;
            return;
        }
        match self.since.get_or_insert_with(Instant::now).elapsed() < YIELDS {
            true => std::thread::yield_now(),
            false => std::thread::sleep(NAP),
        }
    }
}

/// A communicator's end, under its lock.
pub(crate) struct State {
    pub(crate) me: Rank,
    pub(crate) net: Net,
    pub(crate) oob: Oob,
    pub(crate) channels: Vec<Channel>,
    pub(crate) board: Board,
    pub(crate) wish: Wish,
    /// Receives from whichever rank sends first.
    pub(crate) any: AnySource,
    /// What ranks that begin nothing more have begun.
    pub(super) ends: Vec<Option<End>>,
    /// Of the channel of all.
    config: Config,
    hosts: Vec<HostShape>,
    /// The channel of each tie, and which of its ranks it is with.
    ties: Vec<(usize, Rank)>,
    began: Instant,
    /// When what has come was taken, since then.
    now_us: u64,
    ticked: Instant,
    /// When something was there to do last.
    moved: Instant,
    notes: Vec<Note>,
    came: Vec<(usize, u8, News)>,
}

impl State {
    pub(crate) fn new(
        config: Config,
        hosts: Vec<HostShape>,
        topology: Topology,
        net: Net,
        oob: Oob,
        board: Board,
        wish: Wish,
    ) -> State {
        let now = Instant::now();
        let mut state = State {
            me: config.me,
            net,
            oob,
            channels: Vec::new(),
            board,
            wish,
            any: AnySource::default(),
            ends: vec![None; config.hosts.len()],
            hosts,
            ties: Vec::new(),
            began: now,
            now_us: 0,
            ticked: now,
            moved: now,
            notes: Vec::new(),
            came: Vec::new(),
            config,
        };
        let ranks = (0..state.config.hosts.len()).collect();
        let hosts = (0..state.hosts.len() as u32).collect();
        state.open(ALL, ranks, hosts, state.config.clone(), topology);
        state
    }

    /// How many ranks there are.
    pub(crate) fn ranks(&self) -> usize {
        self.config.hosts.len()
    }

    fn open(
        &mut self,
        name: u32,
        ranks: Vec<Rank>,
        hosts: Vec<u32>,
        config: Config,
        topology: Topology,
    ) -> usize {
        let at = self.channels.len();
        let base = self.net.more(ranks.len());
        self.ties.extend((0..ranks.len()).map(|k| (at, k)));
        self.channels.push(Channel::new(name, ranks, hosts, base, config, topology));
        at
    }

    /// The channel of a name; made if this rank is one of its ends and it is not there yet.
    pub(crate) fn channel(&mut self, name: u32) -> Option<usize> {
        if let Some(at) = self.channels.iter().position(|c| c.name == name) {
            return Some(at);
        }
        let (from, to) = ends(name, self.ranks())?;
        if from != self.me && to != self.me {
            return None;
        }
        let ranks = vec![from.min(to), from.max(to)];
        let of = |rank: Rank| self.config.hosts[rank];
        let (low, high) = (of(ranks[0]), of(ranks[1]));
        let hosts = if low == high { vec![low] } else { vec![low, high] };
        let numbers = vec![0, u32::from(low != high)];
        let me = usize::from(self.me == ranks[1]);
        let shapes = hosts.iter().map(|host| self.hosts[*host as usize].clone()).collect();
        // Of two ranks nobody else forwards for them, whatever nodes they are of.
        let places = numbers.iter().map(|host| Place { host: *host as usize, numa: 0 }).collect();
        // Two ranks on hosts that make a topology with others make one alone.
        let topology = Topology::new(shapes, places, Fabric::RailOnly).ok()?;
        let config = Config { me, hosts: numbers, ..self.config.clone() };
        let at = self.open(name, ranks, hosts, config, topology);
        self.tell_end(at);
        Some(at)
    }

    /// Sets how long operations may stand still from now on, those that are under way among them.
    pub(crate) fn set_timeout(&mut self, timeout: Duration) {
        let timeout_us = u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX);
        self.config.timeout_us = timeout_us;
        self.oob.patience = timeout;
        self.channels.iter_mut().for_each(|channel| channel.engine.set_timeout(timeout_us));
    }

    /// How long operations may stand still.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_micros(self.config.timeout_us)
    }

    /// Why the communicator is broken, if it is.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.channels[0].engine.failure()
    }

    /// Breaks the communicator at all ranks.
    pub(crate) fn break_off(&mut self, failure: Failure) {
        self.with(0, |engine, env| engine.break_off(failure, env));
        self.end_if_broken();
    }

    /// Whether an operation waits or runs.
    pub(crate) fn is_under_way(&self) -> bool {
        self.under_way() > 0
    }

    fn under_way(&self) -> u32 {
        self.any.waiting() as u32 + self.channels.iter().map(|c| c.waiting() as u32).sum::<u32>()
    }

    /// Whether what this rank has sent was used, and all it was asked for is done.
    pub(crate) fn is_drained(&self) -> bool {
        self.any.waiting() == 0
            && self.channels.iter().all(|c| c.waiting() == 0 && c.engine.is_drained())
    }

    /// For how long there was nothing to do.
    pub(crate) fn still(&self) -> Duration {
        self.moved.elapsed()
    }

    /// How long the thread out of band may wait for something to come.
    fn rest(&self, busy: bool) -> Duration {
        if self.under_way() > 0 {
            return if busy {
                Duration::ZERO
            } else {
                (self.moved.elapsed() / 16).clamp(SHORTEST, LONGEST)
            };
        }
        match self.is_drained()
            && !self.oob.is_connecting()
            && self.channels.iter().all(|c| c.engine.is_whole())
        {
            true => RESTS,
            false => TENDS,
        }
    }

    pub(crate) fn with<R>(
        &mut self,
        at: usize,
        f: impl FnOnce(&mut Engine, &mut LibraryEnv<'_>) -> R,
    ) -> R {
        let State { channels, net, oob, notes, board, now_us, .. } = self;
        let Channel { name, ranks, base, engine, operands, .. } = &mut channels[at];
        let me = engine.rank();
        let env =
            &mut LibraryEnv { me, channel: *name, ranks, base: *base, net, oob, operands, notes };
        engine.keep_time(*now_us);
        let result = f(engine, env);
        for note in notes.drain(..) {
            board.note(channels[at].renumbered(note), at == 0);
        }
        result
    }

    /// So that the end of a process is noticed by its neighbours, whatever it does.
    pub(crate) fn greet(&mut self) {
        let (me, ranks) = (self.me, self.ranks());
        Engine::neighbours(me, ranks).for_each(|rank| self.oob.tell(rank, ALL, &Message::Want));
    }

    /// Tells engines the time, if they have not been told lately.
    fn tick(&mut self) {
        if self.ticked.elapsed() < TICK {
            return;
        }
        self.ticked = Instant::now();
        self.oob.tend();
        self.any.expire(self.timeout());
        let us = self.now_us;
        let linkless = self.net.linkless();
        for at in 0..self.channels.len() {
            self.with(at, |engine, env| {
                linkless.iter().for_each(|rail| engine.fail_rail(*rail, env));
                engine.on_time(us, env);
            });
        }
    }

    /// Takes what has come, sends what can be sent, ends and begins operations. Whether there was
    /// anything.
    fn drive(&mut self) -> bool {
        let progress =
            |state: &State| state.channels.iter().map(|c| c.engine.progress()).sum::<u64>();
        let before = progress(self);
        let mut came = std::mem::take(&mut self.came);
        self.net.poll(&mut came);
        self.now_us = self.began.elapsed().as_micros() as u64;
        let mut busy = !came.is_empty();
        came.drain(..).for_each(|(tie, rail, news)| self.arrived(tie, rail, news));
        self.came = came;
        while let Some(event) = self.oob.inbox.take() {
            busy = true;
            self.heard(event);
        }
        self.tick();
        for at in 0..self.channels.len() {
            self.with(at, |engine, env| engine.pump(env));
            self.advance(at);
        }
        self.match_any();
        self.forsake_any();
        self.end_if_broken();
        busy |= progress(self) != before;
        if busy {
            self.moved = Instant::now();
        }
        busy
    }

    fn arrived(&mut self, tie: usize, rail: u8, news: News) {
        let (at, peer) = self.ties[tie];
        let base = self.channels[at].base;
        self.with(at, |engine, env| match news {
            News::Notice(notice) => engine.on_notice(peer, notice, env),
            News::Sent(stream) => engine.on_sent(peer, rail, stream),
            News::Tested => engine.on_tested(peer, rail, env),
            News::Failed => engine.fail_path(peer, rail, env),
            News::Probed(probe, answered) => {
                engine.on_probed(ProbeId { prober: probe.prober - base, ..probe }, answered, env);
            }
        });
    }

    fn heard(&mut self, event: Event) {
        match event {
            Event::Told(rank, name, message) => {
                let Some(at) = self.channel(name) else { return };
                let Some(peer) = self.channels[at].ranks.iter().position(|r| *r == rank) else {
                    return;
                };
                self.with(at, |engine, env| engine.on_message(peer, &message, env));
                match message {
                    Message::News(Word::Ends { rank, begun, pairs }) if at == 0 => {
                        self.ends(rank, begun, pairs);
                    }
                    // It has left, perhaps.
                    Message::News(_) => self.close(at),
                    _ => {}
                }
            }
            Event::Gone(rank, _) => self.with(0, |engine, env| engine.on_lost(rank, env)),
        }
    }

    /// The tag of what has come over a channel for an operation that has not begun, or for another
    /// than has.
    fn unmatched(&mut self, at: usize) -> Option<u64> {
        let channel = &self.channels[at];
        let current = channel.current();
        match channel.runs() {
            true => channel.engine.misfit(),
            false => self.with(at, |engine, env| engine.arrived_tag(current, env)),
        }
    }

    /// Gives what has come, and nobody asks for by its rank, to those who take it from any.
    pub(crate) fn match_any(&mut self) {
        for at in 1..self.channels.len() {
            if self.any.waiting() == 0 {
                return;
            }
            let receives =
                ends(self.channels[at].name, self.ranks()).filter(|(_, to)| *to == self.me);
            let Some((from, to)) = receives else { continue };
            let Some(tag) = self.unmatched(at).filter(|tag| !self.channels[at].waits_for(*tag))
            else {
                continue;
            };
            let Some((number, waiting)) = self.any.take(tag) else { continue };
            let count = waiting.into.len() as u64 / waiting.data.bytes();
            let operation = transfer(usize::from(from > to), count);
            let Ok(collective) = Collective::new(operation, waiting.data, false, 2) else {
                continue;
            };
            let description = Description { tag, ..Description::of(&collective) };
            let spans = Spans { input: Span::EMPTY, output: waiting.into, in_place: false };
            let ticket = self.channels[at].push(collective, description, spans);
            if let Some(watch) = waiting.watch {
                self.channels[at].watch(ticket, watch);
            }
            self.any.bind(number, at, ticket, from);
            self.advance(at);
        }
    }

    /// Of receives with different tags the one is next whose tag has come.
    fn choose(&mut self, at: usize) {
        if self.channels[at].engine.misfit().is_some() || self.channels[at].has_choice() {
            if let Some(tag) = self.unmatched(at) {
                self.channels[at].prefer(tag);
            }
        }
    }

    /// Ends the operation of a channel that is done, and begins the next.
    pub(crate) fn advance(&mut self, at: usize) {
        self.choose(at);
        self.close(at);
        while self.channels[at].is_due() {
            if let Some((way, began_us)) = self.channels[at].end() {
                self.board.done(self.net.sent_bytes());
                if at == 0 {
                    let us = self.began.elapsed().as_micros() as u64;
                    self.board.took(&way, us.saturating_sub(began_us));
                }
                // Credit and what others wait to hear leave now, and not when somebody looks next.
                self.with(at, |engine, env| engine.pump(env));
            }
            self.choose(at);
            self.close(at);
            let (wish, us) = (self.wish, self.began.elapsed().as_micros() as u64);
            let Some((number, terms, size, program)) = self.channels[at].begin(us, wish) else {
                return;
            };
            self.with(at, |engine, env| {
                engine.on_time(us, env);
                engine.start(number, terms, size, program, env);
            });
        }
    }

    /// A failure of a channel is one of the communicator; with it all operations are over.
    fn end_if_broken(&mut self) {
        if self.failure().is_none() {
            let failed = self
                .channels
                .iter()
                .find_map(|c| Some(c.engine.failure()?.clone().renumbered(&c.ranks)));
            let Some(failure) = failed else { return };
            self.with(0, |engine, env| engine.break_off(failure, env));
        }
        let Some(failure) = self.failure().cloned() else { return };
        self.board.broken(&failure);
        for channel in &mut self.channels {
            channel.engine.halt(failure.clone());
            channel.clear();
        }
        self.any.clear();
    }
}
