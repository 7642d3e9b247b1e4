//! Whether the ways to one peer process live. That is known of pairs of NICs and of their ports
//! ([`PortPath`]), never of QPs: a QP that is silent asks its way, and only that one's answer moves
//! QPs, then all of them together. Where NICs have one port each, a way is a path, as it is called
//! below.
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
//! A path begins as `Calm`, or, where it is not known whether its two NICs are of one network
//! ([`PeerHealth::add_unproven`]), as `Dead`.
//!
//! *Witnesses.* A path is not given up before other paths to the same process have answered some
//! probes, each of which was sent after one of the path's own. A peer that is stopped, or that
//! waits for a core, answers on none: it is waited for, since a switch would gain nothing. The
//! answer of a witness also says how fast the peer answers just now; the path asked has a multiple
//! of that time. So a loaded machine is not taken for a broken network.
//!
//! For this to be evidence, a peer answers a probe only when it has looked at all that had arrived
//! by its other NICs, and answered that, too.
//!
//! *Queues.* Probes wait behind the data of their path. What a path's own answers have taken lately
//! is known, and a path is not given up before a multiple of that ([`QUEUE_FACTOR`]).
//!
//! *Time* is the observer's: a clock that stands still while the observing thread is kept from its
//! core, so that a starved observer does not take its own sleep for the silence of others.
//!
//! *Loss.* A path that lives may lose much of what it carries; see `health/loss`. A path that is
//! known to lose some is given up only after many more probes: [`LOSSY_PROBES`].
//!
//! Invariants: a verdict is said once for each change and once for each question; at most
//! [`MAX_WITNESSES`] witnesses are probed in an interval; what is kept of a path is of constant
//! size.

mod config;
mod loss;
#[cfg(test)]
mod loss_tests;
mod pair;
#[cfg(test)]
mod tests;

use crate::mutants::left_out;
use crate::slots::PortPath;
use pair::{Pair, Question, State, REMEMBERED};
use std::collections::{BTreeMap, VecDeque};

pub use config::HealthConfig;

/// Witnesses probed in one interval, in turns if there are more.
const MAX_WITNESSES: usize = 8;
/// Probes of a question before it may be answered with dead: lost packets decide nothing.
const MIN_PROBES: u32 = 4;
/// The same of a path that is known to lose some.
const LOSSY_PROBES: u32 = 12;
/// A probe of a path that is asked leaves so many times, with one number: of a path that loses
/// nearly all, one comes through.
const COPIES: u32 = 6;
/// So many answers of witnesses are needed, each to a probe that was sent after another one of the
/// path: a peer that has answered once and then has no core, or a kernel that lets one packet
/// overtake another, is no dead path.
const TESTIMONIES: u32 = 3;
/// From the last of these answers on, a path that is asked has so many times as long as the witness
/// took, and at least this: both are asked at once, but answers may come in any order.
const WITNESS_FACTOR: u64 = 8;
/// A path whose own answers have taken long is waited for so many times as long: its data fills a
/// queue, or a port is paused, and the probes wait behind that while paths without data answer at
/// once.
const QUEUE_FACTOR: u64 = 4;
/// The longest that a path is waited for since its answers take long.
const MAX_QUEUE_US: u64 = 500_000;
/// What is told of a failure within so long is told of the same one.
const SAME_FAILURE_US: u64 = 20_000;
/// See [`WITNESS_FACTOR`].
const MIN_GRACE_US: u64 = 20_000;

/// What is known of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It has carried a round trip since it was asked.
    Alive,
    /// It has not, and others have, or nothing has for very long.
    Dead,
    /// It lives, and loses much more than others: its QPs leave it by plan.
    Grey,
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

