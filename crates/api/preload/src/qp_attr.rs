//! Which attributes a change of state needs and which it may have, and what they become.
//!
//! The table is the specification's (and the kernel's `ib_modify_qp_is_ok`): a change that lacks an
//! attribute it needs, or carries one that it must not, changes nothing.

use crate::ah::{path, Ports};
use std::ffi::c_int;
use unbroken_types::{Access, Mtu, PathMigState, QpState, QpType, PSN_MASK};
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, QpModify, QpSnapshot, Result};

use QpState::{Err as Error_, Init, Reset, Rtr, Rts, Sqd, Sqe};
use QpType::{Rc, Uc, Ud};

/// Attributes that a connected QP may change together with, or without, most states.
const PATH: c_int = IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;

/// What a transition needs and may have, as masks; none if there is no such transition.
fn attributes(kind: QpType, from: QpState, to: QpState) -> Option<(c_int, c_int)> {
    let init = IBV_QP_PKEY_INDEX
        | IBV_QP_PORT
        | if kind == Ud { IBV_QP_QKEY } else { IBV_QP_ACCESS_FLAGS };
    let in_rts = match kind {
        Ud => IBV_QP_CUR_STATE | IBV_QP_QKEY,
        Uc => IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | PATH,
        Rc => IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | PATH,
    };
    Some(match (from, to) {
        (_, Reset | Error_) => (0, 0),
        (Reset, Init) => (init, 0),
        (Init, Init) => (0, init),
        (Init, Rtr) => {
            let connect = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
            let may = IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | PATH;
            match kind {
                Ud => (0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY),
                Uc => (connect, may),
                Rc => (connect | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER, may),
            }
        }
        (Rtr, Rts) => {
            let reliable =
                IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
            (IBV_QP_SQ_PSN | if kind == Rc { reliable } else { 0 }, in_rts)
        }
        (Rts | Sqd, Rts) => (0, in_rts),
        (Sqe, Rts) if kind != Rc => (0, in_rts),
        (Rts, Sqd) => (0, IBV_QP_EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd) => {
            let any = IBV_QP_AV | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | PATH;
            let reliable = IBV_QP_PORT
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_MAX_QP_RD_ATOMIC
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER;
            match kind {
                Ud => (0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY),
                Uc => (0, any),
                Rc => (0, any | reliable),
            }
        }
        _ => return None,
    })
}

const NAMES: [&str; 26] = [
    "IBV_QP_STATE",
    "IBV_QP_CUR_STATE",
    "IBV_QP_EN_SQD_ASYNC_NOTIFY",
    "IBV_QP_ACCESS_FLAGS",
    "IBV_QP_PKEY_INDEX",
    "IBV_QP_PORT",
    "IBV_QP_QKEY",
    "IBV_QP_AV",
    "IBV_QP_PATH_MTU",
    "IBV_QP_TIMEOUT",
    "IBV_QP_RETRY_CNT",
    "IBV_QP_RNR_RETRY",
    "IBV_QP_RQ_PSN",
    "IBV_QP_MAX_QP_RD_ATOMIC",
    "IBV_QP_ALT_PATH",
    "IBV_QP_MIN_RNR_TIMER",
    "IBV_QP_SQ_PSN",
    "IBV_QP_MAX_DEST_RD_ATOMIC",
    "IBV_QP_PATH_MIG_STATE",
    "IBV_QP_CAP",
    "IBV_QP_DEST_QPN",
    "bit 21",
    "bit 22",
    "bit 23",
    "bit 24",
    "IBV_QP_RATE_LIMIT",
];

/// The attributes of a mask by name.
fn names(mask: c_int) -> String {
    let named = NAMES
        .iter()
        .enumerate()
        .filter(|(i, _)| mask & (1 << i) != 0)
        .map(|(_, n)| (*n).to_string());
    let rest = mask & !((1 << NAMES.len()) - 1);
    named.chain((rest != 0).then(|| format!("{rest:#x}"))).collect::<Vec<_>>().join(", ")
}

fn qp_state(code: c_int) -> Result<QpState> {
    QpState::from_code(code).ok_or_else(|| {
        Error::invalid(format!("qp_state {code}: IBV_QPS_RESET (0) to IBV_QPS_ERR (6) exist"))
    })
}

