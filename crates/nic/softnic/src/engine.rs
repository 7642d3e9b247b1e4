//! The engine of a NIC: it moves packets between the sockets and the queue pairs.
//!
//! One engine for each opened NIC, behind one lock. Whoever holds the lock may drive it: an
//! application thread in a verb, or the NIC's background thread. A drive looks at the link, takes a
//! bounded number of datagrams, runs timers that are due, and gives each QP that has something to
//! send its turn.
//!
//! State of a NIC: *working* → *dead*, for ever. A dead one has no sockets; its QPs have stopped
//! (`dying`).
//!
//! # What stops and starts work
//!
//! Nothing is done by itself: work waits in one of these places until somebody drives the engine.
//! Whoever adds a place adds it to the time at which the engine must be driven, else its work waits
//! until the background thread's longest sleep is over.
//!
//! | what waits | where | until | which counts in |
//! | --- | --- | --- | --- |
//! | datagrams | the sockets | the next drive | [`Engine::rx_fds`]: readable; [`Work::more`]: a ring was full |
//! | a QP that may send | `ready` | its turn; while the lines of all that wait are taken (`rate`), `blocked_until_us` | `deadline_of_others_us` |
//! | an RC QP without room at its destination | a line in `congestion` | room, in `transmit` | the same, while one is called |
//! | a UC or UD QP without room at its receiver | `awaiting_credit` | `ask_credit_us`, then it is `ready` | [`Engine::waiting_until_us`] |
//! | a UC or UD packet without a receive | `rnr_queue` | each drive looks | [`Engine::waiting_until_us`] |
//! | an ACK and nothing else | `owing` | the next drive | [`Engine::deadline_us`]; the background thread may wait for an answer: [`Engine::patient_deadline_us`] |
//! | a QP whose timer runs | `timers` | its time | `deadline_of_others_us` |
//! | one whose timer is due, while answers may be unread | `late` | a socket that was found empty | the same: now; [`Work::more`] |
//! | packets that a fault holds | `impairments` | each its time | `deadline_of_others_us` |
//! | QPs of a dead plain NIC | `QpEntry::flush_at_us` | that time | [`Engine::flush_late`] |
//!
//! A change of the link ([`Engine::look`], at the head of each drive and post, and by the thread
//! that watches the links) starts anew what the line held up: `blocked_until_us` is forgotten, what
//! faults hold is due or lost. A sleep that was chosen before is not cut short for it, but by
//! death.
//!
//! | who drives | how | what it does |
//! | --- | --- | --- |
//! | a thread that polls | [`Engine::drive`], if nobody else has the engine | everything; ACKs may be left owed, since it comes again at once |
//! | a thread that posts | [`Engine::kick`] of its QP, or [`Engine::queue`] where its next poll will do ([`Engine::may_wait`]) | sends; receives nothing |
//! | one that changes a QP | [`Engine::kick`]; to RESET [`Engine::drain`] first | sends; drops what came for the life before |
//! | one that destroys a QP | [`Engine::acknowledge`] | sends the ACK that it owes |
//! | the layer above, before it judges a path | `Shared::drain` | drives until the sockets are empty, waiting for the lock |
//! | the background thread | [`Engine::drive`] | everything; see [`crate::background`] |
//!
//! The background thread sleeps until a socket is readable, its bell rings, or the time that it has
//! told (`Shared::wake_at_us`). A thread that had the engine rings the bell at the end of its turn
//! (`Shared::settle`) where there is something to do before that time, unless it polls all the time
//! and so will see to it itself; so does one that stops polling (`about_to_wait`), and whoever
//! finds the NIC dead. While a thread polls, the background thread looks at no socket: it sleeps
//! for a while and asks whether the thread still polls ([`crate::poller`]). With [`Work::more`], or
//! while more is likely to come, it drives again at once.
//!
//! # Files
//!
//! Files use those that stand before them: `sockets`, `dest`, `counts`, `credit`, `flight`;
//! `impair`; `tx`; `qps`; `rnr_queue`; this file, which has the state; and what it does in `rx`,
//! `turns`, `link` and `dying`, which nobody uses by name.
//!
//! # Rules
//!
//! Invariants:
//! - a QP is in the ready queue or among those that await credit at most once (`QpEntry::queued`),
//!   so they are no longer than the table;
//! - a QP that has a deadline has a timer entry at or before it (`QpEntry::timer_at`); older
//!   entries are ignored when they come up.
//!
//! Failure cases: what the network brings is dropped and counted unless it is a packet for a QP
//! from its peer. What cannot be sent counts as lost on the wire; the transport recovers or gives
//! up.

