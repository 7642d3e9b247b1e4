//! Where a QP's completions go, and where its receives come from if it shares them.

use crate::{PdHandle, RecvWr, Wc};

/// Receives that several QPs share (SRQ). All methods may be called by several QPs at a time.
pub trait SharedReceives: Send + Sync {
    /// Hands the oldest receive over and forgets it; false if there is none.
    fn take(&self, to: &mut dyn FnMut(&RecvWr<'_>)) -> bool;
    /// Puts one that was taken, and into which nothing was received, back in front.
    fn give_back(&self, wr: &RecvWr<'_>);
    /// Scatter/gather entries of a receive, at most.
    fn max_sge(&self) -> u32;
    /// The protection domain that the receives' keys are of.
    fn pd(&self) -> PdHandle;
}

/// Where completions go.
pub trait Completions {
    /// A send WR completed.
    fn send(&mut self, wc: Wc);
    /// A receive WR completed; `solicited` if the sender asked for an event.
    fn recv(&mut self, wc: Wc, solicited: bool);
}
