//! Attributes of a connected QP (RC and UC) and the transitions of its state.
//!
//! ```text
//!   RESET ──► INIT ──► RTR ──► RTS ◄──► SQD         any ──► RESET, any ──► ERR
//!              ⟲                ⟲        ⟲
//! ```
//!
//! A UC QP has SQE, too, and leaves it for RTS. Each transition needs some attributes and allows
//! some others, as `ibv_modify_qp` has it; anything else is refused and changes nothing. The
//! address, the port and the P_Key belong to the shell, those of the alternate path, too: see
//! [`crate::Via`].

use thiserror::Error;
use unbroken_types::{
    Access, Mtu, PathMigState, PdHandle, QpCaps, QpState, QpType, MAX_QPN, PSN_MASK,
};

/// READs and atomics that a QP may have outstanding in either direction, at most.
pub const MAX_RD_ATOMIC: u8 = 128;

/// How an RC QP is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RcConfig {
    /// The QPN.
    pub qpn: u32,
    /// The QPN that WCs carry.
    pub wc_qpn: u32,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Protection domain.
    pub pd: PdHandle,
    /// On a failure of the network, stop and keep the work requests instead of flushing them.
    pub hold_on_failure: bool,
    /// Every send makes a WC.
    pub sq_sig_all: bool,
    /// Largest congestion window in packets.
    pub cwnd_max_packets: u32,
}

/// A change of an RC or UC QP; `None` leaves an attribute as it is. PSNs are taken modulo 2^24.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RcModify {
    /// The new state.
    pub state: Option<QpState>,
    /// The peer's QPN.
    pub dest_qpn: Option<u32>,
    /// First PSN of the peer's requests.
    pub rq_psn: Option<u32>,
    /// First PSN of our requests.
    pub sq_psn: Option<u32>,
    /// Path MTU.
    pub mtu: Option<Mtu>,
    /// Local ACK timeout: 4.096 µs · 2^n, 0 for ever.
    pub timeout: Option<u8>,
    /// Retries after a timeout or sequence error, 0 to 7.
    pub retry_cnt: Option<u8>,
    /// Retries after RNR NAKs, 7 for ever.
    pub rnr_retry: Option<u8>,
    /// The code of the timer in our RNR NAKs.
    pub min_rnr_timer: Option<u8>,
    /// READs and atomics that we may have outstanding.
    pub max_rd_atomic: Option<u8>,
    /// READs and atomics that the peer may have outstanding.
    pub max_dest_rd_atomic: Option<u8>,
    /// What the peer may do.
    pub access: Option<Access>,
    /// RC: there is an alternate path, with this local ACK timeout.
    pub alternate: Option<u8>,
    /// RC: how far path migration is to be: REARM loads the alternate path, MIGRATED goes there.
    pub migration: Option<PathMigState>,
}

/// Why a QP was not changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ModifyError {
    /// There is no such transition.
    #[error("a QP in state {from:?} cannot go to {to:?}")]
    Transition {
        /// The present state.
        from: QpState,
        /// The state asked for.
        to: QpState,
    },
    /// The transition needs an attribute that was not given.
    #[error("{from:?} to {to:?} needs {name}")]
    Missing {
        /// The attribute.
        name: &'static str,
        /// The present state.
        from: QpState,
        /// The state asked for.
        to: QpState,
    },
    /// The transition does not allow an attribute that was given.
    #[error("{from:?} to {to:?} does not take {name}")]
    NotAllowed {
        /// The attribute.
        name: &'static str,
        /// The present state.
        from: QpState,
        /// The state asked for.
        to: QpState,
    },
    /// An attribute is out of range.
    #[error("{name} is {value}, at most {max} is possible")]
    Value {
        /// The attribute.
        name: &'static str,
        /// What was given.
        value: u32,
        /// What is possible.
        max: u32,
    },
    /// Path migration is not where that could follow.
    #[error("path_mig_state {from:?}: {why}")]
    Migration {
        /// Where it is.
        from: PathMigState,
        /// What is wrong, and what would be right.
        why: &'static str,
    },
}

/// What a transition does with an attribute.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    Needs,
    Takes,
}

/// The attributes in the order of [`RcModify::given`].
const NAMES: [&str; 13] = [
    "dest_qp_num",
    "rq_psn",
    "sq_psn",
    "path_mtu",
    "timeout",
    "retry_cnt",
    "rnr_retry",
    "min_rnr_timer",
    "max_rd_atomic",
    "max_dest_rd_atomic",
    "qp_access_flags",
    "alt_ah_attr",
    "path_mig_state",
];

