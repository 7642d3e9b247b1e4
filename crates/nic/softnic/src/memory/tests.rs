//! The rules of keys: bounds, rights, generations, and what changes while packets arrive.

use super::*;
use unbroken_roce::{AtomicOp, Memory};
use unbroken_types::{KeyChange, MwBind, PdHandle};

const ALL: Access = Access(0b1_1111);
const QP: u32 = 0x10;

struct Fixture {
    domain: Domain,
    pd: PdHandle,
    bytes: Box<[u64]>,
}

impl Fixture {
    fn new() -> Fixture {
        let domain = Domain::default();
        let pd = domain.alloc_pd().unwrap();
        Fixture { domain, pd, bytes: (0..1024).collect() }
    }

    fn addr(&self) -> u64 {
        self.bytes.as_ptr() as u64
    }

    fn reg(&self, offset: u64, len: u64, access: Access) -> u32 {
        let addr = self.addr() + offset;
        self.domain.reg_mr(self.pd, addr, len, addr, access).unwrap().rkey
    }

    fn write(
        &self,
        key: u32,
        va: u64,
        data: &[u8],
        need: Access,
    ) -> std::result::Result<(), MemError> {
        self.domain.view().of_qp(QP).write(self.pd, key, va, data, need)
    }

    fn read(
        &self,
        key: u32,
        va: u64,
        len: usize,
        need: Access,
    ) -> std::result::Result<Vec<u8>, MemError> {
        let mut out = vec![0xee; len];
        self.domain.view().of_qp(QP).read(self.pd, key, va, &mut out, need).map(|()| out)
    }

    fn byte(&self, offset: usize) -> u8 {
        // SAFETY: inside the buffer; volatile, as the domain writes there by address.
        unsafe { self.bytes.as_ptr().cast::<u8>().add(offset).read_volatile() }
    }

    fn window(&self, kind: WindowType) -> u32 {
        self.domain.alloc_window(self.pd, kind).unwrap()
    }

    fn bind_by(&self, qpn: u32, bind: MwBind) -> std::result::Result<(), MemError> {
        self.domain.view().of_qp(qpn).change_key(self.pd, &KeyChange::Bind(bind))
    }

    fn bind(
        &self,
        window: u32,
        new_key: u32,
        lkey: u32,
        offset: u64,
        length: u64,
        access: Access,
    ) -> MwBind {
        MwBind { window, new_key, lkey, addr: self.addr() + offset, length, access }
    }
}

#[test]
fn bounds_rights_and_domains_are_checked() {
    let f = Fixture::new();
    let key = f.reg(0, 64, Access::LOCAL_WRITE.with(Access::REMOTE_READ));
    let at = f.addr();
    assert!(f.read(key, at, 64, Access::REMOTE_READ).is_ok());
    for (va, len) in [(at - 1, 1), (at, 65), (at + 64, 1), (u64::MAX, 1), (0, 1), (at + 63, 2)] {
        assert_eq!(f.read(key, va, len, Access::NONE), Err(MemError::OutOfBounds), "{va:#x} {len}");
    }
    assert_eq!(f.write(key, at, &[1], Access::REMOTE_WRITE), Err(MemError::AccessDenied));
    let other = f.domain.alloc_pd().unwrap();
    assert_eq!(
        f.domain.view().of_qp(QP).check(other, key, at, 1, Access::NONE),
        Err(MemError::WrongPd)
    );
    for no in [0, key ^ 1, key ^ 0x100, !key] {
        assert_eq!(f.read(no, at, 1, Access::NONE), Err(MemError::NoSuchKey), "{no:#x}");
    }
    f.domain.dereg_mr(key).unwrap();
    assert_eq!(f.read(key, at, 1, Access::NONE), Err(MemError::NoSuchKey));
    assert!(f.domain.dereg_mr(key).is_err());
}

