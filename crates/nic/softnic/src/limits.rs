//! What a NIC can have.

/// Entries of a work queue.
pub(crate) const MAX_QP_WR: u32 = 16_384;
/// Shared receive queues of a process.
pub(crate) const MAX_SRQS: u32 = 65_536;
/// Entries of a shared receive queue.
pub(crate) const MAX_SRQ_WR: u32 = 32_768;
/// Scatter/gather entries of a WR.
pub(crate) const MAX_SGE: u32 = 30;
/// Bytes of inline data.
pub(crate) const MAX_INLINE: u32 = 512;
