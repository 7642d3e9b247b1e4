//! A channel of a queue pair: one UC queue pair for each generation, the receives that its packets
//! use up, and the packets that it sends.
//!
//! Each packet is a write with immediate, so each uses up a receive, which names no memory. They
//! are posted again batch by batch. A queue that is found empty may have lost packets: that is an
//! *under-run*, and counted.
//!
//! Of the sends of a batch only the last one makes a completion; completions come in order, so it
//! stands for all before it. Between batches a queue pair may be asked to change a key
//! ([`crate::keys`]); that makes a completion of its own.

use crate::{lock, Result};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use unbroken::{
    Access, Cq, Events, Nic, Pd, QpAddress, QpCaps, RecvWr, SendBatch, SendFlags, SendOpcode,
    SendWr, Sge, UcOptions, UcQp, Wc, WcStatus,
};
use unbroken_sdr_protocol::board::{Arrival, Board};
use unbroken_sdr_protocol::packets::Packet;

/// Sends of a channel that may be outstanding, over all generations.
pub(crate) const SEND_DEPTH: usize = 256;
/// Completions and sends in one go.
const BATCH: usize = 64;

/// Where a peer takes packets of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneInfo {
    pub(crate) address: QpAddress,
    /// The root key of the generation, on the NIC of the channel; 0 where each receive has keys of
    /// its own.
    pub(crate) rkey: u32,
}

/// A generation of a channel.
struct Lane {
    qp: UcQp,
    send_cq: Cq,
    recv_cq: Cq,
}

/// What the sending half of a channel knows.
struct Outbound {
    /// The peer's keys, by generation.
    rkeys: Vec<u32>,
    /// What is outstanding, by generation.
    posted: Vec<VecDeque<Posted>>,
    /// Packets of it.
    outstanding: usize,
    /// A key is to be changed; there is one such request at a time.
    key_waits: bool,
    packets: Vec<Packet>,
    pace: Pace,
}

/// Requests that complete together.
#[derive(Clone, Copy)]
enum Posted {
    /// So many packets of a message, and whether a completion comes with the last of them.
    Packets { seq: u64, packets: u64, last: bool },
    /// A change of a key.
    Key,
}

/// A token bucket. The channel of a rate that is shared has its part of it.
struct Pace {
    bytes_per_us: f64,
    tokens: f64,
    at_us: u64,
}

/// So many packets may leave at once after a pause.
const BURST_PACKETS: f64 = 16.0;

impl Pace {
    /// Tokens of now; `None`: it is not limited.
    fn refill(&mut self, now_us: u64, packet_bytes: f64) -> Option<f64> {
        if self.bytes_per_us == 0.0 {
            return None;
        }
        let fresh = (now_us - self.at_us.min(now_us)) as f64 * self.bytes_per_us;
        // What is left at the end of a short sleep is not lost: up to 100 µs of sending.
        let most = (BURST_PACKETS * packet_bytes).max(100.0 * self.bytes_per_us);
        self.tokens = (self.tokens + fresh).min(most);
        self.at_us = now_us;
        Some(self.tokens)
    }
}

/// What a channel has counted.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) packets: AtomicU64,
    pub(crate) duplicates: AtomicU64,
    pub(crate) late: AtomicU64,
    pub(crate) outside: AtomicU64,
    pub(crate) under_runs: AtomicU64,
    pub(crate) sent: AtomicU64,
}

/// A channel of a queue pair.
pub(crate) struct Channel {
    number: u8,
    lanes: Vec<Lane>,
    recv_depth: u32,
    /// Receives that are posted, by generation; the worker's own.
    receives: Mutex<Vec<u32>>,
    out: Mutex<Outbound>,
    pub(crate) counts: Arc<Counts>,
    dead: AtomicBool,
}

