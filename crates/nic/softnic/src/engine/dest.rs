//! Where packets go.

use crate::socket::{Marks, RawAddr};
use std::net::{IpAddr, SocketAddr};
use unbroken_wire::{IcrcFlow, ROCE_PORT};

/// Where packets of a QP go.
#[derive(Clone, Copy)]
pub(crate) struct Dest {
    pub(crate) to: RawAddr,
    pub(crate) flow: IcrcFlow,
    pub(crate) marks: Marks,
}

impl Dest {
    /// The way from `src` to a QP: the port says which process of the peer's NIC has it.
    pub(crate) fn to_qp(src: SocketAddr, peer: IpAddr, qpn: u32) -> Dest {
        let dst = SocketAddr::new(peer, ROCE_PORT + (qpn >> 16 & 0xff) as u16);
        let flow = IcrcFlow {
            src_ip: src.ip(),
            dst_ip: dst.ip(),
            src_port: src.port(),
            dst_port: dst.port(),
        };
        Dest { to: RawAddr::new(dst), flow, marks: Marks::default() }
    }
}
