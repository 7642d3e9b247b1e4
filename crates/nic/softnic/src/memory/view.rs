//! The memory as packets touch it: located, copied and changed, under the table's read lock.
//!
//! What lies in one piece of a region is found at once ([`View::locate`]). Everything else
//! ([`super::special`]) is asked for piece by piece, off the fast path.

use super::special::{Accessor, Piece};
use super::Table;
use crate::copy::copy;
use crate::traps::{self, Fault};
use std::sync::RwLockReadGuard;
use unbroken_roce::{AtomicOp, MemError, Memory};
use unbroken_types::{Access, KeyChange, PdHandle};
use unbroken_wire::Icrc;

type Result<T> = std::result::Result<T, MemError>;

/// The table while a batch of packets is handled.
pub(crate) struct View<'a>(pub(super) RwLockReadGuard<'a, Table>);

impl View<'_> {
    /// Where `len` bytes at `va` of the region `key` are, if they lie in one piece. A length of 0
    /// needs no region at all.
    #[inline]
    pub(crate) fn locate(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<*mut u8> {
        if len == 0 {
            return Ok(std::ptr::dangling_mut());
        }
        let key = self.0.local_name(key, need);
        let Some(r) = self.0.region(key) else { return Err(self.0.why_not_plain(key)) };
        Ok((r.start + r.offset(pd, va, len, need)?) as *mut u8)
    }

    /// The memory as a QP sees it.
    #[inline]
    pub(crate) fn of_qp(&self, qpn: u32) -> QpMemory<'_> {
        QpMemory { view: self, qpn }
    }
}

/// The memory as a QP sees it: a window of type 2 is there for the QP that it is bound to.
#[derive(Clone, Copy)]
pub(crate) struct QpMemory<'a> {
    view: &'a View<'a>,
    qpn: u32,
}

impl QpMemory<'_> {
    /// See [`View::locate`].
    #[inline]
    pub(crate) fn locate(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<*mut u8> {
        self.view.locate(pd, key, va, len, need)
    }

    /// Copies memory to a packet, as [`Memory::read`], and adds it to the packet's ICRC.
    #[inline]
    pub(crate) fn copy_out(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        out: &mut [u8],
        need: Access,
        icrc: &mut Icrc,
    ) -> Result<()> {
        match self.locate(pd, key, va, out.len() as u64, need) {
            Err(MemError::NotInOnePiece) => {
                self.read(pd, key, va, out, need)?;
                icrc.update(out);
            }
            // SAFETY: as in `write`, with the direction turned round.
            found => unsafe { copy(found?, out, icrc) }.map_err(not_mapped)?,
        }
        Ok(())
    }

    /// Calls `each` with the pieces of what lies in more than one, or is not simply memory.
    #[cold]
    fn pieces(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
        each: &mut dyn FnMut(Piece),
    ) -> Result<()> {
        self.view.0.pieces(Accessor { pd, qpn: self.qpn }, key, va, len, need, each)
    }

    /// Does what a WR that changes keys asks for.
    pub(crate) fn change_key(&self, pd: PdHandle, change: &KeyChange) -> Result<()> {
        let by = Accessor { pd, qpn: self.qpn };
        match change {
            KeyChange::Bind(bind) => self.view.0.bind(by, bind),
            KeyChange::Invalidate(key) => self.view.0.invalidate(by, *key),
        }
    }
}

impl Memory for QpMemory<'_> {
    #[inline]
    fn check(&self, pd: PdHandle, key: u32, va: u64, len: u64, need: Access) -> Result<()> {
        match self.locate(pd, key, va, len, need) {
            Err(MemError::NotInOnePiece) => self.pieces(pd, key, va, len, need, &mut |_| {}),
            found => found.map(drop),
        }
    }

    #[inline]
    fn write(&self, pd: PdHandle, key: u32, va: u64, data: &[u8], need: Access) -> Result<()> {
        let to = match self.view.locate(pd, key, va, data.len() as u64, need) {
            Err(MemError::NotInOnePiece) => {
                let (mut rest, mut done) = (data, Ok(()));
                self.pieces(pd, key, va, data.len() as u64, need, &mut |(to, n)| {
                    let (here, behind) = rest.split_at(n);
                    rest = behind;
                    if let Some(to) = to {
                        // SAFETY: as below; the pieces stay what they are until `pieces` returns.
                        done = done.and(unsafe { traps::copy(here.as_ptr(), to, n) });
                    }
                })?;
                return done.map_err(not_mapped);
            }
            found => found?,
        };
        // SAFETY: `locate` gave an address with `data.len()` bytes inside a region that the
        // application registered, and until it deregisters that, which waits for this view, the
        // memory is either that or not there. `data` is a packet buffer, never registered memory.
        // The application may race with the copy, as it may with a NIC's DMA.
        unsafe { traps::copy(data.as_ptr(), to, data.len()) }.map_err(not_mapped)
    }

    #[inline]
    fn read(&self, pd: PdHandle, key: u32, va: u64, out: &mut [u8], need: Access) -> Result<()> {
        let from = match self.view.locate(pd, key, va, out.len() as u64, need) {
            Err(MemError::NotInOnePiece) => {
                let (mut at, mut done) = (0, Ok(()));
                self.pieces(pd, key, va, out.len() as u64, need, &mut |(from, n)| {
                    let here = &mut out[at..at + n];
                    at += n;
                    match from {
                        Some(from) => {
                            // SAFETY: as below; the pieces stay what they are until `pieces`
                            // returns.
                            let copied = unsafe { traps::copy(from, here.as_mut_ptr(), n) };
                            done = done.and(copied);
                        }
                        None => here.fill(0),
                    }
                })?;
                return done.map_err(not_mapped);
            }
            found => found?,
        };
        // SAFETY: as in `write`, with the direction turned round.
        unsafe { traps::copy(from, out.as_mut_ptr(), out.len()) }.map_err(not_mapped)
    }

    fn atomic(&self, pd: PdHandle, key: u32, va: u64, op: AtomicOp) -> Result<u64> {
        match self.view.locate(pd, key, va, 8, Access::REMOTE_ATOMIC) {
            Err(MemError::NotInOnePiece) => {
                let mut done = Err(MemError::Misaligned);
                self.pieces(pd, key, va, 8, Access::REMOTE_ATOMIC, &mut |piece| {
                    match piece {
                        (Some(at), 8) => done = run_atomic(at, op),
                        // Nothing is there, and reads as 0.
                        (None, 8) => done = Ok(0),
                        _ => {}
                    }
                })?;
                done
            }
            found => run_atomic(found?, op),
        }
    }

    fn invalidate(&self, pd: PdHandle, key: u32) -> Result<()> {
        self.change_key(pd, &KeyChange::Invalidate(key))
    }
}

/// Runs an atomic on eight bytes that `locate` or `pieces` gave.
fn run_atomic(at: *mut u8, op: AtomicOp) -> Result<u64> {
    if !(at as usize).is_multiple_of(8) {
        return Err(MemError::Misaligned);
    }
    // SAFETY: eight bytes of a region as in `write`, and they are aligned. What else is done to
    // them at the same time by atomic instructions, here or in the application, is ordered by the
    // processor.
    let done = unsafe {
        match op {
            AtomicOp::FetchAdd(add) => traps::fetch_add(at.cast(), add),
            AtomicOp::CompareSwap { compare, swap } => {
                traps::compare_swap(at.cast(), compare, swap)
            }
        }
    };
    done.map_err(not_mapped)
}

#[cold]
fn not_mapped(_: Fault) -> MemError {
    MemError::NotMapped
}
