//! Ways that live and lose much of what they carry: *grey* ones. Their QPs leave them by plan, so
//! that nothing is replayed.
//!
//! | state of a way | event                                              | next                       |
//! |----------------|----------------------------------------------------|----------------------------|
//! | `Well`         | a strained window, and its pause is over           | `Compared` with others     |
//! | `Compared`     | it loses clearly more than the best of the others  | `Grey`; [`Verdict::Grey`]  |
//! | `Compared`     | it does not, in [`MAX_ROUNDS`] rounds              | as it was, and a pause     |
//! | `Grey`         | its pause is over                                  | `Compared` again, and grey |
//! | `Grey`, `Compared` | it loses no more than others any longer        | `Well`; [`Verdict::Alive`] |
//! | `Compared`     | it dies, or its NIC does                           | as it was, and a pause     |
//!
//! *The measure.* What QPs have sent again, of what they have sent: a window in which that was more
//! than one packet of [`STRAIN`] is *strained*. It costs nothing while nothing is lost. It is no
//! verdict: a receiver without a core, whose socket overflows, makes its senders repeat as much.
//!
//! *The comparison.* So the way and others to the same process are probed, each once in a round.
//! The verdict needs all of this:
//! - the way has lost [`MIN_LOST`] probes, and [`WORSE`] times as many as the best of the others
//!   and one more: where all NICs lose alike there is nowhere to go;
//! - it has answered some: one that answers none is dead or not, which is another question;
//! - that was so in fair rounds, over [`MIN_SPAN_US`] at least. A round is fair if one of the
//!   others answered fast in one of the two rounds before it or the two after, so that the peer had
//!   its core, and it was not late, so that we had ours. (In the round itself would not do: a way
//!   that loses as much as this one would be counted only where it has answered);
//! - QPs were strained in [`MIN_STRAINS`] windows.
//!
//! *Hysteresis.* After each comparison the way is not compared for a pause, which doubles from
//! `grey_pause_us` to `grey_pause_max_us`. A grey way stays so until a comparison finds it well,
//! and has then failed like one that was dead: it is steady only after a time that doubles, too.
//!
//! Invariants: one way is compared at a time, with at most [`MAX_OTHERS`] others; a comparison ends
//! after [`MAX_ROUNDS`] rounds; what is kept of a way is of constant size.
//!
//! What fails: nothing is told of loss by a device that does not count what it sends again; then
//! silence of a QP on a way that answers stands for a packet sent again (`PeerHealth::resent`).
//! A way to a peer with no other way is never compared.

use super::{HealthConfig, PeerHealth, Verdict};
use crate::mutants::left_out;
use crate::slots::PortPath;
use std::collections::VecDeque;

/// A window is strained in which more than one packet of so many was sent again.
const STRAIN: u64 = 50;
/// And at least so many, before a comparison begins; in it one is enough, as QPs that lose nearly
/// all hardly send.
const STRAIN_PACKETS: u64 = 4;
/// A window is no shorter.
const WINDOW_US: u64 = 50_000;
/// And no longer, whatever little was sent again.
const WINDOW_MAX_US: u64 = 2_000_000;
/// Others that a way is compared with.
const MAX_OTHERS: usize = 4;
/// Between two rounds.
const ROUND_US: u64 = 5_000;
/// A comparison ends after so many.
const MAX_ROUNDS: u32 = 640;
/// See the module's text.
const MIN_SPAN_US: u64 = 400_000;
const MIN_LOST: u32 = 24;
const WORSE: u32 = 4;
const MIN_STRAINS: u32 = 2;
/// A grey way that has lost no more than one of [`WELL`] of so many probes is well.
const WELL_PROBES: u32 = 240;
const WELL: u32 = 40;
/// In a fair round another answers in less, and it is less late.
const FAST_US: u64 = 50_000;
/// A probe that is not answered by then is lost. Then a round is counted.
const GRACE_US: u64 = 100_000;
/// So few lost probes, and one of so many, say that a way loses some.
const SOME_LOST: u32 = 3;
const SOME: u32 = 32;

