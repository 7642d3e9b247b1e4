//! How an RC QP is made.

use unbroken_types::{PdHandle, QpCaps};

/// How an RC QP is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RcConfig {
    /// The QPN.
    pub qpn: u32,
    /// The QPN that WCs carry.
    pub wc_qpn: u32,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Protection domain.
    pub pd: PdHandle,
    /// On a failure of the network, stop and keep the work requests instead of flushing them.
    pub suspend_on_error: bool,
    /// Every send makes a WC.
    pub sq_sig_all: bool,
    /// Largest congestion window in packets.
    pub cwnd_max_packets: u32,
}
