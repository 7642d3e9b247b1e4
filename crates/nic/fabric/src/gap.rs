//! `shm/proc/<pid>-<id>.page`: when the packets with data came to a process, as far as one waited
//! for them.
//!
//! Data is payload of the application: neither messages of failover nor what acknowledgements
//! carry. Every interval between two data-bearing packets, over all NICs of the process, that is
//! longer than [`GAP_MIN_US`] is kept, with its exact start and length; the last [`GAP_RING`] of
//! them. So the interruption around a failure is time-stamped, not sampled.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use unbroken_runtime::{Presence, ProcessName, Runtime};

use crate::error::{FabricError, Result};
use crate::map::{Header, Layout, Mapped};

/// Shorter intervals are not kept. No switch is as short: a round trip of Hellos alone takes
/// longer.
pub const GAP_MIN_US: u64 = 100;
/// Intervals kept: those of 100 ms at least.
pub const GAP_RING: usize = 1024;
/// Pages of dead processes that are kept for readers.
const DEAD_KEPT: usize = 64;

#[repr(C)]
struct Page {
    header: Header,
    last_us: AtomicU64,
    first_us: AtomicU64,
    count: AtomicU64,
    _line: [AtomicU64; 5],
    ring: [RawGap; GAP_RING],
}

#[repr(C)]
struct RawGap {
    start_us: AtomicU64,
    /// 0 while the slot is written.
    len_us: AtomicU64,
}

// SAFETY: repr(C), the header first, and atomics only.
#[allow(unsafe_code)]
unsafe impl Layout for Page {
    const MAGIC: u64 = u64::from_le_bytes(*b"UNBGAPPG");
    const VERSION: u32 = 2;
}

/// An interval without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// When the packet before it came.
    pub start_us: u64,
    /// How long it was.
    pub len_us: u64,
}

impl Gap {
    /// How long it was, in ms.
    pub fn len_ms(&self) -> f64 {
        self.len_us as f64 / 1e3
    }
}

/// The writing end, one for each process, shared by its NICs.
pub struct GapRecorder {
    page: Mapped<Page>,
    path: PathBuf,
    /// The page is that of a living process while this is held.
    presence: Presence,
}

impl GapRecorder {
    /// Makes the page of this process. Pages of long-dead processes are removed.
    pub fn create(runtime: &Runtime) -> Result<GapRecorder> {
        let presence =
            Presence::join(runtime).map_err(FabricError::io(runtime.path(), "take part in it"))?;
        prune(runtime, &presence);
        let path = page_path(runtime, presence.name());
        Ok(GapRecorder { page: Mapped::replace(&path)?, path, presence })
    }

    /// The name of this process in its runtime folder.
    pub fn process(&self) -> ProcessName {
        self.presence.name()
    }

    /// A packet with data came at `now_us`. A few ns; threads may call it at the same time.
    #[inline]
    pub fn record(&self, now_us: u64) {
        let last_us = self.page.last_us.load(Ordering::Relaxed);
        if now_us.saturating_sub(last_us) <= GAP_MIN_US {
            if now_us > last_us {
                self.page.last_us.store(now_us, Ordering::Relaxed);
            }
        } else {
            self.record_gap(last_us, now_us);
        }
    }

    #[cold]
    fn record_gap(&self, last_us: u64, now_us: u64) {
        let page = &self.page;
        // Of several threads that see the end of one gap, one records it.
        if page
            .last_us
            .compare_exchange(last_us, now_us, Ordering::Relaxed, Ordering::Relaxed)
            .is_err()
        {
            return;
        }
        if last_us == 0 {
            page.first_us.store(now_us, Ordering::Relaxed);
            return;
        }
        let slot =
            &page.ring[(page.count.fetch_add(1, Ordering::Relaxed) % GAP_RING as u64) as usize];
        slot.len_us.store(0, Ordering::Release);
        slot.start_us.store(last_us, Ordering::Release);
        slot.len_us.store(now_us - last_us, Ordering::Release);
    }

    /// What the process of this pid recorded; also after its death. Of several (in other PID
    /// namespaces, or one after the other) the last that made its page.
    pub fn read(runtime: &Runtime, pid: u32) -> Result<GapReport> {
        let of_pid = pages(runtime).filter(|(name, _)| name.pid == pid);
        let last = of_pid.max_by_key(|(_, path)| {
            fs::metadata(path).and_then(|m| m.created().or(m.modified())).ok()
        });
        let missing = || {
            FabricError::Name(format!("process {pid} has no page in {}", runtime.path().display()))
        };
        let page = Mapped::<Page>::open(&last.ok_or_else(missing)?.1)?;
        let mut gaps: Vec<Gap> = page.ring.iter().filter_map(read_slot).collect();
        gaps.sort_unstable_by_key(|g| g.start_us);
        Ok(GapReport {
            first_us: page.first_us.load(Ordering::Relaxed),
            last_us: page.last_us.load(Ordering::Relaxed),
            count: page.count.load(Ordering::Relaxed),
            gaps,
        })
    }

