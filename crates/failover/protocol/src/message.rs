//! Control messages between the two ends of logical QPs, and their bytes.
//!
//! Each is self-contained, idempotent and small, so any of them may be lost, repeated or come late.
//! A datagram may hold several, one behind the other ([`Message::decode`] returns the rest).
//! Numbers are big-endian:
//!
//! ```text
//! 0  magic "UB"   2  version   3  kind   4  length of the whole message (u16)   6  zero (u16)
//! 8  from: GID (16), QPN (u32), incarnation (u64), connection (u32)   40  to: the same   72  body
//! Hello    epoch u64, slot u8, flags u8, mtu u8, local NIC u8, remote NIC u8, zero,
//!          set of keys u16, QPN u32, PSN u32, executed u64, of them receives u64,
//!          completed u64, of them receives u64; with flag 8: PSN u32
//! Probe, ProbeAck    sequence u32, sent_us u64
//! Refuse   reason u8, zero [7], epoch u64, refused incarnation u64
//! Bye      nothing
//! Moved    nothing
//! AskKey   NIC u8, zero [3], key u32
//! Keys     NIC u8, count u8, zero [2], key u32, then for each of count: NIC u8, zero, set of keys u16, key u32
//! Planned  what u8 (1 Propose, 2 Drained, 3 Cancel), zero [7], epoch u64
//! ```
//! A datagram ends with a code that only those can make who know the key of the directory
//! ([`crate::seal`]).
//!
//! A body may be longer than this version knows; the rest is ignored, so fields can be added.
//! Decoding never panics and takes only what is whole: the checks on single fields are made here,
//! those that need the state of the QP in [`crate::LogicalQp`].

pub use crate::keys::{KeyName, Keys, MAX_KEY_NICS};
use crate::slots::{slot_of, SlotPath};
use thiserror::Error;
use unbroken_types::{Gid, Messages, Mtu, NicKey, MAX_QPN, PSN_MASK};

/// The version of the format.
pub const VERSION: u8 = 4;
/// No message is longer.
pub const MAX_LEN: usize = 1024;
/// Bytes before the body.
const HEADER_LEN: usize = 72;
const MAGIC: [u8; 2] = *b"UB";

/// A logical QP in one life of its process. A QPN of 0 speaks of the process alone (probes).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// GID of its default NIC.
    pub gid: Gid,
    /// Its logical QPN.
    pub qpn: u32,
    /// A number drawn once by its process, so that a successor with the same address is told apart.
    pub incarnation: u64,
    /// Which connection of the QP: a number that changes when the QP is reset, so that a message of
    /// an earlier one is told apart.
    pub connection: u32,
}

/// A control message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Message {
    /// Who sends it.
    pub from: Endpoint,
    /// Whom it is for.
    pub to: Endpoint,
    /// What it says.
    pub body: Body,
}

/// The content of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Body {
    /// The sender has entered an epoch.
    Hello(Hello),
    /// Answer me over the same path.
    Probe(Probe),
    /// The answer to a probe.
    ProbeAck(Probe),
    /// The sender will not go on.
    Refuse(Refuse),
    /// A switch is planned to that epoch: how far the sender is.
    Planned(Planned, u64),
    /// By which keys is the region known on the sender's peer's NICs that has this key on that NIC?
    /// Speaks of the process alone.
    AskKey(KeyName),
    /// The answer to `AskKey`.
    Keys(Keys),
    /// The sender has closed the QP.
    Bye,
    /// UD QPs of the sender's process have moved: the directory says where to. Speaks of the
    /// process alone.
    Moved,
}

