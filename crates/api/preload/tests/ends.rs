//! A QP goes to ERR and to RESET wherever a switch or a failure has left it.

mod common;

use common::*;
use std::mem::zeroed;
use unbroken_fabric::{Fabric, Fault, Runtime};
use unbroken_verbs::abi::*;

const RESET: i32 = 0;
const ERR: i32 = 6;
const FLUSHED: u32 = 5;

unsafe fn to(qp: *mut ibv_qp, state: i32) -> i32 {
    // SAFETY: a QP of ours, and an attribute that lives.
    unsafe {
        let mut a: ibv_qp_attr = zeroed();
        a.qp_state = state;
        ibv_modify_qp(qp, &mut a, IBV_QP_STATE)
    }
}

#[test]
fn err_and_reset_end_what_a_failure_has_left() {
    let _turn = turn();
    a_qp_whose_peer_has_gone_is_reset_and_used_again();
    // In the end, since it takes some time until healed NICs are open again.
    what_waits_for_a_path_is_flushed_in_err();
}

fn what_waits_for_a_path_is_flushed_in_err() {
    let fabric = Fabric::open(&Runtime::at(folder()).unwrap()).unwrap();
    // SAFETY: C functions, used as their manual pages say.
    unsafe {
        let p = Pair::new();
        p.write(1, 64, 4096, (*p.mr).rkey);
        assert_eq!(p.poll().status, 0);
        p.post_recv(50, 0, 64);
        for rail in 0..4 {
            fabric.set(&format!("nic a/{rail} dead").parse::<Fault>().unwrap(), None).unwrap();
        }
        // No path is left; the QP waits for one.
        p.write(2, 64, 4096, (*p.mr).rkey);
        p.write(3, 64, 4096, (*p.mr).rkey);
        assert_eq!(to(p.qps[0], ERR), 0);
        for wr_id in [2, 3] {
            let wc = p.poll();
            assert_eq!((wc.wr_id, wc.status, wc.qp_num), (wr_id, FLUSHED, (*p.qps[0]).qp_num));
        }
        p.write(4, 64, 4096, (*p.mr).rkey);
        let wc = p.poll();
        assert_eq!((wc.wr_id, wc.status), (4, FLUSHED));
        assert_eq!(to(p.qps[0], ERR), 0, "it is there already");
        assert_eq!(to(p.qps[1], ERR), 0);
        let wc = p.poll();
        assert_eq!((wc.wr_id, wc.status), (50, FLUSHED));
        p.close();
        fabric.clear(None).unwrap();
    }
}

fn a_qp_whose_peer_has_gone_is_reset_and_used_again() {
    // Some look for another path before they hear that the peer has gone, and a QP that has moved
    // cannot be reset.
    assert!((0..30).any(|_| reset_once()), "30 QPs have moved");
}

/// False: it has moved.
fn reset_once() -> bool {
    // SAFETY: see above.
    unsafe {
        let mut p = Pair::new();
        p.write(1, 64, 4096, (*p.mr).rkey);
        assert_eq!(p.poll().status, 0);
        assert_eq!(ibv_destroy_qp(p.qps[1]), 0);
        p.write(2, 64, 4096, (*p.mr).rkey);
        let wc = p.poll();
        assert_eq!(wc.wr_id, 2);
        assert_ne!(wc.status, 0, "nobody is there");
        p.write(3, 64, 4096, (*p.mr).rkey);
        // Its completion waits to be polled, and is forgotten.
        let reset = to(p.qps[0], RESET);
        p.qps[1] = ibv_create_qp(p.pd, &mut init_attr(p.cq));
        assert!(!p.qps[1].is_null());
        if reset == 0 {
            connect(p.context, p.qps);
            p.write(4, 64, 4096, (*p.mr).rkey);
            let wc = p.poll();
            assert_eq!((wc.wr_id, wc.status), (4, 0));
        } else {
            assert_eq!(reset, libc::EOPNOTSUPP);
        }
        p.close();
        reset == 0
    }
}
