//! The sending half of an RC QP: Go-back-N with a window.
//!
//! The send queue and the PSN space run side by side:
//!
//! ```text
//!   queue   head ......... cur ......... assigned ......... tail
//!           oldest         next to       first without      next to
//!           outstanding    send          PSNs               be posted
//!   PSN     una ......... next_psn ..... frontier
//!           oldest not     next to       first that was
//!           acknowledged   send          never sent
//! ```
//!
//! Invariants: `head ≤ cur ≤ assigned ≤ tail`; `una ≤ acked ≤ frontier` and `una ≤ next_psn ≤ frontier`; `una` lies in entry `head`
//! unless nothing is outstanding; `next_psn` is packet `cur_packet` of entry `cur` where that entry has PSNs. Going back sets
//! `cur` to `head`, so it takes constant time; an acknowledgement takes time for what it completes only.
//!
//! An entry without data to wait for is done when `acked` has passed it. A READ is done when all its response packets have come;
//! `una` then counts those, and what was acknowledged behind it waits in `acked`. A READ is asked for in aligned blocks, each a
//! request of its own, so that a repeated request never covers PSNs that the responder has seen and others that it has not.
//!
//! Failures: no acknowledgement in time, more than `retry_cnt` times in a row: RETRY_EXC (of the network). RNR NAKs beyond
//! `rnr_retry`: RNR_RETRY_EXC. A NAK other than for sequence: the error that it names. Local memory: LOC_PROT, once everything
//! before it is complete. Each is returned as the status of entry `head`; what it does to the queue is [`crate::RcQp`]'s to say.

use crate::backlog::{Backlog, Replay};
use crate::encoding::{psn_add, psn_ahead, psn_diff, rnr_timer_us, NakCode, Syndrome};
use crate::io::{scatter, Completions, Memory, PacketSink, Payload, SinkError};
use crate::link::{send_wc, Flags, Link};
use crate::segment::Segment;
use crate::sq::{Data, SendRing, Wqe};
use crate::window::Window;
use unbroken_types::{QpCaps, SendFlags, SendOpcode, WcOpcode, WcStatus};
use unbroken_wire::{AtomicEth, Ext, Op, Packet, Reth};

/// An acknowledgement is asked for at least once in so many packets.
const ACK_EVERY_PACKETS: u32 = 16;

/// Retries without end (`rnr_retry`).
const RNR_FOR_EVER: u8 = 7;

/// Attributes of the requester alone.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// `None`: wait for ever.
    pub(crate) timeout_us: Option<u64>,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) max_rd_atomic: u32,
}

#[derive(Clone)]
pub(crate) struct Requester {
    pub(crate) ring: SendRing,
    pub(crate) limits: Limits,
    cur: u64,
    cur_packet: u32,
    assigned: u64,
    una: u32,
    acked: u32,
    next_psn: u32,
    frontier: u32,
    window: Window,
    cwnd_max: u32,
    /// READ requests sent since the last going back, of which responses are missing.
    reads_in_flight: u32,
    /// One past the last READ that was given PSNs, for FENCE.
    last_read: u64,
    /// The PSN that was last gone back to for missing answers, and the PSN of the last answer that told so. Answers in their
    /// order tell of the same loss; one that is behind has been asked for again, and tells of another.
    gap: Option<(u32, u32)>,
    retries_left: u8,
    rnr_retries_left: u8,
    ack_deadline: Option<u64>,
    rnr_until: Option<u64>,
    /// An entry that cannot be sent, and why.
    unsendable: Option<(u64, WcStatus)>,
    advanced: u64,
    completed: u64,
}

impl Requester {
    pub(crate) fn new(caps: &QpCaps, cwnd_max: u32) -> Requester {
        Requester {
            ring: SendRing::new(caps),
            limits: Limits { timeout_us: None, retry_cnt: 0, rnr_retry: 0, max_rd_atomic: 0 },
            cur: 0,
            cur_packet: 0,
            assigned: 0,
            una: 0,
            acked: 0,
            next_psn: 0,
            frontier: 0,
            window: Window::new(cwnd_max),
            cwnd_max,
            reads_in_flight: 0,
            last_read: 0,
            gap: None,
            retries_left: 0,
            rnr_retries_left: 0,
            ack_deadline: None,
            rnr_until: None,
            unsendable: None,
            advanced: 0,
            completed: 0,
        }
    }

