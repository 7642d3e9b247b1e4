//! What a NIC says of itself, whether or not it is open.

use crate::engine::MAX_QPS;
use crate::gids::{self, guid_of, lid_of};
use crate::limits::{MAX_INLINE, MAX_QP_WR, MAX_SGE, MAX_SRQS, MAX_SRQ_WR};
use crate::memory::{MAX_MRS, MAX_MR_BYTES, MAX_PDS};
use crate::plain;
use std::net::IpAddr;
use unbroken_fabric::{DeviceKind, SM_LID};
use unbroken_types::{LinkLayer, Mtu, MAX_MESSAGE_BYTES, MAX_RD_ATOMIC};
use unbroken_verbs::{Capabilities, DeviceAttr, PortAttr, PortState};

/// What a NIC can do beyond plain verbs.
pub(crate) fn capabilities(device: DeviceKind) -> Capabilities {
    match device {
        DeviceKind::Full => Capabilities {
            holds: true,
            shared_objects: true,
            indirect_keys: true,
            windows: true,
            frees_windows: false,
            slow_control: false,
        },
        // Windows are plain verbs, and an RNIC may have them.
        DeviceKind::Plain => Capabilities { windows: true, ..Capabilities::default() },
    }
}

/// Limits and identity of the NIC whose ports have these addresses.
pub(crate) fn device(ips: &[IpAddr], device: DeviceKind) -> DeviceAttr {
    let max_qp = match device {
        DeviceKind::Full => MAX_QPS,
        DeviceKind::Plain => plain::MAX_QPS,
    };
    DeviceAttr {
        fw_ver: env!("CARGO_PKG_VERSION").to_owned(),
        node_guid: guid_of(ips[0]),
        // The locally administered OUI that node GUIDs begin with, too.
        vendor_id: 0x02554e,
        vendor_part_id: 1,
        hw_ver: 1,
        max_mr_size: MAX_MR_BYTES,
        max_qp: max_qp as u32,
        max_qp_wr: MAX_QP_WR,
        max_sge: MAX_SGE,
        max_cq: 65_536,
        max_cqe: 1 << 22,
        max_mr: MAX_MRS,
        max_mw: MAX_MRS,
        max_pd: MAX_PDS,
        max_qp_rd_atom: u32::from(MAX_RD_ATOMIC),
        max_srq: MAX_SRQS,
        max_srq_wr: MAX_SRQ_WR,
        max_srq_sge: MAX_SGE,
        atomics: true,
        max_ah: 65_536,
        phys_port_cnt: ips.len() as u8,
        max_inline_data: MAX_INLINE,
    }
}

/// The port that has this address.
pub(crate) fn port(
    ip: IpAddr,
    mtu: Mtu,
    link_layer: LinkLayer,
    device: DeviceKind,
    usable: bool,
) -> PortAttr {
    PortAttr {
        state: if usable { PortState::Active } else { PortState::Down },
        max_mtu: Mtu::B4096,
        active_mtu: mtu,
        gids: gids::table(ip, link_layer, device),
        max_msg_sz: MAX_MESSAGE_BYTES as u32,
        link_layer,
        lid: lid_of(ip, link_layer),
        lmc: 0,
        sm_lid: if link_layer == LinkLayer::Infiniband { SM_LID } else { 0 },
    }
}
