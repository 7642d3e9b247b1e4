//! The receiving half of an RC QP.
//!
//! ```text
//!   PSN of a request    is the expected one:  check, execute, expect the next
//!                       is behind it:         a repeat; acknowledge again, answer a READ again
//!                       is ahead of it:       something was lost or is late (below)
//! ```
//!
//! What is ahead depends on the peer. With *Go-back-N*, which every RoCEv2 requester understands,
//! it is dropped, and a NAK given once, until the expected packet comes. With *selective*
//! retransmission ([`crate::RcQp::set_selective`]) it is kept ([`Early`]) and executed when its
//! turn has come, so that nothing can tell a loss from its absence; the NAK carries a map of what
//! is kept. A kept packet is not executed: it counts nowhere, and a QP that ends or is quiesced
//! forgets it. A kept packet that comes again changes nothing. Should one find no receive in its
//! turn, it is dropped like any other, and the requester is told to wait (RNR).
//!
//! SENDs and WRITEs are executed packet by packet ([`Receiver`]); nothing is remembered of finished
//! ones but their count. Acknowledgements are not queued: what is owed is one value, and a later
//! one covers an earlier one. READ responses leave before it, so an acknowledgement never overtakes
//! an answer that it implies.
//!
//! Failures of the peer's making (a bad key, a bad sequence, more than the receive holds) are
//! answered with a NAK and end the QP; the NAK is given again for every later request, since the
//! first may be lost.

use crate::connection::{Connection, Flags};
use crate::early::{in_reach, Early, MAP_BYTES};
use crate::encoding::{psn_add, psn_ahead, psn_diff, NakCode, Syndrome};
use crate::inbound::{check_remote, Receiver, Refusal};
use crate::io::{AtomicOp, MemError, Memory, PacketSink, Payload, SinkError};
use crate::mutants::{left_out, Mutation};
use crate::reads::{ReadJob, ReadQueue};
use crate::rq::RecvQueue;
use unbroken_types::{Access, Completions, Messages, WcStatus, MAX_MESSAGE_BYTES, PSN_MASK};
use unbroken_wire::{Aeth, AtomicEth, Ext, Op, Packet};

/// A map of what is kept is sent for so many packets that came early, or for one that asks for an
/// acknowledgement.
const MAP_EVERY_PACKETS: u32 = 3;

/// What the peer is to be told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owed {
    Nothing,
    /// Everything before the expected PSN is executed.
    Ack,
    /// The packet of that PSN was not executed.
    Nak(u32, Syndrome),
}

impl Refusal {
    /// The NAK that says why, which ends the QP, and how the oldest receive fails, if it does.
    /// `None`: there is only no receive yet.
    fn nak(self) -> Option<(NakCode, Option<WcStatus>)> {
        Some(match self {
            Refusal::NotReady => return None,
            Refusal::Invalid => (NakCode::InvalidRequest, None),
            Refusal::Access => (NakCode::RemoteAccess, None),
            Refusal::TooLong => (NakCode::InvalidRequest, Some(WcStatus::LocLenErr)),
            Refusal::Local => (NakCode::RemoteOperation, Some(WcStatus::LocProtErr)),
            Refusal::NotInvalidated => (NakCode::RemoteAccess, Some(WcStatus::RemInvReqErr)),
        })
    }
}

/// An asynchronous event of a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RcEvent {
    /// The peer named memory that it may not touch (IBV_EVENT_QP_ACCESS_ERR).
    AccessError,
    /// The peer sent what makes no sense (IBV_EVENT_QP_REQ_ERR).
    RequestError,
    /// In state SQD, everything that was started is complete (IBV_EVENT_SQ_DRAINED); told once.
    SqDrained,
    /// In state RTR, the peer's first request has come (IBV_EVENT_COMM_EST).
    CommEstablished,
    /// It goes on over its alternate path (IBV_EVENT_PATH_MIG).
    PathMigrated,
    /// It could not go there (IBV_EVENT_PATH_MIG_ERR).
    MigrationFailed,
}

