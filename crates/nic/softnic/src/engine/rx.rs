//! Packets on their way in.

use super::alias::Aliases;
use super::counts::RxCount;
use super::credit::Accounts;
use super::impair::{flip_bit, RxTag};
use super::qps::QpTable;
use super::rnr_queue::{Parked, RnrQueue, Waiting};
use super::{Engine, Identity, QpEntry, QpKind, BULK_BYTES, DRIVE_RECEIVES};
use crate::memory::View;
use crate::socket::{Marks, RxRing};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use unbroken_fabric::{on_one_rail, packet_cost, MAX_PORTS};
use unbroken_wire::{IcrcChecker, IcrcFlow, Op, Packet, Transport, ICRC_BYTES, ROCE_PORT};

/// What became of one packet.
enum Verdict {
    /// Its QP took it; bytes of data.
    Taken(usize),
    /// Not for us, not from whom it should be, or nothing was there to take it.
    Dropped,
    BadIcrc,
    /// It is for a QP, but not from its peer.
    Stranger,
    /// It waits for a receive; it will be counted when it is handed over.
    Waits,
}

impl Verdict {
    fn of(taken: bool, control: bool, packet: &Packet<'_>) -> Verdict {
        if taken {
            Verdict::Taken(if control { 0 } else { data_bytes(packet) })
        } else {
            Verdict::Dropped
        }
    }
}

/// Bytes of the application in a packet of one of its QPs: the map in a NAK is none of its.
#[inline]
fn data_bytes(packet: &Packet<'_>) -> usize {
    if packet.bth.opcode.op == Op::Acknowledge {
        return 0;
    }
    packet.payload.len()
}

/// Whether senders reserve credit for packets like this one: the transport is in the upper three
/// bits.
fn is_unacknowledged(packet: &[u8]) -> bool {
    packet.first().is_some_and(
        |b| matches!(b >> 5, t if t == Transport::Uc as u8 || t == Transport::Ud as u8),
    )
}

/// Whether the QP that a packet is for has told its peer to reserve nothing; not asked of
/// acknowledged packets.
fn is_lossy(packet: &[u8], qps: &mut QpTable) -> bool {
    let Some([_, high, low_high, low]) = packet.get(4..8) else { return false };
    let qpn = u32::from_be_bytes([0, *high, *low_high, *low]);
    qps.get_mut(qpn as u16).is_some_and(|q| q.qpn == qpn && q.lossy)
}

/// Whether a packet of RC, whose first byte this is, is no answer to a request.
fn is_request(first: u8) -> bool {
    !(Op::ReadResponseFirst as u8..=Op::AtomicAcknowledge as u8).contains(&first)
}

/// The segments of a run, with their places. Requests and the acknowledgement behind them are one
/// run, which costs its sender one system call. The acknowledgement is older than they are, so it is
/// handled first: a program's send completes before it receives the answer.
#[inline]
fn in_turn(bytes: &[u8], segment: usize) -> impl Iterator<Item = (usize, &[u8])> {
    let last = bytes.len().saturating_sub(1) / segment;
    let ack = last > 0
        && bytes[last * segment] == Op::Acknowledge as u8
        && bytes.chunks(segment).take(last).all(|packet| is_request(packet[0]));
    let turned = bytes.chunks(segment).enumerate().skip(last).take(usize::from(ack));
    turned.chain(bytes.chunks(segment).enumerate().take(last + usize::from(!ack)))
}

impl Engine {
    /// Takes what waits at the ports' sockets, as much as a ring holds; gives how many datagrams of
    /// each.
    pub(super) fn receive(
        &mut self,
        which: impl Fn(&RxRing) -> bool,
    ) -> [usize; MAX_PORTS as usize] {
        let mut arrived = [0; MAX_PORTS as usize];
        for (port, socket) in self.sockets.iter().flat_map(|s| s.rx.iter().enumerate()) {
            if which(&self.rx_rings[port]) {
                arrived[port] = self.rx_rings[port].receive(socket);
                self.rx_counts[port].drops += u64::from(self.rx_rings[port].overruns());
            }
        }
        arrived
    }

