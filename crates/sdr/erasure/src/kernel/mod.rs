//! Who does the arithmetic: the trait of backends, and the kernels of this crate behind it.
//!
//! All kernels give the same bytes; which one runs is found out at run time. Those for x86 make
//! what fills whole registers, and the portable one the columns behind it. They differ in how they
//! multiply, and are limited by different things:
//!
//! | kernel | product of a byte and a factor | bytes an instruction |
//! | --- | --- | --- |
//! | portable | sum of its multiples by powers of 2 | 8 |
//! | SSSE3 | two look-ups in tables of 16 (`pshufb`) | 16 |
//! | AVX2 | the same | 32 |
//! | GFNI | a product of bit matrices | 64 |
//!
//! Chunks mostly lie 64 KiB apart, so that the same place of all chunks falls into one set of each
//! cache, and what the processor fetches ahead on its own is gone before it is used. So kernels
//! take a few cache lines of every input at once, and fetch the next ones themselves.

#[cfg(target_arch = "x86_64")]
mod gfni;
#[cfg(target_arch = "x86_64")]
mod nibbles;
mod portable;

use crate::MAX_DATA;

/// What multiplies and adds chunks. All backends give the same bytes.
pub trait Backend: Send + Sync {
    /// A name for people.
    fn name(&self) -> &'static str;

    /// Fills each output with a sum of multiples of the inputs: output *r* is the sum over *i* of
    /// `coefficients[r · inputs.len() + i]` times input *i* (without inputs: zeros).
    ///
    /// # Panics
    /// Where slices differ in length, there are more than [`MAX_DATA`] inputs, or not as many
    /// coefficients as inputs times outputs.
    fn combine(&self, coefficients: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]);

    /// Fills the output with the sum of the inputs. XOR is our own in every backend.
    ///
    /// # Panics
    /// Where slices differ in length.
    fn xor(&self, inputs: &[&[u8]], output: &mut [u8]) {
        Kernel::best().xor(inputs, output);
    }
}

