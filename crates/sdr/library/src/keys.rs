//! The keys by which peers write into receives, and how they are taken back: stage one of the
//! protection against late packets.
//!
//! - NICs with indirect keys: a receive's bytes are named by its slot in the root key of its
//!   generation. The key is taken back by clearing the slot, which is done when the call returns.
//! - NICs with memory windows of type 2: each channel has a window, which its queue pair of the
//!   generation binds under a new key. The same queue pair takes the key back by a request that
//!   invalidates the window, and its completion.
//! - NICs with neither are refused ([`Protection::of`]).
//!
//! Where the queue pairs of a NIC may not be able to invalidate a window
//! ([`Capabilities::frees_windows`]), the window is freed instead, and the next receive gets a new
//! one.
//!
//! Root keys are known to the peer from the beginning. The keys of windows go to it with the
//! clear-to-send, since each binding has a new one.
//!
//! A window's life, beside its slot's ([`unbroken_sdr_protocol::receives`]):
//!
//! ```text
//!   none ── first use ──► free ── bind, completed ──► bound ── invalidate, completed ──► free
//!    ▲                      │                            │
//!    └── freed by the driver ── its channel has failed ──┘
//! ```
//!
//! While the window is bound, the receive may be cleared to be sent.
//!
//! Whoever posts or completes a receive waits for these completions, one of each channel at a time,
//! and for no longer than [`LONGEST_WAIT`]. A channel that takes longer is given up, as one whose
//! NIC has died: its queue pairs end. The windows of such a channel are freed, which any NIC does
//! without its queue pairs; a window that is gone is as good as one that is invalidated.

use crate::context::{Rail, Shared};
use crate::lanes::Channel;
use crate::memory::Memory;
use crate::qp::Core;
use crate::{lock, Error, Result};
use std::time::{Duration, Instant};
use unbroken::{Access, Capabilities, IndirectEntry, Key, Window};
use unbroken_sdr_protocol::attr::Layout;

/// How a receive's buffer is taken from under packets that are late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// By indirect keys.
    IndirectKeys,
    /// By memory windows of type 2.
    Windows,
}

impl Protection {
    /// The best that all of these NICs can.
    ///
    /// # Errors
    /// A NIC that can none.
    pub(crate) fn of(nics: &[(usize, Capabilities)]) -> Result<Protection> {
        if nics.iter().all(|(_, can)| can.indirect_keys) {
            return Ok(Protection::IndirectKeys);
        }
        match nics.iter().find(|(_, can)| !can.windows) {
            None => Ok(Protection::Windows),
            Some((nic, _)) => Err(Error::wrong(format!(
                "NIC {nic} has not what takes a receive's buffer from under packets that are late: \
                 indirect keys, or memory windows of type 2, on all NICs of a context the same. \
                 (Queue pairs that are reset in their place are not there.) Failover hides the \
                 windows of plain NICs: open the host without it, by Host::bare or \
                 Host::bare_from_env"
            ))),
        }
    }

    /// What memory must allow that receives lie in.
    pub(crate) fn access(self) -> Access {
        match self {
            Protection::IndirectKeys => Access::LOCAL_WRITE.with(Access::REMOTE_WRITE),
            Protection::Windows => Access::LOCAL_WRITE.with(Access::MW_BIND),
        }
    }
}

/// Where a receive's bytes go.
pub(crate) struct Buffer<'a> {
    pub(crate) memory: &'a Memory,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
}

/// The keys of a queue pair.
pub(crate) enum Keys {
    /// Of each NIC, one for each generation.
    Roots(Vec<Vec<Key>>),
    /// Of each channel, one for each slot.
    Windows(Vec<Vec<Option<Held>>>),
}

/// A window, and whether it is bound.
pub(crate) struct Held {
    window: Window,
    bound: bool,
}

/// So long a NIC may take to change a key. Before that stands what the queue pair has to send:
/// [`crate::lanes::SEND_DEPTH`] packets.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// For so long it is polled without a pause.
const POLLED: Duration = Duration::from_micros(200);
const PAUSE: Duration = Duration::from_micros(100);

