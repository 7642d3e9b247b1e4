//! Work requests and attributes as libibverbs has them.

use std::ffi::c_int;
use std::mem::{zeroed, MaybeUninit};
use std::ptr::null_mut;
use unbroken_types::{QpState, QpType, SendFlags, SendOpcode, Sge};
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, QpModify, RecvWr, Result, SendWr};

/// Writes a send under that number, the last of its list, but for its address handle. `inline` is
/// where the entry of inline data stays while the request is used.
#[inline(always)]
pub(crate) fn fill_send(
    c: &mut MaybeUninit<ibv_send_wr>,
    wr_id: u64,
    wr: &SendWr<'_>,
    inline: &mut Sge,
) -> Result<()> {
    check_opcode(wr.opcode)?;
    fill_any(c, wr_id, wr, inline);
    Ok(())
}

/// [`fill_send`] of a request of any kind. The caller writes what changes a key: a window to bind, or
/// the key to invalidate.
#[inline(always)]
pub(crate) fn fill_any(
    c: &mut MaybeUninit<ibv_send_wr>,
    wr_id: u64,
    wr: &SendWr<'_>,
    inline: &mut Sge,
) {
    // SAFETY: integers and null pointers; of the unions any member may be zero.
    let c = c.write(unsafe { zeroed() });
    c.wr_id = wr_id;
    c.opcode = wr.opcode as c_int;
    c.send_flags = wr.flags.0 & !SendFlags::NO_REPLAY.0;
    c.imm_data = wr.imm_data;
    match wr.inline_data {
        Some(data) => {
            *inline = Sge { addr: data.as_ptr() as u64, length: data.len() as u32, lkey: 0 };
            (c.sg_list, c.num_sge) = (inline, 1);
        }
        None => {
            (c.sg_list, c.num_sge) = (wr.sges.as_ptr().cast_mut(), wr.sges.len() as c_int);
        }
    }
    if wr.opcode.is_atomic() {
        c.wr.atomic = ibv_wr_atomic {
            remote_addr: wr.remote_addr,
            compare_add: wr.compare_add,
            swap: wr.swap,
            rkey: wr.rkey,
        };
    } else {
        // Nothing of a SEND is read there.
        c.wr.rdma = ibv_wr_rdma { remote_addr: wr.remote_addr, rkey: wr.rkey };
    }
}

/// Whether the device may have such a send.
#[inline(always)]
pub(crate) fn check_opcode(opcode: SendOpcode) -> Result<()> {
    match opcode {
        SendOpcode::SendInv | SendOpcode::LocalInv | SendOpcode::BindMw => {
            Err(changes_keys(opcode))
        }
        _ => Ok(()),
    }
}

#[cold]
fn changes_keys(opcode: SendOpcode) -> Error {
    Error::unsupported(format!("{opcode:?} changes keys, which cannot be protected on this device"))
}

/// A receive, alone in its list.
pub(crate) fn recv_wr(wr: &RecvWr<'_>) -> ibv_recv_wr {
    ibv_recv_wr {
        wr_id: wr.wr_id,
        next: null_mut(),
        sg_list: wr.sges.as_ptr().cast_mut(),
        num_sge: wr.sges.len() as c_int,
    }
}

/// Sets a field and its bit of the mask.
macro_rules! set {
    ($attr:ident, $mask:ident, $value:expr, $field:ident, $bit:ident) => {
        if let Some(value) = $value {
            $attr.$field = value as _;
            $mask |= $bit;
        }
    };
}

