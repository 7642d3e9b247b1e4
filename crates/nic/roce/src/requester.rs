//! The sending half of an RC QP: Go-back-N with a window, and above it selective retransmission
//! ([`repair`]) with peers that know it.
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
//! Invariants: `head ≤ cur ≤ assigned ≤ tail`; `una ≤ acked ≤ frontier` and `una ≤ next_psn ≤
//! frontier`; `una` lies in entry `head` unless nothing is outstanding; `next_psn` is packet
//! `cur_packet` of entry `cur` where that entry has PSNs. Going back sets `cur` to `head`, so it
//! takes constant time; an acknowledgement takes time for what it completes only.
//!
//! An entry without data to wait for is done when `acked` has passed it. A READ is done when all
//! its response packets have come; `una` then counts those, and what was acknowledged behind it
//! waits in `acked`. A READ is asked for in aligned blocks, each a request of its own, so that a
//! repeated request never covers PSNs that the responder has seen and others that it has not.
//!
//! Failures: no acknowledgement in time, more than `retry_cnt` times in a row: RETRY_EXC (of the
//! network). RNR NAKs beyond `rnr_retry`: RNR_RETRY_EXC. A NAK other than for sequence: the error
//! that it names. Local memory: LOC_PROT, once everything before it is complete; a READ or an atomic
//! of a QP with `max_rd_atomic` 0: LOC_QP_OP. Each is returned
//! as the status of entry `head`; what it does to the queue is [`crate::RcQp`]'s to say.

mod ending;
mod going_back;
mod insist;
mod peer_keys;
mod receive;
mod repair;
mod room;

pub use room::RoundTrip;

use crate::connection::{Connection, Flags};
use crate::early::EARLY_PACKETS;
use crate::encoding::{psn_add, psn_ahead, psn_diff};
use crate::io::{PacketSink, Payload, SinkError};
use crate::segment::Segment;
use crate::sq::{Operands, SendRing, Wqe};
use crate::window::Window;
use unbroken_types::{Completions, Messages, SendFlags, SendOpcode, WcStatus};
use unbroken_wire::{AtomicEth, Ext, Op, Reth};

/// An acknowledgement is asked for at least once in so many packets.
const ACK_EVERY_PACKETS: u32 = 32;

/// Sends that leave together where a program posts many at once: a system call for each would cost
/// more than all else.
const COMPANY: u64 = 16;

/// Retries without end (`rnr_retry`).
const RNR_FOR_EVER: u8 = 7;

/// Packets of the largest block of a READ.
const MAX_BLOCK_PACKETS: u32 = 32;

/// Attributes of the requester alone.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// `None`: wait for ever.
    pub(crate) timeout_us: Option<u64>,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) max_rd_atomic: u32,
    pub(crate) mtu: u32,
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
    /// One past the last READ or atomic that was given PSNs, for FENCE.
    last_read: u64,
    /// The PSN that was last gone back to for missing answers, and the PSN of the last answer that
    /// told so. Answers in their order tell of the same loss; one that is behind has been asked for
    /// again, and tells of another.
    gap: Option<(u32, u32)>,
    /// Selective: what is known of a flight with losses.
    repair: Option<Box<repair::Repair>>,
    /// Something may have to be sent again out of turn.
    mending: bool,
    /// The last packet is to be sent again, so that the peer says what it has.
    resend_last: bool,
    /// The peer answers any piece of a READ that is asked for again, see [`repair`].
    in_pieces: bool,
    rtt: RoundTrip,
    /// What was measured since this was last asked; 0: nothing.
    last_rtt_us: u32,
    /// What others have measured on the way to the same destination.
    others_wait_us: u32,
    /// Probes are sent: the peer answers them with what it has.
    probing: bool,
    /// What is on its way, and what may be.
    flight: u32,
    flight_limit: u32,
    /// What was refused; 0: nothing.
    wanted: u32,
    /// The last packet asks for an answer.
    asked: bool,
    /// Messages that may be on their way, after the receiver was not ready.
    few: u64,
    /// The packet whose acknowledgement is waited for, and when it was sent.
    rtt_from: Option<(u32, u64)>,
    /// When silence has lasted long enough to ask.
    probe_at_us: Option<u64>,
    /// How often that was in vain.
    probes: u32,
    /// Answers that came so late after something had been sent again that what was measured may be
    /// too short; and when that was sent last.
    doubt: u32,
    again_us: u64,
    retransmits: u32,
    /// Packets that were taken for lost.
    lost: u32,
    retries_left: u8,
    rnr_retries_left: u8,
    /// It sends again soon and without end, see [`insist`].
    insists: bool,
    /// All timers run that a packet on its way needs.
    armed: bool,
    ack_deadline: Option<u64>,
    rnr_until: Option<u64>,
    /// The receiver was not ready, and nothing has been acknowledged since.
    not_ready: bool,
    /// An entry that cannot be sent, and why.
    unsendable: Option<(u64, WcStatus)>,
    /// Where the peer knows its memory by other keys than the application.
    translated: Option<Box<peer_keys::Translated>>,
    advanced: u64,
    completed: Messages,
}

