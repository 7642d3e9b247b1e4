//! Fields of a message: big-endian numbers, and some of a few bits.

/// The part of a MAD that belongs to the CM.
pub(crate) const BODY_BYTES: usize = 232;

/// The body of a message that is read or written.
#[derive(Clone)]
pub(crate) struct Body(pub(crate) [u8; BODY_BYTES]);

impl Body {
    pub(crate) fn empty() -> Body {
        Body([0; BODY_BYTES])
    }

    pub(crate) fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut out = [0; N];
        out.copy_from_slice(&self.0[at..at + N]);
        out
    }

    pub(crate) fn u8(&self, at: usize) -> u8 {
        self.0[at]
    }

    pub(crate) fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.bytes(at))
    }

    pub(crate) fn u24(&self, at: usize) -> u32 {
        let [a, b, c] = self.bytes(at);
        u32::from_be_bytes([0, a, b, c])
    }

    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.bytes(at))
    }

    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.bytes(at))
    }

    /// `len` bits of a byte, whose highest is bit 0 as the specification counts.
    pub(crate) fn bits(&self, at: usize, first: u32, len: u32) -> u8 {
        self.0[at] >> (8 - first - len) & ((1u16 << len) - 1) as u8
    }

    pub(crate) fn set(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn set_u16(&mut self, at: usize, value: u16) {
        self.set(at, &value.to_be_bytes());
    }

    pub(crate) fn set_u24(&mut self, at: usize, value: u32) {
        self.set(at, &value.to_be_bytes()[1..]);
    }

    pub(crate) fn set_u32(&mut self, at: usize, value: u32) {
        self.set(at, &value.to_be_bytes());
    }

    pub(crate) fn set_u64(&mut self, at: usize, value: u64) {
        self.set(at, &value.to_be_bytes());
    }

    /// Sets bits as [`Body::bits`] reads them.
    pub(crate) fn set_bits(&mut self, at: usize, first: u32, len: u32, value: u8) {
        let shift = 8 - first - len;
        let mask = (((1u16 << len) - 1) as u8) << shift;
        self.0[at] = self.0[at] & !mask | value << shift & mask;
    }

    /// The private data: all from there to the end.
    pub(crate) fn private(&self, at: usize) -> Vec<u8> {
        self.0[at..].to_vec()
    }

    /// Writes private data, as much as fits.
    pub(crate) fn set_private(&mut self, at: usize, data: &[u8]) {
        let len = data.len().min(BODY_BYTES - at);
        self.set(at, &data[..len]);
    }
}
