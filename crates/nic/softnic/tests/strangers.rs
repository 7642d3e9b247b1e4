//! Packets that are right in everything but where they come from: another process of the machine
//! can send from a NIC's address, but not from its UDP ports.

mod common;

use common::*;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Instant;
use unbroken_fabric::{NicPage, Runtime, TX_PORTS};
use unbroken_types::{PathAttr, QpState, QpType, SendOpcode};
use unbroken_verbs::{Device, DeviceQp, QpModify, RcModify};
use unbroken_wire::*;

const DATA: [u8; 64] = [0xab; 64];
const PSN: u32 = 0x100;
const FORGED: u64 = 20;

/// A socket on a NIC's address that is none of the NIC's.
struct Stranger {
    socket: UdpSocket,
    flow: IcrcFlow,
}

impl Stranger {
    fn new(from: IpAddr, to: &Host) -> Stranger {
        let socket = UdpSocket::bind((from, 0)).unwrap();
        let dont: libc::c_int = libc::IP_PMTUDISC_DO;
        // The IP id is 0 then, which the ICRC covers.
        // SAFETY: the option's value is a live local int.
        let done = unsafe {
            let (name, value) = (libc::IP_MTU_DISCOVER, (&raw const dont).cast());
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_IP,
                name,
                value,
                size_of::<libc::c_int>() as _,
            )
        };
        assert_eq!(done, 0);
        let src_port = socket.local_addr().unwrap().port();
        let (dst_ip, dst_port) = (to.nic.gid().to_ip(), ROCE_PORT + to.nic.slot());
        Stranger { socket, flow: IcrcFlow { src_ip: from, dst_ip, src_port, dst_port } }
    }

    fn send(&self, opcode: Opcode, dest_qpn: u32, psn: u32, ext: &Ext) {
        let (ack_req, pkey) = (opcode.transport == Transport::Rc, DEFAULT_PKEY);
        let bth =
            Bth { opcode, solicited: false, mig_req: true, ack_req, pad: 0, pkey, dest_qpn, psn };
        let mut bytes = HeaderBuf::new(&bth, ext).as_slice().to_vec();
        bytes.extend(DATA);
        bytes.extend(Icrc::of(&self.flow, 0, &bytes).unwrap());
        self.socket.send_to(&bytes, SocketAddr::new(self.flow.dst_ip, self.flow.dst_port)).unwrap();
    }
}

fn page(world: &World, ip: IpAddr) -> NicPage {
    NicPage::open(&Runtime::at(world.dir.path()).unwrap(), ip).unwrap()
}