    /// A program reads the headers of its datagrams: they come with their marks from now on.
    pub(crate) fn tell_marks(&self) {
        let sockets = self.sockets.iter().flat_map(|sockets| &sockets.rx);
        sockets.zip(&self.id.ips).for_each(|(socket, ip)| socket.tell_marks(*ip));
    }

    /// Takes more where much is waiting, if it is small.
    pub(super) fn receive_more(&mut self, now_us: u64, view: &View<'_>) {
        for _ in 1..DRIVE_RECEIVES {
            let bytes: u64 = self.rx_counts.iter().map(|c| c.bytes).sum();
            if bytes >= BULK_BYTES || !self.rx_rings.iter().any(RxRing::full) {
                break;
            }
            let arrived = self.receive(RxRing::full);
            self.handle_received(&arrived, now_us, view);
        }
    }

    /// Handles so many datagrams of the ring of each port, and what was held on its way in and is
    /// due.
    pub(super) fn handle_received(&mut self, counts: &[usize], now_us: u64, view: &View<'_>) {
        self.aliases.look();
        let before = self.rx_counts.map(|c| c.payload_bytes);
        for (port, count) in counts.iter().enumerate() {
            for i in 0..*count {
                self.handle_datagram(port, i, now_us, view);
            }
        }
        if self.impairments.is_some() {
            self.handle_held(now_us, view);
        }
        for (port, page) in self.pages.iter().enumerate() {
            if self.rx_counts[port].payload_bytes != before[port] {
                self.gaps.record(now_us);
                page.slot(self.id.slot as u8).last_data_rx_us.store(now_us, Relaxed);
            }
        }
    }

    /// Handles a run of segments. The kernel numbered them from 0 when it cut them, which their
    /// ICRCs cover.
    fn handle_datagram(&mut self, port: usize, i: usize, now_us: u64, view: &View<'_>) {
        let Engine {
            rx_rings,
            rx_counts,
            state,
            id,
            qps,
            ready,
            impairments,
            pages,
            rnr_queue,
            accounts,
            aliases,
            moved,
            ..
        } = self;
        let rx_count = &mut rx_counts[port];
        let Some(d) = rx_rings[port].datagram(i) else { return };
        let apart = state.apart && !on_one_rail(d.src.ip(), id.ips[port]);
        // All segments of a run are of one QP.
        let credited = is_unacknowledged(d.bytes) && !is_lossy(d.bytes, qps);
        let flow = IcrcFlow {
            src_ip: d.src.ip(),
            dst_ip: id.ips[port],
            src_port: d.src.port(),
            dst_port: ROCE_PORT + id.slot,
        };
        let mut icrc = IcrcChecker::new(&flow, d.segment);
        let marks = d.marks;
        let mut qps = Receivers { qps, ready, rnr_queue, accounts, aliases, moved, id, marks };
        for (place, segment) in in_turn(d.bytes, d.segment) {
            let credit = if credited { packet_cost(1, segment.len() as u64) } else { 0 };
            rx_count.credit += credit;
            if apart || !state.passes(port as u8 + 1) {
                rx_count.drops += 1;
                continue;
            }
            let place = place as u16;
            if let Some(i) = impairments.as_mut().and_then(|i| i.rx(port)) {
                let lost = i.loses();
                if lost || i.holds() {
                    let line = &pages[port].lines()[1];
                    let tag = RxTag { flow, marks, place };
                    let mut hold = || i.hold(now_us, line, segment.len(), segment.into(), tag);
                    rx_count.drops += u64::from(lost || !hold());
                    continue;
                }
            }
            let verdict = qps.take(&mut icrc, place, segment, credit, now_us, view);
            if matches!(verdict, Verdict::Waits) {
                // The sender gets it back when the packet need not wait any more.
                rx_count.credit -= credit;
            }
            rx_count.add(&verdict, segment.len());
        }
    }

