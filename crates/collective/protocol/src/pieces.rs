//! Frames in pieces, on their way out of band: what `detours` keeps of them.

use std::collections::VecDeque;

/// A frame that goes out of band.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sending {
    pub(crate) stream: u8,
    pub(crate) seq: u64,
    pub(crate) bytes: u32,
    pub(crate) said: u32,
    pub(crate) taken: u32,
}

/// What goes out of band to a peer, and comes from it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pieces {
    pub(crate) sending: VecDeque<Sending>,
    pub(crate) on_way_bytes: u32,
    /// Bytes of the frame that is coming, that have come.
    pub(crate) come: u32,
}
