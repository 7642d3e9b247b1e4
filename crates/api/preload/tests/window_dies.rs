//! A QP that uses memory windows stays on its NIC: when that dies, the program gets an error, and
//! other QPs go on.

mod common;

use common::*;
use unbroken_fabric::{Fabric, Fault, Runtime};

#[test]
fn a_qp_with_a_window_is_not_moved() {
    let _turn = turn();
    let fabric = Fabric::open(&Runtime::at(folder()).unwrap()).unwrap();
    // SAFETY: C functions, used as their manual pages say.
    unsafe {
        let (p, plain) = (Pair::new(), Pair::new());
        // The directory finds their peers in its own time; before that a dead NIC takes no post.
        wait_until_protected(4);
        plain.write(1, 64, 4096, (*plain.mr).rkey);
        assert_eq!(plain.poll().status, 0);
        let mr = ibv_reg_mr(p.pd, p.memory.as_ptr().cast_mut().cast(), 8192, 1 | 1 << 4);
        let two = (*p.context).ops.alloc_mw.unwrap()(p.pd, 2);
        let rkey = p.bind(two, mr, 4096, 64);
        p.write(1, 64, 4096, rkey);
        assert_eq!(p.poll().status, 0);
        fabric.set(&"nic a/0 dead".parse::<Fault>().unwrap(), None).unwrap();
        plain.write(2, 64, 4096, (*plain.mr).rkey);
        assert_eq!(plain.poll().status, 0, "a QP without windows goes on");
        p.write(2, 64, 4096, rkey);
        let wc = p.poll();
        assert_eq!(wc.wr_id, 2);
        // Posted when the QP had failed already, or as it failed.
        assert!(
            [5, 12, 19].contains(&wc.status),
            "flushed or the original error, not {}",
            wc.status
        );
    }
}
