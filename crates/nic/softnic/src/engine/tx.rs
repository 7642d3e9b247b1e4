//! Packets on their way out.
//!
//! A QP pushes packets one by one ([`QpSink`]). Each is written into a buffer behind the one
//! before: header, payload, ICRC. Consecutive packets of one QP with equal size are one GSO send;
//! the last may be shorter. The kernel numbers the segments of a send from 0, and the ICRC covers
//! that number, so a packet's place in its run is fixed when it is pushed.
//!
//! The payload is copied out of registered memory, though the kernel could gather it: it takes the
//! packets of a run in one go where they lie behind each other, but stumbles over each piece of a
//! list, which costs it up to three times as much as the copy does, whose bytes the ICRC has to
//! read anyway. It also means that the ICRC matches what leaves, whatever the application does to
//! its memory meanwhile ([`crate::copy`]).

mod sinks;

pub(crate) use sinks::{QpSink, UdQpSink};

use super::credit::Accounts;
use super::dest::Dest;
use super::gather::gather;
use super::impair::{flip_bit, Impair, Impairments, TxTag};
use super::sockets::port_of;
use crate::memory::{QpMemory, View};
use crate::plain::Plain;
use crate::socket::{self, Marks, Message, TxSocket, TX_MESSAGES};
use std::sync::Arc;
use unbroken_fabric::{NicPage, MAX_PORTS};
use unbroken_roce::{Payload, SinkError};
use unbroken_types::PdHandle;
use unbroken_verbs::aliases::AliasMap;
use unbroken_wire::{pad_of, Icrc, IcrcFlow, IcrcSeed, Op, BTH_BYTES, ICRC_BYTES};

/// Segments of one GSO send; kernels allow 64, newer ones 128.
const MAX_SEGMENTS: u32 = 64;
/// Bytes of one GSO send, below what an IP packet may carry.
const MAX_RUN_BYTES: usize = 65_000;
/// Bytes of a batch.
const BATCH_BYTES: usize = 256 * 1024;
/// Runs are numbered in a byte.
const _: () = assert!(TX_MESSAGES <= 256);

/// A run of packets for one destination.
struct Run {
    message: Message,
    socket: usize,
    segment: usize,
    /// Of the ICRC of the last packet.
    seed: IcrcSeed,
    packets: u32,
    payload_bytes: usize,
    /// Whether another packet may join.
    open: bool,
}

/// What left and what did not.
#[derive(Clone, Copy, Default)]
pub(crate) struct TxCount {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) payload_bytes: u64,
    pub(crate) drops: u64,
    pub(crate) retransmits: u64,
}

/// Packets that have been pushed and not sent.
pub(crate) struct TxBatch {
    buffer: Box<[u8]>,
    used: usize,
    runs: Vec<Run>,
    /// The device below cannot do GSO: send packets one by one.
    gso_broken: bool,
    /// Port by port.
    pub(crate) counts: [TxCount; MAX_PORTS as usize],
}

impl TxBatch {
    pub(crate) fn new() -> TxBatch {
        TxBatch {
            buffer: vec![0; BATCH_BYTES].into_boxed_slice(),
            used: 0,
            runs: Vec::with_capacity(TX_MESSAGES),
            gso_broken: false,
            counts: Default::default(),
        }
    }

    /// Sends everything. What the kernel does not take is dropped and counted, as a switch would
    /// drop it: the transport recovers.
    ///
    /// Runs of QPs that use different sockets may overtake each other: one system call takes all of
    /// a socket, such as the ACKs of many QPs.
    fn flush(&mut self, sockets: &[TxSocket]) {
        let first = self.runs.first().map_or(0, |r| r.socket);
        let one = self.runs.iter().all(|r| r.socket == first);
        for (at, socket) in sockets.iter().enumerate().filter(|(at, _)| !one || *at == first) {
            let mut order = [0; TX_MESSAGES];
            let mut count = 0;
            for (i, _) in self.runs.iter().enumerate().filter(|(_, r)| r.socket == at) {
                order[count] = i as u8;
                count += 1;
            }
            let mut rest = &order[..count];
            while !rest.is_empty() {
                rest = &rest[self.flush_socket(socket, rest)..];
            }
        }
        self.runs.clear();
        self.used = 0;
    }

