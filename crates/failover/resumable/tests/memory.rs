//! Regions and domains over NICs whose numbers mean something else on each.

mod common;

use common::mock::{Events, Net};
use common::{End, Host, NICS};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use unbroken_resumable::{EventInterceptor, LogicalMemory, ResumableDevice};
use unbroken_types::{Access, NicKey, PdHandle};
use unbroken_verbs::{Backlog, Device, KeyAnswer, KeyRow, MemoryDomain, MrChange, MrKeys, QpInit};

fn reg(view: &Arc<dyn MemoryDomain>, pd: PdHandle, host: &Host) -> MrKeys {
    let addr = host.addr(0);
    view.reg_mr(pd, addr, 8, addr, Access(15)).unwrap()
}

#[test]
fn a_region_has_the_keys_of_its_default_nic_and_others_elsewhere() {
    let net = Net::default();
    let host = Host::new(&net, 0, 64, false);
    let lkey = host.keys.lkey;
    assert!(!host.memory.is_foreign(0));
    assert_eq!(host.memory.lkey_on(0, lkey, 0).unwrap(), lkey);
    let there = host.memory.lkey_on(0, lkey, 1).unwrap();
    assert_ne!(there, lkey, "the mock gives other numbers on each NIC");
    assert_eq!(host.memory.lkey_on(0, lkey, 1).unwrap(), there, "it is registered there once");
    // The same number of another NIC's contexts is another region, or none.
    assert_eq!(host.memory.lkey_on(2, lkey, 2).unwrap_err().errno(), libc::EINVAL);
    let row = |export: Vec<KeyRow>| export.into_iter().find(|r| r.rkey == lkey).unwrap();
    let key = |nic, rkey| NicKey { nic, key_set: 1, rkey };
    let known = KeyRow { default: 0, rkey: host.keys.rkey, on: vec![key(0, lkey), key(1, there)] };
    assert_eq!(row(host.memory.export()), known);
    let KeyAnswer::Known(answer) = host.memory.answer(0, host.keys.rkey) else { panic!() };
    assert_eq!(
        (answer.on.len(), &answer.on[..2]),
        (NICS, &known.on[..]),
        "who is asked registers it everywhere"
    );
    assert_eq!([0, 9].map(|nic| host.memory.answer(nic, 1)), [const { KeyAnswer::NoRegion }; 2]);
    assert_eq!(host.memory.fill_all(), 0);
    assert_eq!(host.memory.export().iter().map(|row| row.on.len()).collect::<Vec<_>>(), [NICS; 3]);
}

#[test]
fn regions_that_no_peer_may_touch_have_no_remote_key_to_differ_in() {
    let net = Net::default();
    let host = Host::new(&net, 0, 64, false);
    let addr = host.addr(0);
    let local = || host.view.reg_mr(host.pd, addr, 8, addr, Access::LOCAL_WRITE).unwrap();
    let keys = [local(), local()];
    assert_eq!(keys.map(|k| k.rkey), [0, 0], "as the NIC gives it");
    assert_eq!(host.memory.answer(0, 0), KeyAnswer::NoRegion);
    keys.iter().for_each(|k| host.view.dereg_mr(k.lkey).unwrap());
}

#[test]
fn regions_of_two_nics_with_equal_keys_are_told_apart() {
    let net = Net::default();
    let host = Host::new(&net, 0, 64, false);
    let other = host.memory.of(1);
    // NIC 1 counts one ahead of NIC 0 in this mock, so that equal numbers come sooner or later.
    let mine: Vec<MrKeys> = (0..8).map(|_| reg(&host.view, host.pd, &host)).collect();
    let theirs: Vec<MrKeys> = (0..8).map(|_| reg(&other, host.pd, &host)).collect();
    let both: Vec<u32> =
        mine.iter().map(|k| k.lkey).filter(|k| theirs.iter().any(|t| t.lkey == *k)).collect();
    assert!(!both.is_empty(), "{mine:?} {theirs:?}");
    let on_third = |default, lkey| host.memory.lkey_on(default, lkey, 2).unwrap();
    assert!(both.iter().all(|k| on_third(0, *k) != on_third(1, *k)));
    other.dereg_mr(both[0]).unwrap();
    assert!(
        host.memory.lkey_on(1, both[0], 1).is_err() && host.memory.lkey_on(0, both[0], 0).is_ok()
    );
}

