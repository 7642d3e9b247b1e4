//! Copying a payload while its CRC is computed.
//!
//! A packet's payload is read twice on its way out: to be copied behind its header, and for the
//! ICRC. Where the processor multiplies polynomials 64 bytes at a time (VPCLMULQDQ with AVX-512)
//! the CRC takes as long as the multiplications do, and a store beside each load costs nothing:
//! both together take as long as the CRC alone. Elsewhere one follows the other.
//!
//! The CRC is folded as in Gopal et al., "Fast CRC Computation for Generic Polynomials Using
//! PCLMULQDQ Instruction" (Intel, 2009): what has been read is a polynomial, of which only the
//! remainder matters, so 64 bytes are moved on over the next 256 by a multiplication with `x^2048
//! mod P`, in halves.

use crate::traps::{self, Fault};
use unbroken_wire::Icrc;

/// Bytes of a round: four registers.
const ROUND: usize = 256;

/// Copies `to.len()` bytes from `from` to `to`, and adds them to `icrc`: those that were copied,
/// whoever writes to them meanwhile.
///
/// # Safety
/// `from` must lie in memory that is registered, whether it is mapped or not, for `to.len()` bytes
/// and not overlap with `to`.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: &mut [u8], icrc: &mut Icrc) -> Result<(), Fault> {
    let whole = to.len() / ROUND * ROUND;
    #[cfg(target_arch = "x86_64")]
    if whole > 0 && wide::supported() {
        // SAFETY: the processor has what is needed, and there are `whole` bytes at both places.
        let register = unsafe { wide::copy(icrc.register(), from, to.as_mut_ptr(), whole) }?;
        *icrc = Icrc::resume(register);
        // SAFETY: the caller's promise.
        return unsafe { copy_plainly(from.add(whole), &mut to[whole..], icrc) };
    }
    // SAFETY: the caller's promise.
    unsafe { copy_plainly(from, to, icrc) }
}