/// The sender has stopped all older lives of its physical QP and is in `epoch`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Hello {
    /// The epoch.
    pub epoch: u64,
    /// The path of the epoch, seen from the sender: a check that both ends have the same slot
    /// table.
    pub path: SlotPath,
    /// QPN of the sender's fresh physical QP.
    pub fresh_qpn: u32,
    /// First PSN that the sender will send in this epoch: drawn by chance, so that a stranger
    /// cannot know it.
    pub psn: u32,
    /// Path MTU of the sender's NIC.
    pub mtu: Mtu,
    /// Which set of keys the sender's NIC has; those of earlier sets are no longer good there. 0:
    /// keys are good on all NICs.
    pub key_set: u16,
    /// The sender has the receiver's Hello of this epoch, has found it safe to go on, and is ready
    /// to receive.
    pub heard: bool,
    /// The sender waits for a Hello with `heard`: it must be answered.
    pub waiting: bool,
    /// Messages that the sender has executed in all lives before this epoch.
    pub executed: Messages,
    /// Not only the receives among them were counted, in all these lives.
    pub exact: bool,
    /// Messages of the sender that completed in all lives before this epoch.
    pub completed: Messages,
    /// No request of the sender has ever had an answer, and the program has given it this PSN for
    /// the first: it asks whether the two ends fit.
    pub unproven_psn: Option<u32>,
}

/// A probe of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Probe {
    /// Number of the probe on its path.
    pub sequence: u32,
    /// When it was sent, by the sender's clock; comes back in the answer.
    pub sent_us: u64,
}

/// How far the sender is with a planned switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Planned {
    /// It holds what is posted, and waits for the rest to complete.
    Propose = 1,
    /// All its sends are complete.
    Drained = 2,
    /// It goes on where it is.
    Cancel = 3,
}

impl Planned {
    fn from_code(code: u8) -> Option<Planned> {
        [Planned::Propose, Planned::Drained, Planned::Cancel]
            .into_iter()
            .find(|kind| *kind as u8 == code)
    }
}

/// The sender will not go on, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Refuse {
    /// Why.
    pub reason: RefuseReason,
    /// The epoch of the message that is refused, or of the sender.
    pub epoch: u64,
    /// The incarnation that the refused message was sent to.
    pub refused: u64,
}

/// Why an end will not go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum RefuseReason {
    /// There is no such QP (yet, or any more).
    UnknownQp = 1,
    /// The QP of that name belongs to another incarnation.
    WrongIncarnation = 2,
    /// A request that must not be replayed is outstanding.
    UnsafeReplay = 3,
    /// Data that was acknowledged is missing.
    Inconsistent = 4,
    /// The message holds numbers that cannot be.
    Impossible = 5,
    /// The QP has failed.
    Failed = 6,
    /// The QP has been reset since: the message belongs to an earlier connection of it.
    WrongConnection = 7,
    /// The programs have connected the two ends so that no request could ever arrive: the QP
    /// expects another PSN, or belongs to another peer.
    Misfit = 8,
}

impl RefuseReason {
    /// What it means for whoever is refused: a sentence for logs.
    pub const fn describe(self) -> &'static str {
        match self {
            RefuseReason::UnknownQp => "the peer refused: it has no such QP",
            RefuseReason::WrongIncarnation => "the peer refused: its process is another one by now",
            RefuseReason::UnsafeReplay => {
                "the peer refused: an outstanding request of its own must not be replayed"
            }
            RefuseReason::Inconsistent => {
                "the peer refused: data that we had acknowledged is missing there"
            }
            RefuseReason::Impossible => {
                "the peer refused: our message holds numbers that cannot be"
            }
            RefuseReason::Failed => "the peer refused: its QP has failed",
            RefuseReason::WrongConnection => "the peer refused: its QP has been reset since",
            RefuseReason::Misfit => "the peer refused: it expects another PSN or peer",
        }
    }

    fn from_code(code: u8) -> Option<RefuseReason> {
        Some(match code {
            1 => RefuseReason::UnknownQp,
            2 => RefuseReason::WrongIncarnation,
            3 => RefuseReason::UnsafeReplay,
            4 => RefuseReason::Inconsistent,
            5 => RefuseReason::Impossible,
            6 => RefuseReason::Failed,
            7 => RefuseReason::WrongConnection,
            8 => RefuseReason::Misfit,
            _ => return None,
        })
    }
}