/// The rule of each attribute in a transition; `None` where there is no such transition.
fn rules(kind: QpType, from: QpState, to: QpState) -> Option<[Option<Rule>; 13]> {
    use QpState::*;
    if kind == QpType::Uc {
        // What belongs to acknowledgements and READs is not there.
        let mut rules = match (from, to) {
            (Sqe, Rts) => rules(QpType::Rc, Rts, Rts),
            _ => rules(QpType::Rc, from, to),
        }?;
        if !matches!(to, Reset | Err) {
            rules[4..10].fill(None);
            rules[11..].fill(None);
        }
        return Some(rules);
    }
    let (n, t) = (Some(Rule::Needs), Some(Rule::Takes));
    let o = None;
    Some(match (from, to) {
        (_, Reset) | (_, Err) => [t; 13],
        (Reset, Init) => [o, o, o, o, o, o, o, o, o, o, n, o, o],
        (Init, Init) => [o, o, o, o, o, o, o, o, o, o, t, o, o],
        (Init, Rtr) => [n, n, o, n, o, o, o, n, o, n, t, t, t],
        (Rtr, Rts) => [o, o, n, o, n, n, n, t, n, o, t, t, t],
        (Rts, Rts) | (Sqd, Rts) => [o, o, o, o, o, o, o, t, o, o, t, t, t],
        (Rts, Sqd) => [o; 13],
        (Sqd, Sqd) => [o, o, o, o, t, t, t, t, t, o, t, t, t],
        _ => return None,
    })
}

impl RcModify {
    fn given(&self) -> [bool; 13] {
        [
            self.dest_qpn.is_some(),
            self.rq_psn.is_some(),
            self.sq_psn.is_some(),
            self.mtu.is_some(),
            self.timeout.is_some(),
            self.retry_cnt.is_some(),
            self.rnr_retry.is_some(),
            self.min_rnr_timer.is_some(),
            self.max_rd_atomic.is_some(),
            self.max_dest_rd_atomic.is_some(),
            self.access.is_some(),
            self.alternate.is_some(),
            self.migration.is_some(),
        ]
    }

    /// Checks the change of a QP of that kind in state `from` and gives the state after it.
    pub fn validate(&self, kind: QpType, from: QpState) -> Result<QpState, ModifyError> {
        let to = self.state.unwrap_or(from);
        let rules = rules(kind, from, to).ok_or(ModifyError::Transition { from, to })?;
        for ((rule, given), name) in rules.into_iter().zip(self.given()).zip(NAMES) {
            match (rule, given) {
                (Some(Rule::Needs), false) => return Err(ModifyError::Missing { name, from, to }),
                (None, true) => return Err(ModifyError::NotAllowed { name, from, to }),
                _ => {}
            }
        }
        let ranges = [
            (NAMES[0], self.dest_qpn, MAX_QPN),
            (NAMES[4], self.timeout.map(u32::from), 31),
            (NAMES[5], self.retry_cnt.map(u32::from), 7),
            (NAMES[6], self.rnr_retry.map(u32::from), 7),
            (NAMES[7], self.min_rnr_timer.map(u32::from), 31),
            (NAMES[8], self.max_rd_atomic.map(u32::from), MAX_RD_ATOMIC as u32),
            ("alt_timeout", self.alternate.map(u32::from), 31),
            (NAMES[9], self.max_dest_rd_atomic.map(u32::from), MAX_RD_ATOMIC as u32),
        ];
        for (name, value, max) in ranges {
            if let Some(value) = value.filter(|&v| v > max) {
                return Err(ModifyError::Value { name, value, max });
            }
        }
        Ok(to)
    }

    /// Takes over what `change` gives, but for what is of migration.
    pub(crate) fn merge(&mut self, change: &RcModify) {
        fn set<T: Copy>(field: &mut Option<T>, new: Option<T>) {
            if new.is_some() {
                *field = new;
            }
        }
        set(&mut self.dest_qpn, change.dest_qpn);
        set(&mut self.rq_psn, change.rq_psn.map(|p| p & PSN_MASK));
        set(&mut self.sq_psn, change.sq_psn.map(|p| p & PSN_MASK));
        set(&mut self.mtu, change.mtu);
        set(&mut self.timeout, change.timeout);
        set(&mut self.retry_cnt, change.retry_cnt);
        set(&mut self.rnr_retry, change.rnr_retry);
        set(&mut self.min_rnr_timer, change.min_rnr_timer);
        set(&mut self.max_rd_atomic, change.max_rd_atomic);
        set(&mut self.max_dest_rd_atomic, change.max_dest_rd_atomic);
        set(&mut self.access, change.access);
    }
}
