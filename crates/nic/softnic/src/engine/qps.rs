//! The queue pairs of a NIC: what the engine keeps beside the transport's own state, and their
//! table.

mod completer;
mod paths;
mod table;

pub(crate) use paths::Alternate;
pub(crate) use table::{wipe, QpTable, MAX_QPS};

use self::completer::Completer;
use super::alias::Aliases;
use super::congestion::Share;
use super::dest::Dest;
use super::sockets::TX_SOCKETS;
use super::tx::{Out, QpSink, UdQpSink};
use crate::flush::Flushes;
use crate::gids::{gid_of, lid_of};
use crate::memory::QpMemory;
use crate::plain::Death;
use crate::socket::Marks;
use std::net::IpAddr;
use std::sync::Arc;
use unbroken_roce::{PeerKeys, RcEvent, RcQp, UcQp, UdQp, UdRoute};
use unbroken_types::{
    Gid, ModifyError, PathAttr, PdHandle, QpCaps, QpState, RcModify, RecvWr, SendBatch, SendWr,
    UdModify, WcStatus,
};
use unbroken_verbs::{
    Cq, DeviceEvent, Error, EventSink, QpEvent, QpModify, QpSnapshot, Result, Srq,
};
use unbroken_wire::Packet;

/// The transport of a QP.
#[allow(clippy::large_enum_variant)] // entries are boxed
pub(crate) enum QpKind {
    Rc(RcQp),
    Uc(UcQp),
    Ud(UdQp),
}

impl QpKind {
    /// The same with an SRQ.
    pub(crate) fn with_srq(self, srq: Arc<Srq>) -> QpKind {
        match self {
            QpKind::Rc(qp) => QpKind::Rc(qp.with_srq(srq)),
            QpKind::Uc(qp) => QpKind::Uc(qp.with_srq(srq)),
            QpKind::Ud(qp) => QpKind::Ud(qp.with_srq(srq)),
        }
    }
}

/// A QP and what the engine keeps about it.
pub(crate) struct QpEntry {
    pub(crate) kind: QpKind,
    pub(crate) qpn: u32,
    pub(crate) pd: PdHandle,
    /// Its messages are those of failover itself, and not counted as data.
    pub(crate) control: bool,
    /// UD: the GID that peers know it by, where that is not this NIC's.
    pub(crate) home: Option<Gid>,
    pub(crate) caps: QpCaps,
    pub(crate) send_cq: Arc<Cq>,
    pub(crate) recv_cq: Arc<Cq>,
    /// The path in use as it was given, RC and UC only.
    path: Option<PathAttr>,
    /// The peer's address there.
    pub(crate) peer: Option<IpAddr>,
    /// The path leads to the peer. Else all packets are lost, either way.
    pub(crate) routed: bool,
    /// The UDP port that the peer's packets come from, as far as is known; 0 before the first.
    pub(crate) peer_port: u16,
    /// Where packets to the peer go, RC and UC only.
    pub(crate) dest: Option<Dest>,
    /// Which of the NIC's sending sockets it uses; it belongs to the port.
    pub(crate) socket: usize,
    /// The port that its packets leave through, from 1. It may change at any time;
    /// [`super::Engine::route`] follows.
    port: u8,
    /// RC: where it may go on.
    pub(crate) alternate: Option<Box<Alternate>>,
    /// The peer's address on the path that was left last: what is on its way there may still come.
    former: Option<Box<IpAddr>>,
    /// UC: its packets are not held back for want of room or of a receive; they are lost.
    pub(crate) lossy: bool,
    /// It is in the ready queue.
    pub(crate) queued: bool,
    /// RC only: of what fits into its destination.
    pub(super) share: Share,
    /// The time of its valid timer entry; `u64::MAX` without one.
    pub(crate) timer_at: u64,
    /// Packets of it wait for a receive.
    pub(crate) parked: bool,
    /// They have waited too long: what finds no receive is dropped at once, until one is posted.
    pub(crate) deaf: bool,
    /// A completion of it found its CQ full: it has to end, see [`QpEntry::tell`].
    pub(crate) spilled: bool,
    /// It was ended for that, which has not been told.
    fatal: bool,
    /// Its failure has been told.
    told: bool,
    /// An event is wanted when the send queue is drained.
    sqd_notify: bool,
    /// Of a plain NIC: how it behaves when that is dead.
    pub(crate) death: Option<Death>,
    /// Of a plain NIC: what becomes of its flushes, where not all come.
    pub(crate) flushes: Option<Box<Flushes>>,
    /// Its NIC is dead, and it will be flushed at that time.
    pub(crate) flush_at_us: Option<u64>,
}