impl Requester {
    pub(crate) fn new(ring: SendRing, cwnd_max: u32) -> Requester {
        Requester {
            ring,
            limits: Limits {
                timeout_us: None,
                retry_cnt: 0,
                rnr_retry: 0,
                max_rd_atomic: 0,
                mtu: 0,
            },
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
            repair: None,
            mending: false,
            resend_last: false,
            in_pieces: false,
            rtt: RoundTrip::default(),
            last_rtt_us: 0,
            others_wait_us: 0,
            probing: false,
            flight: 0,
            flight_limit: u32::MAX,
            wanted: 0,
            asked: true,
            few: u64::MAX,
            rtt_from: None,
            probe_at_us: None,
            probes: 0,
            doubt: 0,
            again_us: 0,
            retransmits: 0,
            lost: 0,
            retries_left: 0,
            rnr_retries_left: 0,
            insists: false,
            armed: false,
            ack_deadline: None,
            rnr_until: None,
            not_ready: false,
            unsendable: None,
            translated: None,
            advanced: 0,
            completed: Messages::default(),
        }
    }

    /// Forgets everything, for state RESET.
    pub(crate) fn reset(&mut self) {
        self.clear();
        self.advanced = 0;
        self.completed = Messages::default();
        self.translated = None;
        self.window = Window::new(self.cwnd_max);
        self.rtt = RoundTrip::default();
        (self.last_rtt_us, self.others_wait_us, self.doubt) = (0, 0, 0);
        self.insists = false;
    }

    /// Sets the first PSN and starts the retry counts, for state RTS.
    pub(crate) fn start(&mut self, psn: u32) {
        (self.una, self.acked, self.next_psn, self.frontier) = (psn, psn, psn, psn);
        self.nothing_in_flight();
        (self.few, self.in_pieces) = (u64::MAX, false);
        self.restart_retries();
    }

    fn restart_retries(&mut self) {
        self.retries_left = self.limits.retry_cnt;
        self.rnr_retries_left = self.limits.rnr_retry;
    }

    pub(crate) fn advanced(&self) -> u64 {
        self.advanced
    }

    pub(crate) fn completed(&self) -> Messages {
        self.completed
    }

    pub(crate) fn may_wait(&self) -> bool {
        self.ring.tail - self.cur < COMPANY && self.cur - self.ring.head >= COMPANY
    }

    /// The timer of an RNR NAK runs.
    pub(crate) fn rests_for_rnr(&self) -> bool {
        self.rnr_until.is_some()
    }

    /// The peer has no receive, as far as is known: also while what was sent again is on its way.
    /// A peer that answers nothing to that is for the retry counter to find.
    pub(crate) fn waiting_rnr(&self) -> bool {
        self.not_ready
    }

