//! What comes back to a requester: acknowledgements, READ responses, answers of atomics.

use super::{block_packets, Requester, RNR_FOR_EVER};
use crate::connection::Connection;
use crate::encoding::{psn_add, psn_ahead, psn_diff, rnr_timer_us, NakCode, Syndrome};
use crate::io::{scatter, Memory};
use crate::sq::{Data, Wqe};
use unbroken_types::{Completions, SendOpcode, WcStatus};
use unbroken_wire::{Ext, Packet};

/// A QP keeps its share of the room for no longer than this while it waits for a receive.
const SHORT_RNR_US: u64 = 2_000;

impl Requester {
    /// Takes an acknowledgement.
    pub(crate) fn on_ack(
        &mut self,
        now_us: u64,
        psn: u32,
        syndrome: u8,
        map: &[u8],
        connection: &Connection,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), WcStatus> {
        // Of an older flight, or of nothing that was sent.
        if psn_diff(psn, self.una) < 0 || psn_diff(psn, self.frontier) >= 0 {
            return Ok(());
        }
        let syndrome = Syndrome::parse(syndrome);
        let done_before = match syndrome {
            Syndrome::Ack => psn_add(psn, 1),
            Syndrome::Unknown => return Ok(()),
            _ => psn,
        };
        self.acknowledge(now_us, done_before, out)?;
        // A peer that says what it has need not be sent it again.
        let map = if connection.selective && syndrome == Syndrome::Nak(NakCode::Sequence) {
            map
        } else {
            &[]
        };
        if !map.is_empty() {
            self.requests_known(now_us, psn, map);
        }
        if self.una != done_before {
            // A peer that has ended answers nothing any more but this: to ask for what is missing
            // is left to the timeout, whose tries are counted.
            if !syndrome.ends_peer() {
                self.answers_missing(now_us, psn, done_before, connection);
            }
            return Ok(());
        }
        match syndrome {
            Syndrome::Nak(NakCode::Sequence) if !map.is_empty() => {}
            Syndrome::Ack | Syndrome::Unknown => {}
            Syndrome::Nak(NakCode::Sequence) => self.go_back_for_loss(),
            Syndrome::Nak(NakCode::InvalidRequest) => return Err(WcStatus::RemInvReqErr),
            Syndrome::Nak(NakCode::RemoteAccess) => return Err(WcStatus::RemAccessErr),
            Syndrome::Nak(NakCode::RemoteOperation) => return Err(WcStatus::RemOpErr),
            Syndrome::Rnr(timer) => return self.receiver_not_ready(now_us, timer),
        }
        Ok(())
    }

    fn receiver_not_ready(&mut self, now_us: u64, timer: u8) -> Result<(), WcStatus> {
        if self.rnr_until.is_some() {
            return Ok(()); // said twice
        }
        if self.limits.rnr_retry != RNR_FOR_EVER {
            if self.rnr_retries_left == 0 {
                return Err(WcStatus::RnrRetryExcErr);
            }
            self.rnr_retries_left -= 1;
        }
        // The peer answers: what counts timeouts starts over.
        self.retries_left = self.limits.retry_cnt;
        let (flight, wait_us) = (self.flight, rnr_timer_us(timer));
        self.go_back();
        if wait_us <= SHORT_RNR_US {
            // What came behind may not have been read yet: it counts until the wait is over.
            self.flight = flight;
        }
        self.go_gently();
        self.ack_deadline = None;
        self.rnr_until = Some(now_us + wait_us);
        self.not_ready = true;
        Ok(())
    }

    /// Takes a packet of a READ response, or the answer of an atomic.
    pub(crate) fn on_answer(
        &mut self,
        now_us: u64,
        packet: &Packet<'_>,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), WcStatus> {
        self.take_answer(now_us, packet, connection, mem, out)?;
        if self.repair.is_some() {
            self.take_kept_answers(now_us, connection, mem, out)?;
        }
        Ok(())
    }