/// What is left after a turn.
pub(crate) struct TurnResult {
    /// More packets could go now.
    pub(crate) more: bool,
    /// More packets could go if the receiver had room.
    pub(crate) awaits_credit: bool,
    /// An ACK was held back.
    pub(crate) owes: bool,
    /// So much could go if there were room at the destination.
    pub(crate) wanted: Option<u32>,
    /// When it wants to be asked again; `u64::MAX` for never.
    pub(crate) timer_us: u64,
    /// Packets that were sent again.
    pub(crate) retransmits: u32,
}

impl TurnResult {
    /// Of a QP without acknowledgements and timers.
    fn unacknowledged(more: bool, awaits_credit: bool) -> TurnResult {
        let (more, awaits_credit) = (more && !awaits_credit, more && awaits_credit);
        TurnResult {
            more,
            awaits_credit,
            owes: false,
            wanted: None,
            timer_us: u64::MAX,
            retransmits: 0,
        }
    }
}

impl QpEntry {
    pub(crate) fn new(
        kind: QpKind,
        (qpn, pd, control): (u32, PdHandle, bool),
        caps: QpCaps,
        cqs: (Arc<Cq>, Arc<Cq>),
    ) -> QpEntry {
        QpEntry {
            kind,
            qpn,
            pd,
            control,
            home: None,
            caps,
            send_cq: cqs.0,
            recv_cq: cqs.1,
            path: None,
            peer: None,
            routed: true,
            peer_port: 0,
            dest: None,
            socket: qpn as usize % TX_SOCKETS,
            port: 1,
            alternate: None,
            former: None,
            lossy: false,
            queued: false,
            share: Share::default(),
            timer_at: u64::MAX,
            parked: false,
            deaf: false,
            spilled: false,
            fatal: false,
            told: false,
            sqd_notify: false,
            death: None,
            flushes: None,
            flush_at_us: None,
        }
    }

    /// Whether a packet is lost unless a receive is posted. RC asks its peer to wait.
    #[inline]
    pub(crate) fn needs_receive(&self, packet: &Packet<'_>) -> bool {
        match &self.kind {
            QpKind::Rc(_) => false,
            QpKind::Uc(qp) => qp.needs_receive(packet),
            QpKind::Ud(qp) => qp.needs_receive(packet),
        }
    }

    /// Whether UC or UD has a receive.
    pub(crate) fn has_receive(&mut self) -> bool {
        match &mut self.kind {
            QpKind::Rc(_) => true,
            QpKind::Uc(qp) => qp.has_receive(),
            QpKind::Ud(qp) => qp.has_receive(),
        }
    }

    /// Gives UC or UD a packet that came from `src` to `dst` with those marks. False: it was
    /// dropped.
    pub(crate) fn receive(
        &mut self,
        packet: &Packet<'_>,
        (src, dst, marks): (IpAddr, IpAddr, Marks),
        aliases: &Aliases,
        mem: &QpMemory<'_>,
    ) -> bool {
        let home = self.home;
        match self.parts() {
            (QpKind::Rc(_), _) => false,
            (QpKind::Uc(qp), mut to) => qp.handle_packet(packet, mem, &mut to),
            (QpKind::Ud(qp), mut to) => {
                let link_layer = aliases.link_layer();
                let mut route = UdRoute {
                    src: gid_of(src, link_layer),
                    src_qpn: None,
                    dst: home.unwrap_or_else(|| gid_of(dst, link_layer)),
                    slid: lid_of(src, link_layer),
                    traffic_class: marks.class,
                    hop_limit: marks.hops,
                };
                if let Some(deth) =
                    packet.ext.deth().filter(|deth| deth.moved && qp.needs_receive(packet))
                {
                    let Some((gid, qpn)) = aliases.name(src, deth.src_qpn) else { return false };
                    (route.src, route.src_qpn, route.slid) =
                        (gid, Some(qpn), lid_of(gid.to_ip(), link_layer));
                }
                qp.handle_packet(packet, &route, mem, &mut to)
            }
        }
    }

    /// Whether this is the peer's address, RC and UC only.
    #[inline]
    pub(crate) fn is_peer(&self, ip: IpAddr) -> bool {
        self.peer == Some(ip)
    }

    /// The QPN of the peer, RC and UC only.
    pub(crate) fn dest_qpn(&self) -> Option<u32> {
        match &self.kind {
            QpKind::Rc(qp) => Some(qp.dest_qpn()),
            QpKind::Uc(qp) => Some(qp.dest_qpn()),
            QpKind::Ud(_) => None,
        }
    }

