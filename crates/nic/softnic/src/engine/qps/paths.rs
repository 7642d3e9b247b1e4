//! The paths of a QP: the one in use, the alternate one, and the one that was left last. What is to
//! happen is said by the transport ([`unbroken_roce::RcQp::take_path_change`]), which knows no
//! addresses.

use super::{QpEntry, QpKind};
use std::net::IpAddr;
use unbroken_roce::Via;
use unbroken_types::PathAttr;
use unbroken_wire::{IcrcFlow, Packet};

/// The alternate path of a QP.
#[derive(Clone, Copy)]
pub(crate) struct Alternate {
    pub(crate) path: PathAttr,
    /// The peer's address.
    pub(crate) ip: IpAddr,
    /// As [`QpEntry::routed`].
    pub(crate) routed: bool,
}

impl QpEntry {
    /// Whether this is the peer's address on any path that its packets may come from.
    pub(crate) fn is_peer_of_any_path(&self, ip: IpAddr) -> bool {
        self.is_peer(ip)
            || self.alternate.as_ref().is_some_and(|a| a.ip == ip)
            || self.former.as_deref() == Some(&ip)
    }

    /// RC: may go on over this path, whose port has a link or has none.
    pub(crate) fn set_alternate(&mut self, alternate: Alternate, usable: bool) {
        if let QpKind::Rc(qp) = &mut self.kind {
            self.alternate = Some(Box::new(alternate));
            qp.set_alternate_usable(usable);
        }
    }

    /// Looks which path a packet came over whose MigReq bit may be news. True: the path has
    /// changed.
    #[cold]
    pub(crate) fn hear(
        &mut self,
        packet: &Packet<'_>,
        flow: &IcrcFlow,
        own: &[IpAddr],
        now_us: u64,
    ) -> bool {
        let came = |peer: IpAddr, port: u8| {
            peer == flow.src_ip && own[usize::from(port - 1)] == flow.dst_ip
        };
        let via = match (&self.peer, &self.alternate) {
            (Some(ip), _) if came(*ip, self.port) => Via::Primary,
            (_, Some(a)) if came(a.ip, a.path.port) => Via::Alternate,
            _ => Via::Other,
        };
        if let QpKind::Rc(qp) = &mut self.kind {
            qp.hear(now_us, packet.bth.mig_req, via);
        }
        self.take_path()
    }

    /// Ports have lost or found their link. True: the path has changed.
    pub(crate) fn follow_ports(&mut self, up: impl Fn(u8) -> bool, now_us: u64) -> bool {
        let (Some(alternate), QpKind::Rc(qp)) = (&self.alternate, &mut self.kind) else {
            return false;
        };
        qp.set_alternate_usable(up(alternate.path.port));
        if !up(self.port) {
            qp.path_lost(now_us);
        }
        self.take_path()
    }

    /// Makes the alternate path the one in use, if the transport has gone there; gives whether it
    /// has. [`super::Engine::route`] follows.
    pub(crate) fn take_path(&mut self) -> bool {
        let moved = if let QpKind::Rc(qp) = &mut self.kind { qp.take_path_change() } else { false };
        if let Some(alternate) = self.alternate.take_if(|_| moved) {
            let Alternate { path, routed, .. } = *alternate;
            self.former = self.peer.map(Box::new);
            self.set_path(path);
            self.routed = routed;
            self.set_port(path.port);
        }
        moved
    }
}