    /// Hands over packets that waited for a receive, as far as there is one now, or they waited too
    /// long.
    #[cold]
    pub(super) fn handle_parked(&mut self, now_us: u64, view: &View<'_>) {
        self.aliases.look();
        let Engine { rx_counts, id, qps, rnr_queue, ready, aliases, .. } = self;
        rnr_queue.look(qps, now_us, |q, waiting| {
            let rx_count = &mut rx_counts[id.port_of(waiting.dst)];
            rx_count.credit += waiting.cost;
            let verdict = match (q, Packet::parse(&waiting.bytes)) {
                (Some(q), Ok(packet)) => {
                    let mem = view.of_qp(q.qpn);
                    let way = (waiting.src, waiting.dst, waiting.marks);
                    let taken = q.receive(&packet, way, aliases, &mem);
                    queue_spilled(q, ready);
                    Verdict::of(taken, q.control, &packet)
                }
                _ => Verdict::Dropped,
            };
            rx_count.add(&verdict, waiting.bytes.len() + ICRC_BYTES);
        });
    }

    /// Handles packets that were held on their way in and are due.
    #[cold]
    fn handle_held(&mut self, now_us: u64, view: &View<'_>) {
        let Engine {
            rx_counts,
            id,
            qps,
            ready,
            impairments: Some(i),
            rnr_queue,
            accounts,
            aliases,
            moved,
            ..
        } = self
        else {
            return;
        };
        let marks = Marks::default();
        let mut qps = Receivers { qps, ready, rnr_queue, accounts, aliases, moved, id, marks };
        for (port, rx_count) in rx_counts.iter_mut().enumerate() {
            while let Some(mut held) = i.rx(port).and_then(|i| i.pop(now_us)) {
                if let Some(choice) = held.damage {
                    flip_bit(&mut held.bytes, choice);
                }
                // Its sender got its credit back when it left the socket.
                qps.marks = held.tag.marks;
                let mut icrc = IcrcChecker::new(&held.tag.flow, held.bytes.len());
                let verdict = qps.take(&mut icrc, held.tag.place, &held.bytes, 0, now_us, view);
                rx_count.add(&verdict, held.bytes.len());
            }
        }
    }
}

/// The QPs that packets are for.
struct Receivers<'a> {
    qps: &'a mut QpTable,
    ready: &'a mut VecDeque<u16>,
    aliases: &'a Aliases,
    rnr_queue: &'a mut RnrQueue,
    accounts: &'a mut Accounts,
    /// QPs whose paths have changed.
    moved: &'a mut Vec<u16>,
    id: &'a Identity,
    /// Of the packets that are given now.
    marks: Marks,
}

impl Receivers<'_> {
    /// Gives a packet to its QP. `place` is its place in the run that it came in, `credit` what its
    /// sender gets back for it.
    #[inline]
    fn take(
        &mut self,
        icrc: &mut IcrcChecker,
        place: u16,
        segment: &[u8],
        credit: u64,
        now_us: u64,
        view: &View<'_>,
    ) -> Verdict {
        let Some(bytes) = icrc.strip(segment, place, self.id.any_ip_id) else {
            return Verdict::BadIcrc;
        };
        let flow = icrc.flow();
        let Ok(packet) = Packet::parse(bytes) else { return Verdict::Dropped };
        let qpn = packet.bth.dest_qpn;
        let index = qpn as u16;
        let Some(q) = self.qps.get_mut(index).filter(|q| q.qpn == qpn) else {
            return Verdict::Dropped;
        };
        let mem = &view.of_qp(qpn);
        let admitted = match &q.kind {
            QpKind::Ud(_) => admits_datagram(&packet, flow, self.accounts),
            _ => {
                q.peer_port == flow.src_port && q.is_peer(flow.src_ip)
                    || admits_other_port(q, flow, self.accounts)
            }
        };
        if !admitted {
            return Verdict::Stranger;
        }
        if matches!(&q.kind, QpKind::Rc(qp) if qp.is_news(packet.bth.mig_req))
            && q.hear(&packet, flow, &self.id.ips, now_us)
        {
            self.moved.push(index);
        }
        if let (QpKind::Rc(qp), mut to) = q.parts() {
            qp.handle_packet(now_us, &packet, mem, &mut to);
            if q.spilled {
                // Before the next packet: what is lost must not be acknowledged.
                q.end_spilled();
            }
        } else {
            let (src, dst, marks) = (flow.src_ip, flow.dst_ip, self.marks);
            let wait =
                || Waiting { bytes: bytes.into(), src, dst, marks, since_us: now_us, cost: credit };
            let parked = if q.lossy { Parked::No } else { self.rnr_queue.takes(q, &packet, wait) };
            let verdict = match parked {
                Parked::No => Verdict::of(
                    q.receive(&packet, (src, dst, marks), self.aliases, mem),
                    q.control,
                    &packet,
                ),
                Parked::Yes => Verdict::Waits,
                Parked::Full => Verdict::Dropped,
            };
            queue_spilled(q, self.ready);
            return verdict;
        }
        if !q.queued {
            q.queued = true;
            self.ready.push_back(index);
        }
        Verdict::Taken(data_bytes(&packet))
    }
}

