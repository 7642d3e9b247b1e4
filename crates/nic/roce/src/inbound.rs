//! How SENDs and WRITEs are received, the same on RC and UC: the message that the next packet
//! belongs to, and the receives that messages fill.
//!
//! A message is executed packet by packet; that a packet is the one whose turn it is, the owner
//! knows. Between packets only what message it is in is remembered ([`Inbound`]). A packet that is
//! refused has changed nothing but the bytes of its own message.

use crate::connection::Connection;
use crate::io::Memory;
use crate::rq::RecvQueue;
use unbroken_types::{Access, Completions, WcFlags, WcOpcode, MAX_MESSAGE_BYTES};
use unbroken_wire::{Ext, Op, Packet, Reth};

/// The message that the next packet belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Inbound {
    /// None: a new one must begin.
    None,
    /// A SEND of which `written` bytes lie in the oldest receive.
    Send { written: u32 },
    /// A WRITE of `total` bytes of which `left` are to come, for `va`.
    Write { va: u64, rkey: u32, left: u32, total: u32 },
}

/// Why a packet was not executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// There is no receive for it yet.
    NotReady,
    /// It makes no sense, or not here.
    Invalid,
    /// It names memory that the peer may not touch.
    Access,
    /// The message is longer than its receive.
    TooLong,
    /// The memory of the receive cannot be written.
    Local,
    /// The key that it names cannot be invalidated.
    NotInvalidated,
}

/// What receives the messages of one peer.
#[derive(Clone)]
pub(crate) struct Receiver {
    pub(crate) queue: RecvQueue,
    inbound: Inbound,
    /// The peer has invalidated a key.
    pub(crate) invalidated: bool,
}

impl Receiver {
    pub(crate) fn new(queue: RecvQueue) -> Receiver {
        Receiver { queue, inbound: Inbound::None, invalidated: false }
    }

    /// Forgets everything, for state RESET.
    pub(crate) fn reset(&mut self) {
        self.queue.clear();
        self.inbound = Inbound::None;
        self.invalidated = false;
    }

    /// Whether a message has begun, and not ended.
    #[inline]
    pub(crate) fn in_message(&self) -> bool {
        self.inbound != Inbound::None
    }

    /// Forgets the message that has begun, if any; its receive waits for the next.
    pub(crate) fn interrupt(&mut self) {
        self.inbound = Inbound::None;
    }

    /// Executes the packet whose turn it is, if it is one of a SEND or WRITE; says whether its
    /// message is complete.
    #[inline]
    pub(crate) fn execute(
        &mut self,
        packet: &Packet<'_>,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<bool, Refusal> {
        use Op::*;
        match packet.bth.opcode.op {
            WriteMiddle => self.write_on(packet, false, connection, mem, out),
            WriteLast | WriteLastImm => self.write_on(packet, true, connection, mem, out),
            op @ (WriteFirst | WriteOnly | WriteOnlyImm) => {
                self.begin_write(&packet.ext.reth().ok_or(Refusal::Invalid)?, connection, mem)?;
                let done = self.write_on(packet, op != WriteFirst, connection, mem, out);
                if done.is_err() {
                    self.interrupt(); // a repeat of the packet begins the message again
                }
                done
            }
            SendFirst => self.send_on(packet, true, false, connection, mem, out),
            SendMiddle => self.send_on(packet, false, false, connection, mem, out),
            SendLast | SendLastImm | SendLastInvalidate => {
                self.send_on(packet, false, true, connection, mem, out)
            }
            SendOnly | SendOnlyImm | SendOnlyInvalidate => {
                self.send_on(packet, true, true, connection, mem, out)
            }
            _ => Err(Refusal::Invalid),
        }
    }

    fn begin_write(
        &mut self,
        reth: &Reth,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
    ) -> Result<(), Refusal> {
        if self.in_message() || u64::from(reth.len) > MAX_MESSAGE_BYTES {
            return Err(Refusal::Invalid);
        }
        check_remote(reth, Access::REMOTE_WRITE, connection, mem)?;
        self.inbound =
            Inbound::Write { va: reth.va, rkey: reth.rkey, left: reth.len, total: reth.len };
        Ok(())
    }

    /// A packet of the WRITE that has begun.
    #[inline]
    fn write_on(
        &mut self,
        packet: &Packet<'_>,
        last: bool,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<bool, Refusal> {
        let Inbound::Write { va, rkey, left, total } = self.inbound else {
            return Err(Refusal::Invalid);
        };
        let len = packet.payload.len() as u32;
        let right_size = if last {
            len == left && len <= connection.mtu
        } else {
            len == connection.mtu && len < left
        };
        if !right_size {
            return Err(Refusal::Invalid);
        }
        let imm = packet.ext.imm();
        if last && imm.is_some() && !self.queue.has_receive() {
            return Err(Refusal::NotReady);
        }
        if len > 0 {
            mem.write(connection.pd, rkey, va, packet.payload, Access::REMOTE_WRITE)
                .map_err(|_| Refusal::Access)?;
        }
        if !last {
            self.inbound =
                Inbound::Write { va: va.wrapping_add(len.into()), rkey, left: left - len, total };
            return Ok(false);
        }
        self.inbound = Inbound::None;
        if imm.is_some() {
            if let Some(wc) = self.queue.complete(WcOpcode::RecvRdmaWithImm, total, imm) {
                out.recv(wc, packet.bth.solicited);
            }
        }
        Ok(true)
    }

    /// A packet of a SEND.
    fn send_on(
        &mut self,
        packet: &Packet<'_>,
        first: bool,
        last: bool,
        connection: &Connection,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<bool, Refusal> {
        let written = match self.inbound {
            Inbound::None if first => 0,
            Inbound::Send { written } if !first => written,
            _ => return Err(Refusal::Invalid),
        };
        let len = packet.payload.len() as u32;
        if len > connection.mtu
            || !last && len != connection.mtu
            || u64::from(written) + u64::from(len) > MAX_MESSAGE_BYTES
        {
            return Err(Refusal::Invalid);
        }
        self.queue.fill(mem, written, packet.payload)?;
        if !last {
            self.inbound = Inbound::Send { written: written + len };
            return Ok(false);
        }
        let mut inv = None;
        if let Ext::Ieth(key) = packet.ext {
            mem.invalidate(connection.pd, key).map_err(|_| Refusal::NotInvalidated)?;
            self.invalidated = true;
            inv = Some(key);
        }
        self.inbound = Inbound::None;
        if let Some(mut wc) = self.queue.complete(WcOpcode::Recv, written + len, packet.ext.imm()) {
            if let Some(key) = inv {
                (wc.imm_data, wc.wc_flags) = (key, WcFlags::WITH_INV);
            }
            out.recv(wc, packet.bth.solicited);
        }
        Ok(true)
    }
}

/// Checks that the peer may do what a RETH says. Of an empty range only the QP's right counts.
pub(crate) fn check_remote(
    reth: &Reth,
    need: Access,
    connection: &Connection,
    mem: &(impl Memory + ?Sized),
) -> Result<(), Refusal> {
    if !connection.access.contains(need) {
        return Err(Refusal::Access);
    }
    if reth.len > 0 {
        mem.check(connection.pd, reth.rkey, reth.va, reth.len.into(), need)
            .map_err(|_| Refusal::Access)?;
    }
    Ok(())
}
