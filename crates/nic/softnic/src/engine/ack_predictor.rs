//! Whether ACKs may wait for the application's answer.
//!
//! A program that answers each message by one of its own (a ping-pong, a request and its reply)
//! sends the ACK along with it, which spares its peer being woken twice. One that does not answer
//! would keep its peer waiting. So an ACK is held back as long as the last one that was held back
//! has left with an answer; with a program that did not answer it is tried again, after twice as
//! long each time.

/// After how many drives waiting is tried again with a program that has just not answered, and with
/// one that never does.
const TRY_AGAIN: u32 = 64;
const MAX_TRY_AGAIN: u32 = 8192;

/// What has been seen.
#[derive(Default)]
pub(crate) struct AckPredictor {
    /// Drives until waiting is tried; 0: now.
    left: u32,
    /// How many it was the last time.
    patience: u32,
}

impl AckPredictor {
    /// An ACK that was held back has left with an answer, or somebody else must see to it now.
    #[inline]
    pub(crate) fn learn(&mut self, answered: bool) {
        self.patience =
            if answered { 0 } else { (self.patience * 2).clamp(TRY_AGAIN, MAX_TRY_AGAIN) };
        self.left = self.patience;
    }

    /// Whether to hold the next one back.
    #[inline]
    pub(crate) fn likely(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_waits_while_answers_come_and_tries_less_and_less_otherwise() {
        let mut a = AckPredictor::default();
        let mut held = |answered: bool| {
            let n = (0..20_000).filter(|_| {
                let held = a.likely();
                if held {
                    a.learn(answered);
                }
                held
            });
            n.count()
        };
        assert_eq!(held(false), 9, "at once, and after 64, 128, … 8192 more");
        assert!(held(true) > 10_000);
        assert!(held(false) <= 10);
    }
}
