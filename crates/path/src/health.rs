//! Whether the paths to one peer process live. That is known of pairs of NICs, never of QPs: a QP that is silent asks its path, and
//! only the path's answer moves QPs, then all of them together.
//!
//! | state   | event                                                   | next                                     |
//! |---------|---------------------------------------------------------|------------------------------------------|
//! | `Calm`  | asked, and no sign of life is younger than the question | `Asked`: it and other paths are probed   |
//! | `Asked` | an answer, or a round trip of any QP on it              | `Calm`; [`Verdict::Alive`]               |
//! | `Asked` | no answer in a round, while another path answered       | `Dead`; [`Verdict::Dead`]                |
//! | `Asked` | no answer on any path for `silent_peer_us`              | `Dead`; [`Verdict::Dead`]                |
//! | `Dead`  | due                                                     | `Dead`; probed again, ever less often    |
//! | `Dead`  | an answer, or a round trip of any QP on it              | `Calm`; [`Verdict::Alive`]               |
//!
//! *Witnesses.* A path is not given up before other paths to the same process have answered some probes, each of which was sent after one of
//! the path's own. A peer that is stopped, or that waits for a core, answers on none: it is waited for, since a switch would gain nothing. The
//! answer of a witness also says how fast the peer answers just now; the path asked has a multiple of that time. So a loaded machine is not
//! taken for a broken network.
//!
//! For this to be evidence, a peer answers a probe only when it has looked at all that had arrived by its other NICs, and answered that, too.
//!
//! *Time* is the observer's: a clock that stands still while the observing thread is kept from its core, so that a starved observer does not
//! take its own sleep for the silence of others.
//!
//! Invariants: a verdict is said once for each change and once for each question; at most [`MAX_WITNESSES`] witnesses are probed in an
//! interval; what is kept of a path is of constant size.

use crate::slots::SlotPath;
use std::collections::{BTreeMap, VecDeque};

/// Witnesses probed in one interval, in turns if there are more.
const MAX_WITNESSES: usize = 8;
/// Probes of a question before it may be answered with dead: lost packets decide nothing.
const MIN_PROBES: u32 = 4;
/// So many answers of witnesses are needed, each to a probe that was sent after another one of the path: a peer that has answered once and then has
/// no core, or a kernel that lets one packet overtake another, is no dead path.
const TESTIMONIES: u32 = 3;
/// From the last of these answers on, a path that is asked has so many times as long as the witness took, and at least this: both are asked at once,
/// but answers may come in any order.
const WITNESS_FACTOR: u64 = 8;
/// See [`WITNESS_FACTOR`].
const MIN_GRACE_US: u64 = 20_000;
/// Probes whose time of sending is remembered, for each path.
const REMEMBERED: u32 = 64;

/// Settings, in microseconds of the observer's clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HealthConfig {
    /// Between two probes of a path that is asked, at first. It doubles while nobody answers at all.
    pub interval_us: u64,
    /// See `interval_us`: at most.
    pub interval_max_us: u64,
    /// A path that has not answered by then is dead, if another has.
    pub round_us: u64,
    /// If no path answers: dead all the same, after so long. The peer may be stopped, and comes back on the same path then.
    pub silent_peer_us: u64,
    /// A path that had failed is steady when it has lived for so long since; twice that after each failure more, and at most `steady_max_us`.
    pub steady_us: u64,
    /// See `steady_us`.
    pub steady_max_us: u64,
    /// A failure counts as one more if the last was no longer ago.
    pub forget_us: u64,
    /// From a verdict of dead to the next probe: first, and at most (it doubles).
    pub retry_min_us: u64,
    /// See `retry_min_us`.
    pub retry_max_us: u64,
    /// Leaves the rule out that a witness is needed: for tests of the tests alone.
    #[doc(hidden)]
    pub no_witness: bool,
}

impl Default for HealthConfig {
    fn default() -> HealthConfig {
        HealthConfig {
            interval_us: 8_000,
            interval_max_us: 100_000,
            round_us: 45_000,
            silent_peer_us: 10_000_000,
            steady_us: 1_000_000,
            steady_max_us: 60_000_000,
            forget_us: 120_000_000,
            retry_min_us: 50_000,
            retry_max_us: 1_000_000,
            no_witness: false,
        }
    }
}

