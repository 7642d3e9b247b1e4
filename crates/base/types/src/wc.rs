//! Work completions.

/// Status of a completion (`enum ibv_wc_status`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u32)]
#[allow(missing_docs)] // the names are the specification's
pub enum WcStatus {
    Success = 0,
    LocLenErr = 1,
    LocQpOpErr = 2,
    LocEecOpErr = 3,
    LocProtErr = 4,
    WrFlushErr = 5,
    MwBindErr = 6,
    BadRespErr = 7,
    LocAccessErr = 8,
    RemInvReqErr = 9,
    RemAccessErr = 10,
    RemOpErr = 11,
    RetryExcErr = 12,
    RnrRetryExcErr = 13,
    LocRddViolErr = 14,
    RemInvRdReqErr = 15,
    RemAbortErr = 16,
    InvEecnErr = 17,
    InvEecStateErr = 18,
    FatalErr = 19,
    RespTimeoutErr = 20,
    GeneralErr = 21,
}

impl WcStatus {
    /// Whether the status speaks of the network or the NIC rather than of a mistake of the
    /// application: what a switch may absorb.
    pub const fn is_network(self) -> bool {
        matches!(
            self,
            WcStatus::RetryExcErr
                | WcStatus::RemAbortErr
                | WcStatus::FatalErr
                | WcStatus::RespTimeoutErr
        )
    }
}

/// What completed (`enum ibv_wc_opcode`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u32)]
#[allow(missing_docs)] // the names are the specification's
pub enum WcOpcode {
    Send = 0,
    RdmaWrite = 1,
    RdmaRead = 2,
    CompSwap = 3,
    FetchAdd = 4,
    BindMw = 5,
    LocalInv = 6,
    Recv = 128,
    RecvRdmaWithImm = 129,
}

/// Flags of a completion (`enum ibv_wc_flags`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WcFlags(pub u32);

impl WcFlags {
    /// The receive buffer begins with a GRH (UD).
    pub const GRH: u32 = 1;
    /// `imm_data` is valid.
    pub const WITH_IMM: u32 = 1 << 1;
    /// `imm_data` is the key that the peer invalidated, in the host's order.
    pub const WITH_INV: u32 = 1 << 3;
}

/// A work completion; the layout of `struct ibv_wc`. Status and opcode are numbers, since the value
/// crosses the C boundary.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Wc {
    /// The application's id of the WR.
    pub wr_id: u64,
    /// A [`WcStatus`].
    pub status: u32,
    /// A [`WcOpcode`]; undefined where `status` is an error.
    pub opcode: u32,
    /// More about an error; ours is 0.
    pub vendor_err: u32,
    /// Bytes received or read.
    pub byte_len: u32,
    /// Immediate data as it came, in network order; or the key that was invalidated.
    pub imm_data: u32,
    /// The (logical) QP that the WR was posted to.
    pub qp_num: u32,
    /// UD: the sender's QPN.
    pub src_qp: u32,
    /// [`WcFlags`].
    pub wc_flags: u32,
    /// P_Key index.
    pub pkey_index: u16,
    /// UD: the sender's LID.
    pub slid: u16,
    /// Service level.
    pub sl: u8,
    /// Path bits of the destination LID.
    pub dlid_path_bits: u8,
}

const _: () = assert!(core::mem::size_of::<Wc>() == 48);
