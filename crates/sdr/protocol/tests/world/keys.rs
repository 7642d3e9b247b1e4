//! Keys of the memory of an end in virtual time: root keys, and windows.

use unbroken_sdr_protocol::attr::Layout;
use unbroken_sdr_protocol::receives::Keys;

/// Where each slot of a generation leads.
pub(super) type Root = Vec<Vec<Option<(u64, u64)>>>;

pub(super) struct RootKeys<'a>(pub(super) &'a mut Root);

impl Keys<(u64, u64)> for RootKeys<'_> {
    type Error = ();
    fn point(&mut self, generation: u8, slot: u32, buffer: &(u64, u64)) -> Result<(), ()> {
        self.0[usize::from(generation)][slot as usize] = Some(*buffer);
        Ok(())
    }
    fn clear(&mut self, generation: u8, slot: u32) -> Result<(), ()> {
        self.0[usize::from(generation)][slot as usize] = None;
        Ok(())
    }
}

/// Of a device without indirect keys: a window for each slot and channel, which the queue pair of a
/// generation binds.
pub(super) struct Windows {
    of: Vec<Vec<Window>>,
    /// Keys of the receive that was posted last.
    pub(super) granted: Vec<u32>,
}

struct Window {
    /// The upper bits are the window's own.
    key: u32,
    generation: u8,
    buffer: Option<(u64, u64)>,
}

impl Windows {
    pub(super) fn new(layout: &Layout) -> Windows {
        let (channels, slots) = (u32::from(layout.attr().channels), layout.slots);
        let window = |number| Window { key: number << 8, generation: 0, buffer: None };
        let of = (0..channels)
            .map(|channel| (0..slots).map(|slot| window(channel * slots + slot)).collect());
        Windows { of: of.collect(), granted: Vec::new() }
    }

    /// Where a key leads that comes over the queue pair of a generation.
    pub(super) fn find(&self, key: u32, generation: u8) -> Option<(u64, u64)> {
        let window = self.of.iter().flatten().find(|window| window.key == key)?;
        window.buffer.filter(|_| window.generation == generation)
    }
}

impl Keys<(u64, u64)> for &mut Windows {
    type Error = ();
    fn point(&mut self, generation: u8, slot: u32, buffer: &(u64, u64)) -> Result<(), ()> {
        self.granted.clear();
        for windows in &mut self.of {
            let window = &mut windows[slot as usize];
            let key = window.key & !0xff | window.key.wrapping_add(1) & 0xff;
            *window = Window { key, generation, buffer: Some(*buffer) };
            self.granted.push(key);
        }
        Ok(())
    }
    fn clear(&mut self, _: u8, slot: u32) -> Result<(), ()> {
        self.of.iter_mut().for_each(|windows| windows[slot as usize].buffer = None);
        Ok(())
    }
}
