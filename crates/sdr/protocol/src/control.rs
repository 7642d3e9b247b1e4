//! Control messages between the two ends: fixed layouts in network byte order, each with the
//! receiver's token.
//!
//! A message begins with a magic number, a version, its kind, and a token. The receiver chose the
//! token at random and sent it to its peer when they connected. A message with another token is
//! counted and dropped. The end that needs an answer repeats its message, and duplicates have no
//! effect, so control messages need no acknowledgements of their own. (The token keeps out senders
//! who cannot see the wire. It is not cryptography.)
//!
//! Every list is limited by [`MAX_BYTES`]. A datagram that is too long, too short or out of range
//! is not a message.

use crate::attr::MAX_CHANNELS;

/// The longest message.
pub const MAX_BYTES: usize = 1024;
/// The most receives that one message announces, if receives have no keys.
pub const MAX_CLEARED: usize = 64;
/// The most receives that one message announces, if each has a key for each channel.
pub fn max_cleared(channels: usize) -> usize {
    match channels {
        0 => MAX_CLEARED,
        _ => (MAX_BYTES - HEAD - CLEAR_HEAD) / (8 + 4 * channels),
    }
}
/// The most bytes of a bitmap in one message.
pub const MAX_BITMAP: usize = 960;
/// The most ranges in one message.
pub const MAX_RANGES: usize = 100;
const MAGIC: u16 = 0x5344;
const VERSION: u8 = 1;
const HEAD: usize = 12;
/// What stands in a message that clears receives with keys before the first of them.
const CLEAR_HEAD: usize = 8 + 8 + 2 + 2;

/// The unit of a list of missing data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Chunks of the data.
    Chunks,
    /// Submessages that cannot be recovered.
    Submessages,
}

/// Why an end aborts a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// The deadline has passed.
    Deadline = 1,
    /// The data is longer than the receive.
    TooLong = 2,
    /// The receiver does not support the scheme.
    Scheme = 3,
    /// The program cancelled it.
    Cancelled = 4,
}

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    /// Announces posted receives, from message `first` on, with their lengths in bytes.
    Clear {
        /// The first message.
        first: u64,
        /// The receiver's clock, which the answer returns.
        stamp_us: u64,
        /// The length of each receive, in bytes.
        bytes: Vec<u64>,
        /// The keys of each receive, one for each channel; empty if the root keys of the
        /// generations are used.
        rkeys: Vec<u32>,
    },
    /// Acknowledges all receives before `next`.
    Cleared {
        /// The first message that has not been announced.
        next: u64,
        /// The stamp of [`Control::Clear`].
        stamp_us: u64,
    },
    /// Begins a reliable write, or asks for its state.
    Begin {
        /// The message with its data.
        seq: u64,
        /// Its length in bytes.
        bytes: u64,
        /// The scheme: 0, 1, or the id of a code.
        scheme: u32,
        /// Time to inject a chunk, in ns.
        injection_ns: u32,
        /// The round trip that the sender has measured, in µs.
        rtt_us: u32,
        /// The sender's clock, which the answer returns.
        stamp_us: u64,
    },
    /// Acknowledges chunks.
    Ack {
        /// The data's message.
        seq: u64,
        /// The last stamp that was heard.
        stamp_us: u64,
        /// All chunks before this one have arrived.
        cumulative: u32,
        /// A bit for each chunk from there on, the lowest first.
        bitmap: Vec<u8>,
    },
    /// Names missing data, which the sender must retransmit.
    Nack {
        /// The data's message.
        seq: u64,
        /// The unit of the ranges.
        of: Missing,
        /// The first item and the length of each range.
        ranges: Vec<(u32, u32)>,
    },
    /// The write is complete: all data is in place.
    Done {
        /// The data's message.
        seq: u64,
        /// The last stamp that was heard.
        stamp_us: u64,
        /// Data chunks that had not arrived by then.
        missing: u32,
    },
    /// Aborts the message.
    Abort {
        /// The data's message.
        seq: u64,
        /// Whether the sender of the data aborts; otherwise the receiver does.
        by_sender: bool,
        /// The reason.
        reason: Reason,
    },
}

/// The result of reading a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// A message from the peer.
    Message(Control),
    /// The token is wrong.
    Stranger,
    /// The datagram is malformed.
    Garbage,
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_at_checked(N)?;
        self.0 = rest;
        head.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_be_bytes)
    }

    /// A list with a length prefix.
    fn list<T>(
        &mut self,
        most: usize,
        mut item: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        let count = usize::from(self.u16()?);
        if count > most {
            return None;
        }
        (0..count).map(|_| item(self)).collect()
    }
}

