//! Connections by IP address (annex A11): the service id is made of a port, and the request has the
//! addresses in front of the program's private data.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes of the header.
pub const IP_HEADER_BYTES: usize = 36;

/// Which kind of ports a number is of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(u16)]
pub enum PortSpace {
    /// Multicast groups of IPoIB, and its datagrams.
    Ipoib = 0x0002,
    /// Connections.
    Tcp = 0x0106,
    /// Datagrams.
    Udp = 0x0111,
    /// Service ids that programs choose freely.
    Ib = 0x013f,
}

impl PortSpace {
    /// The space of a number of the C API.
    pub const fn from_code(code: u16) -> Option<PortSpace> {
        Some(match code {
            0x0002 => PortSpace::Ipoib,
            0x0106 => PortSpace::Tcp,
            0x0111 => PortSpace::Udp,
            0x013f => PortSpace::Ib,
            _ => return None,
        })
    }

    /// The space and the port of a service id, where it is of this kind.
    pub const fn of_service(id: u64) -> Option<(PortSpace, u16)> {
        match PortSpace::from_code((id >> 16) as u16) {
            Some(space) if id >> 32 == 0 => Some((space, id as u16)),
            _ => None,
        }
    }
}

/// The service id of a port.
pub const fn service_id(space: PortSpace, port: u16) -> u64 {
    (space as u64) << 16 | port as u64
}

/// Who connects to whom, in a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpHeader {
    /// The port that the connection comes from.
    pub port: u16,
    /// The address that it comes from.
    pub source: IpAddr,
    /// The address that it is for.
    pub destination: IpAddr,
}

impl IpHeader {
    /// Reads the header at the beginning of private data; `None` where there is none that makes
    /// sense.
    pub fn parse(private: &[u8]) -> Option<IpHeader> {
        let bytes: &[u8; IP_HEADER_BYTES] = private.first_chunk()?;
        let address = |at: usize| -> Option<IpAddr> {
            let all: [u8; 16] = bytes[at..at + 16].try_into().ok()?;
            match bytes[1] >> 4 {
                4 => Some(IpAddr::V4(Ipv4Addr::new(all[12], all[13], all[14], all[15]))),
                6 => Some(IpAddr::V6(Ipv6Addr::from(all))),
                _ => None,
            }
        };
        // The upper half of the first byte is the major version.
        if bytes[0] >> 4 != 0 {
            return None;
        }
        let port = u16::from_be_bytes([bytes[2], bytes[3]]);
        Some(IpHeader { port, source: address(4)?, destination: address(20)? })
    }

    /// The header as it goes in front of private data. Addresses of two families are both written
    /// as IPv6.
    pub fn encode(&self) -> [u8; IP_HEADER_BYTES] {
        let mut out = [0; IP_HEADER_BYTES];
        out[2..4].copy_from_slice(&self.port.to_be_bytes());
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                out[1] = 4 << 4;
                out[16..20].copy_from_slice(&source.octets());
                out[32..36].copy_from_slice(&destination.octets());
            }
            (source, destination) => {
                out[1] = 6 << 4;
                out[4..20].copy_from_slice(&to_v6(source).octets());
                out[20..36].copy_from_slice(&to_v6(destination).octets());
            }
        }
        out
    }
}

fn to_v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}
