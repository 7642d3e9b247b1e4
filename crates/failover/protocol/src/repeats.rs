//! Queue pairs that fail by what their own NIC does, while their paths live. One such failure may
//! be the QP's own: it gets a fresh life on the same path. Another on the same NIC soon after, of
//! whichever QP, is evidence about the NIC: that QP moves away.
//!
//! A transport that gives up for want of answers is none of these: that is a question to its path
//! ([`crate::health`]).

use unbroken_types::WcStatus;

/// Failures that are no further apart are the NIC's.
pub const REPEAT_US: u64 = 1_000_000;

/// The failures of the QPs of one NIC.
#[derive(Clone, Copy, Debug, Default)]
pub struct Repeats {
    last_us: Option<u64>,
}

impl Repeats {
    /// A QP has failed with that status. Gives whether it is to leave the NIC.
    pub fn fails(&mut self, now_us: u64, status: WcStatus) -> bool {
        if matches!(status, WcStatus::RetryExcErr | WcStatus::FatalErr) {
            return false;
        }
        self.last_us.replace(now_us).is_some_and(|last_us| now_us <= last_us + REPEAT_US)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_failure_within_a_second_is_the_nics() {
        let (mut nic, failed) = (Repeats::default(), WcStatus::LocQpOpErr);
        assert!(!nic.fails(5_000_000, failed));
        assert!(nic.fails(5_900_000, failed) && nic.fails(6_900_000, failed));
        assert!(!nic.fails(8_000_000, failed), "that was long ago");
        assert!(!nic.fails(8_000_001, WcStatus::RetryExcErr), "a question to its path");
        assert!(nic.fails(8_000_002, failed));
    }
}