/// A change with its mask. What a transition needs and verbs here leave out has the value that
/// programs give: a QP begins at port 1 and the first P_Key.
pub(crate) fn modify(kind: QpType, change: &QpModify) -> (ibv_qp_attr, c_int) {
    // SAFETY: plain integers.
    let mut attr: ibv_qp_attr = unsafe { zeroed() };
    let mut mask = 0;
    let rc = &change.rc;
    set!(attr, mask, rc.state, qp_state, IBV_QP_STATE);
    if matches!(rc.state, Some(QpState::Reset | QpState::Err)) {
        return (attr, mask);
    }
    let notify = change.sqd_notify.filter(|_| rc.state == Some(QpState::Sqd));
    set!(attr, mask, notify, en_sqd_async_notify, IBV_QP_EN_SQD_ASYNC_NOTIFY);
    let to_init = rc.state == Some(QpState::Init);
    let pkey_index = change.path.map(|path| path.pkey_index);
    set!(attr, mask, change.port.or(to_init.then_some(1)), port_num, IBV_QP_PORT);
    set!(attr, mask, pkey_index.or(to_init.then_some(0)), pkey_index, IBV_QP_PKEY_INDEX);
    set!(attr, mask, rc.sq_psn, sq_psn, IBV_QP_SQ_PSN);
    if kind == QpType::Ud {
        set!(attr, mask, change.qkey, qkey, IBV_QP_QKEY);
        return (attr, mask);
    }
    set!(attr, mask, rc.access.map(|access| access.0), qp_access_flags, IBV_QP_ACCESS_FLAGS);
    set!(attr, mask, rc.dest_qpn, dest_qp_num, IBV_QP_DEST_QPN);
    set!(attr, mask, rc.rq_psn, rq_psn, IBV_QP_RQ_PSN);
    set!(attr, mask, rc.mtu, path_mtu, IBV_QP_PATH_MTU);
    if let Some(path) = &change.path {
        attr.ah_attr = path.into();
        mask |= IBV_QP_AV;
    }
    if kind == QpType::Uc {
        return (attr, mask);
    }
    set!(attr, mask, rc.timeout, timeout, IBV_QP_TIMEOUT);
    set!(attr, mask, rc.retry_cnt, retry_cnt, IBV_QP_RETRY_CNT);
    set!(attr, mask, rc.rnr_retry, rnr_retry, IBV_QP_RNR_RETRY);
    set!(attr, mask, rc.min_rnr_timer, min_rnr_timer, IBV_QP_MIN_RNR_TIMER);
    set!(attr, mask, rc.max_rd_atomic, max_rd_atomic, IBV_QP_MAX_QP_RD_ATOMIC);
    set!(attr, mask, rc.max_dest_rd_atomic, max_dest_rd_atomic, IBV_QP_MAX_DEST_RD_ATOMIC);
    if let (Some(path), Some(timeout)) = (&change.alternate, rc.alternate) {
        attr.alt_ah_attr = path.into();
        (attr.alt_pkey_index, attr.alt_port_num) = (path.pkey_index, path.port);
        attr.alt_timeout = timeout;
        mask |= IBV_QP_ALT_PATH;
    }
    set!(attr, mask, rc.migration, path_mig_state, IBV_QP_PATH_MIG_STATE);
    (attr, mask)
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_types::{Access, Gid, Mtu, PathAttr};
    use unbroken_verbs::RcModify;

    fn mask_to(kind: QpType, rc: RcModify, path: Option<PathAttr>, qkey: Option<u32>) -> c_int {
        modify(kind, &QpModify { rc, path, qkey, ..QpModify::default() }).1
    }

    /// The attributes that the specification requires for each transition.
    #[test]
    fn transitions_have_what_they_need() {
        let to = |state| RcModify { state: Some(state), ..RcModify::default() };
        let init = RcModify { access: Some(Access::REMOTE), ..to(QpState::Init) };
        let needed = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
        assert_eq!(mask_to(QpType::Rc, init, None, None), needed | IBV_QP_ACCESS_FLAGS);
        assert_eq!(mask_to(QpType::Ud, to(QpState::Init), None, Some(1)), needed | IBV_QP_QKEY);
        let rtr = RcModify {
            dest_qpn: Some(5),
            rq_psn: Some(6),
            mtu: Some(Mtu::B1024),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            ..to(QpState::Rtr)
        };
        let path = PathAttr { port: 2, ..PathAttr::new(Gid([7; 16])) };
        let wanted = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        assert_eq!(
            mask_to(QpType::Rc, rtr, Some(path), None),
            wanted | IBV_QP_PKEY_INDEX,
            "which may be given again"
        );
        let rts = RcModify {
            sq_psn: Some(1),
            timeout: Some(14),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            max_rd_atomic: Some(1),
            ..to(QpState::Rts)
        };
        let wanted = IBV_QP_STATE
            | IBV_QP_SQ_PSN
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_MAX_QP_RD_ATOMIC;
        assert_eq!(mask_to(QpType::Rc, rts, None, None), wanted);
        assert_eq!(mask_to(QpType::Ud, rts, None, None), IBV_QP_STATE | IBV_QP_SQ_PSN);
        assert_eq!(mask_to(QpType::Rc, to(QpState::Err), None, Some(1)), IBV_QP_STATE);
        let notify = |state| {
            let (rc, sqd_notify) = (to(state), Some(true));
            modify(QpType::Rc, &QpModify { rc, sqd_notify, ..QpModify::default() })
        };
        let (attr, mask) = notify(QpState::Sqd);
        assert_eq!(mask, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY);
        assert_eq!(attr.en_sqd_async_notify, 1, "the program waits for the event");
        assert_eq!(notify(QpState::Rts).1, IBV_QP_STATE);
    }

    #[test]
    fn sends_name_what_their_opcode_needs() {
        let mut room = Sge::default();
        let data = [1u8, 2, 3];
        let wr = SendWr {
            wr_id: 9,
            opcode: SendOpcode::WriteImm,
            flags: SendFlags::INLINE,
            imm_data: 4,
            remote_addr: 0x1000,
            rkey: 6,
            inline_data: Some(&data),
            ..SendWr::default()
        };
        let mut c = MaybeUninit::uninit();
        fill_send(&mut c, 10, &wr, &mut room).unwrap();
        // SAFETY: just written.
        let c = unsafe { c.assume_init() };
        // SAFETY: the member that a WRITE has.
        let rdma = unsafe { c.wr.rdma };
        assert_eq!((c.wr_id, c.opcode, c.imm_data, c.num_sge), (10, 1, 4, 1));
        assert_eq!((rdma.remote_addr, rdma.rkey), (0x1000, 6));
        assert_eq!((room.addr, room.length), (data.as_ptr() as u64, 3));
        let bind = SendWr { opcode: SendOpcode::BindMw, ..SendWr::default() };
        let refused =
            fill_send(&mut MaybeUninit::uninit(), 9, &bind, &mut room).err().map(|e| e.errno());
        assert_eq!(refused, Some(libc::EOPNOTSUPP));
    }
}
