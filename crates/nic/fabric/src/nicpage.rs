//! `shm/nics/<addr>.page`: the counters of a NIC, its accounts of credit and the ports that it
//! sends from, for each of its slots, and the counter of its QPNs, which begins anywhere.
//!
//! Only the process that owns a slot writes its counters (its [`Credit`] is shared with all
//! senders). They go on when another process takes the slot, so that their sum over the slots is
//! what the NIC did. It works for any address, also where there is no fabric.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::rand::{getrandom, GetRandomFlags};
use unbroken_events::{NicCounter, NicCounters, NIC_COUNTERS};
use unbroken_runtime::{Presence, ProcessName, Runtime};

use crate::credit::Credit;
use crate::error::{FabricError, Result};
use crate::line::Line;
use crate::map::{Header, Layout, Mapped};

/// Slots of a NIC: processes that can have it open at one time.
pub const SLOTS: usize = 256;

/// The counters of one slot. Its owner adds with `Relaxed`.
///
/// Times are those of whichever thread had the engine. [`now_us`](crate::now_us) may go back
/// between threads, by what one was kept from its core between reading the clock and taking the
/// engine: who compares a time here with its own clock must not subtract without looking which is
/// later.
#[repr(C, align(128))]
pub struct SlotCounters {
    /// The process that has, or had last, the slot: its pid as it sees it, and the id of its
    /// presence.
    pub pid: AtomicU64,
    /// See [`pid`](Self::pid).
    pub process: AtomicU64,
    /// In the order of [`NIC_COUNTERS`].
    counters: [AtomicU64; NIC_COUNTERS.len()],
    /// When the last packet with payload of an application came; 0: none yet.
    pub last_data_rx_us: AtomicU64,
    /// UDP ports that the slot's packets come from, 16 bits each.
    tx_ports: AtomicU64,
    _unused: [AtomicU64; SLOT_WORDS - 4 - NIC_COUNTERS.len()],
}

/// Words of a slot: no slot shares a pair of cache lines with another.
const SLOT_WORDS: usize = 16;

/// UDP ports that a slot sends from.
pub const TX_PORTS: usize = 4;

impl SlotCounters {
    /// Notes the process that takes the slot.
    pub fn take(&self, process: ProcessName) {
        self.process.store(process.id, Ordering::Relaxed);
        self.pid.store(u64::from(process.pid), Ordering::Relaxed);
    }

    /// Adds to a counter that only this process writes: cheaper than an atomic addition.
    #[inline]
    pub fn add(&self, counter: NicCounter, n: u64) {
        let counter = &self.counters[counter as usize];
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// The value of a counter.
    pub fn get(&self, counter: NicCounter) -> u64 {
        self.counters[counter as usize].load(Ordering::Relaxed)
    }

    /// Tells receivers which ports the slot's packets come from. They stay when its owner has gone:
    /// packets may be on their way.
    pub fn set_tx_ports(&self, ports: [u16; TX_PORTS]) {
        let all = ports.iter().fold(0, |all, port| all << 16 | u64::from(*port));
        self.tx_ports.store(all, Ordering::Release);
    }

    /// Whether the slot's packets come from this port.
    pub fn sends_from(&self, port: u16) -> bool {
        let all = self.tx_ports.load(Ordering::Acquire);
        port != 0 && (0..TX_PORTS).any(|i| (all >> (16 * i)) as u16 == port)
    }
}

#[repr(C)]
struct Page {
    header: Header,
    /// Counts QPs, from a random number on; 0 before it has one.
    next_index: AtomicU64,
    /// What leaves, and what arrives, where a rate is set.
    lines: [Line; 2],
    /// The time of the last `wqe-error` that struck.
    wqe_error_us: AtomicU64,
    _unused: [AtomicU64; 4],
    slots: [SlotCounters; SLOTS],
    credits: [Credit; SLOTS],
}

// SAFETY: repr(C), the header first, and atomics only.
#[allow(unsafe_code)]
unsafe impl Layout for Page {
    const MAGIC: u64 = u64::from_le_bytes(*b"UNBNICPG");
    const VERSION: u32 = 3;
}

/// The shared page of a NIC.
pub struct NicPage(Mapped<Page>);

/// QP indices that are given out: 2 to 0xFFFE.
const INDICES: u64 = 0xfffe - 2 + 1;

impl NicPage {
    /// Opens the page of the NIC with this address; makes it if it is missing.
    pub fn open(runtime: &Runtime, addr: IpAddr) -> Result<NicPage> {
        let path = runtime.nic_pages().join(format!("{addr}.page"));
        let page: Mapped<Page> = Mapped::open_or_create(&path)?;
        if page.next_index.load(Ordering::Relaxed) == 0 {
            let mut start = [0; 4];
            getrandom(&mut start, GetRandomFlags::empty())
                .map_err(|e| FabricError::io(&path, "draw the first QPN for it")(e.into()))?;
            let start = u64::from(u32::from_ne_bytes(start)) + 1;
            // Whoever comes first.
            let _ =
                page.next_index.compare_exchange(0, start, Ordering::Relaxed, Ordering::Relaxed);
        }
        Ok(NicPage(page))
    }

