use super::*;

#[test]
fn marks_come_as_they_were_sent() {
    for (ip, network) in [([127, 77, 201, 1].into(), 4), (IpAddr::V6(Ipv6Addr::LOCALHOST), 6)] {
        let Ok(mut all) = RxSocket::claim(&[ip]) else {
            assert_eq!(network, 6, "a machine without IPv6");
            continue;
        };
        let (rx, tx) = (all.remove(0), TxSocket::new(ip).unwrap());
        rx.tell_marks(ip);
        let to = RawAddr::new(SocketAddr::new(ip, ROCE_PORT + rx.slot()));
        let mut ring = RxRing::new();
        for (segment, class, hops) in [(0, 0, 64), (0, 0x6a, 7), (1000, 3, 255), (0, 1, 0)] {
            let marks = Marks { class, hops };
            let message = Message { to, segment, at: 0, bytes: 2000, marks };
            assert_eq!(super::send(&tx, std::iter::once(&message), &[7; 2000]).unwrap(), 1);
            assert!(ring.receive(&rx) > 0);
            let got = ring.datagram(0).unwrap().marks;
            assert_eq!(got, Marks { class, hops: hops.max(1) }, "IPv{network}");
            while ring.receive(&rx) > 0 {}
        }
    }
}

#[test]
fn what_finds_the_socket_full_is_counted() {
    let ip: IpAddr = [127, 77, 200, 1].into();
    let (rx, tx) = (RxSocket::claim(&[ip]).unwrap().remove(0), TxSocket::new(ip).unwrap());
    let to = SocketAddr::new(ip, ROCE_PORT + rx.slot());
    let send = || {
        let marks = Marks::default();
        let message = Message { to: RawAddr::new(to), segment: 0, at: 0, bytes: 4096, marks };
        assert_eq!(super::send(&tx, std::iter::once(&message), &[7; 4096]).unwrap(), 1);
    };
    let sent = 3 * rx.rcvbuf() / 4096;
    (0..sent).for_each(|_| send());
    let mut ring = RxRing::new();
    let mut got = 0;
    loop {
        match ring.receive(&rx) {
            0 => break,
            n => got += n,
        }
    }
    assert!(got < sent, "the socket took all {sent}");
    send();
    assert_eq!(ring.receive(&rx), 1);
    assert_eq!(ring.overruns() as usize, sent - got);
    assert_eq!(ring.overruns(), 0);
}
