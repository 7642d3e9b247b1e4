//! Static rates: `enum ibv_rate` in multiples of 2.5 Gbit/s and in Mbit/s.

use crate::real::pass;
use std::ffi::c_int;

/// Code, multiple of the base rate (0 where it is none), Mbit/s.
const RATES: &[(c_int, c_int, c_int)] = &[
    (2, 1, 2_500),
    (5, 2, 5_000),
    (3, 4, 10_000),
    (6, 8, 20_000),
    (4, 12, 30_000),
    (7, 16, 40_000),
    (8, 24, 60_000),
    (9, 32, 80_000),
    (10, 48, 120_000),
    (11, 0, 14_062),
    (12, 0, 56_250),
    (13, 0, 112_500),
    (14, 0, 168_750),
    (15, 0, 25_781),
    (16, 0, 103_125),
    (17, 0, 206_250),
    (18, 0, 309_375),
    (19, 11, 28_125),
    (20, 20, 50_000),
    (21, 160, 400_000),
    (22, 240, 600_000),
    (23, 320, 800_000),
    (24, 480, 1_200_000),
];
/// `IBV_RATE_MAX`: no limit.
const RATE_MAX: c_int = 0;

#[no_mangle]
extern "C" fn ibv_rate_to_mult(rate: c_int) -> c_int {
    pass!(ibv_rate_to_mult(rate));
    RATES.iter().find(|r| r.0 == rate && r.1 != 0).map_or(-1, |r| r.1)
}

#[no_mangle]
extern "C" fn mult_to_ibv_rate(mult: c_int) -> c_int {
    RATES.iter().find(|r| r.1 == mult && r.1 != 0).map_or(RATE_MAX, |r| r.0)
}

#[no_mangle]
extern "C" fn ibv_rate_to_mbps(rate: c_int) -> c_int {
    pass!(ibv_rate_to_mbps(rate));
    RATES.iter().find(|r| r.0 == rate).map_or(-1, |r| r.2)
}

#[no_mangle]
extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_int {
    RATES.iter().find(|r| r.2 == mbps).map_or(RATE_MAX, |r| r.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_go_both_ways() {
        for (code, mult, mbps) in RATES {
            assert_eq!(ibv_rate_to_mbps(*code), *mbps);
            assert_eq!(mbps_to_ibv_rate(*mbps), *code);
            if *mult != 0 {
                assert_eq!(mult_to_ibv_rate(ibv_rate_to_mult(*code)), *code);
            }
        }
        assert_eq!(ibv_rate_to_mult(1), -1);
        assert_eq!(mult_to_ibv_rate(3), RATE_MAX);
    }
}
