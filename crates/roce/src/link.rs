//! What both halves of a QP share.

use unbroken_types::{Access, Wc, WcFlags, WcOpcode, WcStatus};
use unbroken_wire::{pad_of, Bth, Ext, HeaderBuf, Op, Opcode, Transport, DEFAULT_PKEY};

/// Attributes that requester and responder both look at.
#[derive(Clone, Copy)]
pub(crate) struct Link {
    pub(crate) wc_qpn: u32,
    pub(crate) dest_qpn: u32,
    pub(crate) pd: u32,
    /// Payload bytes of a full packet.
    pub(crate) mtu: u32,
    pub(crate) transport: Transport,
    pub(crate) access: Access,
    pub(crate) sq_sig_all: bool,
    /// The peer takes part in selective retransmission.
    pub(crate) selective: bool,
    /// State RTS: new WRs may be started.
    pub(crate) may_start: bool,
}

impl Link {
    /// The headers of a packet to the peer.
    #[inline(always)]
    pub(crate) fn header(&self, op: Op, psn: u32, ext: &Ext, payload_len: u32, flags: Flags) -> HeaderBuf {
        let bth = Bth {
            opcode: Opcode { transport: self.transport, op },
            solicited: flags.solicited,
            mig_req: false,
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
pub(crate) fn send_wc(qpn: u32, wr_id: u64, status: WcStatus, opcode: WcOpcode, byte_len: u32) -> Wc {
    Wc { wr_id, status: status as u32, opcode: opcode as u32, byte_len, qp_num: qpn, ..Wc::default() }
}

/// A WC of a receive on the QP of that number.
pub(crate) fn recv_wc(qpn: u32, wr_id: u64, status: WcStatus, opcode: WcOpcode, byte_len: u32, imm: Option<u32>) -> Wc {
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
