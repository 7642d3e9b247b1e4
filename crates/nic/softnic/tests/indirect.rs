//! Indirect keys over the wire: what a peer writes and reads by one key lies in many places.

mod common;

use common::*;
use unbroken_types::{Access, SendOpcode, WcStatus};
use unbroken_verbs::IndirectEntry;

#[test]
fn a_peer_writes_and_reads_many_buffers_by_one_key() {
    let mut p = Pair::new();
    let memory = p.b.nics.memory();
    let null = memory.alloc_null_mr(p.b.pd).unwrap();
    // Five pieces of 3,000 bytes, each 10,000 behind the last and the third of them nowhere.
    let piece = |at: usize| IndirectEntry { lkey: p.b.mr.lkey, addr: p.b.addr(at), len: 3000 };
    let mut entries: Vec<IndirectEntry> = (0..5).map(|i| piece(i * 10_000)).collect();
    entries[2].lkey = null;
    let key = memory.create_indirect(p.b.pd, 0, &entries, Access(15)).unwrap();
    let moved = piece(90_000);
    let data = pattern(15_000, 4);
    p.a.fill(0, &data);
    p.qa.post_send(&rdma(1, SendOpcode::Write, &[p.a.sge(0, 15_000)], 0, key.rkey)).unwrap();
    assert_ok(&p.a.poll(1)[0], 1);
    for i in [0, 1, 3, 4] {
        assert_eq!(p.b.bytes(i * 10_000, 3000), data[i * 3000..][..3000], "piece {i}");
    }
    assert_eq!(p.b.bytes(20_000, 3000), vec![0; 3000]);

    p.qa.post_send(&rdma(2, SendOpcode::Read, &[p.a.sge(100_000, 15_000)], 0, key.rkey)).unwrap();
    assert_ok(&p.a.poll(1)[0], 2);
    let got = p.a.bytes(100_000, 15_000);
    assert_eq!(got[..6000], data[..6000]);
    assert_eq!(got[6000..9000], vec![0; 3000]);
    assert_eq!(got[9000..], data[9000..]);

    // A receive and a send by the same key, and a piece that is replaced in between.
    memory.update_entry(key.rkey, 2, &moved).unwrap();
    let all = unbroken_types::Sge { addr: 0, length: 15_000, lkey: key.lkey };
    p.qb.post_recv(&recv(3, &[all])).unwrap();
    p.qa.post_send(&send(4, &[p.a.sge(0, 15_000)])).unwrap();
    assert_ok(&p.b.poll(1)[0], 3);
    assert_ok(&p.a.poll(1)[0], 4);
    assert_eq!(p.b.bytes(90_000, 3000), data[6000..9000]);
    p.qa.post_recv(&recv(5, &[p.a.sge(200_000, 15_000)])).unwrap();
    p.qb.post_send(&send(6, &[all])).unwrap();
    assert_ok(&p.a.poll(1)[0], 5);
    assert_eq!(p.a.bytes(200_000, 15_000), data);
    assert_ok(&p.b.poll(1)[0], 6);

    memory.dereg_mr(key.lkey).unwrap();
    p.qa.post_send(&rdma(7, SendOpcode::Write, &[p.a.sge(0, 8)], 0, key.rkey)).unwrap();
    assert_eq!(p.a.poll(1)[0].status, WcStatus::RemAccessErr as u32);
}
