//! What a QP sends in its turn: requests, and answers to those of its peer.

use super::RcQp;
use crate::io::{MemError, PacketSink, Payload, SinkError};
use unbroken_types::{Completions, KeyChange, QpState, WcStatus};

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

    /// Sends requests and READ responses, and an acknowledgement only if it found no room before.
    pub fn poll_transmit_data(
        &mut self,
        now_us: u64,
        sink: &mut (impl PacketSink + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> bool {
        self.take_turns(now_us, sink, out, false)
    }

    /// Requests, then answers; or, where those found no room behind requests the last time, the
    /// other way round. Else what a QP has to send would keep its acknowledgements back until its
    /// window is full, and so its peer, and each would stand still while the other sends.
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
        // One that the shell leaves out of this turn finds no room in it either.
        let late = self.transmit_answers(&mut sink, out, acks) || more && self.ack_owed();
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
        let more = match self.requester.transmit(now_us, &self.connection, sink, out) {
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
