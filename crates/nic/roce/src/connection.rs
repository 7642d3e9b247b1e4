//! What both halves of a QP share: attributes, headers, and how WCs are made.

use unbroken_types::{Access, Mtu, PdHandle, RcModify, Wc, WcFlags, WcOpcode, WcStatus};
use unbroken_wire::{pad_of, Bth, Ext, HeaderBuf, Op, Opcode, Transport, DEFAULT_PKEY};

/// What the sending and the receiving half of an RC or UC QP both look at.
#[derive(Clone, Copy)]
pub(crate) struct Connection {
    pub(crate) dest_qpn: u32,
    pub(crate) pd: PdHandle,
    /// Payload bytes of a full packet.
    pub(crate) mtu: u32,
    pub(crate) transport: Transport,
    pub(crate) access: Access,
    /// The peer takes part in selective retransmission.
    pub(crate) selective: bool,
    /// State RTS: new WRs may be started.
    pub(crate) may_start: bool,
    /// The bit of the BTH that says "I have migrated": in all states of migration but REARM and
    /// ARMED.
    pub(crate) mig_req: bool,
}

impl Connection {
    /// That of a QP that is not connected.
    pub(crate) fn new(transport: Transport, pd: PdHandle) -> Connection {
        let (dest_qpn, mtu) = (0, Mtu::B256.bytes() as u32);
        Connection {
            dest_qpn,
            pd,
            mtu,
            transport,
            access: Access::NONE,
            selective: false,
            may_start: false,
            mig_req: true,
        }
    }

    /// Takes over what is said of the peer.
    pub(crate) fn set(&mut self, attrs: &RcModify) {
        self.dest_qpn = attrs.dest_qpn.unwrap_or(0);
        self.mtu = attrs.mtu.unwrap_or(Mtu::B256).bytes() as u32;
        self.access = attrs.access.unwrap_or(Access::NONE);
    }

    /// The headers of a packet to the peer.
    #[inline(always)]
    pub(crate) fn header(
        &self,
        op: Op,
        psn: u32,
        ext: &Ext,
        payload_len: u32,
        flags: Flags,
    ) -> HeaderBuf {
        let bth = Bth {
            opcode: Opcode { transport: self.transport, op },
            solicited: flags.solicited,
            mig_req: self.mig_req,
            pad: pad_of(payload_len as usize),
            pkey: DEFAULT_PKEY,
            dest_qpn: self.dest_qpn,
            ack_req: flags.ack_req,
            psn,
        };
        HeaderBuf::new(&bth, ext)
    }
}

/// A WC of a send on the QP of that number.
pub(crate) fn send_wc(
    qpn: u32,
    wr_id: u64,
    status: WcStatus,
    opcode: WcOpcode,
    byte_len: u32,
) -> Wc {
    Wc {
        wr_id,
        status: status as u32,
        opcode: opcode as u32,
        byte_len,
        qp_num: qpn,
        ..Wc::default()
    }
}

/// A WC of a receive on the QP of that number.
pub(crate) fn recv_wc(
    qpn: u32,
    wr_id: u64,
    status: WcStatus,
    opcode: WcOpcode,
    byte_len: u32,
    imm: Option<u32>,
) -> Wc {
    Wc {
        imm_data: imm.unwrap_or(0),
        wc_flags: if imm.is_some() { WcFlags::WITH_IMM } else { 0 },
        ..send_wc(qpn, wr_id, status, opcode, byte_len)
    }
}

/// Bits of a BTH.
#[derive(Clone, Copy, Default)]
pub(crate) struct Flags {
    pub(crate) solicited: bool,
    pub(crate) ack_req: bool,
}
