//! What a device is given of a batch: each work request under the journal's number.

use unbroken_verbs::{SendBatch, SendWr};

/// A batch under the journal's numbers.
pub(crate) struct Numbered<'a> {
    pub(crate) batch: &'a dyn SendBatch,
    pub(crate) first: u64,
}

impl SendBatch for Numbered<'_> {
    fn count(&self) -> usize {
        self.batch.count()
    }

    fn wr(&self, index: usize) -> SendWr<'_> {
        SendWr { wr_id: self.first + index as u64, ..self.batch.wr(index) }
    }
}