    /// Sends the runs `which`, all of one socket; gives how many have been dealt with.
    fn flush_socket(&mut self, socket: &TxSocket, which: &[u8]) -> usize {
        let run = |i: &u8| &self.runs[usize::from(*i)];
        let first = run(&which[0]);
        let count = &mut self.counts[port_of(first.socket)];
        match socket::send(socket, which.iter().map(|i| &run(i).message), &self.buffer) {
            Ok(sent) => {
                for run in which[..sent].iter().map(run) {
                    count.packets += u64::from(run.packets);
                    count.bytes += run.message.bytes as u64;
                    count.payload_bytes += run.payload_bytes as u64;
                }
                sent.max(1)
            }
            Err(err) => {
                // The kernel refuses GSO on a device without checksum offload.
                self.gso_broken |= err.raw_os_error() == Some(libc::EIO) && first.packets > 1;
                // A full queue stays full for the rest; any other error is that of one destination.
                let lost =
                    if err.kind() == std::io::ErrorKind::WouldBlock { which.len() } else { 1 };
                count.drops += which[..lost].iter().map(|i| u64::from(run(i).packets)).sum::<u64>();
                lost
            }
        }
    }

    /// Forgets a packet that could not be written.
    #[cold]
    fn undo(&mut self) {
        // The seed of the run is that of the packet which is no more.
        self.close_run();
        if self.runs.last().is_some_and(|r| r.packets == 0) {
            self.runs.pop();
        }
    }

    /// Whether a packet of so many bytes fits.
    fn fits(&self, bytes: usize) -> bool {
        self.used + bytes <= BATCH_BYTES && self.runs.len() < TX_MESSAGES
    }

    /// Finds the run that a packet of `bytes` joins: the last one, or a new one.
    fn join_run(&mut self, dest: &Dest, socket: usize, bytes: usize) -> &mut Run {
        let joins =
            |r: &Run| r.open && bytes <= r.segment && r.message.bytes + bytes <= MAX_RUN_BYTES;
        if !self.runs.last().is_some_and(joins) {
            let (at, marks) = (self.used, dest.marks);
            let message = Message { to: dest.to, segment: 0, at, bytes: 0, marks };
            let (seed, open) = (IcrcSeed::new(&dest.flow, bytes), !self.gso_broken);
            self.runs.push(Run {
                message,
                socket,
                segment: bytes,
                seed,
                packets: 0,
                payload_bytes: 0,
                open,
            });
        }
        let run = self.runs.last_mut().expect("there is one now");
        if bytes != run.segment {
            run.seed = IcrcSeed::new(&dest.flow, bytes);
        }
        run
    }

    /// Ends the last run, so that the next packet begins another.
    fn close_run(&mut self) {
        if let Some(r) = self.runs.last_mut() {
            r.open = false;
        }
    }

    /// Writes a packet into the buffer. Its place in its run is the IP id that the kernel gives to
    /// the segment.
    fn write(
        &mut self,
        from: &Sender,
        mem: QpMemory<'_>,
        header: &[u8],
        payload: &Payload<'_>,
        bytes: usize,
    ) -> Result<(), SinkError> {
        let (bth, ext) =
            header.split_first_chunk::<BTH_BYTES>().expect("a header begins with a BTH");
        let at = self.used;
        let run = self.join_run(&from.dest, from.socket, bytes);
        let mut icrc = run.seed.begin(run.packets as u16, bth);
        let (to, icrc_to) = self.buffer[at..at + bytes].split_at_mut(bytes - ICRC_BYTES);
        // Apart, since a copy of known size reads the header as it was written, and does not wait
        // for the stores to retire.
        let (bth_to, rest) = to.split_at_mut(BTH_BYTES);
        bth_to.copy_from_slice(bth);
        if !ext.is_empty() {
            rest[..ext.len()].copy_from_slice(ext);
            icrc.update(ext);
        }
        let (payload_to, pad) = rest[ext.len()..].split_at_mut(payload.len());
        gather(mem, from.pd, payload, payload_to, &mut icrc)?;
        pad.fill(0);
        icrc.update(pad);
        icrc_to.copy_from_slice(&icrc.finish());
        Ok(())
    }
}

