//! Numbers of the specification: PSN arithmetic, AETH syndromes, timers.

use unbroken_types::PSN_MASK;

/// `psn + n`.
pub(crate) const fn psn_add(psn: u32, n: u32) -> u32 {
    psn.wrapping_add(n) & PSN_MASK
}

/// How far `a` is ahead of `b`, where it is known not to be behind.
pub(crate) const fn psn_ahead(a: u32, b: u32) -> u32 {
    a.wrapping_sub(b) & PSN_MASK
}

/// How far `a` is ahead of `b`, negative if behind; right within half of the PSN space.
pub(crate) const fn psn_diff(a: u32, b: u32) -> i32 {
    (a.wrapping_sub(b) << 8) as i32 >> 8
}

/// Syndrome of an ACK that grants any number of messages.
pub(crate) const ACK_UNLIMITED: u8 = 0x1f;

/// Codes of a NAK.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum NakCode {
    Sequence = 0,
    InvalidRequest = 1,
    RemoteAccess = 2,
    RemoteOperation = 3,
}

/// What an AETH syndrome says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Syndrome {
    Ack,
    /// Receiver not ready, with the code of the timer.
    Rnr(u8),
    Nak(NakCode),
    /// Reserved: to be ignored.
    Unknown,
}

impl Syndrome {
    pub(crate) const fn parse(byte: u8) -> Syndrome {
        match (byte >> 5 & 3, byte & 0x1f) {
            (0, _) => Syndrome::Ack,
            (1, timer) => Syndrome::Rnr(timer),
            (3, 0) => Syndrome::Nak(NakCode::Sequence),
            (3, 1) => Syndrome::Nak(NakCode::InvalidRequest),
            (3, 2) => Syndrome::Nak(NakCode::RemoteAccess),
            (3, 3) => Syndrome::Nak(NakCode::RemoteOperation),
            _ => Syndrome::Unknown,
        }
    }

    /// The responder has ended, by a request that it must not do.
    pub(crate) const fn ends_peer(self) -> bool {
        matches!(
            self,
            Syndrome::Nak(
                NakCode::InvalidRequest | NakCode::RemoteAccess | NakCode::RemoteOperation
            )
        )
    }

    pub(crate) const fn byte(self) -> u8 {
        match self {
            Syndrome::Ack | Syndrome::Unknown => ACK_UNLIMITED,
            Syndrome::Rnr(timer) => 0x20 | timer & 0x1f,
            Syndrome::Nak(code) => 0x60 | code as u8,
        }
    }
}

/// The local ACK timeout of a 5-bit code in microseconds: 4.096 µs · 2^code; `None` (for ever) for
/// 0.
pub(crate) const fn ack_timeout_us(code: u8) -> Option<u64> {
    match code & 0x1f {
        0 => None,
        c => Some(4096u64.wrapping_shl(c as u32) / 1000),
    }
}

/// The RNR timer of a 5-bit code in microseconds.
pub(crate) const fn rnr_timer_us(code: u8) -> u64 {
    const TENS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    TENS[(code & 0x1f) as usize] as u64 * 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psns_wrap() {
        assert_eq!(psn_add(0xff_ffff, 1), 0);
        assert_eq!(psn_diff(0, 0xff_ffff), 1);
        assert_eq!(psn_diff(0xff_ffff, 0), -1);
        assert_eq!(psn_ahead(3, 0xff_fffe), 5);
    }

    #[test]
    fn timers_are_the_specifications() {
        assert_eq!(ack_timeout_us(0), None);
        assert_eq!(ack_timeout_us(14), Some(67_108));
        assert_eq!(ack_timeout_us(31), Some(8_796_093_022));
        assert_eq!((rnr_timer_us(0), rnr_timer_us(1), rnr_timer_us(12)), (655_360, 10, 640));
        assert_eq!(rnr_timer_us(31), 491_520);
    }

    #[test]
    fn syndromes_go_there_and_back() {
        for b in 0..=255u8 {
            let s = Syndrome::parse(b);
            if s != Syndrome::Unknown && s != Syndrome::Ack {
                assert_eq!(Syndrome::parse(s.byte()), s);
            }
        }
        assert_eq!(Syndrome::parse(0x2c), Syndrome::Rnr(12));
        assert_eq!(Syndrome::parse(0x61), Syndrome::Nak(NakCode::InvalidRequest));
    }
}
