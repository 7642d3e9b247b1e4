//! Protection domains.

/// Names a protection domain to the device (or to whatever stands for several devices) that gave
/// it; what `ibv_pd::handle` holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct PdHandle(pub u32);

impl PdHandle {
    /// What no device gives: where there is no protection domain.
    pub const NONE: PdHandle = PdHandle(0);
}

impl core::fmt::Display for PdHandle {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}
