//! Unreliable connected queue pairs, for programs that make their own reliability: always plain,
//! with completions of sends and receives in queues of their own.

use crate::{Cq, Pd, QpAddress, Result};
use std::fmt;
use std::sync::Arc;
use unbroken_shift::api;
use unbroken_types::{Access, Mtu, QpCaps, QpState, QpType};
use unbroken_verbs::{QpModify, RcModify, RecvWr, SendBatch};

/// How to make a UC queue pair.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UcOptions {
    /// Queue sizes.
    pub caps: QpCaps,
    /// What the peer may do: with [`UcOptions::new`], nothing but SEND.
    pub access: Access,
    /// Whether every send makes a completion; else those alone that ask for it.
    pub signal_all: bool,
    /// Whether the network loses what the receiver has no room or no receive for, as a real one
    /// does; both ends say so, or neither. The emulated network would make the sender wait.
    pub lossy: bool,
}

impl UcOptions {
    /// Queues of these sizes; the rest as the peer's SENDs need it.
    pub fn new(caps: QpCaps) -> UcOptions {
        UcOptions { caps, access: Access::LOCAL_WRITE, signal_all: false, lossy: false }
    }

    /// Sets what the peer may do.
    pub fn with_access(self, access: Access) -> UcOptions {
        UcOptions { access, ..self }
    }

    /// Sets whether every send makes a completion.
    pub fn with_signal_all(self, signal_all: bool) -> UcOptions {
        UcOptions { signal_all, ..self }
    }

    /// Sets whether the network loses what the receiver has no room or no receive for.
    pub fn with_lossy(self, lossy: bool) -> UcOptions {
        UcOptions { lossy, ..self }
    }
}

/// A UC queue pair.
pub struct UcQp {
    qp: Arc<api::Qp>,
    psn: u32,
    lossy: bool,
    pd: Pd,
}

impl Pd {
    /// Makes a UC queue pair.
    pub fn create_uc_qp(&self, send_cq: &Cq, recv_cq: &Cq, options: &UcOptions) -> Result<UcQp> {
        let qp = self.0.nic.context().create_qp(&api::QpRequest {
            qp_type: QpType::Uc,
            caps: options.caps,
            pd: self.0.handle,
            send_cq: send_cq.0.clone(),
            recv_cq: recv_cq.0.clone(),
            srq: None,
            sq_sig_all: options.signal_all,
            cookie: 0,
            plain: true,
            management: false,
        })?;
        let made = UcQp { psn: qp.draw_psn(), qp, lossy: options.lossy, pd: self.clone() };
        let rc = RcModify {
            state: Some(QpState::Init),
            access: Some(options.access),
            ..RcModify::default()
        };
        let lossy = Some(options.lossy);
        made.qp.modify(&QpModify { rc, port: Some(1), lossy, ..QpModify::default() })?;
        Ok(made)
    }
}

impl UcQp {
    /// What the peer needs to connect.
    pub fn address(&self) -> QpAddress {
        QpAddress { gid: self.qp.gid(), qpn: self.qp.qpn(), psn: self.psn }
    }

    /// Connects the queue pair: it takes what the peer sends, and sends. The peer does the same
    /// with the address of this one.
    pub fn connect(&self, peer: &QpAddress) -> Result<()> {
        let rtr = RcModify {
            state: Some(QpState::Rtr),
            dest_qpn: Some(peer.qpn),
            rq_psn: Some(peer.psn),
            mtu: Some(self.pd.0.nic.mtu()),
            ..RcModify::default()
        };
        let (lossy, path) = (Some(self.lossy), Some(self.pd.0.nic.path_to(peer.gid)));
        self.qp.modify(&QpModify { rc: rtr, path, lossy, ..QpModify::default() })?;
        let rts =
            RcModify { state: Some(QpState::Rts), sq_psn: Some(self.psn), ..RcModify::default() };
        self.qp.modify(&QpModify { rc: rts, ..QpModify::default() })
    }

    /// Ends the queue pair: what is outstanding is flushed, and nothing is taken from the peer any
    /// more.
    pub fn fail(&self) -> Result<()> {
        let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
        self.qp.modify(&QpModify { rc, ..QpModify::default() })
    }

    /// The state of the queue pair. It does not come back from ERR.
    pub fn state(&self) -> QpState {
        self.qp.state()
    }

    /// Posts several sends: all or none.
    pub fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        self.qp.post_sends(batch)
    }

    /// Posts a receive.
    pub fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        self.qp.post_recv(wr)
    }
}

impl fmt::Debug for UcQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UcQp")
            .field("address", &self.address().to_string())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl crate::Nic {
    /// The path MTU of port 1 of the NIC.
    pub fn mtu(&self) -> Mtu {
        self.context().port(1).map_or(Mtu::B1024, |port| port.active_mtu)
    }
}

impl Drop for UcQp {
    fn drop(&mut self) {
        // It fails only in a forked child, which has no QP.
        let _ = self.qp.destroy();
    }
}