mod ack_predictor;
mod alias;
mod congestion;
mod counts;
mod credit;
mod dest;
mod device_fatal;
mod gather;
mod impair;
mod link;
mod qps;
mod rnr_queue;
mod rx;
mod sockets;
mod turns;
mod tx;

pub(crate) use alias::Aliases;
pub(crate) use counts::Work;
pub(crate) use qps::{wipe, Alternate, QpEntry, QpKind, MAX_QPS};
pub(crate) use sockets::Sockets;

use crate::faults::{LinkSource, Status};
use crate::memory::Domain;
use crate::plain::Plain;
use crate::progress_counters::ProgressCounters;
use crate::socket::RxRing;
use ack_predictor::AckPredictor;
use congestion::CongestionManager;
use counts::RxCount;
use credit::Accounts;
use dest::Dest;
use impair::Impairments;
use qps::QpTable;
use rnr_queue::RnrQueue;
use sockets::TX_SOCKETS;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use tx::TxBatch;
use unbroken_fabric::{Credit, Fabric, GapRecorder, LinkState, NicCounter, NicPage, MAX_PORTS};
use unbroken_types::LinkLayer;
use unbroken_verbs::{DeviceCounters, DeviceEvent, EventSink, UdAliases};

/// Bytes of one drive that are bulk data.
const BULK_BYTES: u64 = 16 << 10;
/// How often one drive may ask a socket for small packets that wait there, so that the ACKs for
/// them leave in few system calls.
const DRIVE_RECEIVES: u32 = 8;
/// Bytes of UC and UD that may be on their way to a NIC: no more than half of its socket's buffer,
/// which RC uses as well, nor than what stays in a cache.
const ROOM_BYTES: u64 = 1 << 20;
/// For so long the background thread holds back an ACK that the application's answer is likely to
/// take along: longer than a round trip of small messages, so that it is the next of them and not a
/// timer that wakes the thread.
const ANSWER_US: u64 = 100;
/// Drives that a reset takes at most: enough for what a socket holds, while other QPs may get more
/// and more.
const DRAIN_DRIVES: u32 = 1024;

/// What the engine needs of its surroundings, fixed when the NIC is opened.
pub(crate) struct Identity {
    /// The NIC's number on its host.
    pub(crate) index: usize,
    /// Of its ports.
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) link_layer: LinkLayer,
    pub(crate) slot: u16,
    /// Whether peers are reached over a real network, where a run of segments may be cut: any IP id
    /// is accepted then.
    pub(crate) any_ip_id: bool,
    /// The emulated network, where the NIC belongs to one.
    pub(crate) fabric: Option<Arc<Fabric>>,
    /// Where UD QPs are that have moved, for all NICs of the process.
    pub(crate) aliases: Arc<UdAliases>,
    /// Of a plain NIC.
    pub(crate) plain: Option<Plain>,
}

impl Identity {
    /// The port, from 0, that has this address of ours.
    fn port_of(&self, ip: IpAddr) -> usize {
        self.ips.iter().position(|own| *own == ip).unwrap_or(0)
    }
}