/// What suffers on the way out, port by port from 0.
pub(crate) struct TxLinks<'a> {
    pub(crate) impairments: &'a mut Impairments,
    /// Of the ports; they have the lines.
    pub(crate) pages: &'a [Arc<NicPage>],
    pub(crate) now_us: u64,
}

impl TxLinks<'_> {
    /// Until when QPs of a port must wait; 0 if they need not.
    fn blocked_until_us(&mut self, port: usize) -> u64 {
        let (now_us, line) = (self.now_us, &self.pages[port].lines()[0]);
        let until_us = self.impairments.tx(port).map_or(0, |i| i.blocked_until_us(now_us, line));
        if until_us > self.now_us {
            until_us
        } else {
            0
        }
    }

    /// Until when all QPs must wait, if they are of these ports; 0 if one need not.
    fn all_blocked_until_us(&mut self, ports: impl Iterator<Item = usize>) -> u64 {
        let mut first_us = None;
        for port in ports {
            match self.blocked_until_us(port) {
                0 => return 0,
                until_us => {
                    first_us =
                        Some(first_us.map_or(until_us, |first_us: u64| first_us.min(until_us)))
                }
            }
        }
        first_us.unwrap_or(0)
    }

    /// Whether the next packet is lost, if it need not wait for the line.
    fn loses(&mut self, port: usize) -> Result<bool, SinkError> {
        if self.blocked_until_us(port) > 0 {
            return Err(SinkError::Full);
        }
        Ok(self.impairments.tx(port).is_some_and(Impair::loses))
    }

    fn holds(&mut self, port: usize) -> bool {
        self.impairments.tx(port).is_some_and(|i| i.holds())
    }
}

/// How the links treat packets that leave.
pub(crate) enum LinkEffect<'a> {
    /// They take them.
    Open,
    /// They suffer, at one port or more.
    Impaired(TxLinks<'a>),
}

/// The way out of the NIC during a batch.
pub(crate) struct Out<'a> {
    pub(crate) batch: &'a mut TxBatch,
    pub(crate) sockets: &'a [TxSocket],
    pub(crate) view: &'a View<'a>,
    pub(crate) links: LinkEffect<'a>,
    pub(crate) accounts: &'a mut Accounts,
    pub(crate) now_us: u64,
    /// Ports that swallow all packets, bit 0 for port 1.
    pub(crate) shut: u8,
    /// Where UD QPs are that have moved; `None` while none has.
    pub(crate) aliases: Option<&'a AliasMap>,
    /// Of a plain NIC.
    pub(crate) plain: Option<&'a Plain>,
}