/// What is known of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It has carried a round trip since it was asked.
    Alive,
    /// It has not, and others have, or nothing has for very long.
    Dead,
}

/// What an asker is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The path lived after the time that the asker named.
    Alive,
    /// That is being found out; a verdict will come.
    Asked,
    /// The path is dead.
    Dead,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Calm,
    Asked(Question),
    Dead { retry_at_us: u64, retry_us: u64 },
}

/// A path was asked.
#[derive(Clone, Copy, Debug)]
struct Question {
    since_us: u64,
    /// Probes sent.
    probes: u32,
    /// The oldest of them, among all probes to the peer, that was sent after the last testimony.
    untold: Option<u64>,
    /// How often another path answered what was sent after a probe of this one.
    testimonies: u32,
    /// From when on the testimonies allow a verdict of dead.
    doomed_us: Option<u64>,
}

/// One path.
#[derive(Clone, Debug)]
struct Pair {
    state: State,
    /// Our NIC works, so that a probe can leave.
    works: bool,
    /// The last sign of life.
    alive_us: Option<u64>,
    /// Number of the next probe.
    sequence: u32,
    /// When the last probes were sent, by number, and as which of all probes to the peer.
    sent: [(u64, u64); REMEMBERED as usize],
    /// It is to be probed now.
    due: bool,
    /// When it failed last, and how often it did in a row; since when it works again.
    failed_us: Option<u64>,
    failures: u32,
    since_us: u64,
}

impl Pair {
    fn new() -> Pair {
        Pair {
            state: State::Calm,
            works: true,
            alive_us: None,
            sequence: 0,
            sent: [(0, 0); REMEMBERED as usize],
            due: false,
            failed_us: None,
            failures: 0,
            since_us: 0,
        }
    }

    /// It has failed now. That it still does not work is no second failure.
    fn fails(&mut self, now_us: u64, config: &HealthConfig) {
        let recent = self.failed_us.is_some_and(|at| at + config.forget_us > now_us);
        self.failures = if recent { self.failures.saturating_add(1) } else { 1 };
        self.failed_us = Some(now_us);
    }
}

/// What is known of the paths to one peer process.
///
/// *Handlers*: [`ask`](Self::ask), [`carried`](Self::carried), [`handle_answer`](Self::handle_answer), [`set_nic`](Self::set_nic),
/// [`handle_timeout`](Self::handle_timeout). *Polls*: [`poll_probe`](Self::poll_probe), [`poll_verdict`](Self::poll_verdict),
/// [`poll_timeout`](Self::poll_timeout).
#[derive(Clone, Debug)]
pub struct PeerHealth {
    config: HealthConfig,
    pairs: BTreeMap<SlotPath, Pair>,
    verdicts: VecDeque<(SlotPath, Verdict)>,
    /// While something is asked: when probes are due next, and how often they are.
    round_due_us: Option<u64>,
    interval_us: u64,
    /// The path that is a witness first in the next interval.
    first_witness: usize,
    /// Probes sent to the peer, over all paths.
    probes: u64,
}

impl PeerHealth {
    /// A peer of which nothing is known.
    pub fn new(config: HealthConfig) -> PeerHealth {
        PeerHealth {
            config,
            pairs: BTreeMap::new(),
            verdicts: VecDeque::new(),
            round_due_us: None,
            interval_us: config.interval_us,
            first_witness: 0,
            probes: 0,
        }
    }

    /// There is such a path: it can be a witness for others.
    pub fn add(&mut self, path: SlotPath) {
        self.pairs.entry(path).or_insert_with(Pair::new);
    }

    /// Whether the path is known to be dead.
    pub fn is_dead(&self, path: SlotPath) -> bool {
        self.pairs.get(&path).is_some_and(|p| matches!(p.state, State::Dead { .. }))
    }

