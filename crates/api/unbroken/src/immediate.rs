//! Immediates, receives without memory, and ending a queue pair by hand: for programs that route
//! around failures by themselves.

use crate::{Nic, Qp, Region, RemoteRegion, Result};
use std::ops::Range;
use unbroken_types::{QpState, SendFlags, SendOpcode};
use unbroken_verbs::{Error, PortState, QpModify, RcModify, RecvWr, SendWr};

impl Qp {
    /// The number of the queue pair, which its completions carry.
    pub fn qpn(&self) -> u32 {
        self.address().qpn
    }

    /// Posts a receive without memory: for a WRITE with immediate.
    pub fn recv_notice(&self, wr_id: u64) -> Result<()> {
        self.front().post_recv(&RecvWr { wr_id, sges: &[] })
    }

    /// WRITEs a part of a region to the peer's at an offset; the peer has a receive completed with
    /// `imm`.
    pub fn write_imm(
        &self,
        wr_id: u64,
        region: &Region,
        range: Range<usize>,
        to: (&RemoteRegion, u64),
        imm: u32,
    ) -> Result<()> {
        let (there, at) = to;
        let len = range.len() as u64;
        if at.checked_add(len).is_none_or(|end| end > there.len) {
            return Err(Error::invalid(format!(
                "{len} bytes at {at} of a remote region of {}",
                there.len
            )));
        }
        let write = SendWr {
            remote_addr: there.addr + at,
            rkey: there.rkey,
            ..bare(wr_id, SendOpcode::WriteImm, imm)
        };
        self.post_send(&SendWr { sges: &[region.sge(range)?], ..write })
    }

    /// WRITEs no bytes; the peer has a receive completed with `imm`.
    pub fn notify(&self, wr_id: u64, imm: u32) -> Result<()> {
        self.post_send(&bare(wr_id, SendOpcode::WriteImm, imm))
    }

    /// A WRITE of no bytes, which the peer does not see: its completion shows that the path
    /// carries.
    pub fn probe(&self, wr_id: u64) -> Result<()> {
        self.post_send(&bare(wr_id, SendOpcode::Write, 0))
    }

    /// Ends the queue pair: all that was posted is flushed.
    pub fn fail(&self) -> Result<()> {
        let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
        self.front().modify(&QpModify { rc, ..QpModify::default() })
    }
}

fn bare(wr_id: u64, opcode: SendOpcode, imm: u32) -> SendWr<'static> {
    SendWr { wr_id, opcode, flags: SendFlags::SIGNALED, imm_data: imm.to_be(), ..SendWr::default() }
}

impl Nic {
    /// Whether port 1 of the NIC has a link now, as far as the NIC knows. A dead NIC has none.
    pub fn has_link(&self) -> bool {
        self.context().port(1).is_ok_and(|port| port.state == PortState::Active)
    }
}
