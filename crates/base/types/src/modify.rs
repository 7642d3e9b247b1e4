//! Changes of a QP: its attributes and the transitions of its state.
//!
//! ```text
//!   RESET ──► INIT ──► RTR ──► RTS ◄──► SQD         any ──► RESET, any ──► ERR
//!              ⟲                ⟲        ⟲
//! ```
//!
//! A UC QP has SQE, too, and leaves it for RTS. Each transition needs some attributes and allows
//! some others, as `ibv_modify_qp` has it; anything else is refused and changes nothing. The
//! address, the port and the P_Key belong to the device, and so do those of the alternate path.

use crate::{Access, Mtu, PathMigState, QpState, QpType, MAX_QPN, PSN_MASK};
use thiserror::Error;

/// READs and atomics that a QP may have outstanding in either direction, at most.
pub const MAX_RD_ATOMIC: u8 = 128;

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
    pub fn merge(&mut self, change: &RcModify) {
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

/// A change of a UD QP; `None` leaves an attribute as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UdModify {
    /// The new state.
    pub state: Option<QpState>,
    /// The key that datagrams must carry (needed for INIT).
    pub qkey: Option<u32>,
    /// First PSN of our packets (needed for RTS).
    pub sq_psn: Option<u32>,
}

impl UdModify {
    /// Whether a QP in state `from` can be changed so; gives its next state.
    pub fn validate(&self, from: QpState) -> Result<QpState, ModifyError> {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
        let to = self.state.unwrap_or(from);
        match (from, to) {
            (_, Reset | Err) | (Init, Init | Rtr) | (Rts | Sqd | Sqe, Rts) | (Rts | Sqd, Sqd) => {}
            (Reset, Init) if self.qkey.is_none() => {
                return Result::Err(ModifyError::Missing { name: "qkey", from, to })
            }
            (Rtr, Rts) if self.sq_psn.is_none() => {
                return Result::Err(ModifyError::Missing { name: "sq_psn", from, to })
            }
            (Reset, Init) | (Rtr, Rts) => {}
            _ => return Result::Err(ModifyError::Transition { from, to }),
        }
        if self.sq_psn.is_some() && (from, to) != (Rtr, Rts) {
            return Result::Err(ModifyError::NotAllowed { name: "sq_psn", from, to });
        }
        Ok(to)
    }
}
