//! Queue pairs.

use crate::{Cq, Path, Pd, Protection, QpAddress, Region, RemoteRegion, Result};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use unbroken_shift::api;
use unbroken_types::{Access, Gid, Mtu, PathAttr, QpCaps, QpState, QpType, SendFlags, SendOpcode};
use unbroken_verbs::{Error, QpModify, RcModify, RecvWr, SendBatch, SendWr};

/// How to make an RC queue pair: the defaults, and what is changed of them.
///
/// ```
/// let options = unbroken::QpOptions::default().with_plain(true).with_timeout(17);
/// assert_eq!(options.retry_cnt, 7);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct QpOptions {
    /// Queue sizes.
    pub caps: QpCaps,
    /// Whether the queue pair fails with its NIC, as on hardware, and its work is flushed with
    /// errors: for programs that reroute by themselves.
    pub plain: bool,
    /// What the peer may do.
    pub access: Access,
    /// Local ACK timeout (4.096 µs · 2^n). It decides nothing for a logical queue pair, whose path
    /// is asked long before.
    pub timeout: u8,
    /// Retries after a local ACK timeout. They decide nothing for a logical queue pair.
    pub retry_cnt: u8,
    /// Retries where the peer has no receive; 7: for ever.
    pub rnr_retry: u8,
    /// READs and atomics outstanding in each direction.
    pub max_rd_atomic: u8,
}

impl QpOptions {
    /// Sets the queue sizes.
    pub fn with_caps(self, caps: QpCaps) -> QpOptions {
        QpOptions { caps, ..self }
    }

    /// Sets whether the queue pair fails with its NIC.
    pub fn with_plain(self, plain: bool) -> QpOptions {
        QpOptions { plain, ..self }
    }

    /// Sets what the peer may do.
    pub fn with_access(self, access: Access) -> QpOptions {
        QpOptions { access, ..self }
    }

    /// Sets the local ACK timeout: 4.096 µs · 2^n.
    pub fn with_timeout(self, timeout: u8) -> QpOptions {
        QpOptions { timeout, ..self }
    }

    /// Sets the retries after a local ACK timeout.
    pub fn with_retry_cnt(self, retry_cnt: u8) -> QpOptions {
        QpOptions { retry_cnt, ..self }
    }

    /// Sets the retries where the peer has no receive; 7: for ever.
    pub fn with_rnr_retry(self, rnr_retry: u8) -> QpOptions {
        QpOptions { rnr_retry, ..self }
    }

    /// Sets how many READs and atomics are outstanding in each direction.
    pub fn with_max_rd_atomic(self, max_rd_atomic: u8) -> QpOptions {
        QpOptions { max_rd_atomic, ..self }
    }
}

impl Default for QpOptions {
    fn default() -> QpOptions {
        QpOptions {
            caps: QpCaps {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 64,
            },
            plain: false,
            access: Access::LOCAL_WRITE.with(Access::REMOTE),
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            max_rd_atomic: 16,
        }
    }
}

/// An RC queue pair.
pub struct Qp {
    qp: Arc<api::Qp>,
    psn: u32,
    options: QpOptions,
    pd: Pd,
}

impl Qp {
    pub(crate) fn new(pd: &Pd, cq: &Cq, options: &QpOptions) -> Result<Qp> {
        let qp = pd.0.nic.context().create_qp(&api::QpRequest {
            qp_type: QpType::Rc,
            caps: options.caps,
            pd: pd.0.handle,
            send_cq: cq.0.clone(),
            recv_cq: cq.0.clone(),
            srq: None,
            sq_sig_all: true,
            cookie: 0,
            plain: options.plain,
            management: false,
        })?;
        let psn = qp.draw_psn();
        let init = RcModify {
            state: Some(QpState::Init),
            access: Some(options.access),
            ..RcModify::default()
        };
        let made = Qp { qp, psn, options: options.clone(), pd: pd.clone() };
        made.qp.modify(&QpModify { rc: init, port: Some(1), ..QpModify::default() })?;
        Ok(made)
    }

    pub(crate) fn front(&self) -> &api::Qp {
        &self.qp
    }

    /// What the peer needs to connect.
    pub fn address(&self) -> QpAddress {
        QpAddress { gid: self.qp.gid(), qpn: self.qp.qpn(), psn: self.psn }
    }