pub(crate) struct Engine {
    pub(crate) id: Identity,
    sockets: Option<Sockets>,
    /// One for each port.
    rx_rings: Vec<RxRing>,
    tx: TxBatch,
    pub(crate) qps: QpTable,
    /// Of those, for who does not wait for the engine.
    pub(crate) progress_counters: Arc<ProgressCounters>,
    ready: VecDeque<u16>,
    /// QPs whose receivers have no room; they ask again at `ask_credit_us`.
    awaiting_credit: Vec<u16>,
    ask_credit_us: u64,
    /// Who has room for what this NIC sends.
    accounts: Accounts,
    /// What RC QPs have on their way.
    congestion: CongestionManager,
    /// Packets that wait for a receive.
    rnr_queue: RnrQueue,
    /// QPs that owe an ACK and nothing else: it waits for the answer of the application, see
    /// [`Engine::drive`].
    owing: Vec<u16>,
    ack_predictor: AckPredictor,
    timers: BinaryHeap<Reverse<(u64, u16)>>,
    /// QPs whose paths have changed, for which the way is to be found anew before they send.
    moved: Vec<u16>,
    /// QPs whose timers are due, while answers may wait in a socket; and the drives since then.
    late: Vec<u16>,
    late_drives: u32,
    link: LinkSource,
    state: LinkState,
    status: Arc<Status>,
    /// There are some while packets suffer, at one port or more.
    impairments: Option<Box<Impairments>>,
    /// The lines out of all QPs that wait for a turn are taken until then: they have none. 0: one
    /// of them could send.
    blocked_until_us: u64,
    /// When the `wqe-error` fell due that this engine has seen to.
    wqe_error_us: u64,
    /// Of chance.
    seed: u64,
    /// Port by port.
    rx_counts: [RxCount; MAX_PORTS as usize],
    totals: DeviceCounters,
    /// Of its ports; that of port 1 has also what the NIC has once.
    pages: Vec<Arc<NicPage>>,
    gaps: Arc<GapRecorder>,
    sink: Arc<dyn EventSink>,
    /// Where UD QPs are that have moved.
    aliases: Aliases,
}

impl Engine {
    pub(crate) fn new(
        id: Identity,
        sockets: Sockets,
        link: LinkSource,
        status: Arc<Status>,
        pages: Vec<Arc<NicPage>>,
        gaps: Arc<GapRecorder>,
        sink: Arc<dyn EventSink>,
    ) -> Engine {
        let mut room = 0;
        for (port, (page, rx)) in pages.iter().zip(&sockets.rx).enumerate() {
            let slot = page.slot(id.slot as u8);
            slot.take(gaps.process());
            slot.set_tx_ports(std::array::from_fn(|i| {
                sockets.tx[port * TX_SOCKETS + i].addr().port()
            }));
            let room_of_port = (rx.rcvbuf() as u64 / 2).min(ROOM_BYTES);
            page.credit(id.slot as u8).open(room_of_port);
            room += room_of_port;
        }
        let seed = u64::from(sockets.tx[0].addr().port()) << 32 | u64::from(std::process::id());
        Engine {
            aliases: Aliases::new(id.aliases.clone(), id.link_layer, id.index, sink.clone()),
            accounts: Accounts::new(id.fabric.clone()),
            progress_counters: Arc::new(ProgressCounters::new()),
            congestion: CongestionManager::new(sockets.rx[0].rcvbuf()),
            id,
            sockets: Some(sockets),
            rx_rings: pages.iter().map(|_| RxRing::new()).collect(),
            tx: TxBatch::new(),
            qps: QpTable::new(),
            ready: VecDeque::new(),
            awaiting_credit: Vec::new(),
            ask_credit_us: 0,
            rnr_queue: RnrQueue::new(room),
            owing: Vec::new(),
            ack_predictor: AckPredictor::default(),
            timers: BinaryHeap::new(),
            moved: Vec::new(),
            late: Vec::new(),
            late_drives: 0,
            link,
            state: LinkState::GOOD,
            status,
            impairments: None,
            blocked_until_us: 0,
            wqe_error_us: 0,
            seed,
            rx_counts: Default::default(),
            totals: DeviceCounters::default(),
            pages,
            gaps,
            sink,
        }
    }

