//! `RDMA_USER_CM_CMD_INIT_QP_ATTR`: what the program is to change its QP to.

use crate::abi::{Answer, Result};
use crate::ids::{Id, Route};

const STATE: u32 = 1;
const ACCESS_FLAGS: u32 = 1 << 3;
const PKEY_INDEX: u32 = 1 << 4;
const PORT: u32 = 1 << 5;
const QKEY: u32 = 1 << 6;
const AV: u32 = 1 << 7;
const PATH_MTU: u32 = 1 << 8;
const TIMEOUT: u32 = 1 << 9;
const RETRY_CNT: u32 = 1 << 10;
const RNR_RETRY: u32 = 1 << 11;
const RQ_PSN: u32 = 1 << 12;
const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
const MIN_RNR_TIMER: u32 = 1 << 15;
const SQ_PSN: u32 = 1 << 16;
const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
const DEST_QPN: u32 = 1 << 20;

const INIT: u32 = 1;
const RTR: u32 = 2;
const RTS: u32 = 3;

/// The peer may write, read and run atomics.
const REMOTE_ACCESS: u32 = 0b1110;
/// How many routers a packet may pass.
const HOP_LIMIT: u8 = 64;
/// The key of datagrams, where the program has named none (`RDMA_UDP_QKEY`).
pub(crate) const UDP_QKEY: u32 = 0x0123_4567;

/// `struct ib_uverbs_ah_attr` of a route.
pub(crate) fn address_vector(out: Answer, route: &Route, traffic_class: u8) -> Answer {
    let named = route.dgid != [0; 16];
    out.u8s(&route.dgid).u32(0).u8s(&[route.sgid_index, HOP_LIMIT, traffic_class, 0]).u16(0).u8s(&[
        0,
        0,
        0,
        named.into(),
        route.port,
        0,
    ])
}

/// The answer, `struct ib_uverbs_qp_attr`. EINVAL where the id is not that far.
pub(crate) fn attributes(id: &Id, state: u32) -> Result<Vec<u8>> {
    let route = id.route.as_ref().ok_or(libc::EINVAL)?;
    let agreed = &id.agreed;
    let connected = agreed.complete && !id.is_datagram();
    let mask = match state {
        INIT if id.is_datagram() => STATE | PKEY_INDEX | PORT | QKEY,
        INIT => STATE | PKEY_INDEX | PORT | ACCESS_FLAGS,
        RTR if id.is_datagram() => STATE,
        RTS if id.is_datagram() => STATE | SQ_PSN,
        RTR if connected => {
            STATE | AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER
        }
        RTS if connected => STATE | SQ_PSN | TIMEOUT | RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC,
        _ => return Err(libc::EINVAL),
    };
    let access = if connected { REMOTE_ACCESS } else { 0 };
    let out = Answer::default()
        .u32(mask)
        .u32(state)
        .u32(0)
        .u32(route.mtu.into())
        .u32(0)
        .u32(qkey(id))
        .u32(agreed.rq_psn)
        .u32(agreed.sq_psn)
        .u32(agreed.dest_qpn)
        .u32(access);
    let out = address_vector(out, route, id.traffic_class);
    // No alternate path, and sizes that the program knows: they are left at 0, as is the index of
    // the partition.
    let out = out.field(&[], 32 + 20 + 4 + 2);
    let out = out.u8s(&[agreed.initiator_depth, agreed.responder_resources, 0, route.port]);
    let out = out.u8s(&[agreed.timeout, agreed.retry_count, agreed.rnr_retry_count]);
    Ok(out.field(&[], 7).0)
}

/// The key of datagrams for the QP of this id.
pub(crate) fn qkey(id: &Id) -> u32 {
    match id.param.qkey {
        0 => UDP_QKEY,
        qkey => qkey,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_cm::PortSpace;

    fn id(space: PortSpace) -> Id {
        let mut id = Id::new(1, 1, space);
        let gid = [9; 16];
        id.route = Some(Route { nic: 0, port: 2, sgid_index: 3, sgid: gid, dgid: gid, mtu: 5 });
        id
    }

    #[test]
    fn attributes_lie_as_the_header_has_them() {
        let mut id = id(PortSpace::Tcp);
        assert_eq!(attributes(&id, RTR), Err(libc::EINVAL), "not connected");
        assert_eq!(attributes(&id, INIT).unwrap().len(), 144);
        id.agreed.complete = true;
        id.agreed.dest_qpn = 0x1234;
        (id.agreed.timeout, id.agreed.initiator_depth) = (14, 7);
        let bytes = attributes(&id, RTR).unwrap();
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((bytes.len(), word(4), word(12), word(32)), (144, RTR, 5, 0x1234));
        assert_eq!(bytes[40..56], [9; 16]);
        assert_eq!((bytes[60], bytes[61], bytes[69], bytes[70]), (3, HOP_LIMIT, 1, 2));
        assert_eq!((bytes[130], bytes[133], bytes[134]), (7, 2, 14));
        assert_eq!(attributes(&id, 4), Err(libc::EINVAL));
    }

    #[test]
    fn datagrams_need_no_peer() {
        let bytes = attributes(&id(PortSpace::Udp), INIT).unwrap();
        assert_eq!(u32::from_ne_bytes(bytes[20..24].try_into().unwrap()), UDP_QKEY);
    }
}
