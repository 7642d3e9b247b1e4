//! Probing one path (one pair of NICs of two processes), for all logical QPs that use it.
//!
//! | state      | event                        | next       |
//! |------------|------------------------------|------------|
//! | `Idle`     | asked for, or dead and due   | `Round`    |
//! | `Round`    | an answer                    | `Idle`, alive |
//! | `Round`    | the next send is due         | `Round`    |
//! | `Round`    | no answer in `round_us`      | `Idle`, dead  |
//!
//! A round is a few probes some milliseconds apart, so that one lost packet decides nothing. A dead path is probed again, less and less
//! often but for ever, so that its return is noticed. A path that lives is probed only when somebody doubts it.

/// Settings, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProbeConfig {
    /// Between two probes of a round.
    pub interval_us: u64,
    /// A round without an answer by then has failed.
    pub round_us: u64,
    /// From a failed round to the next: first, and at most (it doubles).
    pub retry_min_us: u64,
    /// See `retry_min_us`.
    pub retry_max_us: u64,
}

impl Default for ProbeConfig {
    fn default() -> ProbeConfig {
        ProbeConfig { interval_us: 8_000, round_us: 30_000, retry_min_us: 50_000, retry_max_us: 1_000_000 }
    }
}

/// What the probes say of the path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Health {
    /// Never probed.
    Unknown,
    /// The last finished round was answered.
    Alive,
    /// The last finished round was not answered.
    Dead,
}

/// The prober of one path.
#[derive(Clone, Debug)]
pub struct PathProbe {
    config: ProbeConfig,
    health: Health,
    /// The running round: when it began and when its next probe is due.
    round: Option<(u64, u64)>,
    first_sequence: u32,
    next_sequence: u32,
    retry_at_us: Option<u64>,
    retry_us: u64,
    /// When the last failed and the last answered round began; nothing before counts for a doubt that arose later.
    failed_round_us: Option<u64>,
    answered_at_us: Option<u64>,
}

impl PathProbe {
    /// A path of which nothing is known.
    pub fn new(config: ProbeConfig) -> PathProbe {
        PathProbe {
            config,
            health: Health::Unknown,
            round: None,
            first_sequence: 0,
            next_sequence: 0,
            retry_at_us: None,
            retry_us: config.retry_min_us,
            failed_round_us: None,
            answered_at_us: None,
        }
    }

    /// What is known.
    pub fn health(&self) -> Health {
        self.health
    }

    /// Whether a round that began at `since_us` or later has failed, and none has been answered after it.
    pub fn failed_since(&self, since_us: u64) -> bool {
        self.failed_round_us.is_some_and(|at| at >= since_us && self.answered_at_us.is_none_or(|ok| ok < at))
    }

    /// Somebody doubts the path: begin a round, unless one is under way or was answered less than a round ago.
    pub fn demand(&mut self, now_us: u64) {
        let answered = self.answered_at_us.is_some_and(|at| now_us < at + self.config.round_us);
        let fresh = answered && self.health == Health::Alive;
        if self.round.is_none() && !fresh {
            self.round = Some((now_us, now_us));
            self.first_sequence = self.next_sequence;
        }
    }

    /// A QP has given up on the path: it counts as dead until a round that begins now is answered, however lately it was alive.
    pub fn doubt(&mut self, now_us: u64) {
        self.set_dead();
        self.demand(now_us);
    }

    /// The path is known to be dead, since our own NIC is: it is not probed until [`Self::demand`], when the NIC works again.
    pub fn set_dead(&mut self) {
        self.health = Health::Dead;
        self.round = None;
        self.retry_at_us = None;
    }

    /// The sequence number of the probe to send now, if one is due.
    pub fn poll_send(&mut self, now_us: u64) -> Option<u32> {
        let (_, due) = self.round.as_mut()?;
        if now_us < *due {
            return None;
        }
        *due = now_us + self.config.interval_us;
        let sequence = self.next_sequence;
        self.next_sequence = self.next_sequence.wrapping_add(1);
        Some(sequence)
    }