#[test]
fn a_region_registered_anew_keeps_its_keys_and_loses_what_it_was() {
    let f = Fixture::new();
    let (key, at) = (f.reg(0, 64, ALL), f.addr());
    let change = |c: MrChange| f.domain.rereg_mr(key, &c);
    change(MrChange { range: Some((at + 128, 32)), ..MrChange::default() }).unwrap();
    assert_eq!(f.read(key, at, 8, Access::NONE), Err(MemError::OutOfBounds));
    assert_eq!(f.read(key, at + 128, 8, Access::NONE).unwrap(), 16u64.to_ne_bytes());
    change(MrChange { access: Some(Access::NONE), ..MrChange::default() }).unwrap();
    assert_eq!(f.write(key, at + 128, &[1], Access::LOCAL_WRITE), Err(MemError::AccessDenied));
    let other = f.domain.alloc_pd().unwrap();
    change(MrChange { pd: Some(other), ..MrChange::default() }).unwrap();
    assert_eq!(f.read(key, at + 128, 8, Access::NONE), Err(MemError::WrongPd));
    assert_eq!(f.domain.dealloc_pd(other).unwrap_err().errno(), libc::EBUSY);
    f.domain.dealloc_pd(f.pd).expect("nothing is in it any more");
    // All at once; zero-based.
    let pd = f.domain.alloc_pd().unwrap();
    let access = Some(Access::LOCAL_WRITE.with(Access::ZERO_BASED));
    change(MrChange { range: Some((at, 64)), pd: Some(pd), access }).unwrap();
    f.domain.view().of_qp(QP).write(pd, key, 8, &[9; 8], Access::LOCAL_WRITE).unwrap();
    assert_eq!(f.byte(8), 9);
}

#[test]
fn a_wrong_change_of_a_region_changes_nothing() {
    let f = Fixture::new();
    let (key, at) = (f.reg(0, 64, ALL), f.addr());
    let wrong = [
        MrChange { range: Some((u64::MAX - 8, 64)), ..MrChange::default() },
        MrChange { range: Some((4096, 64)), ..MrChange::default() },
        MrChange { pd: Some(PdHandle(77)), range: Some((at + 64, 64)), access: Some(Access::NONE) },
        MrChange { access: Some(Access::REMOTE_WRITE), ..MrChange::default() },
    ];
    for change in wrong {
        assert!(f.domain.rereg_mr(key, &change).is_err(), "{change:?}");
        assert!(f.write(key, at, &[1], Access::REMOTE_WRITE).is_ok(), "{change:?}");
    }
    assert!(f.domain.rereg_mr(key ^ 1, &MrChange::default()).is_err());
}

#[test]
fn zero_based_regions_count_from_0() {
    let f = Fixture::new();
    let key = f.reg(8, 16, ALL.with(Access::ZERO_BASED));
    assert_eq!(f.read(key, 8, 8, Access::REMOTE_READ).unwrap(), 2u64.to_ne_bytes());
    assert_eq!(f.read(key, 9, 8, Access::REMOTE_READ), Err(MemError::OutOfBounds));
    assert_eq!(f.read(key, f.addr() + 8, 8, Access::REMOTE_READ), Err(MemError::OutOfBounds));
}

#[test]
fn the_null_region_takes_everything_and_gives_zeros() {
    let f = Fixture::new();
    let key = f.domain.alloc_null_mr(f.pd).unwrap();
    f.write(key, 77, &[1; 9], Access::LOCAL_WRITE).unwrap();
    assert_eq!(f.read(key, u64::MAX - 3, 9, Access::NONE).unwrap(), [0; 9]);
    for need in [Access::REMOTE_READ, Access::REMOTE_WRITE] {
        assert_eq!(
            f.domain.view().of_qp(QP).check(f.pd, key, 0, 1, need),
            Err(MemError::AccessDenied)
        );
    }
    assert_eq!(f.domain.view().locate(f.pd, key, 0, 1, Access::NONE), Err(MemError::NotInOnePiece));
    let other = f.domain.alloc_pd().unwrap();
    assert_eq!(
        f.domain.view().of_qp(QP).check(other, key, 0, 1, Access::NONE),
        Err(MemError::WrongPd)
    );
    assert!(f.domain.rereg_mr(key, &MrChange::default()).is_err());
    f.domain.dereg_mr(key).unwrap();
    assert_eq!(f.read(key, 0, 1, Access::NONE), Err(MemError::NoSuchKey));
}

