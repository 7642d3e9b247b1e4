//! What stands before a datagram in the buffer of a receive.

use crate::{Gid, GRH_BYTES};
use core::net::Ipv4Addr;

/// Where an IPv4 header stands: RoCE v2 puts it at the end, and what is before it is undefined.
const IPV4_AT: usize = 20;
/// The first byte of an IPv4 header without options.
const IPV4_WITHOUT_OPTIONS: u8 = 0x45;

/// The routing header of a datagram: a GRH, an IPv6 header, or an IPv4 header behind 20 bytes of
/// anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grh {
    /// The sender.
    pub source: Gid,
    /// Whom it was sent to.
    pub destination: Gid,
    /// Traffic class, or TOS.
    pub traffic_class: u8,
    /// Flow label; 0 where there is none.
    pub flow_label: u32,
    /// Hop limit, or TTL.
    pub hop_limit: u8,
}

impl Grh {
    /// Reads the 40 bytes. None: they are of neither version.
    ///
    /// An address may have any byte at any place, also one that looks like the version of IPv4, and
    /// the bytes before an IPv4 header may look like IPv6. So the first nibble is asked first. Where
    /// that says IPv6, the bytes are IPv4 only if there is a header of 20 bytes whose checksum is
    /// right. libibverbs (`ibv_init_ah_from_wc`) decides in the same way.
    pub fn parse(bytes: &[u8; GRH_BYTES]) -> Option<Grh> {
        let (_, v4) = bytes.split_first_chunk::<IPV4_AT>()?;
        let v4: &[u8; GRH_BYTES - IPV4_AT] = v4.try_into().ok()?;
        match (bytes[0] >> 4, v4[0] >> 4) {
            (6, _) if v4[0] != IPV4_WITHOUT_OPTIONS || !checksum_is_right(v4) => {
                Grh::of_ipv6(bytes)
            }
            (6, _) | (_, 4) => Grh::of_ipv4(v4),
            _ => None,
        }
    }

    fn of_ipv6(bytes: &[u8; GRH_BYTES]) -> Option<Grh> {
        let word = u32::from_be_bytes(*bytes.first_chunk()?);
        Some(Grh {
            source: Gid(bytes[8..24].try_into().ok()?),
            destination: Gid(bytes[24..].try_into().ok()?),
            traffic_class: (word >> 20) as u8,
            flow_label: word & 0x000f_ffff,
            hop_limit: bytes[7],
        })
    }

    fn of_ipv4(header: &[u8; GRH_BYTES - IPV4_AT]) -> Option<Grh> {
        let gid = |bytes: &[u8]| {
            let octets: [u8; 4] = bytes.try_into().ok()?;
            Some(Gid::from_ip(Ipv4Addr::from(octets).into()))
        };
        Some(Grh {
            source: gid(&header[12..16])?,
            destination: gid(&header[16..])?,
            traffic_class: header[1],
            flow_label: 0,
            hop_limit: header[8],
        })
    }
}

/// The sum over a right header, with its checksum, is all ones.
fn checksum_is_right(header: &[u8]) -> bool {
    let words = header.chunks_exact(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum: u32 = words.sum();
    (sum & 0xffff) + (sum >> 16) == 0xffff
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{IpAddr, Ipv6Addr};

    fn ipv6(source: [u8; 16]) -> [u8; GRH_BYTES] {
        let mut bytes = [0; GRH_BYTES];
        bytes[..8].copy_from_slice(&[0x66, 0x80, 0, 5, 0, 64, 17, 9]);
        bytes[8..24].copy_from_slice(&source);
        bytes[24..].copy_from_slice(&[0xfd; 16]);
        bytes
    }

    /// A header of 10.0.0.1 to 10.0.0.2 with a right checksum.
    fn ipv4(before: u8) -> [u8; GRH_BYTES] {
        let mut bytes = [before; GRH_BYTES];
        let header =
            [0x45, 104, 0, 100, 0, 0, 0x40, 0, 64, 17, 0x26, 0x1f, 10, 0, 0, 1, 10, 0, 0, 2];
        bytes[IPV4_AT..].copy_from_slice(&header);
        bytes
    }

    #[test]
    fn an_ipv6_sender_is_read_right_whatever_its_bytes_are() {
        for at in 0..16 {
            for byte in 0..=u8::MAX {
                let mut source: [u8; 16] = core::array::from_fn(|i| 0xfd_u8.wrapping_mul(i as u8));
                source[at] = byte;
                let grh = Grh::parse(&ipv6(source)).unwrap();
                assert_eq!(grh.source, Gid(source));
                let rest = (grh.destination, grh.traffic_class, grh.flow_label, grh.hop_limit);
                assert_eq!(rest, (Gid([0xfd; 16]), 0x68, 5, 9));
            }
        }
    }

    #[test]
    fn an_ipv4_sender_is_read_right_whatever_is_before_the_header() {
        let mut unsummed = ipv4(0);
        unsummed[30..32].fill(0); // a device need not sum where the version says enough
        for bytes in (0..=u8::MAX).map(ipv4).chain([unsummed]) {
            let grh = Grh::parse(&bytes).unwrap();
            assert_eq!(grh.source.to_ip(), IpAddr::from([10, 0, 0, 1]));
            assert_eq!(grh.destination.to_ip(), IpAddr::from([10, 0, 0, 2]));
            assert_eq!((grh.traffic_class, grh.flow_label, grh.hop_limit), (104, 0, 64));
        }
    }

    #[test]
    fn what_is_of_neither_version_is_no_header() {
        assert_eq!(Grh::parse(&[0; GRH_BYTES]), None);
        let mut options = ipv6(Ipv6Addr::LOCALHOST.octets());
        options[IPV4_AT] = 0x46;
        assert_eq!(Grh::parse(&options).unwrap().hop_limit, 9, "IPv4 has no options here");
    }
}
