//! QPs: create, modify, query, destroy.

use crate::ffi::{code, deref, pointer};
use crate::objects::{
    free, fresh_cookie, lock, Acks, CqObj, InitAttr, PdHold, PdObj, QpObj, SrqObj, QPS,
};
use crate::qp_attr::{caps_to_c, change, snapshot};
use crate::real::pass;
use crate::{builder, races};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::ptr::{addr_of_mut, null_mut};
use std::sync::Mutex;
use unbroken_shift::api::QpRequest;
use unbroken_types::{QpCaps, QpType};
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, Result};

/// What both ways of making a QP have in common; `cap` is written back.
struct Request {
    pd: *mut ibv_pd,
    qp_context: *mut c_void,
    send_cq: *mut ibv_cq,
    recv_cq: *mut ibv_cq,
    srq: *mut ibv_srq,
    cap: *mut ibv_qp_cap,
    qp_type: c_int,
    sq_sig_all: bool,
    /// Operations that the builders must offer; none: no builders.
    send_ops: u64,
}

#[no_mangle]
unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    pass!(ibv_create_qp(pd, attr));
    pointer("ibv_create_qp", || {
        // SAFETY: the caller's structure.
        let a = unsafe { deref(attr, "qp_init_attr") }?;
        let request = Request {
            pd,
            qp_context: a.qp_context,
            send_cq: a.send_cq,
            recv_cq: a.recv_cq,
            srq: a.srq,
            // SAFETY: a field of the caller's structure.
            cap: unsafe { addr_of_mut!((*attr).cap) },
            qp_type: a.qp_type,
            sq_sig_all: a.sq_sig_all != 0,
            send_ops: 0,
        };
        // SAFETY: objects of ours.
        unsafe { create(request) }
    })
}

pub unsafe extern "C" fn create_qp_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    pointer("ibv_create_qp_ex", || {
        // SAFETY: the caller's structure.
        let a = unsafe { deref(attr, "qp_init_attr_ex") }?;
        let known =
            IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        if a.comp_mask & !known != 0 {
            return Err(Error::unsupported(format!(
                "comp_mask {:#x}: pd, create_flags and send_ops_flags are known",
                a.comp_mask
            )));
        }
        if a.comp_mask & IBV_QP_INIT_ATTR_PD == 0 {
            return Err(Error::invalid(
                "comp_mask lacks IBV_QP_INIT_ATTR_PD: every QP needs a protection domain",
            ));
        }
        if a.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && a.create_flags != 0 {
            return Err(Error::unsupported(format!(
                "create_flags {:#x}: none are known",
                a.create_flags
            )));
        }
        let send_ops =
            if a.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0 { a.send_ops_flags } else { 0 };
        let request = Request {
            pd: a.pd,
            qp_context: a.qp_context,
            send_cq: a.send_cq,
            recv_cq: a.recv_cq,
            srq: a.srq,
            // SAFETY: a field of the caller's structure.
            cap: unsafe { addr_of_mut!((*attr).cap) },
            qp_type: a.qp_type,
            sq_sig_all: a.sq_sig_all != 0,
            send_ops,
        };
        // SAFETY: objects of ours.
        unsafe { create(request) }
    })
}

fn qp_type(code: c_int) -> Result<QpType> {
    [QpType::Rc, QpType::Uc, QpType::Ud].into_iter().find(|t| *t as c_int == code).ok_or_else(
        || Error::unsupported(format!("QP type {code}: RC (2), UC (3) and UD (4) exist here")),
    )
}

