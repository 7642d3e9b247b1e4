//! The open device and its tables of verbs.

use super::{
    abi, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_device, ibv_device_attr_ex, ibv_mw_bind,
    ibv_port_attr, ibv_qp, ibv_qp_init_attr_ex, ibv_query_device_ex_input, ibv_recv_wr,
    ibv_send_wr, ibv_sge, ibv_srq, ibv_srq_init_attr_ex, ibv_wc,
};
use core::ffi::{c_int, c_uint, c_void};
use libc::{pthread_mutex_t, timespec};

/// A verb that this project does not have; its slot is always empty.
pub type Absent = Option<unsafe extern "C" fn()>;
/// `ibv_context_ops::poll_cq`.
pub type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
/// `ibv_context_ops::req_notify_cq`.
pub type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
/// `ibv_context_ops::post_send`.
pub type PostSend =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
/// `ibv_context_ops::post_recv`.
pub type PostRecv =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
/// `ibv_context_ops::post_srq_recv`.
pub type PostSrqRecv =
    unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
/// `ibv_context_ops::alloc_mw`.
pub type AllocMw = unsafe extern "C" fn(*mut ibv_pd, c_int) -> *mut ibv_mw;
/// `ibv_context_ops::bind_mw`.
pub type BindMw = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int;
/// `ibv_context_ops::dealloc_mw`.
pub type DeallocMw = unsafe extern "C" fn(*mut ibv_mw) -> c_int;
/// `verbs_context::alloc_null_mr`.
pub type AllocNullMr = unsafe extern "C" fn(*mut ibv_pd) -> *mut ibv_mr;
/// `verbs_context::advise_mr`: domain, advice, flags, list and its length.
pub type AdviseMr = unsafe extern "C" fn(*mut ibv_pd, c_int, u32, *mut ibv_sge, u32) -> c_int;
/// `verbs_context::query_port`; the last argument is the caller's size of `ibv_port_attr`.
pub type QueryPort = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int;
/// `verbs_context::query_device_ex`; the last argument is the caller's size of
/// `ibv_device_attr_ex`.
pub type QueryDeviceEx = unsafe extern "C" fn(
    *mut ibv_context,
    *const ibv_query_device_ex_input,
    *mut ibv_device_attr_ex,
    usize,
) -> c_int;
/// `verbs_context::create_cq_ex`.
pub type CreateCqEx =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;
/// `verbs_context::create_qp_ex`.
pub type CreateQpEx =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
/// `verbs_context::create_srq_ex`.
pub type CreateSrqEx =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq;
/// `verbs_context::query_rt_values`.
pub type QueryRtValues = unsafe extern "C" fn(*mut ibv_context, *mut ibv_values_ex) -> c_int;

/// `verbs_context::alloc_td`.
pub type AllocTd = unsafe extern "C" fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td;
/// `verbs_context::dealloc_td`.
pub type DeallocTd = unsafe extern "C" fn(*mut ibv_td) -> c_int;
/// `verbs_context::alloc_parent_domain`.
pub type AllocParentDomain =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd;
/// `verbs_context::alloc_dm`.
pub type AllocDm = unsafe extern "C" fn(*mut ibv_context, *mut ibv_alloc_dm_attr) -> *mut ibv_dm;
/// `verbs_context::free_dm`.
pub type FreeDm = unsafe extern "C" fn(*mut ibv_dm) -> c_int;
/// `verbs_context::reg_dm_mr`.
pub type RegDmMr =
    unsafe extern "C" fn(*mut ibv_pd, *mut ibv_dm, u64, usize, c_uint) -> *mut ibv_mr;

/// `enum ibv_parent_domain_init_attr_mask`.
pub const IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS: u32 = 1;
pub const IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT: u32 = 1 << 1;

/// `enum ibv_values_mask`.
pub const IBV_VALUES_MASK_RAW_CLOCK: u32 = 1;

