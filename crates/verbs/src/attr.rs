//! What a device and its ports can do.

use unbroken_types::{Gid, GidType, LinkLayer, Mtu};

/// Limits and identity of a device, as `ibv_query_device` tells them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAttr {
    /// Firmware version text, at most 63 bytes.
    pub fw_ver: String,
    /// Node GUID, host order.
    pub node_guid: u64,
    /// IEEE vendor id.
    pub vendor_id: u32,
    /// Vendor part id.
    pub vendor_part_id: u32,
    /// Hardware version.
    pub hw_ver: u32,
    /// Largest region in bytes.
    pub max_mr_size: u64,
    /// Number of QPs.
    pub max_qp: u32,
    /// Entries of a work queue.
    pub max_qp_wr: u32,
    /// Scatter/gather entries of a WR.
    pub max_sge: u32,
    /// Number of CQs.
    pub max_cq: u32,
    /// Entries of a CQ.
    pub max_cqe: u32,
    /// Number of regions.
    pub max_mr: u32,
    /// Number of memory windows.
    pub max_mw: u32,
    /// Number of protection domains.
    pub max_pd: u32,
    /// READs and atomics that a QP may have outstanding, either way.
    pub max_qp_rd_atom: u32,
    /// Number of shared receive queues.
    pub max_srq: u32,
    /// Entries of one.
    pub max_srq_wr: u32,
    /// Scatter/gather entries of a receive there.
    pub max_srq_sge: u32,
    /// Whether there are atomics (among the QPs of a host, IBV_ATOMIC_HCA).
    pub atomics: bool,
    /// Address handles.
    pub max_ah: u32,
    /// Ports.
    pub phys_port_cnt: u8,
    /// Bytes of inline data.
    pub max_inline_data: u32,
}

/// State of a port (`enum ibv_port_state`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum PortState {
    /// No carrier.
    Down = 1,
    /// In use.
    Active = 4,
}

/// An entry of a port's table of GIDs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GidEntry {
    /// The GID; on RoCE ports it is there once for each type.
    pub gid: Gid,
    /// What packets sent from it look like.
    pub kind: GidType,
}

/// A port, as `ibv_query_port` tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// Up or down.
    pub state: PortState,
    /// Largest MTU of the device.
    pub max_mtu: Mtu,
    /// MTU that the port's link carries.
    pub active_mtu: Mtu,
    /// The GIDs, index by index.
    pub gids: Vec<GidEntry>,
    /// Largest message in bytes.
    pub max_msg_sz: u32,
    /// What the port is attached to.
    pub link_layer: LinkLayer,
    /// InfiniBand: the port's LID; else 0.
    pub lid: u16,
    /// InfiniBand: the port has 2 to this power of LIDs, of which `lid` is the first.
    pub lmc: u8,
    /// InfiniBand: the LID of the subnet manager; else 0.
    pub sm_lid: u16,
}
