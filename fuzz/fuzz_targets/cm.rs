//! Management datagrams from strangers and peers, to a manager with connections in each state:
//! nothing panics, nothing grows without bound, and what is read is written the same.
#![no_main]

use unbroken_cm::{
    Cm, Config, ConnId, Connect, Event, Mad, Output, Peer, Reason, Rep, Reply, Req, SidrRep,
    SidrReq, MAD_BYTES, MAX_CONNECTIONS,
};

const CONFIG: Config = Config {
    response_timeout: 10,
    max_retries: 15,
    service_timeout: 12,
    timewait_us: 1_000_000,
    seed: 1,
};
const PEER: Peer = Peer { gid: [1; 16], qpn: 1 };
/// What a datagram of the input begins with: what happens after it, and whose names it gets.
const HEAD_BYTES: usize = 2;

/// What a program does with what it is told.
fn answer(cm: &mut Cm, now_us: u64, how: u8, id: ConnId, event: &Event) {
    let _ = match (event, how % 4) {
        (Event::Request { .. }, 0) => {
            cm.accept(now_us, id, Reply { rep: Box::new(Rep::default()) })
        }
        (Event::SidrRequest { .. }, 0) => cm.answer(now_us, id, SidrRep::default()),
        (Event::Response(_), 0) => cm.establish(now_us, id),
        (_, 1) => cm.reject(now_us, id, Reason::CONSUMER, &[how]),
        (_, 2) => cm.disconnect(now_us, id),
        (_, 3) => {
            cm.destroy(now_us, id);
            Ok(())
        }
        _ => Ok(()),
    };
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let (mut cm, mut now_us) = (Cm::new(CONFIG), 0);
    let connect = Connect { peers: vec![PEER], via: 0, req: Box::new(Req::default()) };
    let own = cm.connect(now_us, connect).unwrap();
    let asked = cm.ask(now_us, vec![PEER], 0, SidrReq::default()).unwrap();
    let mut known = vec![own.0, asked.0];
    for piece in input.chunks(HEAD_BYTES + MAD_BYTES) {
        let Some((head, rest)) = piece.split_at_checked(HEAD_BYTES) else { return };
        let mut bytes = [0; MAD_BYTES];
        bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
        bytes[16..16 + rest.len().min(MAD_BYTES - 16)]
            .copy_from_slice(&rest[..rest.len().min(MAD_BYTES - 16)]);
        // A name that is drawn at random would never be met.
        let name = known[usize::from(head[1]) % known.len()];
        if head[1] & 0x80 != 0 {
            bytes[28..32].copy_from_slice(&name.to_be_bytes());
        }
        if let Some(mad) = Mad::parse(&bytes) {
            assert_eq!(Mad::parse(&mad.encode()), Some(mad));
        }
        cm.handle(now_us, PEER, 0, &bytes);
        while let Some(output) = cm.next_output() {
            if let Output::Event(id, event) = output {
                known.push(id.0);
                answer(&mut cm, now_us, head[0], id, &event);
            }
        }
        now_us += u64::from(head[0]) * 100;
        cm.tick(now_us);
        assert!(cm.count() <= MAX_CONNECTIONS);
    }
});