/// Two pieces of regions and a null one: 24 + 8 + 16 bytes from 0x1000 on.
fn indirect(f: &Fixture) -> (u32, u32, [IndirectEntry; 3]) {
    let a = f.reg(0, 64, Access::LOCAL_WRITE);
    let b = f.reg(512, 64, Access::LOCAL_WRITE);
    let null = f.domain.alloc_null_mr(f.pd).unwrap();
    let entries = [
        IndirectEntry { lkey: b, addr: f.addr() + 512, len: 24 },
        IndirectEntry { lkey: null, addr: 0, len: 8 },
        IndirectEntry { lkey: a, addr: f.addr() + 8, len: 16 },
    ];
    (f.domain.create_indirect(f.pd, 0x1000, &entries, ALL).unwrap().rkey, a, entries)
}

#[test]
fn an_indirect_key_joins_pieces() {
    let f = Fixture::new();
    let (key, a, _) = indirect(&f);
    let words = |bytes: Vec<u8>| -> Vec<u64> {
        bytes.chunks(8).map(|c| u64::from_ne_bytes(c.try_into().unwrap())).collect()
    };
    assert_eq!(words(f.read(key, 0x1000, 48, Access::REMOTE_READ).unwrap()), [64, 65, 66, 0, 1, 2]);
    assert_eq!(words(f.read(key, 0x1010, 24, Access::NONE).unwrap()), [66, 0, 1]);
    f.write(key, 0x1000 + 20, &[7; 16], Access::REMOTE_WRITE).unwrap();
    assert_eq!(
        [f.byte(512 + 19), f.byte(512 + 20), f.byte(512 + 23), f.byte(512 + 24)],
        [0, 7, 7, 67]
    );
    assert_eq!([f.byte(8), f.byte(11), f.byte(12)], [7, 7, 0]);
    for (va, len) in [(0x0fff, 8), (0x1000 + 41, 8), (0x1030, 1), (0, 1)] {
        assert_eq!(f.read(key, va, len, Access::NONE), Err(MemError::OutOfBounds), "{va:#x}");
    }
    // Atomics lie in one piece.
    let atomic = |va| f.domain.view().of_qp(QP).atomic(f.pd, key, va, AtomicOp::FetchAdd(5));
    assert_eq!(atomic(0x1008), Ok(65));
    assert_eq!((atomic(0x1018), atomic(0x1004)), (Ok(0), Err(MemError::Misaligned)));
    assert_eq!(atomic(0x1000 + 20), Err(MemError::Misaligned));
    // A region that goes takes its piece along, and a message that needs it fails before it changes
    // anything.
    f.domain.dereg_mr(a).unwrap();
    assert_eq!(f.write(key, 0x1000, &[9; 48], Access::REMOTE_WRITE), Err(MemError::NoSuchKey));
    assert_eq!(f.byte(512), 64);
    f.write(key, 0x1000, &[9; 32], Access::REMOTE_WRITE).unwrap();
    f.domain.dereg_mr(key).unwrap();
    assert_eq!(f.read(key, 0x1000, 1, Access::NONE), Err(MemError::NoSuchKey));
}

/// A receive that is shorter than its place: what lies behind its buffer is safe, and the next may
/// be long again.
#[test]
fn behind_a_short_entry_is_nothing() {
    let f = Fixture::new();
    let (key, _, entries) = indirect(&f);
    f.domain.update_entry(key, 0, &IndirectEntry { len: 10, ..entries[0] }).unwrap();
    f.write(key, 0x1000, &[7; 10], Access::REMOTE_WRITE).unwrap();
    for (at, len) in [(0x1000, 11), (0x1009, 2), (0x100a, 1)] {
        assert_eq!(
            f.write(key, at, &vec![8; len], Access::REMOTE_WRITE),
            Err(MemError::OutOfBounds)
        );
    }
    f.write(key, 0x1018, &[9; 1], Access::REMOTE_WRITE).unwrap();
    f.domain.update_entry(key, 0, &entries[0]).unwrap();
    f.write(key, 0x1000, &[6; 24], Access::REMOTE_WRITE).unwrap();
}

