//! Work requests that are being built, in buffers that are kept from batch to batch.
//!
//! A mistake (a setter without a request, too much data) is remembered and makes the whole batch
//! fail. Whatever makes it fail, a full queue, too: nothing of the batch is posted then.

use crate::limits::{KNOWN_FLAGS, MAX_INLINE};
use std::ops::Range;
use unbroken_types::{QpCaps, SendFlags, SendOpcode, Sge};
use unbroken_verbs::{Error, Result, SendBatch, SendWr, UdDest};

/// A request that is being built.
pub struct Built {
    pub wr_id: u64,
    pub opcode: SendOpcode,
    pub flags: SendFlags,
    pub imm_data: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub compare_add: u64,
    pub swap: u64,
    pub sges: Range<usize>,
    /// Bytes of inline data, where the data is given that way.
    pub inline: Option<Range<usize>>,
    pub ud: Option<UdDest>,
}

/// The batch between `wr_start` and `wr_complete`; touched under the QP's lock alone.
pub struct Builder {
    caps: QpCaps,
    requests: Vec<Built>,
    sges: Vec<Sge>,
    bytes: Vec<u8>,
    mistake: Option<Error>,
}

impl Builder {
    /// An empty batch of a QP with these queue sizes.
    pub fn new(caps: QpCaps) -> Builder {
        Builder { caps, requests: Vec::new(), sges: Vec::new(), bytes: Vec::new(), mistake: None }
    }

    /// Forgets what was built.
    #[inline]
    pub fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.bytes.clear();
        self.mistake = None;
    }

    /// Remembers a mistake.
    #[inline]
    pub fn wrong(&mut self, e: Error) {
        // the first mistake is the one to tell
        self.mistake.get_or_insert(e);
    }

    /// Opens a request.
    #[inline]
    pub fn open(&mut self, wr_id: u64, flags: u32, opcode: SendOpcode) -> &mut Built {
        if self.requests.len() >= self.caps.max_send_wr as usize {
            // Bounded by the queue: the last one is overwritten, and the batch fails.
            self.wrong(Error::no_room(
                "more work requests in a batch than the send queue has entries",
            ));
            self.requests.pop();
        }
        // Inline is not a flag here but a way of giving data.
        if flags & !KNOWN_FLAGS != 0 {
            self.wrong(Error::invalid(format!(
                "wr_flags {flags:#x}: fence, signaled, solicited are known"
            )));
        }
        let flags = SendFlags(flags & !SendFlags::INLINE.0);
        self.requests.push(Built {
            wr_id,
            opcode,
            flags,
            imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            sges: 0..0,
            inline: None,
            ud: None,
        });
        self.requests.last_mut().expect("just pushed")
    }

    /// The request that is open; without one it is a mistake.
    #[inline]
    pub fn last(&mut self) -> Option<&mut Built> {
        if self.requests.is_empty() {
            self.wrong(Error::invalid("a wr_set_* call without a work request before it"));
        }
        self.requests.last_mut()
    }

    /// Gives the open request its data, by address.
    #[inline]
    pub fn set_sges(&mut self, list: &[Sge]) {
        if list.len() > self.caps.max_send_sge as usize {
            return self.wrong(Error::invalid(format!(
                "{} scatter/gather entries: this QP has max_send_sge {}",
                list.len(),
                self.caps.max_send_sge
            )));
        }
        let start = self.sges.len();
        self.sges.extend_from_slice(list);
        let end = self.sges.len();
        if let Some(wr) = self.last() {
            wr.sges = start..end;
            wr.inline = None;
        }
    }

    /// Gives the open request its data, copied.
    pub fn set_inline<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) {
        let start = self.bytes.len();
        let max = (self.caps.max_inline_data as usize).min(MAX_INLINE);
        for part in parts {
            if part.len() > max - (self.bytes.len() - start) {
                return self.wrong(Error::invalid(format!(
                    "inline data of more than {max} bytes, this QP's most"
                )));
            }
            self.bytes.extend_from_slice(part);
        }
        let end = self.bytes.len();
        if let Some(wr) = self.last() {
            wr.inline = Some(start..end);
        }
    }

    /// Gives the batch to `post`, unless there was a mistake.
    pub fn post(&mut self, post: impl FnOnce(&dyn SendBatch) -> Result<()>) -> Result<()> {
        match self.mistake.take() {
            Some(e) => Err(e),
            None if self.requests.is_empty() => Ok(()),
            None => post(self),
        }
    }
}

impl SendBatch for Builder {
    fn count(&self) -> usize {
        self.requests.len()
    }

    fn wr(&self, index: usize) -> SendWr<'_> {
        let b = &self.requests[index];
        let inline_data = b.inline.clone().map(|r| &self.bytes[r]);
        let flags = if inline_data.is_some() { b.flags.with(SendFlags::INLINE) } else { b.flags };
        SendWr {
            wr_id: b.wr_id,
            opcode: b.opcode,
            flags,
            imm_data: b.imm_data,
            remote_addr: b.remote_addr,
            rkey: b.rkey,
            compare_add: b.compare_add,
            swap: b.swap,
            sges: &self.sges[b.sges.clone()],
            inline_data,
            ud: b.ud,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> Builder {
        Builder::new(QpCaps {
            max_send_wr: 2,
            max_send_sge: 1,
            max_inline_data: 8,
            ..QpCaps::default()
        })
    }

    #[test]
    fn a_batch_is_posted_in_order_with_its_data() {
        let mut b = builder();
        b.open(1, SendFlags::SIGNALED.0, SendOpcode::Send);
        b.set_inline([&b"ab"[..], &b"cd"[..]].into_iter());
        b.open(2, 0, SendOpcode::Write).rkey = 9;
        b.set_sges(&[Sge { addr: 1, length: 2, lkey: 3 }]);
        let mut seen = Vec::new();
        b.post(|batch| {
            for wr in (0..batch.count()).map(|i| batch.wr(i)) {
                seen.push((
                    wr.wr_id,
                    wr.rkey,
                    wr.inline_data.map(<[u8]>::to_vec),
                    wr.sges.to_vec(),
                ));
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(seen[0], (1, 0, Some(b"abcd".to_vec()), vec![]));
        assert_eq!(seen[1], (2, 9, None, vec![Sge { addr: 1, length: 2, lkey: 3 }]));
    }

    #[test]
    fn a_mistake_posts_nothing() {
        let mistakes: [fn(&mut Builder); 4] = [
            |b| b.set_sges(&[]),
            |b| {
                b.open(1, 0, SendOpcode::Send);
                b.set_inline(std::iter::once(&[0u8; 9][..]));
            },
            |b| {
                b.open(1, 0, SendOpcode::Send);
                b.set_sges(&[Sge::default(), Sge::default()]);
            },
            |b| {
                for i in 0..3 {
                    b.open(i, 0, SendOpcode::Send);
                }
            },
        ];
        for mistake in mistakes {
            let mut b = builder();
            mistake(&mut b);
            assert!(b.post(|_| panic!("posted")).is_err());
            b.clear();
            assert!(b.post(|_| panic!("posted")).is_ok());
        }
    }
}
