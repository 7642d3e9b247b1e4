//! The invariant CRC of RoCEv2 (InfiniBand Architecture, annex A17).
//!
//! It covers everything from the IP header to the end of the packet, with what routers may change replaced by ones, behind eight
//! bytes of ones in place of an InfiniBand local header. It is the CRC-32 of Ethernet and lies in little-endian order on the wire.
//! The IPv4 header is taken to be what a UDP socket with path MTU discovery sends: 20 bytes, don't-fragment set.
//!
//! A receiving socket does not show the IP id. A CRC is linear: two packets that differ in the id alone have CRCs that differ by
//! `id difference · x^(32 + 8·bytes behind the id)`. Multiplying the difference of what came and what was expected by the
//! inverse of that power of x gives a polynomial of degree below 16 for packets that are right but for their id, and for one of
//! 65,536 of those that are damaged.

use core::net::IpAddr;

/// Bytes of the ICRC behind each packet.
pub const ICRC_BYTES: usize = 4;

/// Eight bytes of ones, an IPv6 header, a UDP header and a BTH.
const MAX_PREFIX: usize = 8 + 40 + 8 + 12;

/// The addresses of a packet, which the ICRC covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IcrcFlow {
    /// Source address.
    pub src_ip: IpAddr,
    /// Destination address, of the same family.
    pub dst_ip: IpAddr,
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
}

/// An ICRC in the making: [`Icrc::new`], then [`Icrc::update`] with the packet from the BTH on, then [`Icrc::finish`].
#[derive(Clone)]
pub struct Icrc {
    /// What stands before the payload of the packet; hashed together with the BTH, in one piece.
    prefix: [u8; MAX_PREFIX],
    prefix_len: usize,
    /// Bytes of the UDP payload seen while fewer than a BTH had been.
    seen: usize,
    hash: crc32fast::Hasher,
}

impl Icrc {
    /// Begins a packet whose UDP payload has `udp_payload_len` bytes, ICRC and padding included. `ip_id` matters for IPv4 only.
    pub fn new(flow: &IcrcFlow, udp_payload_len: usize, ip_id: u16) -> Icrc {
        let mut p = [0xffu8; MAX_PREFIX];
        let udp_len = (udp_payload_len + 8) as u16;
        let at = match (flow.src_ip, flow.dst_ip) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                p[8] = 0x45; // TOS behind it is masked
                p[10..12].copy_from_slice(&udp_len.wrapping_add(20).to_be_bytes());
                p[12..14].copy_from_slice(&ip_id.to_be_bytes());
                p[14..16].copy_from_slice(&[0x40, 0]); // TTL behind it is masked
                p[17] = 17; // the checksum behind it is masked
                p[20..24].copy_from_slice(&src.octets());
                p[24..28].copy_from_slice(&dst.octets());
                28
            }
            (src, dst) => {
                p[8] = 0x6f; // traffic class and flow label behind it are masked
                p[12..14].copy_from_slice(&udp_len.to_be_bytes());
                p[14] = 17; // the hop limit behind it is masked
                p[16..32].copy_from_slice(&v6_octets(src));
                p[32..48].copy_from_slice(&v6_octets(dst));
                48
            }
        };
        p[at..at + 2].copy_from_slice(&flow.src_port.to_be_bytes());
        p[at + 2..at + 4].copy_from_slice(&flow.dst_port.to_be_bytes());
        p[at + 4..at + 6].copy_from_slice(&udp_len.to_be_bytes()); // the checksum behind it is masked
        Icrc { prefix: p, prefix_len: at + 8, seen: 0, hash: crc32fast::Hasher::new() }
    }

    /// Adds the next piece of the packet: headers, payload, padding.
    pub fn update(&mut self, mut piece: &[u8]) {
        if self.seen < 12 {
            let take = piece.len().min(12 - self.seen);
            let at = self.prefix_len + self.seen;
            self.prefix[at..at + take].copy_from_slice(&piece[..take]);
            self.seen += take;
            if self.seen < 12 {
                return;
            }
            self.prefix[self.prefix_len + 4] = 0xff; // FECN, BECN and reserved bits are masked
            self.hash.update(&self.prefix[..self.prefix_len + 12]);
            piece = &piece[take..];
        }
        self.hash.update(piece);
    }

    /// The CRC as a number. Pieces shorter than a BTH in all are not a packet, and their CRC means nothing.
    pub fn value(self) -> u32 {
        self.hash.finalize()
    }

    /// The four bytes for the end of the packet.
    pub fn finish(self) -> [u8; ICRC_BYTES] {
        self.value().to_le_bytes()
    }
}

/// Takes the ICRC off a UDP payload and returns what stands before it, or `None` where the ICRC is wrong.
///
/// The ICRC is compared for an IP id of `expected_id`; with `any_id` it may belong to any other id as well.
pub fn strip_icrc<'a>(flow: &IcrcFlow, udp_payload: &'a [u8], expected_id: u16, any_id: bool) -> Option<&'a [u8]> {
    let (packet, received) = udp_payload.split_last_chunk::<ICRC_BYTES>()?;
    if packet.len() < 12 {
        return None;
    }
    let mut icrc = Icrc::new(flow, udp_payload.len(), expected_id);
    icrc.update(packet);
    let difference = icrc.value() ^ u32::from_le_bytes(*received);
    let ok = difference == 0 || any_id && flow.src_ip.is_ipv4() && explained_by_id(difference, packet.len());
    ok.then_some(packet)
}

/// Whether the difference of two CRCs can come from a difference of 16 bits in the IPv4 id.
fn explained_by_id(difference: u32, packet_len: usize) -> bool {
    // Behind the id: the other 14 bytes of the IP header, the UDP header, the packet; and x^32 of the CRC itself.
    let mut behind = packet_len + 14 + 8 + 4;
    let mut d = difference;
    for power in INVERSE_POWERS {
        if behind & 1 != 0 {
            d = multiply(d, power);
        }
        behind >>= 1;
    }
    debug_assert!(behind == 0, "a UDP payload has fewer than 65,536 bytes");
    // In the reflected order the coefficients of x^0 to x^15 are the upper bits.
    d & 0xffff == 0
}

/// The polynomial of Ethernet's CRC-32, reflected.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// The product of two polynomials modulo [`POLYNOMIAL`], all reflected (bit 31 is x^0).
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 1u32 << 31;
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = if b & 1 != 0 { b >> 1 ^ POLYNOMIAL } else { b >> 1 };
        bit >>= 1;
    }
    product
}

/// x^(-8·2^k) for k = 0 to 16.
const INVERSE_POWERS: [u32; 17] = {
    // x · x^-1 = 1: dividing by x shifts the other way; the polynomial's constant term brings the bit back in.
    let one = 1u32 << 31;
    let mut p = one;
    let mut i = 0;
    while i < 8 {
        p = if p & one != 0 { (p ^ POLYNOMIAL) << 1 | 1 } else { p << 1 };
        i += 1;
    }
    let mut powers = [0; 17];
    i = 0;
    while i < 17 {
        powers[i] = p;
        p = multiply(p, p);
        i += 1;
    }
    powers
};

fn v6_octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}