/// What `ibv_modify_qp` asks for, checked against the QP's present state.
pub fn change(
    kind: QpType,
    now: QpState,
    attr: &ibv_qp_attr,
    mask: c_int,
    ports: &impl Ports,
) -> Result<QpModify> {
    let has = |bit| mask & bit != 0;
    let to = if has(IBV_QP_STATE) { qp_state(attr.qp_state)? } else { now };
    if has(IBV_QP_CUR_STATE) && attr.cur_qp_state != now as c_int {
        return Err(Error::invalid(format!(
            "cur_qp_state is {}, but the QP is in {now:?}",
            attr.cur_qp_state
        )));
    }
    let (needs, may) = attributes(kind, now, to).ok_or_else(|| {
        Error::invalid(format!("a {kind:?} QP in state {now:?} cannot go to {to:?}"))
    })?;
    if needs & !mask != 0 {
        return Err(Error::invalid(format!("{now:?} to {to:?} needs {}", names(needs & !mask))));
    }
    let surplus = mask & !(needs | may | IBV_QP_STATE);
    if surplus != 0 {
        return Err(Error::invalid(format!("{now:?} to {to:?} must not set {}", names(surplus))));
    }
    check_values(kind, attr, mask, ports)?;
    let mut m = QpModify::default();
    m.rc.state = has(IBV_QP_STATE).then_some(to);
    m.rc.dest_qpn = has(IBV_QP_DEST_QPN).then_some(attr.dest_qp_num);
    m.rc.rq_psn = has(IBV_QP_RQ_PSN).then_some(attr.rq_psn & PSN_MASK);
    m.rc.sq_psn = has(IBV_QP_SQ_PSN).then_some(attr.sq_psn & PSN_MASK);
    m.rc.timeout = has(IBV_QP_TIMEOUT).then_some(attr.timeout);
    m.rc.retry_cnt = has(IBV_QP_RETRY_CNT).then_some(attr.retry_cnt);
    m.rc.rnr_retry = has(IBV_QP_RNR_RETRY).then_some(attr.rnr_retry);
    m.rc.min_rnr_timer = has(IBV_QP_MIN_RNR_TIMER).then_some(attr.min_rnr_timer);
    m.rc.max_rd_atomic = has(IBV_QP_MAX_QP_RD_ATOMIC).then_some(attr.max_rd_atomic);
    m.rc.max_dest_rd_atomic = has(IBV_QP_MAX_DEST_RD_ATOMIC).then_some(attr.max_dest_rd_atomic);
    // The other access flags of a QP (advice) change nothing here.
    m.rc.access = has(IBV_QP_ACCESS_FLAGS).then_some(Access(attr.qp_access_flags & 0x1f));
    m.sqd_notify = has(IBV_QP_EN_SQD_ASYNC_NOTIFY).then_some(attr.en_sqd_async_notify != 0);
    m.qkey = has(IBV_QP_QKEY).then_some(attr.qkey);
    m.port = has(IBV_QP_PORT).then_some(attr.port_num);
    if has(IBV_QP_PATH_MTU) {
        let mtu = Mtu::from_code(attr.path_mtu as u32);
        m.rc.mtu = Some(mtu.ok_or_else(|| {
            Error::invalid(format!(
                "path_mtu {}: IBV_MTU_256 (1) to IBV_MTU_4096 (5) exist",
                attr.path_mtu
            ))
        })?);
    }
    if has(IBV_QP_AV) {
        m.path = Some(path(&attr.ah_attr, ports)?);
    }
    if has(IBV_QP_ALT_PATH) {
        m.alternate =
            Some(path(&ibv_ah_attr { port_num: attr.alt_port_num, ..attr.alt_ah_attr }, ports)?);
        m.rc.alternate = Some(attr.alt_timeout);
    }
    if has(IBV_QP_PATH_MIG_STATE) && kind == Rc {
        m.rc.migration = Some(path_mig_state(attr)?);
    }
    Ok(m)
}

fn path_mig_state(attr: &ibv_qp_attr) -> Result<PathMigState> {
    let code = attr.path_mig_state;
    PathMigState::from_code(code as u32).ok_or_else(|| {
        Error::invalid(format!(
            "path_mig_state {code}: IBV_MIG_MIGRATED (0) to IBV_MIG_ARMED (2) exist"
        ))
    })
}

/// Ports, indices and features that do not exist. The ranges of the transport's attributes are the
/// transport's to check.
fn check_values(kind: QpType, attr: &ibv_qp_attr, mask: c_int, ports: &impl Ports) -> Result<()> {
    let has = |bit| mask & bit != 0;
    if kind != Rc
        && (has(IBV_QP_ALT_PATH) || has(IBV_QP_PATH_MIG_STATE) && attr.path_mig_state != 0)
    {
        return Err(Error::unsupported(format!(
            "path migration of a {kind:?} QP: only RC QPs migrate here"
        )));
    }
    if has(IBV_QP_ALT_PATH) {
        ports.link_layer(attr.alt_port_num)?;
        let (port, of_address) = (attr.alt_port_num, attr.alt_ah_attr.port_num);
        // Open MPI's openib leaves the second as `ibv_query_qp` told it while there was none.
        if of_address != port && of_address != 0 {
            return Err(Error::invalid(format!(
                "alt_port_num is {port}, but alt_ah_attr.port_num {of_address}"
            )));
        }
        if attr.alt_pkey_index != 0 {
            return Err(Error::invalid(format!(
                "alt_pkey_index {}: ports have index 0 only",
                attr.alt_pkey_index
            )));
        }
    }
    if has(IBV_QP_PKEY_INDEX) && attr.pkey_index != 0 {
        return Err(Error::invalid(format!(
            "pkey_index {}: this port has index 0 only",
            attr.pkey_index
        )));
    }
    if has(IBV_QP_PORT) {
        ports.link_layer(attr.port_num)?;
    }
    Ok(())
}