    /// Whether the path works, and has long enough since it failed last that one may go back to it. A path that flaps has to prove itself
    /// ever longer.
    pub fn is_steady(&self, now_us: u64, path: SlotPath) -> bool {
        let Some(pair) = self.pairs.get(&path) else { return false };
        let needed_us = match pair.failures {
            0 => 0,
            n => (self.config.steady_us << (n - 1).min(20)).min(self.config.steady_max_us),
        };
        pair.works && matches!(pair.state, State::Calm) && now_us >= pair.since_us + needed_us
    }

    /// Whether a question to some path is open.
    pub fn is_asked(&self) -> bool {
        self.pairs.values().any(|p| matches!(p.state, State::Asked(_)))
    }

    // ---- handlers ----

    /// A QP on the path has been silent since then (or its transport has given up just now): does the path live?
    pub fn ask(&mut self, now_us: u64, path: SlotPath, since_us: u64) -> Answer {
        let recent_us = now_us.saturating_sub(self.config.round_us);
        let pair = self.pairs.entry(path).or_insert_with(Pair::new);
        match pair.state {
            State::Dead { .. } => Answer::Dead,
            // It cannot be asked, and carries nothing.
            _ if !pair.works => Answer::Dead,
            State::Asked(_) => Answer::Asked,
            State::Calm if pair.alive_us.is_some_and(|at| at >= since_us && at >= recent_us) => Answer::Alive,
            State::Calm => {
                pair.state = State::Asked(Question {
                    since_us: now_us,
                    probes: 0,
                    untold: None,
                    testimonies: 0,
                    doomed_us: None,
                });
                pair.due = true;
                // A new question: the witnesses are asked again, often.
                self.interval_us = self.config.interval_us;
                self.round_due_us = Some(now_us);
                Answer::Asked
            }
        }
    }

    /// A round trip was completed on the path lately: an acknowledgement or an answer has come for what we sent.
    pub fn carried(&mut self, now_us: u64, path: SlotPath) {
        if let Some(pair) = self.pairs.get_mut(&path) {
            pair.alive_us = Some(now_us);
            if !matches!(pair.state, State::Calm) {
                self.lives(now_us, path);
            }
        }
    }

    /// A probe was answered. Numbers that were not sent lately are ignored.
    pub fn handle_answer(&mut self, now_us: u64, path: SlotPath, sequence: u32) {
        let Some(pair) = self.pairs.get_mut(&path) else { return };
        if !(1..=REMEMBERED).contains(&pair.sequence.wrapping_sub(sequence)) {
            return;
        }
        let (sent_us, which) = pair.sent[(sequence % REMEMBERED) as usize];
        pair.alive_us = Some(pair.alive_us.map_or(sent_us, |at| at.max(sent_us)));
        match pair.state {
            State::Calm => {}
            // What left before the question says nothing of the time since.
            State::Asked(q) if sent_us < q.since_us => return,
            State::Asked(_) | State::Dead { .. } => self.lives(now_us, path),
        }
        self.testify(now_us, sent_us, which);
    }

    /// A path has answered a probe: those that were probed before that, and do not answer, may be dead.
    fn testify(&mut self, now_us: u64, sent_us: u64, which: u64) {
        let at_us = now_us + (WITNESS_FACTOR * now_us.saturating_sub(sent_us)).max(MIN_GRACE_US);
        for pair in self.pairs.values_mut() {
            let State::Asked(q) = &mut pair.state else { continue };
            if q.untold.is_some_and(|probe| probe < which) {
                q.untold = None;
                q.testimonies += 1;
                if q.testimonies >= TESTIMONIES {
                    q.doomed_us.get_or_insert(at_us);
                }
            }
        }
    }