impl Control {
    /// Encodes the message for the end with this token.
    pub fn encode(&self, token: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        out.extend(MAGIC.to_be_bytes());
        out.extend([VERSION, self.kind()]);
        out.extend(token.to_be_bytes());
        debug_assert_eq!(out.len(), HEAD);
        self.encode_body(&mut out);
        debug_assert!(out.len() <= MAX_BYTES);
        out
    }

    fn kind(&self) -> u8 {
        match self {
            Control::Clear { rkeys, .. } if rkeys.is_empty() => 1,
            Control::Clear { .. } => 8,
            Control::Cleared { .. } => 2,
            Control::Begin { .. } => 3,
            Control::Ack { .. } => 4,
            Control::Nack { .. } => 5,
            Control::Done { .. } => 6,
            Control::Abort { .. } => 7,
        }
    }

    fn encode_body(&self, out: &mut Vec<u8>) {
        let long = |out: &mut Vec<u8>, values: &[u64]| {
            values.iter().for_each(|v| out.extend(v.to_be_bytes()))
        };
        let word = |out: &mut Vec<u8>, values: &[u32]| {
            values.iter().for_each(|v| out.extend(v.to_be_bytes()))
        };
        let count = |out: &mut Vec<u8>, n: usize| out.extend((n as u16).to_be_bytes());
        match self {
            Control::Clear { first, stamp_us, bytes, rkeys } if !rkeys.is_empty() => {
                let channels = rkeys.len() / bytes.len().max(1);
                let bytes = &bytes[..bytes.len().min(max_cleared(channels))];
                long(out, &[*first, *stamp_us]);
                count(out, channels);
                count(out, bytes.len());
                long(out, bytes);
                word(out, &rkeys[..bytes.len() * channels]);
            }
            Control::Clear { first, stamp_us, bytes, .. } => {
                let bytes = &bytes[..bytes.len().min(MAX_CLEARED)];
                long(out, &[*first, *stamp_us]);
                count(out, bytes.len());
                long(out, bytes);
            }
            Control::Cleared { next, stamp_us } => long(out, &[*next, *stamp_us]),
            Control::Begin { seq, bytes, scheme, injection_ns, rtt_us, stamp_us } => {
                long(out, &[*seq, *bytes]);
                word(out, &[*scheme, *injection_ns, *rtt_us]);
                long(out, &[*stamp_us]);
            }
            Control::Ack { seq, stamp_us, cumulative, bitmap } => {
                let bitmap = &bitmap[..bitmap.len().min(MAX_BITMAP)];
                long(out, &[*seq, *stamp_us]);
                word(out, &[*cumulative]);
                count(out, bitmap.len());
                out.extend(bitmap);
            }
            Control::Nack { seq, of, ranges } => {
                let ranges = &ranges[..ranges.len().min(MAX_RANGES)];
                long(out, &[*seq]);
                out.push(if *of == Missing::Chunks { 0 } else { 1 });
                count(out, ranges.len());
                ranges.iter().for_each(|(first, n)| word(out, &[*first, *n]));
            }
            Control::Done { seq, stamp_us, missing } => {
                long(out, &[*seq, *stamp_us]);
                word(out, &[*missing]);
            }
            Control::Abort { seq, by_sender, reason } => {
                long(out, &[*seq]);
                out.extend([u8::from(*by_sender), *reason as u8]);
            }
        }
    }

    /// Decodes a datagram at the end with this token.
    pub fn decode(datagram: &[u8], token: u64) -> Heard {
        let mut r = Reader(datagram);
        if datagram.len() > MAX_BYTES || r.u16() != Some(MAGIC) || r.u8() != Some(VERSION) {
            return Heard::Garbage;
        }
        let (Some(kind), Some(theirs)) = (r.u8(), r.u64()) else { return Heard::Garbage };
        if theirs != token {
            return Heard::Stranger;
        }
        match Control::decode_body(kind, &mut r) {
            Some(message) if r.0.is_empty() => Heard::Message(message),
            _ => Heard::Garbage,
        }
    }

