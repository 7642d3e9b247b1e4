//! Noticing that a QP makes no progress because its path is dead.
//!
//! | state     | event                                      | next     |
//! |-----------|--------------------------------------------|----------|
//! | `Calm`    | sends outstanding, nothing moved for `stall_us` | `Doubt`: the path is probed |
//! | `Doubt`   | something moved, or nothing is outstanding | `Calm`   |
//! | `Doubt`   | a round of probes begun since then failed  | `Suspect`, once |
//! | `Doubt`   | the probe was answered                     | `Doubt`: the peer is slow (no receive posted); probe again |
//!
//! Not every device reports a dead path: Linux rxe retries for ever at retry_cnt 7, and common settings take half a minute. A
//! peer that merely has no receive posted keeps answering probes, so it is never suspected. With the default settings a cut cable is
//! noticed after 25 ms without progress and 30 ms of probing.

use crate::probe::PathProbe;

/// What the detector says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nothing to worry about.
    Calm,
    /// No progress; the path is being probed.
    Doubt,
    /// No progress and the probes were not answered: switch. Said once for a doubt.
    Suspect,
}

/// The stall detector of one life of a logical QP. Make a new one for each life.
#[derive(Clone, Debug)]
pub struct StallDetector {
    stall_us: u64,
    advanced: u64,
    /// Since when sends are outstanding and nothing has moved.
    since_us: Option<u64>,
    doubting: bool,
    suspected: bool,
}

/// Default of `stall_us`: time without progress before the path is doubted.
pub const STALL_US: u64 = 25_000;

impl StallDetector {
    /// A detector that doubts the path after `stall_us` without progress.
    pub fn new(stall_us: u64) -> StallDetector {
        StallDetector { stall_us, advanced: 0, since_us: None, doubting: false, suspected: false }
    }

    /// Looks at the progress of the physical QP (sends outstanding; a number that grows with every ACK or READ answer) and at the
    /// probes of its path, and has the path probed where there is doubt.
    pub fn observe(&mut self, now_us: u64, outstanding: u32, advanced: u64, probe: &mut PathProbe) -> Verdict {
        if outstanding == 0 || advanced != self.advanced {
            self.advanced = advanced;
            self.since_us = (outstanding > 0).then_some(now_us);
            self.doubting = false;
            self.suspected = false;
            return Verdict::Calm;
        }
        let since_us = *self.since_us.get_or_insert(now_us);
        if now_us < since_us + self.stall_us {
            return Verdict::Calm;
        }
        self.doubting = true;
        // Nothing has moved since `since_us`, so a failed round that began later is evidence, whoever asked for it.
        if probe.failed_since(since_us) {
            return if core::mem::replace(&mut self.suspected, true) { Verdict::Doubt } else { Verdict::Suspect };
        }
        probe.demand(now_us);
        Verdict::Doubt
    }

    /// When [`Self::observe`] should be called at the latest, given that nothing moves. In doubt, call it also when the probe's
    /// own time has come.
    pub fn poll_timeout(&self) -> Option<u64> {
        match (self.since_us, self.doubting) {
            (Some(since_us), false) => Some(since_us + self.stall_us),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::ProbeConfig;

    /// Runs in steps of 1 ms; `answers(ms)` and `moves(ms)` say what the network and the peer do. Returns when it suspects.
    fn run(ms: u64, answers: impl Fn(u64) -> bool, moves: impl Fn(u64) -> bool) -> Option<u64> {
        let mut probe = PathProbe::new(ProbeConfig::default());
        let mut stall = StallDetector::new(STALL_US);
        let mut advanced = 7;
        for t in 0..ms {
            let now = t * 1_000;
            advanced += u64::from(moves(t));
            if probe.poll_timeout().is_some_and(|at| now >= at) {
                probe.handle_timeout(now);
            }
            if stall.observe(now, 3, advanced, &mut probe) == Verdict::Suspect {
                return Some(t);
            }
            if let Some(seq) = probe.poll_send(now).filter(|_| answers(t)) {
                probe.handle_ack(now + 200, seq);
            }
        }
        None
    }

    #[test]
    fn a_cut_cable_is_noticed_within_60_ms() {
        let at = run(500, |t| t < 100, |t| t < 100).unwrap();
        assert!((150..=160).contains(&at), "{at}");
    }

    #[test]
    fn a_peer_without_receives_is_not_suspected_but_a_later_cut_is_noticed() {
        assert_eq!(run(10_000, |_| true, |t| t < 100), None);
        let at = run(10_000, |t| t < 5_000, |t| t < 100).unwrap();
        assert!((5_000..=5_080).contains(&at), "{at}");
    }

    #[test]
    fn lost_probes_alone_suspect_nothing() {
        assert_eq!(run(5_000, |_| false, |t| t % 20 == 0), None);
        assert_eq!(run(5_000, |t| t % 3 == 0, |_| false), None, "two of three probes lost");
    }

    #[test]
    fn idle_is_calm() {
        let mut probe = PathProbe::new(ProbeConfig::default());
        let mut stall = StallDetector::new(STALL_US);
        for t in 0..100 {
            assert_eq!(stall.observe(t * 10_000, 0, 5, &mut probe), Verdict::Calm);
        }
        assert_eq!((stall.poll_timeout(), probe.poll_timeout()), (None, None));
    }
}
