//! What QPs push their packets to.

use super::{packet_bytes, LinkEffect, Out, Sender};
use crate::engine::credit::Toll;
use crate::engine::dest::Dest;
use crate::engine::sockets::port_of;
use crate::socket::Marks;
use std::net::SocketAddr;
use unbroken_roce::{MemError, PacketSink, Payload, SinkError, UdSink};
use unbroken_types::{KeyChange, PdHandle, UdDest};
use unbroken_wire::ROCE_PORT;

/// What an RC or UC QP pushes its packets to during its turn.
pub(crate) struct QpSink<'a, 'b> {
    out: &'a mut Out<'b>,
    from: Sender,
    /// Packets that the QP may still push.
    quota: u32,
    /// The credit of the receiver.
    toll: Toll,
    /// The receiver has no room.
    awaits_credit: bool,
    /// What is pushed gets nowhere.
    lost: bool,
}

impl<'a, 'b> QpSink<'a, 'b> {
    /// For the QP `qpn` of the domain `pd`.
    pub(crate) fn new(
        out: &'a mut Out<'b>,
        (pd, qpn): (PdHandle, u32),
        dest: Dest,
        socket: usize,
        quota: u32,
    ) -> QpSink<'a, 'b> {
        let from = Sender { pd, qpn, dest, socket, control: false };
        let lost = out.is_shut(socket);
        QpSink { out, from, quota, toll: Toll::OPEN, awaits_credit: false, lost }
    }

    /// For a QP that sends from a GID which leads to its peer, or does not.
    pub(crate) fn routed(mut self, routed: bool) -> QpSink<'a, 'b> {
        self.lost |= !routed;
        self
    }

    /// For a QP whose packets are not acknowledged: lets no more packets go than the receiver has
    /// room for.
    pub(crate) fn unacknowledged(mut self) -> QpSink<'a, 'b> {
        self.ask_receiver();
        self
    }

    fn ask_receiver(&mut self) {
        let flow = &self.from.dest.flow;
        self.toll = self.out.accounts.toll(flow.dst_ip, (flow.dst_port - ROCE_PORT) as u8);
    }

    /// Whether a packet was refused for want of room at the receiver.
    pub(crate) fn awaits_credit(&self) -> bool {
        self.awaits_credit
    }

    pub(crate) fn quota(&self) -> u32 {
        self.quota
    }
}

impl Drop for QpSink<'_, '_> {
    fn drop(&mut self) {
        self.out.batch.close_run();
    }
}

impl PacketSink for QpSink<'_, '_> {
    fn push(&mut self, header: &[u8], payload: Payload<'_>) -> Result<(), SinkError> {
        if self.quota == 0 {
            return Err(SinkError::Full);
        }
        let lost = match &mut self.out.links {
            _ if self.lost => true,
            LinkEffect::Open => false,
            LinkEffect::Impaired(links) => links.loses(port_of(self.from.socket))?,
        };
        if lost {
            self.quota -= 1;
            self.out.batch.counts[port_of(self.from.socket)].drops += 1;
            return Ok(());
        }
        let bytes = packet_bytes(header, &payload);
        if !self.toll.admit(bytes, self.quota - 1, self.out.now_us) {
            self.awaits_credit = true;
            return Err(SinkError::Full);
        }
        self.quota -= 1;
        let held = match &mut self.out.links {
            LinkEffect::Open => false,
            LinkEffect::Impaired(links) => links.holds(port_of(self.from.socket)),
        };
        let taken = if held {
            self.out.hold(&self.from, header, &payload)
        } else {
            self.out.put(&self.from, header, &payload, None)
        };
        if taken.is_err() {
            self.toll.refund(bytes);
        }
        taken
    }

    fn change_key(&mut self, change: &KeyChange) -> Result<(), MemError> {
        self.out.view.of_qp(self.from.qpn).change_key(self.from.pd, change)
    }
}

/// What a UD QP pushes its packets to during its turn.
pub(crate) struct UdQpSink<'a, 'b> {
    src: SocketAddr,
    /// To whom the last packet went.
    last: UdDest,
    sink: QpSink<'a, 'b>,
}

impl<'a, 'b> UdQpSink<'a, 'b> {
    pub(crate) fn new(
        out: &'a mut Out<'b>,
        of: (PdHandle, u32),
        socket: usize,
        quota: u32,
        control: bool,
    ) -> UdQpSink<'a, 'b> {
        let src = out.sockets[socket].addr();
        // Not yet the way to anybody: the first packet sets it.
        let dest = Dest::to_qp(src, src.ip(), 0);
        let mut sink = QpSink::new(out, of, dest, socket, quota);
        sink.from.control = control;
        UdQpSink { src, last: UdDest::default(), sink }
    }

    pub(crate) fn quota(&self) -> u32 {
        self.sink.quota
    }

    /// As [`QpSink::awaits_credit`].
    pub(crate) fn awaits_credit(&self) -> bool {
        self.sink.awaits_credit
    }
}

impl UdSink for UdQpSink<'_, '_> {
    #[inline]
    fn resolve(&mut self, dest: &UdDest) -> UdDest {
        // The endpoints of failover itself stay where they are.
        let aliases = self.sink.out.aliases.filter(|_| !self.sink.from.control);
        let now = aliases.and_then(|aliases| aliases.now((dest.gid, dest.qpn)));
        now.map_or(*dest, |(gid, qpn)| UdDest { gid, qpn, ..*dest })
    }

    fn push_to(
        &mut self,
        dest: &UdDest,
        header: &[u8],
        payload: Payload<'_>,
    ) -> Result<(), SinkError> {
        let marks = |dest: &UdDest| Marks { class: dest.traffic_class, hops: dest.hop_limit };
        let way = |dest: &UdDest| (dest.gid, dest.qpn, dest.sgid_index, marks(dest));
        if way(dest) != way(&self.last) {
            self.sink.out.batch.close_run();
            let reached = self.sink.out.plain.is_none_or(|plain| plain.reaches(dest));
            self.sink.lost = !reached || self.sink.out.is_shut(self.sink.from.socket);
            let marks = if self.sink.from.control { Marks::default() } else { marks(dest) };
            let to = Dest::to_qp(self.src, dest.gid.to_ip(), dest.qpn);
            self.sink.from.dest = Dest { marks, ..to };
            self.sink.ask_receiver();
            self.last = *dest;
        }
        self.sink.push(header, payload)
    }
}
