//! What bfdd knows of its neighbours, as soon as it knows it: over the control socket of FRR's
//! bfdd.
//!
//! A message is a header of 8 bytes (length of the rest, big-endian; number; type; version) and
//! JSON.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;

use serde_json::Value;

const HEADER: usize = 8;
const NOTIFY: u8 = 4;
const VERSION: u8 = 1;
/// Changes of the state of any neighbour.
const PEER_STATE: u64 = 1;
const LARGEST: usize = 1 << 16;
/// In one turn.
const READS: usize = 64;
/// More neighbours than a switch has links.
const MOST_PEERS: usize = 1 << 12;

/// A subscription.
pub struct Bfd {
    stream: UnixStream,
    unread: Vec<u8>,
    /// The last state of each neighbour.
    pub states: BTreeMap<Ipv4Addr, String>,
}

impl Bfd {
    /// Subscribes, over a connection that does not block.
    pub fn open(mut stream: UnixStream) -> Result<Bfd, std::io::Error> {
        let mut message = Vec::from(8u32.to_be_bytes());
        message.extend([0, 1, NOTIFY, VERSION]);
        message.extend(PEER_STATE.to_ne_bytes());
        stream.write_all(&message)?;
        Ok(Bfd { stream, unread: Vec::new(), states: BTreeMap::new() })
    }

    /// The file to wait for.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Reads what there is; gives the neighbours whose state has changed.
    pub fn read(&mut self) -> Result<Vec<(Ipv4Addr, String)>, std::io::Error> {
        let mut buffer = [0; 4096];
        // What is left is read at the next turn: other work comes in between, whatever is sent.
        for _ in 0..READS {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.unread.extend(&buffer[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let mut changes = Vec::new();
        while let Some((kind, text)) = take(&mut self.unread)? {
            if kind != NOTIFY {
                continue;
            }
            if let Some((peer, state)) = status(&text) {
                if self.states.len() >= MOST_PEERS && !self.states.contains_key(&peer) {
                    continue;
                }
                if self.states.insert(peer, state.clone()).as_ref() != Some(&state) {
                    changes.push((peer, state));
                }
            }
        }
        Ok(changes)
    }
}

/// The first whole message, if there is one.
fn take(unread: &mut Vec<u8>) -> Result<Option<(u8, Vec<u8>)>, std::io::Error> {
    let Some(header) = unread.get(..HEADER) else { return Ok(None) };
    let length = u32::from_be_bytes([header[0], header[1], header[2], header[3]]) as usize;
    let kind = header[6];
    if length > LARGEST {
        return Err(std::io::Error::new(
            ErrorKind::InvalidData,
            "bfdd sends a message that is too long",
        ));
    }
    if unread.len() < HEADER + length {
        return Ok(None);
    }
    let text = unread[HEADER..HEADER + length].to_vec();
    unread.drain(..HEADER + length);
    Ok(Some((kind, text)))
}

fn status(text: &[u8]) -> Option<(Ipv4Addr, String)> {
    let value: Value = serde_json::from_slice(text).ok()?;
    let field = |name: &str| value[name].as_str();
    if field("op")? != "status" {
        return None;
    }
    Some((field("peer-address")?.parse().ok()?, field("state")?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_cut_out_of_the_stream() {
        let text = br#"{"op":"status","peer-address":"10.1.1.0","state":"down"}"#;
        let mut whole = Vec::from((text.len() as u32).to_be_bytes());
        whole.extend([0, 0, NOTIFY, VERSION]);
        whole.extend(text);
        let mut unread = whole[..20].to_vec();
        assert!(take(&mut unread).unwrap().is_none());
        unread.extend(&whole[20..]);
        unread.push(0);
        let (kind, text) = take(&mut unread).unwrap().unwrap();
        assert_eq!((kind, unread.len()), (NOTIFY, 1));
        assert_eq!(status(&text), Some(("10.1.1.0".parse().unwrap(), "down".to_owned())));
        assert!(take(&mut vec![0xff; 8]).is_err());
        assert_eq!(status(b"{}"), None);
    }
}
