//! Addresses: GIDs, QPNs and PSNs.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The largest QPN: the field has 24 bits.
pub const MAX_QPN: u32 = 0x00ff_ffff;

/// PSNs have 24 bits and wrap.
pub const PSN_MASK: u32 = 0x00ff_ffff;

/// A global identifier: for RoCEv2 an IPv6 address or an IPv4-mapped one (`::ffff:a.b.c.d`), in network order.
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

    /// The IP address behind the GID; IPv4-mapped ones come back as IPv4.
    pub fn to_ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }

    /// The IPv4 address behind the GID, if it is IPv4-mapped.
    pub fn to_ipv4(self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }
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
