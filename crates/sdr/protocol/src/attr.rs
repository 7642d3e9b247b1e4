//! What two ends agree on: sizes of messages, chunks and packets; channels and generations.

use crate::imm::Split;

/// Attributes of a queue pair. Both ends have the same, but for the packet lifetime, which is the
/// receiver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Bytes of a chunk, as a power of two.
    pub chunk_log2: u8,
    /// Bytes in flight, as a power of two. Divided by the messages in flight they give the longest
    /// message.
    pub in_flight_log2: u8,
    /// Messages in flight, as a power of two.
    pub messages_log2: u8,
    /// Bytes of a packet's payload: a power of two from 64 to 4096.
    pub mtu_bytes: u32,
    /// Channels: chunk *c* goes over channel *c* modulo their number.
    pub channels: u8,
    /// Generations of message ids: how often an id is used before a queue pair is used again.
    pub generations: u8,
    /// How the immediate is split.
    pub split: Split,
    /// For how long a packet may be on its way.
    pub packet_lifetime_us: u64,
}

impl Default for Attr {
    /// 16 messages of 1 MiB, chunks of 64 KiB, packets of 4 KiB, one channel, four generations, two
    /// seconds.
    fn default() -> Attr {
        Attr {
            chunk_log2: 16,
            in_flight_log2: 24,
            messages_log2: 4,
            mtu_bytes: 4096,
            channels: 1,
            generations: 4,
            split: Split::default(),
            packet_lifetime_us: 2_000_000,
        }
    }
}

/// The most channels.
pub const MAX_CHANNELS: u8 = 64;
/// The most generations.
pub const MAX_GENERATIONS: u8 = 16;
/// The most bytes in flight, as a power of two.
pub const MAX_IN_FLIGHT_LOG2: u8 = 40;

/// Which attribute is wrong, and what would be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttrError {
    /// The packet.
    #[error("an MTU of {0} bytes; a power of two from 64 to 4096 is right")]
    Mtu(u32),
    /// The chunk.
    #[error(
        "chunks of 2^{chunk} bytes; from the MTU, {mtu} bytes, to the longest message, 2^{message} \
         bytes, is right"
    )]
    Chunk {
        /// Its logarithm.
        chunk: u8,
        /// Bytes of a packet.
        mtu: u32,
        /// The longest message's logarithm.
        message: u8,
    },
    /// Messages.
    #[error("2^{given} messages in flight; 1 to {most} fit the immediate's {bits} bits")]
    Messages {
        /// The logarithm given.
        given: u8,
        /// The most.
        most: u32,
        /// Bits of the immediate.
        bits: u8,
    },
    /// Bytes in flight.
    #[error(
        "2^{given} bytes in flight; at least 2^{least} (a chunk for each message) and at most \
         2^{MAX_IN_FLIGHT_LOG2} is right"
    )]
    InFlight {
        /// The logarithm given.
        given: u8,
        /// The least.
        least: u8,
    },
    /// The longest message has too many packets.
    #[error(
        "messages of {packets} packets; the immediate's {bits} bits number {most}: fewer bytes in \
         flight, more messages, or longer packets"
    )]
    Packets {
        /// Packets of the longest message.
        packets: u64,
        /// The most.
        most: u32,
        /// Bits of the immediate.
        bits: u8,
    },
    /// Channels.
    #[error("{0} channels; 1 to {MAX_CHANNELS} is right")]
    Channels(u8),
    /// Generations.
    #[error("{0} generations; 1 to {MAX_GENERATIONS} is right")]
    Generations(u8),
    /// A peer that has another value.
    #[error("the peer's {name} is {theirs}, ours is {ours}: both ends need the same")]
    Differs {
        /// Of which attribute.
        name: &'static str,
        /// The peer's.
        theirs: u64,
        /// Ours.
        ours: u64,
    },
}

/// Attributes that have been checked, and what follows from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    attr: Attr,
    /// Message slots.
    pub slots: u32,
    /// Bytes of the longest message, and of its place in the root key.
    pub message_bytes: u64,
    /// Bytes of a chunk.
    pub chunk_bytes: u32,
    /// Packets of a chunk.
    pub chunk_packets: u32,
    /// Chunks of the longest message.
    pub chunks: u32,
}

