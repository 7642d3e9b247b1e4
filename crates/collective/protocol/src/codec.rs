//! Numbers, byte strings and lists of messages, as bytes.

use crate::Rank;

/// The longest byte string of a message.
const MAX_BYTES: usize = 1 << 15;
/// The longest list of a message.
const MAX_LIST: usize = 1 << 16;

/// Bytes in the making.
#[derive(Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, n: u8) -> &mut Self {
        self.0.push(n);
        self
    }

    pub(crate) fn u32(&mut self, n: u32) -> &mut Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    pub(crate) fn u64(&mut self, n: u64) -> &mut Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    pub(crate) fn rank(&mut self, rank: Rank) -> &mut Self {
        self.u32(rank as u32)
    }

    pub(crate) fn numbers(&mut self, numbers: &[u64]) -> &mut Self {
        self.u32(numbers.len() as u32);
        numbers.iter().for_each(|n| self.0.extend(n.to_le_bytes()));
        self
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        let bytes = &bytes[..bytes.len().min(MAX_BYTES)];
        self.u32(bytes.len() as u32);
        self.0.extend(bytes);
        self
    }
}

/// Bytes that came.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl Reader<'_> {
    fn take(&mut self, len: usize) -> Option<&[u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    pub(crate) fn rank(&mut self) -> Option<Rank> {
        self.u32().map(|r| r as usize)
    }

    pub(crate) fn bytes(&mut self) -> Option<Vec<u8>> {
        let len = self.u32()? as usize;
        (len <= MAX_BYTES).then(|| self.take(len).map(<[u8]>::to_vec))?
    }

    pub(crate) fn list<T>(&mut self, each: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let len = self.u32()? as usize;
        // An element has a byte at least.
        (len <= MAX_LIST.min(self.0.len())).then(|| (0..len).map(|_| each(self)).collect())?
    }
}
