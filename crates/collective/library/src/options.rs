//! How a communicator is to be.

use std::path::PathBuf;
use std::time::Duration;

use unbroken_collective_protocol::frame::HEADER_BYTES;
use unbroken_schedule::{Folding, Form};

use crate::error::{Error, Result};
use crate::numa::Numa;

/// With fewer a stream cannot go on while a frame is being used.
const LEAST_SLOTS: u32 = 2;
/// Payload of slots that have become shorter than was asked for, at least.
const LEAST_PAYLOAD_BYTES: u32 = 4 << 10;

/// How a communicator is to be. All ranks must have the same but for `numa`.
#[derive(Clone, Debug)]
pub struct Options {
    /// Queue pairs that fail over by themselves (SHIFT) carry the paths. Without, this library
    /// alone does what is needed.
    pub logical: bool,
    /// The order of reductions; in order, results are bitwise equal whatever fails.
    pub folding: Folding,
    /// Slots of a stream, and bytes of payload in each (a multiple of 64); fewer and shorter where
    /// there are so many ranks that they would take more than `memory_bytes`.
    pub slots: u32,
    /// See `slots`.
    pub payload_bytes: u32,
    /// Bytes of all slots, if there were streams with all ranks of other hosts. There are with
    /// those that an operation has exchanged something with. As much again may be taken by pairs
    /// that send.
    pub memory_bytes: u64,
    /// Frames that a NIC has on its way at most; to one rank half of them, while others wait for
    /// their turn.
    pub window: u32,
    /// Local ACK timeout (4.096 µs · 2^n) and retries of plain queue pairs: after how long a silent
    /// path fails.
    pub ack_timeout: u8,
    /// See `ack_timeout`.
    pub retries: u8,
    /// The shape of operations that can have it; the planner chooses that of others, and of those
    /// whose ranks the NICs that are left do not join so. `None`: of all.
    pub shape: Option<Form>,
    /// What each NIC carries, in Mbit/s, for the choice of a plan, until it was measured.
    pub nic_mbps: u32,
    /// What is known of the NUMA nodes of this rank's host; each rank has its own.
    pub numa: Numa,
    /// After standing still for so long, a rank asks the others what they are doing.
    pub ask: Duration,
    /// How long an operation may stand still, and two ranks be without a path; at the end, how long
    /// one may take nothing of what was sent to it.
    pub timeout: Duration,
    /// Plan anew when NICs are lost or come back, so that all that are left share the work.
    /// Without, what a lost NIC carried goes over one other.
    pub balance: bool,
    /// Plan with what NICs are seen to carry, and with how long messages are seen to take. Without,
    /// with `nic_mbps` and 5 µs.
    pub measure: bool,
    /// Where the status socket is to lie ([`crate::snapshots`]). None without.
    pub status_folder: Option<PathBuf>,
    /// Operations that may wait or run at one time, of all ranks and of each pair that sends.
    pub queue: usize,
    /// How long to wait for all ranks at the beginning, and for what was sent to arrive at the end.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            logical: false,
            folding: Folding::InOrder,
            slots: 16,
            payload_bytes: 64 << 10,
            memory_bytes: 128 << 20,
            window: 16,
            ack_timeout: 13,
            retries: 3,
            shape: None,
            nic_mbps: 100_000,
            numa: Numa::default(),
            ask: Duration::from_millis(500),
            timeout: Duration::from_secs(20),
            balance: true,
            measure: true,
            status_folder: None,
            queue: 256,
            patience: Duration::from_secs(60),
        }
    }
}

impl Options {
    /// What all ranks must have alike, as a text.
    pub(crate) fn settings(&self) -> String {
        format!(
            "logical {}, {:?}, shape {}, {} slots of {} bytes, {} at most, {} Mbit/s, \
             timeout {} ms, balance {}, measure {}",
            self.logical,
            self.folding,
            self.shape.map_or("any", Form::name),
            self.slots,
            self.payload_bytes,
            self.memory_bytes,
            self.nic_mbps,
            self.timeout.as_millis(),
            self.balance,
            self.measure
        )
    }

    /// Slots of a stream and bytes of payload in each, where a rank has so many others on other
    /// hosts, with a stream each way to each of them for each rail. All ranks come to the same.
    pub(crate) fn slots_for(&self, others: usize, rails: u8) -> (u32, u32) {
        let header = HEADER_BYTES as u64;
        let streams = 2 * (others as u64).max(1) * u64::from(rails).max(1);
        let room = self.memory_bytes / streams;
        let fit = room / (u64::from(self.payload_bytes) + header);
        let slots = fit.clamp(LEAST_SLOTS.into(), self.slots.into()) as u32;
        let payload = match fit < LEAST_SLOTS.into() {
            true => (room / u64::from(LEAST_SLOTS)).saturating_sub(header) / 64 * 64,
            false => self.payload_bytes.into(),
        };
        let least = u64::from(LEAST_PAYLOAD_BYTES.min(self.payload_bytes));
        (slots, payload.max(least) as u32)
    }

    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |what: String| Err(Error::Refused(what));
        if !(LEAST_SLOTS..=1024).contains(&self.slots) {
            return refuse(format!("{} slots; 2 to 1024 are possible", self.slots));
        }
        if self.payload_bytes == 0
            || self.payload_bytes > 1 << 24
            || !self.payload_bytes.is_multiple_of(64)
        {
            return refuse(format!(
                "slots of {} bytes; a multiple of 64 up to 16 MiB is right",
                self.payload_bytes
            ));
        }
        if !(1..=65536).contains(&self.queue) {
            return refuse(format!("room for {} operations; 1 to 65536 are possible", self.queue));
        }
        if let (Folding::InOrder, Some(shape)) = (self.folding, self.shape) {
            if !shape.reduces_in_order() {
                return refuse(format!(
                    "shape {shape} reduces in an order of its own, which Folding::InOrder rules \
                     out: Folding::Any (anyOrder, --any-order) is right, or one-shot, direct or \
                     stars"
                ));
            }
        }
        if !(1..=64).contains(&self.window) {
            return refuse(format!("a window of {} frames; 1 to 64 are possible", self.window));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_many_ranks_take_no_more_than_they_may() {
        let options = Options::default();
        assert_eq!(options.slots_for(1, 4), (16, 64 << 10), "8 MiB");
        assert_eq!(options.slots_for(15, 4), (16, 64 << 10), "126 MiB");
        assert_eq!(options.slots_for(63, 4), (4, 64 << 10));
        assert_eq!(options.slots_for(0, 0), (16, 64 << 10), "alone");
        for (others, rails) in [(63, 8), (127, 8), (504, 8)] {
            let (slots, payload) = options.slots_for(others, rails);
            let bytes = 2 * others * usize::from(rails) * slots as usize * (payload as usize + 64);
            assert!(bytes <= 128 << 20 && payload % 64 == 0, "{others}: {slots} of {payload}");
        }
        assert_eq!(options.slots_for(1 << 16, 8), (2, 4 << 10), "there is a least");
        let short = Options { payload_bytes: 64, ..Options::default() };
        assert_eq!(short.slots_for(1 << 16, 8), (2, 64));
    }
}
