//! Where packets of UC and UD wait for a receive to be posted.
//!
//! Hardware drops what arrives before a receive is posted. But hardware does not take the core of
//! the program that is about to post one: this NIC may read its socket just when the program cannot
//! run, and UC and UD send nothing twice. So a packet that needs a receive where there is none is
//! parked for at most [`PATIENCE_US`], and all that follow for its QP behind it.
//!
//! What is parked has not been taken, as far as the sender's credit goes: so back-pressure works
//! from the receive queue on, and a NIC's parking place is never fuller than the room that it
//! published.
//!
//! State of a QP: *flowing* → *parked* (a packet found no receive) → *flowing* (all that waited
//! found one) or → *deaf* (the oldest waited too long: everything is handled as it is, which drops
//! it) → *flowing* (a receive is posted).
//!
//! Invariants: a QP has a line (`QpEntry::parked`) while, and only while, packets of it wait; the
//! packets of a QP keep their order.
//!
//! Failure cases: a QP that was destroyed, reset or failed meanwhile drops what waited for it.

use super::qps::{QpEntry, QpTable};
use crate::socket::Marks;
use std::collections::VecDeque;
use std::net::IpAddr;
use unbroken_fabric::packet_cost;
use unbroken_wire::Packet;

/// A packet waits no longer than this for a receive, in µs: a program that polls has had a core by
/// then. Less than what senders wait for a receiver that takes nothing.
const PATIENCE_US: u64 = 500_000;
/// How often the background thread looks for receives; application threads look whenever they poll.
const LOOK_US: u64 = 200;

/// A packet that waits, its ICRC checked and cut off.
pub(super) struct Waiting {
    pub(super) bytes: Vec<u8>,
    pub(super) src: IpAddr,
    /// Our port that it came to.
    pub(super) dst: IpAddr,
    pub(super) marks: Marks,
    pub(super) since_us: u64,
    /// What its sender gets back when it leaves here.
    pub(super) cost: u64,
}

impl Waiting {
    fn size(&self) -> u64 {
        packet_cost(1, self.bytes.len() as u64)
    }
}

/// What became of a packet.
#[derive(PartialEq, Eq)]
pub(super) enum Parked {
    /// It need not wait.
    No,
    /// It waits.
    Yes,
    /// It would have to, and there is no room.
    Full,
}

/// The packets of one QP.
struct Line {
    qpn: u32,
    waiting: VecDeque<Waiting>,
}

/// All that wait on a NIC.
pub(crate) struct RnrQueue {
    lines: Vec<Line>,
    used: u64,
    room: u64,
    /// When the background thread looks again.
    look_at_us: u64,
}

impl RnrQueue {
    /// A place for packets of that cost.
    pub(crate) fn new(room: u64) -> RnrQueue {
        RnrQueue { lines: Vec::new(), used: 0, room, look_at_us: u64::MAX }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// When somebody must look whether receives were posted.
    pub(super) fn look_at_us(&self) -> u64 {
        if self.is_empty() {
            u64::MAX
        } else {
            self.look_at_us
        }
    }

    /// Parks a packet of the QP if it must wait: it needs a receive that is not there, or others of
    /// the QP wait.
    #[inline]
    pub(super) fn takes(
        &mut self,
        q: &mut QpEntry,
        packet: &Packet<'_>,
        waiting: impl FnOnce() -> Waiting,
    ) -> Parked {
        if !q.parked {
            if !q.needs_receive(packet) {
                return Parked::No;
            }
            if q.has_receive() {
                q.deaf = false;
                return Parked::No;
            }
            if q.deaf {
                return Parked::No;
            }
        }
        self.park(q, waiting())
    }

    #[cold]
    fn park(&mut self, q: &mut QpEntry, packet: Waiting) -> Parked {
        if self.used + packet.size() > self.room {
            // Only peers without an account come to this.
            return Parked::Full;
        }
        if self.is_empty() {
            self.look_at_us = packet.since_us + LOOK_US;
        }
        self.used += packet.size();
        match self.lines.iter_mut().find(|line| line.qpn == q.qpn) {
            Some(line) => line.waiting.push_back(packet),
            None => self.lines.push(Line { qpn: q.qpn, waiting: VecDeque::from([packet]) }),
        }
        q.parked = true;
        Parked::Yes
    }

    /// Hands over what need not wait any more: `hand_over` is given the QP, if it still exists, and
    /// the packet.
    pub(super) fn look(
        &mut self,
        qps: &mut QpTable,
        now_us: u64,
        mut hand_over: impl FnMut(Option<&mut QpEntry>, Waiting),
    ) {
        let used = &mut self.used;
        self.look_at_us = now_us + LOOK_US;
        self.lines.retain_mut(|line| {
            let mut q = qps.get_mut(line.qpn as u16).filter(|q| q.qpn == line.qpn);
            while let Some(first) = line.waiting.front() {
                if let Some(q) = &mut q {
                    q.deaf |= now_us >= first.since_us + PATIENCE_US;
                    let needs =
                        Packet::parse(&first.bytes).is_ok_and(|packet| q.needs_receive(&packet));
                    if needs && !q.deaf && !q.has_receive() {
                        return true;
                    }
                }
                let Some(first) = line.waiting.pop_front() else { break };
                *used -= first.size();
                hand_over(q.as_deref_mut(), first);
            }
            if let Some(q) = q {
                q.parked = false;
            }
            false
        });
    }
}