    /// An answer has come. Returns whether the health changed. Answers of earlier rounds say nothing and are ignored.
    pub fn handle_ack(&mut self, now_us: u64, sequence: u32) -> bool {
        let sent = self.next_sequence.wrapping_sub(self.first_sequence);
        if self.round.is_none() || sequence.wrapping_sub(self.first_sequence) >= sent {
            return false;
        }
        self.round = None;
        self.answered_at_us = Some(now_us);
        self.retry_us = self.config.retry_min_us;
        self.retry_at_us = None;
        core::mem::replace(&mut self.health, Health::Alive) != Health::Alive
    }

    /// When something is due.
    pub fn poll_timeout(&self) -> Option<u64> {
        match self.round {
            Some((began, due)) => Some(due.min(began + self.config.round_us)),
            None => self.retry_at_us,
        }
    }

    /// The time has come. Returns whether the health changed. Call [`Self::poll_send`] afterwards.
    pub fn handle_timeout(&mut self, now_us: u64) -> bool {
        match self.round {
            Some((began, _)) if now_us >= began + self.config.round_us => {
                self.round = None;
                self.failed_round_us = Some(began);
                self.retry_at_us = Some(now_us + self.retry_us);
                self.retry_us = (self.retry_us * 2).min(self.config.retry_max_us);
                core::mem::replace(&mut self.health, Health::Dead) != Health::Dead
            }
            None if self.retry_at_us.is_some_and(|at| now_us >= at) => {
                self.retry_at_us = None;
                self.demand(now_us);
                false
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unanswered_round_is_a_few_probes_and_ends_in_time() {
        let mut p = PathProbe::new(ProbeConfig::default());
        p.demand(1_000);
        let mut sent = 0;
        while p.health() == Health::Unknown {
            let at = p.poll_timeout().unwrap();
            p.handle_timeout(at);
            sent += u32::from(p.poll_send(at).is_some());
            assert!(at <= 31_000);
        }
        assert_eq!((p.health(), sent), (Health::Dead, 4));
        assert!(p.failed_since(1_000) && !p.failed_since(1_001));
        assert_eq!(p.poll_timeout(), Some(81_000));
    }

    #[test]
    fn any_probe_of_the_round_may_be_answered_but_no_older_one() {
        let mut p = PathProbe::new(ProbeConfig::default());
        p.demand(0);
        let first = p.poll_send(0).unwrap();
        assert!(!p.handle_ack(1, first + 1), "not sent yet");
        let second = p.poll_send(8_000).unwrap();
        assert!(p.handle_ack(9_000, first));
        assert_eq!(p.health(), Health::Alive);
        p.demand(40_000);
        p.poll_send(40_000).unwrap();
        assert!(!p.handle_ack(40_001, second), "an answer of the round before");
        assert!(p.handle_timeout(70_000));
        assert_eq!(p.health(), Health::Dead);
    }

    #[test]
    fn a_doubted_path_is_dead_until_it_answers_anew() {
        let mut p = PathProbe::new(ProbeConfig::default());
        p.demand(0);
        let seq = p.poll_send(0).unwrap();
        assert!(p.handle_ack(50, seq));
        p.demand(60);
        assert_eq!(p.poll_send(60), None, "it has just answered");
        p.doubt(60);
        assert_eq!(p.health(), Health::Dead);
        assert!(!p.handle_ack(70, seq), "an old answer");
        let seq = p.poll_send(70).unwrap();
        assert!(p.handle_ack(120, seq));
        assert_eq!(p.health(), Health::Alive);
    }

    #[test]
    fn a_dead_path_is_probed_for_ever_and_its_return_is_noticed() {
        let mut p = PathProbe::new(ProbeConfig::default());
        p.demand(0);
        let (mut now, mut rounds) = (0, 0);
        while now < 20_000_000 {
            now = p.poll_timeout().unwrap();
            rounds += u32::from(p.round.is_none());
            p.handle_timeout(now);
            p.poll_send(now);
        }
        assert!((15..40).contains(&rounds), "{rounds}");
        let seq = loop {
            now = p.poll_timeout().unwrap();
            p.handle_timeout(now);
            if let Some(s) = p.poll_send(now) {
                break s;
            }
        };
        assert!(p.handle_ack(now + 50, seq));
        assert_eq!((p.health(), p.poll_timeout()), (Health::Alive, None));
    }
}
