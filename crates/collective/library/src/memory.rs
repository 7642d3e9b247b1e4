//! The path between two ranks of a host: a file of slots that both have mapped.
//!
//! For each direction: a count of the frames that were put there, the last credit, and the slots.
//! The sender stages into the slot itself, so that a frame is copied in and out and no more.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use unbroken::words::{copy_in, copy_out};
use unbroken::SharedWords;
use unbroken_collective_protocol::frame::{Notice, MEMORY};

use crate::auth::{derive, draw, Secret};
use crate::error::Result as Outcome;

/// Words before the slots of a direction: two cache lines, for each end the one that it writes.
const HEAD: usize = 16;
const POSTED: usize = 0;
const CREDIT: usize = 8;
/// A credit is there.
const SAID: u64 = 1 << 32;

/// Where memory that ranks of a host share has its names.
fn folder() -> PathBuf {
    let shm = PathBuf::from("/dev/shm");
    if shm.is_dir() {
        shm
    } else {
        std::env::temp_dir()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Tells which ranks can open each other's memory: those that find the same number in the same
/// file. Ranks of one host whose `/dev/shm` are not one (containers), or that are of different
/// users, find different ones.
pub(crate) struct Anchor {
    nonce: String,
    file: PathBuf,
}

impl Anchor {
    /// The job's, made by the first rank that looks for it. Others cannot foresee its name.
    pub(crate) fn find(secret: &Secret) -> Outcome<Anchor> {
        Anchor::find_in(&folder(), secret)
    }

    fn find_in(folder: &Path, secret: &Secret) -> Outcome<Anchor> {
        let file =
            folder.join(format!("unbroken-host-{}", hex(&derive(secret, "ubcoll host")[..16])));
        let (own, fresh) =
            (hex(&draw::<16>()?), folder.join(format!("unbroken-new-{}", hex(&draw::<16>()?))));
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh);
        if made.and_then(|mut made| made.write_all(own.as_bytes())).is_ok() {
            // Whole, or not at all; who finds one there takes that.
            let _ = std::fs::hard_link(&fresh, &file);
        }
        let _ = std::fs::remove_file(&fresh);
        // A rank that cannot read it shares no memory with any other, and goes over NICs.
        let nonce = read_anchor(&file, own.len()).unwrap_or(own);
        Ok(Anchor { nonce, file })
    }

    /// The same at ranks that can open each other's memory.
    pub(crate) fn nonce(&self) -> &str {
        &self.nonce
    }
}

impl Drop for Anchor {
    fn drop(&mut self) {
        // All ranks do that, when they have met or have given up.
        let _ = std::fs::remove_file(&self.file);
    }
}

fn read_anchor(file: &Path, bytes: usize) -> Option<String> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file: File =
        OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(file).ok()?;
    let found = file.metadata().ok()?;
    let mine = found.is_file() && found.uid() == rustix::process::geteuid().as_raw();
    let mut text = String::new();
    file.take(bytes as u64 + 1).read_to_string(&mut text).ok()?;
    (mine && text.len() == bytes).then_some(text)
}

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
        let path = folder().join(format!("unbroken-coll-{}", hex(&name)));
        let words = SharedWords::create(&path, 2 * direction_words(slot_bytes, slots))?;
        Ok((MemoryPath::over(words, Some(path.clone()), slot_bytes, slots, true), path))
    }

    /// Maps the other's file, which then needs its name no more.
    pub(crate) fn open(
        path: PathBuf,
        slot_bytes: usize,
        slots: u64,
    ) -> unbroken::Result<MemoryPath> {
        let words = SharedWords::open(&path, 2 * direction_words(slot_bytes, slots))?;
        // The other end does the same where this fails.
        let _ = std::fs::remove_file(path);
        Ok(MemoryPath::over(words, None, slot_bytes, slots, false))
    }

    fn over(
        words: SharedWords,
        file: Option<PathBuf>,
        slot_bytes: usize,
        slots: u64,
        first: bool,
    ) -> MemoryPath {
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
    fn ranks_that_see_one_folder_find_one_number_and_others_another() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let find = |folder: &Path, job| Anchor::find_in(folder, &[job; 16]).unwrap();
        let ranks: Vec<Anchor> = (0..3).map(|_| find(here.path(), 1)).collect();
        assert!(ranks
            .iter()
            .all(|rank| rank.nonce() == ranks[0].nonce() && rank.nonce().len() == 32));
        let (other, elsewhere) = (find(here.path(), 2), find(there.path(), 1));
        assert!(other.nonce() != ranks[0].nonce() && elsewhere.nonce() != ranks[0].nonce());
        assert_ne!(
            find(Path::new("/proc/nowhere"), 1).nonce(),
            find(Path::new("/proc/nowhere"), 1).nonce()
        );
        drop((ranks, other, elsewhere));
        assert_eq!(
            here.path().read_dir().unwrap().count() + there.path().read_dir().unwrap().count(),
            0
        );
    }

    /// What somebody else has put in its place is not believed, nor waited for.
    #[test]
    fn an_anchor_that_is_a_link_or_too_long_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let name = Anchor::find_in(folder.path(), &[1; 16]).unwrap().file.clone();
        std::fs::write(folder.path().join("real"), "0".repeat(32)).unwrap();
        std::os::unix::fs::symlink(folder.path().join("real"), &name).unwrap();
        assert_ne!(Anchor::find_in(folder.path(), &[1; 16]).unwrap().nonce(), "0".repeat(32));
        std::fs::write(&name, "0".repeat(33)).unwrap();
        assert_eq!(Anchor::find_in(folder.path(), &[1; 16]).unwrap().nonce().len(), 32);
    }

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