#[test]
fn an_entry_is_replaced_by_one_that_fits() {
    let f = Fixture::new();
    let (key, a, entries) = indirect(&f);
    f.domain
        .update_entry(key, 2, &IndirectEntry { lkey: a, addr: f.addr() + 32, len: 16 })
        .unwrap();
    f.write(key, 0x1020, &[5; 16], Access::REMOTE_WRITE).unwrap();
    assert_eq!([f.byte(8), f.byte(32), f.byte(47)], [1, 5, 5]);
    f.domain.update_entry(key, 0, &IndirectEntry { len: 24, ..entries[1] }).unwrap();
    f.write(key, 0x1000, &[6; 48], Access::REMOTE_WRITE).unwrap();
    assert_eq!([f.byte(512), f.byte(32)], [64, 6]);
    let unwritable = f.reg(0, 64, Access::NONE);
    let wrong = [
        (0, IndirectEntry { len: 25, ..entries[0] }),
        (3, entries[0]),
        (0, IndirectEntry { addr: entries[0].addr + 41, ..entries[0] }),
        (0, IndirectEntry { lkey: key, ..entries[0] }),
        (0, IndirectEntry { lkey: 5, ..entries[0] }),
        (2, IndirectEntry { lkey: unwritable, ..entries[2] }),
    ];
    for (i, entry) in wrong {
        assert!(f.domain.update_entry(key, i, &entry).is_err(), "{i} {entry:?}");
    }
    assert!(f.domain.update_entry(a, 0, &entries[0]).is_err(), "a plain region has no entries");
    assert!(f.domain.create_indirect(f.pd, 0, &[], ALL).is_err());
    let whole = IndirectEntry { len: u64::MAX, ..entries[1] };
    assert!(f.domain.create_indirect(f.pd, 0, &[whole, whole], ALL).is_err());
}

/// Half of the entries' bytes are written by another thread, which must not find the old place once
/// the update has returned.
#[test]
fn nothing_writes_to_an_entry_that_was_replaced() {
    let f = Fixture::new();
    let null = f.domain.alloc_null_mr(f.pd).unwrap();
    let real = IndirectEntry { lkey: f.reg(0, 4096, ALL), addr: f.addr(), len: 4096 };
    let key = f.domain.create_indirect(f.pd, 0, &[real], ALL).unwrap().rkey;
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            for n in 0u8.. {
                f.write(key, 0, &[n | 1; 4096], Access::REMOTE_WRITE).unwrap();
                if stop.load(Relaxed) {
                    break;
                }
            }
        });
        for _ in 0..200 {
            f.domain.update_entry(key, 0, &IndirectEntry { lkey: null, ..real }).unwrap();
            // SAFETY: inside the buffer; by address, as the domain writes.
            unsafe {
                std::ptr::with_exposed_provenance_mut::<u8>(f.addr() as usize).write_bytes(0, 4096)
            };
            assert!((0..4096).all(|i| f.byte(i) == 0));
            f.domain.update_entry(key, 0, &real).unwrap();
        }
        stop.store(true, Relaxed);
    });
}

#[test]
fn a_window_of_type_1_is_for_its_domain_and_changes_its_key_with_each_binding() {
    let f = Fixture::new();
    let (region, at) = (f.reg(0, 256, Access::LOCAL_WRITE.with(Access::MW_BIND)), f.addr());
    let first = f.window(WindowType::One);
    assert_eq!(
        f.read(first, at, 1, Access::REMOTE_READ),
        Err(MemError::NoSuchKey),
        "not bound yet"
    );
    f.bind_by(QP, f.bind(first, first + 1, region, 64, 64, Access::REMOTE_WRITE)).unwrap();
    f.write(first + 1, at + 64, &[1; 64], Access::REMOTE_WRITE).unwrap();
    assert_eq!(f.write(first + 1, at + 63, &[1], Access::REMOTE_WRITE), Err(MemError::OutOfBounds));
    assert_eq!(
        f.write(first + 1, at + 127, &[1; 2], Access::REMOTE_WRITE),
        Err(MemError::OutOfBounds)
    );
    assert_eq!(f.read(first + 1, at + 64, 1, Access::REMOTE_READ), Err(MemError::AccessDenied));
    assert_eq!(
        f.read(first + 1, at + 64, 1, Access::NONE),
        Err(MemError::AccessDenied),
        "no local key"
    );
    assert!(f
        .domain
        .view()
        .of_qp(QP + 1)
        .check(f.pd, first + 1, at + 64, 1, Access::REMOTE_WRITE)
        .is_ok());
    // The region stays while the window is on it.
    assert_eq!(f.domain.dereg_mr(region).unwrap_err().errno(), libc::EBUSY);
    assert_eq!(f.domain.rereg_mr(region, &MrChange::default()).unwrap_err().errno(), libc::EBUSY);
    assert!(f.domain.dereg_mr(first + 1).is_err(), "a window is no region");
    // By another QP, to another place.
    f.bind_by(QP + 1, f.bind(first, first + 2, region, 0, 8, Access::REMOTE_READ)).unwrap();
    assert_eq!(f.write(first + 1, at + 64, &[1], Access::REMOTE_WRITE), Err(MemError::NoSuchKey));
    assert!(f.read(first + 2, at, 8, Access::REMOTE_READ).is_ok());
    // Of length 0: bound to nothing.
    f.bind_by(QP, f.bind(first, first + 3, 0, 0, 0, Access::NONE)).unwrap();
    assert_eq!(f.read(first + 2, at, 8, Access::REMOTE_READ), Err(MemError::NoSuchKey));
    assert_eq!(f.read(first + 3, at, 1, Access::REMOTE_READ), Err(MemError::NoSuchKey));
    f.domain.dereg_mr(region).unwrap();
    f.domain.dealloc_window(first).unwrap();
    assert!(f.domain.dealloc_window(first).is_err());
}

