//! Errors of an application's own: one work request of a logical QP is wrong, on whatever path it
//! goes.
//!
//! Such an error is none of failover's business. Its application gets it as from a QP without
//! failover: that error, at that work request, flushes behind it, and never a success again. A
//! request that the peer refuses ends the peer's QP, too, whose work is flushed; of one that fails
//! at its own end the peer learns nothing before it sends something itself, and then gets the error
//! of a path that does not answer. A network that fails just then may take away the answer that
//! says what was wrong: then the error is that of the network, at the oldest request that is not
//! known to be done, and what is wrong has not run all the same.

use crate::plan::{Fault, Plan, QpPlan};
use crate::rng::Rng;
use unbroken_types::{SendFlags, SendOpcode, WcStatus};

/// What is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mistake {
    /// The message names a key that the peer has not given away.
    RemoteKey,
    /// The message is an atomic on an address that is none of a word.
    Misaligned,
    /// The last piece of the message's data has a key that nobody knows.
    LocalKey,
    /// The peer's receive for it is shorter than the message.
    ShortReceive,
    /// The peer's receive for it has a key that nobody knows.
    ReceiveKey,
    /// The peer posts no receive for it, and the sender does not wait for ever.
    NoReceive,
}

/// A mistake of a schedule.
#[derive(Clone, Debug)]
pub struct OwnError {
    /// Which logical QP.
    pub qp: usize,
    /// The host whose message it concerns.
    pub host: usize,
    /// The message.
    pub message: usize,
    /// What is wrong.
    pub mistake: Mistake,
    /// With [`Mistake::NoReceive`]: how often the sender tries again.
    pub rnr_retry: u8,
    /// What else happens, so long after the message was posted.
    pub amid: Vec<(u64, Fault)>,
}

impl OwnError {
    /// The status of the message.
    pub const fn status(&self) -> WcStatus {
        match self.mistake {
            Mistake::RemoteKey => WcStatus::RemAccessErr,
            Mistake::Misaligned | Mistake::ShortReceive => WcStatus::RemInvReqErr,
            Mistake::LocalKey => WcStatus::LocProtErr,
            Mistake::ReceiveKey => WcStatus::RemOpErr,
            Mistake::NoReceive => WcStatus::RnrRetryExcErr,
        }
    }

    /// The status of the peer's receive for it, where it is the receive that is wrong.
    pub const fn receive_status(&self) -> Option<WcStatus> {
        match self.mistake {
            Mistake::ShortReceive => Some(WcStatus::LocLenErr),
            Mistake::ReceiveKey => Some(WcStatus::LocProtErr),
            _ => None,
        }
    }

    /// The peer's QP ends by it.
    pub const fn ends_peer(&self) -> bool {
        !matches!(self.mistake, Mistake::LocalKey | Mistake::NoReceive)
    }

    /// What is behind the message may have run: its answer is what has no place, and others had
    /// left by then.
    pub const fn fails_late(&self, opcode: SendOpcode) -> bool {
        matches!(self.mistake, Mistake::LocalKey) && opcode.awaits_data()
    }
}

/// Puts a mistake into one of four schedules.
pub(crate) fn draw(plan: &mut Plan, rng: &mut Rng) {
    if !rng.one_in(4) {
        return;
    }
    let (qp, host) = (rng.below(plan.qps.len() as u64) as usize, rng.below(2) as usize);
    let latency_us = plan.latency_us;
    let work = &mut plan.qps[qp];
    // Where requests must not run twice a QP may have to fail for another reason.
    if work.no_replay || work.msgs[host].is_empty() {
        return;
    }
    let message = rng.below(work.msgs[host].len() as u64) as usize;
    let mistake = choose(work, host, message, rng);
    if mistake == Mistake::NoReceive && plan.crash {
        return; // the sender waits for receives, and would for those of the dead
    }
    let (nic, other) = (work.nic, rng.below(2) as usize);
    let delay_us = match rng.below(3) {
        0 => 0,
        1 => rng.below(4 * latency_us + 20),
        _ => rng.below(3_000),
    };
    let later_us = delay_us + rng.range(1_000, 20_000);
    let amid = match rng.below(8) {
        0 => vec![(delay_us, Fault::Suspect { host: other, qp })],
        1 => [other, 1 - other].map(|host| (delay_us, Fault::Suspect { host, qp })).to_vec(),
        2 | 3 => vec![(delay_us, Fault::Plan { host: other, qp, home: false })],
        4 => vec![
            (delay_us, Fault::Down { host: other, nic }),
            (later_us, Fault::Heal { host: other, nic }),
        ],
        5 => vec![
            (delay_us, Fault::Dead { host: other, nic }),
            (later_us, Fault::Heal { host: other, nic }),
        ],
        _ => Vec::new(),
    };
    let rnr_retry = rng.pick(&[0, 1, 3]);
    plan.own = Some(OwnError { qp, host, message, mistake, rnr_retry, amid });
}

/// What may be wrong with a message, or what the message becomes for it.
fn choose(work: &mut QpPlan, host: usize, message: usize, rng: &mut Rng) -> Mistake {
    use Mistake::{LocalKey, Misaligned, NoReceive, ReceiveKey, RemoteKey, ShortReceive};
    use SendOpcode::{FetchAdd, Read, Send, SendImm, Write, WriteImm};
    let msg = &mut work.msgs[host][message];
    // Its data comes from memory, and there is some.
    let kept = [SendFlags::SIGNALED, SendFlags::FENCE]
        .into_iter()
        .filter(|&flag| msg.flags.contains(flag));
    msg.flags = kept.fold(SendFlags::default(), SendFlags::with);
    msg.len = msg.len.max(1);
    let mistake = match msg.opcode {
        Send | SendImm => rng.pick(&[LocalKey, ShortReceive, ReceiveKey, NoReceive]),
        WriteImm => rng.pick(&[RemoteKey, LocalKey, NoReceive]),
        Write | Read => rng.pick(&[RemoteKey, RemoteKey, LocalKey, Misaligned]),
        _ => RemoteKey,
    };
    if mistake == Misaligned {
        (msg.opcode, msg.len) = (FetchAdd, 8);
    }
    mistake
}