    /// Forgets everything, for state RESET.
    pub(crate) fn reset(&mut self) {
        self.clear();
        self.advanced = 0;
        self.completed = 0;
        self.window = Window::new(self.cwnd_max);
    }

    /// Sets the first PSN and starts the retry counts, for state RTS.
    pub(crate) fn start(&mut self, psn: u32) {
        (self.una, self.acked, self.next_psn, self.frontier) = (psn, psn, psn, psn);
        self.restart_retries();
    }

    fn restart_retries(&mut self) {
        self.retries_left = self.limits.retry_cnt;
        self.rnr_retries_left = self.limits.rnr_retry;
    }

    pub(crate) fn advanced(&self) -> u64 {
        self.advanced
    }

    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    pub(crate) fn waiting_rnr(&self) -> bool {
        self.rnr_until.is_some()
    }

    /// Whether everything that was started is complete (state SQD).
    pub(crate) fn drained(&self) -> bool {
        self.ring.head == self.assigned
    }

    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        match (self.ack_deadline, self.rnr_until) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    // Sending

    /// Sends what window, limits and sink allow. `Ok(true)`: the sink was full, there is more to send.
    pub(crate) fn transmit(
        &mut self,
        now_us: u64,
        link: &Link,
        sink: &mut (impl PacketSink + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<bool, WcStatus> {
        if self.rnr_until.is_some() {
            return Ok(false);
        }
        while self.cur < self.ring.tail {
            if self.unsendable.is_some_and(|(index, _)| index == self.cur) || !self.prepare(link) {
                break;
            }
            let wqe = *self.ring.get(self.cur);
            if wqe.executed {
                self.cur += 1;
                continue;
            }
            let pushed = match wqe.opcode {
                SendOpcode::Read => self.push_read(&wqe, link, sink),
                SendOpcode::CmpSwap | SendOpcode::FetchAdd => self.push_atomic(&wqe, link, sink),
                _ => self.push_packet(&wqe, link, sink),
            };
            match pushed {
                Ok(0) => break,
                Ok(psns) => self.sent(now_us, &wqe, psns),
                Err(SinkError::Full) => return Ok(true),
                Err(SinkError::Memory(_)) => self.unsendable = Some((self.cur, WcStatus::LocProtErr)),
            }
        }
        // Entries at the head that need no wire, or cannot be sent, are due now.
        self.advance(link, out)?;
        Ok(false)
    }

    /// Gives the entry at `cur` its PSNs, if it may start. Entries that have PSNs may always go on.
    fn prepare(&mut self, link: &Link) -> bool {
        if self.cur < self.assigned {
            return true;
        }
        let wqe = *self.ring.get(self.cur);
        let fenced = wqe.flags.contains(SendFlags::FENCE) && self.last_read > self.ring.head;
        if !link.may_start || fenced && !wqe.executed {
            return false;
        }
        let first_psn = self.next_psn;
        let packets = if wqe.executed { 0 } else { wqe.len.div_ceil(link.mtu).max(1) };
        let wqe = self.ring.get_mut(self.cur);
        (wqe.first_psn, wqe.packets) = (first_psn, packets);
        self.assigned = self.cur + 1;
        if wqe.opcode.awaits_data() {
            self.last_read = self.assigned;
        }
        true
    }

    fn in_flight(&self) -> u32 {
        psn_ahead(self.next_psn, self.una)
    }

    /// Pushes the next packet of a SEND or WRITE; gives 0 where the window is closed, else 1.
    fn push_packet(&mut self, wqe: &Wqe, link: &Link, sink: &mut (impl PacketSink + ?Sized)) -> Result<u32, SinkError> {
        let in_flight = self.in_flight();
        if in_flight >= self.window.packets() {
            return Ok(0);
        }
        let s = Segment::of(wqe, self.cur_packet, link.mtu);
        let flags = Flags {
            solicited: s.last && wqe.flags.contains(SendFlags::SOLICITED),
            ack_req: s.last
                || self.next_psn % ACK_EVERY_PACKETS == ACK_EVERY_PACKETS - 1
                || in_flight + 1 == self.window.packets(),
        };
        let header = link.header(s.op, self.next_psn, &s.ext, s.len, flags);
        let payload = s.payload(&self.ring, self.cur);
        sink.push(header.as_slice(), payload)?;
        Ok(1)
    }

    /// Pushes a request for the rest of a READ's block; gives its PSNs, or 0 where it must wait.
    fn push_read(&mut self, wqe: &Wqe, link: &Link, sink: &mut (impl PacketSink + ?Sized)) -> Result<u32, SinkError> {
        let block = block_packets(link.mtu);
        let end = wqe.packets.min((self.cur_packet / block + 1) * block);
        let packets = end - self.cur_packet;
        let in_flight = self.in_flight();
        // A block larger than the window goes alone: its boundaries are fixed.
        let fits = in_flight == 0 || in_flight + packets <= self.window.packets();
        if !fits || self.reads_in_flight >= self.limits.max_rd_atomic.max(1) {
            return Ok(0);
        }
        let offset = self.cur_packet * link.mtu;
        let len = (wqe.len - offset).min(packets.saturating_mul(link.mtu));
        let reth = Reth { va: wqe.remote_addr.wrapping_add(offset as u64), rkey: wqe.rkey, len };
        let flags = Flags { solicited: false, ack_req: true };
        let header = link.header(Op::ReadRequest, self.next_psn, &Ext::Reth(reth), 0, flags);
        sink.push(header.as_slice(), Payload::None)?;
        self.reads_in_flight += 1;
        Ok(packets)
    }

    /// Pushes an atomic; gives 0 where it must wait, else 1.
    fn push_atomic(&mut self, wqe: &Wqe, link: &Link, sink: &mut (impl PacketSink + ?Sized)) -> Result<u32, SinkError> {
        if self.in_flight() >= self.window.packets() || self.reads_in_flight >= self.limits.max_rd_atomic.max(1) {
            return Ok(0);
        }
        let (op, swap_or_add, compare) = match wqe.opcode {
            SendOpcode::CmpSwap => (Op::CompareSwap, wqe.swap, wqe.compare_add),
            _ => (Op::FetchAdd, wqe.compare_add, 0),
        };
        let ext = Ext::Atomic(AtomicEth { va: wqe.remote_addr, rkey: wqe.rkey, swap_or_add, compare });
        let flags = Flags { solicited: false, ack_req: true };
        let header = link.header(op, self.next_psn, &ext, 0, flags);
        sink.push(header.as_slice(), Payload::None)?;
        self.reads_in_flight += 1;
        Ok(1)
    }

    /// Accounts for `psns` just pushed of the entry at `cur`.
    fn sent(&mut self, now_us: u64, wqe: &Wqe, psns: u32) {
        self.ring.get_mut(self.cur).started = true;
        self.next_psn = psn_add(self.next_psn, psns);
        self.cur_packet += psns;
        if self.cur_packet == wqe.packets {
            self.cur += 1;
            self.cur_packet = 0;
        }
        if psn_diff(self.next_psn, self.frontier) > 0 {
            self.frontier = self.next_psn;
        }
        if self.ack_deadline.is_none() {
            self.ack_deadline = self.limits.timeout_us.map(|t| now_us + t);
        }
    }

    // Receiving

    /// Takes an acknowledgement.
    pub(crate) fn on_ack(
        &mut self,
        now_us: u64,
        psn: u32,
        syndrome: u8,
        link: &Link,
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
        self.acknowledge(now_us, done_before, link, out)?;
        if self.una != done_before {
            self.answers_missing(psn);
            return Ok(());
        }
        match syndrome {
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
        self.go_back();
        self.ack_deadline = None;
        self.rnr_until = Some(now_us + rnr_timer_us(timer));
        Ok(())
    }

    /// Takes a packet of a READ response, or the answer of an atomic.
    pub(crate) fn on_answer(
        &mut self,
        now_us: u64,
        packet: &Packet<'_>,
        link: &Link,
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
        self.acknowledge(now_us, psn, link, out)?;
        if self.una != psn {
            self.answers_missing(psn);
            return Ok(());
        }
        let head = *self.ring.get(self.ring.head);
        let fits = if found.is_some() { head.opcode.is_atomic() } else { head.opcode == SendOpcode::Read };
        if !fits || self.ring.head >= self.assigned {
            return Ok(()); // an answer to something else: a stray
        }
        let packet = psn_ahead(psn, head.first_psn);
        let offset = packet * link.mtu;
        if payload.len() as u32 != link.mtu.min(head.len - offset) {
            return Err(WcStatus::BadRespErr);
        }
        if let Data::Sges(sges) = self.ring.data(self.ring.head) {
            scatter(mem, link.pd, sges, offset as u64, payload).map_err(|_| WcStatus::LocProtErr)?;
        }
        let block_ends = (packet + 1) % block_packets(link.mtu) == 0 || packet + 1 == head.packets;
        self.una = psn_add(psn, 1);
        if block_ends && psn_diff(self.next_psn, self.una) >= 0 {
            self.reads_in_flight = self.reads_in_flight.saturating_sub(1);
        }
        self.progressed(now_us, 1);
        self.acknowledge(now_us, self.una, link, out)
    }

    /// Everything before `psn` is executed by the responder.
    fn acknowledge(
        &mut self,
        now_us: u64,
        psn: u32,
        link: &Link,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), WcStatus> {
        if psn_diff(psn, self.acked) > 0 {
            self.acked = psn;
        }
        let before = self.una;
        self.advance(link, out)?;
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
        self.restart_retries();
        self.gap = None;
        self.rnr_until = None;
        self.ack_deadline = match self.una == self.frontier {
            true => None,
            false => self.limits.timeout_us.map(|t| now_us + t),
        };
    }

    /// Moves `una` over what `acked` covers and completes entries at the head that are done.
    fn advance(&mut self, link: &Link, out: &mut (impl Completions + ?Sized)) -> Result<(), WcStatus> {
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
                if step < left {
                    break;
                }
            }
            self.complete(&wqe, link, out);
        }
        if psn_diff(self.una, self.acked) > 0 {
            self.acked = self.una;
        }
        if psn_diff(self.next_psn, self.una) < 0 || self.cur < self.ring.head {
            self.resume_at_una();
        }
        Ok(())
    }

    fn complete(&mut self, wqe: &Wqe, link: &Link, out: &mut (impl Completions + ?Sized)) {
        self.ring.head += 1;
        self.assigned = self.assigned.max(self.ring.head);
        if !wqe.opcode.awaits_data() {
            self.completed += 1;
        }
        if link.sq_sig_all || wqe.flags.contains(SendFlags::SIGNALED) {
            out.send(send_wc(link.wc_qpn, wqe.wr_id, WcStatus::Success, wc_opcode(wqe.opcode), wqe.len));
        }
    }

    // Going back

    /// An answer for `psn` has come, but not those for the READ in front, which were sent before it: they are lost.
    fn answers_missing(&mut self, psn: u32) {
        let known = self.gap.is_some_and(|(una, last)| una == self.una && psn_diff(psn, last) >= 0);
        if !known {
            self.go_back_for_loss();
        }
        self.gap = Some((self.una, psn));
    }

    /// Sends again from `una` on.
    fn go_back_for_loss(&mut self) {
        self.window.lost(self.frontier);
        self.go_back();
    }

    fn go_back(&mut self) {
        self.reads_in_flight = 0;
        self.resume_at_una();
    }

    fn resume_at_una(&mut self) {
        self.next_psn = self.una;
        self.cur = self.ring.head;
        self.cur_packet = match self.cur < self.assigned {
            true => psn_ahead(self.una, self.ring.get(self.cur).first_psn),
            false => 0,
        };
    }

    /// Looks at the timers.
    pub(crate) fn on_timeout(&mut self, now_us: u64) -> Result<(), WcStatus> {
        if self.rnr_until.is_some_and(|t| t <= now_us) {
            self.rnr_until = None;
        }
        if self.ack_deadline.is_some_and(|t| t <= now_us) {
            self.ack_deadline = None;
            if self.retries_left == 0 {
                return Err(WcStatus::RetryExcErr);
            }
            self.retries_left -= 1;
            self.gap = None;
            self.go_back_for_loss();
            self.ack_deadline = self.limits.timeout_us.map(|t| now_us + t);
        }
        Ok(())
    }

    // Ending and moving

    /// Completes the oldest with `status` and all others as flushed.
    pub(crate) fn flush(&mut self, status: WcStatus, link: &Link, out: &mut (impl Completions + ?Sized)) {
        let mut status = status;
        for index in self.ring.head..self.ring.tail {
            let wqe = self.ring.get(index);
            out.send(send_wc(link.wc_qpn, wqe.wr_id, status, wc_opcode(wqe.opcode), 0));
            status = WcStatus::WrFlushErr;
        }
        self.clear();
    }

    /// Stops the timers; nothing more is sent or taken.
    pub(crate) fn hold(&mut self) {
        self.ack_deadline = None;
        self.rnr_until = None;
    }

    /// Empties the queue.
    fn clear(&mut self) {
        self.ring.clear();
        self.cur = self.ring.tail;
        self.cur_packet = 0;
        self.assigned = self.ring.tail;
        self.last_read = 0;
        self.reads_in_flight = 0;
        self.gap = None;
        self.unsendable = None;
        self.start(self.frontier);
        self.hold();
    }

    /// Takes the outstanding entries out.
    pub(crate) fn quiesce(&mut self, backlog: &mut Backlog) {
        backlog.sends = self.ring.entries();
        backlog.completed = self.completed;
        self.clear();
    }

    /// Outstanding entries, each with whether it is among the first `peer_done` that await no data.
    fn with_fate(&self, peer_done: u64) -> impl Iterator<Item = (u64, bool)> + '_ {
        let mut counted = 0;
        (self.ring.head..self.ring.tail).map(move |index| {
            let counts = !self.ring.get(index).opcode.awaits_data();
            let done = counts && counted < peer_done;
            counted += counts as u64;
            (index, done)
        })
    }

