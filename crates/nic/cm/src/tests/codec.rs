//! What is written is read back, and no bytes are too strange to be read.

use crate::*;
use proptest::prelude::*;
use std::net::IpAddr;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

#[test]
fn a_request_lies_as_the_specification_has_it() {
    let path = Path {
        local_gid: [0xaa; 16],
        remote_gid: [0xbb; 16],
        flow_label: 0xabcde,
        rate: 3,
        traffic_class: 0x68,
        hop_limit: 64,
        sl: 5,
        ack_timeout: 18,
        ..Path::default()
    };
    let req = Req {
        local_id: 0x0102_0304,
        service_id: service_id(PortSpace::Tcp, 7174),
        local_guid: 0x1122_3344_5566_7788,
        local_qpn: 0x00ab_cdef,
        responder_resources: 4,
        initiator_depth: 5,
        remote_response_timeout: 20,
        flow_control: true,
        starting_psn: 0x0012_3456,
        local_response_timeout: 21,
        retry_count: 7,
        pkey: 0xffff,
        mtu: 5,
        rnr_retry_count: 6,
        max_cm_retries: 15,
        srq: true,
        path,
        private: vec![9; 92],
        ..Req::default()
    };
    let mad = Mad { transaction: 77, message: Message::Req(Box::new(req)) };
    let bytes = mad.encode();
    assert_eq!(bytes[..24], hex("01070203 00000000 00000000 0000004d 0010 0000 00000000"));
    let body = &bytes[24..];
    assert_eq!(body[..8], hex("01020304 00000000"));
    assert_eq!(body[8..24], hex("0000000001061c06 1122334455667788"));
    assert_eq!(body[28..40], hex("00000000 abcdef04 00000005"));
    assert_eq!(body[40..52], hex("000000a1 123456af ffff 56 f8"));
    assert_eq!(body[88..96], hex("abcde003 68 40 50 90"));
    assert_eq!(body[140..], [9; 92]);
    assert_eq!(Mad::parse(&bytes), Some(mad));
}

#[test]
fn a_reply_lies_as_the_specification_has_it() {
    let rep = Rep {
        local_id: 1,
        remote_id: 2,
        local_qpn: 0x00ab_cdef,
        starting_psn: 0x0012_3456,
        responder_resources: 4,
        initiator_depth: 5,
        target_ack_delay: 15,
        flow_control: true,
        rnr_retry_count: 7,
        srq: true,
        local_guid: 0x1122_3344_5566_7788,
        private: vec![8; 196],
        ..Rep::default()
    };
    let mad = Mad { transaction: 0, message: Message::Rep(Box::new(rep)) };
    let bytes = mad.encode();
    assert_eq!(bytes[16..18], [0, 0x13]);
    assert_eq!(
        bytes[24..60],
        hex("00000001 00000002 00000000 abcdef00 00000000 12345600 040579f0 1122334455667788")
    );
    assert_eq!(Mad::parse(&bytes), Some(mad));
}

#[test]
fn addresses_lie_in_front_of_private_data() {
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let v4 = IpHeader { port: 0x1234, source: ip("1.2.3.4"), destination: ip("5.6.7.8") };
    let bytes = v4.encode();
    assert_eq!(bytes[..4], [0, 0x40, 0x12, 0x34]);
    assert_eq!((&bytes[16..20], &bytes[32..36]), (&[1, 2, 3, 4][..], &[5, 6, 7, 8][..]));
    assert_eq!(IpHeader::parse(&bytes), Some(v4));
    let v6 = IpHeader { port: 1, source: ip("fd00::1"), destination: ip("fd00::2") };
    assert_eq!(IpHeader::parse(&v6.encode()), Some(v6));
    assert_eq!(IpHeader::parse(&bytes[..35]), None);
    let mut wrong = bytes;
    wrong[1] = 5 << 4;
    assert_eq!(IpHeader::parse(&wrong), None, "IP of no version");
    wrong = bytes;
    wrong[0] = 0x10;
    assert_eq!(IpHeader::parse(&wrong), None, "a header of another version");
}

#[test]
fn services_are_named_by_ports() {
    let id = service_id(PortSpace::Udp, 7174);
    assert_eq!(id, 0x0111_1c06);
    assert_eq!(PortSpace::of_service(id), Some((PortSpace::Udp, 7174)));
    assert_eq!(PortSpace::of_service(1 << 32 | id), None);
    assert_eq!(PortSpace::of_service(5), None);
}

proptest! {
    #[test]
    fn any_bytes_can_be_read(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Mad::parse(&bytes);
        let _ = IpHeader::parse(&bytes);
    }

    #[test]
    fn what_is_read_is_written_and_read_the_same(
        attribute in 0x10u8..=0x1a,
        body in proptest::collection::vec(any::<u8>(), 232),
    ) {
        let mut bytes = vec![1, 7, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, attribute];
        bytes.resize(24, 0);
        bytes.extend(body);
        let mad = Mad::parse(&bytes).unwrap();
        prop_assert_eq!(Mad::parse(&mad.encode()), Some(mad));
    }
}
