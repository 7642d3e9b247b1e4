//! Selective retransmission: a requester that knows what has arrived sends again only what has not.
//!
//! A [`Repair`] is there while something is known to be missing, and is dropped when everything up
//! to the furthest thing known to have arrived is complete. It learns from two sources:
//! - the map in a NAK says which *requests* the responder keeps behind the one that it expects;
//! - an *answer* (READ response, atomic) that comes early is kept here; those before it had left
//!   before it.
//!
//! Missing is what lies before the furthest that has arrived and has not arrived itself. It is
//! taken for lost, and not for late, when [`REORDER_PACKETS`] others have overtaken it, or a
//! quarter of a round trip later. What was sent again is lost again when as many of the packets
//! that were sent *after* that have arrived, new ones or others that were sent again: so no clock
//! is needed where traffic flows. Where it does not, because the last packets of a flight are lost,
//! or the map is, a *probe* follows some round trips of silence: what is missing, or else the last
//! packet, is sent again and asks for an answer, which tells the rest. Probes do not count as
//! retries: those belong to the local ACK timeout, which goes on meanwhile and in the end goes back
//! to the oldest packet, forgetting all that was known. So does RNR.
//!
//! A READ of which answers are missing is asked for again in runs that lie within one block. Not
//! every peer answers those in any order: the kernel's rxe drops a repeat that begins before the
//! last one of the same request, for ever. So only the oldest is asked for, until the peer shows
//! that it is a softnic: it has sent a map, or answered such a run as a request of its own, with a
//! first packet (rxe sends a middle one). Requests that are sent again lie within what the
//! responder can keep: no new packet is sent further than that ahead of the oldest one
//! (`in_flight`).

use super::{block_packets, Requester};
use crate::connection::Connection;
use crate::early::{in_reach, psns_of, Early, EARLY_PACKETS};
use crate::encoding::{psn_add, psn_ahead, psn_diff};
use crate::io::{Memory, PacketSink, SinkError};
use unbroken_types::{Completions, WcStatus};
use unbroken_wire::Packet;

/// A packet that so many others have overtaken is lost.
const REORDER_PACKETS: i32 = 3;
/// A packet that others have overtaken may be late by a quarter of a round trip, at least this.
const MIN_SETTLE_US: u64 = 50;
/// A probe follows no less than so much silence: a peer must be given a core first.
const MIN_PROBE_US: u64 = 2_000;
/// Probes in a row. Each waits twice as long as the one before.
const MAX_PROBES: u32 = 8;

/// What is known of the packet of a PSN.
#[derive(Clone, Copy)]
struct Mark {
    psn: u32,
    /// The responder keeps it.
    kept: bool,
    resent: Option<Resent>,
}

/// When a packet was sent again.
#[derive(Clone, Copy)]
struct Resent {
    /// The PSN that was next to be sent for the first time.
    next_psn: u32,
    /// How many were sent again before it.
    order: u32,
}

#[derive(Clone)]
pub(super) struct Repair {
    /// By PSN modulo their number.
    marks: [Mark; EARLY_PACKETS as usize],
    /// Answers that came early.
    answers: Early,
    /// One past the furthest request that has arrived.
    requests_end: u32,
    /// One past the furthest answer that has left.
    answers_end: u32,
    /// What is missing before this is lost, however few have overtaken it.
    settled: u32,
    settle_at_us: Option<u64>,
    /// Packets sent again, which are one past the last of those that have arrived, and that number
    /// when `settled` was set.
    resent: u32,
    resent_arrived: u32,
    resent_settled: u32,
    /// Requests and answers that have arrived, of those in flight.
    pub(super) arrived: u32,
}

/// What is to be sent again of an entry, from one of its packets on.
enum Hole {
    /// So many packets are not missing.
    None(u32),
    /// A packet, or the answers of so many PSNs; and how many packets were lost.
    Lost(u32, u32),
}

impl Repair {
    fn new(una: u32) -> Repair {
        Repair {
            marks: [Mark { psn: u32::MAX, kept: false, resent: None }; EARLY_PACKETS as usize],
            answers: Early::default(),
            requests_end: una,
            answers_end: una,
            settled: una,
            settle_at_us: None,
            resent: 0,
            resent_arrived: 0,
            resent_settled: 0,
            arrived: 0,
        }
    }