fn wait(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn opcode(transport: Transport, op: Op) -> Opcode {
    Opcode { transport, op }
}

#[test]
fn a_write_from_a_strangers_port_changes_nothing() {
    let mut p = Pair::new();
    let stranger = Stranger::new(p.a.nic.gid().to_ip(), &p.b);
    let ext = Ext::Reth(Reth { va: p.b.addr(0), rkey: p.b.mr.rkey, len: DATA.len() as u32 });
    let forge = |psn| stranger.send(opcode(Transport::Rc, Op::WriteOnly), p.qb.qpn(), psn, &ext);
    let (of_a, of_b) = (page(&p.world, stranger.flow.src_ip), page(&p.world, stranger.flow.dst_ip));
    let strangers = || of_b.counters().strangers;
    let before = of_b.counters();
    // Before the first right packet, and once it is known where those come from.
    (0..FORGED).for_each(|_| forge(PSN));
    wait("the forged packets", || strangers() == before.strangers + FORGED);
    p.a.fill(0, &[1; 64]);
    let sges = [p.a.sge(0, 64)];
    p.qa.post_send(&rdma(1, SendOpcode::Write, &sges, p.b.addr(4096), p.b.mr.rkey)).unwrap();
    assert_ok(&p.a.poll(1)[0], 1);
    assert_eq!(p.b.bytes(4096, 64), [1; 64]);
    (0..FORGED).for_each(|_| forge(PSN + 1));
    wait("the forged packets", || strangers() == before.strangers + 2 * FORGED);
    assert_eq!(p.b.bytes(0, 64), [0; 64]);
    assert_eq!(
        (of_b.counters().drops, of_b.counters().icrc_errors),
        (before.drops, before.icrc_errors)
    );
    // The very same packet is taken once the port is one of the slot's: it was the port that it
    // lacked.
    of_a.slot(p.a.nic.slot() as u8).set_tx_ports([stranger.flow.src_port; TX_PORTS]);
    forge(PSN + 1);
    wait("the packet that is admitted", || p.b.bytes(0, 64) == DATA);
    assert_eq!(strangers(), before.strangers + 2 * FORGED);
}

/// A slot's ports are those of the slot, not of the NIC: another process of the same NIC is a
/// stranger, too.
#[test]
fn the_port_belongs_to_the_peers_slot() {
    let p = Pair::new();
    let other = Host::with_channel(p.world.nics("a"), 0, 64, None);
    let (mine, others) = (p.a.nic.slot(), other.nic.slot());
    assert_ne!(mine, others);
    let stranger = Stranger::new(p.a.nic.gid().to_ip(), &p.b);
    let (of_a, of_b) = (page(&p.world, stranger.flow.src_ip), page(&p.world, stranger.flow.dst_ip));
    of_a.slot(others as u8).set_tx_ports([stranger.flow.src_port; TX_PORTS]);
    let ext = Ext::Reth(Reth { va: p.b.addr(0), rkey: p.b.mr.rkey, len: DATA.len() as u32 });
    stranger.send(opcode(Transport::Rc, Op::WriteOnly), p.qb.qpn(), PSN, &ext);
    wait("the forged packet", || of_b.counters().strangers == 1);
    assert_eq!(p.b.bytes(0, 64), [0; 64]);
}

#[test]
fn uc_and_ud_take_nothing_from_a_strangers_port() {
    let world = World::new();
    let (a, b) = (Host::new(&world, "a", 0, 4096), Host::new(&world, "b", 0, 4096));
    let (ua, ub) = (
        a.nic.create_qp(&a.init(QpType::Uc)).unwrap(),
        b.nic.create_qp(&b.init(QpType::Uc)).unwrap(),
    );
    connect_uc(&*ub, &*ua, &a);
    let ud = b.nic.create_qp(&b.init(QpType::Ud)).unwrap();
    for (state, qkey, sq_psn) in
        [(QpState::Init, Some(7), None), (QpState::Rtr, None, None), (QpState::Rts, None, Some(5))]
    {
        let rc = RcModify { state: Some(state), sq_psn, ..RcModify::default() };
        ud.modify(&QpModify { rc, qkey, ..QpModify::default() }).unwrap();
    }
    for qp in [&ub, &ud] {
        qp.post_recv(&recv(1, &[b.sge(0, 4096)])).unwrap();
    }
    let deth = Deth { qkey: 7, src_qpn: ua.qpn(), grh: false, moved: false };
    // From the NIC's address, and from one that is no NIC's.
    let strangers =
        [a.nic.gid().to_ip(), "127.0.0.1".parse().unwrap()].map(|from| Stranger::new(from, &b));
    let (of_a, of_b) =
        (page(&world, strangers[0].flow.src_ip), page(&world, strangers[0].flow.dst_ip));
    for stranger in &strangers {
        stranger.send(opcode(Transport::Uc, Op::SendOnly), ub.qpn(), PSN, &Ext::None);
        stranger.send(opcode(Transport::Ud, Op::SendOnly), ud.qpn(), PSN, &Ext::Deth(deth));
    }
    wait("the forged packets", || of_b.counters().strangers == 4);
    assert_eq!(b.bytes(0, 4096), [0; 4096]);
    of_a.slot(a.nic.slot() as u8).set_tx_ports([strangers[0].flow.src_port; TX_PORTS]);
    strangers[0].send(opcode(Transport::Uc, Op::SendOnly), ub.qpn(), PSN, &Ext::None);
    strangers[0].send(opcode(Transport::Ud, Op::SendOnly), ud.qpn(), PSN, &Ext::Deth(deth));
    for wc in b.poll(2) {
        assert_ok(&wc, 1);
    }
}

fn connect_uc(qp: &dyn DeviceQp, peer: &dyn DeviceQp, host: &Host) {
    let d = RcModify::default();
    let (mtu, access) = (Some(unbroken_types::Mtu::B1024), Some(ALL));
    let rtr = RcModify {
        state: Some(QpState::Rtr),
        dest_qpn: Some(peer.qpn()),
        rq_psn: Some(PSN),
        mtu,
        ..d
    };
    for (rc, dest) in
        [(RcModify { state: Some(QpState::Init), access, ..d }, None), (rtr, Some(host.nic.gid()))]
    {
        qp.modify(&QpModify { rc, path: dest.map(PathAttr::new), ..QpModify::default() }).unwrap();
    }
}