    pub(super) fn take_answer(
        &mut self,
        now_us: u64,
        packet: &Packet<'_>,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), WcStatus> {
        // The value that an atomic found lies in memory in the host's order.
        let found = match packet.ext {
            Ext::AtomicAck(_, found) => Some(found.to_ne_bytes()),
            _ => None,
        };
        let (psn, payload) = (packet.bth.psn, found.as_ref().map_or(packet.payload, |f| &f[..]));
        if psn_diff(psn, self.una) < 0 || psn_diff(psn, self.frontier) >= 0 {
            return Ok(());
        }
        // The responder answers in order: everything before is executed.
        self.acknowledge(now_us, psn, out)?;
        if self.una != psn {
            self.answers_missing(now_us, psn, psn, connection);
            if connection.selective {
                self.keep_answer(now_us, packet, connection);
            }
            return Ok(());
        }
        let head = *self.ring.get(self.ring.head);
        let fits =
            if found.is_some() { head.opcode.is_atomic() } else { head.opcode == SendOpcode::Read };
        if !fits || self.ring.head >= self.assigned {
            return Ok(()); // an answer to something else: a stray
        }
        let index = psn_ahead(psn, head.first_psn);
        let offset = index * connection.mtu;
        if payload.len() as u32 != connection.mtu.min(head.len - offset) {
            return Err(WcStatus::BadRespErr);
        }
        if let Data::Sges(sges) = self.ring.data(self.ring.head) {
            scatter(mem, connection.pd, sges, offset as u64, payload)
                .map_err(|_| WcStatus::LocProtErr)?;
        }
        let block = block_packets(connection.mtu);
        // The first packet of an answer to what is no first request.
        self.in_pieces |= !index.is_multiple_of(block) && packet.bth.opcode.op.begins_answer();
        let block_ends = (index + 1).is_multiple_of(block) || index + 1 == head.packets;
        self.una = psn_add(psn, 1);
        self.landed(&head, 1);
        if block_ends && psn_diff(self.next_psn, self.una) >= 0 {
            self.reads_in_flight = self.reads_in_flight.saturating_sub(1);
        }
        self.progressed(now_us, 1);
        self.acknowledge(now_us, self.una, out)
    }

    /// Everything before `psn` is executed by the responder.
    fn acknowledge(
        &mut self,
        now_us: u64,
        psn: u32,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), WcStatus> {
        if psn_diff(psn, self.acked) > 0 {
            self.acked = psn;
        }
        let before = self.una;
        self.advance(out)?;
        let moved = psn_ahead(self.una, before);
        if moved > 0 {
            self.progressed(now_us, moved);
        }
        Ok(())
    }

    /// `una` has moved by `packets`.
    fn progressed(&mut self, now_us: u64, packets: u32) {
        self.advanced += packets as u64;
        self.window.acknowledged(packets, self.una);
        self.doubt_or_trust(now_us);
        self.restart_retries();
        self.faster();
        self.gap = None;
        (self.rnr_until, self.not_ready) = (None, false);
        self.probes = 0;
        self.armed = false;
        if let Some((_, sent_us)) = self.rtt_from.take_if(|(psn, _)| psn_diff(self.una, *psn) > 0) {
            self.measured(now_us.saturating_sub(sent_us));
        }
        if self.repair.is_some() {
            self.repaired(now_us, packets);
        }
        self.probe_at_us = match self.una == self.frontier {
            true => None,
            false => self.next_probe(now_us),
        };
        self.ack_deadline = match self.una == self.frontier {
            true => None,
            false => self.timeout_us().map(|t| now_us + t),
        };
    }

    /// Moves `una` over what `acked` covers and completes entries at the head that are done.
    pub(super) fn advance(
        &mut self,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), WcStatus> {
        while self.ring.head < self.ring.tail {
            if let Some((index, status)) = self.unsendable {
                if index == self.ring.head {
                    return Err(status);
                }
            }
            let wqe = *self.ring.get(self.ring.head);
            if !wqe.executed {
                if self.ring.head >= self.assigned {
                    break;
                }
                let left = wqe.packets - psn_ahead(self.una, wqe.first_psn);
                let step = match wqe.opcode {
                    op if op.awaits_data() => 0,
                    _ => left.min(psn_ahead(self.acked, self.una)),
                };
                self.una = psn_add(self.una, step);
                self.landed(&wqe, step);
                if step < left {
                    break;
                }
            }
            self.complete(&wqe, out);
        }
        if psn_diff(self.una, self.acked) > 0 {
            self.acked = self.una;
        }
        if psn_diff(self.next_psn, self.una) < 0 || self.cur < self.ring.head {
            self.resume_at_una();
        }
        Ok(())
    }

    fn complete(&mut self, wqe: &Wqe, out: &mut (impl Completions + ?Sized)) {
        self.ring.complete(out);
        self.assigned = self.assigned.max(self.ring.head);
        self.completed.count(wqe.opcode);
    }

    /// Something for `psn` has come, but not the answers for the READ in front, which were sent
    /// before it, as were all before `end`: they are lost.
    fn answers_missing(&mut self, now_us: u64, psn: u32, end: u32, connection: &Connection) {
        if connection.selective {
            return self.answers_known(now_us, end);
        }
        let known = self.gap.is_some_and(|(una, last)| una == self.una && psn_diff(psn, last) >= 0);
        if !known {
            self.go_back_for_loss();
        }
        self.gap = Some((self.una, psn));
    }
}
