//! The invariant CRC of RoCEv2 (InfiniBand Architecture, annex A17).
//!
//! It covers everything from the IP header to the end of the packet, with what routers may change
//! replaced by ones, behind eight bytes of ones in place of an InfiniBand local header. It is the
//! CRC-32 of Ethernet and lies in little-endian order on the wire. The IPv4 header is taken to be
//! what a UDP socket with path MTU discovery sends: 20 bytes, don't-fragment set.
//!
//! A receiving socket does not show the IP id. A CRC is linear: two packets that differ in the id
//! alone have CRCs that differ by `id difference · x^(32 + 8·bytes behind the id)`. Multiplying the
//! difference of what came and what was expected by the inverse of that power of x gives a
//! polynomial of degree below 16 for packets that are right but for their id, and for one of 65,536
//! of those that are damaged.

use crate::packet::BTH_BYTES;
use core::net::IpAddr;

/// Bytes of the ICRC behind each packet.
pub const ICRC_BYTES: usize = 4;

/// The masked byte of a BTH: FECN, BECN and reserved bits.
const MASKED: usize = 4;
/// Eight bytes of ones, an IPv6 header and a UDP header.
const MAX_PREFIX: usize = 8 + 40 + 8;
/// Bytes between the IPv4 id and what follows the BTH.
const BEHIND_ID: usize = 14 + 8 + BTH_BYTES;

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

/// The part of an ICRC that packets of one flow and one length share: what stands before the BTH,
/// with IP id 0.
///
/// A CRC is linear, so the id is added by a look-up; a run of packets pays for its pseudo-headers
/// once, and for the first part of the BTH as long as it stays the same. What is left is one round
/// of look-ups that do not wait for each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IcrcSeed {
    /// The register of the CRC, not inverted.
    register: u32,
    v4: bool,
    /// The first eight bytes of the last BTH, as the ICRC covers them, and the register behind
    /// them. 0, which none can be: there was no BTH.
    head: (u64, u32),
}

impl IcrcSeed {
    /// The seed of packets whose UDP payload has `udp_payload_len` bytes, ICRC and padding
    /// included.
    pub fn new(flow: &IcrcFlow, udp_payload_len: usize) -> IcrcSeed {
        let mut p = [0xffu8; MAX_PREFIX];
        let udp_len = (udp_payload_len + 8) as u16;
        let (at, v4) = match (flow.src_ip, flow.dst_ip) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                p[8] = 0x45; // TOS behind it is masked
                p[10..12].copy_from_slice(&udp_len.wrapping_add(20).to_be_bytes());
                p[12..14].copy_from_slice(&[0, 0]); // the id comes later
                p[14..16].copy_from_slice(&[0x40, 0]); // TTL behind it is masked
                p[17] = 17; // the checksum behind it is masked
                p[20..24].copy_from_slice(&src.octets());
                p[24..28].copy_from_slice(&dst.octets());
                (28, true)
            }
            (src, dst) => {
                p[8] = 0x6f; // traffic class and flow label behind it are masked
                p[12..14].copy_from_slice(&udp_len.to_be_bytes());
                p[14] = 17; // the hop limit behind it is masked
                p[16..32].copy_from_slice(&v6_octets(src));
                p[32..48].copy_from_slice(&v6_octets(dst));
                (48, false)
            }
        };
        p[at..at + 2].copy_from_slice(&flow.src_port.to_be_bytes());
        p[at + 2..at + 4].copy_from_slice(&flow.dst_port.to_be_bytes());
        p[at + 4..at + 6].copy_from_slice(&udp_len.to_be_bytes()); // the checksum behind it is masked
        IcrcSeed { register: !crc32fast::hash(&p[..at + 8]), v4, head: (0, 0) }
    }

    /// Begins a packet with its BTH. `ip_id` matters for IPv4 only.
    #[inline]
    pub fn begin(&mut self, ip_id: u16, bth: &[u8; BTH_BYTES]) -> Icrc {
        let word = |at: usize| u32::from_le_bytes([bth[at], bth[at + 1], bth[at + 2], bth[at + 3]]);
        let (first, second) = (word(0), word(MASKED) | 0xff);
        let head = u64::from(second) << 32 | u64::from(first);
        if self.head.0 != head {
            self.head = (head, add_word(add_word(self.register, first), second));
        }
        let mut r = add_word(self.head.1, word(8));
        if self.v4 {
            r ^= ID_LOW[usize::from(ip_id & 0xff)] ^ ID_HIGH[usize::from(ip_id >> 8)];
        }
        Icrc::resume(r)
    }
}

/// An ICRC in the making: [`IcrcSeed::begin`], then [`Icrc::update`] with the packet behind its
/// BTH, then [`Icrc::finish`].
#[derive(Clone, Copy)]
pub struct Icrc {
    /// The register of the CRC, not inverted.
    register: u32,
}

impl Icrc {
    /// Goes on where a CRC was computed elsewhere.
    pub fn resume(register: u32) -> Icrc {
        Icrc { register }
    }

    /// The register of the CRC behind what has been added, not inverted.
    pub fn register(self) -> u32 {
        self.register
    }