    pub(crate) fn unsafe_to_replay(&self, peer_done: u64) -> bool {
        self.with_fate(peer_done).any(|(index, done)| {
            let wqe = self.ring.get(index);
            !done && wqe.started && (wqe.opcode.is_atomic() || wqe.flags.contains(SendFlags::NO_REPLAY))
        })
    }

    pub(crate) fn mark_executed(&mut self, peer_done: u64) -> Replay {
        let mut replay = Replay::default();
        let fates: Vec<(u64, bool)> = self.with_fate(peer_done).collect();
        for (index, done) in fates {
            let wqe = self.ring.get_mut(index);
            wqe.executed = done;
            replay.marked += done as u64;
            replay.replayed += (!done && wqe.started) as u32;
        }
        replay
    }
}

/// Packets of a READ's block. The window counts them; a block of the largest MTU stays below 64 KiB with its headers' share.
const fn block_packets(mtu: u32) -> u32 {
    if mtu >= 4096 {
        16
    } else {
        32
    }
}

/// The opcode of a send's WC.
pub(crate) fn wc_opcode(opcode: SendOpcode) -> WcOpcode {
    match opcode {
        SendOpcode::Write | SendOpcode::WriteImm => WcOpcode::RdmaWrite,
        SendOpcode::Send | SendOpcode::SendImm => WcOpcode::Send,
        SendOpcode::Read => WcOpcode::RdmaRead,
        SendOpcode::CmpSwap => WcOpcode::CompSwap,
        SendOpcode::FetchAdd => WcOpcode::FetchAdd,
    }
}
