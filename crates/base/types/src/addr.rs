//! Addresses: GIDs, QPNs and PSNs.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The largest QPN: the field has 24 bits.
pub const MAX_QPN: u32 = 0x00ff_ffff;

/// PSNs have 24 bits and wrap.
pub const PSN_MASK: u32 = 0x00ff_ffff;

/// The upper half of the GUIDs of NICs and ports: a locally administered OUI. The lower half is the
/// port's IPv4 address.
const GUID_PREFIX: u64 = 0x0255_4e00_0000_0000;

/// The default subnet prefix of InfiniBand, `fe80::/64`.
const SUBNET_PREFIX: u64 = 0xfe80_0000_0000_0000;

/// The GUID of the port that has this address, host order.
pub const fn port_guid(ip: Ipv4Addr) -> u64 {
    GUID_PREFIX | ip.to_bits() as u64
}

/// A global identifier: for RoCEv2 an IPv6 address or an IPv4-mapped one (`::ffff:a.b.c.d`), in
/// network order. The only one of a port whose link layer is InfiniBand, and the second of a RoCE
/// port: the prefix `fe80::/64` and the port's GUID, which holds the address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The GID of an IP address (RoCEv2: IPv4 addresses are mapped).
    pub fn from_ip(ip: IpAddr) -> Gid {
        match ip {
            IpAddr::V4(v4) => Gid(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Gid(v6.octets()),
        }
    }

    /// The GID that is made of the GUID of the port with this address.
    pub fn link_local(ip: Ipv4Addr) -> Gid {
        Gid((u128::from(SUBNET_PREFIX) << 64 | u128::from(port_guid(ip))).to_be_bytes())
    }

    /// Whether the GID is made of a port's GUID.
    pub fn is_link_local(self) -> bool {
        let bits = u128::from_be_bytes(self.0);
        (bits >> 64) as u64 == SUBNET_PREFIX && bits as u64 & !u64::from(u32::MAX) == GUID_PREFIX
    }

    /// InfiniBand: the prefix of the subnet that a port with this GID is in.
    pub fn subnet_prefix(self) -> u64 {
        (u128::from_be_bytes(self.0) >> 64) as u64
    }

    /// The IP address behind the GID: IPv4 where the GID is mapped, or made of a port's GUID.
    pub fn to_ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        if self.is_link_local() {
            return IpAddr::V4(Ipv4Addr::from_bits(u128::from(v6) as u32));
        }
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }

    /// The IPv4 address behind the GID, if it is IPv4-mapped.
    pub fn to_ipv4(self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }
}

/// What the packets look like that are sent from a GID.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidType {
    /// InfiniBand.
    Infiniband,
    /// RoCE v1: an Ethernet frame around InfiniBand's headers, which no router takes.
    RoceV1,
    /// RoCE v2: over UDP.
    RoceV2,
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to_ip())
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to_ip())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gid_of_a_guid_leads_to_its_address() {
        let ip = Ipv4Addr::new(127, 77, 1, 3);
        let gid = Gid::link_local(ip);
        assert_eq!(Ipv6Addr::from(gid.0).to_string(), "fe80::255:4e00:7f4d:103");
        assert_eq!((gid.to_ip(), gid.to_ipv4()), (IpAddr::V4(ip), None));
        let real: Ipv6Addr = "fe80::255:4eff:fe4d:103".parse().unwrap();
        assert_eq!(Gid::from_ip(real.into()).to_ip(), IpAddr::V6(real), "made of a MAC address");
    }
}