/// What QPs have sent on a way since some time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Strain {
    since_us: u64,
    acked: u64,
    again: u64,
}

impl Strain {
    /// So many packets more were acknowledged, and so many sent again. Gives whether a window has
    /// ended with that, and was strained.
    fn add(&mut self, now_us: u64, acked: u64, again: u64, least: u64) -> bool {
        if now_us > self.since_us + WINDOW_MAX_US {
            *self = Strain { since_us: now_us, acked: 0, again: 0 };
        }
        self.acked += acked;
        self.again += again;
        let few = self.again < least && self.again > 0;
        if now_us < self.since_us + WINDOW_US || few {
            return false;
        }
        let strained = self.again * STRAIN > self.acked + self.again;
        *self = Strain { since_us: now_us, acked: 0, again: 0 };
        strained
    }
}

/// What is known of the losses of a way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Losses {
    strain: Strain,
    pub(super) grey: bool,
    /// It is not compared before that, and how long the pause was.
    next_us: u64,
    pause_us: u64,
}

impl Losses {
    /// A comparison has ended.
    fn pause(&mut self, now_us: u64, config: &HealthConfig) {
        let forgotten = !self.grey && now_us > self.next_us + config.forget_us;
        let last_us = if forgotten { 0 } else { self.pause_us };
        self.pause_us = (2 * last_us).clamp(config.grey_pause_us, config.grey_pause_max_us);
        self.next_us = now_us + self.pause_us;
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    answered: u32,
    lost: u32,
}

impl Count {
    fn probes(self) -> u32 {
        self.answered + self.lost
    }
}

/// The probes of one way in fair rounds.
#[derive(Clone, Copy, Debug)]
struct Tally {
    port_path: PortPath,
    count: Count,
    /// It is to be probed in the last round.
    due: bool,
}

/// A round that is not counted yet: of each way the number of its probe, and whether that was
/// answered.
#[derive(Clone, Debug)]
struct Round {
    sent_us: u64,
    probes: [Option<(u32, bool)>; MAX_OTHERS + 1],
    late: bool,
    /// Another way has answered fast.
    fast: bool,
}

/// A comparison of one way with others.
#[derive(Clone, Debug)]
pub(super) struct Comparison {
    /// The way, then the others.
    tallies: Vec<Tally>,
    pub(super) round_due_us: u64,
    open: VecDeque<Round>,
    rounds: u32,
    strains: u32,
    /// The first and the last fair round.
    fair_us: Option<(u64, u64)>,
    /// Whether another way answered fast in the two rounds that were counted last.
    before: [bool; 2],
}

impl Comparison {
    fn new(now_us: u64, port_paths: impl Iterator<Item = PortPath>) -> Comparison {
        let tally = |port_path| Tally { port_path, count: Count::default(), due: false };
        Comparison {
            tallies: port_paths.take(MAX_OTHERS + 1).map(tally).collect(),
            round_due_us: now_us,
            open: VecDeque::new(),
            rounds: 0,
            strains: 1,
            fair_us: None,
            before: [false; 2],
        }
    }

    fn of(&self) -> PortPath {
        self.tallies[0].port_path
    }

    /// Whether the way answers, and loses some, by what is known by now.
    fn loses(&self) -> bool {
        let own = self.tallies[0].count;
        own.answered > 0 && own.lost >= SOME_LOST && own.lost * SOME >= own.probes()
    }

    /// The next probe, whose number is to be told by `Comparison::sent`.
    pub(super) fn due(&self) -> Option<PortPath> {
        self.tallies.iter().find(|t| t.due).map(|t| t.port_path)
    }

    pub(super) fn sent(&mut self, port_path: PortPath, sequence: u32) {
        let Some(i) = self.tallies.iter().position(|t| t.port_path == port_path) else { return };
        self.tallies[i].due = false;
        if let Some(round) = self.open.back_mut() {
            round.probes[i] = Some((sequence, false));
        }
    }

