//! PSNs that go past 2^24 in the middle of flights that lose, reorder and repeat packets, in both
//! directions.

use crate::common::script::Script;
use crate::common::*;
use unbroken_types::*;
use unbroken_wire::{Ext, Op as WireOp, Packet};

/// PSNs closer than this to the end of their space are before the wrap, all others behind it.
const NEAR: u32 = 4096;
const BEFORE: u32 = PSN_MASK - NEAR;
const SEQUENCE_NAK: u8 = 0x60;

/// What happened right at the wrap.
#[derive(Default, Debug)]
struct Seen {
    /// Lives of a requester whose PSNs wrapped.
    wraps: u64,
    /// NAKs for a PSN before the wrap that name packets behind it in their map.
    maps: u64,
    /// READ requests whose answers lie on both sides.
    reads: u64,
    /// Atomics sent more than once, of the last PSNs before the wrap and the first behind it.
    atomics: u64,
}

impl Seen {
    fn look_at(&mut self, trace: &[(usize, Vec<u8>)], mtu: Mtu) {
        let mut atomics = std::collections::BTreeMap::new();
        for (to, bytes) in trace {
            let packet = Packet::parse(bytes).unwrap();
            let (op, psn) = (packet.bth.opcode.op, packet.bth.psn);
            match packet.ext {
                Ext::Aeth(aeth)
                    if op == WireOp::Acknowledge
                        && aeth.syndrome == SEQUENCE_NAK
                        && psn > BEFORE =>
                {
                    let kept = |i: u32| {
                        packet.payload.get(i as usize / 8).is_some_and(|b| b >> (i % 8) & 1 != 0)
                    };
                    let behind = (0..256).filter(|&i| kept(i)).any(|i| psn + 1 + i > PSN_MASK);
                    self.maps += u64::from(behind);
                }
                Ext::Reth(reth) if op == WireOp::ReadRequest => {
                    self.reads +=
                        u64::from(psn + reth.len.div_ceil(mtu.bytes() as u32) > PSN_MASK + 1);
                }
                Ext::Atomic(_) if !(64..=PSN_MASK - 64).contains(&psn) => {
                    *atomics.entry((*to, psn)).or_insert(0u64) += 1
                }
                _ => {}
            }
        }
        self.atomics += atomics.values().filter(|&&n| n > 1).count() as u64;
        for to in 0..2 {
            let psns = || {
                trace.iter().filter(|(t, _)| *t == to).map(|(_, b)| Packet::parse(b).unwrap().bth)
            };
            let requests = || psns().filter(|b| !b.opcode.op.is_response()).map(|b| b.psn);
            self.wraps += u64::from(requests().any(|p| p > BEFORE) && requests().any(|p| p < NEAR));
        }
    }
}

#[test]
fn psns_wrap_in_the_middle_of_repairs() {
    let mut seen = Seen::default();
    for seed in 0..400 {
        let mut rng = Rng(seed);
        let mtu = [Mtu::B256, Mtu::B256, Mtu::B1024][seed as usize % 3];
        let faults =
            Faults { loss: 10 + rng.below(90), duplicate: rng.below(80), reorder: rng.below(150) };
        let psns = [0, 1].map(|_| PSN_MASK - rng.below(200) as u32);
        // Short atomics and READs, and messages of some dozens of packets, close together.
        let mut kinds = [0, 1].map(|_| vec![(0u8, 0usize, 0u32); 40]);
        for kind in kinds.iter_mut().flatten() {
            let len = [200, 2_000, 9_000][rng.below(3) as usize];
            *kind = (rng.next() as u8, rng.below(len) as usize, rng.next() as u32);
        }
        let mut pair = Pair::with_psns(rng, faults, mtu, false, psns);
        pair.set_selective(if seed % 4 == 3 { [false; 2] } else { [true; 2] });
        pair.tracing = true;
        let mut script = Script::new(&mut pair, [&kinds[0], &kinds[1]], 7);
        let mut steps = 0;
        while !script.done(&pair) {
            script.post(&mut pair);
            pair.step();
            steps += 1;
            assert!(steps < 300_000, "seed {seed}: {:?}", pair.ends.map(|e| e.qp.progress()));
        }
        script.check(&pair);
        seen.look_at(&pair.trace, mtu);
    }
    let enough = seen.wraps > 500 && seen.maps > 300 && seen.reads > 80 && seen.atomics > 500;
    assert!(enough, "too little happened at the wrap: {seen:?}");
}