/// Why bytes are not a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum DecodeError {
    /// Fewer bytes than the header or the length field says.
    #[error("message of {have} bytes is truncated: {need} are needed")]
    Truncated {
        /// Bytes there.
        have: usize,
        /// Bytes needed.
        need: usize,
    },
    /// Not ours.
    #[error("not a control message: it begins with {0:#06x}, not 0x5542")]
    Magic(u16),
    /// Another version.
    #[error("version {0} of a control message is unknown; this is version {VERSION}")]
    Version(u8),
    /// The length field is out of range.
    #[error("length {0} of a control message is outside {HEADER_LEN} to {MAX_LEN}")]
    Length(usize),
    /// An unknown kind.
    #[error("kind {0} of a control message is unknown")]
    Kind(u8),
    /// A field holds what it cannot.
    #[error("field {field} of a control message holds {value}")]
    Field {
        /// Which.
        field: &'static str,
        /// What it holds.
        value: u64,
    },
}

/// Reads big-endian numbers; a read beyond the end yields zeros and is noticed by `need`, which is
/// checked first.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((head, rest)) => {
                self.0 = rest;
                *head
            }
            None => [0; N],
        }
    }
    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes())
    }
    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes())
    }
    fn endpoint(&mut self) -> Result<Endpoint, DecodeError> {
        let e = Endpoint {
            gid: Gid(self.bytes()),
            qpn: self.u32(),
            incarnation: self.u64(),
            connection: self.u32(),
        };
        if e.qpn > MAX_QPN {
            return Err(DecodeError::Field { field: "qpn", value: e.qpn.into() });
        }
        Ok(e)
    }
    /// A NIC, a small number, the set of the key, the key.
    fn key(&mut self) -> Result<(u8, u8, u16, u32), DecodeError> {
        self.need(KEY_LEN)?;
        let [nic, count, set_high, set_low] = self.bytes::<4>();
        Ok((nic, count, u16::from_be_bytes([set_high, set_low]), self.u32()))
    }
    fn need(&self, need: usize) -> Result<(), DecodeError> {
        let have = self.0.len();
        if have < need {
            return Err(DecodeError::Truncated {
                have: HEADER_LEN + have,
                need: HEADER_LEN + need,
            });
        }
        Ok(())
    }
}

fn put_endpoint(e: &Endpoint, out: &mut Vec<u8>) {
    out.extend_from_slice(&e.gid.0);
    out.extend_from_slice(&e.qpn.to_be_bytes());
    out.extend_from_slice(&e.incarnation.to_be_bytes());
    out.extend_from_slice(&e.connection.to_be_bytes());
}

fn put_key(key: NicKey, count: u8, out: &mut Vec<u8>) {
    let [set_high, set_low] = key.key_set.to_be_bytes();
    out.extend_from_slice(&[key.nic, count, set_high, set_low]);
    out.extend_from_slice(&key.rkey.to_be_bytes());
}

const HELLO_LEN: usize = 56;
const PSN_LEN: usize = 4;
const PROBE_LEN: usize = 12;
const REFUSE_LEN: usize = 24;
const PLANNED_LEN: usize = 16;
const KEY_LEN: usize = 8;