    fn mark(&mut self, psn: u32) -> &mut Mark {
        let mark = &mut self.marks[(psn % EARLY_PACKETS) as usize];
        if mark.psn != psn {
            *mark = Mark { psn, kept: false, resent: None };
        }
        mark
    }

    fn known(&self, psn: u32) -> Mark {
        let mark = self.marks[(psn % EARLY_PACKETS) as usize];
        if mark.psn == psn {
            mark
        } else {
            Mark { psn, kept: false, resent: None }
        }
    }

    /// One past the furthest thing that is known to have arrived.
    fn end(&self) -> u32 {
        if psn_diff(self.requests_end, self.answers_end) > 0 {
            self.requests_end
        } else {
            self.answers_end
        }
    }

    /// Whether what is missing is lost, where everything before `end` had left before something
    /// that has arrived.
    fn lost(&self, psn: u32, end: u32) -> bool {
        let (overtaken, settled) = match self.known(psn).resent {
            None => (psn_diff(end, psn_add(psn, 1)), psn_diff(psn, self.settled) < 0),
            Some(Resent { next_psn, order }) => {
                let by_resent = self.resent_arrived.saturating_sub(order + 1) as i32;
                (psn_diff(end, next_psn).max(by_resent), order + 1 < self.resent_settled)
            }
        };
        psn_diff(psn, end) < 0 && (overtaken >= REORDER_PACKETS || settled)
    }

    /// The packet of this PSN has arrived.
    fn has_arrived(&mut self, psn: u32) {
        if let Some(Resent { order, .. }) = self.known(psn).resent {
            self.resent_arrived = self.resent_arrived.max(order + 1);
        }
    }

    /// Nothing is late any more.
    fn settle(&mut self) {
        self.settle_at_us = None;
        (self.settled, self.resent_settled) = (self.end(), self.resent_arrived);
    }

    fn settles(&self) -> bool {
        psn_diff(self.end(), self.settled) > 0 || self.resent_arrived > self.resent_settled
    }

    fn request_lost(&self, psn: u32) -> bool {
        !self.known(psn).kept && self.lost(psn, self.requests_end)
    }

    fn answer_lost(&self, psn: u32) -> bool {
        !self.answers.holds(psn) && self.lost(psn, self.answers_end)
    }

    pub(super) fn heap_bytes(&self) -> usize {
        size_of::<Repair>() + self.answers.heap_bytes()
    }
}

impl Requester {
    // What is known

    /// The responder expects `psn` and keeps what the map says.
    pub(super) fn requests_known(&mut self, now_us: u64, psn: u32, map: &[u8]) {
        let (una, frontier) = (self.una, self.frontier);
        self.in_pieces = true; // no peer but a softnic sends maps
        let repair = self.repair.get_or_insert_with(|| Box::new(Repair::new(una)));
        repair.mark(psn).kept = false;
        for kept in
            psns_of(map, psn_add(psn, 1)).filter(|&p| in_reach(p, una) && psn_diff(p, frontier) < 0)
        {
            repair.has_arrived(kept);
            repair.mark(kept).kept = true;
            let end = psn_add(kept, 1);
            if psn_diff(end, repair.requests_end) > 0 {
                repair.requests_end = end;
            }
        }
        self.learned(now_us);
    }

    /// All answers before `end` have left the responder.
    pub(super) fn answers_known(&mut self, now_us: u64, end: u32) {
        let una = self.una;
        let repair = self.repair.get_or_insert_with(|| Box::new(Repair::new(una)));
        if psn_diff(end, repair.answers_end) > 0 {
            repair.answers_end = end;
        }
        self.learned(now_us);
    }

    /// Keeps an answer that came before its turn.
    pub(super) fn keep_answer(
        &mut self,
        now_us: u64,
        packet: &Packet<'_>,
        connection: &Connection,
    ) {
        let (una, psn) = (self.una, packet.bth.psn);
        if !in_reach(psn, una) || packet.payload.len() > connection.mtu as usize {
            return;
        }
        let repair = self.repair.get_or_insert_with(|| Box::new(Repair::new(una)));
        repair.has_arrived(psn);
        repair.answers.put(packet);
        self.answers_known(now_us, psn_add(psn, 1));
    }

