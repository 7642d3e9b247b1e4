//! WRs that bind memory windows and invalidate keys, at this end or the peer's.

use crate::common::*;
use unbroken_roce::*;
use unbroken_types::*;

const OK: u32 = WcStatus::Success as u32;
const BIND_ERR: u32 = WcStatus::MwBindErr as u32;
const FLUSHED: u32 = WcStatus::WrFlushErr as u32;
/// What the peer may invalidate.
const WINDOW: u32 = 0x700;

fn pair(hold: bool) -> Pair {
    let pair = Pair::new(3, Faults::default(), Mtu::B256, hold);
    for end in &pair.ends {
        end.mem.add(SRC, Access::NONE, vec![5; 4096]);
        end.mem.add(DST, Access::LOCAL_WRITE, vec![0; 4096]);
        end.mem.add(READABLE, Access::REMOTE_READ, vec![9; 4096]);
        end.mem.add(WRITABLE, Access::REMOTE_WRITE.with(Access::LOCAL_WRITE), vec![0; 4096]);
        end.mem.add(WINDOW, Access::REMOTE_WRITE, vec![0; 64]);
    }
    pair
}

fn bind(lkey: u32) -> MwBind {
    MwBind {
        window: 0x901,
        new_key: 0x902,
        lkey,
        addr: 0x1_2345_6789,
        length: 1 << 33,
        access: Access(0x2e),
    }
}

fn invalidate(wr_id: u64, opcode: SendOpcode, key: u32, sges: &[Sge]) -> SendWr<'_> {
    SendWr { rkey: key, ..wr(wr_id, opcode, sges) }
}

#[test]
fn keys_change_in_the_order_of_the_queue_and_complete_in_it() {
    let mut p = pair(false);
    let data = [sge(SRC, 0, 1000)];
    p.post(
        0,
        &SendWr { remote_addr: va(WRITABLE, 0), rkey: WRITABLE, ..wr(1, SendOpcode::Write, &data) },
    );
    p.post(0, &bind(SRC).wr(2, SendFlags::SIGNALED));
    p.post(0, &invalidate(3, SendOpcode::LocalInv, WINDOW, &[]));
    p.post(
        0,
        &SendWr { remote_addr: va(WRITABLE, 0), rkey: WRITABLE, ..wr(4, SendOpcode::Write, &data) },
    );
    p.run();
    assert_eq!(p.statuses(0), [(1, OK), (2, OK), (3, OK), (4, OK)]);
    let opcodes: Vec<u32> = p.ends[0].wcs.sends.iter().map(|w| w.opcode).collect();
    assert_eq!(
        opcodes,
        [WcOpcode::RdmaWrite, WcOpcode::BindMw, WcOpcode::LocalInv, WcOpcode::RdmaWrite]
            .map(|o| o as u32)
    );
    assert_eq!(
        *p.ends[0].mem.changes.borrow(),
        [KeyChange::Bind(bind(SRC)), KeyChange::Invalidate(WINDOW)]
    );
    // Nothing of them went on the wire, and the peer has executed two messages.
    assert_eq!((p.ends[1].qp.progress().executed, p.ends[0].qp.progress().completed), (2, 2));
}

#[test]
fn a_fence_holds_a_change_back_until_the_reads_before_it_are_done() {
    let mut p = pair(false);
    let to = [sge(DST, 0, 2000)];
    p.post(
        0,
        &SendWr { remote_addr: va(READABLE, 0), rkey: READABLE, ..wr(1, SendOpcode::Read, &to) },
    );
    let fenced = SendFlags::SIGNALED.with(SendFlags::FENCE);
    p.post(0, &SendWr { flags: fenced, ..invalidate(2, SendOpcode::LocalInv, WINDOW, &[]) });
    while p.ends[0].mem.changes.borrow().is_empty() && p.step() {}
    assert_eq!(*p.ends[0].mem.changes.borrow(), [KeyChange::Invalidate(WINDOW)]);
    assert_eq!(p.ends[0].mem.bytes(DST)[..2000], [9; 2000]);
    p.run();
    assert_eq!(p.statuses(0), [(1, OK), (2, OK)]);
}

/// Nothing else comes that would have the QP look at its queue again.
#[test]
fn a_fence_does_not_wait_for_changes_of_keys() {
    let mut p = pair(false);
    let data = [sge(SRC, 0, 100)];
    let fenced = SendFlags::SIGNALED.with(SendFlags::FENCE);
    p.post(0, &invalidate(1, SendOpcode::LocalInv, WINDOW, &[]));
    p.post(0, &SendWr { flags: fenced, ..bind(SRC).wr(2, SendFlags::SIGNALED) });
    p.post(
        0,
        &SendWr {
            flags: fenced,
            remote_addr: va(WRITABLE, 0),
            rkey: WRITABLE,
            ..wr(3, SendOpcode::Write, &data)
        },
    );
    p.run();
    assert_eq!(p.statuses(0), [(1, OK), (2, OK), (3, OK)]);
}

