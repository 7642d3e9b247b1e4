//! How the chunks of a message are divided into submessages: ranges of the data's bitmap, and of
//! the parity's.

use std::ops::Range;
use unbroken_erasure::Code;

/// The submessages of a message: of *k* data chunks and *m* parity chunks each; the last one may be
/// shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submessages {
    code: Code,
    chunks: u32,
}

impl Submessages {
    /// Of a message of so many chunks.
    pub fn new(code: Code, chunks: u32) -> Submessages {
        Submessages { code, chunks }
    }

    /// How many.
    pub fn count(&self) -> u32 {
        self.chunks.div_ceil(self.code.data() as u32)
    }

    /// The code of one.
    pub fn code(&self, sub: u32) -> Code {
        let data = self.data(sub).len();
        // It has chunks, and no more than a full one.
        self.code.for_last(data).unwrap_or(self.code)
    }

    /// Its data chunks.
    pub fn data(&self, sub: u32) -> Range<u32> {
        let k = self.code.data() as u32;
        (sub * k).min(self.chunks)..((sub + 1) * k).min(self.chunks)
    }

    /// Its parity chunks.
    pub fn parity(&self, sub: u32) -> Range<u32> {
        let first = sub * self.code.parity() as u32;
        first..first + self.code(sub).parity() as u32
    }

    /// Parity chunks of all.
    pub fn parity_chunks(&self) -> u32 {
        self.parity(self.count().saturating_sub(1)).end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_is_in_one_submessage() {
        for (k, m) in [(1, 1), (4, 2), (32, 8), (5, 3)] {
            for chunks in 1..100 {
                let s = Submessages::new(Code::mds(k, m).unwrap(), chunks);
                let data: Vec<u32> = (0..s.count()).flat_map(|sub| s.data(sub)).collect();
                let parity: Vec<u32> = (0..s.count()).flat_map(|sub| s.parity(sub)).collect();
                assert_eq!(data, (0..chunks).collect::<Vec<_>>());
                assert_eq!(parity, (0..s.parity_chunks()).collect::<Vec<_>>());
                assert_eq!(s.parity_chunks(), (chunks * m as u32).div_ceil(k as u32));
            }
        }
    }
}
