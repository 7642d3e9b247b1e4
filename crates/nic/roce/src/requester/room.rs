//! What a requester has on its way, and how long it waits for answers.
//!
//! Invariant: `flight` is the sum of the costs of the packets `una..next_psn`, each that of its
//! entry ([`Requester::cost_of`]); going back makes it 0, after RNR the end of the wait does, if
//! that is short.
//!
//! Who is refused room waits until it is given some, so something must be on its way that asks for
//! an answer: the last packet before a refusal does. If it did not, since the room was there and
//! then was not, one packet more may go, which asks.
//!
//! The local ACK timeout that the program has coded is the least: it is doubled with each retry in
//! a row, up to four times, which the specification allows, and no timer is shorter than the
//! measured round trip and four times its variation. The round trip is measured from the hand-over
//! to the socket to the acknowledgement, with packets that were sent once (Karn's rule). After an
//! answer that comes later than the repetition's could, the next is waited for twice as long, until
//! one can be measured (RFC 6298, 5.7).

use super::Requester;
use crate::room::{cost, Room};
use crate::sq::Wqe;

/// Doublings of the local ACK timeout.
const MAX_DOUBLINGS: u8 = 2;
/// Doublings of what was measured, while it cannot be measured anew: more than lead from the
/// shortest to [`MAX_WAIT_US`].
const MAX_DOUBT: u32 = 20;
/// No timer waits longer for what was measured: a peer that was stopped for a while must not make
/// us blind for as long.
const MAX_WAIT_US: u32 = 2_000_000;

/// A round trip, smoothed, and its variation (RFC 6298); 0 until one was measured.
#[derive(Clone, Copy, Default, Debug)]
pub struct RoundTrip {
    srtt_us: u32,
    rttvar_us: u32,
}

impl RoundTrip {
    /// Takes a measured one.
    pub fn measured(&mut self, rtt_us: u32) {
        if self.srtt_us == 0 {
            (self.srtt_us, self.rttvar_us) = (rtt_us, rtt_us / 2);
            return;
        }
        let smooth = |old: u32, weight: u64, new: u32| {
            (((weight - 1) * u64::from(old) + u64::from(new)).div_ceil(weight)) as u32
        };
        self.rttvar_us = smooth(self.rttvar_us, 4, self.srtt_us.abs_diff(rtt_us));
        self.srtt_us = smooth(self.srtt_us, 8, rtt_us);
    }

    /// The smoothed one.
    pub fn srtt_us(&self) -> u32 {
        self.srtt_us
    }

    /// How long an answer may take.
    pub fn wait_us(&self) -> u32 {
        self.srtt_us.saturating_add(self.rttvar_us.saturating_mul(4)).min(MAX_WAIT_US)
    }
}

impl Requester {
    /// What each packet of an entry costs, of a READ each answer.
    #[inline]
    pub(super) fn cost_of(&self, wqe: &Wqe) -> u32 {
        cost(wqe.packets, wqe.len, self.limits.mtu)
    }

    pub(crate) fn flight(&self) -> u32 {
        self.flight
    }

    pub(crate) fn give_room(&mut self, room: Room) {
        self.flight_limit = self.flight.saturating_add(self.insist_room(room.cost));
        self.others_wait_us = room.wait_us;
        self.wanted = 0;
    }

    pub(crate) fn wanted(&self) -> Option<u32> {
        (self.wanted > 0).then_some(self.wanted)
    }

    #[inline]
    pub(super) fn room_left(&self) -> u32 {
        self.flight_limit.saturating_sub(self.flight)
    }

    /// Whether so much more may be on its way.
    #[inline]
    pub(super) fn has_room(&mut self, cost: u32) -> bool {
        if cost <= self.room_left() || !self.asked {
            return true;
        }
        self.wanted = cost;
        false
    }

    /// So many packets of an entry are not on their way any more.
    #[inline]
    pub(super) fn landed(&mut self, wqe: &Wqe, packets: u32) {
        // Having gone back, what was sent before may be acknowledged, too: `una` is then ahead of
        // all that counts.
        self.flight = self.flight.saturating_sub(packets * self.cost_of(wqe));
    }

    pub(super) fn nothing_in_flight(&mut self) {
        (self.flight, self.asked) = (0, true);
    }

    /// What it takes to be sure that no answer comes, by what was measured and doubled so often.
    pub(super) fn wait_us(&self, doublings: u32) -> u64 {
        let own_us = u64::from(self.rtt.wait_us()) << doublings;
        own_us.min(MAX_WAIT_US.into()).max(self.others_wait_us.into())
    }

    /// An answer has come. If something had been sent again before, its round trip cannot be told.
    /// One that comes soon after that answers it, as where the first was lost. One that comes later
    /// than what was measured allows may answer the first, whose way has become longer than was
    /// waited for: that would never be told, and everything sent again, if the next were not waited
    /// for longer.
    pub(super) fn doubt_or_trust(&mut self, now_us: u64) {
        if self.asks_in_vain() && now_us > self.again_us + u64::from(self.rtt.wait_us()) {
            self.doubt = (self.doubt + 1).min(MAX_DOUBT);
        }
    }

    /// Something has been sent again since the last answer, for want of one.
    pub(super) fn asks_in_vain(&self) -> bool {
        self.retries_left < self.limits.retry_cnt || self.probes > 0
    }

    /// How long to wait for an acknowledgement, with as many retries as there have been; `None`:
    /// for ever.
    pub(super) fn timeout_us(&self) -> Option<u64> {
        let retries = self.limits.retry_cnt.saturating_sub(self.retries_left).min(MAX_DOUBLINGS);
        let usual_us = self.limits.timeout_us.map(|t| (t << retries).max(self.wait_us(self.doubt)));
        match self.insists {
            true => Some(self.insist_us(usual_us.unwrap_or(u64::MAX))),
            false => usual_us,
        }
    }

    /// It was refused room, while its destination has last answered others at `heard_us`: if
    /// nothing is on its way, it is not the peer that is silent.
    pub(crate) fn waits_for_room(&mut self, heard_us: u64) {
        if self.next_psn == self.una {
            let again_at_us = self.timeout_us().map(|t| heard_us + t);
            self.ack_deadline =
                self.ack_deadline.max(again_at_us.filter(|_| self.ack_deadline.is_some()));
        }
    }

    /// An answer to a packet that was sent once has come after `rtt_us`.
    pub(super) fn measured(&mut self, rtt_us: u64) {
        let rtt_us = rtt_us.clamp(1, 10_000_000) as u32;
        self.rtt.measured(rtt_us);
        (self.last_rtt_us, self.doubt) = (rtt_us, 0);
    }

    pub(crate) fn take_rtt_us(&mut self) -> Option<u32> {
        Some(std::mem::take(&mut self.last_rtt_us)).filter(|rtt_us| *rtt_us > 0)
    }

    // RNR

    /// The receiver had no receive: the next messages begin with one, and twice as many with each
    /// that is taken, so that what finds none again is not sent in vain.
    pub(super) fn go_gently(&mut self) {
        self.few = 1;
    }

    #[inline]
    pub(super) fn faster(&mut self) {
        if self.few < u64::MAX {
            self.few = if self.few < super::COMPANY { self.few * 2 } else { u64::MAX };
        }
    }
}
