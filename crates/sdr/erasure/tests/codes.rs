//! What is encoded comes back from any losses that the code promises to mend, with every kernel,
//! and nothing is written otherwise.

use proptest::prelude::*;
use unbroken_erasure::{Backend, ChunkSet, Code, CodeError, Kernel, Kind};

/// Data chunks, the last one perhaps shorter.
fn message(chunks: usize, chunk_bytes: usize, last_bytes: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut state = seed;
    let mut byte = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let len = |i| if i + 1 == chunks { last_bytes } else { chunk_bytes };
    (0..chunks).map(|i| (0..len(i)).map(|_| byte()).collect()).collect()
}

fn encode(code: Code, backend: &dyn Backend, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut parity = vec![vec![0x55; data[0].len()]; code.parity()];
    let inputs: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
    let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
    code.encode(backend, &inputs, &mut outputs).unwrap();
    parity
}

/// Recovers with rubbish in all lost places; gives the data as they are then.
fn recover(
    code: Code,
    backend: &dyn Backend,
    data: &[Vec<u8>],
    parity: &[Vec<u8>],
    lost: &ChunkSet,
) -> (Result<usize, CodeError>, Vec<Vec<u8>>) {
    let (mut data, mut parity) = (data.to_vec(), parity.to_vec());
    for chunk in lost.iter() {
        data.iter_mut().chain(&mut parity).nth(chunk).unwrap().fill(0xee);
    }
    let mut places: Vec<&mut [u8]> = data.iter_mut().map(Vec::as_mut_slice).collect();
    let parity: Vec<&[u8]> = parity.iter().map(Vec::as_slice).collect();
    let result = code.recover(backend, &mut places, &parity, lost);
    (result, data)
}

/// One pattern of losses: recovered if the code says so, else left alone.
fn check(
    code: Code,
    backend: &dyn Backend,
    data: &[Vec<u8>],
    parity: &[Vec<u8>],
    lost: &ChunkSet,
) -> bool {
    let (result, after) = recover(code, backend, data, parity, lost);
    let lost_data = lost.iter().filter(|&c| c < code.data()).count();
    if code.recovers(lost) {
        assert_eq!(result, Ok(lost_data), "{code} {lost:?}");
        assert_eq!(after, data, "{code} {} {lost:?}", backend.name());
        true
    } else {
        assert_eq!(
            result,
            Err(CodeError::Unrecoverable { data: lost_data, parity: lost.len() - lost_data })
        );
        assert!(
            (0..code.data()).all(|i| lost.contains(i) == (after[i] != data[i])),
            "written to: {code} {lost:?}"
        );
        false
    }
}

/// Every subset of the chunks of small codes, with a full and with a short last chunk.
#[test]
fn every_pattern_of_small_codes() {
    let kernel = Kernel::best();
    for (k, m) in [(1, 1), (1, 4), (2, 1), (2, 2), (3, 5), (4, 2), (5, 3), (6, 4), (7, 3), (8, 4)] {
        for code in [Kind::Mds, Kind::Xor].into_iter().filter_map(|kind| Code::new(kind, k, m).ok())
        {
            for last_bytes in [300, 17] {
                let data = message(k, if k == 1 { last_bytes } else { 300 }, last_bytes, 1);
                let parity = encode(code, &kernel, &data);
                let mut recovered = 0;
                for pattern in 0_u32..1 << (k + m) {
                    let lost: ChunkSet = (0..k + m).filter(|bit| pattern >> bit & 1 == 1).collect();
                    let good = check(code, &kernel, &data, &parity, &lost);
                    recovered += u32::from(good);
                    assert!(
                        code.kind() == Kind::Xor || good == (lost.len() <= m),
                        "{code} is not MDS: {lost:?}"
                    );
                }
                // One in each group, or none, or the parity besides unharmed data.
                let groups = (0..m).map(|g| 2 + (g..k).step_by(m).count() as u32).product::<u32>();
                assert!(
                    code.kind() == Kind::Mds || recovered == groups,
                    "{code}: {recovered} instead of {groups}"
                );
            }
        }
    }
}

