//! What batches and drives did.

/// Traffic of a batch, added to the shared page at its end.
#[derive(Clone, Copy, Default)]
pub(super) struct RxCount {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    pub(super) payload_bytes: u64,
    pub(super) drops: u64,
    pub(super) icrc_errors: u64,
    pub(super) strangers: u64,
    /// What senders of UC and UD get back.
    pub(super) credit: u64,
}

/// What a drive found to do.
#[derive(Clone, Copy, Default)]
pub(crate) struct Work {
    /// Something arrived, fell due or was sent.
    pub(crate) busy: bool,
    /// Something arrived.
    pub(crate) received: bool,
    /// More is waiting already.
    pub(crate) more: bool,
    /// Much data arrived or left: more is likely to follow.
    pub(crate) bulk: bool,
}
