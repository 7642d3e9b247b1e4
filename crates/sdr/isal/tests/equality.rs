//! ISA-L makes the same bytes as our kernels. These tests need the library (Debian: `libisal2`),
//! and fail without it.

use proptest::prelude::*;
use unbroken_erasure::{Backend, ChunkSet, Code, Kernel, Kind};
use unbroken_erasure_isal::IsaL;

fn isal() -> IsaL {
    IsaL::load().unwrap()
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut byte = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(|_| byte()).collect()
}

#[test]
fn what_is_not_isa_l_is_refused() {
    let told = |library: &str| IsaL::load_from(library).err().unwrap().to_string();
    assert!(
        told("libnone.so.7").contains("libnone.so.7")
            && told("libnone.so.7").contains("apt-get install libisal2")
    );
    assert!(told("libc.so.6").contains("ec_init_tables"), "{}", told("libc.so.6"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_combination_is_the_same(inputs in 0..20_usize, outputs in 0..20_usize, len in 0..1_000_usize, seed: u64) {
        let data = bytes(inputs * len, seed);
        let inputs: Vec<&[u8]> = (0..inputs).map(|i| &data[i * len..][..len]).collect();
        let coefficients = bytes(inputs.len() * outputs, !seed);
        let combine = |backend: &dyn Backend| {
            let mut made = vec![vec![0xaa; len]; outputs];
            backend.combine(&coefficients, &inputs, &mut made.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
            made
        };
        let its = combine(&isal());
        for kernel in Kernel::available() {
            prop_assert_eq!(&combine(&kernel), &its, "{}", kernel.name());
        }
        if !inputs.is_empty() {
            let mut made = vec![vec![0xaa; len]; outputs];
            let tables = isal().tables(&coefficients, inputs.len());
            isal().combine_prepared(&tables, &inputs, &mut made.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
            prop_assert_eq!(&made, &its);
        }
    }

    /// What one encodes the other recovers.
    #[test]
    fn codes_are_the_same(
        k in 1..=40_usize, m in 1..=12_usize, chunk_bytes in 1..1_000_usize, short in 0..1_000_usize, lost: u64, seed: u64,
    ) {
        let (isal, kernel) = (isal(), Kernel::best());
        for code in [Kind::Mds, Kind::Xor].into_iter().filter_map(|kind| Code::new(kind, k, m).ok()) {
            let data = bytes(k * chunk_bytes - short % chunk_bytes, seed);
            let (mut ours, mut its) = (vec![0; m * chunk_bytes], vec![0; m * chunk_bytes]);
            code.encode_region(&kernel, &data, &mut ours, chunk_bytes).unwrap();
            code.encode_region(&isal, &data, &mut its, chunk_bytes).unwrap();
            prop_assert_eq!(&ours, &its, "{}", code);
            let lost: ChunkSet = (0..m).map(|i| (lost >> (5 * i)) as usize % (k + m)).collect();
            if code.recovers(&lost) {
                let mut damaged = data.clone();
                for chunk in lost.iter().filter(|&chunk| chunk < k) {
                    damaged.chunks_mut(chunk_bytes).nth(chunk).unwrap().fill(0xee);
                }
                code.recover_region(&isal, &mut damaged, &ours, chunk_bytes, &lost).unwrap();
                prop_assert!(damaged == data, "{code} {lost:?}");
            }
        }
    }
}
