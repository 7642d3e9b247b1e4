//! Packets that nobody sane sends, to live QPs: no panic, no byte outside what the peer may write.

use crate::common::*;
use proptest::prelude::*;
use unbroken_types::*;
use unbroken_wire::{Opcode, Packet};

/// A mutated packet: which captured one, what to change, what to append.
type Mutation = (usize, Vec<(usize, u8)>, u8, u32, Vec<u8>);

fn mutations() -> impl Strategy<Value = Vec<Mutation>> {
    let one = (
        any::<usize>(),
        proptest::collection::vec((0..60usize, any::<u8>()), 0..4),
        0..0x18u8,
        any::<u32>(),
        proptest::collection::vec(any::<u8>(), 0..1100),
    );
    proptest::collection::vec(one, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn garbage_changes_nothing_outside(seed: u64, mutations in mutations(), keep_psn: bool) {
        let mut pair = Pair::new(seed, Faults::default(), Mtu::B1024, false);
        for end in &pair.ends {
            for key in [SRC, WRITABLE, READABLE, DST] {
                let access = end.mem.regions.borrow()[&key].access;
                end.mem.add(key, access, vec![0x11; 4096]);
            }
        }
        let sges = [sge(SRC, 0, 3000)];
        pair.tracing = true;
        for end in 0..2 {
            pair.recv(end, 1, &[sge(DST, 0, 3000)]);
            pair.recv(end, 2, &[sge(DST, 3000, 100)]);
            pair.post(end, &wr(1, SendOpcode::Send, &sges));
            let remote = |wr| SendWr { remote_addr: va(WRITABLE, 8), rkey: WRITABLE, ..wr };
            pair.post(end, &remote(wr(2, SendOpcode::Write, &sges)));
            let sges = [sge(DST, 3200, 800)];
            pair.post(end, &SendWr { remote_addr: va(READABLE, 0), rkey: READABLE, ..wr(3, SendOpcode::Read, &sges) });
        }
        for _ in 0..pair.rng.below(12) {
            pair.step();
        }
        let outside = |p: &Pair| [0, 1].map(|e| {
            let mem = &p.ends[e].mem;
            (mem.bytes(SRC), mem.bytes(READABLE), mem.bytes(DST)[4000..].to_vec())
        });
        let before = outside(&pair);
        for (which, changes, op, psn, tail) in mutations {
            let Some((to, mut bytes)) = pair.trace.get(which % pair.trace.len().max(1)).cloned() else { break };
            if which % 3 == 0 {
                bytes[0] = op;
                bytes.truncate(40);
                bytes.extend(&tail);
            }
            for (at, value) in changes {
                if let Some(b) = bytes.get_mut(at) {
                    *b = value;
                }
            }
            if !keep_psn {
                let base = u32::from_be_bytes([0, bytes[9], bytes[10], bytes[11]]);
                bytes[9..12].copy_from_slice(&(base.wrapping_add(psn % 7)).to_be_bytes()[1..]);
            }
            if Opcode::from_code(bytes[0]).is_none() {
                continue;
            }
            let End { qp, mem, wcs, .. } = &mut pair.ends[to];
            if let Ok(packet) = Packet::parse(&bytes) {
                qp.handle_packet(pair.now_us, &packet, mem, wcs);
            }
            if which % 5 == 0 {
                pair.step();
            }
        }
        for _ in 0..2000 {
            if !pair.step() {
                break;
            }
        }
        prop_assert!(before == outside(&pair));
        for end in &mut pair.ends {
            let _ = end.qp.take_event();
            end.qp.fail(WcStatus::FatalErr, &mut end.wcs);
            prop_assert_eq!((end.wcs.sends.len(), end.wcs.recvs.len()), (3, 2), "each WR completes \
                                                                                 once");
            prop_assert!(end.wcs.sends.iter().map(|w| w.wr_id).eq(1..=3));
        }
    }
}