impl Keys {
    pub(crate) fn new(shared: &Shared, layout: &Layout) -> Result<Keys> {
        let (slots, attr) = (layout.slots as usize, layout.attr());
        if shared.protection == Protection::Windows {
            let windows = || (0..slots).map(|_| None).collect();
            return Ok(Keys::Windows((0..attr.channels).map(|_| windows()).collect()));
        }
        let of_rail = |rail: &Rail| {
            let entries = vec![nothing(rail, layout)?; slots];
            let access = Access::LOCAL_WRITE.with(Access::REMOTE_WRITE);
            (0..attr.generations).map(|_| Ok(rail.pd.indirect_key(&entries, access)?)).collect()
        };
        Ok(Keys::Roots(shared.rails.iter().map(of_rail).collect::<Result<_>>()?))
    }

    /// What a peer writes by over a generation's queue pair on a NIC, where it knows that from the
    /// beginning.
    pub(crate) fn rkey(&self, rail: usize, generation: usize) -> u32 {
        match self {
            Keys::Roots(roots) => roots[rail][generation].rkey(),
            Keys::Windows(_) => 0,
        }
    }
}

/// The entry of a slot that names nothing.
fn nothing(rail: &Rail, layout: &Layout) -> Result<IndirectEntry> {
    let null = rail.null.as_ref().ok_or_else(|| Error::wrong("the NIC has no null key"))?;
    Ok(IndirectEntry { lkey: null.lkey(), addr: 0, len: layout.message_bytes })
}

/// The keys in the hands of who posts or completes a receive.
pub(crate) struct Hands<'a> {
    pub(crate) keys: &'a mut Keys,
    pub(crate) core: &'a Core,
    /// What the peer is to be told: for each channel, the key of the receive that was posted;
    /// nothing where it knows the root keys. 0: the channel has failed, or there are no bytes.
    pub(crate) granted: Vec<u32>,
}

impl unbroken_sdr_protocol::receives::Keys<Buffer<'_>> for Hands<'_> {
    type Error = Error;

    fn point(&mut self, generation: u8, slot: u32, b: &Buffer<'_>) -> Result<()> {
        match self.keys {
            Keys::Roots(_) if b.bytes == 0 => self.clear(generation, slot),
            Keys::Roots(roots) => {
                set(roots, generation, slot, |rail| match b.memory.lkey_on(rail) {
                    Some(lkey) => Ok(IndirectEntry { lkey, addr: b.addr, len: b.bytes }),
                    None => nothing(&self.core.shared.rails[rail], &self.core.layout),
                })
            }
            Keys::Windows(windows) => {
                self.granted = bind(self.core, windows, generation, slot as usize, b)?;
                Ok(())
            }
        }
    }

    fn clear(&mut self, generation: u8, slot: u32) -> Result<()> {
        let rails = &self.core.shared.rails;
        match self.keys {
            Keys::Roots(roots) => {
                set(roots, generation, slot, |rail| nothing(&rails[rail], &self.core.layout))
            }
            Keys::Windows(windows) => {
                invalidate(self.core, windows, generation, slot as usize);
                Ok(())
            }
        }
    }
}

fn set(
    roots: &[Vec<Key>],
    generation: u8,
    slot: u32,
    entry: impl Fn(usize) -> Result<IndirectEntry>,
) -> Result<()> {
    for (rail, roots) in roots.iter().enumerate() {
        roots[usize::from(generation)].update(slot, &entry(rail)?)?;
    }
    Ok(())
}

type Windows = [Vec<Option<Held>>];

