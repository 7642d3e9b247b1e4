use super::*;
use proptest::prelude::*;

fn endpoint() -> impl Strategy<Value = Endpoint> {
    (any::<[u8; 16]>(), 0..=MAX_QPN, any::<(u64, u32)>()).prop_map(
        |(g, qpn, (incarnation, connection))| Endpoint {
            gid: Gid(g),
            qpn,
            incarnation,
            connection,
        },
    )
}

fn body() -> impl Strategy<Value = Body> {
    let hello =
        (any::<(u64, u64, u64, bool, bool, u8, u8, u16)>(), 2..MAX_QPN, 0..=PSN_MASK, 1u32..=5)
            .prop_map(
                |(
                    (epoch, executed, completed, heard, waiting, local, remote, key_set),
                    fresh_qpn,
                    psn,
                    mtu,
                )| {
                    let (mtu, path) = (Mtu::from_code(mtu).unwrap(), SlotPath { local, remote });
                    let count = |all: u64| Messages { all, receives: all / 3 };
                    let (executed, completed, exact) =
                        (count(executed), count(completed), heard != waiting);
                    Body::Hello(Hello {
                        epoch,
                        path,
                        fresh_qpn,
                        psn,
                        mtu,
                        key_set,
                        heard,
                        waiting,
                        executed,
                        exact,
                        completed,
                        unproven_psn: exact.then_some(psn ^ 1),
                    })
                },
            );
    let refuse = (1u8..=8, any::<u64>(), any::<u64>()).prop_map(|(code, epoch, refused)| {
        Body::Refuse(Refuse { reason: RefuseReason::from_code(code).unwrap(), epoch, refused })
    });
    let probe = any::<(u32, u64)>().prop_map(|(sequence, sent_us)| Probe { sequence, sent_us });
    let bare = prop_oneof![
        Just(Body::Bye),
        Just(Body::Moved),
        any::<(u8, u32)>().prop_map(|(nic, rkey)| Body::AskKey(KeyName { nic, rkey })),
        (any::<(u8, u32)>(), proptest::collection::vec(any::<(u8, u16, u32)>(), 0..=MAX_KEY_NICS))
            .prop_map(|((nic, rkey), on)| {
                let key = |(nic, key_set, rkey)| NicKey { nic, key_set, rkey };
                Body::Keys(Keys::new(
                    KeyName { nic, rkey },
                    &on.into_iter().map(key).collect::<Vec<_>>(),
                ))
            }),
        (1u8..=3, any::<u64>())
            .prop_map(|(code, e)| Body::Planned(Planned::from_code(code).unwrap(), e)),
    ];
    prop_oneof![
        hello,
        refuse,
        probe.clone().prop_map(Body::Probe),
        probe.prop_map(Body::ProbeAck),
        bare
    ]
}

proptest! {
    #[test]
    fn round_trip_alone_and_in_a_row(msgs in prop::collection::vec((endpoint(), endpoint(), body()), 1..5)) {
        let msgs: Vec<Message> = msgs.into_iter().map(|(from, to, body)| Message { from, to, body }).collect();
        let mut bytes = Vec::new();
        msgs.iter().for_each(|m| m.encode(&mut bytes));
        let mut rest = &bytes[..];
        for m in &msgs {
            let (got, r) = Message::decode(rest).unwrap();
            prop_assert_eq!(&got, m);
            prop_assert!(rest.len() - r.len() <= MAX_LEN);
            rest = r;
        }
        prop_assert!(rest.is_empty());
    }

    #[test]
    fn cut_short_is_refused(from in endpoint(), to in endpoint(), body in body(), cut in 1usize..64) {
        let mut bytes = Vec::new();
        Message { from, to, body }.encode(&mut bytes);
        prop_assert!(Message::decode(&bytes[..bytes.len().saturating_sub(cut)]).is_err());
    }

    #[test]
    fn garbage_never_panics(mut bytes in prop::collection::vec(any::<u8>(), 0..1200), kind in 0u8..8, len in 0u16..1100) {
        let _ = Message::decode(&bytes);
        if bytes.len() >= 8 {
            bytes[..8].copy_from_slice(&[b'U', b'B', VERSION, kind, (len >> 8) as u8, len as u8, 0, 0]);
            let _ = Message::decode(&bytes);
        }
    }
}

#[test]
fn a_longer_body_of_a_later_time_is_understood() {
    let e = Endpoint { gid: Gid::default(), qpn: 7, incarnation: 1, connection: 0 };
    let m = Message { from: e, to: e, body: Body::Bye };
    let mut bytes = Vec::new();
    m.encode(&mut bytes);
    bytes.extend_from_slice(&[9; 10]);
    bytes[5] += 10;
    assert_eq!(Message::decode(&bytes), Ok((m, &[][..])));
}

#[test]
fn errors_name_the_field() {
    let e = Endpoint { gid: Gid::default(), qpn: 7, incarnation: 1, connection: 0 };
    let path = SlotPath { local: 0, remote: 0 };
    let hello = Hello {
        epoch: 65,
        path,
        fresh_qpn: 9,
        psn: 3,
        mtu: Mtu::B1024,
        key_set: 0,
        heard: false,
        waiting: true,
        executed: Messages::default(),
        exact: true,
        completed: Messages::default(),
        unproven_psn: Some(5),
    };
    let mut bytes = Vec::new();
    Message { from: e, to: e, body: Body::Hello(hello) }.encode(&mut bytes);
    bytes[HEADER_LEN + 8] = 2; // the slot
    assert_eq!(
        Message::decode(&bytes).unwrap_err().to_string(),
        "field slot of a control message holds 2"
    );
    bytes[HEADER_LEN + 8] = 1;
    bytes[HEADER_LEN + HELLO_LEN] = 1; // the first PSN of its requests
    assert_eq!(
        Message::decode(&bytes).unwrap_err().to_string(),
        "field psn of a control message holds 16777221"
    );
    bytes[2] = 9;
    assert_eq!(Message::decode(&bytes), Err(DecodeError::Version(9)));
}
