//! NICs that are addresses of real interfaces: two network namespaces joined by a veth pair. Needs
//! root; says so where it is not.

mod common;

use common::*;
use std::process::Command;
use std::sync::mpsc::{channel, Receiver, Sender};
use unbroken_fabric::{DeviceKind, Runtime};
use unbroken_softnic::{Config, NicSource, SoftNics};
use unbroken_types::SendOpcode;
use unbroken_verbs::{Device, DeviceEvent, DeviceQp};

fn ip(args: &str) {
    let done = Command::new("ip").args(args.split_whitespace()).output().expect("the ip program");
    assert!(done.status.success(), "ip {args}: {}", String::from_utf8_lossy(&done.stderr));
}

fn nics(dir: &std::path::Path, addrs: &[&str]) -> std::sync::Arc<SoftNics> {
    let nics =
        NicSource::Addresses(addrs.iter().map(|a| a.parse().unwrap()).collect(), DeviceKind::Full);
    SoftNics::new(Config::of(Runtime::at(dir).unwrap(), nics)).unwrap()
}

/// Moves this thread, and those that it starts, to a network namespace of its own.
fn own_namespace() -> bool {
    // SAFETY: no pointers.
    unsafe { libc::unshare(libc::CLONE_NEWNET) == 0 }
}

fn thread_id() -> i32 {
    // SAFETY: no pointers.
    unsafe { libc::gettid() }
}

/// What one end tells the other; also sent to say "go on".
#[derive(Clone, Copy)]
struct Peer {
    gid: unbroken_types::Gid,
    qpn: u32,
    addr: u64,
    rkey: u32,
}

/// One end: opens the NIC, connects, and runs `work`.
fn end(
    dir: &std::path::Path,
    addr: &str,
    to: &Sender<Peer>,
    from: &Receiver<Peer>,
    work: impl FnOnce(&Host, &dyn DeviceQp, Peer),
) {
    let host = Host::with_channel(nics(dir, &[addr]), 0, 4 << 20, None);
    // The kernel may take a while to see the link.
    if !host.nic.usable() {
        host.events.wait(|e| *e == DeviceEvent::PortActive(1));
    }
    let qp = host.qp(|_| {});
    to.send(Peer { gid: host.nic.gid(), qpn: qp.qpn(), addr: host.addr(0), rkey: host.mr.rkey })
        .unwrap();
    let peer = from.recv().unwrap();
    connect_to(&*qp, peer.qpn, peer.gid, 0x100, host.nic.port(1).unwrap().active_mtu).unwrap();
    // Both are connected.
    to.send(peer).unwrap();
    from.recv().unwrap();
    work(&host, &*qp, peer);
}

fn over_veth(a_addr: &'static str, b_addr: &'static str, prefix: u32) {
    let dir = tempfile::tempdir().unwrap();
    let (a_dir, b_dir) = (dir.path().join("a"), dir.path().join("b"));
    let (to_b, from_a) = channel::<Peer>();
    let (to_a, from_b) = channel::<Peer>();
    let (tid_to, tid_from) = channel::<i32>();
    let (ready_to, ready_from) = channel::<()>();
    let b = std::thread::spawn(move || {
        if !own_namespace() {
            return;
        }
        tid_to.send(thread_id()).unwrap();
        ready_from.recv().unwrap();
        ip(&format!(
            "addr add {b_addr}/{prefix} dev v1{}",
            if prefix > 32 { " nodad" } else { "" }
        ));
        ip("link set v1 up");
        // Only now may the other end send.
        to_a.send(Peer { gid: Default::default(), qpn: 0, addr: 0, rkey: 0 }).unwrap();
        end(&b_dir, b_addr, &to_a, &from_a, |_, _, _| {
            // Passive: until the other end is done.
            from_a.recv().unwrap();
        });
    });
    let a = std::thread::spawn(move || {
        if !own_namespace() {
            eprintln!("skipped: no right to make network namespaces (run as root)");
            return;
        }
        let b_tid = tid_from.recv().unwrap();
        ip(&format!("link add v0 type veth peer name v1 netns {b_tid}"));
        ip(&format!(
            "addr add {a_addr}/{prefix} dev v0{}",
            if prefix > 32 { " nodad" } else { "" }
        ));
        ip("link set v0 up");
        ready_to.send(()).unwrap();
        from_b.recv().unwrap();
        end(&a_dir, a_addr, &to_b, &from_b, |host, qp, peer| {
            let bytes = pattern(2 << 20, 77);
            // SAFETY: within the buffer, and nothing is outstanding.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), host.addr(0) as *mut u8, bytes.len())
            };
            for (i, opcode, at) in [(1, SendOpcode::Write, 0), (2, SendOpcode::Read, 2 << 20)] {
                let sges = [host.sge(at, 2 << 20)];
                qp.post_send(&rdma(i, opcode, &sges, peer.addr, peer.rkey)).unwrap();
                assert_ok(&host.poll(1)[0], i);
            }
            assert_eq!(host.bytes(2 << 20, 2 << 20), bytes);
            let page = unbroken_fabric::NicPage::open(
                &Runtime::at(&a_dir).unwrap(),
                a_addr.parse().unwrap(),
            )
            .unwrap();
            assert_eq!(page.counters().icrc_errors, 0);
            assert!(host.nic.usable());
            // It may have been down when it was opened, before its carrier came.
            let before = host.events.count(|e| *e == DeviceEvent::PortDown(1));
            ip("link set v0 down");
            host.events.wait_count(before + 1, |e| *e == DeviceEvent::PortDown(1));
            assert!(!host.nic.usable() && host.nic.alive());
            let before = host.events.count(|e| *e == DeviceEvent::PortActive(1));
            ip("link set v0 up");
            host.events.wait_count(before + 1, |e| *e == DeviceEvent::PortActive(1));
            ip("link del v0");
            host.events.wait(|e| *e == DeviceEvent::Fatal);
            assert!(!host.nic.alive());
            to_b.send(peer).unwrap();
        });
    });
    for t in [a, b] {
        t.join().unwrap();
    }
}

#[test]
fn ipv4_over_veth() {
    over_veth("10.99.0.1", "10.99.0.2", 24);
}

#[test]
fn ipv6_over_veth() {
    over_veth("fd99::1", "fd99::2", 64);
}

#[test]
fn addresses_that_do_not_exist() {
    let dir = tempfile::tempdir().unwrap();
    let nics = NicSource::Addresses(vec!["203.0.113.9".parse().unwrap()], DeviceKind::Full);
    let e = SoftNics::new(Config::of(Runtime::at(dir.path()).unwrap(), nics)).err().unwrap();
    assert!(e.to_string().contains("203.0.113.9"), "{e}");
}