/// Panics where [`Backend::combine`] says so: kernels use pointers, and trust in it.
pub fn check_shapes(coefficients: &[u8], inputs: &[&[u8]], outputs: &[&mut [u8]]) {
    let len = outputs.first().map_or(0, |o| o.len());
    assert!(inputs.len() <= MAX_DATA, "{} inputs are more than {MAX_DATA}", inputs.len());
    assert_eq!(
        coefficients.len(),
        inputs.len() * outputs.len(),
        "coefficients for {} inputs",
        inputs.len()
    );
    assert!(outputs.iter().all(|o| o.len() == len), "outputs of different lengths");
    assert!(
        outputs.is_empty() || inputs.iter().all(|i| i.len() == len),
        "inputs of other lengths than the outputs"
    );
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instructions {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Ssse3,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Gfni,
}

impl Instructions {
    /// From the slowest to the fastest.
    const ALL: &[Instructions] = &[
        Instructions::Portable,
        #[cfg(target_arch = "x86_64")]
        Instructions::Ssse3,
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2,
        #[cfg(target_arch = "x86_64")]
        Instructions::Gfni,
    ];

    fn supported(self) -> bool {
        match self {
            Instructions::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Instructions::Ssse3 => is_x86_feature_detected!("ssse3"),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Instructions::Gfni => {
                is_x86_feature_detected!("gfni")
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx2")
            }
        }
    }
}

/// A kernel of this crate; there are only such as the processor has the instructions for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(Instructions);

impl Kernel {
    /// Those that this processor can run, from the slowest to the fastest.
    pub fn available() -> impl Iterator<Item = Kernel> {
        Instructions::ALL.iter().copied().filter(|i| i.supported()).map(Kernel)
    }

    /// The fastest that this processor can run.
    pub fn best() -> Kernel {
        Kernel::available().last().unwrap_or(Kernel(Instructions::Portable))
    }
}

impl Backend for Kernel {
    fn name(&self) -> &'static str {
        match self.0 {
            Instructions::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Instructions::Ssse3 => "ssse3",
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Instructions::Gfni => "gfni",
        }
    }

    fn combine(&self, coefficients: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        check_shapes(coefficients, inputs, outputs);
        let Some(len) = outputs.first().map(|o| o.len()) else { return };
        let done = match self.0 {
            _ if inputs.is_empty() => 0,
            Instructions::Portable => 0,
            // SAFETY: of all three: the processor has the instructions, or there would be no such
            // kernel; lengths were checked.
            #[cfg(target_arch = "x86_64")]
            Instructions::Ssse3 => unsafe {
                nibbles::ssse3::combine(coefficients, inputs, outputs)
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Instructions::Avx2 => unsafe { nibbles::avx2::combine(coefficients, inputs, outputs) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Instructions::Gfni => unsafe { gfni::combine(coefficients, inputs, outputs) },
        };
        portable::combine(coefficients, inputs, outputs, done..len);
    }

    fn xor(&self, inputs: &[&[u8]], output: &mut [u8]) {
        assert!(
            inputs.iter().all(|i| i.len() == output.len()),
            "inputs of other lengths than the output"
        );
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the processor has the instructions, or there would be no such kernel.
            Instructions::Avx2 | Instructions::Gfni => unsafe { xor_avx2(inputs, output) },
            _ => portable::xor(inputs, output, |_| ()),
        }
    }
}

/// Fetches the cache line that kernels will want some rounds from now.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[allow(unused_unsafe, reason = "it is safe in newer versions of Rust")]
fn fetch_ahead(from: *const u8) {
    use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
    /// How far ahead, in bytes.
    const AHEAD: usize = 512;
    // SAFETY: a hint; it may name any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast()) };
}

/// [`portable::xor`] in AVX2's instructions.
///
/// # Safety
/// The processor has them.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn xor_avx2(inputs: &[&[u8]], output: &mut [u8]) {
    portable::xor(inputs, output, fetch_ahead);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::field::multiply;

    /// Bytes that look random.
    fn bytes(len: usize, seed: usize) -> Vec<u8> {
        (0..len).map(|i| (((i + 1) * (2 * seed + 40_503) * 2_654_435_761) >> 13) as u8).collect()
    }

    /// As the definition has it, byte by byte.
    fn slowly(coefficients: &[u8], inputs: &[&[u8]], rows: usize, len: usize) -> Vec<Vec<u8>> {
        let of = |r: usize, at: usize| {
            inputs
                .iter()
                .enumerate()
                .fold(0, |sum, (i, x)| sum ^ multiply(coefficients[r * inputs.len() + i], x[at]))
        };
        (0..rows).map(|r| (0..len).map(|at| of(r, at)).collect()).collect()
    }

    /// Every kernel, every number of outputs, odd and even numbers of inputs, lengths around the
    /// registers, at odd addresses.
    #[test]
    fn kernels_do_what_the_definition_says() {
        for (width, rows, len) in (0..=9)
            .flat_map(|width| [1, 2, 3, 4, 5, 6, 7, 8, 9, 17].map(|rows| (width, rows)))
            .flat_map(|(width, rows)| [0, 1, 63, 64, 128, 257, 1000].map(|len| (width, rows, len)))
        {
            let data: Vec<Vec<u8>> = (0..width).map(|i| bytes(len + 1, i)).collect();
            let inputs: Vec<&[u8]> = data.iter().map(|d| &d[1..]).collect();
            let coefficients = bytes(width * rows, 77);
            let right = slowly(&coefficients, &inputs, rows, len);
            for kernel in Kernel::available() {
                let mut made = vec![vec![0xaa; len + 1]; rows];
                let mut outputs: Vec<&mut [u8]> = made.iter_mut().map(|m| &mut m[1..]).collect();
                kernel.combine(&coefficients, &inputs, &mut outputs);
                for (made, right) in made.iter().zip(&right) {
                    assert_eq!(
                        (made[0], &made[1..]),
                        (0xaa, &right[..]),
                        "{kernel:?} {width} {rows} {len}"
                    );
                }
            }
        }
    }

    #[test]
    fn sums_are_right() {
        for (width, len) in [(0, 5), (1, 300), (4, 64), (5, 1023), (33, 513)] {
            let data: Vec<Vec<u8>> = (0..width).map(|i| bytes(len, i)).collect();
            let inputs: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
            let right = slowly(&vec![1; width], &inputs, 1, len).remove(0);
            for kernel in Kernel::available() {
                let mut made = vec![0xaa; len];
                kernel.xor(&inputs, &mut made);
                assert_eq!(made, right, "{kernel:?} {width} {len}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "lengths")]
    fn inputs_of_other_lengths_are_refused() {
        Kernel::best().combine(&[1, 1], &[&[0; 64], &[0; 63]], &mut [&mut [0; 64]]);
    }

    #[test]
    #[should_panic(expected = "coefficients")]
    fn missing_coefficients_are_refused() {
        Kernel::best().combine(&[1], &[&[0; 64], &[0; 64]], &mut [&mut [0; 64]]);
    }

    #[test]
    #[should_panic(expected = "lengths")]
    fn sums_of_other_lengths_are_refused() {
        Kernel::best().xor(&[&[0; 64], &[0; 65]], &mut [0; 64]);
    }
}
