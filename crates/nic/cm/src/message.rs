//! The messages of the CM (InfiniBand Architecture Specification, volume 1, 12.6).
//!
//! Private data that are read have the whole length of the field: no message says how much of it is
//! the program's.

use crate::fields::Body;
use crate::reason::Reason;

/// A path, as a REQ describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Path {
    /// LID of the sender's port.
    pub local_lid: u16,
    /// LID of the receiver's port.
    pub remote_lid: u16,
    /// GID of the sender's port.
    pub local_gid: [u8; 16],
    /// GID of the receiver's port.
    pub remote_gid: [u8; 16],
    /// 20 bits.
    pub flow_label: u32,
    /// 6 bits: the code of a rate.
    pub rate: u8,
    /// The class of service that routers see.
    pub traffic_class: u8,
    /// How many routers a packet may pass.
    pub hop_limit: u8,
    /// 4 bits.
    pub sl: u8,
    /// Both ends are in one subnet.
    pub subnet_local: bool,
    /// 5 bits: how long to wait for an acknowledgement.
    pub ack_timeout: u8,
}

impl Path {
    fn parse(b: &Body, at: usize) -> Path {
        Path {
            local_lid: b.u16(at),
            remote_lid: b.u16(at + 2),
            local_gid: b.bytes(at + 4),
            remote_gid: b.bytes(at + 20),
            flow_label: b.u32(at + 36) >> 12,
            rate: b.u8(at + 39) & 0x3f,
            traffic_class: b.u8(at + 40),
            hop_limit: b.u8(at + 41),
            sl: b.bits(at + 42, 0, 4),
            subnet_local: b.bits(at + 42, 4, 1) != 0,
            ack_timeout: b.bits(at + 43, 0, 5),
        }
    }

    fn encode(&self, b: &mut Body, at: usize) {
        b.set_u16(at, self.local_lid);
        b.set_u16(at + 2, self.remote_lid);
        b.set(at + 4, &self.local_gid);
        b.set(at + 20, &self.remote_gid);
        b.set_u32(at + 36, self.flow_label << 12 | u32::from(self.rate & 0x3f));
        b.set(at + 40, &[self.traffic_class, self.hop_limit]);
        b.set_bits(at + 42, 0, 4, self.sl);
        b.set_bits(at + 42, 4, 1, self.subnet_local.into());
        b.set_bits(at + 43, 0, 5, self.ack_timeout);
    }
}

/// A request for a connection.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Req {
    /// The sender's name for the connection.
    pub local_id: u32,
    /// Of a vendor's connection establishment (ECE); 0: none.
    pub vendor_id: u32,
    /// What it is asked of.
    pub service_id: u64,
    /// The sender's channel adapter.
    pub local_guid: u64,
    /// The sender's Q_Key.
    pub local_qkey: u32,
    /// The sender's QP.
    pub local_qpn: u32,
    /// READs and atomics that the sender answers at a time.
    pub responder_resources: u8,
    /// READs and atomics that the sender has outstanding at a time.
    pub initiator_depth: u8,
    /// 5 bits: within this time the receiver has to answer.
    pub remote_response_timeout: u8,
    /// 2 bits: 0 is RC, 1 is UC.
    pub transport: u8,
    /// The sender's QP has end-to-end flow control.
    pub flow_control: bool,
    /// The PSN at which the receiver begins to send.
    pub starting_psn: u32,
    /// 5 bits: within this time the sender answers.
    pub local_response_timeout: u8,
    /// 3 bits.
    pub retry_count: u8,
    /// The partition.
    pub pkey: u16,
    /// 4 bits: the code of the path's MTU.
    pub mtu: u8,
    /// 3 bits.
    pub rnr_retry_count: u8,
    /// 4 bits: how often messages are sent again.
    pub max_cm_retries: u8,
    /// The sender's QP takes receives from a shared queue.
    pub srq: bool,
    /// The path that the connection is to use.
    pub path: Path,
    /// The path that it may migrate to; without GIDs there is none.
    pub alternate: Path,
    /// The program's, behind what else stands there: at most [`Req::PRIVATE_BYTES`].
    pub private: Vec<u8>,
}

/// A message receipt: the answer takes longer.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Mra {
    /// The sender's name for the connection.
    pub local_id: u32,
    /// The receiver's.
    pub remote_id: u32,
    /// Which message was received: 0 is a REQ, 1 a REP, 2 a LAP.
    pub received: u8,
    /// 5 bits: how long it takes.
    pub service_timeout: u8,
    /// The program's.
    pub private: Vec<u8>,
}

