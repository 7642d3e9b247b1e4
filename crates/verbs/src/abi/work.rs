//! Work requests and completions.

use super::{ibv_ah, ibv_mw, ibv_mw_bind_info, Layout};
use core::ffi::{c_int, c_uint};
use core::mem::{offset_of, size_of};

pub use unbroken_types::{Sge as ibv_sge, Wc as ibv_wc};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_wr_rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_wr_atomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_wr_ud {
    pub ah: *mut ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_wr_part {
    pub rdma: ibv_wr_rdma,
    pub atomic: ibv_wr_atomic,
    pub ud: ibv_wr_ud,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_wr_bind_mw {
    pub mw: *mut ibv_mw,
    pub rkey: u32,
    pub bind_info: ibv_mw_bind_info,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: c_int,
    pub send_flags: c_uint,
    /// Network order.
    pub imm_data: u32,
    /// Which member counts follows from the opcode and the QP's type.
    pub wr: ibv_wr_part,
    /// XRC's remote SRQ number.
    pub qp_type: u32,
    /// The larger member of a union with TSO's header.
    pub bind_mw: ibv_wr_bind_mw,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

/// A table entry where the Rust names of type or fields differ from C's (unions, shared types).
macro_rules! layout {
    ($name:literal, $ty:ty { $($c:literal = $($field:ident).+),* $(,)? }) => {
        Layout { name: $name, size: size_of::<$ty>(), fields: &[$(($c, offset_of!($ty, $($field).+))),*] }
    };
}

pub(super) const LAYOUTS: &[Layout] = &[
    layout!("ibv_wc", ibv_wc {
        "wr_id" = wr_id, "status" = status, "opcode" = opcode, "vendor_err" = vendor_err, "byte_len" = byte_len,
        "imm_data" = imm_data, "qp_num" = qp_num, "src_qp" = src_qp, "wc_flags" = wc_flags, "pkey_index" = pkey_index,
        "slid" = slid, "sl" = sl, "dlid_path_bits" = dlid_path_bits,
    }),
    layout!("ibv_sge", ibv_sge { "addr" = addr, "length" = length, "lkey" = lkey }),
    layout!("ibv_send_wr", ibv_send_wr {
        "wr_id" = wr_id, "next" = next, "sg_list" = sg_list, "num_sge" = num_sge, "opcode" = opcode,
        "send_flags" = send_flags, "imm_data" = imm_data, "wr" = wr, "qp_type" = qp_type, "bind_mw" = bind_mw,
        "bind_mw.bind_info" = bind_mw.bind_info,
    }),
    layout!("ibv_recv_wr", ibv_recv_wr {
        "wr_id" = wr_id, "next" = next, "sg_list" = sg_list, "num_sge" = num_sge,
    }),
];
