//! The way of control messages: a UC queue pair on each NIC, lossy like the data's. What is said is
//! said over all of them, since one may be dead; what comes twice changes nothing.

use crate::memory::Memory;
use crate::Result;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Mutex;
use unbroken::{
    Cq, Events, Nic, Pd, QpAddress, QpCaps, RecvWr, SendFlags, SendOpcode, SendWr, Sge, UcOptions,
    UcQp, Wc, WcStatus,
};
use unbroken_sdr_protocol::control::{Control, Heard, MAX_BYTES};

/// Messages that may wait to be taken, and to be sent.
const DEPTH: usize = 256;
/// NICs that cannot wake the worker are looked at so often.
const LOOK_US: u64 = 10_000;

/// One NIC's.
struct ControlQp {
    qp: UcQp,
    send_cq: Cq,
    recv_cq: Cq,
    out: Memory,
    into: Memory,
    /// The NIC, as its memory counts.
    rail: usize,
    /// It cannot wake the worker: its NIC has channels of events of its own.
    silent: bool,
    /// Sends that are outstanding, and the next slot.
    sending: Mutex<(usize, usize)>,
}

/// Control messages to and from one peer.
pub(crate) struct Wire {
    endpoints: Vec<ControlQp>,
    /// What the peer's messages must carry, and what it wants of ours.
    pub(crate) token: u64,
    pub(crate) strangers: AtomicU64,
    pub(crate) garbage: AtomicU64,
    pub(crate) sent: AtomicU64,
    pub(crate) heard: AtomicU64,
}

impl Wire {
    pub(crate) fn new(
        rails: &[(Nic, Pd)],
        events: &Events,
        token: u64,
        memory: impl Fn(usize) -> Result<Memory>,
    ) -> Result<Wire> {
        let depth = DEPTH as u32;
        let caps = QpCaps {
            max_send_wr: depth,
            max_recv_wr: depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let options = UcOptions::new(caps).with_signal_all(true).with_lossy(true);
        let endpoint = |(rail, (nic, pd)): (usize, &(Nic, Pd))| {
            let silent = rail > 0 && !nic.capabilities().shared_objects;
            let send_cq = nic.create_cq(depth)?;
            let recv_cq =
                if silent { nic.create_cq(depth) } else { nic.create_cq_on(depth, events) }?;
            let qp = pd.create_uc_qp(&send_cq, &recv_cq, &options)?;
            let (out, into) = (memory(DEPTH * MAX_BYTES)?, memory(DEPTH * MAX_BYTES)?);
            Ok(ControlQp {
                qp,
                send_cq,
                recv_cq,
                out,
                into,
                rail,
                silent,
                sending: Mutex::default(),
            })
        };
        Ok(Wire {
            endpoints: rails.iter().enumerate().map(endpoint).collect::<Result<_>>()?,
            token,
            strangers: AtomicU64::new(0),
            garbage: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            heard: AtomicU64::new(0),
        })
    }

    pub(crate) fn addresses(&self) -> Vec<QpAddress> {
        self.endpoints.iter().map(|e| e.qp.address()).collect()
    }

    pub(crate) fn connect(&self, peer: &[QpAddress]) -> Result<()> {
        for (endpoint, peer) in self.endpoints.iter().zip(peer.iter().cycle()) {
            (0..DEPTH).try_for_each(|slot| endpoint.post_recv(slot))?;
            endpoint.qp.connect(peer)?;
        }
        Ok(())
    }

    /// Says something to the peer, over every NIC that takes it. What is not taken is lost, as on
    /// the way.
    pub(crate) fn say(&self, message: &Control, peer_token: u64) {
        let bytes = message.encode(peer_token);
        self.sent.fetch_add(1, Relaxed);
        for endpoint in &self.endpoints {
            endpoint.send(&bytes);
        }
    }

    /// Takes what has come.
    pub(crate) fn hear(&self, drive: bool) -> Vec<Control> {
        let mut messages = Vec::new();
        for (i, endpoint) in self.endpoints.iter().enumerate() {
            endpoint.hear(drive && i > 0 || endpoint.silent, |bytes| {
                match Control::decode(bytes, self.token) {
                    Heard::Message(message) => messages.push(message),
                    Heard::Stranger => drop(self.strangers.fetch_add(1, Relaxed)),
                    Heard::Garbage => drop(self.garbage.fetch_add(1, Relaxed)),
                }
            });
        }
        self.heard.fetch_add(messages.len() as u64, Relaxed);
        messages
    }

    /// By when it is to be looked at again, where a NIC cannot wake the worker. What is said comes
    /// over every NIC, so this counts only when the first is dead.
    pub(crate) fn look_us(&self, now_us: u64) -> Option<u64> {
        self.endpoints.iter().any(|endpoint| endpoint.silent).then_some(now_us + LOOK_US)
    }

    pub(crate) fn arm(&self) {
        for endpoint in self.endpoints.iter().filter(|endpoint| !endpoint.silent) {
            endpoint.recv_cq.notify();
        }
    }
}

impl ControlQp {
    fn sge(&self, of: &Memory, slot: usize, bytes: usize) -> Sge {
        let addr = of.addr() + (slot * MAX_BYTES) as u64;
        Sge { addr, length: bytes as u32, lkey: of.lkey_on(self.rail).unwrap_or(0) }
    }

    fn post_recv(&self, slot: usize) -> Result<()> {
        Ok(self.qp.post_recv(&RecvWr {
            wr_id: slot as u64,
            sges: &[self.sge(&self.into, slot, MAX_BYTES)],
        })?)
    }

    fn send(&self, bytes: &[u8]) {
        let mut sending = crate::lock(&self.sending);
        let mut wcs = [Wc::default(); 32];
        while let Ok(n @ 1..) = self.send_cq.take_into(&mut wcs) {
            sending.0 -= n;
        }
        if sending.0 == DEPTH || self.out.write(sending.1 * MAX_BYTES, bytes).is_err() {
            return;
        }
        let wr = SendWr {
            wr_id: 0,
            opcode: SendOpcode::Send,
            flags: SendFlags::SIGNALED,
            sges: &[self.sge(&self.out, sending.1, bytes.len())],
            ..SendWr::default()
        };
        if self.qp.post_sends(&wr).is_ok() {
            *sending = (sending.0 + 1, (sending.1 + 1) % DEPTH);
        }
    }

    fn hear(&self, drive: bool, mut each: impl FnMut(&[u8])) {
        let mut wcs = [Wc::default(); 32];
        let n =
            if drive { self.recv_cq.poll_into(&mut wcs) } else { self.recv_cq.take_into(&mut wcs) };
        for wc in wcs[..n.unwrap_or(0)].iter().filter(|wc| wc.status == WcStatus::Success as u32) {
            let slot = wc.wr_id as usize;
            if let Ok(bytes) =
                self.into.read(slot * MAX_BYTES, (wc.byte_len as usize).min(MAX_BYTES))
            {
                each(&bytes);
            }
            // A queue pair that takes none has ended with its NIC.
            let _ = self.post_recv(slot);
        }
    }
}