/// What is known of the paths to one peer process.
///
/// *Handlers*: [`ask`](Self::ask), [`carried`](Self::carried),
/// [`handle_answer`](Self::handle_answer), [`set_nic`](Self::set_nic),
/// [`handle_timeout`](Self::handle_timeout). *Polls*: [`poll_probe`](Self::poll_probe),
/// [`poll_verdict`](Self::poll_verdict), [`poll_timeout`](Self::poll_timeout).
#[derive(Clone, Debug)]
pub struct PeerHealth {
    config: HealthConfig,
    pairs: BTreeMap<PortPath, Pair>,
    verdicts: VecDeque<(PortPath, Verdict)>,
    /// While something is asked: when probes are due next, and how often they are.
    round_due_us: Option<u64>,
    interval_us: u64,
    /// The path that is a witness first in the next interval.
    first_witness: usize,
    /// Probes sent to the peer, over all paths.
    probes: u64,
    /// A path is being compared with others.
    comparison: Option<loss::Comparison>,
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
            comparison: None,
        }
    }

    /// There is such a path: it can be a witness for others.
    pub fn add(&mut self, port_path: impl Into<PortPath>) {
        self.pairs.entry(port_path.into()).or_insert_with(Pair::new);
    }

    /// There is such a path, and it is not known whether anything leads over it: it counts as dead
    /// until it has answered a probe, the first of which is due at once. A path that is known
    /// already stays as it is.
    pub fn add_unproven(&mut self, now_us: u64, port_path: impl Into<PortPath>) {
        let retry_us = self.config.retry_min_us;
        self.pairs.entry(port_path.into()).or_insert_with(|| Pair {
            state: State::Dead { retry_at_us: now_us, retry_us },
            unproven: true,
            ..Pair::new()
        });
    }

    /// The program uses that path: it needs no proof.
    pub fn trust(&mut self, port_path: impl Into<PortPath>) {
        let pair = self.pairs.entry(port_path.into()).or_insert_with(Pair::new);
        pair.unproven = false;
        if pair.alive_us.is_none() && pair.failures == 0 {
            pair.state = match pair.state {
                State::Dead { .. } => State::Calm,
                known => known,
            };
        }
    }

    /// Whether the path is known to be dead.
    pub fn is_dead(&self, port_path: impl Into<PortPath>) -> bool {
        self.pairs.get(&port_path.into()).is_some_and(|p| matches!(p.state, State::Dead { .. }))
    }

    /// Whether there is such a path, our port for it works, and it is not known to be dead.
    pub fn may_carry(&self, port_path: impl Into<PortPath>) -> bool {
        self.pairs
            .get(&port_path.into())
            .is_some_and(|p| p.works && !matches!(p.state, State::Dead { .. }))
    }

    /// Whether the path works, and has long enough since it failed last that one may go back to it.
    /// A path that flaps has to prove itself ever longer.
    pub fn is_steady(&self, now_us: u64, port_path: impl Into<PortPath>) -> bool {
        let Some(pair) = self.pairs.get(&port_path.into()) else { return false };
        let needed_us = match pair.failures {
            0 => 0,
            n => (self.config.steady_us << (n - 1).min(20)).min(self.config.steady_max_us),
        };
        let well = pair.works && !pair.losses.grey && matches!(pair.state, State::Calm);
        well && now_us >= pair.since_us + needed_us
    }

    /// Whether a question to some path is open.
    pub fn is_asked(&self) -> bool {
        self.pairs.values().any(|p| matches!(p.state, State::Asked(_)))
    }

    // ---- handlers ----

    /// A QP on the path has been silent since then (or its transport has given up just now): does
    /// the path live?
    pub fn ask(&mut self, now_us: u64, port_path: impl Into<PortPath>, since_us: u64) -> Answer {
        let recent_us = now_us.saturating_sub(self.config.round_us);
        let pair = self.pairs.entry(port_path.into()).or_insert_with(Pair::new);
        match pair.state {
            State::Dead { .. } => Answer::Dead,
            // It cannot be asked, and carries nothing.
            _ if !pair.works => Answer::Dead,
            State::Asked(_) => Answer::Asked,
            State::Calm if pair.alive_us.is_some_and(|at| at >= since_us && at >= recent_us) => {
                Answer::Alive
            }
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

    /// A round trip was completed on the path lately: an acknowledgement or an answer has come for
    /// what we sent.
    pub fn carried(&mut self, now_us: u64, port_path: impl Into<PortPath>) {
        let path = port_path.into();
        if let Some(pair) = self.pairs.get_mut(&path) {
            pair.alive_us = Some(now_us);
            if !matches!(pair.state, State::Calm) {
                self.lives(now_us, path);
            }
        }
    }

    /// A probe was answered. Numbers that were not sent lately are ignored.
    pub fn handle_answer(&mut self, now_us: u64, port_path: impl Into<PortPath>, sequence: u32) {
        let path = port_path.into();
        if let Some(comparison) = &mut self.comparison {
            comparison.answered(now_us, path, sequence);
        }
        let Some(pair) = self.pairs.get_mut(&path) else { return };
        if !(1..=REMEMBERED).contains(&pair.sequence.wrapping_sub(sequence)) {
            return;
        }
        let (sent_us, which) = pair.sent[(sequence % REMEMBERED) as usize];
        pair.alive_us = Some(pair.alive_us.map_or(sent_us, |at| at.max(sent_us)));
        pair.answered(now_us.saturating_sub(sent_us));
        match pair.state {
            State::Calm => {}
            // What left before the question says nothing of the time since.
            State::Asked(q) if sent_us < q.since_us => return,
            State::Asked(_) | State::Dead { .. } => self.lives(now_us, path),
        }
        self.testify(now_us, sent_us, which);
    }

    /// A path has answered a probe: those that were probed before that, and do not answer, may be
    /// dead.
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

    /// The peer has found the path dead, or our NIC has: so it has failed for us, too, and has to
    /// be steady before anybody goes back. Many QPs say the same of one failure.
    pub fn fails(&mut self, now_us: u64, port_path: impl Into<PortPath>) {
        if let Some(pair) = self.pairs.get_mut(&port_path.into()) {
            if pair.failed_us.is_none_or(|at| at + SAME_FAILURE_US < now_us) {
                pair.fails(now_us, &self.config);
            }
            pair.since_us = pair.since_us.max(now_us);
        }
    }

    /// Our NIC works again, or no longer does. Its paths are asked when it comes back; while it
    /// does not work nothing is asked of them.
    pub fn set_nic(&mut self, now_us: u64, local: u8, works: bool) {
        self.set_works(now_us, works, |port_path| port_path.path.local == local);
    }

    /// The port of our NIC `local` that `port_pair` leads through works again, or no longer does.
    /// Its paths are asked when it comes back; while it does not work nothing is asked of them.
    pub fn set_port(&mut self, now_us: u64, local: u8, port_pair: u8, works: bool) {
        self.set_works(now_us, works, |port_path| {
            (port_path.path.local, port_path.port_pair) == (local, port_pair)
        });
    }

    fn set_works(&mut self, now_us: u64, works: bool, of: impl Fn(&PortPath) -> bool) {
        let mut back = Vec::new();
        for (path, pair) in self.pairs.iter_mut().filter(|(port_path, _)| of(port_path)) {
            if std::mem::replace(&mut pair.works, works) == works {
                continue;
            }
            match works {
                true => pair.since_us = now_us,
                false if !matches!(pair.state, State::Dead { .. }) => {
                    pair.fails(now_us, &self.config)
                }
                false => {}
            }
            match pair.state {
                State::Asked(_) if !works => pair.state = State::Calm,
                // It is tried at once.
                State::Dead { .. } if works => {
                    pair.state =
                        State::Dead { retry_at_us: now_us, retry_us: self.config.retry_min_us }
                }
                State::Calm if works => back.push(*path),
                _ => {}
            }
        }
        back.into_iter().for_each(|path| {
            self.ask(now_us, path, now_us);
        });
    }

    /// A time of [`Self::poll_timeout`] has come. Call [`Self::poll_probe`] and
    /// [`Self::poll_verdict`] afterwards.
    pub fn handle_timeout(&mut self, now_us: u64) {
        let dead: Vec<PortPath> = self
            .pairs
            .iter()
            .filter(|(port_path, p)| self.ends_us(port_path, p).is_some_and(|at| at <= now_us))
            .map(|(p, _)| *p)
            .collect();
        for path in dead {
            let retry_us = self.config.retry_min_us;
            if let Some(pair) = self.pairs.get_mut(&path) {
                (pair.state, pair.due) =
                    (State::Dead { retry_at_us: now_us + retry_us, retry_us }, false);
                pair.fails(now_us, &self.config);
            }
            self.verdicts.push_back((path, Verdict::Dead));
        }
        let HealthConfig { retry_max_us, unproven_max_us, .. } = self.config;
        for pair in self.pairs.values_mut().filter(|p| p.works) {
            // Nothing leads over most of those that have never lived.
            let unproven = pair.unproven && pair.alive_us.is_none();
            let most_us = if unproven { unproven_max_us } else { retry_max_us };
            if let State::Dead { retry_at_us, retry_us } = &mut pair.state {
                if *retry_at_us <= now_us {
                    *retry_us = (*retry_us * 2).min(most_us);
                    *retry_at_us = now_us + *retry_us;
                    pair.due = true;
                }
            }
        }
        if self.round_due_us.is_some_and(|at| at <= now_us) {
            self.begin_interval(now_us);
        }
        self.look_at_losses(now_us);
    }

    // ---- polls ----

    /// The next probe to send: over that path, with that number. Paths that are asked come before
    /// their witnesses.
    pub fn poll_probe(&mut self, now_us: u64) -> Option<(PortPath, u32)> {
        let due = |asked: bool| {
            let mut pairs = self.pairs.iter().filter(|(_, p)| p.due && p.works);
            pairs.find(|(_, p)| matches!(p.state, State::Asked(_)) == asked).map(|(path, _)| *path)
        };
        let copied = self.pairs.iter().find(|(_, p)| p.copies > 0).map(|(path, _)| *path);
        if let Some(path) = copied {
            let pair = self.pairs.get_mut(&path)?;
            pair.copies -= 1;
            return Some((path, pair.sequence.wrapping_sub(1)));
        }
        let Some(path) = due(true).or_else(|| due(false)) else {
            let path = self.comparison.as_ref()?.due()?;
            let sequence = self.number(now_us, path)?;
            self.comparison.as_mut()?.sent(path, sequence);
            return Some((path, sequence));
        };
        let pair = self.pairs.get_mut(&path)?;
        pair.due = false;
        if let State::Asked(q) = &mut pair.state {
            q.probes += 1;
            q.untold.get_or_insert(self.probes + 1);
            pair.copies = COPIES - 1;
        }
        Some((path, self.number(now_us, path)?))
    }

    /// The number of a probe that leaves now.
    fn number(&mut self, now_us: u64, path: PortPath) -> Option<u32> {
        let pair = self.pairs.get_mut(&path)?;
        self.probes += 1;
        let sequence = pair.sequence;
        pair.sequence = sequence.wrapping_add(1);
        pair.sent[(sequence % REMEMBERED) as usize] = (now_us, self.probes);
        Some(sequence)
    }

    /// The next path of which something new is known.
    pub fn poll_verdict(&mut self) -> Option<(PortPath, Verdict)> {
        self.verdicts.pop_front()
    }

    /// When [`Self::handle_timeout`] is to be called.
    pub fn poll_timeout(&self) -> Option<u64> {
        let of_pairs = self.pairs.iter().filter_map(|(port_path, p)| match p.state {
            State::Dead { retry_at_us, .. } if p.works => Some(retry_at_us),
            _ => self.ends_us(port_path, p),
        });
        of_pairs.chain(self.round_due_us).chain(self.losses_due_us()).min()
    }

    // ---- inside ----

    fn lives(&mut self, now_us: u64, path: PortPath) {
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
    fn ends_us(&self, port_path: &PortPath, pair: &Pair) -> Option<u64> {
        let State::Asked(Question { since_us, probes, doomed_us, .. }) = pair.state else {
            return None;
        };
        let silent_us = since_us + self.config.silent_peer_us;
        let queue_us = (QUEUE_FACTOR * pair.answer_us).min(MAX_QUEUE_US);
        let queue_us = if left_out!(self.config.mutation, NoQueue) { 0 } else { queue_us };
        let least_us = since_us + self.config.round_us.max(queue_us);
        let doomed_us = doomed_us
            .or(left_out!(self.config.mutation, NoWitness).then_some(0))
            .filter(|_| probes >= if self.loses(*port_path) { LOSSY_PROBES } else { MIN_PROBES });
        Some(doomed_us.map_or(silent_us, |at| at.max(least_us).min(silent_us)))
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