impl Layout {
    /// Checks attributes.
    ///
    /// # Errors
    /// [`AttrError`], which names the attribute.
    pub fn new(attr: &Attr) -> Result<Layout, AttrError> {
        let a = attr;
        let [id_bits, offset_bits, _] = a.split.bits();
        if !a.mtu_bytes.is_power_of_two() || !(64..=4096).contains(&a.mtu_bytes) {
            return Err(AttrError::Mtu(a.mtu_bytes));
        }
        if a.messages_log2 > id_bits {
            return Err(AttrError::Messages {
                given: a.messages_log2,
                most: a.split.messages(),
                bits: id_bits,
            });
        }
        let mtu_log2 = a.mtu_bytes.trailing_zeros() as u8;
        let least = mtu_log2 + a.messages_log2;
        if a.in_flight_log2 < least || a.in_flight_log2 > MAX_IN_FLIGHT_LOG2 {
            return Err(AttrError::InFlight { given: a.in_flight_log2, least });
        }
        let message = a.in_flight_log2 - a.messages_log2;
        if a.chunk_log2 < mtu_log2 || a.chunk_log2 > message.min(31) {
            return Err(AttrError::Chunk { chunk: a.chunk_log2, mtu: a.mtu_bytes, message });
        }
        if message - mtu_log2 > offset_bits {
            let packets = 1 << (message - mtu_log2);
            return Err(AttrError::Packets { packets, most: a.split.packets(), bits: offset_bits });
        }
        if !(1..=MAX_CHANNELS).contains(&a.channels) {
            return Err(AttrError::Channels(a.channels));
        }
        if !(1..=MAX_GENERATIONS).contains(&a.generations) {
            return Err(AttrError::Generations(a.generations));
        }
        Ok(Layout {
            attr: *a,
            slots: 1 << a.messages_log2,
            message_bytes: 1 << message,
            chunk_bytes: 1 << a.chunk_log2,
            chunk_packets: 1 << (a.chunk_log2 - mtu_log2),
            chunks: 1 << (message - a.chunk_log2),
        })
    }

    /// The attributes.
    pub fn attr(&self) -> &Attr {
        &self.attr
    }

    /// The slot of a message.
    pub fn slot(&self, seq: u64) -> u32 {
        (seq % u64::from(self.slots)) as u32
    }

    /// The generation of a message.
    pub fn generation(&self, seq: u64) -> u8 {
        (seq / u64::from(self.slots) % u64::from(self.attr.generations)) as u8
    }

    /// Packets of so many bytes; one of none.
    pub fn packets_of(&self, bytes: u64) -> u32 {
        bytes.div_ceil(self.attr.mtu_bytes.into()).max(1) as u32
    }

    /// Chunks of so many bytes; one of none.
    pub fn chunks_of(&self, bytes: u64) -> u32 {
        bytes.div_ceil(self.chunk_bytes.into()).max(1) as u32
    }

    /// Numbers that both ends must have alike, by name.
    pub fn agreed(&self) -> [(&'static str, u64); 9] {
        let a = &self.attr;
        let [id, offset, user] = a.split.bits();
        [
            ("chunk size (log2 of bytes)", a.chunk_log2.into()),
            ("bytes in flight (log2)", a.in_flight_log2.into()),
            ("messages in flight (log2)", a.messages_log2.into()),
            ("MTU in bytes", a.mtu_bytes.into()),
            ("number of channels", a.channels.into()),
            ("number of generations", a.generations.into()),
            ("number of message bits of the immediate", id.into()),
            ("number of packet bits of the immediate", offset.into()),
            ("number of user bits of the immediate", user.into()),
        ]
    }

    /// Whether a peer with these numbers can be talked to.
    ///
    /// # Errors
    /// The first that differs, by name.
    pub fn agrees(&self, theirs: &[u64; 9]) -> Result<(), AttrError> {
        for ((name, ours), theirs) in self.agreed().into_iter().zip(*theirs) {
            if ours != theirs {
                return Err(AttrError::Differs { name, theirs, ours });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_consistent() {
        let l = Layout::new(&Attr::default()).unwrap();
        assert_eq!(
            (l.slots, l.message_bytes, l.chunk_bytes, l.chunk_packets, l.chunks),
            (16, 1 << 20, 1 << 16, 16, 16)
        );
        assert_eq!((l.slot(35), l.generation(35), l.generation(64)), (3, 2, 0));
        assert_eq!((l.packets_of(0), l.packets_of(4097), l.chunks_of(65537)), (1, 2, 2));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let d = Attr::default();
        for (attr, says) in [
            (Attr { mtu_bytes: 1500, ..d }, "MTU of 1500"),
            (Attr { mtu_bytes: 8192, ..d }, "64 to 4096"),
            (Attr { chunk_log2: 11, ..d }, "chunks of 2^11"),
            (Attr { chunk_log2: 21, ..d }, "longest message, 2^20"),
            (Attr { messages_log2: 11, in_flight_log2: 30, ..d }, "1 to 1024 fit"),
            (Attr { in_flight_log2: 15, ..d }, "at least 2^16"),
            (Attr { in_flight_log2: 41, ..d }, "at most 2^40"),
            (Attr { in_flight_log2: 40, ..d }, "number 262144"),
            (Attr { channels: 0, ..d }, "0 channels"),
            (Attr { generations: 17, ..d }, "1 to 16"),
        ] {
            let error = Layout::new(&attr).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn peers_that_differ_are_told_in_what() {
        let ours = Layout::new(&Attr::default()).unwrap();
        let theirs = Layout::new(&Attr { channels: 2, ..Attr::default() }).unwrap();
        let error = ours.agrees(&theirs.agreed().map(|(_, n)| n)).unwrap_err().to_string();
        assert_eq!(error, "the peer's number of channels is 2, ours is 1: both ends need the same");
        assert!(ours.agrees(&ours.agreed().map(|(_, n)| n)).is_ok());
    }
}