    /// Our NIC works again, or no longer does. Its paths are asked when it comes back; while it does not work nothing is asked of them.
    pub fn set_nic(&mut self, now_us: u64, local: u8, works: bool) {
        let mut back = Vec::new();
        for (path, pair) in self.pairs.iter_mut().filter(|(path, _)| path.local == local) {
            if std::mem::replace(&mut pair.works, works) == works {
                continue;
            }
            match works {
                true => pair.since_us = now_us,
                false if !matches!(pair.state, State::Dead { .. }) => pair.fails(now_us, &self.config),
                false => {}
            }
            match pair.state {
                State::Asked(_) if !works => pair.state = State::Calm,
                // It is tried at once.
                State::Dead { .. } if works => {
                    pair.state = State::Dead { retry_at_us: now_us, retry_us: self.config.retry_min_us }
                }
                State::Calm if works => back.push(*path),
                _ => {}
            }
        }
        back.into_iter().for_each(|path| {
            self.ask(now_us, path, now_us);
        });
    }

    /// A time of [`Self::poll_timeout`] has come. Call [`Self::poll_probe`] and [`Self::poll_verdict`] afterwards.
    pub fn handle_timeout(&mut self, now_us: u64) {
        let dead: Vec<SlotPath> = self
            .pairs
            .iter()
            .filter(|(_, p)| self.ends_us(p).is_some_and(|at| at <= now_us))
            .map(|(p, _)| *p)
            .collect();
        for path in dead {
            let retry_us = self.config.retry_min_us;
            if let Some(pair) = self.pairs.get_mut(&path) {
                (pair.state, pair.due) = (State::Dead { retry_at_us: now_us + retry_us, retry_us }, false);
                pair.fails(now_us, &self.config);
            }
            self.verdicts.push_back((path, Verdict::Dead));
        }
        let retry_max_us = self.config.retry_max_us;
        for pair in self.pairs.values_mut().filter(|p| p.works) {
            if let State::Dead { retry_at_us, retry_us } = &mut pair.state {
                if *retry_at_us <= now_us {
                    *retry_us = (*retry_us * 2).min(retry_max_us);
                    *retry_at_us = now_us + *retry_us;
                    pair.due = true;
                }
            }
        }
        if self.round_due_us.is_some_and(|at| at <= now_us) {
            self.begin_interval(now_us);
        }
    }

    // ---- polls ----

    /// The next probe to send: over that path, with that number. Paths that are asked come before their witnesses.
    pub fn poll_probe(&mut self, now_us: u64) -> Option<(SlotPath, u32)> {
        let due = |asked: bool| {
            let mut pairs = self.pairs.iter().filter(|(_, p)| p.due && p.works);
            pairs.find(|(_, p)| matches!(p.state, State::Asked(_)) == asked).map(|(path, _)| *path)
        };
        let path = due(true).or_else(|| due(false))?;
        let pair = self.pairs.get_mut(&path)?;
        pair.due = false;
        self.probes += 1;
        if let State::Asked(q) = &mut pair.state {
            q.probes += 1;
            q.untold.get_or_insert(self.probes);
        }
        let sequence = pair.sequence;
        pair.sequence = sequence.wrapping_add(1);
        pair.sent[(sequence % REMEMBERED) as usize] = (now_us, self.probes);
        Some((path, sequence))
    }

    /// The next path of which something new is known.
    pub fn poll_verdict(&mut self) -> Option<(SlotPath, Verdict)> {
        self.verdicts.pop_front()
    }

    /// When [`Self::handle_timeout`] is to be called.
    pub fn poll_timeout(&self) -> Option<u64> {
        let of_pairs = self.pairs.values().filter_map(|p| match p.state {
            State::Dead { retry_at_us, .. } if p.works => Some(retry_at_us),
            _ => self.ends_us(p),
        });
        of_pairs.chain(self.round_due_us).min()
    }

    // ---- inside ----

    fn lives(&mut self, now_us: u64, path: SlotPath) {
        if let Some(pair) = self.pairs.get_mut(&path) {
            if matches!(pair.state, State::Dead { .. }) {
                pair.since_us = now_us;
            }
            pair.state = State::Calm;
            self.verdicts.push_back((path, Verdict::Alive));
        }
        if !self.is_asked() {
            self.round_due_us = None;
        }
    }

