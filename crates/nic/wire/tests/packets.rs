//! Packets and ICRCs against known vectors and against themselves.

use proptest::prelude::*;
use std::net::IpAddr;
use unbroken_wire::*;

/// Made with scapy's `contrib.roce`: addresses, ports, IP id, UDP payload with ICRC.
const VECTORS: [(&str, &str, u16, u16, u16, &str); 4] = [
    (
        "127.77.1.0",
        "127.77.2.0",
        49152,
        4791,
        0,
        "0a00ffff0001001180fffffe1122334455667788abcdef010000000c68656c6c6f2c20776f726c64edc7777e",
    ),
    ("10.0.0.1", "10.0.0.2", 50000, 4792, 48879, "1100ffff00123456000000071f00000901cbaf56"),
    (
        "10.1.2.3",
        "10.3.2.1",
        50001,
        4791,
        7,
        "6490ffff000000010000000511111111000000226162630038ba852f",
    ),
    (
        "fd00::1",
        "fd00::2",
        50002,
        4791,
        0,
        "0c00ffff00010011800000011122334455667788abcdef010000000c5ddbcdbb",
    ),
];

fn flow(src: &str, dst: &str, src_port: u16, dst_port: u16) -> IcrcFlow {
    IcrcFlow { src_ip: src.parse().unwrap(), dst_ip: dst.parse().unwrap(), src_port, dst_port }
}

fn unhex(s: &str) -> Vec<u8> {
    (0..s.len()).step_by(2).map(|i| u8::from_str_radix(&s[i..i + 2], 16).unwrap()).collect()
}

#[test]
fn icrc_equals_scapys() {
    for (src, dst, sport, dport, id, hex) in VECTORS {
        let bytes = unhex(hex);
        let f = flow(src, dst, sport, dport);
        let packet = strip_icrc(&f, &bytes, id, false).expect(hex);
        Packet::parse(packet).expect(hex);
        if f.src_ip.is_ipv4() {
            assert!(strip_icrc(&f, &bytes, id ^ 0x1234, false).is_none());
        }
        assert!(strip_icrc(&f, &bytes, id ^ 0x1234, true).is_some());
    }
}

#[test]
fn vectors_parse_to_what_scapy_was_given() {
    let bytes = unhex(VECTORS[0].5);
    let p = Packet::parse(&bytes[..bytes.len() - 4]).unwrap();
    assert_eq!(p.bth.opcode, Opcode::rc(Op::WriteOnly));
    assert_eq!((p.bth.dest_qpn, p.bth.psn, p.bth.ack_req), (0x10011, 0xfffffe, true));
    assert_eq!(p.ext.reth(), Some(Reth { va: 0x1122334455667788, rkey: 0xabcdef01, len: 12 }));
    assert_eq!(p.payload, b"hello, world");
    let bytes = unhex(VECTORS[2].5);
    let p = Packet::parse(&bytes[..bytes.len() - 4]).unwrap();
    assert_eq!((p.bth.pad, p.bth.solicited, p.payload), (1, true, &b"abc"[..]));
    assert_eq!(
        p.ext.deth(),
        Some(Deth { qkey: 0x11111111, src_qpn: 0x22, grh: false, moved: false })
    );
}

#[test]
fn any_id_is_right_for_every_length_and_id() {
    let f = flow("127.77.1.0", "127.77.2.1", 49153, 4791);
    let body: Vec<u8> = (0..65_000u32).map(|i| (i * 7) as u8).collect();
    for len in (12..600).chain([1024, 1479, 4096 + 12, 4120, 9000, 65_000]) {
        for id in [0u16, 1, 2, 0x80, 0x100, 0x8000, 0xffff, (len as u16).wrapping_mul(40_503)] {
            let mut packet = body[..len].to_vec();
            packet.extend(Icrc::of(&f, id, &packet).unwrap());
            assert!(strip_icrc(&f, &packet, 0, true).is_some(), "length {len}, id {id}");
            assert_eq!(strip_icrc(&f, &packet, 0, false).is_some(), id == 0);
        }
    }
}

#[test]
fn short_and_strange_packets_are_refused() {
    let write = unhex(VECTORS[0].5);
    let write = &write[..write.len() - 4];
    assert_eq!(Packet::parse(&write[..11]), Err(ParseError::Short { have: 11, need: 12 }));
    assert_eq!(Packet::parse(&write[..20]), Err(ParseError::Short { have: 20, need: 28 }));
    assert_eq!(Packet::parse(&write[..39]), Err(ParseError::Pad { pad: 0, payload: 11 }));
    let mut b = write.to_vec();
    b[1] = 0x35;
    assert_eq!(Packet::parse(&b), Err(ParseError::Version(5)));
    b[1] = 0x30;
    assert_eq!(Packet::parse(&b[..28]), Err(ParseError::Pad { pad: 3, payload: 0 }));
    b[0] = 0x81;
    b[1] = 0;
    assert_eq!(Packet::parse(&b), Err(ParseError::Opcode(0x81)));
    b[0] = Op::AtomicAcknowledge as u8;
    assert_eq!(Packet::parse(&b), Err(ParseError::Payload(16)));
    assert!(strip_icrc(&flow("::1", "::1", 1, 1), &b[..15], 0, true).is_none());
}

