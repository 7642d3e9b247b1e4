//! What is known of one path: whether it lives, is asked, or is dead, and how often it has failed.

use super::loss::Losses;
use super::HealthConfig;

/// Probes whose time of sending is remembered, for each path.
pub(super) const REMEMBERED: u32 = 64;

#[derive(Clone, Copy, Debug)]
pub(super) enum State {
    Calm,
    Asked(Question),
    Dead { retry_at_us: u64, retry_us: u64 },
}

/// A path was asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    pub(super) since_us: u64,
    /// Probes sent.
    pub(super) probes: u32,
    /// The oldest of them, among all probes to the peer, that was sent after the last testimony.
    pub(super) untold: Option<u64>,
    /// How often another path answered what was sent after a probe of this one.
    pub(super) testimonies: u32,
    /// From when on the testimonies allow a verdict of dead.
    pub(super) doomed_us: Option<u64>,
}

/// One path.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    pub(super) state: State,
    /// Our NIC works, so that a probe can leave.
    pub(super) works: bool,
    /// Whether anything leads over it is not known.
    pub(super) unproven: bool,
    /// The last sign of life.
    pub(super) alive_us: Option<u64>,
    /// How long answers have taken lately: the longest, which fades with each answer.
    pub(super) answer_us: u64,
    /// Number of the next probe.
    pub(super) sequence: u32,
    /// When the last probes were sent, by number, and as which of all probes to the peer.
    pub(super) sent: [(u64, u64); REMEMBERED as usize],
    /// It is to be probed now.
    pub(super) due: bool,
    /// So many more times with the last number.
    pub(super) copies: u32,
    /// What it loses.
    pub(super) losses: Losses,
    /// When it failed last, and how often it did in a row; since when it works again.
    pub(super) failed_us: Option<u64>,
    pub(super) failures: u32,
    pub(super) since_us: u64,
}

impl Pair {
    pub(super) fn new() -> Pair {
        Pair {
            state: State::Calm,
            works: true,
            unproven: false,
            alive_us: None,
            answer_us: 0,
            sequence: 0,
            sent: [(0, 0); REMEMBERED as usize],
            due: false,
            copies: 0,
            losses: Losses::default(),
            failed_us: None,
            failures: 0,
            since_us: 0,
        }
    }

    /// It is not known to be dead, and our NIC works.
    pub(super) fn carries(&self) -> bool {
        self.works && !matches!(self.state, State::Dead { .. })
    }

    /// An answer has taken that long.
    pub(super) fn answered(&mut self, took_us: u64) {
        self.answer_us = took_us.max(self.answer_us - self.answer_us.div_ceil(8));
    }

    /// It has failed now. That it still does not work is no second failure.
    pub(super) fn fails(&mut self, now_us: u64, config: &HealthConfig) {
        let recent = self.failed_us.is_some_and(|at| at + config.forget_us > now_us);
        self.failures = if recent { self.failures.saturating_add(1) } else { 1 };
        self.failed_us = Some(now_us);
    }
}