/// The same, one after the other.
///
/// # Safety
/// As [`copy`].
unsafe fn copy_plainly(from: *const u8, to: &mut [u8], icrc: &mut Icrc) -> Result<(), Fault> {
    // SAFETY: the caller's promise.
    unsafe { traps::copy(from, to.as_mut_ptr(), to.len()) }?;
    icrc.update(to);
    Ok(())
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use super::ROUND;
    use crate::traps::Fault;
    use std::arch::asm;
    use std::arch::x86_64::*;
    use unbroken_wire::POLYNOMIAL;

    /// The polynomial with its highest power, reflected, and the quotient of `x^64` by it (for
    /// Barrett's reduction).
    const POLYNOMIAL_33: i64 = (POLYNOMIAL as i64) << 1 | 1;
    const QUOTIENT_33: i64 = 0x1_f701_1641;

    /// `x^n mod P`, reflected to 33 bits as the multiplication of reflected numbers wants it.
    const fn power(n: u32) -> i64 {
        let (mut r, mut i) = (1u32 << 31, 0);
        while i < n {
            r = if r & 1 != 0 { r >> 1 ^ POLYNOMIAL } else { r >> 1 };
            i += 1;
        }
        (r as i64) << 1
    }

    /// Multipliers of the lower and the upper half of 16 bytes that are moved on by `bits`.
    const fn over(bits: u32) -> (i64, i64) {
        (power(bits + 32), power(bits - 32))
    }

    /// Whether the processor has it.
    #[inline]
    pub(super) fn supported() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("pclmulqdq")
    }

    /// Copies a round's bytes at `$at` from `$from` to `$to`; leaves the function where they are
    /// not there. They are read back from the place where they were written, which a processor does
    /// without waiting.
    macro_rules! take {
        ($from:expr, $to:expr, $at:expr) => {
            // SAFETY: a round's bytes can be written at `$to`; a fault at `$from` goes on at the
            // label (see `crate::traps`).
            unsafe {
                asm!(
                    "2: vmovdqu64 zmm28, [{from}]",
                    "vmovdqu64 zmm29, [{from} + 64]",
                    "vmovdqu64 zmm30, [{from} + 128]",
                    "vmovdqu64 zmm31, [{from} + 192]",
                    "3: vmovdqu64 [{to}], zmm28",
                    "vmovdqu64 [{to} + 64], zmm29",
                    "vmovdqu64 [{to} + 128], zmm30",
                    "vmovdqu64 [{to} + 192], zmm31",
                    ".pushsection unbroken_traps,\"aR\",@progbits",
                    ".balign 8",
                    ".quad 2b - .",
                    ".quad 3b - .",
                    ".quad {fault} - .",
                    ".popsection",
                    from = in(reg) $from.add($at),
                    to = in(reg) $to.add($at),
                    fault = label { return Err(Fault) },
                    out("zmm28") _, out("zmm29") _, out("zmm30") _, out("zmm31") _,
                    options(nostack, preserves_flags),
                )
            }
        };
    }

    /// Copies `len` bytes, a multiple of [`ROUND`] and not 0; gives the register of the CRC behind
    /// them.
    ///
    /// # Safety
    /// [`supported`], and `len` bytes can be written at `to`; those at `from` are registered,
    /// whether they are mapped or not.
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.1")]
    pub(super) unsafe fn copy(
        register: u32,
        from: *const u8,
        to: *mut u8,
        len: usize,
    ) -> Result<u32, Fault> {
        // SAFETY: `at + 64 <= len`, which the caller vouches for; it was written just before.
        let taken = |at: usize| unsafe { _mm512_loadu_si512(to.add(at).cast()) };
        take!(from, to, 0);
        let mut x = [taken(0), taken(64), taken(128), taken(192)];
        x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(register as i32)));
        let moved = four(const { over(8 * ROUND as u32) });
        for at in (ROUND..len).step_by(ROUND) {
            take!(from, to, at);
            for (i, x) in x.iter_mut().enumerate() {
                *x = fold_64(*x, moved, taken(at + 64 * i));
            }
        }
        let moved = four(const { over(512) });
        let x = fold_64(fold_64(fold_64(x[0], moved, x[1]), moved, x[2]), moved, x[3]);
        let (low, high) = const { over(128) };
        let moved = _mm_set_epi64x(high, low);
        let quarters = [
            _mm512_extracti32x4_epi32::<0>(x),
            _mm512_extracti32x4_epi32::<1>(x),
            _mm512_extracti32x4_epi32::<2>(x),
            _mm512_extracti32x4_epi32::<3>(x),
        ];
        let x = fold_16(
            fold_16(fold_16(quarters[0], moved, quarters[1]), moved, quarters[2]),
            moved,
            quarters[3],
        );
        Ok(remainder(x))
    }

    #[target_feature(enable = "avx512f")]
    fn four((low, high): (i64, i64)) -> __m512i {
        _mm512_set_epi64(high, low, high, low, high, low, high, low)
    }

    /// Moves `x` on and adds what lies there.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn fold_64(x: __m512i, moved: __m512i, there: __m512i) -> __m512i {
        let (low, high) = (
            _mm512_clmulepi64_epi128::<0x00>(x, moved),
            _mm512_clmulepi64_epi128::<0x11>(x, moved),
        );
        // The sum of three.
        _mm512_ternarylogic_epi64::<0x96>(low, high, there)
    }

    #[target_feature(enable = "pclmulqdq")]
    fn fold_16(x: __m128i, moved: __m128i, there: __m128i) -> __m128i {
        let (low, high) =
            (_mm_clmulepi64_si128::<0x00>(x, moved), _mm_clmulepi64_si128::<0x11>(x, moved));
        _mm_xor_si128(_mm_xor_si128(low, high), there)
    }

    /// The register of the CRC of 16 bytes: 32 zero bits are appended in two steps, then the
    /// polynomial is divided out.
    #[target_feature(enable = "pclmulqdq,sse4.1")]
    fn remainder(x: __m128i) -> u32 {
        let low_32 = _mm_set_epi32(0, 0, 0, -1);
        let moved = _mm_set_epi64x(const { over(128) }.1, 0);
        let x = _mm_xor_si128(_mm_clmulepi64_si128::<0x10>(x, moved), _mm_srli_si128::<8>(x));
        let moved = _mm_set_epi64x(0, const { power(64) });
        let x = _mm_xor_si128(
            _mm_clmulepi64_si128::<0x00>(_mm_and_si128(x, low_32), moved),
            _mm_srli_si128::<4>(x),
        );
        let barrett = _mm_set_epi64x(QUOTIENT_33, POLYNOMIAL_33);
        let q = _mm_clmulepi64_si128::<0x10>(_mm_and_si128(x, low_32), barrett);
        let q = _mm_clmulepi64_si128::<0x00>(_mm_and_si128(q, low_32), barrett);
        _mm_extract_epi32::<1>(_mm_xor_si128(x, q)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_place_gives_the_bytes_and_the_crc_of_a_plain_copy() {
        let source: Vec<u8> =
            (0..6000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 23) as u8).collect();
        let lens = (0..600).chain([1023, 1024, 1025, 4095, 4096, 4097, 4096 + 256, 5000]);
        for (case, len) in lens.enumerate() {
            let (from, at) = (case * 7 % 97, case * 13 % 61);
            let (mut wide, mut plain) = (vec![0xee; len + 200], vec![0xee; len + 200]);
            let (mut icrc, mut expected) =
                (Icrc::resume(0x1234_5678 ^ case as u32), Icrc::resume(0x1234_5678 ^ case as u32));
            // SAFETY: the source has 6,000 bytes, and `from + len` is less than that.
            unsafe {
                copy(source[from..].as_ptr(), &mut wide[at..at + len], &mut icrc).unwrap();
                copy_plainly(source[from..].as_ptr(), &mut plain[at..at + len], &mut expected)
                    .unwrap();
            }
            assert_eq!(wide, plain, "{len} bytes");
            assert_eq!(icrc.finish(), expected.finish(), "{len} bytes");
        }
    }
}