    /// The receiving sockets' descriptors, while the NIC works; -1 for a port that it does not
    /// have.
    pub(crate) fn rx_fds(&self) -> Option<[RawFd; MAX_PORTS as usize]> {
        let sockets = self.sockets.as_ref()?;
        let mut fds = [-1; MAX_PORTS as usize];
        for (fd, socket) in fds.iter_mut().zip(&sockets.rx) {
            *fd = socket.as_raw_fd();
        }
        Some(fds)
    }

    pub(crate) fn alive(&self) -> bool {
        self.sockets.is_some()
    }

    pub(crate) fn totals(&self) -> DeviceCounters {
        self.totals
    }

    /// Finds the way to a QP's peer after a change of its attributes.
    pub(crate) fn route(&mut self, index: u16) {
        let (Some(sockets), Some(q)) = (&self.sockets, self.qps.get_mut(index)) else { return };
        if let (Some(dest_qpn), Some(ip)) = (q.dest_qpn(), q.peer) {
            let dest = Dest::to_qp(sockets.tx[q.socket].addr(), ip, dest_qpn);
            if let QpKind::Rc(_) = q.kind {
                self.congestion.join(SocketAddr::new(ip, dest.flow.dst_port), index, &mut q.share);
            }
            q.dest = Some(dest);
        }
    }

    /// When somebody must drive the engine again if nothing arrives: now if something waits for its
    /// turn.
    pub(crate) fn deadline_us(&self) -> u64 {
        if self.owing.is_empty() {
            self.deadline_of_others_us()
        } else {
            0
        }
    }

    /// The same, but for ACKs that are owed.
    fn deadline_of_others_us(&self) -> u64 {
        let timer_us = self.timers.peek().map_or(u64::MAX, |Reverse((at_us, _))| *at_us);
        let timer_us = if self.late.is_empty() { timer_us } else { 0 };
        let turn_us = if self.turns_wait() { self.blocked_until_us } else { u64::MAX };
        timer_us.min(turn_us).min(self.held_due_us())
    }

    /// When the background thread must drive the engine for QPs that wait for credit or for a
    /// receive. Threads that poll ask more often.
    pub(crate) fn waiting_until_us(&self) -> u64 {
        let ask_us = if self.awaiting_credit.is_empty() { u64::MAX } else { self.ask_credit_us };
        ask_us.min(self.rnr_queue.look_at_us())
    }

    /// When the background thread must drive the engine: as [`Engine::deadline_us`], but ACKs that
    /// wait for an answer may wait for [`ANSWER_US`] from now.
    pub(crate) fn patient_deadline_us(&self, now_us: u64) -> u64 {
        let others_us = self.deadline_of_others_us().min(self.waiting_until_us());
        if self.owing.is_empty() {
            others_us
        } else {
            others_us.min(now_us + ANSWER_US)
        }
    }

    /// Whether the application is likely to answer what arrives.
    pub(crate) fn answer_is_likely(&mut self) -> bool {
        self.ack_predictor.likely()
    }

    /// What this slot takes of UC and UD on a port, counted from 0.
    fn credit(&self, port: usize) -> &Credit {
        self.pages[port].credit(self.id.slot as u8)
    }

    /// It takes no more.
    fn close_credits(&self) {
        (0..self.pages.len()).for_each(|port| self.credit(port).close());
    }

    /// Looks at the link and follows its changes; gives whether the NIC works.
    #[inline]
    pub(crate) fn look(&mut self, now_us: u64) -> bool {
        let state = self.link.state(now_us);
        if state != self.state {
            self.follow(state, now_us);
        }
        self.alive()
    }