/// How a channel is made.
pub(crate) struct ChannelOptions<'a> {
    pub(crate) number: u8,
    pub(crate) generations: u8,
    pub(crate) recv_depth: u32,
    pub(crate) rate_bytes_per_us: f64,
    pub(crate) nic: &'a Nic,
    pub(crate) pd: &'a Pd,
    pub(crate) events: &'a Events,
}

impl Channel {
    pub(crate) fn new(o: &ChannelOptions<'_>) -> Result<Channel> {
        let caps = QpCaps {
            max_send_wr: SEND_DEPTH as u32 + 1, // and a change of a key
            max_recv_wr: o.recv_depth,
            max_send_sge: 1,
            max_recv_sge: 0,
            max_inline_data: 0,
        };
        let access = Access::LOCAL_WRITE.with(Access::REMOTE_WRITE);
        let options = UcOptions::new(caps).with_access(access).with_lossy(true);
        let lane = |_| {
            let send_cq = o.nic.create_cq_on(SEND_DEPTH as u32 + 1, o.events)?;
            let recv_cq = o.nic.create_cq_on(o.recv_depth, o.events)?;
            Ok(Lane { qp: o.pd.create_uc_qp(&send_cq, &recv_cq, &options)?, send_cq, recv_cq })
        };
        let lanes: Vec<Lane> = (0..o.generations).map(lane).collect::<Result<_>>()?;
        let generations = lanes.len();
        Ok(Channel {
            number: o.number,
            lanes,
            recv_depth: o.recv_depth,
            receives: Mutex::new(vec![0; generations]),
            out: Mutex::new(Outbound {
                rkeys: Vec::new(),
                posted: vec![VecDeque::new(); generations],
                outstanding: 0,
                key_waits: false,
                packets: Vec::with_capacity(BATCH),
                pace: Pace { bytes_per_us: o.rate_bytes_per_us, tokens: 0.0, at_us: 0 },
            }),
            counts: Arc::default(),
            dead: AtomicBool::new(false),
        })
    }

    /// What the peer needs of it; `rkey` gives the key of a generation.
    pub(crate) fn info(&self, rkey: impl Fn(usize) -> u32) -> Vec<LaneInfo> {
        let of = |(generation, lane): (usize, &Lane)| LaneInfo {
            address: lane.qp.address(),
            rkey: rkey(generation),
        };
        self.lanes.iter().enumerate().map(of).collect()
    }

    /// Connects to the peer's channel.
    pub(crate) fn connect(&self, peer: &[LaneInfo]) -> Result<()> {
        for (generation, peer) in peer.iter().enumerate().take(self.lanes.len()) {
            self.post_receives(generation, self.recv_depth)?;
            self.lanes[generation].qp.connect(&peer.address)?;
        }
        lock(&self.receives).fill(self.recv_depth);
        lock(&self.out).rkeys = peer.iter().map(|lane| lane.rkey).collect();
        Ok(())
    }

    fn post_receives(&self, generation: usize, count: u32) -> Result<()> {
        let wr = RecvWr { wr_id: 0, sges: &[] };
        (0..count).try_for_each(|_| Ok(self.lanes[generation].qp.post_recv(&wr)?))
    }

    /// Brings completions of packets into the bitmaps; says how many there were.
    pub(crate) fn receive(&self, board: &Board, drive: bool) -> usize {
        let mut wcs = [Wc::default(); BATCH];
        let mut all = 0;
        for (generation, lane) in self.lanes.iter().enumerate() {
            // One of them drives the NIC for all.
            let n = match drive && generation == 0 {
                true => lane.recv_cq.poll_into(&mut wcs),
                false => lane.recv_cq.take_into(&mut wcs),
            };
            // A queue that has overrun gives nothing any more; its queue pair has ended.
            let n = n.unwrap_or(0);
            if n > 0 {
                self.note(board, generation, &wcs[..n]);
                all += n;
            }
        }
        all
    }

