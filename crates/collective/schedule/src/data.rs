//! Element types, and what reducing two elements gives.
//!
//! An element is handled as its *bits*, in the low bytes of a `u64`. This is the reference that
//! executors are compared with, bit for bit; a fast executor has loops of its own.

use half::{bf16, f16};

macro_rules! integer {
    ($op:expr, $t:ty, $bits:ty, $a:expr, $b:expr) => {{
        let (a, b) = ($a as $t, $b as $t);
        let out = match $op {
            ReduceOp::Sum | ReduceOp::Avg => a.wrapping_add(b),
            ReduceOp::Product => a.wrapping_mul(b),
            ReduceOp::Min => a.min(b),
            ReduceOp::Max => a.max(b),
            ReduceOp::BitAnd => a & b,
            ReduceOp::BitOr => a | b,
            ReduceOp::BitXor => a ^ b,
        };
        out as $bits as u64
    }};
}

macro_rules! float {
    ($op:expr, $t:ty, $bits:ty, $a:expr, $b:expr) => {{
        let (a, b) = (<$t>::from_bits($a as $bits), <$t>::from_bits($b as $bits));
        let nan = a.is_nan() || b.is_nan();
        let out = match $op {
            _ if nan => <$t>::NAN,
            ReduceOp::Sum | ReduceOp::Avg => a + b,
            ReduceOp::Product => a * b,
            ReduceOp::Min if a.total_cmp(&b).is_le() => a,
            ReduceOp::Max if a.total_cmp(&b).is_ge() => a,
            ReduceOp::Min | ReduceOp::Max => b,
            // `Collective::new` refuses these for floating point.
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => <$t>::NAN,
        };
        // ∞ − ∞ and 0 · ∞ make a NaN whose sign depends on the processor
        let out = if out.is_nan() { <$t>::NAN } else { out };
        u64::from(out.to_bits())
    }};
}

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum DataType {
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    F16,
    Bf16,
    F32,
    F64,
}

impl DataType {
    /// All of them.
    pub const ALL: [DataType; 12] = [
        DataType::I8,
        DataType::U8,
        DataType::I16,
        DataType::U16,
        DataType::I32,
        DataType::U32,
        DataType::I64,
        DataType::U64,
        DataType::F16,
        DataType::Bf16,
        DataType::F32,
        DataType::F64,
    ];

    /// Bytes of an element.
    pub const fn bytes(self) -> u64 {
        match self {
            DataType::I8 | DataType::U8 => 1,
            DataType::I16 | DataType::U16 | DataType::F16 | DataType::Bf16 => 2,
            DataType::I32 | DataType::U32 | DataType::F32 => 4,
            DataType::I64 | DataType::U64 | DataType::F64 => 8,
        }
    }

    /// Whether it is a floating-point type, whose sums depend on the order.
    pub const fn is_float(self) -> bool {
        matches!(self, DataType::F16 | DataType::Bf16 | DataType::F32 | DataType::F64)
    }
}

/// How elements of different ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReduceOp {
    /// Their sum. Integers wrap around.
    Sum,
    /// Their product. Integers wrap around.
    Product,
    /// The smallest; NaN if any is NaN; −0 is smaller than +0.
    Min,
    /// The largest; NaN if any is NaN; +0 is larger than −0.
    Max,
    /// Their sum, divided by the number of ranks once at the end. Integers are rounded towards
    /// zero.
    Avg,
    /// Bitwise AND, of integers alone.
    BitAnd,
    /// Bitwise OR, of integers alone.
    BitOr,
    /// Bitwise exclusive OR, of integers alone.
    BitXor,
}

impl ReduceOp {
    /// All of them.
    pub const ALL: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Product,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Avg,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
    ];

    /// Whether elements of that type can be reduced so: bitwise operators take integers alone.
    pub const fn takes(self, data: DataType) -> bool {
        !data.is_float() || !matches!(self, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor)
    }

    /// `a ⊕ b`, in the arithmetic of `data`: each step is rounded to that type. It commutes bit for
    /// bit (a NaN is always the same NaN) and, for floating point, is not associative.
    pub fn combine(self, data: DataType, a: u64, b: u64) -> u64 {
        match data {
            DataType::I8 => integer!(self, i8, u8, a, b),
            DataType::U8 => integer!(self, u8, u8, a, b),
            DataType::I16 => integer!(self, i16, u16, a, b),
            DataType::U16 => integer!(self, u16, u16, a, b),
            DataType::I32 => integer!(self, i32, u32, a, b),
            DataType::U32 => integer!(self, u32, u32, a, b),
            DataType::I64 => integer!(self, i64, u64, a, b),
            DataType::U64 => integer!(self, u64, u64, a, b),
            DataType::F16 => float!(self, f16, u16, a, b),
            DataType::Bf16 => float!(self, bf16, u16, a, b),
            DataType::F32 => float!(self, f32, u32, a, b),
            DataType::F64 => float!(self, f64, u64, a, b),
        }
    }
}