    /// A probe was answered.
    pub(super) fn answered(&mut self, now_us: u64, port_path: PortPath, sequence: u32) {
        let Some(i) = self.tallies.iter().position(|t| t.port_path == port_path) else { return };
        let of = |round: &&mut Round| round.probes[i] == Some((sequence, false));
        let Some(round) = self.open.iter_mut().find(of) else { return };
        round.probes[i] = Some((sequence, true));
        round.fast |= i > 0 && now_us <= round.sent_us + FAST_US;
    }

    /// Begins a round, for ways that `carry`.
    fn begin_round(&mut self, now_us: u64, carries: impl Fn(PortPath) -> bool) {
        for t in &mut self.tallies {
            t.due = carries(t.port_path);
        }
        self.open.push_back(Round {
            sent_us: now_us,
            probes: [None; MAX_OTHERS + 1],
            late: now_us > self.round_due_us + FAST_US,
            fast: false,
        });
        self.rounds += 1;
        self.round_due_us = now_us + ROUND_US;
    }

    /// Counts the rounds that are over, if they were fair.
    fn count(&mut self, now_us: u64) {
        while self.open.front().is_some_and(|r| r.sent_us + GRACE_US <= now_us) {
            let Some(round) = self.open.pop_front() else { return };
            let near = self.before.into_iter().chain(self.open.iter().take(2).map(|r| r.fast));
            let answered = near.into_iter().any(|fast| fast);
            self.before = [self.before[1], round.fast];
            if round.late || !answered {
                continue;
            }
            let (first_us, _) = self.fair_us.unwrap_or((round.sent_us, 0));
            self.fair_us = Some((first_us, round.sent_us));
            for (t, probe) in self.tallies.iter_mut().zip(round.probes) {
                let Some((_, answered)) = probe else { continue };
                t.count.answered += u32::from(answered);
                t.count.lost += u32::from(!answered);
            }
        }
    }

    /// Whether the way is grey, if that is known by now.
    fn judge(&self, was_grey: bool, alone: bool) -> Option<bool> {
        let own = self.tallies[0].count;
        // One that has hardly been probed says nothing.
        let others = self.tallies[1..].iter().map(|t| t.count);
        let best = others.filter(|c| 2 * c.probes() >= own.probes()).map(|c| c.lost).min();
        let lost = if alone { 0 } else { best.unwrap_or(u32::MAX / 8) };
        let worse = own.lost >= MIN_LOST && own.lost >= WORSE * (lost + 1);
        let strained = was_grey || self.strains >= MIN_STRAINS;
        let lasts = self.fair_us.is_some_and(|(first, last)| last >= first + MIN_SPAN_US);
        if worse && own.answered > 0 && lasts && strained {
            return Some(true);
        }
        let ends = self.rounds >= MAX_ROUNDS;
        let well = own.probes() >= WELL_PROBES && own.lost * WELL <= own.probes();
        let alike = ends && own.probes() >= WELL_PROBES && own.lost <= WORSE * lost;
        if was_grey && (well || alike) {
            return Some(false);
        }
        ends.then_some(was_grey)
    }
}

impl PeerHealth {
    /// QPs on the way have had so many packets acknowledged since that was told last, and sent so
    /// many again. Where a device does not count these, one for each QP that is silent.
    pub fn resent(&mut self, now_us: u64, port_path: impl Into<PortPath>, acked: u64, again: u64) {
        let port_path = port_path.into();
        let Some(pair) = self.pairs.get_mut(&port_path) else { return };
        let compared = self.comparison.as_ref().is_some_and(|c| c.of() == port_path);
        let least = if compared { 1 } else { STRAIN_PACKETS };
        if !pair.losses.strain.add(now_us, acked, again, least) {
            return;
        }
        match &mut self.comparison {
            Some(c) if c.of() == port_path => c.strains += 1,
            Some(_) => {}
            None if pair.losses.grey || now_us < pair.losses.next_us => {}
            None => self.compare(now_us, port_path),
        }
    }