    /// The index of the next QP, 2 to 0xFFFE: all of them come before one comes again, whoever
    /// asks. The first is random.
    pub fn next_index(&self) -> u32 {
        (self.0.next_index.fetch_add(1, Ordering::Relaxed) % INDICES + 2) as u32
    }

    /// The lines that a rate is kept on: of what leaves (first) and of what arrives.
    pub fn lines(&self) -> &[Line; 2] {
        &self.0.lines
    }

    /// Whether the `wqe-error` that fell due at `due_us` is still to strike. Only one caller, in
    /// whatever process, is told so.
    pub fn take_wqe_error(&self, due_us: u64, now_us: u64) -> bool {
        // A time later than now is of an earlier boot.
        let next = |last_us: u64| (last_us < due_us || last_us > now_us).then_some(due_us);
        self.0.wqe_error_us.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }

    /// The counters of a slot, 0 to 255.
    #[inline]
    pub fn slot(&self, slot: u8) -> &SlotCounters {
        &self.0.slots[usize::from(slot)]
    }

    /// What the receiver at a slot, 0 to 255, still takes of UC and UD.
    #[inline]
    pub fn credit(&self, slot: u8) -> &Credit {
        &self.0.credits[usize::from(slot)]
    }

    /// What the NIC did, over all slots.
    pub fn counters(&self) -> NicCounters {
        let slots = || self.0.slots.iter();
        let last_data_rx_us = slots().map(|s| s.last_data_rx_us.load(Ordering::Relaxed)).max();
        NicCounters::from_fn(last_data_rx_us.unwrap_or(0), |of| {
            slots().map(|s| s.get(of)).fold(0, u64::wrapping_add)
        })
    }

    /// The living processes that have a slot.
    pub fn users(&self, presence: &Presence) -> Vec<ProcessName> {
        let name = |s: &SlotCounters| ProcessName {
            pid: s.pid.load(Ordering::Relaxed) as u32,
            id: s.process.load(Ordering::Relaxed),
        };
        let mut users: Vec<ProcessName> =
            self.0.slots.iter().map(name).filter(|u| u.id != 0).collect();
        users.sort_unstable();
        users.dedup();
        users.retain(|u| presence.lives(u.id));
        users
    }

    /// The addresses of the NICs that have a page.
    pub fn addresses(runtime: &Runtime) -> Result<Vec<IpAddr>> {
        let mut addrs: Vec<IpAddr> = names(runtime)?.iter().filter_map(|n| address(n)).collect();
        addrs.sort_unstable();
        Ok(addrs)
    }