    fn note(&self, board: &Board, generation: usize, wcs: &[Wc]) {
        let (mut late, mut duplicates, mut outside, mut packets) = (0, 0, 0, 0);
        {
            let _gate = board.enter(self.number);
            for wc in wcs.iter().filter(|wc| wc.status == WcStatus::Success as u32) {
                packets += 1;
                match board.arrive(generation as u8, u32::from_be(wc.imm_data)) {
                    Arrival::Noted(_) | Arrival::Immediate => {}
                    Arrival::Duplicate => duplicates += 1,
                    Arrival::Late => late += 1,
                    Arrival::Outside => outside += 1,
                }
            }
        }
        let c = &self.counts;
        for (counter, n) in [
            (&c.packets, packets),
            (&c.late, late),
            (&c.duplicates, duplicates),
            (&c.outside, outside),
        ] {
            if n > 0 {
                counter.fetch_add(n, Relaxed);
            }
        }
        let used = wcs.len() as u32;
        let left = {
            let mut receives = lock(&self.receives);
            receives[generation] = receives[generation].saturating_sub(used);
            receives[generation]
        };
        if left == 0 {
            c.under_runs.fetch_add(1, Relaxed);
        }
        if packets > 0 && self.post_receives(generation, used).is_ok() {
            lock(&self.receives)[generation] += used;
        } else {
            self.dead.store(true, Relaxed);
        }
    }

    /// Takes completions of sends, and sends more: `take` gives up to so many packets. Says how
    /// much was done, and when there is more to do.
    pub(crate) fn send(
        &self,
        now_us: u64,
        mtu_bytes: u32,
        mut take: impl FnMut(usize, &mut Vec<Packet>),
        mut completed: impl FnMut(u64, u64),
    ) -> (usize, Option<u64>) {
        let mut out = lock(&self.out);
        let mut done = self.reap(&mut out, false, &mut completed);
        if out.rkeys.is_empty() || self.is_dead() {
            return (done, None);
        }
        let mut next_us = None;
        let mut room = BATCH.min(SEND_DEPTH - out.outstanding);
        if let Some(tokens) = out.pace.refill(now_us, mtu_bytes.into()) {
            let allowed = (tokens / f64::from(mtu_bytes)).max(0.0) as usize;
            if allowed < room {
                room = allowed;
                // Not packet by packet: half of a burst.
                let wait_us = BURST_PACKETS / 2.0 * f64::from(mtu_bytes) / out.pace.bytes_per_us;
                next_us = Some(now_us + wait_us.ceil() as u64);
            }
        }
        let mut packets = std::mem::take(&mut out.packets);
        packets.clear();
        if room > 0 {
            take(room, &mut packets);
        }
        if packets.is_empty() && room > 0 {
            next_us = None;
        }
        done += packets.len();
        for run in packets.chunk_by(|a, b| a.generation == b.generation) {
            self.post(&mut out, run, &mut completed);
        }
        out.packets = packets;
        (done, next_us)
    }

    fn post(&self, out: &mut Outbound, run: &[Packet], completed: &mut impl FnMut(u64, u64)) {
        let generation = usize::from(run[0].generation);
        let batch = Batch {
            packets: run,
            sges: run.iter().map(sge).collect(),
            rkey: out.rkeys[generation],
        };
        let posted = self.lanes[generation].qp.post_sends(&batch).is_ok();
        if !posted {
            // As if they were lost on the way, and all that comes after them.
            self.dead.store(true, Relaxed);
        }
        let bytes: u64 = run.iter().map(|p| u64::from(p.bytes)).sum();
        out.pace.tokens -= bytes as f64;
        let mut messages = run.chunk_by(|a, b| a.seq == b.seq).peekable();
        while let Some(of_one) = messages.next() {
            let (seq, n) = (of_one[0].seq, of_one.len() as u64);
            if posted {
                let last = messages.peek().is_none();
                out.posted[generation].push_back(Posted::Packets { seq, packets: n, last });
                out.outstanding += of_one.len();
            } else {
                completed(seq, n);
            }
        }
        self.counts.sent.fetch_add(run.len() as u64, Relaxed);
    }