/// Binds a window of each channel that lives to a buffer; gives their keys.
fn bind(
    core: &Core,
    windows: &mut Windows,
    generation: u8,
    slot: usize,
    b: &Buffer<'_>,
) -> Result<Vec<u32>> {
    if !core.is_connected() {
        return Err(Error::wrong(
            "the queue pair is not connected: its NICs have no indirect keys, and memory windows \
             are bound by queue pairs that are",
        ));
    }
    let mut granted = vec![0; windows.len()];
    if b.bytes == 0 {
        return Ok(granted); // a window has a byte at least, and packets without bytes need no key
    }
    let rails = &core.shared.rails;
    for (channel, windows) in windows.iter_mut().enumerate() {
        if windows[slot].is_none() && !core.channels[channel].is_dead() {
            windows[slot] = match rails[channel % rails.len()].pd.window() {
                Ok(window) => Some(Held { window, bound: false }),
                // The channel fails as soon as it is asked for anything.
                Err(e) if e.errno() == libc::EIO => None,
                Err(e) => return Err(e.into()),
            };
        }
    }
    each(core, windows, slot, |index, channel, held| {
        let Some(lkey) = b.memory.lkey_on(index % rails.len()) else { return false };
        held.bound = true;
        channel
            .change_key(generation, &held.window.bind(lkey, b.addr, b.bytes, Access::REMOTE_WRITE))
    });
    for (key, windows) in granted.iter_mut().zip(windows) {
        *key = windows[slot].as_ref().map_or(0, |held| held.window.rkey());
    }
    Ok(granted)
}

/// Takes the windows of a slot off what they are bound to.
fn invalidate(core: &Core, windows: &mut Windows, generation: u8, slot: usize) {
    if core.shared.frees_windows {
        // Dropping a window frees it: when that returns, no packet can write through it.
        return windows.iter_mut().for_each(|windows| windows[slot] = None);
    }
    each(core, windows, slot, |_, channel, held| {
        !std::mem::take(&mut held.bound)
            || channel.change_key(generation, &held.window.invalidate())
    });
}

/// Asks each channel to change the key of its window of a slot, and waits until all have. Where
/// that fails the window is freed.
fn each(
    core: &Core,
    windows: &mut Windows,
    slot: usize,
    ask: impl Fn(usize, &Channel, &mut Held) -> bool,
) {
    let asked: Vec<bool> = windows
        .iter_mut()
        .enumerate()
        .map(|(index, windows)| {
            let channel = &core.channels[index];
            windows[slot]
                .as_mut()
                .is_some_and(|held| !channel.is_dead() && ask(index, channel, held))
        })
        .collect();
    let until = Instant::now() + LONGEST_WAIT;
    for (index, asked) in asked.into_iter().enumerate() {
        if !asked || !changed(core, &core.channels[index], until) {
            windows[index][slot] = None;
        }
    }
}

/// Waits until a channel has changed the key that it was asked to change. False: it has failed.
fn changed(core: &Core, channel: &Channel, until: Instant) -> bool {
    let began = Instant::now();
    loop {
        let done = channel
            .key_changed(|seq, packets| lock(&core.state).sends.completed(seq, packets, true));
        match done {
            Some(done) => return done,
            None if Instant::now() >= until => {
                channel.give_up();
                return false;
            }
            None if began.elapsed() < POLLED => std::thread::yield_now(),
            None => std::thread::sleep(PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_that_all_nics_can_is_chosen() {
        let none = Capabilities::default();
        let [indirect, windows] =
            [Capabilities { indirect_keys: true, ..none }, Capabilities { windows: true, ..none }];
        let both = Capabilities { windows: true, ..indirect };
        let of = |nics: &[Capabilities]| {
            Protection::of(&nics.iter().copied().enumerate().collect::<Vec<_>>())
        };
        for (nics, right) in [
            (&[both, indirect][..], Protection::IndirectKeys),
            (&[indirect], Protection::IndirectKeys),
            (&[windows], Protection::Windows),
            (&[both, windows], Protection::Windows),
            (&[windows, both], Protection::Windows),
        ] {
            assert_eq!(of(nics).unwrap(), right, "{nics:?}");
        }
        for (nics, who) in
            [(&[none][..], "NIC 0"), (&[both, none], "NIC 1"), (&[indirect, windows], "NIC 0")]
        {
            let error = of(nics).unwrap_err().to_string();
            assert!(error.contains(who) && error.contains("Host::bare"), "{error}");
        }
    }
}
