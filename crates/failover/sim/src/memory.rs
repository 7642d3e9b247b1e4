//! The memory of a host, the place of each message in it, and the patterns that tell what lies
//! there.

use crate::rng::mix;
use std::cell::RefCell;
use unbroken_roce::{AtomicOp, MemError, Memory};
use unbroken_types::{Access, PdHandle};

/// What an area of memory is for. Each message and each receive has its own, used once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Area {
    /// Data that this host sends, or where a READ puts its answer.
    Local = 0,
    /// What the peer's message writes or reads.
    Remote = 1,
    /// A receive buffer.
    Recv = 2,
}

/// Address of the first byte.
const BASE: u64 = 0x10_0000;
/// The key of all memory, as applications have it.
pub const KEY: u32 = 0x77;
/// The only protection domain.
pub const PD: PdHandle = PdHandle(5);

/// The key that a QP's memory has on a NIC, where keys are the NIC's own: applications have that of
/// the NIC where the QP was made.
pub fn key_on(default: usize, nic: usize) -> u32 {
    match nic == default {
        true => KEY,
        false => KEY + 0x100 * (1 + nic as u32),
    }
}

/// The memory of a host.
#[derive(Debug)]
pub struct HostMemory {
    bytes: RefCell<Vec<u8>>,
    unit: u64,
    per_area: u64,
    /// Where each QP was made, if keys are the NICs' own.
    defaults: Option<Vec<usize>>,
}

/// The memory of a host as one of its NICs gets at it.
#[derive(Clone, Copy, Debug)]
pub struct NicMemory<'a> {
    host: &'a HostMemory,
    nic: usize,
}

/// The first eight bytes of a name's pattern, in the host's order.
pub const fn first_word(name: u64) -> u64 {
    u64::from_ne_bytes(mix(name).to_le_bytes())
}

impl HostMemory {
    /// Memory for `qps` logical QPs with `count` messages of up to `unit` bytes in each area.
    pub fn new(qps: usize, count: usize, unit: u32, defaults: Option<Vec<usize>>) -> HostMemory {
        let unit = u64::from(unit).next_multiple_of(8) + 8;
        let per_area = count as u64;
        let len = qps as u64 * 3 * per_area * unit;
        HostMemory { bytes: RefCell::new(vec![0; len as usize]), unit, per_area, defaults }
    }

    /// As a NIC gets at it.
    pub fn on(&self, nic: usize) -> NicMemory<'_> {
        NicMemory { host: self, nic }
    }

    /// The address of a message's or receive's area.
    pub fn address(&self, qp: usize, area: Area, index: usize) -> u64 {
        BASE + ((qp as u64 * 3 + area as u64) * self.per_area + index as u64) * self.unit
    }

    /// Which message of `qp` has its data at `address`, if it is in that area.
    pub fn index_of(&self, qp: usize, area: Area, address: u64) -> Option<usize> {
        let from = self.address(qp, area, 0);
        let index = address.checked_sub(from)? / self.unit;
        (index < self.per_area).then_some(index as usize)
    }

    fn range(&self, address: u64, len: u32) -> core::ops::Range<usize> {
        let at = (address - BASE) as usize;
        at..at + len as usize
    }

    /// Writes the pattern of a name.
    pub fn fill(&self, address: u64, len: u32, name: u64) {
        let mut bytes = self.bytes.borrow_mut();
        let range = self.range(address, len);
        for (i, chunk) in bytes[range].chunks_mut(8).enumerate() {
            chunk.copy_from_slice(&mix(name ^ i as u64).to_le_bytes()[..chunk.len()]);
        }
    }

    /// Whether the pattern of a name lies there.
    pub fn holds(&self, address: u64, len: u32, name: u64) -> bool {
        let bytes = self.bytes.borrow();
        let range = self.range(address, len);
        bytes[range]
            .chunks(8)
            .enumerate()
            .all(|(i, chunk)| *chunk == mix(name ^ i as u64).to_le_bytes()[..chunk.len()])
    }

    /// The eight bytes there, in the host's order.
    pub fn word(&self, address: u64) -> u64 {
        let bytes = self.bytes.borrow();
        u64::from_ne_bytes(bytes[self.range(address, 8)].try_into().expect("eight bytes"))
    }

    /// Whether nobody has written there.
    pub fn is_untouched(&self, address: u64, len: u32) -> bool {
        self.bytes.borrow()[self.range(address, len)].iter().all(|&b| b == 0)
    }

    /// A copy of some bytes.
    pub fn copy(&self, address: u64, len: u32) -> Vec<u8> {
        self.bytes.borrow()[self.range(address, len)].to_vec()
    }

    /// The key of an address on a NIC.
    fn key(&self, at: u64, nic: usize) -> u32 {
        let qp = (at / (3 * self.per_area * self.unit).max(1)) as usize;
        self.defaults
            .as_ref()
            .and_then(|defaults| defaults.get(qp))
            .map_or(KEY, |&default| key_on(default, nic))
    }

    fn find(
        &self,
        nic: usize,
        pd: PdHandle,
        key: u32,
        va: u64,
        len: u64,
    ) -> Result<core::ops::Range<usize>, MemError> {
        if key != self.key(va.saturating_sub(BASE), nic) {
            return Err(MemError::NoSuchKey);
        }
        if pd != PD {
            return Err(MemError::WrongPd);
        }
        let at = va.checked_sub(BASE).ok_or(MemError::OutOfBounds)?;
        let end = at.checked_add(len).filter(|&e| e <= self.bytes.borrow().len() as u64);
        Ok(at as usize..end.ok_or(MemError::OutOfBounds)? as usize)
    }
}

impl Memory for NicMemory<'_> {
    fn check(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        len: u64,
        _need: Access,
    ) -> Result<(), MemError> {
        self.host.find(self.nic, pd, key, va, len).map(|_| ())
    }

    fn write(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        data: &[u8],
        _need: Access,
    ) -> Result<(), MemError> {
        let range = self.host.find(self.nic, pd, key, va, data.len() as u64)?;
        self.host.bytes.borrow_mut()[range].copy_from_slice(data);
        Ok(())
    }

    fn read(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        out: &mut [u8],
        _need: Access,
    ) -> Result<(), MemError> {
        let range = self.host.find(self.nic, pd, key, va, out.len() as u64)?;
        out.copy_from_slice(&self.host.bytes.borrow()[range]);
        Ok(())
    }

    fn atomic(&self, pd: PdHandle, key: u32, va: u64, op: AtomicOp) -> Result<u64, MemError> {
        let range = self.host.find(self.nic, pd, key, va, 8)?;
        let mut bytes = self.host.bytes.borrow_mut();
        let word: &mut [u8; 8] = (&mut bytes[range]).try_into().expect("eight bytes");
        let found = u64::from_ne_bytes(*word);
        *word = op.apply(found).to_ne_bytes();
        Ok(found)
    }
}