    fn decode_body(kind: u8, r: &mut Reader<'_>) -> Option<Control> {
        Some(match kind {
            1 => Control::Clear {
                first: r.u64()?,
                stamp_us: r.u64()?,
                bytes: r.list(MAX_CLEARED, Reader::u64)?,
                rkeys: Vec::new(),
            },
            2 => Control::Cleared { next: r.u64()?, stamp_us: r.u64()? },
            3 => Control::Begin {
                seq: r.u64()?,
                bytes: r.u64()?,
                scheme: r.u32()?,
                injection_ns: r.u32()?,
                rtt_us: r.u32()?,
                stamp_us: r.u64()?,
            },
            4 => Control::Ack {
                seq: r.u64()?,
                stamp_us: r.u64()?,
                cumulative: r.u32()?,
                bitmap: r.list(MAX_BITMAP, Reader::u8)?,
            },
            5 => Control::Nack {
                seq: r.u64()?,
                of: match r.u8()? {
                    0 => Missing::Chunks,
                    1 => Missing::Submessages,
                    _ => return None,
                },
                ranges: r.list(MAX_RANGES, |r| Some((r.u32()?, r.u32()?)))?,
            },
            6 => Control::Done { seq: r.u64()?, stamp_us: r.u64()?, missing: r.u32()? },
            7 => Control::Abort {
                seq: r.u64()?,
                by_sender: match r.u8()? {
                    0 => false,
                    1 => true,
                    _ => return None,
                },
                reason: match r.u8()? {
                    1 => Reason::Deadline,
                    2 => Reason::TooLong,
                    3 => Reason::Scheme,
                    4 => Reason::Cancelled,
                    _ => return None,
                },
            },
            8 => {
                let (first, stamp_us, channels) = (r.u64()?, r.u64()?, usize::from(r.u16()?));
                if !(1..=usize::from(MAX_CHANNELS)).contains(&channels) {
                    return None;
                }
                let bytes = r.list(max_cleared(channels), Reader::u64)?;
                if bytes.is_empty() {
                    return None;
                }
                let rkeys = (0..bytes.len() * channels).map(|_| r.u32()).collect::<Option<_>>()?;
                Control::Clear { first, stamp_us, bytes, rkeys }
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Control> {
        let seq = 0x0102_0304_0506_0708;
        vec![
            Control::Clear {
                first: seq,
                stamp_us: 9,
                bytes: (0..MAX_CLEARED as u64).collect(),
                rkeys: vec![],
            },
            Control::Clear {
                first: seq,
                stamp_us: 9,
                bytes: vec![7; max_cleared(1)],
                rkeys: vec![8; max_cleared(1)],
            },
            Control::Clear {
                first: seq,
                stamp_us: 9,
                bytes: vec![7; max_cleared(64)],
                rkeys: vec![8; 64 * max_cleared(64)],
            },
            Control::Cleared { next: seq, stamp_us: 9 },
            Control::Begin {
                seq,
                bytes: 1 << 40,
                scheme: 0x0120_0800,
                injection_ns: 7,
                rtt_us: 8,
                stamp_us: 9,
            },
            Control::Ack { seq, stamp_us: 9, cumulative: 77, bitmap: vec![0xa5; MAX_BITMAP] },
            Control::Nack { seq, of: Missing::Chunks, ranges: vec![(1, 2); MAX_RANGES] },
            Control::Nack { seq, of: Missing::Submessages, ranges: vec![] },
            Control::Done { seq, stamp_us: 9, missing: 3 },
            Control::Abort { seq, by_sender: true, reason: Reason::TooLong },
        ]
    }

    #[test]
    fn what_is_said_is_heard() {
        for message in samples() {
            let bytes = message.encode(42);
            assert!(bytes.len() <= MAX_BYTES);
            assert_eq!(Control::decode(&bytes, 42), Heard::Message(message.clone()));
            assert_eq!(Control::decode(&bytes, 43), Heard::Stranger);
        }
    }

    #[test]
    fn what_is_cut_or_lengthened_is_no_message() {
        for message in samples() {
            let bytes = message.encode(1);
            for len in 0..bytes.len() {
                assert!(
                    !matches!(Control::decode(&bytes[..len], 1), Heard::Message(_)),
                    "{message:?} cut to {len}"
                );
            }
            let longer = [&bytes[..], &[0]].concat();
            assert_eq!(Control::decode(&longer, 1), Heard::Garbage);
        }
        assert_eq!(Control::decode(&[0; 4096], 1), Heard::Garbage);
    }

    proptest::proptest! {
        /// Whatever comes: no panic, and what is a message says the same bytes again.
        #[test]
        fn anything_may_come(bytes: Vec<u8>, kind in 0u8..10) {
            let mut datagram = vec![0x53, 0x44, VERSION, kind];
            datagram.extend([0; 8]);
            datagram.extend(&bytes);
            if let Heard::Message(m) = Control::decode(&datagram, 0) {
                proptest::prop_assert_eq!(m.encode(0), datagram);
            }
            Control::decode(&bytes, 0);
        }
    }
}
