//! How providers flush a QP in ERR, each in its own way, and none as the books say.
//!
//! Successes come in order and all of them; what differs is what becomes of flushes. A program that
//! has ended its QP by an error of its own gets them all in the end: there is nothing to protect
//! there, and what a device keeps to itself the program would miss without us, too.

use crate::rng::Rng;
use std::collections::VecDeque;
use unbroken_types::{Completions, Wc, WcStatus};

/// What becomes of the flushes of a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    /// All come, in order, the markers behind them.
    Whole,
    /// Some never come, of both queues, in the middle, too; and markers (mlx5 over a bond).
    Lossy,
    /// Those of receives come once the sends have none left; with an SRQ none does (bnxt_re).
    SendsFirst,
    /// Those of receives come once a look has found no more of the sends (irdma).
    Parked,
    /// A look brings one completion of each queue (hns).
    SlowPoll,
    /// Receives that are posted in ERR never complete, so their marker does not come (rxe).
    NoRecvMarker,
    /// None comes before the QP is destroyed, and then all.
    AtDestroy,
    /// None comes at all.
    Nothing,
}

impl Flush {
    /// All of them.
    pub const ALL: [Flush; 8] = [
        Flush::Whole,
        Flush::Lossy,
        Flush::SendsFirst,
        Flush::Parked,
        Flush::SlowPoll,
        Flush::NoRecvMarker,
        Flush::AtDestroy,
        Flush::Nothing,
    ];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Flush::Whole => "whole",
            Flush::Lossy => "lossy",
            Flush::SendsFirst => "sends-first",
            Flush::Parked => "parked",
            Flush::SlowPoll => "slow-poll",
            Flush::NoRecvMarker => "no-recv-marker",
            Flush::AtDestroy => "at-destroy",
            Flush::Nothing => "nothing",
        }
    }

    /// The one of a name.
    pub fn from_name(name: &str) -> Option<Flush> {
        Self::ALL.into_iter().find(|flush| flush.name() == name)
    }
}

/// The two CQs of a provider's QP: completions that nobody has taken, and those that are not there
/// yet.
#[derive(Clone)]
pub(crate) struct Cqs {
    sends: VecDeque<Wc>,
    recvs: VecDeque<Wc>,
    hidden_sends: VecDeque<Wc>,
    hidden_recvs: VecDeque<Wc>,
    /// Flushes that have been kept back, or came out of their turn.
    pub(crate) odd: u64,
    flush: Flush,
    shared_recvs: bool,
    /// The QP was in ERR before what is posted now.
    pub(crate) in_error: bool,
    rng: Rng,
}

fn is_flush(wc: &Wc) -> bool {
    wc.status == WcStatus::WrFlushErr as u32
}

impl Cqs {
    pub(crate) fn new(flush: Flush, shared_recvs: bool, seed: u64) -> Cqs {
        Cqs {
            sends: VecDeque::new(),
            recvs: VecDeque::new(),
            hidden_sends: VecDeque::new(),
            hidden_recvs: VecDeque::new(),
            odd: 0,
            flush,
            shared_recvs,
            in_error: false,
            rng: Rng::new(seed),
        }
    }

    fn hides(&mut self, is_send: bool) -> bool {
        match self.flush {
            Flush::Lossy => self.rng.one_in(3),
            Flush::SendsFirst => !is_send && self.shared_recvs,
            Flush::NoRecvMarker => !is_send && self.in_error,
            Flush::AtDestroy | Flush::Nothing => true,
            Flush::Whole | Flush::Parked | Flush::SlowPoll => false,
        }
    }

    /// What a look finds, to be taken by [`Self::send_of`] and [`Self::recv_of`].
    pub(crate) fn look(&self) -> Look {
        let most = if self.flush == Flush::SlowPoll && self.in_error { 1 } else { usize::MAX };
        Look { sends: most, recvs: most, parked: !self.sends.is_empty() }
    }

    pub(crate) fn send_of(&mut self, look: &mut Look) -> Option<Wc> {
        look.sends = look.sends.checked_sub(1)?;
        self.sends.pop_front()
    }

    pub(crate) fn recv_of(&mut self, look: &mut Look) -> Option<Wc> {
        let waits = match self.flush {
            Flush::SendsFirst => !self.sends.is_empty(),
            Flush::Parked => look.parked,
            _ => false,
        };
        if waits && self.recvs.front().is_some_and(is_flush) {
            self.odd += 1;
            return None;
        }
        look.recvs = look.recvs.checked_sub(1)?;
        self.recvs.pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.recvs.is_empty()
    }

    /// Whether a look would find no receive.
    pub(crate) fn no_recvs(&self) -> bool {
        self.recvs.is_empty()
    }

    /// The QP was destroyed.
    pub(crate) fn destroyed(&mut self) {
        match self.flush {
            Flush::AtDestroy => self.reveal(),
            _ => (self.hidden_sends, self.hidden_recvs) = Default::default(),
        }
    }

    /// All that was kept back comes.
    pub(crate) fn reveal(&mut self) {
        self.sends.append(&mut self.hidden_sends);
        self.recvs.append(&mut self.hidden_recvs);
        self.flush = Flush::Whole;
    }
}

/// One look at both CQs.
pub(crate) struct Look {
    sends: usize,
    recvs: usize,
    /// There was something of the sends at its beginning.
    parked: bool,
}

impl Completions for Cqs {
    fn send(&mut self, wc: Wc) {
        if is_flush(&wc) && self.hides(true) {
            self.odd += 1;
            return self.hidden_sends.push_back(wc);
        }
        self.sends.push_back(wc);
    }
    fn recv(&mut self, wc: Wc, _solicited: bool) {
        if is_flush(&wc) && self.hides(false) {
            self.odd += 1;
            return self.hidden_recvs.push_back(wc);
        }
        self.recvs.push_back(wc);
    }
}