impl Hello {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.epoch.to_be_bytes());
        let unproven = self.unproven_psn.is_some();
        let flags = [self.heard, self.waiting, self.exact, unproven];
        let flags = (0..).zip(flags).fold(0, |all, (bit, flag)| all | u8::from(flag) << bit);
        out.extend_from_slice(&[
            slot_of(self.epoch),
            flags,
            self.mtu as u8,
            self.path.local,
            self.path.remote,
            0,
        ]);
        out.extend_from_slice(&self.key_set.to_be_bytes());
        out.extend_from_slice(&self.fresh_qpn.to_be_bytes());
        out.extend_from_slice(&self.psn.to_be_bytes());
        for n in
            [self.executed.all, self.executed.receives, self.completed.all, self.completed.receives]
        {
            out.extend_from_slice(&n.to_be_bytes());
        }
        self.unproven_psn.iter().for_each(|psn| out.extend_from_slice(&psn.to_be_bytes()));
    }

    fn decode(r: &mut Reader<'_>) -> Result<Hello, DecodeError> {
        r.need(HELLO_LEN)?;
        let epoch = r.u64();
        let [slot, flags, mtu, local, remote, _, set_high, set_low] = r.bytes::<8>();
        let (fresh_qpn, psn) = (r.u32(), r.u32());
        let executed = Messages { all: r.u64(), receives: r.u64() };
        let completed = Messages { all: r.u64(), receives: r.u64() };
        let bad = |field, value| Err(DecodeError::Field { field, value });
        if slot != slot_of(epoch) {
            return bad("slot", slot.into());
        }
        let Some(mtu) = Mtu::from_code(mtu.into()) else { return bad("mtu", mtu.into()) };
        if !(2..MAX_QPN).contains(&fresh_qpn) {
            return bad("fresh_qpn", fresh_qpn.into());
        }
        let unproven_psn = match flags & 8 {
            0 => None,
            _ => {
                r.need(PSN_LEN)?;
                Some(r.u32())
            }
        };
        if let Some(psn) = [Some(psn), unproven_psn].into_iter().flatten().find(|p| *p > PSN_MASK) {
            return bad("psn", psn.into());
        }
        for count in [executed, completed] {
            if count.receives > count.all {
                return bad("receives", count.receives);
            }
        }
        let (heard, waiting, exact) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
        let path = SlotPath { local, remote };
        let key_set = u16::from_be_bytes([set_high, set_low]);
        Ok(Hello {
            epoch,
            path,
            fresh_qpn,
            psn,
            mtu,
            key_set,
            heard,
            waiting,
            executed,
            exact,
            completed,
            unproven_psn,
        })
    }
}