    /// Takes completions of sends.
    fn reap(&self, out: &mut Outbound, drive: bool, completed: &mut impl FnMut(u64, u64)) -> usize {
        let mut wcs = [Wc::default(); BATCH];
        let mut all = 0;
        for (generation, lane) in self.lanes.iter().enumerate() {
            let n = match drive && generation == 0 {
                true => lane.send_cq.poll_into(&mut wcs),
                false => lane.send_cq.take_into(&mut wcs),
            };
            let n = n.unwrap_or(0);
            all += n;
            for wc in &wcs[..n] {
                let failed = wc.status != WcStatus::Success as u32;
                if failed {
                    self.dead.store(true, Relaxed);
                }
                while let Some(posted) = out.posted[generation].pop_front() {
                    let last = match posted {
                        Posted::Packets { seq, packets, last } => {
                            out.outstanding -= packets as usize;
                            completed(seq, packets);
                            last
                        }
                        Posted::Key => {
                            out.key_waits = false;
                            true
                        }
                    };
                    // Of a queue pair that has ended, every send makes a completion: the first
                    // stands for all.
                    if last && !failed {
                        break;
                    }
                }
            }
        }
        all
    }

    /// Has the queue pair of a generation change a key; [`Channel::key_changed`] says when it has,
    /// and until then no other is asked. False: the channel has failed.
    pub(crate) fn change_key(&self, generation: u8, wr: &SendWr<'_>) -> bool {
        let mut out = lock(&self.out);
        let generation = usize::from(generation);
        if self.lanes[generation].qp.post_sends(wr).is_err() {
            self.give_up();
            return false;
        }
        out.posted[generation].push_back(Posted::Key);
        out.key_waits = true;
        true
    }

    /// Whether the key has been changed; false: it never will, since the channel has failed. The
    /// NIC is driven, and packets that are complete are told.
    pub(crate) fn key_changed(&self, mut completed: impl FnMut(u64, u64)) -> Option<bool> {
        let mut out = lock(&self.out);
        self.reap(&mut out, true, &mut completed);
        match self.is_dead() {
            true => Some(false),
            false => (!out.key_waits).then_some(true),
        }
    }

    /// It carries nothing any more, in neither direction: its queue pairs end, and what they had to
    /// send is flushed.
    pub(crate) fn give_up(&self) {
        self.dead.store(true, Relaxed);
        for lane in &self.lanes {
            // One that cannot be ended has ended with its NIC.
            let _ = lane.qp.fail();
        }
    }

    /// Whether its NIC has failed it.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Relaxed)
    }

    pub(crate) fn arm(&self) {
        for lane in &self.lanes {
            lane.send_cq.notify();
            lane.recv_cq.notify();
        }
    }
}

fn sge(packet: &Packet) -> Sge {
    Sge { addr: packet.local.addr, length: packet.bytes, lkey: packet.local.lkey }
}

/// Packets of one generation, and its root key.
struct Batch<'a> {
    packets: &'a [Packet],
    sges: Vec<Sge>,
    rkey: u32,
}

impl SendBatch for Batch<'_> {
    fn count(&self) -> usize {
        self.packets.len()
    }

    fn wr(&self, index: usize) -> SendWr<'_> {
        let packet = &self.packets[index];
        let last = index + 1 == self.packets.len();
        SendWr {
            wr_id: 0,
            opcode: SendOpcode::WriteImm,
            flags: if last { SendFlags::SIGNALED } else { SendFlags(0) },
            imm_data: packet.imm.to_be(),
            remote_addr: packet.remote,
            rkey: packet.rkey.unwrap_or(self.rkey),
            sges: if packet.bytes == 0 { &[] } else { &self.sges[index..=index] },
            ..SendWr::default()
        }
    }
}
