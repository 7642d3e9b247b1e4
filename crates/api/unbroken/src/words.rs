//! Bytes in memory that others write: words are loaded and stored one by one, so that nothing is
//! undefined, and by eights, so that it is fast.

use std::sync::atomic::{AtomicU64, Ordering};

const WORD: usize = 8;

/// Copies bytes into words from a byte on. A word that is written in part must not be written by
/// others meanwhile.
///
/// # Panics
/// Where they do not fit.
pub fn copy_in(words: &[AtomicU64], at: usize, bytes: &[u8]) {
    let (first, skip) = (at / WORD, at % WORD);
    let head = if skip == 0 { 0 } else { (WORD - skip).min(bytes.len()) };
    let (head, rest) = bytes.split_at(head);
    if !head.is_empty() {
        patch(&words[first], skip, head);
    }
    let first = first + usize::from(!head.is_empty());
    let whole = rest.chunks_exact(WORD);
    let tail = whole.remainder();
    let count = whole.len();
    for (word, bytes) in words[first..first + count].iter().zip(whole) {
        word.store(u64::from_ne_bytes(bytes.try_into().expect("eight bytes")), Ordering::Relaxed);
    }
    if !tail.is_empty() {
        patch(&words[first + count], 0, tail);
    }
}

/// Changes a part of a word.
fn patch(word: &AtomicU64, at: usize, bytes: &[u8]) {
    let mut value = word.load(Ordering::Relaxed).to_ne_bytes();
    value[at..at + bytes.len()].copy_from_slice(bytes);
    word.store(u64::from_ne_bytes(value), Ordering::Relaxed);
}

/// Copies bytes out of words from a byte on.
///
/// # Panics
/// Where there are not so many.
pub fn copy_out(words: &[AtomicU64], at: usize, out: &mut [u8]) {
    let (first, skip) = (at / WORD, at % WORD);
    let load = |k: usize| words[k].load(Ordering::Relaxed).to_ne_bytes();
    let head = if skip == 0 { 0 } else { (WORD - skip).min(out.len()) };
    let (head, rest) = out.split_at_mut(head);
    if !head.is_empty() {
        head.copy_from_slice(&load(first)[skip..skip + head.len()]);
    }
    let first = first + usize::from(!head.is_empty());
    let count = rest.len() / WORD;
    let (whole, tail) = rest.split_at_mut(count * WORD);
    for (bytes, word) in whole.chunks_exact_mut(WORD).zip(&words[first..first + count]) {
        bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
    if !tail.is_empty() {
        tail.copy_from_slice(&load(first + count)[..tail.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_run_of_bytes_goes_in_and_comes_out() {
        let words: Vec<AtomicU64> = (0..8).map(|_| AtomicU64::new(u64::MAX)).collect();
        for at in 0..20 {
            for len in 0..40 {
                words.iter().for_each(|w| w.store(u64::MAX, Ordering::Relaxed));
                let bytes: Vec<u8> = (0..len as u8).collect();
                copy_in(&words, at, &bytes);
                let mut out = vec![0; 64];
                copy_out(&words, 0, &mut out);
                assert_eq!(out[at..at + len], bytes, "{at} {len}");
                assert!(out[..at].iter().chain(&out[at + len..]).all(|b| *b == 0xff), "{at} {len}");
                let mut part = vec![0; len];
                copy_out(&words, at, &mut part);
                assert_eq!(part, bytes);
            }
        }
    }
}
