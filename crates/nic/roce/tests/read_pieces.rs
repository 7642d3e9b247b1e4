//! READs of which answers are lost, from a peer that answers repeats as the kernel's rxe does.

use crate::common::rc::*;
use crate::common::*;
use unbroken_types::*;
use unbroken_wire::{Ext, HeaderBuf, Op, Packet};

/// What rxe keeps of a request: its PSNs, and where it was last asked to begin.
struct Kept {
    first: u32,
    packets: u32,
    from: u32,
}

/// rxe drops a repeat that begins before the last one within the same request, and answers one from
/// the middle with packets of the middle.
#[derive(Default)]
struct Rxe {
    kept: Vec<Kept>,
}

impl Rxe {
    fn of(&mut self, psn: u32) -> Option<&mut Kept> {
        self.kept.iter_mut().find(|k| psn.wrapping_sub(k.first) & PSN_MASK < k.packets)
    }

    fn request(&mut self, bytes: Vec<u8>) -> Option<Vec<u8>> {
        let packet = Packet::parse(&bytes).unwrap();
        let (Ext::Reth(reth), psn) = (packet.ext, packet.bth.psn) else { return Some(bytes) };
        match self.of(psn) {
            Some(kept) => {
                let from = psn.wrapping_sub(kept.first) & PSN_MASK;
                if from < kept.from {
                    return None;
                }
                kept.from = from;
            }
            None => {
                let packets = reth.len.div_ceil(1024);
                self.kept.push(Kept { first: psn, packets, from: 0 });
            }
        }
        Some(bytes)
    }

    fn answer(&mut self, bytes: Vec<u8>) -> Option<Vec<u8>> {
        let packet = Packet::parse(&bytes).unwrap();
        let (mut bth, mut ext) = (packet.bth, packet.ext);
        if bth.opcode.op == Op::Acknowledge && !packet.payload.is_empty() {
            bth.pad = 0;
            return Some(HeaderBuf::new(&bth, &ext).as_slice().to_vec());
        }
        if self.of(bth.psn).is_none_or(|k| k.first == bth.psn) {
            return Some(bytes);
        }
        match bth.opcode.op {
            Op::ReadResponseFirst => (bth.opcode.op, ext) = (Op::ReadResponseMiddle, Ext::None),
            Op::ReadResponseOnly => bth.opcode.op = Op::ReadResponseLast,
            _ => return Some(bytes),
        }
        let mut changed = HeaderBuf::new(&bth, &ext).as_slice().to_vec();
        changed.extend(packet.payload);
        Some(changed)
    }
}

#[test]
fn a_peer_that_takes_no_repeats_out_of_order_is_asked_in_order() {
    for seed in 1..60 {
        let mut p = pair(false);
        p.rng = Rng(seed);
        p.set_selective([true; 2]);
        p.faults.loss = 60;
        let mut rxe = Rxe::default();
        p.between = Some(Box::new(move |to, bytes| match to {
            1 => rxe.request(bytes),
            _ => rxe.answer(bytes),
        }));
        for i in 0..40 {
            if i % 8 == 0 {
                p.run();
            }
            p.post(0, &read(i, 8192));
        }
        p.run();
        let statuses = p.statuses(0);
        let good = statuses.iter().filter(|s| s.1 == WcStatus::Success as u32).count();
        assert_eq!(good, 40, "seed {seed}: {statuses:?}");
        assert!(p.ends[0].mem.bytes(DST) == p.ends[1].mem.bytes(READABLE), "seed {seed}");
    }
}