/// Which message a REJ rejects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Rejected {
    /// A request.
    #[default]
    Req = 0,
    /// A reply.
    Rep = 1,
    /// None of these.
    Other = 2,
}

/// A rejection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rej {
    /// The sender's name for the connection; 0 where it has none.
    pub local_id: u32,
    /// The receiver's.
    pub remote_id: u32,
    /// What is rejected.
    pub rejected: Rejected,
    /// Why.
    pub reason: Reason,
    /// What would be right, as the reason has it.
    pub information: Vec<u8>,
    /// The program's.
    pub private: Vec<u8>,
}

/// The answer to a REQ: it is accepted.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Rep {
    /// The sender's name for the connection.
    pub local_id: u32,
    /// The receiver's.
    pub remote_id: u32,
    /// The sender's Q_Key.
    pub local_qkey: u32,
    /// The sender's QP.
    pub local_qpn: u32,
    /// The PSN at which the receiver begins to send.
    pub starting_psn: u32,
    /// READs and atomics that the sender answers at a time.
    pub responder_resources: u8,
    /// READs and atomics that the sender has outstanding at a time.
    pub initiator_depth: u8,
    /// 5 bits: how long the sender's adapter takes for an acknowledgement.
    pub target_ack_delay: u8,
    /// 2 bits.
    pub failover_accepted: u8,
    /// The sender's QP has end-to-end flow control.
    pub flow_control: bool,
    /// 3 bits.
    pub rnr_retry_count: u8,
    /// The sender's QP takes receives from a shared queue.
    pub srq: bool,
    /// The sender's channel adapter.
    pub local_guid: u64,
    /// The program's.
    pub private: Vec<u8>,
}

/// The last message of the three: ready to use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Rtu {
    /// The sender's name for the connection.
    pub local_id: u32,
    /// The receiver's.
    pub remote_id: u32,
    /// The program's.
    pub private: Vec<u8>,
}

/// A DREQ: the sender ends the connection.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Disconnect {
    /// The sender's name for the connection.
    pub local_id: u32,
    /// The receiver's.
    pub remote_id: u32,
    /// The receiver's QP.
    pub remote_qpn: u32,
    /// The program's.
    pub private: Vec<u8>,
}

/// A request to load an alternate path. Only the names are read: none is loaded.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Lap {
    /// The sender's name for the connection.
    pub local_id: u32,
    /// The receiver's.
    pub remote_id: u32,
}

/// The answer to a LAP.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Apr {
    /// The sender's name for the connection.
    pub local_id: u32,
    /// The receiver's.
    pub remote_id: u32,
    /// 0: loaded; 2: not supported.
    pub status: u8,
}

/// A question for the QP of a service of datagrams.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SidrReq {
    /// The sender's name for the question.
    pub request_id: u32,
    /// The partition.
    pub pkey: u16,
    /// The service.
    pub service_id: u64,
    /// The program's, behind what else stands there.
    pub private: Vec<u8>,
}

/// What the answer to a [`SidrReq`] says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SidrStatus(pub u8);

impl SidrStatus {
    /// The QP is named.
    pub const VALID: SidrStatus = SidrStatus(0);
    /// Nobody listens for that service.
    pub const UNSUPPORTED: SidrStatus = SidrStatus(1);
    /// The program said so.
    pub const REJECTED: SidrStatus = SidrStatus(2);
    /// No QP is available.
    pub const NO_QP: SidrStatus = SidrStatus(3);
}

/// The answer to a [`SidrReq`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SidrRep {
    /// The name of the question.
    pub request_id: u32,
    /// What came of it.
    pub status: SidrStatus,
    /// The QP.
    pub qpn: u32,
    /// The service.
    pub service_id: u64,
    /// The key that datagrams must carry.
    pub qkey: u32,
    /// The program's.
    pub private: Vec<u8>,
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// A request for a connection.
    Req(Box<Req>),
    /// The answer takes longer.
    Mra(Mra),
    /// A rejection.
    Rej(Rej),
    /// The answer to a request.
    Rep(Box<Rep>),
    /// Ready to use.
    Rtu(Rtu),
    /// The connection ends.
    Dreq(Disconnect),
    /// The answer to that.
    Drep(Rtu),
    /// A question for a service of datagrams.
    SidrReq(SidrReq),
    /// The answer to that.
    SidrRep(SidrRep),
    /// A request to load an alternate path.
    Lap(Lap),
    /// The answer to that.
    Apr(Apr),
}