#[test]
fn deregistration_ends_on_every_nic_and_is_done_once() {
    let net = Net::default();
    let host = Host::new(&net, 0, 64, true);
    let changes = Arc::new(AtomicU32::new(0));
    let told = changes.clone();
    host.memory.set_change_hook(move || {
        told.fetch_add(1, Ordering::Relaxed);
    });
    let generation = host.memory.generation();
    for _ in 0..50 {
        let keys = reg(&host.view, host.pd, &host);
        // The thread may be anywhere by now.
        host.view.dereg_mr(keys.lkey).unwrap();
        assert_eq!(host.view.dereg_mr(keys.lkey).unwrap_err().errno(), libc::EINVAL);
        assert!(host.memory.lkey_on(0, keys.lkey, 1).is_err());
    }
    assert_eq!(host.memory.fill_all(), 0);
    assert_eq!(
        (0..NICS).map(|nic| net.regions((0, nic))).collect::<Vec<_>>(),
        [3; NICS],
        "those that the host has"
    );
    assert!(host.memory.generation() >= generation + 100 && changes.load(Ordering::Relaxed) >= 100);
}

#[test]
fn the_thread_brings_regions_to_the_other_nics() {
    let net = Net::default();
    let host = Host::new(&net, 0, 64, true);
    let start = Instant::now();
    while host.memory.export().iter().any(|row| row.on.len() < NICS) {
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", host.memory.export());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_region_is_made_while_its_default_nic_is_dead_and_after_it_was_replaced() {
    let net = Net::default();
    let host = Host::new(&net, 0, 64, false);
    net.kill((0, 0), None);
    let early = host.keys;
    let lent = reg(&host.view, host.pd, &host);
    assert!(host.memory.is_foreign(0), "its keys are another NIC's");
    assert_eq!(host.memory.lkey_on(0, lent.lkey, 1).unwrap(), lent.lkey);
    assert_eq!(host.memory.lkey_on(0, lent.lkey, 0).unwrap_err().errno(), libc::EIO);
    // It is healed: a fresh device, which knows nothing of the old one's regions.
    let events = Arc::new(Events::default());
    let interceptor = EventInterceptor::new(events);
    let device = net.open((0, 0), interceptor.clone());
    let process =
        unbroken_resumable::Host { spawn: |_, _| Err(std::io::Error::other("none")), now_us: || 0 };
    let healed = ResumableDevice::new(0, device, &interceptor, &host.memory, process).unwrap();
    assert!(healed.capabilities().holds && healed.capabilities().shared_objects);
    let (a, b) = (
        host.memory.lkey_on(0, early.lkey, 0).unwrap(),
        host.memory.lkey_on(0, lent.lkey, 0).unwrap(),
    );
    assert_ne!(a, b);
    assert_eq!(net.regions((0, 0)), 2);
    // What is made now has a key of its own, also where the NIC gives a number that the application
    // has already.
    let fresh: Vec<MrKeys> = (0..6).map(|_| reg(&host.view, host.pd, &host)).collect();
    let mut all: Vec<u32> = fresh.iter().chain([&early, &lent]).map(|k| k.lkey).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 8, "{fresh:?} {early:?} {lent:?}");
}

/// Whoever polls may use a QP for a moment after it was destroyed: its domain is free
/// all the same.
#[test]
fn a_destroyed_qp_does_not_keep_its_domain() {
    let net = Net::default();
    let host = Host::new(&net, 0, 64, false);
    let pd = host.view.alloc_pd().unwrap();
    let End { init, qp, .. } = End::new(&host, true, None);
    qp.destroy();
    // One that is made ahead is nothing to the application until it is used.
    let ahead = QpInit { pd, standby: true, ..init.clone() };
    let qp = host.nics[0].create_holding_qp(&ahead).unwrap();
    qp.adopt(Backlog::default()).unwrap();
    assert_eq!(host.view.dealloc_pd(pd).unwrap_err().errno(), libc::EBUSY);
    let other = host.view.alloc_pd().unwrap();
    let unused = host.nics[0].create_holding_qp(&QpInit { pd: other, ..ahead }).unwrap();
    host.view.dealloc_pd(other).unwrap();
    unused.destroy();
    let in_hands = qp.clone();
    qp.destroy();
    host.view.dealloc_pd(pd).unwrap();
    drop(in_hands);
}