    /// The path that it uses from now on. What comes from the peer is looked at anew.
    fn set_path(&mut self, path: PathAttr) {
        (self.path, self.peer, self.peer_port) = (Some(path), Some(path.dest_gid.to_ip()), 0);
    }

    /// Sends through another port from now on, counted from 1.
    fn set_port(&mut self, port: u8) {
        self.port = port;
        self.socket = usize::from(port - 1) * TX_SOCKETS + self.qpn as usize % TX_SOCKETS;
    }

    /// The transport and the place for its completions, to be used together.
    pub(crate) fn parts(&mut self) -> (&mut QpKind, Completer<'_>) {
        (
            &mut self.kind,
            Completer {
                send_cq: &self.send_cq,
                recv_cq: &self.recv_cq,
                spilled: &mut self.spilled,
                flushes: self.flushes.as_deref_mut(),
            },
        )
    }

    #[inline]
    pub(crate) fn post_send(&mut self, wr: &SendWr<'_>) -> Result<()> {
        match self.parts() {
            (QpKind::Rc(qp), mut to) => Ok(qp.post_send(wr, &mut to)?),
            (QpKind::Uc(qp), mut to) => Ok(qp.post_send(wr, &mut to)?),
            (QpKind::Ud(qp), mut to) => Ok(qp.post_send(wr, &mut to)?),
        }
    }

    /// The same under another number than its own.
    #[inline]
    pub(crate) fn post_send_as(&mut self, wr_id: u64, wr: &SendWr<'_>) -> Result<()> {
        match self.parts() {
            (QpKind::Rc(qp), mut to) => Ok(qp.post_send_as(wr_id, wr, &mut to)?),
            _ => self.post_send(&SendWr { wr_id, ..*wr }),
        }
    }

    pub(crate) fn post_sends(&mut self, batch: &dyn SendBatch) -> Result<()> {
        match self.parts() {
            (QpKind::Rc(qp), mut to) => Ok(qp.post_sends(batch, &mut to)?),
            (QpKind::Uc(qp), mut to) => Ok(qp.post_sends(batch, &mut to)?),
            (QpKind::Ud(qp), mut to) => Ok(qp.post_sends(batch, &mut to)?),
        }
    }

    #[inline]
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<()> {
        if self.flushes.is_some() {
            self.note_late_receive();
        }
        match self.parts() {
            (QpKind::Rc(qp), mut to) => Ok(qp.post_recv(wr, &mut to)?),
            (QpKind::Uc(qp), mut to) => Ok(qp.post_recv(wr, &mut to)?),
            (QpKind::Ud(qp), mut to) => Ok(qp.post_recv(wr, &mut to)?),
        }
    }

    #[cold]
    fn note_late_receive(&mut self) {
        let late = self.state() == QpState::Err;
        if let Some(flushes) = &mut self.flushes {
            flushes.posted_late = late;
        }
    }

    /// Changes state and attributes. RC and UC need the peer's address for RTR.
    pub(crate) fn modify(&mut self, change: &QpModify) -> Result<()> {
        let rtr = change.rc.state == Some(QpState::Rtr);
        let no_peer = rtr && change.path.is_none() && self.path.is_none();
        let wrong = |e: ModifyError| Error::invalid(e.to_string());
        if change.alternate.is_some() && !matches!(self.kind, QpKind::Rc(_)) {
            return Err(Error::unsupported("an alternate path: only RC QPs migrate here"));
        }
        match self.parts() {
            (QpKind::Rc(_) | QpKind::Uc(_), _) if no_peer => Err(Error::invalid(
                "Init to Rtr needs the address of the peer (ah_attr with a GRH)",
            )),
            (QpKind::Rc(qp), mut to) => qp.modify(&change.rc, &mut to).map_err(wrong),
            (QpKind::Uc(qp), mut to) => qp.modify(&change.rc, &mut to).map_err(wrong),
            (QpKind::Ud(qp), mut to) => {
                let change = UdModify {
                    state: change.rc.state,
                    qkey: change.qkey,
                    sq_psn: change.rc.sq_psn,
                };
                qp.modify(&change, &mut to).map_err(wrong)
            }
        }?;
        if let (QpKind::Rc(_) | QpKind::Uc(_), Some(path)) = (&self.kind, change.path) {
            self.set_path(path);
            if let QpKind::Rc(qp) = &mut self.kind {
                // Every peer is a softnic: no others are reached yet. They would be told by their
                // address.
                qp.set_selective(true);
            }
        }
        if change.rc.state == Some(QpState::Sqd) {
            self.sqd_notify = change.sqd_notify.unwrap_or(false);
        }
        if let Some(port) = change.port {
            self.set_port(port);
        }
        if let (QpKind::Uc(_), Some(lossy)) = (&self.kind, change.lossy) {
            self.lossy = lossy;
        }
        if change.rc.state == Some(QpState::Reset) {
            (self.path, self.peer, self.peer_port, self.routed) = (None, None, 0, true);
            (self.dest, self.told) = (None, false);
            (self.alternate, self.former) = (None, None);
        }
        Ok(())
    }