#[test]
fn a_window_of_type_2_is_for_the_qp_that_bound_it_until_it_is_invalidated() {
    let f = Fixture::new();
    let (region, at) = (f.reg(0, 256, ALL), f.addr());
    let w = f.window(WindowType::Two);
    let key = w & !0xff | 0x5a;
    let zero = Access::REMOTE_READ.with(Access::REMOTE_ATOMIC).with(Access::ZERO_BASED);
    f.bind_by(QP, f.bind(w, key, region, 64, 64, zero)).unwrap();
    assert_eq!(f.read(key, 8, 8, Access::REMOTE_READ).unwrap(), 9u64.to_ne_bytes());
    assert_eq!(f.read(key, at + 64, 8, Access::REMOTE_READ), Err(MemError::OutOfBounds));
    assert_eq!(f.domain.view().of_qp(QP).atomic(f.pd, key, 0, AtomicOp::FetchAdd(1)), Ok(8));
    let view = f.domain.view();
    let other = view.of_qp(QP + 1);
    assert_eq!(other.check(f.pd, key, 0, 1, Access::REMOTE_READ), Err(MemError::WrongQp));
    assert_eq!(other.invalidate(f.pd, key), Err(MemError::WrongQp));
    assert_eq!(
        f.bind_by(QP, f.bind(w, key + 1, region, 0, 8, zero)),
        Err(MemError::Bind),
        "not free"
    );
    let own = view.of_qp(QP);
    assert_eq!(own.invalidate(f.pd, key + 1), Err(MemError::NoSuchKey));
    assert_eq!(own.invalidate(f.pd, region), Err(MemError::NoSuchKey), "a region");
    own.invalidate(f.pd, key).unwrap();
    assert_eq!(own.check(f.pd, key, 0, 1, Access::REMOTE_READ), Err(MemError::NoSuchKey));
    assert_eq!(own.invalidate(f.pd, key), Err(MemError::NoSuchKey));
    drop(view);
    assert_eq!(
        f.bind_by(QP, f.bind(w, key, region, 0, 8, zero)),
        Err(MemError::Bind),
        "the same key again"
    );
    f.bind_by(QP, f.bind(w, key + 1, region, 0, 8, zero)).unwrap();
    // Freed while it is bound.
    f.domain.dealloc_window(w).unwrap();
    assert_eq!(f.read(key + 1, 0, 1, Access::REMOTE_READ), Err(MemError::NoSuchKey));
    f.domain.dereg_mr(region).unwrap();
}

