//! Keys that do not simply name a piece of the process's memory. All of this is off the fast path:
//! the table finds no plain region for such a key, and asks here.
//!
//! ```text
//!   null       any address   reads give zeros, what is written is dropped; for local use
//!   indirect   root key ──►  entries (key, address, length), one behind the other: pieces of other regions, or nothing (null)
//!   window     rkey ──►      a part of a region, with rights of its own; type 2: for one QP, under keys of the program's choice
//! ```
//!
//! What an indirect key's entries or a window name may change while packets arrive. Each has a lock
//! that an access holds as long as it touches the memory, so when a change returns, nothing uses
//! what was there before, on any NIC. Lock order: the table (read) → one of these locks; nobody
//! holds two of them.

use super::{Region, Table};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use unbroken_roce::MemError;
use unbroken_types::{Access, MwBind, PdHandle};
use unbroken_verbs::{IndirectEntry, WindowType};

type Result<T> = std::result::Result<T, MemError>;

/// Who touches memory: the domain and the QP that the packet is for.
#[derive(Clone, Copy)]
pub(crate) struct Accessor {
    pub(crate) pd: PdHandle,
    pub(crate) qpn: u32,
}

/// A piece of what a key names: where it is, or nothing at all (null), and how many bytes.
pub(super) type Piece = (Option<*mut u8>, usize);

/// What a slot of the table holds that is no plain region.
pub(super) enum Special {
    Null { key: u32 },
    Indirect(Indirect),
    Window(Window),
}

pub(super) struct Indirect {
    pub(super) key: u32,
    /// Where the place of each entry ends, in bytes from the beginning. Entries change, their
    /// places do not.
    pub(super) ends: Box<[u64]>,
    entries: RwLock<Box<[IndirectEntry]>>,
}

pub(super) struct Window {
    kind: WindowType,
    binding: RwLock<Binding>,
}

/// To what a window is bound.
#[derive(Clone, Copy, Default)]
struct Binding {
    /// The window's key, also while it is not bound.
    key: u32,
    /// The region's key; 0 while it is not bound.
    lkey: u32,
    start: u64,
    len: u64,
    /// Where the peer's addresses begin.
    iova: u64,
    access: Access,
    /// Type 2: the QP that may use it.
    qpn: u32,
}

