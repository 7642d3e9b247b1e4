//! A link as people know it, and as the model sees it.

/// Light's speed as distances are turned into times, metres a second: in vacuum, as the paper does
/// (3750 km are 25 ms there and back). In fibre light is a third slower, and cables are no straight
/// lines: a round trip that was measured is better.
pub const LIGHT_M_PER_S: f64 = 3e8;

/// The highest loss of a chunk that is modelled; beyond it nothing gets through in any useful time.
const HIGHEST_LOSS: f64 = 0.99;

/// A probability of loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    /// Of each packet: a chunk is lost when one of its packets is.
    Packet(f64),
    /// Of each chunk.
    Chunk(f64),
}

/// A link between two datacentres, and how messages are cut for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bandwidth in bits a second.
    pub bandwidth_bps: f64,
    /// Round trip in seconds.
    pub rtt_s: f64,
    /// Loss.
    pub loss: Loss,
    /// Bytes of a packet's payload.
    pub mtu_bytes: u64,
    /// Bytes of a chunk, a multiple of the packet's.
    pub chunk_bytes: u64,
}

/// Why a link cannot be modelled.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum LinkError {
    /// No bandwidth.
    #[error("a bandwidth of {0} bit/s; more than 0 is right")]
    Bandwidth(f64),
    /// A negative round trip, or none.
    #[error("a round trip of {0} s; 0 or more is right")]
    Rtt(f64),
    /// No probability.
    #[error("a loss of {0}; a probability from 0 to 1 is right, such as 1e-5")]
    Loss(f64),
    /// Nearly everything is lost.
    #[error(
        "{0:.4} of all chunks would be lost; up to {HIGHEST_LOSS} is modelled: lower the loss, or \
         make chunks smaller"
    )]
    Hopeless(f64),
    /// Chunks that are not made of whole packets.
    #[error(
        "chunks of {chunk} bytes with packets of {mtu}; a chunk is a multiple of a packet, such as \
         65536 of 4096"
    )]
    Chunk {
        /// Bytes of a chunk.
        chunk: u64,
        /// Bytes of a packet.
        mtu: u64,
    },
}

impl Default for Link {
    /// The paper's: 400 Gbit/s, 25 ms, packets of 4 KiB, chunks of 64 KiB; one packet in 10^5 is
    /// lost.
    fn default() -> Link {
        Link {
            bandwidth_bps: 400e9,
            rtt_s: 25e-3,
            loss: Loss::Packet(1e-5),
            mtu_bytes: 4096,
            chunk_bytes: 65536,
        }
    }
}

impl Link {
    /// The round trip over a distance at [`LIGHT_M_PER_S`].
    pub fn rtt_of_distance_s(distance_m: f64) -> f64 {
        2.0 * distance_m / LIGHT_M_PER_S
    }

    /// The channel that chunks see.
    ///
    /// # Errors
    /// [`LinkError`], where a quantity makes no sense.
    pub fn channel(&self) -> Result<Channel, LinkError> {
        if !(self.bandwidth_bps > 0.0 && self.bandwidth_bps.is_finite()) {
            return Err(LinkError::Bandwidth(self.bandwidth_bps));
        }
        if !(self.rtt_s >= 0.0 && self.rtt_s.is_finite()) {
            return Err(LinkError::Rtt(self.rtt_s));
        }
        let (Loss::Packet(p) | Loss::Chunk(p)) = self.loss;
        if !(0.0..=1.0).contains(&p) {
            return Err(LinkError::Loss(p));
        }
        if self.mtu_bytes == 0
            || self.chunk_bytes == 0
            || !self.chunk_bytes.is_multiple_of(self.mtu_bytes)
        {
            return Err(LinkError::Chunk { chunk: self.chunk_bytes, mtu: self.mtu_bytes });
        }
        let loss = match self.loss {
            Loss::Packet(p) => chunk_loss(p, self.chunk_bytes / self.mtu_bytes),
            Loss::Chunk(p) => p,
        };
        if loss > HIGHEST_LOSS {
            return Err(LinkError::Hopeless(loss));
        }
        Ok(Channel {
            injection_s: 8.0 * self.chunk_bytes as f64 / self.bandwidth_bps,
            rtt_s: self.rtt_s,
            loss,
        })
    }

    /// The chunks of a message, the last one filled up; an empty message takes one.
    pub fn chunks(&self, message_bytes: u64) -> u64 {
        message_bytes.div_ceil(self.chunk_bytes).max(1)
    }
}

/// The loss of a chunk of so many packets: `1 − (1 − p)^N`.
pub fn chunk_loss(packet_loss: f64, packets: u64) -> f64 {
    -f64::exp_m1(packets as f64 * f64::ln_1p(-packet_loss))
}

/// A link as the model sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Channel {
    /// Time to put a chunk on the wire, in seconds: `T_inj`.
    pub injection_s: f64,
    /// Round trip in seconds.
    pub rtt_s: f64,
    /// Probability that a chunk is lost.
    pub loss: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_the_papers() {
        let channel = Link::default().channel().unwrap();
        assert_eq!(Link::rtt_of_distance_s(3_750e3), 25e-3);
        assert!((channel.injection_s - 1.31072e-6).abs() < 1e-18);
        // Figure 15: 16 packets at 10^-5.
        assert!((channel.loss - 1.59988e-4).abs() < 1e-9);
    }

    #[test]
    fn tiny_losses_keep_their_digits() {
        assert!((chunk_loss(1e-18, 16) / 16e-18 - 1.0).abs() < 1e-12);
        assert_eq!((chunk_loss(0.0, 16), chunk_loss(1.0, 16)), (0.0, 1.0));
    }

    #[test]
    fn chunks_are_whole() {
        let link = Link::default();
        assert_eq!(
            [0, 1, 65536, 65537, 128 << 20].map(|bytes| link.chunks(bytes)),
            [1, 1, 1, 2, 2048]
        );
    }

    #[test]
    fn nonsense_is_refused_with_what_is_right() {
        let default = Link::default();
        let error = |link: Link| link.channel().unwrap_err().to_string();
        assert!(error(Link { bandwidth_bps: 0.0, ..default }).contains("more than 0"));
        assert!(error(Link { bandwidth_bps: f64::INFINITY, ..default }).contains("more than 0"));
        assert!(error(Link { rtt_s: -1.0, ..default }).contains("0 or more"));
        assert!(error(Link { rtt_s: f64::NAN, ..default }).contains("0 or more"));
        assert!(error(Link { loss: Loss::Packet(1.5), ..default }).contains("from 0 to 1"));
        assert!(error(Link { loss: Loss::Chunk(f64::NAN), ..default }).contains("from 0 to 1"));
        assert!(error(Link { loss: Loss::Packet(0.3), ..default }).contains(
            "0.9967 of all \
                                                                             chunks"
        ));
        assert!(error(Link { chunk_bytes: 5000, ..default }).contains("multiple of a packet"));
        assert!(error(Link { chunk_bytes: 0, ..default }).contains("multiple of a packet"));
    }
}
