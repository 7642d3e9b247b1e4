//! The kernel for any processor: 64-bit words, which the compiler makes as wide as the processor
//! has them.
//!
//! A product is the sum of those multiples of the byte by 1, 2, 4 … 128 whose bits the factor has.
//! The seven doublings of an input serve all outputs.

use std::ops::Range;

/// Words that are worked on together.
const WORDS: usize = 64;
/// The same in bytes.
const BLOCK: usize = 8 * WORDS;
/// Outputs that are made together.
const ROWS: usize = 8;

type Words = [u64; WORDS];

/// `2·a` in each byte of a word.
#[inline(always)]
fn double(a: u64) -> u64 {
    let over = a >> 7 & 0x0101_0101_0101_0101;
    (a & 0x7f7f_7f7f_7f7f_7f7f) << 1 ^ over ^ over << 2 ^ over << 3 ^ over << 4
}

#[inline(always)]
fn add(sum: &mut Words, words: &Words) {
    for (s, w) in sum.iter_mut().zip(words) {
        *s ^= w;
    }
}

/// A block, or what is left of one with zeros behind it.
#[inline(always)]
fn load(bytes: &[u8]) -> Words {
    let mut padded = [0; BLOCK];
    let whole = bytes.try_into().unwrap_or_else(|_| {
        padded[..bytes.len()].copy_from_slice(bytes);
        &padded
    });
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(whole.as_chunks().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    words
}

#[inline(always)]
fn store(words: &Words, bytes: &mut [u8]) {
    for (bytes, word) in bytes.chunks_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_ne_bytes()[..bytes.len()]);
    }
}

/// [`super::Backend::combine`] on some columns.
pub(super) fn combine(
    coefficients: &[u8],
    inputs: &[&[u8]],
    outputs: &mut [&mut [u8]],
    columns: Range<usize>,
) {
    let width = inputs.len();
    for at in columns.clone().step_by(BLOCK) {
        let block = at..columns.end.min(at + BLOCK);
        for (group, outputs) in outputs.chunks_mut(ROWS).enumerate() {
            let mut sums = [[0; WORDS]; ROWS];
            for (i, input) in inputs.iter().enumerate() {
                let mut multiples = [load(&input[block.clone()]); 8];
                for bit in 1..8 {
                    let (known, wanted) = multiples.split_at_mut(bit);
                    for (w, k) in wanted[0].iter_mut().zip(&known[bit - 1]) {
                        *w = double(*k);
                    }
                }
                for (r, sum) in sums[..outputs.len()].iter_mut().enumerate() {
                    let factor = coefficients[(ROWS * group + r) * width + i];
                    for (bit, multiple) in multiples.iter().enumerate() {
                        if factor >> bit & 1 == 1 {
                            add(sum, multiple);
                        }
                    }
                }
            }
            for (sum, output) in sums.iter().zip(outputs) {
                store(sum, &mut output[block.clone()]);
            }
        }
    }
}

/// [`super::Backend::xor`], in the instructions of whoever calls it; `fetch` is told every cache
/// line that is read.
#[inline(always)]
pub(super) fn xor(inputs: &[&[u8]], output: &mut [u8], fetch: impl Fn(*const u8)) {
    // As much as eight registers of 32 bytes hold.
    const LINE: usize = 256;
    let whole = output.len() / LINE * LINE;
    for at in (0..whole).step_by(LINE) {
        let mut sum = [0; LINE / 8];
        for line in inputs.iter().filter_map(|input| input[at..].first_chunk::<LINE>()) {
            line.as_chunks::<64>().0.iter().for_each(|part| fetch(part.as_ptr()));
            for (s, word) in sum.iter_mut().zip(line.as_chunks().0) {
                *s ^= u64::from_ne_bytes(*word);
            }
        }
        for (word, s) in output[at..].as_chunks_mut().0.iter_mut().zip(&sum) {
            *word = s.to_ne_bytes();
        }
    }
    for (at, byte) in output.iter_mut().enumerate().skip(whole) {
        *byte = inputs.iter().fold(0, |sum, input| sum ^ input[at]);
    }
}