    fn learned(&mut self, now_us: u64) {
        let settle_us = (u64::from(self.rtt.srtt_us()) / 4).max(MIN_SETTLE_US);
        let Some(repair) = &mut self.repair else { return };
        if repair.settle_at_us.is_none() && repair.settles() {
            repair.settle_at_us = Some(now_us + settle_us);
        }
        self.mending = true;
        self.count_arrived();
    }

    fn count_arrived(&mut self) {
        let (una, in_flight) = (self.una, psn_ahead(self.next_psn, self.una).min(EARLY_PACKETS));
        let Some(repair) = &mut self.repair else { return };
        let arrived = |&i: &u32| {
            let psn = psn_add(una, i);
            repair.known(psn).kept || repair.answers.holds(psn)
        };
        repair.arrived = (0..in_flight).filter(arrived).count() as u32;
    }

    /// `una` has moved by `packets`.
    #[cold]
    pub(super) fn repaired(&mut self, now_us: u64, packets: u32) {
        let una = self.una;
        let Some(repair) = &mut self.repair else { return };
        if psn_diff(una, repair.end()) >= 0 {
            self.repair = None;
            return;
        }
        for i in 1..=packets.min(EARLY_PACKETS) {
            repair.has_arrived(psn_ahead(una, i));
        }
        self.learned(now_us);
    }

    /// Takes answers that were kept, as far as it is their turn.
    #[cold]
    pub(super) fn take_kept_answers(
        &mut self,
        now_us: u64,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), WcStatus> {
        while let Some(held) = self.repair.as_mut().and_then(|r| r.answers.take(self.una)) {
            let una = self.una;
            self.take_answer(now_us, &held.packet(), connection, mem, out)?;
            if self.una == una {
                break; // an answer to something else
            }
        }
        Ok(())
    }

    // Sending again