/// Whether a packet that did not come from where the last one came from is for this RC or UC QP all
/// the same. It must be from the peer's address. In the emulated network, to which any process of
/// the machine can send, it must also come from a UDP port that the owner of the peer's slot has
/// said to be its own.
#[cold]
fn admits_other_port(q: &mut QpEntry, flow: &IcrcFlow, accounts: &mut Accounts) -> bool {
    let slot = (q.dest_qpn().unwrap_or(0) >> 16) as u8;
    let admitted = q.is_peer_of_any_path(flow.src_ip)
        && q.routed
        && accounts.sends_from(flow.src_ip, slot, flow.src_port).unwrap_or(true);
    if admitted {
        q.peer_port = flow.src_port;
    }
    admitted
}

/// UD takes packets from anybody; in the emulated network from its NICs alone, and from the slot
/// that the packet says it is from.
#[inline]
fn admits_datagram(packet: &Packet<'_>, flow: &IcrcFlow, accounts: &mut Accounts) -> bool {
    if !accounts.in_fabric() {
        return true;
    }
    let slot = packet.ext.deth().map_or(0, |deth| (deth.src_qpn >> 16) as u8);
    accounts.sends_from(flow.src_ip, slot, flow.src_port).unwrap_or(false)
}

/// UC and UD answer nothing, and so need no turn after a packet, unless its completion found no
/// room.
fn queue_spilled(q: &mut QpEntry, ready: &mut VecDeque<u16>) {
    if q.spilled && !q.queued {
        q.queued = true;
        ready.push_back(q.qpn as u16);
    }
}

impl RxCount {
    fn add(&mut self, verdict: &Verdict, bytes: usize) {
        match verdict {
            Verdict::Taken(payload) => {
                self.packets += 1;
                self.bytes += bytes as u64;
                self.payload_bytes += *payload as u64;
            }
            Verdict::Dropped => self.drops += 1,
            Verdict::BadIcrc => self.icrc_errors += 1,
            Verdict::Stranger => self.strangers += 1,
            Verdict::Waits => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_acknowledgement_behind_requests_is_handled_before_them() {
        use Op::{Acknowledge, ReadResponseLast, SendOnly, WriteMiddle};
        let run = |ops: &[Op]| -> Vec<u8> {
            let packet = |op: &Op| [*op as u8; 20];
            let bytes: Vec<u8> = ops.iter().flat_map(packet).collect();
            // The last one is shorter.
            bytes[..bytes.len() - 4].to_vec()
        };
        let places = |ops: &[Op]| -> Vec<(usize, usize)> {
            in_turn(&run(ops), 20).map(|(place, packet)| (place, packet.len())).collect()
        };
        assert_eq!(places(&[SendOnly, SendOnly, Acknowledge]), [(2, 16), (0, 20), (1, 20)]);
        assert_eq!(places(&[Acknowledge]), [(0, 16)]);
        assert_eq!(places(&[SendOnly, WriteMiddle]), [(0, 20), (1, 16)]);
        // It says that the response before it was sent.
        assert_eq!(places(&[ReadResponseLast, Acknowledge]), [(0, 20), (1, 16)]);
    }
}