/// One element divided by a number of ranks, as [`ReduceOp::Avg`] ends. The number must not be 0.
pub fn divide(data: DataType, a: u64, by: u32) -> u64 {
    match data {
        DataType::I8 => (i64::from(a as i8) / i64::from(by)) as u8 as u64,
        DataType::U8 => u64::from(a as u8) / u64::from(by),
        DataType::I16 => (i64::from(a as i16) / i64::from(by)) as u16 as u64,
        DataType::U16 => u64::from(a as u16) / u64::from(by),
        DataType::I32 => (i64::from(a as i32) / i64::from(by)) as u32 as u64,
        DataType::U32 => u64::from(a as u32) / u64::from(by),
        DataType::I64 => (a as i64 / i64::from(by)) as u64,
        DataType::U64 => a / u64::from(by),
        DataType::F16 => {
            u64::from(f16::from_f32(f16::from_bits(a as u16).to_f32() / by as f32).to_bits())
        }
        DataType::Bf16 => {
            u64::from(bf16::from_f32(bf16::from_bits(a as u16).to_f32() / by as f32).to_bits())
        }
        DataType::F32 => u64::from((f32::from_bits(a as u32) / by as f32).to_bits()),
        DataType::F64 => (f64::from_bits(a) / f64::from(by)).to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits32(x: f32) -> u64 {
        u64::from(x.to_bits())
    }

    #[test]
    fn integers_wrap_and_keep_their_sign() {
        assert_eq!(ReduceOp::Sum.combine(DataType::U8, 250, 10), 4);
        assert_eq!(ReduceOp::Sum.combine(DataType::I8, 0x7f, 1), 0x80);
        assert_eq!(
            ReduceOp::Min.combine(DataType::I32, 0xffff_ffff, 1),
            0xffff_ffff,
            "-1 is less than 1"
        );
        assert_eq!(ReduceOp::Max.combine(DataType::U32, 0xffff_ffff, 1), 0xffff_ffff);
        assert_eq!(ReduceOp::Product.combine(DataType::I64, u64::MAX, 7), (-7i64) as u64);
        assert_eq!(divide(DataType::I8, 0xf9, 2), 0xfd, "-7 / 2 is -3");
        assert_eq!(ReduceOp::Sum.combine(DataType::U16, 0xffff, 2), 1);
        assert_eq!(ReduceOp::Min.combine(DataType::I16, 0xffff, 1), 0xffff, "-1 is less than 1");
        assert_eq!(divide(DataType::I16, 0xfff9, 2), 0xfffd, "-7 / 2 is -3");
        assert_eq!(ReduceOp::BitAnd.combine(DataType::I64, u64::MAX, 6), 6);
        assert_eq!(ReduceOp::BitOr.combine(DataType::U16, 0x8000, 1), 0x8001);
        assert_eq!(ReduceOp::BitXor.combine(DataType::U8, 0xff, 0x0f), 0xf0);
    }

    #[test]
    fn floats_are_rounded_to_their_type_at_each_step() {
        let one = u64::from(bf16::from_f32(1.0).to_bits());
        let big = u64::from(bf16::from_f32(256.0).to_bits());
        assert_eq!(ReduceOp::Sum.combine(DataType::Bf16, big, one), big, "8 bits of precision");
        let (one, big) = (f16::from_f32(1.0).to_bits(), f16::from_f32(2048.0).to_bits());
        assert_eq!(
            ReduceOp::Sum.combine(DataType::F16, big.into(), one.into()),
            u64::from(big),
            "11 bits"
        );
        assert_eq!(divide(DataType::F32, bits32(1.0), 3), bits32(1.0 / 3.0));
    }

    /// Executors may have the operands in either order.
    #[test]
    fn every_operation_commutes_bit_for_bit() {
        let odd = [
            0.0,
            -0.0,
            1.5,
            -3.0,
            f32::NAN,
            -f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MIN_POSITIVE,
        ];
        for data in DataType::ALL {
            let bits = |x: f32| match data {
                DataType::F16 => u64::from(f16::from_f32(x).to_bits()),
                DataType::Bf16 => u64::from(bf16::from_f32(x).to_bits()),
                DataType::F64 => f64::from(x).to_bits(),
                _ => bits32(x) & (u64::MAX >> (64 - 8 * data.bytes())),
            };
            for op in ReduceOp::ALL.into_iter().filter(|op| op.takes(data)) {
                for a in odd.map(bits) {
                    for b in odd.map(bits) {
                        let (ab, ba) = (op.combine(data, a, b), op.combine(data, b, a));
                        assert_eq!(ab, ba, "{data:?} {op:?} {a:x} {b:x}");
                        assert!(ab >> (8 * data.bytes() - 1) <= 1, "no bits beyond the type");
                    }
                }
            }
        }
    }
}
