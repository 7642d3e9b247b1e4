//! RC between two hosts: the right bytes, whoever drives.

mod common;

use common::*;
use unbroken_types::{Access, PdHandle, SendFlags, SendOpcode, WcFlags, WcOpcode, WcStatus};
use unbroken_verbs::{CompChannel, Device};

#[test]
fn send_and_receive() {
    let mut p = Pair::new();
    for (i, len) in [0usize, 1, 7, 256, 257, 4096, 4097, 65_536, 1 << 20].into_iter().enumerate() {
        let data = pattern(len, i as u64);
        p.a.fill(3, &data);
        p.qb.post_recv(&recv(7, &[p.b.sge(5, len.max(1))])).unwrap();
        p.qa.post_send(&send(1, &[p.a.sge(3, len)])).unwrap();
        let wc = p.b.poll(1)[0];
        assert_ok(&wc, 7);
        assert_eq!((wc.byte_len as usize, wc.qp_num), (len, p.qb.qpn()));
        assert_eq!(p.b.bytes(5, len), data);
        assert_ok(&p.a.poll(1)[0], 1);
    }
}

#[test]
fn write_read_and_immediate() {
    let mut p = Pair::new();
    let data = pattern(300_000, 9);
    p.a.fill(0, &data);
    let (raddr, rkey) = (p.b.addr(1000), p.b.mr.rkey);
    p.qa.post_send(&rdma(1, SendOpcode::Write, &[p.a.sge(0, 300_000)], raddr, rkey)).unwrap();
    assert_ok(&p.a.poll(1)[0], 1);
    assert_eq!(p.b.bytes(1000, 300_000), data);

    p.qa.post_send(&rdma(2, SendOpcode::Read, &[p.a.sge(1 << 20, 300_000)], raddr, rkey)).unwrap();
    let wc = p.a.poll(1)[0];
    assert_ok(&wc, 2);
    assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::RdmaRead as u32, 300_000));
    assert_eq!(p.a.bytes(1 << 20, 300_000), data);

    p.qb.post_recv(&recv(8, &[])).unwrap();
    let sges = [p.a.sge(0, 10)];
    let mut wr = rdma(3, SendOpcode::WriteImm, &sges, raddr, rkey);
    wr.imm_data = 0x1234_5678;
    p.qa.post_send(&wr).unwrap();
    let wc = p.b.poll(1)[0];
    assert_ok(&wc, 8);
    assert_eq!(
        (wc.opcode, wc.imm_data, wc.byte_len),
        (WcOpcode::RecvRdmaWithImm as u32, 0x1234_5678, 10)
    );
    assert_ne!(wc.wc_flags & WcFlags::WITH_IMM, 0);
}

#[test]
fn inline_and_scattered() {
    let mut p = Pair::new();
    let data = pattern(10_000, 3);
    p.a.fill(0, &data);
    let pieces = [p.a.sge(0, 1), p.a.sge(1, 4999), p.a.sge(5000, 0), p.a.sge(5000, 5000)];
    p.qb.post_recv(&recv(1, &[p.b.sge(0, 4097), p.b.sge(20_000, 10_000)])).unwrap();
    p.qa.post_send(&send(2, &pieces)).unwrap();
    assert_ok(&p.b.poll(1)[0], 1);
    assert_eq!([p.b.bytes(0, 4097), p.b.bytes(20_000, 10_000 - 4097)].concat(), data);

    p.qb.post_recv(&recv(3, &[p.b.sge(0, 100)])).unwrap();
    let mut wr = send(4, &[]);
    wr.flags = SendFlags::INLINE;
    wr.inline_data = Some(b"inline bytes are copied when posted");
    p.qa.post_send(&wr).unwrap();
    assert_ok(&p.b.poll(1)[0], 3);
    assert_eq!(p.b.bytes(0, 35), b"inline bytes are copied when posted");
}

/// Nobody polls: the background threads of both NICs do everything.
#[test]
fn event_driven() {
    let world = World::new();
    let channel = || Some(CompChannel::new().unwrap());
    let a = Host::with_channel(world.nics("a"), 1, 1 << 20, channel());
    let b = Host::with_channel(world.nics("b"), 1, 1 << 20, channel());
    let (qa, qb) = (a.qp(|_| {}), b.qp(|_| {}));
    connect(&*qa, &*qb, &b.nic).unwrap();
    connect(&*qb, &*qa, &a.nic).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            for i in 0..200 {
                qb.post_recv(&recv(i, &[b.sge(0, 100_000)])).unwrap();
                // The sender waits for this, so a receive is posted before each send.
                qb.post_send(&send(1000 + i, &[])).unwrap();
                let wcs = b.wait(2);
                assert_eq!(
                    wcs.iter().filter(|wc| wc.wr_id == i && wc.status == 0).count(),
                    1,
                    "{wcs:?}"
                );
            }
        });
        for i in 0..200 {
            qa.post_recv(&recv(i, &[])).unwrap();
            assert_ok(&a.wait(1)[0], i);
            qa.post_send(&send(1000 + i, &[a.sge(0, 100 * i as usize)])).unwrap();
            assert_ok(&a.wait(1)[0], 1000 + i);
        }
    });
}