    #[cold]
    fn follow(&mut self, state: LinkState, now_us: u64) {
        let was = std::mem::replace(&mut self.state, state);
        if !self.alive() {
            return;
        }
        self.status.set(state);
        self.impair();
        // The line may be another one: QPs ask it anew.
        self.blocked_until_us = 0;
        if !state.alive {
            return self.die(now_us);
        }
        for port in
            (1..=self.id.ips.len() as u8).filter(|port| was.port_up(*port) != state.port_up(*port))
        {
            let up = state.port_up(port);
            self.sink.event(
                self.id.index,
                if up { DeviceEvent::PortActive(port) } else { DeviceEvent::PortDown(port) },
            );
        }
        if was.down != state.down {
            self.look_at_paths(now_us);
        }
    }

    /// Ports have lost or found their link: QPs that are armed leave those that have none.
    fn look_at_paths(&mut self, now_us: u64) {
        let state = self.state;
        for q in self.qps.iter_mut() {
            if q.follow_ports(|port| state.port_up(port), now_us) {
                self.moved.push(q.qpn as u16);
            }
        }
        self.route_moved();
    }

    /// Finds the way of QPs whose paths have changed, and gives them turns, in which they say so.
    #[inline]
    fn route_moved(&mut self) {
        while let Some(index) = self.moved.pop() {
            self.route(index);
            self.queue(index);
        }
    }

    /// Whether a port, from 1, has a link.
    pub(crate) fn port_up(&self, port: u8) -> bool {
        self.state.port_up(port)
    }

    /// Does what can be done now. With `acks` false, an ACK that is owed and nothing else waits:
    /// the application's answer may take it along, and the next drive sends it in any case.
    pub(crate) fn drive(&mut self, now_us: u64, domain: &Domain, acks: bool) -> Work {
        if !self.look(now_us) {
            return Work::default();
        }
        let owed = std::mem::take(&mut self.owing);
        for &index in &owed {
            if let Some(QpKind::Rc(qp)) = self.qps.get(index).map(|q| &q.kind) {
                self.ack_predictor.learn(!qp.ack_owed());
            }
            self.queue(index);
        }
        if !self.awaiting_credit.is_empty() && self.ask_credit_us <= now_us {
            // They count as queued all the time.
            self.ready.extend(self.awaiting_credit.drain(..));
            self.line_may_be_free();
        }
        let arrived = self.receive(|_| true);
        let received: usize = arrived.iter().sum();
        let due = self.timers.peek().is_some_and(|Reverse((at_us, _))| *at_us <= now_us)
            || !self.late.is_empty();
        let held_due = self.held_due_us() <= now_us;
        let idle = !self.turns_wait() || self.blocked_until_us > now_us;
        if received == 0 && !due && !held_due && idle && self.rnr_queue.is_empty() {
            return Work::default();
        }
        let view = domain.view();
        if !self.rnr_queue.is_empty() {
            self.handle_parked(now_us, &view);
        }
        if received > 0 || held_due {
            self.handle_received(&arrived, now_us, &view);
            self.receive_more(now_us, &view);
        }
        self.route_moved();
        if due {
            // Only a socket that was found empty tells that an answer has not come.
            let empty = !self.rx_rings.iter().any(RxRing::may_have_more);
            self.run_timers(now_us, empty);
        }
        // What was owed before this drive has waited long enough.
        self.transmit(now_us, &view, acks || !owed.is_empty());
        if held_due {
            self.end_impairments();
        }
        let bytes =
            self.rx_counts.iter().map(|c| c.bytes).chain(self.tx.counts.iter().map(|c| c.bytes));
        let bulk = bytes.sum::<u64>() >= BULK_BYTES;
        self.count();
        let turns = self.turns_wait() && self.blocked_until_us <= now_us || !self.late.is_empty();
        Work {
            busy: true,
            received: received > 0,
            more: self.rx_rings.iter().any(RxRing::full) || turns,
            bulk,
        }
    }

    /// Whether QPs could have their turns now, but for a line that is taken.
    pub(crate) fn turns_wait(&self) -> bool {
        !self.ready.is_empty() || self.congestion.calls()
    }

