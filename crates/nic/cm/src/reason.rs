//! Why a connection was rejected.

/// The reason of a REJ, as the specification numbers it (table 108).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Reason(pub u16);

impl Reason {
    /// No QP is available.
    pub const NO_QP: Reason = Reason(1);
    /// The peer has not answered in time.
    pub const TIMEOUT: Reason = Reason(4);
    /// The message names a connection that there is not.
    pub const INVALID_COMM_ID: Reason = Reason(6);
    /// Nobody listens for that service.
    pub const INVALID_SERVICE_ID: Reason = Reason(8);
    /// The transport that was asked for is not the listener's.
    pub const INVALID_TRANSPORT: Reason = Reason(9);
    /// The request is of a connection that has ended, or its QP is in one already.
    pub const STALE_CONNECTION: Reason = Reason(10);
    /// The program said so.
    pub const CONSUMER: Reason = Reason(28);
    /// The vendor's option is not supported.
    pub const VENDOR_OPTION: Reason = Reason(35);
}