    /// Whether the way is known to lose much more than others.
    pub fn is_grey(&self, port_path: impl Into<PortPath>) -> bool {
        self.pairs.get(&port_path.into()).is_some_and(|p| p.losses.grey)
    }

    /// Whether it is, and another way to the peer is known to be better.
    pub fn is_shunned(&self, port_path: impl Into<PortPath>) -> bool {
        self.is_grey(port_path) && self.pairs.values().any(|p| p.carries() && !p.losses.grey)
    }

    /// Whether the way lives and is known to lose some packets, be it no more than others: a
    /// transport that has given up on it may go on.
    pub fn loses(&self, port_path: impl Into<PortPath>) -> bool {
        let port_path = port_path.into();
        self.is_grey(port_path)
            || self.comparison.as_ref().is_some_and(|c| c.of() == port_path && c.loses())
    }

    /// Compares a way with others: first those that share no NIC with it, rail to rail before
    /// across.
    fn compare(&mut self, now_us: u64, port_path: PortPath) {
        let carries =
            |port_path: &PortPath| self.pairs.get(port_path).is_some_and(super::Pair::carries);
        let rank = |other: &PortPath| {
            let (a, b) = (other.path, port_path.path);
            let shares = u8::from(a.local == b.local) + u8::from(a.remote == b.remote);
            (shares, a.local != a.remote, other.port_pair != port_path.port_pair)
        };
        let mut others: Vec<PortPath> = self
            .pairs
            .keys()
            .filter(|other| **other != port_path && carries(other))
            .copied()
            .collect();
        if others.is_empty() || !carries(&port_path) {
            return;
        }
        others.sort_by_key(rank);
        others.truncate(MAX_OTHERS);
        self.comparison = Some(Comparison::new(now_us, std::iter::once(port_path).chain(others)));
    }

    /// When there is something to do about losses.
    pub(super) fn losses_due_us(&self) -> Option<u64> {
        match &self.comparison {
            Some(c) => Some(c.round_due_us),
            None => {
                let grey = |p: &&super::Pair| p.losses.grey && p.works;
                self.pairs.values().filter(grey).map(|p| p.losses.next_us).min()
            }
        }
    }

    /// A round of the comparison is due, or a grey way is to be compared again.
    pub(super) fn look_at_losses(&mut self, now_us: u64) {
        if self.losses_due_us().is_none_or(|at| at > now_us) {
            return;
        }
        if self.comparison.is_none() {
            let again = self
                .pairs
                .iter()
                .find(|(_, p)| p.losses.grey && p.works && p.losses.next_us <= now_us);
            let Some(port_path) = again.map(|(port_path, _)| *port_path) else { return };
            self.compare(now_us, port_path);
            if self.comparison.is_none() {
                // Nothing else lives.
                self.end_comparison(now_us, port_path, true);
            }
            return;
        }
        let Some(mut c) = self.comparison.take() else { return };
        c.count(now_us);
        let port_path = c.of();
        let alone = left_out!(self.config.mutation, GreyAlone);
        let Some(pair) = self.pairs.get(&port_path) else { return };
        let was_grey = pair.losses.grey;
        let ended = (!pair.carries()).then_some(was_grey);
        if let Some(grey) = ended.or_else(|| c.judge(was_grey, alone)) {
            return self.end_comparison(now_us, port_path, grey);
        }
        c.begin_round(now_us, |port_path| {
            self.pairs.get(&port_path).is_some_and(super::Pair::carries)
        });
        self.comparison = Some(c);
    }