    /// When a question is answered with dead if nothing comes.
    fn ends_us(&self, pair: &Pair) -> Option<u64> {
        let State::Asked(Question { since_us, probes, doomed_us, .. }) = pair.state else { return None };
        let silent_us = since_us + self.config.silent_peer_us;
        let doomed_us = doomed_us.or(self.config.no_witness.then_some(0)).filter(|_| probes >= MIN_PROBES);
        Some(doomed_us.map_or(silent_us, |at| at.max(since_us + self.config.round_us).min(silent_us)))
    }

    /// Has all paths that are asked probed, and some that are not.
    fn begin_interval(&mut self, now_us: u64) {
        let (mut calm, mut oldest_us, mut heard) = (Vec::new(), None, false);
        for (path, pair) in &mut self.pairs {
            match pair.state {
                State::Asked(q) => {
                    pair.due = true;
                    heard |= q.testimonies > 0;
                    oldest_us = Some(oldest_us.map_or(q.since_us, |at: u64| at.min(q.since_us)));
                }
                State::Calm if pair.works => calm.push(*path),
                State::Calm | State::Dead { .. } => {}
            }
        }
        let Some(oldest_us) = oldest_us else {
            self.round_due_us = None;
            return;
        };
        for i in 0..calm.len().min(MAX_WITNESSES) {
            let path = calm[(self.first_witness + i) % calm.len()];
            if let Some(pair) = self.pairs.get_mut(&path) {
                pair.due = true;
            }
        }
        self.first_witness = self.first_witness.wrapping_add(MAX_WITNESSES);
        self.round_due_us = Some(now_us + self.interval_us);
        if !heard && now_us > oldest_us + 2 * self.config.round_us {
            self.interval_us = (self.interval_us * 2).min(self.config.interval_max_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn path(local: u8, remote: u8) -> SlotPath {
        SlotPath { local, remote }
    }

    const A: SlotPath = path(0, 0);
    const B: SlotPath = path(1, 1);

    /// Runs in steps of 1 ms from `from_ms`; `answers(ms, path)` says how long an answer takes, if one comes. Gives the verdicts with their times in ms.
    fn run(
        h: &mut PeerHealth,
        from_ms: u64,
        to_ms: u64,
        answers: impl Fn(u64, SlotPath) -> Option<u64>,
    ) -> Vec<(u64, SlotPath, Verdict)> {
        let (mut flying, mut said) = (Vec::new(), Vec::new());
        for ms in from_ms..to_ms {
            let now_us = ms * 1_000;
            flying.retain(|&(at_ms, path, sequence)| {
                if at_ms <= ms {
                    h.handle_answer(now_us, path, sequence);
                }
                at_ms > ms
            });
            if h.poll_timeout().is_some_and(|at| at <= now_us) {
                h.handle_timeout(now_us);
            }
            while let Some((path, sequence)) = h.poll_probe(now_us) {
                flying.extend(answers(ms, path).map(|takes| (ms + takes, path, sequence)));
            }
            said.extend(std::iter::from_fn(|| h.poll_verdict()).map(|(path, verdict)| (ms, path, verdict)));
        }
        said
    }

    fn two_paths() -> PeerHealth {
        let mut h = PeerHealth::new(HealthConfig::default());
        h.add(A);
        h.add(B);
        h
    }

    #[test]
    fn a_dead_path_is_found_within_a_round_if_another_answers() {
        let mut h = two_paths();
        assert_eq!(h.ask(0, A, 0), Answer::Asked);
        let said = run(&mut h, 0, 200, |_, p| (p == B).then_some(1));
        assert_eq!(said, [(45, A, Verdict::Dead)]);
        assert!(h.is_dead(A) && !h.is_dead(B));
        assert_eq!(h.ask(200_000, A, 0), Answer::Dead);
    }

    #[test]
    fn a_path_that_answers_lives_and_nobody_is_probed_further() {
        let mut h = two_paths();
        h.ask(0, A, 0);
        assert_eq!(run(&mut h, 0, 300, |_, _| Some(1)), [(1, A, Verdict::Alive)]);
        assert_eq!(h.poll_timeout(), None);
        assert_eq!(h.ask(300_000, A, 299_000), Answer::Asked, "that was long ago");
    }

    /// A path that fails ten times a second has to be well for a minute; one that failed once, for a second.
    #[test]
    fn a_path_is_steady_again_after_a_time_that_grows_with_its_failures() {
        let mut h = two_paths();
        assert!(h.is_steady(0, A), "it has never failed");
        assert!(!h.is_steady(0, path(5, 5)), "there is none");
        h.set_nic(0, 0, false);
        assert!(!h.is_steady(10_000, A) && h.is_steady(10_000, B));
        h.set_nic(20_000, 0, true);
        run(&mut h, 20, 100, |_, _| Some(1));
        assert!(!h.is_steady(1_019_999, A) && h.is_steady(1_020_000, A));
        // By silence: a verdict of dead, then an answer.
        h.ask(2_000_000, A, 2_000_000);
        run(&mut h, 2_000, 2_600, |ms, p| (p == B || ms > 2_200).then_some(1));
        assert!(!h.is_dead(A));
        let steady_ms = (2_600..10_000).find(|ms| h.is_steady(ms * 1_000, A)).unwrap();
        assert!((4_200..4_600).contains(&steady_ms), "two seconds after it answered: {steady_ms}");
        for i in 0..600 {
            h.set_nic(10_000_000 + i * 100_000, 0, false);
            h.set_nic(10_050_000 + i * 100_000, 0, true);
        }
        run(&mut h, 69_951, 70_100, |_, _| Some(1));
        assert!(!h.is_steady(129_000_000, A) && h.is_steady(130_000_000, A));
        // What was long ago is forgotten.
        h.set_nic(400_000_000, 0, false);
        h.set_nic(400_000_000, 0, true);
        run(&mut h, 400_000, 400_100, |_, _| Some(1));
        assert!(h.is_steady(401_000_000, A));
    }

    #[test]
    fn a_round_trip_of_any_qp_answers_the_question() {
        let mut h = two_paths();
        h.ask(0, A, 0);
        h.carried(30_000, A);
        assert_eq!(h.poll_verdict(), Some((A, Verdict::Alive)));
        assert_eq!(h.ask(31_000, A, 5_000), Answer::Alive, "a sign of life that is younger than the silence");
        assert_eq!(h.ask(31_000, A, 30_500), Answer::Asked);
    }

    #[test]
    fn a_peer_that_answers_nowhere_is_waited_for() {
        let mut h = two_paths();
        h.ask(0, A, 0);
        assert_eq!(run(&mut h, 0, 5_000, |_, _| None), []);
        let said = run(&mut h, 5_000, 6_000, |_, _| Some(1));
        assert!(matches!(said[..], [(_, A, Verdict::Alive)]), "{said:?}");
        let mut h = two_paths();
        h.ask(0, A, 0);
        assert_eq!(run(&mut h, 0, 11_000, |_, _| None), [(10_000, A, Verdict::Dead)], "but not for ever");
        let mut h = PeerHealth::new(HealthConfig { no_witness: true, ..HealthConfig::default() });
        h.ask(0, A, 0);
        assert_eq!(run(&mut h, 0, 200, |_, _| None), [(45, A, Verdict::Dead)], "what the rule is for");
    }

    /// The witness answers first and the path that was asked some time later, over and over: as with a peer that was stopped, or one whose
    /// cores are all taken.
    #[test]
    fn a_path_that_is_slower_than_its_witness_lives() {
        for (witness_ms, path_ms) in [(60, 90), (30, 200), (5, 39), (0, 19)] {
            let mut h = two_paths();
            h.ask(0, A, 0);
            let said = run(&mut h, 0, 2_000, |_, p| Some(if p == A { path_ms } else { witness_ms }));
            assert_eq!(said, [(path_ms, A, Verdict::Alive)], "{witness_ms} {path_ms}");
        }
        let mut h = two_paths();
        h.ask(0, A, 0);
        run(&mut h, 0, 900, |_, _| None);
        let said = run(&mut h, 900, 2_000, |_, p| Some(if p == A { 15 } else { 1 }));
        assert!(matches!(said[..], [(_, A, Verdict::Alive)]), "{said:?}");
    }

    /// The peer takes its witness's probe before that of the path has even left, and then has no core for long.
    #[test]
    fn a_witness_that_was_probed_first_is_none() {
        let mut h = two_paths();
        h.ask(0, B, 0);
        let (path, early) = h.poll_probe(0).unwrap();
        assert_eq!(path, B);
        h.ask(0, A, 0);
        h.handle_answer(1_000, B, early);
        assert_eq!(h.poll_verdict(), Some((B, Verdict::Alive)));
        let said = run(&mut h, 1, 400, |ms, p| Some(if p == A { 340 - ms.min(330) } else { 339 - ms.min(330) }));
        assert!(matches!(said[..], [(_, A, Verdict::Alive)]), "{said:?}");
    }

    #[test]
    fn two_of_three_probes_may_be_lost() {
        let mut h = two_paths();
        h.ask(0, A, 0);
        let said = run(&mut h, 0, 500, |ms, p| (p == B || ms > 20 && ms % 3 == 0).then_some(1));
        assert!(matches!(said[..], [(_, A, Verdict::Alive)]), "{said:?}");
    }

    #[test]
    fn a_dead_path_is_tried_again_and_comes_back() {
        let mut h = two_paths();
        h.ask(0, A, 0);
        run(&mut h, 0, 60, |_, p| (p == B).then_some(1));
        let said = run(&mut h, 60, 20_000, |ms, p| (p == B || ms > 9_000).then_some(1));
        let [(at_ms, A, Verdict::Alive)] = said[..] else { panic!("{said:?}") };
        assert!((9_001..=10_100).contains(&at_ms), "{at_ms}");
        assert_eq!(h.ask(20_000_000, A, 20_000_000), Answer::Asked);
    }

    #[test]
    fn a_path_of_a_dead_nic_is_no_question_and_is_asked_when_the_nic_is_back() {
        let mut h = two_paths();
        h.ask(0, A, 0);
        h.set_nic(1_000, 0, false);
        assert_eq!(h.ask(2_000, A, 0), Answer::Dead);
        assert_eq!(run(&mut h, 2, 500, |_, p| (p == B).then_some(1)), []);
        h.set_nic(500_000, 0, true);
        assert_eq!(run(&mut h, 500, 600, |_, _| Some(1)), [(501, A, Verdict::Alive)]);
    }

    #[test]
    fn both_paths_may_be_asked_and_one_of_them_is_the_others_witness() {
        let mut h = two_paths();
        h.ask(0, A, 0);
        h.ask(0, B, 0);
        let said = run(&mut h, 0, 500, |_, p| (p == B).then_some(1));
        assert_eq!(said, [(1, B, Verdict::Alive), (45, A, Verdict::Dead)]);
    }

    #[test]
    fn witnesses_take_turns_and_are_few() {
        let mut h = PeerHealth::new(HealthConfig::default());
        (0..8).for_each(|l| (0..8).for_each(|r| h.add(path(l, r))));
        h.ask(0, A, 0);
        let mut probed = std::collections::BTreeSet::new();
        for ms in 0..80 {
            let now_us = ms * 1_000;
            if h.poll_timeout().is_some_and(|at| at <= now_us) {
                h.handle_timeout(now_us);
            }
            let sent: Vec<_> = std::iter::from_fn(|| h.poll_probe(now_us)).map(|(p, _)| p).collect();
            assert!(sent.len() <= MAX_WITNESSES + 1);
            probed.extend(sent);
        }
        assert_eq!(probed.len(), 64);
    }

    #[test]
    fn old_answers_and_strange_numbers_say_nothing() {
        let mut h = two_paths();
        h.ask(0, A, 0);
        let (_, first) = std::iter::from_fn(|| h.poll_probe(0)).find(|(p, _)| *p == A).unwrap();
        h.handle_answer(1_000, A, first);
        assert_eq!(h.poll_verdict(), Some((A, Verdict::Alive)));
        h.ask(200_000, A, 199_000);
        h.handle_answer(201_000, A, first);
        h.handle_answer(201_000, A, first.wrapping_add(7));
        assert_eq!(h.poll_verdict(), None, "a late answer to an older question");
    }
}
