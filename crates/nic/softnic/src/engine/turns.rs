//! Turns of QPs: what their timers say, and what they send.

use super::congestion::CongestionManager;
use super::credit::ASK_AGAIN_US;
use super::qps::{QpEntry, TurnResult};
use super::sockets::port_of;
use super::tx::{LinkEffect, Out, TxLinks};
use super::{Engine, QpKind};
use crate::memory::View;
use crate::progress_counters::ProgressCounters;
use probe::probe;
use std::cmp::Reverse;

/// Packets that a QP may send before the next one has its turn.
const TURN_PACKETS: u32 = 64;
/// Packets that one drive may send.
const DRIVE_PACKETS: u32 = 256;
/// Second turns in one drive.
const SECOND_TURNS: usize = (DRIVE_PACKETS / TURN_PACKETS) as usize;
/// Timers run in one drive.
const DRIVE_TIMERS: usize = 64;
/// Drives that a timer waits for a socket to be found empty: as many as it takes to read what a
/// large buffer holds.
const LATE_DRIVES: u32 = 2048;

impl Engine {
    /// Runs the timers that are due. While answers may wait in a socket, since this process was
    /// kept from its core for a while, it is too early to say that none came: but for the end of an
    /// RNR wait, which no packet changes, timers wait until the socket was found `empty`.
    pub(super) fn run_timers(&mut self, now_us: u64, empty: bool) {
        if !self.late.is_empty() {
            self.late_drives += 1;
            if empty || self.late_drives >= LATE_DRIVES {
                for index in std::mem::take(&mut self.late) {
                    self.time_out(index, now_us);
                }
            }
        }
        if self.late.is_empty() {
            self.late_drives = 0;
        }
        for _ in 0..DRIVE_TIMERS {
            let Some(&Reverse((at_us, index))) =
                self.timers.peek().filter(|Reverse((at_us, _))| *at_us <= now_us)
            else {
                break;
            };
            self.timers.pop();
            let Some(q) = self.qps.get_mut(index).filter(|q| q.timer_at == at_us) else { continue };
            if empty || matches!(&q.kind, QpKind::Rc(qp) if qp.waits_for_receiver()) {
                self.time_out(index, now_us);
            } else {
                // Its entry is gone, and it is here instead.
                self.late.push(index);
            }
        }
    }

    fn time_out(&mut self, index: u16, now_us: u64) {
        let Some(q) = self.qps.get_mut(index) else { return };
        q.timer_at = u64::MAX;
        if let (true, QpKind::Rc(qp)) = (q.share.waits, &mut q.kind) {
            qp.waits_for_room(self.congestion.heard_us(&q.share));
        }
        if let QpKind::Rc(qp) = &q.kind {
            self.congestion.settle(&mut q.share, qp.flight());
        }
        q.handle_timeout(now_us);
        if let QpKind::Rc(qp) = &q.kind {
            self.congestion.give_up(&mut q.share, qp.flight());
        }
        if q.take_path() {
            self.route(index);
        }
        self.queue(index);
    }

    /// Gives the QPs of the ready queue their turns, then those that waited for room which is there
    /// now, within the budget of a drive, and sends what they pushed.
    pub(super) fn transmit(&mut self, now_us: u64, view: &View<'_>, acks: bool) {
        self.aliases.look();
        let Engine {
            sockets: Some(sockets),
            tx,
            qps,
            ready,
            state,
            impairments,
            pages,
            sink,
            accounts,
            aliases,
            congestion,
            progress_counters,
            ..
        } = self
        else {
            return;
        };
        let mut out = Out::open(tx, &sockets.tx, view, accounts, now_us);
        out.shut = state.shut();
        out.aliases = aliases.map();
        out.plain = self.id.plain.as_ref();
        if let Some(i) = impairments {
            out.links = LinkEffect::Impaired(TxLinks { impairments: i, pages, now_us });
        }
        let mut budget = DRIVE_PACKETS;
        // Each QP has one turn at least, so that its events and timers are seen to.
        let mut turns = ready.len() + SECOND_TURNS;
        let mut calls = DRIVE_PACKETS;
        // The first that found its line taken.
        let mut refused = None;
        while budget > 0 {
            let of_ready = if turns > 0 { ready.pop_front() } else { None };
            let called = of_ready.is_none();
            let Some(index) = of_ready.or_else(|| if calls > 0 { congestion.call() } else { None })
            else {
                break;
            };
            let Some(q) = qps.get_mut(index) else { continue };
            if called {
                calls -= 1;
                q.share.waits = false;
            } else {
                turns -= 1;
                q.queued = false;
            }
            let mut sent = TURN_PACKETS.min(budget);
            let turn =
                turn(q, (&mut *congestion, progress_counters), called, &mut out, &mut sent, acks);
            if turn.retransmits > 0 {
                out.batch.counts[port_of(q.socket)].retransmits += u64::from(turn.retransmits);
                // For tracers (docs/guide/monitoring.md): QPN, index of the NIC, packets.
                probe!(unbroken, retransmit, q.qpn, self.id.index, turn.retransmits);
            }
            budget -= sent;
            q.tell(self.id.index, &**sink);
            if turn.more {
                if !q.queued {
                    q.queued = true;
                    ready.push_back(index);
                }
                if sent == 0 && refused.is_none() && out.is_taken(q.socket) {
                    refused = Some(index);
                    turns = turns.saturating_sub(SECOND_TURNS);
                }
            } else if turn.awaits_credit {
                q.queued = true;
                self.awaiting_credit.push(index);
                self.ask_credit_us = now_us + ASK_AGAIN_US;
            } else if turn.owes && !called {
                // One that was called has had a turn of its own since it came to owe this, or will
                // have.
                self.owing.push(index);
            }
            if let Some(wanted) = turn.wanted {
                congestion.wait(index, &mut q.share, wanted);
            }
            if turn.timer_us < q.timer_at {
                q.timer_at = turn.timer_us;
                self.timers.push(Reverse((turn.timer_us, index)));
            }
        }
        // It is in front in the next drive. Where a drive sends a packet or two, the same one could
        // else have the line each time.
        if let Some(at) = refused.and_then(|index| ready.iter().position(|i| *i == index)) {
            ready.rotate_left(at);
        }
        // Those that are called may be of any port.
        let called = if congestion.calls() { 0..pages.len() } else { 0..0 };
        let waiting =
            ready.iter().filter_map(|index| Some(port_of(qps.get(*index)?.socket))).chain(called);
        self.blocked_until_us = out.finish(waiting);
        if self.timers.len() > 64 + 4 * qps.len() {
            self.timers.retain(|Reverse((at_us, index))| {
                qps.get(*index).is_some_and(|q| q.timer_at == *at_us)
            });
        }
    }
}

