//! The path between two ranks of a host: a file of slots that both have mapped.
//!
//! For each direction: a count of the frames that were put there, the last credit, and the slots. The sender stages into the slot itself, so that
//! a frame is copied in and out and no more.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use unbroken::words::{copy_in, copy_out};
use unbroken::SharedWords;
use unbroken_comm::frame::{Notice, MEMORY};

/// Words before the slots of a direction: two cache lines, for each end the one that it writes.
const HEAD: usize = 16;
const POSTED: usize = 0;
const CREDIT: usize = 8;
/// A credit is there.
const SAID: u64 = 1 << 32;

/// One end of it.
pub(crate) struct MemoryPath {
    words: SharedWords,
    /// Removed when the other end has mapped it, or when this end goes.
    file: Option<PathBuf>,
    out: usize,
    into: usize,
    slot_bytes: usize,
    slots: u64,
    seen: u64,
    credit: u64,
}

fn direction_words(slot_bytes: usize, slots: u64) -> usize {
    HEAD + slots as usize * slot_bytes / 8
}

impl MemoryPath {
    /// Makes the file.
    pub(crate) fn create(slot_bytes: usize, slots: u64) -> unbroken::Result<(MemoryPath, PathBuf)> {
        let mut name = [0; 16];
        rustix::rand::getrandom(&mut name, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| unbroken::Error::os("draw a name", &e.into()))?;
        let shm = PathBuf::from("/dev/shm");
        let folder = if shm.is_dir() { shm } else { std::env::temp_dir() };
        let path = folder.join(format!("unbroken-coll-{:032x}", u128::from_ne_bytes(name)));
        let words = SharedWords::create(&path, 2 * direction_words(slot_bytes, slots))?;
        Ok((MemoryPath::over(words, Some(path.clone()), slot_bytes, slots, true), path))
    }

    /// Maps the other's file, which then needs its name no more.
    pub(crate) fn open(path: PathBuf, slot_bytes: usize, slots: u64) -> unbroken::Result<MemoryPath> {
        let words = SharedWords::open(&path, 2 * direction_words(slot_bytes, slots))?;
        // The other end does the same where this fails.
        let _ = std::fs::remove_file(path);
        Ok(MemoryPath::over(words, None, slot_bytes, slots, false))
    }

    fn over(words: SharedWords, file: Option<PathBuf>, slot_bytes: usize, slots: u64, first: bool) -> MemoryPath {
        let half = direction_words(slot_bytes, slots);
        let (out, into) = if first { (0, half) } else { (half, 0) };
        MemoryPath { words, file, out, into, slot_bytes, slots, seen: 0, credit: 0 }
    }

    fn slot(&self, from: usize, seq: u64) -> usize {
        (from + HEAD) * 8 + (seq % self.slots) as usize * self.slot_bytes
    }

    /// Puts bytes into a slot to be sent.
    pub(crate) fn put(&self, seq: u64, at: usize, bytes: &[u8]) {
        copy_in(&self.words, self.slot(self.out, seq) + at, bytes);
    }

    /// Takes bytes from a slot that came.
    pub(crate) fn get(&self, seq: u64, at: usize, out: &mut [u8]) {
        copy_out(&self.words, self.slot(self.into, seq) + at, out);
    }

    /// The frame is complete.
    pub(crate) fn post(&self, seq: u64) {
        self.words[self.out + POSTED].store(seq + 1, Ordering::Release);
    }

    /// Tells the other end a credit.
    pub(crate) fn notify(&self, notice: u32) {
        self.words[self.out + CREDIT].store(SAID | u64::from(notice), Ordering::Release);
    }

    /// The next notice, if there is one.
    pub(crate) fn poll(&mut self) -> Option<u32> {
        let credit = self.words[self.into + CREDIT].load(Ordering::Acquire);
        if credit != self.credit {
            self.credit = credit;
            return Some(credit as u32);
        }
        if self.words[self.into + POSTED].load(Ordering::Acquire) <= self.seen {
            return None;
        }
        let seq = self.seen;
        self.seen += 1;
        Some(Notice::frame(MEMORY, seq).encode())
    }
}

impl Drop for MemoryPath {
    fn drop(&mut self) {
        if let Some(path) = &self.file {
            // The other end has removed it, mostly.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_and_credits_go_both_ways() {
        let (mut a, path) = MemoryPath::create(128, 4).unwrap();
        let mut b = MemoryPath::open(path.clone(), 128, 4).unwrap();
        assert!(!path.exists());
        for seq in 0..9 {
            a.put(seq, 0, &[seq as u8; 100]);
            a.post(seq);
            assert_eq!(b.poll(), Some(Notice::frame(MEMORY, seq).encode()));
            let mut bytes = [0; 100];
            b.get(seq, 0, &mut bytes);
            assert_eq!(bytes, [seq as u8; 100]);
            b.notify(Notice::credit(MEMORY, seq + 1).encode());
            assert_eq!(a.poll(), Some(Notice::credit(MEMORY, seq + 1).encode()));
        }
        assert_eq!((a.poll(), b.poll()), (None, None));
    }
}