impl Binding {
    /// Whether a window of type 2 was bound by this QP.
    fn is_for(&self, by: Accessor) -> bool {
        #[cfg(test)]
        if super::tests::ANY_QP.get() {
            return true;
        }
        self.qpn == by.qpn
    }
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl Indirect {
    pub(super) fn new(key: u32, entries: &[IndirectEntry]) -> Indirect {
        let ends = entries.iter().scan(0, |end, e| {
            *end += e.len;
            Some(*end)
        });
        Indirect { key, ends: ends.collect(), entries: RwLock::new(entries.into()) }
    }

    /// Replaces an entry. When it returns, nothing uses the old one any more.
    pub(super) fn set(&self, index: usize, entry: IndirectEntry) {
        write(&self.entries)[index] = entry;
    }

    /// How many bytes an entry may have.
    pub(super) fn place(&self, index: usize) -> Option<u64> {
        let end = self.ends.get(index)?;
        Some(end - index.checked_sub(1).map_or(0, |before| self.ends[before]))
    }

    /// The pieces of `len` bytes at `off`, which lie inside.
    fn walk(
        &self,
        mut off: u64,
        mut len: u64,
        mut each: impl FnMut(usize, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let mut i = self.ends.partition_point(|end| *end <= off);
        while len > 0 {
            let Some(end) = self.ends.get(i) else { return Err(MemError::OutOfBounds) };
            let begin = if i == 0 { 0 } else { self.ends[i - 1] };
            let here = len.min(end - off);
            if here > 0 {
                each(i, off - begin, here)?;
            }
            off += here;
            len -= here;
            i += 1;
        }
        Ok(())
    }
}

impl Window {
    /// A window that is not bound yet.
    pub(super) fn new(kind: WindowType, key: u32) -> Window {
        Window { kind, binding: RwLock::new(Binding { key, ..Binding::default() }) }
    }

    pub(super) fn key(&self) -> u32 {
        read(&self.binding).key
    }

    /// Takes the window off its region, if it is on one.
    pub(super) fn unbind(&self, table: &Table) {
        let mut b = write(&self.binding);
        table.count_windows(std::mem::take(&mut b.lkey), -1);
    }
}

impl Table {
    /// What a key names that is no plain region.
    fn special(&self, key: u32) -> Result<(&Region, &Special)> {
        let r = self.slots.named(key).ok_or(MemError::NoSuchKey)?;
        let s = r.special.as_deref().ok_or(MemError::NoSuchKey)?;
        match s {
            Special::Null { key: k } | Special::Indirect(Indirect { key: k, .. }) if *k != key => {
                Err(MemError::NoSuchKey)
            }
            _ => Ok((r, s)),
        }
    }

    fn count_windows(&self, lkey: u32, by: i32) {
        if let Some(r) = self.region(lkey) {
            r.windows.fetch_add(by as u32, Relaxed);
        }
    }

    /// Whether there is such a key at all, for an error that says what is wrong.
    #[cold]
    pub(super) fn why_not_plain(&self, key: u32) -> MemError {
        match self.special(key) {
            Ok(_) => MemError::NotInOnePiece,
            Err(e) => e,
        }
    }

    /// Calls `each` with the pieces of a range, one behind the other, after the whole of it has
    /// been checked. They stay what they are until it returns. The key has the name that goes with
    /// `need`.
    #[cold]
    pub(super) fn pieces(
        &self,
        by: Accessor,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
        each: &mut dyn FnMut(Piece),
    ) -> Result<()> {
        let key = self.local_name(key, need);
        let (r, special) = self.special(key)?;
        let remote = need.intersects(Access::REMOTE);
        match special {
            Special::Null { .. } => {
                if r.pd != by.pd {
                    return Err(MemError::WrongPd);
                }
                if remote {
                    return Err(MemError::AccessDenied);
                }
                each((None, len as usize));
                Ok(())
            }
            Special::Indirect(root) => {
                let off = r.offset(by.pd, va, len, need)?;
                let local = if need == Access::NONE || need == Access::REMOTE_READ {
                    Access::NONE
                } else {
                    Access::LOCAL_WRITE
                };
                let entries = read(&root.entries);
                let piece = |i: usize, at: u64, n: u64| {
                    let e: &IndirectEntry = &entries[i];
                    if at + n > e.len {
                        return Err(MemError::OutOfBounds);
                    }
                    self.entry_piece(by.pd, e.lkey, e.addr.wrapping_add(at), n, local)
                };
                root.walk(off, len, |i, at, n| piece(i, at, n).map(drop))?;
                root.walk(off, len, |i, at, n| piece(i, at, n).map(&mut *each))
            }
            Special::Window(w) => {
                let b = read(&w.binding);
                if b.key != key || b.lkey == 0 {
                    return Err(MemError::NoSuchKey);
                }
                if r.pd != by.pd {
                    return Err(MemError::WrongPd);
                }
                if w.kind == WindowType::Two && !b.is_for(by) {
                    return Err(MemError::WrongQp);
                }
                if !remote || !b.access.contains(need) {
                    return Err(MemError::AccessDenied);
                }
                let off = va.wrapping_sub(b.iova);
                if va < b.iova || off > b.len || len > b.len - off {
                    return Err(MemError::OutOfBounds);
                }
                each((Some((b.start + off) as *mut u8), len as usize));
                Ok(())
            }
        }
    }

    /// Where an entry's bytes are: in a plain region, or nowhere (null).
    pub(super) fn entry_piece(
        &self,
        pd: PdHandle,
        lkey: u32,
        addr: u64,
        len: u64,
        need: Access,
    ) -> Result<Piece> {
        if let Some(r) = self.region(lkey) {
            let off = r.offset(pd, addr, len, need)?;
            return Ok((Some((r.start + off) as *mut u8), len as usize));
        }
        match self.special(lkey)? {
            (r, Special::Null { .. }) if r.pd == pd => Ok((None, len as usize)),
            (_, Special::Null { .. }) => Err(MemError::WrongPd),
            _ => Err(MemError::NotInOnePiece),
        }
    }

    /// Binds a window, or unbinds it where the length is 0.
    pub(super) fn bind(&self, by: Accessor, change: &MwBind) -> Result<()> {
        // Both names of the window are those that peers use.
        let (window, new_key) = (self.other_name(change.window), self.other_name(change.new_key));
        let slot = self.slots.named(window);
        let Some((r, Special::Window(w))) = slot.and_then(|r| Some((r, r.special.as_deref()?)))
        else {
            return Err(MemError::NoSuchKey);
        };
        if r.pd != by.pd {
            return Err(MemError::WrongPd);
        }
        let mut b = write(&w.binding);
        // The key keeps its index. A window of type 2 must be free; one of type 1 is taken off what
        // it was bound to.
        let key_fits = new_key >> 8 == b.key >> 8 && new_key != b.key;
        if !key_fits || w.kind == WindowType::Two && (b.lkey != 0 || change.length == 0) {
            return Err(MemError::Bind);
        }
        let mut fresh = Binding { key: new_key, qpn: by.qpn, ..Binding::default() };
        if change.length > 0 {
            let region = self.region(change.lkey).ok_or(MemError::NoSuchKey)?;
            let zero_based = change.access.contains(Access::ZERO_BASED);
            let writes = change.access.intersects(Access::REMOTE_WRITE.with(Access::REMOTE_ATOMIC));
            let need =
                if writes { Access::MW_BIND.with(Access::LOCAL_WRITE) } else { Access::MW_BIND };
            if zero_based && w.kind == WindowType::One {
                return Err(MemError::Bind);
            }
            let off = region.offset(by.pd, change.addr, change.length, need)?;
            fresh.lkey = change.lkey;
            fresh.start = region.start + off;
            fresh.len = change.length;
            fresh.iova = if zero_based { 0 } else { change.addr };
            fresh.access = change.access;
            self.count_windows(change.lkey, 1);
        }
        self.count_windows(b.lkey, -1);
        *b = fresh;
        Ok(())
    }

    /// Invalidates the key of a window of type 2 that is bound to the QP.
    pub(super) fn invalidate(&self, by: Accessor, rkey: u32) -> Result<()> {
        let key = self.other_name(rkey);
        let (r, Special::Window(w)) = self.special(key)? else {
            return Err(MemError::AccessDenied);
        };
        let mut b = write(&w.binding);
        if b.key != key || b.lkey == 0 {
            return Err(MemError::NoSuchKey);
        }
        if w.kind != WindowType::Two || r.pd != by.pd {
            return Err(MemError::AccessDenied);
        }
        if !b.is_for(by) {
            return Err(MemError::WrongQp);
        }
        self.count_windows(std::mem::take(&mut b.lkey), -1);
        Ok(())
    }
}
