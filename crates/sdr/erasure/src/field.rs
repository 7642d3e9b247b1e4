//! Arithmetic in GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), and the tables that
//! kernels multiply by.
//!
//! Addition is XOR; 2 generates all elements but 0. All tables are made by the compiler.

/// The field's polynomial without x^8.
const POLYNOMIAL: u8 = 0x1d;

/// `2·a`.
const fn double(a: u8) -> u8 {
    (a << 1) ^ if a & 0x80 != 0 { POLYNOMIAL } else { 0 }
}

/// Powers of 2, twice over, so that the sum of two logarithms needs no modulo.
const POWERS: [u8; 510] = {
    let mut table = [0; 510];
    let (mut i, mut power) = (0, 1);
    while i < 510 {
        table[i] = power;
        power = double(power);
        i += 1;
    }
    table
};

/// Logarithms to base 2; that of 0 means nothing.
const LOGARITHMS: [u8; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 255 {
        table[POWERS[i] as usize] = i as u8;
        i += 1;
    }
    table
};

/// `a·b`.
pub(crate) const fn multiply(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    POWERS[LOGARITHMS[a as usize] as usize + LOGARITHMS[b as usize] as usize]
}

/// `1/a`; `a` is not 0.
pub(crate) const fn inverse(a: u8) -> u8 {
    POWERS[255 - LOGARITHMS[a as usize] as usize]
}

/// For each factor its products with 0 to 15 and with 16 times these: a byte's product is the sum
/// of those of its halves.
#[cfg(target_arch = "x86_64")]
pub(crate) static NIBBLES: [[u8; 32]; 256] = {
    let mut table = [[0; 32]; 256];
    let mut factor = 0;
    while factor < 256 {
        let mut n = 0;
        while n < 16 {
            table[factor][n] = multiply(factor as u8, n as u8);
            table[factor][16 + n] = multiply(factor as u8, (n << 4) as u8);
            n += 1;
        }
        factor += 1;
    }
    table
};

/// For each factor the matrix over GF(2) by which GFNI multiplies: bit *i* of a product is the
/// parity of the byte and byte *7 − i*.
#[cfg(target_arch = "x86_64")]
pub(crate) static MATRICES: [u64; 256] = {
    let mut table = [0; 256];
    let mut factor = 0;
    while factor < 256 {
        let (mut column, mut product) = (0, factor as u8);
        while column < 8 {
            let mut bit = 0;
            while bit < 8 {
                let entry = (product >> bit & 1) as u64;
                table[factor] |= entry << (8 * (7 - bit) + column);
                bit += 1;
            }
            product = double(product);
            column += 1;
        }
        factor += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Long multiplication and division, as at school.
    fn slowly(a: u8, b: u8) -> u8 {
        let mut product = 0u16;
        for bit in 0..8 {
            product ^= if b >> bit & 1 == 1 { u16::from(a) << bit } else { 0 };
        }
        for bit in (8..15).rev() {
            product ^= if product >> bit & 1 == 1 { 0x11d << (bit - 8) } else { 0 };
        }
        product as u8
    }

    #[test]
    fn products_are_those_of_the_polynomial() {
        for a in 0..=255 {
            for b in 0..=255 {
                assert_eq!(multiply(a, b), slowly(a, b), "{a} times {b}");
            }
            assert!(a == 0 || multiply(a, inverse(a)) == 1, "1/{a}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn tables_multiply() {
        for factor in 0..=255u8 {
            let (nibbles, matrix) =
                (&NIBBLES[usize::from(factor)], MATRICES[usize::from(factor)].to_le_bytes());
            for byte in 0..=255u8 {
                let product = multiply(factor, byte);
                assert_eq!(
                    nibbles[usize::from(byte & 15)] ^ nibbles[16 + usize::from(byte >> 4)],
                    product
                );
                let bits = (0..8).map(|i| ((matrix[7 - i] & byte).count_ones() as u8 & 1) << i);
                assert_eq!(bits.sum::<u8>(), product);
            }
        }
    }
}
