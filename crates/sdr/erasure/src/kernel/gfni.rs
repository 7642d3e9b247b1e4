//! The kernel for processors with GFNI and AVX-512: 64 products an instruction.
//!
//! GFNI multiplies in another field (0x11b), but it also multiplies bytes by any matrix over GF(2),
//! and multiplication by a constant is one. Inputs are taken in pairs, so that the three-way XOR
//! adds two products at once.

use std::arch::x86_64::*;

use super::fetch_ahead;
use crate::field::MATRICES;
use crate::MAX_DATA;

/// Bytes of a register.
const WIDTH: usize = 64;
/// Outputs that are made together, at most.
const ROWS: usize = 8;

/// Makes as many columns of all outputs as fill whole registers, and says how many.
///
/// # Safety
/// The processor has GFNI and AVX-512 (F, BW); [`super::check`] was passed; there is an input.
#[target_feature(enable = "gfni,avx512f,avx512bw")]
pub(super) unsafe fn combine(
    coefficients: &[u8],
    inputs: &[&[u8]],
    outputs: &mut [&mut [u8]],
) -> usize {
    let columns = outputs.first().map_or(0, |o| o.len()) / (4 * WIDTH) * (4 * WIDTH);
    for (rows, outputs) in coefficients.chunks(ROWS * inputs.len()).zip(outputs.chunks_mut(ROWS)) {
        // With accumulators for all outputs 16 of 32 registers are taken, at most.
        match outputs.len() {
            1 => strip::<1, 4>(rows, inputs, outputs, columns),
            2 => strip::<2, 4>(rows, inputs, outputs, columns),
            3 => strip::<3, 4>(rows, inputs, outputs, columns),
            4 => strip::<4, 4>(rows, inputs, outputs, columns),
            5 => strip::<5, 2>(rows, inputs, outputs, columns),
            6 => strip::<6, 2>(rows, inputs, outputs, columns),
            7 => strip::<7, 2>(rows, inputs, outputs, columns),
            _ => strip::<8, 2>(rows, inputs, outputs, columns),
        }
    }
    columns
}

/// Makes the first `columns` columns (a multiple of four registers) of `R` outputs, `N` registers
/// of each at a time.
#[target_feature(enable = "gfni,avx512f,avx512bw")]
fn strip<const R: usize, const N: usize>(
    rows: &[u8],
    inputs: &[&[u8]],
    outputs: &mut [&mut [u8]],
    columns: usize,
) {
    assert!(outputs.len() == R && outputs.iter().all(|o| o.len() >= columns));
    assert!(inputs.iter().all(|i| i.len() >= columns) && rows.len() == R * inputs.len());
    // Where their number is odd, a multiple by 0 of the first one is added.
    let mut matrices = [[0; R]; MAX_DATA];
    let mut from = [inputs[0].as_ptr(); MAX_DATA];
    for (i, input) in inputs.iter().enumerate() {
        from[i] = input.as_ptr();
        for r in 0..R {
            matrices[i][r] = MATRICES[usize::from(rows[r * inputs.len() + i])] as i64;
        }
    }
    let pairs = inputs.len().div_ceil(2);
    for at in (0..columns).step_by(WIDTH * N) {
        let mut sums = [[_mm512_setzero_si512(); N]; R];
        for (from, matrices) in from.chunks_exact(2).zip(matrices.chunks_exact(2)).take(pairs) {
            let mut pair = [[_mm512_setzero_si512(); N]; 2];
            for (from, x) in from.iter().zip(&mut pair) {
                for (n, x) in x.iter_mut().enumerate() {
                    let from = from.wrapping_add(at + n * WIDTH);
                    // SAFETY: `columns` bytes can be read, and `N` registers divide it.
                    *x = unsafe { _mm512_loadu_si512(from.cast()) };
                    fetch_ahead(from);
                }
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let (a, b) = (_mm512_set1_epi64(matrices[0][r]), _mm512_set1_epi64(matrices[1][r]));
                for (n, sum) in sums.iter_mut().enumerate() {
                    let x = _mm512_gf2p8affine_epi64_epi8::<0>(pair[0][n], a);
                    let y = _mm512_gf2p8affine_epi64_epi8::<0>(pair[1][n], b);
                    // The sum of three.
                    *sum = _mm512_ternarylogic_epi64::<0x96>(*sum, x, y);
                }
            }
        }
        for (output, sums) in outputs.iter_mut().zip(&sums) {
            for (n, sum) in sums.iter().enumerate() {
                // SAFETY: `columns` bytes can be written, and `N` registers divide it.
                unsafe {
                    _mm512_storeu_si512(output.as_mut_ptr().add(at + n * WIDTH).cast(), *sum)
                };
            }
        }
    }
}