/// Gives a QP its turn, within its share of the room at its destination.
#[inline]
fn turn(
    q: &mut QpEntry,
    (congestion, progress_counters): (&mut CongestionManager, &ProgressCounters),
    called: bool,
    out: &mut Out<'_>,
    quota: &mut u32,
    acks: bool,
) -> TurnResult {
    let now_us = out.now_us;
    if let QpKind::Rc(qp) = &mut q.kind {
        congestion.settle(&mut q.share, qp.flight());
        let news = qp.take_news();
        progress_counters.set(q.qpn as u16, news.acked);
        if news.lost > 0 {
            progress_counters.add_lost(q.qpn as u16, news.lost);
        }
        congestion.learn(&mut q.share, &news, now_us);
        qp.give_room(congestion.room(&q.share, called));
    }
    let turn = q.transmit(now_us, out, quota, acks);
    if let QpKind::Rc(qp) = &q.kind {
        congestion.settle(&mut q.share, qp.flight());
    }
    turn
}

#[cfg(test)]
mod tests {
    use crate::{Config, Nic, SoftNics};
    use std::sync::Arc;
    use std::time::{Duration, Instant};
    use unbroken_fabric::{now_us, Fabric, NicCounter, Runtime};
    use unbroken_types::{
        Access, Gid, Mtu, PathAttr, QpCaps, QpState, QpType, SendFlags, SendOpcode, Sge, Wc,
    };
    use unbroken_types::{RcModify, RecvWr, SendWr};
    use unbroken_verbs::{Cq, Device, DeviceEvent, DeviceQp, EventSink, MrKeys, QpInit, QpModify};

    /// More than a drive takes.
    const QPS: usize = 400;
    /// A READ of it has a whole block of answers; those of all QPs are more than a socket holds.
    const READ_BYTES: usize = 64 << 10;
    const ALL: Access = Access(15);

    struct NoEvents;

    impl EventSink for NoEvents {
        fn event(&self, _: usize, _: DeviceEvent) {}
    }

    struct Host {
        nic: Arc<Nic>,
        cq: Arc<Cq>,
        qps: Vec<Arc<dyn DeviceQp>>,
        mr: MrKeys,
        buf: Box<[u8]>,
    }

    impl Host {
        fn new(folder: &std::path::Path, name: &str) -> Host {
            let nics = SoftNics::new(Config::host(Runtime::at(folder).unwrap(), name)).unwrap();
            let nic = nics.open(0, Arc::new(NoEvents)).unwrap();
            let (cq, pd) = (Cq::new(1024, None), nics.memory().alloc_pd().unwrap());
            let buf = vec![7; READ_BYTES].into_boxed_slice();
            let addr = buf.as_ptr() as u64;
            let mr = nics.memory().reg_mr(pd, addr, READ_BYTES as u64, addr, ALL).unwrap();
            let init = QpInit {
                qp_type: QpType::Rc,
                caps: QpCaps {
                    max_send_wr: 1,
                    max_recv_wr: 1,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: 0,
                },
                pd,
                send_cq: cq.clone(),
                recv_cq: cq.clone(),
                srq: None,
                sq_sig_all: true,
                suspend_on_error: false,
                wc_qpn: None,
                home: None,
                local_keys_of: None,
                control: false,
                standby: false,
                lane: None,
                management: false,
            };
            let qps = (0..QPS).map(|_| nic.create_qp(&init).unwrap()).collect();
            Host { nic, cq, qps, mr, buf }
        }