    /// Whether everything that was started, in this life or an earlier one, is complete (state
    /// SQD).
    pub(crate) fn drained(&self) -> bool {
        let begun = !self.ring.is_empty() && self.ring.get(self.ring.head).begun();
        self.ring.head == self.assigned && !begun
    }

    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        [self.ack_deadline, self.rnr_until, self.probe_at_us, self.settle_at_us()]
            .into_iter()
            .flatten()
            .min()
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.ring.heap_bytes() + self.repair.as_ref().map_or(0, |r| r.heap_bytes())
    }

    pub(crate) fn take_retransmits(&mut self) -> u32 {
        std::mem::take(&mut self.retransmits)
    }

    pub(crate) fn take_lost(&mut self) -> u32 {
        std::mem::take(&mut self.lost)
    }

    // Sending

    /// Sends what window, limits and sink allow. `Ok(true)`: the sink was full, there is more to
    /// send.
    pub(crate) fn transmit(
        &mut self,
        now_us: u64,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<bool, WcStatus> {
        if self.rnr_until.is_some() {
            return Ok(false);
        }
        if self.mending && self.mend(connection, sink) {
            return Ok(true);
        }
        while self.cur < self.ring.tail && self.cur - self.ring.head < self.few {
            if self.unsendable.is_some_and(|(index, _)| index == self.cur)
                || !self.prepare(connection)
            {
                break;
            }
            let wqe = self.on_wire(self.cur);
            if wqe.executed {
                self.cur += 1;
                continue;
            }
            if wqe.opcode.is_local() {
                self.change_key(&wqe, sink);
                continue;
            }
            let cost = self.cost_of(&wqe);
            let pushed = match wqe.opcode {
                SendOpcode::Read => self.push_read(&wqe, cost, connection, sink),
                SendOpcode::CmpSwap | SendOpcode::FetchAdd => {
                    self.push_atomic(&wqe, cost, connection, sink)
                }
                _ => self.push_packet(&wqe, cost, connection, sink),
            };
            match pushed {
                Ok(0) => break,
                Ok(psns) => self.sent(now_us, &wqe, (psns, cost), connection),
                Err(SinkError::Full) => return Ok(true),
                Err(SinkError::Memory(_)) => {
                    self.unsendable = Some((self.cur, WcStatus::LocProtErr))
                }
            }
        }
        if self.wanted > 0 && self.ack_deadline.is_none() {
            // A destination that is silent to all is silent to this QP, too: see `waits_for_room`.
            self.ack_deadline = self.timeout_us().map(|t| now_us + t);
        }
        // Entries at the head that need no wire, or cannot be sent, are due now.
        self.advance(out)?;
        Ok(false)
    }

    /// Gives the entry at `cur` its PSNs, if it may start. Entries that have PSNs may always go on.
    fn prepare(&mut self, connection: &Connection) -> bool {
        if self.cur < self.assigned {
            return true;
        }
        let wqe = *self.ring.get(self.cur);
        let fenced = wqe.flags.contains(SendFlags::FENCE) && self.last_read > self.ring.head;
        if !(connection.may_start || wqe.begun()) || fenced && !wqe.executed {
            return false;
        }
        if !self.is_named() {
            return false;
        }
        let asks = wqe.opcode.awaits_data() && !wqe.opcode.is_local() && !wqe.executed;
        if asks && self.limits.max_rd_atomic == 0 {
            self.unsendable = Some((self.cur, WcStatus::LocQpOpErr));
            return false;
        }
        let first_psn = self.next_psn;
        let packets = if wqe.executed || wqe.opcode.is_local() {
            0
        } else {
            wqe.len.div_ceil(connection.mtu).max(1)
        };
        let wqe = self.ring.get_mut(self.cur);
        (wqe.first_psn, wqe.packets) = (first_psn, packets);
        self.assigned = self.cur + 1;
        // A change of keys is done where it stands: a fence that waited for it would not be looked
        // at again when it is complete.
        if wqe.opcode.awaits_data() && !wqe.opcode.is_local() {
            self.last_read = self.assigned;
        }
        true
    }

    /// Does what the entry at `cur` asks for here. It completes in its turn: when all before it
    /// have.
    #[cold]
    fn change_key(&mut self, wqe: &Wqe, sink: &mut (impl PacketSink + ?Sized)) {
        match sink.change_key(&self.ring.key_change(wqe)) {
            Ok(()) => self.ring.get_mut(self.cur).executed = true,
            Err(_) => self.unsendable = Some((self.cur, WcStatus::MwBindErr)),
        }
    }

    /// Packets on their way, as far as is known. While some are missing none may go further than
    /// the responder can keep.
    #[inline]
    fn in_flight(&self) -> u32 {
        let sent = psn_ahead(self.next_psn, self.una);
        match &self.repair {
            None => sent,
            Some(_) if sent + MAX_BLOCK_PACKETS > EARLY_PACKETS => u32::MAX / 2,
            Some(repair) => sent.saturating_sub(repair.arrived),
        }
    }

    /// Pushes the next packet of a SEND or WRITE; gives 0 where the window is closed, else 1.
    #[inline]
    fn push_packet(
        &mut self,
        wqe: &Wqe,
        cost: u32,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> Result<u32, SinkError> {
        let in_flight = self.in_flight();
        if in_flight >= self.window.packets() || !self.has_room(cost) {
            return Ok(0);
        }
        let ack_req = self.next_psn % ACK_EVERY_PACKETS == ACK_EVERY_PACKETS - 1
            || in_flight + 1 == self.window.packets()
            || self.room_left() < 2 * cost;
        self.push_segment(self.cur, wqe, self.cur_packet, ack_req, connection, sink)?;
        self.asked = ack_req || self.cur_packet + 1 == wqe.packets;
        Ok(1)
    }

    /// Pushes packet `k` of a SEND or WRITE. The last one asks for an acknowledgement in any case.
    #[inline(always)] // two callers, one of which sends nearly all packets
    fn push_segment(
        &self,
        index: u64,
        wqe: &Wqe,
        k: u32,
        ack_req: bool,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> Result<(), SinkError> {
        let s = Segment::of(wqe, k, connection.mtu);
        let flags = Flags {
            solicited: s.last && wqe.flags.contains(SendFlags::SOLICITED),
            ack_req: ack_req || s.last,
        };
        let header = connection.header(s.op, psn_add(wqe.first_psn, k), &s.ext, s.len, flags);
        sink.push(header.as_slice(), s.payload(&self.ring, index))
    }

    /// Pushes a request for the rest of a READ's block; gives its PSNs, or 0 where it must wait.
    fn push_read(
        &mut self,
        wqe: &Wqe,
        cost: u32,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> Result<u32, SinkError> {
        let block = block_packets(connection.mtu);
        let end = wqe.packets.min((self.cur_packet / block + 1) * block);
        let packets = end - self.cur_packet;
        let in_flight = self.in_flight();
        // A block larger than the window goes alone: its boundaries are fixed.
        let fits = in_flight == 0 || in_flight + packets <= self.window.packets();
        let may = fits && self.reads_in_flight < self.limits.max_rd_atomic;
        if !may || !self.has_room(packets * cost) {
            return Ok(0);
        }
        self.push_read_request(wqe, self.cur_packet, packets, connection, sink)?;
        self.reads_in_flight += 1;
        self.asked = true;
        Ok(packets)
    }

    /// Pushes a request for `packets` answers of a READ, from the one of packet `k` on.
    fn push_read_request(
        &self,
        wqe: &Wqe,
        k: u32,
        packets: u32,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> Result<(), SinkError> {
        let offset = k * connection.mtu;
        let len = (wqe.len - offset).min(packets.saturating_mul(connection.mtu));
        let reth = Reth { va: wqe.remote_addr.wrapping_add(offset as u64), rkey: wqe.rkey, len };
        let flags = Flags { solicited: false, ack_req: true };
        let header = connection.header(
            Op::ReadRequest,
            psn_add(wqe.first_psn, k),
            &Ext::Reth(reth),
            0,
            flags,
        );
        sink.push(header.as_slice(), Payload::None)
    }

    /// Pushes an atomic; gives 0 where it must wait, else 1.
    fn push_atomic(
        &mut self,
        wqe: &Wqe,
        cost: u32,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> Result<u32, SinkError> {
        let may = self.in_flight() < self.window.packets()
            && self.reads_in_flight < self.limits.max_rd_atomic;
        if !may || !self.has_room(cost) {
            return Ok(0);
        }
        self.push_atomic_request(wqe, connection, sink)?;
        self.reads_in_flight += 1;
        self.asked = true;
        Ok(1)
    }

    fn push_atomic_request(
        &self,
        wqe: &Wqe,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> Result<(), SinkError> {
        let Operands { compare_add, swap } = self.ring.operands(wqe);
        let (op, swap_or_add, compare) = match wqe.opcode {
            SendOpcode::CmpSwap => (Op::CompareSwap, swap, compare_add),
            _ => (Op::FetchAdd, compare_add, 0),
        };
        let ext =
            Ext::Atomic(AtomicEth { va: wqe.remote_addr, rkey: wqe.rkey, swap_or_add, compare });
        let flags = Flags { solicited: false, ack_req: true };
        let header = connection.header(op, wqe.first_psn, &ext, 0, flags);
        sink.push(header.as_slice(), Payload::None)
    }

    /// Accounts for `psns` just pushed of the entry at `cur`, and what each costs.
    #[inline]
    fn sent(&mut self, now_us: u64, wqe: &Wqe, (psns, cost): (u32, u32), connection: &Connection) {
        if !wqe.started {
            // Once: the next packet copies the entry, which would wait for the store.
            self.ring.get_mut(self.cur).started = true;
        }
        let psn = self.next_psn;
        self.next_psn = psn_add(psn, psns);
        self.flight += psns * cost;
        self.cur_packet += psns;
        if self.cur_packet == wqe.packets {
            self.cur += 1;
            self.cur_packet = 0;
        }
        let new = psn_diff(self.next_psn, self.frontier) > 0;
        if new {
            self.frontier = self.next_psn;
        } else {
            self.retransmits += 1;
        }
        if !self.armed {
            self.arm(now_us, psn, new, connection);
        }
    }

    /// Starts the timers that are not running, with the packet of `psn` that has just left, a `new`
    /// one or one that is sent again.
    #[inline(never)]
    fn arm(&mut self, now_us: u64, psn: u32, new: bool, connection: &Connection) {
        self.armed = true;
        // Silence is counted from the oldest packet on; that it had to wait before it left does not
        // count.
        if self.ack_deadline.is_none() || psn == self.una {
            self.ack_deadline = self.timeout_us().map(|t| now_us + t);
        }
        self.probing = connection.selective;
        if new && self.rtt_from.is_none() {
            self.rtt_from = Some((psn, now_us));
        }
        if self.probe_at_us.is_none() {
            self.probe_at_us = self.next_probe(now_us);
        }
    }
}

/// Packets of a READ's block. The window counts them; a block of the largest MTU stays below 64 KiB
/// with its headers' share.
const fn block_packets(mtu: u32) -> u32 {
    if mtu >= 4096 {
        16
    } else {
        MAX_BLOCK_PACKETS
    }
}