thread_local! {
    /// Leaves out that a window of type 2 is for one QP, to show that tests notice.
    pub(super) static ANY_QP: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

#[test]
fn a_window_that_any_qp_may_use_is_noticed() {
    ANY_QP.set(true);
    let test = a_window_of_type_2_is_for_the_qp_that_bound_it_until_it_is_invalidated;
    let failed = std::panic::catch_unwind(test).is_err();
    ANY_QP.set(false);
    assert!(failed);
}

#[test]
fn what_may_not_be_bound_is_refused() {
    let f = Fixture::new();
    let unbindable = f.reg(0, 256, Access::LOCAL_WRITE);
    let readable = f.reg(0, 256, Access::MW_BIND);
    let other_pd = f.domain.alloc_pd().unwrap();
    let foreign = f.domain.reg_mr(other_pd, f.addr(), 256, f.addr(), ALL).unwrap().lkey;
    let (w, one) = (f.window(WindowType::Two), f.window(WindowType::One));
    let r = Access::REMOTE_READ;
    let wrong = [
        (f.bind(w, w + 1, unbindable, 0, 8, r), MemError::AccessDenied),
        (f.bind(w, w + 1, readable, 0, 8, Access::REMOTE_WRITE), MemError::AccessDenied),
        (f.bind(w, w + 1, readable, 0, 257, r), MemError::OutOfBounds),
        (f.bind(w, w + 1, foreign, 0, 8, r), MemError::WrongPd),
        (f.bind(w, w + 1, 0, 0, 8, r), MemError::NoSuchKey),
        (f.bind(w, w, readable, 0, 8, r), MemError::Bind),
        (f.bind(w, w + 0x100, readable, 0, 8, r), MemError::Bind),
        (f.bind(w, w + 1, readable, 0, 0, r), MemError::Bind),
        (f.bind(one, one + 1, readable, 0, 8, r.with(Access::ZERO_BASED)), MemError::Bind),
        (f.bind(readable, readable + 1, readable, 0, 8, r), MemError::NoSuchKey),
    ];
    for (bind, why) in wrong {
        assert_eq!(f.bind_by(QP, bind), Err(why), "{bind:?}");
    }
    f.bind_by(QP, f.bind(w, w + 1, readable, 0, 256, r)).expect("nothing has changed");
}

/// While a message that goes through a window arrives, the window is invalidated: the packets
/// behind it find nothing.
#[test]
fn a_window_that_goes_in_mid_message_takes_the_rest_away() {
    let f = Fixture::new();
    let (region, at) = (f.reg(0, 4096, ALL), f.addr());
    let w = f.window(WindowType::Two);
    f.bind_by(QP, f.bind(w, w + 1, region, 0, 4096, Access::REMOTE_WRITE)).unwrap();
    f.domain.view().of_qp(QP).check(f.pd, w + 1, at, 4096, Access::REMOTE_WRITE).unwrap();
    f.write(w + 1, at, &[0xff; 1024], Access::REMOTE_WRITE).unwrap();
    f.domain.view().of_qp(QP).change_key(f.pd, &KeyChange::Invalidate(w + 1)).unwrap();
    assert_eq!(
        f.write(w + 1, at + 1024, &[0xff; 1024], Access::REMOTE_WRITE),
        Err(MemError::NoSuchKey)
    );
    assert_eq!((f.byte(1023), f.byte(1024)), (0xff, 128));
}

#[test]
fn the_two_keys_of_a_plain_domain_are_no_others() {
    let [one, two] = [0, 1].map(|_| Fixture { domain: Domain::plain().unwrap(), ..Fixture::new() });
    let pds = [&one, &two].map(|f| f.domain.alloc_pd().unwrap());
    assert_ne!(pds[0], pds[1]);
    assert_eq!(one.domain.use_pd(pds[1]).unwrap_err().errno(), libc::EINVAL);
    let addr = one.addr();
    let keys: Vec<MrKeys> = (0..1000)
        .map(|_| one.domain.reg_mr(pds[0], addr, 64, addr, ALL.with(Access::LOCAL_WRITE)).unwrap())
        .collect();
    assert!(keys.iter().all(|k| k.lkey & REMOTE_BIT == 0 && k.rkey & REMOTE_BIT != 0));
    let view = one.domain.view();
    let mem = view.of_qp(QP);
    for MrKeys { lkey, rkey } in keys {
        for (key, need, right) in [
            (lkey, Access::NONE, true),
            (lkey, Access::LOCAL_WRITE, true),
            (rkey, Access::REMOTE_READ, true),
            (rkey, Access::REMOTE_WRITE, true),
            (rkey, Access::NONE, false),
            (rkey, Access::LOCAL_WRITE, false),
            (lkey, Access::REMOTE_READ, false),
            (lkey, Access::REMOTE_ATOMIC, false),
        ] {
            assert_eq!(mem.check(pds[0], key, addr, 64, need).is_ok(), right, "{key:#x} {need:?}");
        }
    }
}