impl Req {
    /// Private data of a request.
    pub const PRIVATE_BYTES: usize = 92;
}
impl Rej {
    /// Private data of a rejection.
    pub const PRIVATE_BYTES: usize = 148;
    const INFORMATION_BYTES: usize = 72;
}
impl Rep {
    /// Private data of a reply.
    pub const PRIVATE_BYTES: usize = 196;
}
impl Rtu {
    /// Private data of an RTU or a DREP.
    pub const PRIVATE_BYTES: usize = 224;
}
impl Disconnect {
    /// Private data of a DREQ.
    pub const PRIVATE_BYTES: usize = 220;
}
impl SidrReq {
    /// Private data of the question.
    pub const PRIVATE_BYTES: usize = 216;
}
impl SidrRep {
    /// Private data of the answer.
    pub const PRIVATE_BYTES: usize = 136;
}

impl Message {
    pub(crate) fn attribute(&self) -> u16 {
        match self {
            Message::Req(_) => 0x10,
            Message::Mra(_) => 0x11,
            Message::Rej(_) => 0x12,
            Message::Rep(_) => 0x13,
            Message::Rtu(_) => 0x14,
            Message::Dreq(_) => 0x15,
            Message::Drep(_) => 0x16,
            Message::SidrReq(_) => 0x17,
            Message::SidrRep(_) => 0x18,
            Message::Lap(_) => 0x19,
            Message::Apr(_) => 0x1a,
        }
    }

    pub(crate) fn parse(attribute: u16, b: &Body) -> Option<Message> {
        let (local_id, remote_id) = (b.u32(0), b.u32(4));
        let ends = || Rtu { local_id, remote_id, private: b.private(8) };
        Some(match attribute {
            0x10 => Message::Req(Box::new(Req::parse(b))),
            0x11 => Message::Mra(Mra {
                local_id,
                remote_id,
                received: b.bits(8, 0, 2),
                service_timeout: b.bits(9, 0, 5),
                private: b.private(10),
            }),
            0x12 => Message::Rej(Rej::parse(b)),
            0x13 => Message::Rep(Box::new(Rep::parse(b))),
            0x14 => Message::Rtu(ends()),
            0x15 => Message::Dreq(Disconnect {
                local_id,
                remote_id,
                remote_qpn: b.u24(8),
                private: b.private(12),
            }),
            0x16 => Message::Drep(ends()),
            0x17 => Message::SidrReq(SidrReq {
                request_id: local_id,
                pkey: b.u16(4),
                service_id: b.u64(8),
                private: b.private(16),
            }),
            0x18 => Message::SidrRep(SidrRep {
                request_id: local_id,
                status: SidrStatus(b.u8(4)),
                qpn: b.u24(8),
                service_id: b.u64(12),
                qkey: b.u32(20),
                private: b.private(96),
            }),
            0x19 => Message::Lap(Lap { local_id, remote_id }),
            0x1a => Message::Apr(Apr { local_id, remote_id, status: b.u8(9) }),
            _ => return None,
        })
    }

    pub(crate) fn encode(&self) -> Body {
        let mut b = Body::empty();
        let names = |b: &mut Body, local: u32, remote: u32| {
            b.set_u32(0, local);
            b.set_u32(4, remote);
        };
        match self {
            Message::Req(m) => m.encode(&mut b),
            Message::Rej(m) => m.encode(&mut b),
            Message::Rep(m) => m.encode(&mut b),
            Message::Mra(m) => {
                names(&mut b, m.local_id, m.remote_id);
                b.set_bits(8, 0, 2, m.received);
                b.set_bits(9, 0, 5, m.service_timeout);
                b.set_private(10, &m.private);
            }
            Message::Rtu(m) | Message::Drep(m) => {
                names(&mut b, m.local_id, m.remote_id);
                b.set_private(8, &m.private);
            }
            Message::Dreq(m) => {
                names(&mut b, m.local_id, m.remote_id);
                b.set_u24(8, m.remote_qpn);
                b.set_private(12, &m.private);
            }
            Message::SidrReq(m) => {
                b.set_u32(0, m.request_id);
                b.set_u16(4, m.pkey);
                b.set_u64(8, m.service_id);
                b.set_private(16, &m.private);
            }
            Message::SidrRep(m) => {
                b.set_u32(0, m.request_id);
                b.set(4, &[m.status.0]);
                b.set_u24(8, m.qpn);
                b.set_u64(12, m.service_id);
                b.set_u32(20, m.qkey);
                b.set_private(96, &m.private);
            }
            Message::Lap(m) => names(&mut b, m.local_id, m.remote_id),
            Message::Apr(m) => {
                names(&mut b, m.local_id, m.remote_id);
                b.set(9, &[m.status]);
            }
        }
        b
    }
}