impl Message {
    /// Appends the bytes of the message.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        let kind = match self.body {
            Body::Hello(_) => 1,
            Body::Probe(_) => 2,
            Body::ProbeAck(_) => 3,
            Body::Refuse(_) => 4,
            Body::Bye => 5,
            Body::Moved => 6,
            Body::Planned(..) => 7,
            Body::AskKey(_) => 8,
            Body::Keys(_) => 9,
        };
        out.extend_from_slice(&[MAGIC[0], MAGIC[1], VERSION, kind, 0, 0, 0, 0]);
        put_endpoint(&self.from, out);
        put_endpoint(&self.to, out);
        match &self.body {
            Body::Hello(hello) => hello.encode(out),
            Body::Probe(p) | Body::ProbeAck(p) => {
                out.extend_from_slice(&p.sequence.to_be_bytes());
                out.extend_from_slice(&p.sent_us.to_be_bytes());
            }
            Body::Refuse(r) => {
                out.extend_from_slice(&[r.reason as u8, 0, 0, 0, 0, 0, 0, 0]);
                out.extend_from_slice(&r.epoch.to_be_bytes());
                out.extend_from_slice(&r.refused.to_be_bytes());
            }
            Body::Planned(kind, epoch) => {
                out.extend_from_slice(&[*kind as u8, 0, 0, 0, 0, 0, 0, 0]);
                out.extend_from_slice(&epoch.to_be_bytes());
            }
            Body::AskKey(of) => put_key(NicKey { nic: of.nic, key_set: 0, rkey: of.rkey }, 0, out),
            Body::Keys(keys) => {
                let of = NicKey { nic: keys.of.nic, key_set: 0, rkey: keys.of.rkey };
                put_key(of, keys.on().len() as u8, out);
                keys.on().iter().for_each(|key| put_key(*key, 0, out));
            }
            Body::Bye | Body::Moved => {}
        }
        let len = (out.len() - start) as u16;
        out[start + 4..start + 6].copy_from_slice(&len.to_be_bytes());
    }

    /// Reads the message at the head of `bytes`, and returns it with the bytes behind it.
    pub fn decode(bytes: &[u8]) -> Result<(Message, &[u8]), DecodeError> {
        let have = bytes.len();
        let truncated = |need| DecodeError::Truncated { have, need };
        let (head, _) = bytes.split_first_chunk::<8>().ok_or(truncated(HEADER_LEN))?;
        if head[..2] != MAGIC {
            return Err(DecodeError::Magic(u16::from_be_bytes([head[0], head[1]])));
        }
        if head[2] != VERSION {
            return Err(DecodeError::Version(head[2]));
        }
        let len = usize::from(u16::from_be_bytes([head[4], head[5]]));
        if !(HEADER_LEN..=MAX_LEN).contains(&len) {
            return Err(DecodeError::Length(len));
        }
        let (whole, rest) = bytes.split_at_checked(len).ok_or(truncated(len))?;
        let mut r = Reader(&whole[8..]);
        let (from, to) = (r.endpoint()?, r.endpoint()?);
        let body = match head[3] {
            1 => Body::Hello(Hello::decode(&mut r)?),
            kind @ (2 | 3) => {
                r.need(PROBE_LEN)?;
                let probe = Probe { sequence: r.u32(), sent_us: r.u64() };
                if kind == 2 {
                    Body::Probe(probe)
                } else {
                    Body::ProbeAck(probe)
                }
            }
            4 => {
                r.need(REFUSE_LEN)?;
                let [code, ..] = r.bytes::<8>();
                let value = code.into();
                let reason = RefuseReason::from_code(code)
                    .ok_or(DecodeError::Field { field: "reason", value })?;
                Body::Refuse(Refuse { reason, epoch: r.u64(), refused: r.u64() })
            }
            5 => Body::Bye,
            6 => Body::Moved,
            7 => {
                r.need(PLANNED_LEN)?;
                let [code, ..] = r.bytes::<8>();
                let value = code.into();
                let kind =
                    Planned::from_code(code).ok_or(DecodeError::Field { field: "what", value })?;
                Body::Planned(kind, r.u64())
            }
            8 => {
                let (nic, _, _, rkey) = r.key()?;
                Body::AskKey(KeyName { nic, rkey })
            }
            9 => {
                let (nic, count, _, rkey) = r.key()?;
                if usize::from(count) > MAX_KEY_NICS {
                    return Err(DecodeError::Field { field: "count", value: count.into() });
                }
                let mut on = [NicKey::default(); MAX_KEY_NICS];
                for entry in &mut on[..usize::from(count)] {
                    let (nic, _, key_set, rkey) = r.key()?;
                    *entry = NicKey { nic, key_set, rkey };
                }
                Body::Keys(Keys::new(KeyName { nic, rkey }, &on[..usize::from(count)]))
            }
            kind => return Err(DecodeError::Kind(kind)),
        };
        Ok((Message { from, to, body }, rest))
    }

    /// The answer to a probe, to be sent back over the path that it came by. None for other
    /// messages.
    pub fn answer_probe(&self) -> Option<Message> {
        match self.body {
            Body::Probe(p) => {
                Some(Message { from: self.to, to: self.from, body: Body::ProbeAck(p) })
            }
            _ => None,
        }
    }

    /// The refusal of a Hello for a QP that the shell does not have (`UnknownQp`) or whose
    /// incarnation differs. None for other messages: a refusal is never refused. `incarnation` is
    /// the process's own.
    pub fn refusal(&self, incarnation: u64, reason: RefuseReason) -> Option<Message> {
        let Body::Hello(hello) = self.body else { return None };
        let from = Endpoint { incarnation, ..self.to };
        let refuse = Refuse { reason, epoch: hello.epoch, refused: self.to.incarnation };
        Some(Message { from, to: self.from, body: Body::Refuse(refuse) })
    }
}

#[cfg(test)]
mod tests;