    /// Connects the queue pair: it takes what the peer sends, and sends. The peer does the same
    /// with the address of this one.
    pub fn connect(&self, peer: &QpAddress) -> Result<()> {
        let nic = self.pd.0.nic.context();
        let mtu = nic.port(1).map_or(Mtu::B1024, |port| port.active_mtu);
        let path = self.pd.0.nic.path_to(peer.gid);
        let o = &self.options;
        let rtr = RcModify {
            state: Some(QpState::Rtr),
            dest_qpn: Some(peer.qpn),
            rq_psn: Some(peer.psn),
            mtu: Some(mtu),
            max_dest_rd_atomic: Some(o.max_rd_atomic),
            min_rnr_timer: Some(1),
            ..RcModify::default()
        };
        self.qp.modify(&QpModify { rc: rtr, path: Some(path), ..QpModify::default() })?;
        let rts = RcModify {
            state: Some(QpState::Rts),
            sq_psn: Some(self.psn),
            timeout: Some(o.timeout),
            retry_cnt: Some(o.retry_cnt),
            rnr_retry: Some(o.rnr_retry),
            max_rd_atomic: Some(o.max_rd_atomic),
            ..RcModify::default()
        };
        self.qp.modify(&QpModify { rc: rts, ..QpModify::default() })
    }

    /// The state of the queue pair.
    pub fn state(&self) -> QpState {
        self.qp.state()
    }

    /// Whether the queue pair goes on when its path fails; else why not.
    pub fn protection(&self) -> Protection {
        let status = self.qp.status();
        match (status.protected, status.pending) {
            (true, _) => Protection::Protected,
            (false, true) => Protection::Pending { reason: status.why },
            (false, false) => Protection::Unprotected { reason: status.why },
        }
    }

    /// The path that carries the queue pair; none while it is not connected, and where it is not
    /// logical.
    pub fn path(&self) -> Option<Path> {
        let (local, remote, epoch) = self.qp.path()?;
        Some(Path { local, remote, epoch })
    }

    /// Posts any WR.
    pub fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        self.qp.post_send(wr)
    }

    /// Posts several WRs: all or none.
    pub fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        self.qp.post_sends(batch)
    }

    /// Posts a receive into a part of a region.
    pub fn recv(&self, wr_id: u64, region: &Region, range: Range<usize>) -> Result<()> {
        self.qp.post_recv(&RecvWr { wr_id, sges: &[region.sge(range)?] })
    }

    /// SENDs a part of a region.
    pub fn send(&self, wr_id: u64, region: &Region, range: Range<usize>) -> Result<()> {
        self.rdma(SendOpcode::Send, wr_id, region, range, None)
    }

    /// WRITEs a part of a region to the peer's at an offset.
    pub fn write(
        &self,
        wr_id: u64,
        region: &Region,
        range: Range<usize>,
        to: (&RemoteRegion, u64),
    ) -> Result<()> {
        self.rdma(SendOpcode::Write, wr_id, region, range, Some(to))
    }

    /// READs the peer's memory at an offset into a part of a region.
    pub fn read(
        &self,
        wr_id: u64,
        region: &Region,
        range: Range<usize>,
        from: (&RemoteRegion, u64),
    ) -> Result<()> {
        self.rdma(SendOpcode::Read, wr_id, region, range, Some(from))
    }

    fn rdma(
        &self,
        opcode: SendOpcode,
        wr_id: u64,
        region: &Region,
        range: Range<usize>,
        remote: Option<(&RemoteRegion, u64)>,
    ) -> Result<()> {
        let len = range.len() as u64;
        let (remote_addr, rkey) = match remote {
            Some((there, at)) if at.checked_add(len).is_none_or(|end| end > there.len) => {
                return Err(Error::invalid(format!(
                    "{len} bytes at {at} of a remote region of {}",
                    there.len
                )))
            }
            Some((there, at)) => (there.addr + at, there.rkey),
            None => (0, 0),
        };
        self.qp.post_send(&SendWr {
            wr_id,
            opcode,
            flags: SendFlags::SIGNALED,
            remote_addr,
            rkey,
            sges: &[region.sge(range)?],
            ..SendWr::default()
        })
    }
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp")
            .field("address", &self.address().to_string())
            .field("state", &self.state())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // It fails only in a forked child, which has no QP.
        let _ = self.qp.destroy();
    }
}

impl crate::Nic {
    /// The path to a peer from the address of port 1 that QPs send from.
    pub(crate) fn path_to(&self, peer: Gid) -> PathAttr {
        let own = self.gid();
        // Where a port has its address as RoCE v1 and as v2, the latter comes behind.
        let index = self
            .context()
            .port(1)
            .ok()
            .and_then(|port| port.gids.iter().rposition(|entry| entry.gid == own));
        PathAttr { sgid_index: index.unwrap_or(0) as u8, ..PathAttr::new(peer) }
    }
}