    fn end_comparison(&mut self, now_us: u64, port_path: PortPath, grey: bool) {
        self.comparison = None;
        let Some(pair) = self.pairs.get_mut(&port_path) else { return };
        pair.losses.pause(now_us, &self.config);
        match (std::mem::replace(&mut pair.losses.grey, grey), grey) {
            (false, true) => {
                pair.fails(now_us, &self.config);
                self.verdicts.push_back((port_path, Verdict::Grey));
            }
            (true, false) => {
                pair.since_us = now_us;
                self.verdicts.push_back((port_path, Verdict::Alive));
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    //! The numbers of the rules: each is one off, and then right.

    use super::*;
    use crate::slots::SlotPath;

    fn path(nic: u8) -> PortPath {
        SlotPath { local: nic, remote: nic }.into()
    }

    #[test]
    fn a_window_is_strained_by_four_packets_and_one_of_fifty() {
        for (us, acked, again, strained) in [
            (50_000, 100, 4, true),
            (49_999, 100, 4, false),
            (50_000, 100, 3, false),
            (50_000, 195, 4, true),
            (50_000, 196, 4, false),
            (2_000_000, 100, 4, true),
            (2_000_001, 100, 4, false),
        ] {
            let mut strain = Strain { since_us: 1_000_000, ..Strain::default() };
            let is = strain.add(1_000_000 + us, acked, again, STRAIN_PACKETS);
            assert_eq!(is, strained, "{us} µs, {again} of {acked}");
        }
    }

    /// A comparison of two paths with these counts (answered, lost) of fair rounds.
    fn compared(own: (u32, u32), other: (u32, u32)) -> Comparison {
        let mut c = Comparison::new(0, [path(0), path(1)].into_iter());
        for (tally, (answered, lost)) in c.tallies.iter_mut().zip([own, other]) {
            tally.count = Count { answered, lost };
        }
        (c.fair_us, c.strains) = (Some((1_000, 401_000)), 2);
        c
    }

    #[test]
    fn a_path_is_grey_by_enough_probes_time_and_strain() {
        let grey = |c: Comparison| c.judge(false, false);
        assert_eq!(grey(compared((70, 24), (94, 5))), Some(true));
        assert_eq!(grey(compared((70, 23), (94, 0))), None, "too few are lost");
        assert_eq!(grey(compared((70, 24), (94, 6))), None, "the other loses, too");
        assert_eq!(grey(compared((0, 24), (94, 0))), None, "it may be dead");
        assert_eq!(grey(compared((70, 24), (46, 0))), None, "the other was hardly probed");
        let short = Comparison { fair_us: Some((1_001, 401_000)), ..compared((70, 24), (94, 5)) };
        assert_eq!(grey(short), None);
        let calm = Comparison { strains: 1, ..compared((70, 24), (94, 5)) };
        assert_eq!(grey(calm), None);
        let last = |rounds| Comparison { rounds, ..compared((70, 3), (94, 0)) };
        assert_eq!([grey(last(639)), grey(last(640))], [None, Some(false)]);
    }

    #[test]
    fn a_grey_path_is_well_by_enough_probes() {
        let grey = |own| compared(own, (240, 0)).judge(true, false);
        assert_eq!([grey((234, 6)), grey((233, 6)), grey((233, 7))], [Some(false), None, None]);
    }

    #[test]
    fn a_path_loses_some_by_three_probes_and_one_of_32() {
        let loses = |own| compared(own, (100, 0)).loses();
        assert!(loses((93, 3)) && !loses((94, 3)) && !loses((10, 2)) && !loses((0, 3)));
    }

    #[test]
    fn rounds_have_their_times() {
        let begun = |late_us| {
            let mut c = Comparison::new(0, (0..9).map(path));
            c.begin_round(late_us, |_| true);
            c.sent(path(1), 1);
            c
        };
        let mut c = begun(0);
        assert_eq!((c.tallies.len(), c.round_due_us), (5, 5_000));
        assert!(!begun(50_000).open[0].late && begun(50_001).open[0].late);
        c.answered(50_001, path(1), 1);
        assert!(!c.open[0].fast);
        let mut c = begun(0);
        c.answered(50_000, path(1), 1);
        assert!(c.open[0].fast);
        c.count(99_999);
        assert_eq!(c.open.len(), 1);
        c.count(100_000);
        assert_eq!(c.open.len(), 0);
    }
}