#[test]
fn a_dead_nic_is_closed_once_its_last_qp_has_left() {
    let net = Net::default();
    let mut host = Host::new(&net, 0, 64, false);
    let End { qp, .. } = End::new(&host, true, None);
    let there = host.id(0);
    net.kill(there, None);
    drop(host.nics.remove(0));
    assert!(net.is_open(there), "the QP needs it");
    qp.destroy();
    drop(qp);
    assert!(!net.is_open(there), "its driver may wait for that");
    let lkey = host.keys.lkey;
    assert_eq!(host.memory.lkey_on(0, lkey, 0).unwrap_err().errno(), libc::EIO);
    host.memory.lkey_on(0, lkey, 1).unwrap();
    assert!(net.is_open(host.id(1)), "regions and domains go on elsewhere");
}

#[test]
fn what_is_made_as_a_nic_is_closed_does_not_keep_it_open() {
    let net = Net::default();
    let mut host = Host::new(&net, 0, 64, true);
    assert_eq!(host.memory.fill_all(), 0);
    let there = host.id(1);
    net.meet_at_registrations(there);
    let lkey = reg(&host.view, host.pd, &host).lkey;
    let deadline = Instant::now() + Duration::from_secs(20);
    let wait = |what: &str, condition: &dyn Fn() -> bool| {
        while !condition() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::yield_now();
        }
    };
    wait("the NIC registers it", &|| net.met() == 1);
    net.kill(there, None);
    drop(host.nics.remove(1));
    net.let_registrations_go();
    wait("the NIC is closed", &|| !net.is_open(there));
    host.memory.lkey_on(0, lkey, 2).unwrap();
}

#[test]
fn a_changed_region_is_changed_everywhere_and_domains_are_counted() {
    let net = Net::default();
    let host = Host::new(&net, 0, 64, false);
    assert_eq!(host.memory.fill_all(), 0);
    let pd = host.view.alloc_pd().unwrap();
    let change = MrChange { range: Some((host.addr(8), 16)), pd: Some(pd), access: None };
    host.view.rereg_mr(host.keys.lkey, &change).unwrap();
    assert_eq!(host.view.dealloc_pd(pd).unwrap_err().errno(), libc::EBUSY);
    assert_eq!(
        host.view
            .rereg_mr(host.keys.lkey, &MrChange { pd: Some(PdHandle(999)), ..change })
            .unwrap_err()
            .errno(),
        libc::EINVAL
    );
    for nic in 0..NICS {
        assert_eq!(
            net.region((0, nic), host.memory.lkey_on(0, host.keys.lkey, nic).unwrap()),
            (host.addr(8), 16)
        );
    }
    host.view.dereg_mr(host.keys.lkey).unwrap();
    host.view.dealloc_pd(pd).unwrap();
    assert_eq!(host.view.use_pd(pd).unwrap_err().errno(), libc::EINVAL);
    let memory = LogicalMemory::new(1, |_, _| Ok(()));
    let view = memory.of(0);
    let pd = view.alloc_pd().unwrap();
    assert_eq!(
        view.reg_mr(pd, 0, 1, 0, Access(1)).unwrap_err().errno(),
        libc::EIO,
        "no NIC is open"
    );
    view.dealloc_pd(pd).unwrap();
}