    /// Takes a QP out of the table.
    pub(crate) fn remove(&mut self, index: u16) -> Option<Box<QpEntry>> {
        let mut q = self.qps.remove(index)?;
        self.congestion.leave(index, &mut q.share);
        Some(q)
    }

    /// A QP was stopped: what it had on its way is given back.
    pub(crate) fn stopped(&mut self, index: u16) {
        if let Some(q) = self.qps.get_mut(index) {
            self.congestion.leave(index, &mut q.share);
        }
    }

    /// A QP was reset: handles what has come in so far, which drops what is for that QP, so that
    /// its next life gets none of it.
    pub(crate) fn drain(&mut self, now_us: u64, domain: &Domain) {
        for _ in 0..DRAIN_DRIVES {
            if !self.drive(now_us, domain, true).received {
                break;
            }
        }
    }

    /// Gives a QP its turn in the ready queue.
    pub(crate) fn queue(&mut self, index: u16) {
        if let Some(q) = self.qps.get_mut(index) {
            if !q.queued {
                q.queued = true;
                match q.control {
                    // What is said about paths must not wait behind data: it would look as if the
                    // path were slow.
                    true => self.ready.push_front(index),
                    false => self.ready.push_back(index),
                }
                self.line_may_be_free();
            }
        }
    }

    /// A QP is ready that may be of another port than those which wait for their line.
    fn line_may_be_free(&mut self) {
        if self.pages.len() > 1 {
            self.blocked_until_us = 0;
        }
    }

    /// A verb changed a QP: sends what it has to send now, at most a drive's worth.
    pub(crate) fn kick(&mut self, index: u16, now_us: u64, domain: &Domain) {
        if !self.alive() {
            return;
        }
        self.queue(index);
        let view = domain.view();
        self.transmit(now_us, &view, true);
        self.count();
    }

    /// Whether what was just posted to a QP may wait for the next drive.
    pub(crate) fn may_wait(&self, index: u16) -> bool {
        self.qps.get(index).is_some_and(|q| matches!(&q.kind, QpKind::Rc(qp) if qp.may_wait()))
    }

    /// Sends the ACK that a QP owes, if it does. What the application has seen arrive must be
    /// acknowledged before the QP is gone: the peer would take the silence for a failure.
    pub(crate) fn acknowledge(&mut self, index: u16, now_us: u64, domain: &Domain) {
        if self.qps.get(index).is_some_and(|q| matches!(&q.kind, QpKind::Rc(qp) if qp.ack_owed())) {
            self.kick(index, now_us, domain);
        }
    }

    /// Adds what a batch did to the totals and to the shared page.
    fn count(&mut self) {
        for port in 0..self.pages.len() {
            self.count_port(port);
        }
    }

    fn count_port(&mut self, port: usize) {
        let tx = std::mem::take(&mut self.tx.counts[port]);
        let rx = std::mem::take(&mut self.rx_counts[port]);
        self.totals.tx_bytes += tx.bytes;
        self.totals.rx_bytes += rx.bytes;
        if rx.credit != 0 {
            self.credit(port).take(rx.credit);
        }
        let slot = self.pages[port].slot(self.id.slot as u8);
        let pairs = [
            (NicCounter::TxBytes, tx.bytes),
            (NicCounter::TxPackets, tx.packets),
            (NicCounter::TxPayloadBytes, tx.payload_bytes),
            (NicCounter::RxBytes, rx.bytes),
            (NicCounter::RxPackets, rx.packets),
            (NicCounter::RxPayloadBytes, rx.payload_bytes),
            (NicCounter::Drops, tx.drops + rx.drops),
            (NicCounter::Retransmits, tx.retransmits),
            (NicCounter::IcrcErrors, rx.icrc_errors),
            (NicCounter::Strangers, rx.strangers),
        ];
        for (counter, n) in pairs {
            if n != 0 {
                slot.add(counter, n);
            }
        }
    }
}
