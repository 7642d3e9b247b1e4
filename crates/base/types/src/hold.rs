//! Keeping work that no QP takes now: whoever has stopped a QP, or cannot reach it, keeps what is
//! posted behind what was outstanding, and gives all of it to the next.

use crate::{Backlog, PostError, QpCaps, RecvEntry, RecvWr, SendBatch, SendEntry, SendWr};

impl Backlog {
    /// Keeps sends behind those that are here, all or none, for a QP of these sizes. `in_device`:
    /// how many are before them elsewhere. `fits` says what is wrong with one: the QP that adopts
    /// the backlog takes all of it or nothing, so one that does not fit would end the rest.
    pub fn hold_sends(
        &mut self,
        caps: &QpCaps,
        in_device: u32,
        batch: &dyn SendBatch,
        fits: impl Fn(&SendWr<'_>) -> Result<(), PostError>,
    ) -> Result<(), PostError> {
        let before = in_device as usize + self.sends.len();
        if before + batch.count() > caps.max_send_wr as usize {
            return Err(PostError::QueueFull(before as u32));
        }
        (0..batch.count()).try_for_each(|i| fits(&batch.wr(i)))?;
        self.keys_changed |= (0..batch.count()).any(|i| batch.wr(i).opcode.changes_keys());
        self.sends.extend((0..batch.count()).map(|i| SendEntry::from(&batch.wr(i))));
        Ok(())
    }

    /// Keeps a receive behind those that are here, for a QP of these sizes. `in_device`: how many
    /// are before them elsewhere.
    pub fn hold_recv(
        &mut self,
        caps: &QpCaps,
        in_device: u32,
        wr: &RecvWr<'_>,
    ) -> Result<(), PostError> {
        let before = in_device as usize + self.recvs.len();
        let (have, max) = (wr.sges.len(), caps.max_recv_sge);
        if before >= caps.max_recv_wr as usize {
            return Err(PostError::QueueFull(before as u32));
        }
        if have > max as usize {
            return Err(PostError::TooManySges { have, max });
        }
        self.recvs.push(RecvEntry { wr_id: wr.wr_id, sges: wr.sges.to_vec() });
        Ok(())
    }

    /// Puts work behind what is here that was posted later, and that no QP had. Its counts say
    /// nothing.
    pub fn append(&mut self, later: Backlog) {
        self.sends.extend(later.sends);
        self.recvs.extend(later.recvs);
        self.keys_changed |= later.keys_changed;
    }

    /// Nothing is outstanding.
    pub fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.recvs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{check_send, SendFlags, SendOpcode, Sge};

    const CAPS: QpCaps = QpCaps {
        max_send_wr: 4,
        max_recv_wr: 3,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };

    struct Batch<'a>(Vec<SendWr<'a>>);

    impl SendBatch for Batch<'_> {
        fn count(&self) -> usize {
            self.0.len()
        }
        fn wr(&self, index: usize) -> SendWr<'_> {
            self.0[index]
        }
    }

    fn sends<'a>(ids: impl IntoIterator<Item = u64>, sges: &'a [Sge]) -> Batch<'a> {
        Batch(ids.into_iter().map(|wr_id| SendWr { wr_id, sges, ..SendWr::default() }).collect())
    }

    #[test]
    fn a_batch_is_kept_whole_or_not_at_all_within_the_sizes_of_the_qp() {
        let (mut held, sges) = (Backlog::default(), [Sge::default(); 2]);
        let fits = |wr: &SendWr<'_>| check_send(&CAPS, wr);
        held.hold_sends(&CAPS, 1, &sends(0..2, &[]), fits).unwrap();
        assert_eq!(
            held.hold_sends(&CAPS, 1, &sends(2..4, &[]), fits),
            Err(PostError::QueueFull(3)),
            "one is elsewhere"
        );
        let mut batch = sends(2..3, &[]);
        batch.0.extend(sends(3..4, &sges).0);
        assert_eq!(
            held.hold_sends(&CAPS, 0, &batch, fits),
            Err(PostError::TooManySges { have: 2, max: 1 })
        );
        assert!(held.sends.iter().map(|s| s.wr_id).eq(0..2) && !held.keys_changed);
        let bind = SendWr { opcode: SendOpcode::BindMw, ..SendWr::default() };
        held.hold_sends(&CAPS, 0, &bind, fits).unwrap();
        assert!(held.keys_changed && !held.sends[2].flags.contains(SendFlags::FENCE));
    }

    #[test]
    fn receives_are_kept_within_the_sizes_of_the_qp_and_in_order() {
        let (mut held, sges) = (Backlog::default(), [Sge::default(); 2]);
        let recv = |wr_id, n| RecvWr { wr_id, sges: &sges[..n] };
        held.hold_recv(&CAPS, 1, &recv(1, 1)).unwrap();
        assert_eq!(
            held.hold_recv(&CAPS, 1, &recv(2, 2)),
            Err(PostError::TooManySges { have: 2, max: 1 })
        );
        held.hold_recv(&CAPS, 1, &recv(2, 1)).unwrap();
        assert_eq!(held.hold_recv(&CAPS, 1, &recv(3, 1)), Err(PostError::QueueFull(3)));
        let mut first = Backlog::default();
        assert!(first.is_empty());
        first.hold_recv(&CAPS, 0, &recv(0, 0)).unwrap();
        first.append(held);
        assert!(first.recvs.iter().map(|r| r.wr_id).eq(0..3) && !first.is_empty());
    }
}