#[test]
fn a_change_that_cannot_be_made_fails_in_its_turn() {
    for (change, what) in [
        (bind(0x111).wr(2, SendFlags::SIGNALED), "bind"),
        (invalidate(2, SendOpcode::LocalInv, 0x111, &[]), "inv"),
    ] {
        let mut p = pair(false);
        let data = [sge(SRC, 0, 1000)];
        let write = SendWr {
            remote_addr: va(WRITABLE, 0),
            rkey: WRITABLE,
            ..wr(1, SendOpcode::Write, &data)
        };
        p.post(0, &write);
        p.post(0, &change);
        p.post(0, &SendWr { wr_id: 3, ..write });
        p.run();
        assert_eq!(p.statuses(0), [(1, OK), (2, BIND_ERR), (3, FLUSHED)], "{what}");
        assert_eq!(p.ends[0].qp.state(), QpState::Err);
    }
}

#[test]
fn a_send_invalidates_the_peers_key_before_its_receive_completes() {
    for len in [0, 100, 700] {
        let mut p = pair(false);
        let (data, room) = ([sge(SRC, 0, len)], [sge(DST, 0, 1000)]);
        p.ends[1].qp.post_recv(&RecvWr { wr_id: 8, sges: &room }, &mut p.ends[1].wcs).unwrap();
        p.post(0, &invalidate(1, SendOpcode::SendInv, WINDOW, &data));
        p.run();
        assert_eq!(p.statuses(0), [(1, OK)]);
        let wc = p.ends[1].wcs.recvs[0].0;
        assert_eq!(
            (wc.wr_id, wc.status, wc.byte_len, wc.opcode),
            (8, OK, len as u32, WcOpcode::Recv as u32)
        );
        assert_eq!((wc.wc_flags, wc.imm_data), (WcFlags::WITH_INV, WINDOW));
        assert_eq!(*p.ends[1].mem.changes.borrow(), [KeyChange::Invalidate(WINDOW)]);
    }
}

#[test]
fn a_key_that_the_peer_may_not_invalidate_ends_the_connection() {
    let mut p = pair(false);
    let (data, room) = ([sge(SRC, 0, 700)], [sge(DST, 0, 1000)]);
    p.ends[1].qp.post_recv(&RecvWr { wr_id: 8, sges: &room }, &mut p.ends[1].wcs).unwrap();
    p.post(0, &invalidate(1, SendOpcode::SendInv, 0x111, &data));
    p.run();
    assert_eq!(p.statuses(0), [(1, WcStatus::RemAccessErr as u32)]);
    assert_eq!(p.ends[1].wcs.recvs[0].0.status, WcStatus::RemInvReqErr as u32);
    assert_eq!(p.ends[1].qp.take_event(), Some(RcEvent::AccessError));
}

#[test]
fn over_a_bad_network_a_key_is_invalidated_once() {
    for seed in 0..20 {
        let mut p = pair(false);
        p.rng = Rng(seed);
        p.faults = Faults { loss: 200, duplicate: 200, reorder: 200 };
        let (data, room) = ([sge(SRC, 0, 700)], [sge(DST, 0, 1000)]);
        for i in 0..8 {
            for end in &p.ends {
                end.mem.add(0x800 + i, Access::REMOTE_WRITE, vec![0; 8]);
            }
            p.ends[1].qp.post_recv(&RecvWr { wr_id: 8, sges: &room }, &mut p.ends[1].wcs).unwrap();
            p.post(0, &invalidate(i.into(), SendOpcode::SendInv, 0x800 + i, &data));
            p.post(0, &invalidate(i.into(), SendOpcode::LocalInv, 0x800 + i, &[]));
        }
        p.run();
        assert!(p.statuses(0).iter().all(|(_, status)| *status == OK), "seed {seed}");
        let keys: Vec<_> = (0..8).map(|i| KeyChange::Invalidate(0x800 + i)).collect();
        assert_eq!(*p.ends[0].mem.changes.borrow(), keys, "seed {seed}");
        assert_eq!(*p.ends[1].mem.changes.borrow(), keys, "seed {seed}");
    }
}

/// Once keys have changed, at either end, the QP is not to be moved: not in this life nor in one
/// that has taken its work.
#[test]
fn a_qp_that_changed_keys_stays_where_it_is() {
    let mut p = pair(true);
    assert!(
        !p.ends[0].qp.clone().quiesce().unsafe_to_replay(PeerDone::Messages(0))
            && !p.ends[1].qp.clone().quiesce().unsafe_to_replay(PeerDone::Messages(0))
    );
    let room = [sge(DST, 0, 1000)];
    p.ends[1].qp.post_recv(&RecvWr { wr_id: 8, sges: &room }, &mut p.ends[1].wcs).unwrap();
    p.post(0, &invalidate(1, SendOpcode::SendInv, WINDOW, &[]));
    p.run();
    for i in 0..2 {
        assert!(p.ends[i].qp.changed_keys(), "end {i}");
        let backlog = p.ends[i].qp.quiesce();
        assert!(backlog.unsafe_to_replay(PeerDone::Messages(1)), "end {i}");
        let mut next = RcQp::new(config(77, true));
        next.adopt(&backlog).unwrap();
        assert!(next.quiesce().unsafe_to_replay(PeerDone::Messages(1)), "end {i}");
    }
}