#[test]
fn regions_are_made_ready_where_that_is_wanted_and_elsewhere_when_they_are_needed() {
    let net = Net::default();
    let host = Host::new(&net, 0, 64, true);
    let there = |nic| net.regions((0, nic));
    // Those of the host itself are on their way to all.
    let deadline = Instant::now() + Duration::from_secs(20);
    let all = 3;
    while (0..NICS).any(|nic| there(nic) < all) {
        assert!(Instant::now() < deadline, "{:?}", (0..NICS).map(there).collect::<Vec<_>>());
        std::thread::yield_now();
    }
    let before: Vec<usize> = (0..NICS).map(there).collect();
    host.memory.prepare(vec![vec![2]; NICS]);
    let addr = host.addr(0);
    let reg = || host.view.reg_mr(host.pd, addr, 8, addr, Access(15)).unwrap();
    // The thread has done with the first when it is at the second.
    let keys = [reg(), reg()];
    while there(2) < before[2] + 2 {
        assert!(Instant::now() < deadline, "it is not on NIC 2");
        std::thread::yield_now();
    }
    assert_eq!(there(1), before[1], "nobody wants it there");
    let on = |answer: KeyAnswer| match answer {
        KeyAnswer::Known(row) => Some(row.on.iter().map(|key| key.nic).collect::<Vec<_>>()),
        _ => None,
    };
    assert_eq!(on(host.memory.answer(0, keys[0].rkey)), Some(vec![0, 2]));
    assert_eq!(there(1), before[1], "no queue pair of it is there");
    // A queue pair goes there all the same: a peer may name the region there, and is told of it
    // when a thread has registered it.
    let init = QpInit { standby: false, ..End::new(&host, true, None).init };
    let _away = host.nics[1].create_holding_qp(&init).unwrap();
    while on(host.memory.answer(0, keys[0].rkey)) != Some(vec![0, 1, 2]) {
        assert!(Instant::now() < deadline, "it is not on NIC 1");
        std::thread::yield_now();
    }
    assert_eq!(there(1), before[1] + 1, "the others are not asked for");
}

#[test]
fn regions_are_made_side_by_side_on_other_nics() {
    let net = Net::default();
    let host = Host::new(&net, 0, 64, true);
    net.meet_at_registrations((0, 1));
    let keys: Vec<MrKeys> = (0..6).map(|_| reg(&host.view, host.pd, &host)).collect();
    let deadline = Instant::now() + Duration::from_secs(30);
    let there = |rkey| {
        let export = host.memory.export();
        let row = export.into_iter().find(|row| row.rkey == rkey).unwrap();
        row.on.iter().any(|key| key.nic == 1)
    };
    while !keys.iter().all(|keys| there(keys.rkey)) {
        assert!(Instant::now() < deadline, "they are not on NIC 1");
        std::thread::yield_now();
    }
    assert!((2..=4).contains(&net.met()), "{} were made at the same time", net.met());
}

/// Descriptors of this process that are open on a file.
fn open_on(path: &std::path::Path) -> usize {
    let is_it = |fd: &std::fs::DirEntry| std::fs::read_link(fd.path()).is_ok_and(|to| to == path);
    std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter(is_it).count()
}

#[test]
fn the_descriptor_of_a_dma_buf_is_kept_as_long_as_its_region() {
    let net = Net::default();
    let host = Host::new(&net, 0, 64, false);
    let (file, path) = tempfile::NamedTempFile::new().unwrap().into_parts();
    let make = |fd| host.view.reg_dmabuf_mr(host.pd, fd, 0, 8, 1 << 40, Access(15));
    assert_eq!(make(-1).unwrap_err().errno(), libc::EBADF);
    let before = net.regions(host.id(0));
    let keys = make(file.as_raw_fd()).unwrap();
    drop(file);
    assert_eq!(open_on(&path), 1, "the program closes its own");
    let there = host.memory.lkey_on(0, keys.lkey, 1).unwrap();
    assert_eq!(net.region(host.id(1), there), (1 << 40, 8), "a NIC that stands in has it, too");

    let change = MrChange { range: Some((host.addr(0), 8)), ..MrChange::default() };
    for nic_lives in [true, false] {
        if !nic_lives {
            net.kill(host.id(0), None);
        }
        let refused = host.view.rereg_mr(keys.lkey, &change).unwrap_err();
        assert_eq!(refused.errno(), libc::EINVAL, "its NIC lives: {nic_lives}");
    }
    assert_eq!(net.region(host.id(1), there), (1 << 40, 8), "it is what it was");
    host.view.dereg_mr(keys.lkey).unwrap();
    assert_eq!((net.regions(host.id(0)), open_on(&path)), (before, 0));
}
