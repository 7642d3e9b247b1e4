//! The table of the QPs of a NIC.

use super::QpEntry;
use std::hint::black_box;
use std::mem::MaybeUninit;

/// QPs of one process on one NIC.
pub(crate) const MAX_QPS: usize = 16_384;

/// Drops a QP, and leaves zeros where it was.
///
/// Open MPI's openib makes and destroys QPs to see what a device can do, and then a device object
/// of which it takes one field for zero that it never set (`allowed_btls`). Where that object comes
/// to lie in what such a QP had used, it dies as it ends.
pub(crate) fn wipe(q: Box<QpEntry>) {
    let place = Box::into_raw(q);
    // SAFETY: a box may be taken for one of bytes that nobody has set, as which it is freed; the QP
    // in it is dropped once, here, and the zeros are bytes of that box.
    unsafe {
        place.drop_in_place();
        place.write_bytes(0, 1);
        // They are looked at, as far as the compiler knows.
        drop(Box::from_raw(black_box(place.cast::<MaybeUninit<QpEntry>>())));
    }
}

type Page = [Option<Box<QpEntry>>; 256];

/// QPs by index (the lower 16 bits of the QPN): two levels, so that an empty table is small and a
/// look-up is two loads.
pub(crate) struct QpTable {
    pages: [Option<Box<Page>>; 256],
    len: usize,
}

impl QpTable {
    pub(crate) fn new() -> QpTable {
        QpTable { pages: [const { None }; 256], len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn get(&self, index: u16) -> Option<&QpEntry> {
        self.pages[usize::from(index >> 8)].as_ref()?[usize::from(index & 0xff)].as_deref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: u16) -> Option<&mut QpEntry> {
        self.pages[usize::from(index >> 8)].as_mut()?[usize::from(index & 0xff)].as_deref_mut()
    }

    /// Puts a QP at a free index.
    pub(crate) fn insert(&mut self, index: u16, q: QpEntry) {
        let page = self.pages[usize::from(index >> 8)]
            .get_or_insert_with(|| Box::new([const { None }; 256]));
        let slot = &mut page[usize::from(index & 0xff)];
        self.len += usize::from(slot.is_none());
        *slot = Some(Box::new(q));
    }

    pub(crate) fn remove(&mut self, index: u16) -> Option<Box<QpEntry>> {
        let q = self.pages[usize::from(index >> 8)].as_mut()?[usize::from(index & 0xff)].take()?;
        self.len -= 1;
        Some(q)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut QpEntry> {
        self.pages.iter_mut().flatten().flat_map(|p| p.iter_mut().filter_map(|q| q.as_deref_mut()))
    }
}