/// # Safety
/// All pointers of `r` are objects of ours or NULL, `cap` is the caller's structure.
unsafe fn create(r: Request) -> Result<*mut ibv_qp> {
    // SAFETY: promised by the caller.
    let (pd, send_cq, recv_cq) =
        unsafe { (PdObj::of(r.pd)?, CqObj::of(r.send_cq)?, CqObj::of(r.recv_cq)?) };
    // SAFETY: promised by the caller.
    let srq = if r.srq.is_null() { None } else { Some(unsafe { SrqObj::of(r.srq) }?) };
    // QPNs tell the QPs of one device apart, and completions carry them.
    // SAFETY: objects of ours, as looked at above; these fields never change.
    let queues = unsafe {
        [(*r.send_cq).context, (*r.recv_cq).context, srq.map_or(pd.c.context, |_| (*r.srq).context)]
    };
    if queues.iter().any(|context| *context != pd.c.context) {
        return Err(Error::invalid(
            "a CQ or the SRQ belongs to another context than the protection domain",
        ));
    }
    let kind = qp_type(r.qp_type)?;
    builder::check_send_ops(r.send_ops)?;
    // SAFETY: promised by the caller.
    let c = unsafe { r.cap.read() };
    let cookie = fresh_cookie();
    let qp = pd.api.create_qp(&QpRequest {
        qp_type: kind,
        caps: QpCaps {
            max_send_wr: c.max_send_wr,
            max_recv_wr: c.max_recv_wr,
            max_send_sge: c.max_send_sge,
            max_recv_sge: c.max_recv_sge,
            max_inline_data: c.max_inline_data,
        },
        pd: pd.handle(),
        send_cq: send_cq.cq.clone(),
        recv_cq: recv_cq.cq.clone(),
        srq: srq.map(|s| s.srq.clone()),
        sq_sig_all: r.sq_sig_all,
        cookie,
        plain: false,
        management: false,
    })?;
    // SAFETY: promised by the caller.
    unsafe { r.cap.write(caps_to_c(qp.caps())) };
    // SAFETY: an ibv_qp_ex of zeros is valid: integers, null pointers, fresh locks, empty slots.
    let mut ex: ibv_qp_ex = unsafe { zeroed() };
    ex.qp_base.context = pd.c.context;
    ex.qp_base.qp_context = r.qp_context;
    ex.qp_base.pd = r.pd;
    ex.qp_base.send_cq = r.send_cq;
    ex.qp_base.recv_cq = r.recv_cq;
    ex.qp_base.srq = r.srq;
    ex.qp_base.handle = qp.qpn();
    ex.qp_base.qp_num = qp.qpn();
    ex.qp_base.state = qp.state() as c_int;
    ex.qp_base.qp_type = r.qp_type;
    if r.send_ops != 0 {
        builder::install(&mut ex);
        races::wrap_qp(&mut ex);
    }
    let object = Box::into_raw(Box::new(QpObj {
        c: UnsafeCell::new(ex),
        builder: UnsafeCell::default(),
        lane: qp.lane().cloned(),
        process: pd.api.process(),
        qp,
        cookie,
        is_ud: kind == QpType::Ud,
        extended: r.send_ops != 0,
        async_events: Acks::default(),
        init: InitAttr { kind, sq_sig_all: r.sq_sig_all },
        changing: Mutex::default(),
        api: pd.api.clone(),
        _pd: PdHold::new(pd),
    }));
    QPS.get().insert(cookie, object);
    Ok(object.cast())
}

#[no_mangle]
unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    pass!(ibv_qp_to_qp_ex(qp));
    // SAFETY: a QP of ours.
    match unsafe { QpObj::of(qp) } {
        Ok(object) if object.extended => object.c.get(),
        _ => null_mut(),
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    pass!(ibv_modify_qp(qp, attr, mask));
    code("ibv_modify_qp", || {
        // SAFETY: a QP of ours and the caller's structure.
        let (object, attr) = unsafe { (QpObj::of(qp)?, deref(attr, "attr")?) };
        let ports = &*object.api;
        let _changing = lock(&object.changing);
        object.qp.modify(&change(object.init.kind, object.qp.state(), attr, mask, ports)?)?;
        if mask & IBV_QP_STATE != 0 {
            // SAFETY: a field that is ours to write.
            unsafe { (*object.c.get()).qp_base.state = attr.qp_state };
        }
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    pass!(ibv_query_qp(qp, attr, mask, init_attr));
    code("ibv_query_qp", || {
        // SAFETY: a QP of ours.
        let object = unsafe { QpObj::of(qp) }?;
        let _changing = lock(&object.changing);
        let seen = object.qp.query();
        // One look: another thread may change the QP meanwhile.
        let state = seen.attrs.rc.state.unwrap_or_else(|| object.qp.state());
        let now = snapshot(&seen, state);
        // SAFETY: the C part is ours; the caller's two structures.
        unsafe {
            let c = &raw mut (*object.c.get()).qp_base;
            (*c).state = now.qp_state;
            if !init_attr.is_null() {
                init_attr.write(ibv_qp_init_attr {
                    qp_context: (*c).qp_context,
                    send_cq: (*c).send_cq,
                    recv_cq: (*c).recv_cq,
                    srq: (*c).srq,
                    cap: now.cap,
                    qp_type: (*c).qp_type,
                    sq_sig_all: object.init.sq_sig_all.into(),
                });
            }
            attr.write(now);
        }
        Ok(())
    })
}

/// Whether data becomes visible in order within a message. Not promised: a replayed message writes
/// its bytes again.
#[no_mangle]
unsafe extern "C" fn ibv_query_qp_data_in_order(qp: *mut ibv_qp, op: c_int, flags: u32) -> c_int {
    pass!(ibv_query_qp_data_in_order(qp, op, flags));
    0
}

#[no_mangle]
unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    pass!(ibv_destroy_qp(qp));
    code("ibv_destroy_qp", || {
        // SAFETY: a QP of ours that the program gives up.
        let object = unsafe { QpObj::of(qp) }?;
        object.qp.destroy()?;
        QPS.get().remove(object.cookie);
        object.async_events.wait();
        // SAFETY: made by Box in `create`.
        unsafe { free(object) };
        Ok(())
    })
}