abi! { LAYOUTS;
    pub struct ibv_pd {
        pub context: *mut ibv_context,
        pub handle: u32,
    }

    pub struct ibv_mr {
        pub context: *mut ibv_context,
        pub pd: *mut ibv_pd,
        pub addr: *mut c_void,
        pub length: usize,
        pub handle: u32,
        pub lkey: u32,
        pub rkey: u32,
    }

    pub struct ibv_mw {
        pub context: *mut ibv_context,
        pub pd: *mut ibv_pd,
        pub rkey: u32,
        pub handle: u32,
        pub r#type: c_int,
    }

    pub struct ibv_td {
        pub context: *mut ibv_context,
    }

    pub struct ibv_td_init_attr {
        pub comp_mask: u32,
    }

    pub struct ibv_parent_domain_init_attr {
        pub pd: *mut ibv_pd,
        pub td: *mut ibv_td,
        pub comp_mask: u32,
        pub alloc: Absent,
        pub free: Absent,
        pub pd_context: *mut c_void,
    }

    pub struct ibv_alloc_dm_attr {
        pub length: usize,
        pub log_align_req: u32,
        pub comp_mask: u32,
    }

    pub struct ibv_dm {
        pub context: *mut ibv_context,
        pub memcpy_to_dm: Option<unsafe extern "C" fn(*mut ibv_dm, u64, *const c_void, usize) -> c_int>,
        pub memcpy_from_dm: Option<unsafe extern "C" fn(*mut c_void, *mut ibv_dm, u64, usize) -> c_int>,
        pub comp_mask: u32,
        pub handle: u32,
    }

    pub struct ibv_values_ex {
        pub comp_mask: u32,
        pub raw_clock: timespec,
    }

    /// Only the verbs that applications call inline are in use; the others are reached through
    /// exported functions.
    pub struct ibv_context_ops {
        pub _compat_query_device: Absent,
        pub _compat_query_port: Absent,
        pub _compat_alloc_pd: Absent,
        pub _compat_dealloc_pd: Absent,
        pub _compat_reg_mr: Absent,
        pub _compat_rereg_mr: Absent,
        pub _compat_dereg_mr: Absent,
        pub alloc_mw: Option<AllocMw>,
        pub bind_mw: Option<BindMw>,
        pub dealloc_mw: Option<DeallocMw>,
        pub _compat_create_cq: Absent,
        pub poll_cq: Option<PollCq>,
        pub req_notify_cq: Option<ReqNotifyCq>,
        pub _compat_cq_event: Absent,
        pub _compat_resize_cq: Absent,
        pub _compat_destroy_cq: Absent,
        pub _compat_create_srq: Absent,
        pub _compat_modify_srq: Absent,
        pub _compat_query_srq: Absent,
        pub _compat_destroy_srq: Absent,
        pub post_srq_recv: Option<PostSrqRecv>,
        pub _compat_create_qp: Absent,
        pub _compat_query_qp: Absent,
        pub _compat_modify_qp: Absent,
        pub _compat_destroy_qp: Absent,
        pub post_send: Option<PostSend>,
        pub post_recv: Option<PostRecv>,
        pub _compat_create_ah: Absent,
        pub _compat_destroy_ah: Absent,
        pub _compat_attach_mcast: Absent,
        pub _compat_detach_mcast: Absent,
        pub _compat_async_event: Absent,
    }

    pub struct ibv_context {
        pub device: *mut ibv_device,
        pub ops: ibv_context_ops,
        pub cmd_fd: c_int,
        pub async_fd: c_int,
        pub num_comp_vectors: c_int,
        pub mutex: pthread_mutex_t,
        /// All ones: the context sits in a [`verbs_context`].
        pub abi_compat: *mut c_void,
    }

    pub struct verbs_context {
        pub query_port: Option<QueryPort>,
        pub advise_mr: Option<AdviseMr>,
        pub alloc_null_mr: Option<AllocNullMr>,
        pub read_counters: Absent,
        pub attach_counters_point_flow: Absent,
        pub create_counters: Absent,
        pub destroy_counters: Absent,
        pub reg_dm_mr: Option<RegDmMr>,
        pub alloc_dm: Option<AllocDm>,
        pub free_dm: Option<FreeDm>,
        pub modify_flow_action_esp: Absent,
        pub destroy_flow_action: Absent,
        pub create_flow_action_esp: Absent,
        pub modify_qp_rate_limit: Absent,
        pub alloc_parent_domain: Option<AllocParentDomain>,
        pub dealloc_td: Option<DeallocTd>,
        pub alloc_td: Option<AllocTd>,
        pub modify_cq: Absent,
        pub post_srq_ops: Absent,
        pub destroy_rwq_ind_table: Absent,
        pub create_rwq_ind_table: Absent,
        pub destroy_wq: Absent,
        pub modify_wq: Absent,
        pub create_wq: Absent,
        pub query_rt_values: Option<QueryRtValues>,
        pub create_cq_ex: Option<CreateCqEx>,
        /// libibverbs' own; empty in ours, so a libibverbs function that gets our context by
        /// mistake fails at once.
        pub r#priv: *mut c_void,
        pub query_device_ex: Option<QueryDeviceEx>,
        pub ibv_destroy_flow: Absent,
        pub ABI_placeholder2: Absent,
        pub ibv_create_flow: Absent,
        pub ABI_placeholder1: Absent,
        pub open_qp: Absent,
        pub create_qp_ex: Option<CreateQpEx>,
        pub get_srq_num: Absent,
        pub create_srq_ex: Option<CreateSrqEx>,
        pub open_xrcd: Absent,
        pub close_xrcd: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
        pub _ABI_placeholder3: u64,
        pub sz: usize,
        pub context: ibv_context,
    }
}
