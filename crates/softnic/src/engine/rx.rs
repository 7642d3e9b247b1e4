//! Packets on their way in.

use super::impair::{flip_bit, RxTag};
use super::qps::QpTable;
use super::{Engine, QpKind, RxCount};
use crate::memory::View;
use crate::nics::{gid_of, lid_of};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use unbroken_roce::UdRoute;
use unbroken_types::LinkLayer;
use unbroken_wire::{IcrcChecker, IcrcFlow, Packet, ROCE_PORT};

/// What became of one packet.
enum Verdict {
    /// Its QP took it; bytes of payload.
    Taken(usize),
    /// Not for us, or not from whom it should be.
    Dropped,
    BadIcrc,
}

impl Engine {
    /// Handles the first `count` datagrams of the ring, and what was held on its way in and is due.
    pub(super) fn handle_received(&mut self, count: usize, now_us: u64, view: &View<'_>) {
        let before = self.rx_count.payload_bytes;
        for i in 0..count {
            self.handle_datagram(i, now_us, view);
        }
        if self.impairments.is_some() {
            self.handle_held(now_us, view);
        }
        if self.rx_count.payload_bytes != before {
            self.gaps.record(now_us);
            self.page.slot(self.id.slot as u8).last_data_rx_us.store(now_us, Relaxed);
        }
    }

    /// Handles a run of segments. The kernel numbered them from 0 when it cut them, which their ICRCs cover.
    fn handle_datagram(&mut self, i: usize, now_us: u64, view: &View<'_>) {
        let Engine { rx_ring, rx_count, state, id, qps, ready, impairments, page, .. } = self;
        let Some(d) = rx_ring.datagram(i) else { return };
        let flow =
            IcrcFlow { src_ip: d.src.ip(), dst_ip: id.ip, src_port: d.src.port(), dst_port: ROCE_PORT + id.slot };
        let mut icrc = IcrcChecker::new(&flow, d.segment);
        let mut qps = Receivers { qps, ready, link_layer: id.link_layer, any_ip_id: id.any_ip_id };
        for (place, segment) in d.bytes.chunks(d.segment).enumerate() {
            if !state.passes() {
                rx_count.drops += 1;
                continue;
            }
            let place = place as u16;
            if let Some(i) = impairments {
                let lost = i.rx.loses();
                if lost || i.rx.holds() {
                    let mut hold =
                        || i.rx.hold(now_us, &page.lines()[1], segment.len(), segment.into(), RxTag { flow, place });
                    rx_count.drops += u64::from(lost || !hold());
                    continue;
                }
            }
            let verdict = qps.take(&mut icrc, place, segment, now_us, view);
            rx_count.add(&verdict, segment.len());
        }
    }

    /// Handles packets that were held on their way in and are due.
    #[cold]
    fn handle_held(&mut self, now_us: u64, view: &View<'_>) {
        let Engine { rx_count, id, qps, ready, impairments: Some(i), .. } = self else { return };
        let mut qps = Receivers { qps, ready, link_layer: id.link_layer, any_ip_id: id.any_ip_id };
        while let Some(mut held) = i.rx.pop(now_us) {
            if let Some(choice) = held.damage {
                flip_bit(&mut held.bytes, choice);
            }
            let mut icrc = IcrcChecker::new(&held.tag.flow, held.bytes.len());
            let verdict = qps.take(&mut icrc, held.tag.place, &held.bytes, now_us, view);
            rx_count.add(&verdict, held.bytes.len());
        }
    }
}

/// The QPs that packets are for.
struct Receivers<'a> {
    qps: &'a mut QpTable,
    ready: &'a mut VecDeque<u16>,
    link_layer: LinkLayer,
    any_ip_id: bool,
}

impl Receivers<'_> {
    /// Gives a packet to its QP. `place` is its place in the run that it came in.
    #[inline]
    fn take(&mut self, icrc: &mut IcrcChecker, place: u16, segment: &[u8], now_us: u64, view: &View<'_>) -> Verdict {
        let Some(bytes) = icrc.strip(segment, place, self.any_ip_id) else { return Verdict::BadIcrc };
        let flow = icrc.flow();
        let Ok(packet) = Packet::parse(bytes) else { return Verdict::Dropped };
        let qpn = packet.bth.dest_qpn;
        let index = qpn as u16;
        let Some(q) = self.qps.get_mut(index).filter(|q| q.qpn == qpn) else { return Verdict::Dropped };
        let peer = q.peer.map(|(_, ip)| ip);
        let mem = &view.of_qp(qpn);
        let (kind, mut to) = q.parts();
        match kind {
            QpKind::Rc(qp) => {
                if peer != Some(flow.src_ip) {
                    return Verdict::Dropped;
                }
                qp.handle_packet(now_us, &packet, mem, &mut to);
            }
            QpKind::Uc(qp) => {
                if peer != Some(flow.src_ip) {
                    return Verdict::Dropped;
                }
                qp.handle_packet(&packet, mem, &mut to);
            }
            QpKind::Ud(qp) => {
                let [src, dst] = [flow.src_ip, flow.dst_ip].map(|ip| gid_of(ip, self.link_layer));
                let route = UdRoute { src, dst, slid: lid_of(flow.src_ip, self.link_layer) };
                qp.handle_packet(&packet, &route, mem, &mut to);
            }
        }
        if !q.queued {
            q.queued = true;
            self.ready.push_back(index);
        }
        Verdict::Taken(packet.payload.len())
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
        }
    }
}