/// What `ibv_query_qp` answers. Attributes that were never set are 0.
pub fn snapshot(s: &QpSnapshot, state: QpState) -> ibv_qp_attr {
    // SAFETY: plain integers throughout.
    let mut a: ibv_qp_attr = unsafe { std::mem::zeroed() };
    let rc = &s.attrs.rc;
    a.qp_state = state as c_int;
    a.cur_qp_state = a.qp_state;
    a.path_mtu = rc.mtu.map_or(0, |m| m as c_int);
    a.qkey = s.attrs.qkey.unwrap_or(0);
    a.rq_psn = rc.rq_psn.unwrap_or(0);
    a.sq_psn = rc.sq_psn.unwrap_or(0);
    a.dest_qp_num = rc.dest_qpn.unwrap_or(0);
    a.qp_access_flags = rc.access.unwrap_or_default().0;
    a.cap = caps_to_c(s.caps);
    a.max_rd_atomic = rc.max_rd_atomic.unwrap_or(0);
    a.max_dest_rd_atomic = rc.max_dest_rd_atomic.unwrap_or(0);
    a.min_rnr_timer = rc.min_rnr_timer.unwrap_or(0);
    a.timeout = rc.timeout.unwrap_or(0);
    a.retry_cnt = rc.retry_cnt.unwrap_or(0);
    a.rnr_retry = rc.rnr_retry.unwrap_or(0);
    a.en_sqd_async_notify = s.attrs.sqd_notify.unwrap_or(false).into();
    a.sq_draining = s.sq_draining.into();
    a.port_num = s.attrs.port.unwrap_or(1);
    a.path_mig_state = rc.migration.unwrap_or_default() as c_int;
    if let Some(path) = &s.attrs.path {
        (a.ah_attr, a.pkey_index) = (path.into(), path.pkey_index);
    }
    if let Some(path) = &s.attrs.alternate {
        (a.alt_ah_attr, a.alt_pkey_index) = (path.into(), path.pkey_index);
        a.alt_port_num = path.port;
        a.alt_timeout = rc.alternate.unwrap_or(0);
    }
    a
}

