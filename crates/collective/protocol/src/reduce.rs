//! Reductions of bytes: the arithmetic of `unbroken_schedule`, in loops that compilers turn into
//! vector instructions.

use half::{bf16, f16};
use unbroken_schedule::{DataType, ReduceOp};

macro_rules! each {
    ($t:ty, $into:expr, $with:expr, $f:expr) => {{
        const BYTES: usize = size_of::<$t>();
        for (into, with) in $into.chunks_exact_mut(BYTES).zip($with.chunks_exact(BYTES)) {
            let a = <$t>::from_le_bytes(into.try_into().expect("its size"));
            let b = <$t>::from_le_bytes(with.try_into().expect("its size"));
            into.copy_from_slice(&$f(a, b).to_le_bytes());
        }
    }};
}

macro_rules! integer {
    ($t:ty, $op:expr, $into:expr, $with:expr) => {
        match $op {
            ReduceOp::Sum | ReduceOp::Avg => {
                each!($t, $into, $with, |a: $t, b: $t| a.wrapping_add(b))
            }
            ReduceOp::Product => each!($t, $into, $with, |a: $t, b: $t| a.wrapping_mul(b)),
            ReduceOp::Min => each!($t, $into, $with, |a: $t, b: $t| a.min(b)),
            ReduceOp::Max => each!($t, $into, $with, |a: $t, b: $t| a.max(b)),
            ReduceOp::BitAnd => each!($t, $into, $with, |a: $t, b: $t| a & b),
            ReduceOp::BitOr => each!($t, $into, $with, |a: $t, b: $t| a | b),
            ReduceOp::BitXor => each!($t, $into, $with, |a: $t, b: $t| a ^ b),
        }
    };
}

/// One NaN for all: which of two a processor keeps, and its sign, differ between processors.
macro_rules! float {
    ($t:ty, $op:expr, $into:expr, $with:expr) => {{
        let one_nan = |x: $t| if x.is_nan() { <$t>::NAN } else { x };
        let least = |a: $t, b: $t| if a.total_cmp(&b).is_le() { a } else { b };
        let most = |a: $t, b: $t| if a.total_cmp(&b).is_ge() { a } else { b };
        match $op {
            ReduceOp::Sum | ReduceOp::Avg => each!($t, $into, $with, |a: $t, b: $t| one_nan(a + b)),
            ReduceOp::Product => each!($t, $into, $with, |a: $t, b: $t| one_nan(a * b)),
            ReduceOp::Min => {
                each!($t, $into, $with, |a: $t, b: $t| match a.is_nan() || b.is_nan() {
                    true => <$t>::NAN,
                    false => least(a, b),
                })
            }
            ReduceOp::Max => {
                each!($t, $into, $with, |a: $t, b: $t| match a.is_nan() || b.is_nan() {
                    true => <$t>::NAN,
                    false => most(a, b),
                })
            }
            // `Collective::new` refuses these for floating point.
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => {
                each!($t, $into, $with, |_: $t, _: $t| <$t>::NAN);
            }
        }
    }};
}

/// `into = into ⊕ with`, element by element. Both have the same length, a multiple of the element's
/// size.
pub fn reduce(data: DataType, op: ReduceOp, into: &mut [u8], with: &[u8]) {
    match data {
        DataType::I8 => integer!(i8, op, into, with),
        DataType::U8 => integer!(u8, op, into, with),
        DataType::I16 => integer!(i16, op, into, with),
        DataType::U16 => integer!(u16, op, into, with),
        DataType::I32 => integer!(i32, op, into, with),
        DataType::U32 => integer!(u32, op, into, with),
        DataType::I64 => integer!(i64, op, into, with),
        DataType::U64 => integer!(u64, op, into, with),
        DataType::F16 => float!(f16, op, into, with),
        DataType::Bf16 => float!(bf16, op, into, with),
        DataType::F32 => float!(f32, op, into, with),
        DataType::F64 => float!(f64, op, into, with),
    }
}

/// Divides each element by a number, as [`ReduceOp::Avg`] ends. The number must not be 0.
pub fn divide(data: DataType, into: &mut [u8], by: u32) {
    let size = data.bytes() as usize;
    for element in into.chunks_exact_mut(size) {
        let mut bits = [0; 8];
        bits[..size].copy_from_slice(element);
        let result = unbroken_schedule::divide(data, u64::from_le_bytes(bits), by);
        element.copy_from_slice(&result.to_le_bytes()[..size]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever the bits, NaN and infinities among them.
        #[test]
        fn the_same_as_the_reference_bit_for_bit(
            pairs in prop::collection::vec(any::<(u64, u64)>(), 1..40),
            special in any::<u64>(),
        ) {
            for data in DataType::ALL {
                let size = data.bytes() as usize;
                let mask = u64::MAX >> (64 - 8 * size);
                let odd = |bits: u64, k: usize| match (special >> (k % 60)) & 7 {
                    0 => mask,
                    1 => 0,
                    2 => 1 << (8 * size - 1),
                    _ => bits & mask,
                };
                let pairs: Vec<(u64, u64)> =
                    pairs.iter().enumerate().map(|(k, (a, b))| (odd(*a, k), odd(*b, k + 30))).collect();
                let bytes = |pick: fn(&(u64, u64)) -> u64| -> Vec<u8> {
                    pairs.iter().flat_map(|p| pick(p).to_le_bytes()[..size].to_vec()).collect()
                };
                for op in ReduceOp::ALL.into_iter().filter(|op| op.takes(data)) {
                    let (mut into, with) = (bytes(|p| p.0), bytes(|p| p.1));
                    reduce(data, op, &mut into, &with);
                    for (k, (a, b)) in pairs.iter().enumerate() {
                        let want = op.combine(data, *a, *b).to_le_bytes();
                        prop_assert_eq!(&into[k * size..(k + 1) * size], &want[..size], "{:?} {:?} \
                                                                                         {:x} {:x}", data, op, a, b);
                    }
                }
                let mut into = bytes(|p| p.0);
                divide(data, &mut into, 3);
                for (k, (a, _)) in pairs.iter().enumerate() {
                    let want = unbroken_schedule::divide(data, *a, 3).to_le_bytes();
                    prop_assert_eq!(&into[k * size..(k + 1) * size], &want[..size]);
                }
            }
        }
    }
}