    /// The file of the page.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }
}

fn read_slot(slot: &RawGap) -> Option<Gap> {
    let len_us = slot.len_us.load(Ordering::Acquire);
    let start_us = slot.start_us.load(Ordering::Acquire);
    (len_us != 0 && slot.len_us.load(Ordering::Acquire) == len_us)
        .then_some(Gap { start_us, len_us })
}

/// What a process recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GapReport {
    /// When the first packet with data came; 0: none did.
    pub first_us: u64,
    /// When the last one came.
    pub last_us: u64,
    /// Gaps so far, also those that are no longer kept.
    pub count: u64,
    /// The last gaps, by their starts.
    pub gaps: Vec<Gap>,
}

impl GapReport {
    /// The longest gap that overlaps the time from `from_us` to `to_us`. One that has not ended
    /// (the time since the last packet) is not among them.
    pub fn longest(&self, from_us: u64, to_us: u64) -> Option<Gap> {
        let overlapping =
            self.gaps.iter().filter(|g| g.start_us <= to_us && g.start_us + g.len_us >= from_us);
        overlapping.max_by_key(|g| g.len_us).copied()
    }
}

fn page_path(runtime: &Runtime, process: ProcessName) -> PathBuf {
    runtime.process_pages().join(format!("{process}.page"))
}

/// The pages of all processes, living and dead.
fn pages(runtime: &Runtime) -> impl Iterator<Item = (ProcessName, PathBuf)> {
    let entries = fs::read_dir(runtime.process_pages()).into_iter().flatten().flatten();
    entries.map(|e| e.path()).filter_map(|path| {
        let name = path.file_name()?.to_str()?.strip_suffix(".page")?.parse().ok()?;
        Some((name, path))
    })
}

/// Removes the oldest pages of dead processes beyond [`DEAD_KEPT`].
fn prune(runtime: &Runtime, presence: &Presence) {
    let dead = pages(runtime).filter(|(name, _)| !presence.lives(name.id));
    let mut dead: Vec<_> =
        dead.map(|(_, path)| (fs::metadata(&path).and_then(|m| m.modified()).ok(), path)).collect();
    dead.sort();
    let surplus = dead.len().saturating_sub(DEAD_KEPT);
    for (_, path) in dead.drain(..surplus) {
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_intervals_are_kept_with_their_times() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let recorder = GapRecorder::create(&runtime).unwrap();
        for now_us in [1_000_000, 1_000_090, 1_000_190, 1_009_000, 1_009_001, 1_009_000, 1_012_000]
        {
            recorder.record(now_us);
        }
        let report = GapRecorder::read(&runtime, std::process::id()).unwrap();
        assert_eq!((report.first_us, report.last_us, report.count), (1_000_000, 1_012_000, 2));
        let long = Gap { start_us: 1_000_190, len_us: 8_810 };
        assert_eq!(report.gaps, [long, Gap { start_us: 1_009_001, len_us: 2_999 }]);
        assert_eq!(report.longest(1_000_000, 2_000_000), Some(long));
        assert_eq!(report.longest(1_009_500, 2_000_000).unwrap().len_us, 2_999);
        assert_eq!(report.longest(1_020_000, 2_000_000), None);
    }

    #[test]
    fn the_ring_keeps_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let recorder = GapRecorder::create(&runtime).unwrap();
        for n in 1..=3001 {
            recorder.record(n * 1000);
        }
        let report = GapRecorder::read(&runtime, std::process::id()).unwrap();
        assert_eq!((report.count, report.gaps.len()), (3000, GAP_RING));
        assert_eq!(report.gaps[GAP_RING - 1].start_us, 3_000_000);
    }

    #[test]
    fn pages_of_the_dead_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        for n in 0..100u32 {
            // Their pid says nothing: it is that of this process.
            let dead = ProcessName { pid: std::process::id(), id: u64::from(n) + 1 };
            fs::write(page_path(&runtime, dead), "").unwrap();
        }
        let recorder = GapRecorder::create(&runtime).unwrap();
        assert_eq!(fs::read_dir(runtime.process_pages()).unwrap().count(), DEAD_KEPT + 1);
        // The pages of the living stay, however many there are of the dead.
        prune(&runtime, &recorder.presence);
        assert!(recorder.path().exists());
    }
}
