//! How likely a submessage cannot be recovered.

use unbroken_erasure::{Code, Kind};

/// The probability that a submessage loses more than its code recovers, if each of its chunks is
/// lost with probability `loss`. Where the paper has the probability of success (appendix B), this
/// is what is missing to 1, so that it keeps its digits where it is small:
///
/// MDS: `Σ_{i > m} C(k+m, i) p^i (1−p)^(k+m−i)`. XOR: `1 − Π [(1−p)^n + n·p·(1−p)^(n−1)]` over the
/// groups, of n chunks with parity (`n = k/m + 1` where *m* divides *k*).
pub fn failure(code: Code, loss: f64) -> f64 {
    match code.kind() {
        Kind::Mds => more_than(code.parity(), code.chunks(), loss),
        Kind::Xor => {
            let groups = (0..code.parity())
                .map(|group| (group..code.data()).step_by(code.parity()).count() + 1);
            -f64::exp_m1(groups.map(|chunks| f64::ln_1p(-more_than(1, chunks, loss))).sum())
        }
    }
}

/// The probability that more than `few` of `n` chunks are lost.
fn more_than(few: usize, n: usize, loss: f64) -> f64 {
    if loss <= 0.0 || loss >= 1.0 {
        return if loss <= 0.0 || few >= n { 0.0 } else { 1.0 };
    }
    // C(n, i) p^i (1−p)^(n−i), each from the one before; n is small enough for the first.
    let odds = loss / (1.0 - loss);
    let mut term = f64::powi(1.0 - loss, n as i32);
    let mut sum = 0.0;
    for i in 1..=n {
        term *= odds * (n - i + 1) as f64 / i as f64;
        if i > few {
            sum += term;
        }
    }
    sum.min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_erasure::ChunkSet;

    /// Every pattern of losses of small codes, each with its probability: what the codes themselves
    /// say.
    #[test]
    fn it_is_what_the_codes_do() {
        for (k, m) in [(1, 1), (4, 2), (5, 2), (6, 3), (8, 4), (2, 5), (3, 3)] {
            for code in [Code::mds(k, m), Code::xor(k, m)].into_iter().flatten() {
                for loss in [0.0, 1e-6, 0.01, 0.3, 0.9] {
                    let mut sum = 0.0;
                    for pattern in 0_u32..1 << (k + m) {
                        let lost: ChunkSet =
                            (0..k + m).filter(|bit| pattern >> bit & 1 == 1).collect();
                        let (n, i) = ((k + m) as i32, lost.len() as i32);
                        if !code.recovers(&lost) {
                            sum += f64::powi(loss, i) * f64::powi(1.0 - loss, n - i);
                        }
                    }
                    let formula = failure(code, loss);
                    assert!(
                        (formula - sum).abs() <= 1e-12 * sum,
                        "{code} at {loss}: {formula} and {sum}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_ends_of_the_scale() {
        for code in [Code::mds(32, 8).unwrap(), Code::xor(32, 8).unwrap()] {
            assert_eq!((failure(code, 0.0), failure(code, 1.0)), (0.0, 1.0));
        }
        // C(5,2) p² for each of 8 groups.
        assert!((failure(Code::xor(32, 8).unwrap(), 1e-9) / 8e-17 - 1.0).abs() < 1e-8);
    }
}
