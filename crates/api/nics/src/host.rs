//! RDMA devices of the machine as a [`NicSet`]. They have plain verbs, so `resumable` supplies what
//! protection needs.

use crate::logical::Logical;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use unbroken_environment as environment;
use unbroken_hostnic::HostNics;
use unbroken_resumable::ResumableDevice;
use unbroken_runtime::Runtime;
use unbroken_shift::{NicSet, Place};
use unbroken_types::Gid;
use unbroken_verbs::{
    Capabilities, Device, DeviceAttr, EventSink, KeyAnswer, MemoryDomain, PortAttr, Result,
    UdAliases,
};

/// Begins the GIDs that stand for LIDs: of site-local addresses, which are out of use.
const LID_PREFIX: [u8; 2] = [0xfe, 0xc0];

struct Host {
    nics: Arc<HostNics>,
    runtime: PathBuf,
    /// The machine's name in events and status.
    name: String,
    logical: Logical,
    /// Programs have the devices as they are: nothing is supplied, and nothing hidden.
    bare: bool,
    aliases: Arc<UdAliases>,
}

/// The devices as a set of NICs. Unless they are `bare`, they get what protection needs and they
/// lack.
pub fn over(nics: Arc<HostNics>, runtime: &Runtime, bare: bool) -> Result<Box<dyn NicSet>> {
    if environment::flag(environment::DEVICE_FAULTS) {
        nics.take_faults(runtime)?;
    }
    let logical = Logical::new(nics.count());
    let runtime = runtime.path().to_path_buf();
    let (name, aliases) = (host_name(), Arc::default());
    Ok(Box::new(Host { nics, runtime, name, logical, bare, aliases }))
}

/// A GID that stands for a LID: a prefix that no port has, the subnet's prefix, the LID.
fn name_of_lid(subnet_prefix: u64, lid: u16) -> Gid {
    let mut gid = [0; 16];
    gid[..2].copy_from_slice(&LID_PREFIX);
    gid[2..10].copy_from_slice(&subnet_prefix.to_be_bytes());
    gid[14..].copy_from_slice(&lid.to_be_bytes());
    Gid(gid)
}

fn host_name() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    text.trim().to_owned()
}

impl NicSet for Host {
    fn count(&self) -> usize {
        self.nics.count()
    }

    fn name(&self, i: usize) -> String {
        self.nics.name(i).to_owned()
    }

    fn device_name(&self, i: usize) -> String {
        self.nics.name(i).to_owned()
    }

    fn host(&self) -> String {
        self.name.clone()
    }

    fn capabilities(&self, i: usize) -> Capabilities {
        match self.bare {
            true => self.nics.bare_capabilities(i),
            false => ResumableDevice::CAPABILITIES,
        }
    }

    fn gid(&self, i: usize) -> Gid {
        self.nics.gid(i)
    }

    fn address(&self, i: usize) -> Gid {
        self.nics.address(i)
    }

    fn follow(&self, i: usize, index: u8) -> bool {
        self.nics.follow(i, index)
    }

    fn registered_bytes(&self, i: usize) -> u64 {
        self.logical.memory().registered_bytes(i)
    }

    fn legs_down(&self, i: usize) -> Vec<String> {
        self.nics.legs_down(i)
    }

    /// Each NIC here has one port that QPs use.
    fn first_port(&self, gid: Gid) -> Gid {
        gid
    }

    fn gid_at(&self, i: usize, index: u8) -> Option<Gid> {
        self.nics.gid_at(i, index)
    }

    fn node_guid(&self, i: usize) -> u64 {
        self.nics.node_guid(i)
    }

    fn attr(&self, i: usize) -> DeviceAttr {
        let attr = self.nics.attr(i);
        if self.bare {
            attr
        } else {
            ResumableDevice::attr(&attr)
        }
    }

    fn port(&self, i: usize, port: u8, usable: bool) -> Result<PortAttr> {
        self.nics.port(i, port, usable)
    }

    /// Only the subnet manager knows the GID of a LID. So one is made of the prefix of the subnet and
    /// the port's first LID, under which peers enter their QPs, too. The LMC of a subnet's ports is
    /// taken to be that of our own port.
    fn gid_of_lid(&self, i: usize, lid: u16, global: Option<Gid>) -> Result<Gid> {
        if let Some(gid) = global.filter(|gid| *gid != Gid::default()) {
            return Ok(gid);
        }
        let first_lid = lid & !((1 << self.nics.lmc(i)) - 1);
        Ok(name_of_lid(self.nics.gid(i).subnet_prefix(), first_lid))
    }

    fn open(&self, i: usize, sink: Arc<dyn EventSink>) -> Result<Arc<dyn Device>> {
        match self.bare {
            true => self.nics.open(i, sink, true),
            false => self.logical.open(i, sink, |sink| self.nics.open(i, sink, false)),
        }
    }

    fn memory(&self, i: usize) -> Arc<dyn MemoryDomain> {
        self.logical.memory().of(i)
    }

    fn prepare(&self, on: Vec<Vec<usize>>) {
        self.logical.memory().prepare(on);
    }

    fn keys(&self, i: u8, rkey: u32) -> KeyAnswer {
        self.logical.memory().answer(i.into(), rkey)
    }

    fn key_set(&self, i: usize) -> u16 {
        self.logical.memory().key_set(i)
    }

    fn has_foreign_keys(&self, i: usize) -> bool {
        self.logical.memory().is_foreign(i)
    }

    fn moves_datagrams(&self) -> bool {
        false
    }

    fn has_pages(&self) -> bool {
        false
    }

    fn aliases(&self) -> Arc<UdAliases> {
        self.aliases.clone()
    }

    fn runtime(&self) -> PathBuf {
        self.runtime.clone()
    }

    fn place(&self, i: usize) -> Option<Place> {
        Place::of_device(&self.nics.sysfs(i).join("device"))
            .or_else(|| Place::of(Path::new("/sys"), &self.nics.interface(i)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_lid_is_of_its_subnet() {
        let default = Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2]).subnet_prefix();
        let name = name_of_lid(default, 0x1234);
        let text = std::net::Ipv6Addr::from(name.0).to_string();
        assert_eq!(text, "fec0:fe80::1234");
        assert_ne!(name, name_of_lid(default + 1, 0x1234));
        assert_ne!(name, name_of_lid(default, 0x1235));
    }
}