    /// Sends what is lost. True: the sink was full, there is more to send.
    #[cold]
    #[inline(never)]
    pub(super) fn mend(
        &mut self,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> bool {
        let sent = match self.repair.take() {
            Some(mut repair) => {
                let sent = self.push_lost(&mut repair, connection, sink);
                self.repair = Some(repair);
                sent
            }
            None if self.resend_last => self.push_last(connection, sink),
            None => Ok(()),
        };
        match sent {
            Err((_, SinkError::Full)) => return true,
            Err((index, SinkError::Memory(_))) => {
                self.unsendable = Some((index, WcStatus::LocProtErr))
            }
            Ok(()) => {}
        }
        (self.mending, self.resend_last) = (false, false);
        false
    }

    fn push_lost(
        &mut self,
        repair: &mut Repair,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> Result<(), (u64, SinkError)> {
        // Having gone back, what is ahead will be sent again anyway.
        let end =
            if psn_diff(repair.end(), self.next_psn) < 0 { repair.end() } else { self.next_psn };
        for index in self.ring.head..self.assigned {
            let wqe = *self.ring.get(index);
            let mut k =
                if index == self.ring.head { psn_ahead(self.una, wqe.first_psn) } else { 0 };
            while !wqe.executed && k < wqe.packets {
                let psn = psn_add(wqe.first_psn, k);
                if psn_diff(psn, end) >= 0 || !in_reach(psn, self.una) {
                    return Ok(());
                }
                match self.hole(repair, &wqe, k, connection.mtu) {
                    Hole::None(packets) => k += packets,
                    Hole::Lost(packets, lost) => {
                        self.push_again(index, k, packets, connection, sink)
                            .map_err(|e| (index, e))?;
                        let resent = Resent { next_psn: self.next_psn, order: repair.resent };
                        repair.resent += 1;
                        for i in 0..packets {
                            repair.mark(psn_add(psn, i)).resent = Some(resent);
                        }
                        self.lost += lost;
                        (0..lost).for_each(|_| self.window.lost_one(self.frontier));
                        k += packets;
                    }
                }
            }
        }
        Ok(())
    }

    /// What is missing of an entry from packet `k` on.
    fn hole(&self, repair: &Repair, wqe: &crate::sq::Wqe, k: u32, mtu: u32) -> Hole {
        let psn = psn_add(wqe.first_psn, k);
        let executed = |psn: u32| psn_diff(psn, self.acked) < 0;
        if !wqe.opcode.awaits_data() {
            let lost = !executed(psn) && repair.request_lost(psn);
            return if lost { Hole::Lost(1, 1) } else { Hole::None(1) };
        }
        let block = block_packets(mtu);
        let (begin, end) = (k / block * block, wqe.packets.min((k / block + 1) * block));
        let request = psn_add(wqe.first_psn, begin);
        if !executed(request) {
            let left = end - k;
            return if repair.request_lost(request) {
                Hole::Lost(left, 1)
            } else {
                Hole::None(left)
            };
        }
        if !self.in_pieces && psn != self.una {
            return Hole::None(end - k);
        }
        match (k..end).take_while(|&k| repair.answer_lost(psn_add(wqe.first_psn, k))).count() as u32
        {
            0 => Hole::None(1),
            run => Hole::Lost(run, run),
        }
    }

    /// Sends the last packet of the flight, or asks again for what is missing of its last READ.
    fn push_last(
        &mut self,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> Result<(), (u64, SinkError)> {
        if self.next_psn == self.una {
            return Ok(());
        }
        let mut index = if self.cur_packet > 0 { self.cur + 1 } else { self.cur };
        while index > self.ring.head {
            index -= 1;
            let wqe = *self.ring.get(index);
            let end = if index == self.cur { self.cur_packet } else { wqe.packets };
            if wqe.executed || end == 0 {
                continue;
            }
            let mut k = end - 1;
            if wqe.opcode.awaits_data() {
                let block = block_packets(connection.mtu);
                k = k / block * block;
                if index == self.ring.head {
                    k = k.max(psn_ahead(self.una, wqe.first_psn));
                }
            }
            return self.push_again(index, k, end - k, connection, sink).map_err(|e| (index, e));
        }
        Ok(())
    }

    /// Sends packet `k` of an entry again, or asks again for the answers of `packets`.
    fn push_again(
        &mut self,
        index: u64,
        k: u32,
        packets: u32,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> Result<(), SinkError> {
        let wqe = self.on_wire(index);
        if wqe.opcode == unbroken_types::SendOpcode::Read {
            self.push_read_request(&wqe, k, packets, connection, sink)?;
        } else if wqe.opcode.is_atomic() {
            self.push_atomic_request(&wqe, connection, sink)?;
        } else {
            self.push_segment(index, &wqe, k, true, connection, sink)?;
        }
        self.retransmits += 1;
        self.rtt_from = None; // whose answer comes could not be told
        Ok(())
    }

    // Time

    /// When a probe is due if nothing comes. Without a measured round trip there is none.
    pub(super) fn next_probe(&self, now_us: u64) -> Option<u64> {
        let probes = self.probing && self.rtt.srtt_us() > 0;
        if self.insists {
            return probes.then(|| now_us + self.insist_probe_us(MIN_PROBE_US));
        }
        let probes = probes && self.probes < MAX_PROBES;
        let doublings = self.probes.max(self.doubt);
        probes.then(|| now_us + self.wait_us(doublings).max(MIN_PROBE_US << self.probes))
    }

    pub(super) fn settle_at_us(&self) -> Option<u64> {
        self.repair.as_ref().and_then(|r| r.settle_at_us)
    }

    /// Looks at the timers of the repair.
    pub(super) fn repair_timeout(&mut self, now_us: u64) {
        if let Some(repair) = &mut self.repair {
            if repair.settle_at_us.is_some_and(|t| t <= now_us) {
                repair.settle();
                self.mending = true;
            }
        }
        if self.probe_at_us.is_none_or(|t| t > now_us) {
            return;
        }
        self.probes = (self.probes + 1).min(MAX_PROBES);
        self.again_us = now_us;
        self.probe_at_us = self.next_probe(now_us);
        // What was sent again is not on its way any more. If nothing is missing, the map of what is
        // was lost, or all is.
        let una = self.una;
        let missing = self.repair.as_mut().is_some_and(|repair| {
            repair.marks.iter_mut().for_each(|m| m.resent = None);
            repair.settle();
            repair.arrived < psn_ahead(repair.end(), una)
        });
        if !missing {
            self.repair = None;
        }
        self.resend_last = !missing;
        self.mending = true;
    }
}
