//! The sockets of a NIC.

use crate::socket::{RxSocket, TxSocket};
use std::io;
use std::net::IpAddr;
use unbroken_fabric::TX_PORTS;

/// Sending sockets of a port: the source port varies with the QP, as RoCEv2 asks.
pub(super) const TX_SOCKETS: usize = TX_PORTS;

/// The sockets of a working NIC.
pub(crate) struct Sockets {
    /// One for each port.
    pub(crate) rx: Vec<RxSocket>,
    /// [`TX_SOCKETS`] for each port, port by port.
    pub(crate) tx: Vec<TxSocket>,
}

impl Sockets {
    /// Opens the sockets of the ports that have these addresses.
    pub(crate) fn open(ips: &[IpAddr]) -> io::Result<Sockets> {
        let tx = ips
            .iter()
            .flat_map(|ip| (0..TX_SOCKETS).map(|_| TxSocket::new(*ip)))
            .collect::<io::Result<_>>()?;
        Ok(Sockets { rx: RxSocket::claim(ips)?, tx })
    }
}

/// The port, from 0, that a sending socket belongs to.
#[inline]
pub(super) fn port_of(socket: usize) -> usize {
    socket / TX_SOCKETS
}