    /// Adds the next piece of the packet: extended headers, payload, padding.
    #[inline]
    pub fn update(&mut self, piece: &[u8]) {
        if !piece.is_empty() {
            let mut crc = crc32fast::Hasher::new_with_initial(!self.register);
            crc.update(piece);
            self.register = !crc.finalize();
        }
    }

    /// The CRC as a number.
    pub fn value(self) -> u32 {
        !self.register
    }

    /// The four bytes for the end of the packet.
    pub fn finish(self) -> [u8; ICRC_BYTES] {
        self.value().to_le_bytes()
    }

    /// The ICRC of a whole packet: BTH, extended headers, payload and padding. `None` where it has
    /// no BTH.
    pub fn of(flow: &IcrcFlow, ip_id: u16, packet: &[u8]) -> Option<[u8; ICRC_BYTES]> {
        let (bth, rest) = packet.split_first_chunk()?;
        let mut icrc = IcrcSeed::new(flow, packet.len() + ICRC_BYTES).begin(ip_id, bth);
        icrc.update(rest);
        Some(icrc.finish())
    }
}

/// Checks the packets of one flow. Those of one length pay for the pseudo-headers once.
pub struct IcrcChecker {
    flow: IcrcFlow,
    len: usize,
    seed: IcrcSeed,
}

impl IcrcChecker {
    /// A checker for packets of `flow`, most of which have a UDP payload of `len` bytes.
    pub fn new(flow: &IcrcFlow, len: usize) -> IcrcChecker {
        IcrcChecker { flow: *flow, len, seed: IcrcSeed::new(flow, len) }
    }

    /// The flow.
    pub fn flow(&self) -> &IcrcFlow {
        &self.flow
    }

    /// Takes the ICRC off a UDP payload and returns what stands before it, or `None` where the ICRC
    /// is wrong.
    ///
    /// The ICRC is compared for an IP id of `expected_id`; with `any_id` it may belong to any other
    /// id as well.
    #[inline]
    pub fn strip<'a>(
        &mut self,
        udp_payload: &'a [u8],
        expected_id: u16,
        any_id: bool,
    ) -> Option<&'a [u8]> {
        let (packet, received) = udp_payload.split_last_chunk::<ICRC_BYTES>()?;
        let (bth, rest) = packet.split_first_chunk()?;
        if udp_payload.len() != self.len {
            *self = IcrcChecker::new(&self.flow, udp_payload.len());
        }
        let mut icrc = self.seed.begin(expected_id, bth);
        icrc.update(rest);
        let difference = icrc.value() ^ u32::from_le_bytes(*received);
        let ok =
            difference == 0 || any_id && self.seed.v4 && explained_by_id(difference, packet.len());
        ok.then_some(packet)
    }
}

/// [`IcrcChecker::strip`] for a single packet.
pub fn strip_icrc<'a>(
    flow: &IcrcFlow,
    udp_payload: &'a [u8],
    expected_id: u16,
    any_id: bool,
) -> Option<&'a [u8]> {
    IcrcChecker::new(flow, udp_payload.len()).strip(udp_payload, expected_id, any_id)
}

/// What each byte does to the register when 0, 1, 2 or 3 bytes follow it.
const STEPS: [[u32; 256]; 4] = {
    let mut t = [[0u32; 256]; 4];
    let mut i = 0;
    while i < 256 {
        let mut r = i as u32;
        let mut bit = 0;
        while bit < 8 {
            r = if r & 1 != 0 { r >> 1 ^ POLYNOMIAL } else { r >> 1 };
            bit += 1;
        }
        t[0][i] = r;
        i += 1;
    }
    let mut k = 1;
    while k < 4 {
        i = 0;
        while i < 256 {
            t[k][i] = t[k - 1][i] >> 8 ^ t[0][(t[k - 1][i] & 0xff) as usize];
            i += 1;
        }
        k += 1;
    }
    t
};

/// The register after four more bytes.
#[inline]
fn add_word(register: u32, word: u32) -> u32 {
    let x = register ^ word;
    let at = |k: usize, shift: u32| STEPS[k][(x >> shift & 0xff) as usize];
    at(3, 0) ^ at(2, 8) ^ at(1, 16) ^ at(0, 24)
}

/// What the lower and the upper byte of the IPv4 id do to the register behind the BTH.
const ID_LOW: [u32; 256] = moved_on(BEHIND_ID);
const ID_HIGH: [u32; 256] = moved_on(BEHIND_ID + 1);

/// What a byte does to the register when `bytes` more, all zero, have followed it.
const fn moved_on(bytes: usize) -> [u32; 256] {
    let mut t = STEPS[0];
    let mut i = 0;
    while i < 256 {
        let mut n = 0;
        while n < bytes {
            t[i] = t[i] >> 8 ^ STEPS[0][(t[i] & 0xff) as usize];
            n += 1;
        }
        i += 1;
    }
    t
}

/// Whether the difference of two CRCs can come from a difference of 16 bits in the IPv4 id.
fn explained_by_id(difference: u32, packet_len: usize) -> bool {
    // Behind the id: the other 14 bytes of the IP header, the UDP header, the packet; and x^32 of
    // the CRC itself.
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
pub const POLYNOMIAL: u32 = 0xedb8_8320;

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
    // x · x^-1 = 1: dividing by x shifts the other way; the polynomial's constant term brings the
    // bit back in.
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
