//! Random packets of every kind, one a line: kind, source, destination, ports, IP id, UDP payload
//! with ICRC in hex.
//!
//! `emit_random SEED COUNT`; tests/e2e/test_wire.py compares the ICRCs with scapy's and shows the
//! packets to tshark.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use unbroken_wire::*;

/// splitmix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn u32(&mut self) -> u32 {
        self.next() as u32
    }
}

/// The headers that go with an opcode, filled at random.
fn ext(opcode: Opcode, rng: &mut Rng) -> Ext {
    let reth = Reth { va: rng.next(), rkey: rng.u32(), len: rng.u32() };
    // ACKs, RNR NAKs and NAKs with codes that exist.
    let syndrome = [0x1f, 0x20 | rng.u32() as u8 & 0x1f, 0x60 | (rng.u32() as u8 % 5)]
        [rng.next() as usize % 3];
    let aeth = Aeth { syndrome, msn: rng.u32() >> 8 };
    let deth = Deth { qkey: rng.u32(), src_qpn: rng.u32() >> 8, grh: false, moved: false };
    let imm = rng.u32();
    match (opcode.transport, opcode.op) {
        (Transport::Ud, Op::SendOnlyImm) => Ext::DethImm(deth, imm),
        (Transport::Ud, _) => Ext::Deth(deth),
        (_, Op::SendLastImm | Op::SendOnlyImm | Op::WriteLastImm) => Ext::Imm(imm),
        (_, Op::WriteOnlyImm) => Ext::RethImm(reth, imm),
        (_, Op::WriteFirst | Op::WriteOnly | Op::ReadRequest) => Ext::Reth(reth),
        (
            _,
            Op::Acknowledge | Op::ReadResponseFirst | Op::ReadResponseLast | Op::ReadResponseOnly,
        ) => Ext::Aeth(aeth),
        (_, Op::AtomicAcknowledge) => Ext::AtomicAck(aeth, rng.next()),
        (_, Op::CompareSwap | Op::FetchAdd) => {
            let (va, swap_or_add, compare) = (rng.next(), rng.next(), rng.next());
            Ext::Atomic(AtomicEth { va, rkey: rng.u32(), swap_or_add, compare })
        }
        (_, Op::SendLastInvalidate | Op::SendOnlyInvalidate) => Ext::Ieth(imm),
        _ => Ext::None,
    }
}

fn main() {
    let mut args =
        std::env::args().skip(1).map(|a| a.parse::<u64>().expect("usage: emit_random SEED COUNT"));
    let (Some(seed), Some(count)) = (args.next(), args.next()) else {
        panic!("usage: emit_random SEED COUNT")
    };
    let mut rng = Rng(seed);
    let opcodes: Vec<Opcode> = (0..=255).filter_map(Opcode::from_code).collect();
    for n in 0..count as usize {
        let opcode = opcodes[n % opcodes.len()];
        let len = (rng.next() as usize % [8, 300, 4097][n % 3]).min(opcode.op.max_payload());
        let flags = rng.u32();
        let bth = Bth {
            opcode,
            solicited: flags & 1 != 0,
            mig_req: flags & 2 != 0,
            ack_req: flags & 4 != 0,
            pad: pad_of(len),
            pkey: if flags & 8 != 0 { DEFAULT_PKEY } else { rng.u32() as u16 },
            dest_qpn: rng.u32() >> 8,
            psn: rng.u32() >> 8,
        };
        let mut bytes = HeaderBuf::new(&bth, &ext(opcode, &mut rng)).as_slice().to_vec();
        // Payloads begin alike, lest tshark take them for Ethernet headers.
        bytes.extend((0..len).map(|i| if i < 4 { 0x55 } else { rng.next() as u8 }));
        bytes.resize(bytes.len() + bth.pad as usize, 0);
        let v4 = |r: &mut Rng| IpAddr::from(Ipv4Addr::from(r.u32() >> 8 | 0x0a00_0000));
        let v6 = |r: &mut Rng| IpAddr::from(Ipv6Addr::from((0xfd00 << 112) | r.next() as u128));
        let (src_ip, dst_ip) =
            if n % 4 == 3 { (v6(&mut rng), v6(&mut rng)) } else { (v4(&mut rng), v4(&mut rng)) };
        let flow = IcrcFlow {
            src_ip,
            dst_ip,
            src_port: 0xc000 | rng.u32() as u16 >> 2,
            dst_port: ROCE_PORT,
        };
        let ip_id = rng.u32() as u16;
        bytes.extend(Icrc::of(&flow, ip_id, &bytes).expect("longer than a BTH"));
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        println!(
            "{:?}-{:?} {src_ip} {dst_ip} {} {} {ip_id} {hex}",
            opcode.transport, opcode.op, flow.src_port, flow.dst_port
        );
    }
}
