//! What shift runs over: the NICs of this process's host, of whatever kind.
//!
//! Who makes them (crates/api/nics) hands them down. Nothing here names a kind of device: shift
//! knows [`Device`] alone, and learns of failures through it.

use crate::preference::Place;
use std::path::PathBuf;
use std::sync::Arc;
use unbroken_types::Gid;
use unbroken_verbs::{
    Capabilities, Device, DeviceAttr, EventSink, KeyAnswer, MemoryDomain, PortAttr, Result,
    UdAliases,
};

/// The NICs of this process's host.
pub trait NicSet: Send + Sync {
    /// How many there are.
    fn count(&self) -> usize;
    /// The name of NIC `i` in events and status.
    fn name(&self, i: usize) -> String;
    /// What programs see NIC `i` as.
    fn device_name(&self, i: usize) -> String {
        format!("unb{i}")
    }
    /// The host's name.
    fn host(&self) -> String;
    /// What NIC `i` can do beyond plain verbs, open or not.
    fn capabilities(&self, i: usize) -> Capabilities;
    /// The GID of NIC `i`, known before it is opened.
    fn gid(&self, i: usize) -> Gid;
    /// The GID by which peers reach NIC `i` now. [`NicSet::gid`] is its name, and stays.
    fn address(&self, i: usize) -> Gid {
        self.gid(i)
    }
    /// The program connects a queue pair by the GID at that index of NIC `i`'s port 1: peers are in
    /// that network. Gives whether an address is another now.
    fn follow(&self, i: usize, index: u8) -> bool {
        let _ = (i, index);
        false
    }
    /// Bytes of the program's regions that are registered on NIC `i`, where each NIC has its own.
    fn registered_bytes(&self, i: usize) -> u64 {
        let _ = i;
        0
    }
    /// The legs that are down of the bond behind NIC `i`, if there is a bond.
    fn legs_down(&self, i: usize) -> Vec<String> {
        let _ = i;
        Vec::new()
    }
    /// The GID of port 1 of the NIC, of whatever host, that has a port with this GID: QPNs are a
    /// NIC's, whichever port carries its QPs.
    fn first_port(&self, gid: Gid) -> Gid;
    /// The GID at an index of the table of NIC `i`'s port 1, where [`NicSet::first_port`] may not
    /// lead from it to [`NicSet::gid`]. None where there is none.
    fn gid_at(&self, i: usize, index: u8) -> Option<Gid> {
        let _ = (i, index);
        None
    }
    /// The node GUID of NIC `i`.
    fn node_guid(&self, i: usize) -> u64;
    /// Limits and identity of NIC `i`, open or not.
    fn attr(&self, i: usize) -> DeviceAttr;
    /// A port of NIC `i`, counted from 1, open or not, in the state that the caller knows.
    fn port(&self, i: usize, port: u8, usable: bool) -> Result<PortAttr>;
    /// The GID of the InfiniBand port that has this LID, as NIC `i` knows it, or one that stands for
    /// it; or why there is none. `global`: the GID that the program names beside the LID.
    fn gid_of_lid(&self, i: usize, lid: u16, global: Option<Gid>) -> Result<Gid>;
    /// Opens NIC `i`. A dead one can be opened again when it is healed.
    fn open(&self, i: usize, sink: Arc<dyn EventSink>) -> Result<Arc<dyn Device>>;
    /// Protection domains and regions, as the contexts of NIC `i` see them. A domain is good on
    /// every NIC that shares its objects.
    fn memory(&self, i: usize) -> Arc<dyn MemoryDomain>;
    /// On which other NICs what the contexts of each NIC make is to be made ready, the best first.
    /// Told once, before any is opened; nothing to do where objects are good on all NICs.
    fn prepare(&self, _on: Vec<Vec<usize>>) {}
    /// By which keys a region is known on each NIC whose contexts of NIC `i` know it by this one,
    /// where keys are a NIC's own.
    fn keys(&self, i: u8, rkey: u32) -> KeyAnswer;
    /// Which set of keys NIC `i` has ([`unbroken_types::NicKey`]); 0 where keys are good on all
    /// NICs.
    fn key_set(&self, i: usize) -> u16;
    /// Whether a region that contexts of NIC `i` have made has another key on that NIC than they
    /// know it by: peers may name it by a key that is not good there.
    fn has_foreign_keys(&self, _i: usize) -> bool {
        false
    }
    /// Whether UD QPs can be moved.
    fn moves_datagrams(&self) -> bool;
    /// Where UD QPs are that have moved: the table that all these NICs translate by.
    fn aliases(&self) -> Arc<UdAliases>;
    /// Whether the counters of its NICs are in pages of the runtime folder, where everybody reads
    /// them.
    fn has_pages(&self) -> bool {
        true
    }
    /// The runtime folder.
    fn runtime(&self) -> PathBuf;
    /// Where NIC `i` is in the machine, if it is a device of the machine.
    fn place(&self, i: usize) -> Option<Place>;
}
