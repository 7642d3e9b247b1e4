//! The kernels for processors with SSSE3 or AVX2: a product is looked up in two tables of 16 bytes,
//! one for each half of the byte.
//!
//! After Plank, Greenan and Miller, "Screaming Fast Galois Field Arithmetic Using Intel SIMD
//! Instructions" (FAST 2013).

/// Outputs that are made together, at most.
const ROWS: usize = 4;

/// A kernel for one width of registers.
macro_rules! kernel {
    ($name:ident, $feature:literal, $width:literal, $load:ident, $store:ident, $zero:ident, $set:ident, $and:ident, $xor:ident,
     $shift:ident, $look_up:ident, $table:expr) => {
        pub(super) mod $name {
            use super::ROWS;
            use crate::field::NIBBLES;
            use crate::MAX_DATA;
            use std::arch::x86_64::*;

            /// Bytes of a register.
            const WIDTH: usize = $width;
            /// Registers of an output that are worked on together.
            const ABREAST: usize = 2;

            /// Makes as many columns of all outputs as fill whole registers, and says how many.
            ///
            /// # Safety
            /// The processor has the instructions; [`super::super::check`] was passed; there is an
            /// input.
            #[target_feature(enable = $feature)]
            pub(in super::super) unsafe fn combine(
                coefficients: &[u8],
                inputs: &[&[u8]],
                outputs: &mut [&mut [u8]],
            ) -> usize {
                let columns =
                    outputs.first().map_or(0, |o| o.len()) / (ABREAST * WIDTH) * (ABREAST * WIDTH);
                for (rows, outputs) in
                    coefficients.chunks(ROWS * inputs.len()).zip(outputs.chunks_mut(ROWS))
                {
                    match outputs.len() {
                        1 => strip::<1>(rows, inputs, outputs, columns),
                        2 => strip::<2>(rows, inputs, outputs, columns),
                        3 => strip::<3>(rows, inputs, outputs, columns),
                        _ => strip::<4>(rows, inputs, outputs, columns),
                    }
                }
                columns
            }

            /// Makes the first `columns` columns (a multiple of `ABREAST` registers) of `R`
            /// outputs.
            #[target_feature(enable = $feature)]
            fn strip<const R: usize>(
                rows: &[u8],
                inputs: &[&[u8]],
                outputs: &mut [&mut [u8]],
                columns: usize,
            ) {
                assert!(outputs.len() == R && outputs.iter().all(|o| o.len() >= columns));
                assert!(
                    inputs.iter().all(|i| i.len() >= columns) && rows.len() == R * inputs.len()
                );
                let mut tables = [[&NIBBLES[0]; R]; MAX_DATA];
                for (i, tables) in tables.iter_mut().enumerate().take(inputs.len()) {
                    for (r, table) in tables.iter_mut().enumerate() {
                        *table = &NIBBLES[usize::from(rows[r * inputs.len() + i])];
                    }
                }
                let half = $set(15);
                for at in (0..columns).step_by(WIDTH * ABREAST) {
                    let mut sums = [[$zero(); ABREAST]; R];
                    for (input, tables) in inputs.iter().zip(&tables) {
                        let mut halves = [[$zero(); 2]; ABREAST];
                        for (n, halves) in halves.iter_mut().enumerate() {
                            let from = input.as_ptr().wrapping_add(at + n * WIDTH);
                            // SAFETY: `columns` bytes can be read, and `ABREAST` registers divide
                            // it.
                            let x = unsafe { $load(from.cast()) };
                            super::super::fetch_ahead(from);
                            *halves = [$and(x, half), $and($shift::<4>(x), half)];
                        }
                        for (sums, table) in sums.iter_mut().zip(tables) {
                            let (low, high) = table.split_at(16);
                            let (low, high) = ($table(low), $table(high));
                            for (sum, x) in sums.iter_mut().zip(&halves) {
                                *sum = $xor(*sum, $xor($look_up(low, x[0]), $look_up(high, x[1])));
                            }
                        }
                    }
                    for (output, sums) in outputs.iter_mut().zip(&sums) {
                        for (n, sum) in sums.iter().enumerate() {
                            // SAFETY: `columns` bytes can be written, and `ABREAST` registers
                            // divide it.
                            unsafe { $store(output.as_mut_ptr().add(at + n * WIDTH).cast(), *sum) };
                        }
                    }
                }
            }

            /// 16 bytes.
            #[target_feature(enable = $feature)]
            fn sixteen(table: &[u8]) -> __m128i {
                assert!(table.len() == 16);
                // SAFETY: there are 16 bytes.
                unsafe { _mm_loadu_si128(table.as_ptr().cast()) }
            }
        }
    };
}

kernel!(
    ssse3,
    "ssse3",
    16,
    _mm_loadu_si128,
    _mm_storeu_si128,
    _mm_setzero_si128,
    _mm_set1_epi8,
    _mm_and_si128,
    _mm_xor_si128,
    _mm_srli_epi64,
    _mm_shuffle_epi8,
    sixteen
);
kernel!(
    avx2,
    "avx2",
    32,
    _mm256_loadu_si256,
    _mm256_storeu_si256,
    _mm256_setzero_si256,
    _mm256_set1_epi8,
    _mm256_and_si256,
    _mm256_xor_si256,
    _mm256_srli_epi64,
    _mm256_shuffle_epi8,
    (|table| _mm256_broadcastsi128_si256(sixteen(table)))
);