/// Any packet that can be emitted.
fn packet() -> impl Strategy<Value = (Bth, Ext, Vec<u8>)> {
    let opcode = (0..=255u8).prop_filter_map("an opcode", Opcode::from_code);
    (opcode, any::<[u32; 8]>(), any::<[bool; 3]>(), proptest::collection::vec(any::<u8>(), 0..200))
        .prop_map(|(opcode, n, b, mut payload)| {
            payload.truncate(opcode.op.max_payload());
            let bth = Bth {
                opcode,
                solicited: b[0],
                mig_req: b[1],
                ack_req: b[2],
                pad: pad_of(payload.len()),
                pkey: n[0] as u16,
                dest_qpn: n[1] >> 8,
                psn: n[2] >> 8,
            };
            let wide = |i: usize| (n[i] as u64) << 32 | n[i + 1] as u64;
            let reth = Reth { va: wide(3), rkey: n[5], len: n[6] };
            let aeth = Aeth { syndrome: n[3] as u8, msn: n[4] >> 8 };
            let deth =
                Deth { qkey: n[3], src_qpn: n[4] >> 8, grh: n[4] & 1 != 0, moved: n[4] & 2 != 0 };
            use Op::*;
            let ext = match (opcode.transport, opcode.op) {
                (Transport::Ud, SendOnlyImm) => Ext::DethImm(deth, n[7]),
                (Transport::Ud, _) => Ext::Deth(deth),
                (_, SendLastImm | SendOnlyImm | WriteLastImm) => Ext::Imm(n[7]),
                (_, WriteOnlyImm) => Ext::RethImm(reth, n[7]),
                (_, WriteFirst | WriteOnly | ReadRequest) => Ext::Reth(reth),
                (_, Acknowledge | ReadResponseFirst | ReadResponseLast | ReadResponseOnly) => {
                    Ext::Aeth(aeth)
                }
                (_, AtomicAcknowledge) => Ext::AtomicAck(aeth, wide(5)),
                (_, CompareSwap | FetchAdd) => Ext::Atomic(AtomicEth {
                    va: wide(0),
                    rkey: n[2],
                    swap_or_add: wide(3),
                    compare: wide(5),
                }),
                (_, SendLastInvalidate | SendOnlyInvalidate) => Ext::Ieth(n[7]),
                _ => Ext::None,
            };
            (bth, ext, payload)
        })
}

fn emit(f: &IcrcFlow, id: u16, bth: &Bth, ext: &Ext, payload: &[u8]) -> Vec<u8> {
    let mut bytes = HeaderBuf::new(bth, ext).as_slice().to_vec();
    bytes.extend(payload);
    bytes.extend(&[0; 3][..bth.pad as usize]);
    bytes.extend(Icrc::of(f, id, &bytes).unwrap());
    bytes
}

proptest! {
    #[test]
    fn what_is_emitted_parses_back((bth, ext, payload) in packet(), v6 in any::<bool>(), id in any::<u16>()) {
        let f = if v6 { flow("fd00::1", "fd00::2", 50000, 4791) } else { flow("10.0.0.1", "10.0.0.2", 50000, 4791) };
        let bytes = emit(&f, id, &bth, &ext, &payload);
        let packet = strip_icrc(&f, &bytes, id, false).expect("own ICRC");
        prop_assert_eq!(Packet::parse(packet), Ok(Packet { bth, ext, payload: &payload }));
    }

    #[test]
    fn pieces_make_the_same_icrc((bth, ext, payload) in packet(), cuts in any::<[u8; 3]>()) {
        let f = IcrcFlow { src_ip: IpAddr::from([1, 2, 3, 4]), dst_ip: IpAddr::from([5, 6, 7, 8]), src_port: 9, dst_port: 10 };
        let bytes = emit(&f, 3, &bth, &ext, &payload);
        let (body, want) = bytes.split_last_chunk::<4>().unwrap();
        let (bth, mut rest) = body.split_first_chunk().unwrap();
        let mut icrc = IcrcSeed::new(&f, bytes.len()).begin(3, bth);
        for cut in cuts {
            let (piece, r) = rest.split_at(rest.len().min(cut as usize % 20));
            icrc.update(piece);
            rest = r;
        }
        icrc.update(rest);
        prop_assert_eq!(&icrc.finish(), want);
    }

    /// One checker takes packets of all lengths and ids.
    #[test]
    fn a_checker_takes_what_a_single_check_takes(packets in proptest::collection::vec((packet(), any::<u16>()), 1..8), v6 in any::<bool>()) {
        let f = if v6 { flow("fd00::1", "fd00::2", 50000, 4791) } else { flow("10.0.0.1", "10.0.0.2", 50000, 4791) };
        let mut checker = IcrcChecker::new(&f, 4112);
        for ((bth, ext, payload), id) in &packets {
            let bytes = emit(&f, *id, bth, ext, payload);
            prop_assert_eq!(checker.strip(&bytes, *id, false), Some(&bytes[..bytes.len() - 4]));
            prop_assert_eq!(checker.strip(&bytes, id ^ 0x4001, false).is_some(), v6);
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed((bth, ext, payload) in packet(), id in any::<u16>()) {
        let f = flow("10.0.0.1", "10.0.0.2", 50000, 4791);
        let mut bytes = emit(&f, id, &bth, &ext, &payload);
        for bit in 0..bytes.len() * 8 {
            if bit / 8 == 4 {
                continue; // masked: FECN, BECN, reserved
            }
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(strip_icrc(&f, &bytes, id, false).is_none(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn garbage_never_panics(mut bytes in proptest::collection::vec(any::<u8>(), 0..80), op in any::<u8>()) {
        let _ = Packet::parse(&bytes);
        let f = flow("10.0.0.1", "10.0.0.2", 50000, 4791);
        prop_assert!(bytes.len() < 16 || strip_icrc(&f, &bytes, 0, false).is_none());
        // Most garbage dies of its opcode or version: give it good ones.
        if bytes.len() > 1 {
            bytes[0] = op;
            bytes[1] &= 0xf0;
            if let Ok(p) = Packet::parse(&bytes) {
                prop_assert!(p.payload.len() <= bytes.len());
            }
        }
    }
}