/// What travels between versions: these bytes were computed by hand, from the definition.
#[test]
fn parity_bytes_are_for_ever() {
    let data: Vec<Vec<u8>> = [1, 2, 0x80, 0xff].map(|byte| vec![byte]).into();
    assert_eq!(encode(Code::mds(4, 3).unwrap(), &Kernel::best(), &data), [[0x28], [0xd2], [0x00]]);
    assert_eq!(encode(Code::xor(4, 3).unwrap(), &Kernel::best(), &data), [[0xfe], [0x02], [0x80]]);
}

/// The largest codes: as much lost as can be, in several places.
#[test]
fn the_largest_codes_recover() {
    let (k, m) = (unbroken_erasure::MAX_DATA, unbroken_erasure::MAX_PARITY);
    let data = message(k, 200, 199, 5);
    for code in [Code::mds(k, m).unwrap(), Code::xor(k, m).unwrap()] {
        let parity = encode(code, &Kernel::best(), &data);
        for first in [0, 1, 60, k - m, k - 1, k] {
            let lost: ChunkSet = (first..first + m).collect();
            assert!(
                check(code, &Kernel::best(), &data, &parity, &lost)
                    || code.kind() == Kind::Xor && first > k - m
            );
        }
    }
}

fn bytes() -> impl Strategy<Value = (usize, usize)> {
    (1..2_000_usize).prop_flat_map(|chunk| (Just(chunk), 1..=chunk))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Random losses of the code that the paper settles on, up to one more than it mends.
    #[test]
    fn random_patterns_of_32_and_8(
        (chunk_bytes, last_bytes) in bytes(),
        lost in prop::collection::hash_set(0..40_usize, 0..=9),
        seed: u64,
    ) {
        let lost: ChunkSet = lost.into_iter().collect();
        let data = message(32, chunk_bytes, last_bytes, seed);
        for code in [Code::mds(32, 8).unwrap(), Code::xor(32, 8).unwrap()] {
            let parity = encode(code, &Kernel::best(), &data);
            check(code, &Kernel::best(), &data, &parity, &lost);
        }
    }

    /// All kernels make the same parity of any code, and recover the same.
    #[test]
    fn kernels_agree(
        k in 1..=40_usize, m in 1..=12_usize, (chunk_bytes, last_bytes) in bytes(), lost: u64, seed: u64,
    ) {
        let data = message(k, if k == 1 { last_bytes } else { chunk_bytes }, last_bytes, seed);
        for code in [Kind::Mds, Kind::Xor].into_iter().filter_map(|kind| Code::new(kind, k, m).ok()) {
            let lost: ChunkSet = (0..m).map(|i| (lost >> (5 * i)) as usize % (k + m)).collect();
            let mut kernels = Kernel::available();
            let first = kernels.next().unwrap();
            let parity = encode(code, &first, &data);
            check(code, &first, &data, &parity, &lost);
            for kernel in kernels {
                prop_assert_eq!(&encode(code, &kernel, &data), &parity, "{} {}", code, kernel.name());
                check(code, &kernel, &data, &parity, &lost);
            }
        }
    }

    /// Chunks that lie one behind the other are the same chunks.
    #[test]
    fn regions_are_their_chunks(
        k in 1..=20_usize, m in 1..=8_usize, (chunk_bytes, last_bytes) in bytes(), lost in 0..20_usize, seed: u64,
    ) {
        let data = message(k, if k == 1 { last_bytes } else { chunk_bytes }, last_bytes, seed);
        let code = Code::mds(k, m).unwrap();
        let scattered = encode(code, &Kernel::best(), &data);
        let mut region = data.concat();
        let mut parity = vec![0; m * chunk_bytes];
        code.encode_region(&Kernel::best(), &region, &mut parity, chunk_bytes).unwrap();
        for (one, other) in parity.chunks(chunk_bytes).zip(&scattered) {
            prop_assert!(one.starts_with(other));
        }
        let lost: ChunkSet = [lost % k].into_iter().collect();
        let at = lost.iter().next().unwrap() * chunk_bytes;
        region[at] ^= 0xff;
        prop_assert_eq!(code.recover_region(&Kernel::best(), &mut region, &parity, chunk_bytes, &lost), Ok(1));
        prop_assert_eq!(region, data.concat());
    }
}

