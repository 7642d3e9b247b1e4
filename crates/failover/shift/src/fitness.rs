//! Which NICs cannot carry a QP: theirs are smaller than what the program has asked for and was
//! given on its own NIC.
//!
//! A QP does not go there, and does not follow its peer there (`Liveness::NoNic`). What can be less
//! without the program's noticing is made less instead: the READs and atomics that are under way at
//! once ([`clamp`]).

use std::sync::atomic::{AtomicU64, Ordering};
use unbroken_types::RcModify;
use unbroken_verbs::{DeviceAttr, QpInit};

/// The NICs that a QP cannot go to, by their index.
#[derive(Debug, Default)]
pub(crate) struct Unfit(AtomicU64);

impl Unfit {
    /// Whether the QP can go to NIC `nic`, as far as is known. NICs past 63 always.
    pub(crate) fn allows(&self, nic: usize) -> bool {
        nic >= 64 || self.0.load(Ordering::Relaxed) & 1 << nic == 0
    }

    /// It cannot. Gives whether that is news.
    pub(crate) fn add(&self, nic: usize) -> bool {
        nic < 64 && self.0.fetch_or(1 << nic, Ordering::Relaxed) & 1 << nic == 0
    }

    /// Whether there is one.
    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}

/// What a device lacks for a QP of these sizes; none: it can carry one.
pub(crate) fn lacks(attr: &DeviceAttr, init: &QpInit) -> Option<String> {
    let caps = &init.caps;
    let recvs = if init.srq.is_some() { 0 } else { caps.max_recv_wr };
    let shared = init.srq.as_ref().map_or(0, |srq| srq.query().max_sge);
    let wants = [
        ("max_send_wr", caps.max_send_wr, attr.max_qp_wr),
        ("max_recv_wr", recvs, attr.max_qp_wr),
        ("entries in a CQ", caps.max_send_wr.max(recvs), attr.max_cqe),
        ("max_send_sge", caps.max_send_sge, attr.max_sge),
        ("max_recv_sge", caps.max_recv_sge, attr.max_sge),
        ("max_sge of an SRQ", shared, attr.max_srq_sge),
    ];
    wants
        .into_iter()
        .find(|(_, wanted, most)| wanted > most)
        .map(|(what, wanted, most)| format!("{what} is {wanted}, and {most} the most there"))
}

/// The same for how it is connected: a peer that is told of more READs and atomics at once than the
/// device takes would be refused some.
pub(crate) fn lacks_depth(attr: &DeviceAttr, app: &RcModify) -> Option<String> {
    let (wanted, most) = (app.max_dest_rd_atomic?, attr.max_qp_rd_atom);
    let too_many = u32::from(wanted) > most;
    too_many.then(|| format!("max_dest_rd_atomic is {wanted}, and {most} the most there"))
}

/// A QP on that device has no more READs and atomics under way than the device can.
pub(crate) fn clamp(attr: &DeviceAttr, app: RcModify) -> RcModify {
    let most = u8::try_from(attr.max_qp_rd_atom).unwrap_or(u8::MAX);
    RcModify { max_rd_atomic: app.max_rd_atomic.map(|n| n.min(most)), ..app }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use unbroken_types::{PdHandle, QpCaps, QpType};
    use unbroken_verbs::Cq;

    fn init(caps: QpCaps) -> QpInit {
        let cq: Arc<Cq> = Cq::new(1, None);
        QpInit {
            qp_type: QpType::Rc,
            caps,
            pd: PdHandle(1),
            send_cq: cq.clone(),
            recv_cq: cq,
            srq: None,
            sq_sig_all: true,
            suspend_on_error: true,
            wc_qpn: None,
            home: None,
            local_keys_of: None,
            control: false,
            standby: false,
            lane: None,
            management: false,
        }
    }

    #[test]
    fn what_a_device_lacks_is_named() {
        let caps = QpCaps {
            max_send_wr: 128,
            max_recv_wr: 16,
            max_send_sge: 4,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let folder = tempfile::tempdir().unwrap();
        let attr = crate::soft::over(crate::tests::emulated(folder.path())).unwrap().attr(0);
        let with = |max_qp_wr, max_sge| DeviceAttr { max_qp_wr, max_sge, ..attr.clone() };
        assert_eq!(lacks(&with(128, 4), &init(caps)), None);
        let less = lacks(&with(127, 4), &init(caps)).unwrap();
        assert_eq!(less, "max_send_wr is 128, and 127 the most there");
        assert!(lacks(&with(128, 3), &init(caps)).unwrap().starts_with("max_send_sge is 4"));
        let app = RcModify {
            max_rd_atomic: Some(16),
            max_dest_rd_atomic: Some(16),
            ..RcModify::default()
        };
        let depth = |max_qp_rd_atom| DeviceAttr { max_qp_rd_atom, ..attr.clone() };
        assert!(lacks_depth(&depth(16), &app).is_none() && lacks_depth(&depth(4), &app).is_some());
        assert_eq!(clamp(&depth(4), app).max_rd_atomic, Some(4));
        assert_eq!(clamp(&depth(300), app).max_rd_atomic, Some(16));
    }

    #[test]
    fn a_nic_is_added_once() {
        let unfit = Unfit::default();
        assert!(unfit.allows(3) && !unfit.any());
        assert!(unfit.add(3) && !unfit.add(3) && unfit.any());
        assert!(!unfit.allows(3) && unfit.allows(2) && unfit.allows(64) && !unfit.add(64));
    }
}