#[derive(Clone)]
pub(crate) struct Responder {
    pub(crate) receiver: Receiver,
    /// Code of the timer in RNR NAKs.
    pub(crate) min_rnr_timer: u8,
    expected: u32,
    msn: u32,
    owed: Owed,
    /// The next acknowledgement asks the peer for one.
    asks: bool,
    /// A NAK for the expected PSN has been given (selective: the RNR NAK); later packets make no
    /// other, until they begin anew: then the requester has gone back and the expected packet was
    /// lost again.
    nak_given: bool,
    /// Selective: what came before its turn.
    early: Early,
    /// Packets that came early since the last map.
    early_news: u32,
    pub(crate) mutation: Mutation,
    /// The PSN of the last packet that came too early, or was not ready for.
    early_psn: u32,
    /// The NAK that ended the QP.
    fatal: Option<(u32, NakCode)>,
    reads: ReadQueue,
    executed: Messages,
}

impl Responder {
    pub(crate) fn new(queue: RecvQueue) -> Responder {
        Responder {
            receiver: Receiver::new(queue),
            min_rnr_timer: 0,
            expected: 0,
            msn: 0,
            owed: Owed::Nothing,
            asks: false,
            nak_given: false,
            early: Early::default(),
            early_news: 0,
            mutation: Mutation::None,
            early_psn: 0,
            fatal: None,
            reads: ReadQueue::default(),
            executed: Messages::default(),
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.receiver.queue.heap_bytes() + self.reads.heap_bytes() + self.early.heap_bytes()
    }

    /// Forgets everything, for state RESET.
    pub(crate) fn reset(&mut self) {
        self.receiver.reset();
        self.stop();
        self.fatal = None;
        self.msn = 0;
        self.executed = Messages::default();
    }

    /// Sets the first PSN and the number of READs, for state RTR.
    pub(crate) fn start(&mut self, psn: u32, max_reads: u8) {
        self.expected = psn & PSN_MASK;
        self.reads.reset(max_reads as usize);
    }

    /// Owes nothing any more and answers nothing.
    pub(crate) fn stop(&mut self) {
        self.receiver.interrupt();
        self.owed = Owed::Nothing;
        self.asks = false;
        self.nak_given = false;
        self.early.clear();
        self.early_news = 0;
        self.reads.clear();
    }

    /// The QP goes to ERR: silence, unless it is the responder's own NAK that ends it.
    pub(crate) fn end(&mut self) {
        if self.fatal.is_none() {
            self.stop();
        }
    }

    /// Owes an acknowledgement of what has been executed, though nobody waits for it. `asks`: the
    /// peer is to send one, too.
    pub(crate) fn announce(&mut self, asks: bool) {
        self.asks |= asks;
        if self.owed == Owed::Nothing {
            self.owed = Owed::Ack;
        }
    }

    /// This end cannot go on, for a reason of its own: the peer's next request is answered by a NAK
    /// that says so.
    pub(crate) fn refuse_more(&mut self) {
        if self.fatal.is_none() {
            // What has been taken and not acknowledged is refused: its completion is what was lost.
            let psn = if self.owed == Owed::Ack {
                psn_add(self.expected, PSN_MASK)
            } else {
                self.expected
            };
            self.fatal = Some((psn, NakCode::RemoteOperation));
            self.owed = Owed::Nak(psn, Syndrome::Nak(NakCode::RemoteOperation));
        }
    }

    pub(crate) fn executed(&self) -> Messages {
        self.executed
    }

    pub(crate) fn take_retransmits(&mut self) -> u32 {
        std::mem::take(&mut self.reads.retransmits)
    }

    /// Whether any message was executed, READs included.
    pub(crate) fn moved(&self) -> bool {
        self.msn != 0
    }

    /// Whether an acknowledgement can leave now.
    pub(crate) fn ack_owed(&self) -> bool {
        self.owed != Owed::Nothing && self.reads.is_empty()
    }

    // Receiving

    /// Takes a request. An error ends the QP: it says which event to raise and how the oldest
    /// receive fails, if it does.
    #[inline]
    pub(crate) fn on_request(
        &mut self,
        packet: &Packet<'_>,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), (RcEvent, Option<WcStatus>)> {
        let ahead = psn_diff(packet.bth.psn, self.expected);
        if ahead != 0 {
            self.out_of_order(packet, ahead, connection, mem);
            return Ok(());
        }
        self.in_order(packet, connection, mem, out)?;
        if self.early.is_empty() {
            return Ok(());
        }
        self.catch_up(packet.bth.psn, connection, mem, out)
    }

    /// Takes the packet whose turn it is.
    #[inline]
    fn in_order(
        &mut self,
        packet: &Packet<'_>,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), (RcEvent, Option<WcStatus>)> {
        self.nak_given = false;
        match self.execute(packet, connection, mem, out) {
            Ok(psns) => {
                self.expected = psn_add(self.expected, psns);
                if matches!(packet.bth.opcode.op, Op::ReadRequest | Op::CompareSwap | Op::FetchAdd)
                {
                    self.owed = Owed::Nothing; // the answer acknowledges it and everything before
                } else if packet.bth.ack_req || matches!(self.owed, Owed::Nak(..)) {
                    self.owed = Owed::Ack;
                }
                Ok(())
            }
            Err(refusal) => self.refuse(refusal),
        }
    }

    /// Owes the NAK for the expected packet, which was not executed. An error as of
    /// [`Responder::on_request`].
    #[cold]
    fn refuse(&mut self, refusal: Refusal) -> Result<(), (RcEvent, Option<WcStatus>)> {
        let Some((code, status)) = refusal.nak() else {
            self.owed = Owed::Nak(self.expected, Syndrome::Rnr(self.min_rnr_timer));
            self.nak_given = true;
            self.early_psn = self.expected;
            return Ok(());
        };
        self.owed = Owed::Nak(self.expected, Syndrome::Nak(code));
        self.fatal = Some((self.expected, code));
        let event = if code == NakCode::RemoteAccess {
            RcEvent::AccessError
        } else {
            RcEvent::RequestError
        };
        Err((event, status))
    }

    /// The expected packet, of `psn`, has come: takes what was kept behind it, up to the next gap.
    #[cold]
    fn catch_up(
        &mut self,
        mut psn: u32,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), (RcEvent, Option<WcStatus>)> {
        // `nak_given`: it had to be refused for want of a receive.
        while !self.nak_given {
            // A READ has taken more PSNs than its own.
            self.early.skip(psn, psn_ahead(self.expected, psn) - 1);
            let Some(held) = self.early.take(self.expected) else { break };
            psn = self.expected;
            self.in_order(&held.packet(), connection, mem, out)?;
            if left_out!(self.mutation, ExecuteTwice) {
                self.in_order(&held.packet(), connection, mem, out)?;
            }
        }
        if !self.nak_given && !self.early.is_empty() {
            self.name_the_gap();
        }
        Ok(())
    }

    fn name_the_gap(&mut self) {
        self.early_news = 0;
        self.owed = Owed::Nak(self.expected, Syndrome::Nak(NakCode::Sequence));
    }

    /// Keeps a packet that is ahead of the expected one.
    fn keep(&mut self, packet: &Packet<'_>, connection: &Connection) {
        let psn = packet.bth.psn;
        let fits = in_reach(psn, self.expected) && packet.payload.len() <= connection.mtu as usize;
        let known = fits && !self.early.put(packet);
        self.early_news += 1;
        if self.nak_given {
            if known && packet.bth.ack_req {
                // The requester does not know that it is waited for a receive.
                self.owed = Owed::Nak(self.expected, Syndrome::Rnr(self.min_rnr_timer));
            }
        } else if packet.bth.ack_req || self.early_news >= MAP_EVERY_PACKETS {
            self.name_the_gap();
        }
    }

    /// A request after the QP has ended: says again why.
    pub(crate) fn after_end(&mut self) {
        if let Some((psn, code)) = self.fatal {
            self.owed = Owed::Nak(psn, Syndrome::Nak(code));
        }
    }

    #[cold]
    fn out_of_order(
        &mut self,
        packet: &Packet<'_>,
        ahead: i32,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
    ) {
        if ahead > 0 && connection.selective {
            if let Some(reth) = packet.ext.reth().filter(|_| left_out!(self.mutation, PlaceEarly)) {
                let _ = mem.write(
                    connection.pd,
                    reth.rkey,
                    reth.va,
                    packet.payload,
                    Access::REMOTE_WRITE,
                );
            }
            return self.keep(packet, connection);
        }
        if ahead > 0 {
            if !self.nak_given || psn_diff(packet.bth.psn, self.early_psn) < 0 {
                self.nak_given = true;
                self.owed = Owed::Nak(self.expected, Syndrome::Nak(NakCode::Sequence));
            }
            self.early_psn = packet.bth.psn;
            return;
        }
        if let Ext::Atomic(_) = packet.ext {
            if !left_out!(self.mutation, ForgetAtomics) {
                self.reads.repeat_atomic(packet.bth.psn);
            }
        } else if packet.bth.opcode.op == Op::ReadRequest {
            // What may not be read any more is not refused but dropped: the answer may have arrived
            // long ago.
            if let Ok(job) = read_job(packet, connection, mem) {
                if job.packets as i64 <= -(ahead as i64) {
                    self.reads.repeat(job);
                }
            }
        } else if !self.early.is_empty() && !self.nak_given {
            self.name_the_gap(); // which says more
        } else if self.owed == Owed::Nothing {
            self.owed = Owed::Ack;
        }
    }

    /// Executes the expected packet; gives the number of PSNs that it takes.
    #[inline]
    fn execute(
        &mut self,
        packet: &Packet<'_>,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<u32, Refusal> {
        match packet.bth.opcode.op {
            Op::ReadRequest => return self.read(packet, connection, mem),
            Op::CompareSwap | Op::FetchAdd => self.atomic(packet, connection, mem)?,
            op => {
                if self.receiver.execute(packet, connection, mem, out)? {
                    self.msn = psn_add(self.msn, 1);
                    let receives = u64::from(!matches!(op, Op::WriteLast | Op::WriteOnly));
                    self.executed += Messages { all: 1, receives };
                }
            }
        }
        Ok(1)
    }

    fn read(
        &mut self,
        packet: &Packet<'_>,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
    ) -> Result<u32, Refusal> {
        if self.receiver.in_message() {
            return Err(Refusal::Invalid);
        }
        let job = read_job(packet, connection, mem)?;
        if !self.reads.push(job) {
            return Err(Refusal::Invalid); // more than max_dest_rd_atomic
        }
        self.msn = psn_add(self.msn, 1);
        Ok(job.packets)
    }

    /// Runs an atomic. It does not count as executed: whether its answer arrived is all that
    /// matters, see [`crate::Backlog`].
    fn atomic(
        &mut self,
        packet: &Packet<'_>,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
    ) -> Result<(), Refusal> {
        let Ext::Atomic(AtomicEth { va, rkey, swap_or_add, compare }) = packet.ext else {
            return Err(Refusal::Invalid);
        };
        if self.receiver.in_message() || va % 8 != 0 || !self.reads.make_room() {
            return Err(Refusal::Invalid);
        }
        if !connection.access.contains(Access::REMOTE_ATOMIC) {
            return Err(Refusal::Access);
        }
        let op = match packet.bth.opcode.op {
            Op::CompareSwap => AtomicOp::CompareSwap { compare, swap: swap_or_add },
            _ => AtomicOp::FetchAdd(swap_or_add),
        };
        let found = mem.atomic(connection.pd, rkey, va, op).map_err(|e| match e {
            MemError::Misaligned => Refusal::Invalid,
            _ => Refusal::Access,
        })?;
        self.reads.push_atomic(packet.bth.psn, found);
        self.msn = psn_add(self.msn, 1);
        Ok(())
    }

    // Sending

    /// Sends READ responses and answers of atomics. `Ok(true)`: the sink was full, there is more to
    /// send. An error ends the QP.
    pub(crate) fn transmit_responses(
        &mut self,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> Result<bool, RcEvent> {
        while let Some(job) = self.reads.front() {
            let len = job.len.min(connection.mtu);
            let (op, ext) = match (job.first, job.packets == 1) {
                _ if job.atomic.is_some() => (Op::AtomicAcknowledge, self.atomic_ack(job.atomic)),
                (true, true) => (Op::ReadResponseOnly, self.aeth(Syndrome::Ack)),
                (true, false) => (Op::ReadResponseFirst, self.aeth(Syndrome::Ack)),
                (false, true) => (Op::ReadResponseLast, self.aeth(Syndrome::Ack)),
                (false, false) => (Op::ReadResponseMiddle, Ext::None),
            };
            let header = connection.header(op, job.psn, &ext, len, Flags::default());
            let payload = match len {
                0 => Payload::None,
                len => Payload::Region { key: job.rkey, va: job.va, len },
            };
            match sink.push(header.as_slice(), payload) {
                Ok(()) => self.reads.sent(len),
                Err(SinkError::Full) => return Ok(true),
                Err(SinkError::Memory(_)) => {
                    self.reads.clear();
                    self.owed = Owed::Nak(job.psn, Syndrome::Nak(NakCode::RemoteAccess));
                    self.fatal = Some((job.psn, NakCode::RemoteAccess));
                    return Err(RcEvent::AccessError);
                }
            }
        }
        Ok(false)
    }

    /// Sends what acknowledgement is owed. True: the sink was full.
    pub(crate) fn transmit_ack(
        &mut self,
        connection: &Connection,
        sink: &mut (impl PacketSink + ?Sized),
    ) -> bool {
        if !self.ack_owed() {
            return false;
        }
        let (psn, syndrome) = match self.owed {
            Owed::Nak(psn, syndrome) => (psn, syndrome),
            _ => (psn_add(self.expected, PSN_MASK), Syndrome::Ack),
        };
        let (map, len) = match syndrome {
            Syndrome::Nak(NakCode::Sequence) if !self.early.is_empty() => {
                self.early.map(psn_add(psn, 1 + u32::from(left_out!(self.mutation, ShiftMap))))
            }
            _ => ([0; MAP_BYTES], 0),
        };
        let header = connection.header(
            Op::Acknowledge,
            psn,
            &self.aeth(syndrome),
            len as u32,
            Flags { ack_req: self.asks, ..Flags::default() },
        );
        let payload = if len > 0 { Payload::Bytes(&map[..len]) } else { Payload::None };
        // An acknowledgement has no payload that could fail: an error means that there is no room.
        let sent = sink.push(header.as_slice(), payload).is_ok();
        if sent {
            (self.owed, self.asks) = (Owed::Nothing, false);
        }
        !sent
    }

    fn aeth(&self, syndrome: Syndrome) -> Ext {
        Ext::Aeth(Aeth { syndrome: syndrome.byte(), msn: self.msn })
    }

    fn atomic_ack(&self, found: Option<u64>) -> Ext {
        Ext::AtomicAck(Aeth { syndrome: Syndrome::Ack.byte(), msn: self.msn }, found.unwrap_or(0))
    }
}

fn read_job(
    packet: &Packet<'_>,
    connection: &Connection,
    mem: &(impl Memory + ?Sized),
) -> Result<ReadJob, Refusal> {
    let reth = packet.ext.reth().ok_or(Refusal::Invalid)?;
    let packets = reth.len.div_ceil(connection.mtu).max(1);
    // Half of the PSN space is as much as a request can take and still be told from a repeat.
    if reth.len as u64 > MAX_MESSAGE_BYTES || packets > PSN_MASK / 2 {
        return Err(Refusal::Invalid);
    }
    check_remote(&reth, Access::REMOTE_READ, connection, mem)?;
    Ok(ReadJob {
        psn: packet.bth.psn,
        packets,
        va: reth.va,
        rkey: reth.rkey,
        len: reth.len,
        first: true,
        atomic: None,
    })
}