/// Queue sizes as C has them.
pub fn caps_to_c(c: unbroken_types::QpCaps) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: c.max_send_wr,
        max_recv_wr: c.max_recv_wr,
        max_send_sge: c.max_send_sge,
        max_recv_sge: c.max_recv_sge,
        max_inline_data: c.max_inline_data,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ah::tests::OnePort;
    use unbroken_types::{LinkLayer, PathAttr};

    const TO_INIT: c_int = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    const TO_RTR: c_int = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;

    const PORT: OnePort = OnePort(LinkLayer::Ethernet);

    fn attr(state: QpState) -> ibv_qp_attr {
        // SAFETY: plain integers throughout.
        let mut a: ibv_qp_attr = unsafe { std::mem::zeroed() };
        a.qp_state = state as c_int;
        a.port_num = 1;
        a.path_mtu = Mtu::B1024 as c_int;
        a.ah_attr.is_global = 1;
        a.ah_attr.port_num = 1;
        a
    }

    fn refusal(kind: QpType, now: QpState, a: &ibv_qp_attr, mask: c_int) -> String {
        change(kind, now, a, mask, &PORT).unwrap_err().to_string()
    }

    #[test]
    fn alternate_paths_are_of_rc_and_name_one_port() {
        let mask = IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;
        let mut a = attr(Rts);
        (a.alt_port_num, a.alt_ah_attr.port_num, a.alt_ah_attr.is_global) = (1, 1, 1);
        (a.path_mig_state, a.alt_timeout) = (PathMigState::Rearm as c_int, 14);
        let m = change(Rc, Rts, &a, mask, &PORT).unwrap();
        assert_eq!((m.rc.alternate, m.rc.migration), (Some(14), Some(PathMigState::Rearm)));
        assert_eq!(m.alternate.map(|p| p.port), Some(1));
        let once = ibv_qp_attr { alt_ah_attr: ibv_ah_attr { port_num: 0, ..a.alt_ah_attr }, ..a };
        assert_eq!(change(Rc, Rts, &once, mask, &PORT).unwrap().alternate, m.alternate);
        assert_eq!(change(Uc, Rts, &a, mask, &PORT).unwrap_err().errno(), libc::EOPNOTSUPP);
        assert!(refusal(Rc, Init, &a, mask)
            .contains("must not set IBV_QP_ALT_PATH, IBV_QP_PATH_MIG_STATE"));
        a.path_mig_state = 3;
        assert!(refusal(Rc, Rts, &a, mask).contains("path_mig_state 3"));
        a.alt_ah_attr.port_num = 2;
        assert!(refusal(Rc, Rts, &a, mask).contains("alt_ah_attr.port_num 2"));
        a.alt_port_num = 2;
        assert!(refusal(Rc, Rts, &a, mask).contains("port 2"));
    }

    #[test]
    fn paths_are_told_as_they_were_given() {
        let mut a = attr(Rtr);
        a.ah_attr = ibv_ah_attr { sl: 5, static_rate: 3, ..a.ah_attr };
        (a.ah_attr.grh.flow_label, a.ah_attr.grh.hop_limit, a.ah_attr.grh.traffic_class) =
            (0xabcde, 9, 0x68);
        let attrs = change(Rc, Init, &a, TO_RTR, &PORT).unwrap();
        let path = attrs.path.unwrap();
        assert_eq!(
            (path.sl, path.flow_label, path.hop_limit, path.traffic_class),
            (5, 0xabcde, 9, 0x68)
        );
        let told = snapshot(&QpSnapshot { attrs, ..QpSnapshot::default() }, Rtr);
        assert_eq!(PathAttr::from(&told.ah_attr), PathAttr::from(&a.ah_attr));
        assert_eq!((told.pkey_index, told.alt_port_num, told.alt_ah_attr.port_num), (0, 0, 0));
        a.ah_attr.grh.flow_label |= 0xfff << 20;
        assert_eq!(
            change(Rc, Init, &a, TO_RTR, &PORT).unwrap().path,
            Some(path),
            "as devices take it"
        );
        a.ah_attr.sl = 16;
        assert!(refusal(Rc, Init, &a, TO_RTR).contains("sl 16"));
    }

    #[test]
    fn the_usual_way_up_passes() {
        assert!(change(Rc, Reset, &attr(Init), TO_INIT, &PORT).is_ok());
        let m = change(Rc, Init, &attr(Rtr), TO_RTR, &PORT).unwrap();
        assert_eq!(m.rc.mtu, Some(Mtu::B1024));
        assert!(m.path.is_some());
        let to_rts = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        assert!(change(Rc, Rtr, &attr(Rts), to_rts, &PORT).is_ok());
        assert!(change(Ud, Rtr, &attr(Rts), IBV_QP_STATE | IBV_QP_SQ_PSN, &PORT).is_ok());
        for from in [Reset, Init, Rtr, Rts, Sqd, Sqe, Error_] {
            assert!(change(Rc, from, &attr(Error_), IBV_QP_STATE, &PORT).is_ok());
            assert!(change(Rc, from, &attr(Reset), IBV_QP_STATE, &PORT).is_ok());
        }
    }

    #[test]
    fn what_is_missing_or_too_much_is_named() {
        assert!(refusal(Rc, Init, &attr(Rtr), TO_RTR & !IBV_QP_DEST_QPN)
            .ends_with("needs IBV_QP_DEST_QPN"));
        assert!(refusal(Rc, Reset, &attr(Init), TO_INIT | IBV_QP_QKEY)
            .ends_with("must not set IBV_QP_QKEY"));
        assert!(refusal(Rc, Reset, &attr(Rts), IBV_QP_STATE).contains("cannot go to Rts"));
        assert!(refusal(Rc, Reset, &attr(Init), TO_INIT | 1 << 30).contains("0x40000000"));
        assert!(refusal(Rc, Sqe, &attr(Rts), IBV_QP_STATE).contains("cannot"));
    }

    #[test]
    fn values_out_of_range_are_named() {
        let mut a = attr(Rtr);
        a.path_mtu = 9;
        assert!(refusal(Rc, Init, &a, TO_RTR).contains("path_mtu 9"));
        let mut a = attr(Init);
        a.port_num = 2;
        assert!(refusal(Rc, Reset, &a, TO_INIT).contains("port 2"));
        let mut a = attr(Init);
        a.qp_state = 77;
        assert!(refusal(Rc, Reset, &a, TO_INIT).contains("qp_state 77"));
        let mut a = attr(Rtr);
        a.rq_psn = 0xff00_0001;
        assert_eq!(change(Rc, Init, &a, TO_RTR, &PORT).unwrap().rc.rq_psn, Some(1));
    }
}