impl<'a> Out<'a> {
    /// An open way.
    pub(crate) fn open(
        batch: &'a mut TxBatch,
        sockets: &'a [TxSocket],
        view: &'a View<'a>,
        accounts: &'a mut Accounts,
        now_us: u64,
    ) -> Out<'a> {
        Out {
            batch,
            sockets,
            view,
            links: LinkEffect::Open,
            accounts,
            now_us,
            shut: 0,
            aliases: None,
            plain: None,
        }
    }

    /// Whether the line of a socket's port has a rate and is taken: QPs must wait.
    pub(super) fn is_taken(&mut self, socket: usize) -> bool {
        match &mut self.links {
            LinkEffect::Open => false,
            LinkEffect::Impaired(links) => links.blocked_until_us(port_of(socket)) > 0,
        }
    }

    /// Sends what has been pushed.
    pub(crate) fn flush(&mut self) {
        if !self.batch.runs.is_empty() {
            self.batch.flush(self.sockets);
        }
    }

    /// Ends the batch. Gives until when all QPs that have more must wait, which are of the ports
    /// `waiting`; 0 if one need not.
    pub(crate) fn finish(mut self, waiting: impl Iterator<Item = usize>) -> u64 {
        let mut blocked_until_us = 0;
        if let LinkEffect::Impaired(mut links) =
            std::mem::replace(&mut self.links, LinkEffect::Open)
        {
            blocked_until_us = links.all_blocked_until_us(waiting);
            self.release(links.impairments, links.now_us);
        }
        self.flush();
        blocked_until_us
    }

    /// Sends packets that were held and are due.
    pub(crate) fn release(&mut self, impairments: &mut Impairments, now_us: u64) {
        let mut last: Option<(IcrcFlow, Marks)> = None;
        let mut next =
            || (0..usize::from(MAX_PORTS)).find_map(|port| impairments.tx(port)?.pop(now_us));
        while let Some(held) = next() {
            let TxTag { dest, socket, header_bytes, control } = held.tag;
            if self.is_shut(socket) {
                self.batch.counts[port_of(socket)].drops += 1;
                continue;
            }
            if last != Some((dest.flow, dest.marks)) {
                self.batch.close_run();
                last = Some((dest.flow, dest.marks));
            }
            let (header, payload) = held.bytes.split_at(header_bytes);
            // Nothing is read from registered memory here, which alone could fail.
            let from = Sender { pd: PdHandle::NONE, qpn: 0, dest, socket, control };
            let _ = self.put(&from, header, &Payload::Bytes(payload), held.damage);
        }
        self.batch.close_run();
    }

    /// Whether the port of a socket swallows all packets.
    fn is_shut(&self, socket: usize) -> bool {
        self.shut >> port_of(socket) & 1 != 0
    }

    /// Holds a packet until it is due. Its payload is copied: its memory may change meanwhile.
    #[cold]
    fn hold(
        &mut self,
        from: &Sender,
        header: &[u8],
        payload: &Payload<'_>,
    ) -> Result<(), SinkError> {
        let port = port_of(from.socket);
        let LinkEffect::Impaired(TxLinks { impairments, pages, now_us }) = &mut self.links else {
            return Ok(());
        };
        let Some(impair) = impairments.tx(port) else { return Ok(()) };
        let mut bytes = vec![0; header.len() + payload.len()];
        bytes[..header.len()].copy_from_slice(header);
        // Its ICRC is computed when it leaves.
        gather(
            self.view.of_qp(from.qpn),
            from.pd,
            payload,
            &mut bytes[header.len()..],
            &mut Icrc::resume(0),
        )?;
        let wire_bytes = packet_bytes(header, payload);
        let tag = TxTag {
            dest: from.dest,
            socket: from.socket,
            header_bytes: header.len(),
            control: from.control,
        };
        let taken = impair.hold(*now_us, &pages[port].lines()[0], wire_bytes, bytes, tag);
        self.batch.counts[port].drops += u64::from(!taken);
        Ok(())
    }

    /// Appends a packet to the batch. With `damage`, one bit of it is flipped behind its ICRC's
    /// back.
    #[inline]
    fn put(
        &mut self,
        from: &Sender,
        header: &[u8],
        payload: &Payload<'_>,
        damage: Option<u64>,
    ) -> Result<(), SinkError> {
        let bytes = packet_bytes(header, payload);
        if !self.batch.fits(bytes) {
            self.flush();
        }
        let (batch, mem) = (&mut *self.batch, self.view.of_qp(from.qpn));
        let at = batch.used;
        if let Err(e) = batch.write(from, mem, header, payload, bytes) {
            batch.undo();
            return Err(e);
        }
        if let Some(choice) = damage {
            flip_bit(&mut batch.buffer[at..at + bytes], choice);
        }
        batch.used += bytes;
        let run = batch.runs.last_mut().expect("the run of this packet");
        run.packets += 1;
        if !from.control && header[0] != Op::Acknowledge as u8 {
            run.payload_bytes += payload.len();
        }
        run.open &= bytes == run.segment && run.packets < MAX_SEGMENTS;
        run.message.bytes += bytes;
        run.message.segment = if run.packets > 1 { run.segment as u16 } else { 0 };
        if run.message.bytes + run.segment > MAX_RUN_BYTES {
            // A full run leaves while its bytes are in the cache.
            self.flush();
        }
        Ok(())
    }
}

/// Bytes of a packet in a UDP datagram.
fn packet_bytes(header: &[u8], payload: &Payload<'_>) -> usize {
    header.len() + payload.len() + pad_of(payload.len()) as usize + ICRC_BYTES
}

/// From where a packet leaves, and to whom.
struct Sender {
    pd: PdHandle,
    qpn: u32,
    dest: Dest,
    socket: usize,
    /// It sends messages of failover itself.
    control: bool,
}
