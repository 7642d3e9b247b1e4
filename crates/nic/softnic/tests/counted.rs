//! What counts as data of the application, in the counters and in the record of gaps: neither
//! messages of failover nor maps in NAKs.

mod common;

use common::*;
use unbroken_fabric::{GapRecorder, NicPage};
use unbroken_types::{QpState, QpType};
use unbroken_verbs::{Device, DeviceQp, QpInit, QpModify, RcModify, SendWr, UdDest};

const QKEY: u32 = 0x11;
const BYTES: usize = 256;
const GRH: usize = 40;

fn page(world: &World, host: &Host) -> NicPage {
    NicPage::open(world.fabric.runtime(), host.nics.ip(0).unwrap()).unwrap()
}

fn ready(qp: &dyn DeviceQp) {
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        let rc = RcModify {
            state: Some(state),
            sq_psn: (state == QpState::Rts).then_some(5),
            ..RcModify::default()
        };
        let qkey = (state == QpState::Init).then_some(QKEY);
        qp.modify(&QpModify { rc, qkey, ..QpModify::default() }).unwrap();
    }
}

/// Sends a datagram from a to b, between control QPs or between others.
fn datagram(a: &Host, b: &Host, control: bool) {
    let make =
        |host: &Host| host.nic.create_qp(&QpInit { control, ..host.init(QpType::Ud) }).unwrap();
    let (qa, qb) = (make(a), make(b));
    ready(&*qa);
    ready(&*qb);
    qb.post_recv(&recv(1, &[b.sge(0, GRH + BYTES)])).unwrap();
    let to = UdDest {
        gid: b.nic.gid(),
        qpn: qb.qpn(),
        qkey: QKEY,
        grh: false,
        sgid_index: 0,
        ..UdDest::default()
    };
    qa.post_send(&SendWr { ud: Some(to), ..send(1, &[a.sge(0, BYTES)]) }).unwrap();
    assert_ok(&a.poll(1)[0], 1);
    assert_ok(&b.poll(1)[0], 1);
}

#[test]
fn messages_of_failover_are_not_data() {
    let world = World::new();
    // Both hosts are this process, so its page of gaps is that of the host that was made last,
    // which receives.
    let (a, b) = (Host::new(&world, "a", 0, 1 << 12), Host::new(&world, "b", 0, 1 << 12));
    let first_us =
        || GapRecorder::read(world.fabric.runtime(), std::process::id()).unwrap().first_us;
    for (control, data) in [(true, 0), (false, BYTES as u64)] {
        datagram(&a, &b, control);
        let (sent, came) = (page(&world, &a).counters(), page(&world, &b).counters());
        assert_eq!(
            (sent.tx_payload_bytes, came.rx_payload_bytes),
            (data, data),
            "control {control}"
        );
        assert_eq!(
            (came.last_data_rx_us > 0, first_us() > 0),
            (!control, !control),
            "control {control}"
        );
        assert!(came.rx_bytes > BYTES as u64, "a packet came in any case");
    }
}

#[test]
fn the_map_in_a_nak_is_not_data() {
    const MESSAGES: usize = 64;
    let mut p = Pair::new();
    p.world.fault("reorder a/0 20%");
    p.a.fill(0, &pattern(MESSAGES * 4096, 3));
    for round in 0..8 {
        for i in 0..MESSAGES {
            p.qb.post_recv(&recv(i as u64, &[p.b.sge(i * 4096, 4096)])).unwrap();
        }
        for i in 0..MESSAGES {
            p.qa.post_send(&send(i as u64, &[p.a.sge(i * 4096, 4096)])).unwrap();
        }
        assert_eq!(
            (p.b.poll(MESSAGES).len(), p.a.poll(MESSAGES).len()),
            (MESSAGES, MESSAGES),
            "round {round}"
        );
    }
    let (sender, receiver) = (page(&p.world, &p.a).counters(), page(&p.world, &p.b).counters());
    assert!(receiver.rx_payload_bytes >= 8 * (MESSAGES * 4096) as u64);
    assert_eq!((receiver.tx_payload_bytes, sender.rx_payload_bytes), (0, 0));
}