        fn connect(&self, peer: &Host, timeout: u8) {
            let modify = |qp: &dyn DeviceQp, rc, dest: Option<Gid>| {
                qp.modify(&QpModify { rc, path: dest.map(PathAttr::new), ..QpModify::default() })
                    .unwrap();
            };
            for (qp, to) in self.qps.iter().zip(&peer.qps) {
                let d = RcModify::default();
                modify(
                    &**qp,
                    RcModify { state: Some(QpState::Init), access: Some(ALL), ..d },
                    None,
                );
                let rtr = RcModify {
                    state: Some(QpState::Rtr),
                    dest_qpn: Some(to.qpn()),
                    rq_psn: Some(0),
                    mtu: Some(Mtu::B4096),
                    max_dest_rd_atomic: Some(1),
                    min_rnr_timer: Some(1),
                    ..d
                };
                modify(&**qp, rtr, Some(peer.nic.gid()));
                let rts = RcModify {
                    state: Some(QpState::Rts),
                    sq_psn: Some(0),
                    timeout: Some(timeout),
                    retry_cnt: Some(7),
                    rnr_retry: Some(7),
                    max_rd_atomic: Some(1),
                    ..d
                };
                modify(&**qp, rts, None);
            }
        }
    }

    fn hosts(timeout: u8) -> (tempfile::TempDir, Fabric, [Host; 2]) {
        let folder = tempfile::tempdir().unwrap();
        let fabric = Fabric::open(&Runtime::at(folder.path()).unwrap()).unwrap();
        let hosts = ["a", "b"].map(|name| Host::new(folder.path(), name));
        hosts[0].connect(&hosts[1], timeout);
        hosts[1].connect(&hosts[0], timeout);
        (folder, fabric, hosts)
    }

    fn wr(opcode: SendOpcode, sges: &[Sge], to: &Host) -> SendWr<'static> {
        SendWr {
            wr_id: 0,
            opcode,
            flags: SendFlags::SIGNALED,
            remote_addr: to.buf.as_ptr() as u64,
            rkey: to.mr.rkey,
            sges: sges.to_vec().leak(),
            ..SendWr::default()
        }
    }

    /// Posts to each QP of `a` while nobody drives it, lets `meanwhile` happen, then drives it
    /// until all have completed. Gives what was sent again, and what was dropped.
    fn post_and_lose_the_core(a: &Host, wr: &SendWr<'_>, meanwhile: impl FnOnce()) -> (u64, u64) {
        let shared = a.nic.downgrade().upgrade().unwrap();
        let mut e = shared.lock();
        for index in a.qps.iter().map(|qp| qp.qpn() as u16) {
            e.qps.get_mut(index).unwrap().post_send(wr).unwrap();
            e.kick(index, now_us(), &shared.domain);
        }
        meanwhile();
        // Long after all timeouts, and time for the last answer to leave.
        std::thread::sleep(Duration::from_millis(100));
        let (mut wcs, mut sent, start) = ([Wc::default(); 16], 0, Instant::now());
        while sent < QPS {
            e.drive(now_us(), &shared.domain, true);
            let n = a.cq.poll(&mut wcs).unwrap();
            assert!(wcs[..n].iter().all(|wc| wc.status == 0), "{:?}", &wcs[..n]);
            sent += n;
            assert!(start.elapsed() < Duration::from_secs(20), "{sent} have completed");
        }
        let page = e.pages[0].slot(e.id.slot as u8);
        (page.get(NicCounter::Retransmits), page.get(NicCounter::Drops))
    }

    /// A process loses its core while answers come: they are not to be taken for missing before
    /// they are read.
    #[test]
    fn answers_that_wait_unread_are_not_late() {
        let (_folder, _fabric, [a, b]) = hosts(10); // 4 ms
        b.qps.iter().for_each(|qp| qp.post_recv(&RecvWr { wr_id: 0, sges: &[] }).unwrap());
        let all_have_come = || {
            let (mut wcs, mut received, start) = ([Wc::default(); 16], 0, Instant::now());
            while received < QPS {
                received += b.cq.poll(&mut wcs).unwrap();
                assert!(start.elapsed() < Duration::from_secs(20), "{received} messages have come");
            }
        };
        assert_eq!(
            post_and_lose_the_core(&a, &wr(SendOpcode::Send, &[], &b), all_have_come),
            (0, 0)
        );
    }

    /// The answers of many READs together overrun our own socket, unless no more are asked for than
    /// it holds.
    #[test]
    fn answers_of_many_reads_find_room() {
        let (_folder, _fabric, [a, b]) = hosts(20); // 4 s
        let sges =
            [Sge { addr: a.buf.as_ptr() as u64, length: READ_BYTES as u32, lkey: a.mr.lkey }];
        assert_eq!(post_and_lose_the_core(&a, &wr(SendOpcode::Read, &sges, &b), || {}), (0, 0));
    }
}