#[test]
fn chunks_that_do_not_fit_are_refused() {
    let (code, kernel) = (Code::mds(3, 2).unwrap(), Kernel::best());
    let (a, b, empty): (&[u8], &[u8], &[u8]) = (&[1; 8], &[2; 7], &[]);
    let encode = |data: &[&[u8]], lengths: &[usize]| {
        let mut parity: Vec<Vec<u8>> = lengths.iter().map(|len| vec![9; *len]).collect();
        let mut places: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
        let error = code.encode(&kernel, data, &mut places).unwrap_err();
        assert!(parity.iter().flatten().all(|byte| *byte == 9), "written in spite of {error}");
        error
    };
    assert_eq!(encode(&[a, a], &[8, 8]), CodeError::DataGiven { given: 2, expected: 3 });
    assert_eq!(encode(&[a, a, a], &[8]), CodeError::ParityGiven { given: 1, expected: 2 });
    assert_eq!(encode(&[a, b, a], &[8, 8]), CodeError::Length { index: 1, given: 7, expected: 8 });
    assert_eq!(encode(&[b, b, a], &[7, 7]), CodeError::Length { index: 2, given: 8, expected: 7 });
    assert_eq!(
        encode(&[a, a, empty], &[8, 8]),
        CodeError::Length { index: 2, given: 0, expected: 8 }
    );
    assert_eq!(
        encode(&[empty, empty, empty], &[0, 0]),
        CodeError::Length { index: 0, given: 0, expected: 1 }
    );
    assert_eq!(encode(&[a, a, a], &[8, 9]), CodeError::Length { index: 4, given: 9, expected: 8 });
    let error = encode(&[a, a, b], &[8, 7]);
    assert_eq!(
        error.to_string(),
        "chunk 4 has 7 bytes; 8 are right (the last data chunk alone may be shorter, but not empty)"
    );

    let mut data = [[3; 8]; 3];
    let mut places: Vec<&mut [u8]> = data.iter_mut().map(<[u8; 8]>::as_mut_slice).collect();
    let lost: ChunkSet = [0, 5].into_iter().collect();
    let error = code.recover(&kernel, &mut places, &[a, a], &lost).unwrap_err();
    assert_eq!(error, CodeError::NoSuchChunk { index: 5, chunks: 5 });
    let lost: ChunkSet = [0, 1, 3].into_iter().collect();
    let error = code.recover(&kernel, &mut places, &[a, a], &lost).unwrap_err();
    assert!(error.to_string().contains("2 data and 1 parity chunks are lost"), "{error}");
    assert_eq!(data, [[3; 8]; 3]);
}

#[test]
fn regions_that_do_not_fit_are_refused() {
    let (code, kernel) = (Code::mds(3, 2).unwrap(), Kernel::best());
    for (data, parity, chunk_bytes, wrong) in [
        (24, 16, 0, CodeError::Region { given: 24, chunks: 3, chunk_bytes: 0 }),
        (25, 16, 8, CodeError::Region { given: 25, chunks: 3, chunk_bytes: 8 }),
        (16, 16, 8, CodeError::Region { given: 16, chunks: 3, chunk_bytes: 8 }),
        (0, 16, 8, CodeError::Region { given: 0, chunks: 3, chunk_bytes: 8 }),
        (24, 15, 8, CodeError::Region { given: 15, chunks: 2, chunk_bytes: 8 }),
        (24, 24, 8, CodeError::Region { given: 24, chunks: 2, chunk_bytes: 8 }),
        (24, 16, usize::MAX, CodeError::Region { given: 24, chunks: 3, chunk_bytes: usize::MAX }),
    ] {
        let (mut data, mut parity) = (vec![1; data], vec![1; parity]);
        assert_eq!(code.encode_region(&kernel, &data, &mut parity, chunk_bytes), Err(wrong));
        let lost = ChunkSet::new();
        assert_eq!(
            code.recover_region(&kernel, &mut data, &parity, chunk_bytes, &lost),
            Err(wrong)
        );
    }
}
