//! Memory that is not the API's own, and keys that name no memory or many pieces of it.

use crate::{Nic, Pd, Result};
use std::fmt;
use unbroken_types::{Access, SendFlags, SendOpcode};
use unbroken_verbs::{Capabilities, IndirectEntry, MrKeys, MwBind, SendWr, WindowType};

impl Nic {
    /// What the NIC can do beyond plain verbs.
    pub fn capabilities(&self) -> Capabilities {
        self.context().capabilities()
    }
}

/// A key. What it names stays usable by the network until it is dropped, and not a moment longer.
pub struct Key {
    keys: MrKeys,
    pd: Pd,
}

impl Key {
    /// The local key, for scatter/gather entries and entries of indirect keys.
    pub fn lkey(&self) -> u32 {
        self.keys.lkey
    }

    /// The remote key, for the peer.
    pub fn rkey(&self) -> u32 {
        self.keys.rkey
    }

    /// Replaces an entry of an indirect key by one that is not longer than the place that it was
    /// made with. When it returns, nothing from the network touches what the old entry named by
    /// this key any more.
    pub fn update(&self, index: u32, entry: &IndirectEntry) -> Result<()> {
        self.pd.0.nic.context().update_entry(self.keys.lkey, index, entry)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("keys", &self.keys).finish_non_exhaustive()
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        // It fails only in a forked child, where the network does not work on it.
        let _ = self.pd.0.nic.context().dereg_mr(self.keys.lkey);
    }
}

impl Pd {
    /// Registers memory of the caller's, who keeps it as long as the key.
    pub fn register_at(&self, addr: u64, bytes: u64, access: Access) -> Result<Key> {
        let keys = self.0.nic.context().reg_mr(self.0.handle, addr, bytes, addr, access)?;
        Ok(Key { keys, pd: self.clone() })
    }

    /// Makes a key that names nothing, at any address: what is written there is dropped.
    pub fn null_key(&self) -> Result<Key> {
        let lkey = self.0.nic.context().alloc_null_mr(self.0.handle)?;
        Ok(Key { keys: MrKeys { lkey, rkey: lkey }, pd: self.clone() })
    }

    /// Makes a key whose bytes, from 0 on, are those of the entries one behind the other;
    /// EOPNOTSUPP where the NIC has none ([`Nic::capabilities`]).
    pub fn indirect_key(&self, entries: &[IndirectEntry], access: Access) -> Result<Key> {
        let keys = self.0.nic.context().create_indirect(self.0.handle, entries, access)?;
        Ok(Key { keys, pd: self.clone() })
    }

    /// Makes a memory window of type 2, bound to nothing; EOPNOTSUPP where the NIC has none
    /// ([`Nic::capabilities`]).
    pub fn window(&self) -> Result<Window> {
        let rkey = self.0.nic.context().alloc_window(self.0.handle, WindowType::Two)?;
        Ok(Window { rkey, pd: self.clone() })
    }
}

/// A memory window of type 2. A work request binds it to a part of a region, for peers of the queue
/// pair that it is posted to, and another takes it off. The region has [`Access::MW_BIND`], and
/// stays as long as the window is bound. Dropping it takes it off, too.
pub struct Window {
    rkey: u32,
    pd: Pd,
}

impl Window {
    /// The remote key of the binding that was made last, for the peer.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The request that binds the window, under its next key, to bytes of the region with this
    /// local key. The peer counts them from 0.
    pub fn bind(&mut self, lkey: u32, addr: u64, length: u64, access: Access) -> SendWr<'static> {
        let new_key = self.rkey & !0xff | self.rkey.wrapping_add(1) & 0xff;
        let bind = MwBind {
            window: self.rkey,
            new_key,
            lkey,
            addr,
            length,
            access: access.with(Access::ZERO_BASED),
        };
        self.rkey = new_key;
        bind.wr(0, SendFlags::SIGNALED)
    }

    /// The request that takes the window off what it is bound to.
    pub fn invalidate(&self) -> SendWr<'static> {
        let (opcode, flags) = (SendOpcode::LocalInv, SendFlags::SIGNALED);
        SendWr { opcode, flags, rkey: self.rkey, ..SendWr::default() }
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window").field("rkey", &self.rkey).finish_non_exhaustive()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // It fails only in a forked child, where the network does not work on it.
        let _ = self.pd.0.nic.context().dealloc_window(self.rkey);
    }
}