    pub(crate) fn state(&self) -> QpState {
        match &self.kind {
            QpKind::Rc(qp) => qp.state(),
            QpKind::Uc(qp) => qp.state(),
            QpKind::Ud(qp) => qp.state(),
        }
    }

    pub(crate) fn query(&self) -> QpSnapshot {
        let (rc, qkey) = match &self.kind {
            QpKind::Rc(qp) => (qp.attrs(), None),
            QpKind::Uc(qp) => (qp.attrs(), None),
            QpKind::Ud(qp) => {
                let a = qp.attrs();
                (RcModify { state: a.state, sq_psn: a.sq_psn, ..RcModify::default() }, a.qkey)
            }
        };
        let sq_draining = match &self.kind {
            QpKind::Rc(qp) => qp.draining(),
            QpKind::Uc(qp) => qp.draining(),
            QpKind::Ud(_) => false, // a message is a packet
        };
        let alternate = self.alternate.as_ref().map(|a| a.path);
        let (port, path) = (Some(self.port), self.path);
        let attrs = QpModify { rc, qkey, port, path, alternate, ..QpModify::default() };
        QpSnapshot { attrs, caps: self.caps, sq_draining }
    }

    /// Completes everything with `status` and flushes.
    pub(crate) fn fail(&mut self, status: WcStatus) {
        match self.parts() {
            (QpKind::Rc(qp), mut to) => qp.fail(status, &mut to),
            (QpKind::Uc(qp), mut to) => qp.fail(&mut to),
            (QpKind::Ud(qp), mut to) => qp.fail(&mut to),
        }
    }

    /// The NIC is gone: holds what it has if it was made so, else flushes it.
    pub(crate) fn stop(&mut self, status: WcStatus) {
        match self.parts() {
            (QpKind::Rc(qp), mut to) => qp.network_failure(status, &mut to),
            (QpKind::Uc(qp), mut to) => qp.fail(&mut to),
            (QpKind::Ud(qp), mut to) => qp.network_failure(status, &mut to),
        }
    }

    /// The QP is about to be destroyed: gives back what is not its own.
    pub(crate) fn release(&mut self) {
        match &mut self.kind {
            QpKind::Rc(qp) => qp.release(),
            QpKind::Uc(qp) => qp.release(),
            QpKind::Ud(_) => {}
        }
    }

    /// See [`RcQp::set_peer_keys`].
    pub(crate) fn set_peer_keys(&mut self, keys: Option<Arc<dyn PeerKeys>>) {
        if let QpKind::Rc(qp) = &mut self.kind {
            qp.set_peer_keys(keys);
        }
    }

    /// See [`RcQp::go_on`].
    pub(crate) fn go_on(&mut self, now_us: u64, insists: bool) -> bool {
        let QpKind::Rc(qp) = &mut self.kind else { return false };
        let goes_on = qp.go_on(now_us, insists);
        self.told &= !goes_on;
        goes_on
    }

    pub(crate) fn handle_timeout(&mut self, now_us: u64) {
        if let (QpKind::Rc(qp), mut to) = self.parts() {
            qp.handle_timeout(now_us, &mut to);
        }
    }