    /// What lies beside the pages and is none, by name.
    pub fn strays(runtime: &Runtime) -> Result<Vec<String>> {
        let mut names = names(runtime)?;
        // A page that is being made has another name at first.
        names.retain(|name| address(name).is_none() && !name.ends_with(".new"));
        names.sort_unstable();
        Ok(names)
    }
}

/// The names in the folder of pages.
fn names(runtime: &Runtime) -> Result<Vec<String>> {
    let folder = runtime.nic_pages();
    let io = |e: io::Error| FabricError::io(&folder, "read it")(e);
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).map_err(io)? {
        names.push(entry.map_err(io)?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// The address in the name of a page.
fn address(name: &str) -> Option<IpAddr> {
    name.strip_suffix(".page")?.parse().ok()
}

/// Removes the pages of all NICs.
pub(crate) fn remove_all(runtime: &Runtime) -> Result<()> {
    for addr in NicPage::addresses(runtime)? {
        let path = runtime.nic_pages().join(format!("{addr}.page"));
        fs::remove_file(&path).map_err(FabricError::io(&path, "remove it"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_shared_and_summed() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let addr: IpAddr = "10.1.2.3".parse().unwrap();
        let (one, two) =
            (NicPage::open(&runtime, addr).unwrap(), NicPage::open(&runtime, addr).unwrap());
        let presence = Presence::join(&runtime).unwrap();
        one.slot(0).take(presence.name());
        one.slot(7).take(presence.name());
        // Of this pid, too: in another PID namespace, or before it came to this process.
        one.slot(1).take(ProcessName { id: 5, ..presence.name() });
        one.slot(0).add(NicCounter::TxBytes, 100);
        two.slot(255).add(NicCounter::TxBytes, 23);
        two.slot(255).last_data_rx_us.store(9, Ordering::Relaxed);
        assert_eq!(one.counters().tx_bytes, 123);
        assert_eq!(one.counters().last_data_rx_us, 9);
        assert_eq!(two.users(&presence), [presence.name()]);
        assert_eq!(NicPage::addresses(&runtime).unwrap(), [addr]);
    }

    #[test]
    fn a_wqe_error_strikes_once() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let page = NicPage::open(&runtime, "::1".parse().unwrap()).unwrap();
        assert!(page.take_wqe_error(10, 11) && !page.take_wqe_error(10, 12));
        assert!(page.take_wqe_error(20, 21) && !page.take_wqe_error(10, 22));
        assert!(page.take_wqe_error(3, 4), "the clock began anew");
    }

    #[test]
    fn indices_do_not_repeat_soon_and_stay_in_range() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let addr: IpAddr = "::1".parse().unwrap();
        let page = NicPage::open(&runtime, addr).unwrap();
        let first = page.next_index();
        let next = |n: u32| if n == 0xfffe { 2 } else { n + 1 };
        assert_eq!(NicPage::open(&runtime, addr).unwrap().next_index(), next(first));
        let mut last = next(first);
        for _ in 0..INDICES - 2 {
            assert_eq!(page.next_index(), next(last));
            last = next(last);
            assert_ne!(last, first);
        }
        assert_eq!(page.next_index(), first);
    }

    #[test]
    fn qpns_begin_anywhere() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let first = |n: u8| NicPage::open(&runtime, [10, 0, 0, n].into()).unwrap().next_index();
        let firsts: std::collections::HashSet<u32> = (0..16).map(first).collect();
        assert!(firsts.len() > 12, "{firsts:?}");
    }

    #[test]
    fn a_slot_sends_from_the_ports_that_were_named_last() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let page = NicPage::open(&runtime, "::1".parse().unwrap()).unwrap();
        let sends_from = |ports: [u16; 6]| ports.map(|port| page.slot(7).sends_from(port));
        assert_eq!(sends_from([0, 1, 2, 3, 4, 5]), [false; 6]);
        page.slot(7).set_tx_ports([1, 65535, 3, 4]);
        assert_eq!(sends_from([1, 65535, 3, 4, 0, 2]), [true, true, true, true, false, false]);
        page.slot(7).set_tx_ports([5, 6, 7, 8]);
        assert_eq!(sends_from([1, 65535, 3, 4, 5, 8]), [false, false, false, false, true, true]);
    }
}
