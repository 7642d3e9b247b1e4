//! A pair without faults, its work requests, and raw packets for it.

use super::*;
use unbroken_wire::{Bth, Ext, HeaderBuf, Op as WireOp, Opcode};

/// A pair with 8 KiB in every region, on a network without faults.
pub fn pair(hold: bool) -> Pair {
    let pair = Pair::new(1, Faults::default(), Mtu::B1024, hold);
    for end in &pair.ends {
        for key in [SRC, WRITABLE, READABLE, DST] {
            let access = end.mem.regions.borrow()[&key].access;
            end.mem.add(key, access, (0..8192u32).map(|i| (i / 256 + i + key) as u8).collect());
        }
    }
    pair
}

pub fn write(wr_id: u64, len: usize) -> SendWr<'static> {
    let sges = Box::leak(Box::new([sge(SRC, 0, len)]));
    SendWr { remote_addr: va(WRITABLE, 0), rkey: WRITABLE, ..wr(wr_id, SendOpcode::Write, sges) }
}

pub fn read(wr_id: u64, len: usize) -> SendWr<'static> {
    let sges = Box::leak(Box::new([sge(DST, 0, len)]));
    SendWr { remote_addr: va(READABLE, 0), rkey: READABLE, ..wr(wr_id, SendOpcode::Read, sges) }
}

pub fn send(wr_id: u64, len: usize) -> SendWr<'static> {
    wr(wr_id, SendOpcode::Send, Box::leak(Box::new([sge(SRC, 0, len)])))
}

/// Makes a raw request packet for end 1 of the pair as end 0 would send it.
pub fn request(pair: &Pair, op: WireOp, psn_offset: u32, ext: Ext, payload: &[u8]) -> Vec<u8> {
    let psn = (pair.ends[0].qp.attrs().sq_psn.unwrap() + psn_offset) & PSN_MASK;
    let bth = Bth {
        opcode: Opcode::rc(op),
        solicited: false,
        mig_req: false,
        pad: unbroken_wire::pad_of(payload.len()),
        pkey: 0xffff,
        dest_qpn: 11,
        ack_req: true,
        psn,
    };
    let mut bytes = HeaderBuf::new(&bth, &ext).as_slice().to_vec();
    bytes.extend(payload);
    bytes.resize(bytes.len() + bth.pad as usize, 0);
    bytes
}

/// Hands a packet to end 1 and gives the syndromes of what it answers.
pub fn inject(pair: &mut Pair, bytes: &[u8]) -> Vec<u8> {
    let End { qp, mem, wcs, .. } = &mut pair.ends[1];
    qp.handle_packet(pair.now_us, &Packet::parse(bytes).unwrap(), mem, wcs);
    let mut sink = VecSink { mem, room: 100, packets: vec![] };
    qp.poll_transmit(pair.now_us, &mut sink, wcs);
    sink.packets
        .iter()
        .filter_map(|(_, p)| Packet::parse(p).unwrap().ext.aeth())
        .map(|a| a.syndrome)
        .collect()
}
