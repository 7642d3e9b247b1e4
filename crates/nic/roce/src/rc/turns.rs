//! What a QP sends in its turn: requests, and answers to those of its peer.

use super::RcQp;
use crate::connection::Connection;
use crate::io::{MemError, PacketSink, Payload, SinkError};
use crate::mutants::left_out;
use crate::responder::Responder;
use unbroken_types::{Completions, KeyChange, QpState, WcStatus};
use unbroken_wire::Op;

/// Bytes of an acknowledgement: BTH and AETH.
const ACK_BYTES: usize = 12 + 4;

/// A sink, and how many packets it has taken.
struct Counted<'a, S: PacketSink + ?Sized> {
    sink: &'a mut S,
    taken: u32,
}

impl<S: PacketSink + ?Sized> PacketSink for Counted<'_, S> {
    #[inline]
    fn push(&mut self, header: &[u8], payload: Payload<'_>) -> Result<(), SinkError> {
        let pushed = self.sink.push(header, payload);
        self.taken += u32::from(pushed.is_ok());
        pushed
    }

    #[inline]
    fn change_key(&mut self, change: &KeyChange) -> Result<(), MemError> {
        self.sink.change_key(change)
    }
}

/// A sink for requests: the acknowledgement that is owed leaves before the first of them. A program
/// that answers what it has received would otherwise see its answer overtake the acknowledgement,
/// and its peer would receive the answer before its own send completes. Nothing forbids that, but
/// NICs do not do it, and programs rely on that (tgt drops a login).
///
/// Behind messages of one packet it may wait, if they are as long as the first: the shell sends all
/// of them at once, and its peer's handles the acknowledgement first. So a ping-pong pays for one
/// datagram, not two.
struct AckFirst<'a, S: PacketSink + ?Sized> {
    sink: &'a mut S,
    responder: &'a mut Responder,
    connection: &'a Connection,
    owed: bool,
    /// The length of the packets that it may wait behind.
    together: Option<usize>,
}

/// Whether a request is a message of its own.
fn is_whole(header: &[u8]) -> bool {
    header.first().is_some_and(|op| {
        !(Op::SendFirst as u8..Op::SendOnly as u8).contains(op)
            && !(Op::WriteFirst as u8..Op::WriteOnly as u8).contains(op)
            && *op != Op::SendLastInvalidate as u8
    })
}

impl<S: PacketSink + ?Sized> AckFirst<'_, S> {
    /// Whether the acknowledgement can leave together with this packet, though behind it.
    fn may_wait(&mut self, header: &[u8], payload: &Payload<'_>) -> bool {
        let len = header.len() + payload.len();
        is_whole(header) && len > ACK_BYTES && *self.together.get_or_insert(len) == len
    }
}

impl<S: PacketSink + ?Sized> PacketSink for AckFirst<'_, S> {
    #[inline]
    fn push(&mut self, header: &[u8], payload: Payload<'_>) -> Result<(), SinkError> {
        if self.owed && !self.may_wait(header, &payload) {
            if self.responder.transmit_ack(self.connection, self.sink) {
                return Err(SinkError::Full);
            }
            self.owed = false;
        }
        self.sink.push(header, payload)
    }

    #[inline]
    fn change_key(&mut self, change: &KeyChange) -> Result<(), MemError> {
        self.sink.change_key(change)
    }
}

impl RcQp {
    /// Sends requests, READ responses and the acknowledgement that is owed. True: the sink was
    /// full, there is more to send now.
    pub fn poll_transmit(
        &mut self,
        now_us: u64,
        sink: &mut (impl PacketSink + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> bool {
        self.take_turns(now_us, sink, out, true)
    }

    /// Sends requests and READ responses, and an acknowledgement only before requests, or if it found
    /// no room before.
    pub fn poll_transmit_data(
        &mut self,
        now_us: u64,
        sink: &mut (impl PacketSink + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> bool {
        self.take_turns(now_us, sink, out, false)
    }

    /// Requests, then READ responses; or, where those found no room behind requests the last time,
    /// the other way round. Else what a QP has to send would keep its answers back until its window
    /// is full, and so its peer, and each would stand still while the other sends. The
    /// acknowledgement leaves before requests, but not before a READ response that it implies.
    fn take_turns(
        &mut self,
        now_us: u64,
        sink: &mut (impl PacketSink + ?Sized),
        out: &mut (impl Completions + ?Sized),
        acks: bool,
    ) -> bool {
        if self.stopped() {
            return false;
        }
        if self.migration.has_news() && self.is_connected() {
            let asks = self.migration.announce(now_us);
            self.responder.announce(asks);
        }
        let mut sink = Counted { sink, taken: 0 };
        if self.answers_first {
            // An acknowledgement that found no room has waited long enough for others to go with
            // it.
            let more = self.transmit_answers(&mut sink, out, true);
            let before = sink.taken;
            let late = self.transmit_requests(now_us, &mut sink, out);
            self.answers_first = more && !(late && before > 0);
            return more | late;
        }
        let more = self.transmit_requests(now_us, &mut sink, out);
        let before = sink.taken;
        let late = self.transmit_answers(&mut sink, out, acks);
        self.answers_first = late && before > 0;
        more | late
    }

    /// True: the sink was full.
    #[inline]
    fn transmit_requests(
        &mut self,
        now_us: u64,
        sink: &mut (impl PacketSink + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> bool {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) {
            return false;
        }
        let owed = self.responder.ack_owed() && !left_out!(self.responder.mutation, AckLate);
        let (responder, connection) = (&mut self.responder, &self.connection);
        let mut sink = AckFirst { sink, responder, connection, owed, together: None };
        let more = match self.requester.transmit(now_us, connection, &mut sink, out) {
            Ok(more) => more,
            Err(status) => {
                self.requester_failed(status, out);
                false
            }
        };
        if self.state == QpState::Sqd {
            // What an earlier life had done completes here, without a packet of the peer.
            self.note_drained();
        }
        more
    }

    /// True: the sink was full.
    #[inline]
    fn transmit_answers(
        &mut self,
        sink: &mut (impl PacketSink + ?Sized),
        out: &mut (impl Completions + ?Sized),
        acks: bool,
    ) -> bool {
        let more = match self.responder.transmit_responses(&self.connection, sink) {
            Ok(more) => more,
            Err(event) => {
                self.event = Some(event);
                self.enter_error(WcStatus::WrFlushErr, None, out);
                false
            }
        };
        more | (acks && self.poll_transmit_ack(sink))
    }

    /// Whether an acknowledgement is owed and can leave now.
    pub fn ack_owed(&self) -> bool {
        !self.stopped() && self.responder.ack_owed()
    }

    /// Sends the acknowledgement that is owed. True: the sink was full.
    pub fn poll_transmit_ack(&mut self, sink: &mut (impl PacketSink + ?Sized)) -> bool {
        !self.stopped() && self.responder.transmit_ack(&self.connection, sink)
    }
}
