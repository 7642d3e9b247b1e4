//! What can be wrong with a code or with the chunks that are given to it.

use crate::{MAX_DATA, MAX_PARITY};

/// Why nothing was encoded or recovered. Nothing has been written then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodeError {
    /// A code with too few or too many data chunks.
    #[error("{0} data chunks; 1 to {MAX_DATA} are right")]
    Data(usize),
    /// A code with too few or too many parity chunks.
    #[error("{0} parity chunks; 1 to {MAX_PARITY} are right")]
    Parity(usize),
    /// An XOR code with an empty group.
    #[error(
        "XOR of {parity} groups over {data} data chunks leaves groups empty; as many parity as \
         data chunks at most are right"
    )]
    Groups {
        /// Data chunks.
        data: usize,
        /// Parity chunks.
        parity: usize,
    },
    /// A code id that means no code here.
    #[error(
        "code id {0:#010x} is not known; 0x01kkmm (MDS) and 0x02kkmm (XOR) are right, with k data \
         and m parity chunks in hexadecimal"
    )]
    Id(u32),
    /// A last submessage that is no shorter one.
    #[error("a last submessage of {last} chunks; 1 to {data} are right")]
    Last {
        /// Its chunks.
        last: usize,
        /// Those of a full one.
        data: usize,
    },
    /// Data chunks that are not as many as the code's.
    #[error("{given} data chunks were given to a code of {expected}")]
    DataGiven {
        /// Given.
        given: usize,
        /// Of the code.
        expected: usize,
    },
    /// Parity chunks that are not as many as the code's.
    #[error("{given} parity chunks were given to a code of {expected}")]
    ParityGiven {
        /// Given.
        given: usize,
        /// Of the code.
        expected: usize,
    },
    /// A chunk of a wrong length.
    #[error(
        "chunk {index} has {given} bytes; {expected} are right (the last data chunk alone may be \
         shorter, but not empty)"
    )]
    Length {
        /// Which: data chunks first, then parity chunks.
        index: usize,
        /// Its bytes.
        given: usize,
        /// Those of the first chunk.
        expected: usize,
    },
    /// A region that has not room for the chunks of the code.
    #[error("a region of {given} bytes does not hold {chunks} chunks of {chunk_bytes} bytes")]
    Region {
        /// Its bytes.
        given: usize,
        /// Chunks of the code.
        chunks: usize,
        /// Bytes of each.
        chunk_bytes: usize,
    },
    /// A chunk that the code does not have is said to be lost.
    #[error("chunk {index} is said to be lost, but the code has {chunks}")]
    NoSuchChunk {
        /// Which.
        index: usize,
        /// Data and parity chunks of the code.
        chunks: usize,
    },
    /// More is lost than parity can bring back.
    #[error(
        "{data} data and {parity} parity chunks are lost, more than the code recovers: they must \
         be sent again"
    )]
    Unrecoverable {
        /// Lost data chunks.
        data: usize,
        /// Lost parity chunks.
        parity: usize,
    },
}