/// The target of one-sided operations never calls a verb.
#[test]
fn passive_target() {
    let p = Pair::new();
    let (raddr, rkey) = (p.b.addr(0), p.b.mr.rkey);
    for i in 0..100u64 {
        p.qa.post_send(&rdma(i, SendOpcode::Write, &[p.a.sge(0, 40_000)], raddr, rkey)).unwrap();
    }
    for (i, wc) in p.a.poll(100).iter().enumerate() {
        assert_ok(wc, i as u64);
    }
}

#[test]
fn wrong_keys_and_ranges() {
    type Target = fn(&Pair) -> (u64, u32);
    let cases: [(&str, Target); 4] = [
        ("unknown key", |p| (p.b.addr(0), 0xdead_0000)),
        ("stale generation", |p| (p.b.addr(0), p.b.mr.rkey ^ 1)),
        ("before the region", |p| (p.b.addr(0) - 1, p.b.mr.rkey)),
        ("behind the region", |p| (p.b.addr(4 << 20) - 99, p.b.mr.rkey)),
    ];
    for (what, target) in cases {
        for opcode in [SendOpcode::Write, SendOpcode::Read] {
            let mut p = Pair::new();
            p.a.fill(0, &[0xff; 100]);
            let (raddr, rkey) = target(&p);
            p.qa.post_send(&rdma(1, opcode, &[p.a.sge(0, 100)], raddr, rkey)).unwrap();
            let wc = p.a.poll(1)[0];
            assert_eq!(wc.status, WcStatus::RemAccessErr as u32, "{what} {opcode:?}");
            assert!(p.b.bytes(0, 4 << 20).iter().all(|b| *b == 0), "{what}");
        }
    }
}

#[test]
fn rights_and_deregistration() {
    let p = Pair::new();
    let memory = p.b.nics.memory();
    let (addr, data) = (p.b.addr(0), [p.a.sge(0, 64)]);
    let ro = memory.reg_mr(p.b.pd, addr, 4096, addr, Access::REMOTE_READ).unwrap();
    p.qa.post_send(&rdma(1, SendOpcode::Read, &data, addr, ro.rkey)).unwrap();
    assert_ok(&p.a.poll(1)[0], 1);
    // A region that lies elsewhere in the peer's eyes.
    let moved = memory.reg_mr(p.b.pd, addr + 128, 4096, 0x1000, ALL).unwrap();
    p.qa.post_send(&rdma(2, SendOpcode::Read, &data, 0x1000 + 4096 - 64, moved.rkey)).unwrap();
    assert_ok(&p.a.poll(1)[0], 2);
    memory.dereg_mr(moved.lkey).unwrap();
    p.qa.post_send(&rdma(3, SendOpcode::Write, &data, 0x1000, moved.rkey)).unwrap();
    assert_eq!(p.a.poll(1)[0].status, WcStatus::RemAccessErr as u32);

    assert!(memory.dereg_mr(moved.lkey).is_err());
    assert_eq!(memory.dealloc_pd(p.b.pd).unwrap_err().errno(), libc::EBUSY);
    assert_eq!(
        memory.reg_mr(p.b.pd, addr, 64, addr, Access::REMOTE_WRITE).unwrap_err().errno(),
        libc::EINVAL
    );
    assert_eq!(memory.reg_mr(p.b.pd, 0x1000, 64, 0x1000, ALL).unwrap_err().errno(), libc::EFAULT);
    assert_eq!(
        memory.reg_mr(PdHandle(999), addr, 64, addr, ALL).unwrap_err().errno(),
        libc::EINVAL
    );
}

#[test]
fn stale_keys_stay_invalid() {
    let world = World::new();
    let memory = world.nics("a").memory();
    let pd = memory.alloc_pd().unwrap();
    let buf = [0u8; 64];
    let mut seen = std::collections::HashSet::new();
    for _ in 0..5000 {
        let mr = memory.reg_mr(pd, buf.as_ptr() as u64, 64, 0, ALL).unwrap();
        assert!(mr.lkey != 0 && seen.insert(mr.lkey), "key {:#x} came again", mr.lkey);
        memory.dereg_mr(mr.lkey).unwrap();
    }
    memory.dealloc_pd(pd).unwrap();
}

#[test]
fn local_memory_errors() {
    let p = Pair::new();
    let mut sge = p.a.sge(0, 4096);
    sge.lkey ^= 0x100;
    p.qa.post_send(&send(1, &[sge])).unwrap();
    p.qa.post_send(&send(2, &[p.a.sge(0, 1)])).unwrap();
    let wcs = p.a.poll(2);
    assert_eq!((wcs[0].wr_id, wcs[0].status), (1, WcStatus::LocProtErr as u32));
    assert_eq!((wcs[1].wr_id, wcs[1].status), (2, WcStatus::WrFlushErr as u32));
}

#[test]
fn counters_and_identity() {
    let p = Pair::new();
    p.qa.post_send(&rdma(1, SendOpcode::Write, &[p.a.sge(0, 1 << 20)], p.b.addr(0), p.b.mr.rkey))
        .unwrap();
    p.a.poll(1);
    assert!(p.a.nic.counters().tx_bytes > 1 << 20);
    assert!(p.b.nic.counters().rx_bytes > 1 << 20);
    assert_eq!((p.a.nic.name(), p.a.nics.count(), p.a.nics.host()), ("a/0", 4, "a"));
    assert_ne!(p.a.nics.node_guid(0), p.a.nics.node_guid(1));
    assert!(p.a.nic.alive() && p.a.nic.usable());
}
