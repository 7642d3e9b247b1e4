//! Receives in their order, and the protection of what they have left behind.
//!
//! Message *s* has slot *s* mod N and generation (*s* div N) mod G. A slot's life:
//!
//! ```text
//!   free ── post ──► pointed (key of its generation → buffer) ── complete ──► retired (key → nothing, confirmed)
//!    ▲                                                                            │
//!    └────────── the same generation again: not before the packet lifetime ◄──────┘
//! ```
//!
//! *Stage one.* Each generation has a root key, in which message *i* lies at *i*·M; before a
//! completion is told to anybody, the key names nothing there. So a packet that is late finds no
//! memory, whatever its buffer has become meanwhile. (With one root key for all generations, as the
//! paper has it, a late packet would write into the next buffer of its slot: its completion is
//! dropped, but its payload has been placed.)
//!
//! *Stage two.* Completions of another generation are dropped ([`crate::board`]), and the same slot
//! is used again in the same generation only when what was sent to it before cannot be on its way
//! any more: until then [`Receives::post`] says when to come again.
//!
//! Invariants: at most one generation of a slot names a buffer; a message is cleared to be sent
//! only after its slot has been begun and pointed; between the end of a use and the next one in the
//! same generation lies the packet lifetime.

use crate::attr::Layout;
use crate::board::Board;
use crate::mutants::left_out;

/// The keys that peers write by: what the shell has of them.
pub trait Keys<B> {
    /// Why a key could not be changed.
    type Error;
    /// From now on the slot of a generation's root key names this buffer.
    fn point(&mut self, generation: u8, slot: u32, buffer: &B) -> Result<(), Self::Error>;
    /// The slot names nothing. When it returns, nothing from the network touches what it named.
    fn clear(&mut self, generation: u8, slot: u32) -> Result<(), Self::Error>;
}

/// Why a receive was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostError<E> {
    /// All slots are in use: a message has to be completed first.
    Full,
    /// The slot's earlier use is too young: come again at that time.
    Young {
        /// When.
        retry_us: u64,
    },
    /// The message is longer than the longest.
    TooLong {
        /// The longest.
        most: u64,
    },
    /// A key could not be changed.
    Key(E),
}

/// The receives of a queue pair.
pub struct Receives {
    layout: Layout,
    /// The next message.
    next: u64,
    /// The message that each slot has.
    active: Box<[Option<u64>]>,
    /// When each slot was last used in each generation.
    retired_us: Box<[Option<u64>]>,
}

impl Receives {
    /// None yet.
    pub fn new(layout: &Layout) -> Receives {
        let slots = layout.slots as usize;
        Receives {
            layout: *layout,
            next: 0,
            active: vec![None; slots].into(),
            retired_us: vec![None; slots * usize::from(layout.attr().generations)].into(),
        }
    }

    fn use_of(&self, seq: u64) -> usize {
        let generations = usize::from(self.layout.attr().generations);
        self.layout.slot(seq) as usize * generations + usize::from(self.layout.generation(seq))
    }

    /// The number of the next message.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Posts a receive of so many bytes, and gives its message.
    ///
    /// # Errors
    /// [`PostError`]; nothing has changed then.
    pub fn post<B, K: Keys<B>>(
        &mut self,
        now_us: u64,
        bytes: u64,
        buffer: &B,
        board: &Board,
        keys: &mut K,
    ) -> Result<u64, PostError<K::Error>> {
        let (seq, slot) = (self.next, self.layout.slot(self.next));
        if bytes > self.layout.message_bytes {
            return Err(PostError::TooLong { most: self.layout.message_bytes });
        }
        if self.active[slot as usize].is_some() {
            return Err(PostError::Full);
        }
        if let Some(retired_us) =
            self.retired_us[self.use_of(seq)].filter(|_| !left_out!(board.mutation(), NoLifetime))
        {
            let retry_us = retired_us.saturating_add(self.layout.attr().packet_lifetime_us);
            if retry_us > now_us {
                return Err(PostError::Young { retry_us });
            }
        }
        keys.point(self.layout.generation(seq), slot, buffer).map_err(PostError::Key)?;
        board.begin(seq, bytes);
        self.active[slot as usize] = Some(seq);
        self.next += 1;
        Ok(seq)
    }

    /// Whether a message has been posted and not completed.
    pub fn is_active(&self, seq: u64) -> bool {
        self.active[self.layout.slot(seq) as usize] == Some(seq)
    }

    /// Ends a message, however much of it has come. When it returns, nothing from the network
    /// touches its buffer, and its bitmap stands still.
    ///
    /// # Errors
    /// What the shell says where the key could not be changed; the message is active then, and its
    /// buffer must stay.
    pub fn complete<B, K: Keys<B>>(
        &mut self,
        now_us: u64,
        seq: u64,
        board: &Board,
        keys: &mut K,
    ) -> Result<bool, K::Error> {
        if !self.is_active(seq) {
            return Ok(false);
        }
        let slot = self.layout.slot(seq);
        if !left_out!(board.mutation(), KeyStays) {
            keys.clear(self.layout.generation(seq), slot)?;
        }
        board.end(seq);
        self.retired_us[self.use_of(seq)] = Some(now_us);
        self.active[slot as usize] = None;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::Attr;

    #[derive(Default)]
    struct Log(Vec<(u8, u32, Option<char>)>);

    impl Keys<char> for Log {
        type Error = ();
        fn point(&mut self, generation: u8, slot: u32, buffer: &char) -> Result<(), ()> {
            self.0.push((generation, slot, Some(*buffer)));
            Ok(())
        }
        fn clear(&mut self, generation: u8, slot: u32) -> Result<(), ()> {
            self.0.push((generation, slot, None));
            Ok(())
        }
    }

    #[test]
    fn a_slot_is_used_again_in_the_next_generation_and_in_the_same_one_after_the_lifetime() {
        let attr = Attr {
            messages_log2: 1,
            in_flight_log2: 18,
            generations: 2,
            packet_lifetime_us: 100,
            ..Attr::default()
        };
        let layout = Layout::new(&attr).unwrap();
        let (board, mut r, mut keys) =
            (Board::new(&layout), Receives::new(&layout), Log::default());
        let post = |r: &mut Receives, now_us, keys: &mut Log| r.post(now_us, 5, &'b', &board, keys);
        assert_eq!((post(&mut r, 0, &mut keys), post(&mut r, 0, &mut keys)), (Ok(0), Ok(1)));
        assert_eq!(post(&mut r, 0, &mut keys), Err(PostError::Full));
        assert_eq!(r.complete(10, 0, &board, &mut keys), Ok(true));
        assert_eq!(r.complete(10, 0, &board, &mut keys), Ok(false), "once");
        assert_eq!(post(&mut r, 10, &mut keys), Ok(2));
        assert_eq!(keys.0, [(0, 0, Some('b')), (0, 1, Some('b')), (0, 0, None), (1, 0, Some('b'))]);
        r.complete(20, 1, &board, &mut keys).unwrap();
        post(&mut r, 20, &mut keys).unwrap();
        r.complete(30, 2, &board, &mut keys).unwrap();
        assert_eq!(post(&mut r, 30, &mut keys), Err(PostError::Young { retry_us: 110 }));
        assert_eq!(
            (post(&mut r, 109, &mut keys).is_err(), post(&mut r, 110, &mut keys)),
            (true, Ok(4))
        );
        assert!(
            matches!(r.post(200, 1 << 18, &'c', &board, &mut keys), Err(PostError::TooLong { most }) if most == 1 << 17)
        );
    }
}
