//! The management datagram around a message.

use crate::fields::{Body, BODY_BYTES};
use crate::message::Message;

/// Bytes of a management datagram.
pub const MAD_BYTES: usize = 256;
const HEADER_BYTES: usize = MAD_BYTES - BODY_BYTES;
const BASE_VERSION: u8 = 1;
/// Communication management.
const CLASS: u8 = 0x07;
const CLASS_VERSION: u8 = 2;
const METHOD_SEND: u8 = 0x03;

/// A message and the transaction that it belongs to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mad {
    /// Chosen by who began the exchange; messages that are sent again have the same one.
    pub transaction: u64,
    /// What it says.
    pub message: Message,
}

impl Mad {
    /// Reads a datagram; `None` where it is no message of the CM. (InfiniBand Architecture
    /// Specification, volume 1, 13.4.3 and 12.6.)
    pub fn parse(bytes: &[u8]) -> Option<Mad> {
        let bytes: &[u8; MAD_BYTES] = bytes.first_chunk()?;
        if bytes[..4] != [BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND] {
            return None;
        }
        let transaction = u64::from_be_bytes(bytes[8..16].try_into().ok()?);
        let attribute = u16::from_be_bytes([bytes[16], bytes[17]]);
        let mut body = Body::empty();
        body.0.copy_from_slice(&bytes[HEADER_BYTES..]);
        Some(Mad { transaction, message: Message::parse(attribute, &body)? })
    }

    /// The datagram.
    pub fn encode(&self) -> [u8; MAD_BYTES] {
        let mut out = [0; MAD_BYTES];
        out[..4].copy_from_slice(&[BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND]);
        out[8..16].copy_from_slice(&self.transaction.to_be_bytes());
        out[16..18].copy_from_slice(&self.message.attribute().to_be_bytes());
        out[HEADER_BYTES..].copy_from_slice(&self.message.encode().0);
        out
    }
}