impl Req {
    fn parse(b: &Body) -> Req {
        Req {
            local_id: b.u32(0),
            vendor_id: b.u24(5),
            service_id: b.u64(8),
            local_guid: b.u64(16),
            local_qkey: b.u32(28),
            local_qpn: b.u24(32),
            responder_resources: b.u8(35),
            initiator_depth: b.u8(39),
            remote_response_timeout: b.bits(43, 0, 5),
            transport: b.bits(43, 5, 2),
            flow_control: b.bits(43, 7, 1) != 0,
            starting_psn: b.u24(44),
            local_response_timeout: b.bits(47, 0, 5),
            retry_count: b.bits(47, 5, 3),
            pkey: b.u16(48),
            mtu: b.bits(50, 0, 4),
            rnr_retry_count: b.bits(50, 5, 3),
            max_cm_retries: b.bits(51, 0, 4),
            srq: b.bits(51, 4, 1) != 0,
            path: Path::parse(b, 52),
            alternate: Path::parse(b, 96),
            private: b.private(140),
        }
    }

    fn encode(&self, b: &mut Body) {
        b.set_u32(0, self.local_id);
        b.set_u24(5, self.vendor_id);
        b.set_u64(8, self.service_id);
        b.set_u64(16, self.local_guid);
        b.set_u32(28, self.local_qkey);
        b.set_u24(32, self.local_qpn);
        b.set(35, &[self.responder_resources]);
        b.set(39, &[self.initiator_depth]);
        b.set_bits(43, 0, 5, self.remote_response_timeout);
        b.set_bits(43, 5, 2, self.transport);
        b.set_bits(43, 7, 1, self.flow_control.into());
        b.set_u24(44, self.starting_psn);
        b.set_bits(47, 0, 5, self.local_response_timeout);
        b.set_bits(47, 5, 3, self.retry_count);
        b.set_u16(48, self.pkey);
        b.set_bits(50, 0, 4, self.mtu);
        b.set_bits(50, 5, 3, self.rnr_retry_count);
        b.set_bits(51, 0, 4, self.max_cm_retries);
        b.set_bits(51, 4, 1, self.srq.into());
        self.path.encode(b, 52);
        self.alternate.encode(b, 96);
        b.set_private(140, &self.private);
    }
}

impl Rej {
    fn parse(b: &Body) -> Rej {
        let len = usize::from(b.bits(9, 0, 7)).min(Rej::INFORMATION_BYTES);
        Rej {
            local_id: b.u32(0),
            remote_id: b.u32(4),
            rejected: match b.bits(8, 0, 2) {
                0 => Rejected::Req,
                1 => Rejected::Rep,
                _ => Rejected::Other,
            },
            reason: Reason(b.u16(10)),
            information: b.0[12..12 + len].to_vec(),
            private: b.private(84),
        }
    }

    fn encode(&self, b: &mut Body) {
        let len = self.information.len().min(Rej::INFORMATION_BYTES);
        b.set_u32(0, self.local_id);
        b.set_u32(4, self.remote_id);
        b.set_bits(8, 0, 2, self.rejected as u8);
        b.set_bits(9, 0, 7, len as u8);
        b.set_u16(10, self.reason.0);
        b.set(12, &self.information[..len]);
        b.set_private(84, &self.private);
    }
}

impl Rep {
    fn parse(b: &Body) -> Rep {
        Rep {
            local_id: b.u32(0),
            remote_id: b.u32(4),
            local_qkey: b.u32(8),
            local_qpn: b.u24(12),
            starting_psn: b.u24(20),
            responder_resources: b.u8(24),
            initiator_depth: b.u8(25),
            target_ack_delay: b.bits(26, 0, 5),
            failover_accepted: b.bits(26, 5, 2),
            flow_control: b.bits(26, 7, 1) != 0,
            rnr_retry_count: b.bits(27, 0, 3),
            srq: b.bits(27, 3, 1) != 0,
            local_guid: b.u64(28),
            private: b.private(36),
        }
    }

    fn encode(&self, b: &mut Body) {
        b.set_u32(0, self.local_id);
        b.set_u32(4, self.remote_id);
        b.set_u32(8, self.local_qkey);
        b.set_u24(12, self.local_qpn);
        b.set_u24(20, self.starting_psn);
        b.set(24, &[self.responder_resources, self.initiator_depth]);
        b.set_bits(26, 0, 5, self.target_ack_delay);
        b.set_bits(26, 5, 2, self.failover_accepted);
        b.set_bits(26, 7, 1, self.flow_control.into());
        b.set_bits(27, 0, 3, self.rnr_retry_count);
        b.set_bits(27, 3, 1, self.srq.into());
        b.set_u64(28, self.local_guid);
        b.set_private(36, &self.private);
    }
}