    /// Lets the QP push packets, at most `quota`; gives back in it how many it pushed.
    pub(crate) fn transmit(
        &mut self,
        now_us: u64,
        out: &mut Out<'_>,
        quota: &mut u32,
        acks: bool,
    ) -> TurnResult {
        let (of, socket) = ((self.pd, self.qpn), self.socket);
        let mut to = Completer {
            send_cq: &self.send_cq,
            recv_cq: &self.recv_cq,
            spilled: &mut self.spilled,
            flushes: self.flushes.as_deref_mut(),
        };
        match (&mut self.kind, self.dest) {
            (QpKind::Rc(qp), Some(dest)) => {
                let mut sink = QpSink::new(out, of, dest, socket, *quota).routed(self.routed);
                let more = if acks {
                    qp.poll_transmit(now_us, &mut sink, &mut to)
                } else {
                    qp.poll_transmit_data(now_us, &mut sink, &mut to)
                };
                *quota -= sink.quota();
                drop(sink);
                TurnResult {
                    more,
                    awaits_credit: false,
                    owes: qp.ack_owed(),
                    wanted: qp.wanted_room(),
                    timer_us: qp.poll_timeout().unwrap_or(u64::MAX),
                    retransmits: qp.take_retransmits(),
                }
            }
            (QpKind::Uc(qp), Some(dest)) => {
                let mut sink = QpSink::new(out, of, dest, socket, *quota).routed(self.routed);
                if !self.lossy {
                    sink = sink.unacknowledged();
                }
                let more = qp.poll_transmit(&mut sink, &mut to);
                *quota -= sink.quota();
                TurnResult::unacknowledged(more, sink.awaits_credit())
            }
            (QpKind::Rc(_) | QpKind::Uc(_), None) => {
                *quota = 0;
                TurnResult::unacknowledged(false, false)
            }
            (QpKind::Ud(qp), _) => {
                let mut sink = UdQpSink::new(out, of, socket, *quota, self.control);
                let more = qp.poll_transmit(&mut sink, &mut to);
                *quota -= sink.quota();
                TurnResult::unacknowledged(more, sink.awaits_credit())
            }
        }
    }

    /// A completion is lost, and the QP cannot go on without it. Nothing happens to one that has
    /// ended already.
    #[cold]
    pub(crate) fn end_spilled(&mut self) {
        if self.state() != QpState::Err {
            match self.parts() {
                (QpKind::Rc(qp), mut to) => qp.fail_here(WcStatus::WrFlushErr, &mut to),
                _ => self.fail(WcStatus::WrFlushErr),
            }
            self.fatal = self.state() == QpState::Err;
        }
        self.spilled = false;
    }

    /// Tells the owner what the transport has to tell. A QP that has lost a completion is ended
    /// first.
    #[inline]
    pub(crate) fn tell(&mut self, device: usize, sink: &dyn EventSink) {
        let qpn = self.qpn;
        if self.spilled {
            self.end_spilled();
        }
        if std::mem::take(&mut self.fatal) {
            sink.event(device, DeviceEvent::Qp { qpn, event: QpEvent::Fatal });
        }
        let last_wqe = match &mut self.kind {
            QpKind::Rc(qp) => qp.take_last_wqe(),
            QpKind::Uc(qp) => qp.take_last_wqe(),
            QpKind::Ud(qp) => qp.take_last_wqe(),
        };
        if last_wqe {
            sink.event(device, DeviceEvent::Qp { qpn, event: QpEvent::LastWqeReached });
        }
        let rested = match &self.kind {
            QpKind::Rc(_) => false, // has an event for it
            QpKind::Uc(qp) => qp.state() == QpState::Sqd && !qp.draining(),
            QpKind::Ud(qp) => qp.state() == QpState::Sqd, // a message is a packet
        };
        if rested && std::mem::take(&mut self.sqd_notify) {
            sink.event(device, DeviceEvent::Qp { qpn, event: QpEvent::SqDrained });
        }
        let QpKind::Rc(qp) = &mut self.kind else { return self.tell_failure(device, sink) };
        while let Some(event) = qp.take_event() {
            let event = match event {
                RcEvent::AccessError => QpEvent::AccessError,
                RcEvent::RequestError => QpEvent::RequestError,
                RcEvent::SqDrained if !self.sqd_notify => continue,
                RcEvent::SqDrained => QpEvent::SqDrained,
                RcEvent::CommEstablished => QpEvent::CommEstablished,
                RcEvent::PathMigrated => QpEvent::PathMigrated,
                RcEvent::MigrationFailed => QpEvent::PathMigrationFailed,
            };
            sink.event(device, DeviceEvent::Qp { qpn, event });
        }
        self.tell_failure(device, sink);
    }

    /// It has stopped, and its owner has to do something about it.
    #[inline]
    fn tell_failure(&mut self, device: usize, sink: &dyn EventSink) {
        let failure = match &self.kind {
            QpKind::Rc(qp) => qp.failure(),
            QpKind::Uc(_) => None,
            QpKind::Ud(qp) => qp.failure(),
        };
        if let Some(status) = failure.filter(|_| !self.told) {
            self.told = true;
            sink.event(device, DeviceEvent::QpFailed { qpn: self.qpn, status });
        }
    }
}
